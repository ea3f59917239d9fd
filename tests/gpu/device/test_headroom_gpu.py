"""How much memory a device has left, against what its driver and torch's allocator say.

The twin that runs everywhere is tests/device/test_headroom.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from lightning_gpufeed.device.headroom import can_allocate, describe_memory, free_bytes, is_low, release

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]

DEVICE = torch.device("cuda", 0)
MIB = 2**20
BLOCK_BYTES = 512 * MIB
SLACK_BYTES = 64 * MIB
"""What the driver and others on the device may take or give back between two questions."""


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    gc.collect()
    torch.cuda.empty_cache()


def block() -> torch.Tensor:
    return torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=DEVICE)


def limit_memory(num_more_bytes: int) -> None:
    """Let this process have so much more than it has now."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + num_more_bytes) / total, DEVICE)


def test_free_memory_falls_by_a_tensor_and_rises_when_it_is_gone_though_the_allocator_keeps_it():
    block()  # the context and the allocator are there
    at_first = free_bytes(DEVICE)
    held = block()
    while_held = free_bytes(DEVICE)
    del held
    assert torch.cuda.memory_reserved(DEVICE) >= BLOCK_BYTES
    assert at_first - while_held == pytest.approx(BLOCK_BYTES, abs=SLACK_BYTES)
    assert free_bytes(DEVICE) == pytest.approx(at_first, abs=SLACK_BYTES)


def test_release_gives_what_no_tensor_uses_back_to_the_device():
    held = [block()]
    held.append(held)  # a reference cycle, as an exception and its frames are one
    del held
    release(DEVICE)
    assert torch.cuda.memory_reserved(DEVICE) - torch.cuda.memory_allocated(DEVICE) < BLOCK_BYTES / 4


def test_asking_whether_memory_suffices_takes_none():
    free = free_bytes(DEVICE)
    before = torch.cuda.memory_reserved(DEVICE), torch.cuda.memory_allocated(DEVICE)
    assert can_allocate(DEVICE, free // 2)
    assert not can_allocate(DEVICE, free + BLOCK_BYTES)
    assert (torch.cuda.memory_reserved(DEVICE), torch.cuda.memory_allocated(DEVICE)) == before


def test_memory_that_the_allocator_keeps_counts_as_room():
    block()
    assert can_allocate(DEVICE, BLOCK_BYTES)


def test_a_limit_of_this_process_counts_where_it_is_narrower_than_the_device():
    limit_memory(BLOCK_BYTES)
    assert free_bytes(DEVICE) == pytest.approx(BLOCK_BYTES, abs=SLACK_BYTES)
    assert can_allocate(DEVICE, BLOCK_BYTES // 2)
    assert not can_allocate(DEVICE, 2 * BLOCK_BYTES)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * BLOCK_BYTES, dtype=torch.uint8, device=DEVICE)


def test_memory_is_low_when_less_than_a_tenth_of_what_the_process_may_have_is_free():
    torch.cuda.set_per_process_memory_fraction(BLOCK_BYTES * 4 / torch.cuda.get_device_properties(DEVICE).total_memory)
    assert not is_low(DEVICE)
    held = [block()]
    assert not is_low(DEVICE)
    try:
        while True:
            held.append(torch.empty(32 * MIB, dtype=torch.uint8, device=DEVICE))
    except torch.OutOfMemoryError:
        pass
    assert is_low(DEVICE)


def test_the_line_on_memory_counts_errors_of_the_allocator():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free_bytes(DEVICE) + 4 * BLOCK_BYTES, dtype=torch.uint8, device=DEVICE)
    line = describe_memory(DEVICE)
    assert line.startswith("cuda:0: ")
    for words in ("GiB in tensors", "GiB reserved", "GiB free of", "out-of-memory error"):
        assert words in line
