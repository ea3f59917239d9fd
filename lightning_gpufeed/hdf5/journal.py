"""The unfinished output of `pack`: its structure, the rows in it, the journal to go on from, and the lock.

::

    OUT.h5.partial        HDF5 with every chunk in its final place from the start; rows are filled in
    OUT.h5.partial.json   what has been written so far; replaced as a whole, after the rows are on disk
    OUT.h5.partial.lock   held by the one process that writes

A kill leaves rows that no journal knows, which are written again; it never leaves a journal that knows rows
which are not there. HDF5 touches the file twice only: to create it, and at the end to add attributes and
checksums. A kill in that end can tear HDF5's own bookkeeping, which is then put back from a fresh structure.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import PackError

__all__ = [
    "FieldPlan",
    "Journal",
    "OutputLock",
    "OutputPaths",
    "Stage",
    "as_bytes",
    "chunk_offsets",
    "create_structure",
    "open_for_writing",
    "restore_structure",
    "structure_fingerprint",
    "sync_folder",
    "write_rows",
]

# Larger objects begin at multiples of a page, as direct I/O needs; smaller ones are not worth the padding.
_ALIGNMENT_THRESHOLD = 64 * 1024
_ALIGNMENT_INTERVAL = 4096


@dataclass(frozen=True)
class OutputPaths:
    """The final file and what lies beside it while it is not there yet."""

    final: Path
    partial: Path
    journal: Path
    lock: Path

    @classmethod
    def of(cls, out: str | os.PathLike[str]) -> OutputPaths:
        """Paths for an output, by suffixes added to its name."""
        final = Path(out)
        partial = final.with_name(f"{final.name}.partial")
        beside = [partial.with_name(f"{partial.name}.{suffix}") for suffix in ("json", "lock")]
        return cls(final, partial, *beside)


class Stage(StrEnum):
    """How far an output is."""

    WRITING = "writing"  # rows are being filled in
    FINISHING = "finishing"  # all rows are on disk; HDF5 is changing the file
    FINISHED = "finished"  # complete under the partial name


@dataclass
class Journal:
    """What has been written, with all that is needed to go on.

    Attributes:
        source: Identity of the source.
        options: Options that decide what the file holds.
        stage: How far the output is.
        structure: Fingerprint of where the chunks lie.
        position: Rows of the source that are dealt with, written or skipped.
        num_rows: Rows written.
        ranges: Key to `[low, high]` of an automatic quantisation.
        crc32: Key to one checksum per chunk begun; that of the last chunk covers the rows it has so far.
        statistics: Key to the state of its `ChannelStatistics`.
        skipped: `[name, reason]` of each sample left out.
        file_bytes: Size of the finished file.
    """

    source: str
    options: dict[str, Any]
    stage: Stage = Stage.WRITING
    structure: str = ""
    position: int = 0
    num_rows: int = 0
    ranges: dict[str, list[float]] = field(default_factory=dict)
    crc32: dict[str, list[int]] = field(default_factory=dict)
    statistics: dict[str, list[Any]] = field(default_factory=dict)
    skipped: list[list[str]] = field(default_factory=list)
    file_bytes: int = 0

    def save(self, path: Path) -> None:
        """Replace the journal at `path` as a whole; it is on disk on return."""
        fresh = path.with_name(f"{path.name}.new")
        # Not dataclasses.asdict, which copies each of what can be millions of checksums.
        content = json.dumps({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        with fresh.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)

    @classmethod
    def load(cls, path: Path) -> Journal | None:
        """The journal at `path`; None when there is none, or none that this version wrote."""
        try:
            journal = cls(**json.loads(path.read_text(encoding="utf-8")))
            journal.stage = Stage(journal.stage)
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return journal

    def difference(self, source: str, options: dict[str, Any]) -> str | None:
        """Why this journal does not belong to a source and options (as JSON gives them back), or None."""
        changed = [
            f"{name} was {self.options.get(name)!r}, is {options.get(name)!r}"
            for name in sorted(self.options.keys() | options.keys())
            if self.options.get(name) != options.get(name)
        ]
        if changed:
            return "; ".join(changed)
        return None if self.source == source else "the source has changed"


class OutputLock:
    """One writer per output, from `with` to its end; the kernel lets go if the process is killed.

    It is a file of its own because HDF5 may lock the output itself, which would then refuse us.
    """

    def __init__(self, paths: OutputPaths) -> None:
        self._paths = paths
        self._descriptor = -1

    def __enter__(self) -> OutputLock:
        while self._descriptor < 0:
            descriptor = os.open(self._paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(descriptor)
                # The former holder may have removed the file between our opening and our locking it.
                is_current = os.path.samestat(os.fstat(descriptor), os.stat(self._paths.lock))
            except FileNotFoundError:
                is_current = False
            except BaseException:
                os.close(descriptor)
                raise
            if is_current:
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        return self

    def _lock(self, descriptor: int) -> None:
        """Take the lock, or say who has it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PackError(
                f"another process is packing to {self._paths.final} right now; wait for it or choose another name"
            ) from None
        except OSError as error:
            warnings.warn(
                f"this file system cannot lock files ({error}); make sure that only one process packs to "
                f"{self._paths.final}",
                stacklevel=4,
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._paths.lock.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


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


def open_for_writing(path: Path, mode: str) -> h5py.File:
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
    with open_for_writing(path, "w") as file:
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
    content = as_bytes(values)
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


def as_bytes(values: npt.NDArray[Any]) -> memoryview:
    """The bytes of an array in row order, without a copy when it is contiguous."""
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memoryview(flat)


def sync_folder(folder: Path) -> None:
    """Bring names that were added, changed or removed to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
