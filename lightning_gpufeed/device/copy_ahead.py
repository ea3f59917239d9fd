"""Copies batches to a device ahead of their use, on a stream of its own, so that copying and computing overlap.

::

    reading thread   read batch 1 | start copy 1 | read batch 2 | start copy 2 ...
    copy stream                     [ copy 1 ]                    [ copy 2 ]
    compute stream   ... step 0 ...            [ step 1: waits for the event of copy 1 ] [ step 2 ...

Host memory stays referenced until the event of its copy has passed, so whoever recycles it by its last reference
never overwrites bytes that are still being copied. On the CPU a batch is its own copy: nothing is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CopyAhead", "StartedCopy"]

_cuda: Any = torch.cuda  # partly without types


@dataclass(frozen=True)
class StartedCopy:
    """A batch whose copy was started.

    Attributes:
        batch: Field name -> tensor on the device, or what is no tensor.
        event: Passes when the copy is done; None where there was nothing to copy.
    """

    batch: dict[str, Any]
    event: torch.cuda.Event | None


class CopyAhead:
    """Starts copies in one thread; another one takes them over.

    `start` never waits for the device, nor does `finish` on the host: it makes the current stream wait.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Make the stream.

        Args:
            device: Where batches go.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._stream: Any = _cuda.Stream(device) if device.type == "cuda" else None
        self._in_flight: deque[tuple[Any, Mapping[str, Any]]] = deque()

    def start(self, host_batch: Mapping[str, Any]) -> StartedCopy:
        """Start the copy of a batch.

        Args:
            host_batch: Field name -> tensor in host memory (pinned for an overlap), or anything else.

        Returns:
            The batch on the device, to be given to `finish` before it is used.
        """
        if self._stream is None:
            return StartedCopy(dict(host_batch), None)
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        with torch.cuda.stream(self._stream):
            batch = {
                name: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for name, value in host_batch.items()
            }
            event = _cuda.Event()
            event.record(self._stream)
        self._in_flight.append((event, dict(host_batch)))
        return StartedCopy(batch, event)

    def finish(self, started: StartedCopy) -> dict[str, Any]:
        """Take a batch over: what comes next on the current stream waits for its copy.

        Args:
            started: From `start`.

        Returns:
            The batch.
        """
        if started.event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(started.event)
            for value in started.batch.values():
                if isinstance(value, torch.Tensor):
                    # Its memory belongs to the copy stream, and must not be given away while this one uses it.
                    value.record_stream(current)
        return started.batch

    def close(self) -> None:
        """Let go of the host memory once all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()
        self._in_flight.clear()
