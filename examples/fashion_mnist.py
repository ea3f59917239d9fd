"""The main job in one script: real images into chunked uint8 HDF5, then into a Lightning Trainer.

    python examples/fashion_mnist.py [--epochs 3] [--data data]

Fetches Fashion-MNIST, packs it with `gpufeed pack`, looks at it with `gpufeed inspect`, trains a small
convolutional network with `H5ImageDataModule` and prints the test accuracy, the rate of the feed and the share of
the time that the training waited for data. About a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from fetch_fashion_mnist import fetch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from lightning_gpufeed import H5ImageDataModule
from lightning_gpufeed.cli import main as gpufeed

NUM_CLASSES = 10


class SmallConvNet(LightningModule):
    """Two convolutions and two linear layers: 110 thousand parameters."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, num_classes),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self._log_accuracy("val_accuracy", batch)

    def test_step(self, batch, batch_idx):
        self._log_accuracy("test_accuracy", batch)

    def _log_accuracy(self, name, batch):
        images, labels = batch
        self.log(name, (self.model(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(*command: str) -> None:
    """Run a `gpufeed` command in this process, showing it as it would be typed."""
    print(f"\n$ gpufeed {' '.join(command)}", flush=True)
    if gpufeed(list(command)):
        raise SystemExit(1)


def pack(folder: Path, out: Path, split: str) -> None:
    if out.exists():
        print(f"\n{out}: packed before")
    else:
        run("pack", os.path.relpath(folder), os.path.relpath(out), "--split", split, "--shuffle", "--verify")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[1] / "data" / "fashion-mnist")
    options = parser.parse_args()
    # Lightning's hints on logging intervals and loggers are not what this script is about.
    warnings.filterwarnings("ignore", module="lightning|torch|pytorch_lightning")
    begin = time.perf_counter()

    folder = fetch(options.data)
    train, test = options.data / "train.h5", options.data / "test.h5"
    pack(folder, train, "train")
    pack(folder, test, "test")
    run("inspect", os.path.relpath(train))

    print()
    seed_everything(0, verbose=False)
    # One in twelve training images, in the proportions of the classes, watches the training.
    dm = H5ImageDataModule(
        str(train),
        val=5000 / 60000,
        test=str(test),
        batch_size=256,
        mean="auto",
        std="auto",
        num_classes=NUM_CLASSES,
        stratify=True,
    )
    model = SmallConvNet(NUM_CLASSES)
    trainer = Trainer(max_epochs=options.epochs, logger=False, enable_checkpointing=False, enable_model_summary=False)
    fit_begin = time.perf_counter()
    trainer.fit(model, datamodule=dm)
    fit_seconds = time.perf_counter() - fit_begin
    feed = dm.feed_statistics("train")
    (result,) = trainer.test(model, datamodule=dm, verbose=False)

    accuracy, device = 100 * result["test_accuracy"], trainer.strategy.root_device

    print(f"\ntest accuracy          {accuracy:.2f} %   ({options.epochs} epochs, {fit_seconds:.0f} s)")
    print(f"trained at             {feed.samples_per_second:,.0f} samples/s   (last epoch, {device})")
    print(f"the feed could give    {feed.num_samples / feed.produce_seconds:,.0f} samples/s")
    print(f"waited for data        {100 * feed.wait_share:.2f} % of the last epoch")
    print(f"from start to end      {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
