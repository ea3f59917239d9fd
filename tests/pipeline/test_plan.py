"""What a user asks for of a pipeline, checked; and what is decided from it. Pure."""

from __future__ import annotations

import pytest

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.generators import fast_forward, zero_bubble
from lightning_gpufeed.pipeline.link import Link
from lightning_gpufeed.pipeline.measure import MeasuredLayers
from lightning_gpufeed.pipeline.plan import PipelineOptions, plan_evaluation, plan_training
from lightning_gpufeed.pipeline.simulate import StageCosts


def measured(num_layers: int, seconds: float = 0.01, overhead: float = 0.0) -> MeasuredLayers:
    return MeasuredLayers((StageCosts(seconds, seconds, seconds),) * num_layers, (8,) * num_layers, overhead)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_size": 0}, "pipeline_size is 0; expected a whole number"),
        ({"pipeline_size": True}, "pipeline_size is True"),
        ({"pipeline_size": 2, "num_microbatches": 0}, "num_microbatches is 0"),
        ({"pipeline_size": 2, "layers_per_stage": "all"}, "layers_per_stage is 'all'"),
        ({"pipeline_size": 2, "schedule": "zb"}, "schedule is 'zb'; expected one of 'fast_forward'"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PipelineOptions(**options)


def test_a_schedule_of_ones_own_has_to_fit():
    schedule = fast_forward(2, 4)
    with pytest.raises(ScheduleError, match="for 2 ranks, and pipeline_size is 3"):
        PipelineOptions(3, schedule=schedule)
    with pytest.raises(ScheduleError, match="for 4 microbatches, and num_microbatches is 8"):
        PipelineOptions(2, num_microbatches=8, schedule=schedule)
    with pytest.raises(ScheduleError, match="2 layers, and the schedule is over 4 stages"):
        plan_training(PipelineOptions(2, schedule=zero_bubble(2, 4, 2)), num_layers=2)


def test_the_text_of_a_schedule_is_that_schedule():
    schedule = zero_bubble(2, 4, 2)
    options = PipelineOptions(2, schedule=str(schedule))
    assert options.schedule == schedule
    assert options.microbatches == 4
    assert plan_training(options, num_layers=9).schedule == schedule


def test_four_microbatches_for_each_rank_unless_told():
    assert PipelineOptions(3).microbatches == 12
    assert PipelineOptions(3, num_microbatches=5).microbatches == 5


def test_only_what_depends_on_times_is_measured():
    assert PipelineOptions(2).has_to_measure
    assert PipelineOptions(2, schedule="auto", layers_per_stage=2).has_to_measure
    assert not PipelineOptions(2, layers_per_stage=2).has_to_measure
    assert not PipelineOptions(2, schedule="1f1b").has_to_measure
    assert not PipelineOptions(2, schedule=fast_forward(2, 4)).has_to_measure


def test_without_times_nothing_is_predicted():
    plan = plan_training(PipelineOptions(2, num_microbatches=4, layers_per_stage=2), num_layers=8)
    assert plan.step_seconds is None
    assert str(plan) == "fast_forward, 2 ranks with 2 stages each, 2 layers in a stage, 4 microbatches"
    assert plan.to_metrics() == {"gpufeed/pipeline/num_stages": 4.0, "gpufeed/pipeline/num_microbatches": 4.0}


def test_with_times_the_step_and_the_bubble_are_said():
    plan = plan_training(PipelineOptions(2, 4, "auto"), 8, measured(8), Link(0.0, 0.0))
    assert plan.step_seconds is not None
    assert "predicted" in str(plan)
    assert "bubble ratio" in str(plan)
    figures = plan.to_metrics()
    assert figures["gpufeed/pipeline/predicted_step_seconds"] == plan.step_seconds
    assert figures["gpufeed/pipeline/predicted_bubble_ratio"] == plan.bubble_ratio


def test_what_a_stage_takes_beside_its_layers_makes_stages_fewer():
    options = PipelineOptions(2, 4, "fast_forward")
    fine = plan_training(options, 8, measured(8), Link(0.0, 0.0))
    coarse = plan_training(options, 8, measured(8, overhead=0.02), Link(0.0, 0.0))
    assert fine.schedule.num_virtual > coarse.schedule.num_virtual


def test_evaluation_has_forwards_alone_on_every_rank():
    plan = plan_evaluation(PipelineOptions(3, 4), num_layers=7)
    assert {action.kind for actions in plan.schedule.ranks for action in actions} == {"F"}
    assert [len(actions) for actions in plan.schedule.ranks] == [4, 4, 4]
    assert sum(map(len, plan.stages)) == 7
