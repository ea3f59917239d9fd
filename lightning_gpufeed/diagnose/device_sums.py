"""What the times of steps on a CUDA device come to, by marks in its queue. On the CPU there are none.

::

    host    | wait  | copy | compute | hooks |   wait   | copy | ...
    device  ........m0copy m1  compute  m2 ... idle ... m0
                    ^ asked for         ^ the end of the step's work

Nothing here waits for the device: marks are read when it has reached them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from lightning_gpufeed.device.marks import DeviceMarks
from lightning_gpufeed.diagnose.timeline import NUM_SHOWN, Stretch

__all__ = ["MOST_PENDING", "DeviceStep", "DeviceSums"]

MOST_PENDING = 256
"""Steps whose marks may be outstanding; a device that is further behind is not timed for a while."""


class DeviceStep(NamedTuple):
    """A step that the host has given away.

    Attributes:
        number: In the epoch.
        marks: Before the copy, after it, after the step's work; fewer if it is not to be timed.
        given: When the host gave the copy away.
        weight: Steps that it stands for.
        stalled: Seconds of its wait beyond what is usual.
    """

    number: int
    marks: list[Any]
    given: float
    weight: float
    stalled: float


class DeviceSums:
    """Adds up what the device has finished.

    Attributes:
        num_timed: Steps whose times on the device are known.
        spans: The latest few of them, step by step, in the host's time.
    """

    def __init__(self, marks: DeviceMarks) -> None:
        """None yet.

        Args:
            marks: Of the device.
        """
        self._marks = marks
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.num_timed = 0
        self._num_gaps = 0
        self._copy = self._compute = self._idle = 0.0
        self._weights = self._gap_weights = self._usual_idle = self._stalled = 0.0
        self._pending: deque[tuple[DeviceStep, bool]] = deque()
        self._last_mark: Any = None
        self._last_end = 0.0
        self._is_adjoining = False
        self._spans: deque[tuple[int, list[Stretch]]] = deque(maxlen=NUM_SHOWN)

    @property
    def has_room(self) -> bool:
        """Whether another step may be marked."""
        return len(self._pending) < MOST_PENDING

    @property
    def spans(self) -> list[tuple[int, list[Stretch]]]:
        """Number, and what the device did: the latest few steps."""
        return list(self._spans)

    def pause(self) -> None:
        """What follows is no step: the time until the next one is no idle time."""
        self._is_adjoining = False

    def skip(self, stalled: float) -> None:
        """Steps are over that were not watched in full.

        Args:
            stalled: Seconds of their waits beyond what is usual.
        """
        self._stalled += stalled
        self._is_adjoining = False

    def keep(self, step: DeviceStep) -> None:
        """Note a step's marks, and read those that the device has reached.

        Args:
            step: All of its work was given away.
        """
        self._stalled += step.stalled
        if len(step.marks) == 3:
            self._pending.append((step, self._is_adjoining))
            self._is_adjoining = True
        else:
            self._is_adjoining = False
        self.collect()

    def collect(self) -> None:
        """Add up the steps that the device has finished by now."""
        while self._pending and self._marks.is_reached(self._pending[0][0].marks[2]):
            step, is_adjoining = self._pending.popleft()
            begin, copied, end = step.marks
            copy, compute = self._marks.seconds(begin, copied), self._marks.seconds(copied, end)
            self.num_timed += 1
            self._weights += step.weight
            self._copy += step.weight * copy
            self._compute += step.weight * compute
            if is_adjoining and self._last_mark is not None:
                gap = max(0.0, self._marks.seconds(self._last_mark, begin))
                self._idle += gap
                self._num_gaps += 1
                self._usual_idle += step.weight * max(0.0, gap - step.stalled)
                self._gap_weights += step.weight
            # In the host's time: as long after the step before as the device's clock says, but no work begins before
            # it was given.
            after = step.given
            if self._last_mark is not None:
                after = self._last_end + self._marks.seconds(self._last_mark, begin)
            zero = max(after, step.given)
            middle = zero + copy
            last = middle + compute
            self._spans.append((step.number, [("copy", zero, middle), ("compute", middle, last)]))
            self._marks.recycle(begin, copied, *([] if self._last_mark is None else [self._last_mark]))
            self._last_mark, self._last_end = end, last

    def totals(self, num_steps: int, *, is_sampled: bool) -> tuple[float, float, float | None]:
        """Times of all steps, of which those that are known are a sample.

        Args:
            num_steps: All of them.
            is_sampled: Whether some were not watched in full. What a stall left idle is then counted where it was,
                and no sample of anything.

        Returns:
            Seconds of copying, of computing, and idle; the last is None if it is not known.
        """
        self.collect()
        scale = num_steps / self._weights if self._weights else 0.0
        idle = self._idle * num_steps / self._num_gaps if self._num_gaps else None
        if is_sampled and idle is not None:
            idle = self._usual_idle * num_steps / self._gap_weights + self._stalled
        return self._copy * scale, self._compute * scale, idle
