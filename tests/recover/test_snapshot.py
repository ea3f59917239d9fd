"""Random generators and buffers are what they were before a failed attempt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpufeed.recover.snapshot import LARGE_BYTES, BufferStates, GeneratorStates

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(()).item(),
    "dropout": lambda: F.dropout(torch.ones(64)).tolist(),
}

# Generators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWS)
def test_what_was_drawn_since_is_drawn_again(name):
    states = GeneratorStates(CPU)
    first = [DRAWS[name]() for _ in range(3)]
    states.put_back()
    assert [DRAWS[name]() for _ in range(3)] == first
    states.put_back()
    assert [DRAWS[name]() for _ in range(3)] == first


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_from_any_of_them_is_noticed_until_put_back(name):
    states = GeneratorStates(CPU)
    assert not states.has_moved()
    DRAWS[name]()
    assert states.has_moved()
    states.put_back()
    assert not states.has_moved()


def test_a_second_half_of_a_pair_of_normal_numbers_is_kept_too():
    """`random.gauss` and numpy's draw two at once and keep one: it is part of the state."""
    random.gauss(0, 1), np.random.randn()
    states = GeneratorStates(CPU)
    first = random.gauss(0, 1), np.random.randn()
    assert states.has_moved()
    states.put_back()
    assert (random.gauss(0, 1), np.random.randn()) == first


def test_a_large_draw_that_ends_where_it_began_is_no_draw():
    """Putting back twice, or without anything drawn, changes nothing."""
    states = GeneratorStates(CPU)
    states.put_back()
    expected = torch.rand(3)
    states.put_back()
    assert torch.equal(torch.rand(3), expected)


# Buffers -----------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Buffers of all kinds, in two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ema", torch.arange(4.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.inner.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))
        self.inner.register_buffer("coarse", torch.ones(5, dtype=torch.bfloat16))


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_values(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    now = dict(module.named_buffers())
    assert list(now) == list(expected)
    assert [name for name in now if not torch.equal(now[name], expected[name])] == []


def change_all(module: nn.Module) -> None:
    for buffer in module.buffers():
        buffer.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)


@pytest.mark.parametrize("num_batches", [1, 2, 4])
@pytest.mark.parametrize("num_attempts", [1, 3])
def test_values_come_back_in_the_same_tensors_after_every_attempt_of_every_batch(num_batches, num_attempts):
    module = Holder()
    places = {name: id(buffer) for name, buffer in module.named_buffers()}
    states = BufferStates(module)
    for _ in range(num_batches):
        states.save()
        before = values_of(module)
        for _ in range(num_attempts):
            change_all(module)
            states.put_back()
            assert_values(module, before)
        change_all(module)  # the attempt that works
    assert {name: id(buffer) for name, buffer in module.named_buffers()} == places
    assert module.counter == num_batches


def test_one_that_changes_only_now_and_then_comes_back_each_time():
    module = Holder()
    states = BufferStates(module)
    for number in range(6):
        states.save()
        before = values_of(module)
        if number % 2:
            module.ema.mul_(3)
        states.put_back()
        assert_values(module, before)
        if number in (2, 3):
            module.ema.add_(1)


def test_a_tensor_put_in_the_place_of_another_is_taken_out_again():
    module = Holder()
    states = BufferStates(module)
    for _ in range(3):
        states.save()
        before, tensor = values_of(module), module.ema
        module.ema.mul_(5)  # first in place, then another: both are undone
        module.ema = module.ema * 0.9
        module.inner.mask = torch.zeros(7)
        states.put_back()
        assert module.ema is tensor
        assert_values(module, before)
        module.ema = module.ema * 0.9  # the attempt that works; the next batch begins with another tensor


def test_nothing_stays_nothing_and_what_was_there_returns_after_it_was_set_to_none():
    module = Holder()
    states = BufferStates(module)
    states.save()
    before, tensor = values_of(module), module.ema
    module.nothing, module.ema = torch.ones(3), None
    states.put_back()
    assert module.nothing is None
    assert module.ema is tensor
    assert_values(module, before)
    module.nothing = torch.ones(3)
    states.save()
    module.nothing.add_(1)
    states.put_back()
    assert torch.equal(module.nothing, torch.ones(3))


