"""One rank of trainings whose parts log figures. Started by test_loggers.py, once per rank, with a plan as JSON.

    python logger_worker.py PLAN.json

Every rank has all loggers, and a list in memory that keeps what any rank is told to log. What that list holds, and the
lines that the strategy says, are saved as OUT/<name>.<rank>.json.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader

from lightning_gpufeed import BatchEcho, FeedMonitor, OOMRecovery, OutOfOrderStrategy
from tests.datamodules.models import MemoryLogger, make_trainer
from tests.doubles import KeptList
from tests.strategies.pipeline_strategy_worker import messages_kept

NUM_STEPS = 60
"""More than are needed to find an order, to try it, and to measure a pipeline."""
GIVEN: dict[str, Any] = {"reverse_first_k": 2, "cross_iteration": True, "bucket_bytes": 1}
RUNS: dict[str, dict[str, Any]] = {
    "sync, found": {"strategy": {}, "monitored": True},
    "sync, given": {"strategy": GIVEN, "num_steps": 4, "saved": True},
    "sync, resumed": {"strategy": GIVEN, "num_steps": 4, "num_epochs": 2, "resumed": "sync, given"},
    "pipeline": {"strategy": {"pipeline_size": 2, "num_microbatches": 4}, "num_steps": 16, "saved": True},
    "pipeline, resumed": {
        "strategy": {"pipeline_size": 2, "num_microbatches": 2, "layers_per_stage": 2},
        "num_steps": 16,
        "num_epochs": 2,
        "resumed": "pipeline",
    },
    "callbacks on ranks": {"strategy": None, "num_steps": 4, "fails": True},
    "no logger": {"strategy": GIVEN, "num_steps": 4, "logs": False},
}


class Deep(pl.LightningModule):
    """Four layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.has_to_fail = KeptList()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Log in the usual way too."""
        if self.has_to_fail and self.global_rank == 1:
            raise self.has_to_fail.pop()
        loss: Tensor = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any one."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def every_logger(folder: Path, name: str) -> tuple[list[Logger], MemoryLogger]:
    """Files of two kinds, and a list."""
    memory = MemoryLogger()
    return [CSVLogger(folder, name, version=0), TensorBoardLogger(folder / "events", name, version=0), memory], memory


def train(
    folder: Path,
    name: str,
    *,
    strategy: dict[str, Any] | None,
    num_steps: int = NUM_STEPS,
    num_epochs: int = 1,
    monitored: bool = False,
    fails: bool = False,
    saved: bool = False,
    resumed: str = "",
    logs: bool = True,
) -> dict[str, Any]:
    """Train with all loggers, and give what they were told; with `fails` under DDP, with all callbacks."""
    common: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=60)}
    callbacks: list[pl.Callback] = [FeedMonitor(table=False)] if monitored or fails else []
    if fails:
        callbacks += [BatchEcho(2, scale_lr="keep"), OOMRecovery()]
    loggers, memory = every_logger(folder, name)
    said: list[str] = []
    with messages_kept(said):
        trainer = make_trainer(
            strategy=DDPStrategy(**common) if strategy is None else OutOfOrderStrategy(**common, **strategy),
            devices=2,
            logger=loggers if logs else False,
            callbacks=callbacks,
            default_root_dir=folder / f"root of {name}",
            max_epochs=num_epochs,
        )
        num_shards = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
        batches = torch.randn(num_steps * num_shards, 8, 16, generator=torch.Generator().manual_seed(1))
        model = Deep()
        if fails:
            model.has_to_fail.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        arguments = {"ckpt_path": str(folder / f"{resumed}.ckpt")} if resumed else {}
        trainer.fit(model, DataLoader(batches, batch_size=None), **arguments)
    if saved:
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    return {"logged": memory.logged, "said": said, "global_step": trainer.global_step}


def main() -> None:
    """All of them in one process group."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(plan["out"])
    for name, arguments in RUNS.items():
        result = train(folder, name, **arguments)
        (folder / f"{name}.{distributed.get_rank()}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
