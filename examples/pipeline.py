"""`OutOfOrderStrategy(pipeline_size=2)`: two processes share one network's layers; the same training as on one device.

python examples/pipeline.py
"""

from __future__ import annotations

import logging
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpufeed import OutOfOrderStrategy

MICROBATCHES = 4


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(7)]
        self.model = nn.Sequential(*blocks, nn.Linear(64, 10))  # the only requirement

    def training_step(self, batch, batch_idx):
        points, labels = batch
        loss = F.cross_entropy(self.model(points), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_loader() -> DataLoader:
    points = torch.randn(1280, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(points, points[:, :10].argmax(1)), batch_size=32, shuffle=False)


def train_here() -> Classifier:
    """One process, a loop by hand over the same microbatches."""
    seed_everything(0, verbose=False)
    model = Classifier()
    optimizer = model.configure_optimizers()
    for points, labels in make_loader():
        optimizer.zero_grad()
        for x, y in zip(points.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
            (F.cross_entropy(model.model(x), y) / MICROBATCHES).backward()
        optimizer.step()
    return model


def train_in_pipeline() -> tuple[Classifier, Trainer]:
    seed_everything(0, verbose=False)
    model = Classifier()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,  # two processes on this machine; usually GPUs
        strategy=OutOfOrderStrategy(pipeline_size=2, num_microbatches=MICROBATCHES, layers_per_stage=2),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, make_loader())
    return model, trainer


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)  # the strategy says what it has decided
    shared, trainer = train_in_pipeline()
    if trainer.is_global_zero:
        alone = train_here()
        same = all(torch.equal(a, b) for a, b in zip(shared.parameters(), alone.parameters(), strict=True))
        loss = trainer.callback_metrics["loss"].item()
        print(f"loss {loss:.4f}; parameters {'are equal bit by bit' if same else 'DIFFER'} to those of one process")
