"""Reads what files say about their samples: class, weight, fold, group, and which samples belong to a split.

A column has one entry per sample. It is a field of the source or any other dataset of its files, and is read whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lightning_gpufeed.device.memory import TensorSpec
from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import has_keys, open_file, open_h5_dataset
from lightning_gpufeed.hdf5.arguments import whole_number
from lightning_gpufeed.hdf5.folds import FoldChoice, assign_folds, take_fold
from lightning_gpufeed.hdf5.holdout import as_indices
from lightning_gpufeed.hdf5.keys import ArrayInfo
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.source import H5Source
from lightning_gpufeed.hdf5.weights import Weights, balanced_weights, check_weights, chosen_weights, class_weights

__all__ = [
    "WeightChoice",
    "check_class_names",
    "divide_by_fold",
    "read_classes",
    "read_column",
    "read_samples",
    "read_weights",
]

Indices = npt.NDArray[np.int64]

_CLASS_WORDS = {"label", "labels", "y", "target", "targets", "class", "classes"}


def read_column(source: H5Source, name: str, argument: str) -> npt.NDArray[Any]:
    """Read one entry per sample.

    Args:
        source: The samples.
        name: A field, or a dataset that every file has.
        argument: What named it, for the message.

    Returns:
        (num_samples,) of numbers or, for text, of objects.

    Raises:
        LayoutError: A file has no such dataset, or it has not one entry per sample.
    """
    parts = []
    for path, key, num_samples in _places(source, name):
        with open_file(path) as h5_file:
            h5_dataset = open_h5_dataset(h5_file, key)
            shape = h5_dataset.shape
            if not shape or shape[0] != num_samples or int(np.prod(shape[1:])) != 1:
                raise LayoutError(
                    f"{path}: {argument}={name!r} has the shape {shape}; expected ({num_samples},), one entry for "
                    f"each sample of the file."
                )
            if h5_dataset.dtype.kind not in "biuf" and not h5py.check_string_dtype(h5_dataset.dtype):
                raise LayoutError(
                    f"{path}: {argument}={name!r} is of type {h5_dataset.dtype}; expected numbers or text."
                )
            parts.append(_values(h5_dataset).reshape(-1))
    return np.concatenate(parts)


def read_samples(source: H5Source, name: str, argument: str) -> Indices:
    """Read which samples are meant.

    Args:
        source: The samples.
        name: A dataset that every file has: the numbers of samples, counted inside that file, or a mask over them.
        argument: What named it, for the message.

    Returns:
        int64 (n,): numbers counted through all files.

    Raises:
        LayoutError: A file has no such dataset, or it holds something else.
        ValueError: All of them together name no sample.
    """
    parts: list[Indices] = []
    start = 0
    for path, key, num_samples in _places(source, name):
        with open_file(path) as h5_file:
            h5_dataset = open_h5_dataset(h5_file, key)
            shape, kind = h5_dataset.shape, h5_dataset.dtype.kind
            # Two axes of which one has length 1 are how some programs write a row of numbers.
            if kind not in "biu" or not shape or int(np.prod(shape)) != max(shape):
                raise LayoutError(
                    f"{path}: {argument}={name!r} has the shape {shape} and type {h5_dataset.dtype}; expected numbers "
                    f"of samples (m,) or a mask ({num_samples},)."
                )
            values = as_indices(_values(h5_dataset).reshape(-1), num_samples, f"{path}: {argument}={name!r}")
        numbers = values.astype(np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= num_samples):
            raise LayoutError(
                f"{path}: {argument}={name!r} names samples from {numbers.min()} to {numbers.max()}; expected 0 to "
                f"{num_samples - 1}, the samples of that file."
            )
        parts.append(numbers + start)
        start += num_samples
    samples = np.concatenate(parts)
    if not samples.size:
        raise ValueError(f"{argument}={name!r} names no sample of {', '.join(source.paths)}.")
    return samples


def read_classes(source: H5Source, name: str, argument: str, purpose: str) -> Indices:
    """Read the class number of every sample.

    Args:
        source: The samples.
        name: A field or dataset of integers.
        argument: What named it, for the message.
        purpose: What needs it, for the message.

    Returns:
        int64 (num_samples,).

    Raises:
        ValueError: There is none of that name, or it does not hold one integer per sample.
    """
    spec = source.specs.get(name)
    if spec is None and (name in source.fields or not has_keys(source.paths[0], [name])):
        raise ValueError(
            f"{purpose} needs class numbers in the field {name!r}, but the fields of numbers are "
            f"{', '.join(source.specs)}. Name the labels, or leave it off."
        )
    # A field of images is not read to find that it holds no classes.
    values = read_column(source, name, argument) if spec is None or _is_plain(spec) else None
    if values is None or values.dtype.kind not in "biu":
        shape, dtype = ((), values.dtype) if values is not None else (spec.row_shape, spec.dtype) if spec else ((), "")
        raise ValueError(
            f"{argument}={name!r} has samples of shape {shape} and type {str(dtype).removeprefix('torch.')}; expected "
            f"one integer per sample."
        )
    return values.astype(np.int64)


class WeightChoice:
    """What a user says of sampling weights, and the weights once they are read.

    Attributes:
        samples_per_epoch: Draws in an epoch; None for as many as there are samples, or without weights.
        column: Name of the field or dataset that holds the weights, `{split}` filled in; None if they are elsewhere.
    """

    def __init__(self, given: Weights | None, samples_per_epoch: int | None, label_field: str | None) -> None:
        """Note the arguments.

        Args:
            given: The weights, in any form; None for none.
            samples_per_epoch: Draws in an epoch.
            label_field: Field of the classes; None finds it.

        Raises:
            ValueError: They do not fit together.
        """
        if samples_per_epoch is not None and given is None:
            raise ValueError(
                f"samples_per_epoch is {samples_per_epoch}, but there are no sample_weights: without them an epoch is "
                f"every sample once."
            )
        if samples_per_epoch is not None:
            samples_per_epoch = whole_number("samples_per_epoch", samples_per_epoch, 1)
        self.samples_per_epoch = samples_per_epoch
        is_named = isinstance(given, str) and given != "balanced"
        self.column = str(given).replace("{split}", "train") if is_named else None
        self._given = self.column or given
        self._label_field = label_field
        self._weights: npt.NDArray[np.float64] | None = None

    def read(self, source: H5Source, indices: Indices | None) -> npt.NDArray[np.float64] | None:
        """The weights, read at the first call.

        Args:
            source: The training samples.
            indices: int64 (n,): those used; None for all.

        Returns:
            float64 (num_samples,), one for each sample of the source; None without weights.
        """
        if self._weights is None and self._given is not None:
            self._weights = read_weights(source, indices, self._given, self._label_field)
        return self._weights


def read_weights(
    source: H5Source, indices: Indices | None, given: Any, label_field: str | None
) -> npt.NDArray[np.float64]:
    """Sampling weights in any of the forms that a user gives them in.

    Args:
        source: The samples.
        indices: int64 (n,): those that are drawn from; None for all.
        given: One number per sample of the source; the name of a field or dataset that holds them; class -> weight;
            or "balanced".
        label_field: Field of the classes; None finds it.

    Returns:
        float64 (num_samples,): one for each sample of the source; where classes give the weights, 0 for samples that
        are not drawn from.

    Raises:
        LayoutError: A dataset cannot be used.
        ValueError: The weights cannot be used, or all are 0.
    """
    is_balanced = isinstance(given, str) and given == "balanced"
    if not is_balanced and not isinstance(given, Mapping):
        values = read_column(source, given, "sample_weights") if isinstance(given, str) else given
        chosen_weights(values, source.num_samples, indices)
        return check_weights(values)
    name = _label_field(source) if label_field is None else label_field
    labels = read_classes(source, name, "weight_by", "weighting by class")
    used = np.arange(source.num_samples) if indices is None else indices
    weights = np.zeros(source.num_samples)
    if is_balanced:
        weights[used] = balanced_weights(labels[used])
    else:
        names = [names for layout in source.fields.get(name, ()) if (names := _names_of(layout)) is not None]
        weights[used] = class_weights(labels[used], given, names[0] if names else None)
    return check_weights(weights)


def check_class_names(source: H5Source, known: dict[str, tuple[list[str], str]]) -> None:
    """Make sure that the numbers of classes mean the same in all files that are used together.

    Args:
        source: Files that are added.
        known: Field -> names of its classes and the file that says so; what is not in it yet is added.

    Raises:
        LayoutError: A file gives the same numbers to other classes.
    """
    for field, layouts in source.fields.items():
        for layout in layouts:
            names = _names_of(layout)
            if names is None:
                continue
            first, path = known.setdefault(field, (names, layout.path))
            if names == first:
                continue
            number = next((n for n, (a, b) in enumerate(zip(names, first, strict=False)) if a != b), None)
            what = f"class {number} is {names[number]!r}" if number is not None else f"there are {len(names)} classes"
            there = f"{first[number]!r}" if number is not None else f"{len(first)}"
            raise LayoutError(
                f"{layout.path}: {what}, but {there} in {path}: the same label means something else. Pack both from "
                f"the same set of class folders."
            )


def divide_by_fold(
    source: H5Source, pool: Indices, choice: FoldChoice, seed: int, labels: Indices | None
) -> tuple[Indices, Indices]:
    """Take the samples of a fold aside.

    Args:
        source: The samples.
        pool: int64 (n,): those to divide.
        choice: The folds and which of them.
        seed: Decides folds that are made.
        labels: int64 (num_samples,): classes to keep the proportions of, for every sample of the source; None for none.

    Returns:
        (samples of the fold, the others), each in the order of `pool`.

    Raises:
        LayoutError: A dataset cannot be used.
        ValueError: The folds cannot be used, or there is no such fold.
    """
    if choice.num_folds is not None:
        groups = None if choice.group_by is None else read_column(source, choice.group_by, "group_by")
        by_sample = assign_folds(
            len(pool),
            choice.num_folds,
            seed,
            None if labels is None else labels[pool],
            None if groups is None else groups[pool],
        )
        return take_fold(pool, by_sample, choice.fold)
    is_named = isinstance(choice.folds, str)
    folds = read_column(source, str(choice.folds), "folds") if is_named else np.asarray(choice.folds)
    if folds.shape != (source.num_samples,) or folds.dtype.kind not in "iu":
        what = f"folds={choice.folds!r}" if is_named else "folds"
        raise ValueError(
            f"{what} has the shape {folds.shape} and type {folds.dtype}; expected integers ({source.num_samples},), "
            f"the fold number of each sample of the file(s)."
        )
    return take_fold(pool, folds[pool], choice.fold)


def _places(source: H5Source, name: str) -> list[tuple[str, str, int]]:
    """(path, key, samples in the file), for each file."""
    first = next(iter(source.fields.values()))
    layouts = source.fields.get(name)
    keys = [name] * len(source.paths) if layouts is None else [layout.key for layout in layouts]
    return [(path, key, layout.num_samples) for path, key, layout in zip(source.paths, keys, first, strict=True)]


def _values(h5_dataset: Any) -> npt.NDArray[Any]:
    """Everything a dataset holds, in native byte order; text as objects."""
    values: npt.NDArray[Any] = (h5_dataset.asstr() if h5py.check_string_dtype(h5_dataset.dtype) else h5_dataset)[...]
    return values if values.dtype.kind == "O" else values.astype(values.dtype.newbyteorder("="), copy=False)


def _is_plain(spec: TensorSpec) -> bool:
    """Whether a sample is one whole number."""
    is_whole = not spec.dtype.is_floating_point and not spec.dtype.is_complex
    return is_whole and int(np.prod(spec.row_shape)) == 1


def _names_of(layout: H5DatasetLayout) -> list[str] | None:
    """Names of the classes by number, None if the dataset has none."""
    stored = layout.attributes.get("class_names")
    if stored is None:
        return None
    return [name.decode() if isinstance(name, bytes) else str(name) for name in np.ravel(stored)]


def _label_field(source: H5Source) -> str:
    """The field of class numbers, by its name or because it is the only one of one integer per sample."""
    plain = [name for name, spec in source.specs.items() if _is_plain(spec)]
    named = [name for name in plain if _CLASS_WORDS & set(ArrayInfo(name, (), "").words)]
    candidates = named or plain
    if len(candidates) != 1:
        what = f"{', '.join(candidates)} all could be" if candidates else "no field holds"
        raise ValueError(
            f"weighting by class needs to know the classes: {what} class numbers. Name the field with weight_by=; the "
            f"fields are {', '.join(source.fields)}."
        )
    return candidates[0]
