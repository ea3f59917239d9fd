"""What becomes of the values of a field on their way to the file, and their statistics. Pure: no files.

Images are stored as uint8. A cast that changes values is never made unasked: values in [0, 1] would all
become zeros, larger ones would wrap around. What can be asked for::

    scale=255          round(value * 255), for floats in [0, 1]
    quantize=(lo, hi)  the 256 steps between lo and hi; `scale` and `offset` are kept in the file
    keep_dtype=True    values as they are
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.sources.source import FieldSpec

__all__ = [
    "Affine",
    "Conversion",
    "convert",
    "finite_range",
    "plan_conversions",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Affine:
    """The 256 evenly spaced values from `offset` to `offset + 255 * scale`.

    Attributes:
        scale: Distance of two neighbours.
        offset: Value that 0 stands for.
    """

    scale: float
    offset: float

    @classmethod
    def fit(cls, low: float, high: float) -> Affine:
        """Spread the 256 steps over a range.

        Args:
            low: Value to be stored as 0.
            high: Value to be stored as 255; equal to `low` when all values are the same.

        Returns:
            The steps.

        Raises:
            ValueError: Not finite, `low` above `high`, or a range too wide for float64.
        """
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(f"the range to quantise is ({low}, {high}); expected low <= high, both finite")
        if not math.isfinite(high - low):
            raise ValueError(f"the range to quantise, ({low}, {high}), is wider than float64 can hold")
        scale = (high - low) / 255
        # A constant has no range: any scale will do, as all are stored as 0. So will it below normal numbers,
        # where dividing by the scale would have no precision left.
        return cls(scale if scale >= np.finfo(np.float64).tiny else 1.0, low)

    def encode(self, values: Array) -> npt.NDArray[np.uint8]:
        """The nearest steps.

        Args:
            values: Numbers within the range, any shape.

        Returns:
            uint8 of the same shape.
        """
        steps = (values.astype(np.float64) - self.offset) / self.scale
        # Rounding of the division may leave the ends by less than one part in 10**13.
        return np.clip(np.rint(steps), 0, 255).astype(np.uint8)

    def decode(self, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
        """The values that the steps stand for.

        Args:
            stored: uint8, any shape.

        Returns:
            float64 of the same shape, at most half a step from what was encoded.
        """
        return stored.astype(np.float64) * self.scale + self.offset


@dataclass(frozen=True)
class Conversion:
    """What to do with the values of one field.

    Attributes:
        kind: `"keep"` stores as is; `"cast"` takes whole numbers in 0..255; `"scale"` rounds
            `value * factor`; `"affine"` takes the nearest of 256 steps between `low` and `high`; `"refuse"`
            explains what is wrong with floats.
        dtype: NumPy type in the file.
        factor: For `"scale"`.
        low: For `"affine"`; None until the range is known.
        high: For `"affine"`; None until the range is known.
    """

    kind: Literal["keep", "cast", "scale", "affine", "refuse"]
    dtype: np.dtype[Any]
    factor: float = 1.0
    low: float | None = None
    high: float | None = None

    @property
    def affine(self) -> Affine | None:
        """The steps of a quantised field whose range is known."""
        if self.kind != "affine" or self.low is None or self.high is None:
            return None
        return Affine.fit(self.low, self.high)


def plan_conversions(
    fields: Mapping[str, FieldSpec],
    *,
    scale: float | None = None,
    quantize: Literal["auto"] | tuple[float, float] | None = None,
    keep_dtype: bool = False,
) -> dict[str, Conversion]:
    """Decide for each field what happens to its values.

    `scale` and `quantize` are for the image-like fields of floats, or else for those of whole numbers other
    than uint8; labels and masks beside float images stay out of it.

    Args:
        fields: Key to shape and type.
        scale: Factor to multiply with before rounding.
        quantize: Range to spread 256 steps over; `"auto"` leaves it open until the values were seen.
        keep_dtype: Store image-like fields as they are.

    Returns:
        Key to conversion.

    Raises:
        ValueError: Two of the options at once, or one with a value that cannot be meant.
        PackError: An option was given, but no field is there for it.
    """
    _check_options(scale, quantize, keep_dtype)
    images = {key: spec for key, spec in fields.items() if spec.is_image_like}
    floats = [key for key, spec in images.items() if spec.dtype.kind == "f"]
    targets = floats or [key for key, spec in images.items() if spec.dtype.kind in "iu" and spec.dtype != np.uint8]
    if (scale is not None or quantize is not None) and not targets:
        option = "scale" if scale is not None else "quantize"
        listed = ", ".join(f"{key!r}: {spec.dtype} {spec.sample_shape}" for key, spec in fields.items())
        raise PackError(
            f"{option} was given, but there are no images of floats or wide integers to apply it to "
            f"({listed}); leave {option} out"
        )
    planned = {key: _plan(spec, keep_dtype) for key, spec in fields.items()}
    uint8 = np.dtype(np.uint8)
    if scale is not None:
        planned |= {key: Conversion("scale", uint8, factor=float(scale)) for key in targets}
    elif quantize == "auto":
        planned |= {key: Conversion("affine", uint8) for key in targets}
    elif quantize is not None:
        low, high = map(float, quantize)
        planned |= {key: Conversion("affine", uint8, low=low, high=high) for key in targets}
    return planned


def _check_options(scale: float | None, quantize: Any, keep_dtype: bool) -> None:
    """Refuse contradictions and values without meaning."""
    given = {"scale": scale is not None, "quantize": quantize is not None, "keep_dtype": keep_dtype}
    if sum(given.values()) > 1:
        names = " and ".join(name for name, is_given in given.items() if is_given)
        raise ValueError(f"{names} exclude each other; give one")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; expected a finite number above 0, such as 255")
    if quantize is None or quantize == "auto":
        return
    if isinstance(quantize, str) or len(quantize) != 2:
        raise ValueError(f'quantize is {quantize!r}; expected "auto" or (low, high)')
    Affine.fit(*map(float, quantize))


def _plan(spec: FieldSpec, keep_dtype: bool) -> Conversion:
    """The conversion of a field for which nothing was asked."""
    if not spec.is_image_like:
        is_label = spec.sample_shape == () and spec.dtype.kind in "iu"
        return Conversion("keep", np.dtype(np.int64) if is_label else spec.dtype)
    # Booleans take a byte as they are, and mean 0 and 1, not the two darkest of 256 greys.
    if keep_dtype or spec.dtype in (np.uint8, np.bool_):
        return Conversion("keep", spec.dtype)
    return Conversion("cast" if spec.dtype.kind in "iu" else "refuse", np.dtype(np.uint8))


def convert(values: Array, conversion: Conversion, key: str, indices: npt.NDArray[np.int64]) -> Array:
    """Values as they go into the file.

    Args:
        values: `(num_rows, *sample_shape)`.
        conversion: What to do.
        key: Name of the field, for messages.
        indices: int64 `(num_rows,)`, the rows' places in the source, for messages.

    Returns:
        C-contiguous array of `conversion.dtype`, same shape.

    Raises:
        PackError: A value that cannot be stored; the message names the first such sample.
        ValueError: The range of an automatic quantisation is still open.
    """
    if conversion.kind == "refuse":
        raise PackError(_explain_floats(values, key))
    if conversion.kind == "keep":
        if values.dtype == np.uint64 and conversion.dtype == np.int64:
            _refuse_outside(values, 0, np.iinfo(np.int64).max, key, indices, "the labels' int64")
        return np.ascontiguousarray(values, conversion.dtype)
    advice = "convert the values first, or give scale, quantize or keep_dtype (--scale, --quantize, --keep-dtype)"
    if conversion.kind == "cast":
        if values.dtype.kind != "b":
            _refuse_outside(values, 0, 255, key, indices, f"uint8; {advice}")
        return np.ascontiguousarray(values, np.uint8)
    _refuse_not_finite(values, key, indices)
    if conversion.kind == "scale":
        scaled = np.rint(values.astype(np.float64) * conversion.factor)
        _refuse_outside(
            scaled,
            0,
            255,
            key,
            indices,
            f"uint8 after scale={conversion.factor:g}; give a smaller scale",
            values,
        )
        return np.ascontiguousarray(scaled, np.uint8)
    affine = conversion.affine
    if affine is None:
        raise ValueError(f"the range of {key!r} is not known yet; see finite_range")
    _refuse_outside(values, conversion.low, conversion.high, key, indices, "quantize; give a wider range or 'auto'")
    return np.ascontiguousarray(affine.encode(values))


def finite_range(values: Array, key: str, indices: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Smallest and largest value.

    Args:
        values: `(num_rows, *sample_shape)`, at least one value.
        key: Name of the field, for messages.
        indices: int64 `(num_rows,)`, the rows' places in the source, for messages.

    Returns:
        `(low, high)`. NaN and infinities raise `PackError` with the first such sample.
    """
    _refuse_not_finite(values, key, indices)
    return float(values.min()), float(values.max())


