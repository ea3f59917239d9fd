"""What a step takes, against a plain longest path, and what is in memory."""

from __future__ import annotations

import doctest
import functools
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline import simulate as simulate_module
from lightning_gpufeed.pipeline.action import Action
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.simulate import Clock, Send, StageCosts, each_send, simulate
from tests.pipeline.cases import UNIT, made, schedules_with_costs, spans_of_ranks

few = settings(max_examples=30)
TWO = Schedule.parse("2 microbatches; stages on ranks 0 1\n0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1B0 1F1 1B1")


def border_of(schedule, action):
    """Over which border between stages on two ranks the result of an action goes; None if it stays where it is."""
    low = action.stage - (action.kind != "F")
    if action.kind == "W" or not 0 <= low < schedule.num_stages - 1:
        return None
    return low if schedule.stage_to_rank[low] != schedule.stage_to_rank[low + 1] else None


def sending(schedule):
    """Of each rank the actions after which it sends something."""
    return [[one for one in of_rank if border_of(schedule, one) is not None] for of_rank in schedule.ranks]


def longest_path(schedule, costs, sends):
    """When each action ends, by the definition: recursion over what it needs and what is before it on its rank."""
    message_before = {after: one for of_rank in sending(schedule) for one, after in pairwise(of_rank)}
    before = {after: one for actions in schedule.ranks for one, after in pairwise(actions)}
    actions = {part: one for of_rank in schedule.ranks for one in of_rank for part in one.parts}
    seconds = {
        "F": lambda one: one.forward_seconds,
        "I": lambda one: one.input_grad_seconds,
        "W": lambda one: one.weight_grad_seconds,
    }

    def arrival(needed, stage):
        border = None if needed.stage == stage else border_of(schedule, actions[needed])
        if border is None:
            return end(actions[needed])
        return left(actions[needed]) + sends[border].latency_seconds

    @functools.cache
    def left(action):
        """When the message after an action is through the link of its rank."""
        link_seconds = sends[border_of(schedule, action)].link_seconds
        if not link_seconds:
            return end(action)
        earlier, others = message_before.get(action), 0.0
        while earlier and not sends[border_of(schedule, earlier)].link_seconds:
            earlier = message_before.get(earlier)
        if earlier:
            others = left(earlier)
        return max(end(action), others) + link_seconds

    @functools.cache
    def end(action):
        begin = [end(before[action])] if action in before else [0.0]
        begin += [arrival(needed, action.stage) for needed in action.needs(schedule.num_stages)]
        return max(begin) + sum(seconds[part.kind](costs[action.stage]) for part in action.parts)

    return {action: end(action) for actions in schedule.ranks for action in actions}


def test_the_examples_run():
    assert doctest.testmod(simulate_module).failed == 0


link_times = st.sampled_from([0.0, 0.5, 2.0])


@given(schedules_with_costs(most=150), st.data())
@few
def test_actions_end_where_the_longest_path_to_them_ends(case, data):
    schedule, costs, latencies = case
    takes_link = data.draw(st.lists(link_times, min_size=len(latencies), max_size=len(latencies)))
    sends = [Send(*pair) for pair in zip(latencies, takes_link, strict=True)]
    timeline = simulate(schedule, costs, sends)
    ends = longest_path(schedule, costs, sends)
    assert {span.action: span.end for span in timeline.spans} == pytest.approx(ends)
    assert timeline.step_seconds == pytest.approx(max(ends.values()))


@given(schedules_with_costs(most=200))
@few
def test_a_rank_does_one_thing_at_a_time_in_its_order(case):
    schedule, costs, sends = case
    timeline = simulate(schedule, costs, sends)
    for rank, spans in enumerate(spans_of_ranks(timeline)):
        assert tuple(span.action for span in spans) == schedule.ranks[rank]
        assert all(before.end <= after.begin for before, after in pairwise(spans))
        assert timeline.busy_seconds[rank] == pytest.approx(sum(span.end - span.begin for span in spans))


@given(schedules_with_costs(most=200))
@few
def test_no_step_is_faster_than_its_busiest_rank_or_one_microbatch(case):
    schedule, costs, sends = case
    timeline = simulate(schedule, costs, sends)
    one_microbatch = sum(one.forward_seconds + one.input_grad_seconds for one in costs)
    assert timeline.step_seconds >= max(timeline.ideal_seconds, one_microbatch) - 1e-9
    assert -1e-9 <= timeline.bubble_ratio <= 1
    idle = sum(timeline.step_seconds - busy for busy in timeline.busy_seconds)
    assert timeline.bubble_ratio * timeline.step_seconds * schedule.num_ranks == pytest.approx(idle, abs=1e-9)


