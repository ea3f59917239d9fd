from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributed, nn

from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.sync.costs import LayerCosts
from lightning_gpufeed.sync.layers import SyncLayer, find_layers, sparse_parameters
from lightning_gpufeed.sync.plan import Bucket, SyncPlan, conventional
from lightning_gpufeed.sync.reducer import Reducer
from tests.contracts import exactly
from tests.sync.models import any_plan


@pytest.fixture
def sent(monkeypatch):
    """Sizes of what is sent, in order."""
    sizes: list[int] = []
    all_reduce = distributed.all_reduce

    def noted(tensor, *arguments, **options):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    monkeypatch.setattr(distributed, "all_reduce", noted)
    return sizes


def make_layers(num_layers: int = 3, size: int = 2) -> list[SyncLayer]:
    """Layer i has 1 + i columns, so that sizes tell layers apart."""
    model = nn.Sequential(*(nn.Linear(1 + i, size) for i in range(num_layers)))
    return find_layers(model, ())


def costs_of(layers: list[SyncLayer]) -> list[LayerCosts]:
    return [LayerCosts(layer.name, 0.0, 0.0, 0.0, layer.gradient_bytes, 0, False) for layer in layers]


def own_buckets(layers: list[SyncLayer]) -> tuple[Bucket, ...]:
    return conventional(costs_of(layers), 1).buckets


def set_gradients(layers: list[SyncLayer], value: float = 1.0) -> None:
    for i, layer in enumerate(layers):
        for n, parameter in enumerate(layer.parameters):
            parameter.grad = torch.full_like(parameter, value + i + n / 8)


def see_all(reducer: Reducer) -> None:
    for layer in reversed(range(len(reducer.layers))):
        for _ in reducer.layers[layer].parameters:
            reducer.see(layer)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), data=st.data())
def test_buckets_leave_in_the_order_of_the_plan_and_never_before_they_are_full(ranks, seed, data):
    layers = make_layers(4)
    plan = any_plan(costs_of(layers), random.Random(seed), True)
    hooks = data.draw(st.permutations([i for i in range(4) for _ in range(2)]), label="order of the hooks")
    reducer = Reducer(layers, plan.buckets, ranks.group)
    set_gradients(layers)
    expected = [[one.grad.clone() for one in layer.parameters] for layer in layers]
    reducer.begin()
    for place, layer in enumerate(hooks):
        reducer.see(layer)
        complete = {i for i in range(4) if hooks[: place + 1].count(i) == 2}
        num_full = 0
        for bucket in plan.buckets:
            if not {piece.layer for piece in bucket} <= complete:
                break
            num_full += 1
        assert len(reducer._works) == num_full
    assert reducer.end() == []
    assert len(reducer._works) == len(plan.buckets)
    for layer in range(4):
        reducer.wait(layer)
    assert all(
        torch.equal(one.grad, grad)
        for layer, grads in zip(layers, expected, strict=True)
        for one, grad in zip(layer.parameters, grads, strict=True)
    )


def test_what_is_sent_is_what_the_plan_says(ranks, sent):
    layers = make_layers()
    plan = SyncPlan.parse("cross; B2 B1 B0; 1:0-24 0:0-16+2:0-8 2:8-32")
    reducer = Reducer(layers, plan.buckets, ranks.group)
    set_gradients(layers)
    reducer.begin()
    see_all(reducer)
    assert reducer.end() == []
    assert sent == [6, 4 + 2, 6]


def test_a_gradient_is_a_view_of_its_bucket_from_the_first_step_on(ranks):
    layers = make_layers()
    reducer = Reducer(layers, own_buckets(layers), ranks.group)
    for _ in range(2):
        set_gradients(layers)
        reducer.begin()
        see_all(reducer)
        reducer.end()
        for i, layer in enumerate(layers):
            for parameter, view in zip(layer.parameters, reducer.memory.views[i], strict=True):
                assert parameter.grad.data_ptr() == view.data_ptr()
                assert parameter.grad.stride() == view.stride()


