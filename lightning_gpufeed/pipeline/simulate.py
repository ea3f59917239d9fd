"""What a step with a schedule takes, and what is where in it. Pure.

A rank takes its actions in order, and begins one as soon as the rank is free and what the action needs has arrived.
What a stage computes arrives at the next rank `send_seconds` later, and a rank goes on meanwhile. Messages do not hold
up each other, unless a `Send` says for how long one takes the link of its rank::

    rank 0   F0 F1 .  .  .  .  B0 .. B1 ..
    rank 1   .  F0 B0 .. F1 B1 ..

An activation is in memory from the begin of its F until the end of its W (or B): all of it up to the end of the input
gradient, then what the weight gradient needs of it, `deferred_bytes`. Where that is 0, it is gone with the input
gradient, and is not counted any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpufeed.pipeline.action import Action
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.validate import in_order

__all__ = ["Clock", "Send", "Sends", "Span", "StageCosts", "Timeline", "check_numbers", "each_send", "simulate"]


def check_numbers(numbers: Mapping[str, float]) -> None:
    """Make sure that times and sizes are some.

    Args:
        numbers: By name.

    Raises:
        ValueError: One is negative or no finite number.
    """
    for name, value in numbers.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; expected a finite number, at least 0.")


@dataclass(frozen=True)
class Send:
    """What a message takes.

    Attributes:
        latency_seconds: From its end on the sender's side until it is there; others go on meanwhile.
        link_seconds: That it takes the link of the rank that sends it: others wait.
        host_seconds: That either rank is busy with it, and computes nothing.
    """

    latency_seconds: float = 0.0
    link_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a message that waits for no other."""
        return self.latency_seconds + self.link_seconds


Sends = float | Send | Sequence[float | Send]
"""From each stage to the next, or from every stage; a number is a latency alone."""


def each_send(sends: Sends, num_borders: int) -> list[Send]:
    """One for each border between stages.

    Args:
        sends: One for each, or one for all.
        num_borders: Between stages, or layers.

    Returns:
        So many.

    Raises:
        ValueError: There are not so many, or a time is negative or not finite.
    """
    given = [sends] * num_borders if isinstance(sends, int | float | Send) else list(sends)
    found = [one if isinstance(one, Send) else Send(one) for one in given]
    times = [seconds for one in found for seconds in vars(one).values()]
    if len(found) != num_borders or not all(one >= 0 and math.isfinite(one) for one in times):
        raise ValueError(
            f"send_seconds is {sends}; expected finite numbers, at least 0: one for each of the {num_borders} borders "
            "between stages, or one for all."
        )
    return found


