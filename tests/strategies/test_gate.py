from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpufeed.strategies.gate import why_not_overlap


class Model(pl.LightningModule):
    def __init__(self, make_optimizer: Any = optim.SGD) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.make_optimizer = make_optimizer

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters(), lr=0.1)


class Asking(Callback):
    """Asks in every step, as the strategy does."""

    def __init__(self) -> None:
        self.reasons: list[str | None] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.reasons.append(why_not_overlap(trainer, pl_module, optimizer))


def reasons(model: Model, **options: Any) -> list[str | None]:
    """What is said in each of two steps of a real training."""
    asking = Asking()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[asking],
        **options,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(4, 2)), batch_size=2))
    return asking.reasons


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true", "bf16-true"])
def test_an_ordinary_training_overlaps(precision):
    assert reasons(Model(), precision=precision) == [None, None]


def test_a_scheduler_and_accumulation_are_ordinary():
    class Scheduled(Model):
        def configure_optimizers(self) -> Any:
            optimizer = optim.Adam(self.parameters())
            return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 1)]

    assert reasons(Scheduled(), accumulate_grad_batches=2) == [None]


@pytest.mark.parametrize("algorithm", ["norm", None])
def test_clipping_by_norm_has_to_see_all_gradients(algorithm):
    found = reasons(Model(), gradient_clip_val=0.5, gradient_clip_algorithm=algorithm)
    expected = "clipping by norm has to see all gradients (overlap_clipping=True sends half later, in 32 or 64 bits)"
    assert found == [expected] * 2


def test_clipping_by_value_looks_at_each_number_by_itself():
    assert reasons(Model(), gradient_clip_val=0.5, gradient_clip_algorithm="value") == [None, None]


def test_clipping_by_nothing_is_none():
    assert reasons(Model(), gradient_clip_val=0.0) == [None, None]


def test_clipping_of_ones_own_may_need_all_gradients():
    class Clipping(Model):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
            self.clip_gradients(optimizer, 0.5, "norm")

    assert reasons(Clipping()) == ["configure_gradient_clipping is overridden and may need all gradients"] * 2


def test_optimizers_that_look_at_several_parameters_are_named():
    class Own(optim.SGD):
        pass

    assert reasons(Model(Own)) == ["Own may use several parameters at once"] * 2


def test_a_hook_on_the_step_is_named():
    def hooked(parameters: Any, lr: float) -> optim.Optimizer:
        optimizer = optim.SGD(parameters, lr)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    assert reasons(Model(hooked)) == ["SGD has hooks on its step"] * 2


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).sum())
            optimizer.step()


def test_manual_optimization_is_named():
    assert reasons(Manual()) == ["optimization is manual"] * 2


def test_several_optimizers_are_named():
    model = Manual()
    model.configure_optimizers = lambda: [optim.SGD([one], 0.1) for one in model.parameters()]
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.strategy.connect(model)
    trainer.strategy.optimizers = model.configure_optimizers()
    model.automatic_optimization = True
    found = why_not_overlap(trainer, model, trainer.strategy.optimizers[0])
    assert found == "there are several optimizers"


class OwnPrecision(MixedPrecision):
    """May do anything in a step."""


def test_a_precision_of_ones_own_may_take_the_step_in_its_own_way():
    found = reasons(Model(), plugins=[OwnPrecision("bf16-mixed", "cpu")])
    assert found == ["OwnPrecision may take the step in its own way"] * 2


def test_a_scaler_has_to_see_all_gradients():
    scaler = torch.amp.GradScaler("cpu")
    found = reasons(Model(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert found == ["16-mixed has to see all gradients before it knows whether the step is skipped"] * 2
