"""Which modules of a model are the layers that a pipeline is cut out of.

Private names of torch, each asserted in `tests/test_private_api.py`:

====================================================  ==============================================================
name                                                  what for
====================================================  ==============================================================
nn.Module._forward_hooks, _forward_pre_hooks,         hooks of the Sequential itself, which would see other calls
_backward_hooks, _backward_pre_hooks                  than they expect
nn.Module._compiled_call_impl, OptimizedModule        whether it was compiled
====================================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_gpufeed.errors import ScheduleError

__all__ = ["LayerList", "check_enough", "find_layers"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_METHOD = "or a method of the model that takes nothing and returns the layers in order"


@dataclass(frozen=True, eq=False)
class LayerList:
    """The layers of a model, one after the other.

    Attributes:
        name: Of the `nn.Sequential` in the model, or of the method.
        layers: In the order in which they run.
        names: Of the layers in the model.
        owner: Its `forward` is the layers, one after the other: the `nn.Sequential`, or the module whose method it is.
    """

    name: str
    layers: tuple[nn.Module, ...]
    names: tuple[str, ...]
    owner: nn.Module


def find_layers(model: nn.Module, pipeline_module: str | None = None) -> LayerList:
    """Find the layers that a pipeline shares out among ranks.

    Args:
        model: Any module.
        pipeline_module: Name of an `nn.Sequential` in the model, with dots; or of a method that takes nothing and
            returns the layers in order. None for the only `nn.Sequential` that is in no other, in no loss and in no
            metric.

    Returns:
        The layers. Each may hold hooks and parameters of another one, but is there only once.

    Raises:
        ScheduleError: There is no such module, there are several, or it cannot be cut.

    Example:
        >>> model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 3), nn.ReLU())})
        >>> find_layers(model).names
        ('net.0', 'net.1')
    """
    if pipeline_module is None:
        return _of_sequential(model, *_only_sequential(model))
    parent_name, _, last = pipeline_module.rpartition(".")
    try:
        parent = model.get_submodule(parent_name)
        found = getattr(parent, last) if last else model
    except AttributeError:
        raise ScheduleError(
            f"{type(model).__name__} has no {pipeline_module!r}; expected the name of an nn.Sequential, {_METHOD}. "
            f"{_way_out(name for name, _ in _outermost(model))}"
        ) from None
    if isinstance(found, nn.Module):
        return _of_sequential(model, pipeline_module, found)
    if not callable(found):
        raise ScheduleError(
            f"{pipeline_module!r} of {type(model).__name__} is a {type(found).__name__}; expected an nn.Sequential, "
            f"{_METHOD}."
        )
    return _of_method(model, pipeline_module, parent, found)


def check_enough(layers: LayerList, num_stages: int) -> None:
    """Make sure that every stage gets a layer.

    Args:
        layers: Of the model.
        num_stages: Into how many parts they shall be cut.

    Raises:
        ScheduleError: There are fewer layers than stages.
    """
    num_layers = len(layers.layers)
    if num_layers < num_stages:
        kinds = ", ".join(type(layer).__name__ for layer in layers.layers)
        raise ScheduleError(
            f"{layers.name!r} has {num_layers} layers ({kinds}), but there are {num_stages} stages and each needs one "
            f"at least. Ask for {num_layers} stages at most (a smaller pipeline_size, more layers_per_stage), or give "
            "it more layers: an nn.Sequential inside of it counts as one layer, so write its layers out."
        )


def _only_sequential(model: nn.Module) -> tuple[str, nn.Module]:
    """Its name, and it."""
    found = list(_outermost(model))
    if len(found) == 1:
        return found[0]
    # One that cannot be cut is better named than passed over in silence.
    others = [f"{name!r} ({why})" for name, why in _passed_over(model)]
    text = f"has {len(found)} nn.Sequential that could be the pipeline" if found else "has no nn.Sequential"
    aside = f" Not counted: {', '.join(others)}." if others and not found else ""
    raise ScheduleError(
        f"{type(model).__name__} {text}{': ' if found else ''}"
        f"{', '.join(repr(name) for name, _ in found)}; expected one.{aside} {_way_out(name for name, _ in found)}"
    )


def _way_out(names: Iterable[str]) -> str:
    example = next(iter(names), None)
    if example is None:
        return (
            "Put the layers into an nn.Sequential, or write a method of the model that returns them in order, and pass "
            "its name as pipeline_module."
        )
    return f"Pass one of its nn.Sequential, such as pipeline_module={example!r}, {_METHOD}."


def _outermost(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every Sequential that can be cut, but for those in another, in a loss or in a metric."""
    seen = set() if seen is None else seen
    if id(module) in seen or _is_aside(module):
        return
    seen.add(id(module))
    if isinstance(module, nn.Sequential) and not _overrides_forward(module):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _outermost(child, f"{name}.{key}" if name else key, seen)


