from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.doctor import doctor
from lightning_gpufeed.hdf5.doctor import files as doctor_files
from lightning_gpufeed.hdf5.doctor.doctor import examine
from lightning_gpufeed.hdf5.doctor.files import disk_finding, memory_bytes, memory_finding
from lightning_gpufeed.hdf5.doctor.findings import Finding, Severity, render_diagnosis
from lightning_gpufeed.hdf5.doctor.machine import locking_variable_finding, start_method_finding, worker_can_decode
from lightning_gpufeed.hdf5.repack.repack import repack
from lightning_gpufeed.hdf5.writer import pack

OK, NOTICE, WARNING, PROBLEM = Severity


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def write(path: Path, **arrays: Any) -> Path:
    """Write datasets, each given as an array or as an array and h5py's options."""
    with h5py.File(path, "w") as file:
        for key, value in arrays.items():
            data, options = value if isinstance(value, tuple) else (value, {})
            file.create_dataset(key, data=data, **options)
    return path


def findings_of(path: Path) -> list[Finding]:
    [file] = examine(path).files
    ranks = [finding.severity.rank for finding in file.findings]
    assert ranks == sorted(ranks, reverse=True)
    assert [finding.seen for finding in file.findings if finding.check == "doctor"] == []
    for finding in file.findings:
        if finding.severity is not OK:
            assert finding.why
            assert finding.cure
    return list(file.findings)


def found(path: Path, check: str) -> Finding:
    """The one finding of a check."""
    [finding] = [finding for finding in findings_of(path) if finding.check == check]
    return finding


def bad(path: Path) -> dict[str, Severity]:
    """Check -> severity of all that is more than a notice."""
    return {finding.check: finding.severity for finding in findings_of(path) if finding.severity.rank > NOTICE.rank}


# -- the file as a file


def test_a_packed_file_is_sound(tmp_path):
    np.savez(tmp_path / "x.npz", images=pixels(400, 3, 64, 64), labels=np.arange(400) % 10)
    pack(tmp_path / "x.npz", tmp_path / "x.h5")
    diagnosis = examine(tmp_path / "x.h5")
    assert diagnosis.is_sound
    assert bad(tmp_path / "x.h5") == {}


HEAD = b"\x89HDF\r\n\x1a\n"


@pytest.mark.parametrize("content", [b"", b"hello world", HEAD + bytes(5000)], ids=["empty", "text", "head"])
def test_what_is_no_hdf5_file_is_a_problem(tmp_path, content):
    (tmp_path / "x.h5").write_bytes(content)
    assert bad(tmp_path / "x.h5") == {"file": PROBLEM}


def test_a_link_to_nowhere_a_pipe_and_an_unreadable_file_are_problems(tmp_path, monkeypatch):
    (tmp_path / "link.h5").symlink_to("gone.h5")
    assert "a link to gone.h5, which is not there" in found(tmp_path / "link.h5", "file").seen
    os.mkfifo(tmp_path / "pipe.h5")
    assert found(tmp_path / "pipe.h5", "file").seen == "a pipe, socket or device"
    path = write(tmp_path / "x.h5", a=np.arange(3))
    path.chmod(0o200)
    if os.geteuid() == 0:  # who may read everything
        monkeypatch.setattr(os, "access", lambda *_: False)
    finding = found(path, "file")
    assert (finding.seen, finding.cure) == ("it may not be read (mode 200)", f"chmod u+r {path}")


