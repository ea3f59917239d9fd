from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_gpufeed.device import marks
from lightning_gpufeed.sync.times import StepSeconds, StepTimes, medians
from tests.sync.clock import Clock

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(marks, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def play(times: StepTimes, clock: Clock, *events: str) -> StepSeconds | None:
    """Note events such as "F2 8": 8 seconds later layer 2's forward begins."""
    for event in events:
        kind, seconds = event.split()
        clock.now += float(seconds)
        name = kind.rstrip("0123456789")
        times.note(name, int(kind[len(name) :] or -1))
    return times.take()


def begun(clock: Clock, num_layers: int) -> StepTimes:
    times = StepTimes(CPU, num_layers)
    assert times.take() is None  # the step in which the measuring began is no whole one
    return times


def test_each_part_of_a_step_gets_its_time(clock):
    times = begun(clock, 3)
    # each begins so many seconds after the one before
    step = play(
        times,
        clock,
        *("forward 1", "F0 2", "F1 4", "F2 8", "backward 16", "I2 32", "W2 64", "I1 128", "W1 256", "B0 512"),
        *("copied 1024", "waited 2048", "update 4096", "updated 8192"),
    )
    parts = (4.0, 8.0, 16.0), (512.0, 128.0, 32.0), (0.0, 256.0, 64.0)
    assert step == StepSeconds(*parts, copies=1024, updates=8192, other=1 + 2 + 4096, deferred_bytes=(0, 0, 0))


def test_waiting_is_no_part_of_a_step_and_all_else_is(clock):
    times = begun(clock, 1)
    clock.now += 0.0
    step = play(times, clock, "forward 1", "F0 1", "backward 1", "B0 1", "wait 1", "waited 50")
    assert step.other == 3.0
    clock.now += 5.0
    step = play(times, clock, "forward 1", "F0 1", "backward 1", "B0 1", "wait 1", "waited 50")
    assert step.other == 8.0


def test_a_layer_that_runs_twice_has_both_its_times(clock):
    step = play(begun(clock, 2), clock, "forward 1", "F0 1", "F1 2", "F0 4", "backward 8", "B1 16", "B0 32", "B0 64")
    assert step.forward == (2.0 + 8.0, 4.0)
    assert step.input_grad == (96.0, 16.0)


def test_of_several_microbatches_the_last_one_counts_and_the_others_are_the_rest(clock):
    events = ("forward 1", "F0 2", "backward 4", "B0 8")
    step = play(begun(clock, 1), clock, *events, "forward 16", "F0 32", "backward 64", "B0 128")
    assert (step.forward, step.input_grad) == ((64.0,), (128.0,))
    assert step.other == 1 + 2 + 4 + 8 + 16 + 32


def test_a_step_without_a_forward_is_none(clock):
    times = begun(clock, 1)
    assert play(times, clock, "backward 1", "B0 1") is None
    assert play(times, clock, "forward 1", "F0 1", "backward 1", "B0 1") is not None


def test_a_layer_that_did_not_run_took_no_time(clock):
    step = play(begun(clock, 2), clock, "forward 1", "F0 1", "backward 1", "B0 1")
    assert (step.forward[1], step.input_grad[1], step.weight_grad[1]) == (0.0, 0.0, 0.0)


def test_of_the_bytes_of_a_layer_the_most_are_kept(clock):
    times = begun(clock, 2)
    for num_bytes in (5, 9, 7):
        times.note_bytes(1, num_bytes)
    assert play(times, clock, "forward 1").deferred_bytes == (0, 9)


def test_numbers_of_a_step_can_be_read_back():
    step = StepSeconds((1.0, 2.0), (3.0, 4.0), (5.0, 6.0), 7.0, 8.0, 9.0, (10, 11))
    assert step.numbers() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert StepSeconds.of_numbers(step.numbers(), step.deferred_bytes) == step
    assert StepSeconds.of_numbers([7.0, 8.0, 9.0], ()) == StepSeconds((), (), (), 7.0, 8.0, 9.0)


def test_medians_are_taken_of_each_part_by_itself():
    steps = [
        StepSeconds((1.0,), (30.0,), (2.0,), 6.0, 1.0, 100.0, (1,)),
        StepSeconds((3.0,), (10.0,), (2.0,), 5.0, 9.0, 300.0, (1,)),
        StepSeconds((2.0,), (20.0,), (9.0,), 4.0, 2.0, 200.0, (4,)),
    ]
    assert medians(steps) == StepSeconds((2.0,), (20.0,), (2.0,), 5.0, 2.0, 200.0, (4,))


@pytest.mark.gpu
def test_seconds_are_those_of_the_device():
    device = torch.device("cuda")
    times = StepTimes(device, 1)
    times.take()
    x = torch.ones(1 << 20, device=device)
    times.note("forward")
    times.note("F", 0)
    for _ in range(20):
        x = x * 1.0
    times.note("backward")
    times.note("B", 0)
    assert times.take().forward[0] > 0.0


def test_seconds_are_those_of_the_host_without_a_device():
    times = StepTimes(CPU, 1)
    times.take()
    for kind, layer in [("forward", -1), ("F", 0), ("backward", -1), ("B", 0)]:
        times.note(kind, layer)
    assert times.take().forward[0] >= 0.0
