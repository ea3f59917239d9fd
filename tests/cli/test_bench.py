from __future__ import annotations

import json
import os
import pkgutil
import re
import signal
import subprocess
import threading
import time
import tomllib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.cli import bench, main
from lightning_gpufeed.cli.bench import bench_file
from lightning_gpufeed.diagnose.judgement import Cause
from lightning_gpufeed.diagnose.verdict import BOUND_SHARE
from lightning_gpufeed.hdf5.order import FullShuffle, NoShuffle, WindowShuffle
from lightning_gpufeed.hdf5.report import bytes_text
from tests.cli.commands import ROOT, error_of, pixels, start, write_h5

SHORT = ("--seconds", "0.15")


# A first pass goes on to its end once more than half of the file was read: here with the first batch of 256, so that
# it is complete however slow the machine is.


def write_raw(path="raw.h5", num_samples=400):
    write_h5(path, images=pixels(num_samples, 3, 32, 32), labels=np.arange(num_samples) % 10)


@pytest.fixture(autouse=True)
def _keeps_nothing_decoded(monkeypatch):
    """Small files stand for large ones, of which a chunk is decoded again for nearly every sample."""
    monkeypatch.setattr("lightning_gpufeed.hdf5.source._CACHE_BYTES", 0)


def write_gzip(path="gzip.h5", num_samples=400, rows=50):
    options = {"chunks": (rows, 3, 32, 32), "compression": "gzip"}
    write_h5(path, images=(pixels(num_samples, 3, 32, 32), options), labels=np.arange(num_samples) % 10)


