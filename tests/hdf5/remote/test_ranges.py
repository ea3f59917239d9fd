"""The plan of requests: every piece lies whole in a range, and no more is fetched than was agreed."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.remote.ranges import RangePlan, coalesce, split_ranges

PIECES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=30)
GAPS = st.integers(0, 20)
LIMITS = st.integers(1, 120)


def plan_of(pieces: list[tuple[int, int]], max_gap: int, max_bytes: int) -> RangePlan:
    pairs = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    return coalesce(pairs[:, 0], pairs[:, 1], max_gap, max_bytes)


def drawn(plan: RangePlan) -> list[tuple[int, int]]:
    return list(zip(plan.starts.tolist(), plan.stops.tolist(), strict=True))


@given(PIECES, GAPS, LIMITS)
def test_every_piece_is_cut_out_of_its_range_as_it_stands_in_the_file(pieces, max_gap, max_bytes):
    file = np.arange(400)
    plan = plan_of(pieces, max_gap, max_bytes)
    ranges = [file[start:stop] for start, stop in drawn(plan)]
    for (offset, size), index, at in zip(pieces, plan.range_index, plan.range_offset, strict=True):
        if size == 0:
            assert index == -1
        else:
            assert ranges[index][at : at + size].tolist() == file[offset : offset + size].tolist()


@given(PIECES, GAPS, LIMITS)
def test_a_range_passes_the_limit_only_for_a_single_piece_that_does(pieces, max_gap, max_bytes):
    plan = plan_of(pieces, max_gap, max_bytes)
    for number, (start, stop) in enumerate(drawn(plan)):
        largest = max(size for (_, size), index in zip(pieces, plan.range_index, strict=True) if index == number)
        assert stop - start <= max(max_bytes, largest)


@given(PIECES, GAPS, LIMITS)
def test_nothing_is_fetched_but_the_pieces_and_small_gaps_between_them(pieces, max_gap, max_bytes):
    plan = plan_of(pieces, max_gap, max_bytes)
    for number, (start, stop) in enumerate(drawn(plan)):
        inside = sorted(
            piece for piece, index in zip(pieces, plan.range_index, strict=True) if index == number and piece[1]
        )
        reached = start
        for offset, size in inside:
            assert offset - reached <= max_gap
            reached = max(reached, offset + size)
        assert (inside[0][0], reached) == (start, stop)


@given(PIECES, GAPS, LIMITS)
def test_ranges_are_in_the_order_of_the_file_none_inside_another_and_two_neighbours_could_not_be_one(
    pieces, max_gap, max_bytes
):
    ranges = drawn(plan_of(pieces, max_gap, max_bytes))
    for ends in zip(*ranges, strict=True):
        assert list(ends) == sorted(set(ends))
    for (start, stop), (next_start, _) in itertools.pairwise(ranges):
        # The next piece was too far away, or would have passed the limit (a piece has up to 40 bytes).
        assert next_start - stop > max_gap or next_start + 40 - start > max_bytes


def test_pieces_that_touch_overlap_or_repeat_are_one_request():
    plan = plan_of([(10, 5), (0, 10), (10, 5), (12, 1)], 0, 100)
    assert drawn(plan) == [(0, 15)]
    assert plan.range_offset.tolist() == [10, 0, 10, 12]


def test_a_piece_inside_a_larger_one_than_the_limit_is_not_fetched_twice():
    assert drawn(plan_of([(0, 5), (0, 50), (20, 10)], 0, 10)) == [(0, 50)]


def test_a_gap_of_one_byte_more_than_allowed_makes_two_requests():
    assert drawn(plan_of([(0, 10), (14, 1)], 4, 100)) == [(0, 15)]
    assert drawn(plan_of([(0, 10), (15, 1)], 4, 100)) == [(0, 10), (15, 16)]


def test_negative_numbers_and_other_shapes_are_refused():
    one, two = np.array([1]), np.array([1, 2])
    with pytest.raises(ValueError, match=re.escape("offsets (1,) and sizes (2,); expected two vectors")):
        coalesce(one, two, 0, 1)
    with pytest.raises(ValueError, match="expected no negative number"):
        coalesce(-one, one, 0, 1)
    with pytest.raises(ValueError, match="expected no negative number"):
        coalesce(one, -one, 0, 1)


@given(PIECES, LIMITS)
def test_the_parts_of_a_range_make_it_up(pieces, max_bytes):
    starts = np.array([offset for offset, _ in pieces], dtype=np.int64)
    stops = np.array([offset + size for offset, size in pieces], dtype=np.int64)
    parts, first_part = split_ranges(starts, stops, max_bytes)
    assert all(0 < stop - start <= max_bytes for start, stop in parts)
    for number, (offset, size) in enumerate(pieces):
        here = parts[first_part[number] : first_part[number + 1]]
        assert [byte for start, stop in here for byte in range(start, stop)] == list(range(offset, offset + size))
