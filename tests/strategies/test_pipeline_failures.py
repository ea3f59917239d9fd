"""Trainings after one that has failed, in the same processes and the same process group: they begin with nothing of it.

Two real ranks, started once for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles import run_ranks

WORKER = Path(__file__).with_name("failing_worker.py")
LIMIT_SECONDS = 60
SHORT_SECONDS = 2.0
"""How long a rank waits for the other one, where that is going to be missing."""
BOTH = [0, 1]

ON_ONE_RANK: dict[str, dict[str, Any]] = {
    "before the groups": {"point": "configure", "ranks": [0]},
    "in a layer": {"point": "layer 3", "ranks": [1]},
}
ON_BOTH: dict[str, dict[str, Any]] = {
    "before the forward": {"point": "before", "ranks": BOTH},
    "in the loss": {"point": "after forward", "ranks": BOTH},
    "in the loss, fused": {"point": "after forward", "ranks": BOTH, "schedule": "zero_bubble"},
    "before the update": {"point": "optimizer", "ranks": BOTH},
    "in validation": {"point": "validation 1", "ranks": BOTH},
}


def cells(folder: Path) -> dict[str, dict[str, Any]]:
    resumed = {"resume": str(folder / "whole" / "step=3.ckpt")}
    found: dict[str, dict[str, Any]] = {"whole": {"saves": "steps"}, "resumed": resumed}
    for name, failing in {**ON_ONE_RANK, **ON_BOTH}.items():
        found[name] = {"timeout_seconds": SHORT_SECONDS if name in ON_ONE_RANK else 60, **failing}
        found[f"{name}, resumed"] = resumed
    return {**found, "whole again": {}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("failures")
    every = cells(folder)
    plan = {
        "world_size": 2,
        "out": str(folder),
        "cells": [{"name": name, "arguments": arguments} for name, arguments in every.items()],
    }
    log = run_ranks(WORKER, plan, folder, num_processes=2, limit_seconds=LIMIT_SECONDS)
    missing = [name for name in every for rank in BOTH if not (folder / f"{name}.{rank}.pt").exists()]
    assert not missing, f"{missing} were never written:\n{log[-4000:]}"
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in BOTH] for name in every}


@pytest.mark.parametrize("name", [*ON_ONE_RANK, *ON_BOTH])
def test_a_failed_training_ends_on_both_ranks(results, name):
    failing = {**ON_ONE_RANK, **ON_BOTH}[name]["ranks"]
    for rank, result in enumerate(results[name]):
        assert result["error"]["type"] == "PlannedError" if rank in failing else "Error" in result["error"]["type"]


@pytest.mark.parametrize("name", [*ON_ONE_RANK, *ON_BOTH])
def test_a_training_that_is_resumed_after_a_failed_one_gives_what_it_always_gives(results, name):
    for result in results[f"{name}, resumed"]:
        assert result["error"] is None
        assert torch.equal(result["weights"], results["resumed"][0]["weights"])


def test_a_whole_training_is_the_same_before_and_after_all_that_failed(results):
    for rank in BOTH:
        assert results["whole again"][rank]["error"] is None
        assert torch.equal(results["whole again"][rank]["weights"], results["whole"][0]["weights"])
    assert not torch.equal(results["whole"][0]["weights"], results["resumed"][0]["weights"])  # which begins again


def test_failed_trainings_leave_no_threads_of_their_groups(results):
    for rank in BOTH:  # but of one group, at the most, that torch did not finish to make
        before = results["before the groups, resumed"][rank]["num_threads"]
        assert results["in a layer"][rank]["num_threads"] > before
        assert results["whole again"][rank]["num_threads"] <= before
