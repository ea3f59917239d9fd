"""With `BatchEcho` every counter of the Trainer counts the steps that really took place.

Also here: progress bars, Lightning's tuner, loaders without a length, and what is counted with "auto", where an epoch
grows while it runs.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpufeed import BatchEcho
from tests.callbacks.echo_models import (
    Batches,
    EchoModel,
    Gate,
    Pace,
    StatefulBatches,
    StatefulUnsized,
    Unsized,
    batch_of,
    echo,
    fit,
    gated_loader,
    numbered,
    plain_loader,
)
from tests.datamodules.models import MemoryLogger, make_trainer, same_bits

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning"
)


def fetches(steps: list[list[int]], batch_size: int = 8) -> list[int]:
    """Which batch of a loader in order each step was on."""
    return [samples[0] // batch_size for samples in steps]


# A fixed echo: 22 samples in 8, 8, 6; two passes in two pieces: 12 steps -----------------------------------


COUNTED: list[tuple[dict[str, Any], int, int]] = [
    ({}, 24, 24),
    ({"accumulate_grad_batches": 3}, 24, 8),
    ({"accumulate_grad_batches": 5}, 24, 6),  # the last one of an epoch steps anyway: 5, 5, 2
    ({"accumulate_grad_batches": 100}, 24, 2),
    ({"limit_train_batches": 7}, 14, 14),
    ({"limit_train_batches": 100}, 24, 24),
    ({"limit_train_batches": 0.5}, 12, 12),
    ({"limit_train_batches": 0.3}, 6, 6),  # int(3.6)
    ({"limit_train_batches": 7, "accumulate_grad_batches": 2}, 14, 8),
    ({"max_steps": 7}, 7, 7),
    ({"max_steps": 7, "max_epochs": -1}, 7, 7),
    ({"max_steps": 17, "max_epochs": -1}, 17, 17),
    ({"max_steps": 3, "accumulate_grad_batches": 2}, 6, 3),
    ({"max_steps": 100}, 24, 24),
    ({"max_epochs": 1}, 12, 12),
    ({"fast_dev_run": True}, 1, 1),
    ({"fast_dev_run": 5}, 5, 5),
]


@pytest.mark.parametrize(
    ("given", "steps", "optimizer_steps", "schedule"),
    [(*one, schedule) for i, one in enumerate(COUNTED) for schedule in ("onecycle", (None, "cosine")[i % 2])],
)
def test_steps_are_counted_limited_and_foreseen_exactly(given, steps, optimizer_steps, schedule):
    model, trainer = fit(echo(2, num_splits=2), model=EchoModel(schedule=schedule), val=plain_loader(4, 2), **given)
    assert len(model.steps) == steps
    assert trainer.global_step == len(model.rates) == optimizer_steps
    if schedule is not None:
        # What a schedule was made for is what happens, and it moves once per optimizer step.
        assert model.estimate == optimizer_steps
        assert model.moves[-1] == optimizer_steps
        assert sorted(set(model.moves)) == sorted(set(model.moves) | set(range(1, optimizer_steps + 1)))


def test_the_number_of_batches_of_an_epoch_is_its_number_of_steps_from_the_begin_on():
    class Asking(EchoModel):
        asked: list[float]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.asked = [*getattr(self, "asked", []), self.trainer.num_training_batches]
            return super().training_step(batch, batch_idx)

    model, trainer = fit(echo(2, num_splits=2), model=Asking())
    assert model.asked == [12] * 24
    assert model.batch_indices == 2 * list(range(12))
    assert len(trainer.train_dataloader) == 12


@pytest.mark.parametrize(
    ("given", "at"),
    [
        ({}, [12, 24]),
        ({"val_check_interval": 1.0}, [12, 24]),
        ({"val_check_interval": 0.5}, [6, 12, 18, 24]),
        ({"val_check_interval": 0.3}, [3, 6, 9, 12, 15, 18, 21, 24]),
        ({"val_check_interval": 5}, [5, 10, 17, 22]),
        ({"val_check_interval": 12}, [12, 24]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10, 15, 20]),
        ({"val_check_interval": 20, "check_val_every_n_epoch": None}, [20]),
        ({"check_val_every_n_epoch": 2}, [24]),
        ({"limit_train_batches": 7, "val_check_interval": 7}, [7, 14]),
        ({"limit_train_batches": 0.5, "val_check_interval": 0.5}, [3, 6, 9, 12]),
    ],
)
def test_validation_comes_when_its_interval_in_steps_is_over(given, at):
    model, _ = fit(echo(2, num_splits=2), val=plain_loader(4, 2), **given)
    assert [steps for _, steps, _ in model.validations] == at
    assert [step for _, _, step in model.validations] == at


def test_an_interval_longer_than_an_epoch_is_one_in_steps():
    with pytest.raises(ValueError, match=r"`val_check_interval` \(13\) must be less than or equal .* \(12\)"):
        fit(echo(2, num_splits=2), val=plain_loader(4, 2), val_check_interval=13)


def test_min_steps_are_steps():
    class Stopping(EchoModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = True

    _, trainer = fit(echo(2, num_splits=2), model=Stopping(), min_steps=17, max_epochs=5, max_steps=-1)
    assert trainer.global_step == 17


def test_overfit_batches_are_steps_on_the_first_samples():
    model, trainer = fit(echo(2, num_splits=2), val=plain_loader(22, 8), overfit_batches=4, max_epochs=3)
    assert trainer.global_step == 12
    assert set(fetches(model.samples)) == {0}


def test_a_checkpoint_every_n_steps_and_the_log_go_by_steps(tmp_path):
    logger = MemoryLogger()
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)

    class Logging(EchoModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    monitor = LearningRateMonitor(logging_interval="step")
    fit(
        [echo(2, num_splits=2, scale_lr="inverse"), saving, monitor],
        model=Logging(schedule="onecycle"),
        logger=logger,
        enable_checkpointing=True,
        log_every_n_steps=4,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={step}.ckpt" for step in (10, 15, 20, 5)]
    assert [step for step, metrics in logger.logged if "loss" in metrics] == [3, 7, 11, 15, 19, 23]
    rates = [metrics["lr-RateSGD"] for _, metrics in logger.logged if "lr-RateSGD" in metrics]
    assert len(rates) == 6
    assert max(rates) > 0.15  # of the schedule's 0.2, so not divided


class Recording:
    """Notes the totals of a bar at the end of every step."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.totals: list[float | None] = []

    def __call__(self, model: EchoModel) -> None:
        if isinstance(self.bar, TQDMProgressBar):
            self.totals.append(self.bar.train_progress_bar.total)
        else:
            task = self.bar.progress.tasks[self.bar.train_progress_bar_id]
            self.totals.append(task.total)


