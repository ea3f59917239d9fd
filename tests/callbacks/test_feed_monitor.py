"""`FeedMonitor` and the Trainer: what it counts, when it speaks, where that goes, and that nothing of it is left.

Why a step waits is asked in test_feed_monitor_verdicts.py, several ranks are in test_feed_monitor_ranks.py; that the
training is the same to the last bit is in tests/test_equivalence.py.
"""

from __future__ import annotations

import collections
import copy
import csv
import logging
import math
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_gpufeed import BatchEcho, FeedMonitor
from lightning_gpufeed.diagnose import processes
from tests.callbacks.test_batch_echo_yaml import run
from tests.datamodules.models import MemoryLogger, make_trainer, write_images

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning")

NUM_BATCHES = 8
LOG = "lightning.pytorch.utilities.rank_zero"


class Counting(pl.LightningModule):
    """Counts its steps by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.counted: collections.Counter[int] = collections.Counter()
        self.lr = 0.1
        self.batch_size = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counted[self.current_epoch] += 1
        return self.layer(torch.ones(1, 2)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.zeros(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def samples(num_batches: int = NUM_BATCHES, **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(2 * num_batches, 2)), batch_size=2, **settings)


def quiet(**settings: Any) -> FeedMonitor:
    return FeedMonitor(**({"table": False, "first_seconds": None} | settings))


def fit(
    monitor: FeedMonitor, model: pl.LightningModule, loader: Any, val: Any = None, **settings: Any
) -> tuple[pl.Trainer, dict[int, int]]:
    """Train; the Trainer, and the steps of each epoch by the records."""
    callbacks = [monitor, *settings.pop("callbacks", [])]
    trainer = make_trainer(**({"max_epochs": 2, "callbacks": callbacks} | settings))
    trainer.fit(model, loader, val)
    return trainer, steps_of(monitor)


def steps_of(monitor: FeedMonitor) -> dict[int, int]:
    return {one.counters.epoch: one.counters.steps.num_steps for one in monitor.records if not one.is_interim}


def hooks_in(trainer: pl.Trainer) -> set[str]:
    """Functions that somebody has put into the instances that the callback hooks into."""
    owners = trainer.profiler, trainer.precision_plugin, trainer.fit_loop.epoch_loop
    return {
        name for owner in owners for name, value in vars(owner).items() if callable(value) and name in dir(type(owner))
    }


# What is counted ---------------------------------------------------------------------------------------------

PAUSE = 0.003


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * NUM_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(PAUSE)
        return torch.zeros(2)


class SlowModel(Counting):
    """Pauses wherever time can go."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        time.sleep(PAUSE)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(2 * PAUSE)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(3 * PAUSE)

    def on_validation_start(self) -> None:
        time.sleep(10 * PAUSE)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(10 * PAUSE)


