"""What the driver says of a real device, against what torch knows of it.

The twin that runs everywhere is tests/diagnose/test_nvml.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

from lightning_gpufeed.diagnose.nvml import DeviceWatch

pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]

MIB = 2**20


@pytest.fixture
def watch() -> Iterator[DeviceWatch]:
    gc.collect()
    torch.cuda.empty_cache()
    watch = DeviceWatch(torch.device("cuda", torch.cuda.device_count() - 1))
    watch.sample()
    if watch.total_bytes is None:
        pytest.skip("the driver tells nothing of this device")
    yield watch
    watch.close()


def test_it_is_the_device_that_torch_means(watch: DeviceWatch) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    total = torch.cuda.get_device_properties(device).total_memory
    # The driver counts what it keeps for itself, some hundred MiB to a few percent.
    assert watch.total_bytes == pytest.approx(total, rel=0.05)
    torch.zeros(1, device=device)
    watch.sample()
    before = watch.free_bytes
    held = torch.empty(1024 * MIB, dtype=torch.uint8, device=device)
    watch.sample()
    # What others on the device take or give back meanwhile is far less.
    assert before - watch.free_bytes == pytest.approx(held.nbytes, abs=128 * MIB)


def test_a_device_that_works_all_the_time_is_busy(watch: DeviceWatch) -> None:
    if watch.utilisation is None:
        pytest.skip("the driver does not tell the load of this device")
    matrix = torch.rand(4096, 4096, device=torch.device("cuda", torch.cuda.device_count() - 1))
    end = time.monotonic() + 2  # the driver looks back for one second at most
    while time.monotonic() < end:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize(matrix.device)
    watch.reset()
    watch.sample()
    assert 0.5 < watch.utilisation <= 1