class TwoCalls(EchoModel):
    """Calls two things after each step."""

    def __init__(self, *calls: Any, **settings: Any) -> None:
        def both(model: EchoModel) -> None:
            for call in calls:
                call(model)

        super().__init__(after_step=both, **settings)


BARS = [TQDMProgressBar, RichProgressBar]


@pytest.mark.parametrize("kind", BARS)
@pytest.mark.parametrize("given", [{}, {"limit_train_batches": 7}])
def test_a_progress_bar_goes_to_the_number_of_steps(kind, given, capsys):
    recording = Recording(kind(refresh_rate=1))
    fit([echo(2, num_splits=2), recording.bar], model=TwoCalls(recording), enable_progress_bar=True, **given)
    steps = given.get("limit_train_batches", 12)
    assert recording.totals == [steps] * 2 * steps
    assert recording.bar.total_train_batches == steps
    printed = capsys.readouterr()
    assert f"{steps}/{steps}" in printed.out + printed.err


@pytest.mark.parametrize("kind", BARS)
def test_the_total_of_a_progress_bar_grows_with_auto_by_each_echo(kind, capsys):
    gate = Gate()
    recording = Recording(kind(refresh_rate=1))
    model = TwoCalls(recording, Pace(gate, [1, 3, 2, 1, 1, 2, 1, 1], 2))
    _, trainer = fit(
        [echo("auto", num_splits=2), recording.bar], gated_loader(gate), model=model, enable_progress_bar=True
    )
    # 8 without echoes; each pass more than one is 2 more, from its own first step on.
    first = [8, 8, 8, 8, 10, 10, 12, 12, 12, 12, 14, 14, 14, 14]
    second = [8, 8, 8, 8, 10, 10, 10, 10, 10, 10]
    assert recording.totals == first + second
    assert trainer.global_step == len(first) + len(second)
    printed = capsys.readouterr()
    assert "10/10" in printed.out + printed.err


