"""Keeps the gradients of earlier batches of an accumulation window while one more batch is added to them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_gpufeed.device.host_copy import HostCopies

__all__ = ["GradientStates"]


class GradientStates:
    """What the gradients are before a batch adds to them.

    The first batch of a window finds none, and nothing is copied. For the others the sum so far is copied to the host,
    on a stream of its own while the forward pass runs: a backward pass that breaks off has added to some of them, and
    nothing on the device could tell what.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], copies: HostCopies | None = None) -> None:
        """Note them.

        Args:
            parameters: All that may have a gradient.
            copies: Host memory of an earlier batch, to be used again.
        """
        self._parameters = parameters
        self._gradients = [parameter.grad for parameter in parameters]
        present = [gradient for gradient in self._gradients if gradient is not None]
        self._copies: HostCopies | None = None
        if present:
            self._copies = copies or HostCopies()
            self._copies.take(present)

    def before_change(self) -> None:
        """To be called before anything is added: the device finishes copying first."""
        if self._copies is not None:
            self._copies.before_change()

    def put_back(self) -> None:
        """Make the gradients what they were, in the same tensors; those that were None are let go of."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        if self._copies is not None:
            self._copies.put_back()
