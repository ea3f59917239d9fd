"""Every reader returns exactly what `h5_dataset[i]` returns, from whatever HDF5 can hold numbers in."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, read_layout
from lightning_gpufeed.hdf5.order import WindowShuffle
from lightning_gpufeed.hdf5.readers.reader import (
    BlockReader,
    ChunkReader,
    FieldReader,
    GatherReader,
    RawReader,
    ResidentReader,
    is_resident,
    open_reader,
    read_objects,
    spec_of,
)
from tests.contracts import as_bytes, check_reader
from tests.doubles import WAIT_SECONDS, run_forked

INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
DTYPES = [np.dtype(name) for name in ["?", *INTEGERS, "f2", "f4", "f8", "c8", "c16"]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one dataset is written; `create` are arguments for `create_dataset`."""

    num_samples: int
    sample_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    create: dict[str, Any]
    file: dict[str, Any]
    is_compact: bool
    is_early: bool
    written: tuple[slice, ...]
    seed: int

    def write(self, path: Path) -> None:
        """Write the file, with random bits in the rows that are written."""
        random = np.random.default_rng(self.seed)
        with h5py.File(path, "w", **self.file) as h5_file:
            h5_file.create_dataset("before", data=np.zeros(self.seed % 40, np.uint8))
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if self.is_early:
                creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            if self.is_compact:
                creation.set_layout(h5py.h5d.COMPACT)
            shape = (self.num_samples, *self.sample_shape)
            dataset = h5_file.create_dataset("x", shape, self.dtype, dcpl=creation, **self.create)
            for rows in self.written:
                block = dataset[rows]
                bits = random.integers(0, 2 if self.dtype.kind == "b" else 256, block.nbytes, dtype=np.uint8)
                dataset[rows] = bits.view(block.dtype).reshape(block.shape)


