"""What a real Trainer tells the watch, in which order, and that nothing of the watch is left in it afterwards.

The observer is the real one; it notes each call in a log before it takes it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import Profiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpufeed import BatchEcho, FeedMonitor
from lightning_gpufeed.callbacks.trainer_watch import TrainerWatch, training_loader
from lightning_gpufeed.diagnose.observer import Observer, Readers
from tests.datamodules.models import make_trainer

STEP = ["wait", "/wait", "look", "copy", "/copy", "compute", "/compute"]
NAMES = {"wait": "begin_wait", "/wait": "end_wait", "look": "look_at"}
STEP_NAMES = {
    "sync": "begin_sync",
    "/sync": "end_sync",
    "copy": "begin_copy",
    "/copy": "end_copy",
    "compute": "begin_compute",
    "/compute": "end_compute",
}
HOOKED = {
    "_on_before_fetch",
    "_on_after_fetch",
    "run",
    "get_instance",
    "convert_input",
    "_broadcast_sigterm_tensor",
}
NUM_BATCHES = 4


def noting_observer(log: list[str]) -> Observer:
    """A real observer that notes what it is told."""
    observer = Observer(torch.device("cpu"), lambda: Readers((), ()))
    for owner, names in ((observer, NAMES), (observer.steps, STEP_NAMES)):
        for event, name in names.items():
            setattr(owner, name, noting(log, event, getattr(owner, name)))
    return observer


def noting(log: list[str], event: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        log.append(event)
        return method(*args, **kwargs)

    return noted


class Watching(pl.Callback):
    """Watches as `FeedMonitor` does, and no more."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.told: list[str] = [] if log is None else log
        self.observers: list[Observer] = []
        self.watch: TrainerWatch | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.observers.append(noting_observer(self.told))
        self.watch = TrainerWatch(trainer, self.observers[-1])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.observers[-1].begin_epoch(trainer.current_epoch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.observers[-1].end_step()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.observers[-1].pause()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close()

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()

    @property
    def num_steps(self) -> int:
        """Of the latest epoch."""
        return self.observers[-1].counters().steps.num_steps


class Model(pl.LightningModule):
    """The smallest there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ValidatedModel(Model):
    """Is validated too."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)


class FetchingModel(Model):
    """Fetches its batches by itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.layer(batch).mean()


class ManualModel(Model):
    """Steps its optimizer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).mean())
        optimizer.step()


def batches(num_batches: int = NUM_BATCHES) -> DataLoader:
    return DataLoader(torch.ones(2 * num_batches, 3), batch_size=2)


def fit(watching: Watching, model: pl.LightningModule | None = None, data: Any = None, **options: Any) -> pl.Trainer:
    trainer = make_trainer(**{"max_epochs": 1, "callbacks": [watching], **options})
    trainer.fit(model or Model(), data if data is not None else batches())
    return trainer


def places(trainer: pl.Trainer) -> dict[str, Any]:
    """All that an instance of the Trainer's parts has of its own where the watch may hook in."""
    owners = {
        "profiler": trainer.profiler,
        "plugin": trainer.precision_plugin,
        "loop": trainer.fit_loop.epoch_loop,
        "automatic": trainer.fit_loop.epoch_loop.automatic_optimization,
        "manual": trainer.fit_loop.epoch_loop.manual_optimization,
        "selector": trainer._data_connector._datahook_selector,
        "fit_loop": trainer.fit_loop,
        "strategy": trainer.strategy,
        "trainer": trainer,
        "module": trainer.lightning_module,
    }
    return {
        f"{name}.{key}": value
        for name, owner in owners.items()
        for key, value in vars(owner).items()
        if callable(value) and not isinstance(value, torch.nn.Module | type)
    }


def unfitted_trainer(**options: Any) -> pl.Trainer:
    """One that has been given a model."""
    trainer = make_trainer(**options)
    trainer._data_connector.attach_datamodule(None)
    trainer._data_connector.attach_data(Model())
    return trainer


