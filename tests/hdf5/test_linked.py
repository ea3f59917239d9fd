"""Datasets whose bytes lie in other files: the right file is found, and one that is gone is an error, not zeros."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_gpufeed.errors import FeedError, GpuFeedError, LayoutError
from lightning_gpufeed.hdf5.layout import Engine, read_layout
from lightning_gpufeed.hdf5.source import H5Source


def write(path: Path, key: str = "x", values: Any = None) -> Path:
    """Write one array to a file, which may hold others already; 1 to 5 if no values are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "a") as h5_file:
        h5_file[key] = np.arange(1, 6) if values is None else values
    return path


def write_virtual(path: Path, *sources: tuple[str, str], key: str = "x", fillvalue: int = 0) -> Path:
    """Write a virtual dataset of five samples from each source, given as (file, key)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    layout = h5py.VirtualLayout((5 * len(sources),), "i8")
    for number, (file, source_key) in enumerate(sources):
        layout[5 * number : 5 * number + 5] = h5py.VirtualSource(file, source_key, (5,))
    with h5py.File(path, "a") as h5_file:
        h5_file.create_virtual_dataset(key, layout, fillvalue=fillvalue)
    return path


def read(path: Path, key: str = "x") -> list[int]:
    """All samples, as the package reads them."""
    source = H5Source(path, key)
    values = source.read_field(key, np.arange(source.num_samples)).tolist()
    source.close()
    return values


def refusal(path: Path, key: str = "x") -> str:
    with pytest.raises(LayoutError) as error:
        read_layout(path, key)
    return str(error.value)


def files_of(path: Path, key: str = "x") -> list[str]:
    return [stamp.path for stamp in read_layout(path, key).stamps]


# Virtual datasets ----------------------------------------------------------------------------------------


def test_a_virtual_dataset_is_read_and_every_file_of_it_is_watched(tmp_path):
    sources = [write(tmp_path / f"part{n}.h5", values=np.arange(5) + 10 * n) for n in range(3)]
    path = write_virtual(tmp_path / "all.h5", *[(str(source), "x") for source in sources])
    assert read(path) == [10 * n + i for n in range(3) for i in range(5)]
    assert files_of(path) == [str(path), *map(str, sources)]


def test_sources_in_the_same_file(tmp_path):
    path = write(tmp_path / "all.h5", "a/part")
    write_virtual(path, (".", "a/part"), (str(path), "/a/part"))
    assert read(path) == [1, 2, 3, 4, 5] * 2
    assert files_of(path) == [str(path)]


def test_virtual_datasets_of_virtual_datasets(tmp_path):
    write(tmp_path / "deep.h5")
    write_virtual(tmp_path / "middle.h5", ("deep.h5", "x"))
    path = write_virtual(tmp_path / "top.h5", ("middle.h5", "x"))
    assert read(path) == [1, 2, 3, 4, 5]
    assert files_of(path) == [str(tmp_path / name) for name in ("top.h5", "middle.h5", "deep.h5")]
    (tmp_path / "deep.h5").unlink()
    assert refusal(path) == (
        f"{tmp_path / 'middle.h5'}: the virtual dataset '/x' takes samples from the file 'deep.h5', which is not "
        f"there; HDF5 would return fill values in its place. Put it back, or build the virtual dataset again."
    )


def test_a_virtual_dataset_behind_an_external_link(tmp_path):
    write(tmp_path / "far" / "part.h5")
    write_virtual(tmp_path / "far" / "virtual.h5", ("part.h5", "x"))
    with h5py.File(tmp_path / "near.h5", "w") as h5_file:
        h5_file["x"] = h5py.ExternalLink("far/virtual.h5", "/x")
    assert read(tmp_path / "near.h5") == [1, 2, 3, 4, 5]
    assert len(files_of(tmp_path / "near.h5")) == 3


def test_a_source_file_that_is_gone(tmp_path):
    source = write(tmp_path / "part.h5")
    path = write_virtual(tmp_path / "all.h5", (str(source), "x"))
    source.unlink()
    assert refusal(path) == (
        f"{path}: the virtual dataset '/x' takes samples from the file {str(source)!r}, which is not there; HDF5 would "
        f"return fill values in its place. Put it back, or build the virtual dataset again."
    )


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_source_dataset_that_is_gone(tmp_path, position):
    source = write(tmp_path / "part.h5")
    keys = ["x", "x", "x"]
    keys[position] = "gone"
    path = write_virtual(tmp_path / "all.h5", *[("part.h5", key) for key in keys])
    assert refusal(path) == (
        f"{path}: the virtual dataset '/x' takes samples from the dataset 'gone' in {str(source)!r}, which is not "
        f"there; HDF5 would return fill values in its place. Put it back, or build the virtual dataset again."
    )


def test_a_source_dataset_that_is_gone_from_the_same_file(tmp_path):
    path = write_virtual(write(tmp_path / "all.h5", "part"), (".", "part"), (".", "gone"))
    assert refusal(path) == (
        f"{path}: the virtual dataset '/x' takes samples from the dataset 'gone' in the same file, which is not there; "
        f"HDF5 would return fill values in its place. Put it back, or build the virtual dataset again."
    )


def test_a_source_that_is_a_group(tmp_path):
    source = write(tmp_path / "part.h5", "x/inner")
    path = write_virtual(tmp_path / "all.h5", ("part.h5", "x"))
    assert refusal(path) == (
        f"{path}: the virtual dataset '/x' takes samples from the dataset 'x' in {str(source)!r}, which is not there; "
        f"HDF5 would return fill values in its place. Put it back, or build the virtual dataset again."
    )


def test_a_source_file_that_is_not_hdf5(tmp_path):
    (tmp_path / "part.h5").write_bytes(b"no HDF5 at all")
    path = write_virtual(tmp_path / "all.h5", ("part.h5", "x"))
    assert f"{tmp_path / 'part.h5'} is not an HDF5 file: 14 bytes" in refusal(path)


def test_a_source_file_that_is_truncated(tmp_path):
    source = write(tmp_path / "part.h5", values=np.zeros(5000))
    path = write_virtual(tmp_path / "all.h5", ("part.h5", "x"))
    os.truncate(source, 3000)
    assert f"{source}: truncated: it has 3000 bytes" in refusal(path)


def test_a_source_with_fewer_samples_than_are_taken_from_it(tmp_path):
    write(tmp_path / "part.h5", values=np.arange(3))
    path = write_virtual(tmp_path / "all.h5", ("part.h5", "x"))
    with pytest.raises(GpuFeedError):  # at once or when it is read, but no made-up samples
        read(path)


@pytest.mark.parametrize("name", [".", "self.h5"])
def test_a_virtual_dataset_of_itself(tmp_path, name):
    path = write_virtual(tmp_path / "self.h5", (name, "x"))
    assert refusal(path) == (
        f"{path}: the virtual dataset '/x' takes samples from itself, through {path} '/x'. Build it again without the "
        f"circle."
    )


def test_virtual_datasets_in_a_circle(tmp_path):
    # HDF5 itself runs out of stack on these and takes the process with it.
    paths = [write_virtual(tmp_path / f"{one}.h5", (f"{other}.h5", "x")) for one, other in ("ab", "bc", "ca")]
    assert refusal(paths[0]) == (
        f"{paths[0]}: the virtual dataset '/x' takes samples from itself, through {paths[0]} '/x'. Build it again "
        f"without the circle."
    )


def test_one_source_twice_is_no_circle(tmp_path):
    write(tmp_path / "part.h5")
    write_virtual(tmp_path / "middle.h5", ("part.h5", "x"), ("part.h5", "x"))
    path = write_virtual(tmp_path / "top.h5", ("middle.h5", "x"), ("middle.h5", "x"))
    assert read(path) == [1, 2, 3, 4, 5] * 2


def test_samples_that_no_source_gives_are_the_fill_value(tmp_path):
    write(tmp_path / "part.h5")
    layout = h5py.VirtualLayout((8,), "i8")
    layout[2:7] = h5py.VirtualSource("part.h5", "x", (5,))
    with h5py.File(tmp_path / "all.h5", "w") as h5_file:
        h5_file.create_virtual_dataset("x", layout, fillvalue=-1)
    assert read(tmp_path / "all.h5") == [-1, -1, 1, 2, 3, 4, 5, -1]


def test_thousands_of_mappings_of_one_file_are_looked_at_once(tmp_path):
    # Detectors write one mapping for each frame. Opening the source for each took seconds.
    write(tmp_path / "part.h5", values=np.arange(2000))
    layout = h5py.VirtualLayout((2000,), "i8")
    source = h5py.VirtualSource("part.h5", "x", (2000,))
    for frame in range(2000):
        layout[frame : frame + 1] = source[1999 - frame : 2000 - frame]
    with h5py.File(tmp_path / "all.h5", "w") as h5_file:
        h5_file.create_virtual_dataset("x", layout)
    opened = count_opened_files(lambda: read_layout(tmp_path / "all.h5", "x"))
    assert opened.count(str(tmp_path / "part.h5")) <= 2


def count_opened_files(action: Any) -> list[str]:
    """The files that h5py opens by name during an action."""
    opened: list[str] = []
    original = h5py.File.__init__

    def logged(self: Any, name: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(name, str | Path):
            opened.append(str(name))
        original(self, name, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(h5py.File, "__init__", logged)
        action()
    return opened


def arrangements() -> list[Any]:
    """Every choice of places for the source, for every way to name it."""
    places = ("beside the link", "beside the file", "current directory")
    chosen = [set(some) for size in range(4) for some in itertools.combinations(places, size)]
    return [
        pytest.param(name, some, id=f"{name}-{' and '.join(sorted(some)) or 'nowhere'}")
        for name in ("part.h5", "sub/part.h5", "absolute/part.h5")
        for some in chosen
    ]


@pytest.mark.parametrize(("name", "places"), arrangements())
def test_a_source_is_looked_for_where_hdf5_looks_for_it(tmp_path, monkeypatch, name, places):
    """The virtual file is reached through a symbolic link; h5py itself says which of the candidates is read."""
    folders = {
        "beside the link": tmp_path / "link",
        "beside the file": tmp_path / "real",
        "current directory": tmp_path / "current",
    }
    for folder in folders.values():
        folder.mkdir()
    named = name
    if name.startswith("absolute/"):
        # An absolute name whose folder was moved: HDF5 then looks for the bare name.
        named, name = str(tmp_path / "moved" / "part.h5"), "part.h5"
    candidates = {}
    for number, place in enumerate(folders, start=1):
        if place in places:
            candidates[number] = write(folders[place] / name, values=np.arange(5) + 10 * number)
    path = write_virtual(tmp_path / "real" / "all.h5", (named, "x"), fillvalue=-1)
    (tmp_path / "link" / "all.h5").symlink_to(path)
    monkeypatch.chdir(tmp_path / "current")
    link = tmp_path / "link" / "all.h5"
    with h5py.File(link) as h5_file:
        truth = h5_file["x"][...].tolist()
    if truth == [-1] * 5:
        assert "which is not there" in refusal(link)
    else:
        assert read(link) == truth
        assert str(candidates[truth[0] // 10]) in [os.path.realpath(file) for file in files_of(link)]


def test_a_source_found_through_the_current_directory_ties_the_loader_to_it(tmp_path, monkeypatch):
    # Several tools change the directory after a program has begun; HDF5 would then find nothing and say nothing.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data" / "part.h5")
    path = write_virtual(tmp_path / "elsewhere" / "all.h5", ("data/part.h5", "x"))
    source = H5Source(path, "x")
    assert read_layout(path, "x").directory == str(tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(FeedError) as error:
        source.read_new(np.arange(5))
    assert str(error.value) == (
        f"{path}: dataset 'x' names files relative to {tmp_path}, but the current directory is now "
        f"{tmp_path / 'elsewhere'}; HDF5 would not find them. Stay in the directory, or store absolute names."
    )
    monkeypatch.chdir(tmp_path)
    assert source.read_new(np.arange(5))["x"].tolist() == [1, 2, 3, 4, 5]
    source.close()


# External raw files --------------------------------------------------------------------------------------


def write_external(path: Path, *parts: tuple[str, int, Any], num_samples: int = 10) -> Path:
    """Write a dataset of int64 that keeps its bytes in raw files: (name, offset, size) of each."""
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("x", (num_samples,), "i8", external=list(parts))
    return path


UNLIMITED = h5py.h5f.UNLIMITED


def test_samples_in_external_raw_files_are_read(tmp_path):
    np.arange(20).tofile(tmp_path / "raw.bin")
    path = write_external(tmp_path / "data.h5", (str(tmp_path / "raw.bin"), 16, UNLIMITED))
    assert read(path) == list(range(2, 12))
    assert files_of(path) == [str(path), str(tmp_path / "raw.bin")]


def test_samples_in_several_external_raw_files_are_read(tmp_path):
    np.arange(4).tofile(tmp_path / "first.bin")
    np.arange(4, 10).tofile(tmp_path / "second.bin")  # holds the rest and not a byte more
    parts = [(str(tmp_path / "first.bin"), 0, 32), (str(tmp_path / "second.bin"), 0, UNLIMITED)]
    assert read(write_external(tmp_path / "data.h5", *parts)) == list(range(10))


def test_an_external_raw_file_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_external(tmp_path / "data.h5", ("raw.bin", 0, 80))
    (tmp_path / "raw.bin").unlink(missing_ok=True)
    assert refusal(path) == (
        f"{path}: dataset '/x' keeps its bytes in the external file 'raw.bin', which is not there (a relative name "
        f"counts from {tmp_path}). Put it back, or start from the right directory."
    )


@pytest.mark.parametrize("size", [80, 1000, UNLIMITED], ids=["exact", "larger", "unlimited"])
def test_an_external_raw_file_that_is_too_short(tmp_path, size):
    raw = tmp_path / "raw.bin"
    np.arange(10).tofile(raw)
    path = write_external(tmp_path / "data.h5", (str(raw), 8, size))
    os.truncate(raw, 87)
    assert refusal(path) == (
        f"{path}: dataset '/x' needs 88 bytes of the external file {str(raw)!r}, which has 87; HDF5 would return fill "
        f"values for the rest. Copy the external file again."
    )


def test_an_external_raw_file_ties_the_loader_to_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    np.arange(10).tofile("raw.bin")
    source = H5Source(write_external(tmp_path / "data.h5", ("raw.bin", 0, 80)), "x")
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(FeedError, match="names files relative to"):
        source.read_new(np.arange(3))


def test_an_external_raw_file_that_changes_is_noticed(tmp_path):
    raw = tmp_path / "raw.bin"
    np.arange(10).tofile(raw)
    source = H5Source(write_external(tmp_path / "data.h5", (str(raw), 0, 80)), "x")
    np.arange(11).tofile(raw)
    with pytest.raises(FeedError) as error:
        source.check_unchanged()
    assert str(error.value) == (
        f"{raw} changed its size from 80 to 88 bytes since it was opened, so its samples may lie elsewhere now. "
        f"Build the loader or DataModule again to use the new file."
    )


# Links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, (2, 100)], ids=["one block", "chunks"])
def test_an_external_link_is_gathered_from_the_file_it_leads_to(tmp_path, chunks):
    values = np.arange(500).reshape(5, 100)
    with h5py.File(tmp_path / "other.h5", "w", userblock_size=1024) as h5_file:
        h5_file["padding"] = np.zeros(777)
        h5_file.create_dataset("deep/x", data=values, chunks=chunks)
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        h5_file["x"] = h5py.ExternalLink("other.h5", "/deep/x")
    layout = read_layout(tmp_path / "data.h5", "x")
    assert layout.engine is Engine.RAW
    assert (layout.path, layout.storage_path) == (str(tmp_path / "data.h5"), str(tmp_path / "other.h5"))
    assert files_of(tmp_path / "data.h5") == [str(tmp_path / "data.h5"), str(tmp_path / "other.h5")]
    assert read(tmp_path / "data.h5") == values.tolist()


def test_a_linked_file_that_changes_is_noticed(tmp_path):
    write(tmp_path / "other.h5")
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        h5_file["x"] = h5py.ExternalLink("other.h5", "/x")
    source = H5Source(tmp_path / "data.h5", "x")
    write(tmp_path / "other.h5", "more", np.zeros(1000))
    with pytest.raises(FeedError, match=r"other\.h5 changed its size"):
        source.check_unchanged()


def test_a_linked_file_that_is_gone(tmp_path):
    write(tmp_path / "other.h5")
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file["x"] = h5py.ExternalLink("other.h5", "/x")
    (tmp_path / "other.h5").unlink()
    assert refusal(path) == (
        f"{path}: key 'x' is a link to '/x' in the file 'other.h5', which cannot be opened. Put that file back or name "
        f"another key."
    )


@pytest.mark.parametrize("key", ["soft", "hard", "group_link/x", "chain"])
def test_links_inside_a_file_lead_to_the_same_samples(tmp_path, key):
    path = write(tmp_path / "data.h5", "group/x")
    with h5py.File(path, "a") as h5_file:
        h5_file["soft"] = h5py.SoftLink("/group/x")
        h5_file["hard"] = h5_file["group/x"]
        h5_file["group_link"] = h5py.SoftLink("/group")
        h5_file["chain"] = h5py.SoftLink("/soft")
    assert read(path, key) == [1, 2, 3, 4, 5]
    assert read_layout(path, key).block_offsets.tolist() == read_layout(path, "group/x").block_offsets.tolist()


def test_the_user_may_reach_the_file_through_a_symbolic_link(tmp_path):
    write(tmp_path / "real.h5", values=np.ones((5, 100)))
    (tmp_path / "link.h5").symlink_to("real.h5")
    assert read(tmp_path / "link.h5") == np.ones((5, 100)).tolist()
