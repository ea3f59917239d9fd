"""What comes after backward: clipping, hooks, and the update of the weights, with recovery from out-of-memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from lightning.pytorch import Trainer

from lightning_gpufeed.callbacks.emergency_checkpoint import EmergencyCheckpoint
from lightning_gpufeed.callbacks.trainer_step import RecoveringClosure, reset_scaler
from lightning_gpufeed.device.headroom import describe_memory, free_bytes, release
from lightning_gpufeed.errors import OOMRecoveryError
from lightning_gpufeed.recover.classify import Kind, classify
from lightning_gpufeed.recover.failure import Failure, add_advice, forget, note_failure
from lightning_gpufeed.recover.report import OOMEvent
from lightning_gpufeed.recover.update import GuardedStep, UpdateFailed

__all__ = ["RecoveredUpdate"]

MAX_FAILURES = 2


class RecoveredUpdate:
    """Stands between the Trainer's loop and the optimizer.

    ::

        closure (recovers by itself) | clipping, hooks | update | after
                                     |   fails: undo all, the closure again, once more
                                                       |  fails: less memory; or an error, the state clean if possible
    """

    def __init__(
        self,
        trainer: Trainer,
        emergency: EmergencyCheckpoint,
        *,
        is_active: Callable[[], bool],
        closure: Callable[[], RecoveringClosure | None],
        undo_batch: Callable[[], str],
        on_event: Callable[[OOMEvent], None],
    ) -> None:
        """Take the place of `strategy.optimizer_step`.

        Args:
            trainer: A Trainer.
            emergency: What is done before an error is raised.
            is_active: Whether to recover at all.
            closure: Of the batch that is trained on.
            undo_batch: Makes everything what it was before the batch, so that the closure can run again; says why that
                cannot be.
            on_event: Told of what was recovered.
        """
        self._trainer, self._emergency = trainer, emergency
        self._is_active, self._undo_batch, self._on_event = is_active, undo_batch, on_event
        self._closure = closure
        self._device = trainer.strategy.root_device
        self._guard: GuardedStep | None = None
        self._own = trainer.strategy.optimizer_step
        trainer.strategy.__dict__["optimizer_step"] = self._step

    def guard(self) -> None:
        """Guard the update of the optimizer, which exists now, if it is one of torch's kind."""
        optimizer = self._trainer.optimizers[0]
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            return
        self._guard = GuardedStep(
            optimizer,
            self._device,
            is_out_of_memory=self._is_out_of_memory,
            forget=forget,
            on_event=self._on_update,
        )

    def remove(self) -> None:
        """Take everything back."""
        self._trainer.strategy.__dict__.pop("optimizer_step", None)
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _is_out_of_memory(self, error: BaseException) -> bool:
        return classify(error, self._device.type).kind in (Kind.DEVICE, Kind.HOST)

    def _step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """One optimizer step; what breaks off before the update is done again from the begin of the batch."""
        if not self._is_active():
            return self._own(optimizer, *args, **kwargs)
        failure: Failure | None = None
        closure = self._closure()
        # A module may call its closure by itself, before the optimizer.
        was_done = closure is not None and closure.is_done
        for num_failures in range(MAX_FAILURES + 1):
            try:
                result = self._own(optimizer, *args, **kwargs)
            except UpdateFailed as error:
                stopped: UpdateFailed | None = error
            except Exception as error:
                diagnosis = classify(error, self._device.type)
                if not self._is_out_of_memory(error) or closure is None or not closure.is_done:
                    add_advice(error, diagnosis)
                    raise
                if self._guard is None:
                    # Whether its update had begun cannot be told.
                    name = type(self._trainer.optimizers[0]).__name__
                    error.add_note(
                        f"OOMRecovery: {name} is no optimizer whose update can be watched, so the step is not done "
                        f"again. {self._emergency.last_good()}."
                    )
                    raise
                obstacle = self._undo_batch()
                if num_failures == MAX_FAILURES or obstacle:
                    self._note_on(error, num_failures + 1, obstacle)
                    raise
                failure = note_failure(error, diagnosis, "between backward and optimizer step", self._device)
                stopped = None
            else:
                if failure is not None:
                    cure = f"the batch was done again after releasing memory (retry {num_failures})"
                    self._on_event(self._event(failure, cure, num_failures))
                return result
            if stopped is not None:
                self._stop(stopped)
            assert failure is not None
            forget(failure.error)
            release(self._device)
            reset_scaler(self._trainer, optimizer)
            if was_done and closure is not None:
                closure()

    def _note_on(self, error: BaseException, num_failures: int, obstacle: str) -> None:
        """What a user should know of an error that is raised."""
        saved = self._emergency.save()
        times = "once" if num_failures == 1 else f"{num_failures} times"
        error.add_note(
            f"OOMRecovery could not cure this: out of memory between backward and the optimizer step, {times}"
            f"{f'; {obstacle}' if obstacle else ''}; nothing of this step was applied.\n"
            f"Memory: {describe_memory(self._device)}\n{saved}."
        )

    def _event(self, failure: Failure, cure: str, num_retries: int) -> OOMEvent:
        asked, free = failure.requested_bytes, failure.free_bytes
        step = self._trainer.global_step
        return OOMEvent("fit", step, failure.phase, asked, free, -1, num_retries, 1, 0, cure)

    def _on_update(self, cure: str, error: BaseException) -> None:
        """The update of the weights was done in less memory."""
        asked = classify(error, self._device.type).requested_bytes
        failure = Failure(error, "optimizer step", asked, free_bytes(self._device), "")
        self._on_event(self._event(failure, cure, 1))

    def _stop(self, failed: UpdateFailed) -> NoReturn:
        """Nothing helped: say in which state everything is, and where to go on."""
        forget(failed)
        forget(failed.original)
        release(self._device)
        if failed.is_clean:
            state = f"Nothing of this step was applied. {self._emergency.save()}."
        else:
            state = (
                f"Weights or optimizer are changed in part, which cannot be undone; nothing was applied twice. "
                f"{self._emergency.last_good()}."
            )
        raise OOMRecoveryError(
            f"out of memory in the optimizer step {self._trainer.global_step} ({failed.original}), even with less: "
            f"parameter by parameter, after releasing memory. {state} Memory: {describe_memory(self._device)}."
        ) from failed.original
