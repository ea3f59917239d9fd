"""What a user gives is refused with what was given and what was expected."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from lightning_gpufeed.recover.arguments import check_choices, check_kinds

GOOD = {"mode": "microbatch", "loss_reduction": "mean", "split_check": "refuse", "scale_lr": None}


@pytest.mark.parametrize("scale_lr", ["linear", "sqrt", "keep"])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("split_check", ["refuse", "warn", "skip"])
def test_all_words_that_are_documented_are_taken(loss_reduction, split_check, scale_lr):
    check_choices("microbatch", loss_reduction, split_check, None)
    check_choices("shrink_loader", loss_reduction, split_check, scale_lr)


@pytest.mark.parametrize("value", ["", "Microbatch", "microbatches", None, True, 0, ["mean"], b"mean", ("mean", "sum")])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mode", "'microbatch' or 'shrink_loader'"),
        ("loss_reduction", "'mean' or 'sum'"),
        ("split_check", "'refuse' or 'warn' or 'skip'"),
    ],
)
def test_any_other_word_is_refused_with_those_that_are_known(name, expected, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole text is compared
        check_choices(**{**GOOD, name: value})
    assert str(caught.value) == f"{name} is {value!r}; expected {expected}."


@pytest.mark.parametrize("scale_lr", ["linear", "sqrt", "keep", "", False, 0])
def test_a_rule_for_the_rate_is_refused_where_the_batch_keeps_its_size(scale_lr):
    with pytest.raises(ValueError, match=r"scale_lr is .*, but mode is 'microbatch', .* expected None\."):
        check_choices("microbatch", "mean", "refuse", scale_lr)


@pytest.mark.parametrize("scale_lr", [None, "", "Linear", "none", True, 0.5, ["linear"]])
def test_a_loader_that_shrinks_needs_a_rule_for_the_rate(scale_lr):
    with pytest.raises(ValueError, match=r"scale_lr is .* and mode is 'shrink_loader'; expected 'linear', 'sqrt' or"):
        check_choices("shrink_loader", "mean", "refuse", scale_lr)


class Weigher:
    """Can be called, and is no function."""

    def __call__(self, batch: Any) -> float:
        return 1.0


@pytest.mark.parametrize("function", [None, len, lambda batch: 1.0, functools.partial(max, 0), Weigher()])
def test_all_that_can_be_called_is_a_function(function):
    check_kinds(function, function, correct_batchnorm=True, emergency_checkpoint=False)


@pytest.mark.parametrize("value", [1, "len", [len], False, 0])
@pytest.mark.parametrize("name", ["weight_fn", "split_fn"])
def test_what_cannot_be_called_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is .*; expected a function of a batch, or None\.$"):
        check_kinds(**{"weight_fn": None, "split_fn": None, name: value})


@pytest.mark.parametrize("value", [None, 0, 1, "True", [], 1.0])
def test_a_switch_is_true_or_false(value):
    with pytest.raises(ValueError, match=r"^emergency_checkpoint is .*; expected True or False\.$"):
        check_kinds(None, None, correct_batchnorm=True, emergency_checkpoint=value)
