"""One rank of tests of `GradientSync`: trains models by hand, in DistributedDataParallel and under sync, and compares.

Run by `tests.doubles.run_ranks`; the models and loops are used by tests in one process too.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel

from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.sync.candidates import PlanOptions
from lightning_gpufeed.sync.ranks import Ranks
from lightning_gpufeed.sync.session import GradientSync

WAIT_SECONDS = 60.0


class Tied(nn.Module):
    """Two layers share a weight; a list of parameters belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x[:, 0] * 10).long() % 6)
        for scale in self.scales:
            x = torch.tanh(self.body(x)) * scale
        return self.head(x)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding((x[:, 0] * 3).long().abs() % 10))


class Branches(nn.Module):
    """A branch that is used by some inputs alone, and another that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x) if x[0, 0] > 0 else self.second(x))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def convolutional() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()
    )
    return nn.Sequential(*model, nn.Linear(27, 2)).to(memory_format=torch.channels_last)


def attending() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Flatten(), nn.Linear(4, 2))


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x.view(-1, 2, 2))[0][:, -1])

    return Last()


def half_frozen() -> nn.Module:
    model = dense()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def of_two_types() -> nn.Module:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).double())

    return Cast()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": dense,
    "convolutional": convolutional,
    "attending": attending,
    "recurrent": recurrent,
    "tied": Tied,
    "half frozen": half_frozen,
    "of two types": of_two_types,
}
OPTIONS = {
    "as usual": PlanOptions(0, False, 1 << 20),
    "in the next forward": PlanOptions(0, True, 100),
    "two wait": PlanOptions(2, True, 1),
    "two wait, no crossing": PlanOptions(2, False, 100),
    "two wait, capped": PlanOptions(2, True, 100, memory_cap_bytes=64),
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda parameters: optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: optim.Adam(parameters, 0.01),
    "plain SGD": lambda parameters: optim.SGD(parameters, 0.05),
}


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(6, 4, generator=chance), torch.randint(0, 2, (6,), generator=chance)


class Record:
    """What somebody sees who looks at a training."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def add(self, name: str, value: Any) -> None:
        self.seen.append((name, copy.deepcopy(value)))

    def difference(self, other: Record) -> str:
        """Where two differ first; nothing if they do not."""
        for (name, one), (other_name, two) in zip(self.seen, other.seen, strict=True):
            assert name == other_name
            if where := _difference(one, two):
                return f"{name}{where}"
        return ""


def _difference(one: Any, two: Any) -> str:
    if isinstance(one, Tensor):
        if one.is_sparse != two.is_sparse:
            return f": {one.layout} and {two.layout}"
        one, two = one.to_dense(), two.to_dense()
        is_same = one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
        return "" if is_same else f": {one.flatten()[:3].tolist()} and {two.flatten()[:3].tolist()}"
    if isinstance(one, dict):
        if list(one) != list(two):
            return f": {list(one)} and {list(two)}"
        return next((f".{name}{where}" for name in one if (where := _difference(one[name], two[name]))), "")
    if isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return f": {len(one)} and {len(two)}"
        return next((f".{i}{where}" for i in range(len(one)) if (where := _difference(one[i], two[i]))), "")
    return "" if one == two else f": {one} and {two}"


