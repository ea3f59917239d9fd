"""What `examine` says about the layout of an array: how its chunks suit random samples, and what is missing. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

import h5py
import numpy as np

from lightning_gpufeed.hdf5.doctor.findings import Finding, Severity
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, Storage
from lightning_gpufeed.hdf5.readers.decode import why_not_decodable
from lightning_gpufeed.hdf5.readers.reader import is_resident
from lightning_gpufeed.hdf5.report import FileReport, LabelOrder, bytes_text

__all__ = ["array_findings", "file_layout_findings"]

_RESIDENT_BYTES = 256 << 20
_TINY_CHUNK_BYTES = 64 << 10
_MANY_CHUNKS = 4096
# HDF5 before 2.0 cannot read larger chunks.
_MOST_CHUNK_BYTES = 2**32 - 1
# So little is read in no time, however it is stored.
_SMALL_BYTES = 1 << 20
_GOOD_VARIETY = 0.9
# What headers and gaps take in any file says nothing about its layout.
_WASTE_RATIO = 1.5
_WASTE_BYTES = 1 << 20


def array_findings(layout: H5DatasetLayout, path: str) -> Iterator[Finding]:
    """Judge the layout of an array.

    Args:
        layout: The array.
        path: The file, as the user named it.

    Yields:
        Findings, at least one.
    """
    found = [*_missing(layout), *_ragged(layout)]
    # What is read once and kept is as good as its values, however it is stored.
    if layout.total_bytes > _SMALL_BYTES and not is_resident([layout], _RESIDENT_BYTES):
        repack = f"gpufeed repack {shlex.quote(path)} OUT.h5"
        found += [*_chunks(layout, repack), *_elsewhere(layout, repack), *_cache_trap(layout, path)]
    yield from found
    if not found:
        yield Finding(Severity.OK, "layout", _praise(layout), key=layout.key)


def _praise(layout: H5DatasetLayout) -> str:
    """Why nothing is wrong with the layout."""
    if is_resident([layout], _RESIDENT_BYTES):
        return "read once and kept in memory"
    if layout.engine is Engine.RAW:
        return layout.engine_reason
    return f"{bytes_text(layout.total_bytes)}: too small to matter" if layout.total_bytes <= _SMALL_BYTES else "good"


def _missing(layout: H5DatasetLayout) -> Iterator[Finding]:
    """Parts that were never written."""
    if not layout.num_samples:
        seen, why = f"no samples: shape {layout.shape}", "There is nothing to train on."
        yield Finding(Severity.NOTICE, "missing", seen, why, "look at the program that wrote it", layout.key)
        return
    # netCDF-4 keeps an axis without coordinates as an array that nobody writes.
    is_axis = bytes(layout.attributes.get("CLASS", b"")) == b"DIMENSION_SCALE"
    if not layout.num_missing_chunks or layout.block_offsets is None or is_axis:
        return
    fill = layout.fill_value.item() if layout.is_tensor else "empty"
    why = f"HDF5 reads what was never written as {fill}, without an error."
    cure = "write the missing samples, or leave them out: H5DataModule(FILE, train_indices=...)"
    missing = np.flatnonzero(layout.block_offsets < 0)
    if len(missing) == len(layout.block_offsets):
        seen = "it was created but never written"
        yield Finding(Severity.PROBLEM, "missing", seen, why, "write it, or name other keys", layout.key)
        return
    per_row = max(1, layout.num_chunks // -(-layout.num_samples // layout.chunk_rows))
    first = int(missing[0]) // per_row * layout.chunk_rows
    last = min(layout.num_samples, first + layout.chunk_rows) - 1
    seen = (
        f"{len(missing):,} of {layout.num_chunks:,} chunks were never written, the first at samples {first} to {last}"
    )
    yield Finding(Severity.WARNING, "missing", seen, why, cure, layout.key)


def _ragged(layout: H5DatasetLayout) -> Iterator[Finding]:
    """Variable length."""
    if layout.is_tensor or layout.is_text:
        return
    why = "HDF5 keeps each row somewhere else in the file, so all of them are read once and kept in memory."
    cure = "gpufeed pack package.module:dataset OUT.h5  # a Dataset that returns arrays of one shape"
    yield Finding(Severity.NOTICE, "layout", "rows of different lengths", why, cure, layout.key)


def _chunks(layout: H5DatasetLayout, repack: str) -> Iterator[Finding]:
    """Chunks that are padded, huge or tiny."""
    key, chunk, chunk_bytes = layout.key, layout.chunk_shape, layout.chunk_bytes
    if chunk is None or chunk_bytes is None:
        return
    if layout.has_split_samples:
        yield _split(layout, chunk, repack)
    elif layout.filters:
        yield from _compressed(layout, chunk_bytes, repack)
    if chunk_bytes > _MOST_CHUNK_BYTES:
        why = "HDF5 before 2.0 cannot read chunks of 4 GiB and more."
        yield Finding(Severity.WARNING, "huge chunk", f"a chunk takes {bytes_text(chunk_bytes)}", why, repack, key)
    if chunk_bytes < _TINY_CHUNK_BYTES and layout.num_chunks >= _MANY_CHUNKS:
        seen = f"{layout.num_chunks:,} chunks of {bytes_text(chunk_bytes)}"
        why = "Each is looked up at every start, and a read of the disk brings too little."
        yield Finding(Severity.WARNING, "tiny chunks", seen, why, repack, key)


def _split(layout: H5DatasetLayout, chunk: tuple[int, ...], repack: str) -> Finding:
    """Chunks that do not hold whole samples."""
    per_axis = [-(-n // c) for n, c in zip(layout.sample_shape, chunk[1:], strict=True)]
    padded = math.prod(n * c for n, c in zip(per_axis, chunk[1:], strict=True))
    ratio = padded / max(1, math.prod(layout.sample_shape))
    guessed = ", as chunks=True guesses" if _looks_guessed(layout, chunk) else ""
    return Finding(
        Severity.WARNING,
        "split samples",
        f"chunk {chunk}{guessed} does not hold whole samples of {layout.sample_shape}: a sample takes "
        f"{math.prod(per_axis):,} chunks, {ratio:.2f} times its bytes",
        "A sample costs the reading of several chunks with what else is in them, and cannot be copied in one piece.",
        repack,
        layout.key,
    )


def _looks_guessed(layout: H5DatasetLayout, chunk: tuple[int, ...]) -> bool:
    """Whether each side of the chunk is a side of the array halved some times, two of them at least once."""
    num_halved = 0
    for side, length in zip(chunk, layout.shape, strict=True):
        half, times = length, 0
        while half > side:
            half, times = -(-half // 2), times + 1
        if half != side:
            return False
        num_halved += times > 0
    return num_halved >= 2


def _compressed(layout: H5DatasetLayout, chunk_bytes: int, repack: str) -> Iterator[Finding]:
    """Chunks that have to be decoded."""
    rows, key = layout.chunk_rows, layout.key
    names = ", ".join(layout.filters)
    cache_bytes = _default_cache_bytes()
    if chunk_bytes > cache_bytes:
        seen = f"chunks of {rows:,} samples, {bytes_text(chunk_bytes)}, through {names}"
        why = f"More than HDF5's cache of {bytes_text(cache_bytes)}: h5py decodes a whole chunk for every sample."
        yield Finding(Severity.WARNING, "huge chunk", seen, why, repack, key)
    elif rows > 1:
        seen = f"chunks of {rows:,} samples through {names}"
        why = "A plain Dataset over h5py decodes a chunk for almost every sample in random order."
        cure = f"H5DataModule(FILE), which decodes each once an epoch; or without filters: {repack}"
        yield Finding(Severity.NOTICE, "filters", seen, why, cure, key)
    if (reason := why_not_decodable(layout.pipeline, chunk_bytes)) is not None:
        why = "HDF5 decodes them then, one chunk at a time in the whole process."
        cure = "pip install 'lightning_gpufeed[codecs]'" if "install" in reason else repack
        yield Finding(Severity.NOTICE, "decoder", reason, why, cure, key)


def _elsewhere(layout: H5DatasetLayout, repack: str) -> Iterator[Finding]:
    """Bytes that are put together or converted by HDF5."""
    key = layout.key
    if layout.storage is Storage.VIRTUAL:
        seen = f"a virtual dataset over {len(layout.stamps) - 1} other files"
        why = "HDF5 puts it together for each read, and fills in without an error for a file that is moved."
        yield Finding(Severity.NOTICE, "virtual", seen, why, repack, key)
    elif layout.storage is Storage.EXTERNAL:
        names = ", ".join(stamp.path for stamp in layout.stamps[1:4])
        why = "Copying or moving the HDF5 file alone leaves the data behind."
        yield Finding(Severity.NOTICE, "external", f"the bytes lie in {names}", why, repack, key)
    elif "conversion" in layout.engine_reason:
        yield Finding(Severity.NOTICE, "type", layout.engine_reason, "Every read converts it again.", repack, key)


def _cache_trap(layout: H5DatasetLayout, path: str) -> Iterator[Finding]:
    """Several samples in a chunk that fits HDF5's cache: reading one loads them all."""
    cache_bytes, chunk_bytes = _default_cache_bytes(), layout.chunk_bytes
    is_trap = chunk_bytes is not None and layout.chunk_rows > 1 and chunk_bytes <= cache_bytes < layout.total_bytes
    if is_trap and chunk_bytes is not None and not layout.filters and not layout.has_split_samples:
        yield Finding(
            Severity.NOTICE,
            "chunk cache",
            f"chunks of {layout.chunk_rows:,} samples, {bytes_text(chunk_bytes)}; HDF5's cache holds "
            f"{bytes_text(cache_bytes)} of {bytes_text(layout.total_bytes)}",
            "A plain Dataset over h5py loads a whole chunk for almost every sample: several times slower than need be.",
            f'h5py.File({path!r}, "r", rdcc_nbytes=0); H5DataModule does not use that cache',
            layout.key,
        )