class Places(pl.Callback):
    """Notes what is there before the watch begins; first in the list of callbacks."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before = places(trainer)

    def assert_restored(self, trainer: pl.Trainer) -> None:
        after = places(trainer)
        for name in self.before.keys() | after.keys():
            if name.rpartition(".")[2] in HOOKED:
                assert after.get(name) is self.before.get(name), name


# What is told ----------------------------------------------------------------------------------------------


class NotingProfiler(Profiler):
    """A user's own, which notes all actions."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[str] = []

    def start(self, action_name: str) -> None:
        self.actions.append(action_name)

    def stop(self, action_name: str) -> None:
        self.actions.append(f"/{action_name}")


@pytest.mark.parametrize("profiler", [None, "simple", "advanced", SimpleProfiler, NotingProfiler], ids=str)
def test_each_step_is_told_in_order_whatever_profiler_the_trainer_has(profiler):
    watching = Watching()
    fit(watching, profiler=profiler() if isinstance(profiler, type) else profiler, max_epochs=2)
    assert watching.told == STEP * NUM_BATCHES * 2
    assert watching.num_steps == NUM_BATCHES


def test_a_barebones_trainer_tells_the_same():
    watching = Watching()
    trainer = pl.Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=1, callbacks=[watching])
    trainer.fit(Model(), batches())
    assert watching.told == STEP * NUM_BATCHES


def test_a_users_profiler_is_told_exactly_what_it_would_be_told_without_a_watch():
    actions = []
    for callback in (Watching(), pl.Callback()):
        profiler = NotingProfiler()
        fit(callback, profiler=profiler)
        actions.append([action for action in profiler.actions if "[Callback]" not in action])
    assert actions[0] == actions[1]
    assert actions[0].count("run_training_batch") == NUM_BATCHES


class BothHooks(pl.LightningDataModule):
    """Moves batches in a way of its own."""

    def train_dataloader(self) -> DataLoader:
        return batches()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 1

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch - 1


class PlainData(pl.LightningDataModule):
    """Has a loader only."""

    def train_dataloader(self) -> DataLoader:
        return batches()


class OwnTransfer(Model):
    """Moves batches in a way of its own."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch * 1


class SameName(Model):
    """Is called as its DataModule is."""


SameName.__name__ = "PlainData"


@pytest.mark.filterwarnings("ignore:You have overridden `\\w+` in `LightningModule` but have passed in:UserWarning")
@pytest.mark.parametrize(
    ("model", "data"),
    [(Model, BothHooks), (Model, PlainData), (OwnTransfer, PlainData), (OwnTransfer, None), (SameName, PlainData)],
)
def test_a_copy_is_told_once_whoever_does_it(model, data):
    watching = Watching()
    fit(watching, model(), data() if data else None)
    assert watching.told == STEP * NUM_BATCHES


@pytest.mark.parametrize(
    ("model", "options", "num_steps"),
    [
        (ManualModel, {}, NUM_BATCHES),
        (Model, {"accumulate_grad_batches": 3}, NUM_BATCHES),
        (Model, {"limit_train_batches": 3}, 3),
        (Model, {"max_steps": 2}, 2),
        (Model, {"fast_dev_run": 2}, 2),
    ],
    ids=["manual", "accumulate", "limit_train_batches", "max_steps", "fast_dev_run"],
)
def test_every_batch_is_a_step_however_it_is_optimized(model, options, num_steps):
    watching = Watching()
    fit(watching, model(), **options)
    assert watching.told == STEP * num_steps
    assert watching.num_steps == num_steps


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the `training_step`:UserWarning")
def test_a_step_that_fetches_by_itself_waits_inside():
    watching = Watching()
    fit(watching, FetchingModel())
    assert watching.told[:4] == ["compute", "wait", "/wait", "/compute"]
    assert watching.num_steps == NUM_BATCHES


def test_a_batch_that_the_module_skips_is_no_step():
    class Skipping(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    watching = Watching()
    fit(watching, Skipping())
    assert watching.num_steps == 2


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_steps_whose_loss_is_none_count():
    class Silent(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    watching = Watching()
    fit(watching, Silent())
    assert watching.num_steps == NUM_BATCHES


def test_batches_are_converted_to_the_trainers_precision_all_the_same():
    class Noting(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            seen.append((batch.dtype, len(watching.told)))
            return super().training_step(batch, batch_idx)

    seen: list[Any] = []
    watching = Watching()
    fit(watching, Noting(), batches(1), precision="64-true")
    assert seen == [(torch.float64, len(STEP) - 1)]


def test_a_batch_that_is_used_several_times_is_looked_at_once():
    watching = Watching()
    fit(watching, callbacks=[watching, BatchEcho(3, scale_lr="keep")])
    assert watching.told.count("look") == NUM_BATCHES
    assert watching.num_steps == 3 * NUM_BATCHES


class Stream(IterableDataset):
    """Nobody knows how long it is."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(2 * NUM_BATCHES, 3)


