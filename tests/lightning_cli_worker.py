"""One rank of a `train.py`. Started by test_lightning_cli.py, once per rank, with a plan as JSON.

    python lightning_cli_worker.py PLAN.json

The plan names trainings: their configurations, and for each whether it goes on from a checkpoint of itself afterwards.
What each gives is saved as OUT/<name>.<rank>.pt; an error is a result like any other.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LightningCLI

from tests.lightning_cli_parts import EveryPart, end_of, run_program


def train_and_go_on(name: str, config: str) -> dict[str, Any]:
    """A training; then a second one from its saved configuration and a checkpoint in the middle."""
    whole = run_program(["fit", f"--config={config}", f"--trainer.default_root_dir={name}"], EveryPart)
    checkpoints = sorted(Path(name, "checkpoints").glob("*.ckpt"))
    middle = checkpoints[len(checkpoints) // 2]
    saved = ["fit", f"--config={name}/config.yaml", f"--ckpt_path={middle}"]
    again = run_program([*saved, f"--trainer.default_root_dir={name}_again"], EveryPart)
    losses = {"losses": len(whole.model.losses), "losses_again": len(again.model.losses)}
    strategy = type(whole.trainer.strategy).__name__
    return {"whole": end_of(whole), "again": end_of(again), "strategy": strategy, **losses}


def train_the_example(script: str, configs: list[str]) -> dict[str, Any]:
    """The example's own train.py, with an addition."""
    model = runpy.run_path(script)["Classifier"]
    arguments = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    arguments += ["--trainer.enable_checkpointing=false"]
    configured = [f"--config={config}" for config in configs]
    cli = run_program(["fit", *configured, *arguments], LightningCLI, model_class=model, save_config_callback=None)
    return {"whole": end_of(cli), "strategy": type(cli.trainer.strategy).__name__}


def main() -> None:
    """Run the plan."""
    warnings.simplefilter("ignore")
    plan = json.loads(Path(sys.argv[1]).read_text())
    rank = os.environ.get("LOCAL_RANK", "0")
    os.chdir(plan["folder"])
    for name, training in plan["trainings"].items():
        try:
            result = train_the_example(**training) if "script" in training else train_and_go_on(name, **training)
        except (Exception, SystemExit):
            result = {"error": traceback.format_exc()}
        torch.save(result, Path(plan["out"], f"{name}.{rank}.pt"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
