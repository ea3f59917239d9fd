"""One rank of a real process group. Started by test_batch_echo_distributed.py, once per rank, with a plan as JSON.

    python echo_rank_worker.py PLAN.json

The plan names scenarios, run one after the other in the same process group, each of which gives a value that is
written to OUT/<name>.<rank>.json. An error is a result like any other: its type and its text.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpufeed import BatchEcho, H5ImageDataModule
from lightning_gpufeed.device.vote import HostVote
from tests.callbacks.echo_models import (
    EchoModel,
    Gate,
    Pace,
    StatefulBatches,
    StatefulUnsized,
    Unsized,
    batch_of,
    gated_loader,
    plain_loader,
)
from tests.datamodules.models import Recorder, every_checkpoint, make_trainer

RANK = int(os.environ.get("LOCAL_RANK", "0"))


def trainer_of(plan: dict[str, Any], **settings: Any) -> Any:
    """A Trainer in the group of these processes. A rank that waits in vain for the others fails instead."""
    strategy = settings.pop("strategy", None) or DDPStrategy(
        process_group_backend="gloo", timeout=timedelta(seconds=plan["timeout_seconds"])
    )
    return make_trainer(strategy=strategy, devices=plan["world_size"], **{"max_epochs": 2, **settings})


def echo_of(arguments: dict[str, Any]) -> BatchEcho:
    """The callback; JSON has no whole numbers as keys."""
    replay = arguments.get("replay")
    if isinstance(replay, dict):
        replay = {int(epoch): passes for epoch, passes in replay.items()}
    return BatchEcho(**{"scale_lr": "keep", **arguments, "replay": replay})


def weights_of(model: torch.nn.Module) -> list[float]:
    """All weights, exactly: JSON keeps a double as it is."""
    return [value for parameter in model.parameters() for value in parameter.detach().double().flatten().tolist()]


def found(trainer: Any, model: EchoModel, echo: BatchEcho) -> dict[str, Any]:
    """What a training came to on this rank."""
    return {
        "steps": model.steps,
        "validations": model.validations,
        "batch_indices": model.batch_indices,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "num_training_batches": trainer.num_training_batches,
        "estimate": model.estimate,
        "trace": echo.trace,
        "weights": weights_of(model),
    }


def caught(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Run something, and give the warnings it raised; in this file they are errors otherwise."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        value = call()
    return value, [str(warning.message) for warning in seen if issubclass(warning.category, UserWarning)]


# Scenarios ---------------------------------------------------------------------------------------------------


def train(
    plan: dict[str, Any],
    *,
    echo: dict[str, Any],
    schedule: str | None = None,
    is_fast: bool = False,
    **settings: Any,
) -> Any:
    """torch's `DataLoader` with shuffling: Lightning puts a DistributedSampler in and reshuffles every epoch."""
    callback = echo_of(echo)
    # A fast loader is one whose next batch is there when a step ends.
    model = EchoModel(schedule=schedule, after_step=Pace() if is_fast else None)
    loader = plain_loader(40, 8, shuffle=True)
    trainer = trainer_of(plan, callbacks=[callback], **settings)
    trainer.fit(model, loader, plain_loader(4, 2))
    sampler = trainer.train_dataloader.sampler
    return {**found(trainer, model, callback), "sampler": type(sampler).__name__, "sampler_epoch": sampler.epoch}


def uneven_last_batch(plan: dict[str, Any], *, echo: dict[str, Any], sizes: list[list[int]]) -> Any:
    """Batches of given sizes, other ones on each rank, from a loader that knows no more than their number."""
    callback, model = echo_of(echo), EchoModel()

    class Sized:
        def __len__(self) -> int:
            return len(sizes[RANK])

        def __iter__(self) -> Iterator[Any]:
            begin = 100 * RANK
            for size in sizes[RANK]:
                yield batch_of(list(range(begin, begin + size)))
                begin += size

    trainer = trainer_of(plan, callbacks=[callback])
    trainer.fit(model, Sized(), plain_loader(4, 2))
    return found(trainer, model, callback)


def late(plan: dict[str, Any], *, passes: list[list[int]], num_splits: int = 1, is_sized: bool = True) -> Any:
    """ "auto" with loaders of different speed: on each rank its next batch comes after so many passes of its own."""
    callback = BatchEcho("auto", max_echo_factor=4, num_splits=num_splits, scale_lr="keep")
    gate = Gate()
    model = EchoModel(after_step=Opening(gate, passes[RANK], num_splits))
    num_samples = 8 * len(passes[RANK])
    loader = (
        gated_loader(gate, num_samples, 8) if is_sized else DataLoader(GatedStream(num_samples, gate), batch_size=8)
    )
    trainer = trainer_of(plan, callbacks=[callback], max_epochs=1, use_distributed_sampler=False)
    trainer.fit(model, loader, plain_loader(4, 2))
    return found(trainer, model, callback)


