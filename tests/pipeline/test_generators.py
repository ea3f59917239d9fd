"""Schedules that are known: how long their steps are, what they hold in memory, where their stages are."""

from __future__ import annotations

import doctest
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.pipeline import generators as generators_module
from lightning_gpufeed.pipeline.draw import draw
from lightning_gpufeed.pipeline.generators import fast_forward, gpipe, interleaved, one_f_one_b, zbv, zero_bubble
from lightning_gpufeed.pipeline.simulate import StageCosts, simulate
from tests.pipeline.cases import FILLED, GIVEN, NAMES, UNIT, is_without_pause, made, of_rank, shapes, spans_of_ranks

# Seconds of F, I and W of a rank. A weight gradient as long as the others, shorter and longer than both or one of them.
COSTS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (3, 4, 2), (10, 11, 9), (1, 2, 2), (1, 1, 2), (1, 2, 3), (10, 5, 7)]
ROOM = [(1, 1), (2, 2), (4, 4), (4, 8), (5, 7), (8, 16)]
"""Ranks and microbatches: at least as many of these."""


def longer(schedule, costs):
    """How much longer a step is than the work of a rank."""
    timeline = simulate(schedule, costs)
    return pytest.approx(timeline.step_seconds - timeline.ideal_seconds)


def test_the_examples_run():
    assert doctest.testmod(generators_module).failed == 0


def test_the_drawing_in_the_head_is_what_is_made():
    rows = [
        row
        for name in ("gpipe", "one_f_one_b", "fast_forward", "zero_bubble")
        for row in draw(made(name, 2, 3)).split("\n")
    ]
    drawn = [line[20:] for line in generators_module.__doc__.split("\n") if line.startswith("    ")]
    assert [line.split("   ")[0].rstrip() for line in drawn] == [row.removeprefix(row[:8]) for row in rows]


@given(st.sampled_from(NAMES), shapes(most=1200))
@settings(max_examples=40)
def test_a_stage_takes_its_microbatches_in_order_so_that_sums_stay_bitwise_equal(name, shape):
    schedule = made(name, *shape)
    seen = {}
    for actions in schedule.ranks:
        for stage, kind, microbatch in actions:
            assert microbatch == seen.get((stage, kind), -1) + 1
            seen[stage, kind] = microbatch
    assert set(seen.values()) == {schedule.num_microbatches - 1}


@given(st.sampled_from(NAMES), shapes(most=1200))
@settings(max_examples=30)
def test_a_rank_has_as_many_stages_as_asked_for(name, shape):
    schedule = made(name, *shape)
    assert schedule.num_ranks == shape[0]
    assert [schedule.stage_to_rank.count(rank) for rank in range(shape[0])] == [schedule.num_virtual] * shape[0]


@pytest.mark.parametrize(("forward", "input_grad", "weight_grad"), COSTS)
def test_steps_are_longer_than_the_work_by_what_is_known(forward, input_grad, weight_grad):
    for (num_ranks, num_microbatches), num_virtual in itertools.product(ROOM, (1, 2, 4)):
        costs = of_rank(forward, input_grad, weight_grad, num_virtual)
        shape, hops = (num_ranks, num_microbatches, num_virtual), (num_ranks - 1) / num_virtual
        whole = forward + input_grad + weight_grad
        assert longer(gpipe(*shape), costs) == hops * whole, shape
        assert longer(interleaved(*shape), costs) == hops * whole, shape
        assert longer(fast_forward(*shape, costs=costs), costs) == hops * (forward + input_grad), shape
        linear = fast_forward(*shape, placement="linear", costs=costs)
        assert longer(linear, costs) == (num_ranks - 1) * (forward + input_grad), shape
        if num_microbatches % num_ranks == 0:
            held_up = max(forward, input_grad, forward + input_grad - weight_grad)
            assert longer(zero_bubble(*shape, costs=costs), costs) == hops * held_up, shape
            if num_virtual == 2:
                assert longer(zbv(*shape, costs=costs), costs) == hops * max(forward, input_grad), shape


# Speed-ups over GPipe, with F = I = W, of fast-forwarding with 1, 2 and 4 stages on a rank.
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "gains"),
    [(4, 4, [1.17, 1.40, 1.56]), (8, 8, [1.18, 1.45, 1.64]), (8, 16, [1.11, 1.25, 1.34])],
)
def test_fast_forwarding_gains_what_is_known(num_ranks, num_microbatches, gains):
    usual = simulate(gpipe(num_ranks, num_microbatches), UNIT).step_seconds
    for num_virtual, gain in zip((1, 2, 4), gains, strict=True):
        costs = of_rank(1, 1, 1, num_virtual)
        step = simulate(fast_forward(num_ranks, num_microbatches, num_virtual, costs=costs), costs).step_seconds
        assert round(usual / step, 2) == gain


