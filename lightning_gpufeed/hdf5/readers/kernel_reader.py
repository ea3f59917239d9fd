"""Reads samples straight into the batch by many requests at once, without a memory map.

For files on a network, whose mapped pages can be lost, and for files that are not in memory and whose chunks do not
fit there: the kernel then has a whole batch of requests to work on at the same time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.plan import GatherTable
from lightning_gpufeed.hdf5.readers.batched_reads import BatchedReads, ReadError
from lightning_gpufeed.hdf5.readers.byte_file import refuse_changed, shorter_text
from lightning_gpufeed.hdf5.readers.gather_reader import explain_limit, file_size
from lightning_gpufeed.hdf5.readers.rows import put_rows

__all__ = ["KernelReader", "merge_neighbours"]

Indices = npt.NDArray[np.int64]

_AHEAD_BYTES = 64 << 20
_STEP_BYTES = 4 << 20
_GAP_BYTES = 16 << 10


class KernelReader:
    """Reads samples of raw-engine layouts by `BatchedReads`; see `FieldReader`.

    May be used from several threads; they wait for each other. The thread that reads ahead ends with `close`.
    """

    def __init__(self, layouts: Sequence[H5DatasetLayout], backend: str = "auto") -> None:
        """Open the files.

        Args:
            layouts: One raw-engine layout per file.
            backend: See `BatchedReads`.

        Raises:
            FeedError: A file is not what it was when its layout was read.
        """
        self._sample_bytes = layouts[0].sample_bytes
        fills = [np.full(one.sample_shape, one.fill_value, dtype=one.dtype) for one in layouts]
        self._fills = torch.from_numpy(np.stack([np.frombuffer(fill.tobytes(), dtype=np.uint8) for fill in fills]))
        offsets = [layout.block_offsets for layout in layouts if layout.block_offsets is not None]
        self._table = GatherTable.build(
            [layout.num_samples for layout in layouts],
            [layout.chunk_rows for layout in layouts],
            offsets,
            self._sample_bytes,
        )
        self._opened: _Opened | None = _Opened(layouts, backend)
        self._ahead: _ReadAhead | None = None

    def expect(self, indices: Indices, batch_samples: int = 1) -> None:
        """Say which samples come next and in which order; the kernel is asked for them some batches ahead.

        Args:
            indices: int64 (n,) sample numbers. What is read otherwise is still right.
            batch_samples: Samples read at a time.
        """
        former, self._ahead = self._ahead, None
        if former is not None:
            former.stop()
        opened = self._opened
        if opened is not None and len(indices) and self._sample_bytes:
            most_samples = max(2 * batch_samples, _AHEAD_BYTES // self._sample_bytes)
            self._ahead = _ReadAhead(opened, self._table, np.array(indices, dtype=np.int64), most_samples)
            self._ahead.end_with(self)

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place; see `FieldReader.read_into`.

        Args:
            indices: int64 (n,) sample numbers.
            out: (n, *sample_shape), contiguous, host memory.

        Raises:
            FeedError: The reader is closed, or a file became shorter or cannot be read. What is in `out` is then
                undefined.
        """
        # Held here until the reads are done, whatever another thread closes meanwhile.
        opened, ahead = self._opened, self._ahead
        if opened is None:
            raise FeedError("the reader is closed; open another one.")
        if not out.numel():
            return
        if ahead is not None:
            ahead.go_on(len(indices))
        target = out.view(len(indices), -1).view(torch.uint8)
        files, positions = self._table.files(indices), self._table.positions(indices)
        missing = np.flatnonzero(positions < 0)
        if missing.size:
            put_rows(target, missing, self._fills.index_select(0, torch.from_numpy(files[missing])))
        slots = np.lexsort((positions, files))
        slots = slots[positions[slots] >= 0]
        starts, num_rows = merge_neighbours(files[slots], positions[slots], slots, self._sample_bytes)
        first = slots[starts]
        opened.read(
            files[first],
            positions[first],
            (target.data_ptr() + first * self._sample_bytes).astype(np.uint64),
            num_rows * self._sample_bytes,
        )

    def rest(self) -> None:
        """End the thread that reads ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()

    def close(self) -> None:
        """Close the files, once no read is under way any more. Closing twice is allowed."""
        self._opened = None
        self.rest()


def merge_neighbours(files: Indices, positions: Indices, slots: Indices, sample_bytes: int) -> tuple[Indices, Indices]:
    """Find samples that lie behind each other in the file and in the batch: one read does for all of them. Pure.

    Args:
        files: int64 (n,): file of each sample.
        positions: int64 (n,): where it begins in the file, ascending within a file.
        slots: int64 (n,): its place in the batch.
        sample_bytes: Bytes of one.

    Returns:
        int64 (m,): where in the arrays each read begins; int64 (m,): how many samples it covers.
    """
    if not len(files):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    is_next = (np.diff(files) == 0) & (np.diff(positions) == sample_bytes) & (np.diff(slots) == 1)
    starts = np.concatenate([[0], np.flatnonzero(~is_next) + 1]).astype(np.int64)
    return starts, np.diff(np.append(starts, len(files)))


class _Opened:
    """The files, open, and the queue that reads them. Closed by its last reference."""

    def __init__(self, layouts: Sequence[H5DatasetLayout], backend: str) -> None:
        descriptors: list[int] = []
        weakref.finalize(self, _close_all, descriptors).atexit = False
        self._sizes: list[int] = []
        self._paths = [layout.storage_path for layout in layouts]
        for layout in layouts:
            path = layout.storage_path
            try:
                descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                raise explain_limit(error, path, len(descriptors)) from error
            status = os.fstat(descriptors[-1])
            refuse_changed(next(stamp for stamp in layout.stamps if stamp.path == path), status)
            self._sizes.append(status.st_size)
        self.descriptors = np.array(descriptors, dtype=np.int64)
        self.reads = BatchedReads(backend=backend)

    def read(self, files: Indices, offsets: Indices, addresses: npt.NDArray[np.uint64], sizes: Indices) -> None:
        """Read, and refuse what may hold zeros from behind a file's end."""
        try:
            self.reads.read(self.descriptors[files], offsets, addresses, sizes)
        except ReadError as error:
            number = int(files[error.request])
            self._refuse_shrunk({number})
            raise FeedError(
                f"{self._paths[number]} cannot be read: {error}. Look after the disk or its connection."
            ) from error
        # A page that is cut in its middle ends in zeros just before the file is shorter.
        self._refuse_shrunk({0} if len(self._sizes) == 1 else set(files.tolist()))

    def _refuse_shrunk(self, files: set[int]) -> None:
        for number in files:
            now = file_size(int(self.descriptors[number]))
            if now < self._sizes[number]:
                raise FeedError(shorter_text(self._paths[number], self._sizes[number], now))


