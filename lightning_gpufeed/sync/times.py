"""How long the parts of a step take, told by marks in the device's own work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lightning_gpufeed.device.marks import DeviceMarks

__all__ = ["StepSeconds", "StepTimes", "medians"]


@dataclass(frozen=True)
class StepSeconds:
    """One step, in seconds.

    Attributes:
        forward: Of each layer, from its begin to that of the next.
        input_grad: Of each layer, from the layer after it to its own input gradient; with the weight gradient where
            both are computed at once.
        weight_grad: Of each layer; 0 where it is part of the other.
        copies: Of all gradients into the buckets.
        updates: Of all parameters.
        other: All the rest but for waiting: the loop, earlier microbatches.
        deferred_bytes: What each layer's weight gradient keeps alive while it waits.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    copies: float
    updates: float
    other: float
    deferred_bytes: tuple[int, ...] = ()

    def numbers(self) -> list[float]:
        """All seconds in a row.

        Returns:
            As `of_numbers` reads them.
        """
        return [*self.forward, *self.input_grad, *self.weight_grad, self.copies, self.updates, self.other]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float], deferred_bytes: tuple[int, ...]) -> StepSeconds:
        """Read what `numbers` gives.

        Args:
            numbers: In a row.
            deferred_bytes: Of each layer.

        Returns:
            The step.
        """
        n = (len(numbers) - 3) // 3
        parts = [tuple(numbers[i * n : (i + 1) * n]) for i in range(3)]
        copies, updates, other = numbers[3 * n :]
        return cls(parts[0], parts[1], parts[2], copies, updates, other, deferred_bytes)


def medians(steps: Sequence[StepSeconds]) -> StepSeconds:
    """Of each part.

    Args:
        steps: At least one.

    Returns:
        A step of medians.
    """
    columns = zip(*(step.numbers() for step in steps), strict=True)
    return StepSeconds.of_numbers([median(column) for column in columns], steps[-1].deferred_bytes)


class StepTimes:
    """Takes the time of steps in which nothing overlaps: gradients are sent when backward has ended, and waited for.

    ::

        step | other | F0 | F1 | F2 | I2 | W2 | I1 | W1 | B0 | copies | waiting | updates | other | next step
    """

    def __init__(self, device: torch.device, num_layers: int) -> None:
        """No step yet.

        Args:
            device: Whose time.
            num_layers: In forward order.
        """
        self._marks, self._num_layers = DeviceMarks(device), num_layers
        self._device = device
        self._deferred = [0] * num_layers
        self._events: list[tuple[str, int, Any]] = []

    def note(self, kind: str, layer: int = -1) -> None:
        """Something begins or ends now.

        Args:
            kind: "step", "forward", "F" a layer's forward begins, "backward" begins, "I", "W", "B" a layer's gradients
                are there, "copied" all are in their buckets, "waited" for their arrival, "update" begins, "updated".
            layer: Which.
        """
        self._events.append((kind, layer, self._marks.mark()))

    def note_bytes(self, layer: int, num_bytes: int) -> None:
        """What a layer's weight gradient keeps alive.

        Args:
            layer: Which.
            num_bytes: By itself.
        """
        self._deferred[layer] = max(self._deferred[layer], num_bytes)

    def take(self) -> StepSeconds | None:
        """The step that has ended; the next one begins.

        Returns:
            None if there is no whole step.
        """
        self.note("step")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        events, self._events = self._events, self._events[-1:]
        if not events or events[0][0] != "step":
            return None
        return self._read(events)

    def _read(self, events: list[tuple[str, int, Any]]) -> StepSeconds | None:
        forward, input_grad, weight_grad = ([0.0] * self._num_layers for _ in range(3))
        # Of several microbatches the last one alone is looked at.
        starts = [place for place, event in enumerate(events) if event[0] == "forward"]
        if not starts:
            return None
        waiting = part = copies = updates = 0.0
        running, before = -1, events[starts[-1]][2]
        total = self._marks.seconds(events[0][2], events[-1][2])
        for kind, layer, mark in events[starts[-1] + 1 : -1]:
            seconds = self._marks.seconds(before, mark)
            if kind in ("F", "backward"):
                if running >= 0:
                    forward[running] += seconds
                    part += seconds
                running = layer
            elif kind in ("I", "B"):
                input_grad[layer] += seconds
                part += seconds
            elif kind == "W":
                weight_grad[layer] += seconds
                part += seconds
            elif kind == "copied":
                copies += seconds
            elif kind == "waited":
                waiting += seconds
            elif kind == "updated":
                updates += seconds
            before = mark
        return StepSeconds(
            tuple(forward),
            tuple(input_grad),
            tuple(weight_grad),
            copies,
            updates,
            max(0.0, total - part - waiting - copies - updates),
            tuple(self._deferred),
        )
