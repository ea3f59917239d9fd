"""What files say of their samples: read exactly, over several files, from fields and from datasets beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.columns import (
    WeightChoice,
    check_class_names,
    divide_by_fold,
    read_classes,
    read_column,
    read_samples,
    read_weights,
)
from lightning_gpufeed.hdf5.folds import FoldChoice
from lightning_gpufeed.hdf5.source import H5Source
from tests.contracts import check_division, exactly


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "a.h5", **arrays: Any) -> Path:
        with h5py.File(tmp_path / name, "w") as h5_file:
            h5_file["x"] = np.zeros((len(arrays["y"]), 4), np.uint8)
            for key, values in arrays.items():
                h5_file[key] = values
        return tmp_path / name

    return write


def opened(*paths: Path, keys: Any = ("x", "y")) -> H5Source:
    return H5Source(list(paths), keys)


TEXT = np.array(["ä", "b", "ä"], dtype=h5py.string_dtype())


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (np.array([3, 1, 2], ">i2"), [3, 1, 2]),
        (np.array([0.5, np.inf, -0.0], np.float32), [0.5, np.inf, -0.0]),
        (np.array([True, False, True]), [True, False, True]),
        (np.array([[7], [8], [9]], np.uint64), [7, 8, 9]),
        (TEXT, ["ä", "b", "ä"]),
        (np.array([b"p1", b"p2", b"p1"]), ["p1", "p2", "p1"]),
    ],
    ids=["big-endian", "float", "bool", "a column of a table", "text", "text of one length"],
)
def test_a_column_is_read_as_it_is_whether_it_is_a_field_or_not(write, stored, expected):
    path = write(y=np.arange(3), c=stored)
    for source, name in [(opened(path), "c"), (opened(path, keys={"x": "x", "also": "c"}), "also")]:
        column = read_column(source, name, "group_by")
        assert column.tolist() == expected
        assert column.shape == (3,)
        assert column.dtype.isnative


def test_columns_of_several_files_follow_each_other(write):
    paths = [write(f"{n}.h5", y=np.arange(n + 1), c=np.full(n + 1, n)) for n in range(3)]
    assert read_column(opened(*paths), "c", "folds").tolist() == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (np.arange(4), "folds='c' has the shape (4,); expected (3,), one entry for each sample of the file."),
        (np.zeros((3, 2)), "folds='c' has the shape (3, 2); expected (3,), one entry for each sample of the file."),
        (np.float64(1), "folds='c' has the shape (); expected (3,), one entry for each sample of the file."),
        (np.zeros(3, [("a", "i4")]), "folds='c' is of type [('a', '<i4')]; expected numbers or text."),
    ],
    ids=str,
)
def test_a_column_of_another_shape_or_type_is_refused(write, stored, message):
    path = write(y=np.arange(3), c=stored)
    with pytest.raises(LayoutError, match=exactly(f"{path}: {message}")):
        read_column(opened(path), "c", "folds")


def test_a_column_that_one_file_does_not_have_is_missed_there(write):
    paths = [write("0.h5", y=np.arange(2), c=np.arange(2)), write("1.h5", y=np.arange(2))]
    message = f"{paths[1]}: no dataset 'c'. It has: 'x' (2, 4) uint8, 'y' (2,) int64."
    with pytest.raises(LayoutError, match=exactly(message)):
        read_column(opened(*paths), "c", "folds")


# Samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (np.array([4, 0], np.uint16), [4, 0]),
        (np.array([[3, 1]], ">i4"), [3, 1]),
        (np.array([True, False, False, False, True]), [0, 4]),
        (np.array([0, 1, 0, 1, 1], np.uint8), [1, 3, 4]),
        (np.array([2]), [2]),
    ],
    ids=["numbers", "a row", "a mask", "a mask of zeros and ones", "one"],
)
def test_samples_are_named_by_numbers_or_by_a_mask(write, stored, expected):
    path = write(y=np.arange(5), **{"splits/train": stored})
    samples = read_samples(opened(path), "splits/train", "train_indices")
    assert samples.tolist() == expected
    assert samples.dtype == np.int64


def test_samples_of_several_files_are_counted_inside_each(write):
    paths = [
        write("0.h5", y=np.arange(4), s=np.array([3, 0])),
        write("1.h5", y=np.arange(3), s=np.array([], np.int64)),
        write("2.h5", y=np.arange(5), s=np.array([False, False, True, False, False])),
    ]
    assert read_samples(opened(*paths), "s", "val").tolist() == [3, 0, 9]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (np.array([0, 5]), "val='s' names samples from 0 to 5; expected 0 to 4, the samples of that file."),
        (np.array([-1, 2]), "val='s' names samples from -1 to 2; expected 0 to 4, the samples of that file."),
        (
            np.array([0.5]),
            "val='s' has the shape (1,) and type float64; expected numbers of samples (m,) or a mask (5,).",
        ),
        (
            np.zeros((5, 2), np.int8),
            "val='s' has the shape (5, 2) and type int8; expected numbers of samples (m,) or a mask (5,).",
        ),
        (np.int8(1), "val='s' has the shape () and type int8; expected numbers of samples (m,) or a mask (5,)."),
    ],
    ids=str,
)
def test_samples_named_in_another_way_are_refused(write, stored, message):
    path = write(y=np.arange(5), s=stored)
    with pytest.raises(LayoutError, match=exactly(f"{path}: {message}")):
        read_samples(opened(path), "s", "val")


def test_a_mask_of_another_length_is_refused_with_its_file(write):
    path = write(y=np.arange(5), s=np.array([True, False]))
    message = f"{path}: val='s': a mask has 2 entries; expected 5, one for each sample of the file(s)."
    with pytest.raises(ValueError, match=exactly(message)):
        read_samples(opened(path), "s", "val")


@pytest.mark.parametrize("stored", [np.zeros(5, bool), np.array([], np.int32)], ids=["mask", "numbers"])
def test_a_dataset_that_names_no_sample_is_refused(write, stored):
    path = write(y=np.arange(5), s=stored)
    with pytest.raises(ValueError, match=exactly(f"val='s' names no sample of {path}.")):
        read_samples(opened(path), "s", "val")


# Classes and weights -----------------------------------------------------------------------------------------


def test_classes_may_be_no_field(write):
    source = opened(write(y=np.arange(3), c=np.array([5, 5, 6], np.uint8)))
    assert read_classes(source, "c", "stratify_by", "stratifying").tolist() == [5, 5, 6]


def test_classes_beside_the_fields_are_whole_numbers_too(write):
    source = opened(write(y=np.arange(3), c=np.array([0.5, 1, 2])))
    message = "stratify_by='c' has samples of shape () and type float64; expected one integer per sample."
    with pytest.raises(ValueError, match=exactly(message)):
        read_classes(source, "c", "stratify_by", "stratifying")


Y = np.array([0, 0, 0, 1, 2, 2])


@pytest.mark.parametrize("keys", [["x", "y"], ["x", "y", "w"]], ids=str)
def test_weights_are_given_as_numbers_or_by_the_name_of_a_column(write, keys):
    numbers = [0.0, 1, 2, 3, 4, 0.5]
    source = opened(write(y=Y, w=np.array(numbers, np.float32)), keys=keys)
    for given in ("w", numbers, np.array(numbers)):
        weights = read_weights(source, None, given, None)
        assert (weights.tolist(), weights.dtype) == (numbers, np.float64)


def test_weights_by_class_are_those_of_the_samples_used(write):
    source = opened(write(y=Y))
    used = np.array([5, 0, 1, 4])  # class 1 is not used, and needs no weight
    assert read_weights(source, used, {0: 1, 2: 3}, "y").tolist() == [1, 1, 0, 0, 3, 3]
    assert read_weights(source, used, "balanced", "y").tolist() == [0.5, 0.5, 0, 0, 0.5, 0.5]
    assert read_weights(source, None, "balanced", "y") == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1, 0.5, 0.5])


def test_classes_may_be_named_where_the_labels_have_names(write):
    path = write(y=Y)
    with h5py.File(path, "a") as h5_file:
        h5_file["y"].attrs["class_names"] = np.array([b"cat", b"dog", b"owl"])
    assert read_weights(opened(path), None, {"cat": 1, "dog": 2, "owl": 0}, None).tolist() == [1, 1, 1, 2, 0, 0]


def test_classes_have_to_be_numbered_alike_in_all_files(write):
    paths = [write(f"{n}.h5", y=Y) for n in range(3)]
    for path, names in zip(paths, (None, ["cat", "dog"], ["cat", "dog", "owl"]), strict=True):
        if names is not None:
            with h5py.File(path, "a") as h5_file:
                h5_file["y"].attrs["class_names"] = names
    known: dict[str, tuple[list[str], str]] = {}
    check_class_names(opened(*paths[:2]), known)  # a file that says nothing agrees with all
    check_class_names(opened(paths[1]), known)
    assert known == {"y": (["cat", "dog"], str(paths[1]))}
    message = (
        f"{paths[2]}: there are 3 classes, but 2 in {paths[1]}: the same label means something else. Pack both from "
        f"the same set of class folders."
    )
    with pytest.raises(LayoutError, match=exactly(message)):
        check_class_names(opened(paths[2]), known)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"y": Y, "id": np.arange(6)}, "y"),
        ({"id": np.arange(6), "y": np.zeros(6), "group/label": Y}, "group/label"),
        ({"y": np.zeros(6), "number": Y[:, None]}, "number"),
    ],
    ids=str,
)
def test_the_classes_are_found_by_name_or_as_the_only_whole_numbers(write, fields, expected):
    source = opened(write(**fields), keys=["x", *fields])
    by_name, found = (read_weights(source, None, "balanced", name).tolist() for name in (expected, None))
    assert by_name == found


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"y": Y, "label": Y}, "y, label all could be"),
        ({"y": np.zeros(6), "a": Y, "b": Y}, "a, b all could be"),
        ({"y": np.zeros(6)}, "no field holds"),
    ],
    ids=["two by name", "two by type", "none"],
)
def test_classes_that_are_not_clear_have_to_be_named(write, fields, problem):
    source = opened(write(**fields), keys=["x", *fields])
    message = (
        f"weighting by class needs to know the classes: {problem} class numbers. Name the field with weight_by=; the "
        f"fields are {', '.join(source.fields)}."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        read_weights(source, None, "balanced", None)


@pytest.mark.parametrize(
    ("given", "label_field", "message"),
    [
        ([1.0] * 5, None, "there are 5 sampling weights; expected 6, one for each sample of the file(s)."),
        (
            [1.0, 1, 1, 0, 0, -1],
            None,
            "the sampling weight of sample 5 is -1.0 (1 weight(s) are wrong); expected finite numbers from 0 up.",
        ),
        (
            "balanced",
            "z",
            "weighting by class needs class numbers in the field 'z', but the fields of numbers are x, y. Name the "
            "labels, or leave it off.",
        ),
        (
            "balanced",
            "x",
            "weight_by='x' has samples of shape (4,) and type uint8; expected one integer per sample.",
        ),
        ({0: 0, 1: 0, 2: 0}, None, "all 6 sampling weights are 0, so no sample can be drawn; expected one above 0."),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused(write, given, label_field, message):
    with pytest.raises(ValueError, match=exactly(message)):
        read_weights(opened(write(y=Y)), None, given, label_field)


def test_a_column_of_weights_that_is_not_there_is_named_with_those_there_are(write):
    path = write(y=Y)
    with pytest.raises(
        LayoutError, match=exactly(f"{path}: no dataset 'w'. It has: 'x' (6, 4) uint8, 'y' (6,) int64.")
    ):
        read_weights(opened(path), None, "w", None)


def test_weights_are_read_once(write):
    path = write(y=Y, w_train=np.arange(6.0))
    choice, source = WeightChoice("w_{split}", 9, None), opened(path)
    assert (choice.column, choice.samples_per_epoch) == ("w_train", 9)
    first = choice.read(source, None)
    path.unlink()
    assert choice.read(source, None) is first
    assert first.tolist() == list(range(6))
    assert WeightChoice(None, None, None).read(source, None) is None
    assert WeightChoice("balanced", None, None).column is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (None, 5, None),
            "samples_per_epoch is 5, but there are no sample_weights: without them an epoch is every sample once.",
        ),
        (("balanced", 0, None), "samples_per_epoch is 0; expected at least 1."),
    ],
    ids=str,
)
def test_choices_that_do_not_fit_together_are_refused(arguments, message):
    with pytest.raises(ValueError, match=exactly(message)):
        WeightChoice(*arguments)


# Folds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["column", "list", "array"])
def test_the_samples_of_the_fold_are_taken_from_the_pool(write, kind):
    numbers = np.array([0, 1, 2, 0, 1, 2], np.int8)
    source, pool = opened(write(y=Y, fold=numbers)), np.array([5, 4, 3, 2, 1])
    given = {"column": "fold", "list": numbers.tolist(), "array": numbers}[kind]
    taken, rest = divide_by_fold(source, pool, FoldChoice(2, given), 0, None)
    assert (taken.tolist(), rest.tolist()) == ([5, 2], [4, 3, 1])


def test_groups_are_those_of_the_samples_in_the_pool(write):
    groups = np.array([number // 6 for number in range(60)])
    source, pool = opened(write(y=groups, who=groups)), np.arange(57, 3, -1)  # in no step with the groups
    validated = []
    for fold in range(3):
        taken, rest = divide_by_fold(source, pool, FoldChoice(fold, None, 3, "who"), 0, None)
        assert set(groups[taken]).isdisjoint(groups[rest])
        validated += taken.tolist()
    assert sorted(validated) == sorted(pool.tolist())


def test_folds_are_made_of_the_pool_alone(write):
    labels, groups = np.arange(60) % 2, [f"g{number // 6}" for number in range(60)]
    source, pool = opened(write(y=labels, who=groups)), np.arange(12, 60)
    parts = [divide_by_fold(source, pool, FoldChoice(fold, None, 4, "who"), 3, labels) for fold in range(4)]
    for taken, rest in parts:
        check_division(pool, taken, rest)
        assert (len(taken), labels[taken].sum()) == (12, 6)
        assert {groups[number] for number in taken}.isdisjoint(groups[number] for number in rest)
    assert sorted(np.concatenate([taken for taken, _ in parts]).tolist()) == pool.tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [0, 1],
            "folds has the shape (2,) and type int64; expected integers (6,), the fold number of each sample of the "
            "file(s).",
        ),
        (
            "w",
            "folds='w' has the shape (6,) and type float64; expected integers (6,), the fold number of each sample of "
            "the file(s).",
        ),
        (
            [[0] * 6],
            "folds has the shape (1, 6) and type int64; expected integers (6,), the fold number of each sample of the "
            "file(s).",
        ),
    ],
    ids=str,
)
def test_folds_that_are_not_one_integer_per_sample_are_refused(write, given, message):
    with pytest.raises(ValueError, match=exactly(message)):
        divide_by_fold(opened(write(y=Y, w=np.zeros(6))), np.arange(6), FoldChoice(0, given), 0, None)
