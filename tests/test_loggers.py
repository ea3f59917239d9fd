"""What the parts log: every figure of ours is in the table of docs/metrics.md, and is written once each time.

Trainings write to Lightning's loggers of files, which are read back here: of one process with all callbacks, and of two
ranks with the strategies.
"""

from __future__ import annotations

import csv
import json
import re
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_gpufeed import BatchEcho, FeedMonitor, OOMRecovery
from tests.datamodules.models import Recorder, make_trainer, write_images
from tests.doubles import KeptList, run_ranks
from tests.logger_worker import RUNS, every_logger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

TABLE = Path(__file__).parents[1] / "docs" / "metrics.md"
WORKER = Path(__file__).with_name("logger_worker.py")
STAGES = ("fit", "validate", "test", "predict")
NUM_EPOCHS, NUM_BATCHES = 2, 5
ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free."


# The table -----------------------------------------------------------------------------------------------------------


def documented() -> dict[str, str]:
    """Name -> when it is logged, with a row for each stage where there are several."""
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", TABLE.read_text(), re.MULTILINE)
    names = {name.replace("<stage>", stage): when for name, when in rows for stage in STAGES}
    assert len(rows) == len({name for name, _ in rows})
    return names


NEEDS_A_DEVICE = {name for name, when in documented().items() if "CUDA only" in when}
"""Rows that say so; nothing on these machines can write them."""


# What was written ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """What a training has left in files: (step, name) as often as it was written."""

    table: Counter[tuple[int, str]]
    events: Counter[tuple[int, str]]

    @classmethod
    def of(cls, folder: Path, name: str) -> Written:
        # Imported here: a reader of files, which no other test needs.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TensorBoard, about itself
            from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        table: Counter[tuple[int, str]] = Counter()
        with (folder / name / "version_0" / "metrics.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                table.update((int(row["step"]), key) for key, text in row.items() if text and key != "step")
        events: Counter[tuple[int, str]] = Counter()
        for path in (folder / "events" / name / "version_0").glob("events.*"):
            for event in EventFileLoader(str(path)).Load():
                events.update((event.step, value.tag) for value in event.summary.value if value.tag != "hp_metric")
        return cls(table, events)

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.events}

    @property
    def ours(self) -> Counter[tuple[int, str]]:
        return ours(self.events)


def ours(written: Counter[tuple[int, str]]) -> Counter[tuple[int, str]]:
    return Counter({key: count for key, count in written.items() if key[1].startswith("gpufeed/")})


def rows(logged: list[Any]) -> list[tuple[int, dict[str, float]]]:
    """What a logger was told by parts of ours, one call after the other."""
    return [(step, row) for step, row in logged if any(name.startswith("gpufeed/") for name in row)]


# One process ---------------------------------------------------------------------------------------------------------


class Slow(Dataset[Any]):
    """Images of a file, opened by each worker: 240 ms for a batch of four, longer than its steps on a busy machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.h5_file: Any = None

    def __len__(self) -> int:
        return 4 * NUM_BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.h5_file = self.h5_file or h5py.File(self.path)
        time.sleep(0.06)
        return torch.from_numpy(self.h5_file["images"][index]).float(), int(self.h5_file["labels"][index])


class Hungry(Recorder):
    """Runs out of memory once in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = KeptList()

    def fail_once(self, stage: str) -> None:
        if not self.trainer.sanity_checking and stage not in self.failed:
            self.failed.append(stage)
            raise torch.OutOfMemoryError(ERROR)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.fail_once("fit")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail_once("validate")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.fail_once("test")
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fail_once("predict")
        return super().predict_step(batch, batch_idx)


def train(folder: Path, data: Path, name: str, *, has_loggers: bool = True, **arguments: Any) -> Any:
    """Train, test and predict with all callbacks; give the row of each call of a logger."""
    loggers, memory = every_logger(folder, name)
    trainer = make_trainer(
        max_epochs=NUM_EPOCHS,
        logger=loggers if has_loggers else False,
        callbacks=[
            BatchEcho(2, scale_lr="keep"),
            OOMRecovery(),
            FeedMonitor(interval_seconds=0.1, table=False, first_seconds=None),
        ],
        default_root_dir=folder / f"root of {name}",
        enable_checkpointing=False,
    )
    model = Hungry()
    evaluation = DataLoader([(torch.rand(9, 8), 0)] * 4, batch_size=4)
    trainer.fit(model, DataLoader(Slow(data), batch_size=4, num_workers=1), evaluation, **arguments)
    if not arguments:
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    trainer.test(model, evaluation, verbose=False)
    trainer.predict(model, evaluation)
    return memory.logged


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loggers")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What both ranks were told, by the name of the training."""
    text = run_ranks(WORKER, {"world_size": 2, "out": str(folder)}, folder, num_processes=2, limit_seconds=200)
    files = {name: [folder / f"{name}.{rank}.json" for rank in range(2)] for name in RUNS}
    assert all(file.exists() for both in files.values() for file in both), text[-6000:]
    return {name: [json.loads(file.read_text()) for file in both] for name, both in files.items()}


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return write_images(folder / "train.h5", 4 * NUM_BATCHES)