KILLED = """\
import os, signal, sys
import h5py, numpy as np
file = h5py.File(sys.argv[1], "w", libver=sys.argv[2] or None)
x = file.create_dataset("x", data=np.zeros((2000, 10), "u1"), chunks=(10, 10))
if sys.argv[3]:
    file.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("libver", "flush", "seen", "cure"),
    [
        ("", "", "only a header: 96 bytes", "write it again"),
        ("latest", "flush", "marked as open for writing", "h5clear -s "),
    ],
    ids=["earliest", "latest"],
)
def test_what_a_killed_writer_leaves_is_told_apart(tmp_path, libver, flush, seen, cure):
    path = tmp_path / "x.h5"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), libver, flush])
    assert killed.returncode == -signal.SIGKILL
    finding = found(path, "file")
    assert (finding.severity, finding.seen) == (PROBLEM, seen)
    assert finding.cure.startswith(cure)


def test_a_file_that_is_cut_short_is_a_problem(tmp_path):
    path = write(tmp_path / "x.h5", a=np.arange(10_000))
    os.truncate(path, 50_000)
    assert found(path, "file").seen == "truncated: 50,000 bytes, and its header announces more"


def test_a_program_that_has_the_file_open_for_writing_is_named(tmp_path):
    path = write(tmp_path / "x.h5", a=np.arange(3))
    with path.open("r+b"):
        finding = found(path, "locking")
    assert finding.severity is PROBLEM
    assert f"(pid {os.getpid()}) has it open for writing" in finding.seen


def test_a_lock_that_another_program_holds_is_a_problem(tmp_path):
    path = write(tmp_path / "x.h5", a=np.arange(3))
    with path.open("rb") as other:  # open for reading only, so that nobody is found who writes
        fcntl.flock(other, fcntl.LOCK_EX)
        assert bad(path) == {"locking": PROBLEM}
    assert bad(path) == {}


def test_a_file_system_without_locks_is_a_warning_with_the_variable_that_helps(tmp_path, monkeypatch):
    path = write(tmp_path / "x.h5", a=np.arange(3))

    def refuse(*_: object) -> None:  # as NFS without its lock service does, which cannot be mounted here
        raise OSError(37, "No locks available")

    monkeypatch.setattr(doctor_files.fcntl, "flock", refuse)
    finding = found(path, "locking")
    assert (finding.severity, finding.cure) == (WARNING, "export HDF5_USE_FILE_LOCKING=BEST_EFFORT")
    assert "ENOLCK" in finding.seen


def test_the_file_system_is_named(tmp_path):
    finding = found(write(tmp_path / "x.h5", a=np.arange(3)), "file system")
    assert finding.severity is OK


def test_a_file_system_behind_a_network_is_worth_knowing(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_files, "is_network", lambda _: True)  # none can be mounted here
    assert found(write(tmp_path / "x.h5", a=np.arange(3)), "file system").severity is NOTICE


def test_what_an_interrupted_pack_left_is_a_warning_until_it_is_done(tmp_path):
    path = write(tmp_path / "x.h5", a=np.arange(300))
    partial = tmp_path / "x.h5.partial"
    shutil.copy(path, partial)
    assert "x.h5.partial beside it, " in found(path, "unfinished").seen
    assert found(partial, "unfinished").severity is WARNING
    with (tmp_path / "x.h5.partial.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert found(path, "unfinished").severity is NOTICE


def test_a_file_larger_than_the_memory_is_worth_knowing():
    assert memory_finding(8, 100).severity is OK
    assert memory_finding(90, 100).severity is NOTICE
    assert 2**20 < memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_disk_without_room_for_a_copy_is_worth_knowing(tmp_path, monkeypatch):
    path = write(tmp_path / "x.h5", a=np.arange(3))
    assert disk_finding(str(path)).severity is OK
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(200, 100, 100))
    assert disk_finding(str(path)).severity is NOTICE


# -- the machine


@pytest.mark.parametrize(
    ("value", "severity"),
    [("", WARNING), ("TRUE", NOTICE), ("0", NOTICE), ("false", NOTICE), ("BEST_EFFORT", OK), ("yes", WARNING)],
)
def test_the_variable_for_locks_is_judged(value, severity):
    assert locking_variable_finding(value).severity is severity


def test_the_variable_of_this_process_is_looked_at(monkeypatch):
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    assert locking_variable_finding().severity is OK
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "FALSE")
    assert "=FALSE" in locking_variable_finding().seen


def test_workers_that_are_not_forked_are_worth_knowing():
    assert start_method_finding("fork").severity is OK
    for method in ("spawn", "forkserver"):
        finding = start_method_finding(method)
        assert finding.severity is NOTICE
        assert method in finding.seen
    assert start_method_finding().severity in (OK, NOTICE)


def test_a_filter_that_a_spawned_worker_cannot_decode_is_found_by_asking_one(tmp_path):
    path = write(tmp_path / "x.h5", a=(pixels(100, 8, 8), {"chunks": (1, 8, 8), **hdf5plugin.Zstd()}))
    finding = found(path, "plug-in")
    assert (finding.severity, finding.cure.split(" #")[0]) == (NOTICE, "import hdf5plugin ")
    assert "zstd" in finding.seen
    assert worker_can_decode((1, 32015)) == {1: (True, True), 32015: (False, True)}
    assert worker_can_decode((31999,)) == {31999: (False, False)}


# -- the layout


def test_samples_split_over_chunks_are_a_warning_with_the_line_that_repacks(tmp_path):
    path = write(tmp_path / "x.h5", a=(pixels(100, 3, 218, 178), {"chunks": (10, 3, 217, 178)}))
    finding = found(path, "split samples")
    assert finding.severity is WARNING
    assert "a sample takes 2 chunks, 1.99 times its bytes" in finding.seen
    assert finding.cure == f"gpufeed repack {path} OUT.h5"
    assert bad(path) == {"split samples": WARNING, "size": WARNING}
    assert found(path, "disk").severity is OK
    repack(path, tmp_path / "y.h5")
    assert bad(tmp_path / "y.h5") == {}


def test_chunks_that_h5py_guessed_are_called_so(tmp_path):
    path = write(tmp_path / "x.h5", a=(pixels(200, 3, 64, 64), {"chunks": True}))
    assert ", as chunks=True guesses" in found(path, "split samples").seen
    path = write(tmp_path / "y.h5", a=(pixels(200, 3, 64, 64), {"chunks": (200, 3, 60, 60)}))
    assert "guesses" not in found(path, "split samples").seen


def test_several_samples_in_a_chunk_are_the_trap_of_the_chunk_cache(tmp_path):
    path = write(tmp_path / "x.h5", a=(pixels(1000, 3, 64, 64), {"chunks": (64, 3, 64, 64)}))
    finding = found(path, "chunk cache")
    assert finding.severity is NOTICE
    assert finding.cure.startswith(f'h5py.File({str(path)!r}, "r", rdcc_nbytes=0)')
    one = write(tmp_path / "y.h5", a=(pixels(1000, 3, 64, 64), {"chunks": (1, 3, 64, 64)}))
    assert "chunk cache" not in {finding.check for finding in findings_of(one)}
    cached = write(tmp_path / "z.h5", a=(pixels(600, 3, 64, 64), {"chunks": (64, 3, 64, 64)}))
    assert "chunk cache" not in {finding.check for finding in findings_of(cached)}


def test_the_layout_of_a_small_array_does_not_matter(tmp_path):
    path = write(tmp_path / "x.h5", a=(pixels(40, 20, 20).astype(np.float32), {"chunks": (1, 3, 3)}))
    assert bad(path) == {}


def test_compressed_chunks_are_worth_knowing_and_huge_ones_a_warning(tmp_path):
    values = np.zeros((1000, 3, 64, 64), np.uint8)
    values[:, 0, 0, 0] = 2
    path = write(tmp_path / "x.h5", a=(values, {"chunks": (20, 3, 64, 64), "compression": "gzip"}))
    assert found(path, "filters").severity is NOTICE
    path = write(tmp_path / "y.h5", a=(values, {"chunks": (1000, 3, 64, 64), "compression": "gzip"}))
    assert found(path, "huge chunk").severity is WARNING


def test_a_filter_that_only_hdf5_can_undo_is_worth_knowing(tmp_path):
    values = np.zeros((1000, 64, 64), np.int16)
    values[:, 0] = 300
    path = write(tmp_path / "x.h5", a=(values, {"chunks": (20, 64, 64), "scaleoffset": 0}))
    assert "scaleoffset" in found(path, "decoder").seen


def test_very_many_tiny_chunks_are_a_warning(tmp_path):
    path = write(tmp_path / "x.h5", a=(pixels(4096, 300), {"chunks": (1, 300)}))
    assert found(path, "tiny chunks").severity is WARNING


def test_parts_that_were_never_written_are_a_warning_and_all_of_them_a_problem(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("part", (100, 8, 8), np.uint8, chunks=(10, 8, 8), fillvalue=3)[:40] = pixels(40, 8, 8)
        file["part"][60:] = pixels(40, 8, 8)
        file.create_dataset("all", (100, 8, 8), np.uint8, chunks=(10, 8, 8))
        file.create_dataset("block", (100, 8, 8), np.uint8)
        file.create_dataset("empty", (0, 8, 8), np.uint8)
    missing = {finding.key: finding for finding in findings_of(tmp_path / "x.h5") if finding.check == "missing"}
    assert missing["part"].severity is WARNING
    assert "2 of 10 chunks were never written, the first at samples 40 to 49" in missing["part"].seen
    assert "as 3, without an error" in missing["part"].why
    assert missing["all"].severity is missing["block"].severity is PROBLEM
    assert missing["empty"].severity is NOTICE


def test_an_axis_of_netcdf_that_nobody_writes_is_nothing_to_worry_about(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("axis", (5,), ">f4").make_scale("This is a netCDF dimension but not a netCDF variable")
    assert bad(tmp_path / "x.h5") == {}


def test_a_file_much_larger_than_its_data_is_a_warning(tmp_path):
    path = write(tmp_path / "x.h5", a=(pixels(1000, 3000), {"chunks": (10, 3000)}), b=np.arange(3))
    with h5py.File(path, "r+") as file:
        del file["a"]
        file["a"] = pixels(10, 3000)
    assert found(path, "size").severity is WARNING


def test_a_virtual_dataset_is_worth_knowing_and_a_missing_source_a_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layout = h5py.VirtualLayout((1000, 2000), np.uint8)
    write(Path("part.h5"), a=pixels(1000, 2000))
    layout[:] = h5py.VirtualSource("part.h5", "a", (1000, 2000))
    with h5py.File("x.h5", "w") as file:
        file.create_virtual_dataset("a", layout)
    assert found(Path("x.h5"), "virtual").cure == "gpufeed repack x.h5 OUT.h5"
    os.unlink("part.h5")
    finding = found(Path("x.h5"), "broken")
    assert (finding.severity, finding.key) == (PROBLEM, "a")
    assert "takes samples from the file 'part.h5', which is not there" in finding.seen
    assert finding.cure == "Put it back, or build the virtual dataset again"


def test_external_files_are_worth_knowing_and_a_missing_one_a_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("x.h5", "w") as file:
        data = file.create_dataset("a", (1000, 2000), np.uint8, external=[("raw.bin", 0, h5py.h5s.UNLIMITED)])
        data[:] = pixels(1000, 2000)
    assert "raw.bin" in found(Path("x.h5"), "external").seen
    os.unlink("raw.bin")
    assert found(Path("x.h5"), "broken").severity is PROBLEM


def test_a_link_that_leads_nowhere_is_a_warning(tmp_path):
    path = write(tmp_path / "x.h5", a=np.arange(3))
    with h5py.File(path, "r+") as file:
        file["gone"] = h5py.ExternalLink("gone.h5", "/a")
    finding = found(path, "link")
    assert (finding.severity, finding.key, finding.cure) == (
        WARNING,
        "gone",
        "put back what it leads to, or delete the link",
    )


def test_numbers_of_another_byte_order_are_worth_knowing(tmp_path):
    path = write(tmp_path / "x.h5", a=np.arange(300_000, dtype=">i4").reshape(-1, 30))
    assert "conversion" in found(path, "type").seen


def test_sorted_labels_matter_where_the_order_is_a_window_s(tmp_path):
    labels = np.arange(4000) // 40
    plain = write(tmp_path / "x.h5", images=pixels(4000, 20, 20), labels=labels)
    assert found(plain, "label order").severity is NOTICE
    packed = write(
        tmp_path / "y.h5",
        images=(pixels(4000, 20, 20), {"chunks": (50, 20, 20), "compression": "gzip"}),
        labels=labels,
    )
    finding = found(packed, "label order")
    assert (finding.severity, finding.key) == (WARNING, "labels")
    assert finding.cure == f"gpufeed pack {packed} OUT.h5 --keep-dtype --shuffle"


@pytest.mark.parametrize("num", [20, 300])
def test_an_array_per_sample_is_a_warning_and_none_a_notice(tmp_path, num):
    path = write(tmp_path / "x.h5", **{f"sample{number:03}/image": np.arange(3) for number in range(num)})
    finding = found(path, "arrays")
    assert (finding.severity, finding.seen) == (WARNING, f"{num} arrays named as sample000/image: one for each sample")
    few = write(tmp_path / "few.h5", **{f"layer{number}": np.arange(3 + number) for number in range(20)})
    assert bad(few) == {}
    assert found(write(tmp_path / "y.h5"), "arrays").severity is NOTICE


# -- the values


def test_floats_that_were_stored_as_zeros_are_a_problem(tmp_path):
    path = write(tmp_path / "x.h5", images=np.random.default_rng(0).random((50, 8, 8)).astype(np.uint8))
    finding = found(path, "values")
    assert (finding.severity, finding.cure) == (PROBLEM, "gpufeed pack ORIGINAL OUT.h5 --scale 255")
    binary = write(tmp_path / "y.h5", images=pixels(50, 8, 8) // 128)
    assert found(binary, "values").severity is NOTICE
    masks = write(tmp_path / "z.h5", images=pixels(50, 8, 8), masks=np.zeros((50, 8, 8), np.uint8))
    assert [finding for finding in findings_of(masks) if finding.check == "values"] == []


def test_dark_samples_here_and_there_are_no_problem(tmp_path):
    images = np.zeros((1000, 8, 8), np.uint8)
    images[5] = 200
    assert bad(write(tmp_path / "x.h5", images=images)) == {}


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (lambda pixels: pixels.astype(np.float32), " --scale 1"),
        (lambda pixels: pixels.astype(np.float32) / 255, " --scale 255"),
        (lambda pixels: pixels.astype(np.int64), ""),
    ],
    ids=["whole", "fractions", "int64"],
)
def test_values_that_bytes_could_hold_are_a_warning_with_a_line_that_works(tmp_path, values, options):
    images = pixels(400, 40, 40)
    path = write(tmp_path / "x.h5", images=values(images), labels=np.arange(400), other=np.arange(3))
    finding = found(path, "values")
    assert finding.severity is WARNING
    assert finding.cure == f"gpufeed pack {path} OUT.h5 --keys images,labels{options}"
    scale = float(options.split()[1]) if options else None
    pack(path, tmp_path / "y.h5", keys=["images", "labels"], scale=scale)
    with h5py.File(tmp_path / "y.h5") as file:
        assert (file["images"][:] == images).all()


def test_values_that_need_their_bytes_are_left_alone(tmp_path):
    noise = np.random.default_rng(0).random((400, 40, 40), np.float32)
    assert bad(write(tmp_path / "x.h5", a=noise, b=noise - 1, c=(noise * 1000).astype(np.int32))) == {}
    noise[0] = np.nan
    assert found(write(tmp_path / "y.h5", a=noise), "values").seen == "NaN or infinity among its values"


def test_image_files_in_rows_of_bytes_are_a_warning(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        images = file.create_dataset("images", (3,), h5py.vlen_dtype(np.uint8))
        images[0] = np.frombuffer(b"\x89PNG and more", np.uint8)
    assert found(tmp_path / "x.h5", "encoded").severity is WARNING


def test_a_damaged_chunk_that_is_met_is_a_problem(tmp_path):
    path = write(tmp_path / "x.h5", a=(pixels(4, 100, 100), {"chunks": (1, 100, 100), "fletcher32": True}))
    with h5py.File(path) as file:
        place = file["a"].id.get_chunk_info(2).byte_offset
    with path.open("r+b") as raw:
        raw.seek(place)
        raw.write(b"damaged!")
    assert bad(path)["damaged"] is PROBLEM


def test_records_are_worth_knowing(tmp_path):
    tables = {f"table{number}": np.zeros(4, dtype=[("index", "i4"), ("value", "f8")]) for number in range(5)}
    finding = found(write(tmp_path / "x.h5", **tables), "types")
    assert (finding.severity, finding.seen.count("(records)")) == (NOTICE, 3)
    assert finding.seen.endswith("and 2 more")


# -- folders, text, JSON


def test_each_file_below_a_folder_is_looked_at_by_name_or_by_its_first_bytes(tmp_path):
    write(tmp_path / "b.h5", a=np.arange(3))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write(tmp_path / "deep" / "er" / "c.mat", a=np.arange(3))
    (tmp_path / "deep" / "a.hdf5").write_text("no hdf5")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "old.mat").write_text("MATLAB 5.0")
    diagnosis = examine(tmp_path)
    assert [(Path(file.path).relative_to(tmp_path).as_posix(), file.worst) for file in diagnosis.files] == [
        ("b.h5", OK),
        ("deep/a.hdf5", PROBLEM),
        ("deep/er/c.mat", OK),
    ]
    assert diagnosis.is_folder
    assert diagnosis.worst is PROBLEM
    assert not diagnosis.is_sound
    text = render_diagnosis(diagnosis)
    assert f"{tmp_path}/b.h5: ok" in text.splitlines()
    assert text.endswith("\n3 files: 2 ok, 1 with problems")


def test_a_folder_of_very_many_files_is_looked_at_in_part_and_that_is_said(tmp_path):
    for number in range(3):
        write(tmp_path / f"{number}.h5", a=np.arange(3))
    diagnosis = examine(tmp_path, max_files=2)
    assert [Path(file.path).name for file in diagnosis.files] == ["0.h5", "1.h5"]
    assert render_diagnosis(diagnosis).endswith("raise --max-files to look at the rest")
    with pytest.raises(ValueError, match="max_files is 0"):
        examine(tmp_path, max_files=0)


def test_a_folder_that_may_not_be_listed_is_a_problem_of_its_own(tmp_path):
    finding = doctor_files.open_failure(str(tmp_path), {})
    assert (finding.severity, finding.seen) == (PROBLEM, "a folder that may not be listed")


def test_nothing_to_look_at_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        examine(tmp_path / "nope.h5")
    with pytest.raises(LayoutError, match="no HDF5 file in this folder"):
        examine(tmp_path)


def test_the_text_has_the_worst_first_and_what_is_good_once(tmp_path):
    path = write(tmp_path / "x.h5", images=np.zeros((50, 8, 8), np.uint8), a=np.arange(3), b=np.arange(3))
    lines = render_diagnosis(examine(path)).splitlines()
    assert lines[0] == str(path)
    assert lines[1] == "problem   images: values: all of 50 samples looked at are zeros"
    assert lines[2].startswith("          why: ")
    assert lines[3] == "          cure: gpufeed pack ORIGINAL OUT.h5 --scale 255"
    assert any(line.startswith("ok        a, b, images: layout: ") for line in lines)
    assert max(map(len, lines[1:])) <= 100


def test_everything_is_there_as_json(tmp_path):
    path = write(tmp_path / "x.h5", images=np.zeros((50, 8, 8), np.uint8))
    plain = json.loads(json.dumps(examine(path).as_dict()))
    assert plain["worst"] == "problem"
    [values] = [finding for finding in plain["files"][0]["findings"] if finding["check"] == "values"]
    assert values.keys() == {"severity", "check", "seen", "why", "cure", "key"}


def test_a_check_that_fails_itself_is_a_finding(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("strange file")

    monkeypatch.setattr(doctor, "array_findings", fail)
    [file] = examine(write(tmp_path / "x.h5", a=np.arange(3))).files
    [finding] = [finding for finding in file.findings if finding.check == "doctor"]
    assert finding.seen == "the check fail could not be made: RuntimeError: strange file"


def test_looking_changes_nothing(tmp_path):
    path = write(tmp_path / "x.h5", a=(pixels(100, 8, 8), {"chunks": (10, 8, 7)}))
    before = (path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir()))
    examine(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())) == before
