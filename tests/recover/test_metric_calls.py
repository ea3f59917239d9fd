"""A batch in microbatches counts in metrics as the whole batch would have."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpufeed.recover.logged import find_rules
from lightning_gpufeed.recover.metric_calls import MetricCalls
from lightning_gpufeed.recover.metrics import MetricStates, find_metrics
from tests.recover.metric_cases import (
    CASES,
    NUMBERS,
    Case,
    classes,
    copied,
    differences,
    make_batch,
    make_collection,
    part,
    state_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero:UserWarning"),
    pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*not enough samples.*:UserWarning"),
]

SPLITS = [[6, 6], [5, 4, 3], [1] * 12]
ROUNDING = 2e-6
"""A mean in float32 that is put together from means has another rounding; what is put together from rows has not."""
ROUNDED = {"mean of losses", "running mean", "correlation"}  # the last takes sums in another order for other strides


def call(module: nn.Module, arguments: tuple[Any, ...], how: str) -> None:
    module.update(*arguments) if how == "update" else module(*arguments)


def in_microbatches(
    module: nn.Module,
    batches: Sequence[tuple[tuple[Any, ...], ...]],
    sizes: Sequence[int],
    how: str,
    rules: dict[str, Any] | None = None,
) -> list[str]:
    """One batch, given as what each microbatch calls the metric with."""
    metrics, states = find_metrics(module), MetricStates()
    states.save(metrics)
    calls = MetricCalls(metrics)
    try:
        for arguments in batches:
            calls.begin_microbatch()
            call(module, arguments, how)
    finally:
        calls.end()
    return calls.repeat_once(states, sizes, [size / sum(sizes) for size in sizes], rules or {})


def arguments_of(case: Case, seed: int, sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    batch = make_batch(seed, sum(sizes))
    return [case.arguments(part(batch, sum(sizes[:index]), size)) for index, size in enumerate(sizes)]


def compare(case: Case, sizes: Sequence[int], how: str, *, rtol: float) -> None:
    """Three batches, of which the first and the last are split; against a twin that sees all of them whole."""
    module, twin = case.make(), case.make()
    for seed in range(3):
        whole = case.arguments(make_batch(seed, sum(sizes)))
        call(twin, whole, how)
        if seed == 1:
            call(module, whole, how)
        else:
            assert in_microbatches(module, arguments_of(case, seed, sizes), sizes, how) == []
    assert differences(state_of(twin), state_of(module), rtol=rtol) == []
    assert differences({"value": copied(twin.compute())}, {"value": copied(module.compute())}, rtol=rtol) == []


@pytest.mark.parametrize("how", ["forward", "update"])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_batch_in_microbatches_counts_as_one_whole_batch(name, sizes, how):
    if (name, len(sizes)) == ("R2", 12):
        pytest.skip("refuses a single sample itself")
    compare(CASES[name], sizes, how, rtol=ROUNDING if name in ROUNDED else 0.0)


@pytest.mark.parametrize("how", ["forward", "update"])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_summed_or_the_largest_taken_where_the_kind_of_metric_or_their_value_says_so(name, sizes, how):
    compare(NUMBERS[name], sizes, how, rtol=ROUNDING)


def test_without_this_a_batch_in_microbatches_would_count_several_times():
    """Otherwise the tests above could not fail."""
    case = CASES["mean of losses"]
    module, twin = case.make(), case.make()
    call(twin, case.arguments(make_batch(0)), "update")
    for arguments in arguments_of(case, 0, [8, 4]):
        call(module, arguments, "update")
    assert "0 MeanMetric.mean_value" in differences(state_of(twin), state_of(module), rtol=ROUNDING)


# Rules that were found ---------------------------------------------------------------------------------------


def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(batch["logits"], batch["labels"])


def observed(metrics: list[nn.Module], batches: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    calls = MetricCalls(metrics)
    for arguments in batches:
        calls.begin_microbatch()
        call(metrics[0], arguments, "update")
    calls.end()
    return calls.numbers()


@pytest.mark.parametrize("make", [SumMetric, MaxMetric, MeanMetric])
@pytest.mark.parametrize(
    "number",
    [
        mean_loss,
        lambda batch: batch["logits"].sum(),
        lambda batch: batch["logits"].max(),
        lambda batch: batch["logits"].min(),
        lambda batch: (batch["labels"] == 0).sum(),
        lambda batch: float(batch["logits"].max()),
        lambda batch: torch.tensor(0.25),
    ],
    ids=["mean", "sum", "max", "min", "count", "Python float", "constant"],
)
def test_a_rule_that_was_found_by_comparing_decides_how_numbers_are_put_together(make, number):
    case = Case(make, lambda batch: (number(batch),))
    halves = [6, 6]
    metric = case.make()
    whole = observed([metric], [case.arguments(make_batch(5))])
    rules, unknown, still_open = find_rules(
        whole[0], observed([metric], arguments_of(case, 5, halves)), [0.5, 0.5], 1e-4
    )
    assert (unknown, still_open, len(rules)) == ([], [], 1)
    module, twin = case.make(), case.make()
    for seed in range(2):
        call(twin, case.arguments(make_batch(seed, 10)), "update")
        assert in_microbatches(module, arguments_of(case, seed, [4, 3, 3]), [4, 3, 3], "update", rules) == []
    assert differences(state_of(twin), state_of(module), rtol=ROUNDING) == []


# Several metrics, several calls --------------------------------------------------------------------------------


class Step(nn.Module):
    """Calls one metric twice, and others in between, by name of the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(4), MeanMetric()
        self.collection = make_collection()

    def forward(self, batch: dict[str, torch.Tensor]) -> None:
        self.accuracy.update(*classes(batch))
        self.mean.update(value=mean_loss(batch), weight=len(batch["labels"]))
        self.collection(*classes(batch))
        self.accuracy(preds=batch["logits"].roll(1, 1), target=batch["labels"])


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_each_of_several_calls_is_made_once_in_its_order(sizes):
    module, twin = Step(), Step()
    for seed in range(2):
        batch = make_batch(seed)
        twin(batch)
        microbatches = [(part(batch, sum(sizes[:index]), size),) for index, size in enumerate(sizes)]
        assert in_microbatches(module, microbatches, sizes, "forward") == []
    assert differences(state_of(twin), state_of(module), rtol=ROUNDING) == []
    assert module.accuracy._update_count == 4