def test_a_gradient_that_is_added_to_its_view_is_not_copied(ranks):
    layers = make_layers(1)
    reducer = Reducer(layers, own_buckets(layers), ranks.group)
    set_gradients(layers)
    reducer.begin()
    see_all(reducer)
    reducer.end()
    reducer.wait(0)
    for parameter in layers[0].parameters:
        parameter.grad.add_(1.0)
    reducer.begin()
    see_all(reducer)
    reducer.end()
    reducer.wait(0)
    assert layers[0].parameters[0].grad.tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_any_type_are_reduced(ranks, dtype):
    layers = find_layers(nn.Linear(2, 2, dtype=dtype), ())
    reducer = Reducer(layers, own_buckets(layers), ranks.group)
    set_gradients(layers)
    reducer.begin()
    see_all(reducer)
    reducer.end()
    reducer.wait(0)
    assert layers[0].parameters[0].grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert layers[0].parameters[0].grad.dtype == dtype


def test_whoever_sets_the_data_of_a_gradient_leaves_the_bucket_as_it_is(ranks):
    layers = make_layers()
    reducer = Reducer(layers, own_buckets(layers), ranks.group)
    parameter = layers[0].parameters[0]
    for value in (1.0, 2.0):
        set_gradients(layers, value)
        reducer.begin()
        see_all(reducer)
        assert reducer.end() == []
        for layer in range(len(layers)):
            reducer.wait(layer)
        assert parameter.grad.unique().tolist() == [value]
        assert parameter.grad.data_ptr() == reducer.memory.views[0][0].data_ptr()
        parameter.grad.data = parameter.grad.data * 3.0
        assert reducer.memory.views[0][0].unique().tolist() == [value]


def test_waiting_again_and_waiting_in_any_order_changes_nothing(ranks):
    layers = make_layers()
    reducer = Reducer(layers, conventional(costs_of(layers), 1000).buckets, ranks.group)
    set_gradients(layers)
    reducer.begin()
    see_all(reducer)
    reducer.end()
    for layer in (1, 1, 0, 2, 1, 0):
        reducer.wait(layer)
        assert reducer.is_arrived(layer)
    assert layers[2].parameters[0].grad[0, 0].item() == 3.0


def test_late_layers_leave_when_backward_ends(ranks, sent):
    layers = make_layers()
    reducer = Reducer(layers, own_buckets(layers), ranks.group, is_late={2})
    set_gradients(layers)
    reducer.begin()
    for _ in range(3):
        reducer.see(2)
    for layer in (1, 1, 0, 0):
        reducer.see(layer)
    assert sent == []  # the late one is the first in the plan
    reducer.end()
    assert sent == [8, 6, 4]


def test_a_gradient_that_comes_after_it_was_sent_is_an_error(ranks):
    layers = make_layers()
    reducer = Reducer(layers, own_buckets(layers), ranks.group)
    set_gradients(layers)
    reducer.begin()
    reducer.see(1)
    reducer.see(1)
    with pytest.raises(
        SyncError, match="A gradient of 1 came twice in one backward, the second time after it was sent"
    ):
        reducer.see(1)
    reducer.end()


def test_a_parameter_without_a_gradient_is_named(ranks):
    layers = make_layers()
    reducer = Reducer(layers, own_buckets(layers), ranks.group)
    set_gradients(layers)
    layers[1].parameters[0].grad = None
    reducer.begin()
    for layer in (2, 2, 1, 0, 0):
        reducer.see(layer)
    assert reducer.end() == ["1 (2, 2)"]
    reducer.wait(1)


