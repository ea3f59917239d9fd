"""Lightning's clipping, told to who knows the gradients before they have arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.precision import Precision

from lightning_gpufeed.strategies.gate import raw
from lightning_gpufeed.sync.clipped_session import ClippedGradientSync

__all__ = ["clipped_on_arrival"]


@contextmanager
def clipped_on_arrival(precision: Precision, sync: ClippedGradientSync) -> Iterator[None]:
    """Whoever has gradients clipped by a precision's usual ways has them clipped when they arrive, if that is exact.

    So an overridden `configure_gradient_clipping` that ends in `clip_gradients` is served as well.

    Args:
        precision: Of the training. One that clips in a way of its own is left alone.
        sync: What keeps the ranks equal.

    Yields:
        Nothing.
    """
    ways: dict[str, Callable[[Any, float], bool]] = {"clip_grad_by_norm": sync.clip, "clip_grad_by_value": sync.clamp}
    replaced = []
    for name, on_arrival in ways.items():
        if getattr(type(precision), name) is getattr(Precision, name) and name not in vars(precision):
            setattr(precision, name, _first(on_arrival, getattr(precision, name)))
            replaced.append(name)
    try:
        yield
    finally:
        for name in replaced:
            delattr(precision, name)


def _first(on_arrival: Callable[[Any, float], bool], usual: Callable[[Any, float], None]) -> Callable[..., None]:
    def clip(optimizer: Any, clip_val: float) -> None:
        if not on_arrival(raw(optimizer), clip_val):
            usual(optimizer, clip_val)

    return clip
