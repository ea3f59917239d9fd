"""Reads samples by number into host tensors. Two engines, one promise: what `h5_dataset[i]` returns.

* `GatherReader`: the files are mapped into memory and one `torch.index_select` per field copies a whole batch,
  from any number of files, in any order. The interpreter lock changes hands a constant number of times per
  batch: with one call per sample, a busy training loop would slow reading down a hundredfold.
* `BlockReader`: everything the first cannot read (compressed, virtual, foreign types). Whole chunks are read
  through h5py, kept in a bounded cache, and their rows copied into place.
* `ResidentReader`: labels and other small arrays, read once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.device.memory import TensorSpec
from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.access import open_file, open_h5_dataset
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, Storage
from lightning_gpufeed.hdf5.plan import GatherTable, plan_block_reads

__all__ = [
    "BlockReader",
    "FieldReader",
    "GatherReader",
    "ResidentReader",
    "open_reader",
    "read_objects",
    "spec_of",
]

Indices = npt.NDArray[np.int64]
Layouts = Sequence[H5DatasetLayout]

_RESIDENT_ROW_BYTES = 64
_SMALL_BLOCK_BYTES = 1 << 20


class FieldReader(Protocol):
    """Reads one field, from one or more files that follow each other."""

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place.

        Args:
            indices: int64 (n,): sample numbers counted through all files, in any order.
            out: (n, *sample_shape), contiguous, host memory.
        """

    def close(self) -> None:
        """Let go of files and memory. Closing twice is allowed."""


def open_reader(layouts: Layouts, *, resident_bytes: int, cache_bytes: int) -> FieldReader:
    """Open the fastest reader that is exact for these layouts.

    Args:
        layouts: One layout per file, all of the same sample shape and dtype.
        resident_bytes: Arrays of small rows (64 bytes) up to this size are read once and kept.
        cache_bytes: Limit of decoded chunks that `BlockReader` keeps.

    Returns:
        An open reader.
    """
    total = sum(layout.total_bytes for layout in layouts)
    has_small_rows = layouts[0].sample_bytes <= _RESIDENT_ROW_BYTES and total <= resident_bytes
    if has_small_rows or all(layout.storage is Storage.COMPACT for layout in layouts):
        return ResidentReader(layouts)
    if all(layout.engine is Engine.RAW for layout in layouts):
        return GatherReader(layouts)
    return BlockReader(layouts, cache_bytes=cache_bytes)


def spec_of(layout: H5DatasetLayout) -> TensorSpec:
    """Row shape and torch dtype of a field.

    Args:
        layout: A layout with a numeric dtype.

    Returns:
        What a tensor must look like to hold its samples.
    """
    return TensorSpec(layout.sample_shape, torch.from_numpy(np.empty(0, dtype=layout.dtype)).dtype)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(n, ...) of any dtype as uint8 (n, row_bytes): copies then work alike for all dtypes."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


