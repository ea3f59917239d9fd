"""Copies of tensors on the host: what they held then, given back into the same tensors.

On an accelerator they are made on a stream of their own; here they are made at once.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.device.host_copy import HostCopies

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
]


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def taken(tensors: list[torch.Tensor]) -> HostCopies:
    copies = HostCopies()
    copies.take(tensors)
    return copies


def change(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.ones_like(tensor) if tensor.dtype == torch.bool else tensor + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_back_into_the_same_memory(dtype):
    tensors = [filled(dtype, 3, 4), filled(dtype, 5), filled(dtype)]
    was, places = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    copies = taken(tensors)
    copies.before_change()
    for tensor in tensors:
        change(tensor)
    assert not torch.equal(tensors[0], was[0])
    copies.put_back()
    assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, was, strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == places


def test_not_a_number_and_signed_zero_come_back_as_they_were():
    tensor = torch.tensor([float("nan"), -0.0, float("inf")])
    copies = taken([tensor])
    copies.before_change()
    tensor.fill_(1)
    copies.put_back()
    assert tensor[0].isnan()
    assert torch.equal(tensor[1:].sign().copysign(tensor[1:]), torch.tensor([-0.0, 1.0]))
    assert torch.signbit(tensor[1])


@given(shape=st.lists(st.integers(0, 4), max_size=4), permutation=st.permutations(range(4)), step=st.integers(1, 2))
@settings(max_examples=40)
def test_tensors_with_gaps_or_another_order_of_dimensions_are_filled_and_nothing_around_them(
    shape: list[int], permutation: list[int], step: int
) -> None:
    around = filled(torch.float32, *[size * step for size in shape])
    order = [dimension for dimension in permutation if dimension < len(shape)]
    tensor = around[tuple(slice(None, None, step) for _ in shape)].permute(order)
    was = around.clone()
    copies = taken([tensor])
    copies.before_change()
    around.add_(1)
    copies.put_back()
    expected = was + 1
    expected[tuple(slice(None, None, step) for _ in shape)] -= 1
    assert torch.equal(around, expected)


def test_sparse_values_come_back():
    tensor = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    copies = taken([tensor])
    copies.before_change()
    tensor.mul_(5)
    copies.put_back()
    assert torch.equal(tensor.to_dense(), torch.tensor([[0.0, 2.0], [3.0, 0.0]]))


def test_a_leaf_that_requires_a_gradient_is_put_back_outside_of_autograd():
    weight = torch.nn.Parameter(torch.zeros(3))
    copies = taken([weight])
    copies.before_change()
    with torch.no_grad():
        weight.add_(1)
    copies.put_back()
    assert weight.tolist() == [0.0, 0.0, 0.0]
    assert weight.is_leaf
    assert weight.grad_fn is None


def test_they_can_be_put_back_again_and_again():
    tensor = torch.zeros(3)
    copies = taken([tensor])
    for number in range(3):
        copies.before_change()
        tensor.fill_(number + 1)
        copies.put_back()
        assert tensor.tolist() == [0.0, 0.0, 0.0]


def test_none_at_all_can_be_copied():
    copies = taken([])
    copies.before_change()
    copies.put_back()


def test_a_list_that_is_changed_afterwards_is_no_matter():
    tensors = [torch.zeros(2), torch.zeros(2)]
    copies = taken(tensors)
    first = tensors.pop(0)
    first.fill_(1)
    copies.put_back()
    assert first.tolist() == [0.0, 0.0]


def test_host_memory_is_used_again_for_the_next_moment_where_it_fits():
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    copies = taken(tensors)
    places = [copy.data_ptr() for copy in copies._copies]
    for number in range(3):
        tensors[0].fill_(number)
        copies.take(tensors)
        assert [copy.data_ptr() for copy in copies._copies] == places
        tensors[0].fill_(-1)
        copies.put_back()
        assert tensors[0].tolist() == [number] * 3


def test_other_tensors_of_other_kinds_in_other_numbers_can_be_taken_next():
    copies = HostCopies()
    sparse = torch.eye(2).to_sparse()
    for tensors in (
        [torch.zeros(3)],
        [torch.zeros(3, dtype=torch.float64), torch.zeros(1)],
        [sparse, torch.zeros(2, 3)],
        [torch.zeros(2, 3), torch.zeros(3, 2).T],
        [torch.zeros(3, 2).T, sparse, torch.zeros(4)],
        [],
        [torch.zeros(3)],
    ):
        was = [tensor.clone() for tensor in tensors]
        copies.take(tensors)
        copies.before_change()
        for tensor in tensors:
            tensor.mul_(3) if tensor.is_sparse else tensor.add_(1)
        copies.put_back()
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(tensors, was, strict=True))


def test_what_was_taken_before_is_left_alone_by_putting_back():
    first, second = torch.zeros(3), torch.zeros(3)
    copies = taken([first])
    first.fill_(1)
    copies.take([second])
    second.fill_(2)
    copies.put_back()
    assert (first.tolist(), second.tolist()) == ([1.0] * 3, [0.0] * 3)
