"""How long a rank computes and how long it is in the pipeline at all, for a few steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["Spans"]


class Spans:
    """Adds up seconds by name: on the host's clock, or between events on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Off.

        Args:
            device: Where the work is done.
        """
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []
        self.is_on = False
        """Whether spans count."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Count what is done inside.

        Args:
            name: What it is.

        Returns:
            A context.
        """
        return self._measured(name) if self.is_on else nullcontext()

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """What has been counted, and begin again.

        Returns:
            Seconds by name. Waits for a CUDA device.
        """
        if self._events:
            torch.cuda.synchronize(self._device)
        for name, begin, end in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
        self._events, seconds, self._seconds = [], self._seconds, {}
        return seconds
