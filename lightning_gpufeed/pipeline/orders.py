"""Orders of forwards and backwards on one rank, as they are given and not searched. Pure.

::

    breadth first   stage after stage:            F0 F1 F2 of one stage, F0 F1 F2 of the next ...
    depth first     microbatch after microbatch:  F0 of all of the rank's stages, F1 of all ...
    alternating     some forwards, then a forward and a backward in turn, then the backwards that are left
    along a V       likewise, over both sides of the V
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpufeed.pipeline.action import Action, Kind

__all__ = ["along_a_v", "alternating", "breadth_first", "depth_first", "groups"]


def breadth_first(stages: Sequence[int], num_microbatches: int, backward: Kind) -> list[Action]:
    """All forwards and then all backwards; all microbatches through one stage before the next.

    Args:
        stages: Of the rank, in the order of the model.
        num_microbatches: Of a batch.
        backward: "B", or "I" where weight gradients are put elsewhere.

    Returns:
        The rank's actions.

    Example:
        >>> " ".join(map(str, breadth_first([0, 2], 2, "B")))
        '0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1'
    """
    forwards = [Action(stage, "F", i) for stage in stages for i in range(num_microbatches)]
    return forwards + [Action(stage, backward, i) for stage in reversed(stages) for i in range(num_microbatches)]


def depth_first(stages: Sequence[int], num_microbatches: int, backward: Kind) -> list[Action]:
    """All forwards and then all backwards; one microbatch through all stages before the next.

    Args:
        stages: Of the rank, next to each other in the model.
        num_microbatches: Of a batch.
        backward: "B", or "I" where weight gradients are put elsewhere.

    Returns:
        The rank's actions.

    Example:
        >>> " ".join(map(str, depth_first([0, 1], 2, "B")))
        '0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1'
    """
    forwards = [Action(stage, "F", i) for i in range(num_microbatches) for stage in stages]
    return forwards + [Action(stage, backward, i) for i in range(num_microbatches) for stage in reversed(stages)]


def groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Microbatches that go through one stage of a rank before its next: as many as ranks, a few more where needed.

    With fewer than ranks in a group, a rank would wait for what it has just sent to come round.

    Args:
        num_ranks: That share the model.
        num_microbatches: Of a batch.

    Returns:
        The groups, in order; their sizes differ by one at most. One group if there are fewer microbatches than ranks.

    Example:
        >>> groups(4, 11)
        [range(0, 5), range(5, 11)]
    """
    count = max(1, num_microbatches // num_ranks)
    return [range(num_microbatches * i // count, num_microbatches * (i + 1) // count) for i in range(count)]


def alternating(
    stages: Sequence[int], num_ranks: int, num_microbatches: int, backward: Kind, num_ahead: int
) -> list[Action]:
    """Forwards until the first backward can come, then a forward and a backward in turn, then the other backwards.

    Args:
        stages: Of the rank, in the order of the model.
        num_ranks: That share the model.
        num_microbatches: Of a batch.
        backward: "B", or "I" where weight gradients are put elsewhere.
        num_ahead: Forwards that go ahead because of the ranks behind this one.

    Returns:
        The rank's actions.

    Example:
        >>> " ".join(map(str, alternating([0], 2, 3, "B", num_ahead=1)))
        '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    parts = groups(num_ranks, num_microbatches)
    forwards = [Action(stage, "F", i) for group in parts for stage in stages for i in group]
    backwards = [Action(stage, backward, i) for group in parts for stage in reversed(stages) for i in group]
    first = min(len(forwards), (len(stages) - 1) * max(map(len, parts)) + num_ahead)
    turns = zip(forwards[first:], backwards, strict=False)
    return [*forwards[:first], *(action for turn in turns for action in turn), *backwards[len(forwards) - first :]]


def along_a_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Forwards and input gradients of the stages `rank` and `2 num_ranks - 1 - rank`, on both sides of a V.

    Args:
        rank: From 0.
        num_ranks: That share the model.
        num_microbatches: Of a batch. The pattern fills all ranks with twice as many as ranks, less one; for fewer it is
            made for that many, and those that there are not are left out.

    Returns:
        The rank's actions.

    Example:
        >>> " ".join(map(str, along_a_v(1, 2, 3)))
        '1F0 2F0 1F1 2F1 2I0 1F2 1I0 2F2 2I1 1I1 2I2 1I2'
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    to_loss = num_ranks - rank
    count = max(2 * num_ranks - 1, num_microbatches)
    num_started = 2 * num_ranks - rank - 1  # forwards on the way down before the first backward on it
    turn = [(up, "F"), (up, "I")]
    pattern = [(down, "F")] * (2 * to_loss - 1)
    pattern += [(up, "F"), (down, "F")] * rank + turn * to_loss
    pattern += [(down, "F"), (down, "I"), *turn] * (count - num_started)
    pattern += [(down, "I"), *turn] * (num_started - num_ranks)
    pattern += [(down, "I"), (up, "I")] * rank + [(down, "I")] * to_loss
    return [action for action in _numbered(pattern) if action.microbatch < num_microbatches]


def _numbered(pattern: Sequence[tuple[int, str]]) -> list[Action]:
    """The first F of a stage is that of microbatch 0, and so on."""
    counts: dict[tuple[int, str], int] = {}
    actions = []
    for stage, kind in pattern:
        place = counts[stage, kind] = counts.get((stage, kind), -1) + 1
        actions.append(Action(stage, "F" if kind == "F" else "I", place))
    return actions
