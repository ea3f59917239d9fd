"""What each layer of a pipeline takes, measured by one rank before training.

::

    x ── forward ──► y     F, and the bytes that it keeps for backward
    x ◄── backward ─ 1     I, while weight gradients wait, and the bytes that these keep
         finish            W

What a message takes is measured in `link`; what is made of the numbers is in `choose`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpufeed.backprop.order import BackwardOrder
from lightning_gpufeed.backprop.split import WeightGradSplitter, splittable_layers
from lightning_gpufeed.device.marks import DeviceMarks
from lightning_gpufeed.device.samples import is_container, parts, rebuilt, walk
from lightning_gpufeed.device.transfer import device_of
from lightning_gpufeed.pipeline.link import Link
from lightning_gpufeed.pipeline.simulate import Send, StageCosts

__all__ = ["MeasuredLayers", "measure_layers", "unchanged"]

_NUMBERS = 6
"""Of a layer in `MeasuredLayers.as_lists`."""


@dataclass(frozen=True)
class MeasuredLayers:
    """What one microbatch takes in each layer.

    Attributes:
        costs: Of each layer, in the order of the model.
        sent_bytes: Of each layer's output, which is what the next one is given.
        stage_seconds: That a stage takes beside its layers, each time.

    Example:
        >>> measured = MeasuredLayers((StageCosts(), StageCosts()), sent_bytes=(8, 4))
        >>> MeasuredLayers.from_lists(measured.as_lists()) == measured
        True
        >>> measured.send_seconds(Link(1.0, 0.5))
        [Send(latency_seconds=1.0, link_seconds=4.0, host_seconds=0.0)]
    """

    costs: tuple[StageCosts, ...]
    sent_bytes: tuple[int, ...]
    stage_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: There are not as many sizes as costs, or one is negative.
        """
        if len(self.costs) != len(self.sent_bytes) or any(size < 0 for size in self.sent_bytes):
            raise ValueError(
                f"sent_bytes is {self.sent_bytes}; expected {len(self.costs)} sizes of at least 0, one for each layer."
            )

    def as_lists(self) -> list[list[float]]:
        """Plain numbers, for another rank.

        Returns:
            For each layer: seconds of forward, input gradient and weight gradient, bytes kept, deferred and sent.
        """
        pairs = zip(self.costs, self.sent_bytes, strict=True)
        return [[*astuple(cost)[: _NUMBERS - 1], size] for cost, size in pairs]

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[float]]) -> MeasuredLayers:
        """Read what `as_lists` gives.

        Args:
            lists: Six numbers for each layer. Bytes may have become floats on their way.

        Returns:
            What was measured.

        Raises:
            ValueError: A layer does not have six numbers, or they are no costs.
        """
        rows = [list(row) for row in lists]
        for place, row in enumerate(rows):
            if len(row) != _NUMBERS:
                raise ValueError(f"Layer {place} has {len(row)} numbers; expected {_NUMBERS}, as of as_lists.")
        costs = (StageCosts(row[0], row[1], row[2], int(row[3]), int(row[4])) for row in rows)
        return cls(tuple(costs), tuple(int(row[5]) for row in rows))

    def send_seconds(self, link: Link) -> list[Send]:
        """From each layer to the next, if they are on two ranks.

        Args:
            link: Between the ranks.

        Returns:
            One less than layers, as `search.best` takes them.
        """
        return [link.send(size) for size in self.sent_bytes[:-1]]


# Layers ----------------------------------------------------------------------------------------------------


class _Pass(NamedTuple):
    """One run of a layer: seconds of its three parts, bytes kept for backward and deferred, its output."""

    seconds: tuple[float, float, float]
    kept_bytes: int
    deferred_bytes: int
    output: Any


def measure_layers(layers: Sequence[nn.Module], microbatch: Any, *, num_repeats: int = 5) -> MeasuredLayers:
    """Run each layer a few times, forward and backward, and note what it takes.

    The layers have the mode that they have, and the forward runs under the autocast of the caller; the backward runs
    without one. On a CUDA device the time is that between events on the current stream.

    Nothing is left behind in gradients, buffers, modes and random generators (of torch, numpy and Python), after an
    error neither. What cannot be undone: hooks on modules and parameters run, and so does what a layer's forward does
    to plain attributes. So measure before hooks that send gradients are there, and before another splitter.

    A weight gradient that cannot wait counts as part of the input gradient. A tensor that two layers keep, as the one's
    output and the other's input, counts in both, as they may be on two ranks. Parameters and buffers do not count.

    Args:
        layers: In the order of the model, on one device.
        microbatch: The input of the first layer on that device, of any nested structure. It is not changed. Where
            none of its tensors requires a gradient, there is no input gradient of the first layer.
        num_repeats: Rounds through all layers after a first one that is not timed; each time is the least of them, as
            what else runs on the machine only makes them longer.

    Returns:
        What was measured. Every layer but the first is taken to need a gradient of its input if that is floating-point.

    Raises:
        ValueError: `num_repeats` is not positive.

    Example:
        >>> measured = measure_layers([nn.Linear(4, 8), nn.ReLU()], torch.ones(2, 4))
        >>> measured.sent_bytes, measured.costs[1].weight_grad_seconds
        ((64, 64), 0.0)
    """
    if num_repeats < 1:
        raise ValueError(f"num_repeats is {num_repeats}; expected a whole number, at least 1.")
    device = next((parameter.device for layer in layers for parameter in layer.parameters()), device_of(microbatch))
    runs: list[list[_Pass]] = [[] for _ in layers]
    sent_bytes = [0] * len(layers)
    with _same_randomness(device), torch.enable_grad():
        # Round after round: what disturbs the machine for a while does not disturb all runs of one layer.
        for number in range(1 + num_repeats):
            value = microbatch
            for place, layer in enumerate(layers):
                with unchanged(layer):
                    runs[place].append(_once(layer, value, device, is_first=number == 0))
                value = runs[place][-1].output
                runs[place][-1] = runs[place][-1]._replace(output=None)
                sent_bytes[place] = sum(one.numel() * one.element_size() for one in _tensors(value))
                value = _mapped(value, lambda one: one.detach().requires_grad_(_is_differentiable(one)))
    return MeasuredLayers(tuple(map(_least, runs)), tuple(sent_bytes))


