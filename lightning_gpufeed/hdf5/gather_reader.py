"""Gathers samples straight from mapped files: one call per field and batch, however many files there are."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.plan import GatherTable

__all__ = ["GatherReader"]

Indices = npt.NDArray[np.int64]

# Called through PyDLL, which keeps the interpreter lock: asking for a file's size must not cost a hand-over of it.
# Python's own mmap would hold a second descriptor for each file.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.lseek.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int)
_libc.lseek.restype = ctypes.c_int64
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class GatherReader:
    """Copies whole batches with `torch.index_select` over a view of the files as overlapping rows.

    The interpreter lock changes hands a constant number of times per batch. With one call per sample, a busy training
    loop would slow reading down a hundredfold.

    ::

        address   base                                   one address range: every mapped file lies in it
                  |....[ file 0 ]......[ file 1 ].....|
        row p          the sample_bytes bytes from position p on: rows overlap, stride 1
    """

    def __init__(self, layouts: Sequence[H5DatasetLayout]) -> None:
        """Map the files.

        Args:
            layouts: One raw-engine layout per file.

        Raises:
            FeedError: A file is not what it was when its layout was read.
        """
        self._sample_bytes = layouts[0].sample_bytes
        fills = [np.full(one.sample_shape, one.fill_value, dtype=one.dtype) for one in layouts]
        self._fills = torch.from_numpy(np.stack([np.frombuffer(fill.tobytes(), dtype=np.uint8) for fill in fills]))
        self._mapping: _Mapping | None = _Mapping(layouts, self._sample_bytes)
        base = self._mapping.base
        positions = []
        for layout, address in zip(layouts, self._mapping.addresses, strict=True):
            assert layout.block_offsets is not None
            offsets = layout.block_offsets
            positions.append(np.where(offsets < 0, np.int64(-1), offsets + (address - base)))
        self._table = GatherTable.build(
            [layout.num_samples for layout in layouts],
            [layout.chunk_rows for layout in layouts],
            positions,
            self._sample_bytes,
        )

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place; see `FieldReader.read_into`.

        Args:
            indices: int64 (n,) sample numbers.
            out: (n, *sample_shape), contiguous, host memory.

        Raises:
            FeedError: The reader is closed, or a file became shorter: reading on would kill the process.
        """
        # Held here until the copy is done, whatever another thread closes meanwhile.
        mapping = self._mapping
        if mapping is None:
            raise FeedError("the reader is closed; open another one.")
        if not out.numel():
            return
        files = self._table.files(indices)
        mapping.refuse_shrunk(files)
        positions = self._table.positions(indices)
        target = out.view(len(indices), -1).view(torch.uint8)
        missing = positions < 0
        if not missing.any():
            torch.index_select(mapping.rows, 0, torch.from_numpy(positions), out=target)
            return
        target.copy_(self._fills.index_select(0, torch.from_numpy(files)))
        if not missing.all():
            written = torch.from_numpy(np.flatnonzero(~missing))
            target.index_copy_(0, written, mapping.rows.index_select(0, torch.from_numpy(positions[~missing])))

    def close(self) -> None:
        """Unmap and close the files, once no read is under way any more."""
        self._mapping = None


class _Mapping:
    """The files, open and mapped, and the view over all of them. Closed by its last reference."""

    def __init__(self, layouts: Sequence[H5DatasetLayout], sample_bytes: int) -> None:
        self._guards: list[tuple[int, int, str]] = []
        self.addresses: list[int] = []
        weakref.finalize(self, _release, self._guards, self.addresses)
        end = max(self._map(layout) for layout in layouts)
        self.base = min(self.addresses)
        span = end - self.base
        # The bytes between two mappings are never touched: no position leads there.
        whole = torch.frombuffer((ctypes.c_uint8 * span).from_address(self.base), dtype=torch.uint8)
        self.rows = whole.as_strided((max(0, span - sample_bytes + 1), sample_bytes), (1, 1))

    def _map(self, layout: H5DatasetLayout) -> int:
        """Map one file; returns the address behind its end."""
        try:
            descriptor = os.open(layout.storage_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _explain(error, layout.storage_path, len(self._guards)) from error
        status = os.fstat(descriptor)
        self._guards.append((descriptor, status.st_size, layout.storage_path))
        stamp = next(stamp for stamp in layout.stamps if stamp.path == layout.storage_path)
        if (status.st_size, status.st_mtime_ns, status.st_ino) != (stamp.size_bytes, stamp.mtime_ns, stamp.inode):
            raise FeedError(
                f"{stamp.path} changed between reading its layout and opening it, so its samples may lie elsewhere "
                f"now. Build the loader or DataModule again to use the new file."
            )
        address = _libc.mmap(None, status.st_size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise _explain(OSError(number, os.strerror(number)), layout.storage_path, len(self._guards) - 1)
        self.addresses.append(address)
        return int(address) + status.st_size

    def refuse_shrunk(self, files: Indices) -> None:
        """Look at the files about to be read: a page past a file's end is a fatal signal, not an exception."""
        for number in {0} if len(self._guards) == 1 else set(files.tolist()):
            descriptor, size, path = self._guards[number]
            now = _libc.lseek(descriptor, 0, os.SEEK_END)
            if now < size:
                raise FeedError(
                    f"{path} became shorter while it was read: {size} bytes at the start, {now} now. "
                    f"Write new data to another file and rename it; never change a file in place during training."
                )


def _explain(error: OSError, path: str, num_open: int) -> OSError | FeedError:
    """Say what to do about a limit of the system."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return FeedError(
            f"{path} cannot be opened beside {num_open} other files of the dataset: the limit of open files is "
            f"reached. Raise it (ulimit -n), or pack the data into fewer files."
        )
    if error.errno == errno.ENOMEM:
        return FeedError(
            f"{path} cannot be mapped into memory: the process's address space is limited (ulimit -v). Raise the limit."
        )
    return error


def _release(guards: list[tuple[int, int, str]], addresses: list[int]) -> None:
    """Unmap and close."""
    for address, (_, size, _) in zip(addresses, guards, strict=False):
        _libc.munmap(address, size)
    for descriptor, _, _ in guards:
        os.close(descriptor)
    guards.clear()
    addresses.clear()
