"""How the classes of a file lie, and what a shuffle that stays within a window makes of that. Pure.

A file packed class by class is the usual case, and a window then holds few classes, however well it is mixed::

    file     a a a a a a a a | b b b b b b b b | c c c c c c c c | d d d d d d d d
    window               [ a a a a b b b b ]
    batch                    b a a b              2 classes; a full shuffle gives almost all 4

Over the chunks of the file in random order (`lightning_gpufeed.hdf5.window`) it holds as many as it holds chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.hdf5.order import WindowShuffle
from lightning_gpufeed.hdf5.report import LabelOrder, LabelReport
from lightning_gpufeed.hdf5.window import window_order

__all__ = ["describe_labels", "order_variety", "window_variety"]

BATCH_SIZE = 256
WINDOW_SAMPLES = 1024

_NUM_BATCHES = 64
_CLUSTERED_BELOW = 0.9

Array = npt.NDArray[Any]


def describe_labels(key: str, labels: Array, *, chunk_rows: int = 1) -> LabelReport | None:
    """Count the classes and tell how they lie.

    Args:
        key: Name of the labels.
        labels: Integers (num_samples,).
        chunk_rows: Samples that are read together, which a window shuffle keeps close.

    Returns:
        The report; None if most values occur once, as numbers of samples do: these are no classes.
    """
    counts = _class_counts(labels)
    num_samples, num_classes = len(labels), len(counts)
    if num_classes > max(2, num_samples // 2):
        return None
    num_changes = int(np.count_nonzero(labels[1:] != labels[:-1]))
    # In a random order two neighbours are of the same class with this probability.
    same = float((counts * (counts - 1.0)).sum()) / max(1, num_samples * (num_samples - 1))
    variety = window_variety(labels)
    if num_classes == 1:
        order = LabelOrder.SINGLE
    elif num_changes == num_classes - 1:
        order = LabelOrder.SORTED
    elif variety < _CLUSTERED_BELOW or num_changes < (num_samples - 1) * (1 - same) / 2:
        order = LabelOrder.CLUSTERED
    else:
        order = LabelOrder.SHUFFLED
    mixed = window_order(np.arange(num_samples) // chunk_rows, WINDOW_SAMPLES, 0, 0)
    return LabelReport(
        key, num_classes, int(counts.min()), int(counts.max()), order, order_variety(labels[mixed], BATCH_SIZE)
    )


def order_variety(labels: Array, batch_size: int) -> float:
    """Different classes in a batch of an order, relative to a batch of a full shuffle.

    Args:
        labels: (num_samples,), at least one, in the order in which they are used.
        batch_size: Samples per batch.

    Returns:
        Above 0, at most 1; the mean over 64 batches spread evenly over the epoch.
    """
    batch_size = min(batch_size, len(labels))
    starts = np.linspace(0, len(labels) // batch_size - 1, _NUM_BATCHES).round().astype(np.int64) * batch_size
    found = [len(np.unique(labels[start : start + batch_size])) for start in starts.tolist()]
    return min(1.0, float(np.mean(found)) / _full_variety(_class_counts(labels), batch_size))


def window_variety(labels: Array, *, window_samples: int = WINDOW_SAMPLES, batch_size: int = BATCH_SIZE) -> float:
    """Different classes in a batch from a window that goes through the file in order, relative to a full shuffle.

    Args:
        labels: Integers (num_samples,), at least one, in the order of the file.
        window_samples: Window of the shuffle.
        batch_size: Samples per batch.

    Returns:
        Above 0, at most 1; the mean over 64 batches spread evenly over an epoch, the same in every call.
    """
    num_samples = len(labels)
    batch_size = min(batch_size, num_samples)
    shuffle = WindowShuffle(window_samples)
    found = []
    starts = np.linspace(0, num_samples // batch_size - 1, _NUM_BATCHES).round().astype(np.int64) * batch_size
    for number, start in enumerate(starts.tolist()):
        # A sample moves by less than a window, so this stretch holds all that the batch can be made of, and the
        # batch comes at the same place of the stretch's order as in the order of the whole file.
        low, high = max(0, start - window_samples), min(num_samples, start + batch_size + window_samples)
        order = shuffle.permutation(high - low, 0, number)[start - low : start - low + batch_size]
        found.append(len(np.unique(labels[low:high][order])))
    return min(1.0, float(np.mean(found)) / _full_variety(_class_counts(labels), batch_size))


def _class_counts(labels: Array) -> npt.NDArray[np.int64]:
    """How often each label occurs."""
    if labels.min() >= 0 and labels.max() < len(labels):
        # Class numbers as they should be: counting takes a small part of the time of sorting.
        counts = np.bincount(labels.astype(np.int64, copy=False))
        return counts[counts > 0]
    return np.unique(labels, return_counts=True)[1]


def _full_variety(counts: npt.NDArray[np.int64], batch_size: int) -> float:
    """Expected number of different classes among `batch_size` samples drawn without repeats."""
    total, of_class = torch.tensor(float(counts.sum()), dtype=torch.float64), torch.from_numpy(counts).double()
    without = total - of_class  # samples of other classes
    # Ways to draw the whole batch from other classes, out of all ways; none where they are fewer than the batch.
    log_absent = _log_ways(without, batch_size) - _log_ways(total, batch_size)
    absent = torch.where(without >= batch_size, log_absent.exp(), 0.0)
    return float((1 - absent).sum())


def _log_ways(num: torch.Tensor, drawn: int) -> torch.Tensor:
    """Logarithm of the number of ways to draw from `num`, in order; meaningless where `num` is below `drawn`."""
    return torch.lgamma(num + 1) - torch.lgamma(num - drawn + 1)
