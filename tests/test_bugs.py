"""One test for every bug that was found and fixed, with its story.

A test comes here in the change that fixes the bug, and has to fail without the fix. It is the smallest training, or
the shortest call, that showed the bug; the rule that the bug broke is tested in the file of the part it belongs to.

At the end: what users of HDF5 report again and again. Each works here, or is refused with file, cause and cure.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import platform
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpufeed import (
    BatchEcho,
    FeedError,
    GpuFeedError,
    H5DataModule,
    H5ImageDataModule,
    H5Loader,
    LayoutError,
    PackError,
)
from lightning_gpufeed.device.images import ImagePreparation
from lightning_gpufeed.echo.plan import AdaptiveEcho, EchoTrace
from lightning_gpufeed.hdf5.access import FileStamp
from lightning_gpufeed.hdf5.source import H5Source
from lightning_gpufeed.hdf5.writer import pack
from tests.datamodules.models import Recorder, every_checkpoint, make_trainer, read, write_images
from tests.doubles import WAIT_SECONDS, Ended, run_forked, thin_package

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]

NUM_SAMPLES = 16
EVERYTHING = list(range(NUM_SAMPLES))


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write_images(tmp_path / "train.h5", NUM_SAMPLES)


def fit(datamodule: Any, model: Recorder | None = None, checkpoint: Path | None = None, **settings: Any) -> Recorder:
    model = model or Recorder()
    make_trainer(**{"max_epochs": 2, **settings}).fit(model, datamodule, ckpt_path=checkpoint)
    return model


def saved(train: Path, folder: Path, *, checkpoint: Path | None = None, batch_size: int = 4, **settings: Any) -> Path:
    """Train and save after every step."""
    fit(
        H5ImageDataModule(train, batch_size=batch_size),
        checkpoint=checkpoint,
        enable_checkpointing=True,
        callbacks=every_checkpoint(folder)[:2],
        **settings,
    )
    return folder


# Lightning's own ---------------------------------------------------------------------------------------------


class Dicts(Recorder):
    """Takes the dicts of an H5Loader, and only trains."""

    validation_step = None  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Make a pair of them."""
        return super().training_step((batch["images"].float(), batch["labels"]), batch_idx)


@pytest.mark.parametrize("reads_estimate", [False, True])
def test_lightning_drops_a_loaders_state_when_the_number_of_steps_was_asked_for(train, tmp_path, reads_estimate):
    # Reading `trainer.estimated_stepping_batches` in configure_optimizers (every schedule with a fixed length does)
    # makes Lightning 2.6 ask for the loader before it has read the loader's state from the checkpoint, and never look
    # again: a resumed epoch silently begins from its start. A loader given to the Trainer by itself cannot help it; the
    # DataModules keep the position a second time, in their own state. If the first half fails, Lightning is repaired.
    settings: dict[str, Any] = {"enable_checkpointing": True, "callbacks": every_checkpoint(tmp_path / "alone")[:1]}
    with H5Loader(train, 4) as loader:
        whole = Dicts()
        make_trainer(max_epochs=2, **settings).fit(whole, loader)
    with H5Loader(train, 4) as loader:
        alone = Dicts(reads_estimate=reads_estimate)
        make_trainer(max_epochs=2).fit(alone, loader, ckpt_path=tmp_path / "alone" / "step-02.ckpt")
    is_kept = alone.trained == whole.trained[2:]
    assert is_kept is not reads_estimate

    checkpoint = saved(train, tmp_path / "module") / "step-02.ckpt"
    resumed = fit(H5ImageDataModule(train, batch_size=4), Recorder(reads_estimate=reads_estimate), checkpoint)
    assert resumed.trained == whole.trained[2:]


# Resuming ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads_estimate", [False, True])
def test_epochs_after_a_resume_with_smaller_batches_were_cut_short(train, tmp_path, reads_estimate):
    # Lightning trains every epoch for the number of batches it was told once. It was told the number of the resumed
    # epoch, 4 batches of 4, and then stopped the epochs that followed after 4 batches of 2: half of the samples.
    checkpoint = saved(train, tmp_path / "saved", max_epochs=3) / "step-04.ckpt"
    model = Recorder(reads_estimate=reads_estimate)
    fit(H5ImageDataModule(train, batch_size=2), model, checkpoint, max_epochs=3)
    assert [sorted(samples) for samples in model.trained_by_epoch.values()] == [EVERYTHING] * 2


