"""Modules, loaders and gates for the tests of `BatchEcho`; also imported by the scripts run as real ranks.

A batch is `[features, numbers]`. The number of a sample says which one it is, the features follow from it, so whoever
writes down the numbers has written down what was trained on, and the same order gives the same weights to the last bit.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gpufeed import BatchEcho
from lightning_gpufeed.device.feed import Feed
from tests.datamodules.models import make_trainer
from tests.doubles import WAIT_SECONDS

NUM_FEATURES = 5


def features(numbers: torch.Tensor) -> torch.Tensor:
    """float32 (n, 5): what the samples of these numbers look like. Exact, however many are asked for at once."""
    return ((numbers[:, None] + 1) * torch.arange(3, 3 + NUM_FEATURES) ** 2 % 17).float() / 8 - 1


def batch_of(numbers: list[int]) -> list[torch.Tensor]:
    """A new batch of the samples of these numbers."""
    tensor = torch.tensor(numbers)
    return [features(tensor), tensor]


# The module --------------------------------------------------------------------------------------------------


class RateSGD(torch.optim.SGD):
    """SGD with momentum that writes down the learning rate of each step it takes."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        """Note the rate that the parameters are changed with, and step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.rates.append(float(self.param_groups[0]["lr"]))
        super().step()
        return loss


