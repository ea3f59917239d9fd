"""One rank of a real process group. Started by test_out_of_order_ranks.py, once per rank, with a plan as JSON.

    python sync_rank_worker.py PLAN.json

The plan names scenarios, run one after the other in the same process group, each of which gives a value that is
saved as OUT/<name>.<rank>.pt. An error is a result like any other: its type and its text.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor, distributed

from lightning_gpufeed import OutOfOrderStrategy
from lightning_gpufeed.sync import candidates, tuner
from lightning_gpufeed.sync.layers import find_layers
from lightning_gpufeed.sync.plan import Piece, SyncPlan
from tests.datamodules.models import MemoryLogger, make_trainer, state_of
from tests.process_groups import agree_on_port, end_of_cell
from tests.strategies.sync_models import MODULES, Batches

RANK = int(os.environ.get("LOCAL_RANK", "0"))


# Callbacks ---------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Writes down what is logged, and how the strategy does, without a look at any parameter."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.rows: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.sync: dict[str, Any] = {"num_pending": []}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """After each batch."""
        self.rows.append({key: value.clone() for key, value in trainer.callback_metrics.items()})
        if outputs:
            self.losses.append(outputs["loss"].clone())
        sync = getattr(trainer.strategy, "gradient_sync", None)
        if sync is not None:
            self.sync["num_pending"].append(sync.num_pending)
            self.sync["is_settled"] = sync.is_settled
            self.sync["plan"] = str(sync.plan)
            self.sync["num_deferred"] = len(sync.plan.deferred)
            self.sync["num_cut"] = sum(
                sum(piece.layer == i for bucket in sync.plan.buckets for piece in bucket) > 1
                for i in range(len(sync.layers))
            )
            self.sync["num_layers"] = len(sync.layers)
            self.sync["peak_deferred_bytes"] = sync.peak_deferred_bytes


def sums(tensors: dict[str, Tensor | None]) -> dict[str, float | None]:
    """One number for each tensor, which tells every bit."""
    return {
        name: None if one is None else float((one.detach().double() * torch.arange(1, one.numel() + 1)[-1:]).sum())
        for name, one in tensors.items()
        if one is None or one.numel()
    }


class Reader(Callback):
    """Looks at weights, gradients or an optimizer's state, at one place.

    Args:
        what: "weights", "gradients", "norm", "state", "copy".
        hook: Name of the hook.
        seen: Where to write it down, and whose look it is.
    """

    def __init__(self, what: str, hook: str, seen: list[Any]) -> None:
        """Look from now on."""
        self.what, self.seen, self.name = what, seen, f"{what} {hook}"
        setattr(self, hook, self.look)

    def look(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Write down what is there."""
        if self.what == "weights":
            self.note(sums(dict(pl_module.named_parameters())))
        elif self.what == "gradients":
            self.note(sums({name: one.grad for name, one in pl_module.named_parameters()}))
        elif self.what == "norm":
            self.note({name: float(norm) for name, norm in grad_norm(pl_module, 2).items()})
        elif self.what == "copy":
            self.note(sums(copy.deepcopy(pl_module.body).state_dict()))
        elif self.what == "state":
            for optimizer in trainer.optimizers:
                for state in optimizer.state.values():
                    self.note(sums({key: one for key, one in state.items() if isinstance(one, Tensor)}))
        else:
            raise ValueError(self.what)

    def note(self, found: dict[str, Any]) -> None:
        """Write it down."""
        self.seen.append([self.name, found])


class Unfreeze(BaseFinetuning):
    """The first layers are trained from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """At first not."""
        self.freeze(pl_module.body.layers[:2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Now they are."""
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body.layers[:2], optimizer, lr=0.01)


class ReduceByHand(Callback):
    """Means over all ranks of the first layers' gradients, which DDP forgets if they were frozen at its start."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Each for itself."""
        for parameter in pl_module.body.layers[:2].parameters():
            if parameter.grad is not None:
                parameter.grad.div_(distributed.get_world_size())
                distributed.all_reduce(parameter.grad)


class Saver(Callback):
    """Saves by itself, at a place of its own."""

    def __init__(self, folder: Path) -> None:
        """Where to."""
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """With an update on its way."""
        trainer.save_checkpoint(self.folder / f"start-{trainer.global_step}.ckpt")


