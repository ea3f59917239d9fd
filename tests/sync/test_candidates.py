from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.sync.candidates import (
    PlanOptions,
    given_plan,
    plans_to_try,
    usual_plan,
)
from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.plan import conventional, peak_deferred_bytes, reverse_first_k, validate
from lightning_gpufeed.sync.simulate import simulate
from tests.contracts import exactly
from tests.sync.models import MEGABYTE, equal_layers, links, models

lates = st.sets(st.integers(0, 6))
options = st.builds(
    PlanOptions,
    st.one_of(st.just("auto"), st.integers(0, 1)),
    st.sampled_from(["auto", True, False]),
    st.one_of(st.just("auto"), st.integers(1, 7000)),
    st.sampled_from([None, None, 0, 7]),
)


def with_late(layers: list[LayerCosts], late: set[int]) -> tuple[list[LayerCosts], set[int]]:
    """As the tuner gives them: a late layer cannot wait."""
    late = {i for i in late if i < len(layers)}
    return [replace(layer, is_deferrable=False) if i in late else layer for i, layer in enumerate(layers)], late


@settings(max_examples=50)
@given(
    layers=models,
    link=links,
    options=options,
    late=lates,
    other=st.sampled_from([0.0, 3.0]),
    is_accumulating=st.booleans(),
    is_scattered=st.booleans(),
)
def test_every_candidate_can_be_carried_out_for_the_layers_as_they_are(
    layers, link, options, late, other, is_accumulating, is_scattered
):
    layers, late = with_late(layers, late)
    settings = {"other_seconds": other, "is_accumulating": is_accumulating, "is_scattered": is_scattered}
    found = plans_to_try(layers, link, options, late=late, **settings)
    assert found
    cap = options.memory_cap_bytes if options.reverse_first_k == "auto" else None
    for candidate in found:
        validate(candidate.plan, layers, cap)
        wanted = [True, False] if options.cross_iteration == "auto" else [options.cross_iteration]
        # Where no layer has a gradient to send there is nothing that could wait for the next forward.
        assert candidate.plan.cross_iteration in wanted or not candidate.plan.buckets
    texts = [str(candidate.plan) for candidate in found]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("late", [set(), {0}], ids=["on time", "late"])
def test_a_plan_crosses_where_that_is_asked_for_although_nothing_is_gained(late):
    layers = [LayerCosts("one", 0.0, 0.0, 0.0, 1)]
    found = plans_to_try(layers, LinkCosts(0.0, float("inf")), PlanOptions("auto", True), late=late)
    assert [(candidate.plan.cross_iteration, len(candidate.plan.buckets)) for candidate in found] == [(True, 1)]


@settings(max_examples=50)
@given(layers=models, link=links, options=options, late=lates)
def test_late_layers_are_sent_last_each_in_one_message_of_its_own(layers, link, options, late):
    layers, late = with_late(layers, late)
    for candidate in plans_to_try(layers, link, options, late=late):
        of_late = [b for b in candidate.plan.buckets if any(piece.layer in late for piece in b)]
        sent = [i for i in sorted(late, reverse=True) if layers[i].gradient_bytes]
        assert of_late == list(candidate.plan.buckets[len(candidate.plan.buckets) - len(of_late) :])
        assert of_late == [((i, 0, layers[i].gradient_bytes),) for i in sent]
        assert not late & set(candidate.plan.deferred)


@settings(max_examples=60)
@given(layers=models, link=links, cross=st.sampled_from(["auto", False]), size=st.sampled_from(["auto", 100, 5000]))
def test_the_usual_plan_comes_first(layers, link, cross, size):
    found = plans_to_try(layers, link, PlanOptions("auto", cross, size))
    expected = usual_plan(layers) if size == "auto" else conventional(layers, size)
    assert found[0].plan == expected


