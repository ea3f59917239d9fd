"""Finds which files, keys and samples make up training, validation, test and prediction data."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import StrPath, has_keys
from lightning_gpufeed.hdf5.columns import check_class_names, divide_by_fold, read_classes, read_samples
from lightning_gpufeed.hdf5.folds import FoldChoice
from lightning_gpufeed.hdf5.holdout import as_indices, take_fraction, take_indices
from lightning_gpufeed.hdf5.keys import ArrayInfo, Split, describe, group_by_split, list_arrays, pick_group
from lightning_gpufeed.hdf5.remote.addresses import know, remember
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["Found", "H5Splits", "Origin", "Paths", "Samples", "fields_by_name"]

# A command line or a YAML file is read as the first type that fits, and text fits everything: it stands last.
Paths = Sequence[StrPath] | StrPath
Samples = Sequence[bool] | Sequence[int]
"""A mask, or the numbers of samples."""
Origin = float | Samples | Paths | None
"""A path or several; a fraction of the training samples; which of these, as numbers, as a mask or as the name of a
dataset of the training file that holds either; or None to look in the training file."""

Indices = npt.NDArray[np.int64]
Found = tuple[H5Source, Indices | None]
"""A source and which of its samples to use, None for all."""

ChooseFields = Callable[[str, Split, Sequence[ArrayInfo], bool], dict[str, str] | None]


class H5Splits:
    """Opens each split when it is first asked for, and remembers it.

    Attributes:
        origins: Split -> where its data comes from.
    """

    def __init__(
        self,
        origins: Mapping[Split, Origin],
        *,
        keys: Mapping[str, str] | Sequence[str] | None,
        choose_fields: ChooseFields,
        train_indices: Samples | str | None = None,
        seed: int = 0,
        stratify_by: str | None = None,
        fold: FoldChoice | None = None,
        storage_options: Mapping[str, Any] | None = None,
        columns: Collection[str] = (),
    ) -> None:
        """Note the arguments.

        Args:
            origins: Split -> where its data comes from.
            keys: Datasets: names, or field name -> key, `{split}` standing for the split's name; None to search.
            choose_fields: (path, split, arrays of that split, whether the file was given for it) -> field name -> key,
                or None if there is no such split; used when `keys` is None.
            train_indices: Use only these samples of the training files.
            seed: Decides the fractions, and folds that are made.
            stratify_by: Field of class numbers that fractions and folds keep the proportions of.
            fold: What part of the training samples is for validation, in place of an origin.
            storage_options: What fsspec needs to reach the addresses among the files.
            columns: Further datasets that say something of samples, such as weights. Like those that hold sample
                numbers, masks or folds they become fields only if `keys` names them.

        Raises:
            ValueError: An origin is none of what is understood, or there is one for validation beside a fold.
        """
        self.origins = {split: _kept(origin) for split, origin in origins.items()}
        for split, origin in self.origins.items():
            _refuse_odd_origin(split, origin)
        fractions = {split: origin for split, origin in self.origins.items() if isinstance(origin, float)}
        if sum(fractions.values()) >= 1:
            text = " and ".join(f"{split}={fraction}" for split, fraction in fractions.items())
            raise ValueError(f"{text} together leave nothing to train on; expected a sum below 1.")
        if fold is not None and self.origins["val"] is not None:
            raise ValueError(
                "both val and fold are given: a fold of the training samples is for validation. Leave val off."
            )
        paths = [os.fspath(path) for origin in self.origins.values() for path in _as_paths(origin) or []]
        self._remotes = know(paths, storage_options)
        self._named = [train_indices, fold.folds if fold else None, *columns]
        self._columns: set[str] | None = None
        self._keys = keys
        self._choose_fields = choose_fields
        self._train_indices = train_indices if isinstance(train_indices, str) else _kept(train_indices)
        self._seed = seed
        self._stratify_by = stratify_by
        self._fold = fold
        self._found: dict[Split, Found | None] = {}
        self._class_names: dict[str, tuple[list[str], str]] = {}

    def get(self, split: Split) -> Found | None:
        """Open a split.

        Args:
            split: "train", "val", "test" or "predict"; the last falls back on "test".

        Returns:
            Source and samples; None if the split does not exist.

        Raises:
            FileNotFoundError: A file is missing.
            LayoutError: A file cannot be used.
            ValueError: The splits do not fit together.
        """
        if split not in self._found:
            remember(self._remotes)  # in another process they are not known yet
            found = self._find(split)
            if found is None and split == "predict":
                found = self.get("test")
            if found is not None and any(found[0] is other[0] for other in self.opened().values()):
                found = found[0].twin(), found[1]  # validation in the middle of an epoch leaves its reading ahead alone
            self._found[split] = found
        return self._found[split]

    def is_column(self, array: ArrayInfo) -> bool:
        """Whether an array says something of samples: then it becomes a field only if it is named as one.

        Args:
            array: Of any file.

        Returns:
            True for what the arguments name, and for its like of another split: `w_val` where `w_train` is named.
        """
        if self._columns is None:
            named_origins = [origin for split, origin in self.origins.items() if self._is_dataset_name(split)]
            names = [one.strip("/") for one in [*self._named, *named_origins] if isinstance(one, str)]
            self._columns = {name.replace("{split}", split) for name in names for split in self.origins}
        if array.key in self._columns:
            return True
        of_splits = [one for one in (ArrayInfo(name, (), "") for name in self._columns) if one.split]
        return array.split is not None and array.field_name in {one.field_name for one in of_splits}

    def opened(self) -> dict[Split, Found]:
        """Splits opened so far.

        Returns:
            Split -> source and samples, without those that do not exist.
        """
        return {split: found for split, found in self._found.items() if found is not None}

    def _find(self, split: Split) -> Found | None:
        origin = self.origins[split]
        if self._is_carved(split) or (split == "train" and origin is not None):
            return self._divide().get(split)
        paths = _as_paths(self.origins["train"] if origin is None else origin)
        if paths is None:
            return None
        keys = self._keys_for(split, paths, is_own_file=origin is not None)
        return None if keys is None else (self._open(paths, keys), None)

    def _open(self, paths: Sequence[StrPath], keys: Mapping[str, str] | None) -> H5Source:
        """Open files, whose classes have to be numbered like those of all others."""
        source = H5Source(paths, keys)
        check_class_names(source, self._class_names)
        return source

    def _is_carved(self, split: Split) -> bool:
        """Whether a split is a part of the training samples."""
        origin = self.origins[split]
        if split == "train" or origin is None:
            return split == "val" and self._fold is not None
        return _is_part(origin) or self._is_dataset_name(split)

    def _is_dataset_name(self, split: Split) -> bool:
        """Whether a split is given by a text that is no file, but names a dataset of the training file."""
        origin, paths = self.origins[split], _as_paths(self.origins["train"])
        is_path = split == "train" or not isinstance(origin, str) or os.path.exists(os.path.expanduser(origin))
        if is_path or paths is None:
            return False
        return os.path.isfile(os.path.expanduser(paths[0])) and has_keys(paths[0], [origin])

    def _divide(self) -> dict[Split, Found]:
        """Divide the training files between the splits that are a part of them."""
        paths = _as_paths(self.origins["train"])
        if paths is None:
            what = "a fraction or an index array" if self._fold is None else "a fold"
            raise ValueError(f"{what} is a part of the training data, but train= is missing.")
        source = self._open(paths, self._keys_for("train", paths, is_own_file=True))
        everything = free = rest = np.arange(source.num_samples)
        if self._train_indices is not None:
            wanted = _numbers(source, self._train_indices, "train_indices")
            rest, _ = take_indices(rest, wanted, "train_indices")
        num_available = len(rest)
        divided: dict[Split, Found] = {}
        carved: list[Split] = [split for split in ("val", "test", "predict") if self._is_carved(split)]
        # Given samples first: a fraction is then taken from what is left, and folds are made of that.
        for split in sorted(carved, key=self._turn):
            origin: Any = self.origins[split]
            if split == "predict":
                # Predicting on training samples is nobody's mistake; they stay in training.
                taken, _ = take_indices(everything, _numbers(source, origin, split), split)
            elif origin is None:
                assert self._fold is not None
                taken, rest = divide_by_fold(source, rest, self._fold, self._seed, self._classes(source))
            elif isinstance(origin, float):
                taken, rest = self._take_fraction(source, rest, split, num_available)
            else:
                # What is trained on does not limit what is given here: both may be named, apart from each other.
                taken, free = take_indices(free, _numbers(source, origin, split), split)
                rest = rest[~np.isin(rest, taken)]
            divided[split] = (source, taken)
        if not len(rest):
            raise ValueError("no sample is left for training: the other splits take them all.")
        divided["train"] = (source, None if len(rest) == source.num_samples else rest)
        self._found.update(divided)
        return divided

    def _turn(self, split: Split) -> int:
        """When a split takes its part."""
        origin = self.origins[split]
        return 2 if origin is None else int(isinstance(origin, float))

    def _take_fraction(
        self, source: H5Source, rest: Indices, split: Split, num_available: int
    ) -> tuple[Indices, Indices]:
        """A fraction of all that was there, from what is left."""
        fraction: Any = self.origins[split]
        if fraction * num_available > len(rest) - 1:
            raise ValueError(
                f"{split}={fraction} asks for {round(fraction * num_available)} samples, but only {len(rest)} are "
                f"left and some have to stay for training. Make the splits smaller."
            )
        labels = self._classes(source)
        return take_fraction(
            rest, fraction * num_available / len(rest), self._seed, None if labels is None else labels[rest]
        )

    def _classes(self, source: H5Source) -> Indices | None:
        """Class number of every sample, to keep the proportions of; None for none."""
        name = self._stratify_by
        return None if name is None else read_classes(source, name, "stratify_by", "stratifying")

    def _keys_for(self, split: Split, paths: Sequence[StrPath], is_own_file: bool) -> dict[str, str] | None:
        """Field name -> key of a split in its file, None if the training file has no such split."""
        first = os.fspath(paths[0])
        if self._keys is None:
            return self._found_keys(split, first, is_own_file)
        named = dict(self._keys) if isinstance(self._keys, Mapping) else {key: key for key in self._keys}
        if not any("{split}" in key for key in named.values()):
            return named if is_own_file else None
        filled = {
            name.replace("{split}", "").strip("_-./ ") or name: key.replace("{split}", split)
            for name, key in named.items()
        }
        return filled if is_own_file or has_keys(first, filled.values()) else None

    def _found_keys(self, split: Split, path: str, is_own_file: bool) -> dict[str, str] | None:
        """Choose keys when none are named."""
        arrays = [array for array in list_arrays(path) if not self.is_column(array)]
        groups = group_by_split(arrays)
        if not is_own_file and split not in groups:
            return None
        group = pick_group(groups, split)
        if not group:
            raise LayoutError(
                f"{path}: no arrays found for {split!r}. Name them with keys=; the file has: {describe(arrays)}."
            )
        return self._choose_fields(path, split, group, is_own_file)


def fields_by_name(path: str, split: Split, arrays: Sequence[ArrayInfo]) -> dict[str, str]:
    """Take every array as a field, under its name without the word for the split.

    Args:
        path: For the message.
        split: Which split.
        arrays: Its arrays.

    Returns:
        Field name -> key.

    Raises:
        LayoutError: Two would have the same name.
    """
    fields: dict[str, str] = {}
    for array in arrays:
        if array.field_name in fields:
            raise LayoutError(
                f"{path}: {fields[array.field_name]!r} and {array.key!r} both could be the field "
                f"{array.field_name!r} of {split!r}. Name the datasets with keys=."
            )
        fields[array.field_name] = array.key
    return fields


def _numbers(source: H5Source, given: Any, name: str) -> npt.NDArray[Any]:
    """Sample numbers, from these, from a mask, or from the dataset that is named."""
    if isinstance(given, str):
        return read_samples(source, given.replace("{split}", "train"), name)
    numbers = as_indices(given, source.num_samples, name)
    if np.asarray(given).dtype.kind == "b" and not numbers.size:
        raise ValueError(f"{name}: the mask marks no sample; expected at least one.")
    return numbers


def _is_part(origin: Any) -> bool:
    """Whether an origin is a part of the training data by itself: a fraction or sample numbers."""
    return isinstance(origin, float) or (origin is not None and _as_paths(origin) is None)


def _as_paths(origin: Any) -> list[StrPath] | None:
    """The origin as a list of paths, None if it is none."""
    if isinstance(origin, str | os.PathLike):
        return [origin]
    if origin is None or isinstance(origin, float) or (isinstance(origin, np.ndarray) and origin.dtype.kind in "biuf"):
        return None
    paths = [one for one in origin if isinstance(one, str | os.PathLike)]
    return paths if paths and len(paths) == len(origin) else None


def _kept(origin: Any) -> Any:
    """An origin that can be looked at twice: an iterator is read into a list, a tensor or array is copied."""
    if isinstance(origin, np.floating):
        return float(origin)
    if hasattr(origin, "__array__") and not isinstance(origin, np.generic):
        return np.asarray(origin).copy()
    return list(origin) if isinstance(origin, Iterable) and not isinstance(origin, str | bytes) else origin


def _refuse_odd_origin(split: Split, origin: Any) -> None:
    """Check what a split is given as."""
    expected = "a path, a list of paths, a fraction such as 0.1 or a list of sample numbers"
    if split in ("train", "predict") and isinstance(origin, float):
        raise ValueError(f"{split}={origin!r}: a fraction is for val and test; expected a path or a list.")
    if isinstance(origin, list | np.ndarray) and not len(origin):
        raise ValueError(f"{split} is an empty list; expected {expected}. Did a pattern match no file?")
    if isinstance(origin, bool | int | bytes) or not isinstance(origin, float | str | os.PathLike | Iterable | None):
        raise ValueError(f"{split}={origin!r} is not understood; expected {expected}.")
    if isinstance(origin, float) and not 0 < origin < 1:
        raise ValueError(f"{split}={origin!r}: a fraction has to be above 0 and below 1.")
    if split == "train" and _is_part(origin):
        raise ValueError("train is given as numbers; expected a path. Choose samples of it with train_indices.")
