"""Finds out what is in an HDF5 file, how fast it is read, and what would make that faster.

Measured are the share of the file in the page cache (first, because all that follows brings pages in), the order
of the labels, and the rate of reading in a full shuffle. `lightning_gpufeed.hdf5.report` says what comes out.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import h5py
import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.errors import FeedError, LayoutError
from lightning_gpufeed.hdf5.access import PRIVATE_GROUP, StrPath, list_datasets, open_file
from lightning_gpufeed.hdf5.agreement import refuse_slow_addresses
from lightning_gpufeed.hdf5.keys import ArrayInfo, find_image_key, find_label_key, group_by_split
from lightning_gpufeed.hdf5.labels import describe_labels
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, Storage, read_layout
from lightning_gpufeed.hdf5.order import FullShuffle
from lightning_gpufeed.hdf5.readers.reader import is_resident
from lightning_gpufeed.hdf5.readers.row_blocks import block_rows
from lightning_gpufeed.hdf5.remote.addresses import absolute, size_of
from lightning_gpufeed.hdf5.report import (
    Advice,
    DatasetReport,
    FileReport,
    LabelOrder,
    LabelReport,
    ProbeReport,
    bytes_text,
)
from lightning_gpufeed.hdf5.residency import cached_share
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["inspect_file"]

_BATCH_SIZE = 256
_NUM_VALUE_SAMPLES = 16
_MEMORY_BYTES = 256 << 20
_TINY_CHUNK_BYTES = 64 << 10
_MANY_CHUNKS = 4096
# With more samples the probe draws with repeats: sorting a permutation would take longer than the probe.
_MOST_PERMUTED = 1 << 22

Array = npt.NDArray[Any]
T = TypeVar("T")


def inspect_file(path: StrPath, *, probe_seconds: float = 1.0) -> FileReport:
    """Look at a file and measure how fast it is read.

    Args:
        path: An HDF5 file.
        probe_seconds: Time to read for; 0 leaves the probe out.

    Returns:
        The report. A dataset that cannot be used is listed with the reason, and fails nothing.

    Raises:
        ValueError: `probe_seconds` is not a number of 0 or more.

    Example:
        >>> inspect_file("floats.h5", probe_seconds=0).advice.command
        'gpufeed pack floats.h5 OUT.h5 --scale 255'
    """
    if not (math.isfinite(probe_seconds) and probe_seconds >= 0):
        raise ValueError(f"probe_seconds is {probe_seconds}; expected a number of seconds, 0 or more.")
    return _Inspection(os.fspath(path)).report(probe_seconds)


@dataclass(frozen=True)
class _Split:
    """The arrays of one split: what decides the speed (images, else the largest), their labels, and all of them."""

    main: H5DatasetLayout
    label: H5DatasetLayout | None
    members: tuple[H5DatasetLayout, ...]


class _Inspection:
    """One look at one file; what cannot be used is noted on the way.

    Raises `FileNotFoundError` or `LayoutError` for a file that cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._problems: dict[str, str] = {}
        with open_file(path) as h5_file:
            self._root = {name: h5_file.attrs.get(name) for name in ("gpufeed_format", "gpufeed_version")}
            self._checksums = _count_checksums(h5_file)
            skipped = h5_file.get(f"{PRIVATE_GROUP}/skipped")
            self._num_skipped = 0 if skipped is None else int(skipped.shape[0])
            keys = [*list_datasets(h5_file), *_broken_links(h5_file)]
        self._layouts = [layout for key in keys if (layout := self._layout(key)) is not None]

    def _layout(self, key: str) -> H5DatasetLayout | None:
        """The layout of a dataset, None and a note if it cannot be used."""
        try:
            layout = read_layout(self._path, key)
            if not is_resident([layout], _MEMORY_BYTES):
                refuse_slow_addresses([layout])
        except (LayoutError, OSError, RuntimeError, TypeError, ValueError) as error:  # the latter are h5py's
            self._note(key, error)
            return None
        if not layout.num_samples:
            self._problems[key] = f"it holds no samples (shape {layout.shape})"
            return None
        return layout

    def report(self, probe_seconds: float) -> FileReport:
        """Measure, and put everything together."""
        splits = _find_splits(self._path, self._layouts)
        split = max(splits, key=lambda one: one.main.total_bytes, default=None)
        share = cached_share(split.main) if split else None
        datasets = [self._describe(layout) for layout in self._layouts]
        labels = {one.main.key: self._labels_of(one) for one in splits}
        probe = self._probe(split, probe_seconds) if split and probe_seconds else None
        main = next((one for one in datasets if split and one.key == split.main.key), None)
        advice = self._advise(split, main, labels[main.key]) if split and main else _NO_DATA
        return FileReport(
            path=self._path,
            size_bytes=size_of(self._path),
            size_ratio=self._size_ratio(),
            format_version=None if self._root["gpufeed_format"] is None else int(self._root["gpufeed_format"]),
            written_by=None if self._root["gpufeed_version"] is None else str(self._root["gpufeed_version"]),
            num_skipped=self._num_skipped,
            datasets=tuple(datasets),
            problems=tuple(self._problems.items()),
            labels=tuple(one for one in labels.values() if one is not None),
            main_key=None if main is None else main.key,
            cached_share=share,
            probe=probe,
            advice=advice,
        )

    def _size_ratio(self) -> float | None:
        """Bytes of the file for a byte of the data stored in it."""
        elsewhere = (Storage.VIRTUAL, Storage.EXTERNAL)
        own = [layout for layout in self._layouts if layout.storage not in elsewhere]
        own = [layout for layout in own if layout.storage_path == absolute(self._path)]
        total = sum(layout.total_bytes for layout in own)
        if self._problems or not total or not all(layout.is_tensor for layout in own):
            return None
        return size_of(self._path) / total

    def _describe(self, layout: H5DatasetLayout) -> DatasetReport:
        chunk, sample = layout.chunk_shape, layout.sample_shape
        per_axis = [-(-n // c) for n, c in zip(sample, chunk[1:], strict=True)] if chunk else []
        padded = math.prod(n * c for n, c in zip(per_axis, chunk[1:], strict=True)) if chunk else 1
        engine, reason = str(layout.engine), layout.engine_reason
        if is_resident([layout], _MEMORY_BYTES):
            engine, reason = "memory", "read once and kept" + ("" if layout.is_tensor else f": {reason}")
        return DatasetReport(
            key=layout.key,
            shape=layout.shape,
            dtype=str(layout.dtype),
            storage=str(layout.storage),
            data_bytes=layout.total_bytes,
            chunk_shape=chunk,
            chunk_samples=chunk[0] if chunk else None,
            chunk_bytes=layout.chunk_bytes,
            num_chunks=layout.num_chunks,
            num_missing_chunks=layout.num_missing_chunks,
            has_edge_chunk=layout.has_edge_chunk,
            chunks_per_sample=math.prod(per_axis),
            read_ratio=padded / max(1, math.prod(sample)) if chunk else 1.0,
            filters=layout.filters,
            engine=engine,
            engine_reason=reason,
            source_paths=tuple(stamp.path for stamp in layout.stamps if stamp.path != layout.path),
            num_checksums=self._checksums.get(layout.key, 0),
        )

    def _unless_damaged(self, key: str, read: Callable[[], T]) -> T | None:
        """What `read` returns, None and a note if a chunk cannot be decoded."""
        try:
            return read()
        except FeedError as error:
            self._note(key, error)
            return None

    def _note(self, key: str, error: Exception) -> None:
        """Keep a reason; that of the first failure says most. The report names the file already."""
        text = str(error)
        for name in (self._path, os.path.abspath(self._path)):
            text = text.removeprefix(f"{name}: ")
        self._problems.setdefault(key, text)

    def _labels_of(self, split: _Split) -> LabelReport | None:
        label = split.label
        if label is None or label.dtype.kind not in "biu" or math.prod(label.sample_shape) != 1:
            return None  # masks, several values per sample, or numbers that are not classes
        everything = np.arange(label.num_samples)
        with closing(H5Source(self._path, [label.key])) as source:
            values = self._unless_damaged(label.key, lambda: source.read_field(label.key, everything))
        return (
            None
            if values is None
            else describe_labels(label.key, values.numpy().reshape(-1), chunk_rows=block_rows(split.main))
        )

    def _probe(self, split: _Split, seconds: float) -> ProbeReport | None:
        keys = tuple(layout.key for layout in (split.main, split.label) if layout is not None)
        if not split.main.is_tensor or self._problems.keys() & set(keys):
            return None
        with closing(H5Source(self._path, keys)) as source, _one_thread():
            return self._unless_damaged(split.main.key, lambda: _measure_rate(source, seconds))

    def _advise(self, split: _Split, main: DatasetReport, labels: LabelReport | None) -> Advice:
        """Name what costs most, and the command against it."""
        values = None if main.key in self._problems or not split.main.is_tensor else self._some_values(split.main)
        if main.key in self._problems:
            return Advice(f"{main.key} is damaged; copy or pack the file again")
        if values is None:
            return Advice(
                f"{main.key} holds values of different lengths, which are all kept in memory; write a Dataset that "
                f"returns arrays of one shape, and pack that",
                "gpufeed pack package.module:dataset OUT.h5",
            )
        if main.engine == "memory":
            return Advice("all of it is kept in memory")
        fit = _fit_of(split.main, values)
        options = [fit.option] if fit.option else []
        if main.engine != Engine.RAW:
            is_ordered = labels is not None and labels.order in (LabelOrder.SORTED, LabelOrder.CLUSTERED)
            options += ["--shuffle"] if is_ordered else []
            reason = _why_slow(main)
        elif main.chunk_bytes is not None and main.chunk_bytes < _TINY_CHUNK_BYTES and main.num_chunks >= _MANY_CHUNKS:
            reason = f"{main.num_chunks:,} chunks of {bytes_text(main.chunk_bytes)} are looked up at every start"
        elif fit.is_smaller:
            times = split.main.dtype.itemsize
            reason = f"{main.dtype} values that uint8 can hold{fit.remark} take {times} times its bytes"
        else:
            return Advice("it is gathered straight from the mapped file already")
        return Advice(reason, self._pack_command(split, options, keeps_values=not (options or fit.is_smaller)))

    def _some_values(self, layout: H5DatasetLayout) -> Array | None:
        """A few samples from all over the dataset; None and a note if they cannot be read."""
        most = max(1, _MEMORY_BYTES // 4 // max(1, layout.sample_bytes))
        num = min(_NUM_VALUE_SAMPLES, most, layout.num_samples)
        picked = np.unique(np.linspace(0, layout.num_samples - 1, num).round().astype(np.int64))
        with closing(H5Source(self._path, [layout.key])) as source:
            return self._unless_damaged(layout.key, lambda: source.read_field(layout.key, picked).numpy())

    def _pack_command(self, split: _Split, options: Sequence[str], *, keeps_values: bool) -> str:
        """The line to type: as it is in a better layout, or changed on the way."""
        keys = [one.key for one in split.members if one.is_tensor and one.num_samples == split.main.num_samples]
        # What cannot be packed, or has another length, has to be left out.
        if {*keys} != {*self._problems, *(layout.key for layout in self._layouts)}:
            options = [f"--keys {shlex.quote(','.join(keys))}", *options]
        verb = "repack" if keeps_values and not options else "pack"
        return " ".join(["gpufeed", verb, shlex.quote(self._path), "OUT.h5", *options])


_NO_DATA = Advice("there is no dataset that could be read")


def _count_checksums(h5_file: Any) -> dict[str, int]:
    """Key -> chunks with a checksum."""
    found: dict[str, int] = {}

    def note(key: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[key] = int(item.shape[0])

    group = h5_file.get(f"{PRIVATE_GROUP}/crc32")
    if isinstance(group, h5py.Group):
        group.visititems(note)
    return found


def _broken_links(h5_file: Any) -> list[str]:
    """Names at the top that lead nowhere."""
    broken = []
    for name in h5_file:
        try:
            h5_file[name]
        except (KeyError, OSError):
            broken.append(name)
    return broken


def _find_splits(path: str, layouts: Sequence[H5DatasetLayout]) -> list[_Split]:
    """Which arrays belong together, and which of them are images and labels."""
    by_key = {layout.key: layout for layout in layouts}
    groups = group_by_split([ArrayInfo(layout.key, layout.shape, layout.dtype.kind) for layout in layouts])
    splits = []
    for group in groups.values():
        members = tuple(by_key[array.key] for array in group)
        main, label = None, None
        with suppress(LayoutError):  # none can be told for the images, or for the labels
            main = find_image_key(path, group)
        # Of variable length only the references are counted, so they win a draw.
        main = main or max(members, key=lambda layout: (layout.total_bytes, not layout.is_tensor)).key
        with suppress(LayoutError):
            label = find_label_key(path, group, main)
        splits.append(_Split(by_key[main], by_key[label] if label else None, members))
    return splits


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch copy on one core meanwhile, as the loader's reading thread does."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _measure_rate(source: H5Source, seconds: float) -> ProbeReport:
    """Read batches of a full shuffle for a while, as the loader does."""
    specs = source.specs
    sample_bytes = sum(spec.row_bytes for spec in specs.values())
    batch_size = min(_BATCH_SIZE, source.num_samples, max(1, _MEMORY_BYTES // max(1, sample_bytes)))
    out = {name: torch.empty((batch_size, *spec.row_shape), dtype=spec.dtype) for name, spec in specs.items()}
    order = _epoch_order(source.num_samples, 0)
    source.read(order[:1], {name: tensor[:1] for name, tensor in out.items()})  # opens the files
    num_read = position = num_epochs = 0
    rows, elapsed, next_seconds = 1, 0.0, 0.0
    begin = time.perf_counter()
    while elapsed + next_seconds < seconds:
        indices = order[position : position + rows]
        source.read(indices, {name: tensor[: len(indices)] for name, tensor in out.items()})
        num_read, position = num_read + len(indices), position + len(indices)
        if position == len(order):
            num_epochs, position = num_epochs + 1, 0
            order = _epoch_order(source.num_samples, num_epochs)
        elapsed = time.perf_counter() - begin
        # A batch that has to be decoded can take longer than all the time there is: begin with few samples.
        rows = max(1, min(batch_size, 2 * rows, int(seconds / 4 * num_read / elapsed)))
        next_seconds = rows * elapsed / num_read
    return ProbeReport(
        keys=tuple(specs),
        batch_size=batch_size,
        num_samples=num_read,
        seconds=elapsed,
        samples_per_second=num_read / elapsed,
        bytes_per_second=num_read * sample_bytes / elapsed,
        num_passes=num_read / source.num_samples,
    )


def _epoch_order(num_samples: int, epoch: int) -> npt.NDArray[np.int64]:
    """The samples of an epoch in a full shuffle, or a good many drawn from a very long one."""
    if num_samples <= _MOST_PERMUTED:
        return FullShuffle().permutation(num_samples, 0, epoch)
    return np.random.default_rng(epoch).integers(num_samples, size=_MOST_PERMUTED)


@dataclass(frozen=True)
class _Fit:
    """How `pack` can store the values: the option it takes, whether that saves bytes, and what it changes."""

    option: str = ""
    is_smaller: bool = False
    remark: str = ""


def _fit_of(layout: H5DatasetLayout, values: Array) -> _Fit:
    """Judge by some values; `pack` looks at all of them and refuses what does not fit."""
    kind = values.dtype.kind
    if len(layout.sample_shape) < 2 or values.dtype == np.uint8 or kind == "b":
        return _Fit()
    low, high = (float(values.min()), float(values.max())) if kind in "iuf" else (math.nan, math.nan)
    if not (low >= 0 and high <= 255):
        return _Fit("--keep-dtype")
    if kind in "iu":
        return _Fit(is_smaller=values.dtype.itemsize > 1)
    factor = 255 if high <= 1 else 1
    scaled = values.astype(np.float64) * factor
    is_exact = bool((np.abs(scaled - np.rint(scaled)) <= 255 * np.finfo(values.dtype).eps).all())
    return _Fit(f"--scale {factor}", True, "" if is_exact else ", rounded to 256 steps,")


def _why_slow(main: DatasetReport) -> str:
    """What a shuffled sample costs where whole chunks are read."""
    if main.chunk_samples is None:
        return main.engine_reason
    block_bytes = main.data_bytes / main.shape[0] * main.chunk_samples * main.read_ratio
    return (
        f"{main.engine_reason}; a shuffled sample costs a block of {main.chunk_samples} samples, "
        f"{bytes_text(block_bytes)}"
    )
