"""What `bench_file` found out, as values, and as text of at most 100 columns."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_gpufeed.diagnose.counters import Usage
from lightning_gpufeed.diagnose.figures import duration, percent
from lightning_gpufeed.diagnose.judgement import Cause, Verdict
from lightning_gpufeed.hdf5.report import bytes_text

__all__ = ["BenchReport", "FeedRate", "StepTrial", "render_bench"]

_WIDTH = 100
_INDENT = 12

_LIMITS = {
    Cause.CPU: "work on a core",
    Cause.KERNEL: "the kernel",
    Cause.DISK: "storage",
    Cause.LOADER: "the reading thread",
    Cause.TOO_MANY_WORKERS: "too few cores",
    Cause.TOO_FEW_WORKERS: "too few readers",
    Cause.CONVERSION: "wide numbers",
}
"""Causes in words that need no step; others are named as they are."""


@dataclass(frozen=True)
class FeedRate:
    """How fast batches came in a part of the run.

    Attributes:
        num_samples: Samples delivered.
        num_batches: Batches delivered.
        num_bytes: Bytes delivered, in the types that are stored.
        seconds: Time taken.
        first_batch_seconds: From the first request to the first batch.
        is_complete: Whether every sample of the file came at least once in this part.
        is_from_memory: Whether the file was in memory when it began; None if that is not known.
    """

    num_samples: int
    num_batches: int
    num_bytes: int
    seconds: float
    first_batch_seconds: float = 0.0
    is_complete: bool = False
    is_from_memory: bool | None = None

    @property
    def samples_per_second(self) -> float:
        """Rate in samples."""
        return self.num_samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Rate in bytes."""
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def batch_seconds(self) -> float:
        """Time for one batch."""
        return self.seconds / self.num_batches if self.num_batches else 0.0


@dataclass(frozen=True)
class StepTrial:
    """Batches taken by a pretended step that sleeps.

    Attributes:
        step_seconds: Its length, as asked for.
        wait_share: Share of the time that it waited for data, 0 to 1.
        has_waited: Whether that is enough to be called waiting.
        shortest_seconds: Length from which on a step does not wait: what the feed needs for a batch.
    """

    step_seconds: float
    wait_share: float
    has_waited: bool
    shortest_seconds: float


@dataclass(frozen=True)
class BenchReport:
    """All that `bench_file` found out.

    Attributes:
        path: The file, as it was given.
        keys: Datasets fed.
        num_samples: Samples in the file.
        batch_size: Samples per batch, at most those of the file.
        shuffle: Order of the samples: "full", "window:N", "none".
        sample_bytes: Bytes of one sample, all datasets together.
        engines: How each dataset is read, and why.
        cached_share: Share of the largest dataset in the page cache before, 0 to 1; None if unknown.
        first_pass: The first half of the time, or the first pass over the file if that is shorter.
        first_usage: What the reading thread used in that; None if it was too short to watch.
        feed: The measured rest.
        usage: What the reading thread used meanwhile; None if it could not be watched.
        read_ratio: Bytes read by calls for each byte delivered; None if unknown, 0 through a memory map.
        copy_bytes_per_second: Rate of a plain copy out of the page cache by one thread; None where the file, as far as
            it was read, may not be in memory.
        num_cores: Cores that this process may use.
        verdict: On the measured rest.
        step: The pretended step; None if none was asked for.
    """

    path: str
    keys: tuple[str, ...]
    num_samples: int
    batch_size: int
    shuffle: str
    sample_bytes: int
    engines: tuple[str, ...]
    cached_share: float | None
    first_pass: FeedRate
    first_usage: Usage | None
    feed: FeedRate
    usage: Usage | None
    read_ratio: float | None
    copy_bytes_per_second: float | None
    num_cores: float
    verdict: Verdict
    step: StepTrial | None = None

    @property
    def bound_share(self) -> float | None:
        """Share of the plain copy's rate that is reached."""
        bound = self.copy_bytes_per_second
        return None if not bound else self.feed.bytes_per_second / bound

    @property
    def limit(self) -> str:
        """What limits the feed."""
        return _LIMITS.get(self.verdict.cause, str(self.verdict.cause))

    def as_dict(self) -> dict[str, Any]:
        """The report in numbers, strings, lists and dicts, as JSON can hold it; rates and shares included."""
        plain: dict[str, Any] = dataclasses.asdict(self)
        for name, rate in (("first_pass", self.first_pass), ("feed", self.feed)):
            plain[name] |= {
                "samples_per_second": rate.samples_per_second,
                "bytes_per_second": rate.bytes_per_second,
                "batch_seconds": rate.batch_seconds,
            }
        # How long a feed without a step "waits" says nothing.
        del plain["verdict"]["wait_share"], plain["verdict"]["free_echo_factor"]
        return plain | {"bound_share": self.bound_share, "limit": self.limit}


