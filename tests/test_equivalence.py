"""Training through a DataModule of this package is bitwise training over a `TensorDataset` in the same order.

The other side of each comparison is plain Lightning: torch's `DataLoader` over tensors that were prepared
beforehand, with a sampler that gives the order of `lightning_gpufeed.hdf5.order`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gpufeed import H5DataModule, H5ImageDataModule
from lightning_gpufeed.hdf5.order import NoShuffle, Shuffle, WindowShuffle
from tests.datamodules.models import (
    MemoryLogger,
    OrderSampler,
    Recorder,
    make_trainer,
    read,
    same_bits,
    state_of,
    write_images,
)

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


def chunk_warning(storage: str) -> contextlib.AbstractContextManager[Any]:
    """A full shuffle of a compressed file is exact too, but announced as slow."""
    if storage == "raw":
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match="a full shuffle decodes a whole chunk for nearly every sample")


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
    with chunk_warning(storage):
        ours = fit(
            Recorder(72 * channels, schedule=True, keep_images=True),
            tmp_path,
            H5ImageDataModule(
                train, val=val, batch_size=BATCH_SIZE, seed=SEED, mean=MEAN[:channels], std=STD[:channels]
            ),
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
        plain_loader(tensor_dataset(train, layout), WindowShuffle(6)),
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
    with chunk_warning(storage):
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
    with chunk_warning(storage):
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