class GatherReader:
    """Gathers samples straight from mapped files, one call per batch."""

    def __init__(self, layouts: Layouts) -> None:
        """Map the files.

        Args:
            layouts: One raw-engine layout per file.
        """
        self._sample_bytes = layouts[0].sample_bytes
        self._fill = torch.from_numpy(np.frombuffer(_fill_row(layouts[0]), dtype=np.uint8).copy())
        self._files = ExitStack()
        self._maps: list[mmap.mmap | None] = []
        self._needed: list[tuple[int, int, str]] = []
        self._turn = 0
        addresses = []
        for layout in layouts:
            file = Path(layout.storage_path).open("rb", buffering=0)  # noqa: SIM115 - open as long as the reader
            self._files.enter_context(file)
            size = os.fstat(file.fileno()).st_size
            self._needed.append((file.fileno(), size, layout.storage_path))
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            self._maps.append(mapped)
            addresses.append((np.frombuffer(mapped, dtype=np.uint8).ctypes.data, size))
        # Every mapping lies in one address space, so one table of positions serves all files and one call
        # gathers from all of them. The bytes between two mappings are never touched: no position leads there.
        base = min(address for address, _ in addresses)
        span = max(address + size for address, size in addresses) - base
        whole = torch.frombuffer((ctypes.c_uint8 * span).from_address(base), dtype=torch.uint8)
        # Row p of this view is the `sample_bytes` bytes from position p on; the rows overlap.
        num_rows = max(0, span - self._sample_bytes + 1)
        self._rows = whole.as_strided((num_rows, self._sample_bytes), (1, 1)) if num_rows else None
        self._table = GatherTable.build(
            [layout.num_samples for layout in layouts],
            [layout.chunk_rows for layout in layouts],
            [
                np.where(_offsets(layout) < 0, np.int64(-1), _offsets(layout) + (address - base))
                for layout, (address, _) in zip(layouts, addresses, strict=True)
            ],
            self._sample_bytes,
        )

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place; see `FieldReader.read_into`.

        Args:
            indices: int64 (n,) sample numbers.
            out: (n, *sample_shape), contiguous, host memory.

        Raises:
            FeedError: A file became shorter; reading on would kill the process.
        """
        self._refuse_shrunk_file()
        if not self._sample_bytes or not len(indices):
            return
        positions = self._table.positions(indices)
        target = _as_bytes(out)
        missing = positions < 0
        if self._rows is not None and not missing.any():
            torch.index_select(self._rows, 0, torch.from_numpy(positions), out=target)
            return
        target[torch.from_numpy(missing)] = self._fill
        if self._rows is not None and not missing.all():
            written = torch.from_numpy(np.flatnonzero(~missing))
            rows = torch.index_select(self._rows, 0, torch.from_numpy(positions[~missing]))
            target.index_copy_(0, written, rows)

    def _refuse_shrunk_file(self) -> None:
        """Look at one file per batch in turn: a page past a file's end is a fatal signal, not an exception."""
        descriptor, size, path = self._needed[self._turn]
        self._turn = (self._turn + 1) % len(self._needed)
        now = os.fstat(descriptor).st_size
        if now < size:
            raise FeedError(
                f"{path} became shorter while it was read: {size} bytes at the start, {now} now. "
                f"Write new data to another file and rename it; never change a file in place during training."
            )

    def close(self) -> None:
        """Unmap and close the files."""
        self._rows = None
        self._maps.clear()
        self._files.close()


def _offsets(layout: H5DatasetLayout) -> Indices:
    assert layout.block_offsets is not None
    return layout.block_offsets


def _fill_row(layout: H5DatasetLayout) -> bytes:
    """One sample of fill values."""
    return np.full(layout.sample_shape, layout.fill_value, dtype=layout.dtype).tobytes()


