"""`BatchEcho` in a real Trainer: which samples each step gets, which hooks run, and what it leaves as it was.

The strongest statement about a fixed echo is its twin: plain Lightning over a loader that gives the very pieces as its
batches ends with the same bits, whatever else the Trainer was told to do.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle
import re
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_gpufeed import BatchEcho, H5DataModule, H5ImageDataModule
from lightning_gpufeed.callbacks import batch_echo
from lightning_gpufeed.device import marks
from lightning_gpufeed.echo import fetcher, measures
from tests.callbacks.echo_models import (
    Batches,
    EchoModel,
    Gate,
    Pace,
    StatefulBatches,
    TimedDataset,
    Unsized,
    VirtualClock,
    batch_of,
    echo,
    fit,
    gated_loader,
    plain_loader,
    wait_until,
)
from tests.datamodules.models import (
    MemoryLogger,
    Recorder,
    make_trainer,
    same_bits,
    state_of,
    warnings_of,
    write_images,
)


def outcome(model: EchoModel, trainer: pl.Trainer) -> dict[str, Any]:
    """All that a training comes to."""
    return state_of(trainer, model) | {
        "steps": model.steps,
        "losses": model.losses,
        "batch_indices": model.batch_indices,
        "validations": model.validations,
        "validated": model.validated,
        "rates": model.rates,
        "moves": model.moves,
        "estimate": model.estimate,
        "num_training_batches": trainer.num_training_batches,
        "metrics": dict(trainer.callback_metrics),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not equal to the last bit."""
    assert list(one) == list(other)
    return [name for name in one if not same_bits(one[name], other[name])]


# Order -------------------------------------------------------------------------------------------------------


def passes_of(steps: list[list[int]], batches: list[list[int]], factor: int, num_splits: int) -> list[list[list[int]]]:
    """Cut the steps of an epoch into passes, and assert that each is the whole batch in pieces as equal as possible."""
    steps = list(steps)
    passes = []
    for batch in batches:
        num_pieces = min(num_splits, len(batch))
        for _ in range(factor):
            pieces, steps = steps[:num_pieces], steps[num_pieces:]
            assert sorted(sample for piece in pieces for sample in piece) == sorted(batch)
            assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
            passes.append(pieces)
    assert steps == []
    return passes


