"""Data-parallel training in which one rank may run out of memory without leaving the others waiting.

What torch's `DistributedDataParallel` does by itself in the middle of a step, gradients reduced during backward and
buffers sent at the begin of forward, would pair a collective of one rank's second attempt with one of another rank's
first. So all attempts run without it, and it is done here, by hand, in places that every rank passes once per batch.

Private names of torch in use (each is watched by tests/test_private_api.py):

=======================================  ===================================================================
`will_sync_module_buffers`               whether the next forward would send the buffers of rank 0
`_sync_buffers`                          sends them
`require_forward_param_sync`             set after a step that was reduced, cleared by one that was not
`parameters_to_ignore`                   names of parameters that are not reduced
`_get_sequence_number_for_group`         how many collectives a group has seen
=======================================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gpufeed.device.vote import HostVote
from lightning_gpufeed.errors import OOMRecoveryError

__all__ = ["RankGuard", "num_collectives", "obstacle_to_guard"]

BUCKET_BYTES = 25 * 2**20


def obstacle_to_guard(wrapper: DistributedDataParallel) -> str | None:
    """Why this data-parallel module cannot be guarded.

    Args:
        wrapper: It.

    Returns:
        None if it can.
    """
    if wrapper.static_graph:
        return "DDP with static_graph=True counts every backward pass; use static_graph=False"
    if any(isinstance(part, nn.SyncBatchNorm) for part in wrapper.modules()):
        return "SyncBatchNorm talks to the other ranks inside forward, where one of them may run out of memory"
    return None


def num_collectives() -> int:
    """How many collectives the group of all ranks has seen; its own are not counted by the vote's group.

    Returns:
        0 without several ranks.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return 0
    group: Any = distributed.group.WORLD
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0


class RankGuard:
    """Runs the attempts of a batch without collectives; then reduces the gradients as DDP would have.

    Also for one rank, whose reducer does not survive a backward pass that broke off either.
    """

    def __init__(self, wrapper: DistributedDataParallel, vote: HostVote) -> None:
        """Take the memory that reducing needs, so that it cannot fail for want of it later.

        Args:
            wrapper: The data-parallel module.
            vote: Of the same ranks.
        """
        self._wrapper: Any = wrapper
        self._vote = vote
        self._group: Any = wrapper.process_group
        self._num_ranks = distributed.get_world_size(self._group)
        self._buckets: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._small_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
        # Those that are frozen now may be trained later.
        for parameter in self._reduced(with_frozen=True) if self._num_ranks > 1 else ():
            if parameter.nbytes <= BUCKET_BYTES // 4:
                kind = (parameter.dtype, parameter.device)
                self._small_bytes[kind] = self._small_bytes.get(kind, 0) + parameter.nbytes
        for (dtype, device), num_bytes in self._small_bytes.items():
            num_elements = min(num_bytes, BUCKET_BYTES) // dtype.itemsize
            self._buckets[(dtype, device)] = torch.empty(num_elements, dtype=dtype, device=device)

    def _reduced(self, *, with_frozen: bool = False) -> Iterator[nn.Parameter]:
        """The parameters that are reduced, in one order on all ranks."""
        ignored = set(self._wrapper.parameters_to_ignore)
        for name, parameter in self._wrapper.module.named_parameters():
            if (parameter.requires_grad or with_frozen) and name not in ignored:
                yield parameter

    def begin(self) -> None:
        """Send the buffers of rank 0, if DDP would; every rank has to call this before its first attempt."""
        if self._wrapper.will_sync_module_buffers():
            self._wrapper._sync_buffers()
        self._wrapper.require_forward_param_sync = False

    def without_sync(self) -> AbstractContextManager[None]:
        """Nothing is reduced inside."""
        context: AbstractContextManager[None] = self._wrapper.no_sync()
        return context

    def undo(self) -> None:
        """An attempt has failed; the next one sends no buffers either."""
        self._wrapper.require_forward_param_sync = False

    @torch.no_grad()
    def reduce(self) -> None:
        """Make every gradient the mean over the ranks; every rank has to call this."""
        self._wrapper.require_forward_param_sync = True
        if self._num_ranks == 1:
            return
        parameters = list(self._reduced())
        self._fill_gaps(parameters)
        waiting: list[torch.Tensor] = []
        waiting_elements = 0
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            bucket = self._buckets.get((gradient.dtype, gradient.device))
            is_small = gradient.layout is torch.strided and gradient.nbytes <= BUCKET_BYTES // 4
            if bucket is None or not is_small or gradient.numel() > bucket.numel():
                parameter.grad = self._reduced_alone(gradient)
                continue
            is_other = bool(waiting) and (waiting[0].dtype, waiting[0].device) != (gradient.dtype, gradient.device)
            if waiting and (is_other or waiting_elements + gradient.numel() > bucket.numel()):
                self._reduce_together(waiting)
                waiting, waiting_elements = [], 0
            waiting.append(gradient)
            waiting_elements += gradient.numel()
        if waiting:
            self._reduce_together(waiting)

    def _fill_gaps(self, parameters: list[nn.Parameter]) -> None:
        """What only other ranks have a gradient of counts as zero here; what none has stays without."""
        has_none = [parameter.grad is None for parameter in parameters]
        [any_gap] = self._vote.maximum(int(any(has_none)))
        if not any_gap:
            return
        is_sparse = [parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters]
        somewhere = self._vote.maximum(*[int(not gap) for gap in has_none], *map(int, is_sparse), *map(int, has_none))
        number = len(parameters)
        sparse_somewhere, gap_somewhere = somewhere[number : 2 * number], somewhere[2 * number :]
        if any(sparse and gap for sparse, gap in zip(sparse_somewhere, gap_somewhere, strict=True)):
            raise OOMRecoveryError(
                "a sparse gradient exists on some ranks only, which cannot be reduced (DDP refuses it as well); use "
                "sparse=False, or use the embedding on every rank in every step."
            )
        for parameter, gap, is_somewhere in zip(parameters, has_none, somewhere[:number], strict=True):
            if gap and is_somewhere:
                parameter.grad = torch.zeros_like(parameter)

    def _reduced_alone(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is torch.strided and gradient.is_contiguous():
            gradient.mul_(1 / self._num_ranks)
            distributed.all_reduce(gradient, group=self._group)
            return gradient
        if gradient.is_sparse:
            gradient = (gradient * (1 / self._num_ranks)).coalesce()
            distributed.all_reduce(gradient, group=self._group)
            return gradient
        dense = gradient.contiguous().mul_(1 / self._num_ranks)
        distributed.all_reduce(dense, group=self._group)
        return gradient.copy_(dense)

    def _reduce_together(self, gradients: list[torch.Tensor]) -> None:
        bucket = self._buckets[(gradients[0].dtype, gradients[0].device)]
        flat = bucket[: sum(gradient.numel() for gradient in gradients)]
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        views = [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
        torch._foreach_copy_(views, gradients)
        flat.mul_(1 / self._num_ranks)
        distributed.all_reduce(flat, group=self._group)
        torch._foreach_copy_(gradients, views)
