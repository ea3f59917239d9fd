"""What ranks do in a step, and which messages arrive in which order: with no schedule anybody waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.pipeline.action import Action
from lightning_gpufeed.pipeline.program import (
    Message,
    backward_program,
    forward_only,
    forward_program,
    has_phases,
    whole_program,
)
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.validate import validate
from tests.pipeline.cases import NAMES, made, shapes

kinds = st.sampled_from(NAMES)
small = shapes(most=500)


def carried_out(program):
    """Follow all ranks, each as far as it comes, sends waiting for nothing; give what was received, link by link.

    A rank takes messages from another one in the order in which they were sent, whatever it needs first.
    """
    places = [0] * len(program.ranks)
    sent: dict[tuple[int, int], list[Message]] = {}
    taken: Counter[tuple[int, int]] = Counter()
    here: list[set[Message]] = [set() for _ in program.ranks]
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, actions in enumerate(program.ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                needed = program.needs(action)
                if needed is not None:
                    link = (needed.source, rank)
                    while needed not in here[rank] and taken[link] < len(sent.get(link, ())):
                        here[rank].add(sent[link][taken[link]])
                        taken[link] += 1
                    if needed not in here[rank]:
                        break
                    here[rank].remove(needed)
                message = program.gives(action)
                if message is not None:
                    assert message.source == rank
                    sent.setdefault((rank, message.target), []).append(message)
                places[rank] += 1
                has_moved = True
    assert places == [len(actions) for actions in program.ranks], "ranks wait for each other"
    assert not any(here), "something was sent that nobody needed"
    return sent


def check(program):
    """Carried out without a wait for ever, and messages arrive as announced."""
    sent = carried_out(program)
    for rank in range(len(program.ranks)):
        assert program.arrivals(rank) == {
            source: tuple(messages) for (source, target), messages in sent.items() if target == rank
        }
    everything = [message for messages in sent.values() for message in messages]
    assert len(set(everything)) == len(everything)
    needed = {program.needs(action) for actions in program.ranks for action in actions} - {None}
    assert needed == set(everything)


@given(kinds, small)
@settings(max_examples=40)
def test_the_phases_of_every_schedule_are_carried_out_without_anybody_waiting_for_ever(name, shape):
    schedule = made(name, *shape)
    check(whole_program(schedule))
    check(forward_program(schedule))
    check(backward_program(schedule))


@given(kinds, small)
@settings(max_examples=30)
def test_two_phases_are_the_whole_and_each_keeps_its_order(name, shape):
    schedule = made(name, *shape)
    forward, backward = forward_program(schedule), backward_program(schedule)
    for actions, first, second in zip(schedule.ranks, forward.ranks, backward.ranks, strict=True):
        assert [one for one in actions if one.kind == "F"] == list(first)
        assert [one for one in actions if one.kind != "F"] == list(second)
    is_apart = all(
        first + second == actions
        for actions, first, second in zip(schedule.ranks, forward.ranks, backward.ranks, strict=True)
    )
    assert has_phases(schedule) == is_apart


@given(kinds, small, st.data())
@settings(max_examples=30)
def test_a_schedule_without_its_last_microbatches_is_valid_and_so_are_its_phases(name, shape, data):
    schedule = made(name, *shape)
    number = data.draw(st.integers(1, schedule.num_microbatches))
    ranks = tuple(tuple(one for one in actions if one.microbatch < number) for actions in schedule.ranks)
    smaller = Schedule(ranks, schedule.stage_to_rank, number)
    validate(smaller)
    check(whole_program(smaller))
    check(backward_program(smaller))


@given(kinds, small)
@settings(max_examples=30)
def test_a_forward_without_a_backward_computes_each_stage_of_each_microbatch_once(name, shape):
    schedule = made(name, *shape)
    program = forward_only(schedule.stage_to_rank, schedule.num_microbatches, schedule.num_ranks)
    check(program)
    actions = Counter(action for of_rank in program.ranks for action in of_rank)
    assert set(actions.values()) == {1}
    assert len(actions) == schedule.num_stages * schedule.num_microbatches
    for rank, of_rank in enumerate(program.ranks):
        assert all(schedule.stage_to_rank[one.stage] == rank and one.kind == "F" for one in of_rank)


@given(kinds, small)
@settings(max_examples=30)
def test_a_stage_is_complete_after_its_last_weight_gradient(name, shape):
    schedule = made(name, *shape)
    last = whole_program(schedule).last_of_stage
    assert sorted(action.stage for action in last) == list(range(schedule.num_stages))
    for actions in schedule.ranks:
        for place, action in enumerate(actions):
            if action in last:
                assert not any(one.stage == action.stage and one.kind in "WB" for one in actions[place + 1 :])


def test_a_rank_without_a_stage_has_nothing_to_do_in_a_forward():
    assert forward_only((0, 1), 2, 3).ranks[2] == ()


def test_messages_name_what_they_are_for():
    program = whole_program(made("fast_forward", 2, 2))
    assert program.gives(Action(0, "F", 1)) == program.needs(Action(1, "F", 1)) == Message(0, 1, False, 1, 1)
    assert program.gives(Action(1, "I", 1)) == program.needs(Action(0, "I", 1)) == Message(1, 0, True, 0, 1)
    assert (Message(0, 1, False, 1, 1).border, Message(1, 0, True, 0, 1).border) == (0, 0)
    for action in (Action(0, "F", 0), Action(0, "W", 0), Action(1, "I", 0)):
        assert program.needs(action) is None
    for action in (Action(1, "F", 0), Action(1, "W", 0), Action(0, "I", 0)):
        assert program.gives(action) is None


def test_stages_of_one_rank_send_nothing_to_each_other():
    program = whole_program(made("zbv", 2, 3))  # stages 1 and 2 are both on rank 1
    assert program.gives(Action(1, "F", 0)) is None
    assert program.needs(Action(2, "F", 0)) is None
    assert program.gives(Action(2, "I", 0)) is None
    assert program.gives(Action(2, "F", 0)) == Message(1, 0, False, 3, 0)


@pytest.mark.parametrize("name", NAMES)
def test_only_schedules_that_do_all_forwards_first_have_phases(name):
    assert has_phases(made(name, 2, 4)) == (name in ("gpipe", "fast_forward", "fast_forward_linear"))