@st.composite
def recipes(draw: st.DrawFn, dtype: np.dtype[Any], sample_shape: tuple[int, ...]) -> Recipe:
    num_samples = draw(st.integers(1, 12))
    create: dict[str, Any] = {}
    if draw(st.booleans()):
        create["fillvalue"] = np.array(draw(st.integers(0, 1 if dtype.kind == "b" else 100)), dtype)
    kind = draw(st.sampled_from(["contiguous", "compact", "aligned", "aligned", "any chunks"]))
    if kind in ("aligned", "any chunks"):
        # Larger than the data only where the dataset may grow.
        grows = draw(st.booleans())
        most_rows = num_samples + (5 if grows else 0)
        inner = sample_shape
        if kind == "any chunks":
            inner = tuple(draw(st.integers(1, size + (2 if grows else 0))) for size in sample_shape)
        create["chunks"] = (draw(st.integers(1, most_rows)), *inner)
        create["maxshape"] = tuple(None for _ in create["chunks"]) if grows else None
        if draw(st.booleans()):
            create |= draw(
                st.sampled_from(
                    [
                        {"compression": "gzip"},
                        {"compression": "lzf"},
                        {"shuffle": True},
                        {"fletcher32": True},
                        {"compression": "gzip", "shuffle": True, "fletcher32": True},
                        dict(hdf5plugin.Zstd()),
                        dict(hdf5plugin.LZ4()),
                    ]
                )
            )
    is_filtered = any(name in create for name in ("compression", "shuffle", "fletcher32"))
    edges = sorted(draw(st.lists(st.integers(0, num_samples), max_size=4)))
    parts = tuple(slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if a < b)
    return Recipe(
        num_samples,
        sample_shape,
        dtype.newbyteorder(draw(st.sampled_from(["<", ">"]))),
        {key: value for key, value in create.items() if value is not None},
        {"libver": draw(st.sampled_from(["earliest", "latest"])), "userblock_size": draw(st.sampled_from([0, 512]))},
        is_compact=kind == "compact",
        is_early=kind != "compact" and not is_filtered and draw(st.booleans()),
        written=draw(st.sampled_from([(slice(None),), parts, ()])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def recipes_of_one_dataset(draw: st.DrawFn) -> list[Recipe]:
    """One to three files that hold the same kind of samples, each in its own way."""
    dtype = draw(st.sampled_from(DTYPES))
    sample_shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    return draw(st.lists(recipes(dtype, sample_shape), min_size=1, max_size=3))


@contextmanager
def closing(reader: FieldReader) -> Iterator[FieldReader]:
    yield reader
    reader.close()
    reader.close()  # is allowed


@settings(max_examples=200)
@given(recipes_of_one_dataset())
def test_every_reader_returns_what_h5py_returns(files):
    folder = Path(tempfile.mkdtemp())
    try:
        paths = [folder / f"part{number}.h5" for number in range(len(files))]
        rows = []
        for recipe, path in zip(files, paths, strict=True):
            recipe.write(path)
            with h5py.File(path) as h5_file:
                dataset = h5_file["x"]
                rows += [np.asarray(dataset[index], dataset.dtype.newbyteorder("=")) for index in range(len(dataset))]
        expected = np.stack(rows)
        layouts = [read_layout(path, "x") for path in paths]
        for readers in (
            lambda: BlockReader(layouts, cache_bytes=0),
            lambda: BlockReader(layouts, cache_bytes=1 << 20),
            lambda: ResidentReader(layouts),
            lambda: open_reader(layouts, resident_bytes=0, cache_bytes=100),
        ):
            with closing(readers()) as reader:
                check_reader(reader, expected)
        is_raw = all(layout.engine is Engine.RAW for layout in layouts)
        event(f"all raw: {is_raw}")
        if all(layout.engine is not Engine.H5PY for layout in layouts):
            for sizes in ({"buffer_bytes": 0}, {"buffer_bytes": 100}, {"buffer_bytes": 0, "cache_bytes": 1 << 20}):
                with closing(ChunkReader(layouts, **sizes)) as reader:
                    check_reader(reader, expected)
        if is_raw:
            with closing(GatherReader(layouts)) as reader:
                check_reader(reader, expected)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """Write the dataset x to a new file and give its layout; arguments as for `create_dataset`."""

    def store(data: Any = None, *, file: dict[str, Any] | None = None, **options: Any) -> H5DatasetLayout:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        with h5py.File(path, "w", **(file or {})) as h5_file:
            h5_file.create_dataset("x", data=data, **options)
        return read_layout(path, "x")

    return store


def read(reader: FieldReader, layout: H5DatasetLayout, indices: Any) -> torch.Tensor:
    spec = spec_of(layout)
    out = torch.zeros((len(indices), *spec.row_shape), dtype=spec.dtype)
    reader.read_into(np.asarray(indices, dtype=np.int64), out)
    return out


def images(num_samples: int, *, scale: int = 1) -> np.ndarray:
    return (np.arange(num_samples * 100) * scale % 251).astype(np.uint8).reshape(num_samples, 100)


READERS = {
    "gather": lambda layouts: GatherReader(layouts),
    "block": lambda layouts: BlockReader(layouts, cache_bytes=0),
    "chunk": lambda layouts: ChunkReader(layouts, buffer_bytes=1 << 20),
    "raw": lambda layouts: RawReader(layouts, buffer_bytes=1 << 20),
    "resident": lambda layouts: ResidentReader(layouts),
}
each_reader = pytest.mark.parametrize("open_it", READERS.values(), ids=READERS.keys())


# Cases that the property above would meet only by luck ---------------------------------------------------


@each_reader
@pytest.mark.parametrize("num_files", [1, 2, 17])
def test_many_files_follow_each_other(store, open_it, num_files):
    parts = [images(number % 4 + 1, scale=number + 1) for number in range(num_files)]
    layouts = [store(part, chunks=(2 if len(part) > 1 else 1, 100)) for part in parts]
    with closing(open_it(layouts)) as reader:
        check_reader(reader, np.concatenate(parts))


@each_reader
def test_each_file_has_its_own_fill_value(store, open_it):
    layouts = [store(shape=(4, 100), dtype="u1", chunks=(2, 100), fillvalue=value) for value in (1, 7)]
    with closing(open_it(layouts)) as reader:
        assert read(reader, layouts[0], range(8))[:, 0].tolist() == [1] * 4 + [7] * 4


@each_reader
def test_files_without_samples_may_lie_between(store, open_it):
    full = store(images(3))
    none = [store(shape=(0, 100), dtype="u1", chunks=chunks, maxshape=(None, 100)) for chunks in ((2, 100), True)]
    with closing(open_it([none[0], full, none[1], full])) as reader:
        check_reader(reader, np.concatenate([images(3), images(3)]))


@each_reader
def test_samples_without_bytes_are_read_as_such(store, open_it):
    layout = store(shape=(5, 0, 3), dtype="f4")
    with closing(open_it([layout])) as reader:
        assert read(reader, layout, [4, 0]).shape == (2, 0, 3)


@each_reader
def test_the_last_bytes_of_a_file_are_read(store, open_it):
    layout = store(images(4), file={"libver": "latest"})
    assert int(layout.block_offsets[0]) + 400 == os.path.getsize(layout.path)
    with closing(open_it([layout])) as reader:
        assert as_bytes(read(reader, layout, [3])) == as_bytes(images(4)[3:])


@pytest.mark.parametrize("options", [{}, {"chunks": (3, 100)}, {"chunks": (3, 100), "compression": "gzip"}], ids=str)
def test_a_reader_may_be_used_from_several_threads(store, options):
    layout = store(images(60), **options)
    with closing(open_reader([layout], resident_bytes=0, cache_bytes=500)) as reader:
        results: list[bytes] = []
        orders = [np.random.default_rng(seed).permutation(60) for seed in range(8)]
        threads = [
            threading.Thread(target=lambda order=order: results.append(as_bytes(read(reader, layout, order))))
            for order in orders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert sorted(results) == sorted(as_bytes(images(60)[order]) for order in orders)


@pytest.mark.parametrize("raw_first", [True, False])
def test_raw_and_compressed_files_are_one_dataset(store, raw_first):
    layouts = [store(images(5)), store(images(4, scale=3), chunks=(2, 100), compression="gzip")]
    expected = [images(5), images(4, scale=3)]
    if not raw_first:
        layouts.reverse()
        expected.reverse()
    with closing(open_reader(layouts, resident_bytes=0, cache_bytes=0)) as reader:
        assert isinstance(reader, ChunkReader)
        check_reader(reader, np.concatenate(expected))


def test_numbers_with_a_dictionary_are_read_as_numbers(store):
    layout = store(np.arange(6) % 3, dtype=h5py.enum_dtype({"A": 0, "B": 1, "C": 2}, "i1"))
    with closing(ResidentReader([layout])) as reader:
        check_reader(reader, (np.arange(6) % 3).astype(np.int8))


# Which reader --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "resident_bytes", "kind"),
    [
        ({"data": images(10)}, 1 << 20, RawReader),
        ({"data": images(10), "chunks": (2, 100)}, 1 << 20, RawReader),
        ({"data": images(10), "chunks": (2, 50)}, 1 << 20, ChunkReader),
        ({"data": images(10), "chunks": (2, 100), "compression": "gzip"}, 1 << 20, ChunkReader),
        ({"data": images(10), "chunks": (2, 100), "scaleoffset": 8}, 1 << 20, BlockReader),
        ({"data": np.arange(10)}, 80, ResidentReader),
        ({"data": np.arange(10)}, 79, RawReader),
        ({"data": np.arange(10), "chunks": (2,), "compression": "gzip"}, 80, ResidentReader),
        ({"data": np.zeros((10, 64), np.uint8)}, 1 << 20, ResidentReader),
        ({"data": np.zeros((10, 65), np.uint8)}, 1 << 20, RawReader),
    ],
    ids=str,
)
def test_the_fastest_reader_that_is_exact(store, options, resident_bytes, kind):
    layout = store(**options)
    with closing(open_reader([layout], resident_bytes=resident_bytes, cache_bytes=0)) as reader:
        assert type(reader) is kind
    assert is_resident([layout], resident_bytes) == (kind is ResidentReader)


def test_the_limit_of_what_is_kept_holds_for_all_files_together(store):
    layouts = [store(np.arange(10)), store(np.arange(10))]
    assert is_resident(layouts, 160)
    assert not is_resident(layouts, 159)


# Chunks are decoded once ---------------------------------------------------------------------------------


def test_a_block_is_read_once_while_it_stays_in_the_cache(store):
    layout = store(images(40), chunks=(4, 100), compression="gzip")
    with closing(BlockReader([layout], cache_bytes=10 * 400)) as reader:
        for _ in range(3):
            read(reader, layout, np.random.default_rng(0).permutation(40))
        assert reader.num_block_reads == 10


def test_a_batch_reads_each_block_once_even_without_a_cache(store):
    layout = store(images(40), chunks=(4, 100), compression="gzip")
    with closing(BlockReader([layout], cache_bytes=0)) as reader:
        read(reader, layout, np.random.default_rng(0).permutation(40))
        assert reader.num_block_reads == 10


def test_a_window_shuffle_decodes_each_chunk_once(store):
    layout = store(images(400), chunks=(10, 100), compression="gzip")
    order = WindowShuffle(80).permutation(400, 0, 0)
    # While one chunk is in play, samples come from fewer than two windows around it: 2 * 80 / 10 + 1 chunks.
    with closing(BlockReader([layout], cache_bytes=17 * 1000)) as reader:
        for begin in range(0, 400, 8):
            read(reader, layout, order[begin : begin + 8])
        assert reader.num_block_reads == 40


def test_the_cache_keeps_no_more_than_its_limit(store):
    layout = store(images(400), chunks=(10, 100), compression="gzip")
    with closing(BlockReader([layout], cache_bytes=2500)) as reader:
        for begin in range(0, 400, 7):
            read(reader, layout, [begin])
            assert sum(block.numel() for block in reader._cache.values()) <= 2500


def test_a_batch_that_is_held_is_not_the_cache(store):
    layout = store(images(8), chunks=(4, 100), compression="gzip")
    for open_it in (lambda: BlockReader([layout], cache_bytes=10**6), lambda: ResidentReader([layout])):
        with closing(open_it()) as reader:
            read(reader, layout, range(8)).fill_(0)
            assert as_bytes(read(reader, layout, range(8))) == as_bytes(images(8))


# Closed, changed, damaged --------------------------------------------------------------------------------


@pytest.mark.parametrize("open_it", [READERS["gather"], READERS["block"]], ids=["gather", "block"])
def test_a_closed_reader_says_so(store, open_it):
    layout = store(images(8))
    with closing(open_it([layout])) as reader:
        read(reader, layout, [1])
    with pytest.raises(FeedError) as error:
        read(reader, layout, [1])
    assert str(error.value) == "the reader is closed; open another one."


def test_a_file_that_changed_before_it_is_mapped_is_refused(store):
    layout = store(images(8))
    os.truncate(layout.path, 300)
    with pytest.raises(FeedError) as error:
        GatherReader([layout])
    assert str(error.value) == (
        f"{layout.path} changed between reading its layout and opening it, so its samples may lie elsewhere now. "
        f"Build the loader or DataModule again to use the new file."
    )


def damage(layout: H5DatasetLayout, chunk: int) -> None:
    """Change bytes of a chunk as a failing disk does: unnoticed by the file system."""
    before = os.stat(layout.path)
    content = bytearray(Path(layout.path).read_bytes())
    offset = int(layout.block_offsets[chunk])
    content[offset : offset + 20] = bytes(20)
    Path(layout.path).write_bytes(content)
    os.utime(layout.path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"fletcher32": True}], ids=str)
