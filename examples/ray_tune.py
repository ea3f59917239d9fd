"""Searches settings for two ranks on Fashion-MNIST with Ray Tune: at random, over a grid, or the Bayesian way (Optuna).

    pip install 'lightning_gpufeed[ray]'
    python examples/ray_tune.py [--searcher random grid bayesian] [--trials 12] [--epochs 4] [--quick]

Searched: the learning rate, `echo_factor` of `BatchEcho`, the batch size of a rank, and `reverse_first_k` of
`OutOfOrderStrategy`. ASHA ends trials early that are behind. The table says what each has reached and how long it took:
`reverse_first_k` does not change a bit of the result, only the time of a step: it saves some where gradients travel
between machines, and costs some on one machine, where they are there at once.

A trial is a plain Lightning training on two ranks: the trial itself is rank 0 and reports to Tune, a Ray task is rank
1. Both processes stay from one trial to the next, so only the first one waits for imports. A `TorchTrainer` inside each
trial starts seven processes anew each time, and on two cores one that ASHA had ended did not give back its cores, for
which the next trial waited for ever (Ray 2.60, without its dashboard).
"""

from __future__ import annotations

import argparse
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import ray
import torch
from fashion_mnist import NUM_CLASSES, SmallConvNet, pack
from fetch_fashion_mnist import fetch
from lightning.pytorch import Callback, Trainer, seed_everything
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_local import local_ray
from rich.console import Console
from rich.table import Table

from lightning_gpufeed import BatchEcho, H5ImageDataModule, OutOfOrderStrategy

METRIC = "val_accuracy"
SEARCHERS = ("random", "grid", "bayesian")
NAMES = ("lr", "echo_factor", "batch_size", "reverse_first_k")
GRID = {"lr": [1e-3, 4e-3], "echo_factor": [1, 3], "batch_size": [32, 128], "reverse_first_k": [0, 3]}
SMALL_GRID = {"lr": [1e-4, 4e-3], "echo_factor": [1, 2], "batch_size": [64], "reverse_first_k": [3]}


class TunedConvNet(SmallConvNet):
    """With the learning rate that a trial is about."""

    def __init__(self, lr: float) -> None:
        super().__init__(NUM_CLASSES)
        self.lr = lr

    def _log_accuracy(self, name, batch):
        images, labels = batch
        self.log(name, (self.model(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class ReportToTune(Callback):
    """Rank 0 reports after each epoch; where Tune ends the trial, all ranks stop after the same step."""

    is_ended = False

    def on_validation_end(self, trainer, module):
        if trainer.is_global_zero:
            try:
                tune.report({METRIC: trainer.callback_metrics[METRIC].item()})
            except SystemExit:  # which is how Tune ends it
                self.is_ended = True
        if trainer.strategy.broadcast(self.is_ended):
            trainer.should_stop = True


def train(config: dict[str, Any], rank: int, port: int) -> bool:
    """One of the two ranks; gives whether Tune has ended the trial."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # As `torchrun` would say it. Lightning then starts no processes.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    seed_everything(0, verbose=False)
    num_samples = config["num_samples"]
    dm = H5ImageDataModule(
        config["train"],
        val=range(num_samples, num_samples + num_samples // 5),
        train_indices=range(num_samples),
        batch_size=config["batch_size"],
        mean="auto",
        std="auto",
        num_classes=NUM_CLASSES,
    )
    report = ReportToTune()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=OutOfOrderStrategy(reverse_first_k=config["reverse_first_k"], process_group_backend="gloo"),
        callbacks=[BatchEcho(config["echo_factor"], scale_lr="keep"), report],
        max_epochs=config["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    try:
        trainer.fit(TunedConvNet(config["lr"]), datamodule=dm)
    finally:  # the process goes on to the next trial
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return report.is_ended


def trial(config: dict[str, Any]) -> None:
    """Start rank 1 beside, and be rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    beside = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=1)
    rank_1 = ray.remote(train).options(num_cpus=1, scheduling_strategy=beside, max_retries=0).remote(config, 1, port)
    is_ended = train(config, 0, port)
    ray.get(rank_1)
    if is_ended:
        raise SystemExit  # which Tune waits for


def space_of(searcher: str, is_quick: bool) -> dict[str, Any]:
    """What each searcher chooses from."""
    if searcher == "grid":
        return {name: tune.grid_search(values) for name, values in (SMALL_GRID if is_quick else GRID).items()}
    return {
        "lr": tune.loguniform(1e-4, 3e-2),
        "echo_factor": tune.choice([1, 2, 4]),
        "batch_size": tune.choice([32, 64, 128]),
        "reverse_first_k": tune.randint(0, 5),  # the network has four layers with parameters
    }


def search(options: argparse.Namespace, searcher: str, train_file: Path, results: Path) -> tune.ResultGrid:
    """Run the trials of one searcher."""
    tuner = tune.Tuner(
        tune.with_resources(trial, tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}])),  # a core for each rank
        param_space={
            **space_of(searcher, options.quick),
            "epochs": options.epochs,
            "num_samples": options.samples,
            "train": str(train_file.resolve()),
        },
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            num_samples=1 if searcher == "grid" else options.trials,
            search_alg=OptunaSearch(seed=0) if searcher == "bayesian" else BasicVariantGenerator(random_state=0),
            scheduler=ASHAScheduler(max_t=options.epochs, grace_period=1, reduction_factor=2),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=str(results), verbose=0),
    )
    return tuner.fit()


def table_of(results: tune.ResultGrid, searcher: str, epochs: int) -> Table:
    """One line a trial, the best first."""
    table = Table(title=f"{searcher}: trials, the best first")
    for name in (*NAMES, "epochs", "accuracy", "seconds", "an epoch"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in sorted(results, key=lambda one: -one.metrics[METRIC]):
        done, seconds = one.metrics["training_iteration"], one.metrics["time_total_s"]
        table.add_row(
            *[f"{one.config[name]:.3g}" for name in NAMES],
            f"{done} of {epochs}",
            f"{100 * one.metrics[METRIC]:.2f} %",
            f"{seconds:.1f}",
            f"{seconds / done:.1f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searcher", nargs="+", choices=SEARCHERS, default=["bayesian"])
    parser.add_argument("--trials", type=int, default=12, help="of random and bayesian; a grid has 16")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=10_000, help="training images to use; a fifth more validate")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[1] / "data" / "fashion-mnist")
    parser.add_argument("--quick", action="store_true", help="four trials of two epochs over 400 images")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.epochs, options.samples = 4, 2, 400

    train_file = options.data / "train.h5"
    pack(fetch(options.data), train_file, "train")
    console = Console(width=100)
    with local_ray() as results:
        for searcher in options.searcher:
            found = search(options, searcher, train_file, results)
            if found.errors:
                raise SystemExit(f"{len(found.errors)} trials failed, the first with: {found.errors[0]}")
            console.print(table_of(found, searcher, options.epochs))
            best = found.get_best_result()
            chosen = ", ".join(f"{name}={best.config[name]:.3g}" for name in NAMES)
            accuracy = 100 * best.metrics[METRIC]
            console.print(f"best of {len(found)} ({searcher}): {chosen}: {accuracy:.2f} %", soft_wrap=True)


if __name__ == "__main__":
    main()
