"""Where in an epoch a training stands, and where another one continues. Pure.

::

    fetch 4 is on the device, pass 1 of 2 is done up to piece 0

                 before 4          after 4
    loader   ------|=================|------          the loader's own states
    steps          | 0,0  0,1  1,0  1,1 |             pass, piece
                               ^ continue: load "before 4", fetch it again, go on with pass 1, piece 1
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_gpufeed.echo.plan import EchoRule, Piece

__all__ = ["MANY", "Place", "Round", "SavedPlace", "warn_not_resumable"]

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
        after: State of each loader after it.
    """

    fetch: int
    num_counted: int = 0
    num_pieces: int = 0
    smallest: int = MANY
    before: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)


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
            "num_counted": self.latest.num_counted if self.piece.fetch == self.latest.fetch else 0,
            "is_decided": self.is_decided,
            "needs_batch_again": self.needs_batch_again,
            # A place that is decided needs one of the two.
            "before": self.latest.before if self.needs_batch_again or not self.is_decided else [],
            "after": [] if self.needs_batch_again else self.latest.after,
        }


class SavedPlace:
    """A place of another training, to be continued under a rule that may be another one.

    Attributes:
        piece: The first step to do.
        needs_batch_again: Whether its batch is one that was fetched before.
        num_counted: Passes over it that the length of the epoch counts.
        loader_states: State of each loader to begin with.
        settings: What the place depends on, of each loader.
    """

    def __init__(self, state: Mapping[str, Any], rule: EchoRule) -> None:
        """Decide what was left open.

        Args:
            state: With "place" from `Place.to_dict`, "epoch" and "settings".
            rule: In force from now on. Where only the next batch being ready decides, a new batch is begun.
        """
        place, epoch = state["place"], state["epoch"]
        self.settings: list[Any] = state["settings"]
        self.piece = Piece(place["fetch"], place["pass_index"], place["piece_index"])
        self.needs_batch_again: bool = place["needs_batch_again"]
        if not place["is_decided"]:
            self.needs_batch_again = rule.wants_pass(epoch, self.piece.fetch, self.piece.pass_index) is True
            self.piece = self.piece if self.needs_batch_again else self.piece.next_fetch()
        self.num_counted: int = place["num_counted"] if self.needs_batch_again else 0
        self.loader_states: list[Any] = list(place["before"] if self.needs_batch_again else place["after"])

    def begin_batch(self, fetch: int) -> None:
        """Give up the place inside a batch: what is left of it can no longer be told.

        Args:
            fetch: Number of the first batch to come.
        """
        self.piece = Piece(fetch)
        self.num_counted = 0


def warn_not_resumable(loader: Any) -> None:
    """Say that a loader cannot go on where a run was saved."""
    warnings.warn(
        f"the run was saved inside an epoch, but {type(loader).__name__} has no state_dict and load_state_dict to "
        f"continue with: the rest of this epoch uses its first batches again.",
        stacklevel=2,
    )
