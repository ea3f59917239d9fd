"""What this process may use of the machine, and how crowded it is.

::

                    control group, version 2        version 1                   the machine
    cores           cpu.max                         cpu.cfs_quota_us / period   affinity of the process
    memory          memory.max                      memory.limit_in_bytes       /proc/meminfo
    pressure        cpu.pressure, io.pressure ...   -                           /proc/pressure/

A limit may stand at the group of the process or at any group above it; the narrowest one counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Pressure", "PressureWatch", "allowed_cores", "memory_limit_bytes", "num_cores"]

_SYSTEM = Path("/")
_RESOURCES = ("cpu", "io", "memory")


def allowed_cores() -> tuple[int, ...]:
    """The cores that this process may be put on.

    Returns:
        Their numbers; processes that share them have the same ones.
    """
    # Not on every system.
    affinity = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(affinity(0))) if affinity is not None else tuple(range(os.cpu_count() or 1))


def num_cores(root: Path = _SYSTEM) -> float:
    """Cores that this process may keep busy, by its affinity and the quota of its control group.

    Args:
        root: Below which /proc and /sys lie.

    Returns:
        More than 0; a fraction where a quota is one.
    """
    count = len(allowed_cores())
    quotas = [_quota(_words(folder / "cpu.max")) for folder in _groups(root, "")]
    for folder in _groups(root, "cpu"):
        quotas.append(_quota(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")))
    return min([float(count), *(quota for quota in quotas if quota is not None)])


def memory_limit_bytes(root: Path = _SYSTEM) -> int | None:
    """Memory that this process may have, by its control group and what the machine has.

    Args:
        root: Below which /proc and /sys lie.

    Returns:
        The bytes; None where nothing says.
    """
    limits = [_limit(_words(folder / "memory.max")) for folder in _groups(root, "")]
    limits += [_limit(_words(folder / "memory.limit_in_bytes")) for folder in _groups(root, "memory")]
    # Version 1 writes a number larger than any memory for "no limit": what the machine has is less.
    limits.append(_total_memory(root))
    return min((limit for limit in limits if limit is not None), default=None)


class Pressure(NamedTuple):
    """Shares of the time that at least one task had to wait for a resource, 0 to 1; None if unknown.

    Attributes:
        cpu: For a core.
        io: For storage.
        memory: For memory: pages to be freed, or read back from swap.
    """

    cpu: float | None = None
    io: float | None = None
    memory: float | None = None


class PressureWatch:
    """How long tasks waited for a resource since a moment, by the kernel's pressure-stall information.

    Of the control group of this process if it has such counts, and otherwise of the machine; a kernel may have none.

    Example:
        >>> watch = PressureWatch()
        >>> watch.begin()
        >>> shares = watch.shares()
        >>> shares.cpu is None or 0 <= shares.cpu <= 1
        True
    """

    def __init__(self, root: Path = _SYSTEM) -> None:
        """Nothing is counted before `begin`.

        Args:
            root: Below which /proc and /sys lie.
        """
        self._root = root
        self._begin = 0.0
        self._totals: dict[str, tuple[Path, int]] = {}

    def begin(self) -> None:
        """Count from now on."""
        group = next(iter(_groups(self._root, "")), None)
        self._totals = {}
        for name in _RESOURCES:
            # The group of the process alone: one further up holds what this process has no part in.
            paths = [group / f"{name}.pressure"] if group is not None else []
            for path in [*paths, self._root / "proc/pressure" / name]:
                total = _stalled_microseconds(_text(path))
                if total is not None:
                    self._totals[name] = path, total
                    break
        self._begin = time.monotonic()

    def shares(self) -> Pressure:
        """The shares since `begin`.

        Returns:
            All None before it.
        """
        elapsed = time.monotonic() - self._begin
        shares: dict[str, float] = {}
        for name, (path, before) in self._totals.items():
            after = _stalled_microseconds(_text(path))
            if after is not None and elapsed > 0:
                shares[name] = min(1.0, max(0.0, (after - before) / 1e6 / elapsed))
        return Pressure(**shares)


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of the control group of this process and of those above it, the own one first.

    Args:
        root: Below which /proc and /sys lie.
        controller: Of version 1; empty for version 2.

    Returns:
        Those that are there. In a container whose view of the groups is cut off, this is its own one, at the top.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller not in controllers.split(","):
            continue
        # Where both versions are in use, the second one has a folder of its own.
        tops = [mounts / controller, mounts / controllers] if controller else [mounts / "unified", mounts]
        top = next((top for top in tops if top.is_dir()), None)
        if top is None:
            continue
        # A process outside of the part of the tree that it sees has a path that begins with `..`.
        names = [name for name in path.split("/") if name not in ("", "..")]
        folders = [top.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]
        return [folder for folder in folders if folder.is_dir()]
    return []


def _quota(words: Iterable[str]) -> float | None:
    """Cores by a quota of microseconds and the period it is for; None if there is no quota."""
    try:
        quota, period = map(int, words)
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _limit(words: list[str]) -> int | None:
    """Bytes of a file that holds a number; None if it holds `max`, or is not there."""
    return int(words[0]) if words and words[0].isdecimal() else None


def _total_memory(root: Path) -> int | None:
    """Memory of the machine."""
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name == "MemTotal" and words and words[0].isdecimal():
            return int(words[0]) * 1024
    return None


def _stalled_microseconds(text: str) -> int | None:
    """The time that some task was stalled: `some avg10=0.00 avg60=0.00 avg300=0.00 total=123`."""
    for line in text.splitlines():
        kind, *fields = line.split() or [""]
        for field in fields if kind == "some" else []:
            name, _, value = field.partition("=")
            if name == "total" and value.isdecimal():
                return int(value)
    return None


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    """A file; empty if it is not there, or if the kernel does not give its content."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
