"""What a stage takes beside its layers each time: cutting a model finer is not free."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpufeed.pipeline.measure import MeasuredLayers, unchanged
from lightning_gpufeed.pipeline.nested import flatten, unflatten
from lightning_gpufeed.pipeline.randomness import Draws, put_back
from lightning_gpufeed.pipeline.stage import Stage

__all__ = ["stage_overhead_seconds"]

_MOST_LAYERS = 4
_REPEATS = 5


def stage_overhead_seconds(layers: Sequence[nn.Module], microbatch: Any, measured: MeasuredLayers) -> float:
    """Run some layers as stages of their own, and see how much longer than the layer alone that takes.

    Nothing is left behind, as by `measure_layers`. On a CUDA device the host queues work ahead, and what it takes is
    not seen by the device: it counts as nothing.

    Args:
        layers: In the order of the model, on one device.
        microbatch: The input of the first one.
        measured: Of these layers.

    Returns:
        Seconds for each of forward, input gradient and weight gradient.
    """
    device = next((one.device for layer in layers for one in layer.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        return 0.0
    found: list[float] = []
    value = microbatch
    with put_back(device), torch.enable_grad():
        for layer, cost in zip(layers[:_MOST_LAYERS], measured.costs, strict=False):
            with unchanged(layer):
                seconds, value = _of_stage(layer, value, device)
            found.append(max(0.0, seconds - cost.compute_seconds) / 3)
    return median(found)


def _of_stage(layer: nn.Module, value: Any, device: torch.device) -> tuple[float, Any]:
    """The least time of a stage's three passes, and its output."""
    stage = Stage(1, [layer], 0, is_split=True, device=device)
    draws = Draws(0, 0, device)
    times: list[float] = []
    output: Any = None
    try:
        for _ in range(_REPEATS):
            leaves, structure = flatten(value)
            own = [_copied(one) if isinstance(one, Tensor) else one for one in leaves]
            begin = time.perf_counter()
            output, held = stage.forward(unflatten(own, structure), 0, draws, has_backward=True)
            seconds = time.perf_counter() - begin
            assert held is not None
            grads = [torch.ones_like(one) for one in held.outputs]
            begin = time.perf_counter()
            stage.input_grad(held, grads)
            stage.weight_grad(held)
            times.append(seconds + time.perf_counter() - begin)
    finally:
        stage.close()
    return min(times), output


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
