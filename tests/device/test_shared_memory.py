"""Host buffers that another process writes to: as those of one process, and never another's after a fork."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpufeed.device import shared_memory
from lightning_gpufeed.device.memory import TensorSpec
from lightning_gpufeed.device.shared_memory import NUM_REQUESTS, SharedBufferPool, map_shared, memory_file
from tests.contracts import as_bytes, exactly
from tests.device.test_memory import DTYPES, FIELD, HOLD, SPECS

FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def pool_of(num_buffers: int = 2, most_rows: int = 4) -> SharedBufferPool:
    return SharedBufferPool(SPECS, most_rows, num_buffers)


def place(batch: dict[str, torch.Tensor]) -> int:
    return batch["image"].data_ptr()


def is_shared(pool: SharedBufferPool, batch: dict[str, torch.Tensor]) -> set[bool]:
    return {pool.arena.offset_of(tensor) is not None for tensor in batch.values()}


# Shape and place -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4])
def test_a_set_has_the_shapes_and_types_asked_for(num_rows):
    batch = pool_of().acquire(num_rows)
    assert list(batch) == list(SPECS)
    for name, spec in SPECS.items():
        assert batch[name].shape == (num_rows, *spec.row_shape)
        assert batch[name].dtype == spec.dtype
        assert batch[name].is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_mapping_of_the_memory_sees_what_is_written_to_a_tensor(dtype):
    pool = SharedBufferPool({"x": TensorSpec((2, 3), dtype)}, 4, 2)
    tensor = pool.acquire(3)["x"]
    tensor.copy_(torch.arange(18).view(3, 2, 3) % 2)
    offset = pool.arena.offset_of(tensor)
    other = map_shared(pool.arena.descriptor, pool.arena.num_bytes)
    assert other[offset : offset + tensor.nbytes].tobytes() == as_bytes(tensor)


def test_tensors_that_are_held_and_requests_do_not_share_a_byte():
    pool = pool_of(num_buffers=3)
    sets = [pool.acquire(4) for _ in range(3)]
    arena = pool.arena
    spans = [(arena.offset_of(tensor), tensor.nbytes) for batch in sets for tensor in batch.values()]
    for request in range(NUM_REQUESTS):
        spans.append((arena.put_indices(request, np.arange(4)), 4 * 8))
        spans += [(arena.request_buffer(request, name), 4 * spec.row_bytes) for name, spec in SPECS.items()]
    spans.sort()
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= arena.num_bytes


def test_more_rows_than_planned_are_refused():
    message = "5 rows asked of a pool whose buffers hold 4; make the pool with a larger most_rows."
    with pytest.raises(ValueError, match=exactly(message)):
        pool_of(most_rows=4).acquire(5)
    with pytest.raises(ValueError, match=exactly("513 samples asked at once; expected at most 512.")):
        pool_of(most_rows=4).arena.put_indices(0, np.arange(513))


def test_only_a_whole_contiguous_tensor_of_this_memory_has_a_place_in_it():
    pool, other = pool_of(), pool_of()
    image = pool.acquire(4)["image"]
    assert pool.arena.offset_of(image) is not None
    assert pool.arena.offset_of(image[1:3]) == pool.arena.offset_of(image) + 105
    assert pool.arena.offset_of(image.permute(3, 1, 0, 2)) is None
    assert pool.arena.offset_of(torch.zeros(4, 3, 5, 7, dtype=torch.uint8)) is None
    assert other.arena.offset_of(image) is None


# Recycling -----------------------------------------------------------------------------------------------


def test_a_buffer_that_nobody_holds_is_used_again():
    pool = pool_of()
    first = pool.acquire(4)
    at = place(first)
    del first
    assert place(pool.acquire(2)) == at


@pytest.mark.parametrize("what", HOLD)
def test_a_buffer_of_which_anything_is_held_is_not_used_again(what):
    field = FIELD.get(what, "image")
    pool = pool_of(num_buffers=1)
    batch = pool.acquire(4)
    at = batch[field].data_ptr()
    held: Any = HOLD[what](batch)
    del batch
    gc.collect()
    others = [pool.acquire(4) for _ in range(3)]
    assert at not in [other[field].data_ptr() for other in others]
    del held, others
    gc.collect()
    assert pool.acquire(4)[field].data_ptr() == at


def test_a_caller_that_keeps_every_batch_gets_memory_that_is_not_shared():
    pool = pool_of(num_buffers=2)
    held = [pool.acquire(4) for _ in range(6)]
    assert [is_shared(pool, batch) for batch in held] == [{True}] * 2 + [{False}] * 4
    assert len({place(batch) for batch in held}) == 6
    del held[0]
    assert is_shared(pool, pool.acquire(4)) == {True}


def test_a_batch_outlives_its_pool_and_the_memory_is_gone_after_both():
    pool = pool_of()
    batch = pool.acquire(4)
    batch["label"].copy_(torch.arange(4))
    label = batch["label"]
    before = mapped()
    memory = weakref.ref(pool.arena.memory)  # with whose end the memory is unlocked, where there is a device
    del pool, batch
    gc.collect()
    assert memory() is not None
    assert label.tolist() == [0, 1, 2, 3]
    assert mapped() == before
    del label
    assert memory() is None
    assert mapped() == before - 1


def mapped() -> int:
    """How many mappings there are of files in memory."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:gpufeed" in line for line in maps)


