"""Everything a failed attempt may have changed comes back together; a module can be asked to keep still for a look."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricTracker, MinMaxMetric
from torchmetrics.classification import BinaryAccuracy

from lightning_gpufeed.recover.states import ModuleStates, without_randomness

CPU = torch.device("cpu")


class Busy(nn.Module):
    """Changes a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.mean = nn.BatchNorm1d(3), nn.Dropout(), MeanMetric()
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> float:
        self.counter += 1
        value = self.drop(self.norm(x)).square().mean() + random.random() + np.random.rand()
        self.mean.update(value)
        return value.item()


def test_an_attempt_that_is_put_back_can_be_repeated_with_the_same_outcome():
    module, x = Busy(), torch.randn(4, 3)
    states = ModuleStates(module, CPU)
    for _ in range(2):
        states.save()
        state = {name: value.clone() for name, value in module.state_dict().items()}
        outcome = module(x)
        for _ in range(2):
            states.put_back()
            assert module.mean._update_count == module.counter == state["counter"]
            assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
            assert module(x) == outcome


def test_parts_that_were_added_are_known_after_another_look():
    module = Busy()
    states = ModuleStates(module, CPU)
    module.more = Busy()
    module.register_buffer("late", torch.zeros(2))
    states.refresh()
    states.save()
    module.more(torch.randn(4, 3))
    module.late.add_(1)
    states.put_back()
    assert module.more.counter == module.more.mean._update_count == 0
    assert not module.late.any()
    assert len(states.parameters) == 4


class Lazy(nn.Module):
    """Registers a buffer in its first step, and has a tracker whose epoch begins in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(BinaryAccuracy())

    def forward(self) -> None:
        if not hasattr(self, "queue"):
            self.register_buffer("queue", torch.zeros(2))
            self.tracker.increment()
        self.queue += 1
        self.tracker.update(torch.ones(2), torch.ones(2))


def test_what_the_first_batch_has_added_is_put_back_in_the_second_after_another_look():
    module = Lazy()
    states = ModuleStates(module, CPU)
    states.save()
    module()
    states.refresh()
    states.save()
    module()
    states.put_back()
    assert module.queue.tolist() == [1.0, 1.0]
    assert module.tracker[-1]._update_count == 1


def test_metrics_outside_of_the_module_are_taken_in_whenever_they_are_others():
    module = nn.Linear(1, 1)
    states = ModuleStates(module, CPU)
    one, other = MeanMetric(), MinMaxMetric(BinaryAccuracy())
    inner = other._base_metric
    for metrics, expected in (([one], [one]), ([other], [other, inner]), ([one, other], [one, other, inner]), ([], [])):
        states.include_metrics(metrics)
        assert list(map(id, states.metrics)) == list(map(id, expected))  # == of metrics makes a new metric
    states.include_metrics([other])
    states.save()
    other.update(torch.ones(2), torch.ones(2))
    states.put_back()
    assert inner._update_count == 0
    states.refresh()
    assert list(map(id, states.metrics)) == [id(other), id(inner)]


# Without randomness ------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Layers that differ between training and evaluation, some of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = nn.ModuleList([nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()])
        self.norms = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm3d(2)])
        self.others = nn.ModuleList([nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), nn.LSTM(1, 1), nn.RReLU()])
        self.frozen = nn.ModuleList([nn.BatchNorm1d(2), nn.Dropout()]).eval()


def training_of(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def test_dropout_and_batch_normalisation_are_as_in_evaluation_and_the_rest_as_it_was():
    module = Mixed()
    before = training_of(module)
    with without_randomness(module):
        assert not any(part.training for part in [*module.drops, *module.norms, *module.frozen])
        assert all(part.training for part in [module, *module.others])
    assert training_of(module) == before


def test_the_whole_module_can_be_as_in_evaluation():
    module = Mixed()
    before = training_of(module)
    with without_randomness(module, is_all=True):
        assert not any(training_of(module))
    assert training_of(module) == before


@pytest.mark.parametrize("is_all", [False, True])
def test_an_error_leaves_the_module_as_it_was(is_all):
    module = Mixed()
    before = training_of(module)
    with pytest.raises(RuntimeError, match="in between"), without_randomness(module, is_all=is_all):
        raise RuntimeError("in between")
    assert training_of(module) == before


def test_a_module_in_evaluation_stays_there():
    module = Mixed().eval()
    with without_randomness(module, is_all=True):
        pass
    assert not any(training_of(module))
