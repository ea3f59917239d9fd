"""Which scattered plan is the best: every sum in two halves, with the norm of all gradients between them. Pure.

All first halves have to be there before the norm is, so what counts in backward is that the link is never idle and that
the last gradient comes early; what counts in forward is that the first layers' halves are small messages of their own.
The families of reverse first-k in buckets of several sizes hold both ends; more is not searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.plan import SyncPlan, peak_deferred_bytes, reverse_first_k
from lightning_gpufeed.sync.simulate import StepModel

__all__ = ["search_scattered"]

_NUM_SIZES = 8
"""Sizes of message that are tried: all gradients in one, half of them, a quarter ..."""
_MOST_KS = 40


def search_scattered(
    layers: Sequence[LayerCosts],
    link: LinkCosts,
    *,
    memory_cap_bytes: int | None = None,
    bucket_bytes: int | Literal["auto"] = "auto",
    reverse_first: int | Literal["auto"] = "auto",
) -> SyncPlan:
    """The scattered plan with the shortest step, of those with the fewest messages.

    Args:
        layers: In forward order.
        link: What gradients cross: an all-reduce of a message, of which each half takes half the time.
        memory_cap_bytes: Most that weight gradients that wait may keep alive; None for no limit.
        bucket_bytes: At which a bucket is full; "auto" to try several.
        reverse_first: How many of the first layers compute their weight gradients last; "auto" to try.

    Returns:
        The plan.

    Source:
        ZeRO (Rajbhandari et al., SC 2020) for sums in two halves; reverse first-k (Oh et al., EuroSys 2022).

    Example:
        >>> layers = [LayerCosts(name, 1.0, 1.0, 1.0, gradient_bytes=4096) for name in "abc"]
        >>> str(search_scattered(layers, LinkCosts(0.0, 4096.0), bucket_bytes=1))
        'scatter; B2 B1 B0; 2:0-4096 1:0-4096 0:0-4096'
    """
    model = StepModel(layers, link)

    def rank(plan: SyncPlan) -> tuple[float, int, int]:
        seconds, _ = model.measure(model.ready_seconds(plan.backward), plan.buckets, True, True)
        return round(seconds, 9), len(plan.deferred), len(plan.buckets)

    plans = _plans(layers, bucket_bytes, reverse_first)
    allowed = (
        plan
        for plan in plans
        if memory_cap_bytes is None or peak_deferred_bytes(plan.backward, layers) <= memory_cap_bytes
    )
    plain = reverse_first_k(layers, 0, bucket_bytes if isinstance(bucket_bytes, int) else 1)
    return replace(min(allowed, key=rank, default=plain), is_scattered=True)


def _plans(
    layers: Sequence[LayerCosts], bucket_bytes: int | Literal["auto"], reverse_first: int | Literal["auto"]
) -> Iterator[SyncPlan]:
    total = sum(layer.gradient_bytes for layer in layers) or 1
    sizes = sorted({max(1, total >> halvings) for halvings in range(_NUM_SIZES)})
    step = -(-len(layers) // _MOST_KS)
    ks = list(range(0, len(layers) + 1, step)) if reverse_first == "auto" else [min(reverse_first, len(layers))]
    for k in ks:
        for size in sizes if bucket_bytes == "auto" else [bucket_bytes]:
            yield reverse_first_k(layers, k, size)
