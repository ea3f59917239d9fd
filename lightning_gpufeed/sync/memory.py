"""One flat tensor for all gradients of a type, laid out so that each bucket of a plan is a slice of it.

::

    plan        bucket 0: layer 3 | bucket 1: the head of layer 0 | bucket 2: the rest of layer 0, layer 1
    memory      [ 3 3 3 3 3 3 3 3 | 0 0 0 0 | 0 0 0 0 1 1 1 1 ]
                                    └── the gradient of a parameter of layer 0 is a view
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_gpufeed.sync.layers import SyncLayer
from lightning_gpufeed.sync.plan import Bucket

__all__ = ["GradientMemory"]


class GradientMemory:
    """Memory for the gradients of all layers, as a plan sends them.

    Attributes:
        views: For each layer, one view per parameter in the parameter's own shape and strides.
        slices: For each bucket, what is to be reduced in place. One slice, unless its pieces cannot be neighbours:
            gradients of several types, or halves of a layer that is not sent in one go.
        num_bytes: Allocated.
    """

    def __init__(self, layers: Sequence[SyncLayer], buckets: Sequence[Bucket]) -> None:
        """Allocate; all zeros.

        Args:
            layers: As the buckets' pieces number them.
            buckets: In the order of issue, with every layer in them.
        """
        order = dict.fromkeys(piece.layer for bucket in buckets for piece in bucket)
        starts: dict[int, int] = {}
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for i in order:
            where = layers[i].memory
            starts[i] = sizes.get(where, 0)
            sizes[where] = starts[i] + layers[i].num_elements
        self._flat = {where: torch.zeros(size, dtype=where[1], device=where[0]) for where, size in sizes.items()}
        self.num_bytes = sum(flat.numel() * flat.element_size() for flat in self._flat.values())
        self.views: dict[int, tuple[Tensor, ...]] = {}
        for i, start in starts.items():
            views, flat = [], self._flat[layers[i].memory]
            for parameter in layers[i].parameters:
                views.append(_view(flat[start : start + parameter.numel()], parameter))
                start += parameter.numel()
            self.views[i] = tuple(views)
        self.slices = [self._slices(bucket, layers, starts) for bucket in buckets]

    def _slices(self, bucket: Bucket, layers: Sequence[SyncLayer], starts: dict[int, int]) -> list[Tensor]:
        ranges: list[tuple[tuple[torch.device, torch.dtype], int, int]] = []
        for layer, begin_byte, end_byte in bucket:
            where, size = layers[layer].memory, layers[layer].parameters[0].element_size()
            # A cut inside an element counts as before it, for the piece that ends there and the one that begins there.
            begin, end = starts[layer] + begin_byte // size, starts[layer] + end_byte // size
            if begin == end:
                continue
            if ranges and ranges[-1][0] == where and ranges[-1][2] == begin:
                ranges[-1] = (where, ranges[-1][1], end)
            else:
                ranges.append((where, begin, end))
        return [self._flat[where][begin:end] for where, begin, end in ranges]


def _view(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """In the parameter's strides, if it fills its memory without gaps: optimizers are fastest on equal strides."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    if parameter.numel() and span == parameter.numel():
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)
