"""Gradients of several ranks reduced by hand, beside those of torch's DDP: real processes (gloo, on the CPU)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpufeed.recover.ranks import num_collectives
from tests.doubles import run_ranks
from tests.recover.rank_worker import CASES, MIB, NUM_RANKS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WORKER = Path(__file__).with_name("rank_worker.py")
LIMIT_SECONDS = 200


@dataclass
class Ranks:
    """What each rank wrote down, by the name of the scenario."""

    folder: Path
    log: str

    def __getitem__(self, name: str) -> list[Any]:
        files = [self.folder / f"{name}.{rank}.pt" for rank in range(NUM_RANKS)]
        assert all(file.exists() for file in files), f"not every rank finished {name!r}:\n{self.log[-4000:]}"
        results = [torch.load(file, weights_only=True) for file in files]
        for rank, result in enumerate(results):
            assert "failed" not in result, f"rank {rank} failed in {name!r}: {result['failed']}"
        return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    plan = {"world_size": NUM_RANKS, "out": str(folder)}
    text = run_ranks(WORKER, plan, folder, num_processes=NUM_RANKS, limit_seconds=LIMIT_SECONDS)
    return Ranks(folder, text)


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_buffers_are_those_of_ddp_to_the_last_bit(ranks, name):
    for result in ranks["cases"]:
        assert result[name]["num_gradients"] > 1  # something was compared
        assert result[name]["guarded"] == []


@pytest.mark.parametrize("name", CASES)
def test_they_are_so_too_when_backward_broke_off_on_one_rank(ranks, name):
    for result in ranks["cases"]:
        assert result[name]["failed"] == []


def test_what_no_rank_uses_stays_without_gradient(ranks):
    for result in ranks["cases"]:
        assert result["branches"]["gaps"] == ["never.weight", "never.bias"]
        assert result["frozen"]["gaps"] == ["layers.0.weight", "layers.0.bias"]


def test_what_ddp_leaves_alone_is_left_alone(ranks):
    first, second = (result["branches"]["weights"] for result in ranks["cases"])
    assert not torch.equal(first["own.weight"], second["own.weight"])
    assert torch.equal(first["first.weight"], second["first.weight"])
    assert torch.equal(first["sometimes.weight"], second["sometimes.weight"])


def test_layers_that_are_trained_from_some_step_on_are_reduced(ranks):
    first, second = ranks["unfrozen"]
    assert first["gradients"]["layers.0.weight"].any()
    for name, gradient in first["gradients"].items():
        assert torch.equal(gradient, second["gradients"][name])
        assert torch.equal(first["weights"][name], second["weights"][name])


def test_a_sparse_gradient_of_some_ranks_only_is_refused_by_all(ranks):
    for result in ranks["sparse_gap"]:
        assert result["error"] == "OOMRecoveryError"
        assert "a sparse gradient exists on some ranks only" in result["text"]


def test_no_more_than_one_bucket_of_each_kind_is_held(ranks):
    for large, mixed in ranks["memory"]:
        assert large == [25 * MIB]
        assert max(mixed) < 1000


def test_collectives_of_a_step_are_counted_and_those_of_the_guard_and_the_vote_are_not(ranks):
    for result in ranks["counted"]:
        quiet = {name: number for name, number in result.items() if name.split()[0] in ("nothing", "vote")}
        assert quiet == {f"{name} {number}": 0 for name in ("nothing", "vote") for number in range(3)}
        others = {name: number for name, number in result.items() if name not in quiet}
        assert len(others) == 18
        assert min(others.values()) >= 1


def test_a_process_alone_has_seen_no_collectives():
    assert num_collectives() == 0


def test_what_talks_to_other_ranks_inside_a_step_cannot_be_guarded(ranks):
    for plain, static, norms in ranks["obstacles"]:
        assert plain is None
        assert "use static_graph=False" in static
        assert "SyncBatchNorm talks to the other ranks inside forward" in norms