@given(schedules_with_costs(most=200))
@few
def test_activations_are_counted_from_forward_to_the_last_gradient_that_needs_them(case):
    schedule, costs, _ = case
    timeline = simulate(schedule, costs)
    for rank, actions in enumerate(schedule.ranks):
        live, seen, seen_bytes = {}, [0], [0]
        for stage, kind, microbatch in actions:
            if kind == "F":
                live[stage, microbatch] = costs[stage].activation_bytes
            seen.append(len(live))
            seen_bytes.append(sum(live.values()))
            if kind == "I" and costs[stage].deferred_bytes:
                live[stage, microbatch] = costs[stage].deferred_bytes
                seen_bytes.append(sum(live.values()))
            elif kind != "F":
                live.pop((stage, microbatch), None)
        assert not live
        assert timeline.peak_activations[rank] == max(seen)
        assert timeline.peak_bytes[rank] == max(seen_bytes)


@pytest.mark.parametrize(
    ("deferred_bytes", "activations", "size"),
    [(0, 2, 20), (4, 2, 20), (10, 2, 20), (15, 2, 30)],
    ids=["gone-with-the-input-gradient", "less-waits", "all-waits", "more-waits"],
)
def test_what_waits_for_a_weight_gradient_is_counted_as_what_is_kept(deferred_bytes, activations, size):
    timeline = simulate(TWO, StageCosts(activation_bytes=10, deferred_bytes=deferred_bytes))
    assert (timeline.peak_activations[0], timeline.peak_bytes[0]) == (activations, size)
    assert (timeline.peak_activations[1], timeline.peak_bytes[1]) == (1, 10)


def test_an_activation_that_no_weight_gradient_needs_is_gone_with_the_input_gradient():
    schedule = Schedule.parse("2 microbatches; stages on ranks 0\n0F0 0I0 0F1 0I1 0W0 0W1")
    assert simulate(schedule, UNIT).peak_activations == (2,)
    assert simulate(schedule, StageCosts(deferred_bytes=0)).peak_activations == (1,)


def test_only_what_goes_to_another_rank_takes_time_on_the_way():
    schedule = made("zbv", 2, 1)
    assert simulate(schedule, UNIT, 0.5).step_seconds == simulate(schedule, UNIT).step_seconds + 4 * 0.5
    assert simulate(schedule, UNIT, [0.5, 99.0, 0.5]) == simulate(schedule, UNIT, 0.5)


# Messages --------------------------------------------------------------------------------------------------


def run(clock, *words):
    """Run actions one after the other, without pauses."""
    end = 0.0
    for word in words:
        end = clock.run(Action.parse(word), end)


def arrivals(clock, *words):
    """When what these actions need has arrived."""
    return [clock.ready_seconds(Action.parse(word)) for word in words]


@pytest.mark.parametrize(
    ("send", "expected"),
    [(Send(3.0, 0.0), [4.0, 5.0, 6.0]), (Send(0.0, 3.0), [4.0, 7.0, 10.0]), (Send(2.0, 3.0), [6.0, 9.0, 12.0])],
    ids=["latency", "link", "both"],
)
def test_messages_of_one_rank_wait_for_each_other_on_the_link_and_not_for_a_latency(send, expected):
    clock = Clock((0, 1), UNIT, send)
    run(clock, "0F0", "0F1", "0F2")
    assert arrivals(clock, "1F0", "1F1", "1F2") == expected


def test_a_link_that_is_free_again_holds_up_nothing():
    clock = Clock((0, 1), UNIT, Send(0.5, 1.0))
    run(clock, "0F0", "0F1")
    assert arrivals(clock, "1F0", "1F1") == [2.5, 3.5]


def test_messages_in_both_directions_share_the_link_of_the_rank_that_sends_them():
    clock = Clock((0, 1, 2), UNIT, [Send(0.0, 2.0), Send(0.0, 3.0)])
    run(clock, "1F0", "1B1")
    assert arrivals(clock, "2F0") == [4.0]
    clock.run(Action.parse("0F1"), 0.0)
    assert arrivals(clock, "0B1") == [6.0]  # the backward ends at 3, the link is free at 4


def test_messages_of_two_ranks_do_not_wait_for_each_other():
    clock = Clock((0, 1, 2), UNIT, Send(0.0, 3.0))
    for word in ("0F0", "1F1"):
        run(clock, word)
    assert arrivals(clock, "1F0", "2F1") == [4.0, 4.0]


