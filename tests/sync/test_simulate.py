"""The steady state of a step, against a device and a link that are followed event by event."""

from __future__ import annotations

import doctest
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.sync import simulate as simulate_module
from lightning_gpufeed.sync.plan import SyncPlan, conventional, reverse_first_k
from lightning_gpufeed.sync.simulate import simulate
from tests.sync.models import equal_layers, links, models_with_plans


def followed_step(plan, layers, link, num_steps=40):
    """Follow device and link from a cold start, step after step; give the mean of the later half of the steps."""
    costs = {"I": lambda one: one.input_grad_seconds, "W": lambda one: one.weight_grad_seconds}
    device = free = 0.0
    share = 0.5 if plan.is_scattered else 1.0
    arrived = [0.0] * len(layers)
    ends = []
    for _ in range(num_steps):
        if not plan.cross_iteration:
            device = max([device, *arrived])
        for i, layer in enumerate(layers):
            device = max(device, arrived[i]) + layer.forward_seconds
        ready = {}
        for kind, i in plan.backward:
            device += sum(costs[part](layers[i]) for part in ("IW" if kind == "B" else kind))
            if kind != "I":
                ready[i] = device
        for bucket in plan.buckets:
            free = max([free, *(ready[piece.layer] for piece in bucket)])
            free += share * link.seconds(sum(piece.num_bytes for piece in bucket))
            for piece in bucket:
                arrived[piece.layer] = free
        if plan.is_scattered and plan.buckets:
            device = free = max(device, free) + link.latency_seconds  # the norm
            for number in plan.gathers:
                free += share * link.seconds(sum(piece.num_bytes for piece in plan.buckets[number]))
                for piece in plan.buckets[number]:
                    arrived[piece.layer] = free
        ends.append(max([device, *arrived]) if not plan.cross_iteration else device)
    half = num_steps // 2
    return (ends[-1] - ends[-1 - half]) / half


def test_the_examples_run():
    assert doctest.testmod(simulate_module).failed == 0


@given(models_with_plans(), links)
def test_a_step_is_as_long_as_it_is_event_by_event(case, link):
    layers, plan = case
    assert simulate(plan, layers, link).step_seconds == pytest.approx(followed_step(plan, layers, link))


@given(models_with_plans(), links)
def test_no_step_beats_the_bound_or_the_path_of_one_gradient(case, link):
    layers, plan = case
    timeline = simulate(plan, layers, link)
    least = timeline.step_seconds + 1e-9
    assert timeline.bound_seconds <= least
    backward = {"I": 0.0, "W": 0.0, "B": 0.0}
    clock, ready = 0.0, {}
    for kind, i in plan.backward:
        backward = {"I": layers[i].input_grad_seconds, "W": layers[i].weight_grad_seconds}
        clock += backward["I"] + backward["W"] if kind == "B" else backward[kind]
        if kind != "I":
            ready[i] = clock
    for bucket in plan.buckets:
        seconds = link.seconds(sum(piece.num_bytes for piece in bucket))
        for piece in bucket:
            after = layers[piece.layer :] if plan.cross_iteration else layers
            assert ready[piece.layer] + seconds + sum(one.forward_seconds for one in after) <= least


@given(models_with_plans(), links)
def test_going_on_before_all_has_arrived_is_never_slower(case, link):
    layers, plan = case
    crossing, waiting = (
        simulate(SyncPlan(plan.backward, plan.buckets, cross), layers, link).step_seconds for cross in (True, False)
    )
    assert crossing <= waiting


@given(models_with_plans(), links)
def test_spans_are_a_step_that_repeats(case, link):
    layers, plan = case
    timeline = simulate(plan, layers, link)
    device = [span for span in timeline.spans if span.lane == "device"]
    sent = [span for span in timeline.spans if span.lane == "link"]
    assert len(device) == len(layers) + len(plan.backward)
    assert len(sent) == len(plan.buckets) * (2 if plan.is_scattered else 1)
    for spans in (device, sent):
        for before, after in pairwise(spans):
            assert before.end <= after.begin + 1e-9
    assert device[0].begin >= 0
    assert device[-1].end == pytest.approx(timeline.step_seconds)
    assert sum(span.end - span.begin for span in device) == pytest.approx(timeline.compute_seconds)
    if sent:  # the link is done before it is needed again
        assert sent[-1].end <= sent[0].begin + timeline.step_seconds + 1e-9
    done = {i: span.end for span in device for i in span.layers if span.phase in ("W", "B")}
    begun = {span.layers[0]: span.begin for span in device if span.phase == "F"}
    for span in sent:
        for i in span.layers:
            assert done[i] <= span.begin + 1e-9
            assert span.end <= begun[i if plan.cross_iteration else 0] + timeline.step_seconds + 1e-9


def test_with_the_norm_between_them_half_of_each_message_is_hidden_by_forward():
    # F = I = W = 10 s a layer, 12 layers, a link as slow as all compute: 12 messages of 30 s, in halves of 15 s.
    layers, link = equal_layers(1.0)
    usual = conventional(layers, 1)
    scattered = SyncPlan(usual.backward, usual.buckets, True, True)
    seconds = [simulate(plan, layers, link).step_seconds for plan in (usual, scattered)]
    # The second layer's gradient comes at 220 s, and the first layer's half is sent behind its half; in forward
    # halves follow each other, and the last layer comes after the last of them.
    assert seconds == pytest.approx([20 + 12 * 30 + 120, 220 + 2 * 15 + 12 * 15 + 10])


@given(models_with_plans(), links)
def test_idle_is_what_is_left_of_the_step(case, link):
    layers, plan = case
    timeline = simulate(plan, layers, link)
    assert timeline.exposed_seconds == pytest.approx(timeline.step_seconds - sum(one.compute_seconds for one in layers))
    assert timeline.link_idle_seconds >= -1e-9


# Twelve equal layers: what the link takes as a share of compute, the bound, the step with the finest buckets of DDP,
# the best reverse first-k.
@pytest.mark.parametrize(
    ("ratio", "bound", "finest", "reverse", "k"),
    [
        (0.3, 350, 359, 350, 2),
        (0.6, 350, 376, 350, 10),
        (0.9, 350, 464, 412, 6),
        (1.2, 432, 572, 498, 8),
        (2.4, 864, 1004, 904, 10),
    ],
)
def test_twelve_equal_layers_take_what_is_known(ratio, bound, finest, reverse, k):
    layers, link = equal_layers(ratio)
    usual = simulate(conventional(layers, 1), layers, link)
    assert usual.bound_seconds == pytest.approx(bound)
    assert usual.step_seconds == pytest.approx(finest)
    steps = [
        simulate(reverse_first_k(layers, k, 1, is_weight_first=True), layers, link).step_seconds for k in range(13)
    ]
    assert min(steps) == pytest.approx(reverse)
    assert steps[k] == pytest.approx(reverse)


@pytest.mark.parametrize("ratio", [0.3, 0.9, 2.4])
def test_going_on_early_in_the_usual_order_gains_nothing(ratio):
    layers, link = equal_layers(ratio)
    usual = conventional(layers, 1)
    early = SyncPlan(usual.backward, usual.buckets, cross_iteration=True)
    steps = [simulate(plan, layers, link).step_seconds for plan in (usual, early)]
    assert steps[0] == pytest.approx(steps[1])


@given(links, st.booleans())
def test_a_model_without_layers_takes_no_time(link, cross):
    timeline = simulate(SyncPlan((), (), cross), [], link)
    assert (timeline.step_seconds, timeline.spans) == (0.0, ())
