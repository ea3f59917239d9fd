from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import lightning_gpufeed
from lightning_gpufeed.errors import LayoutError, PackError
from lightning_gpufeed.hdf5 import writer
from lightning_gpufeed.hdf5.journal import OutputLock, OutputPaths
from lightning_gpufeed.hdf5.packed_file import plan_field
from lightning_gpufeed.hdf5.quantize import Affine
from lightning_gpufeed.hdf5.sources import FieldSpec, RowError, SourceRows, blocks
from lightning_gpufeed.hdf5.sources.blocks import shuffled_order
from lightning_gpufeed.hdf5.writer import pack, verify

KIB = 1024


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save_npz(path: Path, num_samples: int = 100, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    made = {"images": pixels(num_samples, 3, 8, 8), "labels": np.arange(num_samples) % 10, **arrays}
    np.savez(path, **made)
    return made


def content(path: Path) -> dict[str, object]:
    """Everything that can be read from a file: datasets with their bytes, shapes, chunks, and all attributes."""
    found: dict[str, object] = {}

    def note(name: str, item) -> None:
        attributes = {key: np.asarray(value).tolist() for key, value in item.attrs.items()}
        if isinstance(item, h5py.Dataset):
            values = item[()]
            value = values.tolist() if values.dtype.kind == "O" else values.tobytes()
            found[name] = (item.shape, item.maxshape, item.chunks, str(item.dtype), value, attributes)
        else:
            found[name] = attributes

    with h5py.File(path, "r") as file:
        note("/", file)
        file.visititems(note)
    return found


def leftovers(folder: Path) -> list[str]:
    """What an output leaves beside itself."""
    return sorted(path.name for path in folder.iterdir() if ".partial" in path.name)


def refusal(source, out, kind=PackError, **options) -> str:
    with pytest.raises(kind) as caught:
        pack(source, out, **options)
    return str(caught.value)


class Rows:
    """A source of known rows in memory, some of which fail on request."""

    is_thread_safe = False

    def __init__(self, images: np.ndarray, failing: tuple[int, ...] = (), layout: str | None = "NCHW") -> None:
        self.images, self.failing = images, failing
        self.num_samples = len(images)
        self.fields = {
            "images": FieldSpec(images.shape[1:], images.dtype),
            "labels": FieldSpec((), np.dtype(np.int32)),
        }
        self.attributes = {"images": {} if layout is None else {"layout": layout}, "labels": {}}
        self.identity = f"{images.shape} {zlib.crc32(images.tobytes())}"
        self.was_closed = False

    def read(self, indices: np.ndarray) -> SourceRows:
        good = indices[~np.isin(indices, self.failing)]
        errors = [RowError(int(i), f"row {i}", "broken") for i in indices if i in self.failing]
        return SourceRows(good, {"images": self.images[good], "labels": good.astype(np.int32)}, errors)

    def close(self) -> None:
        self.was_closed = True


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 1 KiB, each followed by a journal entry, so that little data has many of them."""
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", KIB)
    monkeypatch.setattr(writer, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(writer, "_PROGRESS_SECONDS", 0.0)


# -- what is in the file


def test_a_packed_file_holds_the_rows_their_attributes_and_checksums(tmp_path):
    made = save_npz(tmp_path / "x.npz")
    report = pack(tmp_path / "x.npz", tmp_path / "x.h5", chunk_bytes=30 * 192, verify=True)
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["images"], made["images"])
        np.testing.assert_array_equal(file["labels"], made["labels"])
        assert (file["images"].dtype, file["labels"].dtype) == (np.uint8, np.int64)
        assert (file["images"].chunks, file["labels"].chunks) == ((30, 3, 8, 8), (100,))
        assert dict(file.attrs) == {"gpufeed_format": 1, "gpufeed_version": lightning_gpufeed.__version__}
        assert sorted(file["images"].attrs) == ["layout", "mean", "std"]
        assert file["images"].attrs["layout"] == "NCHW"
        decoded = made["images"] / 255
        np.testing.assert_allclose(file["images"].attrs["mean"], decoded.mean((0, 2, 3)), rtol=1e-12)
        np.testing.assert_allclose(file["images"].attrs["std"], decoded.std((0, 2, 3)), rtol=1e-12)
        checksums = file["_gpufeed/crc32/images"]
        assert checksums.attrs["rows_per_chunk"] == 30
        parts = [made["images"][first : first + 30] for first in (0, 30, 60, 90)]
        assert checksums[:].tolist() == [zlib.crc32(part.tobytes()) for part in parts]
        assert checksums.dtype == np.uint32
        assert "skipped" not in file["_gpufeed"]
    assert (report.num_samples, report.verified_chunks, report.resumed_rows, report.skipped) == (100, 5, 0, ())
    assert report.file_bytes == (tmp_path / "x.h5").stat().st_size
    assert {key: (f.shape, f.chunk_bytes) for key, f in report.fields.items()} == {
        "images": ((100, 3, 8, 8), 30 * 192),
        "labels": ((100,), 800),
    }
    assert leftovers(tmp_path) == []


@given(st.integers(1, 1024 * KIB), st.integers(1, 10**9))
def test_a_default_chunk_holds_whole_samples_and_a_quarter_to_one_mebibyte(sample_bytes, num_samples):
    plan = plan_field("x", (sample_bytes,), np.dtype(np.uint8), 512 * KIB, num_samples)
    assert plan.chunk_bytes == plan.rows_per_chunk * sample_bytes
    assert 1 <= plan.rows_per_chunk <= num_samples
    if num_samples * sample_bytes >= 256 * KIB:
        assert 256 * KIB <= plan.chunk_bytes <= 1024 * KIB


def test_large_chunks_begin_at_a_page(tmp_path):
    np.save(tmp_path / "x.npy", pixels(40, 100, 333))
    pack(tmp_path / "x.npy", tmp_path / "x.h5", chunk_bytes=100_000)
    offsets = []
    with h5py.File(tmp_path / "x.h5") as file:
        file["images"].id.chunk_iter(lambda chunk: offsets.append(chunk.byte_offset))
    assert len(offsets) == 14
    assert [offset % 4096 for offset in offsets] == [0] * 14


def test_a_sample_larger_than_the_chunk_limit_gets_a_chunk_of_its_own(tmp_path):
    np.save(tmp_path / "x.npy", pixels(3, 20, 20))
    report = pack(tmp_path / "x.npy", tmp_path / "x.h5", chunk_bytes=100)
    assert report.fields["images"].rows_per_chunk == 1


def test_shuffled_rows_are_written_in_the_order_of_the_seed_and_stay_together(tmp_path):
    made = save_npz(tmp_path / "x.npz")
    pack(tmp_path / "x.npz", tmp_path / "a.h5", shuffle=True, seed=5)
    pack(tmp_path / "x.npz", tmp_path / "b.h5", shuffle=True, seed=5)
    order = shuffled_order(100, 5)
    assert order.tolist() != list(range(100))
    with h5py.File(tmp_path / "a.h5") as file:
        np.testing.assert_array_equal(file["images"], made["images"][order])
        np.testing.assert_array_equal(file["labels"], made["labels"][order])
    assert content(tmp_path / "a.h5") == content(tmp_path / "b.h5")


def test_more_class_names_than_an_old_hdf5_header_could_hold_are_kept(tmp_path):
    source = Rows(pixels(10, 3, 4, 4))
    source.attributes["labels"]["class_names"] = [f"n{i:08}" for i in range(22_000)]
    pack(source, tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5") as file:
        names = file["labels"].attrs["class_names"]
        assert (len(names), names[-1]) == (22_000, "n00021999")


def test_nested_keys_and_every_kind_of_number_survive(tmp_path):
    made = {
        "a/b/flags": np.arange(9) % 2 == 0,
        "half": np.arange(9, dtype="f2").reshape(9, 1),
        "complex": np.arange(9) * 1j,
        "big": np.arange(9, dtype=">f8"),
        "short": np.arange(18, dtype="i2").reshape(9, 2),
    }
    np.savez(tmp_path / "x.npz", **made)
    pack(tmp_path / "x.npz", tmp_path / "x.h5", verify=True)
    with h5py.File(tmp_path / "x.h5") as file:
        for key, array in made.items():
            assert file[key].dtype == array.dtype.newbyteorder("=")
            np.testing.assert_array_equal(file[key], array)


def test_an_hdf5_file_is_given_other_chunks_and_keeps_what_is_known_of_it(tmp_path):
    made = pixels(60, 3, 6, 6)
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file.create_dataset("x", data=made, chunks=(60, 1, 2, 3), compression="gzip")
        file["x"].attrs.update({"layout": "NCHW", "scale": 0.5, "offset": -3.0, "mean": [9.0]})
        file["y"] = np.arange(60, dtype="i4")
        file["y"].attrs["class_names"] = np.array(["ä", "b"], dtype=h5py.string_dtype())
    pack(tmp_path / "old.h5", tmp_path / "new.h5")
    with h5py.File(tmp_path / "new.h5") as file:
        np.testing.assert_array_equal(file["x"], made)
        assert file["x"].chunks == (60, 3, 6, 6)
        assert (file["x"].attrs["scale"], file["x"].attrs["offset"]) == (0.5, -3.0)
        np.testing.assert_allclose(file["x"].attrs["mean"], (made * 0.5 - 3.0).mean((0, 2, 3)), rtol=1e-12)
        assert list(file["y"].attrs["class_names"]) == ["ä", "b"]


def test_a_packed_file_packed_again_in_place_is_the_same_file(tmp_path):
    save_npz(tmp_path / "x.npz")
    pack(tmp_path / "x.npz", tmp_path / "x.h5")
    before = content(tmp_path / "x.h5")
    pack(tmp_path / "x.h5", tmp_path / "x.h5", overwrite=True)
    assert content(tmp_path / "x.h5") == before


def test_an_image_folder_is_packed_with_classes_and_skipped_files(tmp_path):
    made = {}
    for name in ("cat/1.png", "cat/2.png", "dog/3.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        made[name] = pixels(6, 5, 3, seed=len(made))
        Image.fromarray(made[name]).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "cat" / "0.jpg").write_bytes(b"\xff\xd8\xff damaged")
    message = refusal(tmp_path / "photos", tmp_path / "x.h5")
    assert re.fullmatch(
        r"cat/0\.jpg cannot be read: cannot identify image file.*\. Repair or remove it, or leave such samples out "
        r'and keep a list with on_error="skip" \(--on-error skip\)',
        message,
    )
    assert not (tmp_path / "x.h5").exists()
    assert leftovers(tmp_path) == []
    report = pack(tmp_path / "photos", tmp_path / "x.h5", on_error="skip", layout="NHWC", verify=True)
    assert [name for name, _ in report.skipped] == ["cat/0.jpg"]
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["images"], np.stack(list(made.values())))
        assert file["labels"][:].tolist() == [0, 0, 1]
        assert list(file["labels"].attrs["class_names"]) == ["cat", "dog"]
        assert file["images"].attrs["layout"] == "NHWC"
        assert file["_gpufeed/skipped"].asstr()[:].tolist() == ["cat/0.jpg"]


def test_a_file_name_that_is_no_text_can_be_skipped_and_listed(tmp_path):
    (tmp_path / "photos").mkdir()
    Image.fromarray(pixels(6, 5, 3)).save(tmp_path / "photos" / "a.png")
    (tmp_path / "photos" / os.fsdecode(b"\xff.png")).write_bytes(b"")
    pack(tmp_path / "photos", tmp_path / "x.h5", on_error="skip")
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["_gpufeed/skipped"].asstr()[0] == "\\udcff.png"


# -- values


def test_floats_are_refused_before_anything_is_written(tmp_path):
    save_npz(tmp_path / "x.npz", images=np.random.default_rng(0).random((100, 3, 8, 8)))
    message = refusal(tmp_path / "x.npz", tmp_path / "x.h5")
    assert message.startswith("'images' holds float64 values in [0, 1]; images are stored as uint8, and casting ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz"]


def test_scaled_floats_are_rounded(tmp_path):
    values = np.random.default_rng(0).random((100, 3, 8, 8), np.float32)
    save_npz(tmp_path / "x.npz", images=values)
    pack(tmp_path / "x.npz", tmp_path / "x.h5", scale=255)
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["images"], np.rint(values.astype(np.float64) * 255))
        assert "scale" not in file["images"].attrs


def test_quantised_floats_come_back_within_half_a_step_and_statistics_are_theirs(tmp_path, small_blocks):
    values = np.random.default_rng(0).normal(5, 3, (100, 3, 8, 8)).astype(np.float32)
    save_npz(tmp_path / "x.npz", images=values)
    stages = []
    pack(tmp_path / "x.npz", tmp_path / "x.h5", quantize="auto", on_progress=lambda p: stages.append(p.stage))
    assert stages == ["scanning"] * (len(stages) // 2) + ["writing"] * (len(stages) // 2)
    with h5py.File(tmp_path / "x.h5") as file:
        attributes = file["images"].attrs
        decoded = Affine(attributes["scale"], attributes["offset"]).decode(file["images"][:])
        assert np.abs(decoded - values).max() <= attributes["scale"] * (0.5 + 1e-12)
        assert (decoded.min(), attributes["offset"]) == (values.min(), values.min())
        np.testing.assert_allclose(decoded.max(), values.max(), rtol=1e-14)
        np.testing.assert_allclose(attributes["mean"], decoded.mean((0, 2, 3)), rtol=1e-12)
        np.testing.assert_allclose(attributes["std"], decoded.std((0, 2, 3)), rtol=1e-12)


def test_a_value_that_is_not_finite_stops_the_scan_and_names_its_sample(tmp_path):
    values = np.zeros((100, 3, 8, 8))
    values[57, 1, 2, 3] = np.nan
    save_npz(tmp_path / "x.npz", images=values)
    assert refusal(tmp_path / "x.npz", tmp_path / "x.h5", quantize="auto") == (
        "sample 57 of 'images' holds nan; expected finite values. Clean the source"
    )
    assert leftovers(tmp_path) == []


def test_kept_floats_keep_their_type_and_their_statistics(tmp_path):
    values = np.random.default_rng(0).normal(5, 3, (100, 3, 8, 8)).astype(np.float32)
    save_npz(tmp_path / "x.npz", images=values)
    pack(tmp_path / "x.npz", tmp_path / "x.h5", keep_dtype=True)
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["images"], values)
        np.testing.assert_allclose(file["images"].attrs["mean"], values.mean((0, 2, 3), np.float64), rtol=1e-12)


def test_kept_values_that_are_not_finite_have_no_statistics(tmp_path):
    values = np.zeros((10, 3, 8, 8), np.float32)
    values[3, 0, 0, 0], values[4, 1, 0, 0] = np.nan, np.inf
    save_npz(tmp_path / "x.npz", num_samples=10, images=values)
    pack(tmp_path / "x.npz", tmp_path / "x.h5", keep_dtype=True)
    with h5py.File(tmp_path / "x.h5") as file:
        assert dict(file["images"].attrs) == {"layout": "NCHW"}
        np.testing.assert_array_equal(file["images"], values)


def test_a_value_outside_uint8_in_the_middle_names_the_sample_of_the_source(tmp_path, small_blocks):
    values = np.full((100, 8, 8), 200, np.int64)
    values[83, 2, 2] = -1
    np.save(tmp_path / "x.npy", values)
    message = refusal(tmp_path / "x.npy", tmp_path / "x.h5", shuffle=True)
    assert message.startswith("sample 83 of 'images' holds -1, outside 0..255 of uint8; ")


def test_a_source_that_delivers_another_shape_than_it_says_is_stopped(tmp_path):
    source = Rows(pixels(10, 3, 4, 4))
    source.fields["images"] = FieldSpec((3, 4, 5), np.dtype(np.uint8))
    assert refusal(source, tmp_path / "x.h5") == (
        "the source delivered 'images' as (10, 3, 4, 4); its fields say (10, 3, 4, 5)"
    )


@pytest.mark.parametrize("key", ["", "_gpufeed/x", "a/../b", "/a", "./a"])
def test_a_key_that_no_dataset_can_have_is_refused(key):
    # "a/../b" is not a path to HDF5: ".." would be a name of its own, "." would not.
    if key == "a/../b":
        assert plan_field(key, (), np.dtype(np.uint8), KIB, 5).key == key
        return
    with pytest.raises(PackError, match=re.escape(f"the source has a field named {key!r}, which no dataset can be")):
        plan_field(key, (), np.dtype(np.uint8), KIB, 5)


@pytest.mark.parametrize("shape", [(0, 4), (2**16, 2**16, 2)])
def test_samples_without_values_or_above_4_gib_are_refused(shape):
    with pytest.raises(PackError, match=r"^a sample of 'x' has shape .*; expected at least one value and less than"):
        plan_field("x", shape, np.dtype(np.uint8), KIB, 5)


# -- what is there already, and what does not fit


def test_an_existing_output_is_left_alone_unless_told_otherwise(tmp_path):
    save_npz(tmp_path / "x.npz")
    (tmp_path / "x.h5").write_bytes(b"precious")
    assert refusal("/no/such/source", tmp_path / "x.h5") == (
        f"{tmp_path / 'x.h5'} exists; overwrite=True (--overwrite) replaces it"
    )
    assert (tmp_path / "x.h5").read_bytes() == b"precious"
    pack(tmp_path / "x.npz", tmp_path / "x.h5", overwrite=True)
    assert verify(tmp_path / "x.h5") == 2


def test_a_failing_call_leaves_the_output_that_it_was_to_replace(tmp_path):
    (tmp_path / "x.h5").write_bytes(b"precious")
    refusal(Rows(pixels(10, 3, 4, 4), failing=(5,)), tmp_path / "x.h5", overwrite=True)
    assert (tmp_path / "x.h5").read_bytes() == b"precious"


def test_an_output_that_appears_meanwhile_is_left_alone(tmp_path):
    save_npz(tmp_path / "x.npz")
    message = refusal(
        tmp_path / "x.npz", tmp_path / "x.h5", on_progress=lambda _: (tmp_path / "x.h5").write_bytes(b"other")
    )
    assert message.startswith(f"{tmp_path / 'x.h5'} exists; overwrite=True (--overwrite) replaces it\n")
    assert (tmp_path / "x.h5").read_bytes() == b"other"
    report = pack(tmp_path / "x.npz", tmp_path / "x.h5", overwrite=True)
    assert report.resumed_rows == 100  # complete already; only the name was missing
    assert verify(tmp_path / "x.h5") == 2


def test_a_folder_in_the_place_of_the_output_and_a_missing_folder_are_refused(tmp_path):
    save_npz(tmp_path / "x.npz")
    (tmp_path / "x.h5").mkdir()
    assert refusal(tmp_path / "x.npz", tmp_path / "x.h5", overwrite=True) == (
        f"{tmp_path / 'x.h5'} is a folder; expected the name of a file to write"
    )
    message = refusal(tmp_path / "x.npz", tmp_path / "no" / "x.h5", FileNotFoundError)
    assert message == f"the folder for {tmp_path / 'no' / 'x.h5'} does not exist; create {tmp_path / 'no'}"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes is 0; expected at least 1, such as 512 * 1024"),
        ({"seed": -1, "shuffle": True}, "seed is -1; expected 0 or more"),
        ({"on_error": "ignore"}, 'on_error is \'ignore\'; expected "raise" or "skip"'),
    ],
)
def test_an_option_with_a_wrong_value_is_refused(tmp_path, option, message):
    save_npz(tmp_path / "x.npz")
    assert refusal(tmp_path / "x.npz", tmp_path / "x.h5", ValueError, **option) == message


def test_what_cannot_fit_on_the_disk_is_refused_before_it_is_begun(tmp_path):
    # Twice the free room, of which nothing is on disk.
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    rows = free * 2 // KIB**2
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.uint8, shape=(rows, KIB, KIB))
    message = refusal(tmp_path / "x.npy", tmp_path / "x.h5")
    assert re.fullmatch(
        rf"{tmp_path}/x\.h5 needs {rows * KIB**2:,} bytes more, but the file system has [\d,]+ free; make room or "
        r"choose another place",
        message,
    )
    assert leftovers(tmp_path) == []


# -- progress


def test_progress_ends_at_the_total_and_counts_bytes(tmp_path, small_blocks):
    seen = []
    pack(Rows(pixels(100, 3, 8, 8)), tmp_path / "x.h5", on_progress=seen.append)
    assert [p.rows_done for p in seen] == sorted({min(5 * (i + 1), 100) for i in range(20)})
    assert {p.rows_total for p in seen} == {100}
    assert [p.bytes_written for p in seen] == [p.rows_done * (192 + 8) for p in seen]


def test_progress_is_shown_ten_times_a_second_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 200)
    calls = []
    started = time.monotonic()
    pack(Rows(pixels(2000, 3, 8, 8)), tmp_path / "x.h5", on_progress=calls.append)
    assert 1 <= len(calls) <= (time.monotonic() - started) / 0.1 + 1
    assert calls[-1].rows_done == 2000


# -- samples that cannot be read


@pytest.mark.parametrize("failing", [(0,), (99,), tuple(range(40, 75)), tuple(range(1, 100))])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_skipped_rows_shrink_the_file_to_those_that_could_be_read(tmp_path, small_blocks, failing, is_shuffled):
    source = Rows(pixels(100, 3, 8, 8), failing=failing)
    report = pack(source, tmp_path / "x.h5", on_error="skip", shuffle=is_shuffled, chunk_bytes=2000, verify=True)
    order = shuffled_order(100, 0) if is_shuffled else np.arange(100)
    kept = order[~np.isin(order, failing)]
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["images"], source.images[kept])
        assert file["labels"][:].tolist() == kept.tolist()
        np.testing.assert_allclose(
            file["images"].attrs["std"], (source.images[kept] / 255).std((0, 2, 3)), rtol=1e-12
        )
        skipped = file["_gpufeed/skipped"].asstr()[:].tolist()
    assert skipped == [f"row {i}" for i in order if i in failing]
    assert report.skipped == tuple((name, "broken") for name in skipped)


def test_a_source_of_which_nothing_can_be_read_gives_no_file(tmp_path):
    message = refusal(Rows(pixels(10, 3, 4, 4), failing=tuple(range(10))), tmp_path / "x.h5", on_error="skip")
    assert message == "none of the 10 samples could be read; nothing is left to pack"
    assert list(tmp_path.iterdir()) == []


def test_an_error_tells_where_the_rows_before_it_are_and_skipping_goes_on_from_there(tmp_path, small_blocks):
    source = Rows(pixels(100, 3, 8, 8), failing=(61,))
    assert refusal(source, tmp_path / "x.h5") == (
        "row 61 cannot be read: broken. Repair or remove it, or leave such samples out and keep a list with "
        f'on_error="skip" (--on-error skip)\nWhat was written before stays in {tmp_path / "x.h5.partial"}: a further '
        "call with the same source and options goes on after 60 of 100 samples"
    )
    assert leftovers(tmp_path) == ["x.h5.partial", "x.h5.partial.json"]
    report = pack(source, tmp_path / "x.h5", on_error="skip")
    assert (report.resumed_rows, report.num_samples) == (60, 99)
    assert not source.was_closed  # it was open when it was given


# -- going on after an interruption


class Stop(BaseException):
    """What Ctrl-C is: no error of packing."""


def interrupt(source, out, *, after: int, **options) -> None:
    """Pack until so many rows are done, then stop as Ctrl-C does."""

    def stop(progress) -> None:
        if progress.rows_done >= after:
            raise Stop

    with pytest.raises(Stop):
        pack(source, out, on_progress=stop, **options)


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True, "seed": 3}, {"quantize": "auto"}, {"keep_dtype": True}, {"scale": 100}]
)
def test_an_interrupted_call_goes_on_to_the_same_file(tmp_path, small_blocks, options):
    is_float = not options or "shuffle" not in options
    images = np.random.default_rng(0).random((100, 3, 8, 8)) if is_float and options else pixels(100, 3, 8, 8)
    pack(Rows(images), tmp_path / "whole.h5", chunk_bytes=2000, **options)
    # A scan for the range shows its progress first.
    interrupt(Rows(images), tmp_path / "x.h5", after=101 if options == {"quantize": "auto"} else 50, **options) if (
        options != {"quantize": "auto"}
    ) else _interrupt_writing(Rows(images), tmp_path / "x.h5", **options)
    report = pack(Rows(images), tmp_path / "x.h5", chunk_bytes=2000, **options)
    assert 0 < report.resumed_rows < 100
    assert content(tmp_path / "x.h5") == content(tmp_path / "whole.h5")