class Clock(pl.Callback):
    """Time by the clock on the wall of each epoch, validation and all."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.begin = time.perf_counter()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begin)


class Measured:
    """A training with a known pause at each place, and a validation in the middle and at the end of its epochs."""

    def __init__(self) -> None:
        self.monitor, self.clock = quiet(), Clock()
        loader = DataLoader(Slow(), batch_size=2)
        fit(
            self.monitor,
            SlowModel(),
            loader,
            samples(1),
            callbacks=[self.clock],
            val_check_interval=0.5,
            num_sanity_val_steps=1,
        )


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured()


def test_each_epoch_has_a_record_of_all_its_steps_and_the_first_is_kept_apart(measured):
    records = measured.monitor.records
    assert steps_of(measured.monitor) == {0: NUM_BATCHES, 1: NUM_BATCHES}
    assert [one.counters.is_first for one in records] == [True, False]
    assert [one.is_interim for one in records] == [False, False]
    assert [(one.counters.rank, one.counters.num_ranks) for one in records] == [(0, 1)] * 2


def test_time_is_found_where_it_was_spent(measured):
    for record in measured.monitor.records:
        steps = record.counters.steps
        # A pause takes at least as long as it was meant to.
        assert steps.wait_seconds >= NUM_BATCHES * 2 * PAUSE
        assert steps.copy_seconds >= NUM_BATCHES * PAUSE
        assert steps.compute_seconds >= NUM_BATCHES * 2 * PAUSE
        assert steps.hook_seconds >= (NUM_BATCHES - 4) * 3 * PAUSE  # what comes after this callback belongs to the next
        assert steps.sync_seconds is None
        assert steps.idle_seconds is None


def test_the_parts_of_the_steps_add_up_to_their_time(measured):
    for record in measured.monitor.records:
        steps = record.counters.steps
        parts = steps.wait_seconds + steps.copy_seconds + steps.compute_seconds + steps.hook_seconds
        assert steps.elapsed_seconds == pytest.approx(parts, rel=1e-9)  # sums of the same readings in another order


def test_validation_is_no_part_of_the_steps(measured):
    for record, whole in zip(measured.monitor.records, measured.clock.seconds, strict=True):
        validated = 2 * (10 * PAUSE + 10 * PAUSE)
        assert record.counters.steps.elapsed_seconds <= whole - validated


def test_the_timeline_shows_the_latest_steps_in_the_order_in_which_things_happened(measured):
    spans = measured.monitor.records[-1].counters.timeline
    assert {span.lane for span in spans} == {"host"}
    assert sorted({span.step for span in spans}) == list(range(NUM_BATCHES))
    for step in range(NUM_BATCHES):
        phases = [span.phase for span in spans if span.step == step]
        assert phases == ["wait", "copy", "compute", "hooks"]
    times = [time for span in spans for time in (span.begin, span.end)]
    assert times == sorted(times)
    assert times[0] == 0.0


class GivesUp(Counting):
    """Says at its fourth batch that the epoch is over."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class Skips(Counting):
    """Has no loss for every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else None


class Manual(Counting):
    """Steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class FetchesItself(Counting):
    """Takes the loader's iterator, as Lightning allows."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Endless(IterableDataset[torch.Tensor]):
    """A number of samples that nobody knows beforehand."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(self.num_samples, 2))


