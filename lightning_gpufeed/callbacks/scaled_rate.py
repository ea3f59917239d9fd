"""Scales the learning rate of each optimizer step, unseen by training steps, schedules and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["ScaledRate"]


class ScaledRate:
    """Multiplies the learning rates of an optimizer while it steps.

    ::

        step begins | closure: training_step, backward | parameters change | step ends | schedule
        scaled      | as they are                      | scaled            | as they are

    A schedule computes from the rates it knows, whatever it is; a training step may read and set them; a checkpoint
    holds them unscaled.
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
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self._put_back()),
        ]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._scale()
        # The optimizer itself may be the first of the arguments.
        given = tuple(self._around(value) if callable(value) else value for value in args)
        named = {name: self._around(value) if name == "closure" and value else value for name, value in kwargs.items()}
        return given, named

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure with the rates as they are."""

        def run() -> Any:
            self._put_back()
            result = closure()
            self._scale()
            return result

        return run

    def _scale(self) -> None:
        # A step that raised has left its scaled rates.
        self._put_back()
        factor = self._factor()
        self._unscaled = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def _put_back(self) -> None:
        if self._unscaled is not None:
            for group, rate in zip(self._optimizer.param_groups, self._unscaled, strict=True):
                group["lr"] = rate
        self._unscaled = None

    def remove(self) -> None:
        """End, with the rates unscaled."""
        self._put_back()
        for handle in self._handles:
            handle.remove()
