"""What an epoch did and took, and whether a batch that is not there is worth waiting for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from lightning_gpufeed.device.marks import StepClock
from lightning_gpufeed.echo.fetcher import FetchTimes
from lightning_gpufeed.echo.plan import Piece
from lightning_gpufeed.echo.report import EchoReport

__all__ = ["EchoMeasures"]

_POLL_SECONDS = 0.0002
_WAIT_SHARE = 0.05
"""Share of the time that a step may wait for a batch before the one at hand is used again."""
_FIRST_PATIENCE_SECONDS = 0.05
"""The same before there is much time to take a share of."""


class _NextBatch(Protocol):
    """A loader that can say when its next batch is there."""

    def is_ready(self) -> bool:
        """Whether it is."""

    def seconds_to_go(self) -> float:
        """How long it still takes, as far as that can be told."""


class EchoMeasures:
    """Counts and times of one epoch.

    Attributes:
        num_fetches: Batches fetched.
        num_passes: Passes over them.
        num_steps: Steps.
        num_echo_steps: Steps on samples that were trained on before.
        times: What fetching cost.
        clock: Times the steps on their device.
    """

    def __init__(self, clock: StepClock) -> None:
        """Nothing measured yet.

        Args:
            clock: Of the device that trains.
        """
        self.times = FetchTimes()
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        """Begin a new epoch."""
        self.num_fetches = self.num_passes = self.num_steps = self.num_echo_steps = 0
        self.times.reset()
        self.clock.reset()

    def count(self, piece: Piece) -> None:
        """A step begins."""
        self.restore(self.counts(piece, sign=1))

    def counts(self, piece: Piece | None = None, sign: int = -1) -> list[int]:
        """The counts as numbers to save.

        Args:
            piece: A step to leave out, as it will be done again.
            sign: 1 to add that step instead.

        Returns:
            `num_fetches`, `num_passes`, `num_steps` and `num_echo_steps`.
        """
        counts = [self.num_fetches, self.num_passes, self.num_steps, self.num_echo_steps]
        if piece is None:
            return counts
        step = [piece.pass_index == piece.piece_index == 0, piece.piece_index == 0, True, piece.is_echo]
        return [count + sign * one for count, one in zip(counts, step, strict=True)]

    def restore(self, counts: Sequence[int]) -> None:
        """Go on counting.

        Args:
            counts: From `counts`.
        """
        self.num_fetches, self.num_passes, self.num_steps, self.num_echo_steps = counts

    @property
    def pass_seconds(self) -> float:
        """What one pass over a batch takes on the device; 0 if that is not known yet."""
        if not self.num_passes or not self.clock.num_steps:
            return 0.0
        return self.clock.seconds / self.clock.num_steps * self.num_steps / self.num_passes

    def report(self, epoch: int, elapsed_seconds: float, load_seconds: float, is_adaptive: bool) -> EchoReport:
        """The epoch in figures.

        Args:
            epoch: Which one.
            elapsed_seconds: Its time, validation apart.
            load_seconds: What the slowest loader needs for a batch.
            is_adaptive: Whether batches were used again only while the next one was not ready.

        Returns:
            The figures.
        """
        return EchoReport(
            epoch=epoch,
            num_fetches=self.num_fetches,
            num_passes=self.num_passes,
            num_echo_steps=self.num_echo_steps,
            load_seconds=load_seconds,
            pass_seconds=self.pass_seconds,
            is_bound=self.times.is_bound,
            wait_seconds=self.times.wait_seconds,
            elapsed_seconds=elapsed_seconds,
            is_adaptive=is_adaptive,
        )

    def is_late(self, loaders: Sequence[_NextBatch]) -> bool:
        """Whether the next step would wait for its batch, at the moment when that matters.

        The host runs ahead of a GPU: whether a batch is late shows when the device is about to run dry, so until then
        this waits for the batch, or for the device. A batch that is about to come is waited for a little longer.

        Args:
            loaders: All that the next step needs a batch of.

        Returns:
            False as soon as all are ready.
        """
        while not (is_ready := self._are_ready(loaders)) and self.clock.num_unfinished() > 1:
            time.sleep(_POLL_SECONDS)
        patience = 0.0 if is_ready else self._patience()
        if is_ready or max(loader.seconds_to_go() for loader in loaders) > patience:
            return not is_ready
        begin = time.perf_counter()
        while not (is_ready := self._are_ready(loaders)) and time.perf_counter() - begin < patience:
            time.sleep(_POLL_SECONDS)
        self.times.wait_seconds += time.perf_counter() - begin
        return not is_ready

    @staticmethod
    def _are_ready(loaders: Sequence[_NextBatch]) -> bool:
        return all(loader.is_ready() for loader in loaders)

    def _patience(self) -> float:
        """How many seconds waiting is better than one more pass.

        A loader that is fast on average may be late now and then: that is no reason to echo, while such waits remain
        a small share of the time.

        Returns:
            Seconds.
        """
        is_fast = self.times.seconds_per_batch < 0.5 * self.pass_seconds
        budget = _WAIT_SHARE * self.clock.seconds + _FIRST_PATIENCE_SECONDS - self.times.wait_seconds
        return max(_WAIT_SHARE * self.pass_seconds, budget if is_fast else 0.0)
