"""One training before and after: rows of an HDF5 file in random order by a DataLoader, then `H5ImageDataModule`.

python benchmarks/before_after.py --plot benchmarks/before_after.svg

Both train the same network on the same batches in the same order, with the file in the page cache; weights are compared
bit by bit at the end. A clock notes when each step waited for its batch and when it worked on it (copy to the device,
preparation, forward, backward, update). Of each training the epoch of median length is taken, without the first one;
the picture shows the same stretch of time of both, from the beginning of that epoch.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import lightning
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_gpufeed import H5ImageDataModule, H5Loader

SHAPE, CHUNK_ROWS, NUM_CLASSES = (3, 64, 64), 64, 10
WAIT, WORK, INK = "#b9bec6", "#009e73", "#222"


# What is trained -------------------------------------------------------------------------------------------------


def make_file(path: Path, num_samples: int) -> None:
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (num_samples, *SHAPE), np.uint8, chunks=(CHUNK_ROWS, *SHAPE))
        for start in range(0, num_samples, CHUNK_ROWS):
            rows = min(CHUNK_ROWS, num_samples - start)
            images[start : start + rows] = random.integers(0, 256, (rows, *SHAPE), np.uint8)
        file["labels"] = random.integers(0, NUM_CLASSES, num_samples)


class Rows(Dataset):
    """What is usually written for such a file: one row for each index, scaled as ToTensor does."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None
        with h5py.File(path) as file:
            self.num_samples = len(file["labels"])

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:  # in the worker
            self.file = h5py.File(self.path)
        image = torch.from_numpy(self.file["images"][index]).float() / 255
        return image, int(self.file["labels"][index])


class SameOrder(Sampler):
    """The random order that `H5Loader` draws, so that both trainings see the same batches."""

    def __init__(self, path: Path, batch_size: int) -> None:
        self.path, self.batch_size, self.epoch = path, batch_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        with H5Loader(self.path, self.batch_size) as loader:
            yield from loader.order(self.epoch).tolist()

    def __len__(self) -> int:
        with H5Loader(self.path, self.batch_size) as loader:
            return loader.num_samples


