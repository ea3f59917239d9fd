"""What only a device can show of a reader process: its memory is page-locked, and not overwritten under a copy.

The twins that run everywhere are tests/device/test_shared_memory.py and tests/hdf5/test_isolated.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from lightning_gpufeed.device.memory import TensorSpec
from lightning_gpufeed.device.shared_memory import SharedBufferPool
from lightning_gpufeed.hdf5.isolated.reader_process import ReaderProcess
from lightning_gpufeed.hdf5.source import H5Source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]

NUM_SAMPLES, BATCH_SIZE = 2048, 256


def keep_busy() -> None:
    """Give the device work for a while, so that copies queue up behind it."""
    factor = torch.randn(4096, 4096, device="cuda")
    for _ in range(8):
        factor = factor @ factor * 1e-2


@pytest.fixture
def images(tmp_path: Path) -> Iterator[tuple[H5Source, np.ndarray]]:
    values = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, 3, 64, 64), np.uint8)
    with h5py.File(tmp_path / "images.h5", "w") as h5_file:
        h5_file.create_dataset("images", data=values, chunks=(64, 3, 64, 64))
    source = H5Source(tmp_path / "images.h5")
    yield source, values
    source.close()


def test_shared_buffers_are_page_locked_and_those_beyond_them_too():
    pool = SharedBufferPool({"x": TensorSpec((1000,), torch.uint8)}, 8, 2, is_pinned=True)
    held = [pool.acquire(8)["x"] for _ in range(10)]
    shared = [pool.arena.offset_of(tensor) is not None for tensor in held]
    assert shared == [True] * 6 + [False] * 4, "two, and four that wait for the device"
    assert all(tensor.is_pinned() for tensor in held)


def test_memory_is_unlocked_with_the_last_tensor_of_it():
    pool = SharedBufferPool({"x": TensorSpec((1000,), torch.uint8)}, 8, 2, is_pinned=True)
    tensor = pool.acquire(8)["x"]
    address = pool.arena.memory.ctypes.data + pool.arena._first_buffer
    del pool
    assert tensor.is_pinned()
    del tensor
    # Nothing is registered at this place any more.
    assert int(torch.cuda.cudart().cudaHostUnregister(address)) != 0
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="cuda")  # takes up that error


@pytest.mark.parametrize("is_side_stream", [False, True], ids=["current stream", "side stream"])
def test_a_buffer_is_not_written_while_a_copy_from_it_waits_on_the_device(images, is_side_stream):
    """torch does not know this memory, so nothing but the pool keeps it from being used again."""
    source, values = images
    pool = SharedBufferPool(source.specs, BATCH_SIZE, 2, is_pinned=True)
    wanted = [np.roll(np.arange(NUM_SAMPLES), number)[:BATCH_SIZE] for number in range(24)]
    stream = torch.cuda.Stream() if is_side_stream else torch.cuda.current_stream()
    copies = []
    with ReaderProcess(source, pool) as reader:
        for batch in reader.read_each(wanted):
            with torch.cuda.stream(stream):
                keep_busy()
                copies.append(batch["images"].to("cuda", non_blocking=True))
            del batch
        torch.cuda.synchronize()
        for indices, copy in zip(wanted, copies, strict=True):
            np.testing.assert_array_equal(copy.cpu().numpy(), values[indices])
