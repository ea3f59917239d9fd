"""Every part in every precision of the Trainer, against plain Lightning in the same precision.

Weights, optimizer state, GradScaler, losses, logged values, and of which type everything is. On one rank; the
strategies on two (gloo, on the CPU). On a device: tests/gpu/test_precisions_gpu.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lightning_gpufeed import BatchEcho, FeedMonitor, H5DataModule, OOMRecovery
from tests.datamodules.models import write_images
from tests.doubles import run_ranks
from tests.precision_models import (
    BATCH_SIZE,
    NUM_TRAIN,
    PRECISIONS,
    SEED,
    Net,
    Rows,
    Steps,
    assert_close,
    assert_echoed,
    assert_plain,
    datamodule,
    differences,
    images,
    in_parts,
    loader,
    train,
)
from tests.precision_worker import PIPELINES, TRAININGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but:UserWarning"),
    pytest.mark.parametrize("precision", PRECISIONS),
]

WORKER = Path(__file__).with_name("precision_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precisions")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return write_images(folder / "train.h5", NUM_TRAIN)


@functools.cache
def plain_of(path: Path, precision: str) -> dict[str, Any]:
    """Plain Lightning on images, which several tests compare with."""
    return train(precision, Net(), images(path, precision))


@functools.cache
def microbatched_of(path: Path, precision: str) -> dict[str, Any]:
    """One device on the microbatches of a pipeline, whatever its schedule."""
    return train(precision, in_parts(Net(), 2), datamodule(path))


# One rank ------------------------------------------------------------------------------------------------------------


def test_images_of_a_file_give_the_training_of_a_loader_of_tensors(path, precision):
    plain = plain_of(path, precision)
    ours = train(precision, Net(), datamodule(path))
    assert_plain(ours, plain, precision)


@pytest.mark.parametrize("stored", ["float16", "float32", "float64"])
def test_arrays_of_a_file_give_the_training_of_a_loader_of_dicts(tmp_path, precision, stored):
    with h5py.File(tmp_path / "arrays.h5", "w") as h5_file:
        h5_file["x"] = np.random.default_rng(1).normal(size=(NUM_TRAIN, 72)).astype(stored)
        h5_file["y"] = np.arange(NUM_TRAIN)
        arrays = {key: torch.from_numpy(h5_file[key][...]) for key in ("x", "y")}
    plain = train(precision, Net(), loader(Rows(arrays)))
    ours = train(precision, Net(), H5DataModule(tmp_path / "arrays.h5", batch_size=BATCH_SIZE, seed=SEED))
    assert_plain(ours, plain, precision)


def test_a_monitor_changes_nothing(path, precision):
    plain = plain_of(path, precision)
    ours = train(precision, Net(), images(path, precision), callbacks=[FeedMonitor(table=False)])
    assert_plain(ours, plain, precision)


def test_echoes_are_a_training_on_a_loader_of_their_batches(path, precision):
    model, once = Net(keeps=True), Net(keeps=True)
    ours = train(precision, model, images(path, precision), callbacks=[BatchEcho(2, num_splits=2, scale_lr="keep")])
    plain = train(precision, Net(), Steps(model.batches))
    assert differences(ours, plain) == []
    train(precision, once, images(path, precision))
    assert_echoed(model.batches, once.batches)


def test_a_batch_done_again_whole_leaves_the_same_bits(path, precision):
    plain = plain_of(path, precision)
    recovery = OOMRecovery()
    ours = train(precision, Net(fails=[1]), images(path, precision), callbacks=[recovery])
    assert [event.num_microbatches for event in recovery.events] == [1]
    assert_plain(ours, plain, precision)


def test_a_batch_in_microbatches_differs_by_roundings_of_the_precision(path, precision):
    plain = train(precision, Net("sgd"), images(path, precision))
    recovery = OOMRecovery()
    ours = train(precision, Net("sgd", fails=[1, 2]), images(path, precision), callbacks=[recovery])
    assert [event.num_microbatches for event in recovery.events] == [2]
    assert_close(ours, plain, precision)


# Two ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(folder: Path, path: Path) -> dict[str, list[dict[str, Any]]]:
    plan = {"world_size": 2, "out": str(folder), "file": str(path)}
    text = run_ranks(WORKER, plan, folder, num_processes=2, limit_seconds=200)
    names = [f"{name} {precision}" for name in TRAININGS for precision in PRECISIONS]
    files = {name: [folder / f"{name}.{rank}.pt" for rank in range(2)] for name in names}
    assert all(file.exists() for both in files.values() for file in both), text[-6000:]
    return {name: [torch.load(file, weights_only=True) for file in both] for name, both in files.items()}


def test_gradients_out_of_order_give_the_training_of_ddp(ranks, precision):
    for ours, plain in zip(ranks[f"out of order {precision}"], ranks[f"ddp {precision}"], strict=True):
        assert_plain(ours, plain, precision, num_steps=4)  # half of the samples are the other rank's


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_gives_the_training_of_one_device_on_the_same_microbatches(ranks, path, precision, name):
    plain = microbatched_of(path, precision)
    zero, one = ranks[f"{name} {precision}"]
    assert_plain(zero, plain, precision)
    # The state of an optimizer is whole on the rank that writes files.
    assert [key for key in differences(one, plain) if key != "optimizers"] == []
