"""Figures of the callbacks, for the Trainer's loggers."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

__all__ = ["log_figures"]


def log_figures(trainer: Trainer, figures: Mapping[str, float], name: str) -> None:
    """Give figures to every logger, once: from rank 0, at the step that the training has come to.

    A logger that fails is warned of: a training does not end for the figures of what watches over it.

    Args:
        trainer: Whose loggers.
        figures: Name -> value. Nothing is logged if there are none.
        name: Of the callback, for the warning.
    """
    if not figures or not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        try:
            logger.log_metrics(dict(figures), step=trainer.global_step)
        except Exception as error:
            rank_zero_warn(f"{name}: {type(logger).__name__} did not take its figures ({error}).")
