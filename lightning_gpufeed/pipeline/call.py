"""One batch that goes through the pipeline, from its forward to the end of its backward."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpufeed.pipeline.executor import Pass
from lightning_gpufeed.pipeline.nested import flatten, split
from lightning_gpufeed.pipeline.randomness import Draws
from lightning_gpufeed.pipeline.schedule import Schedule

__all__ = ["Call", "OutputGrads", "of_microbatches"]

OutputGrads = Sequence[Tensor | None]
"""Of the tensors of an output that require one; None for what nothing depends on."""
_PLAIN = (int, float, bool, str, bytes, complex, type(None))


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
        given: With fused phases, for each microbatch the gradients of its output, on the rank of the last stage.
        aside: With fused phases, gradients that are not in `.grad` yet.
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
        device: torch.device,
    ) -> None:
        """Cut it.

        Args:
            value: The whole input.
            sizes: Samples of each microbatch.
            schedule: For so many microbatches.
            draws: Random numbers for this batch.
            has_backward: Whether gradients follow.
            state: What shapes depend on, beside the input: modes of the layers.
            device: Where the layers are run.
        """
        self.value, self.sizes, self.schedule = value, sizes, schedule
        self._draws, self._has_backward, self._state = draws, has_backward, state
        self.output: Any = None
        self.is_fused = self.is_done = False
        self.given: dict[int, OutputGrads] = {}
        self.aside: dict[nn.Parameter, Tensor] = {}
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._autocast = _autocast_of(device)
        self.batch = self._uncomputed()

    def _uncomputed(self) -> Pass:
        inputs = split(self.value, self.sizes)
        keys = [(*_form(one), self._has_backward, self._autocast, self._state) for one in inputs]
        return Pass(inputs, keys, self._draws, self._has_backward)

    def note_buffers(self, layers: Iterable[nn.Module]) -> None:
        """Remember buffers, for `forget`.

        Args:
            layers: Whose.
        """
        self._buffers = [
            (module, key, buffer, buffer.clone())
            for layer in layers
            for module in layer.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def forget(self) -> None:
        """Begin again, with the same random numbers and buffers."""
        for module, key, buffer, value in self._buffers:
            buffer.copy_(value)
            module._buffers[key] = buffer
        self._buffers = []
        self.batch = self._uncomputed()
        self.output, self.is_fused, self.given, self.aside = None, False, {}, {}

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Run layers in backward as they were in forward: with a graph, and in the same precision.

        Yields:
            Nothing.
        """
        kind, is_enabled, dtype, is_cached = self._autocast
        with torch.enable_grad(), torch.autocast(kind, dtype, is_enabled, is_cached):
            yield

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
            is_cut = leaf.ndim > 0 and leaf.shape[0] == sum(self.sizes)
            column = [part[place] for part in parts]
            found.append(torch.cat(column) if is_cut else torch.stack(column).sum(0))
        return found


def _autocast_of(device: torch.device) -> tuple[str, bool, torch.dtype, bool]:
    kind = device.type
    return (
        kind,
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def _form(value: Any) -> tuple[Hashable, ...]:
    """What shapes depend on in an input, the same on all ranks."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else _named(leaf)
        for leaf in flatten(value)[0]
    )


def _named(leaf: Any) -> Hashable:
    """What tells a leaf that is no tensor from another one."""
    kind = type(leaf).__qualname__
    if isinstance(leaf, _PLAIN):
        return kind, repr(leaf)
    try:
        return kind, hashlib.blake2b(pickle.dumps(leaf), digest_size=8).digest()
    except Exception:  # then it cannot be sent either
        return kind, None


def of_microbatches(grads: OutputGrads, sizes: Sequence[int]) -> Callable[[int], list[Tensor | None]]:
    """Cut gradients of the whole output.

    Args:
        grads: With samples in the first dimension.
        sizes: Samples of each microbatch.

    Returns:
        Gives those of one microbatch.
    """
    columns = [[None] * len(sizes) if grad is None else torch.split(grad, list(sizes)) for grad in grads]
    return lambda microbatch: [column[microbatch] for column in columns]
