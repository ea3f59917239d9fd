"""A model with everything that is hard to share out, trained on one device or layer by layer on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn, optim

from lightning_gpufeed.pipeline.partition import Partition

VOCABULARY, WIDTH = 7, 4
NUM_STEPS = 2


class Embed(nn.Module):
    """Its weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """Its weight is also the embedding's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class Block(nn.Module):
    """A residual block, with a buffer that is not saved and extra state that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.rand(WIDTH).round(), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.num_calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        self.seen = self.seen + len(hidden)  # another tensor each time
        return hidden + F.gelu(self.linear(self.norm(hidden))) * self.mask

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


class Statistics(nn.Module):
    """Running statistics, and a weight whose strides are not the usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) @ self.mix


class Net(nn.Module):
    """Six layers, two of which share a weight; and a linear layer that is in none."""

    def __init__(self) -> None:
        super().__init__()
        embed = Embed()
        self.seq = nn.Sequential(embed, Block(), Statistics(), Block(), Block(), Head(embed.weight))
        self.seq[3].linear.bias.requires_grad_(False)
        self.after = nn.Linear(VOCABULARY, 2)
        self.register_buffer("scale", torch.tensor(0.5))

    def loss(self, output: Tensor) -> Tensor:
        return (self.after(output) * self.scale).square().mean()


STAGES = tuple(range(number, number + 1) for number in range(6))


def make_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def tokens(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (5,), generator=torch.Generator().manual_seed(step))


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Weights and the rest, which is neither the order of the layers nor that of the model."""
    parameters = list(net.parameters())
    return [
        {"params": [one for one in parameters if one.dim() > 1]},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adamw_fused": lambda net: optim.AdamW(net.parameters(), lr=1e-2, fused=True),
    "adamw_foreach": lambda net: optim.AdamW(two_groups(net), lr=1e-2, foreach=True),
    "sgd": lambda net: optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda net: optim.Adafactor(net.parameters(), lr=1e-2),
    "adagrad": lambda net: optim.Adagrad(net.parameters(), lr=1e-2),  # has a state before its first step
}


def train_alone(net: Net, optimizer: optim.Optimizer, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = net.loss(net.seq(tokens(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_shared(
    net: Net, optimizer: optim.Optimizer, partition: Partition, group: Any, steps: Iterable[int]
) -> list[float]:
    """One layer after the other, each on its rank; every rank has the loss."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        value, calls = tokens(step), []
        for stage, rank in zip(partition.stages, partition.stage_to_rank, strict=True):
            given = value.detach().requires_grad_(value.is_floating_point())
            sent = torch.empty(len(value), VOCABULARY if stage.stop == 6 else WIDTH)
            made = net.seq[stage.start](given) if rank == partition.rank else None
            value = send(sent if made is None else made.detach(), rank, group)
            calls.append((given, made, rank))
        value = value.detach().requires_grad_()
        loss = net.loss(value)
        loss.backward()
        grad = value.grad
        for given, made, rank in reversed(calls):
            if made is not None:
                made.backward(grad)
            if given.is_floating_point():
                grad = send(torch.empty_like(given) if made is None else given.grad, rank, group)
        add_shared(partition, group)
        optimizer.step()
        losses.append(loss.item())
    return losses


def send(tensor: Tensor, rank: int, group: Any) -> Tensor:
    distributed.broadcast(tensor, distributed.get_global_rank(group, rank), group=group)
    return tensor


def add_shared(partition: Partition, group: Any) -> None:
    """The gradients of tied weights."""
    for placed in partition.tensors:
        if placed.name in partition.shared:
            tensor = placed.tensor
            total = tensor.grad.clone() if partition.is_own(placed) else torch.zeros(tensor.shape)
            distributed.all_reduce(total, group=group)
            if partition.is_own(placed):
                tensor.grad.copy_(total)
