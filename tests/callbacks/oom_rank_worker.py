"""One rank of a real process group. Started by test_oom_recovery_distributed.py, once per rank, with a plan as JSON.

    python oom_rank_worker.py PLAN.json

The plan names scenarios, run one after the other in the same process group, each of which gives a value that is
saved as OUT/<name>.<rank>.pt. An error is a result like any other: its type, its text and its notes.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torchmetrics import MeanMetric

from lightning_gpufeed import OOMRecovery
from lightning_gpufeed.device.headroom import release
from tests.datamodules.models import MemoryLogger, make_trainer
from tests.doubles import KeptDict, KeptList

RANK = int(os.environ.get("LOCAL_RANK", "0"))
NUM_FEATURES = 4
# Of each rank's training batches; the last one is smaller, and not by the same on both.
SIZES = [[8, 8, 8, 5], [8, 8, 8, 2]]
VALIDATION_SIZES = [[8, 6], [8, 3]]
# A layer of 1024 gives 16 MiB. The stack of a thread that ends in between (8 MiB) is no room for that.
BIG_SIZES = [[4096] * 2, [4096] * 2]
CAP_BYTES = 4 * 2**20
NO_LIMIT = resource.RLIM_INFINITY
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"


def mapped_bytes() -> int:
    """Address space in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))


def limit_memory(num_bytes: int | None) -> None:
    """Let this process have so much more than it has now; None: as much as it wants."""
    resource.setrlimit(resource.RLIMIT_AS, (NO_LIMIT, NO_LIMIT))
    if num_bytes is not None:
        release(torch.device("cpu"))  # what recovery gives back later would be room
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + num_bytes, NO_LIMIT))


class Batches:
    """Batches of given sizes, other ones on each rank; a loader that knows no more than their number."""

    def __init__(self, sizes: list[list[int]], seed: int = 0) -> None:
        """Make them."""
        generator = torch.Generator().manual_seed(100 * seed + RANK)
        self.batches = [
            (torch.randn(size, NUM_FEATURES, generator=generator), torch.randint(0, 7, (size,), generator=generator))
            for size in sizes[RANK]
        ]

    def __len__(self) -> int:
        """How many."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        """One after the other."""
        return iter(self.batches)


class Failing(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        """Pass on."""
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Fail."""
        raise torch.OutOfMemoryError(TEXT)


