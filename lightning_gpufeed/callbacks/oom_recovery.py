"""`OOMRecovery`: out of memory costs a retry, not the run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lightning_gpufeed.callbacks.announcer import Announcer
from lightning_gpufeed.callbacks.emergency_checkpoint import EmergencyCheckpoint
from lightning_gpufeed.callbacks.recovered_evaluation import EVALUATIONS, RecoveredEvaluation
from lightning_gpufeed.callbacks.recovered_update import RecoveredUpdate
from lightning_gpufeed.callbacks.set_aside import WhenSetAside
from lightning_gpufeed.callbacks.smaller_loader import LoaderShrinker
from lightning_gpufeed.callbacks.trainer_step import (
    OF_LIGHTNING,
    HookedLogs,
    OnceHooks,
    RecoveringClosure,
    loader_samples,
    merge_results,
    obstacle_to_recovery,
    take_step_over,
    with_batch,
    zero_grad_once,
)
from lightning_gpufeed.device.vote import HostVote
from lightning_gpufeed.hdf5.arguments import whole_number
from lightning_gpufeed.recover.arguments import check_choices, check_kinds
from lightning_gpufeed.recover.attempt import Recovery
from lightning_gpufeed.recover.batch_guard import changed_in_place
from lightning_gpufeed.recover.logged import Rule
from lightning_gpufeed.recover.plan import RetryPlan
from lightning_gpufeed.recover.ranks import RankGuard, obstacle_to_guard
from lightning_gpufeed.recover.report import OOMEvent
from lightning_gpufeed.recover.split_batch import BatchSplitter
from lightning_gpufeed.recover.states import ModuleStates, watch_parts
from lightning_gpufeed.recover.work import StepWork

__all__ = ["OOMRecovery"]


class OOMRecovery(Callback):
    """Does a step that ran out of memory again: the same batch, the same numbers, in less memory.

    First whole once more (memory may have been in pieces), then in 2, 4, 8 ... microbatches, each weighted by its share
    of the samples. The batch, the learning rate, schedules and all counters stay what they are; nothing is skipped and
    nothing counted twice. The size that worked is kept, and larger ones are tried again after clean batches.

    ==================================  =========================================================================
    Hook                                what it does
    ==================================  =========================================================================
    setup                               stands before the steps of the Trainer; refuses what cannot be undone
    on_fit_start                        guards the optimizer; several ranks: reduces gradients in DDP's place
    on_train_batch_end                  holds nothing of the batch any more
    on_train_epoch_end                  with "shrink_loader", makes the batch size smaller
    state_dict, load_state_dict         sizes that were found
    on_exception, teardown              takes everything back; `on_train_end`: a line on what happened
    ==================================  =========================================================================

    An attempt that failed leaves nothing behind: logs, torchmetrics, buffers, counters and lists of the module, random
    generators and the gradients of earlier batches of an accumulation window are what they were before it.

    What stays bitwise equal to training without this callback: everything, as long as no batch is split; also when a
    batch fits at the second try (with more than two ranks: up to the order in which their gradients are added). What is
    equal up to rounding: a batch in microbatches. What is not: outputs of batch normalisation, which sees microbatches
    (running statistics are counted once per batch, see `correct_batchnorm`); dropout masks of a batch that is split;
    buffers and attributes, which a step may change once per microbatch. A loss that is no mean over samples is refused.

    What cannot be undone is not supported: manual optimization, strategies that keep the model on several devices,
    SyncBatchNorm, collectives in `training_step`, batches and trained weights changed in place (found out and named).
    What `training_step` does outside the module (files, objects of other classes, logger calls) happens per attempt.

    Several ranks (`DDPStrategy`): every attempt runs without collectives, all ranks vote on the host, and retry
    together with the same number of microbatches. Gradients are reduced after backward, not during it.

    Example:
        >>> callbacks = [OOMRecovery()]
        >>> callbacks = [OOMRecovery(weight_fn=lambda batch: (batch["labels"] != -100).sum())]     # a mean over tokens
        >>> callbacks = [OOMRecovery(mode="shrink_loader", scale_lr="linear")]
    """

    def __init__(
        self,
        *,
        mode: Literal["microbatch", "shrink_loader"] = "microbatch",
        num_microbatches: int = 1,
        grow_after: int | None = 20,
        max_retries: int = 20,
        weight_fn: Callable[[Any], Any] | None = None,
        split_fn: Callable[[Any, int], Any] | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        split_check: Literal["refuse", "warn", "skip"] = "refuse",
        correct_batchnorm: bool = True,
        emergency_checkpoint: bool = True,
        scale_lr: Literal["linear", "sqrt", "keep"] | None = None,
    ) -> None:
        """Note the arguments.

        Args:
            mode: "microbatch" keeps the batch size. "shrink_loader" splits batches only until the end of the epoch; the
                next one has a smaller `batch_size` (of the DataModule, or the module).
            num_microbatches: To begin with, and the fewest ever.
            grow_after: Clean batches before a larger size is tried; twice as many each time it fails. None: never.
            max_retries: Failed attempts of one batch after which it is given up.
            weight_fn: (Micro)batch -> its weight, a number, where the loss is a mean over something else than samples.
            split_fn: Batch and number -> list of microbatches, for kinds of batches that are not known.
            loss_reduction: How the loss of a batch comes about from those of its samples.
            split_check: What to do when the loss of a batch does not follow from those of its parts.
            correct_batchnorm: Count the running statistics once per batch; False: once per microbatch.
            emergency_checkpoint: Save the training before an error ends it.
            scale_lr: With "shrink_loader", needed: how the learning rate follows the batch size.

        Raises:
            ValueError: An argument is out of range.
        """
        super().__init__()
        num_microbatches = whole_number("num_microbatches", num_microbatches, 1)
        max_retries = whole_number("max_retries", max_retries, 1)
        grow_after = None if grow_after is None else whole_number("grow_after", grow_after, 1)
        check_choices(mode, loss_reduction, split_check, scale_lr)
        check_kinds(weight_fn, split_fn, correct_batchnorm=correct_batchnorm, emergency_checkpoint=emergency_checkpoint)
        self.mode, self.scale_lr = mode, scale_lr
        self.loss_reduction, self.split_check = loss_reduction, split_check
        self.correct_batchnorm, self.emergency_checkpoint = correct_batchnorm, emergency_checkpoint
        self.weight_fn, self.split_fn = weight_fn, split_fn
        self._plans = {s: RetryPlan(1, grow_after=grow_after, max_retries=max_retries) for s in EVALUATIONS.values()}
        grow_after = None if mode == "shrink_loader" else grow_after
        self._plans["fit"] = RetryPlan(num_microbatches, grow_after=grow_after, max_retries=max_retries)
        self._announcer = Announcer()
        self._rules: dict[str, dict[str, Rule]] = {}
        self._shrunk_batch_size: int | None = None
        self._forget_run()

    def _forget_run(self) -> None:
        """Nothing of a Trainer is held."""
        self._undo: list[Callable[[], Any]] = []
        self._serves: Trainer | None = None
        self._vote: HostVote | None = None
        self._ranks: RankGuard | None = None
        self._recoveries: dict[str, Recovery] = {}
        self._states: dict[str, ModuleStates] = {}
        self._work: StepWork | None = None
        self._update: RecoveredUpdate | None = None
        self._closure: RecoveringClosure | None = None
        self._is_again = self._has_new_parts = False
        self._shrinker: LoaderShrinker | None = None

    @property
    def num_microbatches(self) -> int:
        """Into how many microbatches training batches are cut now."""
        return self._plans["fit"].num_microbatches

    # Standing in for the step ------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand before the steps of the Trainer.

        Raises:
            ValueError: Steps of this Trainer cannot be done again; the message says why.
        """
        if self._serves is not None and self._serves is not trainer and self._serves.state.status == "running":
            raise ValueError("this OOMRecovery serves another Trainer that is running; give each Trainer its own.")
        self._take_back()
        self._serves = trainer
        if sum(isinstance(callback, OOMRecovery) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("the Trainer has more than one OOMRecovery; expected one.")
        obstacle = obstacle_to_recovery(trainer, pl_module, is_training=stage == "fit")
        if obstacle is not None:
            raise ValueError(f"OOMRecovery cannot work here: {obstacle}.")
        self._undo.append(WhenSetAside(trainer, self, self._take_back).remove)
        self._undo.append(watch_parts(partial(setattr, self, "_has_new_parts", True)))
        evaluation = RecoveredEvaluation(
            trainer,
            pl_module,
            is_active=partial(self._is_active, trainer),
            recovery=partial(self._recovery, trainer),
            make_work=partial(self._make_work, trainer, pl_module),
            on_note=self._announcer.note,
        )
        self._undo.append(evaluation.remove)
        if stage != "fit":
            return
        self._vote = HostVote(getattr(trainer.strategy, "_timeout", None))
        if self.mode == "shrink_loader":
            self._shrinker = LoaderShrinker(trainer, str(self.scale_lr), self.state_key)
            self._undo.append(self._shrinker.remove)
        self._undo.append(take_step_over(trainer, partial(self._make_closure, trainer, pl_module)))
        self._update = RecoveredUpdate(
            trainer,
            EmergencyCheckpoint(trainer, is_wanted=self.emergency_checkpoint),
            is_active=partial(self._is_active, trainer),
            closure=lambda: self._closure,
            undo_batch=self._undo_batch,
            on_event=partial(self._announcer.event, trainer),
        )
        self._undo.append(self._update.remove)

    def _take_back(self) -> None:
        """Undo all that was put in other places."""
        while self._undo:
            self._undo.pop()()
        if self._vote is not None:
            self._vote.close()
        self._forget_run()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take everything back."""
        if self._serves is trainer:
            self._take_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take everything back: `teardown` is not called then."""
        if self._serves is trainer:
            self._announcer.summary(self.num_microbatches)
            self._take_back()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the optimizer, and what DDP would do between ranks; both exist now, before the first validation.

        Raises:
            ValueError: The ranks cannot retry together; the message says why.
        """
        wrapper = trainer.strategy.model
        if isinstance(wrapper, DistributedDataParallel) and self._vote is not None:
            obstacle = obstacle_to_guard(wrapper)
            if obstacle is not None:
                raise ValueError(f"OOMRecovery cannot work here: {obstacle}.")
            self._ranks = RankGuard(wrapper, self._vote)
        if self._update is not None:
            self._update.guard()

    def _is_active(self, trainer: Trainer) -> bool:
        """Not while a tuner tries sizes or rates with the callbacks set aside: it wants to see the error."""
        return any(callback is self for callback in trainer.callbacks)  # type: ignore[attr-defined]

    def _recovery(self, trainer: Trainer, stage: str) -> Recovery:
        if stage not in self._recoveries:
            self._recoveries[stage] = Recovery(
                stage,
                self._plans[stage],
                BatchSplitter(
                    split_fn=self.split_fn, weight_fn=self.weight_fn, expected_samples=partial(loader_samples, trainer)
                ),
                trainer.strategy.root_device,
                vote=self._vote if stage == "fit" else None,
                split_check=self.split_check,
                is_half="16" in str(trainer.precision),
                on_event=partial(self._announcer.event, trainer),
                on_note=self._announcer.note,
                on_give_up=partial(self._on_give_up, trainer, stage),
            )
        return self._recoveries[stage]

    def _make_work(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, batch_idx: int, **options: Any
    ) -> StepWork:
        if stage not in self._states:
            self._states[stage] = ModuleStates(pl_module, trainer.strategy.root_device, OF_LIGHTNING)
        states, logs = self._states[stage], HookedLogs(trainer, pl_module)
        if self._has_new_parts:
            self._has_new_parts = False
            for known in self._states.values():
                known.is_stale = True
        if batch_idx < 2 or states.is_stale:  # what a step changes is not known yet, or parts have come
            states.refresh()
        states.include_metrics(logs.metrics())
        options["defers_logs"] = trainer.world_size > 1
        return StepWork(states, logs, ranks=self._ranks, rules=self._rules.setdefault(stage, {}), **options)

    # Training ----------------------------------------------------------------------------------------------

    def _make_closure(
        self, trainer: Trainer, pl_module: LightningModule, own: Closure, kwargs: OrderedDict[str, Any], batch_idx: int
    ) -> Closure:
        if not self._is_active(trainer) or own._backward_fn is None:
            return own
        self._is_again = False
        self._closure = RecoveringClosure(own, kwargs, batch_idx, partial(self._train, trainer, pl_module))
        return self._closure

    def _train(self, trainer: Trainer, pl_module: LightningModule, closure: RecoveringClosure) -> ClosureResult:
        if self._work is None or not self._is_again:
            self._work = self._training_work(trainer, pl_module, closure)
        self._is_again = False
        return cast(ClosureResult, self._recovery(trainer, "fit").run(self._work, closure.batch, trainer.global_step))

    def _training_work(self, trainer: Trainer, pl_module: LightningModule, closure: RecoveringClosure) -> StepWork:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        hooks = OnceHooks(trainer, pl_module, self._announcer.note)

        def forward(microbatch: Any) -> tuple[torch.Tensor | None, ClosureResult]:
            if microbatch is closure.batch:
                result = closure._step_fn()
                return result.closure_loss, result
            result = loop._training_step(with_batch(closure.kwargs, microbatch))
            loss, result.closure_loss = result.closure_loss, None
            return loss, result

        def backward(loss: torch.Tensor, is_first: bool, is_last: bool) -> None:
            with hooks.around(is_first, is_last):
                closure._backward_fn(loss)  # type: ignore[misc]

        return self._make_work(
            trainer,
            pl_module,
            "fit",
            closure.batch_idx,
            forward=forward,
            put_together=partial(merge_results, reduction=self.loss_reduction, note=self._announcer.note),
            backward=backward,
            zero_grad=zero_grad_once(closure, loop),
            is_reduced=not trainer.fit_loop._should_accumulate(),
            loss_reduction=self.loss_reduction,
            corrects_batchnorm=self.correct_batchnorm,
        )

    def _undo_batch(self) -> str:
        """Make everything what it was before the batch; why its closure cannot run again, if it cannot."""
        assert self._work is not None
        self._work.undo()
        cast(Any, self._closure)._result = None  # its loss holds the graph
        self._is_again = True
        if self._vote is not None and self._vote.num_ranks > 1:
            return "the other ranks have agreed already that this batch is done"
        return changed_in_place(self._work.guard) if self._work.guard is not None else ""

    # What happened -----------------------------------------------------------------------------------------

    @property
    def events(self) -> list[OOMEvent]:
        """Every batch that ran out of memory, and what worked."""
        return self._announcer.events

    def _on_give_up(self, trainer: Trainer, stage: str) -> str:
        """Everything is as it was before the batch."""
        is_of_training = stage == "fit" or (trainer.validating and trainer.state.fn == "fit")
        return EmergencyCheckpoint(trainer, is_wanted=self.emergency_checkpoint).save() if is_of_training else ""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hold nothing of the batch."""
        self._closure = self._work = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """With `shrink_loader`: the next epoch has smaller batches, if these did not fit."""
        plan = self._plans["fit"]
        if self._shrinker is None or plan.num_microbatches <= plan.fewest:
            return
        factor = plan.num_microbatches // plan.fewest
        if (obstacle := self._shrinker.obstacle(factor)) is not None:
            self._announcer.note(f"the batch size stays, and batches are split: {obstacle}")
            return
        rank_zero_info(f"OOMRecovery: {self._shrinker.shrink(factor)}.")
        self._shrunk_batch_size = self._shrinker.batch_size
        plan.start_over()

    # Where to continue -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The sizes that were found.

        Returns:
            Plain numbers and names.
        """
        return {
            "plans": {stage: plan.state_dict() for stage, plan in self._plans.items()},
            "rules": {stage: dict(rules) for stage, rules in self._rules.items()},
            "batch_size": self._shrunk_batch_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the sizes that were found.

        Args:
            state_dict: From `state_dict`.
        """
        for stage, plan in self._plans.items():
            plan.load_state_dict(state_dict["plans"][stage])
        for stage, rules in state_dict["rules"].items():
            self._rules.setdefault(stage, {}).update(rules)
        self._shrunk_batch_size = state_dict["batch_size"]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy keeps: the arguments and what was found."""
        held: dict[str, Any] = {"_undo": [], "_recoveries": {}, "_states": {}}
        nothing = dict.fromkeys(("_vote", "_ranks", "_work", "_update", "_closure", "_shrinker", "_serves"))
        return {**self.__dict__, **held, **nothing}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how it went."""
        self._announcer.summary(self.num_microbatches)
