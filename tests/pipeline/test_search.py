"""What is best: within the cap, sorted, over stages of about equal time, the same on every rank."""

from __future__ import annotations

import doctest
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.pipeline import search as search_module
from lightning_gpufeed.pipeline.generators import fast_forward, gpipe, zbv
from lightning_gpufeed.pipeline.search import (
    allowed,
    balanced,
    best,
    cuts,
    dealt_out,
    fastest,
    granularities,
    placement,
)
from lightning_gpufeed.pipeline.simulate import Send, StageCosts, each_send, simulate
from lightning_gpufeed.pipeline.validate import validate
from tests.pipeline.cases import UNIT, made, stage_costs

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


# Stages that are dealt out ---------------------------------------------------------------------------------


@st.composite
def dealt(draw):
    """Seconds of layers, the rank of each stage, and how many microbatches."""
    name, num_ranks = draw(st.sampled_from(["fast_forward", "zbv"])), draw(st.integers(1, 4))
    ranks = placement(name, num_ranks, 2 if name == "zbv" else draw(st.integers(1, 3)))
    seconds = draw(st.lists(st.integers(0, 9).map(float), min_size=len(ranks), max_size=len(ranks) + 8))
    return seconds, ranks, draw(st.sampled_from([1, 2, 4, 16]))


def seconds_of(layer_seconds, stages):
    """Of each stage."""
    return [sum(layer_seconds[stage.start : stage.stop]) for stage in stages]


def busiest(layer_seconds, stages, ranks):
    """What the rank with most to do has to do for a microbatch."""
    loads = [0.0] * (max(ranks) + 1)
    for rank, seconds in zip(ranks, seconds_of(layer_seconds, stages), strict=True):
        loads[rank] += seconds
    return max(loads)


def about(layer_seconds, stages, ranks, num_microbatches):
    """About what a step takes."""
    longest = max(seconds_of(layer_seconds, stages))
    return num_microbatches * busiest(layer_seconds, stages, ranks) + max(ranks) * longest


@given(dealt())
def test_a_cut_for_ranks_never_gives_the_busiest_one_more_than_balanced_stages_do(case):
    seconds, ranks, num_microbatches = case
    stages, equal = dealt_out(*case), balanced(seconds, len(ranks))
    assert [layer for stage in stages for layer in stage] == list(range(len(seconds)))
    assert len(stages) == len(ranks)
    assert all(stages)
    rounding = 1e-9  # times are rounded to 2**-40 of the longest
    assert busiest(seconds, stages, ranks) <= busiest(seconds, equal, ranks) + rounding
    assert about(seconds, stages, ranks, num_microbatches) <= about(seconds, equal, ranks, num_microbatches) + rounding


@given(dealt())
def test_a_cut_for_ranks_is_not_made_better_by_a_layer_more_or_less_in_any_stage(case):
    seconds, ranks, num_microbatches = case
    stages = dealt_out(*case)
    bounds = [0, *(stage.stop for stage in stages)]
    reached = about(seconds, stages, ranks, num_microbatches)
    for first in range(1, len(stages)):
        for last in range(first, len(stages)):
            for step in (1, -1):
                moved = [bound + step * (first <= i <= last) for i, bound in enumerate(bounds)]
                other = [range(a, b) for a, b in pairwise(moved)]
                if all(other):
                    assert about(seconds, other, ranks, num_microbatches) >= reached - 1e-9  # rounding, as above


@given(dealt())
@unhurried
def test_with_one_stage_on_each_rank_or_one_rank_stages_are_balanced(case):
    seconds, ranks, num_microbatches = case
    for placed in (tuple(range(len(ranks))), (0,) * len(ranks)):
        assert dealt_out(seconds, placed, num_microbatches) == balanced(seconds, len(ranks))


@pytest.mark.parametrize(
    ("seconds", "name", "before", "after"),
    [
        ([1.0, 2.0, 1.0, 1.0, 1.0], "fast_forward", 4.0, 3.0),
        ([1.0, 1.0, 2.0, 3.0, 1.0], "fast_forward", 5.0, 4.0),
        ([1.0, 1.0, 1.0, 1.0, 3.0, 1.0], "zbv", 5.0, 4.0),
    ],
)
def test_the_busiest_rank_counts_and_not_only_the_longest_stage(seconds, name, before, after):
    ranks = placement(name, 2, 2)
    assert busiest(seconds, balanced(seconds, 4), ranks) == before
    assert busiest(seconds, dealt_out(seconds, ranks, 8), ranks) == after


