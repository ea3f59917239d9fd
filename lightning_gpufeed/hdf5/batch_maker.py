"""What turns the order of an epoch into batches: where they are read, where they are put, where they are copied.

::

    order of an epoch -> source in this process         -> pool of host buffers   -> batch
                      -> source in a process of its own -> pool of shared buffers -> batch -> copy to a device begun
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.device.copy_ahead import CopyAhead, StartedCopy
from lightning_gpufeed.device.memory import HostBufferPool
from lightning_gpufeed.device.shared_memory import SharedBufferPool
from lightning_gpufeed.hdf5.epoch_order import EpochOrder
from lightning_gpufeed.hdf5.isolated.reader_process import ReaderProcess
from lightning_gpufeed.hdf5.order import EpochPlan
from lightning_gpufeed.hdf5.source import Batch, H5Source

__all__ = ["BatchMaker", "MadeBatch"]

Indices = npt.NDArray[np.int64]
MadeBatch = Batch | StartedCopy

_READ_AHEAD = 3
"""Batches that the reading process is asked for beside the one that is handed over."""


class BatchMaker:
    """Buffers, the reading process and the copies of one loader, kept from epoch to epoch."""

    def __init__(
        self,
        source: H5Source,
        *,
        num_slots: int,
        pin_memory: bool | None,
        isolate: bool,
        device: torch.device | str | None,
    ) -> None:
        """Note everything; memory is taken and a process started with the first epoch.

        Args:
            source: Where to read.
            num_slots: Batches read ahead.
            pin_memory: Page-locked buffers; None means yes when a GPU is there.
            isolate: Read in a process of its own.
            device: Copy batches there; None leaves them in host memory.
        """
        self._source = source
        self._num_slots = num_slots
        self._pin_memory = pin_memory
        self._isolate = isolate
        self._device = None if device is None else torch.device(device)
        self.forget()

    def forget(self) -> None:
        """Leave what is open as it is, and begin anew: for a process forked from another, and for a pickled loader."""
        self._pool: HostBufferPool | SharedBufferPool | None = None
        self._reader: ReaderProcess | None = None
        self._ahead: CopyAhead | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is open."""
        return {**self.__dict__, "_pool": None, "_reader": None, "_ahead": None}

    def begin(
        self, order: EpochOrder, epoch: int, plan: EpochPlan, rank: int, most_rows: int
    ) -> Callable[[int], MadeBatch]:
        """Make ready for an epoch.

        Args:
            order: The order of the samples.
            epoch: Which epoch.
            plan: Its steps.
            rank: Whose batches.
            most_rows: Rows of the largest batch of any epoch.

        Returns:
            Makes batch number i, one after the other; holds nothing that leads back to the loader.
        """
        pool = self._prepare_pool(max(plan.most_rows, most_rows))
        if self._device is not None and self._ahead is None:
            self._ahead = CopyAhead(self._device)
        if not self._isolate:
            return _Making(_read_here(self._source, pool, order, epoch, plan, rank), self._ahead)
        assert isinstance(pool, SharedBufferPool)
        if self._reader is None:
            self._reader = ReaderProcess(self._source, pool)
        self._reader.pool = pool
        return _Making(_read_there(self._reader, order, epoch, plan, rank), self._ahead)

    def _prepare_pool(self, most_rows: int) -> HostBufferPool | SharedBufferPool:
        if self._pool is None or self._pool.most_rows < most_rows:
            is_pinned = torch.cuda.is_available() if self._pin_memory is None else self._pin_memory
            # The ring, the batch the caller works on, and the one it is about to drop.
            num_buffers = self._num_slots + 2 + (_READ_AHEAD if self._isolate else 0)
            kind = SharedBufferPool if self._isolate else HostBufferPool
            self._pool = kind(self._source.specs, most_rows, num_buffers, is_pinned=is_pinned)
        return self._pool

    def finish(self, made: MadeBatch) -> Batch:
        """Take a batch over in the thread that uses it.

        Args:
            made: By what `begin` returned.

        Returns:
            The batch; on a device the current stream waits for its copy.
        """
        if not isinstance(made, StartedCopy):
            return made
        assert self._ahead is not None
        return self._ahead.finish(made)

    def close(self) -> None:
        """End the process, wait for copies. An epoch may be begun again."""
        if self._ahead is not None:
            self._ahead.close()
        if self._reader is not None:
            self._reader.close()
        self._reader = None


class _Making:
    """Makes the batches of one epoch."""

    def __init__(self, batches: Iterator[Batch], ahead: CopyAhead | None) -> None:
        self._batches = batches
        self._ahead = ahead

    def __call__(self, _: int) -> MadeBatch:
        batch = next(self._batches)
        return batch if self._ahead is None else self._ahead.start(batch)


def _cut(samples: Indices, plan: EpochPlan, rank: int) -> Iterator[Indices]:
    """The samples of each batch."""
    taken = 0
    for step in range(plan.num_steps):
        first, stop = plan.rank_bounds(step, rank)
        yield samples[taken : taken + stop - first]
        taken += stop - first


def _read_here(
    source: H5Source, pool: HostBufferPool | SharedBufferPool, order: EpochOrder, epoch: int, plan: EpochPlan, rank: int
) -> Iterator[Batch]:
    samples = order.of_rank(epoch, plan, rank)
    try:
        source.expect(samples, plan.most_rows)
        for part in _cut(samples, plan, rank):
            yield source.read(part, pool.acquire(len(part)))
    finally:
        source.rest()


def _read_there(reader: ReaderProcess, order: EpochOrder, epoch: int, plan: EpochPlan, rank: int) -> Iterator[Batch]:
    samples = order.of_rank(epoch, plan, rank)
    reader.expect(samples, plan.most_rows)
    yield from reader.read_each(_cut(samples, plan, rank), num_ahead=_READ_AHEAD)
