"""One step of training or evaluation as work that can be undone and done again, whole or in microbatches.

::

    save ── run(whole) ──────────────────────────────────── finish
                └─ out of memory ─ undo ─ run(2) ──┐
                                    undo ─ run(4) ─┴─ finish     all ranks get here together

Nothing of a `run` is seen from outside before `finish`: what it logs in microbatches is kept, what it does to metrics
and statistics is done once for the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch

from lightning_gpufeed.recover.batch_guard import BatchGuard
from lightning_gpufeed.recover.batchnorm import StatisticsOnce
from lightning_gpufeed.recover.gradients import GradientStates
from lightning_gpufeed.recover.logged import LogCall, Rule, combine_calls
from lightning_gpufeed.recover.metric_calls import MetricCalls
from lightning_gpufeed.recover.ranks import RankGuard, num_collectives
from lightning_gpufeed.recover.split_batch import Split
from lightning_gpufeed.recover.states import ModuleStates

__all__ = ["MOVES_ONCE", "Logs", "StepWork"]


MOVES_ONCE = "buffer "
"""Begin of the name under which rules note that a buffer moves in every step, whatever the batch."""


class Logs(Protocol):
    """Where a step logs to."""

    def save(self) -> None:
        """Note what has been logged so far."""

    def put_back(self) -> None:
        """Forget what was logged since."""

    def begin(self) -> list[LogCall]:
        """Keep calls from now on in the list returned, instead of making them."""

    def end(self) -> None:
        """Make calls again."""

    def apply(self, call: LogCall) -> None:
        """Make one call."""


class StepWork:
    """Forward and backward of one batch, or forward alone.

    Attributes:
        phase: What was being done: "forward" or "backward".
        guard: What the batch was like at first.
        has_talked: Whether the step itself has talked to other ranks, in the latest attempt.
        notes: What a user should know, each said once by whoever reads them.
    """

    def __init__(
        self,
        states: ModuleStates,
        logs: Logs,
        *,
        forward: Callable[[Any], tuple[torch.Tensor | None, Any]],
        put_together: Callable[[Sequence[Any], Split], Any],
        backward: Callable[[torch.Tensor, bool, bool], None] | None = None,
        zero_grad: Callable[[], None] | None = None,
        ranks: RankGuard | None = None,
        is_reduced: bool = False,
        loss_reduction: Literal["mean", "sum"] = "mean",
        corrects_batchnorm: bool = True,
        defers_logs: bool = False,
        rules: dict[str, Rule] | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            states: Of the module.
            logs: Where the step logs to.
            forward: Microbatch -> loss with its graph, if there is one, and what the step gave.
            put_together: What the step gave for each microbatch -> the same for the batch.
            backward: Loss, whether it is the first and the last of the batch -> adds to the gradients. None: there is
                no training.
            zero_grad: Called once, after the first forward; None inside an accumulation window.
            ranks: Several ranks train together.
            is_reduced: Gradients are reduced over the ranks after this batch.
            loss_reduction: How the loss of a batch comes about from those of its samples.
            corrects_batchnorm: Count statistics once per batch.
            defers_logs: Log after the attempt that worked also if the batch was used whole: for values that are
                reduced over ranks as they are logged.
            rules: How logged values are put together.
        """
        self.states, self.logs = states, logs
        self._forward, self._put_together = forward, put_together
        self._backward, self._zero_grad = backward, zero_grad
        self._ranks, self._is_reduced = ranks, is_reduced
        self._loss_reduction, self._corrects_batchnorm = loss_reduction, corrects_batchnorm
        self._defers_logs = defers_logs or ranks is not None
        self.rules = {} if rules is None else rules
        self._gradients: GradientStates | None = None
        self._has_zeroed = zero_grad is None
        self._logged: list[LogCall] = []
        self._num_skipped = 0
        self.phase = "forward"
        self.guard: BatchGuard | None = None
        self.has_talked = False
        self.notes: list[str] = []

    def save(self) -> None:
        """Note everything that an attempt may change; every rank does this once per batch."""
        if self._ranks is not None:
            self._ranks.begin()
        self.states.save()
        self.logs.save()
        if self._backward is not None and self._has_zeroed:
            self._gradients = GradientStates(self.states.parameters, self.states.gradient_copies)

    def undo(self) -> list[str]:
        """Make everything what it was before the batch; gradients what they were before it added to them.

        Returns:
            Names of weights that the step itself has changed, which cannot be undone.
        """
        lost = self.states.put_back()
        self.logs.put_back()
        self._logged = []
        if self._gradients is not None:
            self._gradients.put_back()
        if self._ranks is not None:
            self._ranks.undo()
        return lost

    def run(self, split: Split) -> Any:
        """Do the step.

        Args:
            split: The batch, whole or in microbatches.

        Returns:
            What the step gave for the batch.
        """
        self.phase = "forward"
        before = num_collectives()
        try:
            with nullcontext() if self._ranks is None or self._backward is None else self._ranks.without_sync():
                if len(split.microbatches) == 1 and not self._defers_logs:
                    return self._pass(split.microbatches[0], 1.0, True, True)
                return self._run_parts(split)
        finally:
            self.has_talked = num_collectives() != before

    def _run_parts(self, split: Split) -> Any:
        """In microbatches, or whole with nothing logged before all ranks are done."""
        last = len(split.microbatches) - 1
        self._num_skipped = 0
        once = [key.removeprefix(MOVES_ONCE) for key in self.rules if key.startswith(MOVES_ONCE)]
        statistics = calls = None
        outputs: list[Any] = []
        logged: list[list[LogCall]] = []
        try:
            if last > 0:
                calls = MetricCalls(self.states.metrics)
                if self._backward is not None and self._corrects_batchnorm:
                    statistics = StatisticsOnce(self.states.module)
            for number, (microbatch, weight) in enumerate(zip(split.microbatches, split.weights, strict=True)):
                for part in (statistics, calls):
                    if part is not None:
                        part.begin_microbatch()
                if number > 0:
                    # A teacher that follows the weights does so once per batch.
                    self.states.weights.put_back()
                    self.states.buffers.put_back_named(once)
                logged.append(self.logs.begin())
                share = 1.0 if self._loss_reduction == "sum" else weight
                outputs.append(self._pass(microbatch, share, number == 0, number == last))
        finally:
            self.logs.end()
            if calls is not None:
                calls.end()
            if statistics is not None:
                statistics.end()
        self._skip_if_any_did(last + 1)
        if statistics is not None:
            statistics.apply()
        if calls is not None:
            for name in calls.repeat_once(self.states.metric_states, split.sizes, split.weights, self.rules):
                self.notes.append(
                    f"the calls of the metric {name} could not be put together from microbatches; it counts each of "
                    f"them as a batch"
                )
        self._logged = combine_calls(logged, split.sizes, split.weights, self.rules)
        return outputs[0] if last == 0 else self._put_together(outputs, split)

    def _skip_if_any_did(self, num_microbatches: int) -> None:
        """A step that gives no loss for a part would most likely have given none for the whole."""
        if 0 < self._num_skipped < num_microbatches:
            if self._gradients is not None:
                self._gradients.put_back()
            self.notes.append(
                "training_step gave no loss for some microbatches of a batch, so the batch is skipped, as it would "
                "have been as a whole"
            )

    def _pass(self, microbatch: Any, share: float, is_first: bool, is_last: bool) -> Any:
        self.phase = "forward"
        loss, output = self._forward(microbatch)
        if self._backward is None:
            return output
        if not self._has_zeroed and self._zero_grad is not None:
            self._zero_grad()
            self._has_zeroed = True
            self._gradients = GradientStates(self.states.parameters, self.states.gradient_copies)
        self.phase = "backward"
        if self._gradients is not None:
            self._gradients.before_change()
        self._num_skipped += loss is None
        if loss is not None:
            self._backward(loss if share == 1.0 else loss * share, is_first, is_last)
        return output

    def finish(self) -> None:
        """Let all be seen: reduce over the ranks, log. Every rank does this once per batch."""
        if self._ranks is not None and self._is_reduced:
            self._ranks.reduce()
        for call in self._logged:
            self.logs.apply(call)
        self._logged = []

    # Looking at parts without training on them ------------------------------------------------------------

    def observe(
        self, microbatches: Sequence[Any], weights: Sequence[float]
    ) -> tuple[float | None, list[list[LogCall]]]:
        """Forward and backward into fresh gradients, for a comparison; nothing is undone here.

        Args:
            microbatches: Parts.
            weights: Their shares.

        Returns:
            Loss of all of them together, None if the step gave none; what each of them logged, and the single numbers
            it called metrics with.
        """
        total: float | None = None
        logged: list[list[LogCall]] = []
        calls = MetricCalls(self.states.metrics)
        with nullcontext() if self._ranks is None or self._backward is None else self._ranks.without_sync():
            try:
                for microbatch, weight in zip(microbatches, weights, strict=True):
                    # A buffer that a pass moves and uses would make each pass another function.
                    self.states.buffers.put_back(keeps_new=True)
                    self.states.weights.put_back()
                    self.phase = "forward"
                    calls.begin_microbatch()
                    logged.append(self.logs.begin())
                    loss, _ = self._forward(microbatch)
                    if loss is None or self._backward is None:
                        continue
                    share = 1.0 if self._loss_reduction == "sum" else weight
                    self.phase = "backward"
                    total = (total or 0.0) + float(loss.detach()) * share
                    self._backward(loss * share, False, False)
            finally:
                self.logs.end()
                calls.end()
        return total, [own + numbers for own, numbers in zip(logged, calls.numbers(), strict=True)]

    @property
    def has_backward(self) -> bool:
        """Whether this is training."""
        return self._backward is not None
