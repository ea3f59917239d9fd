"""Everything a failed attempt may have changed in a module and around it, noted before and put back after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_gpufeed.device.host_copy import HostCopies
from lightning_gpufeed.recover.attributes import AttributeStates
from lightning_gpufeed.recover.metrics import MetricStates, find_metrics
from lightning_gpufeed.recover.snapshot import BufferStates, GeneratorStates
from lightning_gpufeed.recover.weights import WeightStates

__all__ = ["ModuleStates", "watch_parts", "without_randomness"]


class ModuleStates:
    """Random generators, buffers, metrics, plain attributes and weights of a module.

    Attributes:
        module: It.
        is_stale: To be refreshed before the next `save`.
    """

    def __init__(self, module: nn.Module, device: torch.device, ignored: frozenset[str] = frozenset()) -> None:
        """Look through the module; again with `refresh`, as its parts may change.

        Args:
            module: What is trained.
            device: Where.
            ignored: Names of attributes that are not the user's.
        """
        self._ignored = ignored
        self.module = module
        self._device = device
        self.metric_states = MetricStates()
        self.gradient_copies = HostCopies()
        self._others: list[Any] = []
        self.is_stale = False
        self.refresh()

    def refresh(self) -> None:
        """Look through the module again: its parts may have changed."""
        self.is_stale = False
        self.parameters = list(self.module.parameters())
        self.weights = WeightStates(self.module)
        self._attributes = AttributeStates(self.module, self._ignored)
        self.buffers = BufferStates(self.module)
        self.metrics = find_metrics(self.module, self._others)

    def include_metrics(self, others: Sequence[Any]) -> None:
        """Take in metrics that need not be parts of the module.

        Args:
            others: All of them; cheap if they are the same as the last time.
        """
        if [id(other) for other in others] != [id(other) for other in self._others]:
            self._others = list(others)
            self.metrics = find_metrics(self.module, self._others)

    def save(self) -> None:
        """Note all as it is now."""
        self._generators = GeneratorStates(self._device)
        self._attributes.save()
        self.weights.save()
        self.buffers.save()
        self.metric_states.save(self.metrics)

    def put_back(self) -> list[str]:
        """Make all what it was at the last `save`.

        Returns:
            Names of weights that were changed and cannot be put back.
        """
        self._generators.put_back()
        self._attributes.put_back()
        self.buffers.put_back()
        self.metric_states.put_back()
        return self.weights.put_back()


def watch_parts(on_change: Callable[[], None]) -> Callable[[], None]:
    """Be told when any module gets a parameter, a buffer or a submodule under a name it has not had.

    Args:
        on_change: Called each time.

    Returns:
        Ends it.
    """
    registered = (
        register_module_parameter_registration_hook,
        register_module_buffer_registration_hook,
        register_module_module_registration_hook,
    )

    def look(module: nn.Module, name: str, value: Any) -> None:
        if not any(name in known for known in (module._parameters, module._buffers, module._modules)):
            on_change()

    handles = [register(look) for register in registered]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


@contextmanager
def without_randomness(module: nn.Module, *, is_all: bool = False) -> Iterator[None]:
    """Dropout and batch normalisation as in evaluation, the rest as it is.

    Args:
        module: Its submodules too.
        is_all: The whole module as in evaluation.

    Yields:
        Nothing.
    """
    chosen = [
        part for part in module.modules() if part.training and (is_all or isinstance(part, _DropoutNd | _BatchNorm))
    ]
    # Without statistics of its own it would look at its batch in evaluation too.
    bare = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.running_mean is None]
    for part in chosen:
        part.training = False
    for norm in bare:
        like = torch.empty(norm.num_features) if norm.weight is None else norm.weight.detach()
        norm.running_mean, norm.running_var = torch.zeros_like(like), torch.ones_like(like)
    try:
        yield
    finally:
        for norm in bare:
            norm.running_mean = norm.running_var = None
        for part in chosen:
            part.training = True
