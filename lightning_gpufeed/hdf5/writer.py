"""`pack`: any source into one chunked HDF5 file that trains fast, and that a kill cannot break.

HDF5 lays out the file once; the rows then go straight to their places with `pwrite`, block by block::

    source ──read──> block of rows ──convert──> uint8 ──pwrite──> OUT.h5.partial
                                        │                              │
                                    statistics                 crc32 per chunk ──every 2 s──> journal

    attributes, checksums, fsync, rename ──> OUT.h5
"""

from __future__ import annotations

import json
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

import numpy as np

from lightning_gpufeed.errors import LayoutError, PackError
from lightning_gpufeed.hdf5.journal import Journal, OutputLock, OutputPaths, Stage, check_space, sync_folder
from lightning_gpufeed.hdf5.packed_file import (
    FieldPlan,
    chunk_offsets,
    create_structure,
    plan_field,
    structure_fingerprint,
    verify,
    write_metadata,
    write_rows,
)
from lightning_gpufeed.hdf5.sources import open_source
from lightning_gpufeed.hdf5.sources.blocks import BlockReader, shuffled_order

__all__ = ["PackProgress", "PackReport", "PackedField", "pack", "verify"]

_CHECKPOINT_SECONDS = 2.0
_CHECKPOINT_BYTES = 256 * 1024**2
_PROGRESS_SECONDS = 0.1
OnProgress = Callable[["PackProgress"], None]


@dataclass(frozen=True)
class PackProgress:
    """How far packing is.

    Attributes:
        rows_done: Rows of the source that are dealt with, written or skipped.
        rows_total: Rows of the source.
        bytes_written: Bytes of rows in the file.
        stage: `"scanning"` for the range of an automatic quantisation, else `"writing"`.
    """

    rows_done: int
    rows_total: int
    bytes_written: int
    stage: Literal["scanning", "writing"] = "writing"


