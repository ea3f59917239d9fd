"""How often each sample is to be drawn: checks of weights, and weights made from classes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Weights", "balanced_weights", "check_weights", "chosen_weights", "class_weights"]

# A command line or a YAML file is read as the first type that fits, and text fits everything: it stands last.
Weights = Mapping[int, float] | Mapping[str, float] | Sequence[float] | str
"""Class -> weight; one number per sample; "balanced", or the name of a field or dataset that holds them."""

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

_MOST_NAMED = 10


def check_weights(weights: npt.ArrayLike) -> Floats:
    """Sampling weights as float64, after making sure that something can be drawn by them.

    Args:
        weights: Numbers (n,), in any unit.

    Returns:
        float64 (n,), read-only.

    Raises:
        ValueError: They are of another kind, one is negative or not finite, or none is above 0.
    """
    array = np.asarray(weights)
    if array.ndim != 1 or array.dtype.kind not in "biuf" or not array.size:
        raise ValueError(
            f"the sampling weights have shape {array.shape} and type {array.dtype}; expected numbers (n,), one for "
            f"each sample."
        )
    checked = array.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(checked) & (checked >= 0)))
    if wrong.size:
        raise ValueError(
            f"the sampling weight of sample {wrong[0]} is {checked[wrong[0]]} ({wrong.size} weight(s) are wrong); "
            f"expected finite numbers from 0 up."
        )
    if not checked.any():
        raise ValueError(f"all {len(checked)} sampling weights are 0, so no sample can be drawn; expected one above 0.")
    checked.flags.writeable = False
    return checked


def chosen_weights(weights: npt.ArrayLike, num_samples: int, indices: npt.NDArray[np.int64] | None) -> Floats:
    """Weights of the samples that are used.

    Args:
        weights: One for each sample there is, used or not.
        num_samples: How many there are.
        indices: int64 (n,): those used; None for all.

    Returns:
        float64 (n,).

    Raises:
        ValueError: There are more or fewer weights than samples, one cannot be used, or all used ones are 0.
    """
    checked = check_weights(weights)
    if len(checked) != num_samples:
        only_used = indices is not None and len(checked) == len(indices)
        reason = ", whether it is used or not" if only_used else ""
        raise ValueError(
            f"there are {len(checked)} sampling weights; expected {num_samples}, one for each sample of the file(s)"
            f"{reason}."
        )
    if indices is None:
        return checked
    chosen = checked[indices]
    if not chosen.any():
        raise ValueError(
            f"the sampling weights of all {len(chosen)} samples that are used are 0 (others have weights above 0); "
            f"expected one above 0."
        )
    return chosen


def balanced_weights(labels: Labels) -> Floats:
    """Weights by which every class is drawn equally often: one over the size of the class.

    Args:
        labels: int64 (n,): class of each sample.

    Returns:
        float64 (n,).

    Example:
        >>> balanced_weights(np.array([0, 0, 0, 0, 7])).tolist()
        [0.25, 0.25, 0.25, 0.25, 1.0]
    """
    _, members, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return 1.0 / counts[members]


def class_weights(labels: Labels, weights: Mapping[Any, Any], class_names: Sequence[str] | None = None) -> Floats:
    """Give every sample the weight of its class. A class is then drawn in proportion to its weight times its size.

    Args:
        labels: int64 (n,): class of each sample.
        weights: Class -> weight; a class is a number, its digits, or a name.
        class_names: Names of the classes by number, if there are any.

    Returns:
        float64 (n,).

    Raises:
        ValueError: A class has no weight, a name stands for no class or two keys for the same, or a weight is no
            number.

    Example:
        >>> class_weights(np.array([0, 1, 1]), {0: 1.0, 1: 0.5}).tolist()
        [1.0, 0.5, 0.5]
    """
    by_number: dict[int, float] = {}
    for key, weight in weights.items():
        number = _class_number(key, class_names)
        if number in by_number:
            raise ValueError(f"the sampling weights name class {number} twice, once as {key!r}.")
        if isinstance(weight, bool) or not isinstance(weight, int | float | np.integer | np.floating):
            raise ValueError(f"the sampling weight of class {key!r} is {weight!r}; expected a number.")
        if not 0 <= weight < np.inf:
            raise ValueError(f"the sampling weight of class {key!r} is {weight}; expected a finite number from 0 up.")
        by_number[number] = float(weight)
    classes, members, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sizes = dict(zip(classes.tolist(), counts.tolist(), strict=True))
    missing = [(number, size) for number, size in sizes.items() if number not in by_number]
    if missing:
        text = ", ".join(f"{number} ({size} samples)" for number, size in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        given = ", ".join(str(number) for number in sorted(by_number)[:_MOST_NAMED]) or "none"
        raise ValueError(
            f"the sampling weights leave out class {text}{more}; there are weights for {given}. Give every class that "
            f"occurs one, 0 for those that are not to be drawn."
        )
    return np.array([by_number[number] for number in classes.tolist()], dtype=np.float64)[members]


def _class_number(key: Any, class_names: Sequence[str] | None) -> int:
    """Number of a class given by number or name."""
    if class_names is not None and isinstance(key, str) and key in class_names:
        return list(class_names).index(key)
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(key)
    if isinstance(key, str) and key.removeprefix("-").isdecimal():
        return int(key)
    known = f"a class number or one of {', '.join(class_names[:_MOST_NAMED])}" if class_names else "a class number"
    raise ValueError(f"the sampling weights name class {key!r}; expected {known}.")
