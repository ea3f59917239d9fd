"""What `repack` copies: the datasets of one or more files, joined along the first axis, read in order.

::

    a.h5  x_train (600, 3, 8, 8)  ─┐
    b.h5  x_train (400, 3, 8, 8)  ─┴─>  Column x_train (1000, 3, 8, 8)  ──blocks of whole chunks──>  the output
    a.h5  names   (600,) text     ───>  copied at once, as HDF5 holds them
    a.h5  a table of records      ───>  refused by name: no tensor can hold it
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import LayoutError, PackError
from lightning_gpufeed.hdf5.access import StrPath, list_datasets, open_file, open_h5_dataset
from lightning_gpufeed.hdf5.layout import H5DatasetLayout, Storage, read_layout
from lightning_gpufeed.hdf5.sources.source import file_identity

__all__ = ["Column", "Inputs", "image_file_kind", "open_inputs"]

Array = npt.NDArray[Any]

# Rows read at once, and the largest row of chunks that is read as a whole.
_BLOCK_BYTES = 32 << 20
_MOST_BAND_BYTES = 256 << 20
# Decoded chunks that HDF5 may keep where a row of chunks has to be read in parts.
_MOST_CACHE_BYTES = 2 << 30
# Nobody knows how long text and ragged rows are before they are read.
_OBJECT_ROWS = 1024
_IMAGE_FILES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"GIF8": "GIF", b"RIFF": "WebP"}


@dataclass(frozen=True)
class Column:
    """One dataset through all inputs.

    Attributes:
        key: Path inside the files.
        layouts: One per input.
        stored_dtype: Type in the output: that of the source in this machine's byte order, names of enumerations kept.
    """

    key: str
    layouts: tuple[H5DatasetLayout, ...]
    stored_dtype: np.dtype[Any]

    @property
    def num_rows(self) -> int:
        """Rows of all inputs."""
        return sum(layout.num_samples for layout in self.layouts)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.layouts[0].sample_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the rows read."""
        return self.layouts[0].dtype

    @property
    def is_bulk(self) -> bool:
        """Whether it is numbers that fill chunks; text, variable length and empty arrays are copied at once."""
        return self.layouts[0].is_tensor and self.num_rows * self.layouts[0].sample_bytes > 0

    def blocks(self, first_row: int = 0) -> Iterator[tuple[int, Array]]:
        """Rows in order, read by h5py, each chunk decoded once.

        Args:
            first_row: Where to begin, counted through all inputs.

        Yields:
            Number of the block's first row, and its rows: C-contiguous numbers in native order, or objects.

        Raises:
            PackError: HDF5 cannot read them, as in a damaged chunk.
        """
        base = 0
        for layout in self.layouts:
            begin = max(0, first_row - base)
            if begin < layout.num_samples:
                yield from ((base + row, values) for row, values in _read_blocks(layout, begin))
            base += layout.num_samples


@dataclass(frozen=True)
class Inputs:
    """The files to repack.

    Attributes:
        paths: The files, absolute.
        columns: Datasets to copy.
        has_all: Whether nothing was chosen by name, so that what hangs around the datasets is copied as well.
        left_out: (name, reason) of what the output does not get.
    """

    paths: tuple[str, ...]
    columns: tuple[Column, ...]
    has_all: bool
    left_out: tuple[tuple[str, str], ...]

    @property
    def identity(self) -> str:
        """Changes when a file does that a row comes from."""
        return "|".join(file_identity(name) for name in dict.fromkeys(stamp.path for stamp in self._stamps))

    @property
    def _stamps(self) -> list[Any]:
        return [stamp for column in self.columns for layout in column.layouts for stamp in layout.stamps]

    def refuse_changes(self) -> None:
        """Refuse files that were written to since they were opened.

        Raises:
            PackError: One was.
        """
        for stamp in self._stamps:
            if difference := stamp.difference():
                raise PackError(f"{stamp.path} {difference} while it was being repacked; repack it when it is complete")


