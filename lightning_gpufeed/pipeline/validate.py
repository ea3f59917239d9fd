"""Whether a schedule can be carried out. Pure.

Ranks are followed in the order that a schedule gives them, each as far as it comes without what another has not
computed yet. Where all of them stand still, the schedule would hang.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.action import Action
from lightning_gpufeed.pipeline.schedule import Schedule

__all__ = ["in_order", "validate"]

_PARTS = {"F": "F", "I": "I or B", "W": "W or B"}
_MOST_NAMED = 8
"""Ranks that stand still which a message names."""


def validate(schedule: Schedule) -> None:
    r"""Check that a schedule computes everything once, where it belongs, and in an order that ends.

    Args:
        schedule: To check.

    Raises:
        ScheduleError: An action is on the wrong rank, lacks or is there twice, comes before one that it needs, or ranks
            would wait for each other for ever.

    Example:
        >>> validate(Schedule.parse("1 microbatches; stages on ranks 0\n0F0 0I0"))
        Traceback (most recent call last):
        lightning_gpufeed.errors.ScheduleError: There is no 0W0; expected W or B of stage 0 and microbatch 0 on rank 0.
    """
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"Stage {stage} is on rank {rank}; expected 0 to {schedule.num_ranks - 1}, for which there are actions."
            )
    done: set[Action] = set()
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            _check_place(action, rank, schedule)
            _check_own_order(action, done, schedule)
            done.update(action.parts)
    for stage, rank in enumerate(schedule.stage_to_rank):
        for microbatch in range(schedule.num_microbatches):
            for kind in ("F", "I", "W"):
                if (stage, kind, microbatch) not in done:
                    raise ScheduleError(
                        f"There is no {stage}{kind}{microbatch}; expected {_PARTS[kind]} of stage {stage} and "
                        f"microbatch {microbatch} on rank {rank}."
                    )
    for _ in in_order(schedule):
        pass


def _check_place(action: Action, rank: int, schedule: Schedule) -> None:
    """Is the action one of this model and batch, and does its stage live on the rank?"""
    stage, _, microbatch = action
    if not 0 <= stage < schedule.num_stages:
        raise ScheduleError(
            f"{action} on rank {rank}: there is no stage {stage}; expected 0 to {schedule.num_stages - 1}."
        )
    if not 0 <= microbatch < schedule.num_microbatches:
        raise ScheduleError(
            f"{action} on rank {rank}: there is no microbatch {microbatch}; expected 0 to "
            f"{schedule.num_microbatches - 1}."
        )
    if schedule.stage_to_rank[stage] != rank:
        raise ScheduleError(
            f"{action} is on rank {rank}; expected rank {schedule.stage_to_rank[stage]}, which has stage {stage}."
        )


def _check_own_order(action: Action, done: set[Action], schedule: Schedule) -> None:
    """Not twice, and not before what the same stage has to compute first."""
    for part in action.parts:
        if part in done:
            raise ScheduleError(f"{action}: {part} is computed before already; expected once. Leave out this one.")
    for needed in action.needs(schedule.num_stages):
        if needed.stage == action.stage and needed not in done:
            raise ScheduleError(
                f"{action} comes before {needed} on rank {schedule.stage_to_rank[action.stage]}; expected after it."
            )


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """All actions in one order in which each comes after what it needs, and after those before it on its rank.

    Args:
        schedule: Any.

    Yields:
        Pairs of a rank and an action.

    Raises:
        ScheduleError: Ranks wait for each other, or for something that no rank computes.
    """
    places, num_stages = [0] * schedule.num_ranks, schedule.num_stages
    done: set[Action] = set()
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, actions in enumerate(schedule.ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                if not done.issuperset(action.needs(num_stages)):
                    break
                done.update(action.parts)
                places[rank] += 1
                has_moved = True
                yield rank, action
    stuck = [
        (rank, actions[places[rank]]) for rank, actions in enumerate(schedule.ranks) if places[rank] < len(actions)
    ]
    if stuck:
        waits = [
            f"rank {rank} at {action} for {' and '.join(str(one) for one in missing)}"
            for rank, action in stuck[:_MOST_NAMED]
            if (missing := [one for one in action.needs(num_stages) if one not in done])
        ]
        more = f", and {len(stuck) - _MOST_NAMED} more" if len(stuck) > _MOST_NAMED else ""
        raise ScheduleError(
            f"No rank can go on: {', '.join(waits)}{more}. Expected an order that ends; "
            f"put what another rank waits for earlier."
        )
