"""Copies of tensors on the host, made beside the work of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["HostCopies"]


class HostCopies:
    """Values of some tensors at one moment, in host memory.

    ::

        compute stream   ... | forward pass ........... | wait | backward pass changes them
        copy stream            | device -> pinned host | --^

    On the CPU they are copied at once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to copy.

        Args:
            tensors: On one device. They must not be changed before `before_change` was called.
        """
        self._tensors = list(tensors)
        self._done: Any = None
        device = self._tensors[0].device if self._tensors else torch.device("cpu")
        if device.type == "cpu":
            self._copies = [tensor.detach().clone() for tensor in self._tensors]
            return
        module = torch.get_device_module(device)
        stream = module.Stream(device)
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            self._copies = [self._to_host(tensor.detach()) for tensor in self._tensors]
            self._done = stream.record_event()
        for tensor in self._tensors:
            tensor.record_stream(stream)
        self._module, self._device = module, device

    @staticmethod
    def _to_host(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor.cpu()
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

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
