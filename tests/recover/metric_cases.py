"""Metrics of many kinds, each with what it is called with; for several test files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    MinMetric,
    PearsonCorrCoef,
    R2Score,
    SumMetric,
)
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import ClasswiseWrapper, MultioutputWrapper

from lightning_gpufeed.recover.metrics import find_metrics

NUM_CLASSES = 4
Batch = dict[str, torch.Tensor]


def make_batch(seed: int, num_samples: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, NUM_CLASSES, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
    return {"logits": logits, "labels": labels}


def part(batch: Batch, start: int, size: int) -> Batch:
    return {key: value[start : start + size] for key, value in batch.items()}


def classes(batch: Batch) -> tuple[Any, ...]:
    return batch["logits"], batch["labels"]


def scores(batch: Batch) -> tuple[Any, ...]:
    return batch["logits"][:, 0].sigmoid(), (batch["labels"] == 0).long()


def numbers(batch: Batch) -> tuple[Any, ...]:
    return batch["logits"][:, 0], batch["logits"][:, 1] + batch["labels"]


def loss(batch: Batch) -> tuple[Any, ...]:
    return (nn.functional.cross_entropy(batch["logits"], batch["labels"]),)


class CallCounter(Metric):
    """Counts calls in a plain attribute, which is no state, and keeps the last batch in another."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.num_calls = 0
        self.last: torch.Tensor | None = None

    def update(self, values: torch.Tensor) -> None:
        self.num_calls += 1
        self.last = self.made_by_a_first_call = values
        self.total = self.total + values.sum()  # another tensor each time

    def compute(self) -> torch.Tensor:
        return self.total * self.num_calls


def make_collection() -> MetricCollection:
    """Two that share a state once the collection has seen a batch, and one that does not."""
    return MetricCollection(
        [MulticlassF1Score(NUM_CLASSES), MulticlassPrecision(NUM_CLASSES), MulticlassConfusionMatrix(4)]
    )


class Tracked(nn.Module):
    """A tracker that is in its second epoch."""

    def __init__(self, base: Metric | MetricCollection) -> None:
        super().__init__()
        self.tracker = MetricTracker(base, maximize=True)
        self.tracker.increment()
        self.tracker.update(*classes(make_batch(99)))
        self.tracker.increment()

    def forward(self, *args: Any) -> Any:
        return self.tracker(*args)

    def update(self, *args: Any) -> None:
        self.tracker.update(*args)

    def compute(self) -> Any:
        return self.tracker.compute_all()


class Sum(nn.Module):
    """Two metrics added, each of which is a metric by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.both = MulticlassAccuracy(NUM_CLASSES) + MulticlassF1Score(NUM_CLASSES)

    def forward(self, *args: Any) -> Any:
        return self.both(*args)

    def update(self, *args: Any) -> None:
        self.both.update(*args)

    def compute(self) -> Any:
        return self.both.compute()


@dataclass(frozen=True)
class Case:
    """How a metric is made and called."""

    make: Callable[[], nn.Module]
    arguments: Callable[[Batch], tuple[Any, ...]]


CASES = {
    "accuracy": Case(lambda: MulticlassAccuracy(NUM_CLASSES), classes),
    "F1": Case(lambda: MulticlassF1Score(NUM_CLASSES), classes),
    "confusion matrix": Case(lambda: MulticlassConfusionMatrix(NUM_CLASSES), classes),
    "AUROC of lists": Case(BinaryAUROC, scores),
    "AUROC in bins": Case(lambda: MulticlassAUROC(NUM_CLASSES, thresholds=5), classes),
    "calibration": Case(lambda: MulticlassCalibrationError(NUM_CLASSES), classes),
    "mean of losses": Case(MeanMetric, loss),
    "mean of values": Case(MeanMetric, lambda batch: (batch["logits"][:, 0],)),
    "sum of values": Case(SumMetric, lambda batch: (batch["logits"][:, 0],)),
    "largest value": Case(MaxMetric, lambda batch: (batch["logits"],)),
    "all values": Case(CatMetric, lambda batch: (batch["logits"][:, 0],)),
    "running mean": Case(lambda: RunningMean(window=3), loss),
    "squared error": Case(MeanSquaredError, numbers),
    "R2": Case(R2Score, numbers),
    "correlation": Case(PearsonCorrCoef, numbers),
    "smallest and largest": Case(lambda: MinMaxMetric(MulticlassAccuracy(NUM_CLASSES)), classes),
    "by class": Case(lambda: ClasswiseWrapper(MulticlassAccuracy(NUM_CLASSES, average=None)), classes),
    "by output": Case(
        lambda: MultioutputWrapper(MeanSquaredError(), 2),
        lambda batch: (batch["logits"][:, :2], batch["logits"][:, 2:]),
    ),
    "own attributes": Case(CallCounter, lambda batch: (batch["logits"],)),
    "composition": Case(Sum, classes),
    "tracker": Case(lambda: Tracked(MulticlassAccuracy(NUM_CLASSES)), classes),
    "collection": Case(make_collection, classes),
    "collection without groups": Case(
        lambda: MetricCollection([MulticlassF1Score(NUM_CLASSES)], compute_groups=False), classes
    ),
}

# Called with a single number, which may stand for a batch in several ways.
NUMBERS = {
    "sum of hits": Case(SumMetric, lambda batch: ((batch["logits"].argmax(1) == batch["labels"]).sum(),)),
    "sum of hits as a float": Case(
        SumMetric, lambda batch: ((batch["logits"].argmax(1) == batch["labels"]).float().sum(),)
    ),
    "largest": Case(MaxMetric, lambda batch: (batch["logits"].max(),)),
    "smallest": Case(MinMetric, lambda batch: (batch["logits"].min(),)),
    "mean weighted by its size": Case(MeanMetric, lambda batch: (*loss(batch), len(batch["labels"]))),
    "mean weighted by its size as a tensor": Case(
        MeanMetric, lambda batch: (*loss(batch), torch.tensor(float(len(batch["labels"]))))
    ),
    "mean with a weight for all": Case(MeanMetric, lambda batch: (*loss(batch), 0.5)),
}


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything that metrics know, as values."""
    found: dict[str, Any] = {}
    for index, metric in enumerate(find_metrics(module)):
        if isinstance(metric, MetricCollection):
            found[f"{index} groups"] = {key: list(names) for key, names in metric._groups.items()}
            found[f"{index} is checked"] = metric._groups_checked
            continue
        names = [*metric._defaults, "_update_count", "_computed", "_to_sync", "_should_unsync", "_enable_grad"]
        names += ["_cache", "_is_synced", "compute_on_cpu", "_forward_cache"]
        names += [name for name in ("min_val", "max_val", "num_calls", "last") if hasattr(metric, name)]
        found[f"{index} attributes"] = sorted(metric.__dict__)
        for name in names:
            found[f"{index} {type(metric).__name__}.{name}"] = copied(getattr(metric, name))
    return found


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(copied(part) for part in value)
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    return value


def same(one: Any, other: Any, *, rtol: float = 0.0) -> bool:
    """Equal, tensors up to `rtol`."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not isinstance(other, torch.Tensor) or not isinstance(one, torch.Tensor) or one.shape != other.shape:
            return False
        if one.dtype != other.dtype:
            return False
        return bool(torch.allclose(one.double(), other.double(), rtol=rtol, atol=rtol, equal_nan=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key], rtol=rtol) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b, rtol=rtol) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def differences(one: dict[str, Any], other: dict[str, Any], *, rtol: float = 0.0) -> list[str]:
    return [key for key in {**one, **other} if not same(one.get(key), other.get(key), rtol=rtol)]
