"""The order of the samples of an epoch, and what of it a saved position has to carry along. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.order import EpochPlan, Shuffle, WindowShuffle
from lightning_gpufeed.hdf5.window import ONE_LANE, Lanes, grouping_digest, window_order

__all__ = ["EpochOrder", "resumed_lanes", "window_state"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """Everything that the order of an epoch is a function of, but the epoch's number.

    Attributes:
        shuffle: How the samples are mixed.
        num_samples: Samples in an epoch.
        seed: Any non-negative integer.
        indices: int64: the samples chosen, None for all.
        groups: int64 (num_samples,): which of them lie in the same chunk; for a window only.
        lanes: How a window is laid out for the ranks.
    """

    shuffle: Shuffle
    num_samples: int
    seed: int
    indices: Indices | None = None
    groups: Indices | None = None
    lanes: Lanes = ONE_LANE

    def of(self, epoch: int) -> Indices:
        """Sample numbers in the order that all ranks together use them in, step by step.

        Args:
            epoch: Counts from 0.

        Returns:
            int64 (num_samples,).
        """
        if isinstance(self.shuffle, WindowShuffle) and self.groups is not None:
            order = window_order(self.groups, self.shuffle.window_samples, self.seed, epoch, self.lanes)
        else:
            order = self.shuffle.permutation(self.num_samples, self.seed, epoch)
        return order if self.indices is None else self.indices[order]

    def of_rank(self, epoch: int, plan: EpochPlan, rank: int) -> Indices:
        """What is left of an epoch for one rank.

        Args:
            epoch: Counts from 0.
            plan: Where the epoch stands, and how its steps are cut.
            rank: The rank.

        Returns:
            int64: sample numbers, batch after batch.
        """
        order = self.of(epoch)
        parts = [order[slice(*plan.rank_bounds(step, rank))] for step in range(plan.num_steps)]
        return np.concatenate(parts) if parts else order[:0]


def window_state(shuffle: Shuffle, groups: Indices | None, lanes: Lanes) -> dict[str, Any]:
    """What a saved position in a window needs beside seed and shuffle.

    Args:
        shuffle: The loader's.
        groups: Which samples lie in the same chunk.
        lanes: How the order is laid out.

    Returns:
        An entry `window` of numbers and text; nothing for other shuffles.
    """
    if not isinstance(shuffle, WindowShuffle) or groups is None:
        return {}
    return {"window": {"chunks": grouping_digest(groups), **vars(lanes)}}


def resumed_lanes(state: Mapping[str, Any], groups: Indices | None, paths: tuple[str, ...]) -> Lanes:
    """The lanes of a position that was saved in a window shuffle.

    Args:
        state: The loader's state.
        groups: Which samples lie in the same chunk now.
        paths: The files, for the error.

    Returns:
        The lanes; they belong to the order, whatever the number of ranks is now.

    Raises:
        FeedError: The chunks were others then.
    """
    window = state.get("window")
    if window is None or groups is None or window["chunks"] != grouping_digest(groups):
        raise FeedError(
            f"the position was saved in a window shuffle over other chunks than {', '.join(paths)} has now: the order "
            f"cannot be continued. Use the files as they were chunked then, or start without the loader's state."
        )
    return Lanes(window["num_lanes"], window["lane_samples"])