class GatedStream(IterableDataset[Any]):
    """Samples of unknown number; those of a batch of eight come when a gate lets it pass."""

    def __init__(self, num_samples: int, gate: Gate) -> None:
        """Note the gate."""
        self.num_samples, self.gate = num_samples, gate

    def __iter__(self) -> Iterator[Any]:
        """One after the other."""
        for number in range(self.num_samples):
            self.gate.pass_through(number // 8)
            features, numbers = batch_of([number])
            yield features[0], numbers[0]


class Opening(Pace):
    """Opens this rank's gate after so many passes over its own batch, and waits until the next one is there.

    Unlike a `Pace` it knows that the other rank may have this one make more passes than it wants.
    """

    def __call__(self, model: EchoModel) -> None:
        """A step is done."""
        samples = sorted(model.steps[-1][1])
        batch = samples[0] // 8
        if batch != self.batch:
            self.batch, self.num_steps = batch, 0
        self.num_steps += 1
        if self.num_steps == self.passes[batch] * self.num_splits and batch + 1 < len(self.passes):
            self.gate.open(batch + 1)
            while not model.trainer.train_dataloader.is_ready():
                time.sleep(0.0005)


class Shard(IterableDataset[Any]):
    """A stream of samples, other ones on each rank, of unknown number."""

    def __init__(self, num_samples: int) -> None:
        """Note how many."""
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        """One after the other."""
        for number in range(self.num_samples):
            features, numbers = batch_of([1000 * RANK + number])
            yield features[0], numbers[0]


def stream(plan: dict[str, Any], *, echo: dict[str, Any], num_samples: list[int], num_workers: int = 0) -> Any:
    """An iterable dataset with another number of batches on each rank."""
    callback, model = echo_of(echo), EchoModel()
    trainer = trainer_of(plan, callbacks=[callback])
    loader = DataLoader(Shard(num_samples[RANK]), batch_size=8, num_workers=num_workers)
    _, texts = caught(lambda: trainer.fit(model, loader, plain_loader(4, 2)))
    return {**found(trainer, model, callback), "warnings": texts}


def votes(plan: dict[str, Any]) -> Any:
    """Note the collectives that a vote makes: of which group and backend, and on which device."""
    kinds: list[tuple[str, str, bool]] = []
    num_asked, is_voting = 0, False
    own, minimum = distributed.all_reduce, HostVote.minimum

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_voting:
            group = kwargs["group"]
            kinds.append((tensor.device.type, distributed.get_backend(group), group is distributed.group.WORLD))
        return own(tensor, *args, **kwargs)

    def counted(self: HostVote, *numbers: int) -> list[int]:
        nonlocal num_asked, is_voting
        num_asked, is_voting = num_asked + 1, True
        try:
            return minimum(self, *numbers)
        finally:
            is_voting = False

    distributed.all_reduce, HostVote.minimum = noted, counted
    try:
        results = {}
        for name, echo in (("fixed", {"echo_factor": 2}), ("auto", {"echo_factor": "auto"})):
            kinds.clear()
            num_asked = 0
            num_steps = len(train(plan, echo=echo)["steps"])
            results[name] = {"asked": num_asked, "made": len(kinds), "kinds": sorted(set(kinds)), "steps": num_steps}
        return results
    finally:
        distributed.all_reduce, HostVote.minimum = own, minimum


def groups_left(plan: dict[str, Any]) -> Any:
    """Process groups that exist after trainings that ended well and badly."""
    train(plan, echo={"echo_factor": 2})
    before = len(distributed.distributed_c10d._world.pg_map)
    for _ in range(3):
        train(plan, echo={"echo_factor": "auto"})
    return {"before": before, "after": len(distributed.distributed_c10d._world.pg_map)}


def hdf5(
    plan: dict[str, Any],
    *,
    echo: dict[str, Any],
    checkpoint: str | None = None,
    folder: str | None = None,
    batch_size: int = 4,
    **settings: Any,
) -> Any:
    """Train over HDF5 files; save everywhere, or go on from a checkpoint."""
    callback, model = echo_of(echo), Recorder()
    datamodule = H5ImageDataModule(plan["files"]["train"], val=plan["files"]["val"], batch_size=batch_size)
    saving = [] if folder is None else every_checkpoint(Path(folder))
    trainer = trainer_of(plan, callbacks=[callback, *saving], enable_checkpointing=bool(saving), **settings)
    trainer.fit(model, datamodule, ckpt_path=checkpoint, **({} if checkpoint is None else {"weights_only": True}))
    return {
        "trained": model.trained,
        "validated_in": model.validated_in,
        "global_step": trainer.global_step,
        "num_training_batches": trainer.num_training_batches,
        "trace": callback.trace,
        "weights": weights_of(model),
    }


def stateful(
    plan: dict[str, Any],
    *,
    echo: dict[str, Any],
    checkpoint: str | None = None,
    folder: str | None = None,
    is_sized: bool = True,
    schedule: str | None = None,
    **settings: Any,
) -> Any:
    """A loader of the same length on each rank with other samples, that can be resumed."""
    callback, model = echo_of(echo), EchoModel(schedule=schedule)
    loader = (StatefulBatches if is_sized else StatefulUnsized)(22, 8, seed=5)
    saving = [] if folder is None else every_checkpoint(Path(folder))
    trainer = trainer_of(plan, callbacks=[callback, *saving], enable_checkpointing=bool(saving), **settings)
    trainer.fit(
        model,
        loader,
        plain_loader(4, 2),
        ckpt_path=checkpoint,
        **({} if checkpoint is None else {"weights_only": True}),
    )
    return found(trainer, model, callback)


def broken_off(plan: dict[str, Any], *, echo: dict[str, Any], at: int, folder: str) -> Any:
    """All ranks fail in the same step, in the middle of an echo, and the first one saves."""

    def fail(model: EchoModel) -> None:
        if len(model.steps) == at + 1:
            raise RuntimeError("on purpose")

    callback, model = echo_of(echo), EchoModel(after_step=fail)
    trainer = trainer_of(plan, callbacks=[callback, OnExceptionCheckpoint(folder, "broken")], enable_checkpointing=True)
    try:
        trainer.fit(model, StatefulBatches(22, 8, seed=5), plain_loader(4, 2))
    except RuntimeError:
        return {"steps": model.steps[:at]}
    raise AssertionError("nothing failed")


def one_fails(plan: dict[str, Any], *, echo: dict[str, Any], where: str) -> Any:
    """Rank 1 fails in its fourth step or in its loader, or its loader is stuck; the other one has to notice."""
    noticed = Path(plan["out"]) / f"noticed.{where}"

    def fail(model: EchoModel) -> None:
        if where == "step" and RANK == 1 and len(model.steps) == 4:
            raise RuntimeError("rank 1 fails")

    class Breaking(Unsized):
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(self.batches):
                if where == "loader" and RANK == 1 and number == 2:
                    raise RuntimeError("rank 1 fails")
                if where == "stuck" and RANK == 1 and number == 2:
                    end = time.monotonic() + 4 * plan["timeout_seconds"]
                    while not noticed.exists() and time.monotonic() < end:
                        time.sleep(0.05)
                yield batch

    try:
        trainer_of(plan, callbacks=[echo_of(echo)]).fit(EchoModel(after_step=fail), Breaking(48, 8), plain_loader(4, 2))
    except Exception as error:
        noticed.touch()
        return {"failed": type(error).__name__, "why": str(error)}
    return {"failed": None}


class WritingModel(EchoModel):
    """Writes its findings from the process they were made in."""

    def __init__(self, folder: str) -> None:
        """Note where to."""
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        """Write what was trained on."""
        [echo] = [callback for callback in self.trainer.callbacks if isinstance(callback, BatchEcho)]
        text = json.dumps({**found(self.trainer, self, echo), "process": os.getpid()})
        (Path(self.folder) / f"spawned_fit.{self.global_rank}.json").write_text(text)


def spawned(plan: dict[str, Any], *, folder: str) -> None:
    """Let Lightning start the ranks itself: it sends Trainer, callback, model and loader to them, pickled.

    A server of forks imports Lightning once for both ranks, where each would with "spawn".
    """
    callback = BatchEcho(2, num_splits=2, scale_lr="keep")
    trainer = trainer_of(plan, callbacks=[callback], strategy=DDPStrategy(start_method="forkserver"))
    trainer.fit(WritingModel(folder), plain_loader(40, 8, shuffle=True), plain_loader(4, 2))


SCENARIOS = {
    function.__name__: function
    for function in (
        train,
        uneven_last_batch,
        late,
        stream,
        votes,
        groups_left,
        hdf5,
        stateful,
        broken_off,
        one_fails,
        spawned,
    )
}


def main() -> None:
    """Run the plan."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*LeafSpec|.*more than the dataset has|.*is zero. Please make sure")
    # Advice of Lightning and torch that says nothing about our side.
    warnings.filterwarnings("ignore", message=".*when using `ckpt_path`, callbacks|.*barrier\\(\\): using the device")
    warnings.filterwarnings("ignore", message=".*it is recommended to use `Trainer\\(devices=1")
    warnings.filterwarnings("ignore", message="The '\\w+' does not have many workers")
    warnings.filterwarnings("ignore", message=".*was called without a model|.*there is no last checkpoint available")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    plan = json.loads(Path(sys.argv[1]).read_text())
    for scenario in plan["scenarios"]:
        begin = time.monotonic()
        if "port" in scenario:
            # What broke a group before is not to be felt in this one.
            if distributed.is_initialized():
                distributed.destroy_process_group()
            os.environ["MASTER_PORT"] = scenario["port"]
        try:
            result = SCENARIOS[scenario["run"]](plan, **scenario.get("arguments", {}))
        except Exception as error:
            result = {"error": type(error).__name__, "text": str(error)}
        (Path(plan["out"]) / f"{scenario['name']}.{RANK}.json").write_text(json.dumps(result))
        print(f"{scenario['name']}: {time.monotonic() - begin:.1f} s", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
