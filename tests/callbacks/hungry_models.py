"""Modules that really run out of memory, and the limit that lets them: used by oom_worker.py in a process of its own.

Memory runs out because the address space of the process may not grow (`RLIMIT_AS`). Only the soft limit is lowered, so
it can be lifted again. A limit is set in the middle of a step and holds for all further attempts of that step.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.doubles import KeptList

MIB = 2**20
BATCH_SIZE, NUM_BATCHES, NUM_EPOCHS = 32, 4, 2
LIBC = ctypes.CDLL(None)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


# The limit --------------------------------------------------------------------------------------------------


def status_bytes(name: str) -> int:
    """A size of this process as the kernel counts it: "VmSize", "RssAnon"."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def lower_ceiling(headroom_mib: float) -> None:
    """Let the process map so much more and nothing beyond."""
    gc.collect()
    LIBC.malloc_trim(0)
    limit = status_bytes("VmSize") + int(headroom_mib * MIB)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def lift_ceiling() -> None:
    """Let it map what it wants."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def keep_blocks_apart(is_apart: bool) -> None:
    """Each tensor in a mapping of its own, so that a headroom is exact; else all in one heap that never shrinks."""
    LIBC.mallopt(M_MMAP_THRESHOLD, 2**16 if is_apart else 32 * MIB)
    LIBC.mallopt(M_TRIM_THRESHOLD, 2**17 if is_apart else 2**30)


# Modules ----------------------------------------------------------------------------------------------------


class Hungry(pl.LightningModule):
    """Small weights, large activations, in float64 so that sums in another order agree to many digits.

    ::

        x (n, 8) -> layer (n, 8) -> spread (n, 8, spread) -> tanh, DEPTH times -> mean -> head (n, 3)
                                       2 MiB for 32 samples, each of them kept for backward

    Attributes:
        ceilings: (stage, step) -> MiB that may be mapped beyond what is mapped when the step begins.
        attempts: (stage, step, samples) of each call of a step.
        alive: For each attempt how many activations of the attempts before it in this step are still there.
        sizes: For each attempt VmSize and RssAnon at its begin.
    """

    DEPTH = 6

    def __init__(self, ceilings: dict[tuple[str, int], float] | None = None, *, spread: int = 1024) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.layer = torch.nn.Linear(8, 8).double()
            self.head = torch.nn.Linear(8, 3).double()
        self.spread = spread
        stages = ("train", "validate", "test")
        self.accuracies = torch.nn.ModuleDict(
            {f"of_{stage}": MulticlassAccuracy(3, average="micro") for stage in stages}
        )
        self.mean_losses = torch.nn.ModuleDict({f"of_{stage}": MeanMetric() for stage in stages})
        self.ceilings = ceilings or {}
        self.wraps_errors = False
        self.attempts: list[tuple[str, int, int]] = KeptList()
        self.alive: list[int] = KeptList()
        self.sizes: list[tuple[int, int]] = KeptList()
        self._activations: list[weakref.ref[torch.Tensor]] = KeptList()
        self._steps: list[tuple[str, int]] = KeptList([("", -1)])

    def begin(self, stage: str, step: int, num_samples: int) -> None:
        """Write down that an attempt begins; lower the ceiling at the first."""
        if self._steps[-1] != (stage, step):
            self._steps.append((stage, step))
            self._activations.clear()
            lift_ceiling()
            if (stage, step) in self.ceilings:
                self.forward(torch.zeros(1, 8, dtype=torch.float64))  # maps what the first call of anything maps
                self._activations.clear()
                lower_ceiling(self.ceilings[stage, step])
        self.attempts.append((stage, step, num_samples))
        self.alive.append(sum(activation() is not None for activation in self._activations))
        self.sizes.append((status_bytes("VmSize"), status_bytes("RssAnon")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)[..., None].expand(-1, -1, self.spread)
        for _ in range(self.DEPTH):
            hidden = torch.tanh(hidden)
            self._activations.append(weakref.ref(hidden))
        return self.head(hidden.mean(-1))

    def outputs_of(self, x: torch.Tensor) -> torch.Tensor:
        """`forward`, its errors raised from another one as libraries do it."""
        if not self.wraps_errors:
            return self(x)
        try:
            return self(x)
        except RuntimeError as error:
            raise RuntimeError(f"in the network: {error}") from error

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.begin("fit", self.current_epoch * NUM_BATCHES + batch_idx, len(x))
        outputs = self.outputs_of(x)
        loss = F.cross_entropy(outputs, y)
        self.log_all("train", outputs.detach(), y, loss.detach())
        return loss

    def log_all(self, stage: str, outputs: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
        """Every way of reducing, values of steps and of epochs, metric objects."""
        both: dict[str, Any] = {"on_step": stage == "train", "on_epoch": True}
        hits = (outputs.argmax(1) == y).double()
        accuracy, mean_loss = self.accuracies[f"of_{stage}"], self.mean_losses[f"of_{stage}"]
        accuracy(outputs, y)
        mean_loss(loss)
        self.log(f"{stage}_accuracy", accuracy, **both)
        self.log(f"{stage}_mean_loss", mean_loss, on_step=False, on_epoch=True)
        self.log(f"{stage}_loss", loss, **both)
        self.log(f"{stage}_hits", hits.sum(), reduce_fx="sum", **both)
        self.log(f"{stage}_largest", outputs.max(), reduce_fx="max", **both)
        self.log(f"{stage}_smallest", outputs.min(), reduce_fx="min", **both)
        self.log(f"{stage}_sized", loss, batch_size=len(y), on_step=False, on_epoch=True)
        self.log(f"{stage}_samples", float(len(y)), reduce_fx="sum", on_step=False, on_epoch=True)

    def on_train_batch_end(self, *_: Any) -> None:
        lift_ceiling()

    def evaluate(self, stage: str, batch: Any, batch_idx: int) -> torch.Tensor:
        """A step without backward."""
        x, y = batch
        self.begin(stage, batch_idx, len(x))
        outputs = self(x)
        if stage != "predict":
            self.log_all(stage, outputs, y, F.cross_entropy(outputs, y))
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.evaluate("validate", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.evaluate("test", batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        return {"outputs": self.evaluate("predict", batch, batch_idx), "numbers": batch[1]}

    def on_validation_batch_end(self, *_: Any) -> None:
        lift_ceiling()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def batches(num_batches: int = NUM_BATCHES, batch_size: int = BATCH_SIZE) -> DataLoader[Any]:
    """Always the same samples in the same order."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_batches * batch_size, 8, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(len(x)) % 3), batch_size=batch_size)


class Weighty(pl.LightningModule):
    """Three weights of 1 MiB each; the ceiling comes down between backward and the update of one step."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], step: int = -1, headroom_mib: float = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])
        self.make, self.step, self.headroom_mib = make, step, headroom_mib

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0].float().repeat(1, 64)).pow(2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == self.step:
            lower_ceiling(self.headroom_mib)

    def on_train_batch_end(self, *_: Any) -> None:
        lift_ceiling()

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OwnAdam(torch.optim.Adam):
    """A class whose inner life is not known."""


def several(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """All parameters at once, which takes most."""
    return torch.optim.Adam(parameters, lr=lr, foreach=True)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "loop": torch.optim.Adam,
    "foreach": several,
    "own": OwnAdam,
}
