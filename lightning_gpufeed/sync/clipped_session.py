"""Clipping without waiting for all gradients.

By value each gradient is clipped when it arrives, right before its update.

By norm every sum is needed, but not every sum on every rank. So sums are made in two halves, see `scattered_reducer`:
the norm is known when the first half is over, and gradients are multiplied when they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
_SAME = 1e-6
"""Share of a gradient's norm up to which it has not been changed: an alias of it may be summed in another order."""


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
    _seen: dict[nn.Parameter, Tensor | None] | None = None
    """Norms of the gradients that somebody has got to see, as they were then; None if the norm of all is not known."""

    @property
    def can_know_norm(self) -> bool:
        """Whether the norm of all gradients may be known before they have arrived: if asked for, and precise enough."""
        return self._options.overlap_clipping and all(layer.memory[1] in _EXACT for layer in self._tuner.layers)

    def _scatters(self) -> bool:
        return self.can_cross and self.needs_norm and self.can_know_norm

    def _may_cross(self) -> bool:
        return super()._may_cross() and (not self.needs_norm or self.can_know_norm)

    def _crosses(self) -> bool:
        return super()._crosses() and (not self.needs_norm or self.plan.is_scattered)

    def _make_reducer(self, **options: Any) -> Reducer:
        if not self.plan.is_scattered:
            return super()._make_reducer(**options)
        # Halves of one message after the other leave the link idle between two with gloo: two at a time fill it.
        return ScatteredReducer(self.layers, self.plan, self.ranks.unordered_group, **options)

    def backward_begins(self, loss: Tensor | None = None) -> None:
        """Forward is over. What it has not used is updated now.

        Args:
            loss: Where backward will begin.

        Raises:
            SyncError: Another rank is gone.
        """
        super().backward_begins(loss)
        self._on_arrival = self._seen = None

    def backward_ends(self) -> None:
        """Backward is over: weight gradients that waited are computed, and the last gradients sent.

        Raises:
            SyncError: Another rank is gone, or a parameter has no gradient and `find_unused_parameters` is not set.
        """
        super().backward_ends()
        if self.is_syncing and self._crosses() and isinstance(self._reducer, ScatteredReducer):
            self._seen = _norms(self._parameters_here())

    def step(self, optimizer: optim.Optimizer) -> None:
        """Take an optimizer's step: for each parameter as soon as its gradient is there and it is used.

        Args:
            optimizer: One that is separable, see `why_inseparable`. The step is that of now, whatever a scheduler does
                to its groups meanwhile.
        """
        self._seen = None
        super().step(optimizer)

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
        if not isinstance(reducer, ScatteredReducer) or not self._has_all(optimizer) or not self._is_norm_of_now():
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
        self._set_on_arrival(partial(_clamp, value))
        return True

    def _set_on_arrival(self, clip: Callable[[Sequence[nn.Parameter]], None]) -> None:
        if here := self._parameters_here():
            clip(here)
        self._on_arrival = clip

    def _has_all(self, optimizer: optim.Optimizer) -> bool:
        """Whether an optimizer updates what is reduced, and nothing was clipped before."""
        updated = {id(one) for group in optimizer.param_groups for one in group["params"] if _has_gradient(one)}
        return updated == self._layer_of.keys() and self._on_arrival is None

    def _is_norm_of_now(self) -> bool:
        """Whether the norm that was summed is that of the gradients as they are now."""
        # Whoever has seen one may have changed it, by ways that leave no trace; or only looked at it, on one rank, and
        # then this one must not clip in another way than the others.
        if self._seen is None:
            return False
        now = _norms(self._seen)
        if any((norm is None) != (now[one] is None) for one, norm in self._seen.items()):
            return False
        pairs = [(now[one], norm) for one, norm in self._seen.items() if norm is not None]
        if not pairs:
            return True
        found, expected = (torch.stack([norm.double() for norm in side]) for side in zip(*pairs, strict=True))
        return torch.allclose(found, expected, rtol=_SAME, atol=0.0, equal_nan=True)

    def _parameters_here(self) -> list[nn.Parameter]:
        return [one for layer in self.layers for one in layer.parameters if one not in self._awaited]

    def _arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._on_arrival is not None:
            self._on_arrival(parameters)
        elif self._seen is not None:
            self._seen |= _norms(parameters)


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and bool(parameter.numel())


@torch.no_grad()
def _norms(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor | None]:
    """Of each gradient."""
    norms: dict[nn.Parameter, Tensor | None] = dict.fromkeys(parameters)
    some = {one: one.grad for one in norms if one.grad is not None}
    if some:
        norms.update(zip(some, torch._foreach_norm(list(some.values())), strict=True))
    return norms


def _clamp(value: float, parameters: Sequence[nn.Parameter]) -> None:
    """Gradients, in place. torch refuses to clip none at all, as of a branch that nobody has used."""
    if some := [one for one in parameters if one.grad is not None]:
        nn.utils.clip_grad_value_(some, value)


@torch.no_grad()
def _multiply(coefficient: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Gradients, in place, as `torch.nn.utils.clip_grads_with_norm_` does it."""
    gradients: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for same in gradients.values():
        torch._foreach_mul_(same, coefficient)
