from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.layout import Engine, read_layout
from lightning_gpufeed.hdf5.repack import inputs as repack_source
from lightning_gpufeed.hdf5.repack import repack as repack_module
from lightning_gpufeed.hdf5.repack.repack import RepackReport, repack
from lightning_gpufeed.hdf5.source import H5Source
from lightning_gpufeed.hdf5.writer import pack, verify
from tests.contracts import as_bytes
from tests.doubles import thin_package

COMPRESSIONS = [None, "gzip", "lz4", "zstd"]


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write(path: Path, **arrays: Any) -> Path:
    """Write datasets, each given as an array or as an array and h5py's options."""
    with h5py.File(path, "w") as file:
        for key, value in arrays.items():
            data, options = value if isinstance(value, tuple) else (value, {})
            file.create_dataset(key, data=data, **options)
    return path


def values_of(path: Path, key: str) -> Any:
    with h5py.File(path, "r") as file:
        return file[key][...]


def assert_same(one: Path, two: Path, key: str) -> None:
    """Whether an array is the same in two files: shape, values bit for bit, type apart from the byte order."""
    expected, found = values_of(one, key), values_of(two, key)
    assert expected.shape == found.shape
    assert expected.dtype.newbyteorder("=") == found.dtype.newbyteorder("=")
    if expected.dtype.kind == "O":
        assert [np.asarray(value).tolist() for value in expected.flat] == [
            np.asarray(value).tolist() for value in found.flat
        ]
    else:
        assert as_bytes(expected.astype(found.dtype)) == as_bytes(found)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".partial" in path.name)


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(PackError) as error:
        repack(*arguments, **options)
    return str(error.value)


class Stop(BaseException):
    """What Ctrl-C is: no error of repacking."""


