"""How many microbatches: twice as many when memory runs out, fewer again after clean batches, seldom in vain."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.recover.plan import RetryPlan

SAMPLES = st.integers(1, 300)
FEWEST = st.integers(1, 5)


def largest(num_samples: int, num_microbatches: int) -> int:
    """Samples in the largest of so many microbatches."""
    return math.ceil(num_samples / num_microbatches)


class Memory:
    """Trains on batches of which a microbatch fits up to a size; notes every attempt."""

    def __init__(self, plan: RetryPlan) -> None:
        self.plan = plan
        self.num_failures = 0
        self.attempts: list[list[int]] = []

    def batch(self, num_samples: int, fits: int) -> bool:
        """One batch, to its end; whether it ended well."""
        number: int | None = self.plan.num_for(num_samples)
        attempts: list[int] = []
        self.attempts.append(attempts)
        while True:
            assert number is not None
            assert 1 <= number <= num_samples
            attempts.append(number)
            if largest(num_samples, number) <= fits:
                break
            self.num_failures += 1
            number = self.plan.after_failure(num_samples, number, len(attempts))
            if number is None:
                return False
        if len(attempts) == 1:
            self.plan.settle()
        else:
            self.plan.settle(num_samples, attempts[-1], len(attempts) - 1)
        return True

    def batches(self, sizes: Iterable[int], fits: int) -> None:
        for size in sizes:
            assert self.batch(size, fits)


# One batch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "fits", "attempts"),
    [
        (64, 64, [1]),
        (64, 32, [1, 1, 2]),  # the same once more: memory may have been in pieces
        (64, 8, [1, 1, 2, 4, 8]),
        (64, 1, [1, 1, 2, 4, 8, 16, 32, 64]),
        (10, 1, [1, 1, 2, 4, 8, 10]),  # never more microbatches than samples
        (1, 1, [1]),
    ],
)
def test_a_batch_is_tried_the_same_again_and_then_in_twice_as_many_microbatches_each_time(num_samples, fits, attempts):
    memory = Memory(RetryPlan())
    assert memory.batch(num_samples, fits)
    assert memory.attempts == [attempts]


@pytest.mark.parametrize(("num_samples", "attempts"), [(1, [1, 1]), (4, [1, 1, 2, 4]), (5, [1, 1, 2, 4, 5])])
def test_a_microbatch_of_one_sample_that_does_not_fit_is_the_end(num_samples, attempts):
    memory = Memory(RetryPlan())
    assert not memory.batch(num_samples, fits=0)
    assert memory.attempts == [attempts]


def test_a_single_sample_has_its_second_try_also_when_a_larger_size_is_on_trial():
    plan = RetryPlan(grow_after=1)
    Memory(plan).batches([2, 2], fits=1)
    assert plan.num_microbatches == 1  # on trial now
    assert plan.after_failure(1, 1, 1) == 1
    assert plan.after_failure(1, 1, 2) is None


@given(num_samples=SAMPLES, max_retries=st.integers(1, 12), fewest=FEWEST)
def test_a_batch_is_given_up_after_as_many_retries_as_allowed(num_samples: int, max_retries: int, fewest: int) -> None:
    memory = Memory(RetryPlan(fewest, max_retries=max_retries))
    assert not memory.batch(num_samples, fits=0)
    [attempts] = memory.attempts
    steps = math.ceil(math.log2(num_samples / min(fewest, num_samples)))
    assert len(attempts) - 1 == min(max_retries, 1 + steps)


@given(num_samples=SAMPLES, number=st.integers(1, 300), num_failures=st.integers(2, 8))
def test_each_further_failure_doubles_up_to_one_sample_each(num_samples: int, number: int, num_failures: int) -> None:
    after = RetryPlan().after_failure(num_samples, number, num_failures)
    assert after == (None if number >= num_samples else min(2 * number, num_samples))


# What is known to fit ----------------------------------------------------------------------------------------


@given(found=SAMPLES, fits=st.integers(1, 300), other=SAMPLES, fewest=FEWEST)
def test_no_microbatch_of_any_batch_is_larger_than_what_is_known_to_fit(
    found: int, fits: int, other: int, fewest: int
) -> None:
    plan = RetryPlan(fewest, max_retries=100)
    memory = Memory(plan)
    assert memory.batch(found, fits)
    if memory.num_failures and len(set(memory.attempts[0])) > 1:
        known = largest(found, memory.attempts[0][-1])
        number = plan.num_for(other)
        assert largest(other, number) <= known
        if other != found:  # nor smaller than need be
            assert number in (1, min(fewest, other)) or largest(other, number - 1) > known


@given(num_samples=st.lists(st.integers(1, 100), min_size=1, max_size=30), fits=st.integers(1, 100), fewest=FEWEST)
@settings(max_examples=40)
def test_there_is_at_least_one_microbatch_and_at_most_one_for_each_sample(
    num_samples: list[int], fits: int, fewest: int
) -> None:
    memory = Memory(RetryPlan(fewest, grow_after=3, max_retries=100))  # asserts it of every attempt
    memory.batches(num_samples, fits)


def test_a_batch_without_samples_is_one_microbatch():
    plan = RetryPlan()
    plan.settle(16, 4, 3)
    assert plan.num_for(0) == 1


def test_the_short_last_batch_of_an_epoch_is_cut_into_fewer():
    plan = RetryPlan()
    Memory(plan).batches([64], fits=16)
    assert [plan.num_for(size) for size in (64, 63, 33, 32, 16, 10, 1)] == [4, 4, 3, 2, 1, 1, 1]


def test_a_longer_batch_than_the_one_that_taught_the_size_is_cut_into_more():
    plan = RetryPlan()
    Memory(plan).batches([64], fits=16)
    assert [plan.num_for(size) for size in (65, 128, 1000)] == [5, 8, 63]


# Growing back ------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.tuples(st.integers(1, 64), st.sampled_from([1, 4, 16, 64])), max_size=200),
    fewest=FEWEST,
    grow_after=st.none() | st.integers(1, 9),
)
@settings(max_examples=40)
def test_there_are_never_fewer_microbatches_than_the_user_asked_for(
    sizes: list[tuple[int, int]], fewest: int, grow_after: int | None
) -> None:
    plan = RetryPlan(fewest, grow_after=grow_after, max_retries=100)
    memory = Memory(plan)
    for num_samples, fits in sizes:
        assert plan.num_for(num_samples) >= min(fewest, num_samples)
        assert memory.batch(num_samples, fits)
        assert plan.num_microbatches >= plan.fewest == fewest


@given(fits=st.integers(1, 64), fewest=FEWEST, grow_after=st.integers(1, 9))
@settings(max_examples=40)
def test_after_one_batch_that_did_not_fit_all_becomes_what_the_user_asked_for_again(
    fits: int, fewest: int, grow_after: int
) -> None:
    plan = RetryPlan(fewest, grow_after=grow_after, max_retries=100)
    memory = Memory(plan)
    assert memory.batch(64, fits)
    memory.batches([64] * (7 * grow_after), fits=64)
    assert plan.num_microbatches == fewest
    assert [plan.num_for(size) for size in (1, 2, 64, 200)] == [min(fewest, size) for size in (1, 2, 64, 200)]


def test_a_larger_size_is_tried_after_so_many_clean_batches_and_one_step_at_a_time():
    plan = RetryPlan(grow_after=3)
    Memory(plan).batches([64], fits=8)
    grown = [(plan.settle(), plan.num_microbatches) for _ in range(12)]
    assert grown == [
        *[(False, 8), (False, 8), (True, 4)],
        *[(False, 4), (False, 4), (True, 2)],
        *[(False, 2), (False, 2), (True, 1)],
        *[(False, 1)] * 3,
    ]


def test_without_growing_the_size_stays():
    plan = RetryPlan(grow_after=None)
    memory = Memory(plan)
    memory.batches([64], fits=16)
    memory.batches([64] * 500, fits=64)
    assert plan.num_microbatches == 4


def test_a_size_on_trial_is_not_tried_twice_and_the_wait_for_the_next_trial_is_twice_as_long():
    memory = Memory(RetryPlan(grow_after=5))
    memory.batches([64] * 120, fits=16)
    trials = [(number, attempts) for number, attempts in enumerate(memory.attempts) if len(attempts) > 1]
    assert trials == [(0, [1, 1, 2, 4]), (6, [2, 4]), (17, [2, 4]), (38, [2, 4]), (79, [2, 4])]


@pytest.mark.parametrize("last", [9, 10, 16, 40])
def test_a_trial_that_fails_on_a_short_batch_leaves_what_was_known_to_fit_the_long_ones(last):
    plan = RetryPlan(grow_after=1)
    memory = Memory(plan)
    memory.batches([64], fits=8)
    plan.settle()  # a trial of 16 samples begins
    memory.batches([last], fits=8)
    assert len(memory.attempts[-1]) > 1
    assert plan.num_for(64) == 8


def test_one_size_that_is_too_large_by_a_little_in_every_batch_is_not_tried_twice_each_time():
    """Fits only after memory was released: the second such batch in a row is cut at once."""
    plan = RetryPlan()
    assert plan.after_failure(64, 1, 1) == 1
    plan.settle(64, 1, 1)
    assert plan.num_microbatches == 1
    assert plan.after_failure(64, 1, 1) == 2
    plan.settle(64, 2, 1)
    assert plan.num_microbatches == 2


@given(needed=st.sampled_from([2, 4, 8, 16]), at=st.integers(0, 99))
def test_one_oversized_batch_in_a_hundred_ends_at_the_original_size(needed: int, at: int) -> None:
    """At the default patience of 20, wherever in the hundred it comes; the next hundred goes on from there."""
    memory = Memory(RetryPlan())
    for number in range(100):
        assert memory.batch(64, fits=64 // needed if number == at else 64)
    memory.batches([64] * 80, fits=64)
    assert memory.plan.num_microbatches == 1
    assert memory.num_failures == 1 + math.log2(needed)


@given(needed=st.sampled_from([2, 4, 8]), num_times=st.integers(1, 12))
@settings(max_examples=20)
def test_an_oversized_batch_that_recurs_every_hundred_ends_at_the_original_size_each_time(
    needed: int, num_times: int
) -> None:
    memory = Memory(RetryPlan())
    for number in range(100 * num_times):
        assert memory.batch(64, fits=64 // needed if number % 100 == 0 else 64)
        if number % 100 == 99:
            assert memory.plan.num_microbatches == 1
    assert memory.num_failures == num_times * (1 + math.log2(needed))


@given(times=st.lists(st.integers(0, 2000), max_size=20), needed=st.sampled_from([2, 8, 64]))
@settings(max_examples=25)
def test_whenever_oversized_batches_come_each_costs_no_more_than_cutting_it_down(times: list[int], needed: int) -> None:
    memory = Memory(RetryPlan())
    oversized = set(times)
    for number in range(2000):
        assert memory.batch(64, fits=64 // needed if number in oversized else 64)
    assert memory.num_failures <= len(oversized) * (1 + math.log2(needed))


@given(fits=st.integers(1, 63), num_batches=st.sampled_from([100, 1000, 10_000]))
@settings(max_examples=15)
def test_failures_of_a_size_that_never_fits_grow_with_the_logarithm_of_the_training(
    fits: int, num_batches: int
) -> None:
    memory = Memory(RetryPlan())
    memory.batches([64] * num_batches, fits)
    num_trials = math.floor(math.log2(num_batches / 20 + 1))  # after 20, then 40, then 80 ... clean batches
    assert memory.num_failures <= 1 + math.ceil(math.log2(64 / fits)) + num_trials


@given(fits=st.integers(1, 63), last=st.integers(1, 63), per_epoch=st.integers(2, 60))
@settings(max_examples=25)
def test_a_short_last_batch_per_epoch_does_not_change_that(fits: int, last: int, per_epoch: int) -> None:
    memory = Memory(RetryPlan())
    memory.batches((last if number % per_epoch == per_epoch - 1 else 64 for number in range(3000)), fits)
    # The short batch may fail or pass a trial that says little about the long ones; each of six sizes then has its own
    # sequence of ever longer waits (8 within 3000 batches), and each trial that fails leads down to the size that fits.
    assert memory.num_failures <= 6 * 8 * (1 + math.ceil(math.log2(64 / fits)))


# State -------------------------------------------------------------------------------------------------------

EVENTS = st.lists(st.tuples(st.integers(1, 64), st.sampled_from([1, 4, 16, 32, 64])), max_size=120)


def is_told(plan: RetryPlan, events: list[tuple[int, int]]) -> list[Any]:
    memory = Memory(plan)
    seen: list[Any] = []
    for num_samples, fits in events:
        seen.append((memory.batch(num_samples, fits), memory.attempts[-1], plan.num_microbatches))
    return seen


def as_json(state: dict[str, Any]) -> dict[str, Any]:
    """As a file would give it back: keys are strings there."""
    restored: dict[str, Any] = json.loads(json.dumps(state))
    return restored


@given(events=EVENTS, fewest=FEWEST, grow_after=st.none() | st.integers(1, 5))
@settings(max_examples=40)
def test_two_plans_that_are_told_the_same_stay_the_same(
    events: list[tuple[int, int]], fewest: int, grow_after: int | None
) -> None:
    one, other = (RetryPlan(fewest, grow_after=grow_after, max_retries=100) for _ in range(2))
    assert is_told(one, events) == is_told(other, events)
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize("way", [dict, as_json])
@given(before=EVENTS, after=EVENTS, fewest=FEWEST, grow_after=st.none() | st.integers(1, 5))
@settings(max_examples=30)
def test_a_plan_that_was_stored_and_loaded_goes_on_as_if_it_had_not_been(
    way: Callable[[dict[str, Any]], dict[str, Any]],
    before: list[tuple[int, int]],
    after: list[tuple[int, int]],
    fewest: int,
    grow_after: int | None,
) -> None:
    plan, loaded = (RetryPlan(fewest, grow_after=grow_after, max_retries=100) for _ in range(2))
    is_told(plan, before)
    loaded.load_state_dict(way(plan.state_dict()))
    assert loaded.state_dict() == plan.state_dict()
    assert is_told(loaded, after) == is_told(plan, after)


def test_a_stored_state_does_not_change_with_the_plan():
    plan = RetryPlan(grow_after=1)
    Memory(plan).batches([64, 64, 64], fits=16)  # a trial failed: there is a patience
    state = plan.state_dict()
    was = as_json(state)
    Memory(plan).batches([64] * 30, fits=4)
    assert as_json(state) == was
    assert as_json(plan.state_dict()) != was


def test_a_user_who_now_asks_for_more_microbatches_gets_them():
    plan, loaded = RetryPlan(), RetryPlan(8)
    Memory(plan).batches([64], fits=32)
    loaded.load_state_dict(plan.state_dict())
    assert loaded.num_microbatches == 8


def test_starting_over_leaves_nothing_of_what_was_found():
    plan = RetryPlan(2, grow_after=1)
    Memory(plan).batches([64, 64, 64], fits=8)
    plan.start_over()
    assert plan.state_dict() == RetryPlan(2, grow_after=1).state_dict()