class SaverAtErrors(Callback):
    """Saves when training is broken off."""

    def __init__(self, folder: Path) -> None:
        """Where to."""
        self.folder = folder

    def on_exception(self, trainer: Any, *args: Any) -> None:
        """With an update on its way."""
        trainer.save_checkpoint(self.folder / "last.ckpt")


class Editor(Callback):
    """Changes something after each step.

    Args:
        what: "weights", "state", "gradients".
    """

    def __init__(self, what: str) -> None:
        """From now on."""
        self.what = what

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Change it."""
        if self.what == "weights":
            for parameter in pl_module.parameters():
                parameter.data.clamp_(-0.2, 0.2)
        elif self.what == "state":
            trainer.optimizers[0].state.clear()
        elif self.what == "gradients":
            pl_module.zero_grad()
        else:
            raise ValueError(self.what)


class Death(Callback):
    """Ends a rank.

    Args:
        hook: Where.
        way: "exit", as if it were killed; "error".
        ranks: Which; the second if none are named.
    """

    def __init__(self, hook: str, way: str, *ranks: int) -> None:
        """Wait for it."""
        self.way, self.ranks = way, ranks or (1,)
        setattr(self, hook, self.end)

    def end(self, trainer: Any, *args: Any) -> None:
        """Now."""
        if RANK in self.ranks and trainer.global_step == 3:
            if self.way == "exit":
                os._exit(3)
            raise RuntimeError("an ordinary error")


def callbacks_of(names: list[Any], seen: list[Any], folder: Path) -> list[Callback]:
    """Made from what JSON can say: a name and arguments."""
    known: dict[str, Callable[..., Callback]] = {
        "ema": lambda: EMAWeightAveraging(decay=0.7),
        "swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
        "rates": lambda: LearningRateMonitor("step", log_momentum=True, log_weight_decay=True),
        "early": lambda: EarlyStopping("val", patience=1, mode="max"),
        "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
        "reader": lambda what, hook: Reader(what, hook, seen),
        "unfreeze": Unfreeze,
        "reduce by hand": ReduceByHand,
        "saver": lambda: Saver(folder),
        "editor": Editor,
        "death": Death,
        "pruning": lambda: ModelPruning("l1_unstructured", amount=0.3),
        "rate finder": lambda: LearningRateFinder(num_training_steps=6, early_stop_threshold=None),
        "saves errors": lambda: SaverAtErrors(folder),
    }
    return [known[name](*arguments) for name, *arguments in names]


class OnceLogger(MemoryLogger):
    """Keeps what is logged."""


# Scenarios ---------------------------------------------------------------------------------------------------


def strategy_of(
    plan: dict[str, Any], options: dict[str, Any] | None, module: pl.LightningModule, find_unused_parameters: bool
) -> DDPStrategy:
    """Lightning's or ours. A rank that waits in vain for the others fails instead."""
    common: dict[str, Any] = {
        "process_group_backend": "gloo",
        "timeout": timedelta(seconds=plan["timeout_seconds"]),
        "find_unused_parameters": find_unused_parameters,
    }
    if options is None:
        return DDPStrategy(**common)
    options = {key: value for key, value in options.items() if key != "cuts"}
    if options.get("reverse_first_k") == "all":
        options["reverse_first_k"] = len({layer.module_name for layer in find_layers(module, ())})
    return OutOfOrderStrategy(**common, **options)


@contextmanager
def cutting(is_cutting: bool) -> Iterator[None]:
    """Plans in which large gradients are sent in parts: those that a search finds depend on the machine."""
    if not is_cutting:
        yield
        return
    tuner.given_plan = lambda *of, **options: cut(candidates.given_plan(*of, **options))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        tuner.given_plan = candidates.given_plan  # type: ignore[attr-defined]


def cut(plan: SyncPlan) -> SyncPlan:
    """The same with every piece in two; second halves are sent after all first ones, the most urgent first."""
    first, second = [], []
    for bucket in plan.buckets:
        for layer, begin, end in bucket:
            middle = begin + (end - begin) // 24 * 8  # whole elements of every type
            if begin < middle:
                first.append((Piece(layer, begin, middle),))
            second.append((Piece(layer, middle, end),))
    return replace(plan, buckets=(*first, *sorted(second)))


