from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_gpufeed.sync.layers import find_layers, in_order, is_sparse, sparse_parameters


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.embedding = nn.Embedding(4, 2)
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def names_of(model: nn.Module, deferrable=()) -> list[tuple[str, int]]:
    return [(layer.name, len(layer.parameters)) for layer in find_layers(model, deferrable)]


def test_a_layer_is_what_one_module_owns_in_the_order_of_the_modules():
    assert names_of(Model()) == [("", 1), ("embedding", 1), ("body.0", 2), ("body.2", 1)]


def test_a_shared_parameter_belongs_to_the_first_module():
    model = Model()
    layers = find_layers(model, ())
    assert layers[1].parameters[0] is model.head.weight
    assert sum(len(layer.parameters) for layer in layers) == len(list(model.parameters()))


def test_a_module_that_is_used_under_two_names_is_one_layer():
    inner = nn.Linear(2, 2)
    assert names_of(nn.Sequential(inner, inner)) == [("0", 2)]


def test_frozen_parameters_are_left_out():
    model = Model()
    model.body[0].weight.requires_grad_(False)
    model.scale.requires_grad_(False)
    assert names_of(model) == [("embedding", 1), ("body.0", 1), ("body.2", 1)]


def test_parameters_without_elements_are_left_out():
    model = nn.Module()
    model.some = nn.Linear(2, 2)
    model.some.none = nn.Parameter(torch.empty(0, 3))
    model.only = nn.Module()
    model.only.none = nn.Parameter(torch.empty(0))
    assert names_of(model) == [("some", 2)]


def test_every_dtype_of_a_module_is_a_layer_that_cannot_wait():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    layers = find_layers(model, {"0", "1"})
    assert [(one.name, one.module_name, one.is_deferrable) for one in layers] == [
        ("0 (float32)", "0", False),
        ("0 (float64)", "0", False),
        ("1", "1", True),
    ]
    assert [one.memory for one in layers[:2]] == [
        (torch.device("cpu"), torch.float32),
        (torch.device("cpu"), torch.float64),
    ]


def test_sizes_are_of_all_parameters_of_a_layer():
    layer = find_layers(nn.Linear(3, 2, dtype=torch.float16), ())[0]
    assert (layer.num_elements, layer.gradient_bytes) == (8, 16)


def test_parameters_with_a_sparse_gradient_are_listed_apart_and_once():
    model = nn.Module()
    model.first = nn.Embedding(3, 2, sparse=True)
    model.second = nn.EmbeddingBag(3, 2, sparse=True)
    model.third = nn.Embedding(3, 2)
    model.shared = nn.Embedding(3, 2, sparse=True)
    model.shared.weight = model.first.weight
    model.frozen = nn.Embedding(3, 2, sparse=True)
    model.frozen.weight.requires_grad_(False)
    assert [name for name, _ in sparse_parameters(model)] == ["first.weight", "second.weight"]
    assert names_of(model) == [("third", 1)]
    assert [is_sparse(one) for one in (model.first, model.second, model.third, model)] == [True, True, False, False]


def test_a_model_without_parameters_has_no_layers():
    assert names_of(nn.ReLU()) == []
    assert sparse_parameters(nn.ReLU()) == []


@given(st.permutations(range(6)), st.integers(0, 6))
def test_layers_come_in_the_order_of_their_first_use_and_unused_ones_last(order, num_used):
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(6)))
    layers = find_layers(model, ())
    used = [parameter for i in order[:num_used] for parameter in reversed(layers[i].parameters)]
    found = [layer.name for layer in in_order(layers, used)]
    assert found == [str(i) for i in [*order[:num_used], *sorted(order[num_used:])]]
