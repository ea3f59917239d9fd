"""A batch that ran out of memory is done again, and nobody can tell from the training: injected errors, one process.

Each training is compared with plain Lightning in the same settings: weights, gradients, optimizer, schedules, counters,
every logged value and every metric after every batch, hooks, and what the random generators give in the end.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from lightning_gpufeed import BatchEcho
from lightning_gpufeed.callbacks.oom_recovery import OOMRecovery
from lightning_gpufeed.errors import OOMRecoveryError
from tests.callbacks.oom_models import (
    ROUNDING,
    Everything,
    Fault,
    Run,
    differences,
    fit,
    loader,
    out_of_memory,
    without_ours,
)
from tests.datamodules.models import every_checkpoint
from tests.doubles import KeptList

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning",
    # LBFGS and GradScaler: about the order of scheduler and optimizer, in plain Lightning too.
    "ignore:Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`:UserWarning",
)


# Modules with something special in them ------------------------------------------------------------------------


class Special(Everything):
    """A frozen layer, two with one weight, one with weight norm, one that is never used; returns more than the loss."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.first.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(8)
            self.middle, self.again, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(2, 2)
            self.again.weight = self.middle.weight
            parametrizations.weight_norm(self.last)

    def hidden_layer(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.again(torch.tanh(self.middle(super().hidden_layer(inputs))))

    def output_of(self, loss: torch.Tensor, logits: torch.Tensor) -> Any:
        extra = {"logits": logits.detach(), "number": 11, "name": "a", "nested": {"rows": logits.detach()[:, 0]}}
        return {"loss": loss, "mean": logits.detach().mean(), "nothing": None, **extra}


class Checkpointed(Everything):
    """Computes the hidden layer twice, with the same dropout; a spectral norm's buffers move in every forward pass."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        with torch.random.fork_rng():
            torch.manual_seed(8)
            parametrizations.spectral_norm(self.last)

    def hidden_layer(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.drop(super(Checkpointed, self).hidden_layer(x)), inputs, use_reentrant=False)


def cpu_scaler() -> dict[str, Any]:
    """Half precision with a GradScaler, without a GPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]}


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups with rates and decay of their own."""
    first = {"params": parameters[:2], "weight_decay": 0.1}
    return torch.optim.AdamW([first, {"params": parameters[2:], "lr": 1e-3}], lr=1e-2)


@dataclass(frozen=True)
class Setting:
    """How a model is trained; the same with and without recovery."""

    options: dict[str, Any]
    trainer: Callable[[], dict[str, Any]] = dict
    model: type[Everything] = Everything
    has_validation: bool = False

    def fit(self, faults: list[Fault] | None = None, recovery: OOMRecovery | None = None) -> Run:
        """Train."""
        val = loader(10) if self.has_validation else None
        return fit(recovery=recovery, model=self.model(faults or [], **self.options), val=val, **self.trainer())


LITTLE = {"log_everything": False}
SETTINGS = {
    "dropout": Setting({"batchnorm": True, "dropout": True, "draws": True}),
    "dropout, accumulate 3, clip by norm": Setting(
        {"batchnorm": True, "dropout": True, "draws": True},
        lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    ),
    "two groups, cosine, clip by value, validated within an epoch": Setting(
        {"optimizer": two_groups, "scheduler": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8)},
        lambda: {
            "val_check_interval": 2,
            "log_every_n_steps": 3,
            "gradient_clip_val": 0.01,
            "gradient_clip_algorithm": "value",
        },
        has_validation=True,
    ),
    "momentum, one cycle, max_steps, many outputs": Setting(
        {
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
            "scheduler": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=7),
            **LITTLE,
        },
        lambda: {"max_steps": 7, "limit_train_batches": 4},
        Special,
    ),
    "frozen, accumulate 2, clip by norm": Setting(
        LITTLE, lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, Special
    ),
    "lbfgs": Setting({"optimizer": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3), **LITTLE}),
    "scaler": Setting(LITTLE, lambda: {**cpu_scaler(), "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "bf16-mixed": Setting(LITTLE, lambda: {"precision": "bf16-mixed"}),
    "checkpointed": Setting({"dropout": True, **LITTLE}, model=Checkpointed),
}
# The others cannot be put together to the last digit (see the docstring of OOMRecovery), or make rounding grow.
SPLIT_EXACTLY = [name for name in SETTINGS if name.startswith(("two", "momentum", "frozen"))]


def everywhere() -> list[Fault]:
    """One failure in each batch of two epochs, in another place each; those of attempts with a clean batch between."""
    places = [
        "forward",
        "clip",
        "backward",
        "before_optimizer_step",
        "after_backward",
        "clip",
        "before_zero_grad",
        "clip",
    ]
    return [Fault(place, number % 4, number // 4) for number, place in enumerate(places)]


@pytest.fixture(scope="module")
def plain() -> Callable[[str], Run]:
    """Plain Lightning, each setting once."""
    runs: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in runs:
            runs[name] = SETTINGS[name].fit()
        return runs[name]

    return run


# The same size -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_changes_when_nothing_fails(name, plain):
    recovery = OOMRecovery()
    ours = SETTINGS[name].fit(recovery=recovery)
    assert differences(ours, plain(name)) == []
    assert ours.random_after == plain(name).random_after
    assert ours.model.passes == plain(name).model.passes
    assert ours.model.hooks == plain(name).model.hooks
    assert recovery.events == []


@pytest.mark.parametrize("name", SETTINGS)
def test_a_batch_that_fits_at_the_second_try_leaves_no_trace(name, plain):
    faults, recovery = everywhere(), OOMRecovery()
    ours = SETTINGS[name].fit(faults, recovery)
    assert differences(ours, plain(name)) == []
    assert ours.random_after == plain(name).random_after
    # All have failed that came up: with accumulated gradients not every batch has a step.
    assert [fault.num_raised for fault in faults if fault.phase in ("forward", "backward")] == [1, 1]
    assert len(recovery.events) == sum(fault.num_raised for fault in faults) >= 4
    assert len(ours.model.passes) == len(plain(name).model.passes) + len(recovery.events)
    assert {event.num_microbatches for event in recovery.events} == {1}


def test_dropout_and_everything_drawn_are_the_same_at_the_second_try():
    recovery = OOMRecovery()
    fault = Fault("backward", 1, error=out_of_memory)
    ours = fit([fault], recovery, options={"dropout": True, "draws": True}, max_epochs=1)
    assert [batch for _, batch, _ in ours.model.passes] == [0, 1, 1, 2, 3]
    assert ours.model.drawn[1] == ours.model.drawn[2]
    assert len(set(ours.model.drawn)) == 4


# In microbatches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPLIT_EXACTLY)
def test_a_batch_in_microbatches_is_the_batch_up_to_rounding(name, plain):
    # Whole twice, then the check (three passes), then one in backward of the first microbatch: four in the end.
    faults = [Fault("backward", 1, passes={0, 1, 5}), Fault("forward", 3, fits=1), Fault("forward", 2, 1, passes={0})]
    recovery = OOMRecovery()
    ours = SETTINGS[name].fit(faults, recovery)
    # A count that is reduced as a mean: what it stands for cannot be told from a microbatch that has none.
    found = differences(ours, plain(name), rtol=ROUNDING, atol=1e-6, ignore=["mean_hits"])
    assert found == []
    assert [event.num_microbatches for event in recovery.events][:2] == [4, 6]
    assert ours.trainer.global_step == plain(name).trainer.global_step


@pytest.mark.parametrize("name", ["scaler", "bf16-mixed", "checkpointed", "lbfgs"])
def test_training_goes_on_in_microbatches_where_they_are_not_the_same_to_the_last_digit(name, plain):
    faults = [Fault("forward", 1, passes={0, 1}), Fault("backward", 3, passes={0})]
    recovery = OOMRecovery()
    ours = SETTINGS[name].fit(faults, recovery)
    weights = ours.model.state_dict()
    # Half precision has 8 or 11 bits, dropout other masks, spectral norm one more iteration per microbatch.
    tolerance = {"checkpointed": 0.5, "lbfgs": 1e-4}.get(name, 3e-2)
    assert differences(dict(weights), dict(plain(name).model.state_dict()), rtol=tolerance, ignore=["running"]) == []
    counters = [(row["global_step"], row["rates"], row["loops"]) for row in ours.witness.batches]
    assert counters == [(row["global_step"], row["rates"], row["loops"]) for row in plain(name).witness.batches]
    assert [event.num_microbatches for event in recovery.events] == [2, 2]


def test_microbatches_from_the_start_are_those_found_by_failing():
    settings = {"options": {"dropout": True, "batchnorm": True, **LITTLE}, "accumulate_grad_batches": 2}
    start = fit([], OOMRecovery(num_microbatches=2, split_check="skip", grow_after=None), **settings)
    fault = Fault("backward", 0, passes={0, 1})
    found = fit([fault], OOMRecovery(split_check="skip", grow_after=None), **settings)
    assert fault.num_raised == 2
    assert differences(found, start) == []
    assert found.random_after == start.random_after


def test_batchnorm_counts_a_split_batch_once_and_its_statistics_are_those_of_the_batch():
    plain = fit(options={"batchnorm": True}, max_epochs=1, limit_train_batches=1)
    fault = Fault("backward", 0, passes={0, 1})
    ours = fit([fault], OOMRecovery(), options={"batchnorm": True}, max_epochs=1, limit_train_batches=1)
    # The first layer is before it, so the statistics of the first batch are the same.
    assert differences(dict(ours.model.norm.named_buffers()), dict(plain.model.norm.named_buffers()), rtol=1e-6) == []
    assert int(ours.model.norm.num_batches_tracked) == 1
    fault = Fault("backward", 0, passes={0, 1})
    as_it_comes = OOMRecovery(correct_batchnorm=False)
    ours = fit([fault], as_it_comes, options={"batchnorm": True}, max_epochs=1, limit_train_batches=1)
    assert int(ours.model.norm.num_batches_tracked) == 2


def test_hooks_of_a_split_batch_are_called_once():
    fault = Fault("forward", 1, fits=2)
    ours = fit([fault], OOMRecovery(grow_after=None, split_check="skip"), max_epochs=1, options=LITTLE)
    names = [name for name, _, batch, _ in ours.model.hooks if batch == 1]
    assert names == [
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
    ]
    assert max(size for _, batch, size in ours.model.passes if batch > 1) == 2


MANY = "momentum, one cycle, max_steps, many outputs"


def test_outputs_of_a_split_batch_reach_on_train_batch_end_as_those_of_the_batch(plain):
    ours = SETTINGS[MANY].fit([Fault("forward", 1, passes={0, 1})], OOMRecovery())
    for got, expected in zip(ours.witness.batches, plain(MANY).witness.batches, strict=True):
        assert list(got["outputs"]) == list(expected["outputs"])
        assert differences(got["outputs"], expected["outputs"], rtol=ROUNDING) == []
    assert len(ours.witness.batches[1]["outputs"]["logits"]) == 8


# Modules that step in their own way ------------------------------------------------------------------------------


class Calling(Everything):
    """Calls the closure before the optimizer."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class Warming(Everything):
    """Changes the rate after each step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.trainer.global_step)


class Skipping(Everything):
    """Steps on every other batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Silent(Everything):
    """Gives no loss for one of the batches."""

    def output_of(self, loss: torch.Tensor, logits: torch.Tensor) -> Any:
        return None if self.now[1] == 1 else loss


