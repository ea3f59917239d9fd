"""Tells an observer what a Trainer does, from the places where Lightning itself marks it.

Private names of Lightning, each asserted in `tests/test_private_api.py`:

==========================================  ===============================================================
name                                        what for
==========================================  ===============================================================
"[...].train_dataloader_next"               name of the profiled action that fetches a training batch
"run_training_batch"                        the same for forward, backward and update
"[...].transfer_batch_to_device"            the same for the copy to the device
epoch_loop._broadcast_sigterm_tensor        Lightning's own question to all ranks before each step
fit_loop._combined_loader                   the loaders of the training
==========================================  ===============================================================

The Trainer's profiler, whichever it is, is told of each action by `start` and `stop`, which are public. They are
wrapped on the instance, and so are `precision_plugin.convert_input`, which every training batch passes on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_gpufeed.diagnose.observer import Observer
from lightning_gpufeed.echo.loader import REPEATED

__all__ = ["TrainerWatch", "training_loader"]


def training_loader(trainer: Trainer) -> Any:
    """The loaders of the training; None before they are set up."""
    return trainer.fit_loop._combined_loader


class _Hook:
    """A function in the place of an instance's method. A copy of the instance, pickled or not, has the method again."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any], is_in_use: Callable[[], bool]) -> None:
        self.owner, self.name, self._function = owner, name, function
        self.is_in_use = is_in_use
        self.before = owner.__dict__.get(name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


class _StartHook(_Hook):
    """Of `Profiler.start`, which is called dozens of times in a step."""

    def __init__(self, owner: Any, name: str, function: Any, is_in_use: Any, told: dict[str, Any]) -> None:
        super().__init__(owner, name, function, is_in_use)
        self._told = told

    def __call__(self, action_name: str) -> None:
        self._function(action_name)
        if action_name in self._told:
            self._told[action_name]()


class _StopHook(_StartHook):
    """Of `Profiler.stop`: what it tells comes before the profiler's own work."""

    def __call__(self, action_name: str) -> None:
        if action_name in self._told:
            self._told[action_name]()
        self._function(action_name)


class TrainerWatch:
    """Hooks into one Trainer, and out of it again."""

    def __init__(self, trainer: Trainer, module: LightningModule, observer: Observer) -> None:
        """Hook in.

        Args:
            trainer: A Trainer whose strategy is set up.
            module: The model it trains.
            observer: Is told what happens.
        """
        self._undo: list[tuple[Any, str, _Hook]] = []
        self._is_open = True
        self._trainer, self._observer = trainer, observer
        loop = trainer.fit_loop.epoch_loop
        steps = observer.steps
        starts: dict[str, Callable[[], None]] = {
            f"[{type(loop).__name__}].train_dataloader_next": observer.begin_wait,
            "run_training_batch": steps.begin_compute,
        }
        stops: dict[str, Callable[[], None]] = {
            f"[{type(loop).__name__}].train_dataloader_next": observer.end_wait,
            "run_training_batch": steps.end_compute,
        }
        owners = [f"[LightningModule]{type(module).__name__}"]
        if (datamodule := getattr(trainer, "datamodule", None)) is not None:
            owners.append(f"[LightningDataModule]{type(datamodule).__name__}")
        for owner in owners:
            starts[f"{owner}.transfer_batch_to_device"] = steps.begin_copy
            stops[f"{owner}.transfer_batch_to_device"] = steps.end_copy
        self._watch_profiler(starts, stops)
        self._watch_batches()
        if trainer.world_size > 1:
            self._watch_question(loop)

    def _watch_profiler(self, starts: dict[str, Callable[[], None]], stops: dict[str, Callable[[], None]]) -> None:
        profiler: Any = self._trainer.profiler  # type: ignore[attr-defined]
        self._install(_StartHook(profiler, "start", profiler.start, self._is_in_use, starts))
        self._install(_StopHook(profiler, "stop", profiler.stop, self._is_in_use, stops))
        self._told = (starts, stops)

    def _watch_batches(self) -> None:
        plugin, trainer, look = self._trainer.precision_plugin, self._trainer, self._observer.look_at
        convert = plugin.convert_input

        def watched_convert(data: Any) -> Any:
            if self._is_open and trainer.training and data is not REPEATED:
                look(data)
            return convert(data)

        self._replace(plugin, "convert_input", watched_convert)

    def _watch_question(self, loop: Any) -> None:
        steps, ask = self._observer.steps, loop._broadcast_sigterm_tensor

        def watched_ask() -> None:
            if self._is_open:
                steps.begin_sync()
            try:
                ask()
            finally:
                if self._is_open:
                    steps.end_sync()

        self._replace(loop, "_broadcast_sigterm_tensor", watched_ask)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Put a function in an instance's own attributes."""
        self._install(_Hook(owner, name, function, self._is_in_use))

    def _install(self, hook: _Hook) -> None:
        hook.owner.__dict__[hook.name] = hook
        self._undo.append((hook.owner, hook.name, hook))

    def _is_in_use(self) -> bool:
        return self._is_open

    def close(self) -> None:
        """Hook out. Where somebody else has hooked in since then, theirs stays, and ours does nothing any more."""
        self._is_open = False
        for told in self._told:
            told.clear()
        for owner, name, hook in reversed(self._undo):
            if owner.__dict__.get(name) is not hook:
                continue
            before = hook.before
            while isinstance(before, _Hook) and not before.is_in_use():
                before = before.before  # of a watch that has ended since
            if before is None:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = before
        self._undo.clear()
