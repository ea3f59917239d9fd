"""What a user with a bad file or a bad argument reads: every message in full, as it leaves `Trainer.fit`."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lightning_gpufeed import FeedError, GpuFeedError, H5DataModule, H5ImageDataModule, LayoutError
from tests.callbacks.echo_models import wait_until
from tests.datamodules.models import Recorder, make_trainer, warnings_of, write_images


def fit(datamodule: H5DataModule, model: Recorder | None = None, **settings: Any) -> None:
    make_trainer(**{"max_epochs": 1, **settings}).fit(model or Recorder(), datamodule)


def message(error: type[Exception], datamodule: H5DataModule, model: Recorder | None = None, **settings: Any) -> str:
    """The text of the error that fitting raises, of exactly this type; afterwards no thread is left."""
    with pytest.raises(error) as caught:
        fit(datamodule, model, **settings)
    assert type(caught.value) is error
    text = str(caught.value)
    del caught
    gc.collect()
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("gpufeed")]
    for thread in readers:
        thread.join(timeout=5)
    assert [thread.name for thread in readers if thread.is_alive()] == []
    return text


# Files -------------------------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path):
    assert message(FileNotFoundError, H5ImageDataModule(tmp_path / "none.h5")) == (
        f"[Errno 2] no such file: expected an HDF5 file; the current directory is {os.getcwd()}: '{tmp_path}/none.h5'"
    )


def test_a_file_that_is_not_hdf5(tmp_path):
    path = tmp_path / "a.h5"
    path.write_bytes(b"PK\x03\x04 this is a zip")
    assert message(LayoutError, H5ImageDataModule(path)) == (
        f"{path} is not an HDF5 file: 18 bytes, beginning with b'PK\\x03\\x04 thi'; expected the HDF5 signature. "
        f"Make one with: gpufeed pack SOURCE OUT.h5"
    )


def test_a_directory(tmp_path):
    assert message(LayoutError, H5ImageDataModule(tmp_path)) == (
        f"{tmp_path} is a directory; expected an HDF5 file. Pack it first: gpufeed pack {tmp_path} OUT.h5"
    )


def test_a_wrong_key_is_told_which_keys_there_are(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    assert message(LayoutError, H5ImageDataModule(path, image_key="image", label_key="labels")) == (
        f"{path}: no dataset 'image'. It has: 'images' (10, 9, 8) uint8, 'labels' (10,) int64."
    )


def test_a_file_in_which_nothing_looks_like_images(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as h5_file:
        h5_file["features"] = np.zeros((10, 4))
    assert message(LayoutError, H5ImageDataModule(tmp_path / "a.h5")) == (
        f"{tmp_path}/a.h5: no array looks like images (N, ..., H, W). Name one with image_key=; the file has: "
        f"'features' (10, 4)."
    )


def test_a_file_in_which_several_arrays_look_like_images(tmp_path):
    path = write_images(tmp_path / "a.h5", 10, keys=("left", "labels"))
    write_images(path, 10, keys=("right", "more"), mode="a")
    assert message(LayoutError, H5ImageDataModule(path)) == (
        f"{path}: several arrays could be the images. Name one with image_key=; the file has: 'labels' (10,), "
        f"'left' (10, 9, 8), 'more' (10,), 'right' (10, 9, 8)."
    )


def test_arrays_of_different_lengths(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    with h5py.File(path, "a") as h5_file:
        del h5_file["labels"]
        h5_file["labels"] = np.arange(9)
    expected = (
        f"{path}: the datasets have different numbers of samples: 'images' 10, 'labels' 9. "
        f"Name those that belong together."
    )
    assert message(LayoutError, H5ImageDataModule(path, image_key="images", label_key="labels")) == expected
    assert message(LayoutError, H5DataModule(path)) == expected


def test_a_truncated_file(tmp_path):
    path = write_images(tmp_path / "a.h5", 1000)
    size = path.stat().st_size
    os.truncate(path, size - 5000)
    text = message(LayoutError, H5ImageDataModule(path))
    start = f"{path}: truncated: it has {size - 5000} bytes and its header announces more ("
    end = (
        "). The copy or the program that wrote it was cut short (or it is one part of a family of files, which is not "
        "supported); copy or pack it again."
    )
    assert text.startswith(start)
    assert text.endswith(end)
    assert f"stored_eof = {size}" in text[len(start) : -len(end)]  # between them are HDF5's own words


def test_an_empty_dataset(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", shape=(0, 9, 8), maxshape=(None, 9, 8), dtype="u1")
        h5_file.create_dataset("labels", shape=(0,), maxshape=(None,), dtype="i8")
    assert message(LayoutError, H5ImageDataModule(path)) == (
        f"{path}: dataset 'images' holds no samples (shape (0, 9, 8)); expected at least one. "
        f"Was the file packed to the end?"
    )


def test_a_virtual_dataset_whose_source_is_gone(tmp_path):
    source = write_images(tmp_path / "source.h5", 10)
    layout = h5py.VirtualLayout(shape=(10, 9, 8), dtype="u1")
    layout[:] = h5py.VirtualSource(source, "images", shape=(10, 9, 8))
    with h5py.File(tmp_path / "a.h5", "w") as h5_file:
        h5_file.create_virtual_dataset("images", layout)
        h5_file["labels"] = np.arange(10)
    source.rename(tmp_path / "elsewhere.h5")
    assert message(LayoutError, H5ImageDataModule(tmp_path / "a.h5")) == (
        f"{tmp_path}/a.h5: the virtual dataset '/images' takes samples from the file '{source}', which is not there; "
        f"HDF5 would return fill values in its place. Put it back, or build the virtual dataset again."
    )


def test_images_of_a_shape_that_could_mean_two_things(tmp_path):
    path = write_images(tmp_path / "a.h5", 10, sample_shape=(3, 9, 3))
    assert message(LayoutError, H5ImageDataModule(path)) == (
        f"{path}: images 'images' have samples of shape (3, 9, 3), whose axes are not clear. "
        f"Give image_layout='NCHW', 'NHWC' or 'NHW'."
    )


def test_images_that_do_not_have_the_axes_given(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    assert message(LayoutError, H5ImageDataModule(path, image_layout="NCHW")) == (
        f"{path}: images 'images' have samples of shape (9, 8), whose axes are not NCHW. "
        f"Give image_layout='NCHW', 'NHWC' or 'NHW'."
    )


# Values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_none_under_automatic_statistics(tmp_path, bad):
    images = np.zeros((10, 9, 8), dtype=np.float32)
    images[6, 2, 1] = bad
    path = write_images(tmp_path / "a.h5", 10, images=images)
    assert message(LayoutError, H5ImageDataModule(path, mean="auto", std="auto")) == (
        f"statistics of 'image' cannot be computed: sample 6 of {path} holds a value that is NaN or infinite. "
        f"Give mean= and std=, or clean the data."
    )


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_out_of_range(tmp_path, label):
    labels = np.arange(10) % 3
    labels[[4, 7]] = label
    path = write_images(tmp_path / "a.h5", 10, labels=labels)
    assert message(LayoutError, H5ImageDataModule(path, num_classes=3)) == (
        f"{path}: label {label} of sample 4 is out of range: 3 classes have the labels 0 to 2 (2 sample(s) are wrong). "
        f"Correct the labels or num_classes."
    )


def test_a_label_out_of_range_by_the_files_own_class_names(tmp_path):
    path = write_images(tmp_path / "a.h5", 10, labels=np.arange(10))
    with h5py.File(path, "a") as h5_file:
        h5_file["labels"].attrs["class_names"] = [f"digit {number}" for number in range(9)]
    assert message(LayoutError, H5ImageDataModule(path)) == (
        f"{path}: label 9 of sample 9 is out of range: 9 classes have the labels 0 to 8 (1 sample(s) are wrong). "
        f"Correct the labels or num_classes."
    )


def test_a_label_out_of_range_in_samples_that_are_not_used_is_no_error(tmp_path):
    labels = np.arange(10) % 3
    labels[9] = 77
    path = write_images(tmp_path / "a.h5", 10, labels=labels)
    fit(H5ImageDataModule(path, num_classes=3, train_indices=range(9), batch_size=4))


def test_a_standard_deviation_of_zero(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    assert message(ValueError, H5ImageDataModule(path, mean=0.5, std=0.0)) == (
        "std is (0.0,); expected numbers above 0."
    )


def test_statistics_for_another_number_of_channels(tmp_path):
    path = write_images(tmp_path / "a.h5", 10, sample_shape=(9, 8, 4))
    assert message(ValueError, H5ImageDataModule(path, mean=[0.1, 0.2, 0.3], std=1.0)) == (
        "mean is [0.1, 0.2, 0.3]; expected one finite number, or one for each of 4 channels."
    )


# Sizes and splits --------------------------------------------------------------------------------------------


def test_a_batch_larger_than_the_dataset_is_one_smaller_batch_and_announced(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    model = Recorder()
    texts = warnings_of(lambda: fit(H5ImageDataModule(path, batch_size=64), model, max_epochs=2))
    assert (
        "batch_size 64 on 1 rank(s) is more than the dataset has (10 samples): every epoch is one smaller batch."
        in texts
    )
    assert [len(batch) for _, batch in model.trained] == [10, 10]


def test_a_batch_larger_than_the_dataset_leaves_nothing_when_the_last_is_dropped(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    assert message(ValueError, H5ImageDataModule(path, batch_size=64, drop_last=True)) == (
        f"train data ({path}): drop_last leaves no step: the dataset has 10 samples and one step takes 64 "
        "(batch_size 64 x 1 ranks). Make batch_size smaller, or leave drop_last off."
    )


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
@pytest.mark.parametrize("split", ["val", "test"])
def test_a_fraction_out_of_range(tmp_path, split, fraction):
    with pytest.raises(ValueError, match="fraction") as caught:
        H5ImageDataModule(tmp_path / "a.h5", **{split: fraction})
    assert str(caught.value) == f"{split}={fraction!r}: a fraction has to be above 0 and below 1."


def test_fractions_that_leave_nothing(tmp_path):
    with pytest.raises(ValueError, match="leave nothing") as caught:
        H5ImageDataModule(tmp_path / "a.h5", val=0.5, test=0.5)
    assert str(caught.value) == "val=0.5 and test=0.5 together leave nothing to train on; expected a sum below 1."


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"val": 1},
            "val=1 is not understood; expected a path, a list of paths, a fraction such as 0.1 or a list of sample "
            "numbers.",
        ),
        ({"predict": 0.5}, "predict=0.5: a fraction is for val and test; expected a path or a list."),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1."),
        ({"eval_batch_size": 0}, "eval_batch_size is 0; expected at least 1."),
        ({"batch_size": 2.5}, "batch_size is 2.5; expected a whole number."),
        ({"num_slots": 0}, "num_slots is 0; expected at least 1."),
        ({"seed": -1}, "seed is -1; expected 0 to 4294967295."),
        ({"seed": None}, "seed is None; expected a whole number."),
        (
            {"shuffle": "fulll"},
            "shuffle='fulll' is not understood; expected 'full', 'window', 'window:N' (N samples) or None.",
        ),
        (
            {"val": []},
            "val is an empty list; expected a path, a list of paths, a fraction such as 0.1 or a list of sample "
            "numbers. Did a pattern match no file?",
        ),
        ({"image_layout": "HWC"}, "image_layout='HWC'; expected 'auto', 'NCHW', 'NHWC' or 'NHW'."),
        ({"extra_keys": "weight"}, "extra_keys is 'weight'; expected a list of names."),
    ],
)
def test_an_argument_that_is_not_understood(tmp_path, arguments, text):
    with pytest.raises(ValueError, match=r"expected|name the images") as caught:
        H5ImageDataModule(tmp_path / "a.h5", **arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"val": [3, 3]}, "val: the index array names a sample twice; each may be used once."),
        (
            {"val": [3, 10]},
            "val: the index array names sample 10, which is not available: it is out of range (0 to 9) or belongs to "
            "another split.",
        ),
        ({"val": list(range(10))}, "no sample is left for training: the other splits take them all."),
        (
            {"mean": 127.5, "std": 127.5},
            "mean is (127.5,), but images are scaled to 0..1 before it is subtracted. Divide mean and std by 255.",
        ),
        ({"mean": "Auto"}, "mean is 'Auto'; expected numbers, 'auto' or None."),
    ],
)
def test_an_argument_that_does_not_fit_the_data(tmp_path, arguments, text):
    path = write_images(tmp_path / "a.h5", 10)
    assert message(ValueError, H5ImageDataModule(path, **{"batch_size": 4, **arguments})) == text


def test_training_without_training_data(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    assert message(ValueError, H5ImageDataModule(val=path)) == (
        "H5ImageDataModule has no train data: give train=, or arrays whose names say 'train'."
    )


def test_a_fraction_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="is missing") as caught:
        make_trainer().validate(Recorder(), H5ImageDataModule(val=0.5))
    assert str(caught.value) == ("a fraction or an index array is a part of the training data, but train= is missing.")


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluating_without_data_for_it(tmp_path, stage):
    path = write_images(tmp_path / "a.h5", 10)
    with pytest.raises(ValueError, match="has no") as caught:
        getattr(make_trainer(), stage)(Recorder(), datamodule=H5ImageDataModule(path))
    split = {"validate": "val"}.get(stage, stage)
    assert str(caught.value) == (
        f"H5ImageDataModule has no {split} data: give {split}=, or arrays whose names say {split!r}."
    )


def test_statistics_of_training_data_that_is_not_given(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    datamodule = H5ImageDataModule(test=path, mean="auto", std="auto")
    with pytest.raises(ValueError, match="auto") as caught:
        make_trainer().test(Recorder(), datamodule)
    assert str(caught.value) == (
        "mean or std is 'auto', which is computed over the training data, but train= is missing."
    )


# While training ----------------------------------------------------------------------------------------------


class Meddler(Recorder):
    """Does something to the file when the first epoch ends."""

    def __init__(self, meddle: Any) -> None:
        """Note what."""
        super().__init__()
        self.meddle = meddle

    def on_train_epoch_end(self) -> None:
        """Do it once."""
        if self.current_epoch == 0:
            self.meddle()


def changed(path: Path, how: str) -> str:
    return (
        f"{path} {how} since it was opened, so its samples may lie elsewhere now. "
        f"Build the loader or DataModule again to use the new file."
    )


def test_a_file_replaced_while_training_is_noticed_when_the_next_epoch_starts(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    other = write_images(tmp_path / "b.h5", 10, seed=1)
    model = Meddler(lambda: other.rename(path))
    assert message(FeedError, H5ImageDataModule(path, batch_size=4), model, max_epochs=3) == changed(
        path, "was replaced by another file"
    )
    assert sorted(model.trained_by_epoch) == [0]


def test_a_file_written_to_while_training_is_noticed_when_the_next_epoch_starts(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)

    def overwrite() -> None:
        before = path.stat()
        with h5py.File(path, "a", locking=False) as h5_file:
            h5_file["images"][3] = 0
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # even if the clock is a coarse one

    model = Meddler(overwrite)
    assert message(FeedError, H5ImageDataModule(path, batch_size=4), model, max_epochs=3) == changed(
        path, "was written to"
    )
    assert sorted(model.trained_by_epoch) == [0]


def test_a_file_removed_while_training_is_noticed_when_the_next_epoch_starts(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    model = Meddler(path.unlink)
    assert message(FeedError, H5ImageDataModule(path, batch_size=4), model, max_epochs=3) == changed(path, "is gone")


def test_a_validation_file_replaced_while_training_is_noticed_too(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    val = write_images(tmp_path / "v.h5", 10)
    other = write_images(tmp_path / "b.h5", 10, seed=1)
    model = Meddler(lambda: other.rename(val))
    datamodule = H5ImageDataModule(path, val=val, batch_size=4)
    assert message(FeedError, datamodule, model, max_epochs=3) == changed(val, "was replaced by another file")


def test_a_file_that_becomes_shorter_in_the_middle_of_an_epoch_ends_the_training_and_not_the_process(tmp_path):
    path = write_images(tmp_path / "a.h5", 1000)
    size = path.stat().st_size

    class Cutting(Recorder):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                # Cut in the middle of a copy, the file would end the process. With one slot, none is under way
                # while a batch is ready.
                wait_until(self.trainer.train_dataloader.is_ready)
                os.truncate(path, size // 2)

    model = Cutting()
    assert message(FeedError, H5ImageDataModule(path, batch_size=4, num_slots=1), model) == (
        f"{path} became shorter while it was read: {size} bytes at the start, {size // 2} now. "
        f"Write new data to another file and rename it; never change a file in place during training."
    )
    assert len(model.trained) == 4  # the one that was ready is still used


def test_a_damaged_chunk_is_named_with_its_samples_when_it_is_reached(tmp_path):
    path = write_images(tmp_path / "a.h5", 40, storage="gzip")
    with h5py.File(path) as h5_file:
        chunk = h5_file["images"].id.get_chunk_info(4)  # samples 20 to 24
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset + 2)
        raw.write(b"\xff" * 40)
    model = Recorder()
    text = message(FeedError, H5ImageDataModule(path, batch_size=5, shuffle=None), model)
    start = f"{path}: dataset 'images', samples 20 to 24 cannot be read: "
    end = (
        ". The file is damaged there, or was changed while it was read: "
        "copy it again, or write it again from its source."
    )
    assert text.startswith(start + "damaged chunk: undoing gzip on ")
    assert text.endswith(end)
    assert [samples for _, samples in model.trained] == [list(range(n, n + 5)) for n in (0, 5, 10, 15)]


def test_all_errors_of_data_can_be_caught_at_once(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    with pytest.raises(GpuFeedError):
        fit(H5ImageDataModule(path, image_key="nothing", label_key=""))
    other = write_images(tmp_path / "b.h5", 10, seed=1)
    with pytest.raises(GpuFeedError):
        fit(H5ImageDataModule(path, batch_size=4), Meddler(lambda: shutil.move(other, path)), max_epochs=2)


def test_after_an_error_the_file_can_be_corrected_and_a_new_datamodule_trains(tmp_path):
    labels = np.arange(10) % 3
    path = write_images(tmp_path / "a.h5", 10, labels=np.where(labels == 2, 9, labels))
    message(LayoutError, H5ImageDataModule(path, num_classes=3, batch_size=4))
    with h5py.File(path, "a") as h5_file:
        h5_file["labels"][...] = labels
    model = Recorder()
    fit(H5ImageDataModule(path, num_classes=3, batch_size=4), model)
    assert sum(len(batch) for _, batch in model.trained) == 10
    assert torch.isfinite(model.layer.weight).all()


def test_files_that_number_their_classes_differently(tmp_path):
    train, val = write_images(tmp_path / "train.h5", 10), write_images(tmp_path / "val.h5", 10)
    for path, names in ((train, ["ant", "bee", "cat"]), (val, ["bee", "cat"])):
        with h5py.File(path, "r+") as h5_file:
            h5_file["labels"][:] = 0
            h5_file["labels"].attrs["class_names"] = names
    text = (
        f"{val}: class 0 is 'bee', but 'ant' in {train}: the same label means something else. Pack both from the same "
        f"set of class folders."
    )
    assert message(LayoutError, H5ImageDataModule(train, val=val)) == text
    assert message(LayoutError, H5ImageDataModule([train, val])) == text


def test_attributes_of_other_programs_are_not_taken_for_quantisation(tmp_path):
    path = write_images(tmp_path / "a.h5", 10)
    with h5py.File(path, "r+") as h5_file:
        h5_file["images"].attrs["scale"] = 4.0  # micrometres per pixel, say
        h5_file["images"].attrs["mean"] = "n/a"
    assert message(ValueError, H5ImageDataModule(path)) == (
        f"attribute mean of {path} 'images' is 'n/a'; expected one finite number, or one for each of 1 channels."
    )
    dm = H5ImageDataModule(path, mean=0.0, std=1.0, batch_size=10)
    dm.setup("fit")
    (batch,) = dm.train_dataloader()
    assert dm.on_after_batch_transfer(batch, 0)[0].max() <= 1
    dm.teardown("fit")
