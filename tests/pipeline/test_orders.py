"""Orders that are given: every forward and backward once, a backward after its forward."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.pipeline import orders as orders_module
from lightning_gpufeed.pipeline.orders import along_a_v, alternating, breadth_first, depth_first, groups
from tests.pipeline.cases import shapes


def test_the_examples_run():
    assert doctest.testmod(orders_module).failed == 0


@given(st.integers(1, 20), st.integers(1, 200))
def test_groups_are_as_many_microbatches_as_ranks_or_a_few_more(num_ranks, num_microbatches):
    found = groups(num_ranks, num_microbatches)
    assert [i for group in found for i in group] == list(range(num_microbatches))
    sizes = {len(group) for group in found}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(num_ranks, num_microbatches)
    assert max(sizes) < 2 * num_ranks


@given(shapes(most=600), st.integers(0, 30))
def test_every_forward_and_backward_comes_once_and_in_the_order_of_microbatches(shape, num_ahead):
    num_ranks, num_microbatches, num_virtual = shape
    stages = list(range(1, 1 + num_ranks * num_virtual, num_ranks))
    of_v = [num_ranks - 1, num_ranks]
    orders = [
        (stages, breadth_first(stages, num_microbatches, "B")),
        (stages, depth_first(stages, num_microbatches, "B")),
        (stages, alternating(stages, num_ranks, num_microbatches, "B", num_ahead)),
        (of_v, along_a_v(num_ranks - 1, num_ranks, num_microbatches)),
    ]
    for owned, order in orders:
        backward = order[-1].kind
        for stage in owned:
            for kind in ("F", backward):
                found = [one.microbatch for one in order if (one.stage, one.kind) == (stage, kind)]
                assert found == list(range(num_microbatches))
        assert len(order) == 2 * len(owned) * num_microbatches
        places = {action: place for place, action in enumerate(order)}
        assert all(
            places[stage, "F", i] < places[stage, backward, i] for stage in owned for i in range(num_microbatches)
        )


@pytest.mark.parametrize(("num_ahead", "most"), [(0, 1), (1, 2), (5, 6), (9, 6)])
def test_forwards_that_go_ahead_are_the_activations_that_are_held(num_ahead, most):
    held = peak = 0
    for action in alternating([0], 4, 6, "B", num_ahead):
        held += 1 if action.kind == "F" else -1
        peak = max(peak, held)
    assert peak == most