def test_one_that_changes_its_shape_or_device_type_between_batches_is_copied_anew():
    module = Holder()
    states = BufferStates(module)
    for shape, dtype in (((2,), torch.float32), ((3, 1), torch.float64), ((0,), torch.int8), ((3, 1), torch.float16)):
        module.ema = torch.ones(shape, dtype=dtype)
        for _ in range(2):
            states.save()
            module.ema.add_(1)
            states.put_back()
            assert torch.equal(module.ema, torch.ones(shape, dtype=dtype))


def test_one_tensor_in_two_modules_stays_one():
    module = nn.ModuleList([nn.Module(), nn.Module()])
    shared = torch.zeros(3)
    for part in module:
        part.register_buffer("shared", shared)
    states = BufferStates(module)
    for _ in range(2):
        states.save()
        shared.add_(1)
        states.put_back()
        assert shared.tolist() == [0.0, 0.0, 0.0]
        assert module[0].shared is module[1].shared is shared


def test_one_with_gaps_or_an_expanded_one_is_put_back_as_far_as_it_can_be_changed():
    module = nn.Module()
    around = torch.arange(12.0).view(3, 4)
    module.register_buffer("column", around[:, 1])
    module.register_buffer("wide", torch.ones(1).expand(5))  # torch itself refuses to change it in place
    states = BufferStates(module)
    for _ in range(2):
        states.save()
        module.column.add_(1)
        states.put_back()
        assert torch.equal(around, torch.arange(12.0).view(3, 4))


def test_a_sparse_one_comes_back():
    module = nn.Module()
    module.register_buffer("graph", torch.eye(3).to_sparse())
    states = BufferStates(module)
    for _ in range(3):
        states.save()
        module.graph.mul_(2)
        states.put_back()
        assert torch.equal(module.graph.to_dense(), torch.eye(3))


# Behind torch's count ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, momentum=None),
        nn.BatchNorm1d(3, affine=False),
        nn.InstanceNorm1d(3, track_running_stats=True),
    ],
    ids=str,
)
def test_statistics_of_normalisations_come_back_though_their_kernels_do_not_count_changes(norm):
    shape = (4, 3, 5)
    norm(torch.randn(shape))
    states = BufferStates(norm)
    for _ in range(3):
        states.save()
        before = values_of(norm)
        norm(5 + torch.randn(shape))
        assert not torch.equal(norm.running_mean, before["running_mean"])
        states.put_back()
        assert_values(norm, before)
        norm(torch.randn(shape))


class OwnNorm(nn.Module):
    """Normalises by itself, as many libraries do; the version of its statistics stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: torch.Tensor) -> None:
        F.batch_norm(x, self.mean, self.var, training=True)


class Codebook(nn.Module):
    """A moving average through `.data`, as in most vector quantisers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embedding", torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> None:
        self.embedding.data.mul_(0.99).add_(x.mean(), alpha=0.01)


@pytest.mark.parametrize("make", [OwnNorm, Codebook])
def test_small_buffers_come_back_however_they_were_changed(make):
    module = make()
    states = BufferStates(module)
    for _ in range(3):
        states.save()
        before = values_of(module)
        module(7 + torch.randn(4, 3))
        assert any(not torch.equal(value, before[name]) for name, value in module.named_buffers())
        states.put_back()
        assert_values(module, before)
        module(torch.randn(4, 3))


# What it costs -------------------------------------------------------------------------------------------------


class Copied(TorchDispatchMode):
    """Bytes that were copied to somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_foreach_copy_":
            self.num_bytes += sum(tensor.nbytes for tensor in args[0])
        elif name in ("copy_", "clone", "_to_copy"):
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


class Large(nn.Module):
    """A table that never changes, one that always does, and one that is rather large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2**20))  # 4 MiB
        self.register_buffer("queue", torch.zeros(2**20))
        self.register_buffer("step", torch.zeros(()))


def test_a_large_buffer_that_never_changes_is_copied_once_and_one_that_does_each_time():
    module = Large()
    states = BufferStates(module)
    copied = []
    for _ in range(4):
        with Copied() as seen:
            states.save()
        copied.append(seen.num_bytes)
        module.queue.add_(1)
        module.step.add_(1)
    assert copied == [2 * 2**22 + 4, 2**22 + 4, 2**22 + 4, 2**22 + 4]
    before = module.queue.clone()
    states.save()
    module.queue.add_(1)
    module.table.add_(1)  # now it does
    states.put_back()
    assert torch.equal(module.queue, before)
    assert not module.table.any()


