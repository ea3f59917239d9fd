"""Fetches batches one ahead, in a thread, so that it is known whether the next one is there.

::

    first batch       in the caller's thread, watching the random generators (once per loader)
        untouched,    from here on in a thread, one batch ahead
        or one seed
            drawn from    watch the second batch too: what shuffles may draw more than a seed in the beginning
            again     stays in the caller's thread: two threads drawing from one generator give another
                      sequence in every run
    an iterable of    watch the second batch too: it may fill the same tensors again, then it
    unknown kind      stays in the caller's thread
    loader.is_ready   the loader reads ahead by itself and says so: no thread
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from lightning_gpufeed.device.feed import Feed
from lightning_gpufeed.device.samples import tensor_addresses

__all__ = ["BatchFetcher", "FetchTimes"]

_JOIN_SECONDS = 30.0
"""How long the end of a training waits for a batch that is being fetched."""


class FetchTimes:
    """What fetching cost in one epoch.

    Attributes:
        num_batches: Batches fetched whose cost is known.
        seconds: What the loader needed for them.
        wait_seconds: How long the caller was blocked, also for batches whose cost is not known.
        is_bound: Whether the loader could be faster than measured, as it was never waited for.
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
        # A loader with workers that answers at once had it ready: how fast it can be does not show.
        was_waited_for = not has_workers or call_seconds > 0.3 * (call_seconds + idle_seconds)
        if was_waited_for and self.is_bound:
            self.num_batches, self.seconds, self.is_bound = 0, 0.0, False
        if was_waited_for or self.is_bound:
            self.num_batches += 1
            self.seconds += call_seconds + (idle_seconds if has_workers else 0.0)


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
        state: The same after it.
    """

    def __init__(
        self,
        loader: Any,
        iterator: Iterator[Any],
        read_state: Callable[[], Any],
        times: FetchTimes,
        *,
        can_read_ahead: bool | None,
    ) -> None:
        """Nothing is fetched yet.

        Args:
            loader: What the iterator is of.
            iterator: An iteration that was just begun.
            read_state: Gives the loader's state; called right after each batch, in the thread that fetched it.
            times: Where the cost of fetching is noted.
            can_read_ahead: Whether a thread may fetch; None finds out with the first batches.
        """
        self._own_is_ready: Callable[[], bool] | None = getattr(loader, "is_ready", None)
        self._name = type(loader).__name__
        self._has_workers = self._own_is_ready is not None or bool(getattr(loader, "num_workers", 0))
        self._source = _Source(iterator, read_state)
        self._read_state = read_state
        self._times = times
        self._feed: Feed[_Fetched] | None = None
        self._num_taken = 0
        self.can_read_ahead = False if self._own_is_ready is not None else can_read_ahead
        self._makes_new_tensors = isinstance(loader, DataLoader) and (
            self._has_workers or loader.collate_fn in (default_collate, default_convert)
        )
        self._first_batch: Any = None
        self.state_before: Any = None
        self.state: Any = None

    def take(self) -> Any:
        """The next batch, waiting for it if need be.

        Returns:
            What the loader gave.

        Raises:
            StopIteration: There is none.
        """
        self.state_before = self._read_state() if self._num_taken == 0 else self.state
        begin = time.perf_counter()
        if self._feed is not None:
            fetched = next(self._feed)
        elif self.can_read_ahead is None:
            fetched = self._watched()
        else:
            fetched = self._source()
        self._times.wait_seconds += time.perf_counter() - begin
        self._num_taken += 1
        self.state = fetched.state
        # The first batch also pays for starting the loader.
        if self._num_taken > 1:
            self._times.add(fetched.call_seconds, fetched.idle_seconds, self._has_workers)
        if self.can_read_ahead and self._feed is None:
            # Torch's number of threads is left as it is: sums must round as they do without this thread.
            self._feed = Feed(self._source, None, num_slots=1, is_single_threaded=False)
        return fetched.batch

    def _watched(self) -> _Fetched:
        """Fetch, and see whether that may happen in a thread while the batch before is trained on."""
        before = _generator_states()
        fetched = self._source()
        after = _generator_states()
        is_drawing = after not in (before, _after_one_seed(before))
        if self._num_taken == 0:
            # Kept, so that an address that comes again means the same memory.
            self._first_batch = fetched.batch
            self.can_read_ahead = None if is_drawing or not self._makes_new_tensors else True
            return fetched
        shared = tensor_addresses(self._first_batch) & tensor_addresses(fetched.batch)
        self._first_batch = None
        self.can_read_ahead = not is_drawing and not shared
        if is_drawing:
            self._warn_of_turns(
                "draws random numbers in the training process, so reading ahead in a thread would change them from run "
                "to run",
                "num_workers=1 or more cures that.",
            )
        elif shared:
            self._warn_of_turns(
                "gives every batch in the same memory, so reading ahead would overwrite the one in use",
                "New tensors for each batch cure that.",
            )
        return fetched

    def _warn_of_turns(self, reason: str, cure: str) -> None:
        warnings.warn(
            f"{self._name} {reason}: batches are fetched in turn, and are never used again because of waiting. {cure}",
            stacklevel=2,
        )

    def is_ready(self) -> bool:
        """Whether `take` would not wait. True where nobody reads ahead, so that asking never delays a batch."""
        if self._feed is not None:
            return self._feed.is_ready()
        return self._own_is_ready() if self._own_is_ready is not None else True

    def seconds_to_go(self) -> float:
        """How long the batch in the making still takes, judging by the ones before. Zero if it is overdue."""
        if self._feed is None:
            return 0.0
        return max(0.0, self._times.seconds_per_batch - (time.perf_counter() - self._source.begun))

    def close(self) -> None:
        """End the thread. A batch in the making is waited for, but not forever."""
        if self._feed is not None:
            self._feed.close(_JOIN_SECONDS)


def _generator_states() -> tuple[Any, ...]:
    """States of the generators that all threads of a process share; torch's first."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return bytes(torch.get_rng_state().numpy()), random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def _after_one_seed(states: tuple[Any, ...]) -> tuple[Any, ...]:
    """The states after a sampler has drawn the seed of its own generator, as torch's does when an epoch begins."""
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return bytes(generator.get_state().numpy()), *states[1:]
