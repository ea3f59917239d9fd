"""One of two ranks that train in every precision. Started by test_precisions.py, once per rank, with a plan as JSON.

    python precision_worker.py PLAN.json

Each rank saves what came of training NAME in a precision as OUT/NAME PRECISION.<rank>.pt.
"""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from lightning_gpufeed import OutOfOrderStrategy
from tests.precision_models import PRECISIONS, Net, datamodule, train

OUT_OF_ORDER: dict[str, Any] = {"reverse_first_k": 3, "cross_iteration": True, "bucket_bytes": 200}
TWO: dict[str, Any] = {"pipeline_size": 2, "num_microbatches": 2}
PIPELINES: dict[str, dict[str, Any]] = {
    "pipeline": {**TWO, "layers_per_stage": 1},
    "pipeline, backward early": {**TWO, "layers_per_stage": 3, "schedule": "zero_bubble"},
}
TRAININGS = ["ddp", "out of order", *PIPELINES]


def strategy_of(name: str) -> DDPStrategy:
    """DDP, or ours. A rank that waits in vain for the other fails."""
    common: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=60)}
    if name == "ddp":
        return DDPStrategy(**common)
    return OutOfOrderStrategy(**common, **PIPELINES.get(name, OUT_OF_ORDER))


def main() -> None:
    """Every training in every precision, in one process group."""
    warnings.simplefilter("ignore")  # Lightning's, about itself
    plan = json.loads(Path(sys.argv[1]).read_text())
    for name in TRAININGS:
        for precision in PRECISIONS:
            result = train(precision, Net(), datamodule(plan["file"]), strategy=strategy_of(name), devices=2)
            torch.save(result, Path(plan["out"]) / f"{name} {precision}.{distributed.get_rank()}.pt")
            print(f"{name} {precision}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