def _least(runs: Sequence[_Pass]) -> StageCosts:
    """Of the runs but the first, which meets cold caches."""
    forward, input_grad, weight_grad = (min(run.seconds[place] for run in runs[1:]) for place in range(3))
    return StageCosts(forward, input_grad, weight_grad, runs[0].kept_bytes, runs[0].deferred_bytes)


def _once(layer: nn.Module, value: Any, device: torch.device, *, is_first: bool) -> _Pass:
    """A layer forward and backward."""
    if not is_first:  # all microbatches but one add to a gradient that is there
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    names, _ = splittable_layers(layer)
    with WeightGradSplitter(layer, BackwardOrder(last=names)) as splitter:
        return _run(layer, value, splitter, DeviceMarks(device), device, is_counted=is_first)


def _run(
    layer: nn.Module,
    value: Any,
    splitter: WeightGradSplitter,
    marks: DeviceMarks,
    device: torch.device,
    *,
    is_counted: bool = False,
) -> _Pass:
    """Forward, input gradient and weight gradient of a layer once."""
    # A copy that is no leaf: a layer may change its input in place.
    inputs = _mapped(value, lambda one: one.detach().requires_grad_(one.requires_grad).clone())
    kept: list[int] = []
    _wait(device)
    begin = marks.mark()
    if is_counted:
        with _counted(layer, kept):
            output = layer(inputs)
    else:
        output = layer(inputs)
    forward = marks.mark()
    roots = [one for one in _tensors(output) if one.requires_grad]
    result = _mapped(output, lambda one: one.detach())
    if not roots:
        _wait(device)
        return _Pass((marks.seconds(begin, forward), 0.0, 0.0), 0, 0, result)
    grads = [torch.ones_like(one) for one in roots]
    del inputs, output  # the graph alone says what is kept
    with torch.autocast(device.type, enabled=False):
        backward = marks.mark()
        torch.autograd.backward(roots, grads)
        input_grad = marks.mark()
        deferred_bytes, num_pending = splitter.pending_bytes, splitter.num_pending
        splitter.finish()
        weight_grad = marks.mark()
    _wait(device)
    seconds = (
        marks.seconds(begin, forward),
        marks.seconds(backward, input_grad),
        marks.seconds(input_grad, weight_grad) if num_pending else 0.0,
    )
    return _Pass(seconds, sum(kept), deferred_bytes, result)


class _Kept:
    """A tensor in the place where a graph keeps it; gone when the graph needs it no more."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def _counted(layer: nn.Module, sizes: list[int]) -> Iterator[None]:
    """Note the bytes of each stretch of memory that forward keeps, when it has ended."""
    kept: WeakSet[_Kept] = WeakSet()

    def pack(tensor: Tensor) -> _Kept:
        one = _Kept(tensor.detach())  # an output that knew its graph would be kept by it for ever
        kept.add(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        yield
    own = {_place(one) for one in (*layer.parameters(), *layer.buffers()) if _has_memory(one)}
    storages = {_place(one.tensor): one.tensor.untyped_storage().nbytes() for one in kept if _has_memory(one.tensor)}
    sizes += [size for place, size in storages.items() if place not in own]


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is one stretch of memory; a sparse tensor is several, and is not counted."""
    return tensor.layout == torch.strided


def _place(tensor: Tensor) -> tuple[torch.device, int]:
    """Of its memory."""
    return tensor.device, tensor.untyped_storage().data_ptr()


@contextmanager
def unchanged(layer: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and modes of a layer back at the end, in any case.

    Args:
        layer: Whose.

    Yields:
        Nothing.
    """
    grads = [(parameter, parameter.grad) for parameter in layer.parameters()]
    modes = [(module, module.training) for module in layer.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in layer.modules()
        for name, buffer in module._buffers.items()
    ]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for module, is_training in modes:
            module.training = is_training
        with torch.no_grad():
            for module, name, buffer, copy in buffers:
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
                module._buffers[name] = buffer


@contextmanager
def _same_randomness(device: torch.device) -> Iterator[None]:
    """Put the random generators of the process and of a device back at the end, in any case."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    is_host = device.type == "cpu"
    options: dict[str, Any] = {} if is_host else {"device_type": device.type}
    try:
        with torch.random.fork_rng([] if is_host else [device], **options):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(value: Any) -> list[Tensor]:
    """All tensors of a nested structure."""
    return [node for node in walk(value) if isinstance(node, Tensor)]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    return rebuilt(value, [_mapped(part, change) for _, part in parts(value)]) if is_container(value) else value


def _wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
