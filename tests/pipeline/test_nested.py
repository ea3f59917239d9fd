"""What passes between stages: taken apart, cut into microbatches, described for another rank, put together."""

from __future__ import annotations

import doctest
import pickle
import re
import warnings
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline import nested as nested_module
from lightning_gpufeed.pipeline.nested import (
    NestedSpec,
    TensorSpec,
    batch_size,
    concatenate,
    flatten,
    microbatch_sizes,
    split,
    unflatten,
)

Pair = namedtuple("Pair", "left right")

tensors = st.builds(
    lambda shape, dtype: (
        torch.arange(6)[: 1 if not shape else None]
        .repeat(8)[: int(torch.tensor(shape).prod())]
        .reshape(shape)
        .to(dtype)
    ),
    st.sampled_from([(), (4,), (4, 2), (4, 3, 2), (0,), (4, 0)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
plain = st.one_of(st.none(), st.integers(-9, 9), st.booleans(), st.text(max_size=3))
nests = st.recursive(
    st.one_of(tensors, plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(lambda one: OrderedDict(z=one, y=1), inner),
    ),
    max_leaves=6,
)


def are_equal(one, other):
    """Two nests, to the last bit and type."""
    ours, structure = flatten(one)
    theirs, other_structure = flatten(other)
    return structure == other_structure and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def test_the_examples_run():
    assert doctest.testmod(nested_module).failed == 0


@given(nests)
def test_what_is_taken_apart_can_be_put_together(nest):
    assert are_equal(unflatten(*flatten(nest)), nest)


@given(nests)
def test_a_description_goes_to_another_rank_and_builds_the_same_nest(nest):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = pickle.loads(pickle.dumps(NestedSpec.of(nest)))
    assert spec == NestedSpec.of(nest)
    given_tensors = [leaf for leaf in flatten(nest)[0] if isinstance(leaf, torch.Tensor)]
    assert are_equal(spec.build(given_tensors), nest)
    for tensor, its in zip(given_tensors, spec.tensors, strict=True):
        empty = its.empty(torch.device("cpu"))
        assert (empty.shape, empty.dtype, empty.requires_grad) == (tensor.shape, tensor.dtype, False)


def test_a_description_tells_apart_what_has_to_be_received_in_another_way():
    x = torch.zeros(2, 3)
    specs = [
        NestedSpec.of(value)
        for value in (x, x[:1], x.double(), x.clone().requires_grad_(), [x], (x,), {"a": x}, {"b": x}, (x, 1), (x, 2))
    ]
    assert all(one != other for i, one in enumerate(specs) for other in specs[:i])
    assert NestedSpec.of(x).leaves == (TensorSpec((2, 3), torch.float32, False),)


@given(st.integers(1, 200), st.integers(1, 64))
def test_microbatches_differ_by_one_sample_at_most_and_the_larger_ones_come_first(num_samples, num_microbatches):
    num_microbatches = min(num_samples, num_microbatches)
    sizes = microbatch_sizes(num_samples, num_microbatches)
    assert sum(sizes) == num_samples
    assert len(sizes) == num_microbatches
    assert list(sizes) == sorted(sizes, reverse=True)
    assert 1 <= sizes[-1] <= sizes[0] <= sizes[-1] + 1


@given(st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_the_parts_of_a_batch_put_together_are_the_batch(num_samples, num_microbatches, has_grad):
    sizes = microbatch_sizes(num_samples, min(num_samples, num_microbatches))
    x = torch.randn(num_samples, 3, requires_grad=has_grad)
    batch = {"x": x, "more": (torch.arange(num_samples), "text", None, 2.5)}
    parts = split(batch, sizes)
    assert [len(part["x"]) for part in parts] == list(sizes)
    whole = concatenate(parts, sizes)
    assert are_equal(whole, batch)
    assert whole["x"].requires_grad == has_grad
    assert whole["x"].grad_fn is None


def test_parts_are_views_and_what_has_no_samples_goes_to_each_of_them():
    x, scale, table = torch.randn(4, 2), torch.tensor(3.0), torch.randn(5, 2)
    parts = split([x, scale, table, 7], (3, 1))
    assert parts[0][0].data_ptr() == x.data_ptr()
    assert all(part[1] is scale and part[2] is table and part[3] == 7 for part in parts)


def test_the_batch_size_is_that_of_the_first_tensor_that_has_one():
    assert batch_size({"scale": torch.tensor(1.0), "x": torch.zeros(5, 2), "y": torch.zeros(3)}) == 5
    assert batch_size([1, "text", torch.tensor(1.0)]) is None
    assert batch_size(torch.zeros(0, 2)) == 0


@pytest.mark.parametrize(
    "output", [torch.tensor(1.0), torch.zeros(3, 2), torch.zeros(1)], ids=["number", "other", "one"]
)
def test_an_output_without_samples_in_front_is_refused_with_its_shape(output):
    with pytest.raises(
        ScheduleError, match=re.escape(f"shape {tuple(output.shape)} for 2 samples; expected the samples")
    ):
        concatenate([output, output], (2, 2))


def test_outputs_of_which_only_some_have_a_gradient_have_one_together():
    parts = [torch.zeros(1, 2), torch.zeros(1, 2, requires_grad=True)]
    assert concatenate(parts, (1, 1)).requires_grad


def test_a_tensor_is_laid_out_as_another_one_in_the_same_order_of_elements():
    expected = torch.arange(48.0).reshape(2, 2, 3, 4)
    like = expected.to(memory_format=torch.channels_last)
    found = TensorSpec.of(like).laid_out(expected)
    assert found.stride() == like.stride()
    assert torch.equal(found, expected)
    found = TensorSpec.of(expected).laid_out(like)
    assert found.is_contiguous()
    assert torch.equal(found, expected)
