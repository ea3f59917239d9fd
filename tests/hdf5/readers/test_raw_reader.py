"""By which way uncompressed samples are read, and that they are the same by each.

What each way returns for files of every kind is compared with h5py in test_reader.py.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.layout import read_layout
from lightning_gpufeed.hdf5.readers import raw_reader
from lightning_gpufeed.hdf5.readers.raw_reader import RawReader, Way, choose_way
from lightning_gpufeed.hdf5.residency import cached_share
from lightning_gpufeed.hdf5.window import window_order

NUM_SAMPLES, ROWS, BYTES = 512, 8, 12_288
VALUES = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, BYTES), dtype=np.uint8)


@pytest.mark.parametrize(
    ("share", "may_map", "fits_buffer", "way"),
    [
        (1.0, True, True, Way.GATHER),
        (0.95, True, False, Way.GATHER),
        (None, True, True, Way.GATHER),
        (0.3, True, True, Way.BLOCKS),
        (0.3, True, False, Way.READS),
        (0.0, False, True, Way.BLOCKS),
        (None, False, True, Way.BLOCKS),
        (None, False, False, Way.READS),
        (1.0, False, True, Way.READS),
    ],
)
def test_the_way_follows_from_where_the_file_is(share, may_map, fits_buffer, way):
    assert choose_way(share, may_map=may_map, fits_buffer=fits_buffer) is way


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        h5_file.create_dataset("x", data=VALUES, chunks=(ROWS, BYTES))
    return tmp_path / "data.h5"


def evict(path: Path) -> None:
    """Have the kernel forget the file; skips where it does not."""
    with open(path, "rb") as raw:
        os.fsync(raw.fileno())
        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = cached_share(read_layout(path, "x"))
    if share is None or share > 0.5:
        pytest.skip("this file system keeps its files in memory")


def epoch(reader: RawReader, order: np.ndarray, batch_size: int = 64) -> None:
    reader.expect(order, batch_size)
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        out = torch.zeros((len(part), BYTES), dtype=torch.uint8)
        reader.read_into(part, out)
        assert (out.numpy() == VALUES[part]).all()


def test_a_file_on_the_disk_is_read_ahead_and_gathered_once_it_is_in_memory(path):
    lines: list[str] = []
    order = np.random.default_rng(0).permutation(NUM_SAMPLES)
    with closing(RawReader([read_layout(path, "x")], buffer_bytes=1 << 30, on_way=lines.append)) as reader:
        for _ in range(5):  # asking brings a small file back into memory, on a busy machine before the reader asks too
            evict(path)
            epoch(reader, order)
            if reader.way is Way.BLOCKS:
                break
        assert reader.way is Way.BLOCKS
        epoch(reader, order)
        assert reader.way is Way.GATHER
        epoch(reader, order)
    assert len(lines) == 2
    assert lines[0].startswith("x: ")
    assert lines[0].endswith(" % of it is in memory: whole blocks are read, each once, by several threads")
    assert lines[1].endswith(" % of it is in memory: gathered from the mapped file")


@pytest.mark.parametrize("kind", ["full", "window"])
def test_what_does_not_fit_into_the_buffer_is_read_sample_by_sample(path, kind, monkeypatch):
    # That a file on the disk is known for one is shown above; here it is small, and soon back in memory.
    monkeypatch.setattr(raw_reader, "_share_in_memory", lambda layouts: 0.3)
    groups = np.arange(NUM_SAMPLES) // ROWS
    order = np.random.default_rng(1).permutation(NUM_SAMPLES) if kind == "full" else window_order(groups, 32, 0, 0)
    with closing(RawReader([read_layout(path, "x")], buffer_bytes=20 * ROWS * BYTES)) as reader:
        epoch(reader, order, batch_size=16)
        assert reader.way is (Way.READS if kind == "full" else Way.BLOCKS)


def test_a_file_of_a_network_is_never_mapped(path, monkeypatch):
    # No network file system can be had in a test; what the machine says of its mounts is tested in test_file_system.py.
    monkeypatch.setattr(raw_reader, "is_network", lambda path: True)
    with closing(RawReader([read_layout(path, "x")], buffer_bytes=1 << 30)) as reader:
        assert reader.way is Way.READS
        epoch(reader, np.arange(NUM_SAMPLES))
        assert reader.way is not Way.GATHER


def test_a_closed_reader_says_so(path):
    reader = RawReader([read_layout(path, "x")], buffer_bytes=1 << 30)
    reader.close()
    reader.close()
    reader.expect(np.arange(3))
    with pytest.raises(FeedError, match="the reader is closed"):
        reader.read_into(np.arange(3), torch.zeros((3, BYTES), dtype=torch.uint8))


def test_what_is_in_play_has_to_fit_into_the_buffer(path):
    layouts = [read_layout(path, "x")]
    # In order, a block at a time: as many samples are kept as a block has.
    for buffer_bytes, fits in ((ROWS * BYTES, True), (ROWS * BYTES - 1, False)):
        with closing(RawReader(layouts, buffer_bytes=buffer_bytes)) as reader:
            assert reader._fits_buffer(np.arange(NUM_SAMPLES), ROWS) is fits
