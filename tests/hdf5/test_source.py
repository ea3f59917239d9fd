"""Files as one collection of samples: what they must agree in, what a batch holds, how changes are noticed."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lightning_gpufeed.device.memory import TensorSpec
from lightning_gpufeed.errors import FeedError, GpuFeedError, LayoutError
from lightning_gpufeed.hdf5.source import H5Source
from tests.contracts import as_bytes, exactly, index_cases
from tests.doubles import WAIT_SECONDS


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write arrays by key to a file of a given name; a dict in place of an array holds `create_dataset` arguments."""

    def write(name: str = "data.h5", **arrays: Any) -> Path:
        with h5py.File(tmp_path / name, "w") as h5_file:
            for key, values in arrays.items():
                h5_file.create_dataset(key, **(values if isinstance(values, dict) else {"data": values}))
        return tmp_path / name

    return write


@pytest.fixture
def opened() -> Any:
    """Open sources that are closed at the end of the test."""
    sources: list[H5Source] = []

    def opened(*arguments: Any, **options: Any) -> H5Source:
        sources.append(H5Source(*arguments, **options))
        return sources[-1]

    yield opened
    for source in sources:
        source.close()
        source.close()


def images(num_samples: int, *, first: int = 0) -> np.ndarray:
    """uint8 (n, 3, 8, 8) that tells samples apart."""
    return np.stack([np.full((3, 8, 8), (first + number) % 256, np.uint8) for number in range(num_samples)])


# Fields --------------------------------------------------------------------------------------------------


def test_all_arrays_of_a_file_are_fields_unless_some_are_named(write, opened):
    path = write(images=images(4), labels=np.arange(4), names=["a", "b", "c", "d"])
    assert list(opened(path).fields) == ["images", "labels", "names"]
    assert list(opened(path, "labels").fields) == ["labels"]
    assert list(opened(path, ["names", "images"]).fields) == ["names", "images"]
    assert list(opened(path, {"x": "images", "y": "labels"}).fields) == ["x", "y"]


def test_a_batch_holds_every_field_in_the_order_of_the_fields(write, opened):
    path = write(images=images(4), labels=np.arange(4), names=["a", "b", "c", "d"])
    source = opened(path, ["names", "labels", "images"])
    batch = source.read_new(np.array([3, 0, 3]))
    assert list(batch) == ["names", "labels", "images"]
    assert batch["names"] == ["d", "a", "d"]
    assert batch["labels"].tolist() == [3, 0, 3]
    assert as_bytes(batch["images"]) == as_bytes(images(4)[[3, 0, 3]])


def test_specs_tell_what_the_tensors_are(write, opened):
    source = opened(write(images=images(4), labels=np.arange(4), names=["a", "b", "c", "d"]))
    assert source.specs == {
        "images": TensorSpec((3, 8, 8), torch.uint8),
        "labels": TensorSpec((), torch.int64),
    }


@pytest.mark.parametrize("keys", [[], {}, (), [""], {"x": ""}, {"x": 3}, [3]], ids=str)
def test_keys_that_name_nothing_are_refused(write, keys):
    message = f"keys={keys!r}; expected at least one name of a dataset, or field name -> key."
    with pytest.raises(ValueError, match=exactly(message)):
        H5Source(write(x=np.arange(3)), keys)


def test_a_file_without_arrays_is_refused(write):
    path = write()
    with pytest.raises(LayoutError) as error:
        H5Source(path)
    assert str(error.value) == f"{path}: there are no datasets in it; expected at least one array of samples."


def test_no_file_is_refused():
    with pytest.raises(ValueError, match=r"^no file was given; expected a path or a list of paths\.$"):
        H5Source([])


def test_arrays_of_different_lengths_are_refused(write):
    path = write(images=images(4), labels=np.arange(5))
    with pytest.raises(LayoutError) as error:
        H5Source(path)
    assert str(error.value) == (
        f"{path}: the datasets have different numbers of samples: 'images' 4, 'labels' 5. Name those that belong "
        f"together."
    )
    H5Source(path, "labels").close()


