"""What `examine` looks at in a file as a file: is it there, whole, locked, and where does it lie."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
from pathlib import Path

import h5py

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import open_file
from lightning_gpufeed.hdf5.doctor.findings import Finding, Severity
from lightning_gpufeed.hdf5.file_system import file_system_name, is_network
from lightning_gpufeed.hdf5.journal import OutputPaths
from lightning_gpufeed.hdf5.repack.output import log_path_of
from lightning_gpufeed.hdf5.report import bytes_text

__all__ = [
    "disk_finding",
    "file_system_finding",
    "leftover_findings",
    "lock_finding",
    "memory_bytes",
    "memory_finding",
    "open_failure",
    "programs_that_write",
]

# HDF5's headers of an empty file: what is left of a writer that was killed before it flushed.
_STUB_BYTES = 2048
# Room that the rest of the system and a training take beside the page cache.
_CACHE_SHARE = 0.8

Writers = dict[tuple[int, int], list[str]]


def programs_that_write() -> Writers:
    """Find the files that processes have open for writing, as far as we may look.

    Returns:
        (device, inode) -> programs, such as `python (pid 12)`.
    """
    found: Writers = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text().strip()
            for number in os.listdir(process / "fd"):
                _note_writer(process, number, name, found)
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return found


def _note_writer(process: Path, number: str, name: str, found: Writers) -> None:
    """Note an open file if it is open for writing."""
    try:
        flags = next(
            int(line.split()[1], 8)
            for line in (process / "fdinfo" / number).read_text().splitlines()
            if line.startswith("flags:")
        )
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return
        status = os.stat(process / "fd" / number)
    except (OSError, StopIteration):
        return
    programs = found.setdefault((status.st_dev, status.st_ino), [])
    if (text := f"{name} (pid {process.name})") not in programs:
        programs.append(text)


def _who_writes(path: str, writers: Writers) -> str:
    """The programs that have a file open for writing, in words; empty if none is known."""
    status = os.stat(path)
    return ", ".join(writers.get((status.st_dev, status.st_ino), []))


def open_failure(path: str, writers: Writers) -> Finding | None:
    """Try to open a file.

    Args:
        path: Any path.
        writers: From `programs_that_write`.

    Returns:
        Why it cannot be used; None if it can be opened.
    """
    if os.path.islink(path) and not os.path.exists(path):
        seen = f"a link to {os.readlink(path)}, which is not there"
        return Finding(Severity.PROBLEM, "file", seen, "There is nothing to read.", f"ls -l {shlex.quote(path)}")
    if os.path.isdir(path):
        why, cure = "What lies in it was not looked at.", f"chmod u+rx {shlex.quote(path)}"
        return Finding(Severity.PROBLEM, "file", "a folder that may not be listed", why, cure)
    if not os.path.isfile(path):
        why = "HDF5 needs a file that it can read at any place."
        return Finding(Severity.PROBLEM, "file", "a pipe, socket or device", why, f"cp {shlex.quote(path)} FILE.h5")
    if not os.access(path, os.R_OK):
        mode = f"{os.stat(path).st_mode & 0o777:o}"
        cure = f"chmod u+r {shlex.quote(path)}"
        return Finding(Severity.PROBLEM, "file", f"it may not be read (mode {mode})", "Opening it fails.", cure)
    try:
        with open_file(path):
            return None
    except (LayoutError, OSError) as error:
        return _why_not_hdf5(path, str(error), writers)


def _why_not_hdf5(path: str, text: str, writers: Writers) -> Finding:
    """Judge a file that HDF5 does not open."""
    size, name = os.path.getsize(path), shlex.quote(path)
    if size == 0:
        cure = "write or copy it again"
        return Finding(Severity.PROBLEM, "file", "it is empty: 0 bytes", "A copy or a writer was cut short.", cure)
    if who := _who_writes(path, writers):
        seen = f"{who} has it open for writing"
        return Finding(Severity.PROBLEM, "locking", seen, "Half of what is read may be old.", "close it there first")
    if "lock" in text and "open for writing" in text:
        seen = "another program has it open for writing and holds its lock"
        return Finding(Severity.PROBLEM, "locking", seen, "Opening it fails with errno 11.", f"fuser -v {name}")
    if "marked as open for writing" in text:
        why = "Its writer ended without closing it; what was flushed is there."
        return Finding(Severity.PROBLEM, "file", "marked as open for writing", why, f"h5clear -s {name}")
    is_hdf5 = h5py.is_hdf5(path)
    if is_hdf5 and size <= _STUB_BYTES:
        why = "Its writer was killed before it flushed, and HDF5 had kept everything in memory."
        cure = "write it again; flush() now and then, or gpufeed pack, which a kill cannot break"
        return Finding(Severity.PROBLEM, "file", f"only a header: {size} bytes", why, cure)
    if "truncated" in text:
        seen = f"truncated: {size:,} bytes, and its header announces more"
        return Finding(Severity.PROBLEM, "file", seen, "The end of the data is missing.", "copy or write it again")
    if is_hdf5:
        seen, cure = text.removeprefix(f"{path}: "), "copy or write it again"
        return Finding(Severity.PROBLEM, "file", seen, "Its headers are damaged.", cure)
    with open(path, "rb") as raw:
        head = raw.read(8)
    seen = f"no HDF5 file: {size:,} bytes, beginning with {head!r}"
    return Finding(Severity.PROBLEM, "file", seen, "No loader can open it.", "gpufeed pack SOURCE OUT.h5")


def leftover_findings(path: str) -> list[Finding]:
    """Look for what an interrupted `pack` or `repack` left beside a file.

    Args:
        path: The file.

    Returns:
        Findings, empty if there is nothing.
    """
    if path.endswith(".partial"):
        seen, why = "the unfinished output of gpufeed pack or repack", "Rows are missing in it."
        return [Finding(Severity.WARNING, "unfinished", seen, why, "run the same command again, which goes on")]
    paths = OutputPaths.of(path)
    left = [file for file in (paths.partial, log_path_of(paths)) if file.exists()]
    if not left:
        return []
    if _is_locked(paths.lock):
        seen = f"{left[0].name} beside it is being written right now"
        return [Finding(Severity.NOTICE, "unfinished", seen, "A new version of the file is on its way.", "wait for it")]
    seen = f"{left[0].name} beside it, {bytes_text(left[0].stat().st_size)}: of a pack or repack that was interrupted"
    cure = f"run the same command again, which goes on; or: rm {shlex.quote(str(paths.partial))}*"
    return [Finding(Severity.WARNING, "unfinished", seen, "It takes room, and the file may be the old one.", cure)]


def _is_locked(path: Path) -> bool:
    """Whether a process holds a lock; only looks, and waits for nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def lock_finding(path: str, writers: Writers) -> Finding:
    """Try the kind of lock that HDF5 takes.

    Args:
        path: A file that can be opened.
        writers: From `programs_that_write`.

    Returns:
        The finding.
    """
    if who := _who_writes(path, writers):
        return Finding(
            Severity.PROBLEM,
            "locking",
            f"{who} has it open for writing",
            "What is read while it is being written may be half old and half new.",
            "close it there first",
        )
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Finding(
            Severity.PROBLEM,
            "locking",
            "another program holds its lock, as one that writes does",
            "h5py fails with errno 11 (resource temporarily unavailable), or reads what is half written.",
            f"fuser -v {shlex.quote(path)}",
        )
    except OSError as error:
        return _no_locks(error)
    finally:
        os.close(descriptor)
    return Finding(Severity.OK, "locking", "locks work where it lies, and nobody has it open for writing")


