"""Reads by many requests at once give exactly what `h5_dataset[i]` returns, whether announced or not."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5 import residency
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, read_layout
from lightning_gpufeed.hdf5.readers import kernel_reader
from lightning_gpufeed.hdf5.readers.kernel_reader import KernelReader, merge_neighbours
from lightning_gpufeed.hdf5.readers.reader import spec_of
from tests.contracts import as_bytes, check_reader
from tests.doubles import WAIT_SECONDS
from tests.hdf5.readers.test_reader import DTYPES, Recipe

PAGE = 4096


@st.composite
def raw_files(draw: st.DrawFn) -> list[Recipe]:
    """One to three files of the same kind of samples, uncompressed, whole inside their chunks or in one block."""
    dtype = draw(st.sampled_from(DTYPES))
    sample_shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    files = []
    for _ in range(draw(st.integers(1, 3))):
        num_samples = draw(st.integers(1, 12))
        create: dict[str, Any] = {}
        if draw(st.booleans()):
            create["fillvalue"] = np.array(draw(st.integers(0, 1 if dtype.kind == "b" else 100)), dtype)
        if draw(st.booleans()):
            create["chunks"] = (draw(st.integers(1, num_samples + 3)), *sample_shape)
            create["maxshape"] = (None, *sample_shape)
        edges = sorted(draw(st.lists(st.integers(0, num_samples), max_size=4)))
        parts = tuple(slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if a < b)
        files.append(
            Recipe(
                num_samples,
                sample_shape,
                dtype,
                create,
                {
                    "libver": draw(st.sampled_from(["earliest", "latest"])),
                    "userblock_size": 512 * draw(st.integers(0, 1)),
                },
                is_compact=False,
                is_early=draw(st.booleans()),
                written=draw(st.sampled_from([(slice(None),), parts, ()])),
                seed=draw(st.integers(0, 2**32 - 1)),
            )
        )
    return files


@settings(max_examples=50)
@given(raw_files())
def test_what_h5py_returns(files):
    folder = Path(tempfile.mkdtemp())
    try:
        paths = [folder / f"part{number}.h5" for number in range(len(files))]
        rows = []
        for recipe, path in zip(files, paths, strict=True):
            recipe.write(path)
            with h5py.File(path) as h5_file:
                rows += [h5_file["x"][...]]
        layouts = [read_layout(path, "x") for path in paths]
        assert {layout.engine for layout in layouts} == {Engine.RAW}
        reader = KernelReader(layouts)
        check_reader(reader, np.concatenate(rows))
        reader.close()
        reader.close()  # is allowed
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """Write the dataset x to a new file and give its layout; arguments as for `create_dataset`."""

    def store(data: Any = None, **options: Any) -> H5DatasetLayout:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        with h5py.File(path, "w", libver="latest") as h5_file:
            h5_file.create_dataset("x", data=data, **options)
        return read_layout(path, "x")

    return store


@pytest.fixture
def opened():
    """Open readers that are closed at the end."""
    readers: list[KernelReader] = []

    def opened(*layouts: H5DatasetLayout, backend: str = "auto") -> KernelReader:
        readers.append(KernelReader(layouts, backend))
        return readers[-1]

    yield opened
    for reader in readers:
        reader.close()


def read(reader: KernelReader, layout: H5DatasetLayout, indices: Any) -> torch.Tensor:
    spec = spec_of(layout)
    out = torch.zeros((len(indices), *spec.row_shape), dtype=spec.dtype)
    reader.read_into(np.asarray(indices, dtype=np.int64), out)
    return out


def images(num_samples: int, *, scale: int = 1, size: int = 100) -> np.ndarray:
    return (np.arange(num_samples * size) * scale % 251).astype(np.uint8).reshape(num_samples, size)


@pytest.mark.parametrize("backend", ["auto", "preadv"])
@pytest.mark.parametrize("num_files", [1, 2, 17])
def test_many_files_follow_each_other(store, opened, backend, num_files):
    parts = [images(number % 4 + 1, scale=number + 1) for number in range(num_files)]
    layouts = [store(part, chunks=(2 if len(part) > 1 else 1, 100)) for part in parts]
    check_reader(opened(*layouts, backend=backend), np.concatenate(parts))


def test_more_samples_than_the_queue_holds(store, opened):
    layout = store(images(1000), chunks=(7, 100))
    check_reader(opened(layout), images(1000))


def test_each_file_has_its_own_fill_value(store, opened):
    layouts = [store(shape=(4, 100), dtype="u1", chunks=(2, 100), fillvalue=value) for value in (1, 7)]
    layouts.insert(1, store(images(2), chunks=(1, 100)))
    found = read(opened(*layouts), layouts[0], [0, 9, 5, 3, 7, 4])
    assert found[:, 1].tolist() == [1, 7, 101, 1, 7, 1]


def test_files_and_samples_without_bytes_are_read_as_such(store, opened):
    full = store(images(3))
    empty = store(shape=(0, 100), dtype="u1", chunks=(2, 100), maxshape=(None, 100))
    check_reader(opened(empty, full, empty, full), np.concatenate([images(3), images(3)]))
    nothing = store(shape=(5, 0, 3), dtype="f4")
    reader = opened(nothing)
    reader.expect(np.arange(5), 2)
    assert read(reader, nothing, [4, 0]).shape == (2, 0, 3)


def test_the_last_bytes_of_a_file_are_read(store, opened):
    layout = store(images(4))
    assert int(layout.block_offsets[0]) + 400 == os.path.getsize(layout.path)
    assert as_bytes(read(opened(layout), layout, [3])) == as_bytes(images(4)[3:])


def test_a_reader_may_be_used_from_several_threads(store, opened):
    layout = store(images(60))
    reader = opened(layout)
    reader.expect(np.arange(60), 60)
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


# Neighbours are read together ----------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12)), max_size=30))
def test_merged_reads_put_every_sample_where_the_single_ones_would(wanted):
    table = np.array(wanted, dtype=np.int64).reshape(-1, 2)
    order = np.lexsort((table[:, 1], table[:, 0]))
    files, positions = table[order, 0], table[order, 1] * 5 + 100
    starts, num_rows = merge_neighbours(files, positions, order, 5)
    put = {}
    for start, count in zip(starts.tolist(), num_rows.tolist(), strict=True):
        for row in range(count):
            assert order[start] + row not in put
            put[int(order[start] + row)] = (int(files[start]), int(positions[start] + 5 * row))
    assert put == {slot: (file, 100 + 5 * sample) for slot, (file, sample) in enumerate(wanted)}


def test_samples_in_order_are_one_read_per_block():
    positions = np.concatenate([np.arange(4) * 10, 1000 + np.arange(4) * 10])
    starts, num_rows = merge_neighbours(np.zeros(8, np.int64), positions, np.arange(8), 10)
    assert (starts.tolist(), num_rows.tolist()) == ([0, 4], [4, 4])


# Closed, changed, cut ------------------------------------------------------------------------------------


def test_a_closed_reader_says_so(store, opened):
    layout = store(images(8))
    reader = opened(layout)
    reader.close()
    with pytest.raises(FeedError) as error:
        read(reader, layout, [1])
    assert str(error.value) == "the reader is closed; open another one."
    reader.expect(np.arange(8))  # starts nothing


def test_a_file_that_changed_before_it_is_opened_is_refused(store):
    layout = store(images(8))
    os.truncate(layout.path, 300)
    with pytest.raises(FeedError) as error:
        KernelReader([layout])
    assert str(error.value) == (
        f"{layout.path} changed between reading its layout and opening it, so its samples may lie elsewhere now. "
        f"Build the loader or DataModule again to use the new file."
    )


@pytest.mark.parametrize("row", [0, 49], ids=["before the cut", "behind it"])
def test_a_file_that_was_cut_is_refused_even_where_it_is_whole(store, opened, row):
    whole, layout = store(images(50)), store(images(50))
    reader = opened(whole, layout)
    size = os.path.getsize(layout.path)
    os.truncate(layout.path, 3000)
    assert as_bytes(read(reader, layout, [7])) == as_bytes(images(50)[7:8])
    with pytest.raises(FeedError) as error:
        read(reader, layout, [7, 50 + row])
    assert str(error.value) == (
        f"{layout.path} became shorter while it was read: {size} bytes at the start, 3000 now. "
        f"Write new data to another file and rename it; never change a file in place during training."
    )


def read_for_ever(reader: KernelReader, order: np.ndarray, ones: torch.Tensor) -> None:
    while True:
        reader.read_into(order, ones)
        assert (ones == 1).all()


def test_a_batch_of_a_file_cut_meanwhile_is_whole_or_refused(tmp_path, opened):
    path = tmp_path / "cut.h5"
    out = torch.empty((64, 5000), dtype=torch.uint8)
    for turn in range(10):
        with h5py.File(path, "w") as h5_file:
            h5_file.create_dataset("x", data=np.ones((64, 5000), "u1"))
        reader = opened(read_layout(path, "x"))
        order = np.random.default_rng(turn).permutation(64)
        cutter = threading.Thread(target=os.truncate, args=(path, 100_001))
        reader.read_into(order, out)
        cutter.start()
        with pytest.raises(FeedError, match="100001 now"):
            read_for_ever(reader, order, out)
        cutter.join(WAIT_SECONDS)


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_file_that_is_replaced_or_deleted_is_read_to_the_end(store, opened, how):
    layout, other = store(images(50)), store(images(1))
    reader = opened(layout)
    if how == "replaced":
        os.replace(other.path, layout.path)
    else:
        os.remove(layout.path)
    assert as_bytes(read(reader, layout, [49, 7])) == as_bytes(images(50)[[49, 7]])


def test_closing_while_another_thread_reads_is_an_error_there_or_nothing(store, opened):
    layout = store(images(64, size=1 << 12))
    order = np.random.default_rng(0).permutation(64)
    for _ in range(20):
        reader, wrong, started = opened(layout), [], threading.Event()

        def work(reader: KernelReader = reader, wrong: list[Any] = wrong, started: Any = started) -> None:
            try:
                for _ in range(1000):
                    found = read(reader, layout, order)
                    started.set()
                    if as_bytes(found) != as_bytes(images(64, size=1 << 12)[order]):
                        wrong.append("bytes")
            except FeedError as error:
                wrong += [] if "closed" in str(error) else [error]

        thread = threading.Thread(target=work)
        thread.start()
        assert started.wait(WAIT_SECONDS)
        reader.close()
        thread.join(WAIT_SECONDS)
        assert not wrong


# Announced samples ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "preadv"])
def test_what_is_read_does_not_depend_on_what_was_announced(store, opened, backend, monkeypatch):
    monkeypatch.setattr(kernel_reader, "_AHEAD_BYTES", 3000)
    monkeypatch.setattr(kernel_reader, "_STEP_BYTES", 500)
    parts = [images(30), images(40, scale=3)]
    layouts = [store(parts[0], chunks=(4, 100)), store(parts[1]), store(shape=(5, 100), dtype="u1", chunks=(2, 100))]
    everything = np.concatenate([*parts, np.zeros((5, 100), np.uint8)])
    reader = opened(*layouts, backend=backend)
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(75)
        reader.expect(order, 8)
        for start in range(0, 75, 8):
            assert as_bytes(read(reader, layouts[0], order[start : start + 8])) == as_bytes(
                everything[order[start : start + 8]]
            )
            if epoch == 1:  # somebody else's wishes between
                check_reader(reader, everything)
            if epoch == 2 and start > 30:
                break
    reader.expect(np.arange(70, 75), 2)  # nothing of it was ever written
    check_reader(reader, everything)


def test_a_forked_process_reads_without_the_thread(store, opened, monkeypatch):
    monkeypatch.setattr(kernel_reader, "_AHEAD_BYTES", 3000)
    layout = store(images(200))
    reader = opened(layout)
    reader.expect(np.arange(200), 10)
    assert reader._ahead is not None
    with reader._ahead._changed:  # as if the thread held its lock at this moment
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = int(as_bytes(read(reader, layout, [150, 3])) != as_bytes(images(200)[[150, 3]]))
                reader.close()
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gpufeed-read-ahead"]


def test_the_thread_ends_with_the_reader(store, opened, monkeypatch):
    monkeypatch.setattr(kernel_reader, "_AHEAD_BYTES", 3000)  # so that it waits for samples to be read
    layout = store(images(2000))
    reader = opened(layout)
    reader.expect(np.arange(2000), 10)
    reader.expect(np.arange(2000), 10)
    assert len(ahead_threads()) == 1
    reader.close()
    assert not ahead_threads()
    forgotten = KernelReader([layout])
    forgotten.expect(np.arange(2000), 10)
    [thread] = ahead_threads()
    del forgotten
    gc.collect()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_announced_samples_are_brought_into_memory_up_to_a_limit(store, opened, monkeypatch):
    monkeypatch.setattr(kernel_reader, "_AHEAD_BYTES", 40 * PAGE)
    monkeypatch.setattr(kernel_reader, "_STEP_BYTES", 10 * PAGE)
    layout = store(images(200, size=PAGE))
    descriptor = os.open(layout.path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        # Far apart, so that the kernel's own reading ahead does not bring them.
        order = np.random.default_rng(0).permutation(200)
        pages = (int(layout.block_offsets[0]) + order * PAGE) // PAGE * PAGE

        def is_cached() -> Any:
            return residency._ask_by_mincore(descriptor, layout.path, pages)

        if is_cached() is None or is_cached().any():
            pytest.skip("this file system keeps its pages, or does not tell")
        reader = opened(layout)
        reader.expect(order, 8)
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_cached()[:40].all() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_cached()[:40].all()
        assert not is_cached().all()
        read(reader, layout, order[:8])
        read(reader, layout, order[8:16])
        while not is_cached()[:50].all() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_cached()[:50].all()
    finally:
        os.close(descriptor)