def test_a_damaged_chunk_is_named(store, options):
    layout = store(images(12), chunks=(4, 100), **options)
    damage(layout, 1)
    with closing(BlockReader([layout], cache_bytes=0)) as reader:
        assert as_bytes(read(reader, layout, [0, 9])) == as_bytes(images(12)[[0, 9]])
        with pytest.raises(FeedError) as error:
            read(reader, layout, [0, 5])
        text = str(error.value.__cause__)
        assert "filter" in text
        assert str(error.value) == (
            f"{layout.path}: dataset 'x', samples 4 to 7 cannot be read: {text}. The chunk is damaged or its filter "
            f"failed; copy or pack the file again."
        )


@pytest.mark.parametrize("open_it", [READERS["gather"], READERS["block"]], ids=["gather", "block"])
def test_a_file_that_is_replaced_by_rename_is_read_to_the_end(store, open_it):
    # What the messages recommend: the open file lives on under no name.
    layout, other = store(images(50)), store(images(1))
    with closing(open_it([layout])) as reader:
        read(reader, layout, [0])
        os.replace(other.path, layout.path)
        assert as_bytes(read(reader, layout, [49, 7])) == as_bytes(images(50)[[49, 7]])


@pytest.mark.parametrize("open_it", [READERS["gather"], READERS["block"]], ids=["gather", "block"])
def test_a_file_that_is_deleted_is_read_to_the_end(store, open_it):
    layout = store(images(50))
    with closing(open_it([layout])) as reader:
        read(reader, layout, [0])
        os.remove(layout.path)
        assert as_bytes(read(reader, layout, [49, 7])) == as_bytes(images(50)[[49, 7]])


