"""Where a batch is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["device_of"]


def device_of(batch: Any) -> torch.device:
    """Device of the first tensor in a batch.

    Args:
        batch: A tensor, or a dict, tuple or list of what may be tensors.

    Returns:
        Its device; the CPU if there is no tensor.
    """
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    return next((part.device for part in parts if isinstance(part, torch.Tensor)), torch.device("cpu"))
