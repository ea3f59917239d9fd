"""`OutOfOrderStrategy`: says when a step's parts begin and end; `sync.GradientSync` does the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn, optim
from torch.distributed.constants import default_pg_timeout

from lightning_gpufeed.pipeline.plan import PipelineOptions
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.strategies.arguments import check_arguments, pipeline_options
from lightning_gpufeed.strategies.clipping import clipped_on_arrival
from lightning_gpufeed.strategies.figures import log_figures
from lightning_gpufeed.strategies.gate import needs_norm, raw, why_not_overlap
from lightning_gpufeed.strategies.signals import SignalsOfReplicas
from lightning_gpufeed.strategies.verify import StepVerifier
from lightning_gpufeed.sync.candidates import PlanOptions
from lightning_gpufeed.sync.clipped_session import ClippedGradientSync
from lightning_gpufeed.sync.ranks import Ranks

__all__ = ["OutOfOrderStrategy"]


class OutOfOrderStrategy(DDPStrategy):
    """Data parallel training in which gradients are computed and sent in the order in which they are needed.

    In DDP the first layer's gradient is computed last, although the next forward needs it first; then every layer waits
    until all gradients have arrived. Here weight gradients of some layers wait until the network has nothing else to
    send, and a parameter is updated when the next forward comes to it, while the others are still on their way. Which
    weight gradients wait and what is sent when is found out in the first 20 to 50 steps, from measured times; where no
    order is measured to be faster than the usual one, the usual one stays.

    ==================================  =============================================================================
    Hook                                what it does
    ==================================  =============================================================================
    setup, configure_ddp                ranks start equal; no wrapper around the module, whose layers are watched
    training_step, validation_step      begin from rank 0's buffers
    backward                            gradients go on the wire, in the planned order, as they are computed
    optimizer_step                      each parameter's update is left for the next forward, if that is exact
    block_backward_sync                 nothing is sent while gradients are accumulated
    on_train_end, on_exception          nothing is left on its way
    lightning_module_state_dict         waits for all updates; `optimizer_state` too
    teardown                            takes everything back
    ==================================  =============================================================================

    What stays bitwise equal to `DDPStrategy` with two ranks: parameters, gradients, buffers, optimizer and scheduler
    state, logged values, checkpoints, whoever reads them: a parameter with a gradient or an update on its way waits for
    it before it is used in any way. With more ranks sums are rounded in another order.

    What cannot be taken apart is not: with clipping by norm (but for `overlap_clipping`), 16-mixed, manual
    optimization, several optimizers, optimizers other than torch's own that treat each parameter by itself, or hooks on
    the optimizer's step, all gradients are waited for at the end of backward, and the reason is logged once.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(
        ...     strategy=OutOfOrderStrategy(), accelerator="cpu", devices=2, logger=False, enable_checkpointing=False
        ... )

    Source:
        Oh et al., Out-of-order backprop, EuroSys 2022.
    """

    def __init__(
        self,
        reverse_first_k: int | Literal["auto"] = "auto",
        cross_iteration: bool | Literal["auto"] = "auto",
        bucket_bytes: int | Literal["auto"] = "auto",
        memory_cap_bytes: int | None = None,
        verify_every: int = 0,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        overlap_clipping: bool = False,
        pipeline_size: int = 1,
        num_microbatches: int | None = None,
        pipeline_module: str | None = None,
        schedule: str | Schedule = "fast_forward",
        layers_per_stage: int | Literal["auto"] = "auto",
        activation_checkpointing: bool = False,
        **kwargs: Any,
    ) -> None:
        """Check the arguments.

        Args:
            reverse_first_k: How many of the first layers with parameters compute their weight gradients last, in
                forward order. "auto": any order, the best that is found.
            cross_iteration: Whether parameters are updated in the next forward, rather than when all gradients have
                arrived. "auto": if that is measured to be faster; with a given `reverse_first_k`, always.
            bucket_bytes: Least size of a message, but for the last ones. "auto": the best that is found.
            memory_cap_bytes: Most that weight gradients that wait may keep alive on each rank. In a pipeline, most
                that activations may take in a schedule that is found by measuring. None for no limit.
            verify_every: Every so many optimizer steps a step is computed a second time the plain way and compared bit
                by bit; the first tensor that differs ends the training with its name. 0: never. Such a step takes more
                than twice as long, and twice the memory of its activations. Automatic optimization only.
            find_unused_parameters: Whether a parameter may get no gradient in a step. One that gets none on any rank is
                not updated.
            broadcast_buffers: Whether each forward starts from rank 0's buffers.
            accelerator: Kind of device; usually set by the Trainer.
            parallel_devices: The devices of this machine; usually set by the Trainer.
            cluster_environment: Who has started the ranks; found out by the Trainer if None.
            checkpoint_io: What writes checkpoints; None for Lightning's usual way.
            precision_plugin: Precision of the training; usually set by the Trainer's `precision`.
            process_group_backend: Backend of `torch.distributed`, such as "nccl" or "gloo"; None: by the device.
            timeout: How long a rank waits for the others before it fails; in YAML "0:30:00".
            start_method: How the other ranks of this machine are started.
            overlap_clipping: Whether a step with clipping by norm may be taken in the next forward too, where that is
                measured to be faster. Gradients are summed in two halves. Equal but for the rounding of the norm.
            pipeline_size: Ranks that share a model. From 2 on this is a `PipelineStrategy`, which says what that is.
            num_microbatches: How many a batch is cut into in a pipeline; None for four for each rank of it.
            pipeline_module: Name of the `nn.Sequential` to share out, or of a method that returns layers in order,
                which stand for the forward of the module whose method it is. None: the only Sequential.
            schedule: Order of a step in a pipeline: "fast_forward", "gpipe", "1f1b", "interleaved", "zero_bubble",
                "zbv", a `pipeline.schedule.Schedule` or its text; "auto": the fastest by measured times.
            layers_per_stage: How many layers make a stage; the stages are dealt out in turn. "auto": the fastest.
            activation_checkpointing: Whether forwards of layers are run again in backward, rather than kept.
            **kwargs: `static_graph` and `gradient_as_bucket_view` of `DistributedDataParallel`, without an effect; in
                YAML under `dict_kwargs`.

        Raises:
            ValueError: A value is out of range, or an argument of `DDPStrategy` has no place here.
        """
        self._options = PlanOptions(reverse_first_k, cross_iteration, bucket_bytes, memory_cap_bytes, overlap_clipping)
        check_arguments(kwargs, verify_every, start_method)
        asked = PipelineOptions(
            pipeline_size, num_microbatches, schedule, layers_per_stage, memory_cap_bytes, activation_checkpointing
        )
        self._pipeline_options = pipeline_options(asked, pipeline_module, self._options, verify_every)
        self._pipeline_module = pipeline_module
        if self._pipeline_options is not None:
            from lightning_gpufeed.strategies.pipeline import PipelineStrategy  # which is one of these

            if type(self) is OutOfOrderStrategy:
                self.__class__ = PipelineStrategy
            if not isinstance(self, PipelineStrategy):
                raise ValueError(
                    f"{type(self).__name__} has a pipeline_size; expected it derived from PipelineStrategy."
                )
        self._verify_every, self._num_steps, self._has_failed = verify_every, 0, False
        self._find_unused_parameters, self._broadcast_buffers = find_unused_parameters, broadcast_buffers
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._sync: ClippedGradientSync | None = None
        self._verifier: StepVerifier | None = None
        self._trainer: Trainer | None = None
        self._signals: SignalsOfReplicas | None = None
        self._said: set[str] = set()

    @property
    def gradient_sync(self) -> ClippedGradientSync | None:
        """What keeps the ranks equal, with its plan and its measurements; None unless in `fit`."""
        return self._sync

    def synchronize(self) -> None:
        """Wait for all gradients and updates that are on their way. Nothing happens if there are none.

        Never needed for correctness: whatever reads a parameter, a gradient or an optimizer's state waits by itself.

        Raises:
            SyncError: Another rank is gone.
        """
        if self._sync is not None:
            self._sync.synchronize()

    def setup(self, trainer: Trainer) -> None:
        """As in `DDPStrategy`, without its wrapper around the module."""
        self._trainer, self._has_failed = trainer, False
        super().setup(trainer)
        if self._sync is not None:
            for optimizer in self.optimizers:
                self._sync.steps.watch_state(raw(optimizer))
        if trainer.world_size > 1:
            self._signals = SignalsOfReplicas(trainer, self.root_device)

    def configure_ddp(self) -> None:
        """Make all ranks start equal, and watch the module from now on."""
        assert self.lightning_module is not None
        self._sync = ClippedGradientSync(
            self.lightning_module,
            Ranks(self._timeout, self.root_device),
            self._options,
            find_unused_parameters=self._find_unused_parameters,
            broadcast_buffers=self._broadcast_buffers,
            can_defer=self._is_automatic() and getattr(self.lightning_module, "_compiler_ctx", None) is None,
            reduces_untold=not self._is_automatic(),
            on_message=self._say,
        )
        if self._verify_every and self.lightning_module.automatic_optimization:
            self._verifier = StepVerifier(self.lightning_module, self._sync, self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Remember that other ranks may be gone."""
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Take all hooks off; nothing is left on its way."""
        self._verifier = None
        if self._signals is not None:
            self._signals.release()
        if self._sync is not None:
            sync, self._sync = self._sync, None
            if self._has_failed:
                sync.abandon()
            sync.close()
            if not self._has_failed:
                sync.ranks.close()
        self._trainer = None
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, from rank 0's buffers."""
        if self._sync is None:
            return super().training_step(*args, **kwargs)
        self._sync.forward_begins()
        if not self._is_automatic():
            try:
                return super().training_step(*args, **kwargs)
            finally:
                self._sync.are_buffers_due = False  # as in DDP, which sends them once if optimization is manual
        if self._verifier is None or not self._sync.is_syncing or (self._num_steps + 1) % self._verify_every:
            return super().training_step(*args, **kwargs)
        return self._verifier.forward(partial(super().training_step, *args, **kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, from rank 0's buffers if it is part of a training."""
        if self._sync is not None:
            self._sync.forward_begins()
        return super().validation_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: optim.Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As in `Strategy`, and all gradients are on the wire before `on_after_backward`.

        Args:
            closure_loss: The loss.
            optimizer: Whose step follows; None in manual optimization.
            *args: Of the loss's `backward`.
            **kwargs: Likewise.

        Returns:
            The loss without its graph.
        """
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._backward_begins(closure_loss)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._backward_ends()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _backward_begins(self, loss: Tensor) -> None:
        if self._sync is not None:
            self._sync.backward_begins(loss)
        if self._verifier is not None and self._verifier.is_at_work:
            self._verifier.backward_begins()

    def _backward_ends(self) -> None:
        if self._sync is not None:
            self._sync.backward_ends()
        if self._verifier is not None and self._verifier.is_at_work:
            self._verifier.backward_ends()

    def _is_automatic(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    def optimizer_step(
        self,
        optimizer: optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure; take the step in the next forward, or at once.

        Args:
            optimizer: Whose step.
            closure: Forward and backward.
            model: The module.
            **kwargs: Of the optimizer's `step`.

        Returns:
            What the closure gives.
        """
        if self._sync is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        module = model or self.lightning_module
        assert isinstance(module, LightningModule)
        assert self._trainer is not None
        reason = f"its step was given {', '.join(kwargs)}" if kwargs else None
        is_norm_known = self._sync.can_know_norm
        reason = reason or why_not_overlap(self._trainer, module, raw(optimizer), is_norm_known=is_norm_known)
        self._sync.can_cross, self._sync.needs_norm = reason is None, needs_norm(self._trainer, module)
        self._num_steps += 1
        with clipped_on_arrival(self.precision_plugin, self._sync):
            if reason is not None:
                self._say(f"each step waits for all gradients, because {reason}.")
                result = super().optimizer_step(optimizer, closure, model, **kwargs)
                if self._verifier is not None:
                    self._verifier.step_is_plain()
                return result
            result = closure()
            self.precision_plugin._after_closure(module, optimizer)
        if self._verifier is not None and self._verifier.is_at_work:
            self._verifier.step(raw(optimizer))
        self._sync.step(raw(optimizer))
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients are not sent, as more are to be added to them.

        Yields:
            Nothing.
        """
        if self._sync is None:
            yield
            return
        before, self._sync.is_syncing = self._sync.is_syncing, False
        try:
            yield
        finally:
            self._sync.is_syncing = before

    def on_train_end(self) -> None:
        """Nothing is left on its way; say how much waited at most."""
        self.synchronize()
        if self._sync is not None and self._sync.peak_deferred_bytes:
            cap = self._options.memory_cap_bytes
            self._say(
                f"weight gradients that waited kept at most {self._sync.peak_deferred_bytes / 1e6:.4g} MB alive"
                + ("." if cap is None else f", of {cap / 1e6:.4g} MB allowed."),
                {"gpufeed/sync/peak_deferred_bytes": float(self._sync.peak_deferred_bytes)},
            )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, all updates taken.

        Returns:
            As in `DDPStrategy`: the same on all ranks.
        """
        self._settle()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, Tensor]:
        """An optimizer's state, all updates taken.

        Args:
            optimizer: Whose.

        Returns:
            As in `DDPStrategy`: the same on all ranks.
        """
        self._settle()
        return super().optimizer_state(optimizer)

    def _settle(self) -> None:
        """All updates, or after an error those whose gradients arrive."""
        is_interrupted = self._trainer is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED
        if self._sync is not None and is_interrupted:
            self._sync.abandon()
        self.synchronize()

    def _say(self, message: str, figures: Mapping[str, float] | None = None) -> None:
        """Once, and its figures to the loggers."""
        if message not in self._said:
            self._said.add(message)
            rank_zero_info(f"{type(self).__name__}: {message}")
            log_figures(self._trainer, figures or {})
