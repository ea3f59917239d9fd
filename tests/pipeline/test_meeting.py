"""Two real ranks (gloo) come together before trainings, whatever earlier ones have left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_gpufeed.pipeline.meeting import everyone, part
from tests.doubles import run_ranks

WORKER = Path(__file__).with_name("meeting_worker.py")
LIMIT_SECONDS = 60


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("meeting")
    log = run_ranks(WORKER, {"out": str(folder), "world_size": 2}, folder, num_processes=1, limit_seconds=LIMIT_SECONDS)
    assert (folder / "0.json").exists(), log
    assert (folder / "1.json").exists(), log
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert len(results[0]) == len(results[1]) == 6, log
    return results


def test_the_default_group_is_used_where_nothing_has_failed(found):
    assert [one["meets_well"] for one in found] == [True, True]


def test_groups_have_the_same_names_on_all_ranks_again(found):
    assert [one["has_made_other_groups"] for one in found] == [2, 2]


def test_who_comes_after_another_one_has_given_up_is_told_so_and_the_next_meeting_is_well(found):
    (first, next_of_first), (second, next_of_second) = (one["comes_late"] for one in found)
    assert first.startswith("SyncError: Rank 0 is about to begin a training, and ranks 1 did not come within 0.4 s")
    assert second.startswith("SyncError: Rank 1 is about to begin a training, and another rank did not come")
    assert next_of_first is next_of_second is True


def test_what_was_left_in_a_group_of_all_ranks_is_not_taken_for_what_comes_next(found):
    for one in found:
        once, again, has_first_group, left = one["left_a_message"]
        assert once == again == 2
        assert not has_first_group
        assert left == 200


def test_a_group_is_given_back_once_nothing_is_on_its_way_in_it(found):
    assert [one["leaves_a_group_in_use"] for one in found] == [[True, False], [True, False]]


def test_another_default_group_begins_anew(found):
    assert [one["begins_anew_with_another_default_group"] for one in found] == [True, True]


def test_without_a_group_there_is_nobody():
    assert everyone() is None
    part(is_well=False)
