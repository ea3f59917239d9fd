"""Opening files: what a user reads when that does not work, and what is noticed when a file changes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import (
    FileStamp,
    list_datasets,
    open_file,
    open_h5_dataset,
    pick_attributes,
    type_name,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two arrays."""
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        h5_file["images"] = np.zeros((4, 3, 8, 8), np.uint8)
        h5_file["labels"] = np.arange(4)
    return tmp_path / "data.h5"


def refusal(path: Path, kind: type[Exception] = LayoutError) -> str:
    """What `open_file` says when it refuses."""
    with pytest.raises(kind) as error, open_file(path):
        pass
    return str(error.value)


def hdf5_text(path: Path) -> str:
    """What HDF5 itself says, which differs between its releases."""
    with pytest.raises(OSError, match=r".") as error:
        h5py.File(path, "r")
    return str(error.value)


# Files that cannot be opened -----------------------------------------------------------------------------


def test_a_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("gone.h5"), FileNotFoundError) == (
        f"[Errno 2] no such file: expected an HDF5 file; the current directory is {tmp_path}: 'gone.h5'"
    )


def test_a_directory(tmp_path):
    assert refusal(tmp_path) == (
        f"{tmp_path} is a directory; expected an HDF5 file. Pack it first: gpufeed pack {tmp_path} OUT.h5"
    )


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip archive", b"x" * 10_000], ids=["empty", "zip", "text"])
def test_a_file_that_is_not_hdf5(tmp_path, content):
    (tmp_path / "data.h5").write_bytes(content)
    assert refusal(tmp_path / "data.h5") == (
        f"{tmp_path / 'data.h5'} is not an HDF5 file: {len(content)} bytes, beginning with {content[:8]!r}; expected "
        f"the HDF5 signature. Make one with: gpufeed pack SOURCE OUT.h5"
    )


def test_a_file_that_says_truncated_in_its_name_only(tmp_path):
    (tmp_path / "truncated.h5").write_bytes(b"no HDF5 at all")
    assert "is not an HDF5 file: 14 bytes" in refusal(tmp_path / "truncated.h5")


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("missing", [1, 100, 3000])
def test_a_truncated_file(tmp_path, libver, missing):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w", libver=libver) as h5_file:
        h5_file["images"] = np.ones((4, 1024), np.uint8)
    size = path.stat().st_size - missing
    os.truncate(path, size)
    assert refusal(path) == (
        f"{path}: truncated: it has {size} bytes and its header announces more ({hdf5_text(path)}). "
        f"The copy or the program that wrote it was cut short (or it is one part of a family of files, which is "
        f"not supported); copy or pack it again."
    )


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_file_cut_at_any_length_is_refused_or_whole(tmp_path, libver):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w", libver=libver) as h5_file:
        h5_file.create_dataset("x", data=np.ones((16, 100), np.uint8), chunks=(4, 100))
    content = path.read_bytes()
    for length in [*range(0, 120, 7), *range(120, len(content), 97)]:
        path.write_bytes(content[:length])
        with pytest.raises(LayoutError, match=r"truncated|is not an HDF5 file|HDF5 cannot open it"), open_file(path):
            pass


def test_a_file_with_a_damaged_header(tmp_path, path):
    content = bytearray(path.read_bytes())
    content[8] = 99  # version of the superblock
    path.write_bytes(content)
    assert refusal(path) == (
        f"{path}: HDF5 cannot open it: {hdf5_text(path)}. It may be damaged; copy or pack it again."
    )


WRITER = """
import sys, h5py
h5_file = h5py.File(sys.argv[1], "a")
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the file open for writing."""
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.communicate("")


