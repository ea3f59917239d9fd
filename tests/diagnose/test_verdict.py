"""Why a step waits: the measured signatures, each cause, each counter missing, and epochs that nobody thought of."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from lightning_gpufeed.diagnose.counters import BatchFacts, EpochCounters, LoaderFacts, StepTotals, UnitCosts, Usage
from lightning_gpufeed.diagnose.judgement import Cause
from lightning_gpufeed.diagnose.verdict import BOUND_SHARE, judge, worst_rank
from tests.diagnose.feeds import (
    CHUNKED,
    COMPRESSED,
    EPOCHS,
    FLOATS,
    OWN,
    ROWS,
    UINT8,
    WIDENED,
    epoch_of,
    steps_of,
    workers,
)

INLINE, SIX = workers(0), workers(6)
RAW = replace(CHUNKED, is_direct=True, order="full", command=None)
INSIDE = {Cause.COPY, Cause.SYNC, Cause.HOST}


def cause_of(**told: Any) -> Cause:
    return judge(epoch_of(**told)).cause


# Signatures of real pipelines, two workers on two cores ----------------------------------------------------


SIGNATURES = {
    "rows in the page cache": (0.14, 0.36, 0.28, 1.00, {}, Cause.KERNEL),
    "random rows of a chunked file": (0.04, 0.49, 0.45, 31.9, {}, Cause.AMPLIFICATION),
    "bytes made floats in the worker": (0.12, 0.34, 0.54, 0.25, {"batch": WIDENED}, Cause.CONVERSION),
    "heavy float transform": (0.30, 0.17, 0.53, 0.25, {"batch": FLOATS}, Cause.CPU),
    "the same with six workers": (0.09, 0.04, 0.86, 0.25, {"batch": FLOATS, "loader": SIX}, Cause.TOO_MANY_WORKERS),
    "slow step, fast loader": (0.04, 0.01, 0.02, 1.00, {"steps": steps_of(0.01)}, Cause.COMPUTE),
}  # fmt: skip


@pytest.mark.parametrize(("user", "system", "queue", "ratio", "told", "cause"), SIGNATURES.values(), ids=SIGNATURES)
def test_the_signature_of_a_real_pipeline_is_recognised(user, system, queue, ratio, told, cause) -> None:
    assert cause_of(user=user, system=system, queue=queue, read_ratio=ratio, **told) is cause


@pytest.mark.parametrize(("user", "system", "queue", "ratio", "told", "cause"), SIGNATURES.values(), ids=SIGNATURES)
def test_no_signature_hangs_on_a_counter_that_is_often_missing(user, system, queue, ratio, told, cause) -> None:
    counters = epoch_of(user=user, system=system, queue=queue, read_ratio=ratio, **told)
    usage, machine = counters.readers, counters.machine
    assert usage is not None
    for other in (
        replace(counters, machine=replace(machine, costs=None)),
        replace(counters, machine=replace(machine, cpu_pressure=0.9, io_pressure=0.0, memory_pressure=0.0)),
        replace(counters, main=None),
        replace(counters, training_thread=None),
        replace(counters, readers=replace(usage, disk_bytes=None, major_faults=None, minor_faults=None)),
    ):
        assert judge(other).cause is cause


# Each cause ------------------------------------------------------------------------------------------------


BUSY = {"user": 0.8, "system": 0.15, "queue": 0.05}
KERNEL = {"user": 0.15, "system": 0.8, "queue": 0.05}
ASLEEP = {"user": 0.02, "system": 0.03, "queue": 0.0}
IDLE = {"user": 0.1, "system": 0.1, "queue": 0.0}
SMALL = BatchFacts(num_samples=64, num_bytes=4096)
CASES: list[tuple[Cause, dict[str, Any]]] = [
    (Cause.COMPUTE, {"steps": steps_of(0.049)}),
    (Cause.COMPUTE, {"steps": steps_of(0.6, idle=0.04)}),  # the device has work while the host waits
    (Cause.COPY, {"steps": steps_of(0.01, copy=0.16)}),
    (Cause.COPY, {"steps": steps_of(0.01, copy=0.3, idle=0.0)}),
    (Cause.HOST, {"steps": steps_of(0.01, hooks=0.2)}),
    (Cause.HOST, {"steps": steps_of(0.01, idle=0.3)}),
    (Cause.SYNC, {"steps": steps_of(0.01, sync_seconds=4.0), "num_ranks": 2}),
    (Cause.SYNC, {"steps": steps_of(0.01, sync_seconds=0.0, compute_cpu_seconds=10.0), "num_ranks": 2}),
    (Cause.SYNC, {"steps": steps_of(0.01, sync_seconds=0.0, compute_cpu_seconds=0.0), "num_ranks": 2}),
    (Cause.SYNC, {"steps": steps_of(0.01, idle=0.4, sync_seconds=7.8), "num_ranks": 2}),
    (Cause.START, {"loader": replace(workers(4), is_persistent=False), "start_seconds": 5.0, "steps": steps_of(0.1)}),
    (Cause.AMPLIFICATION, {"read_ratio": 32.0, "loader": workers(2, files=(CHUNKED,))}),
    (Cause.AMPLIFICATION, {**KERNEL, "read_ratio": 8.0, "batch": WIDENED}),
    (Cause.AMPLIFICATION, {**KERNEL, "read_ratio": 32.0, "loader": INLINE}),
    (Cause.AMPLIFICATION, {**BUSY, "read_ratio": 0.0, "loader": replace(OWN, files=(COMPRESSED,))}),
    (Cause.TOO_FEW_WORKERS, {**BUSY, "loader": INLINE}),
    (Cause.TOO_FEW_WORKERS, {**KERNEL, "loader": INLINE, "cores": 64.0}),
    (Cause.TOO_FEW_WORKERS, {**BUSY, "loader": workers(1)}),
    (Cause.TOO_FEW_WORKERS, {**BUSY, "loader": workers(16), "cores": 64.0}),
    (Cause.TOO_MANY_WORKERS, {"user": 0.1, "system": 0.1, "queue": 0.8, "loader": workers(16), "cores": 4.0}),
    (Cause.TOO_MANY_WORKERS, {"user": 0.2, "system": 0.2, "queue": 0.6, "loader": workers(2), "cores": 1.0}),
    (Cause.DISK, ASLEEP),
    (Cause.DISK, {**ASLEEP, "loader": workers(16)}),  # sleepers do no harm in any number
    (Cause.DISK, {**ASLEEP, "loader": INLINE, "cores": 1.0}),
    (Cause.DISK, {**ASLEEP, "loader": replace(OWN, files=(RAW,))}),
    (Cause.CPU, {**BUSY, "batch": FLOATS, "read_ratio": 0.25}),
    (Cause.CPU, {**BUSY, "batch": UINT8, "read_ratio": 1.0}),
    (Cause.CPU, {**BUSY, "loader": INLINE, "cores": 1.0, "main_user": 0.4}),  # no core is left to a worker
    (Cause.CPU, {**BUSY, "batch": FLOATS, "loader": workers(64), "cores": 64.0}),
    (Cause.CONVERSION, {**KERNEL, "batch": WIDENED, "read_ratio": 0.25}),
    (Cause.CONVERSION, {"user": 0.3, "system": 0.1, "queue": 0.6, "batch": WIDENED, "read_ratio": 0.25,
                        "steps": steps_of(step_seconds=0.02)}),  # user time, and no more than converting takes
    (Cause.KERNEL, KERNEL),
    (Cause.KERNEL, {**KERNEL, "loader": INLINE, "cores": 1.0, "main_user": 0.4}),
    (Cause.TOO_FEW_WORKERS, {**KERNEL, "loader": INLINE, "cores": 1.0, "main_user": 0.02}),  # the step needs none
    (Cause.DECODE, {**BUSY, "loader": replace(OWN, files=(replace(COMPRESSED, order="window:4096"),))}),
    (Cause.LOADER, {**KERNEL, "loader": replace(OWN, files=(RAW,)), "read_ratio": 0.0}),
    (Cause.LOADER, {"readers": None}),
    (Cause.HANDOVER, {**IDLE, "steps": steps_of(0.3, ready_seconds=5.9), "batch": SMALL}),
    (Cause.KERNEL, {**IDLE, "steps": steps_of(0.3, ready_seconds=5.9)}),  # large batches: their pages
    (Cause.DISK, {**IDLE, "steps": steps_of(0.15, ready_seconds=0.0)}),  # none was ready: they are not idle
    (Cause.UNEVEN, {**IDLE, "steps": steps_of(0.15, ready_seconds=2.9), "loader": OWN}),
    (Cause.UNEVEN, {**IDLE, "steps": steps_of(0.15)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "told"), CASES, ids=[f"{number}: {cause}" for number, (cause, _) in enumerate(CASES)]
)
def test_each_cause_is_told_by_its_counters(cause: Cause, told: dict[str, Any]) -> None:
    assert cause_of(**told) is cause


def test_there_is_a_case_of_every_cause() -> None:
    assert {cause for cause, _ in CASES} == set(Cause)


# Borders ---------------------------------------------------------------------------------------------------


def test_a_loader_is_looked_at_from_five_percent_of_waiting_on() -> None:
    assert BOUND_SHARE == 0.05
    assert judge(epoch_of(steps=steps_of(0.0499))).free_echo_factor is None
    assert judge(epoch_of(steps=steps_of(0.0501))).cause is not Cause.COMPUTE


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (Cause.COPY, {"steps": steps_of(0.06, copy=0.7)}),
        (Cause.HOST, {"steps": steps_of(0.06, hooks=0.7)}),
        (Cause.HOST, {"steps": steps_of(0.06, idle=0.7)}),
        (Cause.SYNC, {"steps": steps_of(0.06, sync_seconds=14.0), "num_ranks": 2}),
    ],
)
def test_the_cause_is_what_the_step_waits_for_most(cause: Cause, told: dict[str, Any]) -> None:
    # 6 % of waiting for data is worth 1.06x; what takes 70 % of the step comes first.
    assert cause_of(**BUSY, **told) is cause


@pytest.mark.parametrize(
    "loader",
    [INLINE, workers(2), replace(workers(2), is_persistent=True), replace(OWN, files=(RAW,))],
    ids=["no workers", "kept workers", "kept workers, said twice", "our own"],
)
def test_an_epoch_is_not_said_to_wait_for_workers_that_are_not_started(loader: LoaderFacts) -> None:
    assert cause_of(loader=loader, start_seconds=100.0) is not Cause.START


def test_the_first_epoch_is_not_judged_by_its_start() -> None:
    loader = replace(workers(4), is_persistent=False)
    told = {"loader": loader, "start_seconds": 100.0, "steps": steps_of(0.01)}
    assert cause_of(**told) is Cause.START
    assert cause_of(**told, is_first=True) is Cause.COMPUTE


def test_one_rank_waits_for_no_other() -> None:
    assert cause_of(steps=steps_of(0.01, sync_seconds=15.0), num_ranks=1) is Cause.COMPUTE


def test_a_training_thread_that_queues_for_a_core_does_not_wait_for_other_ranks() -> None:
    # Half of its time it is off its core; all of that it was ready to run.
    steps = steps_of(0.0, sync_seconds=0.0, compute_cpu_seconds=10.0)
    thread = Usage(wall_seconds=20.0, user_seconds=10.0, queue_seconds=10.0)
    assert cause_of(steps=steps, num_ranks=2, training_thread=thread) is Cause.COMPUTE


def test_hidden_device_time_does_not_make_a_loader_slow() -> None:
    # The host waits 60 % of the time, the device is idle for 2 % of it.
    verdict = judge(epoch_of(steps=steps_of(0.6, idle=0.02)))
    assert verdict.cause is Cause.COMPUTE
    assert verdict.wait_share == pytest.approx(0.02)


def test_our_loader_reads_single_samples_inside_chunks_that_no_filter_covers() -> None:
    assert cause_of(**KERNEL, loader=replace(OWN, files=(RAW,)), read_ratio=0.0) is Cause.LOADER


def test_our_loader_that_goes_by_windows_reads_each_chunk_once() -> None:
    windows = replace(COMPRESSED, order="window:4096")
    assert cause_of(**BUSY, loader=replace(OWN, files=(windows,)), read_ratio=0.0) is not Cause.AMPLIFICATION


def test_no_code_of_a_user_runs_in_our_loader() -> None:
    for file in (RAW, COMPRESSED, replace(COMPRESSED, order="window:4096"), replace(COMPRESSED, dtype="float32")):
        for batch in (UINT8, WIDENED, FLOATS, BatchFacts()):
            cause = cause_of(**BUSY, loader=replace(OWN, files=(file,)), batch=batch, read_ratio=0.0)
            assert cause is not Cause.CPU, (file, batch)


def test_a_file_of_floats_that_is_read_byte_for_byte_is_not_read_along_with_others() -> None:
    floats = replace(ROWS, dtype="float32")
    told = {**KERNEL, "read_ratio": 1.0, "batch": WIDENED}
    assert cause_of(**told, loader=workers(2, files=(floats,))) is Cause.CONVERSION
    assert cause_of(**told) is Cause.CONVERSION


def test_chunks_that_cost_next_to_nothing_are_not_the_cause() -> None:
    # 4 bytes read for each delivered: 38 MB a batch, 15 ms at 400 ps a byte; the transform takes 95 ms.
    loader = workers(2, files=(CHUNKED,))
    assert cause_of(user=0.95, system=0.05, queue=0.0, read_ratio=4.0, loader=loader) is Cause.CPU


def test_decoding_in_workers_has_its_name() -> None:
    # Signature of gzip: user time, fewer bytes read than delivered, and the file says so.
    loader = workers(2, files=(replace(ROWS, filters=("gzip",)),))
    assert cause_of(**BUSY, read_ratio=0.5, loader=loader) is Cause.DECODE


def test_messages_between_processes_are_no_read_amplification() -> None:
    assert cause_of(batch=BatchFacts(num_samples=4, num_bytes=64), read_ratio=100.0) is not Cause.AMPLIFICATION


def test_readers_that_sleep_while_the_step_waits_most_of_the_time_are_not_ahead_of_it() -> None:
    # A queue that is empty half of the time is never full: whoever sleeps then waits for storage.
    assert cause_of(user=0.3, system=0.1, queue=0.0, steps=steps_of(0.5)) is Cause.DISK


# Missing counters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2, 6])
def test_readers_that_are_hardly_on_a_core_are_not_short_of_cores_or_busy(num_workers: int) -> None:
    # The kernel does not say how long they waited for a core; on one they were for 3 % of the time.
    cause = cause_of(user=0.02, system=0.01, queue=None, loader=workers(num_workers))
    assert cause in (Cause.DISK, Cause.LOADER)


def test_too_many_workers_are_told_by_their_time_on_cores_too() -> None:
    # Six of them on a core for a third of the time each: all of two cores.
    assert cause_of(user=0.2, system=0.13, queue=None, loader=workers(6)) is Cause.TOO_MANY_WORKERS


@pytest.mark.parametrize("loader", [INLINE, workers(1), workers(2), workers(16), OWN], ids=["0", "1", "2", "16", "own"])
def test_every_loader_on_every_machine_gets_a_verdict_with_each_counter_missing(loader: LoaderFacts) -> None:
    for base, cores, batch in itertools.product(
        (BUSY, KERNEL, ASLEEP), (0.5, 1.0, 2.0, 64.0), (UINT8, FLOATS, WIDENED, BatchFacts())
    ):
        whole = epoch_of(**base, loader=loader, cores=cores, batch=batch)
        usage = whole.readers
        assert usage is not None
        for counters in (
            whole,
            replace(whole, readers=None),
            replace(whole, main=None, training_thread=None),
            replace(whole, machine=replace(whole.machine, costs=None)),
            *[replace(whole, readers=replace(usage, **{name: None})) for name in ("queue_seconds", "read_bytes")],
            replace(whole, num_watched_steps=0, num_main_steps=0),
            EpochCounters(steps=whole.steps),
        ):
            verdict = judge(counters)
            assert verdict.cause not in INSIDE | {Cause.COMPUTE}
            assert verdict.wait_share == pytest.approx(0.6)
            assert verdict.figures


@settings(max_examples=80)
@given(EPOCHS)
def test_any_epoch_gets_a_verdict_that_holds_together(counters: EpochCounters) -> None:
    verdict = judge(counters)
    steps = counters.steps
    step, rest = steps.step_seconds, (steps.elapsed_seconds - steps.data_seconds) / steps.num_steps
    assert verdict.wait_share == steps.wait_share
    assert verdict.figures
    if verdict.wait_share < BOUND_SHARE:
        assert verdict.cause in INSIDE | {Cause.COMPUTE, Cause.START}
        assert verdict.free_echo_factor is None
    if verdict.cause is Cause.COMPUTE:
        assert verdict.cures == ()
    for cure in verdict.cures:
        assert math.isfinite(cure.gain)
        assert cure.low <= cure.gain <= cure.high
        # The first worker of a loader may cost 2 ms a batch where 0.5 ms are expected, so of steps of half a
        # millisecond it leaves a quarter of the speed at worst.
        assert cure.low > 0.25
        assert cure.gain > 1.0
        if verdict.cause in INSIDE or verdict.cause is Cause.START:
            continue
        # No loader gains more than what is left without waiting; on the host a training that queues for cores may.
        most = step / max(rest, 1e-9)
        assert cure.high <= min(100.0, most * (1.001 if steps.idle_seconds is not None else 5.001))
        assert cure.low <= most * 1.001


@pytest.mark.parametrize(
    "steps", [StepTotals(), StepTotals(num_steps=5), StepTotals(elapsed_seconds=3.0, wait_seconds=2.0)]
)
def test_without_a_step_nothing_is_claimed(steps: StepTotals) -> None:
    verdict = judge(epoch_of(steps=steps))
    assert (verdict.cause, verdict.wait_share, verdict.cures) == (Cause.COMPUTE, 0.0, ())
    assert verdict.notes == ("no step was measured",)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_slow_and_fast_machines_get_the_same_verdict(scale: float) -> None:
    costs = UnitCosts(4e-10 * scale, 1.2e-9 * scale, 1e-9 * scale)
    steps = steps_of(step_seconds=0.05 * scale)
    for user, system, queue, ratio, told, cause in SIGNATURES.values():
        if cause is not Cause.COMPUTE:
            verdict = judge(
                epoch_of(
                    user=user, system=system, queue=queue, read_ratio=ratio, **told | {"steps": steps, "costs": costs}
                )
            )
            assert verdict.cause is cause


# Ranks -----------------------------------------------------------------------------------------------------


def ranks(*waits: float) -> list[EpochCounters]:
    return [epoch_of(steps=steps_of(wait), rank=rank, num_ranks=len(waits)) for rank, wait in enumerate(waits)]


@pytest.mark.parametrize(
    ("waits", "worst"), [((0.1, 0.6, 0.2), 1), ((0.3,), 0), ((0.0, 0.0), 0), ((0.2, 0.5, 0.5), 1), ((0.7, 0.1), 0)]
)
def test_the_rank_that_waits_most_is_judged_and_of_equals_the_first(waits: tuple[float, ...], worst: int) -> None:
    together = ranks(*waits)
    chosen, others = worst_rank(together)
    assert chosen.rank == worst
    assert [one.rank for one in others] == [rank for rank in range(len(waits)) if rank != worst]
    assert worst_rank(together[::-1])[0].rank == worst


def test_a_rank_whose_device_has_work_while_it_waits_is_not_the_worst() -> None:
    busy = epoch_of(steps=steps_of(0.9, idle=0.1), rank=0, num_ranks=2)
    idle = epoch_of(steps=steps_of(0.4, idle=0.4), rank=1, num_ranks=2)
    assert worst_rank([busy, idle])[0] is idle


def test_the_others_are_mentioned() -> None:
    chosen, others = worst_rank(ranks(0.11, 0.6, 0.4))
    notes = " ".join(judge(chosen, others).notes)
    assert "Rank 1 of 3" in notes
    assert "11 %" in notes
    assert "40 %" in notes
    assert not any("Rank" in one for one in judge(chosen).notes)