@pytest.mark.parametrize("num_files", [1, 2])
def test_data_without_samples_is_refused(write, num_files):
    paths = [write(f"part{n}.h5", x=np.zeros((0, 3), np.uint8)) for n in range(num_files)]
    with pytest.raises(LayoutError) as error:
        H5Source(paths)
    assert str(error.value) == (
        f"{', '.join(map(str, paths))}: dataset 'x' holds no samples (shape (0, 3)); expected at least one. Was the "
        f"file packed to the end?"
    )


# Several files -------------------------------------------------------------------------------------------


def test_samples_are_counted_through_all_files(write, opened):
    paths = [write(f"part{n}.h5", x=images(n + 1, first=10 * n), y=np.arange(n + 1) + 10 * n) for n in range(4)]
    source = opened(paths)
    assert source.num_samples == 10
    assert source.paths == tuple(map(str, paths))
    numbers = np.array([0, 10, 11, 20, 21, 22, 30, 31, 32, 33])
    for case, indices in index_cases(10).items():
        batch = source.read_new(indices)
        assert batch["y"].tolist() == numbers[indices].tolist(), case
        assert batch["x"][:, 0, 0, 0].tolist() == numbers[indices].tolist(), case


def test_files_may_be_stored_in_different_ways(write, opened):
    stored = [
        {"data": images(3)},
        {"data": images(3, first=3), "chunks": (2, 3, 8, 8), "compression": "gzip"},
        {"data": images(3, first=6), "chunks": (2, 3, 8, 4)},
    ]
    source = opened([write(f"part{n}.h5", x=options) for n, options in enumerate(stored)])
    order = np.random.default_rng(0).permutation(9)
    assert as_bytes(source.read_new(order)["x"]) == as_bytes(images(9)[order])
    assert source.engine_lines == ["x: chunks (chunks pass through gzip and are decoded by several threads)"]


def test_byte_orders_may_differ_between_files(write, opened):
    parts = [np.arange(300, dtype=dtype).reshape(3, 100) for dtype in ("<i4", ">i4")]
    source = opened([write(f"part{n}.h5", x=part) for n, part in enumerate(parts)])
    assert source.read_new(np.array([1, 4]))["x"].tolist() == [parts[0][1].tolist(), parts[1][1].tolist()]


@pytest.mark.parametrize(
    ("other", "shape", "dtype"),
    [(np.zeros((4, 3, 8, 9), np.uint8), "(3, 8, 9)", "uint8"), (np.zeros((4, 3, 8, 8), np.int8), "(3, 8, 8)", "int8")],
    ids=["shape", "type"],
)
def test_files_whose_samples_differ_are_refused(write, other, shape, dtype):
    first, second = write("a.h5", x=images(4)), write("b.h5", x=other)
    with pytest.raises(LayoutError) as error:
        H5Source([first, second])
    assert str(error.value) == (
        f"{second}: dataset 'x' has samples of shape {shape} and type {dtype}, but {first} has (3, 8, 8) and uint8. "
        f"Files used as one dataset must agree."
    )


def test_a_file_that_lacks_a_key_of_the_first_is_refused(write):
    first, second = write("a.h5", x=np.arange(3), y=np.arange(3)), write("b.h5", x=np.arange(3))
    with pytest.raises(LayoutError) as error:
        H5Source([first, second])
    assert str(error.value).startswith(f"{second}: no dataset 'y'. It has: 'x' (3,) int64. Files given together follow")


def test_text_and_numbers_of_varying_length_are_not_mixed(write):
    paths = [write("a.h5", x=["a", "b"]), write("b.h5", x={"shape": (2,), "dtype": h5py.vlen_dtype("i4")})]
    with pytest.raises(GpuFeedError):
        H5Source(paths)


def test_a_sample_is_located_in_its_file(write, opened):
    paths = [write(f"part{n}.h5", x=np.arange(3)) for n in range(2)]
    source = opened(paths)
    assert source.locate(2) == f"sample 2 of {paths[0]}"
    assert source.locate(3) == f"sample 0 of {paths[1]}"


# How it is read ------------------------------------------------------------------------------------------


