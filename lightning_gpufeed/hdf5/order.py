"""In which order samples are used, and which of them a rank gets in a step. Pure: no file, no device.

One epoch is one permutation of all samples, cut step by step::

    permutation   | step 0                | step 1                | last step |
                  | rank 0    | rank 1    | rank 0    | rank 1    | r 0 | r 1 |

Step g owns the g-th slice of `batch_size * world_size` samples and rank r the r-th part of that slice, so the
samples used so far are always a prefix of the permutation. The position in an epoch is therefore one number,
whatever the batch size or the number of ranks was when it was written down: resuming with others is exact.

No sample is lost and none used twice. What is left over for the last step is split evenly; when less than one
sample per rank is left it is added to the step before. Every rank takes the same number of steps.

With sampling weights an epoch is a list of draws with replacement instead, and is cut and shared in the same way:
every draw is used once.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.hdf5.weights import check_weights

__all__ = [
    "EpochPlan",
    "FullShuffle",
    "NoShuffle",
    "Order",
    "Shuffle",
    "WeightedShuffle",
    "WindowShuffle",
    "parse_shuffle",
]

Indices = npt.NDArray[np.int64]

_DRAWS = 1
"""Number of the random stream that draws are made from, so that they say nothing of the order."""


@dataclass(frozen=True)
class FullShuffle:
    """Every order equally likely: a seeded permutation of all samples, new in each epoch."""

    def permutation(self, num_samples: int, seed: int, epoch: int) -> Indices:
        """Order of the samples in one epoch.

        Args:
            num_samples: How many there are.
            seed: Any non-negative integer.
            epoch: Counts from 0.

        Returns:
            int64 (num_samples,); the same for the same arguments on every machine and numpy version.
        """
        return np.argsort(_random_bits(num_samples, seed, epoch), kind="stable")

    def __str__(self) -> str:
        """The form `parse_shuffle` reads."""
        return "full"


@dataclass(frozen=True)
class WindowShuffle:
    """A shuffle that moves a sample by fewer than `window_samples` places, for files that decode whole chunks.

    In a loader it means a buffer of `window_samples` samples that rolls through the chunks in random order
    (`lightning_gpufeed.hdf5.window`). By itself, without knowing of chunks, it holds each sample back by a random
    number of places below the window, along the file.

    Attributes:
        window_samples: Size of the window. The wider, the closer to a full shuffle.
    """

    window_samples: int = 4096

    def __post_init__(self) -> None:
        """Check the window.

        Raises:
            ValueError: The window is not positive.
        """
        if self.window_samples < 1:
            raise ValueError(f"window_samples is {self.window_samples}; expected at least 1.")

    def permutation(self, num_samples: int, seed: int, epoch: int) -> Indices:
        """Order of the samples in one epoch.

        Args:
            num_samples: How many there are.
            seed: Any non-negative integer.
            epoch: Counts from 0.

        Returns:
            int64 (num_samples,).
        """
        # The upper 53 bits make a float in [0, 1) exactly.
        delay = (_random_bits(num_samples, seed, epoch) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.argsort(np.arange(num_samples) + delay * self.window_samples, kind="stable")

    def __str__(self) -> str:
        """The form `parse_shuffle` reads."""
        return f"window:{self.window_samples}"


@dataclass(frozen=True)
class NoShuffle:
    """The order of the file."""

    def permutation(self, num_samples: int, seed: int, epoch: int) -> Indices:
        """Order of the samples in one epoch.

        Args:
            num_samples: How many there are.
            seed: Not used.
            epoch: Not used.

        Returns:
            int64 (num_samples,): 0, 1, 2 ...
        """
        return np.arange(num_samples, dtype=np.int64)

    def __str__(self) -> str:
        """The form `parse_shuffle` reads."""
        return "none"


Order = FullShuffle | WindowShuffle | NoShuffle


@dataclass(frozen=True, eq=False, repr=False)
class WeightedShuffle:
    """Draws with replacement: each place of an epoch is sample i with a probability in proportion to its weight.

    The draws are independent of each other, as those of torch's `WeightedRandomSampler(replacement=True)`: a sample
    may come several times in an epoch, or not at all, and one of weight 0 never comes. `order` says how the drawn
    samples follow each other: "full" as they were drawn, "window" within a window along the file (for files that
    decode whole chunks), "none" in the order of the file. Which samples are drawn does not depend on it.

    Attributes:
        weights: float64 (n,): one for each sample, in any unit. Not to be changed.
        order: How the samples drawn follow each other.
        digest: Short text that other weights have another of.

    Example:
        >>> WeightedShuffle(np.array([1.0, 0.0, 3.0])).permutation(8, seed=0, epoch=0).tolist()
        [2, 2, 2, 2, 0, 0, 0, 0]
    """

    weights: npt.NDArray[np.float64]
    order: Order = FullShuffle()
    digest: str = field(init=False)
    _cumulative: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        """Check the weights and add them up.

        Raises:
            ValueError: A weight is negative or not finite, or none is above 0.
        """
        # Divided by the largest first, they cannot overflow. Numpy defines the sum as one addition after the other.
        weights = check_weights(self.weights)
        cumulative = np.cumsum(weights / weights.max())
        cumulative /= cumulative[-1]
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "_cumulative", cumulative)
        object.__setattr__(self, "digest", f"{zlib.crc32(cumulative.astype('<f8').tobytes()):08x}")

    def permutation(self, num_samples: int, seed: int, epoch: int) -> Indices:
        """The draws of one epoch. More draws begin with those of fewer, in the order "full".

        Args:
            num_samples: How many draws.
            seed: Any non-negative integer.
            epoch: Counts from 0.

        Returns:
            int64 (num_samples,), each the number of a weight; the same for the same arguments on every machine and
            numpy version.
        """
        bits = _random_bits(num_samples, seed, epoch, _DRAWS) >> np.uint64(11)
        # The place of each number in [0, 1) among the sums; sorted numbers are found much faster, as memory is
        # walked through once. A sample of weight 0 spans nothing, so no number falls to it.
        by_size = np.argsort(bits)
        drawn = np.searchsorted(self._cumulative, bits[by_size].astype(np.float64) * 2.0**-53, side="right")
        if isinstance(self.order, FullShuffle):
            draws = np.empty(num_samples, dtype=np.int64)
            draws[by_size] = drawn
            return draws
        return drawn.astype(np.int64, copy=False)[self.order.permutation(num_samples, seed, epoch)]

    def __eq__(self, other: object) -> bool:
        """Whether the same samples are drawn in the same order."""
        return isinstance(other, WeightedShuffle) and (str(self), len(self.weights)) == (str(other), len(other.weights))

    def __hash__(self) -> int:
        """Of the text form."""
        return hash(str(self))

    def __repr__(self) -> str:
        """Without the weights themselves."""
        return f"WeightedShuffle({len(self.weights)} weights, order={self.order})"

    def __str__(self) -> str:
        """What a saved position keeps of it."""
        return f"weighted:{self.digest}:{self.order}"


Shuffle = Order | WeightedShuffle


def parse_shuffle(shuffle: Shuffle | str | bool | None) -> Order:
    """Read the forms a user or a YAML file gives a shuffle in.

    Args:
        shuffle: A value of this module that has no weights; "full" or True; "window" or "window:N"; "none", False or
            None.

    Returns:
        The value.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(shuffle, FullShuffle | WindowShuffle | NoShuffle):
        return shuffle
    if shuffle is None or shuffle is False or shuffle == "none":
        return NoShuffle()
    if shuffle is True or shuffle == "full":
        return FullShuffle()
    if isinstance(shuffle, str) and (match := re.fullmatch(r"window(?::(\d+))?", shuffle)):
        return WindowShuffle(int(match[1])) if match[1] else WindowShuffle()
    raise ValueError(
        f"shuffle={shuffle!r} is not understood; expected 'full', 'window', 'window:N' (N samples) or None."
    )


