"""What steps come to of which only some were watched in full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.diagnose.sums import HostSums, StepParts

seconds = st.integers(0, 64).map(lambda ticks: ticks / 1024)
one_step = st.tuples(seconds, seconds, seconds, seconds, seconds, st.booleans())


def summed(steps: list[tuple[float, float, float, float, float, bool]], weight: float = 1.0) -> HostSums:
    sums = HostSums()
    for wait, copy, compute, sync, hooks, is_watched in steps:
        sums.add(wait, wait + copy + compute + sync + hooks)
        if is_watched:
            sums.add_parts(weight, StepParts(copy, compute, sync, hooks, wait / 2, wait / 4, compute / 2))
    return sums


@given(st.lists(one_step, max_size=12), st.sampled_from([1.0, 4.0]))
def test_the_parts_add_up_to_the_time_of_all_steps_whatever_was_watched(steps, weight):
    sums = summed(steps, weight)
    parts = sums.parts()
    if not sums.is_sampled and weight != 1.0:
        return  # where all are watched, each stands for itself
    whole = sums.wait + parts.copy + parts.compute + parts.sync + parts.hooks
    assert whole == pytest.approx(sums.elapsed, abs=1e-12)  # rounding
    assert sums.wait == sum(one[0] for one in steps)
    assert parts.received <= sums.wait
    assert parts.ready is None or parts.ready <= sums.wait


def test_steps_that_were_not_watched_divide_as_those_that_were():
    steps = [(0.0, 0.25, 0.5, 0.0, 0.25, True), (1.0, 0.5, 1.0, 0.0, 0.5, False), (0.0, 0.25, 0.5, 0.0, 0.25, True)]
    parts = summed(steps).parts()
    assert (parts.copy, parts.compute, parts.hooks, parts.cpu) == (1.0, 2.0, 1.0, 1.0)


def test_what_comes_after_a_run_is_a_sample_too():
    sums = summed([(0.0, 1.0, 2.0, 0.0, 1.0, True)], weight=2.0)
    sums.add(0.0, 4.0)
    sums.add_tail(2.0, 4.0, 1.0)
    parts = sums.parts()
    assert (parts.copy, parts.compute, parts.sync, parts.hooks) == (1.0, 2.0, 1.0, 4.0)


def test_a_stall_in_a_step_that_was_not_watched_is_counted_and_is_not_taken_for_batches_that_were_ready():
    parts_before = summed([(0.25, 0.0, 1.0, 0.0, 0.0, True)] * 4 + [(0.25, 0.0, 1.0, 0.0, 0.0, False)] * 4, 2.0).parts()
    sums = summed([(0.25, 0.0, 1.0, 0.0, 0.0, True)] * 4 + [(0.25, 0.0, 1.0, 0.0, 0.0, False)] * 4, 2.0)
    sums.add(100.0, 101.0)
    assert sums.wait == 102.0
    assert sums.parts().ready == parts_before.ready * 9 / 8
    assert sums.parts().compute == 9.0


def test_where_nothing_was_watched_the_step_computes():
    assert summed([(0.5, 0.25, 0.25, 0.0, 0.0, False)]).parts() == StepParts(compute=0.5)
