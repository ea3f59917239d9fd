"""What processes and threads have used, as the kernel counts it.

::

    /proc/<pid>/stat               user and system time in ticks, page faults: of all threads, ended ones too
    /proc/<pid>/task/*/schedstat   time on a core and waiting for one in nanoseconds: of each thread that lives
    /proc/<pid>/io                 bytes asked for, bytes from storage: ended threads too, and ended children

Time on a core is the larger of the two counts: the second is finer, the first remembers threads that ended. It is
divided into user and system in the proportion of the ticks. Of the calling thread, and of this process, `getrusage`
tells both to the microsecond. Where there is no /proc, psutil tells what it can.
"""

from __future__ import annotations

import importlib
import os
import resource
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from lightning_gpufeed.diagnose.counters import Usage

__all__ = ["UsageWatch", "read_process", "read_thread"]

_PROC = "/proc"
_NANOSECONDS = 1_000_000_000
_TICK_NANOSECONDS = _NANOSECONDS // os.sysconf("SC_CLK_TCK")
_MOST_BYTES = 2048
"""Longer than any of the files: a number has 20 digits at most, and /proc/<pid>/stat has 52 of them."""


class _Counts(NamedTuple):
    """Whole numbers, so that sums of many differences lose nothing; None where the kernel does not say."""

    wall_ns: int = 0
    core_ns: int = 0
    user_ns: int = 0
    system_ns: int = 0
    queue_ns: int | None = 0
    major_faults: int | None = 0
    minor_faults: int | None = 0
    read_bytes: int | None = 0
    disk_bytes: int | None = 0


class _Snapshot(NamedTuple):
    """A process or a thread at one moment.

    Attributes:
        start: When it began; tells it from a later one of the same number.
        counts: Since its beginning.
        reaped: Changes when a child of the process has ended and was waited for.
        queues: Thread -> nanoseconds it waited for a core.
        thread_io: Thread -> bytes asked for, bytes from storage; empty where not needed.
    """

    start: float
    counts: _Counts
    reaped: tuple[int, ...] = ()
    queues: dict[str, int] = {}  # noqa: RUF012 - of a tuple, and never written to
    thread_io: dict[str, tuple[int, int]] = {}  # noqa: RUF012


class _Stat(NamedTuple):
    """The fields of /proc/<pid>/stat that count."""

    state: bytes
    minor_faults: int
    major_faults: int
    user_ns: int
    system_ns: int
    start: int
    reaped: tuple[int, ...]


def read_process(pid: int) -> Usage | None:
    """What a process, all its threads together, has used since it began.

    The difference of two is what it used in between, up to a tick (10 ms) of its division into user and system time;
    for sums of many small differences there is `UsageWatch`. `wall_seconds` is the time of a clock that never goes
    back.

    Args:
        pid: Any process; of another user's, and of one that changed its user, the bytes are not told.

    Returns:
        None if it has ended or may not be looked at. What alone is not told is None within.
    """
    snapshot = _process_snapshot(pid)
    return None if snapshot is None else _usage_of(snapshot.counts)


def read_thread(thread_id: int) -> Usage | None:
    """What one thread of this process has used since it began; of the calling thread, to the microsecond.

    Args:
        thread_id: As `threading.get_native_id()` gives it.

    Returns:
        None if it has ended, or where there is no /proc.
    """
    snapshot = _thread_snapshot(thread_id)
    return None if snapshot is None else _usage_of(snapshot.counts)


class UsageWatch:
    """Adds up what a changing set of readers uses between one look and the next.

    The first look at a reader says where it stands; what it used before does not count. Of a reader that ends, what
    it used after the last look is lost, so look once more before workers are ended. A number that was given to another
    process or thread meanwhile is noticed by the time it began. Not to be used from two threads at once.

    What children of a process read counts for it once they ended and it waited for them, as the kernel has it; not
    for the process that looks, whose children are the workers.

    Example:
        >>> watch = UsageWatch()
        >>> watch.sample([os.getpid()])
        >>> watch.sample([os.getpid()])
        >>> watch.usage.wall_seconds > 0
        True
    """

    def __init__(self, *, minus_threads: bool = False) -> None:
        """Begin with nothing.

        Args:
            minus_threads: What threads use is taken off what processes use, instead of being added: with this process
                and its reading threads, what the training itself uses. The time watched is that of the processes.
        """
        self._minus_threads = minus_threads
        self._processes: dict[int, _Snapshot] = {}
        self._threads: dict[int, _Snapshot] = {}
        self._num_hidden = 0
        self._of_processes = self._of_threads = _Counts()

    def sample(self, processes: Collection[int], threads: Collection[int] = ()) -> None:
        """Look at all readers, some tens of microseconds each.

        Args:
            processes: Of these, all threads count. One that is left out is forgotten.
            threads: Threads of this process, by their native numbers.
        """
        before_processes, self._processes = self._processes, _found(processes, _process_snapshot)
        before_threads, self._threads = self._threads, _found(threads, _thread_snapshot)
        self._of_processes = _advanced(self._of_processes, before_processes, self._processes)
        self._of_threads = _advanced(self._of_threads, before_threads, self._threads)
        hidden = sum(_is_hidden_process(pid) for pid in set(processes) - self._processes.keys())
        if set(threads) - self._threads.keys() and not os.path.isdir(f"{_PROC}/self/task"):
            hidden += len(set(threads))
        self._num_hidden = hidden

    @property
    def usage(self) -> Usage:
        """What was used so far."""
        if self._minus_threads:
            return _usage_of(_combined(self._of_processes, self._of_threads._replace(wall_ns=0), -1))
        return _usage_of(_combined(self._of_processes, self._of_threads))

    @property
    def num_seen(self) -> int:
        """Readers that the latest look could read."""
        return len(self._processes) + len(self._threads)

    @property
    def num_hidden(self) -> int:
        """Readers that exist, and that the latest look could not read."""
        return self._num_hidden

    def pause(self) -> None:
        """Forget where the readers stand, not what they used: the time until the next look does not count."""
        self._processes, self._threads = {}, {}

    def reset(self) -> None:
        """Forget what was used so far, not where the readers stand."""
        self._of_processes = self._of_threads = _Counts()


