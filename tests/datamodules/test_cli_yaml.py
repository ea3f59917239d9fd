"""A DataModule built by LightningCLI from YAML or from the command line gets what was written, in the right type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_gpufeed import H5ImageDataModule
from lightning_gpufeed.hdf5.order import FullShuffle, NoShuffle, WindowShuffle
from tests.datamodules.models import Recorder, write_images

pytestmark = [
    pytest.mark.filterwarnings("ignore:batch_size .* is more than the dataset has:UserWarning"),
    # Lightning 2.6 registers its instantiators under a name that jsonargparse is going to drop.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]

NUM_SAMPLES = 20


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_images(tmp_path / "train.h5", NUM_SAMPLES), write_images(tmp_path / "val.h5", 4, seed=1)


def fit(tmp_path: Path, init_args: dict[str, Any], *arguments: str) -> LightningCLI:
    """Run `fit` from a YAML file, as `python train.py fit --config config.yaml ...` does."""
    config = {
        "data": {"class_path": "lightning_gpufeed.H5ImageDataModule", "init_args": init_args},
        "model": {"class_path": "tests.datamodules.models.Recorder", "init_args": {"num_features": 72}},
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        },
        "seed_everything": False,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "fit", f"--config={tmp_path / 'config.yaml'}", *arguments])
        return LightningCLI(
            Recorder, H5ImageDataModule, subclass_mode_model=True, subclass_mode_data=True, save_config_callback=None
        )


def trained(cli: LightningCLI) -> list[int]:
    return [sample for _, batch in cli.model.trained for sample in batch]


def validated(cli: LightningCLI) -> list[int]:
    return cli.model.samples("validate")


def test_a_fraction_and_a_transform_by_its_class_path(tmp_path, files):
    transform = {"class_path": "torch.nn.Identity"}
    cli = fit(tmp_path, {"train": str(files[0]), "val": 0.1, "batch_size": 4, "device_transform": transform})
    assert len(validated(cli)) == 2
    assert sorted(trained(cli) + validated(cli)) == list(range(NUM_SAMPLES))
    assert isinstance(cli.datamodule.device_transform, torch.nn.Identity)
    assert [len(batch) for _, batch in cli.model.trained] == [4, 4, 4, 4, 2]


def test_a_path(tmp_path, files):
    cli = fit(tmp_path, {"train": str(files[0]), "val": str(files[1])})
    assert validated(cli) == [0, 1, 2, 3]
    assert trained(cli) == FullShuffle().permutation(NUM_SAMPLES, 0, 0).tolist()


def test_sample_numbers(tmp_path, files):
    cli = fit(tmp_path, {"train": str(files[0]), "val": [7, 3], "train_indices": [7, 3, 1, 2]})
    assert validated(cli) == [7, 3]
    assert sorted(trained(cli)) == [1, 2]


def test_several_files(tmp_path, files):
    paths = [str(path) for path in files]
    cli = fit(tmp_path, {"train": paths, "val": paths[::-1], "shuffle": None})
    assert trained(cli) == [*range(NUM_SAMPLES), *range(4)]
    assert validated(cli) == [*range(4), *range(NUM_SAMPLES)]


@pytest.mark.parametrize(
    ("written", "order"),
    [
        ("full", FullShuffle()),
        (True, FullShuffle()),
        ("window:6", WindowShuffle(6)),
        (None, NoShuffle()),
        (False, NoShuffle()),
        ("none", NoShuffle()),
    ],
)
def test_every_form_of_a_shuffle(tmp_path, files, written, order):
    cli = fit(tmp_path, {"train": str(files[0]), "shuffle": written, "seed": 3})
    assert trained(cli) == order.permutation(NUM_SAMPLES, 3, 0).tolist()


@pytest.mark.parametrize(
    ("written", "mean"), [("auto", None), (0.5, (0.5,)), ([0.25], (0.25,)), (None, "none"), (1, (1.0,))]
)
def test_every_form_of_a_mean(tmp_path, files, written, mean):
    cli = fit(tmp_path, {"train": str(files[0]), "mean": written})
    if mean is None:
        assert 0.4 < cli.datamodule.mean[0] < 0.6  # of random images
    else:
        assert cli.datamodule.mean == (None if mean == "none" else mean)


def test_options_on_the_command_line_outweigh_the_file(tmp_path, files):
    cli = fit(
        tmp_path,
        {"train": str(files[0]), "val": str(files[1])},
        "--data.val=0.2",
        "--data.batch_size=5",
        "--data.mean=auto",
        "--data.std=[0.5]",
        "--data.shuffle=false",
    )
    assert len(validated(cli)) == 4
    assert trained(cli) == sorted(trained(cli))
    assert {len(batch) for _, batch in cli.model.trained} == {5, 1}
    assert cli.datamodule.std == (0.5,)


@pytest.mark.parametrize(("option", "expected"), [("[3, 1]", [3, 1]), ("null", [])])
def test_a_split_on_the_command_line(tmp_path, files, option, expected):
    cli = fit(tmp_path, {"train": str(files[0])}, f"--data.val={option}")
    assert validated(cli) == expected


def test_a_path_on_the_command_line(tmp_path, files):
    assert validated(fit(tmp_path, {"train": str(files[0])}, f"--data.val={files[1]}")) == [0, 1, 2, 3]


def test_the_saved_configuration_builds_the_same_again(tmp_path, files):
    cli = fit(tmp_path, {"train": str(files[0]), "val": 0.25, "mean": "auto", "shuffle": "window:6"})
    saved = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    init_args = saved["fit"]["data"]["init_args"]
    assert (init_args["val"], init_args["mean"], init_args["shuffle"]) == (0.25, "auto", "window:6")
    assert trained(fit(tmp_path, init_args)) == trained(cli)
