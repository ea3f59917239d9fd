"""`BatchEcho`: a loader that is four times slower than the training steps, used as it is and with echoes.

python examples/batch_echo.py
"""

from __future__ import annotations

import time
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_gpufeed import BatchEcho

STEP_SECONDS, LOAD_SECONDS = 0.01, 0.04


def make_points(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """2 000 points around five centres."""
    centres = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (2000,), generator=generator)
    return centres[labels] + 1.5 * torch.randn(2000, 20, generator=generator), labels


class SlowStorage(Dataset):
    """A batch of 50 takes 40 ms to arrive."""

    def __init__(self) -> None:
        self.points, self.labels = make_points(seed=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices):
        time.sleep(LOAD_SECONDS)
        return [(self.points[i], self.labels[i]) for i in indices]


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))

    def training_step(self, batch, batch_idx):
        time.sleep(STEP_SECONDS)  # a larger model
        points, labels = batch
        return F.cross_entropy(self.layers(points), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


def train(callbacks) -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        max_epochs=2,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(SlowStorage(), batch_size=50, shuffle=True, num_workers=1, persistent_workers=True)
    begin = time.perf_counter()
    trainer.fit(model := Classifier(), loader)
    seconds = time.perf_counter() - begin
    points, labels = make_points(seed=2)  # not trained on
    loss = F.cross_entropy(model.layers(points), labels).item()
    print(f"  {trainer.global_step} steps in {seconds:.1f} s, loss on other points {loss:.3f}")


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|torch")
    print("as it is")
    train([])
    print("with BatchEcho: the steps that used to wait train on the batch at hand")
    train([BatchEcho("auto", max_echo_factor=5, scale_lr="keep")])


if __name__ == "__main__":
    main()
