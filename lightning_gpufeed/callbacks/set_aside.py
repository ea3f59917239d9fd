"""Tells a callback that a run is over where Lightning does not: a finder's trial that ends with an error.

::

    fit ── setup, on_fit_start of all callbacks ── a finder: trainer.callbacks = [its own] ── trial ── error
                                                                                                       │
                 on_exception of the finder's own callback alone <─────────────────────────────────────┤
                 strategy.teardown, which is called in any case  <─────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer

__all__ = ["WhenSetAside"]


class WhenSetAside:
    """Stands in a strategy's place of `teardown`, until it is removed.

    A copy of the strategy, pickled or not, has its own method again.
    """

    def __init__(self, trainer: Trainer, callback: Callback, take_back: Callable[[], Any]) -> None:
        """Put it there.

        Args:
            trainer: A Trainer.
            callback: One of its callbacks.
            take_back: Called if the run ends while the Trainer does not have that callback; removes this, too.
        """
        self._trainer, self._callback, self._take_back = trainer, callback, take_back
        self._strategy = trainer.strategy
        self._before = self._strategy.__dict__.get("teardown")
        self._own = self._strategy.teardown
        self._is_in_use = True
        self._strategy.__dict__["teardown"] = self

    def __call__(self) -> None:
        """The run is over."""
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        if self._is_in_use and all(one is not self._callback for one in callbacks):
            self._take_back()
        self._own()

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the method again."""
        return getattr, (self._strategy, "teardown")

    def remove(self) -> None:
        """Give the place back; where somebody else has come since then, this one does nothing any more."""
        self._is_in_use = False
        own = self._strategy.__dict__
        if own.get("teardown") is not self:
            return
        before = self._before
        while isinstance(before, WhenSetAside) and not before._is_in_use:
            before = before._before
        if before is None:
            own.pop("teardown")
        else:
            own["teardown"] = before
