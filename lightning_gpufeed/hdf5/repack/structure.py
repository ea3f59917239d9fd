"""All that a file of `repack` holds besides rows: datasets with their chunks in place, text, attributes.

HDF5 writes it in one go before the first row, so a kill later on cannot tear its bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.access import PRIVATE_GROUP, open_file
from lightning_gpufeed.hdf5.packed_file import FieldPlan
from lightning_gpufeed.hdf5.repack.inputs import Column, Inputs

__all__ = ["LeftOut", "create_structure", "filter_options", "write_checksums"]

LeftOut = list[tuple[str, str]]
Checksums = Mapping[str, Sequence[int]]

_CODES = {"gzip": 1, "lz4": 32004, "zstd": 32015}


def filter_options(compress: str | None) -> dict[str, Any]:
    """What h5py calls a compression.

    Args:
        compress: `"gzip"`, `"lz4"`, `"zstd"` or None.

    Returns:
        Keyword arguments of `create_dataset`.

    Raises:
        ValueError: Another name.
        PackError: HDF5 has no such filter here.
    """
    if compress is None:
        return {}
    if compress not in _CODES:
        raise ValueError(f"compress is {compress!r}; expected one of {', '.join(_CODES)}, or None")
    if not h5py.h5z.filter_avail(_CODES[compress]):
        raise PackError(f"this HDF5 cannot compress with {compress}: pip install 'lightning_gpufeed[filters]'")
    levels = {"gzip": 4, "lz4": (0,), "zstd": (3,)}
    return {"compression": "gzip" if compress == "gzip" else _CODES[compress], "compression_opts": levels[compress]}


def create_structure(
    path: Path, inputs: Inputs, plans: Sequence[FieldPlan], compress: str | None, version: str
) -> LeftOut:
    """Create or replace a file with everything in it but the rows of numbers and their checksums.

    Args:
        path: The file.
        inputs: Where text, attributes and the like come from.
        plans: One per column of numbers.
        compress: See `filter_options`.
        version: Of this package.

    Returns:
        (name, reason) of what could not be copied.
    """
    by_key = {plan.key: plan for plan in plans}
    with (
        open_file(inputs.paths[0]) as source,
        # HDF5 1.8's format holds attributes above 64 KiB; large chunks begin at a page, as direct I/O needs.
        h5py.File(
            path,
            "w",
            libver=("v108", "latest"),
            locking=False,
            alignment_threshold=64 * 1024,
            alignment_interval=4096,
        ) as file,
    ):
        for column in inputs.columns:
            if column.key in by_key:
                _create_rows(file, by_key[column.key], column, filter_options(compress))
            else:
                _copy_objects(file, column)
        left_out = _copy_surroundings(source, file, inputs)
        if not _all_packed(inputs):
            file.attrs.pop("gpufeed_format", None)
        file.attrs["gpufeed_version"] = version
        for plan in plans:
            num_chunks = plan.num_chunks(file[plan.key].shape[0])
            kept = file.create_dataset(f"{PRIVATE_GROUP}/crc32/{plan.key}", data=np.zeros(num_chunks, np.uint32))
            kept.attrs["rows_per_chunk"] = plan.rows_per_chunk
    return left_out


def write_checksums(path: Path, crc32: Checksums) -> None:
    """Fill in the checksums, past HDF5: a kill in between leaves the file's structure whole.

    Args:
        path: File from `create_structure`.
        crc32: Key to one checksum per chunk.
    """
    with h5py.File(path, "r", locking=False) as file:
        places = {key: file[f"{PRIVATE_GROUP}/crc32/{key}"].id.get_offset() for key in crc32}
    with path.open("r+b") as raw:
        for key, checksums in crc32.items():
            raw.seek(places[key])
            raw.write(np.array(checksums, np.uint32).tobytes())


def _create_rows(file: h5py.File, plan: FieldPlan, column: Column, options: dict[str, Any]) -> None:
    """A dataset of numbers; uncompressed, each chunk gets its place now, and zeros are not written twice over."""
    shape = (column.num_rows, *plan.sample_shape)
    chunks = (plan.rows_per_chunk, *plan.sample_shape)
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if not options:
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        options = {"fill_time": "never"}
    dtype = column.stored_dtype
    file.create_dataset(plan.key, shape, dtype, chunks=chunks, maxshape=shape, dcpl=creation, **options)


def _copy_objects(file: h5py.File, column: Column) -> None:
    """A dataset of text or of variable length, or one without values."""
    shape = (column.num_rows, *column.sample_shape)
    dataset = file.create_dataset(column.key, shape, column.stored_dtype)
    for row, values in column.blocks():
        if values.size:
            dataset[row : row + len(values)] = values


def _all_packed(inputs: Inputs) -> bool:
    """Whether the attributes of all inputs mean what `pack` means by them."""
    return all(layout.is_packed for column in inputs.columns for layout in column.layouts)


def _copy_surroundings(source: h5py.File, file: h5py.File, inputs: Inputs) -> LeftOut:
    """Attributes of the file, of groups and of datasets, and single values; what cannot be copied is named."""
    left_out: LeftOut = []
    keys = [column.key for column in inputs.columns]
    _copy_attributes(source, file, "", left_out)
    for column in inputs.columns:
        # `pack` measured these over the rows of one file.
        measured = ("mean", "std") if len(column.layouts) > 1 and column.layouts[0].is_packed else ()
        _copy_attributes(source[column.key], file[column.key], column.key, left_out, measured)
        left_out += _other_attributes(column, measured)
    if f"{PRIVATE_GROUP}/skipped" in source:
        left_out.append((f"{PRIVATE_GROUP}/skipped", "names of samples that an earlier pack had left out"))
    if not inputs.has_all:
        parents = {key[:end] for key in keys for end, sign in enumerate(key) if sign == "/"}
        for name in sorted(parents):
            _copy_attributes(source[name], file[name], name, left_out)
        return left_out
    source.visititems(lambda name, item: _copy_item(name, item, file, keys, left_out))
    return left_out


def _other_attributes(column: Column, measured: Sequence[str]) -> LeftOut:
    """Attributes of later files that differ from those of the first, which are kept."""
    first, left_out = column.layouts[0], []
    for other in column.layouts[1:]:
        for name, value in other.attributes.items():
            kept = first.attributes.get(name)
            if name not in measured and not (kept is not None and np.array_equal(np.asarray(kept), np.asarray(value))):
                left_out.append((f"{column.key}@{name} of {other.path}", "differs from the first file's"))
    return left_out


def _copy_item(name: str, item: Any, file: h5py.File, keys: Sequence[str], left_out: LeftOut) -> None:
    """A group, or what is no array."""
    if name in keys or name.split("/")[0] == PRIVATE_GROUP:
        return
    if isinstance(item, h5py.Group):
        _copy_attributes(item, file.require_group(name), name, left_out)
    elif isinstance(item, h5py.Dataset) and item.shape == () and _is_copyable(item):
        file.create_dataset(name, data=item[()], dtype=item.dtype)
        _copy_attributes(item, file[name], name, left_out)
    else:
        left_out.append((name, "neither an array nor a single number or text"))


def _is_copyable(item: h5py.Dataset) -> bool:
    """Whether a single value is a number or text."""
    try:
        return item.dtype.kind in "biufc" or h5py.check_string_dtype(item.dtype) is not None
    except TypeError:
        return False


def _copy_attributes(source: Any, target: Any, name: str, left_out: LeftOut, skipped: Sequence[str] = ()) -> None:
    """All attributes but those that tie objects of the old file together."""
    is_scale = isinstance(source, h5py.Dataset) and source.is_scale
    for attribute in source.attrs:
        label = f"{name}@{attribute}"
        if attribute in skipped:
            left_out.append((label, "measured over one of the joined files"))
            continue
        if attribute in ("DIMENSION_LIST", "REFERENCE_LIST") or (is_scale and attribute in ("CLASS", "NAME")):
            left_out.append((label, "ties dimension scales of the old file together"))
            continue
        try:
            dtype = source.attrs.get_id(attribute).dtype
            if _has_reference(dtype):
                left_out.append((label, "refers to objects of the old file"))
                continue
            value = source.attrs[attribute]
            if isinstance(value, h5py.Empty):
                target.attrs[attribute] = value
            else:
                target.attrs.create(attribute, value, dtype=dtype)
        except (OSError, TypeError, ValueError, KeyError, RuntimeError) as error:  # h5py's, for exotic types
            left_out.append((label, f"h5py cannot copy it: {error}"))


def _has_reference(dtype: np.dtype[Any]) -> bool:
    """Whether values point at objects of their file."""
    if h5py.check_ref_dtype(dtype) is not None:
        return True
    base = h5py.check_vlen_dtype(dtype)
    if isinstance(base, np.dtype) and _has_reference(base):
        return True
    return any(_has_reference(field[0]) for field in (dtype.fields or {}).values())
