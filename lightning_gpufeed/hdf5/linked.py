"""Finds the other files that a dataset depends on, and refuses when one is gone.

HDF5 fills in for what it cannot find: a virtual dataset whose source file moved, or a short external file,
reads as fill values without an error. A model would train on black images.
"""

from __future__ import annotations

import os
import re
from typing import Any

import h5py

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import FileStamp

__all__ = ["stamps"]


def stamps(path: str, h5_dataset: Any) -> tuple[FileStamp, ...]:
    """Stamp every file that the dataset's bytes come from, the named one first.

    Args:
        path: The file the user named.
        h5_dataset: The open dataset.

    Returns:
        One stamp per file.

    Raises:
        LayoutError: A virtual source (file or dataset inside it) or an external raw file is missing or too short.
    """
    found = {path: FileStamp.of(path)}
    _follow(h5_dataset, found, depth=0)
    return tuple(found.values())


def _follow(h5_dataset: Any, found: dict[str, FileStamp], depth: int) -> None:
    """Add the files below one dataset."""
    if depth > 16:
        raise LayoutError(f"{h5_dataset.file.filename}: virtual datasets point at each other in a circle.")
    own = os.path.abspath(h5_dataset.file.filename)
    found.setdefault(own, FileStamp.of(own))
    if h5_dataset.is_virtual:
        for source in h5_dataset.virtual_sources():
            _follow_virtual(h5_dataset, own, source, found, depth)
    dcpl = h5_dataset.id.get_create_plist()
    for index in range(dcpl.get_external_count()):
        name, offset, size = dcpl.get_external(index)
        _check_external(h5_dataset, os.fsdecode(name), offset, size, found)


def _follow_virtual(h5_dataset: Any, own: str, source: Any, found: dict[str, FileStamp], depth: int) -> None:
    """Check one source of a virtual dataset, and what that one depends on in turn."""
    if re.search(r"(?<!%)%\d*b", source.file_name + source.dset_name):
        # A numbered family of sources may grow; which members exist is the writer's business.
        return
    if source.file_name == ".":
        if source.dset_name.lstrip("/") not in h5_dataset.file:
            raise LayoutError(_gone(h5_dataset, f"dataset {source.dset_name!r} in the same file"))
        _follow(h5_dataset.file[source.dset_name], found, depth + 1)
        return
    candidates = [source.file_name, os.path.join(os.path.dirname(own), source.file_name)]
    if os.path.isabs(source.file_name):
        candidates.append(os.path.join(os.path.dirname(own), os.path.basename(source.file_name)))
    target = next((name for name in candidates if os.path.isfile(name)), None)
    if target is None:
        raise LayoutError(_gone(h5_dataset, f"file {source.file_name!r}"))
    target = os.path.abspath(target)
    if target in found and target != own:
        return
    found[target] = FileStamp.of(target)
    with h5py.File(target, "r", locking="best-effort") as source_file:
        if source.dset_name not in source_file:
            raise LayoutError(_gone(h5_dataset, f"dataset {source.dset_name!r} in {target!r}"))
        _follow(source_file[source.dset_name], found, depth + 1)


def _gone(h5_dataset: Any, what: str) -> str:
    return (
        f"{h5_dataset.file.filename}: the virtual dataset {h5_dataset.name!r} takes samples from {what}, which is not "
        f"there; HDF5 would return fill values in its place. Put it back, or build the virtual dataset again."
    )


def _check_external(h5_dataset: Any, name: str, offset: int, size: int, found: dict[str, FileStamp]) -> None:
    """Check that an external raw file is there and long enough."""
    owner = h5_dataset.file.filename
    if not os.path.isfile(name):
        raise LayoutError(
            f"{owner}: dataset {h5_dataset.name!r} keeps its bytes in the external file {name!r}, which is not there "
            f"(a relative name counts from {os.getcwd()}). Put it back, or start from the right directory."
        )
    stamp = FileStamp.of(name)
    wanted = offset + (h5_dataset.nbytes if size == h5py.h5s.UNLIMITED or size < 0 else size)
    if stamp.size_bytes < min(wanted, offset + h5_dataset.nbytes):
        raise LayoutError(
            f"{owner}: dataset {h5_dataset.name!r} needs {wanted} bytes of the external file {name!r}, which has "
            f"{stamp.size_bytes}; HDF5 would return fill values for the rest. Copy the external file again."
        )
    found[stamp.path] = stamp
