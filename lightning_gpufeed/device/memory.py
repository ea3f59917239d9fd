"""Host buffers that batches are read into: recycled when nobody holds them any more, pinned for a GPU."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["HostBufferPool", "TensorSpec", "refuse_too_many_rows"]

_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one row of a tensor.

    Attributes:
        row_shape: Shape without the first axis.
        dtype: Element type.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.row_shape) * self.dtype.itemsize


def refuse_too_many_rows(num_rows: int, most_rows: int) -> None:
    """Make sure that a batch fits into a buffer.

    Args:
        num_rows: Rows asked for.
        most_rows: Rows of a buffer.

    Raises:
        ValueError: It does not.
    """
    if num_rows > most_rows:
        raise ValueError(
            f"{num_rows} rows asked of a pool whose buffers hold {most_rows}; make the pool with a larger most_rows."
        )


class HostBufferPool:
    """Hands out sets of host tensors and takes the memory of each back when the last reference to it is gone.

    First-touch page faults halve the rate of filling fresh memory, so buffers are kept. A buffer is never
    written to again while anybody still holds a tensor, a view or a numpy array on it: a user may keep
    batches in a list, and then simply gets fresh memory for the next ones. Every field has buffers of its own, so
    that keeping the labels does not keep the images.

    * Pageable memory is recycled here: the array behind a tensor is watched by a weak reference.
    * Pinned memory is recycled by torch's host allocator, which also waits for copies to the device that are
      still under way on any stream.

    Example:
        >>> pool = HostBufferPool({"x": TensorSpec((3,), torch.uint8)}, most_rows=4, num_buffers=2)
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
            num_buffers: How many unused buffers are kept for each name.
            is_pinned: Whether to use page-locked memory; needs a GPU.
        """
        self._specs = dict(specs)
        self.most_rows = most_rows
        self._num_buffers = num_buffers
        self._is_pinned = is_pinned
        self._free: dict[str, deque[np.ndarray[Any, Any]]] = {name: deque() for name in specs}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def acquire(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Get one set of tensors with undefined contents.

        Args:
            num_rows: Rows of every tensor, at most `most_rows`.

        Returns:
            Name -> contiguous tensor (num_rows, *row_shape) in host memory; a `ValueError` for more rows than planned.
        """
        refuse_too_many_rows(num_rows, self.most_rows)
        tensors = {}
        for name, spec in self._specs.items():
            num_bytes = num_rows * spec.row_bytes
            if num_bytes:
                flat = self._memory(name, self.most_rows * spec.row_bytes)[:num_bytes].view(spec.dtype)
            else:
                flat = torch.empty(0, dtype=spec.dtype, device="cpu")
            tensors[name] = flat.view(num_rows, *spec.row_shape)
        return tensors

    def _memory(self, name: str, num_bytes: int) -> torch.Tensor:
        """Bytes for one tensor: a view of a buffer whose death gives the buffer back, or pinned memory."""
        if self._is_pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        try:
            buffer = self._free[name].popleft()
        except IndexError:
            buffer = _aligned(num_bytes)
        lease = buffer.view()
        # torch keeps `lease` alive as long as any tensor shares this memory, so its end is the tensor's end.
        self._watched[id(lease)] = weakref.ref(lease, _GiveBack(self, name, id(lease), buffer))
        return torch.from_numpy(lease)


def _aligned(num_bytes: int) -> np.ndarray[Any, Any]:
    """Memory at a place as torch has it, but from NumPy, which asks for large pages: a fault each, not one per 4 kB."""
    memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]


class _GiveBack:
    """Returns a buffer to its pool when the lease on it dies, if the pool still exists."""

    def __init__(self, pool: HostBufferPool, name: str, lease_id: int, buffer: np.ndarray[Any, Any]) -> None:
        self._pool = weakref.ref(pool)
        self._name = name
        self._lease_id = lease_id
        self._buffer = buffer

    def __call__(self, _: object) -> None:
        pool = self._pool()
        if pool is None:
            return
        # Single dict and deque operations: atomic, whichever thread drops the last reference.
        pool._watched.pop(self._lease_id, None)
        free = pool._free[self._name]
        if len(free) < pool._num_buffers:
            free.append(self._buffer)
