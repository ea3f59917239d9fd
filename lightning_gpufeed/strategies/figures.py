"""Figures of the strategies, for the Trainer's loggers."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

__all__ = ["log_figures"]


def log_figures(trainer: Trainer | None, figures: Mapping[str, float]) -> None:
    """Give figures to every logger, once: from rank 0, at the step that the training has come to.

    A logger that fails is warned of.

    Args:
        trainer: Whose loggers; None if there is none any more.
        figures: Name -> value. Nothing is logged if there are none.
    """
    if trainer is None or not figures or not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        try:
            logger.log_metrics(dict(figures), step=trainer.global_step)
        except Exception as error:  # the other ranks would wait for this one
            rank_zero_warn(f"OutOfOrderStrategy: {type(logger).__name__} did not take its figures ({error}).")
