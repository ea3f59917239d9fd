"""Sources that are arrays already: .npy, .npz, and the idx files of MNIST and its relatives.

An idx file is big-endian: two zero bytes, a type code, the number of axes, one uint32 per axis, the values.
"""

from __future__ import annotations

import gzip
import math
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.sources.source import (
    FieldSpec,
    ImageLayout,
    SourceOptions,
    SourceRows,
    check_dtype,
    common_length,
    file_identity,
    image_attributes,
    select_keys,
    take_rows,
)

__all__ = [
    "ArraySource",
    "idx_files",
    "is_idx",
    "open_idx",
    "open_idx_folder",
    "open_npy",
    "open_npz",
    "read_idx",
]

_IMAGE_OPTIONS = ("resize", "crop", "mode")
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
# Also the spelling with a dot, as in train-images.idx3-ubyte, which some archives unpack to.
_IDX_NAME = re.compile(r"(?P<split>.+)-(?P<what>images|labels)[-.]idx\d-ubyte(?P<gz>\.gz)?")
# The endings of split names that count as "train" and "test".
_SPLITS = {"train": ("train",), "test": ("t10k", "test")}


class ArraySource:
    """Arrays of equal length, in memory or memory-mapped.

    Args:
        arrays: Key to array `(num_samples, ...)`.
        identity: See `Source.identity`.
        where: The source, for messages.
        layout: Axis order where the shape leaves it open.

    Raises:
        PackError: Lengths differ, no rows, or values that are not numbers.
    """

    is_thread_safe = False
    most_rows_per_read = 65_536

    def __init__(
        self, arrays: Mapping[str, npt.NDArray[Any]], *, identity: str, where: str, layout: ImageLayout
    ) -> None:
        scalars = [key for key, array in arrays.items() if array.ndim == 0]
        if scalars:
            raise PackError(f"{scalars[0]!r} in {where} is a single value; expected one row per sample")
        self.fields = {
            key: FieldSpec(array.shape[1:], check_dtype(key, array.dtype, where)) for key, array in arrays.items()
        }
        self.num_samples = common_length({key: len(array) for key, array in arrays.items()}, where)
        self.attributes = image_attributes(self.fields, layout)
        self.identity = identity
        self._arrays = dict(arrays)

    def read(self, indices: npt.NDArray[np.int64]) -> SourceRows:
        """Read rows; arrays have none that cannot be read.

        Args:
            indices: int64 `(num_rows,)`.

        Returns:
            The rows.
        """
        values = {
            key: take_rows(array, indices).astype(self.fields[key].dtype, copy=False)
            for key, array in self._arrays.items()
        }
        return SourceRows(indices, values)

    def close(self) -> None:
        """Let go of the arrays; memory maps close with them."""
        self._arrays.clear()


def open_npy(path: Path, options: SourceOptions) -> ArraySource:
    """One array, memory-mapped: it may be larger than the memory.

    Args:
        path: A .npy file. Its field is called `images` from three axes on, else `data`.
        options: `layout` counts.

    Returns:
        The source.

    Raises:
        PackError: Not a NumPy file, truncated, or not numbers.
    """
    options.refuse((*_IMAGE_OPTIONS, "split", "keys"), f"{path}, which is one array")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise PackError(f"{path} cannot be read as a .npy file of numbers: {error}") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise PackError(f"{path} is an archive of arrays; give it the suffix .npz")
    key = "images" if array.ndim >= 3 else "data"
    return ArraySource({key: array}, identity=file_identity(path), where=str(path), layout=options.layout)


def open_npz(path: Path, options: SourceOptions) -> ArraySource:
    """The arrays of an archive; each is read into memory whole, as the format knows no other way.

    Args:
        path: A .npz file; the names in it are the fields.
        options: `keys` and `layout` count.

    Returns:
        The source.

    Raises:
        PackError: Not a NumPy archive, damaged, an unknown key, lengths that differ, or not numbers.
    """
    options.refuse((*_IMAGE_OPTIONS, "split"), f"{path}, which holds arrays")
    try:
        # Opened here, because NumPy leaves the file open when the archive is damaged.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise PackError(f"{path} holds one array and no archive; give it the suffix .npy")
            keys = select_keys(archive.files, options.keys, str(path))
            arrays = {key: archive[key] for key in keys}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise PackError(f"{path} cannot be read as a .npz archive of numbers: {error}") from error
    return ArraySource(arrays, identity=file_identity(path), where=str(path), layout=options.layout)


def is_idx(path: Path) -> bool:
    """Tell an idx file by its first four bytes, inside gzip or not.

    Args:
        path: An existing file.

    Returns:
        Whether a known type code and at least one axis are there.
    """
    with path.open("rb") as file:
        head = file.read(4)
    if head[:2] == b"\x1f\x8b":
        try:
            with gzip.open(path) as file:
                head = file.read(4)
        except (OSError, EOFError, zlib.error):
            return False
    return len(head) == 4 and head[:2] == b"\0\0" and head[2] in _IDX_TYPES and head[3] > 0


