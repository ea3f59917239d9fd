"""Host buffers: used again as soon as nobody holds them, and never a moment before."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.device.memory import HostBufferPool, TensorSpec
from tests.contracts import exactly
from tests.doubles import WAIT_SECONDS

SPECS = {
    "image": TensorSpec((3, 5, 7), torch.uint8),
    "label": TensorSpec((), torch.int64),
    "weight": TensorSpec((2,), torch.float16),
    "flag": TensorSpec((), torch.bool),
}

DTYPES = [
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bool, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


def pool_of(num_buffers: int = 2, most_rows: int = 4) -> HostBufferPool:
    return HostBufferPool(SPECS, most_rows, num_buffers)


def place(batch: dict[str, torch.Tensor]) -> int:
    return batch["image"].data_ptr()


# Shape and place -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4])
def test_a_set_has_the_shapes_and_types_asked_for(num_rows):
    batch = pool_of().acquire(num_rows)
    assert list(batch) == list(SPECS)
    for name, spec in SPECS.items():
        assert batch[name].shape == (num_rows, *spec.row_shape)
        assert batch[name].dtype == spec.dtype
        assert batch[name].is_contiguous()
        assert batch[name].device.type == "cpu"


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=3),
        st.builds(TensorSpec, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 6),
    st.integers(0, 6),
)
def test_tensors_of_a_set_are_aligned_and_do_not_overlap(specs, most_rows, num_rows):
    pool = HostBufferPool(specs, most_rows, 1)
    if num_rows > most_rows:
        num_rows = most_rows
    batch = pool.acquire(num_rows)
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in batch.values() if tensor.nbytes)
    for (start, size), (following, _) in itertools.pairwise(spans):
        assert start + size <= following
    assert all(start % 64 == 0 for start, _ in spans)
    # Every element can be written and read back without reaching into another.
    for number, tensor in enumerate(batch.values()):
        tensor.fill_(number % 2)
    for number, tensor in enumerate(batch.values()):
        assert (tensor == number % 2).all()


def test_more_rows_than_planned_are_refused():
    with pytest.raises(
        ValueError, match=exactly("5 rows asked of a pool whose buffers hold 4; make the pool with a larger most_rows.")
    ):
        pool_of(most_rows=4).acquire(5)


def test_a_row_has_as_many_bytes_as_its_elements():
    assert [spec.row_bytes for spec in SPECS.values()] == [105, 8, 4, 1]


def test_no_memory_is_taken_before_it_is_needed():
    # 64 TiB: no machine could give it.
    pool = HostBufferPool({"x": TensorSpec((1 << 40,), torch.uint8)}, 64, 2)
    assert pool.acquire(0)["x"].shape == (0, 1 << 40)


def test_host_memory_is_host_memory_whatever_the_default_device():
    torch.set_default_device("meta")
    assert {tensor.device.type for tensor in pool_of().acquire(4).values()} == {"cpu"}


# Recycling -----------------------------------------------------------------------------------------------


def test_a_buffer_that_nobody_holds_is_used_again():
    pool = pool_of()
    first = pool.acquire(4)
    at = place(first)
    del first
    assert place(pool.acquire(2)) == at


def test_buffers_that_are_held_are_different_ones():
    pool = pool_of()
    held = [pool.acquire(4) for _ in range(10)]
    assert len({place(batch) for batch in held}) == 10


HOLD = {
    "one tensor": lambda batch: batch["flag"],
    "a row": lambda batch: batch["image"][1],
    "an empty slice": lambda batch: batch["image"][0:0],
    "a view of another type": lambda batch: batch["label"].view(torch.uint8),
    "a transposed view": lambda batch: batch["image"].permute(3, 1, 0, 2),
    "a numpy array": lambda batch: batch["image"].numpy(),
    "a part of a numpy array": lambda batch: batch["image"].numpy()[1:, :, ::2],
    "a numpy view of a numpy array": lambda batch: batch["image"].numpy().view(np.int8).reshape(-1)[5:],
    "a memoryview": lambda batch: memoryview(batch["image"].numpy()),
    "the storage": lambda batch: batch["image"].untyped_storage(),
    "a dlpack capsule": lambda batch: batch["image"].__dlpack__(),
    "a tensor by way of dlpack": lambda batch: torch.from_dlpack(batch["image"]),
    "a numpy array by way of dlpack": lambda batch: np.from_dlpack(batch["image"]),
    "what autograd saved": lambda batch: batch["weight"] * torch.ones(2, dtype=torch.float16, requires_grad=True),
    "a detached tensor": lambda batch: batch["image"].detach(),
    "a parameter": lambda batch: torch.nn.Parameter(batch["weight"]),
}


FIELD = {
    "one tensor": "flag",
    "a view of another type": "label",
    "what autograd saved": "weight",
    "a parameter": "weight",
}


@pytest.mark.parametrize("what", HOLD)
def test_a_buffer_of_which_anything_is_held_is_not_used_again(what):
    field = FIELD.get(what, "image")
    pool = pool_of(num_buffers=3)
    batch = pool.acquire(4)
    at = batch[field].data_ptr()
    held: Any = HOLD[what](batch)
    del batch
    gc.collect()
    others = [pool.acquire(4) for _ in range(4)]
    assert at not in [other[field].data_ptr() for other in others]
    del held
    gc.collect()
    assert pool.acquire(4)[field].data_ptr() == at


def test_keeping_the_labels_does_not_keep_the_images():
    """Every training that collects labels or weights would hold on to all its images."""
    pool = pool_of(num_buffers=3)
    batch = pool.acquire(4)
    at = batch["image"].data_ptr()
    labels = [batch["label"], batch["weight"]]
    del batch
    assert pool.acquire(4)["image"].data_ptr() == at
    del labels


def test_a_buffer_in_a_reference_cycle_comes_back_with_the_cycle():
    pool = pool_of()
    batch: dict[str, Any] = pool.acquire(4)
    at = place(batch)
    batch["self"] = batch
    del batch
    gc.collect()
    assert place(pool.acquire(4)) == at


def test_no_more_unused_buffers_are_kept_than_planned():
    pool = pool_of(num_buffers=2)
    held = [pool.acquire(4) for _ in range(6)]
    held.clear()
    # Where memory lies cannot tell: the system may give the same place out again.
    assert {len(buffers) for buffers in pool._free.values()} == {2}
    assert pool._watched == {}


def test_a_batch_outlives_its_pool():
    pool = pool_of()
    batch = pool.acquire(4)
    batch["label"].copy_(torch.arange(4))
    del pool
    gc.collect()
    assert batch["label"].tolist() == [0, 1, 2, 3]


def test_a_pool_is_not_kept_alive_by_its_batches():
    pool = pool_of()
    alive, batch = weakref.ref(pool), pool.acquire(4)
    del pool
    assert alive() is None
    del batch


def test_batches_may_be_dropped_in_other_threads_than_they_are_made_in():
    pool = pool_of(num_buffers=4)
    made = [pool.acquire(4) for _ in range(4)]
    places = {place(batch) for batch in made}

    def drop() -> None:
        made.pop()

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert {place(batch) for batch in [pool.acquire(4) for _ in range(4)]} == places


def test_no_two_threads_get_the_same_buffer():
    pool = pool_of(num_buffers=8)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            batch = pool.acquire(4)
            batch["image"].fill_(number)
            batch["label"].fill_(number)
            if not ((batch["image"] == number).all() and (batch["label"] == number).all()):
                wrong.append(number)
            del batch

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert wrong == []


def test_a_tensor_moved_to_shared_memory_gives_the_buffer_back():
    # What happens to a batch that is put into a queue for another process.
    pool = pool_of()
    batch = pool.acquire(4)
    at = place(batch)
    for tensor in batch.values():
        tensor.share_memory_()
    assert place(pool.acquire(4)) == at


# Pinned --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_pinned_sets_are_pinned_and_used_again_after_their_copy_is_done():
    pool = HostBufferPool(SPECS, 4, 2, is_pinned=True)
    values = torch.arange(4)
    copies = []
    for number in range(20):
        batch = pool.acquire(4)
        assert all(tensor.is_pinned() for tensor in batch.values())
        batch["label"].copy_(values + number)
        copies.append(batch["label"].to("cuda", non_blocking=True))
        del batch
    torch.cuda.synchronize()
    assert [copy.tolist() for copy in copies] == [(values + number).tolist() for number in range(20)]
