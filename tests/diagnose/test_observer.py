"""The watch over a training: when it asks the operating system, whom it counts, and what it keeps apart."""

from __future__ import annotations

import itertools
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpufeed.diagnose import observer as observer_module
from lightning_gpufeed.diagnose import processes
from lightning_gpufeed.diagnose.counters import BatchFacts, LoaderFacts
from lightning_gpufeed.diagnose.observer import Observer, Readers

CPU = torch.device("cpu")
NOBODY = Readers((), ())
WORKERS = LoaderFacts(num_workers=2)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Found:
    """Says who loads, and notes when it was asked."""

    def __init__(self, clock: Clock | None = None, seconds: float = 0.0) -> None:
        self.readers: Readers = NOBODY
        self.clock, self.seconds = clock, seconds
        self.times: list[float] = []

    def __call__(self) -> Readers:
        if self.clock is not None:
            self.times.append(self.clock.now)
            self.clock.now += self.seconds
        return self.readers


@pytest.fixture
def clock(monkeypatch):
    """The clock that decides when to look; what is looked at is real."""
    clock = Clock()
    monkeypatch.setattr(observer_module, "time", clock)
    return clock


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts programs, and ends those that are left."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*command: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def burn(seconds: float) -> None:
    """Keep a core busy for a time on that core."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def step(observer: Observer, *, wait: float = 0.0, compute: float = 0.0) -> None:
    """One step; the times are spent on a core."""
    observer.begin_wait()
    burn(wait)
    observer.end_wait()
    observer.steps.begin_compute()
    burn(compute)
    observer.steps.end_compute()
    observer.end_step()


def gaps(times: list[float]) -> list[float]:
    """From each to the next."""
    return [round(after - before, 6) for before, after in itertools.pairwise(times)]


# When it looks ---------------------------------------------------------------------------------------------


def look_times(clock: Clock, seconds: float, **options: Any) -> list[float]:
    """When the operating system is asked in an epoch of steps of 10 ms, since the first step's end."""
    found = Found(clock, options.pop("cost", 0.0))
    observer = Observer(CPU, found, **options)
    observer.begin_epoch(0)
    found.times.clear()
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.01
        step(observer)
    return found.times


def test_it_looks_after_the_first_step_and_then_less_and_less_often(clock):
    begin = clock.now
    times = look_times(clock, 6)
    assert times[0] == pytest.approx(begin + 0.01)
    # Steps of 10 ms: each look comes with the first step that ends after it is due.
    expected = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]
    for gap, due in zip(gaps(times), expected, strict=True):
        assert due - 1e-6 <= gap <= due + 0.010001


@pytest.mark.parametrize("interval", [0.1, 0.3, 5.0])
def test_the_interval_is_the_longest_time_between_two_looks(clock, interval):
    found = gaps(look_times(clock, 12, interval_seconds=interval))
    assert max(found) <= interval + 0.010001
    assert found[0] == pytest.approx(0.1, abs=0.010001)


@pytest.mark.parametrize("cost", [0.0007, 0.004])
def test_looks_cost_half_a_percent_of_the_time_at_most_however_long_each_takes(clock, cost):
    times = look_times(clock, 3, cost=cost)
    assert len(times) >= 3
    assert all(gap >= 200 * cost for gap in gaps(times))


def test_a_pause_is_looked_at_when_it_begins_and_is_not_part_of_what_is_watched(clock):
    found = Found(clock)
    observer = Observer(CPU, found)
    observer.begin_epoch(0)
    for _ in range(3):
        clock.now += 0.01
        step(observer)
    before = len(found.times)
    observer.pause()
    observer.pause()
    assert len(found.times) == before + 1
    assert observer.counters().num_main_steps == 2  # those between the first look and the pause
    for _ in range(4):
        clock.now += 0.3
        step(observer)
    assert observer.counters().num_main_steps == 2 + 3


def test_batches_are_looked_at_further_and_further_apart_and_smaller_ones_do_not_count(monkeypatch):
    looked_at: list[int] = []
    describe = observer_module.describe_batch

    def noted(batch: torch.Tensor) -> BatchFacts:
        looked_at.append(int(batch[0, 0]))
        return describe(batch)

    monkeypatch.setattr(observer_module, "describe_batch", noted)
    observer = Observer(CPU, Found())
    observer.begin_epoch(0)
    assert observer.counters().batch == BatchFacts()
    for number in range(300):
        num_samples = {16: 3, 256: 8}.get(number, 4)
        observer.look_at(torch.full((num_samples, 5), float(number)))
        if number == 20:
            assert observer.counters().batch.num_samples == 4
    assert looked_at == [0, 16, 256]
    assert (observer.counters().batch.num_samples, observer.counters().batch.num_bytes) == (8, 160)
    observer.begin_epoch(1)
    observer.look_at(torch.full((2, 5), 1.0))
    assert observer.counters().batch.num_samples == 2


