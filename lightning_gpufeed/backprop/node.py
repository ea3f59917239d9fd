"""The node that one call of a layer puts into autograd's graph in place of the layer's own."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_gpufeed.backprop.engine import Anchor
from lightning_gpufeed.backprop.kernels import Kernels
from lightning_gpufeed.backprop.tasks import Call
from lightning_gpufeed.errors import DeferredGradientError

__all__ = ["Note", "SplitCall", "autocast"]


class Layer(Protocol):
    """What a node knows of its layer."""

    name: str
    num_calls: int

    def arrived(self, note: Note, call: Call) -> None:
        """The input gradient of a call is computed.

        Args:
            note: Of the call.
            call: What its weight gradient needs.
        """


class Note:
    """What one call of a layer has to remember until its backward. Lives as long as the graph."""

    def __init__(
        self,
        layer: Layer,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        kernels: Kernels,
        is_cast_shared: bool,
    ) -> None:
        self.layer, self.weight, self.bias, self.kernels = layer, weight, bias, kernels
        self.is_cast_shared = is_cast_shared
        self._is_counted = True
        layer.num_calls += 1

    def arrive(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> None:
        """The input gradient is computed.

        Args:
            grad_output: Gradient of the output.
            x: The input.
            weight: As it was computed with.
        """
        versions = x._version, grad_output._version
        self.layer.arrived(self, Call(self.kernels, grad_output, x, weight, versions, self.is_cast_shared))

    def uncount(self) -> None:
        """The call is no longer to come."""
        if self._is_counted:
            self._is_counted = False
            self.layer.num_calls -= 1

    def __del__(self) -> None:
        self.uncount()


def autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does: floating point numbers, but not those of double precision."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


class SplitCall(torch.autograd.Function):
    """One call of a layer: backward gives the input gradient and notes what the weight gradient needs."""

    @staticmethod
    def forward(ctx: Any, note: Note, dtype: torch.dtype | None, anchor: Anchor, x: Tensor, _: Tensor) -> Tensor:
        """The layer's output."""
        weight: Tensor = note.weight
        bias: Tensor | None = note.bias
        if dtype is not None:
            weight, bias = autocast(weight, dtype), None if bias is None else autocast(bias, dtype)
        ctx.set_materialize_grads(False)
        ctx.note, ctx.anchor, ctx.is_cast = note, anchor, weight is not note.weight
        # As autograd, which does not mind a change of a weight that no input gradient needs.
        ctx.weight = None if ctx.needs_input_grad[3] else weight
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[3] else None)
        return note.kernels.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """The input gradient; the rest is noted."""
        (grad_output,) = grads
        if grad_output is None:
            return (None,) * 5
        if torch.is_grad_enabled() and (ctx.anchor.is_reached() or ctx.is_cast):
            raise DeferredGradientError(
                f"backward(create_graph=True) came to {ctx.note.layer.name}, whose weight gradient waits: a gradient "
                "of a gradient has to know it. Close the splitter, or leave this layer out of those that wait."
            )
        x, weight = ctx.saved_tensors
        input_grad = None
        if weight is None:
            weight = ctx.weight
        else:
            input_grad = ctx.note.kernels.input_grad(grad_output, x, weight)
        if ctx.anchor.is_reached():
            ctx.note.arrive(grad_output, x, weight)
        return None, None, None, input_grad, None
