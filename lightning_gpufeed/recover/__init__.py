"""Recovery from out-of-memory: roll back, release, retry the same batch in microbatches."""
