"""Pieces of remote files on the local disk, up to a limit of bytes, the ones unused longest go first.

::

    folder / ab / cdef0123...      name: hash of what the piece is (object, its stamp, place, length)
                                   content: the bytes, then their checksum and length

Several processes may share the folder. A piece is written aside and renamed, so that nobody sees half of it; one
that was cut short or damaged all the same is noticed by its checksum and taken for missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import threading
import time
import uuid
import warnings
import zlib
from collections.abc import Iterator

__all__ = ["DiskCache", "default_cache_dir"]

_TRAILER = struct.Struct("<QI4s")
_MAGIC = b"gpfc"
_ASIDE = ".aside-"
_ABANDONED_SECONDS = 3600.0
# Others may write to the folder too; what they wrote is counted again after each such share of the limit.
_RECOUNT_SHARE = 16
_KEPT_SHARE = 0.9


def default_cache_dir() -> str:
    """The folder for this package under the user's cache folder.

    Returns:
        Below `XDG_CACHE_HOME` where that is an absolute path, else below `.cache` in the home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "lightning_gpufeed", "chunks")


class DiskCache:
    """A folder of pieces. What goes wrong with it never stops a reader: it then works without.

    May be used from several threads and processes.

    Attributes:
        num_hits: Pieces found.
        num_misses: Pieces asked for in vain.
    """

    def __init__(self, directory: str, limit_bytes: int) -> None:
        """Note where; the folder is made at the first write.

        Args:
            directory: The folder.
            limit_bytes: Bytes that all pieces in it may take, whoever wrote them.
        """
        self._directory = os.path.abspath(os.path.expanduser(directory))
        self._limit_bytes = limit_bytes
        self._counting = threading.Lock()
        # None: not counted yet.
        self._total_bytes: int | None = None
        self._written_since_count = 0
        self._is_off = limit_bytes <= 0
        self.num_hits = 0
        self.num_misses = 0

    def get(self, name: str, num_bytes: int) -> memoryview | None:
        """Look a piece up.

        Args:
            name: What it is; any text.
            num_bytes: Its length.

        Returns:
            The bytes, None where they are not there or not whole.
        """
        if self._is_off:
            return None
        path = self._path(name)
        try:
            content = _read(path, num_bytes + _TRAILER.size)
        except OSError:
            content = None
        if content is None or not _is_whole(content, num_bytes):
            if content is not None:
                _remove(path)
            self.num_misses += 1
            return None
        self.num_hits += 1
        with contextlib.suppress(OSError):  # gone meanwhile, or a folder that may only be read
            os.utime(path)
        return memoryview(content)[:num_bytes].toreadonly()

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Keep a piece.

        Args:
            name: What it is; any text.
            data: Its bytes.
        """
        size = len(data) + _TRAILER.size
        if self._is_off or size > self._limit_bytes // 2:
            return
        path = self._path(name)
        aside = os.path.join(self._directory, f"{_ASIDE}{os.getpid()}-{uuid.uuid4().hex}")
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            try:
                with open(aside, "xb", buffering=0) as file:
                    for part in (data, _TRAILER.pack(len(data), zlib.crc32(data), _MAGIC)):
                        _write_all(file.fileno(), part)
                os.replace(aside, path)
            except BaseException:
                _remove(aside)
                raise
            self._count(size)
        except OSError as error:
            self._is_off = True
            warnings.warn(
                f"the cache of remote chunks in {self._directory} is not used any more: {error}. Make room or pass "
                f"another cache_dir; without it, what was read once is fetched again.",
                stacklevel=2,
            )

    def _path(self, name: str) -> str:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
        return os.path.join(self._directory, digest[:2], digest[2:])

    def _count(self, size: int) -> None:
        """Add what was written, and make room where the limit is passed."""
        with self._counting:
            self._written_since_count += size
            if self._total_bytes is not None:
                self._total_bytes += size
            is_due = self._written_since_count > self._limit_bytes // _RECOUNT_SHARE
            if self._total_bytes is None or is_due or self._total_bytes > self._limit_bytes:
                self._total_bytes = self._make_room()
                self._written_since_count = 0

    def _make_room(self) -> int:
        """Count the pieces and remove those unused longest while there are too many; returns the bytes left."""
        with self._only_one():
            pieces = sorted(_pieces(self._directory))
            total = sum(size for _, size, _ in pieces)
            if total <= self._limit_bytes:
                return total
            for _, size, path in pieces:
                if total <= _KEPT_SHARE * self._limit_bytes:
                    break
                _remove(path)
                total -= size
            return total

    @contextlib.contextmanager
    def _only_one(self) -> Iterator[None]:
        """Keep other processes from removing at the same time, where the file system has locks."""
        descriptor = os.open(os.path.join(self._directory, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _is_whole(content: bytearray, num_bytes: int) -> bool:
    """Whether the trailer fits the bytes."""
    if len(content) != num_bytes + _TRAILER.size:
        return False
    size, checksum, magic = _TRAILER.unpack_from(content, num_bytes)
    return bool(size == num_bytes and magic == _MAGIC and checksum == zlib.crc32(memoryview(content)[:num_bytes]))


def _read(path: str, size: int) -> bytearray:
    """Up to `size` bytes of a file, and one more where it is longer."""
    content = bytearray(size + 1)
    done = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while count := os.readv(descriptor, [memoryview(content)[done:]]):
            done += count
    finally:
        os.close(descriptor)
    del content[done:]
    return content


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # somebody else was quicker
        os.unlink(path)


def _pieces(directory: str) -> Iterator[tuple[int, int, str]]:
    """(time of the last use, size, path) of each piece; what a killed process left aside is removed."""
    for entry in _entries(directory):
        if entry.name.startswith(_ASIDE):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
                    _remove(entry.path)
        elif len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
            for piece in _entries(entry.path):
                with contextlib.suppress(OSError):
                    status = piece.stat(follow_symlinks=False)
                    yield status.st_mtime_ns, status.st_size, piece.path


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except OSError:
        return []
