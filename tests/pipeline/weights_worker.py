"""Four real ranks that share out a model, train it and bring it together again. Started by test_weights.py.

    python weights_worker.py PLAN.json

Each scenario gives a value that is written to OUT/<name>.<rank>.pt; the plan names OUT.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn, optim

from lightning_gpufeed.errors import ScheduleError, SyncError
from lightning_gpufeed.pipeline.layer_list import find_layers
from lightning_gpufeed.pipeline.partition import Partition
from lightning_gpufeed.pipeline.weights import (
    bring_back,
    broadcast_from_root,
    full_optimizer_state,
    full_state_dict,
    load_full_state_dict,
)
from tests.pipeline.partition_models import NUM_STEPS, OPTIMIZERS, STAGES, Net, make_net, train_shared

NUM_RANKS = 4
Group = Any


def share_out(net: Net, num_ranks: int, rank: int) -> Partition:
    """Layer by layer, round and round."""
    return Partition(net, find_layers(net), STAGES, [number % num_ranks for number in range(len(STAGES))], rank)


def trained(name: str, rank: int) -> dict[str, Any]:
    """Starts from other weights on each rank, and takes those of rank 0."""
    net = make_net(seed=10 + rank)
    group = distributed.group.WORLD
    partition = share_out(net, NUM_RANKS, rank)
    before = {one.name: id(one.tensor) for one in partition.tensors if one.is_parameter}
    broadcast_from_root(partition, "cpu", group, 0)
    start = {key: value.clone() for key, value in net.state_dict().items() if isinstance(value, torch.Tensor)}
    optimizer = OPTIMIZERS[name](net)
    partition.drop()
    partition.drop_state(optimizer)
    losses = train_shared(net, optimizer, partition, group, range(NUM_STEPS))
    state = full_state_dict(net, partition, group, "cpu")
    optimizer_state = full_optimizer_state(optimizer, partition, group, "cpu")
    is_meta = [one.tensor.is_meta for one in partition.tensors]
    result = {
        "start": start,
        "losses": losses,
        "state": state,
        "metadata": state._metadata,
        "optimizer": optimizer_state,
        "is_meta_where_foreign": is_meta == [not partition.is_own(one) for one in partition.tensors],
    }
    bring_back(partition, group, "cpu")
    return result | {
        "back": {one.name: one.tensor.detach().clone() for one in partition.tensors},
        "are_same_objects": before == {one.name: id(one.tensor) for one in partition.tensors if one.is_parameter},
        "is_dropped": partition.is_dropped,
        "plain_state": net.state_dict(),
    }


def resumed(rank: int, saved: dict[str, Any]) -> dict[str, Any]:
    """A full checkpoint, loaded into a model and an optimizer whose foreign parts are dropped."""
    net = make_net(seed=20 + rank)
    partition = share_out(net, NUM_RANKS, rank)
    optimizer = OPTIMIZERS["adamw_fused"](net)
    partition.drop()
    load_full_state_dict(net, saved["state"])
    optimizer.load_state_dict(saved["optimizer"])
    partition.drop_state(optimizer)
    group = distributed.group.WORLD
    for one in partition.tensors:  # is not in a checkpoint
        if one.key == "mask" and partition.is_own(one):
            one.tensor.copy_(saved["back"][one.name])
    held = [value for state in optimizer.state.values() for value in state.values() if not value.is_meta]
    losses = train_shared(net, optimizer, partition, group, range(NUM_STEPS, NUM_STEPS + 1))
    return {
        "losses": losses,
        "num_held": len(held),
        "num_own": sum(one.is_parameter and partition.is_own(one) for one in partition.tensors),
        "state": full_state_dict(net, partition, group, "cpu"),
        "optimizer": full_optimizer_state(optimizer, partition, group, "cpu"),
    }


def of_two(rank: int) -> dict[str, Any]:
    """Two pipelines of two ranks, all of which take the weights of rank 3."""
    groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    group, place = groups[rank // 2], rank % 2
    net = make_net(seed=10 + rank)
    partition = share_out(net, 2, place)
    broadcast_from_root(partition, "cpu", distributed.group.WORLD, 3)
    optimizer = OPTIMIZERS["sgd"](net)
    partition.drop()
    train_shared(net, optimizer, partition, group, range(NUM_STEPS))
    result = {
        "state": full_state_dict(net, partition, group, "cpu"),
        "optimizer": full_optimizer_state(optimizer, partition, group, "cpu"),
    }
    bring_back(partition, group, "cpu")
    for one in groups:
        if rank in distributed.get_process_group_ranks(one):
            distributed.destroy_process_group(one)
    return result


def odd_tensors(rank: int) -> dict[str, Any]:
    """Every dtype, empty and expanded tensors, and a parameter that is not trained."""
    net = nn.Module()
    torch.manual_seed(rank)
    layers = []
    for number in range(NUM_RANKS):
        layer = nn.Module()
        values = torch.arange(6.0).view(2, 3) + 10 * number + (0 if rank == number else 100)
        for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2):
            layer.register_buffer("as_" + str(dtype).removeprefix("torch."), values.to(dtype))
        layer.register_buffer("empty", torch.empty(0, 3))
        layer.register_buffer("expanded", values[:1].expand(4, 3))
        layer.register_buffer("images", values.view(1, 2, 3, 1).to(memory_format=torch.channels_last))
        layers.append(layer)
    net.seq = nn.Sequential(*layers)
    stages = tuple(range(number, number + 1) for number in range(NUM_RANKS))
    partition = Partition(net, find_layers(net), stages, range(NUM_RANKS), rank)
    partition.drop()
    state = full_state_dict(net, partition, None, "cpu")
    bring_back(partition, None, "cpu")
    broadcast_from_root(partition, "cpu", None, 2)
    return {"state": state, "back": net.state_dict()}


class Nested(optim.SGD):
    """An optimizer with states of any form."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.state[parameter] = {
                        "number": number,
                        "none": None,
                        "deep": {"list": [parameter.grad + 1, 2.5], "pair": (parameter.grad.half(), "text")},
                    }


