"""What can be known of a loader from outside: its workers, its arguments, the HDF5 files that it reads.

Private names of torch and Lightning, each asserted in `tests/test_private_api.py`:

==========================================  ===============================================================
name                                        what for
==========================================  ===============================================================
DataLoader._iterator                        the running iteration of a loader with persistent workers
_MultiProcessingDataLoaderIter._workers     which processes load for it
CombinedLoader._iterator.iterators          the same for a loader whose workers are not kept (Lightning's)
==========================================  ===============================================================

All files that a process has open are listed by the kernel, which names the HDF5 files of a Dataset of any kind.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader

from lightning_gpufeed.diagnose.counters import FileFacts, LoaderFacts
from lightning_gpufeed.diagnose.observer import Readers
from lightning_gpufeed.errors import GpuFeedError
from lightning_gpufeed.hdf5.inspection import inspect_file
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.residency import cached_share

__all__ = ["cached_files", "describe_loader", "find_readers", "name_files", "open_files"]

_READING_THREAD = "gpufeed-reader"
_H5_ENDINGS = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".h5ad", ".mat")
_MOST_FILES = 4


def describe_loader(loader: Any) -> LoaderFacts:
    """How a loader is set up.

    Args:
        loader: A loader, or several in a list or dict, of which the one with most workers counts.

    Returns:
        What is known; of a class that nobody knows its name and the usual attributes.
    """
    inner = _main_loader(loader)
    if isinstance(inner, H5Loader):
        return LoaderFacts(
            name=type(inner).__name__,
            has_thread=True,
            is_own=True,
            batch_size=inner.batch_size,
            files=tuple(_own_files(inner)),
        )
    workers = getattr(inner, "num_workers", 0)
    context = getattr(inner, "multiprocessing_context", None)
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method(allow_none=True)
    return LoaderFacts(
        name=type(inner).__name__,
        num_workers=workers if isinstance(workers, int) else 0,
        has_thread=_has_reading_thread(),
        batch_size=_whole(getattr(inner, "batch_size", None)),
        prefetch_factor=_whole(getattr(inner, "prefetch_factor", None)),
        pin_memory=bool(inner.pin_memory) if hasattr(inner, "pin_memory") else None,
        start_method=method if workers else None,
        is_persistent=bool(getattr(inner, "persistent_workers", False)),
    )


def _main_loader(loader: Any) -> Any:
    """The loader inside wrappers and collections that has most to do."""
    flattened = getattr(loader, "flattened", None)
    candidates = list(flattened) if isinstance(flattened, list) and flattened else [loader]
    inner = [_unwrapped(one) for one in candidates]
    return max(inner, key=lambda one: (isinstance(one, H5Loader), _whole(getattr(one, "num_workers", 0)) or 0))


def _unwrapped(loader: Any) -> Any:
    """A loader that stands in front of another keeps it as `loader`."""
    for _ in range(4):
        if isinstance(loader, DataLoader | H5Loader) or not hasattr(loader, "loader"):
            break
        loader = loader.loader
    return loader


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def find_readers(loader: Any) -> Readers:
    """Who loads at the moment.

    Args:
        loader: As for `describe_loader`.

    Returns:
        Process and thread numbers. Where the workers of a loader cannot be told from other processes that this one
        has started, all of those.
    """
    inner = _main_loader(loader)
    threads = [one.native_id for one in threading.enumerate() if one.name == _READING_THREAD and one.native_id]
    if isinstance(inner, H5Loader) or not getattr(inner, "num_workers", 0):
        return Readers((), threads)
    # A loader's own attribute holds the iteration only if its workers are kept; Lightning has it in both cases.
    running = [getattr(inner, "_iterator", None), *getattr(getattr(loader, "_iterator", None), "iterators", [])]
    workers = [worker for one in running for worker in getattr(one, "_workers", [])]
    processes = workers or multiprocessing.active_children()
    # A reading thread only hands on what the workers have made.
    return Readers([one.pid for one in processes if one.pid is not None and _is_running(one)], ())


def _is_running(process: Any) -> bool:
    with suppress(ValueError, AssertionError):  # closed, or of another process
        return bool(process.is_alive())
    return False


def _has_reading_thread() -> bool:
    return any(one.name == _READING_THREAD for one in threading.enumerate())


# Files ---------------------------------------------------------------------------------------------------


def _main_layouts(loader: H5Loader) -> tuple[H5DatasetLayout, ...]:
    """The field that decides the speed; none where all are kept in memory."""
    source = loader.source
    fields = [layouts for name, layouts in source.fields.items() if not source.is_kept(name)]
    return max(fields, key=lambda layouts: sum(one.total_bytes for one in layouts), default=())


def _own_files(loader: H5Loader) -> Iterable[FileFacts]:
    for layout in _main_layouts(loader)[:_MOST_FILES]:
        yield FileFacts(
            path=layout.path,
            key=layout.key,
            dtype=str(layout.dtype),
            chunk_shape=layout.chunk_shape,
            chunk_samples=layout.chunk_rows or 1,
            filters=tuple(layout.filters),
            is_direct=layout.engine is Engine.RAW,
            order=str(loader.shuffle),
        )


def cached_files(loader: Any) -> dict[str, float]:
    """Share of each file of our own loader that is in the page cache, to be asked before it is read.

    Args:
        loader: As for `describe_loader`.

    Returns:
        Path -> share, 0 to 1; empty for other loaders.
    """
    inner = _main_loader(loader)
    if not isinstance(inner, H5Loader):
        return {}
    shares = {one.path: cached_share(one) for one in _main_layouts(inner)[:_MOST_FILES]}
    return {path: share for path, share in shares.items() if share is not None}


def name_files(facts: LoaderFacts, paths: Iterable[str], cached: dict[str, float]) -> tuple[FileFacts, ...]:
    """Complete what is known of the files: how samples lie in each, and what would make it fast.

    Opens the files, so it is not for every step.

    Args:
        facts: From `describe_loader`.
        paths: Files that a foreign loader reads, from `open_files`.
        cached: From `cached_files`.

    Returns:
        The files, at most four.
    """
    known = {one.path: one for one in facts.files}
    for path in () if facts.is_own else paths:
        known.setdefault(path, FileFacts(path))
    return tuple(_completed(one, cached.get(one.path)) for one in list(known.values())[:_MOST_FILES])


def open_files(readers: Readers) -> list[str]:
    """HDF5 files that those who load have open, as the kernel says.

    Args:
        readers: From `find_readers`; without processes, this one is looked at.

    Returns:
        Paths, sorted; none where the kernel does not say.
    """
    found: dict[str, None] = {}
    for process in readers.processes or (os.getpid(),):
        folder = f"/proc/{process}/fd"
        with suppress(OSError):
            for number in os.listdir(folder):
                with suppress(OSError):
                    path = os.readlink(f"{folder}/{number}")
                    if path.lower().endswith(_H5_ENDINGS):
                        found[path] = None
    return sorted(found)


def _completed(file: FileFacts, share: float | None) -> FileFacts:
    """A file with its layout and the line that makes it fast."""
    try:
        report = inspect_file(file.path, probe_seconds=0)
    except (GpuFeedError, OSError, ValueError, RuntimeError):  # gone, or no HDF5 after all: the rest still holds
        return file
    main = next((one for one in report.datasets if one.key == (file.key or report.main_key)), None)
    if main is None:
        return file
    return FileFacts(
        path=file.path,
        key=main.key,
        dtype=main.dtype,
        chunk_shape=main.chunk_shape,
        chunk_samples=main.chunk_samples or 1,
        filters=tuple(main.filters),
        is_direct=file.is_direct,
        order=file.order,
        command=report.advice.command,
        cached_share=share,
    )
