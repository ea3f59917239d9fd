"""What to say when another rank is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from lightning_gpufeed.errors import SyncError

__all__ = ["lost_peer"]


@contextmanager
def lost_peer(what: str) -> Iterator[None]:
    """Say which rank failed in what, rather than what the backend says.

    Args:
        what: Is done inside.

    Yields:
        Nothing.

    Raises:
        SyncError: The backend has failed.
    """
    try:
        yield
    except SyncError:
        raise
    except RuntimeError as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise SyncError(
            f"Rank {distributed.get_rank()} failed in {what}: another rank is gone, has ended earlier, or did not "
            f"answer in time, and its own output says why. Training cannot go on; start again from the latest "
            f"checkpoint. ({lines[0][:200]})"
        ) from error
