from __future__ import annotations

import copy
import itertools
import warnings
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_gpufeed.callbacks.scaled_rate import ScaledRate
from lightning_gpufeed.device import headroom
from lightning_gpufeed.recover.attempt import forget
from lightning_gpufeed.recover.update import PER_PARAMETER, GuardedStep, UpdateFailed
from tests.recover.update_cases import (
    CASES,
    CPU,
    TEXT,
    OutOfMemoryAt,
    Training,
    guard,
    in_loop_mode,
    is_out_of_memory,
    no_room,
    same,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Threads cost more than they bring in tensors this small; put back by the fixture of all tests."""
    torch.set_num_threads(1)


# The road by parameters -------------------------------------------------------------------------------------


def test_all_classes_of_torch_that_keep_state_by_parameter_are_tried() -> None:
    assert {getattr(torch.optim, class_name) for class_name, _ in CASES.values()} == PER_PARAMETER


@pytest.mark.parametrize("name", CASES)
def test_careful_steps_are_bitwise_the_plain_steps_in_loop_mode(name: str) -> None:
    plain, guarded = Training(name), Training(name)
    for group in plain.optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False if not group.get("fused") else group["foreach"]
    step = guard(guarded)
    # ASGD, NAdam and RAdam have another formula after some steps.
    for is_careful in (True, False, True, True, False, True, True, True):
        if not is_careful and guarded.optimizer.param_groups[0].get("foreach"):
            is_careful = True  # the plain step of foreach has other roundings
        plain.step()
        with no_room() if is_careful else nullcontext():
            guarded.step()
        assert same(in_loop_mode(guarded.state()), in_loop_mode(plain.state()))
        assert same(
            [weight.grad.to_dense() for weight in guarded.weights if weight.grad is not None],
            [weight.grad.to_dense() for weight in plain.weights if weight.grad is not None],
        )
    options = CASES[name][1]
    # A fused kernel needs no temporary tensors: there is room for it once its state is born.
    expected = 1 if options.get("fused") and CASES[name][0] != "Adagrad" else 8 if options.get("foreach") else 6
    assert step.num_careful_steps == (0 if name == "Adagrad fused" else expected)
    assert not step.has_begun


@pytest.mark.parametrize("is_careful", [False, True])
@pytest.mark.parametrize("has_closure", [False, True])
def test_hooks_closure_and_update_come_in_the_usual_order(is_careful: bool, has_closure: bool) -> None:
    training, events = Training("Adam"), []
    optimizer, begun = training.optimizer, []
    before = training.weights[0].detach().clone()

    def note(what: str) -> None:
        is_updated = not torch.equal(training.weights[0], before)
        grads = [weight.grad is not None for weight in training.weights]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        events.append((what, is_updated, grads, sizes))
        begun.append(step.has_begun)

    optimizer.register_step_pre_hook(lambda *_: note("pre"))
    optimizer.register_step_post_hook(lambda *_: note("post"))
    step = guard(training)
    optimizer.register_step_pre_hook(lambda *_: note("later pre"))
    optimizer.register_step_post_hook(lambda *_: note("later post"))
    global_hooks = [
        register_optimizer_step_pre_hook(lambda *_: note("global pre")),
        register_optimizer_step_post_hook(lambda *_: note("global post")),
    ]

    def closure() -> str:
        assert torch.is_grad_enabled()
        note("closure")
        return "loss"

    training.set_gradients()
    try:
        with no_room() if is_careful else nullcontext():
            assert optimizer.step(*[closure] * has_closure) == ("loss" if has_closure else None)
    finally:
        for handle in global_hooks:
            handle.remove()
    earlier = ["global pre", "pre", "later pre", *["closure"] * has_closure]
    later = ["post", "later post", "global post"]
    whole = ([True] * 3, [3, 1])
    assert events == [*[(what, False, *whole) for what in earlier], *[(what, True, *whole) for what in later]]
    assert begun == [*[False] * len(earlier), *[True] * 3]
    assert step.num_careful_steps == is_careful
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 2


@pytest.mark.parametrize("given", ["by place", "by name"])
def test_a_careful_step_uses_the_rates_that_hooks_have_scaled(given: str) -> None:
    # ScaledRate scales when the closure has returned, in a closure of its own around that of training.
    plain, guarded = Training("Adam"), Training("Adam")
    guard(guarded)
    for training in (plain, guarded):
        scaled = ScaledRate(training.optimizer, lambda: 0.25)
        closure = training.set_gradients
        with no_room() if training is guarded else nullcontext():
            _ = training.optimizer.step(closure) if given == "by place" else training.optimizer.step(closure=closure)
        scaled.remove()
    assert same(guarded.state(), plain.state())


def test_a_repeated_step_uses_the_rates_that_hooks_have_scaled() -> None:
    plain, guarded = Training("Adam"), Training("Adam")
    guard(guarded)
    for training in (plain, guarded):
        scaled = ScaledRate(training.optimizer, lambda: 0.25)
        training.set_gradients()
        # The first two operations ask for room and make a step counter; then moments are to be born.
        with OutOfMemoryAt(3) if training is guarded else nullcontext():
            training.optimizer.step(lambda: None)
        scaled.remove()
    assert same(guarded.state(), plain.state())


def test_cycles_are_collected_when_room_runs_out_and_not_in_every_step_that_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, room, released = Training("Adam"), [True], []
    guard(training)
    monkeypatch.setattr(headroom, "can_allocate", lambda device, num_bytes: room[0])
    monkeypatch.setattr(headroom, "release", released.append)
    for has_room, num_released in [(True, 0), (False, 1), (False, 1), (False, 1), (True, 1), (False, 2)]:
        room[0] = has_room
        training.step()
        assert released == [CPU] * num_released


# What is wrapped --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_scheduler", ["no scheduler", "before", "after"])
def test_schedulers_work_around_and_inside_and_removal_leaves_no_trace(has_scheduler: str) -> None:
    training = Training("SGD")
    optimizer = training.optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns when `step` was not called or was replaced
        scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch) if has_scheduler == "before" else None
        found = vars(optimizer).get("step")
        step = guard(training)
        if has_scheduler == "after":
            scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        for _ in range(3):
            with no_room():
                training.step()
            if scheduler is not None:
                scheduler.step()
        assert step.num_careful_steps == 3
        step.remove()
        with no_room():
            training.step()
    assert step.num_careful_steps == 3
    if has_scheduler != "after":
        assert vars(optimizer).get("step") is found
    plain = Training("SGD")
    scheduler = LambdaLR(plain.optimizer, lambda epoch: 0.5**epoch) if scheduler is not None else None
    for number in range(4):
        plain.step()
        if scheduler is not None and number < 3:
            scheduler.step()
    assert same(training.state(), plain.state())


def test_removing_twice_or_copying_the_optimizer_is_harmless() -> None:
    training = Training("Adam")
    step = guard(training)
    copied = copy.deepcopy(training.optimizer)
    step.remove()
    step.remove()
    training.step()
    assert "step" not in vars(copied)


def test_an_out_of_memory_of_the_closure_passes_untouched_with_the_phase_known() -> None:
    training = Training("Adam")
    step, error = guard(training), RuntimeError(TEXT)

    def closure() -> None:
        raise error

    with pytest.raises(RuntimeError) as caught:
        training.optimizer.step(closure)
    assert caught.value is error
    assert not step.has_begun
    training.step()  # the next one works
    assert not step.has_begun


@pytest.mark.parametrize("is_careful", [False, True])
def test_other_errors_of_the_update_pass_untouched(is_careful: bool) -> None:
    training = Training("Adam")
    step = guard(training)
    training.set_gradients()
    training.optimizer.param_groups[1]["betas"] = None
    groups = training.optimizer.param_groups
    with no_room() if is_careful else nullcontext(), pytest.raises(TypeError, match="cannot unpack"):
        training.optimizer.step()
    assert step.has_begun
    assert training.optimizer.param_groups is groups
    assert not training.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("is_careful", [False, True])
def test_a_state_that_a_closure_or_a_hook_loads_is_the_one_that_counts(is_careful: bool) -> None:
    states = []
    for is_guarded in (False, True):
        training = Training("Adam")
        training.step()
        other = copy.deepcopy(training.optimizer.state_dict())
        for group in other["param_groups"]:
            group["lr"] *= 2
        if is_guarded:
            guard(training)
        training.set_gradients()
        with no_room() if is_guarded and is_careful else nullcontext():
            training.optimizer.step(partial(training.optimizer.load_state_dict, other))
        states.append(training.state())
        training.optimizer.register_step_post_hook(lambda optimizer, *_, other=other: optimizer.load_state_dict(other))
        with no_room() if is_guarded and is_careful else nullcontext():
            training.step()
        states.append(training.state())
    assert same(states[:2], states[2:])


def test_differentiable_steps_are_left_alone_but_the_phase_is_known() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    rate = torch.tensor(0.1, requires_grad=True)
    optimizer = torch.optim.SGD([weight.clone()], lr=rate, differentiable=True)
    step = GuardedStep(optimizer, CPU, is_out_of_memory=is_out_of_memory, forget=forget)
    moved = optimizer.param_groups[0]["params"][0]
    moved.grad = torch.ones(2)
    with no_room():
        optimizer.step()
    (slope,) = torch.autograd.grad(moved.sum(), rate)
    assert slope == -2
    assert step.num_careful_steps == 0
    with OutOfMemoryAt(0), pytest.raises(UpdateFailed) as caught:
        optimizer.step()
    assert not caught.value.is_clean


# Optimizers of other kinds ----------------------------------------------------------------------------------


def with_count(base: type) -> type:
    """An optimizer of somebody else: counts its steps in an attribute, behind the back of the state."""

    class Counting(base):  # type: ignore[misc]
        num_updates = 0

        def step(self, closure: Any = None) -> Any:
            self.num_updates = self.num_updates + 1
            return super().step(closure)

    return Counting


def test_an_optimizer_of_an_unknown_class_is_undone_as_a_whole() -> None:
    training = Training("Adam", with_count)
    training.step()
    for number in itertools.count():
        before, count = training.state(), training.optimizer.num_updates
        step = guard(training)
        training.set_gradients()
        injected = OutOfMemoryAt(number, lasts=True)
        with no_room(), injected, suppress(UpdateFailed):
            training.optimizer.step()
            break
        assert same(training.state(), before)
        assert training.optimizer.num_updates == count
        step.remove()
    assert number > 3
    assert training.optimizer.num_updates == count + 1


def test_an_unknown_class_that_runs_out_of_memory_where_room_was_seen_is_dirty() -> None:
    # It may change weights through `.data`, which no version tells.
    training = Training("Adam", with_count)
    guard(training)
    training.set_gradients()
    with OutOfMemoryAt(4), pytest.raises(UpdateFailed) as caught:
        training.optimizer.step()
    assert not caught.value.is_clean


def test_an_optimizer_that_holds_what_cannot_be_saved_is_never_called_clean() -> None:
    training = Training("Adam", with_count)
    training.optimizer.sampler = object()
    guard(training)
    training.set_gradients()
    with no_room(), OutOfMemoryAt(0, lasts=True), pytest.raises(UpdateFailed) as caught:
        training.optimizer.step()
    assert not caught.value.is_clean


@pytest.mark.parametrize("is_careful", [False, True])
def test_lbfgs_runs_its_closure_as_often_as_ever(is_careful: bool) -> None:
    runs = []
    for is_guarded in (False, True):
        weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        optimizer = torch.optim.LBFGS([weight], max_iter=8, line_search_fn="strong_wolfe")
        if is_guarded:
            step = GuardedStep(optimizer, CPU, is_out_of_memory=is_out_of_memory, forget=forget)
        num_calls = 0

        def closure(weight: Any = weight, optimizer: Any = optimizer) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            optimizer.zero_grad()
            loss = (weight**4).sum() + (weight[0] - weight[1]) ** 2
            loss.backward()
            return loss

        with no_room() if is_guarded and is_careful else nullcontext():
            for _ in range(3):
                loss = optimizer.step(closure)
        runs.append((num_calls, weight.detach().clone(), loss.detach(), copy.deepcopy(optimizer.state_dict())))
    assert runs[0][0] > 6
    assert same(*runs)
    assert step.num_careful_steps == 3 * is_careful


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("is_careful", [False, True])
def test_lbfgs_that_fails_in_a_later_closure_is_undone_or_dirty(is_careful: bool, num_before: int) -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = torch.optim.LBFGS([weight], max_iter=4)
    calls: list[int] = []
    is_starving = False

    def closure() -> torch.Tensor:
        calls.append(1)
        if is_starving and len(calls) == 3:
            raise RuntimeError(TEXT)
        optimizer.zero_grad()
        loss = (weight**4).sum()
        loss.backward()
        return loss

    for _ in range(num_before):
        optimizer.step(closure)
    before = copy.deepcopy((weight.detach(), optimizer.state_dict()))
    step = GuardedStep(optimizer, CPU, is_out_of_memory=is_out_of_memory, forget=forget)
    calls, is_starving = [], True
    with no_room() if is_careful else nullcontext(), pytest.raises(UpdateFailed) as caught:
        optimizer.step(closure)
    assert len(calls) == 3  # never again
    assert caught.value.is_clean == is_careful
    assert step.has_begun
    if is_careful:
        if not num_before:  # made before the closure is called for the first time
            before[1]["state"][0] = {"func_evals": 0, "n_iter": 0}
        assert same((weight.detach(), optimizer.state_dict()), before)


# Mixed precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_infinity", [False, True])
@pytest.mark.parametrize("name", ["Adam", "Adam fused", "AdamW fused", "SGD momentum", "SGD fused"])
def test_a_gradient_scaler_steps_carefully_as_it_steps_plainly(name: str, has_infinity: bool) -> None:
    states = []
    for is_careful in (False, True):
        training = Training(name)
        step = guard(training) if is_careful else None
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for number in range(4):
            training.set_gradients()
            for weight in training.weights:
                assert weight.grad is not None
                weight.grad *= scaler.scale(torch.tensor(1.0))
            if has_infinity and number == 1:
                training.weights[1].grad[0, 0] = torch.inf  # type: ignore[index]
            with no_room() if is_careful else nullcontext():
                scaler.step(training.optimizer)
            scaler.update()
        states.append((training.state(), scaler.state_dict()))
    assert same(*states)
    assert step is not None
    assert step.num_careful_steps == (1 if "fused" in name else 4 - has_infinity)


@pytest.mark.parametrize("name", ["Adam fused", "SGD fused"])
def test_a_scaled_gradient_is_divided_once_when_a_fused_step_is_tried_again(name: str) -> None:
    plain = Training(name)
    plain.step()
    for number in itertools.count():
        training = Training(name)
        guard(training)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        training.set_gradients()
        for weight in training.weights:
            assert weight.grad is not None
            weight.grad *= scaler.scale(torch.tensor(1.0))
        training.optimizer.grad_scale = torch.tensor(8.0)
        training.optimizer.found_inf = torch.tensor(0.0)
        injected = OutOfMemoryAt(number)
        with no_room(), injected:
            training.optimizer.step()
        assert same(training.state(), plain.state()), number
        if injected.count <= number:
            break
    assert number > 3
