"""Counters as values: what is unknown stays unknown, and shares are shares."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.diagnose.counters import BatchFacts, EpochCounters, LoaderFacts, StepTotals, Usage, total
from tests.diagnose.feeds import CHUNKED, UINT8, WIDENED, epoch_of, steps_of, usages, workers

SOME_USAGES = st.floats(0, 1e6).flatmap(usages)
TIMES = st.just(0.0) | st.floats(1e-6, 1e6)
TOTALS = st.builds(
    StepTotals,
    num_steps=st.integers(0, 10**6),
    elapsed_seconds=TIMES,
    wait_seconds=TIMES,
    idle_seconds=st.none() | TIMES,
)
OPTIONAL = ["queue_seconds", "major_faults", "minor_faults", "read_bytes", "disk_bytes"]


# What processes used ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(SOME_USAGES, SOME_USAGES)
def test_a_sum_adds_what_is_known_of_both_and_forgets_the_rest(one: Usage, two: Usage) -> None:
    both, difference = one + two, one - two
    for field in dataclasses.fields(Usage):
        mine, theirs = getattr(one, field.name), getattr(two, field.name)
        if mine is None or theirs is None:
            assert getattr(both, field.name) is None
            assert getattr(difference, field.name) is None
        else:
            assert getattr(both, field.name) == mine + theirs
            assert getattr(difference, field.name) == max(0, mine - theirs)


@pytest.mark.parametrize("name", OPTIONAL)
def test_every_counter_that_a_kernel_may_keep_back_can_be_missing(name: str) -> None:
    missing = replace(Usage(wall_seconds=2.0, user_seconds=1.0), **{name: None})
    assert getattr(missing + missing, name) is None
    assert (missing + missing).user_seconds == 2.0
    assert missing.share(missing.user_seconds) == 0.5


def test_the_total_of_none_is_nothing_and_of_some_their_sum() -> None:
    assert total([]) == Usage()
    one = Usage(wall_seconds=1.0, user_seconds=0.5, read_bytes=7)
    assert total(iter([one, one, one])) == one + one + one


@given(SOME_USAGES)
def test_a_process_is_on_a_core_or_waits_for_one_or_sleeps(usage: Usage) -> None:
    if usage.queue_seconds is None:
        assert usage.asleep_seconds is None
    else:
        parts = usage.busy_seconds + usage.queue_seconds + usage.asleep_seconds
        assert parts == pytest.approx(usage.wall_seconds, rel=1e-9)  # rounding of three floats


@settings(max_examples=40)
@given(SOME_USAGES, st.integers(1, 64))
def test_readers_that_are_hidden_are_made_up_for_by_others_that_do_the_same(usage: Usage, number: int) -> None:
    scaled, added = usage.scaled(number), total([usage] * number)
    for field in dataclasses.fields(Usage):
        value = getattr(scaled, field.name)
        # Rounding: one product against a sum of up to 64.
        assert value is getattr(added, field.name) is None or value == pytest.approx(getattr(added, field.name))
        assert type(value) is type(getattr(usage, field.name))


def test_ticks_that_add_up_to_more_than_the_time_leave_no_sleep_and_no_share_above_one() -> None:
    usage = Usage(wall_seconds=1.0, user_seconds=0.7, system_seconds=0.4, queue_seconds=0.2)
    assert usage.asleep_seconds == 0.0
    assert usage.share(usage.busy_seconds) == 1.0


def test_a_share_of_no_time_or_of_something_unknown_is_unknown() -> None:
    assert Usage().share(1.0) is None
    assert Usage(wall_seconds=1.0).share(None) is None
    assert Usage(wall_seconds=4.0).share(1.0) == 0.25


# Steps -----------------------------------------------------------------------------------------------------


@given(TOTALS)
def test_waiting_is_a_share_of_the_time_whatever_was_counted(steps: StepTotals) -> None:
    assert 0 <= steps.wait_share <= 1
    assert steps.share(None) == 0.0
    assert steps.step_seconds >= 0


def test_without_a_step_none_takes_any_time() -> None:
    assert StepTotals().step_seconds == 0.0
    assert StepTotals(elapsed_seconds=3.0).step_seconds == 0.0
    assert StepTotals(num_steps=3).wait_share == 0.0


@pytest.mark.parametrize(
    ("wait", "idle", "cost"),
    [
        (5.0, None, 5.0),  # the host computes: it cannot do both
        (5.0, 2.0, 2.0),  # the device still had work for 3 of the 5 seconds
        (5.0, 0.0, 0.0),
        (1.0, 4.0, 1.0),  # idle for another reason too
    ],
)
def test_waiting_costs_what_it_leaves_the_device_idle(wait: float, idle: float | None, cost: float) -> None:
    steps = StepTotals(num_steps=10, elapsed_seconds=10.0, wait_seconds=wait, idle_seconds=idle)
    assert steps.data_seconds == cost
    assert steps.wait_share == pytest.approx(cost / 10)


# Loader and batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "num_readers", "is_ahead"),
    [
        (LoaderFacts(), 1, False),
        (LoaderFacts(num_workers=1), 1, True),
        (LoaderFacts(num_workers=16), 16, True),
        (LoaderFacts(has_thread=True), 1, True),
        (LoaderFacts(num_workers=4, has_thread=True), 4, True),
    ],
)
def test_somebody_reads_and_does_so_ahead_if_it_is_not_the_step_itself(
    loader: LoaderFacts, num_readers: int, is_ahead: bool
) -> None:
    assert (loader.num_readers, loader.is_ahead) == (num_readers, is_ahead)


def test_a_batch_would_be_smaller_by_what_its_widened_values_need_less() -> None:
    assert WIDENED.compact_bytes == WIDENED.num_bytes // 4
    labels = BatchFacts(num_bytes=4000 + 80, widened_bytes=4000, widened_values=1000)
    assert labels.compact_bytes == 1000 + 80
    assert UINT8.compact_bytes == UINT8.num_bytes


def test_bytes_read_for_each_byte_delivered_are_those_of_the_steps_that_were_watched() -> None:
    read = Usage(wall_seconds=1.0, read_bytes=320)
    counters = EpochCounters(
        steps=steps_of(num_steps=1000), readers=read, batch=BatchFacts(num_bytes=5), num_watched_steps=2
    )
    assert counters.read_ratio == 32.0
    assert replace(counters, readers=replace(read, read_bytes=0)).read_ratio == 0.0  # a memory map


@pytest.mark.parametrize(
    "changes",
    [
        {"readers": None},
        {"readers": Usage(wall_seconds=1.0, read_bytes=None)},
        {"num_watched_steps": 0},
        {"batch": BatchFacts()},
    ],
)
def test_without_bytes_steps_or_batches_the_ratio_is_unknown(changes: dict[str, object]) -> None:
    assert epoch_of().read_ratio == pytest.approx(1.0)
    assert replace(epoch_of(), **changes).read_ratio is None


def test_counters_travel_between_ranks_unchanged() -> None:
    counters = epoch_of(loader=workers(4, files=(CHUNKED,)), batch=WIDENED, num_ranks=2, rank=1)
    assert pickle.loads(pickle.dumps(counters)) == counters


@pytest.mark.parametrize("value", [Usage(), StepTotals(), LoaderFacts(), BatchFacts(), EpochCounters()])
def test_counters_of_an_epoch_do_not_change_afterwards(value: object) -> None:
    name = dataclasses.fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
