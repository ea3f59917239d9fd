"""The exceptions this package raises on purpose.

::

    GpuFeedError                everything below; catch this to catch all of them
    ├── LayoutError             an HDF5 file cannot be used as asked
    ├── FeedError               reading failed, or a file changed, while batches were being made
    ├── PackError               a source cannot be packed as asked
    ├── OOMRecoveryError        an out-of-memory cannot be undone exactly; says what is lost and where to go on
    ├── ScheduleError           a plan or schedule cannot be carried out for this model
    ├── DeferredGradientError   a weight gradient that waits cannot be computed any more, or was asked for in vain
    └── SyncError               gradients cannot be reduced: ranks do not agree, or one is gone

Each message says what was given, what was expected and what to do. Wrong arguments stay `ValueError`
and a missing file stays `FileNotFoundError`, because that is what callers already catch.
"""

from __future__ import annotations

__all__ = [
    "DeferredGradientError",
    "FeedError",
    "GpuFeedError",
    "LayoutError",
    "OOMRecoveryError",
    "PackError",
    "ScheduleError",
    "SyncError",
]


class GpuFeedError(Exception):
    """Root of the exceptions raised by `lightning_gpufeed`."""


class DeferredGradientError(GpuFeedError):
    """A weight gradient that waits cannot be computed exactly any more, or its backward cannot be split."""


class LayoutError(GpuFeedError):
    """An HDF5 file, or a dataset inside one, cannot be used as asked."""


class FeedError(GpuFeedError):
    """Reading failed, or a file changed, while batches were being made."""


class OOMRecoveryError(GpuFeedError):
    """An out-of-memory cannot be undone exactly, or the batch cannot be trained on in parts."""


class PackError(GpuFeedError):
    """A source cannot be packed into HDF5 as asked; nothing was left under the final name."""


class ScheduleError(GpuFeedError):
    """A plan or a schedule cannot be carried out for this model: a part is missing, twice, or before what it needs."""


class SyncError(GpuFeedError, RuntimeError):
    """Gradients cannot be reduced: ranks do not agree on a model or a step, or one of them is gone.

    Also a `RuntimeError`, as what `DistributedDataParallel` raises then.
    """
