"""SIGTERM: all ranks end together, between two steps, whoever was told and whatever it waited for."""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import distributed

from lightning_gpufeed.strategies import signals as signals_module
from lightning_gpufeed.strategies.signals import _LOOK_SECONDS, HeldSignals, SignalsOfReplicas
from lightning_gpufeed.strategies.trainer_parts import TrainerParts
from tests.datamodules.models import make_trainer
from tests.doubles import run_ranks

WORKER = Path(__file__).with_name("failing_worker.py")
LIMIT_SECONDS = 60
BOTH = [0, 1]
IN_A_STEP = {"point": "layer 3", "is_signal": True, "saves": "exception"}
IN_VALIDATION = {"point": "validation 1", "is_signal": True}
SENT: dict[str, dict[str, Any]] = {
    "to both, in a step": {**IN_A_STEP, "ranks": BOTH},
    "to one that computes": {**IN_A_STEP, "ranks": [1]},
    "to one that waits": {**IN_A_STEP, "ranks": [0]},
    "in validation": {**IN_VALIDATION, "ranks": [0]},
    "in validation alone": {**IN_VALIDATION, "ranks": [1], "call": "validate"},
}
REPLICAS: dict[str, dict[str, Any]] = {
    "replicas, to both": {**IN_A_STEP, "ranks": BOTH, "pipeline_size": 1},
    "replicas, to the second": {**IN_A_STEP, "ranks": [1], "pipeline_size": 1, "pause": 1.2 * _LOOK_SECONDS},
    "replicas, to the first": {**IN_A_STEP, "point": "after forward", "ranks": [0], "pipeline_size": 1},
    "replicas, in validation": {**IN_VALIDATION, "ranks": BOTH, "pipeline_size": 1},
    "replicas, in validation alone": {**IN_VALIDATION, "ranks": BOTH, "call": "validate", "pipeline_size": 1},
}
"""Ranks that each have the whole model; an evaluation ends on those that were told."""

# Real ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("signals")
    every = {
        "whole": {"saves": "steps"},
        **SENT,
        "resumed": {"resume": str(folder / "to one that computes" / "on_exception.ckpt")},
        "expected": {"resume": str(folder / "whole" / "step=3.ckpt")},
        "replicas, whole": {"saves": "steps", "pipeline_size": 1},
        **REPLICAS,
    }
    for name in ("replicas, to both", "replicas, to the second"):
        every[f"{name}, resumed"] = {"resume": str(folder / name / "on_exception.ckpt"), "pipeline_size": 1}
    for step in (3, 4):
        saved = folder / "replicas, whole" / f"step={step}.ckpt"
        every[f"replicas, expected from {step}"] = {"resume": str(saved), "pipeline_size": 1}
    cells = [{"name": name, "arguments": arguments} for name, arguments in every.items()]
    plan = {"world_size": 2, "out": str(folder), "cells": cells}
    log = run_ranks(WORKER, plan, folder, num_processes=2, limit_seconds=LIMIT_SECONDS)
    missing = [name for name in every for rank in BOTH if not (folder / f"{name}.{rank}.pt").exists()]
    assert not missing, f"{missing} were never written:\n{log[-4000:]}"
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in BOTH] for name in every}


@pytest.mark.parametrize("name", [*SENT, *REPLICAS])
def test_both_ranks_end_in_the_same_place(results, name):
    assert [result["error"]["type"] for result in results[name]] == ["SIGTERMException"] * 2
    first, second = ({key: result[key] for key in ("num_steps", "num_evaluated")} for result in results[name])
    if "replicas, in validation" in name:  # where nobody waits for anybody
        first, second = first["num_steps"], second["num_steps"]
    assert first == second


def test_a_step_is_ended_before_the_next_one_and_a_validation_after_the_next_batch(results):
    ended = {name: (results[name][0]["num_steps"], results[name][0]["num_evaluated"]) for name in SENT}
    assert ended["to one that computes"] == (3, 5)
    assert ended["in validation"] == (2, 3)
    assert ended["in validation alone"] == (0, 3)


def test_nothing_is_left_in_any_trainer(results):
    assert {tuple(result["left"]) for name in results for result in results[name]} == {()}


def test_replicas_end_before_the_next_step_or_as_soon_as_the_first_rank_has_looked(results):
    ended = {name: (results[name][0]["num_steps"], results[name][0]["num_evaluated"]) for name in REPLICAS}
    assert ended["replicas, to both"] == (3, 5)
    assert ended["replicas, to the first"] == (3, 5)
    assert ended["replicas, to the second"][0] in (3, 4)
    for rank in BOTH:
        assert results["replicas, in validation"][rank]["num_evaluated"] < 5
        assert results["replicas, in validation alone"][rank]["num_evaluated"] < 5


def test_what_is_saved_then_is_the_checkpoint_of_that_step(results):
    for rank in BOTH:
        assert results["resumed"][rank]["error"] is None
        assert torch.equal(results["resumed"][rank]["weights"], results["expected"][rank]["weights"])


@pytest.mark.parametrize("name", ["replicas, to both", "replicas, to the second"])
def test_what_replicas_save_then_is_the_checkpoint_of_that_step(results, name):
    expected = results[f"replicas, expected from {results[name][0]['num_steps']}"]
    for rank in BOTH:
        assert results[f"{name}, resumed"][rank]["error"] is expected[rank]["error"] is None
        assert torch.equal(results[f"{name}, resumed"][rank]["weights"], expected[rank]["weights"])


# One rank, without signals -------------------------------------------------------------------------------------------


