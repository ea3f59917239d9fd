"""Training with a part of this package is bitwise the training without it that it stands for.

The other side of each comparison has no code of ours but the order of the samples:

- a DataModule: plain Lightning, torch's `DataLoader` over tensors that were prepared beforehand, with a sampler that
  gives the order of `lightning_gpufeed.hdf5.order`;
- `BatchEcho` that does nothing, or has nothing to do: plain Lightning, the same loader;
- `BatchEcho` that echoes: a training loop written by hand, in plain PyTorch;
- `FeedMonitor`: plain Lightning; and with other callbacks of this package, the same ones without it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_gpufeed import BatchEcho, FeedMonitor, H5DataModule, H5ImageDataModule, OOMRecovery
from lightning_gpufeed.echo.plan import pass_seed, piece_bounds
from lightning_gpufeed.hdf5.layout import read_layout
from lightning_gpufeed.hdf5.order import NoShuffle, Shuffle
from lightning_gpufeed.hdf5.window import window_order
from tests.callbacks.echo_models import wait_until
from tests.datamodules.models import (
    MemoryLogger,
    OrderSampler,
    Recorder,
    every_checkpoint,
    make_trainer,
    read,
    same_bits,
    state_of,
    write_images,
)
from tests.doubles import KeptList

NUM_TRAIN, NUM_VAL, BATCH_SIZE, SEED = 22, 7, 4, 5  # neither length is a multiple of the batch
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
SAMPLE_SHAPES = {"NCHW": (3, 9, 8), "NHWC": (9, 8, 3), "NHW": (9, 8)}


def prepared(images: torch.Tensor, layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What everybody does by hand: divide, move the axes, subtract, divide."""
    images = images.permute(0, 3, 1, 2) if layout == "NHWC" else images[:, None] if layout == "NHW" else images
    channels = images.shape[1]
    mean = torch.tensor(MEAN[:channels], dtype=dtype).view(-1, 1, 1)
    std = torch.tensor(STD[:channels], dtype=dtype).view(-1, 1, 1)
    return ((images.to(dtype) / 255 - mean) / std).contiguous()


def plain_loader(dataset: Dataset[Any], shuffle: Shuffle | None = None) -> DataLoader[Any]:
    """A loader without any code of ours but the order."""
    sampler = OrderSampler(len(dataset), SEED, shuffle)  # type: ignore[arg-type]
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)


def tensor_dataset(path: Path, layout: str, dtype: torch.dtype = torch.float32) -> TensorDataset:
    return TensorDataset(prepared(read(path, "images"), layout, dtype), read(path, "labels"))


@pytest.fixture
def files(tmp_path: Path, layout: str, storage: str) -> tuple[Path, Path]:
    """A training and a validation file."""
    shape = SAMPLE_SHAPES[layout]
    return (
        write_images(tmp_path / "train.h5", NUM_TRAIN, sample_shape=shape, seed=1, storage=storage),
        write_images(tmp_path / "val.h5", NUM_VAL, sample_shape=shape, seed=2, storage=storage),
    )


