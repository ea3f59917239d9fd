"""Each check around the tests is shown a test that leaves something behind, and has to fail it.

All of them run in one inner pytest with this project's conftest.py and settings. It is a process of its own,
so that what is left behind on purpose ends with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]

INNER_TESTS = """
import gc, os, random, subprocess, sys, threading, time, warnings
import h5py, numpy, psutil, pytest, torch, torch.distributed

KEPT = []   # what is left behind on purpose
LISTS = []  # which the garbage collector looks through
DRAWN = []  # what the random generators gave
START = os.getcwd()

def test_thread_goes_on():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

def test_thread_ends_soon():
    threading.Thread(target=time.sleep, args=(0.1,), daemon=True).start()

def test_process_goes_on():
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_process_was_ended():
    assert not psutil.pid_exists(KEPT[0].pid)
    KEPT[0].stdin.close()
    KEPT[0].wait()

def test_file_stays_open(tmp_path):
    KEPT.append(h5py.File(tmp_path / "kept.h5", "w"))

def test_file_stays_mapped(tmp_path):
    path = tmp_path / "mapped.h5"
    path.write_bytes(bytes(4096))
    KEPT.append(torch.UntypedStorage.from_file(str(path), False, 4096))

def test_file_in_a_reference_cycle(tmp_path):
    cycle = [h5py.File(tmp_path / "dropped.h5", "w")]
    cycle.append(cycle)

def test_fails_with_a_file_in_its_traceback(tmp_path):
    file = h5py.File(tmp_path / "in_traceback.h5", "w")
    assert file is None

def test_moves_and_changes_a_variable(tmp_path):
    os.chdir(tmp_path)
    os.environ["FORGOTTEN_VARIABLE"] = "1"
    os.environ["MASTER_PORT"] = "1"

def test_directory_and_variables_are_back():
    assert os.getcwd() == START
    assert "FORGOTTEN_VARIABLE" not in os.environ
    assert "MASTER_PORT" not in os.environ

@pytest.mark.parametrize("turn", [0, 1])
def test_same_start(turn):
    DRAWN.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
    assert DRAWN[0] == DRAWN[turn]
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == 1
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

def test_keeps_many_objects():
    LISTS.extend([] for _ in range(100_000))

def test_the_garbage_collector_looks_at_few():
    assert len(gc.get_objects()) < 50_000

@pytest.mark.gpu
def test_needs_a_device():
    raise AssertionError("must not run")

def test_warns():
    warnings.warn("look here")
"""


@pytest.fixture(scope="module")
def inner_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """Run the tests above; per test the outcomes other than passed, as (kind, text)."""
    folder = tmp_path_factory.mktemp("inner_run")
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    # What is left behind on purpose is not waited for as long as what a busy machine is slow to end.
    code, long, short = (ROOT / "tests" / "conftest.py").read_text(), "GRACE_SECONDS = 10.0\n", "GRACE_SECONDS = 1.0\n"
    assert code.count(long) == 1
    (folder / "tests" / "conftest.py").write_text(code.replace(long, short))
    (folder / "tests" / "test_inner.py").write_text(INNER_TESTS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml=report.xml"],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    outcomes: dict[str, list[tuple[str, str]]] = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        found = outcomes.setdefault(case.attrib["name"], [])
        found += [(part.tag, part.attrib.get("message", "") + (part.text or "")) for part in case]
    return outcomes


def kinds(outcomes: list[tuple[str, str]]) -> list[str]:
    return [kind for kind, _ in outcomes]


@pytest.mark.parametrize(
    ("name", "what_is_named"),
    [
        ("test_thread_goes_on", "thread 'forgotten' (daemon=True)"),
        ("test_process_goes_on", "-c input()"),
        ("test_file_stays_open", "kept.h5"),
        ("test_file_stays_mapped", "mapping of "),
        ("test_moves_and_changes_a_variable", "current directory moved to "),
        ("test_moves_and_changes_a_variable", "environment variable FORGOTTEN_VARIABLE"),
    ],
)
def test_what_a_test_leaves_behind_fails_it_and_is_named(inner_run, name, what_is_named):
    [(kind, text)] = inner_run[name]
    assert kind == "error"
    assert "the test left behind:" in text
    assert what_is_named in text


@pytest.mark.parametrize("name", ["test_thread_ends_soon", "test_file_in_a_reference_cycle"])
def test_what_goes_away_by_itself_is_no_leak(inner_run, name):
    assert inner_run[name] == []


def test_a_process_left_behind_is_ended(inner_run):
    assert inner_run["test_process_was_ended"] == []


def test_a_failed_test_is_not_blamed_for_the_file_in_its_traceback(inner_run):
    assert kinds(inner_run["test_fails_with_a_file_in_its_traceback"]) == ["failure"]


def test_directory_and_variables_are_put_back(inner_run):
    assert inner_run["test_directory_and_variables_are_back"] == []


def test_a_variable_that_lightning_sets_is_put_back_without_a_word(inner_run):
    [(_, text)] = inner_run["test_moves_and_changes_a_variable"]
    assert "MASTER_PORT" not in text


@pytest.mark.parametrize("turn", [0, 1])
def test_every_test_starts_with_the_same_seeds_and_settings_and_no_process_group(inner_run, turn):
    assert inner_run[f"test_same_start[{turn}]"] == []


def test_what_earlier_tests_keep_costs_no_time_in_the_garbage_collector(inner_run):
    assert inner_run["test_the_garbage_collector_looks_at_few"] == []


def test_a_gpu_test_is_skipped_without_a_device(inner_run):
    [(kind, text)] = inner_run["test_needs_a_device"]
    assert kind == "skipped"
    assert "no CUDA" in text


def test_a_warning_is_an_error(inner_run):
    assert kinds(inner_run["test_warns"]) == ["failure"]
