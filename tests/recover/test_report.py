"""What happened, in lines for people and in numbers for loggers."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.recover.report import OOMEvent, bytes_text, summary_line

EVENT = OOMEvent("fit", 7, "backward", 2**31, 3 * 2**29, -1, 2, 4, 16, "4 microbatches of at most 16 samples (retry 3)")


def event(**changes: object) -> OOMEvent:
    return dataclasses.replace(EVENT, **changes)  # type: ignore[arg-type]


# Bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "an unknown amount"),
        (0, "0 bytes"),
        (1, "1 bytes"),
        (999, "999 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (67108864, "64 MiB"),
        (2**31, "2 GiB"),
        (5 * 2**40, "5 TiB"),
    ],
)
def test_bytes_are_written_for_people(num_bytes, text):
    assert bytes_text(num_bytes) == text


@given(num_bytes=st.integers(0, 2**49))
def test_bytes_have_three_digits_and_are_right_to_within_half_a_unit_of_the_third(num_bytes: int) -> None:
    text = bytes_text(num_bytes)
    number, unit = text.split()
    assert re.fullmatch(r"\d{1,3}(\.\d{1,2})?|0\.\d{3}", number), text
    factor = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(float(number) * factor - num_bytes) <= 0.00501 * num_bytes


# One event ---------------------------------------------------------------------------------------------------


def test_an_event_says_step_phase_what_was_asked_for_what_was_free_and_what_worked():
    assert str(event()) == (
        "OOMRecovery: step 7 ran out of memory in backward (asked for 2 GiB, 1.5 GiB free); what worked: "
        "4 microbatches of at most 16 samples (retry 3)."
    )


def test_what_is_not_known_is_left_out():
    text = str(event(requested_bytes=None, free_bytes=None, cure="the same again after releasing memory"))
    assert text == (
        "OOMRecovery: step 7 ran out of memory in backward; what worked: the same again after releasing memory."
    )
    assert "(1.5 GiB free)" in str(event(requested_bytes=None))
    assert "(asked for 2 GiB)" in str(event(free_bytes=None))


def test_one_of_several_ranks_is_named():
    assert " in backward on rank 0 (" in str(event(rank=0))
    assert " in backward on rank 3 (" in str(event(rank=3))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_event_of_an_evaluation_names_its_batch(stage):
    assert str(event(stage=stage)).startswith(f"OOMRecovery: {stage} batch 7 ran out of memory")


def test_no_line_is_broken():
    assert "\n" not in str(event(rank=1))


def test_a_logger_is_given_numbers_with_the_stage_in_their_names():
    assert event().to_metrics() == {
        "gpufeed/oom/fit_num_retries": 2.0,
        "gpufeed/oom/fit_num_microbatches": 4.0,
        "gpufeed/oom/fit_requested_bytes": float(2**31),
        "gpufeed/oom/fit_free_bytes": float(3 * 2**29),
    }
    assert set(event(stage="test", requested_bytes=None, free_bytes=None).to_metrics()) == {
        "gpufeed/oom/test_num_retries",
        "gpufeed/oom/test_num_microbatches",
    }
    assert event(free_bytes=0).to_metrics()["gpufeed/oom/fit_free_bytes"] == 0.0  # known, and nothing


# All of them -------------------------------------------------------------------------------------------------


def test_the_summary_counts_batches_by_phase_and_retries():
    events = [event(), event(phase="forward", num_retries=1), event(num_retries=3)]
    assert summary_line(events, 2) == (
        "OOMRecovery: 3 batches ran out of memory (2 in backward, 1 in forward), 6 retries, none lost; the training "
        "ended with 2 microbatches a batch."
    )


def test_one_is_written_as_one():
    assert summary_line([event(num_retries=1)], 1) == (
        "OOMRecovery: 1 batch ran out of memory (1 in backward), 1 retry, none lost; the training ended with whole "
        "batches."
    )
