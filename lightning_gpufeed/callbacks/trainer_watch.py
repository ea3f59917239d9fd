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
_datahook_selector.get_instance             asked whose hook it is before each of the three hooks that move a batch
epoch_loop.run                              an epoch's steps, and the validation between them: when it returns, the
                                            last one is over
epoch_loop.val_loop.run                     a step is over, and validation begins with its workers
fit_loop._data_fetcher                      whose `_start_profiler` and `_stop_profiler` are the first two, as the
                                            epoch's beginning found them
==========================================  ===============================================================

Besides, `precision_plugin.convert_input`, which every training batch passes on the host. All are replaced on instances
of Lightning's own, never on the user's: each costs a few microseconds a step, where to listen to all that the Trainer
tells its profiler, some sixty calls a step, costs ten times as much. Where not every step is watched in full, all but
the first two, and those that are called once an epoch, are taken out between the steps that are; and these two are then
functions of ours in the fetcher itself if all that Lightning's own do is to tell a profiler that does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_gpufeed.diagnose.observer import Observer
from lightning_gpufeed.diagnose.steps import StepTimer
from lightning_gpufeed.echo.loader import REPEATED

__all__ = ["TrainerWatch", "training_loader"]


_SILENT = (
    *(_TrainingEpochLoop._on_before_fetch, _TrainingEpochLoop._on_after_fetch),
    *(PassThroughProfiler.start, PassThroughProfiler.stop),
)
"""Of Lightning, before anybody has put something of theirs on its classes."""


def training_loader(trainer: Trainer) -> Any:
    """The loaders of the training; None before they are set up."""
    return trainer.fit_loop._combined_loader


