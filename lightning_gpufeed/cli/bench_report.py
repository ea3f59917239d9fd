"""What `bench_file` found out, as values, and as text of at most 100 columns."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_gpufeed.diagnose.counters import Usage
from lightning_gpufeed.diagnose.figures import duration, percent
from lightning_gpufeed.diagnose.judgement import Cause, Cure, Verdict
from lightning_gpufeed.hdf5.report import bytes_text

__all__ = ["BenchReport", "FeedRate", "StepTrial", "render_bench"]

_WIDTH = 100
_INDENT = 12

_WORTH = 1.05
_CROWDED_SHARE = 0.2
_COLD_SHARE = 0.05
CACHED_SHARE = 0.95
"""Of 64 places that were looked at, three may be missing."""


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
        cached_share: Share of the file in memory when it began, 0 to 1; None if that is not known.
    """

    num_samples: int
    num_batches: int
    num_bytes: int
    seconds: float
    first_batch_seconds: float = 0.0
    is_complete: bool = False
    cached_share: float | None = None

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
        is_decoded: Whether chunks are decoded; otherwise samples are copied from memory or the mapped file.
        first_pass: The first half of the time, or the first pass over the file if that is shorter.
        first_usage: What the reading thread used in that; None if it was too short to watch.
        feed: The measured rest.
        usage: What the reading thread used meanwhile; None if it could not be watched.
        read_ratio: Bytes read by calls for each byte delivered; None if unknown, 0 through a memory map.
        copy_bytes_per_second: Rate of a plain copy out of the page cache by one thread; None where the file may not be
            in memory.
        num_cores: Cores that this process may use.
        verdict: On the measured rest.
        command: The line to type that would make the file fast; None if it is, or if that is not known.
        step: The pretended step; None if none was asked for.
    """

    path: str
    keys: tuple[str, ...]
    num_samples: int
    batch_size: int
    shuffle: str
    sample_bytes: int
    engines: tuple[str, ...]
    is_decoded: bool
    first_pass: FeedRate
    first_usage: Usage | None
    feed: FeedRate
    usage: Usage | None
    read_ratio: float | None
    copy_bytes_per_second: float | None
    num_cores: float
    verdict: Verdict
    command: str | None = None
    step: StepTrial | None = None

    @property
    def bound_share(self) -> float | None:
        """Share of the plain copy's rate that is reached."""
        bound = self.copy_bytes_per_second
        return None if not bound else self.feed.bytes_per_second / bound

    @property
    def limit(self) -> str:
        """What limits the feed, in words that need no step."""
        work = "decoding on one core" if self.is_decoded else "copying samples on one core"
        return {
            Cause.DECODE: work,
            Cause.CPU: work,
            Cause.LOADER: "the reading thread" if self.is_decoded else work,
            Cause.KERNEL: f"the kernel, which {'reads' if self.is_decoded else 'maps'} the file",
            Cause.AMPLIFICATION: "whole chunks decoded for single samples",
            Cause.CONVERSION: "floats in the file where 8-bit numbers would do",
            Cause.DISK: "storage",
        }.get(self.verdict.cause, str(self.verdict.cause))

    @property
    def cures(self) -> tuple[Cure, ...]:
        """What would help; what is not expected to is left out."""
        return tuple(cure for cure in self.verdict.cures if cure.gain >= _WORTH)

    def as_dict(self) -> dict[str, Any]:
        """The report in numbers, strings, lists and dicts, as JSON can hold it; rates and shares included."""
        plain: dict[str, Any] = dataclasses.asdict(self)
        for name, rate in (("first_pass", self.first_pass), ("feed", self.feed)):
            plain[name] |= {
                "samples_per_second": rate.samples_per_second,
                "bytes_per_second": rate.bytes_per_second,
                "batch_seconds": rate.batch_seconds,
            }
        for name, usage in (("first_usage", self.first_usage), ("usage", self.usage)):
            if usage is not None:
                plain[name] |= {f"{label}_share": share for label, share in _shares(usage).items()}
        # How long a feed without a step "waits" says nothing.
        del plain["verdict"]["wait_share"], plain["verdict"]["free_echo_factor"]
        plain["verdict"]["cures"] = [dataclasses.asdict(cure) for cure in self.cures]
        return plain | {"bound_share": self.bound_share, "limit": self.limit}


def _shares(usage: Usage) -> dict[str, float | None]:
    """What the reading thread did with its time; None where the kernel does not say."""
    seconds = {
        "user": usage.user_seconds,
        "kernel": usage.system_seconds,
        "queue": usage.queue_seconds,
        "asleep": usage.asleep_seconds,
    }
    return {name: usage.share(one) for name, one in seconds.items()}


