"""How much of a dataset is in the page cache: whether the first epoch comes from memory or from the disk.

Single bytes at random places are asked for without waiting::

    preadv(..., RWF_NOWAIT)   the byte -> its page is in memory       EAGAIN -> it is not
    mincore                   on a mapping, where the file system does not know RWF_NOWAIT

Asking changes what is asked: the kernel begins to read a page that was missing, so the same place a second later
is in memory. Hence the places are new in every call, and read-ahead around them is switched off.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.hdf5.access import StrPath
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.remote.remote_file import is_remote

__all__ = ["are_cached", "cached_share"]

Indices = npt.NDArray[np.int64]


def cached_share(layout: H5DatasetLayout, num_places: int = 64) -> float | None:
    """Estimate which share of the stored bytes of a dataset is in the page cache.

    Args:
        layout: The dataset.
        num_places: Places to look at, fewer where the dataset has fewer pages or compressed chunks. The standard
            error is at most 0.5 / sqrt(num_places).

    Returns:
        0 to 1; None where the file system does not tell, nothing is stored, or the file is not on a disk here.

    Raises:
        FileNotFoundError: A file is gone.
    """
    if is_remote(layout.storage_path):
        return None
    num_cached = num_asked = 0
    for path, places in _random_places(layout, num_places):
        # Each page once: the first asking may have brought it in.
        offsets = np.unique(places // mmap.PAGESIZE) * mmap.PAGESIZE
        is_cached = are_cached(path, offsets)
        if is_cached is None:
            return None
        num_cached += int(is_cached.sum())
        num_asked += len(offsets)
    return num_cached / num_asked if num_asked else None


def are_cached(path: StrPath, offsets: Indices) -> npt.NDArray[np.bool_] | None:
    """Ask for bytes of a file whether they are in the page cache.

    Args:
        path: The file.
        offsets: int64 (n,): positions inside the file, in bytes.

    Returns:
        bool (n,); None where the file system or the file's permissions do not let us know.

    Raises:
        FileNotFoundError: There is no such file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        is_cached = _ask_by_reading(descriptor, offsets)
        return _ask_by_mincore(descriptor, path, offsets) if is_cached is None else is_cached
    finally:
        os.close(descriptor)


def _random_places(layout: H5DatasetLayout, num_places: int) -> Iterator[tuple[str, Indices]]:
    """Places in the stored bytes, drawn anew in each call, as (path, offsets)."""
    random = np.random.default_rng()
    blocks = layout.block_offsets
    if blocks is not None:
        written = blocks[blocks >= 0]
        if not written.size:
            return
        # The stored size of a compressed chunk is not known; its first byte stands for all.
        block_bytes = layout.total_bytes if layout.chunk_bytes is None else layout.chunk_bytes
        inside = 1 if layout.filters else max(1, block_bytes)
        yield layout.storage_path, random.choice(written, num_places) + random.integers(inside, size=num_places)
        return
    # Virtual, external, compact: anywhere in the files that the bytes come from.
    ends = np.cumsum([stamp.size_bytes for stamp in layout.stamps])
    if not ends[-1]:
        return
    places = random.integers(ends[-1], size=num_places)
    files = np.searchsorted(ends, places, side="right")
    for number, stamp in enumerate(layout.stamps):
        offsets = places[files == number] - (ends[number] - stamp.size_bytes)
        if offsets.size:
            yield stamp.path, offsets


def _ask_by_reading(descriptor: int, offsets: Indices) -> npt.NDArray[np.bool_] | None:
    """Read single bytes without waiting; None where the file system does not know how to."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    is_cached = np.zeros(len(offsets), dtype=bool)
    byte = bytearray(1)
    for number, offset in enumerate(offsets.tolist()):
        try:
            is_cached[number] = os.preadv(descriptor, [byte], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                return None
            raise
    return is_cached


def _ask_by_mincore(descriptor: int, path: StrPath, offsets: Indices) -> npt.NDArray[np.bool_] | None:
    """Look pages of a mapping up; None for a file of somebody else, where Linux answers yes whatever is true."""
    status = os.fstat(descriptor)
    if not status.st_size or not (status.st_uid == os.geteuid() or os.access(path, os.W_OK)):
        return None
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte)]
    is_cached = np.zeros(len(offsets), dtype=bool)
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
        start = np.frombuffer(mapped, dtype=np.uint8).ctypes.data  # a temporary array: the mapping can be closed
        answer = (ctypes.c_ubyte * 1)()
        for number, offset in enumerate(offsets.tolist()):
            if mincore(start + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, answer):
                return None
            is_cached[number] = bool(answer[0] & 1)
    return is_cached