def test_epochs_after_a_second_resume_were_cut_short(train, tmp_path):
    # The same, one resume later: the epoch was an odd one still, but its batches had today's size, which was taken for
    # a sign that nothing is odd. Since then every epoch has the same length, and Lightning's count is moved instead.
    first = saved(train, tmp_path / "first") / "step-02.ckpt"
    second = saved(train, tmp_path / "second", checkpoint=first, batch_size=2) / "step-03.ckpt"
    model = fit(H5ImageDataModule(train, batch_size=2), checkpoint=second)
    assert len(model.trained_by_epoch[0]) == NUM_SAMPLES - 2 * 4 - 2
    assert sorted(model.trained_by_epoch[1]) == EVERYTHING


def test_testing_a_checkpoint_moved_the_next_training(train, tmp_path):
    # Lightning restores a DataModule for `trainer.test(ckpt_path=...)` too. The position waited for the next training
    # loader, and a new training began in the middle of its first epoch.
    checkpoint = saved(train, tmp_path / "saved") / "step-02.ckpt"
    datamodule = H5ImageDataModule(train, test=train, batch_size=4)
    make_trainer().test(Recorder(), datamodule, ckpt_path=checkpoint, verbose=False)
    assert sorted(fit(datamodule, max_epochs=1).trained_by_epoch[0]) == EVERYTHING


def test_a_checkpoint_of_other_data_could_not_be_tested(train, tmp_path):
    # For the same reason: "the position was saved over other data", where no position was needed.
    checkpoint = saved(train, tmp_path / "saved") / "step-02.ckpt"
    other = write_images(tmp_path / "other.h5", NUM_SAMPLES, seed=9)
    datamodule = H5ImageDataModule(other, test=other, batch_size=4)
    fit(datamodule, max_epochs=1)
    model = Recorder()
    make_trainer().test(model, datamodule, ckpt_path=checkpoint, verbose=False)
    assert model.samples("test") == EVERYTHING


def test_a_reloaded_loader_forgot_the_order_it_was_resumed_with(train, tmp_path):
    # A resumed run goes on in the order it was saved with, whatever seed the DataModule has now. A loader made anew for
    # the next epoch (reload_dataloaders_every_n_epochs) took the DataModule's.
    checkpoint = saved(train, tmp_path / "saved") / "step-02.ckpt"
    whole = fit(H5ImageDataModule(train, batch_size=4))
    datamodule = H5ImageDataModule(train, batch_size=4, seed=5)
    resumed = fit(datamodule, checkpoint=checkpoint, reload_dataloaders_every_n_epochs=1)
    assert resumed.trained == whole.trained[2:]


def test_a_trainers_reload_setting_was_changed_by_what_another_one_did(train, tmp_path):
    # A resume with other sizes set the switch on its Trainer. When the epoch was the last one it was never put back,
    # and the next Trainer that used the DataModule got the first one's old setting.
    checkpoint = saved(train, tmp_path / "saved", max_epochs=1) / "step-01.ckpt"
    datamodule = H5ImageDataModule(train, batch_size=8)
    fit(datamodule, checkpoint=checkpoint, max_epochs=1)
    trainer = make_trainer(max_epochs=1, reload_dataloaders_every_n_epochs=2)
    trainer.fit(Recorder(), datamodule)
    assert trainer.reload_dataloaders_every_n_epochs == 2


class Interrupted(Recorder):
    """Fails in its fourth step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Train, or fail."""
        if len(self.trained) == 3:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings(r"ignore:`.fit\(ckpt_path=None\)` was called without a model:UserWarning")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
def test_the_batch_of_a_step_that_failed_was_never_trained_on(train, tmp_path):
    # A checkpoint written because of an error lies in the middle of a step. The batch counted as used, since it had
    # been handed out; Lightning counts it as still to come. The resumed epoch lacked it and, one batch short, its
    # validation.
    saving = OnExceptionCheckpoint(tmp_path)
    before = Interrupted()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(H5ImageDataModule(train, batch_size=2), before, enable_checkpointing=True, callbacks=[saving])
    after = fit(H5ImageDataModule(train, batch_size=2), checkpoint=tmp_path / "on_exception.ckpt")
    assert sorted(before.trained_by_epoch[0] + after.trained_by_epoch[0]) == EVERYTHING


# Values ------------------------------------------------------------------------------------------------------


def test_validation_images_were_decoded_with_the_scale_of_the_training_file(train, tmp_path):
    # Quantised files state a scale and an offset each. Those of the first training file were applied to every split.
    stated = [{"scale": 0.01, "offset": -1.0}, {"scale": 0.5, "offset": 3.0}]
    paths = [write_images(tmp_path / f"{n}.h5", 4, seed=n, attributes=stated[n]) for n in range(2)]
    model = Recorder(keep_images=True)
    fit(H5ImageDataModule(paths[0], val=paths[1], batch_size=4), model, max_epochs=1)
    [images] = model.images["validate"]
    assert torch.equal(images[:, 0], read(paths[1], "images").float() * 0.5 + 3.0)