def interrupt(source: Any, out: Path, *, stage: str = "writing", after: int, **options: Any) -> None:
    """Repack until so many rows are dealt with, then stop as Ctrl-C does."""

    def stop(progress: Any) -> None:
        if progress.stage == stage and progress.rows_done >= after:
            raise Stop

    with pytest.raises(Stop):
        repack(source, out, on_progress=stop, **options)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 1 KiB, each followed by a journal entry, so that little data has many of them."""
    monkeypatch.setattr(repack_source, "_BLOCK_BYTES", 1024)
    monkeypatch.setattr(repack_module, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(repack_module, "_PROGRESS_SECONDS", 0.0)


# -- values


def write_all_kinds(path: Path) -> list[str]:
    """A file with an array of every kind that can be repacked; gives their keys."""
    floats = np.random.default_rng(0).standard_normal((70, 5, 7)).astype(np.float32)
    floats[3] = np.nan
    floats.view(np.uint32)[4, 0, 0] = 0x7FC00123  # a NaN with a payload
    with h5py.File(path, "w") as file:
        file.create_dataset("split", data=pixels(70, 3, 10, 9), chunks=(32, 3, 9, 9))
        file.create_dataset("gzip", data=pixels(70, 8, 8), chunks=(64, 8, 8), compression="gzip", shuffle=True)
        file.create_dataset("sums", data=pixels(70, 6), chunks=(7, 6), fletcher32=True)
        file["big"] = floats.astype(">f4")
        file["half"], file["double"] = floats.astype(np.float16), floats.astype(np.float64)
        file["complex"], file["flags"] = np.arange(70) * 1j, np.arange(70) % 3 == 0
        file["wide"] = np.arange(70, dtype=np.uint64) + 2**63
        kinds = h5py.enum_dtype({"cat": 0, "dog": 300}, basetype=">i2")
        file.create_dataset("enum", data=np.arange(70) % 2 * 300, dtype=kinds)
        file.create_dataset("filled", (70, 4, 4), np.int16, chunks=(10, 4, 4), fillvalue=-7)[13:27] = 5
        file["text"] = np.array([f"näme {i}" for i in range(70)], dtype=h5py.string_dtype())
        file["letters"] = np.array([b"ab", b"cde"] * 35)
        ragged = file.create_dataset("ragged", (70,), h5py.vlen_dtype(np.int32))
        for row in range(70):
            ragged[row] = np.arange(row % 4)
        file["none"], file["nothing"] = np.zeros((0, 4)), np.zeros((70, 0, 2))
        file["group/deep"] = np.arange(140).reshape(70, 2)
        return sorted([*(key for key in file if key != "group"), "group/deep"])


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_every_kind_of_array_comes_back_as_it_was(tmp_path, compress):
    keys = write_all_kinds(tmp_path / "x.h5")
    report = repack(tmp_path / "x.h5", tmp_path / "y.h5", compress=compress, chunk_bytes=2000)
    assert sorted(report.arrays) == keys
    assert report.left_out == ()
    for key in keys:
        assert_same(tmp_path / "x.h5", tmp_path / "y.h5", key)
    assert h5py.check_enum_dtype(read_dtype(tmp_path / "y.h5", "enum")) == {"cat": 0, "dog": 300}
    assert verify(tmp_path / "y.h5") > 20
    with h5py.File(tmp_path / "y.h5") as file:
        assert file["split"].chunks == (2000 // 270, 3, 10, 9)
        assert file["split"].id.get_create_plist().get_nfilters() == (0 if compress is None else 1)
    assert leftovers(tmp_path) == []


def read_dtype(path: Path, key: str) -> np.dtype[Any]:
    with h5py.File(path) as file:
        return file[key].dtype


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    st.integers(1, 40),
    st.lists(st.integers(1, 5), max_size=3),
    st.data(),
)
def test_any_shape_in_any_chunks_comes_back(tmp_path_factory, num_rows, sample_shape, data):
    folder = tmp_path_factory.mktemp("any")
    shape = (num_rows, *sample_shape)
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    write(folder / "x.h5", a=(values, {"chunks": chunks}))
    compress = data.draw(st.sampled_from(COMPRESSIONS))
    repack(folder / "x.h5", folder / "y.h5", compress=compress, chunk_bytes=data.draw(st.integers(1, 400)))
    assert (values_of(folder / "y.h5", "a") == values).all()
    assert read_layout(folder / "y.h5", "a").has_split_samples is False
    verify(folder / "y.h5")
    shutil.rmtree(folder)


def test_the_new_layout_is_gathered_from_the_mapped_file_in_chunks_of_a_quarter_to_one_megabyte(tmp_path):
    write(tmp_path / "x.h5", images=(pixels(50, 3, 218, 178), {"chunks": (25, 3, 217, 178)}))
    assert read_layout(tmp_path / "x.h5", "images").engine is not Engine.RAW
    report = repack(tmp_path / "x.h5", tmp_path / "y.h5")
    assert 250_000 <= report.arrays["images"].chunk_bytes <= 1_000_000
    assert report.arrays["images"].chunk_before == (25, 3, 217, 178)
    assert read_layout(tmp_path / "y.h5", "images").engine is Engine.RAW
    # The old chunks were padded: nearly twice the data.
    assert report.file_bytes < 0.55 * report.bytes_before
    assert report.compared_bytes == 50 * 3 * 218 * 178


def test_a_row_of_chunks_that_is_too_large_to_be_read_whole_is_read_in_parts(tmp_path, monkeypatch, small_blocks):
    monkeypatch.setattr(repack_source, "_MOST_BAND_BYTES", 4000)
    write(tmp_path / "x.h5", a=(pixels(90, 10, 10), {"chunks": (64, 5, 10), "compression": "gzip"}))
    repack(tmp_path / "x.h5", tmp_path / "y.h5")
    assert_same(tmp_path / "x.h5", tmp_path / "y.h5", "a")


def test_arrays_of_a_split_keep_their_own_lengths(tmp_path):
    write(tmp_path / "x.h5", x_train=pixels(60, 4, 4), y_train=np.arange(60), x_test=pixels(10, 4, 4))
    repack(tmp_path / "x.h5", tmp_path / "y.h5")
    for key in ("x_train", "y_train", "x_test"):
        assert_same(tmp_path / "x.h5", tmp_path / "y.h5", key)


def test_a_virtual_dataset_becomes_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layout = h5py.VirtualLayout((20, 4), np.uint8)
    for number in range(2):
        write(tmp_path / f"part{number}.h5", a=pixels(10, 4, seed=number))
        layout[number * 10 : number * 10 + 10] = h5py.VirtualSource(f"part{number}.h5", "a", (10, 4))
    with h5py.File("x.h5", "w") as file:
        file.create_virtual_dataset("a", layout)
    repack("x.h5", "y.h5")
    assert_same(Path("x.h5"), Path("y.h5"), "a")
    os.unlink("part1.h5")
    assert values_of(Path("y.h5"), "a")[10:].any()
    assert "takes samples from the file 'part1.h5', which is not there" in refusal("x.h5", "z.h5")


def test_what_is_chosen_by_name_is_all_there_is(tmp_path):
    write(tmp_path / "x.h5", a=np.arange(5), b=np.arange(6), c=np.arange(7))
    report = repack(tmp_path / "x.h5", tmp_path / "y.h5", keys=["c", "a"])
    assert list(report.arrays) == ["c", "a"]
    with h5py.File(tmp_path / "y.h5") as file:
        assert sorted(file) == ["_gpufeed", "a", "c"]


# -- several files


def test_files_are_joined_in_the_order_they_are_given_in(tmp_path):
    for number, rows in enumerate((7, 0, 12)):
        write(
            tmp_path / f"{number}.h5",
            a=pixels(rows, 4, seed=number),
            t=np.array([f"{number}.{row}" for row in range(rows)], dtype=h5py.string_dtype()),
        )
    paths = [tmp_path / f"{number}.h5" for number in (2, 1, 0)]
    repack(paths, tmp_path / "y.h5", chunk_bytes=20)
    for key in ("a", "t"):
        expected = np.concatenate([values_of(path, key) for path in paths])
        assert (values_of(tmp_path / "y.h5", key) == expected).all()
    with h5py.File(tmp_path / "y.h5") as file:
        assert file["a"].chunks == (5, 4)


def test_files_that_do_not_fit_each_other_are_refused_by_name(tmp_path):
    one = write(tmp_path / "1.h5", a=pixels(5, 4), b=np.arange(5))
    two = write(tmp_path / "2.h5", a=pixels(5, 3), b=np.arange(5))
    message = refusal([one, two], tmp_path / "y.h5")
    assert "samples are uint8 (4,) in" in message
    assert f"but uint8 (3,) in {two}" in message
    assert message.endswith("Leave them out with --keys b")
    three = write(tmp_path / "3.h5", a=pixels(5, 4))
    assert f"{three}: no dataset 'b'" in refusal([one, three], tmp_path / "y.h5")


def test_classes_of_other_names_are_not_joined(tmp_path):
    for name, classes in (("1.h5", ["cat", "dog"]), ("2.h5", ["dog", "cat"])):
        write(tmp_path / name, labels=np.arange(4))
        with h5py.File(tmp_path / name, "r+") as file:
            file["labels"].attrs["class_names"] = classes
    assert "so that the same number means different things" in refusal(
        [tmp_path / "1.h5", tmp_path / "2.h5"], tmp_path / "y.h5"
    )


def test_statistics_of_one_file_are_not_kept_for_several(tmp_path):
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", pixels(20, 3, 8, 8, seed=number))
        pack(tmp_path / f"{number}.npy", tmp_path / f"{number}.h5")
    report = repack([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "y.h5")
    with h5py.File(tmp_path / "y.h5") as file:
        assert sorted(file["images"].attrs) == ["layout"]
    assert [name for name, _ in report.left_out] == ["images@mean", "images@std"]


# -- what hangs around the arrays


def test_attributes_groups_and_single_values_are_kept(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w", libver=("v108", "latest")) as file:
        file["g/a"] = np.arange(5)
        file["g/a"].attrs["unit"] = "metre"
        file["g/a"].attrs["names"] = np.array(["a", "bb"], dtype=h5py.string_dtype())
        file["g/a"].attrs["bytes"] = np.bytes_(b"xyz")
        file["g/a"].attrs["matrix"] = np.eye(3)
        file["g/a"].attrs["empty"] = h5py.Empty("f4")
        file["g/a"].attrs["records"] = np.array([(1, 2.0)], dtype=[("i", "i4"), ("f", "f8")])
        file["g"].attrs["of the group"] = 3
        file.attrs["large"] = np.zeros(20_000)  # above 64 KiB
        file["version"], file["author"] = 7, "me"
        file["version"].attrs["of"] = "format"
    report = repack(tmp_path / "x.h5", tmp_path / "y.h5")
    assert report.left_out == ()
    with h5py.File(tmp_path / "x.h5") as old, h5py.File(tmp_path / "y.h5") as new:
        for name in ("/", "g", "g/a", "version"):
            for attribute, value in old[name].attrs.items():
                if attribute == "empty":
                    assert new[name].attrs[attribute].dtype == np.float32
                else:
                    np.testing.assert_array_equal(new[name].attrs[attribute], value)
        assert (new["version"][()], new["author"][()]) == (7, b"me")


def test_what_ties_objects_of_the_old_file_together_is_left_out_by_name(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"], file["axis"] = np.zeros((4, 3)), np.arange(3.0)
        file["axis"].make_scale("axis")
        file["a"].dims[1].attach_scale(file["axis"])
        file["a"].attrs["see"] = file["axis"].ref
        file["g/soft"] = h5py.SoftLink("/a")
        file["g/broken"] = h5py.ExternalLink("gone.h5", "/a")
        file["record"] = np.array((1, 2.0), dtype=[("i", "i4"), ("f", "f8")])
        file["_gpufeed/skipped"] = ["broken.png"]
    report = repack(tmp_path / "x.h5", tmp_path / "y.h5")
    assert {name for name, _ in report.left_out} == {
        "a@DIMENSION_LIST",
        "a@see",
        "axis@CLASS",
        "axis@NAME",
        "axis@REFERENCE_LIST",
        "g/soft",
        "g/broken",
        "record",
        "_gpufeed/skipped",
    }


def test_a_quantised_file_stays_one_and_others_do_not_become_one(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((20, 8, 8)))
    pack(tmp_path / "x.npy", tmp_path / "packed.h5", quantize="auto")
    repack(tmp_path / "packed.h5", tmp_path / "y.h5")
    old, new = (read_layout(tmp_path / name, "images") for name in ("packed.h5", "y.h5"))
    assert new.is_packed
    assert new.attributes["scale"] == old.attributes["scale"]
    write(tmp_path / "other.h5", images=pixels(20, 8, 8))
    with h5py.File(tmp_path / "other.h5", "r+") as file:
        file["images"].attrs["scale"] = 0.5  # somebody else's, whatever it means
    repack(tmp_path / "other.h5", tmp_path / "z.h5")
    assert not read_layout(tmp_path / "z.h5", "images").is_packed


def test_a_packed_file_and_another_one_together_do_not_count_as_packed(tmp_path):
    np.save(tmp_path / "x.npy", pixels(20, 3, 8, 8))
    pack(tmp_path / "x.npy", tmp_path / "packed.h5")
    with h5py.File(write(tmp_path / "other.h5", images=pixels(20, 3, 8, 8)), "r+") as file:
        file["images"].attrs["layout"] = "NCHW"
    for paths in (["packed.h5", "other.h5"], ["other.h5", "packed.h5"]):
        repack([tmp_path / path for path in paths], tmp_path / "y.h5", overwrite=True)
        assert not read_layout(tmp_path / "y.h5", "images").is_packed


def test_a_loader_feeds_from_the_new_file(tmp_path):
    write_all_kinds(tmp_path / "x.h5")
    keys = ["split", "enum", "text", "ragged", "flags"]
    repack(tmp_path / "x.h5", tmp_path / "y.h5")
    order = np.random.default_rng(0).permutation(70)
    batches = []
    for name in ("x.h5", "y.h5"):
        source = H5Source(tmp_path / name, keys)
        batches.append(source.read_new(order))
        source.close()
    assert batches[0]["text"] == batches[1]["text"]
    for key in ("split", "enum", "flags"):
        assert as_bytes(batches[0][key]) == as_bytes(batches[1][key])


# -- what is refused


def test_image_files_are_refused_with_the_line_that_packs_them(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        images = file.create_dataset("images", (3,), h5py.vlen_dtype(np.uint8))
        images[0] = np.frombuffer(b"\xff\xd8\xff\xe0 and more", np.uint8)
        file["labels"] = np.arange(3)
    message = refusal(tmp_path / "x.h5", tmp_path / "y.h5")
    assert message.startswith(f"{tmp_path}/x.h5: 1 of its arrays cannot be repacked: 'images': holds JPEG files of ")
    assert "gpufeed pack package.module:dataset OUT.h5" in message
    assert message.endswith("Leave them out with --keys labels")
    assert repack(tmp_path / "x.h5", tmp_path / "y.h5", keys=["labels"]).arrays.keys() == {"labels"}


def test_records_are_refused_by_name(tmp_path):
    write(tmp_path / "x.h5", table=np.zeros(4, dtype=[("i", "i4"), ("f", "f8")]))
    assert re.search(r"'table': dataset 'table' has the element type \[", refusal(tmp_path / "x.h5", tmp_path / "y.h5"))


def test_no_hdf5_file_and_one_without_arrays_are_refused(tmp_path):
    (tmp_path / "x.h5").write_bytes(b"hello")
    assert "is not an HDF5 file" in refusal(tmp_path / "x.h5", tmp_path / "y.h5")
    write(tmp_path / "e.h5")
    assert "holds no arrays" in refusal(tmp_path / "e.h5", tmp_path / "y.h5")
    with pytest.raises(FileNotFoundError):
        repack(tmp_path / "nope.h5", tmp_path / "y.h5")
    with pytest.raises(FileNotFoundError, match="create"):
        repack(tmp_path / "e.h5", tmp_path / "no" / "y.h5")


@pytest.mark.parametrize(
    ("options", "text"),
    [({"chunk_bytes": 0}, "chunk_bytes is 0"), ({"keys": []}, "keys is empty"), ({"compress": "rar"}, "'rar'")],
)
def test_options_without_meaning_are_refused(tmp_path, options, text):
    with pytest.raises(ValueError, match=text):
        repack(write(tmp_path / "x.h5", a=np.arange(3)), tmp_path / "y.h5", **options)
    with pytest.raises(ValueError, match="sources is empty"):
        repack([], tmp_path / "y.h5")


def test_an_output_that_exists_is_replaced_only_if_asked_and_when_the_new_one_is_complete(tmp_path, small_blocks):
    source, out = write(tmp_path / "x.h5", a=pixels(100, 64)), write(tmp_path / "y.h5", old=np.arange(3))
    assert "--overwrite" in refusal(source, out)
    interrupt(source, out, after=50, overwrite=True)
    assert values_of(out, "old").tolist() == [0, 1, 2]
    repack(source, out, overwrite=True)
    assert_same(source, out, "a")
    (tmp_path / "folder").mkdir()
    assert "is a folder" in refusal(source, tmp_path / "folder", overwrite=True)


def test_a_file_can_take_the_place_of_its_source(tmp_path):
    source = write(tmp_path / "x.h5", a=(pixels(40, 9, 9), {"chunks": (40, 5, 5)}))
    shutil.copy(source, tmp_path / "copy.h5")
    repack(source, source, overwrite=True)
    assert_same(tmp_path / "copy.h5", source, "a")


def test_what_cannot_fit_on_the_disk_is_refused_before_it_is_begun(tmp_path):
    # Twice the free room, of which nothing is on disk.
    rows = shutil.disk_usage(tmp_path).free * 2 // 2**20
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a", (rows, 2**20), np.uint8, chunks=(1, 2**20))
    message = refusal(tmp_path / "x.h5", tmp_path / "y.h5")
    assert f"needs {rows * 2**20:,} bytes more, but the file system has" in message
    assert leftovers(tmp_path) == []


def test_compressed_files_are_expected_to_take_what_their_chunks_take_twice_over(tmp_path, monkeypatch):
    source = write(tmp_path / "x.h5", a=np.repeat(pixels(1000, 8), 8, axis=1))
    repack(source, tmp_path / "y.h5", compress="zstd", chunk_bytes=6400)
    with h5py.File(tmp_path / "y.h5") as file:
        stored = file["a"].id.get_storage_size()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2000, 1000, 1000))
        message = refusal(source, tmp_path / "z.h5", compress="zstd", chunk_bytes=6400)
    needed = int(re.search(r"needs ([\d,]+) bytes", message)[1].replace(",", ""))
    assert needed == pytest.approx(2 * stored, rel=0.1)  # judged by two chunks of random values
    assert leftovers(tmp_path) == []


# -- interruptions and damage


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_an_interrupted_call_goes_on_to_the_same_file(tmp_path, small_blocks, compress):
    labels = np.array([f"{row}" for row in range(100)], dtype=h5py.string_dtype())
    source = write(tmp_path / "x.h5", a=(pixels(100, 3, 8, 8), {"chunks": (7, 3, 5, 8)}), b=np.arange(300), t=labels)
    options = {"compress": compress, "chunk_bytes": 2000}
    repack(source, tmp_path / "whole.h5", **options)
    interrupt(source, tmp_path / "y.h5", after=50, **options)
    assert not (tmp_path / "y.h5").exists()
    interrupt(source, tmp_path / "y.h5", after=250, **options)
    report = repack(source, tmp_path / "y.h5", **options)
    assert report.resumed_rows in range(250, 400)
    for key in "abt":
        assert_same(source, tmp_path / "y.h5", key)
    verify(tmp_path / "y.h5")
    # Nothing in an HDF5 file of ours depends on when it was written.
    assert (tmp_path / "y.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_an_interrupted_call_over_several_files_goes_on_past_what_no_journal_knows(tmp_path, small_blocks, compress):
    paths = [write(tmp_path / f"{number}.h5", a=pixels(100, 64, seed=number)) for number in range(2)]
    options = {"compress": compress, "chunk_bytes": 640}
    interrupt(paths, tmp_path / "y.h5", after=150, **options)
    if compress:
        with (tmp_path / "y.h5.partial.chunks").open("ab") as log:
            log.write(b"a chunk that was written after the last entry of the journal")
    assert repack(paths, tmp_path / "y.h5", **options).resumed_rows in range(150, 200)
    assert (values_of(tmp_path / "y.h5", "a") == np.concatenate([values_of(path, "a") for path in paths])).all()


def test_a_call_that_was_interrupted_while_comparing_compares_again_and_writes_nothing(tmp_path, small_blocks):
    source = write(tmp_path / "x.h5", a=pixels(100, 64))
    interrupt(source, tmp_path / "y.h5", stage="comparing", after=50)
    stages = set()
    report = repack(source, tmp_path / "y.h5", on_progress=lambda progress: stages.add(progress.stage))
    assert (stages, report.resumed_rows, report.compared_bytes) == ({"comparing"}, 100, 6400)


def test_the_log_of_compressed_chunks_goes_even_if_a_kill_had_come_before_its_time(tmp_path, small_blocks):
    source = write(tmp_path / "x.h5", a=pixels(100, 64))
    interrupt(source, tmp_path / "y.h5", stage="comparing", after=50, compress="gzip")
    assert leftovers(tmp_path) == ["y.h5.partial", "y.h5.partial.json"]
    (tmp_path / "y.h5.partial.chunks").write_bytes(b"of the killed call")
    assert repack(source, tmp_path / "y.h5", compress="gzip").resumed_rows == 100
    assert leftovers(tmp_path) == []


def test_other_options_or_another_source_start_over_and_say_why(tmp_path, small_blocks):
    source, out = write(tmp_path / "x.h5", a=pixels(100, 64)), tmp_path / "y.h5"

    def begun_anew(reason: str, **options: Any) -> RepackReport:
        with pytest.warns(UserWarning, match=re.escape(f"begun anew, not continued: {reason}")) as caught:
            report = repack(source, out, **options)
        assert Path(caught[0].filename) == Path(__file__)  # the caller's line, not one of ours
        out.unlink()
        return report

    interrupt(source, out, after=50)
    assert begun_anew("chunk_bytes was 524288, is 100", chunk_bytes=100).resumed_rows == 0
    interrupt(source, out, after=50)
    os.utime(source, ns=(1, 1))
    assert begun_anew("the source has changed").resumed_rows == 0
    interrupt(source, out, after=50, compress="gzip", chunk_bytes=640)
    (tmp_path / "y.h5.partial.chunks").unlink()
    begun_anew(f"{out}.partial.chunks is missing or too short", compress="gzip", chunk_bytes=640)
    interrupt(source, out, after=50)
    (tmp_path / "y.h5.partial").write_bytes(b"no hdf5")
    begun_anew("it has been changed")
    interrupt(source, out, after=50)
    assert repack(source, out, resume=False).resumed_rows == 0


def test_what_pack_left_is_not_taken_for_ours(tmp_path, small_blocks):
    source, out = write(tmp_path / "x.h5", images=pixels(100, 8, 8)), tmp_path / "y.h5"

    def stop(_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        pack(source, out, on_progress=stop)
    with pytest.warns(UserWarning, match="begun anew"):
        repack(source, out)
    assert_same(source, out, "images")


KILLED = """\
import os, signal, sys
from lightning_gpufeed.hdf5.repack import inputs as repack_source
from lightning_gpufeed.hdf5.repack import repack as module
module._CHECKPOINT_SECONDS, repack_source._BLOCK_BYTES = 0.0, 4096
module._PROGRESS_SECONDS = 0.0
def stop(progress):
    if progress.rows_done >= 500:
        os.kill(os.getpid(), signal.SIGKILL)
