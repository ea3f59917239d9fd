"""Brings together what the ranks of a pipeline have: the same start for all, and full checkpoints.

Every function here is for all ranks of a pipeline at once. Tensors are sent one at a time through memory of `device`,
so never more than one lies there beside what a rank has; what is meant for a file is on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn, optim

from lightning_gpufeed.errors import ScheduleError, SyncError
from lightning_gpufeed.pipeline.foreign import lent, make_real
from lightning_gpufeed.pipeline.partition import Partition, Placed, map_tensors
from lightning_gpufeed.pipeline.peers import lost_peer

__all__ = ["bring_back", "broadcast_from_root", "full_optimizer_state", "full_state_dict", "load_full_state_dict"]

_CPU = torch.device("cpu")
_ROUNDING = 1e-2  # of which tied weights may differ on ranks with devices of different kinds
_EXTRA_STATE = "_extra_state"  # the end of the keys of what modules say in `get_extra_state`


@dataclass(frozen=True)
class _Form:
    """What a tensor needs to be made again, but for its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        is_expanded = _written(tensor).shape != tensor.shape
        strides = torch.empty(tensor.shape, device="meta").stride() if is_expanded else tensor.stride()
        return cls(tuple(tensor.shape), tuple(strides), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class _Link:
    """Sends tensors of any dtype as bytes, from one rank to all."""

    def __init__(self, group: Any, device: torch.device | str, partition: Partition | None = None) -> None:
        self.group: Any = distributed.group.WORLD if group is None else group
        self.device = torch.device(device)
        self.rank, self.num_ranks = distributed.get_rank(self.group), distributed.get_world_size(self.group)
        if partition is not None and (self.rank, self.num_ranks) != (partition.rank, partition.num_ranks):
            raise ValueError(
                f"This is rank {self.rank} of {self.num_ranks} in the group, but rank {partition.rank} of "
                f"{partition.num_ranks} in the partition; expected the group of the pipeline's ranks, in their order."
            )

    def all_say(self, value: Any) -> list[Any]:
        """What every rank says, on every rank."""
        every: list[Any] = [None] * self.num_ranks
        with lost_peer("collecting weights"):
            distributed.all_gather_object(every, value, group=self.group)
        return every

    def send(self, tensor: Tensor, source: int) -> None:
        """From this rank of the group, which is `source`."""
        if tensor.numel():
            with lost_peer("collecting weights"):
                distributed.broadcast(_as_bytes(tensor).to(self.device), self._global(source), group=self.group)

    def receive(self, form: _Form, source: int, to: torch.device = _CPU) -> Tensor:
        """A tensor of this form, with new memory."""
        result = form.empty(to)
        if result.numel():
            flat = torch.empty(result.numel() * result.element_size(), dtype=torch.uint8, device=self.device)
            with lost_peer("collecting weights"):
                distributed.broadcast(flat, self._global(source), group=self.group)
            dtype = torch.float32 if form.dtype == torch.complex64 else form.dtype
            dtype = torch.float64 if form.dtype == torch.complex128 else dtype
            values = flat.view(dtype)
            values = torch.view_as_complex(values.view(-1, 2)) if form.dtype.is_complex else values
            result.copy_(values.view(form.shape))
        return result

    def _global(self, source: int) -> int:
        return distributed.get_global_rank(self.group, source)


@torch.no_grad()
def broadcast_from_root(partition: Partition, device: torch.device | str, group: Any, root_global_rank: int) -> None:
    """Take the root's parameters and buffers, before anything is dropped.

    Args:
        partition: Of a model with all values; only they change: every tensor stays where it is, the same object.
        device: Through which to send.
        group: Of all ranks that call this: those of a pipeline, or of several pipelines.
        root_global_rank: Whose values count.

    Raises:
        SyncError: The ranks have different models; on every rank, which says where it differs from the root.
        ScheduleError: Foreign tensors have no memory any more.
    """
    if partition.is_dropped:
        raise ScheduleError(
            "The values of foreign layers are dropped already; expected to take the root's before Partition.drop()."
        )
    link = _Link(group, device)
    root = distributed.get_group_rank(link.group, root_global_rank)
    every = link.all_say([(one.name, tuple(one.tensor.shape), one.tensor.dtype) for one in partition.tensors])
    for rank, found in enumerate(every):
        if found != every[root]:
            pairs = zip(every[root], found, strict=False)
            expected, other = next((pair for pair in pairs if pair[0] != pair[1]), (len(every[root]), len(found)))
            raise SyncError(
                f"Rank {rank} of the pipeline has {other} where the root, rank {root}, has {expected}; expected the "
                "same model on every rank (name, shape, dtype; or numbers of tensors). Build it alike."
            )
    for one in partition.tensors:
        tensor = one.tensor
        if link.rank == root:
            link.send(tensor, root)
        else:
            _written(tensor).copy_(_written(link.receive(_Form.of(tensor), root, tensor.device), tensor.stride()))


@torch.no_grad()
def full_state_dict(model: nn.Module, partition: Partition, group: Any, device: torch.device | str) -> dict[str, Any]:
    """`model.state_dict()` as it would be on one device, on every rank.

    While it is made, foreign tensors have their owners' values, in host memory; so hooks and whatever the user's
    `state_dict` does run as usual. Extra state is what the rank says that has the layer.

    Args:
        model: The partition's, or a part of it, or what is around it.
        partition: Who has what.
        group: The ranks of the pipeline.
        device: Through which to send.

    Returns:
        A snapshot on the CPU. Tensors that were one memory are one memory.

    Raises:
        ScheduleError: A layer got another tensor after the partition was made; on every rank.
        SyncError: What several ranks have is not the same; on every rank.
        ValueError: The group is not that of the partition.
    """
    link = _Link(group, device, partition)
    received = list(_received(partition, link))
    fresh = {values.untyped_storage().data_ptr() for _, values in received}
    with lent([(placed.tensor, values) for placed, values in received]):
        state = model.state_dict()
    copies: dict[Any, Tensor] = {}

    def snapshot(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage().data_ptr()
        if memory in fresh:
            return tensor
        key = (memory, tensor.device, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in copies or not tensor.numel():
            copies[key] = tensor.detach().to(_CPU, copy=True)
        return copies[key]

    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = snapshot(value)
    state.update(_extra_states(model, state, partition, link))
    return state


def _extra_states(model: nn.Module, state: dict[str, Any], partition: Partition, link: _Link) -> dict[str, Any]:
    """What layers of other ranks say in `get_extra_state`: only there a forward has changed it."""
    sources: dict[str, int] = {}
    for path, module in model.named_modules():
        key = f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE
        owners = partition.ranks_of(module)
        if key in state and owners:
            sources[key] = owners[0]
    if not sources:
        return {}
    own = {key: map_tensors(state[key], Tensor.cpu) for key, source in sources.items() if source == link.rank}
    every = link.all_say(own)
    return {key: every[source][key] for key, source in sources.items()}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """`model.load_state_dict(state)` where foreign tensors may be dropped. Every rank loads what it has.

    torch warns of each tensor that is not loaded because it has no memory; here that is what is wanted.

    Args:
        model: Any.
        state: Of the whole model, the same on every rank.
        strict: Whether the keys have to match, as for torch.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter in the checkpoint to a meta")
        model.load_state_dict(state, strict=strict)


@torch.no_grad()
def full_optimizer_state(
    optimizer: optim.Optimizer, partition: Partition, group: Any, device: torch.device | str, *, keep: bool = True
) -> dict[str, Any]:
    """`optimizer.state_dict()` as it would be on one device, on every rank that wants it.

    Args:
        optimizer: Of all parameters, foreign ones too, in the same order on every rank.
        partition: Who has what. A parameter of several ranks has the state of the first.
        group: The ranks of the pipeline.
        device: Through which to send.
        keep: Whether this rank wants it. If not, it takes part, and nothing of the others takes memory here.

    Returns:
        The states of all parameters that have one with an owner, on the CPU and as copies; all else as this rank has
        it. Numbers of parameters are the optimizer's own. Without `keep`, only what this rank has.

    Raises:
        ValueError: The group is not that of the partition.
    """
    link = _Link(group, device, partition)
    result = optimizer.state_dict()
    merged = map_tensors(dict(result["state"]), lambda one: one if one.is_meta else one.detach().to(_CPU, copy=True))
    numbers = _numbers(optimizer, result["param_groups"], partition)
    own = {number: merged[number] for number, owner in numbers.items() if owner == link.rank and number in merged}
    forms = link.all_say(map_tensors(own, _Form.of))
    for number in numbers:
        merged.pop(number, None)
    for source, states in enumerate(forms):
        if source == link.rank:
            map_tensors(own, lambda tensor: link.send(tensor, link.rank))
            merged.update(own)
        elif keep:
            merged.update(map_tensors(states, partial(link.receive, source=source), _Form))
        else:
            map_tensors(states, partial(link.receive, source=source), _Form)
    others = {key: value for key, value in merged.items() if not isinstance(key, int)}
    result["state"] = {key: merged[key] for key in sorted(merged.keys() - others.keys())} | others
    return result


@torch.no_grad()
def bring_back(partition: Partition, group: Any, device: torch.device | str, *, to: torch.device | str = "cpu") -> None:
    """Give every rank the values of all layers, at the end of a training.

    Args:
        partition: Nothing is dropped in it afterwards; every tensor is the same object.
        group: The ranks of the pipeline.
        device: Through which to send.
        to: Where foreign tensors get their memory. The own ones stay where they are.

    Raises:
        ScheduleError: A layer got another tensor after the partition was made; on every rank.
        SyncError: What several ranks have is not the same; on every rank.
        ValueError: The group is not that of the partition.
    """
    for placed, values in _received(partition, _Link(group, device, partition), torch.device(to)):
        make_real(placed.tensor, values)
    partition.is_dropped = False


def _received(partition: Partition, link: _Link, to: torch.device = _CPU) -> Iterator[tuple[Placed, Tensor]]:
    """Foreign tensors and their owners' values, one after the other."""
    own = {
        number: _Form.of(placed.tensor)
        for number, placed in enumerate(partition.tensors)
        if placed.owners[0] == link.rank and getattr(placed.module, placed.key) is not None
    }
    every = link.all_say((own, partition.strangers()))
    _check_strangers(partition, every)
    torn: list[str] = []
    for number, placed in enumerate(partition.tensors):
        source = placed.owners[0]
        if len(placed.owners) == link.num_ranks:
            continue  # everybody has it
        if source == link.rank:
            link.send(placed.tensor, source)
            continue
        values = link.receive(every[source][0][number], source, to)
        if not partition.is_own(placed):
            yield placed, values
        elif not _is_kept_equal(placed, values):
            torn.append(placed.name)
    if any(1 < len(placed.owners) < link.num_ranks for placed in partition.tensors):
        _check_torn(link.all_say(torn))


def _as_bytes(tensor: Tensor) -> Tensor:
    """All elements in the order of their indices, without a copy if they lie so."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return (torch.view_as_real(values).view(-1) if values.is_complex() else values).view(torch.uint8)


def _is_kept_equal(placed: Placed, values: Tensor) -> bool:
    """Whether what several ranks have is the same: a buffer in each bit, a weight but for rounding."""
    own = placed.tensor.detach().to(values.device)
    if own.shape != values.shape or own.dtype != values.dtype:
        return False
    if not placed.is_parameter or not own.is_floating_point():
        return torch.equal(_as_bytes(own), _as_bytes(values))
    own, values = own.double(), values.double()
    return bool((own - values).norm() <= _ROUNDING * values.norm()) or not bool(values.isfinite().all())


def _check_torn(every: Sequence[Sequence[str]]) -> None:
    """A value that several ranks have, and that is not the same on all."""
    for rank, names in enumerate(every):
        if names:
            raise SyncError(
                f"{', '.join(map(repr, names))} on rank {rank} of the pipeline is not what another rank has, which has "
                "it too. A module of several layers must not change its own buffers in a forward: give each layer a "
                "module of its own. Weights of several layers stay equal if only the optimizer changes them."
            )


def _written(tensor: Tensor, strides: tuple[int, ...] | None = None) -> Tensor:
    """Without the repeats of an expanded tensor, into which torch does not write."""
    strides = tensor.stride() if strides is None else strides
    for axis, (size, step) in enumerate(zip(tensor.shape, strides, strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _check_strangers(partition: Partition, every: Iterable[tuple[dict[int, _Form], list[str]]]) -> None:
    """Every rank knows of all tensors: what a rank has made meanwhile, no other one could save."""
    known: set[int] = set()
    for rank, (own, strangers) in enumerate(every):
        known |= own.keys()
        if strangers:
            raise ScheduleError(
                f"Rank {rank} of the pipeline has made {', '.join(map(repr, strangers))} after the layers were shared "
                "out, and no other rank can have it. Make all parameters and buffers in __init__."
            )
    lost = [placed.name for number, placed in enumerate(partition.tensors) if number not in known]
    if lost:
        raise ScheduleError(
            f"{', '.join(map(repr, lost))} was taken away after the layers were shared out; expected the same "
            "parameters and buffers until the training ends."
        )


def _numbers(optimizer: optim.Optimizer, groups: list[dict[str, Any]], partition: Partition) -> dict[int, int]:
    """For each number that a state dict gives to a parameter in the layers, its first owner."""
    found: dict[int, int] = {}
    for group, packed in zip(optimizer.param_groups, groups, strict=True):
        for parameter, number in zip(group["params"], packed["params"], strict=True):
            placed = partition.find(parameter)
            if placed is not None and not placed.is_outside:
                found[number] = placed.owners[0]
    return found
