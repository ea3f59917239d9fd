"""Reads whole chunks through h5py, for everything that cannot be gathered from the mapped file."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.access import open_file, open_h5_dataset
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.plan import BlockRead, plan_block_reads
from lightning_gpufeed.hdf5.readers.row_blocks import block_rows
from lightning_gpufeed.hdf5.readers.rows import put_rows

__all__ = ["BlockReader", "refuse_changed_surroundings"]

Indices = npt.NDArray[np.int64]


class BlockReader:
    """Reads each chunk once, keeps the latest ones up to a limit of bytes, and copies rows into place.

    May be used from several threads; HDF5 itself works for one at a time.
    """

    def __init__(self, layouts: Sequence[H5DatasetLayout], *, cache_bytes: int) -> None:
        """Note the files; each is opened at its first read.

        Args:
            layouts: One layout per file.
            cache_bytes: Limit of decoded bytes kept; one block is always kept.
        """
        self._layouts = list(layouts)
        self._num_samples = [layout.num_samples for layout in layouts]
        self._block_rows = [block_rows(layout) for layout in layouts]
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()
        self._files = ExitStack()
        self._open: dict[int, Any] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_block_reads = 0

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place; see `FieldReader.read_into`.

        Args:
            indices: int64 (n,) sample numbers.
            out: (n, *sample_shape), contiguous, host memory.

        Raises:
            FeedError: HDF5 cannot read or decode a chunk, a file became shorter, or the reader is closed.
        """
        if not out.numel():
            return
        target = out.view(len(indices), -1).view(torch.uint8)
        reads = plan_block_reads(indices, self._num_samples, self._block_rows)
        for read in reads:
            # Copied out under the lock: another thread may want the block's memory for another block.
            with self._lock:
                block = self._block(read)
                rows = self._scratch_for(len(read.rows), block.shape[1])
                torch.index_select(block, 0, torch.from_numpy(read.rows), out=rows)
                put_rows(target, read.slots, rows)
        # Looked at afterwards: what is whole now was whole when it was read.
        for number in {read.file_index for read in reads}:
            refuse_changed_surroundings(self._layouts[number])

    def expect(self, indices: Indices, batch_samples: int = 1) -> None:
        """Not made use of: HDF5 works for one thread at a time.

        Args:
            indices: int64 (n,) sample numbers.
            batch_samples: Samples read at a time.
        """

    def _block(self, read: BlockRead) -> torch.Tensor:
        """One block as uint8 (rows, sample_bytes), from the cache or the file."""
        at = (read.file_index, read.start_row)
        if at in self._cache:
            self._cache.move_to_end(at)
            return self._cache[at]
        layout = self._layouts[read.file_index]
        h5_dataset = self._h5_dataset(read.file_index)
        memory = self._memory_for(read.file_index)
        values = memory.view(layout.dtype).reshape(-1, *layout.sample_shape)[: read.stop_row - read.start_row]
        try:
            h5_dataset.read_direct(values, np.s_[read.start_row : read.stop_row])
        except OSError as error:
            raise FeedError(
                f"{layout.path}: dataset {layout.key!r}, samples {read.start_row} to {read.stop_row - 1} cannot be "
                f"read: {error}. The chunk is damaged or its filter failed; copy or pack the file again."
            ) from error
        self.num_block_reads += 1
        self._cache[at] = torch.from_numpy(memory).view(-1, layout.sample_bytes)
        self._cached_bytes += memory.nbytes
        return self._cache[at]

    def _memory_for(self, file_index: int) -> npt.NDArray[np.uint8]:
        """Memory for one full block; from the block unused longest once the limit is reached."""
        # Given back to the allocator and taken again, by a new thread in every epoch, it would make the process grow.
        num_bytes = self._block_rows[file_index] * self._layouts[file_index].sample_bytes
        while self._cache and self._cached_bytes + num_bytes > self._cache_bytes:
            _, block = self._cache.popitem(last=False)
            self._cached_bytes -= block.numel()
            if block.numel() == num_bytes:
                return block.view(-1).numpy()
        return np.empty(num_bytes, dtype=np.uint8)

    def _scratch_for(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Memory to collect rows in, kept between reads: aligned memory that comes and goes breaks up the heap."""
        if self._scratch.numel() < num_rows * row_bytes:
            self._scratch = torch.empty(num_rows * row_bytes, dtype=torch.uint8, device="cpu")
        return self._scratch[: num_rows * row_bytes].view(num_rows, row_bytes)

    def _h5_dataset(self, file_index: int) -> Any:
        """The open dataset of a file."""
        if self._is_closed:
            raise FeedError("the reader is closed; open another one.")
        if file_index not in self._open:
            layout = self._layouts[file_index]
            refuse_changed_surroundings(layout)
            for stamp in layout.stamps:
                if difference := stamp.difference():
                    raise FeedError(
                        f"{stamp.path} {difference} since its layout was read, so its samples may lie elsewhere now. "
                        f"Build the loader or DataModule again to use the new file."
                    )
            # A decoded chunk is kept here; HDF5 need not keep it too. Raw chunks that are parts of samples are put
            # together in its cache, which is far quicker than piece by piece from the file.
            cache_bytes = 0 if layout.filters else None
            h5_file = self._files.enter_context(open_file(layout.path, cache_bytes))
            self._open[file_index] = open_h5_dataset(h5_file, layout.key)
        return self._open[file_index]

    def rest(self) -> None:
        """There are no threads."""

    def close(self) -> None:
        """Close the files and drop the cache."""
        with self._lock:
            self._is_closed = True
            self._open.clear()
            self._cache.clear()
            self._cached_bytes = 0
            self._files.close()


def refuse_changed_surroundings(layout: H5DatasetLayout) -> None:
    """Make sure that HDF5 would not make fill values up for something that is no longer there.

    Args:
        layout: What is about to be read.

    Raises:
        FeedError: A file it depends on is gone or became shorter, or the current directory changed and matters.
    """
    for stamp in layout.stamps:
        # The named file is held open; the others are opened by HDF5 when it likes.
        is_lost = stamp.path not in (layout.path, layout.storage_path) and not os.path.exists(stamp.path)
        if is_lost or stamp.has_shrunk():
            raise FeedError(
                f"{stamp.path} {stamp.difference() or 'changed'} while it was read; HDF5 would return zeros for "
                f"what is missing. Write new data to another file and rename it; never change a file in place during "
                f"training."
            )
    if layout.directory is not None and os.getcwd() != layout.directory:
        raise FeedError(
            f"{layout.path}: dataset {layout.key!r} names files relative to {layout.directory}, but the current "
            f"directory is now {os.getcwd()}; HDF5 would not find them. Stay in the directory, or store absolute names."
        )
