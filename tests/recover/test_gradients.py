"""Gradients of earlier batches of an accumulation window outlive an attempt that broke off."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_gpufeed.device.host_copy import HostCopies
from lightning_gpufeed.recover.gradients import GradientStates


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def add_gradients(net: nn.Module, seed: int, *, breaks_after: int | None = None) -> None:
    """A backward pass; it can break off after so many gradients."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    count = 0

    def note(_: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count == breaks_after:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in net.parameters()]
    try:
        net(x).square().sum().backward()
    finally:
        for handle in handles:
            handle.remove()


def gradients_of(net: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def same(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("breaks_after", [1, 2, 3, 4])
def test_a_sum_of_gradients_is_what_it_was_wherever_backward_broke_off(breaks_after):
    net = make_net()
    add_gradients(net, 0)
    before, places = gradients_of(net), [parameter.grad for parameter in net.parameters()]
    states = GradientStates(list(net.parameters()))
    for _ in range(2):
        states.before_change()
        with pytest.raises(torch.OutOfMemoryError):
            add_gradients(net, 1, breaks_after=breaks_after)
        assert not same(gradients_of(net), before)
        states.put_back()
        assert same(gradients_of(net), before)
        assert all(p.grad is place for p, place in zip(net.parameters(), places, strict=True))


@pytest.mark.parametrize("breaks_after", [1, 3])
def test_where_there_were_none_there_are_none_again(breaks_after):
    net = make_net()
    states = GradientStates(list(net.parameters()))
    states.before_change()
    with pytest.raises(torch.OutOfMemoryError):
        add_gradients(net, 1, breaks_after=breaks_after)
    states.put_back()
    assert gradients_of(net) == [None] * 4


def test_some_that_have_none_yet_are_let_go_of_and_the_others_put_back():
    net = make_net()
    net[0].weight.grad = torch.ones(4, 3)
    states = GradientStates(list(net.parameters()))
    states.before_change()
    add_gradients(net, 1)
    states.put_back()
    assert same(gradients_of(net), [torch.ones(4, 3), None, None, None])


def test_gradients_that_were_set_to_none_or_replaced_meanwhile_are_there_again():
    net = make_net()
    add_gradients(net, 0)
    before, places = gradients_of(net), [parameter.grad for parameter in net.parameters()]
    states = GradientStates(list(net.parameters()))
    states.before_change()
    net.zero_grad()
    add_gradients(net, 1)
    net[0].weight.grad = torch.zeros(4, 3)
    states.put_back()
    assert same(gradients_of(net), before)
    assert all(p.grad is place for p, place in zip(net.parameters(), places, strict=True))


def test_gradients_that_were_zeroed_in_place_are_there_again():
    net = make_net()
    add_gradients(net, 0)
    before = gradients_of(net)
    states = GradientStates(list(net.parameters()))
    states.before_change()
    net.zero_grad(set_to_none=False)
    states.put_back()
    assert same(gradients_of(net), before)


def test_sparse_gradients_come_back():
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1, 4])).sum().backward()
    before = table.weight.grad.to_dense().clone()
    states = GradientStates(list(table.parameters()))
    for _ in range(2):
        states.before_change()
        table(torch.tensor([4, 5])).sum().backward()
        assert not torch.equal(table.weight.grad.to_dense(), before)
        states.put_back()
        assert torch.equal(table.weight.grad.to_dense(), before)


def test_a_first_batch_of_a_window_copies_nothing():
    """There is nothing to copy, so training without accumulation pays nothing."""
    assert GradientStates(list(make_net().parameters()))._copies is None


def test_frozen_parameters_have_none_and_stay_so():
    net = make_net()
    net[0].requires_grad_(False)
    states = GradientStates(list(net.parameters()))
    states.before_change()
    net(torch.ones(1, 3)).sum().backward()
    states.put_back()
    assert gradients_of(net) == [None] * 4


def test_host_memory_of_the_last_batch_can_be_used_again():
    net, copies = make_net(), HostCopies()
    for seed in range(4):
        before = gradients_of(net)
        states = GradientStates(list(net.parameters()), copies)
        states.before_change()
        add_gradients(net, seed)
        states.put_back()
        assert same(gradients_of(net), before)
        add_gradients(net, seed)  # the attempt that works
        if seed == 1:
            net[2].bias.grad = None  # the next batch has fewer of them
