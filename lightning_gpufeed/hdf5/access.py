"""Opens HDF5 files read-only, with errors a user can act on, and says when a file has changed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.remote.addresses import open_address
from lightning_gpufeed.hdf5.remote.remote_file import is_remote

# Registers the decoders of blosc, zstd, lz4, bitshuffle ... with HDF5 where the extra is installed.
with contextlib.suppress(ImportError):
    import hdf5plugin  # noqa: F401

__all__ = [
    "FileStamp",
    "StrPath",
    "has_keys",
    "list_datasets",
    "open_file",
    "open_h5_dataset",
    "pick_attributes",
    "type_name",
]

StrPath = str | os.PathLike[str]

_MOST_NAMED = 20
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

PRIVATE_GROUP = "_gpufeed"
"""Group in which `pack` keeps checksums; never taken for data."""


@dataclass(frozen=True)
class FileStamp:
    """What a file looked like when it was opened: enough to notice that it was replaced or written to.

    Attributes:
        path: Absolute path.
        size_bytes: Size.
        mtime_ns: Time of the last modification, nanoseconds since the epoch.
        inode: Inode number; changes when a file is replaced by rename.
    """

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int

    def has_shrunk(self) -> bool:
        """Whether this very file is shorter now: HDF5 reads what is missing as zeros, without an error.

        A file that was replaced or removed is still whole for those who have it open.

        Returns:
            True if so.
        """
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return False
        return status.st_ino == self.inode and status.st_size < self.size_bytes

    @classmethod
    def of(cls, path: StrPath) -> FileStamp:
        """Stamp a file as it is now.

        Args:
            path: The file.

        Returns:
            The stamp.

        Raises:
            FileNotFoundError: There is no such file.
        """
        status = os.stat(path)
        return cls(os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ino)

    def difference(self) -> str | None:
        """Say in words how the file differs from this stamp now, None if it does not."""
        try:
            now = FileStamp.of(self.path)
        except FileNotFoundError:
            return "is gone"
        if now.inode != self.inode:
            return "was replaced by another file"
        if now.size_bytes != self.size_bytes:
            return f"changed its size from {self.size_bytes} to {now.size_bytes} bytes"
        if now.mtime_ns != self.mtime_ns:
            return "was written to"
        return None


@contextlib.contextmanager
def open_file(path: StrPath, chunk_cache_bytes: int | None = None) -> Iterator[Any]:
    """Open an HDF5 file read-only, close it at the end.

    File locking is best effort: a file system without locks does not stop a reader.

    Args:
        path: The file, or its address in a store: then only for what is about the data.
        chunk_cache_bytes: Size of HDF5's own cache of chunks, per dataset; None leaves it at HDF5's 8 MiB.

    Yields:
        The open `h5py.File`.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: The file may not be read (permissions).
        LayoutError: It is not HDF5, is truncated, or is being written to.
    """
    if is_remote(os.fspath(path)):
        with open_address(os.fspath(path)) as h5_file:
            yield h5_file
        return
    name = os.path.expanduser(os.fspath(path))
    if not os.path.exists(name):
        raise FileNotFoundError(
            errno.ENOENT, f"no such file: expected an HDF5 file; the current directory is {os.getcwd()}", name
        )
    if os.path.isdir(name):
        raise LayoutError(f"{name} is a directory; expected an HDF5 file. Pack it first: gpufeed pack {name} OUT.h5")
    if not os.path.isfile(name):
        raise LayoutError(f"{name} is a pipe or device; expected an HDF5 file on a file system.")
    h5_file = _open(name, chunk_cache_bytes)
    try:
        if h5_file.id.get_intent() & h5py.h5f.ACC_RDWR:
            raise LayoutError(
                f"{name}: this process has it open for writing; what it writes meanwhile would be missed or torn. "
                f"Close that h5py.File first."
            )
        yield h5_file
    finally:
        h5_file.close()


def _open(name: str, chunk_cache_bytes: int | None) -> Any:
    """Open with a lock where there are locks, and without one where the file system has none."""
    try:
        return h5py.File(name, "r", locking="best-effort", rdcc_nbytes=chunk_cache_bytes)
    except OSError as error:
        if isinstance(error, PermissionError):
            raise
        if error.errno not in _NO_LOCKS:
            raise LayoutError(_explain(name, error)) from error
    # HDF5's best effort knows of one of these numbers only.
    try:
        return h5py.File(name, "r", locking=False, rdcc_nbytes=chunk_cache_bytes)
    except OSError as error:
        if os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() in ("TRUE", "1"):
            raise LayoutError(
                f"{name}: its file system has no locks ({error}), and HDF5_USE_FILE_LOCKING="
                f"{os.environ['HDF5_USE_FILE_LOCKING']} insists on them. Unset it, or set it to FALSE."
            ) from error
        raise LayoutError(_explain(name, error)) from error


def _explain(name: str, error: OSError) -> str:
    """Turn HDF5's own words into what is wrong and what to do."""
    text = str(error)
    size = os.path.getsize(name)
    if "truncated" in text:
        return (
            f"{name}: truncated: it has {size} bytes and its header announces more ({text}). "
            f"The copy or the program that wrote it was cut short (or it is one part of a family of files, which is "
            f"not supported); copy or pack it again."
        )
    if error.errno in (errno.EAGAIN, errno.EACCES):
        return f"{name}: another program has it open for writing and holds its lock ({text}). Close the writer first."
    if "already open for write" in text:
        return (
            f"{name}: marked as open for writing ({text}). "
            f"Close the writer first; if it crashed, run h5clear -s on the file."
        )
    if not h5py.is_hdf5(name):
        with open(name, "rb") as raw:
            head = raw.read(8)
        return (
            f"{name} is not an HDF5 file: {size} bytes, beginning with {head!r}; expected the HDF5 signature. "
            f"Make one with: gpufeed pack SOURCE OUT.h5"
        )
    return f"{name}: HDF5 cannot open it: {text}. It may be damaged; copy or pack it again."


