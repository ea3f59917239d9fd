"""Stands for a sequence of layers that is spread over ranks: a forward, and a backward in the order of a schedule.

Split phases (gpipe, fast_forward)::

    output = run(input)      all forwards; the output of the whole batch on every rank
    loss = f(output)         the user's, the same on every rank
    loss.backward()          all backwards: input gradients, weight gradients, as the schedule says

Fused (1f1b, interleaved, zero_bubble, zbv): see `fused`.

Why not `torch.distributed.pipelining`'s runtime: see `links` and `stage`; and it cannot be left between forward and
backward. Its schedules and ours can be read by each other (`Schedule.to_csv`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpufeed.backprop.engine import Anchor
from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.call import Call, OutputGrads, of_microbatches
from lightning_gpufeed.pipeline.executor import Executor
from lightning_gpufeed.pipeline.fused import FusedSteps, MicrobatchLoss
from lightning_gpufeed.pipeline.links import Links
from lightning_gpufeed.pipeline.nested import batch_size, flatten, microbatch_sizes, unflatten
from lightning_gpufeed.pipeline.program import Program, backward_program, forward_only, forward_program, has_phases
from lightning_gpufeed.pipeline.randomness import Draws, put_back
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.sharing import OutputSharing
from lightning_gpufeed.pipeline.stage import Stage

__all__ = ["PipelineRuntime"]


class PipelineRuntime:
    """One rank's part of a pipeline, called like the layers that it stands for, by all ranks at once.

    Attributes:
        microbatch_loss: For schedules that begin a backward before all forwards are done; None where there is none, and
            phases are split.
        why_split: Why such a schedule is carried out in split phases; None if it is not.
        on_stage_done: Told a stage of this rank whose gradients are complete, in backward.
        on_backward: Told when a backward begins.
        num_calls: Forwards so far.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        stages: Sequence[range],
        schedule: Schedule,
        links: Links,
        device: torch.device,
        *,
        replica: int = 0,
        is_checkpointed: bool = False,
    ) -> None:
        """Take this rank's layers.

        Args:
            layers: Of the whole model; those of other ranks are not run.
            stages: The layers of each stage.
            schedule: One that `validate` accepts, over these stages.
            links: To the other ranks.
            device: Where this rank computes.
            replica: Which of several pipelines this is; each draws its own random numbers.
            is_checkpointed: Whether layers are run a second time in backward, rather than kept.
        """
        self._layers, self._schedule, self._links, self.device = tuple(layers), schedule, links, device
        self._replica, self._place = replica, links.groups.place
        self._last_rank, self._first_rank = schedule.stage_to_rank[-1], schedule.stage_to_rank[0]
        split_stages = {action.stage for actions in schedule.ranks for action in actions if action.kind == "I"}
        self.stages = {
            index: Stage(
                index,
                [layers[place] for place in stages[index]],
                stages[index].start,
                is_split=index in split_stages,
                is_checkpointed=is_checkpointed,
                device=device,
            )
            for index, rank in enumerate(schedule.stage_to_rank)
            if rank == self._place
        }
        self.executor = Executor(self.stages, links, device, schedule.num_stages)
        self.microbatch_loss: MicrobatchLoss | None = None
        self.why_split: str | None = None
        self.on_stage_done: Callable[[int], None] | None = None
        self.on_backward: Callable[[], None] | None = None
        self.num_calls = 0
        self._has_trained, self._most_samples = False, 0
        self._sharing = OutputSharing(links, self._last_rank, schedule.num_stages, device)
        self._open: weakref.WeakSet[Call] = weakref.WeakSet()
        self._programs: dict[tuple[str, int], Program] = {}
        self._schedules = {schedule.num_microbatches: schedule}
        self._fused = FusedSteps(self)
        self.anchor = Anchor(device)

    def run(self, value: Any) -> Any:
        """What the layers give, on every rank.

        Args:
            value: The input: any nest of tensors, the same on all ranks of the pipeline; samples are in the first
                dimension of the first tensor.

        Returns:
            The output of the last layer, likewise.

        Raises:
            ScheduleError: The batch is smaller than the microbatches, or an output cannot be put together.
            SyncError: Another rank is gone.
        """
        if self._fused.is_in_loss:
            return self._fused.stand_in(value)
        has_backward = torch.is_grad_enabled() and self._needs_grad(value)
        sizes = self._sizes(value, has_backward)
        schedule = self.schedule_of(len(sizes))
        draws = Draws(self._replica, self.num_calls, self.device)
        state = self._state()
        call = Call(value, sizes, schedule, draws, has_backward=has_backward, state=state, device=self.device)
        self.num_calls += 1
        if not has_backward:
            self.execute(call, self.program(_forward_only, call.schedule))
            return call.output
        self._has_trained = True
        self._open.add(call)
        if not (self._can_fuse(schedule) and self._fused.forward(call, schedule)):
            self.execute(call, self.program(forward_program, schedule))
        return self._with_backward(call)

    def _can_fuse(self, schedule: Schedule) -> bool:
        return self.why_split is None and self.microbatch_loss is not None and not has_phases(schedule)

    def _needs_grad(self, value: Any) -> bool:
        return any(parameter.requires_grad for layer in self._layers for parameter in layer.parameters()) or any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(value)[0]
        )

    def _state(self) -> Hashable:
        """What decides on types and gradients, beside the input."""
        flags = bytes(one.requires_grad for layer in self._layers for one in layer.parameters())
        modes = bytes(layer.training for layer in self._layers)
        return hashlib.blake2b(flags + b"/" + modes, digest_size=8).digest()  # short, as it is compared often

    def _sizes(self, value: Any, has_backward: bool) -> tuple[int, ...]:
        """Of microbatches: fewer of them for a last batch that is too small."""
        num_samples, num_microbatches = batch_size(value), self._schedule.num_microbatches
        if num_samples is None:
            raise ScheduleError(
                "The input of the pipeline has no tensor with samples in its first dimension; expected one, to cut it "
                "into microbatches."
            )
        if num_samples < num_microbatches:
            if has_backward and not self._has_trained:
                raise ScheduleError(
                    f"The batch has {num_samples} samples, and num_microbatches is {num_microbatches}; expected at "
                    f"least one sample for each. Use a larger batch_size or fewer microbatches."
                )
            num_microbatches = max(1, num_samples)
        if has_backward:
            self._most_samples = max(self._most_samples, num_samples)
            if num_samples < self._most_samples and self._normalises():  # over one sample there is no statistic
                num_microbatches = min(num_microbatches, max(1, num_samples // 2))
        return microbatch_sizes(num_samples, num_microbatches)

    def program(self, make: Callable[[Schedule], Program], schedule: Schedule) -> Program:
        """What is done of a schedule, made once.

        Args:
            make: Of `program`: which part of it.
            schedule: From `schedule_of`.

        Returns:
            The program.
        """
        key = (make.__name__, schedule.num_microbatches)
        if key not in self._programs:
            self._programs[key] = make(schedule)
        return self._programs[key]

    def _normalises(self) -> bool:
        return any(isinstance(one, _BatchNorm) and one.training for layer in self._layers for one in layer.modules())

    def schedule_of(self, num_microbatches: int) -> Schedule:
        """The schedule, for so many microbatches.

        Args:
            num_microbatches: At most as many as it was made for.

        Returns:
            Its actions without those of the other microbatches.
        """
        if num_microbatches not in self._schedules:
            ranks = tuple(
                tuple(action for action in actions if action.microbatch < num_microbatches)
                for actions in self._schedule.ranks
            )
            self._schedules[num_microbatches] = Schedule(ranks, self._schedule.stage_to_rank, num_microbatches)
        return self._schedules[num_microbatches]

    def execute(self, call: Call, program: Program, note: Callable[[], int] | None = None) -> int:
        """Carry out a program that has the forwards of a batch, and share what comes out.

        Args:
            call: The batch.
            program: Its actions.
            note: Asked at the end on the rank of the last stage; None for nothing to say.

        Returns:
            What it has said, on all ranks; 0 without.
        """
        with self.executor.spans.measure("all"):
            self._sharing.begin(call, program)
            with put_back(self.device):
                self.executor.run(program, call.batch)
            call.output, said = self._sharing.collect(call, program, note)
            self._links.finish()
        return said

    def agree(self, reason: str | None, *, is_finite: bool = True) -> tuple[str | None, bool]:
        """What the rank of the last stage says.

        Args:
            reason: Of this rank; only that of the last stage counts.
            is_finite: Likewise.

        Returns:
            The same on all ranks of the pipeline.
        """
        code = self._links.share_number((reason is not None) + 2 * (not is_finite), self._last_rank)
        if code & 1:
            reason = self._links.share_object(reason, self._last_rank)
        return reason if code & 1 else None, not code & 2

    def _with_backward(self, call: Call) -> Any:
        leaves, structure = flatten(call.output)
        wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        outputs = [leaf for leaf, is_wanted in zip(detached, wanted, strict=True) if is_wanted]
        if outputs:
            inputs = call.inputs_with_grad
            given = iter(_Output.apply(self, call, len(inputs), self.anchor.tensor, *inputs, *outputs))  # type: ignore[no-untyped-call]
            detached = [next(given) if is_wanted else leaf for leaf, is_wanted in zip(detached, wanted, strict=True)]
        call.output = None
        return unflatten(detached, structure)

    def backward(self, call: Call, grads: OutputGrads, *, has_weights: bool = True) -> list[Tensor]:
        """All backwards of a batch.

        Args:
            call: The batch.
            has_weights: Whether gradients of parameters are wanted, or that of the input alone.
            grads: Of the outputs that require one, the same on all ranks; None for what the loss does not use.

        Returns:
            Of the inputs that require one, on every rank.

        Raises:
            ScheduleError: It is the second time.
        """
        if call.is_done:
            raise ScheduleError(
                "backward came to the pipeline's output a second time; expected once, as activations are gone then. "
                "Add the losses up and call backward once."
            )
        call.is_done = True
        self._open.discard(call)
        if not has_weights:
            with self._weights_left_alone():
                return self._backward(call, grads, None)
        if self.on_backward is not None:
            self.on_backward()
        return self._backward(call, grads, None if len(self._open) else self.on_stage_done)

    @contextmanager
    def _weights_left_alone(self) -> Iterator[None]:
        parameters = [one for stage in self.stages.values() for one in stage.parameters if one.requires_grad]
        before = [one.grad for one in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad

    def _backward(self, call: Call, grads: OutputGrads, tell: Callable[[int], None] | None) -> list[Tensor]:
        if call.is_fused:
            if self._fused.backward(call, grads, tell):
                return self._shared_input_grads(call)
            with call.as_in_forward():
                self.execute(call, self.program(forward_program, call.schedule))
        call.batch.output_grads = of_microbatches(grads, call.sizes)
        with self.executor.spans.measure("all"), put_back(self.device):
            self.executor.run(self.program(backward_program, call.schedule), call.batch, tell)
            self._links.finish()
        call.batch.output_grads = None
        return self._shared_input_grads(call)

    def _shared_input_grads(self, call: Call) -> list[Tensor]:
        inputs = call.inputs_with_grad
        found = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in inputs]
        if found:
            if self._place == self._first_rank:
                found = [grad.contiguous() for grad in call.input_grads()]
            self._links.share(found, self._first_rank)()
        return found

    @property
    def pending(self) -> list[Any]:
        """What has been begun with the other ranks, and has not ended here."""
        return self._links.pending

    def close(self) -> None:
        """Give the layers their own forwards back."""
        for stage in self.stages.values():
            stage.close()


def _forward_only(schedule: Schedule) -> Program:
    return forward_only(schedule.stage_to_rank, schedule.num_microbatches, schedule.num_ranks)


class _Output(torch.autograd.Function):
    """The output of all stages, as if they had been run here: its backward is that of the pipeline."""

    @staticmethod
    def forward(ctx: Any, runtime: PipelineRuntime, call: Call, num_inputs: int, *tensors: Tensor) -> Any:
        ctx.runtime, ctx.call, ctx.num_inputs = runtime, call, num_inputs
        ctx.num_outputs = len(tensors) - num_inputs - 1
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors[1 + num_inputs :])  # no views: they may be changed in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = ctx.runtime.backward(ctx.call, grads, has_weights=ctx.runtime.anchor.is_reached())
        return None, None, None, None, *found, *[None] * ctx.num_outputs
