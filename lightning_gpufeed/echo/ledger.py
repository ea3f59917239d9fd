"""Which steps were asked for, which are under way, and which is the first that is not done. Pure.

::

    ask          hand_out         arm                done
    decided  ->  loaders gave ->  the step runs  ->  counted by the Trainer
                 (waits in a
                 queue: some Trainers look one ahead)
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from lightning_gpufeed.echo.plan import Piece
from lightning_gpufeed.echo.position import Place, Round

__all__ = ["Step", "StepLedger"]


class Step(NamedTuple):
    """What a step trains on, and what was fetched for it."""

    piece: Piece
    round: Round


class StepLedger:
    """Follows steps from being asked for to being done.

    Attributes:
        asked: The step that was asked for last.
        num_asked: How many were, in this iteration.
        armed: The step that runs, or ran last.
    """

    def __init__(self) -> None:
        """No step yet."""
        self.armed: Step | None = None
        self._num_done_before = 0
        self._queue: deque[Step] = deque()
        self.begin_asking()

    def begin_asking(self) -> None:
        """A new iteration; what was asked for and not begun is given up."""
        self.asked: Step | None = None
        self.num_asked = 0
        self._queue.clear()

    def begin_epoch(self) -> None:
        """No step of this epoch has begun."""
        self.begin_asking()
        self.armed = None

    def ask(self, step: Step) -> None:
        """A step was decided on."""
        self.asked = step
        self.num_asked += 1

    def hand_out(self) -> None:
        """A loader gave its item for the step that was asked for; the first one of several counts."""
        assert self.asked is not None
        if not any(step is self.asked for step in self._queue):
            self._queue.append(self.asked)

    def arm(self, num_done: int) -> Step | None:
        """The next step begins.

        Args:
            num_done: Steps of the epoch that are done.

        Returns:
            It; None if none was handed out.
        """
        if not self._queue:
            return None
        self.armed = self._queue.popleft()
        self._num_done_before = num_done
        return self.armed

    def is_latest_undone(self, num_done: int) -> bool:
        """Whether the step that was begun last is not done, and has to be repeated after a stop."""
        return self.armed is not None and num_done <= self._num_done_before

    def waiting_place(self, num_done: int) -> Place | None:
        """The first step that is not done, among those that were decided on; None if all are done."""
        if self.armed is not None and self.is_latest_undone(num_done):
            return Place(*self.armed)
        return Place(*self._queue[0]) if self._queue else None
