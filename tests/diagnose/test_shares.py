"""The few numbers that verdicts, cures and loggers share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_gpufeed.diagnose.counters import BatchFacts, EpochCounters, LoaderFacts, StepTotals, Usage
from lightning_gpufeed.diagnose.shares import (
    amplification,
    has_storage_sign,
    host_seconds,
    item_bytes,
    metrics_of,
    ready_share,
    receive_share,
    spare_share,
    start_share,
    sync_share,
    taken_by_others,
)
from lightning_gpufeed.diagnose.verdict import judge
from tests.diagnose.feeds import CHUNKED, EPOCHS, FLOATS, OWN, ROWS, WIDENED, epoch_of, steps_of, workers

QUEUED = Usage(wall_seconds=20.0, user_seconds=10.0, queue_seconds=3.0)

# Amplification ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "batch", "file", "expected"),
    [
        (1.0, None, None, 1.0),
        (31.9, None, CHUNKED, 31.9),
        (0.25, WIDENED, ROWS, 1.0),  # bytes in the file, floats in the batch
        (8.0, WIDENED, CHUNKED, 32.0),
        (1.0, WIDENED, replace(ROWS, dtype="float32"), 1.0),  # floats in both
        (1.0, FLOATS, None, 1.0),
    ],
)
def test_amplification_counts_in_the_type_that_is_stored(ratio, batch, file, expected) -> None:
    told = {} if batch is None else {"batch": batch}
    loader = workers(2, files=() if file is None else (file,))
    assert amplification(epoch_of(read_ratio=ratio, loader=loader, **told)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "counters",
    [
        replace(epoch_of(), readers=None),
        epoch_of(read_ratio=None),
        epoch_of(batch=BatchFacts()),
        epoch_of(read_ratio=100.0, batch=BatchFacts(num_bytes=64)),  # messages between processes
        replace(epoch_of(), num_watched_steps=0),
        EpochCounters(),
    ],
)
def test_amplification_of_nothing_is_unknown(counters: EpochCounters) -> None:
    assert amplification(counters) is None


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("uint8", 1), ("float32", 4), ("complex128", 16), (None, None), ("", None), ("bfloat16", None), ("string", None)],
)
def test_an_element_has_a_size_if_its_type_is_known(dtype: str | None, expected: int | None) -> None:
    assert item_bytes(dtype) == expected


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "f4"), ("b", "i8")]),
        np.dtype([("a", "u1"), ("b", "f8")], align=True),  # as C programs write them
        np.dtype({"names": ["a", "b"], "formats": ["f4", "i8"], "offsets": [0, 16]}),
        np.dtype([("a", "f4", (3,))]),
        np.dtype("S7"),
        np.dtype("V8"),
        np.dtype("M8[s]"),
        np.dtype(">f4"),
        np.dtype(object),
    ],
    ids=str,
)
def test_no_type_that_a_file_may_have_is_an_error(dtype: np.dtype[Any]) -> None:
    assert item_bytes(str(dtype)) in (None, dtype.itemsize)


# Ranks -----------------------------------------------------------------------------------------------------


def sync_of(steps: StepTotals, **told: Any) -> float:
    return sync_share(epoch_of(steps=steps, **({"num_ranks": 2} | told)), ())


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (steps_of(0.0, sync_seconds=5.0), 0.25),  # 5 of 20 seconds
        (steps_of(0.0, sync_seconds=0.0, compute_cpu_seconds=15.0), 0.25),
        (steps_of(0.0, sync_seconds=5.0, compute_cpu_seconds=15.0), 0.5),
        (steps_of(0.0, sync_seconds=0.0, compute_cpu_seconds=0.0), 1.0),
        (steps_of(0.0, sync_seconds=0.0, compute_cpu_seconds=None), 0.0),
        (steps_of(0.0, idle=0.5, sync_seconds=5.0), 0.25),  # a device that is idle meanwhile ...
        (steps_of(0.0, idle=0.1, sync_seconds=5.0), 0.1),  # ... counts as far as it is
        (steps_of(0.4, idle=0.5, sync_seconds=5.0), 0.1),  # waiting for data comes first
    ],
)
def test_ranks_wait_for_each_other_as_far_as_it_shows(steps: StepTotals, expected: float) -> None:
    assert sync_of(steps) == pytest.approx(expected)


def test_a_rank_alone_waits_for_none() -> None:
    assert sync_of(steps_of(0.0, sync_seconds=5.0), num_ranks=1) == 0.0


def test_queueing_for_a_core_is_no_waiting_for_ranks() -> None:
    thread = Usage(wall_seconds=20.0, queue_seconds=3.0)
    steps = steps_of(0.0, sync_seconds=0.0, compute_cpu_seconds=15.0)
    assert sync_of(steps, training_thread=thread) == pytest.approx(0.1)
    # It was watched for half of the steps: twice as much over all.
    half = {"training_thread": replace(thread, queue_seconds=1.5), "num_main_steps": 200}
    assert sync_of(steps, **half) == pytest.approx(0.1)


def test_the_rank_that_waits_for_the_others_most_counts() -> None:
    one, other = (
        epoch_of(steps=steps_of(0.0, sync_seconds=seconds, compute_cpu_seconds=20.0), num_ranks=2)
        for seconds in (1.0, 5.0)
    )
    assert sync_share(one, ()) == pytest.approx(0.05)
    assert sync_share(one, (other,)) == sync_share(other, (one,)) == pytest.approx(0.25)


# What waiting is made of -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "loader", "expected"),
    [
        (steps_of(0.6, ready_seconds=None), workers(2), None),
        (steps_of(0.6, ready_seconds=0.0), workers(2), 0.0),
        (steps_of(0.6, ready_seconds=3.0), workers(2), 0.25),  # of 12 seconds of waiting
        (steps_of(0.6, ready_seconds=13.0), workers(2), 1.0),  # two clocks
        (steps_of(0.0, ready_seconds=0.0), workers(2), None),
    ],
)
def test_a_part_of_the_waiting_is_for_batches_that_are_ready(steps, loader, expected) -> None:
    assert ready_share(epoch_of(steps=steps, loader=loader)) == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"steps": steps_of(0.6)}, 0.0),
        ({"steps": steps_of(0.6, receive_seconds=5.0)}, 0.25),
        ({"steps": steps_of(0.6, receive_seconds=15.0)}, 0.6),  # never more than it waits
        ({"steps": steps_of(0.6, receive_seconds=5.0), "loader": workers(0)}, 0.0),  # it loads itself
        ({"steps": steps_of(0.6, receive_seconds=5.0), "training_thread": QUEUED}, 0.4),  # to do so it queued
        ({"steps": steps_of(0.6, idle=0.6, receive_seconds=5.0), "training_thread": QUEUED}, 0.25),
    ],
)
def test_taking_a_batch_over_is_work_of_the_training_thread(told: dict[str, Any], expected: float) -> None:
    assert receive_share(epoch_of(**told)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"steps": steps_of(0.0, hooks=0.4)}, 8.0),
        ({"steps": steps_of(0.0, hooks=0.4), "training_thread": QUEUED}, 8.0 - 0.4 * 3),  # its part of queueing
        ({"steps": steps_of(0.0, hooks=0.4), "training_thread": replace(QUEUED, queue_seconds=20.0)}, 0.0),
        ({"steps": steps_of(0.2, idle=0.5)}, 6.0),  # waiting for data apart
        ({"steps": steps_of(0.2, idle=0.5, sync_seconds=2.0), "num_ranks": 2}, 4.0),  # and for ranks
        ({"steps": steps_of(0.2, idle=0.1)}, 0.0),
    ],
)
def test_the_hosts_own_code_takes_what_nothing_else_does(told: dict[str, Any], expected: float) -> None:
    assert host_seconds(epoch_of(**told)) == pytest.approx(expected)


def signs(counters: EpochCounters, pressure: float | None = None, **used: int | None) -> bool:
    usage, machine = counters.readers, replace(counters.machine, io_pressure=pressure)
    assert usage is not None
    return has_storage_sign(replace(counters, readers=replace(usage, **used), machine=machine))


def test_storage_leaves_signs_where_the_kernel_keeps_them() -> None:
    counters = epoch_of()
    everything = 400 * 9_633_792
    assert signs(counters, pressure=0.5)
    assert signs(counters, disk_bytes=everything)
    assert signs(counters, major_faults=everything // 4096)
    assert not signs(counters)
    assert not signs(counters, pressure=0.01)
    assert not signs(counters, disk_bytes=None, major_faults=None)
    assert not has_storage_sign(EpochCounters())


def test_a_page_or_two_from_storage_in_a_whole_epoch_are_no_sign_of_it() -> None:
    assert not signs(epoch_of(), major_faults=2, disk_bytes=8192)


# Other processes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"user": 0.1, "system": 0.1, "queue": 0.8}, 2 - (2 * 0.2 + 0.1)),  # two readers and the training
        ({"user": 0.1, "system": 0.1, "queue": 0.8, "loader": workers(16)}, None),  # they keep each other waiting
        ({"user": 0.5, "system": 0.1, "queue": 0.4}, None),
        ({"user": 0.1, "system": 0.1, "queue": 0.05}, None),  # nobody waits
        ({"user": 0.1, "system": 0.1, "queue": None}, None),
        ({"user": 0.1, "system": 0.1, "queue": 0.8, "main": None}, None),
        ({"readers": None}, None),
    ],
)
def test_cores_that_nobody_here_uses_and_nobody_gets_are_taken_by_others(told: dict[str, Any], expected) -> None:
    assert taken_by_others(epoch_of(**told)) == (None if expected is None else pytest.approx(expected))


# Start and sleep -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (replace(workers(4), is_persistent=False), 0.2),
        (workers(4), 0.0),
        (workers(0), 0.0),
        (OWN, 0.0),
    ],
)
def test_only_workers_that_are_not_kept_have_a_start(loader: LoaderFacts, expected: float) -> None:
    assert start_share(epoch_of(loader=loader, start_seconds=5.0)) == pytest.approx(expected)
    assert start_share(EpochCounters(loader=loader, start_seconds=5.0)) == 0.0


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"user": 0.1, "system": 0.1, "queue": 0.1}, 0.7),
        ({"user": 0.1, "system": 0.1, "queue": None}, 0.0),
        ({"user": 0.1, "system": 0.1, "queue": 0.1, "loader": workers(0)}, 0.0),
        ({"readers": None}, 0.0),
    ],
)
def test_readers_that_are_ahead_sleep_in_what_is_left_of_their_time(told: dict[str, Any], expected: float) -> None:
    assert spare_share(epoch_of(**told)) == pytest.approx(expected)


# For loggers -----------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(EPOCHS)
def test_loggers_get_finite_numbers_under_one_roof(counters: EpochCounters) -> None:
    verdict = judge(counters)
    metrics = metrics_of(counters, verdict)
    assert all(re_name(name) and type(value) is float and math.isfinite(value) for name, value in metrics.items())
    shares = [value for name, value in metrics.items() if name.endswith(("_share", "utilisation"))]
    assert shares
    assert all(0 <= value <= 1 for value in shares)
    assert metrics["gpufeed/feed/predicted_gain"] == (verdict.cures[0].gain if verdict.cures else 1.0)


def re_name(name: str) -> bool:
    return name.startswith("gpufeed/feed/") and name.removeprefix("gpufeed/feed/").replace("_", "").isalpha()


def test_what_is_unknown_is_left_out_of_the_log() -> None:
    whole = epoch_of(steps=steps_of(0.6, idle=0.5, sync_seconds=1.0), num_ranks=2)
    everything = set(metrics_of(whole, judge(whole)))
    bare = EpochCounters(steps=StepTotals(num_steps=1, elapsed_seconds=1.0))
    left = set(metrics_of(bare, judge(bare)))
    assert left == {
        f"gpufeed/feed/{name}"
        for name in (
            "wait_share",
            "step_seconds",
            "copy_share",
            "compute_share",
            "hook_share",
            "predicted_gain",
            "watched_share",
        )
    }
    assert left < everything
    assert {"gpufeed/feed/idle_share", "gpufeed/feed/sync_share", "gpufeed/feed/read_ratio"} < everything
