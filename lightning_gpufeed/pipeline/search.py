"""Which schedule is best for a model and a link. Pure, and the same on every rank: no clock and no chance decide.

::

    layers    0 1 2 3 4 5 6 7        what each takes, measured
    v = 1    |0 1 2 3|4 5 6 7|       stages of about equal time, on two ranks that have about as much to do
    v = 2    |0 1|2 3|4 5|6 7|       each schedule over each cut is simulated; what needs too much memory is left out
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_gpufeed.pipeline.generators import fast_forward, gpipe, interleaved, one_f_one_b, zbv, zero_bubble
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.simulate import Send, Sends, StageCosts, each_send, simulate

__all__ = [
    "Candidate",
    "allowed",
    "balanced",
    "best",
    "cuts",
    "dealt_out",
    "fastest",
    "granularities",
    "placement",
    "together",
]

_NUM_GRANULARITIES = 5
"""So many numbers of stages on a rank are tried; more only if more divide the layers of a rank."""

_FILLED: tuple[Callable[..., Schedule], ...] = (fast_forward, zero_bubble, zbv)
"""What depends on the costs."""


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


def dealt_out(layer_seconds: Sequence[float], stage_to_rank: Sequence[int], num_microbatches: int) -> tuple[range, ...]:
    """Cut layers into stages for ranks that have several of them: no stage is long, and no rank has much to do.

    What is made small is about what a step takes: all microbatches on the busiest rank, and the longest stage once for
    each rank but one, the wait at the ends of a step. From `balanced` on layers are moved, one at a time, to any other
    stage, as long as that helps. So the busiest rank has never more to do than with `balanced`.

    Args:
        layer_seconds: Of each layer, in the order of the model.
        stage_to_rank: The rank of each stage.
        num_microbatches: Of a batch.

    Returns:
        The layers of each stage. With one stage on each rank, those of `balanced`.

    Raises:
        ValueError: There are more stages than layers, or none.

    Example:
        >>> balanced([1.0, 2.0, 1.0, 1.0, 1.0], num_stages=4)  # on two ranks in turn: 2 seconds and 4
        (range(0, 1), range(1, 2), range(2, 3), range(3, 5))
        >>> dealt_out([1.0, 2.0, 1.0, 1.0, 1.0], (0, 1, 0, 1), num_microbatches=8)  # 3 and 3
        (range(0, 1), range(1, 2), range(2, 4), range(4, 5))
    """
    stages = balanced(layer_seconds, len(stage_to_rank))
    if len(set(stage_to_rank)) in (1, len(stages)):
        return stages
    cut = _Cut(layer_seconds, stages, stage_to_rank, num_microbatches)
    has_moved = True
    while has_moved:
        has_moved = False
        for stage in range(len(stages)):
            for way in (1, -1):
                has_moved |= cut.move(stage, way)
    return tuple(range(begin, end) for begin, end in pairwise(cut.bounds))


class _Cut:
    """Stages between which layers move."""

    def __init__(
        self,
        layer_seconds: Sequence[float],
        stages: Sequence[range],
        stage_to_rank: Sequence[int],
        num_microbatches: int,
    ) -> None:
        """Begin with stages."""
        unit = max(layer_seconds) / 2**40 or 1.0
        self._layers = [round(seconds / unit) for seconds in layer_seconds]  # whole numbers: sums without errors
        self.bounds = [0, *(stage.stop for stage in stages)]
        self._seconds = [sum(self._layers[stage.start : stage.stop]) for stage in stages]
        self._stage_to_rank, self._num_microbatches = stage_to_rank, num_microbatches
        self._loads = [0] * (max(stage_to_rank) + 1)
        for rank, seconds in zip(stage_to_rank, self._seconds, strict=True):
            self._loads[rank] += seconds

    def move(self, stage: int, way: int) -> bool:
        """Give a layer of a stage to the later (1) or earlier (-1) stage where it helps most, through those between."""
        if self.bounds[stage + 1] - self.bounds[stage] == 1:
            return False
        borders = range(stage + 1, len(self._seconds)) if way == 1 else range(stage, 0, -1)
        least, num_kept = self._cost(), 0
        for number, border in enumerate(borders, start=1):
            self._shift(border, -way)
            cost = self._cost()
            if cost < least:
                least, num_kept = cost, number
        for border in borders[num_kept:]:
            self._shift(border, way)
        return num_kept > 0

    def _cost(self) -> tuple[int, int]:
        """What a step takes, about, and how unequal the ranks are."""
        step = self._num_microbatches * max(self._loads) + (len(self._loads) - 1) * max(self._seconds)
        return step, sum(load * load for load in self._loads)

    def _shift(self, border: int, by: int) -> None:
        """Move the border before a stage by one layer."""
        layer = self._layers[min(self.bounds[border], self.bounds[border] + by)]
        self.bounds[border] += by
        for stage, change in ((border - 1, by * layer), (border, -by * layer)):
            self._seconds[stage] += change
            self._loads[self._stage_to_rank[stage]] += change


def cuts(
    layer_seconds: Sequence[float], stage_to_rank: Sequence[int], num_microbatches: int
) -> list[tuple[range, ...]]:
    """What is worth a try: which cut is better depends on the schedule as well.

    Args:
        layer_seconds: Of each layer, in the order of the model.
        stage_to_rank: The rank of each stage.
        num_microbatches: Of a batch.

    Returns:
        By `dealt_out`, and by `balanced` if that is another.

    Raises:
        ValueError: There are more stages than layers, or none.
    """
    both = [dealt_out(layer_seconds, stage_to_rank, num_microbatches), balanced(layer_seconds, len(stage_to_rank))]
    return both if both[0] != both[1] else both[:1]


def placement(name: str, num_ranks: int, num_virtual: int) -> tuple[int, ...]:
    """The rank of each stage in a schedule of this package.

    Args:
        name: Of the function that makes it.
        num_ranks: That share the model.
        num_virtual: Stages on each rank.

    Returns:
        Along a V for "zbv", dealt out in turn for all others.
    """
    if name == "zbv":
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(range(num_ranks)) * num_virtual


def granularities(num_layers: int, num_ranks: int) -> list[int]:
    """Numbers of stages on a rank that are worth a try.

    Args:
        num_layers: Of the model.
        num_ranks: That share it.

    Returns:
        All that divide the number of layers on a rank, rounded down, and of the others the smallest until there are
        five in all. Ascending.

    Example:
        >>> granularities(24, 8), granularities(56, 8), granularities(96, 4)
        ([1, 2, 3], [1, 2, 3, 4, 7], [1, 2, 3, 4, 6, 8, 12, 24])
    """
    per_rank = num_layers // num_ranks
    every = sorted(range(1, per_rank + 1), key=lambda number: (per_rank % number > 0, number))
    num_dividing = sum(per_rank % number == 0 for number in every)
    return sorted(every[: max(num_dividing, _NUM_GRANULARITIES)])


def best(
    layers: Sequence[StageCosts],
    send_seconds: Sends,
    num_ranks: int,
    num_microbatches: int,
    memory_cap_bytes: int | None = None,
) -> list[Candidate]:
    """Every schedule at every granularity, the fastest first.

    Tried are the numbers of stages on a rank that `granularities` names, each with the faster one of two `cuts`.

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
    for num_virtual in granularities(len(layers), num_ranks):
        cuts_of: dict[tuple[int, ...], list[tuple[range, ...]]] = {}
        for make in allowed(num_virtual):
            ranks = placement(make.__name__, num_ranks, num_virtual)
            if ranks not in cuts_of:
                cuts_of[ranks] = cuts(seconds, ranks, num_microbatches)
            found = fastest(make, layers, sends, cuts_of[ranks], num_ranks, num_microbatches)
            if memory_cap_bytes is None or found.peak_bytes <= memory_cap_bytes:
                candidates.append(found)
    return sorted(candidates, key=lambda one: (one.step_seconds, one.peak_bytes, one.num_virtual, one.name))


