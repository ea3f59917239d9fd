"""The packed file on disk: its chunks in their places, rows, checksums and attributes.

HDF5 creates the structure and adds the attributes; rows and checksums in between are ours::

    create_structure ──> chunk_offsets ──> write_rows ... ──> write_metadata ──> verify
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import LayoutError, PackError

__all__ = [
    "FieldPlan",
    "chunk_offsets",
    "create_structure",
    "plan_field",
    "restore_structure",
    "structure_fingerprint",
    "verify",
    "write_metadata",
    "write_rows",
]

_FORMAT = 1
# Larger objects begin at multiples of a page, as direct I/O needs; smaller ones are not worth the padding.
_ALIGNMENT_THRESHOLD = 64 * 1024
_ALIGNMENT_INTERVAL = 4096
# HDF5 before 2.0 cannot read larger chunks.
_MAX_CHUNK_BYTES = 2**32 - 1


@dataclass(frozen=True)
class FieldPlan:
    """One dataset of the output.

    Attributes:
        key: Its path in the file.
        sample_shape: Shape of one row.
        dtype: NumPy type.
        rows_per_chunk: Rows in each chunk.
    """

    key: str
    sample_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows_per_chunk: int

    @property
    def sample_bytes(self) -> int:
        """Size of one row in bytes."""
        return int(np.prod(self.sample_shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Size of one chunk in bytes."""
        return self.rows_per_chunk * self.sample_bytes

    def num_chunks(self, num_rows: int) -> int:
        """Number of chunks for so many rows; the last may be partly used."""
        return -(-num_rows // self.rows_per_chunk)


def plan_field(
    key: str, sample_shape: tuple[int, ...], dtype: np.dtype[Any], chunk_bytes: int, num_samples: int
) -> FieldPlan:
    """Give a field its dataset: as many whole samples in a chunk as fit, and at least one.

    Args:
        key: Its path in the file.
        sample_shape: Shape of one row.
        dtype: NumPy type in the file.
        chunk_bytes: Upper limit for a chunk, in bytes.
        num_samples: Number of rows.

    Returns:
        The dataset.

    Raises:
        PackError: A name or a size that HDF5 cannot take.
    """
    if key.strip("/") != key or not key or key.split("/")[0] == "_gpufeed" or "." in key.split("/"):
        raise PackError(f"the source has a field named {key!r}, which no dataset can be called; rename it")
    sample_bytes = FieldPlan(key, sample_shape, dtype, 1).sample_bytes
    if not 0 < sample_bytes <= _MAX_CHUNK_BYTES:
        raise PackError(
            f"a sample of {key!r} has shape {sample_shape}, {sample_bytes:,} bytes; expected at least one value "
            "and less than 4 GiB, which is what a chunk of HDF5 can hold"
        )
    rows = max(1, min(chunk_bytes, _MAX_CHUNK_BYTES) // sample_bytes)
    return FieldPlan(key, sample_shape, dtype, min(rows, num_samples))


def _open_for_writing(path: Path, mode: str) -> h5py.File:
    """Open with h5py, `"w"` or `"r+"`, in the format of HDF5 1.8, which holds attributes above 64 KiB."""
    return h5py.File(
        path,
        mode,
        libver=("v108", "latest"),
        # OutputLock keeps others away; HDF5's own lock fails on some network file systems.
        locking=False,
        alignment_threshold=_ALIGNMENT_THRESHOLD,
        alignment_interval=_ALIGNMENT_INTERVAL,
    )


def create_structure(path: Path, plans: Sequence[FieldPlan], num_samples: int) -> None:
    """Create or replace a file with all its chunks in place but no rows: it is sparse."""
    with _open_for_writing(path, "w") as file:
        for plan in plans:
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            # Early: each chunk gets its place now. Never filled: zeros would be written twice over.
            creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            shape = (num_samples, *plan.sample_shape)
            chunks = (plan.rows_per_chunk, *plan.sample_shape)
            file.create_dataset(
                plan.key, shape, plan.dtype, chunks=chunks, maxshape=shape, fill_time="never", dcpl=creation
            )


def chunk_offsets(path: Path, plans: Sequence[FieldPlan]) -> dict[str, npt.NDArray[np.int64]]:
    """Where the chunks lie: key to int64 `(num_chunks,)`, bytes from the start of the file."""
    with h5py.File(path, "r", locking=False) as file:
        return {plan.key: _offsets(file[plan.key], plan) for plan in plans}


def _offsets(dataset: h5py.Dataset, plan: FieldPlan) -> npt.NDArray[np.int64]:
    """Byte offset of each chunk of one dataset."""
    offsets = np.full(plan.num_chunks(dataset.shape[0]), -1, np.int64)

    def note(chunk: Any) -> None:
        offsets[chunk.chunk_offset[0] // plan.rows_per_chunk] = chunk.byte_offset

    dataset.id.chunk_iter(note)
    return offsets


def structure_fingerprint(path: Path, plans: Sequence[FieldPlan]) -> str:
    """Size of a file from `create_structure` and a digest of where its chunks lie."""
    digest = hashlib.sha256()
    for plan, offsets in zip(plans, chunk_offsets(path, plans).values(), strict=True):
        digest.update(f"{plan}".encode())
        digest.update(offsets.tobytes())
    return f"{path.stat().st_size}:{digest.hexdigest()}"


def restore_structure(path: Path, plans: Sequence[FieldPlan], num_samples: int, fingerprint: str) -> bool:
    """Put HDF5's bookkeeping back to what `create_structure` wrote, and leave the rows as they are.

    Args:
        path: The file, possibly torn.
        plans: Its datasets.
        num_samples: Rows in each at creation.
        fingerprint: Of the file at creation.

    Returns:
        False if this HDF5 would lay the chunks out in another way; nothing was changed then.
    """
    fresh = path.with_name(f"{path.name}.fresh")
    try:
        create_structure(fresh, plans, num_samples)
        if structure_fingerprint(fresh, plans) != fingerprint:
            return False
        extents = sorted(
            (int(offset), int(offset) + plan.chunk_bytes)
            for plan, offsets in zip(plans, chunk_offsets(fresh, plans).values(), strict=True)
            for offset in offsets
        )
        size, end = fresh.stat().st_size, 0
        with fresh.open("rb") as source, path.open("r+b") as target:
            for start, next_end in [*extents, (size, size)]:
                if start > end:  # what lies between two chunks is HDF5's
                    os.pwrite(target.fileno(), os.pread(source.fileno(), start - end, end), end)
                end = next_end
            target.truncate(size)
            os.fsync(target.fileno())
    finally:
        fresh.unlink(missing_ok=True)
    return True


def write_rows(
    descriptor: int,
    values: npt.NDArray[Any],
    plan: FieldPlan,
    first_row: int,
    offsets: npt.NDArray[np.int64],
    crc32: list[int],
) -> None:
    """Write rows to their places in the chunks, and carry the checksums on.

    Args:
        descriptor: The file, open for writing.
        values: C-contiguous `(num_rows, *sample_shape)` of the stored type.
        plan: Their dataset.
        first_row: Place of the first one in the dataset.
        offsets: int64 `(num_chunks,)`, see `chunk_offsets`.
        crc32: One checksum per chunk begun; changed in place.
    """
    content = _as_bytes(values)
    row, end = first_row, first_row + len(values)
    while row < end:
        chunk, row_in_chunk = divmod(row, plan.rows_per_chunk)
        next_row = min(end, (chunk + 1) * plan.rows_per_chunk)
        part = content[(row - first_row) * plan.sample_bytes : (next_row - first_row) * plan.sample_bytes]
        if row_in_chunk == 0:
            crc32.append(0)
        crc32[chunk] = zlib.crc32(part, crc32[chunk])
        place = int(offsets[chunk]) + row_in_chunk * plan.sample_bytes
        while part:
            num_written = os.pwrite(descriptor, part, place)
            part, place = part[num_written:], place + num_written
        row = next_row


def write_metadata(
    path: Path,
    plans: Sequence[FieldPlan],
    num_rows: int,
    attributes: Mapping[str, Mapping[str, Any]],
    crc32: Mapping[str, Sequence[int]],
    skipped: Sequence[str],
    version: str,
) -> None:
    """Add through HDF5 all that the file holds besides rows, and cut off rows that were never written.

    Args:
        path: File from `create_structure`, with its rows.
        plans: The datasets.
        num_rows: Rows written to each.
        attributes: Key to attributes of the dataset; lists are lists of text.
        crc32: Key to one checksum per chunk.
        skipped: Names of the samples left out.
        version: Of this package.
    """
    with _open_for_writing(path, "r+") as file:
        file.attrs["gpufeed_format"] = _FORMAT
        file.attrs["gpufeed_version"] = version
        for plan in plans:
            dataset = file[plan.key]
            if num_rows < dataset.shape[0]:
                dataset.resize(num_rows, axis=0)
            for name, value in attributes[plan.key].items():
                is_text = isinstance(value, list)
                dataset.attrs[name] = np.array(value, dtype=h5py.string_dtype()) if is_text else value
            checksums = np.array(crc32[plan.key], np.uint32)
            kept = file.create_dataset(f"_gpufeed/crc32/{plan.key}", data=checksums)
            kept.attrs["rows_per_chunk"] = plan.rows_per_chunk
        if skipped:
            file.create_dataset("_gpufeed/skipped", data=list(skipped), dtype=h5py.string_dtype())


def _as_bytes(values: npt.NDArray[Any]) -> memoryview:
    """The bytes of an array in row order, without a copy when it is contiguous."""
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memoryview(flat)


def verify(path: str | os.PathLike[str]) -> int:
    """Read a packed file whole and compare each chunk with its checksum.

    Args:
        path: A file that `pack` wrote.

    Returns:
        Number of chunks compared.

    Raises:
        FileNotFoundError: No such file.
        LayoutError: The first chunk that differs, with its rows; or a file without checksums.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no such file: {str(path)!r}")
    try:
        with h5py.File(path, "r", rdcc_nbytes=0, locking=False) as file:
            keys: list[str] = []
            group = file.get("_gpufeed/crc32", {})
            if group:
                group.visititems(lambda name, item: keys.append(name) if isinstance(item, h5py.Dataset) else None)
            if not keys:
                raise LayoutError(
                    f"{path} has no checksums; only files written by `gpufeed pack` or `repack` have them"
                )
            return sum(_verify_dataset(path, file, key) for key in keys)
    except OSError as error:
        raise LayoutError(f"{path} cannot be read as HDF5: {error}") from error


def _verify_dataset(path: str | os.PathLike[str], file: h5py.File, key: str) -> int:
    """Compare the chunks of one dataset."""
    checksums = file[f"_gpufeed/crc32/{key}"]
    rows_per_chunk = int(checksums.attrs["rows_per_chunk"])
    dataset = file.get(key)
    num_chunks = 0 if dataset is None else -(-dataset.shape[0] // rows_per_chunk)
    if num_chunks != len(checksums):
        raise LayoutError(
            f"{path}: {key!r} has {num_chunks} chunks of {rows_per_chunk} rows, but {len(checksums)} checksums; "
            "it was changed after packing"
        )
    for chunk, expected in enumerate(checksums[:].tolist()):
        first = chunk * rows_per_chunk
        rows = dataset[first : first + rows_per_chunk]
        if zlib.crc32(_as_bytes(rows)) != expected:
            raise LayoutError(
                f"{path}: chunk {chunk} of {key!r}, rows {first} to {first + len(rows) - 1}, does not match its "
                "checksum; the file is damaged, pack it again or restore a copy"
            )
    return num_chunks
