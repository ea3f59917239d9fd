"""Trains over a file of each size given and prints the memory of this process that no file backs, per epoch.

Run by test_h5_image.py in a process of its own: `python memory_worker.py FOLDER NUM_SAMPLES ...`. Prints JSON:
per size the KiB of RssAnon at each epoch's end. Pages of the mapped file are counted apart by the kernel.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import h5py
import lightning.pytorch as pl
import torch

from lightning_gpufeed import H5ImageDataModule
from tests.datamodules.models import make_trainer

BATCH_SIZE, SHAPE = 256, (3, 64, 64)


def anonymous_kib() -> int:
    """Resident memory without the pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Mean(pl.LightningModule):
    """As little work as possible on every image."""

    def __init__(self) -> None:
        """One weight per channel."""
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.kib: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Look at the images."""
        return self.layer(batch.mean((2, 3))).mean()

    def on_train_epoch_end(self) -> None:
        """Measure."""
        self.kib.append(anonymous_kib())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train over each file."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*LeafSpec|.*Skipping val loop|GPU available but not used")
    measured = {}
    for num_samples in map(int, sys.argv[2:]):
        path = Path(sys.argv[1]) / f"{num_samples}.h5"
        with h5py.File(path, "w") as h5_file:
            # Space is taken but not written to: the file has holes, which read as zeros.
            dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            dcpl.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            dcpl.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            space = h5py.h5s.create_simple((num_samples, *SHAPE))
            h5py.h5d.create(h5_file.id, b"images", h5py.h5t.NATIVE_UINT8, space, dcpl)
        model = Mean()
        datamodule = H5ImageDataModule(path, batch_size=BATCH_SIZE)
        make_trainer(max_epochs=4).fit(model, datamodule)
        measured[num_samples] = model.kib
        path.unlink()
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
