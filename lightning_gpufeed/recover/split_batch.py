"""Cut a batch into microbatches that add up to it, and notice when user code changed it.

::

    {"image": (512, 3, 32, 32), "name": [512 strings], "weights": (10,), "epoch": 3}      in 4 microbatches:
    {"image": (128, 3, 32, 32), "name": [128 strings], "weights": (10,), "epoch": 3}      four times
               rows 0 to 127, ...        entries 0 to 127, ...  the same objects

Tensors are narrowed, never copied: a copy made because memory ran out would run out of memory again. No sample is
lost and none comes twice; a batch whose samples cannot be told apart with certainty is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_gpufeed.device.samples import (
    as_same_class,
    is_container,
    is_sequence,
    like,
    parts,
    rebuilt,
    with_entries,
)
from lightning_gpufeed.recover.batch_reading import BatchReader, Reading, is_opaque, type_name

__all__ = ["BatchGuard", "BatchSplitter", "Split", "changed_in_place", "microbatch_sizes"]


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


class BatchGuard:
    """Notes what a batch is like, to notice later whether user code changed it.

    An attempt that failed may have normalised the images in place or taken the labels out of the dict; the next
    attempt would see other data. In-place changes of tensors are seen by their version counter (not those through
    `.data`, of arrays, of tensors made in inference mode, or inside objects that cannot be looked into).

    Example:
        >>> batch = {"image": torch.zeros(2), "label": torch.zeros(2)}
        >>> guard = BatchGuard(batch)
        >>> _ = batch["image"].add_(1), batch.pop("label")
        >>> guard.changed()
        ["batch['image']", "batch['label'] was removed"]
        >>> list(guard.restored())
        ['image', 'label']
    """

    def __init__(self, batch: Any) -> None:
        """Note it: a few microseconds, nothing is copied but lists of references.

        Args:
            batch: A nested batch.
        """
        self._note = _noted(batch)

    def changed(self) -> list[str]:
        """Key paths of all that changed: `changed_tensors`, then `changed_containers`."""
        return self.changed_tensors() + self.changed_containers()

    def changed_tensors(self) -> list[str]:
        """Key paths of what cannot be undone: tensors changed in place, edited objects that cannot be rebuilt."""
        return _changed_tensors(self._note, "batch")

    def changed_containers(self) -> list[str]:
        """Key paths of entries that were removed, replaced or added; `restored` undoes it."""
        return _changed_containers(self._note, "batch")

    def restored(self) -> Any:
        """The batch with the structure it had when it was noted.

        Returns:
            New containers around the same leaf objects. Later edits of what is returned do not reach the note, so
            that every attempt can have a batch of its own.
        """
        return _restored(self._note)


def changed_in_place(guard: BatchGuard) -> str:
    """Why a batch cannot be done again.

    Args:
        guard: Of the batch.

    Returns:
        A reason with its cure; empty if it can.
    """
    changed = guard.changed_tensors()
    if not changed:
        return ""
    return (
        f"the batch cannot be done again, because {', '.join(changed)} was changed in place; write x = x - mean in the "
        f"place of x.sub_(mean)"
    )


class _Note:
    """A part of a batch as it was."""

    __slots__ = ("is_fixed", "keys", "node", "parts", "version")

    def __init__(self, node: Any) -> None:
        self.node = node
        self.version: int | None = None
        self.is_fixed = False  # it cannot be rebuilt, so an edit of it cannot be undone
        self.keys: list[Any] = []
        self.parts: list[tuple[str, _Note]] = []


def _noted(node: Any) -> _Note:
    note = _Note(node)
    if isinstance(node, torch.Tensor):
        if not node.is_inference():
            note.version = node._version
    elif is_container(node):
        note.parts = [(where, _noted(part)) for where, part in parts(node)]
        note.is_fixed = is_opaque(node)
        if isinstance(node, Mapping):
            note.keys = list(node.keys())
    return note


def _changed_tensors(note: _Note, path: str) -> list[str]:
    if note.version is not None and note.node._version != note.version:
        return [path]
    if note.is_fixed and _changed_containers(note, path, is_inside=True):
        return [path]
    return [changed for where, part in note.parts for changed in _changed_tensors(part, path + where)]


def _changed_containers(note: _Note, path: str, *, is_inside: bool = False) -> list[str]:
    if not is_container(note.node) or (note.is_fixed and not is_inside):
        return []
    now = dict(parts(note.node))
    changed = []
    for where, part in note.parts:
        if where not in now:
            changed.append(f"{path}{where} was removed")
        elif now.pop(where) is not part.node:
            changed.append(f"{path}{where} was replaced")
        changed += _changed_containers(part, path + where)
    return changed + [f"{path}{where} was added" for where in now]


def _restored(note: _Note) -> Any:
    node = note.node
    if not is_container(node) or note.is_fixed:
        return node
    old = [_restored(part) for _, part in note.parts]
    if isinstance(node, tuple) and all(part is now for part, now in zip(old, node, strict=True)):
        return node
    if isinstance(node, Mapping):
        return with_entries(node, dict(zip(note.keys, old, strict=True)))
    return like(node, old) if is_sequence(node) else rebuilt(node, old)
