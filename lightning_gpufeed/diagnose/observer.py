"""Watches a training: the one place that asks clocks, the operating system and the device. It judges nothing.

::

    begin_epoch     | step | step | step | ...                     | counters()
    /proc, pressure ^ first sample ^ after 0.1 s  ^ 0.2 s ... 1 s  ^ as of the latest sample

Between two samples at least two hundred times what a sample takes goes by, so looking stays below half a percent. Of
short steps not all are watched in full (`diagnose/sampling.py`).
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from lightning_gpufeed.diagnose.batch import describe_batch
from lightning_gpufeed.diagnose.costs import measure_unit_costs
from lightning_gpufeed.diagnose.counters import BatchFacts, EpochCounters, LoaderFacts, MachineFacts, Usage
from lightning_gpufeed.diagnose.machine import PressureWatch, num_cores
from lightning_gpufeed.diagnose.nvml import DeviceWatch
from lightning_gpufeed.diagnose.processes import UsageWatch, read_thread
from lightning_gpufeed.diagnose.sampling import StepSampler
from lightning_gpufeed.diagnose.steps import StepTimer

__all__ = ["Observer", "Readers"]

_FIRST_INTERVAL_SECONDS = 0.1
_SHORT_SECONDS = 1.0
_FEWEST_SECONDS = 0.02
"""Of looks at the training thread's own loading, before anything is made of them."""
_COST_RATIO = 200
_INLINE_COST_RATIO = 1000
_LOOK_FACTOR = 16
"""Batches are looked at further and further apart: number 0, 16, 256 ..."""


class Readers(NamedTuple):
    """Who loads.

    Attributes:
        processes: Process numbers of workers.
        threads: Native thread numbers of reading threads of this process.
    """

    processes: Collection[int]
    threads: Collection[int]


