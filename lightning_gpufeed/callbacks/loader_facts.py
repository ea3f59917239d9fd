"""What can be known of a loader from outside: its workers, its arguments, the HDF5 files that it reads.

Private names of torch and Lightning, each asserted in `tests/test_private_api.py`:

==========================================  ===============================================================
name                                        what for
==========================================  ===============================================================
DataLoader._iterator                        the running iteration of a loader with persistent workers
_MultiProcessingDataLoaderIter._workers     which processes load for it
_data_queue, _task_info, _rcvd_idx          of the same: whether a batch is ready
CombinedLoader._iterator.iterators          the same for a loader whose workers are not kept (Lightning's)
==========================================  ===============================================================

All files that a process has open are listed by the kernel, which names the HDF5 files of a Dataset of any kind.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import h5py
from torch.utils.data import DataLoader

from lightning_gpufeed.diagnose.counters import FileFacts, LoaderFacts
from lightning_gpufeed.diagnose.observer import Readers
from lightning_gpufeed.errors import GpuFeedError
from lightning_gpufeed.hdf5.access import open_file
from lightning_gpufeed.hdf5.inspection import inspect_file
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.report import Advice
from lightning_gpufeed.hdf5.residency import cached_share

__all__ = ["cached_files", "describe_loader", "find_readers", "is_ready", "name_files", "open_files"]

_READING_THREAD = "gpufeed-reader"
_H5_ENDINGS = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".h5ad", ".mat")
_MOST_FILES = 4
_MOST_OBJECTS = 256


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
    num_workers = sum(_whole(one, "num_workers") or 0 for one in _loaders(loader))
    return LoaderFacts(
        name=type(inner).__name__,
        num_workers=num_workers,
        has_thread=_has_reading_thread(),
        batch_size=_whole(inner, "batch_size"),
        prefetch_factor=_whole(inner, "prefetch_factor"),
        pin_memory=_flag(inner, "pin_memory"),
        start_method=_start_method(inner) if num_workers else None,
        is_persistent=bool(_flag(inner, "persistent_workers")),
    )


def _loaders(loader: Any) -> list[Any]:
    """The loaders in a collection of Lightning's, or the one, without what stands in front of them."""
    flattened = _attribute(loader, "flattened")
    return [_unwrapped(one) for one in (flattened if isinstance(flattened, list) and flattened else [loader])]


def _main_loader(loader: Any) -> Any:
    """The one that has most to do."""
    return max(_loaders(loader), key=lambda one: (isinstance(one, H5Loader), _whole(one, "num_workers") or 0))


def _unwrapped(loader: Any) -> Any:
    """A loader that stands in front of another keeps it as `loader`."""
    for _ in range(4):
        inner = _attribute(loader, "loader")
        if isinstance(loader, DataLoader | H5Loader) or inner is None:
            break
        loader = inner
    return loader


def _attribute(owner: Any, name: str) -> Any:
    """An attribute of a class that nobody knows, where reading one may do anything; None if it cannot be read."""
    try:
        return getattr(owner, name, None)
    except Exception:  # whatever a property raises
        return None


def _whole(owner: Any, name: str) -> int | None:
    value = _attribute(owner, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _flag(owner: Any, name: str) -> bool | None:
    value = _attribute(owner, name)
    return value if isinstance(value, bool) else None


def _start_method(loader: Any) -> str | None:
    """How its workers are started."""
    context = _attribute(loader, "multiprocessing_context")
    if isinstance(context, str):
        return context
    ask = _attribute(context, "get_start_method")
    if callable(ask):
        return str(ask())
    return multiprocessing.get_start_method(allow_none=True)


def find_readers(loader: Any) -> Readers:
    """Who loads at the moment.

    Args:
        loader: As for `describe_loader`.

    Returns:
        Process and thread numbers. Where the workers of a loader cannot be told from other processes that this one
        has started, all of those.
    """
    loaders = _loaders(loader)
    threads = [one.native_id for one in threading.enumerate() if one.name == _READING_THREAD and one.native_id]
    if not any(_whole(one, "num_workers") for one in loaders):
        return Readers((), threads)
    running = _running_iterations(loader, loaders)
    workers = {worker.pid: worker for one in running for worker in _attribute(one, "_workers") or []}
    processes = list(workers.values()) or multiprocessing.active_children()
    # A reading thread only hands on what the workers have made.
    return Readers([one.pid for one in processes if one.pid is not None and _is_running(one)], ())


def is_ready(loader: Any) -> bool | None:
    """Whether a loader has a batch ready: one that workers have made waits in a queue.

    Args:
        loader: As for `describe_loader`.

    Returns:
        None where that is not known. With several loaders, whether all have one.
    """
    answers = [_has_ready(one) for one in _running_iterations(loader, _loaders(loader))]
    return None if not answers or None in answers else all(answers)


def _running_iterations(loader: Any, loaders: list[Any]) -> list[Any]:
    # A loader's own attribute holds the iteration only if its workers are kept; Lightning has it in both cases.
    running = _attribute(_attribute(loader, "_iterator"), "iterators") or [
        _attribute(one, "_iterator") for one in loaders
    ]
    own = [one for one in loaders if isinstance(one, H5Loader)]
    return own or [one for one in running if one is not None]


def _has_ready(running: Any) -> bool | None:
    if isinstance(running, H5Loader):
        return running.is_ready()
    queue, infos, wanted = (_attribute(running, name) for name in ("_data_queue", "_task_info", "_rcvd_idx"))
    if queue is None or infos is None:
        return None
    try:
        # One that came out of turn was put aside until it is wanted.
        return len(infos.get(wanted, ())) == 2 or queue.qsize() > 0
    except (NotImplementedError, OSError, TypeError, AttributeError):  # not on every system, or closed
        return None


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
            is_direct=layout.engine is Engine.RAW or loader.source.fits_cache,
            order=str(getattr(loader.shuffle, "order", loader.shuffle)),
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
    for path in () if facts.is_own else filter(_may_be_hdf5, paths):
        known.setdefault(path, FileFacts(path))
    return tuple(_completed(one, cached.get(one.path)) for one in list(known.values())[:_MOST_FILES])


def _may_be_hdf5(path: str) -> bool:
    """Whether to show it: not a file of another kind with such a name. One that is gone has been one, by its name."""
    return not os.path.exists(path) or (os.path.isfile(path) and bool(h5py.is_hdf5(path)))


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
        with open_file(file.path) as h5_file:
            if _has_many_datasets(h5_file):
                return file
        report = inspect_file(file.path, probe_seconds=0)
    except (GpuFeedError, OSError, ValueError, RuntimeError):  # gone, or in use: the rest still holds
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
        command=_exact(report.advice),
        cached_share=share,
    )


def _exact(advice: Advice) -> str | None:
    """The line to type, without what would round values."""
    if advice.command is None or "rounded" not in advice.reason:
        return advice.command
    return re.sub(r"--scale \S+", "--keep-dtype", advice.command)


def _has_many_datasets(h5_file: Any) -> bool:
    """Whether looking at each would take long: files with a dataset per sample have millions."""
    names: list[str] = []

    def count(name: str) -> bool | None:
        names.append(name)
        return True if len(names) > _MOST_OBJECTS else None

    return bool(h5_file.visit(count))
