"""What a forked process must not do with what its parent left lying about."""

from __future__ import annotations

import functools
import gc
import os

__all__ = ["leave_garbage_to_parent"]


@functools.cache
def leave_garbage_to_parent() -> None:
    """See to it that a forked process, such as a worker of a DataLoader, does not collect its parent's garbage.

    Among it may be process groups and messages under way, whose end waits for threads that are not in the child: it
    would hang, or crash. Registers once, for this process and its children.
    """
    os.register_at_fork(after_in_child=gc.freeze)