@pytest.mark.parametrize(("num_layers", "num_ranks", "num_virtual"), [(24, 8, 2), (13, 2, 3), (10, 4, 2), (96, 8, 12)])
def test_equal_layers_are_dealt_out_so_that_ranks_differ_by_one_at_most(num_layers, num_ranks, num_virtual):
    ranks = placement("fast_forward", num_ranks, num_virtual)
    assert busiest([1.0] * num_layers, dealt_out([1.0] * num_layers, ranks, 8), ranks) == -(-num_layers // num_ranks)


def test_a_cut_that_is_the_same_by_both_ways_is_tried_once():
    ranks = placement("gpipe", 2, 2)
    assert cuts([1.0] * 8, ranks, 4) == [balanced([1.0] * 8, 4)]
    uneven = [1.0, 2.0, 1.0, 1.0, 1.0]
    assert cuts(uneven, ranks, 8) == [dealt_out(uneven, ranks, 8), balanced(uneven, 4)]


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "fast_forward", "zero_bubble", "zbv"])
def test_stages_are_placed_as_the_schedule_has_them(name):
    assert made(name, 3, 4, 2).stage_to_rank == placement(name, 3, 2)


@given(st.lists(stage_costs, min_size=4, max_size=9), st.sampled_from([gpipe, fast_forward, zbv]), st.integers(1, 8))
@unhurried
def test_of_several_cuts_the_one_with_the_shortest_step_is_taken(layers, make, num_microbatches):
    sends = each_send(0.5, len(layers) - 1)
    tried = [
        tuple(range(a, b) for a, b in pairwise((0, *inner, len(layers))))
        for inner in combinations(range(1, len(layers)), 3)
    ]
    alone = [fastest(make, layers, sends, [stages], 2, num_microbatches).step_seconds for stages in tried]
    assert fastest(make, layers, sends, tried, 2, num_microbatches).step_seconds == min(alone)


def test_without_a_cut_there_is_no_candidate():
    with pytest.raises(ValueError, match="There are no cuts; expected at least one"):
        fastest(gpipe, [UNIT] * 4, each_send(0.0, 3), [], 2, 4)


# Schedules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "expected"),
    [
        (8, 8, [1]),
        (15, 8, [1]),
        (24, 8, [1, 2, 3]),
        (40, 8, [1, 2, 3, 4, 5]),
        (48, 8, [1, 2, 3, 4, 6]),
        (56, 8, [1, 2, 3, 4, 7]),
        (96, 8, [1, 2, 3, 4, 6, 12]),
        (26, 2, [1, 2, 3, 4, 13]),
        (96, 4, [1, 2, 3, 4, 6, 8, 12, 24]),
    ],
)
def test_tried_are_all_numbers_of_stages_that_divide_and_some_that_do_not(num_layers, num_ranks, expected):
    assert granularities(num_layers, num_ranks) == expected


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


def test_every_schedule_at_every_granularity_is_tried_once():
    found = [(one.name, one.num_virtual) for one in best([UNIT] * 13, 0.0, 2, 2)]
    every = {(make.__name__, v) for v in granularities(13, 2) for make in allowed(v)}
    assert sorted(found) == sorted(every)
    everywhere = {(name, v) for name in ("gpipe", "fast_forward", "zero_bubble") for v in (1, 2, 3, 4, 6)}
    assert every == everywhere | {("one_f_one_b", 1), ("zbv", 2)} | {("interleaved", v) for v in (2, 3, 4, 6)}


def test_a_granularity_that_does_not_divide_may_be_the_best():
    found = best([UNIT] * 12, Send(0.5, 1.5), 4, 8)  # three layers on a rank, as stages of one and two
    assert found[0].num_virtual == 2
    assert {len(stage) for stage in found[0].stages} == {1, 2}


def test_no_schedule_is_slower_than_over_balanced_stages():
    layers = [StageCosts(*[0.5 + i * 7 % 5] * 3) for i in range(20)]
    sends = each_send(0.25, 19)
    seconds = [layer.compute_seconds for layer in layers]
    for one in best(layers, 0.25, 4, 4):
        [make] = [make for make in allowed(one.num_virtual) if make.__name__ == one.name]
        stages = balanced(seconds, 4 * one.num_virtual)
        assert one.step_seconds <= fastest(make, layers, sends, [stages], 4, 4).step_seconds


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
