"""Six ways to feed a training, each slow (or not) for a reason of its own, and the cure of each.

Used by `benchmarks/feed_monitor.py`, which tries the advice, and by the tests of FeedMonitor, which ask for the
verdict. All read the same uint8 images from HDF5, as users write it: a Dataset that opens the file in the worker.
The step is a pause: it stands for a device that computes while the host's cores are free.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpufeed import H5DataModule

SAMPLE_SHAPE = (3, 160, 160)
CHUNK_SAMPLES = 32


def write_file(
    path: Path,
    num_samples: int,
    rows_per_chunk: int,
    transform: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Path:
    """Random images, `rows_per_chunk` of them in a chunk."""
    random = np.random.default_rng(0)
    dtype = np.uint8 if transform is None else np.float32
    with h5py.File(path, "w") as h5_file:
        shape = (num_samples, *SAMPLE_SHAPE)
        h5_dataset = h5_file.create_dataset("images", shape, dtype, chunks=(rows_per_chunk, *SAMPLE_SHAPE))
        for begin in range(0, num_samples, CHUNK_SAMPLES):
            stop = min(num_samples, begin + CHUNK_SAMPLES)
            images = random.integers(0, 256, (stop - begin, *SAMPLE_SHAPE), dtype=np.uint8)
            h5_dataset[begin:stop] = images if transform is None else [transform(image) for image in images]
    return path


class Images(Dataset[torch.Tensor]):
    """Images of an HDF5 file, opened where they are read."""

    def __init__(self, path: Path, transform: Callable[[np.ndarray], np.ndarray] | None = None) -> None:
        self.path, self.transform = path, transform
        self.images: Any = None
        with h5py.File(path) as h5_file:
            self.length = len(h5_file["images"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.images is None:
            self.images = h5py.File(self.path)["images"]
        image = self.images[index]
        return torch.from_numpy(image if self.transform is None else self.transform(image))


def to_float(image: np.ndarray) -> np.ndarray:
    """What most code does."""
    return image.astype(np.float32) / 255


def heavy(image: np.ndarray) -> np.ndarray:
    """A transform that computes: colour curves and noise-free blur, in place to keep the kernel out of it."""
    values = image.astype(np.float32)
    values /= 255
    for _ in range(4):
        np.power(values, 0.9, out=values)
        values[:, 1:-1] += 0.25 * values[:, 2:]
        np.tanh(values, out=values)
    return values


def to_float_batch(images: torch.Tensor) -> torch.Tensor:
    """`to_float` for a whole batch, in the step."""
    return images.float().div_(255)


class PauseModel(pl.LightningModule):
    """A step that takes a known time and no core, beside what was moved into it."""

    def __init__(self, seconds: float, moved: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.moved = moved
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.moved is not None:
            self.moved(batch["images"] if isinstance(batch, dict) else batch)
        time.sleep(self.seconds)
        return self.scale * 0.5

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Pipeline:
    """A way to feed.

    Attributes:
        name: What it is.
        expected: The verdict's cause.
        rows_per_chunk: Layout of the file.
        transform: In the worker.
        num_workers: Of the DataLoader.
        batch_size: Of the DataLoader.
        step_seconds: The pause that stands for the step.
        moved: What the step does to a batch beside that.
        stored: A transform whose results the file holds.
        is_own: Whether the file is fed by H5DataModule.
        cures: What each cure changes, as fields of this class, by its name.
    """

    name: str
    expected: str
    rows_per_chunk: int = 1
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    num_workers: int = 2
    batch_size: int = 32
    step_seconds: float = 0.004
    is_own: bool = False
    moved: Callable[[torch.Tensor], torch.Tensor] | None = None
    stored: Callable[[np.ndarray], np.ndarray] | None = None
    cures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def cured(self, name: str) -> Pipeline:
        """The same after a cure."""
        return dataclasses.replace(self, **self.cures[name])

    def file(self, folder: Path, num_samples: int) -> Path:
        """Its file, written once."""
        kind = "images" if self.stored is None else self.stored.__name__
        path = folder / f"{kind}_{num_samples}_{self.rows_per_chunk}.h5"
        return path if path.exists() else write_file(path, num_samples, self.rows_per_chunk, self.stored)

    def data(self, folder: Path, num_samples: int) -> dict[str, Any]:
        """Its loader or DataModule, as `Trainer.fit` takes it."""
        path = self.file(folder, num_samples)
        if self.is_own:
            return {"datamodule": H5DataModule(path, keys=["images"], batch_size=self.batch_size, drop_last=True)}
        return {"train_dataloaders": self._loader(path)}

    def _loader(self, path: Path) -> DataLoader[torch.Tensor]:
        return DataLoader(
            Images(path, self.transform),
            batch_size=self.batch_size,
            shuffle=True,
            num_workers=self.num_workers,
            drop_last=True,
            persistent_workers=self.num_workers > 0,
        )

    def model(self) -> PauseModel:
        """Its model."""
        return PauseModel(self.step_seconds, self.moved)


_OWN: dict[str, Any] = {"is_own": True, "num_workers": 0, "transform": None}

PIPELINES = [
    Pipeline("page-cached rows", "kernel-bound", step_seconds=0.001, cures={"H5DataModule": _OWN}),
    Pipeline(
        "chunked file, random rows",
        "read amplification",
        rows_per_chunk=CHUNK_SAMPLES,
        cures={"H5DataModule": _OWN, "chunk order": {"rows_per_chunk": 1}},
    ),
    Pipeline(
        "uint8 made float32 in the worker",
        "conversion on the host",
        transform=to_float,
        cures={
            "uint8 on the host": {"transform": None, "moved": to_float_batch},
            "H5DataModule": {**_OWN, "moved": to_float_batch},
        },
    ),
    Pipeline(
        "heavy float transform",
        "transform-bound",
        transform=heavy,
        cures={"transform once": {"transform": None, "stored": heavy}},
    ),
    Pipeline(
        "six workers on two cores",
        "too many workers",
        transform=heavy,
        num_workers=6,
        cures={"2 workers": {"num_workers": 2}},
    ),
    Pipeline("slow step, fast loader", "compute-bound", step_seconds=0.06, batch_size=8),
]
