"""A user's script, started in many ways by test_launchers.py: it trains on two ranks, whoever starts them.

    python launch_worker.py PLAN.json

The plan names trainings, which follow one another in the same processes. What each has made is saved by every process
that runs the whole script, as OUT/<training>.<rank>.pt; Lightning's own files go to OUT/<training>.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, distributed, nn

from lightning_gpufeed import H5ImageDataModule, OutOfOrderStrategy
from tests.datamodules.models import NUM_CLASSES, make_trainer, state_of

GIVEN: dict[str, Any] = {"reverse_first_k": 3, "cross_iteration": True, "bucket_bytes": 200}
PIPELINE: dict[str, Any] = {"pipeline_size": 2, "num_microbatches": 2, "layers_per_stage": 2}


class Net(pl.LightningModule):
    """Layers in a row, with dropout, and Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 12})
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.layers = nn.Sequential(
                nn.Flatten(),
                nn.Linear(72, 12),
                nn.ReLU(),
                nn.Dropout(0.2),
                nn.Linear(12, 12),
                nn.Tanh(),
                nn.Linear(12, NUM_CLASSES),
            )

    def loss_of(self, batch: Any) -> Tensor:
        """Of images and labels."""
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels % NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log the loss of a step and of an epoch."""
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of all ranks."""
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def strategy_of(name: str) -> Any:
    """What a user writes."""
    return {
        "ddp": "ddp",
        "out of order": OutOfOrderStrategy(**GIVEN),
        "out of order, spawned": OutOfOrderStrategy(start_method="spawn", **GIVEN),
        "out of order, forked": OutOfOrderStrategy(start_method="fork", **GIVEN),
        "by name, forked": "out_of_order_fork",
        "pipeline": OutOfOrderStrategy(**PIPELINE),
        "pipeline, forked": OutOfOrderStrategy(start_method="fork", **PIPELINE),
    }[name]


def train(out: Path, name: str, files: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Two epochs with validation, checkpoints and a logger."""
    pl.seed_everything(3, verbose=False)
    folder = out / name
    model = Net()
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=-1, filename="{epoch}-{step}")
    trainer = make_trainer(
        strategy=strategy_of(name),
        devices=2,
        max_epochs=2,
        callbacks=[saver],
        logger=CSVLogger(folder, "log"),
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    trainer.fit(model, datamodule=H5ImageDataModule(files["train"], val=files["val"], batch_size=4))
    best = Path(saver.best_model_path).name
    metrics = {key: value.clone() for key, value in trainer.callback_metrics.items()}
    return trainer.global_rank, {
        "weights": state_of(trainer, model)["weights"],
        "metrics": metrics,
        "best": best,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "launcher": type(trainer.strategy.launcher).__name__,
        "process": os.getpid(),
    }


def main() -> None:
    """All trainings of the plan."""
    warnings.simplefilter("ignore")  # Lightning's, about a machine as small as this
    plan = json.loads(Path(sys.argv[1]).read_text())
    out = Path(plan["out"])
    for name in plan["trainings"]:
        rank, result = train(out, name, plan["files"])
        torch.save(result, out / f"{name}.{rank}.pt")
        print(f"{name}: rank {rank} has ended", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