def test_lines_tell_how_each_field_is_read(write, opened):
    path = write(
        images=images(4), packed={"data": images(4), "compression": "gzip", "chunks": (2, 3, 8, 8)}, labels=np.arange(4)
    )
    assert opened(path).engine_lines == [
        "images: raw (uncompressed, every sample in one block: gathered straight from the mapped file)",
        "labels: read once and kept in memory",
        "packed: chunks (chunks pass through gzip and are decoded by several threads)",
    ]


@pytest.mark.parametrize(
    ("arrays", "needs_decoding"),
    [
        ({"x": images(4)}, False),
        ({"x": {"data": images(4), "compression": "gzip"}}, True),
        ({"x": {"data": np.arange(4), "compression": "gzip"}}, False),  # kept in memory
        ({"x": ["a", "b"]}, False),
        ({"x": images(4), "y": {"data": images(4)[:, 0], "compression": "gzip"}}, False),  # the larger decides
        ({"x": {"data": images(4), "compression": "gzip"}, "y": images(4)[:, 0]}, True),
    ],
    ids=["raw", "compressed", "small", "text", "small part compressed", "large part compressed"],
)
def test_the_largest_field_that_is_streamed_decides_whether_the_order_matters(write, opened, arrays, needs_decoding):
    assert opened(write(**arrays)).needs_decoding == needs_decoding


def test_what_a_user_does_to_a_batch_does_not_reach_the_next_one(write, opened):
    lengths = {"shape": (3,), "dtype": h5py.vlen_dtype("i4")}
    path = write(images=images(3), labels=np.arange(3), texts=[["a", "b"]] * 3, lengths=lengths)
    with h5py.File(path, "a") as h5_file:
        h5_file["lengths"][1] = [1, 2, 3]
    source = opened(path)
    first = source.read_new(np.arange(3))
    first["images"].fill_(9)
    first["labels"].fill_(9)
    first["lengths"][1].fill_(9)
    first["texts"][0].append("c")
    second = source.read_new(np.arange(3))
    assert as_bytes(second["images"]) == as_bytes(images(3))
    assert second["labels"].tolist() == [0, 1, 2]
    assert [tensor.tolist() for tensor in second["lengths"]] == [[], [1, 2, 3], []]
    assert second["texts"] == [["a", "b"]] * 3


def test_a_closed_source_opens_again_at_the_next_read(write, opened):
    source = opened(write(x=images(4), y=np.arange(4), z=["a"] * 4))
    before = source.read_new(np.arange(4))
    source.close()
    after = source.read_new(np.arange(4))
    assert as_bytes(after["x"]) == as_bytes(before["x"])
    assert (after["y"].tolist(), after["z"]) == (before["y"].tolist(), before["z"])


def test_two_threads_may_read_from_one_source(write, opened):
    source = opened(write(x={"data": images(64), "chunks": (4, 3, 8, 8), "compression": "gzip"}, y=np.arange(64)))
    results: list[bool] = []

    def read(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(64)
        batch = source.read_new(order)
        results.append(batch["y"].tolist() == batch["x"][:, 0, 0, 0].tolist() == order.tolist())

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert results == [True] * 6


# Changes -------------------------------------------------------------------------------------------------


def rewrite(path: Path) -> None:
    with h5py.File(path, "r+") as h5_file:
        h5_file["y"][0] = 77
    os.utime(path, ns=(path.stat().st_mtime_ns + 1,) * 2)


def append(path: Path) -> None:
    with h5py.File(path, "a") as h5_file:
        h5_file["more"] = np.zeros(1000)


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").rename(path)


CHANGES = {
    "rewritten": (rewrite, "was written to"),
    "appended": (append, "changed its size from {before} to {after} bytes"),
    "truncated": (lambda path: os.truncate(path, 1000), "changed its size from {before} to 1000 bytes"),
    "replaced": (replace, "was replaced by another file"),
    "deleted": (Path.unlink, "is gone"),
}
each_change = pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES.keys())


