"""What the times of steps come to, where some of the steps stand for others. Pure.

::

    | sync | hooks |  wait: no batch  |  copy | compute | hooks |
                   ^ request          ^ batch                     known of every step
       ^ and where the other marks are                            known of steps that are watched in full

So the number of steps, their time and their wait are those of all steps, whatever is watched: a stall is counted. Of
the rest of their time, only how it divides is taken from the steps that were watched.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostSums", "StepParts"]


@dataclass(slots=True)
class StepParts:
    """How a step divides, or all of them together. Seconds.

    Attributes:
        copy: Moving the batch.
        compute: Forward, backward and update.
        sync: Asking the other ranks.
        hooks: All that is left.
        received: On a core during the wait.
        ready: Waited although a batch was ready; None if the loader does not say.
        cpu: On a core during `compute`.
    """

    copy: float = 0.0
    compute: float = 0.0
    sync: float = 0.0
    hooks: float = 0.0
    received: float = 0.0
    ready: float | None = None
    cpu: float = 0.0


class HostSums:
    """Adds up steps.

    Attributes:
        num_steps: Steps in all.
        num_watched: Of them, watched in full.
        elapsed: Their time.
        wait: Their wait for data.
    """

    def __init__(self) -> None:
        """None yet."""
        self.num_steps = self.num_watched = 0
        self.elapsed = self.wait = 0.0
        self._weights = 0.0
        self._copy = self._compute = self._sync = self._hooks = self._received = self._cpu = 0.0
        self._ready: float | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether there are steps that were not watched in full."""
        return self.num_watched < self.num_steps

    def add(self, wait: float, elapsed: float, num_steps: int = 1) -> None:
        """A step, watched in full or not, or some.

        Args:
            wait: Seconds of waiting for data.
            elapsed: All of its time.
            num_steps: How many there were.
        """
        self.num_steps += num_steps
        self.elapsed += elapsed
        self.wait += wait

    def add_parts(self, weight: float, parts: StepParts) -> None:
        """How that step divides, if it was watched in full.

        Args:
            weight: Steps that it stands for.
            parts: What it is made of.
        """
        self.num_watched += 1
        self._weights += weight
        self._copy += weight * parts.copy
        self._compute += weight * parts.compute
        self._sync += weight * parts.sync
        self._hooks += weight * parts.hooks
        self._received += weight * parts.received
        self._cpu += weight * parts.cpu
        if parts.ready is not None:
            self._ready = (self._ready or 0.0) + weight * parts.ready

    def add_tail(self, weight: float, seconds: float, sync: float) -> None:
        """What came after a step that was watched in full, and belongs to the next, which is not.

        Args:
            weight: Steps that the former stands for.
            seconds: From its end to the next request for a batch.
            sync: Part of it in which other ranks were asked.
        """
        self._sync += weight * sync
        self._hooks += weight * max(0.0, seconds - sync)

    def parts(self) -> StepParts:
        """Of all steps.

        Returns:
            Their sums if all were watched, else estimates that add up to the time of all.
        """
        if not self.is_sampled:
            return StepParts(self._copy, self._compute, self._sync, self._hooks, self._received, self._ready, self._cpu)
        rest = self.elapsed - self.wait
        known = self._copy + self._compute + self._sync + self._hooks
        if known <= 0:
            return StepParts(compute=rest)
        # Steps differ most in how long they are, least in how they divide; and what a stall adds to one that is not
        # watched is then not lost.
        scale = rest / known
        # A batch that is ready is taken in about the same time in every step; a stall is no part of that.
        number = self.num_steps / self._weights
        return StepParts(
            copy=scale * self._copy,
            compute=scale * self._compute,
            sync=scale * self._sync,
            hooks=scale * self._hooks,
            received=min(self.wait, number * self._received),
            ready=None if self._ready is None else min(self.wait, number * self._ready),
            cpu=scale * self._cpu,
        )