@pytest.fixture(params=[HeldSignals, SignalsOfReplicas])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Trainer, HeldSignals, list[str]]]:
    """A Trainer whose own handlers only say that they were called."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    trainer, called = make_trainer(), []
    trainer._signal_connector.__dict__["_slurm_sigusr_handler_fn"] = lambda *arguments: called.append("saved")
    yield trainer, request.param(trainer, torch.device("cpu")), called
    distributed.destroy_process_group()


def test_a_signal_to_save_and_queue_again_waits_for_the_next_step_and_is_acted_on_once(held):
    trainer, _, called = held
    trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
    assert called == []
    ask = trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
    ask()
    assert called == ["saved"]
    ask()
    assert called == ["saved"]
    assert not trainer.received_sigterm


def test_the_question_before_a_step_raises_for_one_that_was_told(held):
    trainer, _, _ = held
    ask = trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
    ask()
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    assert not trainer.received_sigterm
    with pytest.raises(SIGTERMException):
        ask()
    assert trainer.received_sigterm


def test_a_signal_is_passed_on_to_ranks_that_this_one_has_started(held):
    trainer, _, _ = held
    passed: list[int] = []
    trainer.strategy._launcher = SimpleNamespace(kill=passed.append)
    for _ in range(2):
        trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    assert passed == [signal.SIGTERM]


def test_what_comes_too_late_for_a_step_is_known_to_the_trainer(held):
    trainer, signals, _ = held
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    signals.release()
    assert trainer.received_sigterm


def test_afterwards_lightnings_own_methods_are_back(held):
    trainer, signals, _ = held
    signals.release()
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)


def test_who_steps_in_later_and_out_later_leaves_nothing_of_ours_at_work(held):
    trainer, signals, _ = held
    loop = trainer.fit_loop.epoch_loop
    ours = vars(loop)["_broadcast_sigterm_tensor"]
    vars(loop)["_broadcast_sigterm_tensor"] = lambda: ours()
    signals.release()
    vars(loop)["_broadcast_sigterm_tensor"] = ours
    trainer._signal_connector.received_sigterm = True
    with pytest.raises(SIGTERMException):  # Lightning's own question
        loop._broadcast_sigterm_tensor()
    HeldSignals(trainer, torch.device("cpu")).release()
    assert "_broadcast_sigterm_tensor" not in vars(loop)


@pytest.mark.parametrize("held", [HeldSignals], indirect=True)
@pytest.mark.parametrize(
    ("num_replicas", "function", "asks"),
    [(1, TrainerFn.FITTING, True), (2, TrainerFn.FITTING, False), (2, TrainerFn.VALIDATING, True)],
    ids=["one pipeline", "replicas in a training", "replicas alone"],
)
def test_replicas_do_not_leave_the_validation_of_a_training_each_for_itself(held, num_replicas, function, asks):
    trainer, signals, _ = held
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    parts = TrainerParts(trainer, LightningModule(), trainer.precision_plugin, torch.device("cpu"))
    parts._signals, trainer.state.fn = signals, function
    parts.begin_evaluation(SimpleNamespace(num_replicas=num_replicas, groups=SimpleNamespace(control=None)))
    assert trainer.received_sigterm is asks


@pytest.mark.parametrize("stage", [*RunningStage, None])
@pytest.mark.parametrize("held", [SignalsOfReplicas], indirect=True)
def test_in_an_evaluation_a_replica_that_is_told_is_told_at_once(held, stage):
    trainer, _, _ = held
    trainer.state.stage = stage
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    assert trainer.received_sigterm is (stage not in (RunningStage.TRAINING, None))


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """One process in the place of two, in turns."""
    state = {"rank": 0}
    monkeypatch.setattr(distributed, "get_rank", lambda: state["rank"])
    return state


@pytest.mark.parametrize("held", [SignalsOfReplicas], indirect=True)
def test_a_note_of_another_rank_is_found_once_and_only_after_a_while(held, two_ranks, monkeypatch):
    trainer, signals, called = held
    ask = trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
    now = [100.0]
    monkeypatch.setattr(signals_module.time, "monotonic", lambda: now[0])
    ask()
    two_ranks["rank"] = 1
    trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
    signals._noted_by(None)  # leaves it in the store
    signals._is_requeued, signals._num_requeues = False, 0  # that was the other rank's
    two_ranks["rank"] = 0
    ask()
    assert called == []
    now[0] += 2 * _LOOK_SECONDS
    ask()
    assert called == ["saved"]
    now[0] += 2 * _LOOK_SECONDS
    ask()
    assert called == ["saved"]


@pytest.mark.parametrize("held", [SignalsOfReplicas], indirect=True)
def test_notes_of_an_earlier_training_are_none_of_the_next(held, two_ranks):
    trainer, signals, _ = held
    two_ranks["rank"] = 1
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    signals._noted_by(None)
    signals._is_ending = False
    signals.release()
    two_ranks["rank"] = 0
    SignalsOfReplicas(trainer, torch.device("cpu"))
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert not trainer.received_sigterm


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copied", "pickled"]
)
def test_a_copy_has_the_method_of_its_owner(held, again):
    trainer, _, _ = held
    owner, place = Owner(), type(vars(trainer._signal_connector)["_sigterm_notifier_fn"])
    place(owner, "speak", lambda: None)
    assert owner.speak() is None
    assert again(owner).speak() == "hello"


class Owner:
    """Has a method."""

    def speak(self) -> str | None:
        return "hello"
