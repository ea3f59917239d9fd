"""A training step whose loss is wanted and nothing else: what it logs, counts and changes is put back."""

from __future__ import annotations

from collections.abc import Iterator
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

    def __init__(self, module: LightningModule) -> None:
        """Find what could change.

        Args:
            module: The user's.
        """
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
            ScheduleError: It fails, or gives no loss.
        """
        self._metric_states.save(self._metrics)
        self._attributes.save()
        try:
            with unlogged(self._module):
                result = self._module.training_step(*args, **kwargs)
        except ScheduleError:
            raise
        except Exception as error:
            raise ScheduleError(
                f"training_step fails on a part of a batch ({type(error).__name__}: {str(error)[:120]})"
            ) from error
        finally:
            self._attributes.put_back()
            self._metric_states.put_back()
        loss = result["loss"] if isinstance(result, dict) else result
        if not isinstance(loss, Tensor):
            raise ScheduleError("training_step gives no loss for a part of a batch")
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
