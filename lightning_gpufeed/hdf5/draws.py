"""Sampling weights of a loader: made into a shuffle, and known again when a saved position is resumed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.arguments import whole_number
from lightning_gpufeed.hdf5.order import Indices, Shuffle, WeightedShuffle, parse_shuffle
from lightning_gpufeed.hdf5.weights import chosen_weights

__all__ = ["make_shuffle", "resume_shuffle"]


def make_shuffle(
    shuffle: Shuffle | str | bool | None,
    weights: npt.ArrayLike | None,
    samples_per_epoch: int | None,
    num_samples: int,
    indices: Indices | None,
) -> tuple[Shuffle, int]:
    """The shuffle of a loader, and how long its epochs are.

    Args:
        shuffle: In any form that `parse_shuffle` reads.
        weights: One number for each sample of the source; None for a plain shuffle.
        samples_per_epoch: Draws in an epoch; None for as many as there are samples that are used.
        num_samples: Samples of the source.
        indices: int64 (n,): those used; None for all.

    Returns:
        (shuffle over the samples used, samples in an epoch).

    Raises:
        ValueError: The arguments cannot be used, or do not fit together.
    """
    order = parse_shuffle(shuffle)
    num_used = num_samples if indices is None else len(indices)
    if weights is None:
        if samples_per_epoch is not None:
            raise ValueError(
                f"samples_per_epoch is {samples_per_epoch}, but there are no sampling weights: without them an epoch "
                f"is every sample once. Give weights (all equal ones draw every sample alike), or leave it off."
            )
        return order, num_used
    drawn = WeightedShuffle(chosen_weights(weights, num_samples, indices), order)
    return drawn, num_used if samples_per_epoch is None else whole_number("samples_per_epoch", samples_per_epoch, 1)


def resume_shuffle(shuffle: Shuffle, num_samples: int, state: Mapping[str, Any]) -> Shuffle:
    """The shuffle that a saved position goes on with: the saved order, over the same weights.

    Args:
        shuffle: Of the loader that resumes.
        num_samples: Its samples in an epoch, or draws.
        state: Saved: `shuffle` as text, `num_samples`.

    Returns:
        The shuffle to use from here on.

    Raises:
        FeedError: The position was saved with other weights, with none where there are some, or the other way round.
        ValueError: The text is not understood.
    """
    saved = re.fullmatch(r"weighted:([0-9a-f]{8}):(.+)", str(state["shuffle"]))
    here = shuffle if isinstance(shuffle, WeightedShuffle) else None
    if saved is None and here is None:
        return parse_shuffle(state["shuffle"])
    if saved is None or here is None or saved[1] != here.digest:
        then = "without sampling weights" if saved is None else f"with sampling weights of digest {saved[1]}"
        now = "has none" if here is None else f"has weights of digest {here.digest}"
        raise FeedError(
            f"the position was saved {then}, but this loader {now}: the draws cannot be continued with others. Use the "
            f"same weights over the same samples, or start without the loader's state."
        )
    if state["num_samples"] != num_samples:
        raise FeedError(
            f"the position was saved in an epoch of {state['num_samples']} draws, but samples_per_epoch is "
            f"{num_samples} now. Use the same number, or start without the loader's state."
        )
    return WeightedShuffle(here.weights, parse_shuffle(saved[2]))
