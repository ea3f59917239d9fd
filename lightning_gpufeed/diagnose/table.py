"""The latest verdict as a table for a terminal.

Only ASCII of its own, so that it prints on any terminal and into any log; what is bold is bold besides being said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_gpufeed.diagnose.judgement import Verdict
from lightning_gpufeed.diagnose.records import (
    UNKNOWN,
    EpochRecord,
    free_echo_text,
    headline,
    milliseconds_text,
    percent_text,
    percent_texts,
    printable,
    range_text,
    step_parts,
)

__all__ = ["print_table", "render_table"]

_WIDTH = 100
_BAR = 16  # characters; with it the longest row of times takes 80 columns


def print_table(records: Sequence[EpochRecord], console: Console | None = None) -> None:
    """Print the verdict on the latest epoch.

    Args:
        records: At least one, in the order in which they were made.
        console: Where to; None: standard output.

    Raises:
        ValueError: There is no record.
    """
    console = console or Console()
    table = render_table(records)
    width = min(_WIDTH, console.width)
    if console.encoding.startswith("utf"):
        console.print(table, width=width)
        return
    # A path may hold what this terminal cannot show; a report is no reason for a training to end.
    with console.capture() as captured:
        console.print(table, width=width)
    console.file.write(captured.get().encode(console.encoding, "backslashreplace").decode(console.encoding))


def render_table(records: Sequence[EpochRecord]) -> Table:
    """Lay out the verdict on the latest epoch: where the time goes, the readers, the cures.

    Args:
        records: At least one, in the order in which they were made.

    Returns:
        A table of tables, at most 100 columns wide, readable from 80 on.

    Raises:
        ValueError: There is no record.
    """
    if not records:
        raise ValueError("a table needs at least one EpochRecord, got none: print it after the first epoch")
    record = records[-1]
    grid = Table.grid()
    grid.add_column(max_width=_WIDTH, overflow="fold")
    grid.add_row(_head(record))
    for figure in record.verdict.figures:
        grid.add_row(_item(figure))
    for table in (_times(record), _readers(record), _cures(record.verdict)):
        if table is not None:
            grid.add_row("")
            grid.add_row(table)
    after = list(_after(record.verdict))
    if after:
        grid.add_row("")
    for sentence in after:
        grid.add_row(_item(sentence))
    return grid


def _head(record: EpochRecord) -> Text:
    """Which epoch, and the verdict."""
    counters = record.counters
    facts = [record.label]
    if counters.is_first:
        facts.append("first, cold")
    if counters.num_ranks > 1:
        facts.append(f"rank {counters.rank} of {counters.num_ranks}")
    text = Text(f"FeedMonitor, {', '.join(facts)}: ")
    text.append(printable(record.verdict.cause), style="bold")
    return text.append(f": {headline(record)}")


def _item(sentence: str) -> Table:
    """A sentence after a dash, its further lines below its first."""
    grid = Table.grid()
    grid.add_column(width=4)
    grid.add_column(overflow="fold")
    grid.add_row("  - ", Text(printable(sentence)))
    return grid


def _table(*columns: str, words: int = 1) -> Table:
    """A table whose first columns are words, on the left, and whose others are numbers, on the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    for number, name in enumerate(columns):
        is_words = number < words
        table.add_column(name, justify="left" if is_words else "right", overflow="fold", no_wrap=not is_words)
    return table


def _times(record: EpochRecord) -> Table | None:
    """Where the time of a step goes."""
    parts = step_parts(record.counters.steps)
    if not parts:
        return None
    table = _table("a step", "time", "share", "")
    table.columns[-1].justify = "left"
    shares = percent_texts([part.share for part in parts])
    for part, share in zip(parts, shares, strict=True):
        if part.seconds > 0:
            bar = "#" * round(part.share * _BAR)
            table.add_row(f"{part.name}: {part.meaning}", milliseconds_text(part.seconds), share, f"{bar:<{_BAR}}")
    table.add_row("all", milliseconds_text(record.counters.steps.step_seconds), "100.0 %", "")
    return table


def _readers(record: EpochRecord) -> Table | None:
    """What those that read did."""
    usage, ratio = record.usage, record.counters.read_ratio
    if usage is None or usage.wall_seconds <= 0:
        return None
    table = _table("read by", "user", "system", "queue", "asleep", "bytes read\nper delivered", "major\nfaults")
    times = (usage.user_seconds, usage.system_seconds, usage.queue_seconds, usage.asleep_seconds)
    table.add_row(
        record.who_reads,
        *(percent_text(usage.share(one)) for one in times),
        UNKNOWN if ratio is None else f"{ratio:,.2f}",
        UNKNOWN if usage.major_faults is None else f"{usage.major_faults:,}",
    )
    return table


def _cures(verdict: Verdict) -> Table | None:
    """What to do, in order."""
    if not verdict.cures:
        return None
    table = _table("#", "cure", "what to do", "faster", "range", words=3)
    table.columns[0].no_wrap = True
    table.columns[1].max_width = 20
    for number, cure in enumerate(verdict.cures, start=1):
        table.add_row(
            str(number),
            Text(printable(cure.name)),
            Text(printable(cure.action)),
            Text(f"{cure.gain:.1f}x", style="bold"),
            f"{range_text(cure.low, cure.high)}x",
        )
    return table


def _after(verdict: Verdict) -> Iterator[str]:
    """What is left to say."""
    free = free_echo_text(verdict)
    if free is not None:
        yield free
    yield from verdict.notes
