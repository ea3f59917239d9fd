"""Samples of an epoch on their way from decoded blocks to batches: each kept from its block's reading to its last use.

::

    decoding threads    block 7 -> its rows go to free slots    block 2 -> ...       ahead, in the order of first use
    slots               | 7.0 | 2.3 | 7.5 | free | 2.1 | ...
    read_into           one gather per batch; slots of samples that are not used again are free for the next block

Blocks are always begun in the order in which they are needed, so there is room for the next one whenever it is needed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.hdf5.readers.chunk_plan import SamplePlan
from lightning_gpufeed.hdf5.readers.rows import put_rows

__all__ = ["RollingBuffer"]

Indices = npt.NDArray[np.int64]
Load = Callable[[int, npt.NDArray[np.uint8]], None]

_ANNOUNCED_BYTES = 32 << 20
"""The kernel is told this far ahead what is going to be read."""


class RollingBuffer:
    """The samples in play of one epoch. Used by one thread at a time.

    Attributes:
        num_block_reads: Blocks begun so far.
    """

    def __init__(
        self,
        plan: SamplePlan,
        *,
        arena: torch.Tensor,
        num_samples: int,
        first_sample_of: Callable[[int], int],
        load: Load,
        load_rows: Callable[[int, list[memoryview]], bool],
        will_load: Callable[[int], None],
        block_bytes: int,
        pool: ThreadPoolExecutor,
        most_ahead: int,
    ) -> None:
        """Begin with reading ahead.

        Args:
            plan: What is used when.
            arena: uint8 (slots, sample_bytes): room for `plan.most_kept` samples, and for what is read ahead.
            num_samples: Samples there are, used or not.
            first_sample_of: Block -> number of its first sample.
            load: Reads and decodes a block into uint8 memory of `block_bytes`.
            load_rows: Reads the first rows of a block to where they belong; False, and nothing read, if it cannot.
            will_load: Told of blocks that are loaded soon.
            block_bytes: Bytes of the largest block.
            pool: Threads to do that.
            most_ahead: Blocks in the making at the same time.
        """
        self._plan = plan
        self._arena = arena
        self._first_sample_of = first_sample_of
        self._memory = arena.view(-1).numpy().data
        self._load, self._load_rows, self._will_load = load, load_rows, will_load
        self._num_announced, self._most_announced = 0, max(2, _ANNOUNCED_BYTES // max(1, block_bytes))
        self._block_bytes = block_bytes
        self._pool = pool
        self._most_ahead = most_ahead
        self._own = threading.local()
        self._slot_of = np.full(num_samples, -1, dtype=np.int64)
        # A stack: what was used last is still in the processor's cache.
        self._free = np.arange(len(arena), dtype=np.int64)
        self._num_free = len(arena)
        self._position = 0
        self._next_block = 0
        self._making: deque[Future[None]] = deque()
        self._num_made = 0
        self.num_block_reads = 0
        self._read_ahead()

    def covers(self, indices: Indices) -> bool:
        """Whether these samples are what comes next.

        Args:
            indices: int64 (n,).

        Returns:
            True if so.
        """
        return self._plan.covers(self._position, indices)

    def read_into(self, indices: Indices, target: torch.Tensor) -> None:
        """Copy the next samples into place.

        Args:
            indices: int64 (n,): as `covers` was asked for.
            target: uint8 (n, sample_bytes), contiguous.

        Raises:
            FeedError: A block cannot be read or decoded.
        """
        done = 0
        while done < len(indices):
            needed = int(np.searchsorted(self._plan.first_uses, self._position + len(indices) - done, side="left"))
            while self._next_block < needed and self._has_room():
                self._begin()
            part = len(indices) - done
            if self._next_block < needed:
                # More at a time than was planned for: what is used up first makes room.
                part = int(self._plan.first_uses[self._next_block]) - self._position
            self._hand_out(indices[done : done + part], target[done : done + part])
            done += part
        self._read_ahead()

    def _hand_out(self, indices: Indices, target: torch.Tensor) -> None:
        """Copy samples whose blocks were begun, and free the slots of those that are not used again."""
        stop = self._position + len(indices)
        needed = int(np.searchsorted(self._plan.first_uses, stop, side="left"))
        while self._num_made < needed:
            self._making[0].result()
            self._making.popleft()
            self._num_made += 1
        torch.index_select(self._arena, 0, torch.from_numpy(self._slot_of[indices]), out=target)
        over = indices[self._plan.is_last[self._position : stop]]
        self._free[self._num_free : self._num_free + len(over)] = self._slot_of[over]
        self._num_free += len(over)
        self._position = stop

    def _has_room(self) -> bool:
        """Whether the samples of the next block fit into free slots."""
        starts = self._plan.starts
        return bool(starts[self._next_block + 1] - starts[self._next_block] <= self._num_free)

    def _begin(self) -> None:
        """Have the next block read, and give its samples their slots."""
        first, stop = self._plan.starts[self._next_block : self._next_block + 2]
        members = self._plan.members[first:stop]
        block = int(self._plan.blocks[self._next_block])
        self._num_free -= len(members)
        assert self._num_free >= 0, "the arena is smaller than the plan"
        slots = self._free[self._num_free : self._num_free + len(members)].copy()
        self._slot_of[members] = slots
        start = max(self._num_announced, self._next_block + 1)
        self._num_announced = self._next_block + 1 + self._most_announced
        soon = self._plan.blocks[start : self._num_announced].tolist()
        self._making.append(self._pool.submit(self._make, block, members - self._first_sample_of(block), slots, soon))
        self._next_block += 1
        self.num_block_reads += 1

    def _make(self, block: int, rows: Indices, slots: Indices, soon: list[int]) -> None:
        """Read a block's rows into their slots; what has to be decoded comes to memory of this thread first."""
        for other in soon:
            self._will_load(other)
        is_whole = len(rows) == rows[-1] + 1
        if is_whole and self._load_rows(block, self._parts(slots)):
            return
        memory: npt.NDArray[np.uint8] | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = np.empty(self._block_bytes, dtype=np.uint8)
        self._load(block, memory)
        sample_bytes = self._arena.shape[1]
        values = memory[: len(memory) // sample_bytes * sample_bytes].reshape(-1, sample_bytes)
        put_rows(self._arena, slots, values[: len(rows)] if is_whole else values[rows])

    def _parts(self, slots: Indices) -> list[memoryview]:
        """The memory of slots, in one piece where they follow each other."""
        sample_bytes = self._arena.shape[1]
        edges = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
        firsts = (slots[[0, *edges]] * sample_bytes).tolist()
        sizes = np.diff([0, *edges, len(slots)]) * sample_bytes
        return [self._memory[first : first + size] for first, size in zip(firsts, sizes.tolist(), strict=True)]

    def _read_ahead(self) -> None:
        """Begin more blocks while there is room for them, a few for each thread at a time."""
        while self._next_block < len(self._plan.blocks) and self._has_room():
            if sum(not future.done() for future in self._making) >= self._most_ahead:
                break
            self._begin()

    def stop(self) -> None:
        """Begin nothing more, and wait for what is in the making: it writes to the arena."""
        self._next_block = len(self._plan.blocks)
        for future in self._making:
            future.cancel()  # all of them first: while one is waited for, the threads would begin the next
        for future in self._making:
            if not future.cancelled():
                future.exception()
