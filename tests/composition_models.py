"""What the composition matrix trains: a model that any part can take, data in memory in any order, the parts by letter.

| letter | part |
|---|---|
| D | `H5ImageDataModule` |
| E | `BatchEcho`, every batch twice, each time in two pieces |
| A | `BatchEcho("auto")` with a loader that keeps up |
| R | `OOMRecovery`; two steps run out of memory |
| M | `FeedMonitor` |
| S | `OutOfOrderStrategy`, data parallel |
| P | `OutOfOrderStrategy(pipeline_size=...)`, all ranks of it, or with S two replicas |

The other side of each comparison has no part: Lightning alone, or its DDP, over batches in memory. What an echo stands
for there is a list of batches, what a pipeline stands for is a model that takes each batch in parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from lightning_gpufeed import BatchEcho, FeedMonitor, H5ImageDataModule, OOMRecovery, OutOfOrderStrategy
from lightning_gpufeed.echo.plan import pass_seed, piece_bounds
from lightning_gpufeed.hdf5.order import EpochPlan, FullShuffle, NoShuffle
from tests.datamodules.models import NUM_CLASSES, MemoryLogger, read, state_of
from tests.doubles import WAIT_SECONDS, KeptList

NUM_TRAIN, NUM_VAL, SEED = 22, 6, 5  # no number of ranks shares these evenly
MEAN, STD = (0.4914,), (0.247,)
NUM_MICROBATCHES = 2
"""Of a pipeline: the gradients of two add up to the same bits in either order."""
ECHO = {"echo_factor": 2, "num_splits": 2}
GIVEN: dict[str, Any] = {"reverse_first_k": 1, "cross_iteration": True, "bucket_bytes": 100}
"""An order that does not depend on how fast this machine is."""
WHOLE = ((1, "forward"), (4, "backward"))
"""Number of the batch, and where in it memory runs out; once each, so the second attempt is on the whole batch."""


class Net(pl.LightningModule):
    """Layers in a row that write down the samples they are given, as a user would: with ordinary attributes.

    Args:
        num_parts: In which the layers take a batch; 1 leaves it to whoever trains.
        failures: (number of the batch, "forward" or "backward") where memory runs out.
        waits: Whether a step is over when the next batch is there, so that the loader keeps up on any machine.
        interval: After which the learning rate changes.
        most: Samples that a step has memory for.
    """

    def __init__(
        self,
        *,
        num_parts: int = 1,
        failures: tuple[tuple[int, str], ...] = (),
        waits: bool = False,
        interval: str = "step",
        most: int = 1000,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            layers = [nn.Linear(72, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh()]
            self.body = nn.Sequential(*layers, nn.Linear(12, NUM_CLASSES))
        self.lr, self.interval = 0.1, interval
        self.num_parts, self.waits, self.most = num_parts, waits, most
        self.failures = KeptList(failures)
        self.trained: list[tuple[int, list[int]]] = []
        self.losses: list[float] = []
        self.evaluated: list[tuple[int, list[int]]] = []
        self.num_tests = 0

    def loss_of(self, batch: Any) -> torch.Tensor:
        """Of a batch of images and the numbers of the samples."""
        images, numbers = batch
        inputs = images.flatten(1)
        size = -(-len(inputs) // self.num_parts)
        outputs = self.body(inputs) if self.num_parts == 1 else torch.cat([self.body(x) for x in inputs.split(size)])
        return F.cross_entropy(outputs, numbers % NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Write down the samples, log, and run out of memory where it is due."""
        if len(batch[1]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = self.loss_of(batch)
        self.trained.append((self.current_epoch, batch[1].tolist()))
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        for phase in ("forward", "backward"):
            if (number, phase) in self.failures:
                self.failures.remove((number, phase))
                if phase == "forward":
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                loss.register_hook(_out_of_memory)
        if self.waits:
            self._wait_for_loader()
        return loss

    def _wait_for_loader(self) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not self.trainer.train_dataloader.is_ready():
            assert time.monotonic() < end, "the next batch never came"
            time.sleep(0.0002)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Write down the samples, log."""
        self.evaluated.append((self.trainer.global_step, batch[1].tolist()))
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """The same."""
        self.log("test_loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """What comes out."""
        return self.body(batch[0].flatten(1))

    def configure_optimizers(self) -> Any:
        """Momentum and a rate that changes with each step, so that a wrong order anywhere changes the end."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def _out_of_memory(gradient: torch.Tensor) -> torch.Tensor:
    """A hook in backward."""
    raise torch.OutOfMemoryError("CUDA out of memory.")


# Data ----------------------------------------------------------------------------------------------------------------


class Shared:
    """The samples of a file in memory, shared out among replicas as `H5ImageDataModule` does, with echoes or without.

    Can be resumed: its state is the place behind the batch it gave last.
    """

    def __init__(
        self, path: str, batch_size: int, share: tuple[int, int], *, is_training: bool, echo: dict[str, int] | None
    ) -> None:
        """Read all of it.

        Args:
            path: The file.
            batch_size: Of a replica.
            share: Number of replicas, and which one this is.
            is_training: Whether in another order in each epoch.
            echo: How often each batch is used, and in how many pieces; None for once, whole.
        """
        images = read(Path(path), "images").float()[:, None]
        self.images = ((images / 255 - MEAN[0]) / STD[0]).contiguous()
        self.numbers = read(Path(path), "labels")
        self.batch_size, self.share, self.is_training, self.echo = batch_size, share, is_training, echo
        self.epoch, self.position, self.is_resuming = 0, 0, False
        self.sampler = self  # the Trainer sets the epoch of these
        self.batch_sampler: Any = None

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch."""
        self.epoch = epoch

    def fresh(self, epoch: int) -> list[list[list[int]]]:
        """The samples of each step of an epoch, of each replica."""
        num_samples, num_replicas = len(self.numbers), self.share[0]
        shuffle = FullShuffle() if self.is_training else NoShuffle()
        order = shuffle.permutation(num_samples, SEED, epoch).tolist()
        plan = EpochPlan(num_samples, self.batch_size, num_replicas)
        return [
            [order[slice(*plan.rank_bounds(step, rank))] for rank in range(num_replicas)]
            for step in range(plan.num_steps)
        ]

    def batches(self, epoch: int) -> list[list[int]]:
        """Those of this replica, again and in pieces."""
        replica, found = self.share[1], []
        for fetch, of_all in enumerate(self.fresh(epoch)):
            samples = of_all[replica]
            if self.echo is None:
                found.append(samples)
                continue
            num_pieces = min(self.echo["num_splits"], *map(len, of_all))
            for number in range(self.echo["echo_factor"]):
                seed = pass_seed(pass_seed(pass_seed(0, replica, epoch, fetch), 0), number)
                order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
                for piece in range(num_pieces):
                    chosen = order[slice(*piece_bounds(len(samples), num_pieces, piece))]
                    found.append([samples[one] for one in chosen])
        return found

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.batches(0))

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch at once, or go on in the loaded one."""
        if not self.is_resuming:
            self.position = 0
        self.is_resuming = False
        return self._from_here(self.batches(self.epoch))

    def _from_here(self, batches: list[list[int]]) -> Iterator[Any]:
        while self.position < len(batches):
            chosen = torch.tensor(batches[self.position])
            self.position += 1
            yield [self.images[chosen], self.numbers[chosen]]

    def state_dict(self) -> dict[str, int]:
        """The place."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place."""
        self.epoch, self.position = state["epoch"], state["position"]
        self.is_resuming = True


def batch_size_of(num_replicas: int) -> int:
    """Of each replica: eight in all, so that an epoch has three steps whatever the ranks are."""
    return 8 // num_replicas


def middle_of(parts: str, num_replicas: int) -> int:
    """How many steps there are to the middle of the second epoch; with echoes to the middle of one, too."""
    plan = EpochPlan(NUM_TRAIN, batch_size_of(num_replicas), num_replicas)
    if "E" not in parts:
        return plan.num_steps + 2
    fewest = [(last - first) // num_replicas for first, last in map(plan.bounds, range(plan.num_steps))]
    return ECHO["echo_factor"] * sum(min(ECHO["num_splits"], share) for share in fewest) + 3


# Parts ---------------------------------------------------------------------------------------------------------------


def num_replicas_of(parts: str, world_size: int) -> int:
    """How many models train on different batches."""
    return world_size // pipeline_size_of(parts, world_size)


def pipeline_size_of(parts: str, world_size: int) -> int:
    """How many ranks share a model: all, or with S every second half of them."""
    if "P" not in parts:
        return 1
    return world_size // 2 if "S" in parts else world_size


def strategy_of(parts: str, world_size: int, **options: Any) -> Any:
    """The strategy of a cell: ours, with options, DDP, or none."""
    timeout: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=60)}
    if "P" in parts:
        size = max(2, pipeline_size_of(parts, world_size))  # on one rank: what a user would write
        usual = {"pipeline_size": size, "num_microbatches": NUM_MICROBATCHES, "layers_per_stage": 1}
        return OutOfOrderStrategy(**usual | timeout | options)
    if "S" in parts:
        return OutOfOrderStrategy(**GIVEN, **timeout)
    return SingleDeviceStrategy("cpu") if world_size == 1 else DDPStrategy(**timeout)