class Divisors(TorchDispatchMode):
    """Notes what tensors are divided by."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.kinds: list[type] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the divisor of a division, and do what was asked for."""
        if func.name().startswith("aten::div"):
            self.kinds.append(type(args[1]))
        return func(*args, **(kwargs or {}))


def test_bytes_were_divided_by_a_number_of_the_host():
    # By such a number CUDA does not divide, it multiplies with the reciprocal: half of all bytes got another last bit
    # than on the CPU. By a tensor on the device it divides. tests/gpu compares the bits; here only who divides.
    prepare = ImagePreparation("NHW", mean=(0.5,), std=(0.25,))
    with Divisors() as divisors:
        prepare(torch.zeros(2, 9, 8, dtype=torch.uint8))
    assert divisors.kinds == [torch.Tensor] * 2


def test_a_named_label_was_ignored_when_the_images_were_not_named(train):
    # label_key= was only looked at together with image_key=; alone, labels were searched as if nothing had been given.
    with h5py.File(train, "a") as h5_file:
        h5_file["coarse"] = np.arange(NUM_SAMPLES) + 100
    model = fit(H5ImageDataModule(train, label_key="coarse", batch_size=16, shuffle=None), max_epochs=1)
    assert model.trained_by_epoch[0] == list(range(100, 100 + NUM_SAMPLES))


def test_a_packed_file_with_a_channel_that_never_changes_could_not_be_used(tmp_path):
    # Its standard deviation is stated as 0, which was refused as if a user had given it.
    images, attributes = np.full((4, 9, 8), 7, np.uint8), {"mean": [7 / 255], "std": [0.0]}
    path = write_images(tmp_path / "a.h5", 4, images=images, attributes=attributes)
    datamodule = H5ImageDataModule(path, batch_size=4)
    fit(datamodule, max_epochs=1)
    assert datamodule.std == (1.0,)


def test_a_fraction_in_yaml_was_taken_for_the_name_of_a_file():
    # jsonargparse takes the first member of a union that fits, and a text fits everything: val: 0.1 became "0.1".
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(H5ImageDataModule, "data")
    parsed = parser.parse_args(["--data.train=[a.h5, b.h5]", "--data.val=0.1", "--data.shuffle=false"])
    assert (parsed.data.train, parsed.data.val, parsed.data.shuffle) == (["a.h5", "b.h5"], 0.1, False)


# Threads and files -------------------------------------------------------------------------------------------


def test_the_reading_thread_outlived_an_epoch_that_was_cut_short(train):
    # Lightning lets go of an iterator before it tears the DataModule down. The thread was only told to stop, by the
    # garbage collector; nobody waited for it, and sometimes it opened the file again that had just been closed.
    with h5py.File(train, "a") as h5_file:
        noise = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, 400_000), dtype=np.uint8)
        h5_file.create_dataset("noise", data=noise, chunks=(1, 400_000), compression="gzip")  # slow to decode

    class Quick(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer.weight.sum()

    datamodule = H5DataModule(train, batch_size=4, shuffle=None)
    fit(datamodule, Quick(), max_epochs=1, limit_train_batches=1)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("gpufeed")] == []


def test_a_checkpoint_saved_after_the_training_left_the_file_open(train, tmp_path):
    # The digest of the data was computed when it was first asked for, here after everything had been closed.
    trainer, datamodule = make_trainer(max_epochs=1), H5ImageDataModule(train, batch_size=4)
    trainer.fit(Recorder(), datamodule)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert str(train) not in Path("/proc/self/maps").read_text()