def fit(model: Recorder, folder: Path, *args: Any, **settings: Any) -> dict[str, Any]:
    """Three epochs with validation in their middle and at their end; everything a user can see of it."""
    logger = MemoryLogger()
    settings = {"max_epochs": 3, "val_check_interval": 0.5, "logger": logger} | settings
    trainer = make_trainer(**settings)
    data = {"datamodule": args[0]} if len(args) == 1 else {"train_dataloaders": args[0], "val_dataloaders": args[1]}
    trainer.fit(model, **data)
    trainer.save_checkpoint(folder / "end.ckpt")
    checkpoint = torch.load(folder / "end.ckpt", weights_only=True)
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # the loaders' own states
    checkpoint.pop("datamodule_hyper_parameters", None)
    for ours in ("H5DataModule", "H5ImageDataModule"):
        checkpoint.pop(ours, None)
    return state_of(trainer, model) | {
        "order": model.trained,
        "evaluated": model.evaluated,
        "losses": model.losses,
        "images": model.images,
        "logged": logger.logged,
        "metrics": dict(trainer.callback_metrics),
        "checkpoint": checkpoint,
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not equal to the last bit."""
    assert list(one) == list(other)
    return [name for name in one if not same_bits(one[name], other[name])]


@dataclass(frozen=True)
class ChunkWindow:
    """The order of a window shuffle over the chunks of a file, without a loader."""

    rows: int
    window_samples: int

    def permutation(self, num_samples: int, seed: int, epoch: int) -> Any:
        return window_order(np.arange(num_samples) // self.rows, self.window_samples, seed, epoch)


@pytest.mark.parametrize("storage", ["raw", "gzip"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NHW"])
def test_training_on_images_equals_training_on_a_tensor_dataset(tmp_path, files, layout, storage):
    train, val = files
    channels = 1 if layout == "NHW" else 3
    plain = fit(
        Recorder(72 * channels, schedule=True, keep_images=True),
        tmp_path,
        plain_loader(tensor_dataset(train, layout)),
        plain_loader(tensor_dataset(val, layout), NoShuffle()),
    )
    ours = fit(
        Recorder(72 * channels, schedule=True, keep_images=True),
        tmp_path,
        H5ImageDataModule(train, val=val, batch_size=BATCH_SIZE, seed=SEED, mean=MEAN[:channels], std=STD[:channels]),
    )
    assert differences(ours, plain) == []
    # The comparison itself is not empty: three epochs of all samples, validated twice in each.
    assert sorted(sample for _, batch in ours["order"] for sample in batch) == sorted(3 * list(range(NUM_TRAIN)))
    assert len({str(batches) for epoch in range(3) for batches in [[b for e, b in ours["order"] if e == epoch]]}) == 3
    assert [step for step, _ in ours["evaluated"]["validate"]] == [s for s in (3, 6, 9, 12, 15, 18) for _ in range(2)]


@pytest.mark.parametrize(("layout", "storage"), [("NHW", "gzip")])
def test_a_windowed_shuffle_trains_like_a_tensor_dataset_in_that_order(tmp_path, files, layout, storage):
    train, val = files
    plain = fit(
        Recorder(72, schedule=True),
        tmp_path,
        plain_loader(tensor_dataset(train, layout), ChunkWindow(read_layout(train, "images").chunk_rows, 6)),
        plain_loader(tensor_dataset(val, layout), NoShuffle()),
    )
    ours = fit(
        Recorder(72, schedule=True),
        tmp_path,
        H5ImageDataModule(
            train, val=val, batch_size=BATCH_SIZE, seed=SEED, mean=MEAN[:1], std=STD[:1], shuffle="window:6"
        ),
    )
    assert differences(ours, plain) == []


@pytest.mark.parametrize(("layout", "storage"), [("NHW", "raw"), ("NHW", "gzip")])
def test_a_fraction_of_the_training_file_trains_like_two_tensor_datasets(tmp_path, files, layout, storage):
    # Training and validation then read from one open source, at the same time.
    data = {"batch_size": BATCH_SIZE, "seed": SEED, "mean": MEAN[:1], "std": STD[:1]}
    model = Recorder(72, schedule=True, keep_images=True)
    ours = fit(model, tmp_path, H5ImageDataModule(files[0], val=0.3, **data))
    taken = model.samples("validate")[: round(0.3 * NUM_TRAIN)]
    rest = [sample for sample in range(NUM_TRAIN) if sample not in taken]
    images, labels = tensor_dataset(files[0], layout).tensors
    plain = fit(
        Recorder(72, schedule=True, keep_images=True),
        tmp_path,
        plain_loader(TensorDataset(images[rest], labels[rest])),
        plain_loader(TensorDataset(images[taken], labels[taken]), NoShuffle()),
    )
    assert differences(ours, plain) == []


class WithOwnTransform(Recorder):
    """What a user does by hand in plain Lightning."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Flip the images, in training only."""
        images, labels = batch
        return (images.flip(-1) if self.trainer.training else images), labels


@pytest.mark.parametrize(("layout", "storage"), [("NCHW", "raw")])
def test_a_device_transform_equals_the_same_work_in_the_modules_own_hook(tmp_path, files, layout, storage):
    train, val = files
    plain = fit(
        WithOwnTransform(216, keep_images=True),
        tmp_path,
        plain_loader(tensor_dataset(train, layout)),
        plain_loader(tensor_dataset(val, layout), NoShuffle()),
    )
    data = {"val": val, "batch_size": BATCH_SIZE, "seed": SEED, "mean": MEAN, "std": STD}
    ours = fit(
        Recorder(216, keep_images=True),
        tmp_path,
        H5ImageDataModule(train, device_transform=lambda images: images.flip(-1), **data),
    )
    assert differences(ours, plain) == []


@pytest.mark.parametrize(("layout", "storage"), [("NHWC", "raw")])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulated_gradients_are_those_of_a_tensor_dataset(tmp_path, files, layout, storage, accumulate):
    train, val = files
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1, "limit_train_batches": 5}
    plain = fit(
        Recorder(216, schedule=True),
        tmp_path,
        plain_loader(tensor_dataset(train, layout)),
        plain_loader(tensor_dataset(val, layout), NoShuffle()),
        **settings,
    )
    data = {"val": val, "batch_size": BATCH_SIZE, "seed": SEED, "mean": MEAN, "std": STD}
    ours = fit(Recorder(216, schedule=True), tmp_path, H5ImageDataModule(train, **data), **settings)
    assert differences(ours, plain) == []


