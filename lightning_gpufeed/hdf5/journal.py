"""The unfinished output of `pack`: where it lies, the journal to go on from, and the lock.

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
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.packed_file import FieldPlan, restore_structure, structure_fingerprint

__all__ = ["Journal", "OutputLock", "OutputPaths", "Stage", "check_space", "sync_folder"]


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
        final = Path(out).expanduser()
        # A link is followed: what is behind it is what is meant.
        final = Path(os.path.realpath(final)) if final.is_symlink() else final
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

    def misfit(self, partial: Path, plans: Sequence[FieldPlan], num_samples: int) -> str | None:
        """Why the file at `partial` is not the one told of here, or None; a torn structure is put back."""
        if not partial.exists():
            return "it is missing"
        if self.stage is Stage.FINISHED:
            return None if partial.stat().st_size == self.file_bytes else "its size has changed"
        if self.stage is Stage.FINISHING:
            is_restored = restore_structure(partial, plans, num_samples, self.structure)
            return None if is_restored else "it was written by another version of HDF5"
        try:
            is_same = structure_fingerprint(partial, plans) == self.structure
        except (OSError, KeyError):  # no HDF5 file, or other datasets
            is_same = False
        return None if is_same else "it has been changed"


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


def check_space(paths: OutputPaths, needed_bytes: int) -> None:
    """Refuse what cannot fit, before hours of work.

    Args:
        paths: The output; what is there of it counts.
        needed_bytes: Size of the complete file.

    Raises:
        PackError: The file system has less room.
    """
    present = paths.partial.stat().st_blocks * 512 if paths.partial.exists() else 0
    needed, free = needed_bytes - present, shutil.disk_usage(paths.final.parent).free
    if needed > free:
        raise PackError(
            f"{paths.final} needs {needed:,} bytes more, but the file system has {free:,} free; "
            "make room or choose another place"
        )


def sync_folder(folder: Path) -> None:
    """Bring names that were added, changed or removed to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
