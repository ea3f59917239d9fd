"""`H5ImageDataModule` in a Trainer: what a step is given, in which numbers, and in how much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from lightning_gpufeed import H5ImageDataModule, LayoutError
from tests.datamodules.models import Recorder, make_trainer, read, write_images

pytestmark = [
    # Both are tested by themselves: test_bad_input.py and test_h5.py.
    pytest.mark.filterwarnings("ignore:batch_size .* is more than the dataset has:UserWarning"),
]

ROOT = Path(__file__).parents[2]
HEIGHT, WIDTH = 9, 8
SHAPES = {"NCHW": (3, HEIGHT, WIDTH), "NHWC": (HEIGHT, WIDTH, 3), "NHW": (HEIGHT, WIDTH)}


class Catcher(Recorder):
    """Keeps whole batches, of any form, by stage."""

    def __init__(self) -> None:
        """Nothing caught yet."""
        super().__init__()
        self.caught: dict[str, list[Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Keep the batch."""
        self.caught.setdefault("train", []).append(batch)
        return self.layer.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Keep the batch."""
        self.caught.setdefault("val", []).append(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Keep the batch."""
        self.caught.setdefault("test", []).append(batch)


def catch(datamodule: H5ImageDataModule, **settings: Any) -> dict[str, list[Any]]:
    """Train one epoch and give every batch by stage."""
    model = Catcher()
    make_trainer(**{"max_epochs": 1, **settings}).fit(model, datamodule)
    return model.caught


def images_of(batches: list[Any]) -> torch.Tensor:
    return torch.cat([batch if isinstance(batch, torch.Tensor) else batch[0] for batch in batches])


def channels_first(images: torch.Tensor, layout: str) -> torch.Tensor:
    return images.permute(0, 3, 1, 2) if layout == "NHWC" else images[:, None] if layout == "NHW" else images


# What is in the file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("layout", SHAPES)
def test_every_layout_arrives_as_floats_with_the_channels_first(tmp_path, layout, stated):
    attributes = {"layout": layout} if stated else {}
    path = write_images(tmp_path / "a.h5", 10, sample_shape=SHAPES[layout], attributes=attributes)
    datamodule = H5ImageDataModule(path, batch_size=4, shuffle=None)
    images = images_of(catch(datamodule)["train"])
    assert torch.equal(images, channels_first(read(path, "images"), layout).float() / 255)
    assert datamodule.image_shape == tuple(images.shape[1:])
    assert (datamodule.mean, datamodule.std) == (None, None)


def test_a_stated_layout_outweighs_the_shape_and_a_given_one_outweighs_both(tmp_path):
    path = write_images(tmp_path / "a.h5", 10, sample_shape=(3, 9, 8), attributes={"layout": "NHWC"})
    stated = H5ImageDataModule(path, batch_size=4, shuffle=None)
    assert torch.equal(images_of(catch(stated)["train"]), read(path, "images").permute(0, 3, 1, 2).float() / 255)
    given = H5ImageDataModule(path, batch_size=4, shuffle=None, image_layout="NCHW")
    assert torch.equal(images_of(catch(given)["train"]), read(path, "images").float() / 255)


def test_validation_images_have_their_own_layout_scale_and_offset(tmp_path):
    train = write_images(
        tmp_path / "a.h5", 10, sample_shape=(3, 9, 8), attributes={"layout": "NCHW", "scale": 0.01, "offset": -1.0}
    )
    val = write_images(
        tmp_path / "v.h5", 4, sample_shape=(9, 8, 3), attributes={"layout": "NHWC", "scale": 0.5, "offset": 3.0}, seed=1
    )
    data = {"batch_size": 5, "shuffle": None, "mean": 2.0, "std": 4.0}
    caught = catch(H5ImageDataModule(train, val=val, **data))
    raw = {"train": read(train, "images"), "val": read(val, "images").permute(0, 3, 1, 2)}
    assert torch.equal(images_of(caught["train"]), (raw["train"].float() * 0.01 - 1.0 - 2.0) / 4.0)
    assert torch.equal(images_of(caught["val"]), (raw["val"].float() * 0.5 + 3.0 - 2.0) / 4.0)


