"""When each block of a file is needed in an epoch, and what to let go of when memory is full. Pure.

A block is what is read and decoded in one go: a row of the chunk grid, or about a megabyte of a dataset without
chunks. The order of the samples is known for the whole epoch, so nothing has to be guessed::

    samples, in order   a1 b1 a2 c1 b2 c2 ...        block by block: first use, next use, last use
    read ahead          a, b, c                      in the order of first use
    let go              a after a2                   what is used up, else what is needed again last

Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer (1966): letting go of what is
needed again last costs the fewest reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["NEVER", "SamplePlan", "UsePlan"]

Indices = npt.NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
"""The next use of a block that is not needed any more."""


@dataclass(frozen=True, eq=False)
class UsePlan:
    """Uses of blocks by the samples of an epoch, in order.

    Attributes:
        blocks: int64 (n,): the block that each sample lies in.
        next_use: int64 (n,): position of the next sample of the same block, `NEVER` for its last.
        first_uses: int64 (m,): positions at which a block is needed for the first time, ascending.
    """

    blocks: Indices
    next_use: Indices
    first_uses: Indices

    @classmethod
    def of(cls, blocks: Indices) -> UsePlan:
        """Look an order through.

        Args:
            blocks: int64 (n,): block number of each sample, in order.

        Returns:
            The plan.
        """
        by_block = np.argsort(blocks, kind="stable")
        is_followed = blocks[by_block[1:]] == blocks[by_block[:-1]]
        next_use = np.full(len(blocks), NEVER, dtype=np.int64)
        next_use[by_block[:-1][is_followed]] = by_block[1:][is_followed]
        is_first = np.ones(len(blocks), dtype=bool)
        is_first[by_block[1:][is_followed]] = False
        return cls(blocks, next_use, np.flatnonzero(is_first))

    def most_live(self, batch_samples: int = 1) -> int:
        """Blocks between their first and last use at the same time, at most: to read each once, so many are kept.

        Args:
            batch_samples: Samples that are used at a time.

        Returns:
            The number.
        """
        if not len(self.blocks):
            return 0
        change = np.zeros((len(self.blocks) - 1) // batch_samples + 2, dtype=np.int64)
        np.add.at(change, self.first_uses // batch_samples, 1)
        np.subtract.at(change, np.flatnonzero(self.next_use == NEVER) // batch_samples + 1, 1)
        return int(np.cumsum(change).max())

    def covers(self, position: int, blocks: Indices) -> bool:
        """Whether these blocks are what the plan has from a position on.

        Args:
            position: Samples used so far.
            blocks: int64 (k,).

        Returns:
            True if so.
        """
        return bool(np.array_equal(self.blocks[position : position + len(blocks)], blocks))


@dataclass(frozen=True, eq=False)
class SamplePlan:
    """What to keep of each block, and until when, if single samples are kept and not whole blocks.

    Attributes:
        samples: int64 (n,): sample numbers in the order of their use.
        is_last: bool (n,): whether that sample is not used again.
        blocks: int64 (m,): blocks in the order of their first use.
        first_uses: int64 (m,): position at which each is needed for the first time, ascending.
        members: int64 (k,): the samples that are used, each once, those of `blocks[0]` first.
        starts: int64 (m + 1,): where the members of each block begin.
    """

    samples: Indices
    is_last: npt.NDArray[np.bool_]
    blocks: Indices
    first_uses: Indices
    members: Indices
    starts: Indices

    @classmethod
    def of(cls, samples: Indices, blocks: Indices) -> SamplePlan:
        """Look an order through.

        Args:
            samples: int64 (n,): sample numbers in order; repeats are allowed.
            blocks: int64 (n,): block of each.

        Returns:
            The plan.
        """
        num_uses = len(samples)
        members, reverse_last = np.unique(samples[::-1], return_index=True)
        last = num_uses - 1 - reverse_last
        is_last = np.zeros(num_uses, dtype=bool)
        is_last[last] = True
        numbers, first, of_use = np.unique(blocks, return_index=True, return_inverse=True)
        sequence = np.argsort(first, kind="stable")
        rank = np.empty(len(numbers), dtype=np.int64)
        rank[sequence] = np.arange(len(numbers))
        member_rank = rank[of_use[last]]
        by_rank = np.argsort(member_rank, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(member_rank, minlength=len(numbers)))]).astype(np.int64)
        return cls(samples, is_last, numbers[sequence], first[sequence], members[by_rank], starts)

    def most_kept(self, batch_samples: int = 1) -> int:
        """Samples to be kept at the same time, at most, if each block is read when it is first needed.

        Args:
            batch_samples: Samples that are used at a time.

        Returns:
            The number.
        """
        if not len(self.samples):
            return 0
        num_batches = (len(self.samples) - 1) // batch_samples + 1
        come = np.bincount(self.first_uses // batch_samples, np.diff(self.starts), num_batches + 1)
        go = np.bincount(np.flatnonzero(self.is_last) // batch_samples + 1, minlength=num_batches + 1)
        return int(np.cumsum(come - go).max())

    def covers(self, position: int, samples: Indices) -> bool:
        """Whether these samples are what the plan has from a position on.

        Args:
            position: Samples used so far.
            samples: int64 (k,).

        Returns:
            True if so.
        """
        return bool(np.array_equal(self.samples[position : position + len(samples)], samples))
