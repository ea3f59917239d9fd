"""Which schedule is best for a model and a link. Pure, and the same on every rank: no clock and no chance decide.

::

    layers    0 1 2 3 4 5 6 7        what each takes, measured
    v = 1    |0 1 2 3|4 5 6 7|       stages of about equal time, on two ranks
    v = 2    |0 1|2 3|4 5|6 7|       each schedule over each cut is simulated; what needs too much memory is left out
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_gpufeed.pipeline.generators import fast_forward, gpipe, interleaved, one_f_one_b, zbv, zero_bubble
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.simulate import Send, Sends, StageCosts, each_send, simulate

__all__ = ["Candidate", "balanced", "best", "together"]


class Candidate(NamedTuple):
    """A schedule for a model that is cut into stages.

    Attributes:
        name: Of the schedule.
        num_virtual: Stages on each rank.
        step_seconds: That a step takes, as simulated.
        bubble_ratio: Idle share of all ranks.
        peak_bytes: Most bytes of activations on any rank.
        stages: The layers of each stage.
        schedule: Over these stages.
    """

    name: str
    num_virtual: int
    step_seconds: float
    bubble_ratio: float
    peak_bytes: int
    stages: tuple[range, ...]
    schedule: Schedule


def balanced(layer_seconds: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cut layers into stages so that the longest stage is as short as can be.

    Args:
        layer_seconds: Of each layer, in the order of the model.
        num_stages: At most as many as layers: no stage is empty.

    Returns:
        The layers of each stage. Of cuts with the same longest stage, one whose stages differ little.

    Raises:
        ValueError: There are more stages than layers, or none.

    Example:
        >>> balanced([1.0, 1.0, 1.0, 3.0, 1.0, 1.0], num_stages=3)
        (range(0, 3), range(3, 4), range(4, 6))
    """
    num_layers = len(layer_seconds)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"num_stages is {num_stages}; expected 1 to {num_layers}, the number of layers. Use fewer ranks or stages."
        )
    ends = [0.0, *accumulate(layer_seconds)]
    # Of the first `i` layers in so many stages: the longest stage, the sum of squares, where the last stage begins.
    rows = [[(ends[i], ends[i] ** 2, 0) for i in range(num_layers + 1)]]
    for num_cut in range(1, num_stages):
        before, row = rows[-1], [(0.0, 0.0, 0)] * (num_layers + 1)
        for i in range(num_cut + 1, num_layers - num_stages + num_cut + 2):
            found = (float("inf"), 0.0, 0)
            for begin in range(i - 1, num_cut - 1, -1):
                seconds = ends[i] - ends[begin]
                if seconds > found[0]:  # and longer still from an earlier layer on
                    break
                longest, squares, _ = before[begin]
                found = min(found, (max(longest, seconds), squares + seconds**2, begin))
            row[i] = found
        rows.append(row)
    stages, end = [], num_layers
    for row in reversed(rows):
        begin = row[end][2]
        stages.append(range(begin, end))
        end = begin
    return tuple(reversed(stages))


def best(
    layers: Sequence[StageCosts],
    send_seconds: Sends,
    num_ranks: int,
    num_microbatches: int,
    memory_cap_bytes: int | None = None,
) -> list[Candidate]:
    """Every schedule at every granularity, the fastest first.

    Tried are the numbers of stages on a rank that divide the number of layers on a rank, rounded down.

    Args:
        layers: What one microbatch takes in each layer, in the order of the model.
        send_seconds: From each layer to the next if they are on two ranks, or from every layer.
        num_ranks: That share the model.
        num_microbatches: Of a batch.
        memory_cap_bytes: Most bytes of activations on a rank; None for no limit.

    Returns:
        What keeps within the cap, by time, then by memory. Empty if nothing does.

    Raises:
        ValueError: There are fewer layers than ranks, or a number is not positive or does not fit.

    Example:
        >>> found = best([StageCosts()] * 8, send_seconds=0.0, num_ranks=2, num_microbatches=4)
        >>> [(one.name, one.num_virtual, one.step_seconds) for one in found[:3]]
        [('zero_bubble', 4, 49.0), ('zbv', 2, 50.0), ('zero_bubble', 2, 50.0)]
    """
    if not 1 <= num_ranks <= len(layers):
        raise ValueError(
            f"num_ranks is {num_ranks}; expected 1 to {len(layers)}, the number of layers, so that each rank has some."
        )
    sends = each_send(send_seconds, len(layers) - 1)
    if memory_cap_bytes is not None and memory_cap_bytes < 0:
        raise ValueError(f"memory_cap_bytes is {memory_cap_bytes}; expected at least 0, or None for no limit.")
    seconds = [layer.compute_seconds for layer in layers]
    candidates = []
    per_rank = len(layers) // num_ranks
    for num_virtual in (v for v in range(1, per_rank + 1) if per_rank % v == 0):
        stages = balanced(seconds, num_ranks * num_virtual)
        costs = [together(layers[stage.start : stage.stop]) for stage in stages]
        stage_sends = [sends[stage.stop - 1] for stage in stages[:-1]]
        for name, schedule in _schedules(num_ranks, num_microbatches, num_virtual, costs, stage_sends):
            timeline = simulate(schedule, costs, stage_sends)
            peak = max(timeline.peak_bytes)
            if memory_cap_bytes is None or peak <= memory_cap_bytes:
                facts = (timeline.step_seconds, timeline.bubble_ratio, peak)
                candidates.append(Candidate(name, num_virtual, *facts, stages, schedule))
    return sorted(candidates, key=lambda one: (one.step_seconds, one.peak_bytes, one.num_virtual, one.name))


def _schedules(
    num_ranks: int, num_microbatches: int, num_virtual: int, costs: Sequence[StageCosts], sends: Sequence[Send]
) -> Iterator[tuple[str, Schedule]]:
    """All that allow so many stages on a rank, each by its name."""
    given: list[Callable[..., Schedule]] = [gpipe, one_f_one_b if num_virtual == 1 else interleaved]
    filled: list[Callable[..., Schedule]] = [fast_forward, zero_bubble, *([zbv] if num_virtual == 2 else [])]
    for make in given:
        yield make.__name__, make(num_ranks, num_microbatches, num_virtual)
    for make in filled:
        yield make.__name__, make(num_ranks, num_microbatches, num_virtual, costs=costs, send_seconds=sends)


def together(layers: Sequence[StageCosts]) -> StageCosts:
    """The costs of layers that are one stage.

    Args:
        layers: One after the other.

    Returns:
        Their sums.
    """
    return StageCosts(
        sum(one.forward_seconds for one in layers),
        sum(one.input_grad_seconds for one in layers),
        sum(one.weight_grad_seconds for one in layers),
        sum(one.activation_bytes for one in layers),
        sum(one.deferred_bytes for one in layers),
    )
