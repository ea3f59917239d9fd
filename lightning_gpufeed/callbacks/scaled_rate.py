"""Scales the learning rate of each optimizer step, unseen by schedules and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["ScaledRate"]


class ScaledRate:
    """Multiplies the learning rates of an optimizer while it steps.

    They are put back right after the step, so a schedule computes from the rates it knows, whatever it is, and a
    checkpoint holds them unscaled.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[], float]) -> None:
        """Begin.

        Args:
            optimizer: The optimizer.
            factor: Asked before each step.
        """
        self._optimizer = optimizer
        self._factor = factor
        self._unscaled: list[Any] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._scale),
            optimizer.register_step_post_hook(self._put_back),
        ]

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        # A step that raised has left its scaled rates.
        self._put_back(optimizer)
        factor = self._factor()
        self._unscaled = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def _put_back(self, optimizer: Optimizer, *_: Any) -> None:
        if self._unscaled is not None:
            for group, rate in zip(optimizer.param_groups, self._unscaled, strict=True):
                group["lr"] = rate
        self._unscaled = None

    def remove(self) -> None:
        """End, with the rates unscaled."""
        self._put_back(self._optimizer)
        for handle in self._handles:
            handle.remove()
