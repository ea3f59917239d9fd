from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest

import lightning_gpufeed
from lightning_gpufeed.cli import command
from lightning_gpufeed.hdf5.inspection import inspect_file
from lightning_gpufeed.hdf5.journal import Journal
from lightning_gpufeed.hdf5.report import Advice
from lightning_gpufeed.hdf5.writer import PackReport, pack
from tests.cli.commands import error_of, pixels, start, write_h5


def write_photos(folder, per_class=3, classes=("cat", "dog")):
    from PIL import Image

    for name in classes:
        Path(folder, name).mkdir(parents=True)
        for number in range(per_class):
            Image.fromarray(pixels(20, 30, 3)).save(Path(folder, name, f"{number}.png"))


def keys_of(path):
    with h5py.File(path) as h5_file:
        return {key: item.shape for key, item in h5_file.items() if isinstance(item, h5py.Dataset)}


# -- pack


def test_pack_writes_the_file_and_says_what_is_in_it(run):
    write_h5("in.h5", images=pixels(60, 3, 8, 8), labels=np.arange(60) % 4)
    code, out, err = run("pack", "in.h5", "out.h5")
    assert (code, err) == (0, "")
    assert re.fullmatch(
        r"out\.h5: 60 samples, [\d.]+ kB, in \d+\.\d s\n"
        r"  images: \(60, 3, 8, 8\) uint8, chunks of 60 samples \(11\.5 kB\)\n"
        r"  labels: \(60,\) int64, chunks of 60 samples \(480 B\)\n",
        out,
    )
    assert keys_of("out.h5") == {"images": (60, 3, 8, 8), "labels": (60,)}


def test_every_option_of_pack_reaches_the_writer_in_its_own_type(run, monkeypatch):
    seen = {}

    def record(source, out, **options):
        seen.update(options, source=source, out=out)
        return PackReport(Path(out), 1, {}, (), 0, None, 1000, 0.5)

    monkeypatch.setattr(command, "pack", record)
    words = (
        "photos o.h5 --keys images,labels --split test --resize 256 --crop 224x192 --mode L --layout NHWC --scale 255 "
        "--quantize=-1,1.5 --keep-dtype --shuffle --seed 7 --chunk-bytes 1000 --num-workers 2 --on-error skip --verify "
        "--no-resume --overwrite"
    )
    assert run("pack", *words.split()) == (0, "o.h5: 1 samples, 1.0 kB, in 0.5 s\n", "")
    assert callable(seen.pop("on_progress"))
    assert seen == {
        "source": "photos",
        "out": "o.h5",
        "keys": ["images", "labels"],
        "split": "test",
        "resize": 256,
        "crop": (224, 192),
        "mode": "L",
        "layout": "NHWC",
        "scale": 255.0,
        "quantize": (-1.0, 1.5),
        "keep_dtype": True,
        "shuffle": True,
        "seed": 7,
        "chunk_bytes": 1000,
        "num_workers": 2,
        "on_error": "skip",
        "verify": True,
        "resume": False,
        "overwrite": True,
    }


def test_what_is_not_given_stays_at_the_default_of_the_function(run, monkeypatch):
    seen = {}

    def record(source, out, **options):
        seen.update(options)
        return PackReport(Path(out), 1, {}, (), 0, None, 1000, 0.5)

    monkeypatch.setattr(command, "pack", record)
    run("pack", "a", "b")
    defaults = {name: one.default for name, one in inspect.signature(pack).parameters.items()}
    del defaults["source"], defaults["out"], defaults["on_progress"], seen["on_progress"]
    assert seen == defaults


def test_quantize_auto_is_passed_on(run):
    np.save("x.npy", np.linspace(-3, 3, 40 * 64).reshape(40, 8, 8))
    assert run("pack", "x.npy", "out.h5", "--quantize", "auto")[0] == 0
    with h5py.File("out.h5") as h5_file:
        assert h5_file["images"].attrs["scale"] == pytest.approx(6 / 255)


def test_a_folder_of_images_is_packed_resized_cropped_and_verified(run):
    write_photos("photos")
    code, out, _ = run(
        "pack", "photos", "out.h5", "--resize", "16", "--crop", "12x10", "--verify", "--num-workers", "0"
    )
    assert code == 0
    assert keys_of("out.h5") == {"images": (6, 3, 12, 10), "labels": (6,)}
    assert "  labels: (6,) int64, chunks of 6 samples (48 B), 2 classes\n" in out
    assert out.endswith("  2 chunks read back, all as written\n")


