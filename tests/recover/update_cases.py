"""Optimizers of all kinds, and the means to let them run out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lightning_gpufeed.device import headroom
from lightning_gpufeed.recover.attempt import forget
from lightning_gpufeed.recover.classify import Kind, classify
from lightning_gpufeed.recover.update import GuardedStep

CPU = torch.device("cpu")
TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4194304 bytes. Error code 12 (Cannot allocate memory)"
)
SHAPES = [(5, 3), (4, 4), (2, 6)]

# Every class, with its options one by one and together. Groups differ in rate and decay.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {}),
    "Adam amsgrad maximize": ("Adam", {"amsgrad": True, "maximize": True}),
    "Adam tensor rate": ("Adam", {"lr": torch.tensor(0.03)}),
    "Adam fused": ("Adam", {"fused": True}),
    "Adam foreach": ("Adam", {"foreach": True}),
    "AdamW": ("AdamW", {}),
    "AdamW foreach": ("AdamW", {"foreach": True, "amsgrad": True}),
    "AdamW fused": ("AdamW", {"fused": True}),
    "SGD": ("SGD", {}),
    "SGD momentum": ("SGD", {"momentum": 0.9, "dampening": 0.1}),
    "SGD nesterov maximize": ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "SGD nesterov foreach": ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True, "weight_decay": 0}),
    "SGD fused": ("SGD", {"momentum": 0.9, "fused": True}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop centered": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "RMSprop foreach": ("RMSprop", {"centered": True, "momentum": 0.9, "foreach": True}),
    "Adagrad": ("Adagrad", {"lr_decay": 0.1}),
    "Adagrad fused": ("Adagrad", {"fused": True}),
    "Adadelta": ("Adadelta", {}),
    "Adadelta foreach": ("Adadelta", {"foreach": True}),
    "Adamax": ("Adamax", {}),
    "NAdam": ("NAdam", {"decoupled_weight_decay": True}),
    "RAdam": ("RAdam", {}),
    "RAdam foreach": ("RAdam", {"foreach": True}),
    "ASGD": ("ASGD", {"t0": 2}),
    "ASGD foreach": ("ASGD", {"foreach": True}),
    "Rprop": ("Rprop", {}),
    "SparseAdam": ("SparseAdam", {}),
    "Adafactor": ("Adafactor", {}),
    "Adafactor foreach": ("Adafactor", {"foreach": True}),
    "Muon": ("Muon", {"ns_steps": 1}),
}


def is_out_of_memory(error: BaseException) -> bool:
    return classify(error, "cpu").kind in (Kind.DEVICE, Kind.HOST)


class Training:
    """Some weights, an optimizer with two groups, and gradients that depend on the step alone."""

    def __init__(self, name: str, subclass: Callable[[type], type] = lambda base: base) -> None:
        class_name, options = CASES[name]
        generator = torch.Generator().manual_seed(7)
        self.weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.unused = torch.nn.Parameter(torch.ones(2, 2))
        self.is_sparse = class_name == "SparseAdam"
        self.num_steps = 0
        lr = options.get("lr", 0.03)
        first: dict[str, Any] = {"params": [*self.weights[:2], self.unused], "lr": lr}
        second: dict[str, Any] = {"params": self.weights[2:], "lr": lr * 2}
        if class_name not in ("SparseAdam", "Rprop"):
            first["weight_decay"], second["weight_decay"] = options.get("weight_decay", 0.1), 0.0
        options = {key: value for key, value in options.items() if key not in ("lr", "weight_decay")}
        self.optimizer = subclass(getattr(torch.optim, class_name))([first, second], **options)

    def set_gradients(self) -> None:
        generator = torch.Generator().manual_seed(100 + self.num_steps)
        for weight in self.weights:
            grad = torch.randn(weight.shape, generator=generator)
            weight.grad = grad.to_sparse(1) if self.is_sparse else grad
        self.num_steps += 1

    def step(self) -> None:
        self.set_gradients()
        self.optimizer.step()

    def state(self) -> tuple[Any, ...]:
        """Weights, state and options: everything a checkpoint has."""
        weights = [weight.detach() for weight in self.weights]
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, (weights, self.optimizer.state_dict()))


def guard(training: Training, **kwargs: Any) -> GuardedStep:
    return GuardedStep(training.optimizer, CPU, is_out_of_memory=is_out_of_memory, forget=forget, **kwargs)


def same(first: Any, second: Any) -> bool:
    """Equal to the last bit, in types and in the order of keys as well."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bool(torch.equal(first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def in_loop_mode(state: Any) -> Any:
    """The same state, of an optimizer made with foreach=False: the option itself is no difference."""
    weights, state_dict = state
    groups = [{key: group[key] for key in group if key != "foreach"} for group in state_dict["param_groups"]]
    return weights, {**state_dict, "param_groups": groups}


@contextmanager
def no_room() -> Iterator[None]:
    """Nothing of any size can be allocated, so says the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headroom, "can_allocate", lambda device, num_bytes: num_bytes == 0)
        # Collecting cycles takes a while in a large process; under a real ceiling it is done below.
        patch.setattr(headroom, "release", lambda device: None)
        yield


@contextmanager
def plenty_of_room() -> Iterator[None]:
    """Everything can be allocated, so says the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headroom, "can_allocate", lambda device, num_bytes: True)
        patch.setattr(headroom, "release", lambda device: None)
        yield


class OutOfMemoryAt(TorchFunctionMode):
    """Runs out of memory at a call of torch of a number, before it does anything.

    Args:
        number: Which; 0 is the first.
        lasts: From there on at every call that makes new tensors; else just once.
    """

    def __init__(self, number: int, lasts: bool = False) -> None:
        super().__init__()
        self.number, self.lasts, self.count = number, lasts, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        is_in_place = name.endswith("_") and not name.endswith("__")
        if name not in NEEDS_NOTHING and not (self.lasts and (name in VIEWS or is_in_place)):
            self.count += 1
            if self.count - 1 == self.number or (self.lasts and self.count > self.number):
                raise RuntimeError(TEXT)
        return function(*args, **(kwargs or {}))


NEEDS_NOTHING = frozenset(
    {
        *(
            "__get__",
            "__set__",
            "__len__",
            "__hash__",
            "device",
            "stride",
            "size",
            "dim",
            "numel",
            "is_complex",
            "is_floating_point",
        ),
        *("item", "numpy", "_set_grad_enabled", "_record_function_enter_new", "_record_function_exit._RecordFunction"),
    }
)
VIEWS = frozenset({"detach", "as_strided", "view", "unbind", "split", "as_subclass", "view_as_real", "__getitem__"})