def _explain_floats(values: Array, key: str) -> str:
    """Why floats are not cast, and what to do instead, by what the values look like."""
    choices = (
        "quantize='auto' (--quantize auto) keeps 256 evenly spaced steps of any range, "
        "keep_dtype=True (--keep-dtype) stores them as they are"
    )
    found = f"{key!r} holds {values.dtype} values"
    if values.dtype.kind != "f":
        return f"{found}, which uint8 cannot hold; keep_dtype=True (--keep-dtype) stores them as they are"
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() >= 0 and finite.max() <= 1:
        return (
            f"{found} in [0, 1]; images are stored as uint8, and casting would store zeros. "
            f"scale=255 (--scale 255) stores round(255 * value); {choices}"
        )
    span = f" in [{finite.min():g}, {finite.max():g}]" if finite.size else ""
    return (
        f"{found}{span} (first samples); images are stored as uint8, and casting would change them. "
        f"scale=1 (--scale 1) rounds values that lie in 0..255; {choices}"
    )


def _refuse_not_finite(values: Array, key: str, indices: npt.NDArray[np.int64]) -> None:
    """Name the first sample with NaN or an infinity."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row, value = _first(~np.isfinite(values), values)
        raise PackError(f"sample {indices[row]} of {key!r} holds {value}; expected finite values. Clean the source")


def _refuse_outside(
    values: Array,
    low: float | None,
    high: float | None,
    key: str,
    indices: npt.NDArray[np.int64],
    what: str,
    shown: Array | None = None,
) -> None:
    """Name the first sample with a value outside [low, high]."""
    with np.errstate(over="ignore"):
        # In the values' own type: 0.1 as float32 lies above 0.1 as float64, but not outside a range given as 0.1.
        bounds = np.array([low, high]).astype(values.dtype) if values.dtype.kind == "f" else (low, high)
    if values.size and (values.min() < bounds[0] or values.max() > bounds[1]):
        row, value = _first((values < bounds[0]) | (values > bounds[1]), values if shown is None else shown)
        raise PackError(f"sample {indices[row]} of {key!r} holds {value}, outside {low:g}..{high:g} of {what}")


def _first(is_wrong: npt.NDArray[np.bool_], values: Array) -> tuple[int, Any]:
    """Row and value of the first wrong value."""
    place = int(np.flatnonzero(is_wrong)[0])
    return place // (is_wrong.size // len(is_wrong)), values.reshape(-1)[place]
