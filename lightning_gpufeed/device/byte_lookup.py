"""Bytes to numbers by a table of 256 entries a channel: any preparation of uint8 images in one pass over memory.

A preparation that treats each value by itself (scale, subtract, divide, round) has at most 256 results a channel. They
are computed once by the preparation itself, so what is looked up has its bits; what is left is to read one byte and
write one number for each of them, in the memory order wanted.

CUDA runs a Triton kernel (`lightning_gpufeed.device.triton_lookup`), everything else numpy's indexing.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["ByteTable"]

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Prepare = Callable[[torch.Tensor], torch.Tensor]


class ByteTable:
    """The results of one preparation on one device.

    The first use on a CUDA device compares the kernel with the preparation itself; where it cannot be had or differs by
    a bit, `is_usable` is False and one warning says so.

    Attributes:
        is_usable: Whether `look_up` may be used.
    """

    def __init__(self, prepare: Prepare, num_channels: int, device: torch.device) -> None:
        """Compute the table.

        Args:
            prepare: uint8 (N, C, H, W) -> floating point (N, C, H, W), each value by itself, by its channel only.
            num_channels: C.
            device: Where the images are.
        """
        every_byte = torch.arange(256, dtype=torch.uint8, device=device).view(1, 1, 16, 16)
        self._table = prepare(every_byte.expand(1, num_channels, 16, 16)).reshape(num_channels, 256).contiguous()
        self._kernel: Any = None
        self.is_usable = True
        if device.type == "cuda":
            self._start_kernel(prepare, num_channels, device)

    def _start_kernel(self, prepare: Prepare, num_channels: int, device: torch.device) -> None:
        """Compile the kernel and compare it with the preparation, bit by bit."""
        try:
            self._kernel = importlib.import_module("lightning_gpufeed.device.triton_lookup").look_up
            images = torch.randint(0, 256, (3, num_channels, 19, 16), dtype=torch.uint8, device=device)
            for stored in (images, images.contiguous(memory_format=torch.channels_last)):
                for memory_format in (torch.contiguous_format, torch.channels_last):
                    found, expected = self.look_up(stored, memory_format), prepare(stored)
                    width = _WIDTHS[found.element_size()]
                    if not torch.equal(found.contiguous().view(width), expected.contiguous().view(width)):
                        raise RuntimeError("its results differ from the preparation's")
        except Exception as error:  # a missing compiler shows itself in many ways
            self.is_usable = False
            warnings.warn(
                f"images are prepared in several passes on {device}, not in one: {type(error).__name__}: {error}",
                stacklevel=2,
            )

    def look_up(self, images: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
        """Prepare images.

        Args:
            images: uint8 (N, C, H, W) on the table's device, any strides.
            memory_format: Of the result: `torch.contiguous_format` or `torch.channels_last`.

        Returns:
            (N, C, H, W) of the table's dtype. On CUDA the work is on the current stream, without synchronisation.
        """
        out = torch.empty(images.shape, dtype=self._table.dtype, device=images.device, memory_format=memory_format)
        if self._kernel is not None:
            # A kernel goes through the pixels by one stride.
            flat = images if images.stride(2) == images.shape[3] * images.stride(3) else images.contiguous()
            self._kernel(flat, self._table, out)
            return out
        width = _WIDTHS[self._table.element_size()]
        table, bytes_, result = self._table.view(width).numpy(), images.numpy(), out.view(width).numpy()
        # A channel, and an image, at a time: what is looked up is still in the cache when it is put into place.
        for channel in range(images.shape[1]):
            entries = np.ascontiguousarray(table[channel])
            for number in range(images.shape[0]):
                result[number, channel] = entries[bytes_[number, channel]]
        return out
