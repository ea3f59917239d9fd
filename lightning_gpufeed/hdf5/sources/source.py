"""What packing needs to know of a source: its rows, their names, and whether it changed.

A source has `num_samples` rows in one or more fields. The writer never asks what lies behind it::

    open_source("photos/")  ─┐
    open_source("x.npz")    ─┼─>  Source.read(indices) -> SourceRows  ─>  checks, quantisation  ─>  file
    open_source("a.b:Data") ─┘
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import PackError

__all__ = [
    "FieldSpec",
    "ImageLayout",
    "RowError",
    "Source",
    "SourceOptions",
    "SourceRows",
    "check_dtype",
    "common_length",
    "file_identity",
    "guess_layout",
    "image_attributes",
    "select_keys",
    "take_rows",
]

ImageLayout = Literal["NCHW", "NHWC", "NHW"]

# Grey, grey + alpha, RGB and RGB + alpha: an axis this short is taken for the channels.
_MAX_CHANNELS = 4


@dataclass(frozen=True)
class FieldSpec:
    """Shape and type of one field of a source.

    Attributes:
        sample_shape: Shape of one row, without the axis of the rows; `()` for a scalar label.
        dtype: NumPy type of the rows that `Source.read` returns, in this machine's byte order.

    Example:
        >>> FieldSpec((3, 16, 16), np.dtype("uint8")).sample_bytes
        768
    """

    sample_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def sample_bytes(self) -> int:
        """Size of one row in bytes."""
        return int(np.prod(self.sample_shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def is_image_like(self) -> bool:
        """Whether a row has two or more axes, so that it is stored as uint8 unless told otherwise."""
        return len(self.sample_shape) >= 2


@dataclass(frozen=True)
class RowError:
    """One row that could not be read.

    Attributes:
        index: Number of the row in the source.
        name: Its name for people, such as the path of an image.
        reason: Why it could not be read.

    Example:
        >>> RowError(7, "photos/kind1/7.png", "the file is truncated").index
        7
    """

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class SourceRows:
    """Rows read from a source.

    Attributes:
        indices: int64 `(num_rows,)`, the rows that could be read, in the order they were asked for.
        values: Per field an array `(num_rows, *sample_shape)`.
        errors: The rows that could not be read.

    Example:
        >>> SourceRows(np.array([4, 2]), {"labels": np.array([1, 0])}).errors
        []
    """

    indices: npt.NDArray[np.int64]
    values: dict[str, npt.NDArray[Any]]
    errors: list[RowError] = field(default_factory=list)


@runtime_checkable
class Source(Protocol):
    """Rows by index. `pack` takes any object of this shape, not only those that `open_source` makes.

    Attributes:
        num_samples: Number of rows.
        fields: Key to `FieldSpec`; the keys become the datasets of the packed file.
        attributes: Key to what is known of that field: `layout`, `class_names`, `scale`, `offset`.
        identity: Changes whenever the rows or their order do; an interrupted packing goes on only with the
            source it began with.
        is_thread_safe: Whether two threads may call `read` at once, so that reading and writing overlap.
        most_rows_per_read: Largest number of rows `pack` asks for at once. Progress is saved between two reads, so a
            source that takes long for a row keeps this small.

    Example:
        >>> class Squares:
        ...     num_samples, most_rows_per_read, is_thread_safe = 100, 64, True
        ...     fields = {"square": FieldSpec((), np.dtype("int64"))}
        ...     attributes = {"square": {}}
        ...     identity = "squares, version 1"
        ...
        ...     def read(self, indices):
        ...         return SourceRows(indices, {"square": indices**2})
        ...
        ...     def close(self):
        ...         pass
        >>> isinstance(Squares(), Source)    # `pack(Squares(), "squares.h5")` stores it
        True
    """

    num_samples: int
    fields: dict[str, FieldSpec]
    attributes: dict[str, dict[str, Any]]
    identity: str
    is_thread_safe: bool
    most_rows_per_read: int

    def read(self, indices: npt.NDArray[np.int64]) -> SourceRows:
        """Read the rows `indices` (int64, any order).

        Args:
            indices: int64 `(num_rows,)`.

        Returns:
            The rows that could be read, and those that could not.
        """
        ...

    def close(self) -> None:
        """Give back files and processes; a second call does nothing."""
        ...


@dataclass(frozen=True)
class SourceOptions:
    """How a source is to be opened; each kind of source refuses the options that mean nothing to it.

    Attributes:
        keys: Fields to take; None takes all.
        split: `"train"` or `"test"`, for a folder that holds several MNIST-style pairs.
        resize: Image files: length of the shorter side, or exact `(height, width)`, in pixels.
        crop: Image files: side of a centred square, or `(height, width)`, in pixels.
        mode: Image files: `"RGB"` or `"L"` (grey).
        layout: Image files: axis order to write. Arrays: used where the shape leaves the axis order open.
        num_workers: Image files: decoding processes; 0 decodes in this one; None takes one per usable CPU,
            unless there are so few images that starting them would take longer.

    Example:
        >>> SourceOptions(resize=256, crop=224, mode="L").crop
        224
    """

    keys: tuple[str, ...] | None = None
    split: str | None = None
    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, int] | None = None
    mode: str = "RGB"
    layout: ImageLayout = "NCHW"
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.keys is not None:
            keys = (self.keys,) if isinstance(self.keys, str) else tuple(dict.fromkeys(self.keys))
            if not keys:
                raise ValueError("keys is empty; name at least one field, or leave it out to take all")
            object.__setattr__(self, "keys", keys)
        if self.split not in (None, "train", "test"):
            raise ValueError(f'split is {self.split!r}; expected "train" or "test"')
        for name in ("resize", "crop"):
            object.__setattr__(self, name, _pixels(name, getattr(self, name)))
        if self.mode not in ("RGB", "L"):
            raise ValueError(f'mode is {self.mode!r}; expected "RGB" or "L"')
        if self.layout not in ("NCHW", "NHWC"):
            raise ValueError(f'layout is {self.layout!r}; expected "NCHW" or "NHWC"')
        if self.num_workers is not None and self.num_workers < 0:
            raise ValueError(f"num_workers is {self.num_workers}; expected 0 or more")

    def refuse(self, names: Iterable[str], what: str) -> None:
        """Refuse options that were given but mean nothing for this source.

        Args:
            names: Options without meaning here.
            what: What the source is, for the message.

        Raises:
            ValueError: One of them is not at its default.
        """
        for name in names:
            given = getattr(self, name)
            if given != getattr(SourceOptions, name):
                raise ValueError(f"{name}={given!r} means nothing for {what}; leave it out")


def _pixels(name: str, value: Any) -> int | tuple[int, int] | None:
    """A size option as given by people or by JSON, checked."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value):
        return (value[0], value[1])
    raise ValueError(f"{name} is {value!r}; expected a number of pixels or (height, width), each at least 1")


