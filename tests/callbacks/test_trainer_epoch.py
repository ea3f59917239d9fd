"""What `trainer_epoch` reads of a Trainer and corrects in it, in the middle of real trainings."""

from __future__ import annotations

import copy
import datetime
import math
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader

from lightning_gpufeed import BatchEcho
from lightning_gpufeed.callbacks.trainer_epoch import (
    HookOncePerBatch,
    ScheduleByProgress,
    WatchSetup,
    absolute_limit,
    is_cut_to_shortest,
    join_loaders,
    lengthen_epoch,
    num_processed,
    obstacle_to_echo,
    set_processed,
    share_between_checks,
    split_loaders,
    takes_iterator,
    trains_uninterrupted,
)
from tests.callbacks.echo_models import Batches, EchoModel, Unsized, fit, plain_loader
from tests.datamodules.models import make_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning"
)


class At(pl.Callback):
    """Does something at the end of one training step."""

    def __init__(self, step: int, act: Callable[[pl.Trainer], Any]) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.act(trainer)


class Growing(Batches):
    """A loader that can be made longer in the middle of an epoch."""

    def __init__(self, num_samples: int = 80) -> None:
        super().__init__(80, 8)
        self.length = num_samples // 8

    def __len__(self) -> int:
        return self.length

    def grow(self, trainer: pl.Trainer, num_steps: int) -> None:
        self.length += num_steps
        lengthen_epoch(trainer, num_steps)


# How many steps are done -------------------------------------------------------------------------------------


def test_the_steps_of_the_epoch_that_are_done_are_counted():
    counted: list[int] = []

    class Counting(EchoModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            counted.append(num_processed(self.trainer))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            counted.append(num_processed(self.trainer))

    fit(model=Counting())
    assert counted == 2 * [0, 1, 1, 2, 2, 3]


def test_a_corrected_count_keeps_where_inside_a_step_it_was_taken():
    trainer = make_trainer()
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    current.ready, current.started, current.processed, current.completed = 6, 6, 6, 5
    set_processed(trainer, 2)
    assert (current.ready, current.started, current.processed, current.completed) == (2, 2, 2, 1)
    set_processed(trainer, 9)
    assert (current.ready, current.started, current.processed, current.completed) == (9, 9, 9, 8)
    assert num_processed(trainer) == 9


# The length of an epoch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [-2, -1, 0, 3, 5])
@pytest.mark.parametrize(
    ("limit", "before", "after"),
    [
        (None, 5, lambda change: 5 + change),
        (1.0, 5, lambda change: 5 + change),
        (0.8, 4, lambda change: 4 + change),
        (4, 4, lambda change: min(4, 5 + change)),
        (7, 5, lambda change: min(7, 5 + change)),
    ],
)
def test_an_epoch_becomes_longer_or_shorter_by_so_many_steps(change, limit, before, after):
    loader = Growing(40)
    seen: list[float] = []

    def act(trainer: pl.Trainer) -> None:
        seen.append(trainer.num_training_batches)
        loader.grow(trainer, change)
        seen.append(trainer.num_training_batches)

    settings = {} if limit is None else {"limit_train_batches": limit}
    model, trainer = fit(At(1, act), loader, max_epochs=1, val=plain_loader(4, 2), **settings)
    expected = after(change)
    assert seen == [before, expected]
    assert trainer.global_step == len(model.steps) == expected
    assert model.validations == [(0, expected, expected)]


@pytest.mark.parametrize(("interval", "at"), [(0.5, [2, 4, 6, 8]), (2, [2, 4, 6, 8]), (3, [3, 6]), (1.0, [8])])
def test_validation_within_an_epoch_stays_where_it_was_and_the_one_at_its_end_moves_with_it(interval, at):
    loader = Growing(40)
    model, _ = fit(
        At(1, lambda trainer: loader.grow(trainer, 3)),
        loader,
        max_epochs=1,
        val=plain_loader(4, 2),
        val_check_interval=interval,
    )
    assert [steps for _, steps, _ in model.validations] == at


def test_an_interval_by_the_clock_is_left_alone():
    loader = Growing(40)
    model, trainer = fit(
        At(1, lambda trainer: loader.grow(trainer, 3)),
        loader,
        max_epochs=1,
        val=plain_loader(4, 2),
        val_check_interval=datetime.timedelta(days=1),
    )
    assert trainer.global_step == 8
    assert trainer.val_check_batch is None
    assert model.validations == []


def test_an_epoch_without_a_length_is_left_alone():
    model, trainer = fit(At(1, lambda trainer: lengthen_epoch(trainer, 5)), Unsized(), max_epochs=1)
    assert len(model.steps) == 3
    assert math.isinf(trainer.num_training_batches)


def test_a_trainer_that_has_no_loader_yet_is_left_alone():
    trainer = make_trainer()
    before = trainer.num_training_batches
    lengthen_epoch(trainer, 3)
    assert trainer.num_training_batches == before


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_bar_learns_of_the_new_length_at_once(kind, capsys):
    loader, bar = Growing(40), kind(refresh_rate=1)
    totals: list[float | None] = []

    def total() -> float | None:
        if isinstance(bar, TQDMProgressBar):
            return bar.train_progress_bar.total
        return bar.progress.tasks[bar.train_progress_bar_id].total

    def act(trainer: pl.Trainer) -> None:
        totals.append(total())
        loader.grow(trainer, 3)
        totals.append(total())

    fit([bar, At(2, act)], loader, max_epochs=1, enable_progress_bar=True)
    assert totals == [5, 8]
    assert capsys.readouterr()


def test_a_bar_that_was_not_begun_is_left_alone(capsys):
    # The Trainer estimates its steps, and so sets up its loaders, long before a bar is shown.
    loader = Growing(40)

    class Early(EchoModel):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            assert self.trainer.estimated_stepping_batches == 5
            loader.grow(self.trainer, 2)
            assert self.trainer.estimated_stepping_batches == 7
            return optimizer

    for bar in (TQDMProgressBar(), RichProgressBar()):
        loader.length = 5
        _, trainer = fit(bar, loader, model=Early(), max_epochs=1, enable_progress_bar=True)
        assert trainer.global_step == 7
    assert "7/7" in capsys.readouterr().out


# Settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "share"),
    [
        (None, 1.0),
        (1.0, 1.0),
        (0.5, 0.5),
        (1, None),
        (3, None),
        (datetime.timedelta(minutes=1), None),
        ("00:00:01:00", None),
        ({"minutes": 1}, None),
    ],
    ids=str,
)
def test_a_share_of_an_epoch_is_told_from_a_number_of_steps_and_from_a_time(interval, share):
    assert share_between_checks(make_trainer(val_check_interval=interval)) == share


