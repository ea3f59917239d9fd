from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
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
from tests.doubles import thin_package

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
    most_rows_per_read = 65_536

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
        f"{tmp_path / 'x.h5'} is a folder, pipe or device; expected the name of a file to write"
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
        np.testing.assert_allclose(file["images"].attrs["std"], (source.images[kept] / 255).std((0, 2, 3)), rtol=1e-12)
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
    """Pack until so many rows are written, then stop as Ctrl-C does."""

    def stop(progress) -> None:
        if progress.stage == "writing" and progress.rows_done >= after:
            raise Stop

    with pytest.raises(Stop):
        pack(source, out, on_progress=stop, **options)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape)


@pytest.mark.parametrize(
    ("images", "options"),
    [
        (pixels(100, 3, 8, 8), {}),
        (pixels(100, 3, 8, 8), {"shuffle": True, "seed": 3}),
        (floats(100, 3, 8, 8), {"quantize": "auto"}),
        (floats(100, 3, 8, 8), {"quantize": (-1, 2.5)}),
        (floats(100, 3, 8, 8), {"keep_dtype": True}),
        (floats(100, 3, 8, 8), {"scale": 100}),
    ],
)
def test_an_interrupted_call_goes_on_to_the_same_file(tmp_path, small_blocks, images, options):
    options = {"chunk_bytes": 2000, **options}
    pack(Rows(images), tmp_path / "whole.h5", **options)
    interrupt(Rows(images), tmp_path / "x.h5", after=50, **options)
    assert not (tmp_path / "x.h5").exists()
    report = pack(Rows(images), tmp_path / "x.h5", **options)
    assert report.resumed_rows in range(50, 56)
    assert content(tmp_path / "x.h5") == content(tmp_path / "whole.h5")
    assert leftovers(tmp_path) == []


def begun_anew(source, out, reason: str, **options) -> None:
    """Check that a call starts over and says why."""
    with pytest.warns(UserWarning, match="is begun anew, not continued") as caught:
        report = pack(source, out, **options)
    partial = out.with_name(f"{out.name}.partial")
    assert [str(w.message) for w in caught] == [f"{partial} is begun anew, not continued: {reason}"]
    assert Path(caught[0].filename) == Path(__file__)  # the caller's line, not one of ours
    assert report.resumed_rows == 0
    verify(out)


def test_a_call_with_other_options_or_another_source_starts_over_and_says_why(tmp_path, small_blocks):
    source, out = Rows(pixels(100, 3, 8, 8)), tmp_path / "x.h5"
    interrupt(source, out, after=50)
    begun_anew(source, out, "chunk_bytes was 524288, is 2000", chunk_bytes=2000)
    out.unlink()
    interrupt(source, out, after=50, shuffle=True, seed=1)
    begun_anew(source, out, "seed was 1, is None; shuffle was True, is False")
    out.unlink()
    interrupt(source, out, after=50)
    begun_anew(Rows(pixels(100, 3, 8, 8, seed=1)), out, "the source has changed")
    with h5py.File(out) as file:
        np.testing.assert_array_equal(file["images"], pixels(100, 3, 8, 8, seed=1))


def test_a_partial_file_that_is_gone_or_changed_is_not_continued(tmp_path, small_blocks):
    source, out = Rows(pixels(100, 3, 8, 8)), tmp_path / "x.h5"
    partial = tmp_path / "x.h5.partial"
    interrupt(source, out, after=50)
    partial.unlink()
    begun_anew(source, out, "it is missing")
    out.unlink()
    interrupt(source, out, after=50)
    os.truncate(partial, partial.stat().st_size - 1)
    begun_anew(source, out, "it has been changed")
    out.unlink()
    interrupt(source, out, after=50)
    partial.write_bytes(b"no hdf5")
    begun_anew(source, out, "it has been changed")


def test_an_unreadable_journal_counts_as_none(tmp_path, small_blocks):
    source, out = Rows(pixels(100, 3, 8, 8)), tmp_path / "x.h5"
    journal = tmp_path / "x.h5.partial.json"
    for damage in ("{", "[]", '{"source": "x"}', '{"source": "x", "options": {}, "stage": "unheard of"}'):
        interrupt(source, out, after=50)
        journal.write_text(damage)
        assert pack(source, out).resumed_rows == 0
        verify(out)
        out.unlink()


