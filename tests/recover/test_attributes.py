"""Counters, lists and generators of a module are what they were, and nothing else is touched."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gpufeed.recover.attributes import AttributeStates


class Counting(nn.Module):
    """Keeps everything that modules keep."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self._hidden, self.name, self.shape = 0, 1.5, "a", (2, 3)
        self.outputs: list[Any] = []
        self.nested: dict[str, Any] = {"preds": [], "seen": set()}
        self.per_class: Counter[str] = Counter()
        self.lists: defaultdict[str, list[int]] = defaultdict(list)
        self.window: deque[int] = deque(range(3000), maxlen=3000)
        self.confusion, self.center = np.zeros((3, 3)), torch.zeros(4)
        self.generator = torch.Generator().manual_seed(1)
        self.rng, self.old_rng, self.plain = np.random.default_rng(1), np.random.RandomState(1), random.Random(1)
        self.inner = Inner()

    def step(self) -> None:
        self.total += 8
        self._hidden *= 2
        self.name, self.shape = "b", (4,)
        self.outputs.append(torch.ones(2))
        self.nested["preds"].append(1)
        self.nested["seen"].add(2)
        self.per_class["cat"] += 1
        self.lists["dog"].append(3)
        self.window.append(7)
        self.confusion += 1
        self.center.add_(1)
        self.inner.count += 1
        self.drawn()

    def drawn(self) -> list[float]:
        numbers = [float(torch.rand(1, generator=self.generator)), self.rng.random(), self.old_rng.rand()]
        return [*numbers, self.plain.random()]

    def seen(self) -> Any:
        plain = [self.total, self._hidden, self.name, self.shape, self.inner.count, len(self.outputs)]
        held = [str(self.nested), dict(self.per_class), dict(self.lists), list(self.window)]
        return [*plain, *held, self.confusion.tolist(), self.center.tolist()]


class Inner(nn.Module):
    """A part with a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0


@pytest.mark.parametrize("num_batches", [0, 1, 4])
def test_what_a_step_has_counted_and_drawn_is_undone(num_batches):
    module = Counting()
    states = AttributeStates(module)
    for _ in range(num_batches):
        states.save()
        module.step()
    states.save()
    outputs, window = module.outputs, module.window
    before = module.seen()
    module.step()
    assert module.seen() != before
    states.put_back()
    assert module.seen() == before
    assert module.outputs is outputs
    assert module.window is window
    twin = Counting()
    for _ in range(num_batches):
        twin.step()
    assert module.drawn() == twin.drawn()


def test_attributes_born_in_the_failed_attempt_are_gone():
    module = Counting()
    states = AttributeStates(module)
    states.save()
    module.late = torch.ones(3, requires_grad=True) * 2
    states.put_back()
    assert not hasattr(module, "late")


def test_an_activation_of_the_last_batch_is_not_held():
    module = Counting()
    module.center = torch.ones(3, requires_grad=True) * 2
    states = AttributeStates(module)
    states.save()
    assert all(note.value is None for _, name, note in states._notes if name == "center")


@pytest.mark.parametrize(
    "share", [lambda module: module.layer.weight.detach(), lambda module: module.batch], ids=["weight", "batch"]
)
def test_what_shares_memory_with_a_weight_or_a_batch_is_not_written_to(share):
    module = Counting()
    module.layer, module.batch = nn.Linear(2, 2), torch.zeros(3)
    module.view = share(module)
    states = AttributeStates(module)
    states.save()
    versions = module.layer.weight._version, module.batch._version
    states.put_back()
    assert (module.layer.weight._version, module.batch._version) == versions


def test_tensors_that_cannot_be_written_to_are_left_alone():
    module = Counting()
    module.mask, module.sparse = torch.ones(1).expand(6), torch.eye(3).to_sparse()
    states = AttributeStates(module)
    states.save()
    states.put_back()
    assert module.mask.tolist() == [1] * 6


def test_objects_of_other_classes_and_classes_of_ones_own_are_left_alone():
    class Own(list[int]):
        """Whatever it is tied to."""

    module = Counting()
    module.own, module.meter = Own(), type("Meter", (), {"total": 0})()
    states = AttributeStates(module)
    states.save()
    module.own.append(1)
    module.meter.total += 1
    states.put_back()
    assert (list(module.own), module.meter.total) == ([1], 1)