def test_images_that_cannot_be_read_are_listed_and_the_rest_is_packed(run):
    write_photos("photos", per_class=8)
    for number in range(6):
        for name in ("cat", "dog"):
            Path("photos", name, f"{number}.png").write_bytes(b"no image")
    code, out, err = run("pack", "photos", "out.h5", "--on-error", "skip", "--num-workers", "0")
    assert code == 0
    assert out.startswith("out.h5: 4 samples, ")
    lines = err.splitlines()
    assert lines[0] == "gpufeed: 12 of the samples could not be read and were left out:"
    assert [line.split(":")[0] for line in lines[1:11]] == [
        *[f"  cat/{number}.png" for number in range(6)],
        *[f"  dog/{number}.png" for number in range(4)],
    ]
    assert lines[11:] == ["  and 2 more; all names are in _gpufeed/skipped of out.h5"]
    with h5py.File("out.h5") as h5_file:
        assert len(h5_file["_gpufeed/skipped"]) == 12


def test_a_warning_is_one_line(run):
    write_h5("in.h5", images=pixels(60, 3, 8, 8))
    Path("out.h5.partial").touch()
    Journal(source="another one", options={}).save(Path("out.h5.partial.json"))
    code, _, err = run("pack", "in.h5", "out.h5")
    assert code == 0
    assert re.fullmatch(r"gpufeed: warning: out\.h5\.partial is begun anew[^\n]+\n", err)


# -- inspect


def test_inspect_prints_the_report(run):
    write_h5("in.h5", images=pixels(60, 3, 8, 8), labels=np.arange(60) // 15)
    code, out, err = run("inspect", "in.h5", "--probe-seconds", "0.05")
    assert (code, err) == (0, "")
    assert out.startswith("in.h5\n            ")
    for line in ("images  (60, 3, 8, 8) uint8, 11.5 kB", "classes     labels: sorted by class; 4 classes, 15 samples"):
        assert line in out
    assert re.search(r"^rate        [\d,]+ samples/s, ", out, re.MULTILINE)
    assert out.endswith("faster      nothing: it is gathered straight from the mapped file already\n")


def test_inspect_prints_json(run):
    write_h5("in.h5", images=pixels(60, 3, 8, 8))
    code, out, err = run("inspect", "in.h5", "--json", "--probe-seconds", "0")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["path"], report["probe"], report["datasets"][0]["engine"]) == ("in.h5", None, "raw")
    assert "verified_chunks" not in report


def test_inspect_verifies_what_pack_wrote(run):
    np.savez("in.npz", images=pixels(60, 3, 8, 8), labels=np.arange(60))
    run("pack", "in.npz", "out.h5", "--chunk-bytes", "2000")
    assert run("inspect", "out.h5", "--verify", "--probe-seconds", "0")[1].endswith(
        "verified    7 chunks match their checksums\n"
    )
    assert json.loads(run("inspect", "out.h5", "--verify", "--json", "--probe-seconds", "0")[1])["verified_chunks"] == 7


def test_inspect_names_a_chunk_that_does_not_match_its_checksum(run):
    np.savez("in.npz", images=pixels(60, 3, 8, 8))
    run("pack", "in.npz", "out.h5", "--chunk-bytes", "2000")
    with h5py.File("out.h5", "r+") as h5_file:
        h5_file["images"][37, 0, 0, 0] ^= 1
    code, out, err = run("inspect", "out.h5", "--verify", "--probe-seconds", "0")
    assert code == 2
    assert out.startswith("out.h5\n")  # the report comes all the same
    assert err.startswith("gpufeed: error: out.h5: chunk 3 of 'images', rows 30 to 39, does not match its checksum")


