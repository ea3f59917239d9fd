"""`H5DataModule` in a Trainer: where each split comes from, hooks, tuners, threads, pickling."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_gpufeed import H5DataModule
from lightning_gpufeed.hdf5.order import FullShuffle, WeightedShuffle
from tests.contracts import exactly
from tests.datamodules.models import make_trainer, warnings_of

pytestmark = [
    # Both are tested by themselves: test_bad_input.py, and below.
    pytest.mark.filterwarnings("ignore:batch_size .* is more than the dataset has:UserWarning"),
]

NUM_TRAIN, NUM_VAL = 20, 6


def write_arrays(path: Path, prefix: str, length: int, start: int = 0, mode: str = "w") -> Path:
    """Features of 20 floats (80 bytes: read from the mapped file) and the numbers of the samples."""
    with h5py.File(path, mode) as h5_file:
        features = np.random.default_rng(start).normal(size=(length, 20)).astype(np.float32)
        h5_file[prefix.format("x")] = features
        h5_file[prefix.format("y")] = np.arange(start, start + length)
    return path


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write_arrays(tmp_path / "train.h5", "{}", NUM_TRAIN)


@pytest.fixture
def val(tmp_path: Path) -> Path:
    return write_arrays(tmp_path / "val.h5", "{}", NUM_VAL, start=100)


class Model(pl.LightningModule):
    """Writes down the numbers in the field `y` of each batch, by stage."""

    def __init__(self, lr: float = 0.1) -> None:
        """A single layer."""
        super().__init__()
        self.layer = nn.Linear(20, 1)
        self.lr = lr
        self.seen: dict[str, list[list[int]]] = {}
        self.batches: dict[str, list[Any]] = {}

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        """Write down and give a loss."""
        self.seen.setdefault(stage, []).append(batch["y"].tolist())
        self.batches.setdefault(stage, []).append(batch)
        return self.layer(batch["x"]).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Train."""
        return self.note("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate."""
        self.note("sanity" if self.trainer.sanity_checking else "val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate."""
        self.note("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The numbers of the samples."""
        self.note("predict", batch)
        return batch["y"].clone()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def numbers(self, stage: str) -> list[int]:
        """All numbers seen, in order."""
        return [number for batch in self.seen.get(stage, []) for number in batch]


def fit(datamodule: H5DataModule, model: Model | None = None, **settings: Any) -> Model:
    model = model or Model()
    make_trainer(**{"max_epochs": 1, **settings}).fit(model, datamodule)
    return model


# Where the splits come from ----------------------------------------------------------------------------------


def test_validation_data_comes_from_a_path_in_the_order_of_the_file(train, val):
    model = fit(H5DataModule(train, val=val, batch_size=6, eval_batch_size=4), max_epochs=2)
    assert model.seen["val"] == [[100, 101, 102, 103], [104, 105]] * 2
    assert [len(batch) for batch in model.seen["train"]] == [6, 6, 6, 2] * 2
    for epoch in range(2):
        order = FullShuffle().permutation(NUM_TRAIN, 0, epoch).tolist()
        assert model.numbers("train")[epoch * NUM_TRAIN : (epoch + 1) * NUM_TRAIN] == order


def test_a_batch_holds_every_field_in_the_files_own_type(train):
    with h5py.File(train, "a") as h5_file:
        h5_file["name"] = [f"sample {number}" for number in range(NUM_TRAIN)]
        h5_file["flag"] = np.arange(NUM_TRAIN) % 2 == 0
        expected = torch.from_numpy(h5_file["x"][...])
    batch = fit(H5DataModule(train, batch_size=4, shuffle=None)).batches["train"][1]
    assert {key: getattr(value, "dtype", type(value)) for key, value in batch.items()} == {
        "flag": torch.bool,
        "name": list,
        "x": torch.float32,
        "y": torch.int64,
    }
    assert torch.equal(batch["x"], expected[4:8])
    assert batch["name"] == ["sample 4", "sample 5", "sample 6", "sample 7"]
    assert batch["flag"].tolist() == [True, False, True, False]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_fraction_takes_its_share_aside_and_no_sample_is_in_both(train, seed):
    datamodule = H5DataModule(train, val=0.2, test=0.25, batch_size=4, seed=seed)
    model = fit(datamodule)
    make_trainer().test(model, datamodule, verbose=False)
    parts = {stage: model.numbers(stage) for stage in ("train", "val", "test")}
    assert {stage: len(part) for stage, part in parts.items()} == {"train": 11, "val": 4, "test": 5}
    assert sorted(parts["train"] + parts["val"] + parts["test"]) == list(range(NUM_TRAIN))
    assert parts["val"] == sorted(parts["val"])


def test_the_seed_decides_which_samples_a_fraction_takes(train):
    taken = [tuple(fit(H5DataModule(train, val=0.5, seed=seed)).numbers("val")) for seed in (0, 0, 1)]
    assert taken[0] == taken[1] != taken[2]


@pytest.mark.parametrize(
    "indices",
    [[3, 1, 17], np.array([3, 1, 17]), np.array([3, 1, 17], dtype=np.uint8), torch.tensor([3, 1, 17]), (3, 1, 17)],
    ids=["list", "array", "uint8", "tensor", "tuple"],
)
def test_an_index_array_is_validated_on_in_its_order_and_left_out_of_training(train, indices):
    model = fit(H5DataModule(train, val=indices, batch_size=4))
    assert model.numbers("val") == [3, 1, 17]
    assert sorted(model.numbers("train")) == [n for n in range(NUM_TRAIN) if n not in (1, 3, 17)]


def test_train_indices_limit_the_training_and_what_fractions_are_taken_from(train):
    model = fit(H5DataModule(train, val=0.5, train_indices=range(4, 14), batch_size=4))
    assert len(model.numbers("val")) == 5
    assert sorted(model.numbers("train") + model.numbers("val")) == list(range(4, 14))


def test_a_stratified_fraction_keeps_the_proportions(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as h5_file:
        h5_file["x"] = np.zeros((100, 20), np.float32)
        h5_file["y"] = np.repeat([0, 1, 2], [70, 20, 10])
    model = fit(H5DataModule(tmp_path / "a.h5", val=0.2, stratify_by="y", batch_size=25))
    assert np.bincount(model.numbers("val")).tolist() == [14, 4, 2]
    assert np.bincount(model.numbers("train")).tolist() == [56, 16, 8]


def test_splits_in_one_file_are_found_by_their_names(tmp_path):
    path = tmp_path / "all.h5"
    for start, split in ((0, "train"), (100, "val"), (200, "test")):
        write_arrays(path, "{}_" + split, 8, start=start, mode="a")
    datamodule = H5DataModule(path, batch_size=8)
    model = fit(datamodule)
    trainer = make_trainer()
    trainer.test(model, datamodule, verbose=False)
    trainer.predict(model, datamodule)
    assert sorted(model.numbers("train")) == list(range(8))
    assert model.numbers("val") == list(range(100, 108))
    assert model.numbers("test") == model.numbers("predict") == list(range(200, 208))


def test_splits_in_one_file_are_named_with_a_placeholder(tmp_path):
    path = tmp_path / "all.h5"
    for start, split in ((0, "train"), (200, "test")):
        write_arrays(path, split + "/{}", 8, start=start, mode="a")
    datamodule = H5DataModule(path, keys={"x": "{split}/x", "y": "{split}/y"}, batch_size=8)
    model = fit(datamodule)
    make_trainer().test(model, datamodule, verbose=False)
    assert (sorted(model.numbers("train")), model.numbers("val")) == (list(range(8)), [])
    assert model.numbers("test") == list(range(200, 208))


def test_several_files_are_one_dataset(tmp_path, train, val):
    model = fit(H5DataModule([train, val], val=[val, train], batch_size=7, shuffle=None))
    assert model.numbers("train") == [*range(NUM_TRAIN), *range(100, 106)]
    assert model.numbers("val") == [*range(100, 106), *range(NUM_TRAIN)]


def test_predict_uses_its_own_samples_without_taking_them_from_training(train):
    datamodule = H5DataModule(train, predict=[5, 2], batch_size=4)
    model = fit(datamodule)
    assert sorted(model.numbers("train")) == list(range(NUM_TRAIN))
    predicted = make_trainer().predict(model, datamodule)
    assert torch.cat(predicted).tolist() == [5, 2]


def test_predict_falls_back_to_test(train, val):
    datamodule = H5DataModule(train, test=val, batch_size=4)
    assert torch.cat(make_trainer().predict(Model(), datamodule)).tolist() == list(range(100, 106))


def test_without_validation_data_there_is_no_validation_and_no_warning(train):
    model = Model()
    texts = warnings_of(lambda: fit(H5DataModule(train, batch_size=4), model, max_epochs=2, num_sanity_val_steps=2))
    assert sorted(model.seen) == ["train"]
    assert [text for text in texts if "zero" in text or "val" in text] == []


def test_evaluation_alone_needs_no_training_data(val):
    datamodule = H5DataModule(val=val, batch_size=4)
    model = Model()
    make_trainer().validate(model, datamodule, verbose=False)
    assert model.numbers("val") == list(range(100, 106))


def test_every_stage_can_follow_every_other(train, val):
    datamodule = H5DataModule(train, val=val, test=0.25, batch_size=4)
    model, trainer = Model(), make_trainer(max_epochs=1)
    trainer.validate(model, datamodule, verbose=False)
    trainer.test(model, datamodule, verbose=False)
    trainer.fit(model, datamodule)
    trainer.predict(model, datamodule)
    trainer.validate(model, datamodule, verbose=False)
    assert [len(model.numbers(stage)) for stage in ("train", "val", "test", "predict")] == [15, 3 * NUM_VAL, 5, 5]
    assert model.numbers("test") == model.numbers("predict")


# What the Trainer can ask for --------------------------------------------------------------------------------


def test_overfitting_repeats_the_same_first_batches(train, val):
    model = fit(H5DataModule(train, val=val, batch_size=3), overfit_batches=2, max_epochs=2)
    assert model.seen["train"] == [[0, 1, 2], [3, 4, 5]] * 2


def test_fast_dev_run_runs_its_batches_only(train, val):
    model = fit(H5DataModule(train, val=val, batch_size=3), fast_dev_run=2)
    order = FullShuffle().permutation(NUM_TRAIN, 0, 0).tolist()
    assert model.seen["train"] == [order[:3], order[3:6]]
    assert model.seen["val"] == [[100, 101, 102], [103, 104, 105]]


def test_dropping_the_last_samples_applies_to_training_only(train, val):
    model = fit(H5DataModule(train, val=val, batch_size=8, eval_batch_size=4, drop_last=True), max_epochs=2)
    assert [len(batch) for batch in model.seen["train"]] == [8, 8] * 2
    assert [len(batch) for batch in model.seen["val"]] == [4, 2] * 2


@pytest.mark.parametrize("every", [1, 2])
def test_reloading_the_loaders_changes_nothing(train, val, every):
    plain = fit(H5DataModule(train, val=val, batch_size=6), max_epochs=4)
    reloaded = fit(H5DataModule(train, val=val, batch_size=6), max_epochs=4, reload_dataloaders_every_n_epochs=every)
    assert reloaded.seen == plain.seen


def test_a_sanity_check_takes_nothing_from_training_or_validation(train, val):
    plain = fit(H5DataModule(train, val=val, batch_size=4), max_epochs=2)
    checked = fit(H5DataModule(train, val=val, batch_size=4), max_epochs=2, num_sanity_val_steps=1)
    assert checked.seen.pop("sanity") == [[100, 101, 102, 103]]
    assert checked.seen == plain.seen


def test_finding_a_learning_rate_leaves_the_order_as_it_is(train, val, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Lightning saves the state to go back to in the current directory
    plain = fit(H5DataModule(train, val=val, batch_size=2), max_epochs=2)
    by_callback = Model()
    fit(
        H5DataModule(train, val=val, batch_size=2),
        by_callback,
        max_epochs=2,
        callbacks=[LearningRateFinder(num_training_steps=7, early_stop_threshold=None)],
    )
    assert by_callback.seen["train"][7:] == plain.seen["train"]
    model, datamodule, trainer = Model(), H5DataModule(train, val=val, batch_size=2), make_trainer(max_epochs=2)
    Tuner(trainer).lr_find(model, datamodule=datamodule, num_training=7, early_stop_threshold=None)
    assert len(model.seen["train"]) == 7
    model.seen.clear()
    trainer.fit(model, datamodule)
    assert model.seen["train"] == plain.seen["train"]


def test_finding_a_batch_size_changes_it_and_training_starts_from_the_beginning(train, val, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    datamodule, model = H5DataModule(train, val=val, batch_size=1), Model()
    fit(datamodule, model, max_epochs=2, callbacks=[BatchSizeFinder(steps_per_trial=1, max_trials=2, init_val=1)])
    assert datamodule.batch_size == 2
    tried, trained = model.numbers("train")[: -2 * NUM_TRAIN], model.numbers("train")[-2 * NUM_TRAIN :]
    assert len(tried) < NUM_TRAIN
    orders = [FullShuffle().permutation(NUM_TRAIN, 0, epoch).tolist() for epoch in range(2)]
    assert trained == orders[0] + orders[1]
    assert {len(batch) for batch in model.seen["train"][-20:]} == {2}


def test_the_batch_size_of_the_next_fit_can_be_set(train):
    datamodule = H5DataModule(train, batch_size=4)
    fit(datamodule)
    datamodule.batch_size = 10
    assert [len(batch) for batch in fit(datamodule).seen["train"]] == [10, 10]


def test_the_cost_of_feeding_is_counted(train, val):
    datamodule = H5DataModule(train, val=val, batch_size=4)
    assert datamodule.feed_statistics().num_batches == 0
    fit(datamodule)
    statistics = datamodule.feed_statistics()
    assert (statistics.num_batches, statistics.num_samples) == (5, NUM_TRAIN)
    assert statistics.num_bytes == NUM_TRAIN * (20 * 4 + 8)
    assert 0 <= statistics.wait_share <= 1
    assert datamodule.feed_statistics("val").num_samples == NUM_VAL


# Work on the device ------------------------------------------------------------------------------------------


def add(amount: float) -> Any:
    return lambda batch: dict(batch, x=batch["x"] + amount)


def test_the_device_transform_is_for_training_and_the_other_one_for_the_rest(train, val):
    datamodule = H5DataModule(
        train, val=val, test=val, batch_size=20, device_transform=add(1000), eval_device_transform=add(-1000)
    )
    model = fit(datamodule, num_sanity_val_steps=1)
    trainer = make_trainer()
    for stage in ("validate", "test"):
        getattr(trainer, stage)(model, datamodule, verbose=False)
    trainer.predict(model, datamodule)
    signs = {
        stage: {int(batch["x"].mean().div(500).round()) for batch in batches}
        for stage, batches in model.batches.items()
    }
    assert signs == {"train": {2}, "sanity": {-2}, "val": {-2}, "test": {-2}, "predict": {-2}}


def test_without_a_transform_for_the_rest_only_training_is_transformed(train, val):
    model = fit(H5DataModule(train, val=val, batch_size=20, device_transform=add(1000)))
    assert model.batches["train"][0]["x"].min() > 900
    assert model.batches["val"][0]["x"].max() < 100


class Doubling(nn.Module):
    """A transform with state of its own."""

    def __init__(self) -> None:
        """The factor is a buffer."""
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, batch: Any) -> Any:
        """Twice the features."""
        return dict(batch, x=batch["x"] * self.factor)


def test_a_module_can_be_the_transform(train):
    plain = fit(H5DataModule(train, batch_size=20))
    doubled = fit(H5DataModule(train, batch_size=20, device_transform=Doubling()))
    assert torch.equal(doubled.batches["train"][0]["x"], plain.batches["train"][0]["x"] * 2)


class WithHook(Model):
    """Has the hook that Lightning would ask instead of the DataModule's, or not at all."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Append the sign of the data to a log of events."""
        return dict(batch, order=["module" if batch["x"].min() > 900 else "module first"])


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in both:UserWarning")
def test_the_modules_own_hook_runs_after_the_transform(train, val):
    model = fit(
        H5DataModule(train, val=val, batch_size=4, device_transform=add(1000), eval_device_transform=add(1000)),
        WithHook(),
    )
    assert {batch["order"][0] for batch in model.batches["train"] + model.batches["val"]} == {"module"}


def test_a_batch_that_is_kept_is_never_overwritten(train):
    model = fit(H5DataModule(train, batch_size=2, num_slots=1), max_epochs=3)
    with h5py.File(train) as h5_file:
        features = torch.from_numpy(h5_file["x"][...])
    assert len(model.batches["train"]) == 30
    assert all(torch.equal(batch["x"], features[batch["y"]]) for batch in model.batches["train"])


# Threads, errors, processes ----------------------------------------------------------------------------------


def reader_threads(grace_seconds: float = 0.0) -> list[str]:
    """Names of the reading threads; those told to stop may take a while to do so."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("gpufeed")]
    for thread in threads:
        thread.join(timeout=grace_seconds)
    return [thread.name for thread in threads if thread.is_alive()]


def open_files(path: Path) -> list[str]:
    """Descriptors and mappings of a file in this process."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return [str(link) for link in links if os.path.realpath(link) == str(path)] + [
        line for line in mappings if line.endswith(str(path))
    ]


class Failing(Model):
    """Fails in the middle of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Fail at the third batch."""
        if batch_idx == 2:
            assert reader_threads() != []  # the test would pass without a thread to end
            raise RuntimeError("the third batch is too much")
        return super().training_step(batch, batch_idx)


def test_an_error_in_a_training_step_leaves_no_thread(train, val):
    datamodule = H5DataModule(train, val=val, batch_size=2)
    with pytest.raises(RuntimeError, match="the third batch is too much"):
        fit(datamodule, Failing())
    gc.collect()
    assert reader_threads(grace_seconds=5) == []
    # The DataModule can be used again.
    assert sorted(fit(datamodule).numbers("train")) == list(range(NUM_TRAIN))


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_an_error_in_a_training_step_leaves_no_open_file_once_the_datamodule_is_gone(train, val):
    with pytest.raises(RuntimeError, match="the third batch is too much"):
        fit(H5DataModule(train, val=val, batch_size=2), Failing())
    gc.collect()
    assert reader_threads(grace_seconds=5) == []


def test_an_epoch_cut_short_leaves_no_thread(train):
    class Stopping(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    model = fit(H5DataModule(train, batch_size=2), Stopping(), max_epochs=3)
    assert [len(batch) for batch in model.seen["train"]] == [2] * 3
    assert reader_threads() == []


def test_an_epoch_cut_short_while_a_batch_is_being_read_leaves_no_file_open(tmp_path):
    path = tmp_path / "slow.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file["y"] = np.arange(32)
        for number in range(6):  # tens of milliseconds to decode, field by field
            noise = np.random.default_rng(number).integers(0, 256, (32, 100_000), dtype=np.uint8)
            h5_file.create_dataset(f"x{number}", data=noise, chunks=(1, 100_000), compression="gzip")

    class Quick(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(torch.ones(20)).sum()

    for _ in range(3):
        datamodule = H5DataModule(path, batch_size=4, shuffle=None)
        fit(datamodule, Quick(), limit_train_batches=2)
        assert reader_threads() == []
        assert open_files(path) == []


def test_a_checkpoint_saved_after_training_leaves_no_file_open(train, tmp_path):
    datamodule, trainer = H5DataModule(train, batch_size=4), make_trainer(max_epochs=1)
    trainer.fit(Model(), datamodule)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert open_files(train) == []
    state = torch.load(tmp_path / "end.ckpt", weights_only=True)["H5DataModule"]["train"]
    assert (state["epoch"], state["samples_consumed"]) == (0, NUM_TRAIN)


def batches_by_hand(datamodule: H5DataModule) -> list[dict[str, Any]]:
    """Without a Trainer."""
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    batches = [{"y": batch["y"].tolist(), "x": batch["x"].clone()} for batch in loader]
    datamodule.teardown("fit")
    return batches


@pytest.mark.parametrize("val_origin", [0.25, None])
@pytest.mark.parametrize("used", ["new", "set up", "fitted"])
def test_a_datamodule_can_be_pickled_at_any_time(train, val, used, val_origin):
    datamodule = H5DataModule(train, val=val_origin, test=val, batch_size=4, device_transform=Doubling())
    if used == "set up":
        datamodule.setup("fit")
        next(iter(datamodule.train_dataloader()))
    if used == "fitted":
        fit(datamodule)
        datamodule.trainer = None  # a Trainer pickles itself as ddp_spawn needs it; see test_distributed.py
    sent = pickle.loads(pickle.dumps(datamodule))
    datamodule.teardown("fit")
    expected = batches_by_hand(H5DataModule(train, val=val_origin, test=val, batch_size=4))
    received = batches_by_hand(sent)
    assert [batch["y"] for batch in received] == [batch["y"] for batch in expected]
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(received, expected, strict=True))


def test_it_can_be_used_without_a_trainer(train, val):
    datamodule = H5DataModule(train, val=val, batch_size=8)
    assert [len(batch["y"]) for batch in batches_by_hand(datamodule)] == [8, 8, 4]
    datamodule.setup("validate")
    values: Sequence[Any] = [batch["y"].tolist() for batch in datamodule.val_dataloader()]
    assert values == [[100, 101, 102, 103, 104, 105]]
    datamodule.teardown("validate")


# Weights and folds -------------------------------------------------------------------------------------------


@pytest.fixture
def described(train: Path) -> Path:
    """The training file, with what may be said of its samples."""
    numbers = np.arange(NUM_TRAIN)
    with h5py.File(train, "a") as h5_file:
        h5_file["kind"] = (numbers >= 15).astype(np.uint8)  # 15 of one class, 5 of another
        h5_file["importance"] = numbers / 4
        h5_file["fold"] = numbers % 4
        h5_file["patient"] = [f"p{number // 3}" for number in numbers]
    return train


def test_samples_are_drawn_by_a_column_of_weights_which_is_no_field_then(described, val):
    model = fit(
        H5DataModule(described, val=val, keys=["x", "y"], sample_weights="importance", batch_size=6), max_epochs=2
    )
    shuffle = WeightedShuffle(np.arange(NUM_TRAIN) / 4)
    assert model.numbers("train") == [
        *shuffle.permutation(NUM_TRAIN, 0, 0).tolist(),
        *shuffle.permutation(NUM_TRAIN, 0, 1).tolist(),
    ]
    assert model.numbers("val") == list(range(100, 106)) * 2
    found = fit(H5DataModule(described, sample_weights="importance", batch_size=6))
    assert sorted(found.batches["train"][0]) == ["fold", "kind", "patient", "x", "y"]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("balanced", [1 / 15] * 15 + [1 / 5] * 5),
        ({0: 2, 1: 1}, [2] * 15 + [1] * 5),
        ({"0": 0.0, "1": 1.0}, [0] * 15 + [1] * 5),
    ],
    ids=str,
)
def test_classes_are_drawn_by_their_weights(described, weights, expected):
    datamodule = H5DataModule(described, sample_weights=weights, weight_by="kind", samples_per_epoch=33, batch_size=8)
    model = fit(datamodule)
    assert model.numbers("train") == WeightedShuffle(expected).permutation(33, 0, 0).tolist()
    assert [len(batch) for batch in model.seen["train"]] == [8, 8, 8, 8, 1]


def test_balanced_classes_come_about_equally_often(described):
    datamodule = H5DataModule(
        described, sample_weights="balanced", stratify_by="kind", samples_per_epoch=2000, batch_size=500
    )
    drawn = np.array(fit(datamodule).numbers("train"))
    assert abs((drawn >= 15).sum() - 1000) <= 5 * np.sqrt(500)  # the standard deviation of 2000 even chances


def test_weights_are_those_of_the_samples_trained_on(described):
    datamodule = H5DataModule(
        described, val=0.25, train_indices=range(4, 20), sample_weights=np.arange(20.0), keys=["x", "y"], batch_size=6
    )
    model = fit(datamodule)
    used = [number for number in range(4, 20) if number not in model.numbers("val")]
    drawn = WeightedShuffle(np.array(used, float)).permutation(12, 0, 0)
    assert model.numbers("train") == np.array(used)[drawn].tolist()


def test_evaluation_and_overfitting_know_no_weights(described):
    datamodule = H5DataModule(
        described, val=described, test=described, keys=["x", "y"], sample_weights="importance", batch_size=6
    )
    model = Model()
    make_trainer(max_epochs=2, overfit_batches=2).fit(model, datamodule)
    assert model.seen["train"] == [list(range(6)), list(range(6, 12))] * 2
    make_trainer().test(model, datamodule, verbose=False)
    assert model.numbers("test") == list(range(NUM_TRAIN))


def test_the_line_at_the_start_says_that_an_epoch_is_draws(described, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fit(
            H5DataModule(described, sample_weights="importance", keys=["x"], samples_per_epoch=7, batch_size=7),
            Silent(),
        )
    [line] = [record.message for record in caplog.records if record.message.startswith("H5DataModule")]
    assert line.startswith("H5DataModule: 20 train samples (an epoch is 7 draws by weight); x: ")


class Silent(Model):
    """Needs no numbers of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Train."""
        return self.layer(batch["x"]).pow(2).mean()


@pytest.mark.parametrize("kind", ["column", "numbers", "made", "grouped"])
def test_every_sample_is_validated_on_in_one_fold_and_trained_on_in_the_others(described, kind):
    folds = {
        "column": {"folds": "fold"},
        "numbers": {"folds": (np.arange(NUM_TRAIN) % 4).tolist()},
        "made": {"num_folds": 4, "stratify_by": "kind"},
        "grouped": {"num_folds": 4, "group_by": "patient"},
    }[kind]
    validated = []
    for fold in range(4):
        model = fit(H5DataModule(described, fold=fold, batch_size=8, **folds))
        parts = [model.numbers("train"), model.numbers("val")]
        assert sorted(parts[0] + parts[1]) == list(range(NUM_TRAIN))
        if kind in ("column", "numbers"):
            assert parts[1] == list(range(fold, NUM_TRAIN, 4))
        if kind == "grouped":
            assert {number // 3 for number in parts[0]}.isdisjoint(number // 3 for number in parts[1])
        validated += parts[1]
    assert sorted(validated) == list(range(NUM_TRAIN))


def test_a_weighted_datamodule_over_a_fold_can_be_pickled(described):
    arguments = {"fold": 1, "folds": "fold", "sample_weights": "importance", "keys": ["x", "y"], "batch_size": 4}
    datamodule = H5DataModule(described, **arguments)
    datamodule.setup("fit")
    sent = pickle.loads(pickle.dumps(datamodule))
    assert [batch["y"] for batch in batches_by_hand(sent)] == [batch["y"] for batch in batches_by_hand(datamodule)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"samples_per_epoch": 5},
            "samples_per_epoch is 5, but there are no sample_weights: without them an epoch is every sample once.",
        ),
        ({"folds": "fold"}, "there are folds, but fold= does not say which of them is for validation."),
        (
            {"val": 0.1, "fold": 0, "num_folds": 3},
            "both val and fold are given: a fold of the training samples is for validation. Leave val off.",
        ),
    ],
    ids=["draws", "fold", "val"],
)
def test_arguments_that_do_not_fit_together_are_refused_at_once(train, arguments, message):
    with pytest.raises(ValueError, match=exactly(message)):
        H5DataModule(train, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"sample_weights": [1.0, 2.0]},
            "there are 2 sampling weights; expected 20, one for each sample of the file(s).",
        ),
        (
            {"sample_weights": {0: 1.0}, "weight_by": "kind"},
            "the sampling weights leave out class 1 (5 samples); there "
            "are weights for 0. Give every class that occurs one, 0 for those that are not to be drawn.",
        ),
        (
            {"sample_weights": "balanced", "keys": ["x"]},
            "weighting by class needs to know the classes: no field holds "
            "class numbers. Name the field with weight_by=; the fields are x.",
        ),
        (
            {"folds": "fold", "fold": 4},
            "fold=4: no sample is in that fold. There are the folds 0 (5 samples), 1 (5 "
            "samples), 2 (5 samples), 3 (5 samples).",
        ),
        (
            {"num_folds": 8, "fold": 4, "group_by": "patient"},
            "num_folds is 8, but there are 7 groups to make folds of; expected at most that many.",
        ),
    ],
    ids=["length", "class", "labels", "fold", "groups"],
)
def test_weights_and_folds_that_do_not_fit_the_file_are_refused_in_setup(described, arguments, message):
    with pytest.raises(ValueError, match=exactly(message)):
        H5DataModule(described, **arguments).setup("fit")
