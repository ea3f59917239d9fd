"""`BatchEcho` built by LightningCLI from YAML or from the command line is the one that was written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_gpufeed import BatchEcho, H5ImageDataModule
from tests.datamodules.models import Recorder, write_images

pytestmark = [
    # Lightning 2.6 registers its instantiators under a name that jsonargparse is going to drop.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]

NUM_SAMPLES = 20


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write_images(tmp_path / "train.h5", NUM_SAMPLES)


def run(
    tmp_path: Path, train: Path, callbacks: Any, *arguments: str, command: str = "fit", **trainer: Any
) -> LightningCLI:
    """Run a training from a YAML file, as `python train.py fit --config config.yaml ...` does."""
    config = {
        "data": {
            "class_path": "lightning_gpufeed.H5ImageDataModule",
            "init_args": {"train": str(train), "batch_size": 8},
        },
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
            "callbacks": callbacks,
            **trainer,
        },
        "seed_everything": False,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", command, f"--config={tmp_path / 'config.yaml'}", *arguments])
        return LightningCLI(
            Recorder, H5ImageDataModule, subclass_mode_model=True, subclass_mode_data=True, save_config_callback=None
        )


def callback_of(cli: LightningCLI) -> BatchEcho:
    [callback] = [callback for callback in cli.trainer.callbacks if isinstance(callback, BatchEcho)]
    return callback


def written(**init_args: Any) -> dict[str, Any]:
    return {"class_path": "lightning_gpufeed.BatchEcho", "init_args": {"scale_lr": "keep"} | init_args}


@pytest.mark.parametrize("as_list", [True, False])
def test_a_fixed_echo_from_yaml_trains_as_often_as_written(tmp_path, train, as_list):
    callback = written(echo_factor=2, num_splits=2)
    cli = run(tmp_path, train, [callback] if as_list else callback)
    assert callback_of(cli).echo_factor == 2
    assert [len(samples) for _, samples in cli.model.trained] == [4] * 8 + [2] * 4
    assert sorted(cli.model.trained_by_epoch[0]) == sorted(2 * list(range(NUM_SAMPLES)))


@pytest.mark.parametrize(
    ("init_args", "attributes"),
    [
        ({}, {"echo_factor": "auto", "num_splits": 1, "max_echo_factor": 5, "seed": 0, "read_ahead": True}),
        ({"echo_factor": "auto", "max_echo_factor": 3}, {"echo_factor": "auto", "max_echo_factor": 3}),
        ({"echo_factor": 1, "read_ahead": False, "seed": 7}, {"echo_factor": 1, "read_ahead": False, "seed": 7}),
        ({"scale_lr": "inverse", "echo_factor": 3}, {"scale_lr": "inverse"}),
        ({"replay": {0: [1, 2, 1]}}, {"replay": {0: [1, 2, 1]}}),
        ({"replay": None}, {"replay": None}),
    ],
    ids=str,
)
def test_every_argument_arrives_as_it_was_written(tmp_path, train, init_args, attributes):
    callback = callback_of(run(tmp_path, train, [written(**init_args)]))
    assert {name: getattr(callback, name) for name in attributes} == attributes


def test_a_null_scale_is_none_and_is_warned_of(tmp_path, train):
    with pytest.warns(UserWarning, match="Steps on repeated samples point the same way"):
        cli = run(tmp_path, train, [written(echo_factor=2, scale_lr=None)])
    assert callback_of(cli).scale_lr is None


def test_a_trace_written_in_yaml_is_replayed(tmp_path, train):
    cli = run(tmp_path, train, [written(replay={0: [1, 3, 2]})])
    assert callback_of(cli).trace == {0: [1, 3, 2]}
    assert [len(samples) for _, samples in cli.model.trained] == [8] * 4 + [4] * 2


def test_a_checkpoint_named_in_yaml_is_replayed(tmp_path, train):
    first = run(tmp_path, train, [written(replay={0: [2, 1, 3]})])
    first.trainer.save_checkpoint(tmp_path / "end.ckpt")
    cli = run(tmp_path, train, [written(replay=str(tmp_path / "end.ckpt"))])
    assert callback_of(cli).trace == {0: [2, 1, 3]}
    assert cli.model.trained == first.model.trained


def test_it_can_be_given_and_changed_on_the_command_line(tmp_path, train):
    cli = run(
        tmp_path,
        train,
        None,
        "--trainer.callbacks+=lightning_gpufeed.BatchEcho",
        "--trainer.callbacks.echo_factor=3",
        "--trainer.callbacks.scale_lr=keep",
    )
    assert callback_of(cli).echo_factor == 3
    assert len(cli.model.trained) == 9
    cli = run(
        tmp_path,
        train,
        None,
        "--trainer.callbacks+=lightning_gpufeed.BatchEcho",
        "--trainer.callbacks.echo_factor=auto",
        "--trainer.callbacks.max_echo_factor=1",
    )
    assert callback_of(cli).echo_factor == "auto"
    assert len(cli.model.trained) == 3


@pytest.mark.parametrize(
    ("init_args", "text"),
    [
        ({"echo_factor": 0}, "echo_factor is 0; expected at least 1, or 'auto'"),
        ({"echo_factor": "often"}, "echo_factor"),
        ({"echo_factor": 1.5}, "echo_factor"),
        ({"num_splits": 0}, "num_splits is 0; expected at least 1"),
        ({"scale_lr": "sqrt"}, "scale_lr"),
        ({"echo_factor": 2, "replay": {0: [1]}}, "replay is given, but echo_factor is 2"),
        ({"echo_factors": 2}, "echo_factors"),
    ],
    ids=str,
)
def test_a_bad_argument_in_yaml_is_named(tmp_path, train, init_args, text, capsys):
    # jsonargparse refuses some by their type and ends the program; the rest is ours to refuse.
    with pytest.raises((ValueError, SystemExit)) as error:
        run(tmp_path, train, [written(**init_args)])
    assert text in str(error.value) + capsys.readouterr().err


def test_the_configuration_is_printed_with_every_argument(tmp_path, train, capsys):
    with pytest.raises(SystemExit) as end:
        run(tmp_path, train, [written(echo_factor="auto", num_splits=2)], "--print_config")
    assert end.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["callbacks"] == [
        {
            "class_path": "lightning_gpufeed.BatchEcho",
            "init_args": {
                "echo_factor": "auto",
                "num_splits": 2,
                "max_echo_factor": 5,
                "scale_lr": "keep",
                "seed": 0,
                "replay": None,
                "read_ahead": True,
            },
        }
    ]


def test_the_saved_configuration_builds_the_same_again(tmp_path, train):
    cli = run(tmp_path, train, [written(echo_factor=3, num_splits=2, seed=4)])
    saved = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    [callback] = saved["fit"]["trainer"]["callbacks"]
    again = run(tmp_path, train, [callback])
    assert again.model.trained == cli.model.trained
    assert len(again.model.trained) == 18


def test_the_help_says_what_each_argument_is(tmp_path, train, capsys):
    with pytest.raises(SystemExit) as end:
        run(tmp_path, train, [written()], "--trainer.callbacks.help=lightning_gpufeed.BatchEcho")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for said in (
        "Steps that one pass over a batch is cut into",
        "Most uses of a batch with",
        "How often each batch is used",
    ):
        assert said in text
