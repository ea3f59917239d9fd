"""What is best: within the cap, sorted, over stages of about equal time, the same on every rank."""

from __future__ import annotations

import doctest
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.pipeline import search as search_module
from lightning_gpufeed.pipeline.search import balanced, best
from lightning_gpufeed.pipeline.simulate import StageCosts, simulate
from lightning_gpufeed.pipeline.validate import validate
from tests.pipeline.cases import UNIT, stage_costs

unhurried = settings(max_examples=20)


def test_the_examples_run():
    assert doctest.testmod(search_module).failed == 0


@given(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_shorter_longest_stage(seconds, data):
    num_stages = data.draw(st.integers(1, len(seconds)))
    stages = balanced(seconds, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(seconds)))
    assert len(stages) == num_stages
    assert all(stages)
    every = [
        max(sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(seconds))))
        for cuts in combinations(range(1, len(seconds)), num_stages - 1)
    ]
    assert max(sum(seconds[stage.start : stage.stop]) for stage in stages) == min(every)


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ([1.0] * 8, [2, 2, 2, 2]),
        ([1.0] * 10, [2, 2, 3, 3]),
        ([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1, 1, 2, 2]),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 9.0], [1, 2, 2, 1]),
    ],
)
def test_stages_differ_little_also_beside_a_long_layer(seconds, sizes):
    assert sorted(len(stage) for stage in balanced(seconds, 4)) == sorted(sizes)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_stages_without_layers_are_refused(num_stages):
    with pytest.raises(ValueError, match=f"num_stages is {num_stages}; expected 1 to 3, the number of layers"):
        balanced([1.0] * 3, num_stages)


@given(st.lists(stage_costs, min_size=1, max_size=13), st.data(), st.integers(1, 8), st.sampled_from([0.0, 0.5, 4.0]))
@unhurried
def test_what_is_found_is_what_a_simulation_gives_within_the_cap_and_sorted(layers, data, num_microbatches, send):
    num_ranks = data.draw(st.integers(1, min(4, len(layers))))
    found = best(layers, send, num_ranks, num_microbatches)
    assert found == sorted(found, key=lambda one: (one.step_seconds, one.peak_bytes, one.num_virtual, one.name))
    for one in found:
        validate(one.schedule)
        assert one.schedule.num_virtual == one.num_virtual
        assert one.schedule.num_stages == len(one.stages)
        cells = [layers[stage.start : stage.stop] for stage in one.stages]
        costs = [
            StageCosts(*(sum(getattr(layer, name) for layer in cell) for name in vars(layers[0]))) for cell in cells
        ]
        timeline = simulate(one.schedule, costs, send)
        assert one[2:5] == pytest.approx((timeline.step_seconds, timeline.bubble_ratio, max(timeline.peak_bytes)))
    cap = data.draw(st.sampled_from([one.peak_bytes for one in found]))
    assert best(layers, send, num_ranks, num_microbatches, cap) == [one for one in found if one.peak_bytes <= cap]


def test_every_schedule_at_every_granularity_that_divides_is_tried():
    found = {(one.name, one.num_virtual) for one in best([UNIT] * 13, 0.0, 2, 2)}
    everywhere = {(name, v) for name in ("gpipe", "fast_forward", "zero_bubble") for v in (1, 2, 3, 6)}
    assert found == everywhere | {("one_f_one_b", 1), ("zbv", 2)} | {("interleaved", v) for v in (2, 3, 6)}


def test_a_slow_link_makes_stages_large():
    layers = [UNIT] * 16
    fast, slow = (best(layers, send, 4, 4)[0] for send in (0.0, 20.0))
    assert (fast.num_virtual, slow.num_virtual) == (4, 1)


def test_only_links_between_ranks_count():
    def step(sends):
        [found] = [one for one in best([UNIT] * 4, sends, 2, 1) if (one.name, one.num_virtual) == ("gpipe", 1)]
        return found.step_seconds

    assert step([5.0, 0.0, 5.0]) == step(0.0)
    assert step([0.0, 7.0, 0.0]) == step(0.0) + 2 * 7.0  # there and back


def test_less_memory_takes_more_time():
    layers = [StageCosts(1.0, 1.0, 1.0, 10, 30)] * 8  # much is kept for weight gradients that wait
    everything = best(layers, 0.0, 2, 8)
    peaks = sorted({one.peak_bytes for one in everything})
    steps = [best(layers, 0.0, 2, 8, cap)[0].step_seconds for cap in peaks]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]
    assert best(layers, 0.0, 2, 8, peaks[0] - 1) == []


def test_every_rank_finds_the_same():
    layers = [StageCosts(1.0 + i % 3, 2.0, 1.0) for i in range(9)]
    assert best(layers, 0.25, 3, 4) == best(list(layers), [0.25] * 8, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([UNIT] * 2, 0.0, 3, 1), "num_ranks is 3; expected 1 to 2, the number of layers"),
        (([UNIT] * 2, 0.0, 0, 1), "num_ranks is 0; expected 1 to 2"),
        (([UNIT] * 2, [0.0, 0.0], 1, 1), "one for each of the 1 borders"),
        (([UNIT] * 2, 0.0, 1, 0), "num_microbatches is 0; expected"),
        (([UNIT] * 2, 0.0, 1, 1, -1), "memory_cap_bytes is -1; expected at least 0, or None"),
        (([UNIT] * 2, -1.0, 2, 1), "send_seconds is .*; expected finite numbers, at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        best(*arguments)
