"""Which order is best for a model and a link. Pure, and the same on every rank: no clock and no chance decide.

For a given order of the device, each gradient has a time from which on it can be sent, and a forward that waits for
it; `issue` makes the messages from that. So the search is over the order of the device, and over how messages are
made::

    families    conventional, and reverse first-k for every k: in buckets of several sizes, and by the rules of `issue`
    moves       from the best of them: one weight gradient at a time to where it helps most
    tidy        no weight gradient waits, and no message is apart, without a gain

In a deep model neighbouring layers are moved together, as blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_gpufeed.sync.blocks import block_costs, expanded, grouped
from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.issue import IssueRule, merged
from lightning_gpufeed.sync.plan import (
    Action,
    Bucket,
    SyncPlan,
    conventional,
    peak_deferred_bytes,
    reverse_first_k,
)
from lightning_gpufeed.sync.simulate import StepModel

__all__ = ["search"]

_MOST_BLOCKS = 40
_NUM_SIZES = 7
"""Sizes of message that are tried: all gradients in one, half of them, a quarter ..."""
_NUM_SEEDS = 3
"""Orders that are tried with every rule, and that moves start from."""
_MOST_MESSAGES = 512
_UNIT = 1e-9
"""Steps are told apart down to this share of one."""

Score = tuple[int, int]


def search(
    layers: Sequence[LayerCosts],
    link: LinkCosts,
    *,
    memory_cap_bytes: int | None = None,
    bucket_bytes: int | str = "auto",
    cross_iteration: bool = True,
    weight_first: bool = False,
    min_gain: float = 0.02,
    max_evaluations: int = 6000,
) -> SyncPlan:
    """The plan with the shortest step that can be found.

    Args:
        layers: In forward order.
        link: What gradients cross.
        memory_cap_bytes: Most that weight gradients that wait may keep alive; None for no limit.
        bucket_bytes: At which a bucket is full, but for a size that would make more than some hundred messages; "auto"
            to try several.
        cross_iteration: Whether the next forward may start before all has arrived. Without, little can be gained.
        weight_first: Whether a layer may compute its weight gradient before its input gradient, which the splitter of
            backward does not do.
        min_gain: Share of a step below which a gain is none.
        max_evaluations: How many plans the moves may try.

    Returns:
        The plan; the best conventional one if nothing gains more than `min_gain` over it.

    Raises:
        ValueError: `bucket_bytes` is neither a positive number nor "auto", or the cap is negative.

    Source:
        Jackson's rule (1955) for the order of sending; reverse first-k (Oh et al., EuroSys 2022) to start from.

    Example:
        >>> layers = [LayerCosts(name, 1.0, 1.0, 1.0, gradient_bytes=4096) for name in "abc"]
        >>> str(search(layers, LinkCosts(0.0, 2048.0)))
        'cross; I2 B1 B0 W2; 1:0-4096 0:0-4096 2:0-4096'
    """
    if memory_cap_bytes is not None and memory_cap_bytes < 0:
        raise ValueError(f"memory_cap_bytes is {memory_cap_bytes}; expected at least 0, or None for no limit.")
    total = sum(layer.gradient_bytes for layer in layers)
    if bucket_bytes == "auto":
        sizes = sorted({max(1, total >> halvings) for halvings in range(_NUM_SIZES)} | {1})
        most_bytes = max(1, total)
    elif isinstance(bucket_bytes, int) and bucket_bytes >= 1:
        most_bytes = max(bucket_bytes, total // _MOST_MESSAGES)
        sizes = [most_bytes]
    else:
        raise ValueError(f"bucket_bytes is {bucket_bytes!r}; expected a positive number of bytes, or 'auto'.")
    level = _Level(layers, link, memory_cap_bytes, cross_iteration, weight_first)
    usual = min(
        (level.of_plan(conventional(layers, size), is_cross=False) for size in sizes),
        key=lambda found: (found.score[0], len(found.buckets)),
    )
    rules = [IssueRule(most_bytes, True), *(IssueRule(size, False) for size in sizes if size > 1)]
    seeds = level.seeds(sizes, rules)
    moved = seeds
    if len(layers) <= _MOST_BLOCKS:
        moved = [level.moved(seed, max_evaluations // _NUM_SEEDS) for seed in seeds]
    else:
        blocks = grouped(layers, _MOST_BLOCKS)
        coarse = _Level(
            [block_costs(layers, one) for one in blocks], link, memory_cap_bytes, cross_iteration, weight_first
        )
        for seed in coarse.seeds(sizes, rules):
            order = expanded(coarse.moved(seed, max_evaluations // _NUM_SEEDS).order, blocks, layers)
            moved = [*moved, *(found for rule in rules if (found := level.by_rule(order, rule)))]
    best = level.tidied(min([*seeds, *moved], key=lambda found: found.score), most_bytes)
    if best.score[0] * (1 + min_gain) >= usual.score[0]:
        return SyncPlan(tuple(usual.order), tuple(usual.buckets), cross_iteration=False)
    return SyncPlan(tuple(_joined(best.order)), tuple(best.buckets), cross_iteration)


@dataclass(frozen=True)
class _Found:
    """An order of the device with its messages; the score is the step, then what is to spare in it."""

    score: Score
    order: Sequence[Action]
    buckets: Sequence[Bucket]
    rule: IssueRule | None = None


class _Level:
    """What is searched: layers, or blocks of them, with what is allowed. Orders have no B where they can be split."""

    def __init__(
        self, layers: Sequence[LayerCosts], link: LinkCosts, cap: int | None, is_cross: bool, weight_first: bool
    ) -> None:
        self._layers, self._link, self._cap = layers, link, cap
        self._is_cross, self._weight_first = is_cross, weight_first
        self._model = StepModel(layers, link)
        self._sizes = [layer.gradient_bytes for layer in layers]
        self._unit = _UNIT * (self._model.compute_seconds or link.seconds(sum(self._sizes)) or 1.0)
        self._least = round(self._model.compute_seconds / self._unit)

    def score(self, ready: Sequence[float], buckets: Iterable[Bucket], is_cross: bool) -> Score:
        """In whole units, so that rounding does not tell plans apart."""
        seconds, held = self._model.measure(ready, buckets, is_cross)
        return round(seconds / self._unit), round(held / self._unit)

    def of_plan(self, plan: SyncPlan, is_cross: bool) -> _Found:
        """A plan as it is."""
        ready = self._model.ready_seconds(plan.backward)
        return _Found(self.score(ready, plan.buckets, is_cross), plan.backward, plan.buckets)

    def is_within_cap(self, order: Iterable[Action]) -> bool:
        """Whether what waits fits into memory."""
        return self._cap is None or peak_deferred_bytes(order, self._layers) <= self._cap

    def by_rule(self, order: Sequence[Action], rule: IssueRule) -> _Found | None:
        """None if it holds too much memory."""
        if not self.is_within_cap(order):
            return None
        ready = self._model.ready_seconds(order)
        buckets = rule.buckets(ready, self._sizes, self._link, self._is_cross)
        return _Found(self.score(ready, buckets, self._is_cross), order, buckets, rule)

    def seeds(self, sizes: Sequence[int], rules: Sequence[IssueRule]) -> list[_Found]:
        """The best of the families, by every rule."""
        plain: list[_Found] = []
        ruled: list[_Found] = []
        for weight_first in (False, True)[: 1 + self._weight_first]:
            for k in range(len(self._layers) + 1):
                plans = [reverse_first_k(self._layers, k, size, self._is_cross, weight_first) for size in sizes]
                order = list(_split(plans[0].backward, self._layers))
                if not self.is_within_cap(order):
                    break  # more of them hold more
                plain += [self.of_plan(plan, self._is_cross) for plan in plans]
                ruled += [found for found in [self.by_rule(order, rules[0])] if found]
        ruled.sort(key=lambda found: found.score)
        seeds = [
            min(
                (self.by_rule(one.order, rule) or one for rule in rules),
                key=lambda found: (found.score, len(found.buckets)),
            )
            for one in ruled[:_NUM_SEEDS]
        ]
        best = min(plain, key=lambda found: found.score)
        return [*seeds, _Found(best.score, list(_split(best.order, self._layers)), best.buckets)]

    def moved(self, seed: _Found, most_evaluations: int) -> _Found:
        """Move one weight gradient at a time to its best place, until none gains or the evaluations are used up."""
        best, rule, num_evaluations = seed, seed.rule, 0
        if rule is None:
            return seed
        before: Score | None = None
        while best.score != before and best.score[0] > self._least:
            before = best.score
            for layer, costs in enumerate(self._layers):
                if not costs.is_deferrable or not costs.gradient_bytes:
                    continue
                for order in self._moves(best.order, layer):
                    if num_evaluations >= most_evaluations:
                        return best
                    num_evaluations += 1
                    found = self.by_rule(order, rule)
                    if found is not None and found.score < best.score:
                        best = found
        return best

    def _moves(self, order: Sequence[Action], layer: int) -> Iterator[list[Action]]:
        """Every other place of a layer's weight gradient."""
        place = order.index(Action("W", layer))
        rest = [*order[:place], *order[place + 1 :]]
        first = rest.index(Action("I", layer)) + 1
        if self._weight_first:
            first = next((at for at in range(first - 2, -1, -1) if rest[at].kind != "W"), -1) + 1
        for at in range(first, len(rest) + 1):
            if at != place:
                yield [*rest[:at], Action("W", layer), *rest[at:]]

    def tidied(self, found: _Found, most_bytes: int) -> _Found:
        """The same step with less: no layer waits for nothing, and messages are together where that costs nothing."""
        for layer in [action.layer for action in _joined(found.order) if action.kind == "W"]:
            rest = [action for action in found.order if action != ("W", layer)]
            at = rest.index(Action("I", layer)) + 1
            tried = self._with_order(found, [*rest[:at], Action("W", layer), *rest[at:]])
            if tried is not None and tried.score[0] <= found.score[0]:
                found = tried
        ready = self._model.ready_seconds(found.order)
        buckets = merged(found.buckets, most_bytes, lambda some: self.score(ready, some, self._is_cross))
        return _Found(self.score(ready, buckets, self._is_cross), found.order, buckets)

    def _with_order(self, found: _Found, order: Sequence[Action]) -> _Found | None:
        """Another order, with messages made by the same rule."""
        if found.rule is not None:
            return self.by_rule(order, found.rule)
        if not self.is_within_cap(order):
            return None
        score = self.score(self._model.ready_seconds(order), found.buckets, self._is_cross)
        return _Found(score, order, found.buckets)


def _split(backward: Iterable[Action], layers: Sequence[LayerCosts]) -> Iterator[Action]:
    """Both gradients of a layer one after the other, where they can be."""
    for action in backward:
        if action.kind == "B" and layers[action.layer].is_deferrable:
            yield Action("I", action.layer)
            yield Action("W", action.layer)
        else:
            yield action


def _joined(order: Iterable[Action]) -> list[Action]:
    """A weight gradient right after its input gradient is no waiting."""
    joined: list[Action] = []
    for action in order:
        if action.kind == "W" and joined and joined[-1] == ("I", action.layer):
            joined[-1] = Action("B", action.layer)
        else:
            joined.append(action)
    return joined
