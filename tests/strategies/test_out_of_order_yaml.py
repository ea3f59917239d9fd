"""`OutOfOrderStrategy` built by LightningCLI, by its name, or with wrong arguments."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_gpufeed import H5ImageDataModule, OutOfOrderStrategy
from tests.datamodules.models import Recorder, make_trainer, write_images

pytestmark = [
    # Lightning 2.6 registers its instantiators under a name that jsonargparse is going to drop.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]


def run(tmp_path: Path, strategy: Any, *arguments: str) -> pl.Trainer:
    """Run a training from a YAML file, as `python train.py fit --config config.yaml ...` does."""
    train = write_images(tmp_path / "train.h5", 20)
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
            "strategy": strategy,
        },
        "seed_everything": False,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "fit", f"--config={tmp_path / 'config.yaml'}", *arguments])
        cli = LightningCLI(
            Recorder, H5ImageDataModule, subclass_mode_model=True, subclass_mode_data=True, save_config_callback=None
        )
    return cli.trainer


def test_a_strategy_from_yaml_is_the_one_that_was_written(tmp_path):
    arguments = {"reverse_first_k": 1, "cross_iteration": True, "bucket_bytes": "auto", "memory_cap_bytes": 1000}
    trainer = run(tmp_path, {"class_path": "lightning_gpufeed.OutOfOrderStrategy", "init_args": arguments})
    assert isinstance(trainer.strategy, OutOfOrderStrategy)
    options = trainer.strategy._options
    assert (options.reverse_first_k, options.cross_iteration, options.bucket_bytes) == (1, True, "auto")
    assert options.memory_cap_bytes == 1000
    assert trainer.global_step == 3


def test_a_strategy_from_the_command_line_is_the_one_that_was_written(tmp_path):
    line = ["--trainer.strategy=lightning_gpufeed.OutOfOrderStrategy", "--trainer.strategy.verify_every=2"]
    trainer = run(tmp_path, "auto", *line)
    assert isinstance(trainer.strategy, OutOfOrderStrategy)
    assert trainer.strategy._verify_every == 2


@pytest.mark.parametrize("name", ["out_of_order", "out_of_order_find_unused_parameters_true", "OUT_OF_ORDER"])
def test_a_strategy_can_be_asked_for_by_its_name(name):
    strategy = make_trainer(strategy=name).strategy
    assert type(strategy) is OutOfOrderStrategy
    assert strategy._find_unused_parameters == name.endswith("true")


@pytest.mark.parametrize("unused", ["", "_find_unused_parameters_true"])
@pytest.mark.parametrize(
    ("launched", "start_method"), [("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")]
)
def test_every_way_in_which_ddp_starts_ranks_has_a_name_here_too(launched, start_method, unused):
    strategy = make_trainer(strategy=f"out_of_order{launched}{unused}").strategy
    assert type(strategy) is OutOfOrderStrategy
    assert strategy._start_method == start_method == make_trainer(strategy=f"ddp{launched}").strategy._start_method
    assert strategy._find_unused_parameters == bool(unused)


def test_its_names_are_registered_with_a_description():
    assert "out_of_order" in StrategyRegistry.available_strategies()
    assert StrategyRegistry["out_of_order"]["description"] == "Data parallel with out-of-order gradient sync"


def test_arguments_of_ddp_without_meaning_here_are_taken_and_others_reach_ddp():
    strategy = OutOfOrderStrategy(static_graph=True, gradient_as_bucket_view=True, timeout=timedelta(seconds=7))
    assert isinstance(strategy, DDPStrategy)
    assert strategy._timeout == timedelta(seconds=7)
    assert strategy._ddp_kwargs == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verify_evry": 1}, r"verify_evry: gradients are reduced without DistributedDataParallel here"),
        ({"ddp_comm_hook": print}, r"ddp_comm_hook: gradients are reduced without DistributedDataParallel"),
        ({"model_averaging_period": 3}, r"model_averaging_period: gradients are reduced without"),
        ({"bucket_cap_mb": 25}, r"bucket_cap_mb is given; expected bucket_bytes, in bytes, or 'auto'"),
        ({"reverse_first_k": -1}, r"reverse_first_k is -1; expected a whole number from 0 on, or 'auto'"),
        ({"reverse_first_k": "all"}, r"reverse_first_k is 'all'; expected a whole number from 0 on, or 'auto'"),
        ({"cross_iteration": 1}, r"cross_iteration is 1; expected True, False or 'auto'"),
        ({"start_method": "foo"}, r"start_method is 'foo'; expected 'popen', 'spawn', 'fork', 'forkserver'"),
        ({"bucket_bytes": 0}, r"bucket_bytes is 0; expected a whole number from 1 on, or 'auto'"),
        (
            {"memory_cap_bytes": 1.5},
            r"memory_cap_bytes is 1\.5; expected a whole number from 0 on, or None for no limit",
        ),
    ],
    ids=lambda value: (
        "" if isinstance(value, str) else "-".join(f"{name}={of}" for name, of in value.items() if of is not print)
    ),
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OutOfOrderStrategy(**arguments)


def test_more_layers_to_reverse_than_there_are_is_said_with_their_number(tmp_path):
    strategy = OutOfOrderStrategy(reverse_first_k=7, cross_iteration=True, bucket_bytes=100)
    loader = torch.utils.data.DataLoader(torch.randn(4, 3))
    with pytest.raises(ValueError, match="reverse_first_k is 7; expected at most 1, the number of layers"):
        make_trainer(strategy=strategy, max_epochs=1).fit(_OneLayer(), loader)


class _OneLayer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
