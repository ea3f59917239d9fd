"""From sample numbers to places: every index lands in its slot, from the right row of the right file."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.plan import GatherTable, plan_block_reads


@st.composite
def files_and_indices(draw: st.DrawFn) -> tuple[list[int], list[int], np.ndarray]:
    """Samples per file (some files empty), rows per block in each, and wanted samples with repeats."""
    num_samples = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any))
    block_rows = draw(st.lists(st.integers(1, 40), min_size=len(num_samples), max_size=len(num_samples)))
    wanted = draw(st.lists(st.integers(0, sum(num_samples) - 1), max_size=60))
    return num_samples, block_rows, np.array(wanted, dtype=np.int64)


def file_and_row(num_samples: list[int], index: int) -> tuple[int, int]:
    """The slow and obvious way to find a sample."""
    for file_index, count in enumerate(num_samples):
        if index < count:
            return file_index, index
        index -= count
    raise IndexError


@settings(max_examples=200)
@given(files_and_indices())
def test_every_index_is_read_once_into_its_own_slot(case):
    num_samples, block_rows, indices = case
    reads = plan_block_reads(indices, num_samples, block_rows)
    found: dict[int, tuple[int, int]] = {}
    for read in reads:
        assert len(read.rows) == len(read.slots) > 0
        for row, slot in zip(read.rows.tolist(), read.slots.tolist(), strict=True):
            assert 0 <= row < read.stop_row - read.start_row
            assert slot not in found
            found[slot] = (read.file_index, read.start_row + row)
    assert [found[slot] for slot in range(len(indices))] == [file_and_row(num_samples, i) for i in indices.tolist()]


@settings(max_examples=200)
@given(files_and_indices())
def test_every_block_is_whole_read_once_and_in_the_order_of_the_files(case):
    num_samples, block_rows, indices = case
    reads = plan_block_reads(indices, num_samples, block_rows)
    places = [(read.file_index, read.start_row) for read in reads]
    assert places == sorted(set(places))
    for read in reads:
        rows, count = block_rows[read.file_index], num_samples[read.file_index]
        assert read.start_row % rows == 0
        assert read.stop_row == min(read.start_row + rows, count)


@settings(max_examples=200)
@given(files_and_indices(), st.integers(1, 50), st.randoms(use_true_random=False))
def test_the_table_of_several_files_gives_each_sample_its_position(case, sample_bytes, random):
    num_samples, block_rows, indices = case
    blocks = []
    for count, rows in zip(num_samples, block_rows, strict=True):
        num_blocks = -(-count // rows)
        blocks.append(np.array([random.choice([-1, random.randrange(10**12)]) for _ in range(num_blocks)], np.int64))
    table = GatherTable.build(num_samples, block_rows, blocks, sample_bytes)
    expected = []
    for index in indices.tolist():
        file_index, row = file_and_row(num_samples, index)
        block, row_in_block = divmod(row, block_rows[file_index])
        base = int(blocks[file_index][block])
        expected.append(-1 if base < 0 else base + row_in_block * sample_bytes)
    positions = table.positions(indices)
    assert positions.dtype == np.int64
    assert positions.tolist() == expected


def test_no_index_needs_no_read():
    assert plan_block_reads(np.array([], dtype=np.int64), [10], [3]) == []


def test_a_small_plan_reads_like_its_docstring():
    # Files of 5 and 4 samples in blocks of 2 and 3 rows; sample 8 is row 3 of the second file, in its second block.
    reads = plan_block_reads(np.array([8, 0, 1, 8]), [5, 4], [2, 3])
    assert [(r.file_index, r.start_row, r.stop_row, r.rows.tolist(), r.slots.tolist()) for r in reads] == [
        (0, 0, 2, [0, 1], [1, 2]),
        (1, 3, 4, [0, 0], [0, 3]),
    ]


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_positions_beyond_four_gigabytes_do_not_wrap(num_blocks):
    base = np.arange(num_blocks, dtype=np.int64) * 5 * 2**32
    table = GatherTable.build([num_blocks * 10**6], [10**6], [base], 10**4)
    last = table.positions(np.array([num_blocks * 10**6 - 1]))
    assert last.tolist() == [int(base[-1]) + (10**6 - 1) * 10**4]