@dataclass(frozen=True)
class PackedField:
    """One dataset of the packed file.

    Attributes:
        shape: Shape with the rows first.
        dtype: NumPy type in the file.
        rows_per_chunk: Rows in each chunk.
        chunk_bytes: Size of each chunk in bytes.
        attributes: What the file says about it: `layout`, `mean`, `std`, `scale`, `offset`, `class_names`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows_per_chunk: int
    chunk_bytes: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class PackReport:
    """What `pack` did.

    Attributes:
        path: The packed file.
        num_samples: Rows in it.
        fields: Key to dataset.
        skipped: `(name, reason)` of each sample left out.
        resumed_rows: Rows of the source that an earlier, interrupted call had dealt with.
        verified_chunks: Chunks read back and compared; None unless `verify` was asked for.
        file_bytes: Size of the file in bytes.
        seconds: Time that this call took.
    """

    path: Path
    num_samples: int
    fields: dict[str, PackedField]
    skipped: tuple[tuple[str, str], ...]
    resumed_rows: int
    verified_chunks: int | None
    file_bytes: int
    seconds: float


def pack(
    source: Any,
    out: str | os.PathLike[str],
    *,
    chunk_bytes: int = 512 * 1024,
    shuffle: bool = False,
    seed: int = 0,
    scale: float | None = None,
    quantize: Literal["auto"] | tuple[float, float] | None = None,
    keep_dtype: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    verify: bool = False,
    num_workers: int | None = None,
    resume: bool = True,
    overwrite: bool = False,
    keys: Sequence[str] | None = None,
    split: str | None = None,
    resize: int | tuple[int, int] | None = None,
    crop: int | tuple[int, int] | None = None,
    mode: str = "RGB",
    layout: Literal["NCHW", "NHWC"] = "NCHW",
    on_progress: OnProgress | None = None,
) -> PackReport:
    """Pack a source into one HDF5 file whose chunks hold whole samples.

    Fields whose rows have two or more axes are stored as uint8, and values that uint8 would change are refused
    unless `scale`, `quantize` or `keep_dtype` says what to do. The file appears under its name when it is
    complete. After a kill, the same call goes on where the last journal entry is, two seconds back at most.

    Whatever cannot be packed, an output that exists, a full disk and a second process at the same output raise
    `PackError`.

    Args:
        source: See `lightning_gpufeed.hdf5.sources.open_source`. A `Source` given open stays open.
        out: File to write.
        chunk_bytes: Upper limit for a chunk, in bytes; a larger sample gets a chunk of its own.
        shuffle: Write the rows in an order drawn from `seed`, instead of the source's.
        seed: 0 or more.
        scale: Store `round(value * scale)`.
        quantize: Store the nearest of 256 steps between `(low, high)`, or `"auto"` between the smallest and
            the largest value, for which the source is read twice.
        keep_dtype: Store image-like fields as they are.
        on_error: `"raise"` at a sample that cannot be read, or `"skip"` it and keep a list.
        verify: Read the file back and compare checksums before it gets its name.
        num_workers: Image files: decoding processes; None takes one per usable CPU, 0 decodes in this one.
        resume: Go on from an interrupted call with the same source and options.
        overwrite: Replace an existing output, when the new one is complete.
        keys: Fields to take; None takes all.
        split: `"train"` or `"test"`, for a folder with several pairs of idx files.
        resize: Image files: pixels of the shorter side, or exact `(height, width)`.
        crop: Image files: pixels of a centred square, or `(height, width)`.
        mode: Image files: `"RGB"` or `"L"` (grey).
        layout: Axis order of decoded images, and of arrays whose shape leaves it open.
        on_progress: Called about ten times a second at most, in this thread.

    Returns:
        What was written.

    Raises:
        FileNotFoundError: The source, or the folder of `out`, is missing.
        ValueError: An option has a value that cannot be meant, or two exclude each other.

    Example:
        >>> pack("photos/", "photos.h5", resize=256, crop=224).num_samples
        4
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; expected at least 1, such as 512 * 1024")
    paths = OutputPaths.of(out)
    if not paths.final.parent.is_dir():
        raise FileNotFoundError(f"the folder for {paths.final} does not exist; create {paths.final.parent}")
    _refuse_existing(paths.final, overwrite)
    reading = {"keys": keys, "split": split, "resize": resize, "crop": crop, "mode": mode, "layout": layout}
    storing: dict[str, Any] = {"scale": scale, "quantize": quantize, "keep_dtype": keep_dtype}
    ordering = {"chunk_bytes": chunk_bytes, "shuffle": shuffle, "seed": seed if shuffle else None}
    opened = open_source(source, num_workers=num_workers, **reading)
    try:
        order = shuffled_order(opened.num_samples, seed) if shuffle else None
        reader = BlockReader(opened, order=order, on_error=on_error, **storing)
        with OutputLock(paths):
            _refuse_existing(paths.final, overwrite)  # another process may have finished meanwhile
            # What decides the content of the file; `on_error`, say, may change when a call is repeated.
            packing = _Packing(reader, paths, chunk_bytes, reading | storing | ordering, on_progress)
            return packing.run(is_verifying=verify, is_resuming=resume, is_overwriting=overwrite)
    finally:
        if opened is not source:
            opened.close()


def _refuse_existing(final: Path, overwrite: bool) -> None:
    """Leave a file alone that is there already."""
    if final.exists() and not final.is_file():
        raise PackError(f"{final} is a folder, pipe or device; expected the name of a file to write")
    if final.exists() and not overwrite:
        raise PackError(f"{final} exists; overwrite=True (--overwrite) replaces it")


