"""`FeedMonitor` on two ranks: real processes in a real group (gloo, on the CPU), one of which is slower.

Starting ranks takes seconds, so they are started once and do everything; the tests read what they wrote down. Where
two runs are compared, one of them is plain Lightning.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.feed_rank_worker import NUM_BATCHES
from tests.datamodules.models import same_bits
from tests.doubles import free_port, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WORKER = Path(__file__).with_name("feed_rank_worker.py")
LIMIT_SECONDS = 200
TIMEOUT_SECONDS = 60
"""How long a rank waits for the other one before it fails."""
PROMPT_SECONDS = 40
"""What has ended sooner has not waited for that."""
SLOW_SECONDS = 0.01


@dataclass
class Ranks:
    """What each rank wrote down, by the name of the scenario."""

    folder: Path
    log: str

    def __getitem__(self, name: str) -> list[Any]:
        """Results of one scenario by rank."""
        files = [self.folder / f"{name}.{rank}.pt" for rank in range(2)]
        missing = [rank for rank, file in enumerate(files) if not file.exists()]
        assert not missing, f"rank(s) {missing} never finished {name!r}:\n{self.log[-4000:]}"
        results = [torch.load(file, weights_only=True) for file in files]
        for rank, result in enumerate(results):
            assert result is None or "failed" not in result, f"rank {rank} failed in {name!r}: {result['failed']}"
        return results

    def trained(self, name: str) -> list[Any]:
        """Of a training that went well."""
        results = self[name]
        assert [result["error"] for result in results] == [None, None]
        return results

    def printed(self, name: str) -> list[str]:
        """What each rank printed in a scenario."""
        logs = self.log.split("--- log.")[1:]
        return [re.split(rf"^scenario {name}$|^{name}: ", log, flags=re.MULTILINE)[1] for log in logs]


def train(name: str, **arguments: Any) -> dict[str, Any]:
    return {"run": "train", "name": name, "arguments": arguments}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("feed_ranks")
    scenarios: list[dict[str, Any]] = [
        train("plain", slow=(1, SLOW_SECONDS)),
        train(
            "watched",
            slow=(1, SLOW_SECONDS),
            monitor={"report_path": f"{folder}/feed.html", "table": True, "first_seconds": 1e-6},
        ),
        train("first is slow", slow=(0, SLOW_SECONDS), monitor={}),
        *[train(f"busy {rank}", busy=(rank, 0.02), monitor={}, num_steps=8) for rank in range(2)],
    ]
    scenarios[-1]["is_last"] = True
    for rank in range(2):
        for where in ("step", "epoch end"):
            scenarios.append({**train(f"broken {where} {rank}", raises=(rank, where), monitor={}), "is_last": True})
    scenarios.append({"run": "without_proc", "name": "without proc"})
    is_new = True
    for scenario in scenarios:
        if is_new:
            scenario["port"] = free_port()
        is_new = "is_last" in scenario
    plan = {"world_size": 2, "scenarios": scenarios, "out": str(folder), "timeout_seconds": TIMEOUT_SECONDS}
    return Ranks(folder, run_ranks(WORKER, plan, folder, num_processes=2, limit_seconds=LIMIT_SECONDS))


# What is said ------------------------------------------------------------------------------------------------


def test_rank_zero_reports_the_rank_that_waits_most(ranks):
    for name, slow_rank in (("watched", 1), ("first is slow", 0)):
        first, second = ranks.trained(name)
        assert second["records"] == []
        records = [record for record in first["records"] if not record["is_interim"]]
        assert [(record["epoch"], record["rank"], record["num_ranks"]) for record in records] == [
            (0, slow_rank, 2),
            (1, slow_rank, 2),
        ]
        for record in records:
            assert record["num_steps"] == NUM_BATCHES
            assert record["wait_share"] > 0.3
            assert record["cause"] == "disk-bound"  # the samples sleep
            assert f"Rank {slow_rank} of 2 waits most; the others wait " in record["line"]


def test_the_early_verdict_is_of_rank_zero_alone(ranks):
    [early] = [record for record in ranks.trained("watched")[0]["records"] if record["is_interim"]]
    assert (early["rank"], early["num_ranks"], early["num_steps"]) == (0, 2, 1)
    assert "waits most" not in early["line"]


def test_only_rank_zero_prints_logs_and_writes(ranks):
    first, second = ranks.trained("watched")
    lines, other_lines = ranks.printed("watched")
    assert re.findall(r"FeedMonitor, epoch \d.*?: ", lines) == [
        "FeedMonitor, epoch 0, after 1 steps: ",
        "FeedMonitor, epoch 0: ",
        "FeedMonitor, epoch 0, first, cold, rank 1 of 2: ",
        "FeedMonitor, epoch 1: ",
        "FeedMonitor, epoch 1, rank 1 of 2: ",
    ]
    assert "FeedMonitor" not in other_lines
    assert "gpufeed/feed/sync_share" in first["logged"]
    assert not any(name.startswith("gpufeed") for name in second["logged"])
    assert [(ranks.folder / f"feed.html.{rank}").exists() for rank in range(2)] == [True, False]


@pytest.mark.parametrize("busy_rank", [0, 1])
def test_a_rank_that_computes_longer_makes_the_other_wait_which_is_synchronisation(ranks, busy_rank):
    records = ranks.trained(f"busy {busy_rank}")[0]["records"]
    assert [record["cause"] for record in records] == ["synchronisation-bound"] * 2
    assert "ranks wait for each other" in records[-1]["line"]


# What it costs -----------------------------------------------------------------------------------------------


def test_no_step_has_a_collective_more_and_the_training_is_the_same(ranks):
    for plain, watched in zip(ranks.trained("plain"), ranks.trained("watched"), strict=True):
        assert same_bits(watched["weights"], plain["weights"])
        assert [len(epoch) for epoch in plain["epochs"]] == [NUM_BATCHES] * 2
        names = list(plain["epochs"][0][0])
        for epoch in range(2):
            # In the groups of the training each step has as many collectives as without.
            of_training = [{name: step[name] for name in names} for step in watched["epochs"][epoch]]
            assert per_step(of_training) == per_step(plain["epochs"][epoch])
            # In the group of the callback nothing happens between the steps of an epoch.
            others = [{name: step[name] for name in step if name not in names} for step in watched["epochs"][epoch]]
            assert [len(step) for step in others] == [1] * NUM_BATCHES
            assert others == [others[0]] * NUM_BATCHES
        between = [sum(watched["epochs"][epoch][0].values()) for epoch in range(2)]
        assert between[0] < between[1]  # the counting above sees what there is


def per_step(counts: list[dict[str, int]]) -> list[dict[str, int]]:
    """Collectives of each group from step to step."""
    return [{name: after[name] - before[name] for name in before} for before, after in itertools.pairwise(counts)]


def test_no_group_and_no_hook_is_left(ranks):
    for plain, watched in zip(ranks.trained("plain"), ranks.trained("watched"), strict=True):
        assert watched["groups_left"] == plain["groups_left"]
        assert watched["hooks"] == []


def test_lightnings_question_to_all_ranks_is_timed(ranks):
    assert all(record["sync_seconds"] > 0 for record in ranks.trained("watched")[0]["records"])


# A rank that breaks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["step", "epoch end"])
def test_a_rank_that_raises_lets_no_other_wait_for_ever(ranks, where, rank):
    results = ranks[f"broken {where} {rank}"]
    assert results[rank]["error"] == f"RuntimeError: broken on rank {rank}"
    assert results[1 - rank]["error"] is not None
    assert "broken on rank" not in results[1 - rank]["error"]
    assert all(result["seconds"] < PROMPT_SECONDS for result in results)
    assert [record["epoch"] for record in results[0]["records"]] == [0]


# Without the kernel's counters -------------------------------------------------------------------------------


def test_in_a_container_without_proc_there_is_a_verdict_with_a_wide_range(ranks):
    result = ranks["without proc"][0]
    if result is None:
        pytest.skip("this process may not cover /proc")
    assert [(record["epoch"], record["is_interim"]) for record in result["records"]] == [
        (0, True),
        (0, False),
        (1, False),
    ]
    last = result["records"][-1]
    assert last["num_steps"] == 8
    assert not last["has_readers"]
    assert last["cause"] == "loader-bound"
    assert last["cures"]
    assert all(low == pytest.approx(1.0) and high > 1.5 for _, low, high in last["cures"])
    assert result["has_page"]
    assert "gpufeed/feed/wait_share" in result["logged"]
    assert "gpufeed/feed/reader_user_share" not in result["logged"]
