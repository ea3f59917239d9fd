"""Local or network: asked of the real file systems of this machine, and of the table for those it does not have."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from lightning_gpufeed.hdf5 import file_system
from lightning_gpufeed.hdf5.file_system import file_system_name, is_network, is_network_name

linux = pytest.mark.skipif(sys.platform != "linux", reason="file systems are named on Linux")


def mounts() -> list[tuple[str, str]]:
    """Mount points whose directory can be looked up, with the names of their file systems, as the kernel lists them."""
    found = {}
    for line in Path("/proc/self/mounts").read_text().splitlines() if sys.platform == "linux" else ():
        _, point, name, _ = line.split(" ", 3)
        found[point.encode().decode("unicode_escape")] = name  # the last one hides those before
    return [(point, name) for point, name in found.items() if os.path.exists(point) and name != "autofs"]


@linux
def test_every_mount_of_this_machine_is_named_as_the_kernel_lists_it():
    assert mounts()
    for point, name in mounts():
        if any(other != point and os.path.realpath(point) == os.path.realpath(other) for other, _ in mounts()):
            continue
        assert file_system_name(point) == name, point


@linux
@pytest.mark.parametrize(
    ("point", "name"), [("/proc/self/status", "proc"), ("/proc", "proc"), ("/sys", "sysfs"), ("/dev/shm", "tmpfs")]
)
def test_known_places_are_local(point, name):
    if (os.path.dirname(point) if point.endswith("status") else point, name) not in mounts() and name != "proc":
        pytest.skip(f"no {name} at {point} here")
    assert (file_system_name(point), is_network(point)) == (name, False)


@linux
def test_the_number_of_statfs_and_the_list_of_mounts_agree(tmp_path):
    compared = 0
    for point, name in [(str(tmp_path), file_system_name(tmp_path)), *mounts()]:
        if file_system._LOCAL.get(name) is None:
            continue
        descriptor = os.open(point, os.O_PATH)
        try:
            by_magic = file_system._by_magic(descriptor)
        finally:
            os.close(descriptor)
        # Relatives share a number: it tells the first of them.
        assert file_system._LOCAL[by_magic] == file_system._LOCAL[file_system_name(point)], point
        compared += 1
    assert compared


@linux
def test_without_proc_the_number_of_statfs_tells(monkeypatch):
    expected = file_system_name("/dev")
    monkeypatch.setattr(file_system, "_by_mount_number", lambda _: None)
    assert file_system_name("/proc") == "proc"
    if file_system._LOCAL.get(expected):
        assert file_system._LOCAL[file_system_name("/dev")] == file_system._LOCAL[expected]


@linux
def test_links_are_followed(tmp_path):
    (tmp_path / "link").symlink_to("/proc/self/status")
    (tmp_path / "links").symlink_to("link")
    (tmp_path / "folder").symlink_to("/proc")
    for name in ("link", "links", "folder", "folder/self"):
        assert file_system_name(tmp_path / name) == "proc"


@linux
def test_a_path_that_does_not_exist_is_where_it_would_come_to_lie(tmp_path):
    here = file_system_name(tmp_path)
    assert here != "unknown"
    (tmp_path / "gone").symlink_to("/proc/no/such")
    assert file_system_name(tmp_path / "no" / "such" / "file.h5") == here
    assert file_system_name(tmp_path / "gone") == "proc"
    assert file_system_name("/proc/no/such/file.h5") == "proc"


@linux
def test_relative_paths_and_the_home_directory_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir("/proc")
    assert file_system_name("self/status") == "proc"
    monkeypatch.setenv("HOME", "/proc")
    assert file_system_name("~/self/status") == "proc"


@linux
def test_a_mount_over_a_mount_and_a_bind_mount_are_seen(tmp_path):
    # In a process with mounts of its own, where that is allowed.
    (tmp_path / "over").mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            point = os.fsencode(tmp_path / "over")
            if libc.unshare(0x00020000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0:
                code = 98
                if libc.mount(b"none", point, b"tmpfs", 0, None) == 0:
                    is_good = file_system_name(tmp_path / "over" / "x.h5") == "tmpfs"
                    if libc.mount(b"/proc", point, None, 0x1000 | 0x4000, None) == 0:
                        is_good = is_good and file_system_name(tmp_path / "over" / "self") == "proc"
                    code = 0 if is_good else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code in (98, 99):
        pytest.skip("mounting is not allowed here")
    assert code == 0


MOUNTINFO = r"""
21 26 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw
36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
360 35 0:50 / /data\040set rw,relatime shared:2 master:1 propagate_from:3 - nfs4 server:/export\040a rw,vers=4.2
37 35 0:51 / /home rw - fuse.sshfs user@host:/home rw,user_id=1000
""".strip()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        ("36", ("ext3", "/dev/root")),
        ("360", ("nfs4", r"server:/export\040a")),
        ("37", ("fuse.sshfs", "user@host:/home")),
        ("3", None),
    ],
)
def test_a_line_of_the_list_of_mounts_is_found_by_its_number(number, expected):
    assert file_system._find_mount(MOUNTINFO, number) == expected


@pytest.mark.parametrize(
    "name",
    [
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "cifs",
        "smb3",
        "ceph",
        "9p",
        "virtiofs",
        "afs",
        "orangefs",
        "wekafs",
        "fuse",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.mount-s3",
        "fuse.ceph-fuse",
        "fuseblk",
        "fuse.portal",
    ],
)
def test_file_systems_of_other_machines_and_of_programs_are_network(name):
    assert is_network_name(name)


@pytest.mark.parametrize(
    "name", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "squashfs", "vfat", "ramfs", "ntfs3"]
)
def test_file_systems_of_this_machine_are_local(name):
    assert not is_network_name(name, "server:/looks/like/it")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("host:/export", True),
        ("10.0.0.1:6789,10.0.0.2:6789:/", True),
        ("10.0.0.1@tcp:/scratch", True),
        ("//host/share", True),
        ("s3://bucket", True),
        ("/dev/nvme0n1p1", False),
        ("none", False),
        ("pool/data", False),
        ("", False),
    ],
)
def test_a_file_system_nobody_knows_is_judged_by_what_is_mounted(source, expected):
    assert is_network_name("newfs", source) is expected


def test_no_number_stands_for_a_local_and_a_network_file_system():
    local = {number for number in file_system._LOCAL.values() if number}
    network = {number for number in file_system._NETWORK.values() if number}
    assert not local & network
    assert not file_system._LOCAL.keys() & file_system._NETWORK.keys()


def test_another_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert (file_system_name("/"), is_network("/")) == ("unknown", False)
