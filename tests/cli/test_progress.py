from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np

from lightning_gpufeed.cli import progress
from lightning_gpufeed.hdf5.journal import Journal
from lightning_gpufeed.hdf5.writer import PackProgress
from tests.cli.commands import start


class Clock:
    """Time that goes on when a test says so."""

    now = 100.0

    def monotonic(self):
        return self.now


def test_rates_leave_out_what_an_interrupted_run_had_done(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    pace = progress._Pace()
    assert pace.text(PackProgress(40_000, 100_000, 40_000_000)) == ""
    clock.now += 2
    assert pace.text(PackProgress(60_000, 100_000, 60_000_000)) == "10,000 samples/s, 10.0 MB/s, 0:00:04 left"
    clock.now += 3598
    assert pace.text(PackProgress(76_000, 100_000, 76_000_000)) == "10 samples/s, 10.0 kB/s, 0:40:00 left"


def test_rates_begin_anew_after_the_values_were_scanned(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    pace = progress._Pace()
    pace.text(PackProgress(0, 1000, 0, "scanning"))
    clock.now += 1
    assert pace.text(PackProgress(500, 1000, 0, "scanning")) == "500 samples/s, 0:00:01 left"
    assert pace.text(PackProgress(0, 1000, 0)) == ""
    clock.now += 2
    assert pace.text(PackProgress(100, 1000, 5000)) == "50 samples/s, 2.5 kB/s, 0:00:18 left"


def test_without_a_terminal_a_line_comes_every_five_seconds(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    with progress.show_progress() as show:
        for second in range(12):
            clock.now = 100.0 + second
            show(PackProgress(second * 1000, 20_000, second * 10**6))
    assert capsys.readouterr().err.splitlines() == [
        "gpufeed: writing 5,000 of 20,000 samples, 1,000 samples/s, 1.0 MB/s, 0:00:15 left",
        "gpufeed: writing 10,000 of 20,000 samples, 1,000 samples/s, 1.0 MB/s, 0:00:10 left",
    ]


SLOW_DATASET = """
import os, time
import numpy as np

class Slow:
    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(float(os.environ["PAUSE_SECONDS"]))
        return np.full((512, 512), index % 256, np.uint8), index % 10
"""


def read_terminal(terminal):
    """Everything that a process writes to a terminal until it ends."""
    found = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        found += part
    return found.decode()


def test_on_a_terminal_a_bar_shows_rate_and_time_left(thin):
    Path("slow.py").write_text(SLOW_DATASET)
    own, its = pty.openpty()
    with start(
        "pack", "slow:Slow", "out.h5", pause_seconds=0.003, path=thin, stdout=subprocess.PIPE, stderr=its
    ) as process:
        os.close(its)
        shown = read_terminal(own)
        os.close(own)
        out = process.stdout.read().decode()
    assert process.returncode == 0
    assert "━" in shown
    assert re.search(r"writing.*samples/s, .*[kM]B/s, 0:00:0\d left", shown, re.DOTALL)
    assert out.startswith("out.h5: 640 samples, ")


def test_an_interrupted_pack_keeps_what_it_has_and_the_same_command_goes_on(thin):
    options = {"path": thin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    Path("slow.py").write_text(SLOW_DATASET)
    command = ("pack", "slow:Slow", "out.h5")
    with start(*command, pause_seconds=0.008, **options) as process:
        deadline = time.monotonic() + 60
        while not (journal := Journal.load(Path("out.h5.partial.json"))) or not journal.position:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, ""), err
    assert re.fullmatch(
        r"gpufeed: interrupted; out\.h5\.partial keeps \d+ samples, and the same command goes on from there",
        err.splitlines()[-1],
    )
    assert "Traceback" not in err
    assert not Path("out.h5").exists()
    with start(*command, **options) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert re.match(r"out\.h5: 640 samples, .*, going on after \d+ that an interrupted run had dealt with\n", out)
    with h5py.File("out.h5") as h5_file:
        np.testing.assert_array_equal(h5_file["images"][:, 0, 0], np.arange(640) % 256)
