"""What the numbers of an image dataset mean: axes, scale, and numbers per channel. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_gpufeed.device.images import ImageLayout
from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["common_layout", "image_layout", "per_channel"]


def common_layout(source: H5Source) -> H5DatasetLayout:
    """Layout of the images of a source, after making sure that all its files mean the same by their numbers.

    Args:
        source: Has a field `image`.

    Returns:
        Layout in the first file.

    Raises:
        LayoutError: Files differ in `layout`, `scale` or `offset`.
    """
    first, *others = source.fields["image"]
    for other in others:
        for name in ("layout", "scale", "offset"):
            here, there = (np.asarray(one.attributes.get(name)).tolist() for one in (first, other))
            if here != there:
                raise LayoutError(
                    f"{other.path}: images {other.key!r} have the attribute {name} = {there!r}, but {first.path} has "
                    f"{here!r}. Files used as one dataset must agree; pack them alike."
                )
    return first


def image_layout(layout: H5DatasetLayout, wanted: str) -> ImageLayout:
    """Axes of the stored images, given or judged.

    Args:
        layout: Of the images.
        wanted: "NCHW", "NHWC", "NHW", or "auto": the attribute `layout`, else by the shape.

    Returns:
        The axes.

    Raises:
        LayoutError: The shape leaves it open, or does not fit.
    """
    shape = layout.sample_shape
    stored = layout.attributes.get("layout")
    stored = stored.decode() if isinstance(stored, bytes) else stored
    choice = wanted if wanted != "auto" else str(stored) if stored in ("NCHW", "NHWC", "NHW") else None
    if choice is None and len(shape) == 2:
        choice = "NHW"
    if choice is None and len(shape) == 3:
        first, last = shape[0] in (1, 2, 3, 4), shape[2] in (1, 2, 3, 4)
        choice = "NCHW" if first and not last else "NHWC" if last and not first else None
    if choice is None or len(shape) != len(choice) - 1:
        raise LayoutError(
            f"{layout.path}: images {layout.key!r} have samples of shape {shape}, whose axes are "
            f"{'not clear' if choice is None else f'not {choice}'}. Give image_layout='NCHW', 'NHWC' or 'NHW'."
        )
    return choice  # type: ignore[return-value]


def per_channel(name: str, value: Any, channels: int) -> tuple[float, ...]:
    """One number per channel.

    Args:
        name: For the message.
        value: A number or one for each channel.
        channels: How many channels there are.

    Returns:
        That many numbers.

    Raises:
        ValueError: It is neither.
    """
    numbers = np.asarray(value, dtype=np.float64).reshape(-1)
    if len(numbers) not in (1, channels) or not np.isfinite(numbers).all():
        raise ValueError(f"{name} is {value!r}; expected one finite number, or one for each of {channels} channels.")
    return tuple(float(number) for number in np.broadcast_to(numbers, (channels,)))
