"""What messages take: the line through samples, and real ranks (gloo) that measure it together."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.pipeline import link as link_module
from lightning_gpufeed.pipeline.link import Link, fit_link, probe_link
from tests.doubles import run_ranks
from tests.pipeline.link_worker import MOST_BYTES, NUM_RANKS, SLOW_SECONDS

WORKER = Path(__file__).with_name("link_worker.py")
LIMIT_SECONDS = 90
SIZES = [1 << 12, 1 << 14, 1 << 16, MOST_BYTES]

samples = st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-7, 1e3)), min_size=1, max_size=9)


def test_the_examples_run():
    assert doctest.testmod(link_module).failed == 0


# A line ----------------------------------------------------------------------------------------------------


@given(st.floats(1e-6, 1.0), st.floats(1e-12, 1e-3), st.sets(st.integers(1, 10**8), min_size=2, max_size=8))
def test_the_line_of_exact_samples_is_found(latency, per_byte, sizes):
    exact = Link(latency, per_byte)
    found = fit_link([(size, exact.seconds(size)) for size in sizes])
    # Sizes that differ little leave the latency or the rate open; the seconds between them are known all the same.
    assert [found.seconds(size) for size in sizes] == pytest.approx([exact.seconds(size) for size in sizes], rel=1e-3)


@given(samples)
def test_no_number_is_negative_and_the_line_is_none_of_the_worst(samples):
    found = fit_link(samples)

    def squares(link):
        return sum((link.seconds(size) / seconds - 1) ** 2 for size, seconds in samples)

    weights = [1 / seconds**2 for _, seconds in samples]
    flat = sum(weight * seconds for weight, (_, seconds) in zip(weights, samples, strict=True)) / sum(weights)
    assert found.latency_seconds >= 0
    assert found.seconds_per_byte >= 0
    assert squares(found) <= squares(Link(flat, 0.0)) * (1 + 1e-6) + 1e-6  # rounding of sizes that differ little


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([(100, 2.0)], Link(2.0, 0.0)),
        ([(100, 2.0), (100, 2.0)], Link(2.0, 0.0)),
        ([(100, 2.0), (200, 1.0)], Link(1.2, 0.0)),  # faster if larger: size does not matter
        ([(100, 1.0), (200, 3.0)], Link(0.0, 0.6 / 52)),  # the least relative errors through the origin
    ],
    ids=["one sample", "one size", "falling", "from below"],
)
def test_where_a_line_would_need_a_negative_number_the_best_without_is_taken(samples, expected):
    found = fit_link(samples)
    assert vars(found) == pytest.approx(vars(expected), abs=1e-12)


@pytest.mark.parametrize("samples", [[], [(0, 1.0)], [(1, 0.0)], [(1, math.inf)]])
def test_what_is_no_sample_is_refused(samples):
    with pytest.raises(ValueError, match="expected one or more pairs of bytes and seconds"):
        fit_link(samples)


@pytest.mark.parametrize("numbers", [(-1.0, 0.0), (0.0, -1.0), (math.nan, 0.0), (0.0, math.inf)])
def test_a_link_has_finite_numbers(numbers):
    with pytest.raises(ValueError, match="expected a finite number, at least 0"):
        Link(*numbers)


@pytest.mark.parametrize(("rank", "num_ranks", "most_bytes"), [(-1, 2, 8), (2, 2, 8), (0, 2, 0)])
def test_a_rank_that_is_not_there_is_refused(rank, num_ranks, most_bytes):
    with pytest.raises(ValueError, match=f"rank is {rank} of {num_ranks} and most_bytes is {most_bytes}; expected"):
        probe_link(None, torch.device("cpu"), rank, num_ranks, most_bytes=most_bytes)


# Real ranks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    plan = {"world_size": NUM_RANKS, "out": str(folder)}
    log = run_ranks(WORKER, plan, folder, num_processes=1, limit_seconds=LIMIT_SECONDS)
    files = [folder / f"{rank}.json" for rank in range(NUM_RANKS)]
    assert all(file.exists() for file in files), log[-4000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", ["all", "small", "slow"])
def test_every_rank_finds_the_same_link(ranks, name):
    links = [rank[name]["link"] for rank in ranks]
    assert links == [links[0]] * NUM_RANKS
    assert links[0]["latency_seconds"] + links[0]["seconds_per_byte"] > 0


def test_messages_go_there_and_back_between_neighbours_from_small_to_large(ranks):
    for rank, found in enumerate(ranks):
        sizes = found["all"]["sizes"]
        if 0 < rank < NUM_RANKS - 1:  # it answers first, and asks then
            half = 1 + max(place for place, size in enumerate(sizes[:-1]) if size > sizes[place + 1])
            assert sorted(sizes[:half]) == sizes[:half]
            assert sorted(sizes[half:]) == sizes[half:]
            assert set(sizes[half:]) <= set(SIZES)
        else:
            assert sorted(sizes) == sizes
            assert {SIZES[0], SIZES[1]} <= set(sizes) <= set(SIZES)


def test_nothing_larger_than_asked_for_is_sent(ranks):
    for rank in ranks:
        assert set(rank["small"]["sizes"]) == {1000}
        assert rank["small"]["link"]["seconds_per_byte"] == 0.0


def test_the_slowest_pair_counts(ranks):
    for rank in ranks:
        assert rank["slow"]["link"]["latency_seconds"] > SLOW_SECONDS / 4  # of two ways one is slow


def test_on_a_slow_link_only_the_two_smallest_sizes_are_sent(ranks):
    asked = ranks[2]["slow"]["sizes"]  # what rank 1, which is slow, has from it
    # One message to connect; one of each size, and another of the first if it fits in.
    assert asked in ([SIZES[0]] * 2 + [SIZES[1]], [SIZES[0]] * 3 + [SIZES[1]])


def test_a_group_of_some_ranks_measures_its_own_link(ranks):
    first, second = (rank["pair"] for rank in ranks[1:])
    assert first["link"] == second["link"]
    assert first["sizes"] == second["sizes"]


def test_one_rank_alone_sends_nothing(ranks):
    for rank in ranks:
        assert rank["alone"] == {"link": vars(Link(0.0, 0.0)), "sizes": []}
        assert rank["sum"] == sum(range(NUM_RANKS))
