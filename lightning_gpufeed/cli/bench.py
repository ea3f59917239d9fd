"""Measures how fast a file can be fed on this machine, without a model, and what limits that.

::

    first pass     | half of the time, or to the end of the file |
    feed                                                           | the rest of the time                          |
    feed, step                                                     | half of the rest      | a step after a batch  |

The first pass may come from storage, and maps the files. After a whole one, epoch follows epoch; otherwise the feed
goes on in the first. Batches come from the same loader as in a training, are watched by the same observer, and judged
by the same verdict. The one who takes them does nothing, so the feed sets the pace.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.callbacks.loader_facts import cached_files, describe_loader, find_readers, name_files
from lightning_gpufeed.cli.bench_report import CACHED_SHARE, BenchReport, FeedRate, StepTrial
from lightning_gpufeed.diagnose.counters import EpochCounters, FileFacts, StepTotals
from lightning_gpufeed.diagnose.observer import Observer
from lightning_gpufeed.diagnose.verdict import BOUND_SHARE, judge
from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import StrPath
from lightning_gpufeed.hdf5.arguments import whole_number
from lightning_gpufeed.hdf5.keys import group_by_split, list_arrays
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.order import Shuffle, parse_shuffle
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["bench_file"]

_FASTEST_BYTES, _FASTEST_SAMPLES = 20e9, 4e6
"""Hardly a feed delivers more of them in a second."""
_MOST_LISTED = 1 << 23
_MOST_DIFFERENT = 8
"""Epochs with an order of their own; then the orders come again."""
_NUM_COPIES, _COPY_SECONDS, _COPY_BYTES = 10, 0.004, 1 << 20


def bench_file(
    path: StrPath,
    *,
    keys: Sequence[str] | None = None,
    batch_size: int = 256,
    shuffle: Shuffle | str = "full",
    seconds: float = 5.0,
    step_seconds: float = 0.0,
) -> BenchReport:
    """Feed batches for a while, and judge.

    Args:
        path: An HDF5 file.
        keys: Datasets to feed; None takes the largest one and all of the same split and length.
        batch_size: Samples per batch; a file that has fewer is fed in batches of all of them.
        shuffle: Order of the samples, see `lightning_gpufeed.hdf5.order`.
        seconds: Time to measure for, above 0; at least one batch is taken in each part.
        step_seconds: Length of a step to pretend after each batch in the last part; 0 for none.

    Returns:
        The report.

    Raises:
        ValueError: An argument is out of range.
        LayoutError: The file cannot be used, or holds no numbers.
        FileNotFoundError: There is no such file.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"seconds is {seconds:g}; expected a number of seconds above 0.")
    if not (math.isfinite(step_seconds) and step_seconds >= 0):
        raise ValueError(f"the step is {1000 * step_seconds:g} ms; expected a number of milliseconds, 0 or more.")
    whole_number("batch_size", batch_size, 1)
    with closing(H5Source(path, keys or _keys_of_largest(path))) as source:
        if not source.specs:
            raise LayoutError(
                f"{os.fspath(path)}: {', '.join(map(repr, source.fields))} is text or of varying length, and no "
                f"number goes with it; expected at least one array of numbers. Name others with --keys."
            )
        bench = _Bench(source, min(batch_size, source.num_samples), parse_shuffle(shuffle))
        return bench.run(os.fspath(path), seconds, step_seconds)


def _keys_of_largest(path: StrPath) -> list[str] | None:
    """The largest array and all that belong to it; None, for the message, where there is none."""
    arrays = list_arrays(path)
    numbers = [one for one in arrays if one.kind in "biufc" and one.shape] or [one for one in arrays if one.shape]
    if not numbers:
        return None
    largest = max(numbers, key=lambda one: math.prod(one.shape))
    group = group_by_split(arrays)[largest.split]
    return [one.key for one in group if one.shape[:1] == largest.shape[:1] and one.kind != "V"] or None


