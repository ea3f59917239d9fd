"""Limits and pressure, read from files as they lie in /proc and /sys, and from those of this machine."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.diagnose import machine
from lightning_gpufeed.diagnose.machine import Pressure, PressureWatch, memory_limit_bytes, num_cores

GIB = 2**30
AFFINITY = len(os.sched_getaffinity(0))
UNLIMITED_V1 = "9223372036854771712\n"
"""What version 1 writes where nothing is limited: the largest number of bytes in whole pages."""


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(root: Path, path: str = "/job/step") -> Path:
    """A machine with control groups of version 2 and this process in one of them; gives the folder of the tree."""
    write(root, "proc/self/cgroup", f"0::{path}\n")
    write(root, "sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    (root / "sys/fs/cgroup" / path.strip("/")).mkdir(parents=True, exist_ok=True)
    return root / "sys/fs/cgroup"


def v1(root: Path, path: str = "/job") -> Path:
    """The same with version 1, as it is mounted by most systems."""
    write(root, "proc/self/cgroup", f"7:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:/other\n")
    for name in ("memory", "cpu,cpuacct"):
        (root / "sys/fs/cgroup" / name / path.strip("/")).mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu").symlink_to("cpu,cpuacct")
    return root / "sys/fs/cgroup"


# Cores ---------------------------------------------------------------------------------------------------


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert num_cores(tmp_path) == AFFINITY


def test_a_narrower_affinity_is_seen() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert num_cores() <= 1
    finally:
        os.sched_setaffinity(0, before)


def test_of_this_machine_there_is_something_and_not_more_than_it_has() -> None:
    assert 0 < num_cores() <= AFFINITY


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [
        ("50000 100000", "max 100000", 0.5),
        ("max 100000", "25000 100000", 0.25),
        ("75000 100000", "25000 100000", 0.25),
        ("max 100000", "max 100000", AFFINITY),
        ("1000000000 100000", "max", AFFINITY),
    ],
)
def test_the_narrowest_quota_of_all_groups_above_counts(tmp_path: Path, own: str, above: str, expected: float) -> None:
    tree = v2(tmp_path)
    write(tree, "job/step/cpu.max", own + "\n")
    write(tree, "job/cpu.max", above + "\n")
    write(tree, "other/cpu.max", "1000 100000\n")  # of another job
    assert num_cores(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", AFFINITY), ("50000", 0.5), ("nonsense", AFFINITY)])
def test_quotas_of_version_1_count(tmp_path: Path, quota: str, expected: float) -> None:
    tree = v1(tmp_path)
    write(tree, "cpu,cpuacct/job/cpu.cfs_quota_us", quota + "\n")
    write(tree, "cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    write(tree, "cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write(tree, "cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert num_cores(tmp_path) == expected


def test_a_quota_of_version_1_is_found_without_the_usual_link(tmp_path: Path) -> None:
    tree = v1(tmp_path)
    (tree / "cpu").unlink()
    write(tree, "cpu,cpuacct/job/cpu.cfs_quota_us", "30000\n")
    write(tree, "cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    assert num_cores(tmp_path) == 0.3


@pytest.mark.parametrize("path", ["/docker/0123", "/../../outside", "/"])
def test_in_a_container_the_top_that_it_sees_is_its_own_group(tmp_path: Path, path: str) -> None:
    write(tmp_path, "proc/self/cgroup", f"0::{path}\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "40000 100000\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{GIB}\n")
    write(tmp_path, "sys/fs/cpu.max", "10000 100000\n")  # beside the tree
    write(tmp_path, "sys/outside/cpu.max", "10000 100000\n")
    assert num_cores(tmp_path) == 0.4
    assert memory_limit_bytes(tmp_path) == GIB


def test_with_both_versions_in_use_each_is_looked_up_in_its_place(tmp_path: Path) -> None:
    tree = v1(tmp_path)
    write(tmp_path, "proc/self/cgroup", "7:memory:/job\n4:cpu:/job\n0::/scope\n")
    write(tree, "unified/scope/cpu.max", "60000 100000\n")
    write(tree, "cpu,cpuacct/job/cpu.cfs_quota_us", "50000\n")
    write(tree, "cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    assert num_cores(tmp_path) == 0.5
    write(tree, "unified/scope/cpu.max", "40000 100000\n")
    assert num_cores(tmp_path) == 0.4


# Memory --------------------------------------------------------------------------------------------------


def test_the_narrowest_memory_limit_counts_and_else_what_the_machine_has(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path) is None
    write(tmp_path, "proc/meminfo", f"MemFree: 5 kB\nMemTotal:   {8 * GIB // 1024} kB\nSwapTotal: 3 kB\n")
    assert memory_limit_bytes(tmp_path) == 8 * GIB
    tree = v2(tmp_path)
    write(tree, "job/step/memory.max", "max\n")
    assert memory_limit_bytes(tmp_path) == 8 * GIB
    write(tree, "job/memory.max", f"{3 * GIB}\n")
    assert memory_limit_bytes(tmp_path) == 3 * GIB
    write(tree, "job/step/memory.max", f"{2 * GIB}\n")
    assert memory_limit_bytes(tmp_path) == 2 * GIB


def test_memory_limits_of_version_1_count(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {8 * GIB // 1024} kB\n")
    tree = v1(tmp_path)
    write(tree, "memory/job/memory.limit_in_bytes", UNLIMITED_V1)
    write(tree, "memory/memory.limit_in_bytes", UNLIMITED_V1)
    assert memory_limit_bytes(tmp_path) == 8 * GIB
    write(tree, "memory/job/memory.limit_in_bytes", f"{GIB}\n")
    assert memory_limit_bytes(tmp_path) == GIB


def test_this_machine_has_memory() -> None:
    limit = memory_limit_bytes()
    assert limit is not None
    assert 0 < limit <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Pressure ------------------------------------------------------------------------------------------------


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(machine, "time", clock)
    return clock


def stalled(microseconds: int) -> str:
    """A file of the kernel; the second line is about times when all tasks were stalled, not some."""
    averages = "avg10=1.00 avg60=2.00 avg300=3.00"
    return f"some {averages} total={microseconds}\nfull {averages} total=77\n"


def test_pressure_is_the_share_of_the_time_since_the_beginning(tmp_path: Path, clock: Clock) -> None:
    watch = PressureWatch(tmp_path)
    assert watch.shares() == Pressure(None, None, None)
    write(tmp_path, "proc/pressure/cpu", stalled(5_000_000))
    write(tmp_path, "proc/pressure/io", stalled(0))
    watch.begin()
    clock.now += 10
    write(tmp_path, "proc/pressure/cpu", stalled(7_500_000))
    assert watch.shares() == Pressure(0.25, 0.0, None)
    watch.begin()
    clock.now += 1
    assert watch.shares() == Pressure(0.0, 0.0, None)


def test_the_pressure_on_the_own_group_is_preferred_to_that_on_the_machine(tmp_path: Path, clock: Clock) -> None:
    tree = v2(tmp_path)
    before = {"proc/pressure/cpu": 0, "proc/pressure/io": 0, "proc/pressure/memory": 0}
    of_group = {tree / "job/step/cpu.pressure": 0, tree / "job/io.pressure": 0}
    for name, total in {**before, **of_group}.items():
        write(tmp_path, str(name), stalled(total))
    watch = PressureWatch(tmp_path)
    watch.begin()
    clock.now += 1
    for number, name in enumerate([*before, *of_group], start=1):
        write(tmp_path, str(name), stalled(number * 100_000))
    # That of the group above is about others too.
    assert watch.shares() == pytest.approx((0.4, 0.2, 0.3))


def test_pressure_that_the_kernel_does_not_tell_is_unknown(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "proc/pressure/cpu", "some avg10=0.00\n")
    write(tmp_path, "proc/pressure/memory", stalled(0))
    (tmp_path / "proc/pressure/io").mkdir()  # there, and nothing to read
    watch = PressureWatch(tmp_path)
    watch.begin()
    (tmp_path / "proc/pressure/memory").unlink()
    clock.now += 1
    assert watch.shares() == Pressure(None, None, None)


def test_this_machine_tells_its_pressure_or_nothing() -> None:
    watch = PressureWatch()
    watch.begin()
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        sum(range(1000))
    for name, share in watch.shares()._asdict().items():
        assert share is None or 0 <= share <= 1
        if share is not None:
            continue
        path = Path("/proc/pressure") / name
        # Only where the kernel has no such file, or does not give its content.
        with pytest.raises(OSError, match=r"\[Errno "):
            path.read_text()


# Any content ---------------------------------------------------------------------------------------------

TEXT = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(["max", "-1", "0", "1", "100000", "some", "total=", "total=5", "\n", ":"])).map(" ".join),
)


@given(groups=TEXT, text=TEXT)
def test_files_of_any_content_make_nothing_fail(groups: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root, "proc/self/cgroup", f"0::/\n4:cpu:/\n5:memory:/\n{groups}\n")
        for name in ("cpu.max", "memory.max", "cpu.pressure", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):
            write(root, f"sys/fs/cgroup/{name}", text)
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", text)
        write(root, "proc/meminfo", text)
        assert 0 < num_cores(root) <= AFFINITY
        limit = memory_limit_bytes(root)
        assert limit is None or limit >= 0
        watch = PressureWatch(root)
        watch.begin()
        assert all(share is None or 0 <= share <= 1 for share in watch.shares())


@given(quota=st.integers(1000, 10**8), period=st.integers(1000, 10**6))
def test_a_quota_is_cores(quota: int, period: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = v2(Path(folder), "/")
        write(tree, "cpu.max", f"{quota} {period}\n")
        assert num_cores(Path(folder)) == pytest.approx(min(AFFINITY, quota / period))
