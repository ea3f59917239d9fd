from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_gpufeed.device import headroom
from tests.doubles import run_forked

CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30


def mapped_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))


@contextmanager
def ceiling(num_bytes: int) -> Iterator[int]:
    """The address space may grow by so much; gives the limit."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped_bytes() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_free_host_memory_is_what_the_kernel_calls_available() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    free = headroom.free_bytes(CPU)
    assert free is not None
    # Other processes take and give memory between the two readings.
    assert abs(free - available) < 2 * GIB


def test_a_ceiling_on_the_address_space_is_what_is_free() -> None:
    with ceiling(600 * MIB):
        free = headroom.free_bytes(CPU)
        assert free is not None
        # What this process maps and unmaps by itself in between is far less.
        assert 500 * MIB < free < 700 * MIB
        assert headroom.can_allocate(CPU, 300 * MIB)
        assert not headroom.can_allocate(CPU, 900 * MIB)
        assert "GiB free of" in headroom.describe_memory(CPU)
    assert headroom.can_allocate(CPU, 900 * MIB)


def test_a_ceiling_that_is_passed_already_leaves_nothing() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() - 100 * MIB, limits[1]))
    try:
        assert headroom.free_bytes(CPU) == 0
        assert headroom.is_low(CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_memory_is_low_below_a_tenth_of_the_ceiling() -> None:
    with ceiling(mapped_bytes() // 20):
        assert headroom.is_low(CPU)
    with ceiling(mapped_bytes()):
        assert not headroom.is_low(CPU)


def test_asking_touches_no_memory() -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    before = resident()
    assert headroom.can_allocate(CPU, GIB)
    assert resident() - before < 100 * MIB


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_hardly_anything_always_fits(num_bytes: int) -> None:
    assert headroom.can_allocate(CPU, num_bytes)


def test_what_no_machine_has_never_fits() -> None:
    assert not headroom.can_allocate(CPU, 2**60)


def test_without_proc_nothing_is_known_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, *_: Any) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert headroom.free_bytes(CPU) is None
    assert not headroom.is_low(CPU)
    assert headroom.describe_memory(CPU) == "cpu: memory unknown"


def test_release_collects_what_only_a_cycle_holds() -> None:
    class Node:
        pass

    gc.disable()
    try:
        node: Any = Node()
        node.itself, node.tensor = node, torch.ones(3)
        alive = weakref.ref(node.tensor)
        del node
        assert alive() is not None
        headroom.release(CPU)
        assert alive() is None
    finally:
        gc.enable()


HEAP = """
import torch
from lightning_gpufeed.device import headroom

def resident():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmRSS"))

CPU, MIB = torch.device("cpu"), 2**20
torch.set_num_threads(1)
"""

CASE = """
headroom.release(CPU)
before = resident()
for _ in range(3):
    torch.empty(24 * MIB, dtype=torch.uint8)
blocks, pins = [], []
for _ in range(4):
    blocks.append(torch.ones(20 * MIB, dtype=torch.uint8))
    pins.append(torch.ones(100))
del blocks
held = resident() - before
headroom.release(CPU)
print(held >= 70 * MIB, resident() - before <= 30 * MIB)
"""


def test_release_returns_the_free_pages_of_the_heap() -> None:
    # Blocks below the mapping threshold, which grows with what is freed, stay in the heap when they are freed.
    assert run_forked(HEAP, {"heap": CASE})["heap"].text.split() == ["True", "True"]


def device_module(**functions: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: (lambda *_, value=value: value) for name, value in functions.items()})


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a device that is not there answer with given numbers; the real ones are asked in a test marked gpu."""

    def install(**functions: Any) -> SimpleNamespace:
        module = device_module(**functions)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        return module

    return install


def test_on_an_accelerator_unused_blocks_of_the_allocator_count_as_free(pretend: Any) -> None:
    pretend(mem_get_info=(2 * GIB, 10 * GIB), memory_reserved=5 * GIB, memory_allocated=4 * GIB)
    device = torch.device("cuda", 0)
    assert headroom.free_bytes(device) == 3 * GIB
    assert headroom.can_allocate(device, 3 * GIB)
    assert not headroom.can_allocate(device, 3 * GIB + 1)
    assert not headroom.is_low(device)