RETURNED_NOTHING = "ignore:`training_step` returned `None`:UserWarning"


@pytest.mark.filterwarnings(RETURNED_NOTHING)
@pytest.mark.parametrize("model", [Calling, Warming, Skipping, Silent])
def test_an_optimizer_step_of_the_module_is_done_again(model):
    plain = fit(model=model(**LITTLE), max_epochs=1)
    faults = [Fault("forward", 0), Fault("clip", 1), Fault("backward", 2), Fault("clip", 3)]
    ours = fit(recovery=OOMRecovery(), model=model(faults, **LITTLE), max_epochs=1)
    assert differences(ours, plain) == []
    assert sum(fault.num_raised for fault in faults) == 4


@pytest.mark.filterwarnings(RETURNED_NOTHING)
def test_a_batch_without_a_loss_can_be_split():
    plain = fit(model=Silent(**LITTLE), max_epochs=1)
    fault = Fault("forward", 1, passes={0, 1})
    ours = fit(recovery=OOMRecovery(), model=Silent([fault], **LITTLE), max_epochs=1)
    assert differences(ours, plain, rtol=ROUNDING) == []
    assert fault.num_raised == 2


def test_microbatches_that_fail_between_backward_and_update_are_done_again_as_they_were():
    options = {"dropout": True, "batchnorm": True, "draws": True, **LITTLE}

    def run(faults: list[Fault]) -> Run:
        return fit(faults, OOMRecovery(num_microbatches=2, split_check="skip"), options=options)

    start = run([])
    again = run([Fault("clip", 1), Fault("after_backward", 0, 1), Fault("backward", 2, 1, passes={1})])
    assert len(again.model.passes) == len(start.model.passes) + 2 + 2 + 2
    assert differences(again, start) == []
    assert again.random_after == start.random_after


