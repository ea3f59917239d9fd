"""What `examine` looks at in this process and machine: locks switched off, how workers start, what they can decode."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence

from lightning_gpufeed.hdf5.doctor.findings import Finding, Severity
from lightning_gpufeed.hdf5.layout import H5DatasetLayout

__all__ = ["locking_variable_finding", "start_method_finding", "worker_can_decode", "worker_plugin_finding"]

# Asked for in one go, so that one process answers for many files: blosc, lz4, bitshuffle, zfp, zstd, sz, sz3, blosc2.
_COMMON_FILTERS = (32001, 32004, 32008, 32013, 32015, 32017, 32024, 32026)
_WORKER = """\
import json, sys
import h5py
names = [h5py.h5z.filter_avail(int(code)) for code in sys.argv[1:]]
try:
    import hdf5plugin
except ImportError:
    pass
print(json.dumps([names, [h5py.h5z.filter_avail(int(code)) for code in sys.argv[1:]]]))
"""


def locking_variable_finding(value: str | None = None) -> Finding:
    """Look at HDF5's environment variable for locks.

    Args:
        value: Its value; None takes that of this process.

    Returns:
        The finding.
    """
    given = os.environ.get("HDF5_USE_FILE_LOCKING") if value is None else value
    if given is None or given.upper() == "BEST_EFFORT":
        return Finding(Severity.OK, "environment", "HDF5_USE_FILE_LOCKING leaves locks on" if given else "locks are on")
    if given.upper() in ("FALSE", "0"):
        return Finding(
            Severity.NOTICE,
            "environment",
            f"HDF5_USE_FILE_LOCKING={given} switches locks off, whatever a program asks for",
            "A reader does not notice that a file is being written, and may read half of it.",
            "export HDF5_USE_FILE_LOCKING=BEST_EFFORT",
        )
    if given.upper() in ("TRUE", "1"):
        return Finding(
            Severity.NOTICE,
            "environment",
            f"HDF5_USE_FILE_LOCKING={given} insists on locks, whatever a program asks for",
            "A file on a file system without locks cannot be opened then (errno 37).",
            "export HDF5_USE_FILE_LOCKING=BEST_EFFORT",
        )
    return Finding(
        Severity.WARNING,
        "environment",
        f"HDF5_USE_FILE_LOCKING={given} is none of TRUE, FALSE and BEST_EFFORT",
        "HDF5 ignores it.",
        "export HDF5_USE_FILE_LOCKING=BEST_EFFORT",
    )


def start_method_finding(method: str | None = None) -> Finding:
    """Look at how worker processes of a DataLoader start.

    Args:
        method: `"fork"`, `"forkserver"` or `"spawn"`; None takes this Python's default, or what was set.

    Returns:
        The finding.
    """
    if method is None:
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "fork":
        seen = "workers are forked: open files in the workers, not before (the loaders of this package do)"
        return Finding(Severity.OK, "workers", seen)
    return Finding(
        Severity.NOTICE,
        "workers",
        f"worker processes start with {method!r} here, under Python {sys.version_info[0]}.{sys.version_info[1]}",
        "A Dataset is pickled for each worker, and one that holds an open h5py.File fails: cannot be pickled.",
        "H5DataModule(FILE), which pickles to names; or open the file at the first __getitem__",
    )


@functools.cache
def worker_can_decode(codes: tuple[int, ...]) -> dict[int, tuple[bool, bool]]:
    """Ask a fresh process, such as a spawned worker, which filters it knows.

    Args:
        codes: HDF5's numbers of filters.

    Returns:
        Number -> whether it can be decoded once h5py is imported, and once hdf5plugin is as well. Empty where no such
        process could be run.
    """
    command = [sys.executable, "-c", _WORKER, *map(str, codes)]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=60, check=True, text=True).stdout
        plain, plugged = json.loads(answer)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return dict(zip(codes, zip(plain, plugged, strict=True), strict=True))


def worker_plugin_finding(layouts: Sequence[H5DatasetLayout]) -> Finding | None:
    """See whether a spawned worker that imports h5py alone can decode the file.

    Args:
        layouts: Arrays that this process can decode.

    Returns:
        A finding if it cannot; None if it can.
    """
    # Below 256 are HDF5's own filters, which are always there; 32000 is h5py's.
    specs = {spec.code: spec.name for layout in layouts for spec in layout.pipeline if spec.code > 255}
    specs.pop(32000, None)
    if not specs:
        return None
    answers = worker_can_decode(tuple(sorted({*_COMMON_FILTERS, *specs})))
    known = {code: answer for code, answer in answers.items() if code in specs}
    missing = [specs[code] for code, (is_plain, _) in known.items() if not is_plain]
    if not missing:
        return None
    is_cured = all(is_plugged for _, is_plugged in known.values())
    return Finding(
        Severity.NOTICE if is_cured else Severity.WARNING,
        "plug-in",
        f"a new process that imports h5py alone cannot decode {', '.join(missing)}",
        "A spawned worker of a plain Dataset fails with: can't open directory, or: required filter is not registered.",
        "import hdf5plugin  # at the top of the module of the Dataset"
        if is_cured
        else "pip install 'lightning_gpufeed[filters]'",
    )
