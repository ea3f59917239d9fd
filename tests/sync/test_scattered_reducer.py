from __future__ import annotations

import pytest
import torch
from torch import distributed, nn

from lightning_gpufeed.sync import scattered_reducer
from lightning_gpufeed.sync.layers import find_layers
from lightning_gpufeed.sync.plan import SyncPlan
from lightning_gpufeed.sync.scattered_reducer import ScatteredReducer
from tests.sync.test_reducer import make_layers, see_all, set_gradients

PLAN = SyncPlan.parse("scatter; B2 B1 B0; 2:0-32 0:0-16+1:0-8 1:8-24")


@pytest.fixture
def sent(monkeypatch):
    """What is sent, in order: by which call, and how many elements."""
    calls: list[tuple[str, int]] = []

    def noted(name):
        usual = getattr(distributed, name)

        def call(first, *others, **options):
            calls.append((name, first.numel()))
            return usual(first, *others, **options)

        return call

    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(distributed, name, noted(name))
    usual_gather = scattered_reducer._all_gather

    def gather(first, *others, **options):
        calls.append(("gather", first.numel()))
        return usual_gather(first, *others, **options)

    monkeypatch.setattr(scattered_reducer, "_all_gather", gather)
    return calls


def reduced(reducer: ScatteredReducer) -> ScatteredReducer:
    set_gradients(reducer.layers)
    reducer.begin()
    see_all(reducer)
    assert reducer.end() == []
    return reducer


def test_halves_are_sent_as_planned_then_the_norm_then_halves_as_forward_needs_them(ranks, sent):
    reduced(ScatteredReducer(make_layers(), PLAN, ranks.group))
    assert sent[:3] == [("all_to_all_single", 8), ("all_to_all_single", 6), ("all_to_all_single", 4)]
    assert sent[3:] == [("all_reduce", 1), ("gather", 6), ("gather", 4), ("gather", 8)]


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_sums_are_those_of_all_ranks_whoever_adds_them_up(ranks, is_exchanged):
    layers = make_layers()
    reducer = reduced(ScatteredReducer(layers, PLAN, ranks.group, is_exchanged=is_exchanged))
    for i, layer in enumerate(layers):
        reducer.wait(i)
        for n, parameter in enumerate(layer.parameters):
            assert parameter.grad.unique().tolist() == [1.0 + i + n / 8]


def test_the_norm_of_millions_of_numbers_is_right_to_1e_7_where_that_of_torch_is_not(ranks):
    layers = find_layers(nn.Linear(2048, 1024, bias=False), ())
    plan = SyncPlan.parse(f"scatter; B0; 0:0-{layers[0].gradient_bytes}")
    reducer = ScatteredReducer(layers, plan, ranks.group)
    parameter = layers[0].parameters[0]
    parameter.grad = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0))
    exact = float(parameter.grad.double().norm())
    reducer.begin()
    reducer.see(0)
    reducer.end()
    assert [one.numel() for one in reducer.memory.slices[0]] == [1 << 18] * 8  # of 1 MB
    assert float(reducer.coefficient(1.0)) == pytest.approx(1 / (exact + 1e-6), rel=2e-7)


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_the_coefficient_is_that_of_torch(ranks, max_norm):
    layers = make_layers()
    reducer = reduced(ScatteredReducer(layers, PLAN, ranks.group))
    coefficient = reducer.coefficient(max_norm)
    parameters = [one for layer in layers for one in layer.parameters]
    before = [one.grad.clone() for one in parameters]
    nn.utils.clip_grad_norm_(parameters, max_norm)
    for parameter, grad in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, grad * coefficient, rtol=1e-6, atol=0)


def test_the_coefficient_of_double_precision_is_double(ranks):
    layers = find_layers(nn.Linear(2, 2, dtype=torch.float64), ())
    reducer = reduced(ScatteredReducer(layers, SyncPlan.parse("scatter; B0; 0:0-48"), ranks.group))
    assert reducer.coefficient(0.1).dtype == torch.float64


def test_a_parameter_that_had_no_gradient_has_its_own(ranks):
    layers = make_layers()
    reducer = ScatteredReducer(layers, PLAN, ranks.group, find_unused_parameters=True)
    set_gradients(layers)
    layers[2].parameters[1].grad = None
    reducer.begin()
    assert reducer.end() == []
    for layer in range(len(layers)):
        reducer.wait(layer)
    assert layers[2].parameters[1].grad is None
    assert not torch.isnan(reducer.coefficient(1.0))


def test_nothing_more_is_sent_if_a_gradient_is_missing(ranks, sent):
    layers = make_layers()
    reducer = ScatteredReducer(layers, PLAN, ranks.group)
    set_gradients(layers)
    layers[0].parameters[0].grad = None
    reducer.begin()
    assert len(reducer.end()) == 1
    assert ("all_reduce", 1) not in sent
