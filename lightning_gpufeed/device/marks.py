"""How far a device has come with the work it was given, without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

__all__ = ["DeviceMarks", "StepClock"]


class DeviceMarks:
    """Points in the work of a device, recorded as the host gives it that work, and read once they are reached.

    On a CUDA device a mark is an event in the queue of the current stream; on the CPU it is the time. Nothing here
    waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        """No mark yet.

        Args:
            device: Where the work runs.
        """
        self.is_cuda = device.type == "cuda"
        self._device = device
        self._spare: list[Any] = []

    def mark(self) -> Any:
        """A mark behind all the work given so far.

        Returns:
            To be handed to the other methods.
        """
        if not self.is_cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_reached(self, mark: Any) -> bool:
        """Whether the device has come that far.

        Args:
            mark: From `mark`.

        Returns:
            True on the CPU.
        """
        return bool(mark.query()) if self.is_cuda else True

    def seconds(self, begin: Any, end: Any) -> float:
        """Time of the device between two marks that it has reached.

        Args:
            begin: The earlier one.
            end: The later one.

        Returns:
            Seconds.
        """
        return float(begin.elapsed_time(end)) / 1000 if self.is_cuda else float(end - begin)

    def recycle(self, *marks: Any) -> None:
        """Give marks back that are not needed any more.

        Args:
            *marks: Reached by the device.
        """
        if self.is_cuda:
            self._spare.extend(marks)


class StepClock:
    """Times steps on their device and knows how many of them it has not finished yet.

    On a CUDA device the host runs ahead: it queues the work of a step in a fraction of the time that the device
    takes for it. So begin and end are events in the device's own queue, read when they are done; nothing here waits
    for the device. On the CPU a step is finished when its code is.

    Attributes:
        num_steps: Steps timed so far.
        seconds: Time they took together, on the device.
    """

    def __init__(self, device: torch.device) -> None:
        """No step yet.

        Args:
            device: Where the steps run. CUDA events are recorded on its current stream.
        """
        self._marks = DeviceMarks(device)
        self._begun: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self.num_steps = 0
        self.seconds = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._begun = self._marks.mark()

    def end(self) -> None:
        """The step's last work was given to the device."""
        if self._begun is not None:
            self._pending.append((self._begun, self._marks.mark()))
            self._begun = None
        self._collect()

    def num_unfinished(self) -> int:
        """Steps whose end the device has not reached. Does not wait.

        Returns:
            0 on the CPU.
        """
        self._collect()
        return len(self._pending)

    def reset(self) -> None:
        """Forget all steps."""
        self._begun = None
        self._pending.clear()
        self.num_steps, self.seconds = 0, 0.0

    def _collect(self) -> None:
        """Add up the steps that are finished by now."""
        while self._pending:
            begin, end = self._pending[0]
            if not self._marks.is_reached(end):
                return
            self._pending.popleft()
            self.seconds += self._marks.seconds(begin, end)
            self.num_steps += 1
            self._marks.recycle(begin, end)