def test_an_error_in_a_training_step_left_an_unclosed_file_to_the_garbage_collector(train):
    # After an error Lightning does not tear a DataModule down, and the open file was closed by nobody: Python then
    # warns, which is an error in a test suite as strict as this one.
    class Failing(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("on purpose")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        with contextlib.suppress(RuntimeError):
            fit(H5ImageDataModule(train, batch_size=4), Failing())
        gc.collect()
    assert [text for text in (str(warning.message) for warning in caught) if str(train) in text] == []


def test_fitting_without_validation_data_warned_of_an_empty_list(train):
    # val_dataloader gave an empty list, and Lightning warned that its length is zero; hidden since then, but at first
    # for good, so that the second fit warned of the contrary: a validation_step without a val_dataloader.
    datamodule = H5ImageDataModule(train, batch_size=4)
    for _ in range(2):
        model = fit(datamodule, Recorder(), max_epochs=1)
        assert sorted(model.trained_by_epoch[0]) == EVERYTHING


def test_booleans_mean_zero_and_one_after_packing_too(tmp_path):
    """`gpufeed pack` stored boolean images as uint8 without a word about their scale, and the DataModule divided by
    255: a model saw 1/255 for True. They are stored as booleans now.
    """
    images = np.random.default_rng(0).random((20, 1, 4, 4)) > 0.5
    np.save(tmp_path / "b.npy", images)
    pack(tmp_path / "b.npy", tmp_path / "b.h5")
    dm = H5ImageDataModule(tmp_path / "b.h5", batch_size=20, shuffle=None)
    dm.setup("fit")
    loader = dm.train_dataloader()
    (batch,) = loader
    expected = (torch.from_numpy(images).float() - dm.mean[0]) / dm.std[0]
    assert torch.equal(dm.on_after_batch_transfer(batch, 0), expected)
    dm.teardown("fit")


def test_a_named_key_is_not_used_for_a_split_it_does_not_belong_to(tmp_path):
    """`image_key="train/images"` alone: the labels were found for every split that the file names, so validation got
    the training images with the validation labels.
    """
    path = tmp_path / "all.h5"
    with h5py.File(path, "w") as h5_file:
        for number, split in enumerate(("train", "val", "test")):
            h5_file[f"{split}/images"] = np.full((10, 1, 8, 8), number, np.uint8)
            h5_file[f"{split}/labels"] = np.full(10, number)
    for named in ({"image_key": "train/images"}, {"label_key": "train/labels"}):
        dm = H5ImageDataModule(path, **named)
        dm.setup()
        assert list(dm._splits.opened()) == ["train"]
        assert {name: one[0].key for name, one in dm._splits.get("train")[0].fields.items()} == {
            "image": "train/images",
            "label": "train/labels",
        }
    dm = H5ImageDataModule(path, image_key="{split}/images")
    dm.setup()
    assert [found[0].fields["label"][0].key for found in dm._splits.opened().values()] == [
        f"{split}/labels" for split in ("train", "val", "test", "test")
    ]


def test_a_datamodule_prints(tmp_path):
    """Lightning's own `__str__` stumbles over a DataModule whose hooks are set per instance."""
    dm = H5ImageDataModule(write_images(tmp_path / "a.h5", 10), val=0.2)
    assert str(dm) == "H5ImageDataModule(batch_size=64; not set up yet)"
    dm.setup()
    assert f"train: 8 samples of {tmp_path / 'a.h5'}" in str(dm)


def test_an_iteration_of_another_process_is_refused_and_not_waited_for(train):
    """A forked child that went on with its parent's iteration waited for ever for a thread that is not there."""
    with H5Loader(train, 4) as loader:
        iterator = iter(loader)
        next(iterator)
        child = os.fork()
        if not child:
            try:
                next(iterator)
            except FeedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    """`gpufeed inspect PIPE` and `gpufeed pack PIPE OUT.h5` waited for a writer for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(LayoutError, match="is a pipe or device"):
        H5Loader(pipe, 8)
    with pytest.raises(PackError, match="is a pipe or device"):
        pack(pipe, tmp_path / "out.h5")


def test_a_trainer_inside_a_fit_does_not_change_which_transform_is_used(train, tmp_path):
    """The DataModule asked "its" Trainer what is running. A callback that validates with a Trainer of its own became
    that Trainer, and the rest of the training went without `device_transform`.
    """
    val = write_images(tmp_path / "val.h5", 4)
    seen: list[int] = []

    def mark(images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return images

    dm = H5ImageDataModule(train, val=val, batch_size=4, device_transform=mark)

    class Inner(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            make_trainer().validate(Recorder(), datamodule=dm, verbose=False)

    make_trainer(max_epochs=3, callbacks=[Inner()]).fit(Recorder(), datamodule=dm)
    assert seen == [4] * 12


def test_columns_about_a_split_are_not_taken_for_its_data(tmp_path):
    """A column `is_train` made a split of its own, of which the images were missing."""
    path = write_images(tmp_path / "a.h5", 10)
    with h5py.File(path, "r+") as h5_file:
        h5_file["is_train"] = np.arange(10) < 8
    with H5Loader(path, 10, keys=["images", "labels"]):
        pass
    dm = H5DataModule(path, batch_size=10)
    dm.setup("fit")
    assert sorted(dm._splits.get("train")[0].fields) == ["images", "is_train", "labels"]


def test_two_datasets_that_would_be_the_same_field_are_refused(tmp_path):
    """Of `val/x` beside `valid/x` one was dropped without a word."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5_file:
        for key in ("train/x", "val/x", "valid/x"):
            h5_file[key] = np.arange(20)
    with pytest.raises(LayoutError, match="'val/x' and 'valid/x' both could be the field 'x' of 'val'"):
        H5DataModule(path).setup("fit")


def test_a_hundred_thousand_class_names_are_kept(tmp_path):
    """Attributes of more than 4096 elements were left out, and the class names with them."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as h5_file:
        h5_file["images"], h5_file["labels"] = np.zeros((10, 9, 8), np.uint8), np.arange(10)
        h5_file["labels"].attrs["class_names"] = [f"class {number}" for number in range(100_000)]
    dm = H5ImageDataModule(path)
    dm.setup("fit")
    assert dm.num_classes == 100_000


def test_numpy_integers_do_not_get_into_checkpoints(train):
    """`batch_size=np.int64(4)` wrote checkpoints that torch refused to load, found only at the resume."""
    with H5Loader(train, np.int64(4), seed=np.int64(3)) as loader:
        next(iter(loader))
        assert json.loads(json.dumps(loader.state_dict()))["seed"] == 3


def test_batches_that_come_in_bursts_are_used_as_often_as_the_limit_allows_on_average():
    # The limit held for each batch: with four workers three of four batches were ready at once, were used once, and
    # the fourth not often enough to bridge the time to the next burst. Steps waited 44 % of the time.
    rule, trace = AdaptiveEcho(5), EchoTrace()
    used = []
    for fetch in range(8):
        is_last_of_burst = fetch % 4 == 3
        passes = 1
        while is_last_of_burst and rule.wants_pass(0, fetch, passes, trace.unused(0, fetch, 4)) is None:
            passes += 1
        trace.add(0, fetch, passes)
        used.append(passes)
    assert used == [1, 1, 1, 17, 1, 1, 1, 17]


@pytest.mark.parametrize("step", [1, 3, 6, 9])
def test_a_run_resumed_inside_a_batch_of_a_loader_without_state_has_the_steps_it_was_to_have(tmp_path, step):
    # The passes over the batch in work were begun anew, while `global_step` kept the steps that were done: OneCycleLR
    # raised at the end.
    def train(checkpoint: Path | None) -> pl.Trainer:
        model = Recorder(2, schedule=True)
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [BatchEcho(2, num_splits=2, scale_lr="keep"), *([] if checkpoint else [saver])]
        trainer = make_trainer(callbacks=callbacks, max_epochs=2, enable_checkpointing=not checkpoint)
        data = TensorDataset(torch.randn(20, 2), torch.arange(20))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, DataLoader(data, 4, shuffle=True), ckpt_path=checkpoint, weights_only=False)
        return trainer

    whole = train(None)
    assert train(tmp_path / f"step={step}.ckpt").global_step == whole.global_step == 40


class _Stream:
    """Six batches an epoch, of numbers that go on where the epoch before stopped."""

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        for _ in range(6):
            self.next += 1
            yield torch.ones(2, 2), torch.full((2,), self.next)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize("limit", [3, 0.5])
@pytest.mark.parametrize("factor", ["auto", 1])
@pytest.mark.filterwarnings("ignore:BatchEcho. limit_train_batches ends epochs early")
def test_no_batch_of_a_stream_is_lost_where_a_limit_ends_the_epochs(limit, factor):
    # The thread had asked for one batch more than the epoch took: the next epoch began one too late.
    model = Recorder(2)
    echo = BatchEcho(factor, num_splits=2 if factor == 1 else 1, scale_lr="keep", max_echo_factor=1)
    make_trainer(callbacks=[echo], max_epochs=3, limit_train_batches=limit).fit(model, _Stream())
    seen = sorted({number for _, numbers in model.trained for number in numbers})
    assert seen == list(range(1, len(seen) + 1))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_second_fit_goes_on_with_the_record_of_the_first():
    # The callback began a new record, which could not replay the whole training.
    echo, stream = BatchEcho("auto", replay={0: [2, 1, 1, 1, 1, 1]}, scale_lr="keep", max_echo_factor=1), _Stream()
    trainer, model = make_trainer(callbacks=[echo], max_epochs=1), Recorder(2)
    trainer.fit(model, stream)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, stream)
    assert echo.trace == {0: [2, 1, 1, 1, 1, 1], 1: [1] * 6}


# What users of HDF5 report -----------------------------------------------------------------------------------

HERE = "test_bugs.py::"
LOADER, READER = "hdf5/test_loader.py::", "hdf5/readers/test_reader.py::"
REPORTS = {
    # number and complaint: the tests that show it cured
    "R1 handles cannot be pickled, by spawn": [LOADER + "test_a_loader_sent_to_another_process_reads_the_same_there"],
    "R2 by forkserver, Python's default": [LOADER + "test_a_loader_sent_to_another_process_reads_the_same_there"],
    "R3 ddp_spawn": ["datamodules/test_distributed.py::test_a_datamodule_is_sent_to_spawned_ranks"],
    "R4 wrong data after a fork": [HERE + "test_workers_forked_beside_open_files_read_what_h5py_reads"],
    "R5 the same beside a writer": [HERE + "test_a_file_that_this_process_has_open_for_writing_is_refused"],
    "R6 memory grows with every step": [LOADER + "test_memory_is_bounded_by_the_ring_and_flat_over_epochs"],
    "R7 memory grows in loops": [
        "datamodules/test_h5_image.py::test_memory_is_flat_over_the_epochs_and_does_not_grow_with_the_file"
    ],
    "R8 the chunk cache seems to do nothing": [READER + "test_a_window_shuffle_decodes_each_chunk_once"],
    "R9 fancy indexing is slower than a loop": [READER + "test_a_batch_reads_each_block_once_even_without_a_cache"],
    "R10 indices have to increase": [HERE + "test_samples_may_be_asked_for_in_any_order_and_twice"],
    "R11 threads wait for one lock": [HERE + "test_batches_come_while_another_thread_holds_the_lock_of_h5py"],
    "R12 listing chunks takes minutes": ["hdf5/test_layout.py::test_many_chunks_are_listed_in_one_pass"],
    "R13 file systems without locks": [
        HERE + "test_a_file_on_a_file_system_without_locks_is_read",
        HERE + "test_locks_that_are_demanded_and_cannot_be_had_are_named",
    ],
    "R14 errno 11 beside a writer": ["hdf5/test_access.py::test_a_file_that_another_process_has_open_for_writing"],
    "R16 a killed writer": [HERE + "test_what_a_killed_writer_left_is_read_or_refused_with_what_to_do"],
    "R17 copies cut short, flipped bits": [
        "hdf5/test_access.py::test_a_file_cut_at_any_length_is_refused_or_whole",
        "hdf5/test_writer.py::test_verify_names_the_chunk_and_the_rows_of_a_flipped_bit",
    ],
    "R19 a moved source gives fill values": ["hdf5/test_linked.py::test_a_source_file_that_is_gone"],
    "R21 encoded images": ["hdf5/test_wild.py::test_every_sample_of_an_epoch_is_what_h5py_reads"],
    "R23 stores in the cloud are read slowly": [
        "hdf5/remote/test_remote_file.py::test_chunks_by_their_offsets_are_what_h5py_reads_from_the_local_file"
    ],
    "R24 garbage collected while bytes are fetched": [
        "hdf5/remote/test_remote_file.py::test_garbage_of_h5py_collected_where_bytes_are_fetched_is_no_deadlock"
    ],
    "R25 a plug-in not imported by workers": [
        HERE + "test_a_worker_decodes_what_needs_a_plug_in_without_importing_it",
        "hdf5/test_layout.py::test_a_filter_whose_plug_in_is_missing_is_named",
    ],
    "R27 a resume forgets the position": [
        "test_bugs.py::test_lightning_drops_a_loaders_state_when_the_number_of_steps_was_asked_for"
    ],
    "R29 ranks repeat or lose samples": [
        "datamodules/test_distributed.py::test_metrics_added_up_over_the_ranks_are_those_of_one_process"
    ],
    "R30 files are converted to leave HDF5": ["hdf5/test_wild.py::test_every_sample_of_an_epoch_is_what_h5py_reads"],
    "R31 floats of 0 to 1 stored as bytes": [
        "hdf5/test_writer.py::test_floats_are_refused_before_anything_is_written",
        "hdf5/doctor/test_doctor.py::test_floats_that_were_stored_as_zeros_are_a_problem",
    ],
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_what_users_report_has_a_test(report):
    for test in REPORTS[report]:
        name, _, function = test.partition("::")
        assert f"\ndef {function}(" in (Path(__file__).parent / name).read_text(), test


def write_rows(path: Path, **options: Any) -> np.ndarray:
    """Rows of noise, four to a chunk unless told otherwise."""
    rows = np.random.default_rng(1).integers(0, 256, (NUM_SAMPLES, 30, 10), dtype=np.uint8)
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("rows", data=rows, **options)
    return rows


STORED: dict[str, dict[str, Any]] = {
    "raw": {"chunks": (4, 30, 10)},
    "gzip": {"chunks": (4, 30, 10), "compression": "gzip"},
}


class Rows:
    """What people write: opened once, read in `__getitem__`."""

    def __init__(self, path: Path) -> None:
        """Open, and read, as `len` of a field or a look at the first sample does."""
        self.source = H5Source(path)
        self[0]

    def __len__(self) -> int:
        """Samples."""
        return self.source.num_samples

    def __getitem__(self, index: int) -> Any:
        """One sample."""
        return self.source.read_new(np.array([index]))["rows"][0]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("stored", ["raw", "gzip"])
def test_workers_forked_beside_open_files_read_what_h5py_reads(tmp_path, stored):
    # R4: `bad object header`, labels of 255: several processes shared one file position, or one cache.
    rows = write_rows(tmp_path / "a.h5", **STORED[stored])
    dataset = Rows(tmp_path / "a.h5")
    loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context="fork", timeout=WAIT_SECONDS)
    with contextlib.closing(dataset.source):
        assert np.concatenate([batch.numpy() for batch in loader]).tobytes() == rows.tobytes()


def read_while_written(path: Path, h5_dataset: Any) -> None:
    with H5Loader(path, NUM_SAMPLES, shuffle=None) as loader:
        h5_dataset[6] = 77
        [batch] = loader
    assert (batch["rows"][6] == 77).all(), "what was there before"


@pytest.mark.parametrize("stored", STORED)
def test_a_file_that_this_process_has_open_for_writing_is_refused(tmp_path, stored):
    # R5: HDF5 lets a process read what it is writing. What is not flushed yet lies in its memory, not in the file.
    write_rows(tmp_path / "a.h5", **STORED[stored])
    refused = pytest.raises(GpuFeedError, match=r"a\.h5.* open for writing")
    with h5py.File(tmp_path / "a.h5", "r+") as writer, refused:
        read_while_written(tmp_path / "a.h5", writer["rows"])


@pytest.mark.parametrize("stored", STORED)
def test_samples_may_be_asked_for_in_any_order_and_twice(tmp_path, stored):
    # R10: h5py refuses both; Keras answers with shuffle="batch", which is hardly one.
    rows = write_rows(tmp_path / "a.h5", **STORED[stored])
    wanted = [5, 3, 3, 15, 0, 5]
    with h5py.File(tmp_path / "a.h5") as h5_file, pytest.raises(TypeError, match="increasing order"):
        h5_file["rows"][wanted]
    with contextlib.closing(H5Source(tmp_path / "a.h5")) as source:
        assert source.read_new(np.array(wanted))["rows"].numpy().tobytes() == rows[wanted].tobytes()
    with H5Loader(tmp_path / "a.h5", 6, shuffle=None, indices=wanted) as loader:
        [batch] = loader
    assert batch["rows"].numpy().tobytes() == rows[wanted].tobytes()


@pytest.mark.parametrize("stored", STORED)
def test_batches_come_while_another_thread_holds_the_lock_of_h5py(tmp_path, stored):
    # R11: h5py has one lock for everything, filters included; two threads that decode are as fast as one.
    rows = write_rows(tmp_path / "a.h5", **STORED[stored])
    with H5Loader(tmp_path / "a.h5", 2, shuffle=None, num_slots=1) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]  # opens the file, which is done through h5py
        reading = threading.Thread(target=lambda: batches.extend(iterator))
        with h5py._objects.phil:
            reading.start()
            reading.join(WAIT_SECONDS)
            has_ended = not reading.is_alive()
        reading.join()
    assert has_ended
    assert np.concatenate([batch["rows"].numpy() for batch in batches]).tobytes() == rows.tobytes()


# From here on this process may do everything but lock a file: the system answers so, as file systems without locks do.
PROCESSES = """
import ctypes, os, platform, signal, struct
import h5py, numpy as np
from lightning_gpufeed.hdf5.loader import H5Loader
os.chdir({folder!r})
FLOCK = {{"x86_64": 73, "aarch64": 32}}[platform.machine()]

def forbid_locks(error):
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, FLOCK), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(Program(len(steps), code))):
        print("skip")
        os._exit(0)
    try:
        h5py.File("a.h5", "r", locking=True)
    except OSError as failure:
        assert f"errno = {{error}}" in str(failure), failure

