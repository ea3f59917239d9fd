"""Cut a batch into microbatches that add up to it.

::

    {"image": (512, 3, 32, 32), "name": [512 strings], "weights": (10,), "epoch": 3}      in 4 microbatches:
    {"image": (128, 3, 32, 32), "name": [128 strings], "weights": (10,), "epoch": 3}      four times
               rows 0 to 127, ...        entries 0 to 127, ...  the same objects

Tensors are narrowed, never copied: a copy made because memory ran out would run out of memory again. No sample is
lost and none comes twice; a batch whose samples cannot be told apart with certainty is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_gpufeed.device.samples import (
    as_same_class,
    is_container,
    like,
    parts,
    rebuilt,
)
from lightning_gpufeed.recover.batch_reading import BatchReader, Reading, type_name

__all__ = ["BatchSplitter", "Split", "microbatch_sizes"]


@dataclass(frozen=True)
class Split:
    """A batch in pieces.

    Attributes:
        microbatches: The pieces, in the order of the samples.
        sizes: Samples in each; they add up to those of the batch. 0 where a `split_fn` made pieces of a kind whose
            samples cannot be counted.
        weights: Share of each in a mean over the batch; they add up to 1.
    """

    microbatches: list[Any]
    sizes: list[int]
    weights: list[float]


def microbatch_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Share samples out evenly.

    Args:
        num_samples: How many there are.
        num_microbatches: Into how many microbatches they go.

    Returns:
        Sizes that differ by at most one, larger ones first. None is empty: of fewer samples than microbatches,
        each is one.

    Raises:
        ValueError: There is no microbatch, or a negative number of samples.

    Example:
        >>> microbatch_sizes(10, 4)
        [3, 3, 2, 2]
    """
    if num_samples < 0:
        raise ValueError(f"num_samples is {num_samples}; expected 0 or more.")
    num_microbatches = min(_checked_number(num_microbatches), num_samples)
    if not num_microbatches:
        return []
    size, num_larger = divmod(num_samples, num_microbatches)
    return [size + 1] * num_larger + [size] * (num_microbatches - num_larger)


