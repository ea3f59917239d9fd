"""Adds gradients up in two halves, so that the norm of all of them is known before the second half has crossed.

::

    backward     bucket is full     each rank is sent its part of the bucket by all others, and sums it
    its end      all parts          the squares of each rank's parts are summed over ranks: the norm
    forward      bucket by bucket   each rank sends its sums to all others, what forward needs first goes first

With two ranks the sums have the bits of an all-reduce. As many bytes cross the link as in an all-reduce, half of them
behind the norm.

gloo has no reduce-scatter of its own: it would take as long as an all-reduce. So parts are exchanged there, and summed
here in the order of ranks, in memory as large as the gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lightning_gpufeed.sync.layers import SyncLayer
from lightning_gpufeed.sync.plan import SyncPlan
from lightning_gpufeed.sync.reducer import Reducer

__all__ = ["ScatteredReducer"]

# The newer names first: torch 2.13 warns of the others.
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_ROW = 4096
"""Numbers whose squares are summed in their own type, before sums go on in 64 bits."""
_MOST_BYTES = 1 << 20
_EPSILON = 1e-6
"""Of `torch.nn.utils.clip_grad_norm_`."""


class ScatteredReducer(Reducer):
    """A `Reducer` for scattered plans.

    `end` waits until all gradients are summed somewhere; `wait` until a layer's sums are here. On CUDA devices neither
    waits on the host.
    """

    def __init__(
        self,
        layers: Sequence[SyncLayer],
        plan: SyncPlan,
        group: Any,
        *,
        is_late: Collection[int] = (),
        sparse: Sequence[tuple[str, nn.Parameter]] = (),
        find_unused_parameters: bool = False,
        is_exchanged: bool | None = None,
    ) -> None:
        """Allocate the buckets, and where sums are made here what the other ranks send.

        Args:
            layers: As the plan numbers them, the same on all ranks; of 32-bit or 64-bit floating point.
            plan: A scattered one.
            group: Process group, used by nothing else.
            is_late: Layers that are not sent before backward has ended: their gradients may come in several parts.
            sparse: Names and parameters of which the gradient is sparse. The norm is not that of theirs.
            find_unused_parameters: Whether a parameter may have no gradient: then it keeps none if no rank has one.
            is_exchanged: Whether addends are exchanged and sums made here, rather than by the backend. None: with gloo.
        """
        self._gathers = plan.gathers
        rank, num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        self._is_exchanged = "gloo" in distributed.get_backend(group) if is_exchanged is None else is_exchanged
        self._parts: dict[int, _Part] = {}
        super().__init__(
            layers, plan.buckets, group, is_late=is_late, sparse=sparse, find_unused_parameters=find_unused_parameters
        )
        if self._is_exchanged:
            self.memory.slices = [[one for part in some for one in _cut(part)] for some in self.memory.slices]
        for part in (one for some in self.memory.slices for one in some):
            self._parts[part.data_ptr()] = _Part(part, rank, num_ranks, self._is_exchanged)
        rests = [part.rest for part in self._parts.values() if part.rest.numel()]
        self._is_first = rank == 0
        self._rests = _by_type(rests)

    def _reset(self) -> None:
        super()._reset()
        self._sent: list[_Part] = []
        self._num_summed = 0
        self._norm: tuple[Tensor, Any] | None = None

    def _send(self, part: Tensor) -> Any:
        """Give each rank its part."""
        one = self._parts[part.data_ptr()]
        if one.own.numel():
            if one.received is not None:
                one.work = self._collective(distributed.all_to_all_single, one.received, one.main)
            else:
                one.work = self._collective(_reduce_scatter, one.own, one.main)
        self._sent.append(one)
        # What has come meanwhile is summed now, while others are on their way.
        while self._is_exchanged and self._sent[self._num_summed].is_here and self._num_summed + 1 < len(self._sent):
            self._sum_next()
        return one

    def _sum_next(self) -> None:
        part = self._sent[self._num_summed]
        if part.work is not None:
            self._wait(part.work, "the sum of gradients")
            part.work = None
            part.add_up()
        self._num_summed += 1

    def end(self) -> list[str]:
        """Backward has ended: send the rest, wait for all sums, and send these once the norm is on its way.

        Returns:
            Names of parameters that require a gradient and have none, if they should. Then nothing more is sent.
        """
        missing = super().end()
        if missing:
            return missing
        with torch.no_grad():
            while self._num_summed < len(self._sent):
                self._sum_next()
            works = [(rests, flat, self._all_reduce(torch.cat(rests, out=flat))) for rests, flat in self._rests]
            for rests, flat, work in works:
                self._wait(work, "the sum of gradients")
                for rest, summed in zip(rests, torch.split(flat, [one.numel() for one in rests]), strict=True):
                    rest.copy_(summed)
            squares = self._squares()
            self._norm = squares, self._all_reduce(squares)
            if self._is_exchanged:  # or so small a message would come behind the others that go at the same time
                self._wait(self._norm[1], "the norm of all gradients")
            for number in self._gathers:
                self._works[number] = [self._gather(part) for part in self.memory.slices[number]]
                self._works[number] = [work for work in self._works[number] if work is not None]
        return missing

    def _gather(self, part: Tensor) -> Any:
        one = self._parts[part.data_ptr()]
        return self._collective(_all_gather, one.main, one.own) if one.own.numel() else None

    def _squares(self) -> Tensor:
        """The sum of the squares of all sums that this rank has and no other counts."""
        tensors = [part.own for part in self._parts.values() if part.own.numel()]
        if self._is_first:
            tensors += [part.rest for part in self._parts.values() if part.rest.numel()]
        if not tensors:
            return torch.zeros((), dtype=torch.float64, device=self._used.device)
        norms = [norm.double().view(1) for norm in torch._foreach_norm([tensor[_rows(tensor) :] for tensor in tensors])]
        # In one go torch sums so many numbers of 32 bits one after the other that a norm is 1e-4 off.
        for tensor in tensors:
            if end := _rows(tensor):
                norms.append(torch.linalg.vector_norm(tensor[:end].view(-1, _ROW), dim=1).double())
        return torch.cat(norms).square().sum()

    def coefficient(self, max_norm: float) -> Tensor:
        """What all gradients have to be multiplied by, so that their norm is at most `max_norm`.

        Args:
            max_norm: As of `torch.nn.utils.clip_grad_norm_`.

        Returns:
            A number on the device, 1 at most; the same on all ranks.

        Raises:
            SyncError: Another rank is gone.
        """
        assert self._norm is not None
        squares, work = self._norm
        self._wait(work, "the norm of all gradients")
        dtypes = {layer.memory[1] for layer in self.layers}
        norm = squares.sqrt().to(torch.float64 if dtypes == {torch.float64} else torch.float32)
        return torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


class _Part:
    """A slice of a bucket: as many elements for each rank, and a rest of fewer than there are ranks.

    Attributes:
        main: What is divided among ranks.
        own: This rank's share of it.
        rest: Behind it.
        received: Everybody's addends of `own`, where they are added up here.
        work: On its way.
    """

    def __init__(self, tensor: Tensor, rank: int, num_ranks: int, is_exchanged: bool) -> None:
        share = tensor.numel() // num_ranks
        self.main, self.rest = tensor[: share * num_ranks], tensor[share * num_ranks :]
        self.own = self.main[rank * share : (rank + 1) * share]
        self.received = torch.empty_like(self.main) if is_exchanged else None
        self.work: Any = None

    @property
    def is_here(self) -> bool:
        return self.work is None or bool(self.work.is_completed())

    def add_up(self) -> None:
        if self.received is None:
            return
        first, *others = self.received.view(-1, self.own.numel())
        if not others:
            self.own.copy_(first)
        for number, other in enumerate(others):
            torch.add(self.own if number else first, other, out=self.own)


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    """In parts that gloo sends at the speed of the link: of 24 MB that only go one way it makes half of it."""
    parts: Sequence[Tensor] = torch.split(tensor, _MOST_BYTES // tensor.element_size())
    return parts


def _rows(tensor: Tensor) -> int:
    """How many numbers are in whole rows."""
    return tensor.numel() // _ROW * _ROW


def _by_type(tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """Those of each type together, with room for all of them."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return [(some, torch.empty_like(torch.cat(some))) for some in found.values()]
