from __future__ import annotations

import torch
from torch import nn

from lightning_gpufeed.sync.layers import find_layers
from lightning_gpufeed.sync.usage import Usage


class Watched:
    """A model of which one step is watched, as a session does."""

    def __init__(self, *modules: nn.Module) -> None:
        self.model = nn.Sequential(*modules)
        self.layers = find_layers(self.model, ())
        self.usage = Usage(self.layers)
        self.handles = [
            one.register_post_accumulate_grad_hook(self.usage.accumulated) for one in self.model.parameters()
        ]

    def backward(self, loss: torch.Tensor, is_told: bool = True) -> None:
        self.usage.is_in_backward = True
        if is_told:
            self.usage.look_at(loss)
        loss.backward()
        self.usage.is_in_backward = False

    def certain(self) -> list[bool]:
        return [self.usage.is_certain(layer) for layer in self.layers]

    def reused(self) -> list[bool]:
        return [self.usage.is_reused(layer) for layer in self.layers]


X = torch.ones(2, 2)


def test_a_layer_that_is_used_once_is_certain_and_not_reused():
    watched = Watched(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    watched.backward(watched.model(X).sum())
    assert watched.certain() == [True, True]
    assert watched.reused() == [False, False]


def test_a_layer_without_a_gradient_is_not_certain():
    watched = Watched(nn.Linear(2, 2), nn.Linear(2, 2))
    watched.backward(watched.model[1](X).sum())
    assert watched.certain() == [False, True]


def test_a_layer_that_is_used_twice_is_reused_and_certain():
    watched = Watched(nn.Linear(2, 2), nn.Linear(2, 2))
    watched.backward(watched.model[1](watched.model[0](watched.model[0](X))).sum())
    assert watched.reused() == [True, False]
    assert watched.certain() == [True, True]


def test_a_layer_in_two_backwards_is_not_certain():
    watched = Watched(nn.Linear(2, 2))
    for _ in range(2):
        watched.backward(watched.model(X).sum())
    assert watched.certain() == [False]


def test_a_gradient_that_was_asked_for_by_itself_makes_a_layer_reused():
    watched = Watched(nn.Linear(2, 2), nn.Linear(2, 2))
    loss = watched.model(X).sum()
    torch.autograd.grad(loss, watched.model[1].weight, retain_graph=True)
    watched.backward(loss)
    assert watched.reused() == [False, True]
    assert watched.certain() == [True, True]


def test_a_weight_that_autocast_has_copied_once_for_two_uses_is_reused():
    watched = Watched(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        loss = watched.model[1](watched.model[0](watched.model[0](X))).float().sum()
    watched.backward(loss)
    assert watched.reused() == [True, False]


def test_parameters_that_belong_to_nobody_are_left_out():
    watched = Watched(nn.Linear(2, 2))
    other = nn.Parameter(torch.ones(2))
    watched.backward((watched.model(X) * other * other).sum())
    assert watched.reused() == [False]


def test_nothing_is_left_on_the_parameters():
    watched = Watched(nn.Linear(2, 2))
    watched.usage.close()
    watched.usage.close()
    assert not any(one._backward_hooks for one in watched.model.parameters())
