"""Costs of layers and of the link, and the link that was measured."""

from __future__ import annotations

import doctest
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.sync import costs
from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts, fit_link

SIZES = [1_000, 10_000, 100_000, 1_000_000, 4_000_000]


def test_the_examples_run():
    assert doctest.testmod(costs).failed == 0


def test_a_message_takes_latency_and_its_bytes():
    assert LinkCosts(2.0, 10.0).seconds(30) == 5.0
    assert LinkCosts(2.0, math.inf).seconds(30) == 2.0


def test_the_link_that_made_the_samples_is_found():
    link = LinkCosts(1e-3, 1e8)
    found = fit_link((size, link.seconds(size)) for size in SIZES)
    assert found.latency_seconds == pytest.approx(1e-3)
    assert found.bytes_per_second == pytest.approx(1e8)


def test_messages_that_were_held_up_by_something_else_do_not_count():
    link, chance = LinkCosts(1e-3, 1e8), random.Random(0)
    samples = [(size, link.seconds(size) * chance.uniform(0.98, 1.02)) for size in SIZES for _ in range(10)]
    samples[3::7] = [(size, seconds * 30) for size, seconds in samples[3::7]]
    found = fit_link(samples)
    assert found.latency_seconds == pytest.approx(1e-3, rel=0.05)
    assert found.bytes_per_second == pytest.approx(1e8, rel=0.05)


def test_messages_of_one_size_say_nothing_about_latency():
    assert fit_link([(100, 2.0), (100, 2.0), (100, 50.0)]) == LinkCosts(0.0, 50.0)


def test_a_line_through_less_than_nothing_has_no_latency():
    found = fit_link([(100, 0.5), (200, 2.0), (300, 3.5)])
    assert found.latency_seconds == 0.0


def test_large_messages_that_are_faster_make_no_negative_rate():
    found = fit_link([(100, 3.0), (200, 2.0), (300, 1.0)])
    assert found.bytes_per_second == math.inf
    assert 1.0 <= found.latency_seconds <= 3.0


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 1e3)), min_size=1, max_size=30))
def test_the_link_is_one_whatever_was_measured(samples):
    found = fit_link(samples)
    assert found.latency_seconds >= 0
    assert found.bytes_per_second > 0
    assert found == fit_link(reversed(samples))


@pytest.mark.parametrize("samples", [[], [(0, 1.0)], [(10, 0.0)], [(10, math.nan)], [(10, math.inf)]])
def test_what_is_no_measurement_is_refused(samples):
    with pytest.raises(ValueError, match="expected"):
        fit_link(samples)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_costs_that_are_none_are_refused(seconds):
    with pytest.raises(ValueError, match="weight_grad_seconds of layer 'head'"):
        LayerCosts("head", 1.0, 1.0, seconds, gradient_bytes=8)
    with pytest.raises(ValueError, match="latency_seconds"):
        LinkCosts(seconds, 1.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_link_that_sends_nothing_is_refused(rate):
    with pytest.raises(ValueError, match="bytes_per_second"):
        LinkCosts(0.0, rate)
