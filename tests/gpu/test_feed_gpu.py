"""What only a device can show: pinned batches, copies that overlap with reading, the same bits as on the CPU.

Each of these has a twin that runs everywhere: tests/test_equivalence.py, tests/hdf5 and tests/datamodules. Nothing
here needs more than torch, lightning, h5py, numpy and pytest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpufeed import H5ImageDataModule, H5Loader
from lightning_gpufeed.device.images import ImagePreparation
from lightning_gpufeed.hdf5.order import NoShuffle
from tests.datamodules.models import (
    OrderSampler,
    Recorder,
    every_checkpoint,
    make_trainer,
    read,
    same_bits,
    state_of,
    write_images,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning"),
]

DEVICE = torch.device("cuda")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
LAYOUTS = {"NCHW": (3, 9, 8), "NHWC": (9, 8, 3), "NHW": (9, 8)}


def synchronise() -> None:
    torch.cuda.synchronize()


def keep_busy() -> None:
    """Give the device work for a while, so that copies queue up behind it."""
    factor = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(8):
        factor = factor @ factor * 1e-2


@pytest.mark.parametrize("wanted", [None, True, False])
def test_batches_lie_in_pinned_memory_unless_that_is_declined(tmp_path, wanted):
    path = write_images(tmp_path / "a.h5", 40)
    with H5Loader(path, 8, pin_memory=wanted) as loader:
        pinned = [tensor.is_pinned() for batch in loader for tensor in batch.values()]
    assert pinned == [wanted is not False] * 10


@pytest.mark.parametrize("storage", ["raw", "gzip"])
@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.filterwarnings("ignore:a full shuffle decodes a whole chunk:UserWarning")
def test_a_batch_on_its_way_to_the_device_is_never_overwritten(tmp_path, storage, side_stream):
    # Every batch is let go of as soon as its copy is asked for, while the device is busy with other work: the loader
    # has the next ones read long before the copies are made. Memory given back too early would carry a later batch.
    num_samples = 2_000
    images = np.random.default_rng(0).integers(0, 256, (num_samples, 3, 32, 32), dtype=np.uint8)
    path = write_images(tmp_path / "a.h5", num_samples, images=images, storage=storage)
    stored = torch.from_numpy(images).to(DEVICE)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    wrong = num_batches = 0
    with H5Loader(path, 64, num_slots=3) as loader:
        for _ in range(6):
            arrived = []
            with torch.cuda.stream(stream):
                keep_busy()
                for batch in loader:
                    arrived.append({name: tensor.to(DEVICE, non_blocking=True) for name, tensor in batch.items()})
            synchronise()
            for batch in arrived:
                num_batches += 1
                wrong += not torch.equal(batch["images"], stored[batch["labels"]])
    assert (wrong, num_batches) == (0, 6 * 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_images_are_prepared_to_the_same_bits_as_on_the_cpu(layout, channels_last, dtype):
    # No tolerance: each step is one correctly rounded operation on both, as long as 255 is a tensor on the device. By a
    # number of the host CUDA multiplies with the reciprocal, which is another last bit for half of all bytes.
    channels = 1 if layout == "NHW" else 3
    shape = LAYOUTS[layout]
    images = torch.arange(256, dtype=torch.uint8).repeat(4 * shape[0] * shape[-1])[: 16 * int(np.prod(shape))]
    images = images.reshape(16, *shape)
    prepare = ImagePreparation(
        layout, mean=MEAN[:channels], std=STD[:channels], dtype=dtype, channels_last=channels_last
    )
    on_device, on_host = prepare(images.to(DEVICE)), prepare(images)
    assert on_device.device.type == DEVICE.type
    assert on_device.stride() == on_host.stride()
    assert torch.equal(on_device.cpu(), on_host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_byte_is_divided_to_the_same_bits_as_on_the_cpu(dtype):
    every_byte = torch.arange(256, dtype=torch.uint8).view(4, 8, 8)
    prepare = ImagePreparation("NHW", dtype=dtype)
    assert torch.equal(prepare(every_byte.to(DEVICE)).cpu(), every_byte.unsqueeze(1).to(dtype) / 255)


@pytest.mark.parametrize("scale", [0.01, 1 / 3])
def test_quantised_images_are_decoded_to_the_same_bits_as_on_the_cpu(scale):
    every_byte = torch.arange(256, dtype=torch.uint8).view(4, 8, 8)
    prepare = ImagePreparation("NHW", scale=scale, offset=-1.7, mean=(0.3,), std=(0.7,))
    assert torch.equal(prepare(every_byte.to(DEVICE)).cpu(), prepare(every_byte))


def prepared(images: torch.Tensor) -> torch.Tensor:
    """On the host, as without this package."""
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (MEAN, STD))
    return (images.permute(0, 3, 1, 2).float() / 255 - mean) / std


def train(model: Recorder, *data: Any, checkpoint: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Three epochs on the device; what is left of them."""
    trainer = make_trainer(**{"accelerator": DEVICE.type, "max_epochs": 3, **settings})
    source = {"datamodule": data[0]} if len(data) == 1 else {"train_dataloaders": data[0], "val_dataloaders": data[1]}
    trainer.fit(model, **source, ckpt_path=checkpoint)
    state = state_of(trainer, model)
    return {**state, "order": model.trained, "evaluated": model.evaluated, "losses": model.losses}


