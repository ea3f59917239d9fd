"""Put together what the microbatches gave, so that it is what the batch would have given.

::

    of each microbatch                          of the batch
    tensor or array with rows                   all rows, in order
    tensor without dimensions, Python float     the weighted mean; unchanged if all are equal
    int, bool, string, None, anything else      the same, if all are equal
    list with an entry for each sample          all entries, in order
    dict, tuple, named tuple, dataclass, list   part by part

Two readings of a list or tuple are possible where each microbatch has as many samples as it has entries, such as
`[a, b]` for each two samples. Then

- lengths that differ as the sizes do: entries of samples;
- a list: entries of samples, unless its tensors tell that they are fields: of different kinds, such as `[x, y]`;
- a tuple: fields; but entries of samples if the fields do not go together (other words in each microbatch);
- refused where the two would give different batches and nothing tells which is meant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    walk,
)
from lightning_gpufeed.recover.batch_reading import are_alike, has_length, is_number, is_opaque

__all__ = ["merge_values"]


@dataclass(frozen=True)
class _Pieces:
    sizes: list[int]
    weights: list[float]


class _AmbiguousError(ValueError):
    """There are two ways to put values together."""


def merge_values(values: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """Put together what the microbatches gave.

    Means of tensors are computed on their device, in float32 or better, without waiting for it; integers and bools
    have to be compared on the host. Tensors without dimensions keep their graph.

    Args:
        values: Of each microbatch; the same structure in each.
        sizes: Samples in each.
        weights: Of each in a mean; a value of weight 0 does not count in a mean, even if it is not a number.

    Returns:
        The value for the batch. A single value, or one that is the same object in all, is returned itself.

    Raises:
        ValueError: It cannot be done exactly; names the key path.

    Example:
        >>> merge_values([{"loss": 1.0, "name": ["a", "b"]}, {"loss": 4.0, "name": ["c"]}], [2, 1], [2 / 3, 1 / 3])
        {'loss': 2.0, 'name': ['a', 'b', 'c']}
    """
    total = math.fsum(weights)
    if not values or not len(values) == len(sizes) == len(weights):
        raise ValueError(f"there are {len(values)} values, {len(sizes)} sizes and {len(weights)} weights.")
    if min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(f"weights are {list(weights)}; expected numbers of at least 0, not all of them 0.")
    return _merged(list(values), _Pieces(list(sizes), [weight / total for weight in weights]), "value")


def _merged(values: list[Any], pieces: _Pieces, path: str) -> Any:
    first = values[0]
    if type(first) is int and values == list(pieces.sizes):
        return sum(values)  # how many samples the microbatch has
    if all(value is first for value in values):
        return first
    if all(isinstance(value, torch.Tensor) for value in values):
        return _merged_tensors(values, pieces, path)
    if all(isinstance(value, np.ndarray | np.generic) for value in values):
        return _merged_arrays(values, pieces, path)
    if any(isinstance(value, float) for value in values) and all(type(value) in (int, float) for value in values):
        return _merged_floats(values, pieces)
    if len({type(value) for value in values}) > 1:
        raise ValueError(f"{path} is {_shown(values)}; expected the same type from each microbatch.")
    if is_sequence(first):
        return _merged_sequences(values, pieces, path)
    if is_container(first) and not is_opaque(first):
        return _merged_parts(values, pieces, path)
    if not all(_is_equal(first, value) for value in values):
        raise ValueError(f"{path} is {_shown(values)}; only what is equal in each microbatch can be put together.")
    return first


# Numbers ----------------------------------------------------------------------------------------------------


def _merged_tensors(values: list[torch.Tensor], pieces: _Pieces, path: str) -> torch.Tensor:
    first = values[0]
    if any(value.is_nested or value.layout is not torch.strided for value in values):
        raise ValueError(f"{path} is a nested or sparse tensor, whose rows cannot be put together.")
    if len({(value.dtype, value.device, value.ndim, value.shape[1:]) for value in values}) > 1:
        kinds = ", ".join(f"{tuple(value.shape)} {value.dtype} {value.device}" for value in values[:4])
        raise ValueError(f"{path} is {kinds}; expected the same dtype, device and row shape from each microbatch.")
    if first.ndim:
        return as_same_class(torch.cat(values), first)
    if not (first.dtype.is_floating_point or first.dtype.is_complex):
        if [int(value) for value in values] == list(pieces.sizes):
            return sum(values[1:], start=first)  # how many samples the microbatch has
        if all(bool(value == first) for value in values):
            return first
        raise ValueError(f"{path} is {_shown(values)}; whole numbers have no mean, so they have to be equal.")
    dtype = torch.promote_types(first.dtype, torch.float32) if first.dtype.itemsize > 1 else torch.float32
    wide = [value.to(dtype) for value in _counting(values, pieces)]
    mean = sum((value * weight for value, weight in zip(wide, _counting(pieces.weights, pieces), strict=True)), 0.0)
    # Chosen on the device: asking whether they are equal would wait for it.
    all_equal = torch.stack([value == wide[0] for value in wide]).all()
    return torch.where(all_equal, wide[0], mean).to(first.dtype)


def _merged_arrays(values: list[Any], pieces: _Pieces, path: str) -> Any:
    first = values[0]
    if len({(type(value), value.dtype, value.ndim, value.shape[1:]) for value in values}) > 1:
        kinds = ", ".join(f"{type(value).__name__} {value.shape} {value.dtype}" for value in values[:4])
        raise ValueError(f"{path} is {kinds}; expected the same dtype and row shape from each microbatch.")
    if first.ndim:
        return np.concatenate(values)
    if all(_is_equal(first[()], value[()]) for value in values):
        return first
    if first.dtype.kind not in "fc":
        raise ValueError(f"{path} is {_shown(values)}; only what is equal in each microbatch can be put together.")
    numbers, weights = _counting(values, pieces), _counting(pieces.weights, pieces)
    if all(number == numbers[0] for number in numbers):
        return numbers[0]
    wide = np.asarray(numbers).astype(np.promote_types(first.dtype, np.float64))
    mean = (wide * np.asarray(weights)).sum().astype(first.dtype)
    return np.asarray(mean) if isinstance(first, np.ndarray) else mean


def _merged_floats(values: list[float], pieces: _Pieces) -> float:
    if all(_is_equal(values[0], value) for value in values):
        return values[0]
    numbers, weights = _counting(values, pieces), _counting(pieces.weights, pieces)
    if all(number == numbers[0] for number in numbers):
        return float(numbers[0])
    return float(sum(number * weight for number, weight in zip(numbers, weights, strict=True)))


def _counting(values: list[Any], pieces: _Pieces) -> list[Any]:
    """The values of microbatches that count: a mean over no token is not a number, and is worth nothing."""
    return [value for value, weight in zip(values, pieces.weights, strict=True) if weight]


# Containers -------------------------------------------------------------------------------------------------


def _merged_parts(values: list[Any], pieces: _Pieces, path: str) -> Any:
    """Containers of one structure, part by part."""
    first = values[0]
    held = [dict(parts(value)) for value in values]
    for other in held:
        if set(other) != set(held[0]):
            odd = sorted(set(other) ^ set(held[0]))
            raise ValueError(f"{path}{odd[0]} is not there in each microbatch.")
    return rebuilt(first, [_merged([of[where] for of in held], pieces, path + where) for where in held[0]])


def _merged_sequences(values: list[Any], pieces: _Pieces, path: str) -> Any:
    lengths = [len(value) for value in values]
    is_uniform = len(set(lengths)) == 1
    entries = [entry for value in values for entry in value]
    if lengths == pieces.sizes and not isinstance(values[0], torch.Size):
        if not is_uniform:
            return like(values[0], entries)
        if isinstance(values[0], list):
            if _is_list_of_samples(values, entries, path):
                return like(values[0], entries)
        elif _may_be_samples(values, entries):
            return _merged_tuples(values, entries, pieces, path)
    if not is_uniform:
        raise ValueError(
            f"{path} has {lengths} entries; expected as many in each microbatch, or as many as it has samples "
            f"({pieces.sizes})."
        )
    return _merged_parts(values, pieces, path)


def _is_list_of_samples(values: list[Any], entries: list[Any], path: str) -> bool:
    """A list as long as the microbatch has an entry for each sample, unless its tensors tell otherwise."""
    rows = _lengths(entries)
    if not rows:
        return True
    if not all(are_alike(value) for value in values):
        return False
    if all(length == len(values[0]) for length in rows):
        raise _ambiguous(values, path)
    return True


def _may_be_samples(values: list[Any], entries: list[Any]) -> bool:
    """Whether a tuple as long as the microbatch may have an entry for each sample."""
    # Numbers are a shape or (loss, accuracy).
    if all(is_number(entry) or (isinstance(entry, torch.Tensor) and not entry.ndim) for entry in entries):
        return False
    # Tensors as long as the microbatch are (logits, targets); so are tensors of one length that differs between
    # microbatches: of some of the samples.
    rows = [set(_lengths(value)) for value in values]
    are_columns = all(len(of) == 1 for of in rows) and (len(set.union(*rows)) > 1 or rows[0] == {len(values[0])})
    return are_alike(entries) and not are_columns


def _merged_tuples(values: list[Any], entries: list[Any], pieces: _Pieces, path: str) -> Any:
    """Tuples of fields or of samples: of samples if the fields do not go together."""
    try:
        _merged_parts(values, pieces, path)
    except _AmbiguousError:
        raise
    except ValueError:
        return like(values[0], entries)
    raise _ambiguous(values, path)


def _lengths(node: Any) -> list[int]:
    return [len(part) for part in walk(node) if has_length(part)]


def _ambiguous(values: list[Any], path: str) -> _AmbiguousError:
    kind, length = type(values[0]).__name__, len(values[0])
    return _AmbiguousError(
        f"{path} is a {kind} of {length} from each microbatch of {length}: its entries may be samples or fields; use "
        f"a dict for fields."
    )


def _is_equal(one: Any, other: Any) -> bool:
    """Whether nobody could tell them apart; two floats that are not a number cannot be."""
    if one is other:
        return True
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # somebody's own ==
        return False


def _shown(values: list[Any]) -> str:
    texts = [repr(value) for value in values[:4]]
    return ", ".join(text if len(text) < 60 else f"{text[:57]}..." for text in texts) + (
        " ..." if len(values) > 4 else ""
    )
