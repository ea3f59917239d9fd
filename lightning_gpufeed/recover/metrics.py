"""torchmetrics objects: rolled back after a failed attempt, and updated once for a batch in microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection

from lightning_gpufeed.recover.merge import merge_values

__all__ = ["MetricCalls", "MetricStates", "find_metrics"]

GROUPING = ("_groups", "_groups_checked", "_state_is_copy")
"""Where a collection keeps which of its metrics share a state."""


def find_metrics(module: nn.Module, others: Iterable[Any] = ()) -> list[nn.Module]:
    """All metrics and collections of metrics in a module.

    Args:
        module: Looked through with its submodules.
        others: Metrics that may not be in it.

    Returns:
        Each once.
    """
    found = {id(part): part for part in module.modules() if isinstance(part, Metric | MetricCollection)}
    found.update({id(part): part for part in others if isinstance(part, Metric)})
    return list(found.values())


class MetricStates:
    """States of metrics at one moment.

    A metric that fails in the middle of `forward` is left with the state of the batch in the place of the whole, and
    with its switches set for the batch; so not only states come back but all attributes.
    """

    def __init__(self) -> None:
        """Nothing is noted yet."""
        self._kept: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._saved: dict[int, tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = {}

    def save(self, metrics: Sequence[nn.Module]) -> None:
        """Note the states.

        Args:
            metrics: From `find_metrics`.
        """
        self._saved = {}
        kept: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        for metric in metrics:
            if isinstance(metric, MetricCollection):
                grouping = {name: copy.deepcopy(getattr(metric, name)) for name in GROUPING if hasattr(metric, name)}
                self._saved[id(metric)] = (metric, grouping, [])
                continue
            attributes = dict(metric.__dict__)
            values: list[tuple[Any, Any]] = []
            defaults: dict[str, Any] = attributes["_defaults"]
            for name in defaults:
                value = attributes.get(name)
                if isinstance(value, list):
                    values.append((value, list(value)))
                elif isinstance(value, torch.Tensor) and (
                    not value.is_inference() or torch.is_inference_mode_enabled()
                ):
                    values.append((value, self._copy(value, kept)))
            self._saved[id(metric)] = (metric, attributes, values)
        self._kept = kept

    def _copy(self, value: torch.Tensor, kept: dict[int, tuple[torch.Tensor, int, torch.Tensor]]) -> torch.Tensor:
        """A copy of a state; the one of the last batch if it has not changed since."""
        if value.is_inference() or torch.is_inference_mode_enabled():
            return value.clone()
        earlier = self._kept.get(id(value))
        if earlier is None or earlier[0] is not value or earlier[1] != value._version:
            earlier = (value, value._version, value.detach().clone())
        kept[id(value)] = earlier
        return earlier[2]

    @torch.no_grad()
    def put_back(self, metrics: Iterable[nn.Module] | None = None) -> None:
        """Give metrics the states that were noted, in the same tensors and lists.

        Args:
            metrics: Only these; None: all.
        """
        chosen = self._saved.values() if metrics is None else [self._saved[id(part)] for part in metrics]
        for metric, attributes, values in chosen:
            if isinstance(metric, MetricCollection):
                metric.__dict__.update(copy.deepcopy(attributes))
                continue
            metric.__dict__.clear()
            metric.__dict__.update(attributes)
            for value, was in values:
                if isinstance(value, list):
                    value[:] = was
                else:
                    value.copy_(was)
        self._kept = {}


class MetricCalls:
    """Notes what metrics are called with in each microbatch, to call them once with all of it.

    A metric that counts calls (a mean of batch losses) would count a batch in four microbatches four times, and what a
    metric says of a batch (`on_step`) is not the mean of what it says of the parts.
    """

    def __init__(self, metrics: Sequence[nn.Module]) -> None:
        """Begin to note.

        Args:
            metrics: From `find_metrics`.
        """
        self._metrics = list(metrics)
        self._depth = 0
        self._microbatches: list[list[tuple[nn.Module, str, tuple[Any, ...], dict[str, Any]]]] = []
        self._own: list[tuple[nn.Module, str, Any]] = []
        for metric in self._metrics:
            for name in ("forward", "update"):
                self._own.append((metric, name, metric.__dict__.get(name)))
                metric.__dict__[name] = self._noting(metric, name, getattr(metric, name))

    def _noting(self, metric: nn.Module, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0 and self._microbatches:
                # Without the graph, or each microbatch would be kept alive by what it was measured on.
                kept = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
                self._microbatches[-1].append((metric, name, *kept))
            self._depth += 1
            try:
                return own(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def begin_microbatch(self) -> None:
        """The next calls are of one more microbatch."""
        self._microbatches.append([])

    def end(self) -> None:
        """Take everything back."""
        while self._own:
            metric, name, own = self._own.pop()
            if own is None:
                metric.__dict__.pop(name, None)
            else:
                metric.__dict__[name] = own

    def repeat_once(self, states: MetricStates, sizes: Sequence[int], weights: Sequence[float]) -> list[str]:
        """Roll the metrics back and call each as for the whole batch; after `end`.

        Args:
            states: From before the batch.
            sizes: Samples of each microbatch.
            weights: Weight of each microbatch.

        Returns:
            Names of the metrics whose calls could not be put together; they keep what the microbatches gave.
        """
        failed: dict[int, str] = {}
        calls: list[tuple[nn.Module, str, tuple[Any, ...], dict[str, Any]]] = []
        by_metric: list[dict[int, list[tuple[nn.Module, str, tuple[Any, ...], dict[str, Any]]]]] = []
        for microbatch in self._microbatches:
            by_metric.append({})
            for call in microbatch:
                by_metric[-1].setdefault(id(call[0]), []).append(call)
        counted: dict[int, int] = {}
        for metric, name, _, _ in self._microbatches[0] if self._microbatches else []:
            number = counted.get(id(metric), 0)
            counted[id(metric)] = number + 1
            same = [of.get(id(metric), []) for of in by_metric]
            is_alike = len({len(part) for part in same}) == 1 and len({part[number][1] for part in same}) == 1
            if not is_alike or (merged := _merged([part[number][2:] for part in same], sizes, weights)) is None:
                failed[id(metric)] = type(metric).__name__
                continue
            calls.append((metric, name, *merged))
        for of in by_metric:
            for key, [call, *_] in of.items():
                if key not in counted:
                    failed[key] = type(call[0]).__name__
        calls = [call for call in calls if id(call[0]) not in failed]
        states.put_back(_with_inner(call[0] for call in calls))
        for metric, name, args, kwargs in calls:
            getattr(metric, name)(*args, **kwargs)
        return list(failed.values())


def _merged(
    arguments: list[Any], sizes: Sequence[int], weights: Sequence[float]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of the same call in each microbatch as for the whole batch; None if that cannot be."""
    try:
        args = [_merged_argument(same, sizes, weights) for same in zip(*[one for one, _ in arguments], strict=True)]
        names = {frozenset(named) for _, named in arguments}
        if len(names) > 1:
            return None
        return tuple(args), {
            name: _merged_argument([named[name] for _, named in arguments], sizes, weights) for name in arguments[0][1]
        }
    except ValueError:
        return None


def _merged_argument(values: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """One argument. A number that is how many samples the microbatch has (a weight) adds up."""
    is_number = all(
        isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.ndim == 0) for value in values
    )
    if is_number and not isinstance(values[0], bool) and [float(value) for value in values] == list(sizes):
        return sum(values)
    return merge_values(list(values), sizes, weights)


def _with_inner(metrics: Iterable[nn.Module]) -> list[nn.Module]:
    """The metrics and those inside them, each once."""
    return list({id(part): part for metric in metrics for part in find_metrics(metric)}.values())