def test_training_on_the_device_equals_training_on_a_tensor_dataset_in_the_same_order(tmp_path):
    train_file = write_images(tmp_path / "a.h5", 150, sample_shape=LAYOUTS["NHWC"])
    val_file = write_images(tmp_path / "v.h5", 30, sample_shape=LAYOUTS["NHWC"], seed=1)
    loaders = []
    for path, shuffle in ((train_file, None), (val_file, NoShuffle())):
        dataset = TensorDataset(prepared(read(path, "images")), read(path, "labels"))
        sampler = OrderSampler(len(dataset), 0, shuffle)
        loaders.append(DataLoader(dataset, batch_size=16, sampler=sampler, pin_memory=True))
    plain = train(Recorder(216, schedule=True), *loaders)
    datamodule = H5ImageDataModule(train_file, val=val_file, batch_size=16, mean=MEAN, std=STD)
    ours = train(Recorder(216, schedule=True), datamodule)
    assert [name for name in plain if not same_bits(ours[name], plain[name])] == []


def test_resuming_on_the_device_equals_no_interruption(tmp_path):
    path = write_images(tmp_path / "a.h5", 150, sample_shape=LAYOUTS["NHWC"])
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": every_checkpoint(tmp_path / "saved")}
    whole = train(Recorder(216), H5ImageDataModule(path, val=path, batch_size=16), **saving)
    for step in (3, 10, 17):
        checkpoint = tmp_path / "saved" / f"step-{step:02d}.ckpt"
        resumed = train(Recorder(216), H5ImageDataModule(path, val=path, batch_size=16), checkpoint=checkpoint)
        assert resumed["order"] == whole["order"][step:]
        assert same_bits(resumed["weights"], whole["weights"])
        assert same_bits(resumed["optimizers"], whole["optimizers"])


class OnDevice(Recorder):
    """Makes sure of where its batches are, and of what type."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Look at the batch."""
        images, labels = batch
        assert (images.device.type, labels.device.type) == (DEVICE.type, DEVICE.type)
        assert images.dtype == self.layer.weight.dtype
        return super().training_step(batch, batch_idx)


class Brighter(torch.nn.Module):
    """A transform with a buffer, which has to come to the device."""

    def __init__(self) -> None:
        """Made on the host."""
        super().__init__()
        self.register_buffer("amount", torch.tensor(0.1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Add the amount."""
        return images + self.amount.to(images.dtype)


@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true"])
def test_transforms_and_labels_come_to_the_device_in_the_trainers_precision(tmp_path, precision):
    path = write_images(tmp_path / "a.h5", 40)
    datamodule = H5ImageDataModule(path, val=path, batch_size=16, device_transform=Brighter())
    model = OnDevice(keep_images=True)
    train(model, datamodule, precision=precision)
    assert datamodule.device_transform.amount.device.type == DEVICE.type
    assert sorted(model.trained_by_epoch[2]) == list(range(40))


def test_the_share_of_time_that_the_device_waited_is_counted(tmp_path, capsys):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file["images"] = np.random.default_rng(0).integers(0, 256, (4_000, 3, 64, 64), dtype=np.uint8)
        h5_file["labels"] = np.arange(4_000)
    datamodule = H5ImageDataModule(path, batch_size=256)
    train(Recorder(3 * 64 * 64), datamodule, limit_val_batches=0)
    statistics = datamodule.feed_statistics()
    assert statistics.num_samples == 4_000
    assert 0 <= statistics.wait_share <= 1
    with capsys.disabled():
        print(
            f"\n{statistics.samples_per_second:,.0f} images of 3x64x64 per second; "
            f"the training waited for data {statistics.wait_share:.1%} of the time"
        )