def test_no_descriptor_is_left_behind():
    pool_of().acquire(4)
    before = os.listdir("/proc/self/fd")
    for _ in range(20):
        pool_of().acquire(4)
    os.close(memory_file(10))
    with pytest.raises(OSError, match="Invalid argument"):
        memory_file(-1)
    assert os.listdir("/proc/self/fd") == before


def test_threads_may_let_go_of_batches_while_others_are_taken():
    pool = pool_of(num_buffers=4)
    batches: list[dict[str, torch.Tensor]] = []
    is_over = threading.Event()

    def drop() -> None:
        while not is_over.is_set() or batches:
            if batches:
                batches.pop()

    threads = [threading.Thread(target=drop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(300):
        batch = pool.acquire(4)
        batch["label"].fill_(number)
        assert (batch["label"] == number).all()
        batches.append(batch)
        del batch
    is_over.set()
    for thread in threads:
        thread.join()
    gc.collect()
    assert {name: len(free) for name, free in pool.arena.free.items()} == dict.fromkeys(SPECS, 4)


# After a fork --------------------------------------------------------------------------------------------


@FORKS
def test_after_a_fork_no_buffer_that_was_held_at_that_moment_is_written_again():
    """The process forked off still sees it, and nobody can know for how long."""
    pool = pool_of(num_buffers=1)
    batch = pool.acquire(4)
    batch["label"].copy_(torch.arange(4))
    reading, writing = os.pipe()
    may_look, looks = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(may_look, 1)
        os.write(writing, bytes(batch["label"].tolist()))
        os._exit(0)
    free = {name: list(offsets) for name, offsets in pool._arena.free.items()}
    del batch
    assert pool._arena.free == free, "not even for a thread that is about to take one"
    for _ in range(4):
        pool.acquire(4)["label"].fill_(77)
    os.write(looks, b".")
    assert os.read(reading, 4) == bytes(range(4))
    os.waitpid(child, 0)
    for descriptor in (reading, writing, may_look, looks):
        os.close(descriptor)


@FORKS
def test_after_a_fork_both_processes_have_memory_of_their_own():
    pool = pool_of()
    mine = pool.acquire(4)["label"].fill_(5)
    child = os.fork()
    if child == 0:
        other = pool.acquire(4)
        other["label"].fill_(6)
        os._exit(0 if is_shared(pool, other) == {True} and (mine == 5).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (mine == 5).all()
    batch = pool.acquire(4)
    assert is_shared(pool, batch) == {True}
    assert pool.arena.offset_of(mine) is None


# With a device -------------------------------------------------------------------------------------------


def test_page_locked_buffers_are_used_again_only_after_the_devices_were_waited_for(monkeypatch):
    """Twin of a test in tests/gpu, with a wait that is written down. The lock itself does nothing for a CPU."""
    log: list[str] = []
    monkeypatch.setattr(shared_memory, "_page_lock", lambda memory, first: True)
    monkeypatch.setattr(shared_memory, "_wait_for_devices", lambda: log.append("waited"))
    pool = pool_of(num_buffers=3)
    pool._is_pinned = True  # what the constructor would only take where there is a device
    first = place(pool.acquire(4))
    second = place(pool.acquire(4))
    third = place(pool.acquire(4))
    assert len({first, second, third}) == 3, "what was given back may still be under way to the device"
    assert log == []
    assert place(pool.acquire(4)) in {first, second, third}
    assert log == ["waited"], "one wait for all that was given back till then"
    pool.acquire(4)
    pool.acquire(4)
    assert log == ["waited"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_memory_that_cannot_be_page_locked_is_not_given_out():
    pool = pool_of(num_buffers=3)
    pool._is_pinned = True
    assert not pool.arena.is_pinned
    assert is_shared(pool, pool.acquire(4)) == {False}
