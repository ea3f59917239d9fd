"""Every place where an update can run out of memory, one by one."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpufeed.callbacks.scaled_rate import ScaledRate
from lightning_gpufeed.recover.update import REPEATED, UpdateFailed
from tests.recover.update_cases import (
    CASES,
    TEXT,
    OutOfMemoryAt,
    Training,
    guard,
    in_loop_mode,
    is_out_of_memory,
    no_room,
    plenty_of_room,
    same,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Threads cost more than they bring in tensors this small; put back by the fixture of all tests."""
    torch.set_num_threads(1)


# Out of memory at every call --------------------------------------------------------------------------------


def after(name: str, num_before: int, *, more: int = 0, is_in_loop_mode: bool = False) -> Training:
    """What steps that do not fail make of it."""
    training = Training(name)
    for _ in range(num_before):
        training.step()
    for group in training.optimizer.param_groups:
        if is_in_loop_mode and "foreach" in group and not group.get("fused"):
            group["foreach"] = False
    for _ in range(more):
        training.step()
    return training


def run_every_failure(name: str, num_before: int, injection: Callable[[int], Any], is_careful: bool) -> dict[str, int]:
    """Let one step fail at each of its calls of torch, and count the endings: never one that is half."""
    endings = {"done": 0, "clean": 0, "dirty": 0}
    before = after(name, num_before).state()
    expected = [
        in_loop_mode(after(name, num_before, more=1, is_in_loop_mode=is_loop).state()) for is_loop in (False, True)
    ]
    for number in itertools.count():
        training = after(name, num_before)
        events: list[str] = []
        guard(training, on_event=lambda event, error, events=events: events.append(event))
        groups = training.optimizer.param_groups
        training.set_gradients()
        injected = injection(number)
        failed = None
        try:
            with no_room() if is_careful else plenty_of_room(), injected:
                training.optimizer.step()
        except UpdateFailed as error:
            failed = error
        if failed is not None:
            assert is_out_of_memory(failed.original)
            assert events == []
            assert not failed.is_clean or same(training.state(), before), number
            endings["clean" if failed.is_clean else "dirty"] += 1
        else:
            now = in_loop_mode(training.state())
            assert any(same(now, one) for one in expected), number
            assert events in ([], [REPEATED])
            endings["done"] += 1
        assert training.optimizer.param_groups is groups
        assert not training.optimizer._optimizer_step_pre_hooks
        assert not training.optimizer._optimizer_step_post_hooks
        if injected.count <= number:  # it has more calls than the step: nothing failed
            return endings
    raise AssertionError("unreachable")


# State that is yet to be born and state that is there, for all classes where it matters which class it is.
BOTH = [*itertools.product(CASES, [0, 1])]
SOME = ["Adam", "Adam fused", "SGD nesterov foreach", "SparseAdam", "Adafactor foreach"]


@pytest.mark.parametrize(("name", "num_before"), [*((name, 1) for name in CASES), *((name, 0) for name in SOME)])
def test_one_failure_at_any_call_of_a_careful_step_is_cured(name: str, num_before: int) -> None:
    endings = run_every_failure(name, num_before, OutOfMemoryAt, is_careful=True)
    assert endings["done"] >= 1
    assert endings["clean"] == 0
    # Where the careful road is never needed, since no memory is, what fails is the plain step.
    has_plain_step = CASES[name][1].get("fused") and num_before > 0
    assert (endings["dirty"] > 0) == bool(has_plain_step)


@pytest.mark.parametrize(("name", "num_before"), [*((name, 0) for name in CASES), *((name, 1) for name in SOME)])
def test_memory_that_is_gone_from_any_call_of_a_careful_step_on_leaves_it_undone(name: str, num_before: int) -> None:
    endings = run_every_failure(name, num_before, partial(OutOfMemoryAt, lasts=True), is_careful=True)
    assert endings["dirty"] == 0
    assert endings["done"] >= 1


@pytest.mark.parametrize(("name", "num_before"), BOTH)
def test_one_failure_at_any_call_of_a_plain_step_is_never_silently_half(name: str, num_before: int) -> None:
    endings = run_every_failure(name, num_before, OutOfMemoryAt, is_careful=False)
    assert endings["done"] >= 1
    assert endings["dirty"] >= 1


@pytest.mark.parametrize(("name", "num_before"), [*itertools.product(SOME, [0, 1])])
def test_memory_that_is_gone_from_any_call_of_a_plain_step_on_is_never_silently_half(
    name: str, num_before: int
) -> None:
    endings = run_every_failure(name, num_before, partial(OutOfMemoryAt, lasts=True), is_careful=False)
    assert endings["done"] >= 1