# What is alive -----------------------------------------------------------------------------------------------


class Raising(Everything):
    """Fails in ways that keep frames with activations in other places than the traceback of the error itself."""

    def __init__(self, how: str) -> None:
        super().__init__(log_everything=False)
        self.how, self.failed_in = how, KeptList()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and not self.failed_in:
            self.failed_in.append(batch_idx)
            held = loss * 2
            self.watch(held)
            if self.how == "cause":
                self.from_cause(held)
            elif self.how == "context":
                self.from_context(held)
            elif self.how == "circle":
                error = out_of_memory()
                error.__cause__ = RuntimeError("outer")
                error.__cause__.__context__ = error
                raise error  # held by the frame that it holds
            elif self.how == "frame":
                self.frame = sys._getframe()  # as debuggers and error reporters do
            raise out_of_memory()
        return loss

    def from_cause(self, held: torch.Tensor) -> None:
        inner = held * 3
        self.watch(inner)
        try:
            raise out_of_memory()
        except torch.OutOfMemoryError as error:
            raise RuntimeError("layer 7 failed") from error

    def from_context(self, held: torch.Tensor) -> None:
        inner = held * 3
        self.watch(inner)
        try:
            raise KeyError("cache miss")
        except KeyError:
            raise out_of_memory()  # noqa: B904 (its context is the point)