@pytest.fixture(scope="module")
def callbacks(folder: Path, data: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec|The '\\w+' does not have many workers")
        return train(folder, data, "callbacks")


ON_RANKS = [name for name in RUNS if name != "no logger"]


# Tests ---------------------------------------------------------------------------------------------------------------


def test_every_figure_that_is_written_is_in_the_table_and_every_other_one_of_it_needs_a_device(
    folder, callbacks, ranks
):
    written = set().union(*(Written.of(folder, name).names for name in ["callbacks", *ON_RANKS]))
    of_the_user = {"loss", "train_loss_step", "train_loss_epoch", "epoch"}
    of_the_user |= {f"{stage}_{name}" for stage in ("validate", "test") for name in ("loss", "count", "sum")}
    assert written - of_the_user == set(documented()) - NEEDS_A_DEVICE
    assert {"gpufeed/feed/idle_share", "gpufeed/feed/device_utilisation"} == NEEDS_A_DEVICE


@pytest.mark.parametrize("name", ["callbacks", *ON_RANKS])
def test_both_files_have_the_same_figures_each_once_at_each_step(folder, callbacks, ranks, name):
    written = Written.of(folder, name)
    assert written.ours
    assert ours(written.table) == written.ours
    assert set(written.ours.values()) == {1}


def test_callbacks_log_each_epoch_and_each_recovered_batch_once(callbacks):
    parts = Counter((step, *part_of(row)) for step, row in rows(callbacks))
    end = 2 * NUM_BATCHES  # steps of an epoch in which each batch is used twice
    assert parts == {
        (1, "gpufeed/oom", "fit"): 1,
        (end, "gpufeed/oom", "validate"): 1,
        **{(number * end, part, ""): 1 for number in (1, 2) for part in ("gpufeed/echo", "gpufeed/feed")},
        (2 * end, "gpufeed/oom", "test"): 1,
        (2 * end, "gpufeed/oom", "predict"): 1,
    }


def part_of(row: dict[str, float]) -> tuple[str, str]:
    """Whose figures these are, and of which stage."""
    [found] = {re.sub(r"(?<=oom)/(fit|validate|test|predict)_.*|/\w+$", r" \1", name) for name in row}
    part, _, stage = found.partition(" ")
    return part, stage


def test_a_resumed_training_logs_what_is_new_and_nothing_twice(folder, data, callbacks):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about checkpoints of an epoch's end
        loggers, memory = every_logger(folder, "resumed")
        trainer = make_trainer(
            max_epochs=NUM_EPOCHS + 1,
            logger=loggers,
            callbacks=[BatchEcho(2, scale_lr="keep"), OOMRecovery(), FeedMonitor(table=False, first_seconds=None)],
        )
        loader = DataLoader(Slow(data), batch_size=4, num_workers=1)
        trainer.fit(Recorder(), loader, ckpt_path=folder / "callbacks.ckpt", weights_only=False)
    end = 2 * NUM_BATCHES * (NUM_EPOCHS + 1)
    assert [(step, *part_of(row)) for step, row in rows(memory.logged)] == [
        (end, "gpufeed/echo", ""),
        (end, "gpufeed/feed", ""),
    ]


@pytest.mark.parametrize("name", ON_RANKS)
def test_figures_are_logged_once_on_rank_zero_and_not_on_others(ranks, name):
    zero, one = ranks[name]
    assert rows(one["logged"]) == []
    assert one["logged"]  # what the user logs is told to every rank
    found = rows(zero["logged"])
    names = Counter(key for _, row in found for key in row)
    assert names
    assert set(names.values()) == {1}
    assert all(isinstance(step, int) for step, _ in found)


def test_what_a_strategy_logs_comes_with_its_line(ranks):
    found, _ = ranks["sync, found"]
    [line] = [text for text in found["said"] if "measured" in text]
    [decision] = [(step, row) for step, row in rows(found["logged"]) if "gpufeed/sync/gain" in row]
    assert 0 < decision[0] < found["global_step"]
    assert f"{1e3 * decision[1]['gpufeed/sync/step_seconds']:.4g} ms a step measured" in line
    assert f"{1e3 * decision[1]['gpufeed/sync/predicted_step_seconds']:.4g} ms predicted" in line

    given, _ = ranks["sync, given"]
    assert rows(given["logged"])[0] == (
        1,
        {
            "gpufeed/sync/num_deferred": 2,
            "gpufeed/sync/num_messages": 4,
            "gpufeed/sync/is_cross_iteration": 1,
            "gpufeed/sync/is_scattered": 0,
        },
    )
    [(step, peak)] = rows(given["logged"])[1:]
    assert step == given["global_step"] == 4
    [line] = [text for text in given["said"] if "kept at most" in text]
    assert f"{peak['gpufeed/sync/peak_deferred_bytes'] / 1e6:.4g} MB" in line

    pipeline, _ = ranks["pipeline"]
    (first, plan), (later, measured) = rows(pipeline["logged"])
    assert (first, later) == (0, 13)  # in the first step, and in the fourteenth, before their updates
    [line] = [text for text in pipeline["said"] if "predicted" in text]
    assert f"predicted {1e3 * plan['gpufeed/pipeline/predicted_step_seconds']:.4g} ms a step" in line
    [line] = [text for text in pipeline["said"] if "measured" in text]
    assert f"measured {1e3 * measured['gpufeed/pipeline/step_seconds']:.4g} ms a step" in line


def test_a_resumed_pipeline_logs_its_plan_at_the_step_that_it_has_come_to(ranks):
    resumed, _ = ranks["pipeline, resumed"]
    (step, plan), _ = rows(resumed["logged"])
    assert step == 16
    assert plan == {"gpufeed/pipeline/num_stages": 2, "gpufeed/pipeline/num_microbatches": 2}


def test_without_a_logger_nothing_is_written(folder, ranks):
    assert [one["logged"] for one in ranks["no logger"]] == [[], []]
    assert ranks["no logger"][0]["global_step"] == 4
    for path in ("no logger", "events/no logger", "root of no logger"):
        assert not (folder / path).exists()