def _random_bits(num_samples: int, seed: int, epoch: int, stream: int = 0) -> npt.NDArray[np.uint64]:
    """One 64-bit number per sample from a bit generator whose stream numpy keeps the same in all versions."""
    entropy = [seed, epoch, stream] if stream else [seed, epoch]
    return np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_samples)


@dataclass(frozen=True)
class EpochPlan:
    """Which samples each rank takes in each step of one epoch, from a position to the end.

    Attributes:
        num_samples: Samples in the epoch.
        batch_size: Samples per rank and step.
        world_size: Number of ranks that share the epoch.
        drop_last: Leave out what does not fill a step on every rank.
        start: Samples used before; the plan covers the rest.
    """

    num_samples: int
    batch_size: int
    world_size: int = 1
    drop_last: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: A size is out of range, or there are fewer samples than ranks.
        """
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; expected at least 1.")
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}; expected at least 1.")
        if not 0 <= self.start <= self.num_samples:
            raise ValueError(f"start is {self.start}; expected 0 to {self.num_samples}, the number of samples.")
        if self.drop_last and self.num_samples < self.step_samples:
            raise ValueError(
                f"drop_last leaves no step: the dataset has {self.num_samples} samples and one step takes "
                f"{self.step_samples} (batch_size {self.batch_size} x {self.world_size} ranks). "
                f"Make batch_size smaller, or leave drop_last off."
            )
        if self.num_samples < self.world_size:
            raise ValueError(
                f"{self.num_samples} samples cannot be shared by {self.world_size} ranks without repeating one. "
                f"Use fewer ranks, or more samples."
            )

    @property
    def step_samples(self) -> int:
        """Samples that all ranks together take in a full step."""
        return self.batch_size * self.world_size

    @property
    def num_steps(self) -> int:
        """Steps from `start` to the end, the same on every rank."""
        full, rest = divmod(self.num_samples - self.start, self.step_samples)
        return full if self.drop_last or rest < self.world_size else full + 1

    @property
    def num_left_out(self) -> int:
        """Samples of this epoch that no step takes.

        0 without `drop_last`, but for one case: an epoch resumed with more ranks than it has samples left.
        """
        return self.num_samples - (self.bounds(self.num_steps - 1)[1] if self.num_steps else self.start)

    def bounds(self, step: int) -> tuple[int, int]:
        """Part of the permutation that all ranks together take in a step.

        Args:
            step: Counts from 0 at `start`.

        Returns:
            (first, stop) positions in the permutation.

        Raises:
            IndexError: There is no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}.")
        first = self.start + step * self.step_samples
        is_last = step == self.num_steps - 1
        return first, self.num_samples if is_last and not self.drop_last else first + self.step_samples

    def rank_bounds(self, step: int, rank: int) -> tuple[int, int]:
        """Part of the permutation that one rank takes in a step.

        Args:
            step: Counts from 0 at `start`.
            rank: 0 to world_size - 1.

        Returns:
            (first, stop) positions in the permutation. Sizes on the ranks differ by at most one.
        """
        first, stop = self.bounds(step)
        share, extra = divmod(stop - first, self.world_size)
        begin = first + rank * share + min(rank, extra)
        return begin, begin + share + (1 if rank < extra else 0)

    @property
    def most_rows(self) -> int:
        """Largest number of samples one rank gets in one step: `batch_size`, or one more in the last step."""
        if not self.num_steps:
            return 0
        first, stop = self.bounds(self.num_steps - 1)
        return max(-(-(stop - first) // self.world_size), self.batch_size if self.num_steps > 1 else 0)
