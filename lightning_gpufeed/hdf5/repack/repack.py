"""`repack`: HDF5 files into one whose chunks hold whole samples; every value stays what it is.

`pack` makes images of anything and may change values when told to; this only lays them out anew::

    a.h5, b.h5 ──blocks──> rows in their places ──> OUT.h5.partial ──every value compared──> OUT.h5
                               │
                     journal every 2 s: the same call goes on after a kill
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.access import StrPath
from lightning_gpufeed.hdf5.journal import Journal, OutputLock, OutputPaths, Stage, sync_folder
from lightning_gpufeed.hdf5.packed_file import plan_field
from lightning_gpufeed.hdf5.repack.inputs import Inputs, open_inputs
from lightning_gpufeed.hdf5.repack.output import CompressedOutput, Output, PlainOutput, log_path_of
from lightning_gpufeed.hdf5.repack.structure import filter_options

__all__ = ["RepackProgress", "RepackReport", "RepackedArray", "repack"]

_CHECKPOINT_SECONDS = 2.0
_CHECKPOINT_BYTES = 256 * 1024**2
_PROGRESS_SECONDS = 0.1

Array = npt.NDArray[Any]
Compression = Literal["gzip", "lz4", "zstd"]
OnProgress = Callable[["RepackProgress"], None]


@dataclass(frozen=True)
class RepackProgress:
    """How far repacking is.

    Attributes:
        rows_done: Rows dealt with, of all arrays together.
        rows_total: Rows of all arrays.
        bytes_written: Bytes of rows written, or compared.
        stage: What is being done.
    """

    rows_done: int
    rows_total: int
    bytes_written: int
    stage: Literal["writing", "comparing"] = "writing"


@dataclass(frozen=True)
class RepackedArray:
    """One array of the output.

    Attributes:
        shape: (num_rows, *sample_shape).
        dtype: NumPy type in the file.
        chunk_before: Chunk shape in the first input, None unless chunked.
        rows_per_chunk: Rows in each chunk; None for text, variable length and empty arrays, which have no chunks.
        chunk_bytes: Size of each chunk before compression, None likewise.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_before: tuple[int, ...] | None
    rows_per_chunk: int | None
    chunk_bytes: int | None


@dataclass(frozen=True)
class RepackReport:
    """What `repack` did.

    Attributes:
        path: The new file.
        arrays: Key to array.
        left_out: (name, reason) of what the new file does not have.
        resumed_rows: Rows that an earlier, interrupted call had written.
        compared_bytes: Bytes compared with the source; None if that was not asked for.
        bytes_before: Size of the inputs.
        file_bytes: Size of the new file.
        seconds: Time that this call took.
    """

    path: Path
    arrays: dict[str, RepackedArray]
    left_out: tuple[tuple[str, str], ...]
    resumed_rows: int
    compared_bytes: int | None
    bytes_before: int
    file_bytes: int
    seconds: float


