"""What a verdict says, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Cause", "Cure", "Verdict"]


class Cause(StrEnum):
    """What the step waits for most."""

    COMPUTE = "compute-bound"
    CPU = "transform-bound"
    DECODE = "decode-bound"
    KERNEL = "kernel-bound"
    DISK = "disk-bound"
    AMPLIFICATION = "read amplification"
    CONVERSION = "conversion on the host"
    TOO_MANY_WORKERS = "too many workers"
    TOO_FEW_WORKERS = "too few workers"
    COPY = "copy-bound"
    SYNC = "synchronisation-bound"
    HOST = "host-bound"
    START = "epoch start"
    UNEVEN = "uneven batches"
    HANDOVER = "hand-over"
    LOADER = "loader-bound"


@dataclass(frozen=True)
class Cure:
    """Something to change, and how much faster the step would be.

    Attributes:
        name: What it is called in a line: "chunk order".
        action: What to type or to set, a sentence without a full stop.
        gain: Predicted ratio of the time of a step, before to after: 2.0 is twice as fast.
        low: Least gain that the counters leave room for.
        high: Most gain that the counters leave room for.
    """

    name: str
    action: str
    gain: float
    low: float
    high: float

    def __str__(self) -> str:
        """Such as `chunk order 2.1x (1.8-2.4)`."""
        if f"{self.low:.1f}" == f"{self.high:.1f}":
            return f"{self.name} {self.gain:.1f}x"
        return f"{self.name} {self.gain:.1f}x ({self.low:.1f}-{self.high:.1f})"


@dataclass(frozen=True)
class Verdict:
    """Why the step waits, the figures that say so, and what would help, best first.

    Attributes:
        cause: What it waits for most.
        wait_share: Share of the time that the step waits for data, 0 to 1.
        figures: Sentences without a full stop, the one that decided first.
        cures: In the order to try them; none where nothing would help.
        notes: What else was noticed, sentences without a full stop.
        free_echo_factor: R: up to this `BatchEcho` factor, uses of a batch again fill what would be waiting; None
            where the step hardly waits.
    """

    cause: Cause
    wait_share: float
    figures: tuple[str, ...] = ()
    cures: tuple[Cure, ...] = ()
    notes: tuple[str, ...] = ()
    free_echo_factor: float | None = None
