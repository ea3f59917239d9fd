"""A model as a pipeline, from the start of a training to its end: usable in a loop written by hand.

::

    session = PipelineSession(model, options, PipelineGroups.create(pipeline_size), device)
    for batch in batches:                     each rank of a pipeline has the same batch
        loss = f(model.layers(batch))         runs the layers of all ranks; the output is there on every rank
        loss.backward()
        session.end_backward()                gradients are summed where weights are tied, averaged over replicas
        optimizer.step()                      each rank its own layers
    session.close()                           every rank has all weights again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn, optim

from lightning_gpufeed.pipeline.foreign import is_foreign
from lightning_gpufeed.pipeline.fused import MicrobatchLoss
from lightning_gpufeed.pipeline.layer_list import check_enough, find_layers
from lightning_gpufeed.pipeline.links import Links, PipelineGroups, new_group
from lightning_gpufeed.pipeline.measured_plan import measured_plan, visiting
from lightning_gpufeed.pipeline.meeting import everyone
from lightning_gpufeed.pipeline.partition import Partition
from lightning_gpufeed.pipeline.peers import lost_peer
from lightning_gpufeed.pipeline.plan import PipelineOptions, PipelinePlan, plan_evaluation, plan_training
from lightning_gpufeed.pipeline.randomness import share_generators
from lightning_gpufeed.pipeline.replicas import GradientMean, sum_gradients
from lightning_gpufeed.pipeline.runtime import PipelineRuntime
from lightning_gpufeed.pipeline.search import balanced
from lightning_gpufeed.pipeline.weights import bring_back, broadcast_from_root, full_optimizer_state, full_state_dict

__all__ = ["PipelineSession"]

_MEASURED_STEPS = (4, 14)
"""Between which optimizer steps to measure: the first ones connect and agree on shapes."""


class PipelineSession:
    """Holds what a rank needs of a pipeline. All ranks make and use it alike.

    Attributes:
        groups: Process groups.
        layers: That are shared out.
        plan: What was decided; None until the first batch, if it takes measuring.
        partition: Who has what; None likewise.
        runtime: Runs the layers; None likewise.
        is_syncing: Whether the backward that comes is the last one before a step.
        microbatch_loss: For schedules that begin a backward before all forwards are done.
        measured_step_seconds: That a step is in the pipeline, after the first steps.
        measured_bubble_ratio: Idle share of all ranks, likewise.
    """

    def __init__(
        self,
        model: nn.Module,
        options: PipelineOptions,
        groups: PipelineGroups,
        device: torch.device,
        *,
        pipeline_module: str | None = None,
        is_training: bool = True,
        broadcast_buffers: bool = True,
        on_message: Callable[..., None] = lambda message, figures=None: None,
    ) -> None:
        """Take the layers' place. All ranks have rank 0's weights afterwards, and draw the same random numbers.

        Args:
            model: The whole, with all values, on the host or on the device.
            options: What is asked for.
            groups: Of this rank.
            device: Where this rank computes.
            pipeline_module: Name of the `nn.Sequential`, or of a method of the model that returns the layers.
            is_training: False if there will be no backward.
            broadcast_buffers: Whether buffers are those of the first replica in each step.
            on_message: Told what was decided and measured: a line, and for what was measured its figures.

        Raises:
            ScheduleError: The model cannot be cut.
            SyncError: Ranks have different models.
        """
        self.groups, self._device, self._model, self._options = groups, device, model, options
        self._is_training, self._broadcasts_buffers, self._say = is_training, broadcast_buffers, on_message
        self.layers = find_layers(model, pipeline_module)
        check_enough(self.layers, options.pipeline_size)
        self.plan: PipelinePlan | None = None
        self.partition: Partition | None = None
        self.runtime: PipelineRuntime | None = None
        self.is_syncing = True
        self.microbatch_loss: MicrobatchLoss | None = None
        self._optimizers: list[optim.Optimizer] = []
        self._tied: list[tuple[list[nn.Parameter], Any]] = []
        self._summed: dict[nn.Parameter, Tensor] = {}
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._told: set[int] = set()
        self._mean = GradientMean(groups.replica)
        self._num_steps = 0
        self.measured_step_seconds: float | None = None
        self.measured_bubble_ratio: float | None = None
        self._broadcast_weights()
        share_generators(groups.control, groups.ranks[0], device)
        self.layers.owner.__dict__["forward"] = _Pipelined(self)
        if not is_training:
            self._begin(plan_evaluation(options, len(self.layers.layers)))
        elif not options.has_to_measure:
            self._begin(plan_training(options, len(self.layers.layers)))

    @property
    def num_replicas(self) -> int:
        """How many pipelines there are."""
        return len(self.groups.replicas)

    def watch(self, optimizer: optim.Optimizer) -> None:
        """Have an optimizer's state for layers of other ranks take no memory.

        Args:
            optimizer: Of the model.
        """
        self._optimizers.append(optimizer)
        if self.partition is not None:
            self.partition.drop_state(optimizer)

    def forward(self, value: Any) -> Any:
        """What the layers give.

        Args:
            value: The input of the first one, the same on all ranks of a pipeline.

        Returns:
            The output of the last one, on every rank.

        Raises:
            ScheduleError: The batch cannot be cut into microbatches, or the layers not into stages.
            SyncError: Another rank is gone.
        """
        if self.runtime is None and not torch.is_grad_enabled():
            return self._run_here(value)
        if self.runtime is None:
            self._begin(measured_plan(self.layers.layers, value, self._options, self.groups, self._device))
        assert self.runtime is not None
        self.runtime.microbatch_loss = self.microbatch_loss
        self.runtime.on_stage_done = self._stage_done if self.is_syncing else None
        return self.runtime.run(value)

    def _run_here(self, value: Any) -> Any:
        """Before the first training step all layers are on all ranks: a summary or a sanity check is no measure."""
        with visiting(self.layers.layers, self._device):
            for layer in self.layers.layers:
                value = layer(value)
        return value

    def begin_step(self) -> None:
        """Take the first replica's buffers, as data-parallel training does before each forward."""
        if self._broadcasts_buffers and self.num_replicas > 1 and self.partition is not None:
            for placed in self.partition.tensors:
                if not placed.is_parameter and self.partition.is_own(placed):
                    with lost_peer("sending buffers"):
                        distributed.broadcast(placed.tensor, self.groups.replicas[0], self.groups.replica)

    # Planning ------------------------------------------------------------------------------------------------

    def _broadcast_weights(self) -> None:
        """Before anything is decided: a partition of any kind knows all tensors."""
        num_ranks = self._options.pipeline_size
        stages = balanced([1.0] * len(self.layers.layers), num_ranks)
        partition = Partition(self._model, self.layers, stages, range(num_ranks), self.groups.place)
        broadcast_from_root(partition, self._device, everyone(), 0)

    def _begin(self, plan: PipelinePlan) -> None:
        """Give the layers to their ranks."""
        schedule = plan.schedule
        self.plan = plan
        self.partition = Partition(self._model, self.layers, plan.stages, schedule.stage_to_rank, self.groups.place)
        for stage, rank in zip(plan.stages, schedule.stage_to_rank, strict=True):
            for number in stage if rank == self.groups.place else ():
                self.layers.layers[number].to(self._device)
        self.partition.drop()
        for optimizer in self._optimizers:
            self.partition.drop_state(optimizer)
        self._tied = list(self._tied_groups(self.partition))
        hooked = [
            placed.name
            for placed in self.partition.tensors
            if placed.is_parameter
            and not placed.is_outside
            and (placed.tensor._backward_hooks or placed.tensor._post_accumulate_grad_hooks)
        ]
        if hooked and self._is_training:
            self._say(
                f"pipeline: hooks on {hooked[0]}{f' and {len(hooked) - 1} more' * (len(hooked) > 1)} run for the "
                "gradient of each microbatch, and not for that of the batch."
            )
        self.runtime = PipelineRuntime(
            self.layers.layers,
            plan.stages,
            schedule,
            Links(self.groups, self._device, schedule.num_stages),
            self._device,
            replica=self.groups.replicas.index(distributed.get_rank()),
            is_checkpointed=self._options.is_checkpointed,
        )
        self.runtime.on_backward = self._set_aside
        self._say(f"pipeline: {plan}.")

    def _tied_groups(self, partition: Partition) -> Iterator[tuple[list[nn.Parameter], Any]]:
        """Parameters that layers on several ranks share, and the groups of these ranks. All ranks make all groups."""
        size = self._options.pipeline_size
        tensors = {placed.name: placed.tensor for placed in partition.tensors}
        for owners in sorted(set(partition.shared.values())):
            for first in range(0, distributed.get_world_size(), size):
                ranks = [first + owner for owner in owners]
                group = new_group(ranks, self.groups.timeout)
                if distributed.get_rank() in ranks:
                    names = [name for name, found in partition.shared.items() if found == owners]
                    yield [tensors[name] for name in names], group  # type: ignore[misc]

    # Backward ------------------------------------------------------------------------------------------------

    def _set_aside(self) -> None:
        """Gradients of tied weights that are summed already are not to be summed again with those that come."""
        for parameter, total in self._summed.items():
            if parameter.grad is total:
                self._aside[parameter], parameter.grad = total, None
        self._summed = {}

    def _of_stage(self, index: int) -> list[nn.Parameter]:
        assert self.runtime is not None
        tied = {id(one) for parameters, _ in self._tied for one in parameters}
        return [one for one in self.runtime.stages[index].parameters if id(one) not in tied]

    def _stage_done(self, index: int) -> None:
        self._told.add(index)
        self._mean.begin(self._of_stage(index))

    def end_backward(self) -> None:
        """Make gradients those of all replicas; nothing happens unless `is_syncing`.

        Raises:
            SyncError: Another rank is gone.
        """
        if self.runtime is None or self.partition is None or not self.is_syncing:
            return
        self._measure()
        told, self._told = self._told, set()
        for index in sorted(self.runtime.stages, reverse=True):
            if index not in told:
                self._mean.begin(self._of_stage(index))
        for parameters, group in self._tied:
            sum_gradients(parameters, group)
            self._mean.begin(parameters)
        outside: list[nn.Parameter] = [
            placed.tensor  # type: ignore[misc]
            for placed in self.partition.tensors
            if placed.is_parameter and placed.is_outside
        ]
        self._mean.begin(outside)
        self._mean.wait()
        for parameters, _ in self._tied:
            for parameter in parameters:
                earlier = self._aside.pop(parameter, None)
                if earlier is not None:
                    parameter.grad = earlier if parameter.grad is None else parameter.grad + earlier
                if parameter.grad is not None:
                    self._summed[parameter] = parameter.grad
        if self._device.type != "cpu":  # where the order of sums is not certain, ranks could drift apart
            for parameter in outside:
                if parameter.grad is not None:
                    distributed.broadcast(parameter.grad, self.groups.ranks[0], self.groups.output)

    def _measure(self) -> None:
        """After the first steps: how much of the time ranks wait for each other, beside what was predicted."""
        assert self.runtime is not None
        spans = self.runtime.executor.spans
        self._num_steps += 1
        if self._num_steps == _MEASURED_STEPS[0]:
            spans.is_on = True
        elif self._num_steps == _MEASURED_STEPS[1]:
            spans.is_on = False
            every: list[Any] = [None] * self._options.pipeline_size
            with lost_peer("measuring"):
                distributed.all_gather_object(every, spans.take(), group=self.groups.control)
            whole = max(one["all"] for one in every)
            busy = sum(one.get("busy", 0.0) for one in every)
            self.measured_step_seconds = whole / (_MEASURED_STEPS[1] - _MEASURED_STEPS[0])
            self.measured_bubble_ratio = 1.0 - busy / (whole * len(every))
            self._say(
                f"pipeline: measured {1e3 * self.measured_step_seconds:.4g} ms a step, bubble ratio "
                f"{self.measured_bubble_ratio:.0%}.",
                {
                    "gpufeed/pipeline/step_seconds": self.measured_step_seconds,
                    "gpufeed/pipeline/bubble_ratio": self.measured_bubble_ratio,
                },
            )

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients so that their norm over all layers of all ranks is at most so much.

        Args:
            parameters: Of an optimizer: those of other ranks count there.
            max_norm: The limit.

        Returns:
            The norm before, the same on all ranks; on the device.
        """
        given = [one for one in parameters if one.grad is not None]
        counted = [one.grad for one in given if one.grad is not None and self._counts_here(one)]
        norm = nn.utils.get_total_norm(counted)
        square = norm.to(self._device, torch.float64) ** 2
        with lost_peer("clipping"):
            distributed.all_reduce(square, group=self.groups.output)
        is_double = any(one.dtype == torch.float64 for one in counted)
        total = square.sqrt() if is_double else square.sqrt().float()
        nn.utils.clip_grads_with_norm_(given, max_norm, total)
        return total

    def _counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this is the one rank that adds a parameter to a sum over all."""
        placed = None if self.partition is None else self.partition.find(parameter)
        return self.groups.place == (0 if placed is None else placed.owners[0])

    # Weights -------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """The model's state as on one device, on all ranks.

        Returns:
            Tensors on the CPU, or where they are if the layers have not been shared out yet.
        """
        if self.partition is None:
            return self._model.state_dict()
        return full_state_dict(self._model, self.partition, self.groups.output, self._device)

    def full_optimizer_state(self, optimizer: optim.Optimizer, *, keep: bool = True) -> dict[str, Any]:
        """An optimizer's state as on one device. All ranks have to call this.

        Args:
            optimizer: Of the model.
            keep: Whether this rank wants it; if not, it only takes part.

        Returns:
            Tensors on the CPU, or where they are if the layers have not been shared out yet.
        """
        if self.partition is None:
            return optimizer.state_dict()
        return full_optimizer_state(optimizer, self.partition, self.groups.output, self._device, keep=keep)

    def own_optimizer_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """What an optimizer of this rank takes of a full state.

        Args:
            optimizer: Of the model.
            state: As on one device.

        Returns:
            The same without the states of layers of other ranks.
        """
        foreign: set[int] = set()
        groups = zip(optimizer.param_groups, state["param_groups"], strict=False)
        for group, packed in groups if self.partition is not None else ():
            pairs = zip(group["params"], packed["params"], strict=False)
            foreign.update(number for parameter, number in pairs if is_foreign(parameter))
        return {**state, "state": {key: value for key, value in state["state"].items() if key not in foreign}}

    def close(self, *, has_failed: bool = False) -> None:
        """Give the layers their own forward back, and all ranks all weights.

        Args:
            has_failed: Whether other ranks may be gone: then weights of their layers stay away.
        """
        if isinstance(self.layers.owner.__dict__.get("forward"), _Pipelined):
            del self.layers.owner.__dict__["forward"]
        if self.runtime is not None:
            self.runtime.close()
        if has_failed:
            pending = [] if self.runtime is None else self.runtime.pending
            self.groups.abandon([group for _, group in self._tied], [*pending, *self._mean.pending])
            return
        if self.partition is not None:
            bring_back(self.partition, self.groups.output, self._device)
        for _, group in self._tied:
            distributed.destroy_process_group(group)
        self.groups.close()


class _Pipelined:
    """In the place of the layers' forward. A deep copy of their owner, pickled or not, has its own forward again."""

    def __init__(self, session: PipelineSession) -> None:
        self._session = session

    def __call__(self, value: Any) -> Any:
        return self._session.forward(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._session.layers.owner, "forward")