def render_bench(report: BenchReport) -> str:
    """Lay a report out for people; only a path or a command that is longer exceeds 100 columns.

    Args:
        report: From `bench_file`.

    Returns:
        Lines without a trailing newline.
    """
    lines = [report.path]
    for texts in (_setup_texts(report), _measured_texts(report), _judged_texts(report)):
        for label, text in texts:
            # A command is to be copied, so it stays in one piece.
            lines += [label.ljust(_INDENT) + text] if text == report.command else _wrap(label, text)
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
    size = report.batch_size * report.sample_bytes
    yield (
        "",
        f"{' + '.join(report.keys)}: {report.num_samples:,} samples of {bytes_text(report.sample_bytes)}, "
        f"shuffle {report.shuffle}, batches of {report.batch_size:,} ({bytes_text(size)})",
    )
    for number, line in enumerate(report.engines):
        yield "" if number else "engine", line
    share = report.first_pass.cached_share
    yield "page cache", "unknown share before" if share is None else f"about {percent(share)} in memory before"


def _measured_texts(report: BenchReport) -> Iterator[tuple[str, str]]:
    feed, usage, bound = report.feed, report.usage, report.copy_bytes_per_second
    yield "first pass", _first_text(report)
    part = "" if report.first_pass.is_complete else "still the first pass, "
    yield "rate", f"{_rate_text(feed)}, measured for {duration(feed.seconds)}, {part}{_place(feed.cached_share)}"
    yield "batch", f"{duration(feed.batch_seconds)} each, {feed.num_batches:,} of them"
    if usage is not None:
        names = {
            "user": "in its own code",
            "kernel": "in the kernel",
            "queue": "waiting for a core",
            "asleep": "asleep",
        }
        shares = [f"{percent(share)} {names[name]}" for name, share in _shares(usage).items() if share is not None]
        yield "reader", f"one thread: {', '.join(shares)}"
    if report.read_ratio is not None:
        few = "none by read calls: through a memory map, or kept in memory"
        yield "bytes read", few if report.read_ratio < 0.005 else f"{report.read_ratio:.2g} for each byte delivered"
    if bound is not None:
        share = percent(report.bound_share or 0.0)
        yield (
            "bound",
            f"{bytes_text(bound)}/s: a plain copy out of the page cache by one thread; {share} of it is reached",
        )


def _rate_text(rate: FeedRate) -> str:
    return f"{rate.samples_per_second:,.0f} samples/s, {bytes_text(rate.bytes_per_second)}/s"


def _place(share: float | None) -> str:
    if share is None:
        return "perhaps from storage"
    return "from memory" if share >= CACHED_SHARE else f"{percent(share)} of the file in memory"


def _first_text(report: BenchReport) -> str:
    first, usage = report.first_pass, report.first_usage
    parts = [
        _rate_text(first),
        f"in {duration(first.seconds)}",
        f"first batch after {duration(first.first_batch_seconds)}",
    ]
    if not first.is_complete:
        parts[1] += f" for {percent(first.num_samples / report.num_samples)} of the samples"
    if first.cached_share is not None and first.cached_share < CACHED_SHARE:
        parts.append("cold" if first.cached_share < _COLD_SHARE else "partly cold")
        if usage is not None and (share := usage.share(usage.asleep_seconds)) is not None:
            parts.append(f"the reading thread was asleep {percent(share)} of the time")
    return ", ".join(parts)


def _judged_texts(report: BenchReport) -> Iterator[tuple[str, str]]:
    verdict, usage, cures = report.verdict, report.usage, report.cures
    yield "limited by", "; ".join([report.limit, *verdict.figures])
    helps = [f"{cure}: {cure.action}" for cure in cures]
    if report.command is not None:
        helps = [text.replace(f"{report.command} once", "run this command once") for text in helps] + [report.command]
    for number, text in enumerate(helps or ["nothing that is known"]):
        yield "" if number else "would help", text
    for note in verdict.notes:
        yield "note", note
    queue = usage.share(usage.queue_seconds) if usage is not None else None
    if queue is not None and queue >= _CROWDED_SHARE:
        yield (
            "note",
            f"the reading thread waits {percent(queue)} of the time for a core that something else keeps busy; on a "
            f"quiet machine the feed is faster",
        )
    if (step := report.step) is not None:
        yield (
            "step",
            f"a pretended step of {duration(step.step_seconds)} (it sleeps, and takes no core) waits "
            f"{percent(step.wait_share)} of the time for data: "
            f"{'the feed is too slow for it' if step.has_waited else 'the feed keeps up'}; a step of "
            f"{duration(step.shortest_seconds)} or more does not wait",
        )
