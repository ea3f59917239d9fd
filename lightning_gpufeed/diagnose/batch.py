"""What a batch holds, seen on the host; among others whether its floats are 8-bit numbers in disguise."""

from __future__ import annotations

from typing import Any

import torch

from lightning_gpufeed.device.samples import batch_form, count_samples, walk
from lightning_gpufeed.diagnose.counters import BatchFacts

__all__ = ["describe_batch"]

_NUM_LOOKED_AT = 16384
_FEWEST_LOOKED_AT = 256
_STRETCH = 256
_MOST_DIFFERENT = 1023
"""Different values of 8-bit numbers after a conversion, with a factor and an offset for each of three or four channels.
Numbers of ten bits have one more."""
_MOST_DIFFERENT_HALF = 256


def describe_batch(batch: Any) -> BatchFacts:
    """Look at a batch before it is copied to the device.

    Costs about a millisecond for large batches, so look at few of them. Values are looked at in host memory only; of
    tensors on a device just the sizes are known, and nothing waits for it.

    Args:
        batch: Tensors in any containers.

    Returns:
        The facts.
    """
    tensors = {id(leaf): leaf for leaf in walk(batch) if isinstance(leaf, torch.Tensor)}
    num_bytes = widened_bytes = widened_values = largest_bytes = 0
    largest: torch.Tensor | None = None
    for tensor in tensors.values():
        size = _num_bytes(tensor)
        num_bytes += size
        if size > largest_bytes:
            largest, largest_bytes = tensor, size
        if is_widened(tensor):
            widened_bytes += size
            widened_values += tensor.numel()
    return BatchFacts(
        num_samples=_num_samples(batch),
        num_bytes=num_bytes,
        widened_bytes=widened_bytes,
        widened_values=widened_values,
        is_pinned=largest is not None and largest.device.type == "cpu" and largest.is_pinned(),
    )


def is_widened(tensor: torch.Tensor) -> bool:
    """Whether floats take so few values that bytes could carry them.

    Looked at are stretches of memory, spread evenly.

    Args:
        tensor: Any.

    Returns:
        False for what is not in host memory, or too small to tell.
    """
    if not tensor.is_floating_point() or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    if tensor.is_nested:
        return False
    # Half precision has so few values that nobody can tell; brain floats have 128 from one power of two to the next.
    if tensor.element_size() < 2 or tensor.dtype is torch.bfloat16 or tensor.numel() < _FEWEST_LOOKED_AT:
        return False
    order = sorted(range(tensor.ndim), key=lambda axis: tensor.stride(axis), reverse=True)
    dense = tensor.detach().permute(order)
    if not dense.is_contiguous():
        return False
    values = dense.reshape(-1)
    if len(values) > _NUM_LOOKED_AT:
        # Stretches all over it: the border of an image, or the seam of two, may be empty.
        starts = torch.linspace(0, len(values) - _STRETCH, _NUM_LOOKED_AT // _STRETCH, device="cpu").long()
        values = values[(starts[:, None] + torch.arange(_STRETCH, device="cpu")).reshape(-1)]
    most = _MOST_DIFFERENT if tensor.element_size() > 2 else _MOST_DIFFERENT_HALF
    return len(torch.unique(values)) <= min(most, len(values) // 8)


def _num_bytes(tensor: torch.Tensor) -> int:
    """Bytes in memory; 0 for sparse and nested tensors, which do not say."""
    return tensor.nbytes if tensor.layout is torch.strided and not tensor.is_nested else 0


def _num_samples(batch: Any) -> int | None:
    try:
        return count_samples(batch, batch_form(batch))
    except (TypeError, ValueError):
        return None
