"""`verify_every` sees what goes wrong, and nothing where nothing does. One rank: the order of things is the same."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_gpufeed import OutOfOrderStrategy, SyncError
from lightning_gpufeed.sync.optimizers import PendingStep
from lightning_gpufeed.sync.reducer import Reducer
from tests.datamodules.models import make_trainer, same_bits

NUM_STEPS = 9
GIVEN: dict[str, Any] = {"reverse_first_k": 2, "cross_iteration": True, "bucket_bytes": 100}


class Net(pl.LightningModule):
    """Dropout, running statistics, a counter: what a second run of a step could spoil."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.ReLU(), nn.Linear(12, 12))
        self.head = nn.Linear(12, 2)
        self.num_calls = 0
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.num_calls += 1
        loss = self.head(self.body(batch)).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "size": len(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ReadsTooEarly(Net):
    """Reads a parameter that it has kept in a way that asks nobody, before it is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.head.weight]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            stale = self.kept[0].detach().sum()
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * (1 + stale.square())}


def fitted(model: Net, strategy: Any, **settings: Any) -> tuple[Net, Any]:
    batches = torch.randn(NUM_STEPS, 4, 6, generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(strategy=strategy, devices=1, max_epochs=1, **settings)
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    return model, trainer


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """The first training of a process may round differently from all later ones, with or without a strategy."""
    fitted(Net(), DDPStrategy(process_group_backend="gloo"))


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}], ids=str)
def test_a_verified_training_is_the_same_as_ddp(settings):
    expected, plain = fitted(Net(), DDPStrategy(process_group_backend="gloo"), **settings)
    found, trainer = fitted(Net(), OutOfOrderStrategy(**GIVEN, verify_every=2), **settings)
    assert same_bits(found.state_dict(), expected.state_dict())
    assert (found.num_calls, found.losses) == (expected.num_calls, expected.losses)
    assert trainer.callback_metrics == plain.callback_metrics
    assert same_bits(trainer.optimizers[0].state_dict(), plain.optimizers[0].state_dict())


def test_a_parameter_read_before_its_update_is_noticed():
    with pytest.raises(SyncError, match="the loss loss differs from a plain step"):
        fitted(ReadsTooEarly(), OutOfOrderStrategy(**GIVEN, verify_every=2))


def test_the_same_model_passes_where_updates_do_not_wait():
    fitted(ReadsTooEarly(), OutOfOrderStrategy(0, False, 100, verify_every=2))


def test_a_gradient_that_was_reduced_wrongly_is_named(monkeypatch):
    copy = Reducer._copy

    def twice(self: Reducer, layer: int) -> None:
        copy(self, layer)
        if self.layers[layer].name == "body.4":
            self.memory.views[layer][0].mul_(2)

    monkeypatch.setattr(Reducer, "_copy", twice)
    with pytest.raises(SyncError, match=r"the gradient of body\.4\.weight differs from a plain step by up to "):
        fitted(Net(), OutOfOrderStrategy(**GIVEN, verify_every=1))


def test_an_update_with_other_settings_is_named(monkeypatch):
    def later(self: PendingStep, *arguments: Any) -> None:
        made(self, *arguments)
        self._settings = [{**settings, "lr": settings["lr"] * 0.9} for settings in self._settings]

    made = PendingStep.__init__
    monkeypatch.setattr(PendingStep, "__init__", later)
    with pytest.raises(SyncError, match=r"the updated parameter body\.0\.weight differs from a plain step"):
        fitted(Net(), OutOfOrderStrategy(**GIVEN, verify_every=1))


def test_an_update_that_is_lost_is_an_error_even_without_verifying(monkeypatch):
    take = PendingStep.take

    def some(self: PendingStep, parameters: Any) -> None:
        take(self, [one for one in parameters if one.shape != (2, 12)])

    monkeypatch.setattr(PendingStep, "take", some)
    with pytest.raises(SyncError, match="The updates of 1 parameters were not taken"):
        fitted(Net(), OutOfOrderStrategy(**GIVEN))


@pytest.mark.parametrize("value", [-1, True, 2.5, "always"])
def test_a_wrong_interval_is_refused(value):
    with pytest.raises(ValueError, match=r"verify_every is .*; expected a whole number from 0 on"):
        OutOfOrderStrategy(verify_every=value)
