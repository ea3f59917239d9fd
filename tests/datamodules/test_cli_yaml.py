"""A DataModule built by LightningCLI from YAML or from the command line gets what was written, in the right type."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_gpufeed import H5ImageDataModule, H5Loader
from lightning_gpufeed.hdf5.order import FullShuffle, NoShuffle, WeightedShuffle, WindowShuffle
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
        (None, NoShuffle()),
        (False, NoShuffle()),
        ("none", NoShuffle()),
    ],
)
def test_every_form_of_a_shuffle(tmp_path, files, written, order):
    cli = fit(tmp_path, {"train": str(files[0]), "shuffle": written, "seed": 3})
    assert trained(cli) == order.permutation(NUM_SAMPLES, 3, 0).tolist()


def test_a_window_in_samples(tmp_path, files):
    cli = fit(tmp_path, {"train": str(files[0]), "shuffle": "window:6", "seed": 3})
    with H5Loader(files[0], 4, shuffle=WindowShuffle(6), seed=3) as loader:
        assert trained(cli) == loader.order(0).tolist() != list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("written", "mean"), [("auto", None), (0.5, (0.5,)), ([0.25], (0.25,)), (None, "none"), (1, (1.0,))]
)
def test_every_form_of_a_mean(tmp_path, files, written, mean):
    cli = fit(tmp_path, {"train": str(files[0]), "mean": written})
    if mean is None:
        assert 0.4 < cli.datamodule.mean[0] < 0.6  # of random images
    else:
        assert cli.datamodule.mean == (None if mean == "none" else mean)


@pytest.fixture
def described(files: tuple[Path, Path]) -> str:
    """A training file that says more of its samples."""
    with h5py.File(files[0], "a") as h5_file:
        h5_file["importance"] = np.arange(NUM_SAMPLES) / 7
        h5_file["fold"] = np.arange(NUM_SAMPLES) % 4
        h5_file["patient"] = [f"p{number // 3}" for number in range(NUM_SAMPLES)]
        h5_file["mask_val"] = np.arange(NUM_SAMPLES) % 9 == 3
    return str(files[0])


ONLY_THREE = {number: float(number == 3) for number in range(NUM_SAMPLES)}


@pytest.mark.parametrize(
    ("written", "weights"),
    [
        ("importance", np.arange(NUM_SAMPLES)),
        ("balanced", np.ones(NUM_SAMPLES)),
        ([number / 7 for number in range(NUM_SAMPLES)], np.arange(NUM_SAMPLES)),
        ([0] * 19 + [1], np.arange(NUM_SAMPLES) == 19),
        (ONLY_THREE, np.arange(NUM_SAMPLES) == 3),
        ({str(number): int(weight) for number, weight in ONLY_THREE.items()}, np.arange(NUM_SAMPLES) == 3),
    ],
    ids=["column", "balanced", "numbers", "whole numbers", "classes", "classes in text"],
)
def test_every_form_of_weights(tmp_path, described, written, weights):
    expected = WeightedShuffle(weights / 7).permutation(12, 0, 0).tolist()
    arguments = {"train": described, "samples_per_epoch": 12}
    assert trained(fit(tmp_path, {**arguments, "sample_weights": written})) == expected
    option = f"--data.sample_weights={written if isinstance(written, str) else json.dumps(written)}"
    assert trained(fit(tmp_path, arguments, option)) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"fold": 2, "folds": "fold"}, [2, 6, 10, 14, 18]),
        ({"fold": 1, "folds": [0] * 18 + [1] * 2}, [18, 19]),
        ({"val": "mask_val"}, [3, 12]),
        ({"val": [number == 4 for number in range(NUM_SAMPLES)]}, [4]),
        ({"num_folds": 5, "fold": 0, "stratify": False, "group_by": "patient"}, 6),  # two of seven
    ],
    ids=["folds by name", "folds", "mask by name", "mask", "made"],
)
def test_every_form_of_a_part_for_validation(tmp_path, described, written, expected):
    as_text = {name: value if isinstance(value, str) else json.dumps(value) for name, value in written.items()}
    for init_args, arguments in [(written, []), ({}, [f"--data.{name}={text}" for name, text in as_text.items()])]:
        cli = fit(tmp_path, {"train": described, **init_args}, *arguments)
        assert sorted(trained(cli) + validated(cli)) == list(range(NUM_SAMPLES))
        assert len(validated(cli)) == expected if isinstance(expected, int) else validated(cli) == expected


@pytest.mark.parametrize("written", ["mask_val", [3, 12], [number % 9 == 3 for number in range(NUM_SAMPLES)]], ids=str)
def test_every_form_of_samples_to_train_on(tmp_path, described, written):
    assert sorted(trained(fit(tmp_path, {"train": described, "train_indices": written}))) == [3, 12]


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
