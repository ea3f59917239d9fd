"""What only a device can show of `StepTimer`: its events against a clock with the device waited for.

Each has a twin that runs everywhere, on a simulated queue: tests/diagnose/test_steps.py. The device's work is a kernel
that spins for a number of its clock's cycles, calibrated here; the clock's rate may change by a tenth while it warms
up or cools down, so times agree up to a fifth.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_gpufeed.diagnose.steps import StepTimer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]

DEVICE = torch.device("cuda")
TOLERANCE = 0.2


def synchronised(work: Callable[[], object]) -> float:
    """Seconds of some work by the host's clock, the device waited for before and after; median of five."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@pytest.fixture(scope="module")
def cycles_per_second() -> float:
    """How fast the device spins. Waits until its clock has warmed up."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        torch.cuda._sleep(10_000_000)
        torch.cuda.synchronize()
    cycles = 20_000_000
    empty = synchronised(lambda: torch.cuda._sleep(1))
    return cycles / (synchronised(lambda: torch.cuda._sleep(cycles)) - empty)


@pytest.fixture
def busy(cycles_per_second: float) -> Callable[[float], None]:
    """Gives the device work of some seconds."""

    def give(seconds: float) -> None:
        torch.cuda._sleep(int(seconds * cycles_per_second))

    return give


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def step(
    timer: StepTimer,
    compute: Callable[[], object],
    *,
    wait: float = 0.0,
    copy: Callable[[], object] | None = None,
) -> None:
    """One step; the host waits for nothing but the loader."""
    timer.begin_wait()
    if wait:
        time.sleep(wait)
    timer.end_wait()
    if copy is not None:
        timer.begin_copy()
        copy()
        timer.end_copy()
    timer.begin_compute()
    compute()
    timer.end_compute()
    timer.end_step()


def test_computing_is_what_a_clock_says_that_waits_for_the_device(busy):
    timer, num_steps = StepTimer(DEVICE), 12
    torch.cuda.synchronize()
    for _ in range(num_steps):
        step(timer, lambda: busy(0.01))
    torch.cuda.synchronize()
    totals = timer.totals()
    expected = synchronised(lambda: busy(0.01))
    assert totals.num_timed == num_steps
    assert totals.compute_seconds / num_steps == pytest.approx(expected, rel=TOLERANCE)
    # Nothing was copied: two events, one right behind the other.
    assert totals.copy_seconds < 0.1 * totals.compute_seconds
    # The host gave everything away at once, and the device went from step to step.
    assert totals.elapsed_seconds < totals.compute_seconds
    assert totals.idle_seconds < 0.1 * totals.compute_seconds


def test_a_device_that_waits_for_a_slow_loader_is_idle_for_the_rest_of_the_time(busy):
    timer, num_steps = StepTimer(DEVICE), 12
    for _ in range(num_steps):
        step(timer, lambda: busy(0.01), wait=0.03)
    torch.cuda.synchronize()
    totals = timer.totals()
    elapsed = totals.elapsed_seconds / num_steps
    assert totals.compute_seconds / num_steps == pytest.approx(0.01, rel=TOLERANCE)
    # Sleeping may take longer than asked for, never less; the device's idle time follows the host's.
    assert totals.idle_seconds / num_steps == pytest.approx(elapsed - 0.01, rel=TOLERANCE)
    assert totals.data_seconds == pytest.approx(min(totals.wait_seconds, totals.idle_seconds))
    assert totals.wait_share > 0.4


def test_a_loop_that_waits_while_the_device_still_works_is_not_called_loader_bound(busy):
    timer = StepTimer(DEVICE)
    busy(0.1)  # so that the host is ahead from the beginning
    for _ in range(20):
        step(timer, lambda: busy(0.02), wait=0.01)
    torch.cuda.synchronize()
    totals = timer.totals()
    assert totals.wait_seconds > 0.5 * totals.elapsed_seconds
    assert totals.idle_seconds < 0.1 * totals.compute_seconds
    assert totals.wait_share < 0.1


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_copy_is_what_a_clock_says_that_waits_for_the_device(busy, is_pinned):
    batch = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=is_pinned)
    on_device = torch.empty_like(batch, device=DEVICE)

    def copy() -> None:
        on_device.copy_(batch, non_blocking=True)

    expected = synchronised(copy)
    timer, num_steps = StepTimer(DEVICE), 10
    for _ in range(num_steps):
        step(timer, lambda: busy(0.002), copy=copy)
    torch.cuda.synchronize()
    totals = timer.totals()
    # A bus is shared with others on the machine; pages are, too.
    assert totals.copy_seconds / num_steps == pytest.approx(expected, rel=2 * TOLERANCE)
    assert totals.compute_seconds / num_steps == pytest.approx(0.002, rel=2 * TOLERANCE)


def test_nothing_in_a_step_or_in_its_sums_waits_for_the_device(busy, no_waiting):
    batch = torch.empty(1 << 20, pin_memory=True)
    on_device = torch.empty_like(batch, device=DEVICE)
    timer = StepTimer(DEVICE, num_ranks=2)
    for _ in range(20):
        timer.begin_sync()
        timer.end_sync()
        step(timer, lambda: busy(0.02), copy=lambda: on_device.copy_(batch, non_blocking=True))
        timer.totals()
        timer.timeline()
    timer.pause()
    totals = timer.totals()
    # A clock that waited would have read them all.
    assert totals.num_timed < totals.num_steps == 20
    timer.reset()
    assert timer.totals().num_steps == 0


def test_steps_are_read_when_the_device_has_finished_them_and_stand_for_the_others(busy):
    timer = StepTimer(DEVICE)
    torch.cuda.synchronize()
    for _ in range(10):
        step(timer, lambda: busy(0.05))
    deadline = time.monotonic() + 20
    while not 3 <= timer.totals().num_timed < 10 and time.monotonic() < deadline:
        time.sleep(0.005)
    totals = timer.totals()
    assert totals.compute_seconds == pytest.approx(0.5, rel=TOLERANCE)
    torch.cuda.synchronize()
    assert timer.totals().num_timed == 10
    assert timer.totals().compute_seconds == pytest.approx(0.5, rel=TOLERANCE)


def test_events_are_used_again_and_times_stay_right(busy, monkeypatch):
    made: list[torch.cuda.Event] = []
    own = torch.cuda.Event

    def event(**options: bool) -> torch.cuda.Event:
        made.append(own(**options))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    timer, num_steps = StepTimer(DEVICE), 300
    for number in range(num_steps):
        step(timer, lambda: busy(0.001))
        if number % 5 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    totals = timer.totals()
    assert totals.num_timed == num_steps
    assert len(made) < 40
    assert totals.compute_seconds / num_steps == pytest.approx(0.001, rel=2 * TOLERANCE)  # starting a kernel is in it


def test_work_in_a_stream_of_ones_own_is_measured_there(busy):
    timer = StepTimer(DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            step(timer, lambda: busy(0.01))
    torch.cuda.synchronize()
    assert timer.totals().compute_seconds == pytest.approx(0.05, rel=TOLERANCE)


def test_the_device_is_shown_in_the_hosts_time_in_order_and_never_before_it_was_asked(busy):
    timer = StepTimer(DEVICE)
    busy(0.2)  # of a validation, say
    for _ in range(12):
        step(timer, lambda: busy(0.005), wait=0.002)
    torch.cuda.synchronize()
    for _ in range(4):
        step(timer, lambda: busy(0.005), wait=0.05)
    torch.cuda.synchronize()
    timer.totals()
    spans = timer.timeline()
    lanes = {name: [span for span in spans if span.lane == name] for name in ("host", "device")}
    assert {span.step for span in lanes["device"]} == {span.step for span in lanes["host"]} == set(range(8, 16))
    for before, after in itertools.pairwise(lanes["device"]):
        assert before.begin <= before.end <= after.begin + 1e-5  # rounding of CUDA's events: half a microsecond each
    given = {span.step: span.begin for span in lanes["host"] if span.phase == "compute"}
    for span in lanes["device"]:
        if span.phase == "compute":
            # The mark is set just before the host notes the time; between the two lie some microseconds.
            assert span.begin >= given[span.step] - 0.001
            assert span.end - span.begin == pytest.approx(0.005, rel=TOLERANCE)
    # Where the device waits for the host, its work begins when it is given.
    last = next(span for span in reversed(lanes["device"]) if span.phase == "compute")
    assert last.begin == pytest.approx(given[15], abs=0.005)
