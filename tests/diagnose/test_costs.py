from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_gpufeed.diagnose import costs
from lightning_gpufeed.diagnose.costs import measure_unit_costs


@pytest.fixture(autouse=True)
def _measured_anew() -> Iterator[None]:
    measure_unit_costs.cache_clear()
    yield
    measure_unit_costs.cache_clear()


def test_costs_are_seconds_of_one_byte_or_value() -> None:
    unit_costs = measure_unit_costs()
    assert unit_costs is not None
    # No core moves more than 100 GB/s, and one that moves less than 100 MB/s runs no training: between these lie
    # three powers of ten, so that milliseconds, or bytes of a whole row, would be noticed.
    for seconds in (unit_costs.read_seconds, unit_costs.convert_seconds, unit_costs.ship_seconds):
        assert 1e-11 < seconds < 1e-8


def test_a_float_costs_more_than_the_byte_it_comes_from() -> None:
    # Four bytes of new memory for one; about a factor of four where this was written, and two would be within noise.
    unit_costs = measure_unit_costs()
    assert unit_costs is not None
    assert unit_costs.convert_seconds > unit_costs.read_seconds


def test_it_is_measured_once() -> None:
    first = measure_unit_costs()
    before = time.thread_time()
    assert measure_unit_costs() is first
    assert time.thread_time() - before < 1e-3  # the measuring itself takes twenty times that


def test_measuring_takes_little_time_and_the_calling_thread_alone() -> None:
    thread, process = time.thread_time(), time.process_time()
    measure_unit_costs()
    thread, process = time.thread_time() - thread, time.process_time() - process
    # Twenty milliseconds where this was written; new pages are several times as dear on some virtual machines.
    assert thread < 0.3
    # What threads of earlier tests do meanwhile is not ours; a second thread that measured would be all of it again.
    assert process < 1.5 * thread + 0.01


def test_nothing_is_left_and_nothing_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def state() -> list[object]:
        maps = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "gpufeed" in line and "memfd" in line
        ]
        generators = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
        threads = (threading.active_count(), torch.get_num_threads())
        return [sorted(os.listdir(tmp_path)), len(os.listdir("/proc/self/fd")), maps, generators, threads]

    before = state()
    assert measure_unit_costs() is not None
    assert state() == before


def test_without_a_folder_for_the_file_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    before = len(os.listdir("/proc/self/fd"))
    assert measure_unit_costs() is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_memory_to_share_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert measure_unit_costs() is None


def test_without_memory_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_NUM_READ", 2**40)  # rows: more than there are addresses
    assert measure_unit_costs() is None
