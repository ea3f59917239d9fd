"""Names of files: paths of a file system, and addresses in a store that fsspec reaches.

Everything below the loaders names a file by text. What is needed to reach an address, credentials and the connection,
is kept here, once for each address and process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_gpufeed.hdf5.remote.remote_file import RemoteFile, is_remote

__all__ = [
    "SharedBytes",
    "absolute",
    "hold_open",
    "know",
    "open_address",
    "remember",
    "remote_file",
    "size_of",
    "warn_of_unmarked",
]

StrPath = str | os.PathLike[str]

_known: dict[str, RemoteFile] = {}


class _Held(threading.local):
    """The address that this thread keeps open."""

    url: str | None = None
    h5_file: Any = None


_held = _Held()


def absolute(path: StrPath) -> str:
    """A name that does not depend on the current directory.

    Args:
        path: A path, or an address.

    Returns:
        An absolute path, or the address as it is.
    """
    name = os.fspath(path)
    return name if is_remote(name) else os.path.abspath(os.path.expanduser(name))


def know(paths: Iterable[str], storage_options: Mapping[str, Any] | None) -> tuple[RemoteFile, ...]:
    """Note how addresses are reached.

    Args:
        paths: Names of files.
        storage_options: For fsspec; None keeps what was given before, or leaves it to fsspec's own configuration.

    Returns:
        The files in a store among them.
    """
    remotes = []
    for path in paths:
        if is_remote(path):
            if storage_options is not None or path not in _known:
                _known[path] = RemoteFile(path, storage_options)
            remotes.append(_known[path])
    return tuple(remotes)


def warn_of_unmarked(remotes: Iterable[RemoteFile]) -> None:
    """Say which files could be replaced without anybody noticing.

    Args:
        remotes: Files that were looked at.
    """
    for remote in remotes:
        if not remote.stamp.is_certain:
            warnings.warn(
                f"{remote.url}: its store tells no mark of a version (an etag, or a time): if it is replaced by a file "
                f"of the same size, that is not noticed.",
                stacklevel=4,
            )


def remember(remotes: Iterable[RemoteFile]) -> None:
    """Take over files that another process knew.

    Args:
        remotes: From `know`.
    """
    for remote in remotes:
        _known.setdefault(remote.url, remote)


def remote_file(url: str) -> RemoteFile:
    """The file at an address.

    Args:
        url: The address.

    Returns:
        The same object for all who ask.
    """
    return know([url], None)[0]


@contextlib.contextmanager
def open_address(url: str) -> Iterator[Any]:
    """Open an address with h5py, for what is about the data.

    Args:
        url: The address.

    Yields:
        The open `h5py.File`: that of `hold_open` where this thread holds it open.
    """
    if _held.url == url:
        yield _held.h5_file
        return
    with remote_file(url).open_h5() as h5_file:
        yield h5_file


@contextlib.contextmanager
def hold_open(path: str) -> Iterator[None]:
    """Open an address once for all that looks at it meanwhile: each opening costs requests that wait for each other.

    Args:
        path: A path, for which nothing is done, or an address.

    Yields:
        While it is open.
    """
    if not is_remote(path) or _held.url is not None:
        yield
        return
    with remote_file(path).open_h5() as h5_file:
        _held.url, _held.h5_file = path, h5_file
        try:
            yield
        finally:
            _held.url = _held.h5_file = None


def size_of(path: str) -> int:
    """Size of a file.

    Args:
        path: A path, or an address.

    Returns:
        Bytes.
    """
    return remote_file(path).size_bytes if is_remote(path) else os.path.getsize(path)


class SharedBytes:
    """The bytes at an address, for a reader that does not own the connection; see `ByteFile`."""

    def __init__(self, url: str) -> None:
        """Note the address.

        Args:
            url: The address.
        """
        self._remote = remote_file(url)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill a buffer; see `ByteFile.read_into`.

        Args:
            offset: Bytes from the start.
            out: Writable, contiguous.
        """
        self._remote.read_into(offset, out)

    def check_unchanged(self) -> None:
        """See `ByteFile.check_unchanged`."""
        self._remote.check_unchanged()

    def close(self) -> None:
        """Others may use the connection."""
