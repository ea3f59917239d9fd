"""One rank of a real process group. Started by test_composition.py, once per rank, with a plan as JSON.

    python composition_worker.py PLAN.json

The plan names cells, run one after the other in the same process group. What a rank found is saved as
OUT/<name>.<rank>.pt. An error is a result like any other: its type, its text, and how many steps came before it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import distributed

from lightning_gpufeed import BatchEcho
from tests.composition_models import (
    NUM_MICROBATCHES,
    WHOLE,
    Net,
    callbacks_of,
    data_of,
    facts_of,
    found,
    num_replicas_of,
    strategy_of,
)
from tests.datamodules.models import MemoryLogger, make_trainer
from tests.process_groups import agree_on_port, end_of_cell

RANK = int(os.environ.get("LOCAL_RANK", "0"))


def train(
    plan: dict[str, Any],
    folder: Path,
    *,
    parts: str,
    is_plain: bool = False,
    resume: str | None = None,
    save_at: int | None = None,
    call: str = "fit",
    net: dict[str, Any] | None = None,
    replay: dict[str, list[int]] | None = None,
    strategy: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Two epochs.

    Args:
        plan: Of all cells.
        folder: For checkpoints.
        parts: Letters.
        is_plain: Whether the training has none of these parts, but is what they stand for.
        resume: Checkpoint to go on from.
        save_at: After how many steps, each time, there is a checkpoint.
        call: "fit" or "validate".
        net: Arguments of the module.
        replay: Epoch and how often each of its batches is used, for an echo that finds that out.
        strategy: Arguments of ours.
        settings: Of the Trainer.
    """
    world_size = plan["world_size"]
    num_replicas = world_size if is_plain else num_replicas_of(parts, world_size)
    share = (num_replicas, RANK * num_replicas // world_size)
    usual: dict[str, Any] = {}
    if is_plain:
        usual["num_parts"] = NUM_MICROBATCHES if "P" in parts else 1
        data = data_of("", plan["files"], share, echoes="E" in parts)
        callbacks, chosen = [], strategy_of("", world_size)
    else:
        usual["waits"] = "A" in parts and replay is None
        if "R" in parts and world_size - 1 == RANK and resume is None:
            usual["failures"] = WHOLE
        data = data_of(parts, plan["files"], share)
        callbacks, chosen = callbacks_of(parts), strategy_of(parts, world_size, **strategy or {})
    for echo in [one for one in callbacks if isinstance(one, BatchEcho) and replay is not None]:
        echo.replay = {int(epoch): passes for epoch, passes in (replay or {}).items()}  # JSON has text as keys
    model, logger, error = Net(**usual | (net or {})), MemoryLogger(), None
    saving = [] if save_at is None else [ModelCheckpoint(folder, "{step}", every_n_train_steps=save_at, save_top_k=-1)]
    trainer = make_trainer(
        strategy=chosen,
        devices=world_size,
        callbacks=[*callbacks, *saving],
        logger=logger,
        enable_checkpointing=bool(saving),
        use_distributed_sampler=False,
        **{"max_epochs": 2, **settings},
    )
    try:
        if call == "validate":
            trainer.validate(model, data.get("val_dataloaders"), datamodule=data.get("datamodule"), verbose=False)
        else:
            trainer.fit(model, ckpt_path=resume, **data, **({} if resume is None else {"weights_only": False}))
    except Exception as raised:
        error = {"type": type(raised).__name__, "text": str(raised)}
    return {
        "error": error,
        "trained": model.trained,
        "losses": model.losses,
        "evaluated": model.evaluated,
        "num_failures_left": len(model.failures),
        "callbacks": {type(one).__name__: facts_of(one) for one in callbacks},
        **({} if error else found(trainer, model, logger)),
    }


def main() -> None:
    """Run the plan."""
    gc.collect()
    gc.freeze()  # what was imported need not be looked through each time
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    plan = json.loads(Path(sys.argv[1]).read_text())
    for cell in plan["cells"]:
        begin = time.monotonic()
        agree_on_port(Path(plan["out"]) / f"{cell['name']}.port", RANK)
        name = cell["name"]
        try:
            result = train(plan, Path(plan["out"]) / name, **cell["arguments"])
        except Exception as error:
            result = {"error": {"type": type(error).__name__, "text": str(error)}, "trained": [], "evaluated": []}
        torch.save(result, Path(plan["out"]) / f"{name}.{RANK}.pt")
        end_of_cell(is_well=not result["error"])
        print(f"{name}: {time.monotonic() - begin:.2f} s {result['error']}", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
