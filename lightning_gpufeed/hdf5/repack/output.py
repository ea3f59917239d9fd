"""Where `repack` puts rows: into the places of their chunks, or compressed.

Uncompressed chunks have a place from the start. Compressed ones have none before their size is known, so they are kept
in a log and put into a file at the end::

    PlainOutput        structure ──> pwrite rows ──> pwrite checksums              OUT.h5.partial
    CompressedOutput   compress chunks ──append──> OUT.h5.partial.chunks ──────>   OUT.h5.partial
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import h5py
import numpy as np
import numpy.typing as npt

from lightning_gpufeed.hdf5.journal import Journal, OutputPaths, check_space
from lightning_gpufeed.hdf5.packed_file import FieldPlan, chunk_offsets, structure_fingerprint, write_rows
from lightning_gpufeed.hdf5.repack.inputs import Column, Inputs
from lightning_gpufeed.hdf5.repack.structure import create_structure, filter_options, write_checksums

__all__ = ["CompressedOutput", "Output", "PlainOutput", "log_path_of"]

Array = npt.NDArray[Any]
Parts = Sequence[tuple[Column, FieldPlan]]

_RECORD = struct.Struct("<IQ")  # filter mask, bytes


def log_path_of(paths: OutputPaths) -> Path:
    """Where compressed chunks are kept until they are put into a file.

    Args:
        paths: Of the output.

    Returns:
        A path beside it.
    """
    return paths.partial.with_name(f"{paths.partial.name}.chunks")


class Output(Protocol):
    """What takes the rows. Each method may raise `OSError`; `journal.crc32` and `journal.skipped` are kept up here."""

    def needed_bytes(self) -> int:
        """Room that the whole work takes, at least about."""

    def start(self, journal: Journal) -> None:
        """Begin anew."""

    def misfit(self, journal: Journal) -> str | None:
        """Why what lies there is not what the journal tells of, or None."""

    def write(self, journal: Journal, column: Column, plan: FieldPlan, first_row: int) -> Iterator[int]:
        """Write the rows of an array from one on; gives the number of rows after each part."""

    def sync(self, journal: Journal) -> None:
        """Bring what was written to disk."""

    def finish(self, journal: Journal) -> None:
        """Complete the file."""

    def close(self) -> None:
        """Close what is open."""


class PlainOutput:
    """Chunks as they are, see `Output`."""

    def __init__(self, paths: OutputPaths, inputs: Inputs, parts: Parts, version: str) -> None:
        """Note the arguments.

        Args:
            paths: Where to write.
            inputs: Where everything but rows comes from.
            parts: The arrays of numbers.
            version: Of this package.
        """
        self._paths, self._inputs, self._parts, self._version = paths, inputs, parts, version
        self._plans = [plan for _, plan in parts]
        self._descriptor = -1
        self._offsets: dict[str, npt.NDArray[np.int64]] = {}

    def needed_bytes(self) -> int:
        """Size of all chunks."""
        return sum(plan.num_chunks(column.num_rows) * plan.chunk_bytes for column, plan in self._parts)

    def start(self, journal: Journal) -> None:
        """Create the file."""
        check_space(self._paths, self.needed_bytes())
        journal.skipped = _as_lists(
            create_structure(self._paths.partial, self._inputs, self._plans, None, self._version)
        )
        journal.structure = structure_fingerprint(self._paths.partial, self._plans)

    def misfit(self, journal: Journal) -> str | None:
        """Compare the places of the chunks with those noted."""
        reason = journal.misfit(self._paths.partial, self._plans, 0)
        if reason is None:
            check_space(self._paths, self.needed_bytes())
        return reason

    def write(self, journal: Journal, column: Column, plan: FieldPlan, first_row: int) -> Iterator[int]:
        """Write rows to their places."""
        if self._descriptor < 0:
            self._offsets = chunk_offsets(self._paths.partial, self._plans)
            self._descriptor = os.open(self._paths.partial, os.O_RDWR | os.O_CLOEXEC)
        for row, values in column.blocks(first_row):
            write_rows(self._descriptor, values, plan, row, self._offsets[plan.key], journal.crc32[plan.key])
            yield len(values)

    def sync(self, journal: Journal) -> None:
        """Bring the rows to disk."""
        if self._descriptor >= 0:
            os.fdatasync(self._descriptor)

    def finish(self, journal: Journal) -> None:
        """Fill in the checksums."""
        write_checksums(self._paths.partial, journal.crc32)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class CompressedOutput:
    """Chunks through a filter of HDF5, see `Output`. `journal.file_bytes` is the length of the log until the end."""

    def __init__(self, paths: OutputPaths, inputs: Inputs, parts: Parts, version: str, compress: str) -> None:
        """Note the arguments.

        Args:
            paths: Where to write.
            inputs: Where everything but rows comes from.
            parts: The arrays of numbers.
            version: Of this package.
            compress: See `filter_options`.
        """
        self._paths, self._inputs, self._parts, self._version = paths, inputs, parts, version
        self._compress, self._log_path = compress, log_path_of(paths)
        self._log: BinaryIO | None = None

    def needed_bytes(self) -> int:
        """Log and file are there at once for a while; judged by two chunks of each array."""
        return round(2 * sum(self._estimate(column, plan) for column, plan in self._parts))

    def _estimate(self, column: Column, plan: FieldPlan) -> float:
        """Compressed bytes of an array."""
        stored = raw = 0
        with closing(_ChunkCompressor(plan, self._compress)) as compressor:
            for row in sorted({0, column.num_rows // 2}):
                _, values = next(column.blocks(row))
                stored += len(compressor.compress(values[: plan.rows_per_chunk])[1])
                raw += plan.chunk_bytes
        return plan.num_chunks(column.num_rows) * plan.chunk_bytes * stored / raw

    def start(self, journal: Journal) -> None:
        """Begin an empty log."""
        check_space(self._paths, self.needed_bytes())
        self._paths.partial.unlink(missing_ok=True)
        self._log_path.write_bytes(b"")

    def misfit(self, journal: Journal) -> str | None:
        """The log may have grown after the journal was saved, but not shrunk."""
        log = self._log_path
        if log.exists() and log.stat().st_size >= journal.file_bytes:
            return None
        return f"{log} is missing or too short"

    def write(self, journal: Journal, column: Column, plan: FieldPlan, first_row: int) -> Iterator[int]:
        """Compress chunks and append them to the log."""
        log = self._opened(journal)
        with closing(_ChunkCompressor(plan, self._compress)) as compressor:
            for rows in _whole_chunks(column.blocks(first_row), plan.rows_per_chunk):
                mask, stored = compressor.compress(rows)
                log.write(_RECORD.pack(mask, len(stored)))
                log.write(stored)
                journal.crc32[plan.key].append(zlib.crc32(_as_bytes(rows)))
                yield len(rows)

    def _opened(self, journal: Journal) -> BinaryIO:
        """The log, cut to what the journal knows of."""
        if self._log is None:
            self._log = self._log_path.open("r+b")
            self._log.truncate(journal.file_bytes)
            self._log.seek(journal.file_bytes)
        return self._log

    def sync(self, journal: Journal) -> None:
        """Bring the log to disk."""
        if self._log is not None:
            self._log.flush()
            os.fdatasync(self._log.fileno())
            journal.file_bytes = self._log.tell()

    def finish(self, journal: Journal) -> None:
        """Put the chunks of the log into a file."""
        path, plans = self._paths.partial, [plan for _, plan in self._parts]
        journal.skipped = _as_lists(create_structure(path, self._inputs, plans, self._compress, self._version))
        with h5py.File(path, "r+", locking=False) as file, self._log_path.open("rb") as log:
            for column, plan in self._parts:
                dataset, corner = file[plan.key], (0,) * len(plan.sample_shape)
                for first_row in range(0, column.num_rows, plan.rows_per_chunk):
                    mask, size = _RECORD.unpack(log.read(_RECORD.size))
                    dataset.id.write_direct_chunk((first_row, *corner), log.read(size), mask)
        write_checksums(path, journal.crc32)

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None


class _ChunkCompressor:
    """Compresses chunks as HDF5 itself would, in a file that exists in memory only."""

    def __init__(self, plan: FieldPlan, compress: str) -> None:
        self._file = h5py.File(f"chunk of {id(self)}", "w", driver="core", backing_store=False, rdcc_nbytes=0)
        self._shape, self._dtype = (plan.rows_per_chunk, *plan.sample_shape), plan.dtype
        self._options = filter_options(compress)

    def compress(self, rows: Array) -> tuple[int, bytes]:
        """Filter mask and stored bytes of a chunk; what no row fills is zeros."""
        chunk = self._file.create_dataset("chunk", self._shape, self._dtype, chunks=self._shape, **self._options)
        chunk[: len(rows)] = rows
        chunk.flush()
        mask, stored = chunk.id.read_direct_chunk((0,) * len(self._shape))
        del self._file["chunk"]
        return int(mask), bytes(stored)

    def close(self) -> None:
        self._file.close()


def _whole_chunks(blocks: Iterator[tuple[int, Array]], rows_per_chunk: int) -> Iterator[Array]:
    """Rows in portions of a chunk each, the last one maybe smaller."""
    rest: Array | None = None
    for _, values in blocks:
        rows = values if rest is None else np.concatenate([rest, values])
        whole = len(rows) // rows_per_chunk * rows_per_chunk
        yield from (rows[first : first + rows_per_chunk] for first in range(0, whole, rows_per_chunk))
        rest = rows[whole:]
    if rest is not None and len(rest):
        yield rest


def _as_bytes(rows: Array) -> memoryview:
    """The bytes of an array in row order, without a copy."""
    flat: Any = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _as_lists(left_out: list[tuple[str, str]]) -> list[list[str]]:
    return [[name, reason] for name, reason in left_out]