def test_putting_back_copies_what_was_changed_and_no_large_buffer_that_was_not():
    module = Large()
    states = BufferStates(module)
    states.save()
    module.step.add_(1)
    with Copied() as seen:
        states.put_back()
    assert seen.num_bytes == 4


# Inference mode ------------------------------------------------------------------------------------------------


def test_in_inference_mode_where_nothing_is_counted_they_come_back_too():
    module = Holder()
    states = BufferStates(module)
    with torch.inference_mode():
        module.scratch = torch.ones(2)  # made there, so changes of it have no version at all
        for _ in range(3):
            states.save()
            before = values_of(module)
            change_all(module)
            states.put_back()
            assert_values(module, before)
            change_all(module)
    assert module.counter == 3


def test_one_made_in_inference_mode_is_passed_over_outside_of_it_where_it_cannot_change():
    module = Holder()
    with torch.inference_mode():
        module.scratch = torch.ones(2)
    states = BufferStates(module)
    states.save()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        module.scratch.add_(1)
    module.ema.add_(1)
    states.put_back()
    assert module.ema.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_very_large_ones_are_not_copied_in_inference_mode_in_every_batch():
    module = nn.Module()
    module.register_buffer("huge", torch.zeros(LARGE_BYTES + 1, dtype=torch.int8))
    module.register_buffer("small", torch.zeros(2))
    states = BufferStates(module)
    with torch.inference_mode(), Copied() as seen:
        for _ in range(3):
            states.save()
    assert seen.num_bytes == 3 * module.small.nbytes


def test_one_set_of_states_serves_both_modes_in_turn():
    module = Holder()
    states = BufferStates(module)
    for number in range(4):
        with torch.inference_mode(number % 2 == 0):
            states.save()
            before = values_of(module)
            change_all(module)
            states.put_back()
            assert_values(module, before)


# Modules that are not finished ---------------------------------------------------------------------------------


def test_a_buffer_whose_shape_is_not_known_yet_is_passed_over_and_left_to_be_made():
    norm = nn.LazyBatchNorm1d(affine=False)
    states = BufferStates(norm)
    states.save()
    states.put_back()
    norm(torch.randn(4, 3))
    assert norm.running_mean.shape == (3,)
    states.save()
    before = values_of(norm)
    norm(torch.randn(4, 3))
    states.put_back()
    assert_values(norm, before)


# Which change --------------------------------------------------------------------------------------------------


def test_buffers_that_differ_are_named_but_for_those_of_batch_normalisation():
    module = nn.Sequential(Holder(), nn.BatchNorm1d(4))
    states = BufferStates(module)
    states.save()
    assert states.changed_names() == []
    module[1](torch.randn(4, 4))
    module[0].ema.add_(1)
    module[0].inner.mask = torch.zeros(3, 3, dtype=torch.bool)
    assert states.changed_names() == ["0.ema", "0.inner.mask"]
    states.put_back()
    assert states.changed_names() == []


# Replaced memory -----------------------------------------------------------------------------------------------

REPLACE = {
    "longer": lambda buffer: torch.cat([buffer, buffer]),
    "shorter": lambda buffer: buffer[:1].clone(),
    "another type": lambda buffer: buffer.double() + 1e-12,
    "the same kind": lambda buffer: buffer + 1,
}


@pytest.mark.parametrize("name", REPLACE)
def test_one_whose_memory_is_replaced_between_batches_is_saved_as_it_is_now(name):
    module = Holder()
    states = BufferStates(module)
    states.save()
    states.save()
    module.ema.data = REPLACE[name](module.ema)
    expected = module.ema.clone()
    states.save()
    module.ema.add_(1)
    states.put_back()
    assert module.ema.dtype == expected.dtype
    assert torch.equal(module.ema, expected)


@pytest.mark.parametrize("name", REPLACE)
def test_one_whose_memory_is_replaced_by_the_attempt_gets_it_back(name):
    module = Holder()
    states = BufferStates(module)
    tensor = module.ema
    for _ in range(2):
        states.save()
        tensor.data = REPLACE[name](tensor)
        states.put_back()
        assert module.ema is tensor
        assert tensor.dtype == torch.float32
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_new_ones_can_be_left_where_the_attempt_has_made_them():
    module = Holder()
    states = BufferStates(module)
    states.save()
    module.nothing = torch.ones(2)
    module.ema.add_(1)
    states.put_back(keeps_new=True)
    assert module.nothing.tolist() == [1.0, 1.0]
    assert module.ema.tolist() == [0.0, 1.0, 2.0, 3.0]
