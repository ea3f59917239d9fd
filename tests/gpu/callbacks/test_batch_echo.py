"""What only a device can show of `BatchEcho`: events instead of clocks, no wait for the device, one copy per batch.

Each has a twin that runs everywhere: tests/callbacks, tests/echo and tests/device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpufeed import BatchEcho
from lightning_gpufeed.device.marks import StepClock
from lightning_gpufeed.echo.cache import CachedBatch
from lightning_gpufeed.echo.plan import Piece
from tests.datamodules.models import make_trainer, same_bits, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning"),
]

DEVICE = torch.device("cuda")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def keep_busy(num_products: int = 200) -> None:
    factor = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(num_products):
        factor = factor @ factor * 1e-2


def test_gathering_a_piece_does_not_wait_for_the_device(no_waiting):
    batch = {"x": torch.zeros(512, 3, 8, 8, device=DEVICE), "y": torch.zeros(512, device=DEVICE)}
    cached = CachedBatch(batch, "rows", seed=1, is_first_in_order=False)
    keep_busy()
    pieces = [cached.piece(Piece(0, pass_index, number), 2) for pass_index in range(2) for number in range(2)]
    assert all(piece["x"].shape == (256, 3, 8, 8) for piece in pieces)


def test_each_pass_on_the_device_is_a_permutation_of_its_own():
    batch = torch.arange(101, device=DEVICE)
    cached = CachedBatch(batch, "rows", seed=1, is_first_in_order=False)
    passes = [torch.cat([cached.piece(Piece(0, number, i), 3) for i in range(3)]).tolist() for number in range(3)]
    assert all(sorted(numbers) == list(range(101)) for numbers in passes)
    assert len({tuple(numbers) for numbers in passes}) == 3


def test_beside_the_batch_there_is_only_the_piece_in_device_memory():
    batch = torch.zeros(64, 1024, 1024, device=DEVICE)
    cached = CachedBatch(batch, "rows", seed=1, is_first_in_order=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for number in range(4):
        cached.piece(Piece(0, 0, number), 4)
    assert torch.cuda.max_memory_allocated() - before < batch.nbytes * 0.26


def test_the_clock_knows_the_steps_that_the_device_has_not_finished(no_waiting):
    clock = StepClock(DEVICE)
    for _ in range(3):
        clock.begin()
        keep_busy()
        clock.end()
    assert clock.num_unfinished() >= 1
    deadline = time.monotonic() + 20
    while clock.num_unfinished() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert clock.num_steps == 3
    assert clock.seconds > 0


class Linear(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.num_transfers = 0
        self.seen: list[list[int]] = []

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.num_transfers += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch, batch_idx):
        points, numbers = batch
        assert points.is_cuda
        self.seen.append(numbers.tolist())
        return self.layer(points).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def loader(num_samples: int = 44, batch_size: int = 8) -> DataLoader:
    points = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(points, torch.arange(num_samples)), batch_size, pin_memory=True)


def test_echoes_copy_nothing_to_the_device_and_use_every_sample_as_often():
    model = Linear()
    trainer = make_trainer(accelerator="gpu", max_epochs=1, callbacks=[BatchEcho(3, num_splits=2, scale_lr="keep")])
    trainer.fit(model, loader())
    assert model.num_transfers == 6
    assert trainer.global_step == 36
    assert sorted(number for step in model.seen for number in step) == sorted([*range(44)] * 3)


def test_a_loader_that_keeps_up_gives_the_training_without_the_callback():
    states = []
    for callbacks in ([], [BatchEcho("auto")]):
        model = Linear()
        trainer = make_trainer(accelerator="gpu", max_epochs=2, callbacks=callbacks)
        trainer.fit(model, loader())
        states.append(state_of(trainer, model))
    assert same_bits(*states)


def test_a_replay_on_the_device_ends_with_the_same_bits():
    class Slow:
        def __iter__(self):
            for points, numbers in loader():
                time.sleep(0.05)
                yield points, numbers

        def __len__(self):
            return 6

    first = BatchEcho("auto", scale_lr="keep")
    model = Linear()
    trainer = make_trainer(accelerator="gpu", max_epochs=2, callbacks=[first])
    trainer.fit(model, Slow())
    again = Linear()
    repeated = make_trainer(
        accelerator="gpu", max_epochs=2, callbacks=[BatchEcho("auto", scale_lr="keep", replay=first.trace)]
    )
    repeated.fit(again, Slow())
    assert trainer.global_step > 12
    assert same_bits(state_of(trainer, model), state_of(repeated, again))
