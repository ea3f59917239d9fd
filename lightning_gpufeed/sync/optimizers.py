"""Steps of a torch optimizer on some of its parameters, later than they were asked for and with the same result.

Private names of torch, each asserted in `tests/test_private_api.py`:

=================================================  =================================================================
name                                               what for
=================================================  =================================================================
Optimizer._optimizer_step_pre_hooks, _post_hooks   a hook has to run once in a step, so such a step is not taken apart
torch.optim.optimizer._global_optimizer_*_hooks    likewise
Optimizer._opt_called, step._wrapped_by_lr_sched   schedulers wrap step, and warn if it has not been taken
=================================================  =================================================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import optimizer as torch_optimizer

from lightning_gpufeed.sync.awaited import AwaitedParameters

__all__ = ["PendingStep", "PendingSteps", "why_inseparable"]

SEPARABLE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
)
"""Optimizers whose update of a parameter depends on that parameter, its gradient and its state alone."""


def why_inseparable(optimizer: optim.Optimizer) -> str | None:
    """Whether a step may be taken for each parameter by itself.

    Args:
        optimizer: Any.

    Returns:
        None if the result is the same; otherwise the reason in a few words.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in SEPARABLE:
        return f"{name} may use several parameters at once"
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):  # which schedulers do
        return f"the step of {name} is replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks on its step"
    if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
        return "there are hooks on the step of every optimizer"
    return None


class PendingStep:
    """A step that was asked for, and is taken parameter by parameter."""

    def __init__(self, optimizer: optim.Optimizer, on_look: Callable[[], None] | None = None) -> None:
        """Ask for a step: with the learning rate and whatever else the groups say at this moment.

        Args:
            optimizer: One for which `why_inseparable` has no reason.
            on_look: Called when somebody looks at the optimizer's state while the step is not taken for all parameters.
                It has to take it.
        """
        self._optimizer, self._state = optimizer, optimizer.state
        self._guard: Any = None if on_look is None else _AwaitedState(optimizer.state, on_look)
        self._default_dtype = torch.get_default_dtype()  # of which some optimizers make their counts
        self._settings = [_settings(group) for group in optimizer.param_groups]
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        # Schedulers warn if they are stepped before the optimizer was.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer updates a parameter in this step, and has not yet."""
        return id(parameter) in self._group_of

    def __len__(self) -> int:
        """How many parameters are not updated yet."""
        return len(self._group_of)

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the step for some parameters. Those that it was taken for already are left out.

        Args:
            parameters: With their gradients in `.grad`.
        """
        chosen: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            number = self._group_of.pop(id(parameter), None)
            if number is not None:
                chosen.setdefault(number, []).append(parameter)
        if not chosen:
            return
        groups = self._optimizer.param_groups
        found = self._optimizer.state
        self._optimizer.state = self._state
        default_dtype = torch.get_default_dtype()
        now = [dict(group) for group in groups]
        try:
            for number, group in enumerate(groups):
                if number < len(self._settings):
                    group.update(self._settings[number])
                group["params"] = chosen.get(number, [])
            torch.set_default_dtype(self._default_dtype)
            self._optimizer.step()
        finally:
            torch.set_default_dtype(default_dtype)
            for group, before in zip(groups, now, strict=True):
                group.update(before)
            # It may be somebody else's meanwhile, who has begun anew.
            is_done = found is self._guard and not self._group_of
            self._optimizer.state = self._state if is_done else found

    def guard_state(self) -> None:
        """Until the step is taken for all parameters, whoever looks at the optimizer's state is noticed."""
        if self._group_of and self._guard is not None:
            self._optimizer.state = self._guard

    def forget(self) -> None:
        """The rest of the step is never taken."""
        self._group_of.clear()
        if self._optimizer.state is self._guard:
            self._optimizer.state = self._state


class PendingSteps:
    """All steps that were asked for and are not taken for all parameters."""

    def __init__(self, on_look: Callable[[], None]) -> None:
        """None.

        Args:
            on_look: Called when somebody looks at the state of an optimizer; it has to have all steps taken.
        """
        self._on_look = on_look
        self._steps: list[PendingStep] = []
        self._hooks: list[Any] = []

    @property
    def num_left(self) -> int:
        """Parameters that are not updated yet."""
        return sum(len(step) for step in self._steps)

    def ask(self, optimizer: optim.Optimizer, waiting: AwaitedParameters) -> None:
        """Ask for a step.

        Args:
            optimizer: Whose.
            waiting: Parameters for which it is taken later. For the others it is taken now.
        """
        step = PendingStep(optimizer, self._on_look)
        step.take(one for group in optimizer.param_groups for one in group["params"] if one not in waiting)
        step.guard_state()
        self._steps.append(step)

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take all steps for some parameters.

        Args:
            parameters: With their gradients in `.grad`.
        """
        for step in self._steps:
            step.take(parameters)
        self._steps = [step for step in self._steps if len(step)]

    def forget(self) -> None:
        """The rest is never taken."""
        for step in self._steps:
            step.forget()
        self._steps.clear()

    def watch_state(self, optimizer: optim.Optimizer) -> None:
        """Notice also `state_dict` and `load_state_dict`.

        Args:
            optimizer: Whose.
        """
        self._hooks += [
            optimizer.register_state_dict_pre_hook(lambda _: self._on_look()),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self._on_look()),
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _AwaitedState(dict[Any, Any]):
    """In the place of an optimizer's state while a part of it is old: itself empty."""

    def __init__(self, state: Any, on_look: Callable[[], None]) -> None:
        super().__init__()
        self._real, self._on_look = state, on_look

    def _settled(self) -> Any:
        self._on_look()
        return self._real


def _looked(name: str) -> Any:
    def method(self: _AwaitedState, *arguments: Any, **options: Any) -> Any:
        return getattr(self._settled(), name)(*arguments, **options)

    return method


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__deepcopy__", "__reduce_ex__", "__bool__"),
    *("get", "items", "keys", "values", "pop", "popitem", "setdefault", "update", "clear", "copy"),
):
    if hasattr(defaultdict, _name):
        setattr(_AwaitedState, _name, _looked(_name))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a group says but for its parameters. A scheduler changes a learning rate that is a tensor in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }
