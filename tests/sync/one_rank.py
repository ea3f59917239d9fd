"""A process group of this process alone: what a real one does, without another rank to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from lightning_gpufeed.sync.ranks import Ranks


@contextmanager
def one_rank() -> Iterator[Ranks]:
    """Open a group, and close it in any case.

    Yields:
        Its one rank.
    """
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield Ranks()
    finally:
        distributed.destroy_process_group()
