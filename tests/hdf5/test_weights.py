"""Weights of samples and of classes: what is understood, what comes out, and what is refused in which words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.weights import balanced_weights, check_weights, chosen_weights, class_weights
from tests.contracts import exactly

labels_of_samples = st.lists(st.integers(-3, 12), min_size=1, max_size=200).map(np.array)


@pytest.mark.parametrize(
    "weights",
    [[1, 0.5, 0], (1, 0.5, 0), np.array([1, 0.5, 0], ">f4"), np.array([2, 1, 0], np.int16), torch.tensor([1, 0.5, 0])],
    ids=lambda weights: f"{type(weights).__name__} {getattr(weights, 'dtype', '')}",
)
def test_weights_may_be_any_row_of_numbers(weights):
    checked = check_weights(weights)
    assert checked.dtype == np.float64
    assert (checked / checked.max()).tolist() == [1.0, 0.5, 0.0]
    assert not checked.flags.writeable


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            [1.0, -0.5, -1.0],
            "the sampling weight of sample 1 is -0.5 (2 weight(s) are wrong); expected finite numbers from 0 up.",
        ),
        (
            [float("nan"), 1.0],
            "the sampling weight of sample 0 is nan (1 weight(s) are wrong); expected finite numbers from 0 up.",
        ),
        (
            [1.0, float("inf")],
            "the sampling weight of sample 1 is inf (1 weight(s) are wrong); expected finite numbers from 0 up.",
        ),
        ([0.0, 0, 0], "all 3 sampling weights are 0, so no sample can be drawn; expected one above 0."),
        (
            ["a", "b"],
            "the sampling weights have shape (2,) and type <U1; expected numbers (n,), one for each sample.",
        ),
        (
            [[1.0, 2.0]],
            "the sampling weights have shape (1, 2) and type float64; expected numbers (n,), one for each sample.",
        ),
        ([], "the sampling weights have shape (0,) and type float64; expected numbers (n,), one for each sample."),
        (5, "the sampling weights have shape () and type int64; expected numbers (n,), one for each sample."),
        ([1j], "the sampling weights have shape (1,) and type complex128; expected numbers (n,), one for each sample."),
    ],
    ids=str,
)
def test_weights_that_mean_nothing_are_refused(weights, message):
    with pytest.raises(ValueError, match=exactly(message)):
        check_weights(weights)


def test_weights_are_those_of_the_samples_used_in_their_order():
    assert chosen_weights([5.0, 6.0, 7.0], 3, None).tolist() == [5.0, 6.0, 7.0]
    assert chosen_weights([5.0, 6.0, 7.0], 3, np.array([2, 0])).tolist() == [7.0, 5.0]


@pytest.mark.parametrize(
    ("weights", "indices", "message"),
    [
        (
            [1.0, 1.0],
            None,
            "there are 2 sampling weights; expected 4, one for each sample of the file(s).",
        ),
        (
            [1.0, 1.0],
            [0, 3],
            "there are 2 sampling weights; expected 4, one for each sample of the file(s), whether it is used or not.",
        ),
        (
            [0.0, 1.0, 1.0, 0.0],
            [0, 3],
            "the sampling weights of all 2 samples that are used are 0 (others have weights above 0); expected one "
            "above 0.",
        ),
        (
            [1.0, float("nan"), 1.0, 1.0],  # not used, and still a sign of a mistake
            [0, 3],
            "the sampling weight of sample 1 is nan (1 weight(s) are wrong); expected finite numbers from 0 up.",
        ),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_the_samples_are_refused(weights, indices, message):
    with pytest.raises(ValueError, match=exactly(message)):
        chosen_weights(weights, 4, None if indices is None else np.array(indices))


@settings(max_examples=80)
@given(labels_of_samples)
def test_balanced_classes_weigh_the_same_and_so_do_the_samples_of_one(labels):
    weights = balanced_weights(labels)
    for label in np.unique(labels):
        own = weights[labels == label]
        assert len(set(own.tolist())) == 1
        assert own.sum() == pytest.approx(1.0)  # a sum of up to 200 rounded shares


@settings(max_examples=80)
@given(labels_of_samples, st.data())
def test_every_sample_has_the_weight_of_its_class(labels, data):
    by_class = {label: data.draw(st.floats(0, 1e6)) for label in np.unique(labels).tolist()}
    by_class[99] = 1.0  # a class that does not occur is nothing wrong: a fold may have none of it
    assert class_weights(labels, by_class).tolist() == [by_class[label] for label in labels.tolist()]


@pytest.mark.parametrize(
    "weights",
    [
        {0: 1, 1: 4},
        {"0": 1.0, "1": 4.0},
        {np.int64(0): np.float32(1), np.uint8(1): 4},
        {"cat": 1, "dog": 4},
        {"cat": 1, 1: 4},
    ],
    ids=str,
)
def test_a_class_is_a_number_its_digits_or_a_name(weights):
    assert class_weights(np.array([1, 0, 1]), weights, ["cat", "dog"]).tolist() == [4.0, 1.0, 4.0]


def test_a_name_that_looks_like_a_number_is_a_name():
    assert class_weights(np.array([0, 1]), {"7": 1, "0": 4}, ["7", "0"]).tolist() == [1.0, 4.0]


def test_a_class_may_be_below_zero():
    assert class_weights(np.array([-1, 3]), {"-1": 2, 3: 1}).tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("weights", "names", "message"),
    [
        (
            {0: 1.0},
            None,
            "the sampling weights leave out class 1 (2 samples), 5 (1 samples); there are weights for 0. Give every "
            "class that occurs one, 0 for those that are not to be drawn.",
        ),
        (
            {},
            None,
            "the sampling weights leave out class 0 (1 samples), 1 (2 samples), 5 (1 samples); there are weights for "
            "none. Give every class that occurs one, 0 for those that are not to be drawn.",
        ),
        ({"dog": 1}, None, "the sampling weights name class 'dog'; expected a class number."),
        (
            {"dog": 1},
            ["cat", "cow"],
            "the sampling weights name class 'dog'; expected a class number or one of cat, cow.",
        ),
        ({0.5: 1}, None, "the sampling weights name class 0.5; expected a class number."),
        ({True: 1}, None, "the sampling weights name class True; expected a class number."),
        ({"cat": 1, 0: 2}, ["cat"], "the sampling weights name class 0 twice, once as 0."),
        ({0: "much"}, None, "the sampling weight of class 0 is 'much'; expected a number."),
        ({0: True}, None, "the sampling weight of class 0 is True; expected a number."),
        ({0: -1}, None, "the sampling weight of class 0 is -1; expected a finite number from 0 up."),
        ({0: float("nan")}, None, "the sampling weight of class 0 is nan; expected a finite number from 0 up."),
        ({0: float("inf")}, None, "the sampling weight of class 0 is inf; expected a finite number from 0 up."),
    ],
    ids=str,
)
def test_weights_of_classes_that_mean_nothing_are_refused(weights, names, message):
    with pytest.raises(ValueError, match=exactly(message)):
        class_weights(np.array([0, 1, 1, 5]), weights, names)


def test_of_many_classes_without_a_weight_ten_are_named():
    with pytest.raises(ValueError, match=r"leave out class 0 \(1 samples\), .* 9 \(1 samples\) and 990 more; there"):
        class_weights(np.arange(1000), {})