def test_a_frozen_parameter_is_not_missed(ranks):
    layers = make_layers()
    reducer = Reducer(layers, own_buckets(layers), ranks.group)
    set_gradients(layers)
    for parameter in layers[1].parameters:
        parameter.requires_grad_(False)
        parameter.grad = None
    reducer.begin()
    for layer in (2, 2, 0, 0):
        reducer.see(layer)
    assert reducer.end() == []
    reducer.wait(1)
    assert [one.grad for one in layers[1].parameters] == [None, None]


def test_a_parameter_that_no_rank_has_used_keeps_no_gradient(ranks, sent):
    layers = make_layers()
    reducer = Reducer(layers, own_buckets(layers), ranks.group, find_unused_parameters=True)
    set_gradients(layers)
    layers[1].parameters[1].grad = None
    reducer.begin()
    for layer in (2, 2, 1, 0, 0):
        reducer.see(layer)
    assert reducer.end() == []
    assert sent == [8, 6, 4, 6]  # the last one says which of the six parameters are used
    for layer in range(3):
        reducer.wait(layer)
        assert reducer.is_arrived(layer)
    assert layers[1].parameters[1].grad is None
    assert layers[1].parameters[0].grad[0, 0].item() == 2.0


def test_a_gradient_that_is_used_again_after_a_step_without_comes_back(ranks):
    layers = make_layers(1)
    reducer = Reducer(layers, own_buckets(layers), ranks.group, find_unused_parameters=True)
    for is_used in (True, False, True):
        for n, parameter in enumerate(layers[0].parameters):
            parameter.grad = torch.full_like(parameter, 5.0) if is_used or n else None
        reducer.begin()
        reducer.see(0)
        if is_used:
            reducer.see(0)
        reducer.end()
        reducer.wait(0)
        grad = layers[0].parameters[0].grad
        assert (grad is None) == (not is_used)
        assert not is_used or grad.tolist() == [[5.0], [5.0]]


def test_sparse_gradients_are_reduced_when_backward_ends(ranks):
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    layers = find_layers(model, ())
    reducer = Reducer(layers, own_buckets(layers), ranks.group, sparse=sparse_parameters(model))
    model(torch.tensor([1, 1, 3])).sum().backward()
    expected = model[0].weight.grad.to_dense()
    reducer.begin()
    see_all(reducer)
    reducer.end()
    assert model[0].weight.grad.is_sparse
    assert torch.equal(model[0].weight.grad.to_dense(), expected)


def test_a_sparse_gradient_of_a_dense_layer_is_refused(ranks):
    layers = make_layers(1)
    reducer = Reducer(layers, own_buckets(layers), ranks.group)
    set_gradients(layers)
    layers[0].parameters[0].grad = torch.ones(2, 1).to_sparse()
    reducer.begin()
    reducer.see(0)
    message = (
        "The gradient of 0 (2, 1) is torch.sparse_coo; expected a dense one. Only torch.nn.Embedding(sparse=True) may "
        "have a sparse gradient here; use strategy='ddp'."
    )
    with pytest.raises(SyncError, match=exactly(message)):
        reducer.see(0)


def test_a_model_without_layers_sends_nothing(ranks, sent):
    reducer = Reducer([], (), ranks.group)
    reducer.begin()
    assert reducer.end() == []
    assert sent == []


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_parameter_without_elements_is_not_sent(ranks, sent, find_unused):
    layers = find_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(0, 2, bias=False)), ())
    reducer = Reducer(layers, own_buckets(layers), ranks.group, find_unused_parameters=find_unused)
    set_gradients(layers)
    reducer.begin()
    see_all(reducer)
    assert reducer.end() == []
    reducer.wait(0)
    assert sent == [6, 2][: 1 + find_unused]


def test_after_an_error_nothing_is_sent_any_more(ranks):
    layers = make_layers()
    reducer = Reducer(layers, own_buckets(layers), ranks.group)
    reducer.error = SyncError("another rank is gone")
    set_gradients(layers)
    reducer.begin()
    reducer.see(2)
    with pytest.raises(SyncError, match="another rank is gone"):
        reducer.see(2)
