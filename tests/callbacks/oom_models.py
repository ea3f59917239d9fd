"""A module with everything that has to survive a retry, errors where one wants them, and exact comparison of two runs.

Used by the tests of `OOMRecovery`, also in scripts run as real ranks. The shortest use::

    plain = fit()
    ours = fit([Fault("backward", batch=2, passes={0, 1})], OOMRecovery(split_check="skip"))
    assert differences(ours, plain, rtol=2e-6) == []

Passes of a batch through `training_step` are counted from 0, those of the check of a first split too: with faults in
passes 0 and 1 a batch fails whole twice; then come 3 passes of the check (a microbatch, its halves), unless skipped;
then the microbatches.
"""

from __future__ import annotations

import copy
import random
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from tests.datamodules.models import MemoryLogger, make_trainer
from tests.doubles import KeptDict, KeptList

NUM_FEATURES, NUM_CLASSES = 6, 4
NUM_SAMPLES, BATCH_SIZE = 30, 8
"""Four batches an epoch: 8, 8, 8 and 6."""

ROUNDING = 5e-6
"""Relative, for a batch in microbatches: float32 sums in another order, through a few steps of an optimizer."""


def out_of_memory() -> torch.OutOfMemoryError:
    """What CUDA raises."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")


# Where it fails ----------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """One batch that fails in one phase.

    Attributes:
        phase: "forward", "backward" (in its middle, gradients of the last layer are there), "after_backward",
            "before_zero_grad" and "before_optimizer_step" (the hooks), "clip" (after gradients were clipped),
            "validation", "test", "predict"; these three in the middle of the step, when metrics are
            updated and values logged.
        batch: Number in the epoch.
        epoch: Of the training.
        passes: Which passes of this batch through the phase fail.
        fits: In place of `passes`: all fail that have more samples.
        error: Makes what is raised.
    """

    phase: str
    batch: int
    epoch: int = 0
    passes: Iterable[int] = (0,)
    fits: int | None = None
    error: Callable[[], BaseException] = out_of_memory
    num_passes: int = field(default=0, init=False)
    num_raised: int = field(default=0, init=False)

    def fails(self, num_samples: int) -> bool:
        """Count a pass and tell whether it fails."""
        number, self.num_passes = self.num_passes, self.num_passes + 1
        return num_samples > self.fits if self.fits is not None else number in set(self.passes)

    def throw(self) -> None:
        """Fail."""
        self.num_raised += 1
        raise self.error()


SCRATCH = tempfile.TemporaryDirectory()
"""Where files go that no test asks for; gone at the end."""


class Token:
    """Lives as long as the node of a graph that it was put into."""


# The module --------------------------------------------------------------------------------------------------


class Everything(pl.LightningModule):
    """A small classifier that logs in every way, keeps every kind of metric, and writes down what happens to it.

    Attributes:
        passes: (epoch, number of the batch, samples) of each pass through `training_step`.
        hooks: (name of the hook, epoch, number of the batch, sum of all gradients) of each hook that is to be called
            once per batch or step.
        sizes_seen: Samples of each pass through an evaluation step, by stage.
        alive_before: For each pass, which of the earlier passes had a living graph or activation when it began.
        drawn: What each pass has drawn from python, numpy and torch.
    """

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        batchnorm: bool = False,
        dropout: bool = False,
        draws: bool = False,
        reduction: str = "mean",
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        log_everything: bool = True,
    ) -> None:
        """Make the same weights every time.

        Args:
            faults: Where it fails.
            batchnorm: With batch normalisation.
            dropout: With dropout.
            draws: Every pass draws from python, numpy and torch, and its loss depends on what was drawn.
            reduction: Of the loss: "mean" or "sum".
            optimizer: Parameters -> optimizer; Adam.
            scheduler: Optimizer -> scheduler that is moved by steps; none.
            log_everything: Log and measure; False: the loss only.
        """
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.first = nn.Linear(NUM_FEATURES, 16)
            self.norm = nn.BatchNorm1d(16) if batchnorm else nn.Identity()
            self.drop = nn.Dropout(0.5) if dropout else nn.Identity()
            self.last = nn.Linear(16, NUM_CLASSES)
        self.register_buffer("constant", torch.ones(3))
        self.faults, self.draws, self.reduction = list(faults), draws, reduction
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.log_everything = log_everything
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.mean_loss = MeanMetric()
        self.updated = MulticlassAccuracy(NUM_CLASSES)
        self.values = CatMetric()
        self.grouped = MetricCollection(
            [MulticlassPrecision(NUM_CLASSES), MulticlassF1Score(NUM_CLASSES)], prefix="grouped_"
        )
        self.hidden = [MeanMetric()]  # not a part of the module
        self.eval_accuracy = MulticlassAccuracy(NUM_CLASSES)
        self.eval_mean = MeanMetric()
        self.eval_values = CatMetric()
        self.passes: list[tuple[int, int, int]] = KeptList()
        self.hooks: list[tuple[str, int, int, float]] = KeptList()
        self.sizes_seen: dict[str, list[int]] = KeptDict()
        self.alive_before: list[list[int]] = KeptList()
        self.drawn: list[tuple[float, float, float]] = KeptList()
        self.watched: list[tuple[int, weakref.ref[Any]]] = KeptList()
        self.now: tuple[int, int, int] = (0, 0, 0)

    # Failing

    def fault(self, phase: str) -> Fault | None:
        """The fault that is due now; counts the pass for all of this phase and batch."""
        epoch, batch, num_samples = self.now
        same = [f for f in self.faults if (f.phase, f.epoch, f.batch) == (phase, epoch, batch)]
        due = [f for f in same if f.fails(num_samples)]
        return due[0] if due else None

    def maybe_fail(self, phase: str) -> None:
        """Raise, if it is due."""
        fault = self.fault(phase)
        if fault is not None:
            fault.throw()

    def watch(self, *tensors: torch.Tensor) -> None:
        """Watch activations, and the nodes they come from."""
        for tensor in tensors:
            self.watched.append((len(self.passes) - 1, weakref.ref(tensor)))
            if tensor.grad_fn is not None:
                token = Token()
                tensor.grad_fn.metadata["token"] = token
                self.watched.append((len(self.passes) - 1, weakref.ref(token)))

    # The step

    def hidden_layer(self, inputs: torch.Tensor) -> torch.Tensor:
        """Up to the last layer."""
        return torch.tanh(self.norm(self.first(inputs)))

    def loss_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        return F.cross_entropy(logits, labels, reduction=self.reduction)

    def unpack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and labels of a batch; for subclasses with others."""
        return batch[0], batch[1]

    def output_of(self, loss: torch.Tensor, logits: torch.Tensor) -> Any:
        """What `training_step` returns."""
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Measure and log everything; fail where it is due."""
        self.alive_before.append(sorted({number for number, ref in self.watched if ref() is not None}))
        inputs, labels = self.unpack(batch)
        self.now = (self.current_epoch, batch_idx, len(inputs))
        self.passes.append(self.now)
        hidden = self.hidden_layer(inputs)
        logits = self.last(self.drop(hidden))
        loss = self.loss_of(logits, labels)
        if self.draws:
            drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
            self.drawn.append(drawn)
            loss = loss * (1 + sum(drawn))
        if self.log_everything:
            self.measure(logits, labels, loss)
        else:
            self.log("loss", loss)
        self.watch(hidden, logits, loss)
        self.maybe_fail("forward")
        fault = self.fault("backward")
        if fault is not None:
            place = hidden if hidden.requires_grad else logits
            place.register_hook(lambda gradient: fault.throw())
        return self.output_of(loss, logits)

    def measure(self, logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> None:
        """Every way of `log`, every kind of metric."""
        predicted = logits.detach().argmax(1)
        with torch.no_grad():
            hits = (predicted == labels).sum().float()
            largest, smallest = logits.max(), logits.min()
        for name, on_step, on_epoch in (("step", True, False), ("epoch", False, True), ("both", True, True)):
            self.log(f"loss_{name}_", loss, on_step=on_step, on_epoch=on_epoch, prog_bar=on_step)
            self.log(f"hits_{name}_", hits, reduce_fx="sum", on_step=on_step, on_epoch=on_epoch)
            self.log(f"largest_{name}_", largest, reduce_fx="max", on_step=on_step, on_epoch=on_epoch)
            self.log(f"smallest_{name}_", smallest, reduce_fx="min", on_step=on_step, on_epoch=on_epoch)
            self.log(f"sized_{name}_", loss, on_step=on_step, on_epoch=on_epoch, batch_size=len(labels))
        self.log("defaults", loss)
        self.log("by_function", hits, reduce_fx=torch.sum, on_epoch=True)
        self.log("number", 3, on_epoch=True)
        self.log("float", 0.25, prog_bar=True, logger=False, on_epoch=True)
        self.log_dict({"of_dict": loss, "rate": self.optimizers().param_groups[0]["lr"]}, on_epoch=True, on_step=True)
        # What is no mean over samples although it is reduced as one, and the other way round.
        self.log("summed_loss", loss, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest_loss", loss, reduce_fx="max", on_step=True, on_epoch=True)
        self.log("mean_hits", hits, on_step=True, on_epoch=True)
        self.log("mean_largest", largest, on_step=True, on_epoch=True)
        self.accuracy(predicted, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean_loss(loss)
        self.log("mean_loss", self.mean_loss, on_step=True, on_epoch=True)
        self.updated.update(predicted, labels)
        self.log("updated", self.updated)
        self.values.update(loss.detach())
        self.grouped(predicted, labels)
        self.log_dict(self.grouped, on_epoch=True, on_step=False)
        self.hidden[0](logits.detach().abs().mean(), weight=len(labels))
        self.log("hidden", self.hidden[0], metric_attribute="hidden", on_step=False, on_epoch=True)

    # Hooks, all of them to be called once per batch, or per step

    def gradient_sum(self) -> float:
        """One number that depends on all gradients."""
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        return float(sum(gradient.double().abs().sum() for gradient in gradients)) if gradients else 0.0

    def note_hook(self, name: str) -> None:
        """Write it down."""
        self.hooks.append((name, *self.now[:2], self.gradient_sum()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Write it down."""
        self.hooks.append(("on_before_zero_grad", *self.now[:2], 0.0))
        self.maybe_fail("before_zero_grad")

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Write it down."""
        self.note_hook("on_before_backward")

    def on_after_backward(self) -> None:
        """Write it down; log the norm of the gradients, as many do."""
        self.note_hook("on_after_backward")
        if self.log_everything:
            self.log("norm_after_backward", self.gradient_sum(), on_step=True, on_epoch=True)
        self.maybe_fail("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Write it down; log the norm of the gradients."""
        self.note_hook("on_before_optimizer_step")
        if self.log_everything:
            self.log("norm_before_step", self.gradient_sum())
        self.maybe_fail("before_optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """As ever, and then fail, if it is due."""
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.maybe_fail("clip")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write it down."""
        self.note_hook("on_train_batch_end")
        if self.log_everything:
            self.log("at_batch_end", float(batch_idx), on_step=True, on_epoch=True, reduce_fx="max")

    def on_train_epoch_end(self) -> None:
        """Log what was gathered by hand."""
        if self.log_everything:
            values = self.values.compute()
            self.log("num_values", float(values.numel()))
            self.log("values", values.double().mean().float())
            self.values.reset()

    # Evaluation

    def evaluate(self, stage: str, batch: Any, batch_idx: int) -> torch.Tensor:
        """Measure and log; fail where it is due."""
        inputs, labels = self.unpack(batch)
        self.sizes_seen.setdefault(stage, []).append(len(inputs))
        self.now = (self.current_epoch, batch_idx, len(inputs))
        logits = self.last(self.drop(self.hidden_layer(inputs)))
        loss = self.loss_of(logits, labels)
        predicted = logits.argmax(1)
        self.log("eval_loss", loss)
        self.log("eval_loss_step", loss, on_step=True, on_epoch=True)
        self.log("eval_hits", (predicted == labels).sum().float(), reduce_fx="sum")
        self.log("eval_largest", logits.max(), reduce_fx="max")
        self.eval_accuracy(predicted, labels)
        self.log("eval_accuracy", self.eval_accuracy)
        self.eval_mean(loss)
        self.log("eval_mean", self.eval_mean)
        self.eval_values.update(logits.amax(1))
        self.maybe_fail(stage)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate."""
        return self.evaluate("validation", batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Log what was gathered by hand."""
        values = self.eval_values.compute()
        self.log("eval_num_values", float(values.numel()))
        self.log("eval_values", values.double().mean().float())
        self.eval_values.reset()

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate."""
        return self.evaluate("test", batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The logits."""
        inputs, _ = self.unpack(batch)
        self.sizes_seen.setdefault("predict", []).append(len(inputs))
        self.now = (0, batch_idx, len(inputs))
        logits = self.last(self.drop(self.hidden_layer(inputs)))
        self.maybe_fail("predict")
        return logits

    # How it is trained

    def configure_optimizers(self) -> Any:
        """Adam, unless told otherwise."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        make = self.make_optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
        optimizer = make(parameters)
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# Running -----------------------------------------------------------------------------------------------------


def samples(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    """The same samples every time."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator))


def loader(num_samples: int = NUM_SAMPLES, batch_size: int = BATCH_SIZE, **settings: Any) -> DataLoader[Any]:
    """Batches of 8, 8, 8 and 6."""
    return DataLoader(samples(num_samples), batch_size=batch_size, **settings)


class Witness(pl.Callback):
    """Writes down what others can see after each batch; give it to the Trainer last."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self.batches: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """All of it, copied."""
        automatic = trainer.fit_loop.epoch_loop.automatic_optimization
        seen = {
            "batch_idx": batch_idx,
            "global_step": trainer.global_step,
            "outputs": outputs,
            "batch": batch,
            "weights": dict(pl_module.state_dict()),
            "gradients": [parameter.grad for parameter in pl_module.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callback_metrics": dict(trainer.callback_metrics),
            "progress_bar": {k: v for k, v in trainer.progress_bar_metrics.items() if k != "v_num"},
            "logged": without_ours(trainer.logged_metrics),
            "optim_progress": automatic.optim_progress.state_dict(),
            "loops": trainer.fit_loop.state_dict(),
            "metrics": [metric_state(part) for part in [*pl_module.modules(), *getattr(pl_module, "hidden", [])]],
            "is_half_done": (pl_module._current_fx_name, trainer.fit_loop.epoch_loop._results._batch_size)
            if hasattr(trainer.fit_loop.epoch_loop._results, "_batch_size")
            else pl_module._current_fx_name,
        }
        self.batches.append(copy.deepcopy(detached(seen)))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Values of the epoch."""
        self.epochs.append(copy.deepcopy(dict(trainer.callback_metrics)))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Values of the validation, and when it was."""
        self.validations.append(
            copy.deepcopy({"global_step": trainer.global_step, "metrics": dict(trainer.callback_metrics)})
        )


def metric_state(part: Any) -> Any:
    """What a metric has gathered; None for other modules."""
    if not hasattr(part, "_defaults"):
        return None
    return {name: getattr(part, name) for name in part._defaults} | {"_update_count": part._update_count}


def detached(nest: Any) -> Any:
    """Without graphs."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, nest)


def without_ours(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was logged, but for what this package adds."""
    return {name: value for name, value in values.items() if not name.startswith("gpufeed/")}


@dataclass
class Run:
    """A training that ended.

    Attributes:
        model: The module.
        trainer: The Trainer.
        witness: What was seen after each batch.
        logger: What was logged.
        random_after: What python, numpy and torch give after the training.
    """

    model: Any
    trainer: Any
    witness: Witness
    logger: MemoryLogger
    random_after: tuple[float, float, float]

    @property
    def seen(self) -> dict[str, Any]:
        """All that has to be as in plain Lightning."""
        trainer = self.trainer
        return {
            "batches": self.witness.batches,
            "epochs": self.witness.epochs,
            "validations": self.witness.validations,
            "logged": [row for step, values in self.logger.logged if (row := (step, without_ours(values)))[1]],
            "weights": dict(self.model.state_dict()),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "counters": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.state_dict()),
            "metrics": dict(trainer.callback_metrics),
            "hooks": self.hooks,
        }

    @property
    def hooks(self) -> list[tuple[str, int, int, float]]:
        """Hooks of the module as they were called for the last attempt of each batch: a failed one called them too."""
        last = {hook[:3]: number for number, hook in enumerate(self.model.hooks)}
        return [self.model.hooks[number] for number in sorted(last.values())]

    def events_of(self, recovery: Any) -> list[tuple[Any, ...]]:
        """(stage, step, phase, retries, microbatches) of each event."""
        return [(e.stage, e.step, e.phase, e.num_retries, e.num_microbatches) for e in recovery.events]


def fit(
    faults: Sequence[Fault] = (),
    recovery: pl.Callback | None = None,
    *,
    model: Any = None,
    train: Any = None,
    val: Any = None,
    callbacks: Sequence[pl.Callback] = (),
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Train from the same start.

    Args:
        faults: Of the module.
        recovery: `OOMRecovery`, or None for plain Lightning.
        model: In place of `Everything(faults, **options)`.
        train: In place of `loader()`.
        val: Loader of the validation; none.
        callbacks: After it.
        options: Of `Everything`.
        settings: Of the Trainer; two epochs.

    Returns:
        The run.
    """
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = Everything(faults, **(options or {})) if model is None else model
    witness, logger = Witness(), MemoryLogger()
    ours = [] if recovery is None else [recovery]
    settings = {"max_epochs": 2, "logger": logger, **settings}
    settings.setdefault("default_root_dir", SCRATCH.name)  # emergency checkpoints
    trainer = make_trainer(callbacks=[*ours, *callbacks, witness], **settings)
    trainer.fit(model, loader() if train is None else train, val)
    return Run(model, trainer, witness, logger, (random.random(), float(np.random.rand()), float(torch.rand(()))))


# Comparing ---------------------------------------------------------------------------------------------------


def differences(
    ours: Run | Any, plain: Run | Any, *, rtol: float = 0.0, atol: float = 0.0, ignore: Sequence[str] = ()
) -> list[str]:
    """Paths and values of all that differs.

    Args:
        ours: A run, or any nest.
        plain: The other one.
        rtol: For floating point numbers, of the largest number of a tensor; 0: to the last bit.
        atol: The same, absolute; only beside `rtol`.
        ignore: Paths with one of these words in it are not looked at.

    Returns:
        Empty, if all is equal.
    """
    ours = ours.seen if isinstance(ours, Run) else ours
    plain = plain.seen if isinstance(plain, Run) else plain
    found = list(_differences(ours, plain, "", rtol, atol))
    return [text for text in found if not any(word in text.split(": ")[0] for word in ignore)]


def _differences(one: Any, other: Any, path: str, rtol: float, atol: float) -> Iterable[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if list(one) != list(other):
            yield f"{path}: keys {sorted(set(one) ^ set(other), key=str)} or their order"
        for key in one:
            if key in other:
                yield from _differences(one[key], other[key], f"{path}/{key}", rtol, atol)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{path}: {len(one)} entries, expected {len(other)}"
        for number, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from _differences(a, b, f"{path}/{number}", rtol, atol)
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"{path}: {one.dtype} {tuple(one.shape)}, expected {other.dtype} {tuple(other.shape)}"
        elif not _are_equal(one, other) and not _are_close(one, other, rtol, atol):
            yield f"{path}: {one.flatten()[:4].tolist()}, expected {other.flatten()[:4].tolist()}"
    elif isinstance(one, float) and isinstance(other, float):
        is_close = one == other or (one != one and other != other)
        if not is_close and not (rtol and abs(one - other) <= max(atol, rtol * max(abs(one), abs(other)))):
            yield f"{path}: {one!r}, expected {other!r}"
    elif type(one) is not type(other) or (one != other and one is not other):
        yield f"{path}: {one!r}, expected {other!r}"


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the last bit; numbers that are none are equal where both have them."""
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _are_close(one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float) -> bool:
    if not rtol or not one.is_floating_point():
        return False
    one, other = one.double(), other.double()
    largest = max(float(one.abs().max()), float(other.abs().max()))
    return float((one - other).abs().max()) <= max(atol, rtol * largest)
