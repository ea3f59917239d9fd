"""Calls of torchmetrics objects in microbatches, made once for the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric

from lightning_gpufeed.recover.classify import Kind, classify
from lightning_gpufeed.recover.logged import LogCall, Rule, combine
from lightning_gpufeed.recover.merge import merge_values
from lightning_gpufeed.recover.metrics import MetricStates, find_metrics

__all__ = ["MetricCall", "MetricCalls"]

USUAL: dict[type, Rule] = {SumMetric: "sum", MaxMetric: "max", MinMetric: "min"}
"""How a single number that such a metric is called with stands for a batch."""


@dataclass
class MetricCall:
    """One call from outside the metrics.

    Attributes:
        metric: A metric, or a collection of them.
        name: "forward" or "update".
        args: Without graph.
        kwargs: Without graph.
        key: The metric and which of its calls in this microbatch it is.
    """

    metric: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str

    def numbers(self) -> dict[str, Any]:
        """Arguments that are single numbers, by place or name."""
        named = {**{str(place): value for place, value in enumerate(self.args)}, **self.kwargs}
        return {name: value for name, value in named.items() if _is_number(value)}


class MetricCalls:
    """Notes what metrics are called with in each microbatch, to call them once with all of it.

    A metric that counts calls (a mean of batch losses) would count a batch in four microbatches four times, and what a
    metric says of a batch (`on_step`) is not the mean of what it says of the parts.

    Attributes:
        microbatches: The calls of each.
    """

    def __init__(self, metrics: Sequence[nn.Module]) -> None:
        """Begin to note.

        Args:
            metrics: From `find_metrics`.
        """
        self.microbatches: list[list[MetricCall]] = []
        self._metrics = list(metrics)
        self._depth = 0
        self._own: list[tuple[nn.Module, str, Any]] = []
        for index, metric in enumerate(self._metrics):
            for name in ("forward", "update"):
                self._own.append((metric, name, metric.__dict__.get(name)))
                metric.__dict__[name] = self._noting(metric, index, name, getattr(metric, name))

    def _noting(self, metric: nn.Module, index: int, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0 and self.microbatches:
                # Without the graph, or each microbatch would be kept alive by what it was measured on.
                kept_args, kept_kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
                number = sum(earlier.metric is metric for earlier in self.microbatches[-1])
                key = f"{type(metric).__name__} (metric {index}, call {number})"
                self.microbatches[-1].append(MetricCall(metric, name, kept_args, kept_kwargs, key))
            self._depth += 1
            try:
                return own(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def begin_microbatch(self) -> None:
        """The next calls are of one more microbatch."""
        self.microbatches.append([])

    def end(self) -> None:
        """Take everything back."""
        while self._own:
            metric, name, own = self._own.pop()
            if own is None:
                metric.__dict__.pop(name, None)
            else:
                metric.__dict__[name] = own

    def numbers(self) -> list[list[LogCall]]:
        """Single numbers that metrics were called with, to be compared like logged values.

        Returns:
            Of each microbatch.
        """
        return [
            [
                LogCall(_number_key(call, name), torch.as_tensor(value).detach().float(), _usual(call.metric), None)
                for call in calls
                for name, value in call.numbers().items()
            ]
            for calls in self.microbatches
        ]

    def repeat_once(
        self, states: MetricStates, sizes: Sequence[int], weights: Sequence[float], rules: Mapping[str, Rule]
    ) -> list[str]:
        """Roll the metrics back and call each as for the whole batch; after `end`.

        Args:
            states: From before the batch.
            sizes: Samples of each microbatch.
            weights: Weight of each microbatch.
            rules: How single numbers stand for a batch, as far as that is known.

        Returns:
            Names of the metrics whose calls could not be put together, or not in the memory there is; they keep what
            the microbatches gave.

        Raises:
            RuntimeError: A metric does not take what was put together.
            MemoryError: Never; it is taken for a reason to keep what there is.
        """
        by_key = [{call.key: call for call in calls} for calls in self.microbatches]
        failed: dict[int, str] = {}
        repeated: list[MetricCall] = []
        for key, first in {key: call for calls in by_key for key, call in calls.items()}.items():
            same = [calls[key] for calls in by_key if key in calls]
            merged = None
            if len(same) == len(by_key) and len({call.name for call in same}) == 1:
                merged = _merged(same, sizes, weights, rules)
            if merged is None:
                failed[id(first.metric)] = type(first.metric).__name__
            else:
                repeated.append(merged)
        repeated = [call for call in repeated if id(call.metric) not in failed]
        inner = _with_inner(call.metric for call in repeated)
        after = MetricStates()
        after.save(inner)
        states.put_back(inner)
        try:
            for call in repeated:
                getattr(call.metric, call.name)(*call.args, **call.kwargs)
        except (RuntimeError, MemoryError) as error:
            devices = [part.device.type for part in inner if isinstance(part, Metric)]
            if not any(classify(error, device).kind in (Kind.DEVICE, Kind.HOST) for device in devices):
                raise
            after.put_back()
            failed.update({id(call.metric): type(call.metric).__name__ for call in repeated})
        return list(failed.values())


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_key(call: MetricCall, name: str) -> str:
    return f"{call.key}, argument {name}"


def _usual(metric: nn.Module) -> Rule:
    return USUAL.get(type(metric), "mean")


def _merged(
    same: Sequence[MetricCall], sizes: Sequence[int], weights: Sequence[float], rules: Mapping[str, Rule]
) -> MetricCall | None:
    """The same call of each microbatch as for the whole batch; None if that cannot be."""
    first = same[0]
    is_alike = len({(len(call.args), frozenset(call.kwargs)) for call in same}) == 1
    if not is_alike:
        return None

    def merged(name: str, values: list[Any]) -> Any:
        rule = rules.get(_number_key(first, name))
        if all(_is_number(value) for value in values):
            if rule is None:
                # As many as the microbatch has samples: a weight.
                rule = "sum" if [float(value) for value in values] == list(sizes) else _usual(first.metric)
            if rule != "mean":
                return _combined(values, weights, rule)
        return merge_values(values, sizes, weights)

    try:
        args = [merged(str(place), [call.args[place] for call in same]) for place in range(len(first.args))]
        kwargs = {name: merged(name, [call.kwargs[name] for call in same]) for name in first.kwargs}
    except ValueError:
        return None
    return MetricCall(first.metric, first.name, tuple(args), kwargs, first.key)


def _combined(values: list[Any], weights: Sequence[float], rule: Rule) -> Any:
    if isinstance(values[0], torch.Tensor):
        return combine(values, weights, rule)
    if rule == "sum":
        return sum(values)
    return max(values) if rule == "max" else min(values)


def _with_inner(metrics: Iterable[nn.Module]) -> list[nn.Module]:
    """The metrics and those inside them, each once."""
    return list({id(part): part for metric in metrics for part in find_metrics(metric)}.values())
