"""Which steps are watched in full: within the budget, at random, and with random numbers of nobody else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.diagnose import sampling
from lightning_gpufeed.diagnose.sampling import RUN, StepSampler, watched_share

INSIDE = 1e-5
COST = sampling._HIDDEN_FACTOR * INSIDE
FIRST = RUN * sampling._FIRST_RUNS


def decide(sampler: StepSampler, num_steps: int, step_seconds: float, now: float = 0.0) -> list[int]:
    """Numbers of the steps that are watched in full, of steps that all take as long."""
    watched, number = [], 0
    while number < num_steps:
        watched.append(number)
        now += step_seconds
        gap = sampler.end_step(now, INSIDE, 0.0)
        number += 1 + gap
        now += gap * step_seconds
    return watched


@given(st.floats(1e-5, 10.0), st.floats(1e-6, 1e-2), st.floats(0.0, 0.01))
def test_watching_keeps_to_its_budget_unless_it_would_see_next_to_nothing(step_seconds, cost_seconds, other_share):
    share = watched_share(step_seconds, cost_seconds, other_share)
    assert sampling._LEAST_SHARE <= share <= 1.0
    spent = cost_seconds * (sampling._FLOOR + (1 - sampling._FLOOR) * share)
    budget = max(sampling._LEAST_BUDGET, sampling._BUDGET - other_share)
    if share > sampling._LEAST_SHARE:
        assert spent <= budget * step_seconds * (1 + 1e-9)  # rounding
    if share < 1.0:
        assert spent >= budget * step_seconds * (1 - 1e-9)


@pytest.mark.parametrize(
    ("step_seconds", "cost_seconds", "low", "high"),
    [
        (0.030, 1.1e-4, 1.0, 1.0),
        (0.016, 1.1e-4, 0.6, 0.8),
        (0.004, 1.0e-4, 0.05, 0.2),
        (0.004, 2.0e-5, 1.0, 1.0),
        (0.001, 1.0e-4, 1 / 32, 1 / 32),
        (0.0, 1.0e-4, 1.0, 1.0),
        (0.004, 0.0, 1.0, 1.0),
    ],
    ids=["30 ms", "16 ms", "4 ms", "4 ms, fast machine", "1 ms", "step not known", "cost not known"],
)
def test_the_share_follows_from_the_step_and_the_cost(step_seconds, cost_seconds, low, high):
    assert low <= watched_share(step_seconds, cost_seconds) <= high


def test_long_steps_are_all_watched_and_each_stands_for_itself():
    sampler = StepSampler()
    assert decide(sampler, 500, 0.05) == list(range(500))
    assert sampler.weight == 1.0


def test_the_first_steps_are_watched_and_each_epoch_begins_with_a_run():
    sampler = StepSampler()
    assert decide(sampler, FIRST + 1, 0.002)[:FIRST] == list(range(FIRST))
    assert sampler.share < 1.0
    for _ in range(5):
        sampler.begin_epoch()
        assert sampler.weight == 1.0
        assert decide(sampler, RUN, 0.002) == list(range(RUN))


def test_first_steps_go_on_over_epochs_that_are_shorter():
    sampler = StepSampler()
    for _ in range(sampling._FIRST_RUNS):
        sampler.begin_epoch()
        assert decide(sampler, RUN, 0.002) == list(range(RUN))


def test_the_share_comes_out_and_the_weights_make_up_for_it():
    sampler = StepSampler()
    decide(sampler, FIRST, 0.004)
    num_steps = 150_000
    watched = decide(sampler, num_steps, 0.004, now=1.0)
    share = watched_share(0.004, COST)
    assert sampler.weight == pytest.approx(1 / share)
    # Each run of 8 and the geometric gap before it, of mean g, are independent: the standard error of their number.
    gap = RUN * (1 / share - 1)
    error = 5 * (gap / (RUN + gap)) * np.sqrt(num_steps / (RUN + gap)) * RUN / num_steps
    assert len(watched) / num_steps == pytest.approx(share, abs=error + RUN / num_steps)


@pytest.mark.parametrize("period", [2, 3, 4, 6, 8, 16])
def test_runs_begin_at_every_place_of_a_period_equally_often(period):
    sampler = StepSampler()
    decide(sampler, FIRST, 0.003)
    watched = decide(sampler, 100_000, 0.003, now=1.0)
    begins = [one for before, one in zip([-2, *watched], watched, strict=False) if one != before + 1]
    counts = np.bincount(np.array(begins) % period, minlength=period)
    expected = len(begins) / period
    assert len(begins) > 300
    # Five standard errors; places that follow each other hang together a little, which makes them more even.
    assert np.abs(counts - expected).max() <= 5 * np.sqrt(expected)


def test_a_stall_does_not_change_how_much_is_watched():
    sampler = StepSampler()
    decide(sampler, 2000, 0.004)
    before = sampler.share
    sampler.end_step(1e6, INSIDE, 0.0)
    decide(sampler, 3 * RUN, 0.004, now=1e6)
    assert sampler.share == pytest.approx(before)


def test_time_that_is_no_steps_is_not_counted_as_one():
    sampler = StepSampler()
    now = 0.0
    for _ in range(40):
        decide(sampler, RUN, 0.02, now)
        sampler.pause()
        now += 1000.0
    assert sampler.step_seconds == pytest.approx(0.02)


def test_what_is_measured_as_a_whole_counts_once():
    sampler = StepSampler()
    for number in range(1, FIRST + 1):
        sampler.end_step(number * 0.01, INSIDE, number * 3e-5)
    assert sampler.cost_seconds == pytest.approx(COST + 3e-5)


def test_nobody_elses_random_numbers_are_drawn_and_all_ranks_decide_alike():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    one, other = decide(StepSampler(), 5000, 0.003), decide(StepSampler(), 5000, 0.003)
    assert one == other
    assert len(one) < 2500
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
