"""`FeedMonitor` finds the cause that was built in: real loaders and workers, each slow for a reason of its own.

The pipelines are those that `benchmarks/feed_monitor.py` tries the advice on. Each is trained for a second of real
time, however busy the machine is, on two cores of it. Who else takes the cores meanwhile is not known, so a
pipeline that was judged in another way is judged again, twice at most: a verdict that is wrong by more than bad luck
is wrong three times.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from benchmarks.feed_pipelines import CHUNK_SAMPLES, PIPELINES, SAMPLE_SHAPE, PauseModel, Pipeline
from lightning_gpufeed import FeedMonitor, H5DataModule
from lightning_gpufeed.diagnose.records import EpochRecord
from tests.datamodules.models import MemoryLogger, make_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot keep a process to some cores"),
    # What is done here on purpose, and what Lightning says of it.
    pytest.mark.filterwarnings("ignore:This DataLoader will create 6 worker processes:UserWarning"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`:UserWarning"),
]

MOST_ATTEMPTS = 3
NUM_SAMPLES = 512
SECONDS = 1.0


@pytest.fixture(scope="module", autouse=True)
def _two_cores() -> Iterator[None]:
    """Keep this process and its workers to two cores, as "six workers on two cores" means it."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    os.sched_setaffinity(0, set(sorted(cores)[:2]))
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("feed")


class Enough(pl.Callback):
    """Ends a training after some time, with a number of steps at least, but not for ever."""

    def __init__(self, seconds: float, num_steps: int) -> None:
        self.seconds, self.num_steps = seconds, num_steps
        self.begin = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        seconds = time.monotonic() - self.begin
        trainer.should_stop = seconds > self.seconds and (
            trainer.global_step >= self.num_steps or seconds > 4 * self.seconds
        )


def watch(
    model: pl.LightningModule,
    loader: Any = None,
    *,
    datamodule: pl.LightningDataModule | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    seconds: float = SECONDS,
    num_steps: int = 12,
    **settings: Any,
) -> EpochRecord:
    """Train for a while; the record of the epoch with most steps, the last of several."""
    monitor = FeedMonitor(table=False, first_seconds=None, interval_seconds=0.1)
    trainer = make_trainer(callbacks=[monitor, *callbacks, Enough(seconds, num_steps)], max_epochs=-1, **settings)
    trainer.fit(model, loader, datamodule=datamodule)
    return max(reversed(monitor.records), key=lambda record: record.counters.steps.num_steps)


def judged(expected: str | Callable[[], str], attempt: Callable[[], EpochRecord]) -> EpochRecord:
    """The record of the attempt that was judged as expected, or as is expected after it."""
    lines = []
    for _ in range(MOST_ATTEMPTS):
        record = attempt()
        cause = expected if isinstance(expected, str) else expected()
        if record.verdict.cause == cause:
            return record
        lines.append(f"expected {cause!r} and got: {record.line}")
    pytest.fail("one after the other\n" + "\n".join(lines))


def pipeline(name: str, **changes: Any) -> Pipeline:
    [found] = [one for one in PIPELINES if one.name == name]
    return dataclasses.replace(found, **changes)


def data_of(one: Pipeline, folder: Path) -> dict[str, Any]:
    """Its DataModule, or its loader with an epoch that does not end."""
    data = one.data(folder, NUM_SAMPLES)
    if one.is_own:
        return data
    loader = data["train_dataloaders"]
    sampler = RandomSampler(loader.dataset, replacement=True, num_samples=10**6)
    settings: dict[str, Any] = {"batch_size": one.batch_size, "num_workers": one.num_workers}
    return {"loader": DataLoader(loader.dataset, sampler=sampler, persistent_workers=one.num_workers > 0, **settings)}


def judged_pipeline(one: Pipeline, folder: Path, **settings: Any) -> EpochRecord:
    return judged(one.expected, lambda: watch(one.model(), **data_of(one, folder), **settings))


# The six -----------------------------------------------------------------------------------------------------


def test_rows_out_of_the_page_cache_are_kernel_bound(folder):
    one = pipeline("page-cached rows")
    # Half as much again in the kernel as outside, by a clock that counts hundredths of a second.
    record = judged_pipeline(one, folder, seconds=1.5 * SECONDS)
    assert record.verdict.cures[0].name == "H5DataModule"
    assert str(one.file(folder, NUM_SAMPLES)) in record.verdict.cures[0].action
    assert 0.5 < record.counters.read_ratio < 1.5  # what was read before the first look, and ahead at the last one