def _default_cache_bytes() -> int:
    """Size of the cache of chunks that h5py opens a dataset with."""
    return int(h5py.h5p.create(h5py.h5p.FILE_ACCESS).get_cache()[2])


def file_layout_findings(report: FileReport, layouts: Sequence[H5DatasetLayout]) -> Iterator[Finding]:
    """Judge what concerns several arrays: wasted room, the order of labels, names that lead nowhere.

    Args:
        report: From `inspect_file`.
        layouts: The arrays that can be used.

    Yields:
        Findings.
    """
    file, data_bytes = shlex.quote(report.path), sum(dataset.data_bytes for dataset in report.datasets)
    ratio = report.size_ratio
    if ratio is not None and ratio > _WASTE_RATIO and report.size_bytes - data_bytes > _WASTE_BYTES:
        seen = f"{bytes_text(report.size_bytes)} for {bytes_text(data_bytes)} of data: {ratio:.2f} times"
        why = "Chunks are padded, or the room of deleted data was never given back."
        yield Finding(Severity.WARNING, "size", seen, why, f"gpufeed repack {file} OUT.h5")
    slow = {layout.key for layout in layouts if layout.engine is not Engine.RAW}
    for labels in report.labels:
        if labels.order in (LabelOrder.SORTED, LabelOrder.CLUSTERED) and labels.window_variety < _GOOD_VARIETY:
            is_windowed = report.main_key in slow
            yield Finding(
                Severity.WARNING if is_windowed else Severity.NOTICE,
                "label order",
                f"{labels.order}; a batch from a window of 1024 samples holds {100 * labels.window_variety:.0f} % of "
                f"the classes of a full shuffle's batch",
                "Batches of few classes train worse" + ("." if is_windowed else '; shuffle="full" is not concerned.'),
                f"gpufeed pack {file} OUT.h5 --keep-dtype --shuffle",
                labels.key,
            )
    known = {layout.key for layout in layouts}
    for key, reason in report.problems:
        if "link" in reason and key not in known:
            # What follows the first sentence is about keys to name instead.
            seen, cure = reason.removesuffix(".").partition(". ")[0], "put back what it leads to, or delete the link"
            yield Finding(Severity.WARNING, "link", seen, "Whatever names it fails.", cure, key)
