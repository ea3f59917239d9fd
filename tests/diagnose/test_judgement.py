"""A verdict's values, and how a cure reads."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.diagnose.judgement import Cause, Cure, Verdict

GAINS = st.floats(0.5, 100)


@pytest.mark.parametrize(
    ("gain", "low", "high", "text"),
    [
        (2.1, 1.8, 2.4, "chunk order 2.1x (1.8-2.4)"),
        (2.1, 2.1, 2.1, "chunk order 2.1x"),
        (2.101, 2.099, 2.102, "chunk order 2.1x"),  # a range that rounds to one number is none
        (1.0, 0.95, 1.05, "chunk order 1.0x (0.9-1.1)"),
        (63.2, 1.0, 100.0, "chunk order 63.2x (1.0-100.0)"),
    ],
)
def test_a_cure_reads_as_its_name_gain_and_range(gain: float, low: float, high: float, text: str) -> None:
    assert str(Cure("chunk order", "do it", gain, low, high)) == text


@given(st.tuples(GAINS, GAINS, GAINS).map(sorted))
def test_the_gain_that_is_read_lies_in_the_range_that_is_read(gains: list[float]) -> None:
    low, gain, high = gains
    numbers = [float(one) for one in re.findall(r"\d+\.\d", str(Cure("x", "y", gain, low, high)))]
    if len(numbers) == 3:
        assert numbers[1] <= numbers[0] <= numbers[2]
        assert numbers[1] < numbers[2]
    else:
        assert numbers == [round(gain, 1)]


def test_causes_are_told_apart_and_read_as_words() -> None:
    assert len({str(one) for one in Cause}) == len(Cause)
    assert all(re.fullmatch(r"[a-z]+([ -][a-z]+)*", f"{one}") for one in Cause)


def test_a_verdict_of_a_cause_alone_promises_nothing() -> None:
    verdict = Verdict(Cause.COMPUTE, 0.0)
    assert (verdict.figures, verdict.cures, verdict.notes, verdict.free_echo_factor) == ((), (), (), None)
