"""One rank of a real process group. Started by test_distributed.py, once per rank, with a plan as JSON.

    python rank_worker.py PLAN.json

The plan names scenarios, run one after the other in the same process group, each of which gives a value that is
written to OUT/<name>.<rank>.json. An error is a result like any other: its type and its text.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_gpufeed import H5DataModule, H5ImageDataModule
from tests.datamodules.models import Recorder, every_checkpoint, make_trainer


def trainer_of(plan: dict[str, Any], **settings: Any) -> Any:
    """A Trainer in the group of these processes. A rank that waits in vain for the others fails instead."""
    strategy = settings.pop("strategy", None) or DDPStrategy(
        process_group_backend="gloo", timeout=timedelta(seconds=60)
    )
    return make_trainer(strategy=strategy, devices=plan["world_size"], **settings)


def coverage(plan: dict[str, Any], *, use_distributed_sampler: bool) -> dict[str, Any]:
    """Two epochs of training with validation, then test and prediction."""
    files = plan["files"]
    datamodule = H5ImageDataModule(
        files["train"], val=files["val"], test=files["test"], batch_size=plan["batch_size"], mean="auto", std="auto"
    )
    model = Recorder()
    trainer = trainer_of(plan, max_epochs=2, use_distributed_sampler=use_distributed_sampler)
    trainer.fit(model, datamodule)
    fit_metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = model.layer.weight.detach().flatten().tolist()
    [test_metrics] = trainer.test(model, datamodule, verbose=False)
    predicted = trainer.predict(model, datamodule)
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "trained": model.trained,
        "evaluated": model.evaluated,
        "predicted": [batch.tolist() for batch in predicted],
        "metrics": fit_metrics | test_metrics,
        "global_step": trainer.global_step,
        "mean": datamodule.mean,
        "std": datamodule.std,
        "weights": weights,
    }


def weighted(plan: dict[str, Any], *, weights: list[float], samples_per_epoch: int) -> dict[str, Any]:
    """Two epochs of draws by weight, over one fold of five."""
    datamodule = H5ImageDataModule(
        plan["files"]["train"],
        num_folds=5,
        fold=3,
        sample_weights=weights,
        samples_per_epoch=samples_per_epoch,
        batch_size=plan["batch_size"],
    )
    model = Recorder()
    trainer_of(plan, max_epochs=2).fit(model, datamodule)
    return {"trained": model.trained, "evaluated": model.evaluated, "state": datamodule.state_dict()}


def save(plan: dict[str, Any], *, folder: str) -> dict[str, Any]:
    """Two epochs, saved at every place."""
    model = Recorder()
    datamodule = H5ImageDataModule(plan["files"]["train"], val=plan["files"]["val"], batch_size=plan["batch_size"])
    trainer = trainer_of(
        plan, max_epochs=2, enable_checkpointing=True, callbacks=every_checkpoint(Path(folder)), logger=False
    )
    trainer.fit(model, datamodule)
    return {"trained": model.trained}


def resume(plan: dict[str, Any], *, checkpoint: str, reads_estimate: bool = False) -> dict[str, Any]:
    """Go on from a checkpoint, made with any number of ranks, to the end of the third epoch."""
    model = Recorder(reads_estimate=reads_estimate)
    datamodule = H5ImageDataModule(plan["files"]["train"], val=plan["files"]["val"], batch_size=plan["batch_size"])
    trainer_of(plan, max_epochs=3).fit(model, datamodule, ckpt_path=checkpoint)
    return {"trained": model.trained, "validated_in": model.validated_in}


def statistics(plan: dict[str, Any], *, path: str) -> dict[str, Any]:
    """Train with automatic statistics."""
    datamodule = H5ImageDataModule(path, batch_size=2, mean="auto", std="auto")
    trainer_of(plan, max_epochs=1).fit(Recorder(), datamodule)
    return {"mean": datamodule.mean, "std": datamodule.std}


def statistics_without_training_data(plan: dict[str, Any], *, path: str) -> None:
    """Ask for statistics of data that is not there."""
    trainer_of(plan).test(
        Recorder(), H5ImageDataModule(test=path, mean="auto", std="auto", batch_size=2), verbose=False
    )


def too_few(plan: dict[str, Any], *, path: str) -> None:
    """Validate on fewer samples than there are ranks."""
    trainer_of(plan).validate(Recorder(), H5DataModule(val=path, batch_size=2), verbose=False)


def spawned(plan: dict[str, Any], *, folder: str) -> None:
    """Let Lightning start the ranks itself: it sends Trainer, model and DataModule to them, pickled."""
    files = plan["files"]
    datamodule = H5ImageDataModule(
        files["train"],
        val=0.25,
        test=files["test"],
        batch_size=plan["batch_size"],
        device_transform=torch.nn.Identity(),
    )
    datamodule.setup("fit")  # sent with all it knows
    next(iter(datamodule.train_dataloader()))
    datamodule.teardown("fit")
    model = WritingRecorder(folder)
    trainer_of(plan, max_epochs=2, strategy="ddp_spawn").fit(model, datamodule)


class WritingRecorder(Recorder):
    """Writes its findings from the process they were made in."""

    def __init__(self, folder: str) -> None:
        """Note where to."""
        super().__init__()
        self.folder = folder

    def write(self, name: str, value: Any) -> None:
        """One file per rank."""
        (Path(self.folder) / f"{name}.{self.global_rank}.json").write_text(json.dumps(value))

    def on_train_end(self) -> None:
        """Write what was trained on."""
        self.write("spawned_fit", {"trained": self.trained, "evaluated": self.evaluated, "process": os.getpid()})


SCENARIOS = {
    function.__name__: function
    for function in (coverage, weighted, save, resume, statistics, statistics_without_training_data, too_few, spawned)
}


def main() -> None:
    """Run the plan."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*LeafSpec|.*more than the dataset has|.*is zero. Please make sure")
    # Advice of Lightning and torch that says nothing about our side.
    warnings.filterwarnings("ignore", message=".*when using `ckpt_path`, callbacks|.*barrier\\(\\): using the device")
    warnings.filterwarnings("ignore", message=".*it is recommended to use `Trainer\\(devices=1")
    plan = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    for scenario in plan["scenarios"]:
        try:
            result = SCENARIOS[scenario["run"]](plan, **scenario.get("arguments", {}))
        except Exception as error:
            result = {"error": type(error).__name__, "text": str(error)}
        (Path(plan["out"]) / f"{scenario['name']}.{rank}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
