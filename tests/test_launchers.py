"""Two ranks, whoever starts them: torchrun, Lightning, its `ddp_spawn` and `ddp_fork` ways, SLURM's `srun`.

One script is started in each way, as a user would; all at the same time, since most of it is waiting for interpreters.
Where Lightning starts the other processes, the first one is a fork of one that has imported everything.
All have to end with the same weights to the last bit, and with the same files.
"""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.datamodules.models import same_bits, write_images
from tests.scripts import ROOT, RunningScript, start_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

WORKER = Path(__file__).with_name("launch_worker.py")
LIMIT_SECONDS = 240
STARTS: dict[str, tuple[str, ...]] = {
    "torchrun": ("out of order", "pipeline"),
    "Lightning": ("ddp", "out of order", "pipeline"),
    "SLURM": ("out of order", "pipeline"),
    # Here the ranks are children of the script, which gets the weights back.
    "spawned": ("out of order, forked", "by name, forked", "pipeline, forked", "out of order, spawned"),
}
CELLS = [(start, training) for start, trainings in STARTS.items() for training in trainings]
IDS = [f"{start}: {training}" for start, training in CELLS]


def environment() -> dict[str, str]:
    """Of a user's shell, on one machine, without what other tests or Lightning have set."""
    of_ranks = re.compile("SLURM_|MASTER_|(LOCAL_|NODE_|GROUP_)?RANK$|(LOCAL_)?WORLD_SIZE$|PL_|TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not of_ranks.match(name)}
    return {**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def slurm_variables(rank: int, port: int) -> dict[str, str]:
    """What `srun --ntasks 2` sets for a task on one node."""
    return {
        "SLURM_JOB_ID": f"77{port - 15000:04}",  # from which Lightning takes the port
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def free_slurm_port() -> int:
    """One of those that a number of a job can stand for."""
    for port in range(15000 + os.getpid() % 5000, 25000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@dataclass
class Started:
    """A start that has come to its end."""

    folder: Path
    codes: list[int | None]

    @property
    def log(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-5000:]}" for path in self.folder.glob("log.*"))

    def results(self, training: str) -> list[dict[str, Any]]:
        """By rank."""
        files = sorted(self.folder.glob(f"{training}.[01].pt"))
        assert files, f"{training} has not ended:\n{self.log}"
        return [torch.load(file, weights_only=True) for file in files]

    def files(self, training: str) -> dict[str, Path]:
        """What Lightning has written."""
        folder = self.folder / training
        return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Started]:
    folder = tmp_path_factory.mktemp("launchers")
    files = {
        name: str(write_images(folder / f"{name}.h5", length, seed=length))
        for name, length in (("train", 27), ("val", 9))
    }
    deadline = time.monotonic() + LIMIT_SECONDS
    processes: dict[str, list[Process | RunningScript]] = {}
    try:
        for start, trainings in STARTS.items():
            out = folder / start
            out.mkdir()
            plan = {"out": str(out), "trainings": trainings, "files": files}
            (out / "plan.json").write_text(json.dumps(plan))
            processes[start] = list(running(start, out))
        return {
            start: Started(folder / start, [code_of(one, deadline) for one in each])
            for start, each in processes.items()
        }
    finally:
        for each in processes.values():
            for one in each:
                one.kill()


class Process(subprocess.Popen[bytes]):
    """A process that is killed with all that it has started."""

    def kill(self) -> None:
        if self.poll() is None:
            for child in psutil.Process(self.pid).children(recursive=True):
                child.kill()
            super().kill()
            self.wait()


def running(start: str, out: Path) -> Iterator[Process | RunningScript]:
    """Start the script in one of the ways."""
    script = [str(WORKER), str(out / "plan.json")]
    logs = [out / "log.0", out / "log.1"]
    if start in ("Lightning", "spawned"):
        yield start_script(script, folder=out, environment=environment(), outputs=[[logs[0], logs[0]]])
        return
    if start == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        started = [([*launcher, *script], environment())]
    else:
        port = free_slurm_port()
        started = [(script, {**environment(), **slurm_variables(rank, port)}) for rank in range(2)]
    for log, (arguments, variables) in zip(logs, started, strict=False):
        with log.open("wb") as file:
            yield Process([sys.executable, *arguments], cwd=out, env=variables, stdout=file, stderr=file)


def code_of(process: Process | RunningScript, deadline: float) -> int | None:
    """How it ended; None if it did not in time."""
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        return None


def reference(started: dict[str, Started], training: str) -> list[dict[str, Any]]:
    """Plain DDP, started by Lightning; of a pipeline the same start."""
    return started["Lightning"].results("pipeline" if training.startswith("pipeline") else "ddp")


@pytest.mark.parametrize("start", STARTS)
def test_every_process_comes_to_a_good_end(started, start):
    assert started[start].codes == [0] * len(started[start].codes), started[start].log


@pytest.mark.parametrize(
    ("start", "environment", "launchers"),
    [
        ("torchrun", "TorchElasticEnvironment", {"_SubprocessScriptLauncher"}),
        ("Lightning", "LightningEnvironment", {"_SubprocessScriptLauncher"}),
        ("SLURM", "SLURMEnvironment", {"_SubprocessScriptLauncher"}),
        ("spawned", "LightningEnvironment", {"_MultiProcessingLauncher"}),
    ],
)
def test_lightning_takes_each_start_for_what_it_is(started, start, environment, launchers):
    results = [one for training in STARTS[start] for one in started[start].results(training)]
    assert {one["environment"] for one in results} == {environment}
    assert {one["launcher"] for one in results} == launchers
    num_ranks = 1 if start == "spawned" else 2
    assert all(len(started[start].results(training)) == num_ranks for training in STARTS[start])
    assert len({one["process"] for one in results}) == num_ranks


@pytest.mark.parametrize(("start", "training"), CELLS, ids=IDS)
def test_weights_and_logged_values_are_the_same_to_the_last_bit(started, start, training):
    [expected, *_] = reference(started, training)
    assert len(expected["weights"]) == 6
    for found in started[start].results(training):
        assert same_bits(found["weights"], expected["weights"])
        assert same_bits(found["metrics"], expected["metrics"])
        assert found["best"] == expected["best"]


@pytest.mark.parametrize(("start", "training"), CELLS, ids=IDS)
def test_the_same_files_are_written_once_with_the_same_contents(started, start, training):
    expected = started["Lightning"].files("pipeline" if training.startswith("pipeline") else "ddp")
    found = started[start].files(training)
    assert list(found) == list(expected)
    assert len(found) == 4  # two checkpoints, the table, the arguments of the module
    for name, path in found.items():
        if path.suffix == ".ckpt":
            one, other = (
                {key: value for key, value in checkpoint(file).items() if key != "callbacks"}  # which hold paths
                for file in (path, expected[name])
            )
            assert same_bits(one, other)
        else:
            assert lines_of(path) == lines_of(expected[name])


def checkpoint(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=False))


def lines_of(path: Path) -> Any:
    """Of a table, what the user has logged; a strategy of ours adds its own figures."""
    if path.suffix != ".csv":
        return path.read_text()
    with path.open(newline="") as file:
        rows = [
            {key: text for key, text in row.items() if not key.startswith("gpufeed/")} for row in csv.DictReader(file)
        ]
    return [row for row in rows if any(text for key, text in row.items() if key != "step")]
