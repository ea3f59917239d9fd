from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_gpufeed.hdf5 import residency
from lightning_gpufeed.hdf5.layout import read_layout
from lightning_gpufeed.hdf5.residency import are_cached, cached_share

PAGE = 4096
NUM_PAGES = 512


def evict(path: Path) -> None:
    """Drop a file's pages from memory; a page that a processor still has in its own list stays at the first try."""
    everything = np.arange(0, path.stat().st_size, PAGE)
    for _ in range(50):
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        answer = ask(path, residency._ask_by_mincore, everything)
        if answer is not None and not answer.any():
            return
        time.sleep(0.01)
    pytest.skip("this file system keeps its pages, or does not tell")


def settled(look: Callable[[], Any], expected: Any) -> Any:
    """What a look at evicted pages gives; looked again if need be, for the kernel may bring any page back meanwhile.

    A look that is wrong never gives what is expected.
    """
    for _ in range(20):
        if (found := look()) == expected:
            break
    return found


def ask(path: Path, how, offsets):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return how(descriptor, offsets) if how is residency._ask_by_reading else how(descriptor, path, offsets)
    finally:
        os.close(descriptor)


@pytest.fixture
def pages(tmp_path):
    """A file of 2 MiB on a file system whose pages can be evicted and asked for."""
    path = tmp_path / "pages.bin"
    path.write_bytes(os.urandom(NUM_PAGES * PAGE))
    evict(path)
    return path


def write_images(path: Path, **storage) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (256, 3, 64, 64), dtype=np.uint8)
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", data=images, **storage)
    return path


@pytest.mark.parametrize("how", [residency._ask_by_reading, residency._ask_by_mincore])
def test_exactly_the_pages_that_were_read_count_as_cached(pages, how):
    def look() -> list[bool]:
        evict(pages)
        descriptor = os.open(pages, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        for page in (3, 77, 500):
            os.pread(descriptor, 1, page * PAGE + 5)
        os.close(descriptor)
        answer = ask(pages, how, np.array([3, 77, 500, 10, 200, 400]) * PAGE + 4000)
        if answer is None:
            pytest.skip("this file system does not know how to answer")
        return answer.tolist()

    expected = [True, True, True, False, False, False]
    assert settled(look, expected) == expected


def test_asking_brings_no_other_page_into_memory(pages):
    offsets = np.arange(0, NUM_PAGES, 2) * PAGE  # every second page

    def num_between() -> int:
        evict(pages)
        are_cached(pages, offsets)
        return int(ask(pages, residency._ask_by_mincore, offsets + PAGE).sum())

    assert settled(num_between, 0) == 0


def test_the_second_way_answers_where_the_file_system_does_not_know_the_first(pages, monkeypatch):
    monkeypatch.setattr(residency, "_ask_by_reading", lambda *_: None)

    def look() -> list[bool]:
        evict(pages)
        return are_cached(pages, np.array([0, 5 * PAGE])).tolist()

    assert settled(look, [False, False]) == [False, False]
    pages.read_bytes()
    assert are_cached(pages, np.array([0, 5 * PAGE])).all()


def test_a_file_in_memory_by_nature_is_wholly_cached():
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no tmpfs")
    path = folder / f"gpufeed-residency-{os.getpid()}.bin"
    try:
        path.write_bytes(os.urandom(8 * PAGE))
        assert are_cached(path, np.arange(8) * PAGE).all()
    finally:
        path.unlink(missing_ok=True)


def test_mincore_is_not_believed_for_a_file_of_somebody_else(tmp_path, monkeypatch):
    path = tmp_path / "other.bin"
    path.write_bytes(bytes(PAGE))
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert ask(path, residency._ask_by_mincore, np.array([0])) is None


def test_an_empty_file_has_nothing_to_tell(tmp_path):
    path = tmp_path / "empty.bin"
    path.touch()
    assert ask(path, residency._ask_by_mincore, np.array([0])) is None


@pytest.mark.parametrize(
    "storage",
    [{}, {"chunks": (16, 3, 64, 64)}, {"chunks": (16, 3, 64, 64), "compression": "gzip"}],
    ids=["contiguous", "chunked", "compressed"],
)
def test_a_dataset_just_read_is_wholly_cached_and_one_evicted_not_at_all(tmp_path, pages, storage):
    path = write_images(tmp_path / "images.h5", **storage)
    layout = read_layout(path, "images")
    path.read_bytes()
    assert cached_share(layout) == 1.0

    def share_after_eviction() -> float | None:
        evict(path)
        return cached_share(layout)

    assert settled(share_after_eviction, 0.0) == 0.0


def test_no_page_is_asked_for_twice(tmp_path, pages, monkeypatch):
    path = write_images(tmp_path / "images.h5", chunks=(128, 3, 64, 64), compression="gzip")  # 2 chunks
    asked = []
    monkeypatch.setattr(
        residency, "are_cached", lambda _, offsets: asked.append(offsets) or np.ones(len(offsets), bool)
    )
    assert cached_share(read_layout(path, "images")) == 1.0
    assert [len(offsets) for offsets in asked] == [2]


def test_half_a_file_in_memory_is_seen_as_about_half(tmp_path, pages):
    path = write_images(tmp_path / "images.h5")
    layout = read_layout(path, "images")
    evict(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(descriptor, int(layout.block_offsets[0]) + layout.total_bytes // 2, 0)
    os.close(descriptor)
    # 96 places in all: a standard error of 0.05, and 0.25 is five of them. Asking fetches a page of the empty half's
    # 384 at every second place: up to 0.06 more.
    shares = [cached_share(layout, num_places=8) for _ in range(12)]
    assert 0.25 < float(np.mean(shares)) < 0.81


def test_asking_again_does_not_find_what_the_first_asking_fetched(tmp_path, pages):
    path = write_images(tmp_path / "images.h5")
    layout = read_layout(path, "images")
    evict(path)
    cached_share(layout, num_places=8)
    # 8 pages of 768 are in memory now: the same 8 places would all say yes.
    assert cached_share(layout, num_places=8) < 0.5


def test_a_virtual_dataset_is_looked_for_in_the_files_it_is_made_of(tmp_path, pages):
    source = write_images(tmp_path / "source.h5")
    layout = h5py.VirtualLayout((256, 3, 64, 64), np.uint8)
    layout[:] = h5py.VirtualSource(str(source), "images", (256, 3, 64, 64))
    with h5py.File(tmp_path / "virtual.h5", "w") as h5_file:
        h5_file.create_virtual_dataset("images", layout)
    virtual = read_layout(tmp_path / "virtual.h5", "images")
    source.read_bytes()
    (tmp_path / "virtual.h5").read_bytes()
    assert cached_share(virtual) == 1.0
    evict(source)
    assert cached_share(virtual) < 0.2  # the small file with the mapping alone is left


def test_a_dataset_that_was_never_written_has_no_share(tmp_path):
    with h5py.File(tmp_path / "hollow.h5", "w") as h5_file:
        h5_file.create_dataset("images", (64, 8, 8), np.uint8, chunks=(8, 8, 8))
    assert cached_share(read_layout(tmp_path / "hollow.h5", "images")) is None


def test_a_file_that_is_gone_is_an_error_and_not_uncached(tmp_path):
    with pytest.raises(FileNotFoundError):
        are_cached(tmp_path / "gone.bin", np.array([0]))
