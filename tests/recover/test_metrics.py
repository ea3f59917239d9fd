"""States of metrics are what they were before a failed attempt, wherever in a metric it broke off."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric, Metric, MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpufeed.recover.metrics import MetricStates, find_metrics
from tests.recover.metric_cases import CASES, Case, classes, copied, differences, make_batch, make_collection, state_of

pytestmark = pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero:UserWarning")


class OutOfMemoryAt(TorchDispatchMode):
    """Runs out of memory at an operation of a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.number:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def call(module: nn.Module, case: Case, seed: int, how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a metric's opinion of few samples
        arguments = case.arguments(make_batch(seed))
        module.update(*arguments) if how == "update" else module(*arguments)


def count_operations(case: Case, num_before: int, how: str) -> int:
    module = case.make()
    for seed in range(num_before):
        call(module, case, seed, how)
    with OutOfMemoryAt(-1) as mode:
        call(module, case, num_before, how)
    return mode.count


@pytest.mark.parametrize("how", ["forward", "update"])
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_metric_is_what_it_was_and_goes_on_like_one_that_never_failed(name, num_before, how):
    """Broken off at seven places of the call, and after it; groups of a collection are formed in the first call."""
    case = CASES[name]
    module, twin = case.make(), case.make()
    for seed in range(num_before):
        call(module, case, seed, how)
        call(twin, case, seed, how)
    states, metrics = MetricStates(), find_metrics(module)
    assert metrics
    states.save(metrics)
    before = state_of(module)
    total = count_operations(case, num_before, how)
    for number in [*range(0, total, max(1, total // 7)), total]:
        broke = False
        try:
            with OutOfMemoryAt(number):
                call(module, case, num_before, how)
        except torch.OutOfMemoryError:
            broke = True
        assert broke == (number < total)
        states.put_back()
        assert differences(before, state_of(module)) == []
    for seed in range(num_before, num_before + 2):
        call(module, case, seed, how)
        call(twin, case, seed, how)
    assert differences(state_of(twin), state_of(module)) == []
    assert differences({"value": copied(twin.compute())}, {"value": copied(module.compute())}) == []


def test_these_failures_would_leave_something_behind():
    """Otherwise the test above could not fail."""
    case = CASES["accuracy"]
    module = case.make()
    call(module, case, 0, "forward")
    before = state_of(module)
    with pytest.raises(torch.OutOfMemoryError), OutOfMemoryAt(count_operations(case, 1, "forward") // 2):
        call(module, case, 1, "forward")
    assert "0 MulticlassAccuracy.tp" in differences(before, state_of(module))


@pytest.mark.parametrize("name", ["accuracy", "AUROC of lists", "correlation", "collection", "own attributes"])
def test_states_are_the_same_tensors_and_lists_again(name):
    case = CASES[name]
    module = case.make()
    call(module, case, 0, "forward")
    parts = [metric for metric in find_metrics(module) if isinstance(metric, Metric)]
    places = [(metric, state, getattr(metric, state)) for metric in parts for state in metric._defaults]
    entries = [list(value) if isinstance(value, list) else [value] for _, _, value in places]
    states = MetricStates()
    states.save(find_metrics(module))
    call(module, case, 1, "forward")
    for metric in parts:
        metric.reset()
    states.put_back()
    for (metric, state, value), held in zip(places, entries, strict=True):
        now = getattr(metric, state)
        assert now is value
        assert all(one is other for one, other in zip(now if isinstance(now, list) else [now], held, strict=True))


@pytest.mark.parametrize("name", ["accuracy", "AUROC of lists", "correlation", "collection", "smallest and largest"])
def test_metrics_are_put_back_in_inference_mode_where_changes_are_not_counted(name):
    """As in validation: the first batches come outside of it (the sanity check), the rest inside."""
    case = CASES[name]
    module, twin = case.make(), case.make()
    states = MetricStates()
    with torch.inference_mode():
        for seed in range(3):
            states.save(find_metrics(module))
            before = state_of(module)
            call(module, case, seed, "update")
            states.put_back()
            assert differences(before, state_of(module)) == []
            call(module, case, seed, "update")
            call(twin, case, seed, "update")
    assert differences(state_of(twin), state_of(module)) == []


def test_states_made_in_inference_mode_do_not_disturb_outside_of_it():
    metric = MeanMetric()
    with torch.inference_mode():
        metric.update(1.0)
        metric.mean_value = torch.zeros(())
    states = MetricStates()
    states.save([metric])
    states.put_back()
    assert metric.mean_value == 0


def test_only_the_metrics_asked_for_are_put_back():
    one, other = MeanMetric(), MeanMetric()
    states = MetricStates()
    states.save([one, other])
    one.update(1.0)
    other.update(1.0)
    states.put_back([one])
    assert (one._update_count, other._update_count) == (0, 1)


class InPlace(Metric):
    """Adds to the tensor it has."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(2), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.total += logits.sum()

    def compute(self) -> torch.Tensor:
        return self.total


def test_a_state_that_did_not_change_is_not_copied_again():
    """A confusion matrix of a thousand classes has 8 MB; metrics of another stage are not called for a whole epoch."""
    metric = InPlace()
    states = MetricStates()
    with OutOfMemoryAt(-1) as first:
        states.save([metric])
    with OutOfMemoryAt(-1) as second:
        states.save([metric])
    assert (first.count > 0, second.count) == (True, 0)
    metric.update(*classes(make_batch(0)))
    before = state_of(metric)
    states.save([metric])
    metric.update(*classes(make_batch(1)))
    states.put_back()
    assert differences(before, state_of(metric)) == []


@pytest.mark.parametrize("num_before", [0, 1])
def test_metrics_of_a_collection_share_a_state_again_only_if_they_did(num_before):
    collection = make_collection()
    for seed in range(num_before):
        collection.update(*classes(make_batch(seed)))
    one, other = collection._modules["MulticlassF1Score"], collection._modules["MulticlassPrecision"]
    assert (one.tp is other.tp) == (num_before > 0)
    states = MetricStates()
    states.save(find_metrics(collection))
    collection.update(*classes(make_batch(7)))
    states.put_back()
    assert (one.tp is other.tp) == (num_before > 0)
    assert collection._groups_checked == (num_before > 0)


# Finding them --------------------------------------------------------------------------------------------------


def test_metrics_are_found_in_modules_lists_wrappers_and_collections_each_once():
    module = nn.Module()
    module.mean, module.same = (mean := MeanMetric()), mean
    module.many = nn.ModuleList([MinMaxMetric(MulticlassAccuracy(4))])
    module.collection = make_collection()
    found = [type(metric).__name__ for metric in find_metrics(module)]
    assert sorted(found) == [
        "MeanMetric",
        "MetricCollection",
        "MinMaxMetric",
        "MulticlassAccuracy",
        "MulticlassConfusionMatrix",
        "MulticlassF1Score",
        "MulticlassPrecision",
    ]


def test_metrics_outside_of_the_module_are_found_with_those_inside_of_them():
    module = nn.Module()
    module.mean = MeanMetric()
    wrapper = MinMaxMetric(MulticlassAccuracy(4))
    found = find_metrics(module, [wrapper, module.mean, wrapper])
    # == of metrics makes a new metric
    assert list(map(id, found)) == list(map(id, [module.mean, wrapper, wrapper._base_metric]))


def test_a_module_without_metrics_has_none():
    assert find_metrics(nn.Linear(1, 1)) == []
    assert isinstance(find_metrics(make_collection())[0], MetricCollection)
