"""Brings the ranks together before a training, also after one that has ended on some of them alone.

A rank that fails leaves the others waiting for it in the middle of something. If its process goes on to the next
training, as in a loop over trials, then what it sends there first would be taken for what the others still wait for:

::

    rank 0   fails in a step      ── next training: first barrier ─┐   the same group, so they take it for the same
    rank 1   at the end of the step: barrier of a checkpoint ──────┘   barrier, and go on, each in another training

So ranks meet through the store of the default process group, where each meeting has its own number. Whoever still waits
in an earlier training does not come before that has ended there, by its timeout; all who meet have left it. Groups that
are made afterwards have no message of an earlier one, and where the default group may have some, another one takes its
place.

Private name of torch, asserted in `tests/test_private_api.py`: `torch.distributed.distributed_c10d._world.group_count`,
from which the names of groups are made; the ranks of a group wait for each other under its name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.pipeline.peers import lost_peer

__all__ = ["everyone", "leave", "meet", "part"]


@dataclass
class _State:
    """Of one default process group. No group is kept alive by it: one that somebody destroys has to close.

    Attributes:
        world: Gives the default group, or None after its end; the others likewise.
        num_meetings: Of this rank, so far.
        is_open: Whether the training after the last one has not ended, or not well.
        everyone: The group in the place of the default one; that itself at first.
        left: Groups that have no use any more, and what of each may still be on its way.
    """

    world: Callable[[], Any]
    everyone: Callable[[], Any]
    num_meetings: int = 0
    is_open: bool = False
    left: list[tuple[Callable[[], Any], list[Any]]] = field(default_factory=list)


_state: _State | None = None


def _of_world() -> _State:
    """Begun anew with each default group."""
    global _state
    world = distributed.group.WORLD
    if _state is None or _state.world() is not world:
        _state = _State(weakref.ref(world), weakref.ref(world))
    return _state


def everyone() -> Any:
    """The group of all ranks.

    Returns:
        The default group, unless an earlier training may have left something in it; None if there is no group.
    """
    return _of_world().everyone() if distributed.is_initialized() else None


def meet(timeout: timedelta | None = None) -> None:
    """Wait until all ranks are here, before a training: every rank of the default group has to call this.

    Args:
        timeout: How long a rank waits for others that are in the same training; None is what torch takes. Here it
            waits longer, by up to a minute: who still waits in an earlier one has begun to do so a little later.

    Raises:
        SyncError: A rank has not come; also on one that comes later.
    """
    timeout = default_pg_timeout if timeout is None else timeout
    patience = timeout + min(timeout, timedelta(minutes=1))
    state = _of_world()
    number, state.num_meetings = state.num_meetings, state.num_meetings + 1
    with lost_peer("meeting the others before a training"):
        said = _said_by_all(state, number, patience)
        # Where ranks have made other numbers of groups, they would wait for each other under other names.
        distributed_c10d._world.group_count = max(count for count, _ in said)
        if any(is_open for _, is_open in said):
            if state.everyone() is not distributed.group.WORLD:
                leave([state.everyone()])
            state.everyone = weakref.ref(distributed.new_group(timeout=timeout))
        state.is_open = True
        _clear(state)


def _said_by_all(state: _State, number: int, patience: timedelta) -> list[tuple[int, bool]]:
    """Of each rank: how many groups it has made, and whether its last training has not ended well."""
    store: Any = distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    keys = [_key(number, one) for one in range(num_ranks)]
    store.set(keys[rank], f"{distributed_c10d._world.group_count} {state.is_open:d}")
    try:
        store.wait(keys, patience)
        found = "met"
    except RuntimeError:  # of several kinds, by the kind of the store
        found = "given up"
    # The first one to say so decides for all: none goes on with one that has given up.
    if store.compare_set(_key(number, "outcome"), "", found) != b"met":
        missing = [one for one in range(num_ranks) if not store.check([keys[one]])]
        who = f"ranks {', '.join(map(str, missing))}" if missing else "another rank"
        raise SyncError(
            f"Rank {rank} is about to begin a training, and {who} did not come within {patience.total_seconds():g} s: "
            "gone, or still in an earlier training that this one has left. Start all ranks again, from the latest "
            "checkpoint; or call fit again if all of them do so."
        )
    said = [store.get(key).decode().split() for key in keys]
    if number:  # nobody looks at the last meeting any more
        for name in (rank, "outcome") if rank == 0 else (rank,):
            store.delete_key(_key(number - 1, name))
    return [(int(count), is_open == "1") for count, is_open in said]


def _key(number: int, name: Any) -> str:
    return f"gpufeed/meeting/{number}/{name}"


def part(*, is_well: bool) -> None:
    """At the end of a training, or of what it has become.

    Args:
        is_well: Whether nothing is left on its way, here and on the other ranks.
    """
    if distributed.is_initialized():
        _of_world().is_open = not is_well


def leave(groups: Iterable[Any], pending: Iterable[Any] = ()) -> None:
    """Have groups given back once all ranks are known to have left them.

    Args:
        groups: Of a training that has ended on this rank.
        pending: What this rank has begun in them and not waited for: to give a group back earlier would be to wait.
    """
    pending = list(pending)
    _of_world().left += [(weakref.ref(group), pending) for group in groups]


def _clear(state: _State) -> None:
    left, state.left = state.left, []
    for group, pending in left:
        if not all(work.is_completed() for work in pending):
            state.left.append((group, pending))
        elif group() is not None:
            distributed.destroy_process_group(group())
