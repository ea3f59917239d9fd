"""SIGTERM, and SLURM's signal to save and to queue again, are acted on where all ranks are together.

Lightning acts inside the signal handler: it sends to all ranks, or saves a checkpoint, wherever in a step the signal
has come. A rank of a pipeline waits for another one nearly all the time, and while it does no handler runs:

::

    rank 0   forward of stage 0 ── waits for the output of stage 1 ............. until the timeout
    rank 1   forward of stage 1 ── SIGTERM: waits for rank 0's message ......... until the timeout, and saves nothing

So here a handler takes a note, and no more. All ranks say whether they have one where Lightning has them ask rank 0
anyway, before each training step, and in evaluation before each batch; then Lightning's own handlers and exceptions
follow, on all ranks at once.

Ranks that each have their own batches also wait for each other in every step, and there Lightning's handler hangs too.
But no two of them need be at the same batch of an evaluation, nor should one wait for all others before each step:

::

    rank 1   SIGTERM: a note ── before its next step: into the store
    rank 0   before each step, ten times a second: what is in the store? ── tells all ranks, as it does anyway

Private names, each asserted in `tests/test_private_api.py`:

===================================================  ===============================================================
name                                                 what for
===================================================  ===============================================================
Trainer._signal_connector, and its methods           are looked up on the instance when handlers are registered, which
_sigterm_notifier_fn and _slurm_sigusr_handler_fn    is after `Strategy.setup`
its attribute received_sigterm                       what Lightning's loops look at after each batch
epoch_loop._broadcast_sigterm_tensor                 Lightning's question before each training step; raises on all
                                                     ranks if rank 0 has received the signal
===================================================  ===============================================================
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch import distributed

from lightning_gpufeed.pipeline.meeting import everyone
from lightning_gpufeed.pipeline.peers import lost_peer

__all__ = ["HeldSignals", "SignalsOfReplicas"]

_LOOK_SECONDS = 0.1


class HeldSignals:
    """Notes of one Trainer's signals, from its making to `release`."""

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        """Step into the place of Lightning's handlers, before they are registered.

        Args:
            trainer: Whose strategy is being set up.
            device: Where the tensors of the default process group are.
        """
        self._connector: Any = trainer._signal_connector
        self._device, self._trainer = device, trainer
        self._is_ending = self._is_requeued = False
        self._requeue = _InPlaceOf(self._connector, "_slurm_sigusr_handler_fn", self._note_requeue)
        self._end = _InPlaceOf(self._connector, "_sigterm_notifier_fn", self._note_end)
        self._question = _InPlaceOf(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._ask)

    def _note_end(self, signum: int, _: Any) -> None:
        """Take a note, and tell ranks that this one has started, as Lightning does."""
        launcher: Any = self._trainer.strategy.launcher
        if not self._is_ending and launcher is not None:
            launcher.kill(signum)
        self._is_ending = True

    def _note_requeue(self, signum: int, _: Any) -> None:
        self._is_requeued = True

    def _ask(self) -> None:
        """Before a training step: whoever of all ranks has a note, all act on it."""
        is_ending, is_requeued = self._noted_by(None)
        if is_requeued:
            self._is_requeued = False
            self._requeue.method(signal.SIGUSR1, None)
        if is_ending:
            self._connector.received_sigterm = True
            self._question.method()

    def ask(self, group: Any) -> None:
        """Before a batch of an evaluation: all ranks of a group end after it if one of them has a note.

        Args:
            group: Of ranks that end together, on the host.

        Raises:
            SyncError: Another rank is gone.
        """
        if not self._connector.received_sigterm:
            self._connector.received_sigterm, _ = self._noted_by(group)

    def _noted_by(self, group: Any) -> tuple[bool, bool]:
        notes = [self._is_ending, self._is_requeued]
        noted = torch.tensor(notes, dtype=torch.int32, device=self._device if group is None else None)
        with lost_peer("asking whether to end"):
            distributed.all_reduce(noted, distributed.ReduceOp.MAX, everyone() if group is None else group)
        is_ending, is_requeued = noted.tolist()
        return bool(is_ending), bool(is_requeued)

    def release(self) -> None:
        """Give Lightning's handlers their places back. What was noted and came too late is known to the Trainer."""
        self._connector.received_sigterm |= self._is_ending
        for place in (self._question, self._end, self._requeue):
            place.give_back()


class SignalsOfReplicas(HeldSignals):
    """Likewise of a rank that has batches of its own; every rank of the default process group makes one together.

    An evaluation ends on the ranks that were told, as with Lightning's strategies.
    """

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        """Step into the place of Lightning's handlers, before they are registered.

        Args:
            trainer: Whose strategy is being set up.
            device: Where the tensors of the default process group are.
        """
        super().__init__(trainer, device)
        # Notes of an earlier training are none of this one.
        number = torch.tensor(time.time_ns(), device=device)
        with lost_peer("agreeing on where to leave notes"):
            distributed.broadcast(number, 0)
        self._place, self._num_requeues, self._next_look = f"gpufeed/signals/{int(number)}", 0, 0.0
        world: Any = distributed.group.WORLD
        self._store = world.get_group_store()

    def _note_end(self, signum: int, frame: Any) -> None:
        super()._note_end(signum, frame)
        if self._trainer.state.stage not in (None, RunningStage.TRAINING):
            self._connector.received_sigterm = True

    def _noted_by(self, group: Any) -> tuple[bool, bool]:
        keys = [f"{self._place}/end", f"{self._place}/requeue/{self._num_requeues}"]
        notes = [self._is_ending, self._is_requeued]
        with lost_peer("asking whether to end"):
            if distributed.get_rank() != 0:
                for key, is_noted in zip(keys, notes, strict=True):
                    if is_noted:
                        self._store.set(key, "")
            elif time.monotonic() >= self._next_look:
                notes = [note or self._store.check([key]) for note, key in zip(notes, keys, strict=True)]
                self._next_look = time.monotonic() + _LOOK_SECONDS
            noted = torch.tensor(notes, dtype=torch.int32, device=self._device)
            distributed.broadcast(noted, 0)
        is_ending, is_requeued = noted.tolist()
        self._num_requeues += is_requeued
        return bool(is_ending), bool(is_requeued)


class _InPlaceOf:
    """In the place of an instance's method. A copy of the instance, pickled or not, has the method again."""

    def __init__(self, owner: Any, name: str, act: Callable[..., None]) -> None:
        self.owner, self.name = owner, name
        self._act: Callable[..., None] | None = act
        self.before, self.method = owner.__dict__.get(name), getattr(owner, name)
        while isinstance(self.before, _InPlaceOf) and self.before._act is None:  # of a training that has ended since
            self.before, self.method = self.before.before, self.before.method
        owner.__dict__[name] = self

    def __call__(self, *arguments: Any) -> None:
        (self._act or self.method)(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)

    def give_back(self) -> None:
        """Where somebody else has stepped in since then, theirs stays, and this does nothing any more."""
        self._act = None
        if self.owner.__dict__.get(self.name) is not self:
            return
        if self.before is None:
            del self.owner.__dict__[self.name]
        else:
            self.owner.__dict__[self.name] = self.before
