"""One rank of a real process group. Started by test_feed_monitor_ranks.py, once per rank, with a plan as JSON.

    python feed_rank_worker.py PLAN.json

The plan names scenarios, run one after the other, each of which gives a value that is saved as OUT/<name>.<rank>.pt.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed
from torch.utils.data import DataLoader, Dataset

from lightning_gpufeed import FeedMonitor
from tests.datamodules.models import MemoryLogger, make_trainer

RANK = int(os.environ.get("LOCAL_RANK", "0"))
NUM_BATCHES = 6
CLONE_NEWNS = 0x00020000


class Samples(Dataset[torch.Tensor]):
    """Takes its time on one rank."""

    def __init__(self, seconds: float, slow_rank: int = RANK, length: int = 2 * 2 * NUM_BATCHES) -> None:
        self.seconds, self.is_slow, self.length = seconds, slow_rank == RANK, length

    def __len__(self) -> int:
        """Samples of all ranks."""
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        """One of them."""
        if self.is_slow:
            time.sleep(self.seconds)
        return torch.full((4,), float(index))


class Model(pl.LightningModule):
    """A regression.

    Args:
        busy_rank: Which one computes longer.
        busy_seconds: By how much, on its core.
    """

    def __init__(self, busy_rank: int = -1, busy_seconds: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4, 1)
        self.is_busy, self.busy_seconds = busy_rank == RANK, busy_seconds

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Compute for a while."""
        begin = time.thread_time()
        while self.is_busy and time.thread_time() - begin < self.busy_seconds:
            pass
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        """Depends on all steps before."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def groups() -> dict[str, int]:
    """All process groups that this rank is in, and how many collectives each has had."""
    world = distributed.distributed_c10d._world
    return {world.pg_names[group]: group._get_sequence_number_for_group() for group in world.pg_map}


class Watch(pl.Callback):
    """Writes down the collectives after each step."""

    def __init__(self) -> None:
        self.epochs: list[list[dict[str, int]]] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        """A new list."""
        self.epochs.append([])

    def on_train_batch_end(self, *args: Any) -> None:
        """After each batch."""
        self.epochs[-1].append(groups())


class Raises(pl.Callback):
    """Breaks one rank in the second epoch."""

    def __init__(self, rank: int, where: str) -> None:
        self.rank, self.where = rank, where

    def end(self, trainer: pl.Trainer, where: str) -> None:
        """Break."""
        if (where, RANK, trainer.current_epoch) == (self.where, self.rank, 1):
            raise RuntimeError(f"broken on rank {RANK}")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """In the middle of an epoch."""
        if batch_idx == 2:
            self.end(trainer, "step")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Where the others ask for this rank's counters."""
        self.end(trainer, "epoch end")


# Scenarios ---------------------------------------------------------------------------------------------------


def train(
    plan: dict[str, Any],
    *,
    monitor: dict[str, Any] | None = None,
    slow: tuple[int, float] = (-1, 0.0),
    busy: tuple[int, float] = (-1, 0.0),
    raises: tuple[int, str] | None = None,
    num_steps: int = NUM_BATCHES,
) -> Any:
    """Train two epochs; `monitor` None is plain Lightning."""
    if monitor is not None and "report_path" in monitor:
        monitor["report_path"] += f".{RANK}"
    monitors = [] if monitor is None else [FeedMonitor(**{"table": False, "first_seconds": None, **monitor})]
    watch, logger = Watch(), MemoryLogger()
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=plan["timeout_seconds"]))
    trainer = make_trainer(
        strategy=strategy,
        devices=2,
        max_epochs=2,
        callbacks=[*([Raises(*raises)] if raises else []), *monitors, watch],
        logger=logger,
    )
    model = Model(*busy)
    loader = DataLoader(Samples(slow[1], slow[0], 2 * 2 * num_steps), batch_size=2)
    begin, error = time.monotonic(), None
    try:
        trainer.fit(model, loader)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    records = [summary(record) for one in monitors for record in one.records]
    return {
        "error": error,
        "seconds": time.monotonic() - begin,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "records": records,
        "epochs": watch.epochs,
        "groups_left": list(groups()) if distributed.is_initialized() else [],
        "logged": sorted({name for _, figures in logger.logged for name in figures}),
        "hooks": [name for name in ("_broadcast_sigterm_tensor",) if name in vars(trainer.fit_loop.epoch_loop)],
    }


def summary(record: Any) -> dict[str, Any]:
    """A record as plain values."""
    counters = record.counters
    return {
        "epoch": counters.epoch,
        "rank": counters.rank,
        "num_ranks": counters.num_ranks,
        "is_interim": record.is_interim,
        "cause": str(record.verdict.cause),
        "wait_share": record.verdict.wait_share,
        "line": record.line,
        "num_steps": counters.steps.num_steps,
        "sync_seconds": counters.steps.sync_seconds,
        "has_readers": counters.readers is not None,
        "num_hidden": counters.num_hidden_readers,
        "num_watched": counters.num_watched_steps,
        "cures": [(cure.name, cure.low, cure.high) for cure in record.verdict.cures],
    }


def without_proc(plan: dict[str, Any]) -> Any:
    """A training of one process in a place without /proc, with a worker; None where that place cannot be made.

    From here on this process has no /proc: a folder without anything in it is there instead, for this process only.
    """
    if RANK != 0 or not is_proc_hidden():
        return None
    monitor = FeedMonitor(table=False, first_seconds=1e-6, report_path=f"{plan['out']}/without_proc.html")
    logger = MemoryLogger()
    trainer = make_trainer(callbacks=[monitor], max_epochs=2, logger=logger)
    loader = DataLoader(Samples(0.005, length=16), batch_size=2, num_workers=1, persistent_workers=True)
    trainer.fit(Model(), loader)
    return {
        "records": [summary(record) for record in monitor.records],
        "has_page": Path(plan["out"], "without_proc.html").exists(),
        "logged": sorted({name for _, figures in logger.logged for name in figures}),
    }


def is_proc_hidden() -> bool:
    """Cover /proc with an empty folder, if this process may."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
        return False
    steps = [["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "nothing", "/proc"]]
    done = all(subprocess.run(step, capture_output=True, check=False).returncode == 0 for step in steps)
    return done and os.listdir("/proc") == []


SCENARIOS: dict[str, Callable[..., Any]] = {function.__name__: function for function in (train, without_proc)}


def main() -> None:
    """Run the plan."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Of Lightning and torch, about themselves and the machine.
    warnings.filterwarnings("ignore", message=".*LeafSpec|.*does not have many workers|.*torch.jit")
    plan = json.loads(Path(sys.argv[1]).read_text())
    for scenario in plan["scenarios"]:
        begin = time.monotonic()
        if "port" in scenario:
            os.environ["MASTER_PORT"] = str(scenario["port"])
        print(f"scenario {scenario['name']}", flush=True)
        try:
            result = SCENARIOS[scenario["run"]](plan, **scenario.get("arguments", {}))
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"}
        torch.save(result, Path(plan["out"]) / f"{scenario['name']}.{RANK}.pt")
        if "is_last" in scenario and distributed.is_initialized():
            # What has broken this group is not to be felt in the next; and it tells a rank that waits that it need not.
            gc.collect()
            distributed.destroy_process_group()
        print(f"{scenario['name']}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
