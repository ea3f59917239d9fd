"""What was logged in microbatches becomes what the whole batch would have logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MeanMetric

from lightning_gpufeed.recover.logged import (
    LogCall,
    combine,
    combine_calls,
    find_rule,
    find_rules,
    size_key,
    usual_rule,
)

TOLERANCE = 1e-3
VALUES: dict[str, Any] = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
}


def shares(sizes: list[int]) -> list[float]:
    return [size / sum(sizes) for size in sizes]


def log(key: str, value: Any, reduce_name: str = "mean", batch_size: int | None = None) -> LogCall:
    return LogCall(key, torch.tensor(value) if isinstance(value, float | int) else value, reduce_name, batch_size)


def rows(calls: list[LogCall]) -> list[tuple[str, float, int | None]]:
    return [(call.key, round(float(call.value), 5), call.batch_size) for call in calls]


# One value ---------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), rule=st.sampled_from(list(VALUES)))
@settings(max_examples=40)
def test_values_of_parts_give_that_of_the_whole(sizes: list[int], rule: Any) -> None:
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(sum(sizes)))
    got = combine([VALUES[rule](part) for part in x.split(sizes)], shares(sizes), rule)
    # float32 sums of up to 54 numbers near 1 in another order
    torch.testing.assert_close(got, VALUES[rule](x), rtol=1e-5, atol=1e-5)


@given(value=st.floats(width=32, allow_nan=False), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=40)
def test_a_value_that_is_the_same_in_all_stays_the_same_to_the_last_bit(value: float, sizes: list[int]) -> None:
    parts = [torch.tensor(value)] * len(sizes)
    for rule in ("mean", "max", "min"):
        assert torch.equal(combine(parts, shares(sizes), rule), torch.tensor(value))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("rule", ["sum", "max", "min"])
def test_the_type_stays(dtype, rule):
    parts = [torch.tensor(3, dtype=dtype), torch.tensor(5, dtype=dtype)]
    got = combine(parts, [0.5, 0.5], rule)
    assert (got.dtype, got.item()) == (dtype, {"sum": 8, "max": 5, "min": 3}[rule])


def test_a_mean_of_half_precision_is_computed_wider_and_one_of_whole_numbers_is_a_fraction():
    large = torch.tensor(60000.0, dtype=torch.float16)
    assert combine([large, large - 64], [0.5, 0.5], "mean").item() == 59968.0
    assert combine([torch.tensor(1), torch.tensor(2)], [0.25, 0.75], "mean").item() == 1.75


def test_weights_need_not_add_up_to_one_and_no_graph_is_kept():
    parts = [torch.tensor(1.0, requires_grad=True) * 1, torch.tensor(4.0, requires_grad=True) * 1]
    got = combine(parts, [2.0, 4.0], "mean")
    assert (got.item(), got.requires_grad) == (3.0, False)


@pytest.mark.parametrize(("name", "rule"), [("sum", "sum"), ("max", "max"), ("min", "min"), ("mean", "mean")])
def test_a_value_is_taken_to_stand_for_a_batch_as_it_stands_for_an_epoch(name, rule):
    assert usual_rule(name) == rule


def test_an_own_function_of_the_user_is_taken_for_a_mean():
    assert usual_rule("my_reduction") == usual_rule("std") == "mean"


# Finding how -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usual", list(VALUES))
@pytest.mark.parametrize("rule", list(VALUES))
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=2), seed=st.integers(0, 50))
@settings(max_examples=10)
def test_the_rule_is_found_whatever_the_usual_one_is(rule: Any, usual: Any, sizes: list[int], seed: int) -> None:
    x = 1 + torch.rand(sum(sizes), generator=torch.Generator().manual_seed(seed))
    found = find_rule(VALUES[rule](x), [VALUES[rule](part) for part in x.split(sizes)], shares(sizes), usual, TOLERANCE)
    got = combine([VALUES[rule](part) for part in x.split(sizes)], shares(sizes), found)
    torch.testing.assert_close(got, VALUES[rule](x), rtol=TOLERANCE, atol=0)
    if "mean" in (rule, found):  # a mean of a few numbers may be as close to something else
        return
    assert found == rule


def test_the_usual_rule_is_preferred_where_several_fit():
    constant = torch.tensor(0.5)
    assert find_rule(constant, [constant, constant], [0.5, 0.5], "max", TOLERANCE) == "max"
    assert find_rule(constant, [constant, constant], [0.5, 0.5], "sum", TOLERANCE) == "mean"


def test_a_value_that_follows_in_no_way_has_no_rule():
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    assert find_rule(x.std(), [half.std() for half in x.split(8)], [0.5, 0.5], "mean", TOLERANCE) is None


def test_rounding_is_forgiven_and_more_is_not():
    parts = [torch.tensor(1.0), torch.tensor(3.0)]
    assert find_rule(torch.tensor(2.0005), parts, [0.5, 0.5], "mean", TOLERANCE) == "mean"
    assert find_rule(torch.tensor(2.1), parts, [0.5, 0.5], "mean", TOLERANCE) is None


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_infinite_values_are_compared_too(value):
    assert find_rule(torch.tensor(value), [torch.tensor(value), torch.tensor(1.0)], [0.5, 0.5], "mean", 0.1) == "mean"


def test_rules_are_found_for_each_key_with_those_that_have_none_and_those_that_are_open():
    whole = [log("loss", 2.0), log("hits", 7.0), log("std", 5.0), log("zero", 0.0), log("largest", 3.0, "max")]
    halves = [
        [log("loss", 1.0), log("hits", 3.0), log("std", 1.0), log("zero", 0.0), log("largest", 3.0)],
        [log("loss", 3.0), log("hits", 4.0), log("std", 1.5), log("zero", 0.0), log("largest", 2.0)],
    ]
    rules, unknown, still_open = find_rules(whole, halves, [0.5, 0.5], TOLERANCE)
    assert rules == {"loss": "mean", "hits": "sum", "std": "mean", "largest": "max"}
    assert (unknown, still_open) == (["std"], ["zero"])


@pytest.mark.parametrize(
    ("of_whole", "of_parts", "rule"), [(16, [8, 8], "sum"), (16, [9, 7], "sum"), (16, [16, 16], "max")]
)
def test_whether_a_batch_size_that_was_said_is_of_the_part_or_of_the_whole_is_found_too(of_whole, of_parts, rule):
    halves = [[log("loss", 1.0, batch_size=size)] for size in of_parts]
    rules, _, _ = find_rules([log("loss", 1.0, batch_size=of_whole)], halves, [0.5, 0.5], TOLERANCE)
    assert rules[size_key("loss")] == rule


def test_what_was_logged_several_times_or_not_by_every_part_is_left_to_the_usual_way():
    whole = [log("twice", 1.0), log("twice", 2.0), log("once", 1.0), log("never", 1.0)]
    halves = [[log("twice", 1.0), log("twice", 2.0), log("once", 1.0)], [log("twice", 1.0), log("twice", 2.0)]]
    rules, unknown, still_open = find_rules(whole, halves, [0.5, 0.5], TOLERANCE)
    assert (rules, unknown, still_open) == ({}, [], [])


def test_a_metric_that_was_logged_needs_no_rule():
    metric = MeanMetric()
    halves = [[log("mean", metric, batch_size=8)], [log("mean", metric, batch_size=8)]]
    rules, unknown, _ = find_rules([log("mean", metric, batch_size=16)], halves, [0.5, 0.5], TOLERANCE)
    assert (rules, unknown) == ({size_key("mean"): "sum"}, [])


# All calls of a batch ----------------------------------------------------------------------------------------


def test_each_value_is_logged_once_in_the_order_of_the_first_microbatch_that_has_it():
    microbatches = [
        [log("loss", 1.0), log("hits", 3.0, "sum")],
        [log("loss", 4.0), log("rare", 7.0), log("hits", 1.0, "sum")],
    ]
    assert rows(combine_calls(microbatches, [4, 2], [2 / 3, 1 / 3], {})) == [
        ("loss", 2.0, None),
        ("hits", 4.0, None),
        ("rare", 7.0, None),
    ]


def test_a_value_that_only_some_have_logged_is_weighted_among_those():
    microbatches = [[log("a", 1.0)], [log("b", 0.0)], [log("a", 4.0)]]
    assert rows(combine_calls(microbatches, [1, 7, 2], [0.1, 0.7, 0.2], {}))[0] == ("a", 3.0, None)


def test_a_rule_that_was_found_goes_before_the_usual_one():
    microbatches = [[log("x", 1.0, "sum")], [log("x", 3.0, "sum")]]
    assert rows(combine_calls(microbatches, [4, 4], [0.5, 0.5], {"x": "mean"})) == [("x", 2.0, None)]
    assert rows(combine_calls(microbatches, [4, 4], [0.5, 0.5], {"y": "mean"})) == [("x", 4.0, None)]


def test_values_of_the_same_key_in_one_pass_are_told_apart_by_their_order():
    microbatches = [[log("x", 1.0), log("x", 10.0)], [log("x", 3.0), log("x", 30.0)]]
    assert rows(combine_calls(microbatches, [4, 4], [0.5, 0.5], {})) == [("x", 2.0, None), ("x", 20.0, None)]


@pytest.mark.parametrize(
    ("sizes", "said", "expected"),
    [
        ([4, 4], [4, 4], 8),  # each its own samples
        ([5, 4], [5, 4], 9),
        ([4, 4], [30, 41], 71),  # tokens of each
        ([4, 4], [8, 8], 8),  # the batch's, known from elsewhere
        ([4, 4], [4, None], None),
        ([4, 4], [None, None], None),  # Lightning looks at the batch
    ],
)
def test_batch_sizes_that_were_said_add_up_if_they_are_those_of_the_parts(sizes, said, expected):
    microbatches = [[log("loss", 1.0, batch_size=size)] for size in said]
    assert rows(combine_calls(microbatches, sizes, [0.5, 0.5], {})) == [("loss", 1.0, expected)]


def test_a_rule_for_batch_sizes_goes_before_that():
    microbatches = [[log("loss", 1.0, batch_size=4)], [log("loss", 1.0, batch_size=4)]]
    assert rows(combine_calls(microbatches, [4, 4], [0.5, 0.5], {size_key("loss"): "max"})) == [("loss", 1.0, 4)]


def test_a_metric_is_logged_itself_with_all_else_that_was_given():
    metric, rest = MeanMetric(), (("fx", "mean", ()), {"on_step": True})
    microbatches = [[LogCall("mean", metric, "mean", 4, rest)], [LogCall("mean", metric, "mean", 4, rest)]]
    [call] = combine_calls(microbatches, [4, 4], [0.5, 0.5], {})
    assert call.value is metric
    assert call.rest is rest
    assert call.batch_size == 8


def test_nothing_logged_is_nothing():
    assert combine_calls([[], []], [4, 4], [0.5, 0.5], {}) == []
