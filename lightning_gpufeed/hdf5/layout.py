"""What is inside an HDF5 file, read once through h5py, and how fast it can be read.

`read_layout` opens a file, writes down everything that later decides speed or correctness (shape, type,
chunk grid, byte offset of every chunk, filters, fill value, the files the bytes really live in) and closes
the file again. The result is a value: it pickles, prints and is tested without a reader.

It also picks the engine::

    uncompressed, native type, every sample whole in one chunk  ->  RAW     gather from the mapped file
    chunks whose filters can be undone without HDF5             ->  CHUNKS  chunk by chunk, by several threads
    anything else                                               ->  H5PY    whole chunks through h5py

Source: HDF5 file format specification (chunked and contiguous layout messages); behaviour checked on
HDF5 2.0 through h5py 3.16.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import (
    FileStamp,
    StrPath,
    open_file,
    open_h5_dataset,
    pick_attributes,
)
from lightning_gpufeed.hdf5.chunk_index import (
    ChunkIndex,
    chunk_grid,
    grows_sideways,
    has_plain_edge_chunk,
    read_chunk_index,
)
from lightning_gpufeed.hdf5.linked import find_dependencies
from lightning_gpufeed.hdf5.readers.decode import FilterSpec, why_not_decodable
from lightning_gpufeed.hdf5.readers.raw_check import raw_bytes_agree, refuse_truncation
from lightning_gpufeed.hdf5.remote.addresses import absolute, remote_file
from lightning_gpufeed.hdf5.remote.remote_file import RemoteStamp, is_remote, refuse_other_files

__all__ = ["Engine", "H5DatasetLayout", "Storage", "read_layout"]


class Storage(StrEnum):
    """Where HDF5 keeps the bytes of a dataset."""

    CONTIGUOUS = "contiguous"
    CHUNKED = "chunked"
    COMPACT = "compact"
    EXTERNAL = "external"
    VIRTUAL = "virtual"


class Engine(StrEnum):
    """How samples are read.

    `RAW` gathers from the mapped file, `CHUNKS` reads and decodes whole chunks in threads of its own, `H5PY` reads
    whole chunks through h5py.
    """

    RAW = "raw"
    CHUNKS = "chunks"
    H5PY = "h5py"


@dataclass(frozen=True, eq=False)
class H5DatasetLayout:
    """Everything about one dataset that decides how it can be read.

    Attributes:
        path: The file that was asked for, absolute.
        key: Path of the dataset inside the file.
        shape: (num_samples, *sample_shape).
        dtype: Native-order element type; `object` for strings and variable-length values.
        is_text: Whether the elements are strings.
        storage: Where HDF5 keeps the bytes.
        chunk_shape: Shape of one chunk, None unless chunked.
        pipeline: The filters a chunk passes through, in order.
        fill_value: 0-d array of `dtype`: what an unwritten element reads as.
        index: Where the chunks lie in `storage_path`, one entry per chunk or a single one for contiguous storage.
            None where there are none.
        storage_path: The file that holds the bytes; differs from `path` behind an external link.
        stamps: Size, modification time and inode of every file the dataset depends on.
        directory: The directory that must be the current one while reading, None if it does not matter.
        engine: The engine picked.
        engine_reason: Why, as a sentence fragment.
        is_packed: Whether `pack` wrote the file, so that the attributes `scale` and `offset` mean quantisation.
        attributes: Small HDF5 attributes of the dataset (arrays and scalars up to a million elements).
    """

    path: str
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_text: bool
    storage: Storage
    chunk_shape: tuple[int, ...] | None
    pipeline: tuple[FilterSpec, ...]
    fill_value: npt.NDArray[Any]
    index: ChunkIndex | None
    storage_path: str
    stamps: tuple[FileStamp | RemoteStamp, ...]
    directory: str | None
    engine: Engine
    engine_reason: str
    is_packed: bool
    attributes: dict[str, Any]

    @property
    def storage_stamp(self) -> FileStamp | RemoteStamp:
        """The stamp of the file that holds the bytes."""
        return next(stamp for stamp in self.stamps if stamp.path == self.storage_path)

    @property
    def filters(self) -> tuple[str, ...]:
        """Names of the filters a chunk passes through, in order."""
        return tuple(spec.name for spec in self.pipeline)

    @property
    def block_offsets(self) -> npt.NDArray[np.int64] | None:
        """int64 absolute byte offsets in `storage_path`, see `index`; -1 where nothing was written."""
        return None if self.index is None else self.index.offsets

    @property
    def num_samples(self) -> int:
        """Length of the first axis."""
        return self.shape[0]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample, () for a vector of scalars."""
        return self.shape[1:]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one decoded sample; for variable-length values the size of one reference."""
        return math.prod(self.sample_shape) * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Decoded bytes of the whole dataset."""
        return self.num_samples * self.sample_bytes

    @property
    def is_tensor(self) -> bool:
        """Whether a sample is a fixed-size block of numbers, which a tensor can hold."""
        return self.dtype.kind in "biufc"

    @property
    def chunk_rows(self) -> int:
        """Samples whose rows share a chunk: the natural unit of a read. The whole length if not chunked."""
        return self.chunk_shape[0] if self.chunk_shape else max(1, self.num_samples)

    @property
    def chunk_bytes(self) -> int | None:
        """Decoded bytes of one chunk, None unless chunked."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize if self.chunk_shape else None

    @cached_property
    def num_chunks(self) -> int:
        """Chunks in the grid, written or not; 0 unless chunked."""
        return math.prod(chunk_grid(self.shape, self.chunk_shape)) if self.chunk_shape else 0

    @property
    def num_missing_chunks(self) -> int:
        """Chunks (or the one contiguous block) that were never written and read as the fill value."""
        return 0 if self.block_offsets is None else int((self.block_offsets < 0).sum())

    @property
    def has_split_samples(self) -> bool:
        """Whether a sample is spread over several chunks, or padded inside one: each read then costs more."""
        return self.chunk_shape is not None and self.chunk_shape[1:] != self.sample_shape

    @property
    def has_edge_chunk(self) -> bool:
        """Whether the last chunk along the first axis is only partly filled (it is stored full size)."""
        return self.chunk_shape is not None and self.num_samples % self.chunk_shape[0] != 0


def read_layout(path: StrPath, key: str) -> H5DatasetLayout:
    """Read the layout of one dataset, then close the file.

    Args:
        path: An HDF5 file on a local or mounted file system, or its address in a store.
        key: Path of a dataset inside it; soft and external links are followed.

    Returns:
        The layout, with the engine already picked.

    Raises:
        FileNotFoundError: There is no such file, or a file that a virtual, external or linked dataset needs
            is gone (HDF5 itself would silently return fill values).
        LayoutError: Not HDF5, truncated, no such key, a scalar, an unsupported type, or a missing filter plug-in.
    """
    with open_file(path) as h5_file:
        h5_dataset = open_h5_dataset(h5_file, key)
        return _describe(absolute(path), key, h5_dataset)


def _describe(path: str, key: str, h5_dataset: Any) -> H5DatasetLayout:
    """Write down the facts of an open dataset."""
    if h5_dataset.shape is None or h5_dataset.ndim == 0:
        raise LayoutError(
            f"{path}: dataset {key!r} is {'empty' if h5_dataset.shape is None else 'a scalar'}; expected an array "
            f"whose first axis counts samples. Name another key."
        )
    _refuse_type(path, key, h5_dataset)
    dcpl = h5_dataset.id.get_create_plist()
    storage = _storage(h5_dataset, dcpl)
    pipeline, missing = _filters(dcpl)
    if missing:
        raise LayoutError(
            f"{path}: dataset {key!r} is compressed with {', '.join(missing)}, which this HDF5 cannot decode. "
            f"Install the plug-ins with: pip install 'lightning_gpufeed[filters]'; if they lack it, write the file "
            f"without filters where it can be read: h5repack -f NONE IN.h5 OUT.h5"
        )
    dtype = h5_dataset.dtype.newbyteorder("=") if h5_dataset.dtype.kind in "biufc" else np.dtype(object)
    is_address = is_remote(path)
    if is_address:
        refuse_other_files(h5_dataset, h5_dataset.file)
        stamps: tuple[FileStamp | RemoteStamp, ...] = (remote_file(path).stamp,)
        directory: str | None = None
    else:
        needs = find_dependencies(path, h5_dataset)
        stamps, directory = tuple(needs.stamps.values()), needs.directory
    storage_path = path if is_address else os.path.abspath(h5_dataset.file.filename)
    is_indexed = storage in (Storage.CHUNKED, Storage.CONTIGUOUS) and not grows_sideways(h5_dataset)
    index = read_chunk_index(h5_dataset, is_chunked=storage is Storage.CHUNKED) if is_indexed else None
    engine, reason = _pick_engine(h5_dataset, storage, pipeline, index)
    if engine is not Engine.H5PY:
        assert index is not None
        refuse_truncation(path, key, index, storage_path)
        if not raw_bytes_agree(h5_dataset, pipeline, index, storage_path):
            engine, reason = Engine.H5PY, "the bytes at the chunks' offsets are not what HDF5 returns for them"
    if is_address and engine is Engine.RAW:
        engine, reason = Engine.CHUNKS, "whole chunks are fetched from the store, many at the same time"
    return H5DatasetLayout(
        path=path,
        key=key,
        shape=tuple(int(n) for n in h5_dataset.shape),
        dtype=dtype,
        is_text=h5py.check_string_dtype(h5_dataset.dtype) is not None,
        storage=storage,
        chunk_shape=h5_dataset.chunks,
        pipeline=pipeline,
        fill_value=_fill_value(h5_dataset, dtype),
        index=index,
        storage_path=storage_path,
        stamps=stamps,
        directory=directory,
        engine=engine,
        engine_reason=reason,
        is_packed="gpufeed_format" in h5_dataset.file.attrs,
        attributes=pick_attributes(h5_dataset),
    )


def _refuse_type(path: str, key: str, h5_dataset: Any) -> None:
    """Refuse element types that neither a tensor nor a list of strings or tensors can hold exactly."""
    try:
        dtype = h5_dataset.dtype
        base = h5py.check_vlen_dtype(dtype)
        is_text = h5py.check_string_dtype(dtype) is not None
        is_good = is_text or _is_number(dtype) or (base is not None and _is_number(base) and base.isnative)
        name = f"variable-length {base}" if base is not None else str(dtype)
        name = "HDF5 reference" if h5py.check_ref_dtype(dtype) is not None else name
    except TypeError as error:
        is_good, name = False, f"({error})"
    if not is_good:
        raise LayoutError(
            f"{path}: dataset {key!r} has the element type {name}; expected integers, floats up to 64 bits, complex "
            f"numbers, booleans, strings, or variable-length arrays of native numbers. Copy what you need of it into a "
            f"dataset of such a type, or name the datasets to use (keys=)."
        )


def _is_number(dtype: np.dtype[Any]) -> bool:
    """Whether torch has this type, in one byte order or the other."""
    return dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize <= 8) or dtype.str[1:] in ("c8", "c16")


def _storage(h5_dataset: Any, dcpl: Any) -> Storage:
    """Name the storage class."""
    if h5_dataset.is_virtual:
        return Storage.VIRTUAL
    if dcpl.get_external_count():
        return Storage.EXTERNAL
    names = {h5py.h5d.CHUNKED: Storage.CHUNKED, h5py.h5d.COMPACT: Storage.COMPACT}
    return names.get(dcpl.get_layout(), Storage.CONTIGUOUS)


def _filters(dcpl: Any) -> tuple[tuple[FilterSpec, ...], list[str]]:
    """The filters, and names of those that cannot be decoded here."""
    known = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
    known |= {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}
    pipeline, missing = [], []
    for number in range(dcpl.get_nfilters()):
        code, _, values, label = dcpl.get_filter(number)
        name = known.get(code, label.decode(errors="replace") if label else f"filter {code}")
        pipeline.append(FilterSpec(code, name, tuple(int(value) for value in values)))
        if not h5py.h5z.filter_avail(code):
            missing.append(f"{name} (filter {code})")
    return tuple(pipeline), missing


def _pick_engine(
    h5_dataset: Any, storage: Storage, pipeline: tuple[FilterSpec, ...], index: ChunkIndex | None
) -> tuple[Engine, str]:
    """Choose the engine and say why."""
    dtype, chunks = h5_dataset.dtype, h5_dataset.chunks
    if dtype.kind not in "biufc":
        return Engine.H5PY, "strings and values of variable length are read once, through HDF5"
    if storage is Storage.VIRTUAL:
        return Engine.H5PY, "a virtual dataset is put together from other datasets by HDF5"
    if storage is Storage.EXTERNAL:
        return Engine.H5PY, "the bytes lie in external raw files"
    if storage is Storage.COMPACT:
        return Engine.H5PY, "a compact dataset lies inside its own header"
    if index is None:
        return Engine.H5PY, "HDF5 tells wrong places for the chunks of a dataset that grows along a later axis only"
    if not dtype.isnative or h5_dataset.id.get_type() != h5py.h5t.py_create(dtype, logical=True):
        return Engine.H5PY, f"the file's element type needs conversion to {dtype.newbyteorder('=')}"
    if (index.offsets < 0).any() and not _has_fill_value(h5_dataset):
        return Engine.H5PY, "some chunks were never written and no fill value is defined"
    if pipeline:
        names = ", ".join(spec.name for spec in pipeline)
        if reason := why_not_decodable(pipeline, math.prod(chunks) * dtype.itemsize):
            return Engine.H5PY, f"chunks pass through {names} and have to be decoded; {reason}"
        if chunks and has_plain_edge_chunk(h5_dataset, index):
            return Engine.H5PY, f"chunks pass through {names}, but not those over the edge of the dataset"
        return Engine.CHUNKS, f"chunks pass through {names} and are decoded by several threads"
    if chunks and not index.is_plain(math.prod(chunks) * dtype.itemsize):
        return Engine.H5PY, "chunks are not stored at their plain size"
    if chunks and chunks[1:] != h5_dataset.shape[1:]:
        return Engine.CHUNKS, f"chunk {chunks} does not hold whole samples of shape {h5_dataset.shape[1:]}"
    where = "in one block" if chunks is None else "whole inside a chunk"
    return Engine.RAW, f"uncompressed, every sample {where}: gathered straight from the mapped file"


def _has_fill_value(h5_dataset: Any) -> bool:
    """Whether an unwritten element has a defined value."""
    return bool(h5_dataset.id.get_create_plist().fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED)


def _fill_value(h5_dataset: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The value of an unwritten element, as a 0-d array."""
    if dtype.kind not in "biufc" or not _has_fill_value(h5_dataset):
        return np.zeros((), dtype=dtype if dtype.kind in "biufc" else np.uint8)
    return np.asarray(h5_dataset.fillvalue, dtype=dtype).reshape(())