def test_resume_false_starts_over_without_a_word(tmp_path, small_blocks):
    source, out = Rows(pixels(100, 3, 8, 8)), tmp_path / "x.h5"
    interrupt(source, out, after=50)
    assert pack(source, out, resume=False).resumed_rows == 0


def test_a_new_file_is_never_begun_under_the_journal_of_an_old_one(tmp_path, small_blocks, monkeypatch):
    source, out = Rows(pixels(100, 3, 8, 8)), tmp_path / "x.h5"
    interrupt(source, out, after=50, shuffle=True)
    assert (tmp_path / "x.h5.partial.json").exists()

    def stop(*_: object) -> None:
        raise Stop

    # Stopped when the new file, which has the same structure, is created and has no journal yet.
    with monkeypatch.context() as patched:
        patched.setattr(writer, "structure_fingerprint", stop)
        with pytest.raises(Stop):
            pack(source, out, resume=False)
    assert pack(source, out, shuffle=True).resumed_rows == 0


def test_a_disk_that_gives_back_other_bytes_is_noticed_before_the_file_gets_its_name(tmp_path, small_blocks):
    source, out = Rows(pixels(100, 3, 8, 8)), tmp_path / "x.h5"
    partial = tmp_path / "x.h5.partial"

    def flip(progress) -> None:
        if progress.rows_done == 100:
            flip_byte(partial, "images", row=70)

    message = refusal(source, out, chunk_bytes=2000, verify=True, on_progress=flip)
    assert message == (
        f"the disk gave back other bytes than were written: {partial}: chunk 7 of 'images', rows 70 to 79, does not "
        "match its checksum; the file is damaged, pack it again or restore a copy"
    )
    assert list(tmp_path.iterdir()) == []


# -- verify


