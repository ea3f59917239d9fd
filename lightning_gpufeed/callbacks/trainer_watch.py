"""Tells an observer what a Trainer does, from the places where Lightning itself marks it.

Private names of Lightning, each asserted in `tests/test_private_api.py`:

==========================================  ===============================================================
name                                        what for
==========================================  ===============================================================
epoch_loop._on_before_fetch                 called before each request for a training batch
epoch_loop._on_after_fetch                  called after it, whether it ended well or not
epoch_loop.automatic_optimization.run       forward, backward and update
epoch_loop.manual_optimization.run          the same where the module steps its optimizers by itself
epoch_loop._broadcast_sigterm_tensor        Lightning's own question to all ranks before each step
fit_loop._combined_loader                   the loaders of the training
callback.on_before_backward … = None        a hook that is no function is not called, nor told to the profiler
==========================================  ===============================================================

Besides, `transfer_batch_to_device` of the module and the DataModule, and `precision_plugin.convert_input`, which every
training batch passes on the host. All are replaced on the instances: each costs a few microseconds a step, where to
listen to all that the Trainer tells its profiler, some sixty calls a step, costs ten times as much. For the same
reason the Trainer is spared the five calls a step of hooks of the callback that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gpufeed.diagnose.observer import Observer
from lightning_gpufeed.echo.loader import REPEATED

__all__ = ["TrainerWatch", "training_loader", "without_skipped_hooks"]


_HOOKS_OF_A_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


def without_skipped_hooks(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a callback, for a copy whose hooks are called again."""
    return {key: value for key, value in state.items() if key not in _HOOKS_OF_A_STEP or value is not None}


def training_loader(trainer: Trainer) -> Any:
    """The loaders of the training; None before they are set up."""
    return trainer.fit_loop._combined_loader


def _nothing() -> None:
    """Nothing is told."""


class _Hook:
    """In the place of an instance's method: tells before and after each call, after it even if it fails.

    A copy of the instance, pickled or not, has the method again.
    """

    def __init__(self, owner: Any, name: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.owner, self.name = owner, name
        self.is_in_use = True
        self.before = owner.__dict__.get(name)
        self._method, self._begin, self._end = getattr(owner, name), begin, end
        # Lightning compares the code of a hook with its own, to see whether the user has overridden it.
        self.__wrapped__ = getattr(self._method, "__wrapped__", self._method)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.is_in_use:
            return self._method(*arguments, **options)
        self._begin()
        try:
            return self._method(*arguments, **options)
        finally:
            self._end()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


class _LookHook(_Hook):
    """Shows what `convert_input` is given."""

    def __init__(self, owner: Any, name: str, look: Callable[[Any], None], trainer: Trainer) -> None:
        super().__init__(owner, name, _nothing, _nothing)
        self._look, self._trainer = look, trainer

    def __call__(self, data: Any) -> Any:
        if self.is_in_use and self._trainer.training and data is not REPEATED:
            self._look(data)
        return self._method(data)


class TrainerWatch:
    """Hooks into one Trainer, and out of it again."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, observer: Observer, callback: Callback | None = None
    ) -> None:
        """Hook in.

        Args:
            trainer: A Trainer whose strategy is set up.
            module: The model it trains.
            observer: Is told what happens.
            callback: One of the Trainer's, whose hooks that do nothing need not be called in each step.
        """
        self._hooks: list[_Hook] = []
        self._num_copying = 0
        self._steps = observer.steps
        loop, steps = trainer.fit_loop.epoch_loop, observer.steps
        self._watch(loop, "_on_before_fetch", end=observer.begin_wait)
        self._watch(loop, "_on_after_fetch", begin=observer.end_wait)
        for optimization in (loop.automatic_optimization, loop.manual_optimization):
            self._watch(optimization, "run", steps.begin_compute, steps.end_compute)
        for owner in (module, getattr(trainer, "datamodule", None)):
            if owner is not None:
                self._watch(owner, "transfer_batch_to_device", self._begin_copy, self._end_copy)
        self._install(_LookHook(trainer.precision_plugin, "convert_input", observer.look_at, trainer))
        if trainer.world_size > 1:
            self._watch(loop, "_broadcast_sigterm_tensor", steps.begin_sync, steps.end_sync)
        self._callback = callback if callback in trainer.callbacks else None  # type: ignore[attr-defined]
        if self._callback is not None:
            for name in _HOOKS_OF_A_STEP:
                if getattr(type(callback), name) is getattr(Callback, name):
                    self._callback.__dict__.setdefault(name, None)

    def _watch(
        self, owner: Any, name: str, begin: Callable[[], None] = _nothing, end: Callable[[], None] = _nothing
    ) -> None:
        self._install(_Hook(owner, name, begin, end))

    def _install(self, hook: _Hook) -> None:
        """Put it in the instance's own attributes."""
        hook.owner.__dict__[hook.name] = hook
        self._hooks.append(hook)

    def _begin_copy(self) -> None:
        # A DataModule may leave a part of its batch to the module's method.
        self._num_copying += 1
        if self._num_copying == 1:
            self._steps.begin_copy()

    def _end_copy(self) -> None:
        self._num_copying -= 1
        if self._num_copying == 0:
            self._steps.end_copy()

    def close(self) -> None:
        """Hook out. Where somebody else has hooked in since then, theirs stays, and ours does nothing any more."""
        for hook in self._hooks:
            hook.is_in_use = False
        for hook in reversed(self._hooks):
            own = hook.owner.__dict__
            if own.get(hook.name) is not hook:
                continue
            before = hook.before
            while isinstance(before, _Hook) and not before.is_in_use:
                before = before.before  # of a watch that has ended since
            if before is None:
                own.pop(hook.name, None)
            else:
                own[hook.name] = before
        self._hooks.clear()
        if self._callback is not None:
            for name in _HOOKS_OF_A_STEP:
                if self._callback.__dict__.get(name, self) is None:
                    del self._callback.__dict__[name]
            self._callback = None
