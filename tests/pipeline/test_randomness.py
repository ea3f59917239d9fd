"""Random numbers in layers: fixed by what is computed, not by where; and of no effect outside."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lightning_gpufeed.pipeline.randomness import Draws, may_draw, put_back

CPU = torch.device("cpu")


def drawn(draws, layer_index, microbatch):
    """What a layer would draw."""
    draws.begin(layer_index, microbatch)
    return tuple(torch.rand(4).tolist())


def test_each_layer_microbatch_step_replica_and_seed_draws_something_else():
    found = set()
    for seed, replica, step, layer, microbatch in itertools.product(range(2), repeat=5):
        torch.manual_seed(seed)
        found.add(drawn(Draws(replica, step), layer, microbatch))
    assert len(found) == 32


def test_a_layer_draws_the_same_whatever_was_drawn_before():
    torch.manual_seed(3)
    first = drawn(Draws(0, 5), 2, 1)
    torch.manual_seed(3)
    torch.rand(17)
    draws = Draws(0, 5)
    drawn(draws, 0, 0)
    assert drawn(draws, 2, 1) == first


def test_generators_are_as_they_were_afterwards_the_seed_too():
    torch.manual_seed(3)
    torch.rand(5)
    state = torch.get_rng_state()
    draws = Draws(0, 0)
    with put_back(CPU):
        draws.begin(1, 1)
        torch.rand(5)
        with put_back(CPU):
            torch.manual_seed(9)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.initial_seed() == 3


def test_generators_are_put_back_after_an_error():
    state = torch.get_rng_state()

    def fail():
        with put_back(CPU):
            torch.manual_seed(9)
            raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"):
        fail()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), False),
        (nn.Dropout(), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout())), True),
        (nn.RReLU(), True),
        (nn.TransformerEncoderLayer(4, 2, 4), True),
        (type("Own", (nn.Linear,), {})(2, 2), True),
    ],
    ids=["linear", "nest without", "dropout", "nest with", "rrelu", "encoder", "subclass"],
)
def test_only_layers_that_never_draw_are_known_not_to(layer, expected):
    assert may_draw(layer) == expected


def test_a_layer_whose_hook_may_draw_may_draw():
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda _module, _inputs, output: output + torch.randn_like(output))
    assert may_draw(layer)
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + torch.randn_like(inputs[0]),))
    assert may_draw(layer)
