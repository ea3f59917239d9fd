"""`PipelineStrategy`: says when a step's parts begin and end; `pipeline.PipelineSession` does the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, optim

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.foreign import is_foreign
from lightning_gpufeed.pipeline.links import PipelineGroups
from lightning_gpufeed.pipeline.meeting import everyone, meet, part
from lightning_gpufeed.pipeline.nested import flatten, split
from lightning_gpufeed.pipeline.peers import lost_peer
from lightning_gpufeed.pipeline.session import PipelineSession
from lightning_gpufeed.strategies.figures import log_figures
from lightning_gpufeed.strategies.gate import raw
from lightning_gpufeed.strategies.out_of_order import OutOfOrderStrategy
from lightning_gpufeed.strategies.quiet import QuietStep
from lightning_gpufeed.strategies.trainer_parts import (
    TrainerParts,
    check_callbacks,
    check_optimizers,
    warn_of_batch_norm,
)

__all__ = ["PipelineStrategy"]


class PipelineStrategy(OutOfOrderStrategy):
    """Pipeline parallel training: what `OutOfOrderStrategy(pipeline_size=...)` is from 2 on.

    The layers of one `nn.Sequential` of the module are shared out among ranks. When `training_step` calls it, the batch
    goes through all of them in microbatches, and the whole output is there on every rank; so `training_step`, what it
    logs and what callbacks read are as on one device. A rank computes input gradients before weight gradients, so that
    the rank before it can go on (`schedule`), and may have several stages in turn (`layers_per_stage`). Several
    pipelines train on different batches: 8 devices with `pipeline_size=4` are two replicas.

    What stays bitwise equal to training on one device on the same microbatches: outputs in evaluation; weights, where a
    loss's own rounding does not depend on how many samples it sees (otherwise to 1e-6). Not equal: BatchNorm takes its
    statistics from each microbatch, and dropout draws other random numbers (the same for any number of ranks).

    With "1f1b", "interleaved", "zero_bubble" and "zbv" backward begins before all forwards are done. For that
    `training_step` is run a second time, on one rank and for each microbatch, with what it logs, counts and draws put
    back. Where its loss is not the mean over samples, or the model's input is drawn at random, that is noticed, said
    once, and backward begins after all forwards.

    ==================================  =============================================================================
    Hook                                what it does
    ==================================  =============================================================================
    setup_environment                   refuses a number of ranks that makes no pipelines; all ranks meet
    setup                               rank 0's weights to all; layers of other ranks give their memory back
    process_dataloader                  workers of all ranks of a pipeline draw the same random numbers
    training_step, validation_step      the first measures the layers, if a decision needs it; then the schedule runs
    test_step                           likewise; after SIGTERM all ranks end together (see `signals`)
    block_backward_sync                 while gradients are accumulated they are not averaged over replicas
    reduce, all_gather                  over replicas, as the ranks of a pipeline have the same values
    broadcast, barrier,                 over all ranks
    reduce_boolean_decision
    lightning_module_state_dict,        full ones, as of one device; all ranks take part
    optimizer_state, save_checkpoint
    load_optimizer_state_dict           states of other ranks' layers take no memory
    teardown                            every rank has all weights again
    ==================================  =============================================================================

    Example:
        >>> type(OutOfOrderStrategy(pipeline_size=2, schedule="zero_bubble")).__name__
        'PipelineStrategy'
    """

    _session: PipelineSession | None = None
    _groups: PipelineGroups | None = None
    _quiet: QuietStep | None = None
    _parts: TrainerParts | None = None
    _is_plan_logged = False

    @property
    def pipeline_session(self) -> PipelineSession | None:
        """The pipeline, with its plan; None unless something runs."""
        return self._session

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a pipeline have the same batches."""
        size = self._size
        return {"num_replicas": self.num_nodes * self.num_processes // size, "rank": self.global_rank // size}

    @property
    def _size(self) -> int:
        assert self._pipeline_options is not None
        return self._pipeline_options.pipeline_size

    def setup_environment(self) -> None:
        """As in `DDPStrategy`; pipelines can be made of the ranks, and all have left earlier trainings.

        Raises:
            SyncError: A rank has not.
            ValueError: The number of ranks is no multiple of `pipeline_size`.
        """
        num_ranks = self.num_nodes * self.num_processes
        if num_ranks % self._size:
            raise ValueError(
                f"pipeline_size is {self._size}, and there are {num_ranks} ranks (devices x num_nodes); expected a "
                "multiple of it. Change devices, num_nodes or pipeline_size."
            )
        super().setup_environment()
        meet(self._timeout)

    def setup(self, trainer: Trainer) -> None:
        """As in `DDPStrategy`; layers of other ranks do not come to the device.

        Args:
            trainer: The Trainer.

        Raises:
            ScheduleError: The module cannot be cut, or its optimizer needs gradients of all layers at once.
        """
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._trainer, self._has_failed, self._is_plan_logged = trainer, False, False
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.lightning_module)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        assert self._pipeline_options is not None
        if is_fitting:
            # Before layers go: an optimizer that is fused refuses parameters without memory.
            check_callbacks(trainer)
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self._groups = PipelineGroups.create(self._size, self._timeout)
        self._session = PipelineSession(
            self.lightning_module,
            self._pipeline_options,
            self._groups,
            self.root_device,
            pipeline_module=self._pipeline_module,
            is_training=is_fitting,
            broadcast_buffers=self._broadcast_buffers,
            on_message=self._say,
        )
        self._parts = TrainerParts(trainer, self.lightning_module, self.precision_plugin, self.root_device)
        self._parts.attach(self._session)
        self.setup_precision_plugin()
        if is_fitting:
            for optimizer in self.optimizers:
                self._session.watch(raw(optimizer))
            self._parts.attach_training(self._session)
            layers = self._session.layers
            self._quiet = QuietStep(self.lightning_module, layers.layers)
            warn_of_batch_norm(layers.names, layers.layers, self._pipeline_options.microbatches)

    def process_dataloader(self, dataloader: Any) -> Any:
        """With `seed_everything(workers=True)`, workers of all ranks of a pipeline draw the same.

        Args:
            dataloader: Of this rank.

        Returns:
            The same one.
        """
        if int(os.environ.get("PL_SEED_WORKERS", "0")) and getattr(dataloader, "worker_init_fn", self) is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.global_rank // self._size)
        return super().process_dataloader(dataloader)

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """Over replicas, as all ranks of a pipeline have the same values.

        Args:
            tensor: Of this rank; anything else stays as it is.
            group: Of ranks; None for the replicas.
            reduce_op: As in `DDPStrategy`.

        Returns:
            The same on all ranks.
        """
        self._check_alone()
        if group is None and self._groups is not None:
            group = self._groups.replica
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """From all replicas, as all ranks of a pipeline have the same values.

        Args:
            tensor: Of this rank.
            group: Of ranks; None, and all of them, for the replicas.
            sync_grads: As in `DDPStrategy`.

        Returns:
            With the replicas in a first dimension; with one of them as it is, as on one device.
        """
        self._check_alone()
        if group in (None, torch.distributed.group.WORLD) and self._groups is not None:
            if len(self._groups.replicas) == 1:
                return tensor
            group = self._groups.replica
        return super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As in `DDPStrategy`."""
        self._check_alone()
        if everyone() is None:
            return obj
        box = [obj]
        with lost_peer("waiting to be told by another rank"):
            torch.distributed.broadcast_object_list(box, src, everyone())
        return box[0]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As in `DDPStrategy`."""
        self._check_alone()
        if everyone() is torch.distributed.group.WORLD:
            with lost_peer("waiting for all ranks"):
                super().barrier(*args, **kwargs)
        elif everyone() is not None:
            self.reduce_boolean_decision(True)

    def _check_alone(self) -> None:
        """A step that this rank alone runs for one microbatch must not wait for others."""
        if self._quiet is not None and self._quiet.is_running:
            raise ScheduleError("training_step talks to other ranks")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks.

        Args:
            decision: Of this rank.
            all: Whether all have to say yes, or one.

        Returns:
            The same on all ranks.
        """
        votes = torch.tensor(int(decision), device=self.root_device)
        with lost_peer("deciding together"):
            total = int(super().reduce(votes, everyone(), "sum"))
        return total == self.world_size if all else total > 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's.

        Args:
            *args: Of the module's.
            **kwargs: Likewise.

        Returns:
            What the module's gives, the same on all ranks of a pipeline.
        """
        assert self._session is not None
        self._session.begin_step()
        if self._is_automatic() and args:
            self._session.microbatch_loss = partial(self._part_of_loss, args, kwargs)
        try:
            result = super().training_step(*args, **kwargs)
        finally:
            self._session.microbatch_loss = None
        if not self._is_plan_logged and self._session.plan is not None:  # which took the first batch, or a checkpoint
            self._is_plan_logged = True
            log_figures(self._trainer, self._session.plan.to_metrics())
        return result

    def _part_of_loss(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], microbatch: int, sizes: Sequence[int]
    ) -> Tensor:
        """What a microbatch adds to the loss that backward gets, scaled as that will be."""
        assert self._trainer is not None
        assert self._quiet is not None
        batch, *others = args
        loss = self._quiet.run(split(batch, sizes)[microbatch], *others, **kwargs)
        loss = loss * (sizes[microbatch] / sum(sizes)) / self._trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's.

        Args:
            *args: Of the module's.
            **kwargs: Likewise.

        Returns:
            What the module's gives, the same on all ranks of a pipeline.
        """
        assert self._session is not None
        self._evaluation_begins()
        self._session.begin_step()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as in `validation_step`."""
        self._evaluation_begins()
        return super().test_step(*args, **kwargs)

    def _evaluation_begins(self) -> None:
        if self._parts is not None and self._session is not None:
            self._parts.begin_evaluation(self._session)

    def _backward_ends(self) -> None:
        if self._session is not None:
            self._session.end_backward()
            if self._session.runtime is not None and self._session.runtime.why_split is not None:
                self._say(f"backward begins after all forwards, because {self._session.runtime.why_split}.")

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients are not averaged, as more are to be added to them.

        Yields:
            Nothing.
        """
        assert self._session is not None
        before, self._session.is_syncing = self._session.is_syncing, False
        try:
            yield
        finally:
            self._session.is_syncing = before

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state as on one device.

        Returns:
            The same on all ranks.
        """
        return super().lightning_module_state_dict() if self._session is None else self._session.full_state_dict()

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, Tensor]:
        """An optimizer's state as on one device.

        Args:
            optimizer: Whose.

        Returns:
            All of it on the rank that writes files; on others what they have.
        """
        if self._session is None:
            return super().optimizer_state(optimizer)
        return self._session.full_optimizer_state(raw(optimizer), keep=self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As in `DDPStrategy`; states of layers of other ranks take no memory.

        Args:
            checkpoint: A full one.
        """
        if self._session is not None:
            pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
            states = [self._session.own_optimizer_state(raw(optimizer), state) for optimizer, state in pairs]
            checkpoint = {**checkpoint, "optimizer_states": states}
        super().load_optimizer_state_dict(checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """As in `DDPStrategy`, if the checkpoint has all weights.

        Args:
            checkpoint: To write.
            filepath: Where.
            storage_options: Of the `CheckpointIO`.

        Raises:
            ScheduleError: A callback has put in weights that this rank does not have.
        """
        for name, value in checkpoint.items():
            if any(isinstance(leaf, Tensor) and is_foreign(leaf) for leaf in flatten(value)[0]):
                raise ScheduleError(
                    f"{name!r} of the checkpoint has weights of layers that other ranks of the pipeline have, so the "
                    "file could not be used. A callback or on_save_checkpoint took them from the module; expected it "
                    "to use checkpoint['state_dict'], which has all of them."
                )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """Every rank has all weights again; after an error only its own."""
        session, self._session, self._groups, self._quiet = self._session, None, None, None
        if self._parts is not None:
            self._parts.detach()
        if session is not None:
            states = []
            if not self._has_failed and session.runtime is not None:  # which may be saved after the training
                optimizers = [raw(optimizer) for optimizer in self.optimizers]
                states = [session.full_optimizer_state(one, keep=self.is_global_zero) for one in optimizers]
            session.close(has_failed=self._has_failed)
            for optimizer, state in zip(self.optimizers, states, strict=False):
                if self.is_global_zero:
                    raw(optimizer).load_state_dict(state)
        super().teardown()
        part(is_well=not self._has_failed)
