"""What runs in the reader process: waits for requests, reads, answers.

::

    request   READ: kind, number of samples, place of the indices, place of each tensor field
              EXPECT: kind, bytes, samples of a batch   and a file: what comes next
              ARENA: kind, bytes                        and a file: the memory in which the places are from now on
    answer    is it an error, bytes that follow; then lists and errors, pickled   to READ only

The process ends when the other side is closed or its process is gone, in the middle of a read too. A thread watches a
handle on that process. A signal at its death would not do: it comes when the *thread* ends that started this process.
Nor would the end of the connection: a process that was forked from the parent keeps it open.
"""

from __future__ import annotations

import contextlib
import copyreg
import faulthandler
import io
import os
import pickle
import select
import socket
import struct
import sys
import threading
import time
import traceback
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.device.memory import TensorSpec
from lightning_gpufeed.device.shared_memory import map_shared
from lightning_gpufeed.errors import FeedError

__all__ = ["ANSWER", "Kind", "message_format", "serve"]

ANSWER = struct.Struct("<2q")
"""Is it an error; bytes that follow."""

_GRACE_SECONDS = 0.5


class Kind(IntEnum):
    """What a request is: memory to use from now on, samples that come next, or a read."""

    ARENA = 0
    EXPECT = 1
    READ = 2


def message_format(num_fields: int) -> struct.Struct:
    """How requests are written.

    Args:
        num_fields: Tensor fields of the source.

    Returns:
        Kind, count, place of the indices, and a place for each field.
    """
    return struct.Struct(f"<{3 + num_fields}q")


class _DisconnectedError(Exception):
    """The other side is gone."""


class _Server:
    """Carries out requests, one after the other."""

    def __init__(self, connection: socket.socket, source: Any) -> None:
        self._connection = connection
        self._source = source
        self._specs: dict[str, TensorSpec] = source.specs
        self._message = message_format(len(self._specs))
        self._arena: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Until the other side is gone."""
        while True:
            kind, count, place, offsets, files = self._next()
            try:
                if kind == Kind.READ:
                    self._answer(*self._read(count, place, offsets))
                elif kind == Kind.ARENA:
                    self._arena = map_shared(files[0], count)
                else:
                    self._expect(files[0], count, place)
            finally:
                for file in files:
                    os.close(file)

    def _next(self) -> tuple[int, int, int, list[int], list[int]]:
        """Wait for a whole request."""
        message, files = b"", list[int]()
        while len(message) < self._message.size:
            part, received, _, _ = socket.recv_fds(self._connection, self._message.size - len(message), 1)
            if not part:
                raise _DisconnectedError
            message += part
            files += received
        kind, count, place, *offsets = self._message.unpack(message)
        return kind, count, place, offsets, files

    def _read(self, count: int, place: int, offsets: list[int]) -> tuple[bool, bytes]:
        """Read a batch into place; what is no tensor is returned, pickled."""
        try:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            indices = np.frombuffer(self._arena, np.int64, count, place).copy()
            out = {
                name: self._tensor(spec, count, offset)
                for (name, spec), offset in zip(self._specs.items(), offsets, strict=True)
            }
            batch = self._source.read(indices, out)
            objects = {name: values for name, values in batch.items() if name not in out}
            return False, _pickled(objects) if objects else b""
        except Exception as error:
            return True, _pickled_error(error)

    def _tensor(self, spec: TensorSpec, count: int, offset: int) -> torch.Tensor:
        num_bytes = count * spec.row_bytes
        if not num_bytes:
            return torch.empty((count, *spec.row_shape), dtype=spec.dtype, device="cpu")
        flat = torch.from_numpy(self._arena[offset : offset + num_bytes])
        return flat.view(spec.dtype).view(count, *spec.row_shape)

    def _expect(self, file: int, num_bytes: int, batch_samples: int) -> None:
        """Tell the source what comes next. There is no answer: an error is the next read's."""
        try:
            none = np.empty(0, dtype=np.int64)
            indices = map_shared(file, num_bytes).view(np.int64) if num_bytes else none
            self._source.expect(indices, batch_samples)
        except Exception as error:
            self._failure = error

    def _answer(self, is_error: bool, body: bytes) -> None:
        self._connection.sendall(ANSWER.pack(is_error, len(body)) + body)


def _pickled(objects: Any) -> bytes:
    """Lists of strings and tensors; these as numpy arrays, so that they are sent by value."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        torch.Tensor: lambda tensor: (torch.from_numpy, (tensor.contiguous().numpy(),)),
    }
    pickler.dump(objects)
    return buffer.getvalue()


def _pickled_error(error: Exception) -> bytes:
    """An error with its own type and text, and where it came from as a note."""
    error.add_note("in the reader process:\n" + "".join(traceback.format_exception(error)).rstrip())
    try:
        pickled = pickle.dumps(error)
        if str(pickle.loads(pickled)) == str(error):
            return pickled
    except Exception:  # a class of its own kind: then its name and text have to do
        pass
    stranger = FeedError(f"{type(error).__name__}: {error}")
    stranger.__notes__ = error.__notes__
    return pickle.dumps(stranger)


def _end_with(parent: int, connection: socket.socket) -> None:
    """Body of a thread: end this process soon after the parent, or its end of the connection, is gone."""
    watch = select.poll()
    watch.register(connection, select.POLLRDHUP)
    with contextlib.suppress(OSError):  # a kernel without it
        watch.register(os.pidfd_open(parent), select.POLLIN)
    if os.getppid() == parent:
        watch.poll()
    time.sleep(_GRACE_SECONDS)  # the main thread may be able to close its files
    os._exit(0)


def serve(descriptor: int, parent: int) -> None:
    """Serve the parent until it is gone, then end the process.

    Args:
        descriptor: One end of a pair of UNIX sockets.
        parent: Its process number; the source is read from the standard input.
    """
    faulthandler.enable()
    torch.set_num_threads(1)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with, args=(parent, connection), daemon=True).start()
    source = None
    try:
        source = pickle.load(sys.stdin.buffer)
        _Server(connection, source).run()
    except (_DisconnectedError, ConnectionError):
        pass
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    with contextlib.suppress(Exception):
        if source is not None:
            source.close()
    os._exit(0)  # nothing here needs the interpreter's own end, which takes its time
