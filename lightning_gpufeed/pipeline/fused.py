"""Schedules that begin backward before all forwards are done: the loss of each microbatch is computed on the way.

::

    output = run(input)     the whole schedule: for each microbatch, on the rank of the last stage, the user's own
                            training step is run on that part of the batch alone, for the gradient of its output;
                            gradients of parameters are put aside
    loss = f(output)        the user's, on the whole batch: this is the loss that is logged
    loss.backward()         is the gradient of the output that of the microbatches? Then what was put aside is added to
                            `.grad`. If not, the loss is no mean over samples: it is forgotten, computed once more in
                            split phases, and phases are split from then on.

So nothing that the loss could do makes the result wrong; at worst it is slower, and says so once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.call import Call, of_microbatches
from lightning_gpufeed.pipeline.nested import flatten, unflatten
from lightning_gpufeed.pipeline.program import whole_program
from lightning_gpufeed.pipeline.randomness import put_back
from lightning_gpufeed.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from lightning_gpufeed.pipeline.runtime import PipelineRuntime

__all__ = ["FusedSteps", "MicrobatchLoss"]

MicrobatchLoss = Callable[[int, Sequence[int]], Tensor]
"""The loss of one microbatch, by its number and the samples of all, as it counts in that of the batch."""

_ROUNDINGS = 16
"""By how many units of the last place the gradient of an output may differ: means over other numbers of samples."""


class _NotAMeanError(Exception):
    """Why the loss cannot be computed microbatch by microbatch."""


class FusedSteps:
    """What one rank does in a step whose backward has begun before its forward is done."""

    def __init__(self, runtime: PipelineRuntime) -> None:
        """For a pipeline.

        Args:
            runtime: The pipeline.
        """
        self._runtime = runtime
        self._expected: Any = None
        self._output: Any = None
        self._num_asked = 0
        self.is_in_loss = False
        """Whether the training step at work is that of a microbatch."""
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._given: dict[int, list[Tensor]] = {}

    def stand_in(self, value: Any) -> Any:
        """What the pipeline gives to the training step of a microbatch.

        Args:
            value: What the training step gives to the pipeline.

        Returns:
            The output of the microbatch.

        Raises:
            _NotAMeanError: It is not the part of the batch's input, or the pipeline is asked a second time.
        """
        self._num_asked += 1
        if self._num_asked > 1:
            raise _NotAMeanError("training_step calls the model more than once")
        mine, theirs = flatten(value)[0], flatten(self._expected)[0]
        is_same = len(mine) == len(theirs) and all(
            torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one is other
            for one, other in zip(mine, theirs, strict=True)
        )
        if not is_same:
            raise _NotAMeanError(
                "training_step gives the model something else for a part of a batch than the part of what it gives for "
                "the batch, as with augmentations that are drawn at random"
            )
        return self._output

    def forward(self, call: Call, schedule: Schedule) -> bool:
        """Run the whole schedule.

        Args:
            call: The batch.
            schedule: For its microbatches.

        Returns:
            Whether that was possible; the same on all ranks. If not, nothing has changed.
        """
        runtime = self._runtime
        parameters = [one for stage in runtime.stages.values() for one in stage.parameters if one.requires_grad]
        before = [one.grad for one in parameters]
        buffers = [(one, one.clone()) for stage in runtime.stages.values() for one in stage.buffers]
        for parameter in parameters:
            parameter.grad = None
        self._given = {}
        reasons: list[str] = []

        def output_grads(microbatch: int) -> list[Tensor]:
            output = call.batch.outputs[microbatch]
            try:
                if reasons:
                    raise _NotAMeanError(reasons[0])
                grads = self._output_grads(call, microbatch, output)
            except _NotAMeanError as error:
                reasons[:] = [str(error)]
                grads = [torch.zeros_like(one) for one in flatten(output)[0] if _wants_grad(one)]
            self._given[microbatch] = grads
            return grads

        call.batch.output_grads = output_grads
        try:
            runtime.execute(call, whole_program(schedule))
            self._aside = {one: one.grad for one in parameters if one.grad is not None}
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
        reason = runtime.agree(reasons[0] if reasons else None)
        if reason is None:
            call.is_fused = True
            call.buffers = buffers
            return True
        runtime.why_split = reason
        self._forget(buffers)
        call.forget()
        return False

    def _output_grads(self, call: Call, microbatch: int, output: Any) -> list[Tensor]:
        runtime = self._runtime
        leaves, structure = flatten(output)
        leaves = [leaf.detach().requires_grad_() if _wants_grad(leaf) else leaf for leaf in leaves]
        wanted = [leaf for leaf in leaves if _wants_grad(leaf)]
        self._expected, self._output, self._num_asked = call.batch.inputs[microbatch], unflatten(leaves, structure), 0
        assert runtime.microbatch_loss is not None
        self.is_in_loss = True
        try:
            with put_back(runtime.device), torch.enable_grad():
                loss = runtime.microbatch_loss(microbatch, call.sizes)
        except (_NotAMeanError, ScheduleError) as error:
            raise _NotAMeanError(str(error)) from error
        finally:
            self.is_in_loss = False
            self._expected = self._output = None
        if not self._num_asked:
            raise _NotAMeanError("training_step does not call the model for a part of a batch")
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(wanted, found, strict=True)]

    def backward(self, call: Call, grads: Sequence[Tensor], tell: Callable[[int], None] | None) -> bool:
        """Add what was put aside, if it is what backward would have computed.

        Args:
            call: The batch.
            grads: Of its output.
            tell: Told each stage of this rank once its gradients are complete.

        Returns:
            Whether it is; the same on all ranks. If not, it is forgotten.
        """
        runtime = self._runtime
        given, self._given = self._given, {}
        reason = None
        if given and not _are_alike(given, grads, call.sizes):
            reason = "the loss of a batch is not the mean of those of its parts"
        reason = runtime.agree(reason)
        aside, self._aside = self._aside, {}
        if reason is not None:
            runtime.why_split = reason
            self._forget(call.buffers)
            return False
        for parameter, grad in aside.items():
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
        if tell is not None:
            for index in sorted(runtime.stages, reverse=True):
                tell(index)
        return True

    def _forget(self, buffers: list[tuple[Tensor, Tensor]]) -> None:
        self._aside = {}
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _are_alike(given: dict[int, list[Tensor]], grads: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Are the gradients of the batch's output those of the microbatches'?"""
    parts = of_microbatches(grads, sizes)
    for place, grad in enumerate(grads):
        allowed = _ROUNDINGS * torch.finfo(grad.dtype).eps * float(grad.abs().max()) if grad.numel() else 0.0
        for microbatch, ours in given.items():
            difference = (ours[place] - parts(microbatch)[place]).abs()
            if difference.numel() and not float(difference.max()) <= allowed:
                return False
    return True
