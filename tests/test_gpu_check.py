"""`make gpu-check`: one script that leaves nothing out, stops for nothing, and is a dry run where there is no GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.scripts import start_script

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
TIMINGS = sorted(path.name for path in (ROOT / "benchmarks").glob("gpu_*.py"))
TEST_FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").rglob("test_*.py"))

# In the place of the interpreter: it says what it was called with, and fails for one of them.
SAYS_WHAT_IT_RUNS = """#!/bin/bash
[ "$1" = - ] && cat >/dev/null
echo "RUN $*"
[[ "$*" != *gpu_sync.py* ]]
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """What the script prints, and its exit code, with an interpreter that only says what it would run."""
    python = tmp_path_factory.mktemp("bin") / "python"
    python.write_text(SAYS_WHAT_IT_RUNS)
    python.chmod(0o755)
    ran = subprocess.run(
        ["bash", SCRIPT, "figures"],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stderr == ""
    return ran


def ran_in(checked) -> list[str]:
    return [line for line in checked.stdout.splitlines() if line.startswith("RUN ")]


@pytest.mark.parametrize("name", TIMINGS)
def test_every_timing_is_run_once_and_leaves_its_figures(checked, name):
    [line] = [line for line in ran_in(checked) if name in line]
    assert line.endswith(f"--json figures/{name.removesuffix('.py')}.json")


@pytest.mark.parametrize("path", TEST_FILES)
def test_every_test_that_needs_a_device_is_run_once(checked, path):
    calls = [line.split() for line in ran_in(checked) if "pytest" in line]
    assert sum(path == word or path.startswith(f"{word}/") for call in calls for word in call) == 1


def test_what_is_named_is_there(checked):
    named = [word for line in ran_in(checked) for word in line.split() if word.startswith(("tests/", "benchmarks/"))]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_tests_come_before_timings(checked):
    kinds = ["pytest" in line for line in ran_in(checked)[1:]]  # the first says what is installed
    assert kinds == sorted(kinds, reverse=True)


def test_a_check_that_fails_stops_none_and_is_told_at_the_end(checked):
    assert checked.returncode == 1
    endings = re.findall(r"^-- (ended well|FAILED)", checked.stdout, flags=re.MULTILINE)
    assert endings.count("FAILED") == 1
    assert endings.index("FAILED") < len(endings) - 1


def test_all_together_end_within_five_minutes():
    [total] = re.findall(r"^TOTAL_SECONDS=(\d+)", SCRIPT.read_text(), flags=re.MULTILINE)
    assert int(total) + 10 < 300  # `timeout` gives each check what is left of it


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", TIMINGS)
def test_a_timing_says_that_it_is_skipped_without_a_gpu(tmp_path, name):
    log = tmp_path / "log"
    running = start_script(
        [str(ROOT / "benchmarks" / name)],
        folder=tmp_path,
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        outputs=[[log, log]],
    )
    try:
        code = running.wait(60)
    finally:
        running.kill()
    assert (code, log.read_text().splitlines()[-1:]) == (0, ["skipped: no CUDA"])
