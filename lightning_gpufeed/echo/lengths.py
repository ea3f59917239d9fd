"""How many samples and batches a loader has, as far as it tells."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

__all__ = ["begins_anew", "last_batch_samples", "num_batches_of", "samples_per_batch"]


def num_batches_of(loader: Any) -> int | None:
    """Number of batches in an epoch; None if the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def samples_per_batch(loader: Any) -> int | None:
    """Samples in a full batch; None if the loader does not say."""
    sizes = (getattr(place, "batch_size", None) for place in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int)), None)


def begins_anew(loader: Any) -> bool:
    """Whether each iteration surely begins with a first batch, and not where the one before was left."""
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_map or hasattr(loader, "is_ready")


def last_batch_samples(loader: Any) -> int | None:
    """Samples in the last batch of an epoch, on the rank that has fewest; None if that is not known."""
    own = getattr(loader, "smallest_batch_samples", None)
    if own is not None:
        return int(own)
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    try:
        num_samples = len(loader.batch_sampler.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    batch_size = loader.batch_sampler.batch_size
    return batch_size if loader.batch_sampler.drop_last else num_samples % batch_size or batch_size
