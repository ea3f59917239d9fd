"""What only a device can show of `OutOfOrderStrategy`: one rank over NCCL gives the same bits as no strategy at all.

Each has a twin that runs everywhere: tests/strategies.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_gpufeed import OutOfOrderStrategy
from tests.datamodules.models import make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]

NUM_STEPS = 12


class Net(pl.LightningModule):
    """Convolutions with BatchNorm, attention whose projection is used as a function, and a head."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.body(batch).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        loss = self.head(x.mean(1)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        kinds = {
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True),
        }
        optimizer = kinds[self.optimizer]()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trained(strategy: Any, optimizer: str, precision: str, **options: Any) -> dict[str, Tensor]:
    batches = torch.randn(NUM_STEPS, 8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = Net(optimizer)
    trainer = make_trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_steps=NUM_STEPS,
        max_epochs=-1,
        **options,
    )
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


@pytest.fixture(autouse=True)
def _deterministic() -> Any:
    """Kernels that give the same bits twice."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_rank_on_a_device_trains_to_the_same_bits_as_no_strategy(optimizer, precision):
    expected = trained("auto", optimizer, precision)
    strategy = OutOfOrderStrategy(reverse_first_k=4, cross_iteration=True, bucket_bytes=1000, verify_every=5)
    found = trained(strategy, optimizer, precision)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "clipping",
    [
        {"gradient_clip_val": 1e6},
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    ],
    ids=["norm, far", "norm", "value"],
)
def test_clipping_that_overlaps_is_that_of_no_strategy(optimizer, clipping):
    expected = trained("auto", optimizer, "32-true", **clipping)
    strategy = OutOfOrderStrategy(
        reverse_first_k=4, cross_iteration=True, bucket_bytes=1000, overlap_clipping=True, verify_every=5
    )
    found = trained(strategy, optimizer, "32-true", **clipping)
    if clipping == {"gradient_clip_val": 0.01}:  # the norm is summed in another order; Adam divides by what is left
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    else:
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