def file_identity(path: str | os.PathLike[str]) -> str:
    """Name, size and time of last change of a file: equal as long as nobody has written to it.

    Args:
        path: An existing file.

    Returns:
        Text to compare with.
    """
    status = os.stat(path)
    return f"{os.path.realpath(path)}:{status.st_size}:{status.st_mtime_ns}"


def guess_layout(sample_shape: tuple[int, ...], fallback: ImageLayout) -> ImageLayout | None:
    """Tell the axis order of an image array by its one short axis.

    Args:
        sample_shape: Shape of one row.
        fallback: Taken for three axes when both or neither of first and last can be the channels.

    Returns:
        `"NHW"` for two axes, one of the others for three, None for fewer or more.
    """
    if len(sample_shape) == 2:
        return "NHW"
    if len(sample_shape) != 3:
        return None
    is_first, is_last = sample_shape[0] <= _MAX_CHANNELS, sample_shape[2] <= _MAX_CHANNELS
    if is_first != is_last:
        return "NCHW" if is_first else "NHWC"
    return fallback


def image_attributes(fields: Mapping[str, FieldSpec], fallback: ImageLayout) -> dict[str, dict[str, Any]]:
    """Attributes of array fields: the layout of those that can be images.

    Args:
        fields: The fields of a source.
        fallback: See `guess_layout`.

    Returns:
        Key to attributes; every key is there.
    """
    layouts = {key: guess_layout(spec.sample_shape, fallback) for key, spec in fields.items()}
    return {key: {} if layout is None else {"layout": layout} for key, layout in layouts.items()}


def check_dtype(key: str, dtype: np.dtype[Any], where: str) -> np.dtype[Any]:
    """Refuse what has no fixed size or no meaning as a number.

    Args:
        key: Name of the field.
        dtype: Its type in the source.
        where: The source, for the message.

    Returns:
        The same type in this machine's byte order.

    Raises:
        PackError: Text, objects, times and records.
    """
    if dtype.kind not in "biufc":
        raise PackError(
            f"{key!r} in {where} holds {_describe(dtype)}, which cannot be packed; expected numbers. "
            "Leave it out by naming the other fields: keys=[...] (--keys)"
        )
    return dtype.newbyteorder("=")


def _describe(dtype: np.dtype[Any]) -> str:
    """A type in words."""
    words = {"O": "Python objects", "U": "text", "S": "bytes", "M": "dates", "m": "durations", "V": "records"}
    return f"{words.get(dtype.kind, 'values')} ({dtype})"


def common_length(lengths: Mapping[str, int], where: str) -> int:
    """The one length that all fields have.

    Args:
        lengths: Key to number of rows.
        where: The source, for the message.

    Returns:
        The number of rows.

    Raises:
        PackError: Lengths differ, or there are no rows.
    """
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key!r} has {length}" for key, length in lengths.items())
        raise PackError(
            f"the fields of {where} differ in length: {listed}; expected one row per sample in each. "
            "Choose those that belong together: keys=[...] (--keys)"
        )
    length = next(iter(lengths.values()), 0)
    if length == 0:
        raise PackError(f"{where} holds no samples, so there is nothing to pack")
    return length


def select_keys(available: Sequence[str], keys: tuple[str, ...] | None, where: str) -> list[str]:
    """The fields to take, in the order asked for.

    Args:
        available: Keys of the source.
        keys: Keys asked for; None takes all.
        where: The source, for the message.

    Returns:
        The keys.

    Raises:
        PackError: A key that is not there, or no fields at all.
    """
    if not available:
        raise PackError(f"{where} holds no arrays, so there is nothing to pack")
    missing = [key for key in keys or () if key not in available]
    if missing:
        raise PackError(f"{where} has no {missing[0]!r}; it has {', '.join(map(repr, available))}")
    return list(available if keys is None else keys)


def take_rows(array: npt.NDArray[Any], indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Rows of an array; a run of neighbours is sliced, which spares a copy and reads a memory map in order.

    Args:
        array: `(num_samples, ...)`.
        indices: int64 `(num_rows,)`.

    Returns:
        `(num_rows, ...)`, possibly a view.
    """
    first, num_rows = int(indices[0]), len(indices)
    if int(indices[-1]) - first == num_rows - 1 and bool((np.diff(indices) == 1).all()):
        return array[first : first + num_rows]
    return array[indices]
