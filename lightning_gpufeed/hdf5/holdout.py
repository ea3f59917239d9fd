"""Takes samples aside for validation or test: a seeded fraction, stratified if asked, or given ones. Pure.

Samples are given by their numbers, or by a mask that has an entry for every sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.hdf5.order import FullShuffle

__all__ = ["as_indices", "take_fraction", "take_indices"]

Indices = npt.NDArray[np.int64]


def take_fraction(
    pool: Indices, fraction: float, seed: int, labels: npt.NDArray[np.int64] | None = None
) -> tuple[Indices, Indices]:
    """Take a random fraction of the samples aside.

    Args:
        pool: int64 (n,): samples to choose from.
        fraction: Share to take, above 0 and below 1.
        seed: Decides which.
        labels: int64 (n,), the class of each sample of `pool`: every class then gives its share, as exactly as
            whole samples allow.

    Returns:
        (taken, rest), each in the order of `pool`. Both hold at least one sample.

    Raises:
        ValueError: The fraction is out of range, or there are fewer than two samples.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction is {fraction}; expected a number above 0 and below 1.")
    if len(pool) < 2:
        raise ValueError(f"{len(pool)} sample(s) cannot be divided; expected at least 2.")
    target = min(max(1, round(fraction * len(pool))), len(pool) - 1)
    rank = np.empty(len(pool), dtype=np.int64)
    rank[FullShuffle().permutation(len(pool), seed, 0)] = np.arange(len(pool))
    chosen = rank < target if labels is None else _stratified(rank, fraction, target, labels)
    return pool[chosen], pool[~chosen]


def _stratified(rank: Indices, fraction: float, target: int, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Mark `target` samples so that each class has its share, left-over ones going to the largest remainders."""
    classes, members = np.unique(labels, return_inverse=True)
    counts = np.bincount(members, minlength=len(classes))
    exact = counts * fraction
    quota = np.floor(exact).astype(np.int64)
    missing = target - int(quota.sum())
    by_remainder = np.argsort(-(exact - quota), kind="stable")
    quota[by_remainder[: max(0, missing)]] += 1
    chosen = np.zeros(len(rank), dtype=bool)
    for number in range(len(classes)):
        own = np.flatnonzero(members == number)
        chosen[own[np.argsort(rank[own], kind="stable")[: quota[number]]]] = True
    return chosen


def take_indices(pool: Indices, wanted: npt.ArrayLike, name: str) -> tuple[Indices, Indices]:
    """Take given samples aside.

    Args:
        pool: int64 (n,): samples to choose from.
        wanted: Integers (m,): samples to take, each in `pool`, none twice.
        name: What they are for, for the message.

    Returns:
        (taken in the order wanted, rest in the order of `pool`).

    Raises:
        ValueError: One is not in the pool or is given twice.
    """
    taken = np.asarray(wanted)
    if taken.ndim != 1 or taken.dtype.kind not in "iu" or not taken.size:
        raise ValueError(
            f"{name}: an index array has shape {taken.shape} and type {taken.dtype}; expected integers (m,), m >= 1."
        )
    taken = taken.astype(np.int64)
    if len(np.unique(taken)) < len(taken):
        raise ValueError(f"{name}: the index array names a sample twice; each may be used once.")
    known = np.isin(taken, pool)
    if not known.all():
        raise ValueError(
            f"{name}: the index array names sample {int(taken[~known][0])}, which is not available: it is out of range "
            f"(0 to {int(pool.max(initial=-1))}) or belongs to another split."
        )
    return taken, pool[~np.isin(pool, taken)]


def as_indices(given: npt.ArrayLike, num_samples: int, name: str) -> npt.NDArray[Any]:
    """Sample numbers from sample numbers or from a mask.

    A mask is of booleans, or of as many zeros and ones as there are samples: read as numbers, these would name the
    same samples again and again.

    Args:
        given: Integers (m,), or a mask (num_samples,).
        num_samples: How many samples there are.
        name: What they are for, for the message.

    Returns:
        The numbers as they were given, not checked, or those the mask marks, in rising order.

    Raises:
        ValueError: A mask has not one entry per sample.

    Example:
        >>> as_indices([False, True, True], 3, "val").tolist()
        [1, 2]
    """
    array = np.asarray(given)
    if array.ndim != 1 or not array.size:
        return array
    if array.dtype.kind != "b":
        is_mask = array.dtype.kind in "iu" and len(array) == num_samples > 2 and array.min() >= 0 and array.max() <= 1
        if not is_mask:
            return array
    if len(array) != num_samples:
        raise ValueError(
            f"{name}: a mask has {len(array)} entries; expected {num_samples}, one for each sample of the file(s)."
        )
    return np.flatnonzero(array)
