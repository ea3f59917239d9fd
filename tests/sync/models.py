"""Models, links and plans to plan with: random ones, and twelve equal layers."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.plan import Action, Piece, SyncPlan

MEGABYTE = 1_000_000


def equal_layers(ratio: float, num_layers: int = 12) -> tuple[list[LayerCosts], LinkCosts]:
    """Layers of 10 s each for F, I and W, and a link that needs `ratio` times as long; nobody needs the first I."""
    layers = [
        LayerCosts(f"layer{i}", 10.0, 10.0 if i else 0.0, 10.0, 3 * MEGABYTE, deferred_bytes=100)
        for i in range(num_layers)
    ]
    return layers, LinkCosts(0.0, MEGABYTE / 10 / ratio)


seconds = st.integers(0, 5).map(float)

layer_costs = st.builds(
    LayerCosts,
    name=st.just("layer"),
    forward_seconds=seconds,
    input_grad_seconds=seconds,
    weight_grad_seconds=seconds,
    gradient_bytes=st.one_of(st.integers(0, 6000), st.just(0)),
    deferred_bytes=st.integers(0, 10),
    is_deferrable=st.sampled_from([True, True, True, False]),
)
models = st.lists(layer_costs, min_size=1, max_size=7)
links = st.builds(
    LinkCosts, st.sampled_from([0.0, 0.0, 0.5, 2.0]), st.sampled_from([100.0, 1000.0, 10000.0, float("inf")])
)


@st.composite
def models_with_plans(draw):
    """A model and any plan that can be carried out for it."""
    layers = draw(models)
    crosses = draw(st.booleans())
    plan = any_plan(layers, draw(st.randoms(use_true_random=False)), crosses)
    return layers, replace(plan, is_scattered=crosses and draw(st.booleans()))


def any_plan(layers: list[LayerCosts], chance: random.Random, cross_iteration: bool) -> SyncPlan:
    backward: list[Action] = []
    waiting: list[int] = []
    for i in reversed(range(len(layers))):
        if not layers[i].is_deferrable or chance.random() < 0.3:
            backward.append(Action("B", i))
        else:
            is_weight_first = chance.random() < 0.3
            backward += [Action("W", i), Action("I", i)] if is_weight_first else [Action("I", i)]
            waiting += [] if is_weight_first else [i]
        while waiting and chance.random() < 0.4:
            backward.append(Action("W", waiting.pop(chance.randrange(len(waiting)))))
    chance.shuffle(waiting)
    backward += [Action("W", i) for i in waiting]
    pieces = []
    for i, layer in enumerate(layers):
        inner = [
            chance.randrange(1, layer.gradient_bytes) for _ in range(chance.randrange(3)) if layer.gradient_bytes > 1
        ]
        cuts = sorted({0, layer.gradient_bytes, *inner})
        pieces += [Piece(i, begin, end) for begin, end in pairwise(cuts)]
    chance.shuffle(pieces)
    buckets = []
    while pieces:
        size = chance.randrange(1, 4)
        buckets.append(tuple(pieces[:size]))
        pieces = pieces[size:]
    return SyncPlan(tuple(backward), tuple(buckets), cross_iteration)