class BatchSplitter:
    """Cuts batches into microbatches.

    What belongs to which sample is seen from lengths (see `batch_reading`), and remembered: `count` every batch, and
    a last batch of 10 samples beside 10 class weights is cut as rightly as the full ones were.

    Example:
        >>> split = BatchSplitter().split({"x": torch.arange(5), "name": list("abcde")}, 2)
        >>> split.sizes, split.microbatches[1]["x"].tolist(), split.microbatches[1]["name"]
        ([3, 2], [3, 4], ['d', 'e'])
    """

    def __init__(
        self,
        *,
        split_fn: Callable[[Any, int], Sequence[Any]] | None = None,
        weight_fn: Callable[[Any], float | torch.Tensor] | None = None,
        expected_samples: Callable[[], int | None] | None = None,
    ) -> None:
        """Create the splitter.

        Args:
            split_fn: Takes a batch and a number of microbatches, returns at most so many that add up to the batch;
                for batches that cannot be looked into, such as graphs.
            weight_fn: Takes a microbatch, returns its weight in the mean over the batch, for a loss that is a mean
                over something else than samples, such as tokens. Default: its number of samples.
            expected_samples: Gives the number of samples of a full batch (the loader's batch size), or None.
        """
        self._split_fn = split_fn
        self._weight_fn = weight_fn
        self._expected_samples = expected_samples
        self._reader = BatchReader()

    @property
    def can_split_uncounted(self) -> bool:
        """Whether batches whose samples cannot be counted can be split: by a function, and weighed by another."""
        return self._split_fn is not None and self._weight_fn is not None

    def count(self, batch: Any) -> int:
        """Number of samples in a batch.

        Args:
            batch: A nested batch, or an object that tells its number (`num_graphs`, `batch_size`).

        Returns:
            The count.

        Raises:
            ValueError: It cannot be told; names the key paths with their shapes.
        """
        told = _told_count(batch)
        return self._read(batch).num_samples if told is None else told

    def split(self, batch: Any, num_microbatches: int) -> Split:
        """Cut a batch.

        Args:
            batch: A nested batch; it stays as it is.
            num_microbatches: How many microbatches to make; of fewer samples, one for each.

        Returns:
            Microbatches of the same structure. Tensors and arrays of the batch's length are views of its memory;
            lists with an entry for each sample are cut; everything else is the same object in each. A single
            microbatch is the batch itself.

        Raises:
            ValueError: The samples cannot be told apart, or the `split_fn` or `weight_fn` gave something wrong.
        """
        num_microbatches = _checked_number(num_microbatches)
        if self._split_fn is not None:
            return self._split_by_fn(self._split_fn, batch, num_microbatches)
        if num_microbatches == 1:
            return Split([batch], [self._count_or_none(batch) or 0], [1.0])
        reading = self._read(batch)
        sizes = microbatch_sizes(reading.num_samples, num_microbatches)
        if len(sizes) <= 1:
            return Split([batch], [reading.num_samples], [1.0])
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        pieces = [_cut(batch, "batch", reading.samples, start, size) for start, size in zip(starts, sizes, strict=True)]
        return Split(pieces, sizes, self._weights(pieces, sizes))

    def _read(self, batch: Any) -> Reading:
        return self._reader.read(batch, self._expected_samples() if self._expected_samples is not None else None)

    def _count_or_none(self, batch: Any) -> int | None:
        try:
            return self.count(batch)
        except ValueError:
            is_opaque = isinstance(batch, Sized) and not is_container(batch) and not isinstance(batch, np.ndarray)
            return len(batch) if is_opaque and not isinstance(batch, torch.Tensor | str | bytes) else None

    def _split_by_fn(self, split_fn: Callable[[Any, int], Sequence[Any]], batch: Any, num_microbatches: int) -> Split:
        """The user's pieces, if they add up."""
        num_samples = self._count_or_none(batch)
        if num_microbatches == 1 or (num_samples is not None and num_samples <= 1):
            return Split([batch], [num_samples or 0], [1.0])
        pieces = list(split_fn(batch, num_microbatches))
        if not 1 <= len(pieces) <= num_microbatches:
            raise ValueError(
                f"split_fn returned {len(pieces)} microbatches; expected at least 1 and at most {num_microbatches}."
            )
        counts = [self._count_or_none(piece) for piece in pieces]
        sizes = [count for count in counts if count is not None]
        if num_samples is None or len(sizes) < len(pieces):
            if self._weight_fn is None:
                raise ValueError(
                    f"the samples of what split_fn returned cannot be counted ({type_name(batch)} into "
                    f"{type_name(pieces[0])}); give a weight_fn that returns the weight of a microbatch."
                )
            sizes = [0] * len(pieces)
        elif sum(sizes) != num_samples or 0 in sizes:
            raise ValueError(
                f"split_fn returned microbatches of {sizes} samples, {sum(sizes)} together, for a batch of "
                f"{num_samples}; expected every sample once and no empty microbatch."
            )
        return Split(pieces, sizes, self._weights(pieces, sizes))

    def _weights(self, pieces: list[Any], sizes: list[int]) -> list[float]:
        given = [float(size) for size in sizes]
        if self._weight_fn is not None and len(pieces) > 1:
            weights = [_checked_weight(self._weight_fn(piece)) for piece in pieces]
            given = weights if any(weights) else given
        total = sum(given)
        return [weight / total for weight in given] if total else [1 / len(pieces)] * len(pieces)


def _checked_number(num_microbatches: int) -> int:
    try:
        number = operator.index(num_microbatches)
    except TypeError:
        number = 0
    if number < 1 or isinstance(num_microbatches, bool):
        raise ValueError(f"num_microbatches is {num_microbatches!r}; expected a whole number of at least 1.")
    return number


def _checked_weight(given: Any) -> float:
    try:
        weight = float(given)
    except (TypeError, ValueError, RuntimeError):
        weight = -1.0
    if not 0 <= weight < float("inf"):
        raise ValueError(f"weight_fn returned {given!r}; expected a finite number of at least 0.")
    return weight


def _told_count(batch: Any) -> int | None:
    """The number of samples, of a batch that tells it: of graphs, or with the shape of a batch."""
    if isinstance(batch, torch.Tensor):
        is_rows = batch.is_nested or batch.layout is not torch.strided
        return batch.size(0) if is_rows and batch.ndim else None
    num_graphs, shape = getattr(batch, "num_graphs", None), getattr(batch, "batch_size", None)
    if isinstance(num_graphs, int):
        return num_graphs
    return shape[0] if isinstance(shape, torch.Size) and shape else None


def _cut(node: Any, path: str, samples: frozenset[str], start: int, size: int) -> Any:
    """Some samples of a part; a container without samples stays the same object."""
    if path in samples:
        if isinstance(node, torch.Tensor):
            return _narrowed(node, start, size)
        entries = node[start : start + size]
        return entries if isinstance(node, np.ndarray) else like(node, entries)
    if not is_container(node):
        return node
    old = parts(node)
    new = [_cut(part, path + where, samples, start, size) for where, part in old]
    return node if all(now is part for now, (_, part) in zip(new, old, strict=True)) else rebuilt(node, new)


def _narrowed(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    with torch.set_grad_enabled(tensor.requires_grad or torch.is_grad_enabled()):
        return as_same_class(tensor.narrow(0, start, size), tensor)


# What user code did to a batch ------------------------------------------------------------------------------
