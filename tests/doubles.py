"""Recording stand-ins, for the few places where a real part cannot show in which order things happened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

WAIT_SECONDS = 20.0
"""How long a test waits for an event that has to come, before it fails."""


class EventLog:
    """What happened, in order, from all threads."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = threading.Condition()

    def add(self, event: str) -> None:
        """Note an event."""
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, event: str) -> None:
        """Wait until an event was noted.

        Raises:
            AssertionError: It never was.
        """
        with self._changed:
            seen = self._changed.wait_for(lambda: event in self.events, WAIT_SECONDS)
        assert seen, f"{event!r} did not happen; this did: {self.events}"


class LoggedProducer:
    """Makes item i out of i, and notes when each begins and ends.

    Args:
        log: Where to note it.
        gates: Item number -> what the item waits for before it is made.
        errors: Item number -> what is raised in its place.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        gates: dict[int, threading.Event] | None = None,
        errors: dict[int, BaseException] | None = None,
    ) -> None:
        self.log = log
        self.gates = gates or {}
        self.errors = errors or {}

    def __call__(self, number: int) -> str:
        """Make one item."""
        self.log.add(f"begin {number}")
        if number in self.gates:
            assert self.gates[number].wait(WAIT_SECONDS)
        if number in self.errors:
            raise self.errors[number]
        self.log.add(f"end {number}")
        return f"item {number}"


def parking_condition(log: EventLog, thread_name: str) -> Callable[..., Any]:
    """A `threading.Condition` that notes when the thread of a name goes to sleep in it.

    With it a test knows that a thread has done all it can, without waiting some time and hoping.

    Args:
        log: Notes "parked" each time.
        thread_name: Of the thread to watch.

    Returns:
        A class to use in the place of `threading.Condition`.
    """

    class ParkingCondition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread().name == thread_name:
                log.add("parked")
            return super().wait(timeout)

    return ParkingCondition
