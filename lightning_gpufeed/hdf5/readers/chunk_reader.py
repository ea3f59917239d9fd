"""Reads and decodes whole blocks in threads of its own, each once where memory allows, ahead of where they are used.

::

    order of an epoch, known      samples in play fit  ->  RollingBuffer: each block once, its samples kept one by one
                                  they do not          ->  whole blocks kept, that which is needed again last let go
    dataset small enough          whole blocks kept for ever: decoded once for all epochs
    nothing known                 whole blocks kept, that which was used longest ago let go

    threads      pread + decode, without the interpreter lock, into slots of one arena
    read_into    one gather over the arena per batch
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.access import FileStamp
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.readers.byte_file import ByteFile, LocalFile
from lightning_gpufeed.hdf5.readers.chunk_plan import NEVER, SamplePlan, UsePlan
from lightning_gpufeed.hdf5.readers.rolling_buffer import RollingBuffer
from lightning_gpufeed.hdf5.readers.row_blocks import BlockLoader, BlockNumbers
from lightning_gpufeed.hdf5.readers.rows import put_rows
from lightning_gpufeed.hdf5.remote.addresses import SharedBytes
from lightning_gpufeed.hdf5.remote.remote_file import is_remote

__all__ = ["ChunkReader", "num_decode_threads"]

Indices = npt.NDArray[np.int64]

_MOST_THREADS = 8
_REMOTE_THREADS = 16


def num_decode_threads() -> int:
    """Threads that read and decode: as many as this process has cores, 2 to 8.

    Returns:
        The number.
    """
    return max(2, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def num_threads_for(layouts: Sequence[H5DatasetLayout]) -> int:
    """Threads for some files: from a store many, which mostly wait for it.

    Args:
        layouts: One per file.

    Returns:
        The number.
    """
    return _REMOTE_THREADS if any(is_remote(layout.path) for layout in layouts) else num_decode_threads()


class ChunkReader:
    """Reads samples of datasets whose chunks can be decoded without HDF5; see `FieldReader`.

    One thread reads at a time; the decoding threads end with `close`.
    """

    def __init__(
        self,
        layouts: Sequence[H5DatasetLayout],
        *,
        buffer_bytes: int,
        cache_bytes: int = 0,
        num_threads: int | None = None,
        open_file: Callable[[H5DatasetLayout], ByteFile] | None = None,
    ) -> None:
        """Note the files; each is opened at its first read.

        Args:
            layouts: One layout per file, none of them for h5py only.
            buffer_bytes: Limit of the arena; one block is always kept. Each thread holds up to three blocks beside it.
            cache_bytes: A dataset of up to this size is kept whole.
            num_threads: Threads that read and decode; None takes `num_threads_for`.
            open_file: Opens the file that a layout's bytes lie in; None opens it where it is.
        """
        self._loaders = [BlockLoader(layout, open_file or _open_bytes) for layout in layouts]
        self._sample_bytes = layouts[0].sample_bytes
        self._numbers = BlockNumbers.of(layouts)
        self._first_block = self._numbers.first_block
        self._slot_bytes = max(1, int(self._numbers.rows.max()) * self._sample_bytes)
        self._most_slots = max(1, buffer_bytes // self._slot_bytes)
        self._keeps_all = int(self._first_block[-1]) * self._slot_bytes <= cache_bytes
        if self._keeps_all:
            self._most_slots = max(1, int(self._first_block[-1]))
        self._num_threads = num_threads or num_threads_for(layouts)
        self._pool: ThreadPoolExecutor | None = None
        self._arena = _room(0, self._slot_bytes)
        self._free: list[int] = []
        self._slot_of: dict[int, int] = {}
        self._loading: dict[int, Future[None]] = {}
        self._next_use: dict[int, int] = {}
        self._plan: UsePlan | None = None
        self._position = 0
        self._ahead = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._buffer_bytes = buffer_bytes
        self._rolling: RollingBuffer | None = None
        self._num_started = self._num_rolled = 0

    def expect(self, indices: Indices, batch_samples: int = 1) -> None:
        """Say which samples come next and in which order; their blocks are then read ahead, each once if they fit.

        Args:
            indices: int64 (n,) sample numbers. What is read otherwise is still right.
            batch_samples: Samples read at a time.
        """
        with self._lock:
            if self._is_closed:
                return
            blocks, _ = self._locate(indices)
            self._stop_rolling()
            self._plan, self._position, self._ahead = None, 0, 0
            if not self._keeps_all:
                if self._start_rolling(SamplePlan.of(indices, blocks), batch_samples):
                    return
                self._drop_all()
            plan = self._plan = UsePlan.of(blocks)
            in_play = plan.most_live(batch_samples) + 2 * self._num_threads
            self._reserve(len(plan.first_uses) if self._keeps_all else in_play)
            self._read_ahead()

    def _start_rolling(self, plan: SamplePlan, batch_samples: int) -> bool:
        """Keep single samples for this epoch, if those in play at the same time fit into the buffer."""
        most_slots = self._buffer_bytes // self._sample_bytes if self._sample_bytes else 0
        num_kept = plan.most_kept(batch_samples)
        if num_kept > most_slots:
            return False
        num_ahead = 2 * self._num_threads * int(self._numbers.rows.max())
        num_slots = min(num_kept + num_ahead, most_slots, len(plan.members))
        self._drop_all()
        num_bytes = num_slots * self._sample_bytes
        if self._arena.numel() < num_bytes:
            self._arena = _room(-(-num_bytes // self._slot_bytes), self._slot_bytes)
        self._free = []
        self._rolling = RollingBuffer(
            plan,
            arena=self._arena.view(-1)[:num_bytes].view(num_slots, self._sample_bytes),
            num_samples=int(self._numbers.first_sample[-1]),
            first_sample_of=self._numbers.first_sample_of,
            load=self._load,
            load_rows=self._load_rows,
            will_load=self._will_load,
            block_bytes=self._slot_bytes,
            pool=self._threads(),
            most_ahead=2 * self._num_threads,
        )
        return True

    def _stop_rolling(self) -> None:
        """Go back to whole blocks."""
        if self._rolling is not None:
            self._rolling.stop()
            self._num_rolled += self._rolling.num_block_reads
            self._rolling = None
            self._free = list(range(len(self._arena)))

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place; see `FieldReader.read_into`.

        Args:
            indices: int64 (n,) sample numbers.
            out: (n, *sample_shape), contiguous, host memory.

        Raises:
            FeedError: A chunk cannot be read or decoded, a file became shorter, or the reader is closed.
        """
        if not out.numel():
            return
        target = out.view(len(indices), -1).view(torch.uint8)
        with self._lock:
            if self._is_closed:
                raise FeedError("the reader is closed; open another one.")
            if self._rolling is not None:
                if self._rolling.covers(indices):
                    self._rolling.read_into(indices, target)
                    return
                self._stop_rolling()
            blocks, inside = self._locate(indices)
            if self._plan is not None and not self._plan.covers(self._position, blocks):
                self._plan = None
            needed = np.unique(blocks)
            if self._plan is None:
                missing = sum(block not in self._slot_of for block in needed.tolist())
                self._reserve(max(len(self._slot_of) + missing, min(2 * len(self._arena), self._most_slots)))
            for first in range(0, len(needed), max(1, len(self._arena))):
                part = needed[first : first + len(self._arena)]
                slots = self._slots_of(part.tolist())
                picked = slice(None) if len(part) == len(needed) else np.flatnonzero(np.isin(blocks, part))
                positions = slots[np.searchsorted(part, blocks[picked])] * self._slot_bytes + inside[picked]
                self._gather(positions, target, None if isinstance(picked, slice) else picked)
            self._use_up(blocks)
            self._read_ahead()
            if self._plan is None:
                self._end_threads()

    def rest(self) -> None:
        """End the threads until there is something to read again; what is kept for all epochs stays."""
        with self._lock:
            self._stop_rolling()
            self._plan = None
            self._end_threads()

    def _end_threads(self) -> None:
        self._wait_for_all()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._pool = None

    def _locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Block of each sample, counted through all files, and the sample's first byte inside it."""
        blocks, rows = self._numbers.locate(indices)
        return blocks, rows * self._sample_bytes

    def _gather(self, positions: Indices, target: torch.Tensor, picked: Indices | None) -> None:
        """Copy samples out of the arena: one call."""
        num_bytes = self._arena.numel()
        rows = self._arena.view(-1).as_strided((num_bytes - self._sample_bytes + 1, self._sample_bytes), (1, 1))
        if picked is None:
            torch.index_select(rows, 0, torch.from_numpy(positions), out=target)
        else:
            put_rows(target, picked, rows.index_select(0, torch.from_numpy(positions)))

    # Slots ------------------------------------------------------------------------------------------------

    def _reserve(self, num_slots: int) -> None:
        """Make the arena large enough, within the limit; what is in it stays."""
        wanted = min(num_slots, self._most_slots, int(self._first_block[-1]))
        have = len(self._arena)
        if wanted <= have:
            return
        self._wait_for_all()
        arena = _room(wanted, self._slot_bytes)
        arena[:have] = self._arena
        self._arena = arena
        self._free.extend(range(have, wanted))

    def _slots_of(self, blocks: list[int]) -> Indices:
        """Slots of blocks, read now where they are not there yet."""
        pinned = set(blocks)
        for block in blocks:
            if block not in self._slot_of:
                self._start(block, pinned)
        for block in blocks:
            self._finish(block)
        return np.array([self._slot_of[block] for block in blocks], dtype=np.int64)

    def _start(self, block: int, pinned: set[int]) -> None:
        """Give a block a slot and have it read."""
        if not self._free:
            self._let_go(pinned)
        slot = self._free.pop()
        self._slot_of[block] = slot
        self._next_use.setdefault(block, 0)
        self._loading[block] = self._threads().submit(self._load, block, self._arena[slot].numpy())
        self._num_started += 1

    def _load(self, block: int, out: npt.NDArray[np.uint8]) -> None:
        """Read and decode a block, counted through all files."""
        loader, number = self._loader_of(block)
        loader.load(number, out)

    def _load_rows(self, block: int, parts: list[memoryview]) -> bool:
        loader, number = self._loader_of(block)
        return loader.load_rows(number, parts)

    def _will_load(self, block: int) -> None:
        loader, number = self._loader_of(block)
        with suppress(FeedError, OSError):  # what is wrong with a file is said when it is read
            loader.will_load(number)

    def _loader_of(self, block: int) -> tuple[BlockLoader, int]:
        """Who loads a block that is counted through all files, and its number there."""
        number = int(np.searchsorted(self._first_block, block, side="right")) - 1
        return self._loaders[number], block - int(self._first_block[number])

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="gpufeed-decoder")
        return self._pool

    @property
    def num_block_reads(self) -> int:
        """Blocks read and decoded so far."""
        rolled = 0 if self._rolling is None else self._rolling.num_block_reads
        return self._num_started + self._num_rolled + rolled

    def _finish(self, block: int) -> None:
        """Wait until a block is there; one that cannot be read gives its slot back."""
        future = self._loading.pop(block, None)
        if future is None:
            return
        try:
            future.result()
        except BaseException:
            if not future.done():  # interrupted: the thread still writes to the slot
                self._loading[block] = future
            else:
                self._free.append(self._slot_of.pop(block))
                self._next_use.pop(block, None)
            raise

    def _let_go(self, pinned: set[int]) -> None:
        """Free the slot of the block that is needed again last."""
        self._forget(max((block for block in self._slot_of if block not in pinned), key=self._next_use.__getitem__))

    def _use_up(self, blocks: Indices) -> None:
        """A batch was read: note when its blocks come again, free those that do not."""
        first, self._position = self._position, self._position + len(blocks)
        if self._plan is None:
            # Nothing is known: what was used longest ago is let go first.
            for block in np.unique(blocks).tolist():
                if block in self._slot_of:
                    self._next_use[block] = -self._position
            return
        for block, use in zip(blocks.tolist(), self._plan.next_use[first : self._position].tolist(), strict=True):
            if block in self._slot_of:
                self._next_use[block] = use
                if use == NEVER and not self._keeps_all:
                    self._forget(block)

    def _forget(self, block: int) -> None:
        """Give the slot of a block back, once nobody writes to it any more."""
        future = self._loading.pop(block, None)
        if future is not None and not future.cancel():
            future.exception()  # waits; a block that is not wanted may be damaged
        self._free.append(self._slot_of.pop(block))
        self._next_use.pop(block, None)

    def _drop_all(self) -> None:
        for future in self._loading.values():
            future.cancel()  # all of them first: while one is waited for, the threads would begin the next
        for block in list(self._slot_of):
            self._forget(block)

    def _read_ahead(self) -> None:
        """Have the next blocks read while there are free slots, a few for each thread at a time."""
        plan = self._plan
        if plan is None:
            return
        while self._free and self._ahead < len(plan.first_uses):
            if sum(not future.done() for future in self._loading.values()) >= 2 * self._num_threads:
                break
            use = int(plan.first_uses[self._ahead])
            self._ahead += 1
            block = int(plan.blocks[use])
            if use >= self._position and block not in self._slot_of:
                self._next_use[block] = use
                self._start(block, set())

    def _wait_for_all(self) -> None:
        for future in self._loading.values():
            if not future.cancelled():
                future.exception()

    def close(self) -> None:
        """End the threads, close the files, give the memory back. Closing twice is allowed."""
        with self._lock:
            self._is_closed = True
            self._stop_rolling()
            self._drop_all()
            self._end_threads()
            self._plan = None
            self._arena = self._arena[:0].clone()
            for loader in self._loaders:
                loader.close()


def _room(num_slots: int, slot_bytes: int) -> torch.Tensor:
    """Memory on the host. NumPy asks for large pages: of small ones each costs a fault when it is first written to."""
    return torch.from_numpy(np.empty((num_slots, slot_bytes), dtype=np.uint8))


def _open_bytes(layout: H5DatasetLayout) -> ByteFile:
    """The file that the bytes of a layout lie in."""
    stamp = layout.storage_stamp
    return LocalFile(stamp) if isinstance(stamp, FileStamp) else SharedBytes(stamp.path)
