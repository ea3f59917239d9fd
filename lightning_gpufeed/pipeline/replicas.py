"""Gradients of stages that several pipelines have: their mean, each stage's on its way while others are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lightning_gpufeed.pipeline.peers import lost_peer

__all__ = ["GradientMean", "sum_gradients"]


class GradientMean:
    """Begun for each stage as soon as its gradients are complete; all are waited for at the end of backward.

    A parameter without a gradient on one rank but with one on another counts as zeros there; without one on any, it
    stays without.
    """

    def __init__(self, group: Any) -> None:
        """Nothing is on its way.

        Args:
            group: Of the ranks over which to take means.
        """
        self._group, self._size = group, distributed.get_world_size(group)
        self._finish: list[Callable[[], None]] = []
        self._works: list[Any] = []

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Send gradients. All ranks of the group have to do so with the same parameters, in the same order.

        Args:
            parameters: Those that require no gradient are left out.
        """
        if self._size > 1:
            begun = [_begin_sum(some, self._group, self._size) for some in _by_kind(parameters)]
            self._works = [*self.pending, *(work for work, _ in begun)]
            self._finish += [finish for _, finish in begun]

    @property
    def pending(self) -> list[Any]:
        """What has been sent, and has not ended here."""
        return [work for work in self._works if not work.is_completed()]

    def wait(self) -> None:
        """Until all means are in `.grad`.

        Raises:
            SyncError: Another rank is gone.
        """
        finish, self._finish = self._finish, []
        for one in finish:
            one()


def sum_gradients(parameters: Iterable[nn.Parameter], group: Any) -> None:
    """Sum gradients over ranks, and wait: of weights that layers on several ranks share.

    Args:
        parameters: The same on all ranks of the group.
        group: Of those that have them.

    Raises:
        SyncError: Another rank is gone.
    """
    for some in _by_kind(parameters):
        _, finish = _begin_sum(some, group, 1)
        finish()


def _by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            found.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(found.values())


def _begin_sum(parameters: Sequence[nn.Parameter], group: Any, divisor: int) -> tuple[Any, Callable[[], None]]:
    """One message, and what waits for it: all gradients, and for each parameter whether there is one."""
    grads = [None if one.grad is None else one.grad.detach().to_dense() for one in parameters]
    first = parameters[0]
    flags = torch.tensor([float(grad is not None) for grad in grads], dtype=first.dtype, device=first.device)
    flat = torch.cat([*(_flat(one, grad) for one, grad in zip(parameters, grads, strict=True)), flags])
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    with lost_peer("reducing gradients"):
        work = distributed.all_reduce(real, group=group, async_op=True)
    assert work is not None

    def finish() -> None:
        with lost_peer("reducing gradients"):
            work.wait()
        *sums, used = torch.split(flat, [*(one.numel() for one in parameters), len(parameters)])
        is_used = (used.real if used.is_complex() else used) > 0
        for parameter, total, is_there in zip(parameters, sums, is_used.tolist(), strict=True):
            if is_there:
                mean = (total / divisor if divisor > 1 else total).view(parameter.shape)
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = mean.clone()
                else:
                    parameter.grad.copy_(mean)

    return work, finish


def _flat(parameter: nn.Parameter, grad: Tensor | None) -> Tensor:
    return parameter.new_zeros(parameter.numel()) if grad is None else grad.reshape(-1)