def nested_states(rank: int) -> dict[str, Any]:
    """Beside them a state that is nobody's, and a parameter without any."""
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(NUM_RANKS)))
    stages = tuple(range(number, number + 1) for number in range(NUM_RANKS))
    partition = Partition(net, find_layers(net), stages, range(NUM_RANKS), rank)
    alone = nn.Parameter(torch.ones(1))
    optimizer = Nested([*net.parameters(), alone], lr=0.1)
    partition.drop()
    net[rank].weight.grad = torch.full((1, 1), float(rank))
    alone.grad = torch.zeros(1)
    optimizer.step()
    optimizer.state["count"] = 3
    optimizer.state[net[(rank + 1) % NUM_RANKS].bias] = {"old": torch.zeros(1)}  # of which its owner knows nothing
    return full_optimizer_state(optimizer, partition, None, "cpu")


def refusals(rank: int) -> dict[str, str]:
    """What is refused on all ranks alike, so that none waits for the others."""
    said = {}
    net = nn.Sequential(nn.Linear(2, 3 if rank == 2 else 2), *(nn.Linear(2, 2) for _ in range(3)))
    stages = tuple(range(number, number + 1) for number in range(NUM_RANKS))
    partition = Partition(net, find_layers(net), stages, range(NUM_RANKS), rank)
    try:
        broadcast_from_root(partition, "cpu", None, 1)
    except SyncError as error:
        said["models differ"] = str(error)
    partition.drop()
    try:
        broadcast_from_root(partition, "cpu", None, 1)
    except ScheduleError as error:
        said["dropped"] = str(error)
    if rank == 1:
        net[1].register_buffer("late", torch.ones(1))
    try:
        full_state_dict(net, partition, None, "cpu")
    except ScheduleError as error:
        said["late buffer"] = str(error)
    if rank == 1:
        del net[1].late
        net[1].bias = None
    try:
        full_state_dict(net, partition, None, "cpu")
    except ScheduleError as error:
        said["lost parameter"] = str(error)
    return said | torn(rank)


class Count(nn.Module):
    """Two layers have the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(3))


def torn(rank: int) -> dict[str, str]:
    """What two ranks have, and one of them changes."""
    said = {}
    net = nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(NUM_RANKS)))
    count = Count()
    net[1].append(count)
    net[3].append(count)
    stages = tuple(range(number, number + 1) for number in range(NUM_RANKS))
    partition = Partition(net, find_layers(net), stages, range(NUM_RANKS), rank)
    partition.drop()
    full_state_dict(net, partition, None, "cpu")
    with torch.no_grad():
        for name, tensor in [("buffer", count.total), ("weight", count.weight)]:
            tensor.add_(int(rank == 3))
            try:
                full_state_dict(net, partition, None, "cpu")
            except SyncError as error:
                said[f"torn {name}"] = str(error)
            tensor.sub_(int(rank == 3))
    full_state_dict(net, partition, None, "cpu")
    try:
        bring_back(partition, distributed.new_group([rank], use_local_synchronization=True), "cpu")
    except ValueError as error:
        said["another group"] = str(error)
    return said


def work(rank: int, folder: Path) -> None:
    """All scenarios, one after the other."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=40),
    )
    results = {name: trained(name, rank) for name in OPTIMIZERS}
    results["resumed"] = resumed(rank, copy.deepcopy(results["adamw_fused"]))  # an optimizer may keep what it loads
    results |= {one.__name__: one(rank) for one in (of_two, odd_tensors, nested_states, refusals)}
    for name, value in results.items():
        torch.save(value, folder / f"{name}.{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    place = 0
    children = []
    for number in range(1, NUM_RANKS):
        child = os.fork()
        if child == 0:
            place = number
            break
        children.append(child)
    try:
        work(place, Path(json.loads(Path(sys.argv[1]).read_text())["out"]))
    except BaseException:
        traceback.print_exc()
    if place:
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
