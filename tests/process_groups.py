"""Process groups of tests: none stays in this process, and what has broken one is not to be felt in the next."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed

from tests.doubles import free_port

__all__ = ["agree_on_port", "end_of_cell", "left_as_found"]

_PORT_SECONDS = 60.0


def agree_on_port(file: Path, rank: int) -> None:
    """Where the ranks meet, if they have no group. One that was free some minutes ago may be somebody else's by now.

    Args:
        file: Written by rank 0, for the others to read.
        rank: This one.
    """
    if rank == 0:
        file.with_suffix(".new").write_text(str(free_port()))
        file.with_suffix(".new").rename(file)
    deadline = time.monotonic() + _PORT_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.environ["MASTER_PORT"] = file.read_text()


@contextmanager
def left_as_found() -> Iterator[None]:
    """Lightning makes this process rank 0 of a group, and says so in variables, which whatever follows would believe.

    Yields:
        Nothing.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def end_of_cell(*, is_well: bool) -> None:
    """After one of several trainings in the same processes: the next one finds the same group, or makes another.

    Args:
        is_well: Whether it has ended well on this rank. If not, the group is given back, which also tells a rank that
            waits that it need not.
    """
    if not distributed.is_initialized():
        return
    if is_well:
        try:
            distributed.barrier()  # and on the others
        except RuntimeError:
            is_well = False
    if not is_well:
        gc.collect()
        distributed.destroy_process_group()
