"""The table in a terminal: what it says, that it fits, and that no terminal breaks it."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from lightning_gpufeed.diagnose.counters import EpochCounters
from lightning_gpufeed.diagnose.judgement import Cause, Verdict
from lightning_gpufeed.diagnose.records import EpochRecord
from lightning_gpufeed.diagnose.table import print_table, render_table
from tests.diagnose.samples import AMPLIFIED, COMPUTE, LONG, ON_DEVICE, TINY_SHARES, UNKNOWN_ALL, epochs

SAMPLES = {
    "amplified": AMPLIFIED,
    "on_device": ON_DEVICE,
    "compute": COMPUTE,
    "unknown": UNKNOWN_ALL,
    "long": LONG,
    "tiny": TINY_SHARES,
}


def printed(record: EpochRecord, width: int = 100, *, encoding: str = "utf-8", is_terminal: bool = False) -> str:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding, write_through=True)
    colours = "truecolor" if is_terminal else None
    print_table([record], Console(file=stream, width=width, force_terminal=is_terminal, color_system=colours))
    return buffer.getvalue().decode(encoding)


def words(text: str) -> str:
    """Without the breaks of lines."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("record", SAMPLES.values(), ids=SAMPLES)
def test_no_line_is_wider_than_the_terminal(record, width):
    assert max(map(len, printed(record, width).splitlines())) <= width


@pytest.mark.parametrize("record", SAMPLES.values(), ids=SAMPLES)
def test_on_a_wide_terminal_it_takes_a_hundred_columns(record):
    assert max(map(len, printed(record, 250).splitlines())) <= 100


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("record", SAMPLES.values(), ids=SAMPLES)
def test_no_character_of_what_it_says_is_lost(record, width):
    letters = re.sub(r"[\s─]", "", printed(record, width))
    verdict = record.verdict
    for sentence in [verdict.cause, *verdict.figures, *verdict.notes]:
        assert re.sub(r"\s", "", sentence) in letters
    for cure in verdict.cures:  # in columns beside others: all their letters, in order
        following = iter(letters)
        assert all(letter in following for letter in re.sub(r"\s", "", cure.action))
        assert f"{cure.gain:.1f}x" in letters


def test_nothing_is_cut_off_with_dots():
    assert "…" not in printed(LONG, 80)


@pytest.mark.parametrize("width", [80, 100])
def test_the_rows_of_times_and_readers_take_one_line_each(width):
    lines = printed(ON_DEVICE, width).splitlines()
    [wait] = [line for line in lines if line.startswith("wait: no batch was ready")]
    assert re.split(r"\s{2,}", wait.strip()) == ["wait: no batch was ready", "30.0 ms", "38.4 %", "######"]
    [readers] = [line for line in lines if line.startswith("8 workers")]
    assert readers.split()[2:] == ["39.3", "%", "5.1", "%", "0.0", "%", "55.6", "%", "0.25", "0"]


def test_the_shares_add_up():
    text = printed(ON_DEVICE)
    rows = re.findall(r"^(\w+):? .* ms +(\d+\.\d) %", text, flags=re.M)
    assert [name for name, _ in rows] == ["wait", "copy", "compute", "idle", "sync", "hooks", "other", "all"]
    assert sum(round(10 * float(share)) for name, share in rows if name != "all") == 1000


def test_it_begins_with_the_epoch_and_the_verdict():
    text = words(printed(ON_DEVICE))
    assert text.startswith(
        "FeedMonitor, epoch 12, rank 3 of 4: conversion on the host: the step waits 38 % of the time for data"
    )
    assert words(printed(UNKNOWN_ALL)).startswith("FeedMonitor, epoch 1, so far: loader-bound")
    assert words(printed(COMPUTE)).startswith("FeedMonitor, epoch 0, first, cold: compute-bound")


def test_cures_come_in_order_with_their_gain_and_range():
    text = words(printed(AMPLIFIED))
    assert re.search(r"1 chunk order gpufeed repack .* 2\.1x 1\.8 to 2\.4x .* 2 4 workers .* 1\.2x 0\.9 to 1\.4x", text)
    assert "echo_factor of up to 2.7 is free" in text


def test_it_is_about_the_latest_epoch():
    rendered = render_table(epochs(5))
    assert isinstance(rendered, Table)
    with (console := Console(width=100)).capture() as captured:
        console.print(rendered)
    assert "epoch 4:" in captured.get()


def test_colour_says_nothing_that_words_do_not():
    coloured = printed(AMPLIFIED, is_terminal=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == printed(AMPLIFIED)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", coloured)  # no foreground colour at all: weight only


def test_what_looks_like_markup_or_moves_the_cursor_is_shown_as_text():
    verdict = replace(
        AMPLIFIED.verdict,
        figures=("[red]data[/red]/[bold].h5 :smile: \x1b[2J",),
        cures=(replace(AMPLIFIED.verdict.cures[0], name="[link]", action="gpufeed repack '[/a].h5'"),),
        notes=("[/]",),
    )
    text = printed(replace(AMPLIFIED, verdict=verdict))
    for shown in (r"[red]data[/red]/[bold].h5 :smile: \x1b[2J", "[link]", "gpufeed repack '[/a].h5'", "- [/]"):
        assert shown in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_a_path_gets_it_escaped(encoding):
    record = replace(AMPLIFIED, verdict=replace(AMPLIFIED.verdict, notes=("données/画像.h5 was not in memory",)))
    text = printed(record, encoding=encoding)
    assert r"\u753b\u50cf.h5 was not in memory" in text
    assert "waits 63 %" in words(text)


def test_the_console_of_the_program_is_the_default(capsys):
    print_table([AMPLIFIED])
    assert "read amplification" in capsys.readouterr().out


def test_with_nothing_but_a_verdict_there_is_just_that():
    record = EpochRecord(EpochCounters(), Verdict(Cause.COMPUTE, 0.0, notes=("no step was measured",)), "nothing")
    lines = [line.strip() for line in printed(record).splitlines() if line.strip()]
    assert lines == ["FeedMonitor, epoch 0: compute-bound: no step was measured", "- no step was measured"]


def test_without_a_record_it_says_when_to_print():
    with pytest.raises(ValueError, match="at least one EpochRecord, got none: print it after the first epoch"):
        render_table([])
