"""The order of an epoch: of chosen samples, for each rank, and what a saved position says of a window."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.epoch_order import EpochOrder, resumed_lanes, window_state
from lightning_gpufeed.hdf5.order import EpochPlan, FullShuffle, NoShuffle, WindowShuffle
from lightning_gpufeed.hdf5.window import ONE_LANE, Lanes, window_order
from tests.contracts import exactly, joined

CHOSEN = np.array([40, 10, 30, 20, 50, 70, 60])
GROUPS = np.arange(24) // 4


def test_chosen_samples_come_under_their_own_numbers():
    assert EpochOrder(NoShuffle(), 7, 0, CHOSEN).of(0).tolist() == CHOSEN.tolist()
    order = EpochOrder(FullShuffle(), 7, 3, CHOSEN).of(2)
    assert order.tolist() == CHOSEN[FullShuffle().permutation(7, 3, 2)].tolist()


def test_chosen_samples_are_mixed_by_a_window_over_their_own_chunks():
    groups = np.array([4, 1, 3, 2, 5, 7, 6])
    order = EpochOrder(WindowShuffle(3), 7, 3, CHOSEN, groups).of(2)
    assert order.tolist() == CHOSEN[window_order(groups, 3, 3, 2)].tolist()


def test_a_window_is_laid_out_in_its_lanes():
    lanes = Lanes(2, 3)
    order = EpochOrder(WindowShuffle(5), 24, 1, groups=GROUPS, lanes=lanes).of(4)
    assert order.tolist() == window_order(GROUPS, 5, 1, 4, lanes).tolist()
    assert order.tolist() != window_order(GROUPS, 5, 1, 4).tolist()


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_share_what_is_left_step_by_step(start, world_size):
    order = EpochOrder(FullShuffle(), 25, 7)
    plan = EpochPlan(25, 2, world_size, start=start)
    parts = [order.of_rank(1, plan, rank).tolist() for rank in range(world_size)]
    expected: list[list[int]] = [[] for _ in range(world_size)]
    for step in range(plan.num_steps):
        for rank in range(world_size):
            first, stop = plan.rank_bounds(step, rank)
            expected[rank] += order.of(1)[first:stop].tolist()
    assert parts == expected
    assert sorted(joined(parts)) == sorted(order.of(1)[start : plan.bounds(plan.num_steps - 1)[1]].tolist())
    assert len({tuple(part) for part in parts}) == world_size


def test_of_an_epoch_that_is_over_nothing_is_left():
    left = EpochOrder(FullShuffle(), 7, 0, CHOSEN).of_rank(0, EpochPlan(7, 2, start=7), 0)
    assert left.shape == (0,)
    assert left.dtype == np.int64


@pytest.mark.parametrize("lanes", [ONE_LANE, Lanes(3, 8)], ids=["one", "three"])
def test_a_saved_position_tells_the_lanes_whoever_resumes(lanes):
    state = json.loads(json.dumps(window_state(WindowShuffle(5), GROUPS, lanes)))
    assert list(state) == ["window"]
    assert resumed_lanes(state, GROUPS, ("a.h5",)) == lanes


def test_other_shuffles_have_nothing_to_say_of_chunks():
    assert window_state(FullShuffle(), GROUPS, Lanes(3, 8)) == {}
    assert window_state(WindowShuffle(5), None, ONE_LANE) == {}


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_position_over_other_chunks_or_none_is_refused(is_saved):
    state = window_state(WindowShuffle(5), np.arange(24) // 3, ONE_LANE) if is_saved else {}
    message = (
        "the position was saved in a window shuffle over other chunks than a.h5, b.h5 has now: the order cannot be "
        "continued. Use the files as they were chunked then, or start without the loader's state."
    )
    with pytest.raises(FeedError, match=exactly(message)):
        resumed_lanes(state, GROUPS, ("a.h5", "b.h5"))
