from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_gpufeed.sync.optimizers import SEPARABLE, PendingStep, why_inseparable

SHAPES = [(), (3,), (2, 3), (2, 3, 2, 2), (0, 2), (17,)]

OPTIONS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.SGD: [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.2, "maximize": True},
        {"momentum": 0.9, "foreach": True},
        {"momentum": 0.9, "fused": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.Adam: [
        {},
        {"amsgrad": True, "weight_decay": 0.1},
        {"maximize": True, "foreach": True},
        {"fused": True, "amsgrad": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
        {"lr": torch.tensor(0.1), "foreach": False},
        {"lr": torch.tensor(0.1), "fused": True},
    ],
    optim.AdamW: [{}, {"amsgrad": True, "foreach": True}, {"fused": True}, {"maximize": True, "weight_decay": 0.3}],
    optim.Adamax: [{}, {"foreach": True, "weight_decay": 0.1}, {"maximize": True}],
    optim.NAdam: [{}, {"foreach": True, "weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True}],
    optim.RAdam: [{}, {"foreach": True, "weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True}],
    optim.RMSprop: [
        {},
        {"centered": True, "momentum": 0.9},
        {"foreach": True, "centered": True, "weight_decay": 0.1},
        {"maximize": True},
    ],
    optim.Rprop: [{}, {"foreach": True}, {"maximize": True, "etas": (0.4, 1.3)}],
    optim.Adagrad: [{}, {"lr_decay": 0.1, "weight_decay": 0.1}, {"foreach": True}, {"fused": True}],
    optim.Adadelta: [{}, {"foreach": True, "weight_decay": 0.1}, {"maximize": True}],
    optim.ASGD: [{}, {"foreach": True, "weight_decay": 0.1}, {"lambd": 0.1, "t0": 2, "maximize": True}],
}
CASES = [(kind, options) for kind, choices in OPTIONS.items() for options in choices]


def case_name(case: tuple[type[optim.Optimizer], dict[str, Any]]) -> str:
    kind, options = case
    return " ".join(
        [kind.__name__, *(f"{name}={float(value) if name == 'lr' else value}" for name, value in options.items())]
    )


def make(case: tuple[type[optim.Optimizer], dict[str, Any]]) -> tuple[list[nn.Parameter], optim.Optimizer]:
    """Six parameters in two groups of different settings."""
    kind, options = case
    chance = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(shape, generator=chance)) for shape in SHAPES]
    parameters[3].data = parameters[3].data.to(memory_format=torch.channels_last)
    options = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    other = {"params": parameters[1::2]}
    if "lr" not in options:
        other["lr"] = 0.05
    if "weight_decay" in kind(parameters).param_groups[0]:
        other["weight_decay"] = 0.2
    return parameters, kind([{"params": parameters[::2]}, other], **options)


def set_gradients(parameters: list[nn.Parameter], number: int, without: set[int]) -> None:
    chance = torch.Generator().manual_seed(number)
    for place, parameter in enumerate(parameters):
        grad = torch.randn(parameter.shape, generator=chance)
        grad = grad.to(memory_format=torch.channels_last) if grad.ndim == 4 else grad
        parameter.grad = None if place in without else grad


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert type(found) is type(expected)
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("case", CASES, ids=case_name)
@settings(max_examples=6)
@given(data=st.data())
def test_a_step_in_parts_is_bitwise_the_whole_step(case, data):
    whole, optimizer = make(case)
    parts, pending_optimizer = make(case)
    # torch's fused SGD cannot take a step in which some parameters have momentum and others do not yet.
    is_fused_momentum = case[0] is optim.SGD and "fused" in case[1]
    schedulers = [lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, pending_optimizer)]
    lists = [group["params"] for group in pending_optimizer.param_groups]
    without = set()
    for number in range(3):
        if number == 0 or not is_fused_momentum:
            without = data.draw(st.sets(st.integers(0, len(SHAPES) - 1), max_size=2), label="without gradients")
        order = data.draw(st.permutations(range(len(SHAPES))), label="order")
        cuts = sorted(data.draw(st.sets(st.integers(1, len(SHAPES) - 1)), label="cuts"))
        set_gradients(whole, number, without)
        set_gradients(parts, number, without)
        optimizer.step()
        pending = PendingStep(pending_optimizer)
        for scheduler in schedulers:
            scheduler.step()
        for begin, end in zip([0, *cuts], [*cuts, len(order)], strict=True):
            pending.take(parts[place] for place in order[begin:end])
            pending.take(parts[place] for place in order[:end])  # a second time nothing happens
        assert len(pending) == 0
    assert_same(parts, whole)
    assert_same(pending_optimizer.state_dict(), optimizer.state_dict())
    assert [group["params"] for group in pending_optimizer.param_groups] == lists
    assert all(
        now is before for now, before in zip((g["params"] for g in pending_optimizer.param_groups), lists, strict=True)
    )


def test_every_separable_optimizer_has_a_case():
    assert set(OPTIONS) == set(SEPARABLE)


def test_two_steps_may_be_pending_and_are_taken_in_order():
    case = (optim.SGD, {"momentum": 0.9})
    whole, optimizer = make(case)
    parts, pending_optimizer = make(case)
    pending = []
    for lr in (0.5, 0.25):
        for one in (optimizer, pending_optimizer):
            one.param_groups[0]["lr"] = lr
        set_gradients(whole, 1, set())
        optimizer.step()
        pending.append(PendingStep(pending_optimizer))
    set_gradients(parts, 1, set())
    for parameter in parts:
        for step in pending:
            step.take([parameter])
    assert_same(parts, whole)


def test_settings_are_those_of_when_the_step_was_asked_for():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter], 0.5)
    parameter.grad = torch.ones(2)
    pending = PendingStep(optimizer)
    optimizer.param_groups[0].update(lr=0.25, weight_decay=3.0, initial_lr=9.0)
    pending.take([parameter])
    assert parameter.tolist() == [0.5, 0.5]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["initial_lr"]) == (0.25, 3.0, 9.0)