class Notes:
    """What a model writes down; unlike attributes of the module nobody puts it back.

    Attributes:
        attempts: Stage, batch and samples of each pass.
        times: How often each failure has come.
        starts: How many batches of a stage are over.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.attempts: list[tuple[str, int, int]] = KeptList()
        self.times: dict[Any, int] = KeptDict()
        self.starts: dict[str, int] = KeptDict()


class RankModel(pl.LightningModule):
    """A regression that fails where it is told to.

    Args:
        failures: [stage, batch (counted over epochs), rank or -1 for all, phase, times]; a number of times that is not
            X
        bn, dropout, sparse, frozen: Layers.
        unused: Rank that does not use a layer; -1: none of them does; None: no such layer.
        width: Of the hidden layer.
        is_half: bfloat16 parameters.
        logs_metric: A torchmetrics object too.
        contrast, gathers: Collectives in training_step; in validation_step.
        edits: Changes its batch in place, on rank 1.
        optimizer: "adam", "sgd", or "broken", which fails in its update.
    """

    def __init__(
        self,
        failures: list[list[Any]],
        *,
        bn: bool = False,
        dropout: bool = False,
        sparse: bool = False,
        frozen: bool = False,
        unused: int | None = None,
        width: int = 16,
        is_half: bool = False,
        edits: bool = False,
        contrast: bool = False,
        gathers: bool = False,
        optimizer: str = "adam",
    ) -> None:
        """Make the same weights every time."""
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(NUM_FEATURES, width)
        self.norm = nn.BatchNorm1d(width) if bn else nn.Identity()
        self.dropout = nn.Dropout(0.5 if dropout else 0.0)
        self.last = nn.Linear(width, 1)
        self.table = nn.Embedding(7, NUM_FEATURES, sparse=sparse)
        self.extra = None if unused is None else nn.Linear(NUM_FEATURES, 1)
        self.unused = unused
        if frozen:
            self.first.weight.requires_grad_(False)
        if is_half:
            self.to(torch.bfloat16)
        self.means = nn.ModuleDict({stage: MeanMetric() for stage in ("fit", "sanity", "validate")})
        self.failures = [tuple(failure) for failure in failures]
        self.notes = Notes()
        self.edits, self.contrast, self.gathers, self.which = edits, contrast, gathers, optimizer

    # Failures

    def is_due(self, stage: str, phase: str) -> bool:
        """Whether to fail here, this time."""
        for failure in self.failures:
            at_stage, batch, rank, at_phase, times = failure
            is_here = rank in (-1, RANK) and (at_stage, at_phase) == (stage, phase)
            if is_here and batch == self.notes.starts.get(stage, 0) and self.notes.times.get(failure, 0) < times:
                self.notes.times[failure] = self.notes.times.get(failure, 0) + 1
                return True
        return False

    def loss_of(self, stage: str, batch: Any) -> torch.Tensor:
        """Forward, with its failures."""
        given, numbers = batch
        self.notes.attempts.append((stage, self.notes.starts.get(stage, 0), len(given)))
        is_again = self.notes.attempts.count(self.notes.attempts[-1]) > 1
        if self.is_due(stage, "error") or (is_again and self.is_due(stage, "second error")):
            raise RuntimeError("an ordinary error")
        if self.edits and RANK == 1:
            given.add_(1)
        if self.is_due(stage, "real forward"):
            limit_memory(CAP_BYTES)
        given = given.to(self.first.weight.dtype) + self.table(numbers)
        hidden = self.dropout(self.norm(self.first(given)).relu())
        if self.is_due(stage, "backward"):  # in the middle: of the last layer there are gradients by then
            hidden = Failing.apply(hidden)
        predicted = self.last(hidden)
        if self.extra is not None and self.unused not in (-1, RANK):
            predicted = predicted + self.extra(given)
        if self.is_due(stage, "forward"):
            raise torch.OutOfMemoryError(TEXT)
        loss = (predicted.squeeze(1) - numbers.to(predicted.dtype)).square().mean()
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_count", float(len(given)), reduce_fx="sum", on_epoch=True, on_step=True, sync_dist=True)
        mean = self.means[stage]
        mean.update(loss.detach().float(), len(given))
        self.log(f"{stage}_mean", mean, on_step=False, on_epoch=True)
        if self.is_due(stage, "after log"):
            raise torch.OutOfMemoryError(TEXT)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Regression; or a step that talks to the other ranks."""
        loss = self.loss_of("fit", batch)
        if self.contrast:
            loss = loss + self.all_gather(self.last(self.first(batch[0])), sync_grads=True).mean()
        if self.is_due("fit", "real backward"):
            limit_memory(CAP_BYTES)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The loss."""
        stage = "sanity" if self.trainer.sanity_checking else "validate"
        loss = self.loss_of(stage, batch)
        if self.gathers:
            self.all_gather(loss)
            if self.is_due(stage, "after gather"):
                raise torch.OutOfMemoryError(TEXT)

    def on_validation_batch_end(self, *args: Any) -> None:
        """The next one."""
        stage = "sanity" if self.trainer.sanity_checking else "validate"
        self.notes.starts[stage] = self.notes.starts.get(stage, 0) + 1

    def on_train_batch_end(self, *args: Any) -> None:
        """The next one."""
        if self.is_due("fit", "batch end"):
            raise RuntimeError("an ordinary error")
        self.notes.starts["fit"] = self.notes.starts.get("fit", 0) + 1

    def on_after_backward(self) -> None:
        """What is only short now is there again."""
        limit_memory(None)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Where gradients are clipped."""
        if self.is_due("fit", "clip"):
            raise torch.OutOfMemoryError(TEXT)

    def configure_optimizers(self) -> Any:
        """Adam, whose steps depend on all before; SGD where gradients may be sparse."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.which == "broken":
            return BrokenSGD(parameters, self)
        if self.which == "sgd":
            return torch.optim.SGD(parameters, lr=0.05)
        return torch.optim.Adam(parameters, lr=0.01)


class BrokenSGD(torch.optim.SGD):
    """Runs out of memory in the update, after it has changed the first weights."""

    def __init__(self, parameters: Any, model: RankModel) -> None:
        """Note who knows when."""
        super().__init__(parameters, lr=0.05)
        self.model = [model]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update some, and fail if it is time."""
        with torch.enable_grad():
            loss = closure()
        if self.model[0].is_due("fit", "update"):
            raise torch.OutOfMemoryError(TEXT)
        super().step()
        return loss


