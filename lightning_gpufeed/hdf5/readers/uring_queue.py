"""A queue of reads by io_uring: requests and answers lie in memory shared with the kernel.

Source: man pages io_uring(7), io_uring_setup(2), io_uring_enter(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.hdf5.readers.read_calls import MAP_FAILED, Addresses, Indices, Patience, call, call_numbers, libc

__all__ = ["UringQueue"]

_SQE = np.dtype(
    [("operation", "u1"), ("flags", "u1"), ("priority", "u2"), ("file", "i4"), ("offset", "u8"), ("address", "u8"),
     ("size", "u4"), ("advice", "u4"), ("data", "u8"), ("rest", "u8", (3,))]
)  # fmt: skip
_CQE = np.dtype([("data", "u8"), ("result", "i4"), ("flags", "u4")])
_OP_READ, _OP_FADVISE = 22, 24
_ENTER_GETEVENTS = 1
_FEATURES = 0b11  # one mapping for both rings; no answer is ever dropped
_OFFSET_SQES = 0x10000000
_U32 = 0xFFFFFFFF


class UringQueue:
    """io_uring, used in the simplest way: fill, hand over, wait for all.

    ::

        requests (SQEs)    head ......... tail      the kernel moves the head, we the tail
        answers  (CQEs)    head ......... tail      we move the head, the kernel the tail

    All four count from 0 and never wrap but at 2**32, and each request gets exactly one answer: so
    `requests head - answers tail` is the number under way, whatever was interrupted where.

    Memory order: without a kernel thread that polls, the kernel looks at our entries and tail only inside
    io_uring_enter, called by the thread that wrote them, so it sees them in program order on any machine. Answers may
    be written on another core. The kernel counts them with a read barrier before it ends a wait, and they are read
    here only after a wait that ended well; loads after the call cannot come before the loads inside it.
    """

    def __init__(self, num_requests: int) -> None:
        """Make the rings.

        Args:
            num_requests: Most requests at once.

        Raises:
            OSError: The kernel does not know io_uring, forbids it, or lacks what is needed.
        """
        self._numbers = call_numbers()
        parameters = (ctypes.c_uint32 * 30)()
        descriptor = call(self._numbers["io_uring_setup"], num_requests, ctypes.addressof(parameters))
        if descriptor < 0:
            raise OSError(-descriptor, f"io_uring_setup: {os.strerror(-descriptor)}")
        self._descriptor = descriptor
        maps: list[tuple[int, int]] = []
        self._release = weakref.finalize(self, _release_uring, descriptor, maps)
        self._release.atexit = False  # another thread may still read then; the system clears up
        if parameters[5] & _FEATURES != _FEATURES:
            self.close()
            raise OSError(errno.ENOSYS, "io_uring: the kernel is too old")
        num_sqes, num_cqes = parameters[0], parameters[1]
        sq, cq = list(parameters[10:20]), list(parameters[20:30])
        try:
            ring = self._map(maps, max(sq[6] + num_sqes * 4, cq[5] + num_cqes * _CQE.itemsize), 0)
            self._sqes = self._map(maps, num_sqes * _SQE.itemsize, _OFFSET_SQES).view(_SQE)
        except OSError:
            self.close()
            raise
        self._sq_head, self._sq_tail, self._cq_head, self._cq_tail = (
            ring[at : at + 4].view("u4") for at in (sq[0], sq[1], cq[0], cq[1])
        )
        self._sq_mask = int(ring[sq[2] : sq[2] + 4].view("u4")[0])
        self._cq_mask = int(ring[cq[2] : cq[2] + 4].view("u4")[0])
        self._cqes = ring[cq[5] : cq[5] + num_cqes * _CQE.itemsize].view(_CQE)
        slots = ring[sq[6] : sq[6] + num_sqes * 4].view("u4")
        self._counts = np.arange(num_sqes, dtype=np.int64)
        # Request i of the ring is always entry i.
        slots[:] = self._counts

    def _map(self, maps: list[tuple[int, int]], num_bytes: int, offset: int) -> npt.NDArray[np.uint8]:
        """Map a part of the rings. Python's own mmap would hold a second descriptor."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        address = libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._descriptor, offset)
        if address == MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"io_uring: mmap: {os.strerror(ctypes.get_errno())}")
        maps.append((address, num_bytes))
        return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), dtype=np.uint8)

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
        return self._run(_OP_READ, 0, files, offsets, addresses, sizes)

    def advise(self, files: Indices, offsets: Indices, sizes: Indices) -> None:
        """Tell the kernel what will be read soon; see `Queue.advise`.

        Args:
            files: int64 (n,) descriptors.
            offsets: int64 (n,).
            sizes: int64 (n,).
        """
        nowhere = np.zeros(len(offsets), dtype=np.uint64)
        self._run(_OP_FADVISE, os.POSIX_FADV_WILLNEED, files, offsets, nowhere, sizes)

    def _run(
        self, operation: int, advice: int, files: Indices, offsets: Indices, addresses: Addresses, sizes: Indices
    ) -> Indices:
        """Fill the ring, hand it over, and put the answers in the order of the requests."""
        num = len(offsets)
        tail = int(self._sq_tail[0])
        first = tail & self._sq_mask
        # In one piece unless it runs over the end of the ring.
        at: Any = slice(first, first + num)
        if first + num > self._sq_mask + 1:
            at = (first + self._counts[:num]) & self._sq_mask
        entries = self._sqes
        entries["operation"][at] = operation
        entries["advice"][at] = advice
        entries["file"][at] = files
        entries["offset"][at] = offsets
        entries["address"][at] = addresses
        entries["size"][at] = sizes
        entries["data"][at] = self._counts[:num]
        self._sq_tail[0] = (tail + num) & _U32
        self._hand_over()
        head = int(self._cq_head[0])
        answers = self._cqes[(head + self._counts[:num]) & self._cq_mask]
        self._cq_head[0] = (head + num) & _U32
        results = np.empty(num, dtype=np.int64)
        results[answers["data"].astype(np.int64)] = answers["result"]
        return results

    def _hand_over(self) -> None:
        """Hand over what is in the ring and wait for all answers."""
        patience = Patience()
        while True:
            num_new = (int(self._sq_tail[0]) - int(self._sq_head[0])) & _U32
            num_wanted = (int(self._sq_tail[0]) - int(self._cq_head[0])) & _U32
            # The kernel does not wait where it could not take all: then there is another round.
            enter = self._numbers["io_uring_enter"]
            num_there = (int(self._cq_tail[0]) - int(self._cq_head[0])) & _U32
            is_quick = not num_new and num_there == num_wanted
            got = call(enter, self._descriptor, num_new, num_wanted, _ENTER_GETEVENTS, is_quick=is_quick)
            if got < 0:
                patience.wait("io_uring_enter", -got)
            elif not num_new:
                return  # a wait that no signal cut short

    def settle(self) -> None:
        """Wait until nothing is under way, and forget the answers."""
        # What was not handed over yet never will be: the kernel looks at the tail only when called.
        self._sq_tail[0] = self._sq_head[0]
        self._hand_over()
        self._cq_head[0] = self._cq_tail[0]

    def close(self) -> None:
        """Give the rings back. Closing twice is allowed."""
        self._release()


def _release_uring(descriptor: int, maps: list[tuple[int, int]]) -> None:
    """Unmap and close: in a forked child its own copies only, the parent's rings live on."""
    for address, num_bytes in maps:
        libc.munmap(address, num_bytes)
    maps.clear()
    os.close(descriptor)
