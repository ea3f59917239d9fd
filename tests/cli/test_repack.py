from __future__ import annotations

import inspect
import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from lightning_gpufeed.cli import repack as cli_repack
from lightning_gpufeed.hdf5.repack import inputs as repack_source
from lightning_gpufeed.hdf5.repack import repack as repack_module
from lightning_gpufeed.hdf5.repack.repack import RepackReport, repack
from tests.cli.commands import error_of, pixels, write_h5


def recorded(seen):
    def record(sources, out, **options):
        seen.update(options, sources=sources, out=out)
        return RepackReport(Path(out), {}, (), 0, None, 2000, 1000, 0.5)

    return record


def test_it_says_what_became_of_each_array(run):
    write_h5("in.h5", images=(pixels(60, 3, 8, 8), {"chunks": (60, 3, 5, 8)}), labels=np.arange(60), names=["ab"] * 60)
    code, out, err = run("repack", "in.h5", "out.h5", "--chunk-bytes", "2000")
    assert (code, err) == (0, "")
    assert re.fullmatch(
        r"out\.h5: [\d.]+ kB, before [\d.]+ kB, in \d+\.\d s\n"
        r"  images: \(60, 3, 8, 8\) uint8, chunks of 10 samples \(1\.9 kB\), before \(60, 3, 5, 8\)\n"
        r"  labels: \(60,\) int64, chunks of 60 samples \(480 B\)\n"
        r"  names: \(60,\) object, copied as it is\n"
        r"  12\.5 kB read back, every value as in the source\n",
        out.replace(str(Path.cwd()) + "/", ""),
    )


def test_several_files_are_joined(run):
    write_h5("a.h5", x=np.arange(5))
    write_h5("b.h5", x=np.arange(5, 8))
    assert run("repack", "a.h5", "b.h5", "out.h5")[0] == 0
    with h5py.File("out.h5") as h5_file:
        assert h5_file["x"][:].tolist() == list(range(8))


def test_every_option_reaches_the_function_in_its_own_type(run, monkeypatch):
    seen = {}
    monkeypatch.setattr(cli_repack, "repack", recorded(seen))
    words = "a.h5 b.h5 o.h5 --keys x,y --compress zstd --chunk-bytes 1000 --no-verify --no-resume --overwrite"
    assert run("repack", *words.split()) == (0, "o.h5: 1.0 kB, before 2.0 kB, in 0.5 s\n", "")
    assert callable(seen.pop("on_progress"))
    assert seen == {
        "sources": ["a.h5", "b.h5"],
        "out": "o.h5",
        "keys": ["x", "y"],
        "compress": "zstd",
        "chunk_bytes": 1000,
        "verify": False,
        "resume": False,
        "overwrite": True,
    }


def test_what_is_not_given_stays_at_the_default_of_the_function(run, monkeypatch):
    seen = {}
    monkeypatch.setattr(cli_repack, "repack", recorded(seen))
    run("repack", "a", "b")
    defaults = {name: one.default for name, one in inspect.signature(repack).parameters.items()}
    for name in ("sources", "out", "on_progress"):
        del defaults[name], seen[name]
    assert seen == defaults


def test_what_is_left_out_is_listed_on_stderr(run):
    with h5py.File("in.h5", "w") as h5_file:
        h5_file["a"] = np.arange(3)
        for number in range(14):
            h5_file["a"].attrs[f"see{number:02}"] = h5_file["a"].ref
    code, _, err = run("repack", "in.h5", "out.h5")
    assert code == 0
    assert err.count("\n") == 11
    assert err.startswith("gpufeed: left out: a@see00: refers to objects of the old file\n")
    assert err.endswith("gpufeed: left out: 4 more of the same kinds\n")


def test_what_cannot_be_repacked_is_one_sentence(run):
    write_h5("in.h5", table=np.zeros(4, dtype=[("i", "i4")]), x=np.arange(4))
    assert error_of(run, "repack", "in.h5", "out.h5").endswith("Leave them out with --keys x")
    assert "no such file" in error_of(run, "repack", "nope.h5", "out.h5")
    assert "see gpufeed repack --help" in error_of(run, "repack", "in.h5")


@pytest.mark.parametrize(("option", "advice"), [((), "the same command"), (("--no-resume",), "without --no-resume")])
def test_an_interruption_says_what_is_kept_and_how_to_go_on(run, monkeypatch, option, advice):
    monkeypatch.setattr(repack_source, "_BLOCK_BYTES", 1024)
    monkeypatch.setattr(repack_module, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(repack_module, "_PROGRESS_SECONDS", 0.0)
    write_h5("in.h5", x=pixels(100, 64))

    def stop(progress):
        if progress.rows_done >= 48:
            raise KeyboardInterrupt

    monkeypatch.setattr(
        cli_repack, "repack", lambda *given, **options: repack(*given, **{**options, "on_progress": stop})
    )
    code, out, err = run("repack", "in.h5", "out.h5", *option)
    assert (code, out) == (130, "")
    assert re.search(rf"out\.h5\.partial keeps 48 samples, and .*{advice} goes on from there", err)
    monkeypatch.undo()