class Observer:
    """Counts what happens in a training, at a cost of microseconds per step and without waiting for the device.

    Example:
        >>> observer = Observer(torch.device("cpu"), find_readers=lambda: Readers((), ()))
        >>> observer.begin_epoch(0)
        >>> timer = observer.steps
        >>> observer.begin_wait(); observer.end_wait(); timer.begin_compute(); timer.end_compute(); observer.end_step()
        >>> observer.counters().steps.num_steps
        1
    """

    def __init__(
        self,
        device: torch.device,
        find_readers: Callable[[], Readers],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        interval_seconds: float = 1.0,
        num_sharing: int = 1,
        is_ready: Callable[[], bool | None] = lambda: None,
        sampler: StepSampler | None = None,
        switch: Callable[[bool], None] = lambda is_full: None,
    ) -> None:
        """Nothing is watched yet.

        Args:
            device: Where the steps run.
            find_readers: Says who loads at the moment; called at each sample.
            rank: Of the data-parallel ranks.
            num_ranks: How many there are.
            interval_seconds: Time between two samples of the operating system's counters.
            num_sharing: Ranks that share the cores of this one.
            is_ready: Says whether the loader has a batch ready; None if it does not know. Called at each request.
            sampler: Says which steps are watched in full; None: all.
            switch: Called when that changes, within `begin_wait` and `begin_epoch`: whether all that happens is to be
                told from there on, or only `steps.brief_begin_wait` and `steps.brief_end_wait`, not even `end_step`.
        """
        self._device, self._find_readers = device, find_readers
        self._rank, self._num_ranks = rank, num_ranks
        self._interval_seconds = interval_seconds
        self._num_sharing, self._is_ready = num_sharing, is_ready
        self.steps = StepTimer(device, num_ranks=num_ranks)
        self._sampler, self._switch = sampler, switch
        self._inside_seconds: float | None = None
        self._asked_seconds = 0.0
        self._num_brief = 0
        self._readers, self._main, self._thread = UsageWatch(), UsageWatch(minus_threads=True), UsageWatch()
        self._pressure, self._device_watch = PressureWatch(), DeviceWatch(device)
        self._watches = (self._readers, self._main, self._thread)
        self._watched_steps = self._main_steps = 0
        self._has_stepped = self._is_first = False
        self.loader = LoaderFacts()
        self._forget()

    def _forget(self) -> None:
        self._epoch = 0
        self._epoch_begin: float | None = None
        self._start_seconds = 0.0
        self._batch: BatchFacts | None = None
        self._num_batches, self._next_look = 0, 0
        self._inline, self._num_inline = Usage(), 0
        self._inline_before: Usage | None = None
        self._next_inline = 0.0
        self._next_sample, self._pause_seconds = 0.0, _FIRST_INTERVAL_SECONDS
        self._latest_sample: tuple[int, int] | None = None

    # What happens ----------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins; all sums start anew.

        Args:
            epoch: Counts from 0.
        """
        # Sums over short epochs are kept until they are worth something; the cold epoch's are not for the others.
        is_short = self._has_stepped and not self._is_first and self._thread.usage.wall_seconds < _SHORT_SECONDS
        self._is_first = not self._has_stepped
        if self._is_first:
            # What is asked for the first time takes longer, and is no measure of what asking costs.
            self.sample()
            measure_unit_costs()
        self.pause()
        self._forget()
        self._epoch = epoch
        self.steps.reset()
        if self._sampler is not None:
            self._sampler.begin_epoch()
            self._num_brief, self.steps.weight = 0, self._sampler.weight
            self._switch(True)
        if not is_short:
            self._watched_steps = self._main_steps = 0
            self._device_watch.reset()
            for watch in self._watches:
                watch.reset()
        self._pressure.begin()
        self._epoch_begin = time.perf_counter()

    def begin_wait(self) -> None:
        """The loader is asked for a batch."""
        if self._num_brief:
            num_steps, self._num_brief = self._num_brief, 0
            self.steps.begin_brief(num_steps, then=self._begin_run)
            self._switch(False)
            return
        begin, spent = time.perf_counter(), self.steps.spent_seconds
        if self._epoch_begin is not None:
            self._start_seconds = begin - self._epoch_begin
        is_ahead, is_ready = self.loader.is_ahead, None
        if is_ahead:
            is_ready = self._is_ready()
            asked = time.perf_counter() - begin
            self._asked_seconds += asked
            spent -= asked
        elif begin >= self._next_inline:
            # Without workers the training thread loads: what it uses meanwhile is what loading uses.
            self._inline_before = read_thread(threading.get_native_id())
        self.steps.begin_wait(is_ready=is_ready)
        if self._sampler is not None:
            inside = time.perf_counter() - begin - (self.steps.spent_seconds - spent)
            self._inside_seconds = inside if self._inline_before is None else None

    def _begin_run(self) -> None:
        self._switch(True)
        self.begin_wait()

    def end_wait(self) -> None:
        """The batch is there."""
        is_start = self._epoch_begin is not None and self.loader.is_ahead and not self.steps.is_computing
        self.steps.end_wait(is_start=is_start)
        if self._epoch_begin is not None:
            # The first batch is waited for while workers have just begun: that is a matter of the epoch, not of a step.
            if is_start:
                self._start_seconds = time.perf_counter() - self._epoch_begin
            self._epoch_begin = None
        before, self._inline_before = self._inline_before, None
        if before is not None:
            begin = time.perf_counter()
            after = read_thread(threading.get_native_id())
            if after is not None:
                self._inline = self._inline + (after - before)
                self._num_inline += 1
            now = time.perf_counter()
            self._next_inline = now + _INLINE_COST_RATIO * (now - begin)

    def look_at(self, batch: Any) -> None:
        """A batch passes by on the host.

        Args:
            batch: As the loader gave it.
        """
        if self._num_batches == self._next_look:
            self._next_look = max(1, self._next_look) * _LOOK_FACTOR
            try:
                facts = describe_batch(batch)
            except Exception:  # a batch of a kind that nobody foresaw is no reason to end a training
                facts = BatchFacts()
            # The first batches of an epoch are like the others; the last one may be smaller.
            if self._batch is None or facts.num_bytes >= self._batch.num_bytes:
                self._batch = facts
        self._num_batches += 1

    def end_step(self) -> None:
        """A step is over."""
        begin, steps, sampler = time.perf_counter(), self.steps, self._sampler
        spent = steps.spent_seconds
        steps.end_step()
        self._has_stepped = True
        now = time.perf_counter()
        if sampler is not None and not steps.is_fetching_inside:
            inside = self._inside_seconds
            if inside is not None:
                inside += now - begin - (steps.spent_seconds - spent)
            self._num_brief = sampler.end_step(now, inside, steps.spent_seconds + self._asked_seconds)
            steps.weight = sampler.weight
        if now >= self._next_sample:
            self.sample()
            cost = time.perf_counter() - now
            pause = max(self._pause_seconds, _COST_RATIO * cost)
            self._next_sample = now + pause
            self._pause_seconds = min(2 * self._pause_seconds, self._interval_seconds)
            if sampler is not None:
                sampler.other_share = cost / pause

    def sample(self) -> None:
        """Read the operating system's counters now."""
        found, watched = self._find_readers(), self._readers.usage.wall_seconds
        self._readers.sample(found.processes, found.threads)
        self._main.sample((os.getpid(),), found.threads)
        self._thread.sample((), (threading.get_native_id(),))
        self._device_watch.sample()
        # Readers load batches: where batches are used several times, that is fewer than there are steps.
        now = (self.steps.num_steps, self._batches_so_far())
        if self._latest_sample is not None:
            num_steps, num_batches = (one - other for one, other in zip(now, self._latest_sample, strict=True))
            self._main_steps += num_steps
            if self._readers.usage.wall_seconds > watched:  # readers of the sample before are still there
                self._watched_steps += max(0, num_batches)
        self._latest_sample = now

    def _batches_so_far(self) -> int:
        """Batches that were loaded: as many of all steps as of those that were watched in full."""
        num_steps, num_watched = self.steps.num_steps, self.steps.num_watched
        if num_watched == num_steps or not num_watched:
            return self._num_batches or num_steps
        return round(num_steps * min(1.0, self._num_batches / num_watched)) or num_steps

    def pause(self, *, is_over: bool = True) -> None:
        """Something else begins that is no training, such as validation.

        Args:
            is_over: Whether the last step has come to its end.
        """
        if self._latest_sample is not None:
            self.sample()
        self._latest_sample = None
        for watch in self._watches:
            watch.pause()
        self.steps.pause(is_over=is_over)
        if self._sampler is not None:
            self._sampler.pause()

    def close(self) -> None:
        """Let go of the device's counters."""
        self._device_watch.close()

    # Results ---------------------------------------------------------------------------------------------

    def counters(self) -> EpochCounters:
        """All that was counted in this epoch so far.

        Returns:
            The values. The operating system's are as of the latest sample.
        """
        is_inline = not self.loader.is_ahead
        readers: Usage | None = self._inline if is_inline else self._all_readers()
        watched = self._num_inline if is_inline else self._watched_steps
        if readers is None or not watched or readers.wall_seconds <= (_FEWEST_SECONDS if is_inline else 0.0):
            readers = None
        elif readers.queue_seconds is not None:  # counted at other moments than the rest
            queue = min(readers.queue_seconds, max(0.0, readers.wall_seconds - readers.busy_seconds))
            readers = dataclasses.replace(readers, queue_seconds=queue)
        return EpochCounters(
            epoch=self._epoch,
            is_first=self._is_first,
            rank=self._rank,
            num_ranks=self._num_ranks,
            steps=self.steps.totals(),
            readers=readers,
            main=self._main.usage if self._main_steps else None,
            training_thread=self._thread.usage if self._main_steps else None,
            loader=self.loader,
            batch=self._batch or BatchFacts(),
            machine=self._machine(),
            timeline=self.steps.timeline(),
            num_hidden_readers=self._readers.num_hidden,
            num_watched_steps=watched,
            num_main_steps=self._main_steps,
            start_seconds=self._start_seconds,
        )

    def _all_readers(self) -> Usage:
        """What was seen, made up for readers that are hidden: they do the same work."""
        usage, hidden, seen = self._readers.usage, self._readers.num_hidden, self._readers.num_seen
        return usage.scaled((seen + hidden) / seen) if hidden and seen else usage

    def _machine(self) -> MachineFacts:
        shares = self._pressure.shares()
        free, total, peak = _device_memory(self._device)
        return MachineFacts(
            num_cores=num_cores() / self._num_sharing,
            cpu_pressure=shares.cpu,
            io_pressure=shares.io,
            memory_pressure=shares.memory,
            device_utilisation=self._device_watch.utilisation,
            device_free_bytes=free,
            device_total_bytes=total,
            device_peak_bytes=peak,
            costs=measure_unit_costs(),
        )


def _device_memory(device: torch.device) -> tuple[int | None, int | None, int | None]:
    """Free for this process, in all, and most that tensors took; None on the CPU."""
    if device.type != "cuda":
        return None, None, None
    free, total = torch.cuda.mem_get_info(device)
    # What the allocator holds and does not use is free for this process.
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + spare, total, torch.cuda.max_memory_allocated(device)
