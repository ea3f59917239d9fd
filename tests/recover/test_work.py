"""One step as work that can be undone and done again, whole or in microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpufeed.recover.batchnorm import StatisticsOnce
from lightning_gpufeed.recover.merge import merge_values
from lightning_gpufeed.recover.split_batch import BatchSplitter, Split
from lightning_gpufeed.recover.states import ModuleStates
from lightning_gpufeed.recover.work import StepWork
from tests.doubles import EventLog
from tests.recover.hand_loop import CPU, Faults, HandLogs, Net, device_error, make_batches

BATCH = make_batches(1)[0]


def cut(number: int) -> Split:
    return BatchSplitter().split(BATCH, number)


class Parts:
    """A module and its work, with a log of what is called."""

    def __init__(self, module: nn.Module | None = None, **options: Any) -> None:
        self.module = module or Net()
        self.log, self.logs = EventLog(), HandLogs()
        self.options = options
        self.states = ModuleStates(self.module, CPU)
        self.work = self.make()

    def make(self, **options: Any) -> StepWork:
        given: dict[str, Any] = {
            "forward": self._forward,
            "put_together": self._put_together,
            "backward": self._backward,
            "zero_grad": self._zero_grad,
            **self.options,
            **options,
        }
        return StepWork(self.states, self.logs, **given)

    def _forward(self, microbatch: Any) -> tuple[torch.Tensor, Any]:
        self.log.add(f"forward {len(microbatch[0])}")
        x, y = microbatch
        loss = F.cross_entropy(self.module(x), y)
        self.logs.log("loss", loss, batch_size=len(x))
        return loss, {"loss": loss.detach(), "y": y}

    def _backward(self, loss: torch.Tensor, is_first: bool, is_last: bool) -> None:
        self.log.add(f"backward{' first' * is_first}{' last' * is_last}")
        loss.backward()

    def _zero_grad(self) -> None:
        self.log.add("zero_grad")
        self.module.zero_grad()

    def _put_together(self, outputs: Sequence[Any], split: Split) -> Any:
        self.log.add(f"put together {len(outputs)}")
        return merge_values(outputs, split.sizes, split.weights)

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]


def whole_gradients(scale: float = 1.0) -> list[torch.Tensor]:
    net = Net()
    (F.cross_entropy(net(BATCH[0]), BATCH[1]) * scale).backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


# Whole ---------------------------------------------------------------------------------------------------------


def test_a_whole_batch_is_done_as_a_plain_step_and_logged_at_once():
    parts = Parts()
    parts.work.save()
    output = parts.work.run(Split([BATCH], [0], [1.0]))
    assert parts.log.events == ["forward 16", "zero_grad", "backward first last"]
    assert output["y"] is BATCH[1]
    assert parts.logs.rows == [("loss", output["loss"].item(), 16)]
    assert all(torch.equal(a, b) for a, b in zip(parts.gradients(), whole_gradients(), strict=True))
    parts.work.finish()
    assert len(parts.logs.rows) == 1


def test_where_ranks_wait_for_each_other_a_whole_batch_is_logged_in_the_end_too():
    parts = Parts(defers_logs=True)
    parts.work.save()
    output = parts.work.run(Split([BATCH], [0], [1.0]))
    assert parts.logs.rows == []
    assert output["y"] is BATCH[1]
    parts.work.finish()
    assert parts.logs.rows == [("loss", output["loss"].item(), 16)]
    assert "put together 1" not in parts.log.events


# In microbatches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3, 16])
def test_microbatches_add_up_to_the_gradients_outputs_and_logs_of_the_batch(number):
    parts = Parts()
    split = cut(number)
    parts.work.save()
    output = parts.work.run(split)
    assert parts.logs.rows == []
    parts.work.finish()
    for gradient, expected in zip(parts.gradients(), whole_gradients(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)  # sums in another order
    assert torch.equal(output["y"], BATCH[1])
    [(key, value, batch_size)] = parts.logs.rows
    assert (key, batch_size) == ("loss", 16)
    assert value == pytest.approx(F.cross_entropy(Net()(BATCH[0]), BATCH[1]).item(), rel=1e-6)
    assert output["loss"].item() == pytest.approx(value, rel=1e-6)


def test_each_microbatch_is_told_whether_it_is_the_first_or_the_last_and_gradients_are_zeroed_once():
    parts = Parts()
    parts.work.save()
    parts.work.run(cut(3))
    assert parts.log.events == [
        *("forward 6", "zero_grad", "backward first"),
        *("forward 5", "backward"),
        *("forward 5", "backward last"),
        "put together 3",
    ]


def test_weights_of_microbatches_are_those_of_the_split():
    parts = Parts()
    parts.work.save()
    parts.work.run(Split([BATCH, BATCH], [16, 16], [0.25, 0.75]))
    for gradient, expected in zip(parts.gradients(), whole_gradients(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    parts.work.undo()
    parts.work.run(Split([BATCH, BATCH], [16, 16], [0.5, 0.0]))
    for gradient, expected in zip(parts.gradients(), whole_gradients(0.5), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_losses_that_are_sums_are_not_weighed():
    parts = Parts(loss_reduction="sum")
    parts.work.save()
    parts.work.run(Split([BATCH, BATCH], [16, 16], [0.25, 0.75]))
    for gradient, expected in zip(parts.gradients(), whole_gradients(2.0), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("number", [1, 2])
def test_evaluation_has_forward_alone(number):
    parts = Parts(Net(between=nn.BatchNorm1d(8)), backward=None, zero_grad=None)
    parts.module.eval()
    parts.work.save()
    assert not parts.work.has_backward
    with torch.no_grad():
        parts.work.run(cut(number))
    parts.work.finish()
    assert [event for event in parts.log.events if event.startswith(("backward", "zero"))] == []
    assert parts.gradients() == [None] * 6
    assert len(parts.logs.rows) == 1


def test_a_step_without_loss_has_no_backward():
    parts = Parts()
    parts.options["forward"] = lambda microbatch: (None, {"y": microbatch[1]})
    work = parts.make()
    work.save()
    output = work.run(cut(2))
    work.finish()
    assert parts.log.events == ["zero_grad", "put together 2"]
    assert torch.equal(output["y"], BATCH[1])


def test_nothing_of_a_microbatch_is_alive_when_the_next_begins():
    """Otherwise more microbatches would need as much memory as one."""

    class Watching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append(faults.num_alive())
            return super().forward(x)

    alive: list[int] = []
    faults = Faults({})
    parts = Parts(Watching(faults))
    parts.module.accuracy = MulticlassAccuracy(4)
    parts.states.refresh()

    def forward(microbatch: Any) -> tuple[torch.Tensor, Any]:
        out = parts.module(microbatch[0])
        parts.module.accuracy(out, microbatch[1])
        parts.logs.log("largest", out.max())
        loss = F.cross_entropy(out, microbatch[1])
        return loss, loss.detach()

    parts.options["forward"] = forward
    work = parts.make()
    work.save()
    faults.begin_attempt()
    work.run(cut(4))
    assert alive == [0, 0, 0, 0]
    assert len(faults.activations) == 4


# Counted once --------------------------------------------------------------------------------------------------


class Measured(Net):
    """With statistics and metrics."""

    def __init__(self, faults: Faults | None = None) -> None:
        super().__init__(faults, nn.BatchNorm1d(8))
        self.accuracy, self.mean = MulticlassAccuracy(4), MeanMetric()


def measured_parts(faults: Faults | None = None, **options: Any) -> Parts:
    parts = Parts(Measured(faults), **options)

    def forward(microbatch: Any) -> tuple[torch.Tensor, Any]:
        x, y = microbatch
        out = parts.module(x)
        loss = F.cross_entropy(out, y)
        parts.module.accuracy(out, y)
        parts.module.mean.update(loss)
        parts.logs.log("accuracy", parts.module.accuracy)
        return loss, loss.detach()

    parts.options["forward"] = forward
    parts.work = parts.make()
    return parts


@pytest.mark.parametrize("number", [1, 2, 4])
def test_statistics_and_metrics_count_a_batch_once(number):
    parts = measured_parts()
    parts.work.save()
    parts.work.run(cut(number))
    parts.work.finish()
    assert parts.module.between.num_batches_tracked == 1
    assert (parts.module.accuracy._update_count, parts.module.mean._update_count) == (1, 1)
    whole = Measured()
    whole(BATCH[0])
    # of the same inputs in another order of summation
    torch.testing.assert_close(parts.module.between.running_var, whole.between.running_var, rtol=1e-5, atol=1e-6)
    assert [key for key, _, _ in parts.logs.rows] == ["accuracy"]


def test_who_does_not_want_statistics_corrected_has_them_counted_per_microbatch():
    parts = measured_parts(corrects_batchnorm=False)
    parts.work.save()
    parts.work.run(cut(4))
    assert parts.module.between.num_batches_tracked == 4


def test_a_metric_whose_calls_do_not_go_together_is_noted():
    parts = Parts()
    parts.module.hits = SumMetric()
    parts.states.refresh()

    def forward(microbatch: Any) -> tuple[torch.Tensor, Any]:
        parts.module.hits.update(*([1.0] if len(microbatch[0]) == 6 else [torch.ones(2, 2)]))
        return F.cross_entropy(parts.module(microbatch[0]), microbatch[1]), None

    parts.options["forward"] = forward
    work = parts.make()
    work.save()
    work.run(cut(3))
    [note] = work.notes
    assert "SumMetric" in note
    assert parts.module.hits.compute() == 9.0


# Undone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("number", "microbatch"), [(1, 0), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("is_accumulating", [False, True])
def test_a_failed_run_that_is_undone_leaves_no_trace_and_the_next_is_as_the_first(
    phase, number, microbatch, is_accumulating
):
    faults = Faults({(0, 0): (phase, microbatch, device_error)})
    parts, twin = measured_parts(faults), measured_parts()
    zero_grad: dict[str, Any] = {}
    for one in (parts, twin):
        if is_accumulating:
            zero_grad = {"zero_grad": None}
            for parameter in one.module.parameters():
                parameter.grad = torch.ones_like(parameter)
    before, count = parts.gradients(), torch.get_rng_state()
    state = {name: value.clone() for name, value in parts.module.state_dict().items()}
    work = parts.make(**zero_grad)
    work.save()
    faults.begin_batch(0)
    faults.begin_attempt()
    with pytest.raises(torch.OutOfMemoryError):
        work.run(cut(number))
    assert work.phase == phase
    faults.end_attempt()
    norm = parts.module.between
    assert (norm.momentum, len(norm._forward_hooks), parts.logs._held) == (0.1, 0, None)
    assert "forward" not in parts.module.accuracy.__dict__
    work.undo()
    assert parts.logs.rows == []
    assert [name for name, value in parts.module.state_dict().items() if not torch.equal(value, state[name])] == []
    assert parts.module.accuracy._update_count == 0
    assert torch.equal(torch.get_rng_state(), count)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(parts.gradients(), before, strict=True))

    twin_work = twin.make(**zero_grad)
    twin_work.save()
    for one in (work, twin_work):
        one.run(cut(2))
        one.finish()
    assert all(torch.equal(a, b) for a, b in zip(parts.gradients(), twin.gradients(), strict=True))
    assert parts.logs.rows == twin.logs.rows
    assert parts.log.events.count("zero_grad") == (not is_accumulating)


def test_a_run_that_was_done_can_be_undone_as_well():
    """The update may fail after it."""
    parts, twin = measured_parts(), measured_parts()
    parts.work.save()
    for number in (1, 3, 1):
        parts.work.run(cut(number))
        parts.work.undo()
        assert parts.logs.rows == []
        assert parts.module.between.num_batches_tracked == parts.module.mean._update_count == 0
        assert parts.gradients() == [None] * 6
    twin.work.save()
    parts.work.run(cut(2))
    twin.work.run(cut(2))
    assert all(torch.equal(a, b) for a, b in zip(parts.gradients(), twin.gradients(), strict=True))


def test_stale_gradients_of_the_last_step_are_zeroed_where_the_user_would_see_it_and_do_not_come_back():
    parts = Parts()
    for parameter in parts.module.parameters():
        parameter.grad = torch.full_like(parameter, 9.0)
    parts.work.save()
    parts.work.run(cut(2))
    parts.work.undo()
    assert parts.gradients() == [None] * 4


@pytest.mark.parametrize("defers_logs", [False, True])
@pytest.mark.parametrize("number", [1, 4])
def test_what_is_logged_in_a_run_that_is_undone_is_not_logged_by_the_next(number, defers_logs):
    parts = Parts(defers_logs=defers_logs)
    parts.work.save()
    parts.work.run(cut(2))
    parts.work.undo()
    parts.work.run(cut(number))
    parts.work.finish()
    parts.work.finish()
    assert len(parts.logs.rows) == 1


def test_memory_that_runs_out_before_the_first_microbatch_leaves_everything_as_it_was(monkeypatch):
    def fail(*args: Any) -> None:
        raise device_error()

    parts = measured_parts()
    parts.work.save()
    monkeypatch.setattr(StatisticsOnce, "begin_microbatch", fail)
    with pytest.raises(torch.OutOfMemoryError):
        parts.work.run(cut(2))
    norm = parts.module.between
    assert (norm.momentum, len(norm._forward_hooks), parts.logs._held) == (0.1, 0, None)
    assert "forward" not in parts.module.accuracy.__dict__
