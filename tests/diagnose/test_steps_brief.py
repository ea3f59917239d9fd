"""Steps that are not watched in full: what is counted of them all the same, and how near the rest comes.

Time passes only when a test says so, and the device is a queue that works along, both as in test_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lightning_gpufeed.diagnose import steps as steps_module
from lightning_gpufeed.diagnose.sampling import RUN, StepSampler
from lightning_gpufeed.diagnose.steps import StepTimer
from tests.diagnose.test_steps import CPU, CUDA, TICK, Clock, Device, ticks, use_device


class Times(NamedTuple):
    """Of one step, in ticks: `queued` is how long the host takes to give the work away, on the CPU to do it."""

    sync: int = 0
    wait: int = 2
    copy: int = 1
    compute: int = 20
    hooks: int = 3


def every_fourth_slow(number: int) -> Times:
    """As with four workers, one of which is slow, and a callback that has something to do in every third step."""
    return Times(sync=1, wait=40 if number % 4 == 0 else 2, compute=20 + 5 * (number % 5), hooks=30 * (number % 3 == 0))


class Sampled:
    """A timer that is told steps as a sampler says."""

    def __init__(self, device: torch.device, clock: Clock, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lightning_gpufeed.diagnose.sampling.watched_share", lambda *_: share)
        self.timer, self.clock = StepTimer(device, num_ranks=2), clock
        self.device: Device | None = None
        self.sampler = StepSampler()
        self.num_brief = 0
        self.is_brief = False
        self.plan: list[tuple[Times, bool]] = []

    def begin_wait(self) -> None:
        """The request, as an observer takes it."""
        if self.num_brief:
            num_steps, self.num_brief = self.num_brief, 0
            self.is_brief = True
            self.timer.begin_brief(num_steps, self.begin_run)
        elif self.is_brief:
            self.timer.brief_begin_wait()
        else:
            self.timer.begin_wait(is_ready=True)

    def begin_run(self) -> None:
        self.is_brief = False
        self.begin_wait()

    def step(self, times: Times) -> None:
        """One step."""
        timer, wait = self.timer, self.clock.wait
        if not self.is_brief:
            timer.begin_sync()
        wait(times.sync)
        if not self.is_brief:
            timer.end_sync()
        self.begin_wait()
        wait(times.wait)
        if self.is_brief:
            timer.brief_end_wait()
        else:
            timer.end_wait()
        self.plan.append((times, not self.is_brief))
        for name, work in (("copy", times.copy), ("compute", times.compute)):
            if not self.is_brief:
                getattr(timer, f"begin_{name}")()
            if self.device is None:
                wait(work)
            else:
                self.device.work(work)
            if not self.is_brief:
                getattr(timer, f"end_{name}")()
        wait(times.hooks)
        if not self.is_brief:
            timer.end_step()
            self.num_brief = self.sampler.end_step(self.clock.now, None, 0.0)
            timer.weight = self.sampler.weight


@pytest.fixture
def sampled(monkeypatch) -> Callable[..., Sampled]:
    """Makes one."""
    clock = Clock()
    monkeypatch.setattr(steps_module, "time", clock)

    def make(share: float, device: torch.device = CPU) -> Sampled:
        result = Sampled(device, clock, share, monkeypatch)
        if device is CUDA:
            result.device = Device(clock)
            use_device(result.device, monkeypatch)
        return result

    return make


def standard_error(values: np.ndarray, wholes: np.ndarray, num_runs: int) -> float:
    """Of the estimated share of values in wholes, from so many runs at random of steps that follow each other."""
    residual = values - values.sum() / wholes.sum() * wholes
    runs = np.convolve(residual, np.ones(RUN), "valid")
    return float(runs.std() / (np.sqrt(num_runs) * RUN * wholes.mean()))


@pytest.mark.parametrize("share", [1 / 4, 1 / 32])
def test_shares_of_a_stream_with_periods_come_out_as_if_all_had_been_watched(sampled, share):
    one = sampled(share)
    for number in range(20_000):
        one.step(every_fourth_slow(number))
    one.timer.pause()
    totals = one.timer.totals()
    table = np.array([times for times, _ in one.plan], dtype=float)
    rest = table.sum(1) - table[:, 1]
    num_runs = sum(is_full for _, is_full in one.plan) // RUN
    assert totals.num_watched == sum(is_full for _, is_full in one.plan) < 0.35 * len(table)
    # What is counted of every step is exact; the sync before the first step is no step's, the last step's hooks are.
    assert totals.num_steps == len(table)
    assert ticks(totals.wait_seconds) == table[:, 1].sum()
    assert ticks(totals.elapsed_seconds) == pytest.approx(table.sum(), abs=40)
    estimates = (totals.sync_seconds, totals.copy_seconds, totals.compute_seconds, totals.hook_seconds)
    for column, seconds in zip((0, 2, 3, 4), estimates, strict=True):
        error = standard_error(table[:, column], rest, num_runs)
        assert error < 0.01
        # Four standard errors, and two steps at the edges of the epoch.
        assert ticks(seconds) / rest.sum() == pytest.approx(table[:, column].sum() / rest.sum(), abs=4 * error + 1e-4)
    assert sum(estimates) + totals.wait_seconds == pytest.approx(totals.elapsed_seconds)


def test_a_stall_in_a_step_that_is_not_watched_is_counted_to_the_tick(sampled):
    one = sampled(1 / 32)
    for _ in range(500):
        one.step(Times())
    while not one.is_brief:
        one.step(Times())
    before = one.timer.totals()
    one.step(Times(wait=2048))
    assert one.is_brief
    one.step(Times())
    one.timer.pause()
    after, num_steps = one.timer.totals(), len(one.plan)
    assert after.num_steps == num_steps
    assert ticks(after.wait_seconds) == 2 * (num_steps - 1) + 2048
    assert after.ready_seconds == pytest.approx(before.ready_seconds, rel=0.05)  # not of the stall
    assert ticks(after.elapsed_seconds) == sum(sum(times) for times, _ in one.plan)


@pytest.mark.parametrize("is_over", [True, False])
def test_an_epoch_may_end_with_a_step_that_is_not_watched_whether_it_came_to_its_end_or_not(sampled, is_over):
    one = sampled(1 / 32)
    while not one.is_brief:
        one.step(Times())
    for _ in range(2):
        one.step(Times())
    one.timer.pause(is_over=is_over)
    assert one.timer.num_steps == len(one.plan) - (not is_over)


def test_what_goes_on_between_two_steps_that_are_not_watched_belongs_to_none_if_it_is_a_pause(sampled):
    one = sampled(1 / 32)
    while not one.is_brief:
        one.step(Times())
    one.timer.pause()
    one.clock.wait(5000)
    one.step(Times())
    one.timer.pause()
    totals = one.timer.totals()
    assert totals.num_steps == len(one.plan)
    assert ticks(totals.elapsed_seconds) == sum(sum(times) for times, _ in one.plan)


def test_the_timeline_shows_steps_that_follow_each_other(sampled):
    one = sampled(1 / 16)
    for number in range(3000):
        one.step(Times())
        if number % 97 == 0:
            spans = one.timer.timeline()
            numbers = sorted({span.step for span in spans})
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            assert 4 <= len(numbers) <= RUN or number < 4


def test_a_device_that_is_marked_in_some_steps_has_the_times_of_all(sampled):
    one = sampled(1 / 4, CUDA)
    for number in range(4000):
        one.step(Times(wait=40 if number % 4 == 0 else 8, copy=1, compute=5 + number % 3, hooks=0))
    one.device.catch_up()
    one.timer.pause()
    totals = one.timer.totals()
    num_full = sum(is_full for _, is_full in one.plan)
    assert totals.num_watched == totals.num_timed == num_full < 0.35 * 4000
    computed = sum(times.compute for times, _ in one.plan)
    assert ticks(totals.copy_seconds) == pytest.approx(4000, rel=1e-4)  # milliseconds in 32-bit floats
    assert ticks(totals.compute_seconds) == pytest.approx(computed, rel=0.01)  # runs see two or three of each length
    # The device has nothing to do but while the host waits, less the work it was given before.
    idle = sum(times.wait - times.compute - times.copy for times, _ in one.plan)
    assert ticks(totals.idle_seconds) == pytest.approx(idle, rel=0.05)  # 125 runs, which see one slow step more or less


def test_a_stall_in_a_step_that_is_not_watched_leaves_the_device_idle_all_the_same(sampled):
    one = sampled(1 / 16, CUDA)
    for _ in range(500):
        one.step(Times(wait=8, copy=1, compute=4, hooks=0))
    while not one.is_brief:
        one.step(Times(wait=8, copy=1, compute=4, hooks=0))
    before = one.timer.totals()
    one.step(Times(wait=4096, copy=1, compute=4, hooks=0))
    assert one.is_brief
    one.step(Times(wait=8, copy=1, compute=4, hooks=0))
    one.timer.pause()
    after = one.timer.totals()
    assert ticks(after.wait_seconds) == 8 * (len(one.plan) - 1) + 4096
    # But for four usual steps of 8 ticks, in which the device may still have had work.
    assert 4096 - 4 * 8 - 8 <= ticks(after.idle_seconds - before.idle_seconds) <= 4096
    assert ticks(after.data_seconds) >= 4096
    assert TICK * len(one.plan) * 4 == pytest.approx(after.compute_seconds, rel=1e-4)
