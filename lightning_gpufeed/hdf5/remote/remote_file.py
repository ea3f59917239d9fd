"""HDF5 files in a store that fsspec reaches: `s3://`, `gs://`, `http(s)://`, `memory://` and what else it knows.

HDF5 reads a file piece by piece, each piece a request that the next one waits for. So it only reads what is about the
data here (`open_h5`), and the data come by their byte offsets, many requests at the same time::

    open_h5        HDF5 -> one piece of 64 kB after the other   shapes, chunk index, small arrays
    read_ranges    offsets, sizes -> few large ranges           chunks
                   local disk cache, then the store, `num_threads` requests under way

An object that is replaced while it is read ends in an error; pieces of different versions are never kept together.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.remote.disk_cache import DiskCache, default_cache_dir
from lightning_gpufeed.hdf5.remote.metadata_file import MetadataFile, alone, open_blocks, refuse_other_files
from lightning_gpufeed.hdf5.remote.ranges import coalesce, split_ranges
from lightning_gpufeed.hdf5.remote.store import RemoteStamp, Store

__all__ = ["RemoteFile", "RemoteStamp", "is_remote", "refuse_other_files"]

Positions = npt.NDArray[np.int64]

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::[A-Za-z][A-Za-z0-9+.\-]*)*://")
_LOCAL = ("file://", "local://")

# A request costs about as much as this many bytes; a range of the limit, a few requests.
_MAX_GAP = 64 << 10
_MAX_RANGE_BYTES = 4 << 20
_MAX_UNCONFIRMED_BYTES = 64 << 20


def is_remote(path: str) -> bool:
    """Whether a path is an address in a store.

    Args:
        path: A path, or an address such as `s3://bucket/train.h5`.

    Returns:
        True for `scheme://...`, except `file://` and `local://`.
    """
    return _ADDRESS.match(path) is not None and not path.startswith(_LOCAL)


@dataclass
class _Session:
    """What one process holds of a remote file.

    Attributes:
        store: The connection.
        cache: Pieces on disk, None if off.
        looked_at: When the latest look at the object began.
        unconfirmed: Name in the cache and bytes of what arrived since.
        unconfirmed_bytes: Their length.
        noting: Held while these two change.
        looking: Held while looking; several readers share a look.
    """

    store: Store
    cache: DiskCache | None
    looked_at: float = float("-inf")
    unconfirmed: list[tuple[str, bytes | memoryview]] = field(default_factory=list)
    unconfirmed_bytes: int = 0
    noting: threading.Lock = field(default_factory=threading.Lock)
    looking: threading.Lock = field(default_factory=threading.Lock)

    def take_unconfirmed(self) -> list[tuple[str, bytes | memoryview]]:
        """Give what arrived, and begin anew."""
        with self.noting:
            taken, self.unconfirmed, self.unconfirmed_bytes = self.unconfirmed, [], 0
            return taken


# Those that a forked child has to connect anew, and connections it must neither use nor close: they are its parent's.
_files: weakref.WeakSet[RemoteFile] = weakref.WeakSet()
_inherited: list[_Session] = []


class RemoteFile:
    """One HDF5 file in a store. Pickles to its address and stamp; connects at the first use, in each process.

    May be used from several threads, and after a fork.

    Attributes:
        url: The address.

    Example:
        >>> remote = RemoteFile("memory://bucket/train.h5")                # usually s3:// or https://
        >>> with remote.open_h5() as h5_file:
        ...     offset = h5_file["images"].id.get_offset()
        >>> [first_image] = remote.read_ranges(np.array([offset]), np.array([768]))
        >>> len(first_image)
        768
        >>> remote.close()
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        cache_dir: str | None = "auto",
        cache_bytes: int = 8 << 30,
        num_threads: int = 16,
        check_seconds: float = 1.0,
    ) -> None:
        """Note the address; nothing is opened yet.

        Args:
            url: Address, such as `s3://bucket/train.h5`.
            storage_options: What fsspec's file system for this kind of address takes: credentials, endpoints, ...
            cache_dir: Folder for pieces that were read; "auto" is one under the user's cache folder, None or "" none.
            cache_bytes: Limit of all pieces in it together; 0 for none.
            num_threads: Requests under way at the same time.
            check_seconds: An object that was replaced is noticed after this time of reading at the latest; 0 looks
                after every answer. A web server with strong etags refuses the very next request, whatever is set here.

        Raises:
            ValueError: No address, or a number is out of range.
        """
        if not is_remote(url):
            raise ValueError(f"url={url!r}; expected an address in a store, such as s3://bucket/train.h5.")
        if num_threads < 1 or cache_bytes < 0 or check_seconds < 0:
            raise ValueError(
                f"num_threads={num_threads}, cache_bytes={cache_bytes}, check_seconds={check_seconds}; expected at "
                f"least one thread and no negative number."
            )
        self.url = url
        self._storage_options = dict(storage_options or {})
        self._cache_dir = default_cache_dir() if cache_dir == "auto" else cache_dir
        self._cache_bytes = cache_bytes
        self._num_threads = num_threads
        self._check_seconds = check_seconds
        self._stamp: RemoteStamp | None = None
        self._start_anew()

    def _start_anew(self) -> None:
        self._session: _Session | None = None
        self._connecting = threading.Lock()
        _files.add(self)

    def _leave_to_parent(self) -> None:
        """In a forked child."""
        if self._session is not None:
            _inherited.append(self._session)
        self._start_anew()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the connection."""
        return {**self.__dict__, "_session": None, "_connecting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; the connection is made at the first use."""
        self.__dict__.update(state)
        self._start_anew()

    def __repr__(self) -> str:
        return f"RemoteFile({self.url!r})"

    @property
    def stamp(self) -> RemoteStamp:
        """What the object looked like when it was first looked at, in whatever process that was."""
        self._connected()
        assert self._stamp is not None
        return self._stamp

    @property
    def size_bytes(self) -> int:
        """Size of the object."""
        return self.stamp.size_bytes

    def _connected(self) -> _Session:
        """The connection of this process."""
        with self._connecting:
            if self._session is None:
                store = Store(self.url, self._storage_options, num_threads=self._num_threads)
                began = time.monotonic()
                now = store.look()
                if difference := self._stamp and self._stamp.difference(now):
                    raise FeedError(self._changed(difference))
                store.insist_on(now)
                self._stamp = now
                # Without a mark, the bytes of another version would be taken for those of this one.
                has_cache = bool(self._cache_dir) and self._cache_bytes > 0 and self._stamp.is_certain
                cache = DiskCache(str(self._cache_dir), self._cache_bytes) if has_cache else None
                self._session = _Session(store, cache, began)
            return self._session

    def check_unchanged(self) -> None:
        """Look at the object.

        Raises:
            FeedError: It was replaced or is gone. The byte offsets noted would be wrong.
        """
        self._look(self._connected())

    def _look(self, session: _Session, arrived: float | None = None) -> None:
        """Make sure that what arrived until now is of the version expected, and keep it on disk then."""
        arrived = time.monotonic() if arrived is None else arrived
        with session.looking:
            if session.looked_at >= arrived:
                return  # another thread's look began later than that
            began = time.monotonic()
            fresh = session.take_unconfirmed()
            assert self._stamp is not None
            try:
                difference = self._stamp.difference(session.store.look())
            except FileNotFoundError:
                difference = "is gone"
            if difference:
                raise FeedError(self._changed(difference))
            session.looked_at = began
        if session.cache is not None:
            for name, data in fresh:
                session.cache.put(name, data)

    def _changed(self, difference: str) -> str:
        return (
            f"{self.url} {difference} since it was opened, so its samples may lie elsewhere now. "
            f"Build the loader or DataModule again to use the new file."
        )

    def _refuse_changed(self, session: _Session, error: Exception) -> None:
        """Look whether an error is there because the object was replaced."""
        # Where the store cannot even be asked, the error at hand says more.
        with contextlib.suppress(OSError):
            try:
                difference = self.stamp.difference(session.store.look())
            except FileNotFoundError:
                difference = "is gone"
            except FeedError:
                return
            if difference:
                raise FeedError(self._changed(difference)) from error

    @contextlib.contextmanager
    def open_h5(self) -> Iterator[Any]:
        """Open the file with h5py, for what is about the data: shapes, attributes, chunk index, small arrays.

        One thread at a time in the whole process. h5py holds its lock while HDF5 waits for bytes from here; another
        thread that frees an h5py object would wait for that lock, so the bytes must not come from such a thread.
        They are fetched in this thread, and no garbage is collected meanwhile. What h5py gave is closed at the end.

        Yields:
            The open `h5py.File`; its `filename` is the address.

        Raises:
            FileNotFoundError: There is no such object.
            LayoutError: It is not HDF5, or is truncated.
            FeedError: It cannot be read, or was replaced meanwhile.
        """
        session = self._connected()
        with alone(), session.store.in_this_thread() as once:
            blocks = MetadataFile(
                self.url,
                self.size_bytes,
                lambda parts: session.store.fetch(parts, once),
                lambda offset, size: self._cached(session, offset, size),
            )
            try:
                with open_blocks(blocks) as h5_file:
                    yield h5_file
                if blocks.failure is not None:
                    raise blocks.failure
            except Exception as error:
                # HDF5 may have made another error of it.
                first = blocks.failure or error
                self._refuse_changed(session, first)
                if first is error:
                    raise
                raise first from error
        if blocks.fetched:
            self._note(session, blocks.fetched)
            self._look(session)

    def read_ranges(self, offsets: Positions, sizes: Positions) -> list[memoryview]:
        """Read pieces of the file, those close together in one request, many requests at the same time.

        Args:
            offsets: int64 (n,): first byte of each, in any order; pieces may overlap or repeat.
            sizes: int64 (n,): bytes of each.

        Returns:
            The bytes of each, read-only.

        Raises:
            FeedError: The store cannot be read, the object was replaced or is shorter than that.
            PermissionError: The store refuses access.
        """
        offsets, sizes = np.asarray(offsets, dtype=np.int64), np.asarray(sizes, dtype=np.int64)
        session = self._connected()
        end = int((offsets + sizes).max(initial=0))
        if end > self.size_bytes:
            raise FeedError(
                f"{self.url}: byte {end - 1} was asked for, but it has {self.size_bytes}: truncated, or other offsets "
                f"than its own. Copy or pack the file again."
            )
        answers: list[memoryview] = [memoryview(b"")] * len(offsets)
        missing = []
        for number, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
            found = self._cached(session, offset, size) if size else None
            if found is not None:
                answers[number] = found
            elif size:
                missing.append(number)
        if not missing:
            return answers
        plan = coalesce(offsets[missing], sizes[missing], _MAX_GAP, _MAX_RANGE_BYTES)
        ranges = self._fetch(session, plan.starts, plan.stops)
        places = zip(missing, plan.range_index.tolist(), plan.range_offset.tolist(), strict=True)
        for number, index, at in places:
            answers[number] = memoryview(ranges[index])[at : at + int(sizes[number])].toreadonly()
        self._note(session, [(int(offsets[number]), answers[number]) for number in missing])
        self._confirm(session)
        return answers

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill a buffer from a position on.

        Args:
            offset: Bytes from the start of the file.
            out: Writable, contiguous.
        """
        if not out.nbytes:
            return
        [data] = self.read_ranges(np.array([offset]), np.array([out.nbytes]))
        out.cast("B")[:] = data

    def _fetch(self, session: _Session, starts: Positions, stops: Positions) -> Sequence[bytes]:
        """Fetch ranges; large ones come in parts at the same time."""
        parts, first_part = split_ranges(starts, stops, _MAX_RANGE_BYTES)
        try:
            answers = session.store.fetch(parts)
        except FeedError as error:
            self._refuse_changed(session, error)
            raise
        bounds = zip(first_part[:-1].tolist(), first_part[1:].tolist(), strict=True)
        return [answers[a] if b - a == 1 else b"".join(answers[a:b]) for a, b in bounds]

    def _name(self, offset: int, size: int) -> str:
        """What a piece is called in the cache."""
        return repr((self.url, self.stamp.size_bytes, self.stamp.marks, offset, size))

    def _cached(self, session: _Session, offset: int, size: int) -> memoryview | None:
        return None if session.cache is None else session.cache.get(self._name(offset, size), size)

    def _note(self, session: _Session, pieces: Sequence[tuple[int, bytes | memoryview]]) -> None:
        """Remember what arrived, to keep it on disk once the object is known to be the same still."""
        if session.cache is not None:
            named = [(self._name(offset, len(data)), data) for offset, data in pieces]
            with session.noting:
                session.unconfirmed += named
                session.unconfirmed_bytes += sum(len(data) for _, data in named)

    def _confirm(self, session: _Session) -> None:
        """Look at the object if that is due."""
        now = time.monotonic()
        is_due = now - session.looked_at >= self._check_seconds
        if is_due or session.unconfirmed_bytes > _MAX_UNCONFIRMED_BYTES:
            self._look(session, now)

    def close(self) -> None:
        """Let go of the connection; the next use makes another one. Closing twice is allowed."""
        with self._connecting:
            session, self._session = self._session, None
        if session is not None:
            if session.unconfirmed:
                with contextlib.suppress(FeedError, OSError):
                    self._look(session)
            session.store.close()


def _leave_all_to_parent() -> None:
    """In a forked child: connect anew."""
    for file in list(_files):
        file._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
