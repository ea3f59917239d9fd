from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.cli.bench_report import BenchReport, FeedRate, StepTrial, render_bench
from lightning_gpufeed.diagnose.counters import Usage
from lightning_gpufeed.diagnose.judgement import Cause, Cure, Verdict

WARM = FeedRate(60_000, 235, 47_040_000, 2.0, 0.01, is_complete=True, cached_share=1.0)
REPORT = BenchReport(
    path="train.h5",
    keys=("images", "labels"),
    num_samples=60_000,
    batch_size=256,
    shuffle="full",
    sample_bytes=784,
    engines=("images: raw (uncompressed)", "labels: read once and kept in memory"),
    is_decoded=False,
    first_pass=FeedRate(60_000, 235, 47_040_000, 4.0, 0.25, is_complete=True, cached_share=0.02),
    first_usage=Usage(wall_seconds=4.0, user_seconds=0.5, system_seconds=0.3, queue_seconds=0.0),
    feed=WARM,
    usage=Usage(wall_seconds=2.0, user_seconds=1.2, system_seconds=0.5, queue_seconds=0.1),
    read_ratio=0.0,
    copy_bytes_per_second=117.6e6,
    num_cores=2.0,
    verdict=Verdict(
        Cause.CPU,
        1.0,
        figures=("a batch takes a reader 7.2 ms on a core",),
        cures=(Cure("other files", "buy some", 2.0, 1.5, 2.5), Cure("luck", "hope", 1.01, 1.0, 1.02)),
    ),
    step=StepTrial(0.02, 0.001, False, 0.0085),
)


def test_a_report_reads_like_this():
    assert (
        render_bench(REPORT)
        == """\
train.h5
            images + labels: 60,000 samples of 784 B, shuffle full, batches of 256 (200.7 kB)
engine      images: raw (uncompressed)
            labels: read once and kept in memory
page cache  about 2 % in memory before

first pass  15,000 samples/s, 11.8 MB/s, in 4.0 s, first batch after 250.0 ms, cold, the reading
            thread was asleep 80 % of the time
rate        30,000 samples/s, 23.5 MB/s, measured for 2.0 s, from memory
batch       8.5 ms each, 235 of them
reader      one thread: 60 % in its own code, 25 % in the kernel, 5 % waiting for a core, 10 %
            asleep
bytes read  none by read calls: through a memory map, or kept in memory
bound       117.6 MB/s: a plain copy out of the page cache by one thread; 20 % of it is reached

limited by  copying samples on one core; a batch takes a reader 7.2 ms on a core
would help  other files 2.0x (1.5-2.5): buy some
step        a pretended step of 20.0 ms (it sleeps, and takes no core) waits less than 1 % of the
            time for data: the feed keeps up; a step of 8.5 ms or more does not wait"""
    )


def lines_with(**changes):
    """The lines of a report that are not those of the one above."""
    before = render_bench(REPORT).splitlines()
    return [line for line in render_bench(dataclasses.replace(REPORT, **changes)).splitlines() if line not in before]


def test_a_file_that_was_partly_in_memory_is_called_partly_cold():
    assert lines_with(first_pass=dataclasses.replace(REPORT.first_pass, cached_share=0.6)) == [
        "page cache  about 60 % in memory before",
        "first pass  15,000 samples/s, 11.8 MB/s, in 4.0 s, first batch after 250.0 ms, partly cold, the",
        "            reading thread was asleep 80 % of the time",
    ]


def test_a_first_pass_that_was_left_says_how_far_it_came():
    first = dataclasses.replace(WARM, num_samples=15_000, num_bytes=11_760_000, is_complete=False)
    found = lines_with(first_pass=first, feed=dataclasses.replace(WARM, cached_share=0.3), copy_bytes_per_second=None)
    said = " ".join(line.strip() for line in found)
    assert "in 2.0 s for 25 % of the samples, first batch after 10.0 ms rate" in said
    assert said.endswith("measured for 2.0 s, still the first pass, 30 % of the file in memory")


def test_bytes_read_by_calls_are_said_for_each_byte_delivered():
    assert lines_with(read_ratio=31.94) == ["bytes read  32 for each byte delivered"]


def test_a_reading_thread_that_has_to_wait_for_a_core_is_noted():
    usage = Usage(wall_seconds=2.0, user_seconds=0.8, system_seconds=0.2, queue_seconds=0.9)
    assert lines_with(usage=usage)[-2:] == [
        "note        the reading thread waits 45 % of the time for a core that something else keeps busy; on",
        "            a quiet machine the feed is faster",
    ]


