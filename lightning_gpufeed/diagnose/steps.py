"""Where the time of each step goes, on the host and on the device, without waiting for the device.

::

    host      | sync | wait | copy | compute | hooks | sync | wait |
              t0            t1     t2        t3      t4
    device                  m0    m1              m2        m0'
                            | copy |   compute    |  idle   |

The host's times are read off the clock. Those of a CUDA device are marks in its queue, read some steps later, when
they are reached. On the CPU the host is the device.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_gpufeed.device.marks import DeviceMarks
from lightning_gpufeed.diagnose.counters import Span, StepTotals

__all__ = ["StepTimer"]

_TIMELINE_STEPS = 8
_MOST_PENDING = 256
"""Steps whose marks may be outstanding; a device that is further behind is not timed for a while."""


@dataclass
class _Step:
    """One step in the making. Times of the host, in seconds of `time.perf_counter`."""

    begun: float
    sync: float = 0.0
    wait: float = 0.0
    copy_begin: float = 0.0
    copy: float = 0.0
    compute_begin: float = 0.0
    compute: float = 0.0
    cpu_begin: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    waits_inside: float = 0.0


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
        self.reset()

    def reset(self) -> None:
        """Begin a new epoch."""
        self._step: _Step | None = None
        self._wait_begin = self._sync_begin = 0.0
        self._end: float | None = None
        self._sync = 0.0
        self._sync_span: tuple[str, float, float] | None = None
        self.num_steps = 0
        self._elapsed = self._wait = self._copy = self._compute = self._cpu = self._hooks = self._syncs = 0.0
        self._timed = 0
        self._idle_gaps = 0
        self._device_copy = self._device_compute = self._device_idle = 0.0
        self._pending: deque[tuple[int, list[Any], bool]] = deque()
        self._last_mark: Any = None
        self._is_adjoining = False
        self._anchor: tuple[Any, float] | None = None
        self._host_spans: deque[tuple[int, list[tuple[str, float, float]]]] = deque(maxlen=_TIMELINE_STEPS)
        self._device_spans: deque[tuple[int, list[tuple[str, float, float]]]] = deque(maxlen=_TIMELINE_STEPS)

    @property
    def is_computing(self) -> bool:
        """Whether forward, backward and update have begun and the step is not over."""
        return self._step is not None and self._step.compute_begin > 0

    # What happens, in the order in which it does ---------------------------------------------------------

    def begin_sync(self) -> None:
        """Lightning asks the other ranks whether to stop."""
        self._sync_begin = time.perf_counter()

    def end_sync(self) -> None:
        """They have answered."""
        now = time.perf_counter()
        self._sync += now - self._sync_begin
        self._sync_span = ("sync", self._sync_begin, now)

    def begin_wait(self) -> None:
        """The loader is asked for a batch."""
        self._wait_begin = time.perf_counter()

    def end_wait(self, *, is_start: bool = False) -> None:
        """The batch is there.

        Args:
            is_start: Whether it was the wait for an epoch to get under way, which counts for no step.
        """
        now = time.perf_counter()
        seconds = now - self._wait_begin
        step = self._step
        if step is not None and step.compute_begin:  # a step that fetches its batches by itself
            step.wait += seconds
            step.waits_inside += seconds
        else:
            # The time since the last step's end belongs to hooks; what came before the first step belongs to none.
            step = self._step = _Step(self._wait_begin - self._sync if self._end is None else self._end)
            step.wait, step.sync = seconds, self._sync
            if is_start:
                step.begun, step.wait, step.sync = now, 0.0, 0.0
            step.copy_begin = now
            if self._sync_span is not None:
                step.spans.append(self._sync_span)
        step.spans.append(("wait", self._wait_begin, now))
        self._sync, self._sync_span = 0.0, None

    def begin_copy(self) -> None:
        """The batch is about to be moved to the device."""
        step = self._step
        if step is not None and not step.compute_begin:
            step.copy_begin = time.perf_counter()
            self._mark(step)

    def end_copy(self) -> None:
        """The move was asked for; on the CPU it is done."""
        step = self._step
        if step is not None and not step.compute_begin:
            now = time.perf_counter()
            step.copy = now - step.copy_begin
            step.spans.append(("copy", step.copy_begin, now))
            self._mark(step)

    def begin_compute(self) -> None:
        """Forward, backward and update begin."""
        step = self._step
        if step is None:  # a step that fetches its batches by itself
            step = self._step = _Step(time.perf_counter() if self._end is None else self._end)
        if self._marks.is_cuda and not step.marks:  # a batch that was not moved: it was there already
            self._mark(step)
            self._mark(step)
        step.compute_begin = time.perf_counter()
        if self._has_ranks:
            step.cpu_begin = time.thread_time()

    def end_compute(self) -> None:
        """All work of the step was given to the device; on the CPU it is done."""
        step = self._step
        if step is None or not step.compute_begin:
            return
        now = time.perf_counter()
        step.compute = now - step.compute_begin - step.waits_inside
        step.spans.append(("compute", step.compute_begin, now))
        if self._has_ranks:
            self._cpu += time.thread_time() - step.cpu_begin
        self._mark(step)

    def end_step(self) -> None:
        """Callbacks have run; what follows until the next request for a batch still belongs to this step's hooks."""
        step, self._step = self._step, None
        if step is None or not step.compute_begin:
            return
        now = time.perf_counter()
        number, self.num_steps = self.num_steps, self.num_steps + 1
        elapsed = now - step.begun
        self._elapsed += elapsed
        self._wait += step.wait
        self._copy += step.copy
        self._compute += step.compute
        self._syncs += step.sync
        self._hooks += max(0.0, elapsed - step.wait - step.copy - step.compute - step.sync)
        end = step.spans[-1][2]
        step.spans.append(("hooks", end, now))
        self._host_spans.append((number, step.spans))
        self._end = now
        if self._marks.is_cuda:
            self._keep(number, step)

    def pause(self) -> None:
        """Something else begins: validation, the end of an epoch. It counts as no part of any step."""
        self._step = None
        self._end = None
        self._sync, self._sync_span = 0.0, None
        self._is_adjoining = False

    # The device ------------------------------------------------------------------------------------------

    def _mark(self, step: _Step) -> None:
        if self._marks.is_cuda and len(self._pending) < _MOST_PENDING:
            step.marks.append(self._marks.mark())

    def _keep(self, number: int, step: _Step) -> None:
        """Note a step's marks, and read those that the device has reached."""
        if len(step.marks) == 3:
            self._pending.append((number, step.marks, self._is_adjoining))
            self._is_adjoining = True
            if self._anchor is None:
                # Before the first step the device has nothing to do, so this mark is reached when it is recorded.
                self._anchor = (step.marks[0], step.copy_begin)
        else:
            self._is_adjoining = False
        self._collect()

    def _collect(self) -> None:
        """Add up the steps that the device has finished by now."""
        while self._pending and self._marks.is_reached(self._pending[0][1][2]):
            number, (begin, copied, end), is_adjoining = self._pending.popleft()
            self._timed += 1
            self._device_copy += self._marks.seconds(begin, copied)
            self._device_compute += self._marks.seconds(copied, end)
            if is_adjoining and self._last_mark is not None:
                self._device_idle += max(0.0, self._marks.seconds(self._last_mark, begin))
                self._idle_gaps += 1
            self._device_spans.append((number, self._spans_of(begin, copied, end)))
            anchor = self._anchor[0] if self._anchor is not None else None
            spare = [mark for mark in (self._last_mark, begin, copied) if mark is not None and mark is not anchor]
            self._marks.recycle(*spare)
            self._last_mark = end

    def _spans_of(self, begin: Any, copied: Any, end: Any) -> list[tuple[str, float, float]]:
        """A step on the device, in the host's time."""
        assert self._anchor is not None
        mark, zero = self._anchor
        times = [zero + self._marks.seconds(mark, one) for one in (begin, copied, end)]
        return [("copy", times[0], times[1]), ("compute", times[1], times[2])]

    # Results ---------------------------------------------------------------------------------------------

    def totals(self) -> StepTotals:
        """All steps so far. Does not wait for the device: its times are those of the steps that it has finished.

        Returns:
            The sums.
        """
        copy, compute, idle = self._copy, self._compute, None
        if self._marks.is_cuda:
            self._collect()
            scale = self.num_steps / self._timed if self._timed else 0.0
            copy, compute = self._device_copy * scale, self._device_compute * scale
            idle = self._device_idle * self.num_steps / self._idle_gaps if self._idle_gaps else None
        return StepTotals(
            num_steps=self.num_steps,
            elapsed_seconds=self._elapsed,
            wait_seconds=self._wait,
            copy_seconds=copy,
            compute_seconds=compute,
            idle_seconds=idle,
            sync_seconds=self._syncs if self._has_ranks else None,
            hook_seconds=self._hooks,
            compute_cpu_seconds=self._cpu if self._has_ranks else None,
            num_timed=self._timed if self._marks.is_cuda else self.num_steps,
        )

    def timeline(self) -> tuple[Span, ...]:
        """The latest few steps, stretch by stretch.

        Returns:
            In seconds from the beginning of the first of them; "device" spans on a CUDA device only.
        """
        lanes = [("host", self._host_spans), ("device", self._device_spans)]
        zero = min((spans[0][1] for _, kept in lanes for _, spans in kept if spans), default=0.0)
        return tuple(
            Span(lane, phase, begin - zero, end - zero, number)
            for lane, kept in lanes
            for number, spans in kept
            for phase, begin, end in spans
        )