@pytest.mark.parametrize(
    ("settings", "is_uninterrupted"),
    [
        ({}, True),
        ({"limit_train_batches": 1.0}, True),
        ({"val_check_interval": 1.0}, True),
        ({"limit_val_batches": 0, "val_check_interval": 0.5}, True),
        ({"limit_train_batches": 3}, False),
        ({"limit_train_batches": 0.5}, False),
        ({"fast_dev_run": True}, False),
        ({"overfit_batches": 2}, False),
        ({"val_check_interval": 0.5}, False),
        ({"val_check_interval": 5}, False),
        ({"val_check_interval": datetime.timedelta(minutes=1)}, False),
    ],
    ids=str,
)
def test_whether_an_epoch_is_taken_to_its_end_in_one_go(settings, is_uninterrupted):
    assert trains_uninterrupted(make_trainer(**settings)) is is_uninterrupted


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, None),
        ({"limit_train_batches": 7}, 7),
        ({"limit_train_batches": 0.5}, None),
        ({"limit_train_batches": 1.0}, None),
        ({"limit_train_batches": 1}, 1),
        ({"fast_dev_run": 3}, 3),
        ({"overfit_batches": 2}, 2),
        ({"overfit_batches": 0.5}, None),
    ],
    ids=str,
)
def test_a_limit_in_steps_is_told_from_a_share(settings, limit):
    found = absolute_limit(make_trainer(**settings))
    assert found == limit
    assert type(found) is type(limit)


@pytest.mark.parametrize(("mode", "is_cut"), [("min_size", True), ("max_size", False), ("max_size_cycle", False)])
def test_whether_the_shortest_loader_ends_an_epoch(mode, is_cut):
    trainer = make_trainer()
    assert not is_cut_to_shortest(trainer)
    trainer.fit_loop._combined_loader = CombinedLoader([[1], [2]], mode)
    assert is_cut_to_shortest(trainer) is is_cut


