"""Where weight gradients go: list scheduling into the time in which a rank would wait. Pure.

Forwards and input gradients come in a given order on each rank, since other ranks wait for them. Nobody waits for a
weight gradient, so it goes where there is nothing else to do, or where memory asks for it::

    given     rank 0   F0 F1 .  I0 .  I1
              rank 1   .  F0 I0 F1 I1
    filled    rank 0   F0 F1 .  I0 W0 I1 W1       I1 has not arrived when I0 is done: W0 fills the wait
              rank 1   .  F0 I0 F1 I1 W0 W1       the first rank waits for I: it comes before any W

Each stage's weight gradients come in the order of its input gradients, so that sums over microbatches stay the same bit
for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.action import Action
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.simulate import Clock, Sends, StageCosts
from lightning_gpufeed.pipeline.validate import in_order

__all__ = ["MemoryRule", "fill"]

_PATIENCES = (0.5, 1.0, 0.0, 0.25, 0.75)
"""A wait that is too short for a weight gradient is filled all the same if it has at least this share of its length. No
share is best for all costs."""
_UNIT = 1e-9
"""Steps are told apart down to this share of one."""


class MemoryRule(NamedTuple):
    """What asks for a weight gradient before there is time for it.

    Attributes:
        max_live: Most activations that a rank may hold, from their forward to their weight gradient; None for no limit.
        max_waiting: For each stage, most weight gradients that may wait at a time; None for no limit on one, empty for
            none on any.
    """

    max_live: int | None = None
    max_waiting: tuple[int | None, ...] = ()


@dataclass
class _Rank:
    """How far a rank is.

    Attributes:
        given: Its forwards and input gradients.
        place: Of the next of these.
        free_seconds: When it is done with what it does.
        num_live: Activations that it holds.
        waiting: Its weight gradients that wait, the oldest first.
        taken: What it has done.
    """

    given: Sequence[Action]
    place: int = 0
    free_seconds: float = 0.0
    num_live: int = 0
    waiting: list[Action] = field(default_factory=list)
    taken: list[Action] = field(default_factory=list)

    def take(self, action: Action, end: float) -> None:
        """Note that an action is done."""
        self.free_seconds = end
        self.taken.append(action)
        if action.kind == "W":
            self.waiting.remove(action)
            self.num_live -= 1
            return
        self.place += 1
        if action.kind == "F":
            self.num_live += 1
        else:
            self.waiting.append(Action(action.stage, "W", action.microbatch))


def fill(
    given: Sequence[Sequence[Action]],
    stage_to_rank: Sequence[int],
    num_microbatches: int,
    rule: MemoryRule,
    costs: StageCosts | Sequence[StageCosts],
    send_seconds: Sends = 0.0,
) -> Schedule:
    """Give every weight gradient a place.

    Args:
        given: For each rank its forwards and input gradients, in an order that can be carried out.
        stage_to_rank: The rank of each stage.
        num_microbatches: Of a batch.
        rule: What memory allows.
        costs: Of each stage, or of every stage. Only how they compare matters.
        send_seconds: From each stage to the next, or from every stage.

    Returns:
        The schedule with the shortest step of those that differ in which waits are long enough.

    Raises:
        ValueError: The costs are not those of the stages.
        ScheduleError: The given order would hang, or holds more activations than the rule allows.

    Source:
        The rule, and to try several, is the heuristic of Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, 3.1.

    Example:
        >>> given = [[Action.parse(word) for word in line.split()] for line in ("0F0 0F1 0I0 0I1", "1F0 1I0 1F1 1I1")]
        >>> print(fill(given, (0, 1), 2, MemoryRule(), StageCosts()))
        2 microbatches; stages on ranks 0 1
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    best: Schedule | None = None
    least = 0.0
    for patience in _PATIENCES:
        filler = _Filler(given, stage_to_rank, rule, Clock(stage_to_rank, costs, send_seconds), patience)
        ranks = filler.run()
        if any(rank.place < len(rank.given) for rank in ranks):
            deque(in_order(Schedule(tuple(map(tuple, given)), tuple(stage_to_rank), num_microbatches)))  # raises
        step_seconds = max((rank.free_seconds for rank in ranks), default=0.0)
        if best is None or step_seconds < least * (1 - _UNIT):
            taken = tuple(tuple(rank.taken) for rank in ranks)
            best, least = Schedule(taken, tuple(stage_to_rank), num_microbatches), step_seconds
        if filler.is_exact:
            break
    assert best is not None
    return best


