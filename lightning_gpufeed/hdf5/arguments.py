"""Checks of arguments that several public classes take. Pure."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LARGEST_SEED", "chosen_samples", "whole_number"]

LARGEST_SEED = 2**32 - 1
"""Above this, the words of the seed and the epoch's number would run into each other."""


def whole_number(name: str, value: Any, smallest: int, largest: int | None = None) -> int:
    """An argument that has to be a whole number, as a plain int.

    Args:
        name: Of the argument, for the message.
        value: An int, or what stands for one, such as a numpy integer.
        smallest: Smallest value allowed.
        largest: Largest value allowed, None for any.

    Returns:
        The value.

    Raises:
        ValueError: It is not a whole number, or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; expected a whole number.") from None
    if isinstance(value, bool):  # counts as 0 or 1 for Python, but nobody who gives it means a number
        raise ValueError(f"{name} is {value!r}; expected a whole number.")
    if number < smallest or (largest is not None and number > largest):
        expected = f"at least {smallest}" if largest is None else f"{smallest} to {largest}"
        raise ValueError(f"{name} is {number}; expected {expected}.")
    return number


def chosen_samples(indices: npt.ArrayLike | None, num_samples: int) -> npt.NDArray[np.int64] | None:
    """Sample numbers as int64.

    Args:
        indices: Integers, 1-D; None for all samples.
        num_samples: How many there are to choose from.

    Returns:
        int64 (n,), or None.

    Raises:
        ValueError: They are of another kind, or one is out of range.
    """
    if indices is None:
        return None
    array = np.asarray(indices)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"indices has shape {array.shape} and type {array.dtype}; expected a 1-D array of integers.")
    if not array.size:
        raise ValueError("indices is empty; expected at least one sample.")
    if array.min() < 0 or array.max() >= num_samples:
        raise ValueError(
            f"indices run from {array.min()} to {array.max()}; expected 0 to {num_samples - 1}, the samples in the "
            f"file(s)."
        )
    return array.astype(np.int64)