def look(record: Record, model: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
    """After a step: in each step at something else, and in some at nothing."""
    if number % 4 == 1:
        record.add(f"gradients of step {number}", {name: one.grad for name, one in model.named_parameters()})
    elif number % 4 == 2:
        record.add(f"one parameter of step {number}", list(model.parameters())[-1].detach())
        record.add(f"optimizer of step {number}", optimizer.state_dict())
    elif number % 4 == 3:
        record.add(f"model of step {number}", model.state_dict())


def train(
    model: nn.Module,
    make_optimizer: Callable[[Any], optim.Optimizer],
    options: PlanOptions | None,
    *,
    num_steps: int = 6,
    accumulate: int = 1,
    find_unused: bool = False,
) -> Record:
    """By hand; in DistributedDataParallel if there are no options."""
    record = Record()
    rank = distributed.get_rank()
    optimizer = make_optimizer([one for one in model.parameters() if one.requires_grad])
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    ddp = sync = None
    if options is None:
        ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
    else:
        sync = GradientSync(model, Ranks(), options, find_unused_parameters=find_unused)
    for number in range(num_steps):
        for part in range(accumulate):
            x, y = batch(rank, number * accumulate + part)
            is_last = part == accumulate - 1
            if ddp is not None:
                ddp.require_backward_grad_sync = is_last
                loss = F.cross_entropy(ddp(x), y)
                if not part:
                    optimizer.zero_grad()
                loss.backward()
            else:
                sync.is_syncing = is_last
                sync.forward_begins()
                loss = F.cross_entropy(model(x), y)
                if not part:
                    optimizer.zero_grad()
                sync.backward_begins(loss)
                loss.backward()
                sync.backward_ends()
            record.add(f"loss of step {number}", loss.detach())
        if sync is None:
            optimizer.step()
        else:
            sync.step(optimizer)
        scheduler.step()
        look(record, model, optimizer, number)
    if sync is not None:
        sync.close()
    record.add("model", model.state_dict())
    record.add("optimizer", optimizer.state_dict())
    record.add("gradients", {name: one.grad for name, one in model.named_parameters()})
    return record


@functools.cache
def _expected(make_model: Callable[[], nn.Module], optimizer: str, **settings: Any) -> Record:
    """Of a training in DistributedDataParallel, which is the same whatever options are compared with it."""
    torch.manual_seed(distributed.get_rank())  # the ranks begin with different parameters
    return train(make_model(), OPTIMIZERS[optimizer], None, **settings)


def compared(make_model: Callable[[], nn.Module], optimizer: str, options: PlanOptions, **settings: Any) -> str:
    """Where a training under sync differs from one in DistributedDataParallel; nothing if it does not."""
    expected = _expected(make_model, optimizer, **settings)
    torch.manual_seed(distributed.get_rank())
    model = make_model()
    try:
        return train(model, OPTIMIZERS[optimizer], options, **settings).difference(expected)
    except (RuntimeError, SyncError) as error:
        return f"{type(error).__name__}: {error}"


def first_steps(model: nn.Module, sync: GradientSync, optimizer: optim.Optimizer, num_steps: int) -> None:
    for number in range(num_steps):
        x, y = batch(sync.ranks.rank, number)
        sync.forward_begins()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        sync.backward_begins(loss)
        loss.backward()
        sync.backward_ends()
        sync.step(optimizer)


def _equal_runs(said: dict[str, Any]) -> None:
    for name, make_model in MODELS.items():
        for how, options in OPTIONS.items():
            optimizer = "Adam" if "two" in how else "SGD"
            said[f"{name}, {how}"] = compared(make_model, optimizer, options)
    said["found by itself"] = compared(
        convolutional, "Adam", PlanOptions(), num_steps=56
    )  # the plan is settled by then
    said["sparse"] = compared(Sparse, "plain SGD", OPTIONS["in the next forward"])
    said["accumulated"] = compared(convolutional, "SGD", OPTIONS["two wait"], accumulate=3)
    said["unused"] = compared(Branches, "Adam", OPTIONS["two wait"], find_unused=True, num_steps=8)
    said["unused, as usual"] = compared(Branches, "SGD", OPTIONS["as usual"], find_unused=True, num_steps=8)


def _errors(said: dict[str, Any], rank: int) -> None:
    try:
        Ranks().check_same(nn.Sequential(nn.Linear(2, 2 + rank)))
    except SyncError as error:
        said["other shape"] = str(error)
    try:
        Ranks().check_same(nn.Sequential(nn.Linear(2, 2, bias=rank == 0)))
    except SyncError as error:
        said["other number"] = str(error)
    ranks = Ranks()
    said["mean"], said["maximum"], said["decided"] = (
        ranks.mean([rank, 1.0]),
        ranks.maximum([rank, 7.0]),
        ranks.decided(rank),
    )
    samples = ranks.probe_link(1 << 14)
    said["same samples"] = ranks.decided(samples) == samples


def _abandoned(said: dict[str, Any], rank: int, is_abandoned: Path) -> None:
    """The last thing that happens: rank 1 is gone at the end of it."""
    trainings = []
    for _ in range(2):
        model = dense()
        optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
        trainings.append((model, GradientSync(model, Ranks(timedelta(seconds=50)), PlanOptions(0, True, 1)), optimizer))
        first_steps(*trainings[-1], 2)
        trainings[-1][1].synchronize()
    deadline = time.monotonic() + WAIT_SECONDS
    if rank == 1:
        while not is_abandoned.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return
    for place, (model, sync, optimizer) in enumerate(trainings):
        before = {name: one.clone() for name, one in model.state_dict().items()}
        first_steps(model, sync, optimizer, 1)
        said[f"pending {place}"] = sync.num_pending
        if place:
            is_abandoned.touch()
            works = [work for works in sync._reducer._works for work in works]
            while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
                time.sleep(0.01)
            said["all failed"] = all(work.is_completed() for work in works)
        try:
            sync.abandon()
            sync.close()
            said[f"abandon {place}"] = "returned"
        except SyncError as error:
            said[f"abandon {place}"] = f"raised {type(error).__name__}"
            continue
        said[f"left {place}"] = sync.num_pending
        said[f"as before {place}"] = all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def run_rank(run: Callable[[dict[str, Any], int, Path], None]) -> None:
    """Be the rank that a test has started, and write down what is found.

    Args:
        run: Given where to put it, the rank, and a folder of all ranks.
    """
    plan = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=plan["world_size"], timeout=timedelta(seconds=50))
    said: dict[str, Any] = {}
    try:
        run(said, rank, Path(plan["folder"]))
    except BaseException:
        said["error"] = traceback.format_exc()
    (Path(plan["folder"]) / f"said.{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # the group cannot be closed without the other rank


def _run(said: dict[str, Any], rank: int, folder: Path) -> None:
    _equal_runs(said)
    _errors(said, rank)
    _abandoned(said, rank, folder / "abandoned")


if __name__ == "__main__":
    run_rank(_run)