@pytest.mark.parametrize(
    ("name", "one", "other"), [("scale", 0.01, 0.5), ("offset", 0.0, 1.0), ("layout", "NCHW", "NHWC")]
)
def test_files_of_one_split_that_mean_different_things_are_refused(tmp_path, name, one, other):
    shape = (4, 9, 3)
    base = {"scale": 0.01, "offset": 0.0, "layout": "NCHW"}
    first = write_images(tmp_path / "1.h5", 10, sample_shape=shape, attributes={**base, name: one})
    second = write_images(tmp_path / "2.h5", 10, sample_shape=shape, attributes={**base, name: other})
    with pytest.raises(LayoutError) as caught:
        catch(H5ImageDataModule([first, second], batch_size=5))
    assert str(caught.value) == (
        f"{second}: images 'images' have the attribute {name} = {other!r}, but {first} has {one!r}. "
        f"Files used as one dataset must agree; pack them alike."
    )


def test_images_stored_as_floats_are_not_divided(tmp_path):
    images = np.random.default_rng(0).normal(size=(10, 9, 8)).astype(np.float32)
    path = write_images(tmp_path / "a.h5", 10, images=images)
    data = {"batch_size": 4, "shuffle": None, "mean": 0.5, "std": 2.0}
    got = images_of(catch(H5ImageDataModule(path, **data))["train"])
    assert torch.equal(got, (torch.from_numpy(images)[:, None] - 0.5) / 2.0)


def test_sixteen_bit_images_are_divided_by_their_largest_value(tmp_path):
    images = np.random.default_rng(0).integers(0, 65536, (10, 9, 8), dtype=np.uint16)
    path = write_images(tmp_path / "a.h5", 10, images=images)
    got = images_of(catch(H5ImageDataModule(path, batch_size=4, shuffle=None))["train"])
    assert torch.equal(got[:, 0], torch.from_numpy(images.astype(np.float32)) / 65535)


def test_channels_last_changes_the_memory_order_only(tmp_path):
    path = write_images(tmp_path / "a.h5", 10, sample_shape=SHAPES["NHWC"])
    plain, last = (
        images_of(catch(H5ImageDataModule(path, batch_size=10, shuffle=None, channels_last=wanted))["train"])
        for wanted in (False, True)
    )
    assert torch.equal(plain, last)
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert not last.is_contiguous()


# Normalisation -----------------------------------------------------------------------------------------------


def test_mean_and_std_of_the_training_file_apply_to_every_split(tmp_path):
    attributes = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    train = write_images(tmp_path / "a.h5", 10, sample_shape=SHAPES["NHWC"], attributes=attributes)
    val = write_images(
        tmp_path / "v.h5", 4, sample_shape=SHAPES["NHWC"], seed=1, attributes={"mean": [0.9] * 3, "std": [9.0] * 3}
    )
    datamodule = H5ImageDataModule(train, val=val, batch_size=5, shuffle=None)
    caught = catch(datamodule)
    mean, std = (torch.tensor(attributes[name]).view(-1, 1, 1) for name in ("mean", "std"))
    for split, path in (("train", train), ("val", val)):
        expected = (channels_first(read(path, "images"), "NHWC").float() / 255 - mean) / std
        assert torch.equal(images_of(caught[split]), expected)
    assert datamodule.mean == pytest.approx((0.1, 0.2, 0.3), abs=0)
    assert datamodule.std == pytest.approx((0.5, 0.6, 0.7), abs=0)


def test_given_numbers_outweigh_the_files(tmp_path):
    path = write_images(tmp_path / "a.h5", 10, attributes={"mean": [0.1], "std": [0.5]})
    got = images_of(catch(H5ImageDataModule(path, batch_size=5, shuffle=None, mean=0.25, std=[2.0]))["train"])
    assert torch.equal(got[:, 0], (read(path, "images").float() / 255 - 0.25) / 2.0)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("layout", SHAPES)
def test_auto_computes_population_statistics_of_the_training_samples_alone(tmp_path, layout, scaled):
    attributes = {"scale": -0.5, "offset": 2.0} if scaled else {}
    path = write_images(tmp_path / "a.h5", 20, sample_shape=SHAPES[layout], attributes=attributes)
    datamodule = H5ImageDataModule(path, val=[0, 7, 19], batch_size=20, shuffle=None, mean="auto", std="auto")
    caught = catch(datamodule)
    kept = np.setdiff1d(np.arange(20), [0, 7, 19])
    raw = channels_first(read(path, "images"), layout).double().numpy()[kept]
    values = raw * -0.5 + 2.0 if scaled else raw / 255
    # Summed in whole numbers and scaled afterwards, where numpy rounds at every step: equal to a few units in 2**-52.
    assert datamodule.mean == pytest.approx(values.mean((0, 2, 3)), rel=1e-12)
    assert datamodule.std == pytest.approx(values.std((0, 2, 3)), rel=1e-12)
    images = images_of(caught["train"]).double()
    assert images.mean((0, 2, 3)) == pytest.approx(0, abs=1e-5)  # float32 rounding
    assert images.std((0, 2, 3), correction=0) == pytest.approx(1, abs=1e-5)


