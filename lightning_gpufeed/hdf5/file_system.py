"""Which file system a file is on, and whether it lies on another machine.

Files of a network file system are read, not mapped: their pages can be lost at any time, when the server cuts the file
or goes away. Whatever a program serves (FUSE) counts as network too, for nothing is known about what is behind it.

::

    path -> descriptor (O_PATH) -> number of the mount, from /proc/self/fdinfo -> its line in /proc/self/mountinfo
                                -> statfs: magic number, where there is no /proc

The number of the mount holds behind links, bind mounts and mounts that hide others, where comparing paths errs.

Source: man pages proc_pid_mountinfo(5), statfs(2); the kernel's linux/magic.h and the file systems' own headers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path

from lightning_gpufeed.hdf5.access import StrPath

__all__ = ["UNKNOWN", "file_system_name", "is_network", "is_network_name"]

UNKNOWN = "unknown"

# Name as in /proc/self/mountinfo -> magic number that statfs gives, None where it is not known for certain.
_NETWORK: dict[str, int | None] = {
    "nfs": 0x6969,
    "nfs4": 0x6969,
    "cifs": 0xFF534D42,
    "smb3": 0xFE534D42,
    "smbfs": 0x517B,
    "lustre": 0x0BD00BD0,
    "gpfs": 0x47504653,
    "beegfs": 0x19830326,
    "ceph": 0x00C36400,
    "afs": 0x5346414F,
    "kafs": 0x6B414653,
    "coda": 0x73757245,
    "ncpfs": 0x564C,
    "9p": 0x01021997,
    "virtiofs": None,
    "orangefs": 0x20030528,
    "pvfs2": 0x20030528,
    "wekafs": None,
    "panfs": 0xAAD7AAEA,
    "fhgfs": 0x19830326,
    "ocfs2": 0x7461636F,
    "gfs2": 0x01161970,
    "vboxsf": 0x786F4256,
    "vmhgfs": 0xBACBACBC,
    "prl_fs": 0x7C7C6673,
    "acfs": 0x61636673,
    "ibrix": 0x013111A8,
    "cvfs": 0xBEEFDEAD,
    "dvs": None,
    "gluster": None,
    "davfs": None,
    "fuse": 0x65735546,
}
_LOCAL: dict[str, int | None] = {
    "ext4": 0xEF53,
    "ext3": 0xEF53,
    "ext2": 0xEF53,
    "xfs": 0x58465342,
    "btrfs": 0x9123683E,
    "zfs": 0x2FC12FC1,
    "f2fs": 0xF2F52010,
    "bcachefs": 0xCA451A4E,
    "jfs": 0x3153464A,
    "reiserfs": 0x52654973,
    "nilfs2": 0x3434,
    "overlay": 0x794C7630,
    "aufs": 0x61756673,
    "tmpfs": 0x01021994,
    "ramfs": 0x858458F6,
    "rootfs": None,
    "hugetlbfs": 0x958458F6,
    "squashfs": 0x73717368,
    "erofs": 0xE0F5E1E2,
    "iso9660": 0x9660,
    "udf": 0x15013346,
    "vfat": 0x4D44,
    "msdos": 0x4D44,
    "exfat": 0x2011BAB0,
    "ntfs": 0x5346544E,
    "ntfs3": 0x7366746E,
    "hfsplus": 0x482B,
    "proc": 0x9FA0,
    "sysfs": 0x62656572,
}


def file_system_name(path: StrPath) -> str:
    """Name the file system that a path is on.

    Args:
        path: A file or directory. For one that does not exist yet, the directory that it would come to lie in counts.

    Returns:
        As the system names it, such as `ext4`, `nfs4`, `fuse.sshfs`; `unknown` where it does not tell.
    """
    return _mount(path)[0]


def is_network(path: StrPath) -> bool:
    """Whether a path is on a file system of another machine, or of a program (FUSE).

    Args:
        path: A file or directory, which need not exist yet.

    Returns:
        True if so. A file system nobody knows counts as one if what is mounted looks like `host:path` or `//host/path`.
    """
    return is_network_name(*_mount(path))


def is_network_name(name: str, source: str = "") -> bool:
    """Whether a file system of this name lies on another machine, or in a program.

    Args:
        name: As in /proc/self/mountinfo.
        source: What is mounted, as it says there.

    Returns:
        True if so.
    """
    family = name.partition(".")[0]
    if family in _NETWORK or family == "fuseblk":
        return True
    if family in _LOCAL:
        return False
    return source.startswith("//") or re.match(r"[^/:]+(:\d+)?:|[a-z0-9]+://", source) is not None


def _mount(path: StrPath) -> tuple[str, str]:
    """Name of the file system and what is mounted, for a path or its nearest parent that exists."""
    if sys.platform != "linux":
        return UNKNOWN, ""
    place = Path(os.path.realpath(os.path.expanduser(path)))
    while True:
        try:
            # Needs no right to read it.
            descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
            break
        except OSError:  # does not exist, or a directory on the way may not be looked into
            if place == place.parent:
                return UNKNOWN, ""
            place = place.parent
    try:
        return _by_mount_number(descriptor) or (_by_magic(descriptor), "")
    finally:
        os.close(descriptor)


def _by_mount_number(descriptor: int) -> tuple[str, str] | None:
    """Look the mount of an open file up; None without /proc, or for what lies in no mount of this process."""
    try:
        info = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        table = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    number = re.search(r"^mnt_id:\s*(\d+)$", info, re.MULTILINE)
    return _find_mount(table, number[1]) if number else None


def _find_mount(table: str, number: str) -> tuple[str, str] | None:
    """Name of the file system and what is mounted, of one line of mountinfo."""
    for line in table.splitlines():
        # 36 35 98:0 /root /mount/point rw,noatime master:1 - ext3 /dev/root rw
        head, _, tail = line.partition(" - ")
        if head.partition(" ")[0] == number:
            name, source = [*tail.split(" "), "", ""][:2]
            return name, source
    return None


def _by_magic(descriptor: int) -> str:
    """Name a file system by the number that statfs gives."""
    if sys.maxsize < 2**32 or platform.machine() not in ("x86_64", "aarch64"):
        return UNKNOWN
    libc = ctypes.CDLL(None)
    libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
    status = (ctypes.c_uint64 * 32)()  # struct statfs takes 120 bytes; the first eight are the number
    if libc.fstatfs(descriptor, ctypes.addressof(status)):
        return UNKNOWN
    magic = status[0] & 0xFFFFFFFF
    return next((name for name, known in (_LOCAL | _NETWORK).items() if known == magic), UNKNOWN)
