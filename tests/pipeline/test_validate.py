"""What can be carried out is accepted; what cannot is refused, by name."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline import validate as validate_module
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.validate import in_order, validate
from tests.pipeline.cases import NAMES, made, schedules_with_costs, shapes

HEAD = "2 microbatches; stages on ranks 0 1\n"


def test_the_examples_run():
    assert doctest.testmod(validate_module).failed == 0


@given(st.sampled_from(NAMES), shapes())
@settings(max_examples=80)
def test_schedules_of_every_size_can_be_carried_out(name, shape):
    validate(made(name, *shape))


@given(schedules_with_costs(most=200))
@settings(max_examples=30)
def test_schedules_for_all_costs_can_be_carried_out(case):
    schedule, _, _ = case
    validate(schedule)


@given(schedules_with_costs(most=200), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_a_schedule_that_lacks_repeats_or_misplaces_something_is_refused(case, chance):
    schedule, _, _ = case
    ranks = [list(actions) for actions in schedule.ranks]
    rank = chance.randrange(len(ranks))
    place = chance.randrange(len(ranks[rank]))
    action = ranks[rank][place]
    others = [i for i in range(len(ranks)) if i != rank]
    wrong = [[*ranks], [*ranks], [*ranks]]
    wrong[0][rank] = ranks[rank][:place] + ranks[rank][place + 1 :]
    wrong[1][rank] = [*ranks[rank], action]
    if others:
        to = chance.choice(others)
        wrong[2][rank], wrong[2][to] = wrong[0][rank], [*ranks[to], action]
    for changed in wrong if others else wrong[:2]:
        with pytest.raises(ScheduleError, match=rf"\b{action.stage}[FIWB]{action.microbatch}\b.*expected"):
            validate(Schedule(tuple(map(tuple, changed)), schedule.stage_to_rank, schedule.num_microbatches))


@given(schedules_with_costs(most=200))
@settings(max_examples=25)
def test_all_actions_come_once_and_after_what_they_need(case):
    schedule, _, _ = case
    done, places = set(), [0] * schedule.num_ranks
    for rank, action in in_order(schedule):
        assert action == schedule.ranks[rank][places[rank]]
        assert done.issuperset(action.needs(schedule.num_stages))
        done.update(action.parts)
        places[rank] += 1
    assert places == [len(actions) for actions in schedule.ranks]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("0F0 0B0 0F1\n1F0 1B0 1F1 1B1", "There is no 0I1; expected I or B of stage 0 and microbatch 1 on rank 0"),
        ("0F0 0B0 0F1 0I1\n1F0 1B0 1F1 1B1", "There is no 0W1; expected W or B of stage 0 and microbatch 1 on rank 0"),
        ("0F0 0B0 0F1 0B1\n1F0 1B0", "There is no 1F1; expected F of stage 1 and microbatch 1 on rank 1"),
        ("0F0 0B0 0W0 0F1 0B1\n1F0 1B0 1F1 1B1", "0W0: 0W0 is computed before already; expected once"),
        ("0F0 0I0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1", "0B0: 0I0 is computed before already; expected once"),
        ("0F0 0F1 0F0 0B0 0B1\n1F0 1B0 1F1 1B1", "0F0: 0F0 is computed before already"),
        ("0F0 0B1 0F1 0B0\n1F0 1B0 1F1 1B1", "0B1 comes before 0F1 on rank 0; expected after it"),
        ("0F0 0F1 0B0 0W1 0I1\n1F0 1B0 1F1 1B1", "0W1 comes before 0I1 on rank 0; expected after it"),
        ("0F0 0F1 0B0 0B1 1B1\n1F0 1B0 1F1", "1B1 is on rank 0; expected rank 1, which has stage 1"),
        ("0F0 0F1 0B0 0B1 2F0\n1F0 1B0 1F1 1B1", "2F0 on rank 0: there is no stage 2; expected 0 to 1"),
        ("0F0 0F1 0F2 0B0 0B1\n1F0 1B0 1F1 1B1", "0F2 on rank 0: there is no microbatch 2; expected 0 to 1"),
        (
            "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
            "No rank can go on: rank 0 at 0B0 for 1I0, rank 1 at 1F1 for 0F1. Expected an order that ends",
        ),
        ("0F0 0B0 0F1 0B1", "Stage 1 is on rank 1; expected 0 to 0, for which there are actions"),
    ],
)
def test_an_error_says_what_is_wrong_with_a_schedule(ranks, message):
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.parse(HEAD + ranks))


def test_a_hang_of_many_ranks_is_told_in_a_few_words():
    actions = [f"{stage}F0 {stage}B0" for stage in range(12)]
    actions[0] = "0F1 0B1 0F0 0B0"
    schedule = Schedule.parse(
        "2 microbatches; stages on ranks " + " ".join(map(str, range(12))) + "\n" + "\n".join(actions)
    )
    with pytest.raises(ScheduleError, match=r"rank 0 at 0B1 for 1I1, rank 1 at 1F0 for 0F0.*, and 4 more\."):
        list(in_order(schedule))
