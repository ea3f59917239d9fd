"""What each rank of a pipeline computes in which order. Pure: a value.

Text form, for logs and other ranks: the number of microbatches and the rank of every stage; then one line per rank::

    2 microbatches; stages on ranks 0 1
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gpufeed.pipeline.action import Action

__all__ = ["Schedule"]

_NOTHING = "-"


@dataclass(frozen=True)
class Schedule:
    r"""The order of a step. Only a value: `validate` says whether it can be carried out.

    Attributes:
        ranks: For each rank its actions, in order. Only what is computed: a rank sends what it has computed to the rank
            of the stage that needs it, at once.
        stage_to_rank: The rank of each stage.
        num_microbatches: Of a batch.

    Example:
        >>> schedule = Schedule.parse("1 microbatches; stages on ranks 0 1 0\n0F0 2F0 2B0 0B0\n1F0 1B0")
        >>> schedule.num_ranks, schedule.num_stages, schedule.num_virtual
        (2, 3, 2)
        >>> schedule.ranks[1]
        (Action(stage=1, kind='F', microbatch=0), Action(stage=1, kind='B', microbatch=0))
        >>> Schedule.parse(str(schedule)) == schedule == Schedule.from_csv(schedule.to_csv())
        True
    """

    ranks: tuple[tuple[Action, ...], ...]
    stage_to_rank: tuple[int, ...]
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        """How many ranks share the model."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """How many parts the model is cut into."""
        return len(self.stage_to_rank)

    @property
    def num_virtual(self) -> int:
        """Most stages that a rank has."""
        return max(map(self.stage_to_rank.count, range(self.num_ranks)), default=0)

    def __str__(self) -> str:
        """The form that `parse` reads."""
        placement = " ".join(map(str, self.stage_to_rank)) or _NOTHING
        head = f"{self.num_microbatches} microbatches; stages on ranks {placement}"
        return "\n".join([head, *(" ".join(map(str, actions)) or _NOTHING for actions in self.ranks)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read the text form.

        Args:
            text: What `str` of a schedule gives.

        Returns:
            The schedule, equal to the one that was written.

        Raises:
            ValueError: The text is no schedule.
        """
        head, *lines = text.strip().split("\n")
        match = re.fullmatch(r"([0-9]+) microbatches; stages on ranks (-|[0-9]+(?: [0-9]+)*)", head.strip())
        if match is None:
            raise ValueError(
                f"{head[:60]!r} is not the first line of a schedule; expected such as "
                f"'4 microbatches; stages on ranks 0 1 0 1', and then a line of actions for each rank."
            )
        placement = () if match[2] == _NOTHING else tuple(map(int, match[2].split()))
        ranks = (() if line.strip() == _NOTHING else tuple(map(Action.parse, line.split())) for line in lines)
        return cls(tuple(ranks), placement, int(match[1]))

    def to_csv(self) -> str:
        """The text of a file that torch's pipeline runtime loads: a line per rank, a cell per action.

        Returns:
            CSV, in the form that torch calls "compute_only"; the runtime adds sends and receives itself.
        """
        file = io.StringIO()
        csv.writer(file).writerows(self.ranks)
        return file.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Schedule:
        """Read such a file. The placement and the number of microbatches are taken from the actions.

        Args:
            text: CSV as of `to_csv`. Empty cells, with which torch marks idle time, are left out.

        Returns:
            The schedule.

        Raises:
            ValueError: A cell is no action, or a stage in the middle of the model has none.
        """
        rows = csv.reader(io.StringIO(text, newline=""))
        ranks = tuple(tuple(Action.parse(cell) for cell in row if cell.strip()) for row in rows)
        return cls(ranks, _placement(ranks), 1 + max((one.microbatch for row in ranks for one in row), default=-1))


def _placement(ranks: Iterable[Iterable[Action]]) -> tuple[int, ...]:
    """The rank on which each stage is seen first."""
    found: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            found.setdefault(action.stage, rank)
    for stage in range(len(found)):
        if stage not in found:
            raise ValueError(
                f"There is no action of stage {stage}, but of stage {max(found)}; expected some of every stage."
            )
    return tuple(found[stage] for stage in range(len(found)))
