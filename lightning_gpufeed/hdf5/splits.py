"""Finds which files, keys and samples make up training, validation, test and prediction data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import StrPath, has_keys
from lightning_gpufeed.hdf5.holdout import take_fraction, take_indices
from lightning_gpufeed.hdf5.keys import ArrayInfo, Split, describe, group_by_split, list_arrays, pick_group
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["H5Splits", "Origin", "Paths"]

# A command line or a YAML file is read as the first type that fits, and text fits everything: it stands last.
Paths = Sequence[StrPath] | StrPath
Origin = float | Sequence[int] | Paths | None
"""A path or several; a fraction of the training samples; sample numbers; or None to look in the training file."""

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
        train_indices: Sequence[int] | None = None,
        seed: int = 0,
        stratify_by: str | None = None,
    ) -> None:
        """Note the arguments.

        Args:
            origins: Split -> where its data comes from.
            keys: Datasets: names, or field name -> key, `{split}` standing for the split's name; None to search.
            choose_fields: (path, split, arrays of that split, whether the file was given for it) -> field name -> key,
                or None if there is no such split; used when `keys` is None.
            train_indices: Use only these samples of the training files.
            seed: Decides the fractions.
            stratify_by: Field of class numbers that fractions keep the proportions of.

        Raises:
            ValueError: An origin is none of what is understood.
        """
        self.origins = {split: _kept(origin) for split, origin in origins.items()}
        for split, origin in self.origins.items():
            _refuse_odd_origin(split, origin)
        fractions = {split: origin for split, origin in self.origins.items() if isinstance(origin, float)}
        if sum(fractions.values()) >= 1:
            text = " and ".join(f"{split}={fraction}" for split, fraction in fractions.items())
            raise ValueError(f"{text} together leave nothing to train on; expected a sum below 1.")
        self._keys = keys
        self._choose_fields = choose_fields
        self._train_indices = train_indices
        self._seed = seed
        self._stratify_by = stratify_by
        self._found: dict[Split, Found | None] = {}

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
            found = self._find(split)
            if found is None and split == "predict":
                found = self.get("test")
            self._found[split] = found
        return self._found[split]

    def opened(self) -> dict[Split, Found]:
        """Splits opened so far.

        Returns:
            Split -> source and samples, without those that do not exist.
        """
        return {split: found for split, found in self._found.items() if found is not None}

    def _find(self, split: Split) -> Found | None:
        origin = self.origins[split]
        if _is_carved(origin) or (split == "train" and origin is not None):
            return self._divide().get(split)
        paths = _as_paths(self.origins["train"] if origin is None else origin)
        if paths is None:
            return None
        keys = self._keys_for(split, paths, is_own_file=origin is not None)
        return None if keys is None else (H5Source(paths, keys), None)

    def _divide(self) -> dict[Split, Found]:
        """Divide the training files between the splits that are given as a fraction or as indices."""
        paths = _as_paths(self.origins["train"])
        if paths is None:
            raise ValueError("a fraction or an index array is a part of the training data, but train= is missing.")
        source = H5Source(paths, self._keys_for("train", paths, is_own_file=True))
        everything = rest = np.arange(source.num_samples)
        if self._train_indices is not None:
            rest, _ = take_indices(rest, self._train_indices, "train_indices")
        num_available = len(rest)
        divided: dict[Split, Found] = {}
        carved: list[Split] = [split for split in ("val", "test", "predict") if _is_carved(self.origins[split])]
        # Given samples first: a fraction is then taken from what is left.
        for split in sorted(carved, key=lambda name: isinstance(self.origins[name], float)):
            origin: Any = self.origins[split]
            if split == "predict":
                # Predicting on training samples is nobody's mistake; they stay in training.
                taken, _ = take_indices(everything, origin, split)
            elif isinstance(origin, float):
                labels = None if self._stratify_by is None else self._classes(source)[rest]
                if origin * num_available > len(rest) - 1:
                    raise ValueError(
                        f"{split}={origin} asks for {round(origin * num_available)} samples, but only {len(rest)} are "
                        f"left and some have to stay for training. Make the splits smaller."
                    )
                taken, rest = take_fraction(rest, origin * num_available / len(rest), self._seed, labels)
            else:
                taken, rest = take_indices(rest, origin, split)
            divided[split] = (source, taken)
        if not len(rest):
            raise ValueError("no sample is left for training: the other splits take them all.")
        divided["train"] = (source, None if len(rest) == source.num_samples else rest)
        self._found.update(divided)
        return divided

    def _classes(self, source: H5Source) -> Indices:
        """Class number of every sample."""
        name = self._stratify_by
        if name not in source.specs:
            raise ValueError(
                f"stratifying needs class numbers in the field {name!r}, but the fields of numbers are "
                f"{', '.join(source.specs)}. Name the labels, or leave it off."
            )
        values = source.read_field(name, np.arange(source.num_samples)).numpy()
        if values.dtype.kind not in "biu" or values[0].size != 1:
            raise ValueError(
                f"stratify_by={name!r} has samples of shape {values.shape[1:]} and type {values.dtype}; expected one "
                f"integer per sample."
            )
        return values.reshape(-1).astype(np.int64)

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
        arrays = list_arrays(path)
        groups = group_by_split(arrays)
        if not is_own_file and split not in groups:
            return None
        group = pick_group(groups, split)
        if not group:
            raise LayoutError(
                f"{path}: no arrays found for {split!r}. Name them with keys=; the file has: {describe(arrays)}."
            )
        return self._choose_fields(path, split, group, is_own_file)


def _is_carved(origin: Any) -> bool:
    """Whether a split is a part of the training data: a fraction or sample numbers."""
    return isinstance(origin, float) or (origin is not None and _as_paths(origin) is None)


def _as_paths(origin: Any) -> list[StrPath] | None:
    """The origin as a list of paths, None if it is none."""
    if isinstance(origin, str | os.PathLike):
        return [origin]
    if origin is None or isinstance(origin, float):
        return None
    paths = [one for one in origin if isinstance(one, str | os.PathLike)]
    return paths if paths and len(paths) == len(origin) else None


def _kept(origin: Any) -> Origin:
    """An origin that can be looked at twice: an iterator is read into a list."""
    if isinstance(origin, np.floating):
        return float(origin)
    return list(origin) if isinstance(origin, Iterable) and not isinstance(origin, str | bytes) else origin


def _refuse_odd_origin(split: Split, origin: Any) -> None:
    """Check what a split is given as."""
    expected = "a path, a list of paths, a fraction such as 0.1 or a list of sample numbers"
    if split in ("train", "predict") and isinstance(origin, float):
        raise ValueError(f"{split}={origin!r}: a fraction is for val and test; expected a path or a list.")
    if isinstance(origin, list) and not origin:
        raise ValueError(f"{split} is an empty list; expected {expected}. Did a pattern match no file?")
    if isinstance(origin, bool | int | bytes) or not isinstance(origin, float | str | os.PathLike | Iterable | None):
        raise ValueError(f"{split}={origin!r} is not understood; expected {expected}.")
    if isinstance(origin, float) and not 0 < origin < 1:
        raise ValueError(f"{split}={origin!r}: a fraction has to be above 0 and below 1.")
    if split == "train" and _is_carved(origin):
        raise ValueError("train is given as numbers; expected a path. Choose samples of it with train_indices.")
