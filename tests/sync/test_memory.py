from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.layers import SyncLayer
from lightning_gpufeed.sync.memory import GradientMemory
from lightning_gpufeed.sync.plan import Bucket, Piece, SyncPlan, conventional, validate
from lightning_gpufeed.sync.search import search
from tests.sync.models import any_plan

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64]

shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


def parameter_of(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> nn.Parameter:
    """In one of the layouts that a parameter may have."""
    tensor = torch.zeros(shape, dtype=dtype)
    if layout == "channels_last" and len(shape) == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    elif layout == "transposed" and len(shape) == 2:
        tensor = torch.zeros(shape[::-1], dtype=dtype).T
    elif layout == "with gaps" and shape:
        tensor = torch.zeros((*shape, 2), dtype=dtype)[..., 0]
    return nn.Parameter(tensor)


layers_of_all_kinds = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.lists(
            st.tuples(shapes, st.sampled_from(["plain", "channels_last", "transposed", "with gaps"])),
            min_size=1,
            max_size=3,
        ),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
).map(
    lambda found: [
        SyncLayer(f"layer{i}", f"layer{i}", tuple(parameter_of(*one[:1], dtype, one[1]) for one in parameters), can)
        for i, (dtype, parameters, can) in enumerate(found)
    ]
)


def costs_of(layers: list[SyncLayer]) -> list[LayerCosts]:
    return [LayerCosts(one.name, 1.0, 1.0, 1.0, one.gradient_bytes, 10, one.is_deferrable) for one in layers]


def elements(tensor: torch.Tensor) -> list[tuple[torch.dtype, int]]:
    """Where each element lies, in the tensor's own order."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    places = torch.arange(num_elements).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return [(tensor.dtype, place) for place in places.reshape(-1).tolist()]


def check_memory(layers: list[SyncLayer], buckets: tuple[Bucket, ...]) -> GradientMemory:
    memory = GradientMemory(layers, buckets)
    of_layers: dict[int, list[tuple[torch.dtype, int]]] = {}
    for i, layer in enumerate(layers):
        if not layer.gradient_bytes:
            continue
        views = memory.views[i]
        for parameter, view in zip(layer.parameters, views, strict=True):
            assert view.shape == parameter.shape
            assert view.dtype == parameter.dtype
            assert not view.requires_grad
            assert torch.count_nonzero(view) == 0
            if parameter.numel() and is_dense(parameter):
                assert view.stride() == parameter.stride()
            else:
                assert view.is_contiguous()
        of_layers[i] = sorted(place for view in views for place in elements(view))
        begin = of_layers[i][0][1]
        assert [place for _, place in of_layers[i]] == list(range(begin, begin + layer.num_elements))
    of_views = [place for places in of_layers.values() for place in places]
    assert len(set(of_views)) == len(of_views)
    sent = [[place for part in parts for place in elements(part)] for parts in memory.slices]
    of_slices = [place for places in sent for place in places]
    assert len(set(of_slices)) == len(of_slices)
    assert set(of_slices) == set(of_views)
    assert len(sent) == len(buckets)
    for bucket, places in zip(buckets, sent, strict=True):
        expected = []
        for piece in bucket:
            size = layers[piece.layer].parameters[0].element_size()
            expected += of_layers[piece.layer][piece.begin_byte // size : piece.end_byte // size]
        assert places == expected
        assert all(part.is_contiguous() for part in memory.slices[buckets.index(bucket)])
    assert memory.num_bytes == sum(layer.gradient_bytes for layer in layers)
    return memory


def is_dense(parameter: nn.Parameter) -> bool:
    """Whether it fills its memory without gaps, in some order of its dimensions."""
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@settings(max_examples=60)
@given(layers=layers_of_all_kinds, seed=st.integers(0, 1000))
def test_every_element_is_in_one_slice_whatever_the_plan(layers, seed):
    costs = costs_of(layers)
    plan = any_plan(costs, random.Random(seed), True)
    validate(plan, costs)
    check_memory(layers, plan.buckets)


@settings(max_examples=25)
@given(layers=layers_of_all_kinds, bandwidth=st.sampled_from([1.0, 50.0, 1000.0]))
def test_every_element_is_in_one_slice_of_a_plan_that_was_found(layers, bandwidth):
    costs = costs_of(layers)
    check_memory(layers, search(costs, LinkCosts(0.1, bandwidth), min_gain=-1.0).buckets)


def layer(name: str, *parameters: torch.Tensor) -> SyncLayer:
    return SyncLayer(name, name, tuple(map(nn.Parameter, parameters)), True)


def test_whole_layers_of_a_bucket_are_one_slice():
    layers = [layer("a", torch.zeros(3)), layer("b", torch.zeros(2, 2)), layer("c", torch.zeros(5))]
    memory = check_memory(layers, conventional(costs_of(layers), 20).buckets)
    assert [[part.numel() for part in parts] for parts in memory.slices] == [[5], [7]]


def test_gradients_of_two_types_are_two_slices():
    layers = [layer("a", torch.zeros(3)), layer("b", torch.zeros(4, dtype=torch.float64))]
    memory = check_memory(layers, conventional(costs_of(layers), 1000).buckets)
    assert [(part.dtype, part.numel()) for part in memory.slices[0]] == [(torch.float64, 4), (torch.float32, 3)]


def test_the_two_halves_of_a_layer_may_be_sent_in_either_order():
    layers = [layer("a", torch.zeros(4))]
    check_memory(layers, SyncPlan.parse("cross; B0; 0:8-16 0:0-8").buckets)


def test_a_cut_inside_of_an_element_counts_as_before_it():
    layers = [layer("a", torch.zeros(3))]
    memory = check_memory(layers, ((Piece(0, 0, 5),), (Piece(0, 5, 7),), (Piece(0, 7, 12),)))
    assert [[part.numel() for part in parts] for parts in memory.slices] == [[1], [], [2]]


def test_what_is_written_to_a_view_is_in_its_slice():
    weight = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    layers = [layer("a", weight, torch.zeros(()))]
    memory = GradientMemory(layers, conventional(costs_of(layers), 1).buckets)
    grad = torch.randn(2, 3, 2, 2)
    memory.views[0][0].copy_(grad)
    memory.views[0][1].fill_(5.0)
    (sent,) = memory.slices[0]
    assert torch.equal(sent[:-1], grad.permute(0, 2, 3, 1).reshape(-1))
    assert sent[-1] == 5.0
