"""Blocks of a dataset: whole rows of the chunk grid, read and decoded as one.

::

    chunk grid          samples 0-63   | chunk 0 | chunk 1 |  ->  block 0     a sample may be spread over several
    of a dataset        samples 64-127 | chunk 2 | chunk 3 |  ->  block 1     chunks; it never leaves its block

A dataset without chunks is cut into blocks of about a megabyte.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.chunk_index import chunk_grid
from lightning_gpufeed.hdf5.layout import H5DatasetLayout, Storage
from lightning_gpufeed.hdf5.readers.byte_file import ByteFile, LocalFile
from lightning_gpufeed.hdf5.readers.decode import ChunkDecoder

__all__ = ["BlockLoader", "BlockNumbers", "block_rows"]

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]

_SMALL_BLOCK_BYTES = 1 << 20


def block_rows(layout: H5DatasetLayout) -> int:
    """Samples in one block.

    Args:
        layout: A dataset.

    Returns:
        The rows of a chunk, or as many samples as make about a megabyte where there are no chunks.
    """
    if layout.storage is Storage.CHUNKED:
        return layout.chunk_rows
    return max(1, min(layout.num_samples, _SMALL_BLOCK_BYTES // max(1, layout.sample_bytes)))


@dataclass(frozen=True, eq=False)
class BlockNumbers:
    """Blocks counted through several files.

    Attributes:
        first_sample: int64 (num_files + 1,): number of the first sample of each file, then the total.
        first_block: int64 (num_files + 1,): number of the first block of each file, then the total.
        rows: int64 (num_files,): samples per block in each file.
    """

    first_sample: Indices
    first_block: Indices
    rows: Indices

    @classmethod
    def of(cls, layouts: Sequence[H5DatasetLayout]) -> BlockNumbers:
        """Count.

        Args:
            layouts: One layout per file.

        Returns:
            The numbers.
        """
        samples = np.array([layout.num_samples for layout in layouts], dtype=np.int64)
        rows = np.array([block_rows(layout) for layout in layouts], dtype=np.int64)
        return cls(
            np.concatenate([[0], np.cumsum(samples)]), np.concatenate([[0], np.cumsum(-(-samples // rows))]), rows
        )

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Find samples.

        Args:
            indices: int64 (n,) sample numbers.

        Returns:
            Block of each, and its row inside the block: int64 (n,) both.
        """
        files = np.searchsorted(self.first_sample, indices, side="right") - 1
        blocks, rows = np.divmod(indices - self.first_sample[files], self.rows[files])
        return blocks + self.first_block[files], rows

    def first_sample_of(self, block: int) -> int:
        """Find a block.

        Args:
            block: Its number.

        Returns:
            Number of its first sample.
        """
        file = int(np.searchsorted(self.first_block, block, side="right")) - 1
        return int(self.first_sample[file] + (block - self.first_block[file]) * self.rows[file])


