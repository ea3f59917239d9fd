"""`OOMRecovery`: memory runs out in the middle of a training, for real, and the training ends as if it had not.

From its fifth batch on the process may have 55 MiB more than it has. An activation of a batch takes 40 MiB, and there
are two of them before backward begins. Linux only.

python examples/oom_recovery.py
"""

from __future__ import annotations

import gc
import re
import resource
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_gpufeed import OOMRecovery

NUM_FEATURES, WIDTH = 16, 256
BATCH_SIZE, NUM_BATCHES = 40 * 1024, 10


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(NUM_FEATURES, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
        )

    def training_step(self, batch, batch_idx):
        points, values = batch
        loss = torch.nn.functional.mse_loss(self.layers(points).squeeze(1), values)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class LittleMemory(Callback):
    """Others need the rest of the memory: from one batch on this process may have so much more than it has."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4:
            gc.collect()
            has_now = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
            set_limit(has_now + self.num_bytes)

    def on_train_end(self, trainer, pl_module):
        set_limit(resource.RLIM_INFINITY)


def set_limit(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def train(callbacks) -> tuple[torch.Tensor, float]:
    """The weights it ends with, and the mean loss."""
    seed_everything(0, verbose=False)
    points = torch.randn(BATCH_SIZE * NUM_BATCHES, NUM_FEATURES)
    values = points.sin().sum(1)
    batches = list(zip(points.split(BATCH_SIZE), values.split(BATCH_SIZE), strict=True))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model := Regression(), DataLoader(batches, batch_size=None))
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return weights, float(trainer.callback_metrics["loss"])


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|torch")
    torch.set_num_threads(1)
    print("memory as it is")
    expected, loss = train([])
    print(f"  loss {loss:.6f}")
    print("hardly any memory from the fifth batch on, with OOMRecovery")
    recovery = OOMRecovery()
    weights, loss = train([recovery, LittleMemory(55 * 2**20)])
    for event in recovery.events:
        print(f"  {event}")
    difference = float((weights - expected).norm() / expected.norm())
    print(f"  loss {loss:.6f}; the weights differ by {difference:.1g} of their size")


if __name__ == "__main__":
    main()
