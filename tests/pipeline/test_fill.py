"""Weight gradients in the waits: nothing else moves, memory is kept, and it is never slower than without."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline import fill as fill_module
from lightning_gpufeed.pipeline.action import Action
from lightning_gpufeed.pipeline.fill import MemoryRule, fill
from lightning_gpufeed.pipeline.generators import gpipe, one_f_one_b
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.simulate import StageCosts, simulate
from lightning_gpufeed.pipeline.validate import validate
from tests.pipeline.cases import UNIT, passes

few = settings(max_examples=40)


def split(schedule):
    """Forwards and input gradients of a schedule of full backwards."""
    return [
        [Action(one.stage, "I" if one.kind == "B" else one.kind, one.microbatch) for one in actions]
        for actions in schedule.ranks
    ]


def filled(words, rule=MemoryRule(), costs=UNIT, sends=0.0):  # noqa: B008 - a value
    """Fill one stage on each rank."""
    given_actions = [[Action.parse(word) for word in line.split()] for line in words]
    count = sum(one.kind == "F" for one in given_actions[0])
    schedule = fill(given_actions, tuple(range(len(words))), count, rule, costs, sends)
    validate(schedule)
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def live_at_most(actions):
    """Most activations between forward and weight gradient, or full backward."""
    live = most = 0
    for action in actions:
        live += 1 if action.kind == "F" else -(action.kind in "WB")
        most = max(most, live)
    return most


def test_the_examples_run():
    assert doctest.testmod(fill_module).failed == 0


@st.composite
def rules_with_orders(draw):
    num_ranks, num_microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    whole = draw(st.sampled_from([gpipe, one_f_one_b]))(num_ranks, num_microbatches)
    need = max(map(live_at_most, whole.ranks))
    rule = MemoryRule(
        draw(st.none() | st.integers(need, need + 3)),
        tuple(draw(st.lists(st.none() | st.integers(1, 3), min_size=num_ranks, max_size=num_ranks))),
    )
    costs = draw(st.lists(st.builds(StageCosts, passes, passes, passes), min_size=num_ranks, max_size=num_ranks))
    return whole, rule, costs, draw(st.sampled_from([0.0, 1.5]))


@given(rules_with_orders())
@few
def test_forwards_and_input_gradients_stay_and_weight_gradients_keep_their_order(case):
    whole, rule, costs, sends = case
    schedule = fill(split(whole), whole.stage_to_rank, whole.num_microbatches, rule, costs, sends)
    validate(schedule)
    for actions, order in zip(schedule.ranks, split(whole), strict=True):
        assert [one for one in actions if one.kind != "W"] == order
        assert [one.microbatch for one in actions if one.kind == "W"] == list(range(whole.num_microbatches))


@given(rules_with_orders())
@few
def test_memory_is_kept(case):
    whole, rule, costs, sends = case
    schedule = fill(split(whole), whole.stage_to_rank, whole.num_microbatches, rule, costs, sends)
    for stage, actions in enumerate(schedule.ranks):
        if rule.max_live is not None:
            assert live_at_most(actions) <= rule.max_live
        waiting, cap = 0, rule.max_waiting[stage]
        for action in actions:
            if action.kind == "I" and cap is not None:
                assert waiting < cap
            waiting += (action.kind == "I") - (action.kind == "W")


@given(rules_with_orders())
@few
def test_without_a_rule_splitting_is_never_slower_than_full_backwards(case):
    whole, _, costs, sends = case
    schedule = fill(split(whole), whole.stage_to_rank, whole.num_microbatches, MemoryRule(), costs, sends)
    assert simulate(schedule, costs, sends).step_seconds <= simulate(whole, costs, sends).step_seconds + 1e-9


def test_a_wait_is_filled_with_what_waits_longest():
    assert filled(["0F0 0F1 0I0 0I1", "1F0 1F1 1I0 1I1"], sends=2.0) == [
        "0F0 0F1 0I0 0I1 0W0 0W1",
        "1F0 1F1 1I0 1I1 1W0 1W1",
    ]
    assert filled(["0F0 0F1 0F2 0I0 0I1 0I2", "1F0 1F1 1I0 1I1 1F2 1I2"]) == [
        "0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2",
        "1F0 1F1 1I0 1I1 1F2 1I2 1W0 1W1 1W2",
    ]


def test_an_input_gradient_that_another_rank_waits_for_comes_before_a_weight_gradient():
    assert filled(["0F0 0F1 0I0 0I1", "1F0 1F1 1I0 1I1"])[1] == "1F0 1F1 1I0 1I1 1W0 1W1"


@pytest.mark.parametrize(
    ("rule", "order"),
    [
        (MemoryRule(), "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"),
        (MemoryRule(max_live=2), "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2"),
        (MemoryRule(max_live=1), "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"),
        (MemoryRule(max_waiting=(2,)), "0F0 0I0 0F1 0I1 0F2 0W0 0I2 0W1 0W2"),
        (MemoryRule(max_waiting=(1,)), "0F0 0I0 0F1 0W0 0I1 0F2 0W1 0I2 0W2"),
    ],
)
def test_a_weight_gradient_comes_early_where_memory_asks_for_it(rule, order):
    assert filled(["0F0 0I0 0F1 0I1 0F2 0I2"], rule) == [order]


def test_a_given_order_that_would_hang_is_refused():
    with pytest.raises(ScheduleError, match="No rank can go on: rank 0 at 0I0 for 1I0, rank 1 at 1F1 for 0F1"):
        filled(["0F0 0I0 0F1 0I1", "1F0 1F1 1I0 1I1"])


def test_a_given_order_that_holds_too_much_is_refused():
    with pytest.raises(
        ScheduleError, match=r"0F1 comes while its rank holds 1 activations; expected at most 1 with it"
    ):
        filled(["0F0 0F1 0I0 0I1"], MemoryRule(max_live=1))


def test_there_may_be_nothing_to_fill():
    assert fill([], (), 0, MemoryRule(), []) == Schedule((), (), 0)
    assert fill([[]], (), 0, MemoryRule(), []) == Schedule(((),), (), 0)
