"""Schedules as values: the same after a trip through text, and in a file that torch loads."""

from __future__ import annotations

import doctest

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _Action,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_gpufeed.pipeline import schedule as schedule_module
from lightning_gpufeed.pipeline.action import Action
from lightning_gpufeed.pipeline.generators import interleaved, zbv
from lightning_gpufeed.pipeline.schedule import Schedule
from tests.pipeline.cases import NAMES, ONLY, made, schedules_with_costs

SHAPES = [(1, 1, 1), (2, 3, 1), (4, 8, 2), (3, 7, 3)]


def of_torch(kind, schedule):
    """Make one of torch's schedules on rank 0 of as many ranks, of which the others are only said to be there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=schedule.num_ranks)
    try:
        owned = [stage for stage, rank in enumerate(schedule.stage_to_rank) if rank == 0]
        stages = [
            PipelineStage(torch.nn.Identity(), stage, schedule.num_stages, torch.device("cpu")) for stage in owned
        ]
        return kind(stages, schedule.num_microbatches)
    finally:
        dist.destroy_process_group()


def actions_of(order):
    """Give torch's actions of each rank as ours, without those that compute nothing."""
    return tuple(
        tuple(
            Action(one.stage_index, one.computation_type.value, one.microbatch_index)
            for one in order[rank]
            if one is not None and one.is_compute_op
        )
        for rank in sorted(order)
    )


def is_about_shards(action):
    """Whether torch has added an action for sharded or replicated parameters."""
    return action.computation_type.value in ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def test_the_examples_run():
    assert doctest.testmod(schedule_module).failed == 0


@given(schedules_with_costs(most=200))
@settings(max_examples=40)
def test_text_and_back_is_the_same_schedule(case):
    schedule, _, _ = case
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    assert hash(Schedule.parse(str(schedule))) == hash(schedule)


def test_a_schedule_that_computes_nothing_has_a_text_too():
    for schedule in (Schedule((), (), 0), Schedule(((), ()), (), 0), Schedule(((), (Action(0, "F", 0),)), (1,), 1)):
        assert Schedule.parse(str(schedule)) == schedule


def test_idle_cells_of_a_file_are_left_out():
    schedule = Schedule.from_csv("0F0,,0F1,\r\n,1F0,,1F1\r\n")
    assert str(schedule) == "2 microbatches; stages on ranks 0 1\n0F0 0F1\n1F0 1F1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the first line of a schedule; expected such as '4 microbatches"),
        ("0F0 0B0", "not the first line of a schedule"),
        ("2 microbatches; stages on ranks 0 x\n0F0", "not the first line of a schedule"),
        ("2 microbatches; stages on ranks 0\n0F0 G", "'G' is no action"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Schedule.parse(text)


def test_a_file_without_a_stage_in_the_middle_is_refused():
    with pytest.raises(ValueError, match="no action of stage 1, but of stage 2; expected some of every stage"):
        Schedule.from_csv("0F0\r\n2F0\r\n")


@pytest.mark.parametrize("name", NAMES)
def test_torch_loads_the_file_in_the_same_order_and_can_send_in_it(name, tmp_path):
    for shape in SHAPES:
        schedule = made(name, *shape)
        file = tmp_path / "schedule.csv"
        file.write_text(schedule.to_csv(), newline="")
        runtime = of_torch(_PipelineScheduleRuntime, schedule)
        runtime._load_csv(str(file), format="compute_only")
        assert runtime.pipeline_order == {
            rank: [_Action.from_str(str(action)) for action in actions] for rank, actions in enumerate(schedule.ranks)
        }
        assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.stage_to_rank))
        lowered = runtime.pipeline_order_with_comms
        assert actions_of(lowered) == schedule.ranks
        # Raises where a receive would wait for ever. It does not know what torch adds for sharded parameters.
        kept = {rank: [one for one in actions if not is_about_shards(one)] for rank, actions in lowered.items()}
        _simulate_comms_compute(kept, schedule.stage_to_rank.__getitem__, schedule.num_stages)


def test_interleaved_1f1b_is_that_of_torch():
    for num_ranks, num_microbatches, num_virtual in [(1, 2, 2), (2, 2, 2), (4, 4, 3), (4, 12, 2), (3, 8, 3)]:
        schedule = interleaved(num_ranks, num_microbatches, num_virtual)
        assert actions_of(of_torch(ScheduleInterleaved1F1B, schedule).pipeline_order) == schedule.ranks


def test_forwards_and_input_gradients_along_a_v_come_in_the_order_of_torch():
    for num_ranks, num_microbatches in [(2, 1), (2, 4), (4, 4), (4, 12), (3, 8)]:
        schedule = zbv(num_ranks, num_microbatches)
        theirs = actions_of(of_torch(ScheduleZBVZeroBubble, schedule).pipeline_order)
        for ours, other in zip(schedule.ranks, theirs, strict=True):
            assert [one for one in ours if one.kind != "W"] == [one for one in other if one.kind != "W"]


def test_names_and_shapes_cover_every_placement():
    placements = {made(name, *shape).stage_to_rank for name in NAMES for shape in SHAPES}
    assert {(0, 1, 2, 3, 0, 1, 2, 3), (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 3, 3, 2, 1, 0)} <= placements
    assert set(ONLY) < set(NAMES)