def read_idx(path: Path) -> npt.NDArray[Any]:
    """The array of an idx file: memory-mapped when plain, in memory when gzipped.

    Args:
        path: The file.

    Returns:
        Array in the file's byte order, read-only.

    Raises:
        PackError: Not an idx file, or another number of bytes than its header promises.
    """
    content: npt.NDArray[np.uint8]
    if path.suffix == ".gz":
        try:
            content = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)
        except (OSError, EOFError, zlib.error) as error:
            raise PackError(f"{path} is not a whole gzip file: {error}. Fetch it again") from error
    elif path.stat().st_size == 0:
        content = np.empty(0, np.uint8)
    else:
        content = np.memmap(path, np.uint8, mode="r")
    head = content[:4].tobytes()
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or head[3] == 0:
        raise PackError(f"{path} is not an idx file: it begins with {head!r}, not two zero bytes and a type")
    dtype, start = np.dtype(_IDX_TYPES[head[2]]), 4 + 4 * head[3]
    if len(content) < start:
        raise PackError(f"{path} ends within the {start} bytes of its header; it is truncated, fetch it again")
    shape = tuple(int(length) for length in content[4:start].view(">u4"))
    expected_bytes, found_bytes = math.prod(shape) * dtype.itemsize, len(content) - start
    if found_bytes != expected_bytes:
        raise PackError(
            f"{path} holds {found_bytes} bytes of values where its header promises {expected_bytes} "
            f"(shape {shape}, {dtype.name}); it is truncated or damaged, fetch it again"
        )
    return content[start:].view(dtype).reshape(shape)


def idx_files(folder: Path) -> dict[str, dict[str, Path]]:
    """The idx files of a folder by their names.

    Args:
        folder: An existing folder.

    Returns:
        Split, such as `"train"` or `"t10k"`, to `{"images": path, "labels": path}` (either may be missing); a
        plain file goes before a gzipped one.
    """
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _IDX_NAME.fullmatch(path.name)
        if match and path.is_file():
            # Sorted order has the plain name first.
            found.setdefault(match["split"], {}).setdefault(match["what"], path)
    return found


def open_idx(path: Path, options: SourceOptions) -> ArraySource:
    """One idx file; beside images named as MNIST's are, the labels are found by their name.

    A damaged file, or lengths that differ, raise `PackError`.

    Args:
        path: The file.
        options: `layout` counts for images of three axes.

    Returns:
        The source, with `images` (from three axes on), `labels` (one axis) or `data`.
    """
    options.refuse((*_IMAGE_OPTIONS, "split"), f"{path}, which is an idx file")
    match = _IDX_NAME.fullmatch(path.name)
    if match and match["what"] == "images":
        pair = {**idx_files(path.parent)[match["split"]], "images": path}
        return _open_pair(pair, options)
    array = read_idx(path)
    key = "images" if array.ndim >= 3 else "labels" if array.ndim == 1 else "data"
    return _open_pair({key: path}, options)


def open_idx_folder(folder: Path, options: SourceOptions) -> ArraySource:
    """A pair of idx files in a folder, chosen by `options.split` where there are several.

    Args:
        folder: A folder for which `idx_files` finds something.
        options: `split`, `keys` and `layout` count.

    Returns:
        The source.

    Raises:
        PackError: The choice is open, or there is no such pair; damaged files; lengths that differ.
    """
    options.refuse(_IMAGE_OPTIONS, f"{folder}, which holds idx files")
    found = idx_files(folder)
    wanted = _SPLITS.get(options.split or "", ())
    chosen = [
        name
        for name in found
        if options.split is None or name in wanted or name.endswith(tuple(f"-{ending}" for ending in wanted))
    ]
    if len(chosen) != 1:
        listed = ", ".join(path.name for pair in found.values() for path in pair.values())
        raise PackError(
            f"{folder} holds {len(chosen)} image/label pairs to choose from"
            + ("" if options.split is None else f" for split={options.split!r}")
            + f", expected one: {listed}. Give split='train' or 'test' (--split), or one of the image files"
        )
    return _open_pair(found[chosen[0]], options)


def _open_pair(pair: Mapping[str, Path], options: SourceOptions) -> ArraySource:
    """Images, labels or both, from one file each."""
    paths = [str(path) for path in pair.values()]
    keys = select_keys(sorted(pair), options.keys, " and ".join(paths))
    return ArraySource(
        {key: read_idx(pair[key]) for key in keys},
        identity="|".join(file_identity(pair[key]) for key in keys),
        where=" and ".join(str(pair[key]) for key in keys),
        layout=options.layout,
    )
