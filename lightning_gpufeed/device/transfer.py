"""Where a batch is."""

from __future__ import annotations

from typing import Any

import torch

from lightning_gpufeed.device.samples import walk

__all__ = ["device_of"]


def device_of(batch: Any) -> torch.device:
    """Device of the first tensor in a batch.

    Args:
        batch: Anything that may hold tensors, nested in any way.

    Returns:
        Its device; the CPU if there is no tensor.
    """
    return next((part.device for part in walk(batch) if isinstance(part, torch.Tensor)), torch.device("cpu"))
