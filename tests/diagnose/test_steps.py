"""Where the time of the steps goes: every tick is counted once, and a device that runs behind is never waited for.

Time passes only when a test says so, in steps of 1/1024 s, so that sums are exact. The device is a queue that works
along as time passes; its events follow the rules of CUDA's: recorded anew they forget what they were, and what has not
been reached cannot be read.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.diagnose import steps as steps_module
from lightning_gpufeed.diagnose.counters import Span, StepTotals
from lightning_gpufeed.diagnose.steps import StepTimer

TICK = 1 / 1024
MOST_STEPS_SHOWN = 8
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 4096.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now / 2  # the training thread is on a core half of the time

    def wait(self, ticks: int) -> None:
        self.now += ticks * TICK


class Device:
    """A queue of work that is done in order, each piece as soon as the one before is done."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free_at = 0.0
        self.num_events = 0

    def work(self, ticks: int) -> None:
        """The host gives it something to do."""
        self.free_at = max(self.free_at, self.clock.now) + ticks * TICK

    def catch_up(self) -> None:
        """The host waits until it is done."""
        self.clock.now = max(self.clock.now, self.free_at)


class Event:
    """A CUDA event of that queue. Waiting for it is not possible: nothing may."""

    def __init__(self, device: Device) -> None:
        self.device, self.reached_at = device, None
        device.num_events += 1

    def record(self, stream: str) -> None:
        assert stream == f"stream of {CUDA}"
        self.reached_at = max(self.device.free_at, self.device.clock.now)

    def query(self) -> bool:
        assert self.reached_at is not None
        return self.reached_at <= self.device.clock.now

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return float(np.float32(1000 * (end.reached_at - self.reached_at)))  # CUDA gives a 32-bit float


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(steps_module, "time", clock)
    return clock


@pytest.fixture
def device(clock, monkeypatch):
    device = Device(clock)
    use_device(device, monkeypatch)
    return device


