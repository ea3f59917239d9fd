"""Fetching one batch ahead: in which thread, how far, what is known of the next one, and how it ends."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

import lightning_gpufeed.device.feed as feed_module
from lightning_gpufeed.echo import fetcher as fetcher_module
from lightning_gpufeed.echo.fetcher import BatchFetcher, FetchTimes
from lightning_gpufeed.echo.trial import ReadAheadTrial
from tests.doubles import WAIT_SECONDS, EventLog, parking_condition
from tests.echo.hand_loop import READER, Batches, GatedBatches, ResumableBatches, reader_threads, wait_until

HERE = "MainThread"


def fetcher(
    loader: Any,
    *,
    may_read_ahead: bool | None = None,
    is_uninterrupted: bool = True,
    read_state: Callable[[], Any] = lambda: None,
    times: FetchTimes | None = None,
    **options: Any,
) -> contextlib.closing[BatchFetcher]:
    """Fetch from a loader, and end its thread afterwards."""
    trial = ReadAheadTrial(loader, is_uninterrupted=is_uninterrupted)
    trial.verdict = may_read_ahead
    return contextlib.closing(BatchFetcher(loader, read_state, times or FetchTimes(), trial, **options))


def taken(fetch: BatchFetcher, between: Callable[[], Any] = lambda: None) -> list[Any]:
    """Take all batches, as lists, and do something in between."""
    batches = []
    with contextlib.suppress(StopIteration):
        while True:
            batch = fetch.take()
            between()
            batches.append(batch.tolist() if isinstance(batch, torch.Tensor | np.ndarray) else batch)
    return batches


class Numbers(Dataset):
    """Sample i is i; notes the thread that asked for it, and may draw a random number for it."""

    def __init__(self, size: int = 8, draw: Callable[[], float] | None = None) -> None:
        self.size = size
        self.draw = draw
        self.threads: list[str] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.threads.append(threading.current_thread().name)
        return index if self.draw is None else index + self.draw()


class Noting(Batches):
    """Batches of a loader of unknown kind, and the thread that asked for each."""

    def __init__(self, num_samples: int, batch_size: int = 4) -> None:
        super().__init__(num_samples, batch_size)
        self.threads: list[str] = []

    def batch(self, number: int) -> Any:
        self.threads.append(threading.current_thread().name)
        return super().batch(number)


class ReadyByItself(Noting):
    """A loader that reads ahead by itself."""

    is_there = True

    def is_ready(self) -> bool:
        return self.is_there


# Threads ---------------------------------------------------------------------------------------------------


def test_the_first_batch_is_fetched_in_the_callers_thread_and_the_others_ahead():
    dataset = Numbers()
    with fetcher(DataLoader(dataset, batch_size=2)) as fetch:
        assert taken(fetch) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dataset.threads == [HERE] * 2 + [READER] * 6


def test_of_a_loader_of_unknown_kind_two_batches_are_fetched_in_the_callers_thread():
    loader = Noting(16)
    with fetcher(loader) as fetch:
        assert taken(fetch) == [list(range(first, first + 4)) for first in range(0, 16, 4)]
    assert loader.threads == [HERE] * 2 + [READER] * 2


def test_a_loader_that_was_found_good_is_read_ahead_after_its_first_batch():
    # In the epochs after the first: shuffling draws its seed with the first batch of each.
    loader = Noting(16)
    with fetcher(loader, may_read_ahead=True) as fetch:
        taken(fetch)
    assert loader.threads == [HERE] + [READER] * 3


def test_a_loader_that_may_not_be_read_ahead_never_is():
    loader = Noting(16)
    with fetcher(loader, may_read_ahead=False) as fetch:
        assert fetch.is_ready()
        taken(fetch)
    assert loader.threads == [HERE] * 4


def test_a_loader_that_knows_when_it_is_ready_is_asked_and_not_read_ahead():
    loader = ReadyByItself(16)
    with fetcher(loader, may_read_ahead=False) as fetch:
        fetch.take()
        assert fetch.is_ready()
        loader.is_there = False
        assert not fetch.is_ready()
        assert fetch.seconds_to_go() == 0
        taken(fetch)
    assert loader.threads == [HERE] * 4


def test_torch_in_the_thread_keeps_its_number_of_cores():
    # A sum over several cores rounds differently: batches must be the same as without the thread.
    torch.set_num_threads(3)
    dataset = Numbers(4, torch.get_num_threads)
    with fetcher(DataLoader(dataset)) as fetch:
        assert taken(fetch) == [[3], [4], [5], [6]]
    assert dataset.threads[1:] == [READER] * 3
    assert torch.get_num_threads() == 3


# One batch ahead -------------------------------------------------------------------------------------------


def test_exactly_one_batch_is_fetched_ahead(monkeypatch):
    parked = EventLog()
    monkeypatch.setattr(feed_module.threading, "Condition", parking_condition(parked, READER))
    loader = Batches(20)
    with fetcher(loader, may_read_ahead=True) as fetch:
        for number in range(4):
            parked.events.clear()
            assert fetch.take().tolist() == loader.batch(number).tolist()
            if number < 3:
                parked.wait_for("parked")  # the thread can go no further by itself
                assert loader.log.events[-1] == f"end {number + 1}"


def test_a_batch_is_ready_from_the_moment_it_is_there():
    loader = GatedBatches(12, gated=[1, 2])
    with fetcher(loader, may_read_ahead=True) as fetch:
        fetch.take()
        for number in (1, 2):
            loader.log.wait_for(f"begin {number}")
            assert not fetch.is_ready()
            loader.gates[number].set()
            wait_until(fetch.is_ready)
            assert fetch.take().tolist() == loader.batch(number).tolist()
        wait_until(fetch.is_ready)  # that there is none is known without waiting too
        with pytest.raises(StopIteration):
            fetch.take()


def test_asking_whether_a_batch_is_ready_begins_to_read_ahead_where_that_was_open():
    # The steps on the first batch drew nothing: the loader's own draws are in nobody's way.
    dataset = Numbers(8, random.random)
    with fetcher(DataLoader(dataset, batch_size=2)) as fetch:
        fetch.take()
        assert reader_threads() == []
        fetch.is_ready()
        wait_until(lambda: len(dataset.threads) == 4)
    assert dataset.threads == [HERE] * 2 + [READER] * 2


def test_where_nobody_reads_ahead_a_batch_counts_as_ready():
    with fetcher(Batches(12)) as fetch:
        assert fetch.is_ready()
        fetch.take()
        assert fetch.is_ready()
        assert fetch.seconds_to_go() == 0


def test_the_time_to_go_is_what_batches_took_less_what_has_passed():
    loader, times = GatedBatches(12, gated=[1]), FetchTimes()
    with fetcher(loader, may_read_ahead=True, times=times) as fetch:
        fetch.take()
        loader.log.wait_for("begin 1")
        times.num_batches, times.seconds = 2, 2000.0
        assert 900 < fetch.seconds_to_go() < 1000
        times.seconds = 1e-9
        assert fetch.seconds_to_go() == 0  # overdue
        loader.open_all()


# No further than an epoch goes -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_batches", [1, 2, 3])
def test_no_batch_beyond_those_that_will_be_taken_is_asked_for(max_batches):
    loader = Batches(40)
    with fetcher(loader, may_read_ahead=True, max_batches=max_batches) as fetch:
        for _ in range(max_batches):
            fetch.take()
        for thread in reader_threads():
            thread.join(WAIT_SECONDS)  # it ends by itself
        assert fetch.is_ready()
        with pytest.raises(StopIteration):
            fetch.take()
    assert loader.log.events[-1] == f"end {max_batches - 1}"


def test_a_shuffle_with_a_generator_of_its_own_draws_no_more_than_in_a_plain_loop():
    # Asked once more after its last batch, torch's sampler draws another permutation.
    def orders(run: Callable[[Any], list[Any]]) -> list[Any]:
        loader = DataLoader(range(8), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
        return [run(loader) for _ in range(3)]

    def plain(loader: Any) -> list[Any]:
        iterator = iter(loader)
        return [next(iterator).tolist() for _ in range(len(loader))]  # a loop that knows the length asks no further

    def ahead(loader: Any) -> list[Any]:
        with fetcher(loader, max_batches=len(loader)) as fetch:
            batches = [fetch.take().tolist() for _ in range(len(loader))]
            assert len(reader_threads()) <= 1
            return batches

    assert orders(ahead) == orders(plain)


# Random numbers --------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(1).item(),
    "numpy": lambda: np.random.rand(),
    "python": random.random,
}


def seed_all() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def plainly(loader: Any, between: Callable[[], Any] = lambda: None) -> list[Any]:
    """Batches of a plain loop with something in between."""
    seed_all()
    batches = []
    for batch in loader:
        between()
        batches.append(batch.tolist())
    return batches


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 4])  # two draws for a batch of two look like the one seed of a sampler
@pytest.mark.parametrize("name", DRAWS)
def test_a_loader_that_draws_beside_drawing_steps_gives_the_numbers_of_a_plain_loop(name, batch_size, shuffle):
    draw = DRAWS[name]
    expected = plainly(DataLoader(Numbers(16, draw), batch_size=batch_size, shuffle=shuffle), draw)
    dataset = Numbers(16, draw)
    seed_all()
    with (
        fetcher(DataLoader(dataset, batch_size=batch_size, shuffle=shuffle), max_batches=16 // batch_size) as fetch,
        pytest.warns(UserWarning, match=f"DataLoader draws random numbers .{name}.") as caught,
    ):
        assert taken(fetch, draw) == expected
    assert dataset.threads == [HERE] * 16
    assert len(caught) == 1


@pytest.mark.parametrize("name", DRAWS)
def test_a_loader_that_draws_alone_is_read_ahead_with_the_numbers_of_a_plain_loop(name):
    draw = DRAWS[name]
    expected = plainly(DataLoader(Numbers(16, draw), batch_size=2))
    dataset = Numbers(16, draw)
    seed_all()
    with fetcher(DataLoader(dataset, batch_size=2)) as fetch:
        assert taken(fetch) == expected
    assert dataset.threads[4:] == [READER] * 12


@pytest.mark.parametrize("is_uninterrupted", [True, False])
def test_shuffling_is_read_ahead_in_the_order_of_a_plain_loop(is_uninterrupted):
    # The seed that the sampler draws when an epoch begins is none of those draws.
    def dropout() -> None:
        torch.rand(5)

    expected = plainly(DataLoader(Numbers(16), batch_size=2, shuffle=True), dropout)
    dataset = Numbers(16)
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    seed_all()
    with fetcher(loader, is_uninterrupted=is_uninterrupted, max_batches=8) as fetch:
        assert taken(fetch, dropout) == expected
    assert dataset.threads == [HERE] * 2 + [READER] * 14


@pytest.mark.parametrize(
    "sampler",
    [SubsetRandomSampler(range(16)), WeightedRandomSampler([1.0] * 16, 16)],
    ids=["subset", "weighted"],
)
def test_samplers_that_draw_everything_when_an_epoch_begins_are_read_ahead_soon(sampler):
    def dropout() -> None:
        torch.rand(5)

    expected = plainly(DataLoader(Numbers(16), batch_size=2, sampler=sampler), dropout)
    dataset = Numbers(16)
    seed_all()
    with fetcher(DataLoader(dataset, batch_size=2, sampler=sampler), is_uninterrupted=False) as fetch:
        assert taken(fetch, dropout) == expected
    assert dataset.threads == [HERE] * 4 + [READER] * 12


# Memory that is filled again -------------------------------------------------------------------------------


class OneBuffer(IterableDataset):
    """Fills one tensor, or array, again and again: what was given before changes."""

    def __init__(self, make: Callable[[], Any] = lambda: torch.zeros(2)) -> None:
        super().__init__()
        self.make = make
        self.threads: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        buffer = self.make()
        for number in range(5):
            self.threads.append(threading.current_thread().name)
            buffer[:] = number
            yield buffer


class Refilled:
    """The same as a loader."""

    def __init__(self, dataset: OneBuffer) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


@pytest.mark.parametrize("make", [lambda: torch.zeros(2), lambda: np.zeros(2)], ids=["tensor", "array"])
@pytest.mark.parametrize(
    "wrap",
    [
        Refilled,
        lambda dataset: DataLoader(dataset, batch_size=None),
        lambda dataset: DataLoader(dataset, batch_size=1, collate_fn=lambda samples: torch.as_tensor(samples[0])),
    ],
    ids=["own loader", "loader of whole batches", "own collate"],
)
def test_a_batch_in_use_is_never_filled_with_the_next_one(wrap, make):
    dataset = OneBuffer(make)
    seen = []

    def use_all(fetch: BatchFetcher) -> None:
        for number in range(5):
            batch, num_asked = fetch.take(), number + 2
            if reader_threads():  # the fault that this is about: let it happen, if it can
                wait_until(lambda: len(dataset.threads) == num_asked)  # noqa: B023 (called in this round)
            seen.append(batch.tolist())

    with fetcher(wrap(dataset)) as fetch, pytest.warns(UserWarning, match="batch in the same memory") as caught:
        use_all(fetch)
    assert seen == [[number, number] for number in range(5)]
    assert dataset.threads == [HERE] * 5
    assert len(caught) == 1


# Errors ----------------------------------------------------------------------------------------------------


class Failing(Batches):
    """Has an error in the place of one batch."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__(20)
        self.number = number
        self.error = error

    def batch(self, number: int) -> Any:
        if number == self.number:
            raise self.error
        return super().batch(number)


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt("stop"), KeyError("a")], ids=repr)
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("may_read_ahead", [None, True, False])
def test_an_error_keeps_its_type_and_comes_after_the_batches_before_it(may_read_ahead, number, error):
    with fetcher(Failing(number, error), may_read_ahead=may_read_ahead) as fetch:
        for _ in range(number):
            fetch.take()
        with pytest.raises(type(error)) as caught:
            fetch.take()
    assert caught.value is error
    assert caught.traceback[-1].name == "batch"


