"""Where chunks lie: what an index says of files that are not written in full, cut smaller, or partly unfiltered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_gpufeed.hdf5.chunk_index import (
    ChunkIndex,
    chunk_grid,
    grows_sideways,
    has_plain_edge_chunk,
    read_chunk_index,
)


def index_of(offsets: list[int], stored_bytes: list[int], filter_masks: list[int] | None = None) -> ChunkIndex:
    masks = np.zeros(len(offsets), np.uint32) if filter_masks is None else np.array(filter_masks, np.uint32)
    return ChunkIndex(np.array(offsets), np.array(stored_bytes), masks)


@pytest.fixture
def h5_file(tmp_path: Path) -> Any:
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        yield h5_file


def test_a_grid_counts_chunks_that_are_partly_filled():
    assert chunk_grid((8, 5, 1), (4, 2, 3)) == (2, 3, 1)
    assert chunk_grid((0, 5), (4, 5)) == (0, 1)


@pytest.mark.parametrize(
    ("index", "is_plain"),
    [
        (index_of([100, 140], [40, 40]), True),
        (index_of([100, -1], [40, 0]), True),
        (index_of([-1, -1], [0, 0]), True),
        (index_of([100, 140], [40, 39]), False),
        (index_of([100, 140], [40, 40], [0, 1]), False),
    ],
    ids=["full", "one unwritten", "all unwritten", "smaller", "filter left out"],
)
def test_written_chunks_of_full_size_with_every_filter_are_plain(index, is_plain):
    assert index.is_plain(40) is is_plain


def test_the_end_is_that_of_the_chunk_that_lies_last():
    assert index_of([300, 100, -1], [10, 50, 0]).end == 310
    assert index_of([100, 120], [50, 10]).end == 150
    assert index_of([-1], [0]).end == 0


def test_every_chunk_is_found_where_hdf5_says(h5_file):
    h5_dataset = h5_file.create_dataset("x", data=np.arange(70).reshape(10, 7), chunks=(3, 4), compression="gzip")
    index = read_chunk_index(h5_dataset, is_chunked=True)
    assert len(index.offsets) == 8
    for row in range(4):
        for column in range(2):
            place = h5_dataset.id.get_chunk_info_by_coord((3 * row, 4 * column))
            number = 2 * row + column
            assert (index.offsets[number], index.stored_bytes[number]) == (place.byte_offset, place.size)


def test_filters_left_out_are_noted_for_the_chunk_alone(h5_file):
    h5_dataset = h5_file.create_dataset("x", (6, 4), "u1", chunks=(2, 4), compression="gzip", shuffle=True)
    h5_dataset[:2] = 1
    h5_dataset.id.write_direct_chunk((2, 0), bytes(8), filter_mask=0b11)
    h5_dataset.id.write_direct_chunk((4, 0), bytes(8), filter_mask=0b10)
    index = read_chunk_index(h5_dataset, is_chunked=True)
    assert index.filter_masks.tolist() == [0, 0b11, 0b10]
    assert index.filter_masks.dtype == np.uint32


def test_chunks_that_were_cut_off_do_not_count(h5_file):
    h5_dataset = h5_file.create_dataset("x", (9, 6), "u1", chunks=(2, 3), maxshape=(None, None))
    h5_dataset[:] = np.arange(54).reshape(9, 6)
    h5_dataset.resize((3, 2))
    index = read_chunk_index(h5_dataset, is_chunked=True)
    assert index.offsets.shape == (2,)
    for number in range(2):
        assert index.offsets[number] == h5_dataset.id.get_chunk_info_by_coord((2 * number, 0)).byte_offset


def test_a_dataset_without_chunks_is_one_entry(h5_file):
    written = read_chunk_index(h5_file.create_dataset("x", data=np.arange(10, dtype="u1")), is_chunked=False)
    assert (written.offsets.tolist(), written.stored_bytes.tolist()) == ([h5_file["x"].id.get_offset()], [10])
    unwritten = read_chunk_index(h5_file.create_dataset("y", (10,), "u1"), is_chunked=False)
    assert (unwritten.offsets.tolist(), unwritten.stored_bytes.tolist()) == ([-1], [0])


@pytest.mark.parametrize(
    ("maxshape", "is_sideways"),
    [((None, 4), False), ((6, None), True), ((None, None), False), ((6, 4), False), ((9, 4), False)],
    ids=str,
)
def test_growth_along_another_axis_than_the_first_alone_is_told(h5_file, maxshape, is_sideways):
    h5_dataset = h5_file.create_dataset("x", (6, 4), "u1", chunks=(2, 4), maxshape=maxshape)
    assert grows_sideways(h5_dataset) is is_sideways


def test_a_dataset_without_chunks_does_not_grow(h5_file):
    assert not grows_sideways(h5_file.create_dataset("x", (6, 4), "u1"))


FULL, PACKED = 6, 5
"""Bytes of a chunk (2, 3) of uint8, as it is and compressed."""


@pytest.mark.parametrize(
    ("shape", "stored_bytes", "masks", "expected"),
    [
        ((4, 6), [FULL, FULL, FULL, FULL], [0, 0, 0, 0], False),  # no chunk goes over an edge
        ((3, 6), [PACKED, PACKED, FULL, PACKED], [0, 0, 0, 0], True),
        ((3, 6), [FULL, PACKED, PACKED, PACKED], [0, 0, 0, 0], False),
        ((3, 6), [PACKED, PACKED, FULL, PACKED], [0, 0, 1, 0], False),  # its mask says that it is unfiltered
        ((4, 5), [PACKED, FULL, PACKED, PACKED], [0, 0, 0, 0], True),
    ],
    ids=["no edge", "below", "inside", "masked", "beside"],
)
def test_an_edge_chunk_of_the_size_of_unfiltered_data_is_found(h5_file, shape, stored_bytes, masks, expected):
    h5_dataset = h5_file.create_dataset("x", shape, "u1", chunks=(2, 3), compression="gzip")
    index = index_of([100, 200, 300, 400], stored_bytes, masks)
    assert has_plain_edge_chunk(h5_dataset, index) is expected