def test_auto_prefers_what_the_file_states(tmp_path):
    path = write_images(tmp_path / "a.h5", 10, attributes={"mean": [0.1]})
    datamodule = H5ImageDataModule(path, batch_size=10, mean="auto", std="auto")
    datamodule.setup("fit")
    assert datamodule.mean == (0.1,)
    assert datamodule.std == pytest.approx([(read(path, "images").double().numpy() / 255).std()], rel=1e-12)
    datamodule.teardown("fit")


@pytest.mark.parametrize("stated", [False, True])
def test_a_channel_that_never_changes_is_centred_and_otherwise_left(tmp_path, stated):
    images = np.random.default_rng(0).integers(0, 256, (10, 9, 8, 4), dtype=np.uint8)
    images[..., 3] = 255  # an opaque alpha channel
    std = (images.astype(np.float64) / 255).std((0, 1, 2))
    attributes = {"mean": (images.astype(np.float64) / 255).mean((0, 1, 2)), "std": std} if stated else {}
    path = write_images(tmp_path / "a.h5", 10, images=images, attributes=attributes)
    datamodule = H5ImageDataModule(path, batch_size=10, mean="auto", std="auto")
    got = images_of(catch(datamodule)["train"])
    assert datamodule.std == pytest.approx([*std[:3], 1.0], rel=1e-12)
    assert torch.equal(got[:, 3], torch.zeros(10, 9, 8))


# Keys, labels, further fields --------------------------------------------------------------------------------


def test_labels_arrive_as_int64_whatever_type_they_are_stored_in(tmp_path):
    for kind in (np.uint8, np.int32, np.int64, np.bool_):
        labels = np.arange(10) % 2
        path = write_images(tmp_path / "a.h5", 10, labels=labels.astype(kind))
        batch = catch(H5ImageDataModule(path, batch_size=10, shuffle=None))["train"][0]
        assert isinstance(batch, tuple)
        assert batch[1].dtype == torch.int64
        assert batch[1].tolist() == labels.tolist()


def test_float_labels_arrive_in_the_trainers_precision(tmp_path):
    path = write_images(tmp_path / "a.h5", 10, labels=np.linspace(0, 1, 10))
    batch = catch(H5ImageDataModule(path, batch_size=10, shuffle=None))["train"][0]
    assert batch[1].dtype == torch.float32
    batch = catch(H5ImageDataModule(path, batch_size=10, shuffle=None), precision="64-true")["train"][0]
    assert batch[1].dtype == torch.float64


