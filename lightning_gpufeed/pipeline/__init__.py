"""Pipeline parallelism: which rank computes what in which order, and what a step takes then. Pure so far."""