def test_a_step_that_fetches_by_itself_is_recognised_by_the_name_of_its_argument():
    class Plain(EchoModel):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return None

    class Fetching(EchoModel):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return None

    assert not takes_iterator(EchoModel())
    assert not takes_iterator(Plain())
    assert takes_iterator(Fetching())


# Several loaders ---------------------------------------------------------------------------------------------


NESTS = st.recursive(
    st.just("loader"),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3), st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)


def filled(nest: Any, make: Callable[[], Any]) -> Any:
    """The same nest, with something new in each place."""
    if isinstance(nest, list):
        return [filled(part, make) for part in nest]
    if isinstance(nest, dict):
        return {key: filled(part, make) for key, part in nest.items()}
    return make()


@given(nest=NESTS)
def test_batches_of_several_loaders_are_taken_apart_and_put_together_in_their_nest(nest):
    trainer = make_trainer()
    trainer.fit_loop._combined_loader = combined = CombinedLoader(filled(nest, lambda: [1]), "min_size")
    number = len(combined.flattened)
    made: list[Any] = []

    def batch() -> Any:
        # A batch is a nest itself, which must not be looked into.
        made.append({"x": [len(made)], "y": None} if len(made) % 2 else None)
        return made[-1]

    batches = filled(nest, batch)
    if number == 1:
        assert split_loaders(trainer, batches, 1) == [batches]
        assert join_loaders(trainer, [batches]) == batches
        return
    parts = split_loaders(trainer, batches, number)
    assert all(one is two for one, two in zip(parts, made, strict=True))
    assert join_loaders(trainer, parts) == batches


def test_a_changed_nest_is_refused():
    trainer = make_trainer()
    trainer.fit_loop._combined_loader = CombinedLoader({"a": [1], "b": [2]}, "min_size")
    with pytest.raises(
        ValueError, match=r"a transfer hook changed the nest of 2 loaders' batches.*which gets the pieces"
    ):
        split_loaders(trainer, {"a": 1}, 2)


# Standing in -------------------------------------------------------------------------------------------------


def test_hooks_before_the_transfer_run_unless_they_have_run():
    model = EchoModel()
    asked: list[bool] = []
    answers = iter([False, True, True, False])

    def is_repeat() -> bool:
        asked.append(next(answers))
        return asked[-1]

    calls: list[tuple[Any, int]] = []
    model.on_before_batch_transfer = lambda batch, dataloader_idx: calls.append((batch, dataloader_idx)) or -batch  # type: ignore[method-assign,assignment,func-returns-value]
    hook = HookOncePerBatch(model, is_repeat)
    assert [model._on_before_batch_transfer(batch) for batch in (1, 2, 3)] == [-1, 2, 3]
    assert model._on_before_batch_transfer(4, dataloader_idx=5) == -4
    assert calls == [(1, 0), (4, 5)]
    assert asked == [False, True, True, False]
    hook.remove()
    assert "_on_before_batch_transfer" not in vars(model)
    hook.remove()
    assert model._on_before_batch_transfer(6) == -6


def test_only_its_own_stand_in_is_taken_away():
    model = EchoModel()
    first = HookOncePerBatch(model, lambda: False)
    second = HookOncePerBatch(model, lambda: False)
    first.remove()
    assert vars(model)["_on_before_batch_transfer"] is second
    second.remove()
    assert "_on_before_batch_transfer" not in vars(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_module_has_the_modules_own_method(duplicate):
    model = EchoModel()
    hook = HookOncePerBatch(model, lambda: pytest.fail("the copy asked"))
    made = duplicate(model)
    if duplicate is not copy.copy:  # a shallow one shares what it holds, as any
        assert made._on_before_batch_transfer.__func__ is EchoModel._on_before_batch_transfer
        assert made._on_before_batch_transfer.__self__ is made
    hook.remove()
    assert type(made) is EchoModel
    assert torch.equal(made.layer.weight, model.layer.weight)


def test_a_setup_of_the_training_loader_is_told_from_that_of_another():
    seen: list[tuple[str, bool]] = []
    begun: list[int] = []
    watches: list[WatchSetup] = []

    class Watching(EchoModel):
        def setup(self, stage: str) -> None:
            watches.append(WatchSetup(self.trainer, lambda: begun.append(self.trainer.current_epoch)))

        def train_dataloader(self) -> Any:
            seen.append(("train", watches[0].is_on))
            return plain_loader()

        def val_dataloader(self) -> Any:
            seen.append(("val", watches[0].is_on))
            return plain_loader(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert not watches[0].is_on
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=2, num_sanity_val_steps=1)
    trainer.fit(Watching())
    assert [is_on for name, is_on in seen if name == "train"] == [True] * 2
    assert not any(is_on for name, is_on in seen if name == "val")
    assert begun == [0, 2]
    watches[0].remove()
    assert "setup_data" not in vars(trainer.fit_loop)
    watches[0].remove()


def test_a_setup_that_raises_is_over():
    class Without(EchoModel):
        def train_dataloader(self) -> Any:
            assert watch.is_on
            raise RuntimeError("on purpose")

    trainer = make_trainer(max_epochs=1)
    watch = WatchSetup(trainer, lambda: None)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Without())
    assert not watch.is_on