def read(path):
    with H5Loader(path, 4, shuffle=None) as loader:
        print(*(int(batch["rows"].sum()) for batch in loader), flush=True)
    os._exit(0)  # the end of an interpreter takes longer than all that

def write_and_die(path, flush, width=100, **options):
    h5_file = h5py.File(path, "w", **options)
    h5_dataset = h5_file.create_dataset("rows", (8, width), "u1", chunks=(4, width))
    h5_dataset[...] = 1
    if flush:
        h5_file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
NO_LOCKS = {37: "no locks available, as on NFS", 38: "not implemented, as on Lustre", 95: "not supported"}
KILLED = {
    "nothing flushed": 'write_and_die("nothing.h5", False)',
    "partly flushed by HDF5": 'write_and_die("partly.h5", False, width=2 << 20)',
    "flushed": 'write_and_die("flushed.h5", True)',
    "flushed, newest format": 'write_and_die("newest.h5", True, libver="latest")',
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> tuple[Path, dict[str, Ended]]:
    """The folder, and how each process ended."""
    if platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux":
        pytest.skip("the number of the system call is not known")
    folder = tmp_path_factory.mktemp("pains")
    with h5py.File(folder / "a.h5", "w") as h5_file:
        h5_file["rows"] = np.ones((8, 100), np.uint8)
    locks = {str(error): f'forbid_locks({error}); read("a.h5")' for error in NO_LOCKS}
    return folder, run_forked(PROCESSES.format(folder=str(folder)), {**locks, **KILLED})


@pytest.mark.parametrize("error", [37, 38, 95], ids=str)
def test_a_file_on_a_file_system_without_locks_is_read(ended, error):
    # R13: `unable to lock file, errno = 37`, on clusters everywhere. Nobody can be kept from writing there.
    process = ended[1][str(error)]
    if process.text == "skip\n":
        pytest.skip("the system lets no process forbid itself anything")
    assert process.last_line == "400 400", process.text


def test_locks_that_are_demanded_and_cannot_be_had_are_named(ended, tmp_path):
    # R13, where the environment says that locks are a must: HDF5 then listens to nobody else. Read at its start.
    folder, _ = ended
    thin = PROCESSES.replace("hdf5.loader import H5Loader", "hdf5.access import open_file")  # without torch
    code = thin.format(folder=str(folder)) + 'forbid_locks(37)\nwith open_file("a.h5"):\n    pass\n'
    environment = {**os.environ, "HDF5_USE_FILE_LOCKING": "TRUE", "PYTHONPATH": str(thin_package(tmp_path / "thin"))}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    if process.stdout == "skip\n":
        pytest.skip("the system lets no process forbid itself anything")
    last_line = process.stderr.splitlines()[-1]
    assert "LayoutError: a.h5" in last_line
    assert "HDF5_USE_FILE_LOCKING" in last_line


@pytest.mark.parametrize("case", KILLED)
def test_what_a_killed_writer_left_is_read_or_refused_with_what_to_do(ended, case):
    # R16: all is lost unless it was flushed, and in the newest format it looks as if it were still being written.
    folder, processes = ended
    assert processes[case].code == -signal.SIGKILL
    path = folder / KILLED[case].split('"')[1]
    if case == "flushed":
        with H5Loader(path, 8, shuffle=None) as loader:
            [batch] = loader
        assert (batch["rows"] == 1).all()
        return
    with pytest.raises(GpuFeedError) as error:
        H5Loader(path, 8)
    cure = "run h5clear -s on the file" if case == "flushed, newest format" else "copy or pack it again"
    assert str(error.value).startswith(f"{path}: ")
    assert cure in str(error.value)


def test_a_worker_decodes_what_needs_a_plug_in_without_importing_it(tmp_path):
    # R25: `can't open directory .../plugin`: written beside `import hdf5plugin`, read by a worker that has not.
    rows = write_rows(tmp_path / "a.h5", chunks=(4, 30, 10), **hdf5plugin.BZip2())
    code = """
import pickle, sys
stamp = pickle.load(open("stamp.pickle", "rb"))  # as a worker is sent a loader, and finds the package by it
from lightning_gpufeed.hdf5.access import open_file
with open_file(stamp.path) as h5_file:
    sys.stdout.buffer.write(h5_file["rows"][...].tobytes())
"""
    (tmp_path / "stamp.pickle").write_bytes(pickle.dumps(FileStamp.of(tmp_path / "a.h5")))
    environment = {**os.environ, "PYTHONPATH": str(thin_package(tmp_path / "thin"))}
    worker = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=100, check=True
    )
    assert worker.stdout == rows.tobytes()
