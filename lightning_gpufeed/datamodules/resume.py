"""Continues a training epoch from a checkpoint under a Trainer that counts batches only once.

Lightning asks a loader for its length when it sets the data up, perhaps before it has restored its own counters, and
keeps the number. An epoch that was begun with another batch size or on another number of ranks has a length of its
own, so for the rest of that fit the Trainer is made to ask again at every epoch, by its public switch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.order import parse_shuffle

__all__ = ["ResumedEpoch"]


class ResumedEpoch:
    """The position a checkpoint holds, and what was changed on the Trainer for its sake."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Note the position.

        Args:
            state: From `H5Loader.state_dict`.
        """
        self._state = dict(state)
        self._switched: tuple[Any, int] | None = None

    def announce(self, loader: H5Loader, trainer: Any) -> None:
        """Make the Trainer ask for the length at every epoch, if the epoch was begun with other sizes.

        Args:
            loader: A training loader with today's sizes.
            trainer: The Trainer, or None.
        """
        if trainer is not None and self._has_other_sizes(loader):
            self._switched = (trainer, trainer.reload_dataloaders_every_n_epochs)
            trainer.reload_dataloaders_every_n_epochs = 1

    def continue_in(self, loader: H5Loader, trainer: Any) -> None:
        """Put a new training loader where the run stands.

        Args:
            loader: At the beginning of its first epoch.
            trainer: The Trainer, or None.
        """
        # The state's order is continued in all epochs to come, also by loaders made later.
        loader.seed, loader.shuffle = self._state["seed"], parse_shuffle(self._state["shuffle"])
        epoch = trainer.current_epoch if trainer is not None else self._state["epoch"]
        if epoch > self._state["epoch"]:
            # Lightning may still hold the loader's own, older state and load it into this one.
            loader.position.first_epoch = epoch
            self._close_old_epoch(loader, trainer)
        elif epoch == self._state["epoch"] or not self._has_other_sizes(loader):
            loader.load_state_dict(self._state)

    def forget(self) -> None:
        """Put back what was changed on the Trainer."""
        if self._switched is not None:
            trainer, every_n_epochs = self._switched
            trainer.reload_dataloaders_every_n_epochs = every_n_epochs
            self._switched = None

    def _has_other_sizes(self, loader: H5Loader) -> bool:
        """Whether the epoch was begun with another batch size or number of ranks."""
        return bool(self._state["step_samples"] != loader.step_samples)

    def _close_old_epoch(self, loader: H5Loader, trainer: Any) -> None:
        """Let the Trainer see that an epoch saved at its last batch is over, though epochs have more batches now.

        It compares the batches done with the length of an epoch, and would take them for a part of the next one.
        """
        epoch_loop = trainer.fit_loop.epoch_loop
        if epoch_loop.restarted_on_train_batch_end and self._has_other_sizes(loader):
            done = epoch_loop.batch_progress.current
            done.completed = max(done.completed, len(loader))