@each_change
@pytest.mark.parametrize("which", [0, 1])
def test_a_change_of_any_file_is_noticed_and_named(write, opened, change, words, which):
    paths = [write(f"part{n}.h5", x=images(4), y=np.arange(4)) for n in range(2)]
    source = opened(paths)
    source.check_unchanged()
    before = paths[which].stat().st_size
    change(paths[which])
    after = paths[which].stat().st_size if paths[which].exists() else 0
    with pytest.raises(FeedError) as error:
        source.check_unchanged()
    assert str(error.value) == (
        f"{paths[which]} {words.format(before=before, after=after)} since it was opened, so its samples may lie "
        f"elsewhere now. Build the loader or DataModule again to use the new file."
    )


@each_change
@pytest.mark.parametrize("key", ["x", "y", "z"])
def test_a_file_that_changed_before_the_first_read_is_refused_and_not_read(write, opened, change, words, key):
    path = write(x=images(4), y=np.arange(4), z=["a"] * 4)
    source = opened(path, [key])
    change(path)
    with pytest.raises(FeedError):
        source.digest()
    with pytest.raises(FeedError):
        source.read_new(np.arange(4))


# Digest --------------------------------------------------------------------------------------------------


@pytest.fixture
def digest(write, opened) -> Callable[..., str]:
    numbers = iter(range(100))

    def digest(**arrays: Any) -> str:
        return opened(write(f"{next(numbers)}.h5", **arrays)).digest()

    return digest


def test_a_digest_is_that_of_the_samples_not_of_the_file(digest, write, opened):
    x, y = images(40), np.arange(40)
    expected = digest(x=x, y=y)
    assert (
        digest(x={"data": x, "chunks": (7, 3, 8, 8), "compression": "gzip"}, y={"data": y, "chunks": (3,)}) == expected
    )
    assert digest(x={"data": x, "chunks": (7, 1, 8, 8)}, y=y.astype(">i8")) == expected
    parts = [write(f"part{n}.h5", x=x[rows], y=y[rows]) for n, rows in enumerate([slice(0, 9), slice(9, 40)])]
    assert opened(parts).digest() == expected


@pytest.mark.parametrize(
    "other",
    [
        {"x": images(41), "y": np.arange(41)},
        {"x": images(40), "y": np.arange(40) + 1},
        {"x": images(40), "y": np.arange(40, dtype=np.int32)},
        {"x": images(40).reshape(40, 3, 64), "y": np.arange(40)},
        {"x": images(40)},
        {"X": images(40), "y": np.arange(40)},
        {"x": images(40)[::-1].copy(), "y": np.arange(40)},
    ],
    ids=["length", "values", "type", "shape", "fewer fields", "names", "order"],
)
def test_other_samples_have_another_digest(digest, other):
    assert digest(**other) != digest(x=images(40), y=np.arange(40))


@pytest.mark.parametrize(
    ("values", "other"),
    [
        (["a", "b"] * 20, ["a", "c"] * 20),
        (["a", "b"] * 20, ["b", "a"] * 20),
        ([["a", "bc"]] * 20, [["ab", "c"]] * 20),
    ],
    ids=["text", "order", "borders"],
)
def test_other_text_has_another_digest(digest, values, other):
    assert digest(x=values) == digest(x=values) != digest(x=other)


def test_a_digest_of_long_arrays_sees_their_middle_and_no_print_options(write, opened):
    digests = []
    for number, value in enumerate((0.0, 0.0, 1e-9)):
        path = write(f"{number}.h5", x={"shape": (1,), "dtype": h5py.vlen_dtype("f8")})
        with h5py.File(path, "a") as h5_file:
            values = np.zeros(5000)
            values[2500] = value
            h5_file["x"][0] = values
        try:
            torch.set_printoptions(precision=1 + number)
            digests.append(opened(path).digest())
        finally:
            torch.set_printoptions(profile="default")
    assert digests[0] == digests[1] != digests[2]


def test_a_digest_needs_no_file_that_stays_open(write):
    # The leak check around every test looks for descriptors and mappings.
    H5Source(write(x=images(40), y=np.arange(40), z={"data": images(40), "compression": "gzip"})).digest()


