"""`H5DataModule`: three arrays of equal length, a stratified validation split, a transform on the device.

python examples/several_arrays.py
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer

from lightning_gpufeed import H5DataModule


class TwoSensors(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32 + 8, 3)

    def _loss(self, batch):
        features = torch.cat([batch["spectrum"], batch["pressure"]], dim=1)
        return F.cross_entropy(self.layer(features), batch["state"])

    def training_step(self, batch, batch_idx):
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def make_file(path: Path) -> None:
    rng = np.random.default_rng(0)
    state = np.repeat([0, 1, 2], [1400, 400, 200])
    centres = rng.normal(size=(3, 40))
    values = (centres[state] + rng.normal(size=(2000, 40))).astype(np.float32)
    with h5py.File(path, "w") as h5_file:
        h5_file["spectrum"], h5_file["pressure"], h5_file["state"] = values[:, :32], values[:, 32:], state


def add_noise(batch):
    return dict(batch, spectrum=batch["spectrum"] + 0.1 * torch.randn_like(batch["spectrum"]))


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|torch")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sensors.h5")
        make_file(path)
        dm = H5DataModule(path, val=0.2, stratify_by="state", batch_size=50, device_transform=add_noise)
        trainer = Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_model_summary=False)
        trainer.fit(TwoSensors(), datamodule=dm)
        print(f"validation loss {trainer.callback_metrics['val_loss']:.3f}")
        print(f"{dm.feed_statistics().samples_per_second:,.0f} samples/s in the last epoch")


if __name__ == "__main__":
    main()
