from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.cli.commands import error_of, pixels, write_h5


def test_a_sound_file_ends_with_code_0_and_a_list_of_what_is_good(run):
    write_h5("x.h5", images=pixels(40, 8, 8))
    code, out, err = run("doctor", "x.h5")
    assert (code, err) == (0, "")
    assert out.startswith("x.h5\nok        locking: ")


def test_a_warning_ends_with_code_1_and_the_line_that_cures_it(run):
    write_h5("x.h5", images=(pixels(100, 3, 65, 65), {"chunks": (50, 3, 64, 64)}))
    code, out, err = run("doctor", "x.h5")
    assert (code, err) == (1, "")
    assert "\n          cure: gpufeed repack x.h5 OUT.h5\n" in out
    assert run("repack", "x.h5", "OUT.h5")[0] == 0
    assert run("doctor", "OUT.h5")[0] == 0


def test_a_notice_alone_ends_with_code_0(run):
    write_h5("x.h5", table=np.zeros(4, dtype=[("index", "i4"), ("value", "f8")]))
    code, out, _ = run("doctor", "x.h5")
    assert code == 0
    assert "\nnotice    types: " in out


def test_a_folder_is_summed_up(run):
    write_h5("a.h5", x=pixels(3, 3))
    Path("b.h5").write_text("no hdf5")
    code, out, _ = run("doctor", ".")
    assert code == 1
    assert "./a.h5: ok\n./b.h5\nproblem   file: no HDF5 file: 7 bytes" in out
    assert out.endswith("\n2 files: 1 ok, 1 with problems\n")
    assert run("doctor", ".", "--max-files", "1")[1].endswith("raise --max-files to look at the rest\n")


def test_json_holds_the_findings(run):
    Path("x.h5").write_text("no hdf5")
    code, out, _ = run("doctor", "x.h5", "--json")
    assert code == 1
    [file] = json.loads(out)["files"]
    assert (file["findings"][0]["severity"], file["path"]) == ("problem", "x.h5")


def test_what_cannot_be_looked_at_is_one_sentence_and_code_2(run):
    assert "no such file or folder: 'nope.h5'" in error_of(run, "doctor", "nope.h5")
    assert "no HDF5 file in this folder" in error_of(run, "doctor", ".")
    assert "max_files is 0" in error_of(run, "doctor", ".", "--max-files", "0")