def allowed(num_virtual: int) -> list[Callable[..., Schedule]]:
    """What makes schedules with so many stages on a rank.

    Args:
        num_virtual: Stages on each rank.

    Returns:
        Functions of `generators`. Those that differ in nothing come once.
    """
    given: list[Callable[..., Schedule]] = [gpipe, one_f_one_b if num_virtual == 1 else interleaved]
    return [*given, fast_forward, zero_bubble, *([zbv] if num_virtual == 2 else [])]


def fastest(
    make: Callable[..., Schedule],
    layers: Sequence[StageCosts],
    sends: Sequence[Send],
    cuts: Sequence[tuple[range, ...]],
    num_ranks: int,
    num_microbatches: int,
) -> Candidate:
    """One schedule over the best cut for it.

    Args:
        make: The function of `generators` that makes it.
        layers: What one microbatch takes in each layer.
        sends: From each layer to the next.
        cuts: The layers of each stage, with as many stages for each rank; the first one wins if steps are equal.
        num_ranks: That share the model.
        num_microbatches: Of a batch.

    Returns:
        What takes least.

    Raises:
        ValueError: There is no cut, or the schedule does not allow so many stages on a rank.
    """
    found: Candidate | None = None
    for stages in cuts:
        costs = [together(layers[stage.start : stage.stop]) for stage in stages]
        ranks = placement(make.__name__, num_ranks, len(stages) // num_ranks)
        if found is None or num_microbatches * _busiest(costs, ranks) < found.step_seconds:
            stage_sends = [sends[stage.stop - 1] for stage in stages[:-1]]
            options = {"costs": costs, "send_seconds": stage_sends} if make in _FILLED else {}
            schedule = make(num_ranks, num_microbatches, len(stages) // num_ranks, **options)
            timeline = simulate(schedule, costs, stage_sends)
            if found is None or timeline.step_seconds < found.step_seconds:
                facts = (timeline.step_seconds, timeline.bubble_ratio, max(timeline.peak_bytes))
                found = Candidate(make.__name__, len(stages) // num_ranks, *facts, stages, schedule)
    if found is None:
        raise ValueError("There are no cuts; expected at least one.")
    return found


def _busiest(costs: Sequence[StageCosts], stage_to_rank: Sequence[int]) -> float:
    """What the rank with most to do computes for a microbatch."""
    loads = [0.0] * (max(stage_to_rank) + 1)
    for rank, cost in zip(stage_to_rank, costs, strict=True):
        loads[rank] += cost.compute_seconds
    return max(loads)


def together(layers: Sequence[StageCosts]) -> StageCosts:
    """The costs of layers that are one stage.

    Args:
        layers: One after the other.

    Returns:
        Their sums; the overhead is that of one.
    """
    return StageCosts(
        sum(one.forward_seconds for one in layers),
        sum(one.input_grad_seconds for one in layers),
        sum(one.weight_grad_seconds for one in layers),
        sum(one.activation_bytes for one in layers),
        sum(one.deferred_bytes for one in layers),
        max((one.overhead_seconds for one in layers), default=0.0),
    )
