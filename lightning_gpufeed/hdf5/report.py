"""What `inspect_file` found out, as values, and as text of at most 100 columns."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = [
    "Advice",
    "DatasetReport",
    "FileReport",
    "LabelOrder",
    "LabelReport",
    "ProbeReport",
    "bytes_text",
    "render_report",
]

_WIDTH = 100
_INDENT = 12


class LabelOrder(StrEnum):
    """How the classes lie in the file."""

    SINGLE = "one class only"
    SORTED = "sorted by class"
    CLUSTERED = "clustered"
    SHUFFLED = "shuffled"


@dataclass(frozen=True)
class DatasetReport:
    """One dataset.

    Attributes:
        key: Path inside the file.
        shape: (num_samples, *sample_shape).
        dtype: Element type as numpy names it; "object" for strings and variable length.
        storage: "contiguous", "chunked", "compact", "external" or "virtual".
        data_bytes: Decoded bytes; for variable length those of the references only.
        chunk_shape: None unless chunked.
        chunk_samples: Samples that share a chunk, None unless chunked.
        chunk_bytes: Decoded bytes of one chunk, None unless chunked.
        num_chunks: Chunks of the grid, 0 unless chunked.
        num_missing_chunks: Chunks (or the one contiguous block) that were never written.
        has_edge_chunk: Whether the last chunk along the first axis is only partly filled.
        chunks_per_sample: Chunks that one sample is spread over; 1 where samples are whole.
        read_ratio: Bytes of chunks for one byte of samples; above 1 where chunks are padded around samples.
        filters: Names, in order.
        engine: "raw", "h5py", or "memory" for what is read once and kept.
        engine_reason: Why.
        source_paths: Other files that the bytes come from.
        num_checksums: Chunks that `pack` noted a checksum of.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    storage: str
    data_bytes: int
    chunk_shape: tuple[int, ...] | None
    chunk_samples: int | None
    chunk_bytes: int | None
    num_chunks: int
    num_missing_chunks: int
    has_edge_chunk: bool
    chunks_per_sample: int
    read_ratio: float
    filters: tuple[str, ...]
    engine: str
    engine_reason: str
    source_paths: tuple[str, ...]
    num_checksums: int


@dataclass(frozen=True)
class LabelReport:
    """The classes of one split and how they lie.

    Attributes:
        key: The labels.
        num_classes: Different labels.
        min_per_class: Samples of the rarest class.
        max_per_class: Samples of the most frequent class.
        order: How the classes lie.
        window_variety: Different classes in a batch of 256 from a shuffle window of 1024 samples, relative to a
            batch of a full shuffle: 0 to 1.
    """

    key: str
    num_classes: int
    min_per_class: int
    max_per_class: int
    order: LabelOrder
    window_variety: float


@dataclass(frozen=True)
class ProbeReport:
    """The rate of reading in a full shuffle.

    Attributes:
        keys: Datasets read.
        batch_size: Samples per batch.
        num_samples: Samples read.
        seconds: Time taken.
        samples_per_second: Rate in samples.
        bytes_per_second: Rate in decoded bytes.
        num_passes: How often the dataset was read; above 1 the last part of it came from memory.
    """

    keys: tuple[str, ...]
    batch_size: int
    num_samples: int
    seconds: float
    samples_per_second: float
    bytes_per_second: float
    num_passes: float


@dataclass(frozen=True)
class Advice:
    """The one thing that would make reading faster.

    Attributes:
        reason: What costs most.
        command: What to type, None where nothing helps or is needed.
    """

    reason: str
    command: str | None = None


@dataclass(frozen=True)
class FileReport:
    """All that `inspect_file` found out.

    Attributes:
        path: The file, as it was given.
        size_bytes: Size of the file.
        size_ratio: Size of the file in units of the data stored in it; None where there is none, or where values
            of variable length or unreadable datasets leave it open.
        format_version: `gpufeed_format` of a file that `pack` wrote, else None.
        written_by: `gpufeed_version` of such a file.
        num_skipped: Samples that `pack` left out.
        datasets: Those that can be used.
        problems: (key, reason) of what cannot.
        labels: One entry per split whose labels are classes.
        main_key: The dataset that decides the speed, None if there is none.
        cached_share: Share of it in the page cache, 0 to 1; None if unknown.
        probe: Measured rate; None if not asked for, or if nothing can be measured.
        advice: What would make it faster.
    """

    path: str
    size_bytes: int
    size_ratio: float | None
    format_version: int | None
    written_by: str | None
    num_skipped: int
    datasets: tuple[DatasetReport, ...]
    problems: tuple[tuple[str, str], ...]
    labels: tuple[LabelReport, ...]
    main_key: str | None
    cached_share: float | None
    probe: ProbeReport | None
    advice: Advice

    @property
    def num_checksums(self) -> int:
        """Chunks of all datasets that `pack` noted a checksum of."""
        return sum(dataset.num_checksums for dataset in self.datasets)

    def as_dict(self) -> dict[str, Any]:
        """The report in numbers, strings, lists and dicts, as JSON can hold it."""
        plain: dict[str, Any] = dataclasses.asdict(self)
        return plain


