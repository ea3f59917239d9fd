"""Host buffers that another process of this machine writes to: recycled when nobody holds them any more.

::

    arena    | request 0: indices, x, y | request 1 ... | x 0 | x 1 | ... | y 0 | y 1 | ... |
              a nameless file in memory, mapped by both processes

The file has no name anywhere, so the system takes the memory back by itself when both processes are gone, however
they end; nothing stays behind in /dev/shm.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.device.memory import HostBufferPool, TensorSpec, refuse_too_many_rows

__all__ = ["NUM_REQUESTS", "SharedArena", "SharedBufferPool", "map_shared", "memory_file"]

NUM_REQUESTS = 8
"""Requests to the other process that can be under way at once."""

# More page-locked buffers than the ring needs, so that the devices are not waited for at every batch.
_MORE_PINNED = 4

_cuda: Any = torch.cuda  # partly without types
_num_forks = 0


def _count_fork() -> None:
    """Note that this process was forked, or came from a fork."""
    global _num_forks
    _num_forks += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork, after_in_child=_count_fork)


def memory_file(num_bytes: int) -> int:
    """Make a nameless file in memory.

    Args:
        num_bytes: Its size; pages that are never touched cost nothing.

    Returns:
        Its file descriptor, which programs started from here do not inherit.
    """
    descriptor = os.memfd_create("gpufeed", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_shared(descriptor: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Map a file of `memory_file`; what one process writes, the others see.

    Args:
        descriptor: The file.
        num_bytes: How much of it, from its start.

    Returns:
        uint8 (num_bytes,), writable; unmapped when the last array over it is gone.
    """
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)


