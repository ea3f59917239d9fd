"""States of torchmetrics objects, rolled back after a failed attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_gpufeed.recover.attributes import is_of_library

__all__ = ["MetricStates", "find_metrics"]

DEPTH = 3
MANY = 256
"""How deep, and in how long containers, metrics are looked for outside the module's own parts."""
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
    held: list[nn.Module] = []
    for part in module.modules():
        if not is_of_library(part):
            for value in vars(part).values():
                _find_held(value, held, DEPTH)
    parts = [part for one in (module, *others, *held) for part in one.modules()]
    return list({id(part): part for part in parts if isinstance(part, Metric | MetricCollection)}.values())


def _find_held(value: Any, found: list[nn.Module], depth: int) -> None:
    """Metrics in plain containers and in objects of the user's own, which makes them no parts of the module."""
    if isinstance(value, Metric | MetricCollection):
        found.append(value)
    elif depth and isinstance(value, list | tuple | dict) and len(value) <= MANY:
        for one in value.values() if isinstance(value, dict) else value:
            _find_held(one, found, depth - 1)
    elif depth and not is_of_library(value) and not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
        for one in list(vars(value).values()):
            _find_held(one, found, depth - 1)


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