def test_a_file_that_another_process_has_open_for_writing(writer, path, monkeypatch):
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    text = refusal(path)
    assert "Resource temporarily unavailable" in text
    assert text == (
        f"{path}: another program has it open for writing and holds its lock ({hdf5_text(path)}). "
        f"Close the writer first."
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may read every file")
def test_a_file_without_the_permission_to_read(path):
    path.chmod(0o000)
    try:
        assert "Permission denied" in refusal(path, PermissionError)
    finally:
        path.chmod(0o600)


# Files that can be opened --------------------------------------------------------------------------------


def test_a_file_is_closed_at_the_end_and_after_an_error(path):
    with open_file(path) as h5_file:
        assert h5_file.mode == "r"
    assert not h5_file
    with pytest.raises(ZeroDivisionError), open_file(path) as h5_file:
        raise ZeroDivisionError
    assert not h5_file


def test_a_file_may_be_open_twice(path):
    with open_file(path) as first, open_file(path) as second:
        assert list(first) == list(second)


def test_a_file_that_may_only_be_read_needs_no_permission_to_write(path):
    path.chmod(0o400)
    with open_file(path) as h5_file:
        assert "images" in h5_file


def test_nothing_in_a_file_is_changed_by_reading_it(path):
    before = path.read_bytes(), path.stat().st_mtime_ns
    with open_file(path) as h5_file:
        list_datasets(h5_file)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


# Stamps --------------------------------------------------------------------------------------------------


def rewrite_in_place(path: Path) -> None:
    with h5py.File(path, "r+") as h5_file:
        h5_file["labels"][0] = 99
    later = path.stat().st_mtime_ns + 1  # the clock of a file system may stand still for milliseconds
    os.utime(path, ns=(later, later))


def append(path: Path) -> None:
    with h5py.File(path, "a") as h5_file:
        h5_file["more"] = np.zeros(1000)


def replace(path: Path) -> None:
    other = path.with_name("other.h5")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)  # same size, same time, another file
    other.rename(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rewrite_in_place, "was written to"),
        (append, "changed its size from {before} to {after} bytes"),
        (lambda path: os.truncate(path, 1000), "changed its size from {before} to {after} bytes"),
        (replace, "was replaced by another file"),
        (Path.unlink, "is gone"),
        (lambda path: None, None),
    ],
    ids=["rewritten", "appended", "truncated", "replaced", "deleted", "untouched"],
)
def test_a_stamp_says_how_the_file_differs_now(path, change, words):
    stamp = FileStamp.of(path)
    before = path.stat().st_size
    change(path)
    after = path.stat().st_size if path.exists() else 0
    assert stamp.difference() == (words and words.format(before=before, after=after))
    # A file that was replaced or deleted is still whole for those who have it open.
    assert stamp.has_shrunk() == (words is not None and after < before and path.exists())


