"""Reads and corrects the Trainer's count of the steps of an epoch, where no public name does it.

Private names of Lightning, each asserted in `tests/test_private_api.py`:

==========================================  ===============================================================
name                                        what for
==========================================  ===============================================================
fit_loop.epoch_loop.batch_progress          how many steps of the epoch are done
fit_loop.max_batches                        `trainer.num_training_batches`
fit_loop.setup_data,                        which loaders are for training: a finder sets up others meanwhile
_combined_loader, _should_reload_train_dl
fit_loop._combined_loader._limits,          the limit of each loader; which one ends an epoch; how several loaders'
_mode, _spec                                batches are joined
fit_loop._data_fetcher.length               when a batch is the last one
epoch_loop.update_lr_schedulers,            the schedule goes by progress where the number of echoes is
_update_learning_rates                      not known beforehand
LightningModule._on_before_batch_transfer,  hooks before and after the transfer, apart
_call_batch_hook
==========================================  ===============================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

__all__ = [
    "HookOncePerBatch",
    "ScheduleByProgress",
    "WatchSetup",
    "absolute_limit",
    "is_cut_to_shortest",
    "is_limited",
    "join_loaders",
    "lengthen_epoch",
    "num_processed",
    "obstacle_to_echo",
    "set_processed",
    "share_between_checks",
    "split_loaders",
    "takes_iterator",
    "trains_uninterrupted",
]


def num_processed(trainer: Trainer) -> int:
    """Steps of the running epoch that are done."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(current.processed)


def set_processed(trainer: Trainer, num_steps: int) -> None:
    """Correct the number of steps that were done before a resume.

    Args:
        trainer: A Trainer whose loops are restored and do not run yet.
        num_steps: The number.
    """
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    change = num_steps - current.processed
    # ready, started, processed and completed differ by where inside a step the checkpoint was written.
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + change)


def absolute_limit(trainer: Trainer) -> int | None:
    """Most steps of an epoch, if they are limited by number."""
    limit = trainer.limit_train_batches
    return limit if isinstance(limit, int) and not isinstance(limit, bool) else None


def is_limited(trainer: Trainer) -> bool:
    """Whether epochs may end before their loaders do."""
    limit = trainer.limit_train_batches
    return limit is not None and not (isinstance(limit, float) and limit == 1.0)


def is_cut_to_shortest(trainer: Trainer) -> bool:
    """Whether the shortest of several loaders ends the epoch."""
    combined = trainer.fit_loop._combined_loader
    return combined is not None and combined._mode == "min_size"


def share_between_checks(trainer: Trainer) -> float | None:
    """Share of an epoch after which it is validated; None if that goes by a number of steps, or by the clock."""
    # By the clock, the Trainer does not even have the attribute.
    interval = getattr(trainer, "val_check_interval", None)
    return interval if isinstance(interval, float) else None


def lengthen_epoch(trainer: Trainer, num_steps: int) -> None:
    """Tell everybody who counts that the running epoch is longer, or shorter, than it was.

    Args:
        trainer: A Trainer.
        num_steps: By how much; the loaders' own lengths say so already.
    """
    loop = trainer.fit_loop
    combined, fetcher = loop._combined_loader, loop._data_fetcher
    if combined is None or fetcher is None or fetcher.length is None:
        return
    limits = combined._limits or []
    for number, limit in enumerate(limits):
        # A share of an epoch is a share of its fresh batches. An absolute limit is a number of steps.
        absolute = absolute_limit(trainer)
        limits[number] = limit + num_steps if absolute is None else min(absolute, len(combined.flattened[number]))
    fetcher.length = len(combined)
    loop.max_batches = fetcher.length
    if share_between_checks(trainer) == 1.0:
        trainer.val_check_batch = max(1, fetcher.length)
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        bar.train_progress_bar.total = bar.total_train_batches
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.update(bar.train_progress_bar_id, total=bar.total_train_batches)