class SharedArena:
    """The memory of a pool: where in it the buffers lie, and which of them are free.

    Attributes:
        descriptor: The file in memory, open as long as this object lives.
        memory: uint8 (num_bytes,): all of it.
        is_pinned: Whether the memory is page-locked for a GPU.
        free_requests: Numbers of the request slots that are not in use.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], most_rows: int, num_buffers: int, *, is_pinned: bool) -> None:
        """Take the memory.

        Args:
            specs: Name -> row shape and dtype.
            most_rows: Rows of each buffer.
            num_buffers: Buffers for each name.
            is_pinned: Whether to page-lock it; `is_pinned` then tells whether that succeeded.
        """
        sizes = {name: _whole_pages(most_rows * spec.row_bytes) for name, spec in specs.items()}
        self._index_bytes = _whole_pages(most_rows * 8)
        self._request_offsets: list[dict[str, int]] = []
        end = 0
        for _ in range(NUM_REQUESTS):
            offsets = {"": end}
            end += self._index_bytes
            for name, size in sizes.items():
                offsets[f"/{name}"] = end
                end += size
            self._request_offsets.append(offsets)
        self._first_buffer = end
        self.free: dict[str, list[int]] = {}
        for name, size in sizes.items():
            self.free[name] = [end + number * size for number in range(num_buffers)]
            end += num_buffers * size
        self.returned: dict[str, list[int]] = {name: [] for name in specs}
        self.free_requests = list(range(NUM_REQUESTS))
        self.descriptor = memory_file(end)
        weakref.finalize(self, os.close, self.descriptor)
        self.memory = map_shared(self.descriptor, end)
        self._bytes = self.memory.data
        self._address = int(self.memory.ctypes.data)
        self.is_pinned = is_pinned and _page_lock(self.memory, self._first_buffer)

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return len(self.memory)

    def put_indices(self, request: int, indices: npt.NDArray[np.int64]) -> int:
        """Write sample numbers to a request's place.

        Args:
            request: Number of the request slot.
            indices: int64 (n,), at most as many as a buffer has rows.

        Returns:
            Where they are, in bytes from the start.

        Raises:
            ValueError: There are too many.
        """
        offset = self._request_offsets[request][""]
        if indices.nbytes > self._index_bytes:
            raise ValueError(f"{len(indices)} samples asked at once; expected at most {self._index_bytes // 8}.")
        if indices.nbytes:
            # Not by numpy, which lets go of the interpreter lock for more than a few hundred elements.
            self._bytes[offset : offset + indices.nbytes] = np.ascontiguousarray(indices).data.cast("B")
        return offset

    def request_buffer(self, request: int, name: str) -> int:
        """Where a request's own buffer for a field begins, for tensors that lie outside of this memory."""
        return self._request_offsets[request][f"/{name}"]

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor of this memory begins, in bytes from the start; None if it lies elsewhere."""
        offset = tensor.data_ptr() - self._address
        is_inside = self._first_buffer <= offset and offset + tensor.nbytes <= len(self.memory)
        return offset if is_inside and tensor.is_contiguous() else None

    def take(self, name: str) -> int | None:
        """Take a free buffer of a field; None if there is none."""
        free = self.free[name]
        if not free and self.is_pinned and self.returned[name]:
            self._settle()
        try:
            return free.pop()
        except IndexError:
            return None

    def give_back(self, name: str, offset: int) -> None:
        """Take a buffer back that nobody holds any more; called by whichever thread dropped it, so one operation."""
        (self.returned if self.is_pinned else self.free)[name].append(offset)

    def _settle(self) -> None:
        """Wait until no copy to a device can be reading what was given back until now."""
        counts = {name: len(returned) for name, returned in self.returned.items()}
        _wait_for_devices()
        for name, count in counts.items():
            self.free[name] += self.returned[name][:count]
            del self.returned[name][:count]


class SharedBufferPool:
    """As `HostBufferPool`, in memory that a reader process can write to; same contract.

    A buffer is never written to again while anybody still holds a tensor, a view or a numpy array on it. When all of
    them are held, batches come in memory of this process alone, and whoever fills them copies once more: a caller may
    keep any number.

    After a fork both processes have the buffers that were held at that moment, but neither knows when the other lets
    go. They are left to those who hold them, and the pool takes new memory.

    With a GPU the memory is page-locked. torch does not know this memory, so it cannot tell when copies from it are
    over; a buffer that was given back is used again only after the devices finished what was queued till then.

    Attributes:
        most_rows: Largest number of rows that can be asked for.

    Example:
        >>> pool = SharedBufferPool({"x": TensorSpec((3,), torch.uint8)}, most_rows=4, num_buffers=2)
        >>> pool.acquire(4)["x"].shape
        torch.Size([4, 3])
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], most_rows: int, num_buffers: int, *, is_pinned: bool = False
    ) -> None:
        """Plan the buffers; memory is taken at the first use of each.

        Args:
            specs: Name -> row shape and dtype.
            most_rows: Largest number of rows that will be asked for.
            num_buffers: Shared buffers for each name. Requests under way have theirs on top.
            is_pinned: Whether to use page-locked memory; needs a GPU.
        """
        self._specs = dict(specs)
        self._dtypes = {
            name: torch.empty(0, dtype=spec.dtype, device="cpu").numpy().dtype for name, spec in specs.items()
        }
        self.most_rows = most_rows
        self._num_buffers = num_buffers + (_MORE_PINNED if is_pinned else 0)
        self._is_pinned = is_pinned
        self._beyond = {
            name: HostBufferPool({name: spec}, most_rows, num_buffers, is_pinned=is_pinned)
            for name, spec in specs.items()
        }
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._arena: SharedArena | None = None
        self._arena_forks = -1

    @property
    def arena(self) -> SharedArena:
        """The memory of today: another one after a fork."""
        if self._arena is None or self._arena_forks != _num_forks:
            self._arena_forks = _num_forks
            self._arena = SharedArena(self._specs, self.most_rows, self._num_buffers, is_pinned=self._is_pinned)
            if self._arena.is_pinned is not self._is_pinned:
                # Not page-locked after all: everything goes through torch's own pinned memory.
                self._arena.free = {name: [] for name in self._specs}
        return self._arena

    def acquire(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Get one set of tensors with undefined contents.

        Args:
            num_rows: Rows of every tensor, at most `most_rows`.

        Returns:
            Name -> contiguous tensor (num_rows, *row_shape) in host memory; a `ValueError` for more rows than planned.
        """
        refuse_too_many_rows(num_rows, self.most_rows)
        arena = self.arena
        return {name: self._tensor(arena, name, num_rows) for name in self._specs}

    def _tensor(self, arena: SharedArena, name: str, num_rows: int) -> torch.Tensor:
        """A tensor whose death gives its buffer back; made by numpy, which keeps the interpreter lock for this."""
        spec = self._specs[name]
        offset = arena.take(name) if num_rows * spec.row_bytes else None
        if offset is None:
            return self._beyond[name].acquire(num_rows)[name]
        lease: npt.NDArray[Any] = np.ndarray(
            (num_rows, *spec.row_shape), self._dtypes[name], buffer=arena.memory, offset=offset
        )
        # torch keeps `lease` alive as long as any tensor shares this memory, so its end is the tensor's end.
        self._watched[id(lease)] = weakref.ref(lease, _GiveBack(self, arena, name, offset, id(lease)))
        return torch.from_numpy(lease)


class _GiveBack:
    """Returns a buffer to its arena when the lease on it dies, if that is still the pool's."""

    def __init__(self, pool: SharedBufferPool, arena: SharedArena, name: str, offset: int, lease_id: int) -> None:
        self._pool = weakref.ref(pool)
        self._arena = weakref.ref(arena)
        self._place = (name, offset)
        self._lease_id = lease_id

    def __call__(self, _: object) -> None:
        pool, arena = self._pool(), self._arena()
        if pool is None:
            return
        # Single dict and list operations: atomic, whichever thread drops the last reference.
        pool._watched.pop(self._lease_id, None)
        if arena is not None and arena is pool._arena and pool._arena_forks == _num_forks:
            arena.give_back(*self._place)


def _whole_pages(num_bytes: int) -> int:
    """Rounded up, so that two buffers never share a page."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _page_lock(memory: npt.NDArray[np.uint8], first: int) -> bool:
    """Page-lock memory from byte `first` on until the array is gone; False if the driver declines."""
    if not torch.cuda.is_available() or first == len(memory):
        return False
    runtime = _cuda.cudart()
    address = int(memory.ctypes.data) + first
    if int(runtime.cudaHostRegister(address, len(memory) - first, 0)) != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes up the error, which the next kernel would be blamed for
        return False
    # The array dies before its mapping does.
    weakref.finalize(memory, _page_unlock, runtime, address, os.getpid())
    return True


def _page_unlock(runtime: Any, address: int, process: int) -> None:
    """Undo `_page_lock`, in the process that did it."""
    if os.getpid() == process:
        runtime.cudaHostUnregister(address)


def _wait_for_devices() -> None:
    """Wait for all that was queued until now on every device this process uses, without touching the others."""
    if not _cuda.is_initialized():
        return
    driver = None
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
    for device in range(torch.cuda.device_count()):
        flags, is_active = ctypes.c_uint(), ctypes.c_int(1)
        if driver is not None:
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
        if is_active.value:
            torch.cuda.synchronize(device)
