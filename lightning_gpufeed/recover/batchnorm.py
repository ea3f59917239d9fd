"""Counts the running statistics of batch normalisation once per batch, although it is seen in microbatches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["StatisticsOnce"]


class _Seen(NamedTuple):
    """Statistics of one call: mean and unbiased variance per channel, and how many elements they are of."""

    mean: torch.Tensor
    variance: torch.Tensor
    num_elements: int


class StatisticsOnce:
    """Stands between the microbatches of a batch and the running statistics.

    Applied as they come, n microbatches would move the running statistics n times, with n times the momentum. Here each
    leaves its own mean and variance; at the end those of the whole batch are put together exactly (parts of a variance
    and the variance between the parts) and applied once, as the whole batch would have.

    What stays different: the outputs. A microbatch is normalised by its own statistics, so what deeper layers see is
    not what the whole batch would have shown them. No splitting can change that.
    """

    def __init__(self, module: nn.Module) -> None:
        """Begin.

        Args:
            module: Those of its normalisations that train and track statistics are taken.
        """
        self._norms = [
            norm
            for norm in module.modules()
            if isinstance(norm, _BatchNorm)
            and norm.training
            and norm.track_running_stats
            and norm.running_mean is not None
        ]
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float | None]] = []
        self._seen: list[list[list[_Seen]]] = [[] for _ in self._norms]
        self._handles: list[Any] = []
        for norm in self._norms:
            count = norm.num_batches_tracked
            mean, variance = norm.running_mean.clone(), norm.running_var.clone()  # type: ignore[union-attr]
            self._before.append((mean, variance, None if count is None else count.clone(), norm.momentum))
        for norm, microbatches in zip(self._norms, self._seen, strict=True):  # nothing fails from here on
            self._handles.append(norm.register_forward_hook(_note_in(microbatches)))
            norm.momentum = 1.0  # the running statistics are then those of the last call

    def begin_microbatch(self) -> None:
        """The next calls are of one more microbatch."""
        for microbatches in self._seen:
            microbatches.append([])

    def end(self) -> None:
        """Take everything back; the running statistics are what they were before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for norm, (mean, variance, count, momentum) in zip(self._norms, self._before, strict=True):
            norm.momentum = momentum
            norm.running_mean.copy_(mean)  # type: ignore[union-attr]
            norm.running_var.copy_(variance)  # type: ignore[union-attr]
            if count is not None:
                norm.num_batches_tracked.copy_(count)  # type: ignore[union-attr]

    @torch.no_grad()
    def apply(self) -> None:
        """Move the running statistics as the whole batch would have; after `end`."""
        for norm, microbatches in zip(self._norms, self._seen, strict=True):
            num_calls = max((len(calls) for calls in microbatches), default=0)
            for call in range(num_calls):
                # A call that not every microbatch has made (a branch that depends on the data): of those that have.
                self._apply_call(norm, [calls[call] for calls in microbatches if call < len(calls)])

    @staticmethod
    def _apply_call(norm: _BatchNorm, parts: list[_Seen]) -> None:
        total = sum(part.num_elements for part in parts)
        # At least in float32, and in shares: sums over all elements leave the range of half precision.
        wide = torch.promote_types(parts[0].mean.dtype, torch.float32)
        mean = sum(part.mean.to(wide) * (part.num_elements / total) for part in parts)
        freedom = max(1, total - 1)
        within = sum(part.variance.to(wide) * ((part.num_elements - 1) / freedom) for part in parts)
        between = sum((part.mean.to(wide) - mean).square() * (part.num_elements / freedom) for part in parts)
        variance = within + between
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        momentum = norm.momentum
        if momentum is None:  # a plain average over all batches
            momentum = 1 / int(norm.num_batches_tracked)  # type: ignore[arg-type]
        for running, of_batch in ((norm.running_mean, mean), (norm.running_var, variance)):
            running.copy_(running.to(wide) * (1 - momentum) + of_batch * momentum)  # type: ignore[union-attr]


def _note_in(microbatches: list[list[_Seen]]) -> Any:
    """A forward hook that notes the statistics of a call."""

    def note(norm: _BatchNorm, args: tuple[Any, ...], output: Any) -> None:
        if not norm.training:
            return
        given = args[0]
        num_elements = given.numel() // max(1, given.shape[1])
        microbatches[-1].append(_Seen(norm.running_mean.clone(), norm.running_var.clone(), num_elements))  # type: ignore[union-attr]

    return note
