"""What only a device can show of `FeedMonitor` in a Trainer: idle time by events, no wait for it, the same bits.

Each has a twin that runs everywhere: tests/callbacks/test_feed_monitor*.py and tests/diagnose.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_gpufeed import FeedMonitor
from lightning_gpufeed.diagnose.judgement import Cause
from tests.datamodules.models import make_trainer, same_bits, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]

DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def cycles_per_second() -> float:
    """How fast the device spins, after its clock has warmed up."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        torch.cuda._sleep(10_000_000)
        torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    return 100_000_000 / (time.perf_counter() - begin)


class Spinning(pl.LightningModule):
    """A small step, and a kernel that spins for a known time behind it."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.cycles = cycles

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        return self.layer(batch[:, :4]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Loader:
    """Gives one batch again and again, each after a while."""

    def __init__(self, num_batches: int, seconds: float = 0.0, batch: torch.Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.batch = torch.randn(16, 4, generator=generator).pin_memory() if batch is None else batch
        self.num_batches, self.seconds = num_batches, seconds

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.num_batches):
            if self.seconds:
                time.sleep(self.seconds)
            yield self.batch


def train(model: pl.LightningModule, loader: Loader, *callbacks: pl.Callback, max_epochs: int = 2) -> pl.Trainer:
    trainer = make_trainer(accelerator="gpu", max_epochs=max_epochs, callbacks=list(callbacks))
    trainer.fit(model, loader)
    return trainer


def watched(model: pl.LightningModule, loader: Loader) -> Any:
    """The record of the second epoch."""
    monitor = FeedMonitor(table=False, first_seconds=None)
    train(model, loader, monitor)
    return monitor.records[-1]


def test_a_slow_loader_leaves_the_device_idle_and_is_named(cycles_per_second):
    record = watched(Spinning(int(0.01 * cycles_per_second)), Loader(20, 0.03))
    steps = record.counters.steps
    assert steps.num_steps == 20
    assert steps.num_timed >= 19
    assert steps.idle_seconds > 0.4 * steps.elapsed_seconds
    assert record.verdict.wait_share > 0.4
    assert record.verdict.cause not in (Cause.COMPUTE, Cause.COPY, Cause.SYNC, Cause.HOST)
    assert any(cure.gain > 1.5 for cure in record.verdict.cures)


def test_a_host_that_runs_ahead_is_not_called_loader_bound_though_its_loop_waits(cycles_per_second):
    record = watched(Spinning(int(0.03 * cycles_per_second)), Loader(40, 0.01))
    steps = record.counters.steps
    assert steps.wait_seconds > 0.3 * steps.elapsed_seconds
    assert record.verdict.wait_share < 0.05
    assert record.verdict.cause is Cause.COMPUTE


def test_a_step_that_only_copies_is_copy_bound(cycles_per_second):
    batch = torch.empty(64 << 20)  # 256 MiB, pageable: the copy takes tens of milliseconds
    record = watched(Spinning(0), Loader(12, batch=batch.view(16, -1)))
    steps = record.counters.steps
    assert steps.share(steps.copy_seconds) > 0.5
    assert record.verdict.cause is Cause.COPY
    assert not record.counters.batch.is_pinned
    assert "pin_memory" in {cure.name for cure in record.verdict.cures}


class NoWaiting(pl.Callback):
    """Whatever waits for the device between the beginning and the end of an epoch raises."""

    def on_train_epoch_start(self, *args: Any) -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def on_train_epoch_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_epoch_end


def test_no_step_waits_for_the_device(cycles_per_second):
    try:
        train(Spinning(int(0.005 * cycles_per_second)), Loader(30), NoWaiting())
    except RuntimeError as error:
        pytest.skip(f"the Trainer itself waits: {error}")
    # Every tenth of a second the operating system is asked, and an early verdict is given in the middle.
    monitor = FeedMonitor(table=False, first_seconds=0.05, interval_seconds=0.1)
    train(Spinning(int(0.005 * cycles_per_second)), Loader(30, 0.01), NoWaiting(), monitor)
    assert [record.is_interim for record in monitor.records] == [True, False, False]
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_training_that_is_watched_ends_with_the_same_bits():
    states = []
    for callbacks in ([], [FeedMonitor(table=False, first_seconds=0.001)]):
        model = Spinning(0)
        states.append(state_of(train(model, Loader(25), *callbacks), model))
    assert same_bits(*states)


def test_the_devices_memory_is_known_and_shared_out_correctly():
    held = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
    machine = watched(Spinning(0), Loader(5)).counters.machine
    assert machine.device_total_bytes == pytest.approx(
        torch.cuda.get_device_properties(DEVICE).total_memory, rel=0.05
    )  # what the driver keeps for itself
    assert 0 < machine.device_free_bytes <= machine.device_total_bytes - held.nbytes
    assert held.nbytes <= machine.device_peak_bytes <= machine.device_total_bytes
    assert machine.device_utilisation is None or 0 <= machine.device_utilisation <= 1


def test_a_batch_that_is_on_the_device_already_has_no_copy(cycles_per_second):
    loader = Loader(20, batch=torch.randn(16, 4, device=DEVICE))
    steps = watched(Spinning(int(0.005 * cycles_per_second)), loader).counters.steps
    assert steps.copy_seconds < 0.1 * steps.compute_seconds
    assert steps.num_timed > 0