def use_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def event(*, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(device)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")


def step(timer: StepTimer, clock: Clock, wait: int = 3, copy: int = 1, compute: int = 5, hooks: int = 2) -> None:
    """One step on the host."""
    timer.begin_wait()
    clock.wait(wait)
    timer.end_wait()
    timer.begin_copy()
    clock.wait(copy)
    timer.end_copy()
    timer.begin_compute()
    clock.wait(compute)
    timer.end_compute()
    clock.wait(hooks)
    timer.end_step()


def device_step(
    timer: StepTimer, device: Device, *, wait: int = 0, copy: int | None = 1, compute: int = 4, queued: int = 1
) -> None:
    """One step whose work the host gives away in `queued` ticks."""
    timer.begin_wait()
    device.clock.wait(wait)
    timer.end_wait()
    if copy is not None:
        timer.begin_copy()
        device.work(copy)
        timer.end_copy()
    timer.begin_compute()
    device.work(compute)
    device.clock.wait(queued)
    timer.end_compute()
    timer.end_step()


def parts(totals: StepTotals) -> float:
    """The sum of all parts of the host's time."""
    in_steps = totals.wait_seconds + totals.copy_seconds + totals.compute_seconds + totals.hook_seconds
    return in_steps + (totals.sync_seconds or 0.0)


def ticks(seconds: float | None) -> float | None:
    """In ticks."""
    return None if seconds is None else seconds / TICK


def lane(timer: StepTimer, name: str) -> list[Span]:
    """What the timeline shows of one lane."""
    return [span for span in timer.timeline() if span.lane == name]


def assert_in_order(spans: list[Span]) -> None:
    """One after another."""
    for span in spans:
        assert 0 <= span.begin <= span.end
    for before, after in itertools.pairwise(spans):
        assert before.end <= after.begin, (before, after)
        assert before.step <= after.step


# The host, step by step ------------------------------------------------------------------------------------


def test_every_part_of_a_step_is_counted_where_it_belongs(clock):
    timer = StepTimer(CPU, num_ranks=2)
    for _ in range(3):
        timer.begin_sync()
        clock.wait(7)
        timer.end_sync()
        step(timer, clock)
        clock.wait(4)
    totals = timer.totals()
    assert (totals.num_steps, totals.num_timed) == (3, 3)
    assert ticks(totals.sync_seconds) == 21
    assert ticks(totals.wait_seconds) == 9
    assert ticks(totals.copy_seconds) == 3
    assert ticks(totals.compute_seconds) == 15
    # The training thread is on a core half of the time, in the waits and in computing.
    assert ticks(totals.receive_seconds) == 4.5
    assert ticks(totals.compute_cpu_seconds) == 7.5
    # What comes after the last step belongs to the next one.
    assert ticks(totals.hook_seconds) == 6 + 2 * 4
    assert ticks(totals.elapsed_seconds) == 3 * (7 + 3 + 1 + 5 + 2) + 2 * 4
    assert totals.idle_seconds is None


def test_one_rank_asks_nobody_and_its_core_time_is_not_measured(clock):
    timer = StepTimer(CPU)
    step(timer, clock)
    assert timer.totals().sync_seconds is None
    assert timer.totals().compute_cpu_seconds is None


def test_what_came_before_the_first_step_belongs_to_none(clock):
    timer = StepTimer(CPU)
    clock.wait(1000)
    step(timer, clock)
    assert ticks(timer.totals().elapsed_seconds) == 11


def test_the_wait_for_an_epoch_to_get_under_way_counts_for_no_step(clock):
    timer = StepTimer(CPU, num_ranks=2)
    timer.begin_sync()
    clock.wait(50)
    timer.end_sync()
    timer.begin_wait()
    clock.wait(2000)
    timer.end_wait(is_start=True)
    clock.wait(1)
    timer.begin_compute()
    clock.wait(5)
    timer.end_compute()
    timer.end_step()
    totals = timer.totals()
    assert ticks(totals.elapsed_seconds) == 6
    assert (totals.wait_seconds, totals.receive_seconds, totals.sync_seconds) == (0.0, 0.0, 0.0)
    assert parts(totals) == totals.elapsed_seconds


def test_waits_for_a_batch_that_was_ready_are_known_if_the_loader_says(clock):
    timer = StepTimer(CPU)
    step(timer, clock)
    assert timer.totals().ready_seconds is None
    for is_ready, wait in [(True, 3), (False, 50), (True, 4), (None, 60)]:
        timer.begin_wait(is_ready=is_ready)
        clock.wait(wait)
        timer.end_wait()
        timer.begin_compute()
        timer.end_compute()
        timer.end_step()
    assert ticks(timer.totals().ready_seconds) == 7
    timer.reset()
    assert timer.totals().ready_seconds is None


def test_a_step_without_a_copy_has_all_its_other_parts(clock):
    timer = StepTimer(CPU)
    for _ in range(2):
        timer.begin_wait()
        clock.wait(3)
        timer.end_wait()
        timer.begin_compute()
        clock.wait(5)
        timer.end_compute()
        timer.end_step()
    totals = timer.totals()
    assert (ticks(totals.wait_seconds), totals.copy_seconds, ticks(totals.compute_seconds)) == (6, 0.0, 10)
    assert [span.phase for span in timer.timeline()] == ["wait", "compute", "hooks"] * 2


def test_a_step_that_fetches_its_batches_by_itself_waits_while_it_does(clock):
    timer = StepTimer(CPU)
    for _ in range(2):
        timer.begin_compute()
        for _ in range(2):
            clock.wait(1)
            timer.begin_wait()
            clock.wait(10)
            timer.end_wait()
        clock.wait(3)
        timer.end_compute()
        clock.wait(2)
        timer.end_step()
    totals = timer.totals()
    assert totals.num_steps == 2
    assert ticks(totals.wait_seconds) == 40
    assert ticks(totals.receive_seconds) == 20
    assert ticks(totals.compute_seconds) == 10
    assert ticks(totals.hook_seconds) == 4
    assert ticks(totals.elapsed_seconds) == 54
    assert_in_order(lane(timer, "host"))
    assert sum(ticks(span.end - span.begin) for span in timer.timeline() if span.phase == "compute") == 10


def test_a_step_that_fetches_one_more_batch_waits_for_both(clock):
    timer = StepTimer(CPU)
    timer.begin_wait()
    clock.wait(3)
    timer.end_wait()
    timer.begin_compute()
    clock.wait(1)
    timer.begin_wait()
    clock.wait(10)
    timer.end_wait()
    clock.wait(4)
    timer.end_compute()
    timer.end_step()
    totals = timer.totals()
    assert (ticks(totals.wait_seconds), ticks(totals.compute_seconds)) == (13, 5)
    assert_in_order(lane(timer, "host"))


@pytest.mark.parametrize(
    "ends",
    [
        [],
        ["begin_wait"],
        ["begin_wait", "end_wait"],
        ["begin_wait", "end_wait", "begin_copy"],
        ["begin_wait", "end_wait", "begin_copy", "end_copy", "begin_compute"],
        ["begin_wait", "end_wait", "begin_compute", "end_compute"],
        ["begin_sync"],
        ["begin_sync", "end_sync"],
    ],
    ids=lambda ends: ends[-1] if ends else "nothing",
)
@pytest.mark.parametrize("how", ["pause", "reset", "neither"])
def test_a_step_that_breaks_off_anywhere_is_no_step_and_leaves_nothing_to_the_next(clock, ends, how):
    timer = StepTimer(CPU, num_ranks=2)
    step(timer, clock)
    for name in ends:
        clock.wait(100)
        getattr(timer, name)()
    clock.wait(1000)
    if how != "neither":
        getattr(timer, how)()
    elif ends[-1:] == ["begin_compute"]:
        timer.end_compute()  # a step that goes on cannot be told from one that has broken off
    clock.wait(1000)
    timer.begin_sync()
    timer.end_sync()
    step(timer, clock)
    totals = timer.totals()
    assert totals.num_steps == (1 if how == "reset" else 2)
    assert ticks(totals.wait_seconds) == 3 * totals.num_steps
    assert ticks(totals.copy_seconds) == totals.num_steps
    assert ticks(totals.compute_seconds) == 5 * totals.num_steps
    assert parts(totals) == totals.elapsed_seconds
    if how != "neither":
        assert ticks(totals.elapsed_seconds) == 11 * totals.num_steps
        assert totals.sync_seconds == 0.0


@pytest.mark.parametrize("how", ["pause", "reset"])
@pytest.mark.parametrize(
    "names", ["begin_wait end_wait", "begin_copy end_copy", "begin_compute end_compute", "begin_sync end_sync"]
)
def test_what_ends_after_a_pause_or_a_new_start_does_not_reach_back_before_it(clock, how, names):
    timer = StepTimer(CPU, num_ranks=2)
    begin, end = names.split()
    if begin != "begin_wait":
        timer.begin_wait()
        timer.end_wait()
    getattr(timer, begin)()
    clock.wait(500)
    getattr(timer, how)()
    began = clock.now
    clock.wait(1)
    getattr(timer, end)()
    step(timer, clock)
    totals = timer.totals()
    assert totals.num_steps == 1
    assert totals.elapsed_seconds <= clock.now - began
    assert parts(totals) == totals.elapsed_seconds


def test_a_pause_between_steps_counts_for_none(clock):
    timer = StepTimer(CPU)
    step(timer, clock)
    clock.wait(6)
    timer.pause()
    clock.wait(5000)
    step(timer, clock)
    assert ticks(timer.totals().elapsed_seconds) == 22
    assert ticks(timer.totals().hook_seconds) == 4


def test_a_new_start_forgets_all_and_counts_steps_from_0(clock):
    timer = StepTimer(CPU)
    for _ in range(3):
        step(timer, clock)
    timer.reset()
    assert timer.totals() == StepTimer(CPU).totals()
    assert timer.timeline() == ()
    step(timer, clock)
    assert timer.totals().num_steps == 1
    assert {span.step for span in timer.timeline()} == {0}


def test_the_timeline_shows_the_latest_steps_from_0_on(clock):
    timer = StepTimer(CPU)
    for _ in range(30):
        step(timer, clock)
    spans = timer.timeline()
    assert {span.step for span in spans} == set(range(30 - MOST_STEPS_SHOWN, 30))
    assert spans[0].begin == 0
    assert_in_order(list(spans))
    assert [span.phase for span in spans] == ["wait", "copy", "compute", "hooks"] * MOST_STEPS_SHOWN
    assert [ticks(span.end - span.begin) for span in spans] == [3, 1, 5, 2] * MOST_STEPS_SHOWN


# The host, all orders --------------------------------------------------------------------------------------

durations = st.integers(0, 6)


@st.composite
def one_step(draw):
    """How long the parts of a step last; parts may be missing, and it may break off."""
    return SimpleNamespace(
        sync=draw(st.none() | durations),
        wait=draw(durations),
        copy=draw(st.none() | durations),
        gaps=draw(st.tuples(durations, durations, durations)),
        compute=draw(durations),
        inner=draw(st.lists(st.tuples(durations, durations), max_size=2)),
        after=draw(durations),
        broken_at=draw(st.sampled_from([None] * 6 + ["wait", "copy", "compute"])),
        then=draw(st.sampled_from(["", "", "", "pause"])),
        pause=draw(durations),
    )


class Books:
    """What should be counted, kept a second time: it says where each tick went, as it passes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[dict[str, int]] = []
        self.open: dict[str, int] = {}
        self.is_adjoining = False

    def spend(self, part: str, num_ticks: int) -> None:
        self.clock.wait(num_ticks)
        self.open[part] = self.open.get(part, 0) + num_ticks

    def end_step(self) -> None:
        self.steps.append(self.open)
        self.open = {}
        self.is_adjoining = True

    def total(self, part: str) -> int:
        return sum(one.get(part, 0) for one in self.steps)


def play(timer: StepTimer, books: Books, plan: SimpleNamespace) -> None:
    """Take one step, or begin to."""
    if plan.sync is not None:
        timer.begin_sync()
        books.spend("sync", plan.sync)
        timer.end_sync()
    timer.begin_wait()
    books.spend("wait", plan.wait)
    timer.end_wait()
    if plan.broken_at == "wait":
        return
    books.spend("hooks", plan.gaps[0])
    if plan.copy is not None:
        timer.begin_copy()
        books.spend("copy", plan.copy)
        timer.end_copy()
    if plan.broken_at == "copy":
        return
    # What is done to a batch on the device once it is there is computing.
    books.spend("hooks" if plan.copy is None else "compute", plan.gaps[1])
    timer.begin_compute()
    for before, wait in plan.inner:
        books.spend("compute", before)
        timer.begin_wait()
        books.spend("wait", wait)
        timer.end_wait()
    books.spend("compute", plan.compute)
    timer.end_compute()
    if plan.broken_at == "compute":
        return
    books.spend("hooks", plan.gaps[2])
    timer.end_step()
    books.end_step()


@given(st.lists(one_step(), max_size=14))
def test_every_tick_of_a_step_is_counted_once_whatever_steps_are_made_of(plans):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "time", clock)
        timer, books = StepTimer(CPU, num_ranks=2), Books(clock)
        for plan in plans:
            play(timer, books, plan)
            if plan.broken_at or plan.then == "pause":
                timer.pause()
                clock.wait(plan.pause)
                books.open, books.is_adjoining = {}, False
            elif books.is_adjoining:
                books.spend("hooks", plan.after)
        totals = timer.totals()
        assert totals.num_steps == len(books.steps)
        assert ticks(totals.sync_seconds) == books.total("sync")
        assert ticks(totals.wait_seconds) == books.total("wait")
        assert ticks(totals.receive_seconds) == books.total("wait") / 2
        assert ticks(totals.copy_seconds) == books.total("copy")
        assert ticks(totals.compute_seconds) == books.total("compute")
        assert ticks(totals.hook_seconds) == books.total("hooks")
        assert parts(totals) == totals.elapsed_seconds
        spans = timer.timeline()
        assert_in_order(list(spans))
        shown = sorted({span.step for span in spans})
        assert shown == list(range(len(books.steps)))[-MOST_STEPS_SHOWN:]
        for number, phase in itertools.product(shown, ("sync", "wait", "copy", "compute")):
            drawn = sum(span.end - span.begin for span in spans if (span.step, span.phase) == (number, phase))
            assert ticks(drawn) == books.steps[number].get(phase, 0)


CALLS = ["sync", "wait", "copy", "compute"]
calls = st.sampled_from(
    [f"{edge}_{name}" for edge in ("begin", "end") for name in CALLS] + ["end_step", "pause", "reset"]
)


@given(st.lists(st.tuples(calls, durations), max_size=30))
def test_calls_in_any_order_count_no_more_time_than_has_passed_and_no_tick_twice(sequence):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "time", clock)
        timer, began, num_ends = StepTimer(CPU, num_ranks=2), clock.now, 0
        for name, num_ticks in sequence:
            clock.wait(num_ticks)
            getattr(timer, name)()
            num_ends += name == "end_step"
            if name == "reset":
                began, num_ends = clock.now, 0
            totals = timer.totals()
            every = (totals.wait_seconds, totals.copy_seconds, totals.compute_seconds, totals.hook_seconds)
            assert min(every) >= 0
            assert totals.sync_seconds >= 0
            assert 0 <= totals.receive_seconds <= totals.wait_seconds
            assert totals.elapsed_seconds <= clock.now - began
            assert parts(totals) == totals.elapsed_seconds
            assert totals.num_steps <= num_ends
        assert all(0 <= span.begin <= span.end <= clock.now - began for span in timer.timeline())


# The device ------------------------------------------------------------------------------------------------


def test_a_device_that_waits_for_the_loader_is_idle_meanwhile(device):
    timer = StepTimer(CUDA)
    for _ in range(11):
        device_step(timer, device, wait=20, copy=2, compute=6)
    device.catch_up()
    totals = timer.totals()
    assert (totals.num_steps, totals.num_timed) == (11, 11)
    assert ticks(totals.copy_seconds) == pytest.approx(22)
    assert ticks(totals.compute_seconds) == pytest.approx(66)
    # A step takes 1 tick to be given away and 20 to be waited for, so the device has nothing to do for 21 - 8 of them.
    assert ticks(totals.idle_seconds) == pytest.approx(11 * 13)
    assert totals.data_seconds == pytest.approx(totals.idle_seconds)


def test_a_host_that_runs_ahead_leaves_no_device_idle_though_its_loop_waits(device):
    timer = StepTimer(CUDA)
    for _ in range(40):
        device_step(timer, device, wait=3, copy=1, compute=9)
    device.catch_up()
    totals = timer.totals()
    assert ticks(totals.wait_seconds) == 120
    assert totals.idle_seconds == pytest.approx(0, abs=1e-9)
    assert totals.wait_share == 0
    assert ticks(totals.compute_seconds) == pytest.approx(360)


def test_steps_whose_batch_is_on_the_device_already_have_no_copy(device):
    timer = StepTimer(CUDA)
    for _ in range(5):
        device_step(timer, device, wait=10, copy=None, compute=4)
    device.catch_up()
    totals = timer.totals()
    assert totals.num_timed == 5
    assert totals.copy_seconds == 0
    assert ticks(totals.compute_seconds) == pytest.approx(20)
    assert ticks(totals.idle_seconds) == pytest.approx(5 * 7)


def test_only_what_the_device_has_finished_is_read_and_stands_for_all_steps(device):
    timer = StepTimer(CUDA)
    for _ in range(10):
        device_step(timer, device, copy=100, compute=400)
    assert timer.totals().num_timed == 0
    assert (timer.totals().compute_seconds, timer.totals().idle_seconds) == (0.0, None)
    device.clock.wait(3 * 500 + 50)
    totals = timer.totals()
    assert (totals.num_steps, totals.num_timed) == (10, 3)
    assert ticks(totals.copy_seconds) == pytest.approx(10 * 100)
    assert ticks(totals.compute_seconds) == pytest.approx(10 * 400)


def test_the_device_is_not_called_idle_during_a_pause(device):
    timer = StepTimer(CUDA)
    for _ in range(4):
        device_step(timer, device, wait=10)
        device_step(timer, device, wait=10)
        device.catch_up()
        timer.pause()
        device.clock.wait(10_000)
    totals = timer.totals()
    assert totals.num_timed == 8
    assert ticks(totals.idle_seconds) == pytest.approx(8 * 6)


def test_a_step_that_breaks_off_leaves_no_gap_that_looks_idle(device):
    timer = StepTimer(CUDA)
    device_step(timer, device)
    timer.begin_wait()
    timer.end_wait()
    timer.begin_copy()
    device.clock.wait(10_000)
    device_step(timer, device)
    device.catch_up()
    totals = timer.totals()
    assert totals.num_timed == 2
    # The second step's first mark follows the broken one; how long the device had nothing to do then is no step's.
    assert totals.idle_seconds is None or ticks(totals.idle_seconds) >= 10_000


def test_a_new_start_forgets_what_is_still_under_way(device):
    timer = StepTimer(CUDA)
    for _ in range(5):
        device_step(timer, device, copy=10, compute=1000)
    timer.reset()
    for _ in range(3):
        device_step(timer, device, wait=5, copy=2, compute=3)
    device.catch_up()
    totals = timer.totals()
    assert (totals.num_steps, totals.num_timed) == (3, 3)
    assert ticks(totals.copy_seconds) == pytest.approx(6)
    assert ticks(totals.compute_seconds) == pytest.approx(9)


def test_a_device_far_behind_is_not_timed_for_a_while_and_then_again(device):
    timer, most = StepTimer(CUDA), steps_module._MOST_PENDING
    for _ in range(most + 50):
        device_step(timer, device, compute=1000)
    assert device.num_events == 3 * most
    device.catch_up()
    assert timer.totals().num_timed == most
    for _ in range(4):
        device_step(timer, device, wait=10, copy=1, compute=4)
    device.catch_up()
    totals = timer.totals()
    assert (totals.num_steps, totals.num_timed) == (most + 54, most + 4)
    measured = (most * 1000 + 4 * 4) / (most + 4)
    assert ticks(totals.compute_seconds) == pytest.approx(measured * totals.num_steps, rel=1e-5)  # 32-bit floats
    # Steps that were not timed lie between the two groups; the gap over them says nothing.
    assert ticks(totals.idle_seconds) < totals.num_steps * 6


def test_events_are_used_again_however_long_an_epoch_is(device):
    timer = StepTimer(CUDA)
    for _ in range(1000):
        device_step(timer, device, wait=2, compute=4)
        device.clock.wait(2)
    assert device.num_events < 20
    device.catch_up()
    timer.reset()
    before = device.num_events
    for _ in range(100):
        device_step(timer, device, wait=6)
    assert device.num_events - before < 20


device_plans = st.lists(
    st.tuples(
        durations, st.none() | durations, st.integers(0, 12), st.integers(0, 8), st.sampled_from(["", "", "", "pause"])
    ),
    min_size=2,
    max_size=30,
)


@given(device_plans)
def test_the_times_of_the_device_are_those_of_its_queue_however_far_it_is_behind(plans):
    clock = Clock()
    device = Device(clock)
    copies = computes = idles = num_gaps = 0.0
    last_end: float | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "time", clock)
        use_device(device, patch)
        timer = StepTimer(CUDA)
        for wait, copy, compute, queued, then in plans:
            begin = max(device.free_at, clock.now + wait * TICK)
            device_step(timer, device, wait=wait, copy=copy, compute=compute, queued=queued)
            copies, computes = copies + (copy or 0), computes + compute
            if last_end is not None:
                idles, num_gaps = idles + (begin - last_end), num_gaps + 1
            # The end is marked when all is given away, which may be after the device has done it.
            last_end = max(device.free_at, clock.now)
            computes += max(0.0, clock.now - device.free_at) / TICK
            if then == "pause":
                timer.pause()
                clock.wait(20)
                last_end = None
        device.catch_up()
        totals = timer.totals()
        num_steps = len(plans)
        assert totals.num_timed == num_steps
        assert ticks(totals.copy_seconds) == pytest.approx(copies, abs=1e-3)  # milliseconds in 32-bit floats
        assert ticks(totals.compute_seconds) == pytest.approx(computes, abs=1e-3)
        if not num_gaps:
            assert totals.idle_seconds is None
        else:
            assert totals.idle_seconds == pytest.approx(idles * num_steps / num_gaps, abs=1e-6)
        assert_in_order_about(lane(timer, "device"))


def assert_in_order_about(spans: list[Span]) -> None:
    """One after another, up to the rounding of milliseconds to 32-bit floats."""
    for span in spans:
        assert -1e-6 <= span.begin <= span.end + 1e-6
    for before, after in itertools.pairwise(spans):
        assert before.end <= after.begin + 1e-6, (before, after)


# The device's lane of the timeline -------------------------------------------------------------------------


def shown_device(timer: StepTimer) -> dict[tuple[int, str], tuple[float, float]]:
    """(step, phase) -> begin and end in the device's lane, measured from the host's first wait that is shown."""
    timer.totals()  # reads what the device has reached
    return {(span.step, span.phase): (span.begin, span.end) for span in lane(timer, "device")}


def test_the_device_is_shown_in_the_hosts_time(device):
    timer = StepTimer(CUDA)
    for _ in range(3):
        device_step(timer, device, wait=10, copy=2, compute=5, queued=1)
    device.catch_up()
    host = {(span.step, span.phase): (span.begin, span.end) for span in lane(timer, "host")}
    for number in range(3):
        copy_begin, copy_end = shown_device(timer)[number, "copy"]
        compute_begin, compute_end = shown_device(timer)[number, "compute"]
        assert copy_begin == pytest.approx(host[number, "copy"][0])
        assert ticks(copy_end - copy_begin) == pytest.approx(2)
        assert compute_begin == pytest.approx(copy_end)
        assert ticks(compute_end - compute_begin) == pytest.approx(5)


def test_work_is_never_shown_before_the_host_gave_it_though_the_device_was_busy_at_first(device):
    timer = StepTimer(CUDA)
    device.work(5000)  # of the validation before, or of the last epoch
    for _ in range(4):
        device_step(timer, device, wait=10, copy=2, compute=50)
    device.catch_up()
    for _ in range(4):
        device_step(timer, device, wait=100, copy=2, compute=50)
    device.catch_up()
    host = {(span.step, span.phase): span.begin for span in lane(timer, "host")}
    for (number, phase), (begin, _) in shown_device(timer).items():
        assert begin >= host[number, phase] - TICK, (number, phase)


def test_the_device_is_shown_as_sharply_after_hours_as_at_first(device):
    timer = StepTimer(CUDA)
    device_step(timer, device, wait=2, copy=1, compute=2)
    for _ in range(5):
        device.clock.wait(3600 * 1024)
        device_step(timer, device, wait=2, copy=1, compute=2)
    device.catch_up()
    compute_begin, compute_end = shown_device(timer)[5, "compute"]
    assert ticks(compute_end - compute_begin) == pytest.approx(2, rel=0.01)


def test_the_timeline_has_a_few_steps_only_and_the_same_ones_on_both_lanes_if_the_device_is_behind(device):
    timer = StepTimer(CUDA)
    for _ in range(40):
        device_step(timer, device, wait=2, copy=1, compute=9)
    device.clock.wait(100)
    timer.totals()
    steps = {name: {span.step for span in lane(timer, name)} for name in ("host", "device")}
    assert len(steps["host"] | steps["device"]) <= MOST_STEPS_SHOWN
    assert steps["device"] <= steps["host"]


def test_copies_of_a_long_validation_leave_nothing_behind():
    timer = StepTimer(torch.device("cpu"))
    timer.begin_wait(), timer.end_wait(), timer.begin_compute(), timer.end_compute(), timer.end_step(), timer.pause()
    before = len(timer._notes)
    for _ in range(1000):
        timer.begin_copy()
        timer.end_copy()
    assert len(timer._notes) == before
    assert timer.num_steps == 1