class Scheduled(EchoModel):
    """Has a schedule by steps and one by epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        return [optimizer], [
            {"scheduler": schedulers.ExponentialLR(optimizer, 0.99), "interval": "step"},
            {"scheduler": schedulers.ExponentialLR(optimizer, 0.9), "interval": "epoch"},
        ]


def test_schedules_by_epochs_move_once_an_epoch_whatever_is_echoed():
    callback = BatchEcho("auto", replay={0: [3, 1, 2], 1: [1, 2, 4]}, scale_lr="keep")
    _, trainer = fit(callback, model=Scheduled())
    by_steps, by_epochs = (config.scheduler for config in trainer.lr_scheduler_configs)
    assert trainer.global_step == 13
    assert by_steps.last_epoch == 6
    assert by_epochs.last_epoch == 2


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_schedule_moves_at_the_fresh_steps_only_and_as_the_trainer_would(accumulate):
    # Every second step is said to be an echo.
    class Standing(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            def fresh_steps() -> int:
                return trainer.fit_loop.epoch_loop.batch_idx // 2 + 1

            self.stand_in = ScheduleByProgress(trainer, fresh_steps, 6, 0)

    standing = Standing()
    model = EchoModel(schedule="cosine")
    _, trainer = fit(standing, plain_loader(88, 8), model=model, max_epochs=1, accumulate_grad_batches=accumulate)
    # 11 steps, so 6 fresh ones, the last of which is the last of the epoch.
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == math.ceil(6 / accumulate)
    assert trainer.global_step == math.ceil(11 / accumulate)
    standing.stand_in.remove()
    assert "update_lr_schedulers" not in vars(trainer.fit_loop.epoch_loop)
    standing.stand_in.remove()


def test_a_strategy_that_moves_batches_in_its_own_way_is_no_place_for_echoes():
    class OwnWay(SingleDeviceStrategy):
        def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            return batch

    trainer = make_trainer(strategy=OwnWay(device="cpu"))
    assert "OwnWay moves batches" in str(obstacle_to_echo(trainer, EchoModel()))
    assert obstacle_to_echo(make_trainer(), EchoModel()) is None


@pytest.mark.parametrize(
    ("settings", "estimate", "num_steps"),
    [
        ({"max_epochs": 2}, 20, 56),
        ({"max_epochs": 2, "max_steps": 30}, 20, 30),
        ({"max_epochs": 2, "max_steps": 15}, 15, 15),
        ({"max_epochs": 2, "limit_train_batches": 6}, 12, 12),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 10, 30),
    ],
    ids=str,
)
def test_a_schedule_arrives_at_its_end_when_an_echoed_training_does(settings, estimate, num_steps):
    model = EchoModel(schedule="onecycle")
    replay = {epoch: [3] * 10 for epoch in range(2)}
    if num_steps == 56:  # the last batch of an epoch is not used again, as nothing is waited for
        replay = {epoch: [3] * 9 + [1] for epoch in range(2)}
    callback = BatchEcho("auto", replay=replay, scale_lr="keep")
    _, trainer = fit(callback, plain_loader(80, 8), model=model, **settings)
    assert (trainer.global_step, trainer.lr_scheduler_configs[0].scheduler.last_epoch) == (num_steps, estimate)
