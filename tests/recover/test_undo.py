from __future__ import annotations

import collections
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_gpufeed.recover.undo import PIECE_BYTES, UndoLog

CPU = torch.device("cpu")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond that size, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@st.composite
def strided_tensors(draw: Callable[..., Any]) -> torch.Tensor:
    """Any dtype, up to four axes in any order, some with gaps."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(
        st.sampled_from(
            [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool, torch.float8_e4m3fn]
        )
    )
    whole = torch.randint(0, 256, [*(2 * n for n in shape), dtype.itemsize], dtype=torch.uint8)
    if dtype is torch.bool:
        whole %= 2
    tensor = whole.view(dtype).squeeze(-1)
    for axis, size in enumerate(shape):
        if draw(st.booleans()):
            tensor = tensor[(slice(None),) * axis + (slice(None, None, 2),)]
        else:
            tensor = tensor.narrow(axis, draw(st.integers(0, size)), size)
    return tensor.permute(draw(st.permutations(range(tensor.ndim))))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return bytes(tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())


@given(strided_tensors(), st.sampled_from(["cpu", "cuda"]))
def test_every_kind_of_tensor_comes_back_bit_for_bit(tensor: torch.Tensor, where: str) -> None:
    # For an accelerator the copies are kept in host memory, wherever the tensors are.
    base = tensor._base if tensor._base is not None else tensor
    before, around = raw_bytes(tensor), base.clone()
    with UndoLog(torch.device(where)) as log:
        log.save(tensor)
        tensor.zero_()
        assert log.undo()
        assert log.is_complete
    assert raw_bytes(tensor) == before
    assert raw_bytes(base) == raw_bytes(around)  # nothing beside it is written to


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3000, 500)[:, ::2],  # rows with gaps, several to a piece
        torch.randn(2, 3, 700_000)[:, :, ::2],  # rows larger than a piece, split again
        torch.randn(4, 3, 300, 300).contiguous(memory_format=torch.channels_last),
    ],
    ids=["rows", "large rows", "channels last"],
)
def test_large_tensors_with_gaps_come_back(tensor: torch.Tensor) -> None:
    assert tensor.nbytes > PIECE_BYTES
    before = tensor.clone()
    with UndoLog(CPU) as log:
        log.save(tensor)
        tensor.zero_()
        assert log.undo()
    assert torch.equal(tensor, before)


def test_containers_get_back_their_old_members_in_place_and_in_order() -> None:
    inner = [torch.ones(2), "a"]
    deque, members, names = collections.deque([1, 2]), {3, 4}, ("x", inner)
    state: dict[str, Any] = {"step": 1, "list": inner, "deque": deque, "set": members, "names": names}
    with UndoLog(CPU) as log:
        log.save(state)
        inner[0].zero_()  # type: ignore[attr-defined]
        inner.append("b")
        deque.popleft()
        members.clear()
        del state["step"]
        state["born"] = torch.ones(3)
        assert log.undo()
    assert list(state) == ["step", "list", "deque", "set", "names"]
    assert state["list"] is inner
    assert state["names"] is names
    assert inner[0].tolist() == [1, 1]  # type: ignore[attr-defined]
    assert (inner[1:], list(deque), members) == (["a"], [1, 2], {3, 4})


def test_a_parameter_is_the_same_object_afterwards_and_still_needs_a_gradient() -> None:
    parameter = nn.Parameter(torch.ones(3))
    with UndoLog(CPU) as log:
        log.save(parameter)
        with torch.no_grad():
            parameter.mul_(2)
        assert log.undo()
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.tolist() == [1, 1, 1]


def test_a_newborn_member_is_gone_and_an_old_one_is_back() -> None:
    old, new = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    entry: dict[str, Any] = {"step": torch.tensor(1.0)}
    state: Any = collections.defaultdict(dict, {old: entry})
    with UndoLog(CPU) as log:
        log.save_member(state, old)
        log.save_member(state, new)
        state[new]["step"] = torch.tensor(1.0)
        entry["step"] += 1
        entry["born"] = 1
        assert log.undo()
    assert list(state) == [old]
    assert state[old] is entry
    assert entry == {"step": torch.tensor(1.0)}


def test_only_what_came_after_a_mark_is_undone_and_it_can_be_undone_again() -> None:
    first, second = torch.ones(2), torch.ones(2)
    with UndoLog(CPU) as log:
        log.save(first)
        first.zero_()
        mark = len(log)
        log.save(second)
        for _ in range(2):
            second.zero_()
            assert log.undo(mark)
            assert (first.tolist(), second.tolist()) == ([0, 0], [1, 1])
        assert log.undo()
    assert first.tolist() == [1, 1]


def test_saving_twice_keeps_the_older_contents() -> None:
    tensor = torch.ones(2)
    with UndoLog(CPU) as log:
        log.save(tensor)
        tensor.zero_()
        log.save(tensor)
        assert log.undo()
    assert tensor.tolist() == [1, 1]


class Parts(torch.Tensor):
    """A tensor that is made of two others, as a quantized weight is of values and scales."""

    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scales: torch.Tensor) -> Parts:
        made: Parts = torch.Tensor._make_wrapper_subclass(cls, values.shape)  # type: ignore[attr-defined]
        made.values, made.scales = values, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


class Named(torch.Tensor):
    """A tensor of another class, with memory of its own."""


def test_tensor_subclasses_come_back() -> None:
    parts, named = Parts(torch.ones(3), torch.ones(1)), torch.ones(2).as_subclass(Named)
    with UndoLog(CPU) as log:
        log.save(parts, named)
        for tensor in (parts.values, parts.scales, named):
            tensor.zero_()
        assert log.undo()
    assert (parts.values.tolist(), parts.scales.tolist(), named.tolist()) == ([1, 1, 1], [1], [1, 1])


@pytest.mark.parametrize(
    "value",
    [object(), torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.Generator()],
    ids=["object", "sparse", "meta", "generator"],
)
def test_what_cannot_be_saved_is_said(value: Any) -> None:
    tensor = torch.ones(1)
    with UndoLog(CPU) as log:
        log.save(tensor, [value])
        tensor.zero_()
        assert not log.is_complete
        assert not log.undo()
    assert tensor.tolist() == [1]  # the rest comes back


def test_a_full_disk_is_said_and_leaves_what_fitted() -> None:
    small, large = torch.ones(100), torch.ones(100_000)
    with UndoLog(CPU) as log, largest_file(50_000):
        log.save(small)
        mark = len(log)
        log.save(large)
        small.zero_()
        large.zero_()
        assert not log.is_complete
        assert not log.undo(mark)
        assert not log.undo()
    assert small.tolist() == [1] * 100


def test_no_file_is_left_behind_or_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    num_before = num_open_files()
    with UndoLog(CPU) as log:
        log.save(torch.ones(3))
        assert num_open_files() == num_before + 1
        assert list(tmp_path.iterdir()) == []
    assert num_open_files() == num_before


def test_after_closing_nothing_can_be_undone() -> None:
    tensor = torch.ones(2)
    log = UndoLog(CPU)
    log.save(tensor)
    tensor.zero_()
    log.close()
    log.close()
    assert len(log) == 0
    log.undo()
    assert tensor.tolist() == [0, 0]


def test_a_whole_optimizer_comes_back_with_its_own_attributes() -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1, momentum=0.9)
            self.num_steps = 0

    weight = nn.Parameter(torch.ones(2))
    inner = Counting([weight])
    outer = Counting([nn.Parameter(torch.ones(1))])
    outer.base = inner  # type: ignore[attr-defined]
    with UndoLog(CPU) as log:
        log.save(outer)
        assert log.is_complete
        inner.num_steps = outer.num_steps = 7
        weight.grad = torch.ones(2)
        inner.step()
        outer.param_groups[0]["lr"] = 3.0
        assert log.undo()
    assert (inner.num_steps, outer.num_steps, outer.param_groups[0]["lr"]) == (0, 0, 0.1)
    assert weight.tolist() == [1, 1]
    assert not inner.state
