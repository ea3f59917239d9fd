"""Which array is which, in files as people write them."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.keys import (
    ArrayInfo,
    find_image_key,
    find_label_key,
    group_by_split,
    list_arrays,
    pick_group,
    refuse_one_per_sample,
)
from tests.contracts import exactly

PATH = "data.h5"


def arrays(**shapes: tuple[int, ...]) -> list[ArrayInfo]:
    """Arrays of uint8 by key; 1-D ones hold int64."""
    return [ArrayInfo(key, shape, "u" if len(shape) > 1 else "i") for key, shape in shapes.items()]


def roles(found: list[ArrayInfo]) -> tuple[str, str | None]:
    image = find_image_key(PATH, found)
    return image, find_label_key(PATH, found, image)


@pytest.mark.parametrize(
    ("key", "split", "field"),
    [
        ("x_train", "train", "x"),
        ("X_train", "train", "X"),
        ("train_set_x", "train", "set_x"),
        ("train/images", "train", "images"),
        ("images/train", "train", "images"),
        ("images-val", "val", "images"),
        ("valid.images", "val", "images"),
        ("VALIDATION/x", "val", "x"),
        ("dev_x", "val", "x"),
        ("testing_labels", "test", "labels"),
        ("a/test/b", "test", "a/b"),
        ("predict/images", "predict", "images"),
        ("images", None, "images"),
        ("training", "train", "training"),  # the word alone is all the name there is
        ("latest_images", None, "latest_images"),  # holds the letters, not the word
        ("trainable", None, "trainable"),
        ("contest/x", None, "contest/x"),
        ("splits/train", None, "splits/train"),  # which samples, and none of them
        ("folds/val", None, "folds/val"),
    ],
)
def test_a_split_is_a_word_of_the_key(key, split, field):
    array = ArrayInfo(key, (5,), "u")
    assert (array.split, array.field_name) == (split, field)


@pytest.mark.parametrize(
    ("found", "image", "label"),
    [
        # Keras' MNIST and CIFAR, the cat and non-cat set of a well-known course, a folder per split, PCam.
        (arrays(x_train=(60, 28, 28), y_train=(60,)), "x_train", "y_train"),
        (arrays(train_set_x=(209, 64, 64, 3), train_set_y=(209,)), "train_set_x", "train_set_y"),
        (arrays(**{"train/images": (9, 3, 8, 8), "train/labels": (9,)}), "train/images", "train/labels"),
        (arrays(x=(9, 96, 96, 3), y=(9, 1, 1, 1)), "x", "y"),
        (arrays(images=(9, 3, 8, 8), labels=(9,), masks=(9, 8, 8)), "images", "labels"),
        (arrays(images=(9, 3, 8, 8), masks=(9, 8, 8)), "images", "masks"),
        (arrays(image=(9, 240, 240, 4), mask=(9, 240, 240, 3)), "image", "mask"),
        (arrays(imgs=(9, 8, 8), targets=(9,)), "imgs", "targets"),
        (arrays(data=(9, 8, 8, 3), class_number=(9,)), "data", "class_number"),
        (arrays(anything=(9, 8, 8), number=(9,)), "anything", "number"),
        (arrays(anything=(9, 8, 8)), "anything", None),
        (arrays(images=(9, 8, 8), labels=(7,)), "images", None),  # another length: not of these images
        (arrays(Images=(9, 8, 8), LABELS=(9,)), "Images", "LABELS"),
    ],
    ids=lambda value: "+".join(a.key for a in value) if isinstance(value, list) else None,
)
def test_images_and_labels_are_found_as_people_name_them(found, image, label):
    assert roles(found) == (image, label)


def test_a_name_that_says_more_wins_over_one_that_says_less():
    found = arrays(x=(9, 8, 8), images=(9, 3, 8, 8), y=(9,), labels=(9,))
    assert roles(found) == ("images", "labels")


def test_strings_named_as_labels_are_not_passed_over_in_silence():
    found = [*arrays(images=(9, 8, 8)), ArrayInfo("labels", (9,), "O")]
    with pytest.raises(LayoutError) as caught:
        find_label_key(PATH, found, "images")
    assert str(caught.value) == (
        f"{PATH}: 'labels' (9,) looks like the labels but holds no numbers. Store class numbers, name other labels "
        f'with label_key=, or say label_key="" for none.'
    )
    assert find_label_key(PATH, [*arrays(images=(9, 8, 8)), ArrayInfo("names", (9,), "O")], "images") is None


@pytest.mark.parametrize(
    ("found", "listed"),
    [
        (
            arrays(left=(9, 8, 8), right=(9, 8, 8)),
            "several arrays could be the images. Name one with image_key=; the file has: 'left' (9, 8, 8), "
            "'right' (9, 8, 8).",
        ),
        (
            # Two say "images", and that a third one says "data" does not make it the images.
            arrays(**{"images/left": (9, 8, 8), "images/right": (9, 8, 8), "data/depth": (9, 8, 8)}),
            "several arrays could be the images. Name one with image_key=; the file has: 'images/left' (9, 8, 8), "
            "'images/right' (9, 8, 8), 'data/depth' (9, 8, 8).",
        ),
        (
            arrays(table=(9, 5), labels=(9,)),
            "no array looks like images (N, ..., H, W). Name one with image_key=; the file has: 'table' (9, 5), "
            "'labels' (9,).",
        ),
        ([], "no array looks like images (N, ..., H, W). Name one with image_key=; the file has: no datasets."),
    ],
    ids=["two alike", "two alike and a third", "none", "nothing"],
)
def test_images_that_nothing_decides_are_asked_for_with_a_list(found, listed):
    with pytest.raises(LayoutError) as error:
        find_image_key(PATH, found)
    assert str(error.value) == f"data.h5: {listed}"


@pytest.mark.parametrize(
    ("found", "listed"),
    [
        (arrays(images=(9, 8, 8), labels_a=(9,), labels_b=(9,)), "'labels_a' (9,), 'labels_b' (9,)"),
        (arrays(images=(9, 8, 8), label_a=(9,), label_b=(9,), y=(9,)), "'label_a' (9,), 'label_b' (9,), 'y' (9,)"),
        (arrays(images=(9, 8, 8), first=(9,), second=(9,)), "'first' (9,), 'second' (9,)"),
    ],
    ids=["two alike", "two alike and a third", "no name says it"],
)
def test_labels_that_nothing_decides_are_asked_for_with_a_list(found, listed):
    with pytest.raises(LayoutError) as error:
        find_label_key(PATH, found, "images")
    assert str(error.value) == (
        f'data.h5: several arrays could be the labels: {listed}. Name one with label_key=, or say label_key="" for '
        f"none."
    )


def test_an_array_whose_name_says_label_wins_over_other_numbers():
    assert roles(arrays(images=(9, 8, 8), patient=(9,), age=(9,), label=(9,))) == ("images", "label")


@pytest.mark.parametrize(
    ("key", "is_division"),
    [
        ("splits/train", True),
        ("fold/val", True),
        ("Splits/train_val", True),
        ("splits/train/x", False),
        ("splits", False),
    ],
)
def test_what_says_how_samples_are_divided_is_in_no_group(key, is_division):
    array = ArrayInfo(key, (5,), "i")
    assert array.is_division == is_division
    assert any(group_by_split([array]).values()) != is_division


def test_arrays_are_grouped_by_the_split_in_their_names():
    found = arrays(x_train=(6, 2), y_train=(6,), x_test=(3, 2), list_classes=(2,))
    groups = group_by_split(found)
    assert {split: [array.key for array in group] for split, group in groups.items()} == {
        "train": ["x_train", "y_train"],
        "test": ["x_test"],
        None: ["list_classes"],
    }


@pytest.mark.parametrize(
    ("keys", "split", "picked"),
    [
        (["x_train", "x_test"], "train", ["x_train"]),
        (["x_train", "x_test"], "test", ["x_test"]),
        (["x_train", "x_test"], "val", []),  # nothing says which
        (["x_train", "x"], "val", ["x"]),
        (["x", "y"], "train", ["x", "y"]),
        (["x_test", "y_test"], "train", ["x_test", "y_test"]),  # a file of its own, used for training: as asked
        ([], "train", []),
    ],
)
def test_the_arrays_of_a_split_in_a_file_of_its_own(keys, split, picked):
    groups = group_by_split([ArrayInfo(key, (5,), "i") for key in keys])
    assert [array.key for array in pick_group(groups, split)] == picked


@pytest.mark.parametrize(
    ("shape", "kind", "is_image_like"),
    [
        ((9, 8, 8), "u", True),
        ((9, 3, 8, 8), "f", True),
        ((9, 8, 8), "b", True),
        ((9, 8), "u", False),
        ((9, 8, 8), "O", False),
        ((9, 8, 8), "V", False),
        ((9, 8, 8), "c", False),
    ],
)
def test_an_image_has_two_axes_of_real_numbers(shape, kind, is_image_like):
    assert ArrayInfo("x", shape, kind).is_image_like == is_image_like


def test_the_arrays_of_a_file_are_listed_by_key(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as h5_file:
        h5_file["train/labels"] = np.arange(4)
        h5_file["train/images"] = np.zeros((4, 8, 8), np.uint8)
        h5_file["names"] = ["a", "b"]
        h5_file["pairs"] = np.zeros(3, [("a", "i4"), ("b", "f4")])
        h5_file["version"] = 3  # a scalar is no array of samples
        h5_file["_gpufeed/crc32/images"] = np.arange(4)
    assert list_arrays(tmp_path / "a.h5") == [
        ArrayInfo("names", (2,), "O"),
        ArrayInfo("pairs", (3,), "V"),
        ArrayInfo("train/images", (4, 8, 8), "u"),
        ArrayInfo("train/labels", (4,), "i"),
    ]


# One dataset for each sample -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "count", "name", "what"),
    [
        ([f"image_{n}" for n in range(16)], 16, "image_#", "dataset"),
        ([f"{n:05d}" for n in range(20)], 20, "#", "dataset"),
        ([*(f"s{n}" for n in range(16)), "labels"], 16, "s#", "dataset"),
        ([f"{name}/x" for name in "abcdefghijklmnop"], 16, "*/x", "group"),
        ([f"s{n}/{key}" for n in range(16) for key in ("x", "y")], 16, "s#/x", "group"),
    ],
    ids=["numbered", "numbers alone", "with labels", "groups", "numbered groups"],
)
def test_a_dataset_for_each_sample_is_refused_with_the_way_out(keys, count, name, what):
    message = (
        f"a.h5: {count} of its {len(keys)} datasets are called {name!r}: one {what} for each sample, it seems; "
        f"expected arrays whose first axis counts samples. Write a Dataset whose item i is sample i, and pack that: "
        f"gpufeed pack package.module:dataset OUT.h5. Or name the arrays to use (keys=)."
    )
    with pytest.raises(LayoutError, match=exactly(message)):
        refuse_one_per_sample("a.h5", keys)


@pytest.mark.parametrize(
    "keys",
    [
        [],
        ["x"],
        [f"image_{n}" for n in range(15)],
        [f"{name}/x" for name in "abcdefghijklmno"],
        [f"column_{chr(97 + n)}" for n in range(26)],
        [f"{group}/{name}" for group in ("train", "val") for name in "abcdefghijklmnopq"],
    ],
    ids=["none", "one", "fifteen", "fifteen groups", "names", "splits"],
)
def test_some_datasets_of_similar_names_are_taken(keys):
    refuse_one_per_sample("a.h5", keys)
