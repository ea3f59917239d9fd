"""Copies ahead of use on a stream of their own; twin: tests/device/test_copy_ahead.py."""

from __future__ import annotations

import pytest
import torch

from lightning_gpufeed.device.byte_lookup import ByteTable
from lightning_gpufeed.device.copy_ahead import CopyAhead
from lightning_gpufeed.device.images import ImagePreparation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


def keep_busy() -> None:
    """Give the current stream work for a while."""
    factor = torch.randn(4096, 4096, device="cuda")
    for _ in range(8):
        factor = factor @ factor * 1e-2


def test_a_batch_arrives_whole_while_the_device_computes():
    ahead = CopyAhead("cuda")
    host = {"x": torch.arange(1 << 24).pin_memory(), "names": ["a"]}
    keep_busy()
    started = ahead.start(host)
    assert started.batch["x"].is_cuda
    batch = ahead.finish(started)
    assert torch.equal((batch["x"] + 0).cpu(), host["x"])
    assert batch["names"] == ["a"]


def test_the_copy_does_not_wait_for_what_is_computed():
    ahead = CopyAhead("cuda")
    keep_busy()
    done_computing = torch.cuda.Event()
    done_computing.record()
    started = ahead.start({"x": torch.ones(1 << 20).pin_memory()})
    started.event.synchronize()
    assert not done_computing.query()
    torch.cuda.synchronize()


def test_host_memory_is_kept_until_its_copy_is_done():
    ahead = CopyAhead("cuda")
    for _ in range(20):
        ahead.finish(ahead.start({"x": torch.ones(1 << 22).pin_memory()}))
    torch.cuda.synchronize()
    ahead.start({"x": torch.ones(4).pin_memory()})
    assert len(ahead._in_flight) == 1
    ahead.close()
    assert not ahead._in_flight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NHW"])
def test_one_pass_has_the_bits_of_the_steps(dtype, channels_last, layout):
    shape = {"NCHW": (6, 3, 33, 20), "NHWC": (6, 33, 20, 3), "NHW": (6, 33, 20)}[layout]
    mean, std = ((0.5,), (0.3,)) if layout == "NHW" else ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    prepare = ImagePreparation(layout, mean, std, dtype=dtype, channels_last=channels_last)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    found = prepare(images.cuda())
    assert prepare._tables
    assert all(table.is_usable for table in prepare._tables.values())
    assert torch.equal(found.cpu(), prepare(images))
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_a_kernel_whose_bits_differ_is_not_used(monkeypatch):
    calls = []

    def other(images: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return images.float() + len(calls)  # no function of the byte alone

    with pytest.warns(UserWarning, match="prepared in several passes"):
        assert not ByteTable(other, 3, torch.device("cuda")).is_usable
