"""One HTML page about a training: what its steps wait for, why, and what would help.

The page is a single file that refers to nothing outside itself and runs nothing, so that it opens on a machine without
a network, in an old browser, and from an attachment. From top to bottom: the verdict and its figures, the cures, a
timeline of a few steps, where the time went in each epoch, what the readers did, and what was read by which machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lightning_gpufeed.diagnose.judgement import Cause, Verdict
from lightning_gpufeed.diagnose.page_facts import facts_sections
from lightning_gpufeed.diagnose.page_style import SHEET
from lightning_gpufeed.diagnose.page_svg import (
    PATTERNS,
    draw_gain,
    draw_shares,
    draw_timeline,
    escaped,
    prose,
    shown_steps,
    swatch,
)
from lightning_gpufeed.diagnose.records import (
    PARTS,
    UNKNOWN,
    EpochRecord,
    free_echo_text,
    headline,
    milliseconds_text,
    percent_text,
    percent_texts,
    range_text,
    settled,
    step_parts,
)

__all__ = ["MAX_EPOCHS", "page_text", "write_page"]

MAX_EPOCHS = 40
"""Most epochs in a table, besides the first one."""

_ACCENTS = {Cause.COMPUTE: "compute", Cause.COPY: "copy", Cause.SYNC: "sync", Cause.HOST: "hooks"}


def write_page(
    path: str | os.PathLike[str], records: Sequence[EpochRecord], *, title: str = "FeedMonitor: why the step waits"
) -> None:
    """Write the page, replacing one of before only when the new one is complete.

    It is written aside and renamed, so a reader never sees half a page, and a failure (a full disk) or a kill leaves
    the old one as it was. Folders on the way are made.

    Args:
        path: The HTML file; where it is a link, the file behind it.
        records: At least one, in the order in which they were made; the last is the one the page is about.
        title: Heading of the page.

    Raises:
        ValueError: There is no record.
        OSError: The file could not be written.
    """
    text = page_text(records, title=title)
    final = Path(os.path.realpath(Path(path).expanduser()))
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else the name may reach the disk before the text does
        os.replace(aside, final)
    finally:
        aside.unlink(missing_ok=True)


def page_text(records: Sequence[EpochRecord], *, title: str = "FeedMonitor: why the step waits") -> str:
    """The page as a text.

    Args:
        records: At least one, in the order in which they were made.
        title: Heading of the page.

    Returns:
        A whole HTML document.

    Raises:
        ValueError: There is no record.
    """
    if not records:
        raise ValueError("a page needs at least one EpochRecord, got none: write it after the first epoch")
    latest = records[-1]
    kept, num_left_out = _kept_epochs(settled(records))
    sections = [
        _head(latest, title),
        *_verdict_sections(latest),
        _timeline(records),
        _shares(kept, num_left_out),
        _readers(kept, num_left_out),
        facts_sections(latest.counters),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{SHEET}</style>\n</head>\n<body>\n{PATTERNS}\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _kept_epochs(records: Sequence[EpochRecord]) -> tuple[list[EpochRecord], int]:
    """The first epoch and the last few, and how many between them are left out."""
    if len(records) <= MAX_EPOCHS + 1:
        return list(records), 0
    return [records[0], *records[-MAX_EPOCHS:]], len(records) - MAX_EPOCHS - 1


def _section(heading: str, *content: str) -> str:
    return "\n".join([f"<section>\n<h2>{heading}</h2>", *content, "</section>"])


# The verdict -----------------------------------------------------------------------------------------------


def _head(record: EpochRecord, title: str) -> str:
    """Title, the verdict, and what it is about."""
    verdict, counters = record.verdict, record.counters
    facts = [record.label]
    if counters.is_first:
        facts.append("first of this run, from a cold start")
    if counters.num_ranks > 1:
        facts.append(f"rank {counters.rank} of {counters.num_ranks} (counted from 0)")
    if counters.steps.num_steps:
        num_steps = counters.steps.num_steps
        each = milliseconds_text(counters.steps.step_seconds)
        facts.append(f"{num_steps:,} step{'s' if num_steps != 1 else ''} of {each}")
    accent = _ACCENTS.get(verdict.cause, "wait")
    return (
        f'<header style="--accent: var(--{accent})">\n<h1>{escaped(title)}</h1>\n'
        f'<p class="verdict"><strong>{escaped(verdict.cause)}</strong>: {prose(headline(record))}</p>\n'
        f'<p class="muted small">{" · ".join(facts)}</p>\n'
        f"<details><summary>All of it in one line, to pass on</summary><p>{escaped(record.line)}</p></details>\n"
        "</header>"
    )


def _verdict_sections(record: EpochRecord) -> Iterator[str]:
    """The figures, the cures and the notes."""
    verdict = record.verdict
    commands = [file.command for file in record.counters.loader.files if file.command]
    if verdict.figures:
        yield _section("The figures that say so", _list(verdict.figures, commands))
    yield _cures(verdict, commands)
    if verdict.notes:
        yield _section("Also noticed", _list(verdict.notes, commands))


def _list(sentences: Iterable[str], commands: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{prose(sentence, commands)}</li>" for sentence in sentences) + "\n</ul>"


def _cures(verdict: Verdict, commands: Sequence[str]) -> str:
    """What to do, in order, and what each would gain."""
    heading, content = "What would help, in the order to try", []
    if verdict.cures:
        rows = [
            f'<tr><td>{number}</td><td class="words"><div class="name">{prose(cure.name)}</div>'
            f'{prose(cure.action, commands)}</td><td class="gain unit">{cure.gain:.1f}×</td>'
            f'<td class="unit">{range_text(cure.low, cure.high)}×</td>'
            f'<td class="plot">{draw_gain(verdict.cures, cure)}</td></tr>'
            for number, cure in enumerate(verdict.cures, start=1)
        ]
        content += [
            '<p class="about">Predicted for each cure alone: the time of a step before it over the time after it. The '
            "range is what the counters leave room for; measure again after each change.</p>",
            '<div class="wide"><table class="cures">\n<thead><tr><th scope="col" class="rank">#</th>'
            '<th scope="col" class="words">cure, and what to do</th>'
            '<th scope="col">faster</th><th scope="col">range</th>'
            f'<th scope="col" class="plot">{draw_gain(verdict.cures)}</th></tr></thead>\n<tbody>',
            *rows,
            "</tbody>\n</table></div>",
        ]
    else:
        heading = "What would help"
        is_well = verdict.cause is Cause.COMPUTE
        text = "Nothing to change: the step is bound by its own computing" if is_well else "No cure follows from this"
        content.append(f"<p>{text}.</p>")
    if (factor := free_echo_text(verdict)) is not None:
        content.append(f'<p class="after">{prose(factor)}.</p>')
    return _section(heading, *content)


# Time ------------------------------------------------------------------------------------------------------


def _timeline(records: Sequence[EpochRecord]) -> str:
    """A few steps of the latest epoch that has any."""
    record = next((one for one in reversed(records) if shown_steps(one.counters.timeline)), None)
    if record is None:
        return ""
    spans = shown_steps(record.counters.timeline)
    steps = sorted({span.step for span in spans})
    phases = {span.phase for span in spans}
    legend = "".join(f"<li>{swatch(part)}{part}: {meaning}</li>" for part, meaning in PARTS.items() if part in phases)
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    about = f"{record.label.capitalize()}, {which}"
    if any(span.lane == "device" for span in spans):
        about += "; on the host, copy and compute are only handed to the device, which works behind it"
    return _section(
        "A few steps", f'<p class="about">{about}.</p>', f'<ul class="legend">{legend}</ul>', draw_timeline(spans)
    )


def _epoch_rows(
    records: Sequence[EpochRecord], num_left_out: int, num_columns: int, cells: Iterable[str]
) -> Iterator[str]:
    """A row per epoch; the first one apart, and a word on those left out."""
    for position, (record, cell) in enumerate(zip(records, cells, strict=True)):
        is_first = record.counters.is_first
        marks = ["first, cold"] * is_first + ["so far"] * record.is_interim
        words = "".join(f'<span class="muted">{mark}</span>' for mark in marks)
        yield f'<tr><th scope="row">epoch {record.counters.epoch}{words}</th>{cell}</tr>'
        if position == 0 and num_left_out:
            plural = "s" if num_left_out != 1 else ""
            text = f"{num_left_out:,} epoch{plural} left out"
            yield f'<tr class="left-out"><td colspan="{num_columns}">{text}</td></tr>'
        elif is_first and position + 1 < len(records):
            yield f'<tr class="gap" aria-hidden="true"><td colspan="{num_columns}"></td></tr>'


def _shares(records: Sequence[EpochRecord], num_left_out: int) -> str:
    """A bar per epoch and its shares in figures, the head of the table being the legend."""
    parts_of = [step_parts(record.counters.steps) for record in records]
    if not any(parts_of):
        return ""
    # What no epoch knows, or knows to be nothing, takes no column.
    shown = [name for name in PARTS if any(part.name == name and part.seconds > 0 for ps in parts_of for part in ps)]
    cells = []
    for record, parts in zip(records, parts_of, strict=True):
        texts = dict(zip((part.name for part in parts), percent_texts([part.share for part in parts]), strict=True))
        texts |= {part.name: UNKNOWN for part in parts if not part.is_known}
        words = ", ".join(f"{name} {texts[name]}" for name in shown if name in texts)
        bar = draw_shares(parts, words) if parts else '<span class="muted">no step was counted</span>'
        each = milliseconds_text(record.counters.steps.step_seconds) if parts else ""
        figures = "".join(f'<td class="unit">{texts.get(name, "")}</td>' for name in shown)
        cells.append(f'<td class="unit">{each}</td><td class="bar-cell">{bar}</td>{figures}')
    head = "".join(f'<th scope="col" class="unit">{swatch(name)}{name}</th>' for name in shown)
    about = "; ".join(f"{name}: {PARTS[name]}" for name in shown)
    if any(record.counters.steps.idle_seconds is not None for record in records):
        about += ". What the host did while the device computed cost nothing and is not counted"
    return _section(
        "Where the time of a step goes",
        f'<p class="about">{about[0].upper()}{about[1:]}.</p>',
        '<div class="wide"><table>\n<thead><tr><th scope="col">epoch</th><th scope="col">one step</th>'
        f'<th scope="col" class="words bar-cell">share of its time</th>{head}</tr></thead>\n<tbody>',
        *_epoch_rows(records, num_left_out, 3 + len(shown), cells),
        "</tbody>\n</table></div>",
    )


# Readers ---------------------------------------------------------------------------------------------------


def _reader_cells(record: EpochRecord) -> str:
    """What reads, and what it did, in the order of the table's columns."""
    counters = record.counters
    usage, ratio = record.usage, counters.read_ratio
    texts = [UNKNOWN] * 6
    if usage is not None and usage.wall_seconds > 0:
        times = (usage.user_seconds, usage.system_seconds, usage.queue_seconds, usage.asleep_seconds)
        faults = UNKNOWN if usage.major_faults is None else f"{usage.major_faults:,}"
        texts = [percent_text(usage.share(one)) for one in times]
        texts += [UNKNOWN if ratio is None else f"{ratio:,.2f}", faults]
    figures = "".join(f'<td class="unit{" muted" * (text == UNKNOWN)}">{text}</td>' for text in texts)
    who = escaped(record.who_reads)
    return f'<td class="words">{escaped(record.verdict.cause)}</td><td class="words">{who}</td>{figures}'


def _readers(records: Sequence[EpochRecord], num_left_out: int) -> str:
    """Figures of the readers per epoch."""
    columns = ("user", "system", "queue", "asleep")
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    return _section(
        "What the readers did",
        '<p class="about">In percent of the time they were watched. User: on a core, in their own code. System: on a '
        "core, in the kernel. Queue: ready to run, but no core was free. Asleep: waiting for storage, or with nothing "
        "to do. A ratio far above 1 means that most of what is read is thrown away; 0 means that files are read "
        "through a memory map.</p>",
        '<div class="wide"><table>\n<thead><tr><th scope="col">epoch</th><th scope="col" class="words">verdict</th>'
        f'<th scope="col" class="words">read by</th>{head}<th scope="col">bytes read per<br>byte delivered</th>'
        '<th scope="col">major<br>faults</th></tr></thead>\n<tbody>',
        *_epoch_rows(records, num_left_out, 9, map(_reader_cells, records)),
        "</tbody>\n</table></div>",
    )
