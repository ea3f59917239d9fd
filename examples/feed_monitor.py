"""`FeedMonitor`: why does this training wait? Then the same training after the first cure.

    python examples/feed_monitor.py [--page feed.html]

The Dataset reads single images out of chunks of 32, as files have it that were written with HDF5's own choice of
chunks: for each image that is used the other 31 are read too.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_gpufeed import FeedMonitor, H5DataModule

NUM_IMAGES, SHAPE, STEP_SECONDS = 2048, (3, 128, 128), 0.005


def write_images(path: Path) -> Path:
    """A file as it is often found."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as h5_file:
        images = h5_file.create_dataset("images", (NUM_IMAGES, *SHAPE), np.uint8, chunks=(32, *SHAPE))
        for begin in range(0, NUM_IMAGES, 32):
            images[begin : begin + 32] = random.integers(0, 256, (32, *SHAPE), dtype=np.uint8)
    return path


class Images(Dataset):
    """As it is often written: the file is opened in the worker, an image is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.images = path, None

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index):
        if self.images is None:
            self.images = h5py.File(self.path)["images"]
        return {"images": torch.from_numpy(self.images[index])}


class Model(LightningModule):
    """The pause stands for a device that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        time.sleep(STEP_SECONDS)
        return self.scale * batch["images"][:, 0, 0, 0].float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def train(page: Path | None = None, **data) -> None:
    """Two epochs, watched: the second has its files in memory."""
    trainer = Trainer(
        max_epochs=2,
        callbacks=[FeedMonitor(report_path=page)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    begin = time.perf_counter()
    trainer.fit(Model(), **data)
    print(f"  {trainer.global_step} steps in {time.perf_counter() - begin:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the page of the slow training here")
    page = parser.parse_args().page
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").handlers[:] = [logging.StreamHandler()]
    with tempfile.TemporaryDirectory() as folder:
        path = write_images(Path(folder) / "train.h5")
        print("as it is often written")
        loader = DataLoader(Images(path), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)
        train(page, train_dataloaders=loader)
        print("after the first cure")
        train(datamodule=H5DataModule(path, batch_size=32))


if __name__ == "__main__":
    main()
