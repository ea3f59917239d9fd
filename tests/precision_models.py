"""A training in any precision of the Trainer, all that came of it, and what it is compared with.

Used by test_precisions.py on the CPU, by its ranks, and by the tests that need a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gpufeed import H5ImageDataModule
from tests.datamodules.models import (
    NUM_CLASSES,
    MemoryLogger,
    OrderSampler,
    make_trainer,
    read,
    same_bits,
    state_of,
)
from tests.doubles import KeptList

PRECISIONS = ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true", "16-mixed"]
BITS = {"64-true": 53, "32-true": 24, "16-mixed": 11, "16-true": 11, "bf16-mixed": 8, "bf16-true": 8}
"""Of the numbers that layers compute with."""
BATCH_SIZE, NUM_TRAIN, SEED = 8, 24, 5
NUM_BATCHES, NUM_EPOCHS = NUM_TRAIN // BATCH_SIZE, 2
_OF_PARAMETERS = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
"""float32 in the others."""


class Net(pl.LightningModule):
    """Layers in a row that write down what types they are given.

    Attributes:
        types: Of each tensor of each batch.
        batches: Their contents, if they are to be kept.
        losses: Of each step.
    """

    def __init__(self, optimizer: str = "adamw", fails: Sequence[int] = (), keeps: bool = False) -> None:
        """Make the same weights every time.

        Args:
            optimizer: "adamw", or "sgd" with momentum.
            fails: Which calls of `training_step` run out of memory, counted from 0.
            keeps: Whether batches are kept.
        """
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.layers = nn.Sequential(
                nn.Flatten(),
                nn.Linear(72, 16),
                nn.ReLU(),
                nn.LayerNorm(16),
                nn.Linear(16, 16),
                nn.Tanh(),
                nn.Linear(16, NUM_CLASSES),
            )
        self.optimizer, self.fails, self.keeps = optimizer, fails, keeps
        self.calls = KeptList()
        self.types: list[tuple[str, ...]] = []
        self.losses: list[Tensor] = []
        self.batches: list[list[Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log the loss of images and labels, in a list or a dict."""
        images, labels = batch.values() if isinstance(batch, dict) else batch
        self.calls.append(batch_idx)
        if len(self.calls) - 1 in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.types.append((str(images.dtype), str(labels.dtype)))
        if self.keeps:
            self.batches.append([images.clone(), labels.clone()])
        weight = next(self.layers.parameters())
        output = self.layers(images.to(weight.dtype))  # in mixed precision batches come as they are stored
        self.types.append((str(output.dtype),))
        loss = F.cross_entropy(output, labels % NUM_CLASSES)
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With a state for each parameter."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)  # which is not 0 in float16