def repack(
    sources: StrPath | Sequence[StrPath],
    out: StrPath,
    *,
    keys: Sequence[str] | None = None,
    compress: Compression | None = None,
    chunk_bytes: int = 512 * 1024,
    verify: bool = True,
    resume: bool = True,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> RepackReport:
    """Write the arrays of HDF5 files to a new file that is read fast.

    Each array keeps its key, type, length and attributes; a train and a test array may differ in length. Several files
    are joined along the first axis. The new file appears under its name when it is complete and, unless `verify` is
    off, every value in it was compared with what h5py reads from the sources. After a kill, the same call goes on.

    Text and variable length are copied as they are, in one go. Whatever cannot be repacked exactly, an output that
    exists, a full disk and a second process at the same output raise `PackError`.

    Args:
        sources: One HDF5 file or several.
        out: File to write.
        keys: Arrays to take; None takes all.
        compress: Compress chunks; None stores them as they are, which is fastest to read at random.
        chunk_bytes: Upper limit for a chunk, in bytes; a larger sample gets a chunk of its own.
        verify: Read the new file back and compare every value.
        resume: Go on from an interrupted call with the same sources and options.
        overwrite: Replace an existing output, when the new one is complete.
        on_progress: Called about ten times a second at most, in this thread.

    Returns:
        What was written, and what was left out.

    Raises:
        FileNotFoundError: A source, or the folder of `out`, is missing.
        ValueError: An option has a value that cannot be meant.

    Example:
        >>> repack("train.h5", "train-rows.h5", chunk_bytes=16 * 768).arrays["images"].rows_per_chunk
        16
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; expected at least 1, such as 512 * 1024")
    given = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not given or (keys is not None and not keys):
        raise ValueError(f"{'sources' if not given else 'keys'} is empty; name at least one")
    paths = OutputPaths.of(out)
    if not paths.final.parent.is_dir():
        raise FileNotFoundError(f"the folder for {paths.final} does not exist; create {paths.final.parent}")
    filter_options(compress)
    _refuse_existing(paths.final, overwrite)
    inputs = open_inputs(given, keys)
    with OutputLock(paths):
        _refuse_existing(paths.final, overwrite)  # another process may have finished meanwhile
        repacking = _Repacking(inputs, paths, compress, chunk_bytes, on_progress)
        return repacking.run(is_verifying=verify, is_resuming=resume, is_overwriting=overwrite)


def _refuse_existing(final: Path, overwrite: bool) -> None:
    """Leave a file alone that is there already."""
    if final.exists() and not final.is_file():
        raise PackError(f"{final} is a folder, pipe or device; expected the name of a file to write")
    if final.exists() and not overwrite:
        raise PackError(f"{final} exists; overwrite=True (--overwrite) replaces it")


class _Repacking:
    """One call of `repack`, with the lock held."""

    def __init__(
        self,
        inputs: Inputs,
        paths: OutputPaths,
        compress: Compression | None,
        chunk_bytes: int,
        on_progress: OnProgress | None,
    ) -> None:
        self._inputs, self._paths, self._on_progress = inputs, paths, on_progress
        self._started = self._last_progress = time.monotonic()
        self._parts = [
            (column, plan_field(column.key, column.sample_shape, column.dtype, chunk_bytes, column.num_rows))
            for column in inputs.columns
            if column.is_bulk
        ]
        self._rows_total = sum(column.num_rows for column, _ in self._parts)
        # Not imported: the package's root imports Lightning, which this floor does without.
        version: str = sys.modules[__name__.partition(".")[0]].__version__
        given = (paths, inputs, self._parts, version)
        self._output: Output = CompressedOutput(*given, compress) if compress else PlainOutput(*given)
        arrays = [column.key for column in inputs.columns]
        # What decides the content of the file; a journal of `pack` does not have the first of them.
        self._journal = Journal(inputs.identity, {"repacked": arrays, "compress": compress, "chunk_bytes": chunk_bytes})
        self._saved_position = self._written_bytes = 0

    def run(self, *, is_verifying: bool, is_resuming: bool, is_overwriting: bool) -> RepackReport:
        """Write, compare, rename."""
        try:
            with closing(self._output):
                if not (is_resuming and self._go_on()):
                    self._start()
                resumed_rows = self._journal.position
                if self._journal.stage is Stage.WRITING:
                    self._write()
            self._inputs.refuse_changes()
            compared_bytes = self._compare() if is_verifying else None
            _refuse_existing(self._paths.final, is_overwriting)
            with self._writing():
                os.replace(self._paths.partial, self._paths.final)
                sync_folder(self._paths.final.parent)
                log_path_of(self._paths).unlink(missing_ok=True)  # a kill may have come before its time
                self._paths.journal.unlink(missing_ok=True)
        except PackError as error:
            raise PackError(f"{error}{self._keep_or_remove()}") from error.__cause__
        left_out = (*self._inputs.left_out, *((name, reason) for name, reason in self._journal.skipped))
        return RepackReport(
            path=self._paths.final,
            arrays=self._arrays(),
            left_out=left_out,
            resumed_rows=resumed_rows,
            compared_bytes=compared_bytes,
            bytes_before=sum(os.path.getsize(path) for path in self._inputs.paths),
            file_bytes=self._journal.file_bytes,
            seconds=time.monotonic() - self._started,
        )

    def _arrays(self) -> dict[str, RepackedArray]:
        """The report on each array."""
        plans = {column.key: plan for column, plan in self._parts}
        arrays = {}
        for column in self._inputs.columns:
            plan, before = plans.get(column.key), column.layouts[0].chunk_shape
            shape = (column.num_rows, *column.sample_shape)
            chunk = (plan.rows_per_chunk, plan.chunk_bytes) if plan else (None, None)
            arrays[column.key] = RepackedArray(shape, column.stored_dtype, before, *chunk)
        return arrays

    def _go_on(self) -> bool:
        """Take up the journal of an interrupted call, if it fits."""
        if (found := Journal.load(self._paths.journal)) is None:
            return False
        reason = found.difference(self._journal.source, self._journal.options)
        if reason is None:
            with self._writing():
                is_finished = found.stage is Stage.FINISHED
                reason = found.misfit(self._paths.partial, [], 0) if is_finished else self._output.misfit(found)
        if reason is not None:
            warnings.warn(f"{self._paths.partial} is begun anew, not continued: {reason}", stacklevel=4)
            return False
        self._journal, self._saved_position = found, found.position
        return True

    def _start(self) -> None:
        """Begin a new file."""
        with self._writing():
            # First of all: a journal must never outlive the file that it tells about.
            self._paths.journal.unlink(missing_ok=True)
            sync_folder(self._paths.final.parent)
            self._journal.crc32 = {column.key: [] for column, _ in self._parts}
            self._output.start(self._journal)
            self._journal.save(self._paths.journal)

    def _write(self) -> None:
        """Write the rows that are missing, and complete the file."""
        journal = self._journal
        saved_at, unsaved_bytes, done = time.monotonic(), 0, journal.position
        for column, plan in self._parts:
            first_row, done = done, max(0, done - column.num_rows)
            if first_row >= column.num_rows:
                continue
            for num_rows in self._guarded(self._output.write(journal, column, plan, first_row)):
                journal.position = journal.num_rows = journal.position + num_rows
                unsaved_bytes += num_rows * plan.sample_bytes
                self._written_bytes += num_rows * plan.sample_bytes
                if time.monotonic() - saved_at >= _CHECKPOINT_SECONDS or unsaved_bytes >= _CHECKPOINT_BYTES:
                    self._save()
                    saved_at, unsaved_bytes = time.monotonic(), 0
                self._show(journal.position, self._written_bytes, "writing")
        self._save()
        with self._writing():
            self._output.finish(journal)
            self._settle()

    def _guarded(self, steps: Iterator[int]) -> Iterator[int]:
        """The same, with errors of the file system told as ours."""
        while True:
            with self._writing():
                step = next(steps, None)
            if step is None:
                return
            yield step

    def _save(self) -> None:
        """Bring the rows to disk, then the journal that knows them."""
        with self._writing():
            self._output.sync(self._journal)
            self._journal.save(self._paths.journal)
        self._saved_position = self._journal.position

    def _settle(self) -> None:
        """All is written: bring it to disk, and out of memory, so that comparing asks the disk."""
        descriptor = os.open(self._paths.partial, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._journal.file_bytes = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        self._journal.stage = Stage.FINISHED
        self._journal.save(self._paths.journal)
        log_path_of(self._paths).unlink(missing_ok=True)

    def _compare(self) -> int:
        """Read both sides through h5py and compare every value; gives the number of bytes."""
        position = num_bytes = 0
        with h5py.File(self._paths.partial, "r", locking=False) as file:
            for column in self._inputs.columns:
                for row, expected in column.blocks():
                    end = row + len(expected)
                    try:
                        is_same = _is_same(expected, file[column.key][row:end])
                    except OSError:  # a chunk that cannot be decoded
                        is_same = False
                    if not is_same:
                        self._saved_position = 0  # all of it has to be written again
                        raise PackError(
                            f"the new file does not give back what was read: {column.key!r}, rows {row} to {end - 1}. "
                            f"Disk or memory is at fault, or a source is being written to"
                        )
                    num_bytes += expected.nbytes
                    if column.is_bulk:
                        position += len(expected)
                        self._show(position, num_bytes, "comparing")
        return num_bytes

    def _show(self, position: int, num_bytes: int, stage: Literal["writing", "comparing"]) -> None:
        """Call `on_progress`, not too often, but always at the end."""
        now = time.monotonic()
        is_due = now - self._last_progress >= _PROGRESS_SECONDS or position == self._rows_total
        if self._on_progress is not None and is_due:
            self._last_progress = now
            self._on_progress(RepackProgress(position, self._rows_total, num_bytes, stage))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the file system into one that says how much room is needed."""
        try:
            yield
        except OSError as error:
            raise PackError(
                f"writing {self._paths.partial} failed: {error.strerror or error}. {self._output.needed_bytes():,} "
                f"bytes are needed in all; {shutil.disk_usage(self._paths.final.parent).free:,} are free"
            ) from error

    def _keep_or_remove(self) -> str:
        """Keep what a further call can use, and say so; remove the rest."""
        if self._saved_position:
            return (
                f"\nWhat was written before stays in {self._paths.partial}: a further call with the same sources and "
                f"options goes on after {self._saved_position} of {self._rows_total} rows"
            )
        for path in (self._paths.partial, self._paths.journal, log_path_of(self._paths)):
            path.unlink(missing_ok=True)
        return ""


def _is_same(expected: Array, written: Array) -> bool:
    """Whether two blocks of rows are the same, bit for bit; NaN is the same as itself."""
    if expected.shape != written.shape:
        return False
    if expected.dtype.kind != "O":
        return bool(np.array_equal(_as_bytes(expected), _as_bytes(written.astype(expected.dtype, copy=False))))
    pairs = zip(expected.flat, written.flat, strict=True)
    return all(
        _is_same(one, two) if isinstance(one, np.ndarray) and isinstance(two, np.ndarray) else one == two
        for one, two in pairs
    )


def _as_bytes(values: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
