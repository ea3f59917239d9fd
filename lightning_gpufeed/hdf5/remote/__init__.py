"""HDF5 files in a store that fsspec reaches."""