def _no_locks(error: OSError) -> Finding:
    """A file system that has no locks, or whose lock service is down."""
    name = errno.errorcode.get(error.errno or 0, "?")
    return Finding(
        Severity.WARNING,
        "locking",
        f"the file system refuses locks ({name}: {error.strerror})",
        "h5py fails with errno 37 (unable to lock file) unless told to go on without; this package goes on.",
        "export HDF5_USE_FILE_LOCKING=BEST_EFFORT",
    )


def file_system_finding(path: str) -> Finding | None:
    """Look at where a file lies.

    Args:
        path: The file.

    Returns:
        The finding.
    """
    name = file_system_name(path)
    if not is_network(path):
        return Finding(Severity.OK, "file system", f"{name}, on this machine")
    return Finding(
        Severity.NOTICE,
        "file system",
        f"{name}, reached through the network or another program",
        "Each random read is a round trip, and a file that is cut short there kills a process that has it mapped.",
        f"cp {shlex.quote(path)} LOCAL_DISK/",
    )


def memory_bytes() -> int:
    """Memory that the files of this process may fill: that of the machine, or of its control group.

    Returns:
        Bytes.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = [line.split("::", 1)[1].lstrip("/") for line in lines if line.startswith("0::")]
    folders = [folder for name in own for folder in ((root / name), *(root / name).parents)]
    files = [folder / "memory.max" for folder in folders if folder.is_relative_to(root)]
    for file in [*files, root / "memory" / "memory.limit_in_bytes"]:
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(limits)


def memory_finding(size_bytes: int, available_bytes: int) -> Finding:
    """Compare a file with the memory that can cache it.

    Args:
        size_bytes: Size of the file.
        available_bytes: From `memory_bytes`.

    Returns:
        The finding.
    """
    sizes = f"{bytes_text(size_bytes)}, {bytes_text(available_bytes)} of memory"
    if size_bytes <= _CACHE_SHARE * available_bytes:
        return Finding(Severity.OK, "memory", f"{sizes}: it fits, so later epochs need no disk")
    return Finding(
        Severity.NOTICE,
        "memory",
        f"{sizes}: it does not fit",
        "Every epoch reads it from the disk again, in an order that suits no disk.",
        'H5DataModule(FILE, shuffle="window"), or smaller samples: gpufeed pack SOURCE OUT.h5 --resize P',
    )


def disk_finding(path: str) -> Finding:
    """See whether a second copy of a file has room beside it.

    Args:
        path: The file.

    Returns:
        The finding.
    """
    needed, free = os.path.getsize(path), shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
    sizes = f"a copy takes up to {bytes_text(needed)}, {bytes_text(free)} are free"
    if needed <= free:
        return Finding(Severity.OK, "disk", sizes)
    cure = f"gpufeed repack {shlex.quote(path)} OTHER_DISK/OUT.h5"
    return Finding(Severity.NOTICE, "disk", sizes, "Repacking needs room for both files at once.", cure)
