"""Samples taken aside: the right number of each class, every sample on one side only, the same ones each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.holdout import as_indices, take_fraction, take_indices
from tests.contracts import check_division, exactly

pools = st.lists(st.integers(0, 10**6), min_size=2, max_size=200, unique=True).map(lambda pool: np.array(pool))
fractions = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)


@settings(max_examples=200)
@given(pools, fractions, st.integers(0, 10**9))
def test_a_fraction_and_the_rest_are_the_whole(pool, fraction, seed):
    taken, rest = take_fraction(pool, fraction, seed)
    check_division(pool, taken, rest)
    assert len(rest)
    assert len(taken) == min(max(1, round(fraction * len(pool))), len(pool) - 1)
    assert taken.tolist() == [sample for sample in pool.tolist() if sample in set(taken.tolist())]


@settings(max_examples=200)
@given(pools, fractions, st.integers(0, 9), st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_stratified_fraction_takes_its_share_of_each_class(pool, fraction, seed, num_classes, random):
    labels = np.array([random.randrange(num_classes) * 7 - 3 for _ in pool])
    taken, rest = take_fraction(pool, fraction, seed, labels)
    check_division(pool, taken, rest)
    assert len(rest)
    assert len(taken) == len(take_fraction(pool, fraction, seed)[0])
    is_taken = np.isin(pool, taken)
    for label in np.unique(labels):
        exact = fraction * (labels == label).sum()
        share = (is_taken & (labels == label)).sum()
        # A target that was moved to keep both sides filled may cost a class one more.
        assert np.floor(exact) <= share <= np.floor(exact) + 1


def test_a_stratified_fraction_of_a_balanced_set_is_balanced():
    labels = np.arange(1000) % 10
    taken, rest = take_fraction(np.arange(1000), 0.2, 3, labels)
    assert np.bincount(labels[taken]).tolist() == [20] * 10
    assert np.bincount(labels[rest]).tolist() == [80] * 10


def test_what_is_left_over_goes_to_the_classes_with_the_largest_remainders():
    labels = np.array([0] * 18 + [1] * 15 + [2] * 7)  # a tenth: 1.8, 1.5, 0.7 of 4
    taken, _ = take_fraction(np.arange(40), 0.1, 0, labels)
    assert np.bincount(labels[taken]).tolist() == [2, 1, 1]


@pytest.mark.parametrize("labels", [None, np.arange(500) % 3])
def test_the_seed_alone_decides_which_samples_are_taken(labels):
    pool = np.arange(500)
    first, again, other = (take_fraction(pool, 0.3, seed, labels)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


# Promised like the orders: with other samples aside, a resumed run would validate on what it was trained on.
def test_fractions_are_those_of_the_first_release():
    pool = np.arange(20)
    assert take_fraction(pool, 0.25, 0)[0].tolist() == [2, 3, 11, 13, 15]
    assert take_fraction(pool, 0.25, 1)[0].tolist() == [2, 9, 16, 18, 19]
    assert take_fraction(pool, 0.25, 0, pool % 3)[0].tolist() == [1, 3, 11, 13, 15]


@pytest.mark.parametrize(("fraction", "number"), [(0.001, 1), (0.999, 9), (0.5, 5), (0.25, 2), (0.35, 4)])
def test_both_sides_hold_at_least_one_sample(fraction, number):
    taken, rest = take_fraction(np.arange(10), fraction, 0)
    assert (len(taken), len(rest)) == (number, 10 - number)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match=rf"^fraction is {fraction}; expected a number above 0 and below 1\.$"):
        take_fraction(np.arange(10), fraction, 0)


@pytest.mark.parametrize("size", [0, 1])
def test_one_sample_cannot_be_divided(size):
    with pytest.raises(ValueError, match=exactly(f"{size} sample(s) cannot be divided; expected at least 2.")):
        take_fraction(np.arange(size), 0.5, 0)


@settings(max_examples=100)
@given(pools, st.data())
def test_given_samples_and_the_rest_are_the_whole(pool, data):
    wanted = data.draw(st.lists(st.sampled_from(pool.tolist()), min_size=1, unique=True))
    taken, rest = take_indices(pool, wanted, "val")
    check_division(pool, taken, rest)
    assert taken.tolist() == wanted  # in the order they were given


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_given_samples_may_be_integers_of_any_type(dtype):
    taken, rest = take_indices(np.arange(5), np.array([3, 1], dtype=dtype), "val")
    assert taken.dtype == np.int64
    assert (taken.tolist(), rest.tolist()) == ([3, 1], [0, 2, 4])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([1, 1], "val: the index array names a sample twice; each may be used once."),
        (
            [2, 7],
            "val: the index array names sample 7, which is not available: it is out of range (0 to 6) or belongs to "
            "another split.",
        ),
        (
            [-1],
            "val: the index array names sample -1, which is not available: it is out of range (0 to 6) or belongs to "
            "another split.",
        ),
        (
            [3],
            "val: the index array names sample 3, which is not available: it is out of range (0 to 6) or belongs to "
            "another split.",
        ),
        ([[1, 2]], "val: an index array has shape (1, 2) and type int64; expected integers (m,), m >= 1."),
        ([], "val: an index array has shape (0,) and type float64; expected integers (m,), m >= 1."),
        ([0.5], "val: an index array has shape (1,) and type float64; expected integers (m,), m >= 1."),
        ([True, False], "val: an index array has shape (2,) and type bool; expected integers (m,), m >= 1."),
        (["a"], "val: an index array has shape (1,) and type <U1; expected integers (m,), m >= 1."),
    ],
    ids=str,
)
def test_given_samples_that_cannot_be_taken_are_refused(wanted, message):
    with pytest.raises(ValueError, match=exactly(message)):
        take_indices(np.array([0, 1, 2, 4, 5, 6]), wanted, "val")


@settings(max_examples=100)
@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_a_mask_is_the_numbers_of_the_samples_it_marks(mask):
    marked = [number for number, is_marked in enumerate(mask) if is_marked]
    for form in (mask, np.array(mask)):
        assert as_indices(form, len(mask), "val").tolist() == marked
    if len(mask) > 2:
        for dtype in (np.uint8, np.int64):
            assert as_indices(np.array(mask, dtype), len(mask), "val").tolist() == marked


@pytest.mark.parametrize(
    ("numbers", "num_samples"),
    [
        ([0, 1], 2),
        ([1, 0], 2),
        ([0, 1], 5),
        ([0, 1, 2], 3),
        ([0, 1, -1], 3),
        ([], 0),
        ([[0, 1, 1]], 3),
        ([0.0, 1.0, 1.0], 3),
    ],
    ids=str,
)
def test_what_is_no_mask_is_left_as_it_is(numbers, num_samples):
    assert as_indices(numbers, num_samples, "val").tolist() == numbers


@pytest.mark.parametrize("mask", [[True], [False] * 4], ids=str)
def test_a_mask_of_another_length_is_refused(mask):
    message = f"val: a mask has {len(mask)} entries; expected 3, one for each sample of the file(s)."
    with pytest.raises(ValueError, match=exactly(message)):
        as_indices(mask, 3, "val")