def flip_byte(path: Path, key: str, row: int) -> None:
    """Change one bit in a row, as a failing disk would."""
    offsets = {}
    with h5py.File(path, "r") as file:
        dataset = file[key]
        rows_per_chunk, sample_bytes = dataset.chunks[0], dataset[0].nbytes
        dataset.id.chunk_iter(lambda c: offsets.__setitem__(c.chunk_offset[0] // rows_per_chunk, c.byte_offset))
    place = offsets[row // rows_per_chunk] + row % rows_per_chunk * sample_bytes + sample_bytes // 2
    with path.open("r+b") as raw:
        raw.seek(place)
        (byte,) = raw.read(1)
        raw.seek(place)
        raw.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    ("key", "row", "expected"),
    [
        ("images", 0, "chunk 0 of 'images', rows 0 to 29"),
        ("images", 29, "chunk 0 of 'images', rows 0 to 29"),
        ("images", 30, "chunk 1 of 'images', rows 30 to 59"),
        ("images", 99, "chunk 3 of 'images', rows 90 to 99"),
        ("labels", 50, "chunk 0 of 'labels', rows 0 to 99"),
    ],
)
def test_verify_names_the_chunk_and_the_rows_of_a_flipped_bit(tmp_path, key, row, expected):
    save_npz(tmp_path / "x.npz")
    pack(tmp_path / "x.npz", tmp_path / "x.h5", chunk_bytes=30 * 192)
    assert verify(tmp_path / "x.h5") == 5
    flip_byte(tmp_path / "x.h5", key, row)
    with pytest.raises(LayoutError) as caught:
        verify(tmp_path / "x.h5")
    assert str(caught.value) == (
        f"{tmp_path / 'x.h5'}: {expected}, does not match its checksum; the file is damaged, pack it again or "
        "restore a copy"
    )


def test_verify_refuses_what_it_cannot_compare(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        verify(tmp_path / "none.h5")
    path = tmp_path / "x.h5"
    path.write_bytes(b"no hdf5" * 100)
    with pytest.raises(LayoutError, match=r"cannot be read as HDF5: "):
        verify(path)
    with h5py.File(path, "w") as file:
        file["images"] = pixels(4, 3)
    with pytest.raises(LayoutError) as caught:
        verify(path)
    assert str(caught.value) == f"{path} has no checksums; only files written by `gpufeed pack` or `repack` have them"


@pytest.mark.parametrize("change", ["deleted", "shortened"])
def test_verify_notices_a_dataset_that_was_changed_after_packing(tmp_path, change):
    save_npz(tmp_path / "x.npz")
    pack(tmp_path / "x.npz", tmp_path / "x.h5", chunk_bytes=30 * 192)
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        if change == "deleted":
            del file["images"]
        else:
            file["images"].resize(60, axis=0)
    with pytest.raises(LayoutError, match=r"'images' has [02] chunks of 30 rows, but 4 checksums; it was changed"):
        verify(tmp_path / "x.h5")


# -- with processes: a program sees the engine without Lightning, whose import takes seconds


@pytest.fixture
def program(tmp_path):
    """Start programs; those still running at the end are killed."""
    thin = thin_package(tmp_path / "thin")
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        script = thin / "program.py"
        script.write_text(code)
        process = subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(thin), **environment},
            cwd=thin,  # not the checkout: the server of decoding processes would find its package
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def finished(process: subprocess.Popen[str]) -> str:
    """What a program printed, after it ended well."""
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    return output


KILL_SWEEP = """
import json, os, signal, sys, traceback, warnings
from pathlib import Path
import h5py, numpy as np
from lightning_gpufeed.hdf5 import journal, writer
from lightning_gpufeed.hdf5.sources import FieldSpec, RowError, SourceRows, blocks

blocks._BLOCK_BYTES = 4000
writer._CHECKPOINT_SECONDS = 0.0
warnings.simplefilter("error")  # nothing here may be begun anew

class Rows:
    is_thread_safe = False
    most_rows_per_read = 65_536
    num_samples = 60
    failing = (7, 31, 58)
    fields = {"images": FieldSpec((3, 8, 8), np.dtype("u1")), "labels": FieldSpec((), np.dtype("i8"))}
    attributes = {"images": {"layout": "NCHW"}, "labels": {"class_names": ["a", "b"]}}
    identity = "rows"
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8), dtype=np.uint8)
    def read(self, indices):
        good = indices[~np.isin(indices, self.failing)]
        errors = [RowError(int(i), f"row {i}", "broken") for i in indices if i in self.failing]
        return SourceRows(good, {"images": self.images[good], "labels": good}, errors)
    def close(self):
        pass

out = Path(sys.argv[1]) / "x.h5"

def run():
    return writer.pack(Rows(), out, on_error="skip", shuffle=True, chunk_bytes=2000)

class Killer:  # kills this process at the n-th step that changes something on disk
    def __init__(self, step):
        self.left = step
    def patch(self, owner, name, flushed=False):
        original = getattr(owner, name)
        def stepping(*args, **kwargs):
            self.left -= 1
            if self.left != 0:
                return original(*args, **kwargs)
            if name == "pwrite":  # half of the bytes
                original(args[0], args[1][: len(args[1]) // 2], args[2])
            if flushed:  # HDF5 keeps changes in memory: let this one reach the disk
                original(*args, **kwargs)
                h5py.h5f.flush(getattr(args[0], "id", None) or args[0]._id)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(owner, name, stepping)

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def killed_at(step):
    killer = Killer(step)
    for name in ("pwrite", "fdatasync", "fsync", "replace", "unlink"):
        killer.patch(os, name)
    killer.patch(h5py.File, "close")
    killer.patch(h5py.Group, "create_dataset", flushed=True)
    killer.patch(h5py.AttributeManager, "create", flushed=True)
    killer.patch(h5py.Dataset, "resize", flushed=True)
    run()

assert in_child(run) == 0
out.rename(out.with_name("whole.h5"))
step, log = 0, []
while True:
    step += 1
    code = in_child(lambda: killed_at(step))
    if code == 0:
        break
    assert code == -signal.SIGKILL, (step, code)
    found = journal.Journal.load(journal.OutputPaths.of(out).journal)
    position = found.position if found else 0
    had_output = out.exists()
    def go_on():
        assert run().resumed_rows == position, (step, position)
    if not had_output:
        assert in_child(go_on) == 0, step
        beside = sorted(p.name for p in out.parent.iterdir() if ".partial" in p.name)
        assert beside == [], (step, beside)
    out.rename(out.with_name(f"{step}.h5"))
    for path in out.parent.glob("x.h5.*"):
        path.unlink()
    log.append([found and found.stage, position, had_output])
print(json.dumps(log))
"""


def test_a_kill_at_any_step_is_followed_by_the_same_file(tmp_path, program):
    folder = tmp_path / "out"
    folder.mkdir()
    log = json.loads(finished(program(KILL_SWEEP, folder)))
    whole = content(folder / "whole.h5")
    assert {stage for stage, _, _ in log} == {None, "writing", "finishing", "finished"}
    assert sum(stage == "finishing" for stage, _, _ in log) > 10
    assert any(had_output for _, _, had_output in log)
    for step, entry in enumerate(log, start=1):
        assert content(folder / f"{step}.h5") == whole, (step, entry)
        verify(folder / f"{step}.h5")


def test_a_torn_file_of_another_hdf5_is_begun_anew(tmp_path, monkeypatch, small_blocks):
    source, out = Rows(pixels(100, 3, 8, 8)), tmp_path / "x.h5"
    pack(source, tmp_path / "whole.h5")

    def stop(*_: object) -> None:
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(writer, "write_metadata", stop)
        with pytest.raises(Stop):
            pack(source, out)
    path = tmp_path / "x.h5.partial.json"
    journal = json.loads(path.read_text())
    assert journal["stage"] == "finishing"
    path.write_text(json.dumps(journal | {"structure": "of another version"}))
    begun_anew(source, out, "it was written by another version of HDF5")
    assert content(out) == content(tmp_path / "whole.h5")


PACK_AND_WAIT = """
import sys
from lightning_gpufeed.hdf5 import writer
def wait(progress):
    print("writing", flush=True)
    sys.stdin.readline()
writer.pack(sys.argv[1], sys.argv[2], on_progress=wait)
"""


def test_a_second_process_at_the_same_output_is_refused_and_the_first_finishes(tmp_path, program):
    made = save_npz(tmp_path / "x.npz")
    first = program(PACK_AND_WAIT, tmp_path / "x.npz", tmp_path / "x.h5")
    assert first.stdout.readline() == "writing\n"
    assert refusal(tmp_path / "x.npz", tmp_path / "x.h5") == (
        f"another process is packing to {tmp_path / 'x.h5'} right now; wait for it or choose another name"
    )
    finished(first)
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["images"], made["images"])
    assert leftovers(tmp_path) == []


def test_a_lock_file_without_a_living_owner_keeps_nobody_out(tmp_path, program):
    save_npz(tmp_path / "x.npz")
    first = program(PACK_AND_WAIT, tmp_path / "x.npz", tmp_path / "x.h5")
    assert first.stdout.readline() == "writing\n"
    first.kill()
    first.wait(timeout=30)
    assert "x.h5.partial.lock" in leftovers(tmp_path)
    pack(tmp_path / "x.npz", tmp_path / "x.h5", verify=True)
    assert leftovers(tmp_path) == []


def test_the_lock_is_not_taken_on_a_file_that_its_former_holder_has_removed(tmp_path, monkeypatch):
    paths = OutputPaths.of(tmp_path / "x.h5")
    former = OutputLock(paths)
    former.__enter__()
    original = OutputLock._lock
    attempts = []

    def lock(self: OutputLock, descriptor: int) -> None:
        attempts.append(descriptor)
        if len(attempts) == 1:  # opened by us, and now removed by the former holder
            former.__exit__(None, None, None)
        original(self, descriptor)

    monkeypatch.setattr(OutputLock, "_lock", lock)
    with OutputLock(paths):
        assert len(attempts) == 2
        with pytest.raises(PackError, match="another process is packing"), OutputLock(paths):
            pass
    assert leftovers(tmp_path) == []


DISK_FULL = """
import resource, sys
from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5 import writer
from lightning_gpufeed.hdf5.sources import blocks
blocks._BLOCK_BYTES = 100_000
writer._CHECKPOINT_SECONDS = writer._PROGRESS_SECONDS = 0.0
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def fill(progress):
    resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, hard))
try:
    writer.pack(sys.argv[1], sys.argv[2], chunk_bytes=10_000, on_progress=fill)
except PackError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(writer.pack(sys.argv[1], sys.argv[2], chunk_bytes=10_000, verify=True).resumed_rows)
"""


def test_a_disk_that_fills_up_is_told_with_numbers_and_packing_goes_on_afterwards(tmp_path, program):
    np.save(tmp_path / "x.npy", pixels(2000, 10, 20))
    output = finished(program(DISK_FULL, tmp_path / "x.npy", tmp_path / "x.h5"))
    partial = tmp_path / "x.h5.partial"
    assert re.fullmatch(
        rf"writing {partial} failed: File too large\. The file needs 400,000 bytes in all; 200,000 were written and "
        rf"[\d,]+ are free\nWhat was written before stays in {partial}: a further call with the same source and "
        r"options goes on after 1000 of 2000 samples\n1000\n",
        output,
    ), output
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["images"], pixels(2000, 10, 20))


