"""Where the time of each step goes, on the host and on the device, without waiting for the device.

::

    host      | sync | wait | copy | compute | hooks | sync | wait |
              t0            t1     t2        t3      t4
    device                  m0    m1              m2        m0'
                            | copy |   compute    |  idle   |

The host's times are read off the clock. Those of a CUDA device are marks in its queue, read some steps later, when
they are reached. On the CPU the host is the device.

In the step itself times are noted, no more; sums are made of some seventy steps at once, while the code for it is in
the processor's cache. On a CUDA device, where the host has time to spare and marks have their place, they are made at
once. Of a step that is not watched in full t0, t1 and t4 are noted, no more, and nothing is marked on the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_gpufeed.device.marks import DeviceMarks
from lightning_gpufeed.diagnose.counters import Span, StepTotals
from lightning_gpufeed.diagnose.device_sums import MOST_PENDING as _MOST_PENDING
from lightning_gpufeed.diagnose.device_sums import DeviceStep, DeviceSums
from lightning_gpufeed.diagnose.sums import HostSums, StepParts
from lightning_gpufeed.diagnose.timeline import NUM_SHOWN, Stretch, lay_out

__all__ = ["StepTimer"]

_MOST_NOTES = 512
_FEW_STEPS = 16
_LONG_FACTOR = 4.0  # a wait of so many steps is a stall: it is counted where it was, and no sample of others


@dataclass(slots=True)
class _Step(StepParts):
    """One step in the making. Times of the host, in seconds of `time.perf_counter`."""

    begun: float = 0.0
    wait: float = 0.0
    copy_begin: float = 0.0
    compute_begin: float = 0.0
    is_computing: bool = False
    is_computed: bool = False
    cpu_begin: float = 0.0
    spans: list[Stretch] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)


class StepTimer:
    """Adds up where the time of the steps goes. The caller says what begins and ends; each call takes microseconds.

    A step begins with the request for its batch and ends where the next one begins; `pause` leaves out what is no
    training, such as validation.

    Example:
        >>> timer = StepTimer(torch.device("cpu"))
        >>> timer.begin_wait(); timer.end_wait(); timer.begin_compute(); timer.end_compute(); timer.end_step()
        >>> timer.totals().num_steps
        1
    """

    def __init__(self, device: torch.device, *, num_ranks: int = 1) -> None:
        """Nothing timed yet.

        Args:
            device: Where the steps run. CUDA events are recorded on its current stream.
            num_ranks: How many train together.
        """
        self._marks = DeviceMarks(device)
        self._device = DeviceSums(self._marks)
        self._has_ranks = num_ranks > 1
        self._is_cuda = self._marks.is_cuda
        self.weight = 1.0
        """Steps that each one watched in full stands for. Changed by the caller between steps."""
        self.spent_seconds = 0.0
        """Time that went into marks of a device so far."""
        self.is_fetching_inside = False
        """Whether steps have fetched batches by themselves; all are to be watched in full then."""
        # What happened, when, and more about it: one list for ever, so that to note something is one call.
        self._notes: list[tuple[Callable[..., None], float, Any]] = []
        self._note = self._take_in if self._is_cuda else self._notes.append
        # Of steps that are not watched in full, in turn: the request for the batch, and its arrival.
        self._times: list[float] = []
        self.brief_begin_wait: Callable[[], None] = self.begin_wait
        self.brief_end_wait: Callable[[], None] = self.end_wait
        self.reset()

    def reset(self) -> None:
        """Begin a new epoch."""
        self._notes.clear()
        self._times.clear()
        self.is_computing = False
        """Whether forward, backward and update have begun and are not over."""
        self.has_batch = False
        """Whether a batch for a step has come, and the step has not begun to compute."""
        self._step: _Step | None = None
        self._wait_begin: float | None = None
        self._wait_cpu = self._sync = 0.0
        self._is_ready: bool | None = None
        self._sync_begin: float | None = None
        self._end: float | None = None
        self._sync_span: Stretch | None = None
        self._sums, self._weight = HostSums(), 1.0
        self._device.reset()
        self._host_spans: deque[tuple[int, list[Stretch]]] = deque(maxlen=_MOST_PENDING + NUM_SHOWN)

    @property
    def num_steps(self) -> int:
        """Steps that are over."""
        self._add_up()
        return self._sums.num_steps

    @property
    def num_watched(self) -> int:
        """Of them, watched in full."""
        self._add_up()
        return self._sums.num_watched

    # What happens, in the order in which it does ---------------------------------------------------------

    def begin_sync(self) -> None:
        """Lightning asks the other ranks whether to stop."""
        self._note((self._begin_sync, time.perf_counter(), None))

    def end_sync(self) -> None:
        """They have answered."""
        self._note((self._end_sync, time.perf_counter(), None))

    def begin_wait(self, *, is_ready: bool | None = None) -> None:
        """The loader is asked for a batch.

        Args:
            is_ready: Whether it has one ready; None if it does not say.
        """
        self.is_fetching_inside |= self.is_computing
        self._note((self._begin_wait, time.perf_counter(), (is_ready, time.thread_time())))

    def end_wait(self, *, is_start: bool = False) -> None:
        """The batch is there.

        Args:
            is_start: Whether it was the wait for an epoch to get under way, which counts for no step.
        """
        self.has_batch = True
        self._note((self._end_wait, time.perf_counter(), (is_start, time.thread_time())))

    def begin_copy(self) -> None:
        """The batch is about to be moved to the device."""
        if self.has_batch:
            self._note((self._begin_copy, time.perf_counter(), None))

    def end_copy(self) -> None:
        """The move was asked for; on the CPU it is done."""
        if self.has_batch:
            self._note((self._end_copy, time.perf_counter(), None))

    def begin_compute(self) -> None:
        """Forward, backward and update begin."""
        self.is_computing, self.has_batch = True, False
        self._note((self._begin_compute, time.perf_counter(), time.thread_time() if self._has_ranks else 0.0))

    def end_compute(self) -> None:
        """All work of the step was given to the device; on the CPU it is done."""
        self.is_computing = False
        self._note((self._end_compute, time.perf_counter(), time.thread_time() if self._has_ranks else 0.0))

    def end_step(self) -> None:
        """Callbacks have run; what follows until the next request for a batch still belongs to this step's hooks."""
        self.is_computing = False
        self._note((self._end_step, time.perf_counter(), self.weight))
        if len(self._notes) >= _MOST_NOTES:
            self._add_up()

    def pause(self, *, is_over: bool = True) -> None:
        """Something else begins: validation, the end of an epoch. It counts as no part of any step.

        Args:
            is_over: Whether the last step has come to its end; asked of one that is not watched in full.
        """
        self.is_computing = self.has_batch = False
        self._add_up()
        if is_over:
            self._close_brief(time.perf_counter())
        self._times.clear()
        self._step = None
        self._end = self._wait_begin = self._sync_begin = None
        self._sync, self._sync_span = 0.0, None
        self._device.pause()

    def begin_brief(self, num_steps: int, then: Callable[[], None]) -> None:
        """The loader is asked for the batch of the first of some steps that are not watched in full.

        Of these `brief_begin_wait` and `brief_end_wait` are told, no more: the least there is, in one call each.

        Args:
            num_steps: How many, 1 or more.
            then: Called in the place of the request after them.
        """
        self._add_up()
        append, clock, left = self._times.append, time.perf_counter, num_steps

        def begin_wait() -> None:
            nonlocal left
            if left:
                left -= 1
                append(clock())
            else:
                then()

        self.brief_begin_wait = begin_wait
        self.brief_end_wait = lambda: append(clock())
        begin_wait()

    # What is made of it ----------------------------------------------------------------------------------

    def _take_in(self, note: tuple[Callable[..., None], float, Any]) -> None:
        begin = time.perf_counter()
        note[0](note[1], note[2])
        self.spent_seconds += time.perf_counter() - begin

    def _add_up(self) -> None:
        self._add_brief()
        for what, now, more in self._notes:
            what(now, more)
        self._notes.clear()

    def _begin_sync(self, now: float, _: None) -> None:
        self._sync_begin = now

    def _end_sync(self, now: float, _: None) -> None:
        if self._sync_begin is None:
            return
        self._sync += now - self._sync_begin
        self._sync_span = ("sync", self._sync_begin, now)
        self._sync_begin = None

    def _begin_wait(self, now: float, more: tuple[bool | None, float]) -> None:
        if self._times:
            self._close_brief(now)
        self._is_ready, self._wait_cpu = more
        self._wait_begin = now

    def _end_wait(self, now: float, more: tuple[bool, float]) -> None:
        begin, self._wait_begin = self._wait_begin, None
        if begin is None:
            return
        is_start, cpu = more
        received, seconds = cpu - self._wait_cpu, now - begin
        step = self._step
        if step is not None and step.is_computing:  # a step that fetches its batches by itself
            step.wait += seconds
            step.received += received
            if self._is_ready is not None:
                step.ready = (step.ready or 0.0) + seconds * self._is_ready
            step.compute += begin - step.compute_begin
            step.spans.append(("compute", step.compute_begin, begin))
            step.compute_begin = now
        else:
            # The time since the last step's end belongs to hooks; what came before the first step belongs to none.
            step = self._step = _Step(begun=begin - self._sync if self._end is None else self._end)
            step.wait, step.received, step.sync = seconds, received, self._sync
            step.ready = None if self._is_ready is None or is_start else seconds * self._is_ready
            if is_start:
                step.begun, step.wait, step.received, step.sync = now, 0.0, 0.0, 0.0
            step.copy_begin = now
            if self._sync_span is not None:
                step.spans.append(self._sync_span)
        step.spans.append(("wait", begin, now))
        self._sync, self._sync_span = 0.0, None

    def _begin_copy(self, now: float, _: None) -> None:
        step = self._step
        if step is not None and not (step.is_computing or step.is_computed):
            step.copy_begin = now
            self._mark(step)

    def _end_copy(self, now: float, _: None) -> None:
        step = self._step
        if step is not None and not (step.is_computing or step.is_computed):
            step.copy = now - step.copy_begin
            step.spans.append(("copy", step.copy_begin, now))
            self._mark(step)

    def _begin_compute(self, now: float, cpu: float) -> None:
        step = self._step
        if step is None:  # a step that fetches its batches by itself
            step = self._step = _Step(begun=now if self._end is None else self._end, copy_begin=now)
        if self._is_cuda and not step.marks:  # a batch that was not moved: it was there already
            self._mark(step)
            self._mark(step)
        # What is done to a batch on the device before the step belongs to computing.
        is_after_copy = bool(step.spans) and step.spans[-1][0] == "copy"
        step.compute_begin = step.spans[-1][2] if is_after_copy else now
        step.is_computing = True
        step.cpu_begin = cpu

    def _end_compute(self, now: float, cpu: float) -> None:
        step = self._step
        if step is None or not step.is_computing:
            return
        step.is_computing, step.is_computed = False, True
        step.compute += now - step.compute_begin
        step.spans.append(("compute", step.compute_begin, now))
        step.cpu += cpu - step.cpu_begin
        self._mark(step)

    def _end_step(self, now: float, weight: float) -> None:
        step, self._step = self._step, None
        if step is None or not step.is_computed:
            return
        number, elapsed = self._sums.num_steps, now - step.begun
        stalled, self._end = max(0.0, step.wait - self._usual_wait()), now
        self._sums.add(step.wait, elapsed)
        step.hooks = max(0.0, elapsed - step.wait - step.copy - step.compute - step.sync)
        self._sums.add_parts(weight, step)
        step.spans.append(("hooks", step.spans[-1][2], now))
        self._host_spans.append((number, step.spans))
        self._weight = weight
        if self._is_cuda:
            self._device.keep(DeviceStep(number, step.marks, step.copy_begin, weight, stalled))

    def _add_brief(self) -> None:
        """Of steps that are not watched in full, those that are over: each ends where the next one begins."""
        times = self._times
        num_steps = (len(times) - 1) // 2
        if num_steps < 1:
            return
        begins, ends = times[: 2 * num_steps : 2], times[1 : 2 * num_steps : 2]
        if self._end is not None and begins[0] > self._end:
            # What comes after a step that was watched in full, as that was.
            self._sums.add_tail(self._weight, begins[0] - self._end, self._sync)
        self._sync, self._sync_span = 0.0, None
        waits, usual = [end - begin for begin, end in zip(begins, ends, strict=True)], self._usual_wait()
        begun, self._end = begins[0] if self._end is None else self._end, times[2 * num_steps]
        self._sums.add(sum(waits), self._end - begun, num_steps)
        self._device.skip(sum(wait - usual for wait in waits if wait > usual))
        del times[: 2 * num_steps]

    def _close_brief(self, now: float) -> None:
        self._times.append(now)
        self._add_brief()
        self._times.clear()

    def _usual_wait(self) -> float:
        """What is longer than this is a stall."""
        num_steps = self._sums.num_steps
        return _LONG_FACTOR * self._sums.elapsed / num_steps if num_steps >= _FEW_STEPS else float("inf")

    def _mark(self, step: _Step) -> None:
        if self._is_cuda and self._device.has_room:
            step.marks.append(self._marks.mark())

    # Results ---------------------------------------------------------------------------------------------

    def totals(self) -> StepTotals:
        """All steps so far. Does not wait for the device: its times are those of the steps that it has finished.

        Returns:
            The sums.
        """
        self._add_up()
        sums, parts = self._sums, self._sums.parts()
        copy, compute, idle, num_timed = parts.copy, parts.compute, None, sums.num_watched
        if self._is_cuda:
            copy, compute, idle = self._device.totals(sums.num_steps, is_sampled=sums.is_sampled)
            num_timed = self._device.num_timed
        return StepTotals(
            num_steps=sums.num_steps,
            num_watched=sums.num_watched if sums.is_sampled else None,
            elapsed_seconds=sums.elapsed,
            wait_seconds=sums.wait,
            ready_seconds=parts.ready,
            receive_seconds=min(sums.wait, parts.received),
            copy_seconds=copy,
            compute_seconds=compute,
            idle_seconds=idle,
            sync_seconds=parts.sync if self._has_ranks else None,
            hook_seconds=parts.hooks,
            compute_cpu_seconds=parts.cpu if self._has_ranks else None,
            num_timed=num_timed,
        )

    def timeline(self) -> tuple[Span, ...]:
        """The latest few steps, stretch by stretch; on a CUDA device the latest ones that it has finished.

        Returns:
            In seconds from the beginning of the first of them; "device" spans on a CUDA device only. Where not all
            steps are watched in full, steps that follow each other.
        """
        self._add_up()
        self._device.collect()
        return lay_out(list(self._host_spans), self._device.spans, is_sampled=self._sums.is_sampled)
