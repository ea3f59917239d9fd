"""One stage on one rank: forward, input gradient and weight gradient of one microbatch at a time. Sends nothing.

::

    forward        input ──► layers ──► output          the graph is kept; it begins at the input
    input_grad     input.grad ◄── layers ◄── gradient   the graph is gone; weight gradients wait
    weight_grad    .grad of the parameters              what waited for this microbatch, in the order it came

Why not `torch.distributed.pipelining`'s split backward: it runs the whole backward of a custom autograd function twice,
recomputes a checkpointed block once for each group of parameters, and fires no hook on a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_gpufeed.backprop.order import BackwardOrder
from lightning_gpufeed.backprop.split import WeightGradSplitter, splittable_layers
from lightning_gpufeed.backprop.tasks import TaskKey
from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.nested import flatten, unflatten
from lightning_gpufeed.pipeline.randomness import Draws, may_draw, put_back

__all__ = ["Held", "Stage", "as_output"]


@dataclass(eq=False)
class Held:
    """What backward needs of one microbatch.

    Attributes:
        inputs: Tensors that begin the graph.
        outputs: Tensors that end it.
        waiting: Keys of the weight gradients that wait.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    waiting: tuple[TaskKey, ...] = ()


class Stage:
    """Consecutive layers of a model."""

    def __init__(
        self,
        index: int,
        layers: Sequence[nn.Module],
        first_layer: int,
        *,
        is_split: bool,
        is_checkpointed: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Take the layers.

        Args:
            index: Of the stage in the pipeline.
            layers: One after the other.
            first_layer: Place of the first one in the model.
            is_split: Whether weight gradients are computed apart from input gradients.
            is_checkpointed: Whether the forward is run a second time in backward, rather than kept.
            device: Where the layers are run; None for the CPU.
        """
        self._device = device or torch.device("cpu")
        self.index = index
        self.layers = tuple(layers)
        self._first_layer, self._is_checkpointed = first_layer, is_checkpointed
        self._draws = [may_draw(layer) for layer in layers]
        self._splitter: WeightGradSplitter | None = None
        if is_split:
            model = nn.ModuleList(layers)
            self._splitter = WeightGradSplitter(model, BackwardOrder(last=splittable_layers(model)[0]))
            self._splitter.is_open = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all layers, each once."""
        return list(nn.ModuleList(self.layers).parameters())

    @property
    def pending_bytes(self) -> int:
        """What weight gradients that wait keep alive."""
        return 0 if self._splitter is None else self._splitter.pending_bytes

    def forward(self, value: Any, microbatch: int, draws: Draws, *, has_backward: bool) -> tuple[Any, Held | None]:
        """Run the layers.

        Args:
            value: The input, any nest. Its tensors are not changed; those that require a gradient get one.
            microbatch: Which.
            draws: Of this forward.
            has_backward: Whether an input gradient follows.

        Returns:
            The output, cut off from its graph, and what backward needs; None if there is none.
        """
        leaves, structure = flatten(value)
        if not has_backward:
            return self._run(unflatten(leaves, structure), microbatch, draws), None
        leaves = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        entries = [as_output(leaf) if _wants_grad(leaf) else leaf for leaf in leaves]
        if self._splitter is not None:
            self._splitter.is_open = True
        try:
            output = self._run(unflatten(entries, structure), microbatch, draws)
        finally:
            if self._splitter is not None:
                self._splitter.is_open = False
        given, structure = flatten(output)
        held = Held([leaf for leaf in leaves if _wants_grad(leaf)], [leaf for leaf in given if _wants_grad(leaf)])
        detached = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in given
        ]
        return unflatten(detached, structure), held

    def _run(self, value: Any, microbatch: int, draws: Draws) -> Any:
        def run() -> Any:
            if self._is_checkpointed and torch.is_grad_enabled():
                return checkpoint(
                    lambda given: self._through(given, microbatch, draws),
                    value,
                    use_reentrant=False,
                    preserve_rng_state=False,  # each layer sets the generators itself
                    context_fn=self._again,
                )
            return self._through(value, microbatch, draws)

        return self._unchanged(value, run) if self.index == 0 else run()

    def _unchanged(self, value: Any, run: Callable[[], Any]) -> Any:
        """The batch is on all ranks, and is to stay the same on all of them."""
        leaves = [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor) and not leaf.is_inference()]
        before = [leaf._version for leaf in leaves]
        output = run()
        if before != [leaf._version for leaf in leaves]:
            raise ScheduleError(
                f"The first layer of the pipeline ({type(self.layers[0]).__name__}) changes its input in place, which "
                "other ranks have too and would still see as it was; expected it to leave the batch alone. Use "
                "inplace=False there."
            )
        return output

    def _through(self, value: Any, microbatch: int, draws: Draws) -> Any:
        for place, (layer, has_draws) in enumerate(zip(self.layers, self._draws, strict=True)):
            if has_draws:
                draws.begin(self._first_layer + place, microbatch)
            value = layer(value)
        return value

    def _again(self) -> tuple[Any, Any]:
        """Contexts of the first and of the second forward of a microbatch: the second leaves no trace."""
        return nullcontext(), self._untouched()

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        buffers = [
            (module, key, buffer, buffer.clone())
            for layer in self.layers
            for module in layer.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and isinstance(module, _NormBase)
        ]
        try:
            with put_back(self._device):
                yield
        finally:
            with torch.no_grad():
                for module, key, buffer, value in buffers:
                    buffer.copy_(value)
                    module._buffers[key] = buffer

    def input_grad(self, held: Held, grads: Sequence[Tensor | None]) -> list[tuple[Tensor | None, Tensor]]:
        """Run backward; weight gradients that can wait do.

        Args:
            held: Of the microbatch. Its graph is gone afterwards.
            grads: For each output that requires one; None for what the loss does not depend on.

        Returns:
            For each input that requires one its gradient and itself; None for what the loss does not depend on.
        """
        splitter = self._splitter
        num_before = 0 if splitter is None else splitter.num_pending
        used = [(output, grad) for output, grad in zip(held.outputs, grads, strict=True) if grad is not None]
        if used:
            with self._open_for_recomputation(), torch.autocast(used[0][0].device.type, enabled=False):
                torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])
        if splitter is not None:
            held.waiting = splitter.waiting()[num_before:]
        found = [(tensor.grad, tensor.detach()) for tensor in held.inputs]
        held.inputs, held.outputs = [], []
        return found

    def _open_for_recomputation(self) -> Any:
        """A layer whose forward is run again in backward is to be split as the first time."""
        return nullcontext() if self._splitter is None else _Open(self._splitter)

    def weight_grad(self, held: Held) -> None:
        """Compute what waited.

        Args:
            held: Of the microbatch.
        """
        if self._splitter is not None:
            self._splitter.run_only(held.waiting)
        held.waiting = ()

    def discard(self) -> None:
        """Forget what waits."""
        if self._splitter is not None:
            self._splitter.discard()

    def close(self) -> None:
        """Give the layers their own forward back."""
        if self._splitter is not None:
            self._splitter.close()


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def as_output(leaf: Tensor) -> Tensor:
    """A leaf as if it were the output of a layer, which may be changed in place.

    Args:
        leaf: That gets the gradient.

    Returns:
        A tensor in the same memory.
    """
    entry: Tensor = _Entry.apply(leaf)  # type: ignore[no-untyped-call]
    return entry


class _Entry(torch.autograd.Function):
    """The input of a stage as the output of a layer: a layer may change it in place, which a leaf does not allow."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Open:
    def __init__(self, splitter: WeightGradSplitter) -> None:
        self._splitter = splitter

    def __enter__(self) -> None:
        self._splitter.is_open = True

    def __exit__(self, *_: object) -> None:
        self._splitter.is_open = False
