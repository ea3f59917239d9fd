"""Plans worth trying, from what was asked for and what was measured. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.plan import Action, Bucket, Piece, SyncPlan, conventional, reverse_first_k
from lightning_gpufeed.sync.scattered import search_scattered
from lightning_gpufeed.sync.search import search
from lightning_gpufeed.sync.simulate import simulate

__all__ = ["USUAL_BUCKET_BYTES", "Candidate", "PlanOptions", "given_plan", "plans_to_try", "usual_plan"]

USUAL_BUCKET_BYTES = 25 << 20
"""Of `DistributedDataParallel`."""
_FIRST_BUCKET_BYTES = 1 << 20
_FINE_BUCKET_BYTES = (1 << 20, 4 << 20)
_MIN_GAIN = 0.01
"""Share of a step below which a predicted gain is none."""


@dataclass(frozen=True)
class PlanOptions:
    """What is given, and what is to be found ("auto").

    Attributes:
        reverse_first_k: How many of the first layers compute their weight gradients last.
        cross_iteration: Whether the next forward starts before all gradients have arrived.
        bucket_bytes: Least size of a message, but for the last ones.
        memory_cap_bytes: Most that weight gradients that wait may keep alive; None for no limit.
        overlap_clipping: Whether a step that needs the norm of all gradients may cross.
    """

    reverse_first_k: int | Literal["auto"] = "auto"
    cross_iteration: bool | Literal["auto"] = "auto"
    bucket_bytes: int | Literal["auto"] = "auto"
    memory_cap_bytes: int | None = None
    overlap_clipping: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: One is out of range or of another type.
        """
        _check_count("reverse_first_k", self.reverse_first_k, 0)
        _check_count("bucket_bytes", self.bucket_bytes, 1)
        if not isinstance(self.cross_iteration, bool) and self.cross_iteration != "auto":
            raise ValueError(f"cross_iteration is {self.cross_iteration!r}; expected True, False or 'auto'.")
        if not isinstance(self.overlap_clipping, bool):
            raise ValueError(f"overlap_clipping is {self.overlap_clipping!r}; expected True or False.")
        if self.memory_cap_bytes is not None:
            _check_count("memory_cap_bytes", self.memory_cap_bytes, 0, "None for no limit")

    def check(self, num_layers: int) -> None:
        """Compare with a model.

        Args:
            num_layers: Of it, with parameters, frozen or not.

        Raises:
            ValueError: There are fewer than `reverse_first_k`.
        """
        if self.reverse_first_k != "auto" and self.reverse_first_k > num_layers:
            raise ValueError(
                f"reverse_first_k is {self.reverse_first_k}; expected at most {num_layers}, the number of layers with "
                "parameters."
            )

    @property
    def is_given(self) -> bool:
        """Whether nothing is left to be found."""
        return "auto" not in (self.reverse_first_k, self.cross_iteration, self.bucket_bytes)


def _check_count(name: str, value: object, least: int, other: str = "'auto'") -> None:
    if value == "auto" and other == "'auto'":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number from {least} on, or {other}.")


@dataclass(frozen=True)
class Candidate:
    """A plan and how long a step should take with it."""

    plan: SyncPlan
    seconds: float


def usual_plan(layers: Sequence[LayerCosts], late: Collection[int] = ()) -> SyncPlan:
    """What `DistributedDataParallel` does: a first bucket of 1 MB, so that sending begins early, then such of 25 MB.

    Args:
        layers: In forward order.
        late: Layers whose gradients are sent when backward has ended.

    Returns:
        The plan.
    """
    return _with_late(_like_ddp(_on_time(layers, late)), layers, late)


def _like_ddp(layers: Sequence[LayerCosts]) -> SyncPlan:
    plan = conventional(layers, 1)
    buckets: list[list[Piece]] = []
    most, held = _FIRST_BUCKET_BYTES, 0
    for (piece,) in plan.buckets:
        if not buckets or held >= most:
            most = _FIRST_BUCKET_BYTES if not buckets else USUAL_BUCKET_BYTES
            buckets.append([])
            held = 0
        buckets[-1].append(piece)
        held += piece.num_bytes
    return replace(plan, buckets=tuple(map(tuple, buckets)))


def given_plan(
    layers: Sequence[LayerCosts], options: PlanOptions, late: Collection[int] = (), *, is_scattered: bool = False
) -> SyncPlan:
    """The plan that options without "auto" say.

    Args:
        layers: In forward order. Seconds do not matter.
        options: All given.
        late: Layers whose gradients are sent when backward has ended.
        is_scattered: Whether a plan that crosses has to know the norm of all gradients.

    Returns:
        The plan.
    """
    assert isinstance(options.reverse_first_k, int)
    assert isinstance(options.bucket_bytes, int)
    k = min(options.reverse_first_k, len(layers))  # some may be frozen
    plan = reverse_first_k(_on_time(layers, late), k, options.bucket_bytes, options.cross_iteration is True)
    plan = replace(plan, is_scattered=is_scattered and plan.cross_iteration)
    return _with_late(plan, layers, late)


