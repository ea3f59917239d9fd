"""What a stage takes beside its layers, with real stages."""

from __future__ import annotations

import time

import torch
from torch import nn

from lightning_gpufeed.pipeline.measure import measure_layers
from lightning_gpufeed.pipeline.overhead import stage_overhead_seconds


class Sleeping(nn.Module):
    """As long as a layer that is not measured by its arithmetic."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return value * 1.0


def test_it_is_small_beside_layers_that_take_long():
    layers = [Sleeping() for _ in range(3)]
    measured = measure_layers(layers, torch.ones(2, requires_grad=True), num_repeats=2)
    assert 0.0 <= stage_overhead_seconds(layers, torch.ones(2, requires_grad=True), measured) < 0.02


def test_nothing_is_left_behind():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()) for _ in range(2)]
    before = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in layers]
    x, state = torch.randn(3, 4), torch.get_rng_state()
    measured = measure_layers(layers, x)
    assert stage_overhead_seconds(layers, x, measured) >= 0.0
    assert torch.equal(torch.get_rng_state(), state)
    for layer, values in zip(layers, before, strict=True):
        assert all(torch.equal(value, values[name]) for name, value in layer.state_dict().items())
        assert all(parameter.grad is None for parameter in layer.parameters())
        assert "forward" not in vars(layer[0])
