"""LightningDataModules over HDF5 files."""