def train(
    plan: dict[str, Any],
    name: str,
    *,
    strategy: dict[str, Any] | None,
    module: str = "Net",
    net: dict[str, Any] | None = None,
    batches: int = 3,
    validation: bool = False,
    callbacks: list[Any] | None = None,
    saves: dict[str, Any] | None = None,
    logger: bool = False,
    find_unused_parameters: bool = False,
    resume: str | None = None,
    num_fits: int = 1,
    logs: bool = True,
    **settings: Any,
) -> Any:
    """Train; `strategy` None is DDP, `saves` are arguments of ModelCheckpoint, `resume` is a file to go on from."""
    net = net or {}
    folder = Path(plan["out"]) / name
    model: Any = MODULES[module](rank=RANK, **net)
    model.logs = logs
    seen: list[Any] = []
    watch, log = Watch(), MemoryLogger()
    every: list[Callback] = callbacks_of(callbacks or [], seen, folder)
    if saves is not None:
        every.append(ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", **saves))
    body = net.get("body", "mlp")
    trainer = make_trainer(
        strategy=strategy_of(plan, strategy, model, find_unused_parameters),
        devices=plan["world_size"],
        callbacks=[*every, watch],
        logger=log if logger else False,
        enable_checkpointing=saves is not None,
        **{"max_epochs": 2, **settings},
    )
    loaders = [Batches(body, batches, RANK)] + ([Batches(body, 2, RANK, seed=1)] if validation else [])
    begin, error, ends, num_epochs = time.monotonic(), None, [], trainer.fit_loop.max_epochs
    try:
        with cutting(bool(strategy and strategy.get("cuts"))):
            for number in range(1, num_fits + 1):
                trainer.fit_loop.max_epochs = number * num_epochs
                trainer.fit(model, *loaders, ckpt_path=None if number > 1 else resume, **_weights_only(resume))
                ends.append(trainer.global_step)
    except Exception as raised:
        error = described(raised)
    result = {
        "error": error,
        "seconds": time.monotonic() - begin,
        "state": state_of(trainer, model),
        "gradients": {name: one.grad for name, one in model.named_parameters()},
        "rows": watch.rows,
        "losses": watch.losses,
        "metrics": dict(trainer.callback_metrics),
        "seen": [*seen, *getattr(model, "sums", [])],
        # Without the figures that a strategy of ours adds.
        "logged": [[step, row] for step, row in log.logged if not any(name.startswith("gpufeed/") for name in row)],
        "ends": ends,
        "types": sorted({type(one).__name__ for one in model.parameters()}),
        "left": sync_left(model),
        "sync": watch.sync,
    }
    for callback in every:
        if isinstance(callback, EMAWeightAveraging):
            assert callback._average_model is not None
            result["average"] = {key: one.clone() for key, one in callback._average_model.state_dict().items()}
    return result


def _weights_only(resume: str | None) -> dict[str, Any]:
    """Of checkpoints that hold more than tensors."""
    return {} if resume is None else {"weights_only": False}


def sync_left(model: torch.nn.Module) -> int:
    """Hooks and replaced forwards that are still on a model."""
    left = sum("forward" in one.__dict__ for one in model.modules())
    left += sum(len(one._forward_pre_hooks) for one in model.modules())
    return left + sum(len(one._post_accumulate_grad_hooks or ()) for one in model.parameters())


def described(error: BaseException) -> dict[str, Any]:
    """An error as plain values."""
    return {"type": type(error).__name__, "text": str(error)}


def main() -> None:
    """Run the plan."""
    gc.collect()
    gc.freeze()  # what was imported need not be looked through each time
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Of Lightning and torch, about themselves.
    warnings.filterwarnings(
        "ignore",
        message=".*LeafSpec|.*functional.all_gather|.*torch.jit|Checkpoint directory|The dirpath",
    )
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    plan = json.loads(Path(sys.argv[1]).read_text())
    for scenario in plan["scenarios"]:
        begin = time.monotonic()
        agree_on_port(Path(plan["out"]) / f"{scenario['name']}.port", RANK)
        try:
            result = train(plan, scenario["name"], **scenario["arguments"])
        except Exception as error:
            result = {"failed": described(error)}
        torch.save(result, Path(plan["out"]) / f"{scenario['name']}.{RANK}.pt")
        end_of_cell(is_well=not (result.get("failed") or result["error"]))
        print(f"{scenario['name']}: {time.monotonic() - begin:.2f} s", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
