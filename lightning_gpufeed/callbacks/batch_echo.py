"""`BatchEcho`: uses a fetched batch several times on the device."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_gpufeed.callbacks.figures import log_figures
from lightning_gpufeed.callbacks.scaled_rate import ScaledRate
from lightning_gpufeed.callbacks.set_aside import WhenSetAside
from lightning_gpufeed.callbacks.trainer_epoch import (
    HookOncePerBatch,
    ScheduleByProgress,
    WatchSetup,
    is_cut_to_shortest,
    is_limited,
    join_loaders,
    lengthen_epoch,
    num_processed,
    obstacle_to_echo,
    set_processed,
    share_between_checks,
    split_loaders,
    trains_uninterrupted,
)
from lightning_gpufeed.device.marks import StepClock
from lightning_gpufeed.device.vote import HostVote
from lightning_gpufeed.echo.plan import AdaptiveEcho, EchoRule, EchoTrace, FixedEcho, ReplayedEcho
from lightning_gpufeed.echo.report import EchoReport
from lightning_gpufeed.echo.resume import read_trace
from lightning_gpufeed.echo.session import EchoSession
from lightning_gpufeed.hdf5.arguments import LARGEST_SEED, whole_number

__all__ = ["BatchEcho"]


class BatchEcho(Callback):
    """Trains on every fetched batch several times, on the device, so that a slow loader is waited for less.

    A batch is fetched and copied to the device once. Each pass over it is a new permutation of its samples, cut into
    `num_splits` steps. Fixed, every batch is used `echo_factor` times; with "auto" a batch is used again only while
    the next one is not ready, so a loader that keeps up gives exactly the training without this callback.

    Echoed samples are worth less than fresh ones. Echoes are free only while the loader is what limits the training:
    with R = time to load a batch / time of one pass over it, up to `echo_factor` = R. And a step on repeated samples
    has to be a smaller one: lower the learning rate by about `echo_factor`, or say `scale_lr="inverse"`.

    ======================================  ===================================================================
    Hook                                    what it does
    ======================================  ===================================================================
    setup                                   stands in for the training loader and for the copy to the device
    on_train_start                          scales learning rates; corrects the count of steps after a resume
    on_train_epoch_start                    a new epoch has its usual length
    on_train_batch_end                      time of a step, on its device; whether validation is due
    on_validation_start, on_validation_end  keep validation out of the time of an epoch
    on_train_epoch_end                      one line on what echoing did, and the same for the loggers
    state_dict, load_state_dict             place inside the batch, states of the loaders, echoes so far
    on_load_checkpoint                      whether the steps that a checkpoint counts are batches, or pieces
    on_exception, teardown                  takes everything back, ends threads
    ======================================  ===================================================================

    What happens to a batch: `on_before_batch_transfer` and `transfer_batch_to_device` once, `on_after_batch_transfer`
    for each piece, so random augmentation there is new in every pass. Pieces are copies: what is done to one in place
    is not seen by the next pass. Beside the batch, one piece is in device memory.

    Every counter of the Trainer counts steps: `num_training_batches`, `limit_train_batches`, `overfit_batches`,
    `val_check_interval`, `accumulate_grad_batches`, `max_steps`, `estimated_stepping_batches`. With "auto" an epoch
    begins with the length it has without echoes and grows with each; shares of an epoch (floats) go by fresh batches,
    and step-wise learning rate schedules by how far the training is, so that they end when it does.

    What stays bitwise equal: `echo_factor=1, num_splits=1`, and "auto" with a loader that keeps up, to training
    without this callback. A resumed run to one that was not interrupted, from any step, given a loader with
    `state_dict` and `load_state_dict`; with "auto" if the echoes are replayed. All else is another training.

    Several ranks agree on each decision; ranks of a pipeline use the same pieces. Optimization: automatic or manual.

    Example:
        >>> callbacks = [BatchEcho(echo_factor=2, num_splits=2)]     # a batch of 512: four steps of 256
        >>> callbacks = [BatchEcho("auto", max_echo_factor=5)]       # only while the loader is behind

    Source: Choi, Passos, Shallue, Dahl, "Faster Neural Network Training with Data Echoing" (arXiv 1907.05550).
    """

    def __init__(
        self,
        echo_factor: int | Literal["auto"] = "auto",
        *,
        num_splits: int = 1,
        max_echo_factor: int = 5,
        scale_lr: Literal["inverse", "keep"] | None = None,
        seed: int = 0,
        replay: dict[int, list[int]] | str | Path | None = None,
        read_ahead: bool = True,
    ) -> None:
        """Note the arguments.

        Args:
            echo_factor: How often each batch is used, or "auto": again while the next one is not ready.
            num_splits: Steps that one pass over a batch is cut into, at most the loader's batch size.
            max_echo_factor: Most uses of a batch with "auto"; of batches that workers bring at once, on average.
            scale_lr: "inverse" divides the learning rate of every step by the echo factor; schedules and checkpoints
                do not see it. "keep" leaves it without a warning, for a rate that was tuned with echoes.
            seed: Decides all permutations. They draw from generators of their own.
            replay: With "auto": a checkpoint, or a `trace`, whose echoes are to be repeated exactly. After its end the
                loader decides again.
            read_ahead: Let a thread fetch the next batch while this one is trained on. Loaders that draw random
                numbers in the training process are found out and not read ahead. Needed for "auto".

        Raises:
            ValueError: An argument is out of range.
        """
        super().__init__()
        self._is_auto = isinstance(echo_factor, str) and echo_factor == "auto"
        if not self._is_auto:
            try:
                echo_factor = whole_number("echo_factor", echo_factor, 1)
            except ValueError as error:
                raise ValueError(f"{str(error).rstrip('.')}, or 'auto'.") from None
        self.echo_factor = echo_factor
        self.num_splits = whole_number("num_splits", num_splits, 1)
        self.max_echo_factor = whole_number("max_echo_factor", max_echo_factor, 1)
        if scale_lr not in (None, "inverse", "keep"):
            raise ValueError(f"scale_lr is {scale_lr!r}; expected 'inverse', 'keep' or None.")
        if replay is not None and not self._is_auto:
            raise ValueError(f"replay is given, but echo_factor is {echo_factor}; expected 'auto' to replay echoes.")
        if not read_ahead and self._is_auto:
            raise ValueError("read_ahead is False, but echo_factor 'auto' has to know whether the next batch is ready.")
        self.seed = whole_number("seed", seed, 0, LARGEST_SEED)
        self.scale_lr, self.replay, self.read_ahead = scale_lr, replay, read_ahead
        self.reports: list[EchoReport] = []
        self._saved: Mapping[str, Any] | None = None
        self._earlier: dict[int, list[int]] = {}
        self._session: EchoSession | None = None
        self._undo: list[Any] = []
        self._vote: HostVote | None = None
        self._begin = self._validation_seconds = 0.0
        self._usual_check = 0
        self._num_moves: int | None = None
        self._schedule: ScheduleByProgress | None = None
        self._has_warned = self._counts_batches = False

    @property
    def trace(self) -> dict[int, list[int]]:
        """How often each batch was used: epoch -> passes over each of its batches. `replay=` takes it."""
        if self._session is not None:
            return self._session.trace.to_dict()
        return dict(self._saved["trace"]) if self._saved else {}

    # Standing in for the loader --------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand in for the training loader, and for the copy to the device.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            stage: Only "fit" matters.

        Raises:
            ValueError: There are two of this callback, or the trace to replay cannot be read.
        """
        if stage != "fit":
            return
        self._take_back()
        self._num_moves = None  # as many as the Trainer's place says, unless a checkpoint says otherwise
        self._earlier = {epoch: passes for epoch, passes in self.trace.items() if epoch < trainer.current_epoch}
        self._session = self._schedule = None
        self._counts_batches = False
        if sum(isinstance(callback, BatchEcho) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("the Trainer has more than one BatchEcho; expected one.")
        obstacle = obstacle_to_echo(trainer, pl_module)
        if obstacle is not None:
            rank_zero_warn(f"BatchEcho does nothing: {obstacle}.")
        elif not self._is_plain:
            self._start_session(trainer, pl_module)

    @property
    def _is_plain(self) -> bool:
        """Whether batches are used as they are."""
        return self.echo_factor == 1 and self.num_splits == 1

    def _start_session(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._vote = HostVote(getattr(trainer.strategy, "_timeout", None))
        self._session = EchoSession(
            self._rule(),
            self.num_splits,
            self.seed,
            vote=self._vote,
            replica=(trainer.distributed_sampler_kwargs or {}).get("rank"),  # ranks of a pipeline have the same batches
            current_epoch=lambda: trainer.current_epoch,
            num_processed=lambda: num_processed(trainer),
            is_cut_to_shortest=lambda: is_cut_to_shortest(trainer),
            is_epoch_over=lambda: num_processed(trainer) >= trainer.num_training_batches,
            on_length_change=lambda num_steps: lengthen_epoch(trainer, num_steps),
            clock=StepClock(trainer.strategy.root_device),
        )
        self._session.trace = EchoTrace(self._earlier)
        self._stand_in(trainer, pl_module, self._session)

    def _rule(self) -> EchoRule:
        if self._is_plain:
            # Only there to continue a run that echoed.
            return AdaptiveEcho(1)
        if not self._is_auto:
            return FixedEcho(int(self.echo_factor))
        adaptive = AdaptiveEcho(self.max_echo_factor)
        return adaptive if self.replay is None else ReplayedEcho(read_trace(self.replay, self.state_key), adaptive)

    def _stand_in(self, trainer: Trainer, pl_module: LightningModule, session: EchoSession) -> None:
        """Put ourselves where the Trainer processes its loader and moves its batches."""
        strategy = trainer.strategy
        own_process, own_to_device = strategy.process_dataloader, strategy.batch_to_device
        armed: list[Any] = []
        setup = WatchSetup(trainer, session.start_over, lambda: session.extra_steps)

        def process_dataloader(loader: object) -> object:
            loader = own_process(loader)
            if not setup.is_on:
                return loader
            return session.wrap(
                loader,
                can_read_ahead=self.read_ahead,
                is_uninterrupted=trains_uninterrupted(trainer),
                limit=trainer.limit_train_batches if is_limited(trainer) else None,
            )

        def is_repeat() -> bool:
            armed[:] = [session.arm()] if trainer.training else []
            return bool(armed) and armed[0] is not None and not armed[0].is_fetch

        def batch_to_device(batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
            piece = armed.pop() if armed else None
            if piece is None:
                return own_to_device(batch, device=device, dataloader_idx=dataloader_idx)
            if piece.is_fetch:
                session.device_cache.clear()
                device = device or strategy.root_device
                batch = pl_module._call_batch_hook("transfer_batch_to_device", batch, device, dataloader_idx)
                session.cache(split_loaders(trainer, batch, len(session.members)))
                del batch
            part = join_loaders(trainer, session.take())
            return pl_module._call_batch_hook("on_after_batch_transfer", part, dataloader_idx)

        strategy.__dict__["process_dataloader"] = process_dataloader
        strategy.__dict__["batch_to_device"] = batch_to_device
        hook = HookOncePerBatch(pl_module, is_repeat)
        self._undo += [
            WhenSetAside(trainer, self, self._take_back).remove,
            hook.remove,
            setup.remove,
            lambda: strategy.__dict__.pop("process_dataloader", None),
            lambda: strategy.__dict__.pop("batch_to_device", None),
        ]

    def _take_back(self) -> None:
        """Undo all that was put in other places; end threads."""
        while self._undo:
            self._undo.pop()()
        if self._session is not None:
            self._session.close()
        if self._vote is not None:
            self._vote.close()
            self._vote = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take everything back."""
        self._take_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take everything back: `teardown` is not called then."""
        self._take_back()

    # Training --------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct the count of steps after a resume; scale learning rates."""
        session = self._session
        if session is None:
            return
        if self._counts_batches:
            set_processed(trainer, session.num_steps_of(num_processed(trainer)))
        elif session.saved is not None and session.saved.num_steps is not None:
            set_processed(trainer, session.saved.num_steps)
        if self.scale_lr == "inverse":
            for optimizer in trainer.optimizers:
                self._undo.append(ScaledRate(optimizer, lambda: 1 / session.mean_factor).remove)
        elif self.scale_lr is None and not self._is_auto and session.mean_factor > 1:
            self._warn_of_rate()
        if self._is_auto:
            usual = trainer.num_training_batches - session.extra_steps
            if usual < math.inf:
                self._usual_check = max(1, int(usual * (share_between_checks(trainer) or 1)))
            self._schedule = ScheduleByProgress(trainer, lambda: session.fresh_steps, usual, self._num_moves)
            self._undo.append(self._schedule.remove)
        self._begin, self._validation_seconds = time.perf_counter(), 0.0

    def _warn_of_rate(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"BatchEcho uses a batch {'up to ' if self._is_auto else ''}"
                f"{self.max_echo_factor if self._is_auto else self.echo_factor} times with the learning rate as it is. "
                f"Steps on repeated samples point the same way, so a rate that is right for fresh ones is too high: "
                f"scale_lr='inverse' divides it by the echo factor; scale_lr='keep' says that it was tuned for this."
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A new epoch has its usual length."""
        if self._session is not None:
            self._session.begin_epoch()
            self._begin, self._validation_seconds = time.perf_counter(), 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is done; where validation goes by shares of an epoch, see whether it is due."""
        session = self._session
        if session is None or session.latest is None:
            return
        session.measures.clock.end()
        if session.latest.is_echo and self.scale_lr is None:
            self._warn_of_rate()
        if self._is_auto and 0 < (share_between_checks(trainer) or 0) < 1:
            is_due = not session.latest.is_echo and session.fresh_steps % max(1, self._usual_check) == 0
            # The Trainer validates when this divides the number of the step.
            trainer.val_check_batch = batch_idx + 1 if is_due else batch_idx + 2

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is no part of the time of an epoch."""
        self._validation_seconds -= time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is no part of the time of an epoch."""
        self._validation_seconds += time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what echoing did; the next epoch begins with a fetch."""
        session = self._session
        if session is None:
            return
        elapsed = time.perf_counter() - self._begin - self._validation_seconds
        report = session.report(trainer.current_epoch, elapsed)
        self.reports.append(report)
        rank_zero_info(str(report))
        log_figures(trainer, report.to_metrics(), "BatchEcho")
        session.finish_epoch()

    # Where to continue -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Place inside the epoch, states of the loaders, echoes so far.

        Returns:
            Empty before training.
        """
        if self._session is None:
            return dict(self._saved or {})
        num_moves = self._num_moves if self._schedule is None else self._schedule.num_moves
        return {**self._session.state_dict(), "num_moves": num_moves}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy keeps: the arguments, and what a checkpoint would hold."""
        return {
            **self.__dict__,
            "_saved": self.state_dict(),
            "_session": None,
            "_schedule": None,
            "_vote": None,
            "_undo": [],
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See whether the steps that the checkpoint counts are batches, or pieces of them."""
        has_state = bool(checkpoint.get("callbacks", {}).get(self.state_key))
        self._counts_batches = not has_state
        if has_state and self._is_plain and trainer.state.fn == "fit" and not obstacle_to_echo(trainer, pl_module):
            self._start_session(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved place.

        Args:
            state_dict: From `state_dict`.

        Raises:
            ValueError: The state is of another version.
        """
        if not state_dict:
            return
        self._saved = state_dict
        self._num_moves = state_dict["num_moves"]
        if self._session is not None:
            self._session.load_state_dict(state_dict)
