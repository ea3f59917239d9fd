"""An HDF5 file into a better layout, value for value."""
