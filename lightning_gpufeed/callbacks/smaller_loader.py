"""Halves the batch size that a DataModule or module makes its training loader with, between two epochs."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

__all__ = ["LoaderShrinker"]


class LoaderShrinker:
    """Changes `batch_size`, has the loader made again, and changes the learning rate by the rule that was chosen.

    Private names of Lightning: `fit_loop._data_source.is_module` (where the loader comes from), and
    `fit_loop._combined_loader`, which is made again by `fit_loop.setup_data` if it is None.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, scale_lr: str) -> None:
        """Stand before the place where an epoch gets its loader.

        Args:
            trainer: A Trainer.
            pl_module: Its module.
            scale_lr: "linear", "sqrt" or "keep".

        Raises:
            ValueError: There is no batch size that could be changed.
        """
        loop = trainer.fit_loop
        if not loop._data_source.is_module() or not lightning_hasattr(pl_module, "batch_size"):
            raise ValueError(
                "mode='shrink_loader' needs a batch size that it can change: a DataModule, or a module with "
                "train_dataloader, that has an attribute or hyperparameter batch_size and makes its loader with it. "
                "A loader that is given to fit() is made already; mode='microbatch' works with it."
            )
        self._trainer, self._module, self._scale_lr = trainer, pl_module, scale_lr
        self._is_due = False
        own = loop.setup_data

        def setup_data() -> None:
            if self._is_due:
                self._is_due = False
                loop._combined_loader = None
            own()

        loop.__dict__["setup_data"] = setup_data

    def remove(self) -> None:
        """Give the loop its own method back."""
        self._trainer.fit_loop.__dict__.pop("setup_data", None)

    def obstacle(self) -> str | None:
        """Why the size cannot be changed now; None if it can."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and hasattr(config.scheduler, "total_steps"):
                return (
                    f"{type(config.scheduler).__name__} was made for a number of steps, and smaller batches make more "
                    f"of them"
                )
        return None

    @property
    def batch_size(self) -> int:
        """As it is now."""
        size: Any = lightning_getattr(self._module, "batch_size")
        return int(size)

    def restore(self, batch_size: int) -> None:
        """Use a size from a checkpoint; learning rates come back with the optimizer.

        Args:
            batch_size: From the checkpoint; before the loader is made.
        """
        lightning_setattr(self._module, "batch_size", batch_size)

    def shrink(self, factor: int) -> str:
        """Change size and rates; the next epoch gets a new loader.

        Args:
            factor: The batch is divided by it.

        Returns:
            What was done, in words.
        """
        was = self.batch_size
        now = max(1, was // factor)
        lightning_setattr(self._module, "batch_size", now)
        ratio = {"linear": now / was, "sqrt": math.sqrt(now / was), "keep": 1.0}[self._scale_lr]
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                _scale(group, "lr", ratio)
                _scale(group, "initial_lr", ratio)
        for config in self._trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [rate * ratio for rate in scheduler.base_lrs]
        self._is_due = True
        rate = "as it is" if ratio == 1 else f"times {ratio:.3g}"
        return f"from the next epoch on batches have {now} samples in the place of {was}; learning rate {rate}"


def _scale(group: dict[str, Any], name: str, ratio: float) -> None:
    if name in group:
        group[name] = group[name] * ratio