def test_a_loader_without_length_is_asked_ahead_and_each_batch_is_a_step():
    watching = Watching()
    fit(watching, data=DataLoader(Stream(), batch_size=2), max_epochs=2)
    for observer in watching.observers:
        assert observer.counters().steps.num_steps == NUM_BATCHES
    assert watching.told.count("compute") == watching.told.count("look") == 2 * NUM_BATCHES


def test_validation_and_its_sanity_check_are_no_part_of_any_step():
    watching = Watching()
    trainer = make_trainer(max_epochs=1, num_sanity_val_steps=1, val_check_interval=2, callbacks=[watching])
    trainer.fit(ValidatedModel(), batches(), batches(2))
    steps = [event for event in watching.told if "copy" not in event]
    assert steps == [event for event in STEP if "copy" not in event] * NUM_BATCHES
    totals = watching.observers[-1].counters().steps
    # Copies for validation are told as well, and are no part of any step.
    assert watching.told.count("copy") > NUM_BATCHES
    assert [span.phase for span in watching.observers[-1].counters().timeline] == [
        "wait",
        "copy",
        "compute",
        "hooks",
    ] * NUM_BATCHES
    assert totals.num_steps == NUM_BATCHES


def test_other_runs_of_the_trainer_are_not_watched():
    watching = Watching()
    trainer = fit(watching)
    watching.told.clear()
    trainer.validate(ValidatedModel(), batches(), verbose=False)
    assert watching.told == []


