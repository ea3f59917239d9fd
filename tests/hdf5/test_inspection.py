from __future__ import annotations

import itertools
import json
import os
import shlex
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5 import inspection
from lightning_gpufeed.hdf5.inspection import inspect_file
from lightning_gpufeed.hdf5.report import (
    Advice,
    DatasetReport,
    FileReport,
    LabelOrder,
    LabelReport,
    ProbeReport,
    bytes_text,
    render_report,
)
from lightning_gpufeed.hdf5.source import H5Source
from lightning_gpufeed.hdf5.writer import pack

NOTHING = "it is gathered straight from the mapped file already"


def pixels(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def labels_of(num_samples, num_classes=5, *, is_sorted=False):
    labels = np.arange(num_samples) * num_classes // num_samples
    return labels if is_sorted else np.random.default_rng(1).permutation(labels)


def write(path, **arrays):
    """Write arrays, or (array, options of create_dataset)."""
    with h5py.File(path, "w") as h5_file:
        for key, value in arrays.items():
            data, options = value if isinstance(value, tuple) else (value, {})
            h5_file.create_dataset(key.replace("__", "/"), data=data, **options)
    return path


def look(path, probe_seconds=0.0):
    return inspect_file(path, probe_seconds=probe_seconds)


def dataset(report, key="images"):
    [found] = [one for one in report.datasets if one.key == key]
    return found


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A name relative to the current directory, as people type them."""
    monkeypatch.chdir(tmp_path)
    return "data.h5"


# -- what is in the file


def test_every_figure_of_whole_samples_in_chunks_is_told(path):
    write(path, images=(pixels(250, 3, 8, 8), {"chunks": (64, 3, 8, 8)}), labels=labels_of(250))
    report = look(path)
    assert dataset(report) == DatasetReport(
        key="images",
        shape=(250, 3, 8, 8),
        dtype="uint8",
        storage="chunked",
        data_bytes=250 * 192,
        chunk_shape=(64, 3, 8, 8),
        chunk_samples=64,
        chunk_bytes=64 * 192,
        num_chunks=4,
        num_missing_chunks=0,
        has_edge_chunk=True,
        chunks_per_sample=1,
        read_ratio=1.0,
        filters=(),
        engine="raw",
        engine_reason="uncompressed, every sample whole inside a chunk: gathered straight from the mapped file",
        source_paths=(),
        num_checksums=0,
    )
    assert (report.path, report.size_bytes, report.main_key) == (path, os.path.getsize(path), "images")
    assert report.advice == Advice(NOTHING)
    assert report.problems == ()


def test_chunks_one_row_short_of_a_sample_are_seen_to_double_the_reads_and_the_file(path):
    # Chunks of 217 rows on images of 218: each image lies in two chunks, the second nearly empty.
    write(path, images=(pixels(250, 3, 218, 178), {"chunks": (100, 3, 217, 178), "maxshape": (None, 3, 218, 178)}))
    report = look(path)
    images = dataset(report)
    assert (images.chunks_per_sample, images.num_chunks) == (2, 6)
    assert images.read_ratio == pytest.approx(2 * 217 / 218)
    assert report.size_ratio == pytest.approx(2.39, abs=0.01)
    assert images.engine == "chunks"
    assert report.advice == Advice(
        "chunk (100, 3, 217, 178) does not hold whole samples of shape (3, 218, 178); a shuffled sample costs a block "
        "of 100 samples, 23.2 MB",
        "gpufeed repack data.h5 OUT.h5",
    )


def test_chunks_padded_around_whole_samples_are_seen_to_cost_reads(path):
    write(path, images=(pixels(40, 6, 8), {"chunks": (10, 8, 8), "maxshape": (None, None, 8)}))
    images = dataset(look(path))
    assert (images.chunks_per_sample, images.read_ratio) == (1, pytest.approx(8 / 6))


def test_chunks_never_written_are_counted(path):
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", (40, 12, 12), np.uint8, chunks=(10, 12, 12), fillvalue=7)[10:20] = 1
    report = look(path, probe_seconds=0.01)
    assert dataset(report).num_missing_chunks == 3
    assert "missing   3 chunks never written: reads as the fill value" in render_report(report)


def test_labels_are_said_to_be_kept_in_memory(path):
    write(
        path,
        images=pixels(20, 12, 12),
        labels=(labels_of(20), {"compression": "gzip"}),
        names=[f"n{i}" for i in range(20)],
    )
    report = look(path)
    assert (dataset(report, "labels").engine, dataset(report, "labels").engine_reason) == (
        "memory",
        "read once and kept",
    )
    assert (dataset(report, "names").engine, dataset(report, "names").dtype) == ("memory", "object")


def test_the_files_of_a_virtual_dataset_are_listed(path):
    write("part.h5", images=pixels(20, 12, 12))
    layout = h5py.VirtualLayout((20, 12, 12), np.uint8)
    layout[:] = h5py.VirtualSource("part.h5", "images", (20, 12, 12))
    with h5py.File(path, "w") as h5_file:
        h5_file.create_virtual_dataset("images", layout)
    report = look(path)
    assert dataset(report).source_paths == (os.path.abspath("part.h5"),)
    assert report.size_ratio is None  # the data lies elsewhere
    assert report.advice.command == "gpufeed repack data.h5 OUT.h5"


def test_the_file_of_an_external_dataset_is_listed(path):
    pixels(20, 8, 16).tofile("images.raw")
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", (20, 8, 16), np.uint8, external=[("images.raw", 0, 20 * 128)])
    report = look(path, probe_seconds=0.01)
    assert dataset(report).storage == "external"
    assert dataset(report).source_paths == (os.path.abspath("images.raw"),)
    assert report.advice == Advice("the bytes lie in external raw files", "gpufeed repack data.h5 OUT.h5")


def test_the_size_of_the_file_is_compared_with_the_data_in_it(path):
    write(path, images=(np.zeros((500, 32, 32), np.uint8), {"chunks": (50, 32, 32), "compression": "gzip"}))
    assert look(path).size_ratio < 0.05
    write(path, images=pixels(500, 32, 32))
    assert look(path).size_ratio == pytest.approx(1.0, abs=0.01)


def test_a_size_that_cannot_be_compared_is_left_open(path):
    write(path, images=pixels(20, 12, 12), names=["name"] * 20)
    assert look(path).size_ratio is None


def test_what_pack_wrote_is_recognised_with_its_checksums(path):
    np.savez("source.npz", images=pixels(300, 3, 16, 16), labels=labels_of(300))
    pack("source.npz", path, chunk_bytes=30_000)
    report = look(path)
    assert (report.format_version, report.num_skipped) == (1, 0)
    assert report.written_by is not None
    assert [one.num_checksums for one in report.datasets] == [one.num_chunks for one in report.datasets]
    assert report.num_checksums == 8 + 1
    assert report.advice == Advice(NOTHING)


def test_samples_that_pack_left_out_are_counted(path):
    from PIL import Image

    for name in ("a", "b"):
        os.makedirs(f"photos/{name}")
        for number in range(3):
            Image.fromarray(pixels(8, 8, 3)).save(f"photos/{name}/{number}.png")
    with open("photos/b/1.png", "wb") as broken:
        broken.write(b"not an image")
    pack("photos", path, on_error="skip", num_workers=0)
    assert look(path).num_skipped == 1
    assert dataset(look(path)).shape[0] == 5


# -- what cannot be used


def test_what_cannot_be_used_is_listed_with_the_reason_and_fails_nothing(path):
    with h5py.File(path, "w") as h5_file:
        h5_file["images"] = pixels(20, 12, 12)
        h5_file["records"] = np.zeros(20, dtype=[("a", "i4"), ("b", "f8")])
        h5_file["empty"] = np.zeros((0, 3))
        h5_file["far"] = h5py.ExternalLink("gone.h5", "x")
        h5_file["nowhere"] = h5py.SoftLink("/not/there")
        h5_file["number"] = 3
    report = look(path, probe_seconds=0.01)
    problems = dict(report.problems)
    assert problems.keys() == {"empty", "far", "nowhere", "records"}
    assert problems["empty"] == "it holds no samples (shape (0, 3))"
    # No message begins with the name of the file, which the report says once.
    assert problems["far"].startswith("key 'far' is a link to 'x' in the file 'gone.h5', which cannot be opened")
    assert problems["nowhere"].startswith(
        "key 'nowhere' is a link to '/not/there', which is not in the file. It has: 'empty' (0, 3)"
    )
    assert problems["records"].startswith("dataset 'records' has ")
    assert [one.key for one in report.datasets] == ["images"]
    assert report.probe is not None
    assert report.size_ratio is None


def test_a_virtual_dataset_whose_file_is_gone_is_listed(path):
    layout = h5py.VirtualLayout((20, 12, 12), np.uint8)
    layout[:] = h5py.VirtualSource("gone.h5", "images", (20, 12, 12))
    with h5py.File(path, "w") as h5_file:
        h5_file.create_virtual_dataset("images", layout)
    report = look(path)
    assert "'gone.h5', which is not there" in dict(report.problems)["images"]
    assert report.advice == Advice("there is no dataset that could be read")
    assert (report.main_key, report.cached_share, report.datasets) == (None, None, ())


def damage(path, key, chunk):
    """Overwrite the stored bytes of a chunk."""
    with h5py.File(path) as h5_file:
        stored = h5_file[key].id.get_chunk_info(chunk)
    with open(path, "r+b") as raw:
        raw.seek(stored.byte_offset)
        raw.write(b"\xff" * stored.size)


def test_damaged_images_are_listed_and_the_advice_says_so(path):
    write(path, images=(pixels(20, 8, 8), {"chunks": (20, 8, 8), "compression": "gzip"}), labels=labels_of(20))
    damage(path, "images", 0)
    report = look(path, probe_seconds=0.05)
    assert "samples 0 to 19 cannot be read" in dict(report.problems)["images"]
    assert report.advice == Advice("images is damaged; copy or pack the file again")
    assert report.probe is None


def test_damaged_images_are_found_without_a_probe_too(path):
    write(path, images=(pixels(40, 8, 8), {"chunks": (20, 8, 8), "compression": "gzip"}))
    damage(path, "images", 1)
    report = look(path)
    assert "samples 20 to 39 cannot be read" in dict(report.problems)["images"]
    assert report.advice.command is None


def test_damaged_labels_are_listed(path):
    write(path, images=pixels(20, 8, 8), labels=(labels_of(20), {"chunks": (20,), "compression": "gzip"}))
    damage(path, "labels", 0)
    report = look(path, probe_seconds=0.05)
    assert "samples 0 to 19 cannot be read" in dict(report.problems)["labels"]
    assert report.labels == ()


def test_a_file_without_datasets_gives_a_report(path):
    write(path)
    report = look(path, probe_seconds=0.01)
    assert report.advice == Advice("there is no dataset that could be read")
    assert render_report(report).splitlines()[0] == "data.h5"


def test_a_missing_file_is_an_error(path):
    with pytest.raises(FileNotFoundError, match="no such file: expected an HDF5 file"):
        look(path)


def test_a_file_that_is_not_hdf5_is_an_error(path):
    with open(path, "w") as text:
        text.write("plain text")
    with pytest.raises(LayoutError, match=r"data\.h5 is not an HDF5 file: 10 bytes, beginning with b'plain te'"):
        look(path)


def test_a_truncated_file_is_an_error(path):
    write(path, images=pixels(100, 32, 32))
    os.truncate(path, 50_000)
    with pytest.raises(LayoutError, match=r"data\.h5: truncated: it has 50000 bytes"):
        look(path)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_time_that_cannot_be_meant_is_refused(path, seconds):
    with pytest.raises(ValueError, match=r"probe_seconds is .*; expected a number of seconds, 0 or more"):
        look(path, probe_seconds=seconds)


# -- labels


def test_the_order_of_the_labels_is_told(path):
    write(path, images=pixels(6000, 2, 2), labels=labels_of(6000, 100, is_sorted=True))
    [labels] = look(path).labels
    assert (labels.key, labels.order, labels.num_classes) == ("labels", LabelOrder.SORTED, 100)
    assert (labels.min_per_class, labels.max_per_class) == (60, 60)
    # In random order of the blocks a window holds more classes than its samples have in the file, but not all.
    assert 0.3 < labels.window_variety < 0.7
    write(path, images=pixels(6000, 2, 2), labels=labels_of(6000, 100))
    [labels] = look(path).labels
    assert labels.order is LabelOrder.SHUFFLED
    assert labels.window_variety > 0.97


def test_each_split_has_its_labels(path):
    write(
        path, x_train=pixels(60, 12, 12), y_train=labels_of(60, 3), x_test=pixels(20, 12, 12), y_test=labels_of(20, 2)
    )
    report = look(path)
    assert {one.key: one.num_classes for one in report.labels} == {"y_train": 3, "y_test": 2}
    assert report.main_key == "x_train"


def test_labels_are_found_beside_vectors_too(path):
    write(path, features=np.ones((60, 16), np.float32), labels=labels_of(60, 3))
    report = look(path, probe_seconds=0.01)
    assert (report.main_key, [one.key for one in report.labels]) == ("features", ["labels"])
    assert report.probe.keys == ("features", "labels")


def test_the_largest_array_counts_where_no_name_tells_which_are_the_images(path):
    arrays = {"left": pixels(40, 3, 12, 12), "right": pixels(40, 12, 12), "first_class": np.arange(40) % 2}
    write(path, **arrays, second_class=np.arange(40) % 3)
    report = look(path, probe_seconds=0.01)
    assert (report.main_key, report.labels) == ("left", ())


@pytest.mark.parametrize(
    "labels",
    [pixels(40, 12, 12), np.eye(4)[np.arange(40) % 4], np.linspace(0, 1, 40), np.arange(40)],
    ids=["masks", "one of four", "numbers", "a running number"],
)
def test_labels_that_are_no_class_numbers_are_passed_over(path, labels):
    write(path, images=pixels(40, 3, 12, 12), labels=labels)
    report = look(path, probe_seconds=0.01)
    assert report.labels == ()
    assert report.main_key == "images"


def test_labels_in_a_column_are_class_numbers(path):
    write(path, images=pixels(40, 12, 12), labels=labels_of(40, 4).reshape(40, 1).astype(np.uint8))
    assert look(path).labels[0].num_classes == 4


# -- the probe


class RecordingSource(H5Source):
    """Notes which samples are read, and with how many threads."""

    asked: list[list[int]]
    num_threads: set[int]

    def read(self, indices, out):
        if not hasattr(self, "asked"):
            self.asked, self.num_threads = [], set()
        self.asked.append(indices.tolist())
        self.num_threads.add(torch.get_num_threads())
        assert all(len(tensor) == len(indices) for tensor in out.values())
        return super().read(indices, out)


@pytest.fixture
def ticking(monkeypatch):
    """A clock that goes on by a millisecond whenever it is looked at: reading is fast, however busy the machine is."""
    ticks = itertools.count()
    monkeypatch.setattr(inspection, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))


def measure(path, keys, seconds):
    with inspection._one_thread():
        source = RecordingSource(path, keys)
        report = inspection._measure_rate(source, seconds)
    source.close()
    return source, report


def test_the_probe_reads_every_sample_once_per_pass_in_a_random_order(path, ticking):
    write(path, images=pixels(1000, 12, 12), labels=labels_of(1000))
    source, report = measure(path, ["images", "labels"], 0.3)
    read = [index for indices in source.asked[1:] for index in indices]  # the first opens the files
    assert report.num_samples == len(read)
    assert report.num_passes == len(read) / 1000 > 2
    passes = [read[first : first + 1000] for first in range(0, len(read) - 999, 1000)]
    assert all(sorted(one) == list(range(1000)) for one in passes)
    assert passes[0] != passes[1] != sorted(passes[1])
    assert max(map(len, source.asked)) == report.batch_size == 256


def test_the_probe_begins_with_few_samples_and_reads_on_one_thread(path, ticking):
    write(path, images=pixels(1000, 12, 12))
    torch.set_num_threads(3)
    source, _ = measure(path, ["images"], 0.1)
    assert [len(indices) for indices in source.asked[:6]] == [1, 1, 2, 4, 8, 16]
    assert source.num_threads == {1}
    assert torch.get_num_threads() == 3


def test_rates_follow_from_what_was_read(path):
    write(path, images=pixels(1000, 12, 12), labels=labels_of(1000))
    probe = look(path, probe_seconds=0.05).probe
    assert probe.keys == ("images", "labels")
    assert probe.samples_per_second == pytest.approx(probe.num_samples / probe.seconds)
    assert probe.bytes_per_second == pytest.approx(probe.samples_per_second * (144 + 8))


def test_the_probe_of_a_file_smaller_than_a_batch_takes_what_there_is(path, ticking):
    write(path, images=pixels(3, 12, 12))
    probe = look(path, probe_seconds=0.02).probe
    assert (probe.batch_size, probe.num_passes > 1) == (3, True)


def test_the_probe_of_huge_samples_stays_within_memory(path):
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", (8, 100_000_000), np.uint8, chunks=(1, 100_000_000))  # sparse
    source = H5Source(path, ["images"])
    report = inspection._measure_rate(source, 0.01)
    source.close()
    assert report.batch_size == 2


class SlowSource(RecordingSource):
    """Lets a clock go on by what a slow file would take: per sample, and per block of 250 that is read first."""

    now = 0.0
    sample_seconds: float
    block_seconds: float

    def read(self, indices, out):
        seen = {index // 250 for one in getattr(self, "asked", []) for index in one}
        new = {index // 250 for index in indices.tolist()} - seen
        self.now += self.sample_seconds * len(indices) + self.block_seconds * len(new)
        return super().read(indices, out)


def probe_slowly(path, monkeypatch, *, sample_seconds, block_seconds=0.0):
    """Probe a file of 1000 samples for one second of a clock of its own."""
    write(path, images=pixels(1000, 12, 12))
    source = SlowSource(path, ["images"])
    source.sample_seconds, source.block_seconds = sample_seconds, block_seconds
    monkeypatch.setattr(inspection, "time", SimpleNamespace(perf_counter=lambda: source.now))
    report = inspection._measure_rate(source, 1.0)
    source.close()
    return source, report


def test_a_slow_file_is_probed_no_longer_than_asked(path, monkeypatch):
    source, report = probe_slowly(path, monkeypatch, sample_seconds=0.02)
    # A read takes a quarter of the time at most, 12 samples; after 39 of them the next would take too long.
    assert [len(indices) for indices in source.asked] == [1, 1, 2, 4, 8, 12, 12]
    assert report.seconds == pytest.approx(39 * 0.02)


def test_a_very_slow_file_is_probed_with_one_sample(path, monkeypatch):
    _, report = probe_slowly(path, monkeypatch, sample_seconds=5.0)
    assert (report.num_samples, report.samples_per_second) == (1, pytest.approx(0.2))


def test_a_file_that_turns_out_slow_after_a_fast_start_is_probed_for_one_block_longer_at_most(path, monkeypatch):
    # The first sample is fast, because its block was read when the file was opened.
    _, report = probe_slowly(path, monkeypatch, sample_seconds=1e-5, block_seconds=0.4)
    assert report.seconds <= 1.0 + 0.4


def test_a_very_long_file_is_probed_without_sorting_a_permutation(path, monkeypatch, ticking):
    monkeypatch.setattr(inspection, "_MOST_PERMUTED", 100)
    write(path, images=pixels(1000, 12, 12))
    source, report = measure(path, ["images"], 0.05)
    read = {index for indices in source.asked for index in indices}
    assert report.num_samples > 300
    assert max(read) > 900
    assert min(read) < 100


def test_no_probe_is_made_in_no_time(path):
    write(path, images=pixels(10, 12, 12))
    assert look(path, probe_seconds=0).probe is None


# -- advice


def command(path, **arrays):
    write(path, **arrays)
    return look(path).advice.command


def test_ordered_labels_are_to_be_shuffled_where_the_file_has_to_be_packed_anyway(path):
    gzip = {"chunks": (16, 12, 12), "compression": "gzip"}
    images, ordered = (pixels(80, 12, 12), gzip), labels_of(80, is_sorted=True)
    assert command(path, images=images, labels=ordered) == "gpufeed pack data.h5 OUT.h5 --shuffle"
    assert command(path, images=images, labels=labels_of(80)) == "gpufeed repack data.h5 OUT.h5"
    assert command(path, images=pixels(80, 12, 12), labels=ordered) is None  # a full shuffle costs nothing there


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (
            pixels(30, 12, 12) / np.float32(255),
            Advice("float32 values that uint8 can hold take 4 times its bytes", "--scale 255"),
        ),
        (
            np.linspace(0, 1, 30 * 144).reshape(30, 12, 12),
            Advice("float64 values that uint8 can hold, rounded to 256 steps, take 8 times its bytes", "--scale 255"),
        ),
        (
            pixels(30, 12, 12).astype(np.float16),
            Advice("float16 values that uint8 can hold take 2 times its bytes", "--scale 1"),
        ),
    ],
    ids=["0 to 1", "0 to 1, finer", "0 to 255"],
)
def test_floats_that_uint8_can_hold_are_to_be_scaled(path, images, expected):
    write(path, images=images)
    advice = look(path).advice
    assert advice == Advice(expected.reason, f"gpufeed pack data.h5 OUT.h5 {expected.command}")


def test_wide_integers_that_uint8_can_hold_are_to_be_packed(path):
    write(path, images=pixels(30, 12, 12).astype(np.int32))
    assert look(path).advice == Advice(
        "int32 values that uint8 can hold take 4 times its bytes", "gpufeed pack data.h5 OUT.h5"
    )


@pytest.mark.parametrize(
    "images",
    [
        pixels(30, 12, 12) - 128.0,
        pixels(30, 12, 12).astype(np.uint16) * 16,
        np.full((30, 12, 12), np.nan),
        pixels(30, 12, 12) + 0j,
    ],
    ids=["negative", "12 bits", "not a number", "complex"],
)
def test_values_that_uint8_cannot_hold_are_left_alone(path, images):
    write(path, images=images)
    assert look(path).advice == Advice(NOTHING)
    write(path, images=(images, {"chunks": (10, 12, 12), "compression": "gzip"}))
    assert look(path).advice.command == "gpufeed pack data.h5 OUT.h5 --keep-dtype"


def test_vectors_of_floats_are_left_alone(path):
    write(path, features=np.ones((3000, 32), np.float32))
    assert look(path).advice == Advice(NOTHING)


def test_many_tiny_chunks_are_to_be_packed(path):
    write(path, images=(pixels(5000, 12, 12), {"chunks": (1, 12, 12)}))
    assert look(path).advice == Advice(
        "5,000 chunks of 144 B are looked up at every start", "gpufeed repack data.h5 OUT.h5"
    )


def test_chunks_that_h5py_guessed_are_to_be_packed(path):
    write(path, images=(pixels(500, 3, 32, 32), {"chunks": True}))
    assert "does not hold whole samples" in look(path).advice.reason


def test_big_endian_numbers_are_to_be_packed(path):
    write(path, images=pixels(30, 12, 12).astype(">i2"))
    assert look(path).advice == Advice(
        "the file's element type needs conversion to int16", "gpufeed pack data.h5 OUT.h5"
    )


def test_values_of_different_lengths_need_another_source(path):
    with h5py.File(path, "w") as h5_file:
        h5_file["labels"] = np.arange(20) % 2
        pictures = h5_file.create_dataset("pictures", (20,), h5py.vlen_dtype(np.uint8))
        for number in range(20):
            pictures[number] = pixels(50 + number)
    advice = look(path, probe_seconds=0.01).advice
    assert advice.command == "gpufeed pack package.module:dataset OUT.h5"
    assert advice.reason.startswith("pictures holds values of different lengths")


def test_a_dataset_that_is_kept_in_memory_needs_nothing(path):
    write(path, numbers=(np.arange(100), {"compression": "gzip"}))
    assert look(path).advice == Advice("all of it is kept in memory")


def test_the_command_names_the_fields_where_the_file_holds_others_that_cannot_go_with_them(path):
    gzip = {"chunks": (10, 12, 12), "compression": "gzip"}
    write(
        path,
        x_train=(pixels(60, 12, 12), gzip),
        y_train=labels_of(60),
        x_test=(pixels(20, 12, 12), gzip),
        names=["name"] * 60,
    )
    assert look(path).advice.command == "gpufeed pack data.h5 OUT.h5 --keys x_train,y_train"


def test_the_command_can_be_pasted_into_a_shell(tmp_path):
    folder = tmp_path / "my data"
    folder.mkdir()
    write(folder / "it's.h5", images=(pixels(60, 12, 12), {"chunks": (10, 12, 12), "compression": "gzip"}))
    words = shlex.split(look(folder / "it's.h5").advice.command)
    assert words == ["gpufeed", "repack", str(folder / "it's.h5"), "OUT.h5"]


# -- its forms


def test_the_report_goes_through_json_unchanged(path):
    write(path, images=(pixels(60, 12, 12), {"chunks": (25, 12, 12)}), labels=labels_of(60), broken=np.zeros((0, 2)))
    report = look(path, probe_seconds=0.01)
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert plain["datasets"][0]["chunk_shape"] == [25, 12, 12]
    assert plain["labels"][0]["order"] == "shuffled"
    assert plain["advice"] == {"reason": NOTHING, "command": None}
    assert plain["problems"] == [["broken", "it holds no samples (shape (0, 2))"]]
    assert plain["probe"]["num_samples"] == report.probe.num_samples
    assert plain["cached_share"] == report.cached_share


REPORT = FileReport(
    path="train.h5",
    size_bytes=69_500_000,
    size_ratio=2.388,
    format_version=1,
    written_by="0.1.0",
    num_skipped=1,
    datasets=(
        DatasetReport(
            key="images",
            shape=(250, 3, 218, 178),
            dtype="uint8",
            storage="chunked",
            data_bytes=29_103_000,
            chunk_shape=(100, 3, 217, 178),
            chunk_samples=100,
            chunk_bytes=11_587_800,
            num_chunks=6,
            num_missing_chunks=1,
            has_edge_chunk=True,
            chunks_per_sample=2,
            read_ratio=434 / 218,
            filters=("shuffle", "gzip"),
            engine="h5py",
            engine_reason="chunks pass through shuffle, gzip and have to be decoded",
            source_paths=("part.h5",),
            num_checksums=6,
        ),
    ),
    problems=(("masks", "it holds no samples (shape (0, 3))"),),
    labels=(LabelReport("labels", 10, 20, 30, LabelOrder.SORTED, 0.213),),
    main_key="images",
    cached_share=0.52,
    probe=ProbeReport(("images", "labels"), 250, 12_500, 1.02, 12_254.9, 1.4264e9, 50.0),
    advice=Advice("each sample has to be decoded", "gpufeed pack train.h5 OUT.h5 --shuffle"),
)


def test_a_report_looks_like_this():
    assert (
        render_report(REPORT)
        == """\
train.h5
            69.5 MB, 2.39 times the data in it, packed by gpufeed 0.1.0 (format 1), checksums of 6
            chunks, 1 sample of the source left out

images  (250, 3, 218, 178) uint8, 29.1 MB
  chunk     (100, 3, 217, 178): 100 samples, 11.6 MB; 6 chunks, the last one partly filled
  split     a sample takes 2 chunks, 1.99 times its bytes are read
  filters   shuffle, gzip
  missing   1 chunk never written: reads as the fill value
  made of   part.h5
  engine    h5py: chunks pass through shuffle, gzip and have to be decoded

masks  cannot be used
  because   it holds no samples (shape (0, 3))

classes     labels: sorted by class; 10 classes, 20 to 30 samples each; a batch of 256 from a window
            of 1024 holds 21 % of the classes of a full shuffle's batch
page cache  about 52 % of images
rate        12,255 samples/s, 1.4 GB/s: images + labels in a full shuffle, batches of 250, measured
            for 1.0 s; read 50.0 times over, so from memory
faster      each sample has to be decoded
            gpufeed pack train.h5 OUT.h5 --shuffle"""
    )


def test_what_is_unknown_is_said_or_left_out():
    contiguous = replace(
        REPORT.datasets[0],
        chunk_shape=None,
        storage="contiguous",
        chunks_per_sample=1,
        read_ratio=1.0,
        filters=(),
        num_missing_chunks=0,
        source_paths=(),
        engine="raw",
        engine_reason="it is whole",
        num_checksums=0,
    )
    bare = replace(
        REPORT,
        size_ratio=None,
        format_version=None,
        num_skipped=0,
        datasets=(contiguous,),
        problems=(),
        labels=(),
        cached_share=None,
        probe=None,
        advice=Advice(NOTHING),
    )
    assert (
        render_report(bare)
        == f"""\
train.h5
            69.5 MB

images  (250, 3, 218, 178) uint8, 29.1 MB
  stored    contiguous
  engine    raw: it is whole

page cache  unknown share of images
faster      nothing: {NOTHING}"""
    )


def test_a_share_that_would_be_rounded_to_nothing_is_not_called_nothing():
    labels = replace(REPORT.labels[0], window_variety=0.004)
    text = render_report(replace(REPORT, labels=(labels,), cached_share=0.0))
    assert "holds less than 1 % of the classes" in " ".join(text.split())
    assert "about 0 % of images" in text


def test_no_line_is_wider_than_a_hundred_columns(path):
    gzip = {"chunks": (16, 12, 12), "compression": "gzip", "shuffle": True, "fletcher32": True}
    with h5py.File(write(path, images=(pixels(80, 12, 12), gzip), labels=labels_of(80)), "a") as h5_file:
        h5_file["records"] = np.zeros(20, dtype=[(f"member_{number}", "i4") for number in range(30)])
    lines = render_report(look(path, probe_seconds=0.01)).splitlines()
    assert len(lines) > 15
    assert max(map(len, lines)) <= 100


@given(st.integers(0, 10**16))
def test_a_size_has_one_to_three_digits_before_the_point_and_is_right(num_bytes):
    number, unit = bytes_text(num_bytes).split(" ")
    assert len(number.split(".")[0]) <= 3 or (unit == "TB" and num_bytes >= 999 * 10**12)
    exact = float(number) * 1000 ** ["B", "kB", "MB", "GB", "TB"].index(unit)
    assert exact == pytest.approx(num_bytes, rel=0.051)
