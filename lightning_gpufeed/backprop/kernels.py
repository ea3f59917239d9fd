"""What backward computes for one call of a layer, in two halves: the kernels that autograd itself would run.

::

    autograd:   grad_output ──► input gradient, weight gradient, bias gradient       in one node
    here:       grad_output ──► input gradient                                       at once
                grad_output, input ──► weight gradient, bias gradient                later

Each half calls what autograd's node calls, on the same tensors in the same layout, so both are bitwise equal to it.
A call for which that is not known is refused (`find_kernels` gives None) and left to autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Kernels", "find_kernels", "is_splittable", "register_kernels"]

WeightGrads = tuple[Tensor | None, Tensor | None]
"""Of weight and bias."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Kernels(ABC):
    """Forward and the two halves of backward of one kind of layer. Stateless but for the layer's settings."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output."""

    @abstractmethod
    def input_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of `x`; same shape and dtype as it."""

    @abstractmethod
    def weight_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool]) -> WeightGrads:
        """The gradients of weight and bias, each only if its part of the mask is set."""


@dataclass(frozen=True)
class _Linear(Kernels):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = nn.functional.linear(x, weight, bias)
        # It may be a view of a matrix, and such an output of a node cannot be changed in place.
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    def input_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._flat(grad_output).mm(weight).reshape(x.shape)

    def weight_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool]) -> WeightGrads:
        flat = self._flat(grad_output)
        return (
            flat.t().mm(self._flat(x)) if mask[0] else None,
            flat.sum(0, keepdim=True).view(-1) if mask[1] else None,
        )

    @staticmethod
    def _flat(x: Tensor) -> Tensor:
        return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class _Convolution(Kernels):
    settings: tuple[Any, ...]
    """Stride, padding, dilation, whether it is transposed, output padding, groups: as the kernels take them."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self.settings)

    def input_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        grads = self._backward(grad_output, x, weight, (True, False, False))
        assert grads[0] is not None
        return grads[0]

    def weight_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool]) -> WeightGrads:
        _, weight_grad, bias_grad = self._backward(grad_output, x, weight, (False, *mask))
        return weight_grad, bias_grad

    def _backward(
        self, grad_output: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        is_transposed, groups = self.settings[3], self.settings[5]
        channels = [weight.shape[1] * groups if is_transposed else weight.shape[0]]
        grads: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
            grad_output, x, weight, channels, *self.settings, mask
        )
        return grads


@dataclass(frozen=True)
class _Embedding(Kernels):
    padding_idx: int
    scale_grad_by_freq: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.embedding(weight, x, self.padding_idx, self.scale_grad_by_freq, False)

    def input_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def weight_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool]) -> WeightGrads:
        grad: Tensor = torch.ops.aten.embedding_dense_backward(
            grad_output, x, weight.shape[0], self.padding_idx, self.scale_grad_by_freq
        )
        return grad, None


_registered: dict[type[nn.Module], Callable[[Any, Tensor], Kernels | None]] = {}


def register_kernels(kind: type[nn.Module], make: Callable[[Any, Tensor], Kernels | None]) -> None:
    """Let the weight gradient of a layer of one's own wait.

    Args:
        kind: Its class; subclasses are not meant. Its parameters are `weight` and, if it likes, `bias`, and its forward
            takes one tensor.
        make: Given a layer and its input, what computes it; None to leave the call to autograd.
    """
    _registered[kind] = make


def is_splittable(module: nn.Module) -> str | None:
    """Whether a layer's backward can be split at all.

    Args:
        module: Any module.

    Returns:
        None if it can; otherwise the reason in a few words.
    """
    kind = type(module)
    if kind not in (nn.Linear, nn.Embedding, *_CONVOLUTIONS, *_TRANSPOSED, *_registered):
        return "no layer with a weight gradient of its own"
    if getattr(module.forward, "__func__", None) is not kind.forward:
        return "its forward is replaced"
    expected = {"weight"} if kind is nn.Embedding or "bias" not in module._parameters else {"weight", "bias"}
    if set(module._parameters) != expected:
        return "its parameters are others than weight and bias"
    if hasattr(module, "parametrizations") or not isinstance(module.weight, nn.Parameter):
        return "its weight is computed from others"
    if kind is nn.Embedding and (module.sparse or module.max_norm is not None):
        return "its gradient is sparse or its weight is renormalised in forward"
    is_convolution = kind in (*_CONVOLUTIONS, *_TRANSPOSED)
    if is_convolution and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return "it pads by other means than zeros on both sides"
    return None


def find_kernels(module: nn.Module, x: Any, arguments: tuple[Any, ...]) -> Kernels | None:
    """What computes one call of a layer.

    Args:
        module: A layer for which `is_splittable` has no objection.
        x: The first argument of its forward.
        arguments: The others.

    Returns:
        None if this call has to be left to autograd: a layout or a type for which equality is not certain.
    """
    if type(x) not in (Tensor, nn.Parameter) or arguments or module.weight.is_complex() or x.is_complex():  # type: ignore[operator]
        return None
    if type(module) in _registered:
        return _registered[type(module)](module, x)
    if isinstance(module, nn.Linear):
        # For other layouts, for vectors and for a single number or none autograd chooses among more kernels.
        is_plain = x.is_contiguous() and module.weight.is_contiguous() and x.dim() >= 2 and x.numel() > 1
        return _Linear() if is_plain else None
    if isinstance(module, nn.Embedding):
        if not x.is_contiguous():
            return None
        padding_idx = -1 if module.padding_idx is None else module.padding_idx
        return _Embedding(padding_idx, module.scale_grad_by_freq)
    spatial = len(module.kernel_size)  # type: ignore[arg-type]
    if x.dim() != spatial + 2 or x.numel() == 0 or not (x.is_contiguous() or _is_channels_last(x)):
        return None
    is_transposed = isinstance(module, _TRANSPOSED)
    return _Convolution(
        (module.stride, module.padding, module.dilation, is_transposed, module.output_padding, module.groups)
    )


def _is_channels_last(x: Tensor) -> bool:
    return (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)) or (
        x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d)
    )
