"""Where the data of each split comes from: files, names, fractions and sample numbers, in all combinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.folds import FoldChoice
from lightning_gpufeed.hdf5.keys import ArrayInfo, Split
from lightning_gpufeed.hdf5.splits import H5Splits
from tests.contracts import check_division, exactly, joined

SPLITS = ("train", "val", "test", "predict")


def by_name(path: str, split: Split, arrays: Sequence[ArrayInfo], is_own_file: bool) -> dict[str, str]:
    return {array.field_name: array.key for array in arrays}


def make(train: Any = None, *, val: Any = None, test: Any = None, predict: Any = None, **options: Any) -> H5Splits:
    origins = {"train": train, "val": val, "test": test, "predict": predict}
    return H5Splits(origins, keys=options.pop("keys", None), choose_fields=by_name, **options)


def samples(splits: H5Splits, split: Any, field: str = "x") -> list[int] | None:
    """The values of a field that a split uses, None if there is no such split."""
    found = splits.get(split)
    if found is None:
        return None
    source, indices = found
    values = source.read_field(field, np.arange(source.num_samples) if indices is None else indices)
    source.close()
    return values.reshape(-1).tolist()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, **arrays: Any) -> Path:
        with h5py.File(tmp_path / name, "w") as h5_file:
            for key, values in arrays.items():
                h5_file[key] = values
        return tmp_path / name

    return write


@pytest.fixture
def plain(write) -> Path:
    """100 samples whose value is their number, in four classes, in one file that says nothing of splits."""
    return write("plain.h5", x=np.arange(100), y=np.arange(100) % 4)


def test_each_split_from_a_file_of_its_own(write):
    paths = {split: write(f"{split}.h5", x=np.arange(3) + 10 * n) for n, split in enumerate(SPLITS)}
    splits = make(**paths)
    for number, split in enumerate(SPLITS):
        assert samples(splits, split) == [10 * number, 10 * number + 1, 10 * number + 2]
        assert splits.get(split)[1] is None


def test_splits_that_nobody_gave_do_not_exist(plain):
    splits = make(plain)
    assert samples(splits, "train") == list(range(100))
    assert [splits.get(split) for split in ("val", "test", "predict")] == [None, None, None]
    assert make().get("train") is None


def test_splits_are_found_by_the_names_in_one_file(write):
    path = write(
        "all.h5",
        x_train=np.arange(6),
        y_train=np.arange(6),
        x_valid=np.arange(2) + 10,
        y_valid=np.arange(2),
        x_test=np.arange(3) + 20,
        y_test=np.arange(3),
    )
    splits = make(path)
    assert {split: samples(splits, split) for split in SPLITS} == {
        "train": [0, 1, 2, 3, 4, 5],
        "val": [10, 11],
        "test": [20, 21, 22],
        "predict": [20, 21, 22],
    }
    assert list(splits.get("val")[0].fields) == ["x", "y"]


def test_splits_are_found_in_groups(write):
    path = write("groups.h5", **{"train/x": np.arange(4), "val/x": np.arange(2) + 10, "classes": np.arange(7)})
    splits = make(path)
    assert (samples(splits, "train"), samples(splits, "val"), splits.get("test")) == ([0, 1, 2, 3], [10, 11], None)


def test_a_file_given_for_a_split_wins_over_names_in_the_training_file(write):
    path = write("all.h5", x_train=np.arange(4), x_val=np.arange(2) + 10)
    other = write("other.h5", x=np.arange(3) + 50)
    assert samples(make(path, val=other), "val") == [50, 51, 52]


def test_the_same_file_may_be_given_for_every_split(write):
    path = write("all.h5", x_train=np.arange(4), x_val=np.arange(2) + 10, x_test=np.arange(3) + 20)
    splits = make(path, val=path, test=path)
    assert [samples(splits, split) for split in ("train", "val", "test")] == [[0, 1, 2, 3], [10, 11], [20, 21, 22]]


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        (["x_{split}", "y_{split}"], ["x", "y"]),
        (["{split}/x", "{split}/y"], ["x", "y"]),
        (["/{split}/x", "/{split}/y"], ["x", "y"]),
        ({"x": "{split}_set_x", "label": "{split}_set_y"}, ["x", "label"]),
    ],
    ids=str,
)
def test_a_placeholder_stands_for_the_name_of_the_split(write, keys, fields):
    named = keys if isinstance(keys, list) else list(keys.values())
    arrays = {}
    for number, split in enumerate(("train", "val", "test")):
        arrays |= {key.replace("{split}", split): np.arange(3) + 10 * number for key in named}
    splits = make(write("all.h5", **arrays), keys=keys)
    for number, split in enumerate(("train", "val", "test")):
        assert samples(splits, split) == [10 * number, 10 * number + 1, 10 * number + 2]
        assert list(splits.get(split)[0].fields) == fields


@pytest.mark.parametrize("kind", ["soft", "external"])
def test_a_placeholder_follows_links(write, kind):
    write("far.h5", x=np.arange(2) + 10)
    path = write("all.h5", **{"train/x": np.arange(4), "kept/x": np.arange(2) + 10})
    with h5py.File(path, "a") as h5_file:
        h5_file["val/x"] = h5py.SoftLink("/kept/x") if kind == "soft" else h5py.ExternalLink("far.h5", "/x")
    assert samples(make(path, keys=["{split}/x"]), "val") == [10, 11]


def test_a_placeholder_finds_no_split_that_is_not_there(write):
    splits = make(write("all.h5", x_train=np.arange(4)), keys=["x_{split}"])
    assert (samples(splits, "train"), splits.get("val"), splits.get("predict")) == ([0, 1, 2, 3], None, None)


def test_a_placeholder_in_the_file_of_a_split_has_to_be_there(write):
    path = write("all.h5", x_train=np.arange(4))
    with pytest.raises(LayoutError) as error:
        make(path, val=path, keys=["x_{split}"]).get("val")
    assert str(error.value) == f"{path}: no dataset 'x_val'. It has: 'x_train' (4,) int64."


def test_named_keys_hold_for_every_file_but_not_for_other_splits_of_the_training_file(write, plain):
    other = write("other.h5", x=np.arange(3), y=np.arange(3), z=np.arange(9))
    splits = make(plain, val=other, keys=["x", "y"])
    assert list(splits.get("val")[0].fields) == ["x", "y"]
    assert splits.get("test") is None


def test_several_files_are_one_split(write):
    paths = [write(f"part{n}.h5", x=np.arange(3) + 10 * n) for n in range(3)]
    assert samples(make(paths, val=tuple(paths[:1])), "train") == [0, 1, 2, 10, 11, 12, 20, 21, 22]


def test_several_files_may_be_chunked_differently_and_hold_several_splits(write):
    paths = []
    for n in range(3):
        paths.append(write(f"part{n}.h5"))
        with h5py.File(paths[-1], "a") as h5_file:
            for number, split in enumerate(("train", "val")):
                numbers = np.arange(4 + n) + 100 * number + 10 * n
                h5_file.create_dataset(
                    f"{split}/x", data=numbers, chunks=(n + 1,), compression="gzip" if n == 1 else None
                )
    splits = make(paths, keys=["{split}/x"])
    assert samples(splits, "train") == [0, 1, 2, 3, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 25]
    assert samples(splits, "val") == [number + 100 for number in samples(splits, "train")]


@pytest.mark.parametrize("where", ["in one split", "in two"])
def test_files_that_number_their_classes_differently_are_refused(write, where):
    paths = [write(f"part{n}.h5", x=np.arange(3), kind=np.arange(3)) for n in range(2)]
    for path, names in zip(paths, (["cat", "dog", "owl"], ["cat", "cow", "dog"]), strict=True):
        with h5py.File(path, "a") as h5_file:
            h5_file["kind"].attrs["class_names"] = names
    splits = make(paths) if where == "in one split" else make(paths[0], val=paths[1])
    message = (
        f"{paths[1]}: class 1 is 'cow', but 'dog' in {paths[0]}: the same label means something else. Pack both from "
        f"the same set of class folders."
    )
    with pytest.raises(LayoutError, match=exactly(message)):
        [splits.get(split) for split in ("train", "val")]


@pytest.mark.parametrize("path_type", [str, Path])
def test_paths_may_be_of_any_type(write, path_type):
    path = write("a.h5", x=np.arange(3))
    assert samples(make(path_type(path), val=[path_type(path)]), "val") == [0, 1, 2]


def test_a_fraction_is_a_part_of_the_training_samples(plain):
    splits = make(plain, val=0.2, seed=3)
    val, train = samples(splits, "val"), samples(splits, "train")
    assert len(val) == 20
    check_division(np.arange(100), np.array(val), np.array(train))
    assert val == sorted(val)  # in the order of the file
    # The layouts are read once; each split has readers of its own.
    assert splits.get("val")[0].fields is splits.get("train")[0].fields
    assert splits.get("val")[0] is not splits.get("train")[0]


def test_two_fractions_are_both_of_the_whole(plain):
    splits = make(plain, val=0.2, test=0.5)
    parts = {split: samples(splits, split) for split in ("train", "val", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 30, "val": 20, "test": 50}
    assert sorted(joined(parts.values())) == list(range(100))


@pytest.mark.parametrize("first", SPLITS)
def test_it_does_not_matter_which_split_is_asked_for_first(plain, first):
    splits, other = (make(plain, val=0.2, test=[5, 6], predict=[1, 2], seed=1) for _ in range(2))
    splits.get(first)
    assert {split: samples(splits, split) for split in SPLITS} == {split: samples(other, split) for split in SPLITS}


def test_the_seed_decides_a_fraction(plain):
    parts = [samples(make(plain, val=0.2, seed=seed), "val") for seed in (1, 1, 2)]
    assert parts[0] == parts[1] != parts[2]


def test_a_stratified_fraction_keeps_the_proportions(plain):
    splits = make(plain, val=0.2, test=0.4, stratify_by="y")
    for split, each in [("train", 10), ("val", 5), ("test", 10)]:
        assert np.bincount(samples(splits, split, "y")).tolist() == [each] * 4


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, range], ids=lambda kind: kind.__name__)
def test_sample_numbers_are_taken_in_the_order_given_and_the_rest_is_trained_on(plain, kind):
    wanted = range(9, 3, -2) if kind is range else kind([9, 7, 5])
    splits = make(plain, val=wanted)
    assert samples(splits, "val") == [9, 7, 5]
    assert samples(splits, "train") == [n for n in range(100) if n not in (5, 7, 9)]


def test_given_samples_come_before_a_fraction(plain):
    splits = make(plain, val=0.5, test=list(range(40)))
    assert samples(splits, "test") == list(range(40))
    assert len(samples(splits, "val")) == 50
    assert sorted([*samples(splits, "val"), *samples(splits, "train")]) == list(range(40, 100))


def test_prediction_on_sample_numbers_takes_nothing_from_training(plain):
    splits = make(plain, predict=[3, 1])
    assert samples(splits, "predict") == [3, 1]
    assert samples(splits, "train") == list(range(100))


def test_training_may_use_a_part_of_the_samples(plain):
    splits = make(plain, val=0.5, train_indices=list(range(10, 30)))
    val, train = samples(splits, "val"), samples(splits, "train")
    assert len(val) == len(train) == 10
    assert sorted(val + train) == list(range(10, 30))


def test_training_samples_keep_the_order_they_are_given_in(plain):
    assert samples(make(plain, train_indices=[7, 3, 5]), "train") == [7, 3, 5]


def test_prediction_falls_back_on_the_test_data(plain):
    splits = make(plain, test=[1, 2])
    assert samples(splits, "predict") == [1, 2]


def test_splits_opened_are_remembered(write):
    path = write("all.h5", x_train=np.arange(4), x_val=np.arange(2))
    splits = make(path)
    assert splits.opened() == {}
    first = splits.get("val")
    assert splits.get("test") is None
    assert splits.get("val") is first
    assert splits.opened() == {"val": first}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"val": 1.5}, "val=1.5: a fraction has to be above 0 and below 1."),
        ({"val": 0.0}, "val=0.0: a fraction has to be above 0 and below 1."),
        (
            {"val": 0.6, "test": 0.6},
            "val=0.6 and test=0.6 together leave nothing to train on; expected a sum below 1.",
        ),
        ({"predict": 0.1}, "predict=0.1: a fraction is for val and test; expected a path or a list."),
        (
            {"val": 1},
            "val=1 is not understood; expected a path, a list of paths, a fraction such as 0.1 or a list of sample "
            "numbers.",
        ),
        (
            {"val": True},
            "val=True is not understood; expected a path, a list of paths, a fraction such as 0.1 or a list of sample "
            "numbers.",
        ),
    ],
    ids=str,
)
def test_origins_that_cannot_be_meant_are_refused_at_once(plain, arguments, message):
    with pytest.raises(ValueError, match=exactly(message)):
        make(plain, **arguments)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (0.5, "train=0.5: a fraction is for val and test; expected a path or a list."),
        ([1, 2], "train is given as numbers; expected a path. Choose samples of it with train_indices."),
    ],
    ids=str,
)
def test_training_data_is_given_as_files(train, message):
    with pytest.raises(ValueError, match=exactly(message)):
        make(train)


def test_sample_numbers_may_come_from_a_generator(plain):
    splits = make(plain, val=(number for number in (9, 7)))
    assert samples(splits, "val") == [9, 7]


@pytest.mark.parametrize(
    ("arguments", "split", "message"),
    [
        (
            {"val": [1, 200]},
            "val",
            "val: the index array names sample 200, which is not available: it is out of range (0 to 99) or belongs to "
            "another split.",
        ),
        (
            {"val": [1, 2], "test": [2, 3]},
            "val",
            "test: the index array names sample 2, which is not available: it is out of range (0 to 99) or belongs to "
            "another split.",
        ),
        (
            {"train_indices": [2, 2]},
            "train",
            "train_indices: the index array names a sample twice; each may be used once.",
        ),
        ({"val": list(range(100))}, "train", "no sample is left for training: the other splits take them all."),
        (
            {"val": 0.2, "stratify_by": "z"},
            "val",
            "stratifying needs class numbers in the field 'z', but the fields of numbers are x, y. Name the labels, or "
            "leave it off.",
        ),
    ],
    ids=str,
)
def test_splits_that_do_not_fit_together_are_refused(plain, arguments, split, message):
    with pytest.raises(ValueError, match=exactly(message)):
        make(plain, **arguments).get(split)


def test_a_fraction_beside_given_samples_that_leave_too_few_is_named_as_the_user_gave_it(plain):
    message = (
        "val=0.5 asks for 50 samples, but only 10 are left and some have to stay for training. Make the splits smaller."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        make(plain, val=0.5, test=list(range(90))).get("val")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            np.zeros((100, 3), np.int64),
            "stratify_by='x' has samples of shape (3,) and type int64; expected one integer per sample.",
        ),
        (
            np.zeros(100, np.float32),
            "stratify_by='x' has samples of shape () and type float32; expected one integer per sample.",
        ),
    ],
    ids=["several", "float"],
)
def test_classes_to_keep_the_proportions_of_are_one_integer_each(write, values, message):
    with pytest.raises(ValueError, match=exactly(message)):
        make(write("a.h5", x=values), val=0.5, stratify_by="x").get("val")


@pytest.mark.parametrize("origin", [0.2, [1, 2]], ids=str)
def test_a_part_of_the_training_data_needs_training_data(origin):
    message = "a fraction or an index array is a part of the training data, but train= is missing."
    with pytest.raises(ValueError, match=exactly(message)):
        make(val=origin).get("val")


def test_a_file_of_other_splits_only_is_refused_with_a_list(write):
    path = write("two.h5", x_val=np.arange(2), x_test=np.arange(3))
    with pytest.raises(LayoutError) as error:
        make(path).get("train")
    assert str(error.value) == (
        f"{path}: no arrays found for 'train'. Name them with keys=; the file has: 'x_test' (3,), 'x_val' (2,)."
    )


def test_a_missing_file_is_missing_when_its_split_is_asked_for(plain, tmp_path):
    splits = make(plain, val=tmp_path / "gone.h5")
    assert len(samples(splits, "train")) == 100
    with pytest.raises(FileNotFoundError, match=r"gone\.h5"):
        splits.get("val")


# Masks, datasets of sample numbers, folds --------------------------------------------------------------------


def test_samples_may_be_given_by_a_mask(plain):
    mask = np.arange(100) % 10 == 3
    for form in (mask, mask.tolist(), mask.astype(np.uint8), torch.from_numpy(mask)):
        splits = make(plain, val=form, predict=form)
        assert samples(splits, "val") == samples(splits, "predict") == list(range(3, 100, 10))
        check_division(np.arange(100), np.array(samples(splits, "val")), np.array(samples(splits, "train")))
        assert samples(make(plain, train_indices=form), "train") == list(range(3, 100, 10))


@pytest.mark.parametrize("split", ["val", "train_indices"])
def test_a_mask_that_marks_nothing_is_refused(plain, split):
    with pytest.raises(ValueError, match=exactly(f"{split}: the mask marks no sample; expected at least one.")):
        make(plain, **{split: [False] * 100}).get("train")


@pytest.fixture
def divided(write) -> Path:
    """Ten samples and what a file may say of how they are divided."""
    return write(
        "divided.h5",
        x=np.arange(10),
        **{
            "splits/train": np.array([8, 0, 2, 4]),
            "splits/val": np.array([3, 1]),
            "splits/test": np.arange(10) == 5,
            "mask_train": (np.arange(10) < 7).astype(np.uint8),
            "w_train": np.arange(10.0),
            "w_val": np.arange(10.0),
        },
    )


def test_samples_may_be_named_by_datasets_of_the_training_file(divided):
    splits = make(divided, train_indices="splits/train", predict="splits/val", columns=["w_{split}"])
    assert samples(splits, "train") == [8, 0, 2, 4]
    assert samples(splits, "predict") == [3, 1]
    # What says something of samples is no field, of whichever split it is.
    assert list(splits.get("train")[0].fields) == ["mask_train", "x"]
    splits = make(divided, val="splits/val", test="splits/test", columns=["w_train"])
    assert [samples(splits, split) for split in ("val", "test")] == [[3, 1], [5]]
    assert samples(splits, "train") == [0, 2, 4, 6, 7, 8, 9]
    # Each split by its own dataset, apart from each other; what is in both is not trained on.
    splits = make(divided, train_indices="splits/train", val="splits/val", test="splits/test", columns=["w_train"])
    assert [samples(splits, split) for split in ("train", "val", "test")] == [[8, 0, 2, 4], [3, 1], [5]]
    splits = make(divided, train_indices=[8, 3, 0], val="splits/val", columns=["w_train"])
    assert [samples(splits, split) for split in ("train", "val")] == [[8, 0], [3, 1]]
    splits = make(divided, train_indices="mask_{split}", val="splits/val", columns=["w_train"])
    assert samples(splits, "train") == [0, 2, 4, 5, 6]
    assert list(splits.get("train")[0].fields) == ["x"]


@pytest.mark.parametrize("val", [0.2, None], ids=str)
def test_numbers_of_samples_that_nobody_asked_for_are_no_data(divided, val):
    splits = make(divided, val=val, columns=["w_train", "w_val"])
    assert list(splits.get("train")[0].fields) == ["mask_train", "x"]
    assert len(samples(splits, "train")) == (8 if val else 10)


def test_a_column_is_a_field_where_keys_name_it(divided):
    splits = make(divided, train_indices="mask_train", keys=["x", "mask_train"])
    assert list(splits.get("train")[0].fields) == ["x", "mask_train"]


def test_sample_numbers_are_counted_inside_each_of_several_files(write):
    paths = [write(f"part{n}.h5", x=np.arange(5) + 10 * n, s=np.array([n, 4])) for n in range(3)]
    splits = make(paths, val="s")
    assert samples(splits, "val") == [0, 4, 11, 14, 22, 24]
    assert len(samples(splits, "train")) == 9


def test_a_file_wins_over_a_dataset_of_the_same_name(divided, write, monkeypatch):
    other = write("mask_train", x=np.arange(3) + 50)
    monkeypatch.chdir(other.parent)
    assert samples(make(divided, val="mask_train", columns=["w_train", "splits/train"]), "val") == [50, 51, 52]


def test_a_text_that_is_neither_file_nor_dataset_is_a_missing_file(divided):
    with pytest.raises(FileNotFoundError, match=r"splits/none"):
        make(divided, val="splits/none").get("val")


def test_a_fold_is_validated_on_and_the_others_are_trained_on(write):
    path = write("folds.h5", x=np.arange(12), fold=np.arange(12) % 3)
    seen = []
    for fold in range(3):
        splits = make(path, fold=FoldChoice(fold, "fold"))
        val, train = samples(splits, "val"), samples(splits, "train")
        check_division(np.arange(12), np.array(val), np.array(train))
        assert list(splits.get("val")[0].fields) == ["x"]
        seen += val
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("first", SPLITS)
def test_folds_are_made_of_what_test_samples_and_a_choice_leave(plain, first):
    everything = []
    for fold in range(4):
        choice = FoldChoice(fold, None, 4)
        splits = make(plain, test=0.25, fold=choice, train_indices=list(range(80)), stratify_by="y", seed=2)
        splits.get(first)
        val, test, train = (samples(splits, split) for split in ("val", "test", "train"))
        assert (len(val), len(test), len(train)) == (15, 20, 45)
        assert sorted([*val, *test, *train]) == list(range(80))
        assert set(np.bincount(samples(splits, "val", "y"))) <= {3, 4}
        everything += val
    assert sorted([*everything, *test]) == list(range(80))


def test_the_seed_decides_folds_that_are_made(plain):
    parts = [samples(make(plain, fold=FoldChoice(1, None, 5), seed=seed), "val") for seed in (1, 1, 2)]
    assert parts[0] == parts[1] != parts[2]


def test_validation_data_is_given_or_a_fold(plain):
    message = "both val and fold are given: a fold of the training samples is for validation. Leave val off."
    with pytest.raises(ValueError, match=exactly(message)):
        make(plain, val=0.1, fold=FoldChoice(0, None, 5))


def test_a_fold_needs_training_data():
    message = "a fold is a part of the training data, but train= is missing."
    with pytest.raises(ValueError, match=exactly(message)):
        make(fold=FoldChoice(0, None, 5)).get("val")
