"""How many processor cores torch operations of a background thread take."""

from __future__ import annotations

import threading

import torch

__all__ = ["SingleThreadStart"]


class SingleThreadStart:
    """Starts a background thread whose torch operations run on that thread alone.

    Every thread that calls a parallel operation gets a team of helper threads of its own. On a machine whose
    cores are busy with the training step, the team of a reading thread fights the training's: copying then is
    four times slower than on one core (2.8 against 10.8 GB/s, 2 cores, batches of 38 MB).

    torch has one setting for this: it takes effect in the thread that makes it, but is also what threads born
    later begin with. So the starter makes it again with its own number, and nobody else sees a change.

    Example:
        >>> start = SingleThreadStart()
        >>> thread = threading.Thread(target=start.in_thread)
        >>> thread.start()
        >>> start.in_starter()
        >>> thread.join()
    """

    def __init__(self) -> None:
        """Note how many threads the starter uses."""
        self._num_threads = torch.get_num_threads()
        self._is_set = threading.Event()

    def in_thread(self) -> None:
        """Call this first in the new thread."""
        torch.set_num_threads(1)
        # A thread takes the common number over at its first use, which must not come after `in_starter`.
        torch.get_num_threads()
        self._is_set.set()

    def in_starter(self) -> None:
        """Call this in the starting thread, after `start()`."""
        self._is_set.wait()
        torch.set_num_threads(self._num_threads)