def test_what_a_metric_says_of_the_batch_is_said_of_the_whole():
    case = CASES["AUROC of lists"]
    module, twin = case.make(), case.make()
    value = twin(*case.arguments(make_batch(0)))
    in_microbatches(module, arguments_of(case, 0, [6, 6]), [6, 6], "forward")
    assert torch.equal(module._forward_cache, value)


# What cannot be put together -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [(torch.tensor(1),), (torch.tensor(2),)],  # whole numbers have no mean
        [(1.0,), (torch.tensor(2.0), 0.5)],
        [(torch.ones(6, 2),), (torch.ones(6, 3),)],
    ],
    ids=["integers", "another number of arguments", "other shapes"],
)
def test_a_metric_whose_calls_do_not_go_together_keeps_them_and_is_named(arguments):
    module, twin = nn.ModuleList([MeanMetric(), SumMetric()]), nn.ModuleList([MeanMetric(), SumMetric()])
    states, metrics = MetricStates(), find_metrics(module)
    states.save(metrics)
    calls = MetricCalls(metrics)
    for given in arguments:
        calls.begin_microbatch()
        module[0].update(*given)
        module[1].update(torch.ones(6))
        twin[0].update(*given)
    twin[1].update(torch.ones(12))
    calls.end()
    assert calls.repeat_once(states, [6, 6], [0.5, 0.5], {}) == ["MeanMetric"]
    assert differences(state_of(twin), state_of(module)) == []