@pytest.mark.parametrize(("layout", "storage"), [("NHWC", "raw")])
@pytest.mark.parametrize(
    ("precision", "computed_in", "delivered_in"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.float32),
        ("bf16-true", torch.float32, torch.bfloat16),
        ("64-true", torch.float64, torch.float64),
    ],
)
def test_images_arrive_in_the_trainers_precision_rounded_once(
    tmp_path, files, layout, storage, precision, computed_in, delivered_in
):
    train, val = files
    plain = fit(
        Recorder(216, keep_images=True),
        tmp_path,
        plain_loader(tensor_dataset(train, layout, computed_in)),
        plain_loader(tensor_dataset(val, layout, computed_in), NoShuffle()),
        precision=precision,
    )
    data = {"val": val, "batch_size": BATCH_SIZE, "seed": SEED, "mean": MEAN, "std": STD}
    ours = fit(Recorder(216, keep_images=True), tmp_path, H5ImageDataModule(train, **data), precision=precision)
    assert {images.dtype for images in ours["images"]["train"]} == {delivered_in}
    assert torch.equal(
        torch.cat(ours["images"]["validate"][:2]),
        prepared(read(val, "images"), layout, computed_in).to(delivered_in),
    )
    assert differences(ours, plain) == []


class DictDataset(Dataset[dict[str, torch.Tensor]]):
    """Several arrays in memory, as dicts."""

    def __init__(self, arrays: dict[str, torch.Tensor]) -> None:
        """Note the arrays."""
        self.arrays = arrays

    def __len__(self) -> int:
        """Length of all of them."""
        return len(self.arrays["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample."""
        return {name: array[index] for name, array in self.arrays.items()}


class DictRecorder(Recorder):
    """Learns from a dict with a float field, a weight per sample and a label."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Use every field."""
        assert sorted(batch) == ["features", "labels", "weights"]
        assert batch["weights"].dtype == torch.float64
        scaled = batch["features"] * batch["weights"].to(torch.float32)[:, None]
        return super().training_step((scaled, batch["labels"]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Use every field."""
        super().validation_step((batch["features"], batch["labels"]), batch_idx)


@pytest.mark.parametrize("storage", ["raw", "gzip"])
def test_training_on_any_arrays_equals_training_on_the_same_arrays_in_memory(tmp_path, storage):
    arrays: dict[str, dict[str, torch.Tensor]] = {}
    for split, length in (("train", NUM_TRAIN), ("val", NUM_VAL)):
        random = np.random.default_rng(length)
        values = {
            "features": random.normal(size=(length, 30)).astype(np.float32),
            "labels": np.arange(length),
            "weights": random.uniform(0.5, 2.0, length),
        }
        with h5py.File(tmp_path / f"{split}.h5", "w") as h5_file:
            for key, value in values.items():
                compression = "gzip" if storage == "gzip" else None
                h5_file.create_dataset(key, data=value, chunks=(5, *value.shape[1:]), compression=compression)
        arrays[split] = {key: torch.from_numpy(value) for key, value in values.items()}
    plain = fit(
        DictRecorder(30, schedule=True),
        tmp_path,
        plain_loader(DictDataset(arrays["train"])),
        plain_loader(DictDataset(arrays["val"]), NoShuffle()),
    )
    ours = fit(
        DictRecorder(30, schedule=True),
        tmp_path,
        H5DataModule(tmp_path / "train.h5", val=tmp_path / "val.h5", batch_size=BATCH_SIZE, seed=SEED),
    )
    assert differences(ours, plain) == []


@pytest.mark.parametrize(("layout", "storage"), [("NCHW", "raw")])
def test_a_sanity_check_and_a_validation_beforehand_leave_the_training_as_it_is(tmp_path, files, layout, storage):
    train, val = files
    data = {"val": val, "batch_size": BATCH_SIZE, "seed": SEED, "mean": MEAN, "std": STD}
    alone = fit(Recorder(216), tmp_path, H5ImageDataModule(train, **data))
    datamodule = H5ImageDataModule(train, **data)
    make_trainer().validate(Recorder(216), datamodule, verbose=False)
    model = Recorder(216)
    after = fit(model, tmp_path, datamodule, num_sanity_val_steps=1)
    assert [len(batch) for _, batch in model.evaluated["sanity"]] == [BATCH_SIZE]
    model.evaluated["sanity"].clear()
    assert differences(after, alone) == []


# BatchEcho ---------------------------------------------------------------------------------------------------


class Regularised(Recorder):
    """A classifier with batch normalisation, and dropout from the global generator; it may wait for its loader."""

    def __init__(self, num_features: int = 72, *, waits: bool = False, **settings: Any) -> None:
        """Make the same weights every time."""
        super().__init__(num_features, **settings)
        self.norm = torch.nn.BatchNorm1d(num_features)
        self.waits = waits

    def loss_of(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        return F.cross_entropy(self.layer(F.dropout(self.norm(images.flatten(1)), 0.3, self.training)), labels % 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """A step that is over when the next batch is there, so the loader keeps up on any machine."""
        loss = super().training_step(batch, batch_idx)
        if self.waits:
            wait_until(self.trainer.train_dataloader.is_ready)
        return loss


def random_images(num_samples: int, seed: int = 0) -> TensorDataset:
    """Images, and labels that number them."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(num_samples, 9, 8, generator=generator), torch.arange(num_samples))


def shuffled_loader(**settings: Any) -> DataLoader[Any]:
    """torch's own shuffling, from the global generator that dropout draws from too."""
    return DataLoader(random_images(NUM_TRAIN), batch_size=BATCH_SIZE, shuffle=True, **settings)


def fit_shuffled(
    model: Recorder, folder: Path, echo: BatchEcho | None, loader: DataLoader[Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Train, and leave out what only `BatchEcho` writes: its state, and its figures for the logger."""
    torch.manual_seed(3)
    loaders = shuffled_loader() if loader is None else loader, DataLoader(random_images(NUM_VAL, 1), batch_size=4)
    seen = fit(model, folder, *loaders, callbacks=[] if echo is None else [echo], **settings)
    if echo is not None and seen["checkpoint"]["callbacks"].pop("BatchEcho", None) is not None:
        seen["logged"] = [(step, figures) for step, figures in seen["logged"] if not _are_of_echo(figures)]
    return seen


PLAIN: dict[str, dict[str, Any]] = {}
"""What trainings without a callback gave, by their settings: many callbacks stand for the same one."""


def plain_shuffled(folder: Path, **settings: Any) -> dict[str, Any]:
    """`fit_shuffled` without a callback, made once; whether a model could fail or wait makes no difference to it."""
    key = str(settings)
    if key not in PLAIN:
        PLAIN[key] = fit_shuffled(Regularised(schedule=True), folder, None, **settings)
    return PLAIN[key]


def _are_of_echo(figures: dict[str, float]) -> bool:
    return all(name.startswith("gpufeed/echo/") for name in figures)


ANY_TRAINING = [
    {},
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    {"limit_train_batches": 4, "val_check_interval": 3},
    {"limit_train_batches": 0.5, "num_sanity_val_steps": 1},
    {"max_steps": 8},
    {"val_check_interval": 1.0, "reload_dataloaders_every_n_epochs": 1},
]


@pytest.mark.parametrize("settings", ANY_TRAINING, ids=lambda settings: ",".join(settings) or "default")
def test_echoing_once_in_one_piece_is_training_without_the_callback(tmp_path, settings):
    plain = plain_shuffled(tmp_path, **settings)
    ours = fit_shuffled(Regularised(schedule=True), tmp_path, BatchEcho(1), **settings)
    assert differences(ours, plain) == []


@pytest.mark.parametrize("settings", ANY_TRAINING, ids=lambda settings: ",".join(settings) or "default")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_auto_with_a_loader_that_keeps_up_is_training_without_the_callback(tmp_path, settings, num_workers):
    if num_workers:  # a loader with workers draws other numbers, so it has another order
        loader = shuffled_loader(num_workers=num_workers)
        plain = fit_shuffled(Regularised(schedule=True), tmp_path, None, loader, **settings)
    else:
        plain = plain_shuffled(tmp_path, **settings)
    # Not to scale is for the warning only: nothing is echoed, so there is nothing to scale either.
    echo = BatchEcho("auto", scale_lr="inverse")
    model = Regularised(schedule=True, waits=True)
    ours = fit_shuffled(model, tmp_path, echo, shuffled_loader(num_workers=num_workers), **settings)
    assert differences(ours, plain) == []
    assert {passes for epoch in echo.trace.values() for passes in epoch} == {1}


@pytest.mark.parametrize(("layout", "storage"), [("NCHW", "raw")])
@pytest.mark.parametrize("echo", [lambda: BatchEcho(1), lambda: BatchEcho("auto")], ids=["once", "auto"])
def test_echoing_images_that_keep_up_is_training_without_the_callback(tmp_path, files, layout, storage, echo):
    train, val = files
    data = {"val": val, "batch_size": BATCH_SIZE, "seed": SEED, "mean": MEAN, "std": STD}
    torch.manual_seed(3)
    plain = fit(Regularised(216, schedule=True), tmp_path, H5ImageDataModule(train, **data))
    torch.manual_seed(3)
    callback = echo()
    model = Regularised(216, schedule=True, waits=callback.echo_factor == "auto")
    ours = fit(model, tmp_path, H5ImageDataModule(train, **data), callbacks=[callback])
    ours["checkpoint"]["callbacks"].pop("BatchEcho", None)
    ours["logged"] = [(step, figures) for step, figures in ours["logged"] if not _are_of_echo(figures)]
    assert differences(ours, plain) == []


class Augmented(Dataset[Any]):
    """Samples with noise from the generator that dropout draws from."""

    def __init__(self) -> None:
        """Note the samples."""
        self.images, self.labels = random_images(NUM_TRAIN).tensors

    def __len__(self) -> int:
        """Number of samples."""
        return NUM_TRAIN

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sample, another one each time."""
        return self.images[index] + torch.randn(9, 8), self.labels[index]


def test_a_loader_that_draws_from_the_generator_of_the_steps_draws_the_same_with_auto(tmp_path):
    def loader() -> DataLoader[Any]:
        return DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True)

    plain = fit_shuffled(Regularised(keep_images=True), tmp_path, None, loader())
    with pytest.warns(UserWarning, match="draws random numbers"):
        ours = fit_shuffled(Regularised(keep_images=True), tmp_path, BatchEcho("auto"), loader())
    assert differences(ours, plain) == []


# The loop that echoing stands for


class OwnDropout(Regularised):
    """Draws its dropout from a generator of its own: the global one is drawn from by loaders too."""

    def __init__(self) -> None:
        """Begin the generator."""
        super().__init__(schedule=True)
        self.generator = torch.Generator().manual_seed(3)

    def loss_of(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        values = self.norm(images.flatten(1))
        if self.training:
            values = values * (torch.rand(values.shape, generator=self.generator) < 0.7)
        return F.cross_entropy(self.layer(values), labels % 3)


def by_hand(
    model: Recorder,
    batches: Callable[[int], list[tuple[torch.Tensor, torch.Tensor]]],
    passes_of: Callable[[int, int], int],
    num_splits: int,
    *,
    schedule_steps: int,
    accumulate: int = 1,
    seed: int = 0,
    is_adaptive: bool = False,
    rate_factor: Callable[[list[int]], float] = lambda passes: 1.0,
) -> dict[str, Any]:
    """Train in plain PyTorch: each batch so often as said, in a new order each time, cut into pieces."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=schedule_steps)
    order, losses, num_steps, passes_begun = [], [], 0, []
    model.train()
    for epoch in range(2):
        fetched = batches(epoch)
        left = sum(passes_of(epoch, fetch) * min(num_splits, len(labels)) for fetch, (_, labels) in enumerate(fetched))
        in_epoch = 0
        for fetch, (images, labels) in enumerate(fetched):
            passes_begun.append(0)
            for pass_index in range(passes_of(epoch, fetch)):
                passes_begun[-1] += 1
                # The seed, of rank 0, this epoch and this batch; of its first loader; of this pass.
                number = pass_seed(pass_seed(pass_seed(seed, 0, epoch, fetch), 0), pass_index)
                permutation = torch.randperm(len(labels), generator=torch.Generator().manual_seed(number))
                if is_adaptive and pass_index == 0 and num_splits == 1:
                    permutation = torch.arange(len(labels))
                num_pieces = min(num_splits, len(labels))
                for piece in range(num_pieces):
                    first, stop = piece_bounds(len(labels), num_pieces, piece)
                    chosen = permutation[first:stop]
                    order.append((epoch, labels[chosen].tolist()))
                    loss = model.loss_of(images[chosen], labels[chosen])
                    losses.append(loss.item())
                    if in_epoch % accumulate == 0:
                        optimizer.zero_grad()
                    (loss / accumulate).backward()
                    in_epoch += 1
                    if in_epoch % accumulate == 0 or in_epoch == left:
                        factor = rate_factor(passes_begun)
                        for group in optimizer.param_groups:
                            group["lr"], unscaled = group["lr"] * factor, group["lr"]
                        optimizer.step()
                        for group in optimizer.param_groups:
                            group["lr"] = unscaled
                        num_steps += 1
                        # Made for the steps that were known beforehand.
                        if pass_index == 0 or not is_adaptive:
                            schedule.step()
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizers": [optimizer.state_dict()],
        "schedulers": [schedule.state_dict()],
        "global_step": num_steps,
        "epoch": 2,
        "order": order,
        "losses": losses,
    }


ECHO_SAMPLES, ECHO_BATCH = 22, 8  # 8, 8 and 6: no piece has one sample only, which would have no variance


def echoed_loader() -> DataLoader[Any]:
    """A loader in an order of its own."""
    sampler = OrderSampler(ECHO_SAMPLES, SEED)
    return DataLoader(random_images(ECHO_SAMPLES), batch_size=ECHO_BATCH, sampler=sampler)


def batches_in_order(epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of an epoch, without a loader."""
    images, labels = random_images(ECHO_SAMPLES).tensors
    sampler = OrderSampler(ECHO_SAMPLES, SEED)
    sampler.set_epoch(epoch)
    order = torch.tensor(list(sampler))
    return [(images[index], labels[index]) for index in order.split(ECHO_BATCH)]


def fit_echoed(folder: Path, echo: BatchEcho, **settings: Any) -> dict[str, Any]:
    """The same training with the callback, and what its last checkpoint holds."""
    model = OwnDropout()
    trainer = make_trainer(max_epochs=2, callbacks=[echo], **settings)
    trainer.fit(model, echoed_loader(), DataLoader(random_images(NUM_VAL, 1), batch_size=4))
    trainer.save_checkpoint(folder / "end.ckpt")
    return {
        **state_of(trainer, model),
        "order": model.trained,
        "losses": model.losses,
        "checkpoint": torch.load(folder / "end.ckpt", weights_only=True),
        "validated": sorted({step for step, _ in model.evaluated["validate"]}),
        "num_training_batches": trainer.num_training_batches,
        "estimate": model.estimate,
    }


@pytest.mark.parametrize(
    ("factor", "num_splits", "accumulate"), [(2, 2, 1), (3, 1, 1), (1, 3, 1), (2, 3, 1), (2, 2, 5), (3, 2, 4)]
)
@pytest.mark.parametrize("scale_lr", ["keep", "inverse"])
def test_a_fixed_echo_is_a_loop_written_by_hand(tmp_path, factor, num_splits, accumulate, scale_lr):
    num_batches = 3 * factor * num_splits
    num_steps = 2 * -(-num_batches // accumulate)
    echo = BatchEcho(factor, num_splits=num_splits, scale_lr=scale_lr, seed=4)
    ours = fit_echoed(tmp_path, echo, accumulate_grad_batches=accumulate)
    hand = by_hand(
        OwnDropout(),
        batches_in_order,
        lambda epoch, fetch: factor,
        num_splits,
        schedule_steps=num_steps,
        accumulate=accumulate,
        seed=4,
        rate_factor=lambda passes: 1 / factor if scale_lr == "inverse" else 1.0,
    )
    assert [name for name in hand if not same_bits(ours[name], hand[name])] == []
    # What the checkpoint holds, and what was announced, is the same training.
    checkpoint = ours["checkpoint"]
    assert same_bits(dict(checkpoint["state_dict"]), hand["weights"])
    assert same_bits(checkpoint["optimizer_states"], hand["optimizers"])
    assert same_bits(checkpoint["lr_schedulers"], hand["schedulers"])
    assert (checkpoint["global_step"], checkpoint["epoch"]) == (num_steps, 2)
    assert (ours["num_training_batches"], ours["estimate"]) == (num_batches, num_steps)
    assert ours["validated"] == [num_steps // 2, num_steps]
    # The comparison itself is not empty.
    assert len(ours["order"]) == 2 * num_batches
    assert all(len(set(samples)) == len(samples) for _, samples in ours["order"])


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("scale_lr", ["keep", "inverse"])
def test_a_replayed_echo_is_a_loop_written_by_hand(tmp_path, num_splits, scale_lr):
    trace = {0: [2, 1, 3], 1: [1, 4, 2]}
    ours = fit_echoed(tmp_path, BatchEcho("auto", num_splits=num_splits, scale_lr=scale_lr, replay=trace))
    hand = by_hand(
        OwnDropout(),
        batches_in_order,
        lambda epoch, fetch: trace[epoch][fetch],
        num_splits,
        schedule_steps=2 * 3 * num_splits,
        is_adaptive=True,
        # How often a batch is used on average, as far as that is known.
        rate_factor=lambda begun: len(begun) / sum(begun) if scale_lr == "inverse" else 1.0,
    )
    assert [name for name in hand if not same_bits(ours[name], hand[name])] == []
    assert ours["checkpoint"]["callbacks"]["BatchEcho"]["trace"] == trace


# OOMRecovery -------------------------------------------------------------------------------------------------


class Failing(Regularised):
    """Runs out of memory where it is told to, each time once."""

    def __init__(self, failures: tuple[tuple[int, str], ...] = (), **settings: Any) -> None:
        """Note (step, phase) of each."""
        super().__init__(schedule=True, **settings)
        self.failures = KeptList(failures)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Fail after forward, or in the middle of backward."""
        loss = super().training_step(batch, batch_idx)
        step = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if (step, "forward") in self.failures:
            self.failures.remove((step, "forward"))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if (step, "backward") in self.failures:
            self.failures.remove((step, "backward"))
            loss.register_hook(out_of_memory)
        return loss


def out_of_memory(gradient: torch.Tensor) -> torch.Tensor:
    """A hook in backward."""
    raise torch.OutOfMemoryError("CUDA out of memory.")


def fit_recovered(model: Recorder, folder: Path, recovery: OOMRecovery, **settings: Any) -> dict[str, Any]:
    """Train, and leave out what only `OOMRecovery` writes."""
    torch.manual_seed(3)
    loaders = shuffled_loader(), DataLoader(random_images(NUM_VAL, 1), batch_size=4)
    seen = fit(model, folder, *loaders, callbacks=[recovery], **settings)
    seen["checkpoint"]["callbacks"].pop("OOMRecovery", None)
    seen["logged"] = [
        (step, figures)
        for step, figures in seen["logged"]
        if not all(name.startswith("gpufeed/oom/") for name in figures)
    ]
    return seen


@pytest.mark.parametrize("settings", ANY_TRAINING, ids=lambda settings: ",".join(settings) or "default")
@pytest.mark.parametrize("failures", [(), ((1, "forward"), (4, "backward"))], ids=["no failure", "two failures"])
def test_a_batch_that_fits_whole_trains_as_without_the_callback(tmp_path, settings, failures):
    plain = plain_shuffled(tmp_path, **settings)
    model = Failing(failures)
    ours = fit_recovered(model, tmp_path, OOMRecovery(), **settings)
    assert model.failures == []
    assert differences(ours, plain) == []


# FeedMonitor -------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Samples of which nobody knows how many there are."""

    def __iter__(self) -> Any:
        """One after the other, with noise from the generator that dropout draws from."""
        return (Augmented()[index] for index in range(NUM_TRAIN))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "no worker": shuffled_loader,
    "one worker": lambda: shuffled_loader(num_workers=1),
    "kept worker": lambda: shuffled_loader(num_workers=1, persistent_workers=True),
    "noise": lambda: DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH_SIZE),
}


def fit_watched(
    model: Recorder, folder: Path, data: Any, callbacks: list[Any], *, seed: int = 3, **settings: Any
) -> dict[str, Any]:
    """Train, save after each step, and look at all random generators at the end."""
    folder.mkdir()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    callbacks = [*callbacks, *every_checkpoint(folder / "each")]
    loaders = [data, DataLoader(random_images(NUM_VAL, 1), batch_size=4)] if isinstance(data, DataLoader) else [data]
    settings = {"enable_checkpointing": True, "num_sanity_val_steps": 1} | settings
    seen = fit(model, folder, *loaders, callbacks=callbacks, **settings)
    _, numpy_state, *numpy_rest = np.random.get_state()
    seen["random"] = [torch.get_rng_state(), random.getstate(), numpy_state.tolist(), *numpy_rest]
    seen["checkpoints"] = {
        path.name: without_paths(torch.load(path, weights_only=True)) for path in sorted((folder / "each").iterdir())
    }
    seen["checkpoint"] = without_paths(seen["checkpoint"])
    seen["logged"] = [
        (step, figures)
        for step, figures in seen["logged"]
        if not any(name.startswith("gpufeed/") for name in figures)  # of times, which are never the same
    ]
    return seen


def without_paths(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without what `ModelCheckpoint` says of where it is."""
    kept = {name: state for name, state in checkpoint["callbacks"].items() if not name.startswith("ModelCheckpoint")}
    return checkpoint | {"callbacks": kept}


def watching(folder: Path) -> FeedMonitor:
    """A monitor that does all it can as often as it can."""
    return FeedMonitor(folder / "feed.html", table=False, first_seconds=1e-6, interval_seconds=0.1)


@pytest.mark.parametrize("settings", ANY_TRAINING, ids=lambda settings: ",".join(settings) or "default")
def test_training_under_watch_is_training_without_the_callback(tmp_path, settings):
    plain = fit_watched(Regularised(schedule=True), tmp_path / "plain", shuffled_loader(), [], **settings)
    monitor = watching(tmp_path)
    ours = fit_watched(Regularised(schedule=True), tmp_path / "ours", shuffled_loader(), [monitor], **settings)
    assert differences(ours, plain) == []
    # Nothing of it in a checkpoint either; and it did watch.
    assert ours["checkpoint"]["callbacks"] == {}
    assert len(plain["checkpoints"]) > 3
    assert len(monitor.records) > 1


@pytest.mark.parametrize(("seed", "name"), list(enumerate(LOADERS)))
def test_training_under_watch_is_the_same_with_every_kind_of_loader(tmp_path, seed, name):
    settings: dict[str, Any] = {"seed": seed, "max_epochs": 2}
    if name == "stream":
        settings["val_check_interval"] = 3
    plain = fit_watched(Regularised(), tmp_path / "plain", LOADERS[name](), [], **settings)
    ours = fit_watched(Regularised(), tmp_path / "ours", LOADERS[name](), [watching(tmp_path)], **settings)
    assert differences(ours, plain) == []


@pytest.mark.parametrize(("layout", "storage"), [("NCHW", "raw")])
def test_training_on_our_own_data_under_watch_is_the_same(tmp_path, files, layout, storage):
    data = {"val": files[1], "batch_size": BATCH_SIZE, "seed": SEED, "mean": MEAN, "std": STD}
    results = [
        fit_watched(Regularised(216), tmp_path / name, H5ImageDataModule(files[0], **data), callbacks, max_epochs=2)
        for name, callbacks in (("plain", []), ("ours", [watching(tmp_path)]))
    ]
    assert differences(results[1], results[0]) == []


OTHERS: dict[str, Callable[[], Any]] = {
    "echo": lambda: BatchEcho(2, seed=4, scale_lr="keep"),
    "recovery": lambda: OOMRecovery(grow_after=None),
}
ORDERS = [
    order
    for names in (["echo"], ["recovery"], ["echo", "recovery"])
    for order in itertools.permutations([*names, "monitor"])
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: ",".join(order))
def test_other_callbacks_do_the_same_under_watch_in_whatever_order(tmp_path, order):
    def fit_beside(names: tuple[str, ...], folder: Path) -> dict[str, Any]:
        makers = OTHERS | {"monitor": lambda: watching(tmp_path)}
        model = Failing(((1, "forward"), (4, "backward")) if "recovery" in names else ())
        seen = fit_watched(model, folder, shuffled_loader(), [makers[name]() for name in names], max_epochs=2)
        assert model.failures == []
        return seen

    others = tuple(name for name in order if name != "monitor")
    if (key := f"beside {others}") not in PLAIN:  # made once for all places of the monitor
        PLAIN[key] = fit_beside(others, tmp_path / "plain")
    assert differences(fit_beside(order, tmp_path / "ours"), PLAIN[key]) == []
    assert len(PLAIN[key]["checkpoint"]["callbacks"]) == len(order) - 1