PARTS: dict[str, Callable[[], pl.Callback]] = {
    "E": lambda: BatchEcho(**ECHO, scale_lr="keep"),
    "A": lambda: BatchEcho("auto", scale_lr="inverse"),
    "R": lambda: OOMRecovery(grow_after=None, emergency_checkpoint=False),
    "M": lambda: FeedMonitor(table=False, first_seconds=1e-6, interval_seconds=0.1),
}


def callbacks_of(parts: str) -> list[pl.Callback]:
    """The callbacks of a cell, in the order of their letters."""
    return [PARTS[letter]() for letter in parts if letter in PARTS]


def data_of(
    parts: str, files: dict[str, str], share: tuple[int, int], *, echoes: bool = False, batch_size: int | None = None
) -> dict[str, Any]:
    """What `fit` is given: the DataModule, or two loaders over the same samples.

    Args:
        parts: Letters.
        files: Names and paths.
        share: Number of replicas, and which one this is.
        echoes: Whether the loader itself gives echoes.
        batch_size: Of each replica, if it is not the usual one.
    """
    batch_size = batch_size or batch_size_of(share[0])
    if "D" in parts:
        shape: dict[str, Any] = {"batch_size": batch_size, "seed": SEED, "mean": MEAN, "std": STD}
        return {"datamodule": H5ImageDataModule(files["train"], val=files["val"], test=files["val"], **shape)}
    val_size = min(batch_size, -(-NUM_VAL // share[0]))  # as the DataModule does for few samples
    return {
        "train_dataloaders": Shared(files["train"], batch_size, share, is_training=True, echo=ECHO if echoes else None),
        "val_dataloaders": Shared(files["val"], val_size, share, is_training=False, echo=None),
    }


# What came out -------------------------------------------------------------------------------------------------------


def found(trainer: Any, model: Net, logger: MemoryLogger) -> dict[str, Any]:
    """What came out, as far as it has to be that of plain Lightning."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return {
        **state_of(trainer, model),
        "counters": {
            "num_training_batches": trainer.num_training_batches,
            "total": vars(progress.total),
            "current": vars(progress.current),
            "epochs": vars(trainer.fit_loop.epoch_progress.total),
            "optimizer": trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict(),
        },
        "metrics": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "logged": [
            [step, row]
            for step, values in logger.logged
            if (row := {name: value for name, value in values.items() if not name.startswith("gpufeed/")})
        ],
        "figures": sorted({name for _, values in logger.logged for name in values if name.startswith("gpufeed/")}),
    }


def facts_of(callback: Any) -> dict[str, Any]:
    """What a part says of itself."""
    if isinstance(callback, BatchEcho):
        return {"trace": callback.trace}
    if isinstance(callback, OOMRecovery):
        return {"events": [[event.step, event.phase, event.num_microbatches] for event in callback.events]}
    if isinstance(callback, FeedMonitor):
        steps = [[one.counters.epoch, one.counters.steps.num_steps] for one in callback.records if not one.is_interim]
        return {"steps": steps}
    return {}
