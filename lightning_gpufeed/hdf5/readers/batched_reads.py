"""Many reads of files in one system call: without a memory map, and without the interpreter lock meanwhile.

::

    256 samples, one os.preadv each      256 times: give the interpreter lock back, read, wait for it again
    BatchedReads.read(...)               once: the kernel works through the whole list

A read gives an error where a memory map gives a fatal signal, and the kernel can wait for many disks' answers at
once. Three backends, the first that works here is taken: `io_uring`, native `aio`, and `preadv` (one call per read).

Source: man pages io_uring(7), io_uring_enter(2), io_submit(2), io_getevents(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_gpufeed.hdf5.readers.read_calls import Addresses, Indices, Queue
from lightning_gpufeed.hdf5.readers.read_queues import QUEUES

__all__ = ["BatchedReads", "ReadError"]

# The kernel reads at most 2 GiB - 4 KiB per request; what is longer goes on where the first part ended.
_MOST_BYTES = 1 << 30
_MOST_REQUESTS = 4096
# What a single request may answer although nothing is wrong with the file.
_PASSING = (-errno.EINTR, -errno.EAGAIN, -errno.ENOMEM, -errno.ECANCELED)


class ReadError(OSError):
    """One request of many failed, or its file ended before it was complete.

    Attributes:
        request: Which one: its position in the arrays given to `BatchedReads.read`.
        is_past_end: Whether the file ended too early; False for an error of the system, which `errno` names.
    """

    def __init__(self, number: int, text: str, request: int = -1, is_past_end: bool = False) -> None:
        """Note what happened.

        Args:
            number: The error's number.
            text: What it means.
            request: Position of the request.
            is_past_end: Whether the file was too short.
        """
        super().__init__(number, text)
        self.request = request
        self.is_past_end = is_past_end


class BatchedReads:
    """Reads lists of (file, offset, address, length), a full list per system call.

    May be used from several threads; they wait for each other. A forked process gets a queue of its own.

    Attributes:
        backend: `io_uring`, `aio` or `preadv`.
        refused: Backend -> why it cannot be used here, for those tried before `backend`.

    Example:
        >>> import numpy as np
        >>> place = np.zeros((2, 3), np.uint8)
        >>> with open("train.h5", "rb") as file, BatchedReads() as reads:
        ...     reads.read(file.fileno(), np.array([1, 0]), place.ctypes.data + np.array([0, 3], "u8"), 3)
        >>> place[0].tobytes()
        b'HDF'
    """

    def __init__(self, num_requests: int = 256, backend: str = "auto") -> None:
        """Set the queue up, and prove it with a read.

        Args:
            num_requests: Most reads per system call, 1 to 4096.
            backend: `auto`, or the one to use.

        Raises:
            ValueError: No such backend, or `num_requests` out of range.
            OSError: The backend asked for cannot be used here.
        """
        if backend != "auto" and backend not in QUEUES:
            raise ValueError(f"backend is {backend!r}; expected 'auto' or one of {', '.join(map(repr, QUEUES))}.")
        if not 1 <= num_requests <= _MOST_REQUESTS:
            raise ValueError(f"num_requests is {num_requests}; expected 1 to {_MOST_REQUESTS}.")
        self._num_requests = num_requests
        self._lock = threading.Lock()
        self._is_closed = False
        self.refused: dict[str, str] = {}
        self.backend = ""
        self._queue: Queue | None = None
        for name in QUEUES if backend == "auto" else (backend,):
            try:
                self._queue = _open_proven(name, num_requests)
            except OSError as error:
                if backend != "auto":
                    raise OSError(
                        error.errno, f"reads by {backend!r} are not possible here: {error.strerror}. Use 'auto'."
                    ) from error
                self.refused[name] = str(error)
                continue
            self.backend = name
            break
        _all.add(self)

    def read(
        self,
        descriptor: int | Indices,
        offsets: Indices,
        addresses: Addresses,
        num_bytes: int | Indices,
    ) -> None:
        """Fill memory from files. Returns when all of it is done, and raises only when nothing is under way any more.

        Args:
            descriptor: Open file, or one per request, int64 (n,).
            offsets: int64 (n,): where in the file each read begins.
            addresses: uint64 (n,): where in memory it goes. The caller keeps this memory alive.
            num_bytes: Bytes of every read, or one number per request, int64 (n,).

        Raises:
            ReadError: A read failed or came to the end of its file; one such request is named.
            ValueError: Arrays of different lengths, a negative offset or length, or closed.
        """
        num = len(offsets)
        places = np.asarray(offsets, dtype=np.int64)
        targets = np.asarray(addresses, dtype=np.uint64)
        if places.shape != (num,) or targets.shape != (num,):
            raise ValueError(f"{places.shape} offsets and {targets.shape} addresses; expected one of each per request.")
        sizes = np.broadcast_to(np.asarray(num_bytes, dtype=np.int64), (num,))
        files = np.broadcast_to(np.asarray(descriptor, dtype=np.int64), (num,))
        if num and (int(places.min()) < 0 or int(sizes.min()) < 0):
            raise ValueError("a negative offset or length was given; expected 0 or more.")
        with self._ready() as queue:
            _read_all(queue, self._num_requests, files, places, targets, sizes)

    def advise(self, descriptor: int | Indices, offsets: Indices, num_bytes: int | Indices) -> None:
        """Tell the kernel what will be read soon, so that it begins to fetch it. Errors of the files are not told.

        Args:
            descriptor: Open file, or one per range, int64 (n,).
            offsets: int64 (n,): where in the file each range begins.
            num_bytes: Bytes of every range, or one number each, int64 (n,).

        Raises:
            ValueError: Closed.
        """
        num = len(offsets)
        sizes = np.minimum(np.broadcast_to(np.asarray(num_bytes, dtype=np.int64), (num,)), _MOST_BYTES)
        files = np.broadcast_to(np.asarray(descriptor, dtype=np.int64), (num,))
        with self._ready() as queue:
            for start in range(0, num, self._num_requests):
                part = slice(start, start + self._num_requests)
                queue.advise(files[part], offsets[part], sizes[part])

    @contextlib.contextmanager
    def _ready(self) -> Iterator[Queue]:
        """Have the queue for oneself; nothing is under way in it afterwards."""
        with self._lock:
            if self._is_closed:
                raise ValueError("these reads are closed; make new ones.")
            if self._queue is None:
                self._queue = QUEUES[self.backend](self._num_requests)
            with _settled(self._queue):
                yield self._queue

    def close(self) -> None:
        """Give the queue back to the kernel. Closing twice is allowed."""
        with self._lock:
            self._is_closed = True
            queue, self._queue = self._queue, None
            if queue is not None:
                queue.close()

    def __enter__(self) -> BatchedReads:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _after_fork(self) -> None:
        """Leave the parent's queue alone: the requests in it are the parent's. A lock may be held by nobody alive."""
        self._lock = threading.Lock()
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()


_all: weakref.WeakSet[BatchedReads] = weakref.WeakSet()


def _forget_all() -> None:
    for reads in list(_all):
        reads._after_fork()


os.register_at_fork(after_in_child=_forget_all)


@contextlib.contextmanager
def _settled(queue: Queue) -> Iterator[None]:
    """Whatever is raised, let it through only when the kernel does not write to the caller's memory any more."""
    try:
        yield
    except BaseException:
        while True:
            try:
                queue.settle()
                break
            except KeyboardInterrupt:  # the first one is on its way already
                continue
        raise


