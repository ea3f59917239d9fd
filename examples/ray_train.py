"""`RayOutOfOrderStrategy`: two workers of Ray Train, once under Ray's strategy and once out of order, to the same bits.

    pip install 'lightning_gpufeed[ray]'
    python examples/ray_train.py

Starts a Ray cluster of its own on this machine, and ends it. On a real one `ray.init()` and the number of workers are
all that changes.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path

import h5py
import numpy as np
import ray.train
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from ray_local import local_ray
from torch import nn

from lightning_gpufeed import H5ImageDataModule
from lightning_gpufeed.strategies.ray import RayOutOfOrderStrategy

NUM_CLASSES, NUM_IMAGES = 10, 2000


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        widths = [28 * 28, *[128] * 3, NUM_CLASSES]
        layers = [part for i in range(4) for part in (nn.Linear(widths[i], widths[i + 1]), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *layers[:-1])

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_accuracy", (self.layers(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def write_images(path: Path) -> Path:
    """Images of 28 x 28, as of Fashion-MNIST: noise, and a bright column that says the class."""
    random = np.random.default_rng(0)
    labels = random.integers(0, NUM_CLASSES, NUM_IMAGES)
    images = random.integers(0, 100, (NUM_IMAGES, 28, 28), dtype=np.uint8)
    images[np.arange(NUM_IMAGES), :, labels * 2 + 3] += 60
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", data=images, chunks=(100, 28, 28))
        h5_file["labels"] = labels
    return path


def fit(strategy, train: str, callbacks: list, checkpoint: str | None = None) -> Classifier:
    """A training as everywhere, but for what is marked."""
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",  # usually "auto", with ScalingConfig(use_gpu=True)
        devices="auto",  # as Ray gives them
        strategy=strategy,
        plugins=[RayLightningEnvironment()],  # for Ray
        callbacks=callbacks,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,  # Ray keeps them
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    dm = H5ImageDataModule(train, val=0.1, batch_size=50, mean="auto", std="auto", num_classes=NUM_CLASSES)
    prepare_trainer(trainer).fit(model, datamodule=dm, ckpt_path=checkpoint)
    return model


def train(config: dict[str, str]) -> None:
    """What every worker runs. Where a worker was lost, all start here again, from the last checkpoint."""
    warnings.filterwarnings("ignore")
    usual = fit(RayDDPStrategy(), config["train"], [])
    if ray.train.get_context().get_world_rank() == 0:
        torch.save(usual.state_dict(), config["usual"])

    kept = ray.train.get_checkpoint()
    with contextlib.nullcontext() if kept is None else kept.as_directory() as folder:
        path = folder and str(Path(folder) / RayTrainReportCallback.CHECKPOINT_NAME)
        fit(RayOutOfOrderStrategy(reverse_first_k=3), config["train"], [RayTrainReportCallback()], path)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, local_ray() as results:
        folder = Path(name)
        result = TorchTrainer(
            train,
            train_loop_config={"train": str(write_images(folder / "train.h5")), "usual": str(folder / "usual.pt")},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=str(results),
                checkpoint_config=CheckpointConfig(num_to_keep=1),
                failure_config=FailureConfig(max_failures=2),  # of workers
            ),
        ).fit()
        usual = torch.load(folder / "usual.pt")
        with result.checkpoint.as_directory() as kept:
            checkpoint = torch.load(Path(kept) / RayTrainReportCallback.CHECKPOINT_NAME, weights_only=False)
    same = all(torch.equal(usual[name], checkpoint["state_dict"][name]) for name in usual)
    print(f"{result.metrics['step']} steps, validation accuracy {100 * result.metrics['val_accuracy']:.1f} %")
    print(f"parameters {'are equal bit by bit' if same else 'DIFFER'} to those of RayDDPStrategy")


if __name__ == "__main__":
    main()