# What counts for what --------------------------------------------------------------------------------------


def test_without_workers_the_training_thread_loads_while_it_is_waited_for():
    observer = Observer(CPU, Found())
    observer.begin_epoch(0)
    begin = time.perf_counter()
    for _ in range(3):
        step(observer, wait=0.03, compute=0.06)
    elapsed = time.perf_counter() - begin
    counters = observer.counters()
    # Some waits are left out where a look at them would cost too much; those that count are counted whole.
    assert 1 <= counters.num_watched_steps <= 3
    assert counters.readers.busy_seconds >= 0.029 * counters.num_watched_steps
    assert counters.readers.wall_seconds <= elapsed - 3 * 0.06
    assert counters.steps.compute_seconds >= 3 * 0.06
    assert counters.steps.wait_seconds >= counters.readers.wall_seconds - 0.03  # the looks are inside of one of them


def test_a_watch_without_workers_costs_half_a_percent_of_the_time_at_most(clock, monkeypatch):
    looks: list[float] = []

    def read_thread(thread_id: int) -> Any:
        looks.append(clock.now)
        clock.now += 0.0001
        return processes.read_thread(thread_id)

    monkeypatch.setattr(observer_module, "read_thread", read_thread)
    observer = Observer(CPU, Found())
    observer.begin_epoch(0)
    for _ in range(500):
        clock.now += 0.001
        step(observer)
    assert len(looks) % 2 == 0
    assert 4 <= len(looks) <= 2 * (0.5 / (2 * 200 * 0.0001) + 2)


def test_the_first_batch_of_loaders_that_run_ahead_belongs_to_the_epochs_start(clock):
    observer = Observer(CPU, Found())
    observer.loader = WORKERS
    observer.begin_epoch(0)
    clock.now += 0.5
    observer.begin_wait()
    burn(0.1)
    clock.now += 2.0
    observer.end_wait()
    assert observer.counters().start_seconds == 2.5
    observer.steps.begin_compute()
    observer.steps.end_compute()
    observer.end_step()
    clock.now += 1.0
    step(observer)
    counters = observer.counters()
    assert counters.start_seconds == 2.5
    assert counters.steps.num_steps == 2
    assert counters.steps.elapsed_seconds < 0.1


def test_the_first_wait_of_an_epoch_is_a_wait_where_nobody_runs_ahead(clock):
    observer = Observer(CPU, Found())
    observer.begin_epoch(0)
    clock.now += 0.5
    step(observer, wait=0.02)
    clock.now += 0.5
    step(observer)
    assert observer.counters().start_seconds == 0.5
    assert observer.counters().steps.wait_seconds >= 0.02


def test_what_a_validation_uses_is_not_what_the_training_uses():
    observer = Observer(CPU, Found())
    observer.begin_epoch(0)
    step(observer)
    step(observer, compute=0.02)
    observer.pause()
    before = observer.counters()
    burn(0.3)
    step(observer)
    observer.sample()
    after = observer.counters()
    for name in ("training_thread", "main"):
        used = getattr(after, name).busy_seconds - getattr(before, name).busy_seconds
        assert used < 0.2, name
    assert before.training_thread.busy_seconds >= 0.019
    assert after.steps.elapsed_seconds < before.steps.elapsed_seconds + 0.3


def epoch(observer: Observer, number: int, num_steps: int = 5) -> None:
    """Its first step begins the watch, so one less is watched."""
    observer.begin_epoch(number)
    for _ in range(num_steps):
        step(observer)
    observer.pause()


def test_short_epochs_are_watched_as_one_and_the_cold_one_is_kept_apart():
    observer = Observer(CPU, Found())
    watched, steps, is_first = [], [], []
    for number in range(4):
        epoch(observer, number)
        counters = observer.counters()
        watched.append(counters.num_main_steps)
        steps.append(counters.steps.num_steps)
        is_first.append(counters.is_first)
        assert counters.epoch == number
    assert watched == [4, 4, 8, 12]
    assert steps == [5] * 4
    assert is_first == [True, False, False, False]


def test_long_epochs_are_watched_each_for_itself(monkeypatch):
    monkeypatch.setattr(observer_module, "_SHORT_SECONDS", 0.0)
    observer = Observer(CPU, Found())
    watched = []
    for number in range(3):
        epoch(observer, number)
        watched.append(observer.counters().num_main_steps)
    assert watched == [4, 4, 4]


def test_an_epoch_that_breaks_off_in_mid_step_leaves_nothing_to_the_next():
    observer = Observer(CPU, Found())
    epoch(observer, 0)
    observer.begin_epoch(1)
    step(observer)
    observer.begin_wait()
    burn(0.05)
    observer.begin_epoch(2)
    observer.begin_wait()
    observer.end_wait()
    observer.steps.begin_compute()
    observer.begin_epoch(3)
    for _ in range(2):
        step(observer)
    counters = observer.counters()
    assert (counters.epoch, counters.steps.num_steps) == (3, 2)
    assert counters.steps.elapsed_seconds < 0.05
    assert {span.step for span in counters.timeline} == {0, 1}


