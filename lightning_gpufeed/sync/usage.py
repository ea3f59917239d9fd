"""How a model uses its parameters, seen in one step: in which order, how often, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_gpufeed.backprop.engine import count_uses
from lightning_gpufeed.sync.layers import SyncLayer

__all__ = ["Usage"]


class Usage:
    """What is seen in the first step.

    Attributes:
        first_use: Parameters in the order in which forward has used them first; added by who sees it.
        is_in_backward: Whether gradients are being accumulated; set by who knows.
    """

    def __init__(self, layers: Sequence[SyncLayer]) -> None:
        """Watch, until `close`.

        Args:
            layers: With the parameters.
        """
        self.first_use: list[nn.Parameter] = []
        self.is_in_backward = False
        parameters = [one for layer in layers for one in layer.parameters]
        self._gradients = {id(one): 0 for one in parameters}
        self._uses = {id(one): 1 for one in parameters}
        self._hooks: list[Any] = [
            one.register_hook(partial(self._see_gradient, id(one)))  # type: ignore[no-untyped-call]
            for one in parameters
        ]

    def _see_gradient(self, parameter_id: int, gradient: Tensor) -> None:
        """A gradient that is not accumulated was asked for by `torch.autograd.grad`."""
        if not self.is_in_backward:
            self._uses[parameter_id] += 1

    def look_at(self, loss: Tensor) -> None:
        """Count how many operations use each parameter.

        Args:
            loss: Where backward will begin.
        """
        for parameter_id, number in count_uses(loss).items():
            if parameter_id in self._uses:
                self._uses[parameter_id] = max(number, self._uses[parameter_id])

    def accumulated(self, parameter: Tensor) -> None:
        """Backward has added to a parameter's gradient.

        Args:
            parameter: Whose.
        """
        self._gradients[id(parameter)] += 1

    def is_certain(self, layer: SyncLayer) -> bool:
        """Whether each gradient of a layer came once.

        Args:
            layer: Which.

        Returns:
            False also if one did not come.
        """
        return all(self._gradients[id(one)] == 1 for one in layer.parameters)

    def is_reused(self, layer: SyncLayer) -> bool:
        """Whether a gradient of a layer has several parts, or was asked for by itself.

        Args:
            layer: Which.

        Returns:
            True if its weight gradient had better not wait.
        """
        return any(self._uses[id(one)] > 1 for one in layer.parameters)

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
