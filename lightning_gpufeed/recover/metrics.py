"""States of torchmetrics objects, rolled back after a failed attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

__all__ = ["MetricStates", "find_metrics"]

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
    held = [one for value in vars(module).values() if isinstance(value, list | tuple | dict) for one in _values(value)]
    parts = [part for one in (module, *others, *held) for part in one.modules()]
    return list({id(part): part for part in parts if isinstance(part, Metric | MetricCollection)}.values())


def _values(container: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> list[nn.Module]:
    """Metrics in a plain list or dict, which makes them no parts of the module."""
    values = container.values() if isinstance(container, dict) else container
    return [value for value in values if isinstance(value, Metric | MetricCollection)]


def _copied(grouping: Any) -> Any:
    return {key: list(names) for key, names in grouping.items()} if isinstance(grouping, dict) else grouping


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
                grouping = {name: _copied(vars(metric)[name]) for name in GROUPING if name in vars(metric)}
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
                metric.__dict__.update({name: _copied(value) for name, value in attributes.items()})
                continue
            metric.__dict__.clear()
            metric.__dict__.update(attributes)
            for value, was in values:
                if isinstance(value, list):
                    value[:] = was
                else:
                    value.copy_(was)
        self._kept = {}
