"""Puts back what a failed attempt has changed: random generators and buffers of the module.

Gradients are in `gradients`, torchmetrics in `metrics`.
"""

from __future__ import annotations

import ctypes
import operator
import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_gpufeed.recover.attributes import can_be_copied_into, is_ordinary

__all__ = ["BufferStates", "GeneratorStates"]

MERSENNE_BYTES = 624 * 4 + 4
"""Words of a Mersenne twister, and which is next."""
LARGE_BYTES = 16 * 2**20
SMALL_BYTES = 2**20


class _NumpyState:
    """State of numpy's global generator, read only when it has moved: reading makes a Python number of each word."""

    words: bytes = b""
    generator: Any = None
    state: Any = None

    @classmethod
    def read(cls) -> Any:
        """What `numpy.random.set_state` takes."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            return np.random.get_state()
        words = ctypes.string_at(generator.ctypes.state_address, MERSENNE_BYTES)
        # A number of a normal distribution may be kept back (state[3]); making one moves the words first.
        if generator is not cls.generator or words != cls.words or cls.state[3]:
            cls.generator, cls.words, cls.state = generator, words, np.random.get_state()
        return cls.state


class GeneratorStates:
    """State of the process's random generators: `random`, numpy, torch on the host and on one device."""

    def __init__(self, device: torch.device) -> None:
        """Read them; microseconds, and nothing waits for the device.

        Args:
            device: The device of the training.
        """
        self._device = None if device.type == "cpu" else device
        self._states = self._read()

    def _read(self) -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
        on_device = None
        if self._device is not None:
            on_device = torch.get_device_module(self._device).get_rng_state(self._device)
        return random.getstate(), _NumpyState.read(), torch.get_rng_state(), on_device

    def put_back(self) -> None:
        """Set them to what was read."""
        python, of_numpy, of_torch, on_device = self._states
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(on_device, self._device)

    def has_moved(self) -> bool:
        """Whether anything has drawn from one of them since."""
        python, of_numpy, of_torch, on_device = self._read()
        then = self._states
        is_same_numpy = all(np.array_equal(a, b) for a, b in zip(of_numpy, then[1], strict=True))
        is_same = python == then[0] and is_same_numpy and torch.equal(of_torch, then[2])
        return not is_same or (on_device is not None and not torch.equal(on_device, then[3]))  # type: ignore[arg-type]


