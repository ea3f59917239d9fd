"""Plans: every gradient computed and sent once, in the order asked for, and the same after a trip through text."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.sync import plan as plan_module
from lightning_gpufeed.sync.costs import LayerCosts
from lightning_gpufeed.sync.plan import SyncPlan, conventional, peak_deferred_bytes, reverse_first_k, validate
from tests.sync.models import models, models_with_plans

ABC = [LayerCosts(name, 1.0, 1.0, 1.0, gradient_bytes=8, deferred_bytes=10**i) for i, name in enumerate("abc")]
NORM = [ABC[0], LayerCosts("norm", 1.0, 1.0, 0.0, gradient_bytes=8, is_deferrable=False), ABC[2]]
BARE = [ABC[0], LayerCosts("relu", 1.0, 1.0, 0.0, gradient_bytes=0), ABC[2]]
GOOD = "cross; B2 I1 I0 W0 W1; 2:0-8 0:0-8 1:0-4 1:4-8"


def sent_bytes(plan, layers):
    """Give every byte of every piece, in order."""
    pieces = sorted(piece for bucket in plan.buckets for piece in bucket)
    assert all(0 <= piece.layer < len(layers) for piece in pieces)
    return [(piece.layer, byte) for piece in pieces for byte in range(piece.begin_byte, piece.end_byte)]


def test_the_examples_run():
    assert doctest.testmod(plan_module).failed == 0


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (conventional(ABC, 1), "barrier; B2 B1 B0; 2:0-8 1:0-8 0:0-8"),
        (conventional(ABC, 9), "barrier; B2 B1 B0; 2:0-8+1:0-8 0:0-8"),
        (conventional(ABC, 100), "barrier; B2 B1 B0; 2:0-8+1:0-8+0:0-8"),
        (conventional(BARE, 1), "barrier; B2 B1 B0; 2:0-8 0:0-8"),
        (conventional([], 1), "barrier; -; -"),
        (reverse_first_k(ABC, 0, 1), "cross; B2 B1 B0; 2:0-8 1:0-8 0:0-8"),
        (reverse_first_k(ABC, 3, 1), "cross; I2 I1 I0 W0 W1 W2; 0:0-8 1:0-8 2:0-8"),
        (reverse_first_k(ABC, 2, 100, False), "barrier; B2 I1 I0 W0 W1; 2:0-8 0:0-8+1:0-8"),
        (reverse_first_k(ABC, 1, 1, is_weight_first=True), "cross; W2 I2 W1 I1 I0 W0; 2:0-8 1:0-8 0:0-8"),
        (reverse_first_k(NORM, 2, 1), "cross; B2 B1 I0 W0; 2:0-8 1:0-8 0:0-8"),
        (reverse_first_k(BARE, 2, 1), "cross; B2 B1 I0 W0; 2:0-8 0:0-8"),
    ],
)
def test_plans_are_those_that_are_written_down(plan, text):
    assert str(plan) == text
    assert SyncPlan.parse(text) == plan


@given(models_with_plans())
def test_text_and_back_is_the_same_plan(case):
    _, plan = case
    assert SyncPlan.parse(str(plan)) == plan
    assert hash(SyncPlan.parse(str(plan))) == hash(plan)


@given(models, st.integers(1, 20_000), st.booleans(), st.booleans(), st.data())
def test_every_gradient_is_computed_and_every_byte_sent_once(layers, bucket_bytes, cross, weight_first, data):
    k = data.draw(st.integers(0, len(layers)))
    for plan in (
        conventional(layers, bucket_bytes),
        reverse_first_k(layers, k, bucket_bytes, cross, is_weight_first=weight_first),
    ):
        validate(plan, layers)
        done = [(part, i) for kind, i in plan.backward for part in ("IW" if kind == "B" else kind)]
        assert sorted(done) == sorted((part, i) for part in "IW" for i in range(len(layers)))
        assert sent_bytes(plan, layers) == [(i, b) for i, one in enumerate(layers) for b in range(one.gradient_bytes)]


@given(models_with_plans())
def test_every_plan_that_can_be_carried_out_is_accepted(case):
    layers, plan = case
    validate(plan, layers)
    assert len(plan.deferred) == len(set(plan.deferred))


@given(models_with_plans(), st.randoms(use_true_random=False))
def test_a_plan_that_lacks_or_repeats_something_is_refused(case, chance):
    layers, plan = case
    actions, buckets = list(plan.backward), list(plan.buckets)
    place = chance.randrange(len(actions))
    fewer, more = actions[:place] + actions[place + 1 :], [*actions, actions[place]]
    for wrong in (fewer, more):
        with pytest.raises(ScheduleError, match="expected"):
            validate(SyncPlan(tuple(wrong), plan.buckets, plan.cross_iteration), layers)
    if buckets:
        place = chance.randrange(len(buckets))
        for wrong in (buckets[:place] + buckets[place + 1 :], [*buckets, buckets[place]]):
            with pytest.raises(ScheduleError, match="expected"):
                validate(SyncPlan(plan.backward, tuple(wrong), plan.cross_iteration), layers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cross; B2 I1 I0 W0; 2:0-8 1:0-8 0:0-8", r"no W of layer 1 \(b\); expected W1 or B1"),
        ("cross; B2 B1 W0; 2:0-8 1:0-8 0:0-8", r"no I of layer 0 \(a\); expected I0 or B0"),
        ("cross; B2 B0 B1; 2:0-8 1:0-8 0:0-8", r"B0 needs the input gradient of layer 1 \(b\); expected I1 or B1"),
        ("cross; W1 B2 I1 B0; 2:0-8 1:0-8 0:0-8", r"W1 needs the input gradient of layer 2 \(c\)"),
        ("cross; B2 B1 W1 B0; 2:0-8 1:0-8 0:0-8", r"W1: expected each gradient of layer 1 \(b\) once"),
        ("cross; B3 B2 B1 B0; 2:0-8 1:0-8 0:0-8", r"B3: there is no layer 3; expected 0 to 2"),
        ("cross; B2 B1 B0; 2:0-8 1:0-8", r"Bytes 0 to 8 of layer 0 \(a\) are in no bucket; .* Add the piece 0:0-8"),
        ("cross; B2 B1 B0; 2:0-8 1:0-8 0:0-3 0:4-8", r"0:4-8: expected the piece to begin at byte 3"),
        ("cross; B2 B1 B0; 2:0-8 1:0-8 0:0-5 0:4-8", r"0:4-8: expected the piece to begin at byte 5"),
        ("cross; B2 B1 B0; 2:0-8 1:0-8 0:0-9", r"0:0-9: the gradient of layer 0 \(a\) has 8 bytes"),
        ("cross; B2 B1 B0; 2:0-8 1:0-8 0:0-8 0:8-8", r"0:8-8: .* with at least one"),
        ("cross; B2 B1 B0; 3:0-8 2:0-8 1:0-8 0:0-8", r"3:0-8: there is no layer 3; expected 0 to 2"),
    ],
)
def test_an_error_says_what_is_wrong_with_a_plan(text, message):
    with pytest.raises(ScheduleError, match=message):
        validate(SyncPlan.parse(text), ABC)


def test_an_error_says_that_a_layer_cannot_wait():
    plan = SyncPlan.parse("cross; B2 I1 W1 B0; 2:0-8 1:0-8 0:0-8")
    with pytest.raises(ScheduleError, match=r"I1: layer 1 \(norm\) has both gradients from one call; expected B1"):
        validate(plan, NORM)


def test_an_error_says_that_a_bucket_is_empty():
    plan = SyncPlan.parse(GOOD)
    with pytest.raises(ScheduleError, match="Bucket 4 has no piece"):
        validate(SyncPlan(plan.backward, (*plan.buckets, ()), True), ABC)


@pytest.mark.parametrize(
    ("actions", "peak"),
    [
        ("B2 B1 B0", 0),
        ("I2 W2 I1 W1 I0 W0", 0),
        ("W2 I2 W1 I1 W0 I0", 0),
        ("I2 I1 W1 W2 B0", 100),
        ("I2 I1 W2 W1 B0", 110),
        ("I2 I1 I0 W0 W1 W2", 110),
        ("I2 I1 I0 W1 W0 W2", 111),
        ("I2 B1 W2 I0 W0", 100),
        ("I2 I1 W2 I0 W1 W0", 110),
        ("B2 I1 I0 W1 W0", 11),
    ],
)
def test_what_waits_is_counted_from_input_to_weight_gradient(actions, peak):
    plan = SyncPlan.parse(f"cross; {actions}; 2:0-8 1:0-8 0:0-8")
    assert peak_deferred_bytes(plan.backward, ABC) == peak
    validate(plan, ABC, memory_cap_bytes=peak)
    if peak:
        with pytest.raises(ScheduleError, match=f"keep {peak} bytes alive; expected at most {peak - 1}"):
            validate(plan, ABC, memory_cap_bytes=peak - 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cross",
        "always; B0; 0:0-8",
        "cross; B0",
        "cross; B0; 0:0-8; 1:0-8",
        "cross; F0; 0:0-8",
        "cross; B; 0:0-8",
        "cross; B-1; 0:0-8",
        "cross; B0; 0",
        "cross; B0; 0:8",
        "cross; B0; 0:0-8+",
        "cross; B0; 0:-1-8",
    ],
)
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match="expected"):
        SyncPlan.parse(text)


@pytest.mark.parametrize("k", [-1, 4])
def test_k_outside_of_the_layers_is_refused(k):
    with pytest.raises(ValueError, match=f"k is {k}; expected 0 to 3"):
        reverse_first_k(ABC, k, 1)


def test_buckets_without_bytes_are_refused():
    with pytest.raises(ValueError, match="bucket_bytes is 0; expected at least 1"):
        conventional(ABC, 0)


def test_a_scattered_plan_gathers_what_forward_needs_first():
    plan = SyncPlan.parse("scatter; B2 B1 B0; 2:0-8+1:0-4 1:4-8 0:0-8")
    assert plan.cross_iteration
    assert plan.is_scattered
    assert plan.gathers == (2, 0, 1)
    assert SyncPlan.parse(str(plan)) == plan


def test_a_plan_that_is_scattered_and_does_not_cross_is_refused():
    crossing = SyncPlan.parse("scatter; B0; 0:0-8")
    plan = SyncPlan(crossing.backward, crossing.buckets, cross_iteration=False, is_scattered=True)
    with pytest.raises(ScheduleError, match="expected cross_iteration=True with it"):
        validate(plan, [LayerCosts("layer", 1.0, 1.0, 1.0, gradient_bytes=8)])
