"""Blocks: which samples lie in which, through files of different chunks, and what is read for one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.access import FileStamp
from lightning_gpufeed.hdf5.layout import H5DatasetLayout, read_layout
from lightning_gpufeed.hdf5.readers.byte_file import ByteFile, LocalFile
from lightning_gpufeed.hdf5.readers.row_blocks import BlockLoader, BlockNumbers, block_rows

GARBAGE = 0xA5


@pytest.fixture
def layout_of(tmp_path: Path) -> Callable[..., H5DatasetLayout]:
    numbers = iter(range(100))

    def layout_of(**create: Any) -> H5DatasetLayout:
        path = tmp_path / f"{next(numbers)}.h5"
        with h5py.File(path, "w") as h5_file:
            h5_file.create_dataset("x", **create)
        return read_layout(path, "x")

    return layout_of


def open_local(layout: H5DatasetLayout) -> ByteFile:
    assert isinstance(layout.storage_stamp, FileStamp)
    return LocalFile(layout.storage_stamp)


def values_of(layout: H5DatasetLayout) -> np.ndarray:
    with h5py.File(layout.path) as h5_file:
        return np.asarray(h5_file[layout.key][()])


def check_blocks(layout: H5DatasetLayout, order: list[int] | None = None) -> None:
    """Each block holds its samples as h5py reads them, and nothing is written behind a full block."""
    expected, rows = values_of(layout), block_rows(layout)
    num_bytes = rows * layout.sample_bytes
    with closing(BlockLoader(layout, open_local)) as loader:
        assert loader.num_blocks == -(-len(expected) // rows)
        for block in range(loader.num_blocks) if order is None else order:
            out = np.full(num_bytes + 16, GARBAGE, np.uint8)
            loader.load(block, out)
            samples = expected[block * rows : (block + 1) * rows]
            assert out[: samples.nbytes].tobytes() == samples.tobytes(), block
            assert (out[num_bytes:] == GARBAGE).all(), block


def test_a_block_is_a_row_of_the_chunk_grid_or_about_a_megabyte(layout_of):
    assert block_rows(layout_of(shape=(10, 6), dtype="u1", chunks=(3, 2))) == 3
    assert block_rows(layout_of(shape=(5000, 1000), dtype="u1")) == 1048
    assert block_rows(layout_of(shape=(7, 1000), dtype="u1")) == 7
    assert block_rows(layout_of(shape=(3, 3 << 20), dtype="u1")) == 1
    assert block_rows(layout_of(shape=(3, 0), dtype="u1")) == 3


def test_blocks_are_counted_through_files_of_different_chunks(layout_of):
    sizes = [(10, 3), (4, 4), (7, 2), (1, 5)]
    layouts = [layout_of(data=np.zeros((n, 2), np.uint8), chunks=(rows, 2), maxshape=(None, 2)) for n, rows in sizes]
    numbers = BlockNumbers.of(layouts)
    expected = []
    first_sample = 0
    first_block = 0
    for n, rows in sizes:
        expected += [(first_block + row // rows, row % rows, first_sample + row // rows * rows) for row in range(n)]
        first_sample, first_block = first_sample + n, first_block - (-n // rows)
    order = np.random.default_rng(0).permutation(len(expected))
    blocks, rows_inside = numbers.locate(order)
    assert list(zip(blocks.tolist(), rows_inside.tolist(), strict=True)) == [expected[i][:2] for i in order]
    assert [numbers.first_sample_of(block) for block in blocks.tolist()] == [expected[i][2] for i in order]
    assert (int(numbers.first_sample[-1]), int(numbers.first_block[-1])) == (first_sample, first_block)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1000, shape, dtype=np.int32)


@pytest.mark.parametrize(
    "create",
    [
        {"data": numbers(11, 6), "chunks": (3, 6)},
        {"data": numbers(11, 6), "chunks": (3, 6), "compression": "gzip"},
        {"data": numbers(11, 6, 5), "chunks": (3, 4, 2)},
        {"data": numbers(11, 6, 5), "chunks": (3, 4, 2), "compression": "gzip", "shuffle": True},
        {"data": numbers(11, 70_000)},
        {"data": numbers(2, 700_000)},
    ],
    ids=["plain", "gzip", "split", "split gzip", "no chunks", "large samples"],
)
def test_blocks_hold_what_h5py_reads(layout_of, create):
    layout = layout_of(**create)
    check_blocks(layout)
    check_blocks(layout, [block_rows(layout) // 11, *reversed(range(-(-len(create["data"]) // block_rows(layout))))])


@pytest.mark.parametrize("chunks", [(3, 6), (3, 4), None], ids=str)
def test_what_was_never_written_is_the_fill_value(tmp_path, chunks):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5_file:
        h5_dataset = h5_file.create_dataset("x", (10, 6), "i4", chunks=chunks, fillvalue=7)
        if chunks is not None:
            h5_dataset[3:6, :4] = 1
    check_blocks(read_layout(path, "x"))


def test_filters_left_out_for_a_chunk_are_left_out(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5_file:
        h5_dataset = h5_file.create_dataset("x", (6, 4), "i4", chunks=(2, 4), compression="gzip", shuffle=True)
        h5_dataset[:] = numbers(6, 4)
        h5_dataset.id.write_direct_chunk((2, 0), numbers(2, 4).tobytes(), filter_mask=0b11)
    check_blocks(read_layout(path, "x"))


def test_chunks_of_growing_stored_size_are_read_after_each_other(layout_of):
    values = np.zeros((12, 400), np.uint8)
    values[4:] = np.random.default_rng(0).integers(0, 4, (8, 400))
    values[8:] = np.random.default_rng(0).integers(0, 256, (4, 400))
    layout = layout_of(data=values, chunks=(4, 400), compression="gzip")
    assert layout.index is not None
    assert (np.diff(layout.index.stored_bytes) > 0).all()
    check_blocks(layout, [0, 1, 2, 1, 0])


@pytest.mark.parametrize(
    ("create", "block", "text"),
    [
        ({"chunks": (4, 100)}, 1, "samples 4 to 7"),
        ({"chunks": (4, 100)}, 2, "samples 8 to 9"),
        ({"chunks": (4, 30)}, 2, "samples 8 to 9"),
        ({}, 0, "samples 0 to 9"),
    ],
    ids=["middle", "last", "split", "no chunks"],
)
def test_an_error_names_the_samples_that_cannot_be_read(layout_of, create, block, text):
    layout = layout_of(data=np.ones((10, 100), np.uint8), **create)
    with closing(BlockLoader(layout, open_local)) as loader:
        out = np.zeros(block_rows(layout) * 100, np.uint8)
        loader.load(0, out)
        os.truncate(layout.path, 100)
        with pytest.raises(FeedError) as error:
            loader.load(block, out)
    start = f"{layout.path}: dataset 'x', {text} cannot be read: {layout.path} became shorter while it was read"
    assert str(error.value).startswith(start)


class NotedFile(LocalFile):
    """A file that notes when it is opened and closed."""

    def __init__(self, stamp: FileStamp, log: list[str]) -> None:
        super().__init__(stamp)
        self._log = log
        log.append("open")

    def close(self) -> None:
        super().close()
        self._log.append("close")


def test_the_file_is_opened_at_the_first_read_and_once_for_all_threads(layout_of):
    layout = layout_of(data=numbers(60, 8), chunks=(3, 8), compression="gzip")
    expected = values_of(layout)
    log: list[str] = []
    loader = BlockLoader(layout, lambda one: NotedFile(one.storage_stamp, log))  # type: ignore[arg-type]
    assert log == []
    barrier, wrong = threading.Barrier(4), []

    def load_all(first: int) -> None:
        barrier.wait()
        for block in range(first, 20, 4):
            out = np.zeros(3 * 8 * 4, np.uint8)
            loader.load(block, out)
            if out.tobytes() != expected[block * 3 : block * 3 + 3].tobytes():
                wrong.append(block)

    threads = [threading.Thread(target=load_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert log == ["open"]
    loader.close()
    loader.close()
    assert log == ["open", "close"]
    loader.load(0, np.zeros(3 * 8 * 4, np.uint8))
    assert log == ["open", "close", "open"]
    loader.close()


@pytest.mark.parametrize(
    "create", [{"chunks": (4, 6)}, {"chunks": None}, {"chunks": (4, 6), "fletcher32": True}], ids=str
)
def test_rows_that_lie_as_they_are_are_read_to_where_they_are_wanted(layout_of, create):
    layout = layout_of(data=numbers(10, 6), **create)
    expected, rows = values_of(layout), block_rows(layout)
    with closing(BlockLoader(layout, open_local)) as loader:
        for block in range(loader.num_blocks):
            loader.will_load(block)
            samples = expected[block * rows : (block + 1) * rows]
            outs = [np.full(samples[0].nbytes * n, GARBAGE, np.uint8) for n in (1, len(samples) - 1)]
            is_read = loader.load_rows(block, [memoryview(out) for out in outs])
            assert is_read == ("fletcher32" not in create)
            whole = b"".join(out.tobytes() for out in outs)
            assert whole == (samples.tobytes() if is_read else bytes([GARBAGE]) * samples.nbytes)


def test_rows_that_are_in_several_chunks_or_nowhere_are_left_to_be_put_together(layout_of):
    for layout in [
        layout_of(data=numbers(6, 8), chunks=(3, 4)),
        layout_of(shape=(6, 8), dtype="u4", chunks=(3, 8), fillvalue=7),
        layout_of(shape=(6, 8), dtype="u4", fillvalue=7),
    ]:
        with closing(BlockLoader(layout, open_local)) as loader:
            loader.will_load(0)
            assert not loader.load_rows(0, [memoryview(bytearray(layout.sample_bytes))])


def test_rows_that_cannot_be_read_are_named(layout_of):
    layout = layout_of(data=numbers(6, 8), chunks=(3, 8))
    with closing(BlockLoader(layout, open_local)) as loader:
        assert loader.load_rows(0, [memoryview(bytearray(layout.sample_bytes))])
        os.truncate(layout.path, int(layout.block_offsets[1]) + 5)
        with pytest.raises(FeedError, match=r"dataset 'x', samples 3 to 5 cannot be read: .* became shorter"):
            loader.load_rows(1, [memoryview(bytearray(layout.sample_bytes))])


class MeetingFile(LocalFile):
    """A file whose readers wait until there are two of them, the bytes being there."""

    barrier = threading.Barrier(2)

    def read_into(self, offset: int, out: memoryview) -> None:
        super().read_into(offset, out)
        self.barrier.wait(20)


@pytest.mark.parametrize("chunks", [(3, 8), (3, 4)], ids=["whole", "split"])
def test_two_threads_decode_in_memory_of_their_own(layout_of, chunks):
    layout = layout_of(data=numbers(6, 8), chunks=chunks, compression="gzip")
    expected = values_of(layout)
    outs = [np.zeros(3 * 8 * 4, np.uint8) for _ in range(2)]
    with closing(BlockLoader(layout, lambda one: MeetingFile(one.storage_stamp))) as loader:  # type: ignore[arg-type]
        threads = [threading.Thread(target=loader.load, args=(block, outs[block])) for block in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for block, out in enumerate(outs):
        assert out.tobytes() == expected[3 * block : 3 * block + 3].tobytes()
