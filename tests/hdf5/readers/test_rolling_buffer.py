"""Samples on their way from blocks to batches: right, each block once, no more at a time than allowed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.readers.chunk_plan import SamplePlan
from lightning_gpufeed.hdf5.readers.rolling_buffer import Load, RollingBuffer
from tests.doubles import WAIT_SECONDS

NUM_SAMPLES, ROWS, BYTES = 60, 5, 3
VALUES = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, BYTES), dtype=np.uint8)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    # Kept for the module: examples of a property would each start threads of their own.
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture(scope="module", autouse=True)
def _started(pool: ThreadPoolExecutor) -> None:
    """Have all threads of the pool before the first test, so that none of them leaves a thread behind."""
    barrier = threading.Barrier(4)
    for _ in range(3):
        pool.submit(barrier.wait)
    barrier.wait(WAIT_SECONDS)


def load(block: int, out: np.ndarray) -> None:
    out[:] = VALUES[block * ROWS : (block + 1) * ROWS].reshape(-1)


def load_rows(block: int, parts: list[memoryview]) -> bool:
    """What lies in the file as it is goes to its places at once."""
    rest = VALUES[block * ROWS :].tobytes()
    for part in parts:
        part[:], rest = rest[: len(part)], rest[len(part) :]
    return True


def buffer_for(
    order: np.ndarray,
    pool: ThreadPoolExecutor,
    *,
    load: Load = load,
    load_rows: Callable[[int, list[memoryview]], bool] = lambda block, parts: False,
    will_load: Callable[[int], None] = lambda block: None,
    batch_size: int = 1,
    more_slots: int = 0,
    most_ahead: int = 4,
) -> RollingBuffer:
    plan = SamplePlan.of(order, order // ROWS)
    return RollingBuffer(
        plan,
        # What was not written shows.
        arena=torch.full((plan.most_kept(batch_size) + more_slots, BYTES), 0xA5, dtype=torch.uint8),
        num_samples=NUM_SAMPLES,
        first_sample_of=lambda block: block * ROWS,
        load=load,
        load_rows=load_rows,
        will_load=will_load,
        block_bytes=ROWS * BYTES,
        pool=pool,
        most_ahead=most_ahead,
    )


def read(buffer: RollingBuffer, indices: np.ndarray) -> np.ndarray:
    assert buffer.covers(indices)
    target = torch.zeros((len(indices), BYTES), dtype=torch.uint8)
    buffer.read_into(indices, target)
    return target.numpy()


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, NUM_SAMPLES - 1), min_size=1, max_size=120),
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(0, 30),
    st.integers(1, 5),
    st.booleans(),
)
def test_any_order_is_given_out_right_in_as_few_slots_as_planned(
    pool, order, planned, batch_size, more_slots, most_ahead, can_load_rows
):
    order = np.array(order)
    loaded: list[int] = []

    def noted(block: int, out: np.ndarray) -> None:
        loaded.append(block)
        load(block, out)

    def rows_noted(block: int, parts: list[memoryview]) -> bool:
        if can_load_rows:
            loaded.append(block)
            load_rows(block, parts)
        return can_load_rows

    buffer = buffer_for(
        order,
        pool,
        load=noted,
        load_rows=rows_noted,
        batch_size=planned,
        more_slots=more_slots,
        most_ahead=most_ahead,
    )
    # Batches may be larger than planned: they are then put together from parts.
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        assert (read(buffer, part) == VALUES[part]).all()
    buffer.stop()
    assert sorted(loaded) == sorted(set((order // ROWS).tolist()))
    assert buffer.num_block_reads == len(loaded)


@pytest.mark.parametrize("rows", [[2, 3, 4], [0, 2, 4], [4], [0, 1, 2], [1, 2, 3]], ids=str)
def test_some_rows_of_a_block_are_the_right_ones(pool, rows):
    order = np.array(rows)[::-1] + 3 * ROWS
    assert (read(buffer_for(order, pool), order) == VALUES[order]).all()


def test_rows_that_lie_as_they_are_come_to_their_slots_in_as_few_pieces_as_there_are(pool):
    asked: list[tuple[int, list[int]]] = []

    def noted(block: int, parts: list[memoryview]) -> bool:
        asked.append((block, [len(part) for part in parts]))
        return load_rows(block, parts)

    order = np.array([0, 5, 1, 6, 2, 7, 3, 8, 4, 9, *range(10, 15)])
    buffer = buffer_for(order, pool, load_rows=noted, more_slots=ROWS, most_ahead=1)
    for first in range(0, len(order), 3):
        part = order[first : first + 3]
        assert (read(buffer, part) == VALUES[part]).all()
    # Fresh slots follow each other; those that were used are free in the order of their use.
    assert asked[:2] == [(0, [ROWS * BYTES]), (1, [ROWS * BYTES])]
    assert sum(asked[2][1]) == ROWS * BYTES
    assert len(asked[2][1]) > 1


def test_blocks_are_announced_once_and_before_they_are_read(pool):
    log: list[str] = []

    def noted(block: int, out: np.ndarray) -> None:
        log.append(f"load {block}")
        load(block, out)

    order = np.random.default_rng(0).permutation(NUM_SAMPLES)
    buffer = buffer_for(order, pool, load=noted, will_load=lambda block: log.append(f"announce {block}"), most_ahead=1)
    for first in range(0, len(order), 10):
        read(buffer, order[first : first + 10])
    first_block, *others = buffer._plan.blocks.tolist()
    assert sorted(line for line in log if "announce" in line) == sorted(f"announce {block}" for block in others)
    assert log.index(f"announce {others[-1]}") < log.index(f"load {first_block}")  # they are few and small


def test_no_more_blocks_are_in_the_making_than_allowed(pool):
    gate = threading.Event()

    def wait(block: int, out: np.ndarray) -> None:
        gate.wait(WAIT_SECONDS)
        load(block, out)

    order = np.arange(NUM_SAMPLES)
    buffer = buffer_for(order, pool, load=wait, more_slots=NUM_SAMPLES, most_ahead=2)
    assert buffer.num_block_reads == 2
    gate.set()
    assert (read(buffer, order[:7]) == VALUES[:7]).all()
    buffer.stop()


def test_after_a_batch_what_comes_next_is_begun(pool):
    order = np.arange(NUM_SAMPLES)
    buffer = buffer_for(order, pool, more_slots=2 * ROWS, most_ahead=100)
    assert buffer.num_block_reads == 3  # the one in use, and room for two
    read(buffer, order[:ROWS])
    assert buffer.num_block_reads == 4
    buffer.stop()


def test_whoever_needs_nothing_new_does_not_wait_for_the_next_block(pool):
    gate = threading.Event()

    def wait(block: int, out: np.ndarray) -> None:
        if block == 1:
            gate.wait(WAIT_SECONDS)
        load(block, out)

    order = np.arange(2 * ROWS)
    buffer = buffer_for(order, pool, load=wait, more_slots=ROWS)
    assert (read(buffer, order[:ROWS]) == VALUES[:ROWS]).all()
    assert not gate.is_set()
    gate.set()
    assert (read(buffer, order[ROWS:]) == VALUES[ROWS : 2 * ROWS]).all()


def test_stopping_waits_for_the_threads_that_write_to_the_arena(pool):
    log: list[str] = []
    started, gate = threading.Event(), threading.Event()

    def wait(block: int, out: np.ndarray) -> None:
        started.set()
        gate.wait(WAIT_SECONDS)
        log.append("written")

    buffer = buffer_for(np.arange(ROWS), pool, load=wait)
    assert started.wait(WAIT_SECONDS)

    def stop() -> None:
        buffer.stop()
        log.append("stopped")

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join(0.05)  # time to go wrong
    gate.set()
    thread.join(WAIT_SECONDS)
    assert log == ["written", "stopped"]


def test_each_thread_decodes_into_memory_of_its_own(pool):
    barrier = threading.Barrier(2)

    def together(block: int, out: np.ndarray) -> None:
        load(block, out)
        barrier.wait(WAIT_SECONDS)  # until the other block is decoded too

    order = np.arange(2 * ROWS)
    buffer = buffer_for(order, pool, load=together, more_slots=ROWS)
    assert (read(buffer, order) == VALUES[order]).all()


def test_slots_are_given_to_the_samples_of_one_block_alone(pool):
    """Slots that become free while a block is decoded are not its own."""
    order = np.array([0, 5, 6, 1, 10, 11, 7, 12, 2, 15, 3, 8, 16])
    gates = {block: threading.Event() for block in range(4)}

    def wait(block: int, out: np.ndarray) -> None:
        gates[block].wait(WAIT_SECONDS)
        load(block, out)

    buffer = buffer_for(order, pool, load=wait, more_slots=3)
    gates[0].set()
    assert (read(buffer, order[:1]) == VALUES[order[:1]]).all()
    for gate in gates.values():
        gate.set()
    for first in range(1, len(order), 2):
        part = order[first : first + 2]
        assert (read(buffer, part) == VALUES[part]).all()


def test_a_block_that_cannot_be_read_is_an_error_where_it_is_needed(pool):
    def fail(block: int, out: np.ndarray) -> None:
        if block == 1:
            raise FeedError("damaged")
        load(block, out)

    order = np.arange(3 * ROWS)
    buffer = buffer_for(order, pool, load=fail, more_slots=NUM_SAMPLES)
    assert (read(buffer, order[:ROWS]) == VALUES[:ROWS]).all()
    for _ in range(2):
        with pytest.raises(FeedError, match="damaged"):
            read(buffer, order[ROWS : ROWS + 2])
    buffer.stop()


def test_what_comes_next_moves_with_each_batch(pool):
    order = np.array([3, 9, 3, 30])
    buffer = buffer_for(order, pool)
    assert buffer.covers(order[:2])
    assert not buffer.covers(order[1:])
    read(buffer, order[:2])
    assert buffer.covers(np.array([3, 30]))
    assert not buffer.covers(np.array([3, 9]))
    buffer.stop()
