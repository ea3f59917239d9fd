"""The words: one line, whole sentences, singular and plural, and nothing that only a programmer reads."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.diagnose.counters import BatchFacts, EpochCounters, LoaderFacts, StepTotals, Usage
from lightning_gpufeed.diagnose.figures import duration, line, percent, readers_name
from lightning_gpufeed.diagnose.verdict import judge
from tests.diagnose.feeds import CHUNKED, COMPRESSED, EPOCHS, OWN, ROWS, WIDENED, epoch_of, steps_of, workers

INLINE, THREAD = workers(0), replace(workers(0), has_thread=True)
LOADERS = [INLINE, THREAD, workers(1), workers(2), workers(16), OWN, replace(OWN, files=(COMPRESSED,))]


def line_of(**told: Any) -> str:
    counters = epoch_of(**told)
    return line(counters, judge(counters))


# Numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.63, "63 %"),
        (1.0, "100 %"),
        (0.0049, "less than 1 %"),
        (1e-300, "less than 1 %"),
        (0.006, "1 %"),
    ],
)
def test_a_share_reads_as_whole_percents(share: float, text: str) -> None:
    assert percent(share) == text


@given(st.floats(0, 1))
def test_a_share_that_is_not_nothing_does_not_read_as_nothing(share: float) -> None:
    assert re.fullmatch(r"(less than )?\d{1,3} %", percent(share))
    assert (percent(share) == "0 %") == (share in (0, 0.005))  # the one number that rounds to nothing


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (4e-7, "0 us"),
        (0.000_25, "250 us"),
        (0.0123, "12.3 ms"),
        (0.25, "250.0 ms"),
        (1.0, "1.0 s"),
        (75.44, "75.4 s"),
    ],
)
def test_a_time_reads_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e5))
def test_no_time_reads_as_a_thousand_of_a_unit_that_has_a_larger_one(seconds: float) -> None:
    number, unit = duration(seconds).split()
    assert unit == "s" or float(number) <= 1000


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (INLINE, "the training process"),
        (THREAD, "the reading thread"),
        (OWN, "the reading thread"),
        (workers(1), "the loader's worker"),
        (workers(2), "loader workers"),
        (replace(workers(2), has_thread=True), "loader workers"),  # the thread only hands on
    ],
)
def test_who_loads_has_a_name(loader: LoaderFacts, name: str) -> None:
    assert readers_name(EpochCounters(loader=loader)) == name


# Whole lines -----------------------------------------------------------------------------------------------


UNREADABLE = {
    "an empty stop": r"(?<!\.)\.\.(?!\.)|\. \.|; ;|: ;|, ,| [.,;](?!item)",
    "two blanks": r"  ",
    "a value of Python": r"\bNone\b|\bnan\b|\binf\b|(?<!=)\bTrue\b|\bFalse\b|Cause\.|<",
    "a number for programmers": r"\d[eE][+-]?\d\d",
    "a choice of endings": r"\(s\)|\(es\)",
    "plural of one": r"\b1(\.0)? (bytes|workers|samples|pages|cores|steps|ranks|epochs|threads)\b(?! (is|are) read)",
    "singular of several": r"\b(?!1 )\d+ (worker|core|page|sample)\b",
    "a verb for several": r"(the loader's worker|the reading thread|the training process) (are|have|read|spend|wait)\b",
    "a verb for one": r"loader workers (is|has|reads|spends|waits)\b",
    "a list of nothing": r"chunks of [,;.]|chunks of $",
    "a percentage out of range": r"-\d+ %|\b1\d\d\d* %(?<!100 %)",
}


def faults_of(text: str) -> list[str]:
    return [f"{name}: {found.group()!r}" for name, one in UNREADABLE.items() if (found := re.search(one, text))]


def assert_readable(counters: EpochCounters, others: tuple[EpochCounters, ...] = ()) -> None:
    verdict = judge(counters, others)
    text = line(counters, verdict)
    # e <= R is the one formula.
    assert faults_of(text.replace("e <= ", "e ")) == [], text
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    assert text.endswith(".")
    assert not text.endswith("..")
    if counters.steps.num_steps:
        assert text.startswith(f"{verdict.cause}: ")
    for sentence in (*verdict.figures, *verdict.notes, *(cure.action for cure in verdict.cures)):
        assert sentence == sentence.strip()
        assert sentence
        assert not sentence.endswith((".", ",", ";", ":"))
    for note in verdict.notes:
        assert note[0].isupper() or note[0].isdigit() or note.startswith("less than"), note


@settings(max_examples=80)
@given(EPOCHS)
def test_any_verdict_reads_as_one_line(counters: EpochCounters) -> None:
    assert_readable(counters)


SHARES = [(0.8, 0.15, 0.05), (0.1, 0.85, 0.05), (0.02, 0.03, 0.0), (0.1, 0.1, 0.8), (0.2, 0.2, None)]


@pytest.mark.parametrize("loader", LOADERS, ids=["none", "thread", "1", "2", "16", "own", "own, gzip"])
def test_verbs_go_with_one_reader_and_with_several(loader: LoaderFacts) -> None:
    pages = {"major_faults": 1}
    for user, system, queue in SHARES:
        for wait in (0.01, 0.07, 0.15, 0.6):
            for ratio, batch in [(1.0, None), (32.0, None), (0.25, WIDENED), (0.06, None)]:
                for cores in (1.0, 2.0, 8.0):
                    told = {} if batch is None else {"batch": batch}
                    counters = epoch_of(
                        user=user,
                        system=system,
                        queue=queue,
                        read_ratio=ratio,
                        loader=loader,
                        cores=cores,
                        steps=steps_of(wait),
                        **told,
                    )
                    usage = counters.readers
                    assert usage is not None
                    assert_readable(counters)
                    assert_readable(replace(counters, readers=replace(usage, **pages), is_first=True))
                    assert_readable(replace(counters, readers=None))


@pytest.mark.parametrize(
    "file",
    [
        CHUNKED,
        COMPRESSED,
        replace(ROWS, filters=("shuffle", "gzip")),
        replace(ROWS, filters=("gzip",), chunk_shape=None, key=None, dtype=None),
        replace(CHUNKED, path="/data/two\nlines and a \x1b[31mcolour", command=None),
        replace(CHUNKED, path="/data/" + "long/" * 100 + "x.h5"),
    ],
    ids=["chunked", "gzip", "one per chunk", "unknown layout", "odd path", "long path"],
)
def test_any_file_can_be_named_in_a_line(file) -> None:
    for loader in (workers(2, files=(file,)), replace(OWN, files=(replace(file, order="full"),))):
        for cached in (None, 0.0, 0.5, 1.0):
            files = tuple(replace(one, cached_share=cached) for one in loader.files)
            for ratio in (0.5, 32.0):
                assert_readable(
                    epoch_of(
                        user=0.8,
                        system=0.15,
                        queue=0.0,
                        read_ratio=ratio,
                        is_first=True,
                        loader=replace(loader, files=files),
                    )
                )


def test_a_line_says_cause_wait_figures_cures_echo_and_the_first_thing_to_do() -> None:
    text = line_of(user=0.04, system=0.49, queue=0.45, read_ratio=31.9, loader=workers(2, files=(CHUNKED,)))
    assert text.startswith(
        "read amplification: the step waits 60 % of the time for data; loader workers read 31.9 bytes for each byte "
        "delivered; data/train.h5 images: chunks of 32x3x224x224, 32 samples each; 92 % of the reading time is the "
        "kernel's. Predicted: H5DataModule "
    )
    assert ", BatchEcho e <= 2.5 is free. First: H5DataModule on data/train.h5" in text


def test_a_step_that_only_computes_has_nothing_to_gain() -> None:
    assert line_of(steps=steps_of(0.01)) == (
        "compute-bound: waits 1 % of the time for data; nothing to gain in the loader."
    )


@pytest.mark.parametrize("steps", [StepTotals(), StepTotals(num_steps=5), StepTotals(elapsed_seconds=1.0)])
def test_of_no_step_nothing_else_is_said(steps: StepTotals) -> None:
    assert line_of(steps=steps) == "no step was measured."


@pytest.mark.parametrize(
    ("wait", "idle", "is_named"), [(0.04, None, False), (0.06, None, False), (0.2, None, True), (0.9, 0.02, False)]
)
def test_echo_is_named_where_it_fills_a_tenth_of_a_step_or_more(wait, idle, is_named) -> None:
    assert ("BatchEcho" in line_of(user=0.8, system=0.2, queue=0.0, steps=steps_of(wait, idle=idle))) is is_named


# Figures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"steps": steps_of(0.0, copy=0.4)}, ["40 % of the step", "9.6 MB", "pageable"]),
        ({"steps": steps_of(0.0, hooks=0.4)}, ["between the steps takes 40 %"]),
        ({"steps": steps_of(0.0, idle=0.4)}, ["device has nothing to do 40 %"]),
        ({"steps": steps_of(0.0, sync_seconds=5.0), "num_ranks": 2}, ["25 %", "Lightning's own question"]),
        (
            {"steps": steps_of(0.0, sync_seconds=0.1, compute_cpu_seconds=10.0), "num_ranks": 2},
            ["wait for each other 50 %"],
        ),
        ({"user": 0.1, "system": 0.1, "queue": 0.8, "loader": workers(6)}, ["6 workers share 2 cores", "80 %"]),
        ({"user": 0.1, "system": 0.1, "queue": 0.8, "loader": workers(4), "cores": 1.0}, ["share 1 core;"]),
        ({"user": 0.8, "system": 0.1, "queue": 0.1, "loader": workers(1)}, ["1 worker on 2 cores", "90 %"]),
        ({"loader": INLINE}, ["between the steps", "on 1 of 2 cores"]),
        ({"user": 0.0, "system": 0.1, "queue": 0.0}, ["asleep 90 %"]),
        (
            {"user": 0.1, "system": 0.8, "queue": 0.1, "batch": WIDENED, "read_ratio": 0.25},
            ["100 % of the bytes", "38.5 MB", "9.6 MB"],
        ),
        ({"readers": None}, ["loader workers could not be watched"]),
        ({"readers": None, "loader": workers(1)}, ["the loader's worker could not be watched"]),
        (
            {
                "loader": replace(workers(1, start_method="spawn"), is_persistent=False),
                "start_seconds": 20.0,
                "steps": steps_of(0.02),
            },
            ["starting 1 worker (spawn) takes 20.0 s", "50 %"],
        ),
    ],
)
def test_the_figures_that_decided_are_named(told: dict[str, Any], words: list[str]) -> None:
    text = line_of(**told)
    assert [word for word in words if word not in text] == [], text


def test_what_the_host_does_besides_asking_the_ranks_is_named_apart() -> None:
    # Of 50 % idle time of the device, 8 % go by in Lightning's question to the ranks.
    text = line_of(steps=steps_of(0.0, idle=0.5, sync_seconds=1.6), num_ranks=2)
    assert "nothing to do 42 %" in text


# Notes -----------------------------------------------------------------------------------------------------


def test_the_first_epoch_is_said_to_be_cold() -> None:
    assert "First epoch: files may come from storage" in line_of(is_first=True)
    cold = workers(2, files=(replace(ROWS, cached_share=0.25),))
    assert "75 % of data/rows.h5 was not in memory" in line_of(is_first=True, loader=cold)
    assert "First epoch" not in line_of(loader=cold)
    assert "First epoch" not in line_of(is_first=True, steps=steps_of(0.01))


def test_other_processes_on_the_cores_are_noticed() -> None:
    note = "Other processes keep about 1.5 of 2 cores busy"
    assert note in line_of(user=0.1, system=0.1, queue=0.8)
    assert "Other processes" not in line_of(user=0.1, system=0.1, queue=0.0)


@pytest.mark.parametrize(
    ("waits", "words"),
    [((0.11,), "wait 11 % for their own"), ((0.11, 0.11), "wait 11 % for"), ((0.0, 0.4), "wait 0 % to 40 % for")],
)
def test_a_range_over_the_other_ranks_is_one_only_if_they_differ(waits: tuple[float, ...], words: str) -> None:
    counters = epoch_of(num_ranks=1 + len(waits))
    others = tuple(
        epoch_of(steps=steps_of(wait), rank=1 + rank, num_ranks=1 + len(waits)) for rank, wait in enumerate(waits)
    )
    assert_readable(counters, others)
    assert words in line(counters, judge(counters, others))


def on_gpu(wait: float = 0.01, **memory: Any) -> str:
    counters = epoch_of(steps=steps_of(wait, idle=wait))
    return line(counters, judge(replace(counters, machine=replace(counters.machine, **memory))))


GB = 10**9


def test_memory_of_the_device_that_runs_out_or_is_left_is_noticed() -> None:
    full = {"device_free_bytes": 2 * GB, "device_total_bytes": 80 * GB, "device_peak_bytes": 78 * GB}
    assert "2 % of the device's memory is free: OOMRecovery()" in on_gpu(**full)
    assert "OOMRecovery()" in on_gpu(wait=0.6, **full)
    spare = {"device_free_bytes": 60 * GB, "device_total_bytes": 80 * GB, "device_peak_bytes": 20 * GB}
    assert "Tensors take 25 % of the device's memory" in on_gpu(**spare)
    assert "larger batch" not in on_gpu(wait=0.6, **spare)  # what a loader cannot feed is not made larger


@pytest.mark.parametrize("missing", ["device_free_bytes", "device_total_bytes", "device_peak_bytes"])
def test_memory_of_the_device_that_is_not_known_is_not_talked_about(missing: str) -> None:
    told = {"device_free_bytes": 0, "device_total_bytes": 80 * GB, "device_peak_bytes": 0} | {missing: None}
    text = on_gpu(**told)
    assert ("OOMRecovery" in text) is (missing == "device_peak_bytes")


def test_kernels_that_leave_the_device_idle_are_noticed() -> None:
    assert "A kernel runs on the device only 30 % of the time" in on_gpu(device_utilisation=0.3)
    assert "A kernel runs" in on_gpu(device_utilisation=0.0)
    for utilisation in (None, 0.9):
        assert "A kernel runs" not in on_gpu(device_utilisation=utilisation)


def test_a_batch_without_tensors_is_no_hindrance() -> None:
    assert_readable(epoch_of(batch=BatchFacts(), readers=Usage(wall_seconds=1.0, user_seconds=1.0)))