class Watch(pl.Callback):
    """Writes down what is seen from outside."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.rows: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.num_microbatches: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """After each batch."""
        self.rows.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        self.losses.append(float(outputs["loss"]))
        [*found] = [callback for callback in trainer.callbacks if isinstance(callback, OOMRecovery)]
        self.num_microbatches += [callback.num_microbatches for callback in found]

    def on_exception(self, *args: Any) -> None:
        """Memory is there again."""
        limit_memory(None)


class OnceLogger(MemoryLogger):
    """Keeps what is logged on the first rank, as loggers do."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Nothing."""
        return None

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Keep them."""
        super().log_metrics(metrics, step)


def strategy_of(plan: dict[str, Any], **settings: Any) -> DDPStrategy:
    """Ranks of these processes. One that waits in vain for the others fails instead."""
    return DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=plan["timeout_seconds"]), **settings)


# Scenarios ---------------------------------------------------------------------------------------------------


def train(
    plan: dict[str, Any],
    *,
    model: dict[str, Any] | None = None,
    failures: list[list[Any]] | None = None,
    recovery: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    is_big: bool = False,
    is_validation: bool = False,
    has_split_error: bool = False,
    **settings: Any,
) -> Any:
    """Train two epochs of four batches; `recovery` None is plain Lightning."""
    if has_split_error:
        recovery = {**(recovery or {}), "split_fn": split_badly}
    recoveries = [] if recovery is None else [OOMRecovery(**{"grow_after": None, **recovery})]
    watch, logger = Watch(), OnceLogger()
    module = RankModel(failures or [], **(model or {}))
    trainer = make_trainer(
        strategy=strategy_of(plan, **(ddp or {})),
        devices=plan["world_size"],
        callbacks=[*recoveries, watch],
        logger=logger,
        **{"max_epochs": 2, **settings},
    )
    training = Batches(BIG_SIZES if is_big else SIZES)
    validation = Batches(VALIDATION_SIZES, seed=1)
    begin = time.monotonic()
    error = None
    try:
        if is_validation:
            trainer.validate(module, validation, verbose=False)
        else:
            trainer.fit(module, training, validation)
    except Exception as raised:
        error = described(raised)
    [recovery_of] = recoveries or [None]
    return {
        "error": error,
        "seconds": time.monotonic() - begin,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "global_step": trainer.global_step,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "rows": watch.rows,
        "losses": watch.losses,
        "num_microbatches": watch.num_microbatches,
        "attempts": [list(attempt) for attempt in module.notes.attempts],
        "logged": [[step, metrics] for step, metrics in logger.logged],
        "events": [] if recovery_of is None else [event_of(event) for event in recovery_of.events],
    }


def split_badly(batch: Any, number: int) -> Any:
    """Cannot split on rank 1."""
    if RANK == 1:
        raise ValueError("rank 1 cannot split")
    return list(zip(*[part.tensor_split(number) for part in batch], strict=True))


def event_of(event: Any) -> dict[str, Any]:
    """An event as plain values."""
    return {**vars(event), "text": str(event)}


def described(error: BaseException) -> dict[str, Any]:
    """An error as plain values."""
    return {"type": type(error).__name__, "text": str(error), "notes": "\n".join(getattr(error, "__notes__", []))}


def refusals(plan: dict[str, Any]) -> Any:
    """What is said at start about strategies that cannot be made safe, and how many steps were taken."""
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=1)
    cases: dict[str, dict[str, Any]] = {
        "static_graph": {"static_graph": True},
        "ddp_comm_hook": {"ddp_comm_hook": default_hooks.fp16_compress_hook},
        "model_averaging_period": {"model_averaging_period": 2, "ddp_comm_state": state},
    }
    found = {}
    for name, ddp in cases.items():
        module = RankModel([])
        trainer = make_trainer(
            strategy=strategy_of(plan, **ddp),
            devices=plan["world_size"],
            callbacks=[OOMRecovery()],
            max_epochs=1,
        )
        error = None
        try:
            trainer.fit(module, Batches(SIZES), Batches(VALIDATION_SIZES))
        except Exception as raised:
            error = described(raised)
        found[name] = {"error": error, "attempts": len(module.notes.attempts)}
    return found


def groups_left(plan: dict[str, Any]) -> Any:
    """Process groups that exist after trainings that ended well and badly."""

    def count() -> int:
        return len(distributed.distributed_c10d._world.pg_map)

    train(plan, recovery={})
    before = count()
    train(plan, recovery={}, failures=[["fit", 1, 1, "forward", 1]])
    train(plan, recovery={}, failures=[["fit", 1, -1, "error", 1]])
    return {"before": before, "after": count()}


SCENARIOS: dict[str, Callable[..., Any]] = {function.__name__: function for function in (train, refusals, groups_left)}


def main() -> None:
    """Run the plan."""
    # Recovery collects garbage; what was imported need not be looked through each time.
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Of Lightning and torch, about themselves.
    warnings.filterwarnings("ignore", message=".*LeafSpec|.*functional.all_gather|.*torch.jit")
    plan = json.loads(Path(sys.argv[1]).read_text())
    for scenario in plan["scenarios"]:
        begin = time.monotonic()
        if "port" in scenario:
            os.environ["MASTER_PORT"] = str(scenario["port"])
        try:
            result = SCENARIOS[scenario["run"]](plan, **scenario.get("arguments", {}))
        except Exception as error:
            result = {"failed": described(error)}
        torch.save(result, Path(plan["out"]) / f"{scenario['name']}.{RANK}.pt")
        if "is_last" in scenario and distributed.is_initialized():
            # What has broken this group is not to be felt in the next; and it tells a rank that waits that it need not.
            gc.collect()
            distributed.destroy_process_group()
        print(f"{scenario['name']}: {time.monotonic() - begin:.1f} s", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
