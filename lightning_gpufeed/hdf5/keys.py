"""Which dataset of a file holds the images, which the labels, and which belong to which split. Pure.

Names are read as words: `x_train`, `train/images`, `train_set_x` and `images-val` all name a split and a role.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import StrPath, list_datasets, open_file

__all__ = [
    "ArrayInfo",
    "Split",
    "find_image_key",
    "find_label_key",
    "group_by_split",
    "list_arrays",
    "pick_group",
    "refuse_one_per_sample",
]

Split = Literal["train", "val", "test", "predict"]

_SPLIT_WORDS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
    "predict": "predict",
}
_DIVISIONS = {f"{word}{s}" for word in ("split", "fold", "subset", "partition") for s in ("", "s")}
_MARKER_WORDS = {"is", "in", "mask", "flag", "flags", "idx", "ids", "index", "indices"} | _DIVISIONS
_ONE_PER_SAMPLE = 16

_IMAGE_WORDS = ("images", "image", "imgs", "img", "x", "data", "inputs", "input", "features", "pixels")
_LABEL_WORDS = (
    "labels",
    "label",
    "y",
    "targets",
    "target",
    "classes",
    "class",
    "masks",
    "mask",
    "segmentation",
)


@dataclass(frozen=True)
class ArrayInfo:
    """What the search needs to know of a dataset.

    Attributes:
        key: Path inside the file.
        shape: (num_samples, *sample_shape).
        kind: numpy's letter for the kind of type: "u", "i", "f" ...; "O" for strings and variable length.
    """

    key: str
    shape: tuple[int, ...]
    kind: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the key, in lower case."""
        return tuple(word for word in re.split(r"[^a-z0-9]+", self.key.lower()) if word)

    @property
    def split(self) -> Split | None:
        """The split that a word of the key names. `is_train` and the like are columns about it, not data of it."""
        rest = {word for word in self.words if word not in _SPLIT_WORDS}
        if rest and rest <= _MARKER_WORDS:
            return None
        return next((_SPLIT_WORDS[word] for word in self.words if word in _SPLIT_WORDS), None)

    @property
    def is_division(self) -> bool:
        """Whether it lies where samples are shared out among splits, as `splits/train`: it is no data of a split."""
        place, *rest = self.key.strip("/").lower().split("/")
        return place in _DIVISIONS and bool(rest) and all(word in _SPLIT_WORDS for word in self.words[1:])

    @property
    def field_name(self) -> str:
        """The key without the word that names the split, as the name of a field."""
        if self.split is None:
            return self.key
        parts = re.split(r"([^A-Za-z0-9]+)", self.key)
        kept: list[str] = []
        for word, separator in zip(parts[::2], [*parts[1::2], ""], strict=True):
            if word and word.lower() not in _SPLIT_WORDS:
                kept += [word, separator]
        return "".join(kept[:-1]) or self.key

    @property
    def is_image_like(self) -> bool:
        """Whether a sample has at least two axes of numbers."""
        return len(self.shape) >= 3 and self.kind in "biuf"


def list_arrays(path: StrPath) -> list[ArrayInfo]:
    """List the arrays of a file.

    Args:
        path: An HDF5 file.

    Returns:
        One entry per dataset with at least one axis, by key.

    Raises:
        FileNotFoundError: There is no such file.
        LayoutError: It cannot be opened as HDF5.
    """
    found = []
    with open_file(path) as h5_file:
        for key, item in list_datasets(h5_file).items():
            try:
                kind = item.dtype.kind
            except TypeError:
                kind = "V"
            found.append(ArrayInfo(key, tuple(int(n) for n in item.shape), kind))
    refuse_one_per_sample(path, [array.key for array in found])
    return found


def refuse_one_per_sample(path: StrPath, keys: Collection[str]) -> None:
    """Refuse a file that has a dataset, or a group of them, for each sample.

    Args:
        path: The file.
        keys: All its datasets.

    Raises:
        LayoutError: Many names differ in nothing but a number, or but in the name of their group.
    """
    for alike in (lambda key: re.sub(r"\d+", "#", key), lambda key: re.sub(r"^[^/]+/", "*/", key)):
        name, count = Counter(map(alike, keys)).most_common(1)[0] if keys else ("", 0)
        if count >= _ONE_PER_SAMPLE and name not in keys:
            what = "group" if "/" in name else "dataset"
            raise LayoutError(
                f"{path}: {count} of its {len(keys)} datasets are called {name!r}: one {what} for each sample, it "
                f"seems; expected arrays whose first axis counts samples. Write a Dataset whose item i is sample i, "
                f"and pack that: gpufeed pack package.module:dataset OUT.h5. Or name the arrays to use (keys=)."
            )


