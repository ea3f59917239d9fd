"""A training step whose loss is wanted and nothing else: what it logs, counts and changes is put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.recover.attributes import AttributeStates
from lightning_gpufeed.recover.metrics import MetricStates, find_metrics

__all__ = ["QuietStep", "unlogged"]


class QuietStep:
    """Runs the module's `training_step` without a trace."""

    def __init__(self, module: LightningModule, layers: Iterable[nn.Module]) -> None:
        """Find what could change.

        Args:
            module: The user's.
            layers: Parts of it that are not run in the step.
        """
        inside = {id(part) for layer in layers for part in layer.modules()}
        self._others = [part for part in module.modules() if id(part) not in inside]
        self._module = module
        self._metrics = find_metrics(module)
        self._metric_states = MetricStates()
        self._attributes = AttributeStates(module, frozenset({"log", "log_dict"}))

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run it.

        Args:
            *args: Of `training_step`.
            **kwargs: Likewise.

        Returns:
            The loss.

        Raises:
            ScheduleError: It gives no loss.
        """
        self._metric_states.save(self._metrics)
        self._attributes.save()
        buffers = [
            (part, name, buffer, buffer.clone())
            for part in self._others
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        try:
            with unlogged(self._module):
                result = self._module.training_step(*args, **kwargs)
        finally:
            self._attributes.put_back()
            self._metric_states.put_back()
            _put_back(buffers)
        loss = result["loss"] if isinstance(result, dict) else result
        if not isinstance(loss, Tensor):
            raise ScheduleError(f"it gives a {type(loss).__name__}, and no loss")
        return loss


@torch.no_grad()
def _put_back(buffers: Iterable[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    for part, name, buffer, value in buffers:
        buffer.copy_(value)
        part._buffers[name] = buffer


@contextmanager
def unlogged(module: nn.Module) -> Iterator[None]:
    """Have what a module logs not be logged.

    Args:
        module: The user's.

    Yields:
        Nothing.
    """
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *arguments, **options: None
    try:
        yield
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]
