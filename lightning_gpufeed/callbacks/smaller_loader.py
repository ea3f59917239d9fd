"""Makes the batch size smaller that a DataModule or module makes its training loader with, between two epochs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import PolynomialLR

from lightning_gpufeed.callbacks.batch_echo import BatchEcho
from lightning_gpufeed.callbacks.trainer_step import loader_samples

__all__ = ["LoaderShrinker"]


class LoaderShrinker:
    """Changes `batch_size`, has the loader made again, and changes the learning rate by the rule that was chosen.

    Private names of Lightning (each is watched by tests/test_private_api.py):

    ===============================================  ==============================================================
    `fit_loop._data_source.instance`, `.is_module`   whose `train_dataloader` makes the loader
    `fit_loop.setup_data`, `_combined_loader`        makes it at the begin of an epoch, if it is None
    `_checkpoint_connector.restore_datamodule`       comes before callbacks get their state
    `_checkpoint_connector._loaded_checkpoint`       what is being restored
    ===============================================  ==============================================================
    """

    def __init__(self, trainer: Trainer, scale_lr: str, state_key: str) -> None:
        """Stand before the places where an epoch gets its loader and a DataModule its state.

        Args:
            trainer: A Trainer.
            scale_lr: "linear", "sqrt" or "keep".
            state_key: Under which the callback's state is in a checkpoint.

        Raises:
            ValueError: There is no batch size that could be changed.
        """
        loop: Any = trainer.fit_loop
        connector: Any = trainer._checkpoint_connector
        self._owner: Any = loop._data_source.instance if loop._data_source.is_module() else None
        if self._owner is None or self._size() is None:
            raise ValueError(
                "mode='shrink_loader' needs a batch size that it can change: a DataModule, or a module with "
                "train_dataloader, that has an attribute or hyperparameter batch_size and makes its loader with it. "
                "A loader that is given to fit() is made already; mode='microbatch' works with it."
            )
        self._trainer, self._scale_lr = trainer, scale_lr
        self._is_due = False
        own_setup, own_restore = loop.setup_data, connector.restore_datamodule

        def setup_data() -> None:
            if self._is_due:
                self._is_due = False
                loop._combined_loader = None
            own_setup()

        def restore_datamodule() -> None:
            # A DataModule computes where to go on from its batch size, so that comes first.
            saved = ((connector._loaded_checkpoint or {}).get("callbacks") or {}).get(state_key) or {}
            if saved.get("batch_size") is not None:
                self._set(saved["batch_size"])
            own_restore()

        loop.__dict__["setup_data"] = setup_data
        connector.__dict__["restore_datamodule"] = restore_datamodule

    def remove(self) -> None:
        """Give the loop and the connector their own methods back."""
        self._trainer.fit_loop.__dict__.pop("setup_data", None)
        self._trainer._checkpoint_connector.__dict__.pop("restore_datamodule", None)

    def _size(self) -> Any:
        """Attribute of the loader's owner, or its hyperparameter; None if there is neither."""
        parameters = getattr(self._owner, "hparams", {})
        return getattr(self._owner, "batch_size", parameters.get("batch_size"))

    def _set(self, batch_size: int) -> None:
        if hasattr(self._owner, "batch_size"):
            self._owner.batch_size = batch_size
        if "batch_size" in getattr(self._owner, "hparams", {}):
            self._owner.hparams["batch_size"] = batch_size

    @property
    def batch_size(self) -> int:
        """As it is now."""
        return int(self._size())

    def obstacle(self, factor: int) -> str | None:
        """Why the size cannot be changed now.

        Args:
            factor: The batch is to be divided by it.

        Returns:
            None if it can.
        """
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        smaller = max(1, self.batch_size // factor)
        for echo in callbacks:
            if isinstance(echo, BatchEcho) and echo.num_splits > smaller:
                return f"BatchEcho cuts each batch into {echo.num_splits} pieces, and it would have {smaller} samples"
        found = loader_samples(self._trainer)
        if found != self.batch_size:
            has = "it does not say its own" if found is None else f"it has {found}"
            return f"the loader does not follow batch_size, which is {self.batch_size}: {has}"
        for config in self._trainer.lr_scheduler_configs:
            for scheduler in _with_inner(config.scheduler):
                has_length = hasattr(scheduler, "total_steps") or hasattr(scheduler, "T_max")
                if config.interval == "step" and (has_length or isinstance(scheduler, PolynomialLR)):
                    name = type(scheduler).__name__
                    return f"{name} was made for a number of steps, and smaller batches make more of them"
        return None

    def shrink(self, factor: int) -> str:
        """Change size and rates; the next epoch gets a new loader.

        Args:
            factor: The batch is divided by it.

        Returns:
            What was done, in words.
        """
        was = self.batch_size
        now = max(1, was // factor)
        self._set(now)
        ratio = {"linear": now / was, "sqrt": math.sqrt(now / was), "keep": 1.0}[self._scale_lr]
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                for name in ("lr", "initial_lr"):
                    if name in group:
                        group[name] = group[name] * ratio
        for config in self._trainer.lr_scheduler_configs:
            for scheduler in _with_inner(config.scheduler):
                if hasattr(scheduler, "base_lrs"):
                    scheduler.base_lrs = [rate * ratio for rate in scheduler.base_lrs]
        self._is_due = True
        rate = "as it is" if ratio == 1 else f"times {ratio:.3g}"
        return f"from the next epoch on batches have {now} samples in the place of {was}; learning rate {rate}"


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """A schedule and those it is made of."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(inner)