@pytest.mark.parametrize("caller", [0, 1])
def test_a_metric_that_only_one_microbatch_calls_keeps_that_call_and_is_named(caller):
    metric = MeanMetric()
    states = MetricStates()
    states.save([metric])
    calls = MetricCalls([metric])
    for number in range(2):
        calls.begin_microbatch()
        if number == caller:
            metric.update(torch.tensor(3.0))
    calls.end()
    assert calls.repeat_once(states, [6, 6], [0.5, 0.5], {}) == ["MeanMetric"]
    assert (metric.compute(), metric._update_count) == (3.0, 1)


class Hungry(Metric):
    """Needs more memory than there is for more rows than a few."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: torch.Tensor) -> None:
        if len(values) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.total += values.sum()

    def compute(self) -> torch.Tensor:
        return self.total


def test_a_batch_that_is_too_large_for_its_metric_leaves_what_the_microbatches_gave():
    module = nn.ModuleList([SumMetric(), Hungry()])
    states, metrics = MetricStates(), find_metrics(module)
    states.save(metrics)
    calls = MetricCalls(metrics)
    for _ in range(2):
        calls.begin_microbatch()
        for metric in module:
            metric.update(torch.ones(6))
    calls.end()
    assert "Hungry" in calls.repeat_once(states, [6, 6], [0.5, 0.5], {})
    assert [(float(metric.compute()), metric._update_count) for metric in module] == [(12.0, 2), (12.0, 2)]


def test_a_metric_of_which_only_some_calls_go_together_keeps_all_calls_of_the_microbatches():
    metric = SumMetric()
    states = MetricStates()
    states.save([metric])
    calls = MetricCalls([metric])
    for shape in ((6, 2), (6, 3)):
        calls.begin_microbatch()
        metric.update(torch.ones(6))
        metric.update(torch.ones(shape))
    calls.end()
    assert calls.repeat_once(states, [6, 6], [0.5, 0.5], {}) == ["SumMetric"]
    assert (metric.compute(), metric._update_count) == (42.0, 4)


def test_another_error_of_a_metric_is_not_hidden():
    class Broken(MeanMetric):
        def update(self, value: Any) -> None:
            if len(value) > 6:
                raise ValueError("too many")
            super().update(value)

    with pytest.raises(ValueError, match="too many"):
        in_microbatches(Broken(), [(torch.ones(6),)] * 2, [6, 6], "update")


# Left as it was -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["accuracy", "smallest and largest", "composition", "tracker", "collection"])
def test_metrics_are_their_own_again_after_an_error_in_the_middle(name):
    case = CASES[name]
    module = case.make()
    metrics = find_metrics(module)
    own = [dict(metric.__dict__) for metric in metrics]
    calls = MetricCalls(metrics)
    calls.begin_microbatch()
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        module(torch.ones(3))  # not what it wants
    calls.end()
    for metric, attributes in zip(metrics, own, strict=True):
        assert set(metric.__dict__) == set(attributes)
        assert metric.__dict__.get("update") is attributes.get("update")
        assert metric.__dict__.get("forward") is attributes.get("forward")


def test_calls_before_the_first_microbatch_and_after_the_end_are_made_and_not_noted():
    metric = SumMetric()
    calls = MetricCalls([metric])
    metric.update(1.0)
    calls.begin_microbatch()
    calls.end()
    metric.update(2.0)
    assert calls.microbatches == [[]]
    assert metric.compute() == 3.0


def test_a_graph_is_not_kept_alive_by_what_a_metric_was_called_with():
    weight = nn.Parameter(torch.ones(3))
    metric = MeanMetric()
    calls = MetricCalls([metric])
    calls.begin_microbatch()
    hidden = weight * 2
    reference = weakref.ref(hidden)
    value = hidden.square().sum()  # its graph holds `hidden`
    metric.update(value)
    calls.end()
    del hidden
    assert reference() is not None
    del value
    gc.collect()
    assert reference() is None
    [[kept]] = calls.microbatches
    assert not kept.args[0].requires_grad
