"""Messages: every byte in one, nothing sent before it is ready, and the urgent before the others."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpufeed.sync.costs import LinkCosts
from lightning_gpufeed.sync.issue import IssueRule, merged
from lightning_gpufeed.sync.plan import Piece, SyncPlan, validate
from lightning_gpufeed.sync.simulate import StepModel, simulate
from tests.sync.models import links, models_with_plans

K = 1024
rules = st.builds(IssueRule, st.integers(1, 10_000), st.booleans())


def sizes_of(layers):
    return [layer.gradient_bytes for layer in layers]


def written(buckets):
    return str(SyncPlan((), tuple(buckets))).removeprefix("barrier; -; ")


@given(models_with_plans(), links, rules)
def test_every_byte_is_in_one_message(case, link, rule):
    layers, plan = case
    ready = StepModel(layers, link).ready_seconds(plan.backward)
    buckets = rule.buckets(ready, sizes_of(layers), link, plan.cross_iteration)
    validate(SyncPlan(plan.backward, tuple(buckets), plan.cross_iteration), layers)
    assert all(sum(piece.num_bytes for piece in bucket) <= rule.most_bytes for bucket in buckets)


@given(models_with_plans(), st.sampled_from([100.0, 10_000.0, float("inf")]))
def test_for_a_link_without_latency_no_other_messages_are_faster(case, rate):
    layers, plan = case
    link = LinkCosts(0.0, rate)
    assume(any(sizes_of(layers)))
    ready = StepModel(layers, link).ready_seconds(plan.backward)
    buckets = IssueRule(sum(sizes_of(layers)), True).buckets(ready, sizes_of(layers), link, plan.cross_iteration)
    ruled = SyncPlan(plan.backward, tuple(buckets), plan.cross_iteration)
    # Pieces end at multiples of 512 bytes, so up to that much is not sent before each of the more urgent gradients.
    most = simulate(plan, layers, link).step_seconds + link.seconds(512 * len(layers))
    assert simulate(ruled, layers, link).step_seconds <= most + 1e-9


# Three gradients of 4 KiB, the last layer's ready first; a KiB takes a second.
@pytest.mark.parametrize(
    ("ready", "rule", "is_cross", "messages"),
    [
        # the urgent interrupt, and the others go on where they were
        ([4.0, 2.0, 0.0], IssueRule(99 * K, True), True, "2:0-2048 1:0-2048 0:0-4096 1:2048-4096 2:2048-4096"),
        (
            [4.0, 2.0, 0.0],
            IssueRule(2 * K, True),
            True,
            "2:0-2048 1:0-2048 0:0-2048 0:2048-4096 1:2048-4096 2:2048-4096",
        ),
        ([0.0, 2.0, 4.0], IssueRule(99 * K, True), True, "0:0-4096 1:0-4096 2:0-4096"),  # nothing urgent comes later
        ([9.0, 5.0, 0.0], IssueRule(99 * K, True), True, "2:0-4096 1:0-4096 0:0-4096"),
        # without a forward to be early for there is no hurry
        ([4.0, 2.0, 0.0], IssueRule(99 * K, True), False, "2:0-4096 1:0-4096 0:0-4096"),
        # messages of a size hold what is ready when they start
        ([4.0, 2.0, 0.0], IssueRule(99 * K, False), True, "2:0-4096 0:0-4096+1:0-4096"),
        (
            [4.0, 2.0, 0.0],
            IssueRule(3 * K, False),
            True,
            "2:0-3072 1:0-3072 0:0-3072 0:3072-4096+1:3072-4096+2:3072-4096",
        ),
    ],
)
def test_messages_are_those_that_are_written_down(ready, rule, is_cross, messages):
    assert written(rule.buckets(ready, [4 * K] * 3, LinkCosts(0.0, K), is_cross)) == messages


def test_with_latency_nothing_is_begun_that_the_urgent_would_cut_at_once():
    # half a second is left until layer 0 is ready, and a message takes one however small it is
    buckets = IssueRule(99 * K, True).buckets([0.5, 0.0], [K, K], LinkCosts(1.0, K), True)
    assert written(buckets) == "0:0-1024 1:0-1024"


def test_layers_without_gradients_are_in_no_message():
    assert IssueRule(K, False).buckets([0.0, 0.0], [0, 0], LinkCosts(0.0, K), True) == []


def test_neighbours_are_put_together_while_nothing_gets_worse():
    buckets = [(Piece(1, 0, 4),), (Piece(1, 4, 8),), (Piece(0, 0, 8),)]
    assert merged(buckets, 100, lambda some: (0, 0)) == [(Piece(1, 0, 8), Piece(0, 0, 8))]
    assert merged(buckets, 8, lambda some: (0, 0)) == [(Piece(1, 0, 8),), (Piece(0, 0, 8),)]
    assert merged(buckets, 100, lambda some: (-len(some), 0)) == buckets
    assert merged([], 100, lambda some: (0, 0)) == []
