"""Image files to arrays of one shape; runs in this process or in decoding processes.

Sizes follow torchvision (shorter side, truncated longer side, rounded centre), so that a packed file holds
the pixels that `Resize` and `CenterCrop` would have made of PIL images.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["DecodeError", "Geometry", "decode_files", "file_size", "prepare_worker"]

# Pillow's names of stored pixels with 16 bits per channel; "BGR;16" is 16 bits for all three together.
_DEEP_RAW_MODE = re.compile(r"^(?!BGR).*;16[BLNS]*$")


@dataclass(frozen=True)
class Geometry:
    """What becomes of each image; see `SourceOptions` for the fields."""

    resize: int | tuple[int, int] | None
    crop: int | tuple[int, int] | None
    mode: str
    layout: str

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Size after resizing.

        Args:
            height: Of the image, in pixels.
            width: Of the image, in pixels.

        Returns:
            Height and width in pixels.
        """
        if self.resize is None:
            return height, width
        if isinstance(self.resize, tuple):
            return self.resize
        if height <= width:
            return self.resize, max(1, int(self.resize * width / height))
        return max(1, int(self.resize * height / width)), self.resize

    @property
    def crop_size(self) -> tuple[int, int] | None:
        """Height and width to cut out, in pixels."""
        return (self.crop, self.crop) if isinstance(self.crop, int) else self.crop

    def final(self, height: int, width: int) -> tuple[int, int]:
        """Size of what is stored.

        Args:
            height: Of the image, in pixels.
            width: Of the image, in pixels.

        Returns:
            Height and width in pixels.
        """
        return self.crop_size or self.resized(height, width)

    def sample_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Shape of one stored image.

        Args:
            size: Height and width in pixels.

        Returns:
            With the channels where `layout` has them.
        """
        num_channels = 1 if self.mode == "L" else 3
        return (num_channels, *size) if self.layout == "NCHW" else (*size, num_channels)


class DecodeError(NamedTuple):
    """An image that cannot be used.

    Attributes:
        position: Its place in the list of paths.
        reason: For people.
        is_misfit: Whether it is a sound image of the wrong size, which options cure, not a bad file.
    """

    position: int
    reason: str
    is_misfit: bool


class _MisfitError(Exception):
    """A sound image whose size does not fit the others or the crop."""


def decode_files(
    paths: Sequence[str], geometry: Geometry, size: tuple[int, int]
) -> tuple[npt.NDArray[np.uint8], list[DecodeError]]:
    """Decode image files to one array.

    Args:
        paths: The files.
        geometry: What becomes of each.
        size: Height and width in pixels that all must come out with.

    Returns:
        uint8 `(num_decoded, *geometry.sample_shape(size))` without the failed ones, and the failures.
    """
    images = np.empty((len(paths), *geometry.sample_shape(size)), np.uint8)
    errors: list[DecodeError] = []
    for position, path in enumerate(paths):
        try:
            images[position - len(errors)] = _decode(path, geometry, size)
        except _MisfitError as error:
            errors.append(DecodeError(position, str(error), is_misfit=True))
        except Exception as error:  # damaged files make Pillow's format plug-ins raise nearly anything
            reason = str(error).replace(f" {path!r}", "") or type(error).__name__
            errors.append(DecodeError(position, reason, is_misfit=False))
    return images[: len(paths) - len(errors)], errors


def file_size(path: str) -> tuple[int, int]:
    """Height and width of an image file, from its header.

    Args:
        path: The file.

    Returns:
        Height and width in pixels.
    """
    with Image.open(path) as image:
        return image.height, image.width


def _decode(path: str, geometry: Geometry, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """One image file as uint8 of `geometry.sample_shape(size)`."""
    with Image.open(path) as file:
        _refuse_deep_pixels(file)
        image: Image.Image = file.convert(geometry.mode)
    resized = geometry.resized(image.height, image.width)
    if resized != (image.height, image.width):
        # Pillow's bilinear filter averages when it shrinks, which is what "antialiased" means elsewhere.
        image = image.resize((resized[1], resized[0]), Image.Resampling.BILINEAR)
    pixels = _crop(np.asarray(image), geometry.crop_size)
    if pixels.shape[:2] != size:
        raise _MisfitError(f"is {pixels.shape[0]} x {pixels.shape[1]} pixels (height x width)")
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    return pixels.transpose(2, 0, 1) if geometry.layout == "NCHW" else pixels


def _crop(pixels: npt.NDArray[np.uint8], size: tuple[int, int] | None) -> npt.NDArray[np.uint8]:
    """The centre of an image `(height, width, ...)`."""
    if size is None:
        return pixels
    height, width = pixels.shape[:2]
    if height < size[0] or width < size[1]:
        raise _MisfitError(f"is {height} x {width} pixels, smaller than the crop of {size[0]} x {size[1]}")
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    return pixels[top : top + size[0], left : left + size[1]]


def _refuse_deep_pixels(image: Image.Image) -> None:
    """Refuse more than 8 bits per channel: Pillow would clip or drop the low bits without a word."""
    is_deep = image.mode in ("I", "F") or image.mode.startswith("I;")
    # Colour images of 16 bits per channel open as plain RGB; only the tiles tell what is stored.
    for tile in getattr(image, "tile", ()):
        arguments: Any = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        is_deep |= any(isinstance(part, str) and bool(_DEEP_RAW_MODE.match(part)) for part in arguments)
        is_deep |= image.format == "PPM" and any(isinstance(part, int) and part > 255 for part in arguments)
    if is_deep:
        raise ValueError(
            f"has more than 8 bits per channel (Pillow mode {image.mode}), which uint8 cannot hold; "
            "convert it, or pack arrays with a scale"
        )


def prepare_worker() -> None:
    """Make a decoding process end with its parent, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A parent killed by SIGKILL cannot stop its pool, whose processes would wait for work for ever.
        threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()


def _exit_with(sentinel: int) -> None:
    """End this process when the other end of `sentinel` does."""
    wait([sentinel])
    os._exit(1)