def render_report(report: FileReport) -> str:
    """Lay a report out for people; only a path or a command that is longer exceeds 100 columns.

    Args:
        report: From `inspect_file`.

    Returns:
        Lines without a trailing newline.
    """
    lines = [report.path, *_wrap("", _file_text(report))]
    for dataset in report.datasets:
        lines += ["", f"{dataset.key}  {dataset.shape} {dataset.dtype}, {bytes_text(dataset.data_bytes)}"]
        for label, text in _dataset_texts(dataset):
            lines += _wrap(label, text)
    for key, reason in report.problems:
        lines += ["", f"{key}  cannot be used", *_wrap("  because", reason)]
    lines.append("")
    for label, text in _measured_texts(report):
        lines += _wrap(label, text)
    lines += _wrap("faster", report.advice.reason if report.advice.command else f"nothing: {report.advice.reason}")
    if report.advice.command:
        lines.append(" " * _INDENT + report.advice.command)
    return "\n".join(lines)


def bytes_text(num_bytes: float) -> str:
    """A size in the decimal unit that leaves one to three digits before the point.

    Args:
        num_bytes: 0 or more.

    Returns:
        Such as `47.0 MB`.
    """
    number, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 999.95:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def _percent(share: float) -> str:
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _wrap(label: str, text: str) -> list[str]:
    """A label in the left column and text beside it."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=label.ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _file_text(report: FileReport) -> str:
    parts = [bytes_text(report.size_bytes)]
    if report.size_ratio is not None:
        parts.append(f"{report.size_ratio:.2f} times the data in it")
    if report.format_version is not None:
        parts.append(f"packed by gpufeed {report.written_by} (format {report.format_version})")
    if report.num_checksums:
        parts.append(f"checksums of {_count(report.num_checksums, 'chunk')}")
    if report.num_skipped:
        parts.append(f"{_count(report.num_skipped, 'sample')} of the source left out")
    return ", ".join(parts)


def _dataset_texts(dataset: DatasetReport) -> Iterator[tuple[str, str]]:
    if dataset.chunk_shape is None:
        yield "  stored", dataset.storage
    else:
        samples, size = _count(dataset.chunk_samples or 0, "sample"), bytes_text(dataset.chunk_bytes or 0)
        edge = ", the last one partly filled" if dataset.has_edge_chunk else ""
        yield "  chunk", f"{dataset.chunk_shape}: {samples}, {size}; {_count(dataset.num_chunks, 'chunk')}{edge}"
    if dataset.chunks_per_sample > 1 or dataset.read_ratio > 1:
        yield (
            "  split",
            f"a sample takes {_count(dataset.chunks_per_sample, 'chunk')}, "
            f"{dataset.read_ratio:.2f} times its bytes are read",
        )
    if dataset.filters:
        yield "  filters", ", ".join(dataset.filters)
    if dataset.num_missing_chunks:
        missing = _count(dataset.num_missing_chunks, "chunk" if dataset.chunk_shape else "block")
        yield "  missing", f"{missing} never written: reads as the fill value"
    if dataset.source_paths:
        yield "  made of", ", ".join(dataset.source_paths)
    yield "  engine", f"{dataset.engine}: {dataset.engine_reason}"


def _measured_texts(report: FileReport) -> Iterator[tuple[str, str]]:
    for labels in report.labels:
        few, many = labels.min_per_class, labels.max_per_class
        each = f"{_count(many, 'sample')} each" if few == many else f"{few:,} to {many:,} samples each"
        yield (
            "classes",
            f"{labels.key}: {labels.order}; {_count(labels.num_classes, 'class', 'classes')}, {each}; a batch of 256 "
            f"from a window of 1024 holds {_percent(labels.window_variety)} of the classes of a full shuffle's batch",
        )
    if report.main_key is not None:
        share = report.cached_share
        yield "page cache", f"{'unknown share' if share is None else f'about {_percent(share)}'} of {report.main_key}"
    if (probe := report.probe) is not None:
        again = f"; read {probe.num_passes:.1f} times over, so from memory" if probe.num_passes > 1 else ""
        yield (
            "rate",
            f"{probe.samples_per_second:,.0f} samples/s, {bytes_text(probe.bytes_per_second)}/s: "
            f"{' + '.join(probe.keys)} in a full shuffle, batches of {probe.batch_size}, measured for "
            f"{probe.seconds:.1f} s{again}",
        )
