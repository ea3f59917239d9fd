"""Host and device memory, with a CPU twin for everything, so that no `if cuda` leaks upward."""
