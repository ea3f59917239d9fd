"""From sample numbers to reads. Pure: no file is opened here.

The raw engine needs one absolute position per sample (`GatherTable.positions`); the h5py engine needs to know
which rows of which block go where in the batch (`plan_block_reads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BlockRead", "GatherTable", "plan_block_reads"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GatherTable:
    """Where every sample of a list of files begins, as positions in one address range.

    ::

        sample -> file (by `first_sample`) -> block of the file -> position = block position + row * sample_bytes

    Attributes:
        first_sample: int64 (num_files + 1,): number of the first sample of each file, then the total.
        block_rows: int64 (num_files,): samples per block in each file.
        first_block: int64 (num_files,): index of each file's first entry in `block_positions`.
        block_positions: int64 (num_blocks,): position of each block, -1 where it was never written.
        sample_bytes: Bytes of one sample.
    """

    first_sample: Indices
    block_rows: Indices
    first_block: Indices
    block_positions: Indices
    sample_bytes: int

    @classmethod
    def build(
        cls,
        num_samples: Sequence[int],
        block_rows: Sequence[int],
        block_positions: Sequence[Indices],
        sample_bytes: int,
    ) -> GatherTable:
        """Join the tables of several files.

        Args:
            num_samples: Samples in each file.
            block_rows: Samples per block in each file.
            block_positions: Positions of each file's blocks.
            sample_bytes: Bytes of one sample, the same in all files.

        Returns:
            The joint table.
        """
        counts = [len(positions) for positions in block_positions]
        return cls(
            first_sample=np.concatenate([[0], np.cumsum(num_samples)]).astype(np.int64),
            block_rows=np.asarray(block_rows, dtype=np.int64),
            first_block=np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.int64),
            block_positions=np.concatenate(list(block_positions)).astype(np.int64),
            sample_bytes=sample_bytes,
        )

    def files(self, indices: Indices) -> Indices:
        """Which file each sample is in.

        Args:
            indices: int64 (n,), 0 to the total number of samples - 1.

        Returns:
            int64 (n,).
        """
        if len(self.block_rows) == 1:
            return np.zeros(len(indices), dtype=np.int64)
        return np.searchsorted(self.first_sample, indices, side="right") - 1

    def positions(self, indices: Indices) -> Indices:
        """Position of the first byte of each sample.

        Args:
            indices: int64 (n,), 0 to the total number of samples - 1.

        Returns:
            int64 (n,); -1 for samples that were never written.
        """
        if len(self.block_rows) == 1:
            block, row = np.divmod(indices, self.block_rows[0])
        else:
            files = self.files(indices)
            block, row = np.divmod(indices - self.first_sample[files], self.block_rows[files])
            block += self.first_block[files]
        base = self.block_positions[block]
        return np.where(base < 0, np.int64(-1), base + row * self.sample_bytes)


@dataclass(frozen=True, eq=False)
class BlockRead:
    """One block to read and where its rows go.

    Attributes:
        file_index: Which file of the list.
        start_row: First row of the block inside its file.
        stop_row: One past the last.
        rows: int64 (n,): rows wanted, counted from `start_row`.
        slots: int64 (n,): where in the batch each of them goes.
    """

    file_index: int
    start_row: int
    stop_row: int
    rows: Indices
    slots: Indices


def plan_block_reads(indices: Indices, num_samples: Sequence[int], block_rows: Sequence[int]) -> list[BlockRead]:
    """Turn sample numbers into whole blocks, each read once, in the order of the files.

    Args:
        indices: int64 (n,): samples wanted, in batch order; repeats are allowed.
        num_samples: Samples in each file.
        block_rows: Rows that one read of each file covers.

    Returns:
        The reads. Together their `slots` are 0 to n - 1, each once.
    """
    first_sample = np.concatenate([[0], np.cumsum(num_samples)]).astype(np.int64)
    rows_of = np.asarray(block_rows, dtype=np.int64)
    files = np.searchsorted(first_sample, indices, side="right") - 1
    local = indices - first_sample[files]
    blocks = local // rows_of[files]
    by_block = np.lexsort((local, blocks, files))
    edges = np.flatnonzero(np.diff(files[by_block]) | np.diff(blocks[by_block])) + 1
    reads = []
    for slots in np.split(by_block, edges) if len(indices) else []:
        file_index = int(files[slots[0]])
        start = int(blocks[slots[0]] * rows_of[file_index])
        stop = min(start + int(rows_of[file_index]), int(num_samples[file_index]))
        reads.append(BlockRead(file_index, start, stop, local[slots] - start, slots.astype(np.int64)))
    return reads