def test_a_file_without_labels_gives_images_alone(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    with h5py.File(path, "a") as h5_file:
        del h5_file["labels"]
    for datamodule in (
        H5ImageDataModule(path, batch_size=4, shuffle=None),
        H5ImageDataModule(path, batch_size=4, shuffle=None, image_key="images"),
    ):
        caught = catch(datamodule)["train"]
        assert all(isinstance(batch, torch.Tensor) for batch in caught)
        assert torch.equal(images_of(caught)[:, 0], read(path, "images").float() / 255)


def test_labels_can_be_left_out(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    for image_key in (None, "images"):
        datamodule = H5ImageDataModule(path, batch_size=4, image_key=image_key, label_key="")
        assert all(isinstance(batch, torch.Tensor) for batch in catch(datamodule)["train"])


def test_a_named_label_is_used_although_another_one_would_be_found(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    with h5py.File(path, "a") as h5_file:
        h5_file["fine"] = np.arange(10) + 100
    for image_key in (None, "images"):
        datamodule = H5ImageDataModule(path, batch_size=10, shuffle=None, image_key=image_key, label_key="fine")
        assert catch(datamodule)["train"][0][1].tolist() == list(range(100, 110))


def test_labels_are_found_beside_images_that_are_named(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    datamodule = H5ImageDataModule(path, batch_size=10, shuffle=None, image_key="images")
    assert catch(datamodule)["train"][0][1].tolist() == list(range(10))


def test_splits_in_one_file_are_found_or_named(tmp_path):
    path = tmp_path / "all.h5"
    write_images(path, 10, keys=("x_train", "y_train"))
    write_images(path, 4, keys=("x_test", "y_test"), mode="a", seed=1)
    for keys in ({}, {"image_key": "x_{split}", "label_key": "y_{split}"}):
        datamodule = H5ImageDataModule(path, batch_size=4, shuffle=None, **keys)
        model = Catcher()
        make_trainer(max_epochs=1).fit(model, datamodule)
        make_trainer().test(model, datamodule, verbose=False)
        assert sorted(model.caught) == ["test", "train"]
        assert torch.equal(images_of(model.caught["train"])[:, 0], read(path, "x_train").float() / 255)
        assert torch.equal(images_of(model.caught["test"])[:, 0], read(path, "x_test").float() / 255)


def test_further_fields_make_the_batch_a_dict(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    with h5py.File(path, "a") as h5_file:
        h5_file["weight"] = np.linspace(0, 1, 10)
        h5_file["site"] = ["north", "south"] * 5
    datamodule = H5ImageDataModule(
        path,
        batch_size=4,
        shuffle=None,
        image_key="images",
        label_key="labels",
        extra_keys=["weight", "site"],
        device_transform=lambda images: images * 0,
    )
    batch = catch(datamodule)["train"][0]
    assert sorted(batch) == ["image", "label", "site", "weight"]
    assert torch.equal(batch["image"], torch.zeros(4, 1, 9, 8))
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert batch["weight"].tolist() == np.linspace(0, 1, 10)[:4].tolist()
    assert batch["site"] == ["north", "south", "north", "south"]


def test_class_names_and_their_number_come_from_the_file(tmp_path):
    path = write_images(tmp_path / "a.h5", 9, labels=np.arange(9) % 3)
    with h5py.File(path, "a") as h5_file:
        h5_file["labels"].attrs["class_names"] = ["cat", "dog", "élan"]
    datamodule = H5ImageDataModule(path)
    assert datamodule.class_names == ["cat", "dog", "élan"]
    assert datamodule.num_classes == 3
    assert H5ImageDataModule(path, num_classes=7).num_classes == 7
    assert H5ImageDataModule(write_images(tmp_path / "b.h5", 9)).num_classes is None


def test_a_stratified_fraction_keeps_the_classes(tmp_path):
    path = write_images(tmp_path / "a.h5", 50, labels=np.repeat([0, 1], [40, 10]))
    caught = catch(H5ImageDataModule(path, val=0.2, stratify=True, batch_size=50))
    assert np.bincount(caught["val"][0][1]).tolist() == [8, 2]
    assert np.bincount(caught["train"][0][1]).tolist() == [32, 8]


def test_classes_are_drawn_by_weights_given_by_name_and_columns_are_not_taken_for_labels(tmp_path):
    path = write_images(tmp_path / "a.h5", 50, labels=np.repeat([0, 1], [40, 10]), keys=("images", "number"))
    with h5py.File(path, "a") as h5_file:
        h5_file["number"].attrs["class_names"] = ["cat", "dog"]
        h5_file["fold"] = np.arange(50) % 5  # without its being named so, this could be the labels as well
    arguments = {"folds": "fold", "fold": 3, "samples_per_epoch": 60, "batch_size": 60}
    caught = catch(H5ImageDataModule(path, sample_weights={"cat": 0, "dog": 1.0}, **arguments))
    assert caught["train"][0][1].tolist() == [1] * 60
    assert np.bincount(caught["val"][0][1]).tolist() == [8, 2]
    balanced = catch(H5ImageDataModule(path, image_key="images", sample_weights="balanced", **arguments))
    assert 10 < sum(balanced["train"][0][1].tolist()) < 50  # 30 expected, standard deviation 3.9


def test_folds_that_are_made_keep_the_classes(tmp_path):
    path = write_images(tmp_path / "a.h5", 50, labels=np.repeat([0, 1], [40, 10]))
    caught = catch(H5ImageDataModule(path, num_folds=5, fold=4, stratify=True, batch_size=50))
    assert np.bincount(caught["val"][0][1]).tolist() == [8, 2]
    assert np.bincount(caught["train"][0][1]).tolist() == [32, 8]


# Masks and transforms ----------------------------------------------------------------------------------------


def flip_both(images: torch.Tensor, masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return images.flip(-1), masks.flip(-1)


@pytest.mark.parametrize("extra_keys", [[], ["number"]])
def test_masks_go_through_the_transform_with_their_images(tmp_path, extra_keys):
    masks = np.random.default_rng(3).integers(0, 5, (10, 9, 8), dtype=np.uint8)
    path = write_images(tmp_path / "a.h5", 10, labels=masks, keys=("images", "masks"))
    with h5py.File(path, "a") as h5_file:
        h5_file["number"] = np.arange(10)
    datamodule = H5ImageDataModule(
        path,
        val=path,
        image_key="images",
        label_key="masks",
        extra_keys=extra_keys,
        batch_size=10,
        shuffle=None,
        device_transform=flip_both,
    )
    caught = catch(datamodule)
    for split, flipped in (("train", True), ("val", False)):
        batch = caught[split][0]
        images, labels = (batch["image"], batch["label"]) if extra_keys else batch
        dims = (-1,) if flipped else ()
        assert labels.dtype == torch.int64
        assert torch.equal(labels, torch.from_numpy(masks).long().flip(dims))
        assert torch.equal(images[:, 0], (read(path, "images").float() / 255).flip(dims))


def test_masks_are_found_by_their_name(tmp_path):
    masks = np.zeros((10, 9, 8), dtype=np.uint8)
    path = write_images(tmp_path / "a.h5", 10, labels=masks, keys=("images", "masks"))
    assert catch(H5ImageDataModule(path, batch_size=10))["train"][0][1].shape == (10, 9, 8)


class Shift(nn.Module):
    """A transform with a parameter, as learned augmentations have."""

    def __init__(self) -> None:
        """Shift by one."""
        super().__init__()
        self.amount = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Add the amount."""
        return images + self.amount


def test_transforms_are_called_with_prepared_images_in_their_own_stages(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    datamodule = H5ImageDataModule(
        path,
        val=path,
        test=path,
        batch_size=10,
        shuffle=None,
        device_transform=Shift(),
        eval_device_transform=lambda images: images - 1,
    )
    model = Catcher()
    make_trainer(max_epochs=1, num_sanity_val_steps=1).fit(model, datamodule)
    make_trainer().test(model, datamodule, verbose=False)
    plain = read(path, "images").float()[:, None] / 255
    assert torch.equal(images_of(model.caught["train"]), plain + 1)
    assert torch.equal(model.caught["val"][0][0], plain - 1)
    assert torch.equal(model.caught["test"][0][0], plain - 1)


def test_predicting_on_a_file_without_labels_gives_images_alone(tmp_path):
    train = write_images(tmp_path / "a.h5", 10)
    new = write_images(tmp_path / "n.h5", 4, seed=1)
    with h5py.File(new, "a") as h5_file:
        del h5_file["labels"]
    predicted = make_trainer().predict(Recorder(), H5ImageDataModule(train, predict=new, batch_size=4))
    assert torch.equal(torch.cat(predicted)[:, 0], read(new, "images").float() / 255)


def test_a_batch_prepared_in_inference_mode_does_not_spoil_the_training_that_follows(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    datamodule = H5ImageDataModule(path, val=path, batch_size=10, mean=0.5, std=0.5, device_transform=Shift())
    make_trainer(inference_mode=True).validate(Recorder(), datamodule, verbose=False)
    model = Recorder()
    make_trainer(max_epochs=1).fit(model, datamodule)
    assert sorted(model.trained_by_epoch[0]) == list(range(10))


def test_it_can_be_used_without_a_trainer(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    datamodule = H5ImageDataModule(path, batch_size=4, shuffle=None, mean=0.5, std=0.25)
    datamodule.setup("fit")
    batches = [datamodule.on_after_batch_transfer(batch, 0) for batch in datamodule.train_dataloader()]
    datamodule.teardown("fit")
    assert torch.equal(images_of(batches)[:, 0], (read(path, "images").float() / 255 - 0.5) / 0.25)


def test_a_batch_before_setup_is_refused(tmp_path):
    datamodule = H5ImageDataModule(write_images(tmp_path / "a.h5", 10))
    with pytest.raises(RuntimeError) as caught:
        datamodule.on_after_batch_transfer((torch.zeros(1, 9, 8), torch.zeros(1)), 0)
    assert str(caught.value) == ("a train batch arrived, but no train data was set up. Call setup(), or use a Trainer.")


# Memory ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_is_flat_over_the_epochs_and_does_not_grow_with_the_file(tmp_path):
    small, large = 2_560, 9_000  # images of 12 KiB: a file of 31 MB, and one of 111 MB; a batch has 3 MB
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "",
        # A batch that is let go is given back to the system, and not kept for the next one, as it happens to fit.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    }
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("memory_worker.py")), str(tmp_path), str(small), str(large)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert run.returncode == 0, run.stderr
    kib = {int(size): epochs for size, epochs in json.loads(run.stdout.splitlines()[-1]).items()}
    assert [len(epochs) for epochs in kib.values()] == [4, 4]
    # Measured: 0.02 MiB, of the allocator. One batch kept would be 3 MiB, or 12 as floats.
    assert max(kib[large]) - min(kib[large]) < 1 << 10
    # Measured: 9.3 MiB of the allocator, for 34,000 images too; the file is 79 MB larger.
    assert max(kib[large]) - min(kib[small]) < 16 << 10
