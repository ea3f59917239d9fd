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

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_gpufeed.errors import ScheduleError, SyncError
from lightning_gpufeed.pipeline.call import Call, OutputGrads, of_microbatches
from lightning_gpufeed.pipeline.nested import flatten, is_same_leaf, unflatten
from lightning_gpufeed.pipeline.program import whole_program
from lightning_gpufeed.pipeline.randomness import put_back
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.stage import as_output

if TYPE_CHECKING:
    from lightning_gpufeed.pipeline.runtime import PipelineRuntime

__all__ = ["FusedSteps", "MicrobatchLoss"]

MicrobatchLoss = Callable[[int, Sequence[int]], Tensor]
"""The loss of one microbatch, by its number and the samples of all, as it counts in that of the batch."""

_ROUNDINGS = 16
"""By how many units of the last place of the largest one inputs may differ."""
_GRAD_ROUNDINGS = {torch.float16: 0.65, torch.bfloat16: 0.65}
"""By how many units of the last place gradients may differ as a whole. Measured: a mean that is computed in such a type
differs by 0.52 at most, one in full precision by nothing, one that couples samples a little by 0.75 and more."""
_OTHER_GRAD_ROUNDINGS = 16
_LEAST_SCALE = 1e-5
"""By how much the gradients of a microbatch may be larger or smaller as a whole."""