@settings(max_examples=25)
@given(
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    factor=st.integers(1, 4),
    num_splits=st.integers(1, 12),
    drop_last=st.booleans(),
)
def test_each_pass_is_the_whole_batch_in_disjoint_pieces_and_every_counter_counts_them(
    num_samples, batch_size, factor, num_splits, drop_last
):
    batch_size = min(batch_size, num_samples)
    num_splits = min(num_splits, batch_size)
    loader = plain_loader(num_samples, batch_size, drop_last=drop_last)
    model, trainer = fit(echo(factor, num_splits=num_splits), loader, model=EchoModel(schedule="onecycle"))
    order = list(range(num_samples - num_samples % batch_size if drop_last else num_samples))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    for epoch in (0, 1):
        passes_of(model.in_epoch(epoch), batches, factor, num_splits)
    num_steps = len(model.steps)
    assert trainer.global_step == num_steps == 2 * trainer.num_training_batches == model.estimate
    assert model.moves == list(range(1, num_steps + 1))
    assert model.batch_indices == 2 * list(range(num_steps // 2))


def test_a_batch_of_300_in_two_gives_150_and_150_and_loses_no_sample():
    model, trainer = fit(echo(2, num_splits=2), plain_loader(812, 512), max_epochs=1)
    assert model.sizes == [256] * 4 + [150] * 4
    passes_of(model.samples, [list(range(512)), list(range(512, 812))], 2, 2)
    assert trainer.global_step == trainer.num_training_batches == 8


def test_a_last_batch_with_fewer_samples_than_pieces_gives_steps_on_one_sample():
    model, trainer = fit(echo(2, num_splits=8), plain_loader(11, 8), model=EchoModel(schedule="onecycle"))
    assert model.sizes == 2 * [1] * (2 * 8 + 2 * 3)
    assert trainer.global_step == model.estimate == model.moves[-1] == 44
    assert trainer.num_training_batches == 22


def test_passes_batches_and_epochs_are_permuted_each_in_its_own_way():
    model, _ = fit(echo(3), plain_loader(96, 32))
    # 32 samples have so many orders that two equal ones, or one that is in order, mean a mistake.
    orders = [tuple(sample % 32 for sample in samples) for samples in model.samples]
    assert len(set(orders)) == len(orders) == 18
    assert tuple(range(32)) not in orders


def test_the_order_is_the_same_in_every_run_and_another_one_with_another_seed():
    torch.manual_seed(1)
    one, _ = fit(echo(2, num_splits=2))
    torch.manual_seed(2)
    same, _ = fit(echo(2, num_splits=2))
    other, _ = fit(echo(2, num_splits=2, seed=1))
    assert one.steps == same.steps
    assert one.steps != other.steps


def test_permutations_do_not_draw_from_the_generators_of_the_training():
    def drawn(callback: BatchEcho | None) -> list[Any]:
        torch.manual_seed(3)
        fit(callback, plain_loader(shuffle=True))
        return [torch.rand(4).tolist()]

    assert drawn(echo(3, num_splits=2)) == drawn(None)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shuffling_loader_gives_the_batches_it_gives_without_the_callback(num_workers):
    def batches(callback: BatchEcho | None, factor: int) -> list[list[int]]:
        torch.manual_seed(3)
        model, _ = fit(callback, plain_loader(shuffle=True, num_workers=num_workers))
        return [sorted(samples) for samples in model.samples[::factor]]

    assert batches(echo(3), 3) == batches(None, 1)


def test_a_new_epoch_begins_with_a_fetch_wherever_in_a_batch_the_last_one_ended():
    model, trainer = fit(echo(3, num_splits=2), limit_train_batches=8)
    for epoch in (0, 1):
        pieces = model.in_epoch(epoch)
        assert [samples[0] // 8 for samples in pieces] == [0] * 6 + [1] * 2
        assert sorted(pieces[0] + pieces[1]) == list(range(8))
    assert trainer.global_step == 16


# Transfer and hooks ------------------------------------------------------------------------------------------


def test_hooks_before_the_transfer_and_the_transfer_run_once_a_batch_and_those_after_it_once_a_piece():
    model, _ = fit(echo(2, num_splits=2))
    batch = ["before", "transfer", *["after", "step"] * 4]
    assert model.hooks == batch * 6


def test_with_auto_the_hooks_run_alike():
    gate = Gate()
    model, _ = fit(echo("auto"), gated_loader(gate), model=EchoModel(after_step=Pace(gate, [1, 3, 2, 1])), max_epochs=1)
    assert model.hooks == [
        hook for passes in (1, 3, 2, 1) for hook in ["before", "transfer", *["after", "step"] * passes]
    ]


class HookedData(pl.LightningDataModule):
    """A DataModule whose hooks stand in for the module's; random ones, as a user's augmentation is."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.hooks: list[str] = []

    def train_dataloader(self) -> Any:
        return plain_loader(**self.settings)

    def note(self, hook: str) -> None:
        assert self.trainer is not None
        if self.trainer.training:
            self.hooks.append(hook)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("before")
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.note("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("after")
        return batch


class PlainData(pl.LightningDataModule):
    """A DataModule that makes a new loader whenever it is asked."""

    def __init__(self, make: Any = plain_loader, **settings: Any) -> None:
        super().__init__()
        self.make, self.settings = make, settings

    def train_dataloader(self) -> Any:
        return self.make(**self.settings)


class Hookless(EchoModel):
    """Has none of the hooks, so that a DataModule's do not come with a warning."""

    on_before_batch_transfer = pl.LightningModule.on_before_batch_transfer  # type: ignore[assignment]
    transfer_batch_to_device = pl.LightningModule.transfer_batch_to_device  # type: ignore[assignment]
    on_after_batch_transfer = pl.LightningModule.on_after_batch_transfer  # type: ignore[assignment]


def test_the_hooks_of_a_datamodule_run_in_the_place_of_the_modules_as_often():
    data = HookedData()
    model, _ = fit(echo(2, num_splits=2), data, model=Hookless())
    assert data.hooks == ["before", "transfer", *["after"] * 4] * 6
    assert len(model.steps) == 24


class Augmented(EchoModel):
    """Draws a number before the transfer, for the batch, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, float]] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*super().on_before_batch_transfer(batch, dataloader_idx), torch.rand(())]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, numbers, drawn = super().on_after_batch_transfer(batch, dataloader_idx)
        self.drawn.append((float(drawn), float(torch.rand(()))))
        return inputs, numbers


def test_augmentation_before_the_transfer_is_one_per_batch_and_after_it_a_new_one_in_every_piece():
    model, _ = fit(echo(2, num_splits=2), model=Augmented())
    before = [drawn for drawn, _ in model.drawn]
    assert [before[4 * batch : 4 * batch + 4] for batch in range(6)] == [[before[4 * batch]] * 4 for batch in range(6)]
    assert len(set(before)) == 6
    assert len({drawn for _, drawn in model.drawn}) == 24


class InPlace(EchoModel):
    """Changes all it gets in place, where a careless user does."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.seen: list[torch.Tensor] = []

    def spoil(self, where: str, batch: Any) -> None:
        if where == self.where:
            batch[0].fill_(7)
            batch[1].neg_()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(batch[0].clone())
        self.steps.append((self.current_epoch, batch[1].tolist()))
        self.spoil("after", batch)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.spoil("start", batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.spoil("step", batch)
        return self.loss_of(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.spoil("end", batch)


@pytest.mark.parametrize("where", ["after", "start", "step", "end"])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("echo_factor", [3, "auto"])
def test_what_is_done_to_a_piece_in_place_is_not_seen_by_the_next_pass(where, num_splits, echo_factor):
    replay = {0: [3, 3, 3]} if echo_factor == "auto" else None
    callback = echo(echo_factor, num_splits=num_splits, replay=replay)
    model, _ = fit(callback, model=InPlace(where), max_epochs=1)
    batches = [list(range(8)), list(range(8, 16)), list(range(16, 22))]
    passes_of([samples for _, samples in model.steps], batches, 3, num_splits)
    for (_, samples), inputs in zip(model.steps, model.seen, strict=True):
        assert torch.equal(inputs, batch_of(samples)[0])


def test_what_is_done_to_a_piece_in_place_does_not_reach_the_loaders_own_data_in_a_later_epoch():
    # On the CPU a transfer copies nothing, so the batch on the "device" is the loader's own.
    held = Batches(6, 3)
    kept = [held.batch(0), held.batch(1)]
    held.batch = kept.__getitem__  # type: ignore[method-assign,assignment]
    model, _ = fit(echo(2), held, model=InPlace("step"))
    assert [sorted(samples) for _, samples in model.steps] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2 + [[0, 1, 2]] * 2 + [
        [3, 4, 5]
    ] * 2


@pytest.mark.parametrize("echo_factor", [2, "auto"])
def test_a_batch_is_let_go_of_before_the_next_one_comes_to_the_device(echo_factor):
    # Beside the batch, one piece is in device memory: never two batches.
    alive: list[int] = []
    batches: weakref.WeakSet[Any] = weakref.WeakSet()

    class Watching(EchoModel):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            alive.append(len(batches))
            batch = [batch[0].clone(), batch[1].clone()]
            batches.add(batch[0])
            return batch

    fit(echo(echo_factor, num_splits=2), model=Watching(after_step=SteadyPace() if echo_factor == "auto" else None))
    assert alive == [0] * 6


# Equal to the last bit ---------------------------------------------------------------------------------------


ANY_TRAINING: list[dict[str, Any]] = [
    {},
    {"val_check_interval": 0.5, "accumulate_grad_batches": 2},
    {"limit_train_batches": 2, "precision": "bf16-mixed"},
    {"limit_train_batches": 0.5, "max_steps": 3},
    {"val_check_interval": 2, "check_val_every_n_epoch": None, "gradient_clip_val": 0.1},
]


@pytest.mark.parametrize("echo_factor", [1, "auto"])
@pytest.mark.parametrize(
    ("given", "schedule", "shuffle"),
    # Every pair of values.
    [(given, one, (one is None) == i % 2) for i, given in enumerate(ANY_TRAINING) for one in (None, "onecycle")],
)
def test_no_echo_is_bit_equal_to_no_callback(echo_factor, given, schedule, shuffle):
    # With "auto", a loader that keeps up: each step waits for the next batch to be there, so that it is one.
    def trained(callback: BatchEcho | None) -> dict[str, Any]:
        torch.manual_seed(3)
        pace = Pace() if callback is not None and callback.echo_factor == "auto" else None
        model = EchoModel(schedule=schedule, after_step=pace)
        loader = plain_loader(36, 8, shuffle=shuffle)
        return outcome(*fit(callback, loader, model=model, val=plain_loader(6, 4), max_epochs=3, **given)) | {
            "hooks": model.hooks,
            "generator": torch.get_rng_state(),
        }

    assert differences(trained(echo(echo_factor)), trained(None)) == []


class Pieces:
    """Gives the steps of another training as its batches."""

    def __init__(self, model: EchoModel, recorded: EchoModel) -> None:
        self.model, self.recorded = model, recorded

    def __len__(self) -> int:
        return len(self.recorded.in_epoch(0))

    def __iter__(self) -> Iterator[Any]:
        return iter([batch_of(samples) for samples in self.recorded.in_epoch(self.model.current_epoch)])


class LoggingModel(EchoModel):
    """Logs what plateau schedules and stopping look at."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        return loss


class ManualModel(LoggingModel):
    """Optimizes by itself, with a schedule that it moves by itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, is_automatic=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.schedule is not None:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        return loss


class EveryStep(WeightAveraging):
    """An exponential moving average of the weights."""

    def __init__(self) -> None:
        super().__init__(multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))


class SkippingModel(LoggingModel):
    """Skips the optimizer step of some batches, as a guard against a loss that is not finite does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """None where there is nothing to learn."""
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Unfreezing(BaseFinetuning):
    """Trains the bias first, and the weight, at a rate of its own, from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """Leave the weight out."""
        pl_module.layer.weight.requires_grad_(False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Take it in."""
        if epoch == 1:
            pl_module.layer.weight.requires_grad_(True)
            [group] = optimizer.param_groups
            weight = pl_module.layer.weight
            group["params"] = [parameter for parameter in group["params"] if parameter is not weight]
            optimizer.add_param_group({"params": [weight], "lr": 0.05})


TWINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "onecycle": {"model": {"schedule": "onecycle"}},
    "cosine": {"model": {"schedule": "cosine"}},
    "accumulate": {"accumulate_grad_batches": 3, "model": {"schedule": "onecycle"}},
    "accumulate across batches": {"accumulate_grad_batches": 5},
    "clip by norm": {"gradient_clip_val": 0.05},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "manual": {"class": ManualModel, "model": {"schedule": "cosine"}},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "averaged": {"callbacks": EveryStep},
    "stochastic averaging": {
        "callbacks": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
        "max_epochs": 4,
    },
    "accumulate by epoch": {"callbacks": lambda: GradientAccumulationScheduler({0: 1, 1: 3})},
    "skipped steps": {"class": SkippingModel, "model": {"schedule": "cosine"}},
    "timer": {"callbacks": lambda: Timer(duration="00:01:00:00")},
    "finetuning": {"callbacks": Unfreezing},
    "deterministic": {"deterministic": True},
    "barebones": {"barebones": True, "log_every_n_steps": None, "num_sanity_val_steps": None},
    "limit": {"limit_train_batches": 5},
    "limit float": {"limit_train_batches": 0.5},
    "max_steps": {"max_steps": 19, "max_epochs": -1, "model": {"schedule": "onecycle"}},
    "min_steps": {"min_steps": 15, "max_epochs": 1000, "callbacks": lambda: EarlyStopping("val_loss", patience=0)},
    "interval": {"val_check_interval": 5},
    "interval float": {"val_check_interval": 0.3},
    "interval across epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "anomalies": {"detect_anomaly": True},
    "fast_dev_run": {"fast_dev_run": 3},
    "plateau": {"model": {"schedule": "plateau"}},
    "sanity": {"num_sanity_val_steps": 2},
    "reload": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
}


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.filterwarnings("ignore:You are trying to `self.log\\(\\)` but:UserWarning")
@pytest.mark.filterwarnings("ignore:.*bf16.*is supported for historical reasons:UserWarning")
@pytest.mark.parametrize("name", TWINS)
def test_a_training_is_bit_equal_to_plain_lightning_over_a_loader_of_its_pieces(name):
    settings = {"max_epochs": 2} | TWINS[name]
    kind, arguments = settings.pop("class", LoggingModel), settings.pop("model", {})
    others = settings.pop("callbacks", None)
    added = [] if others is None else [others()]
    loader = plain_loader(22, 8)
    recorded = kind(**arguments)
    echoed = outcome(*fit([echo(2, num_splits=2), *added], loader, model=recorded, val=plain_loader(6, 4), **settings))
    model = kind(**arguments)
    added = [] if others is None else [others()]
    settings.pop("limit_train_batches", None)  # that many pieces there are
    plain = outcome(*fit(added, Pieces(model, recorded), model=model, val=plain_loader(6, 4), **settings))
    assert differences(echoed, plain) == []
    assert {len(samples) for samples in recorded.samples} <= {4, 3}
    assert recorded.samples


def test_all_of_a_whole_training_is_in_the_comparison():
    # The comparison with the twin has power: another seed ends elsewhere.
    one = outcome(*fit(echo(2, num_splits=2, seed=1), model=EchoModel(schedule="onecycle")))
    other = outcome(*fit(echo(2, num_splits=2, seed=2), model=EchoModel(schedule="onecycle")))
    assert {"weights", "optimizers", "steps", "losses"} <= set(differences(one, other))


class TwoOptimizers(EchoModel):
    """Trains two layers in turn, as adversarial training does: two optimizer steps a training step."""

    def __init__(self) -> None:
        super().__init__(is_automatic=False)
        self.second = torch.nn.Linear(5, 1)
        self.second.load_state_dict(self.layer.state_dict())

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.note("step")
        self.steps.append((self.current_epoch, batch[1].tolist()))
        for optimizer, layer in zip(self.optimizers(), (self.layer, self.second), strict=True):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            loss = (layer(batch[0]).squeeze() - 1).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layer.parameters(), lr=0.1), torch.optim.Adam(self.second.parameters(), lr=0.01)]


def test_manual_optimization_with_two_optimizers_counts_and_trains_like_its_twin():
    recorded = TwoOptimizers()
    _, trainer = fit(echo(2, num_splits=2), model=recorded)
    assert trainer.global_step == 2 * len(recorded.steps) == 48
    model = TwoOptimizers()
    _, plain = fit(None, Pieces(model, recorded), model=model)
    assert same_bits(state_of(trainer, recorded), state_of(plain, model))
    assert recorded.losses == model.losses


# Replay ------------------------------------------------------------------------------------------------------


def paced(passes: list[int], callback: BatchEcho, num_splits: int = 1, **settings: Any) -> tuple[EchoModel, pl.Trainer]:
    """A training whose loader is late by so many passes."""
    gate = Gate()
    model = EchoModel(schedule="onecycle", after_step=Pace(gate, passes, num_splits))
    return fit(callback, gated_loader(gate), model=model, **settings)


PASSES = [1, 3, 2, 1, 4, 1, 2, 1]


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("form", ["trace", "path", "text"])
def test_echoes_are_repeated_bit_by_bit_from_a_trace_and_from_a_checkpoint(tmp_path, form, num_splits):
    first = echo("auto", num_splits=num_splits)
    one = paced(PASSES, first, num_splits)
    assert first.trace == {0: PASSES[:4], 1: PASSES[4:]}
    path = tmp_path / "end.ckpt"
    one[1].save_checkpoint(path)
    replay = {"trace": first.trace, "path": path, "text": str(path)}[form]
    # Another loader, that is never late.
    second = echo("auto", num_splits=num_splits, replay=replay)
    other = fit(second, plain_loader(32, 8), model=EchoModel(schedule="onecycle"))
    assert differences(outcome(*other), outcome(*one)) == []
    assert second.trace == first.trace
    assert [report.num_echo_steps for report in second.reports] == [3 * num_splits, 4 * num_splits]


class SlowToEnd(Unsized):
    """Takes its time to say that there is no more batch."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.gate.pass_through(1)


def test_the_last_batch_of_a_finished_run_is_not_used_more_often_though_a_loader_is_slow_to_end():
    gate = Gate()

    def after_step(model: EchoModel) -> None:
        if len(model.steps) == 4:
            # The loop is going to block in the loader, so another thread has to let it end.
            threading.Timer(0.2, gate.open, [1]).start()

    callback = echo("auto", replay={0: [1, 2, 2]})
    model, _ = fit(callback, SlowToEnd(gate), model=EchoModel(after_step=after_step), max_epochs=1)
    assert callback.trace == {0: [1, 2, 2]}
    assert len(model.steps) == 5


def test_after_the_end_of_the_trace_the_loader_decides_again():
    callback = echo("auto", replay={0: [2, 3]})
    model, _ = fit(callback, plain_loader(32, 8), model=EchoModel(after_step=SteadyPace()), max_epochs=1)
    assert callback.trace == {0: [2, 3, 1, 1]}
    assert len(model.steps) == 7


class SteadyPace(Pace):
    """Every step waits until the next batch is there, whatever it is on."""

    def __call__(self, model: EchoModel) -> None:
        self.num_steps = self.num_splits - 1
        super().__call__(model)


def test_a_checkpoint_can_be_loaded_by_those_who_trust_nobody(tmp_path):
    _, trainer = paced(PASSES, echo("auto"), max_steps=7)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    checkpoint = torch.load(tmp_path / "middle.ckpt", weights_only=True)
    assert checkpoint["callbacks"]["BatchEcho"]["trace"][0][:3] == PASSES[:3]


def test_a_checkpoint_without_echoes_cannot_be_replayed(tmp_path):
    _, trainer = fit(None)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=r"plain\.ckpt', a checkpoint without the echoes of a BatchEcho"):
        fit(echo("auto", replay=tmp_path / "plain.ckpt"))


@pytest.mark.parametrize("trace", [{0: ["often"]}, {"first": [1]}, {0: 3}])
def test_a_trace_that_is_none_is_refused(trace):
    with pytest.raises(ValueError, match=r"a trace is a dict of epoch -> list of passes over each batch"):
        fit(echo("auto", replay=trace))


# Auto --------------------------------------------------------------------------------------------------------


def test_a_slow_loader_is_echoed_until_its_batch_is_there_or_the_largest_factor_is_reached():
    callback = echo("auto", max_echo_factor=4)
    model, trainer = paced([1, 3, 4, 1, 2, 4, 1, 1], callback)
    assert callback.trace == {0: [1, 3, 4, 1], 1: [2, 4, 1, 1]}
    assert [samples[0] // 8 for samples in model.in_epoch(0)] == [0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert trainer.global_step == 17


@pytest.mark.parametrize("num_splits", [1, 2])
def test_each_echo_of_auto_is_a_permutation_and_an_uncut_first_pass_is_as_it_was_fetched(num_splits):
    callback = echo("auto", num_splits=num_splits)
    model, _ = paced([2, 3, 1, 1], callback, num_splits, max_epochs=1)
    batches = [list(range(8 * number, 8 * number + 8)) for number in range(4)]
    steps = list(model.samples)
    for batch, passes in zip(batches, [2, 3, 1, 1], strict=True):
        mine, steps = steps[: passes * num_splits], steps[passes * num_splits :]
        passes_of(mine, [batch], passes, num_splits)
        if num_splits == 1:
            assert mine[0] == batch
            assert all(echo != batch for echo in mine[1:])
    assert steps == []


def test_a_batch_that_is_never_let_through_is_echoed_no_more_than_the_limit_and_then_waited_for():
    gate = Gate()
    callback = echo("auto", max_echo_factor=3)

    def open_after_three(model: EchoModel) -> None:
        if len(model.steps) % 3 == 0:
            # From here on the loop blocks in the loader, so another thread has to let the batch through.
            threading.Timer(0.05, gate.open, [len(model.steps) // 3]).start()

    model, _ = fit(callback, gated_loader(gate), model=EchoModel(after_step=open_after_three), max_epochs=1)
    assert callback.trace[0][:3] == [3, 3, 3]
    assert model.sizes == [8] * len(model.steps)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """A clock that all that measures looks at."""
    made = VirtualClock()
    for module in (batch_echo, fetcher, measures, marks):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(fetcher, "Feed", made.feed)
    return made


def timed(
    callback: BatchEcho | None,
    clock: VirtualClock,
    ratios: list[float],
    num_batches: int = 40,
    **settings: Any,
) -> tuple[EchoModel, pl.Trainer]:
    """A training with steps of 10 ms and a loader that takes so many times as long for a batch."""

    class Working(EchoModel):
        def on_train_start(self) -> None:
            if callback is not None:
                clock.is_ready = self.trainer.train_dataloader.is_ready

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            clock.work(0.01)
            return loss

    loader = DataLoader(
        TimedDataset(4 * num_batches, clock, [0.01 * ratio for ratio in ratios]), batch_size=4, shuffle=True
    )
    torch.manual_seed(3)
    return fit(callback, loader, model=Working(schedule="onecycle"), **settings)


@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0, 2.5, 3.0, 3.7, 4.0, 4.5])
def test_a_loader_that_is_slow_by_up_to_the_largest_factor_is_waited_for_less_than_a_tenth_of_the_time(clock, ratio):
    callback = echo("auto", max_echo_factor=5)
    timed(callback, clock, [ratio])
    for report in callback.reports:
        assert report.wait_share < 0.1
        assert report.load_ratio == pytest.approx(ratio, rel=0.01)
        # Passes are whole, and the first batches come before it is known how slow the loader is.
        assert math.ceil(ratio) - 0.15 <= report.echo_factor <= math.ceil(ratio)


def test_a_loader_that_is_slower_than_that_is_waited_for_after_the_most_passes(clock):
    callback = echo("auto", max_echo_factor=3)
    timed(callback, clock, [5.0], num_batches=8, max_epochs=1)
    assert callback.trace == {0: [3] * 7 + [1]}
    [report] = callback.reports
    assert report.wait_share == pytest.approx(2 / 5, abs=0.1)  # less in the last batch, which nothing follows
    assert "R = 5; all of the echo was free (e <= R); waited" in str(report)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_a_loader_that_keeps_up_is_never_echoed_and_the_training_is_bit_equal_to_one_without(clock, ratio):
    callback = echo("auto")
    echoed = outcome(*timed(callback, clock, [ratio], val=plain_loader(6, 4)))
    assert [report.num_echo_steps for report in callback.reports] == [0, 0]
    plain = outcome(*timed(None, VirtualClock(), [ratio], val=plain_loader(6, 4)))
    assert differences(echoed, plain) == []


def test_a_loader_that_is_late_now_and_then_though_fast_on_average_is_not_echoed_for_that(clock):
    callback = echo("auto")
    timed(callback, clock, [*[0.1] * 19, 3.0], num_batches=60)
    assert [report.num_echo_steps for report in callback.reports] == [0, 0]
    assert all(report.wait_share < 0.1 for report in callback.reports)


@pytest.mark.parametrize(
    ("factor", "ratio", "said"),
    [
        (2, 4.0, "R = 4; all of the echo was free (e <= R); waited 54% of"),
        (3, 1.0, "R = 1; 0% of the echo was free (passes up to R), the rest delayed fresh data (e > R): an "),
        (5, 2.2, "R = 2.2; 30% of the echo was free (passes up to R), the rest delayed fresh data (e > R): an "),
    ],
    ids=str,
)
def test_the_line_says_how_much_of_a_fixed_echo_was_free(clock, factor, ratio, said):
    callback = echo(factor)
    timed(callback, clock, [ratio], num_batches=6, max_epochs=1)
    assert said in str(callback.reports[0])
    assert ("(e > R)" in said) == (f"an echo_factor of {int(ratio)} would not" in str(callback.reports[0]))


def test_max_echo_factor_one_never_echoes():
    callback = echo("auto", max_echo_factor=1)
    model, _ = fit(callback)
    assert callback.trace == {0: [1, 1, 1], 1: [1, 1, 1]}
    assert model.samples == 2 * [list(range(8)), list(range(8, 16)), list(range(16, 22))]


def test_auto_without_a_length_echoes_too():
    # The Trainer asks for one item ahead where there is no length, so a decision falls one step earlier.
    callback = echo("auto", replay={0: [1, 3, 2]})
    model, trainer = fit(callback, Unsized(), max_epochs=1)
    assert [samples[0] // 8 for samples in model.samples] == [0, 1, 1, 1, 2, 2]
    assert trainer.global_step == 6


class Drawing:
    """Batches of numbers that are drawn in the training process."""

    batch_size = 4

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return (batch_of(torch.randint(50, (4,)).tolist()) for _ in range(4))


class InOneMemory:
    """Every batch in the same tensors."""

    batch_size = 4

    def __init__(self) -> None:
        self.memory = batch_of([0, 0, 0, 0])

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        for number in range(4):
            for mine, new in zip(self.memory, batch_of(list(range(4 * number, 4 * number + 4))), strict=True):
                mine.copy_(new)
            yield self.memory


class DrawingModel(EchoModel):
    """Draws in its steps, as dropout does."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        return super().loss_of([F.dropout(batch[0], 0.5), batch[1]])


def seeded(callback: BatchEcho | None, loader: Any, model: EchoModel) -> tuple[list[list[int]], list[float]]:
    """Samples and losses of a training, in the same state of the generators."""
    torch.manual_seed(4)
    fit(callback, loader, model=model)
    return [sorted(samples) for samples in model.samples], model.losses


def test_a_loader_that_draws_alone_is_read_ahead_and_gives_the_batches_it_gives_without_the_callback():
    plain, losses = seeded(None, Drawing(), EchoModel())
    assert seeded(echo("auto"), Drawing(), EchoModel(after_step=Pace())) == (plain, losses)
    samples, _ = seeded(echo(3), Drawing(), EchoModel())
    assert samples == [batch for batch in plain for _ in range(3)]


def test_a_loader_that_draws_in_turn_with_the_steps_is_found_out_and_trained_on_as_without_the_callback():
    plain = seeded(None, Drawing(), DrawingModel())
    with pytest.warns(UserWarning, match="Drawing draws random numbers") as caught:
        assert seeded(echo("auto"), Drawing(), DrawingModel()) == plain
    assert len([warning for warning in caught if "draws random" in str(warning.message)]) == 1
    with pytest.warns(UserWarning, match="Drawing draws random numbers"):
        one = seeded(echo(2), Drawing(), DrawingModel())
    with pytest.warns(UserWarning, match="Drawing draws random numbers"):
        assert seeded(echo(2), Drawing(), DrawingModel()) == one


@pytest.mark.parametrize("echo_factor", [2, "auto"])
def test_a_loader_that_fills_the_same_tensors_is_found_out_and_used_in_turn(echo_factor):
    callback = echo(echo_factor)
    with pytest.warns(UserWarning, match="InOneMemory gives every batch in the same memory"):
        samples, _ = seeded(callback, InOneMemory(), EchoModel())
    factor = 2 if echo_factor == 2 else 1
    batches = [list(range(first, first + 4)) for first in range(0, 16, 4)]
    assert samples == [batch for batch in 2 * batches for _ in range(factor)]


def test_without_reading_ahead_no_thread_is_started():
    names: set[str] = set()

    class Watching(EchoModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            names.update(thread.name for thread in threading.enumerate())
            return super().training_step(batch, batch_idx)

    fit(echo(2, read_ahead=False), model=Watching())
    assert not [name for name in names if "gpufeed" in name]
    fit(echo(2), model=Watching())
    assert [name for name in names if "gpufeed" in name]


# Arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["echo_factor", "num_splits", "max_echo_factor"])
@pytest.mark.parametrize("value", [0, -1, 2.0, 1.5, True, False, None, "2", "often", [2], float("nan")])
def test_a_number_of_uses_that_is_none_is_refused_by_name_value_and_limit(name, value):
    with pytest.raises(ValueError, match=rf"{name} is .*expected (a whole number|at least 1)") as error:
        BatchEcho(**{name: value})
    assert repr(value) in str(error.value)
    assert ("or 'auto'" in str(error.value)) == (name == "echo_factor")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"scale_lr": "sqrt"}, r"scale_lr is 'sqrt'; expected 'inverse', 'keep' or None"),
        ({"scale_lr": True}, r"scale_lr is True"),
        ({"seed": -1}, r"seed is -1; expected 0 to 4294967295"),
        ({"seed": 2**32}, r"seed is 4294967296"),
        ({"seed": 1.0}, r"seed is 1\.0"),
        ({"seed": True}, r"seed is True"),
        ({"echo_factor": 2, "replay": {0: [1]}}, r"replay is given, but echo_factor is 2; expected 'auto'"),
        ({"read_ahead": False}, r"read_ahead is False, but echo_factor 'auto'"),
    ],
)
def test_other_bad_arguments_are_refused_by_name_and_value(arguments, text):
    with pytest.raises(ValueError, match=text):
        BatchEcho(**arguments)


def test_more_pieces_than_a_batch_has_samples_are_refused_before_the_first_step():
    model = EchoModel()
    with pytest.raises(ValueError, match=r"num_splits is 9; expected at most the DataLoader's batch_size, 8"):
        fit(echo(2, num_splits=9), model=model)
    assert model.steps == []


def test_two_of_them_are_refused_by_the_trainer_already():
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `BatchEcho`"):
        make_trainer(callbacks=[echo(2), EarlyStopping("val_loss"), echo("auto")])


class Renamed(BatchEcho):
    """Has a state key of its own, so the Trainer takes both."""


def test_two_of_them_are_refused_where_the_trainer_cannot_tell():
    with pytest.raises(ValueError, match="the Trainer has more than one BatchEcho; expected one"):
        fit([echo(2), EarlyStopping("val_loss"), Renamed("auto")])
    trainer = make_trainer(callbacks=[echo(2)], max_epochs=1)
    trainer.callbacks.append(echo(2))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the Trainer has more than one BatchEcho; expected one"):
        fit(trainer=trainer)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning")
def test_nothing_is_stood_in_for_where_the_step_fetches_by_itself():
    class Fetching(EchoModel):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            self.steps.append((self.current_epoch, batch[1].tolist()))
            return self.loss_of(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass

    warning = r"BatchEcho does nothing: training_step\(dataloader_iter\) fetches its batches by itself"
    with pytest.warns(UserWarning, match=warning):
        model, _ = fit(echo(2), model=Fetching(), max_epochs=1)
    assert model.samples == [list(range(8)), list(range(8, 16)), list(range(16, 22))]


# Learning rate -----------------------------------------------------------------------------------------------


RATE_WARNING = "Steps on repeated samples point the same way"


def rate_warnings(*trainings: Any) -> list[str]:
    return [text for text in warnings_of(lambda: [training() for training in trainings]) if RATE_WARNING in text]


def test_an_unscaled_rate_is_warned_of_once_with_the_reason():
    callback = BatchEcho(3)
    [text] = rate_warnings(lambda: fit(callback), lambda: fit(callback))
    assert "uses a batch 3 times with the learning rate as it is" in text
    assert "scale_lr='inverse' divides it by the echo factor; scale_lr='keep' says" in text


@pytest.mark.parametrize(
    "callback",
    [
        BatchEcho(3, scale_lr="keep"),
        BatchEcho(3, scale_lr="inverse"),
        BatchEcho(1, num_splits=4),
        BatchEcho(1),
        BatchEcho("auto", max_echo_factor=1),
    ],
)
def test_a_rate_that_is_right_is_not_warned_of(callback):
    assert rate_warnings(lambda: fit(callback)) == []


def test_auto_warns_of_the_rate_only_when_it_echoes():
    callback = BatchEcho("auto")
    assert rate_warnings(lambda: fit(callback, model=EchoModel(after_step=Pace()))) == []
    [text] = rate_warnings(lambda: paced(PASSES, callback))
    assert "uses a batch up to 5 times" in text


def test_inverse_divides_the_rate_of_every_step_and_nobody_else_sees_it(tmp_path):
    kept, trainer = fit(echo(4), model=EchoModel(schedule="onecycle"))
    scaled, same = fit(echo(4, scale_lr="inverse"), model=EchoModel(schedule="onecycle"))
    assert scaled.rates == [rate / 4 for rate in kept.rates]
    assert same_bits(
        [config.scheduler.state_dict() for config in same.lr_scheduler_configs],
        [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    )
    groups = [[{**group, "params": None} for group in t.optimizers[0].param_groups] for t in (same, trainer)]
    assert groups[0] == groups[1]
    assert not torch.equal(kept.layer.weight, scaled.layer.weight)


@pytest.mark.parametrize("is_automatic", [True, False])
def test_inverse_is_a_training_at_the_divided_rate(is_automatic):
    class Quarter(EchoModel):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.param_groups[0]["lr"] /= 4
            return optimizer

    scaled, _ = fit(echo(4, scale_lr="inverse"), model=EchoModel(is_automatic=is_automatic))
    quarter, _ = fit(echo(4), model=Quarter(is_automatic=is_automatic))
    assert same_bits(scaled.state_dict(), quarter.state_dict())


def test_inverse_holds_for_a_rate_that_the_step_itself_sets():
    class Warmup(EchoModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = 0.01 * (self.trainer.global_step + 1)
            return super().training_step(batch, batch_idx)

    _, trainer = fit(echo(4), model=Warmup())
    _, same = fit(echo(4, scale_lr="inverse"), model=Warmup())
    # With SGD and momentum the first update is the rate times the gradient, which is the same in both.
    start = EchoModel().layer.weight
    assert same.optimizers[0].param_groups[0]["lr"] == trainer.optimizers[0].param_groups[0]["lr"]
    one_kept, _ = fit(echo(4), model=Warmup(), max_steps=1)
    one_scaled, _ = fit(echo(4, scale_lr="inverse"), model=Warmup(), max_steps=1)
    torch.testing.assert_close(one_scaled.layer.weight - start, (one_kept.layer.weight - start) / 4)


def test_with_auto_inverse_goes_by_how_often_batches_were_used_of_late():
    callback = echo("auto", scale_lr="inverse", replay={0: [1, 4, 1]})
    model, _ = fit(callback, model=EchoModel(), max_epochs=1)
    # Mean of the batch at hand and those before it.
    expected = [1, 1, 3 / 2, 2, 5 / 2, 2]
    assert model.rates == pytest.approx([0.1 / factor for factor in expected])


def test_the_rates_are_whole_again_when_a_step_raises():
    class Failing(EchoModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(self.steps) == 5:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    model = Failing()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(echo(4, scale_lr="inverse"), model=model)
    optimizer = model.optimizers(use_pl_optimizer=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]  # type: ignore[union-attr]
    assert not optimizer._optimizer_step_pre_hooks  # type: ignore[union-attr]


# What it says ------------------------------------------------------------------------------------------------


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is said at the level of information."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield said
    logger.removeHandler(handler)
    logger.setLevel(level)


def own_lines(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith("BatchEcho")]


def test_one_line_an_epoch_says_what_was_fresh_and_what_was_echoed(lines):
    callback = echo(3, num_splits=2)
    fit(callback)
    said = own_lines(lines)
    assert [line.split(";")[0] for line in said] == [
        f"BatchEcho, epoch {epoch}: 3 fresh batches, 12 echoed steps, echo factor 3" for epoch in (0, 1)
    ]
    assert all("\n" not in line and " of the time" in line for line in said)
    assert [str(report) for report in callback.reports] == said
    # R and what of the echo was free are measured, here with e > R or not.
    for line, report in zip(said, callback.reports, strict=True):
        [ratio] = re.findall(r"R = (?:at most )?(less than )?([\d.,]+)", line)
        assert report.load_ratio is not None
        if not ratio[0]:
            assert float(ratio[1]) == pytest.approx(report.load_ratio, rel=0.01)  # three digits are shown
        assert ("(e > R)" in line) == (report.load_ratio < 3 - 0.01)
        assert ("(e <= R)" in line) != ("(e > R)" in line)


def test_a_slow_loader_makes_the_echo_free(lines):
    # The gate opens only when four passes are done, so a batch takes longer than several passes.
    callback = echo("auto", max_echo_factor=5)
    paced([4] * 3 + [1], callback, max_epochs=1)
    [line] = own_lines(lines)
    assert line.startswith("BatchEcho, epoch 0: 4 fresh batches, 9 echoed steps, echo factor 3.2")
    [report] = callback.reports
    assert report.load_ratio is not None
    assert report.load_ratio > 2
    assert " of the echo was free (" in line


def test_without_echo_nothing_is_said_of_what_was_free(lines):
    fit(echo("auto"), model=EchoModel(after_step=Pace()))
    said = own_lines(lines)
    assert len(said) == 2
    assert all("0 echoed steps, echo factor 1;" in line and "free" not in line for line in said)


def test_nothing_is_said_where_nothing_is_done(lines):
    fit(echo(1))
    assert own_lines(lines) == []


def test_validation_is_no_part_of_the_time_of_an_epoch():
    class Clocked(EchoModel):
        seconds = 0.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            begin = time.perf_counter()
            while time.perf_counter() - begin < 0.02:
                super().validation_step(batch, batch_idx)
            Clocked.seconds += time.perf_counter() - begin

    callback = echo(2, num_splits=2)
    begin = time.perf_counter()
    fit(callback, model=Clocked(), val=plain_loader(4, 2), val_check_interval=1, max_epochs=1)
    elapsed = time.perf_counter() - begin
    [report] = callback.reports
    assert 0 < report.elapsed_seconds <= elapsed - Clocked.seconds


def test_figures_reach_every_logger(tmp_path):
    memory = MemoryLogger()
    loggers = [CSVLogger(tmp_path), memory]
    callback = echo(3, num_splits=2)
    _, trainer = fit(callback, logger=loggers)
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    expected = {f"gpufeed/echo/{name}" for name in ("fresh_batches", "echoed_steps", "factor", "wait_share")}
    assert expected | {"gpufeed/echo/load_ratio", "gpufeed/echo/free_share", "step"} <= set(names)
    logged = [(step, metrics) for step, metrics in memory.logged if "gpufeed/echo/factor" in metrics]
    assert [step for step, _ in logged] == [18, 36]
    assert [metrics["gpufeed/echo/fresh_batches"] for _, metrics in logged] == [3.0, 3.0]
    assert [metrics["gpufeed/echo/echoed_steps"] for _, metrics in logged] == [12.0, 12.0]
    assert [metrics["gpufeed/echo/factor"] for _, metrics in logged] == [3.0, 3.0]
    assert trainer.global_step == 36


# Other callbacks, copies -------------------------------------------------------------------------------------


class Copying(pl.Callback):
    """Copies and saves the whole module in the middle of a training."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        buffer = io.BytesIO()
        torch.save(pl_module, buffer)
        buffer.seek(0)
        self.copies += [
            copy.deepcopy(pl_module),
            torch.load(buffer, weights_only=False),
            pickle.loads(pickle.dumps(pl_module)),
        ]


@pytest.mark.parametrize("position", ["before", "after"])
def test_a_copy_of_the_module_made_in_the_middle_is_a_module_like_any_other(position):
    copying = Copying()
    callbacks = [echo(2, num_splits=2), copying] if position == "before" else [copying, echo(2, num_splits=2)]
    reference, _ = fit(echo(2, num_splits=2), max_epochs=1)
    model, _ = fit(callbacks, max_epochs=1)
    assert same_bits(model.state_dict(), reference.state_dict())
    assert len(copying.copies) == 36
    for made in copying.copies[:3]:
        assert type(made) is EchoModel
        # It can be trained by itself, with all of its hooks for every batch.
        made.steps, made.hooks = [], []
        made.trainer = None
        plain, _ = fit(None, model=made, max_epochs=1)
        assert plain.hooks == ["before", "transfer", "after", "step"] * 3


def test_it_can_come_from_the_module_itself():
    class Bringing(EchoModel):
        def configure_callbacks(self) -> Any:
            return echo(2, num_splits=2)

    model, trainer = fit(None, model=Bringing())
    assert len(model.steps) == trainer.global_step == 24
    assert_untouched(trainer, model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_copy_of_an_unused_callback_is_one_like_it(duplicate):
    one, _ = fit(echo(2, num_splits=2, seed=3))
    other, _ = fit(duplicate(echo(2, num_splits=2, seed=3)))
    assert one.steps == other.steps


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_copy_of_a_used_callback_keeps_what_it_recorded(duplicate):
    callback = echo("auto", replay={0: [2, 1, 3]})
    fit(callback, max_epochs=1)
    made = duplicate(callback)
    assert made.trace == callback.trace
    assert [str(report) for report in made.reports] == [str(report) for report in callback.reports]
    one, _ = fit(callback, max_epochs=1)
    other, _ = fit(made, max_epochs=1)
    assert one.steps == other.steps


def test_early_stopping_in_the_middle_of_an_echo_ends_the_training_there():
    class Stopping(EchoModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(self.steps) == 4:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    callback = echo(3, num_splits=2)
    model, trainer = fit(callback, model=Stopping())
    assert trainer.global_step == len(model.steps) == 5
    assert callback.trace == {0: [3]}


def test_skipping_the_rest_of_an_epoch_begins_the_next_one_with_a_fetch():
    class Skipping(EchoModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    model, trainer = fit(echo(3, num_splits=2), model=Skipping())
    assert [sorted(model.in_epoch(epoch)[0] + model.in_epoch(epoch)[1]) for epoch in (0, 1)] == [list(range(8))] * 2
    assert trainer.global_step == 6


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_a_profiler_sees_the_hooks(profiler, tmp_path):
    fit(echo(2, num_splits=2), profiler=profiler, max_epochs=1)
    _, trainer = fit(echo(2, num_splits=2), profiler=profiler, default_root_dir=tmp_path, max_epochs=1)
    if profiler == "simple":
        durations = trainer.profiler.recorded_durations
        counts = {name.rsplit(".", 1)[-1]: len(times) for name, times in durations.items() if "LightningModule" in name}
        assert counts["on_before_batch_transfer"] == counts["transfer_batch_to_device"] == 3
        assert counts["on_after_batch_transfer"] == 12


# DataModules of this package ---------------------------------------------------------------------------------


class StageModel(Recorder):
    """Notes the value of the first pixel, which the transforms mark with where they belong."""

    def __init__(self) -> None:
        super().__init__(72)
        self.marks: dict[str, set[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.marks.setdefault("train", set()).update(batch[0].flatten(1)[:, 0].tolist())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.marks.setdefault("val", set()).update(batch[0].flatten(1)[:, 0].tolist())
        super().validation_step(batch, batch_idx)


def mark(images: torch.Tensor) -> torch.Tensor:
    """A device transform that works in place, and twice if it is applied twice."""
    images[..., 0, 0] += 1000
    return images


@pytest.mark.parametrize("echo_factor", [3, "auto"])
def test_the_transforms_of_training_and_validation_are_never_mixed_up_in_the_middle_of_an_echo(tmp_path, echo_factor):
    files = write_images(tmp_path / "train.h5", 22), write_images(tmp_path / "val.h5", 6, seed=1)
    replay = {epoch: [3, 3, 3] for epoch in (0, 1)} if echo_factor == "auto" else None
    data = H5ImageDataModule(files[0], val=files[1], batch_size=8, mean=None, std=None, device_transform=mark)
    model = StageModel()
    callback = echo(echo_factor, num_splits=2, replay=replay)
    trainer = make_trainer(callbacks=[callback], max_epochs=2, val_check_interval=1, num_sanity_val_steps=1)
    trainer.fit(model, data)
    assert trainer.global_step == len(model.trained) == 36
    assert len(model.evaluated["validate"]) == 36
    assert all(1000 <= value < 1001 + 255 for value in model.marks["train"])
    assert all(0 <= value <= 255 for value in model.marks["val"])
    assert model.trained_by_epoch[0] != model.trained_by_epoch[1]
    assert all(sorted(samples) == sorted(3 * list(range(22))) for samples in model.trained_by_epoch.values())


def test_a_file_that_is_read_fast_enough_is_never_echoed_and_trained_on_as_without_the_callback(tmp_path):
    files = write_images(tmp_path / "train.h5", 50), write_images(tmp_path / "val.h5", 6, seed=1)

    def trained(callback: BatchEcho | None) -> dict[str, Any]:
        class Waiting(Recorder):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                loss = super().training_step(batch, batch_idx)
                if callback is not None:
                    wait_until(self.trainer.train_dataloader.is_ready)
                return loss

        model = Waiting(72, schedule=True)
        settings = {"val_check_interval": 0.5, "accumulate_grad_batches": 2}
        trainer = make_trainer(callbacks=[] if callback is None else [callback], max_epochs=3, **settings)
        trainer.fit(model, H5ImageDataModule(files[0], val=files[1], batch_size=8))
        return state_of(trainer, model) | {"trained": model.trained, "validated": model.evaluated["validate"]}

    callback = echo("auto")
    assert differences(trained(callback), trained(None)) == []
    assert [report.num_echo_steps for report in callback.reports] == [0, 0, 0]


def test_arrays_of_any_kind_are_echoed_from_a_file(tmp_path):
    write_images(tmp_path / "train.h5", 22)
    model = Recorder(72)

    class Batch(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step((batch["images"].float(), batch["labels"]), batch_idx)

    model = Batch(72)
    trainer = make_trainer(callbacks=[echo(2, num_splits=2)], max_epochs=1)
    trainer.fit(model, H5DataModule(tmp_path / "train.h5", batch_size=8))
    assert sorted(model.trained_by_epoch[0]) == sorted(2 * list(range(22)))
    assert [len(samples) for _, samples in model.trained] == [4] * 8 + [3] * 4


# Again, afterwards, and when it breaks -----------------------------------------------------------------------


def reading_threads() -> set[threading.Thread]:
    """Threads of this package that are alive."""
    return {thread for thread in threading.enumerate() if "gpufeed" in thread.name}


def assert_untouched(trainer: pl.Trainer, model: pl.LightningModule) -> None:
    """Nothing of the callback is left in the places where it stands."""
    assert {"process_dataloader", "batch_to_device"}.isdisjoint(vars(trainer.strategy))
    assert "_on_before_batch_transfer" not in vars(model)
    assert "update_lr_schedulers" not in vars(trainer.fit_loop.epoch_loop)
    assert not reading_threads()
    for optimizer in trainer.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("echo_factor", [2, "auto"])
def test_the_same_callback_trains_twice_and_each_time_as_the_first(echo_factor):
    replay = {0: [2, 1, 3], 1: [1, 1, 2]} if echo_factor == "auto" else None
    callback = echo(echo_factor, num_splits=2, scale_lr="inverse", replay=replay)
    one = outcome(*fit(callback))
    trace = callback.trace
    other = outcome(*fit(callback))
    assert differences(one, other) == []
    assert callback.trace == trace
    assert [report.epoch for report in callback.reports] == [0, 1, 0, 1]


def test_the_same_trainer_goes_on_for_more_epochs():
    whole, _ = fit(echo(2, num_splits=2), max_epochs=4)
    callback = echo(2, num_splits=2)
    model, trainer = fit(callback, max_epochs=2)
    trainer.fit_loop.max_epochs = 4
    fit(loader=plain_loader(), model=model, trainer=trainer)
    assert model.steps == whole.steps
    assert trainer.global_step == 48
    assert_untouched(trainer, model)


@pytest.mark.parametrize("make", [plain_loader, Batches, StatefulBatches, Unsized])
def test_going_on_for_more_epochs_works_with_every_kind_of_loader(make):
    whole, _ = fit(echo(2, num_splits=2), make(), max_epochs=3)
    loader = make()
    model, trainer = fit(echo(2, num_splits=2), loader, max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    fit(loader=loader, model=model, trainer=trainer)
    # A loader with an order of its own per epoch may have begun one that was never used, as plain Lightning does.
    assert [[len(samples) for samples in model.in_epoch(epoch)] for epoch in range(3)] == [
        [len(samples) for samples in whole.in_epoch(epoch)] for epoch in range(3)
    ]
    for epoch in range(3):
        steps = model.in_epoch(epoch)
        assert sorted(sample for samples in steps for sample in samples) == sorted(2 * list(range(22)))
        assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3])


def test_evaluation_after_and_before_training_is_what_it_is_without_the_callback():
    def evaluated(callback: BatchEcho | None) -> list[Any]:
        model = EchoModel()
        trainer = make_trainer(max_epochs=1, callbacks=[] if callback is None else [callback])
        val = plain_loader(6, 4)
        # One pass in order, so that both trainings are the same.
        results = [trainer.validate(model, val, verbose=False)]
        trainer.fit(model, plain_loader(), val)
        results += [
            trainer.validate(model, val, verbose=False),
            trainer.test(model, val, verbose=False),
            model.validated,
        ]
        assert_untouched(trainer, model)
        return results

    assert evaluated(echo("auto", replay={0: [1, 1, 1]})) == evaluated(None)


def test_validation_in_the_middle_of_an_echo_gets_its_own_batches():
    model, _ = fit(echo(3, num_splits=2), val=plain_loader(5, 2), val_check_interval=1, max_epochs=1)
    assert model.validated == [[0, 1], [2, 3], [4]] * 18
    passes_of(model.samples, [list(range(8)), list(range(8, 16)), list(range(16, 22))], 3, 2)


class Breaking(EchoModel):
    """Raises in one of its hooks, in the middle of an echo."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def breaks(self, where: str) -> None:
        if where == self.where and len(self.steps) == 5:
            raise self.error

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.breaks("after")
        return super().on_after_batch_transfer(batch, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.breaks("step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.breaks("end")
        super().on_train_batch_end(outputs, batch, batch_idx)


@pytest.mark.parametrize("where", ["after", "step", "end"])
@pytest.mark.parametrize("error", [RuntimeError("on purpose"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("echo_factor", [3, "auto"])
def test_an_error_or_an_interrupt_takes_everything_back(where, error, echo_factor):
    replay = {0: [3, 3, 3]} if echo_factor == "auto" else None
    callback = echo(echo_factor, scale_lr="inverse", num_splits=2, replay=replay)
    model = Breaking(where, error)
    trainer = make_trainer(max_epochs=1, callbacks=[callback])
    kind = SystemExit if isinstance(error, KeyboardInterrupt) else RuntimeError
    with pytest.raises(kind):
        fit(loader=plain_loader(), model=model, trainer=trainer)
    assert len(model.steps) == 5
    assert_untouched(trainer, model)
    # And the callback can be used again.
    fresh, _ = fit(callback, max_epochs=1)
    assert len(fresh.steps) == 18


def test_an_error_of_the_loader_comes_through_with_its_own_type_when_its_batch_is_due():
    class Broken(Batches):
        def batch(self, number: int) -> list[torch.Tensor]:
            if number == 2:
                raise KeyError("sample 17")
            return super().batch(number)

    model = EchoModel()
    trainer = make_trainer(max_epochs=1, callbacks=[echo(2, num_splits=2)])
    with pytest.raises(KeyError, match="sample 17"):
        fit(loader=Broken(), model=model, trainer=trainer)
    assert len(model.steps) == 8
    assert_untouched(trainer, model)


def test_an_error_before_training_begins_takes_everything_back():
    class Unready(EchoModel):
        def configure_optimizers(self) -> Any:
            raise RuntimeError("on purpose")

    model = Unready()
    trainer = make_trainer(callbacks=[echo(2, scale_lr="inverse")], max_epochs=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(loader=plain_loader(), model=model, trainer=trainer)
    assert_untouched(trainer, model)


def test_an_error_in_the_setup_of_another_callback_takes_everything_back():
    class Unready(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            raise RuntimeError("on purpose")

    model = EchoModel()
    trainer = make_trainer(callbacks=[echo(2), Unready()], max_epochs=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(model=model, trainer=trainer)
    assert_untouched(trainer, model)


def test_no_thread_is_left_when_a_training_ends_in_the_middle_of_an_epoch():
    callback = echo(2, num_splits=2)
    model, trainer = fit(callback, max_steps=5)
    assert len(model.steps) == 5
    assert_untouched(trainer, model)


def test_no_thread_stays_for_an_epoch_that_is_over():
    running: list[int] = []

    class Counting(Hookless):
        def on_train_epoch_end(self) -> None:
            running.append(len(reading_threads()))

    data = PlainData(num_samples=48, batch_size=8)
    # Two of six batches: the thread of each epoch holds a batch that nobody takes.
    fit(
        echo(2),
        data,
        model=Counting(),
        max_epochs=5,
        limit_train_batches=4,
        reload_dataloaders_every_n_epochs=1,
    )
    assert max(running) <= 1, running


def test_a_training_without_batches_is_left_alone():
    model, trainer = fit(echo(2), limit_train_batches=0)
    assert model.steps == []
    assert_untouched(trainer, model)
