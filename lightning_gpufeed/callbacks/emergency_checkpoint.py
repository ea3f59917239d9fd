"""The last thing done for a training that cannot go on: save it, or say where it was saved last.

Private name of Lightning: `trainer._checkpoint_connector.dump_checkpoint`, what a checkpoint holds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

__all__ = ["EmergencyCheckpoint"]


class EmergencyCheckpoint:
    """Saves a Trainer whose state is that of a moment between two steps."""

    def __init__(self, trainer: Trainer, *, is_wanted: bool) -> None:
        """Note whose.

        Args:
            trainer: A Trainer.
            is_wanted: Whether to write one.
        """
        self._trainer, self._is_wanted = trainer, is_wanted

    def save(self) -> str:
        """Write it, on the first rank; gradients are let go of, as memory is short.

        Returns:
            Where it is, or why there is none and where the last one is.
        """
        trainer = self._trainer
        if not self._is_wanted or not trainer.is_global_zero:
            return self.last_good()
        for parameter in trainer.lightning_module.parameters():
            parameter.grad = None
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = Path(folder) / f"out-of-memory-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
        try:
            self._write(path)
        except Exception as error:
            return f"No emergency checkpoint could be written ({type(error).__name__}: {error}). {self.last_good()}"
        lost = self._num_in_window()
        plural = "" if lost == 1 else "es"
        window = f"; without the gradients of the {lost} batch{plural} before it in its accumulation window"
        return f"The training as it was before this batch is saved in {path}{window if lost else ''}"

    def _num_in_window(self) -> int:
        """Batches before this one in its accumulation window."""
        loop = self._trainer.fit_loop.epoch_loop
        return int(loop.batch_progress.current.completed % self._trainer.accumulate_grad_batches)

    def _write(self, path: Path) -> None:
        """Straight to a file aside, without the copy in memory that Lightning makes first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".part")
        try:
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            _count_back(checkpoint["loops"]["fit_loop"], is_in_window=self._num_in_window() > 0)
            torch.save(checkpoint, aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def last_good(self) -> str:
        """Name the newest checkpoint that is there.

        Returns:
            A sentence without its end.
        """
        trainer = self._trainer
        paths = [str(trainer.ckpt_path)] if trainer.ckpt_path else []
        for callback in trainer.checkpoint_callbacks:
            paths += [getattr(callback, name, "") or "" for name in ("last_model_path", "best_model_path")]
            paths += list(getattr(callback, "best_k_models", {}))
        there = [path for path in paths if path and os.path.exists(path)]
        if not there:
            return "There is no checkpoint of this training"
        return f"The last good checkpoint is {max(there, key=os.path.getmtime)}"


def _count_back(loop: dict[str, Any], *, is_in_window: bool) -> None:
    """Of a batch that has begun nothing is counted: as between two batches."""
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress in (loop["epoch_loop.batch_progress"], steps["step"]):
        for counts in (progress["total"], progress["current"]):
            counts.update(dict.fromkeys(counts, counts["completed"]))
    for part in ("total", "current"):  # gradients are zeroed at the begin of each window
        counts = steps["zero_grad"][part]
        counts.update(dict.fromkeys(counts, steps["step"][part]["completed"] + is_in_window))