class BufferStates:
    """Values of the buffers of a module before each batch.

    Copying all buffers in every step would be dear where some are large and never change: masks, tables. So those up to
    1 MiB, and those that were seen to change, are copied on the device by one call; of the others one copy on the host
    is kept, which is right as long as torch's count of in-place changes stands still. (Not counted are
    changes through `.data` and those by kernels of batch normalisation.)

    In inference mode torch does not count; there all buffers but those over 16 MiB are copied.
    """

    def __init__(self, module: nn.Module) -> None:
        """Find the buffers.

        Args:
            module: Its submodules too.
        """
        self._places: list[tuple[dict[str, Any], str]] = []
        self._names: list[str] = []
        self._is_moving: list[bool] = []
        for path, owner in module.named_modules():
            for name in owner._buffers:
                self._places.append((owner._buffers, name))
                self._names.append(f"{path}.{name}" if path else name)
                buffer = owner._buffers[name]
                is_small = buffer is not None and can_be_copied_into(buffer) and _bytes_of(buffer) <= SMALL_BYTES
                self._is_moving.append(is_small or isinstance(owner, _NormBase))
        number = len(self._places)
        self._tensors: list[torch.Tensor | None] = [None] * number
        self._versions: list[int] = [-1] * number
        self._copies: list[torch.Tensor | None] = [None] * number
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._resting: list[int] = []
        self._was_inference: bool | None = None

    @torch.no_grad()
    def save(self) -> None:
        """Note the values as they are now."""
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        is_inference = torch.is_inference_mode_enabled()
        if self._is_same_as_before(is_inference):
            if self._sources:
                torch._foreach_copy_(self._targets, self._sources)
            return
        for i, (owner, name) in enumerate(self._places):
            tensor = owner.get(name)
            if tensor is None or not is_ordinary(tensor) or (tensor.is_inference() and not is_inference):
                self._tensors[i] = tensor  # nothing, or what cannot be changed in place here
                self._copies[i] = None
                continue
            version = -1 if tensor.is_inference() else tensor._version
            if is_inference:
                if _bytes_of(tensor) > LARGE_BYTES or not can_be_copied_into(tensor):
                    self._tensors[i], self._versions[i], self._copies[i] = tensor, version, None
                    continue
            elif not self._is_moving[i]:
                is_known = self._tensors[i] is tensor and self._copies[i] is not None
                if is_known and self._versions[i] == version:
                    continue
                if not is_known:
                    self._tensors[i], self._versions[i] = tensor, version
                    self._copies[i] = _on_host(tensor)
                    continue
                if not can_be_copied_into(tensor):
                    self._versions[i], self._copies[i] = version, _on_host(tensor)
                    continue
                self._is_moving[i], self._copies[i] = True, None
            copy = self._copies[i]
            is_same_kind = copy is not None and copy.device == tensor.device and copy.dtype == tensor.dtype
            is_same_kind = is_same_kind and copy is not None and copy.is_inference() == is_inference
            if copy is None or not is_same_kind or copy.shape != tensor.shape:
                self._copies[i] = copy = _memory_like(tensor)
            if copy is None:
                self._tensors[i], self._versions[i] = tensor, version
                continue
            self._tensors[i], self._versions[i] = tensor, version
            sources.append(tensor)
            targets.append(copy)
        if sources:
            torch._foreach_copy_(targets, sources)
        self._sources, self._targets, self._was_inference = sources, targets, is_inference
        moving = {id(tensor) for tensor in sources}
        self._resting = [i for i, tensor in enumerate(self._tensors) if tensor is not None and id(tensor) not in moving]

    def _is_same_as_before(self, is_inference: bool) -> bool:
        """Whether the same tensors are to be copied as at the last `save`, and no others have moved."""
        if is_inference or self._was_inference is not False:
            return False
        found = [owner.get(name) for owner, name in self._places]
        pairs = zip(self._sources, self._targets, strict=True)
        if any(source.shape != target.shape or source.dtype != target.dtype for source, target in pairs):
            return False  # its memory was replaced
        return all(map(operator.is_, found, self._tensors)) and not any(
            self._has_moved(self._tensors[i], i) for i in self._resting
        )

    def _has_moved(self, tensor: torch.Tensor | None, i: int) -> bool:
        return (
            tensor is None or not is_ordinary(tensor) or tensor.is_inference() or tensor._version != self._versions[i]
        )

    @torch.no_grad()
    def put_back(self, *, keeps_new: bool = False) -> None:
        """Give the buffers the values of the last `save`, in the same tensors.

        Args:
            keeps_new: Leave those alone that were None.
        """
        for i, (owner, name) in enumerate(self._places):
            tensor, copy = self._tensors[i], self._copies[i]
            if tensor is not None or not keeps_new:
                owner[name] = tensor
            if tensor is None or copy is None:
                continue
            is_uncounted = self._is_moving[i] or tensor.is_inference() or torch.is_inference_mode_enabled()
            if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
                tensor.data = copy.to(tensor.device, copy=True)
            elif is_uncounted or tensor._version != self._versions[i]:
                tensor.copy_(copy)
                if not tensor.is_inference():
                    self._versions[i] = tensor._version

    @torch.no_grad()
    def put_back_named(self, names: Collection[str]) -> None:
        """Give some buffers the values of the last `save`.

        Args:
            names: Theirs.
        """
        for i, name in enumerate(self._names if names else ()):
            tensor, copy = self._tensors[i], self._copies[i]
            if name in names and tensor is not None and copy is not None and tensor.shape == copy.shape:
                self._places[i][0][self._places[i][1]] = tensor
                tensor.copy_(copy)

    def values(self, names: Collection[str]) -> list[torch.Tensor]:
        """Copies of some buffers as they are now.

        Args:
            names: Theirs.

        Returns:
            In the order of the module.
        """
        chosen = [place for place, name in zip(self._places, self._names, strict=True) if name in names]
        return [owner[name].detach().clone() for owner, name in chosen]

    def changed_names(self) -> list[str]:
        """Which buffers differ from the last `save`, but for the statistics of batch normalisation.

        Returns:
            Their names in the module.
        """
        changed: list[str] = []
        for i, (owner, name) in enumerate(self._places):
            tensor: torch.Tensor | None = owner.get(name)
            copy = self._copies[i]
            if tensor is None or copy is None or {"running_mean", "running_var"} <= set(owner):
                continue
            if tensor is not self._tensors[i] or not torch.equal(tensor.detach().to(copy.device), copy):
                changed.append(self._names[i])
        return changed


def _bytes_of(tensor: torch.Tensor) -> int:
    """Also of tensors that have no one place in memory."""
    return tensor.numel() * tensor.element_size()


def _memory_like(tensor: torch.Tensor) -> torch.Tensor | None:
    """None where there is no more memory: a training that runs must not end for want of a copy."""
    try:
        return torch.empty_like(tensor)
    except (RuntimeError, MemoryError):
        return None


def _on_host(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.detach().to("cpu", copy=True)
    except (RuntimeError, MemoryError):
        return None