@pytest.mark.parametrize("place", ["callback", "step"])
def test_a_trainer_inside_of_a_training_is_not_watched(place):
    class Nested(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            make_trainer(max_epochs=1).fit(Model(), batches(2))

    class NestedModel(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            make_trainer(max_epochs=1).fit(Model(), batches(2))
            return super().training_step(batch, batch_idx)

    watching = Watching()
    if place == "callback":
        fit(watching, data=batches(2), callbacks=[watching, Nested()])
    else:
        fit(watching, NestedModel(), batches(2))
    assert watching.told == STEP * 2


def test_a_nested_trainer_with_the_same_profiler_leaves_the_accounts_in_order():
    class Nested(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            make_trainer(max_epochs=1, profiler=trainer.profiler).fit(Model(), batches(2))

    watching = Watching()
    fit(watching, data=batches(2), callbacks=[watching, Nested()], profiler=NotingProfiler())
    totals = watching.observers[-1].counters().steps
    assert totals.num_steps == 2
    parts = totals.wait_seconds + totals.copy_seconds + totals.compute_seconds + totals.hook_seconds
    assert parts == pytest.approx(totals.elapsed_seconds)


def test_ranks_are_asked_before_the_batch_and_that_is_told(monkeypatch, tmp_path):
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    monkeypatch.setattr(pl.Trainer, "world_size", 2)  # as Lightning has it where there is somebody to ask
    watching = Watching()
    trainer = fit(watching, data=batches(2))
    assert watching.told == ["sync", "/sync", *STEP] * 2
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)


def test_a_question_that_ends_the_training_is_told_to_its_end(monkeypatch):
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    trainer, log = unfitted_trainer(), []

    def ask() -> None:
        raise SIGTERMException

    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = ask
    watch = TrainerWatch(trainer, noting_observer(log))
    with pytest.raises(SIGTERMException):
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert log == ["sync", "/sync"]
    watch.close()
    assert trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor is ask


def test_one_rank_is_asked_nothing_so_its_loop_is_left_alone():
    class Looking(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append("_broadcast_sigterm_tensor" in vars(trainer.fit_loop.epoch_loop))

    seen: list[bool] = []
    watching = Watching()
    fit(watching, callbacks=[watching, Looking()])
    assert seen == [False]


# What is left ----------------------------------------------------------------------------------------------


def failing(kind: str, error: type[BaseException]) -> dict[str, Any]:
    """A training that fails in its second step."""

    class Loader:
        def __len__(self) -> int:
            return NUM_BATCHES

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.ones(2, 3)
            raise error("on purpose")

    class FailingModel(Model):
        def fail(self, where: str, batch_idx: int) -> None:
            if (kind, batch_idx) == (where, 1):
                raise error("on purpose")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.fail("training_step", batch_idx)
            return super().training_step(batch, batch_idx)

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            self.num_moved = getattr(self, "num_moved", -1) + 1
            self.fail("transfer", self.num_moved)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.fail("on_train_batch_end", batch_idx)

        def on_train_start(self) -> None:
            self.fail("on_train_start", 1)

    return {"model": FailingModel(), "data": Loader() if kind == "loader" else batches()}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["loader", "transfer", "training_step", "on_train_batch_end", "on_train_start"])
def test_everything_is_put_back_after_an_error_anywhere(kind, error):
    watching, before = Watching(), Places()
    trainer = make_trainer(max_epochs=1, callbacks=[before, watching])
    parts = failing(kind, error)
    with pytest.raises((error, SystemExit)):
        trainer.fit(parts["model"], parts["data"])
    before.assert_restored(trainer)
    # The same callback watches the next training from a clean beginning.
    watching.told.clear()
    fit(watching, callbacks=[before, watching])
    assert watching.told == STEP * NUM_BATCHES
    assert watching.num_steps == NUM_BATCHES


def test_several_fits_with_one_trainer_are_each_told_once():
    watching, before = Watching(), Places()
    trainer = make_trainer(max_epochs=1, callbacks=[before, watching], profiler=NotingProfiler())
    for number in range(1, 4):
        trainer.fit_loop.max_epochs = number
        watching.told.clear()
        trainer.fit(Model(), batches())
        assert watching.told == STEP * NUM_BATCHES
        before.assert_restored(trainer)


def test_what_a_user_had_put_on_the_instance_is_put_back():
    model, calls = Model(), []

    def transfer(batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        calls.append(dataloader_idx)
        return batch

    model.transfer_batch_to_device = transfer
    watching = Watching()
    fit(watching, model)
    assert vars(model)["transfer_batch_to_device"] is transfer
    assert calls == [0] * NUM_BATCHES
    assert watching.told == STEP * NUM_BATCHES


def test_what_somebody_else_has_put_in_place_since_stays_and_is_not_told_on():
    trainer, log = unfitted_trainer(profiler=NotingProfiler()), []
    watch = TrainerWatch(trainer, noting_observer(log))
    loop = trainer.fit_loop.epoch_loop
    ours, calls = loop._on_before_fetch, []

    def theirs() -> None:
        calls.append("theirs")
        ours()

    loop._on_before_fetch = theirs
    loop._on_before_fetch()
    assert (calls, log) == (["theirs"], ["wait"])
    watch.close()
    assert vars(loop)["_on_before_fetch"] is theirs
    loop._on_before_fetch()
    assert (calls, log) == (["theirs"] * 2, ["wait"])
    assert trainer.profiler.actions == ["[_TrainingEpochLoop].train_dataloader_next"] * 2
    assert "_on_after_fetch" not in vars(loop)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1)])
