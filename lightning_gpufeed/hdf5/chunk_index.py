"""Where every chunk of a dataset lies in its file, how many bytes it takes there, and which filters it passed.

Read in one pass over HDF5's own index: asking for chunk i by its number costs time proportional to i.

Source: HDF5 file format specification, chunk indexing; `H5Dchunk_iter`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ChunkIndex", "chunk_grid", "grows_sideways", "has_plain_edge_chunk", "read_chunk_index"]


@dataclass(frozen=True, eq=False)
class ChunkIndex:
    """One entry per chunk in C order of the chunk grid; a single one for a contiguous dataset.

    Attributes:
        offsets: int64 (num_chunks,): absolute position in the file, -1 where nothing was ever written.
        stored_bytes: int64 (num_chunks,): bytes in the file, 0 where nothing was written.
        filter_masks: uint32 (num_chunks,): bit i is set where filter i of the pipeline was left out for that chunk.
    """

    offsets: npt.NDArray[np.int64]
    stored_bytes: npt.NDArray[np.int64]
    filter_masks: npt.NDArray[np.uint32]

    def is_plain(self, chunk_bytes: int) -> bool:
        """Whether every written chunk is stored at its full size with no filter left out.

        Args:
            chunk_bytes: Decoded bytes of one chunk.

        Returns:
            True if so.
        """
        is_written = self.offsets >= 0
        return bool((self.stored_bytes[is_written] == chunk_bytes).all() and not self.filter_masks.any())

    @property
    def end(self) -> int:
        """First position behind all that is stored; 0 if nothing is."""
        is_written = self.offsets >= 0
        return int((self.offsets + self.stored_bytes)[is_written].max()) if is_written.any() else 0


def chunk_grid(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Number of chunks along each axis.

    Args:
        shape: Shape of the dataset.
        chunk_shape: Shape of one chunk.

    Returns:
        As many numbers as there are axes.
    """
    return tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))


def read_chunk_index(h5_dataset: Any, *, is_chunked: bool) -> ChunkIndex:
    """Read the index of an open dataset.

    Args:
        h5_dataset: An open h5py dataset, chunked or contiguous.
        is_chunked: Which of them.

    Returns:
        The index.
    """
    if not is_chunked:
        # Space is allocated at the first write; until then HDF5 reports an offset that means nothing.
        size = int(h5_dataset.id.get_storage_size())
        offset = h5_dataset.id.get_offset() if size else None
        return ChunkIndex(
            np.array([-1 if offset is None else offset], dtype=np.int64),
            np.array([0 if offset is None else size], dtype=np.int64),
            np.zeros(1, dtype=np.uint32),
        )
    grid = chunk_grid(h5_dataset.shape, h5_dataset.chunks)
    found: list[tuple[tuple[int, ...], int, int, int]] = []

    def note(info: Any) -> None:
        # Returning anything but None would end the iteration.
        found.append((info.chunk_offset, info.byte_offset, info.size, info.filter_mask))

    num_chunks = math.prod(grid)
    index = ChunkIndex(
        np.full(num_chunks, -1, dtype=np.int64),
        np.zeros(num_chunks, dtype=np.int64),
        np.zeros(num_chunks, dtype=np.uint32),
    )
    if num_chunks:
        h5_dataset.id.chunk_iter(note)
    if found:
        corners, *columns = (np.array(column, dtype=np.int64) for column in zip(*found, strict=True))
        places = corners // np.array(h5_dataset.chunks)
        inside = (places < np.array(grid)).all(axis=1)
        flat = np.ravel_multi_index(tuple(places[inside].T), grid)
        offsets, stored_bytes, filter_masks = (column[inside] for column in columns)
        index.offsets[flat] = offsets
        index.stored_bytes[flat] = stored_bytes
        index.filter_masks[flat] = filter_masks.astype(np.uint32)
    return index


def grows_sideways(h5_dataset: Any) -> bool:
    """Whether the one axis without a limit is not the first: HDF5 2.0 turns the axes of such an index round.

    Args:
        h5_dataset: An open h5py dataset.

    Returns:
        True if the places of its chunks cannot be trusted.
    """
    limits = h5_dataset.maxshape if h5_dataset.chunks else (0,)
    return limits.count(None) == 1 and limits[0] is not None


def has_plain_edge_chunk(h5_dataset: Any, index: ChunkIndex) -> bool:
    """Whether a chunk over the edge may be stored unfiltered (`H5Pset_chunk_opts`): its filter mask says nothing of it.

    Args:
        h5_dataset: An open h5py dataset with chunks and filters.
        index: Of its chunks.

    Returns:
        True if one has the size of unfiltered data.
    """
    chunks, shape = h5_dataset.chunks, h5_dataset.shape
    is_plain = index.stored_bytes == math.prod(chunks) * h5_dataset.dtype.itemsize
    corners = np.unravel_index(np.flatnonzero(is_plain & (index.filter_masks == 0)), chunk_grid(shape, chunks))
    return any(bool(((corner + 1) * c > n).any()) for corner, c, n in zip(corners, chunks, shape, strict=True))
