"""Reading in a process of its own, for training loops that hold the interpreter lock.

A thread that computes in Python gives the lock up only every few milliseconds, so a reading thread beside it waits
most of its time. Here that thread only says which samples are wanted and where they go, and waits for the answer::

    this process                                     reader process (`server.py`)
    begin(indices, out)   -- 40 bytes -->            H5Source.read(indices, out)
                                                     indices, out: memory that both processes map
    result() -> batch     <-- 16 bytes --

The lock changes hands at most once per batch: while waiting for the answer. With further requests begun before the
first one's result is asked for, the answer is often there already, and then not at all.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.device.shared_memory import SharedBufferPool, map_shared, memory_file
from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.isolated.link import ReaderLink, Request, how_it_ended
from lightning_gpufeed.hdf5.isolated.server import Kind, message_format
from lightning_gpufeed.hdf5.source import Batch, H5Source

__all__ = ["PendingRead", "ReaderProcess"]

Indices = npt.NDArray[np.int64]


class PendingRead:
    """A read that was begun."""

    def __init__(self, reader: ReaderProcess, link: ReaderLink, request: Request) -> None:
        self._reader = reader
        self._link = link
        self._request = request

    def result(self) -> Batch:
        """Wait for the batch.

        Returns:
            As `H5Source.read`.

        Raises:
            FeedError: Reading failed, or the reader process ended.
        """
        request = self._request
        while not request.is_done:
            self._reader._receive(self._link)
        if request.error is not None:
            try:
                raise request.error
            finally:
                # An error that its own traceback leads back to keeps all that the thread held alive.
                request.error = FeedError("this read failed, which was said before; read again.")
                del request
        return {
            name: request.out[name] if name in self._reader._specs else request.objects[name]
            for name in self._reader._names
        }


class ReaderProcess:
    """Reads batches of a source in another process, into memory that both share.

    The process is a fresh interpreter: it does not run the user's script again, is never forked from one that has
    threads or a GPU, imports no Lightning, and takes as long to start as importing torch takes; it is started at once,
    and the first read waits for it. It ends with `close`, with this object, with the interpreter, and with the death of
    this process however that comes. Signals meant for a training job do not reach it.

    It belongs to the process that made it: in a forked one, and after it ended by accident, the next read starts
    another. Used by one thread at a time.

    Attributes:
        pool: Where the tensors to read to come from; another pool may be put in its place between reads.

    Example:
        >>> import numpy as np
        >>> source, indices = H5Source("train.h5"), np.array([7, 3])
        >>> pool = SharedBufferPool(source.specs, most_rows=256, num_buffers=4)
        >>> with ReaderProcess(source, pool) as reader:
        ...     batch = reader.read(indices, pool.acquire(len(indices)))
        >>> source.close()
    """

    def __init__(self, source: H5Source, pool: SharedBufferPool) -> None:
        """Start the process, without waiting for it.

        Args:
            source: What to read; names and layouts are sent, nothing open.
            pool: Memory shared with the process.
        """
        self._source = source
        self._names = list(source.fields)
        self._specs = source.specs
        self._message = message_format(len(self._specs))
        self._process = os.getpid()
        self._lock = threading.RLock()
        self.pool = pool
        self._link: ReaderLink | None = ReaderLink(source)

    def read(self, indices: Indices, out: Mapping[str, torch.Tensor]) -> Batch:
        """Read samples by number.

        Args:
            indices: int64 (n,), any order, repeats allowed.
            out: Field name -> contiguous host tensor (n, *sample_shape) for every tensor field. Those that do not come
                from `pool` are filled by one more copy.

        Returns:
            The tensors of `out` and a list for each field that is not a tensor, in the order of the source's fields.
        """
        return self.begin(indices, out).result()

    def begin(self, indices: Indices, out: Mapping[str, torch.Tensor]) -> PendingRead:
        """Begin to read; reads are done in the order in which they were begun.

        Args:
            indices: As for `read`.
            out: As for `read`; not to be touched before the result is there.

        Returns:
            Where to get the batch.

        Raises:
            FeedError: The reader process ended.
            ValueError: More samples are asked for than the pool's buffers hold, or `out` does not fit them.
        """
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        self._refuse_misfits(indices, out)
        self._own()
        with self._lock:
            link = self._running()
            arena = self.pool.arena
            while not arena.free_requests:
                if not link.traffic.waiting:
                    raise ValueError("another reader uses the same pool; give each a pool of its own.")
                self._receive(link)
            request = Request(arena, arena.free_requests.pop(), out)
            link.traffic.waiting.append(request)
            try:
                if link.arena is not arena:
                    self._send_file(link, Kind.ARENA, arena.descriptor, arena.num_bytes)
                    link.arena = arena
                place = arena.put_indices(request.slot, indices)
                offsets = [request.place(name, out[name]) for name in self._specs]
                link.send(self._message.pack(Kind.READ, len(indices), place, *offsets))
            except OSError:
                raise self._ended(link) from None
            except BaseException:
                link.end()
                raise
            return PendingRead(self, link, request)

    def read_each(self, wanted: Iterable[Indices], num_ahead: int = 3) -> Iterator[Batch]:
        """Read batches one after the other; while one is taken, the next ones are being read.

        Beside a thread that holds the interpreter lock, this is what makes it fast: each time the lock is had, all
        batches that were finished in the meantime are there.

        Args:
            wanted: The samples of each batch, asked for as late as possible.
            num_ahead: Batches begun beside the one that is waited for, at most `NUM_REQUESTS` - 1.

        Yields:
            As `read`, in new tensors of `pool`.
        """
        begun: deque[PendingRead] = deque()
        for indices in wanted:
            begun.append(self.begin(indices, self.pool.acquire(len(indices))))
            if len(begun) > num_ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()

    def expect(self, indices: Indices, batch_samples: int = 1) -> None:
        """Tell the source in the process which samples come next. An error over that is the next read's.

        Args:
            indices: int64 (n,): the rest of an epoch, in order.
            batch_samples: Samples that one read will take, at most.

        Raises:
            FeedError: The reader process ended.
        """
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        self._own()
        with self._lock:
            link = self._running()
            file = memory_file(indices.nbytes)
            try:
                if indices.nbytes:
                    map_shared(file, indices.nbytes)[:] = indices.view(np.uint8)
                self._send_file(link, Kind.EXPECT, file, indices.nbytes, batch_samples)
            except OSError:
                raise self._ended(link) from None
            finally:
                os.close(file)

    def close(self) -> None:
        """End the process. Closing twice is allowed; the next read starts another."""
        self._own()
        link, self._link = self._link, None
        if link is None:
            return
        if link.process == os.getpid():
            link.stop()  # a thread that waits for an answer is woken and lets go of the lock
        with self._lock:
            link.end()

    def __enter__(self) -> Self:
        """The reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _own(self) -> None:
        """In a forked process, leave a lock that some thread of the other one may have held."""
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.RLock()

    def _running(self) -> ReaderLink:
        """The reader process that belongs to this process."""
        if self._link is None or self._link.process != os.getpid() or not self._link.end.alive:
            self.close()
            self._link = ReaderLink(self._source)
        return self._link

    def _refuse_misfits(self, indices: Indices, out: Mapping[str, torch.Tensor]) -> None:
        if len(indices) > self.pool.most_rows:
            raise ValueError(
                f"{len(indices)} samples asked of a reader whose buffers hold {self.pool.most_rows}; make the pool "
                f"with a larger most_rows."
            )
        for name, spec in self._specs.items():
            tensor, shape = out[name], (len(indices), *spec.row_shape)
            if tensor.shape != shape or tensor.dtype != spec.dtype:
                raise ValueError(
                    f"out[{name!r}] is {tuple(tensor.shape)} of {tensor.dtype}; expected {shape} of {spec.dtype}."
                )

    def _send_file(self, link: ReaderLink, kind: Kind, descriptor: int, num_bytes: int, number: int = 0) -> None:
        """Hand a file in memory over to the process."""
        message = self._message.pack(kind, num_bytes, number, *[0] * len(self._specs))
        sent = socket.send_fds(link.socket, [message], [descriptor])
        link.socket.sendall(message[sent:])

    def _receive(self, link: ReaderLink) -> None:
        """Take the next answer for the read that has waited longest."""
        with self._lock:
            if not link.traffic.waiting:
                return
            try:
                is_error, answer = link.receive()
            except OSError:
                self._ended(link)  # which tells those who wait
                return
            except BaseException:
                # An interruption in the middle of an answer: what comes next cannot be told apart.
                link.end()
                raise
            link.traffic.has_answered = True
            link.traffic.waiting.popleft().finish(is_error, answer)

    def _ended(self, link: ReaderLink) -> FeedError:
        """Say how the process came to its end, to every read that waits for it too."""
        if link.is_stopping or not link.end.alive:
            text = "the reader was closed while it was reading."
        else:
            text = f"the reader process {how_it_ended(link.wait_for_end())} (files: {', '.join(self._source.paths)})."
        for request in link.traffic.waiting:
            request.error = FeedError(text)
        link.end()
        return FeedError(text)