def in_parts(model: Net, num_parts: int) -> Net:
    """Have layers run on a batch part by part, as a pipeline of so many microbatches does.

    With autocast each part casts the weights anew: a rank of a pipeline adds gradients of microbatches in the precision
    of the parameters, and not in that of the cast.
    """
    forward: Callable[[Tensor], Tensor] = model.layers.forward

    def forward_in_parts(x: Tensor) -> Tensor:
        outputs = []
        for part in x.split(-(-len(x) // num_parts)):
            outputs.append(forward(part))
            torch.clear_autocast_cache()
        return torch.cat(outputs)

    model.layers.forward = forward_in_parts  # type: ignore[method-assign]
    return model


def train(precision: str, model: Net, *data: Any, **settings: Any) -> dict[str, Any]:
    """Two epochs, and all that came of them.

    By itself Lightning takes bf16-mixed for 16-mixed where there is no device, so there its GradScaler is given to it.
    """
    how: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed" and settings.get("accelerator") != "gpu":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        how = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    log = MemoryLogger()
    trainer = make_trainer(max_epochs=NUM_EPOCHS, logger=log, **how, **settings)
    trainer.fit(model, *data)
    state = state_of(trainer, model)
    found = getattr(trainer.precision_plugin, "scaler", None)
    return {
        **state,
        "scaler": None if found is None else found.state_dict(),
        "types": [*model.types, *sorted({str(one.dtype) for one in model.parameters()})],
        "losses": list(model.losses),
        "logged": [(step, row) for step, row in log.logged if not any(name.startswith("gpufeed/") for name in row)],
    }


# Data ----------------------------------------------------------------------------------------------------------------


def datamodule(path: str | Path) -> H5ImageDataModule:
    """The same order of samples every time."""
    return H5ImageDataModule(path, batch_size=BATCH_SIZE, seed=SEED, mean=(0.5,), std=(0.25,))


def loader(dataset: Dataset[Any]) -> DataLoader[Any]:
    """torch's, in the order of ours."""
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=OrderSampler(NUM_TRAIN, SEED))


def images(path: Path, precision: str) -> DataLoader[Any]:
    """As everybody makes them by hand: in the Trainer's precision, from a normalisation that is rounded once."""
    computed_in = torch.float64 if precision == "64-true" else torch.float32
    tensor = (((read(path, "images").to(computed_in) / 255)[:, None] - 0.5) / 0.25).contiguous()
    return loader(TensorDataset(tensor, read(path, "labels")))


class Rows(Dataset[Any]):
    """Arrays in memory, as dicts."""

    def __init__(self, arrays: dict[str, Tensor]) -> None:
        """Note them."""
        self.arrays = arrays

    def __len__(self) -> int:
        """Of samples."""
        return NUM_TRAIN

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One of them."""
        return {name: array[index] for name, array in self.arrays.items()}


class Steps:
    """Batches in a row, a part of them in each epoch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        """Note them."""
        self.batches, self.num_epochs = batches, 0

    def __len__(self) -> int:
        """In an epoch."""
        return len(self.batches) // NUM_EPOCHS

    def __iter__(self) -> Iterator[Any]:
        """Those of the next epoch."""
        first = self.num_epochs * len(self)
        self.num_epochs += 1
        yield from self.batches[first : first + len(self)]


# Comparing -----------------------------------------------------------------------------------------------------------


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same to the last bit."""
    assert list(one) == list(other)
    return [name for name in one if not same_bits(one[name], other[name])]


def types_of(result: dict[str, Any]) -> set[torch.dtype]:
    """Of weights and of an optimizer's state, but for its count of steps."""
    states = [one for state in result["optimizers"] for one in state["state"].values()]
    tensors = [value for state in states for key, value in state.items() if key != "step" and value is not None]
    assert len(tensors) >= len(result["weights"])
    return {one.dtype for one in [*result["weights"].values(), *tensors]}


def assert_plain(
    ours: dict[str, Any], plain: dict[str, Any], precision: str, num_steps: int = NUM_EPOCHS * NUM_BATCHES
) -> None:
    """All is the same, and of the type that the precision says."""
    assert differences(ours, plain) == []
    assert types_of(ours) == {_OF_PARAMETERS.get(precision, torch.float32)}
    assert (ours["scaler"] is not None) == (precision == "16-mixed")
    assert ours["global_step"] == num_steps


def assert_close(ours: dict[str, Any], plain: dict[str, Any], precision: str) -> None:
    """All is the same but for roundings of five steps that were done in parts, of SGD at a rate of 0.05."""
    # Weights are below 1 and losses below 2. In the true precisions each of the steps may round them otherwise, by a
    # bit of them; in mixed ones a gradient, of which a step takes a twentieth.
    allowed = 4 * 2.0 ** -BITS[precision]
    for name, weight in plain["weights"].items():
        assert float((ours["weights"][name].double() - weight.double()).abs().max()) < allowed
    assert len(ours["logged"]) == len(plain["logged"])
    for (step, one), (other_step, other) in zip(ours["logged"], plain["logged"], strict=True):
        assert step == other_step
        assert abs(one["loss"] - other["loss"]) < 2 * allowed
    assert types_of(ours) == types_of(plain)
    assert same_bits(ours["scaler"], plain["scaler"])
    assert ours["global_step"] == plain["global_step"]


def assert_echoed(batches: Sequence[Any], once: Sequence[Any]) -> None:
    """Every sample was trained on twice in an epoch, each time as it comes without echoes."""
    rows = {int(label): row for batch in once for row, label in zip(*batch, strict=True)}
    echoed = [(int(label), row) for batch in batches for row, label in zip(*batch, strict=True)]
    assert sorted(label for label, _ in echoed) == sorted(2 * NUM_EPOCHS * list(range(NUM_TRAIN)))
    assert all(same_bits(row, rows[label]) for label, row in echoed)
