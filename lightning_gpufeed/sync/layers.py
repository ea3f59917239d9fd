"""Which gradients belong together: the parameters that one module of the model owns."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["SyncLayer", "find_layers", "in_order", "is_sparse", "sparse_parameters"]


@dataclass(frozen=True, eq=False)
class SyncLayer:
    """Parameters that are used, reduced and updated together.

    Attributes:
        name: Of the module, as in `named_modules`; with the dtype if the module has parameters of several.
        module_name: Of the module alone.
        parameters: Of one dtype and on one device.
        is_deferrable: Whether the module's weight gradient can wait.
    """

    name: str
    module_name: str
    parameters: tuple[nn.Parameter, ...]
    is_deferrable: bool

    @property
    def num_elements(self) -> int:
        """Of all gradients together."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients together."""
        return self.num_elements * self.parameters[0].element_size()

    @property
    def memory(self) -> tuple[torch.device, torch.dtype]:
        """Where the gradients are, and of which type."""
        return self.parameters[0].device, self.parameters[0].dtype


def find_layers(model: nn.Module, deferrable: Collection[str], ignored: Collection[str] = ()) -> list[SyncLayer]:
    """The layers of a model, each parameter that requires a gradient in one of them.

    Args:
        model: Any module.
        deferrable: Names of modules whose weight gradient can wait.
        ignored: Names of parameters to leave alone.

    Returns:
        In the order of `named_modules`; a parameter that several modules share belongs to the first. Parameters whose
        gradient is sparse, and those without elements, are left out.
    """
    layers, seen = [], set()
    for name, module in model.named_modules():
        own: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for own_name, parameter in module._parameters.items():
            if f"{name}.{own_name}".removeprefix(".") in ignored or parameter is None:
                continue
            if not parameter.requires_grad or id(parameter) in seen or not parameter.numel():
                continue
            seen.add(id(parameter))
            if not is_sparse(module):
                own.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for (_, dtype), parameters in own.items():
            full = name if len(own) == 1 else f"{name} ({str(dtype).removeprefix('torch.')})"
            layers.append(SyncLayer(full, name, tuple(parameters), name in deferrable and len(own) == 1))
    return layers


def sparse_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters whose gradient is sparse.

    Args:
        model: Any module.

    Returns:
        Names and parameters, in the order of `named_modules`.
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, module in model.named_modules():
        if is_sparse(module) and module.weight.requires_grad:
            found.setdefault(id(module.weight), (f"{name}.weight", module.weight))
    return list(found.values())


def is_sparse(module: nn.Module) -> bool:
    """Whether a module's gradient is sparse.

    Args:
        module: Any.

    Returns:
        True for an embedding that was asked for it.
    """
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def in_order(layers: Iterable[SyncLayer], first_use: Sequence[nn.Parameter]) -> list[SyncLayer]:
    """The layers as forward comes to them.

    Args:
        layers: Any.
        first_use: Parameters in the order in which forward has used them.

    Returns:
        Those that forward did not use come last, in the order given.
    """
    places = {id(first_use[place]): place for place in reversed(range(len(first_use)))}
    return sorted(layers, key=lambda layer: min(places.get(id(one), math.inf) for one in layer.parameters))
