"""One stage on one rank, against plain autograd over the same microbatches: equal to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.nested import flatten
from lightning_gpufeed.pipeline.randomness import Draws
from lightning_gpufeed.pipeline.stage import Stage
from tests.pipeline.pipeline_models import Masked, Residual, TwoHeads

NUM_MICROBATCHES = 3

LAYERS = {
    "linear": lambda: [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)],
    "no bias": lambda: [nn.Linear(6, 6, bias=False), nn.LayerNorm(6)],
    "in place inside": lambda: [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True)],
    "encoder": lambda: [nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)],
    "residual": lambda: [Residual(3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)],
    "transposed": lambda: [nn.ConvTranspose2d(3, 4, 2, stride=2), nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 1, groups=1)],
    "without parameters": lambda: [nn.Tanh(), nn.Softmax(-1)],
    "normalisation": lambda: [nn.LayerNorm(6), nn.LayerNorm(6)],
    "recurrent": lambda: [nn.LSTM(6, 6, batch_first=True), First(), nn.Linear(6, 2)],
    "shared": lambda: [layer := nn.Linear(6, 6), nn.Tanh(), layer],
    "two heads": lambda: [nn.Linear(6, 6), TwoHeads(6)],
    "own parameters": lambda: [Scaled(6), nn.Linear(6, 6)],
}


NOT_CHECKPOINTED = ("residual", "in place inside")
"""Statistics that a second forward changes: see below. And what torch
itself refuses: a layer that changes its input has changed it already when it is run again."""


class First(nn.Module):
    """The first of a tuple."""

    def forward(self, x):
        return x[0]


class Scaled(nn.Module):
    """A parameter that is no weight of a known layer."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, width))

    def forward(self, x):
        return x * self.scale


def given(name, microbatch):
    """The input of a microbatch."""
    generator = torch.Generator().manual_seed(microbatch)
    shape = {"residual": (2, 3, 6, 6), "transposed": (2, 3, 6, 6)}.get(name, (2, 4, 6))
    return torch.randn(shape, generator=generator)


def made(name):
    """Layers with the same weights each time."""
    torch.manual_seed(1)
    return LAYERS[name]()


def grads_for(output):
    """What comes back for each output that has a gradient."""
    found = [one for one in flatten(output)[0] if isinstance(one, torch.Tensor) and one.requires_grad]
    return [torch.linspace(-1, 1, one.numel()).reshape(one.shape).to(one.dtype) for one in found]


def plain(layers, inputs):
    """Outputs and input gradients as autograd has them; weight gradients are in `.grad`."""
    outputs, input_grads = [], []
    for value in inputs:
        leaf = value.clone()
        if leaf.is_floating_point():
            leaf.requires_grad_()
        output = leaf
        for layer in layers:
            output = layer(output)
        wanted = [one for one in flatten(output)[0] if one.requires_grad]
        torch.autograd.backward(wanted, grads_for(output))
        outputs.append([one.detach() for one in flatten(output)[0]])
        input_grads.append(leaf.grad)
    return outputs, input_grads


def staged(layers, inputs, *, is_split, is_checkpointed=False, order="IWIWIW"):
    """The same by a stage in the middle; all forwards first, then in an order of I and W."""
    stage = Stage(1, layers, 0, is_split=is_split, is_checkpointed=is_checkpointed)
    torch.manual_seed(2)
    draws = Draws(0, 0)
    outputs, held = [], []
    for number, value in enumerate(inputs):
        value = value.clone().requires_grad_(value.is_floating_point())
        output, one = stage.forward(value, number, draws, has_backward=True)
        outputs.append([leaf.detach() for leaf in flatten(output)[0]])
        held.append((one, grads_for(output)))
    input_grads, next_i, next_w = [], 0, 0
    for kind in order:
        if kind == "I":
            found = stage.input_grad(*held[next_i])
            input_grads.append(found[0][0] if found else None)
            next_i += 1
        else:
            stage.weight_grad(held[next_w][0])
            next_w += 1
    assert stage.pending_bytes == 0
    stage.close()
    return outputs, input_grads


def assert_same(ours, theirs, layers, other_layers):
    """Outputs, input gradients and weight gradients, to the last bit."""
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    named = dict(nn.ModuleList(other_layers).named_parameters())
    for name, parameter in nn.ModuleList(layers).named_parameters():
        assert torch.equal(parameter.grad, named[name].grad), name


