"""What happened, in lines for people and in numbers for loggers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OOMEvent", "bytes_text", "summary_line"]


def bytes_text(num_bytes: int | None) -> str:
    """A number of bytes for people.

    Args:
        num_bytes: None: unknown.

    Returns:
        Three digits and a unit.
    """
    if num_bytes is None:
        return "an unknown amount"
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}"


@dataclass(frozen=True)
class OOMEvent:
    """One batch that ran out of memory, and how it ended.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        step: `global_step` in training, else number of the batch.
        phase: "forward", "backward", "between backward and optimizer step" or "optimizer step"; of the first failure.
        requested_bytes: What could not be had; None: the error did not say.
        free_bytes: What was free then; None: unknown.
        rank: Which rank it was; the highest of several.
        num_retries: Attempts after the first.
        num_microbatches: How many the batch was cut into in the end.
        microbatch_samples: Samples in the largest of them; 0: the batch was used whole.
        cure: What worked, in words.
    """

    stage: str
    step: int
    phase: str
    requested_bytes: int | None
    free_bytes: int | None
    rank: int
    num_retries: int
    num_microbatches: int
    microbatch_samples: int
    cure: str

    def __str__(self) -> str:
        where = "step" if self.stage == "fit" else f"{self.stage} batch"
        on_rank = f" on rank {self.rank}" if self.rank >= 0 else ""
        asked = "" if self.requested_bytes is None else f"asked for {bytes_text(self.requested_bytes)}"
        free = "" if self.free_bytes is None else f"{bytes_text(self.free_bytes)} free"
        numbers = ", ".join(text for text in (asked, free) if text)
        return (
            f"OOMRecovery: {where} {self.step} ran out of memory in {self.phase}{on_rank}"
            f"{f' ({numbers})' if numbers else ''}; what worked: {self.cure}."
        )

    def to_metrics(self) -> dict[str, float]:
        """The same for a logger.

        Returns:
            Names under "gpufeed/oom/".
        """
        numbers = {"num_retries": self.num_retries, "num_microbatches": self.num_microbatches}
        if self.requested_bytes is not None:
            numbers["requested_bytes"] = self.requested_bytes
        if self.free_bytes is not None:
            numbers["free_bytes"] = self.free_bytes
        return {f"gpufeed/oom/{self.stage}_{name}": float(value) for name, value in numbers.items()}


def summary_line(events: list[OOMEvent], num_microbatches: int) -> str:
    """How it went, at the end.

    Args:
        events: All of a run.
        num_microbatches: Where the training has ended.

    Returns:
        One line.
    """
    by_phase: dict[str, int] = {}
    for event in events:
        by_phase[event.phase] = by_phase.get(event.phase, 0) + 1
    phases = ", ".join(f"{number} in {phase}" for phase, number in by_phase.items())
    retries = sum(event.num_retries for event in events)
    ended = "whole batches" if num_microbatches == 1 else f"{num_microbatches} microbatches a batch"
    return (
        f"OOMRecovery: {len(events)} batch{'es' if len(events) != 1 else ''} ran out of memory ({phases}), "
        f"{retries} {'retry' if retries == 1 else 'retries'}, none lost; the training ended with {ended}."
    )
