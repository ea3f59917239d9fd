"""A `train.py` for the tests of LightningCLI, and what their YAML names; also run by real ranks."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_gpufeed import H5DataModule, H5Loader
from tests.datamodules.models import state_of, write_images

NUM_SAMPLES = 36


class Net(LightningModule):
    """A small classifier, with the same weights every time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.layers = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(72, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
            )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self.layers(images), labels), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("test_loss", F.cross_entropy(self.layers(images), labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def as_pair(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["images"], batch["labels"]


def as_it_is(images: torch.Tensor) -> torch.Tensor:
    return images


def num_labels(batch: Any) -> int:
    return len(batch[1])


def cut(batch: Any, num_parts: int) -> list[Any]:
    return list(zip(*(part.chunk(num_parts) for part in batch), strict=True))


def write_files(folder: Path) -> Path:
    """Every file that the YAML names."""
    for seed, (name, count) in enumerate({"train": NUM_SAMPLES, "more": 12, "test": 7}.items()):
        numbers = np.arange(count)
        path = write_images(folder / f"{name}.h5", count, seed=seed, labels=numbers % 3)
        with h5py.File(path, "a") as h5_file:
            h5_file["x"] = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
            h5_file["y"] = numbers % 3
            h5_file["patient"] = numbers // 2
            h5_file["used"] = numbers % 9 != 4
    return folder


class EveryPart(LightningCLI):
    """Has a second DataModule and a loader beside `data`, as programs have that need more than one source."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_subclass_arguments(H5DataModule, "arrays", required=False)
        parser.add_class_arguments(H5Loader, "loader")


def run_program(arguments: Sequence[str], program: type[LightningCLI], **settings: Any) -> LightningCLI:
    """Run `train.py ARGUMENTS` in this process, without the commands not used: each takes a while to set up."""
    torch.set_num_threads(1)
    used = {name: skipped for name, skipped in program.subcommands().items() if name in arguments}
    program = type(program.__name__, (program,), {"subcommands": staticmethod(lambda: used)})
    before, sys.argv = sys.argv, ["train.py", *arguments]
    try:
        # Model and data are whatever the YAML names. In a context of its own: jsonargparse keeps the latest parser in a
        # context variable, which through its CLI would keep the data of a failed training open.
        return contextvars.copy_context().run(program, **settings)
    finally:
        sys.argv = before


def end_of(cli: LightningCLI) -> dict[str, Any]:
    """Weights, optimizer and counters at the end of a training."""
    assert isinstance(cli.trainer, pl.Trainer)
    return state_of(cli.trainer, cli.model)