@dataclass(frozen=True)
class StageCosts:
    """What one microbatch takes in one stage. Without numbers: one second for each pass, one byte for an activation.

    Attributes:
        forward_seconds: Of a forward.
        input_grad_seconds: Of an input gradient; 0 where nobody needs it, as in the first stage.
        weight_grad_seconds: Of a weight gradient. A full backward takes the sum of both.
        activation_bytes: What forward keeps for backward.
        deferred_bytes: What has to be kept after the input gradient, for the weight gradient.
        overhead_seconds: What any action takes beside, however small the stage is.
    """

    forward_seconds: float = 1.0
    input_grad_seconds: float = 1.0
    weight_grad_seconds: float = 1.0
    activation_bytes: int = 1
    deferred_bytes: int = 1
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: One is negative or no finite number.
        """
        check_numbers(vars(self))

    @property
    def compute_seconds(self) -> float:
        """All that a stage computes for a microbatch."""
        return self.forward_seconds + self.input_grad_seconds + self.weight_grad_seconds


@dataclass(frozen=True)
class Span:
    """An action in time.

    Attributes:
        rank: Who computes it.
        action: What is computed.
        begin: Seconds from the begin of the step.
        end: Likewise.
    """

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        spans: Rank after rank, each in order.
        step_seconds: From the begin of the first action to the end of the last.
        busy_seconds: Of each rank, that it computes.
        peak_activations: Of each rank, most activations at a time: one is that of one stage and one microbatch.
        peak_bytes: Of each rank, most bytes of activations at a time.
        num_virtual: Most stages that a rank has.
    """

    spans: tuple[Span, ...]
    step_seconds: float
    busy_seconds: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    num_virtual: int

    @property
    def ideal_seconds(self) -> float:
        """No order is faster: all that the busiest rank computes."""
        return max(self.busy_seconds, default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """Idle share of all ranks over the step."""
        whole = self.step_seconds * len(self.busy_seconds)
        return 1.0 - sum(self.busy_seconds) / whole if whole else 0.0


class Clock:
    """When actions end, as far as that is known."""

    def __init__(
        self,
        stage_to_rank: Sequence[int],
        costs: StageCosts | Sequence[StageCosts],
        send_seconds: Sends = 0.0,
    ) -> None:
        """Begin a step.

        Args:
            stage_to_rank: The rank of each stage.
            costs: Of each stage, or of every stage.
            send_seconds: From each stage to the next, or from every stage.

        Raises:
            ValueError: There are not as many costs as stages, or a time is negative or not finite.
        """
        num_stages = self._num_stages = len(stage_to_rank)
        of_stage = [costs] * num_stages if isinstance(costs, StageCosts) else list(costs)
        if len(of_stage) != num_stages:
            raise ValueError(f"There are costs of {len(of_stage)} stages; expected {num_stages}, or one for all.")
        self._stage_to_rank = tuple(stage_to_rank)
        self._sends = each_send(send_seconds, max(0, num_stages - 1))
        self._link_free: dict[int, float] = {}
        self.seconds = {
            "F": [one.overhead_seconds + one.forward_seconds for one in of_stage],
            "I": [one.overhead_seconds + one.input_grad_seconds for one in of_stage],
            "W": [one.overhead_seconds + one.weight_grad_seconds for one in of_stage],
            "B": [one.overhead_seconds + one.input_grad_seconds + one.weight_grad_seconds for one in of_stage],
        }
        host = [self._host_seconds(stage) for stage in range(num_stages)]
        self._lasts = {
            kind: [one + (0.0 if kind == "W" else other) for one, other in zip(seconds, host, strict=True)]
            for kind, seconds in self.seconds.items()
        }
        self.costs = tuple(of_stage)
        self._ends: dict[Action, float] = {}
        self._arrivals: dict[Action, float] = {}

    def ready_seconds(self, action: Action) -> float | None:
        """When all that an action needs has arrived.

        Args:
            action: Any.

        Returns:
            Seconds from the begin of the step; None if something that it needs was not run.
        """
        ready = 0.0
        for needed in action.needs(self._num_stages):
            known = self._ends if needed.stage == action.stage else self._arrivals
            end = known.get(needed)
            if end is None:
                return None
            ready = max(ready, end)
        return ready

    def run(self, action: Action, begin: float) -> float:
        """Note that an action begins.

        Args:
            action: Not run before.
            begin: Seconds from the begin of the step.

        Returns:
            When it ends.
        """
        end = begin + self._lasts[action.kind][action.stage]
        for part in action.parts:
            self._ends[part] = end
        if action.kind != "W":
            self._send(action.parts[0], end)
        return end

    def _host_seconds(self, stage: int) -> float:
        """Of the messages before and after a forward or an input gradient, which are between the same stages."""
        others = [other for other in (stage - 1, stage + 1) if 0 <= other < self._num_stages]
        return sum(
            self._sends[min(stage, other)].host_seconds
            for other in others
            if self._stage_to_rank[stage] != self._stage_to_rank[other]
        )

    def _send(self, part: Action, end: float) -> None:
        """Note when the next stage has what was computed."""
        stage, other = part.stage, part.stage + (1 if part.kind == "F" else -1)
        arrival = end
        if 0 <= other < self._num_stages and self._stage_to_rank[stage] != self._stage_to_rank[other]:
            send, rank = self._sends[min(stage, other)], self._stage_to_rank[stage]
            if send.link_seconds:
                arrival = self._link_free[rank] = max(end, self._link_free.get(rank, 0.0)) + send.link_seconds
            arrival += send.latency_seconds
        self._arrivals[part] = arrival


def simulate(schedule: Schedule, costs: StageCosts | Sequence[StageCosts], send_seconds: Sends = 0.0) -> Timeline:
    r"""What a step with a schedule looks like.

    Args:
        schedule: One that `validate` accepts.
        costs: Of each stage, or of every stage.
        send_seconds: From each stage to the next, forward and backward, or from every stage. Counts as 0 between stages
            on one rank.

    Returns:
        The step.

    Raises:
        ValueError: The costs are not those of the schedule's stages.
        ScheduleError: Ranks wait for each other.

    Example:
        >>> schedule = Schedule.parse("2 microbatches; stages on ranks 0 1\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
        >>> timeline = simulate(schedule, StageCosts())
        >>> timeline.step_seconds, timeline.ideal_seconds, timeline.peak_activations
        (9.0, 6.0, (2, 1))
        >>> round(timeline.bubble_ratio, 3)
        0.333
    """
    clock = Clock(schedule.stage_to_rank, costs, send_seconds)
    free = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    for rank, action in in_order(schedule):
        begin = max(free[rank], clock.ready_seconds(action) or 0.0)
        free[rank] = clock.run(action, begin)
        spans[rank].append(Span(rank, action, begin, free[rank]))
    peaks = [_peaks(actions, clock.costs) for actions in schedule.ranks]
    return Timeline(
        spans=tuple(span for of_rank in spans for span in of_rank),
        step_seconds=max(free, default=0.0),
        busy_seconds=tuple(sum(clock.seconds[one.kind][one.stage] for one in actions) for actions in schedule.ranks),
        peak_activations=tuple(count for count, _ in peaks),
        peak_bytes=tuple(size for _, size in peaks),
        num_virtual=schedule.num_virtual,
    )


def _peaks(actions: Sequence[Action], costs: Sequence[StageCosts]) -> tuple[int, int]:
    """Most activations and most bytes of them at a time on a rank."""
    count = size = most = most_bytes = 0
    for action in actions:
        stage = costs[action.stage]
        if action.kind == "F":
            count, size = count + 1, size + stage.activation_bytes
        most, most_bytes = max(most, count), max(most_bytes, size)
        if action.kind == "B":
            count, size = count - 1, size - stage.activation_bytes
        elif action.kind == "I":
            count -= not stage.deferred_bytes
            size += stage.deferred_bytes - stage.activation_bytes
        elif action.kind == "W":
            count -= bool(stage.deferred_bytes)
            size -= stage.deferred_bytes
    return most, most_bytes