def test_an_epoch_that_nobody_ended_is_watched_to_the_beginning_of_the_next():
    observer = Observer(CPU, Found())
    epoch(observer, 0)
    observer.begin_epoch(1)
    for _ in range(5):
        step(observer)
    epoch(observer, 2)
    assert observer.counters().num_main_steps == 8


def test_an_epoch_without_a_step_does_not_make_the_next_one_a_warm_one():
    observer = Observer(CPU, Found())
    observer.begin_epoch(0)
    observer.begin_epoch(0)
    step(observer)
    assert observer.counters().is_first


# Whom it counts --------------------------------------------------------------------------------------------


def test_workers_count_from_the_first_look_at_each_to_the_last_whoever_they_are(start):
    busy, other = (start("sh", "-c", "while :; do :; done") for _ in range(2))
    found = Found()
    observer = Observer(CPU, found)
    observer.loader = WORKERS
    observer.begin_epoch(0)
    edges: list[tuple[float, float]] = []

    def look(*workers: int) -> None:
        found.readers = Readers(workers, ())
        begin = time.monotonic()
        observer.sample()
        edges.append((begin, time.monotonic()))
        observer.steps.begin_wait()
        observer.steps.end_wait()
        observer.steps.begin_compute()
        observer.steps.end_compute()
        observer.steps.end_step()
        time.sleep(0.05)

    look(busy.pid)
    look(busy.pid, other.pid)
    look(other.pid)
    look()
    look(other.pid)
    usage = observer.counters().readers
    # `busy` between looks 0 and 1, `other` between looks 1 and 2; never both looks at one.
    shortest = sum(edges[number + 1][0] - edges[number][1] for number in (0, 1))
    longest = sum(edges[number + 1][1] - edges[number][0] for number in (0, 1))
    assert shortest <= usage.wall_seconds <= longest
    assert usage.busy_seconds > 0
    assert observer.counters().num_hidden_readers == 0


def test_workers_that_end_between_two_looks_disturb_nobody(start):
    found = Found()
    observer = Observer(CPU, found)
    observer.loader = WORKERS
    observer.begin_epoch(0)
    dying, living = start("sleep", "100"), start("sleep", "100")
    found.readers = Readers((dying.pid, living.pid), ())
    step(observer)
    step(observer)
    observer.sample()
    wall = observer.counters().readers.wall_seconds
    dying.kill()
    dying.wait()
    step(observer)
    observer.sample()
    counters = observer.counters()
    assert counters.num_hidden_readers == 0
    assert counters.readers.wall_seconds > wall
    living.kill()
    living.wait()
    observer.pause()
    assert observer.counters().readers.wall_seconds >= counters.readers.wall_seconds
    assert observer.counters().steps.num_steps == 3


def test_steps_count_as_watched_while_a_reader_is_there_to_be_seen(start):
    found = Found()
    observer = Observer(CPU, found)
    observer.loader = WORKERS
    observer.begin_epoch(0)
    worker = start("sleep", "100")
    found.readers = Readers((worker.pid,), ())
    for _ in range(4):
        step(observer)
    observer.sample()
    assert observer.counters().num_watched_steps == 3
    worker.kill()
    worker.wait()
    for _ in range(5):
        step(observer)
    observer.pause()
    counters = observer.counters()
    assert (counters.num_watched_steps, counters.num_main_steps) == (3, 8)


def test_a_batch_that_is_used_several_times_is_delivered_once(start):
    found = Found()
    observer = Observer(CPU, found)
    observer.loader = WORKERS
    observer.begin_epoch(0)
    found.readers = Readers((start("sleep", "100").pid,), ())
    for number in range(9):
        if number % 3 == 0:
            observer.look_at(torch.ones(2, 2))
        step(observer)
    observer.sample()
    counters = observer.counters()
    assert (counters.steps.num_steps, counters.num_main_steps, counters.num_watched_steps) == (9, 8, 2)


@pytest.mark.parametrize(("loader", "is_asked"), [(WORKERS, True), (LoaderFacts(), False)], ids=["workers", "alone"])
def test_a_loader_that_runs_ahead_is_asked_at_each_request_whether_it_is_ready(loader, is_asked):
    asked: list[int] = []

    def is_ready() -> bool:
        asked.append(len(asked))
        return True

    observer = Observer(CPU, Found(), is_ready=is_ready)
    observer.loader = loader
    observer.begin_epoch(0)
    for _ in range(3):
        step(observer)
    steps = observer.counters().steps
    assert asked == ([0, 1, 2] if is_asked else [])
    assert steps.ready_seconds == (pytest.approx(steps.wait_seconds) if is_asked else None)