def report_of(run, *argv):
    code, out, err = run("bench", *argv, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def unwrapped(out):
    """The lines of a report, each with those that go on with it."""
    return re.sub(r"\n {12}(?=\S)", " ", out)


# -- what is said


def test_the_rate_what_limits_it_and_the_bound_are_printed(run):
    write_raw()
    code, out, err = run("bench", "raw.h5", "--seconds", "0.4")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == [
        "raw.h5",
        "            images + labels: 400 samples of 3.1 kB, shuffle full, batches of 256 (788.5 kB)",
    ]
    labels = [line[:12].strip() for line in lines[2:] if line[:12].strip()]
    needed = ["engine", "page cache", "first pass", "rate", "batch", "reader", "bytes read", "bound", "limited by"]
    assert [label for label in labels if label in needed] == needed
    assert re.search(r"^rate        [\d,]+ samples/s, [\d.]+ [MG]B/s, measured for [\d.]+ \w+, .*memory$", out, re.M)
    assert re.search(r"^batch       [\d.]+ (us|ms) each, [\d,]+ of them$", out, re.M)
    assert re.search(r"^bound       [\d.]+ [MG]B/s: a plain copy out of the page cache by one thread; ", out, re.M)
    assert "would help" in labels
    assert max(map(len, lines)) <= 100


def test_without_a_step_nothing_is_said_about_a_step_that_waits(run):
    write_raw()
    out = run("bench", "raw.h5", *SHORT)[1]
    assert "step" not in out
    report = report_of(run, "raw.h5", *SHORT)
    assert report["step"] is None
    assert not {"wait_share", "free_echo_factor"} & report["verdict"].keys()


def test_the_report_as_json_agrees_with_itself(run):
    write_raw()
    report = report_of(run, "raw.h5", "--seconds", "0.4", "--batch-size", "220", "--keys", "images")
    assert (report["path"], report["keys"], report["num_samples"]) == ("raw.h5", ["images"], 400)
    assert (report["batch_size"], report["sample_bytes"], report["shuffle"]) == (220, 3072, "full")
    feed = report["feed"]
    assert feed["num_samples"] == 220 * feed["num_batches"]
    assert feed["num_bytes"] == 3072 * feed["num_samples"]
    assert feed["samples_per_second"] == pytest.approx(feed["num_samples"] / feed["seconds"])
    assert feed["batch_seconds"] == pytest.approx(feed["seconds"] / feed["num_batches"])
    assert report["bound_share"] == pytest.approx(feed["bytes_per_second"] / report["copy_bytes_per_second"])
    assert report["read_ratio"] < 0.1  # gathered from the mapped file, without a read call
    shares = [report["usage"][f"{name}_share"] for name in ("user", "kernel", "queue", "asleep")]
    # What was waited for is read a moment after the time on a core, so the sum is one only nearly.
    assert sum(shares) == pytest.approx(1, abs=0.15)


def test_rows_of_chunks_read_in_random_order_are_told_by_their_layout(run):
    write_gzip()
    code, out, err = run("bench", "gzip.h5", *SHORT)
    assert code == 0
    assert re.fullmatch(r"gpufeed: warning: a full shuffle decodes a whole chunk for nearly every sample[^\n]+\n", err)
    assert "\nlimited by  whole chunks decoded for single samples; " in unwrapped(out)
    assert f"            gpufeed repack {Path('gzip.h5').absolute()} OUT.h5" in out.splitlines()


def test_after_the_advice_was_followed_there_is_none_left():
    write_gzip()
    advised = bench_file("gzip.h5", shuffle="window", seconds=0.1).command
    assert main([*advised.split()[1:]]) == 0
    after = bench_file("OUT.h5", seconds=0.1)
    assert after.command is None
    assert not after.is_decoded
    assert after.verdict.cause is not Cause.AMPLIFICATION


def test_chunks_read_in_a_window_are_limited_by_decoding_them():
    write_gzip()
    report = bench_file("gzip.h5", shuffle="window:256", seconds=0.4)
    assert (report.shuffle, report.is_decoded) == ("window:256", True)
    assert report.limit == "decoding on one core"
    assert report.verdict.cause is Cause.DECODE


def test_a_feed_that_has_no_transform_is_not_told_to_move_it(run):
    write_raw("tiny.h5", num_samples=20)  # so small that the work beside copying counts
    assert "transform" not in run("bench", "tiny.h5", *SHORT)[1]


def test_small_rows_that_are_kept_in_memory_are_not_called_amplified():
    table = np.random.default_rng(0).normal(size=(5000, 8)).astype(np.float32)
    write_h5("table.h5", x=(table, {"chunks": (500, 8), "compression": "gzip"}))
    report = bench_file("table.h5", seconds=0.1)
    assert report.engines == ("x: read once and kept in memory",)
    assert report.limit != "whole chunks decoded for single samples"


# -- what is fed


@pytest.mark.parametrize(("shuffle", "name"), [("full", "full"), ("window", "window:4096"), ("none", "none")])
def test_the_first_pass_takes_every_sample_once_and_the_feed_goes_on_in_the_same_order(shuffle, name):
    write_raw(num_samples=300)
    report = bench_file("raw.h5", shuffle=shuffle, batch_size=160, seconds=0.05)
    assert (report.first_pass.num_samples, report.first_pass.num_batches) == (300, 2)
    assert report.first_pass.is_complete
    assert report.shuffle == name
    assert report.feed.num_samples == 160 * report.feed.num_batches


@given(
    st.sampled_from([FullShuffle(), WindowShuffle(7), NoShuffle()]),
    st.integers(1, 60),
    st.integers(1, 1000),
)
def test_epochs_in_a_row_are_whole_and_each_has_every_sample_once(shuffle, num_samples, at_least):
    order = bench._many_epochs(shuffle, num_samples, at_least)
    epochs = order.reshape(-1, num_samples)
    assert at_least <= len(order)
    assert (np.sort(epochs) == np.arange(num_samples)).all()
    np.testing.assert_array_equal(epochs[0], shuffle.permutation(num_samples, 0, 1))


def test_a_file_of_one_sample_is_fed_in_batches_of_one(run):
    write_h5("one.h5", x=pixels(1, 3, 32, 32))
    report = report_of(run, "one.h5", "--seconds", "0.1")
    assert (report["batch_size"], report["first_pass"]["num_samples"]) == (1, 1)
    assert report["feed"]["num_samples"] == report["feed"]["num_batches"] > 1


def test_a_file_smaller_than_a_batch_is_fed_whole_and_without_a_warning(run):
    write_raw(num_samples=30)
    report = report_of(run, "raw.h5", "--seconds", "0.05")
    assert (report["batch_size"], report["first_pass"]["num_batches"]) == (30, 1)


def test_the_largest_array_and_what_belongs_to_it_are_fed(run):
    write_h5(
        "splits.h5",
        x_train=pixels(90, 9, 9),
        y_train=np.arange(90) % 3,
        x_test=pixels(40, 9, 9),
        y_test=np.arange(40) % 3,
        names=["name"] * 90,
        mean=np.float32(0.5),
    )
    assert report_of(run, "splits.h5", "--seconds", "0.05")["keys"] == ["x_train", "y_train"]
    chosen = report_of(run, "splits.h5", "--seconds", "0.05", "--keys", "y_test,x_test")
    assert (chosen["keys"], chosen["num_samples"]) == (["y_test", "x_test"], 40)


def test_text_beside_numbers_is_fed_too(run):
    write_h5("named.h5", images=pixels(90, 9, 9), names=["name"] * 90)
    report = report_of(run, "named.h5", "--seconds", "0.05")
    assert (report["keys"], report["sample_bytes"]) == (["images", "names"], 81)


def test_a_first_pass_that_takes_too_long_is_left_in_its_middle(run):
    write_raw(num_samples=6000)
    out = run("bench", "raw.h5", "--seconds", "0.0001", "--batch-size", "4")[1]
    report = bench_file("raw.h5", seconds=0.0001, batch_size=4)
    assert not report.first_pass.is_complete
    assert report.first_pass.num_samples < 3000  # more than half of them would have been read to the end
    assert 1 <= report.feed.num_batches < 1000
    assert re.search(r"^first pass .* of the samples, first batch after ", unwrapped(out), re.M)


def evict(path):
    """Drop a file from the page cache."""
    for _ in range(20):
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        time.sleep(0.01)  # a page that a processor still has in its own list stays at the first try


def test_a_first_pass_from_storage_is_kept_apart():
    write_raw(num_samples=4000)
    evict("raw.h5")
    report = bench_file("raw.h5", batch_size=2100, seconds=0.3)
    before, after = report.first_pass.cached_share, report.feed.cached_share
    if before is None or before > 0.5:
        pytest.skip("this file system keeps its pages, or does not tell")
    assert report.first_pass.is_complete
    assert after > before
    assert report.copy_bytes_per_second is not None


# -- a pretended step


def test_a_step_that_is_longer_than_a_batch_takes_does_not_wait(run):
    write_raw(num_samples=100)
    # Long against what a busy machine lets a thread wait for a core.
    report = bench_file("raw.h5", batch_size=10, seconds=0.6, step_seconds=0.15)
    assert report.step is not None
    assert not report.step.has_waited
    assert report.step.shortest_seconds <= 0.15
    out = run("bench", "raw.h5", "--batch-size", "10", "--seconds", "0.6", "--step-ms", "150")[1]
    [said] = re.findall(r"^step +(.*)", unwrapped(out), re.M)
    assert re.fullmatch(
        r"a pretended step of 150\.0 ms \(it sleeps, and takes no core\) waits .* of the time for data: "
        r"the feed keeps up; a step of .* or more does not wait",
        said,
    )


def test_a_step_that_is_shorter_than_a_batch_takes_waits():
    # A batch of this file is tens of milliseconds of work, far more than a busy machine lets a short sleep last.
    write_gzip(num_samples=1200)
    report = bench_file("gzip.h5", shuffle="window", batch_size=1200, seconds=0.6, step_seconds=0.0001)
    assert report.step is not None
    assert report.step.has_waited
    assert report.step.wait_share >= BOUND_SHARE
    assert report.step.shortest_seconds > 0.0001


# -- what cannot be done


def test_a_missing_file_is_one_line(run, folder):
    assert error_of(run, "bench", "none.h5") == (
        f"none.h5: no such file: expected an HDF5 file; the current directory is {folder}"
    )


def test_a_file_that_is_not_hdf5_is_one_line(run):
    Path("text.h5").write_text("plain text")
    assert error_of(run, "bench", "text.h5").startswith("text.h5 is not an HDF5 file: 10 bytes")


def test_text_alone_is_refused(run):
    write_h5("text.h5", names=["a", "b"] * 20)
    assert error_of(run, "bench", "text.h5") == (
        "text.h5: 'names' is text or of varying length, and no number goes with it; expected at least one array of "
        "numbers. Name others with --keys."
    )


@pytest.mark.parametrize(("arrays", "text"), [({}, "no datasets in it"), ({"x": pixels(0, 3)}, "holds no samples")])
def test_a_file_without_samples_is_refused(run, arrays, text):
    write_h5("empty.h5", **arrays)
    assert text in error_of(run, "bench", "empty.h5")


def test_a_key_that_is_not_there_is_one_line(run):
    write_raw(num_samples=10)
    assert "no dataset 'pictures'" in error_of(run, "bench", "raw.h5", "--keys", "pictures")


def test_a_damaged_chunk_is_one_line_and_nothing_stays_open(run):
    write_gzip(num_samples=400)
    with h5py.File("gzip.h5") as h5_file:
        stored = h5_file["images"].id.get_chunk_info(3)
    with open("gzip.h5", "r+b") as file:
        file.seek(stored.byte_offset)
        file.write(b"\0" * 16)
    assert "gzip.h5" in error_of(run, "bench", "gzip.h5", "--shuffle", "none", *SHORT)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--batch-size", "0", "batch_size is 0; expected at least 1."),
        ("--batch-size", "many", "argument --batch-size: 'many' is not a whole number; see gpufeed bench --help"),
        ("--seconds", "0", "seconds is 0; expected a number of seconds above 0."),
        ("--seconds", "nan", "seconds is nan; expected a number of seconds above 0."),
        ("--step-ms", "-1", "the step is -1 ms; expected a number of milliseconds, 0 or more."),
        ("--step-ms", "inf", "the step is inf ms; expected a number of milliseconds, 0 or more."),
        (
            "--shuffle",
            "window:0",
            "argument --shuffle: 'window:0' is no order; expected full, window, window:N with N samples as "
            "window:4096, or none; see gpufeed bench --help",
        ),
    ],
)
def test_numbers_that_make_no_sense_are_one_line(run, option, value, text):
    write_raw(num_samples=10)
    assert error_of(run, "bench", "raw.h5", f"{option}={value}") == text


