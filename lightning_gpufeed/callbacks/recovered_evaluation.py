"""Validation, test and prediction steps with recovery from out-of-memory; training is not touched by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_gpufeed.errors import OOMRecoveryError
from lightning_gpufeed.recover.attempt import Recovery
from lightning_gpufeed.recover.merge import merge_values
from lightning_gpufeed.recover.split_batch import Split
from lightning_gpufeed.recover.work import StepWork

__all__ = ["EVALUATIONS", "RecoveredEvaluation"]

EVALUATIONS = {"validation_step": "validate", "test_step": "test", "predict_step": "predict"}


class RecoveredEvaluation:
    """Stands before the evaluation steps of a strategy. Ranks decide each for itself: no step waits for another's."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        is_active: Callable[[], bool],
        recovery: Callable[[str], Recovery],
        make_work: Callable[..., StepWork],
        on_note: Callable[[str], None],
    ) -> None:
        """Take the places.

        Args:
            trainer: A Trainer.
            pl_module: Its module.
            is_active: Whether to recover at all.
            recovery: Stage -> who recovers in it.
            make_work: Stage, number of the batch and the callables of `StepWork` -> the work.
            on_note: Told what a user should know.
        """
        self._strategy = trainer.strategy
        self._is_active, self._recovery, self._make_work, self._on_note = is_active, recovery, make_work, on_note
        for name in EVALUATIONS:
            own = getattr(trainer.strategy, name)
            takes_iterator = is_param_in_hook_signature(getattr(pl_module, name), "dataloader_iter", explicit=True)
            if not takes_iterator:  # what was taken from an iterator cannot be taken again
                trainer.strategy.__dict__[name] = partial(self._step, name, own)

    def remove(self) -> None:
        """Take everything back."""
        for name in EVALUATIONS:
            self._strategy.__dict__.pop(name, None)

    def _step(self, name: str, own: Callable[..., Any], batch: Any, *args: Any) -> Any:
        if not self._is_active():
            return own(batch, *args)
        stage = EVALUATIONS[name]
        work = self._make_work(
            stage,
            args[0] if args else 0,
            forward=lambda microbatch: (None, own(microbatch, *args)),
            put_together=partial(self._merged, name),
        )
        return self._recovery(stage).run(work, batch, args[0] if args else 0)

    def _merged(self, name: str, outputs: Any, split: Split) -> Any:
        try:
            return merge_values(list(outputs), split.sizes, split.weights)
        except ValueError as error:
            if name != "predict_step":
                self._on_note(f"what {name} returns is a list of what each microbatch of a split batch gave")
                return list(outputs)
            raise OOMRecoveryError(
                f"out of memory, and what predict_step returns for microbatches cannot be put together: {error} "
                f"Expected tensors or lists with one entry per sample; return those, or use a smaller batch."
            ) from error
