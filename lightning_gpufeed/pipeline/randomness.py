"""Random numbers in the layers of a pipeline: the same for any number of ranks, and of no effect outside of it.

Each layer draws, for each microbatch, from a generator that starts at a number made from the seed of the process, the
step, the layer and the microbatch. So a layer drops out the same wherever it is, and what a rank draws outside of the
pipeline does not depend on which layers it has.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from lightning_gpufeed.pipeline.peers import lost_peer

__all__ = ["Draws", "may_draw", "put_back", "share_generators"]

_NEVER_DRAW = (
    nn.Linear,
    nn.Bilinear,
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Embedding,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.ReLU,
    nn.ReLU6,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.Softmax,
    nn.LogSoftmax,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
)


def may_draw(layer: nn.Module) -> bool:
    """Whether a layer's forward may draw random numbers.

    Args:
        layer: Any.

    Returns:
        False for layers of torch that never do, and `nn.Sequential` of them; True for all others.
    """
    if layer._forward_hooks or layer._forward_pre_hooks:  # which may
        return True
    if type(layer) is nn.Sequential:
        return any(map(may_draw, layer))
    return type(layer) not in _NEVER_DRAW


class Draws:
    """Where the generators start, for one forward through the pipeline."""

    def __init__(self, replica: int, step: int, device: torch.device | None = None) -> None:
        """Fix the numbers.

        Args:
            replica: Which of the pipelines: each drops out something else.
            step: A count of forwards, the same on all ranks.
            device: Whose generator is set, beside the host's.
        """
        self._device = None if device is None or device.type == "cpu" else device
        self._text = f"{torch.initial_seed()}/{replica}/{step}"

    def begin(self, layer_index: int, microbatch: int) -> None:
        """Set the generators of torch, on the host and on the device.

        Args:
            layer_index: In the whole model.
            microbatch: In the batch.
        """
        digest = hashlib.blake2b(f"{self._text}/{layer_index}/{microbatch}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: it takes a millisecond without a device
        if self._device is not None:
            with torch.get_device_module(self._device).device(self._device):
                torch.get_device_module(self._device).manual_seed(seed)


@contextmanager
def put_back(device: torch.device) -> Iterator[None]:
    """Leave the generators of torch, numpy and Python as they were.

    Args:
        device: Whose generator, beside the host's.

    Yields:
        Nothing.
    """
    devices = [] if device.type == "cpu" else [device]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def share_generators(group: Any, root: int, device: torch.device) -> None:
    """Have all ranks draw the same from now on: what they draw outside of the layers goes into the same loss.

    Args:
        group: Of the ranks, on the host.
        root: Global rank whose generators count: those of Python, numpy and torch.
        device: Whose generator, beside the host's.
    """
    states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None:
        states.append(module.get_rng_state(device))
    box = [states]
    with lost_peer("agreeing on random numbers"):
        distributed.broadcast_object_list(box, root, group)
    random.setstate(box[0][0])
    np.random.set_state(box[0][1])
    torch.set_rng_state(box[0][2])
    if module is not None:
        module.set_rng_state(box[0][3], device)
