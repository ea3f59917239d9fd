"""Where in an epoch a training stands, and what of it is kept."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from lightning_gpufeed.echo.plan import Piece
from lightning_gpufeed.echo.position import Ending, Place, Round


def round_of(fetch: int) -> Round:
    return Round(fetch, 2, 2, smallest=8, before=["before 4"], begun=[True], after=["after 4"])


IN_THE_MIDDLE = Place(Piece(4, 1, 1, is_fetch=False), round_of(4))
FETCHED_ONLY = Place(Piece(4), round_of(4))
NEXT_BATCH = Place(Piece(5), round_of(4))
OPEN = Place(Piece(4, 2, 0, is_fetch=False), round_of(4), is_decided=False)


@pytest.mark.parametrize("place", [IN_THE_MIDDLE, FETCHED_ONLY], ids=repr)
def test_to_go_on_with_a_batch_its_loader_has_to_give_it_again(place):
    assert place.needs_batch_again
    assert place.loader_states() == ["before 4"]


def test_to_go_on_with_the_next_batch_the_loader_goes_on_too():
    assert not NEXT_BATCH.needs_batch_again
    assert NEXT_BATCH.loader_states() == ["after 4"]


def test_what_is_left_open_counts_as_not_fetched_again_until_it_is_decided():
    # With the loader's own state alone, without what is kept here, the next batch is right.
    assert not OPEN.needs_batch_again
    assert OPEN.loader_states() == ["after 4"]


def test_only_states_that_can_be_needed_are_kept():
    assert (IN_THE_MIDDLE.to_dict()["before"], IN_THE_MIDDLE.to_dict()["after"]) == (["before 4"], [])
    assert (NEXT_BATCH.to_dict()["before"], NEXT_BATCH.to_dict()["after"]) == ([], ["after 4"])
    assert (OPEN.to_dict()["before"], OPEN.to_dict()["after"]) == (["before 4"], ["after 4"])


def test_passes_that_were_counted_belong_to_their_batch_alone():
    assert IN_THE_MIDDLE.to_dict()["num_counted"] == OPEN.to_dict()["num_counted"] == 2
    assert NEXT_BATCH.to_dict()["num_counted"] == 0


@pytest.mark.parametrize("place", [IN_THE_MIDDLE, FETCHED_ONLY, NEXT_BATCH, OPEN], ids=repr)
def test_a_place_is_plain_numbers_beside_the_states_of_the_loaders(place):
    assert json.loads(json.dumps(place.to_dict())) == place.to_dict()


def test_states_of_several_loaders_stay_with_their_loaders_whichever_comes_first():
    round_ = Round(0)
    round_.keep_states(1, 3, "before of 1", False, "after of 1")
    assert round_.before == [None, "before of 1", None]
    round_.keep_states(0, 3, "before of 0", True, "after of 0")
    round_.keep_states(2, 3, "before of 2", True, "after of 2")
    assert round_.begun == [True, False, True]
    assert round_.before == [f"before of {number}" for number in range(3)]
    assert round_.after == [f"after of {number}" for number in range(3)]


def test_a_loader_that_begins_again_in_the_same_round_replaces_its_state():
    round_ = Round(0)
    round_.keep_states(0, 1, "at the end", True, "at the end")
    round_.keep_states(0, 1, "begun again", False, "after its first")
    assert (round_.before, round_.begun, round_.after) == (["begun again"], [False], ["after its first"])


def test_rounds_share_no_states():
    Round(0).before.append("of the first")
    assert Round(1).before == Round(1).after == []


def test_the_next_round_begins_where_this_one_ends():
    # A loader that has no batch left for it stays there.
    round_ = Round(4, 2, 2, smallest=8, before=["a 4", "b 4"], begun=[False, True], after=["a 5", "b 5"])
    following = round_.next_round()
    assert following == Round(5, before=["a 5", "b 5"], begun=[True, True], after=["a 5", "b 5"])
    following.keep_states(0, 2, "a 5", True, "a 6")
    assert (following.after, round_.after) == (["a 6", "b 5"], ["a 5", "b 5"])


def test_an_ending_comes_back_from_plain_values():
    ending = Ending([{"epoch": 3}, None], is_at_end=[True, False])
    assert Ending(**json.loads(json.dumps(asdict(ending)))) == ending
    assert Ending() == Ending([], is_at_end=[])
