"""`OutOfOrderStrategy`: two processes train one network, once under DDP and once out of order, to the same bits.

python examples/out_of_order.py
"""

from __future__ import annotations

import logging
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpufeed import OutOfOrderStrategy


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        widths = [64, *[256] * 6, 10]
        layers = [part for i in range(7) for part in (torch.nn.Linear(widths[i], widths[i + 1]), torch.nn.ReLU())]
        self.layers = torch.nn.Sequential(*layers[:-1])

    def training_step(self, batch, batch_idx):
        points, labels = batch
        loss = F.cross_entropy(self.layers(points), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}]


def train(strategy) -> tuple[Classifier, Trainer]:
    seed_everything(0, verbose=False)
    points = torch.randn(2400, 64)
    data = TensorDataset(points, points[:, :10].argmax(1))
    model = Classifier()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,  # two processes on this machine; usually GPUs on several machines
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=20, shuffle=True))
    return model, trainer


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    usual, _ = train("ddp")
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)  # the strategy says what it has decided
    # With nothing given it measures first, and keeps the usual order where no other is faster, as on one machine.
    other, trainer = train(OutOfOrderStrategy(reverse_first_k=4, cross_iteration=True, bucket_bytes=100_000))
    if trainer.is_global_zero:
        same = all(torch.equal(a, b) for a, b in zip(usual.parameters(), other.parameters(), strict=True))
        loss = trainer.callback_metrics["loss"].item()
        print(f"loss {loss:.4f}; parameters {'are equal bit by bit' if same else 'DIFFER'} to those of DDP")
