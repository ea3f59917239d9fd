"""One background thread that keeps a few batches ready.

::

    thread:    produce(0)  produce(1)  produce(2)  (ring full: waits)   produce(3) ...
                    |           |          |                                |
    ring:      [ ready | ready ]           +---- one in the making ----+
                    |
    consumer:  next(feed)      waits only while the ring is empty; that time is counted

At most `num_slots` batches exist beside the one the consumer works on.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar, cast

from lightning_gpufeed.device.threads import SingleThreadStart
from lightning_gpufeed.errors import FeedError

__all__ = ["Feed", "FeedStatistics"]

T = TypeVar("T")


@dataclass
class FeedStatistics:
    """What feeding one epoch cost.

    Attributes:
        num_batches: Batches handed out.
        num_samples: Samples in them.
        num_bytes: Bytes in them.
        wait_seconds: Time the consumer was blocked because no batch was ready.
        produce_seconds: Time the thread spent on making batches.
        elapsed_seconds: From the first request for a batch to the end of the latest one.
    """

    num_batches: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    wait_seconds: float = 0.0
    produce_seconds: float = 0.0
    elapsed_seconds: float = 0.0

    @property
    def wait_share(self) -> float:
        """Share of the elapsed time that the consumer waited for data, 0 to 1."""
        return self.wait_seconds / self.elapsed_seconds if self.elapsed_seconds > 0 else 0.0

    @property
    def samples_per_second(self) -> float:
        """Rate at which the consumer took samples."""
        return self.num_samples / self.elapsed_seconds if self.elapsed_seconds > 0 else 0.0


class _Ring(Generic[T]):
    """What the thread and the consumer share. The thread holds this, never the `Feed` itself."""

    def __init__(self, num_slots: int) -> None:
        self.changed = threading.Condition()
        self.ready: deque[T] = deque()
        self.num_slots = num_slots
        self.is_stopping = False
        self.is_exhausted = False
        self.error: BaseException | None = None
        self.produce_seconds = 0.0


def _fill(ring: _Ring[T], produce: Callable[[int], T], num_items: int | None, start: SingleThreadStart | None) -> None:
    """Body of the thread."""
    if start is not None:
        start.in_thread()
    try:
        for number in itertools.count() if num_items is None else range(num_items):
            with ring.changed:
                # The slot for the batch in the making is taken before it is made.
                while not (ring.is_stopping or len(ring.ready) < ring.num_slots):
                    ring.changed.wait(timeout=1.0)
                if ring.is_stopping:
                    return
            begin = time.perf_counter()
            item = produce(number)
            with ring.changed:
                ring.produce_seconds += time.perf_counter() - begin
                # What was still in the making when the feed was closed is dropped.
                if not ring.is_stopping:
                    ring.ready.append(item)
                ring.changed.notify_all()
            # The loop variable would keep the batch alive, and its buffer busy, until the next one is made.
            del item
    except StopIteration:
        pass
    except BaseException as error:
        with ring.changed:
            ring.error = error
    finally:
        with ring.changed:
            ring.is_exhausted = True
            ring.changed.notify_all()


def _signal(ring: _Ring[T]) -> None:
    """Tell the thread to end, without waiting: this may run inside the garbage collector, which may hold a lock."""
    ring.is_stopping = True
    ring.ready.clear()
    # A thread that waits looks again within a second even if this is not the moment to take its lock.
    if ring.changed.acquire(blocking=False):
        ring.changed.notify_all()
        ring.changed.release()


_running: weakref.WeakKeyDictionary[threading.Thread, _Ring[Any]] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    """End the threads before the interpreter takes away what they stand on."""
    for thread, ring in list(_running.items()):
        _signal(ring)
        thread.join(timeout=10)


class Feed(Generic[T]):
    """Iterates over `produce(0)`, `produce(1)` ... made ahead of time by one thread.

    `close`, the end of the iteration, dropping the last reference and the end of the interpreter all end the thread;
    dropping does not wait for it. An exception in `produce` is raised by `next` with its own type and text, after the
    batches that were made before it.

    Example:
        >>> list(Feed(lambda number: number * number, num_items=4))
        [0, 1, 4, 9]
    """

    def __init__(
        self,
        produce: Callable[[int], T],
        num_items: int | None,
        num_slots: int = 2,
        *,
        is_single_threaded: bool = True,
    ) -> None:
        """Start the thread.

        Args:
            produce: Makes item number i; runs in the thread, one call at a time. It must not refer to the feed.
                Raising `StopIteration` ends the items.
            num_items: How many items there are; None if only `produce` knows.
            num_slots: Finished items waiting at most, at least 1.
            is_single_threaded: Torch operations in `produce` take one core, as they do in a worker process. False
                leaves torch's setting, and with it the rounding of a sum that several cores share.

        Raises:
            ValueError: `num_slots` is below 1.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; expected at least 1.")
        self._ring: _Ring[T] = _Ring(num_slots)
        start = SingleThreadStart() if is_single_threaded else None
        arguments = (self._ring, produce, num_items, start)
        thread = threading.Thread(target=_fill, args=arguments, name="gpufeed-reader", daemon=True)
        self.statistics = FeedStatistics()
        self._begin: float | None = None
        self._thread = thread
        self._process = os.getpid()
        weakref.finalize(self, _signal, self._ring).atexit = False
        _running[thread] = self._ring
        thread.start()
        if start is not None:
            start.in_starter()

    def __iter__(self) -> Self:
        """The feed itself: it runs once."""
        return self

    def __next__(self) -> T:
        """The next item, waiting for it if need be.

        Returns:
            The item.

        Raises:
            StopIteration: All items were handed out, or the feed was closed.
            FeedError: The feed was begun in another process.
        """
        ring = self._ring
        if os.getpid() != self._process:
            raise FeedError(
                "this iteration was begun in another process, whose reading thread is not here. Iterate over the "
                "loader again."
            )
        begin = time.perf_counter()
        if self._begin is None:
            self._begin = begin
        with ring.changed:
            ring.changed.wait_for(lambda: ring.ready or ring.is_exhausted or ring.is_stopping)
            has_item = bool(ring.ready)
            item = ring.ready.popleft() if has_item else None
            produced = ring.produce_seconds
            ring.changed.notify_all()
        end = time.perf_counter()
        if not has_item:
            error, ring.error = ring.error, None
            if not ring.is_stopping:
                self.close()
            try:
                raise StopIteration if error is None else error
            finally:
                # An error that its own traceback leads back to keeps all that the thread held alive.
                del error
        self.statistics = replace(
            self.statistics,
            num_batches=self.statistics.num_batches + 1,
            wait_seconds=self.statistics.wait_seconds + (end - begin),
            elapsed_seconds=end - self._begin,
            produce_seconds=produced,
        )
        return cast("T", item)

    def is_ready(self) -> bool:
        """Whether `next` would return, or raise, without waiting. Costs no lock; never blocks."""
        return bool(self._ring.ready) or self._ring.is_exhausted or self._ring.is_stopping

    def stop_soon(self) -> None:
        """Tell the thread to end, without waiting for it. Safe to call from anywhere, the garbage collector too."""
        _signal(self._ring)

    def close(self, timeout_seconds: float | None = None) -> None:
        """End the thread and wait for it; the items not handed out are dropped. Closing twice is allowed.

        Args:
            timeout_seconds: Wait no longer than this for an item in the making; None waits for its end.
        """
        with self._ring.changed:
            self._ring.is_stopping = True
            self._ring.ready.clear()
            self._ring.changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
