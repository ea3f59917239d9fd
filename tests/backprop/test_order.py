"""An order says when each waiting weight gradient is computed, and a backward follows it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_gpufeed.backprop.order import BackwardOrder, conventional, from_actions, reverse_first_k
from lightning_gpufeed.backprop.split import WeightGradSplitter
from tests.backprop.checks import Pair, mlp

NAMES = ["a", "b", "c", "d"]
Actions = list[tuple[str, str]]


@st.composite
def backwards(draw: st.DrawFn, max_layers: int = 6) -> tuple[int, Actions]:
    """Any order in which each W comes after its I, and the I's come from the last layer to the first."""
    num_layers = draw(st.integers(1, max_layers))
    names = [str(2 * index) for index in range(num_layers)]
    actions: Actions = [("I", name) for name in reversed(names)]
    for name in draw(st.permutations(names)):
        first = actions.index(("I", name)) + 1
        actions.insert(draw(st.integers(first, len(actions))), ("W", name))
    return num_layers, actions


def run(order: BackwardOrder, chain: list[str]) -> Actions:
    """What a backward that follows an order does."""
    actions: Actions = []
    for name in chain:
        actions.append(("I", name))
        if name not in order.deferred:
            actions.append(("W", name))
        actions += [("W", waiting) for waiting in order.after.get(name, ())]
    return actions + [("W", name) for name in order.last]


@given(backwards())
def test_an_order_from_actions_gives_the_same_actions_back(backward):
    _, actions = backward
    order = from_actions(actions)
    assert run(order, [name for kind, name in actions if kind == "I"]) == actions


@settings(max_examples=60)
@given(backwards(), st.integers(0, 3))
def test_a_backward_follows_any_order_and_has_the_gradients_of_autograd(backward, seed):
    """Events: the gradient of a layer's output is there (its I comes next); its weight gradient is in `.grad`."""
    num_layers, actions = backward
    torch.manual_seed(seed)
    pair = Pair(mlp(*torch.randint(1, 6, (num_layers + 1,)).tolist()), order=from_actions(actions))
    events: Actions = []
    for name, module in pair.split.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, __, output, name=name: output.register_hook(lambda _: events.append(("I", name))) and None
            )
            module.weight.register_post_accumulate_grad_hook(lambda _, name=name: events.append(("W", name)))
    for _ in range(2):
        events.clear()
        pair.step(torch.randn(3, pair.split[0].in_features), requires_grad=True)
        assert events == actions
        pair.assert_same_grads()


@given(st.lists(st.text("abc", min_size=1), unique=True), st.data())
def test_reverse_first_k_lets_the_first_k_wait_in_the_order_of_forward(names, data):
    k = data.draw(st.integers(0, len(names)))
    order = reverse_first_k(names, k)
    assert order.last == tuple(names[:k])
    assert not order.after
    assert order.deferred == set(names[:k])


@pytest.mark.parametrize("k", [-1, 5])
def test_more_than_all_or_fewer_than_none_cannot_wait(k):
    with pytest.raises(ValueError, match=f"k is {k}; expected 0 to 4"):
        reverse_first_k(NAMES, k)


def test_the_drawing_of_reverse_first_k_is_what_runs():
    order = reverse_first_k(list("123456"), 3)
    drawn = " ".join(kind + name for kind, name in run(order, list("654321")))
    assert drawn == "I6 W6 I5 W5 I4 W4 I3 I2 I1 W1 W2 W3"
    drawn = " ".join(kind + name for kind, name in run(conventional(), list("654321")))
    assert drawn == "I6 W6 I5 W5 I4 W4 I3 W3 I2 W2 I1 W1"


def test_conventional_lets_nothing_wait():
    assert conventional().deferred == frozenset()
    assert conventional() == BackwardOrder() == reverse_first_k(NAMES, 0) == from_actions([])


def test_a_weight_gradient_right_after_its_input_gradient_does_not_wait():
    assert from_actions([(kind, name) for name in reversed(NAMES) for kind in "IW"]) == conventional()


def test_a_layer_has_one_place():
    with pytest.raises(ValueError, match=r"^a, b: expected one place"):
        BackwardOrder({"c": ("a", "b"), "d": ("a",)}, ("b",))


@pytest.mark.parametrize(
    "actions",
    [
        [("I", "c"), ("I", "a"), ("W", "c"), ("I", "a"), ("W", "a")],
        [("W", "a"), ("I", "a")],
        [("I", "a"), ("W", "b"), ("I", "b")],
        [("I", "a"), ("W", "a"), ("W", "a")],
        [("I", "a"), ("B", "a")],
        [("F", "a"), ("I", "a"), ("W", "a")],
    ],
)
def test_actions_that_lose_or_repeat_something_are_refused(actions):
    with pytest.raises(ValueError, match="expected"):
        from_actions(actions)


# `after`, in a backward --------------------------------------------------------------------------------------


def test_those_after_a_layer_are_computed_when_its_gradient_arrives_and_not_earlier():
    events: list[str] = []
    model = mlp(3, 3, 3, 3)
    order = BackwardOrder({"2": ("4",)}, ("2", "0"))
    splitter = WeightGradSplitter(model, order, on_grad=lambda name: events.append(f"W {name}"))
    for name in ("0", "2", "4"):
        model.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: output.register_hook(lambda _: events.append(f"I {name}")) and None
        )
    model(torch.randn(2, 3)).sum().backward()
    assert events == ["I 4", "I 2", "W 4", "I 0"]
    splitter.finish()
    assert events[4:] == ["W 2", "W 0"]


def test_a_layer_that_others_wait_for_need_not_wait_itself():
    told: list[str] = []
    pair = Pair(mlp(3, 3, 3, 3), BackwardOrder({"2": ("4",)}), on_grad=told.append)
    pair.step(torch.randn(2, 3), finish=False)
    assert "4" in told
    assert pair.splitter.names == ("4",)
    assert pair.splitter.num_pending == 0
    pair.assert_same_grads()


def test_a_layer_expected_after_an_earlier_one_comes_at_the_end():
    """`0` arrives last: when `2` arrives there is nothing of it to compute."""
    pair = Pair(mlp(3, 3, 3), BackwardOrder({"2": ("0",)}))
    pair.step(torch.randn(2, 3), finish=False)
    assert pair.splitter.num_pending == 1
    pair.splitter.finish()
    pair.assert_same_grads()
