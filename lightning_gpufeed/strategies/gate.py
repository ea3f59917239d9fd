"""Whether the optimizer's step may be taken piece by piece in the next forward, with the same result."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import optim

from lightning_gpufeed.sync.optimizers import why_inseparable

__all__ = ["needs_norm", "raw", "why_not_overlap"]

_PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


def why_not_overlap(
    trainer: Trainer, module: LightningModule, optimizer: optim.Optimizer, *, is_norm_known: bool = False
) -> str | None:
    """Why a step has to be taken at once.

    A step that is taken at once is exact in any case: whoever reads a gradient or a parameter waits for it.

    Args:
        trainer: With its precision and its clipping.
        module: The user's.
        optimizer: The one whose step it is.
        is_norm_known: Whether the norm of all gradients is known before they have arrived.

    Returns:
        None if it may be taken in the next forward; otherwise the reason in a few words.
    """
    if not module.automatic_optimization:
        return "optimization is manual"
    if len(trainer.strategy.optimizers) > 1:
        return "there are several optimizers"
    precision = trainer.precision_plugin
    if type(precision) not in _PRECISIONS:
        return f"{type(precision).__name__} may take the step in its own way"
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        return "16-mixed has to see all gradients before it knows whether the step is skipped"
    if needs_norm(trainer, module) and not is_norm_known:
        if is_overridden("configure_gradient_clipping", module):
            return "configure_gradient_clipping is overridden and may need all gradients"
        return "clipping by norm has to see all gradients (overlap_clipping=True sends half later, in 32 or 64 bits)"
    return why_inseparable(optimizer)


def needs_norm(trainer: Trainer, module: LightningModule) -> bool:
    """Whether all gradients have to be known before the first update.

    Args:
        trainer: With its clipping.
        module: The user's.

    Returns:
        False if they are not clipped, or each number by itself; True if only the module knows.
    """
    if is_overridden("configure_gradient_clipping", module):
        return True
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE


def raw(optimizer: Any) -> optim.Optimizer:
    """The torch optimizer.

    Args:
        optimizer: One, or Lightning's wrapper around it.

    Returns:
        It, without the wrapper.
    """
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
