"""Whole blocks read and decoded in threads: what is read, how often, and what becomes of errors.

That samples are what h5py returns is shown in test_reader.py, for files of every kind.
"""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.layout import H5DatasetLayout, read_layout
from lightning_gpufeed.hdf5.readers.byte_file import LocalFile
from lightning_gpufeed.hdf5.readers.chunk_reader import ChunkReader, num_decode_threads
from lightning_gpufeed.hdf5.window import window_order

NUM_SAMPLES, ROWS, BYTES = 400, 10, 100
VALUES = np.random.default_rng(0).integers(0, 50, (NUM_SAMPLES, BYTES), dtype=np.uint8)
BLOCK_BYTES = ROWS * BYTES


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> H5DatasetLayout:
    path = tmp_path_factory.mktemp("chunks") / "data.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("x", data=VALUES, chunks=(ROWS, BYTES), compression="gzip")
    return read_layout(path, "x")


def read(reader: ChunkReader, indices: np.ndarray) -> np.ndarray:
    out = torch.zeros((len(indices), BYTES), dtype=torch.uint8)
    reader.read_into(np.asarray(indices, dtype=np.int64), out)
    return out.numpy()


def epoch(reader: ChunkReader, order: np.ndarray, batch_size: int = 16) -> None:
    """Read an epoch as a loader does, and compare every batch."""
    reader.expect(order, batch_size)
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        assert (read(reader, part) == VALUES[part]).all()