# Other processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_open", [False, True])
def test_a_source_is_sent_to_another_process_without_what_is_open(write, opened, is_open):
    source = opened(write(x=images(4), y=np.arange(4), z=["a", "b", "c", "d"]))
    if is_open:
        source.read_new(np.arange(4))
    sent = pickle.dumps(source)
    assert len(sent) < 10_000  # names and layouts, no samples
    copy = pickle.loads(sent)
    batch = copy.read_new(np.array([2, 1]))
    assert as_bytes(batch["x"]) == as_bytes(images(4)[[2, 1]])
    assert (batch["y"].tolist(), batch["z"], copy.digest()) == ([2, 1], ["c", "b"], source.digest())
    copy.close()


def test_a_copy_of_a_source_notices_changes_since_the_original_was_opened(write):
    path = write(x=images(4), y=np.arange(4))
    sent = pickle.dumps(H5Source(path))
    append(path)
    with pytest.raises(FeedError, match="changed its size"):
        pickle.loads(sent).read_new(np.arange(4))


# What a loader asks before it reads ----------------------------------------------------------------------


def stored_in(rows: int, values: np.ndarray) -> dict[str, Any]:
    return {"data": values, "chunks": (rows, *values.shape[1:]), "compression": "gzip"}


def test_samples_of_a_block_of_the_largest_field_are_read_together(write, opened):
    path = write(a=np.arange(12), x=stored_in(5, images(12)), y=stored_in(2, images(12)[:, :2]), z=["a"] * 12)
    order = np.array([11, 0, 4, 5, 9, 10])
    assert opened(path).blocks(order).tolist() == [2, 0, 0, 1, 1, 2]
    assert opened(path, ["a", "y"]).blocks(order).tolist() == [5, 0, 2, 2, 4, 5]
    assert opened([path, path], ["x"]).blocks(order + 12).tolist() == [5, 3, 3, 4, 4, 5]
    # Nothing is read by blocks: any answer will do, but there is one for each.
    assert opened(path, "a").blocks(order).shape == (6,)


def test_a_field_fits_the_cache_as_long_as_it_is_no_larger(write, opened):
    path = write(x=stored_in(4, images(4)), y=stored_in(4, images(4)[:, 0]), a=np.arange(4))
    num_bytes = 4 * 3 * 8 * 8
    assert opened(path, cache_bytes=num_bytes).fits_cache
    assert not opened(path, cache_bytes=num_bytes - 1).fits_cache
    assert not opened([path, path], ["x"], cache_bytes=num_bytes).fits_cache
    assert opened(path, "a", cache_bytes=0).fits_cache  # kept in memory anyway


def test_what_comes_is_told_to_each_tensor_field_and_ends_with_a_rest(write, opened):
    path = write(x=stored_in(2, images(12)), y=np.arange(12), z=["a"] * 12)
    source = opened(path, cache_bytes=0)
    order = np.random.default_rng(0).permutation(12)
    before = set(threading.enumerate())
    source.expect(order, 5)
    assert set(threading.enumerate()) != before  # blocks are being read
    batch = source.read_new(order[:5])
    assert as_bytes(batch["x"]) == as_bytes(images(12)[order[:5]])
    source.rest()
    assert set(threading.enumerate()) == before
    assert as_bytes(source.read_new(order[5:])["x"]) == as_bytes(images(12)[order[5:]])


def test_a_twin_has_readers_of_its_own(write, opened):
    source = opened(write(x=stored_in(2, images(12)), y=np.arange(12), z=["a"] * 12), cache_bytes=0)
    source.read_new(np.arange(3))
    twin = source.twin()
    assert (twin.paths, twin.num_samples, twin.digest()) == (source.paths, 12, source.digest())
    assert twin._readers == {}
    order = np.arange(12)
    source.expect(order, 4)
    twin.expect(order[::-1].copy(), 3)
    for step in range(3):
        here, there = source.read_new(order[4 * step :][:4]), twin.read_new(order[::-1][4 * step :][:4].copy())
        assert here["y"].tolist() == order[4 * step :][:4].tolist()
        assert there["y"].tolist() == order[::-1][4 * step :][:4].tolist()
    assert {id(one) for one in source._readers.values()}.isdisjoint(id(one) for one in twin._readers.values())
    twin.close()
    assert source.read_new(np.array([7]))["y"].tolist() == [7]
    source.on_way = print
    assert source.twin().on_way is None