class EchoModel(pl.LightningModule):
    """A linear regression that writes down everything that happens to it while it is trained.

    Attributes:
        steps: (epoch, numbers of the samples) of each training step.
        losses: Loss of each training step.
        hooks: "before", "transfer" and "after" (of the transfer), "step", in order, in training only.
        batch_indices: `batch_idx` of each training step.
        validations: (epoch, training steps done, global_step) at the begin of each validation but the sanity check.
        validated: Numbers of the samples of each validation step, the sanity check too.
        moves: How often the learning rate schedule had moved, at the end of each training step.
        estimate: `estimated_stepping_batches` when the optimizer was made.
    """

    def __init__(
        self,
        *,
        schedule: str | None = None,
        is_automatic: bool = True,
        after_step: Callable[[EchoModel], None] | None = None,
    ) -> None:
        """Make the same weights every time.

        Args:
            schedule: None, "onecycle", "cosine" or "plateau"; all of them move by steps.
            is_automatic: Whether the Trainer optimizes.
            after_step: Called at the end of each training step, a `Pace` for instance.
        """
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.layer = torch.nn.Linear(NUM_FEATURES, 1)
        self.schedule = schedule
        self.automatic_optimization = is_automatic
        self.after_step = after_step
        self.steps: list[tuple[int, list[int]]] = []
        self.losses: list[float] = []
        self.hooks: list[str] = []
        self.batch_indices: list[int] = []
        self.validations: list[tuple[int, int, int]] = []
        self.validated: list[list[int]] = []
        self.moves: list[int] = []
        self.estimate: float | None = None

    # What a subclass changes

    def unpack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and numbers of a batch."""
        return batch[0], batch[1]

    # What is written down

    @property
    def samples(self) -> list[list[int]]:
        """The samples of each training step."""
        return [samples for _, samples in self.steps]

    @property
    def sizes(self) -> list[int]:
        """The number of samples of each training step."""
        return [len(samples) for samples in self.samples]

    @property
    def rates(self) -> list[float]:
        """The learning rate of each optimizer step, as the optimizer saw it."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        return list(optimizer.rates)  # type: ignore[union-attr]

    def in_epoch(self, epoch: int) -> list[list[int]]:
        """The samples of each training step of an epoch."""
        return [samples for number, samples in self.steps if number == epoch]

    def note(self, hook: str) -> None:
        """Write down that a hook ran, in training."""
        if self.trainer.training:
            self.hooks.append(hook)

    # Hooks of the Trainer

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note it."""
        self.note("before")
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Note it."""
        self.note("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note it."""
        self.note("after")
        return batch

    def loss_of(self, batch: Any) -> torch.Tensor:
        """Mean squared error against a fixed function of the features."""
        inputs, _ = self.unpack(batch)
        return F.mse_loss(self.layer(inputs)[:, 0], inputs.sum(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Write down the samples; optimize, if the Trainer does not."""
        self.note("step")
        _, numbers = self.unpack(batch)
        self.steps.append((self.current_epoch, numbers.int().tolist()))
        self.batch_indices.append(batch_idx)
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            optimizer.step()  # type: ignore[union-attr]
        if self.after_step is not None:
            self.after_step(self)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write down how far the schedule is."""
        configs = self.trainer.lr_scheduler_configs
        self.moves.append(configs[0].scheduler.last_epoch if configs else 0)

    def on_train_epoch_end(self) -> None:
        """Let all batches pass, should this be the last epoch: the end of a training waits for one in the making."""
        trainer = self.trainer
        is_last = trainer.global_step == trainer.max_steps or trainer.current_epoch + 1 == trainer.max_epochs
        if is_last and isinstance(self.after_step, Pace):
            self.after_step.release()

    def on_validation_start(self) -> None:
        """Write down when it begins."""
        if not self.trainer.sanity_checking and self.trainer.state.fn == "fit":
            self.validations.append((self.current_epoch, len(self.steps), self.trainer.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Write down the samples and log the loss."""
        _, numbers = self.unpack(batch)
        self.validated.append(numbers.int().tolist())
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        """Momentum, so that a wrong order anywhere changes the end."""
        optimizer = RateSGD(self.parameters())
        if self.schedule is None:
            return optimizer
        self.estimate = self.trainer.estimated_stepping_batches
        schedulers = torch.optim.lr_scheduler
        if self.schedule == "onecycle":
            scheduler: Any = schedulers.OneCycleLR(optimizer, max_lr=0.2, total_steps=int(self.estimate))
        elif self.schedule == "cosine":
            scheduler = schedulers.CosineAnnealingLR(optimizer, T_max=int(self.estimate))
        else:
            scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=1)
            plateau = {"scheduler": scheduler, "interval": "step", "monitor": "train_loss", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": plateau}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# Loaders -----------------------------------------------------------------------------------------------------


def numbered(num_samples: int) -> TensorDataset:
    """A dataset of the samples 0 to n - 1."""
    numbers = torch.arange(num_samples)
    return TensorDataset(features(numbers), numbers)


def plain_loader(num_samples: int = 22, batch_size: int = 8, **settings: Any) -> DataLoader[Any]:
    """torch's loader, in order unless told otherwise."""
    return DataLoader(numbered(num_samples), batch_size=batch_size, **settings)


class Batches:
    """An iterable over new batches that is no `DataLoader`, knows its length and is in order in every epoch."""

    def __init__(self, num_samples: int = 22, batch_size: int = 8) -> None:
        """Note the sizes."""
        self.num_samples, self.batch_size = num_samples, batch_size
        self.num_iterations = 0

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-self.num_samples // self.batch_size)

    def __len__(self) -> int:
        """The same."""
        return self.num_batches

    def order(self) -> list[int]:
        """The samples of an epoch, in order."""
        return list(range(self.num_samples))

    def batch(self, number: int) -> list[torch.Tensor]:
        """Make a batch of the epoch."""
        return batch_of(self.order()[number * self.batch_size : (number + 1) * self.batch_size])

    def __iter__(self) -> Iterator[Any]:
        """From the first one."""
        self.num_iterations += 1
        return (self.batch(number) for number in range(self.num_batches))


class Unsized:
    """The same without a length."""

    def __init__(self, num_samples: int = 22, batch_size: int = 8) -> None:
        """Note the sizes."""
        self.batches = Batches(num_samples, batch_size)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        """From the first one."""
        return iter(self.batches)


class StatefulBatches(Batches):
    """An iterable that can be resumed, in another order in each epoch.

    Its state is the place behind the batch it gave last, as torchdata's `StatefulDataLoader` has it.
    """

    def __init__(self, num_samples: int = 22, batch_size: int = 8, seed: int = 5) -> None:
        """At the begin of the first epoch."""
        super().__init__(num_samples, batch_size)
        self.seed = seed
        self.epoch, self.position = -1, 0
        self.is_resuming = False

    def order(self) -> list[int]:
        """A permutation for each epoch."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * self.epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch at once, or go on in the loaded one."""
        if self.is_resuming:
            self.is_resuming = False
        else:
            self.epoch, self.position = self.epoch + 1, 0
        return self._from_here()

    def _from_here(self) -> Iterator[Any]:
        while self.position < self.num_batches:
            self.position += 1
            yield self.batch(self.position - 1)

    def state_dict(self) -> dict[str, int]:
        """The place."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place."""
        self.epoch, self.position = state["epoch"], state["position"]
        self.is_resuming = True


class StatefulUnsized(StatefulBatches):
    """The same without a length."""

    def __len__(self) -> int:
        """As an iterable dataset without a length has it.

        Raises:
            TypeError: Always.
        """
        raise TypeError("no length")


# Slow and fast loaders, without a clock ----------------------------------------------------------------------


class Gate:
    """Lets batches pass up to the one it was opened for."""

    def __init__(self) -> None:
        """Open for the first batch only."""
        self._last_open = 0
        self._changed = threading.Condition()

    def open(self, number: int) -> None:
        """Let this batch pass, and all before it."""
        with self._changed:
            self._last_open = max(self._last_open, number)
            self._changed.notify_all()

    def pass_through(self, number: int) -> None:
        """Wait until it is open.

        Raises:
            TimeoutError: It stays shut.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._last_open >= number, WAIT_SECONDS):
                raise TimeoutError(f"nobody let batch {number} pass")


class GatedDataset(Dataset[Any]):
    """Samples whose batches come when a gate lets them pass; batches are counted over all epochs."""

    def __init__(self, num_samples: int, gate: Gate) -> None:
        """Note the gate."""
        self.num_samples, self.gate = num_samples, gate
        self.num_batches = 0

    def __len__(self) -> int:
        """Number of samples."""
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        """The samples of a batch, all at once."""
        self.gate.pass_through(self.num_batches)
        self.num_batches += 1
        return [(features(torch.tensor([index]))[0], index) for index in indices]


def gated_loader(gate: Gate, num_samples: int = 32, batch_size: int = 8, **settings: Any) -> DataLoader[Any]:
    """A loader in this process whose batches come when a gate lets them pass."""
    return DataLoader(GatedDataset(num_samples, gate), batch_size=batch_size, **settings)


class Pace:
    """Opens a gate such that each batch is late by exactly so many passes: an `after_step` of `EchoModel`.

    The batch after batch i comes when `passes[i]` passes were made over batch i, and the step does not end before it
    is there. So nothing depends on how fast this machine is. The last batch of an epoch has none after it to be late.

    Args:
        gate: The gate, None if batches come by themselves and are only waited for.
        passes: Over each batch of each epoch, in order; after its end, 1.
        num_splits: Steps of a pass.
    """

    def __init__(self, gate: Gate | None = None, passes: list[int] | None = None, num_splits: int = 1) -> None:
        """At the first batch."""
        self.gate, self.passes, self.num_splits = gate, list(passes or []), num_splits
        self.batch, self.num_steps = 0, 0

    def __call__(self, model: EchoModel) -> None:
        """A step is done."""
        self.num_steps += 1
        passes = self.passes[self.batch] if self.batch < len(self.passes) else 1
        if self.num_steps == passes * self.num_splits:
            self.batch, self.num_steps = self.batch + 1, 0
            if self.gate is not None:
                self.gate.open(self.batch)
            wait_until(model.trainer.train_dataloader.is_ready)

    def release(self) -> None:
        """Open the gate for good."""
        if self.gate is not None:
            self.gate.open(sys.maxsize)


class _Demand:
    """How many batches of a feed were asked for, which one is being made, and whether it is over."""

    num_asked, making, is_over = 0, 0, False

    def is_waited_for(self) -> bool:
        """Whether whoever trains can do nothing before the batch in the making is there."""
        return self.is_over or self.num_asked > self.making


class VirtualClock:
    """A clock that goes on only when somebody works: put in the place of the module `time`.

    One thread loads, one trains. Whoever trains lets time pass, and meets a batch that is due by then; whoever is
    blocked lets the time pass that he waits for. Who is blocked is known from what was asked of the feed between the
    two, for which `feed` stands in: nothing depends on how fast this machine is.
    """

    def __init__(self) -> None:
        """At zero."""
        self.now = 0.0
        self.is_ready: Callable[[], bool] = lambda: True
        self._due: float | None = None
        self._loaded: float | None = None
        self._changed = threading.Condition()
        self._of_thread = threading.local()

    def feed(self, produce: Callable[[int], Any], *arguments: Any, **settings: Any) -> Feed[Any]:
        """A `Feed` that tells what is asked of it."""
        clock, demand = self, _Demand()

        class Asked(Feed[Any]):
            def __next__(self) -> Any:
                with clock._changed:
                    demand.num_asked += 1
                    clock._changed.notify_all()
                return super().__next__()

            def close(self, timeout_seconds: float | None = None) -> None:
                with clock._changed:
                    demand.is_over = True
                    clock._changed.notify_all()
                super().close(timeout_seconds)

        def counted(number: int) -> Any:
            clock._of_thread.demand, demand.making = demand, number
            return produce(number)

        return Asked(counted, *arguments, **settings)

    def perf_counter(self) -> float:
        """Seconds since the begin; right after loading, when that was done, though others may have gone on since."""
        if threading.current_thread() is not threading.main_thread() and self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            return loaded
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass, as one who looks again and again whether a batch is there."""
        self.work(seconds)

    def work(self, seconds: float) -> None:
        """Let time pass, as one who trains."""
        # The loader begins a batch at once when the one before was taken.
        wait_until(lambda: self._due is not None or self.is_ready())
        with self._changed:
            self.now += seconds
            is_due = self._due is not None and self._due <= self.now
            self._changed.notify_all()
        if is_due:
            wait_until(self.is_ready)

    def load(self, seconds: float) -> None:
        """Let time pass, as one who loads; in a thread, it is the others who do."""
        if threading.current_thread() is threading.main_thread():
            self.now += seconds
            return
        with self._changed:
            self._due = due = self.now + seconds
            demand: _Demand = self._of_thread.demand
            assert self._changed.wait_for(lambda: self.now >= due or demand.is_waited_for(), WAIT_SECONDS)
            self.now = max(self.now, due)
            self._loaded, self._due = due, None


class TimedDataset(Dataset[Any]):
    """Samples whose batches take a while of a virtual clock, in turn one of the given ones."""

    def __init__(self, num_samples: int, clock: VirtualClock, seconds: list[float]) -> None:
        """Note all."""
        self.num_samples, self.clock, self.seconds = num_samples, clock, seconds
        self.num_batches = 0

    def __len__(self) -> int:
        """Number of samples."""
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        """The samples of a batch, all at once."""
        self.clock.load(self.seconds[self.num_batches % len(self.seconds)])
        self.num_batches += 1
        return [(features(torch.tensor([index]))[0], index) for index in indices]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for something that has to become true.

    Raises:
        TimeoutError: It does not.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for did not come")
        time.sleep(0.0005)


# Training ----------------------------------------------------------------------------------------------------


def fit(
    callbacks: Callback | list[Callback] | None = None,
    loader: Any = None,
    *,
    model: EchoModel | None = None,
    val: Any = None,
    ckpt_path: Any = None,
    trainer: pl.Trainer | None = None,
    **settings: Any,
) -> tuple[EchoModel, pl.Trainer]:
    """Train for two epochs, or as the settings say, on batches of 8, 8 and 6 or on the given loader.

    Args:
        callbacks: One, several or none.
        loader: Of the training, or a DataModule.
        model: A new `EchoModel` if none is given.
        val: The validation loader, none by default.
        ckpt_path: Where to go on from.
        trainer: One to use in place of a new one with the callbacks and settings.
        **settings: Of the Trainer.

    Returns:
        The trained module and its Trainer.
    """
    model = EchoModel() if model is None else model
    chosen = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else callbacks
    trainer = make_trainer(**{"max_epochs": 2, "callbacks": chosen} | settings) if trainer is None else trainer
    resume: dict[str, Any] = {} if ckpt_path is None else {"ckpt_path": ckpt_path, "weights_only": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
        if isinstance(loader, pl.LightningDataModule):
            trainer.fit(model, datamodule=loader, **resume)
        else:
            trainer.fit(model, plain_loader() if loader is None else loader, val, **resume)
    return model, trainer


def echo(echo_factor: Any = 2, **arguments: Any) -> BatchEcho:
    """A callback that says nothing of learning rates."""
    return BatchEcho(echo_factor, **{"scale_lr": "keep"} | arguments)
