"""What this machine needs for the simple parts of loading: measured once, in about twenty milliseconds.

::

    read      a file in the page cache  -> rows in memory that is new to the process, as a dataset reads them
    convert   8-bit numbers             -> floats in new memory, `x.astype(numpy.float32) / 255`
    ship      a batch                   -> shared memory; then mapped a second time and touched, as the receiver does

New memory is what costs most: the kernel makes every page of it ready at the first touch. Rows of a batch are all
held until it is put together, so a loader pays that for each of them, and it is part of all three figures here. Where
a process has kept the memory of an earlier batch it pays less: the figures are upper ones.
"""

from __future__ import annotations

import functools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_gpufeed.diagnose.counters import UnitCosts

__all__ = ["measure_unit_costs"]

_ROW_BYTES = 150_000
"""About an image of 224 x 224 pixels."""
_NUM_READ = 14
_NUM_CONVERTED = 7
_NUM_REPEATS = 3

_Array = np.ndarray[Any, Any]


@functools.cache
def measure_unit_costs() -> UnitCosts | None:
    """Measure what reading, converting and handing over cost on one core.

    The calling thread does all of it, without torch; its time on a core counts, so that others who want the core do
    not. Nothing is left: no file, no memory, no random number drawn. The first call measures, later ones repeat its
    answer.

    Returns:
        None where there is no folder for a temporary file, no memory, or no way to share it.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        rows = np.ones((_NUM_READ, _ROW_BYTES), np.uint8)
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(rows.data)
            read = _seconds(rows.nbytes, functools.partial(_read, file.fileno()))
        converted = rows[:_NUM_CONVERTED]
        convert = _seconds(converted.size * 4, functools.partial(_convert, converted))
        ship = statistics.median(_ship_seconds(rows) for _ in range(_NUM_REPEATS))
    except (OSError, ValueError, MemoryError):
        return None
    return UnitCosts(read / rows.nbytes, convert / converted.size, ship / rows.nbytes)


def _seconds(num_bytes: int, work: Callable[[_Array], None]) -> float:
    """Time on a core of work that fills memory new to the process, and of giving the memory back."""
    times = []
    memory = mmap.mmap(-1, num_bytes)
    for _ in range(_NUM_REPEATS):
        begin = time.thread_time()
        work(np.frombuffer(memory, np.uint8))
        memory.madvise(mmap.MADV_DONTNEED)  # the next touch finds new pages
        times.append(time.thread_time() - begin)
    return statistics.median(times)


def _read(descriptor: int, out: _Array) -> None:
    """Read a file row by row."""
    for number, row in enumerate(out.reshape(-1, _ROW_BYTES)):
        os.preadv(descriptor, [row.data], number * _ROW_BYTES)


def _convert(rows: _Array, out: _Array) -> None:
    """Make floats, with one result in between that goes at once, as the expression of numpy has it."""
    for row, floats in zip(rows, out.view(np.float32).reshape(rows.shape), strict=True):
        np.divide(row.astype(np.float32), 255, out=floats)


def _ship_seconds(rows: _Array) -> float:
    """Time on a core of what torch does for a tensor of a worker, without a second process to hand it to."""
    begin = time.thread_time()
    descriptor = os.memfd_create("gpufeed")
    try:
        os.ftruncate(descriptor, rows.nbytes)
        sent = np.frombuffer(mmap.mmap(descriptor, rows.nbytes), np.uint8)
        sent.reshape(rows.shape)[:] = rows
        received = np.frombuffer(mmap.mmap(descriptor, rows.nbytes), np.uint8)
        received[:: mmap.PAGESIZE].sum()
        del sent, received  # and with them the maps
    finally:
        os.close(descriptor)
    return time.thread_time() - begin
