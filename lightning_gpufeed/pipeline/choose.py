"""Which schedule a model gets, and how it is cut, from what was measured. Pure, and the same on every rank.

::

    measured   layers | link              layers that differ by less than a measurement's error count as equal
       └─► every granularity that is allowed
              └─► every schedule that is allowed, simulated
                     └─► within the memory cap, the fastest; as good as equal: fewer stages, then less memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.generators import fast_forward, gpipe, interleaved, one_f_one_b, zbv, zero_bubble
from lightning_gpufeed.pipeline.link import Link
from lightning_gpufeed.pipeline.measure import MeasuredLayers
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.search import (
    Candidate,
    allowed,
    best,
    cuts,
    fastest,
    granularities,
    placement,
)
from lightning_gpufeed.pipeline.simulate import Send, StageCosts

__all__ = ["SCHEDULES", "choose"]

_GENERATORS: dict[str, Callable[..., Schedule]] = {
    "fast_forward": fast_forward,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zbv": zbv,
}
_ONLY = {"1f1b": 1, "zbv": 2}
"""Stages on a rank, where a schedule leaves no choice."""
_TIE = 0.01
"""Steps that differ by less are equally fast."""
_ERROR = 0.05
"""Times of layers that differ by less are the same, measured twice: errors of up to 2 % to either side."""

SCHEDULES = (*_GENERATORS, "auto")
"""What `choose` takes."""


def choose(
    measured: MeasuredLayers,
    link: Link,
    num_ranks: int,
    num_microbatches: int,
    schedule: str,
    layers_per_stage: int | Literal["auto"] = "auto",
    memory_cap_bytes: int | None = None,
) -> Candidate:
    """The fastest schedule of those that are allowed.

    With "auto" the numbers of stages on a rank are tried that `granularities` names, each with stages of about equal
    time. Stages are dealt out to the ranks in turn, those of "zbv" along a V.

    Args:
        measured: What one microbatch takes in each layer; equal costs where nothing was measured.
        link: From each rank to the next.
        num_ranks: That share the model.
        num_microbatches: Of a batch.
        schedule: One of `SCHEDULES`; "auto" tries all.
        layers_per_stage: Layers of each stage. Where the layers cannot be dealt out so evenly, the number of stages is
            that which comes nearest, and they are balanced by time.
        memory_cap_bytes: Most bytes of activations on a rank; None for no limit.

    Returns:
        Of those within the cap whose step is at most 1 % longer than the fastest, one with the fewest stages, and of
        these the one with the least memory.

    Raises:
        ScheduleError: The model has too few layers, or nothing keeps within the cap.
        ValueError: An argument is none of those named above, or the schedule does not allow so many layers in a stage.

    Example:
        >>> measured = MeasuredLayers((StageCosts(),) * 8, sent_bytes=(1,) * 8)
        >>> found = choose(measured, Link(0.0, 0.0), 2, 4, "fast_forward")
        >>> found.num_virtual, found.stages[0], found.step_seconds
        (4, range(0, 1), 50.0)
    """
    _check(num_ranks, num_microbatches, schedule, layers_per_stage, memory_cap_bytes)
    num_layers = len(measured.costs)
    least_layers = num_ranks * _ONLY.get(schedule, 1)
    if num_layers < least_layers:
        raise ScheduleError(
            f"The model has {num_layers} layers; expected at least {least_layers} for {schedule} on {num_ranks} ranks, "
            f"as no stage is empty. Use fewer ranks{', or another schedule' if schedule == 'zbv' else ''}, or cut the "
            "model into more layers."
        )
    layers = [replace(one, overhead_seconds=measured.stage_seconds) for one in _smoothed(measured.costs)]
    sends = measured.send_seconds(link)
    every = list(_every(layers, sends, num_ranks, num_microbatches, schedule, layers_per_stage))
    fitting = [one for one in every if memory_cap_bytes is None or one.peak_bytes <= memory_cap_bytes]
    if not fitting:
        others = every
        if (schedule, layers_per_stage) != ("auto", "auto"):
            others = list(_every(layers, sends, num_ranks, num_microbatches, "auto", "auto"))
        raise ScheduleError(_too_large(memory_cap_bytes, min(every, key=_size), min(others, key=_size)))
    slowest = (1 + _TIE) * min(one.step_seconds for one in fitting)
    return min(
        (one for one in fitting if one.step_seconds <= slowest),
        key=lambda one: (one.num_virtual, one.peak_bytes, one.step_seconds, one.name),
    )


def _check(
    num_ranks: int,
    num_microbatches: int,
    schedule: str,
    layers_per_stage: int | Literal["auto"],
    memory_cap_bytes: int | None,
) -> None:
    """Arguments that mean something."""
    for name, value in {"num_ranks": num_ranks, "num_microbatches": num_microbatches}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; expected a whole number, at least 1.")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(map(repr, SCHEDULES))}.")
    is_count = isinstance(layers_per_stage, int) and not isinstance(layers_per_stage, bool) and layers_per_stage > 0
    if not is_count and layers_per_stage != "auto":
        raise ValueError(f"layers_per_stage is {layers_per_stage!r}; expected a whole number, at least 1, or 'auto'.")
    if memory_cap_bytes is not None and memory_cap_bytes < 0:
        raise ValueError(f"memory_cap_bytes is {memory_cap_bytes}; expected at least 0, or None for no limit.")


def _size(candidate: Candidate) -> tuple[int, float]:
    """What says how small a candidate is."""
    return candidate.peak_bytes, candidate.step_seconds


def _too_large(memory_cap_bytes: int | None, least: Candidate, least_of_all: Candidate) -> str:
    """What to say when nothing keeps within the cap."""
    text = (
        f"memory_cap_bytes is {memory_cap_bytes}; expected at least {least.peak_bytes} for activations, as "
        f"{_described(least)} needs on its fullest rank, the least of what was allowed."
    )
    if least_of_all.peak_bytes < least.peak_bytes:
        text += f" {_described(least_of_all).capitalize()} needs {least_of_all.peak_bytes}."
    return f"{text} Raise the cap, use smaller microbatches or activation checkpointing, or share among more ranks."


def _described(candidate: Candidate) -> str:
    return f"schedule {candidate.name} with {candidate.num_virtual} stage{'s' * (candidate.num_virtual > 1)} on a rank"


# What is tried ---------------------------------------------------------------------------------------------


def _every(
    layers: Sequence[StageCosts],
    sends: Sequence[Send],
    num_ranks: int,
    num_microbatches: int,
    schedule: str,
    layers_per_stage: int | Literal["auto"],
) -> Iterator[Candidate]:
    """All that is allowed, simulated."""
    if (schedule, layers_per_stage) == ("auto", "auto"):
        yield from best(layers, sends, num_ranks, num_microbatches)
        return
    for count in _counts(len(layers), num_ranks, schedule, layers_per_stage):
        makers = allowed(count) if schedule == "auto" else [_GENERATORS[schedule]]
        for make in makers:
            ranks = placement(make.__name__, num_ranks, count)
            tried = _cuts(layers, ranks, num_microbatches, layers_per_stage)
            yield fastest(make, layers, sends, tried, num_ranks, num_microbatches)


def _counts(num_layers: int, num_ranks: int, schedule: str, layers_per_stage: int | Literal["auto"]) -> Sequence[int]:
    """Stages on a rank that are tried."""
    per_rank = num_layers // num_ranks
    if layers_per_stage == "auto":
        return [_ONLY[schedule]] if schedule in _ONLY else granularities(num_layers, num_ranks)
    count = max(1, min(per_rank, round(num_layers / (layers_per_stage * num_ranks))))
    expected = _ONLY.get(schedule, count)
    if count != expected:
        raise ValueError(
            f"layers_per_stage is {layers_per_stage}: of {num_layers} layers that makes {count} "
            f"stage{'s' * (count > 1)} on each of {num_ranks} ranks; expected {expected} for {schedule}. Use "
            "layers_per_stage='auto', or another schedule."
        )
    return [count]


def _cuts(
    layers: Sequence[StageCosts],
    stage_to_rank: Sequence[int],
    num_microbatches: int,
    layers_per_stage: int | Literal["auto"],
) -> list[tuple[range, ...]]:
    """The layers of each stage: equally many if that was asked for and can be, of about equal time otherwise."""
    if layers_per_stage != "auto" and len(stage_to_rank) * layers_per_stage == len(layers):
        return [tuple(range(first, first + layers_per_stage) for first in range(0, len(layers), layers_per_stage))]
    return cuts([layer.compute_seconds for layer in layers], stage_to_rank, num_microbatches)


# Costs -----------------------------------------------------------------------------------------------------


def _smoothed(layers: Sequence[StageCosts]) -> list[StageCosts]:
    """The same layers, without differences that are no more than errors of measurement."""
    # With them equal layers would be dealt out unevenly, or more finely for nothing.
    forward, input_grad, weight_grad = (
        _levelled([getattr(layer, name) for layer in layers])
        for name in ("forward_seconds", "input_grad_seconds", "weight_grad_seconds")
    )
    return [
        StageCosts(forward[i], input_grad[i], weight_grad[i], layer.activation_bytes, layer.deferred_bytes)
        for i, layer in enumerate(layers)
    ]


def _levelled(values: Sequence[float]) -> list[float]:
    """Each replaced by the mean of those about as large."""
    levelled = list(values)
    order = sorted(range(len(values)), key=lambda place: values[place])
    first = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] > values[order[first]] * (1 + _ERROR):
            run = order[first:end]
            if values[run[0]] < values[run[-1]]:  # of equal ones the mean may be another by its last bit
                mean = fmean(values[place] for place in run)
                for place in run:
                    levelled[place] = mean
            first = end
    return levelled
