"""Plans that are found: valid, within what is allowed, never slower than the usual one, the same on every rank."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.sync import search as search_module
from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.plan import SyncPlan, conventional, peak_deferred_bytes, reverse_first_k, validate
from lightning_gpufeed.sync.search import search
from lightning_gpufeed.sync.simulate import simulate
from tests.sync.models import MEGABYTE, equal_layers, links, models

unhurried = settings(max_examples=30, deadline=None)


def step_seconds(plan, layers, link):
    validate(plan, layers)
    return simulate(plan, layers, link).step_seconds


def has_weight_first(plan):
    begun = set()
    for kind, layer in plan.backward:
        if kind == "W" and layer not in begun:
            return True
        begun.add(layer)
    return False


def deep_model(num_layers=90):
    """Convolutions of different sizes with norms between them, an activation here and there, and a large head."""
    layers = []
    for i in range(num_layers - 1):
        if i % 3 == 1:
            layers.append(LayerCosts(f"norm{i}", 0.2, 0.3, 0.0, 4096, is_deferrable=False))
        elif i % 7 == 3:
            layers.append(LayerCosts(f"relu{i}", 0.1, 0.1, 0.0, 0))
        else:
            layers.append(LayerCosts(f"conv{i}", 2.0, 2.0, 2.0, (1 + i // 20) * MEGABYTE, deferred_bytes=10))
    return [*layers, LayerCosts("head", 1.0, 1.0, 1.0, 20 * MEGABYTE, deferred_bytes=10)]


def test_the_examples_run():
    assert doctest.testmod(search_module).failed == 0


@given(models, links)
@unhurried
def test_a_plan_is_valid_and_never_slower_than_the_usual_one(layers, link):
    found = step_seconds(search(layers, link), layers, link)
    total = max(1, sum(layer.gradient_bytes for layer in layers))
    for bucket_bytes in (1, max(1, total // 4), total):
        assert found <= step_seconds(conventional(layers, bucket_bytes), layers, link) * (1 + 1e-8) + 1e-12


@given(models, links, st.integers(1, 20_000))
@unhurried
def test_a_plan_of_buckets_of_a_size_is_never_slower_than_the_usual_one_of_that_size(layers, link, bucket_bytes):
    found = step_seconds(search(layers, link, bucket_bytes=bucket_bytes), layers, link)
    assert found <= step_seconds(conventional(layers, bucket_bytes), layers, link) * (1 + 1e-8) + 1e-12


@given(models, links, st.integers(0, 12), st.booleans(), st.booleans())
@unhurried
def test_what_is_not_allowed_is_not_done(layers, link, cap, cross_iteration, weight_first):
    plan = search(
        layers, link, memory_cap_bytes=cap, cross_iteration=cross_iteration, weight_first=weight_first, min_gain=0.0
    )
    validate(plan, layers, memory_cap_bytes=cap)
    assert cross_iteration or not plan.cross_iteration
    assert weight_first or not has_weight_first(plan)


@given(models, links, st.floats(0.0, 0.5))
@unhurried
def test_what_gains_too_little_is_left(layers, link, min_gain):
    plan = search(layers, link, min_gain=min_gain)
    total = max(1, sum(layer.gradient_bytes for layer in layers))
    usual = [conventional(layers, max(1, total >> i)) for i in range(7)] + [conventional(layers, 1)]
    if plan not in usual:
        best = min(step_seconds(one, layers, link) for one in usual)
        assert step_seconds(plan, layers, link) * (1 + min_gain) < best


# Steps of twelve equal layers: the best reverse first-k, the best order of whole gradients that is known, and what is
# found where gradients may be cut; if a weight gradient may come before the input gradient, and if not.
@pytest.mark.parametrize(
    ("ratio", "reverse", "known", "best", "best_weight_last"),
    [
        (0.3, 350, 350, 350, 350),
        (0.6, 350, 350, 350, 350),
        (0.9, 412, 396, 358, 368),
        (1.2, 498, 472, 452.1, 462.1),
        (2.4, 904, 904, 884.1, 894.1),
    ],
)
def test_twelve_equal_layers_are_faster_than_any_order_of_whole_gradients(
    ratio, reverse, known, best, best_weight_last
):
    layers, link = equal_layers(ratio)
    found = step_seconds(search(layers, link, weight_first=True), layers, link)
    assert found <= best + 1e-6
    assert found <= min(known, reverse) + 1e-6
    assert step_seconds(search(layers, link), layers, link) <= best_weight_last + 1e-6


def test_a_link_that_is_no_bottleneck_leaves_the_usual_plan():
    layers, link = equal_layers(0.1)
    assert search(layers, link) in [conventional(layers, (36 * MEGABYTE) >> i) for i in range(7)] + [
        conventional(layers, 1)
    ]


def test_latency_makes_messages_few():
    layers, link = equal_layers(0.9)
    many = search(layers, link)
    few = search(layers, LinkCosts(20.0, link.bytes_per_second))
    assert len(few.buckets) < len(many.buckets)


def test_a_large_first_layer_is_sent_as_soon_as_there_is_nothing_before_it():
    """An embedding: its gradient is large, and nothing but its own forward could hide it in the usual order."""
    layers = [LayerCosts("embedding", 1.0, 0.0, 1.0, 40 * MEGABYTE, deferred_bytes=10)]
    layers += [LayerCosts(f"block{i}", 5.0, 5.0, 5.0, MEGABYTE, deferred_bytes=10) for i in range(8)]
    link = LinkCosts(0.0, MEGABYTE)
    plan = search(layers, link)
    usual = step_seconds(conventional(layers, 1), layers, link)
    assert usual == pytest.approx(162.0)
    assert step_seconds(plan, layers, link) == pytest.approx(122.0)  # all of the compute
    assert plan.cross_iteration
    assert plan.deferred


def test_memory_that_waits_is_traded_for_time():
    layers, link = equal_layers(0.9)
    steps = []
    for cap in (0, 300, None):
        plan = search(layers, link, memory_cap_bytes=cap)
        assert cap is None or peak_deferred_bytes(plan.backward, layers) <= cap
        steps.append(step_seconds(plan, layers, link))
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_without_crossing_little_is_gained():
    layers, link = equal_layers(0.9)
    plan = search(layers, link, cross_iteration=False)
    assert not plan.cross_iteration
    assert step_seconds(plan, layers, link) == pytest.approx(464)


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize("rate", [0.3, 0.4])
def test_a_deep_model_is_planned_in_blocks(rate, weight_first):
    layers, link = deep_model(), LinkCosts(0.01, rate * MEGABYTE)
    plan = search(layers, link, weight_first=weight_first, min_gain=0.0, max_evaluations=300)
    found = step_seconds(plan, layers, link)
    families = [conventional(layers, size * MEGABYTE) for size in (1, 5, 25)]
    families += [reverse_first_k(layers, k, MEGABYTE, is_weight_first=False) for k in range(0, len(layers), 10)]
    assert found < min(step_seconds(one, layers, link) for one in families)
    assert weight_first or not has_weight_first(plan)


@given(st.lists(st.sampled_from(["wide", "norm", "bare"]), min_size=41, max_size=60), st.sampled_from([0, 40, None]))
@settings(max_examples=8, deadline=None)
def test_blocks_of_any_layers_become_a_valid_plan(kinds, cap):
    made = {
        "wide": LayerCosts("wide", 1.0, 1.0, 1.0, 50_000, deferred_bytes=10),
        "norm": LayerCosts("norm", 0.1, 0.1, 0.1, 1_000, is_deferrable=False),
        "bare": LayerCosts("bare", 0.1, 0.1, 0.0, 0),
    }
    layers = [made[kind] for kind in kinds]
    plan = search(layers, LinkCosts(0.0, 20_000.0), memory_cap_bytes=cap, max_evaluations=100)
    validate(plan, layers, memory_cap_bytes=cap)


def test_moving_blocks_finds_what_the_families_lack():
    layers, link = equal_layers(0.9, num_layers=48)
    link = LinkCosts(2.0, link.bytes_per_second)
    steps = [step_seconds(search(layers, link, max_evaluations=most), layers, link) for most in (0, 900)]
    assert steps[1] < steps[0]


def test_every_rank_finds_the_same():
    layers, link = equal_layers(0.9)
    plan = search(layers, link)
    assert search(list(layers), LinkCosts(link.latency_seconds, link.bytes_per_second)) == plan
    assert SyncPlan.parse(str(plan)) == plan


def test_more_evaluations_find_no_worse():
    layers, link = equal_layers(0.9)
    steps = [step_seconds(search(layers, link, max_evaluations=most), layers, link) for most in (0, 300, 6000)]
    assert steps == sorted(steps, reverse=True)


def test_there_may_be_nothing_to_plan():
    link = LinkCosts(0.0, 1.0)
    assert search([], link) == SyncPlan((), ())
    assert str(search([LayerCosts("only", 1.0, 0.0, 1.0, 4)], link)) == "barrier; B0; 0:0-4"
    assert str(search([LayerCosts("bare", 1.0, 0.0, 0.0, 0)], link)) == "barrier; B0; -"


@pytest.mark.parametrize("bucket_bytes", [0, -1, "many", 2.5, None])
def test_a_size_that_is_none_is_refused(bucket_bytes):
    with pytest.raises(ValueError, match="expected a positive number of bytes, or 'auto'"):
        search([], LinkCosts(0.0, 1.0), bucket_bytes=bucket_bytes)


def test_a_negative_cap_is_refused():
    with pytest.raises(ValueError, match="memory_cap_bytes is -1; expected at least 0"):
        search([], LinkCosts(0.0, 1.0), memory_cap_bytes=-1)