def plans_to_try(
    layers: Sequence[LayerCosts],
    link: LinkCosts,
    options: PlanOptions,
    *,
    other_seconds: float = 0.0,
    is_accumulating: bool = False,
    late: Collection[int] = (),
    is_scattered: bool = False,
) -> list[Candidate]:
    """What to measure on real steps.

    Args:
        layers: In forward order, as measured.
        link: As measured.
        options: What is given is kept.
        other_seconds: Of a step, beside its layers.
        is_accumulating: Whether that is mostly earlier microbatches, which come after the first forward, rather than
            what comes before it.
        late: Layers whose gradients are sent when backward has ended.
        is_scattered: Whether a plan that crosses has to know the norm of all gradients.

    Returns:
        What `DistributedDataParallel` would do comes first, unless the options exclude it; the best plan is last.
    """
    between = LayerCosts("between", other_seconds, 0.0, 0.0, 0)
    nothing = replace(between, forward_seconds=0.0)
    around = (nothing, between) if is_accumulating else (between, nothing)
    full = [around[0], *_on_time(layers, late), around[1]]
    k, cross, size = options.reverse_first_k, options.cross_iteration, options.bucket_bytes
    found: list[SyncPlan] = []
    sizes: tuple[int, ...]
    if k == "auto" and cross is not True:
        if isinstance(size, int):
            usual = [conventional(full, size)]
        else:
            usual = [_like_ddp(full), *(conventional(full, one) for one in _FINE_BUCKET_BYTES)]
        found.append(usual[0])
        best_usual = min(usual, key=lambda plan: simulate(plan, full, link).step_seconds)
        if best_usual.buckets != usual[0].buckets:
            found.append(best_usual)
    if is_scattered and cross is not False:
        plan = search_scattered(
            full,
            link,
            memory_cap_bytes=options.memory_cap_bytes,
            bucket_bytes=size,
            reverse_first=k if k == "auto" else min(k, len(layers)) + 1,
        )
        if found and not _is_faster(plan, best_usual, full, link):
            plan = best_usual
    elif k == "auto":
        plan = search(
            full,
            link,
            memory_cap_bytes=options.memory_cap_bytes,
            bucket_bytes=size,
            cross_iteration=cross is not False,
            min_gain=-1.0 if cross is True else _MIN_GAIN,
        )
    else:
        total = sum(layer.gradient_bytes for layer in full) or 1
        sizes = (size,) if isinstance(size, int) else tuple(max(1, total >> halvings) for halvings in range(8))
        reversed_plans = [reverse_first_k(full, min(k, len(layers)) + 1, one, cross is not False) for one in sizes]
        plan = min(reversed_plans, key=lambda one: simulate(one, full, link).step_seconds)
    if plan.is_scattered or all((plan.buckets, plan.backward) != (other.buckets, other.backward) for other in found):
        found.append(plan)
    plans = [(_with_late(_inner(plan), layers, late), simulate(plan, full, link).step_seconds) for plan in found]
    # Where all plans take the same time, as of layers that take none, the search keeps the one that does not cross.
    return [
        Candidate(replace(plan, cross_iteration=True) if cross is True and plan.buckets else plan, seconds)
        for plan, seconds in plans
    ]


def _on_time(layers: Sequence[LayerCosts], late: Collection[int]) -> list[LayerCosts]:
    """Late layers send nothing and wait for nothing."""
    return [
        replace(layer, gradient_bytes=0, is_deferrable=False) if i in late else layer for i, layer in enumerate(layers)
    ]


def _inner(plan: SyncPlan) -> SyncPlan:
    """Without the first and the last layer, which are none."""
    last = max(action.layer for action in plan.backward)
    actions = tuple(Action(kind, i - 1) for kind, i in plan.backward if 0 < i < last)
    buckets = tuple(tuple(Piece(i - 1, begin, end) for i, begin, end in bucket) for bucket in plan.buckets)
    return replace(plan, backward=actions, buckets=buckets)


def _is_faster(plan: SyncPlan, usual: SyncPlan, layers: Sequence[LayerCosts], link: LinkCosts) -> bool:
    seconds, usual_seconds = (simulate(one, layers, link).step_seconds for one in (plan, usual))
    return seconds * (1 + _MIN_GAIN) < usual_seconds


def _with_late(plan: SyncPlan, layers: Sequence[LayerCosts], late: Collection[int]) -> SyncPlan:
    """With messages for late layers behind all others."""
    buckets: list[Bucket] = list(plan.buckets)
    for i in sorted(late, reverse=True):
        if layers[i].gradient_bytes:
            buckets.append((Piece(i, 0, layers[i].gradient_bytes),))
    return replace(plan, buckets=tuple(buckets))
