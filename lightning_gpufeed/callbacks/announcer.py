"""Says what happened: to whoever reads the console, and to the Trainer's loggers."""

from __future__ import annotations

import logging

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_gpufeed.callbacks.figures import log_figures
from lightning_gpufeed.recover.report import OOMEvent, summary_line

__all__ = ["Announcer"]


log = logging.getLogger("lightning.pytorch.callbacks.oom_recovery")


class Announcer:
    """One line per event, each note once, and a line at the end.

    Attributes:
        events: All so far.
    """

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.events: list[OOMEvent] = []
        self._said: set[str] = set()

    def event(self, trainer: Trainer, event: OOMEvent) -> None:
        """A batch ran out of memory and was recovered.

        Args:
            trainer: Its loggers get the numbers.
            event: What happened.
        """
        self.events.append(event)
        if event.rank < 0 and trainer.global_rank > 0:  # this rank alone knows of it
            log.info(f"[rank {trainer.global_rank}] {event}")
        rank_zero_info(str(event))
        log_figures(trainer, event.to_metrics(), "OOMRecovery")

    def note(self, text: str) -> None:
        """Something a user should know.

        Args:
            text: Without a full stop.
        """
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(f"OOMRecovery: {text}.")

    def summary(self, num_microbatches: int) -> None:
        """The end.

        Args:
            num_microbatches: Into how many batches are cut now.
        """
        if self.events:
            rank_zero_info(summary_line(self.events, num_microbatches))
