"""Ways to read and copy that change nothing of a training."""

from __future__ import annotations

import pytest
import torch

from lightning_gpufeed import H5ImageDataModule
from tests.datamodules.models import Recorder, make_trainer, write_images


def trained(path, **options):
    model = Recorder()
    datamodule = H5ImageDataModule(path, val=0.25, batch_size=4, seed=1, **options)
    make_trainer(max_epochs=2, val_check_interval=0.5).fit(model, datamodule)
    return model.trained, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("storage", ["raw", "gzip"])
def test_a_reading_process_and_copies_ahead_change_nothing_of_a_training(tmp_path, storage):
    path = write_images(tmp_path / "a.h5", 24, storage=storage)
    expected = trained(path, shuffle="window:8")
    for options in ({"copy_ahead": True}, {"isolate": True, "copy_ahead": True}):
        samples, weights = trained(path, shuffle="window:8", **options)
        assert samples == expected[0]
        assert all(torch.equal(one, other) for one, other in zip(weights, expected[1], strict=True))
