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
from lightning_gpufeed.hdf5.readers import mapped_guard
from lightning_gpufeed.hdf5.readers.byte_file import refuse_changed, shorter_text
from lightning_gpufeed.hdf5.readers.rows import put_rows

__all__ = ["GatherReader", "explain_limit", "file_size"]

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
            FeedError: The reader is closed, or a file became shorter or unreadable. What is in `out` is then undefined.
        """
        # Held here until the copy is done, whatever another thread closes meanwhile.
        mapping = self._mapping
        if mapping is None:
            raise FeedError("the reader is closed; open another one.")
        if not out.numel():
            return
        files = self._table.files(indices)
        touched = mapping.touched(files)
        mapping.prepare(touched)
        self._copy(mapping, files, self._table.positions(indices), out.view(len(indices), -1).view(torch.uint8))
        # What is whole now was whole when it was read.
        mapping.refuse_lost(touched)

    def _copy(self, mapping: _Mapping, files: Indices, positions: Indices, target: torch.Tensor) -> None:
        """Copy rows from the mapping, and fill values where nothing was written."""
        missing = positions < 0
        if not missing.any():
            torch.index_select(mapping.rows, 0, torch.from_numpy(positions), out=target)
            return
        target.copy_(self._fills.index_select(0, torch.from_numpy(files)))
        if not missing.all():
            written = mapping.rows.index_select(0, torch.from_numpy(positions[~missing]))
            put_rows(target, np.flatnonzero(~missing), written)

    def expect(self, indices: Indices, batch_samples: int = 1) -> None:
        """Nothing to prepare: the kernel has it in memory.

        Args:
            indices: int64 (n,) sample numbers.
            batch_samples: Samples read at a time.
        """

    def rest(self) -> None:
        """There are no threads."""

    def close(self) -> None:
        """Unmap and close the files, once no read is under way any more."""
        self._mapping = None


class _Mapping:
    """The files, open and mapped, and the view over all of them. Closed by its last reference."""

    def __init__(self, layouts: Sequence[H5DatasetLayout], sample_bytes: int) -> None:
        self._files: list[tuple[int, int, str]] = []
        self._tokens: list[int] = []
        self.addresses: list[int] = []
        self._is_guarded = mapped_guard.is_guarded()
        weakref.finalize(self, _release, self._files, self._tokens, self.addresses)
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
            raise explain_limit(error, layout.storage_path, len(self._files)) from error
        status = os.fstat(descriptor)
        self._files.append((descriptor, status.st_size, layout.storage_path))
        refuse_changed(layout.storage_stamp, status)
        address = _libc.mmap(None, status.st_size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise explain_limit(OSError(number, os.strerror(number)), layout.storage_path, len(self._files) - 1)
        self.addresses.append(address)
        if self._is_guarded:
            self._tokens.append(mapped_guard.guard(address, status.st_size))
        return int(address) + status.st_size

    def touched(self, files: Indices) -> set[int]:
        """Give the files of a batch, each once."""
        return {0} if len(self._files) == 1 else set(files.tolist())

    def prepare(self, touched: set[int]) -> None:
        """See to it that a page past a file's end will not be a fatal signal."""
        if self._is_guarded:
            mapped_guard.watch()
        else:
            self._refuse_shrunk(touched)

    def refuse_lost(self, touched: set[int]) -> None:
        """Refuse what was copied if zeros may be in it: in lost pages, or behind the end of a file in its last page."""
        self._refuse_shrunk(touched)
        for number in touched if self._is_guarded else ():
            if mapped_guard.is_lost(self._tokens[number]):
                raise FeedError(
                    f"{self._files[number][2]} could not be read: its disk or server does not give some of its pages, "
                    f"or it was cut short for a moment. Look at the system's log, then start again."
                )

    def _refuse_shrunk(self, touched: set[int]) -> None:
        """Look at the files' sizes."""
        for number in touched:
            descriptor, size, path = self._files[number]
            now = file_size(descriptor)
            if now < size:
                raise FeedError(shorter_text(path, size, now))


def file_size(descriptor: int) -> int:
    """Size of an open file now, without giving the interpreter lock away.

    Args:
        descriptor: The file. Its position moves to the end.

    Returns:
        Bytes.
    """
    return int(_libc.lseek(descriptor, 0, os.SEEK_END))


def explain_limit(error: OSError, path: str, num_open: int) -> OSError | FeedError:
    """Say what to do about a limit of the system.

    Args:
        error: What the system answered.
        path: The file it was asked for.
        num_open: Files of the dataset that are open already.

    Returns:
        The error with the cure, or `error` itself where it is about something else.
    """
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


def _release(files: list[tuple[int, int, str]], tokens: list[int], addresses: list[int]) -> None:
    """Unmap and close."""
    for token in tokens:
        mapped_guard.release(token)
    for address, (_, size, _) in zip(addresses, files, strict=False):
        _libc.munmap(address, size)
    for descriptor, _, _ in files:
        os.close(descriptor)
    files.clear()
    tokens.clear()
    addresses.clear()