def render_bench(report: BenchReport) -> str:
    """Lay a report out for people; only a path or a command that is longer exceeds 100 columns.

    Args:
        report: From `bench_file`.

    Returns:
        Lines without a trailing newline.
    """
    lines = [report.path]
    for texts in (_setup_texts(report), _measured_texts(report), _judged_texts(report)):
        lines += [line for label, text in texts for line in _wrap(label, text)]
        lines.append("")
    return "\n".join(lines[:-1])


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


def _setup_texts(report: BenchReport) -> Iterator[tuple[str, str]]:
    yield (
        "",
        f"{' + '.join(report.keys)}: {report.num_samples:,} samples of {bytes_text(report.sample_bytes)}, "
        f"shuffle {report.shuffle}, batches of {report.batch_size:,} ({bytes_text(_batch_bytes(report))})",
    )
    for line in report.engines:
        yield "read", line
    share = report.cached_share
    yield "page cache", "unknown share before" if share is None else f"about {percent(share)} in memory before"


def _batch_bytes(report: BenchReport) -> int:
    return report.batch_size * report.sample_bytes


def _rate_text(rate: FeedRate) -> str:
    return f"{rate.samples_per_second:,.0f} samples/s, {bytes_text(rate.bytes_per_second)}/s"


def _measured_texts(report: BenchReport) -> Iterator[tuple[str, str]]:
    first, feed = report.first_pass, report.feed
    part = "" if first.is_complete else f", {percent(first.num_samples / report.num_samples)} of the samples"
    cold = {True: "", False: ", cold: files come from storage", None: ", perhaps from storage"}
    yield (
        "first pass",
        f"{_rate_text(first)}, for {duration(first.seconds)}{part}; first batch after "
        f"{duration(first.first_batch_seconds)}{cold[first.is_from_memory]}",
    )
    where = {True: "from memory", False: "still cold: not all of the file was in memory", None: "perhaps from storage"}
    yield "rate", f"{_rate_text(feed)}, measured for {duration(feed.seconds)}, {where[feed.is_from_memory]}"
    yield "batch", f"{duration(feed.batch_seconds)} each, {feed.num_batches:,} of them"
    if report.usage is not None:
        yield "reader", _usage_text(report.usage)
    if report.read_ratio is not None:
        yield "bytes read", _read_text(report)
    if report.copy_bytes_per_second is not None:
        yield (
            "bound",
            f"{bytes_text(report.copy_bytes_per_second)}/s, a plain copy of the file out of the page cache by one "
            f"thread; {percent(report.bound_share or 0.0)} of it is reached",
        )


def _usage_text(usage: Usage) -> str:
    shares = {
        "in its own code": usage.user_seconds,
        "in the kernel": usage.system_seconds,
        "waiting for a core": usage.queue_seconds,
        "asleep": usage.asleep_seconds,
    }
    known = {name: usage.share(seconds) for name, seconds in shares.items()}
    return "one thread: " + ", ".join(f"{percent(share)} {name}" for name, share in known.items() if share is not None)


def _read_text(report: BenchReport) -> str:
    ratio = report.read_ratio or 0.0
    if ratio < 0.005:
        return "none by read calls: through a memory map, or kept in memory"
    return f"{ratio:.2g} for each byte delivered"


def _judged_texts(report: BenchReport) -> Iterator[tuple[str, str]]:
    verdict = report.verdict
    yield "limited by", "; ".join([report.limit, *verdict.figures])
    for number, cure in enumerate(verdict.cures):
        yield "" if number else "would help", f"{cure}: {cure.action}"
    if not verdict.cures:
        yield "would help", "nothing that is known"
    for note in verdict.notes:
        yield "note", note
    if (step := report.step) is not None:
        waits = f"waits {percent(step.wait_share)} of the time for data" if step.wait_share else "never waits for data"
        enough = "the feed is too slow for it" if step.has_waited else "the feed keeps up"
        yield (
            "step",
            f"a pretended step of {duration(step.step_seconds)} (it sleeps, and takes no core) {waits}: {enough}; "
            f"a step of {duration(step.shortest_seconds)} or more does not wait",
        )
