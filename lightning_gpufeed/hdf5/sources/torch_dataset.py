"""A map-style `torch.utils.data.Dataset`, given itself or as `"package.module:name"`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import zlib
from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.sources.source import (
    FieldSpec,
    RowError,
    SourceOptions,
    SourceRows,
    check_dtype,
    file_identity,
    image_attributes,
    select_keys,
)

__all__ = ["TorchDatasetSource", "import_object", "open_torch_dataset"]

Item = dict[str, npt.NDArray[Any]]

# Items to try for the shapes before a dataset counts as unreadable.
_MAX_FIRST_ITEMS = 100


def import_object(spec: str) -> Any:
    """The object that `"package.module:name"` names; the current folder is searched as well.

    Args:
        spec: Module and name (dots allowed), joined by a colon.

    Returns:
        The object as it is, not called.

    Raises:
        PackError: No such module or name, or the module fails to import.
    """
    module_name, _, name = spec.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        # A console script does not search the current folder, where a user's own module lies.
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise PackError(f"cannot import {module_name!r} for {spec!r}: {reason}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise PackError(f"{module_name!r} has no {name!r}, which {spec!r} names")
        found = getattr(found, part)
    return found


def open_torch_dataset(target: Any, name: str, options: SourceOptions) -> TorchDatasetSource:
    """A dataset, or what makes one.

    Args:
        target: An object with `__getitem__` and `__len__`, or a class or function that returns one when
            called without arguments.
        name: How messages and the identity call it.
        options: `keys` and `layout` count.

    Returns:
        The source.

    Raises:
        PackError: The call fails, or what comes out is no map-style dataset.
    """
    options.refuse(("resize", "crop", "mode", "split"), f"{name}, a Python dataset")
    dataset = target
    if inspect.isclass(target) or (callable(target) and not hasattr(target, "__getitem__")):
        try:
            dataset = target()
        except Exception as error:  # user code
            raise PackError(
                f"calling {name} without arguments failed: {type(error).__name__}: {error}. "
                "Name a function without parameters that returns the dataset"
            ) from error
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise PackError(
            f"{name} is a {type(dataset).__name__}, which cannot be asked for its length and for single "
            "items; expected a dataset with __len__ and __getitem__"
        )
    return TorchDatasetSource(dataset, name, options)


class TorchDatasetSource:
    """The items of a map-style dataset, read one by one in this process.

    An item is an array-like (field `images` from two axes on, else `data`), a pair (`images`, `labels`) or a
    mapping (its keys). Array-likes are tensors, NumPy arrays, PIL images and numbers.

    Args:
        dataset: With `__len__` and `__getitem__`.
        name: How messages and the identity call it.
        options: `keys` and `layout` count.

    Raises:
        PackError: No items, or items that cannot be packed.
    """

    is_thread_safe = False
    most_rows_per_read = 256

    def __init__(self, dataset: Any, name: str, options: SourceOptions) -> None:
        self._dataset, self._name, self._keys = dataset, name, options.keys
        self.num_samples = len(dataset)
        if self.num_samples == 0:
            raise PackError(f"{name} holds no samples, so there is nothing to pack")
        first, is_pil = self._first_item()
        self.fields = {key: FieldSpec(value.shape, value.dtype) for key, value in first.items()}
        self.attributes = image_attributes(self.fields, options.layout)
        for key in is_pil & {key for key, spec in self.fields.items() if len(spec.sample_shape) == 3}:
            self.attributes[key]["layout"] = "NHWC"  # PIL's own axis order, whatever the size
        classes = getattr(dataset, "classes", None)  # as torchvision's datasets have it
        if isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes):
            self.attributes.get("labels", {})["class_names"] = list(classes)
        self.identity = self._identity()

    def _first_item(self) -> tuple[Item, set[str]]:
        """The first item that can be read, which sets shapes and types, and its keys that hold PIL images."""
        reason = ""
        for index in range(min(self.num_samples, _MAX_FIRST_ITEMS)):
            try:
                raw = self._dataset[index]
            except Exception as error:  # user code; the failing ones are reported when their turn comes
                reason = reason or f"item {index}: {type(error).__name__}: {error}"
                continue
            return self._arrays(raw), {key for key, value in self._named(raw).items() if _is_pil(value)}
        num_tried = min(self.num_samples, _MAX_FIRST_ITEMS)
        raise PackError(f"none of the first {num_tried} items of {self._name} can be read; {reason}")

    def _arrays(self, raw: Any) -> Item:
        """The fields of an item that were asked for, as arrays."""
        named = self._named(raw)
        keys = select_keys(list(named), self._keys, f"an item of {self._name}")
        return {key: self._array(key, named[key]) for key in keys}

    def _named(self, raw: Any) -> dict[str, Any]:
        """Field names for the parts of an item."""
        if isinstance(raw, Mapping):
            return {str(key): value for key, value in raw.items()}
        if isinstance(raw, (tuple, list)):
            if len(raw) == 2:
                return {"images": raw[0], "labels": raw[1]}
            if len(raw) != 1:
                raise PackError(
                    f"items of {self._name} are a {type(raw).__name__} of {len(raw)}; expected one array, "
                    "a pair (x, y) or a dict: return a dict to give each part its name"
                )
            raw = raw[0]
        return {"images" if np.ndim(_plain(raw)) >= 2 else "data": raw}

    def _array(self, key: str, value: Any) -> npt.NDArray[Any]:
        """One part of an item as an array of numbers; whole numbers and floats get 64 bits."""
        if not isinstance(value, (torch.Tensor, np.ndarray, np.generic, Number)) and not _is_pil(value):
            raise PackError(
                f"{key!r} in the items of {self._name} is a {type(value).__name__}; expected a tensor, an "
                "array, a PIL image or a number. Leave it out by naming the other fields: keys=[...] (--keys)"
            )
        array = np.asarray(_plain(value))
        return array.astype(check_dtype(key, array.dtype, self._name), copy=False)

    def _identity(self) -> str:
        """Name, length, the defining file and a digest of three items, so that other content is noticed."""
        digest = 0
        for index in sorted({0, self.num_samples // 2, self.num_samples - 1}):
            try:
                item = self._arrays(self._dataset[index])
            except Exception as error:  # user code; here only the kind of failure counts
                digest = zlib.crc32(type(error).__name__.encode(), digest)
            else:
                for key, value in item.items():
                    digest = zlib.crc32(value.tobytes(), zlib.crc32(key.encode(), digest))
        try:
            code = file_identity(inspect.getfile(type(self._dataset)))
        except (TypeError, OSError):  # defined in an interactive session
            code = type(self._dataset).__qualname__
        return f"{self._name}:{self.num_samples}:{code}:{digest}"

    def read(self, indices: npt.NDArray[np.int64]) -> SourceRows:
        """Ask the dataset for items; one of other fields, shape or type than the first raises `PackError`.

        Args:
            indices: int64 `(num_rows,)`.

        Returns:
            The items; those whose `__getitem__` raised among the errors.
        """
        columns: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in self.fields}
        good: list[int] = []
        errors: list[RowError] = []
        for index in map(int, indices):
            try:
                raw = self._dataset[index]
            except Exception as error:  # user code
                errors.append(RowError(index, f"item {index}", f"{type(error).__name__}: {error}"))
                continue
            for key, value in self._item(index, raw).items():
                columns[key].append(value)
            good.append(index)
        values = {
            # `reshape` gives the sample shape to a block without a single good row.
            key: np.asarray(columns[key], spec.dtype).reshape(len(good), *spec.sample_shape)
            for key, spec in self.fields.items()
        }
        return SourceRows(np.asarray(good, np.int64), values, errors)

    def _item(self, index: int, raw: Any) -> Item:
        """An item's arrays, checked against the first item's."""
        item = self._arrays(raw)
        if item.keys() != self.fields.keys():
            raise PackError(
                f"item {index} of {self._name} has the fields {sorted(item)}; expected those of the first, "
                f"{sorted(self.fields)}. Name those that all items have: keys=[...] (--keys)"
            )
        for key, value in item.items():
            spec = self.fields[key]
            if value.shape != spec.sample_shape or not np.can_cast(value.dtype, spec.dtype, "safe"):
                raise PackError(
                    f"{key!r} of item {index} of {self._name} is {value.dtype} {value.shape}; expected "
                    f"{spec.dtype} {spec.sample_shape} as in the first item. Make all items alike there"
                )
        return item

    def close(self) -> None:
        """Let go of the dataset."""
        self._dataset = None


def _is_pil(value: Any) -> bool:
    """Whether this is a PIL image, without importing Pillow for those who have none."""
    image = sys.modules.get("PIL.Image")
    return image is not None and isinstance(value, image.Image)


def _plain(value: Any) -> Any:
    """What NumPy can convert."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    # NumPy has no bfloat16; float32 holds each of its values.
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