class _Filler:
    """All ranks, event after event."""

    def __init__(
        self,
        given: Sequence[Sequence[Action]],
        stage_to_rank: Sequence[int],
        rule: MemoryRule,
        clock: Clock,
        patience: float,
    ) -> None:
        """Begin a step."""
        self._ranks = [_Rank(actions) for actions in given]
        self._stage_to_rank, self._rule, self._clock, self._patience = stage_to_rank, rule, clock, patience
        self.is_exact = True
        """No wait was shorter than what would fill it, so that patience made no difference."""

    def run(self) -> list[_Rank]:
        """Take one action at a time, always one that begins first."""
        choices = [self._choice(rank) for rank in self._ranks]
        begins = [(choice[0], index) for index, choice in enumerate(choices) if choice]
        heapify(begins)
        while begins:
            begin, index = heappop(begins)
            choice = choices[index]
            if choice is None or choice[0] != begin:  # the rank has chosen anew since
                continue
            action = choice[1]
            self._ranks[index].take(action, self._clock.run(action, begin))
            receiver = self._receiver(action)
            for touched in (index,) if receiver is None or receiver == index else (index, receiver):
                choice = choices[touched] = self._choice(self._ranks[touched])
                if choice is not None:
                    heappush(begins, (choice[0], touched))
        return self._ranks

    def _receiver(self, action: Action) -> int | None:
        """The rank that waits for it, if one does."""
        stage, kind, microbatch = action
        other = stage + (1 if kind == "F" else -1)
        if kind == "W" or not 0 <= other < len(self._stage_to_rank):
            return None
        rank = self._ranks[self._stage_to_rank[other]]
        waits_for_it = rank.place < len(rank.given) and rank.given[rank.place] == (other, kind, microbatch)
        return self._stage_to_rank[other] if waits_for_it else None

    def _choice(self, rank: _Rank) -> tuple[float, Action] | None:
        """What a rank does next, and when it begins; None while that is not known, or when it is done."""
        free, oldest = rank.free_seconds, rank.waiting[0] if rank.waiting else None
        if rank.place == len(rank.given):
            return None if oldest is None else (free, oldest)
        action = rank.given[rank.place]
        asked = self._asked_for(rank, action)
        if asked is not None:
            return free, asked
        ready = self._clock.ready_seconds(action)
        if ready is not None and ready <= free:
            return free, action
        if oldest is None:
            return None if ready is None else (ready, action)
        if ready is not None:
            lasts = self._clock.seconds["W"][oldest.stage]
            if ready - free < lasts * (1 - _UNIT):
                self.is_exact = False
            if ready - free < lasts * self._patience:
                return ready, action
        return free, oldest

    def _asked_for(self, rank: _Rank, action: Action) -> Action | None:
        """The weight gradient that has to be done before an action, for memory."""
        if action.kind == "F":
            if self._rule.max_live is None or rank.num_live < self._rule.max_live:
                return None
            if not rank.waiting:
                raise ScheduleError(
                    f"{action} comes while its rank holds {rank.num_live} activations; expected at most "
                    f"{self._rule.max_live} with it. Put an input gradient before it, or allow more."
                )
            return rank.waiting[0]
        cap = self._rule.max_waiting[action.stage] if self._rule.max_waiting else None
        if cap is None:
            return None
        own = [one for one in rank.waiting if one.stage == action.stage]
        return own[0] if len(own) >= cap else None
