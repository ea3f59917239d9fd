"""What the queues of reads have in common: the methods each has, system calls by number, and waiting for memory.

All calls go through the C library, with the interpreter lock released where they may wait.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["MAP_FAILED", "Addresses", "Indices", "Patience", "Queue", "call", "call_numbers", "libc"]

Indices = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

libc = ctypes.CDLL(None, use_errno=True)
_syscall = libc.syscall
# The same, keeping the interpreter lock: to get it back can take milliseconds.
_quick_syscall = ctypes.PyDLL(None, use_errno=True).syscall
for _function in (_syscall, _quick_syscall):
    _function.argtypes = (ctypes.c_long,) * 7
    _function.restype = ctypes.c_long
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
libc.mmap.restype = ctypes.c_void_p
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
libc.pread.restype = ctypes.c_ssize_t
MAP_FAILED = ctypes.c_void_p(-1).value

_AIO_NUMBERS = {
    "x86_64": {"io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209},
    "aarch64": {"io_setup": 0, "io_destroy": 1, "io_getevents": 4, "io_submit": 2},
}
_URING_NUMBERS = {"io_uring_setup": 425, "io_uring_enter": 426}  # the same on both
_TRIES = 2000  # a kernel short of memory is asked again for about two seconds


class Queue(Protocol):
    """Takes lists of reads."""

    def __init__(self, num_requests: int) -> None:
        """Open the queue for lists of up to `num_requests`."""

    def run(self, files: Indices, offsets: Indices, addresses: Addresses, sizes: Indices) -> Indices:
        """Read once for each request.

        Args:
            files: int64 (n,) descriptors.
            offsets: int64 (n,).
            addresses: uint64 (n,).
            sizes: int64 (n,), each below 2 GiB.

        Returns:
            int64 (n,): bytes read, which may be fewer than asked for, or a negative error number.
        """

    def advise(self, files: Indices, offsets: Indices, sizes: Indices) -> None:
        """Tell the kernel what will be read soon; it does not have to be there when this returns.

        Args:
            files: int64 (n,) descriptors.
            offsets: int64 (n,).
            sizes: int64 (n,), each below 2 GiB.
        """

    def settle(self) -> None:
        """Wait until nothing is under way, and forget the answers."""

    def close(self) -> None:
        """Give the queue back. Closing twice is allowed."""


def call_numbers() -> dict[str, int]:
    """Numbers of the system calls on this machine.

    Returns:
        Name -> number.

    Raises:
        OSError: They are not known.
    """
    machine = platform.machine()
    if sys.platform != "linux" or sys.maxsize < 2**32 or machine not in _AIO_NUMBERS:
        raise OSError(errno.ENOSYS, f"system calls are known for 64-bit Linux on x86_64 and aarch64, not {machine}")
    return _AIO_NUMBERS[machine] | _URING_NUMBERS


def call(number: int, *arguments: int, is_quick: bool = False) -> int:
    """Make a system call.

    Args:
        number: Which.
        arguments: Up to six.
        is_quick: Whether it will not wait for anything; the interpreter lock is then kept.

    Returns:
        Its result, or a negative error number.
    """
    function = _quick_syscall if is_quick else _syscall
    result = int(function(number, *arguments, *(0,) * (6 - len(arguments))))
    return result if result >= 0 else -ctypes.get_errno()


class Patience:
    """Waits a little longer each time a call finds no memory, up to a limit. A signal costs nothing."""

    def __init__(self) -> None:
        self._tries = 0

    def wait(self, call: str, code: int) -> None:
        """Return to try again, or raise.

        Args:
            call: Name of the system call.
            code: Its error number.

        Raises:
            OSError: It is no passing error, or it did not pass.
        """
        self._tries += code != errno.EINTR
        if code not in (errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EBUSY) or self._tries > _TRIES:
            raise OSError(code, f"{call}: {os.strerror(code)}")
        if code != errno.EINTR:
            time.sleep(0.001)