def _limit_usual_steps(trainer: Trainer, extra_steps: int) -> None:
    """Where an epoch is limited to a share of it, take that of its usual steps, and all that a resumed one has more."""
    combined: Any = trainer.fit_loop._combined_loader
    if combined is None or not extra_steps or not is_limited(trainer) or absolute_limit(trainer) is not None:
        return
    for number, loader in enumerate(combined.flattened):
        combined._limits[number] = int((len(loader) - extra_steps) * trainer.limit_train_batches) + extra_steps
    lengthen_epoch(trainer, 0)


def obstacle_to_echo(trainer: Trainer, module: LightningModule) -> str | None:
    """Why batches cannot be used again on the device; None if they can."""
    if takes_iterator(module):
        return "training_step(dataloader_iter) fetches its batches by itself"
    strategy = type(trainer.strategy)
    if strategy.batch_to_device is not Strategy.batch_to_device:
        return f"{strategy.__name__} moves batches to the device in a way of its own"
    return None


def takes_iterator(module: LightningModule) -> bool:
    """Whether `training_step` fetches its batches by itself."""
    return bool(is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True))


def trains_uninterrupted(trainer: Trainer) -> bool:
    """Whether epochs are taken to their end, and validation comes only after it."""
    return not is_limited(trainer) and (share_between_checks(trainer) == 1.0 or trainer.limit_val_batches == 0)


def split_loaders(trainer: Trainer, batch: Any, num_loaders: int) -> list[Any]:
    """The batch of each loader, out of what they gave together.

    Args:
        trainer: A Trainer.
        batch: Of one loader, or the nest of several.
        num_loaders: How many.

    Returns:
        One part for each.

    Raises:
        ValueError: A hook changed the nest.
    """
    if num_loaders == 1:
        return [batch]
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    try:
        return list(combined._spec.flatten_up_to(batch))
    except ValueError as error:
        raise ValueError(
            f"a transfer hook changed the nest of {num_loaders} loaders' batches, so it cannot be used again piece "
            f"by piece ({error}). Change it in "
            f"on_after_batch_transfer, which gets the pieces."
        ) from error


def join_loaders(trainer: Trainer, parts: list[Any]) -> Any:
    """The nest that several loaders give together.

    Args:
        trainer: A Trainer.
        parts: Of each loader.

    Returns:
        What the Trainer passes on.
    """
    if len(parts) == 1:
        return parts[0]
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    return combined._spec.unflatten(parts)


