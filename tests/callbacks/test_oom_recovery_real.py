"""`OOMRecovery` where memory really runs out: the address space of a process may not grow, in the middle of a step.

Injected errors leave memory as it is; here the next attempt fails again if anything of the last one is still alive.
One process (`oom_worker.py`) runs everything; what it has seen is looked at here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.hungry_models import MIB
from tests.callbacks.oom_models import differences
from tests.callbacks.oom_worker import BACKWARD_STEP, FORWARD_STEP, UPDATE_CASES
from tests.datamodules.models import same_bits
from tests.doubles import PACKAGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux only")

ROUNDING = 1e-6
"""Relative. Weights and losses are float64 and agree to about 1e-14; torchmetrics and counts are kept in float32."""

WORKER = Path(__file__).with_name("oom_worker.py")
INJURED = ("forward_runs_out", "backward_runs_out", "first_step_runs_out", "every_step_runs_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the worker has written what it saw."""
    folder = tmp_path_factory.mktemp("oom")
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # a thread maps 64 MiB for its own heap
        "TMPDIR": str(folder),
    }
    command = [sys.executable, str(WORKER), str(folder)]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    """Scenario -> what was seen."""
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


def of(seen: dict[str, Any], name: str) -> dict[str, Any]:
    """What one scenario saw."""
    assert "failed" not in seen[name], seen[name]["failed"]
    return seen[name]  # type: ignore[no-any-return]


def sizes_of_step(run: dict[str, Any], step: int, stage: str = "fit") -> list[int]:
    """Samples of each attempt of a step."""
    return [samples for at_stage, at_step, samples in run["attempts"] if (at_stage, at_step) == (stage, step)]


def checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds."""
    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    return loaded


def without_callbacks(path: Path) -> dict[str, Any]:
    """A checkpoint but for the callbacks, which name their folders and the sizes they found."""
    return {key: value for key, value in checkpoint(path).items() if key != "callbacks"}


# 1. The same batch, the same result -----------------------------------------------------------------------------


def test_memory_ran_out_where_it_was_to(seen: dict[str, Any]) -> None:
    phases = {name: [event.split(" (asked for")[0] for event in of(seen, name)["events"]] for name in INJURED}
    begin = "OOMRecovery: step {} ran out of memory in {}"
    assert phases["forward_runs_out"] == [begin.format(FORWARD_STEP, "forward")]
    assert phases["backward_runs_out"] == [begin.format(BACKWARD_STEP, "backward")]
    assert phases["first_step_runs_out"] == [begin.format(0, "backward")]
    assert len(phases["every_step_runs_out"]) > 1
    assert of(seen, "plain")["attempts"] == [["fit", step, 32] for step in range(8)]


@pytest.mark.parametrize(("name", "step"), [("forward_runs_out", FORWARD_STEP), ("backward_runs_out", BACKWARD_STEP)])
def test_it_is_tried_whole_once_more_and_then_in_halves(seen: dict[str, Any], name: str, step: int) -> None:
    run = of(seen, name)
    sizes = sizes_of_step(run, step)
    assert sizes[:3] == [32, 32, 16]
    assert sizes[-run["found"] :] == [32 // run["found"]] * run["found"]
    later = [sizes_of_step(run, later) for later in range(step + 1, 8)]
    assert later == [[32 // run["found"]] * run["found"]] * len(later)


@pytest.mark.parametrize("name", INJURED)
def test_steps_epochs_and_counters_are_those_of_the_run_that_never_failed(seen: dict[str, Any], name: str) -> None:
    ours, plain = of(seen, name), of(seen, "plain")
    assert [row[0] for row in plain["rows"]] == ["step", "step", "step", "step", "epoch"] * 2
    for mine, theirs in zip(ours["rows"], plain["rows"], strict=True):
        # What kind of row, epoch, global step, learning rate, number of the batch and its samples: exactly.
        exact = 6 if mine[0] == "step" else 4
        assert mine[:exact] == theirs[:exact]
        assert differences(mine[exact:], theirs[exact:], rtol=ROUNDING) == []
    assert ours["progress"] == plain["progress"]


@pytest.mark.parametrize("name", INJURED)
def test_weights_and_optimizer_are_those_of_the_run_that_never_failed(folder: Path, name: str) -> None:
    ours, plain = without_callbacks(folder / name / "final.ckpt"), without_callbacks(folder / "plain" / "final.ckpt")
    assert differences(ours, plain, rtol=ROUNDING) == []


@pytest.mark.parametrize("name", ["forward_runs_out", "backward_runs_out"])
def test_weights_are_those_of_a_run_in_that_many_microbatches_from_the_start(
    folder: Path, seen: dict[str, Any], name: str
) -> None:
    other = {2: "two_from_the_start", 4: "four_from_the_start"}[of(seen, name)["found"]]
    assert of(seen, other)["events"] == []
    ours, theirs = without_callbacks(folder / name / "final.ckpt"), without_callbacks(folder / other / "final.ckpt")
    assert differences(ours, theirs, rtol=ROUNDING) == []


def test_a_run_that_failed_in_its_first_step_is_bitwise_the_run_in_microbatches(
    folder: Path, seen: dict[str, Any]
) -> None:
    assert of(seen, "first_step_runs_out")["found"] == of(seen, "two_from_the_start")["found"] == 2
    ours, theirs = (
        without_callbacks(folder / name / "final.ckpt") for name in ("first_step_runs_out", "two_from_the_start")
    )
    assert same_bits(ours, theirs)
    assert of(seen, "first_step_runs_out")["rows"] == of(seen, "two_from_the_start")["rows"]


@pytest.mark.parametrize("name", INJURED)
def test_the_same_checkpoints_are_written(folder: Path, name: str) -> None:
    names = sorted(path.name for path in (folder / "plain").glob("*.ckpt"))
    assert sorted(path.name for path in (folder / name).glob("*.ckpt")) == names
    assert len(names) == 11  # after each of 8 steps, each of 2 epochs, and the end
    for one in names:
        ours, plain = without_callbacks(folder / name / one), without_callbacks(folder / "plain" / one)
        assert differences(ours, plain, rtol=ROUNDING) == [], one


def test_in_a_window_of_two_batches_the_first_ones_gradients_stay(folder: Path, seen: dict[str, Any]) -> None:
    ours, plain = of(seen, "window_backward_runs_out"), of(seen, "window_plain")
    assert len(ours["events"]) == 1
    assert sizes_of_step(ours, BACKWARD_STEP)[:3] == [32, 32, 16]
    assert differences(ours["rows"], plain["rows"], rtol=ROUNDING) == []
    assert ours["progress"] == plain["progress"]
    paths = [folder / name / "final.ckpt" for name in ("window_backward_runs_out", "window_plain")]
    assert differences(*map(without_callbacks, paths), rtol=ROUNDING) == []


def test_growing_back_is_tried_and_undone_under_a_limit_that_stays(seen: dict[str, Any]) -> None:
    run = of(seen, "every_step_runs_out")
    sizes = [sizes_of_step(run, step) for step in range(8)]
    assert sizes[1] == sizes[2] == [8] * 4
    assert sizes[3] == [16] + [8] * 4  # two clean steps later half of them is tried, once
    assert sizes[4] == sizes[5] == sizes[6] == [8] * 4  # and now not before four


def test_what_happened_is_given_to_the_logger(seen: dict[str, Any]) -> None:
    names = ("free_bytes", "num_microbatches", "num_retries", "requested_bytes")
    assert of(seen, "forward_runs_out")["logged"] == [f"gpufeed/oom/fit_{name}" for name in names]
    assert of(seen, "two_from_the_start")["logged"] == []


# 3. Memory is let go of -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*INJURED, "window_backward_runs_out", "released"])
def test_no_activation_of_a_failed_attempt_is_alive_in_the_next(seen: dict[str, Any], name: str) -> None:
    run = of(seen, name)
    assert len(run["alive"]) > 10
    assert set(run["alive"]) == {0}


def test_held_errors_would_have_been_seen(seen: dict[str, Any]) -> None:
    held = of(seen, "errors_that_are_held")
    assert len(held["texts"]) == 2
    assert held["alive"][0] == 0 < held["alive"][1]
    assert held["sizes"][1][0] > held["sizes"][0][0] + MIB


@pytest.mark.parametrize(
    ("name", "step", "which"),
    [
        ("forward_runs_out", FORWARD_STEP, 0),  # mapped: each block in a mapping of its own
        ("released", 0, 1),  # resident: a heap keeps what was mapped and gives back the pages
    ],
)
def test_memory_is_back_before_the_next_attempt(seen: dict[str, Any], name: str, step: int, which: int) -> None:
    run = of(seen, name)
    at = [number for number, (_, of_step, _) in enumerate(run["attempts"]) if of_step == step][:4]
    assert [run["attempts"][number][2] for number in at] == [32, 32, 16, 8]
    sizes = [run["sizes"][number][which] for number in at]
    # An attempt takes 6 MiB and more before it fails; the interpreter maps one more at a time now and then.
    assert max(sizes[1:]) <= sizes[0] + 2 * MIB


# 4. The optimizer step ------------------------------------------------------------------------------------------

CASES = [f"{name}-{step}-{headroom}" for name, step, headroom in UPDATE_CASES]


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_whole_or_the_state_before_it_is_saved(seen: dict[str, Any], case: str) -> None:
    run = of(of(seen, "updates"), case)
    step = case.split("-")[1]
    if "error" in run:
        assert run["error"].startswith(f"out of memory in the optimizer step {step} (")
        assert "can't allocate memory" in run["cause"]
        assert len(run["paths"]) == 1
        assert f"is saved in {run['paths'][0]}" in run["error"]
        keys = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
        assert {key: run[f"is_same_{key}"] for key in keys} == dict.fromkeys(keys, True)
    # At the end, or after going on from what was saved.
    keys = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
    assert {key: run[f"is_same_final_{key}"] for key in keys} == dict.fromkeys(keys, True)


def test_updates_ended_in_both_ways_in_first_and_later_steps(seen: dict[str, Any]) -> None:
    runs = of(seen, "updates")
    for name in ("loop", "foreach"):
        for step in (0, 2):
            ended = {"error" in runs[case] for case in CASES if case.startswith(f"{name}-{step}-")}
            assert ended == {True, False}, (name, step)
    # Three weights of 1 MiB with `foreach` want more than the 4 MiB that sufficed.
    assert "error" not in runs["foreach-2-4"]


# 9. One sample that does not fit --------------------------------------------------------------------------------


def test_one_sample_that_does_not_fit_gives_the_original_error(seen: dict[str, Any]) -> None:
    run = of(seen, "one_sample_too_many")
    assert run["chain"] == ["RuntimeError", "NoneType", "NoneType"]
    assert "DefaultCPUAllocator: can't allocate memory" in run["text"]
    assert sizes_of_step(run, 1) == [4, 4, 2, 1]


def test_the_error_says_what_was_tried_with_which_shapes_and_memory(seen: dict[str, Any]) -> None:
    (note,) = of(seen, "one_sample_too_many")["notes"]
    lines = note.splitlines()
    tried = [line.split(":")[0].strip() for line in lines if "out of memory in forward, asked for" in line]
    assert tried == [
        "whole",
        "whole",
        "in 2 microbatches of at most 2 samples",
        "in 4 microbatches of at most 1 samples",
    ]
    assert "Batch: batch[0] (4, 8), batch[1] (4,)" in lines
    assert any(line.startswith("Memory: cpu: ") and "GiB resident" in line and "free of" in line for line in lines)
    assert "hungry_models.py" in note
    assert "torch.tanh(hidden)" in note


def test_the_emergency_checkpoint_is_the_state_before_that_batch(seen: dict[str, Any], folder: Path) -> None:
    own = folder / "one_sample_too_many"
    (path,) = own.glob("out-of-memory-*.ckpt")
    assert f"is saved in {path}" in of(seen, "one_sample_too_many")["notes"][0]
    saved, before = checkpoint(path), checkpoint(own / "before-1.ckpt")
    assert saved["optimizer_states"][0]["state"] != {}
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert same_bits(saved[key], before[key]), key


# 10. Evaluation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_goes_on_in_microbatches(seen: dict[str, Any], stage: str) -> None:
    run = of(seen, "evaluation_runs_out")
    sizes = sizes_of_step(run, 1, stage)
    assert sizes[:2] == [32, 32]
    assert sum(sizes[2:]) >= 32
    assert set(sizes_of_step(of(seen, "evaluation_plain"), 1, stage)) == {32}
    assert run["sizes"][stage] > 1


def test_evaluation_does_not_change_the_size_of_training(folder: Path, seen: dict[str, Any]) -> None:
    run = of(seen, "evaluation_runs_out")
    assert run["sizes"]["fit"] == 1
    assert [samples for stage, _, samples in run["attempts"] if stage == "fit"] == [32] * 4
    states = [torch.load(folder / name / "seen.pt", weights_only=False)["state"] for name in EVALUATIONS]
    assert same_bits(*states)


EVALUATIONS = ("evaluation_runs_out", "evaluation_plain")


def test_metrics_of_evaluation_are_those_of_the_run_that_never_failed(seen: dict[str, Any]) -> None:
    ours, plain = (of(seen, name) for name in EVALUATIONS)
    assert len(plain["fit"]) > 10
    assert len(plain["test"][0]) == 8
    assert differences(ours["fit"], plain["fit"], rtol=ROUNDING) == []
    assert differences(ours["test"], plain["test"], rtol=ROUNDING) == []


def test_predictions_are_put_together_as_of_whole_batches(folder: Path) -> None:
    ours, plain = (torch.load(folder / name / "seen.pt", weights_only=False)["predictions"] for name in EVALUATIONS)
    assert [prediction["outputs"].shape for prediction in plain] == [(32, 3)] * 2
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine["numbers"], theirs["numbers"])
        torch.testing.assert_close(mine["outputs"], theirs["outputs"], rtol=1e-12, atol=1e-14)  # float64