@pytest.mark.parametrize("how", ["itself", "cause", "context", "circle", "frame"])
def test_the_graph_of_a_failed_attempt_is_gone_without_the_garbage_collector(how):
    gc.disable()  # what only the collector finds would come too late, or never
    try:
        ours = fit([], recovery := OOMRecovery(), model=Raising(how), max_epochs=1)
    finally:
        gc.enable()
    assert [batch for _, batch, _ in ours.model.passes] == [0, 1, 1, 2, 3]
    assert ours.model.alive_before == [[]] * 5
    assert len(recovery.events) == 1


@pytest.mark.parametrize("phase", ["forward", "backward", "after_backward", "before_optimizer_step", "clip"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_of_a_failed_attempt_is_alive_when_the_next_begins(phase, accumulate):
    fault = Fault(phase, 1)
    options = {"log_everything": False}
    ours = fit([fault], OOMRecovery(), options=options, max_epochs=1, accumulate_grad_batches=accumulate)
    assert fault.num_raised == 1
    assert [batch for _, batch, _ in ours.model.passes] == [0, 1, 1, 2, 3]
    assert ours.model.alive_before[2] == []


def test_nothing_is_kept_of_microbatches_but_gradients():
    fault = Fault("backward", 1, fits=2)
    ours = fit([fault], OOMRecovery(split_check="skip"), options={"log_everything": False}, max_epochs=1)
    assert ours.model.alive_before == [[]] * len(ours.model.passes)
    assert len(ours.model.passes) > 10


def test_the_error_that_was_recovered_from_keeps_no_traceback():
    errors: list[BaseException] = []

    def remembered() -> BaseException:
        errors.append(out_of_memory())
        return errors[-1]

    faults = [Fault("backward", 1, error=remembered), Fault("clip", 3, error=remembered)]
    fit(faults, OOMRecovery(), options=LITTLE, max_epochs=1)
    assert len(errors) == 2
    assert all(error.__traceback__ is None for error in errors)


# The batch itself --------------------------------------------------------------------------------------------


class DictBatches:
    """Batches as dicts, new ones each time."""

    batch_size = 8

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return ({"x": x, "y": y, "scale": torch.ones(3)} for x, y in loader())


class Editing(Everything):
    """Does something to its batch before it uses it."""

    def __init__(self, edit: Callable[[Any], None], faults: list[Fault] | None = None) -> None:
        super().__init__(faults or [], log_everything=False)
        self.edit = edit

    def unpack(self, batch: Any) -> Any:
        self.edit(batch)
        self.labels = batch.pop("y")
        return batch["x"], self.labels


class Hungry(Editing):
    """Takes entries out of the batch, adds and replaces some."""

    def __init__(self, faults: list[Fault] | None = None) -> None:
        super().__init__(lambda batch: None, faults)

    def unpack(self, batch: Any) -> Any:
        assert "seen" not in batch
        batch["x"] = batch["x"] * 2
        batch["seen"] = True
        return batch["x"], batch.pop("y")


@pytest.mark.parametrize(("phase", "passes"), [("backward", {0}), ("backward", {0, 1}), ("clip", {0})])
def test_a_batch_whose_entries_were_taken_out_and_replaced_is_given_back_as_it_was(phase, passes):
    plain = fit(model=Hungry(), train=DictBatches(), max_epochs=1)
    fault = Fault(phase, 1, passes=passes)
    ours = fit(recovery=OOMRecovery(), model=Hungry([fault]), train=DictBatches(), max_epochs=1)
    assert fault.num_raised == len(passes)
    for row in [*ours.witness.batches, *plain.witness.batches]:
        row.pop("batch")  # as edited in plain Lightning; of a batch that is split, only the microbatches are
    assert differences(ours, plain, rtol=0 if passes == {0} else ROUNDING) == []


@pytest.mark.parametrize("phase", ["forward", "backward", "clip"])
def test_a_batch_changed_in_place_is_not_done_again_and_named(phase):
    model = Editing(lambda batch: batch["x"].sub_(1.0), [Fault(phase, 1)])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(recovery=OOMRecovery(emergency_checkpoint=False), model=model, train=DictBatches(), max_epochs=1)
    [note] = caught.value.__notes__
    assert "batch['x'] was changed in place" in note
    assert "x = x - mean in the place of x.sub_(mean)" in note
    assert len(model.passes) == 2


def test_a_batch_changed_in_place_does_no_harm_where_nothing_fails():
    def normalise(batch: Any) -> None:
        batch["x"].sub_(1.0)

    plain = fit(model=Editing(normalise), train=DictBatches(), max_epochs=1)
    ours = fit(recovery=OOMRecovery(), model=Editing(normalise), train=DictBatches(), max_epochs=1)
    assert differences(ours, plain) == []


# Losses that are no mean over samples ---------------------------------------------------------------------------


class Contrastive(Everything):
    """Compares the samples of a batch with each other."""

    def loss_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Weighted(Everything):
    """A mean with other weights than one per sample, as over tokens that are no padding."""

    def loss_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels, weight=TOKENS)


TOKENS = torch.tensor([1.0, 0.0, 4.0, 2.0])


def count_tokens(batch: Any) -> torch.Tensor:
    """The weight of a (micro)batch for it."""
    return TOKENS[batch[1]].sum()


def split_once(model: type[Everything] = Everything, *, options: dict[str, Any] | None = None, **arguments: Any) -> Run:
    """Train one epoch whose second batch has to be split."""
    fault = Fault("backward", 1, passes={0, 1})
    given = {"log_everything": False, **(options or {})}
    recovery = OOMRecovery(**{"emergency_checkpoint": False, **arguments})
    return fit(recovery=recovery, model=model([fault], **given), max_epochs=1)


@pytest.mark.parametrize("model", [Contrastive, Weighted])
def test_a_loss_that_is_no_mean_over_samples_is_refused_with_the_cure(model):
    with pytest.raises(
        OOMRecoveryError, match=r"cannot be split.*weight_fn=.*loss_reduction='sum'.*split_check='warn'"
    ):
        split_once(model)


def test_a_sum_taken_for_a_mean_is_refused_and_a_mean_taken_for_a_sum():
    with pytest.raises(OOMRecoveryError, match="cannot be split"):
        split_once(options={"reduction": "sum"})
    with pytest.raises(OOMRecoveryError, match="cannot be split"):
        split_once(loss_reduction="sum")


def test_a_sum_over_samples_is_split_as_one():
    options = {"log_everything": False, "reduction": "sum"}
    plain = fit(options=options, max_epochs=1)
    ours = split_once(options=options, loss_reduction="sum")
    assert differences(ours, plain, rtol=ROUNDING) == []


def test_a_mean_over_something_else_is_split_with_weights():
    plain = fit(model=Weighted(log_everything=False), max_epochs=1)
    ours = split_once(Weighted, weight_fn=count_tokens)
    assert differences(ours, plain, rtol=ROUNDING, ignore=["loss_epoch"]) == []


@pytest.mark.parametrize("split_check", ["warn", "skip"])
def test_a_loss_that_is_no_mean_is_split_all_the_same_where_the_user_says_so(split_check, caplog):
    with caplog.at_level("INFO"):
        ours = split_once(Contrastive, split_check=split_check)
    assert ours.trainer.global_step == 4
    told = [
        record.message for record in caplog.records if "does not follow from the losses of its parts" in record.message
    ]
    assert len(told) == (1 if split_check == "warn" else 0)


def test_the_check_leaves_no_trace():
    options = {"batchnorm": True, "dropout": True, **LITTLE}

    def run(split_check: Any) -> Run:
        return fit([Fault("forward", 1, passes={0, 1})], OOMRecovery(split_check=split_check), options=options)

    checked, skipped = run("refuse"), run("skip")
    assert len(checked.model.passes) == len(skipped.model.passes) + 3
    assert differences(checked, skipped) == []
    assert checked.random_after == skipped.random_after


# Files and other callbacks --------------------------------------------------------------------------------------


class Witnesses(pl.Callback):
    """Notes every hook around a batch."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    @property
    def state_key(self) -> str:
        return f"Witnesses {self.name}"

    def on_train_batch_start(self, *args: Any) -> None:
        self.events.append(f"{self.name} start")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.events.append(f"{self.name} step")

    def on_before_zero_grad(self, *args: Any) -> None:
        self.events.append(f"{self.name} zero")

    def on_train_batch_end(self, *args: Any) -> None:
        self.events.append(f"{self.name} end")


def test_checkpoints_csv_files_and_the_order_of_callbacks_are_those_of_plain_lightning(tmp_path):
    def run(name: str, faults: list[Fault], recovery: OOMRecovery | None) -> tuple[Any, Any, list[str], Run]:
        folder, events = tmp_path / name, []
        first, last = Witnesses("first", events), Witnesses("last", events)
        callbacks = [first, *([recovery] if recovery else []), *every_checkpoint(folder), last]
        settings = {
            "logger": CSVLogger(tmp_path / f"{name}-log", flush_logs_every_n_steps=1),
            "accumulate_grad_batches": 2,
        }
        done = fit(faults, callbacks=callbacks, options={"dropout": True}, enable_checkpointing=True, **settings)
        saved = {path.name: torch.load(path, weights_only=False) for path in sorted(folder.glob("*.ckpt"))}
        for content in saved.values():
            content["callbacks"] = {
                key: value for key, value in content["callbacks"].items() if "ModelCheckpoint" not in key
            }
            found = content["callbacks"].pop("OOMRecovery", None)
            assert (found is None) == (recovery is None)
        rows = [without_ours(row) for row in done.trainer.logger.experiment.metrics]
        return saved, [row for row in rows if set(row) - {"step", "epoch"}], events, done

    plain_saved, plain_rows, plain_events, _ = run("plain", [], None)
    recovery = OOMRecovery()
    faults = [Fault("backward", 1), Fault("clip", 3)]
    saved, rows, events, _ = run("ours", faults, recovery)
    assert len(recovery.events) == 2
    assert list(saved) == list(plain_saved)
    assert len(saved) >= 6
    assert differences(saved, plain_saved) == []
    assert differences(rows, plain_rows) == []
    # The hook at which the second error came is called again; nothing else is.
    again = events.index("last step", events.index("last step") + 1) + 1
    assert events[again : again + 2] == ["first step", "last step"]
    assert events[:again] + events[again + 2 :] == plain_events


def test_with_batch_echo_each_echo_is_recovered_by_itself():
    def run(faults: list[Fault], recovery: OOMRecovery | None) -> Run:
        echo = BatchEcho(echo_factor=2, scale_lr="keep")
        return fit(faults, recovery, callbacks=[echo], options={"dropout": True, **LITTLE})

    plain = run([], None)
    recovery = OOMRecovery()
    ours = run([Fault("backward", 2), Fault("clip", 5), Fault("forward", 1, 1)], recovery)
    assert plain.trainer.global_step == 16
    assert len(recovery.events) == 3
    assert differences(ours, plain) == []
    assert ours.random_after == plain.random_after


# Around the training ------------------------------------------------------------------------------------------


def leftovers(trainer: pl.Trainer) -> list[str]:
    """Where something of ours is still in the place of Lightning's."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    names = ["optimizer_step", "validation_step", "test_step", "predict_step"]
    places = [f"strategy.{name}" for name in names if name in vars(trainer.strategy)]
    places += ["_make_closure"] if "_make_closure" in vars(loop) else []
    return places + [f"step of {type(one).__name__}" for one in trainer.optimizers if "step" in vars(one)]


def test_nothing_is_left_in_the_trainer_afterwards_or_after_an_error():
    ours = fit([Fault("backward", 1)], OOMRecovery(), options=LITTLE, max_epochs=1)
    assert leftovers(ours.trainer) == []
    recovery = OOMRecovery(emergency_checkpoint=False)
    trainers: list[pl.Trainer] = []

    class Noting(Everything):
        def setup(self, stage: str) -> None:
            trainers.append(self.trainer)

    model = Noting([Fault("forward", 1, error=lambda: ZeroDivisionError("no memory error"))])
    with pytest.raises(ZeroDivisionError, match="no memory error"):
        fit(recovery=recovery, model=model)
    assert leftovers(trainers[0]) == []


def test_one_callback_serves_several_trainings_and_keeps_what_it_has_found():
    recovery = OOMRecovery(grow_after=None, split_check="skip")
    fit([Fault("forward", 0, passes={0, 1})], recovery, options=LITTLE, max_epochs=1)
    assert recovery.num_microbatches == 2
    again = fit([], recovery, options=LITTLE, max_epochs=1)
    assert {size for _, _, size in again.model.passes} == {4, 3}
