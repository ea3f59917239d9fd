"""Which piece of which batch each step trains on. Pure.

::

    echo_factor=2, num_splits=2, batches of 512

    step     0        1        2        3        4        5     ...
    fetch    0        0        0        0        1        1          the batch, numbered in its epoch
    pass     0        0        1        1        0        0          each a new permutation of the whole batch
    piece    0        1        0        1        0        1          256 samples each
             ^ fetched and copied to the device   ^

Source: Choi, Passos, Shallue, Dahl, "Faster Neural Network Training with Data Echoing" (arXiv 1907.05550), batch
echoing; the split into pieces is our addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "AdaptiveEcho",
    "EchoRule",
    "EchoTrace",
    "FixedEcho",
    "Piece",
    "ReplayedEcho",
    "pass_seed",
    "piece_bounds",
]


@dataclass(frozen=True)
class Piece:
    """What one step trains on.

    Attributes:
        fetch: Number of the batch in its epoch.
        pass_index: Which use of that batch.
        piece_index: Which part of the permuted batch.
        is_fetch: Whether the batch has to be fetched first.
    """

    fetch: int = 0
    pass_index: int = 0
    piece_index: int = 0
    is_fetch: bool = True

    @property
    def is_echo(self) -> bool:
        """Whether its samples were trained on before."""
        return self.pass_index > 0

    def fresh_steps(self, num_splits: int) -> int:
        """Steps of its epoch, up to it, on samples that were not trained on before."""
        return self.fetch * num_splits + (num_splits if self.is_echo else self.piece_index + 1)

    def next_piece(self) -> Piece:
        """The one after it in the same pass."""
        return Piece(self.fetch, self.pass_index, self.piece_index + 1, is_fetch=False)

    def next_pass(self) -> Piece:
        """The first one of the next pass."""
        return Piece(self.fetch, self.pass_index + 1, 0, is_fetch=False)

    def next_fetch(self) -> Piece:
        """The first one of the next batch."""
        return Piece(self.fetch + 1)


def piece_bounds(num_samples: int, num_pieces: int, piece_index: int) -> tuple[int, int]:
    """Which part of a permuted batch a piece is: disjoint, together all of it, of sizes that differ by one at most.

    Args:
        num_samples: In the batch.
        num_pieces: It is cut into.
        piece_index: From 0.

    Returns:
        First and one past the last position.
    """
    return num_samples * piece_index // num_pieces, num_samples * (piece_index + 1) // num_pieces


def pass_seed(seed: int, *numbers: int) -> int:
    """Seed of one permutation: the same for the same numbers, unrelated for others.

    Args:
        seed: Of the run.
        *numbers: Rank, epoch, fetch, pass and so on, none negative.

    Returns:
        0 to 2**63 - 1.
    """
    words = np.random.SeedSequence([seed, *numbers]).generate_state(2, np.uint32).tolist()
    return (int(words[0]) << 31) ^ int(words[1])


# When a batch is used once more ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedEcho:
    """Every batch is used `factor` times."""

    factor: int

    @property
    def usual_passes(self) -> int:
        """Passes that the length of an epoch is counted with."""
        return self.factor

    def known_passes(self, epoch: int, fetch: int) -> int | None:
        """How often a batch will be used, as far as that is known when it is fetched."""
        return self.factor

    def wants_pass(self, epoch: int, fetch: int, passes_done: int, unused: Sequence[int] = ()) -> bool | None:
        """Whether a batch is used once more; None if that depends on the next one being ready."""
        return passes_done < self.factor


@dataclass(frozen=True)
class AdaptiveEcho:
    """A batch is used again, up to `max_factor` times in all, while the next one is not ready.

    Of batches that come together, the last may use what the others left: on average the limit holds.
    """

    max_factor: int
    usual_passes = 1

    def known_passes(self, epoch: int, fetch: int) -> int | None:
        """How often a batch will be used, as far as that is known when it is fetched."""
        return None

    def wants_pass(self, epoch: int, fetch: int, passes_done: int, unused: Sequence[int] = ()) -> bool | None:
        """Whether a batch is used once more; None if that depends on the next one being ready."""
        # Passes that batches which came together with this one left unused.
        lent = max(0, sum(self.max_factor - passes for passes in unused))
        return None if passes_done < self.max_factor + lent else False


@dataclass(frozen=True)
class ReplayedEcho:
    """Every batch is used as often as a trace says; after its end, as another rule says."""

    trace: EchoTrace
    after: AdaptiveEcho
    usual_passes = 1

    def known_passes(self, epoch: int, fetch: int) -> int | None:
        """How often a batch will be used, as far as that is known when it is fetched."""
        return self.trace.passes_of(epoch, fetch)

    def wants_pass(self, epoch: int, fetch: int, passes_done: int, unused: Sequence[int] = ()) -> bool | None:
        """Whether a batch is used once more; None if that depends on the next one being ready."""
        passes = self.trace.passes_of(epoch, fetch)
        if passes is not None and passes_done < passes:
            return True
        is_open = passes is None or self.trace.open_batch == (epoch, fetch)
        return self.after.wants_pass(epoch, fetch, passes_done, unused) if is_open else False


_RECENT = 100


def _is_count(value: Any, smallest: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= smallest)


EchoRule = FixedEcho | AdaptiveEcho | ReplayedEcho


class EchoTrace:
    """How often each batch was used.

    Attributes:
        open_batch: Epoch and number of a batch that may have been used more often than recorded: the record was taken
            in the middle of it. None if there is none.

    Example:
        >>> trace = EchoTrace()
        >>> trace.add(epoch=0, fetch=0, passes=3)
        >>> trace.passes_of(0, 0), trace.passes_of(0, 1)
        (3, None)
    """

    def __init__(self, passes: Mapping[int, Sequence[int]] | None = None) -> None:
        """Take over a recorded trace.

        Args:
            passes: Epoch -> passes over each of its batches, in order.

        Raises:
            ValueError: It is something else.
        """
        self._passes: dict[int, list[int]] = {}
        self.open_batch: tuple[int, int] | None = None
        for epoch, numbers in passes.items() if isinstance(passes, Mapping) else [(-1, passes)] if passes else []:
            is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str | bytes)
            if not _is_count(epoch, 0) or not is_list or not all(_is_count(number, 1) for number in numbers):
                raise ValueError(
                    f"a trace is a dict of epoch -> list of passes over each batch, such as {{0: [1, 3, 2]}}; "
                    f"{passes!r} is none."
                )
            self._passes[int(epoch)] = [int(number) for number in numbers]

    def add(self, epoch: int, fetch: int, passes: int) -> None:
        """Note how often a batch was used. What was known of later batches of the epoch is forgotten.

        Args:
            epoch: Counts from 0.
            fetch: Number of the batch in it.
            passes: How often it was used.
        """
        known = self._passes.setdefault(epoch, [])
        del known[fetch:]
        # An epoch that was begun elsewhere, without a record, counts as used once.
        known.extend([1] * (fetch - len(known)))
        known.append(passes)

    def passes_of(self, epoch: int, fetch: int) -> int | None:
        """How often a batch was used; None if that is not recorded."""
        passes = self._passes.get(epoch, [])
        return passes[fetch] if fetch < len(passes) else None

    @property
    def mean_factor(self) -> float:
        """How often a batch is used, on average over the latest hundred; 1 before the first."""
        passes: list[int] = []
        for epoch in sorted(self._passes, reverse=True):
            passes += reversed(self._passes[epoch][-(_RECENT - len(passes)) :])
            if len(passes) >= _RECENT:
                break
        return sum(passes) / len(passes) if passes else 1.0

    def unused(self, epoch: int, fetch: int, num_at_once: int) -> list[int]:
        """Passes over the batches just before one, that came together with it.

        Args:
            epoch: The epoch.
            fetch: Number of the batch.
            num_at_once: How many come together.

        Returns:
            At most `num_at_once - 1` numbers, of the same epoch.
        """
        return self._passes.get(epoch, [])[max(0, fetch - num_at_once + 1) : fetch]

    def to_dict(self) -> dict[int, list[int]]:
        """Epoch -> passes over each of its batches.

        Returns:
            Plain numbers, for a checkpoint.
        """
        return {epoch: list(passes) for epoch, passes in self._passes.items()}

    def __eq__(self, other: Any) -> bool:
        """Equal records."""
        return isinstance(other, EchoTrace) and self._passes == other._passes

    def __hash__(self) -> int:
        """By identity: a trace grows."""
        return id(self)
