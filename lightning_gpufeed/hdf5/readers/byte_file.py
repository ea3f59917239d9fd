"""Files as plain bytes at positions, read from several threads at once.

`LocalFile` reads with `pread`: no shared position, no interpreter lock while the kernel copies, and a file that became
shorter gives fewer bytes, not a signal.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.access import FileStamp
from lightning_gpufeed.hdf5.remote.remote_file import RemoteStamp

__all__ = ["ByteFile", "LocalFile", "refuse_changed", "shorter_text"]

_MOST_PARTS = 1024
"""Buffers that the kernel fills in one call."""


class ByteFile(Protocol):
    """Bytes at positions."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill a buffer from a position on; may be called from several threads.

        Args:
            offset: Bytes from the start of the file.
            out: Writable, contiguous.
        """

    def check_unchanged(self) -> None:
        """Raise a `FeedError` if the file is another one now: that explains bytes that make no sense."""

    def close(self) -> None:
        """Let go of the file. Closing twice is allowed."""


class LocalFile:
    """A file of a local or mounted file system."""

    def __init__(self, stamp: FileStamp) -> None:
        """Open the file.

        Args:
            stamp: The file as it was when its layout was read.

        Raises:
            FeedError: It is another file now, or the limit of open files is reached.
            OSError: It cannot be opened.
        """
        self._path = stamp.path
        try:
            self._descriptor = os.open(stamp.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise FeedError(
                    f"{stamp.path} cannot be opened: the limit of open files is reached. Raise it (ulimit -n), or pack "
                    f"the data into fewer files."
                ) from error
            raise
        self._close = weakref.finalize(self, os.close, self._descriptor)
        refuse_changed(stamp, os.fstat(self._descriptor))

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill a buffer; see `ByteFile.read_into`.

        Args:
            offset: Bytes from the start of the file.
            out: Writable, contiguous.

        Raises:
            FeedError: The file ends before the buffer is full, or cannot be read.
        """
        done = 0
        while done < len(out):
            done += self._read([out[done:]], offset + done, offset + len(out))

    def read_parts(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Fill several buffers with what lies one after the other in the file: one call of the kernel for 1024 of them.

        Args:
            offset: Bytes from the start of the file.
            parts: Writable, contiguous, of bytes.

        Raises:
            FeedError: The file ends before they are full, or cannot be read.
        """
        end = offset + sum(map(len, parts))
        for first in range(0, len(parts), _MOST_PARTS):
            some = parts[first : first + _MOST_PARTS]
            count = self._read(some, offset, end)
            for part in some:
                if count < len(part):  # the kernel gave less than was asked for
                    self.read_into(offset + count, part[count:])
                count = max(0, count - len(part))
                offset += len(part)

    def will_read(self, offset: int, num_bytes: int) -> None:
        """Have the kernel begin to fetch what is soon read.

        Args:
            offset: Bytes from the start of the file.
            num_bytes: How many.
        """
        with suppress(OSError):  # a file system that does not know advice reads as well without
            os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def _read(self, parts: Sequence[memoryview], offset: int, end: int) -> int:
        """One call of the kernel: how many bytes it gave, at least one."""
        try:
            count = os.preadv(self._descriptor, parts, offset)
        except OSError as error:
            raise FeedError(f"{self._path} cannot be read: {error}. Look after the disk or its connection.") from error
        if not count:
            raise FeedError(shorter_text(self._path, end, os.fstat(self._descriptor).st_size))
        return count

    def check_unchanged(self) -> None:
        """Nothing to do: what is open stays what it is."""

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        self._close()


def refuse_changed(stamp: FileStamp | RemoteStamp, status: os.stat_result) -> None:
    """Make sure that an open file is the one whose layout was read.

    Args:
        stamp: The file then.
        status: What the open file is now.

    Raises:
        FeedError: It is not.
    """
    assert isinstance(stamp, FileStamp), "an address is not opened here"
    if (status.st_size, status.st_mtime_ns, status.st_ino) != (stamp.size_bytes, stamp.mtime_ns, stamp.inode):
        raise FeedError(
            f"{stamp.path} changed between reading its layout and opening it, so its samples may lie elsewhere "
            f"now. Build the loader or DataModule again to use the new file."
        )


def shorter_text(path: str, expected: int, now: int) -> str:
    """What to say of a file that was cut while it was read.

    Args:
        path: The file.
        expected: Bytes it had, or had to have.
        now: Bytes it has.

    Returns:
        Two sentences.
    """
    return (
        f"{path} became shorter while it was read: {expected} bytes at the start, {now} now. "
        f"Write new data to another file and rename it; never change a file in place during training."
    )
