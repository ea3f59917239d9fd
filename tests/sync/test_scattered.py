from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.sync import scattered as scattered_module
from lightning_gpufeed.sync.plan import conventional, reverse_first_k, validate
from lightning_gpufeed.sync.scattered import search_scattered
from lightning_gpufeed.sync.simulate import simulate
from tests.sync.models import equal_layers, links, models


def test_the_examples_run():
    assert doctest.testmod(scattered_module).failed == 0


@given(models, links, st.one_of(st.none(), st.integers(0, 30)))
def test_what_is_found_can_be_carried_out_within_the_cap(layers, link, cap):
    plan = search_scattered(layers, link, memory_cap_bytes=cap)
    validate(plan, layers, cap)
    assert plan.is_scattered


@given(models, links, st.integers(0, 7), st.sampled_from([1, 500, 10_000]))
def test_no_plan_of_the_families_is_faster(layers, link, k, size):
    found = simulate(search_scattered(layers, link), layers, link).step_seconds
    total = sum(layer.gradient_bytes for layer in layers) or 1
    other = reverse_first_k(layers, min(k, len(layers)), max(1, total >> (size % 8)))
    assert found <= simulate(type(other)(other.backward, other.buckets, True, True), layers, link).step_seconds + 1e-9


@pytest.mark.parametrize(("ratio", "gain"), [(0.6, 1.01), (0.9, 1.11), (1.2, 1.2)])
def test_equal_layers_gain_what_an_independent_simulation_has_found(ratio, gain):
    # 24 layers of F = I = W, one message a layer, against the usual order with a message a layer.
    layers, link = equal_layers(ratio, 24)
    usual = simulate(conventional(layers, 1), layers, link).step_seconds
    found = simulate(search_scattered(layers, link, bucket_bytes=1), layers, link).step_seconds
    assert usual / found == pytest.approx(gain, abs=0.015)


def test_what_is_asked_for_is_kept():
    layers, link = equal_layers(0.9)
    plan = search_scattered(layers, link, bucket_bytes=6_000_000, reverse_first=3)
    assert plan.deferred == (0, 1, 2)
    assert [len(bucket) for bucket in plan.buckets] == [2, 2, 2, 2, 1, 2, 1]
