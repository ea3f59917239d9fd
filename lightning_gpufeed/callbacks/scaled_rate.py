"""Scales the learning rate of each optimizer step, unseen by training steps, schedules and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

__all__ = ["ScaledRate"]


class ScaledRate:
    """Multiplies the learning rates of an optimizer while it steps.

    They are put back right after the step, so a schedule computes from the rates it knows, whatever it is, and a
    checkpoint holds them unscaled. Where the optimizer itself runs the training step, as a closure, rates are scaled
    after it: `training_step` may read and set them.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[], float]) -> None:
        """Begin.

        Args:
            optimizer: The optimizer.
            factor: Asked before each step.
        """
        self.optimizer = optimizer
        self._factor = factor
        self._unscaled: list[Any] | None = None
        self._runs_closure = False
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # The first argument is the optimizer itself, on some releases of torch.
        given = [value for value in (*args, kwargs.get("closure")) if callable(value)]
        self._runs_closure = bool(given)
        if not self._runs_closure:
            self._scale()

    def after_closure(self) -> None:
        """The closure was run, if there is one, and the optimizer is about to change the parameters."""
        if self._runs_closure:
            self._scale()

    def _scale(self) -> None:
        # A step that raised has left its scaled rates.
        self._put_back()
        factor = self._factor()
        self._unscaled = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def _after_step(self, *_: Any) -> None:
        self._runs_closure = False
        self._put_back()

    def _put_back(self) -> None:
        if self._unscaled is not None:
            for group, rate in zip(self.optimizer.param_groups, self._unscaled, strict=True):
                group["lr"] = rate
        self._unscaled = None

    def remove(self) -> None:
        """End, with the rates unscaled."""
        self._put_back()
        for handle in self._handles:
            handle.remove()