def test_a_window_decodes_each_chunk_once(layout):
    order = window_order(np.arange(NUM_SAMPLES) // ROWS, 80, 0, 0)
    with closing(ChunkReader([layout], buffer_bytes=1 << 20)) as reader:
        epoch(reader, order)
        assert reader.num_block_reads == NUM_SAMPLES // ROWS
        epoch(reader, order)
        assert reader.num_block_reads == 2 * NUM_SAMPLES // ROWS


def test_the_buffer_is_no_larger_than_the_window_needs(layout):
    order = window_order(np.arange(NUM_SAMPLES) // ROWS, 80, 0, 0)
    with closing(ChunkReader([layout], buffer_bytes=1 << 30)) as reader:
        epoch(reader, order)
        # The window, the chunk and the batch at hand, and what is read ahead.
        assert reader._arena.numel() <= (80 + 3 * ROWS + 16 + 2 * num_decode_threads() * ROWS) * BYTES


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(0, 2**32 - 1), st.integers(1, 70), st.booleans())
def test_any_order_is_read_right_with_a_buffer_of_any_size(layout, num_blocks, seed, batch_size, is_expected):
    order = np.random.default_rng(seed).integers(0, NUM_SAMPLES, 150)
    with closing(ChunkReader([layout], buffer_bytes=num_blocks * BLOCK_BYTES)) as reader:
        if is_expected:
            reader.expect(order)
        for first in range(0, len(order), batch_size):
            part = order[first : first + batch_size]
            assert (read(reader, part) == VALUES[part]).all()
        assert len(reader._arena) <= max(1, num_blocks)


def test_what_is_small_enough_is_decoded_once_for_all_epochs(layout):
    random = np.random.default_rng(0)
    with closing(ChunkReader([layout], buffer_bytes=0, cache_bytes=NUM_SAMPLES * BYTES)) as reader:
        for _ in range(3):
            epoch(reader, random.permutation(NUM_SAMPLES))
        assert reader.num_block_reads == NUM_SAMPLES // ROWS


def test_a_full_shuffle_in_a_small_buffer_keeps_what_is_needed_soonest(layout):
    order = np.random.default_rng(0).permutation(NUM_SAMPLES)
    with closing(ChunkReader([layout], buffer_bytes=20 * BLOCK_BYTES)) as reader:
        epoch(reader, order, batch_size=4)
        planned = reader.num_block_reads
    with closing(ChunkReader([layout], buffer_bytes=20 * BLOCK_BYTES)) as reader:
        for first in range(0, NUM_SAMPLES, 4):
            read(reader, order[first : first + 4])
        assert planned < 0.8 * reader.num_block_reads  # who does not know what comes lets go of the oldest


def test_other_samples_than_expected_are_read_all_the_same(layout):
    with closing(ChunkReader([layout], buffer_bytes=5 * BLOCK_BYTES)) as reader:
        reader.expect(np.arange(NUM_SAMPLES))
        for part in (np.arange(20), np.arange(300, 330), np.arange(20, 40)):
            assert (read(reader, part) == VALUES[part]).all()


def test_an_epoch_that_is_cut_short_does_not_disturb_the_next(layout):
    order = window_order(np.arange(NUM_SAMPLES) // ROWS, 80, 0, 0)
    with closing(ChunkReader([layout], buffer_bytes=1 << 20)) as reader:
        reader.expect(order)
        read(reader, order[:16])
        epoch(reader, order[::-1].copy())


def test_a_damaged_chunk_is_named_when_its_samples_are_needed(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("x", data=VALUES, chunks=(ROWS, BYTES), compression="gzip")
        place = h5_file["x"].id.get_chunk_info(7)
    with open(path, "r+b") as raw:
        raw.seek(place.byte_offset + 2)
        raw.write(b"\xff" * 40)
    damaged = read_layout(path, "x")
    with closing(ChunkReader([damaged], buffer_bytes=1 << 20)) as reader:
        reader.expect(np.arange(NUM_SAMPLES))
        assert (read(reader, np.arange(70)) == VALUES[:70]).all()
        with pytest.raises(FeedError, match=r"data\.h5: dataset 'x', samples 70 to 79 cannot be read: "):
            read(reader, np.arange(70, 80))
        # The others are still there.
        assert (read(reader, np.arange(80, 400)) == VALUES[80:]).all()


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("x", data=VALUES, chunks=(ROWS, BYTES), compression="gzip")
    with closing(ChunkReader([read_layout(path, "x")], buffer_bytes=1 << 20)) as reader:
        read(reader, np.arange(10))
        os.truncate(path, 4000)
        with pytest.raises(FeedError, match="became shorter while it was read"):
            read(reader, np.arange(300, 400))


def test_a_file_replaced_since_its_layout_was_read_is_refused(tmp_path, layout):
    path = Path(tmp_path / "data.h5")
    path.write_bytes(Path(layout.path).read_bytes())
    then = read_layout(path, "x")
    other = tmp_path / "other.h5"
    other.write_bytes(path.read_bytes())
    other.replace(path)
    with (
        closing(ChunkReader([then], buffer_bytes=0)) as reader,
        pytest.raises(FeedError, match="changed between reading its layout and opening it"),
    ):
        read(reader, np.arange(3))


def test_no_thread_is_left_behind(layout):
    before = set(threading.enumerate())
    reader = ChunkReader([layout], buffer_bytes=1 << 20)
    reader.expect(np.arange(NUM_SAMPLES))
    read(reader, np.arange(50))
    reader.close()
    assert set(threading.enumerate()) == before
    reader.close()
    with pytest.raises(FeedError, match="the reader is closed"):
        read(reader, np.arange(3))


def test_blocks_that_cannot_be_read_do_not_use_up_the_buffer(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("x", data=VALUES, chunks=(ROWS, BYTES), compression="gzip")
        place = h5_file["x"].id.get_chunk_info(7)
    with open(path, "r+b") as raw:
        raw.seek(place.byte_offset + 2)
        raw.write(b"\xff" * 40)
    with closing(ChunkReader([read_layout(path, "x")], buffer_bytes=BLOCK_BYTES)) as reader:
        for _ in range(3):
            with pytest.raises(FeedError, match="samples 70 to 79 cannot be read"):
                read(reader, np.arange(72, 75))
            assert (read(reader, np.arange(3)) == VALUES[:3]).all()


def test_a_closed_reader_keeps_no_file_open_and_starts_no_thread(layout):
    before = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    reader = ChunkReader([layout], buffer_bytes=1 << 20)
    reader.expect(np.arange(NUM_SAMPLES))
    read(reader, np.arange(50))
    reader.close()
    reader.expect(np.arange(NUM_SAMPLES))
    assert (set(threading.enumerate()), set(os.listdir("/proc/self/fd"))) == before
    assert reader._arena.numel() == 0


def test_resting_ends_the_threads_and_reading_goes_on(layout):
    before = set(threading.enumerate())
    with closing(ChunkReader([layout], buffer_bytes=1 << 20)) as reader:
        reader.expect(np.arange(NUM_SAMPLES))
        read(reader, np.arange(16))
        assert set(threading.enumerate()) != before
        reader.rest()
        assert set(threading.enumerate()) == before
        assert (read(reader, np.arange(16, 60)) == VALUES[16:60]).all()
        assert set(threading.enumerate()) == before
        epoch(reader, np.arange(NUM_SAMPLES))


def test_a_new_epoch_waits_for_what_the_last_one_still_writes(layout):
    log: list[str] = []
    started, gate = threading.Event(), threading.Event()

    class Slow(LocalFile):
        def read_into(self, offset: int, out: memoryview) -> None:
            super().read_into(offset, out)
            started.set()
            if not gate.wait(0.1):  # time to go wrong
                log.append("written")

    with closing(
        ChunkReader([layout], buffer_bytes=1 << 20, num_threads=1, open_file=lambda one: Slow(one.storage_stamp))
    ) as reader:
        reader.expect(np.arange(ROWS))
        assert started.wait(20)
        reader.expect(np.arange(100, 100 + ROWS))
        log.append("next epoch")
        gate.set()
        assert (read(reader, np.arange(100, 100 + ROWS)) == VALUES[100 : 100 + ROWS]).all()
    assert log[:2] == ["written", "next epoch"]