def test_a_group_that_is_added_later_is_left_alone():
    first, later = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([first], 0.5)
    first.grad = later.grad = torch.ones(2)
    pending = PendingStep(optimizer)
    optimizer.add_param_group({"params": [later], "lr": 0.25})
    assert first in pending
    assert later not in pending
    pending.take([later, first])
    assert first.tolist() == [0.5, 0.5]
    assert later.tolist() == [1.0, 1.0]
    assert optimizer.param_groups[1]["params"] == [later]


def test_an_error_inside_leaves_the_groups_as_they_were():
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.25}], 0.5)
    lists = [group["params"] for group in optimizer.param_groups]
    before = [dict(group) for group in optimizer.param_groups]
    pending = PendingStep(optimizer)
    parameters[1].grad = torch.ones(3).to_sparse()
    optimizer.param_groups[1]["maximize"] = before[1]["maximize"] = True
    parameters[1].grad = torch.ones(3)
    optimizer.state[parameters[1]] = "no state"
    optimizer.param_groups[1]["momentum"] = before[1]["momentum"] = 0.0
    pending._settings[1]["momentum"] = 0.9
    with pytest.raises(AttributeError, match="has no attribute 'get'"):
        pending.take(parameters)
    assert [group["params"] for group in optimizer.param_groups] == lists
    assert all(now["params"] is old for now, old in zip(optimizer.param_groups, lists, strict=True))
    assert [dict(group) for group in optimizer.param_groups] == before


