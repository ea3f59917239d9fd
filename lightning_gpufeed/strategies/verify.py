"""Computes a step a second time, the plain way, and compares: outputs, buffers, gradients, updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, distributed, nn, optim

from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.recover.attributes import AttributeStates
from lightning_gpufeed.recover.metrics import MetricStates, find_metrics
from lightning_gpufeed.recover.snapshot import GeneratorStates
from lightning_gpufeed.strategies.quiet import unlogged
from lightning_gpufeed.sync.awaited import unsettled
from lightning_gpufeed.sync.optimizers import PendingStep
from lightning_gpufeed.sync.session import GradientSync

__all__ = ["StepVerifier"]

_TOLERANCE = 1e-5
"""Of the largest number of a gradient, with more than two ranks: sums are rounded in an order that depends on sizes."""


class StepVerifier:
    """Compares steps with plain ones.

    The module's own step is run twice on the same batch, from the same random numbers and buffers, first as usual and
    then with nothing deferred and nothing on its way. So a parameter that was read before its update shows, whoever
    read it. What the second run changes is put back; it is not logged.

    Needs kernels that give the same bits twice, and a step that does not change its batch.
    """

    def __init__(self, module: LightningModule, sync: GradientSync, device: torch.device) -> None:
        """Nothing is compared yet.

        Args:
            module: The user's.
            sync: What is to be verified.
            device: Of the training.
        """
        self._module, self._sync, self._device = module, sync, device
        self._plain: dict[str, Tensor | None] | None = None
        self._prior: dict[str, Tensor | None] = {}

    @property
    def is_at_work(self) -> bool:
        """Whether the step under way is compared."""
        return self._plain is not None

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the module's step twice.

        Args:
            run: The module's step.

        Returns:
            What the first run gives.

        Raises:
            SyncError: The runs differ.
        """
        before = _States(self._module, self._device)
        # Frozen parameters may be moved by the step itself, as a teacher's are.
        fixed = [*self._module.buffers(), *(one for one in unsettled(self._module) if not one.requires_grad)]
        copies = {id(one): one.detach().clone() for one in fixed}
        output = run()
        self._sync.synchronize()
        after = _States(self._module, self._device)
        before.put_back()
        try:
            with self._sync.paused(), unlogged(self._module), self._without_gradients():
                # Backward of the first run needs its buffers as they are, so the second has others.
                with _exchanged(self._module, copies):
                    loss = _loss(run())
                self._backward(loss)
            self._compare("the loss", "loss", _loss(output), loss)
            for name, buffer in self._module.named_buffers():
                if id(buffer) in copies:
                    self._compare("the buffer", name, buffer, copies[id(buffer)])
        finally:
            after.put_back()
        return output

    def _backward(self, loss: Tensor) -> None:
        """As the loop would, without anybody being told."""
        trainer = self._module.trainer
        loss = loss / trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._module.backward(loss if scaler is None else scaler.scale(loss))

    def backward_begins(self) -> None:
        """Note what gradients are there already, of earlier microbatches."""
        self._prior = {name: _copied(one.grad) for name, one in self._module.named_parameters()}

    def backward_ends(self) -> None:
        """Compare the gradients. All ranks have to be here.

        Raises:
            SyncError: They differ.
        """
        assert self._plain is not None
        self._sync.synchronize()
        num_ranks = self._sync.ranks.num_ranks
        is_exact = num_ranks <= 2
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                if not parameter.requires_grad:
                    continue
                prior, plain = self._prior[name], self._plain[name]
                expected = plain if prior is None else prior if plain is None else prior + plain
                total = torch.zeros_like(parameter) if expected is None else expected * (1.0 / num_ranks)
                total = total.to_dense() if total.layout != torch.strided else total.contiguous()
                distributed.all_reduce(total)
                found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                self._compare("the gradient of", name, found, total, is_exact)

    def step_is_plain(self) -> None:
        """The update is taken the plain way, so there is nothing to compare."""
        self._plain = None

    def step(self, optimizer: optim.Optimizer) -> None:
        """Compare an update taken at once with one taken layer by layer; neither is kept.

        Args:
            optimizer: Whose, with all gradients there.

        Raises:
            SyncError: They differ.
        """
        self._plain = None
        parameters = dict(self._module.named_parameters())
        before = _Optimized(optimizer, parameters)
        optimizer.step()
        at_once = _Optimized(optimizer, parameters)
        before.put_back()
        step = PendingStep(optimizer)
        for layer in self._sync.layers:
            step.take(layer.parameters)
        step.take(parameters.values())
        in_pieces = _Optimized(optimizer, parameters)
        before.put_back()
        for name in parameters:
            self._compare("the updated parameter", name, in_pieces.values[name], at_once.values[name])
            for key, value in in_pieces.states[name].items():
                if isinstance(value, Tensor):
                    self._compare("the optimizer's state of", f"{name}.{key}", value, at_once.states[name][key])

    def _compare(self, what: str, name: str, found: Tensor, expected: Tensor, is_exact: bool = True) -> None:
        found, expected = found.detach(), expected.detach()
        if is_exact:
            is_same = found.shape == expected.shape and bool(
                ((found == expected) | (found.isnan() & expected.isnan())).all()
            )
        else:
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            is_same = torch.allclose(found, expected, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)
        if not is_same:
            self._plain = None
            difference = float((found.double() - expected.double()).abs().max())
            raise SyncError(
                f"verify_every: {what} {name} differs from a plain step by up to {difference:.3g} on rank "
                f"{self._sync.ranks.rank}; expected the same bits. If the model is not deterministic (its kernels, or "
                "a step that changes its batch) switch verify_every off; otherwise use strategy='ddp' and report this."
            )

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        parameters = list(self._module.parameters())
        gradients = [one.grad for one in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            self._plain = {name: _copied(one.grad) for name, one in self._module.named_parameters()}
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


class _States:
    """Random generators, attributes and metrics of a module as they are now."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._generators, self._attributes, self._metrics = (
            GeneratorStates(device),
            AttributeStates(module, frozenset()),
            MetricStates(),
        )
        self._attributes.save()
        self._metrics.save(find_metrics(module, []))

    def put_back(self) -> None:
        self._generators.put_back()
        self._attributes.put_back()
        self._metrics.put_back()


@contextmanager
def _exchanged(module: nn.Module, copies: Mapping[int, Tensor]) -> Iterator[None]:
    """A module has other buffers and frozen parameters for a time."""
    tables: list[dict[str, Any]] = [table for one in module.modules() for table in (one._buffers, one._parameters)]
    places = [(table, name, one) for table in tables for name, one in table.items() if id(one) in copies]
    for table, name, one in places:
        copy = copies[id(one)]
        table[name] = nn.Parameter(copy, requires_grad=False) if isinstance(one, nn.Parameter) else copy
    try:
        yield
    finally:
        for table, name, one in places:
            table[name] = one


def _loss(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise SyncError(
            f"verify_every: training_step gave {type(loss).__name__}; expected a tensor or a dict with 'loss'."
        )
    return loss


def _copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


class _Optimized:
    """Parameters and what an optimizer knows of them, as they are now."""

    def __init__(self, optimizer: optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self.values = {name: one.detach().clone() for name, one in parameters.items()}
        self.states: dict[str, dict[str, Any]] = {
            name: {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in optimizer.state.get(one, {}).items()
            }
            for name, one in parameters.items()
        }

    @torch.no_grad()
    def put_back(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self.values[name])
            before, now = self.states[name], self._optimizer.state.get(parameter)
            if not before:
                self._optimizer.state.pop(parameter, None)
            elif now is not None:
                for key, value in before.items():
                    if isinstance(value, Tensor) and isinstance(now.get(key), Tensor):
                        now[key].copy_(value)
                    else:
                        now[key] = value
