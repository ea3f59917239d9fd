"""One of two ranks in which trainings fail, and others follow in the same processes and the same process group.

    python failing_worker.py PLAN.json

Run by test_pipeline_failures.py and test_signals.py, once per rank. The plan names cells, each a training with a point
at which it fails, or at which signals are sent; what came of it is saved as OUT/<name>.<rank>.pt. Nothing is given back
between two cells, as in a script that tries one setting after the other.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpufeed import OutOfOrderStrategy
from tests.datamodules.models import make_trainer

RANK = int(os.environ.get("LOCAL_RANK", "0"))
WIDTH = 8


class PlannedError(Exception):
    """What a user's code may raise."""


class Layer(nn.Module):
    """Asks before each forward whether it is time."""

    def __init__(self, number: int, owner: Any) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(WIDTH, WIDTH), number
        self.tell = owner.reach

    def forward(self, x: Tensor) -> Tensor:
        self.tell(f"layer {self.number}")
        return torch.tanh(self.linear(x))


class Net(pl.LightningModule):
    """Fails, or has signals sent, at a point of a training.

    Args:
        point: Its name; None for none.
        ranks: Where.
        is_signal: Whether SIGTERM is sent to these ranks by the last one, and nothing fails.
        folder: Has the numbers of the processes.
        pause: Seconds that a step takes at least.
    """

    def __init__(
        self, point: str | None, ranks: list[int], folder: Path, *, is_signal: bool = False, pause: float = 0.0
    ) -> None:
        super().__init__()
        self.point, self.ranks, self.folder, self.is_signal = point, ranks, folder, is_signal
        self.num_batches, self.num_evaluated, self.pause = 0, 0, pause
        torch.manual_seed(1)
        self.body = nn.Sequential(*[Layer(number, self) for number in range(4)], nn.Linear(WIDTH, 2))

    def reach(self, point: str) -> None:
        """In the second step, the third for a signal, or in the first validation, act if this is the point."""
        is_early = self.num_batches < 2 + self.is_signal and not point.startswith(("configure", "validation"))
        if point != self.point or is_early:
            return
        if not self.is_signal and RANK in self.ranks:
            raise PlannedError(point)
        if self.is_signal and RANK == 1:
            self.point = None
            for rank in self.ranks:
                os.kill(int((self.folder / f"pid.{rank}").read_text()), signal.SIGTERM)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_batches += 1
        time.sleep(self.pause)
        self.reach("before")
        out = self.body(batch[0])
        self.reach("after forward")
        loss = functional.cross_entropy(out, batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("optimizer")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_evaluated += 1
        self.reach(f"validation {batch_idx}")
        self.log("val", self.body(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        self.reach("configure")
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(num_samples: int) -> DataLoader[Any]:
    """Of 8, and a smaller last one."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.arange(num_samples) % 2), 8)


def train(
    folder: Path,
    *,
    point: str | None = None,
    ranks: tuple[int, ...] | list[int] = (),
    pipeline_size: int = 2,
    schedule: str = "fast_forward",
    timeout_seconds: float = 60,
    resume: str | None = None,
    saves: str | None = None,
    is_signal: bool = False,
    pause: float = 0.0,
    call: str = "fit",
) -> dict[str, Any]:
    """One epoch of five steps, with a validation after the second and the fourth.

    Args:
        folder: For checkpoints.
        point: See `Net`.
        ranks: Likewise.
        pipeline_size: 2; 1 for ranks that each have the whole model.
        schedule: Of the pipeline.
        timeout_seconds: How long a rank waits for the other.
        resume: Checkpoint to go on from.
        saves: "steps", or "exception" for when the training is broken off.
        is_signal: See `Net`.
        pause: Likewise.
        call: "fit" or "validate".

    Returns:
        The error, or the weights; how many steps were taken, and how many batches of validation.
    """
    model = Net(point, list(ranks), folder.parent, is_signal=is_signal, pause=pause)
    saving: list[Any] = []
    if saves == "steps":
        saving = [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    elif saves == "exception":
        saving = [OnExceptionCheckpoint(folder)]
    options: dict[str, Any] = {}
    num_replicas = 2 // pipeline_size
    if pipeline_size > 1:
        layers_per_stage = 1 if schedule == "fast_forward" else "auto"
        options = {"num_microbatches": 2, "schedule": schedule, "layers_per_stage": layers_per_stage}
    trainer = make_trainer(
        strategy=OutOfOrderStrategy(
            pipeline_size=pipeline_size,
            **options,
            process_group_backend="gloo",
            timeout=timedelta(seconds=timeout_seconds),
        ),
        devices=2,
        callbacks=saving,
        enable_checkpointing=bool(saving),
        max_epochs=1,
        val_check_interval=2,
    )
    error = None
    try:
        if call == "fit":
            trainer.fit(
                model, batches(35 * num_replicas), batches(40 * num_replicas), ckpt_path=resume, weights_only=False
            )
        else:
            trainer.validate(model, batches(40 * num_replicas), verbose=False)
    except (Exception, SystemExit) as raised:
        error = {"type": type(raised).__name__, "text": str(raised)}
    weights = None if error else torch.cat([one.detach().flatten() for one in model.parameters()])
    return {
        "error": error,
        "weights": weights,
        "num_steps": trainer.global_step,
        "num_evaluated": model.num_evaluated,
        "left": sorted({*vars(trainer._signal_connector)} & {"_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"}),
    }


def main() -> None:
    """Run the plan."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    plan = json.loads(Path(sys.argv[1]).read_text())
    out = Path(plan["out"])
    (out / f"pid.{RANK}.new").write_text(str(os.getpid()))
    (out / f"pid.{RANK}.new").rename(out / f"pid.{RANK}")
    for cell in plan["cells"]:
        result = train(out / cell["name"], **cell["arguments"])
        gc.collect()  # a Trainer goes round in circles, and holds what has been destroyed
        torch.save(result | {"num_threads": len(os.listdir("/proc/self/task"))}, out / f"{cell['name']}.{RANK}.pt")
        print(f"{cell['name']}: {result['error']}", flush=True)
    with contextlib.suppress(RuntimeError):
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
