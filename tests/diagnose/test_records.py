"""What is shown of an epoch: parts that add up, and words that are safe to print."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.diagnose.counters import StepTotals
from lightning_gpufeed.diagnose.judgement import Cause, Verdict
from lightning_gpufeed.diagnose.records import (
    PARTS,
    EpochRecord,
    bytes_text,
    free_echo_text,
    headline,
    milliseconds_text,
    percent_texts,
    printable,
    range_text,
    settled,
    step_parts,
)
from tests.diagnose.samples import AMPLIFIED, COMPUTE, ON_DEVICE, UNKNOWN_ALL, epochs

SECONDS = st.just(0.0) | st.floats(1e-6, 1e5)
TOTALS = st.builds(
    StepTotals,
    num_steps=st.integers(1, 10**7),
    elapsed_seconds=st.floats(1e-6, 1e6),
    wait_seconds=SECONDS,
    copy_seconds=SECONDS,
    compute_seconds=SECONDS,
    idle_seconds=st.none() | SECONDS,
    sync_seconds=st.none() | SECONDS,
    hook_seconds=SECONDS,
)


def shares(steps: StepTotals) -> dict[str, float]:
    return {part.name: part.share for part in step_parts(steps)}


# Parts -----------------------------------------------------------------------------------------------------


@given(TOTALS)
def test_the_parts_of_a_step_add_up_to_it(steps):
    parts = step_parts(steps)
    assert [part.name for part in parts] == list(PARTS)
    assert all(part.share >= 0 and part.seconds >= 0 for part in parts)
    assert math.fsum(part.share for part in parts) == pytest.approx(1.0, abs=1e-9)  # rounding of seven floats


@given(TOTALS)
def test_the_texts_of_the_shares_add_up_to_a_hundred(steps):
    texts = percent_texts([part.share for part in step_parts(steps)])
    assert sum(round(10 * float(text.removesuffix(" %"))) for text in texts) == 1000


@given(TOTALS)
def test_a_text_of_a_share_is_off_by_less_than_a_tenth_of_a_percent(steps):
    parts = step_parts(steps)
    for part, text in zip(parts, percent_texts([part.share for part in parts]), strict=True):
        assert abs(float(text.removesuffix(" %")) - 100 * part.share) < 0.1 + 1e-9


def test_on_a_host_that_computes_every_part_counts_in_full():
    steps = StepTotals(num_steps=1, elapsed_seconds=10.0, wait_seconds=4.0, compute_seconds=5.0, hook_seconds=0.5)
    assert shares(steps) == {
        "wait": 0.4, "copy": 0.0, "compute": 0.5, "idle": 0.0, "sync": 0.0, "hooks": 0.05, "other": 0.05,
    }  # fmt: skip


def test_what_the_host_does_while_the_device_computes_costs_nothing():
    steps = StepTotals(1, 10.0, wait_seconds=3.0, compute_seconds=10.0, idle_seconds=0.0, sync_seconds=2.0)
    assert shares(steps)["compute"] == 1.0


def test_the_idle_time_of_a_device_is_shared_out_in_order():
    steps = StepTotals(
        num_steps=1,
        elapsed_seconds=10.0,
        wait_seconds=3.0,
        compute_seconds=2.0,
        idle_seconds=8.0,
        sync_seconds=2.0,
        hook_seconds=1.0,
    )
    assert shares(steps) == {
        "wait": 0.3, "copy": 0.0, "compute": 0.2, "idle": 0.2, "sync": 0.2, "hooks": 0.1, "other": 0.0,
    }  # fmt: skip
    less = shares(replace(steps, idle_seconds=4.0, compute_seconds=6.0))
    assert (less["wait"], less["sync"], less["hooks"], less["idle"]) == (0.3, 0.1, 0.0, 0.0)


def test_what_could_not_be_counted_is_marked():
    parts = {part.name: part.is_known for part in step_parts(AMPLIFIED.counters.steps)}
    assert [name for name, is_known in parts.items() if not is_known] == ["idle", "sync"]
    assert all(part.is_known for part in step_parts(ON_DEVICE.counters.steps))


def test_without_a_step_there_is_no_part():
    assert step_parts(StepTotals()) == ()


# Epochs ----------------------------------------------------------------------------------------------------


def test_the_last_word_on_an_epoch_is_kept():
    first, second = epochs(2)
    so_far = replace(second, is_interim=True)
    assert settled([first, so_far]) == [first, so_far]
    assert settled([first, so_far, second]) == [first, second]


def test_readers_are_called_by_what_they_are():
    assert AMPLIFIED.who_reads == "2 workers"
    assert COMPUTE.who_reads == "reading thread"
    assert UNKNOWN_ALL.who_reads == "3 workers (3 not watched)"
    alone = replace(AMPLIFIED.counters, loader=replace(AMPLIFIED.counters.loader, num_workers=0), readers=None)
    assert replace(AMPLIFIED, counters=alone).who_reads == "training process"


def test_where_nothing_reads_ahead_the_training_thread_is_what_reads():
    counters = AMPLIFIED.counters
    alone = replace(counters, loader=replace(counters.loader, num_workers=0), readers=None)
    assert replace(AMPLIFIED, counters=alone).usage is counters.main
    thread = replace(alone, training_thread=counters.readers)
    assert replace(AMPLIFIED, counters=thread).usage is counters.readers
    assert UNKNOWN_ALL.usage is None  # of workers that cannot be seen nothing is known


@pytest.mark.parametrize(
    ("share", "said"), [(0.0, "waits 0 %"), (0.004, "waits less than 1 %"), (0.634, "waits 63 %"), (1.0, "waits 100 %")]
)
def test_the_headline_says_how_long_the_step_waits(share, said):
    assert said in headline(replace(AMPLIFIED, verdict=Verdict(Cause.DISK, share)))


def test_the_headline_of_a_step_that_computes_says_that_nothing_is_to_be_gained():
    assert headline(COMPUTE).endswith("nothing to gain in the loader")
    assert "gain" not in headline(AMPLIFIED)


def test_the_headline_without_a_step_claims_nothing():
    empty = EpochRecord(replace(AMPLIFIED.counters, steps=StepTotals()), Verdict(Cause.COMPUTE, 0.0), "")
    assert headline(empty) == "no step was measured"


def test_free_echo_is_named_where_there_is_any():
    assert "up to 2.7 is free" in free_echo_text(AMPLIFIED.verdict)
    assert free_echo_text(replace(AMPLIFIED.verdict, free_echo_factor=1.0)) is None
    assert free_echo_text(COMPUTE.verdict) is None


# Words -----------------------------------------------------------------------------------------------------


@given(st.text(st.characters()))
def test_a_text_from_outside_becomes_one_line_that_can_be_encoded(text):
    shown = printable(text)
    assert shown.isprintable()
    assert shown.encode("utf-8").decode("utf-8") == shown


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_a_printable_text_stays_as_it_is(text):
    assert printable(text) == text


def test_what_moves_a_cursor_or_turns_a_line_round_is_escaped():
    assert printable("a\x1b[2Jb\u202ec\udcffd\te") == r"a\x1b[2Jb\u202ec\udcffd e"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00 ms"), (0.00821, "8.21 ms"), (0.009996, "10.0 ms"), (0.0821, "82.1 ms"), (1.2342, "1,234 ms")],
)
def test_a_time_has_three_digits_and_always_the_same_unit(seconds, text):
    assert milliseconds_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "unknown"), (0, "0 bytes"), (9_633_792, "9.19 MiB"), (80 << 30, "80 GiB"), (5000 << 40, "5,000 TiB")],
)
def test_bytes_have_three_digits_and_a_unit(number, text):
    assert bytes_text(number) == text


def test_a_range_without_width_is_one_number():
    assert range_text(1.84, 2.36) == "1.8 to 2.4"
    assert range_text(2.01, 2.04) == "2.0"