def test_a_hidden_reader_is_taken_to_do_what_the_others_do(start, monkeypatch):
    seen, hidden = start("sleep", "100"), start("sleep", "100")
    read = processes._read

    def read_some(path: str) -> bytes | None:
        return None if path.startswith(f"/proc/{hidden.pid}/") else read(path)

    monkeypatch.setattr(processes, "_read", read_some)
    found = Found()
    observer = Observer(CPU, found)
    observer.loader = WORKERS
    observer.begin_epoch(0)
    found.readers = Readers((seen.pid, hidden.pid), ())
    begin = time.monotonic()
    step(observer)
    between = time.monotonic()
    time.sleep(0.05)
    step(observer)
    then = time.monotonic()
    observer.sample()
    end = time.monotonic()
    counters = observer.counters()
    assert counters.num_hidden_readers == 1
    assert 2 * (then - between) <= counters.readers.wall_seconds <= 2 * (end - begin)


def test_a_reading_thread_counts_as_a_reader_and_is_taken_off_the_training():
    found = Found()
    observer = Observer(CPU, found)
    observer.loader = LoaderFacts(has_thread=True)
    observer.begin_epoch(0)
    may_burn, may_end = threading.Event(), threading.Event()

    def read() -> None:
        may_burn.wait()
        burn(0.2)
        burned.set()
        may_end.wait()

    burned = threading.Event()
    thread = threading.Thread(target=read)
    thread.start()
    try:
        found.readers = Readers((), (thread.native_id,))
        step(observer)
        may_burn.set()
        burned.wait()
        step(observer)
        observer.sample()
        counters = observer.counters()
    finally:
        may_burn.set()
        may_end.set()
        thread.join()
    assert counters.readers.busy_seconds >= 0.19
    assert counters.main.busy_seconds < 0.1
    assert counters.training_thread.busy_seconds < 0.1
    observer.sample()  # of a thread that has ended
    assert observer.counters().num_hidden_readers == 0


def test_readers_without_a_second_look_are_not_known():
    observer = Observer(CPU, Found())
    observer.loader = WORKERS
    observer.begin_epoch(0)
    step(observer)
    counters = observer.counters()
    assert (counters.readers, counters.main, counters.training_thread) == (None, None, None)
    assert (counters.num_watched_steps, counters.read_ratio) == (0, None)


@pytest.mark.parametrize("loader", [LoaderFacts(), WORKERS], ids=["alone", "workers"])
def test_without_proc_the_steps_are_counted_all_the_same(tmp_path, monkeypatch, loader):
    monkeypatch.setattr(processes, "_PROC", str(tmp_path / "none"))
    found = Found()
    found.readers = Readers((), (threading.get_native_id(),))
    observer = Observer(CPU, found)
    observer.loader = loader
    for number in range(2):
        epoch(observer, number)
    counters = observer.counters()
    assert counters.steps.num_steps == 5
    assert counters.readers is None
    assert counters.training_thread is None or counters.training_thread.wall_seconds == 0


# The rest --------------------------------------------------------------------------------------------------


def test_counters_say_which_rank_they_are_of_and_how_it_loads():
    observer = Observer(CPU, Found(), rank=2, num_ranks=3)
    observer.loader = WORKERS
    observer.begin_epoch(7)
    counters = observer.counters()
    assert (counters.epoch, counters.rank, counters.num_ranks) == (7, 2, 3)
    assert counters.loader is WORKERS
    assert counters.steps.sync_seconds == 0.0
    assert (counters.machine.device_free_bytes, counters.machine.device_utilisation) == (None, None)
    observer.close()
    observer.close()
    assert observer.counters().epoch == 7


def test_ranks_that_share_cores_have_a_part_of_them_each():
    alone, shared = (Observer(CPU, Found(), num_sharing=number) for number in (1, 4))
    assert shared.counters().machine.num_cores == alone.counters().machine.num_cores / 4


def test_nothing_is_drawn_from_a_random_generator():
    state = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    observer = Observer(CPU, Found())
    observer.begin_epoch(0)
    observer.look_at({"x": torch.zeros(64, 64), "y": [torch.zeros(3)]})
    step(observer)
    observer.sample()
    observer.counters()
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert all(np.array_equal(one, two) for one, two in zip(np.random.get_state(), state[2], strict=True))


def test_calls_before_the_first_epoch_or_in_another_order_are_no_error():
    observer = Observer(CPU, Found())
    observer.pause()
    observer.end_wait()
    observer.look_at(SimpleNamespace())
    step(observer)
    observer.sample()
    observer.counters()
    observer.begin_epoch(0)
    observer.end_step()
    step(observer)
    assert observer.counters().steps.num_steps == 1
