"""What `examine` says about some values of each array: zeros, damaged chunks, floats that bytes could hold."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.doctor.findings import Finding, Severity
from lightning_gpufeed.hdf5.keys import ArrayInfo
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout
from lightning_gpufeed.hdf5.repack.inputs import image_file_kind
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["value_findings"]

Array = npt.NDArray[Any]

_NUM_SAMPLES = 16
_NUM_ZERO_SAMPLES = 1024
_MOST_BYTES = 64 << 20
_MOST_CHUNK_BYTES = 256 << 20
_SMALL_BYTES = 1 << 20
_MASK_WORDS = {"mask", "masks", "label", "labels", "y", "target", "targets", "segmentation", "flag", "flags"}


def value_findings(layouts: Sequence[H5DatasetLayout], path: str) -> Iterator[Finding]:
    """Look at some samples of each array.

    Args:
        layouts: Arrays that can be used.
        path: The file, as the user named it.

    Yields:
        Findings.
    """
    for layout in layouts:
        if not layout.num_samples:
            continue
        if not layout.is_tensor:
            yield from _encoded(layout)
        elif layout.sample_bytes and layout.num_missing_chunks == 0 and _is_quick(layout):
            yield from _judge(layout, layouts, path)


def _is_quick(layout: H5DatasetLayout) -> bool:
    """Whether a sample can be read without decoding more than fits in a small part of the memory."""
    return layout.engine is Engine.RAW or (layout.chunk_bytes or 0) <= _MOST_CHUNK_BYTES


def _encoded(layout: H5DatasetLayout) -> Iterator[Finding]:
    """Image files in rows of bytes."""
    if (kind := image_file_kind(layout)) is not None:
        seen = f"{kind} files of different lengths"
        why = "A loader keeps them all in memory as bytes, and decodes none."
        cure = "gpufeed pack package.module:dataset OUT.h5  # a Dataset that returns the decoded images"
        yield Finding(Severity.WARNING, "encoded", seen, why, cure, layout.key)


def _judge(layout: H5DatasetLayout, layouts: Sequence[H5DatasetLayout], path: str) -> Iterator[Finding]:
    """Numbers."""
    try:
        values = _some_values(layout, _NUM_SAMPLES)
        if not len(layout.sample_shape) >= 2:
            return  # labels and the like; read above because a damaged chunk matters anywhere
        if values.dtype == np.uint8:
            yield from _zeros(layout, values)
        elif values.dtype.kind in "iuf":
            yield from _wide(layout, values, layouts, path)
    except FeedError as error:
        seen = str(error).removeprefix(f"{layout.path}: ")
        why = "Training stops there, in the middle of an epoch."
        yield Finding(Severity.PROBLEM, "damaged", seen, why, "copy or write the file again", layout.key)


def _some_values(layout: H5DatasetLayout, most: int) -> Array:
    """Samples from all over the array."""
    num = max(1, min(most, _MOST_BYTES // layout.sample_bytes, layout.num_samples))
    picked = np.unique(np.linspace(0, layout.num_samples - 1, num).round().astype(np.int64))
    with closing(H5Source(layout.path, [layout.key])) as source:
        values: Array = source.read_field(layout.key, picked).numpy()
    return values


def _zeros(layout: H5DatasetLayout, values: Array) -> Iterator[Finding]:
    """Floats in [0, 1] that somebody stored in uint8 are zeros, and ones where they were exactly 1."""
    words = ArrayInfo(layout.key, layout.shape, "u").words
    if values.max() > 1 or _MASK_WORDS & set(words):
        return
    values = _some_values(layout, _NUM_ZERO_SAMPLES)
    if values.max() > 1:
        return
    why = "uint8 made of floats in [0, 1] without scaling looks like this: the images are lost."
    cure = "gpufeed pack ORIGINAL OUT.h5 --scale 255"
    if values.max() == 0:
        seen = f"all of {len(values):,} samples looked at are zeros"
        yield Finding(Severity.PROBLEM, "values", seen, why, cure, layout.key)
    else:
        seen = f"{len(values):,} samples looked at hold zeros and ones only"
        yield Finding(Severity.NOTICE, "values", seen, f"Unless these are masks, {why}", cure, layout.key)


def _wide(layout: H5DatasetLayout, values: Array, layouts: Sequence[H5DatasetLayout], path: str) -> Iterator[Finding]:
    """Numbers that take more bytes than they need."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        seen, why = "NaN or infinity among its values", "One such sample can make a whole model NaN."
        cure = "clean the source, or mask them in the transform"
        yield Finding(Severity.NOTICE, "values", seen, why, cure, layout.key)
        return
    is_worth_it = layout.dtype.itemsize > 1 and layout.total_bytes > _SMALL_BYTES
    if not is_worth_it or values.min() < 0 or values.max() > 255:
        return
    option = ""
    if values.dtype.kind == "f":
        factor = 255 if values.max() <= 1 else 1
        scaled = values.astype(np.float64) * factor
        # Rounding to float32 moves k / 255 by less than this.
        if (np.abs(scaled - np.rint(scaled)) > 255 * np.finfo(values.dtype).eps).any():
            return
        option = f" --scale {factor}"
    together = [one.key for one in layouts if one.is_tensor and one.num_samples == layout.num_samples]
    keys = "" if len(together) == len(layouts) else f" --keys {shlex.quote(','.join(together))}"
    yield Finding(
        Severity.WARNING,
        "values",
        f"{values.dtype} values that uint8 holds exactly, by {len(values)} samples looked at",
        f"They take {values.dtype.itemsize} times the disk, memory and transfer to the GPU.",
        f"gpufeed pack {shlex.quote(path)} OUT.h5{keys}{option}",
        layout.key,
    )
