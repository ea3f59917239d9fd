"""A stage, random numbers, times and measurements on a CUDA device; several ranks need several devices.

Each has a twin that runs everywhere: tests/pipeline.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_gpufeed.pipeline.measure import measure_layers
from lightning_gpufeed.pipeline.nested import TensorSpec, in_memory
from lightning_gpufeed.pipeline.randomness import Draws, put_back
from lightning_gpufeed.pipeline.spans import Spans
from lightning_gpufeed.pipeline.stage import Stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]

DEVICE = torch.device("cuda", 0)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 10)
    ).to(DEVICE)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_split_stage_gives_the_bits_of_plain_autograd(is_checkpointed):
    plain, split = layers(), layers()
    x = torch.randn(4, 3, 8, 8, device=DEVICE, requires_grad=True)
    stage = Stage(1, list(split), 0, is_split=True, is_checkpointed=is_checkpointed, device=DEVICE)
    draws = Draws(0, 0, DEVICE)
    output, held = stage.forward(x, 0, draws, has_backward=True)
    grad = torch.randn_like(output)
    found = stage.input_grad(held, [grad])
    assert split[4].weight.grad is None
    stage.weight_grad(held)

    value = x.detach().clone().requires_grad_()
    hidden = value
    for place, layer in enumerate(plain):
        if isinstance(layer, nn.Dropout):
            draws.begin(place, 0)
        hidden = layer(hidden)
    hidden.backward(grad)
    assert torch.equal(output, hidden)
    assert torch.equal(found[0][0], value.grad)
    for one, other in zip(split.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    stage.close()


def test_random_numbers_of_the_device_begin_where_they_are_told_and_are_put_back():
    before = torch.cuda.get_rng_state(DEVICE)
    drawn = []
    with put_back(DEVICE):
        for _ in range(2):
            Draws(0, 3, DEVICE).begin(1, 2)
            drawn.append(torch.rand(5, device=DEVICE))
    assert torch.equal(*drawn)
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)


def test_spans_are_those_of_the_device_and_not_of_the_host():
    spans = Spans(DEVICE)
    spans.is_on = True
    with spans.measure("busy"):
        torch.cuda._sleep(50_000_000)
    seconds = spans.take()["busy"]
    assert 0.005 < seconds < 5.0


def test_layers_are_measured_where_they_are():
    measured = measure_layers(list(layers()), torch.randn(4, 3, 8, 8, device=DEVICE))
    assert all(cost.forward_seconds > 0 for cost in measured.costs)
    assert measured.costs[0].weight_grad_seconds > 0


def test_images_with_channels_last_keep_their_order_in_memory():
    images = torch.randn(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last)
    spec = TensorSpec.of(images)
    received = spec.empty(DEVICE)
    in_memory(received).copy_(in_memory(images))
    assert received.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(received, images)