def group_by_split(arrays: Iterable[ArrayInfo]) -> dict[Split | None, list[ArrayInfo]]:
    """Sort arrays by the split their names say.

    Args:
        arrays: Arrays of one file.

    Returns:
        Split, or None for those whose name says none -> arrays. What only says how samples are divided is left out.
    """
    groups: dict[Split | None, list[ArrayInfo]] = {}
    for array in arrays:
        if not array.is_division:
            groups.setdefault(array.split, []).append(array)
    return groups


def pick_group(groups: Mapping[Split | None, list[ArrayInfo]], split: Split) -> list[ArrayInfo]:
    """The arrays to use for a split, when the file is used for that split alone.

    Args:
        groups: From `group_by_split`.
        split: The split wanted.

    Returns:
        Those that name the split; else those that name none; else the only group there is.
    """
    if split in groups:
        return groups[split]
    if None in groups:
        return groups[None]
    return next(iter(groups.values())) if len(groups) == 1 else []


def find_image_key(path: str, arrays: Iterable[ArrayInfo]) -> str:
    """Find the images.

    Args:
        path: For the message.
        arrays: Candidates.

    Returns:
        The key of the only array of images, or of the one whose name says so.

    Raises:
        LayoutError: None, or several and no name decides.
    """
    arrays = list(arrays)
    images = [array for array in arrays if array.is_image_like]
    if len(images) == 1:
        return images[0].key
    named = _by_word(images, _IMAGE_WORDS)
    if named is not None:
        return named.key
    what = "several arrays could be the images" if images else "no array looks like images (N, ..., H, W)"
    raise LayoutError(f"{path}: {what}. Name one with image_key=; the file has: {describe(arrays)}.")


def find_label_key(path: str, arrays: Iterable[ArrayInfo], image_key: str) -> str | None:
    """Find the labels or masks that belong to the images.

    Args:
        path: For the message.
        arrays: Candidates, the images among them.
        image_key: The images.

    Returns:
        The key of the array of the same length whose name says so, else of the only 1-D array of integers of
        that length, else None.

    Raises:
        LayoutError: Several could be the labels.
    """
    arrays = list(arrays)
    length = next(array.shape[0] for array in arrays if array.key == image_key)
    others = [array for array in arrays if array.key != image_key and array.shape[0] == length]
    text = [array for array in others if array.kind not in "biuf" and set(array.words) & set(_LABEL_WORDS)]
    others = [array for array in others if array.kind in "biuf"]
    named = [array for array in others if set(array.words) & set(_LABEL_WORDS)]
    plain = [array for array in others if array.kind in "biu" and int(np.prod(array.shape[1:])) == 1]
    if text and not named:
        raise LayoutError(
            f"{path}: {describe(text)} looks like the labels but holds no numbers. Store class numbers, name other "
            f'labels with label_key=, or say label_key="" for none.'
        )
    best = _by_word(named, _LABEL_WORDS)
    candidates = [best] if best is not None else named or plain
    if len(candidates) > 1:
        raise LayoutError(
            f"{path}: several arrays could be the labels: {describe(candidates)}. Name one with label_key=, or say "
            f'label_key="" for none.'
        )
    return candidates[0].key if candidates else None


def _by_word(arrays: Iterable[ArrayInfo], words: tuple[str, ...]) -> ArrayInfo | None:
    """The array whose key holds the earliest of the words, None if none does or two hold the same."""
    arrays = list(arrays)
    for word in words:
        hits = [array for array in arrays if word in array.words]
        if hits:
            return hits[0] if len(hits) == 1 else None
    return None


def describe(arrays: Iterable[ArrayInfo]) -> str:
    """Keys and shapes for a message.

    Args:
        arrays: What to name.

    Returns:
        Such as `'images' (60000, 28, 28), 'labels' (60000,)`.
    """
    texts: list[Any] = [f"{array.key!r} {array.shape}" for array in arrays]
    return ", ".join(texts) if texts else "no datasets"
