"""What several ranks agree on before a step, on the host."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

__all__ = ["HostVote", "warn_uneven_ranks"]

T = TypeVar("T")


class HostVote:
    """Lets all ranks act on the smallest or the largest of their numbers.

    It has a process group of its own on the host's network (gloo), so that it neither waits for the device nor gets
    between collectives of the training. Every rank has to vote at the same places.

    Attributes:
        rank: This process; 0 if it is alone.
        num_ranks: How many there are.
        num_votes: Votes taken so far.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        """Join with all ranks of the default process group, if there are several: every rank has to call this.

        Args:
            timeout: How long a rank waits for the others before it fails; None is what the backend takes.
        """
        is_alone = (
            not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1
        )
        self._group: Any = None if is_alone else distributed.new_group(backend="gloo", timeout=timeout)
        self.rank, self.num_ranks = (0, 1) if is_alone else (distributed.get_rank(), distributed.get_world_size())
        self.num_votes = 0

    def minimum(self, *numbers: int) -> list[int]:
        """Smallest of each number over all ranks.

        Args:
            *numbers: Equally many on every rank.

        Returns:
            The same on every rank.
        """
        return self._reduce(numbers, distributed.ReduceOp.MIN)

    def maximum(self, *numbers: int) -> list[int]:
        """Largest of each number over all ranks.

        Args:
            *numbers: Equally many on every rank.

        Returns:
            The same on every rank.
        """
        return self._reduce(numbers, distributed.ReduceOp.MAX)

    def collect(self, item: T) -> list[T]:
        """What each rank has to say.

        Args:
            item: Anything that can be pickled.

        Returns:
            By rank, the same on every rank.
        """
        if self._group is None:
            return [item]
        items: list[Any] = [None] * self.num_ranks
        distributed.all_gather_object(items, item, group=self._group)
        self.num_votes += 1
        return items

    def _reduce(self, numbers: tuple[int, ...], operation: Any) -> list[int]:
        if self._group is None:
            return list(numbers)
        ballot = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        distributed.all_reduce(ballot, op=operation, group=self._group)
        self.num_votes += 1
        return [int(number) for number in ballot.tolist()]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None


def warn_uneven_ranks() -> None:
    """Say that a batch is not used because another rank has none."""
    warnings.warn(
        "another rank has no batch left: the epoch ends here on all ranks, and a batch fetched on this one is not "
        "used. Give every rank the same number of batches.",
        stacklevel=2,
    )
