"""HDF5 over bytes that are somewhere else, without the deadlock that lies there.

::

    this thread     h5py (takes its one lock) -> HDF5 -> MetadataFile.readinto -> fetch -> waits for bytes
    other thread    collects garbage, finds an h5py object, waits for h5py's lock
                    if the bytes come from that thread, both wait for ever

So nothing is collected while a file is open here, one thread at a time may have one open, and `fetch` should not wait
for another thread. HDF5 also opens other files through the same bytes: what is linked to another file would be read
from this one, without an error. `refuse_other_files` tells.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h5py

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.remote.store import Part

__all__ = ["MetadataFile", "alone", "open_blocks", "refuse_other_files"]

_BLOCK_BYTES = 64 << 10
# Blocks fetched ahead of a reader that goes on and on, and blocks kept in memory.
_MOST_AHEAD = 64
_MOST_BLOCKS = 1024


class _Turn:
    """Whose turn it is, and what has to be put back afterwards. One per process, made anew after a fork."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.collects_again = False


_turn = _Turn()


def _forget_turn() -> None:
    """In a forked child: the thread whose turn it was is not there."""
    global _turn
    if _turn.collects_again:
        gc.enable()
    _turn = _Turn()


os.register_at_fork(after_in_child=_forget_turn)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One thread of the process at a time, and no automatic garbage collection meanwhile.

    Yields:
        When it is this thread's turn.
    """
    with _turn.lock:
        if not gc.isenabled():
            yield
            return
        _turn.collects_again = True
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            _turn.collects_again = False


class MetadataFile(io.RawIOBase):
    """What h5py takes for a file: blocks of 64 kB, fetched when they are first read.

    A reader that goes on from block to block gets more of them with each request.

    Attributes:
        failure: The first error of `fetch`, which HDF5 may have turned into another one, or into none.
        fetched: (offset, bytes) of the first thousand blocks that came from the store rather than from `find`.
    """

    def __init__(
        self,
        name: str,
        size_bytes: int,
        fetch: Callable[[Sequence[Part]], Sequence[bytes]],
        find: Callable[[int, int], bytes | memoryview | None],
    ) -> None:
        """Note where the bytes come from.

        Args:
            name: What h5py shows as the file's name.
            size_bytes: Length.
            fetch: Fetches parts of the file.
            find: (offset, size) -> bytes that are at hand, or None.
        """
        super().__init__()
        self._name = name
        self._size = size_bytes
        self._fetch = fetch
        self._find = find
        self._position = 0
        self._blocks: dict[int, bytes | memoryview] = {}
        self._next = 0
        self._ahead = 1
        self.failure: Exception | None = None
        self.fetched: list[tuple[int, bytes | memoryview]] = []

    def __repr__(self) -> str:
        return self._name

    def readable(self) -> bool:
        """As `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """As `io.RawIOBase`."""
        return True

    def tell(self) -> int:
        """As `io.RawIOBase`."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As `io.RawIOBase`."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """As `io.RawIOBase`."""
        out = memoryview(buffer).cast("B")
        start, stop = self._position, min(self._position + len(out), self._size)
        if start >= stop:
            return 0
        first, last = start // _BLOCK_BYTES, (stop - 1) // _BLOCK_BYTES
        try:
            self._load(first, last)
        except Exception as error:
            self.failure = self.failure or error
            raise
        for number in range(first, last + 1):
            begin = number * _BLOCK_BYTES
            low, high = max(start, begin), min(stop, begin + _BLOCK_BYTES)
            out[low - start : high - start] = self._blocks[number][low - begin : high - begin]
        self._position = stop
        while len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return stop - start

    def _load(self, first: int, last: int) -> None:
        """Have all blocks from `first` to `last`."""
        missing = [number for number in range(first, last + 1) if not self._has(number)]
        if not missing:
            return
        self._ahead = min(2 * self._ahead, _MOST_AHEAD) if missing[0] == self._next else 1
        end = min(max(last, missing[0] + self._ahead - 1), (self._size - 1) // _BLOCK_BYTES)
        missing += [number for number in range(last + 1, end + 1) if not self._has(number)]
        self._next = end + 1
        runs: list[list[int]] = []
        for number in missing:
            if runs and runs[-1][-1] == number - 1 and len(runs[-1]) < _MOST_AHEAD:
                runs[-1].append(number)
            else:
                runs.append([number])
        parts = [(run[0] * _BLOCK_BYTES, min((run[-1] + 1) * _BLOCK_BYTES, self._size)) for run in runs]
        for run, data in zip(runs, self._fetch(parts), strict=True):
            for place, number in enumerate(run):
                block = memoryview(data)[place * _BLOCK_BYTES : (place + 1) * _BLOCK_BYTES]
                self._blocks[number] = block
                if len(self.fetched) < _MOST_BLOCKS:
                    self.fetched.append((number * _BLOCK_BYTES, block))

    def _has(self, number: int) -> bool:
        """Whether a block is in memory, or at hand."""
        if number not in self._blocks:
            begin = number * _BLOCK_BYTES
            found = self._find(begin, min(_BLOCK_BYTES, self._size - begin))
            if found is None:
                return False
            self._blocks[number] = found
        return True


@contextlib.contextmanager
def open_blocks(blocks: MetadataFile) -> Iterator[Any]:
    """Open a file of blocks with h5py, and close it with all that came from it.

    Args:
        blocks: The file.

    Yields:
        The open `h5py.File`.

    Raises:
        LayoutError: It is not HDF5, is truncated or damaged.
        OSError: Bytes could not be fetched.
    """
    try:
        h5_file = h5py.File(blocks, "r")
    except OSError as error:
        if blocks.failure is not None:
            raise
        size = blocks.seek(0, os.SEEK_END)
        blocks.seek(0)
        head = blocks.read(8) or b""
        if "truncated" in str(error):
            text = (
                f"truncated: it has {size} bytes and its header announces more ({error}). The copy or the program "
                f"that wrote it was cut short; copy or pack it again."
            )
        elif "signature" in str(error):
            text = (
                f"not an HDF5 file: {size} bytes, beginning with {head!r}; expected the HDF5 signature. Make one with: "
                f"gpufeed pack SOURCE OUT.h5"
            )
        else:
            text = f"HDF5 cannot open it: {error}. It may be damaged, or its writer has not closed it; copy it again."
        raise LayoutError(f"{blocks!r}: {text}") from error
    try:
        yield h5_file
    finally:
        h5_file.close()


def refuse_other_files(h5_dataset: Any, h5_file: Any) -> None:
    """Make sure that all bytes of a dataset lie in the remote file itself.

    Args:
        h5_dataset: An open dataset, found under some key of `h5_file`.
        h5_file: The file from `open_blocks`.

    Raises:
        LayoutError: It is a link to another file, keeps its bytes in external files, or is virtual over other files,
            over what is not there, or over itself.
    """
    _follow(h5_dataset, h5_file, h5_dataset.name, above=())


def _follow(here: Any, h5_file: Any, key: str, above: tuple[str, ...]) -> None:
    """Look at one dataset, and at those it takes its samples from."""
    if here.file.filename != h5_file.filename:
        _refuse(h5_file, key, f"a link to the file {os.path.basename(here.file.filename)!r}")
    if here.name in above:
        raise LayoutError(
            f"{h5_file.filename}: the virtual dataset {key!r} takes samples from itself. Build it again without the "
            f"circle."
        )
    if here.id.get_create_plist().get_external_count():
        _refuse(h5_file, key, "kept in external raw files")
    sources = here.virtual_sources() if here.is_virtual else []
    for source in sources:
        if source.file_name != ".":
            _refuse(h5_file, key, f"virtual, with samples from the file {source.file_name!r}")
    for name in {source.dset_name for source in sources}:
        item = h5_file.get(name)
        if not isinstance(item, h5py.Dataset):
            raise LayoutError(
                f"{h5_file.filename}: the virtual dataset {here.name!r} takes samples from {name!r}, which is not "
                f"there; HDF5 would return fill values in its place. Build the virtual dataset again."
            )
        _follow(item, h5_file, key, (*above, here.name))


def _refuse(h5_file: Any, key: str, what: str) -> None:
    raise LayoutError(
        f"{h5_file.filename}: dataset {key!r} is {what}; in a store, a dataset has to lie in one file whole. Name that "
        f"file itself, or copy all into one with: gpufeed pack"
    )
