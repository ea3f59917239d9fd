"""Parameters of which something is still to come: whoever uses one waits for it, wherever that happens.

::

    backward ends      p becomes awaited: its gradient is on the wire
    optimizer's step   asked for; p's update will follow its gradient
    p is used          by forward, a callback, clipping, `state_dict`, ...: the gradient arrives, p is updated,
                       p is an ordinary parameter again, and then it is used

An awaited parameter is the same object, for that time of another class, whose `__torch_function__` torch calls before
it touches the tensor. So there is no list of places that have to be remembered. Compiled extensions and `torch.func`
take a tensor without asking; but somebody has to hand it to them, and for that it is looked up in its module: so
`ParameterTable` asks as well, in the place of a module's table of parameters. What is left is a reference that was kept
from before and is given to one of these (`torch.tensor(p)` is one too), and memory shared with the parameter: an alias
such as `p.data` that was made before the step shows the old numbers until the parameter itself is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["AwaitedParameters", "ParameterTable", "unsettled"]

# What a tensor is, as against what is in it or what belongs to it. Reading these needs no waiting.
_DESCRIPTIONS = {
    getattr(Tensor, name).__get__
    for name in [
        "requires_grad",
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "itemsize",
        "nbytes",
        "grad_fn",
        "retains_grad",
    ]
} | {
    getattr(Tensor, name)
    for name in [
        "size",
        "stride",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "get_device",
        "is_signed",
        "storage_offset",
        "__len__",
    ]
}

_owners: dict[int, AwaitedParameters] = {}


class _AwaitedParameter(nn.Parameter):
    """A parameter for as long as something is still to come."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Settle what is used, then do what was asked for."""
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found: list[nn.Parameter] = []
        _find(args, found)
        if kwargs:
            _find(tuple(kwargs.values()), found)
        for parameter in found:
            _settle(parameter)
        if found:
            return func(*args, **(kwargs or {}))
        # It is hidden in an object of somebody's own, who asked in its name.
        for owner in {id(owner): owner for owner in _owners.values()}.values():
            for parameter in owner.held():
                _settle(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # These begin with the class of the object, before torch is asked.
    def __deepcopy__(self, memo: Any) -> Any:
        _settle(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _settle(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> Any:  # type: ignore[override]
        _settle(self)
        return self.__repr__()


class ParameterTable(dict[str, nn.Parameter | None]):
    """In the place of a module's `_parameters`: an awaited parameter that is looked up is settled first.

    A copy or a pickle of the module has an ordinary table.
    """

    def __getitem__(self, name: str) -> nn.Parameter | None:
        """A parameter by its name."""
        parameter = dict.__getitem__(self, name)
        if type(parameter) is _AwaitedParameter:
            _settle(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """A parameter by its name.

        Args:
            name: Its.
            default: If there is none.

        Returns:
            It.
        """
        if name not in self:
            return default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        """Take a parameter out.

        Args:
            name: Its.
            *default: If there is none.

        Returns:
            It.
        """
        self.get(name)
        return dict.pop(self, name, *default)

    def values(self) -> Any:
        """All parameters.

        Returns:
            As of a dict.
        """
        self._settle_all()
        return dict.values(self)

    def items(self) -> Any:
        """All names and parameters.

        Returns:
            As of a dict.
        """
        self._settle_all()
        return dict.items(self)

    def copy(self) -> dict[str, nn.Parameter | None]:
        """An ordinary table.

        Returns:
            With the same parameters.
        """
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As an ordinary table."""
        return dict, (self.copy(),)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """A parameter by its name.

        Args:
            name: Its.
            default: Put there if there is none.

        Returns:
            It.
        """
        self.get(name)
        return dict.setdefault(self, name, default)

    def __or__(self, other: Any) -> Any:
        """An ordinary table with another's members too."""
        return self.copy() | other

    def _settle_all(self) -> None:
        """All that are awaited anywhere: who walks through a table may move memory that gradients share."""
        for parameter in dict.values(self):
            if type(parameter) is _AwaitedParameter:
                owner = _owners.get(id(parameter))
                for other in [parameter] if owner is None else owner.held():
                    _settle(other)


def unsettled(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module without settling one.

    Args:
        module: Any, with its submodules.

    Yields:
        Each as often as it is there.
    """
    for part in module.modules():
        yield from (one for one in dict.values(part._parameters) if one is not None)


def _find(value: Any, found: list[nn.Parameter]) -> None:
    """Awaited parameters among arguments, in whatever they are wrapped."""
    if type(value) is _AwaitedParameter:
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _find(part, found)
    elif isinstance(value, dict):
        _find(tuple(value.values()), found)


def _settle(parameter: nn.Parameter) -> None:
    owner = _owners.get(id(parameter))
    if owner is None:  # settled meanwhile, by another thread
        parameter.__class__ = nn.Parameter
    else:
        owner.settle(parameter)


class AwaitedParameters:
    """Which parameters are awaited, and what has to be done before one is used."""

    def __init__(self, arrive: Callable[[nn.Parameter], None]) -> None:
        """None is awaited yet.

        Args:
            arrive: Called with a parameter that is about to be used. It has to `release` that one, and may release
                others; only then may it touch them.
        """
        self._arrive = arrive
        self._held: dict[int, nn.Parameter] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """How many are awaited."""
        return len(self._held)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether one is awaited."""
        return id(parameter) in self._held

    def held(self) -> list[nn.Parameter]:
        """Those that are awaited.

        Returns:
            In the order in which they were given.
        """
        return list(self._held.values())

    def hold(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Make parameters awaited.

        Args:
            parameters: Any. Those of a class of their own cannot be.

        Returns:
            Those that cannot.
        """
        others = []
        for parameter in parameters:
            if type(parameter) is not nn.Parameter:
                others.append(parameter)
                continue
            self._held[id(parameter)] = parameter
            _owners[id(parameter)] = self
            parameter.__class__ = _AwaitedParameter
        return others

    def release(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Make parameters ordinary again.

        Args:
            parameters: Awaited ones; others are left as they are.

        Returns:
            Those that were awaited.
        """
        released = []
        for parameter in parameters:
            if self._held.pop(id(parameter), None) is not None:
                del _owners[id(parameter)]
                parameter.__class__ = nn.Parameter
                released.append(parameter)
        return released

    def settle(self, parameter: nn.Parameter) -> None:
        """Do what has to be done before a parameter is used.

        Args:
            parameter: Any; nothing happens if it is not awaited.
        """
        if id(parameter) in self._held:
            with self._lock:
                if id(parameter) in self._held:
                    self._arrive(parameter)
