"""A training step whose loss is wanted and nothing else: what it logs, counts and changes is put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

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
        self.is_running = False
        """Whether the step is at work on this rank alone."""
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
            (part, name, buffer)
            for part in self._others
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        for part, name, buffer in buffers:  # the loss may need them as they are then
            part._buffers[name] = buffer.clone()
        modes = [(part, part.training) for part in self._module.modules()]
        frozen = [(parameter, parameter.requires_grad) for parameter in self._module.parameters()]
        self.is_running = True
        try:
            with unlogged(self._module):
                result = self._module.training_step(*args, **kwargs)
        finally:
            self._attributes.put_back()
            self._metric_states.put_back()
            for part, name, buffer in buffers:
                part._buffers[name] = buffer
            for part, mode in modes:
                part.training = mode
            for parameter, is_wanted in frozen:
                parameter.requires_grad_(is_wanted)
            self.is_running = False
        loss = result["loss"] if isinstance(result, dict) else result
        if not isinstance(loss, Tensor):
            raise ScheduleError(f"it gives a {type(loss).__name__}, and no loss")
        return loss


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