class Network(LightningModule):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        # Small, so that a step takes one core some ten milliseconds.
        patches = (SHAPE[1] // 8) * (SHAPE[2] // 8)
        self.layers = nn.Sequential(
            nn.Conv2d(SHAPE[0], 16, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(16 * patches, NUM_CLASSES)
        )
        self._clock = [clock]  # no part of the model

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._clock[0].batch_is_there()
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


# What is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Seconds since the epoch began: asked for a batch, got it, done with it."""

    asked: float
    got: float
    done: float


@dataclass(frozen=True)
class Epoch:
    steps: list[Step]
    num_samples: int

    @property
    def seconds(self) -> float:
        return self.steps[-1].done

    @property
    def wait_share(self) -> float:
        return sum(step.got - step.asked for step in self.steps) / self.seconds

    @property
    def samples_per_second(self) -> float:
        return self.num_samples / self.seconds

    @property
    def work_seconds(self) -> float:
        return statistics.median(step.done - step.got for step in self.steps)


class Clock(Callback):
    """Notes when a step waited and when it worked; on a CUDA device a step ends when the device is done with it."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps: list[Step] = []
        self._num_samples = 0
        self._begin = self._asked = self._got = time.perf_counter()

    def batch_is_there(self) -> None:
        self._got = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        done = time.perf_counter()
        self._steps.append(Step(self._asked - self._begin, self._got - self._begin, done - self._begin))
        self._num_samples += len(batch[1])
        self._asked = done

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs.append(Epoch(self._steps, self._num_samples))

    def median(self) -> Epoch:
        """The epoch of median length, without the first one."""
        rest = sorted(self.epochs[1:], key=lambda epoch: epoch.seconds)
        return rest[(len(rest) - 1) // 2]


def train(num_epochs: int, **data: Any) -> tuple[Epoch, torch.Tensor]:
    """The epoch to show, and all weights at the end."""
    seed_everything(0, verbose=False)
    clock = Clock()
    model = Network(clock)
    trainer = Trainer(
        max_epochs=num_epochs,
        accelerator="auto",
        devices=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, **data)
    return clock.median(), nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


# The picture -----------------------------------------------------------------------------------------------------

LEFT, WIDTH, BESIDE, BAR = 16, 640, 232, 44


def draw(rows: list[tuple[str, Epoch]], title: str) -> str:
    """A time line for each training, over the same stretch of time."""
    shown = min(1.0, *(epoch.seconds for _, epoch in rows))
    width, top, gap = LEFT + WIDTH + BESIDE, 92, 84
    height = top + gap * len(rows) + 10
    parts = [
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="bold">{title}</text>',
        _key(LEFT, 40, WAIT, "waits for data"),
        _key(LEFT + 140, 40, WORK, "computes"),
    ]
    for number, (name, epoch) in enumerate(rows):
        parts.append(_time_line(name, epoch, shown, top + gap * number))
    bottom = top + gap * (len(rows) - 1) + BAR
    for mark in range(5):
        x = LEFT + WIDTH * mark / 4
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="{INK}"/>')
        anchor = "start" if mark == 0 else "end" if mark == 4 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{shown * mark / 4:.2g} s</text>')
    said = "; ".join(f"{name} waits {epoch.wait_share:.0%} of the time" for name, epoch in rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}" role="img">\n'
        f"<title>One training before and after: {said}</title>\n"
        f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _key(x: int, y: int, color: str, name: str) -> str:
    return f'<rect x="{x}" y="{y}" width="14" height="14" fill="{color}"/><text x="{x + 20}" y="{y + 12}">{name}</text>'


def _time_line(name: str, epoch: Epoch, shown: float, top: int) -> str:
    parts = [
        f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{name}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{BAR}" fill="{WAIT}"/>',
    ]
    for step in epoch.steps:
        begin, end = step.got / shown, min(step.done / shown, 1.0)
        if begin < 1.0:
            parts.append(
                f'<rect x="{LEFT + WIDTH * begin:.2f}" y="{top}" width="{max(WIDTH * (end - begin), 0.3):.2f}" '
                f'height="{BAR}" fill="{WORK}"/>'
            )
    beside = LEFT + WIDTH + 14
    parts.append(
        f'<text x="{beside}" y="{top + 18}" font-size="15" font-weight="bold">'
        f"{epoch.samples_per_second:,.0f} samples/s</text>"
    )
    parts.append(f'<text x="{beside}" y="{top + 37}">waits {epoch.wait_share:.0%} of the time</text>')
    return "\n".join(parts)


# The script ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="SVG", help="write the picture there")
    parser.add_argument("--samples", type=int, default=24_576, help="of the file (default: 24576)")
    parser.add_argument("--batch-size", type=int, default=256, help="of a step (default: 256)")
    parser.add_argument("--epochs", type=int, default=4, help="of each training, the first not counted (default: 4)")
    parser.add_argument("--workers", type=int, default=2, help="of the DataLoader (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for a training on the CPU (default: 1)")
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error(f"--epochs is {options.epochs}; expected 2 or more, as the first one is not counted")
    warnings.filterwarnings("ignore", module="lightning|pytorch_lightning|torch")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.h5")
        make_file(path, options.samples)
        usual = DataLoader(
            Rows(path),
            options.batch_size,
            sampler=SameOrder(path, options.batch_size),
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
        )
        before, weights = train(options.epochs, train_dataloaders=usual)
        after, same = train(options.epochs, datamodule=H5ImageDataModule(path, batch_size=options.batch_size))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {device}; torch {torch.__version__}, lightning "
        f"{lightning.__version__}, h5py {h5py.__version__}, Python {platform.python_version()}. {options.samples:,} x "
        f"3x64x64 uint8, {CHUNK_ROWS} in a chunk, batches of {options.batch_size}, {options.epochs} epochs; "
        f"{time.perf_counter() - begin:.0f} s in all."
    )
    is_same = torch.equal(weights, same)  # on some devices not even the same training twice is
    print(f"weights at the end: {'equal bit by bit' if is_same else 'DIFFERENT'}\n")
    workers = f"{options.workers} worker{'s' * (options.workers != 1)}"
    rows = [(f"before: DataLoader + h5py, {workers}", before), ("after: H5ImageDataModule", after)]
    print("|   | an epoch, s | waits | samples/s | a step's work, ms |\n|---|---|---|---|---|")
    for name, epoch in rows:
        print(
            f"| {name} | {epoch.seconds:.2f} | {epoch.wait_share:.0%} | {epoch.samples_per_second:,.0f} | "
            f"{1e3 * epoch.work_seconds:.1f} |"
        )
    print(f"\n{after.samples_per_second / before.samples_per_second:.1f} times as many samples in a second")
    if options.plot:
        title = "The same training, the same batches" + ", the same weights" * is_same
        Path(options.plot).write_text(draw(rows, title))


if __name__ == "__main__":
    main()