@settings(max_examples=60)
@given(layers=models, link=links, options=options, other=st.sampled_from([0.0, 3.0]))
def test_the_best_plan_comes_last(layers, link, options, other):
    found = plans_to_try(layers, link, options, other_seconds=other)
    assert found[-1].seconds == min(candidate.seconds for candidate in found)


def test_what_is_given_is_kept():
    layers, link = equal_layers(1.0)
    (found,) = plans_to_try(layers, link, PlanOptions(3, True, 1))
    assert found.plan == reverse_first_k(layers, 3, 1, cross_iteration=True)
    (found,) = plans_to_try(layers, link, PlanOptions(3, False, "auto"))
    assert sorted(found.plan.deferred) == [0, 1, 2]
    assert not found.plan.cross_iteration


def test_what_crosses_is_scattered_where_the_norm_has_to_be_known():
    layers, link = equal_layers(1.2)
    usual, *_, best = plans_to_try(layers, link, PlanOptions(), is_scattered=True)
    assert (usual.plan.is_scattered, best.plan.is_scattered) == (False, True)
    assert best.seconds < usual.seconds
    (found,) = plans_to_try(layers, link, PlanOptions(3, "auto", 1), is_scattered=True)
    assert found.plan == replace(reverse_first_k(layers, 3, 1), is_scattered=True)
    assert given_plan(layers, PlanOptions(3, True, 1), is_scattered=True) == found.plan
    assert not any(one.plan.is_scattered for one in plans_to_try(layers, link, PlanOptions("auto", False, "auto")))


def test_nothing_is_scattered_where_that_gains_nothing_by_prediction():
    layers, link = equal_layers(0.01)
    assert not any(one.plan.is_scattered for one in plans_to_try(layers, link, PlanOptions(), is_scattered=True))


def test_the_usual_plan_is_not_tried_where_the_options_exclude_it():
    layers, link = equal_layers(1.0)
    assert all(one.plan.cross_iteration for one in plans_to_try(layers, link, PlanOptions("auto", True, "auto")))


def test_a_found_plan_is_predicted_to_be_faster_where_there_is_something_to_gain():
    layers, link = equal_layers(1.0)
    found = plans_to_try(layers, link, PlanOptions())
    assert len(found) > 1
    assert found[-1].seconds < 0.95 * found[0].seconds


def test_a_memory_cap_holds_for_what_is_found():
    layers, link = equal_layers(1.0)
    found = plans_to_try(layers, link, PlanOptions(memory_cap_bytes=200))
    assert all(peak_deferred_bytes(one.plan.backward, layers) <= 200 for one in found)


def test_seconds_are_those_of_the_whole_step():
    layers, link = equal_layers(1.0)
    without = plans_to_try(layers, link, PlanOptions("auto", False, MEGABYTE))[0]
    assert without.seconds == pytest.approx(simulate(without.plan, layers, link).step_seconds)  # sums in another order
    with_other = plans_to_try(layers, link, PlanOptions("auto", False, MEGABYTE), other_seconds=7.0)[0]
    assert with_other.seconds == pytest.approx(without.seconds + 7.0)


@given(layers=models, late=lates, k=st.integers(0, 7), cross=st.booleans(), size=st.integers(1, 7000))
def test_a_given_plan_is_reverse_first_k_and_can_be_carried_out(layers, late, k, cross, size):
    layers, late = with_late(layers, late)
    options = PlanOptions(k, cross, size)
    plan = given_plan(layers, options, late)
    validate(plan, layers)
    assert plan.cross_iteration == cross
    assert set(plan.deferred) <= set(range(k)) - late
    if not late:
        assert plan == reverse_first_k(layers, min(k, len(layers)), size, cross)


def test_the_usual_plan_has_the_buckets_of_distributed_data_parallel():
    layers = [LayerCosts(f"layer{i}", 1.0, 1.0, 1.0, 15 << 20) for i in range(6)]
    layers[5:] = [LayerCosts("head", 1.0, 1.0, 1.0, size) for size in (1 << 19, 1 << 18, 1 << 18)]
    plan = usual_plan(layers)
    validate(plan, layers)
    assert [[piece.layer for piece in bucket] for bucket in plan.buckets] == [[7, 6, 5], [4, 3], [2, 1], [0]]
    assert plan.backward == conventional(layers, 1).backward
    assert not plan.cross_iteration


