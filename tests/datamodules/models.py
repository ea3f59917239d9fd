"""Small files, models and Trainers for the tests of the DataModules; also imported by the scripts run as real ranks.

The label of a sample is its number in the file. A model that writes down the labels it is given has written down
which samples it saw, in which order; for the loss the number is taken modulo three.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import registry
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch.utils.data import Sampler

from lightning_gpufeed.hdf5.order import FullShuffle, Shuffle

NUM_CLASSES = 3

# Every Trainer looks through all installed packages for callbacks that they bring along: in most tests that is a
# fifth of the time of a training, and what is installed does not change while tests run.
registry.entry_points = functools.cache(registry.entry_points)


def write_images(
    path: Path,
    num_samples: int,
    *,
    sample_shape: tuple[int, ...] = (9, 8),  # above 64 bytes: smaller rows are kept in memory
    seed: int = 0,
    storage: str = "raw",
    images: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    keys: tuple[str, str] = ("images", "labels"),
    attributes: Mapping[str, Any] | None = None,
    mode: str = "w",
) -> Path:
    """Write random uint8 images, and labels that number them."""
    if images is None:
        images = np.random.default_rng(seed).integers(0, 256, (num_samples, *sample_shape), dtype=np.uint8)
    rows = max(1, min(num_samples, 5))
    with h5py.File(path, mode) as h5_file:
        h5_dataset = h5_file.create_dataset(
            keys[0], data=images, chunks=(rows, *images.shape[1:]), compression="gzip" if storage == "gzip" else None
        )
        h5_dataset.attrs.update(attributes or {})
        if "scale" in (attributes or {}):
            h5_file.attrs["gpufeed_format"] = 1  # elsewhere the attribute may mean anything
        h5_file[keys[1]] = np.arange(num_samples) if labels is None else labels
    return path


def read(path: Path, key: str) -> torch.Tensor:
    """Everything a dataset holds."""
    with h5py.File(path) as h5_file:
        return torch.from_numpy(h5_file[key][...])


class Recorder(pl.LightningModule):
    """A linear classifier that writes down the samples it is given."""

    def __init__(
        self, num_features: int = 72, *, reads_estimate: bool = False, schedule: bool = False, keep_images: bool = False
    ) -> None:
        """Make the same weights every time, whatever state the global generator is in."""
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.layer = torch.nn.Linear(num_features, NUM_CLASSES)
        self.reads_estimate = reads_estimate
        self.has_schedule = schedule
        self.keep_images = keep_images
        self.trained: list[tuple[int, list[int]]] = []
        self.losses: list[float] = []
        self.validated_in: list[tuple[int, list[int]]] = []
        self.evaluated: dict[str, list[tuple[int, list[int]]]] = {"validate": [], "sanity": [], "test": []}
        self.images: dict[str, list[torch.Tensor]] = {}
        self.estimate: float | None = None

    def loss_of(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        return F.cross_entropy(self.layer(images.flatten(1)), labels % NUM_CLASSES)

    def keep(self, stage: str, images: torch.Tensor) -> None:
        """Keep the images of a step, if asked to."""
        if self.keep_images:
            self.images.setdefault(stage, []).append(images.detach().clone())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Write down the samples and log the loss."""
        images, labels = batch
        self.keep("train", images)
        self.trained.append((self.current_epoch, labels.tolist()))
        loss = self.loss_of(images, labels)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def evaluate(self, stage: str, batch: Any) -> None:
        """Write down the samples, log what several ranks can add up, and a mean."""
        images, labels = batch
        self.keep(stage, images)
        self.evaluated[stage].append((self.trainer.global_step, labels.tolist()))
        if stage == "validate":
            self.validated_in.append((self.trainer.current_epoch, labels.tolist()))
        self.log(f"{stage}_loss", self.loss_of(images, labels), sync_dist=True)
        for name, value in (("count", float(len(labels))), ("sum", float(labels.sum()))):
            self.log(f"{stage}_{name}", value, reduce_fx="sum", sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate; sanity checks are kept apart."""
        self.evaluate("sanity" if self.trainer.sanity_checking else "validate", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate."""
        self.evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The numbers of the samples, or the images where there are no labels."""
        return batch if isinstance(batch, torch.Tensor) else batch[1].clone()

    def configure_optimizers(self) -> Any:
        """SGD with momentum, so that a wrong order anywhere changes the end."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.reads_estimate or self.has_schedule:
            self.estimate = self.trainer.estimated_stepping_batches
        if not self.has_schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=int(self.estimate))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def trained_by_epoch(self) -> dict[int, list[int]]:
        """Epoch -> the samples trained on in it, in order."""
        by_epoch: dict[int, list[int]] = {}
        for epoch, samples in self.trained:
            by_epoch.setdefault(epoch, []).extend(samples)
        return by_epoch

    def samples(self, stage: str) -> list[int]:
        """The samples evaluated, in order."""
        return [sample for _, batch in self.evaluated[stage] for sample in batch]


class MemoryLogger(Logger):
    """Keeps what is logged in a list."""

    def __init__(self) -> None:
        """Nothing logged yet."""
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        """Asked for by the Trainer."""
        return "memory"

    @property
    def version(self) -> str:
        """Asked for by the Trainer."""
        return "0"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep them."""
        self.logged.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""


def make_trainer(**settings: Any) -> pl.Trainer:
    """Make a quiet Trainer on one CPU that writes no files."""
    # With tensors this small a team of threads only waits for its slowest member, most of all on a busy machine.
    torch.set_num_threads(1)
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(**{**quiet, **settings})


def every_checkpoint(folder: Path) -> list[ModelCheckpoint]:
    """Callbacks that save after each optimizer step, at each epoch's end, and after each validation."""
    common: dict[str, Any] = {"dirpath": folder, "save_top_k": -1, "auto_insert_metric_name": False}
    return [
        ModelCheckpoint(filename="step-{step:02d}", every_n_train_steps=1, **common),
        ModelCheckpoint(filename="epoch-{epoch}", every_n_epochs=1, save_on_train_epoch_end=True, **common),
        # The mode has no effect here but gives the callback a state key of its own.
        ModelCheckpoint(filename="val-{step:02d}", mode="max", save_on_train_epoch_end=False, **common),
    ]


class OrderSampler(Sampler[int]):
    """The order of this package, for a plain `DataLoader`. Lightning calls its `set_epoch`."""

    def __init__(self, num_samples: int, seed: int, shuffle: Shuffle | None = None) -> None:
        """Note the order."""
        self.num_samples, self.seed, self.shuffle = num_samples, seed, shuffle or FullShuffle()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """The samples of the epoch."""
        return iter(self.shuffle.permutation(self.num_samples, self.seed, self.epoch).tolist())

    def __len__(self) -> int:
        """Samples per epoch."""
        return self.num_samples


def same_bits(one: Any, other: Any) -> bool:
    """Whether two nests of tensors, numbers and containers are equal to the last bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return type(one) is type(other) and one == other


def state_of(trainer: pl.Trainer, model: pl.LightningModule) -> dict[str, Any]:
    """Weights, optimizer, schedule and counters at the end of a training."""
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def warnings_of(call: Callable[[], Any]) -> list[str]:
    """Run something and give the texts of the UserWarnings it raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
