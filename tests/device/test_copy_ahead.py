"""On the CPU a batch is its own copy; the device's part is in tests/gpu/device/test_copy_ahead_gpu.py."""

from __future__ import annotations

import torch

from lightning_gpufeed.device.copy_ahead import CopyAhead


def test_on_the_cpu_a_batch_is_handed_on_as_it_is():
    ahead = CopyAhead("cpu")
    batch = {"x": torch.arange(3), "names": ["a", "b", "c"]}
    started = ahead.start(batch)
    assert started.event is None
    finished = ahead.finish(started)
    assert finished == batch
    assert finished["x"] is batch["x"]
    ahead.close()