def test_packing_works_where_the_environment_makes_hdf5_lock_files(tmp_path, program):
    save_npz(tmp_path / "x.npz")
    code = "import sys\nfrom lightning_gpufeed.hdf5 import writer\nwriter.pack(*sys.argv[1:], verify=True)"
    finished(program(code, tmp_path / "x.npz", tmp_path / "x.h5", HDF5_USE_FILE_LOCKING="TRUE"))
    assert verify(tmp_path / "x.h5") == 2


def photos(folder: Path, num_images: int) -> np.ndarray:
    images = pixels(num_images, 32, 32, 3)
    for index, image in enumerate(images):
        path = folder / "ab"[index % 2] / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return np.concatenate([images[::2], images[1::2]])


PACK_PHOTOS = """
import sys
from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5 import writer
from lightning_gpufeed.hdf5.sources import blocks
blocks._BLOCK_BYTES = 20 * 3080
writer._CHECKPOINT_SECONDS = writer._PROGRESS_SECONDS = 0.0
def show(progress):
    print(progress.rows_done, flush=True)
    if sys.argv[3] == "wait":
        sys.stdin.readline()
if __name__ == "__main__":
    try:
        print(writer.pack(sys.argv[1], sys.argv[2], num_workers=2, layout="NHWC", on_progress=show).resumed_rows)
    except PackError as error:
        print(error)
"""


