"""Reading in a process of its own, into memory shared with the training."""