TRUNCATION_SETUP = """
import os, sys, threading
import h5py, numpy as np, torch
from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.layout import read_layout
from lightning_gpufeed.hdf5.readers.reader import open_reader
os.chdir({folder!r})

def write(name, **options):
    with h5py.File(name, "w") as h5_file:
        h5_file.create_dataset("x", data=np.ones((64, 1 << 13), options.pop("dtype", "i2")), **options)

def open_it(*names):
    return open_reader([read_layout(name, "x") for name in names], resident_bytes=0, cache_bytes=0)

def read(reader, indices):
    out = torch.empty((len(indices), 1 << 13), dtype=torch.int16)
    reader.read_into(np.array(indices), out)
    print("ones" if (out == 1).all() else "made up")
"""

TRUNCATION_CASES = {
    "raw": 'write("a.h5"); reader = open_it("a.h5"); read(reader, [0]); os.truncate("a.h5", 5000); read(reader, [60])',
    "raw, cut before the first read": (
        'write("a.h5"); reader = open_it("a.h5"); os.truncate("a.h5", 5000); read(reader, [60])'
    ),
    # The first batch is of one file, the second of the other: it has to be looked at itself.
    "raw, another file": (
        'write("a.h5"); write("b.h5"); reader = open_it("a.h5", "b.h5"); read(reader, [0])\n'
        'os.truncate("a.h5", 5000); read(reader, [70]); read(reader, [40])'
    ),
    "big-endian": (
        'write("a.h5", dtype=">i2"); reader = open_it("a.h5"); read(reader, [0])\n'
        'os.truncate("a.h5", 5000); read(reader, [60])'
    ),
    "split samples": (
        'write("a.h5", chunks=(4, 1 << 12)); reader = open_it("a.h5"); read(reader, [0])\n'
        'os.truncate("a.h5", 1 << 17); read(reader, [60])'
    ),
    "gzip": (
        'write("a.h5", chunks=(4, 1 << 13), compression="gzip"); reader = open_it("a.h5"); read(reader, [0])\n'
        'os.truncate("a.h5", 2000); read(reader, [60])'
    ),
    "source of a virtual dataset": """
write("a.h5", dtype=">i2")
layout = h5py.VirtualLayout((64, 1 << 13), "i2")
layout[:] = h5py.VirtualSource("a.h5", "x", (64, 1 << 13))
with h5py.File("v.h5", "w") as h5_file:
    h5_file.create_virtual_dataset("x", layout)
reader = open_it("v.h5"); read(reader, [0])
os.truncate("a.h5", 5000); read(reader, [60])
""",
    "external raw file": """
np.ones((64, 1 << 13), "i2").tofile("raw.bin")
with h5py.File("a.h5", "w") as h5_file:
    h5_file.create_dataset("x", (64, 1 << 13), "i2", external=[("raw.bin", 0, h5py.h5f.UNLIMITED)])
reader = open_it("a.h5"); read(reader, [0])
os.truncate("raw.bin", 5000); read(reader, [63])
""",
}

