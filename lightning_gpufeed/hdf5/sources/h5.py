"""An HDF5 file as a source, to give it other chunks, fewer fields or another order."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import LayoutError, PackError
from lightning_gpufeed.hdf5.access import list_datasets, open_file
from lightning_gpufeed.hdf5.linked import find_dependencies
from lightning_gpufeed.hdf5.sources.source import (
    FieldSpec,
    SourceOptions,
    SourceRows,
    check_dtype,
    common_length,
    file_identity,
    image_attributes,
    select_keys,
)

__all__ = ["H5FileSource", "open_h5"]

# Decoded blocks kept while rows are read in another order than the file's.
_CACHE_BYTES = 256 * 1024**2
# Rows read at once from a dataset without chunks.
_CONTIGUOUS_BLOCK_BYTES = 1024**2
_KEPT_ATTRIBUTES = ("layout", "class_names", "scale", "offset")


def open_h5(path: Path, options: SourceOptions) -> H5FileSource:
    """An HDF5 file.

    Args:
        path: The file.
        options: `keys` and `layout` count.

    Returns:
        The source.

    Raises:
        PackError: Not an HDF5 file, an unknown key, lengths that differ, values that are not numbers of fixed
            size, or a virtual dataset whose source file is gone.
    """
    options.refuse(("resize", "crop", "mode", "split"), f"{path}, an HDF5 file")
    with ExitStack() as stack:
        try:
            source = H5FileSource(stack.enter_context(open_file(path)), path, options)
        except LayoutError as error:
            raise PackError(str(error)) from error
        source.on_close = stack.pop_all()
    return source


class H5FileSource:
    """Datasets of one file, read by whole chunks; `close` calls `on_close`.

    Args:
        file: The file, open for reading.
        path: Its path.
        options: `keys` and `layout` count.

    Raises:
        PackError: See `open_h5`.
    """

    is_thread_safe = False
    most_rows_per_read = 65_536

    def __init__(self, file: h5py.File, path: Path, options: SourceOptions) -> None:
        self._path = path
        self.on_close = ExitStack()
        available = list_datasets(file)
        keys = select_keys(list(available), options.keys, str(path))
        self._datasets = {key: available[key] for key in keys}
        self.num_samples = common_length({key: d.shape[0] for key, d in self._datasets.items()}, str(path))
        self.fields = {
            key: FieldSpec(dataset.shape[1:], check_dtype(key, _base_dtype(key, dataset), str(path)))
            for key, dataset in self._datasets.items()
        }
        # A virtual dataset with a missing file would read as fill values, without a word from HDF5.
        files = {name for dataset in self._datasets.values() for name in find_dependencies(str(path), dataset).stamps}
        self.attributes = image_attributes(self.fields, options.layout)
        for key, dataset in self._datasets.items():
            self.attributes[key].update(_kept_attributes(dataset))
        self.identity = "|".join(file_identity(name) for name in sorted(files))
        self._blocks: OrderedDict[tuple[str, int], npt.NDArray[Any]] = OrderedDict()
        self._cached_bytes = 0

    def read(self, indices: npt.NDArray[np.int64]) -> SourceRows:
        """Read rows.

        Args:
            indices: int64 `(num_rows,)`.

        Returns:
            The rows.

        Raises:
            PackError: HDF5 cannot read them, as in a damaged chunk.
        """
        try:
            values = {key: self._rows(key, indices) for key in self._datasets}
        except OSError as error:
            raise PackError(f"{self._path} cannot be read: {error}") from error
        return SourceRows(indices, values)

    def _rows(self, key: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Rows of one dataset in the order asked for, each of its blocks touched once."""
        spec, block_rows = self.fields[key], self._block_rows(key)
        rows = np.empty((len(indices), *spec.sample_shape), spec.dtype)
        blocks = indices // block_rows
        by_block = np.argsort(blocks, kind="stable")
        starts = np.flatnonzero(np.diff(blocks[by_block], prepend=-1))
        for part in np.split(by_block, starts[1:]):
            block = int(blocks[part[0]])
            rows[part] = self._block(key, block, block_rows)[indices[part] - block * block_rows]
        return rows

    def _block_rows(self, key: str) -> int:
        """Rows of a block: those of a chunk, unless such a block would take half the cache or more."""
        dataset, sample_bytes = self._datasets[key], max(1, self.fields[key].sample_bytes)
        chunk_rows = dataset.chunks[0] if dataset.chunks else max(1, _CONTIGUOUS_BLOCK_BYTES // sample_bytes)
        return int(max(1, min(chunk_rows, _CACHE_BYTES // 2 // sample_bytes)))

    def _block(self, key: str, block: int, block_rows: int) -> npt.NDArray[Any]:
        """A block of rows, from memory if it was read lately."""
        cached = self._blocks.pop((key, block), None)
        if cached is None:
            cached = self._datasets[key][block * block_rows : (block + 1) * block_rows]
            self._cached_bytes += cached.nbytes
        self._blocks[key, block] = cached
        while self._cached_bytes > _CACHE_BYTES and len(self._blocks) > 1:
            self._cached_bytes -= self._blocks.popitem(last=False)[1].nbytes
        return cached

    def close(self) -> None:
        """Close the file."""
        self._blocks.clear()
        self.on_close.close()


def _base_dtype(key: str, dataset: h5py.Dataset) -> np.dtype[Any]:
    """The type without h5py's marks for enumerations; text and ragged rows stay objects, later refused."""
    try:
        dtype: np.dtype[Any] = dataset.dtype
    except TypeError as error:
        raise PackError(
            f"{key!r} in {dataset.file.filename} is of a type that NumPy does not know ({error}); "
            "leave it out by naming the other fields: keys=[...] (--keys)"
        ) from error
    return np.dtype(dtype.str) if dtype.kind in "biufc" else dtype


def _kept_attributes(dataset: h5py.Dataset) -> dict[str, Any]:
    """What this package wrote about a dataset and what stays true in another chunk shape."""
    kept: dict[str, Any] = {}
    for name in _KEPT_ATTRIBUTES:
        if name in dataset.attrs:
            value = dataset.attrs[name]
            kept[name] = [str(v) for v in value] if name == "class_names" else value
    for name in ("scale", "offset"):
        if name in kept:
            kept[name] = float(kept[name])
    return kept
