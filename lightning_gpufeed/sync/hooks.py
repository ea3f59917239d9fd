"""Tells when a module is about to run and when a parameter's gradient is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_gpufeed.backprop.engine import AccumulationHook
from lightning_gpufeed.sync.awaited import ParameterTable

__all__ = ["ModelHooks", "compiled_parts"]

Parameters = tuple[nn.Parameter, ...]


def compiled_parts(model: nn.Module) -> tuple[frozenset[str], bool]:
    """Which modules run inside of a compiled graph.

    Args:
        model: Any module.

    Returns:
        Names of all modules at and below one from `torch.compile`; and whether there are some without a border at which
        Python is asked: scripted modules, and those compiled in place.
    """
    roots = [name for name, module in model.named_modules() if hasattr(module, "_orig_mod")]
    inside = frozenset(
        name
        for name, _ in model.named_modules()
        if any(name == root or name.startswith(f"{root}." if root else "") for root in roots)
    )
    is_borderless = any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__module__.startswith("torch.jit")
        for module in model.modules()
    )
    return inside, is_borderless


class ModelHooks:
    """Hooks on a model and its parameters, and tables in which these are looked up.

    Copies of the model, pickled or not, have none of them.
    """

    def __init__(
        self,
        model: nn.Module,
        before_forward: Callable[[Parameters], None],
        after_grad: Callable[[Tensor], None],
    ) -> None:
        """Watch from now on, until `close`.

        Args:
            model: Any module.
            before_forward: Told the parameters that a module is about to use: its own, and for the border of a
                compiled graph all inside of it. Not told in a model that has compiled parts without a border.
            after_grad: Told a parameter to whose `.grad` backward has added.
        """
        self._before_forward, self._after_grad = before_forward, after_grad
        self._handles: list[Any] = []
        self._watched: dict[int, Any] = {}
        self._tables: list[nn.Module] = []
        inside, is_borderless = compiled_parts(model)
        for name, module in () if is_borderless else model.named_modules():
            is_border = hasattr(module, "_orig_mod")
            if name in inside and not is_border:
                continue
            own = tuple(module.parameters(recurse=is_border))
            if module._parameters and not is_border:
                module.__dict__["_parameters"] = ParameterTable(module._parameters)
                self._tables.append(module)
            if own:
                self._handles.append(module.register_forward_pre_hook(_BeforeForward(before_forward, own)))

    def watch(self, model: nn.Module) -> None:
        """Watch the gradients of all parameters that require one by now.

        Args:
            model: The same as before.
        """
        for parameter in model.parameters():
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched[id(parameter)] = AccumulationHook(parameter, self._after_grad)

    def close(self) -> None:
        """Take all hooks off."""
        for handle in [*self._handles, *self._watched.values()]:
            handle.remove()
        for module in self._tables:
            if type(module._parameters) is ParameterTable:
                module.__dict__["_parameters"] = module._parameters.copy()
        self._tables.clear()
        self._handles.clear()
        self._watched.clear()


class _BeforeForward:
    """A hook of one module."""

    def __init__(self, tell: Callable[[Parameters], None], parameters: Parameters) -> None:
        self._tell, self._parameters = tell, parameters

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self._tell(self._parameters)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_nothing, ()


def _make_nothing() -> Callable[..., None]:
    return _nothing


def _nothing(module: nn.Module, arguments: Any) -> None:
    """What is left of a hook in a copy of the model."""
