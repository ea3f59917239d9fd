"""Divides samples into folds for cross-validation, and takes one fold aside. Pure.

Each sample is in one fold; with fold k for validation the others are trained on::

    fold number      0 1 2 0 1 2 0 1 2 ...
    fold=1           t V t t V t t V t ...      V validation, t training
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.hdf5.arguments import whole_number
from lightning_gpufeed.hdf5.order import FullShuffle

__all__ = ["FoldChoice", "assign_folds", "choose_fold", "take_fold"]

Indices = npt.NDArray[np.int64]

_MOST_NAMED = 20


@dataclass(frozen=True, eq=False)
class FoldChoice:
    """Which fold is for validation, and what makes the folds.

    Attributes:
        fold: Number of the fold.
        folds: Fold number of each sample of the training files, or the name of the field or dataset that holds them;
            None to make folds.
        num_folds: How many to make.
        group_by: Field or dataset whose equal values stay in one fold; None for none.
    """

    fold: int
    folds: Sequence[int] | str | None = None
    num_folds: int | None = None
    group_by: str | None = None


def choose_fold(
    fold: int | None, folds: Sequence[int] | str | None, num_folds: int | None, group_by: str | None
) -> FoldChoice | None:
    """Read the arguments that say what is validated on in a cross-validation.

    Args:
        fold: Which fold is for validation.
        folds: Fold number of each sample, or where they are.
        num_folds: How many folds to make if there are none.
        group_by: What stays together in folds that are made.

    Returns:
        The choice; None if nothing is said of folds.

    Raises:
        ValueError: They do not fit together.
    """
    if folds is None and num_folds is None:
        if fold is None and group_by is None:
            return None
        raise ValueError(
            f"{'group_by' if fold is None else 'fold'} is given, but no folds are: give folds=, the fold number of "
            f"each sample (or the name of the field that holds them), or num_folds= to make folds."
        )
    if folds is not None and num_folds is not None:
        raise ValueError("both folds and num_folds are given: samples have fold numbers, or folds are made, not both.")
    if folds is not None and group_by is not None:
        raise ValueError("group_by says how folds are made, but folds= gives them. Leave one of the two off.")
    if fold is None:
        raise ValueError("there are folds, but fold= does not say which of them is for validation.")
    if num_folds is None:
        return FoldChoice(whole_number("fold", fold, -(2**62)), folds)
    num_folds = whole_number("num_folds", num_folds, 2)
    return FoldChoice(whole_number("fold", fold, 0, num_folds - 1), None, num_folds, group_by)


def assign_folds(
    num_samples: int,
    num_folds: int,
    seed: int,
    labels: npt.NDArray[Any] | None = None,
    groups: npt.NDArray[Any] | None = None,
) -> Indices:
    """Deal samples to folds at random.

    Without groups the folds differ by at most one sample, and with labels by at most one sample of each class too.
    Groups go to folds whole, the largest first, each to the fold that has least of the group's classes, so folds are
    as even as the groups allow, or nearly.

    Args:
        num_samples: How many there are.
        num_folds: How many folds, at least 2.
        seed: Decides which sample, or group, is in which fold.
        labels: (num_samples,): class of each sample, to keep the proportions of; None for none.
        groups: (num_samples,): samples of equal value stay in one fold; None for none.

    Returns:
        int64 (num_samples,): 0 to num_folds - 1, every one of which occurs; the same on every machine.

    Raises:
        ValueError: There are fewer samples, or groups, than folds.
    """
    num_parts = num_samples if groups is None else len(np.unique(groups))
    if num_parts < num_folds:
        what = "samples" if groups is None else "groups"
        raise ValueError(
            f"num_folds is {num_folds}, but there are {num_parts} {what} to make folds of; expected at most that many."
        )
    if groups is not None:
        return _assign_groups(
            np.zeros(num_samples, dtype=np.int64) if labels is None else labels, groups, num_folds, seed
        )
    order = FullShuffle().permutation(num_samples, seed, 0)
    if labels is not None:
        # Class after class, dealt out in turn: where one class ends the next goes on.
        order = order[np.argsort(labels[order], kind="stable")]
    folds = np.empty(num_samples, dtype=np.int64)
    folds[order] = np.arange(num_samples) % num_folds
    return folds


def _assign_groups(labels: npt.NDArray[Any], groups: npt.NDArray[Any], num_folds: int, seed: int) -> Indices:
    """Give whole groups to folds."""
    _, classes = np.unique(labels, return_inverse=True)
    _, members = np.unique(groups, return_inverse=True)
    class_totals, sizes = np.bincount(classes), np.bincount(members)
    # How many samples of which class each group has, one group after the other.
    pairs, counts = np.unique(members * len(class_totals) + classes, return_counts=True)
    pair_groups, pair_classes = np.divmod(pairs, len(class_totals))
    bounds = np.searchsorted(pair_groups, np.arange(len(sizes) + 1))
    random = FullShuffle().permutation(len(sizes), seed, 0)
    held = np.zeros((num_folds, len(class_totals)), dtype=np.int64)
    fold_of_group = np.empty(len(sizes), dtype=np.int64)
    for group in random[np.argsort(-sizes[random], kind="stable")].tolist():
        own = slice(bounds[group], bounds[group + 1])
        share = counts[own] / class_totals[pair_classes[own]]
        # Added in order, one by one: a sum in blocks may round differently elsewhere.
        crowding = np.cumsum(held[:, pair_classes[own]] * share, axis=1)[:, -1]
        fold = int(np.lexsort((held.sum(axis=1), crowding))[0])
        held[fold, pair_classes[own]] += counts[own]
        fold_of_group[group] = fold
    return fold_of_group[members]


def take_fold(pool: Indices, folds: npt.NDArray[Any], fold: int) -> tuple[Indices, Indices]:
    """Take the samples of one fold aside.

    Args:
        pool: int64 (n,): samples to choose from.
        folds: Integers (n,): fold number of each sample of `pool`.
        fold: The fold to take.

    Returns:
        (samples of the fold, the others), each in the order of `pool`. Both hold at least one sample.

    Raises:
        ValueError: No sample is in the fold, or all are.
    """
    is_taken = folds == fold
    if is_taken.any() and not is_taken.all():
        return pool[is_taken], pool[~is_taken]
    numbers, counts = np.unique(folds, return_counts=True)
    parts = [f"{number} ({count} samples)" for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)]
    named = ", ".join(parts[:_MOST_NAMED]) + (f" and {len(parts) - _MOST_NAMED} more" if parts[_MOST_NAMED:] else "")
    if not is_taken.any():
        raise ValueError(f"fold={fold}: no sample is in that fold. There are the folds {named}.")
    raise ValueError(f"fold={fold}: all {len(pool)} samples are in that fold, so none is left for training.")