class BlockLoader:
    """Reads and decodes blocks of one dataset; may be used from several threads.

    Attributes:
        num_blocks: Blocks in the dataset.
    """

    def __init__(self, layout: H5DatasetLayout, open_file: Callable[[H5DatasetLayout], ByteFile]) -> None:
        """Note the layout; the file is opened at the first read.

        Args:
            layout: A chunked or contiguous dataset that HDF5 is not needed for.
            open_file: Opens the file that the bytes lie in.
        """
        assert layout.index is not None
        self._layout = layout
        self._index = layout.index
        self._open_file = open_file
        self._file: ByteFile | None = None
        self._opening = threading.Lock()
        self._own = threading.local()
        self._rows = block_rows(layout)
        self.num_blocks = -(-layout.num_samples // self._rows)
        self._decoder: ChunkDecoder | None = None
        self._has_whole_samples = True
        if layout.chunk_shape is not None:
            self._grid = chunk_grid(layout.sample_shape, layout.chunk_shape[1:])
            self._has_whole_samples = not layout.has_split_samples
            if layout.pipeline:
                self._decoder = ChunkDecoder(layout.pipeline, layout.chunk_bytes or 0, layout.dtype.itemsize)

    def load(self, block: int, out: Bytes) -> None:
        """Read and decode one block.

        Args:
            block: Its number.
            out: uint8 memory of at least the size of a full block.

        Raises:
            FeedError: It cannot be read or decoded; says which samples of which file.
        """
        layout = self._layout
        first = block * self._rows
        with self._named(block):
            if layout.chunk_shape is None:
                self._load_part(first, min(self._rows, layout.num_samples - first), out)
            elif self._has_whole_samples:
                self._load_chunk(block, out[: layout.chunk_bytes])
            else:
                self._load_row(block, out)

    def load_rows(self, block: int, parts: Sequence[memoryview]) -> bool:
        """Read the first rows of a block to where they are wanted, if they lie in a local file as they are.

        Args:
            block: Its number.
            parts: Bytes, writable: for one row or several after each other, from the first row on.

        Returns:
            Whether that was done; if not, nothing was read.

        Raises:
            FeedError: They cannot be read.
        """
        if self._decoder is not None or not self._has_whole_samples:
            return False
        offset, _ = self._place(block)
        if offset < 0:
            return False
        with self._named(block):
            file = self._opened()
            if not isinstance(file, LocalFile):
                return False
            file.read_parts(offset, parts)
        return True

    def will_load(self, block: int) -> None:
        """Say that a block is soon loaded, so that the kernel begins to fetch it.

        Args:
            block: Its number.
        """
        if self._has_whole_samples:
            file, (offset, num_bytes) = self._opened(), self._place(block)
            if isinstance(file, LocalFile) and offset >= 0:
                file.will_read(offset, num_bytes)

    def _place(self, block: int) -> tuple[int, int]:
        """Where a block of whole samples is stored, and in how many bytes; below zero where nothing was written."""
        start = int(self._index.offsets[block if self._layout.chunk_shape is not None else 0])
        if self._layout.chunk_shape is not None:
            return start, int(self._index.stored_bytes[block])
        first = block * self._rows
        num_rows = min(self._rows, self._layout.num_samples - first)
        sample_bytes = self._layout.sample_bytes
        return (start + first * sample_bytes if start >= 0 else start), num_rows * sample_bytes

    @contextmanager
    def _named(self, block: int) -> Iterator[None]:
        """Say which samples cannot be read, if they cannot."""
        try:
            yield
        except FeedError as error:
            self._opened().check_unchanged()
            first = block * self._rows
            last = min(first + self._rows, self._layout.num_samples) - 1
            raise FeedError(
                f"{self._layout.path}: dataset {self._layout.key!r}, samples {first} to {last} cannot be read: {error}"
            ) from error

    def _load_part(self, first: int, num_rows: int, out: Bytes) -> None:
        """Some samples of a dataset without chunks."""
        sample_bytes = self._layout.sample_bytes
        start = int(self._index.offsets[0])
        target = out[: num_rows * sample_bytes]
        if start < 0:
            self._fill(target)
        else:
            self._opened().read_into(start + first * sample_bytes, target.data)

    def _load_chunk(self, number: int, out: Bytes) -> None:
        """One chunk, decoded."""
        offset = int(self._index.offsets[number])
        if offset < 0:
            self._fill(out)
        elif self._decoder is None:
            self._opened().read_into(offset, out.data)
        else:
            stored = self._scratch("stored", int(self._index.stored_bytes[number]))
            self._opened().read_into(offset, stored.data)
            self._decoder.decode(stored, int(self._index.filter_masks[number]), out)

    def _load_row(self, block: int, out: Bytes) -> None:
        """All chunks of a row of the grid, put together to whole samples."""
        layout = self._layout
        assert layout.chunk_shape is not None
        rows = layout.chunk_shape[0]
        values = out[: rows * layout.sample_bytes].view(layout.dtype).reshape(rows, *layout.sample_shape)
        scratch = self._scratch("decoded", layout.chunk_bytes or 0)
        chunk = scratch.view(layout.dtype).reshape(layout.chunk_shape)
        for number, place in self._chunks_of_row(block):
            self._load_chunk(number, scratch)
            inside = tuple(slice(0, part.stop - part.start) for part in place)
            values[(slice(None), *place)] = chunk[(slice(None), *inside)]

    def _chunks_of_row(self, block: int) -> Iterator[tuple[int, tuple[slice, ...]]]:
        """Number of each chunk of a row, and which part of the samples it holds."""
        layout = self._layout
        assert layout.chunk_shape is not None
        num_in_row = math.prod(self._grid)
        for position in range(num_in_row):
            corner = np.unravel_index(position, self._grid)
            yield (
                block * num_in_row + position,
                tuple(
                    slice(int(i) * c, min(n, (int(i) + 1) * c))
                    for i, c, n in zip(corner, layout.chunk_shape[1:], layout.sample_shape, strict=True)
                ),
            )

    def _scratch(self, name: str, num_bytes: int) -> Bytes:
        """Memory of this thread, kept: fresh memory costs a page fault every 4 kB."""
        memory: Bytes | None = getattr(self._own, name, None)
        if memory is None or len(memory) < num_bytes:
            memory = np.empty(num_bytes, dtype=np.uint8)
            setattr(self._own, name, memory)
        return memory[:num_bytes]

    def _fill(self, out: Bytes) -> None:
        """The value that HDF5 gives for what was never written."""
        out.view(self._layout.dtype)[:] = self._layout.fill_value

    def _opened(self) -> ByteFile:
        with self._opening:
            if self._file is None:
                self._file = self._open_file(self._layout)
            return self._file

    def close(self) -> None:
        """Close the file."""
        with self._opening:
            if self._file is not None:
                self._file.close()
            self._file = None
