"""What the numbers of an image dataset mean: axes, scale, and numbers per channel. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lightning_gpufeed.device.images import ImageLayout
from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.quantize import Affine
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["affine_of", "class_names_of", "common_layout", "image_layout", "per_channel"]


def affine_of(layout: H5DatasetLayout) -> Affine | None:
    """Steps of a quantised image dataset.

    Args:
        layout: Of the images.

    Returns:
        Scale and offset if `pack` wrote them; attributes of these names in other files may mean anything.
    """
    if not layout.is_packed or "scale" not in layout.attributes:
        return None
    return Affine(float(layout.attributes["scale"]), float(layout.attributes.get("offset", 0.0)))


def class_names_of(sources: Iterable[H5Source]) -> list[str] | None:
    """Names of the classes by number.

    Args:
        sources: Sources that may have a field `label`.

    Returns:
        The attribute `class_names` of the labels; None if no file has it.

    Raises:
        LayoutError: Two files give the same numbers to other classes.
    """
    first: tuple[list[str], str] | None = None
    for layout in (layout for source in sources for layout in source.fields.get("label", ())):
        stored = layout.attributes.get("class_names")
        if stored is None:
            continue
        names = [name.decode() if isinstance(name, bytes) else str(name) for name in np.atleast_1d(stored)]
        if first is None:
            first = names, layout.path
        elif names != first[0]:
            number = next((n for n, (a, b) in enumerate(zip(names, first[0], strict=False)) if a != b), None)
            what = f"class {number} is {names[number]!r}" if number is not None else f"there are {len(names)} classes"
            there = f"{first[0][number]!r}" if number is not None else f"{len(first[0])}"
            raise LayoutError(
                f"{layout.path}: {what}, but {there} in {first[1]}: the same label means something else. Pack both "
                f"from the same set of class folders."
            )
    return None if first is None else first[0]


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
            is_meant = name == "layout" or (first.is_packed and other.is_packed)
            here, there = (np.asarray(one.attributes.get(name)).tolist() for one in (first, other))
            if is_meant and here != there:
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
    if not layout.is_tensor:
        raise LayoutError(
            f"{layout.path}: images {layout.key!r} hold encoded bytes, or arrays of different sizes, of type "
            f"{'text' if layout.is_text else 'variable length'}; expected arrays of one shape. Write a Dataset that "
            f"decodes them, and pack that: gpufeed pack package.module:dataset OUT.h5"
        )
    if layout.dtype.kind == "c":
        raise LayoutError(
            f"{layout.path}: images {layout.key!r} hold complex numbers ({layout.dtype}), of which an image would only "
            f"keep the real part. Use H5DataModule, which hands them on as they are, or store real and imaginary part "
            f"as two channels."
        )
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
    try:
        numbers = np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if len(numbers) not in (1, channels) or not np.isfinite(numbers).all():
        raise ValueError(
            f"{name} is {repr(value)[:100]}; expected one finite number, or one for each of {channels} channels."
        )
    return tuple(float(number) for number in np.broadcast_to(numbers, (channels,)))
