"""The line at the end of an epoch: its figures, and that its words agree with them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.echo.report import EchoReport

FREE = EchoReport(
    epoch=3,
    num_fetches=1000,
    num_passes=2000,
    num_echo_steps=2000,  # two pieces
    load_seconds=0.4,
    pass_seconds=0.1,
    is_bound=False,
    wait_seconds=30.0,
    elapsed_seconds=100.0,
)
TOO_MUCH = replace(FREE, num_passes=9000, num_echo_steps=16000)
FAST_LOADER = replace(FREE, load_seconds=0.01, is_bound=True, wait_seconds=0.0)
REPORTS = st.builds(
    EchoReport,
    epoch=st.integers(0, 1000),
    num_fetches=st.integers(0, 10**6),
    num_passes=st.integers(0, 10**7),
    num_echo_steps=st.integers(0, 10**8),
    load_seconds=st.just(0.0) | st.floats(1e-6, 1e4),
    pass_seconds=st.just(0.0) | st.floats(1e-6, 1e4),
    is_bound=st.booleans(),
    wait_seconds=st.floats(0, 1e4),
    elapsed_seconds=st.floats(1e4, 1e6),
    is_adaptive=st.booleans(),
)


# Figures ---------------------------------------------------------------------------------------------------


def test_the_ratio_is_loading_over_one_pass():
    assert FREE.load_ratio == 4.0
    assert replace(FREE, load_seconds=0.0).load_ratio is None
    assert replace(FREE, pass_seconds=0.0).load_ratio is None


def test_the_factor_is_passes_over_fresh_batches():
    assert FREE.echo_factor == 2.0
    assert replace(FREE, num_passes=1500).echo_factor == 1.5
    assert replace(FREE, num_fetches=0, num_passes=0).echo_factor == 1.0


@pytest.mark.parametrize(
    ("ratio", "factor", "free"),
    [
        (4, 2, 1.0),  # e <= R: the loader was behind all the time
        (4, 4, 1.0),
        (4, 7, 0.5),  # of six echoes three were free
        (2, 5, 0.25),
        (1, 2, 0.0),  # the loader keeps up
        (0.2, 3, 0.0),
        (1.5, 2, 0.5),
        (2, 1.5, 1.0),
        (4, 1, None),  # there was no echo
    ],
)
def test_echoes_up_to_the_ratio_are_free(ratio, factor, free):
    report = replace(FREE, load_seconds=ratio * 0.5, pass_seconds=0.5, num_passes=int(1000 * factor))
    assert report.free_share == free


@given(report=REPORTS)
def test_shares_are_shares(report: EchoReport) -> None:
    assert 0 <= report.wait_share <= 1
    assert report.free_share is None or 0 <= report.free_share <= 1


def test_the_share_of_waiting_is_of_the_whole_epoch():
    assert FREE.wait_share == 0.3
    assert replace(FREE, elapsed_seconds=0.0).wait_share == 0.0


def test_loggers_get_the_figures():
    assert FREE.to_metrics() == {
        "gpufeed/echo/fresh_batches": 1000.0,
        "gpufeed/echo/echoed_steps": 2000.0,
        "gpufeed/echo/factor": 2.0,
        "gpufeed/echo/load_ratio": 4.0,
        "gpufeed/echo/free_share": 1.0,
        "gpufeed/echo/wait_share": 0.3,
    }


def test_loggers_get_nothing_that_was_not_measured():
    metrics = replace(FREE, load_seconds=0.0).to_metrics()
    assert "gpufeed/echo/load_ratio" not in metrics
    assert "gpufeed/echo/free_share" not in metrics
    assert all(isinstance(value, float) for value in metrics.values())


# Words -----------------------------------------------------------------------------------------------------


def test_free_echoes_are_said_to_be_free():
    assert str(FREE) == (
        "BatchEcho, epoch 3: 1,000 fresh batches, 2,000 echoed steps, echo factor 2; loader 400 ms a batch, steps 100 "
        "ms: R = 4; all of the echo was free (e <= R); waited 30% of the time"
    )


def test_echoes_beyond_the_ratio_are_said_to_delay_fresh_data():
    assert (
        "; 38% of the echo was free (passes up to R), the rest delayed fresh data (e > R): an echo_factor of 4 would "
        "not; waited"
    ) in str(TOO_MUCH)


def test_the_factor_to_take_is_never_above_the_ratio_and_at_least_one():
    text = str(replace(TOO_MUCH, load_seconds=0.399))
    assert "an echo_factor of 3 would not" in text
    text = str(replace(TOO_MUCH, load_seconds=0.02))
    assert "0% of the echo was free" in text
    assert "an echo_factor of 1 would not" in text


def test_a_loader_that_was_never_waited_for_is_known_to_a_bound_only():
    text = str(FAST_LOADER)
    assert "R = at most 0.1" in text
    assert "at most 0% of the echo was free" in text
    assert "all of the echo was free" not in text
    assert "loader at most 10 ms a batch" in text
    assert FAST_LOADER.to_metrics().keys().isdisjoint({"gpufeed/echo/load_ratio", "gpufeed/echo/free_share"})


def test_echoes_by_need_are_not_blamed():
    text = str(replace(TOO_MUCH, is_adaptive=True))
    assert "38% of the echo was free" in text
    assert "would not" not in text
    assert "delayed" not in text


def test_without_echoes_nothing_is_said_about_them():
    text = str(replace(FREE, num_passes=1000, num_echo_steps=0))
    assert "0 echoed steps, echo factor 1;" in text
    assert "free" not in text


def test_what_was_not_measured_is_not_said():
    text = str(replace(FREE, load_seconds=0.0))
    assert "R =" not in text
    assert "free" not in text
    assert text.endswith("echo factor 2; waited 30% of the time")


def test_an_epoch_without_batches_has_a_line_too():
    report = EchoReport(0, 0, 0, 0, 0.0, 0.0, True, 0.0, 0.0)
    assert str(report) == ("BatchEcho, epoch 0: 0 fresh batches, 0 echoed steps, echo factor 1; waited 0% of the time")


@given(report=REPORTS)
def test_it_is_one_line_of_plain_figures(report: EchoReport) -> None:
    text = str(report)
    assert "\n" not in text
    assert not re.search(r"\de[+-]?\d|nan|inf", text)


@given(report=REPORTS)
def test_the_words_about_the_ratio_agree_with_the_figures(report: EchoReport) -> None:
    text, ratio = str(report), report.load_ratio
    if "(e <= R)" in text:
        assert ratio is not None
        assert report.echo_factor <= 1.01 * ratio  # 99.5 % free counts as all
    if "(e > R)" in text:
        assert ratio is not None
        assert report.echo_factor > ratio
        advised = int(re.findall(r"an echo_factor of ([\d,]+) would not", text)[0].replace(",", ""))
        assert advised < report.echo_factor
    if report.is_adaptive:
        assert "would not" not in text