def test_an_error_ahead_is_ready_when_it_happened():
    with fetcher(Failing(1, ValueError("odd")), may_read_ahead=True) as fetch:
        fetch.take()
        wait_until(fetch.is_ready)
        with pytest.raises(ValueError, match="odd"):
            fetch.take()


@pytest.mark.parametrize("may_read_ahead", [None, True, False])
def test_a_loader_without_batches_ends_at_once(may_read_ahead):
    with fetcher(Batches(0), may_read_ahead=may_read_ahead) as fetch:
        for _ in range(2):
            with pytest.raises(StopIteration):
                fetch.take()


@pytest.mark.parametrize("may_read_ahead", [None, True, False])
def test_after_the_end_there_is_nothing_more(may_read_ahead):
    with fetcher(Batches(12), may_read_ahead=may_read_ahead) as fetch:
        assert len(taken(fetch)) == 3
        with pytest.raises(StopIteration):
            fetch.take()


# States ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_read_ahead", [None, True, False])
def test_the_states_before_and_after_each_batch_are_right_however_far_ahead_the_loader_is(monkeypatch, may_read_ahead):
    parked = EventLog()
    monkeypatch.setattr(feed_module.threading, "Condition", parking_condition(parked, READER))
    loader = ResumableBatches(20)
    with fetcher(loader, may_read_ahead=may_read_ahead, read_state=loader.state_dict) as fetch:
        for number in range(5):
            parked.events.clear()
            fetch.take()
            if reader_threads() and number < 4:
                parked.wait_for("parked")
                assert loader.position == number + 2  # one ahead
            assert fetch.state_before == {"epoch": 0, "batches": number}
            assert fetch.state == {"epoch": 0, "batches": number + 1}
        with pytest.raises(StopIteration):
            fetch.take()
        # As at the end of an epoch: nothing was taken since.
        assert (fetch.state_before["batches"], fetch.state["batches"]) == (5, 5)


