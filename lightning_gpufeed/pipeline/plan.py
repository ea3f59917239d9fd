"""Into which stages a model is cut, on which ranks they are, and in which order a step runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.choose import SCHEDULES, choose
from lightning_gpufeed.pipeline.link import Link
from lightning_gpufeed.pipeline.measure import MeasuredLayers
from lightning_gpufeed.pipeline.program import forward_only
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.search import balanced
from lightning_gpufeed.pipeline.simulate import StageCosts
from lightning_gpufeed.pipeline.validate import validate

__all__ = ["PipelineOptions", "PipelinePlan", "plan_evaluation", "plan_training"]

_MICROBATCHES_PER_RANK = 4


@dataclass(frozen=True)
class PipelinePlan:
    """What was decided.

    Attributes:
        name: Of the schedule.
        stages: The layers of each stage.
        schedule: Over these stages.
        step_seconds: Of a step, as simulated from measured times; None if nothing was measured.
        bubble_ratio: Idle share of all ranks, likewise.
    """

    name: str
    stages: tuple[range, ...]
    schedule: Schedule
    step_seconds: float | None = None
    bubble_ratio: float | None = None

    def __str__(self) -> str:
        """One line for a log."""
        sizes = {len(stage) for stage in self.stages}
        layers = str(min(sizes)) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
        num_virtual, name = self.schedule.num_virtual, self.name.replace("one_f_one_b", "1f1b")
        text = (
            f"{name}, {self.schedule.num_ranks} ranks with {num_virtual} stage{'s' * (num_virtual > 1)} each, "
            f"{layers} layers in a stage, {self.schedule.num_microbatches} microbatches"
        )
        if self.step_seconds is None or self.bubble_ratio is None:
            return text
        return f"{text}; predicted {1e3 * self.step_seconds:.4g} ms a step, bubble ratio {self.bubble_ratio:.0%}"

    def to_metrics(self) -> dict[str, float]:
        """Figures for a logger.

        Returns:
            Name -> value under `gpufeed/pipeline/`; what was not predicted is left out.
        """
        values: dict[str, float | None] = {
            "num_stages": self.schedule.num_stages,
            "num_microbatches": self.schedule.num_microbatches,
            "predicted_step_seconds": self.step_seconds,
            "predicted_bubble_ratio": self.bubble_ratio,
        }
        return {f"gpufeed/pipeline/{name}": float(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class PipelineOptions:
    """What the user asks for.

    Attributes:
        pipeline_size: Ranks that share a model.
        num_microbatches: Of a batch; None for four for each rank.
        schedule: A name, a schedule, or its text form.
        layers_per_stage: Layers of a stage; "auto" for the number that is fastest by measured times.
        memory_cap_bytes: Most bytes of activations on a rank that a schedule found by measuring may take.
        is_checkpointed: Whether layers' forwards are run a second time in backward.
    """

    pipeline_size: int
    num_microbatches: int | None = None
    schedule: str | Schedule = "fast_forward"
    layers_per_stage: int | Literal["auto"] = "auto"
    memory_cap_bytes: int | None = None
    is_checkpointed: bool = False

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            ValueError: One is out of range.
            ScheduleError: A schedule cannot be carried out.
        """
        for name in ("pipeline_size", "num_microbatches", "layers_per_stage"):
            value = getattr(self, name)
            is_default = value is None if name == "num_microbatches" else value == "auto"
            if not is_default and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; expected a whole number from 1 on.")
        if isinstance(self.schedule, str) and "microbatches;" in self.schedule:
            object.__setattr__(self, "schedule", Schedule.parse(self.schedule))
        if not isinstance(self.schedule, Schedule):
            if self.schedule not in SCHEDULES:
                raise ValueError(
                    f"schedule is {self.schedule!r}; expected one of {', '.join(map(repr, SCHEDULES))}, a "
                    f"pipeline.schedule.Schedule or its text."
                )
            return
        validate(self.schedule)
        if self.schedule.num_ranks != self.pipeline_size:
            raise ScheduleError(
                f"The schedule is for {self.schedule.num_ranks} ranks, and pipeline_size is {self.pipeline_size}; "
                f"expected the same."
            )
        if self.num_microbatches not in (None, self.schedule.num_microbatches):
            raise ScheduleError(
                f"The schedule is for {self.schedule.num_microbatches} microbatches, and num_microbatches is "
                f"{self.num_microbatches}; expected the same, or leave num_microbatches out."
            )

    @property
    def microbatches(self) -> int:
        """Of a batch."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.num_microbatches
        return self.num_microbatches or _MICROBATCHES_PER_RANK * self.pipeline_size

    @property
    def has_to_measure(self) -> bool:
        """Whether a decision needs measured times."""
        if isinstance(self.schedule, Schedule):
            return False
        return self.schedule == "auto" or (self.layers_per_stage == "auto" and self.schedule != "1f1b")


def plan_training(
    options: PipelineOptions, num_layers: int, measured: MeasuredLayers | None = None, link: Link | None = None
) -> PipelinePlan:
    """Decide for a training.

    Args:
        options: What is asked for.
        num_layers: Of the model.
        measured: Of each layer, if `has_to_measure`; otherwise layers count as equal.
        link: Between the ranks, likewise.

    Returns:
        The plan.

    Raises:
        ScheduleError: There are fewer layers than stages, or nothing keeps within the cap.
        ValueError: The schedule does not allow so many layers in a stage.
    """
    if isinstance(options.schedule, Schedule):
        num_stages = options.schedule.num_stages
        if num_layers < num_stages:
            raise ScheduleError(
                f"The model has {num_layers} layers, and the schedule is over {num_stages} stages; expected at least "
                f"one layer for each."
            )
        return PipelinePlan("given schedule", balanced([1.0] * num_layers, num_stages), options.schedule)
    is_measured = measured is not None
    if measured is None:
        measured = MeasuredLayers((StageCosts(),) * num_layers, (1,) * num_layers)
    found = choose(
        measured,
        link or Link(0.0, 0.0),
        options.pipeline_size,
        options.microbatches,
        options.schedule,
        options.layers_per_stage,
        options.memory_cap_bytes if is_measured else None,
    )
    if not is_measured:
        return PipelinePlan(found.name, found.stages, found.schedule)
    return PipelinePlan(found.name, found.stages, found.schedule, found.step_seconds, found.bubble_ratio)


def plan_evaluation(options: PipelineOptions, num_layers: int) -> PipelinePlan:
    """Decide for validation, test or prediction alone: one stage on each rank.

    Args:
        options: What is asked for.
        num_layers: Of the model; at least as many as ranks.

    Returns:
        The plan; its schedule has forwards only.
    """
    num_ranks = options.pipeline_size
    program = forward_only(range(num_ranks), options.microbatches, num_ranks)
    schedule = Schedule(program.ranks, program.stage_to_rank, options.microbatches)
    return PipelinePlan("forward", balanced([1.0] * num_layers, num_ranks), schedule)