def test_several_watches_leave_nothing_behind_in_whatever_order_they_end(order):
    trainer, log = unfitted_trainer(), []
    loop, selector = trainer.fit_loop.epoch_loop, trainer._data_connector._datahook_selector
    watches = [TrainerWatch(trainer, noting_observer(log)) for _ in range(3)]
    loop._on_before_fetch()
    selector.get_instance("transfer_batch_to_device")
    selector.get_instance("on_after_batch_transfer")
    assert log == ["wait"] * 3 + ["copy"] * 3 + ["/copy"] * 3
    for number, index in enumerate(order):
        watches[index].close()
        watches[index].close()
        log.clear()
        loop._on_before_fetch()
        assert log == ["wait"] * (2 - number)
    for owner in (trainer.precision_plugin, loop, loop.automatic_optimization, loop.manual_optimization, selector):
        assert not HOOKED & vars(owner).keys()


def test_nothing_is_put_on_what_is_the_users():
    class Looking(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.note(trainer)

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            self.note(trainer)

        def note(self, trainer: pl.Trainer) -> None:
            owners = (trainer.lightning_module, trainer.datamodule, monitor)
            seen.append([{key for key, value in vars(owner).items() if callable(value)} for owner in owners])

    seen: list[Any] = []
    monitor = FeedMonitor(table=False, first_seconds=None)
    make_trainer(max_epochs=1, callbacks=[Looking(), monitor]).fit(Model(), datamodule=PlainData())
    assert all(names == seen[0] for names in seen)


def test_a_datamodule_that_leaves_the_copy_to_the_module_is_told_once():
    class Leaving(PlainData):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return self.trainer.lightning_module.transfer_batch_to_device(batch, device, dataloader_idx)

    watching = Watching()
    fit(watching, data=Leaving())
    assert watching.told == STEP * NUM_BATCHES


def test_a_copy_of_what_is_watched_tells_nobody():
    class Copying(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            for copied in (lambda part: pickle.loads(pickle.dumps(part)), copy.deepcopy):
                before = len(watching.told)
                copied(trainer.precision_plugin).convert_input(torch.ones(2))
                selector = copied(trainer._data_connector._datahook_selector)
                selector.get_instance("transfer_batch_to_device")
                assert selector.get_instance.__self__ is selector
                told.extend(watching.told[before:])
                copies.append(selector)

    told: list[str] = []
    copies: list[Any] = []
    watching = Watching()
    fit(watching, data=batches(1), callbacks=[watching, Copying()])
    assert told == []
    assert len(copies) == 2
    assert watching.told == STEP


class Copying(pl.Callback):
    """Copies the Trainer while it trains."""

    def __init__(self) -> None:
        self.copies: list[pl.Trainer] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.copies.append(pickle.loads(pickle.dumps(trainer)))
        self.copies.append(copy.deepcopy(trainer))


def test_a_trainer_that_is_monitored_can_be_pickled_and_copied_as_one_that_is_not():
    """Workers started by spawn get what their dataset or collate_fn hold: of a DataModule's method, the Trainer too."""
    monitor, copying = FeedMonitor(table=False, first_seconds=None), Copying()
    make_trainer(max_epochs=1, callbacks=[monitor, copying]).fit(Model(), batches(1))
    assert len(copying.copies) == 2
    for trainer in copying.copies:
        loop = trainer.fit_loop.epoch_loop
        assert loop._on_before_fetch.__self__ is loop
        assert loop.automatic_optimization.run.__self__ is loop.automatic_optimization
        selector = trainer._data_connector._datahook_selector
        assert selector.get_instance.__self__ is selector
        assert trainer.precision_plugin.convert_input.__self__ is trainer.precision_plugin
    assert len(monitor.records) == 1


# The loaders -----------------------------------------------------------------------------------------------


def test_the_training_loader_is_known_from_the_set_up_on():
    trainer = make_trainer(max_epochs=1)
    assert training_loader(trainer) is None
    loader = batches()

    class Looking(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.extend(training_loader(trainer).flattened)

    seen: list[Any] = []
    trainer.callbacks.append(Looking())
    trainer.fit(Model(), loader)
    assert seen == [loader]
