"""Steps as they are drawn."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.sync import draw as draw_module
from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.draw import draw
from lightning_gpufeed.sync.plan import SyncPlan, conventional, reverse_first_k
from lightning_gpufeed.sync.simulate import simulate
from tests.sync.models import links, models_with_plans

LAYERS = [LayerCosts(f"layer{i}", 1.0, 1.0 if i else 0.0, 1.0, 8) for i in range(4)]
LINK = LinkCosts(0.0, 4.0)  # two seconds for a gradient


def drawn(plan, layers=LAYERS, link=LINK):
    """Draw with four columns to the second."""
    timeline = simulate(plan, layers, link)
    return draw(timeline, width=round(4 * timeline.step_seconds))


def test_the_examples_run():
    assert doctest.testmod(draw_module).failed == 0


@pytest.mark.parametrize(
    ("plan", "drawing"),
    [
        (
            conventional(LAYERS, 1),
            "device  ............F0--F1--F2--F3--B3------B2------B1------B0--\n"
            "link    ====0=======........................3=======2=======1===",
        ),
        (
            conventional(LAYERS, 16),
            "device  ....................F0--F1--F2--F3--B3------B2------B1------B0--\n"
            "link    ====1+0=============................................3+2=========",
        ),
        (
            reverse_first_k(LAYERS, 3, 1),
            "device  F0--....F1--....F2--F3--B3------I2--I1--W0--W1--W2--\n"
            "link    1=======2=======................3=======....0=======",
        ),
        (
            SyncPlan.parse("cross; W3 I3 W2 I2 B1 W0 I0; 3:0-4 2:0-4 1:0-8 0:0-8 3:4-8+2:4-8"),
            "device  ............F0--F1--F2--F3--W3--I3--W2--I2--B1------W0--\n"
            "link    ====0=======3+2=====............3===....2===........1===",
        ),
    ],
    ids=["conventional", "in-two-buckets", "reverse-first-3", "cut"],
)
def test_a_step_is_drawn_as_it_is(plan, drawing):
    assert drawn(plan) == drawing


@given(models_with_plans(), links, st.integers(1, 200))
def test_a_drawing_has_two_rows_of_the_width_that_was_asked_for(case, link, width):
    layers, plan = case
    rows = draw(simulate(plan, layers, link), width).split("\n")
    assert [len(row) for row in rows] == [8 + width] * 2
    assert [row[:8] for row in rows] == ["device  ", "link    "]


def test_a_step_of_no_time_is_idle():
    assert draw(simulate(SyncPlan((), ()), [], LINK), width=5) == "device  .....\nlink    ....."


def test_no_columns_are_refused():
    with pytest.raises(ValueError, match="width is 0; expected at least 1"):
        draw(simulate(SyncPlan((), ()), [], LINK), width=0)