def test_a_scheduler_that_is_stepped_before_the_update_does_not_warn():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter], 0.5)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    PendingStep(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@pytest.mark.parametrize("kind", SEPARABLE, ids=lambda kind: kind.__name__)
def test_state_is_of_the_default_dtype_of_when_the_step_was_asked_for(kind):
    whole, optimizer = make((kind, {}))
    parts, pending_optimizer = make((kind, {}))
    set_gradients(whole, 0, set())
    set_gradients(parts, 0, set())
    optimizer.step()
    pending = PendingStep(pending_optimizer)
    torch.set_default_dtype(torch.float64)
    try:
        pending.take(parts)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(parts, whole)
    assert_same(pending_optimizer.state_dict(), optimizer.state_dict())


# Whoever looks at the state of an optimizer.


LOOKS: dict[str, Callable[[optim.Optimizer, nn.Parameter], Any]] = {
    "index": lambda optimizer, one: optimizer.state[one]["momentum_buffer"].clone(),
    "get": lambda optimizer, one: optimizer.state.get(one)["momentum_buffer"].clone(),
    "len": lambda optimizer, one: len(optimizer.state),
    "contains": lambda optimizer, one: one in optimizer.state,
    "bool": lambda optimizer, one: bool(optimizer.state),
    "iterated": lambda optimizer, one: [id(key) == id(one) for key in optimizer.state],
    "items": lambda optimizer, one: [value["momentum_buffer"].clone() for _, value in optimizer.state.items()],
    "values": lambda optimizer, one: [value["momentum_buffer"].clone() for value in optimizer.state.values()],
    "keys": lambda optimizer, one: len(optimizer.state.keys()),
    "equal": lambda optimizer, one: optimizer.state == {},
    "repr": lambda optimizer, one: repr(optimizer.state),
    "an optimizer's copy": lambda optimizer, one: copy.deepcopy(optimizer).state_dict(),
    "an optimizer's pickle": lambda optimizer, one: pickle.loads(pickle.dumps(optimizer)).state_dict(),
    "state_dict": lambda optimizer, one: optimizer.state_dict(),
    "popped": lambda optimizer, one: optimizer.state.pop(one),
    "changed": lambda optimizer, one: optimizer.state[one]["momentum_buffer"].zero_(),
    "its copy": lambda optimizer, one: len(optimizer.state.copy()),
    "its dict": lambda optimizer, one: len(dict(optimizer.state)),
    "unpacked": lambda optimizer, one: len({**optimizer.state}),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_at_the_state_of_an_optimizer_has_the_step_taken_first(name):
    found = []
    for is_pending in (False, True):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.full((2,), 3.0)
        optimizer = optim.SGD([parameter], 0.5, momentum=0.9)
        if is_pending:
            pending = PendingStep(optimizer, lambda: pending.take([parameter]))  # noqa: B023
            pending.guard_state()
        else:
            optimizer.step()
        state = optimizer.state
        found.append((LOOKS[name](optimizer, parameter), parameter))
        assert is_pending == (optimizer.state is not state)
    assert_same(found[1], found[0])


def test_the_state_is_the_optimizers_own_again_when_the_step_is_taken():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = optim.SGD(parameters, 0.5, momentum=0.9)
    state = optimizer.state
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    pending = PendingStep(optimizer, lambda: pending.take(parameters))
    pending.guard_state()
    pending.take(parameters[:1])
    assert optimizer.state is not state
    pending.take(parameters[1:])
    assert optimizer.state is state
    assert len(state) == 2


def test_a_step_that_is_forgotten_is_not_taken():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = optim.SGD([parameter], 0.5, momentum=0.9)
    state = optimizer.state
    pending = PendingStep(optimizer, lambda: pending.take([parameter]))
    pending.guard_state()
    pending.forget()
    pending.take([parameter])
    assert optimizer.state is state
    assert len(state) == len(pending) == 0
    assert parameter.tolist() == [1.0, 1.0]


# Which optimizers may be taken apart.


@pytest.mark.parametrize("kind", SEPARABLE, ids=lambda kind: kind.__name__)
def test_the_optimizers_of_torch_that_look_at_one_parameter_are_separable(kind):
    assert why_inseparable(kind([nn.Parameter(torch.ones(2))])) is None


class OwnSGD(optim.SGD):
    """A subclass may do anything."""


def test_the_reason_names_what_is_in_the_way():
    parameter = nn.Parameter(torch.ones(2, 2))
    assert why_inseparable(optim.LBFGS([parameter])) == "LBFGS may use several parameters at once"
    assert why_inseparable(optim.SparseAdam([parameter])) == "SparseAdam may use several parameters at once"
    assert why_inseparable(OwnSGD([parameter])) == "OwnSGD may use several parameters at once"
    assert why_inseparable(optim.Adam([parameter], differentiable=True)) == "Adam is differentiable"


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_an_optimizer_with_a_hook_on_its_step_is_inseparable_until_it_is_removed(register):
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))])
    handle = getattr(optimizer, register)(lambda *_: None)
    assert why_inseparable(optimizer) == "SGD has hooks on its step"
    handle.remove()
    assert why_inseparable(optimizer) is None


def test_a_hook_on_every_optimizer_makes_all_inseparable():
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))])
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert why_inseparable(optimizer) == "there are hooks on the step of every optimizer"
    finally:
        handle.remove()
    assert why_inseparable(optimizer) is None


def test_a_scheduler_does_not_make_an_optimizer_inseparable():
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))])
    lr_scheduler.StepLR(optimizer, 1)
    assert why_inseparable(optimizer) is None


def test_an_optimizer_whose_step_was_replaced_is_inseparable():
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))])
    plain_step = optimizer.step
    optimizer.step = lambda closure=None: plain_step(closure)
    assert why_inseparable(optimizer) == "the step of SGD is replaced"
