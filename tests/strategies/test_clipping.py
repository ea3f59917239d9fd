from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn, optim

from lightning_gpufeed.strategies.clipping import clipped_on_arrival
from lightning_gpufeed.sync.clipped_session import ClippedGradientSync
from tests.sync.clipped_worker import PLANS
from tests.sync.one_rank import one_rank


class OwnNorm(Precision):
    """Clips in a way of its own."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Not at all."""


@pytest.fixture
def sync():
    with one_rank() as ranks:
        sync = ClippedGradientSync(nn.Linear(2, 2), ranks, PLANS["small messages"])
        yield sync
        sync.close()


@pytest.mark.parametrize("precision", [Precision(), MixedPrecision("bf16-mixed", "cpu")], ids=["32", "bf16"])
def test_usual_ways_are_lent_and_given_back(sync, precision):
    before = dict(vars(precision))
    with clipped_on_arrival(precision, sync):
        assert {"clip_grad_by_norm", "clip_grad_by_value"} <= set(vars(precision))
    assert vars(precision) == before


def test_usual_ways_are_given_back_after_an_error(sync):
    precision = Precision()
    with pytest.raises(ZeroDivisionError), clipped_on_arrival(precision, sync):
        raise ZeroDivisionError
    assert not vars(precision)


def test_a_way_of_a_class_of_its_own_is_left_alone(sync):
    precision = OwnNorm()
    with clipped_on_arrival(precision, sync):
        assert set(vars(precision)) == {"clip_grad_by_value"}


def test_a_way_that_somebody_has_put_in_place_stays(sync):
    precision, clipped = Precision(), []
    precision.clip_grad_by_norm = lambda optimizer, clip_val: clipped.append(clip_val)
    with clipped_on_arrival(precision, sync):
        precision.clip_gradients(optim.SGD(sync.model.parameters(), 0.1), 0.5)
    precision.clip_gradients(optim.SGD(sync.model.parameters(), 0.1), 0.7)
    assert clipped == [0.5, 0.7]
