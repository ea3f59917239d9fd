"""How the samples lie in a batch: which of its tensors and lists have one entry for each sample.

::

    at 512 samples   {"image": (512, 3, 32, 32), "name": [512 strings], "weights": (10,), "epoch": 3}
                       counts samples             counts samples          whole           whole

A reading says that for one number of samples. Which number it is, is found out in this order:

- the batch is made like one understood before: the parts that counted samples then count them now;
- one number explains every tensor: none is left whole;
- several numbers do, or none: the one that was expected (the loader's batch size).

All else is refused: a wrong guess would train on some samples twice and on others never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from lightning_gpufeed.device.samples import has_tensors, is_container, is_sequence, parts, walk

__all__ = [
    "BatchReader",
    "Reading",
    "are_alike",
    "described",
    "has_length",
    "is_number",
    "is_opaque",
    "sequence_role",
    "type_name",
]

SequenceRole = Literal["samples", "fields", "unclear"]

LONGEST_RECORD = 8
"""A tuple of numbers or a list of unlike things may be a shape or a record up to this length, but not beyond."""

MAX_KNOWN = 16
"""Structures of batches that are remembered: training, validation, and a few each."""


@dataclass(frozen=True)
class Reading:
    """What counts samples in a batch.

    Attributes:
        num_samples: How many there are.
        samples: Key paths of the tensors and lists with an entry for each sample.
        whole: Length of the other tensors and arrays that have a dimension, by key path.
        doubts: Key paths of lists that may hold samples or fields.
        outline: Key path and type of all that was looked at.
    """

    num_samples: int
    samples: frozenset[str]
    whole: dict[str, int]
    doubts: tuple[str, ...]
    outline: tuple[tuple[str, Any], ...]


class BatchReader:
    """Finds out how the samples lie in a batch, and remembers it for later batches made alike."""

    def __init__(self) -> None:
        self._known: list[Reading] = []

    def read(self, batch: Any, expected: int | None = None) -> Reading:
        """Read a batch.

        Args:
            batch: A nested batch.
            expected: How many samples a full batch has, if that is known.

        Returns:
            The reading, without doubts.

        Raises:
            ValueError: The samples cannot be told apart, or in more than one way.
        """
        for known in self._known:
            nodes = list(_nodes(batch, known.samples))
            if known.outline == _outline(nodes):
                _refuse_opaque(nodes)
                return self._read_alike(batch, known, nodes, expected)
        _refuse_opaque(_nodes(batch, frozenset()))
        reading = _read_afresh(batch, expected)
        if reading.num_samples > 1:  # of one sample alone, too much has the length one by chance
            self._known = [*self._known[-MAX_KNOWN + 1 :], reading]
        return reading

    def _read_alike(self, batch: Any, known: Reading, nodes: list[tuple[str, Any]], expected: int | None) -> Reading:
        """A batch made like a known one: the same parts count samples, the others are as long as they were."""
        lengths = {path: len(node) for path, node in nodes if path in known.samples}
        if len(set(lengths.values())) > 1:
            # One of them had the length of that batch by chance: it kept it, where the others went to what is expected.
            kept = {length for length in lengths.values() if length != expected}
            if expected not in lengths.values() or kept != {known.num_samples}:
                raise _cannot_tell(batch, expected)
            self._known.remove(known)
            return self.read(batch, expected)
        for path, node in nodes:
            if path in known.whole and len(node) != known.whole[path]:
                raise ValueError(
                    f"the length of {path} is {len(node)} here and was {known.whole[path]} in a batch before, but it "
                    f"does not count the samples: {described(batch)}. Its rows may belong to samples in a way that "
                    f"cannot be seen; give a split_fn."
                )
        num_samples = next(iter(lengths.values()))
        return Reading(num_samples, known.samples, known.whole, (), known.outline)


# One batch --------------------------------------------------------------------------------------------------


def _read_afresh(batch: Any, expected: int | None) -> Reading:
    readings = [_read_at(batch, num_samples) for num_samples in _candidates(batch, expected)]
    readings = [reading for reading in readings if reading.samples and not reading.doubts]
    full = [reading for reading in readings if not reading.whole]
    if len(full) == 1 and (full[0].num_samples == expected or not _is_weak(batch, full[0])):
        return full[0]
    for reading in full or readings:
        if reading.num_samples == expected:
            _refuse_strangers(batch, reading)
            return reading
    # [(4096, 16), (4096, 1)]: two samples would not be equally long and of unlike width.
    by_rows = [reading for reading in full if expected is None and _has_unlike_rows(batch, reading.num_samples)]
    if len(by_rows) == 1:
        return by_rows[0]
    raise _cannot_tell(batch, expected)


def _has_unlike_rows(batch: Any, num_samples: int) -> bool:
    """Whether all tensors have this many rows, more than a record has fields, and not all of one shape."""
    tensors = [node for node in walk(batch) if has_length(node)]
    is_common = num_samples > LONGEST_RECORD and all(len(node) == num_samples for node in tensors)
    return is_common and len({tuple(node.shape[1:]) for node in tensors}) > 1


def _is_weak(batch: Any, reading: Reading) -> bool:
    """A few entries of lists that hold tensors: they may be samples, or the batches of several loaders, or crops."""
    if reading.num_samples > LONGEST_RECORD or not has_tensors(batch):
        return False
    return not any(has_length(node) for path, node in _nodes(batch, reading.samples) if path in reading.samples)


def _candidates(batch: Any, expected: int | None) -> list[int]:
    """Numbers of samples that could explain every tensor, so the first of them too; and the one expected."""
    if has_tensors(batch):
        found, lists = _around_first_tensor(batch, [])
        found = found + [length for length in lists if length > 1]
    else:
        found = [len(node) for node in walk(batch) if is_sequence(node) and node]
    return list(dict.fromkeys([*found, *([expected] if expected else [])]))


def _around_first_tensor(node: Any, lists: list[int]) -> tuple[list[int], list[int]]:
    """Length of the first tensor that has one, and of the lists that it is in."""
    if has_length(node):
        return [len(node)], lists
    if is_container(node):
        for _, part in parts(node):
            found, around = _around_first_tensor(part, [*lists, len(node)] if is_sequence(node) else lists)
            if found:
                return found, around
        if is_sequence(node) and has_tensors(node):  # of tensors without dimensions
            return [len(node)], lists
    return [], []


def _read_at(batch: Any, num_samples: int) -> Reading:
    """What would count samples if there were so many."""
    samples: list[str] = []
    whole: dict[str, int] = {}
    doubts: list[str] = []

    def look(path: str, node: Any) -> None:
        if has_length(node):
            if len(node) == num_samples:
                samples.append(path)
            else:
                whole[path] = len(node)
        elif is_container(node):
            role = sequence_role(node, num_samples) if is_sequence(node) else "fields"
            if role == "samples":
                samples.append(path)
            elif role == "unclear" and num_samples > 1:
                doubts.append(path)
            else:
                for where, part in parts(node):
                    look(path + where, part)
        elif _has_own_length(node) and len(node) == num_samples > 1:
            doubts.append(path)

    look("batch", batch)
    cut = frozenset(samples)
    return Reading(num_samples, cut, whole, tuple(doubts), _outline(list(_nodes(batch, cut))))


def sequence_role(node: Any, num_samples: int) -> SequenceRole:
    """Whether a list or tuple holds an entry for each sample.

    Args:
        node: A list or tuple.
        num_samples: How many samples there are.

    Returns:
        "samples", "fields" (anything else: its entries are looked at one by one), or "unclear".
    """
    if len(node) != num_samples or isinstance(node, torch.Size):
        return "fields"
    lengths = [len(part) for part in walk(node) if has_length(part)]
    is_alike, is_long = are_alike(node), num_samples > LONGEST_RECORD
    if num_samples in lengths:
        counts = all(length == num_samples for length in lengths)
        if is_alike:  # [(2, 5), (2, 5)] may be two samples or two fields; of [(64, 4), (9, 4), ...] one is 64 by chance
            return "unclear" if counts else "samples"
        return "unclear" if is_long and not counts else "fields"
    if not has_tensors(node):
        if isinstance(node, tuple) and all(is_number(part) for part in node):
            return "samples" if is_long else "unclear"
        if all(is_sequence(part) and len(part) == num_samples for part in node):
            return "unclear"
    return "samples" if is_alike or is_long else "unclear"


def are_alike(entries: Any) -> bool:
    """Whether all could be samples of one data set; None may stand for any of them."""
    return len({_kind(entry) for entry in entries if entry is not None}) <= 1


def _kind(node: Any) -> Any:
    if isinstance(node, torch.Tensor | np.ndarray):
        return type(node), node.ndim, node.dtype
    if isinstance(node, Mapping):
        return type(node), frozenset(node)
    if is_number(node):
        return "number"
    return (type(node), len(node)) if isinstance(node, tuple) else type(node)


def is_number(node: Any) -> bool:
    """Whether it is a number of Python or numpy."""
    return isinstance(node, int | float | complex | np.number)


def has_length(node: Any) -> bool:
    """Whether it is a tensor or array that may count samples."""
    return isinstance(node, torch.Tensor | np.ndarray) and node.ndim > 0


def _has_own_length(node: Any) -> bool:
    """Something with entries that is not known here: a set, a series, a list of boxes."""
    return isinstance(node, Sized) and not isinstance(node, str | bytes | type | torch.Tensor | np.ndarray)


def _nodes(batch: Any, stops: frozenset[str], path: str = "batch") -> Iterator[tuple[str, Any]]:
    """All parts with their key paths; what is at a stop is not looked into."""
    yield path, batch
    if is_container(batch) and path not in stops:
        for where, part in parts(batch):
            yield from _nodes(part, stops, path + where)


def _outline(nodes: list[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """How a batch is made, apart from how long everything is."""
    return tuple(
        (
            path,
            (type(node), has_length(node)) if is_container(node) or isinstance(node, torch.Tensor | np.ndarray) else 0,
        )
        for path, node in nodes
    )


# What is refused --------------------------------------------------------------------------------------------


def is_opaque(node: Any) -> bool:
    """Whether it holds samples in a way that cannot be seen, or cannot be rebuilt from its parts."""
    if isinstance(node, torch.Tensor):
        return node.is_nested or node.layout is not torch.strided
    if is_container(node):
        # A mapping or record that knows the shape of its batch is more than its entries.
        has_shape = isinstance(getattr(node, "batch_size", None), torch.Size)
        return has_shape or isinstance(node, torch.nn.utils.rnn.PackedSequence)
    held = () if isinstance(node, type | np.ndarray) else getattr(node, "__dict__", {}).values()
    return hasattr(node, "to") or any(has_length(part) for part in held)


def _refuse_opaque(nodes: Iterable[tuple[str, Any]]) -> None:
    for path, node in nodes:
        if is_opaque(node):
            kind = "nested or sparse tensor" if isinstance(node, torch.Tensor) else type_name(node)
            raise ValueError(
                f"the samples of {path}, a {kind}, cannot be told apart; give a split_fn that returns the microbatches."
            )


def _refuse_strangers(batch: Any, reading: Reading) -> None:
    """Whole tensors that look as if they held samples as well: of another loader, or along another dimension."""
    nodes = list(_nodes(batch, reading.samples))
    rows = [node for path, node in nodes if path in reading.samples and has_length(node)]
    images = {(tuple(node.shape[1:]), node.dtype) for node in rows if node.ndim > 2}
    for path, node in nodes:
        if path in reading.whole:
            is_stranger = (tuple(node.shape[1:]), node.dtype) in images
            if node.ndim > 1 and node.shape[1] == reading.num_samples:  # (time, sample, ...)
                is_stranger |= node.ndim > 2 or node.dtype in (torch.int32, torch.int64)
        else:
            is_stranger = is_container(node) and path != "batch" and _is_other_batch(node, path, nodes, reading)
        if is_stranger:
            raise ValueError(
                f"{path} may hold samples of its own, in another number than the {reading.num_samples} of the batch: "
                f"{described(batch)}. Give a split_fn that returns the microbatches."
            )


def _is_other_batch(node: Any, path: str, nodes: list[tuple[str, Any]], reading: Reading) -> bool:
    """A container of several tensors of one length, or one made like a container of samples beside it."""
    if any(sample.startswith(path) for sample in reading.samples):
        return False
    lengths = [len(part) for part in walk(node) if has_length(part)]
    if len(lengths) > 1 and len(set(lengths)) == 1:
        return True
    alike = [other for other, part in nodes if is_container(part) and other != path and _kind(part) == _kind(node)]
    return bool(lengths) and any(sample.startswith(other) for other in alike for sample in reading.samples)


def _cannot_tell(batch: Any, expected: int | None) -> ValueError:
    return ValueError(
        f"the samples of this batch cannot be told apart: {described(batch)}. Expected tensors whose first dimension "
        f"counts the samples{'' if expected is None else f' (batch size {expected})'}, or lists with one entry for "
        f"each; give a split_fn that returns the microbatches."
    )


def described(batch: Any) -> str:
    """Where the tensors and lists are, and of which shape; a few of them.

    Args:
        batch: A nested batch.

    Returns:
        Such as `batch['image'] (64, 3), batch['name'] list of 64`.
    """
    shown = list(_described(batch, "batch"))
    return ", ".join(shown[:8]) + (" ..." if len(shown) > 8 else "") or f"a {type_name(batch)}"


def _described(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, torch.Tensor | np.ndarray):
        yield f"{path} {tuple(node.shape)}"
    elif is_sequence(node) and not has_tensors(node):
        yield f"{path} {type(node).__name__} of {len(node)}"
    elif is_container(node):
        for where, part in parts(node):
            yield from _described(part, path + where)
    elif _has_own_length(node):
        yield f"{path} {type(node).__name__} of {len(node)}"


def type_name(node: Any) -> str:
    """Name of its class, with the module."""
    return f"{type(node).__module__}.{type(node).__qualname__}"
