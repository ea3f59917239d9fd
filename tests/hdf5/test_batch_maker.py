"""What makes batches out of an order, here or in another process: which batches, what memory, and how it ends."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
import torch

from lightning_gpufeed.device.copy_ahead import StartedCopy
from lightning_gpufeed.hdf5.batch_maker import BatchMaker
from lightning_gpufeed.hdf5.epoch_order import EpochOrder
from lightning_gpufeed.hdf5.order import EpochPlan, FullShuffle
from lightning_gpufeed.hdf5.source import Batch, H5Source

NUM_SAMPLES = 23
ORDER = EpochOrder(FullShuffle(), NUM_SAMPLES, 5)


class NotedSource(H5Source):
    """A source that notes what it is asked for."""

    log: list[tuple[str, Any]]

    def expect(self, indices: np.ndarray, batch_samples: int = 1) -> None:
        self.log.append(("expect", (indices.tolist(), batch_samples)))
        super().expect(indices, batch_samples)

    def read(self, indices: np.ndarray, out: Mapping[str, torch.Tensor]) -> Batch:
        self.log.append(("read", indices.tolist()))
        return super().read(indices, out)

    def rest(self) -> None:
        self.log.append(("rest", None))
        super().rest()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[NotedSource]:
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        values = np.arange(NUM_SAMPLES, dtype=np.uint8)[:, None].repeat(200, 1)
        h5_file.create_dataset("x", data=values, chunks=(4, 200), compression="gzip")
        h5_file["number"] = np.arange(NUM_SAMPLES)
    source = NotedSource(tmp_path / "data.h5")
    source.log = []
    yield source
    source.close()


def maker_for(source: H5Source, **options: Any) -> BatchMaker:
    return BatchMaker(source, **{"num_slots": 2, "pin_memory": None, "isolate": False, "device": None} | options)


def epoch(maker: BatchMaker, epoch: int, plan: EpochPlan, rank: int = 0, most_rows: int = 1) -> list[list[int]]:
    """The numbers of the samples of each batch; that the rest of them is theirs is looked at too."""
    make = maker.begin(ORDER, epoch, plan, rank, most_rows)
    batches = []
    for step in range(plan.num_steps):
        batch = maker.finish(make(step))
        assert (batch["x"] == batch["number"][:, None]).all()
        batches.append(batch["number"].tolist())
    return batches


def expected(epoch: int, plan: EpochPlan, rank: int = 0) -> list[list[int]]:
    order = ORDER.of(epoch)
    return [order[slice(*plan.rank_bounds(step, rank))].tolist() for step in range(plan.num_steps)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_batches_are_the_steps_of_the_rank_in_every_epoch(source, rank, device):
    maker = maker_for(source, device=device)
    for number, plan in enumerate([EpochPlan(NUM_SAMPLES, 3, 2), EpochPlan(NUM_SAMPLES, 4, 2, start=9)]):
        assert epoch(maker, number, plan, rank) == expected(number, plan, rank)
    maker.close()


def test_the_source_is_told_what_comes_before_and_when_it_is_over(source):
    plan = EpochPlan(NUM_SAMPLES, 4, 2)
    maker = maker_for(source)
    parts = epoch(maker, 1, plan, 1)
    expected_samples = [number for part in parts for number in part]
    assert source.log[0] == ("expect", (expected_samples, plan.most_rows))
    assert source.log[1:-1] == [("read", part) for part in parts]
    assert source.log[-1] == ("rest", None)


def test_whoever_drops_an_epoch_before_its_end_ends_the_reading(source):
    make = maker_for(source).begin(ORDER, 1, EpochPlan(NUM_SAMPLES, 4), 0, 1)
    make(0)
    source.log.clear()
    del make
    assert source.log == [("rest", None)]


def test_buffers_hold_the_largest_batch_of_any_epoch_and_are_kept(source):
    maker = maker_for(source)
    epoch(maker, 0, EpochPlan(NUM_SAMPLES, 3, start=10), most_rows=8)
    pool = maker._pool
    assert pool is not None
    assert pool.most_rows == 8
    epoch(maker, 1, EpochPlan(NUM_SAMPLES, 8), most_rows=8)
    assert maker._pool is pool
    larger = EpochPlan(NUM_SAMPLES, 11)
    assert epoch(maker, 2, larger, most_rows=8) == expected(2, larger)
    assert maker._pool is not None
    assert maker._pool.most_rows == larger.most_rows


@pytest.mark.parametrize("num_slots", [1, 4])
def test_memory_is_taken_for_the_batches_ahead_and_those_of_the_user(source, num_slots):
    maker = maker_for(source, num_slots=num_slots, pin_memory=False)
    plan = EpochPlan(NUM_SAMPLES, 1)
    make = maker.begin(ORDER, 0, plan, 0, 1)
    most = num_slots + 2
    first = [make(step)["x"] for step in range(most)]
    places = {one.data_ptr() for one in first}
    assert len(places) == most
    assert [one[0, 0].item() for one in first] == ORDER.of(0)[:most].tolist()  # what is held is not written over
    del first
    again = [make(step)["x"] for step in range(most, 2 * most)]
    assert {one.data_ptr() for one in again} == places


def test_a_copy_that_goes_to_another_process_has_nothing_open(source):
    maker = maker_for(source, device="cpu")
    epoch(maker, 0, EpochPlan(NUM_SAMPLES, 8))
    copy = pickle.loads(pickle.dumps(maker.__getstate__() | {"_source": None}))
    assert (copy["_pool"], copy["_reader"], copy["_ahead"]) == (None, None, None)
    assert (copy["_num_slots"], copy["_device"]) == (2, torch.device("cpu"))


def test_a_batch_is_taken_over_as_it_is_or_from_its_copy(source):
    plan = EpochPlan(NUM_SAMPLES, 8)
    here = maker_for(source)
    batch = here.begin(ORDER, 0, plan, 0, 1)(0)
    assert isinstance(batch, dict)
    assert here.finish(batch) is batch
    copied = maker_for(source, device="cpu")
    started = copied.begin(ORDER, 0, plan, 0, 1)(0)
    assert isinstance(started, StartedCopy)
    assert copied.finish(started)["number"].tolist() == batch["number"].tolist()
    ahead = copied._ahead
    copied.begin(ORDER, 1, plan, 0, 1)
    assert copied._ahead is ahead  # its stream serves all epochs


def test_another_process_reads_the_same_batches_with_one_start_for_all_epochs(tmp_path):
    path = tmp_path / "plain.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file["x"] = np.arange(NUM_SAMPLES, dtype=np.uint8)[:, None].repeat(200, 1)
        h5_file["number"] = np.arange(NUM_SAMPLES)
    before = set(psutil.Process().children(recursive=True))
    maker = maker_for(H5Source(path), isolate=True)
    small, large = EpochPlan(NUM_SAMPLES, 3), EpochPlan(NUM_SAMPLES, 9)
    assert epoch(maker, 0, small) == expected(0, small)
    reader, pool = maker._reader, maker._pool
    assert epoch(maker, 1, small) == expected(1, small)
    assert maker._pool is pool
    # Larger batches need larger buffers, and the process has to be told of them.
    assert epoch(maker, 2, large) == expected(2, large)
    assert maker._reader is reader
    started = set(psutil.Process().children(recursive=True)) - before
    maker.close()
    maker.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []
