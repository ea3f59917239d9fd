"""Fetches batches one ahead, in a thread, so that it is known whether the next one is there.

::

    caller    take 0 | steps on 0 .......... | take 1 | steps on 1 .......... | take 2
    thread           | fetch 1 ...... |      | fetch 2 ...... |               |
                                      ^ ready                 ^ ready

A loader that says by itself whether its next batch is ready (`loader.is_ready`) reads ahead by itself: no thread.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lightning_gpufeed.device.feed import Feed
from lightning_gpufeed.echo.trial import GeneratorStates, ReadAheadTrial

__all__ = ["BatchFetcher", "FetchTimes"]

_JOIN_SECONDS = 30.0
"""How long the end of a training waits for a batch that is being fetched."""


class FetchTimes:
    """What fetching cost in one epoch.

    Attributes:
        num_batches: Batches fetched whose cost is known.
        seconds: What the loader needed for them.
        wait_seconds: How long the caller was blocked, also for batches whose cost is not known.
        is_bound: Whether the loader could be faster than measured, as it was hardly waited for.
    """

    def __init__(self) -> None:
        """Nothing fetched yet."""
        self.reset()

    def reset(self) -> None:
        """Begin a new epoch."""
        self.num_batches = 0
        self.seconds = 0.0
        self.wait_seconds = 0.0
        self.is_bound = True
        self._asked_seconds = 0.0

    @property
    def seconds_per_batch(self) -> float:
        """What the loader needs for a batch; 0 if that is not known."""
        return self.seconds / self.num_batches if self.num_batches else 0.0

    def add(self, call_seconds: float, idle_seconds: float, has_workers: bool) -> None:
        """A batch arrived.

        Args:
            call_seconds: How long the loader was asked for it.
            idle_seconds: How long before that nobody asked, since the batch before.
            has_workers: Whether the loader goes on by itself while nobody asks.
        """
        # One with workers works on while nobody asks, and may bring several batches at once: what counts is how fast
        # they come on average, if that is what the caller waited for.
        self.num_batches += 1
        self.seconds += call_seconds + (idle_seconds if has_workers else 0.0)
        self._asked_seconds += call_seconds
        self.is_bound = self._asked_seconds < 0.1 * self.seconds


class _Fetched(NamedTuple):
    """A batch, and what came with it."""

    batch: Any
    state: Any
    call_seconds: float
    idle_seconds: float


class _Source:
    """Asks the loader's iterator, in whichever thread."""

    def __init__(self, iterator: Iterator[Any], read_state: Callable[[], Any]) -> None:
        self._iterator = iterator
        self._read_state = read_state
        self._latest = 0.0
        self.begun = 0.0

    def begin_again(self, loader: Any) -> None:
        """Begin another iteration."""
        if not self.is_begun(loader):
            # It has not taken up the loaded state yet, which the next one would do.
            next(self._iterator, None)
        self._iterator = iter(loader)

    def is_begun(self, loader: Any) -> bool:
        """Whether the iteration has begun: if `__iter__` is a generator, that happens with its first item."""
        is_late = inspect.isgeneratorfunction(getattr(type(loader), "__iter__", None))
        return not is_late or inspect.getgeneratorstate(self._iterator) != inspect.GEN_CREATED  # type: ignore[arg-type]

    def __call__(self, number: int = 0) -> _Fetched:
        begin = self.begun = time.perf_counter()
        batch = next(self._iterator)
        end = time.perf_counter()
        idle = begin - self._latest if self._latest else 0.0
        self._latest = end
        return _Fetched(batch, self._read_state(), end - begin, idle)


