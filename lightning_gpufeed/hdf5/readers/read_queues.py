"""The kernel's queues of reads, each behind the same methods. Only `batched_reads` uses them.

* `UringQueue`: io_uring. One call hands a list over and waits.
* `AioQueue`: native AIO. For files that are not opened O_DIRECT, io_submit itself reads, one request after the other.
* `PreadQueue`: no queue: one pread per request.

Source: man pages io_submit(2), io_getevents(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import weakref

import numpy as np

from lightning_gpufeed.hdf5.readers.read_calls import Addresses, Indices, Patience, Queue, call, call_numbers, libc
from lightning_gpufeed.hdf5.readers.uring_queue import UringQueue

__all__ = ["QUEUES", "AioQueue", "PreadQueue", "Queue", "UringQueue"]


def _advise_singly(files: Indices, offsets: Indices, sizes: Indices) -> None:
    """Advise by one call per range: for queues that know reads only. What the kernel refuses is not needed."""
    for file, offset, size in zip(files.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, offset, size, os.POSIX_FADV_WILLNEED)


_IOCB = np.dtype(
    [("data", "u8"), ("key", "u4"), ("flags", "u4"), ("operation", "u2"), ("priority", "i2"), ("file", "u4"),
     ("address", "u8"), ("size", "u8"), ("offset", "i8"), ("rest", "u8"), ("more_flags", "u4"), ("event_file", "u4")]
)  # fmt: skip
_EVENT = np.dtype([("data", "u8"), ("request", "u8"), ("result", "i8"), ("result2", "i8")])


class AioQueue:
    """Native AIO: io_submit takes a list of requests, io_getevents collects the answers."""

    def __init__(self, num_requests: int) -> None:
        """Make a context.

        Args:
            num_requests: Most requests at once.

        Raises:
            OSError: The kernel does not know native AIO, forbids it, or has no context left (fs.aio-max-nr).
        """
        self._numbers = call_numbers()
        self._num_requests = num_requests
        self._requests = np.zeros(num_requests, dtype=_IOCB)
        self._requests["data"] = np.arange(num_requests)
        self._pointers = (self._requests.ctypes.data + np.arange(num_requests) * _IOCB.itemsize).astype(np.uint64)
        self._events = np.zeros(num_requests, dtype=_EVENT)
        self._no_time = (ctypes.c_int64 * 2)(0, 0)
        self._open()

    def _open(self) -> None:
        context = ctypes.c_ulong(0)
        if (code := -call(self._numbers["io_setup"], self._num_requests, ctypes.addressof(context))) > 0:
            raise OSError(code, f"io_setup: {os.strerror(code)}")
        self._context = _signed(context.value)
        self._release = weakref.finalize(self, _release_aio, self._numbers["io_destroy"], self._context, os.getpid())
        self._release.atexit = False

    def run(self, files: Indices, offsets: Indices, addresses: Addresses, sizes: Indices) -> Indices:
        """Read once for each request; see `Queue.run`.

        Args:
            files: int64 (n,) descriptors.
            offsets: int64 (n,).
            addresses: uint64 (n,).
            sizes: int64 (n,).

        Returns:
            int64 (n,): bytes read or a negative error number.
        """
        num = len(offsets)
        entries = self._requests
        entries["file"][:num] = files
        entries["offset"][:num] = offsets
        entries["address"][:num] = addresses
        entries["size"][:num] = sizes
        results = np.empty(num, dtype=np.int64)
        taken = done = 0
        patience = Patience()
        while taken < num:
            got = call(self._numbers["io_submit"], self._context, num - taken, self._pointers[taken:].ctypes.data)
            if got > 0:
                taken += got
            elif -got in (errno.EINTR, errno.EAGAIN, errno.ENOMEM):
                done += self._collect(results, taken - done)  # makes room
                patience.wait("io_submit", -got)
            else:  # this request cannot even begin: a descriptor that is closed, a file that cannot be read so
                results[taken] = got or -errno.EIO
                taken += 1
                done += 1
                done += self._collect(results, taken - done)
        while done < num:
            done += self._collect(results, num - done)
        return results

    def _collect(self, results: Indices, num: int) -> int:
        """Wait for answers; returns how many came."""
        if not num:
            return 0
        patience = Patience()
        # At first without waiting: reads of buffered files are done when io_submit returns.
        at_most, is_quick = ctypes.addressof(self._no_time), True
        while True:
            get = self._numbers["io_getevents"]
            got = call(get, self._context, num, num, self._events.ctypes.data, at_most, is_quick=is_quick)
            if got > 0:
                break
            if got < 0:
                patience.wait("io_getevents", -got)
            at_most, is_quick = 0, False
        events = self._events[:got]
        results[events["data"].astype(np.int64)] = events["result"]
        return got

    def advise(self, files: Indices, offsets: Indices, sizes: Indices) -> None:
        """Tell the kernel what will be read soon; see `Queue.advise`.

        Args:
            files: int64 (n,) descriptors.
            offsets: int64 (n,).
            sizes: int64 (n,).
        """
        _advise_singly(files, offsets, sizes)

    def settle(self) -> None:
        """Wait until nothing is under way, and forget the answers: the kernel does both when a context ends."""
        self.close()
        self._open()

    def close(self) -> None:
        """End the context. Closing twice is allowed."""
        self._release()


def _signed(value: int) -> int:
    """An unsigned long as the long that `syscall` takes."""
    return ctypes.c_long(value).value


def _release_aio(io_destroy: int, context: int, owner: int) -> None:
    """End a context; a forked child has none, though one of its own may have got the same number."""
    if os.getpid() == owner:
        call(io_destroy, context)


# Without a queue ---------------------------------------------------------------------------------------------


class PreadQueue:
    """One pread after the other."""

    def __init__(self, num_requests: int) -> None:
        """Nothing to open.

        Args:
            num_requests: Of no consequence.
        """

    def run(self, files: Indices, offsets: Indices, addresses: Addresses, sizes: Indices) -> Indices:
        """Read once for each request; see `Queue.run`.

        Args:
            files: int64 (n,) descriptors.
            offsets: int64 (n,).
            addresses: uint64 (n,).
            sizes: int64 (n,).

        Returns:
            int64 (n,): bytes read or a negative error number.
        """
        results = np.empty(len(offsets), dtype=np.int64)
        requests = zip(files.tolist(), addresses.tolist(), sizes.tolist(), offsets.tolist(), strict=True)
        for number, request in enumerate(requests):
            got = libc.pread(*request)
            results[number] = got if got >= 0 else -ctypes.get_errno()
        return results

    def advise(self, files: Indices, offsets: Indices, sizes: Indices) -> None:
        """Tell the kernel what will be read soon; see `Queue.advise`.

        Args:
            files: int64 (n,) descriptors.
            offsets: int64 (n,).
            sizes: int64 (n,).
        """
        _advise_singly(files, offsets, sizes)

    def settle(self) -> None:
        """Nothing is ever under way between two calls."""

    def close(self) -> None:
        """Nothing is open."""


QUEUES: dict[str, type[Queue]] = {"io_uring": UringQueue, "aio": AioQueue, "preadv": PreadQueue}
"""The backends by name, the best first."""
