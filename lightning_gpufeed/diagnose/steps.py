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
once.
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

__all__ = ["StepTimer"]

_TIMELINE_STEPS = 8
_MOST_NOTES = 512
_MOST_PENDING = 256
"""Steps whose marks may be outstanding; a device that is further behind is not timed for a while."""


_Stretch = tuple[str, float, float]


@dataclass(slots=True)
class _Step:
    """One step in the making. Times of the host, in seconds of `time.perf_counter`."""

    begun: float
    sync: float = 0.0
    wait: float = 0.0
    received: float = 0.0
    ready: float | None = None
    copy_begin: float = 0.0
    copy: float = 0.0
    compute_begin: float = 0.0
    is_computing: bool = False
    is_computed: bool = False
    compute: float = 0.0
    cpu_begin: float = 0.0
    spans: list[_Stretch] = field(default_factory=list)
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
        self._has_ranks = num_ranks > 1
        self._is_cuda = self._marks.is_cuda
        # What happened, when, and more about it: one list for ever, so that to note something is one call.
        self._notes: list[tuple[Callable[..., None], float, Any]] = []
        self._note = self._take_in if self._is_cuda else self._notes.append
        self.reset()

    def reset(self) -> None:
        """Begin a new epoch."""
        self._notes.clear()
        self.is_computing = False
        """Whether forward, backward and update have begun and are not over."""
        self.has_batch = False
        """Whether a batch for a step has come, and the step has not begun to compute."""
        self._step: _Step | None = None
        self._wait_begin: float | None = None
        self._wait_cpu = 0.0
        self._is_ready: bool | None = None
        self._ready: float | None = None
        self._sync_begin: float | None = None
        self._end: float | None = None
        self._sync = 0.0
        self._sync_span: _Stretch | None = None
        self._num_steps = 0
        self._elapsed = self._wait = self._received = self._copy = self._compute = self._cpu = self._hooks = (
            self._syncs
        ) = 0.0
        self._timed = 0
        self._idle_gaps = 0
        self._device_copy = self._device_compute = self._device_idle = 0.0
        self._pending: deque[tuple[int, list[Any], bool, float]] = deque()
        self._last_mark: Any = None
        self._last_end = 0.0
        self._is_adjoining = False
        self._host_spans: deque[tuple[int, list[_Stretch]]] = deque(maxlen=_MOST_PENDING + _TIMELINE_STEPS)
        self._device_spans: deque[tuple[int, list[_Stretch]]] = deque(maxlen=_TIMELINE_STEPS)

    @property
    def num_steps(self) -> int:
        """Steps that are over."""
        self._add_up()
        return self._num_steps

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
        self._note((self._end_step, time.perf_counter(), None))
        if len(self._notes) >= _MOST_NOTES:
            self._add_up()

    def pause(self) -> None:
        """Something else begins: validation, the end of an epoch. It counts as no part of any step."""
        self.is_computing = self.has_batch = False
        self._note((self._pause, time.perf_counter(), None))

    # What is made of it ----------------------------------------------------------------------------------

    def _take_in(self, note: tuple[Callable[..., None], float, Any]) -> None:
        what, now, more = note
        what(now, more)

    def _add_up(self) -> None:
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
        self._is_ready, self._wait_cpu = more
        self._wait_begin = now

    def _end_wait(self, now: float, more: tuple[bool, float]) -> None:
        begin, self._wait_begin = self._wait_begin, None
        if begin is None:
            return
        is_start, cpu = more
        received = cpu - self._wait_cpu
        seconds = now - begin
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
            step = self._step = _Step(begin - self._sync if self._end is None else self._end)
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
            step = self._step = _Step(now if self._end is None else self._end, copy_begin=now)
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
        self._cpu += cpu - step.cpu_begin
        self._mark(step)

    def _end_step(self, now: float, _: None) -> None:
        step, self._step = self._step, None
        if step is None or not step.is_computed:
            return
        number, self._num_steps = self._num_steps, self._num_steps + 1
        elapsed = now - step.begun
        self._elapsed += elapsed
        self._wait += step.wait
        self._received += step.received
        if step.ready is not None:
            self._ready = (self._ready or 0.0) + step.ready
        self._copy += step.copy
        self._compute += step.compute
        self._syncs += step.sync
        self._hooks += max(0.0, elapsed - step.wait - step.copy - step.compute - step.sync)
        end = step.spans[-1][2]
        step.spans.append(("hooks", end, now))
        self._host_spans.append((number, step.spans))
        self._end = now
        if self._is_cuda:
            self._keep(number, step)

    def _pause(self, now: float, _: None) -> None:
        self._step = None
        self._end = self._wait_begin = self._sync_begin = None
        self._sync, self._sync_span = 0.0, None
        self._is_adjoining = False

    # The device ------------------------------------------------------------------------------------------

    def _mark(self, step: _Step) -> None:
        if self._is_cuda and len(self._pending) < _MOST_PENDING:
            step.marks.append(self._marks.mark())

    def _keep(self, number: int, step: _Step) -> None:
        """Note a step's marks, and read those that the device has reached."""
        if len(step.marks) == 3:
            self._pending.append((number, step.marks, self._is_adjoining, step.copy_begin))
            self._is_adjoining = True
        else:
            self._is_adjoining = False
        self._collect()

    def _collect(self) -> None:
        """Add up the steps that the device has finished by now."""
        while self._pending and self._marks.is_reached(self._pending[0][1][2]):
            number, (begin, copied, end), is_adjoining, given = self._pending.popleft()
            self._timed += 1
            self._device_copy += self._marks.seconds(begin, copied)
            self._device_compute += self._marks.seconds(copied, end)
            if is_adjoining and self._last_mark is not None:
                self._device_idle += max(0.0, self._marks.seconds(self._last_mark, begin))
                self._idle_gaps += 1
            # In the host's time: as long after the step before as the device's clock says, but no work begins before
            # it was given.
            after = given if self._last_mark is None else self._last_end + self._marks.seconds(self._last_mark, begin)
            zero = max(after, given)
            middle = zero + self._marks.seconds(begin, copied)
            last = middle + self._marks.seconds(copied, end)
            self._device_spans.append((number, [("copy", zero, middle), ("compute", middle, last)]))
            self._marks.recycle(begin, copied, *([] if self._last_mark is None else [self._last_mark]))
            self._last_mark, self._last_end = end, last

    # Results ---------------------------------------------------------------------------------------------

    def totals(self) -> StepTotals:
        """All steps so far. Does not wait for the device: its times are those of the steps that it has finished.

        Returns:
            The sums.
        """
        self._add_up()
        copy, compute, idle = self._copy, self._compute, None
        if self._is_cuda:
            self._collect()
            scale = self._num_steps / self._timed if self._timed else 0.0
            copy, compute = self._device_copy * scale, self._device_compute * scale
            idle = self._device_idle * self._num_steps / self._idle_gaps if self._idle_gaps else None
        return StepTotals(
            num_steps=self._num_steps,
            elapsed_seconds=self._elapsed,
            wait_seconds=self._wait,
            ready_seconds=self._ready,
            receive_seconds=min(self._wait, self._received),
            copy_seconds=copy,
            compute_seconds=compute,
            idle_seconds=idle,
            sync_seconds=self._syncs if self._has_ranks else None,
            hook_seconds=self._hooks,
            compute_cpu_seconds=self._cpu if self._has_ranks else None,
            num_timed=self._timed if self._is_cuda else self._num_steps,
        )

    def timeline(self) -> tuple[Span, ...]:
        """The latest few steps, stretch by stretch; on a CUDA device the latest ones that it has finished.

        Returns:
            In seconds from the beginning of the first of them; "device" spans on a CUDA device only.
        """
        self._add_up()
        self._collect()
        numbers = {number for number, _ in self._device_spans or list(self._host_spans)[-_TIMELINE_STEPS:]}
        host = [one for one in self._host_spans if one[0] in numbers]
        lanes = [("host", host), ("device", list(self._device_spans))]
        zero = min((spans[0][1] for _, kept in lanes for _, spans in kept if spans), default=0.0)
        return tuple(
            Span(lane, phase, begin - zero, end - zero, number)
            for lane, kept in lanes
            for number, spans in kept
            for phase, begin, end in spans
        )