def test_ctrl_c_ends_the_reading_thread_too(run):
    write_raw()
    is_pressed = threading.Event()

    def interrupt(_, frame):
        # Only where the feed is waited for. Elsewhere it may be in a weak reference's callback, such as that of a
        # batch's memory, where Python drops any exception; whoever presses Ctrl-C presses it again then.
        if (frame.f_code.co_name, frame.f_back.f_code.co_name) == ("wait", "wait_for") and not is_pressed.is_set():
            is_pressed.set()
            raise KeyboardInterrupt

    def press():
        while not is_pressed.wait(0.001):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    finger = threading.Thread(target=press)
    finger.start()
    try:
        assert run("bench", "raw.h5", "--seconds", "60") == (130, "", "gpufeed: interrupted\n")
    finally:
        is_pressed.set()
        finger.join()
        signal.signal(signal.SIGINT, before)


# -- as a program


def test_the_installed_script_is_this_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {name: pkgutil.resolve_name(target) for name, target in scripts.items()} == {"gpufeed": main}


INSPECT_THEN_BENCH = """
import sys
from lightning_gpufeed.cli import main

code = main(["inspect", "raw.h5", "--probe-seconds", "0"])
print("lightning" in sys.modules, file=sys.stderr)
sys.exit(code or main(["bench", "raw.h5", *sys.argv[1:]]))
"""


def test_as_a_program_only_bench_brings_lightning_along(thin):
    write_raw()
    options = {"path": thin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start(*SHORT, script=INSPECT_THEN_BENCH, **options) as process:
        out, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, "False\n")
    assert re.search(r"^rate        [\d,]+ samples/s, .*\n+batch ", out, re.M)
    assert f"shuffle full, batches of 256 ({bytes_text(256 * 3080)})" in out
