"""Continues where another training was saved.

::

    saved inside an epoch         the loader's state before (or after) a batch; that batch may have to come again,
                                  and the first step is one in the middle of it
    saved when it was over        the loader's state after its last batch; the next epoch begins as it does after it
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_gpufeed.echo.plan import EchoRule, EchoTrace, Piece
from lightning_gpufeed.echo.position import Ending

if TYPE_CHECKING:
    from lightning_gpufeed.echo.loader import EchoLoader

__all__ = ["SavedRun", "read_trace"]


class SavedRun:
    """What another training saved, under a rule that may be another one.

    Attributes:
        piece: The first step to do; None if the epoch was over.
        num_counted: Passes over its batch that the length of the epoch counts.
        num_steps: Steps of the epoch that were done; None if that has no meaning here.
        extra_steps: Steps of the epoch beyond its usual length.
    """

    def __init__(self, state: Mapping[str, Any], rule: EchoRule) -> None:
        """Decide what was left open. Where only the next batch being ready decides, a new batch is begun.

        Args:
            state: From `EchoSession.state_dict`.
            rule: In force from now on.
        """
        place = state["place"]
        self.piece: Piece | None = None
        self.num_counted = 0
        self.num_steps: int | None = state["num_steps"]
        self.extra_steps: int = state["extra_steps"]
        self._settings: list[Any] = state["settings"]
        self._ending = Ending(**state["ending"])
        self._states = list(self._ending.states)
        self._begun = [True] * len(self._states)
        self._num_continued = 0
        if place is None:
            self.num_steps = None
            return
        piece = Piece(place["fetch"], place["pass_index"], place["piece_index"])
        needs_batch_again = place["needs_batch_again"]
        if not place["is_decided"]:
            needs_batch_again = rule.wants_pass(state["epoch"], piece.fetch, piece.pass_index) is True
            piece = piece if needs_batch_again else piece.next_fetch()
        self.piece = piece
        self._states = list(place["before"] if needs_batch_again else place["after"])
        self._begun = place["begun"] if needs_batch_again else [True] * len(self._states)
        if needs_batch_again:
            self.num_counted = place["num_counted"]
            if rule.known_passes(state["epoch"], piece.fetch) is None:
                # Passes that were certain then are not now.
                self.num_counted = piece.pass_index + 1
                self.extra_steps -= (place["num_counted"] - self.num_counted) * place["num_pieces"]

    def continue_loader(self, wrapped: EchoLoader) -> None:
        """Have a loader begin where the other training stopped. Called once for each, in their order.

        Args:
            wrapped: The loader.
        """
        number, self._num_continued = self._num_continued, self._num_continued + 1
        loader, is_same = wrapped.loader, wrapped.settings in self._settings
        state = self._states[number] if number < len(self._states) else None
        has_state = state is not None and hasattr(loader, "load_state_dict")
        if self.piece is None:
            if has_state:
                loader.load_state_dict(state)
                wrapped.begin_after = self._ending.is_at_end[number]
            if not is_same and wrapped.num_batches is not None:
                # The finished epoch would have another number of steps now.
                self.extra_steps, self.num_steps = 0, wrapped.num_usual_steps(wrapped.num_batches)
            return
        num_fetches = self.piece.fetch
        if not has_state:
            # What is left of the passes is done over another batch, so that the number of steps stays what it was.
            warnings.warn(
                f"BatchEcho: the run was saved inside an epoch, but {type(loader).__name__} has no state_dict and "
                f"load_state_dict to continue with: the rest of this epoch uses its first batches again.",
                stacklevel=2,
            )
        elif self._begun[number] or self.piece.fetch > 0:
            loader.load_state_dict(state)
            wrapped.is_loaded = True
            if not self._begun[number]:  # one of several loaders, that began again inside the epoch
                wrapped.begin_after = True
            # A loader that counts its own batches may cut what is left of the epoch into other ones.
            num_fetches = getattr(getattr(loader, "position", None), "steps_done", num_fetches)
        elif number < len(self._ending.states):
            loader.load_state_dict(self._ending.states[number])
            wrapped.begin_after = self._ending.is_at_end[number]
        if not is_same or num_fetches != self.piece.fetch:
            # Other batches, or other passes over them: the batch that was worked on does not exist here.
            self.piece, self.num_counted = Piece(num_fetches), 0
            self.extra_steps, self.num_steps = 0, wrapped.num_usual_steps(num_fetches)


def read_trace(replay: str | Path | Mapping[int, Sequence[int]], state_key: str) -> EchoTrace:
    """A trace as it is given, or as a checkpoint holds it.

    Args:
        replay: The trace, or the path of a checkpoint. It is unpickled: give one that you trust.
        state_key: Under which the checkpoint has it.

    Returns:
        The trace.

    Raises:
        ValueError: There is none.
    """
    if isinstance(replay, Mapping):
        return EchoTrace(replay)
    checkpoint = torch.load(replay, map_location="cpu", weights_only=False)
    state = checkpoint.get("callbacks", {}).get(state_key)
    if not state:
        raise ValueError(f"replay is {str(replay)!r}, a checkpoint without the echoes of a BatchEcho to repeat.")
    trace = EchoTrace(state["trace"])
    if state["place"] is not None:
        trace.open_batch = (state["epoch"], state["place"]["fetch"])
    return trace