@pytest.mark.parametrize("order", ["IWIWIW", "IIIWWW", "IIWIWW"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_stage_is_plain_autograd_to_the_last_bit_whenever_weight_gradients_come(name, is_split, order):
    layers, other = made(name), made(name)
    inputs = [given(name, microbatch) for microbatch in range(NUM_MICROBATCHES)]
    ours = staged(layers, inputs, is_split=is_split, order=order)
    assert_same(ours, plain(other, inputs), layers, other)


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NOT_CHECKPOINTED])
def test_a_checkpointed_stage_is_plain_autograd_to_the_last_bit(name, is_split):
    layers, other = made(name), made(name)
    inputs = [given(name, microbatch) for microbatch in range(NUM_MICROBATCHES)]
    ours = staged(layers, inputs, is_split=is_split, is_checkpointed=True, order="IIWIWW")
    assert_same(ours, plain(other, inputs), layers, other)


def test_weights_are_updated_in_place_between_steps_and_the_next_step_sees_it():
    layers, other = made("linear"), made("linear")
    inputs = [given("linear", 0)]
    for _ in range(2):
        staged(layers, inputs, is_split=True, order="IW")
        plain(other, inputs)
        for parameter in [*nn.ModuleList(layers).parameters(), *nn.ModuleList(other).parameters()]:
            parameter.data.add_(parameter.grad, alpha=-0.1)
    assert_same(([], []), ([], []), layers, other)


def test_statistics_of_batchnorm_are_those_of_one_forward_after_another():
    layers, other = made("residual"), made("residual")
    inputs = [given("residual", microbatch) for microbatch in range(NUM_MICROBATCHES)]
    staged(layers, inputs, is_split=True)
    plain(other, inputs)
    for one, theirs in zip(nn.ModuleList(layers).buffers(), nn.ModuleList(other).buffers(), strict=True):
        assert torch.equal(one, theirs)


def test_checkpointing_does_not_change_the_statistics_of_batchnorm():
    layers, other = made("residual"), made("residual")
    inputs = [given("residual", microbatch) for microbatch in range(NUM_MICROBATCHES)]
    staged(layers, inputs, is_split=True, is_checkpointed=True)
    plain(other, inputs)
    for one, theirs in zip(nn.ModuleList(layers).buffers(), nn.ModuleList(other).buffers(), strict=True):
        assert torch.equal(one, theirs)


def test_a_checkpointed_stage_drops_out_the_same_the_second_time():
    torch.manual_seed(1)
    layers = [nn.Linear(6, 6), nn.Dropout(0.5), nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)]
    other = copy.deepcopy(layers)
    inputs = [given("encoder", microbatch) for microbatch in range(NUM_MICROBATCHES)]
    ours = staged(layers, inputs, is_split=True, is_checkpointed=True, order="IIWIWW")
    assert_same(ours, staged(other, inputs, is_split=True), layers, other)


def test_an_embedding_may_be_first():
    torch.manual_seed(1)
    layers = [nn.Embedding(5, 6, padding_idx=0), nn.Linear(6, 6)]
    other = copy.deepcopy(layers)
    inputs = [torch.arange(8).reshape(2, 4).remainder(5 - number) for number in range(NUM_MICROBATCHES)]
    ours = staged(layers, inputs, is_split=True, order="IIWIWW")
    assert ours[1] == [None] * NUM_MICROBATCHES
    assert_same(ours, plain(other, inputs), layers, other)


def test_a_mask_is_passed_on_as_it_is_and_numbers_too():
    torch.manual_seed(1)
    layer = Masked(6)
    stage = Stage(0, [layer], 0, is_split=True)
    hidden = torch.randn(2, 6, requires_grad=True)
    nest = {"hidden": hidden, "mask": torch.tensor([[1], [0]]), "factor": 2}
    output, held = stage.forward(nest, 0, Draws(0, 0), has_backward=True)
    assert list(output) == ["hidden", "mask", "factor"]
    assert (output["mask"].dtype, output["factor"]) == (torch.int64, 3)
    assert torch.equal(output["mask"], nest["mask"])
    ((grad, _),) = stage.input_grad(held, [torch.ones(2, 6)])
    stage.weight_grad(held)
    stage.close()
    ours = layer.linear.weight.grad
    layer.linear.weight.grad = None
    layer(nest)["hidden"].sum().backward()
    assert torch.equal(grad, hidden.grad)
    assert torch.equal(ours, layer.linear.weight.grad)


class Unrelated(nn.Module):
    """Uses one of its two inputs, and gives one of them back as it is, twice."""

    def forward(self, pair):
        return pair[0] * 2, pair[0], pair[0]


def test_an_input_without_influence_has_no_gradient_and_one_that_is_passed_on_has_all_of_its_own():
    stage = Stage(0, [Unrelated()], 0, is_split=True)
    pair = [torch.ones(2, 3, requires_grad=True), torch.ones(2, 1, requires_grad=True)]
    _, held = stage.forward(pair, 0, Draws(0, 0), has_backward=True)
    first, second = stage.input_grad(held, [torch.full((2, 3), number) for number in (1.0, 10.0, 100.0)])
    assert torch.equal(first[0], torch.full((2, 3), 112.0))
    assert second[0] is None
    assert torch.equal(second[1], pair[1])
    assert not second[1].requires_grad