GZIP = {"chunks": (20, 9, 9), "compression": "gzip"}
TO_IMPROVE = {
    "compressed": {"images": (pixels(90, 9, 9), GZIP), "labels": np.arange(90) // 30},
    "guessed chunks": {"images": (pixels(500, 3, 32, 32), {"chunks": True})},
    "split samples": {"images": (pixels(90, 9, 9), {"chunks": (20, 8, 9)})},
    "floats": {"images": pixels(90, 9, 9) / np.float32(255), "labels": np.arange(90) % 3},
    "compressed floats": {"images": (np.random.default_rng(0).normal(size=(90, 9, 9)), GZIP)},
    "floats up to 255": {"images": pixels(90, 9, 9).astype(np.float64)},
    "wide integers": {"images": pixels(90, 9, 9).astype(np.int64)},
    "big-endian": {"images": pixels(90, 9, 9).astype(">u4")},
    "tiny chunks": {"images": (pixels(5000, 9, 9), {"chunks": (1, 9, 9)})},
    "two splits and text": {
        "x_train": (pixels(90, 9, 9), GZIP),
        "y_train": np.arange(90) // 30,
        "x_test": pixels(30, 9, 9),
        "names": ["name"] * 90,
    },
}


@pytest.mark.parametrize("case", TO_IMPROVE)
def test_after_the_advice_was_followed_there_is_none_left(run, case):
    write_h5("in.h5", **TO_IMPROVE[case])
    advised = inspect_file("in.h5", probe_seconds=0).advice.command
    words = shlex.split(advised)
    assert words[0] == "gpufeed"
    code, _, err = run(*words[1:])
    assert (code, err) == (0, "")
    assert inspect_file("OUT.h5", probe_seconds=0).advice == Advice(
        "it is gathered straight from the mapped file already"
    )


# -- errors


def test_a_missing_file_is_one_line(run, folder):
    assert error_of(run, "inspect", "none.h5") == (
        f"none.h5: no such file: expected an HDF5 file; the current directory is {folder}"
    )


def test_a_missing_source_is_one_line(run):
    assert error_of(run, "pack", "none", "out.h5") == (
        "no such file or folder: 'none'; a dataset in a module is written 'package.module:name'"
    )


def test_a_file_that_is_not_hdf5_is_one_line(run):
    Path("text.h5").write_text("plain text")
    assert error_of(run, "inspect", "text.h5") == (
        "text.h5 is not an HDF5 file: 10 bytes, beginning with b'plain te'; expected the HDF5 signature. Make one "
        "with: gpufeed pack SOURCE OUT.h5"
    )


def test_a_wrong_key_is_one_line_that_names_the_keys_there_are(run):
    write_h5("in.h5", images=pixels(60, 3, 8, 8), labels=np.arange(60))
    assert error_of(run, "pack", "in.h5", "out.h5", "--keys", "pictures,labels") == (
        "in.h5 has no 'pictures'; it has 'images', 'labels'"
    )


def test_a_folder_without_images_is_one_line(run):
    Path("notes").mkdir()
    Path("notes", "a.txt").touch()
    assert error_of(run, "pack", "notes", "out.h5") == (
        "no images in notes (found: 1 x .txt); expected one sub-folder per class with files ending in .bmp, .gif, "
        ".jpeg, .jpg, .pbm, .pgm, .png, .pnm, .ppm, .tif, .tiff, .webp"
    )
    assert not Path("out.h5").exists()


def test_a_folder_given_to_inspect_is_told_to_be_packed(run):
    Path("photos").mkdir()
    assert error_of(run, "inspect", "photos") == (
        "photos is a directory; expected an HDF5 file. Pack it first: gpufeed pack photos OUT.h5"
    )


def test_a_file_without_checksums_cannot_be_verified(run):
    write_h5("in.h5", images=pixels(60, 3, 8, 8))
    code, _, err = run("inspect", "in.h5", "--verify", "--probe-seconds", "0")
    assert (code, err) == (
        2,
        "gpufeed: error: in.h5 has no checksums; only files written by `gpufeed pack` or `repack` have them\n",
    )


def test_an_output_that_exists_is_left_alone(run):
    write_h5("in.h5", images=pixels(60, 3, 8, 8))
    Path("out.h5").write_text("precious")
    assert error_of(run, "pack", "in.h5", "out.h5") == "out.h5 exists; overwrite=True (--overwrite) replaces it"
    assert Path("out.h5").read_text() == "precious"
    assert run("pack", "in.h5", "out.h5", "--overwrite")[0] == 0


def test_options_that_exclude_each_other_are_one_line(run):
    write_h5("in.h5", images=np.ones((60, 3, 8, 8)))
    text = error_of(run, "pack", "in.h5", "out.h5", "--scale", "1", "--keep-dtype")
    assert text == "scale and keep_dtype exclude each other; give one"


def test_an_error_of_the_operating_system_names_the_file(run, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "secret.h5")

    monkeypatch.setattr(command, "inspect_file", refuse)
    assert error_of(run, "inspect", "secret.h5") == "secret.h5: Permission denied"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["pack", "a", "b", "--shufle"], "unrecognized arguments: --shufle; see gpufeed pack --help"),
        (["inspect", "a", "b"], "unrecognized arguments: b; see gpufeed inspect --help"),
        (["inspect"], "the following arguments are required: file; see gpufeed inspect --help"),
        (["pack", "pack.d"], "the following arguments are required: out; see gpufeed pack --help"),
        (
            ["unpack", "a"],
            "argument COMMAND: invalid choice: 'unpack' (choose from 'pack', 'repack', 'doctor', 'inspect', "
            "'bench', 'plan'); "
            "see gpufeed --help",
        ),
        ([], "no command was given; see gpufeed --help"),
        (
            ["pack", "a", "b", "--on-error", "ignore"],
            "argument --on-error: invalid choice: 'ignore' (choose from 'raise', 'skip'); see gpufeed pack --help",
        ),
        (
            ["pack", "a", "b", "--resize", "224x"],
            "argument --resize: '224x' is no size; expected pixels as 256, or HEIGHTxWIDTH as 224x320; "
            "see gpufeed pack --help",
        ),
        (
            ["pack", "a", "b", "--quantize", "1"],
            "argument --quantize: '1' is no range; expected auto, or LOW,HIGH as 0,4095; see gpufeed pack --help",
        ),
        (
            ["pack", "a", "b", "--chunk-bytes", "512k"],
            "argument --chunk-bytes: '512k' is not a whole number; see gpufeed pack --help",
        ),
        (
            ["inspect", "a", "--probe-seconds", "long"],
            "argument --probe-seconds: 'long' is not a number; see gpufeed inspect --help",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_one_line(run, argv, text):
    assert error_of(run, *argv) == text


def test_a_traceback_is_shown_when_it_is_asked_for(run, monkeypatch):
    monkeypatch.setenv("GPUFEED_DEBUG", "1")
    code, _, err = run("inspect", "none.h5")
    assert code == 2
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.splitlines()[-1].startswith("gpufeed: error: none.h5: no such file")


# -- help


def test_help_names_the_commands(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert {"pack", "inspect", "bench", "plan"} <= set(out.split())


def test_help_of_pack_names_every_option_of_the_function(run):
    out = run("pack", "--help")[1]
    names = set(inspect.signature(pack).parameters) - {"source", "out", "on_progress", "resume"}
    assert {f"--{name.replace('_', '-')}" for name in names} | {"--no-resume"} <= set(re.findall(r"--[\w-]+", out))


def test_version_is_the_package_version(run):
    assert run("--version") == (0, f"gpufeed {lightning_gpufeed.__version__}\n", "")


# -- how it ends


def test_a_reader_that_has_seen_enough_is_no_error():
    write_h5("in.h5", images=pixels(60, 3, 8, 8))
    with start("inspect", "in.h5", "--probe-seconds", "0", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("argv", "position", "text"),
    [
        (["pack", "a", "out.h5"], None, "nothing was kept yet, so the same command begins anew"),
        (["pack", "a", "out.h5"], 0, "nothing was kept yet, so the same command begins anew"),
        (
            ["pack", "a", "out.h5", "--no-resume"],
            1234,
            "out.h5.partial keeps 1,234 samples, and the same command without --no-resume goes on from there",
        ),
    ],
)
def test_an_interruption_says_what_is_left(run, monkeypatch, argv, position, text):
    monkeypatch.setattr(command, "pack", interrupt)
    if position is not None:
        Journal(source="", options={}, position=position).save(Path("out.h5.partial.json"))
    assert run(*argv) == (130, "", f"gpufeed: interrupted; {text}\n")


def test_an_interrupted_inspection_leaves_nothing(run, monkeypatch):
    monkeypatch.setattr(command, "inspect_file", interrupt)
    assert run("inspect", "a") == (130, "", "gpufeed: interrupted\n")


def test_only_the_command_line_and_the_monitors_table_import_their_libraries():
    # Machines that only train need neither a parser of command lines nor progress bars.
    imports = re.compile(r"^\s*(?:from|import) (?:jsonargparse|rich)\b", re.MULTILINE)
    package = Path(lightning_gpufeed.__file__).parent
    found = {path.relative_to(package) for path in package.rglob("*.py") if imports.search(path.read_text())}
    assert {path.parts[0] for path in found} == {"cli", "diagnose"}
    assert {path.name for path in found if path.parts[0] == "diagnose"} == {"table.py"}  # FeedMonitor's
