"""`OOMRecovery` built by LightningCLI from YAML is the one that was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpufeed import OOMRecovery
from tests.callbacks.test_batch_echo_yaml import run
from tests.datamodules.models import write_images

pytestmark = [
    # Lightning 2.6 registers its instantiators under a name that jsonargparse is going to drop.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]


def count_known(batch: Any) -> int:
    """A weight that YAML names by where it is."""
    return int((batch[1] >= 0).sum())


def written(tmp_path: Path, **init_args: Any) -> OOMRecovery:
    train = write_images(tmp_path / "train.h5", 20)
    cli = run(tmp_path, train, {"class_path": "lightning_gpufeed.OOMRecovery", "init_args": init_args})
    [callback] = [callback for callback in cli.trainer.callbacks if isinstance(callback, OOMRecovery)]
    assert [len(samples) for _, samples in cli.model.trained] != []
    return callback


def test_arguments_arrive_as_written(tmp_path):
    callback = written(
        tmp_path,
        num_microbatches=2,
        grow_after=None,
        weight_fn="tests.callbacks.test_oom_recovery_yaml.count_known",
        split_check="warn",
    )
    assert callback.num_microbatches == 2
    assert callback.split_check == "warn"
    assert callback.weight_fn is not None
    assert callback.weight_fn([None, torch.tensor([1, -1, 3])]) == 2


def test_the_loader_of_a_datamodule_from_yaml_can_be_made_smaller(tmp_path):
    callback = written(tmp_path, mode="shrink_loader", scale_lr="sqrt")
    assert (callback.mode, callback.scale_lr) == ("shrink_loader", "sqrt")
