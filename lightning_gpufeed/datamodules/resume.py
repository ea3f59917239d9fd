"""Makes Lightning's count of batches and the position in the epoch agree when a run is saved and resumed.

Private names of Lightning, both asserted in `tests/test_private_api.py`: `trainer._checkpoint_connector` and its
`_loaded_checkpoint`, the dict that the loops are restored from after the DataModule.
"""

from __future__ import annotations

from typing import Any

from lightning_gpufeed.hdf5.position import EpochPosition

__all__ = ["is_latest_in_work", "shift_batch_progress"]


def shift_batch_progress(trainer: Any, num_batches: int) -> None:
    """Move the Trainer's position in the training epoch before it is restored.

    Lightning takes an epoch to have one length: it trains until its count of batches reaches that. What is left of a
    resumed epoch are its last batches, counted in today's size, so the count has to begin where they begin.

    Args:
        trainer: A Trainer that is restoring a checkpoint.
        num_batches: How many batches further (or back) the epoch stands.
    """
    checkpoint = trainer._checkpoint_connector._loaded_checkpoint
    if not num_batches or "loops" not in checkpoint:
        return
    # ready, started, processed and completed differ by where inside a batch the checkpoint was written.
    current = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    for name in current:
        current[name] += num_batches


def is_latest_in_work(trainer: Any, position: EpochPosition) -> bool:
    """Whether the batch handed out last has not been processed yet, and will be trained again after a resume.

    So it is in a checkpoint written in the middle of a step: on an exception, on Ctrl-C, by a signal handler.

    Args:
        trainer: The Trainer, or None.
        position: Where its training loader stands.

    Returns:
        True if the Trainer has processed one batch less than it was handed.
    """
    if trainer is None:
        return False
    return bool(position.steps_done == trainer.fit_loop.epoch_loop.batch_progress.current.processed + 1)