class _ReadAhead:
    """Tells the kernel in a thread of its own what will be read, up to a limit beyond what was read already."""

    def __init__(self, opened: _Opened, table: GatherTable, indices: Indices, most_samples: int) -> None:
        self._opened = opened
        self._table = table
        self._indices = indices
        self._most_samples = most_samples
        self._step = max(1, min(most_samples // 2, _STEP_BYTES // table.sample_bytes))
        self._used = 0
        self._is_over = False
        self._changed = threading.Condition()
        # A forked process has no such thread, and nobody gives back a lock that it held at that moment.
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="gpufeed-read-ahead", daemon=True)
        self._thread.start()

    def go_on(self, num_samples: int) -> None:
        """Note that so many samples more are being read."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._used += num_samples
            self._changed.notify()

    def end(self) -> None:
        """Let the thread end."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def end_with(self, owner: object) -> None:
        """Let the thread end when its owner was forgotten without being closed."""
        self._finalizer = weakref.finalize(owner, self.end)
        self._finalizer.atexit = False

    def stop(self) -> None:
        """End the thread."""
        self._finalizer.detach()
        self.end()
        self._thread.join()

    def _work(self) -> None:
        done = 0
        try:
            with BatchedReads(backend=self._opened.reads.backend) as reads:
                while (part := self._wait(done)) is not None:
                    files, offsets, sizes = self._ranges(self._indices[part])
                    reads.advise(self._opened.descriptors[files], offsets, sizes)
                    done = part.stop
        except OSError:
            return  # nothing depends on it; what is wrong with a file, its reads will say

    def _wait(self, done: int) -> slice | None:
        """Wait until the next step is within the limit; None at the end."""
        total = len(self._indices)
        with self._changed:
            while not self._is_over:
                start = max(done, self._used)  # what was read already needs no reading ahead
                if start >= total:
                    return None
                stop = min(start + self._step, total)
                if stop <= self._used + self._most_samples:
                    return slice(start, stop)
                self._changed.wait()
        return None

    def _ranges(self, indices: Indices) -> tuple[Indices, Indices, Indices]:
        """File, offset and size of what samples lie in, joined where little lies between."""
        files, offsets = self._table.files(indices), self._table.positions(indices)
        order = np.lexsort((offsets, files))
        order = order[offsets[order] >= 0]
        files, offsets = files[order], offsets[order]
        sample_bytes = self._table.sample_bytes
        is_apart = (np.diff(files) != 0) | (np.diff(offsets) > sample_bytes + _GAP_BYTES)
        edges = np.flatnonzero(is_apart)
        starts = np.concatenate([[0], edges + 1]).astype(np.int64)[: len(files)]
        ends = np.concatenate([edges, [len(files) - 1]]).astype(np.int64)[: len(starts)]
        return files[starts], offsets[starts], offsets[ends] + sample_bytes - offsets[starts]


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
