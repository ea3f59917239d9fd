"""Turns a batch of stored images into what a model expects, on the device the batch is on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_gpufeed.device.byte_lookup import ByteTable

__all__ = ["ImageLayout", "ImagePreparation"]

ImageLayout = Literal["NCHW", "NHWC", "NHW"]

_WORTH_A_TABLE = 1024
"""Values a channel from which on a table of 256 is worth its making."""

_TABLE_DEVICES = ("cpu", "cuda")

_FULL_SCALE = {torch.uint8: 255.0, torch.uint16: 65535.0, torch.bool: 1.0}


@dataclass
class ImagePreparation:
    """Axes, scale and normalisation, in that order.

    In float32 the result is bitwise what dividing by 255, subtracting the mean and dividing by the standard
    deviation give one after the other, which is also what torchvision's `ToTensor` and `Normalize` do. Half
    precision is rounded once, from that; float64 is computed in float64.

    Bytes are looked up in a table of these results, in one pass; everything else takes a pass a step.

    All work happens on the batch's device and its current stream, without host synchronisation after the
    first batch on a device.

    Attributes:
        layout: Axes of the stored images.
        mean: Per channel, in units of the scaled image; None leaves it.
        std: Per channel; None leaves it.
        scale: Quantisation step: the image is `stored * scale + offset`. None: unsigned integers are divided by their
            largest value, floats are left.
        offset: See `scale`.
        dtype: Floating point type of the result.
        channels_last: Whether the result is in channels-last memory order.
    """

    layout: ImageLayout
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    scale: float | None = None
    offset: float = 0.0
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    _constants: dict[tuple[torch.device, torch.dtype, tuple[float, ...]], torch.Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )
    _tables: dict[tuple[Any, ...], ByteTable] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is computed again where it is needed."""
        return {**self.__dict__, "_constants": {}, "_tables": {}}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Prepare a batch; the batch itself is not changed.

        Args:
            images: (N, C, H, W), (N, H, W, C) or (N, H, W) as `layout` says, any dtype and device.

        Returns:
            (N, C, H, W) of `dtype` on the same device.
        """
        if self.layout == "NHWC":
            images = images.permute(0, 3, 1, 2)
        elif self.layout == "NHW":
            images = images.unsqueeze(1)
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        is_worth_it = images.numel() >= _WORTH_A_TABLE * images.shape[1]
        if images.dtype is torch.uint8 and images.device.type in _TABLE_DEVICES and is_worth_it:
            key = (images.device, images.shape[1], self.dtype, self.mean, self.std, self.scale, self.offset)
            if key not in self._tables:
                self._tables[key] = ByteTable(self._in_steps, images.shape[1], images.device)
            if self._tables[key].is_usable:
                return self._tables[key].look_up(images, memory_format)
        return self._in_steps(images)

    def _in_steps(self, images: torch.Tensor) -> torch.Tensor:
        """The preparation as it is defined: (N, C, H, W) of any type, a pass for each step."""
        working = torch.float64 if self.dtype is torch.float64 else torch.float32
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        # One pass changes type and memory order together; from here on the tensor is ours to change in place.
        result = images.to(dtype=working, memory_format=memory_format, copy=True)
        if self.scale is not None:
            result.mul_(self.scale).add_(self.offset)
        elif images.dtype in _FULL_SCALE:
            # By a tensor on the device: CUDA divides by a plain number by multiplying with its inverse, which is off by
            # one bit for half of the 256 values.
            result.div_(self._on(images.device, working, (_FULL_SCALE[images.dtype],)))
        if self.mean is not None:
            result.sub_(self._on(images.device, working, self.mean))
        if self.std is not None:
            result.div_(self._on(images.device, working, self.std))
        return result.to(self.dtype)

    def _on(self, device: torch.device, dtype: torch.dtype, numbers: tuple[float, ...]) -> torch.Tensor:
        """Numbers per channel, or one for all, as a tensor (C, 1, 1) on a device, made once."""
        key = (device, dtype, numbers)
        if key not in self._constants:
            self._constants[key] = torch.tensor(numbers, dtype=dtype, device=device).view(-1, 1, 1)
        return self._constants[key]
