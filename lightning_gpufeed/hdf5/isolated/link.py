"""The other end of a reader process: starts it, talks to it, ends it.

The process is started as a fresh program. A copy of this one (fork) would have locks of threads that do not exist in
it, and `multiprocessing` would run the user's script again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_gpufeed.device.shared_memory import SharedArena, memory_file
from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.isolated.server import ANSWER
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["ReaderLink", "Request", "how_it_ended"]

# PyDLL keeps the interpreter lock: these calls never wait.
_libc = ctypes.PyDLL(None, use_errno=True)
for _function in (_libc.send, _libc.recv):
    _function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
    _function.restype = ctypes.c_ssize_t

_GRACE_SECONDS = 0.5

# The package's own `__init__` imports Lightning, which the reader does not need; a bare package stands in for it.
_START = """
import signal, sys, types
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sys.path[:] = sys.argv[4:]
package = types.ModuleType("lightning_gpufeed")
package.__path__ = [sys.argv[3]]
sys.modules["lightning_gpufeed"] = package
from lightning_gpufeed.hdf5.isolated.server import serve
serve(int(sys.argv[1]), int(sys.argv[2]))
"""

_MEANINGS = {
    "SIGKILL": "It was killed from outside; most often the system or the job's limit ran out of memory (the "
    "system's log says so). Lower batch_size, num_slots or cache_bytes, or ask for more memory",
    "SIGBUS": "A file became shorter while it was mapped, or its disk failed. Write new data to another file and "
    "rename it; never change a file in place during training",
}
_FAULT = "That is a fault in a library. Read with isolate=False to see where it happens"


class Request:
    """One read under way; keeps all memory that the reader process writes to alive until the answer is there."""

    def __init__(self, arena: SharedArena, slot: int, out: Mapping[str, torch.Tensor]) -> None:
        self.arena = arena
        self.slot = slot
        self.out = out
        self.elsewhere: dict[str, int] = {}
        self.is_done = False
        self.objects: dict[str, list[Any]] = {}
        self.error: BaseException | None = None

    def place(self, name: str, tensor: torch.Tensor) -> int:
        """Where in the shared memory a field is to be written: to the tensor itself, or to be copied to it later."""
        offset = self.arena.offset_of(tensor)
        if offset is None:
            offset = self.elsewhere[name] = self.arena.request_buffer(self.slot, name)
        return offset

    def finish(self, is_error: bool, answer: Any) -> None:
        """Take the answer and give the request slot back."""
        try:
            if is_error:
                self.error = answer
                return
            self.objects = answer or {}
            for name, offset in self.elsewhere.items():
                tensor = self.out[name]
                if tensor.nbytes:
                    shared = torch.from_numpy(self.arena.memory[offset : offset + tensor.nbytes])
                    tensor.copy_(shared.view(tensor.dtype).view(tensor.shape))
        finally:
            self.release()

    def release(self) -> None:
        """Nothing is written any more."""
        self.is_done = True
        self.arena.free_requests.append(self.slot)


class Traffic:
    """What was asked of a reader process and not answered yet."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.has_answered = False


class ReaderLink:
    """A running reader process and what was asked of it."""

    def __init__(self, source: H5Source) -> None:
        """Start it; does not wait until it runs."""
        self.process = os.getpid()
        self.traffic = Traffic()
        self.arena: SharedArena | None = None
        self.is_stopping = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pickled = pickle.dumps(source, protocol=5)
        stdin = memory_file(len(pickled))
        try:
            with open(stdin, "wb", closefd=False) as file:
                file.write(pickled)
            os.lseek(stdin, 0, os.SEEK_SET)
            package = Path(__file__).parents[2]
            numbers = [str(theirs.fileno()), str(os.getpid())]
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *numbers, str(package), *_import_path()],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # One core, as the reading thread has; never the GPU; and no Ctrl-C, which is for this process.
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(stdin)
        self.socket = ours
        # What the process writes to is kept until it has ended, whoever ends it.
        self.end = weakref.finalize(self, _end, self.popen, ours, self.traffic, self.process)

    def wait_for_end(self) -> int | None:
        """The exit status of a process that is ending; None if it is not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=_GRACE_SECONDS)
        return self.popen.returncode

    def stop(self) -> None:
        """Tell the process to end, without waiting."""
        self.is_stopping = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(self, message: bytes) -> None:
        """Send without giving up the interpreter lock, unless the way is full, which a handful of requests never is."""
        sent = _libc.send(self.socket.fileno(), message, len(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if sent < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if sent < len(message):
            self.socket.sendall(message[max(0, sent) :])

    def receive(self) -> tuple[bool, Any]:
        """The next answer: whether it is an error, and what came with it. Gives the lock up only if it has to wait."""
        head = ctypes.create_string_buffer(ANSWER.size)
        received = _libc.recv(self.socket.fileno(), head, ANSWER.size, socket.MSG_DONTWAIT)
        view = memoryview(head).cast("B")
        self._fill(view[max(0, received) :])
        is_error, num_bytes = ANSWER.unpack(head.raw)
        if not num_bytes:
            return bool(is_error), None
        body = bytearray(num_bytes)
        self._fill(memoryview(body))
        return bool(is_error), pickle.loads(body)

    def _fill(self, view: memoryview) -> None:
        while view:
            received = self.socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            view = view[received:]


def _import_path() -> list[str]:
    """Where this interpreter looks for modules."""
    return [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]


# Reads of processes that could not be ended: their memory is never used again.
_lost_for_good: list[Request] = []


def _end(popen: subprocess.Popen[bytes], ours: socket.socket, traffic: Traffic, process: int) -> None:
    """End a reader process: it holds nothing that could be lost. Also called by the garbage collector."""
    if os.getpid() != process:
        ours.close()
        popen.returncode = 0  # not ours to wait for
        traffic.waiting.clear()
        return
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)
    # An idle one ends at once by itself; one that is starting or reading would not look before it is done.
    is_idle = traffic.has_answered and not traffic.waiting
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(timeout=_GRACE_SECONDS if is_idle else 0)
    if popen.returncode is None:
        popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(timeout=_GRACE_SECONDS)
    ours.close()
    waiting = list(traffic.waiting)
    traffic.waiting.clear()
    if popen.returncode is None:  # stuck in the kernel, in a file system that does not answer: it may still write
        _lost_for_good.extend(waiting)
    for request in waiting:
        request.error = request.error or FeedError("the reader was closed before this batch was read.")
        request.is_done = True
        if popen.returncode is not None:
            request.release()


def how_it_ended(code: int | None) -> str:
    """An exit status in words, and what to do."""
    if code is None:
        return "does not answer any more"
    if code >= 0:
        return f"ended by itself with status {code}; what it said went to the standard error output"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"number {-code}"
    return f"was ended by the signal {name}. {_MEANINGS.get(name, _FAULT)}"
