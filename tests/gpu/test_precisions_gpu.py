"""What only a device can show of the Trainer's precisions: autocast and GradScaler on it, with every part of one card.

Each has a twin that runs everywhere, on more precisions: tests/test_precisions.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpufeed import BatchEcho, FeedMonitor, OOMRecovery, OutOfOrderStrategy
from tests.datamodules.models import write_images
from tests.precision_models import (
    NUM_TRAIN,
    Net,
    Steps,
    assert_close,
    assert_echoed,
    assert_plain,
    datamodule,
    differences,
    images,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but:UserWarning"),
    pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true", "bf16-true", "16-true"]),
]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Kernels that give the same bits twice."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("precisions") / "train.h5", NUM_TRAIN)


def on_device(precision: str, model: Net, *data: Any, **settings: Any) -> dict[str, Any]:
    return train(precision, model, *data, accelerator="gpu", devices=1, **settings)


def test_images_of_a_file_give_the_training_of_a_loader_of_tensors(path, precision):
    # Normalised on the device here, on the host there.
    plain = on_device(precision, Net(), images(path, precision))
    ours = on_device(precision, Net(), datamodule(path))
    assert_plain(ours, plain, precision)


def test_a_monitor_changes_nothing(path, precision):
    plain = on_device(precision, Net(), images(path, precision))
    ours = on_device(precision, Net(), images(path, precision), callbacks=[FeedMonitor(table=False)])
    assert_plain(ours, plain, precision)


def test_echoes_are_a_training_on_a_loader_of_their_batches(path, precision):
    model, once = Net(keeps=True), Net(keeps=True)
    echo = BatchEcho(2, num_splits=2, scale_lr="keep")
    ours = on_device(precision, model, images(path, precision), callbacks=[echo])
    plain = on_device(precision, Net(), Steps(model.batches))
    assert differences(ours, plain) == []
    on_device(precision, once, images(path, precision))
    assert_echoed(model.batches, once.batches)


def test_a_batch_done_again_whole_leaves_the_same_bits(path, precision):
    plain = on_device(precision, Net(), images(path, precision))
    recovery = OOMRecovery()
    ours = on_device(precision, Net(fails=[1]), images(path, precision), callbacks=[recovery])
    assert [event.num_microbatches for event in recovery.events] == [1]
    assert_plain(ours, plain, precision)


def test_a_batch_in_microbatches_differs_by_roundings_of_the_precision(path, precision):
    plain = on_device(precision, Net("sgd"), images(path, precision))
    recovery = OOMRecovery()
    ours = on_device(precision, Net("sgd", fails=[1, 2]), images(path, precision), callbacks=[recovery])
    assert [event.num_microbatches for event in recovery.events] == [2]
    assert_close(ours, plain, precision)


@pytest.mark.filterwarnings("ignore")  # of torch, about a group of one rank
def test_gradients_out_of_order_on_one_rank_give_the_training_without_a_strategy(path, precision):
    plain = on_device(precision, Net(), datamodule(path))
    strategy = OutOfOrderStrategy(reverse_first_k=3, cross_iteration=True, bucket_bytes=200)
    ours = on_device(precision, Net(), datamodule(path), strategy=strategy)
    assert_plain(ours, plain, precision)