class BatchFetcher:
    """Takes batches from one iteration over a loader.

    Attributes:
        state_before: The loader's state before the batch taken last; None if it has none.
        is_begun_before: Whether the iteration had begun then. One that is a generator begins with its first batch.
        state: The same after it.
    """

    def __init__(
        self,
        loader: Any,
        read_state: Callable[[], Any],
        times: FetchTimes,
        trial: ReadAheadTrial,
        *,
        max_batches: int | None = None,
        begin_after: bool | None = None,
        is_loaded: bool = False,
    ) -> None:
        """Begin an iteration; nothing is fetched yet.

        Args:
            loader: What to iterate over.
            read_state: Gives the loader's state; called right after each batch, in the thread that fetched it.
            times: Where the cost of fetching is noted.
            trial: Knows, or finds out, whether a thread may fetch.
            max_batches: How many batches will be taken at most. A thread asks for no more: asking may change the
                loader. None if that is not known.
            begin_after: Whether the loader had no batch left when the epoch was over whose state it was given, and
                that this one comes after. None if there is no such epoch.
            is_loaded: Whether the loader was given its state inside this epoch.
        """
        self._own_is_ready: Callable[[], bool] | None = getattr(loader, "is_ready", None)
        self._name = type(loader).__name__
        self._num_starting = max(1, int(getattr(loader, "num_workers", 0) or 0))
        self._has_workers = self._own_is_ready is not None or bool(getattr(loader, "num_workers", 0))
        self._loader = loader
        self._source = _Source(iter(loader), read_state)
        self._max_batches = max_batches
        self._begin_after = begin_after
        self._is_loaded = is_loaded
        self._read_state = read_state
        self._times = times
        self._feed: Feed[_Fetched] | None = None
        self._num_taken = 0
        self._trial = trial
        self.state_before: Any = None
        self.is_begun_before = True
        self.state: Any = None

    def take(self) -> Any:
        """The next batch, waiting for it if need be.

        Returns:
            What the loader gave.

        Raises:
            StopIteration: There is none.
        """
        self.is_begun_before = self._num_taken > 0 or self._is_loaded or self._source.is_begun(self._loader)
        self.state_before = self._read_state() if self._num_taken == 0 else self.state
        begin = time.perf_counter()
        if self._feed is not None:
            fetched = next(self._feed)
        else:
            self._trial.wants_next()
            fetched = self._fetch_watched() if self._trial.verdict is None else self._fetch()
        self._times.wait_seconds += time.perf_counter() - begin
        self._num_taken += 1
        self.state = fetched.state
        # The first batches also pay for starting the loader, one for each worker.
        if self._num_taken > self._num_starting:
            self._times.add(fetched.call_seconds, fetched.idle_seconds, self._has_workers)
        self._read_ahead_if_allowed()
        return fetched.batch

    def _fetch_watched(self) -> _Fetched:
        before = GeneratorStates.now()
        fetched = self._fetch()
        self._trial.fetched(fetched.batch, before, GeneratorStates.now())
        return fetched

    def _fetch(self) -> _Fetched:
        begin_after, self._begin_after = self._begin_after, None
        if begin_after is False:
            self._source.begin_again(self._loader)
        try:
            return self._source()
        except StopIteration:
            if not begin_after:
                raise
        # The loader has finished what was left of the other epoch: nothing. Others begin a new one by themselves.
        self._source.begin_again(self._loader)
        return self._source()

    def _read_ahead_if_allowed(self) -> None:
        if self._trial.verdict and self._feed is None:
            # Torch's number of threads is left as it is: sums must round as they do without this thread.
            num_left = None if self._max_batches is None else max(0, self._max_batches - self._num_taken)
            self._feed = Feed(self._source, num_left, num_slots=1, is_single_threaded=False)

    def is_ready(self) -> bool:
        """Whether `take` would not wait. True where nobody reads ahead, so that asking never delays a batch."""
        if self._own_is_ready is not None:
            return self._own_is_ready()
        if self._feed is None:
            self._trial.wants_next()
            self._read_ahead_if_allowed()
        return self._feed is None or self._feed.is_ready()

    @property
    def pending_begin_after(self) -> bool | None:
        """What the next iteration has to begin after, if this one was given up before it had begun."""
        return None if self._source.is_begun(self._loader) else self._begin_after

    @property
    def num_taken(self) -> int:
        """Batches taken from this iteration."""
        return self._num_taken

    def seconds_to_go(self) -> float:
        """How long the batch in the making still takes, judging by the ones before. Zero if it is overdue."""
        if self._feed is None:
            return 0.0
        return max(0.0, self._times.seconds_per_batch - (time.perf_counter() - self._source.begun))

    def close(self) -> None:
        """End the thread. A batch in the making is waited for, but not forever."""
        if self._feed is not None:
            self._feed.close(_JOIN_SECONDS)
