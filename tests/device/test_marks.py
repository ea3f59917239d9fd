"""Marks in the work of a device, and the clock of the steps: neither ever waits for a device that runs behind."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
import torch

from lightning_gpufeed.device.marks import DeviceMarks, StepClock


class QueuedEvent:
    """A CUDA event in a queue that gets on only when told to. It cannot be waited for: that would fail here."""

    queue: ClassVar[list[QueuedEvent]] = []
    num_reached: ClassVar[int] = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.number = -1
        self.stream = ""

    def record(self, stream: str) -> None:
        self.number, self.stream = len(self.queue), stream
        self.queue.append(self)

    def query(self) -> bool:
        return self.number < self.num_reached

    def elapsed_time(self, end: QueuedEvent) -> float:
        assert self.query()
        assert end.query()
        return 1000.0 * (end.number - self.number)  # a second from each event to the next


@pytest.fixture
def device(monkeypatch):
    """A device whose queue gets on when `QueuedEvent.num_reached` is raised."""
    monkeypatch.setattr(QueuedEvent, "queue", [])
    monkeypatch.setattr(QueuedEvent, "num_reached", 0)
    monkeypatch.setattr(torch.cuda, "Event", QueuedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return torch.device("cuda", 1)


def run_steps(clock: StepClock, num_steps: int) -> None:
    for _ in range(num_steps):
        clock.begin()
        clock.end()


def test_steps_on_the_cpu_are_finished_when_their_code_is():
    clock = StepClock(torch.device("cpu"))
    for number in range(1, 4):
        clock.begin()
        assert clock.num_unfinished() == 0
        assert clock.num_steps == number - 1
        clock.end()
        assert (clock.num_steps, clock.num_unfinished()) == (number, 0)


def test_only_the_time_inside_steps_is_counted():
    clock, spent = StepClock(torch.device("cpu")), 0.0
    for _ in range(3):
        before = time.perf_counter()
        clock.begin()
        clock.end()
        spent += time.perf_counter() - before
        while time.perf_counter() < before + 0.01:  # between the steps
            pass
    assert 0 < clock.seconds <= spent


def test_a_step_that_did_not_begin_does_not_end():
    clock = StepClock(torch.device("cpu"))
    clock.end()
    assert clock.num_steps == 0
    clock.begin()
    clock.end()
    clock.end()
    assert clock.num_steps == 1


def test_a_step_that_never_ended_is_replaced_by_the_next_one():
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    run_steps(clock, 1)
    assert clock.num_steps == 1


def test_a_new_start_forgets_all_steps_the_running_one_too():
    clock = StepClock(torch.device("cpu"))
    run_steps(clock, 2)
    clock.begin()
    clock.reset()
    clock.end()
    assert (clock.num_steps, clock.seconds) == (0, 0.0)


def test_steps_that_the_device_has_not_reached_are_unfinished(device):
    clock = StepClock(device)
    run_steps(clock, 3)
    assert (clock.num_unfinished(), clock.num_steps, clock.seconds) == (3, 0, 0.0)
    for reached, unfinished in [(1, 3), (2, 2), (3, 2), (4, 1), (6, 0)]:
        QueuedEvent.num_reached = reached
        assert clock.num_unfinished() == unfinished
        assert clock.num_steps == 3 - unfinished
        assert clock.seconds == 3 - unfinished


def test_finished_steps_are_counted_without_anybody_asking(device):
    clock = StepClock(device)
    run_steps(clock, 1)
    QueuedEvent.num_reached = 2
    run_steps(clock, 1)
    assert (clock.num_steps, clock.seconds) == (1, 1.0)


def test_steps_are_marked_in_the_current_stream_of_their_own_device(device):
    run_steps(StepClock(device), 1)
    assert [event.stream for event in QueuedEvent.queue] == ["stream of cuda:1"] * 2


def test_a_new_start_forgets_steps_that_are_still_under_way(device):
    clock = StepClock(device)
    run_steps(clock, 2)
    clock.reset()
    QueuedEvent.num_reached = 4
    assert (clock.num_unfinished(), clock.num_steps, clock.seconds) == (0, 0, 0.0)
    run_steps(clock, 1)
    QueuedEvent.num_reached = 6
    assert (clock.num_unfinished(), clock.num_steps, clock.seconds) == (0, 1, 1.0)


# Marks -----------------------------------------------------------------------------------------------------


def test_a_mark_on_the_cpu_is_the_time():
    marks = DeviceMarks(torch.device("cpu"))
    assert not marks.is_cuda
    before = time.perf_counter()
    first, second = marks.mark(), marks.mark()
    after = time.perf_counter()
    assert marks.is_reached(first)
    assert 0 <= marks.seconds(first, second) <= after - before
    marks.recycle(first, second)
    assert marks.seconds(before, marks.mark()) > 0


def test_a_mark_is_reached_when_the_device_is_and_not_before(device):
    marks = DeviceMarks(device)
    assert marks.is_cuda
    first, second = marks.mark(), marks.mark()
    assert [marks.is_reached(first), marks.is_reached(second)] == [False, False]
    QueuedEvent.num_reached = 1
    assert [marks.is_reached(first), marks.is_reached(second)] == [True, False]
    QueuedEvent.num_reached = 2
    assert marks.seconds(first, second) == 1.0
    assert [event.stream for event in QueuedEvent.queue] == ["stream of cuda:1"] * 2


def test_a_mark_that_was_given_back_is_used_again_and_is_then_a_new_one(device):
    marks = DeviceMarks(device)
    first, second = marks.mark(), marks.mark()
    QueuedEvent.num_reached = 2
    marks.recycle(first)
    again, other = marks.mark(), marks.mark()
    assert again is first
    assert len({id(mark) for mark in (second, again, other)}) == 3  # nobody else's mark was taken
    assert not marks.is_reached(again)
    QueuedEvent.num_reached = 4
    assert marks.seconds(second, again) == 1.0
    assert marks.seconds(again, other) == 1.0


def test_marks_given_back_together_are_each_used_once(device):
    marks = DeviceMarks(device)
    made = [marks.mark() for _ in range(5)]
    QueuedEvent.num_reached = 5
    marks.recycle(*made)
    marks.recycle()
    assert {id(marks.mark()) for _ in range(5)} == {id(mark) for mark in made}
    assert marks.mark() not in made