@pytest.mark.parametrize("num_virtual", [1, 2, 3])
def test_ranks_hold_as_many_activations_as_is_known(num_virtual):
    for num_ranks, num_microbatches in [(1, 1), (2, 8), (4, 4), (4, 16), (5, 20)]:
        shape = (num_ranks, num_microbatches, num_virtual)
        all_of_them = (num_virtual * num_microbatches,) * num_ranks
        assert simulate(gpipe(*shape), UNIT).peak_activations == all_of_them
        assert simulate(fast_forward(*shape), UNIT).peak_activations == all_of_them
        ahead = [num_ranks - 1 - rank for rank in range(num_ranks)]
        if num_virtual == 1:
            assert list(simulate(one_f_one_b(*shape), UNIT).peak_activations) == [1 + more for more in ahead]
        else:
            most = [min(all_of_them[0], (num_virtual - 1) * num_ranks + 1 + 2 * more) for more in ahead]
            assert list(simulate(interleaved(*shape), UNIT).peak_activations) == most


@given(st.sampled_from(["zero_bubble", "zbv"]), shapes(most=200), st.sampled_from(COSTS))
@settings(max_examples=40)
def test_no_rank_of_zero_bubble_holds_more_than_the_first_of_1f1b(name, shape, seconds):
    num_ranks, num_groups, num_virtual = shape
    num_microbatches = num_ranks * num_groups
    costs = StageCosts(*map(float, seconds))
    schedule = made(name, num_ranks, num_microbatches, num_virtual, costs)
    most = simulate(one_f_one_b(num_ranks, num_microbatches), UNIT).peak_activations[0]
    assert max(simulate(schedule, costs).peak_activations) <= schedule.num_virtual * most


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 3), (4, 7), (4, 8), (8, 32)])
def test_along_a_v_no_rank_waits_between_its_first_and_last_action(num_ranks, num_microbatches):
    timeline = simulate(zbv(num_ranks, num_microbatches), UNIT)
    assert all(map(is_without_pause, spans_of_ranks(timeline)))


@given(shapes(most=400), st.sampled_from(COSTS), st.sampled_from([0.0, 0.5, 2.0]))
@settings(max_examples=40)
def test_fast_forwarding_is_never_slower_than_gpipe(shape, seconds, send):
    costs = StageCosts(*map(float, seconds))
    usual = simulate(gpipe(*shape), costs, send).step_seconds
    assert simulate(fast_forward(*shape, costs=costs, send_seconds=send), costs, send).step_seconds <= usual + 1e-9


@given(st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=40)
def test_a_stage_other_than_the_last_lets_one_weight_gradient_wait_at_most(num_ranks, num_microbatches):
    schedule = fast_forward(num_ranks, num_microbatches, 2)
    for actions in schedule.ranks:
        waiting = {}
        for stage, kind, _ in actions:
            waiting[stage] = waiting.get(stage, 0) + (kind == "I") - (kind == "W")
            assert waiting[stage] <= (num_microbatches if stage == schedule.num_stages - 1 else 1)


def test_the_last_stage_sends_every_input_gradient_before_its_first_weight_gradient():
    last = fast_forward(4, 6).ranks[-1]
    assert " ".join(map(str, last)) == ("3F0 3F1 3F2 3F3 3F4 3F5 3I0 3I1 3I2 3I3 3I4 3I5 3W0 3W1 3W2 3W3 3W4 3W5")


def test_stages_are_placed_as_they_are_called():
    assert fast_forward(3, 1, 2).stage_to_rank == (0, 1, 2, 0, 1, 2)
    assert fast_forward(3, 1, 2, placement="linear").stage_to_rank == (0, 0, 1, 1, 2, 2)
    assert zbv(3, 1).stage_to_rank == (0, 1, 2, 2, 1, 0)
    assert interleaved(3, 1, 2).stage_to_rank == zero_bubble(3, 1, 2).stage_to_rank == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1), "num_ranks is 0; expected a whole number, at least 1"),
        ((1, 0), "num_microbatches is 0; expected a whole number, at least 1"),
        ((2.0, 1), r"num_ranks is 2\.0; expected"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(name, shape, message):
    with pytest.raises(ValueError, match=message):
        made(name, *shape)


def test_stages_on_a_rank_that_do_not_fit_are_refused():
    for make in (gpipe, interleaved, fast_forward, zero_bubble):
        with pytest.raises(ValueError, match="num_virtual is 0; expected a whole number, at least 1"):
            make(2, 2, 0)
    with pytest.raises(ValueError, match=r"num_virtual is 2; expected 1 for 1F1B\. Use interleaved"):
        one_f_one_b(2, 2, 2)
    with pytest.raises(ValueError, match=r"num_virtual is 3; expected 2, one for each side of a V\. Use zero_bubble"):
        zbv(2, 2, 3)


def test_a_placement_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="placement is 'random'; expected 'modulo' or 'linear'"):
        fast_forward(2, 2, placement="random")


@pytest.mark.parametrize("name", FILLED)
def test_costs_of_another_number_of_stages_are_refused(name):
    with pytest.raises(ValueError, match="costs of 3 stages; expected"):
        made(name, 2, 2, 2, costs=[UNIT] * 3)


def test_every_public_function_is_tested_here():
    assert {*GIVEN, *FILLED} - {"fast_forward_linear"} == set(generators_module.__all__)