@pytest.mark.parametrize("kind", BARS)
def test_a_progress_bar_without_a_total_stays_without_one(kind, capsys):
    recording = Recording(kind(refresh_rate=1))
    fit([echo(2, num_splits=2), recording.bar], Unsized(), model=TwoCalls(recording), enable_progress_bar=True)
    plain = Recording(kind(refresh_rate=1))
    fit([plain.bar], Unsized(), model=TwoCalls(plain), enable_progress_bar=True)
    assert recording.totals == [plain.totals[0]] * 24
    assert recording.totals[0] in (None, math.inf)
    assert capsys.readouterr()


# Loaders without a length ------------------------------------------------------------------------------------


class Numbers(IterableDataset[Any]):
    """An iterable dataset."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*numbered(self.num_samples).tensors, strict=True))


def iterable_loader() -> DataLoader[Any]:
    return DataLoader(Numbers(22), batch_size=8)


@pytest.mark.parametrize("make", [Unsized, StatefulUnsized, iterable_loader])
@pytest.mark.parametrize(
    ("given", "steps", "at"),
    [
        ({}, 24, [12, 24]),
        ({"val_check_interval": 5}, 24, [5, 10, 17, 22]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, 24, [5, 10, 15, 20]),
        ({"limit_train_batches": 7}, 14, [7, 14]),
        ({"max_steps": 17, "max_epochs": -1}, 17, [12]),
        ({"accumulate_grad_batches": 5}, 24, [12, 24]),
        ({"reload_dataloaders_every_n_epochs": 1}, 24, [12, 24]),
    ],
)
def test_without_a_length_every_step_is_counted_and_the_last_one_known(make, given, steps, at):
    model = EchoModel()
    model.train_dataloader = make  # type: ignore[method-assign]
    model.val_dataloader = lambda: plain_loader(4, 2)  # type: ignore[method-assign]
    trainer = make_trainer(callbacks=[echo(2, num_splits=2)], **{"max_epochs": 2} | given)
    trainer.fit(model)
    assert len(model.steps) == steps
    assert [done for _, done, _ in model.validations] == at
    assert trainer.global_step == steps if "accumulate_grad_batches" not in given else 6
    assert math.isinf(trainer.num_training_batches) or trainer.num_training_batches == 7
    for epoch in range(2):
        pieces = model.in_epoch(epoch)
        if len(pieces) == 12:
            assert sorted(sample for piece in pieces for sample in piece) == sorted(2 * list(range(22)))
            assert sorted(pieces[0] + pieces[1]) == sorted(pieces[2] + pieces[3])


def test_without_a_length_a_schedule_counts_the_steps_of_max_steps():
    model, trainer = fit(
        echo(2, num_splits=2), Unsized(), model=EchoModel(schedule="onecycle"), max_steps=17, max_epochs=-1
    )
    assert model.estimate == trainer.global_step == model.moves[-1] == 17


# Auto --------------------------------------------------------------------------------------------------------


PASSES = [1, 3, 2, 1, 4, 1, 2, 1]  # over the four batches of each of two epochs


def paced(
    callback: BatchEcho, passes: list[int] = PASSES, num_splits: int = 1, schedule: str | None = None, **settings: Any
) -> tuple[EchoModel, pl.Trainer]:
    """A training whose loader is late by so many passes: 32 samples in four batches."""
    gate = Gate()
    model = EchoModel(schedule=schedule, after_step=Pace(gate, passes, num_splits))
    return fit(callback, gated_loader(gate), model=model, **settings)


def test_with_auto_an_epoch_has_its_usual_length_until_it_is_echoed():
    class Asking(EchoModel):
        asked: list[float]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.asked = [*getattr(self, "asked", []), self.trainer.num_training_batches]

    gate = Gate()
    model, trainer = fit(echo("auto"), gated_loader(gate), model=Asking(after_step=Pace(gate, PASSES)))
    assert model.asked == [*[4, 4, 5, 6, 6, 7, 7], *[4, 5, 6, 7, 7, 7, 8, 8]]
    assert model.batch_indices == [*range(7), *range(8)]
    assert trainer.global_step == 15


@pytest.mark.parametrize("schedule", ["onecycle", "cosine"])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_with_auto_a_schedule_goes_by_fresh_batches_and_ends_with_them(schedule, num_splits):
    model, trainer = paced(echo("auto", num_splits=num_splits), num_splits=num_splits, schedule=schedule)
    assert trainer.global_step == 15 * num_splits
    assert model.estimate == 8 * num_splits
    # It moves at the steps of a first pass and rests at those of an echo.
    moves, expected = 0, []
    for passes in PASSES:
        for pass_index in range(passes):
            for _ in range(num_splits):
                moves += pass_index == 0
                expected.append(moves)
    assert model.moves == expected
    assert model.moves[-1] == model.estimate


@pytest.mark.parametrize("accumulate", [2, 3])
def test_with_auto_and_accumulation_a_schedule_ends_where_it_was_made_to_end(accumulate):
    model, trainer = paced(echo("auto"), schedule="onecycle", accumulate_grad_batches=accumulate)
    # Of 7 and 8 steps.
    assert trainer.global_step == len(model.rates) == math.ceil(7 / accumulate) + math.ceil(8 / accumulate)
    assert model.estimate == 2 * math.ceil(4 / accumulate)
    assert model.moves[-1] == model.estimate


@pytest.mark.parametrize("interval", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_with_auto_a_share_of_an_epoch_is_one_of_its_fresh_batches(interval, num_splits):
    model, _ = paced(
        echo("auto", num_splits=num_splits), num_splits=num_splits, val=plain_loader(4, 2), val_check_interval=interval
    )
    every = int(4 * num_splits * interval)
    fresh = [number for number in range(1, 4 * num_splits + 1) if number % every == 0]
    assert len(model.validations) == 2 * len(fresh)
    # The step after which a validation comes, as (batch, whether its samples were new).
    done = 0
    expected = []
    for epoch in (0, 1):
        number = 0
        for passes in PASSES[4 * epoch : 4 * epoch + 4]:
            for pass_index in range(passes):
                for _ in range(num_splits):
                    done += 1
                    number += pass_index == 0
                    if pass_index == 0 and number in fresh:
                        expected.append((epoch, done))
    if interval == 1.0:  # after the last step, which never is an echo here
        expected = [(0, 7 * num_splits), (1, 15 * num_splits)]
    assert [(epoch, steps) for epoch, steps, _ in model.validations] == expected


def test_with_auto_an_interval_in_steps_stays_one_in_steps():
    model, _ = paced(echo("auto"), val=plain_loader(4, 2), val_check_interval=3)
    assert [steps for _, steps, _ in model.validations] == [3, 6, 7 + 3, 7 + 6]


def test_with_auto_an_interval_across_epochs_stays_one_in_steps():
    model, _ = paced(echo("auto"), val=plain_loader(4, 2), val_check_interval=4, check_val_every_n_epoch=None)
    assert [steps for _, steps, _ in model.validations] == [4, 8, 12]


@pytest.mark.parametrize("echo_factor", [2, "auto"])
@pytest.mark.parametrize("interval", [datetime.timedelta(days=1), "01:00:00:00", {"days": 1}])
def test_an_interval_in_time_works(echo_factor, interval):
    replay = {0: [2, 2, 2]} if echo_factor == "auto" else None
    model, trainer = fit(
        echo(echo_factor, replay=replay), val=plain_loader(4, 2), val_check_interval=interval, max_epochs=1
    )
    assert trainer.global_step == 6
    assert model.validations == []


def test_an_interval_in_time_that_is_over_at_every_step_validates_after_each():
    model, trainer = fit(
        echo("auto", replay={0: [2, 2, 2]}),
        val=plain_loader(4, 2),
        val_check_interval=datetime.timedelta(microseconds=1),
        max_epochs=1,
    )
    assert trainer.global_step == 6
    assert [steps for _, steps, _ in model.validations] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("limit", "num_batches"), [(0.5, 2), (0.75, 3), (1.0, 4)])
def test_with_auto_a_limit_that_is_a_share_is_one_of_the_fresh_batches(limit, num_batches):
    passes = [1, 3, 2, 1][:num_batches]
    callback = echo("auto", replay={0: passes, 1: passes})
    model, trainer = fit(callback, plain_loader(32, 8), model=EchoModel(schedule="onecycle"), limit_train_batches=limit)
    assert fetches(model.in_epoch(0)) == [batch for batch, times in enumerate(passes) for _ in range(times)]
    assert callback.trace == {0: passes, 1: passes}
    assert model.estimate == 2 * num_batches
    assert trainer.num_training_batches == sum(passes)


@pytest.mark.parametrize("limit", [2, 5, 6, 100])
def test_with_auto_a_limit_in_steps_is_one_in_steps(limit):
    model, trainer = paced(echo("auto"), [1, 3, 2, 1], limit_train_batches=limit, max_epochs=1)
    whole = [0, 1, 1, 1, 2, 2, 3]
    assert fetches(model.samples) == whole[:limit]
    assert trainer.global_step == min(limit, 7)


@pytest.mark.parametrize("max_steps", [1, 3, 5, 9, 14])
def test_with_auto_max_steps_are_exact(max_steps):
    model, trainer = paced(echo("auto"), max_steps=max_steps, max_epochs=-1)
    assert len(model.steps) == trainer.global_step == max_steps


@pytest.mark.parametrize("max_epochs", [-1, 2, 50])
def test_with_auto_a_schedule_that_max_steps_end_goes_by_steps(max_epochs):
    # Two epochs of 4 make 8 without echoes, so 8 steps end the training whatever is echoed.
    model, trainer = paced(echo("auto"), max_steps=8, max_epochs=max_epochs, schedule="onecycle")
    assert trainer.global_step == model.estimate == 8
    assert model.moves == list(range(1, 9))


def test_with_auto_a_schedule_that_max_epochs_end_goes_by_fresh_batches_though_max_steps_are_given():
    model, trainer = paced(echo("auto"), max_steps=1000, max_epochs=2, schedule="onecycle")
    assert trainer.global_step == 15
    assert model.estimate == model.moves[-1] == 8


def test_with_auto_a_plateau_schedule_goes_by_fresh_batches_too():
    class Logging(EchoModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    gate = Gate()
    _, trainer = fit(echo("auto"), gated_loader(gate), model=Logging(schedule="plateau", after_step=Pace(gate, PASSES)))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 8


def test_with_auto_and_accumulation_the_optimizer_steps_by_steps():
    model, trainer = paced(echo("auto"), accumulate_grad_batches=3, max_epochs=1)
    assert len(model.steps) == 7
    assert trainer.global_step == 3  # 3, 3 and the last one


def test_with_auto_everything_at_once():
    model, trainer = paced(
        echo("auto", num_splits=2, scale_lr="inverse"),
        num_splits=2,
        schedule="onecycle",
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        val=plain_loader(4, 2),
        gradient_clip_val=0.5,
    )
    assert len(model.steps) == 30
    assert trainer.global_step == 15
    assert model.estimate == model.moves[-1] == 8
    assert [(epoch, steps) for epoch, steps, _ in model.validations] == [(0, 4), (0, 14), (1, 24), (1, 30)]


def test_with_auto_the_usual_length_comes_back_in_every_epoch_and_with_reloaded_loaders():
    lengths: list[float] = []

    class Asking(EchoModel):
        def on_train_epoch_start(self) -> None:
            lengths.append(self.trainer.num_training_batches)

    model = Asking()
    model.train_dataloader = lambda: plain_loader(22, 8)  # type: ignore[method-assign]
    callback = echo("auto", replay={epoch: [3, 2, 1 + epoch] for epoch in range(4)})
    trainer = make_trainer(callbacks=[callback], max_epochs=4, reload_dataloaders_every_n_epochs=2, limit_val_batches=0)
    trainer.fit(model)
    assert lengths == [3] * 4
    assert [len(model.in_epoch(epoch)) for epoch in range(4)] == [6, 7, 8, 9]


def test_with_auto_and_an_iterable_without_length_the_echoes_are_counted():
    callback = echo("auto", replay={0: [2, 1, 3], 1: [1, 1, 2]}, num_splits=2)
    model, trainer = fit(callback, Unsized(), val=plain_loader(4, 2))
    assert trainer.global_step == len(model.steps) == 2 * (6 + 4)
    assert [steps for _, steps, _ in model.validations] == [12, 20]
    assert callback.trace == {0: [2, 1, 3], 1: [1, 1, 2]}


# Reloading, finding a batch size and a learning rate -----------------------------------------------------------


class Sized(EchoModel):
    """Makes its own loader, of a batch size that a tuner may change."""

    def __init__(self, batch_size: int = 4, make: Any = plain_loader, **settings: Any) -> None:
        super().__init__(**settings)
        self.batch_size, self.lr, self.make = batch_size, 0.1, make

    def train_dataloader(self) -> Any:
        return self.make(64, self.batch_size)

    def val_dataloader(self) -> Any:
        return plain_loader(6, 4)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.param_groups[0]["lr"] = self.lr
        return optimizer


@pytest.mark.parametrize("make", [plain_loader, Batches, StatefulBatches, Unsized, StatefulUnsized])
@pytest.mark.parametrize("every", [1, 2])
def test_reloaded_loaders_are_echoed_like_the_first_one(make, every):
    plain = Sized(8, make)
    make_trainer(max_epochs=4, reload_dataloaders_every_n_epochs=every).fit(plain)
    model = Sized(8, make)
    make_trainer(max_epochs=4, reload_dataloaders_every_n_epochs=every, callbacks=[echo(2, num_splits=2)]).fit(model)
    for epoch in range(4):
        fresh, steps = plain.in_epoch(epoch), model.in_epoch(epoch)
        assert len(steps) == 4 * len(fresh) == 32
        for number, batch in enumerate(fresh):
            first, second, third, fourth = steps[4 * number : 4 * number + 4]
            assert sorted(first + second) == sorted(third + fourth) == sorted(batch)


def finders(name: str) -> list[pl.Callback]:
    return {
        "batch size": [BatchSizeFinder(mode="power", steps_per_trial=3, init_val=4, max_trials=2)],
        "learning rate": [LearningRateFinder(num_training_steps=10)],
    }[name]


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.parametrize("name", ["batch size", "learning rate"])
@pytest.mark.parametrize("echo_factor", [2, "auto"])
@pytest.mark.parametrize("finder_first", [False, True])
def test_a_finder_before_the_training_leaves_it_as_it_would_be_without(tmp_path, name, echo_factor, finder_first):
    replay = {0: [2] * 16, 1: [1, 3] * 8} if echo_factor == "auto" else None

    def callback() -> BatchEcho:
        return echo(echo_factor, num_splits=2, replay=replay)

    found = Sized(4)
    callbacks = [*finders(name), callback()] if finder_first else [callback(), *finders(name)]
    trainer = make_trainer(callbacks=callbacks, max_epochs=2, default_root_dir=tmp_path)
    trial = TrialEnd(found)
    trainer.callbacks.append(trial)
    trainer.fit(found)
    model = Sized(found.batch_size)
    model.lr = found.lr
    plain = make_trainer(callbacks=[callback()], max_epochs=2)
    plain.fit(model)
    assert found.steps[trial.num_steps :] == model.steps
    assert trainer.global_step == plain.global_step
    assert same_bits(found.state_dict(), model.state_dict())
    assert [(epoch, steps - trial.num_steps) for epoch, steps, _ in found.validations if steps > trial.num_steps] == [
        (epoch, steps) for epoch, steps, _ in model.validations
    ]


class TrialEnd(pl.Callback):
    """Notes how many steps there were when the real training began."""

    def __init__(self, model: EchoModel) -> None:
        self.model, self.num_steps = model, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.num_steps = len(self.model.steps)


@pytest.mark.parametrize("echo_factor", [2, "auto"])
def test_the_tuner_finds_something_and_the_training_after_it_is_whole(tmp_path, echo_factor):
    replay = {0: [2] * 16} if echo_factor == "auto" else None
    model = Sized(4)
    callback = echo(echo_factor, num_splits=2, replay=replay)
    trainer = make_trainer(callbacks=[callback], max_epochs=1, default_root_dir=tmp_path)
    tuner = Tuner(trainer)
    tuner.scale_batch_size(model, mode="power", steps_per_trial=2, init_val=4, max_trials=2)
    tuner.lr_find(model, num_training=10, update_attr=False)
    before = len(model.steps)
    trainer.fit(model)
    steps = model.samples[before:]
    assert len(steps) == 64 // model.batch_size * 4
    assert sorted(sample for samples in steps for sample in samples) == sorted(2 * list(range(64)))
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == list(range(model.batch_size))


def test_early_stopping_and_callbacks_that_count_see_steps(tmp_path):
    class Counting(pl.Callback):
        def __init__(self) -> None:
            self.batch_indices: list[int] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.batch_indices.append(batch_idx)

    counting = Counting()
    stopping = EarlyStopping("val_loss", patience=0, min_delta=1e9, check_on_train_epoch_end=False)
    model, trainer = fit(
        [echo(2, num_splits=2), counting, stopping], val=plain_loader(4, 2), val_check_interval=5, max_epochs=9
    )
    assert counting.batch_indices == list(range(10))
    assert trainer.global_step == len(model.steps) == 10


def test_the_trainers_view_of_the_loader_is_still_the_loaders_own():
    loader = plain_loader(22, 8)
    _, trainer = fit(echo(2, num_splits=2), loader)
    assert trainer.train_dataloader.dataset is loader.dataset
    assert trainer.train_dataloader.batch_size == 8
    assert trainer.train_dataloader.loader is loader
    assert batch_of([1])[0].shape == (1, 5)
