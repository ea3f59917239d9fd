"""One optimizer step that runs out of memory ends with all parameters updated, or with none, or says that it did not.

::

    optimizer.step(closure)
      hooks before        as ever, once
      closure             training: its out-of-memory errors are no business of this module
      ── is there room for the temporary tensors of the update? ───────────────────────────────────────────────
      yes  the update     as ever. Out of memory: if nothing was touched, newborn state is dropped and the step
                          is repeated on the other road; if something was, `UpdateFailed`, dirty
      no   known class    parameter by parameter, each saved first. Out of memory: that one is undone and tried
                          again, then all are undone: `UpdateFailed`, clean
           any other      everything is saved, the update runs as it is. Out of memory: all is undone, clean
      hooks after         as ever, once

The update by parameters is, bit for bit, the update with `foreach=False` (or with `fused=True`, where that was asked).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_gpufeed.device import headroom
from lightning_gpufeed.recover.undo import BeforeUpdate, UndoLog

__all__ = ["REPEATED", "GuardedStep", "UpdateFailed"]

REPEATED = "optimizer step repeated with less memory"
"""The event that is told when a step ran out of memory and succeeded in the end."""

PER_PARAMETER = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)
"""Classes that update a parameter from its own gradient and state only; not what inherits from them."""

# Temporary tensors at once, the most over all options and the classes above, counted with torch's profiler. One
# parameter after the other: 6 of its size in RAdam, 4 in the others. A group at a time: 3 of the group's size.
LOOP_COPIES, GROUP_COPIES, STATE_COPIES = 6, 3, 3


class UpdateFailed(Exception):  # noqa: N818 (internal: the callback turns it into the user's error)
    """The update of an optimizer step ran out of memory, and less memory did not help.

    Attributes:
        original: The out-of-memory error.
        is_clean: Whether weights, optimizer state and learning rates are, bit for bit, as before the step.
    """

    def __init__(self, original: BaseException, is_clean: bool) -> None:
        what = "are as before it" if is_clean else "may be updated in part"
        super().__init__(f"out of memory in the optimizer step; weights and optimizer state {what}: {original}")
        self.original = original
        self.is_clean = is_clean


class GuardedStep:
    """Takes the place of `optimizer.step` until removed.

    Attributes:
        has_begun: Whether the update itself is running: the closure has returned, the step has not. Keeps its value
            when the step raises, so that the error's phase is known; a step begins with False.
        num_careful_steps: How many steps took the slower road that needs little memory.
        is_short: Whether the last step did, because no room was seen.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> guard = GuardedStep(
        ...     optimizer, torch.device("cpu"), is_out_of_memory=lambda error: False, forget=lambda error: None
        ... )
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.tolist(), guard.has_begun
        ([0.5, 0.5], False)
        >>> guard.remove()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        *,
        is_out_of_memory: Callable[[BaseException], bool],
        forget: Callable[[BaseException], None],
        on_event: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        """Take the place of `optimizer.step`, above what a learning rate scheduler may have put there.

        Args:
            optimizer: The optimizer.
            device: Where its parameters are.
            is_out_of_memory: Tells the errors to act on.
            forget: Drops what an error holds: tracebacks, and with them the temporary tensors of its frames.
            on_event: Told `REPEATED` and the error after a step that succeeded in spite of one.
        """
        self.optimizer = optimizer
        self.device = device
        self.is_out_of_memory = is_out_of_memory
        self.forget = forget
        self.on_event = on_event
        self.has_begun = False
        self.num_careful_steps = 0
        self.is_short = False
        self._is_active = True
        self._temporary_key: Any = None
        self._temporary_bytes = 0
        self.inner = inner = optimizer.step
        self._was_own = vars(optimizer).get("step")

        # Copies a scheduler's mark as well. A bound method, since a scheduler made later looks for its function.
        @functools.wraps(getattr(inner, "__func__", inner))
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._is_active:
                return inner(*args, **kwargs)
            self.has_begun = False
            result = _Step(self).run(args, kwargs)
            self.has_begun = False
            return result

        self._method = types.MethodType(step, optimizer)
        optimizer.step = self._method  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put back what was there before."""
        self._is_active = False
        if vars(self.optimizer).get("step") is not self._method:
            return  # somebody has wrapped it since: from now on it only passes calls on
        if self._was_own is None:
            del self.optimizer.step
        else:
            self.optimizer.step = self._was_own  # type: ignore[method-assign]

    def needed_bytes(self, before: BeforeUpdate) -> int:
        """Upper bound of what the update will allocate.

        Args:
            before: What there is before it.

        Returns:
            Bytes of temporary tensors and of state that is yet to be made.
        """
        groups = self.optimizer.param_groups
        is_known = type(self.optimizer) in PER_PARAMETER
        key = [(len(group["params"]), group.get("foreach"), group.get("fused")) for group in groups]
        if self._temporary_key != key:
            self._temporary_key = key
            self._temporary_bytes = max((self._bytes_at_once(group, is_known) for group in groups), default=0)
        unborn = before.unborn if is_known or not self.optimizer.state else []
        if unborn and type(self.optimizer) is torch.optim.SGD and not any(group["momentum"] for group in groups):
            unborn = []
        state_bytes: int = sum(STATE_COPIES * parameter.nbytes for parameter, _ in unborn)
        return self._temporary_bytes + state_bytes

    def _bytes_at_once(self, group: dict[str, Any], is_known: bool) -> int:
        """Temporary bytes of one group; gradients that are missing are counted too."""
        sizes: list[int] = [parameter.nbytes for parameter in group["params"]]
        if not sizes or (is_known and group.get("fused")):
            return 0
        has_loop = group.get("foreach") is False or (group.get("foreach") is None and self.device.type == "cpu")
        return LOOP_COPIES * max(sizes) if is_known and has_loop else GROUP_COPIES * sum(sizes)


class _Step:
    """One call of a guarded step."""

    def __init__(self, guard: GuardedStep) -> None:
        self._guard = guard
        self._optimizer = guard.optimizer
        self._groups = guard.optimizer.param_groups
        self._options = [dict(group) for group in self._groups]
        self._are_hidden = False
        self._loss: Any = None
        self._is_ready = self._is_repeated = False
        self._before: BeforeUpdate | None = None
        self._log: UndoLog | None = None
        self._cured: BaseException | None = None
        self._handles: list[Any] = []

    def run(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """The whole step, with everything put back in the end."""
        # The last of the hooks: what it gives the update for a closure is called around those of all others, so
        # that what they do when training has returned, such as scaling rates, is done.
        self._handles.append(self._optimizer.register_step_pre_hook(self._before_body))
        try:
            result, failure = self._attempt(args, kwargs)
            if failure is not None:
                result = self._repeat(failure, args, kwargs)
            if self._cured is not None and self._guard.on_event is not None:
                self._guard.on_event(REPEATED, self._cured)
            return result
        except UpdateFailed:
            raise
        except Exception as error:
            # Python itself may run out of memory in between. To whoever is above this must not look like an error
            # of the closure, which is answered by doing the batch again.
            if self._guard.has_begun and self._guard.is_out_of_memory(error):
                raise self._failed(error, is_clean=False) from error
            raise
        finally:
            for handle in self._handles:
                handle.remove()
            self._show_groups()
            if self._log is not None:
                self._log.close()
                for group, options in zip(self._groups, self._options, strict=False):
                    group.update((name, value) for name, value in options.items() if name == "foreach")

    def _attempt(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, BaseException | None]:
        """The step as it was found: its result, or the out-of-memory error of the update."""
        try:
            return self._guard.inner(*args, **kwargs), None
        except UpdateFailed:
            raise
        except Exception as error:
            if not (self._guard.has_begun and self._guard.is_out_of_memory(error)):
                raise
            failure = error
        self._guard.forget(failure)
        return None, failure

    def _repeat(self, failure: BaseException, args: Any, kwargs: dict[str, Any]) -> Any:
        """After an update that ran out of memory: once more with little memory, if nothing was touched."""
        if self._log is not None:
            raise self._failed(failure, self._log.undo())
        if self._before is None or not self._before.roll_back():
            raise self._failed(failure, is_clean=False)
        self._before, self._cured = None, failure
        self._is_ready, self._is_repeated = False, True
        headroom.release(self._guard.device)
        args, kwargs, _ = _with_closure(args, kwargs, 0, lambda _: lambda: self._loss)
        result, again = self._attempt(args, kwargs)
        if again is not None:
            # From a hook: before the update, all is as it was; after it, the hook has not done its part.
            raise self._failed(again, is_clean=not self._is_ready)
        return result

    def _before_body(self, _: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The hook before: puts `_ready` between the closure and the update."""
        args, kwargs, has_closure = _with_closure(args, kwargs, 1, self._followed)
        if not has_closure:
            self._ready()
        return args, kwargs

    def _followed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            self._ready(loss)
            return loss

        return run

    def _ready(self, loss: Any = None) -> None:
        """Gradients are there and activations are gone: choose the road."""
        if self._is_ready:
            return  # LBFGS and its like call the closure many times
        self._is_ready = self._guard.has_begun = True
        self._loss = loss
        if self._groups is not self._optimizer.param_groups:  # a closure may load a state, and that replaces them
            self._groups = self._optimizer.param_groups
            self._options = [dict(group) for group in self._groups]
        if any(group.get("differentiable") for group in self._groups):
            return  # autograd needs every intermediate: nothing may be done in place or twice
        is_known = type(self._optimizer) in PER_PARAMETER
        if not self._is_repeated:
            before = BeforeUpdate(self._optimizer)
            if self._has_room(self._guard.needed_bytes(before)):
                # Others may change weights behind the version counter, or attributes of their own.
                self._before = before if is_known else None
                return
            del before
        self._guard.num_careful_steps += 1
        if is_known:
            self._update_by_parameter()
        else:
            self._save_everything()

    def _has_room(self, num_bytes: int) -> bool:
        guard, device = self._guard, self._guard.device
        has_room = headroom.can_allocate(device, num_bytes)
        # Collecting cycles takes a tenth of a second and more: not in every step of a training that is always short.
        if not has_room and not guard.is_short:
            headroom.release(device)
            has_room = headroom.can_allocate(device, num_bytes)
        guard.is_short = not has_room
        return has_room

    def _save_everything(self) -> None:
        """For optimizers whose inner life is unknown: save all of it, then let the update run."""
        self._log = UndoLog(self._guard.device)
        self._log.save(self._optimizer)
        for group in self._groups:
            _use_loop(group)

    def _update_by_parameter(self) -> None:
        """Do the update here, and leave nothing to do for the one that follows."""
        update = _update_without_hooks(self._optimizer)
        self._are_hidden = True
        try:
            with UndoLog(self._guard.device) as log:
                for group in self._groups:
                    narrow = _use_loop(dict(group))
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            narrow["params"] = [parameter]
                            self._optimizer.param_groups = [narrow]
                            self._update_one(parameter, update, log)
        except BaseException:
            self._show_groups()
            raise
        self._optimizer.param_groups = []
        self._handles.append(_register_first_post_hook(self._optimizer, lambda *_: self._show_groups()))

    def _update_one(self, parameter: torch.Tensor, update: Callable[[Optimizer], Any], log: UndoLog) -> None:
        mark = len(log)
        log.save(parameter)
        log.save_member(self._optimizer.state, parameter)
        if getattr(self._optimizer, "grad_scale", None) is not None:
            log.save(parameter.grad)  # a fused kernel divides the gradient by the scale, in place
        failure = self._try(update)
        if failure is None:
            return
        self._cured = failure
        if log.undo(mark):
            headroom.release(self._guard.device)
            failure = self._try(update)
            if failure is None:
                return
        raise self._failed(failure, log.undo())

    def _try(self, update: Callable[[Optimizer], Any]) -> BaseException | None:
        try:
            update(self._optimizer)
            return None
        except Exception as error:
            if not self._guard.is_out_of_memory(error):
                raise
            failure = error
        self._guard.forget(failure)
        return failure

    def _show_groups(self) -> None:
        """The groups as everybody knows them."""
        if self._are_hidden:
            self._optimizer.param_groups = self._groups
            self._are_hidden = False

    def _failed(self, failure: BaseException, is_clean: bool) -> UpdateFailed:
        """The error to raise, with options as before the step: hooks that put scaled rates back are not reached."""
        for group, options in zip(self._groups, self._options, strict=False):
            group.update((name, value) for name, value in options.items() if name != "params")
        error = UpdateFailed(failure, is_clean)
        error.__cause__ = failure
        return error


def _with_closure(
    args: Any, kwargs: dict[str, Any], index: int, around: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> tuple[Any, dict[str, Any], bool]:
    """The arguments of a step with another closure; whether there was one."""
    if len(args) > index and args[index] is not None:
        return (*args[:index], around(args[index]), *args[index + 1 :]), kwargs, True
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": around(kwargs["closure"])}, True
    return args, kwargs, False


def _use_loop(group: dict[str, Any]) -> dict[str, Any]:
    """One parameter after the other, with the smallest temporary tensors; a fused kernel has none at all."""
    if "foreach" in group and not group.get("fused"):
        group["foreach"] = False
    return group


def _update_without_hooks(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The update of a class of torch, below the part that calls hooks."""
    # Nothing public leads there: torch wraps `step` of each class with `functools.wraps` and marks it `hooked`.
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def _register_first_post_hook(optimizer: Optimizer, hook: Callable[..., None]) -> Any:
    """A hook that is called before all others after the step."""
    # Nothing public leads there: torch calls the hooks of an instance in the order of a dict, then the global ones.
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle
