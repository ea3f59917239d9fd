"""`examine`: looks for what makes HDF5 files slow, unsafe or wrong to train from. It changes nothing.

::

    machine   start method of workers, locks switched off
    file      there? readable? HDF5? whole? open elsewhere? on what file system? larger than the memory?
    arrays    chunks, filters, missing parts, values

Nothing that a file holds may end it: a check that fails itself is a finding like any other.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import StrPath, list_datasets, open_file, type_name
from lightning_gpufeed.hdf5.doctor.arrays import array_findings, file_layout_findings
from lightning_gpufeed.hdf5.doctor.files import (
    disk_finding,
    file_system_finding,
    leftover_findings,
    lock_finding,
    memory_bytes,
    memory_finding,
    open_failure,
    programs_that_write,
)
from lightning_gpufeed.hdf5.doctor.findings import Diagnosis, FileFindings, Finding, Severity
from lightning_gpufeed.hdf5.doctor.machine import (
    locking_variable_finding,
    start_method_finding,
    worker_plugin_finding,
)
from lightning_gpufeed.hdf5.doctor.values import value_findings
from lightning_gpufeed.hdf5.inspection import inspect_file
from lightning_gpufeed.hdf5.layout import H5DatasetLayout, read_layout

__all__ = ["examine"]

# Names that promise HDF5: a file that breaks the promise is worth a finding.
_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad", ".loom")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Looking at each of more arrays than this would take minutes.
_MOST_ARRAYS = 256
# Fewer that differ by a number only may be layers, sensors or splits.
_FAMILY_SIZE = 12
_NUM_SHOWN = 3
_MOST_TYPE_LETTERS = 20

Writers = dict[tuple[int, int], list[str]]


def examine(path: StrPath, *, max_files: int = 1000) -> Diagnosis:
    """Look at a file, or at each HDF5 file below a folder.

    Args:
        path: A file or a folder.
        max_files: Most files of a folder to look at.

    Returns:
        The findings.

    Raises:
        FileNotFoundError: There is nothing of that name.
        LayoutError: There is no HDF5 file in the folder.
        ValueError: `max_files` is below 1.

    Example:
        >>> [one.seen for one in examine("train.h5").files[0].findings if one.key == "labels"]
        ['read once and kept in memory']
    """
    if max_files < 1:
        raise ValueError(f"max_files is {max_files}; expected at least 1")
    name = os.path.expanduser(os.fspath(path))
    if not os.path.lexists(name):
        raise FileNotFoundError(f"no such file or folder: {name!r}; expected an HDF5 file, or a folder of them")
    is_folder = os.path.isdir(name)
    files = _find_files(name) if is_folder else iter([name])
    looked_at: list[FileFindings] = []
    writers, num_left = programs_that_write(), 0
    for file in files:
        if len(looked_at) == max_files:
            num_left = 1
            break
        looked_at.append(FileFindings(file, _examine_file(file, writers)))
    if not looked_at:
        raise LayoutError(f"{name}: no HDF5 file in this folder or below; expected names as train.h5")
    machine = (*_guarded(locking_variable_finding), *_guarded(start_method_finding))
    return Diagnosis(name, is_folder, tuple(machine), tuple(looked_at), num_left)


def _find_files(folder: str) -> Iterator[str]:
    """HDF5 files below a folder, by name or by their first bytes, in order; then folders that may not be listed."""
    closed: list[str] = []
    for place, folders, names in os.walk(folder, onerror=lambda error: closed.append(str(error.filename))):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(place, name)
            if name.lower().endswith(_SUFFIXES) or _has_signature(file):
                yield file
    yield from closed


def _has_signature(file: str) -> bool:
    """Whether a file begins as HDF5 does."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            return False
        with open(file, "rb", buffering=0) as raw:
            return raw.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False


def _guarded(check: Callable[..., Any], *arguments: Any) -> list[Finding]:
    """The findings of a check; that it failed, if it did."""
    try:
        found = check(*arguments)
    except Exception as error:  # whatever a strange file makes HDF5, NumPy or us raise
        text = f"{type(error).__name__}: {error}"
        return [Finding(Severity.NOTICE, "doctor", f"the check {check.__name__} could not be made: {text}")]
    return [] if found is None else [found] if isinstance(found, Finding) else list(found)


def _examine_file(path: str, writers: Writers) -> tuple[Finding, ...]:
    """All findings about one file, the worst first."""
    findings = [*_guarded(leftover_findings, path)]
    failure = _guarded(open_failure, path, writers)
    findings += failure
    if not failure:
        findings += [*_guarded(lock_finding, path, writers), *_guarded(file_system_finding, path)]
        findings += _guarded(_examine_content, path)
        findings += _guarded(memory_finding, os.path.getsize(path), memory_bytes())
        if any("gpufeed repack" in (finding.cure or "") for finding in findings):
            findings += _guarded(disk_finding, path)
    return tuple(sorted(findings, key=lambda one: -one.severity.rank))