def list_datasets(h5_file: Any) -> dict[str, Any]:
    """All arrays of a file by key, in the order of their names, without those `pack` keeps for itself.

    Args:
        h5_file: An open `h5py.File`.

    Returns:
        key -> open h5py dataset with at least one axis.
    """
    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape and not name.startswith(PRIVATE_GROUP + "/"):
            found[name] = item

    h5_file.visititems(visit)
    # visititems follows hard links only; arrays linked at the top are data like any other.
    for name in h5_file:
        link = h5_file.get(name, getlink=True)
        if isinstance(link, h5py.HardLink):
            continue
        with contextlib.suppress(KeyError, OSError):
            visit(name, h5_file[name])
    return dict(sorted(found.items()))


def has_keys(path: StrPath, keys: Iterable[str]) -> bool:
    """Whether a file has all of these keys, links included, broken ones too.

    Args:
        path: An HDF5 file.
        keys: Paths inside it.

    Returns:
        True if each names something.
    """
    with open_file(path) as h5_file:
        return all(_has_link(h5_file, key) for key in keys)


def open_h5_dataset(h5_file: Any, key: str) -> Any:
    """Look a dataset up by key.

    Args:
        h5_file: An open `h5py.File`.
        key: Path inside the file.

    Returns:
        The open h5py dataset.

    Raises:
        LayoutError: There is no such key (the message lists the keys there are), or it is a group.
    """
    try:
        item = h5_file[key]
    except (KeyError, OSError) as error:
        link = h5_file.get(key, getlink=True) if key in h5_file or _has_link(h5_file, key) else None
        if isinstance(link, h5py.ExternalLink):
            raise LayoutError(
                f"{h5_file.filename}: key {key!r} is a link to {link.path!r} in the file {link.filename!r}, "
                f"which cannot be opened. Put that file back or name another key."
            ) from error
        if isinstance(link, h5py.SoftLink):
            raise LayoutError(
                f"{h5_file.filename}: key {key!r} is a link to {link.path!r}, which is not in the file. It has: "
                f"{_describe_keys(h5_file)}."
            ) from error
        raise LayoutError(f"{h5_file.filename}: no dataset {key!r}. It has: {_describe_keys(h5_file)}.") from error
    if not isinstance(item, h5py.Dataset):
        kind = "group" if isinstance(item, h5py.Group) else "named type"
        raise LayoutError(
            f"{h5_file.filename}: {key!r} is a {kind}, not a dataset. The file has: {_describe_keys(h5_file)}."
        )
    return item


def _has_link(h5_file: Any, key: str) -> bool:
    with contextlib.suppress(KeyError, RuntimeError):
        return h5_file.get(key, getlink=True) is not None
    return False


def _describe_keys(h5_file: Any) -> str:
    keys = [f"{key!r} {item.shape} {type_name(item)}" for key, item in list_datasets(h5_file).items()]
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return ", ".join(keys[:_MOST_NAMED]) + more if keys else "no datasets at all"


def type_name(h5_dataset: Any) -> str:
    """The element type in words, for types that numpy does not know too.

    Args:
        h5_dataset: An open h5py dataset.

    Returns:
        Such as `uint8`.
    """
    try:
        return str(h5_dataset.dtype)
    except TypeError:
        return "unknown type"


def _is_plain(value: Any) -> bool:
    """Whether an attribute is numbers or text: references, compounds and the like neither pickle nor matter."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return all(isinstance(element, str | bytes) for element in value.flat)
    return isinstance(value, str | bytes) or (
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU"
    )


def pick_attributes(item: Any, most_elements: int = 1 << 20) -> dict[str, Any]:
    """Small attributes of a dataset or file as numpy arrays, strings and numbers.

    Args:
        item: An open h5py object.
        most_elements: Larger attributes are left out.

    Returns:
        name -> value; unreadable attributes are left out.
    """
    picked: dict[str, Any] = {}
    for name in item.attrs:
        # An attribute of an exotic type must not make the data unreadable.
        with contextlib.suppress(OSError, TypeError, KeyError, ValueError):
            value = item.attrs[name]
            if np.size(value) <= most_elements and _is_plain(value):
                picked[name] = value
    return picked
