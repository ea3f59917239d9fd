"""`OutOfOrderStrategy` with the other parts, what it keeps in memory, and which steps may cross, on one rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_gpufeed import BatchEcho, FeedMonitor, H5ImageDataModule, OOMRecovery, OutOfOrderStrategy
from tests.datamodules.models import Recorder, make_trainer, same_bits, write_images

GIVEN: dict[str, Any] = {"reverse_first_k": 1, "cross_iteration": True, "bucket_bytes": 100}
NUM_SAMPLES = 20


def trained(train: Path, strategy: Any, callbacks: list[Any]) -> tuple[Recorder, pl.Trainer]:
    model = Recorder(72)
    trainer = make_trainer(strategy=strategy, callbacks=callbacks, max_epochs=2)
    trainer.fit(model, datamodule=H5ImageDataModule(str(train), val=0.2, batch_size=4))
    return model, trainer


@pytest.mark.parametrize("order", [1, -1], ids=["monitor last", "monitor first"])
def test_data_echo_and_monitor_give_the_same_training_as_under_ddp(tmp_path, order):
    train = write_images(tmp_path / "train.h5", NUM_SAMPLES)

    def callbacks() -> list[Any]:
        return [BatchEcho(echo_factor=2, num_splits=2, scale_lr="keep"), FeedMonitor()][::order]

    expected, plain = trained(train, DDPStrategy(process_group_backend="gloo"), callbacks())
    found, trainer = trained(train, OutOfOrderStrategy(**GIVEN, verify_every=3), callbacks())
    assert found.trained == expected.trained
    assert found.losses == expected.losses
    assert found.evaluated == expected.evaluated
    assert trainer.global_step == plain.global_step == 32
    assert same_bits(found.state_dict(), expected.state_dict())
    assert same_bits(trainer.optimizers[0].state_dict(), plain.optimizers[0].state_dict())


def test_recovery_from_out_of_memory_says_that_it_cannot_repeat_such_a_step(tmp_path):
    train = write_images(tmp_path / "train.h5", NUM_SAMPLES)
    message = "OOMRecovery cannot work here: OutOfOrderStrategy sends gradients while backward still runs"
    with pytest.raises(ValueError, match=message):
        trained(train, OutOfOrderStrategy(**GIVEN), [OOMRecovery()])


class Deep(pl.LightningModule):
    """Six layers of the same size: what one of them keeps while it waits is known."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(16, 16), nn.Tanh())])
        self.peaks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        sync = self.trainer.strategy.gradient_sync
        self.peaks.append(sync.peak_deferred_bytes)
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


PER_LAYER = 2 * 8 * 16 * 4
"""Input and output gradient of 8 rows."""


@pytest.mark.parametrize(("cap", "peak"), [(None, 6 * PER_LAYER), (3 * PER_LAYER, 3 * PER_LAYER), (0, 0)])
def test_what_waits_is_never_above_the_cap_and_its_peak_is_said(cap, peak, caplog):
    caplog.set_level(logging.INFO)
    model = Deep()
    strategy = OutOfOrderStrategy(6, True, 100, memory_cap_bytes=cap)
    loader = torch.utils.data.DataLoader([torch.randn(8, 16) for _ in range(5)], batch_size=None)
    make_trainer(strategy=strategy, max_epochs=1).fit(model, loader)
    assert max(model.peaks) == model.peaks[-1] == peak
    said = [record.getMessage() for record in caplog.records if "kept at most" in record.getMessage()]
    limit = "." if cap is None else f", of {cap / 1e6:.4g} MB allowed."
    line = f"OutOfOrderStrategy: weight gradients that waited kept at most {peak / 1e6:.4g} MB alive{limit}"
    assert said == ([line] if peak else [])


class Crossings(pl.Callback):
    """Notes whether each step could be taken in the next forward."""

    def __init__(self) -> None:
        self.noted: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.noted.append(trainer.strategy.gradient_sync.can_cross)


@pytest.mark.parametrize(
    ("settings", "can_cross"),
    [({}, True), ({"gradient_clip_val": 0.1}, False)],
    ids=["plain", "clipped by norm"],
)
def test_a_step_that_has_to_see_all_gradients_is_never_said_to_be_able_to_cross(settings, can_cross):
    crossings, strategy = Crossings(), OutOfOrderStrategy(6, True, 100)
    loader = torch.utils.data.DataLoader([torch.randn(8, 16) for _ in range(3)], batch_size=None)
    make_trainer(strategy=strategy, max_epochs=1, callbacks=[crossings], **settings).fit(Deep(), loader)
    assert crossings.noted == [can_cross] * 3