def test_the_state_is_read_in_the_thread_that_fetched_the_batch():
    readers: list[str] = []
    with fetcher(
        Batches(12), may_read_ahead=True, read_state=lambda: readers.append(threading.current_thread().name)
    ) as fetch:
        taken(fetch)
    assert readers == [HERE] * 2 + [READER] * 2  # before and after the first batch; after each of the others


def test_after_an_epoch_that_was_over_the_next_one_is_begun():
    loader = ResumableBatches(12)
    loader.load_state_dict({"epoch": 4, "batches": 3})
    with fetcher(loader, begin_after=True) as fetch:
        first = fetch.take().tolist()
    assert loader.epoch == 5
    assert first == next(iter(ResumableBatches(12, epoch=4))).tolist()


def test_after_an_epoch_that_was_cut_short_the_next_one_is_begun():
    loader = ResumableBatches(12)
    loader.load_state_dict({"epoch": 4, "batches": 1})
    with fetcher(loader, begin_after=False) as fetch:
        first = fetch.take().tolist()
    assert loader.epoch == 5
    assert first == next(iter(ResumableBatches(12, epoch=4))).tolist()


class BegunLate(ResumableBatches):
    """A loader whose `__iter__` is a generator: nothing of it runs before the first batch is asked for."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


@pytest.mark.parametrize(("batches", "is_at_end"), [(1, False), (3, True)])
def test_a_loader_that_begins_only_with_its_first_batch_begins_the_next_epoch_too(batches, is_at_end):
    loader = BegunLate(12)
    loader.load_state_dict({"epoch": 4, "batches": batches})
    with fetcher(loader, begin_after=is_at_end) as fetch:
        first = fetch.take().tolist()
    assert loader.epoch == 5
    assert first == next(iter(ResumableBatches(12, epoch=4))).tolist()


class BeginsByItself(ResumableBatches):
    """A loader that knows that a finished epoch is followed by the next one."""

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        super().load_state_dict(state_dict)
        self.is_loaded = self.position < len(self)


def test_a_loader_that_begins_the_next_epoch_by_itself_begins_it_once():
    loader = BeginsByItself(12)
    loader.load_state_dict({"epoch": 4, "batches": 3})
    with fetcher(loader, begin_after=True) as fetch:
        assert len(taken(fetch)) == 3
    assert loader.epoch == 5


def test_an_epoch_after_a_finished_one_may_have_no_batches_either():
    with fetcher(Batches(0), begin_after=True) as fetch, pytest.raises(StopIteration):
        fetch.take()


# The end ---------------------------------------------------------------------------------------------------


def test_closing_ends_the_thread_wherever_it_is():
    for num_taken in range(1, 4):
        with fetcher(Batches(40), may_read_ahead=True) as fetch:
            for _ in range(num_taken):
                fetch.take()
            assert len(reader_threads()) == 1
        assert reader_threads() == []


def test_closing_waits_for_the_batch_in_the_making():
    loader = GatedBatches(12, gated=[1])
    with fetcher(loader, may_read_ahead=True) as fetch:
        fetch.take()
        loader.log.wait_for("begin 1")
        opener = threading.Timer(0.0, loader.open_all)
        opener.start()
    assert reader_threads() == []
    assert loader.log.events[-1] == "end 1"
    opener.join(WAIT_SECONDS)


def test_closing_does_not_wait_forever_for_a_loader_that_hangs(monkeypatch):
    monkeypatch.setattr(fetcher_module, "_JOIN_SECONDS", 0.01)
    loader = GatedBatches(12, gated=[1])
    with fetcher(loader, may_read_ahead=True) as fetch:
        fetch.take()
        loader.log.wait_for("begin 1")
    assert len(reader_threads()) == 1
    loader.open_all()
    for thread in reader_threads():
        thread.join(WAIT_SECONDS)
    assert reader_threads() == []
    assert "begin 2" not in loader.log.events


def test_closing_without_a_thread_does_nothing():
    with fetcher(Batches(12)) as fetch:
        fetch.take()
    with fetcher(Batches(12)):
        pass


def test_an_epoch_that_was_read_to_its_end_leaves_no_thread():
    with fetcher(Batches(12), may_read_ahead=True) as fetch:
        taken(fetch)
        assert reader_threads() == []


# Times -----------------------------------------------------------------------------------------------------


def added(*batches: tuple[float, float], has_workers: bool) -> FetchTimes:
    times = FetchTimes()
    for call_seconds, idle_seconds in batches:
        times.add(call_seconds, idle_seconds, has_workers)
    return times


def test_a_loader_without_workers_costs_what_asking_it_takes():
    times = added((2.0, 5.0), (4.0, 0.0), has_workers=False)
    assert (times.num_batches, times.seconds_per_batch, times.is_bound) == (2, 3.0, False)


def test_a_loader_with_workers_goes_on_while_nobody_asks():
    times = added((2.0, 1.0), (4.0, 1.0), has_workers=True)
    assert (times.seconds_per_batch, times.is_bound) == (4.0, False)


def test_a_loader_with_workers_that_was_never_waited_for_is_known_to_a_bound_only():
    times = added((0.01, 2.0), (0.0, 4.0), has_workers=True)
    assert times.is_bound
    assert times.seconds_per_batch == pytest.approx(3.005)  # the sum of three numbers


def test_batches_that_workers_bring_at_the_same_time_count_on_average():
    times = added((7.5, 0.5), (0.0, 0.0), (7.5, 0.5), (0.0, 0.0), has_workers=True)
    assert (times.num_batches, times.seconds_per_batch, times.is_bound) == (4, 4.0, False)


def test_nothing_fetched_costs_nothing():
    assert FetchTimes().seconds_per_batch == 0
    times = added((2.0, 1.0), has_workers=True)
    times.wait_seconds = 1.0
    times.reset()
    assert (times.num_batches, times.seconds, times.wait_seconds, times.is_bound) == (0, 0.0, 0.0, True)


def test_the_first_batch_is_not_measured_as_it_also_starts_the_loader():
    times = FetchTimes()
    with fetcher(Batches(12), may_read_ahead=False, times=times) as fetch:
        fetch.take()
        assert times.num_batches == 0
        assert times.wait_seconds > 0  # but the step did wait for it
        fetch.take()
        assert times.num_batches == 1


def test_waiting_is_what_the_caller_waited_and_not_what_the_loader_took():
    loader, times = GatedBatches(12, gated=[1]), FetchTimes()
    with fetcher(loader, may_read_ahead=True, times=times) as fetch:
        fetch.take()
        before = times.wait_seconds
        loader.log.wait_for("begin 1")
        held = threading.Event()
        held.wait(0.2)  # a step: meanwhile the loader is at work
        loader.open_all()
        wait_until(fetch.is_ready)
        fetch.take()
        assert times.seconds >= 0.2
        assert times.wait_seconds - before < times.seconds
