"""What ranks agree on: alone, and in a real group of two processes (gloo), which is started once for all tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from lightning_gpufeed.device.vote import HostVote, warn_uneven_ranks
from tests.scripts import start_script

WORKER = Path(__file__).with_name("vote_worker.py")
NUM_RANKS = 2
LIMIT_SECONDS = 90


class Ranks:
    """What each rank wrote down, by the name of the scenario."""

    def __init__(self, folder: Path, log: str) -> None:
        self.folder = folder
        self.log = log

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        files = [self.folder / f"{name}.{rank}.json" for rank in range(NUM_RANKS)]
        assert all(file.exists() for file in files), f"not every rank finished {name!r}:\n{self.log[-4000:]}"
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    logs = [folder / f"log.{rank}" for rank in range(NUM_RANKS)]
    running = start_script(
        [str(WORKER), str(NUM_RANKS), str(folder)],
        folder=folder,
        environment={**os.environ},
        outputs=[[log, log] for log in logs],
        are_ranks=True,
    )
    try:
        running.wait(LIMIT_SECONDS)
    except TimeoutError:
        pass  # the test that misses a result shows the log
    finally:
        running.kill()
    return Ranks(folder, "\n".join(log.read_text() for log in logs))


# Alone -----------------------------------------------------------------------------------------------------


def assert_alone(vote: HostVote) -> None:
    assert (vote.rank, vote.num_ranks) == (0, 1)
    assert vote.minimum(3, -5, 2**62) == [3, -5, 2**62]
    assert vote.maximum(3, -5, 2**62) == [3, -5, 2**62]
    assert vote.minimum() == vote.maximum() == []
    item = {"any": object()}
    assert vote.collect(item) == [item]
    assert vote.num_votes == 0  # nobody was asked


def test_one_process_decides_for_itself():
    vote = HostVote()
    assert_alone(vote)
    vote.close()
    vote.close()
    assert_alone(vote)


def test_a_group_of_one_rank_is_alone_too(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    vote = HostVote()
    assert_alone(vote)
    vote.close()


def test_a_rank_without_batches_is_told_of():
    with pytest.warns(UserWarning, match="another rank has no batch left: the epoch ends here on all ranks"):
        warn_uneven_ranks()


# Two ranks -------------------------------------------------------------------------------------------------


def test_all_ranks_act_on_the_smallest_of_each_number(ranks):
    for rank, result in enumerate(ranks["votes"]):
        assert result["rank"] == rank
        assert result["smallest"] == [10, 19]
        assert result["far"] == [2**62, -(2**41)]
        assert result["many"] == [[-number] for number in range(20)]
        assert result["num_votes"] == 23
        assert result["sum"] == 1  # the ranks' own group goes on working


def test_all_ranks_can_act_on_the_largest_of_each_number(ranks):
    for result in ranks["votes"]:
        assert result["largest"] == [11, 20, -(2**62)]


def test_what_each_rank_says_is_known_to_all_by_rank(ranks):
    for result in ranks["collected"]:
        assert result["ranks"] == [0, 1]
        assert result["lengths"] == [0, 100_000]
        assert result["values"] == [[None, 2.5, [0]], [None, 2.5, [1]]]
        assert result["second"] == [["only rank 0"], None]
        assert result["objects"] == [0, 1]


def test_collecting_and_voting_take_turns_and_draw_nothing(ranks):
    for rank, result in enumerate(ranks["collected"]):
        assert result["smallest"] == [6]
        assert result["num_votes"] == 4
        assert not result["is_drawn"]
        assert result["after"] == [rank]  # a closed vote asks nobody


def test_a_closed_vote_asks_nobody_and_still_knows_its_rank(ranks):
    for rank, result in enumerate(ranks["votes"]):
        assert (result["after"], result["rank_after"], result["num_ranks"]) == ([rank], rank, NUM_RANKS)


def test_a_rank_that_waits_in_vain_fails_instead(ranks):
    waiting, _ = ranks["in_vain"]
    assert "imed out" in waiting["error"]  # in the words of gloo


def test_all_ranks_cut_a_batch_into_as_many_pieces_as_the_smallest_allows(ranks):
    first, second = ranks["pieces"]
    assert first["steps"] == second["steps"]
    # Batches of 4, 4, 3 and of 4, 4, 1: the last one is one piece.
    assert first["steps"][-2:] == [[2, 0, 0], [2, 1, 0]]
    assert len(first["steps"]) == 2 * (4 + 4 + 1)
    assert [sorted(result["samples"][-1]) for result in (first, second)] == [[8, 9, 10], [8]]
    assert first["changes"] == second["changes"] == [-6]  # both had counted on four pieces


def test_every_rank_has_an_order_of_its_own(ranks):
    first, second = ranks["orders"]
    assert sorted(first["samples"][0]) == sorted(second["samples"][0]) == list(range(30))
    assert first["samples"] != second["samples"]


def test_ranks_with_unequal_numbers_of_batches_end_together_and_say_so(ranks):
    first, second = ranks["uneven"]
    assert first["steps"] == second["steps"]
    assert len(first["steps"]) == 2 * 2 * 2
    assert len(first["warnings"]) == 1
    assert "another rank has no batch left" in first["warnings"][0]
    assert second["warnings"] == []


def test_all_ranks_wait_for_the_slowest_loader_with_the_same_echoes(ranks):
    first, second = ranks["speeds"]
    assert first["trace"] == second["trace"] == [3, 1, 2, 1]
    assert first["steps"] == second["steps"]


def test_the_report_is_about_the_slowest_loader(ranks):
    assert [result["load_seconds"] for result in ranks["slowest"]] == [2.5, 2.5]
