"""Which rank of a pipeline has which parameters and buffers; takes the memory of the others away. No collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parameter import is_lazy

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.foreign import is_foreign, make_foreign
from lightning_gpufeed.pipeline.layer_list import LayerList

__all__ = ["Partition", "Placed", "map_tensors"]


@dataclass(frozen=True, eq=False)
class Placed:
    """A parameter or a buffer, and who has it.

    Attributes:
        name: The first one in the model.
        module: That has it under that name: a buffer may be another tensor after each forward.
        key: Its name in the module.
        owners: Ranks, ascending.
        is_outside: Whether it is in no layer, and so on all ranks.
        is_parameter: Or a buffer.
    """

    name: str
    module: nn.Module
    key: str
    owners: tuple[int, ...]
    is_outside: bool
    is_parameter: bool

    @property
    def tensor(self) -> Tensor:
        """As it is now."""
        tensor: Tensor = getattr(self.module, self.key)
        return tensor

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.name!r} (on rank {' and '.join(map(str, self.owners))} of the pipeline)"


class Partition:
    """Who has what, seen from one rank.

    A tensor in layers belongs to the ranks of these layers; one outside of them belongs to all ranks, which all compute
    what is outside. Tensors are known by identity, so a parameter of two layers (tied weights) is one.

    Attributes:
        model: The whole.
        layers: That were shared out.
        stages: The layers of each stage.
        stage_to_rank: The rank of each stage.
        rank: This one.
        num_ranks: Of the pipeline.
        tensors: All parameters and buffers, each once, in the order of the model.
        is_dropped: Whether foreign tensors have no memory.
        own_bytes: Of what this rank has.
        foreign_bytes: Of what only others have.

    Example:
        >>> from lightning_gpufeed.pipeline.layer_list import find_layers
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> partition = Partition(model, find_layers(model), (range(0, 1), range(1, 2)), (0, 1), rank=0)
        >>> [name for name, _ in partition.foreign]
        ['1.weight', '1.bias']
        >>> partition.drop()
        >>> model[1].weight.is_meta, partition.own_bytes, partition.foreign_bytes
        (True, 24, 12)
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerList,
        stages: Sequence[range],
        stage_to_rank: Sequence[int],
        rank: int,
    ) -> None:
        """Find out. Nothing is changed.

        Args:
            model: The whole, with all values.
            layers: Of the model.
            stages: The layers of each stage.
            stage_to_rank: The rank of each stage.
            rank: This one, in the pipeline.

        Raises:
            ScheduleError: The model has a tensor that cannot be shared out exactly.
            ValueError: The stages are not all layers in order, or have no ranks.
        """
        self.model, self.layers, self.rank = model, layers, rank
        self.stages, self.stage_to_rank = tuple(stages), tuple(stage_to_rank)
        _check_stages(self)
        self.num_ranks = max(self.stage_to_rank) + 1
        self.is_dropped = False
        self._ranks_of: dict[int, set[int]] = {}  # of each module in a layer
        for stage, its_rank in zip(self.stages, self.stage_to_rank, strict=True):
            for module in (part for number in stage for part in layers.layers[number].modules()):
                self._ranks_of.setdefault(id(module), set()).add(its_rank)
        uses = _uses(model)
        self._known = {(id(module), key) for found in uses for _, module, key, _ in found}
        self.tensors = tuple(_placed(self, uses))
        _check_memory(self.tensors)
        self._of = {id(one.tensor): one for one in self.tensors if one.is_parameter}
        self.own_bytes = sum(map(_bytes, (one for _, one in self.own)))
        self.foreign_bytes = sum(map(_bytes, (one for _, one in self.foreign)))

    @property
    def own(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of what this rank has."""
        return [(one.name, one.tensor) for one in self.tensors if self.is_own(one)]

    @property
    def foreign(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of what only others have."""
        return [(one.name, one.tensor) for one in self.tensors if not self.is_own(one)]

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Owners of each parameter in layers of several ranks: their gradients have to be summed."""
        return {
            one.name: one.owners
            for one in self.tensors
            if one.is_parameter and not one.is_outside and len(one.owners) > 1
        }

    def is_own(self, placed: Placed) -> bool:
        """Whether this rank has it.

        Args:
            placed: One of `tensors`.

        Returns:
            True also for what others have as well.
        """
        return self.rank in placed.owners

    def find(self, parameter: Tensor) -> Placed | None:
        """Who has a parameter.

        Args:
            parameter: Known by identity.

        Returns:
            None if it is not in the model.
        """
        found = self._of.get(id(parameter))
        return found if found is not None and found.tensor is parameter else None

    def ranks_of(self, module: nn.Module) -> tuple[int, ...]:
        """Who runs a module.

        Args:
            module: Known by identity.

        Returns:
            Ascending; empty for what is in no layer, so that every rank runs it.
        """
        return tuple(sorted(self._ranks_of.get(id(module), ())))

    def drop(self) -> None:
        """Take the memory of foreign tensors, and their gradients, away.

        A foreign tensor is the same object as before, on the meta device: an optimizer keeps its place, hooks and
        attributes stay, `.grad` is None. `model.to(device)` leaves it there. Reading its values raises `ScheduleError`;
        writing into it does nothing, as the ranks that have it do the same.
        """
        for one in self.tensors:
            if not self.is_own(one):
                make_foreign(one.tensor, one.place)
        self.is_dropped = True

    def drop_state(self, optimizer: optim.Optimizer) -> None:
        """Take the memory of an optimizer's state for foreign parameters away.

        Args:
            optimizer: Of the model. It has no state for these parameters afterwards, as if it had made no step.
        """
        for parameter in list(optimizer.state):
            placed = self.find(parameter) if isinstance(parameter, Tensor) else None
            if placed is not None and not self.is_own(placed):
                del optimizer.state[parameter]

    def strangers(self) -> list[str]:
        """Names of tensors that were put into this rank's layers later, of which other ranks know nothing."""
        found: list[str] = []
        for stage, rank in zip(self.stages, self.stage_to_rank, strict=True):
            for number in stage if rank == self.rank else ():
                for path, module in self.layers.layers[number].named_modules(prefix=self.layers.names[number]):
                    found += [f"{path}.{key}" for key, _, _ in _direct(module) if (id(module), key) not in self._known]
        return found


def map_tensors(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Another value of the same structure.

    Args:
        value: Dicts, lists and tuples, as deep as it likes.
        change: Called with each tensor in it.
        kind: Of what is changed, if it is not tensors. All else stays as it is.

    Returns:
        The structure, with what `change` has returned in the places of the tensors.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(one, change, kind) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        changed = [map_tensors(one, change, kind) for one in value]
        if isinstance(value, list):
            return changed
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    return value


def _check_stages(partition: Partition) -> None:
    num_layers = len(partition.layers.layers)
    given = [number for stage in partition.stages for number in stage]
    if given != list(range(num_layers)) or not all(len(stage) for stage in partition.stages):
        raise ValueError(
            f"The stages are {list(partition.stages)}; expected ranges that follow each other, each with a layer or "
            f"more, and all {num_layers} layers together."
        )
    ranks = partition.stage_to_rank
    if len(ranks) != len(partition.stages) or set(ranks) != set(range(max(ranks, default=0) + 1)):
        raise ValueError(
            f"{len(partition.stages)} stages are on ranks {list(ranks)}; expected a rank for each, and a stage on each "
            "rank from 0 on."
        )
    if partition.rank not in ranks:
        raise ValueError(f"This is rank {partition.rank} of a pipeline of ranks 0 to {max(ranks)}.")


def _direct(module: nn.Module) -> Iterable[tuple[str, Tensor, bool]]:
    """Key, tensor, and whether it is a parameter, of what a module has itself."""
    for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield key, parameter, True
    for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        yield key, buffer, False


Use = tuple[str, nn.Module, str, bool]
"""Name in the model, module, name in the module, whether it is a parameter."""


def _uses(model: nn.Module) -> list[list[Use]]:
    """For every tensor of the model all its uses."""
    uses: dict[int, list[Use]] = {}
    for path, module in model.named_modules():
        for key, tensor, is_parameter in _direct(module):
            name = f"{path}.{key}" if path else key
            _check_kind(name, tensor)
            uses.setdefault(id(tensor), []).append((name, module, key, is_parameter))
    return list(uses.values())


def _placed(partition: Partition, uses: Iterable[list[Use]]) -> Iterable[Placed]:
    """Every tensor once, with its owners."""
    ranks_of = partition._ranks_of
    container, everyone = partition.layers.name, range(partition.num_ranks)
    for found in uses:
        name, module, key, is_parameter = found[0]
        outside = [use for use in found if id(use[1]) not in ranks_of]
        inside = [use for use in found if id(use[1]) in ranks_of]
        if outside and inside and is_parameter and partition.num_ranks > 1:
            _refuse_both(inside[0][0], outside[0][0], container)
        for use in inside:
            if len(ranks_of[id(use[1])]) > 1 and not is_parameter:
                _check_statistics(use[0], use[1], container)
        owners = {rank for use in inside for rank in ranks_of[id(use[1])]}
        yield Placed(name, module, key, tuple(everyone if outside else sorted(owners)), bool(outside), is_parameter)


def _refuse_both(inside: str, outside: str, container: str) -> None:
    raise ScheduleError(
        f"{inside!r} in a layer and {outside!r} outside of {container!r} are the same parameter. Its gradient from the "
        "layer would be on one rank and that from outside on every rank, so their sum would be wrong. Put the module "
        f"that has {outside!r} into {container!r} as a layer, or untie the two."
    )


def _check_statistics(name: str, module: nn.Module, container: str) -> None:
    """A module that notes statistics has to see all batches."""
    if getattr(module, "track_running_stats", False):
        raise ScheduleError(
            f"{name!r} (of a {type(module).__name__}) is in layers of {container!r} on several ranks, and each would "
            "keep running statistics of its own. Give each layer a module of its own, or track_running_stats=False."
        )


def _check_kind(name: str, tensor: Tensor) -> None:
    """Only tensors that are plain memory can be sent, and taken away."""
    if is_lazy(tensor):
        raise ScheduleError(
            f"{name!r} has no shape yet; a pipeline has to know the size of every layer. Run a batch through the model "
            "before, or give the layer its sizes."
        )
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__") or tensor.is_quantized:
        raise ScheduleError(
            f"{name!r} is a {type(tensor).__name__} of layout {tensor.layout}; a pipeline can only share out ordinary "
            "dense tensors. Convert the layer before, or train without pipeline_size."
        )


def _check_memory(tensors: Sequence[Placed]) -> None:
    """Two parameters in the same memory are one for torch's arithmetic, but not by identity."""
    spans = []
    for one in tensors:
        tensor = one.tensor
        if one.is_parameter and tensor.numel() and not tensor.is_meta and not is_foreign(tensor):
            length = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.append((tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size(), one.name))
    for (_, end, name), (begin, _, other) in pairwise(sorted(spans)):
        if begin < end:
            raise ScheduleError(
                f"{name!r} and {other!r} are two parameters in the same memory, which a pipeline would tear apart. "
                "Use the same nn.Parameter in both places (second.weight = first.weight)."
            )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