def test_random_rows_of_a_chunked_file_are_read_amplification(folder):
    one = pipeline("chunked file, random rows")
    record = judged_pipeline(one, folder)
    path, shape = one.file(folder, NUM_SAMPLES), "x".join(map(str, (CHUNK_SAMPLES, *SAMPLE_SHAPE)))
    assert CHUNK_SAMPLES / 2 < record.counters.read_ratio < 2 * CHUNK_SAMPLES
    # What deciding took: the bytes, and the file with its layout.
    assert "bytes for each byte delivered" in record.verdict.figures[0]
    assert f"{path} images: chunks of {shape}, {CHUNK_SAMPLES} samples each" in record.line
    cures = {cure.name: cure.action for cure in record.verdict.cures}
    assert next(iter(cures)) == "H5DataModule"
    assert f"gpufeed pack {path} OUT.h5 --chunk-bytes {np.prod(SAMPLE_SHAPE)}" in cures["chunk order"]


def test_floats_made_of_bytes_are_conversion_on_the_host(folder):
    record = judged_pipeline(pipeline("uint8 made float32 in the worker"), folder)
    assert "uint8 on the host" in [cure.name for cure in record.verdict.cures]
    assert record.counters.batch.widened_bytes == record.counters.batch.num_bytes == 4 * 32 * np.prod(SAMPLE_SHAPE)


def test_a_heavy_transform_is_transform_bound(folder):
    record = judged_pipeline(pipeline("heavy float transform"), folder)
    assert record.verdict.cures[0].name.startswith("transform ")  # once, or where the step runs
    assert record.counters.batch.widened_bytes == 0


def test_six_workers_on_two_cores_are_too_many(folder):
    # Twelve batches are made before the first step, and are there when it asks for them.
    record = judged_pipeline(pipeline("six workers on two cores"), folder, num_steps=40)
    assert record.verdict.cures[0].name == "2 workers"
    assert record.verdict.figures[0].startswith("6 workers share 2 core")
    assert record.counters.loader.num_workers == 6


def test_a_slow_step_with_a_fast_loader_is_compute_bound(folder):
    record = judged_pipeline(pipeline("slow step, fast loader"), folder)
    assert record.verdict.cures == ()
    assert record.line.startswith("compute-bound: waits ")
    assert "nothing to gain in the loader" in record.line


# And others --------------------------------------------------------------------------------------------------


def test_a_transform_in_the_training_process_asks_for_workers(folder):
    one = pipeline("heavy float transform", num_workers=0, batch_size=8)
    has_cores = True

    def attempt() -> EpochRecord:
        nonlocal has_cores
        record = watch(one.model(), **data_of(one, folder))
        usage = record.counters.readers
        assert usage is not None
        assert record.counters.num_watched_steps > 0
        has_cores = usage.share(usage.queue_seconds) < 0.5
        return record

    # No core for what there is: that is the machine's fault, and said.
    record = judged(lambda: "too few workers" if has_cores else "loader-bound", attempt)
    assert has_cores or "Other processes keep" in record.line
    assert any(re.match(r"DataLoader\(num_workers=[12],", cure.action) for cure in record.verdict.cures)