class _Hook:
    """In the place of an instance's method. A copy of the instance, pickled or not, has the method again."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.is_in_use = self.is_on = True  # until the watch ends; while a step is watched in full
        self.is_out = False
        self.before = owner.__dict__.get(name)
        self._method = getattr(owner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)

    def put_in(self) -> None:
        """Take the place; where somebody else has come or gone meanwhile, on top of what is there now."""
        own = self.owner.__dict__
        self.is_on = True
        if not self.is_out:
            return
        self.is_out = False
        if own.get(self.name) is not self.before:
            self.before, self._method = own.get(self.name), getattr(self.owner, self.name)
        own[self.name] = self

    def take_out(self) -> None:
        """Give the place back. Where somebody else has hooked in since, theirs stays, and ours does nothing there."""
        own = self.owner.__dict__
        self.is_on = False
        if own.get(self.name) is not self:
            return
        before = self.before
        while isinstance(before, _Hook) and not before.is_in_use:
            before = before.before  # of a watch that has ended since
        if before is None:
            own.pop(self.name, None)
        else:
            own[self.name] = before
        self.is_out = True


class _BeforeHook(_Hook):
    """Tells before each call."""

    def __init__(self, owner: Any, name: str, begin: Callable[[], None]) -> None:
        super().__init__(owner, name)
        self.begin = begin

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.is_on:
            self.begin()
        return self._method(*arguments, **options)


class _AfterHook(_Hook):
    """Tells after each call, even if it fails."""

    def __init__(self, owner: Any, name: str, end: Callable[[], None]) -> None:
        super().__init__(owner, name)
        self.end = end

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self._method(*arguments, **options)
        finally:
            if self.is_on:
                self.end()


class _AroundHook(_Hook):
    """Tells before and after each call, after it even if it fails."""

    def __init__(self, owner: Any, name: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__(owner, name)
        self._begin, self._end = begin, end

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.is_on:
            return self._method(*arguments, **options)
        self._begin()
        try:
            return self._method(*arguments, **options)
        finally:
            self._end()


class _LookHook(_Hook):
    """Shows what `convert_input` is given of the batches of training steps."""

    def __init__(self, owner: Any, name: str, look: Callable[[Any], None], steps: StepTimer) -> None:
        super().__init__(owner, name)
        self._look, self._steps = look, steps

    def __call__(self, data: Any) -> Any:
        if self.is_on and self._steps.has_batch and data is not REPEATED:
            self._look(data)
        return self._method(data)


class _CopyHook(_AroundHook):
    """Of what is asked, for each batch, before the hook that moves it to the device and before the one after that."""

    def __call__(self, hook_name: str) -> Any:
        if self.is_on and hook_name == "on_after_batch_transfer":
            self._end()
        instance = self._method(hook_name)
        if self.is_on and hook_name == "transfer_batch_to_device":
            self._begin()
        return instance


class _Brief(functools.partial[None]):
    """In the place of a hook of the fetcher, while not all of a step is heard: one call less. A copy has the hook."""

    hook: _Hook

    def __reduce__(self) -> tuple[Any, ...]:
        return self.hook.__reduce__()


class TrainerWatch:
    """Hooks into one Trainer, and out of it again."""

    def __init__(self, trainer: Trainer, observer: Observer) -> None:
        """Hook in.

        Args:
            trainer: A Trainer whose strategy is set up.
            observer: Is told what happens.
        """
        self._hooks: list[_Hook] = []
        self.is_listening = True
        loop, steps = trainer.fit_loop.epoch_loop, observer.steps
        self._observer, self._trainer = observer, trainer
        self._brief: list[tuple[Any, str, _Brief]] = []
        self._before_fetch = _AfterHook(loop, "_on_before_fetch", observer.begin_wait)
        self._after_fetch = _BeforeHook(loop, "_on_after_fetch", observer.end_wait)
        self._install(self._before_fetch)
        self._install(self._after_fetch)
        for optimization in (loop.automatic_optimization, loop.manual_optimization):
            self._install(_AroundHook(optimization, "run", steps.begin_compute, steps.end_compute))
        selector = trainer._data_connector._datahook_selector
        self._install(_CopyHook(selector, "get_instance", steps.begin_copy, steps.end_copy))
        self._install(_LookHook(trainer.precision_plugin, "convert_input", observer.look_at, steps))
        if trainer.world_size > 1:
            self._install(_AroundHook(loop, "_broadcast_sigterm_tensor", steps.begin_sync, steps.end_sync))
        # Callbacks are told of validation and of an epoch's end late: workers have been started, others have been told.
        self._install(_AfterHook(loop, "run", self._pause))
        self._install(_BeforeHook(loop.val_loop, "run", self._pause))
        self._lasting = {*self._hooks[:2], *self._hooks[-2:]}

    def _pause(self) -> None:
        """What follows is no part of a step; one that was given up is none."""
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current
        self._observer.pause(is_over=batches.completed == batches.ready)

    def _install(self, hook: _Hook) -> None:
        """Put it in the instance's own attributes."""
        hook.owner.__dict__[hook.name] = hook
        self._hooks.append(hook)

    def listen(self, is_full: bool) -> None:
        """Hear all of the steps from here on, or only when a batch is asked for and when it is there.

        Args:
            is_full: Whether all. To be changed between two steps.
        """
        if is_full is self.is_listening:
            return
        self.is_listening = is_full
        observer, steps = self._observer, self._observer.steps
        self._before_fetch.end = observer.begin_wait if is_full else steps.brief_begin_wait
        self._after_fetch.begin = observer.end_wait if is_full else steps.brief_end_wait
        self._give_back()
        if not is_full and self._is_fetch_silent():
            self._replace("_start_profiler", self._before_fetch, steps.brief_begin_wait)
            self._replace("_stop_profiler", self._after_fetch, steps.brief_end_wait)
        for hook in self._hooks:  # no two of them in one place
            if hook in self._lasting:
                continue
            if is_full:
                hook.put_in()
            else:
                hook.take_out()

    def _is_fetch_silent(self) -> bool:
        """Whether Lightning does no more before and after a fetch than tell a profiler, and that one nothing."""
        hooks = self._before_fetch, self._after_fetch
        is_own = all(hook.before is None and getattr(type(hook.owner), hook.name) in _SILENT for hook in hooks)
        profiler: Any = self._trainer.profiler  # type: ignore[attr-defined]
        told = profiler.start, profiler.stop
        return is_own and all(getattr(method, "__func__", None) in _SILENT for method in told)

    def _replace(self, name: str, hook: _Hook, told: Callable[[], None]) -> None:
        """Only where the hook stands there itself: somebody else may have put it into something of theirs."""
        fetcher = self._trainer.fit_loop._data_fetcher
        if getattr(fetcher, name, None) is hook:
            brief = _Brief(told)
            brief.hook = hook
            setattr(fetcher, name, brief)
            self._brief.append((fetcher, name, brief))

    def _give_back(self) -> None:
        for fetcher, name, brief in self._brief:
            if getattr(fetcher, name) is brief:
                setattr(fetcher, name, brief.hook)
        self._brief.clear()

    def close(self) -> None:
        """Hook out. Where somebody else has hooked in since then, theirs stays, and ours does nothing any more."""
        self._give_back()
        for hook in self._hooks:
            hook.is_in_use = False
        for hook in reversed(self._hooks):
            hook.take_out()
        self._hooks.clear()
