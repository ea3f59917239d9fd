"""Reads samples by number into host tensors. Several readers, one promise: what `h5_dataset[i]` returns.

* `RawReader`: uncompressed data whose samples lie whole inside a chunk; gathers from the mapped file while that is in
  memory, reads ahead while it is not.
* `ChunkReader`: whole chunks, read and decoded by threads of its own; everything whose filters it knows.
* `BlockReader`: whole chunks through h5py; everything else that a tensor can hold.
* `ResidentReader`: labels and other small arrays, read once.
* `read_objects`: strings and arrays of varying length, read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.device.memory import TensorSpec
from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.access import open_file, open_h5_dataset
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, Storage
from lightning_gpufeed.hdf5.readers.block_reader import BlockReader, refuse_changed_surroundings
from lightning_gpufeed.hdf5.readers.chunk_reader import ChunkReader
from lightning_gpufeed.hdf5.readers.gather_reader import GatherReader
from lightning_gpufeed.hdf5.readers.raw_reader import RawReader
from lightning_gpufeed.hdf5.remote.remote_file import is_remote

__all__ = [
    "BlockReader",
    "ChunkReader",
    "FieldReader",
    "GatherReader",
    "RawReader",
    "ResidentReader",
    "is_resident",
    "open_reader",
    "read_objects",
    "spec_of",
]

Indices = npt.NDArray[np.int64]
Layouts = Sequence[H5DatasetLayout]

_RESIDENT_ROW_BYTES = 64


class FieldReader(Protocol):
    """Reads one field, from one or more files that follow each other."""

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place.

        Args:
            indices: int64 (n,): sample numbers counted through all files, in any order.
            out: (n, *sample_shape), contiguous, host memory.
        """

    def expect(self, indices: Indices, batch_samples: int = 1) -> None:
        """Say which samples will be read next, in order: the rest of an epoch. They are still given to `read_into`.

        Args:
            indices: int64 (n,): sample numbers counted through all files.
            batch_samples: Samples that one call will read, at most.
        """

    def rest(self) -> None:
        """The epoch is over: end threads. Reading again starts them again."""

    def close(self) -> None:
        """Let go of files and memory. Closing twice is allowed."""


def is_resident(layouts: Layouts, resident_bytes: int) -> bool:
    """Whether a field is read once and kept in memory.

    Args:
        layouts: One layout per file.
        resident_bytes: Limit of the total.

    Returns:
        True for rows up to 64 bytes within the limit, compact datasets, strings and variable length.
    """
    total = sum(layout.total_bytes for layout in layouts)
    has_small_rows = layouts[0].sample_bytes <= _RESIDENT_ROW_BYTES and total <= resident_bytes
    is_compact = all(layout.storage is Storage.COMPACT for layout in layouts)
    return has_small_rows or is_compact or not layouts[0].is_tensor


def open_reader(
    layouts: Layouts,
    *,
    resident_bytes: int,
    cache_bytes: int,
    buffer_bytes: int = 1 << 30,
    on_way: Callable[[str], None] | None = None,
) -> FieldReader:
    """Open the fastest reader that is exact for these layouts.

    Args:
        layouts: One layout per file, all of the same sample shape and numeric dtype.
        resident_bytes: See `is_resident`.
        cache_bytes: A dataset of up to this size is decoded once for all epochs; of a larger one `BlockReader` keeps
            so much.
        buffer_bytes: Limit of the rolling buffer of decoded chunks.
        on_way: Told in a line when `RawReader` takes another way of reading.

    Returns:
        An open reader.
    """
    if is_resident(layouts, resident_bytes):
        return ResidentReader(layouts)
    if all(layout.engine is Engine.RAW for layout in layouts):
        return RawReader(layouts, buffer_bytes=buffer_bytes, on_way=on_way)
    if all(layout.engine is not Engine.H5PY for layout in layouts):
        return ChunkReader(layouts, cache_bytes=cache_bytes, buffer_bytes=buffer_bytes)
    return BlockReader(layouts, cache_bytes=cache_bytes)


def spec_of(layout: H5DatasetLayout) -> TensorSpec:
    """Row shape and torch dtype of a field.

    Args:
        layout: A layout with a numeric dtype.

    Returns:
        What a tensor must look like to hold its samples.
    """
    return TensorSpec(layout.sample_shape, torch.from_numpy(np.empty(0, dtype=layout.dtype)).dtype)


class ResidentReader:
    """Holds a small array, such as labels, in memory."""

    def __init__(self, layouts: Layouts) -> None:
        """Read everything.

        Args:
            layouts: One layout per file.
        """
        spec = spec_of(layouts[0])
        total = sum(layout.num_samples for layout in layouts)
        values = torch.empty((total, *spec.row_shape), dtype=spec.dtype, device="cpu")
        is_raw = all(layout.engine is not Engine.H5PY for layout in layouts)
        is_far = any(is_remote(layout.path) for layout in layouts)
        # HDF5 reads small arrays well, but from a store one piece after the other.
        blocks = (
            ChunkReader(layouts, buffer_bytes=values.nbytes)
            if is_raw and is_far
            else BlockReader(layouts, cache_bytes=0)
        )
        try:
            blocks.read_into(np.arange(total), values)
        finally:
            blocks.close()
        # uint8 rows: copies then work alike for all types.
        self._rows = values.view(total, -1).view(torch.uint8) if values.numel() else None

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place; see `FieldReader.read_into`.

        Args:
            indices: int64 (n,) sample numbers.
            out: (n, *sample_shape), contiguous, host memory.
        """
        if self._rows is not None and out.numel():
            target = out.view(len(indices), -1).view(torch.uint8)
            torch.index_select(self._rows, 0, torch.from_numpy(indices), out=target)

    def expect(self, indices: Indices, batch_samples: int = 1) -> None:
        """Nothing to prepare: it is all in memory.

        Args:
            indices: int64 (n,) sample numbers.
            batch_samples: Samples read at a time.
        """

    def rest(self) -> None:
        """There are no threads."""

    def close(self) -> None:
        """Nothing is open."""


def read_objects(layouts: Layouts) -> list[Any]:
    """Read a field of strings or variable-length arrays, which no tensor can hold, once.

    Args:
        layouts: One layout per file.

    Returns:
        One element per sample: `str` for strings (UTF-8, or Latin-1 where the bytes are not valid UTF-8), a 1-D tensor
        for variable-length numbers, and nested lists of these where a sample is an array of them.

    Raises:
        FeedError: HDF5 cannot read the field.
    """
    values: list[Any] = []
    for layout in layouts:
        refuse_changed_surroundings(layout)
        with open_file(layout.path) as h5_file:
            h5_dataset = open_h5_dataset(h5_file, layout.key)
            try:
                loaded = h5_dataset[...]
            except OSError as error:
                raise FeedError(
                    f"{layout.path}: dataset {layout.key!r} cannot be read: {error}. The file is damaged; copy or make "
                    f"it again."
                ) from error
            values.extend(_plain(element, layout.is_text) for element in loaded)
    return values


def _plain(element: Any, is_text: bool) -> Any:
    """Strings as `str`, numbers as tensors, arrays of them as lists."""
    if isinstance(element, np.ndarray) and (is_text or element.dtype.kind == "O"):
        return [_plain(part, is_text) for part in element]
    if not is_text:
        return torch.from_numpy(np.array(element))
    if isinstance(element, str):
        return element
    raw = bytes(element)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")