def _examine_content(path: str) -> list[Finding]:
    """Findings about the arrays of a file that can be opened."""
    with open_file(path) as h5_file:
        arrays = list_datasets(h5_file)
        keys, odd = [key for key in arrays if not _is_odd_type(arrays[key])], [*filter(_is_odd_type, arrays.values())]
        odd_names = [f"{h5_dataset.name.strip('/')} ({_type_text(h5_dataset)})" for h5_dataset in odd]
        shapes = {key: h5_dataset.shape for key, h5_dataset in arrays.items()}
    findings = [*_one_per_sample(shapes)]
    if len(arrays) > _MOST_ARRAYS:
        return findings or [_very_many(len(arrays))]
    findings += [_odd_types(odd_names)] if odd_names else []
    if not arrays:
        why = "There is nothing to train on."
        findings.append(Finding(Severity.NOTICE, "arrays", "no array in the file", why, "gpufeed pack SOURCE OUT.h5"))
    layouts: list[H5DatasetLayout] = []
    for key in keys:
        try:
            layouts.append(read_layout(path, key))
        except (LayoutError, OSError, RuntimeError, TypeError, ValueError) as error:  # the latter are h5py's
            findings.append(_broken(path, key, error))
    for layout in layouts:
        findings += _guarded(array_findings, layout, path)
    findings += _guarded(worker_plugin_finding, layouts)
    findings += _guarded(value_findings, layouts, path)
    # Labels, the size of the whole and links that lead nowhere are known to the inspection.
    findings += _guarded(_inspected, path, layouts)
    return findings


def _inspected(path: str, layouts: Sequence[H5DatasetLayout]) -> Iterator[Finding]:
    return file_layout_findings(inspect_file(path, probe_seconds=0), layouts)


def _one_per_sample(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Arrays of one shape whose names differ by a number only."""
    families: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for key, shape in shapes.items():
        families.setdefault((re.sub(r"\d+", "#", key), shape), []).append(key)
    for keys in families.values():
        if len(keys) >= _FAMILY_SIZE:
            yield Finding(
                Severity.WARNING,
                "arrays",
                f"{len(keys):,} arrays named as {keys[0]}: one for each sample",
                "Opening an array takes longer than reading a sample, and samples cannot be drawn from many arrays.",
                "gpufeed pack package.module:dataset OUT.h5  # a Dataset that returns sample i of the file",
            )


def _very_many(num_arrays: int) -> Finding:
    seen, why = (
        f"{num_arrays:,} arrays in the file",
        "Each has headers to be read, and none of them was looked at here.",
    )
    return Finding(
        Severity.WARNING, "arrays", seen, why, "gpufeed repack FILE OUT.h5 --keys A,B  # those that are needed"
    )


def _odd_types(names: Sequence[str]) -> Finding:
    shown = ", ".join(names[:_NUM_SHOWN]) + (f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else "")
    return Finding(
        Severity.NOTICE,
        "types",
        f"of types that no tensor can hold: {shown}",
        "Batches go without them.",
        "copy the columns that are needed into arrays of numbers or text",
    )


def _broken(path: str, key: str, error: Exception) -> Finding:
    """An array that cannot be read; the last sentence of the error says what to do."""
    text = str(error)
    for name in (os.path.abspath(path), path):
        text = text.removeprefix(f"{name}: ")
    seen, _, cure = text.removesuffix(".").rpartition(". ")
    if not seen:
        seen, cure = cure, "copy or write the file again"
    why = "Its samples cannot be read, or HDF5 would make them up."
    return Finding(Severity.PROBLEM, "broken", seen, why, cure, key)


def _is_odd_type(h5_dataset: Any) -> bool:
    """Whether the elements are records, references and the like; numbers of any size and text are not."""
    try:
        dtype = h5_dataset.dtype
    except TypeError:
        return True
    if h5py.check_string_dtype(dtype) is not None:
        return False
    base = h5py.check_vlen_dtype(dtype)
    if base is not None:
        return not (isinstance(base, np.dtype) and base.kind in "biufc" and base.isnative)
    return dtype.kind not in "biufc" or dtype.itemsize // (2 if dtype.kind == "c" else 1) > 8


def _type_text(h5_dataset: Any) -> str:
    """The element type, of records and the like only that they are."""
    text = type_name(h5_dataset)
    return text if len(text) <= _MOST_TYPE_LETTERS else "records"
