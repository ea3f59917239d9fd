"""Which splits a stage of a Trainer needs, and the loader of one split for one rank of it."""

from __future__ import annotations

from typing import Any

import torch

from lightning_gpufeed.hdf5.keys import Split
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.mixing import describe_mixing
from lightning_gpufeed.hdf5.order import WeightedShuffle
from lightning_gpufeed.hdf5.splits import Found

__all__ = ["ahead_device", "count_samples", "describe_loader", "make_loader", "stage_splits"]

_STAGE_SPLITS: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}

_TRAINING_ONLY = {"shuffle": None, "weights": None, "samples_per_epoch": None, "drop_last": False}


def stage_splits(stage: str) -> tuple[Split, ...]:
    """The splits that a stage needs.

    Args:
        stage: "fit", "validate", "test" or "predict".

    Returns:
        Their names.

    Raises:
        ValueError: There is no such stage.
    """
    # The Trainer gives an enumeration whose members compare equal to these names.
    name = next((name for name in _STAGE_SPLITS if stage == name), None)
    if name is None:
        raise ValueError(f"stage is {stage!r}; expected one of {', '.join(_STAGE_SPLITS)}.")
    return _STAGE_SPLITS[name]


def make_loader(split: Split, found: Found, trainer: Any, batch_size: int, **options: Any) -> H5Loader:
    """A loader over the part of a split that a rank has; what is wrong with it names the split.

    Args:
        split: Which split.
        found: Its source and samples.
        trainer: The Trainer, or None.
        batch_size: Samples per rank and step.
        **options: Arguments of `H5Loader`; order, weights and `drop_last` are for training alone.

    Returns:
        The loader.

    Raises:
        ValueError: An argument is out of range, or does not fit the data.
    """
    source, indices = found
    world_size, rank = _share(trainer)
    if split != "train":
        options |= _TRAINING_ONLY
        # One smaller batch is nothing to warn about here.
        batch_size = min(batch_size, max(1, -(-count_samples(found) // world_size)))
    elif trainer is not None and trainer.overfit_batches > 0:
        # Overfitting means the same batches every time.
        options |= {**_TRAINING_ONLY, "drop_last": options["drop_last"]}
    try:
        return H5Loader(source, batch_size, indices=indices, rank=rank, world_size=world_size, **options)
    except ValueError as error:
        raise ValueError(f"{split} data ({', '.join(source.paths)}): {error}") from error


def ahead_device(trainer: Any) -> torch.device | None:
    """Where training batches are copied ahead of their step.

    Args:
        trainer: The Trainer, or None.

    Returns:
        The device of this rank; None without a Trainer.
    """
    return None if trainer is None else torch.device(trainer.strategy.root_device)


def count_samples(found: Found) -> int:
    """How many samples a split has.

    Args:
        found: Its source and samples.

    Returns:
        Their number.
    """
    source, indices = found
    return source.num_samples if indices is None else len(indices)


def describe_loader(split: Split, found: Found, loader: H5Loader) -> str:
    """What a loader reads, and how.

    Args:
        split: Which split.
        found: Its source and samples.
        loader: Over these.

    Returns:
        One line.
    """
    is_weighted = isinstance(loader.shuffle, WeightedShuffle)
    drawn = f" (an epoch is {loader.num_samples} draws by weight)" if is_weighted else ""
    mixing = describe_mixing(loader)
    lines = [*found[0].engine_lines, *([] if mixing is None else [mixing])]
    return f"{count_samples(found)} {split} samples{drawn}; {'; '.join(lines)}"


def _share(trainer: Any) -> tuple[int, int]:
    """Number of data-parallel ranks and which one this is, as the strategy says."""
    share = trainer.distributed_sampler_kwargs if trainer is not None else None
    return (1, 0) if share is None else (int(share["num_replicas"]), int(share["rank"]))