def _read_all(
    queue: Queue, num_requests: int, files: Indices, offsets: Indices, addresses: Addresses, sizes: Indices
) -> None:
    """All requests in rounds, then what came back short, until nothing is left."""
    num = len(offsets)
    left: Indices | None = None  # None: all of them, and nothing has to be picked out
    done = np.zeros(num, dtype=np.int64)
    while True:
        numbers = np.arange(num) if left is None else left
        got = np.empty(len(numbers), dtype=np.int64)
        for start in range(0, len(numbers), num_requests):
            part: Any = slice(start, start + num_requests) if left is None else left[start : start + num_requests]
            have = done[part]
            wanted = np.minimum(sizes[part] - have, _MOST_BYTES)
            results = queue.run(files[part], offsets[part] + have, addresses[part] + have.view(np.uint64), wanted)
            got[start : start + num_requests] = results
        if left is None and np.array_equal(got, sizes):
            return
        for at in np.flatnonzero(np.isin(got, _PASSING)).tolist():
            number = int(numbers[at])
            begun = int(done[number])
            num_bytes = min(int(sizes[number]) - begun, _MOST_BYTES)
            got[at] = _read_one(
                int(files[number]), int(offsets[number]) + begun, int(addresses[number]) + begun, num_bytes
            )
        _refuse_failed(numbers, got, offsets, sizes, done)
        done[numbers] += got
        left = np.flatnonzero(done < sizes)
        if not left.size:
            return


def _refuse_failed(numbers: Indices, got: Indices, offsets: Indices, sizes: Indices, done: Indices) -> None:
    """Raise for the first request that failed or met the end of its file."""
    failed = np.flatnonzero((got < 0) | ((got == 0) & (sizes[numbers] > done[numbers])))
    if not failed.size:
        return
    at = int(failed[0])
    number = int(numbers[at])
    what = f"{int(sizes[number])} bytes at {int(offsets[number])}"
    if got[at] < 0:
        code = -int(got[at])
        raise ReadError(code, f"request {number}, {what}: {os.strerror(code)}", number)
    there = int(offsets[number] + done[number])
    raise ReadError(errno.ENODATA, f"request {number}, {what}: nothing from byte {there} on", number, True)


def _read_one(descriptor: int, offset: int, address: int, num_bytes: int) -> int:
    """One plain read, for a request that the kernel could not take at that moment: bytes read or -errno."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    try:
        return os.preadv(descriptor, [memory], offset)
    except OSError as error:
        return -(error.errno or errno.EIO)


def _open_proven(name: str, num_requests: int) -> Queue:
    """Open a queue and read something through it: a kernel may know the calls and refuse the reads."""
    queue = QUEUES[name](num_requests)
    try:
        with _settled(queue), _small_file() as descriptor:
            place = np.zeros(2, dtype=np.uint8)
            one = np.ones(1, dtype=np.int64)
            address = np.array([place.ctypes.data], dtype=np.uint64)
            got = int(queue.run(one * descriptor, one, address, one)[0])
            if got < 0:
                raise OSError(-got, os.strerror(-got))
            if got != 1 or place.tolist() != [ord("b"), 0]:
                raise OSError(errno.EIO, f"a read of one byte gave {got} bytes, {place.tolist()}")
    except BaseException:
        queue.close()
        raise
    return queue


@contextlib.contextmanager
def _small_file() -> Iterator[int]:
    """A file with the bytes `abc`, of no name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gpufeed")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.write(descriptor, b"abc")
        yield descriptor
    finally:
        os.close(descriptor)
