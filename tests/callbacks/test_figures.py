"""Figures of a callback reach every logger once; one that fails does not end a training."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lightning_gpufeed.callbacks.figures import log_figures
from tests.datamodules.models import make_trainer


class Noting(Logger):
    """Keeps what it is given, or fails."""

    name, version = "noting", 0

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.seen = error, []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.seen.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """None are wanted."""


def trainer_of(*loggers: Logger) -> Trainer:
    return make_trainer(logger=list(loggers))


def test_a_logger_that_fails_is_warned_of_and_the_others_get_their_figures():
    first, broken, last = Noting(), Noting(OSError("disk full")), Noting()
    with pytest.warns(UserWarning, match=r"^OOMRecovery: Noting did not take its figures \(disk full\)\.$"):
        log_figures(trainer_of(first, broken, last), {"gpufeed/oom/x": 1.0}, "OOMRecovery")
    assert first.seen == last.seen == [(0, {"gpufeed/oom/x": 1.0})]
    assert first.seen[0][1] is not last.seen[0][1]  # a logger may change what it is given


def test_nothing_is_logged_where_there_are_no_figures():
    log_figures(trainer_of(Noting(OSError("asked"))), {}, "BatchEcho")
