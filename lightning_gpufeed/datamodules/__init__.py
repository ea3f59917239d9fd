"""LightningDataModules over HDF5 files."""

from __future__ import annotations

from lightning_gpufeed.datamodules.h5 import H5DataModule
from lightning_gpufeed.datamodules.h5_image import H5ImageDataModule

__all__ = ["H5DataModule", "H5ImageDataModule"]