class Given:
    """Batches as they are."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def stream() -> DataLoader[Any]:
    return DataLoader(Endless(10), batch_size=2)


def several() -> CombinedLoader:
    return CombinedLoader({"a": samples(3), "b": [samples(5)]}, "max_size_cycle")


TRAININGS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], Any], dict[str, Any]]] = {
    "default": (Counting, samples, {}),
    "fast_dev_run": (Counting, samples, {"fast_dev_run": 3}),
    "max_steps": (Counting, samples, {"max_epochs": -1, "max_steps": 11}),
    "max_time": (Counting, samples, {"max_epochs": -1, "max_time": timedelta(seconds=0.05)}),
    "limit_train_batches": (Counting, samples, {"limit_train_batches": 5}),
    "no batches": (Counting, samples, {"limit_train_batches": 0}),
    "accumulate_grad_batches": (Counting, samples, {"accumulate_grad_batches": 3}),
    "barebones": (Counting, samples, {"barebones": True, "log_every_n_steps": None, "num_sanity_val_steps": None}),
    "reload": (Counting, samples, {"reload_dataloaders_every_n_epochs": 1}),
    "overfit": (Counting, samples, {"overfit_batches": 2}),
    "val_check_interval": (Counting, samples, {"val_check_interval": 3, "num_sanity_val_steps": 2}),
    "check_val_every_n_epoch": (Counting, samples, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "epoch given up": (GivesUp, samples, {}),
    "no loss": (Skips, samples, {}),
    "manual": (Manual, samples, {}),
    "dataloader_iter": (FetchesItself, samples, {}),
    "no DataLoader": (Counting, lambda: Given(torch.ones(2, 2), torch.ones(1, 2)), {}),
    "stream": (Counting, stream, {}),
    "stream, limited": (Counting, stream, {"limit_train_batches": 3}),
    "empty stream": (Counting, lambda: DataLoader(Endless(0), batch_size=2), {}),
    "several": (Counting, several, {}),
    "sparse": (Counting, lambda: Given(torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()), {}),
    "no tensors": (Counting, lambda: Given(["a", "b"], "c", 3, object(), {}, np.ones(3)), {}),
}


@pytest.mark.filterwarnings(
    "ignore:You are overfitting to|The given 'max_steps|Using `max_time`|`training_step` returned `None`:UserWarning"
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument|You are using the `dataloader_iter`:UserWarning")
@pytest.mark.parametrize("name", TRAININGS)
def test_in_every_kind_of_training_each_step_is_counted_in_its_epoch(name):
    model_of, loader_of, settings = TRAININGS[name]
    model, monitor = model_of(), quiet()
    if settings.get("barebones"):
        settings = {**settings, **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"))}
        settings["enable_model_summary"] = None
    trainer, counted = fit(monitor, model, loader_of(), samples(1), **settings)
    if name == "empty stream":
        assert counted == {0: 0, 1: 0}
        assert [one.line for one in monitor.records] == ["no step was measured."] * 2
    else:
        assert counted == dict(model.counted)
        assert sum(counted.values()) == trainer.fit_loop.epoch_loop.total_batch_idx + 1 or name == "epoch given up"
    assert hooks_in(trainer) == set()


def test_a_loader_with_workers_is_described_and_its_workers_alone_are_watched():
    # The validation's workers are kept, and have nothing to do while the training runs.
    validation = DataLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=True)
    monitor, clock = quiet(interval_seconds=0.1), Clock()
    loader = DataLoader(Slow(), batch_size=1, num_workers=1, multiprocessing_context="fork", prefetch_factor=3)
    settings = {"num_sanity_val_steps": 1, "limit_val_batches": 1, "max_epochs": 1}
    fit(monitor, SlowModel(), loader, validation, callbacks=[clock], **settings)
    counters = monitor.records[0].counters
    facts = counters.loader
    assert (facts.name, facts.num_workers, facts.prefetch_factor, facts.batch_size) == ("DataLoader", 1, 3, 1)
    assert (facts.start_method, facts.is_persistent, facts.has_thread, facts.is_own) == ("fork", False, False, False)
    assert counters.readers is not None
    assert 0 < counters.readers.wall_seconds <= clock.seconds[0]  # of one worker, not of three
    assert counters.num_hidden_readers == 0
    assert 0 < counters.num_watched_steps <= counters.steps.num_steps


# Without the kernel's counters -------------------------------------------------------------------------------


@pytest.mark.parametrize("has_psutil", [True, False], ids=["psutil", "nothing"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_proc_there_is_a_verdict_all_the_same(tmp_path, monkeypatch, has_psutil, num_workers):
    monkeypatch.setattr(processes, "_PROC", str(tmp_path / "proc"))
    if not has_psutil:
        monkeypatch.setitem(sys.modules, "psutil", None)
    monitor = quiet(interval_seconds=0.1)
    _, counted = fit(monitor, SlowModel(), DataLoader(Slow(), batch_size=2, num_workers=num_workers), max_epochs=1)
    assert counted == {0: NUM_BATCHES}
    counters = monitor.records[0].counters
    if num_workers and has_psutil:
        assert counters.readers is not None
        assert counters.readers.queue_seconds is None
    else:
        assert counters.readers is None
    # All that is left to go by is the time that was waited.
    assert counters.steps.wait_seconds > 0
    assert monitor.records[0].line.endswith(".")


# When it is silent -------------------------------------------------------------------------------------------


def test_validating_testing_and_predicting_are_not_watched(caplog, capsys):
    monitor, logger = FeedMonitor(), MemoryLogger()
    trainer = make_trainer(callbacks=[monitor], logger=logger)
    trainer.validate(Counting(), samples(), verbose=False)
    trainer.test(Counting(), samples(), verbose=False)
    trainer.predict(Counting(), samples())
    assert monitor.records == []
    assert logger.logged == []
    assert "FeedMonitor" not in caplog.text + capsys.readouterr().out
    assert hooks_in(trainer) == set()


def test_tuning_is_not_watched_and_the_training_after_it_is(tmp_path):
    monitor, model = quiet(), Counting()
    trainer = make_trainer(callbacks=[monitor], max_epochs=1, default_root_dir=tmp_path)
    Tuner(trainer).lr_find(model, samples(), num_training=4, update_attr=False)
    assert monitor.records == []
    assert hooks_in(trainer) == set()
    model.counted.clear()
    trainer.fit(model, samples())
    assert steps_of(monitor) == dict(model.counted) == {0: NUM_BATCHES}


# Resumed, interrupted, used again ----------------------------------------------------------------------------


class Save(pl.Callback):
    """Saves in the middle of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == NUM_BATCHES + 3:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended:UserWarning")
@pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`:UserWarning")
def test_a_fit_resumed_in_the_middle_of_an_epoch_is_watched_from_there(tmp_path):
    monitor = quiet()
    trainer, counted = fit(monitor, Counting(), samples(), callbacks=[Save(tmp_path / "middle.ckpt")])
    assert counted == {0: NUM_BATCHES, 1: NUM_BATCHES}
    resumed, model = quiet(first_seconds=1000.0), Counting()
    trainer = make_trainer(callbacks=[resumed], max_epochs=3)
    trainer.fit(model, samples(num_workers=1), ckpt_path=tmp_path / "middle.ckpt")
    assert steps_of(resumed) == dict(model.counted) == {1: NUM_BATCHES - 3, 2: NUM_BATCHES}
    assert [one.is_interim for one in resumed.records] == [False, False]
    assert [one.counters.is_first for one in resumed.records] == [True, False]
    assert [one.counters.loader.num_workers for one in resumed.records] == [1, 1]


class Ends(Counting):
    """Ends in the second epoch."""

    def __init__(self, error: BaseException, where: str) -> None:
        super().__init__()
        self.error, self.where = error, where

    def end(self, where: str) -> None:
        if where == self.where and self.trainer.current_epoch == 1:
            raise self.error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.end("step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.end("validation")

    def on_train_epoch_end(self) -> None:
        self.end("epoch end")


class Broken(Dataset[torch.Tensor]):
    """A file with a hole, reached in the second epoch."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        if self.num_read > NUM_BATCHES + 2:
            raise OSError("a hole in the file")
        return torch.zeros(2)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """After an interrupt Lightning ignores further ones."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("where", ["step", "validation", "epoch end", "dataset"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_epoch_that_ends_badly_leaves_the_records_of_before_and_nothing_else(where, error):
    monitor = quiet()
    trainer = make_trainer(callbacks=[monitor], max_epochs=2, val_check_interval=0.5)
    loader = DataLoader(Broken()) if where == "dataset" else samples()
    expected = SystemExit if isinstance(error, KeyboardInterrupt) else RuntimeError
    with pytest.raises(OSError if where == "dataset" else expected):
        trainer.fit(Ends(error, where), loader, samples(1))
    # The callback comes before the module at the end of an epoch.
    assert [one.counters.epoch for one in monitor.records] == ([0, 1] if where == "epoch end" else [0])
    assert hooks_in(trainer) == set()
    # And it can be used again.
    _, counted = fit(monitor, Counting(), samples(), max_epochs=1)
    assert counted == {0: NUM_BATCHES}


def test_one_callback_in_two_fits_and_in_two_trainers_begins_anew_each_time():
    monitor = quiet(first_seconds=1e-6)
    model = Counting()
    first, _ = fit(monitor, model, samples(), max_epochs=1)
    records = monitor.records
    first.fit_loop.max_epochs = 3
    first.fit(model, samples())
    assert steps_of(monitor) == {1: NUM_BATCHES, 2: NUM_BATCHES}
    assert [(one.counters.epoch, one.is_interim) for one in records] == [(0, True), (0, False)]  # a list of its own
    second, counted = fit(monitor, Counting(), samples(5))
    assert counted == {0: 5, 1: 5}
    assert hooks_in(first) == hooks_in(second) == set()
    assert [one.counters.is_first for one in monitor.records] == [True, True, False]
    # The first one is not watched any more.
    first.fit_loop.max_epochs = 4
    first.callbacks.remove(monitor)
    first.fit(model, samples())
    assert steps_of(monitor) == {0: 5, 1: 5}


def test_two_monitors_of_one_trainer_count_the_same_and_leave_nothing():
    one, other = quiet(), quiet()
    trainer, counted = fit(one, Counting(), samples(), callbacks=[other])
    assert counted == steps_of(other) == {0: NUM_BATCHES, 1: NUM_BATCHES}
    assert hooks_in(trainer) == set()


class Covers(pl.Callback):
    """Puts a function of its own over the profiler's, and keeps it there."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        start = trainer.profiler.start

        def noted(action_name: str) -> None:
            self.seen.append(action_name)
            start(action_name)

        trainer.profiler.__dict__["start"] = noted


def test_what_others_have_put_over_its_hooks_stays_and_its_own_are_inert():
    monitor, covers = quiet(), Covers()
    trainer, _ = fit(monitor, Counting(), samples(), callbacks=[covers])
    assert hooks_in(trainer) == {"start"}
    covers.seen.clear()
    before = copy.deepcopy(steps_of(monitor))
    trainer.callbacks.clear()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Counting(), samples())
    assert covers.seen.count("run_training_batch") == NUM_BATCHES
    assert steps_of(monitor) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_made_in_the_middle_of_a_training_can_be_used_in_another(copied):
    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 2 and trainer.current_epoch == 1:
                self.copy = copied(trainer.callbacks[0])

    copies, monitor = Copies(), quiet()
    trainer, _ = fit(monitor, Counting(), samples(), callbacks=[copies])
    assert steps_of(copies.copy) == {0: NUM_BATCHES}
    assert fit(copies.copy, Counting(), samples(3))[1] == {0: 3, 1: 3}
    assert steps_of(monitor) == {0: NUM_BATCHES, 1: NUM_BATCHES}
    assert hooks_in(trainer) == set()


# Profilers ---------------------------------------------------------------------------------------------------


class Noting(Profiler):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def start(self, action_name: str) -> None:
        self.told.append(f"start {action_name}")

    def stop(self, action_name: str) -> None:
        self.told.append(f"stop {action_name}")


def test_a_profiler_is_told_of_the_same_actions_in_the_same_order():
    plain, watched = Noting(), Noting()
    make_trainer(max_epochs=2, profiler=plain, callbacks=[Clock()]).fit(Counting(), samples(), samples(1))
    fit(quiet(), Counting(), samples(), samples(1), profiler=watched, callbacks=[Clock()])
    assert [one for one in watched.told if "FeedMonitor" not in one] == plain.told
    assert len(watched.told) > len(plain.told)


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
def test_lightnings_own_profilers_work_and_their_report_is_written(tmp_path, kind):
    monitor, profiler = quiet(), kind(dirpath=tmp_path, filename="report")
    _, counted = fit(monitor, Counting(), samples(), profiler=profiler)
    assert counted == {0: NUM_BATCHES, 1: NUM_BATCHES}
    assert "run_training_batch" in (tmp_path / "fit-report.txt").read_text()


# What it says and where --------------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("FeedMonitor")]


def test_the_early_verdict_comes_once_and_before_the_first_epoch_is_over(caplog):
    monitor = quiet(first_seconds=1e-6)
    with caplog.at_level(logging.INFO, LOG):
        fit(monitor, Counting(), samples(), max_epochs=3)
    assert [(one.counters.epoch, one.is_interim) for one in monitor.records] == [
        (0, True),
        (0, False),
        (1, False),
        (2, False),
    ]
    assert monitor.records[0].counters.steps.num_steps == 1
    assert [text.split(":")[0] for text in said(caplog)] == [
        "FeedMonitor, epoch 0, after 1 steps",
        "FeedMonitor, epoch 0",
        "FeedMonitor, epoch 1",
        "FeedMonitor, epoch 2",
    ]


@pytest.mark.parametrize("seconds", [None, 1000.0, 10**9])
def test_there_is_no_early_verdict_where_none_is_wanted_or_the_epoch_is_over_before(seconds):
    monitor = quiet(first_seconds=seconds)
    fit(monitor, Counting(), samples())
    assert [one.is_interim for one in monitor.records] == [False, False]


def test_the_line_is_logged_by_lightnings_own_logger_and_nothing_is_printed_without_the_table(caplog, capsys):
    monitor = quiet()
    with caplog.at_level(logging.INFO, LOG):
        fit(monitor, Counting(), samples())
    lines = [f"FeedMonitor, epoch {one.counters.epoch}: {one.line}" for one in monitor.records]
    assert said(caplog) == lines
    assert {one.name for one in caplog.records if one.getMessage() in lines} == {LOG}
    assert {one.levelno for one in caplog.records if one.getMessage() in lines} == {logging.INFO}
    assert capsys.readouterr().out == ""


def test_the_table_is_printed_once_an_epoch_and_not_with_the_early_verdict(capsys):
    monitor = quiet(table=True, first_seconds=1e-6)
    fit(monitor, Counting(), samples())
    printed = capsys.readouterr().out
    assert re.findall(r"^FeedMonitor, (epoch \d(?:, so far)?)", printed, re.MULTILINE) == ["epoch 0", "epoch 1"]
    assert str(monitor.records[-1].verdict.cause) in printed


def test_of_two_monitors_one_tells_the_loggers():
    logger = MemoryLogger()
    monitors = [FeedMonitor(table=False, first_seconds=None) for _ in range(2)]
    make_trainer(callbacks=monitors, logger=logger, max_epochs=1).fit(Counting(), samples())
    assert [len(one.records) for one in monitors] == [1, 1]
    assert sum("gpufeed/feed/wait_share" in figures for _, figures in logger.logged) == 1


def test_every_logger_gets_finite_figures_under_one_prefix_at_the_steps_of_the_training():
    loggers = [MemoryLogger(), MemoryLogger()]
    monitor = quiet()
    trainer, _ = fit(monitor, Counting(), samples(), logger=loggers)
    feed = [(step, figures) for step, figures in loggers[0].logged if "gpufeed/feed/wait_share" in figures]
    assert [step for step, _ in feed] == [NUM_BATCHES, 2 * NUM_BATCHES]
    assert loggers[1].logged == loggers[0].logged
    for _, figures in feed:
        assert all(name.startswith("gpufeed/feed/") for name in figures)
        assert all(type(value) is float and math.isfinite(value) for value in figures.values())
        assert {"step_seconds", "copy_share", "compute_share", "hook_share", "predicted_gain"} <= {
            name.removeprefix("gpufeed/feed/") for name in figures
        }
    assert not any("gpufeed" in name for name in trainer.callback_metrics)


def test_the_figures_are_columns_of_a_csv_logger(tmp_path):
    monitor = quiet()
    fit(monitor, Counting(), samples(), logger=CSVLogger(tmp_path, "feed", ""))
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpufeed/feed/wait_share"]]
    assert [float(row["gpufeed/feed/wait_share"]) for row in rows] == [
        one.verdict.wait_share for one in monitor.records
    ]
    assert [int(row["step"]) for row in rows] == [NUM_BATCHES, 2 * NUM_BATCHES]


# The page ----------------------------------------------------------------------------------------------------


class Looks(pl.Callback):
    """Reads the page after each step and each epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pages: list[str] = []

    def look(self) -> None:
        text = self.path.read_text() if self.path.exists() else ""
        if not self.pages or self.pages[-1] != text:
            self.pages.append(text)

    def on_train_batch_end(self, *args: Any) -> None:
        self.look()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.look()


def test_the_page_is_written_after_the_early_verdict_and_after_each_epoch(tmp_path):
    path = tmp_path / "new" / "folders" / "feed.html"
    looks, monitor = Looks(path), quiet(report_path=path, first_seconds=1e-6)
    fit(monitor, Counting(), samples(), callbacks=[looks])
    assert len(looks.pages) == 3
    assert ["epoch 0, so far" in page for page in looks.pages] == [True, False, False]
    assert ["epoch 1" in page for page in looks.pages] == [False, False, True]
    assert all(page.rstrip().endswith("</html>") for page in looks.pages)
    assert os.listdir(path.parent) == ["feed.html"]


def test_a_home_folder_in_the_path_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    fit(quiet(report_path="~/feed.html"), Counting(), samples(2), max_epochs=1)
    assert (tmp_path / "feed.html").exists()
    assert not Path("~").exists()


def test_a_page_that_cannot_be_written_is_a_warning_and_the_training_goes_on(tmp_path):
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / "file" / "feed.html"
    monitor, model, logger = quiet(report_path=path), Counting(), MemoryLogger()
    with pytest.warns(UserWarning, match=re.escape(f"FeedMonitor: {path} could not be written (")):
        _, counted = fit(monitor, model, samples(), logger=logger)
    assert counted == dict(model.counted) == {0: NUM_BATCHES, 1: NUM_BATCHES}
    assert sum("gpufeed/feed/wait_share" in figures for _, figures in logger.logged) == 2


def test_a_folder_that_takes_the_pages_place_later_is_a_warning_too(tmp_path):
    path = tmp_path / "feed.html"
    monitor = quiet(report_path=path)
    path.mkdir()
    with pytest.warns(UserWarning, match="could not be written"):
        fit(monitor, Counting(), samples())
    assert os.listdir(path) == []


# Arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"first_seconds": 0}, "first_seconds is 0; expected a number of seconds above 0, or None."),
        ({"first_seconds": -1.5}, "first_seconds is -1.5; expected a number of seconds above 0, or None."),
        ({"first_seconds": math.nan}, "first_seconds is nan; expected a number of seconds above 0, or None."),
        ({"first_seconds": math.inf}, "first_seconds is inf; expected a number of seconds above 0, or None."),
        ({"interval_seconds": 0.05}, "interval_seconds is 0.05; expected 0.1 or more."),
        ({"interval_seconds": math.nan}, "interval_seconds is nan; expected 0.1 or more."),
        ({"interval_seconds": math.inf}, "interval_seconds is inf; expected 0.1 or more."),
    ],
)
def test_an_argument_out_of_range_is_refused_with_what_was_expected(arguments, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        FeedMonitor(**arguments)


def test_a_folder_as_report_path_is_refused_with_what_was_expected(tmp_path):
    text = f"report_path is the folder {tmp_path}; expected a file such as feed.html in it."
    for given in (tmp_path, str(tmp_path), f"{tmp_path}/"):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            FeedMonitor(given)


def test_the_callback_has_no_state_in_a_checkpoint(tmp_path):
    trainer, _ = fit(quiet(), Counting(), samples(2))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"] == {}


# In company --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
def test_steps_on_echoed_batches_are_steps_and_the_thread_that_reads_ahead_is_seen(is_first):
    monitor, model, echo = quiet(), Counting(), BatchEcho(2, scale_lr="keep")
    callbacks = [monitor, echo] if is_first else [echo, monitor]
    trainer = make_trainer(callbacks=callbacks, max_epochs=2)
    trainer.fit(model, samples())
    assert steps_of(monitor) == dict(model.counted) == {0: 2 * NUM_BATCHES, 1: 2 * NUM_BATCHES}
    assert [one.counters.loader.has_thread for one in monitor.records] == [True, True]
    assert hooks_in(trainer) == set()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")  # of its own names for jsonargparse
def test_arguments_in_yaml_arrive_as_written(tmp_path):
    written = {"report_path": str(tmp_path / "feed.html"), "table": False, "first_seconds": None}
    train = write_images(tmp_path / "train.h5", 20)
    cli = run(tmp_path, train, {"class_path": "lightning_gpufeed.FeedMonitor", "init_args": written})
    [monitor] = [one for one in cli.trainer.callbacks if isinstance(one, FeedMonitor)]
    assert [one.is_interim for one in monitor.records] == [False] * cli.trainer.max_epochs
    assert all(one.counters.loader.is_own for one in monitor.records)
    assert (tmp_path / "feed.html").exists()
