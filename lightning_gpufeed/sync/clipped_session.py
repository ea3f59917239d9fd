"""Clipping without waiting for all gradients.

By value each gradient is clipped when it arrives, right before its update.

By norm every sum is needed, but not every sum on every rank. So sums are made in two halves, see `scattered_reducer`:
the norm is known when the first half is over, and gradients are multiplied when they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from lightning_gpufeed.sync.reducer import Reducer
from lightning_gpufeed.sync.scattered_reducer import ScatteredReducer
from lightning_gpufeed.sync.session import GradientSync

__all__ = ["ClippedGradientSync"]

_EXACT = (torch.float32, torch.float64)
"""Types whose norm is known to 1e-6 whichever way it is summed."""


class ClippedGradientSync(GradientSync):
    """A `GradientSync` for a loop that clips.

    ::

        sync.needs_norm = True
        ...
        sync.backward_ends()                  all gradients are summed somewhere, and the norm is known
        if not sync.clip(optimizer, 1.0):     they are multiplied when they arrive
            clip_grad_norm_(parameters, 1.0)  or have all arrived, and are clipped as ever
        sync.step(optimizer)

    What stays equal: by value, everything; by norm, the clipped gradients but for the rounding of their norm, which is
    summed in another order, the same on all ranks. Gradients that are looked at before are those before clipping; if
    they are changed, they are clipped as they are.

    Attributes:
        needs_norm: Whether the next step needs the norm of all gradients before the first update. Then it can only
            cross if the options allow it to sum gradients in two halves.
    """

    needs_norm: bool = False
    _on_arrival: Callable[[Sequence[nn.Parameter]], None] | None = None

    def _can_scatter(self) -> bool:
        return self._options.overlap_clipping and all(layer.memory[1] in _EXACT for layer in self._tuner.layers)

    def _scatters(self) -> bool:
        return self.can_cross and self.needs_norm and self._can_scatter()

    def _may_cross(self) -> bool:
        return super()._may_cross() and (not self.needs_norm or self._can_scatter())

    def _crosses(self) -> bool:
        return super()._crosses() and (not self.needs_norm or self.plan.is_scattered)

    def _make_reducer(self, **options: Any) -> Reducer:
        if not self.plan.is_scattered:
            return super()._make_reducer(**options)
        return ScatteredReducer(self.layers, self.plan, self.ranks.group, **options)

    def backward_begins(self, loss: Tensor | None = None) -> None:
        """Forward is over. What it has not used is updated now.

        Args:
            loss: Where backward will begin.

        Raises:
            SyncError: Another rank is gone.
        """
        super().backward_begins(loss)
        self._on_arrival = None

    def clip(self, optimizer: optim.Optimizer, max_norm: float) -> bool:
        """Clip the gradients of the step under way by their norm, each when it arrives.

        Args:
            optimizer: Whose parameters' gradients.
            max_norm: Largest norm of all gradients together.

        Returns:
            False if that is not possible: then all gradients are there, and are to be clipped as ever.

        Raises:
            SyncError: Another rank is gone.
        """
        reducer = self._reducer
        if (
            not isinstance(reducer, ScatteredReducer)
            or not self._has_all(optimizer)
            or not self._is_as_reduced(reducer)
        ):
            self.synchronize()
            return False
        self._set_on_arrival(partial(_multiply, reducer.coefficient(max_norm)))
        return True

    def clamp(self, optimizer: optim.Optimizer, value: float) -> bool:
        """Clip the gradients of the step under way by value, each when it arrives.

        Args:
            optimizer: Whose parameters' gradients.
            value: Largest absolute value of a number.

        Returns:
            False if that is not possible: then all gradients are there, and are to be clipped as ever.

        Raises:
            SyncError: Another rank is gone.
        """
        if not len(self._awaited) or not self._has_all(optimizer):
            self.synchronize()
            return False
        self._set_on_arrival(lambda parameters: nn.utils.clip_grad_value_(parameters, value))
        return True

    def _set_on_arrival(self, clip: Callable[[Sequence[nn.Parameter]], None]) -> None:
        if here := [one for layer in self.layers for one in layer.parameters if one not in self._awaited]:
            clip(here)
        self._on_arrival = clip

    def _has_all(self, optimizer: optim.Optimizer) -> bool:
        """Whether an optimizer updates what is reduced, and nothing was clipped before."""
        updated = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
        return updated == self._layer_of.keys() and self._on_arrival is None

    def _is_as_reduced(self, reducer: ScatteredReducer) -> bool:
        """Whether the norm is that of the gradients as they are now."""
        if not reducer.is_untouched:
            return False
        for i, layer in enumerate(self.layers):
            for n, parameter in enumerate(layer.parameters):
                if parameter not in self._awaited and not reducer.is_in_place(i, n):
                    return False
        return True

    def _arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._on_arrival is not None:
            self._on_arrival(parameters)


@torch.no_grad()
def _multiply(coefficient: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Gradients, in place, as `torch.nn.utils.clip_grads_with_norm_` does it."""
    gradients: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for same in gradients.values():
        torch._foreach_mul_(same, coefficient)
