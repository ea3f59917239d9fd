"""Where in an epoch a training stands. Pure.

::

    fetch 4 is on the device, pass 1 of 2 is done up to piece 0

                 before 4          after 4
    loader   ------|=================|------          the loader's own states
    steps          | 0,0  0,1  1,0  1,1 |             pass, piece
                               ^ continue: load "before 4", fetch it again, go on with pass 1, piece 1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_gpufeed.echo.plan import Piece

__all__ = ["MANY", "Ending", "Place", "Round"]

MANY = 2**62
"""No limit, as a number that ranks can vote on."""


@dataclass
class Round:
    """All steps on what was fetched together: a batch of each loader.

    Attributes:
        fetch: Its number in the epoch.
        num_counted: Passes that the length of the epoch counts; before it is fetched, 0 or what another training
            counted.
        num_pieces: Pieces of a pass, 0 while that is not settled.
        smallest: Samples of the smallest batch.
        before: State of each loader before it.
        begun: Whether each loader's iteration had begun before it; else that state is the one of the epoch before.
        after: State of each loader after it.
    """

    fetch: int
    num_counted: int = 0
    num_pieces: int = 0
    smallest: int = MANY
    before: list[Any] = field(default_factory=list)
    begun: list[bool] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)

    def next_round(self) -> Round:
        """The one after it. A loader that has no batch left for it stays where it is."""
        begun = [True] * len(self.after)
        return Round(self.fetch + 1, before=list(self.after), begun=begun, after=list(self.after))

    def keep_states(self, number: int, num_loaders: int, before: Any, is_begun: bool, after: Any) -> None:
        """Keep the states of one loader, with or without a batch left.

        Args:
            number: Which loader.
            num_loaders: Of so many.
            before: Before its batch.
            is_begun: Whether its iteration had begun then.
            after: After the batch.
        """
        if not self.before:
            self.before, self.begun, self.after = [None] * num_loaders, [True] * num_loaders, [None] * num_loaders
        self.before[number], self.begun[number], self.after[number] = before, is_begun, after


@dataclass(frozen=True)
class Place:
    """The first step that is not done yet.

    Attributes:
        piece: What it trains on.
        latest: The round that was fetched last.
        is_decided: False if whether its batch is used once more will depend on the next one being ready.
    """

    piece: Piece
    latest: Round
    is_decided: bool = True

    @property
    def needs_batch_again(self) -> bool:
        """Whether the batch fetched last has to be fetched again to go on."""
        return self.is_decided and self.piece.fetch == self.latest.fetch

    def loader_states(self) -> list[Any]:
        """State of each loader to go on with."""
        return self.latest.before if self.needs_batch_again else self.latest.after

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint.

        Returns:
            Plain numbers, and the states of the loaders.
        """
        return {
            "fetch": self.piece.fetch,
            "pass_index": self.piece.pass_index,
            "piece_index": self.piece.piece_index,
            "num_pieces": self.latest.num_pieces,
            "begun": self.latest.begun,
            "num_counted": self.latest.num_counted if self.piece.fetch == self.latest.fetch else 0,
            "is_decided": self.is_decided,
            "needs_batch_again": self.needs_batch_again,
            # A place that is decided needs one of the two.
            "before": self.latest.before if self.needs_batch_again or not self.is_decided else [],
            "after": [] if self.needs_batch_again else self.latest.after,
        }


@dataclass(frozen=True)
class Ending:
    """How far loaders were used when an epoch was over.

    Attributes:
        states: State of each loader after its last batch that was used.
        is_at_end: Whether each had no batch left; else the epoch was cut short there.
    """

    states: list[Any] = field(default_factory=list)
    is_at_end: list[bool] = field(default_factory=list)