class _Bench:
    """One source, watched while it is fed."""

    def __init__(self, source: H5Source, batch_size: int, shuffle: Shuffle) -> None:
        self._source, self._batch_size, self._shuffle = source, batch_size, shuffle
        self._loader = H5Loader(source, batch_size, shuffle=shuffle)
        self._observer = Observer(torch.device("cpu"), lambda: find_readers(self._loader), interval_seconds=0.5)
        self._observer.loader = describe_loader(self._loader)
        self._num_parts = 0

    def run(self, path: str, seconds: float, step_seconds: float) -> BenchReport:
        """All parts, one after the other."""
        cached = cached_files(self._loader)
        with closing(self._observer), ExitStack() as running:
            batches, loader = iter(running.enter_context(self._loader)), self._loader
            share = min(cached.values(), default=None)
            first = self._take(batches, seconds / 2, cached_share=share, is_first=True)
            first_usage = self._observer.counters().readers
            left = max(seconds - first.seconds, seconds / 2)
            if first.is_complete:
                share, loader = self._share_after(), running.enter_context(self._long_loader(left))
                batches = _endless(loader)
                next(batches)  # the measured part does not pay for the start
            feed = self._take(batches, left / 2 if step_seconds else left, cached_share=share)
            counters = self._observer.counters()
            batches = chain(batches, _endless(loader))
            trial = self._try_step(batches, left / 2, step_seconds, feed) if step_seconds else None
        files = name_files(counters.loader, (), cached)
        counters = _without_a_step(counters, feed, files)
        is_in_memory = first.is_complete or (share or 0.0) >= CACHED_SHARE
        return BenchReport(
            path=path,
            keys=tuple(layouts[0].key for layouts in self._source.fields.values()),
            num_samples=self._source.num_samples,
            batch_size=self._batch_size,
            shuffle=str(self._shuffle),
            sample_bytes=self._sample_bytes,
            engines=tuple(self._source.engine_lines),
            is_decoded=self._source.needs_decoding and not self._source.fits_cache,
            first_pass=first,
            first_usage=first_usage,
            feed=feed,
            usage=counters.readers,
            read_ratio=counters.read_ratio,
            copy_bytes_per_second=_copy_rate(self._source) if is_in_memory else None,
            num_cores=counters.machine.num_cores,
            verdict=judge(counters),
            command=next((one.command for one in files), None),
            step=trial,
        )

    def _share_after(self) -> float | None:
        """Share of the file that is in memory after all of it was read."""
        if not self._observer.loader.files:  # it is the loader that keeps it
            return 1.0
        return min(cached_files(self._loader).values(), default=None)

    @property
    def _sample_bytes(self) -> int:
        return sum(spec.row_bytes for spec in self._source.specs.values())

    def _take(
        self,
        batches: Iterator[Any],
        seconds: float,
        *,
        step_seconds: float = 0.0,
        cached_share: float | None = None,
        is_first: bool = False,
    ) -> FeedRate:
        """Take batches until the time is over or they end, one at least."""
        observer, timer = self._observer, self._observer.steps
        observer.begin_epoch(self._num_parts)
        self._num_parts += 1
        num_batches = num_samples = 0
        first_batch_seconds = elapsed = 0.0
        begin = time.perf_counter()
        # A first pass whose larger part is over goes on to its end: what is left of it would be little to judge by.
        while not num_batches or elapsed < seconds or (is_first and 2 * num_samples > self._source.num_samples):
            observer.begin_wait()
            batch = next(batches, None)
            if batch is None:  # and the reading thread has ended, with what it used since the latest look
                break
            observer.end_wait()
            first_batch_seconds = first_batch_seconds or time.perf_counter() - begin
            observer.look_at(batch)
            num_batches, num_samples = num_batches + 1, num_samples + len(next(iter(batch.values())))
            timer.begin_compute()
            if step_seconds:
                time.sleep(step_seconds)
            timer.end_compute()
            observer.end_step()
            elapsed = time.perf_counter() - begin
        else:
            observer.sample()
        return FeedRate(
            num_samples=num_samples,
            num_batches=num_batches,
            num_bytes=num_samples * self._sample_bytes,
            seconds=elapsed,
            first_batch_seconds=first_batch_seconds,
            is_complete=num_samples >= self._source.num_samples,
            cached_share=cached_share,
        )

    def _try_step(self, batches: Iterator[Any], seconds: float, step_seconds: float, feed: FeedRate) -> StepTrial:
        """Take batches with a step after each."""
        rate = self._take(batches, seconds, step_seconds=step_seconds)
        share = self._observer.counters().steps.wait_share
        has_waited = share >= BOUND_SHARE
        # What was tried counts for more than what follows from the feed alone.
        shortest = max(feed.batch_seconds, rate.batch_seconds) if has_waited else min(feed.batch_seconds, step_seconds)
        return StepTrial(step_seconds, share, has_waited, shortest)

    def _long_loader(self, seconds: float) -> H5Loader:
        """A loader whose epoch is many epochs in a row: its one thread can be watched from the beginning to the end."""
        wanted = seconds * min(_FASTEST_SAMPLES, _FASTEST_BYTES / max(1, self._sample_bytes))
        at_least = max(2 * self._batch_size, int(min(_MOST_LISTED, wanted)))
        order = _many_epochs(self._shuffle, self._source.num_samples, at_least)
        return H5Loader(self._source, self._batch_size, shuffle=None, indices=order)


