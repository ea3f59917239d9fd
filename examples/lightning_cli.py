"""`LightningCLI`: one `train.py` for all trainings; what they are stands in YAML.

python examples/lightning_cli.py                          # the three commands below, on a small file made for them

python train.py fit --config lightning_cli.yaml
python train.py fit --config lightning_logs/version_0/config.yaml --ckpt_path FILE.ckpt --trainer.max_epochs 4
python train.py test --config lightning_cli.yaml --ckpt_path FILE.ckpt

python train.py fit --config lightning_cli.yaml --config lightning_cli_out_of_order.yaml     # on two devices
python train.py fit --data.help=H5ImageDataModule         # every argument of a part, with what it is
python train.py fit --trainer.callbacks.help=BatchEcho
python train.py fit --trainer.strategy.help=OutOfOrderStrategy
python train.py fit --config lightning_cli.yaml --print_config=comments      # the same as YAML; needs ruamel.yaml
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import tempfile
import warnings
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

import lightning_gpufeed  # noqa: F401  YAML and --help then find its classes by their names alone

CONFIG = Path(__file__).resolve().with_suffix(".yaml")


class Classifier(LightningModule):
    """Classes of small images.

    Args:
        width: Of the hidden layers.
        lr: Learning rate.
    """

    def __init__(self, width: int = 64, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        body = [torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, width), torch.nn.ReLU(), torch.nn.Linear(width, 4)]
        self.model = torch.nn.Sequential(*body)

    def _loss(self, batch, name):
        images, labels = batch
        scores = self.model(images)
        self.log(f"{name}_accuracy", (scores.argmax(1) == labels).float().mean(), prog_bar=True)
        return F.cross_entropy(scores, labels)

    def training_step(self, batch, batch_idx):
        return self._loss(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._loss(batch, "val")

    def test_step(self, batch, batch_idx):
        self._loss(batch, "test")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def train(args: list[str] | None = None) -> LightningCLI:
    """What a train.py does. `args` stands for the command line."""
    return LightningCLI(Classifier, args=args)


def write_images(path: Path, count: int, seed: int) -> None:
    """Noise, with one bright quarter that is the class."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, count)
    images = random.integers(0, 128, (count, 3, 8, 8), dtype=np.uint8)
    for number, label in enumerate(labels):
        images[number, :, 4 * (label // 2) :, 4 * (label % 2) :][:, :4, :4] += 100
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", data=images, chunks=(64, 3, 8, 8))
        h5_file["labels"] = labels


def show() -> None:
    """Fit, go on from the saved configuration, test; in a folder of its own."""
    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|torch|jsonargparse")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, count, seed in (("train", 2000, 0), ("test", 400, 1)):
            write_images(Path(f"{name}.h5"), count, seed)
        config = shlex.quote(str(CONFIG))
        trainer = run(f"fit --config {config}").trainer
        checkpoint = trainer.checkpoint_callback.best_model_path
        run(f"fit --config {trainer.log_dir}/config.yaml --ckpt_path {checkpoint} --trainer.max_epochs 4")
        cli = run(f"test --config {config} --ckpt_path {checkpoint}")
        print(f"accuracy in test: {cli.trainer.callback_metrics['test_accuracy'].item():.1%}")


def run(command: str) -> LightningCLI:
    print(f"$ python train.py {command.replace(str(CONFIG), CONFIG.name)}")
    cli = train(shlex.split(command))
    if command.startswith("fit"):
        print(f"  {cli.trainer.global_step} steps, {cli.trainer.current_epoch} epochs")
    return cli


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train()
    else:
        torch.set_num_threads(1)  # of tensors this small
        logging.getLogger("lightning.pytorch").setLevel(logging.INFO)  # the parts say what they do
        show()
