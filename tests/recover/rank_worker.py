"""One rank of a real process group with hand-written training. Started by test_ranks.py, once per rank, with a plan.

    python rank_worker.py PLAN.json

Each scenario gives a value that is saved as OUT/<name>.<rank>.pt. An error is a result like any other.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gpufeed.device.vote import HostVote
from lightning_gpufeed.recover.ranks import RankGuard, num_collectives, obstacle_to_guard

RANK = int(os.environ.get("LOCAL_RANK", "0"))
NUM_RANKS = 2
MIB = 2**20


# Models ------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of four types, one without elements, one without dimensions, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)
        self.third = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.twist = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = self.third(self.second(self.first(given).double()).bfloat16()).float()
        hidden = (hidden * self.twist).abs() + self.nothing.sum()
        return self.first(hidden) * self.scale


class Large(nn.Module):
    """Gradients larger than what is put together, in and out of one stretch of memory; many that fill it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Parameter(torch.linspace(-1, 1, 2 * MIB))
        self.crossed = nn.Parameter(torch.linspace(-1, 1, 2 * MIB).view(1024, 2048).t())
        self.many = nn.ParameterList(torch.linspace(-1, 1, 5 * MIB // 4) for _ in range(6))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        parts = [self.long, self.crossed.reshape(-1), *self.many]
        return torch.stack([(part * part * given.mean()).sum() for part in parts])


class Norms(nn.Module):
    """Statistics, which DDP sends from the first rank to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.layers(given)


class Branches(nn.Module):
    """One layer that only one rank uses, one that none uses, and one that DDP is told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = nn.Linear(4, 4)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["own.weight", "own.bias"])

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = self.own(self.first(given))
        return self.sometimes(hidden) if RANK == 1 else hidden


class Images(nn.Module):
    """Weights whose gradients are stored channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3))
        self.to(memory_format=torch.channels_last)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        images = given.repeat(1, 48).view(-1, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        return self.layers(images)


class Table(nn.Module):
    """Sparse gradients, with rows that come several times."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.last(self.rows((given.abs() * 3).long().clamp(max=8)).sum(1))


class SparseGap(Table):
    """One rank has a sparse gradient that the other one has not."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.last(given) if RANK == 0 else super().forward(given)


class Frozen(nn.Module):
    """A layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 1))
        self.layers[0].requires_grad_(False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.layers(given)


@dataclass
class Case:
    """A model, how DDP is made, and how many batches go into a step."""

    model: type[nn.Module]
    ddp: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    is_evaluated: bool = False
    num_steps: int = 3


CASES = {
    "mixed": Case(Mixed),
    "large": Case(Large, num_steps=1),
    "norms": Case(Norms),
    "norms accumulated": Case(Norms, accumulate=2),
    "norms evaluated": Case(Norms, is_evaluated=True),
    "norms not sent": Case(Norms, {"broadcast_buffers": False}),
    "bucket views": Case(Norms, {"gradient_as_bucket_view": True}, accumulate=2),
    "branches": Case(Branches, {"find_unused_parameters": True}),
    "branches accumulated": Case(Branches, {"find_unused_parameters": True}, accumulate=2),
    "images": Case(Images),
    "table": Case(Table),
    "table accumulated": Case(Table, accumulate=2),
    "frozen": Case(Frozen),
}


class Loop:
    """A hand-written training of SGD with momentum, with or without the guard."""

    def __init__(self, case: Case, vote: HostVote | None) -> None:
        """Make the same model on all ranks, but for buffers and what is ignored: DDP sends those of the first."""
        torch.manual_seed(5)
        self.case = case
        self.wrapper = DistributedDataParallel(case.model(), **case.ddp)
        self.guard = None if vote is None else RankGuard(self.wrapper, vote)
        trained = [parameter for parameter in self.wrapper.parameters() if parameter.requires_grad]
        self.breaking = trained[0]
        self.optimizer = torch.optim.SGD(trained, lr=0.01)
        self.generator = torch.Generator().manual_seed(RANK)

    def backward(self, given: torch.Tensor) -> None:
        """Of one batch."""
        output = self.wrapper(given)
        output.square().mean().backward()

    def step(self, num_failures: int = 0) -> dict[str, Any]:
        """One optimizer step; failed attempts end in the middle of backward."""
        self.optimizer.zero_grad()
        for number in range(self.case.accumulate):
            given = torch.randn(6, 4, generator=self.generator)
            is_last = number == self.case.accumulate - 1
            if self.guard is None:
                with self.wrapper.no_sync() if not is_last else torch.enable_grad():
                    self.backward(given)
                continue
            self.guard.begin()
            with self.guard.without_sync():
                for _ in range(num_failures):
                    self.fail(given)
                    self.guard.undo()
                self.backward(given)
            if is_last:
                self.guard.reduce()
        gradients = {
            name: None if parameter.grad is None else parameter.grad.detach().clone()
            for name, parameter in self.wrapper.module.named_parameters()
        }
        self.optimizer.step()
        if self.case.is_evaluated:
            self.wrapper.eval()
            with torch.no_grad():
                self.wrapper(torch.randn(3, 4, generator=self.generator))
            self.wrapper.train()
        return gradients

    def fail(self, given: torch.Tensor) -> None:
        """Break off in backward, when later layers have their gradients; put back what the attempt did."""
        module = self.wrapper.module
        state = copy.deepcopy(module.state_dict())
        gradients = [copy.deepcopy(parameter.grad) for parameter in module.parameters()]
        handle = self.breaking.register_hook(broken)
        try:
            self.backward(given)
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("nothing failed")
        finally:
            handle.remove()
        module.load_state_dict(state)
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient

    def run(self, num_failures: int = 0) -> dict[str, Any]:
        """Some steps."""
        gradients = [self.step(num_failures) for _ in range(self.case.num_steps)]
        return {"gradients": gradients, "state": copy.deepcopy(self.wrapper.module.state_dict())}


def broken(gradient: torch.Tensor) -> None:
    """A backward pass that runs out of memory."""
    raise torch.OutOfMemoryError


# Scenarios ---------------------------------------------------------------------------------------------------


def cases(vote: HostVote) -> Any:
    """Every case with DDP alone, with the guard, and with attempts that failed on one rank."""
    found = {}
    for name, case in CASES.items():
        plain = Loop(case, None).run()
        found[name] = {
            "guarded": differences(plain, Loop(case, vote).run()),
            "failed": differences(plain, Loop(case, vote).run(num_failures=2 * RANK)),
            "num_gradients": sum(gradient is not None for gradient in plain["gradients"][-1].values()),
            "gaps": [key for key, gradient in plain["gradients"][-1].items() if gradient is None],
            "weights": plain["state"] if case.model is Branches else {},
        }
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same to the last bit."""
    found = []
    for step, (first, second) in enumerate(zip(one["gradients"], other["gradients"], strict=True)):
        found += [f"gradient of {name} in step {step}" for name in first if not is_same(first[name], second[name])]
    return found + [name for name in one["state"] if not is_same(one["state"][name], other["state"][name])]


def is_same(one: Any, other: Any) -> bool:
    """To the last bit."""
    if one is None or other is None:
        return one is other
    if one.is_sparse != other.is_sparse or one.dtype != other.dtype:
        return False
    if one.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one, other)


def unfrozen(vote: HostVote) -> Any:
    """A layer that was frozen when all was set up is trained from some step on."""
    loop = Loop(Case(Frozen), vote)
    loop.step()
    layer = loop.wrapper.module.layers[0].requires_grad_(True)
    loop.optimizer.add_param_group({"params": list(layer.parameters())})
    gradients = loop.step()
    return {"gradients": gradients, "weights": loop.wrapper.module.state_dict()}


def counted(vote: HostVote) -> Any:
    """How many collectives are seen of an attempt that does something besides."""
    other = distributed.new_group()
    value = torch.ones(2)
    ask: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "vote": lambda: vote.maximum(1),
        "all_reduce": lambda: distributed.all_reduce(value.clone()),
        "async": lambda: distributed.all_reduce(value.clone(), async_op=True).wait(),
        "all_gather": lambda: distributed.all_gather([value.clone(), value.clone()], value),
        "broadcast": lambda: distributed.broadcast(value.clone(), 0),
        "barrier": lambda: distributed.monitored_barrier(),
        "objects": lambda: distributed.all_gather_object([None] * NUM_RANKS, {"a": 1}),
    }
    loop = Loop(CASES["norms accumulated"], vote)
    assert loop.guard is not None
    found = {}
    for name, do in ask.items():
        for number in range(3):
            loop.guard.begin()
            before = num_collectives()
            with loop.guard.without_sync():
                loop.backward(torch.randn(6, 4))
                do()
            found[f"{name} {number}"] = num_collectives() - before
            if number % 2:
                loop.guard.reduce()
    distributed.destroy_process_group(other)
    return found


def obstacles(vote: HostVote) -> Any:
    """What cannot be guarded."""
    plain = DistributedDataParallel(Frozen())
    static = DistributedDataParallel(Frozen(), static_graph=True)
    norms = DistributedDataParallel(Frozen())
    # DDP itself lets it in on a GPU only.
    norms.module.late = nn.SyncBatchNorm(3)
    return [obstacle_to_guard(wrapper) for wrapper in (plain, static, norms)]


def sparse_gap(vote: HostVote) -> Any:
    """What DDP refuses on the rank that has none, while the other one waits."""
    loop = Loop(Case(SparseGap), vote)
    try:
        loop.step()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "none"}


def memory(vote: HostVote) -> Any:
    """What a guard holds."""
    large, mixed = (RankGuard(DistributedDataParallel(model()), vote) for model in (Large, Mixed))
    return [sorted(bucket.nbytes for bucket in guard._buckets.values()) for guard in (large, mixed)]


SCENARIOS = [cases, unfrozen, counted, obstacles, memory, sparse_gap]


def main() -> None:
    """Run all."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers")  # the old name, which older releases know as well
    plan = json.loads(Path(sys.argv[1]).read_text())
    distributed.init_process_group("gloo", rank=RANK, world_size=NUM_RANKS, timeout=timedelta(seconds=60))
    vote = HostVote(timedelta(seconds=60))
    for scenario in SCENARIOS:
        try:
            result = scenario(vote)
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"}
        torch.save(result, Path(plan["out"]) / f"{scenario.__name__}.{RANK}.pt")
    vote.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
