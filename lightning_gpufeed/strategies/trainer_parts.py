"""What of a Trainer, a module and its metrics has to know that the layers are on several ranks; put back at the end.

Private names, each asserted in `tests/test_private_api.py`:

===================================================  ===============================================================
name                                                 what for
===================================================  ===============================================================
Trainer._accelerator_connector, and its attribute    with one pipeline there is nothing to distribute, and a sampler
use_distributed_sampler                              of Lightning's would shuffle
nn.Module._parameters, _buffers                      the tensors of a module, without those of its children
===================================================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn, optim
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.foreign import is_foreign
from lightning_gpufeed.pipeline.session import PipelineSession
from lightning_gpufeed.recover.metrics import find_metrics
from lightning_gpufeed.strategies.gate import raw
from lightning_gpufeed.strategies.signals import HeldSignals

__all__ = ["TrainerParts", "check_callbacks", "check_optimizers", "warn_of_batch_norm"]


def check_callbacks(trainer: Trainer) -> None:
    """Make sure that no callback needs all weights on one rank.

    Args:
        trainer: Whose.

    Raises:
        ScheduleError: One does.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ScheduleError(
                f"{type(callback).__name__} averages copies of all weights, and each rank of a pipeline has those of "
                "its own layers alone; expected to train without it. Average checkpoints afterwards."
            )


def check_optimizers(optimizers: Iterable[Any]) -> None:
    """Make sure that optimizers treat each parameter by itself, as far as that can be known.

    Args:
        optimizers: Of the module.

    Raises:
        ScheduleError: One does not.
    """
    for optimizer in map(raw, optimizers):
        if isinstance(optimizer, optim.LBFGS):
            raise ScheduleError(
                "LBFGS makes one vector of all gradients, and each rank of a pipeline has those of its own layers "
                "alone; expected an optimizer that treats each parameter by itself, such as AdamW."
            )
        if type(optimizer).__module__.split(".")[0] != "torch":
            rank_zero_warn(
                f"{type(optimizer).__name__} is none of torch's optimizers: in a pipeline each rank's has the "
                "gradients of its own layers alone. That is exact if it treats each parameter by itself, and wrong if "
                "it combines numbers of several, as those do that find their learning rate."
            )


def warn_of_batch_norm(names: Iterable[str], layers: Iterable[nn.Module], num_microbatches: int) -> None:
    """Say that statistics are of microbatches.

    Args:
        names: Of the layers.
        layers: The layers.
        num_microbatches: Of a batch.
    """
    found = [
        name
        for name, layer in zip(names, layers, strict=True)
        if any(isinstance(part, _BatchNorm) for part in layer.modules())
    ]
    if found:
        rank_zero_warn(
            f"{found[0]}{f' and {len(found) - 1} more layers' * (len(found) > 1)} of the pipeline normalise over a "
            f"batch: in training they see one of {num_microbatches} microbatches at a time, so statistics are those of "
            "a smaller batch, and running ones move once for each. GroupNorm and LayerNorm do not depend on it."
        )


class TrainerParts:
    """Changed from `attach` to `detach`."""

    def __init__(self, trainer: Trainer, module: LightningModule, precision: Precision, device: torch.device) -> None:
        """Nothing is changed yet.

        Args:
            trainer: The Trainer.
            module: The user's.
            precision: The Trainer's.
            device: Where this rank computes.
        """
        self._trainer, self._module, self._precision, self._device = trainer, module, precision, device
        self._undo: list[Callable[[], None]] = []
        self._signals: HeldSignals | None = None

    def attach(self, session: PipelineSession) -> None:
        """For validation and the like, and for training.

        Args:
            session: The pipeline.
        """
        self._move_others(session)
        self._signals = HeldSignals(self._trainer, self._device)
        self._undo.append(self._signals.release)
        for metric in find_metrics(self._module):
            if isinstance(metric, Metric) and metric.process_group is None:
                self._count_replicas(metric, session)
        connector: Any = self._trainer._accelerator_connector
        if session.num_replicas == 1 and connector.use_distributed_sampler:
            # Every rank reads what one device would, in the order that the user's loader has.
            connector.use_distributed_sampler = False
            self._undo.append(lambda: setattr(connector, "use_distributed_sampler", True))

    def attach_training(self, session: PipelineSession) -> None:
        """For training alone.

        Args:
            session: The pipeline.
        """
        plugin: Any = self._precision
        if type(getattr(plugin, "scaler", None)) is torch.amp.GradScaler:  # all ranks skip a step if one has to
            shared = ShardedGradScaler(self._device.type)
            shared.load_state_dict(plugin.scaler.state_dict())
            plugin.scaler = shared

        def clip(optimizer: optim.Optimizer, clip_val: float) -> None:
            session.clip_grad_norm(plugin.main_params(optimizer), clip_val)

        plugin.__dict__["clip_grad_by_norm"] = clip
        self._undo.append(lambda: plugin.__dict__.pop("clip_grad_by_norm", None))

    def detach(self) -> None:
        """Put everything back."""
        undo, self._undo = self._undo, []
        for one in undo:
            one()

    def begin_evaluation(self, session: PipelineSession) -> None:
        """Before a batch: ask whether to end after it, unless replicas, which may have fewer batches, have to agree.

        Args:
            session: The pipeline.
        """
        if self._signals is not None and (session.num_replicas == 1 or self._trainer.state.fn != TrainerFn.FITTING):
            self._signals.ask(session.groups.control)

    def _count_replicas(self, metric: Metric, session: PipelineSession) -> None:
        """The ranks of one pipeline have the same values, which are to count once."""
        if session.num_replicas > 1:
            metric.process_group = session.groups.replica
            self._undo.append(lambda: setattr(metric, "process_group", None))
        else:
            before = metric.distributed_available_fn
            metric.distributed_available_fn = _is_alone
            self._undo.append(lambda: setattr(metric, "distributed_available_fn", before))

    def _move_others(self, session: PipelineSession) -> None:
        """To the device: what is in no layer. The layers come when it is known whose they are."""
        layers = {id(part) for layer in session.layers.layers for part in layer.modules()}
        for module in self._module.modules():
            if id(module) in layers:
                continue
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not is_foreign(tensor):
                        self._move(tensors, name, tensor)
            if isinstance(module, Metric):  # whose states are no buffers
                module.to(self._device)

    def _move(self, tensors: dict[str, Any], name: str, tensor: Tensor) -> None:
        """A parameter stays the same object."""
        if not isinstance(tensor, nn.Parameter):
            tensors[name] = tensor.to(self._device)
        elif tensor.device != self._device:
            tensor.data = tensor.data.to(self._device)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(self._device)


def _is_alone() -> bool:
    """For a metric: there are no others."""
    return False