class Remote(Dataset[torch.Tensor]):
    """Samples of a server that takes its time."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.zeros(64)


def test_samples_that_come_from_a_network_are_disk_bound_and_want_more_requests_at_once():
    def attempt() -> EpochRecord:
        return watch(PauseModel(0.001), DataLoader(Remote(), batch_size=2, num_workers=2))

    record = judged("disk-bound", attempt)
    assert int(re.fullmatch(r"(\d+) workers", record.verdict.cures[0].name)[1]) >= 4
    assert "2 workers" not in record.verdict.figures[0]
    assert "asleep" in record.verdict.figures[0]


@pytest.fixture(scope="module")
def packed(folder: Path) -> Path:
    """A compressed file, of more than our loader keeps of decoded chunks; all its chunks are the same."""
    path, num_chunks = folder / "packed.h5", 120
    chunk = np.resize(np.random.default_rng(0).integers(0, 256, 16384, dtype=np.uint8), (CHUNK_SAMPLES, *SAMPLE_SHAPE))
    with h5py.File(path, "w") as h5_file:
        shape = (num_chunks * CHUNK_SAMPLES, *SAMPLE_SHAPE)
        images = h5_file.create_dataset("images", shape, np.uint8, chunks=chunk.shape, compression="gzip")
        compressed = zlib.compress(chunk.tobytes(), 1)
        for number in range(num_chunks):
            images.id.write_direct_chunk((number * CHUNK_SAMPLES, 0, 0, 0), compressed)
    return path


@pytest.mark.filterwarnings("ignore:a full shuffle decodes a whole chunk for nearly every sample:UserWarning")
def test_our_loader_over_compressed_chunks_in_random_order_names_the_file_and_the_line_that_repacks_it(packed):
    def attempt() -> EpochRecord:
        return watch(PauseModel(0.001), datamodule=H5DataModule(packed, batch_size=16, shuffle="full"))

    record = judged("read amplification", attempt)
    shape = "x".join(map(str, (CHUNK_SAMPLES, *SAMPLE_SHAPE)))
    assert record.verdict.figures[0].startswith(f"{packed} images: chunks of {shape}, {CHUNK_SAMPLES} samples each")
    assert record.verdict.figures[0].endswith("read in order 'full'")
    assert record.verdict.cures[0].action.startswith(f"`gpufeed repack {packed} OUT.h5` once")
    assert "shuffle='window' in the DataModule" in record.verdict.cures[0].action
    assert record.counters.loader.is_own
    [file] = record.counters.loader.files
    assert (file.key, file.dtype, file.filters, file.is_direct) == ("images", "uint8", ("gzip",), False)


def test_our_loader_over_a_plain_file_keeps_up(folder):
    one = pipeline("slow step, fast loader", is_own=True, rows_per_chunk=CHUNK_SAMPLES)
    record = judged_pipeline(one, folder)
    assert record.counters.loader.is_own
    assert record.counters.loader.has_thread


def test_workers_started_anew_for_short_epochs_are_what_the_epochs_wait_for():
    record = judged("epoch start", started_anew)
    assert record.verdict.cures[0].name == "persistent_workers"
    assert record.verdict.figures[0].startswith("starting 1 worker (spawn) takes ")
    assert not record.counters.is_first


def started_anew() -> EpochRecord:
    """Two short epochs, each with a new process; of the second."""
    monitor = FeedMonitor(table=False, first_seconds=None)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    make_trainer(callbacks=[monitor], max_epochs=2).fit(PauseModel(0.005), loader)
    assert monitor.records[0].counters.is_first
    assert monitor.records[0].verdict.cause != "epoch start"  # said of later ones only
    return monitor.records[1]


def as_it_is(batch: torch.Tensor) -> list[torch.Tensor]:
    return [batch]


class Prepared(Dataset):
    """Batches cost next to nothing to load: less than it takes to hand them over."""

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.ones(len(indices), 2)


def test_small_batches_of_a_worker_that_are_ready_are_slow_to_hand_over():
    loader = DataLoader(Prepared(), batch_size=2, num_workers=1, persistent_workers=True, collate_fn=as_it_is)
    record = judged("hand-over", lambda: watch(PauseModel(0.0005), loader, seconds=SECONDS / 2))
    assert "num_workers=0" in record.verdict.cures[0].action
    assert record.counters.steps.ready_seconds > 0


class SlowCallback(pl.Callback):
    """What a progress bar in a notebook may take."""

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.01)


class SlowLogger(MemoryLogger):
    """A logger that writes to a server, and waits for it."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        time.sleep(0.01)
        super().log_metrics(metrics, step)


class Logging(PauseModel):
    """Logs in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("slow", ["callback", "logger"])
def test_a_callback_or_a_logger_that_takes_its_time_is_host_bound(slow):
    settings: dict[str, Any] = {"callbacks": (SlowCallback(),)} if slow == "callback" else {"logger": SlowLogger()}
    loader = DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=2)
    record = judged("host-bound", lambda: watch(Logging(0.005), loader, seconds=0.4, **settings))
    assert record.verdict.cures[0].name == "host code"
    assert record.counters.steps.hook_seconds > record.counters.steps.num_steps * 0.01
