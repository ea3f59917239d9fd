"""The cache on disk: what it gives is what was put there, or nothing; and it stays within its limit."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lightning_gpufeed.hdf5.remote.disk_cache import DiskCache, default_cache_dir

TRAILER_BYTES = 16


def files_in(folder: Path) -> list[Path]:
    """The pieces, the one unused longest first."""
    return sorted(folder.glob("??/*"), key=lambda path: path.stat().st_mtime_ns)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


def age(path: Path, seconds: float) -> None:
    """As if it had been used that long ago."""
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def test_a_piece_comes_back_as_it_was_put_also_to_another_process_of_the_same_folder(tmp_path):
    DiskCache(str(tmp_path), 1000).put("a piece", b"some bytes")
    cache = DiskCache(str(tmp_path), 1000)
    found = cache.get("a piece", 10)
    assert found is not None
    assert bytes(found) == b"some bytes"
    assert cache.get("another piece", 10) is None
    assert (cache.num_hits, cache.num_misses) == (1, 1)


@pytest.mark.parametrize("size", [0, 1, 9, 11, 1000])
def test_a_piece_of_another_length_is_none(tmp_path, size):
    cache = DiskCache(str(tmp_path), 1000)
    cache.put("a piece", b"some bytes")
    assert cache.get("a piece", size) is None


@pytest.mark.parametrize("cut", range(10 + TRAILER_BYTES))
def test_a_piece_that_was_cut_short_is_taken_for_missing_and_removed(tmp_path, cut):
    cache = DiskCache(str(tmp_path), 1000)
    cache.put("a piece", b"some bytes")
    [path] = files_in(tmp_path)
    os.truncate(path, cut)
    assert cache.get("a piece", 10) is None
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("place", range(10 + TRAILER_BYTES))
def test_a_piece_with_one_bit_turned_is_taken_for_missing(tmp_path, place):
    cache = DiskCache(str(tmp_path), 1000)
    cache.put("a piece", b"some bytes")
    [path] = files_in(tmp_path)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert cache.get("a piece", 10) is None


def test_bytes_behind_a_piece_make_it_missing(tmp_path):
    cache = DiskCache(str(tmp_path), 1000)
    cache.put("a piece", b"some bytes")
    [path] = files_in(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    assert cache.get("a piece", 10) is None


def test_a_file_that_vanishes_is_a_piece_that_is_missing(tmp_path):
    cache = DiskCache(str(tmp_path), 1000)
    cache.put("a piece", b"some bytes")
    [path] = files_in(tmp_path)
    path.unlink()
    assert cache.get("a piece", 10) is None


def test_the_pieces_unused_longest_go_first(tmp_path):
    cache = DiskCache(str(tmp_path), 10 * 116)
    for number in range(10):
        cache.put(f"piece {number}", bytes(100))
    for path in files_in(tmp_path):
        age(path, 1000)
    assert cache.get("piece 0", 100) is not None
    cache.put("piece 10", bytes(100))
    assert bytes_in(tmp_path) <= 0.9 * 10 * 116
    assert cache.get("piece 0", 100) is not None
    assert cache.get("piece 10", 100) is not None


def test_several_that_share_a_folder_stay_within_the_limit_and_never_see_half_a_piece(tmp_path):
    caches = [DiskCache(str(tmp_path), 40_000) for _ in range(4)]
    wrong = []

    def use(number: int, cache: DiskCache) -> None:
        for turn in range(60):
            name = (turn * 7 + number) % 23
            expected = bytes([name]) * (500 + name)
            found = cache.get(str(name), len(expected))
            if found is None:
                cache.put(str(name), expected)
            elif bytes(found) != expected:
                wrong.append(name)
            cache.put(f"{number} {turn}", bytes(700))

    threads = [threading.Thread(target=use, args=item) for item in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    # Each counts what the others wrote again after a sixteenth of the limit: that much may be too much, for each.
    assert bytes_in(tmp_path) <= 40_000 * (1 + 4 / 16)
    assert sum(cache.num_hits for cache in caches) > 0


def test_a_piece_that_would_fill_half_of_the_cache_is_not_kept(tmp_path):
    cache = DiskCache(str(tmp_path), 200)
    cache.put("large", bytes(101))
    assert cache.get("large", 101) is None


def test_a_limit_of_zero_writes_nothing(tmp_path):
    cache = DiskCache(str(tmp_path / "cache"), 0)
    cache.put("a piece", b"")
    assert cache.get("a piece", 0) is None
    assert not (tmp_path / "cache").exists()


def test_what_a_killed_process_left_aside_is_removed_in_time(tmp_path):
    for name in ("old", "new"):
        (tmp_path / f".aside-{name}").write_bytes(b"half a pie")
    age(tmp_path / ".aside-old", 7200)
    DiskCache(str(tmp_path), 1000).put("a piece", b"some bytes")
    assert not (tmp_path / ".aside-old").exists()
    assert (tmp_path / ".aside-new").exists()


def test_a_folder_that_cannot_be_written_to_is_said_once_and_stops_nobody(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    cache = DiskCache(str(tmp_path / "file" / "cache"), 1000)
    with pytest.warns(UserWarning, match="the cache of remote chunks in .* is not used any more: .*another cache_dir"):
        cache.put("a piece", b"some bytes")
    cache.put("a piece", b"some bytes")
    assert cache.get("a piece", 10) is None


def test_the_folder_is_below_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == str(tmp_path / "lightning_gpufeed" / "chunks")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache_dir() == str(tmp_path / "home" / ".cache" / "lightning_gpufeed" / "chunks")