@given(layers=models, late=lates)
def test_the_usual_plan_sends_late_layers_last(layers, late):
    layers, late = with_late(layers, late)
    plan = usual_plan(layers, late)
    validate(plan, layers)
    sent = [piece.layer for bucket in plan.buckets for piece in bucket]
    num_late = sum(layers[i].gradient_bytes > 0 for i in late)
    assert set(sent[len(sent) - num_late :]) == {i for i in late if layers[i].gradient_bytes}


def test_small_messages_that_were_asked_for_do_not_make_planning_endless():
    layers, link = equal_layers(1.0)
    found = plans_to_try(layers, link, PlanOptions(bucket_bytes=1))
    assert len(found[-1].plan.buckets) < 1100  # up to two for each of 512


def test_a_k_that_is_too_large_says_how_many_layers_there_are():
    message = "reverse_first_k is 4; expected at most 3, the number of layers with parameters."
    with pytest.raises(ValueError, match=exactly(message)):
        PlanOptions(4).check(3)
    for k in (0, 3, "auto"):
        PlanOptions(k).check(3)


@pytest.mark.parametrize("size", ["auto", 1])
def test_all_layers_that_are_not_frozen_wait_if_more_were_asked_for(size):
    layers, link = equal_layers(1.0, 3)
    (found,) = plans_to_try(layers, link, PlanOptions(5, True, size))
    assert sorted(found.plan.deferred) == [0, 1, 2]


def test_a_step_without_time_and_bytes_has_a_plan():
    layers = [LayerCosts("layer", 0.0, 0.0, 0.0, 0)]
    found = plans_to_try(layers, LinkCosts(0.0, float("inf")), PlanOptions())
    assert [one.plan.buckets for one in found] == [()]


WRONG = {
    "k below 0": ({"reverse_first_k": -1}, "reverse_first_k is -1; expected a whole number from 0 on, or 'auto'."),
    "k a share": ({"reverse_first_k": 0.5}, "reverse_first_k is 0.5; expected a whole number from 0 on, or 'auto'."),
    "k a word": ({"reverse_first_k": "all"}, "reverse_first_k is 'all'; expected a whole number from 0 on, or 'auto'."),
    "k a bool": ({"reverse_first_k": True}, "reverse_first_k is True; expected a whole number from 0 on, or 'auto'."),
    "no bytes": ({"bucket_bytes": 0}, "bucket_bytes is 0; expected a whole number from 1 on, or 'auto'."),
    "bytes of None": ({"bucket_bytes": None}, "bucket_bytes is None; expected a whole number from 1 on, or 'auto'."),
    "cross a number": ({"cross_iteration": 1}, "cross_iteration is 1; expected True, False or 'auto'."),
    "cross a word": ({"cross_iteration": "yes"}, "cross_iteration is 'yes'; expected True, False or 'auto'."),
    "cap below 0": (
        {"memory_cap_bytes": -5},
        "memory_cap_bytes is -5; expected a whole number from 0 on, or None for no limit.",
    ),
    "cap auto": (
        {"memory_cap_bytes": "auto"},
        "memory_cap_bytes is 'auto'; expected a whole number from 0 on, or None for no limit.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_says_what_was_given_and_what_is_expected(name):
    arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=exactly(message)):
        PlanOptions(**arguments)


def test_options_are_given_when_nothing_is_left_to_be_found():
    assert PlanOptions(0, False, 1).is_given
    assert not PlanOptions(0, False).is_given
    assert not PlanOptions(0, "auto", 1).is_given
    assert not PlanOptions("auto", False, MEGABYTE).is_given
