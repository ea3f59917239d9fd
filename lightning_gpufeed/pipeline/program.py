"""What a rank does in a step, and which messages arrive in which order. Pure: made from a schedule alone.

::

    schedule        rank 0   0F0 0F1 .   0I0 0W0 0I1 0W1
                    rank 1   1F0 1F1 1I0 1I1 1W0 1W1

    rank 0 sends    F1.0 F1.1                   a message is named by what it is for: stage 1's forward of microbatch 0
    rank 1 sends    I0.0 I0.1

Each rank computes from the schedule in which order another one sends, so both ends of a link post the same messages in
the same order, and nothing has to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_gpufeed.pipeline.action import Action
from lightning_gpufeed.pipeline.schedule import Schedule

__all__ = [
    "Message",
    "Program",
    "Step",
    "backward_program",
    "forward_only",
    "forward_program",
    "has_phases",
    "whole_program",
]


class Message(NamedTuple):
    """Activations or gradients on their way to another rank.

    Attributes:
        source: Who sends it.
        target: Who receives it.
        is_grad: Whether it is a gradient.
        stage: That it is for.
        microbatch: That it is of.
    """

    source: int
    target: int
    is_grad: bool
    stage: int
    microbatch: int

    @property
    def border(self) -> int:
        """The stage that has computed the activations, or whose they are the gradients of."""
        return self.stage if self.is_grad else self.stage - 1


class Step(NamedTuple):
    """An action of a rank.

    Attributes:
        action: What is computed.
        needs: What has to arrive for it from another rank.
        gives: What another rank gets afterwards.
        ends_stage: Whether all weight gradients of the stage are there afterwards.
    """

    action: Action
    needs: Message | None
    gives: Message | None
    ends_stage: bool


@dataclass(frozen=True)
class Program:
    """What all ranks do, one after the other.

    Attributes:
        ranks: For each rank its actions, in order.
        stage_to_rank: The rank of each stage.
        num_microbatches: Of the batch.
    """

    ranks: tuple[tuple[Action, ...], ...]
    stage_to_rank: tuple[int, ...]
    num_microbatches: int

    def needs(self, action: Action) -> Message | None:
        """What has to arrive from another rank before an action.

        Args:
            action: Any.

        Returns:
            A message; None if there is none, or the rank has it itself.
        """
        stage, kind, microbatch = action
        if kind == "F" and stage > 0:
            return self._message(stage - 1, stage, microbatch, is_grad=False)
        if kind in "IB" and stage + 1 < len(self.stage_to_rank):
            return self._message(stage + 1, stage, microbatch, is_grad=True)
        return None

    def gives(self, action: Action) -> Message | None:
        """What another rank gets after an action.

        Args:
            action: Any.

        Returns:
            A message; None if nobody else waits for it.
        """
        stage, kind, microbatch = action
        if kind == "F" and stage + 1 < len(self.stage_to_rank):
            return self._message(stage, stage + 1, microbatch, is_grad=False)
        if kind in "IB" and stage > 0:
            return self._message(stage, stage - 1, microbatch, is_grad=True)
        return None

    def _message(self, of: int, to: int, microbatch: int, *, is_grad: bool) -> Message | None:
        source, target = self.stage_to_rank[of], self.stage_to_rank[to]
        return None if source == target else Message(source, target, is_grad, to, microbatch)

    @cached_property
    def last_of_stage(self) -> frozenset[Action]:
        """After which actions all weight gradients of a stage are there."""
        last: dict[int, Action] = {}
        for actions in self.ranks:
            for action in actions:
                if action.kind in "WB":
                    last[action.stage] = action
        return frozenset(last.values())

    def steps(self, rank: int) -> tuple[Step, ...]:
        """What a rank does, with what that takes and gives.

        Args:
            rank: Whose.

        Returns:
            In order; made once.
        """
        if rank not in self._steps:
            self._steps[rank] = tuple(
                Step(one, self.needs(one), self.gives(one), one in self.last_of_stage) for one in self.ranks[rank]
            )
        return self._steps[rank]

    @cached_property
    def _steps(self) -> dict[int, tuple[Step, ...]]:
        return {}

    @cached_property
    def _arrivals(self) -> dict[int, dict[int, tuple[Message, ...]]]:
        return {}

    def arrivals(self, rank: int) -> dict[int, tuple[Message, ...]]:
        """All that a rank gets.

        Args:
            rank: Who receives.

        Returns:
            For each sender the messages in the order in which it sends them; made once.
        """
        if rank not in self._arrivals:
            self._arrivals[rank] = self._find_arrivals(rank)
        return self._arrivals[rank]

    def _find_arrivals(self, rank: int) -> dict[int, tuple[Message, ...]]:
        found: dict[int, list[Message]] = {}
        for actions in self.ranks:
            for action in actions:
                message = self.gives(action)
                if message is not None and message.target == rank:
                    found.setdefault(message.source, []).append(message)
        return {source: tuple(messages) for source, messages in found.items()}


def has_phases(schedule: Schedule) -> bool:
    """Whether no rank begins a backward before it has done all its forwards.

    Args:
        schedule: Any.

    Returns:
        True for gpipe and fast_forward: the loss may be that of the whole batch.
    """
    for actions in schedule.ranks:
        kinds = [action.kind == "F" for action in actions]
        if kinds != sorted(kinds, reverse=True):
            return False
    return True


def whole_program(schedule: Schedule) -> Program:
    """The schedule as it is.

    Args:
        schedule: Any.

    Returns:
        All its actions.
    """
    return Program(schedule.ranks, schedule.stage_to_rank, schedule.num_microbatches)


def forward_program(schedule: Schedule) -> Program:
    """Its forwards alone, in its order.

    Args:
        schedule: Any that can be carried out: then so can this, as forwards wait for forwards only.

    Returns:
        The actions.
    """
    return _those(schedule, lambda action: action.kind == "F")


def backward_program(schedule: Schedule) -> Program:
    """All but its forwards, in its order.

    Args:
        schedule: Any that can be carried out.

    Returns:
        The actions.
    """
    return _those(schedule, lambda action: action.kind != "F")


def _those(schedule: Schedule, is_wanted: Callable[[Action], bool]) -> Program:
    ranks = tuple(tuple(filter(is_wanted, actions)) for actions in schedule.ranks)
    return Program(ranks, schedule.stage_to_rank, schedule.num_microbatches)


def forward_only(stage_to_rank: Sequence[int], num_microbatches: int, num_ranks: int) -> Program:
    """A forward without a backward, as in validation.

    Args:
        stage_to_rank: The rank of each stage.
        num_microbatches: Of the batch.
        num_ranks: Of the pipeline; some may have no stage.

    Returns:
        The actions: each stage with all microbatches before the next stage; microbatch after microbatch if the stages
        of a rank follow each other.
    """
    stages = range(len(stage_to_rank))
    if list(stage_to_rank) == sorted(stage_to_rank):
        order = [Action(stage, "F", i) for i in range(num_microbatches) for stage in stages]
    else:
        order = [Action(stage, "F", i) for stage in stages for i in range(num_microbatches)]
    ranks = tuple(tuple(one for one in order if stage_to_rank[one.stage] == rank) for rank in range(num_ranks))
    return Program(ranks, tuple(stage_to_rank), num_microbatches)
