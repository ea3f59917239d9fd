"""Copies of device tensors on the host: pinned, made beside the work of the device, waited for by the device alone.

The twin that runs everywhere is tests/device/test_host_copy.py.
"""

from __future__ import annotations

import pytest
import torch

from lightning_gpufeed.device.host_copy import HostCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]

DEVICE = torch.device("cuda", 0)
NUM_ELEMENTS = 64 * 2**20  # 256 MiB: copied in milliseconds, overwritten in a small part of one


def keep_busy(num_products: int = 100) -> None:
    factor = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(num_products):
        factor = factor @ factor * 1e-2


def test_values_are_those_of_the_moment_though_they_are_computed_and_overwritten_by_queued_work():
    numbers = torch.zeros(NUM_ELEMENTS, device=DEVICE)
    keep_busy()
    numbers.add_(3)  # waits behind the products
    copies = HostCopies([numbers])
    copies.before_change()
    numbers.fill_(7)
    assert bool((numbers == 7).all())
    copies.put_back()
    assert bool((numbers == 3).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_every_kind_of_value_comes_back_into_the_same_memory(dtype):
    tensors = [torch.arange(12, device=DEVICE).view(3, 4).to(dtype), torch.ones((), device=DEVICE).to(dtype)]
    tensors.append(tensors[0].clone().t())
    was, places = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    copies = HostCopies(tensors)
    copies.before_change()
    for tensor in tensors:
        tensor.zero_()
    copies.put_back()
    assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, was, strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == places


def test_the_host_waits_for_nothing_while_it_has_copies_made():
    tensors = [torch.ones(2**20, device=DEVICE) for _ in range(8)]
    HostCopies(tensors)  # pinned memory is there: asking for it may wait
    torch.cuda.synchronize()
    keep_busy()
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = HostCopies(tensors)
        copies.before_change()
        is_still_busy = not busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert is_still_busy
    copies.put_back()
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_sparse_values_come_back():
    tensor = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), device=DEVICE).coalesce()
    was = tensor.to_dense()
    copies = HostCopies([tensor])
    copies.before_change()
    tensor.zero_()
    copies.put_back()
    assert torch.equal(tensor.to_dense(), was)


def test_device_memory_of_what_was_copied_is_not_kept():
    tensor = torch.ones(NUM_ELEMENTS, device=DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE)
    copies = HostCopies([tensor])
    copies.before_change()
    assert torch.cuda.memory_allocated(DEVICE) == before
    copies.put_back()
    assert torch.cuda.memory_allocated(DEVICE) == before
