"""Copies of tensors on the host, made beside the work of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["HostCopies"]


class HostCopies:
    """Values of some tensors at one moment, in host memory that is used again for the next moment.

    ::

        compute stream   ... | forward pass ........... | wait | backward pass changes them
        copy stream            | device -> pinned host | --^

    On the CPU they are copied at once.
    """

    def __init__(self) -> None:
        """Nothing is copied yet."""
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._done: Any = None
        self._stream: Any = None

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to copy; what was copied before is lost.

        Args:
            tensors: On one device. They must not be changed before `before_change` was called.
        """
        if self._done is not None:
            self._done.synchronize()  # of the last time; long over
        self._tensors = list(tensors)
        earlier = self._copies
        self._copies = [
            earlier[i] if i < len(earlier) and _fits(earlier[i], tensor) else _host_memory(tensor)
            for i, tensor in enumerate(self._tensors)
        ]
        device = self._tensors[0].device if self._tensors else torch.device("cpu")
        if device.type == "cpu":
            self._done = None
            self._copy()
            return
        self._module, self._device = torch.get_device_module(device), device
        if self._stream is None:
            self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))
        with self._module.stream(self._stream):
            self._copy()
            self._done = self._stream.record_event()
        for tensor in self._tensors:
            if tensor.layout is torch.strided:
                tensor.record_stream(self._stream)

    def _copy(self) -> None:
        dense = [i for i, tensor in enumerate(self._tensors) if tensor.layout is torch.strided]
        if dense:
            torch._foreach_copy_([self._copies[i] for i in dense], [self._tensors[i] for i in dense], non_blocking=True)
        for i, tensor in enumerate(self._tensors):
            if tensor.layout is not torch.strided:
                self._copies[i] = tensor.detach().to("cpu", copy=True)

    def before_change(self) -> None:
        """Let the current stream wait until all is copied; the host does not wait."""
        if self._done is not None:
            self._module.current_stream(self._device).wait_event(self._done)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the tensors the values they had."""
        if self._done is not None:
            self._done.synchronize()
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)


def _fits(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or copy.layout is not torch.strided:
        return False
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype and copy.stride() == tensor.stride()


def _host_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return torch.empty(0, device="cpu")  # replaced by a copy
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
