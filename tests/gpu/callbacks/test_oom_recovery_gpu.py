"""What only a device can show of `OOMRecovery`: its allocator runs out of memory for real, and gets it back.

The process may have so much more device memory than it has (`set_per_process_memory_fraction`), from one batch on; what
the allocator raises then is the error of a full device. Each test has a twin that runs everywhere: tests/callbacks.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from lightning_gpufeed import OOMRecovery
from tests.datamodules.models import make_trainer, same_bits, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]

DEVICE = torch.device("cuda", 0)
ACCELERATOR = "gpu"
NUM_FEATURES, WIDTH = 16, 1024
LARGE, SMALL = 64 * 1024, 512
"""Samples of a batch: an activation of a large one takes 256 MiB in float32."""
ACTIVATION_BYTES = 4 * LARGE * WIDTH
NUM_BATCHES, STARVED = 6, 3

ROUNDING = 1e-4
"""Of what the training changed: float32 sums in another order. A batch that is left out is a sixth of it."""
HALF_ROUNDING = 2e-2
"""The same where gradients have 8 to 11 bits."""
ADAM_ROUNDING = 1e-2
"""The same with Adam, whose update of a weight hangs on the sign of a gradient that may be all rounding."""


def limit_memory(num_more_bytes: float) -> None:
    """Let this process have so much more than it has now."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_more_bytes) / total, DEVICE)


def unlimit_memory() -> None:
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated(DEVICE)


@pytest.fixture(autouse=True)
def _no_limit_left() -> Iterator[None]:
    yield
    unlimit_memory()
    gc.collect()
    torch.cuda.empty_cache()


# Trainings -------------------------------------------------------------------------------------------------