class _Packing:
    """One call of `pack`, with the lock held."""

    def __init__(
        self,
        reader: BlockReader,
        paths: OutputPaths,
        chunk_bytes: int,
        options: dict[str, Any],
        on_progress: OnProgress | None,
    ) -> None:
        self._reader, self._paths, self._on_progress = reader, paths, on_progress
        self._started = self._last_progress = time.monotonic()
        source = reader.source
        self._num_samples = source.num_samples
        self._plans = [
            plan_field(key, spec.sample_shape, reader.conversions[key].dtype, chunk_bytes, self._num_samples)
            for key, spec in source.fields.items()
        ]
        self._row_bytes = sum(plan.sample_bytes for plan in self._plans)
        self._needed_bytes = sum(plan.num_chunks(self._num_samples) * plan.chunk_bytes for plan in self._plans)
        # By way of JSON, for comparison with what a journal holds.
        self._journal = Journal(source.identity, json.loads(json.dumps(options, default=float)))
        self._saved_position = 0

    def run(self, *, is_verifying: bool, is_resuming: bool, is_overwriting: bool) -> PackReport:
        """Write, finish, check, rename."""
        self._reader.refuse_floats()
        try:
            if not (is_resuming and self._go_on()):
                self._start()
            resumed_rows = self._journal.position
            self._reader.start(self._journal.ranges, self._journal.statistics)
            if self._journal.stage is Stage.WRITING:
                self._write()
            if self._journal.stage is Stage.FINISHING:
                self._finish()
            verified_chunks = self._verify() if is_verifying else None
            _refuse_existing(self._paths.final, is_overwriting)
            self._publish()
        except PackError as error:
            raise PackError(f"{error}{self._keep_or_remove()}") from error.__cause__
        journal = self._journal
        return PackReport(
            path=self._paths.final,
            num_samples=journal.num_rows,
            fields={plan.key: self._packed_field(plan) for plan in self._plans},
            skipped=tuple((name, reason) for name, reason in journal.skipped),
            resumed_rows=resumed_rows,
            verified_chunks=verified_chunks,
            file_bytes=journal.file_bytes,
            seconds=time.monotonic() - self._started,
        )

    def _packed_field(self, plan: FieldPlan) -> PackedField:
        """The report on a dataset."""
        shape = (self._journal.num_rows, *plan.sample_shape)
        told = self._reader.attributes(plan.key)
        return PackedField(shape, plan.dtype, plan.rows_per_chunk, plan.chunk_bytes, told)

    def _go_on(self) -> bool:
        """Take up the journal of an interrupted call, if it fits."""
        if (found := Journal.load(self._paths.journal)) is None:
            return False
        reason = found.difference(self._journal.source, self._journal.options)
        if reason is None:
            with self._writing():
                reason = found.misfit(self._paths.partial, self._plans, self._num_samples)
        if reason is not None:
            warnings.warn(f"{self._paths.partial} is begun anew, not continued: {reason}", stacklevel=4)
            return False
        self._journal, self._saved_position = found, found.position
        if found.stage is Stage.WRITING:
            check_space(self._paths, self._needed_bytes)
        return True

    def _start(self) -> None:
        """Begin a new file."""
        check_space(self._paths, self._needed_bytes)
        # First of all: a journal must never outlive the file that it tells about.
        self._paths.journal.unlink(missing_ok=True)
        sync_folder(self._paths.final.parent)
        self._journal.ranges = self._reader.scan_ranges(lambda position: self._show(position, 0, "scanning"))
        with self._writing():
            create_structure(self._paths.partial, self._plans, self._num_samples)
            self._journal.structure = structure_fingerprint(self._paths.partial, self._plans)
            self._journal.crc32 = {plan.key: [] for plan in self._plans}
            self._journal.save(self._paths.journal)

    def _write(self) -> None:
        """Write the rows that are missing."""
        journal, offsets = self._journal, chunk_offsets(self._paths.partial, self._plans)
        descriptor = os.open(self._paths.partial, os.O_RDWR | os.O_CLOEXEC)
        saved_at, unsaved_bytes = time.monotonic(), 0
        try:
            # Closed before the source is: reading ahead must have stopped by then.
            with closing(self._reader.blocks(journal.position)) as blocks:
                for block in blocks:
                    with self._writing():
                        for plan in self._plans:
                            values, crc32 = block.values[plan.key], journal.crc32[plan.key]
                            write_rows(descriptor, values, plan, journal.num_rows, offsets[plan.key], crc32)
                    journal.skipped.extend([error.name, error.reason] for error in block.errors)
                    journal.num_rows += block.num_rows
                    journal.position = block.position
                    unsaved_bytes += block.num_rows * self._row_bytes
                    is_late = time.monotonic() - saved_at >= _CHECKPOINT_SECONDS
                    if is_late or unsaved_bytes >= _CHECKPOINT_BYTES:
                        self._save(descriptor)
                        saved_at, unsaved_bytes = time.monotonic(), 0
                    self._show(block.position, journal.num_rows)
            if journal.num_rows == 0:
                raise PackError(f"none of the {self._num_samples} samples could be read; nothing is left to pack")
            journal.stage = Stage.FINISHING
            self._save(descriptor)
        finally:
            os.close(descriptor)

    def _save(self, descriptor: int) -> None:
        """Bring the rows to disk, then the journal that knows them."""
        with self._writing():
            os.fdatasync(descriptor)
            self._journal.statistics = self._reader.statistics_state()
            self._journal.save(self._paths.journal)
        self._saved_position = self._journal.position

    def _show(self, position: int, num_rows: int, stage: Literal["scanning", "writing"] = "writing") -> None:
        """Call `on_progress`, not too often, but always at the end."""
        now = time.monotonic()
        is_due = now - self._last_progress >= _PROGRESS_SECONDS or position == self._num_samples
        if self._on_progress is not None and is_due:
            self._last_progress = now
            self._on_progress(PackProgress(position, self._num_samples, num_rows * self._row_bytes, stage))

    def _finish(self) -> None:
        """Add attributes and checksums through HDF5; the journal says that this has begun."""
        with self._writing():
            journal = self._journal
            write_metadata(
                self._paths.partial,
                self._plans,
                journal.num_rows,
                {plan.key: self._reader.attributes(plan.key) for plan in self._plans},
                journal.crc32,
                [name for name, _ in journal.skipped],
                # Not imported: the package's root imports Lightning, which this floor does without.
                sys.modules[__name__.partition(".")[0]].__version__,
            )
            with self._paths.partial.open("r+b") as written:
                os.fsync(written.fileno())
            journal.file_bytes = self._paths.partial.stat().st_size
            journal.stage = Stage.FINISHED
            journal.save(self._paths.journal)

    def _verify(self) -> int:
        """Read the finished file back; what went wrong on disk must be written again."""
        try:
            return verify(self._paths.partial)
        except LayoutError as error:
            self._saved_position = 0
            raise PackError(f"the disk gave back other bytes than were written: {error}") from error

    def _publish(self) -> None:
        """Give the file its name; from here on there is nothing to go on with."""
        with self._writing():
            os.replace(self._paths.partial, self._paths.final)
            sync_folder(self._paths.final.parent)
            self._paths.journal.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the file system into one that says how much room is needed."""
        try:
            yield
        except OSError as error:
            written = self._journal.num_rows * self._row_bytes
            raise PackError(
                f"writing {self._paths.partial} failed: {error.strerror or error}. The file needs "
                f"{self._needed_bytes:,} bytes in all; {written:,} were written and "
                f"{shutil.disk_usage(self._paths.final.parent).free:,} are free"
            ) from error

    def _keep_or_remove(self) -> str:
        """Keep what a further call can use, and say so; remove the rest."""
        if self._saved_position:
            return (
                f"\nWhat was written before stays in {self._paths.partial}: a further call with the same source "
                f"and options goes on after {self._saved_position} of {self._num_samples} samples"
            )
        for path in (self._paths.partial, self._paths.journal):
            path.unlink(missing_ok=True)
        return ""
