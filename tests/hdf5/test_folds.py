"""Folds: every sample in one of them, as even as can be, groups whole, the same ones each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.folds import FoldChoice, assign_folds, choose_fold, take_fold
from tests.contracts import check_division, exactly


def spread(counts: np.ndarray) -> int:
    return int(counts.max() - counts.min())


@settings(max_examples=100)
@given(st.integers(2, 12), st.data())
def test_folds_differ_by_one_sample_at_most_and_by_one_of_each_class(num_folds, data):
    num_samples = data.draw(st.integers(num_folds, 200))
    seed = data.draw(st.integers(0, 2**32 - 1))
    labels = np.random.default_rng(seed).integers(-2, data.draw(st.integers(-1, 6)), num_samples)
    for classes in (None, labels):
        folds = assign_folds(num_samples, num_folds, seed, classes)
        assert spread(np.bincount(folds, minlength=num_folds)) <= 1
        assert folds.max() < num_folds
        for label in [] if classes is None else np.unique(classes):
            assert spread(np.bincount(folds[labels == label], minlength=num_folds)) <= 1


@settings(max_examples=100)
@given(st.integers(2, 6), st.booleans(), st.data())
def test_samples_of_a_group_are_in_one_fold_and_no_fold_is_empty(num_folds, is_stratified, data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=num_folds, max_size=40))
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)) * 7 - 20, sizes))
    labels = np.random.default_rng(data.draw(st.integers(0, 999))).integers(0, 4, len(groups))
    folds = assign_folds(len(groups), num_folds, 1, labels if is_stratified else None, groups)
    assert sorted(set(folds.tolist())) == list(range(num_folds))
    for group in np.unique(groups):
        assert len(set(folds[groups == group].tolist())) == 1
    if not is_stratified:
        # Whoever is given a group had the fewest samples then.
        assert spread(np.bincount(folds)) <= max(sizes)


def test_groups_may_be_named_by_text():
    groups = np.array([f"patient {number // 4}" for number in range(40)], dtype=object)
    folds = assign_folds(40, 5, 0, groups=groups)
    assert np.bincount(folds).tolist() == [8] * 5
    assert (folds.reshape(10, 4) == folds.reshape(10, 4)[:, :1]).all()


def test_groups_of_different_classes_are_spread_so_that_each_fold_has_its_share_of_every_class():
    # 60 patients with 10 samples each; one in three is ill, and so are all samples of them.
    groups, labels = np.arange(600) // 10, (np.arange(600) // 10) % 3 == 0
    for seed in range(5):
        folds = assign_folds(600, 5, seed, labels, groups)
        assert np.bincount(folds).tolist() == [120] * 5
        assert np.bincount(folds[labels]).tolist() == [40] * 5


@pytest.mark.parametrize("seed", [1, 3])
def test_folds_of_groups_of_very_different_sizes_differ_by_less_than_a_group_in_every_class(seed):
    random = np.random.default_rng(seed)
    sizes, ill = random.integers(1, 30, 80), random.random(80) < 0.25
    groups, labels = np.repeat(np.arange(80), sizes), np.repeat(ill, sizes).astype(int)
    folds = assign_folds(len(groups), 5, 0, labels, groups)
    for label in range(2):
        assert spread(np.bincount(folds[labels == label])) < 10  # a group has 15 samples on average


def test_groups_of_mixed_classes_are_spread_about_evenly():
    random = np.random.default_rng(0)
    groups = random.integers(0, 300, 6000)
    labels = random.choice(4, 6000, p=[0.6, 0.25, 0.1, 0.05])
    folds = assign_folds(6000, 5, 0, labels, groups)
    for label in range(4):
        shares = np.bincount(folds[labels == label]) / (labels == label).sum()
        assert np.abs(shares - 0.2).max() < 0.02


# Promised like the orders: with other folds a resumed run would train on what it was validated on.
def test_folds_are_those_of_the_first_release():
    labels, groups = np.arange(12) % 3, np.arange(12) // 2
    assert assign_folds(12, 3, 0).tolist() == [0, 0, 2, 1, 2, 1, 2, 1, 1, 2, 0, 0]
    assert assign_folds(12, 3, 1).tolist() == [2, 2, 1, 1, 2, 1, 0, 0, 1, 0, 2, 0]
    assert assign_folds(12, 3, 0, labels).tolist() == [2, 1, 0, 0, 0, 2, 1, 2, 1, 0, 1, 2]
    assert assign_folds(12, 3, 0, None, groups).tolist() == [0, 0, 2, 2, 1, 1, 0, 0, 1, 1, 2, 2]
    assert assign_folds(12, 3, 0, labels, groups).tolist() == [1, 1, 2, 2, 1, 1, 0, 0, 0, 0, 2, 2]


@pytest.mark.parametrize("labels", [None, np.arange(400) % 3], ids=["plain", "stratified"])
@pytest.mark.parametrize("groups", [None, np.arange(400) // 5], ids=["single", "grouped"])
def test_the_seed_alone_decides_which_samples_are_in_a_fold(labels, groups):
    first, again, other = (assign_folds(400, 4, seed, labels, groups) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("num_samples", "groups", "message"),
    [
        (2, None, "num_folds is 3, but there are 2 samples to make folds of; expected at most that many."),
        (9, np.arange(9) % 2, "num_folds is 3, but there are 2 groups to make folds of; expected at most that many."),
    ],
    ids=["samples", "groups"],
)
def test_more_folds_than_there_is_to_divide_are_refused(num_samples, groups, message):
    with pytest.raises(ValueError, match=exactly(message)):
        assign_folds(num_samples, 3, 0, groups=groups)


@settings(max_examples=80)
@given(st.lists(st.integers(-2, 4), min_size=2, max_size=60), st.data())
def test_a_fold_and_the_others_are_the_whole_and_all_folds_are(numbers, data):
    folds = np.array(numbers)
    pool = np.array(data.draw(st.lists(st.integers(0, 999), min_size=len(folds), max_size=len(folds), unique=True)))
    if len(set(numbers)) > 1:
        parts = {fold: take_fold(pool, folds, fold) for fold in sorted(set(numbers))}
        for fold, (taken, rest) in parts.items():
            check_division(pool, taken, rest)
            assert taken.tolist() == pool[folds == fold].tolist()
        assert sorted(np.concatenate([taken for taken, _ in parts.values()]).tolist()) == sorted(pool.tolist())


def test_a_fold_that_does_not_exist_is_refused_with_those_that_do():
    message = "fold=3: no sample is in that fold. There are the folds -1 (1 samples), 0 (2 samples), 5 (3 samples)."
    with pytest.raises(ValueError, match=exactly(message)):
        take_fold(np.arange(6), np.array([0, 5, 5, 0, -1, 5]), 3)


def test_of_many_folds_twenty_are_named():
    with pytest.raises(ValueError, match=r" 19 \(1 samples\) and 30 more\.$"):
        take_fold(np.arange(50), np.arange(50), 70)


def test_a_fold_of_all_samples_is_refused():
    with pytest.raises(
        ValueError, match=exactly("fold=2: all 4 samples are in that fold, so none is left for training.")
    ):
        take_fold(np.arange(4), np.full(4, 2), 2)


def test_arguments_that_say_nothing_of_folds_make_none():
    assert choose_fold(None, None, None, None) is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((2, "fold", None, None), (2, "fold", None, None)), ((np.int64(0), None, 5, "who"), (0, None, 5, "who"))],
    ids=["given", "made"],
)
def test_folds_are_given_or_made(arguments, expected):
    choice = choose_fold(*arguments)
    assert isinstance(choice, FoldChoice)
    assert (choice.fold, choice.folds, choice.num_folds, choice.group_by) == expected


NO_FOLDS = (
    "no folds are: give folds=, the fold number of each sample (or the name of the field that holds them), or "
    "num_folds= to make folds."
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, None, None, None), f"fold is given, but {NO_FOLDS}"),
        ((None, None, None, "who"), f"group_by is given, but {NO_FOLDS}"),
        ((None, "fold", None, None), "there are folds, but fold= does not say which of them is for validation."),
        ((None, None, 5, None), "there are folds, but fold= does not say which of them is for validation."),
        (
            (1, "fold", 5, None),
            "both folds and num_folds are given: samples have fold numbers, or folds are made, not both.",
        ),
        (
            (1, "fold", None, "who"),
            "group_by says how folds are made, but folds= gives them. Leave one of the two off.",
        ),
        ((5, None, 5, None), "fold is 5; expected 0 to 4."),
        ((-1, None, 5, None), "fold is -1; expected 0 to 4."),
        ((0, None, 1, None), "num_folds is 1; expected at least 2."),
        (("a", "fold", None, None), "fold is 'a'; expected a whole number."),
        ((True, None, 3, None), "fold is True; expected a whole number."),
    ],
    ids=str,
)
def test_arguments_about_folds_that_do_not_fit_together_are_refused(arguments, message):
    with pytest.raises(ValueError, match=exactly(message)):
        choose_fold(*arguments)
