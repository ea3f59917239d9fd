"""The order of a window shuffle over files that are read by whole chunks. Pure: no file is opened here.

Two steps, each a function of seed and epoch alone::

    chunks, shuffled         | 7 7 7 7 | 2 2 2 2 | 9 9 9 9 | 0 0 0 0 |       each chunk stays together
    a rolling buffer         holds `window_samples` samples; one of them, picked at random, is used, and the next one
                             of the sequence takes its place
    result                     7 2 7 9 7 2 2 0 7 2 9 9 0 ...

Each chunk is read and decoded once in an epoch, and no more samples than the window and a chunk have to be kept. The
buffer never runs empty and is never refilled as a whole, so a sample may stay in it for several windows: a file that is
sorted by class is mixed from far more chunks than the window holds at a time.

Several ranks share an epoch step by step (`lightning_gpufeed.hdf5.order`). So that each of them meets chunks of its
own, the shuffled chunks are first dealt to as many lanes, and the lanes are then interleaved as the ranks will take
them. The lanes belong to the order: who resumes on another number of ranks keeps them, and reads some chunks twice.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.hdf5.order import EpochPlan

__all__ = ["ONE_LANE", "Lanes", "grouping_digest", "rolling_order", "window_order"]

Indices = npt.NDArray[np.int64]

_CHUNK_STREAM = 1
"""Third number of the seed for the order of the chunks; the buffer uses the stream of the other shuffles."""


@dataclass(frozen=True)
class Lanes:
    """How an order is laid out for several ranks.

    Attributes:
        num_lanes: Ranks it was made for.
        lane_samples: Samples that each of them takes in a step; of no meaning for one lane.
    """

    num_lanes: int = 1
    lane_samples: int = 1


ONE_LANE = Lanes()


def window_order(groups: Indices, window_samples: int, seed: int, epoch: int, lanes: Lanes = ONE_LANE) -> Indices:
    """Order of the samples in one epoch.

    Args:
        groups: int64 (num_samples,): number of the chunk that each sample lies in.
        window_samples: Size of the buffer; of each lane's where there are several.
        seed: Any non-negative integer.
        epoch: Counts from 0.
        lanes: Ranks to lay the order out for; no more than there are samples.

    Returns:
        int64 (num_samples,): positions in `groups`, each once.
    """
    numbers, group_of = np.unique(groups, return_inverse=True)
    generator = np.random.PCG64(np.random.SeedSequence([seed, epoch, _CHUNK_STREAM]))
    rank_of = np.empty(len(numbers), dtype=np.int64)
    rank_of[np.argsort(generator.random_raw(len(numbers)), kind="stable")] = np.arange(len(numbers))
    by_chunk = np.argsort(rank_of[group_of], kind="stable")
    share, extra = divmod(len(groups), lanes.num_lanes)
    edges = np.cumsum([0] + [share + (lane < extra) for lane in range(lanes.num_lanes)])
    # Each lane has a buffer of its own, and no sample is moved out of its lane.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(len(groups))
    mixed = [
        by_chunk[first:stop][rolling_order(stop - first, window_samples, bits[first:stop])]
        for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    if lanes.num_lanes == 1:
        return mixed[0]
    plan = EpochPlan(len(groups), lanes.lane_samples, lanes.num_lanes)
    steps = [np.minimum(np.arange(len(lane)) // lanes.lane_samples, plan.num_steps - 1) for lane in mixed]
    return np.concatenate(mixed)[np.argsort(np.concatenate(steps), kind="stable")]


def rolling_order(num_samples: int, window_samples: int, bits: npt.NDArray[np.uint64]) -> Indices:
    """In which order a buffer gives out a sequence that rolls through it.

    ::

        slots of the buffer, one picked in each step     2   0   2   1   2 ...
        what it gives                                    the sample put into that slot when it was picked last

    Args:
        num_samples: Length of the sequence.
        window_samples: Slots of the buffer, at least 1; as many as there are samples make every order equally likely.
        bits: uint64 (num_samples,): random.

    Returns:
        int64 (num_samples,): places in the sequence, each once.
    """
    num_slots = min(window_samples, num_samples)
    num_picks = num_samples - num_slots
    # The upper 53 bits make a float in [0, 1) exactly.
    picks = ((bits[:num_picks] >> np.uint64(11)).astype(np.float64) * 2.0**-53 * num_slots).astype(np.int64)
    by_slot = np.argsort(picks, kind="stable")
    is_again = picks[by_slot[1:]] == picks[by_slot[:-1]]
    order = np.empty(num_samples, dtype=np.int64)
    order[:num_picks] = picks  # the first one in each slot
    # Pick number t puts the sample at num_slots + t into its slot, where the next pick of that slot finds it.
    order[by_slot[1:][is_again]] = num_slots + by_slot[:-1][is_again]
    left = np.arange(num_slots)
    np.maximum.at(left, picks, num_slots + np.arange(num_picks))
    order[num_picks:] = left[np.argsort(bits[num_picks:], kind="stable")]
    return order


def grouping_digest(groups: Indices) -> str:
    """A short text that changes when samples lie in other chunks, so that a saved position would mean another order.

    Args:
        groups: int64 (num_samples,).

    Returns:
        Hexadecimal digits.
    """
    global _latest
    known, digest = _latest
    if known() is not groups:
        # Not how chunks are counted matters, but which samples lie together, and in which order the chunks come.
        _, group_of = np.unique(groups, return_inverse=True)
        digest = f"{zlib.crc32(group_of.astype(np.int64).tobytes()):08x}"
        _latest = (weakref.ref(groups), digest)
    return digest


# A loader asks at every checkpoint, always for the same array, which nobody changes.
_latest: tuple[Callable[[], Any], str] = (lambda: None, "")
