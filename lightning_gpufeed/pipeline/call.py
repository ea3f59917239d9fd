"""One batch that goes through the pipeline, from its forward to the end of its backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpufeed.pipeline.executor import Pass
from lightning_gpufeed.pipeline.nested import flatten, split
from lightning_gpufeed.pipeline.randomness import Draws
from lightning_gpufeed.pipeline.schedule import Schedule

__all__ = ["Call", "of_microbatches"]


class Call:
    """A batch, cut into microbatches.

    Attributes:
        value: The whole input.
        sizes: Samples of each microbatch.
        schedule: For so many microbatches.
        batch: What is known of it so far.
        output: Of the whole batch, once it is there.
        is_fused: Whether gradients were computed in forward already.
        is_done: Whether its backward has begun.
        buffers: Of this rank's layers, with their values before, while it is not certain that they are right.
    """

    def __init__(
        self,
        value: Any,
        sizes: tuple[int, ...],
        schedule: Schedule,
        draws: Draws,
        *,
        has_backward: bool,
        state: Hashable,
    ) -> None:
        """Cut it.

        Args:
            value: The whole input.
            sizes: Samples of each microbatch.
            schedule: For so many microbatches.
            draws: Random numbers for this batch.
            has_backward: Whether gradients follow.
            state: What shapes depend on, beside the input: modes of the layers, autocast.
        """
        self.value, self.sizes, self.schedule = value, sizes, schedule
        self._draws, self._has_backward, self._state = draws, has_backward, state
        self.output: Any = None
        self.is_fused = self.is_done = False
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self.batch = self._uncomputed()

    def _uncomputed(self) -> Pass:
        inputs = split(self.value, self.sizes)
        keys = [(*_form(one), self._has_backward, self._state) for one in inputs]
        return Pass(inputs, keys, self._draws, self._has_backward)

    def forget(self) -> None:
        """Begin again, with the same random numbers."""
        self.batch = self._uncomputed()
        self.output, self.is_fused = None, False

    @property
    def inputs_with_grad(self) -> list[Tensor]:
        """Tensors of the input that get a gradient."""
        return [leaf for leaf in flatten(self.value)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]

    def input_grads(self) -> list[Tensor]:
        """Of the whole input, on the rank of the first stage.

        Returns:
            One for each of `inputs_with_grad`.
        """
        found = []
        parts = [self.batch.input_grads[index] for index in range(len(self.sizes))]
        for place, leaf in enumerate(self.inputs_with_grad):
            column = [part[place] for part in parts]
            is_cut = leaf.ndim > 0 and leaf.shape[0] == sum(self.sizes)
            found.append(torch.cat(column) if is_cut else torch.stack(column).sum(0))
        return found


def _form(value: Any) -> tuple[Hashable, ...]:
    """What shapes depend on in an input."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)[:80]
        for leaf in flatten(value)[0]
    )


def of_microbatches(grads: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[int], list[Tensor]]:
    """Cut gradients of the whole output.

    Args:
        grads: With samples in the first dimension.
        sizes: Samples of each microbatch.

    Returns:
        Gives those of one microbatch.
    """
    columns = [torch.split(grad, list(sizes)) for grad in grads]
    return lambda microbatch: [column[microbatch] for column in columns]