MANY_FILES = """
import resource, shutil
write("many.h5")
names = [f"many{number}.h5" for number in range(300)]
for name in names:
    os.link("many.h5", name)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
reader = open_it(*names[:200])
read(reader, [0, 100 * 64, 200 * 64 - 1])
reader.close()
read(open_it(*names), [0])
"""

CLOSED_WHILE_READING = """
write("a.h5"); reader = open_it("a.h5")
order = np.random.default_rng(0).permutation(64)
out = torch.empty((64, 1 << 13), dtype=torch.int16)
for turn in range(80):
    started = threading.Event()
    def work():
        started.set()
        try:
            for _ in range(5):
                reader.read_into(order, out)
        except FeedError:
            pass
    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    reader.close()
    thread.join()
    reader = open_it("a.h5")
print("alive")
"""


@pytest.fixture(scope="module")
def truncated(tmp_path_factory):
    """Each case in a process of its own, which may be killed by the signal that a lost page raises."""
    folder = tmp_path_factory.mktemp("truncated")
    cases = TRUNCATION_CASES | {"closed while reading": CLOSED_WHILE_READING, "many files": MANY_FILES}
    return run_forked(TRUNCATION_SETUP.format(folder=str(folder)), cases)


@pytest.mark.parametrize("case", TRUNCATION_CASES)
def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_neither_a_crash_nor_zeros(truncated, case):
    ended = truncated[case]
    assert ended.code == 1, ended  # neither killed by a signal, nor fine
    assert "made up" not in ended.text
    assert ended.last_line.startswith("lightning_gpufeed.errors.FeedError: "), ended.text