def _found(numbers: Iterable[int], look: Callable[[int], _Snapshot | None]) -> dict[int, _Snapshot]:
    """Those that could be read."""
    snapshots = {number: look(number) for number in set(numbers)}
    return {number: snapshot for number, snapshot in snapshots.items() if snapshot is not None}


def _advanced(counts: _Counts, before: dict[int, _Snapshot], after: dict[int, _Snapshot]) -> _Counts:
    """Add what the readers of both looks used in between."""
    for number, snapshot in after.items():
        earlier = before.get(number)
        if earlier is not None and earlier.start == snapshot.start:
            counts = _combined(counts, _between(earlier, snapshot))
    return counts


def _between(before: _Snapshot, after: _Snapshot) -> _Counts:
    """What one reader used between two looks."""
    counts = _combined(after.counts, before.counts, -1)
    if counts.queue_ns is not None:
        # The waiting of a thread that ended has gone from the sum; of one that began, all of it is new.
        waited = (max(0, ns - before.queues.get(thread, 0)) for thread, ns in after.queues.items())
        counts = counts._replace(queue_ns=sum(waited))
    if after.reaped != before.reaped and after.thread_io:
        # All that an ended child had read was added to the process at once: the threads' own counts are free of that.
        known = [(new, before.thread_io.get(thread, (0, 0))) for thread, new in after.thread_io.items()]
        read = sum(max(0, new[0] - old[0]) for new, old in known)
        disk = sum(max(0, new[1] - old[1]) for new, old in known)
        counts = counts._replace(read_bytes=read, disk_bytes=disk)
    return counts


def _combined(one: _Counts, other: _Counts, sign: int = 1) -> _Counts:
    """Sum or difference; what is unknown of one is unknown of both."""
    pairs = zip(one, other, strict=True)
    return _Counts._make(None if a is None or b is None else a + sign * b for a, b in pairs)


def _usage_of(counts: _Counts) -> Usage:
    """In the units of a verdict; differences of counts that were read one after another may be just below zero."""
    counts = _Counts._make(None if count is None else max(0, count) for count in counts)
    core_seconds = counts.core_ns / _NANOSECONDS
    divided = counts.user_ns + counts.system_ns
    user_seconds = core_seconds * counts.user_ns / divided if divided else core_seconds
    return Usage(
        wall_seconds=counts.wall_ns / _NANOSECONDS,
        user_seconds=user_seconds,
        system_seconds=max(0.0, core_seconds - user_seconds),
        queue_seconds=None if counts.queue_ns is None else counts.queue_ns / _NANOSECONDS,
        major_faults=counts.major_faults,
        minor_faults=counts.minor_faults,
        read_bytes=counts.read_bytes,
        disk_bytes=counts.disk_bytes,
    )


def _process_snapshot(pid: int) -> _Snapshot | None:
    folder = f"{_PROC}/{pid}"
    try:
        names = os.listdir(f"{folder}/task")
    except OSError:
        names = []
        if not os.path.isdir(f"{_PROC}/self"):
            return _snapshot_by_psutil(pid)
    is_own = pid == os.getpid()
    threads = {name: f"{folder}/task/{name}" for name in names}
    return _snapshot(folder, threads, resource.RUSAGE_SELF if is_own else None, has_thread_io=is_own)


def _thread_snapshot(thread_id: int) -> _Snapshot | None:
    folder = f"{_PROC}/self/task/{thread_id}"
    who = getattr(resource, "RUSAGE_THREAD", None) if thread_id == threading.get_native_id() else None
    return _snapshot(folder, {str(thread_id): folder}, who)


