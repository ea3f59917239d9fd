"""`H5Loader` in a hand-written loop, stopped in the middle of an epoch and continued exactly where it was.

python examples/plain_pytorch_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F

from lightning_gpufeed import H5Loader


def make_file(path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 2000)
    # Each class is a bright quarter of the picture, under noise.
    images = rng.integers(0, 160, (2000, 1, 16, 16), dtype=np.uint8)
    for quarter in range(4):
        rows, columns = divmod(quarter, 2)
        images[labels == quarter, :, rows * 8 : rows * 8 + 8, columns * 8 : columns * 8 + 8] += 60
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", data=images, chunks=(500, 1, 16, 16))
        h5_file.create_dataset("labels", data=labels)


def train(model, optimizer, loader, most_steps=None):
    for step, batch in enumerate(loader, start=1):
        images = batch["images"].float() / 255
        loss = F.cross_entropy(model(images.flatten(1)), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == most_steps:
            break
    return loss.item()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.h5")
        make_file(path)
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with H5Loader(path, batch_size=64, seed=1) as loader:
            for epoch in range(3):
                print(f"epoch {epoch}: loss {train(model, optimizer, loader):.3f}")
            train(model, optimizer, loader, most_steps=10)
            position = loader.state_dict()
            print(f"stopped in epoch {position['epoch']} after {position['samples_consumed']} samples")
        # A new process would begin here, perhaps with a larger batch.
        with H5Loader(path, batch_size=128) as loader:
            loader.load_state_dict(position)
            print(f"the rest of the epoch in batches of 128: loss {train(model, optimizer, loader):.3f}")
            print(f"waited for data {100 * loader.statistics.wait_share:.0f} % of it")


if __name__ == "__main__":
    main()