def test_outputs_that_the_loss_does_not_use_leave_their_parameters_without_a_gradient():
    layers = made("two heads")
    stage = Stage(0, layers, 0, is_split=True)
    value = given("two heads", 0).requires_grad_()
    _, held = stage.forward(value, 0, Draws(0, 0), has_backward=True)
    stage.input_grad(held, [torch.ones(2, 4, 6), None])
    stage.weight_grad(held)
    assert layers[1].main.weight.grad is not None
    assert layers[1].other.weight.grad is None
    _, held = stage.forward(value, 1, Draws(0, 0), has_backward=True)
    assert [grad for grad, _ in stage.input_grad(held, [None, None])] == [None]


def test_the_first_layer_of_a_stage_may_change_its_input_in_place():
    torch.manual_seed(1)
    layers = [nn.ReLU(inplace=True), nn.Linear(6, 6)]
    inputs = [given("linear", microbatch) for microbatch in range(NUM_MICROBATCHES)]
    other = [nn.ReLU(), copy.deepcopy(layers[1])]
    assert_same(staged(layers, inputs, is_split=True), plain(other, inputs), layers, other)


def test_the_first_layer_of_the_pipeline_may_not_as_other_ranks_have_the_batch_too():
    stage = Stage(0, [nn.ReLU(inplace=True), nn.Linear(6, 6)], 0, is_split=True)
    with pytest.raises(ScheduleError, match=r"\(ReLU\) changes its input in place.* Use inplace=False"):
        stage.forward(given("linear", 0), 0, Draws(0, 0), has_backward=True)


def test_the_input_is_not_touched_by_a_backward():
    value = given("linear", 0).requires_grad_()
    stage = Stage(0, made("linear"), 0, is_split=True)
    _, held = stage.forward(value, 0, Draws(0, 0), has_backward=True)
    stage.input_grad(held, [torch.ones(2, 4, 6)])
    assert value.grad is None
    assert value.grad_fn is None


def test_without_a_backward_nothing_is_held():
    stage = Stage(0, made("linear"), 0, is_split=True)
    with torch.no_grad():
        output, held = stage.forward(given("linear", 0), 0, Draws(0, 0), has_backward=False)
    assert held is None
    assert not output.requires_grad


def test_what_waits_counts_as_memory_until_it_is_computed_or_forgotten():
    layers = made("linear")
    stage = Stage(0, layers, 0, is_split=True)
    value = given("linear", 0).requires_grad_()
    for number in range(2):
        _, held = stage.forward(value, number, Draws(0, 0), has_backward=True)
        stage.input_grad(held, [torch.ones(2, 4, 6)])
        assert stage.pending_bytes > 0
        if number == 0:
            stage.weight_grad(held)
            assert stage.pending_bytes == 0
    before = layers[0].weight.grad.clone()
    stage.discard()
    assert stage.pending_bytes == 0
    assert torch.equal(layers[0].weight.grad, before)


def test_a_closed_stage_leaves_the_layers_as_they_were():
    layers = made("encoder")
    before = [dict(module.__dict__) for layer in layers for module in layer.modules()]
    stage = Stage(0, layers, 0, is_split=True)
    assert any("forward" in module.__dict__ for layer in layers for module in layer.modules())
    stage.close()
    after = [module.__dict__ for layer in layers for module in layer.modules()]
    assert [set(one) for one in before] == [set(one) for one in after]
    assert not any(one._post_accumulate_grad_hooks for one in nn.ModuleList(layers).parameters())


def test_frozen_weights_get_no_gradient_and_the_input_gets_its_own():
    layers, other = made("linear"), made("linear")
    for linear in (layers[0], other[0]):
        linear.requires_grad_(False)
    inputs = [given("linear", 0)]
    ours, theirs = staged(layers, inputs, is_split=True, order="IW"), plain(other, inputs)
    assert torch.equal(ours[1][0], theirs[1][0])
    assert layers[0].weight.grad is None
    assert torch.equal(layers[2].weight.grad, other[2].weight.grad)


def test_half_precision_is_that_of_plain_autograd():
    layers, other = [one.bfloat16() for one in made("linear")], [one.bfloat16() for one in made("linear")]
    inputs = [given("linear", microbatch).bfloat16() for microbatch in range(NUM_MICROBATCHES)]
    assert_same(staged(layers, inputs, is_split=True, order="IIIWWW"), plain(other, inputs), layers, other)
