from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpufeed.sync.outside import outside


class Doubling(torch.overrides.TorchFunctionMode):
    """Makes every sum and product another one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.mul, torch.Tensor.mul_, torch.zeros_like) else result


class Seen(TorchDispatchMode):
    """Notes the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("meta"),
    "a function mode": Doubling,
    "saved tensors hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x + 1, lambda x: x),
    "a fake mode": FakeTensorMode,
    "no surroundings": nullcontext,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("kind", [optim.Adam, optim.ASGD, optim.NAdam], ids=lambda kind: kind.__name__)
def test_where_a_step_is_taken_does_not_matter(kind, name):
    parameters = [nn.Parameter(torch.linspace(-1.0, 1.0, 6).view(2, 3)) for _ in range(2)]
    whole, inner = (kind([parameter]) for parameter in parameters)
    for number in range(2):
        for parameter in parameters:
            parameter.grad = torch.full((2, 3), number - 0.5)
        whole.step()
        with SURROUNDINGS[name](), outside():
            inner.step()
    assert torch.equal(parameters[1], parameters[0])
    states = [optimizer.state_dict()["state"][0] for optimizer in (whole, inner)]
    assert states[1].keys() == states[0].keys()
    for value, expected in zip(states[1].values(), states[0].values(), strict=True):
        if not isinstance(expected, torch.Tensor):
            assert value == expected
            continue
        assert type(value) is torch.Tensor
        assert not value.is_inference()
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


def test_nothing_inside_is_seen_by_a_mode_that_watches():
    x = torch.ones(2)
    with Seen() as seen:
        with outside():
            x.add_(1.0)
        x.mul_(1.0)
    assert seen.names == ["aten.mul_.Tensor"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of torch's own, in jvp
def test_a_tensor_can_be_changed_inside_of_a_function_transform():
    x = torch.ones(2)

    def total(y: torch.Tensor) -> torch.Tensor:
        with outside():
            x.add_(1.0)
        return (x * y).sum()

    assert torch.func.grad(total)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert torch.func.vmap(total)(torch.ones(3, 2)).tolist() == [6.0, 6.0, 6.0]
    assert torch.func.jvp(total, (torch.ones(2),), (torch.ones(2),))[1].item() == 8.0


def state_of_torch() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._is_torch_function_enabled(),
        torch.get_default_dtype(),
        torch.empty(0).device,
    )


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_everything_is_as_before_when_it_is_left_by_an_error_too(name):
    with SURROUNDINGS[name]():
        before = state_of_torch()
        with outside():
            assert not torch.is_grad_enabled()
        assert state_of_torch() == before
        with pytest.raises(LookupError), outside():
            raise LookupError
        assert state_of_torch() == before
