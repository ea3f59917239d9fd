"""The CUDA kernel of `lightning_gpufeed.device.byte_lookup`: one byte read, one number written. Needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["look_up"]

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _kernel(  # type: ignore[no-untyped-def]
    source, table, out, num_values, num_channels, num_pixels, by_image, by_channel, by_pixel,
    is_last: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Each program makes `block` numbers of the result, in the order in which they lie in memory."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_inside = place < num_values
    image = place // (num_channels * num_pixels)
    if is_last:
        channel = place % num_channels
        pixel = (place // num_channels) % num_pixels
    else:
        channel = (place // num_pixels) % num_channels
        pixel = place % num_pixels
    byte = tl.load(source + image * by_image + channel * by_channel + pixel * by_pixel, mask=is_inside, other=0)
    number = tl.load(table + channel * 256 + byte.to(tl.int64), mask=is_inside)
    tl.store(out + place, number, mask=is_inside)


def look_up(images: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` on the current stream.

    Args:
        images: uint8 (N, C, H, W) on a CUDA device; one stride leads from pixel to pixel.
        table: (C, 256), contiguous, on that device.
        out: (N, C, H, W) of the table's dtype, contiguous or channels last.
    """
    num_channels, height, width = images.shape[1:]
    if not images.numel():
        return
    grid: Any = (triton.cdiv(images.numel(), _BLOCK),)
    with torch.cuda.device(images.device):
        _kernel[grid](
            images, table, out, images.numel(), num_channels, height * width,
            images.stride(0), images.stride(1), images.stride(3),
            is_last=not out.is_contiguous(), block=_BLOCK,
        )  # fmt: skip
