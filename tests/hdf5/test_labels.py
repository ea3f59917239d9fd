from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.labels import _full_variety, describe_labels, window_variety
from lightning_gpufeed.hdf5.order import FullShuffle, WindowShuffle
from lightning_gpufeed.hdf5.report import LabelOrder


def by_class(num_classes, per_class):
    return np.repeat(np.arange(num_classes), per_class)


def shuffled(labels, seed=0):
    return np.random.default_rng(seed).permutation(labels)


def mean_classes_per_batch(labels, shuffle, batch_size=256):
    """Mean number of classes over all full batches of some epochs, from the whole permutation."""
    found = []
    for epoch in range(4):
        order = shuffle.permutation(len(labels), 7, epoch)
        found += [
            len(np.unique(labels[order[first : first + batch_size]]))
            for first in range(0, len(labels) - batch_size + 1, batch_size)
        ]
    return float(np.mean(found))


@pytest.mark.parametrize(
    "labels",
    [
        by_class(100, 120),
        by_class(10, 1500),
        shuffled(by_class(50, 200)),
        np.tile(by_class(4, 300), 10),
        by_class(2, 700),
    ],
    ids=["100 classes", "10 classes", "random", "in blocks", "two classes"],
)
def test_the_estimate_agrees_with_whole_epochs_of_both_shuffles(labels):
    whole = mean_classes_per_batch(labels, WindowShuffle(1024)) / mean_classes_per_batch(labels, FullShuffle())
    # The estimate is a mean of 64 batches, of which each varies by up to about a third of the value.
    assert window_variety(labels) == pytest.approx(min(1.0, whole), rel=0.1)


@pytest.mark.parametrize("window_samples", [64, 1024, 3000])
def test_a_wider_window_is_followed(window_samples):
    labels = by_class(200, 60)
    whole = mean_classes_per_batch(labels, WindowShuffle(window_samples)) / mean_classes_per_batch(
        labels, FullShuffle()
    )
    assert window_variety(labels, window_samples=window_samples) == pytest.approx(whole, rel=0.1)


def test_a_file_sorted_into_many_classes_gives_batches_of_few():
    # A window of 1024 touches 2 or 3 classes of 1000, where a full shuffle's batch has about 92 of 100.
    assert window_variety(by_class(100, 1000)) < 0.05


def test_a_window_as_wide_as_the_file_is_nearly_a_full_shuffle():
    assert window_variety(by_class(10, 10)) == 1.0


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    names=st.permutations(range(-3, 3)),
    batch_size=st.integers(1, 70),
    window_samples=st.integers(1, 80),
)
@settings(max_examples=60)
def test_variety_is_a_share_and_does_not_depend_on_what_the_classes_are_called(
    labels, names, batch_size, window_samples
):
    labels = np.array(labels)
    variety = window_variety(labels, window_samples=window_samples, batch_size=batch_size)
    assert 0 < variety <= 1
    renamed = np.array(names)[labels]
    again = window_variety(renamed, window_samples=window_samples, batch_size=batch_size)
    assert again == pytest.approx(variety, rel=1e-12)  # the classes are summed in another order


@given(labels=st.lists(st.integers(0, 3), min_size=4, max_size=12), batch_size=st.integers(1, 12))
@settings(max_examples=40)
def test_what_a_full_shuffle_is_expected_to_give_is_exact(labels, batch_size):
    drawn = min(batch_size, len(labels))
    exact = np.mean([len(set(batch)) for batch in combinations(labels, drawn)])
    assert _full_variety(np.unique(labels, return_counts=True)[1], drawn) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        (by_class(10, 200), LabelOrder.SORTED),
        (by_class(10, 200)[::-1], LabelOrder.SORTED),
        (by_class(10, 200) * 7 % 10, LabelOrder.SORTED),
        (shuffled(by_class(10, 200)), LabelOrder.SHUFFLED),
        (np.tile(np.arange(10), 200), LabelOrder.SHUFFLED),
        (np.tile(by_class(10, 8), 25), LabelOrder.CLUSTERED),
        (by_class(10, 200) + shuffled(np.repeat([0, 1], 1000)), LabelOrder.CLUSTERED),
        (np.zeros(50, dtype=int), LabelOrder.SINGLE),
        (np.array([3]), LabelOrder.SINGLE),
        (np.array([True] * 20 + [False] * 30), LabelOrder.SORTED),
    ],
    ids=[
        "up",
        "down",
        "any order",
        "random",
        "round robin",
        "blocks of 8",
        "two at a time",
        "one",
        "one sample",
        "bool",
    ],
)
def test_the_order_of_the_classes_is_recognised(labels, order):
    assert describe_labels("labels", labels).order is order


@given(seed=st.integers(0, 2**32 - 1), num_classes=st.integers(2, 40))
@settings(max_examples=60)
def test_a_random_order_is_never_taken_for_a_clustered_one(seed, num_classes):
    labels = shuffled(by_class(num_classes, 1200 // num_classes), seed)
    assert describe_labels("labels", labels).order is LabelOrder.SHUFFLED


def test_classes_and_their_balance_are_counted():
    report = describe_labels("y", shuffled(np.repeat([4, -1, 9], [5, 60, 35])))
    assert (report.key, report.num_classes, report.min_per_class, report.max_per_class) == ("y", 3, 5, 60)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "bool"])
@pytest.mark.parametrize("shift", [0, 100])  # from 100 on the numbers are larger than there are samples
def test_labels_of_every_type_are_counted_alike(dtype, shift):
    labels = (np.repeat([0, 1], [30, 15]) + (0 if dtype == "bool" else shift)).astype(dtype)
    report = describe_labels("labels", labels)
    assert (report.num_classes, report.min_per_class, report.max_per_class) == (2, 15, 30)
    assert report.order is LabelOrder.SORTED


@pytest.mark.parametrize("labels", [np.arange(1000), np.arange(1000) // 1 * 3, np.arange(10) // 1])
def test_numbers_of_samples_are_not_taken_for_classes(labels):
    assert describe_labels("index", labels) is None


def test_the_report_is_the_same_in_every_call():
    labels = shuffled(by_class(30, 100))
    assert describe_labels("labels", labels) == describe_labels("labels", labels)