module.repack(sys.argv[1], sys.argv[2], on_progress=stop)
"""


def test_a_kill_leaves_nothing_under_the_final_name_and_the_same_call_goes_on(tmp_path):
    source, out = write(tmp_path / "x.h5", a=pixels(1000, 64), b=np.arange(1000)), tmp_path / "y.h5"
    environment = {**os.environ, "PYTHONPATH": str(thin_package(tmp_path / "thin"))}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(source), str(out)], env=environment, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    report = repack(source, out)
    assert report.resumed_rows >= 448  # what was written before the last block
    for key in "ab":
        assert_same(source, out, key)


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_a_byte_that_the_disk_changes_is_noticed_and_nothing_is_kept(tmp_path, small_blocks, compress):
    source = write(tmp_path / "x.h5", a=pixels(100, 64), z=pixels(50, 50))
    partial = tmp_path / "y.h5.partial"

    def damage(progress: Any) -> None:
        if progress.stage == "comparing" and progress.rows_done < 50:
            with h5py.File(partial, "r", locking=False) as file:
                place = file["a"].id.get_chunk_info(9).byte_offset + 100
            with partial.open("r+b") as raw:
                raw.seek(place)
                old = raw.read(1)[0]
                raw.seek(place)
                raw.write(bytes([old ^ 1]))

    options = {"compress": compress, "chunk_bytes": 640}
    message = refusal(source, tmp_path / "y.h5", **options, on_progress=damage)
    assert re.match(r"the new file does not give back what was read: 'a', rows \d+ to \d+\.", message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.h5"]


def test_a_source_that_is_written_to_meanwhile_is_refused(tmp_path, small_blocks):
    source = write(tmp_path / "x.h5", a=pixels(100, 64))

    def touch(_: object) -> None:
        os.utime(source, ns=(1, 1))

    assert "was written to while it was being repacked" in refusal(source, tmp_path / "y.h5", on_progress=touch)


def test_a_damaged_chunk_is_named_with_its_rows(tmp_path):
    write(tmp_path / "x.h5", a=(pixels(40, 8), {"chunks": (10, 8), "fletcher32": True}))
    with h5py.File(tmp_path / "x.h5") as file:
        place = file["a"].id.get_chunk_info(2).byte_offset
    with (tmp_path / "x.h5").open("r+b") as raw:
        raw.seek(place)
        raw.write(b"damaged!")
    assert re.search(r"rows \d+ to \d+ of 'a' cannot be read", refusal(tmp_path / "x.h5", tmp_path / "y.h5"))
    assert leftovers(tmp_path) == []


def test_progress_counts_rows_of_all_arrays_first_written_then_compared(tmp_path, small_blocks):
    seen = []
    repack(write(tmp_path / "x.h5", a=pixels(40, 64), b=np.arange(30)), tmp_path / "y.h5", on_progress=seen.append)
    stages = [progress.stage for progress in seen]
    assert stages == sorted(stages, reverse=True)
    assert {progress.rows_total for progress in seen} == {70}
    assert [progress.rows_done for progress in seen if progress.rows_done == 70] == [70, 70]
    assert seen[-1].bytes_written == 40 * 64 + 30 * 8


def test_without_comparing_the_report_says_so(tmp_path):
    report = repack(write(tmp_path / "x.h5", a=np.arange(3)), tmp_path / "y.h5", verify=False)
    assert report.compared_bytes is None
