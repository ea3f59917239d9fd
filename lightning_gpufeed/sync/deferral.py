"""Weight gradients that wait, as a plan says; and how long each takes, while that is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from lightning_gpufeed.backprop.order import BackwardOrder
from lightning_gpufeed.backprop.split import WeightGradSplitter
from lightning_gpufeed.sync.times import StepTimes

__all__ = ["Deferral"]


class Deferral:
    """Holds at most one splitter: that of the plan in use."""

    def __init__(self, model: nn.Module, memory_cap_bytes: int | None) -> None:
        """Nothing waits.

        Args:
            model: Whose backward is split.
            memory_cap_bytes: Most that weight gradients that wait may keep alive; None for no limit.
        """
        self._model, self._cap = model, memory_cap_bytes
        self._splitter: WeightGradSplitter | None = None
        self._peak_bytes = 0
        self._places: Mapping[str, int] = {}
        self._times: StepTimes | None = None

    @property
    def peak_bytes(self) -> int:
        """Most that weight gradients that wait have kept alive at a time."""
        return max(self._peak_bytes, self._splitter.peak_bytes if self._splitter else 0)

    def use(self, order: BackwardOrder | None, places: Mapping[str, int], times: StepTimes | None) -> None:
        """Split as an order says, from the next forward on.

        Args:
            order: None if nothing waits.
            places: For the name of each module, the number of its layer.
            times: Where to note when input and weight gradients are there; None if that is not measured.
        """
        self.close()
        self._places, self._times = places, times
        if order is not None:
            self._splitter = WeightGradSplitter(
                self._model,
                order,
                memory_cap_bytes=self._cap,
                on_input_grad=None if times is None else self._note_input_grad,
                on_grad=None if times is None else self._note_weight_grad,
            )
            self._splitter.is_deferring = False

    def is_split(self, name: str) -> bool:
        """Whether a module's weight gradient is computed apart from its input gradient.

        Args:
            name: Of the module.

        Returns:
            True if it is.
        """
        return self._splitter is not None and self._splitter.is_split(name)

    def is_incomplete(self, name: str) -> bool:
        """Whether more is to come to the gradient of a module.

        Args:
            name: Of the module.

        Returns:
            True if its weight gradient waits, or will.
        """
        return self._splitter is not None and self._splitter.is_incomplete(name)

    def open(self, is_open: bool) -> None:
        """Whether the next forward is split.

        Args:
            is_open: False to leave it to autograd.
        """
        if self._splitter is not None:
            self._splitter.is_open = is_open

    def defer(self, is_deferring: bool) -> None:
        """Whether weight gradients may wait longer than the backward that begins.

        Args:
            is_deferring: False for a backward of which nobody will say that it has ended.
        """
        if self._splitter is not None:
            self._splitter.is_deferring = is_deferring

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave forward and backward to autograd.

        Yields:
            Nothing.
        """
        was_open = self._splitter is not None and self._splitter.is_open
        self.open(False)
        try:
            yield
        finally:
            self.open(was_open)

    def finish(self) -> None:
        """Compute what waits."""
        if self._splitter is not None:
            self._splitter.finish()

    def discard(self) -> None:
        """Forget what waits."""
        if self._splitter is not None:
            self._splitter.discard()

    def close(self) -> None:
        """Leave the model to autograd again."""
        if self._splitter is not None:
            self._peak_bytes = self.peak_bytes
            self._splitter.close()
            self._splitter = None

    def _note_input_grad(self, name: str) -> None:
        if self._times is not None and self._splitter is not None:
            self._times.note("I", self._places[name])
            self._times.note_bytes(self._places[name], self._splitter.pending_bytes)

    def _note_weight_grad(self, name: str) -> None:
        if self._times is not None:
            self._times.note("W", self._places[name])
