"""Counts of an epoch, and when a batch that is not there is worth waiting for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from lightning_gpufeed.device.marks import StepClock
from lightning_gpufeed.echo import measures as measures_module
from lightning_gpufeed.echo.measures import EchoMeasures
from lightning_gpufeed.echo.plan import Piece
from tests.doubles import WAIT_SECONDS

NEVER = threading.Event()


class NextBatch:
    """A loader whose next batch is ready once an event has happened."""

    def __init__(self, event: threading.Event, seconds_to_go: float = 1000.0) -> None:
        self.event = event
        self.seconds = seconds_to_go
        self.num_asked = 0

    def is_ready(self) -> bool:
        self.num_asked += 1
        return self.event.is_set()

    def seconds_to_go(self) -> float:
        return self.seconds


class BusyClock(StepClock):
    """The clock of a device that has so many steps still to do; after each look, `on_look` is called."""

    def __init__(self, unfinished: int, on_look: Callable[[], None] = lambda: None) -> None:
        super().__init__(torch.device("cpu"))
        self.unfinished = unfinished
        self.on_look = on_look

    def num_unfinished(self) -> int:
        self.on_look()
        return self.unfinished


def ready() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def measures(clock: StepClock | None = None) -> EchoMeasures:
    return EchoMeasures(clock or StepClock(torch.device("cpu")))


def walk(measured: EchoMeasures, passes: list[int], num_pieces: int) -> None:
    """Count the steps of an epoch."""
    for fetch, num_passes in enumerate(passes):
        for pass_index in range(num_passes):
            for piece_index in range(num_pieces):
                measured.count(Piece(fetch, pass_index, piece_index, is_fetch=pass_index == piece_index == 0))


# Counts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passes", "num_pieces", "counts"),
    [
        ([1, 1, 1], 1, [3, 3, 3, 0]),
        ([2, 2], 2, [2, 4, 8, 4]),
        ([3, 1, 2], 1, [3, 6, 6, 3]),
        ([], 1, [0, 0, 0, 0]),
    ],
)
def test_fetches_passes_steps_and_echoes_are_counted(passes, num_pieces, counts):
    measured = measures()
    walk(measured, passes, num_pieces)
    assert measured.counts() == counts
    assert [measured.num_fetches, measured.num_passes, measured.num_steps, measured.num_echo_steps] == counts


@pytest.mark.parametrize("piece", [Piece(3), Piece(3, 0, 1), Piece(3, 1, 0), Piece(3, 2, 1)], ids=repr)
def test_a_step_that_will_be_done_again_is_left_out(piece):
    measured = measures()
    walk(measured, [2, 2], 2)
    before = measured.counts()
    measured.count(piece)
    assert measured.counts(piece) == before
    assert measured.counts() != before


def test_a_batch_that_is_fetched_again_to_go_on_in_its_middle_counts_once():
    first = measures()
    walk(first, [1], 2)
    first.count(Piece(1))
    resumed = measures()
    resumed.restore(first.counts())
    resumed.count(Piece(1, 0, 1, is_fetch=True))  # the first step after the resume
    whole = measures()
    walk(whole, [1, 1], 2)
    assert resumed.counts() == whole.counts()


def test_a_new_epoch_begins_at_nothing():
    measured = measures()
    walk(measured, [2, 2], 2)
    measured.times.add(1.0, 0.0, False)
    measured.clock.begin()
    measured.clock.end()
    measured.reset()
    assert measured.counts() == [0, 0, 0, 0]
    assert measured.times.seconds_per_batch == 0
    assert measured.clock.num_steps == 0
    assert measured.pass_seconds == 0


def test_a_pass_takes_as_long_as_its_steps():
    measured = measures()
    assert measured.pass_seconds == 0
    walk(measured, [2, 3], 4)
    assert measured.pass_seconds == 0  # no step is finished
    measured.clock.num_steps, measured.clock.seconds = 10, 1.0  # of twenty steps ten are finished
    assert measured.pass_seconds == pytest.approx(0.4)  # rounding of three divisions


# Waiting ---------------------------------------------------------------------------------------------------


def test_a_batch_that_is_there_is_not_late():
    measured = measures()
    assert not measured.is_late([NextBatch(ready())])
    assert measured.times.wait_seconds == 0


def test_a_batch_that_takes_long_yet_is_late_without_waiting():
    loader = NextBatch(NEVER, seconds_to_go=1000.0)
    measured = measures()
    assert measured.is_late([loader])
    assert loader.num_asked == 1
    assert measured.times.wait_seconds == 0


def test_all_loaders_have_to_be_ready():
    loaders = [NextBatch(ready()), NextBatch(NEVER)]
    assert measures().is_late(loaders)
    assert measures().is_late(loaders[::-1])
    assert not measures().is_late([NextBatch(ready()), NextBatch(ready())])
    assert not measures().is_late([])


def test_while_the_device_is_busy_nothing_is_decided():
    # It has work for more than this step: the batch may come before it runs dry.
    came, looks = threading.Event(), []

    def look() -> None:
        looks.append(len(looks))
        if len(looks) == 5:
            came.set()

    assert not measures(BusyClock(2, look)).is_late([NextBatch(came)])
    assert len(looks) == 5


def test_when_the_device_is_about_to_run_dry_a_missing_batch_is_late():
    clock = BusyClock(3)

    def look() -> None:
        if clock.unfinished > 1:
            clock.unfinished -= 1

    clock.on_look = look
    assert measures(clock).is_late([NextBatch(NEVER)])
    assert clock.unfinished == 1


def test_waiting_for_the_device_is_no_waiting_for_a_batch():
    came, looks = threading.Event(), []

    def look() -> None:
        looks.append(0)
        if len(looks) == 20:
            came.set()

    measured = measures(BusyClock(2, look))
    assert not measured.is_late([NextBatch(came)])
    assert measured.times.wait_seconds == 0


def test_a_batch_that_is_about_to_come_is_waited_for(monkeypatch):
    # A loader that is fast on average: it has a budget for being late now and then.
    monkeypatch.setattr(measures_module, "_FIRST_PATIENCE_SECONDS", WAIT_SECONDS)
    measured, came = measures(), threading.Event()
    measured.clock.num_steps, measured.clock.seconds = 1, 1.0
    walk(measured, [1], 1)
    measured.times.add(0.01, 0.0, False)
    loader = NextBatch(came, seconds_to_go=0.0)
    answers: list[bool] = []
    asker = threading.Thread(target=lambda: answers.append(measured.is_late([loader])))
    asker.start()
    while loader.num_asked < 3:  # it asks again and again
        pass
    assert answers == []
    came.set()
    asker.join(WAIT_SECONDS)
    assert answers == [False]
    assert 0 < measured.times.wait_seconds < WAIT_SECONDS


def test_a_budget_that_was_used_up_is_gone():
    measured = measures()
    measured.clock.num_steps, measured.clock.seconds = 1, 1.0
    walk(measured, [1], 1)
    measured.times.add(0.01, 0.0, False)
    full = measured._patience()
    assert full == pytest.approx(0.05 * 1.0 + 0.05)  # rounding
    measured.times.wait_seconds = 0.03
    assert measured._patience() == pytest.approx(full - 0.03)
    measured.times.wait_seconds = 100.0
    assert measured._patience() == pytest.approx(0.05 * 1.0)  # what a moment of one pass is worth


def test_a_slow_loader_is_not_waited_for_longer_than_a_moment():
    # Waiting for it would make every step as slow as the loader.
    measured = measures()
    measured.clock.num_steps, measured.clock.seconds = 1, 1.0
    walk(measured, [1], 1)
    measured.times.add(4.0, 0.0, False)
    assert measured._patience() == pytest.approx(0.05 * 1.0)


def test_in_the_long_run_waiting_stays_a_small_share():
    measured, waited = measures(), 0.0
    measured.times.add(0.01, 0.0, False)
    for step in range(1, 200):
        measured.clock.num_steps, measured.clock.seconds = step, step * 0.1
        measured.count(Piece(step))
        patience = measured._patience()
        measured.times.wait_seconds += patience  # a batch that is late every time, by all it may be
        waited += patience
    assert waited <= 0.05 + 0.1 * measured.clock.seconds