class BlockReader:
    """Reads whole chunks through h5py and keeps the latest ones up to a limit of bytes."""

    def __init__(self, layouts: Layouts, *, cache_bytes: int) -> None:
        """Note the files; each is opened at its first read.

        Args:
            layouts: One layout per file.
            cache_bytes: Limit of decoded bytes kept; one block is always kept.
        """
        self._layouts = list(layouts)
        self._num_samples = [layout.num_samples for layout in layouts]
        self._block_rows = [_block_rows(layout) for layout in layouts]
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()
        self._files = ExitStack()
        self._open: dict[int, Any] = {}
        self._lock = threading.Lock()
        self.num_block_reads = 0

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place; see `FieldReader.read_into`.

        Args:
            indices: int64 (n,) sample numbers.
            out: (n, *sample_shape), contiguous, host memory.

        Raises:
            FeedError: HDF5 cannot read or decode a chunk.
        """
        if not out.numel():
            return
        target = _as_bytes(out)
        for read in plan_block_reads(indices, self._num_samples, self._block_rows):
            # The cache is shared with whoever else reads from the same source.
            with self._lock:
                block = self._block(read.file_index, read.start_row, read.stop_row)
            rows = block.index_select(0, torch.from_numpy(read.rows))
            target.index_copy_(0, torch.from_numpy(read.slots), rows)

    def _block(self, file_index: int, start: int, stop: int) -> torch.Tensor:
        """One block as uint8 (rows, sample_bytes), from the cache or the file."""
        at = (file_index, start)
        if at in self._cache:
            self._cache.move_to_end(at)
            return self._cache[at]
        layout = self._layouts[file_index]
        values = np.empty((stop - start, *layout.sample_shape), dtype=layout.dtype)
        try:
            self._h5_dataset(file_index).read_direct(values, np.s_[start:stop])
        except OSError as error:
            raise FeedError(
                f"{layout.path}: dataset {layout.key!r}, samples {start} to {stop - 1} cannot be read: {error}. "
                f"The chunk is damaged or its filter failed; copy or pack the file again."
            ) from error
        self.num_block_reads += 1
        block = _as_bytes(torch.from_numpy(values))
        self._cache[at] = block
        self._cached_bytes += values.nbytes
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].numel()
        return block

    def _h5_dataset(self, file_index: int) -> Any:
        """The open dataset of a file, without HDF5's own chunk cache: whole chunks are read once here."""
        if file_index not in self._open:
            layout = self._layouts[file_index]
            self._open[file_index] = self._files.enter_context(_OpenDataset(layout.path, layout.key))
        return self._open[file_index]

    def close(self) -> None:
        """Close the files and drop the cache."""
        self._open.clear()
        self._cache.clear()
        self._cached_bytes = 0
        self._files.close()


class _OpenDataset:
    """Keeps a file and one of its datasets open."""

    def __init__(self, path: str, key: str) -> None:
        self._path, self._key = path, key
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        return open_h5_dataset(self._stack.enter_context(open_file(self._path)), self._key)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _block_rows(layout: H5DatasetLayout) -> int:
    """Rows per read: one row of chunks, or about a megabyte where there are no chunks."""
    if layout.storage is Storage.CHUNKED:
        return layout.chunk_rows
    return max(1, min(layout.num_samples, _SMALL_BLOCK_BYTES // max(1, layout.sample_bytes)))


class ResidentReader:
    """Holds a small array, such as labels, in memory."""

    def __init__(self, layouts: Layouts) -> None:
        """Read everything.

        Args:
            layouts: One layout per file.
        """
        blocks = BlockReader(layouts, cache_bytes=0)
        total = sum(layout.num_samples for layout in layouts)
        spec = spec_of(layouts[0])
        self.values = torch.empty((total, *spec.row_shape), dtype=spec.dtype)
        blocks.read_into(np.arange(total), self.values)
        blocks.close()

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place; see `FieldReader.read_into`.

        Args:
            indices: int64 (n,) sample numbers.
            out: (n, *sample_shape), contiguous, host memory.
        """
        if out.numel():
            torch.index_select(_as_bytes(self.values), 0, torch.from_numpy(indices), out=_as_bytes(out))

    def close(self) -> None:
        """Nothing is open."""


def read_objects(layouts: Layouts) -> list[Any]:
    """Read a field of strings or variable-length arrays, which no tensor can hold, once.

    Args:
        layouts: One layout per file.

    Returns:
        One element per sample: `str` for strings (UTF-8), a 1-D tensor for variable-length numbers, and nested
        lists of these where a sample is an array of them.
    """
    values: list[Any] = []
    for layout in layouts:
        with open_file(layout.path) as h5_file:
            h5_dataset = open_h5_dataset(h5_file, layout.key)
            is_text = h5py.check_string_dtype(h5_dataset.dtype) is not None
            loaded = (h5_dataset.asstr() if is_text else h5_dataset)[...]
        values.extend(_plain(element) for element in loaded)
    return values


def _plain(element: Any) -> Any:
    """Strings as `str`, numbers as tensors, arrays of them as lists."""
    if isinstance(element, np.ndarray) and element.dtype.kind in "OSU":
        return [_plain(part) for part in element]
    if isinstance(element, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(element))
    return element.decode(errors="replace") if isinstance(element, bytes) else str(element)