def test_a_stamp_does_not_depend_on_the_current_directory(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stamp = FileStamp.of("data.h5")
    monkeypatch.chdir("/")
    assert stamp.path == str(path)
    assert stamp.difference() is None


def test_reading_is_no_change(path):
    stamp = FileStamp.of(path)
    path.read_bytes()
    os.utime(path, ns=(path.stat().st_atime_ns + 10**9, path.stat().st_mtime_ns))
    assert stamp.difference() is None


# What is in a file ---------------------------------------------------------------------------------------


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A file with all sorts of things in it."""
    with h5py.File(tmp_path / "elsewhere.h5", "w") as h5_file:
        h5_file["x"] = np.arange(6)
    with h5py.File(tmp_path / "rich.h5", "w") as h5_file:
        h5_file["b/inner"] = np.zeros((5, 2), np.float32)
        h5_file["a"] = np.arange(5)
        h5_file["text"] = ["p", "q"]
        h5_file["scalar"] = 1
        h5_file["nothing"] = h5py.Empty("f4")
        h5_file["a_type"] = np.dtype("i4")
        h5_file["_gpufeed/crc32/a"] = np.arange(3)
        h5_file["hard"] = h5_file["a"]
        h5_file["soft"] = h5py.SoftLink("/b/inner")
        h5_file["external"] = h5py.ExternalLink("elsewhere.h5", "/x")
        h5_file["broken_soft"] = h5py.SoftLink("/nowhere")
        h5_file["broken_external"] = h5py.ExternalLink("gone.h5", "/x")
    return tmp_path / "rich.h5"


LISTED = "'a' (5,) int64, 'b/inner' (5, 2) float32, 'external' (6,) int64, 'soft' (5, 2) float32, 'text' (2,) object"


def test_arrays_are_listed_by_key_without_scalars_checksums_and_what_cannot_be_reached(rich):
    with open_file(rich) as h5_file:
        assert list(list_datasets(h5_file)) == ["a", "b/inner", "external", "soft", "text"]


@pytest.mark.parametrize("key", ["a", "/a", "b/inner", "/b/inner", "hard", "soft", "external"])
def test_a_dataset_is_found_by_every_name_it_has(rich, key):
    with open_file(rich) as h5_file:
        assert isinstance(open_h5_dataset(h5_file, key), h5py.Dataset)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("imags", "{path}: no dataset 'imags'. It has: {listed}."),
        ("b/inner/x", "{path}: no dataset 'b/inner/x'. It has: {listed}."),
        ("b/nothing", "{path}: no dataset 'b/nothing'. It has: {listed}."),
        ("", "{path}: no dataset ''. It has: {listed}."),
        (
            "broken_soft",
            "{path}: key 'broken_soft' is a link to '/nowhere', which is not in the file. It has: {listed}.",
        ),
        ("b", "{path}: 'b' is a group, not a dataset. The file has: {listed}."),
        ("/", "{path}: '/' is a group, not a dataset. The file has: {listed}."),
        ("a_type", "{path}: 'a_type' is a named type, not a dataset. The file has: {listed}."),
        (
            "broken_external",
            "{path}: key 'broken_external' is a link to '/x' in the file 'gone.h5', which cannot be opened. Put that "
            "file back or name another key.",
        ),
    ],
)
def test_a_key_that_is_no_dataset_is_refused_with_those_there_are(rich, key, message):
    with open_file(rich) as h5_file, pytest.raises(LayoutError) as error:
        open_h5_dataset(h5_file, key)
    assert str(error.value) == message.format(path=rich, listed=LISTED)


def test_a_file_without_datasets_says_so(tmp_path):
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    with open_file(tmp_path / "empty.h5") as h5_file, pytest.raises(LayoutError) as error:
        open_h5_dataset(h5_file, "x")
    assert str(error.value) == f"{tmp_path / 'empty.h5'}: no dataset 'x'. It has: no datasets at all."


def test_types_have_names_even_where_numpy_knows_none(tmp_path):
    with h5py.File(tmp_path / "types.h5", "w") as h5_file:
        h5_file["x"] = np.zeros(3, np.uint8)
        space = h5py.h5s.create_simple((3,))
        h5py.h5d.create(h5_file.id, b"time", h5py.h5t.UNIX_D32LE, space)
        assert type_name(h5_file["x"]) == "uint8"
        assert type_name(h5_file["time"]) == "unknown type"


# Attributes ----------------------------------------------------------------------------------------------


def test_small_attributes_of_numbers_and_text_are_kept(path):
    kept = {
        "number": np.float64(0.5),
        "mean": np.array([0.1, 0.2, 0.3]),
        "layout": "NCHW",
        "class_names": np.array(["cat", "dog"], dtype=object),
        "fixed": np.bytes_(b"fixed"),
        "flag": np.bool_(True),
    }
    with h5py.File(path, "a") as h5_file:
        h5_file["images"].attrs.update(kept)
        h5_file["images"].attrs["long"] = np.zeros(5000)
        h5_file["images"].attrs["empty"] = h5py.Empty("f4")
        h5_file["images"].attrs["reference"] = h5_file["labels"].ref
        h5_file["images"].attrs["pairs"] = np.zeros(2, [("a", "i4"), ("b", "f4")])
        # What netCDF and every file with dimension scales holds: arrays of references, and compounds with some.
        h5_file["labels"].make_scale("sample")
        h5_file["images"].dims[0].attach_scale(h5_file["labels"])
    with open_file(path) as h5_file:
        picked = pick_attributes(h5_file["images"], most_elements=4999)
        assert pick_attributes(h5_file["labels"]).keys() == {"CLASS", "NAME"}
    assert picked.keys() == kept.keys()
    for name, value in kept.items():
        np.testing.assert_array_equal(picked[name], value)


def test_a_file_that_may_not_be_read_stays_an_error_of_permissions(path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(h5py, "File", refuse)
    with pytest.raises(PermissionError, match="Permission denied"), open_file(path):
        pass


@pytest.mark.parametrize(
    "number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=["ENOLCK", "EOPNOTSUPP", "ENOSYS"]
)
def test_without_locks_a_file_is_opened_without_one_and_with_the_same_cache(path, monkeypatch, number):
    h5_file_class, asked = h5py.File, []

    def open_(name: str, mode: str, **options: object) -> object:
        asked.append((mode, options["locking"], options["rdcc_nbytes"]))
        if options["locking"]:
            raise OSError(number, "no locks available")
        return h5_file_class(name, mode, **options)

    monkeypatch.setattr(h5py, "File", open_)
    with open_file(path, 1 << 16) as h5_file:
        assert h5_file.mode == "r"
    assert asked == [("r", "best-effort", 1 << 16), ("r", False, 1 << 16)]


@pytest.mark.parametrize("value", ["TRUE", "true", "1"])
def test_a_setting_that_insists_on_locks_is_named(path, monkeypatch, value):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", value)
    monkeypatch.setattr(h5py, "File", refuse)
    with (
        pytest.raises(LayoutError, match=rf"HDF5_USE_FILE_LOCKING={value} insists on them\. Unset it"),
        open_file(path),
    ):
        pass


def test_a_file_that_this_process_writes_is_refused_and_not_left_open(path):
    with h5py.File(path, "r+") as h5_file:
        count = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)
        with pytest.raises(LayoutError, match="this process has it open for writing"), open_file(path):
            pass
        assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE) == count
        h5_file["images"][0] = 1
