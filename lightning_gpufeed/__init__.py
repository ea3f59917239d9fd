"""Ends the waiting of a PyTorch Lightning user's GPU, without changing the mathematics."""

from __future__ import annotations

from lightning_gpufeed.callbacks import BatchEcho, FeedMonitor, OOMRecovery
from lightning_gpufeed.datamodules import H5DataModule, H5ImageDataModule
from lightning_gpufeed.errors import FeedError, GpuFeedError, LayoutError, OOMRecoveryError, PackError, SyncError
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.strategies import OutOfOrderStrategy

__version__ = "0.1.0"

__all__ = [
    "BatchEcho",
    "FeedError",
    "FeedMonitor",
    "GpuFeedError",
    "H5DataModule",
    "H5ImageDataModule",
    "H5Loader",
    "LayoutError",
    "OOMRecovery",
    "OOMRecoveryError",
    "OutOfOrderStrategy",
    "PackError",
    "SyncError",
    "__version__",
]