class OutOfMemoryBelow(TorchDispatchMode):
    """The same below torch's Python functions. Under such a mode operations on lists change no versions."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.namespace == "aten":  # and not a mark of the profiler
            self.count += 1
            if self.count - 1 == self.number:
                raise RuntimeError(TEXT)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in CASES if "fused" in name or "foreach" in name])
def test_where_versions_do_not_tell_a_half_step_is_not_taken_for_an_untouched_one(name: str) -> None:
    endings = run_every_failure(name, 1, OutOfMemoryBelow, is_careful=False)
    assert endings["dirty"] > 0


def test_newborn_state_that_does_not_fit_is_born_in_a_repeated_step() -> None:
    training, plain = Training("Adam foreach"), Training("Adam foreach")
    for group in plain.optimizer.param_groups:
        group["foreach"] = False
    plain.step()
    events: list[tuple[str, BaseException]] = []
    guard(training, on_event=lambda *event: events.append(event))
    training.set_gradients()
    with OutOfMemoryAt(6):
        training.optimizer.step()
    assert same(in_loop_mode(training.state()), in_loop_mode(plain.state()))
    ((event, error),) = events
    assert event == REPEATED
    assert error.__traceback__ is None


def test_temporary_tensors_of_the_failed_update_are_gone_before_the_next_try() -> None:
    training = Training("Adam")
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation is torch.ops.aten.addcdiv_.default and len(made) < 2:
                made.append(weakref.ref(args[2]))  # the denominator
                if len(made) == 1:
                    raise RuntimeError(TEXT)
                alive.append(sum(one() is not None for one in made[:1]))
            return operation(*args, **(kwargs or {}))

    guard(training)
    training.set_gradients()
    with no_room(), Watch():
        training.optimizer.step()
    assert alive == [0]


def test_a_clean_failure_leaves_rates_unscaled_and_the_next_step_whole() -> None:
    training, plain = Training("Adam"), Training("Adam")
    for one in (training, plain):
        one.step()
    before = training.state()
    guard(training)
    for one in (training, plain):
        one.scaled = ScaledRate(one.optimizer, lambda: 0.25)  # type: ignore[attr-defined]
    training.set_gradients()
    with no_room(), OutOfMemoryAt(0, lasts=True), pytest.raises(UpdateFailed) as caught:
        training.optimizer.step()
    assert caught.value.is_clean
    assert same(training.state(), before)
    assert "as before it" in str(caught.value)
    training.optimizer.step()
    plain.step()
    assert same(training.state(), plain.state())


def test_a_step_that_cannot_be_saved_is_done_all_the_same_and_is_dirty_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    training, plain = Training("Adam"), Training("Adam")
    guard(training)
    plain.step()
    with no_room():
        training.step()
    assert same(training.state(), plain.state())
    training.set_gradients()
    with no_room(), OutOfMemoryAt(12), pytest.raises(UpdateFailed) as caught:
        training.optimizer.step()
    assert not caught.value.is_clean


@pytest.mark.parametrize("is_careful", [False, True])
def test_an_out_of_memory_in_a_hook_after_the_update_is_not_taken_for_an_undone_step(is_careful: bool) -> None:
    training = Training("Adam")
    guard(training)

    def hook(*_: Any) -> None:
        raise RuntimeError(TEXT)

    training.optimizer.register_step_post_hook(hook)
    with no_room() if is_careful else nullcontext(), pytest.raises(UpdateFailed) as caught:
        training.step()
    assert not caught.value.is_clean


def test_an_out_of_memory_in_what_follows_a_cured_step_does_not_look_like_one_of_the_closure() -> None:
    training = Training("Adam")

    def on_event(*_: Any) -> None:
        raise MemoryError

    guard(training, on_event=on_event)
    training.set_gradients()
    with plenty_of_room(), OutOfMemoryAt(3), pytest.raises(UpdateFailed) as caught:
        training.optimizer.step()
    assert not caught.value.is_clean


def test_an_out_of_memory_in_a_hook_of_the_repeated_step_is_clean() -> None:
    training = Training("Adam")
    before = training.state()
    guard(training)
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError(TEXT)

    training.optimizer.register_step_pre_hook(hook)
    training.set_gradients()
    with OutOfMemoryAt(3), pytest.raises(UpdateFailed) as caught:
        training.optimizer.step()
    assert caught.value.is_clean
    assert same(training.state(), before)


def test_no_file_stays_open_after_careful_steps() -> None:
    training = Training("Adam")
    guard(training)
    num_before = len(os.listdir("/proc/self/fd"))
    with no_room():
        training.step()
        training.set_gradients()
        with OutOfMemoryAt(0, lasts=True), pytest.raises(UpdateFailed):
            training.optimizer.step()
    assert len(os.listdir("/proc/self/fd")) == num_before
