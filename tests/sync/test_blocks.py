"""Blocks of layers: every layer in one, and an order of blocks is an order of layers."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.sync import blocks as blocks_module
from lightning_gpufeed.sync.blocks import block_costs, expanded, grouped
from lightning_gpufeed.sync.costs import LayerCosts
from lightning_gpufeed.sync.plan import Piece, SyncPlan, validate
from tests.sync.models import any_plan, models

LAYERS = [LayerCosts(f"layer{i}", 1.0, 1.0, 1.0, 8, is_deferrable=i != 2) for i in range(5)]
BLOCKS = [range(0, 1), range(1, 4), range(4, 5)]  # layer 2 cannot wait


def test_the_examples_run():
    assert doctest.testmod(blocks_module).failed == 0


@given(models, st.integers(1, 9))
def test_every_layer_is_in_one_block(layers, most):
    blocks = grouped(layers, most)
    assert [i for block in blocks for i in block] == list(range(len(layers)))
    assert len(blocks) <= most
    assert all(blocks)


@given(models, st.integers(1, 4))
def test_a_block_takes_as_long_as_its_layers(layers, most):
    as_blocks = [block_costs(layers, block) for block in grouped(layers, most)]
    for total in ("compute_seconds", "forward_seconds", "gradient_bytes"):
        assert sum(getattr(one, total) for one in as_blocks) == pytest.approx(
            sum(getattr(one, total) for one in layers)
        )


@given(models, st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_order_of_blocks_is_an_order_of_layers(layers, most, chance):
    blocks = grouped(layers, most)
    order = any_plan([block_costs(layers, block) for block in blocks], chance, True).backward
    pieces = tuple((Piece(i, 0, one.gradient_bytes),) for i, one in enumerate(layers) if one.gradient_bytes)
    validate(SyncPlan(tuple(expanded(order, blocks, layers)), pieces), layers)


@pytest.mark.parametrize(
    ("order", "layers_order"),
    [
        ("B2 B1 B0", "I4 W4 I3 W3 B2 I1 W1 I0 W0"),
        ("I2 W2 I1 W1 I0 W0", "I4 W4 I3 W3 B2 I1 W1 I0 W0"),
        ("I2 I1 I0 W0 W1 W2", "I4 I3 B2 I1 I0 W0 W1 W3 W4"),
        ("W2 I2 W1 I1 W0 I0", "W4 I4 W3 I3 B2 W1 I1 W0 I0"),
        ("I2 W1 W2 I1 B0", "I4 W3 I3 B2 W1 I1 W4 I0 W0"),  # the weights of a block need its inner input gradients
    ],
)
def test_an_order_of_blocks_is_the_layers_order_that_is_written_down(order, layers_order):
    backward = SyncPlan.parse(f"cross; {order}; -").backward
    assert " ".join(map(str, expanded(backward, BLOCKS, LAYERS))) == layers_order
