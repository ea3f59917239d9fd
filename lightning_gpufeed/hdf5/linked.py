"""Finds the other files that a dataset depends on, and refuses when one is gone.

HDF5 fills in for what it cannot find: a virtual dataset whose source moved, or a short external file, reads as fill
values without an error. A model would train on black images.

Source: search order of virtual sources as HDF5 2.0 was seen to have it: an absolute name as it is; else, by its last
part, beside the virtual file as it was opened, in the current directory, beside the virtual file with links resolved.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

import h5py

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import FileStamp, open_file

__all__ = ["Dependencies", "find_dependencies"]


@dataclass
class Dependencies:
    """What a dataset needs beside its own header.

    Attributes:
        stamps: Absolute path -> stamp of each file, the one the user named first.
        directory: The current directory, if a file is found only relative to it; None otherwise.
        followed: (virtual file, source file, source dataset) already looked at: one source may be mapped many times.
    """

    stamps: dict[str, FileStamp] = field(default_factory=dict)
    directory: str | None = None
    followed: set[tuple[str, str, str]] = field(default_factory=set)

    def add(self, path: str) -> None:
        """Note a file.

        Args:
            path: Any path of it.
        """
        absolute = os.path.abspath(path)
        if absolute not in self.stamps:
            self.stamps[absolute] = FileStamp.of(absolute)


def find_dependencies(path: str, h5_dataset: Any) -> Dependencies:
    """Find every file that the dataset's bytes come from.

    Args:
        path: The file the user named.
        h5_dataset: The open dataset.

    Returns:
        The files, stamped.

    Raises:
        LayoutError: A virtual source (file or dataset inside it) or an external raw file is missing, unreadable or
            too short, or virtual datasets point at each other in a circle.
    """
    found = Dependencies()
    found.add(path)
    _follow(h5_dataset, found, above=())
    return found


def _follow(h5_dataset: Any, found: Dependencies, above: tuple[tuple[str, str], ...]) -> None:
    """Add the files below one dataset."""
    own = os.path.abspath(h5_dataset.file.filename)
    here = (os.path.realpath(own), h5_dataset.name)
    if here in above:
        raise LayoutError(
            f"{above[0][0]}: the virtual dataset {above[0][1]!r} takes samples from itself, through "
            f"{own} {h5_dataset.name!r}. Build it again without the circle."
        )
    found.add(own)
    if h5_dataset.is_virtual:
        for source in h5_dataset.virtual_sources():
            _follow_virtual(h5_dataset, own, source, found, (*above, here))
    dcpl = h5_dataset.id.get_create_plist()
    rest = h5_dataset.nbytes
    for index in range(dcpl.get_external_count()):
        name, offset, size = dcpl.get_external(index)
        held = rest if size in (h5py.h5s.UNLIMITED, -1) else min(rest, size)
        _check_external(h5_dataset, os.fsdecode(name), offset + held, found)
        rest -= held


def _follow_virtual(
    h5_dataset: Any, own: str, source: Any, found: Dependencies, above: tuple[tuple[str, str], ...]
) -> None:
    """Check one source of a virtual dataset, and what that one depends on in turn."""
    if re.search(r"(?<!%)%\d*b", source.file_name + source.dset_name):
        # A numbered family of sources may grow; which members exist is the writer's business.
        return
    mapped = (own, source.file_name, source.dset_name)
    if mapped in found.followed:
        return
    found.followed.add(mapped)
    if source.file_name == ".":
        _follow_source(h5_dataset, h5_dataset.file, "the same file", source.dset_name, found, above)
        return
    target = _locate(own, source.file_name, found)
    if target is None:
        raise LayoutError(_gone(h5_dataset, f"the file {source.file_name!r}"))
    try:
        with open_file(target) as source_file:
            _follow_source(h5_dataset, source_file, repr(target), source.dset_name, found, above)
    except FileNotFoundError as error:
        raise LayoutError(_gone(h5_dataset, f"the file {target!r}")) from error


def _locate(own: str, name: str, found: Dependencies) -> str | None:
    """Where HDF5 finds a source file, None where it does not."""
    bare = os.path.basename(name) if os.path.isabs(name) else name
    opened, real = os.path.dirname(own), os.path.dirname(os.path.realpath(own))
    candidates = [name] if os.path.isabs(name) else []
    candidates += [os.path.join(opened, bare), bare, os.path.join(real, bare)]
    for candidate in candidates:
        if os.path.isfile(candidate):
            if not os.path.isabs(candidate):
                found.directory = os.getcwd()
            return candidate
    return None


def _follow_source(
    h5_dataset: Any,
    source_file: Any,
    where: str,
    key: str,
    found: Dependencies,
    above: tuple[tuple[str, str], ...],
) -> None:
    """Go on with a dataset in an open source file."""
    item = source_file.get(key)
    if not isinstance(item, h5py.Dataset):
        raise LayoutError(_gone(h5_dataset, f"the dataset {key!r} in {where}"))
    _follow(item, found, above)


def _gone(h5_dataset: Any, what: str) -> str:
    return (
        f"{h5_dataset.file.filename}: the virtual dataset {h5_dataset.name!r} takes samples from {what}, which is not "
        f"there; HDF5 would return fill values in its place. Put it back, or build the virtual dataset again."
    )


def _check_external(h5_dataset: Any, name: str, needed: int, found: Dependencies) -> None:
    """Check that an external raw file is there and long enough."""
    owner = h5_dataset.file.filename
    if not os.path.isfile(name):
        raise LayoutError(
            f"{owner}: dataset {h5_dataset.name!r} keeps its bytes in the external file {name!r}, which is not there "
            f"(a relative name counts from {os.getcwd()}). Put it back, or start from the right directory."
        )
    if not os.path.isabs(name):
        found.directory = os.getcwd()
    actual = os.path.getsize(name)
    if actual < needed:
        raise LayoutError(
            f"{owner}: dataset {h5_dataset.name!r} needs {needed} bytes of the external file {name!r}, which has "
            f"{actual}; HDF5 would return fill values for the rest. Copy the external file again."
        )
    found.add(name)
