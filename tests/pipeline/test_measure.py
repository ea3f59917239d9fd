"""What layers take: bytes exactly, seconds of layers that sleep roughly; and that nothing is left behind."""

from __future__ import annotations

import doctest
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpufeed.backprop.kernels import Kernels, register_kernels
from lightning_gpufeed.pipeline import measure as measure_module
from lightning_gpufeed.pipeline.link import Link
from lightning_gpufeed.pipeline.measure import MeasuredLayers, measure_layers
from lightning_gpufeed.pipeline.simulate import StageCosts

ROUGHLY = 0.8  # a sleep of 20 ms on a busy machine may last much longer


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Noting) -> Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.layer.backwards.append((ctx.needs_input_grad[0], torch.is_autocast_enabled("cpu"), grads[0].mean().item()))
        time.sleep(ctx.layer.backward_seconds)
        return grads[0], None


class Noting(nn.Module):
    """Notes how it is called, and takes its time. Of its parameter it is told by autograd itself."""

    def __init__(self, forward_seconds: float = 0.0, backward_seconds: float = 0.0) -> None:
        super().__init__()
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.forwards: list[tuple[bool, bool, bool]] = []
        self.backwards: list[tuple[bool, bool, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.append((self.training, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return _Noted.apply(x, self)


class Sleepy(nn.Module):
    """Its weight gradient can wait."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _SleepyKernels(Kernels):
    def forward(self, x, weight, bias):
        time.sleep(0.02)
        return x * weight

    def input_grad(self, grad_output, x, weight):
        time.sleep(0.04)
        return grad_output * weight

    def weight_grad(self, grad_output, x, weight, mask):
        time.sleep(0.06)
        return (grad_output * x).sum(), None


register_kernels(Sleepy, lambda module, x: _SleepyKernels())


class Function(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def bytes_of(cost: StageCosts) -> tuple[int, int]:
    return cost.activation_bytes, cost.deferred_bytes


def test_the_examples_run():
    assert doctest.testmod(measure_module).failed == 0


# Seconds ---------------------------------------------------------------------------------------------------


def test_seconds_are_those_that_layers_sleep():
    layers = [Noting(0.02, 0.04), Sleepy()]
    first, second = measure_layers(layers, torch.ones(2, requires_grad=True)).costs
    assert (first.forward_seconds, first.input_grad_seconds) == pytest.approx((0.02, 0.04), rel=ROUGHLY)
    assert first.weight_grad_seconds == 0.0
    passes = (second.forward_seconds, second.input_grad_seconds, second.weight_grad_seconds)
    assert passes == pytest.approx((0.02, 0.04, 0.06), rel=ROUGHLY)


def test_each_layer_runs_once_more_than_its_time_is_taken():
    layer = Noting()
    measure_layers([layer], torch.ones(2, requires_grad=True), num_repeats=4)
    assert (len(layer.forwards), len(layer.backwards)) == (5, 5)


def test_of_each_time_the_least_counts():
    layer = Noting()
    seconds = iter([0.3, 0.3, 0.3, 0.02, 0.3, 0.3])  # the first run, and others that were disturbed
    layer.register_forward_pre_hook(lambda *_: time.sleep(next(seconds)))
    assert measure_layers([layer], torch.ones(2)).costs[0].forward_seconds == pytest.approx(0.02, rel=ROUGHLY)


def test_the_first_layer_has_an_input_gradient_if_the_input_requires_one_and_others_always():
    for is_required in (False, True):
        first, second = nn.Sequential(nn.Linear(2, 2), Noting()), Noting()
        watched = Noting()
        measure_layers([nn.Sequential(watched, first), second], torch.ones(3, 2, requires_grad=is_required))
        assert bool(watched.backwards) is is_required
        assert all(call[0] for call in second.backwards)
        assert second.backwards


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(2, 2).requires_grad_(False), torch.ones(3, 2)),
        (nn.Flatten(), torch.ones(3, 2)),
        (nn.Identity(), torch.ones(3, dtype=torch.int64)),
        (Function(lambda x: x.argmax(1)), torch.ones(3, 2, requires_grad=True)),
    ],
    ids=["frozen", "without parameters", "integers", "integers come out"],
)
def test_what_has_nothing_to_differentiate_takes_no_time_in_backward(layer, x):
    [cost] = measure_layers([layer], x).costs
    assert (cost.input_grad_seconds, cost.weight_grad_seconds, *bytes_of(cost)) == (0.0, 0.0, 0, 0)
    assert cost.forward_seconds > 0


def test_what_cannot_be_split_counts_as_input_gradient():
    [cost] = measure_layers([nn.LayerNorm(4)], torch.ones(3, 4)).costs
    assert cost.input_grad_seconds > 0
    assert (cost.weight_grad_seconds, cost.deferred_bytes) == (0.0, 0)


def test_gradients_of_outputs_are_ones():
    layer = Noting()
    measure_layers([layer], torch.full((2,), 3.0, requires_grad=True))
    assert {call[2] for call in layer.backwards} == {1.0}


# Bytes -----------------------------------------------------------------------------------------------------


def test_bytes_are_those_that_are_kept_deferred_and_sent():
    layers = [nn.Embedding(10, 4), nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())]
    measured = measure_layers(layers, torch.zeros(3, dtype=torch.int64))
    indices, x, y = 3 * 8, 3 * 4 * 4, 3 * 8 * 4
    assert [bytes_of(cost) for cost in measured.costs] == [
        (indices, indices + x),
        (x, x + y),
        (y, 0),
        (y + y, y + y),
    ]
    assert measured.sent_bytes == (x, y, y, y)


def test_memory_that_is_kept_several_times_counts_once():
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return sum(part(x) for part in self.parts)

    [cost] = measure_layers([Projections()], torch.ones(5, 4)).costs
    assert bytes_of(cost) == (80, 80 + 80)


def test_what_forward_needs_only_for_itself_does_not_count():
    def used_once(x: Tensor) -> Tensor:
        return x * 2.0 + (x.exp().detach() * 0.0)

    [cost] = measure_layers([Function(used_once)], torch.ones(8, requires_grad=True)).costs
    assert cost.activation_bytes == 0


def test_parameters_and_buffers_do_not_count():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.register_buffer("mask", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * self.mask

    [cost] = measure_layers([Scaled()], torch.ones(6, requires_grad=True)).costs
    assert cost.activation_bytes == 24  # the input, for the gradient of the scale


def test_a_checkpointed_layer_keeps_its_input_alone():
    body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    plain, checkpointed = (
        measure_layers([layer], torch.ones(2, 4, requires_grad=True)).costs[0]
        for layer in (body, Function(lambda x: checkpoint(body, x, use_reentrant=False)))
    )
    assert plain.activation_bytes == 2 * (4 + 16) * 4
    assert checkpointed.activation_bytes == 2 * 4 * 4


def test_any_structure_is_passed_on():
    class Pair(nn.Module):
        def forward(self, value: Any) -> Any:
            assert value["x"].requires_grad
            return {"x": (value["x"].double(), value["index"]), "name": value["name"]}

    last = Function(lambda value: value["x"][0][value["x"][1]])
    given = {"x": torch.ones(4, requires_grad=True), "index": torch.arange(3), "name": "any"}
    measured = measure_layers([Pair(), last], given)
    assert measured.sent_bytes == (4 * 8 + 3 * 8, 3 * 8)


# The caller's surroundings ---------------------------------------------------------------------------------


def test_forward_runs_under_the_callers_autocast_and_backward_outside_of_it():
    layer = Noting()
    x = torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        measured = measure_layers([nn.Linear(4, 4), layer], x)
        assert torch.is_autocast_enabled("cpu")
    assert {call[1] for call in layer.forwards} == {True}
    assert {call[1] for call in layer.backwards} == {False}
    assert measured.sent_bytes == (2 * 4 * 2,) * 2
    plain = measure_layers([nn.Linear(4, 4), layer], x)
    assert plain.sent_bytes == (2 * 4 * 4,) * 2


def test_a_caller_without_gradients_gets_the_same():
    layer = Noting()
    with torch.no_grad():
        [_, cost] = measure_layers([nn.Linear(4, 4), layer], torch.ones(2, 4)).costs
        assert not torch.is_grad_enabled()
    assert {call[2] for call in layer.forwards} == {True}
    assert cost.input_grad_seconds > 0


def test_layers_have_the_mode_that_they_have():
    layer = Noting().eval()
    measure_layers([layer], torch.ones(2))
    assert not any(call[0] for call in layer.forwards)


# Nothing is left behind ------------------------------------------------------------------------------------


class Careless(nn.Module):
    """Changes all that a forward can change, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("absent", None)
        self.fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        random.random(), np.random.rand()
        self.replaced = self.replaced + 1
        self.absent = torch.ones(1)
        self.norm(x)
        self.train(not self.training)
        x = nn.functional.dropout(self.linear(x), 0.5)
        if self.fails_in == "backward":
            x.register_hook(self.fail)
        if self.fails_in == "forward":
            self.fail()
        return x

    def fail(self, *_: Any) -> None:
        raise RuntimeError("a layer of the user's own")


def traces(model: nn.Module, x: Tensor) -> list[Any]:
    return [
        [(parameter.grad, parameter.grad is None or parameter.grad.tolist()) for parameter in model.parameters()],
        [(id(buffer), buffer.tolist()) for buffer in model.buffers()],
        [(module.training, "forward" in vars(module), module._buffers.keys()) for module in model.modules()],
        [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()],
        (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        (x.tolist(), x.grad, x.requires_grad),
    ]


@pytest.fixture
def careless():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), Careless(), nn.Linear(4, 4))
    model[1].weight.grad = torch.ones(4, 4)
    return model


@pytest.mark.parametrize("is_required", [False, True])
def test_gradients_buffers_modes_generators_and_the_input_are_as_before(careless, is_required):
    x = torch.randn(3, 4).requires_grad_(is_required)
    before, grad = traces(careless, x), careless[1].weight.grad
    measure_layers(list(careless), x)
    assert str(traces(careless, x)) == str(before)
    assert careless[1].weight.grad is grad


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_they_are_so_too_after_an_error_which_is_the_layer_s_own(careless, where):
    careless[2].fails_in = where
    x = torch.randn(3, 4)
    before = traces(careless, x)
    with pytest.raises(RuntimeError, match="a layer of the user's own"):
        measure_layers(list(careless), x)
    assert str(traces(careless, x)) == str(before)


def test_training_goes_on_as_if_nothing_had_been_measured():
    def trained(is_measured: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        for x in torch.randn(2, 5, 4):
            model(x).sum().backward()
            if is_measured:
                measure_layers(list(model), x, num_repeats=1)
        return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]

    assert all(torch.equal(*pair) for pair in zip(trained(False), trained(True), strict=True))


# The value -------------------------------------------------------------------------------------------------


def test_numbers_survive_the_way_to_another_rank():
    measured = measure_layers([nn.Linear(4, 8), nn.ReLU()], torch.ones(2, 4))
    tensor = torch.tensor(measured.as_lists(), dtype=torch.float64)
    assert MeasuredLayers.from_lists(tensor.tolist()) == measured
    assert all(isinstance(size, int) for size in MeasuredLayers.from_lists(tensor.tolist()).sent_bytes)


def test_sends_are_those_between_layers():
    measured = MeasuredLayers((StageCosts(),) * 3, sent_bytes=(10, 20, 30))
    assert [one.seconds for one in measured.send_seconds(Link(1.0, 0.5))] == [6.0, 11.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeasuredLayers((StageCosts(),), (1, 2)), r"sent_bytes is \(1, 2\); expected 1 sizes"),
        (lambda: MeasuredLayers((StageCosts(),), (-1,)), r"sent_bytes is \(-1,\); expected 1 sizes of at least 0"),
        (lambda: MeasuredLayers.from_lists([[1.0] * 5]), "Layer 0 has 5 numbers; expected 6"),
        (lambda: MeasuredLayers.from_lists([[1.0] * 6, [-1.0] * 6]), "forward_seconds is -1.0; expected"),
        (lambda: measure_layers([], torch.ones(1), num_repeats=0), "num_repeats is 0; expected"),
    ],
    ids=["as many", "negative", "six", "costs", "repeats"],
)
def test_what_is_not_measured_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
