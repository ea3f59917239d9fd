"""What is chosen: allowed, within the cap, as fast as any, and nothing finer than what pays."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline import choose as choose_module
from lightning_gpufeed.pipeline.choose import SCHEDULES, choose
from lightning_gpufeed.pipeline.link import Link
from lightning_gpufeed.pipeline.measure import MeasuredLayers
from lightning_gpufeed.pipeline.search import best
from lightning_gpufeed.pipeline.simulate import StageCosts, simulate
from lightning_gpufeed.pipeline.validate import validate
from tests.pipeline.cases import UNIT, stage_costs

unhurried = settings(max_examples=30)
NAMED = [name for name in SCHEDULES if name != "auto"]
FREE = Link(0.0, 0.0)
SLACK = 1.06  # 5 % for layers that count as equal, 1 % for steps that do


def layers_of(costs, sent_bytes=1):
    return MeasuredLayers(tuple(costs), (sent_bytes,) * len(costs))


def equal(num_layers, sent_bytes=1):
    return layers_of([UNIT] * num_layers, sent_bytes)


def disturbed(costs, errors):
    """Costs as measured with some relative errors of each time."""
    return [
        StageCosts(
            cost.forward_seconds * (1 + f),
            cost.input_grad_seconds * (1 + i),
            cost.weight_grad_seconds * (1 + w),
            cost.activation_bytes,
            cost.deferred_bytes,
        )
        for cost, (f, i, w) in zip(costs, errors, strict=True)
    ]


def step_of(candidate, costs, send_seconds):
    """The step of what was chosen, if layers take these costs and a message so many seconds."""
    stages = [costs[stage.start : stage.stop] for stage in candidate.stages]
    together = [StageCosts(*(sum(getattr(one, name) for one in stage) for name in vars(UNIT))) for stage in stages]
    return simulate(candidate.schedule, together, send_seconds).step_seconds


def name_of(schedule):
    return {"1f1b": "one_f_one_b"}.get(schedule, schedule)


def test_the_examples_run():
    assert doctest.testmod(choose_module).failed == 0


@given(
    st.lists(stage_costs, min_size=2, max_size=13),
    st.sampled_from(SCHEDULES),
    st.one_of(st.just("auto"), st.integers(1, 5)),
    st.data(),
)
@unhurried
def test_what_is_chosen_can_be_carried_out_by_the_model_it_was_chosen_for(costs, schedule, layers_per_stage, data):
    num_ranks = data.draw(st.integers(1, min(4, len(costs))))
    num_microbatches = data.draw(st.integers(1, 6))
    try:
        found = choose(layers_of(costs), Link(0.5, 0.0), num_ranks, num_microbatches, schedule, layers_per_stage)
    except (ScheduleError, ValueError):
        assume(False)
    validate(found.schedule)
    assert [layer for stage in found.stages for layer in stage] == list(range(len(costs)))
    assert all(found.stages)
    assert len(found.stages) == found.schedule.num_stages == num_ranks * found.num_virtual
    assert (found.schedule.num_ranks, found.schedule.num_microbatches) == (num_ranks, num_microbatches)
    assert schedule == "auto" or found.name == name_of(schedule)


@given(
    st.lists(st.sampled_from([StageCosts(1.0, 1.0, 1.0), StageCosts(2.0, 3.0, 1.0)]), min_size=4, max_size=12),
    st.sampled_from([0.0, 0.25, 3.0]),
    st.integers(1, 8),
)
@unhurried
def test_auto_is_as_fast_as_all_that_search_finds_but_for_a_hundredth(costs, send_seconds, num_microbatches):
    found = choose(layers_of(costs), Link(send_seconds, 0.0), 2, num_microbatches, "auto")
    every = best(costs, send_seconds, 2, num_microbatches)
    equally_fast = [one for one in every if one.step_seconds <= every[0].step_seconds * 1.01]
    assert found in equally_fast
    fewest = min(one.num_virtual for one in equally_fast)
    assert found.num_virtual == fewest
    assert found.peak_bytes == min(one.peak_bytes for one in equally_fast if one.num_virtual == fewest)


@pytest.mark.parametrize("schedule", ["fast_forward", "gpipe", "interleaved", "zero_bubble"])
def test_a_schedule_by_its_name_is_tried_at_each_granularity(schedule):
    fast, slow = (choose(equal(16), Link(send, 0.0), 4, 4, schedule) for send in (0.0, 20.0))
    assert {fast.name, slow.name} == {schedule}
    assert fast.num_virtual > 1
    assert slow.num_virtual == 1


@pytest.mark.parametrize(("schedule", "num_virtual"), [("1f1b", 1), ("zbv", 2)])
def test_a_schedule_with_one_granularity_has_that(schedule, num_virtual):
    found = choose(equal(14), FREE, 2, 4, schedule)  # seven layers on a rank are no multiple of two
    assert (found.name, found.num_virtual) == (name_of(schedule), num_virtual)


def test_what_is_sent_counts():
    small, large = (choose(equal(16, size), Link(0.0, 1e-3), 4, 4, "fast_forward") for size in (1, 10_000))
    assert small.num_virtual > large.num_virtual
    assert small.step_seconds < large.step_seconds


def test_only_what_is_sent_between_ranks_counts():
    def step(*sent_bytes):
        return choose(MeasuredLayers((UNIT,) * 4, sent_bytes), Link(0.0, 1.0), 2, 1, "gpipe", 2).step_seconds

    assert step(5, 0, 5, 5) == step(0, 0, 0, 0)
    assert step(0, 7, 0, 0) == step(0, 0, 0, 0) + 2 * 7.0  # there and back


# Layers per stage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "layers_per_stage", "sizes"),
    [
        (8, 2, 1, [1] * 8),
        (8, 2, 2, [2] * 4),
        (8, 2, 4, [4] * 2),
        (12, 2, 3, [3] * 4),
        (9, 2, 2, [2, 2, 2, 3]),  # 9 / 4 is nearest to 2 stages on a rank
        (11, 2, 2, [1, 2, 2, 2, 2, 2]),
        (8, 2, 100, [4] * 2),  # at least one stage on each
        (7, 4, 1, [1, 2, 2, 2]),  # two on each would be more than there are layers
    ],
)
def test_stages_have_as_many_layers_as_asked_for_or_about_so_many(num_layers, num_ranks, layers_per_stage, sizes):
    found = choose(equal(num_layers), FREE, num_ranks, 4, "fast_forward", layers_per_stage)
    assert sorted(map(len, found.stages)) == sizes
    assert found.num_virtual == len(sizes) // num_ranks
    assert found.schedule.stage_to_rank == tuple(stage % num_ranks for stage in range(len(sizes)))


def test_stages_of_exactly_so_many_layers_are_not_balanced_and_others_are():
    costs = [StageCosts(9.0, 9.0, 9.0), *[UNIT] * 7]
    assert [len(stage) for stage in choose(layers_of(costs), FREE, 2, 4, "gpipe", 4).stages] == [4, 4]
    assert [len(stage) for stage in choose(layers_of(costs), FREE, 2, 4, "gpipe", 3).stages] == [1, 7]


def test_auto_with_a_granularity_tries_every_schedule_at_that():
    found = choose(equal(16), FREE, 4, 8, "auto", 2)
    assert found.num_virtual == 2
    steps = [choose(equal(16), FREE, 4, 8, name, 2).step_seconds for name in NAMED if name != "1f1b"]
    assert min(steps) <= found.step_seconds <= min(steps) * 1.01
    assert choose(equal(16), FREE, 4, 8, "auto", 4).num_virtual == 1


# Errors of measurement -------------------------------------------------------------------------------------

errors = st.floats(-0.02, 0.02)


@given(st.data(), st.sampled_from(["auto", "fast_forward", "zero_bubble"]), st.sampled_from([0.0, 0.25, 3.0]))
@unhurried
def test_errors_of_two_percent_do_not_change_how_equal_layers_are_cut(data, schedule, send_seconds):
    num_ranks = data.draw(st.integers(1, 4))
    num_layers = num_ranks * data.draw(st.sampled_from([1, 2, 4, 8]))
    num_microbatches = data.draw(st.integers(1, 12))
    measured = disturbed(
        [UNIT] * num_layers, data.draw(st.lists(st.tuples(errors, errors, errors), **exactly(num_layers)))
    )
    exact, found = (
        choose(layers_of(costs), Link(send_seconds, 0.0), num_ranks, num_microbatches, schedule)
        for costs in ([UNIT] * num_layers, measured)
    )
    # Errors of all layers to one side are no errors of one: they may move a choice that is close.
    steps = [step_of(one, [UNIT] * num_layers, send_seconds) for one in (exact, found)]
    low, rest = divmod(num_layers, len(found.stages))
    assert {len(stage) for stage in found.stages} == ({low, low + 1} if rest else {low})
    of_ranks = [0] * num_ranks
    for rank, stage in zip(found.schedule.stage_to_rank, found.stages, strict=True):
        of_ranks[rank] += len(stage)
    assert set(of_ranks) == {num_layers // num_ranks}
    assert steps[1] <= steps[0] * SLACK
    assert found.num_virtual <= exact.num_virtual or steps[1] < steps[0] * 1.01


def exactly(number):
    return {"min_size": number, "max_size": number}


@pytest.mark.parametrize("schedule", ["auto", "fast_forward", "gpipe", "zero_bubble"])
@given(st.lists(st.tuples(errors, errors, errors), **exactly(16)))
@unhurried
def test_where_nothing_is_won_there_is_one_stage_on_a_rank_whatever_the_errors(schedule, errors):
    measured = layers_of(disturbed([UNIT] * 16, errors))
    assert choose(measured, FREE, 1, 4, schedule).num_virtual == 1  # one rank waits for nobody
    assert choose(measured, Link(100.0, 0.0), 2, 4, schedule).num_virtual == 1


@given(st.lists(stage_costs, min_size=2, max_size=10), st.data())
@unhurried
def test_errors_cost_no_more_than_what_counts_as_equal(costs, data):
    given = data.draw(st.lists(st.tuples(errors, errors, errors), **exactly(len(costs))))
    exact, found = (choose(layers_of(these), FREE, 2, 4, "auto") for these in (costs, disturbed(costs, given)))
    assert step_of(found, costs, 0.0) <= step_of(exact, costs, 0.0) * SLACK * 1.04 + 1e-9  # the errors themselves


@pytest.mark.parametrize(
    ("first", "second", "sizes"),
    [(1.02, 0.98, [32, 32]), (1.0, 1.1, [33, 31])],
    ids=["errors", "differences"],
)
def test_stages_are_cut_by_differences_of_layers_and_not_by_errors(first, second, sizes):
    costs = [StageCosts(factor, factor, factor) for factor in [first] * 32 + [second] * 32]
    found = choose(layers_of(costs), FREE, 2, 4, "1f1b")
    assert list(map(len, found.stages)) == sizes
    alone = choose(layers_of(costs), FREE, 1, 1, "1f1b")
    assert alone.step_seconds == pytest.approx(sum(cost.compute_seconds for cost in costs))


# Memory ----------------------------------------------------------------------------------------------------


@given(st.lists(st.builds(StageCosts, activation_bytes=st.integers(1, 9)), min_size=4, max_size=9), st.data())
@unhurried
def test_what_is_chosen_keeps_within_the_cap(costs, data):
    every = best(costs, 0.0, 2, 4)
    cap = data.draw(st.sampled_from([one.peak_bytes for one in every]))
    found = choose(layers_of(costs), FREE, 2, 4, "auto", memory_cap_bytes=cap)
    assert found.peak_bytes <= cap
    assert found.step_seconds <= 1.01 * min(one.step_seconds for one in every if one.peak_bytes <= cap)


def test_a_cap_that_nothing_keeps_is_an_error_with_the_least_that_is_possible():
    costs = layers_of([StageCosts(1.0, 1.0, 1.0, 100, 100)] * 8)
    least = min(one.peak_bytes for one in best(costs.costs, 0.0, 2, 8))
    own = choose(costs, FREE, 2, 8, "gpipe").peak_bytes
    with pytest.raises(ScheduleError, match=f"memory_cap_bytes is 3; expected at least {least} for activations"):
        choose(costs, FREE, 2, 8, "auto", memory_cap_bytes=3)
    with pytest.raises(ScheduleError, match=f"at least {own} .* gpipe with .* needs {least}. Raise the cap, use small"):
        choose(costs, FREE, 2, 8, "gpipe", memory_cap_bytes=own - 1)
    assert choose(costs, FREE, 2, 8, "auto", memory_cap_bytes=least).peak_bytes == least


# What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_model_with_too_few_layers_is_an_error_that_names_them(schedule):
    least = 8 if schedule == "zbv" else 4
    with pytest.raises(ScheduleError, match=f"has {least - 1} layers; expected at least {least} for {schedule} on 4"):
        choose(equal(least - 1), FREE, 4, 2, schedule)
    assert choose(equal(least), FREE, 4, 2, schedule).schedule.num_ranks == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, "gpipe"), "num_ranks is 0; expected"),
        ((2, 0, "gpipe"), "num_microbatches is 0; expected"),
        ((2, 1, "fast"), "schedule is 'fast'; expected one of 'fast_forward', 'gpipe', '1f1b'"),
        ((2, 1, "gpipe", 0), "layers_per_stage is 0; expected a whole number, at least 1, or 'auto'"),
        ((2, 1, "gpipe", "all"), "layers_per_stage is 'all'; expected"),
        ((2, 1, "gpipe", True), "layers_per_stage is True; expected"),
        ((2, 1, "gpipe", "auto", -1), "memory_cap_bytes is -1; expected"),
        ((2, 1, "1f1b", 1), "is 1: of 8 layers that makes 4 stages on each of 2 ranks; expected 1 for 1f1b"),
        ((2, 1, "zbv", 4), "is 4: of 8 layers that makes 1 stage on each of 2 ranks; expected 2 for zbv"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose(equal(8), FREE, *arguments)