def open_inputs(paths: Sequence[StrPath], keys: Sequence[str] | None) -> Inputs:
    """Look at the files; none stays open.

    Args:
        paths: One or more HDF5 files, to be joined in this order.
        keys: Datasets to take; None takes all.

    Returns:
        What to copy.

    Raises:
        FileNotFoundError: A file is missing.
        PackError: A file is not HDF5 or damaged, the files do not fit each other, or arrays cannot be copied so
            that a loader can use them.
    """
    names = tuple(os.path.abspath(os.path.expanduser(os.fspath(path))) for path in paths)
    try:
        with open_file(names[0]) as h5_file:
            found = list(list_datasets(h5_file)) if keys is None else list(dict.fromkeys(keys))
            left_out = _odd_links(h5_file, found) if keys is None else []
    except LayoutError as error:
        raise PackError(str(error)) from error
    columns: list[Column] = []
    refused: dict[str, str] = {}
    for key in found:
        try:
            columns.append(_column(names, key))
        except LayoutError as error:
            refused[key] = str(error)
    _refuse_unknown(names, found, refused)
    if not columns:
        raise PackError(f"{names[0]} holds no arrays, so there is nothing to repack")
    return Inputs(names, tuple(columns), keys is None, tuple(left_out))


def _column(paths: Sequence[str], key: str) -> Column:
    """A dataset in all files; `LayoutError` if it cannot be copied."""
    layouts = tuple(read_layout(path, key) for path in paths)
    dtypes = [_stored_dtype(layout) for layout in layouts]
    for layout, dtype in zip(layouts, dtypes, strict=True):
        if layout.sample_shape != layouts[0].sample_shape or dtype != dtypes[0]:
            raise LayoutError(
                f"samples are {dtypes[0]} {layouts[0].sample_shape} in {paths[0]} but {dtype} {layout.sample_shape} in "
                f"{layout.path}"
            )
    _refuse_image_files(layouts)
    _refuse_other_meaning(layouts)
    return Column(key, layouts, dtypes[0])


def _stored_dtype(layout: H5DatasetLayout) -> np.dtype[Any]:
    """The type to store, with what h5py notes about it (names of an enumeration, lengths of text)."""
    with open_file(layout.path) as h5_file:
        dtype: np.dtype[Any] = open_h5_dataset(h5_file, layout.key).dtype
    names = h5py.check_enum_dtype(dtype)
    if names is not None:
        named: np.dtype[Any] = h5py.enum_dtype(names, basetype=np.dtype(dtype.str).newbyteorder("="))
        return named
    return np.dtype(dtype.str).newbyteorder("=") if layout.is_tensor else dtype


def image_file_kind(layout: H5DatasetLayout) -> str | None:
    """Tell whether rows of bytes are image files.

    Args:
        layout: An array.

    Returns:
        Such as `"JPEG"`, by the first row; None if the rows are something else.
    """
    if layout.is_tensor or layout.is_text or len(layout.shape) != 1 or not layout.num_samples:
        return None
    with open_file(layout.path) as h5_file:
        first = np.asarray(open_h5_dataset(h5_file, layout.key)[0])
    if first.dtype.itemsize != 1:
        return None
    return next((name for magic, name in _IMAGE_FILES.items() if first.tobytes().startswith(magic)), None)


def _refuse_image_files(layouts: Sequence[H5DatasetLayout]) -> None:
    """Images that are still encoded would be kept in memory as bytes, and decoded by nobody."""
    for kind in filter(None, map(image_file_kind, layouts)):
        raise LayoutError(
            f"holds {kind} files of different lengths, which a loader keeps in memory as they are. Decode them once: "
            f"write a Dataset whose __getitem__ returns the decoded image as an array of one shape, and pack that with "
            f"gpufeed pack package.module:dataset OUT.h5"
        )


