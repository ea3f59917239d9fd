"""Actions: the text form, and what each needs."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from lightning_gpufeed.pipeline import action as action_module
from lightning_gpufeed.pipeline.action import Action

actions = st.builds(Action, st.integers(0, 200), st.sampled_from("FIWB"), st.integers(0, 200))


def test_the_examples_run():
    assert doctest.testmod(action_module).failed == 0


@given(actions)
def test_text_and_back_is_the_same_action(action):
    assert Action.parse(str(action)) == action
    assert Action.parse(f" {action} ") == action


@given(actions)
def test_torch_reads_the_text_as_the_same_action(action):
    theirs = _Action.from_str(str(action))
    assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == action
    assert str(theirs) == str(action)


@pytest.mark.parametrize("text", ["", "F0", "0F", "0G0", "0F0 1F0", "-1F0", "0SEND_F0", "0f0", "0 F 0", "0F0x", "٣F0"])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is no action; expected a stage, one of F, I, W and B, and a microbatch"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        ("0F3", ""),
        ("1F3", "0F3"),
        ("2I3", "2F3"),
        ("1I3", "1F3 2I3"),
        ("1B3", "1F3 2I3"),
        ("0W3", "0I3"),
        ("2W3", "2I3"),
    ],
)
def test_an_action_needs_what_comes_before_it_in_the_model(action, needed):
    assert " ".join(map(str, Action.parse(action).needs(num_stages=3))) == needed


def test_a_full_backward_is_both_gradients():
    assert Action.parse("1B3").parts == (Action(1, "I", 3), Action(1, "W", 3))
    assert all(Action.parse(text).parts == (Action.parse(text),) for text in ("1F3", "1I3", "1W3"))