def test_the_driver_is_asked_only_when_the_cache_is_not_enough(pretend: Any) -> None:
    module = pretend(memory_reserved=5 * GIB, memory_allocated=4 * GIB)

    def mem_get_info(_: Any) -> Any:
        raise AssertionError("asked")

    module.mem_get_info = mem_get_info
    assert headroom.can_allocate(torch.device("cuda"), GIB)
    with pytest.raises(AssertionError, match="asked"):
        headroom.can_allocate(torch.device("cuda"), GIB + 1)


def test_an_accelerator_is_low_below_a_tenth(pretend: Any) -> None:
    pretend(mem_get_info=(GIB // 2, 10 * GIB), memory_reserved=5 * GIB, memory_allocated=5 * GIB - 100)
    assert headroom.is_low(torch.device("xpu"))


def test_mps_is_measured_against_the_recommended_maximum(pretend: Any) -> None:
    pretend(recommended_max_memory=8 * GIB, current_allocated_memory=6 * GIB)
    device = torch.device("mps")
    assert headroom.free_bytes(device) == 2 * GIB
    assert headroom.can_allocate(device, 2 * GIB)
    assert not headroom.can_allocate(device, 2 * GIB + 1)


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "raises"])
def test_an_accelerator_without_numbers_is_unknown_and_stops_nobody(pretend: Any, is_there: bool) -> None:
    module = pretend()
    if is_there:

        def unsupported(_: Any) -> Any:
            raise RuntimeError("Allocator for this device has no statistics")

        module.mem_get_info = module.memory_stats = module.memory_reserved = module.memory_allocated = unsupported
    device = torch.device("xla")
    assert headroom.free_bytes(device) is None
    assert headroom.can_allocate(device, 2**60)
    assert not headroom.is_low(device)
    assert headroom.describe_memory(device) == "xla: memory unknown"
    headroom.release(device)


def test_release_empties_the_cache_after_cycles_are_gone(pretend: Any) -> None:
    class Node:
        pass

    node: Any = Node()
    node.itself = node
    alive, seen = weakref.ref(node), []
    pretend().empty_cache = lambda: seen.append(alive())
    del node
    headroom.release(torch.device("cuda"))
    assert seen == [None]


def test_one_line_says_how_full_an_accelerator_is(pretend: Any) -> None:
    pretend(
        mem_get_info=(2 * GIB, 10 * GIB),
        memory_reserved=5 * GIB,
        memory_allocated=4 * GIB,
        memory_stats={"num_ooms": 1, "num_alloc_retries": 3},
    )
    assert headroom.describe_memory(torch.device("cuda", 1)) == (
        "cuda:1: 4.00 GiB in tensors, 5.00 GiB reserved, 3.00 GiB free of 10.00 GiB, 1 out-of-memory error, "
        "3 allocations repeated after a clean-up"
    )


def test_one_line_says_how_full_the_host_is() -> None:
    line = headroom.describe_memory(CPU)
    assert line.startswith("cpu: ")
    assert [part.split(" ", 1)[1].split(" ", 1)[1] for part in line[5:].split(", ")][:2] == ["resident", "mapped"]
    assert "\n" not in line


@pytest.mark.gpu
def test_a_real_device_answers() -> None:
    device = torch.device("cuda", 0)
    kept = torch.zeros(256 * MIB, dtype=torch.uint8, device=device)
    free = headroom.free_bytes(device)
    assert free is not None
    assert headroom.can_allocate(device, free // 2)
    assert not headroom.can_allocate(device, 2 * free)
    del kept
    reserved = torch.cuda.memory_reserved(device)
    headroom.release(device)
    assert torch.cuda.memory_reserved(device) <= reserved - 256 * MIB
    assert "out-of-memory errors" in headroom.describe_memory(device)
