"""A model beside its copy whose weight gradients wait: what both compute has to be bitwise equal."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpufeed.backprop.order import BackwardOrder
from lightning_gpufeed.backprop.split import WeightGradSplitter, splittable_layers


def differing(plain: nn.Module, split: nn.Module) -> list[str]:
    """Name the parameters whose gradients differ in a bit, in their dtype, or in being there."""
    theirs = dict(split.named_parameters())
    return [name for name, own in plain.named_parameters() if not is_same(own.grad, theirs[name].grad)]


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def all_last(model: nn.Module) -> BackwardOrder:
    """Every layer that can waits until the end, in the order of forward."""
    return BackwardOrder(last=splittable_layers(model)[0])


class Pair:
    """The same model twice: autograd's own, and one that is split."""

    def __init__(self, model: nn.Module, order: BackwardOrder | None = None, **options: Any) -> None:
        self.plain, self.split = model, copy.deepcopy(model)
        self.splitter = WeightGradSplitter(self.split, order or all_last(self.split), **options)

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.plain, self.split

    def step(
        self,
        x: Tensor,
        *,
        requires_grad: bool = False,
        context: Callable[[], Any] = contextlib.nullcontext,
        finish: bool = True,
    ) -> None:
        """Forward and backward of both; outputs and the gradient of the input are equal."""
        seen = []
        for model in self.both:
            # Same values in the same layout; clone() would not keep strides of dimensions of size one.
            own = x.detach().clone() if not requires_grad else x.detach().clone().requires_grad_()
            torch.manual_seed(7)
            with context():
                output = model(own)
            grad_output = torch.randn(output.shape).to(output.dtype)
            output.backward(grad_output)
            seen.append((output.detach(), own.grad))
        if finish:
            self.splitter.finish()
        assert torch.equal(seen[0][0], seen[1][0])
        assert is_same(seen[0][1], seen[1][1])

    def assert_same_grads(self) -> None:
        assert differing(self.plain, self.split) == []


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between; layers have the names 0, 2, 4, ..."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Repeated(nn.Module):
    """One layer, several times."""

    def __init__(self, num_uses: int = 3, size: int = 8) -> None:
        super().__init__()
        self.layer, self.num_uses = nn.Linear(size, size), num_uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_uses):
            x = self.layer(x).relu()
        return x