def _snapshot(
    folder: str, threads: dict[str, str], who: int | None, *, has_thread_io: bool = False
) -> _Snapshot | None:
    """What the files of a process, or of a thread, say; None once it has ended."""
    schedules = {name: _parse_schedstat(_read(f"{path}/schedstat")) for name, path in threads.items()}
    known = {name: schedule for name, schedule in schedules.items() if schedule is not None}
    thread_io = {}
    if has_thread_io:
        each = {name: _parse_io(_read(f"{path}/io")) for name, path in threads.items()}
        thread_io = {name: io for name, io in each.items() if io is not None}
    read_bytes, disk_bytes = _parse_io(_read(f"{folder}/io")) or (None, None)
    # The last one: if it is there, what was missing before is kept back, and has not gone.
    stat = _parse_stat(_read(f"{folder}/stat"))
    if stat is None or stat.state in (b"Z", b"X"):
        return None
    user_ns, system_ns = (stat.user_ns, stat.system_ns) if who is None else _own_times(who)
    # A kernel that keeps no such statistics may have the file all the same, with zeros in it.
    is_counted = bool(known) and (stat.user_ns + stat.system_ns == 0 or any(count for _, _, count in known.values()))
    counts = _Counts(
        wall_ns=time.monotonic_ns(),
        core_ns=max(user_ns + system_ns, sum(core_ns for core_ns, _, _ in known.values())),
        user_ns=user_ns,
        system_ns=system_ns,
        queue_ns=sum(queue_ns for _, queue_ns, _ in known.values()) if is_counted else None,
        major_faults=stat.major_faults,
        minor_faults=stat.minor_faults,
        read_bytes=read_bytes,
        disk_bytes=disk_bytes,
    )
    queues = {name: queue_ns for name, (_, queue_ns, _) in known.items()}
    return _Snapshot(stat.start, counts, stat.reaped, queues, thread_io)


def _own_times(who: int) -> tuple[int, int]:
    """User and system time of this process or of the calling thread, in nanoseconds."""
    time.thread_time_ns()  # the kernel adds up what ran since its last tick for this clock, not for `getrusage`
    usage = resource.getrusage(who)
    return round(usage.ru_utime * _NANOSECONDS), round(usage.ru_stime * _NANOSECONDS)


def _snapshot_by_psutil(pid: int) -> _Snapshot | None:
    """What psutil says of a process, on a system without /proc."""
    try:
        psutil: Any = importlib.import_module("psutil")
    except ImportError:
        return None
    try:
        process = psutil.Process(pid)
        times, start = process.cpu_times(), process.create_time()
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
    except (psutil.Error, OSError, ValueError):
        return None
    try:
        io = process.io_counters()
    except (AttributeError, psutil.Error, OSError):  # not on this system, or not for us
        io = None
    # Only where it tells bytes asked for apart from bytes of storage is it known which of them the others are.
    read_bytes = getattr(io, "read_chars", None)
    counts = _Counts(
        wall_ns=time.monotonic_ns(),
        core_ns=round((times.user + times.system) * _NANOSECONDS),
        user_ns=round(times.user * _NANOSECONDS),
        system_ns=round(times.system * _NANOSECONDS),
        queue_ns=None,
        major_faults=None,
        minor_faults=None,
        read_bytes=read_bytes,
        disk_bytes=None if read_bytes is None else getattr(io, "read_bytes", None),
    )
    return _Snapshot(start, counts)


def _is_hidden_process(pid: int) -> bool:
    """Whether a process that was not read is there, and kept back."""
    try:
        os.kill(pid, 0)  # asks, and does nothing
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    # One that has ended, and is only kept for its parent to ask how, can be read.
    return _read(f"{_PROC}/{pid}/stat") is None


def _read(path: str) -> bytes | None:
    """A file of the kernel in one piece; None if it is not there, or not for us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _MOST_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _parse_stat(text: bytes | None) -> _Stat | None:
    """/proc/<pid>/stat. The name of the program comes second, in parentheses, and may hold spaces and parentheses."""
    if text is None:
        return None
    fields = text[text.rfind(b")") + 1 :].split()
    try:
        minor, minor_reaped, major, major_reaped, user, system, user_reaped, system_reaped = map(int, fields[7:15])
        start = int(fields[19])
    except (ValueError, IndexError):
        return None
    reaped = (minor_reaped, major_reaped, user_reaped, system_reaped)
    return _Stat(fields[0], minor, major, user * _TICK_NANOSECONDS, system * _TICK_NANOSECONDS, start, reaped)


def _parse_schedstat(text: bytes | None) -> tuple[int, int, int] | None:
    """/proc/<pid>/task/<tid>/schedstat: nanoseconds on a core and waiting for one, how often it was put on one."""
    try:
        core_ns, queue_ns, num_slices = map(int, (text or b"").split()[:3])
    except ValueError:
        return None
    return core_ns, queue_ns, num_slices


def _parse_io(text: bytes | None) -> tuple[int, int] | None:
    """/proc/<pid>/io: bytes asked for by read calls, bytes fetched from storage."""
    values = dict(line.split(b":", 1) for line in (text or b"").splitlines() if b":" in line)
    try:
        return int(values[b"rchar"]), int(values[b"read_bytes"])
    except (KeyError, ValueError):
        return None
