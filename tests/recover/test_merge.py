"""What the microbatches gave is put together to what the batch would have given, or refused."""

from __future__ import annotations

import copy
import enum
import math
import re
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.recover.merge import merge_values
from lightning_gpufeed.recover.split_batch import microbatch_sizes


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass(frozen=True)
class Record:
    image: Any
    label: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Metadata:
    """An object that is equal to no other."""

    def __repr__(self) -> str:
        return "Metadata"


class Odd:
    """An object that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None

    def __repr__(self) -> str:
        return "Odd"


def merge(*values: Any, sizes: list[int] | None = None, weights: list[float] | None = None) -> Any:
    sizes = sizes or [3] * (len(values) - 1) + [2]
    return merge_values(values, sizes, weights or [size / sum(sizes) for size in sizes])


# Tensors and arrays -----------------------------------------------------------------------------------------


def test_rows_are_put_together_in_order():
    assert merge(torch.arange(3), torch.arange(3, 5)).tolist() == [0, 1, 2, 3, 4]
    assert merge(np.arange(3), np.arange(3, 5)).tolist() == [0, 1, 2, 3, 4]


def test_rows_need_not_be_samples():
    assert merge(torch.zeros(7, 4), torch.zeros(0, 4), torch.zeros(5, 4)).shape == (12, 4)


def test_rows_keep_dtype_memory_format_and_gradient():
    parts = [torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last) for _ in range(2)]
    assert merge(*parts).is_contiguous(memory_format=torch.channels_last)
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    merged = merge(weight * 1, weight * 2)
    assert merged.dtype == torch.float16
    merged.sum().backward()
    assert weight.grad.tolist() == [3, 3]


@given(st.integers(1, 40), st.integers(1, 6), st.lists(st.integers(0, 3), max_size=2))
def test_any_tensor_cut_and_put_together_is_the_same(num_samples, number, shape):
    whole = torch.rand(num_samples, *shape)
    sizes = microbatch_sizes(num_samples, number)
    assert torch.equal(merge(*whole.split(sizes), sizes=sizes), whole)
    assert np.array_equal(merge(*np.split(whole.numpy(), np.cumsum(sizes)[:-1]), sizes=sizes), whole.numpy())


@pytest.mark.parametrize(
    "values",
    [
        (torch.zeros(2, 3), torch.zeros(2, 4)),
        (torch.zeros(2, 3), torch.zeros(2)),
        (torch.zeros(2), torch.zeros(())),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        (np.zeros((2, 3)), np.zeros((2, 4))),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (np.zeros(2), np.float64(3)),
        (torch.zeros(2), np.zeros(2)),
        (torch.zeros(2), None),
        (torch.tensor(2.0), 2.0),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
    ],
    ids=lambda values: " and ".join(
        f"{type(value).__name__} {getattr(value, 'dtype', '')}{tuple(getattr(value, 'shape', ()))}" for value in values
    ),
)
def test_rows_of_different_kinds_are_refused(values):
    with pytest.raises(ValueError, match=r"value\['x'\] is "):
        merge({"x": values[0]}, {"x": values[1]})


# Means ------------------------------------------------------------------------------------------------------


def test_a_number_is_the_weighted_mean():
    weights = [0.5, 0.25, 0.25]
    assert merge(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0), weights=weights).item() == 2.0
    assert merge(1.0, 2.0, 4.0, weights=weights) == 2.0
    assert merge(np.float32(1), np.float32(2), np.float32(4), weights=weights) == np.float32(2)
    assert merge(np.array(1.0), np.array(2.0), np.array(4.0), weights=weights) == np.array(2.0)
    assert merge(torch.tensor(1j), torch.tensor(2j), torch.tensor(4j), weights=weights).item() == 2j
    assert merge(0, 2.0, 4, weights=weights) == 1.5  # no sum yet, and one


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_a_mean_keeps_its_dtype_and_is_computed_in_a_wider_one(dtype):
    values = [torch.tensor(1.0).to(dtype)] * 3 + [torch.tensor(2.0).to(dtype)]
    merged = merge(*values, weights=[0.25] * 4)
    assert merged.dtype == dtype
    assert merged.float().item() == torch.tensor(1.25).to(dtype).float().item()


def test_a_mean_of_halves_is_not_rounded_at_every_value():
    values = [torch.tensor(1.0).half()] * 99 + [torch.tensor(2.0).half()]
    assert merge(*values, weights=[0.01] * 100).item() == torch.tensor(1.01).half().item()
    assert sum(value * torch.tensor(0.01).half() for value in values).item() != torch.tensor(1.01).half().item()


@given(
    st.floats(width=32, allow_nan=False),
    st.lists(st.floats(0.01, 1), min_size=2, max_size=7),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_values_that_are_all_equal_are_unchanged_to_the_last_bit(value, weights, dtype):
    same = torch.tensor(value).to(dtype)
    merged = merge(*(same.clone() for _ in weights), weights=weights)
    assert merged.dtype == dtype
    assert torch.equal(merged, same)
    assert merge(*(float(repr(value)) for _ in weights), weights=weights) == value


def test_what_is_no_number_stays_none_where_it_counts():
    assert math.isnan(merge(1.0, math.nan))
    assert math.isnan(merge(math.nan, float("nan")))
    assert merge(torch.tensor(1.0), torch.tensor(math.nan)).isnan()


def test_a_microbatch_without_weight_does_not_count():
    weights = [0.0, 0.25, 0.75]
    assert merge(math.nan, 4.0, 8.0, weights=weights) == 7.0
    assert merge(torch.tensor(math.nan), torch.tensor(4.0), torch.tensor(8.0), weights=weights).item() == 7.0
    assert merge(np.float64(math.nan), np.float64(4), np.float64(8), weights=weights) == 7.0
    assert merge(math.nan, 0.1, 0.1, weights=weights) == 0.1


def test_weights_are_shares_of_their_sum():
    assert merge(1.0, 3.0, weights=[3, 1]) == 1.5


def test_a_mean_keeps_its_graph():
    weight = torch.tensor(3.0, requires_grad=True)
    merge(weight * 1, weight * 5, weights=[0.75, 0.25]).backward()
    assert weight.grad.item() == 2.0


# What has no mean -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        3,
        True,
        "text",
        b"bytes",
        None,
        Colour.RED,
        torch.tensor(3),
        torch.tensor(True),
        np.int64(3),
        np.array("a"),
        torch.Size([2, 3]),
        torch.float16,
        frozenset("a"),
        range(3),
        int,
    ],
    ids=repr,
)
def test_what_is_equal_in_each_microbatch_is_that(value):
    merged = merge(value, copy.deepcopy(value), copy.deepcopy(value))
    assert type(merged) is type(value)
    assert merged == value


@pytest.mark.parametrize(
    "values",
    [
        (3, 4),
        (True, False),
        (1, True),
        (True, 0.5),
        ("a", "b"),
        ("a", None),
        (Colour.RED, Colour.BLUE),
        (torch.tensor(3), torch.tensor(4)),
        (torch.tensor(True), torch.tensor(False)),
        (np.int64(3), np.int64(4)),
        (np.array("a"), np.array("b")),
        (Metadata(), Metadata()),
        (Odd(), Odd()),
        (torch.Size([2, 3]), torch.Size([2, 4])),
    ],
    ids=repr,
)
def test_what_differs_and_has_no_mean_is_refused_by_its_path(values):
    with pytest.raises(ValueError, match=re.escape("value[0]['x']")):
        merge([{"x": values[0]}], [{"x": values[1]}])


def test_one_object_is_itself_whatever_it_is():
    for value in [Metadata(), Odd(), torch.rand(10), [1, 2, 3], {"x": torch.rand(3)}]:
        assert merge(value, value) is value


def test_a_single_value_is_itself():
    for value in [torch.rand(4), {"loss": torch.tensor(1.0)}, Odd(), None, [1]]:
        assert merge_values([value], [4], [1.0]) is value


# Containers -------------------------------------------------------------------------------------------------

CONTAINERS = {
    "dict": lambda x, y: {"image": x, "label": y},
    "OrderedDict": lambda x, y: OrderedDict(image=x, label=y),
    "UserDict": lambda x, y: UserDict(image=x, label=y),
    "defaultdict": lambda x, y: defaultdict(list, image=x, label=y),
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "NamedTuple": Pair,
    "dataclass": Record,
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_are_put_together_part_by_part(make):
    first, second = make(torch.arange(3), 1.0), make(torch.arange(3, 7), 2.0)
    merged = merge(first, second, sizes=[3, 4], weights=[0.5, 0.5])
    assert type(merged) is type(first)
    x, y = (
        (merged["image"], merged["label"])
        if hasattr(merged, "keys")
        else merged
        if isinstance(merged, list | tuple)
        else (merged.image, merged.label)
    )
    assert (x.tolist(), y) == (list(range(7)), 1.5)
    x, _ = (first.values() if hasattr(first, "keys") else first) if not isinstance(first, Record) else (first.image, 0)
    assert x.tolist() == [0, 1, 2]


def test_the_path_of_what_cannot_be_put_together_is_named():
    values = [{"deep": (Record({"x": number}, None),)} for number in (1, 2)]
    with pytest.raises(ValueError, match=re.escape("value['deep'][0].image['x'] is 1, 2; ")):
        merge(*values)


def test_other_entries_in_each_microbatch_are_refused():
    with pytest.raises(ValueError, match=re.escape("value['b'] is not there in each microbatch")):
        merge({"a": 1, "b": 2}, {"a": 1})
    with pytest.raises(ValueError, match=re.escape("value['b'] is not there in each microbatch")):
        merge({"a": 1}, {"a": 1, "b": 2})


def test_other_types_in_each_microbatch_are_refused():
    with pytest.raises(ValueError, match=r"value is .*; expected the same type"):
        merge([1], (1,))


# Lists and tuples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple])
def test_sequences_as_long_as_their_microbatches_hold_samples(kind):
    assert merge(kind("abc"), kind("de")) == kind("abcde")
    clouds = [torch.rand(2 + i, 3) for i in range(5)]
    merged = merge(kind(clouds[:3]), kind(clouds[3:]))
    assert type(merged) is kind
    assert all(now is then for now, then in zip(merged, clouds, strict=True))


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        (["a"], ["b"], 1),
        (["a"], ["a"], 1),
        ([0.5, 0.7], [0.5, 0.9], 2),
        ([1, 2], [1, 2], 2),
        ([torch.tensor(1.0), torch.tensor(2.0)], [torch.tensor(1.0), torch.tensor(3.0)], 2),
        ([torch.rand(4, 3), torch.rand(5, 3)], [torch.rand(2, 3), torch.rand(7, 3)], 2),
        ([{"name": "a"}, {"name": "b"}], [{"name": "c"}, {}], 2),
        (("a", "b"), ("c", "d"), 2),
        ((torch.rand(4, 3), torch.rand(5, 3)), (torch.rand(4, 2), torch.rand(5, 3)), 2),
    ],
    ids=[
        "one word",
        "the same word",
        "floats",
        "the same numbers",
        "tensors",
        "ragged tensors",
        "dicts",
        "tuples of other words",
        "tuples of tensors that do not go together",
    ],
)
def test_sequences_of_samples_in_microbatches_of_one_size_are_joined(first, second, size):
    merged = merge(first, second, sizes=[size, size])
    assert len(merged) == 2 * size
    assert all(now is then for now, then in zip(merged, [*first, *second], strict=True))


@pytest.mark.parametrize(
    ("kind", "size"), [(list, 3), (tuple, 3), (list, 2), (tuple, 2)], ids=["list", "tuple", "short list", "short tuple"]
)
def test_fields_are_put_together_each_for_itself(kind, size):
    first, second = (kind([torch.rand(size, 3), torch.arange(size)]) for _ in range(2))
    merged = merge(first, second, sizes=[size, size])
    assert [tuple(field.shape) for field in merged] == [(2 * size, 3), (2 * size,)]
    assert type(merged) is kind


def test_a_tuple_of_numbers_as_long_as_the_microbatch_is_no_list_of_samples():
    assert merge((1.0, 0.5), (2.0, 0.5), sizes=[2, 2]) == (1.5, 0.5)
    assert merge((224, 224), (200 + 24, 224), sizes=[2, 2]) == (224, 224)
    loss, accuracy = merge((torch.tensor(1.0), 0.5), (torch.tensor(3.0), 0.7), sizes=[2, 2])
    assert (loss.item(), accuracy) == (2.0, 0.6)


@pytest.mark.parametrize("size", [1, 2])
def test_a_tuple_of_predictions_and_targets_is_one_of_fields_at_any_size(size):
    fields = [(torch.rand(size), torch.rand(size)) for _ in range(2)]
    assert [len(field) for field in merge(*fields, sizes=[size, size])] == [2 * size] * 2
    masked = [(torch.rand(rows), torch.rand(rows)) for rows in (5, 7)]
    assert [len(field) for field in merge(*masked, sizes=[2, 2])] == [12, 12]
    assert len(merge((torch.rand(1, 4),), (torch.rand(1, 4),), sizes=[1, 1])[0]) == 2


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        ([torch.rand(2, 3), torch.rand(2, 3)], [torch.rand(2, 3), torch.rand(2, 3)], 2),
        ([torch.rand(1, 3)], [torch.rand(1, 3)], 1),
        ((torch.rand(3, 4), torch.rand(3, 4)), (torch.rand(3, 4), torch.rand(3, 4)), 2),
        (("a", "b"), ("a", *"b"), 2),
    ],
    ids=["rows of the size", "one row", "images of one shape", "the same words"],
)
def test_what_may_be_samples_or_fields_is_refused(first, second, size):
    with pytest.raises(ValueError, match=re.escape(f"value['x'] is a {type(first).__name__} of {size} from each")):
        merge({"x": first}, {"x": second}, sizes=[size, size])


def test_samples_inside_of_what_is_ambiguous_are_refused_too():
    values = [tuple({"x": [torch.rand(2, 3), torch.rand(2, 3)]} for _ in range(2)) for _ in range(2)]
    with pytest.raises(ValueError, match="its entries may be samples or fields"):
        merge(*values, sizes=[2, 2])


def test_lists_of_another_length_than_the_microbatch_are_fields():
    assert merge(["cat", "dog"], ["cat", "dog"]) == ["cat", "dog"]
    assert merge([1.0, 2.0], [2.0, 2.0], sizes=[4, 4]) == [1.5, 2.0]
    with pytest.raises(ValueError, match=re.escape("value has [2, 4] entries; expected as many in each microbatch")):
        merge(["a", "b"], ["a", "b", "c", "d"], sizes=[3, 3])


# Arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "sizes", "weights"),
    [
        ([], [], []),
        ([1.0], [1, 2], [1.0]),
        ([1.0, 2.0], [1, 2], [1.0]),
        ([1.0, 2.0], [1, 1], [0.0, 0.0]),
        ([1.0, 2.0], [1, 1], [1.5, -0.5]),
        ([1.0, 2.0], [1, 1], [math.nan, 1.0]),
        ([1.0, 2.0], [1, 1], [math.inf, 1.0]),
    ],
    ids=["none", "sizes", "weights", "zero", "negative", "no number", "infinite"],
)
def test_arguments_that_do_not_fit_are_refused(values, sizes, weights):
    with pytest.raises(ValueError, match=r"there are \d values|weights are"):
        merge_values(values, sizes, weights)