@pytest.mark.parametrize(
    ("case", "name"), [("raw", "a.h5"), ("big-endian", "a.h5"), ("external raw file", "raw.bin")], ids=str
)
def test_the_error_names_the_file_that_was_cut(truncated, case, name):
    line = truncated[case].last_line
    assert f"/{name} " in line
    assert "5000" in line
    assert "Write new data to another file and rename it; never change a file in place during training." in line


def test_closing_a_reader_while_another_thread_reads_does_not_kill_the_process(truncated):
    assert (truncated["closed while reading"].code, truncated["closed while reading"].last_line) == (0, "alive")


def test_a_mapped_file_takes_one_descriptor_and_too_many_of_them_are_an_error_with_a_cure(truncated):
    ended = truncated["many files"]
    assert ended.text.splitlines()[0] == "ones"  # 200 files where 256 may be open
    assert ended.last_line.startswith("lightning_gpufeed.errors.FeedError: "), ended.text
    assert "ulimit -n" in ended.last_line


# Strings and variable length -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (["a", "", "longer"], None, ["a", "", "longer"]),
        (["é", "日本", "🙂"], None, ["é", "日本", "🙂"]),
        (["a", "b"], h5py.string_dtype("ascii"), ["a", "b"]),
        (np.array([b"ab", b"c"]), None, ["ab", "c"]),
        (["é".encode()] * 2, h5py.string_dtype("utf-8", 4), ["é", "é"]),
        (np.array(["é".encode()] * 2, "S4"), None, ["é", "é"]),  # says ASCII, holds UTF-8
        (np.array(["é".encode("latin-1")] * 2, "S4"), None, ["é", "é"]),  # says ASCII, holds Latin-1
        ([["a", "b"], ["c", ""]], None, [["a", "b"], ["c", ""]]),
        (np.array([[b"a", b"b"], [b"c", b""]]), None, [["a", "b"], ["c", ""]]),
        (np.array([b"a\0b", b"c"]), None, ["a\0b", "c"]),
    ],
    ids=["text", "unicode", "ascii", "fixed", "fixed utf-8", "utf-8", "latin-1", "several", "several fixed", "zero"],
)
def test_strings_are_read_as_str(store, values, dtype, expected):
    options = {} if dtype is None else {"dtype": dtype}
    assert read_objects([store(values, **options)]) == expected


def test_strings_that_were_never_written_are_empty(store):
    assert read_objects([store(shape=(3,), dtype=h5py.string_dtype())]) == ["", "", ""]


@pytest.mark.parametrize("dtype", ["u1", "i8", "f4", "f8", "?"])
def test_variable_length_numbers_are_read_as_tensors(tmp_path, dtype):
    lengths = [3, 0, 1, 7]
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        dataset = h5_file.create_dataset("x", (5,), h5py.vlen_dtype(np.dtype(dtype)))
        for index, length in enumerate(lengths):
            dataset[index] = np.arange(length).astype(dtype)
        expected = [as_bytes(dataset[index]) for index in range(5)]
    found = read_objects([read_layout(tmp_path / "data.h5", "x")])
    assert [as_bytes(tensor) for tensor in found] == expected
    assert {tensor.dtype for tensor in found} == {torch.from_numpy(np.empty(0, dtype)).dtype}
    assert [len(tensor) for tensor in found] == [*lengths, 0]  # the last one was never written


def test_variable_length_numbers_in_several_axes_are_nested_lists(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        dataset = h5_file.create_dataset("x", (2, 2), h5py.vlen_dtype(np.dtype("i4")))
        dataset[0, 1] = [1, 2]
        dataset[1, 0] = [3]
    found = read_objects([read_layout(tmp_path / "data.h5", "x")])
    assert [[tensor.tolist() for tensor in sample] for sample in found] == [[[], [1, 2]], [[3], []]]


def test_strings_of_several_files_follow_each_other(store):
    assert read_objects([store(["a", "b"]), store(np.array([b"c"]))]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [
        ("?", torch.bool),
        ("u1", torch.uint8),
        (">u2", torch.uint16),
        ("u4", torch.uint32),
        (">u8", torch.uint64),
        (">i4", torch.int32),
        ("f2", torch.float16),
        (">c16", torch.complex128),
    ],
)
def test_tensors_have_the_type_of_the_file(store, dtype, torch_dtype):
    spec = spec_of(store(np.zeros((2, 3)).astype(dtype)))
    assert (spec.row_shape, spec.dtype) == ((3,), torch_dtype)
