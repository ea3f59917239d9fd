"""Whether the bytes at the places that HDF5 tells are what HDF5 returns for them, before they are relied on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import FeedError, LayoutError
from lightning_gpufeed.hdf5.chunk_index import ChunkIndex, chunk_grid
from lightning_gpufeed.hdf5.readers.decode import ChunkDecoder, FilterSpec
from lightning_gpufeed.hdf5.remote.addresses import remote_file, size_of
from lightning_gpufeed.hdf5.remote.remote_file import is_remote

__all__ = ["raw_bytes_agree", "refuse_truncation"]


def refuse_truncation(path: str, key: str, index: ChunkIndex, storage_path: str) -> None:
    """Make sure that all chunks lie in the file: touching a mapped page past its end would kill the process.

    Args:
        path: The file that was asked for.
        key: The dataset.
        index: Of its chunks.
        storage_path: The file that the bytes lie in.

    Raises:
        LayoutError: One lies past the end.
    """
    size = size_of(storage_path)
    if index.end > size:
        raise LayoutError(
            f"{path}: truncated: dataset {key!r} needs {index.end} bytes of {storage_path}, which has {size}. "
            f"Copy or pack the file again."
        )


def raw_bytes_agree(h5_dataset: Any, pipeline: Sequence[FilterSpec], index: ChunkIndex, storage_path: str) -> bool:
    """Compare the start of the first and of the last written chunk with what HDF5 returns.

    Args:
        h5_dataset: The open dataset.
        pipeline: Its filters, all of which can be undone without HDF5.
        index: Of its chunks.
        storage_path: The file that the bytes lie in, or its address.

    Returns:
        Whether they are the same.
    """
    written = np.flatnonzero(index.offsets >= 0)
    if not written.size or not h5_dataset.size:
        return True
    shape = h5_dataset.shape
    chunk = h5_dataset.chunks or shape
    for number in {int(written[0]), int(written[-1])}:
        corner = np.unravel_index(number, chunk_grid(shape, chunk))
        first_row = tuple(
            slice(int(i) * c, min(n, int(i) * c + (c if axis else 1)))
            for axis, (i, c, n) in enumerate(zip(corner, chunk, shape, strict=True))
        )
        try:
            expected = np.ascontiguousarray(h5_dataset[first_row])
        except OSError:
            continue  # damaged: reading says so, and where
        values = _first_rows(storage_path, h5_dataset.dtype, chunk, pipeline, index, number)
        inside = tuple(slice(0, n) for n in expected.shape)
        if values is None or values[inside].tobytes() != expected.tobytes():
            return False
    return True


def _read_at(path: str, offset: int, num_bytes: int) -> bytes:
    """Bytes of a file; fewer at its end."""
    if is_remote(path):
        return bytes(remote_file(path).read_ranges(np.array([offset]), np.array([num_bytes]))[0])
    with open(path, "rb", buffering=0) as raw:
        raw.seek(offset)
        return raw.read(num_bytes)


def _first_rows(
    path: str,
    dtype: np.dtype[Any],
    chunk: tuple[int, ...],
    pipeline: Sequence[FilterSpec],
    index: ChunkIndex,
    number: int,
) -> npt.NDArray[Any] | None:
    """What our own reading makes of the bytes of a chunk: all of it, or its first row where that is enough."""
    if not pipeline:
        row_bytes = math.prod(chunk[1:]) * dtype.itemsize
        stored = _read_at(path, int(index.offsets[number]), row_bytes)
        return np.frombuffer(stored, dtype).reshape(1, *chunk[1:]) if len(stored) == row_bytes else None
    values = np.empty(math.prod(chunk) * dtype.itemsize, dtype=np.uint8)
    decoder = ChunkDecoder(pipeline, values.nbytes, dtype.itemsize)
    stored = _read_at(path, int(index.offsets[number]), int(index.stored_bytes[number]))
    try:
        decoder.decode(stored, int(index.filter_masks[number]), values)
    except FeedError:
        return None
    return values.view(dtype).reshape(chunk)