class NotAMeanError(ScheduleError):
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

    def stand_in(self, value: Any) -> Any:
        """What the pipeline gives to the training step of a microbatch.

        Args:
            value: What the training step gives to the pipeline.

        Returns:
            The output of the microbatch.

        Raises:
            NotAMeanError: It is not the part of the batch's input, or the pipeline is asked a second time.
        """
        self._num_asked += 1
        if self._num_asked > 1:
            raise NotAMeanError("training_step calls the model more than once")
        mine, theirs = flatten(value)[0], flatten(self._expected)[0]
        if len(mine) != len(theirs) or not all(map(_is_same_input, mine, theirs)):
            raise NotAMeanError("training_step gives the model other values for a part of a batch, as if drawn anew")
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
        call.note_buffers(layer for stage in runtime.stages.values() for layer in stage.layers)
        for parameter in parameters:
            parameter.grad = None
        reasons: list[str] = []

        def output_grads(microbatch: int) -> OutputGrads:
            output = call.batch.outputs[microbatch]
            try:
                if reasons:
                    raise NotAMeanError(reasons[0])
                grads = self._output_grads(call, microbatch, output)
            except NotAMeanError as error:
                reasons[:] = [str(error)]
                grads = [torch.zeros_like(one) for one in flatten(output)[0] if _wants_grad(one)]
            call.given[microbatch] = grads
            return grads

        call.batch.output_grads = output_grads
        try:
            is_refused = runtime.execute(
                call, runtime.program(whole_program, schedule), note=lambda: int(bool(reasons))
            )
            call.aside = {one: one.grad for one in parameters if one.grad is not None}
        finally:
            call.batch.output_grads = None
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
        call.is_fused = not is_refused
        if is_refused:
            runtime.why_split, _ = runtime.agree(reasons[0] if reasons else None)
            call.forget()
        return call.is_fused

    def _output_grads(self, call: Call, microbatch: int, output: Any) -> OutputGrads:
        runtime = self._runtime
        leaves, structure = flatten(output)
        # Copies, and no leaves: the step may change them in place, while the output is on its way to other ranks.
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        wanted = [
            new.requires_grad_() for new, leaf in zip(leaves, flatten(output)[0], strict=True) if _wants_grad(leaf)
        ]
        given = [as_output(leaf) if _wants_grad(leaf) else leaf for leaf in leaves]
        self._expected, self._output, self._num_asked = call.batch.inputs[microbatch], unflatten(given, structure), 0
        assert runtime.microbatch_loss is not None
        self.is_in_loss = True
        try:
            with put_back(runtime.device), torch.enable_grad():
                loss = runtime.microbatch_loss(microbatch, call.sizes)
            if not self._num_asked:
                raise NotAMeanError("training_step does not call the model for a part of a batch")
            if not loss.requires_grad:
                raise NotAMeanError("the loss of a part of a batch has no gradient")
            return list(torch.autograd.grad(loss, wanted, allow_unused=True))
        except (NotAMeanError, SyncError):
            raise
        except Exception as error:  # the step on the whole batch will say so, if it is one of the user's
            text = str(error) if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
            raise NotAMeanError(f"training_step fails on a part of a batch ({text[:200]})") from error
        finally:
            self.is_in_loss = False
            self._expected = self._output = None

    def backward(self, call: Call, grads: OutputGrads, tell: Callable[[int], None] | None) -> bool:
        """Add what was put aside, if it is what backward would have computed.

        Args:
            call: The batch.
            grads: Of its output; None for what the loss does not use.
            tell: Told each stage of this rank once its gradients are complete.

        Returns:
            Whether it is; the same on all ranks. If not, it is forgotten.
        """
        runtime = self._runtime
        is_alike = _are_alike(call.given, grads, call.sizes)
        is_finite = all(grad is None or bool(grad.isfinite().all()) for grad in grads) if call.given else True
        reason = None if is_alike else "the loss of a batch is not the mean of those of its parts"
        reason, is_finite = runtime.agree(reason, is_finite=is_finite)
        if is_finite and reason is not None:  # an overflow says nothing about the loss
            runtime.why_split = reason
        if reason is not None:
            call.forget()
            return False
        aside, call.aside, call.given = call.aside, {}, {}
        for parameter, grad in aside.items():
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
        if tell is not None:
            for index in sorted(runtime.stages, reverse=True):
                tell(index)
        return True


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _is_same_input(mine: Any, theirs: Any) -> bool:
    """Layers before the pipeline may round otherwise for a part of a batch."""
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return is_same_leaf(mine, theirs)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    if not mine.is_floating_point():
        return torch.equal(mine, theirs)
    if not mine.numel():
        return True
    allowed = _ROUNDINGS * torch.finfo(mine.dtype).eps
    largest = float(theirs.detach().abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(mine, theirs, rtol=allowed, atol=allowed * largest, equal_nan=True)


def _are_alike(given: Mapping[int, OutputGrads], grads: OutputGrads, sizes: Sequence[int]) -> bool:
    """Are the gradients of the batch's output those of the microbatches'?"""
    parts = of_microbatches(grads, sizes)
    for microbatch, ours in given.items():
        for mine, theirs in zip(ours, parts(microbatch), strict=True):
            if theirs is None or mine is None:
                if any(one is not None and bool(one.any()) for one in (mine, theirs)):
                    return False
            elif theirs.numel() and not _is_alike(mine, theirs):
                return False
    return True


def _is_alike(mine: Tensor, theirs: Tensor) -> bool:
    """Up to roundings of each number; and as large as a whole, as roundings do not all go the same way."""
    difference, size, other = (_norm(one) for one in (mine - theirs, theirs, mine))
    if not (math.isfinite(difference) and math.isfinite(size) and math.isfinite(other)):
        if bool((mine.isfinite() != theirs.isfinite()).any()):
            return False
        numbers = (torch.nan_to_num(one, 0.0, 0.0, 0.0) for one in (mine, theirs))
        mine, theirs = (one / torch.finfo(one.dtype).max ** 0.5 for one in numbers)  # whose squares are finite
        difference, size, other = (_norm(one) for one in (mine - theirs, theirs, mine))
    if not size:
        return not other
    eps = torch.finfo(theirs.dtype).eps
    if difference > _GRAD_ROUNDINGS.get(theirs.dtype, _OTHER_GRAD_ROUNDINGS) * eps * size:
        return False
    scale = (other**2 - size**2 - difference**2) / (2 * size**2)  # how much longer, in the direction of the other
    return abs(scale) <= 4 * eps / math.sqrt(theirs.numel()) + _LEAST_SCALE


def _norm(numbers: Tensor) -> float:
    """Without a copy of more precision, as outputs may be large."""
    dtype = torch.float32 if numbers.dtype in _GRAD_ROUNDINGS else None
    return float(torch.linalg.vector_norm(numbers, dtype=dtype))
