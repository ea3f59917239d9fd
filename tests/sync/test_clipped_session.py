from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from lightning_gpufeed.sync.candidates import PlanOptions
from lightning_gpufeed.sync.clipped_session import ClippedGradientSync
from tests.doubles import run_ranks
from tests.sync import clipped_worker
from tests.sync.clipped_worker import MEDDLERS, MODELS, PLANS
from tests.sync.sync_worker import batch, dense

TOLERANCE = 1e-6
"""Of a number of the largest size of its kind: the norm is summed in another order."""
PLAIN = (
    *("one is changed", "one is changed behind its back", "data are replaced", "one is replaced", "one is taken away"),
    *("clipped twice", "some are not updated"),
)
"""Gradients are clipped the usual way."""
LOOKS = ("one rank looks", "one rank measures", "one rank copies", "all look at one")


def found_by(num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each of several real ranks has found."""
    plan = {"world_size": num_ranks, "folder": str(folder)}
    log = run_ranks(Path(clipped_worker.__file__), plan, folder, num_processes=num_ranks, limit_seconds=100)
    found = [folder / f"said.{rank}.json" for rank in range(num_ranks)]
    assert all(path.exists() for path in found), log
    results = [json.loads(path.read_text()) for path in found]
    assert not any("error" in result for result in results), results
    return results


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict[str, Any]]:
    return found_by(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> list[dict[str, Any]]:
    return found_by(3, tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_have_the_bits_of_distributed_data_parallel_where_the_norm_is_below_the_limit(two, model, how):
    for result in two:
        one = result[f"{model}, {how}, not clipped"]
        assert one["others"] == []
        assert one["said"][-1].startswith("scatter; ")


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_clipped_gradients_are_those_of_a_norm_that_is_summed_in_another_order(two, three, model, how):
    for result in (*two, *three):
        one = result[f"{model}, {how}, clipped"]
        assert one["worst"] <= TOLERANCE
        assert one["same on all ranks"]


@pytest.mark.parametrize("name", ["accumulated", "unused", "found by itself", "class of its own", *LOOKS])
def test_whatever_is_special_stays_within_the_rounding_of_the_norm(two, three, name):
    assert all(name in result for result in two)
    for result in (*two, *three):
        if name in result:
            assert result[name]["worst"] <= TOLERANCE
            assert result[name]["same on all ranks"]


@pytest.mark.parametrize("name", PLAIN)
def test_what_does_not_have_the_norm_that_was_summed_is_clipped_the_usual_way(two, three, name):
    for result in two:
        assert result[name]["others"] == []
    for result in three:
        assert result[name]["worst"] <= TOLERANCE
        assert result[name]["same on all ranks"]


def test_every_meddler_is_looked_at():
    assert set(MEDDLERS) - set(PLAIN) == set(LOOKS)


def test_a_branch_that_nobody_uses_keeps_its_bits(two):
    assert [result["unused, not clipped"]["others"] for result in two] == [[], []]


def test_a_norm_of_half_precision_is_summed_the_usual_way(two):
    for result in two:
        assert result["half precision"]["others"] == []
        assert result["half precision"]["said"][-1].startswith("cross; ")


def test_a_plan_that_is_found_says_that_it_waits_for_the_norm_or_that_nothing_is_gained(two):
    said = two[0]["found by itself"]["said"]
    assert len(said) == 2
    assert "no gain above noise" in said[0] or "once the norm of all gradients is known" in said[0]


# One rank, in this process.


class Training:
    """A model whose gradients are clipped."""

    def __init__(self, ranks, options: PlanOptions = PLANS["small messages"]) -> None:
        self.model = dense()
        self.sync = ClippedGradientSync(self.model, ranks, options)
        self.sync.needs_norm = True
        self.optimizer = optim.SGD(self.model.parameters(), 0.1)
        self.number = 0

    def backward(self) -> None:
        x, y = batch(0, self.number)
        self.number += 1
        self.sync.forward_begins()
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        self.sync.backward_begins(loss)
        loss.backward()
        self.sync.backward_ends()


def test_gradients_are_on_their_way_when_they_are_clipped(ranks):
    training = Training(ranks)
    training.backward()  # the order is learned
    assert not training.sync.clip(training.optimizer, 0.1)
    training.sync.step(training.optimizer)
    training.backward()
    assert training.sync.num_pending == 6
    assert training.sync.clip(training.optimizer, 0.1)
    training.sync.step(training.optimizer)
    assert training.sync.num_pending == 6
    gradients = [one.grad for one in training.model.parameters()]
    assert training.sync.num_pending == 0
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(norm, torch.tensor(0.1), rtol=1e-5, atol=0)  # a sum of 100 squares, and 1e-6 beside it
    training.sync.close()


def test_a_step_that_does_not_clip_crosses_under_any_plan(ranks):
    training = Training(ranks)
    for _ in range(2):
        training.backward()
        training.sync.step(training.optimizer)
    training.sync.needs_norm = False
    training.backward()
    before = [one.grad.clone() for one in training.model.parameters()]
    training.sync.step(training.optimizer)
    assert all(torch.equal(one.grad, grad) for one, grad in zip(training.model.parameters(), before, strict=True))
    training.sync.close()


def test_a_step_that_clips_does_not_cross_under_a_plan_without_the_norm(ranks):
    training = Training(ranks)
    training.sync.needs_norm = False
    for _ in range(2):
        training.backward()
        training.sync.step(training.optimizer)
    assert str(training.sync.plan).startswith("cross; ")
    training.sync.synchronize()
    training.sync.needs_norm = True
    training.backward()
    assert training.sync.num_pending == 0
    assert not training.sync.clip(training.optimizer, 0.1)
    training.sync.close()


def test_nothing_is_scattered_that_was_not_asked_for(ranks):
    training = Training(ranks, PlanOptions(0, True, 100))
    for _ in range(2):
        training.backward()
        assert training.sync.num_pending == 0
        assert not training.sync.clip(training.optimizer, 0.1)
        training.sync.step(training.optimizer)
    assert not training.sync.can_know_norm
    assert str(training.sync.plan).startswith("cross; ")
    training.sync.close()


def test_infinite_gradients_become_what_torch_makes_of_them(ranks):
    training = Training(ranks)
    training.backward()
    training.sync.step(training.optimizer)
    training.backward()
    training.sync.synchronize()
    with torch.no_grad():
        training.model[0].weight.fill_(float("inf"))
    training.backward()
    assert training.sync.clip(training.optimizer, 0.1)
    assert all(one.grad.isnan().all() for one in training.model.parameters())
    training.sync.close()