def _refuse_other_meaning(layouts: Sequence[H5DatasetLayout]) -> None:
    """The same numbers must mean the same in all files."""
    first = layouts[0]
    for other in layouts[1:]:
        for name in ("class_names", "scale", "offset", "layout"):
            is_meant = name in ("class_names", "layout") or first.is_packed or other.is_packed
            one, two = first.attributes.get(name), other.attributes.get(name)
            if is_meant and not _is_equal(one, two):
                raise LayoutError(
                    f"its attribute {name!r} is {one!r} in {first.path} but {two!r} in {other.path}, so that the same "
                    f"number means different things"
                )


def _is_equal(one: Any, two: Any) -> bool:
    """Whether two values of an attribute are the same; None stands for none."""
    if one is None or two is None:
        return one is two
    return bool(np.array_equal(np.asarray(one), np.asarray(two)))


def _refuse_unknown(paths: Sequence[str], found: Sequence[str], refused: dict[str, str]) -> None:
    """Name all that cannot be copied, and the line that leaves it out."""
    if not refused:
        return
    good = [key for key in found if key not in refused]
    listed = "; ".join(f"{key!r}: {_without_file(paths, text)}" for key, text in refused.items())
    advice = f" Leave them out with --keys {shlex.quote(','.join(good))}" if good else ""
    raise PackError(f"{paths[0]}: {len(refused)} of its arrays cannot be repacked: {listed}.{advice}")


def _without_file(paths: Sequence[str], text: str) -> str:
    """A reason without the name of the file, which stands before it already, and without its last full stop."""
    for path in paths[:1]:
        text = text.removeprefix(f"{path}: ")
    return text.removesuffix(".")


def _odd_links(h5_file: Any, found: Sequence[str]) -> list[tuple[str, str]]:
    """Soft and external links that are not among the datasets found."""
    odd: list[tuple[str, str]] = []

    def note(name: str, link: Any) -> None:
        if not isinstance(link, h5py.HardLink) and name not in found:
            odd.append((name, f"a link to {link.path}"))

    h5_file.visititems_links(note)
    return odd


def _read_blocks(layout: H5DatasetLayout, begin: int) -> Iterator[tuple[int, Array]]:
    """Rows of one file."""
    step, cache_bytes = _reading(layout)
    with ExitStack() as stack:
        try:
            h5_dataset = open_h5_dataset(stack.enter_context(open_file(layout.path, cache_bytes)), layout.key)
        except (LayoutError, OSError) as error:
            raise PackError(f"{layout.path} cannot be opened any more: {error}") from error
        row = begin
        while row < layout.num_samples:
            end = min(layout.num_samples, (row // step + 1) * step)
            try:
                values = h5_dataset[row:end]
            except OSError as error:
                raise PackError(
                    f"{layout.path}: rows {row} to {end - 1} of {layout.key!r} cannot be read: {error}. The file is "
                    f"damaged; copy or make it again"
                ) from error
            yield row, np.ascontiguousarray(values, layout.dtype) if layout.is_tensor else values
            row = end


def _reading(layout: H5DatasetLayout) -> tuple[int, int | None]:
    """Rows to read at once, and the size of HDF5's cache of chunks: whole rows of chunks need none."""
    sample_bytes = max(1, layout.sample_bytes)
    if not layout.is_tensor:
        return _OBJECT_ROWS, None
    if layout.storage is Storage.VIRTUAL:
        return max(1, _BLOCK_BYTES // sample_bytes), None
    rows = layout.chunk_shape[0] if layout.chunk_shape else 1
    if rows * sample_bytes <= _MOST_BAND_BYTES:
        return max(1, _BLOCK_BYTES // (rows * sample_bytes)) * rows, 0
    # Too large to be read whole; HDF5 keeps the decoded chunks meanwhile.
    per_axis = [-(-n // c) for n, c in zip(layout.sample_shape, (layout.chunk_shape or (1,))[1:], strict=True)]
    band_bytes = math.prod(per_axis) * (layout.chunk_bytes or 0)
    cache_bytes = min(band_bytes, _MOST_CACHE_BYTES) if layout.filters else 0
    return max(1, _BLOCK_BYTES // sample_bytes), cache_bytes
