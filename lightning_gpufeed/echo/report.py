"""What echoing did in an epoch, in one line. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EchoReport"]


@dataclass(frozen=True)
class EchoReport:
    """One epoch.

    Attributes:
        epoch: Counts from 0.
        num_fetches: Fresh batches.
        num_passes: Passes over them, so at least as many.
        num_echo_steps: Steps on samples that were trained on before.
        load_seconds: What the loader needs for a batch; 0 if not measured.
        pass_seconds: What the steps of one pass over a batch take; 0 if not measured.
        is_bound: Whether the loader may be faster than that: it was never waited for.
        wait_seconds: Time that steps waited for batches.
        elapsed_seconds: Time of the epoch, validation apart.
        is_adaptive: Whether batches were used again only while the next one was not ready.
    """

    epoch: int
    num_fetches: int
    num_passes: int
    num_echo_steps: int
    load_seconds: float
    pass_seconds: float
    is_bound: bool
    wait_seconds: float
    elapsed_seconds: float
    is_adaptive: bool = False

    @property
    def echo_factor(self) -> float:
        """Passes over each batch, on average."""
        return self.num_passes / self.num_fetches if self.num_fetches else 1.0

    @property
    def load_ratio(self) -> float | None:
        """R: time the loader needs for a batch over time that one pass over it takes; None if not measured."""
        return self.load_seconds / self.pass_seconds if self.load_seconds > 0 and self.pass_seconds > 0 else None

    @property
    def free_share(self) -> float | None:
        """Share of the echoes that ran while the step would have waited anyway, 0 to 1: those up to R passes."""
        ratio, factor = self.load_ratio, self.echo_factor
        if ratio is None or factor <= 1:
            return None
        return min(1.0, max(0.0, ratio - 1) / (factor - 1))

    @property
    def wait_share(self) -> float:
        """Share of the time that steps waited for batches."""
        return self.wait_seconds / self.elapsed_seconds if self.elapsed_seconds > 0 else 0.0

    def to_metrics(self) -> dict[str, float]:
        """Figures for a logger.

        Returns:
            Name -> value; what was not measured is left out.
        """
        metrics: dict[str, float | None] = {
            "fresh_batches": float(self.num_fetches),
            "echoed_steps": float(self.num_echo_steps),
            "factor": self.echo_factor,
            # A bound is no measurement: a loader that was never waited for may be much faster.
            "load_ratio": None if self.is_bound else self.load_ratio,
            "free_share": None if self.is_bound else self.free_share,
            "wait_share": self.wait_share,
        }
        return {f"gpufeed/echo/{name}": value for name, value in metrics.items() if value is not None}

    def __str__(self) -> str:
        """One line."""
        parts = [
            f"BatchEcho, epoch {self.epoch}: {self.num_fetches:,} fresh batches, {self.num_echo_steps:,} echoed steps, "
            f"echo factor {_short(self.echo_factor)}"
        ]
        ratio = self.load_ratio
        most = "at most " if self.is_bound else ""
        if ratio is not None:
            parts.append(
                f"loader {most}{_duration(self.load_seconds)} a batch, steps {_duration(self.pass_seconds)}: "
                f"R = {most}{_short(ratio)}"
            )
        free = self.free_share
        if free is not None and ratio is not None:
            parts.append(self._free_text(ratio, free))
        parts.append(f"waited {self.wait_share:.0%} of the time")
        return "; ".join(parts)

    def _free_text(self, ratio: float, free: float) -> str:
        """How much of the echo ran while the step would have waited anyway."""
        if free >= 0.995:
            # Where the loader was never waited for, R may be less than it seems.
            return "all of the echo was free (e <= R)" if not self.is_bound else "the echo may have been free (e <= R)"
        share = f"{'at most ' if self.is_bound else ''}{free:.0%} of the echo was free (passes up to R), the rest"
        if self.is_adaptive:
            return f"{share} ran on when the next batch was there"
        return f"{share} delayed fresh data (e > R): an echo_factor of {max(1, int(round(ratio, 2)))} would not"


def _duration(seconds: float) -> str:
    return f"{_short(seconds)} s" if seconds >= 0.9995 else f"{seconds * 1000:.3g} ms"


def _short(number: float) -> str:
    if number < 0.01:
        return "less than 0.01"
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"