def _passed_over(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of those that look like a candidate and are none, and why."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential) and _overrides_forward(module):
            yield name, f"{type(module).__name__} has a forward of its own"
        elif isinstance(module, nn.ModuleList):
            yield name, "an nn.ModuleList, which does not say how it runs"


def _is_aside(module: nn.Module) -> bool:
    """Whether it is a loss or a metric: neither is imported for this."""
    homes = [cls.__module__ for cls in type(module).__mro__]
    return any(home == "torch.nn.modules.loss" or home.split(".")[0] == "torchmetrics" for home in homes)


def _overrides_forward(module: nn.Sequential) -> bool:
    return type(module).forward is not nn.Sequential.forward or "forward" in vars(module)


def _of_sequential(model: nn.Module, name: str, module: nn.Module) -> LayerList:
    if is_compiled(module):
        raise ScheduleError(
            f"{name!r} is compiled as a whole, and cannot be cut. Compile its layers one by one, or not at all."
        )
    if not isinstance(module, nn.Sequential):
        raise ScheduleError(
            f"{name!r} is a {type(module).__name__}, which does not say in which order its parts run; expected an "
            f"nn.Sequential, {_METHOD}."
        )
    if _overrides_forward(module):
        raise ScheduleError(
            f"{name!r} ({type(module).__name__}) has a forward of its own; expected that of nn.Sequential, which runs "
            "the layers one after the other. What it does beyond has to go into the layers, or around the pipeline."
        )
    keys = [key for key, _ in module.named_modules(remove_duplicate=False) if key and "." not in key]
    names = [f"{name}.{key}" if name else key for key in keys]
    return _checked(model, LayerList(name, tuple(module), tuple(names), module))


def _of_method(model: nn.Module, name: str, parent: nn.Module, method: Any) -> LayerList:
    try:
        layers = list(method())
    except TypeError as error:
        raise ScheduleError(
            f"The method {name!r} cannot give the layers: {error}; expected one that takes nothing and returns them in "
            "order."
        ) from error
    known = {id(module): path for path, module in model.named_modules()}
    for number, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise ScheduleError(
                f"Layer {number} that the method {name!r} returns is a {type(layer).__name__}; expected an nn.Module. "
                "Make a module of it: a function can be the forward of one."
            )
        if id(layer) not in known:
            raise ScheduleError(
                f"Layer {number} that the method {name!r} returns, a {type(layer).__name__}, is not in the model, so "
                "nobody would train or save it. Make it an attribute of the model in __init__."
            )
    return _checked(model, LayerList(name, tuple(layers), tuple(known[id(one)] for one in layers), parent))


def _checked(model: nn.Module, layers: LayerList) -> LayerList:
    """Whether every stage can have its layers for itself."""
    if not layers.layers:
        raise ScheduleError(f"{layers.name!r} has no layers; a pipeline needs one for each stage.")
    _check_repeats(layers)
    hooked = [name for name in _HOOKS if getattr(layers.owner, name)]
    if hooked and isinstance(layers.owner, nn.Sequential):
        raise ScheduleError(
            f"{layers.name!r} has hooks of its own ({', '.join(name.strip('_') for name in hooked)}), which a pipeline "
            "cannot run: no rank sees all of it. Put them on its layers, each of which runs once per microbatch."
        )
    for path, module in model.named_modules():
        is_around = any(one is layers.owner for one in module.modules())
        if is_around and is_compiled(module):
            raise ScheduleError(
                f"{layers.name!r} is in {path or type(model).__name__!r}, which is compiled as a whole, and cannot be "
                "cut. Compile its layers one by one, or not at all."
            )
    return layers


def _check_repeats(layers: LayerList) -> None:
    """No layer twice, and none inside of another."""
    holders: dict[int, int] = {}
    for number, layer in enumerate(layers.layers):
        if id(layer) in holders:
            earlier = holders[id(layer)]
            raise ScheduleError(
                f"Layers {earlier} and {number} of {layers.name!r} are the same module ({type(layer).__name__}); "
                "expected each once, as a module cannot be on two stages. Use two modules, which may share their "
                "parameters (second.weight = first.weight)."
            )
        holders[id(layer)] = number
    for number, layer in enumerate(layers.layers):
        for part in layer.modules():
            if holders.get(id(part), number) != number:
                raise ScheduleError(
                    f"Layer {holders[id(part)]} of {layers.name!r} ({type(part).__name__}) is a part of layer {number} "
                    f"({type(layer).__name__}); expected layers apart from each other."
                )
    if holders.keys() & {id(layers.owner)}:
        raise ScheduleError(f"The layers of {layers.name!r} hold the module that they are the layers of.")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module runs as one compiled function.

    Args:
        module: Any.

    Returns:
        True for what `torch.compile` gives, and for a module compiled in place.
    """
    is_wrapper = any(cls.__name__ == "OptimizedModule" for cls in type(module).__mro__)
    return is_wrapper or getattr(module, "_compiled_call_impl", None) is not None
