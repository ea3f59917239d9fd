"""Chunked HDF5 as a source of training batches: layout, order, reading, feeding, writing."""
