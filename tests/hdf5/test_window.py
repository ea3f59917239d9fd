"""The order of a window shuffle over chunks, for one rank and for several."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.order import EpochPlan
from lightning_gpufeed.hdf5.readers.chunk_plan import SamplePlan
from lightning_gpufeed.hdf5.window import Lanes, grouping_digest, rolling_order, window_order


def of_ranks(order: np.ndarray, plan: EpochPlan) -> list[np.ndarray]:
    """What each rank uses, in order."""
    steps = range(plan.num_steps)
    return [
        np.concatenate([order[slice(*plan.rank_bounds(step, rank))] for step in steps])
        for rank in range(plan.world_size)
    ]


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=200),
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
    st.integers(1, 5),
    st.integers(1, 30),
)
def test_every_sample_comes_once_whatever_the_chunks_and_the_ranks(groups, window, seed, epoch, lanes, lane_samples):
    lanes = min(lanes, len(groups))
    order = window_order(np.array(groups), window, seed, epoch, Lanes(lanes, lane_samples))
    assert sorted(order.tolist()) == list(range(len(groups)))


def test_the_order_is_the_same_on_every_machine():
    groups = np.arange(12) // 3
    assert [window_order(groups, 4, 0, epoch).tolist() for epoch in (0, 1)] == EXPECTED


# Written down once: a saved position means this order.
EXPECTED = [
    [11, 10, 9, 0, 3, 2, 4, 7, 6, 1, 8, 5],
    [3, 8, 4, 0, 6, 2, 1, 9, 5, 10, 7, 11],
]


def test_a_window_of_one_keeps_each_chunk_together_and_mixes_the_chunks():
    order = window_order(np.arange(60) // 6, 1, 3, 0)
    chunks = order.reshape(10, 6) // 6
    assert (chunks == chunks[:, :1]).all()
    assert (order.reshape(10, 6) % 6 == np.arange(6)).all()
    assert chunks[:, 0].tolist() != list(range(10))


def test_each_epoch_has_another_order_of_the_chunks():
    orders = [tuple(window_order(np.arange(80) // 4, 1, 0, epoch).tolist()) for epoch in range(6)]
    assert len(set(orders)) == 6


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 99))
def test_no_more_samples_are_kept_than_the_window_and_one_chunk(rows, window, seed):
    groups = np.arange(600) // rows
    order = window_order(groups, window, seed, 0)
    # The buffer is filled before the first sample is used, chunk by chunk.
    assert SamplePlan.of(order, groups[order]).most_kept() <= window + 2 * rows


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 99))
def test_the_order_is_that_of_a_buffer_that_is_stepped_through(num_samples, window, seed):
    bits = np.random.PCG64(seed).random_raw(num_samples)
    slots = list(range(min(window, num_samples)))
    expected = []
    for number in range(num_samples - len(slots)):
        pick = int((int(bits[number]) >> 11) * 2.0**-53 * len(slots))
        expected.append(slots[pick])
        slots[pick] = len(slots) + number
    left = bits[len(expected) :]
    expected += [slots[place] for place in sorted(range(len(slots)), key=lambda place: int(left[place]))]
    assert rolling_order(num_samples, window, bits).tolist() == expected


@pytest.mark.parametrize(("num_samples", "batch_size", "world_size"), [(600, 10, 2), (601, 7, 3), (605, 50, 4)])
def test_ranks_meet_chunks_of_their_own(num_samples, batch_size, world_size):
    groups = np.arange(num_samples) // 5
    plan = EpochPlan(num_samples, batch_size, world_size)
    order = window_order(groups, 30, 1, 0, Lanes(world_size, batch_size))
    seen = [set(groups[samples].tolist()) for samples in of_ranks(order, plan)]
    # At each border between two ranks a chunk may be cut in two.
    assert sum(map(len, seen)) <= len(set(groups.tolist())) + world_size - 1
    mixed = window_order(groups, 30, 1, 0)
    assert sum(len(set(groups[samples].tolist())) for samples in of_ranks(mixed, plan)) > 1.3 * len(
        set(groups.tolist())
    )


def test_the_digest_tells_where_chunks_begin_and_not_how_they_are_counted():
    assert grouping_digest(np.array([0, 0, 1, 1])) == grouping_digest(np.array([7, 7, 9, 9]))
    assert grouping_digest(np.array([0, 0, 1, 1])) != grouping_digest(np.array([0, 1, 1, 1]))


def test_the_order_of_several_ranks_is_the_same_on_every_machine():
    # The thirteenth sample is less than one for each rank, and joins the step before, as `EpochPlan` has it.
    order = window_order(np.arange(13) // 3, 4, 0, 0, Lanes(2, 3))
    assert order.tolist() == EXPECTED_LANES
    plan = EpochPlan(13, 3, 2)
    first, second = of_ranks(order, plan)
    alone = np.argsort(window_order(np.arange(13) // 3, 1, 0, 0))
    # The chunks in their order are cut in two: each rank has one half.
    assert sorted(alone[first].tolist()) == list(range(7))
    assert sorted(alone[second].tolist()) == list(range(7, 13))


# Written down once: a saved position means this order.
EXPECTED_LANES = [10, 9, 12, 2, 7, 8, 5, 11, 4, 3, 1, 6, 0]