class HookOncePerBatch:
    """Stands in a module's place of `_on_before_batch_transfer` while it is trained.

    A copy of the module, or one that is saved whole, gets the module's own method.
    """

    def __init__(self, module: LightningModule, is_repeat: Callable[[], bool]) -> None:
        """Put it there.

        Args:
            module: Whose hooks are to run once per batch.
            is_repeat: Called once per step; whether the step is on a batch whose hooks have run.
        """
        self._module = module
        self._own = module._on_before_batch_transfer
        self._is_repeat = is_repeat
        module.__dict__["_on_before_batch_transfer"] = self

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Run the hooks, unless they have run."""
        return batch if self._is_repeat() else self._own(batch, dataloader_idx)

    def __reduce__(self) -> Any:
        """Become the method again."""
        return getattr, (self._module, "_on_before_batch_transfer")

    def remove(self) -> None:
        """Give the module its own method back."""
        if self._module.__dict__.get("_on_before_batch_transfer") is self:
            del self._module.__dict__["_on_before_batch_transfer"]


class WatchSetup:
    """Knows whether the Trainer is setting up its training loader, and not another one."""

    def __init__(
        self, trainer: Trainer, on_begin: Callable[[], None], extra_steps: Callable[[], int] = lambda: 0
    ) -> None:
        """Begin to watch.

        Args:
            trainer: A Trainer.
            on_begin: Called before it asks for a new loader.
            extra_steps: Called when it has one: steps of a resumed epoch beyond its usual length, which lengths count.
        """
        self.is_on = False
        self._trainer, self._extra_steps = trainer, extra_steps
        self._loop = trainer.fit_loop
        self._own = trainer.fit_loop.setup_data
        self._on_begin = on_begin
        self._loop.__dict__["setup_data"] = self

    def __call__(self) -> None:
        """Set up."""
        is_new = self._loop._combined_loader is None or self._loop._should_reload_train_dl
        if is_new:
            self._on_begin()
        self.is_on = True
        try:
            self._own()
        finally:
            self.is_on = False
        if is_new:
            _limit_usual_steps(self._trainer, self._extra_steps())

    def remove(self) -> None:
        """Give the loop its own method back."""
        self._loop.__dict__.pop("setup_data", None)


class ScheduleByProgress:
    """Has step-wise learning rate schedules go by how far the training is, where echoes are not known beforehand.

    A schedule is made for `trainer.estimated_stepping_batches` steps, which counts no echoes. It moves with the fresh
    batches; or with all steps, as far as a limit of steps says how many there will be; whichever is further. So it
    arrives at its end when the training does, and never goes beyond.

    Attributes:
        num_moves: How often schedules have moved.
    """

    def __init__(
        self, trainer: Trainer, fresh_steps: Callable[[], int], usual_steps: float, num_moves: int | None
    ) -> None:
        """Put it there.

        Args:
            trainer: A Trainer.
            fresh_steps: Steps of this epoch on fresh samples, so far.
            usual_steps: Steps of an epoch without echoes.
            num_moves: How often schedules have moved before a resume; None for as often as the Trainer's place says.
        """
        self.num_moves = num_moves or 0
        self._trainer = trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._fresh_steps = fresh_steps
        self._usual_steps = usual_steps
        self._is_due = False
        self._latest_fresh = 0
        if num_moves is None:
            self._fresh_steps = lambda: 0  # a finder's trial may have left some
            self.num_moves, self._fresh_steps = self._moves_by_now(), fresh_steps
        self._own = self._loop.update_lr_schedulers
        self._loop.__dict__["update_lr_schedulers"] = self

    def __call__(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Move the schedules, if it is time; called twice in each step."""
        if interval != "step":
            self._own(interval, update_plateau_schedulers=update_plateau_schedulers)
            return
        if not update_plateau_schedulers:
            self._is_due = self.num_moves < self._moves_by_now()
            self.num_moves += self._is_due
        if self._is_due:
            self._loop._update_learning_rates(interval="step", update_plateau_schedulers=update_plateau_schedulers)

    def _moves_by_now(self) -> int:
        trainer, each = self._trainer, self._trainer.accumulate_grad_batches
        is_last = self._loop._num_ready_batches_reached()
        fresh = math.ceil(self._fresh_steps() / each) if is_last else self._fresh_steps() // each
        if self._usual_steps == math.inf:
            # The length is not known, so no schedule was made for it but by a limit of steps.
            is_fresh, self._latest_fresh = fresh != self._latest_fresh, fresh
            return trainer.global_step if trainer.max_steps != -1 else self.num_moves + is_fresh
        usual = math.ceil(self._usual_steps / each)
        moves = float(self._moves_of(self._usual_steps, trainer.current_epoch) + min(fresh, usual))
        max_epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None
        bounds = [trainer.max_steps] if trainer.max_steps != -1 else []
        limit = absolute_limit(trainer)
        if limit is not None and max_epochs is not None:
            bounds.append(self._moves_of(limit, max_epochs))
        if bounds:
            estimate = (
                min(bounds) if max_epochs is None else min(*bounds, self._moves_of(self._usual_steps, max_epochs))
            )
            moves = max(moves, trainer.global_step * estimate / min(bounds))
        return int(moves)

    def _moves_of(self, steps_per_epoch: float, num_epochs: int) -> int:
        """Optimizer steps of the first epochs, whose batches may be accumulated by numbers of their own."""
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                each = map(callback.get_accumulate_grad_batches, range(num_epochs))
                return sum(math.ceil(steps_per_epoch / one) for one in each)
        return num_epochs * math.ceil(steps_per_epoch / self._trainer.accumulate_grad_batches)

    def remove(self) -> None:
        """Give the loop its own method back."""
        self._loop.__dict__.pop("update_lr_schedulers", None)