def test_a_killed_packer_leaves_no_decoding_process_and_the_next_one_goes_on(tmp_path, program):
    images = photos(tmp_path / "photos", 200)
    first = program(PACK_PHOTOS, tmp_path / "photos", tmp_path / "x.h5", "wait")
    for rows_done in (20, 40, 60):
        assert first.stdout.readline() == f"{rows_done}\n"
        first.stdin.write("\n")
        first.stdin.flush()
    assert first.stdout.readline() == "80\n"
    children = psutil.Process(first.pid).children(recursive=True)
    assert len(children) >= 3  # the server and two decoding processes
    first.kill()
    first.wait(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    lines = finished(program(PACK_PHOTOS, tmp_path / "photos", tmp_path / "x.h5", "go")).splitlines()
    assert lines[-1] == "80"
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["images"], images)
        assert file["labels"][:].tolist() == [0] * 100 + [1] * 100
    assert leftovers(tmp_path) == []


def test_a_decoding_process_that_dies_is_told_and_does_not_hang(tmp_path, program):
    photos(tmp_path / "photos", 200)
    packer = program(PACK_PHOTOS, tmp_path / "photos", tmp_path / "x.h5", "wait")
    assert packer.stdout.readline() == "20\n"
    server = {child.pid for child in psutil.Process(packer.pid).children()}
    decoders = [c for c in psutil.Process(packer.pid).children(recursive=True) if c.pid not in server]
    assert len(decoders) == 2
    decoders[0].kill()
    # The pool ends the other one as soon as it notices; until then that one could decode what is left.
    assert psutil.wait_procs(decoders, timeout=30)[1] == []
    output, _ = packer.communicate("\n" * 20, timeout=60)
    assert packer.returncode == 0
    assert re.search(
        r"a decoding process died somewhere from [ab]/\d+\.png to [ab]/\d+\.png: out of memory, a crash in an image "
        r"library, or a script that calls pack\(\) outside `if __name__ == \"__main__\":`\. num_workers=0 "
        r"\(--num-workers 0\) decodes in this process\n"
        r"What was written before stays in ",
        output,
    ), output
    assert not (tmp_path / "x.h5").exists()


def test_a_script_without_a_main_guard_is_told_what_is_missing(tmp_path, program):
    photos(tmp_path / "photos", 4)
    code = "import sys\nfrom lightning_gpufeed.hdf5.writer import pack\npack(*sys.argv[1:], num_workers=1)"
    process = program(code, tmp_path / "photos", tmp_path / "x.h5")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert 'a script that calls pack() outside `if __name__ == "__main__":`' in errors
    assert not (tmp_path / "x.h5").exists()