def test_what_stays_on_a_rank_takes_no_link():
    clock = Clock((0, 0, 1), UNIT, Send(1.0, 3.0))
    run(clock, "0F0", "1F0")
    assert arrivals(clock, "1F0", "2F0") == [1.0, 2.0 + 3.0 + 1.0]


@given(schedules_with_costs(most=200))
@few
def test_a_number_is_a_latency(case):
    schedule, costs, latencies = case
    assert simulate(schedule, costs, [Send(one) for one in latencies]) == simulate(schedule, costs, latencies)


@given(schedules_with_costs(most=200), link_times, link_times)
@few
def test_a_queue_is_never_faster_than_none_and_never_slower_than_if_each_message_waited_for_all(case, latency, link):
    schedule, costs, _ = case
    most = max(map(len, sending(schedule)))  # messages of a rank
    step = simulate(schedule, costs, Send(latency, link)).step_seconds
    alone, last = (simulate(schedule, costs, latency + count * link).step_seconds for count in (1, most))
    assert alone - 1e-9 <= step  # sums in another order
    assert step <= max(alone, last) + 1e-9


def test_a_message_keeps_both_of_its_ranks_from_computing():
    schedule = made("gpipe", 2, 1)
    timeline = simulate(schedule, UNIT, Send(host_seconds=0.5))
    assert [(span.begin, span.end) for span in timeline.spans] == [(0.0, 1.5), (5.5, 8.0), (1.5, 3.0), (3.0, 5.5)]
    assert timeline.busy_seconds == simulate(schedule, UNIT).busy_seconds  # it is no work of the stages
    one_rank = Schedule.parse("1 microbatches; stages on ranks 0 0\n0F0 1F0 1B0 0B0")
    assert simulate(one_rank, UNIT, Send(host_seconds=0.5)) == simulate(one_rank, UNIT)


def test_an_action_takes_its_overhead_whatever_it_computes():
    parts, whole = (Schedule.parse(f"1 microbatches; stages on ranks 0\n0F0 {rest}") for rest in ("0I0 0W0", "0B0"))
    costs = StageCosts(overhead_seconds=0.25)
    assert (simulate(parts, costs).step_seconds, simulate(whole, costs).step_seconds) == (3.75, 3.5)


def test_a_message_that_waits_for_no_other_takes_latency_and_link():
    assert Send(0.25, 0.5).seconds == 0.75


def test_one_send_stands_for_all_borders():
    send = Send(0.25, 0.5)
    assert each_send(send, 3) == each_send([send] * 3, 3) == [send] * 3
    assert each_send([0.5, send], 2) == [Send(0.5, 0.0), send]
    assert each_send(1, 0) == []


def test_one_cost_stands_for_all_stages():
    assert simulate(TWO, UNIT) == simulate(TWO, [UNIT, UNIT])


def test_a_schedule_of_nothing_takes_no_time():
    timeline = simulate(Schedule((), (), 0), [])
    assert (timeline.step_seconds, timeline.ideal_seconds, timeline.bubble_ratio) == (0.0, 0.0, 0.0)


# What is refused -------------------------------------------------------------------------------------------


def test_a_schedule_that_would_hang_is_refused():
    with pytest.raises(ScheduleError, match="No rank can go on: rank 0 at 0B0 for 0F0"):
        simulate(Schedule.parse("1 microbatches; stages on ranks 0\n0B0 0F0"), UNIT)


@pytest.mark.parametrize("costs", [[], [UNIT], [UNIT] * 3])
def test_costs_of_another_model_are_refused(costs):
    with pytest.raises(ValueError, match=f"costs of {len(costs)} stages; expected 2, or one for all"):
        simulate(TWO, costs)


@pytest.mark.parametrize(
    "sends",
    [
        [],
        [0.0, 0.0],
        [-1.0],
        -1.0,
        [float("inf")],
        float("nan"),
        Send(-1.0, 0.0),
        Send(0.0, -1.0),
        [Send(0.0, float("inf"))],
        Send(0.0, 0.0, -1.0),
    ],
    ids=str,
)
def test_sends_that_do_not_fit_are_refused(sends):
    with pytest.raises(
        ValueError, match=r"send_seconds is .*; expected finite numbers, at least 0: one for each of the 1 "
    ):
        Clock((0, 1), UNIT, sends)


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
def test_costs_that_are_no_numbers_are_refused(value):
    for name in vars(UNIT):
        with pytest.raises(ValueError, match=f"{name} is {value}; expected a finite number, at least 0"):
            StageCosts(**{name: value})