def _many_epochs(shuffle: Shuffle, num_samples: int, at_least: int) -> npt.NDArray[np.int64]:
    """The orders of whole epochs one after the other, from epoch 1 on, until there are enough samples."""
    num_epochs = -(-at_least // num_samples)
    drawn = [shuffle.permutation(num_samples, 0, 1 + epoch) for epoch in range(min(num_epochs, _MOST_DIFFERENT))]
    return np.tile(np.concatenate(drawn), -(-num_epochs // len(drawn)))


def _without_a_step(counters: EpochCounters, feed: FeedRate, files: tuple[FileFacts, ...]) -> EpochCounters:
    """What counts for a verdict on the feed alone: whoever takes the batches does nothing but wait for them."""
    steps = StepTotals(num_steps=feed.num_batches, elapsed_seconds=feed.seconds, wait_seconds=feed.seconds)
    return dataclasses.replace(counters, steps=steps, loader=dataclasses.replace(counters.loader, files=files))


def _endless(loader: H5Loader) -> Iterator[Any]:
    while True:
        yield from loader


def _copy_rate(source: H5Source) -> float | None:
    """Bytes per second of a plain copy of the largest dataset out of the page cache, by one thread."""
    # `measure_unit_costs` is no bound: it copies into new memory, as a dataset that returns new arrays does.
    layout = max((layouts[0] for layouts in source.fields.values()), key=lambda one: one.total_bytes)
    blocks = layout.block_offsets
    if blocks is None or not (blocks >= 0).any():
        return None
    begin = int(blocks[blocks >= 0].min())
    # Compressed chunks are smaller than this; then the end of the file comes first.
    end = int(blocks.max()) + (layout.chunk_bytes or layout.total_bytes)
    buffer, offset, rates = memoryview(bytearray(_COPY_BYTES)), begin, []
    with open(layout.storage_path, "rb", buffering=0) as file:
        for _ in range(_NUM_COPIES):
            num_bytes, start = 0, time.thread_time()
            while (seconds := time.thread_time() - start) < _COPY_SECONDS:
                count = os.preadv(file.fileno(), [buffer[: end - offset]], offset)
                num_bytes, offset = num_bytes + count, offset + count if count and offset + count < end else begin
            rates.append(num_bytes / seconds)
    return max(rates) or None  # whatever else the machine does makes it slower