def test_a_step_that_is_too_short_is_told_what_would_be_enough():
    step = StepTrial(0.001, 0.9, True, 0.0101)
    assert " ".join(line.strip() for line in lines_with(step=step)) == (
        "step        a pretended step of 1.0 ms (it sleeps, and takes no core) waits 90 % of the time for data: the "
        "feed is too slow for it; a step of 10.1 ms or more does not wait"
    )


def test_a_command_stands_in_one_piece_however_long_it_is():
    command = f"gpufeed pack {'/long' * 30}/train.h5 OUT.h5 --scale 255"
    assert lines_with(command=command) == [f"            {command}"]
    cure = Cure("chunk order", f"{command} once, and train on OUT.h5", 3.0, 2.0, 4.0)
    verdict = dataclasses.replace(REPORT.verdict, cures=(cure,))
    assert lines_with(command=command, verdict=verdict) == [
        "would help  chunk order 3.0x (2.0-4.0): run this command once, and train on OUT.h5",
        f"            {command}",
    ]


def test_where_nothing_helps_that_is_said():
    verdict = dataclasses.replace(REPORT.verdict, cures=REPORT.verdict.cures[1:])
    assert lines_with(verdict=verdict) == ["would help  nothing that is known"]


@pytest.mark.parametrize("cause", list(Cause))
@pytest.mark.parametrize("is_decoded", [True, False])
def test_no_limit_is_named_by_what_a_step_does(cause, is_decoded):
    limit = dataclasses.replace(REPORT, verdict=Verdict(cause, 1.0), is_decoded=is_decoded).limit
    assert limit
    possible = {Cause.CPU, Cause.DECODE, Cause.KERNEL, Cause.AMPLIFICATION, Cause.CONVERSION, Cause.DISK, Cause.LOADER}
    assert (limit == cause.value) == (cause not in possible)


def test_a_report_in_plain_values_holds_rates_and_shares_and_nothing_about_waiting():
    plain = json.loads(json.dumps(REPORT.as_dict()))
    assert plain["feed"]["samples_per_second"] == 30_000
    assert plain["first_pass"]["bytes_per_second"] == 11_760_000
    assert plain["usage"]["kernel_share"] == 0.25
    assert plain["first_usage"]["asleep_share"] == pytest.approx(0.8)
    assert (plain["bound_share"], plain["limit"]) == (0.2, "copying samples on one core")
    assert [cure["name"] for cure in plain["verdict"]["cures"]] == ["other files"]
    assert plain["step"]["shortest_seconds"] == 0.0085
    assert "wait_share" not in plain["verdict"]


seconds = st.just(0.0) | st.floats(1e-6, 1e4)  # less than that is nothing that a clock tells
counts = st.integers(0, 10**12)
maybe = st.none() | st.floats(0, 1)
rates = st.builds(FeedRate, counts, counts, counts, seconds, seconds, st.booleans(), maybe)
usages = st.none() | st.builds(
    Usage, st.floats(0.1, 1e4), seconds, seconds, st.none() | seconds, st.none() | counts, st.none() | counts
)
steps = st.none() | st.builds(StepTrial, seconds, st.floats(0, 1), st.booleans(), seconds)


@settings(max_examples=50)
@given(
    st.lists(st.from_regex(r"[a-z/_]{1,20}", fullmatch=True), min_size=1, max_size=9),
    st.tuples(rates, rates),
    st.tuples(usages, usages),
    st.tuples(st.none() | st.floats(0, 1e3), st.none() | st.floats(1.0, 1e12)),
    steps,
    st.sampled_from(list(Cause)),
)
def test_whatever_was_measured_fits_into_a_hundred_columns_and_into_json(keys, passes, usage, shares, step, cause):
    report = dataclasses.replace(
        REPORT,
        keys=tuple(keys),
        first_pass=passes[0],
        feed=passes[1],
        first_usage=usage[0],
        usage=usage[1],
        read_ratio=shares[0],
        copy_bytes_per_second=shares[1],
        step=step,
        verdict=dataclasses.replace(REPORT.verdict, cause=cause),
    )
    lines = render_bench(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)
    json.dumps(report.as_dict(), allow_nan=False)