class Batches:
    """A loader that takes no time: a batch of 64 Ki samples has no need to be put together."""

    def __init__(self, num_samples: int, num_batches: int = NUM_BATCHES, *, is_pinned: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.batches = []
        for _ in range(num_batches):
            points = torch.randn(num_samples, NUM_FEATURES, generator=generator)
            values = points.sin().sum(1)
            self.batches.append((points.pin_memory(), values.pin_memory()) if is_pinned else (points, values))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Regression(pl.LightningModule):
    """One wide layer; in forward two activations are there at once, in backward three.

    Attributes:
        more_bytes: From the starved batch on the process may have so much more; None: there is no limit.
        fails_once: Where an error is raised by hand in the starved batch, once: "forward", "backward", "update".
        attempts: Number of the batch, samples, bytes in tensors at the begin of each attempt.
        masks: What dropout has left of the starved batch, in each attempt.
    """

    def __init__(self, *, dropout: float = 0.0, more_bytes: float | None = None, fails_once: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = torch.nn.Linear(NUM_FEATURES, WIDTH)
        self.dropout = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()
        self.head = torch.nn.Linear(WIDTH, 1)
        self.more_bytes, self.fails_once = more_bytes, fails_once
        self.attempts: list[tuple[int, int, int]] = []
        self.masks: list[torch.Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == STARVED and self.more_bytes is not None:
            limit_memory(self.more_bytes)

    def fail_once(self, where: str) -> None:
        if self.fails_once == where:
            self.fails_once = ""
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        points, values = batch
        assert points.device == DEVICE
        self.attempts.append((batch_idx, len(points), allocated_bytes()))
        hidden = self.dropout(torch.tanh(self.wide(points)))
        if batch_idx == STARVED:
            if len(points) == SMALL:
                self.masks.append(hidden.detach() == 0)
            self.fail_once("forward")
            hidden.register_hook(lambda _: self.fail_once("backward"))
        return F.mse_loss(self.head(hidden).squeeze(1).float(), values)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == STARVED:
            self.fail_once("update")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Validated(Regression):
    """The same without training."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.on_train_batch_start(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        points, values = batch
        loss = F.mse_loss(self.head(torch.tanh(self.wide(points))).squeeze(1), values)
        self.log("loss", loss, batch_size=len(points))


def fit(
    model: pl.LightningModule, num_samples: int, callbacks: Sequence[pl.Callback] = (), **settings: Any
) -> dict[str, Any]:
    trainer = make_trainer(accelerator=ACCELERATOR, devices=1, max_epochs=1, callbacks=list(callbacks), **settings)
    torch.manual_seed(1)  # on the device too
    trainer.fit(model, Batches(num_samples))
    unlimit_memory()
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {**state_of(trainer, model), "scaler": None if scaler is None else scaler.state_dict()}


def distance(ours: dict[str, Any], plain: dict[str, Any], start: pl.LightningModule) -> float:
    """Of the weights that two trainings end with, in parts of what the training changed."""
    first = start.state_dict()
    differences = [(ours["weights"][name] - weight).norm() for name, weight in plain["weights"].items()]
    changes = [(weight.cpu() - first[name]).norm() for name, weight in plain["weights"].items()]
    return float(torch.stack(differences).norm().cpu() / torch.stack(changes).norm())


# Forward and backward --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "activations"), [("forward", 1.25), ("backward", 2.5)])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_a_device_that_runs_out_of_memory_costs_a_retry_and_not_the_result(phase, activations, precision):
    half = 1 if precision == "32-true" else 2
    plain = fit(Regression(), LARGE, precision=precision)
    recovery = OOMRecovery()
    model = Regression(more_bytes=activations * ACTIVATION_BYTES / half)
    ours = fit(model, LARGE, [recovery], precision=precision)
    assert (recovery.events[0].step, recovery.events[0].phase) == (STARVED, phase)
    assert recovery.events[0].requested_bytes == pytest.approx(ACTIVATION_BYTES / half, rel=0.01)
    assert recovery.num_microbatches > 1
    assert ours["global_step"] == plain["global_step"] == NUM_BATCHES
    assert same_bits(ours["scaler"], plain["scaler"])
    assert distance(ours, plain, Regression()) < (ROUNDING if half == 1 else HALF_ROUNDING)


def test_the_same_limit_ends_a_training_without_the_callback():
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fit(Regression(more_bytes=1.25 * ACTIVATION_BYTES), LARGE)


@pytest.mark.parametrize("activations", [1.25, 2.5])
def test_no_tensor_of_a_failed_attempt_is_left_when_the_next_begins(activations):
    model = Regression(more_bytes=activations * ACTIVATION_BYTES)
    fit(model, LARGE, [OOMRecovery()])
    first, again = [num_bytes for batch, rows, num_bytes in model.attempts if (batch, rows) == (STARVED, LARGE)]
    # Less by the gradients of the batch before, if it failed after they were let go of.
    assert again <= first
    pieces = [num_bytes for batch, rows, num_bytes in model.attempts if batch == STARVED and rows < LARGE]
    assert max(pieces) < first + ACTIVATION_BYTES / 4


def test_a_model_takes_no_more_device_memory_after_a_recovery_than_before():
    before = allocated_bytes()
    fit(Regression(more_bytes=1.25 * ACTIVATION_BYTES), LARGE, [OOMRecovery()])
    gc.collect()
    # Workspaces of cuBLAS stay, whatever has run.
    assert allocated_bytes() - before < ACTIVATION_BYTES / 2


def test_validation_recovers_with_the_same_mean():
    losses = []
    for more_bytes in (None, 1.25 * ACTIVATION_BYTES):
        recovery = OOMRecovery()
        trainer = make_trainer(accelerator=ACCELERATOR, devices=1, callbacks=[recovery])
        [found] = trainer.validate(Validated(more_bytes=more_bytes), Batches(LARGE), verbose=False)
        unlimit_memory()
        losses.append(found["loss"])
        assert [event.stage for event in recovery.events][:1] == ([] if more_bytes is None else ["validate"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # float32 sums in another order


# Errors by hand: the same batch again, bit for bit ----------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_a_batch_done_again_whole_leaves_the_same_bits_with_dropout_on_the_device(where, precision):
    # "update" comes after gradients were unscaled and before they are clipped.
    settings = {"precision": precision, "gradient_clip_val": 0.5}
    plain_model, model = Regression(dropout=0.5), Regression(dropout=0.5, fails_once=where)
    plain = fit(plain_model, SMALL, **settings)
    recovery = OOMRecovery()
    ours = fit(model, SMALL, [recovery], **settings)
    assert [event.num_retries for event in recovery.events] == [1]
    assert len(model.masks) == 2
    assert all(torch.equal(mask, plain_model.masks[0]) for mask in model.masks)
    assert same_bits(ours, plain)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_earlier_batches_of_a_window_come_back_bit_for_bit(where):
    # Six batches in windows of 4: the starved one is the last of the first window.
    plain = fit(Regression(), SMALL, accumulate_grad_batches=4)
    recovery = OOMRecovery()
    ours = fit(Regression(fails_once=where), SMALL, [recovery], accumulate_grad_batches=4)
    assert [event.phase for event in recovery.events] == [where]
    assert same_bits(ours, plain)


# The optimizer step ----------------------------------------------------------------------------------------


class Weighty(pl.LightningModule):
    """Eight weights of 64 MiB; Adam updates all at once, with temporary tensors of 512 MiB."""

    NUM_LAYERS, SIZE = 8, 4096

    def __init__(self, *, starved_step: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            *[torch.nn.Linear(self.SIZE, self.SIZE, bias=False) for _ in range(self.NUM_LAYERS)]
        )
        self.starved_step = starved_step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        points, values = batch
        outputs = self.layers(points.repeat(1, self.SIZE // NUM_FEATURES))
        return 1e4 * F.mse_loss(outputs.mean(1), values)  # gradients far above the epsilon of Adam

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == self.starved_step:
            weight_bytes = 4 * self.SIZE**2
            state_bytes = 0 if optimizer.state else 2 * self.NUM_LAYERS * weight_bytes
            limit_memory(state_bytes + 5 * weight_bytes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


@pytest.mark.parametrize("starved_step", [0, 2])
def test_an_update_that_does_not_fit_is_done_in_less_memory_and_once(starved_step):
    plain = fit(Weighty(), 8)
    ours = fit(Weighty(starved_step=starved_step), 8, [OOMRecovery()])
    assert ours["global_step"] == plain["global_step"] == NUM_BATCHES
    [mine], [theirs] = ours["optimizers"], plain["optimizers"]
    for number, state in theirs["state"].items():
        assert mine["state"][number]["step"] == state["step"] == NUM_BATCHES
        # One that is left out or applied twice changes it by a tenth and more.
        moment = state["exp_avg"]
        assert (mine["state"][number]["exp_avg"] - moment).norm() < ADAM_ROUNDING * moment.norm()
    assert distance(ours, plain, Weighty()) < ADAM_ROUNDING


def test_the_same_update_ends_a_training_without_the_callback():
    with pytest.raises(torch.OutOfMemoryError):
        fit(Weighty(starved_step=2), 8)


# While memory suffices -------------------------------------------------------------------------------------


class CountWaits(pl.Callback):
    """Counts how often the host waits for the device, from the second window of a training on."""

    def __init__(self) -> None:
        self.caught: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.catching = warnings.catch_warnings(record=True)
            self.caught = self.catching.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.catching.__exit__(None, None, None)

    @property
    def num_waits(self) -> int:
        return sum("called a synchronizing" in str(warning.message) for warning in self.caught)


@pytest.mark.parametrize("make_module", [Regression, lambda: Regression(dropout=0.5)], ids=["plain", "dropout"])
def test_a_training_that_fits_waits_for_the_device_no_more_often(make_module: Callable[[], Regression]):
    counts, states = [], []
    for callbacks in ([], [OOMRecovery()]):
        waits = CountWaits()
        trainer = make_trainer(
            accelerator=ACCELERATOR,
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=2,
            callbacks=[*callbacks, waits],
        )
        torch.manual_seed(1)
        trainer.fit(model := make_module(), Batches(SMALL, is_pinned=True))
        counts.append(waits.num_waits)
        states.append(state_of(trainer, model))
    assert counts[1] == counts[0]
    assert same_bits(*states)
