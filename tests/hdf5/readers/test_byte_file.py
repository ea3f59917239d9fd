"""A local file as bytes at positions: filled to the last byte, or refused with what happened to the file."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.access import FileStamp
from lightning_gpufeed.hdf5.readers.byte_file import LocalFile, refuse_changed
from tests.contracts import exactly

CONTENT = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.h5"
    path.write_bytes(CONTENT)
    return path


def read(file: LocalFile, offset: int, num_bytes: int) -> bytes:
    out = bytearray(num_bytes)
    file.read_into(offset, memoryview(out))
    return bytes(out)


def test_bytes_come_from_any_position_up_to_the_last(path):
    with closing(LocalFile(FileStamp.of(path))) as file:
        for offset, num_bytes in [(0, 5000), (17, 300), (4999, 1), (5000, 0)]:
            assert read(file, offset, num_bytes) == CONTENT[offset : offset + num_bytes]


def test_a_system_that_gives_fewer_bytes_than_asked_for_is_asked_again(path, monkeypatch):
    preadv = os.preadv
    asked: list[tuple[int, int]] = []

    def few(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append((offset, len(buffers[0])))
        return preadv(descriptor, [buffers[0][:7]], offset)

    with closing(LocalFile(FileStamp.of(path))) as file:
        monkeypatch.setattr(os, "preadv", few)
        assert read(file, 100, 20) == CONTENT[100:120]
    assert asked == [(100, 20), (107, 13), (114, 6)]


@pytest.mark.parametrize("most_bytes", [5000, 700, 1])
def test_several_buffers_are_filled_in_turn_however_much_the_system_gives(path, monkeypatch, most_bytes):
    preadv = os.preadv

    def few(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        some, left = [], most_bytes
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
        return preadv(descriptor, [part for part in some if len(part)], offset)

    sizes = [1] * 1500 + [1000, 7, 0, 300]  # more than the kernel takes at a time
    outs = [bytearray(size) for size in sizes]
    with closing(LocalFile(FileStamp.of(path))) as file:
        monkeypatch.setattr(os, "preadv", few)
        file.read_parts(11, [memoryview(out) for out in outs])
    assert b"".join(outs) == CONTENT[11 : 11 + sum(sizes)]


def test_a_file_that_ends_before_several_buffers_are_full_is_an_error(path):
    outs = [bytearray(600), bytearray(600)]
    with closing(LocalFile(FileStamp.of(path))) as file:
        os.truncate(path, 1000)
        with pytest.raises(FeedError, match=r"became shorter while it was read: 1[0-9]+ bytes at the start, 1000 now"):
            file.read_parts(0, [memoryview(out) for out in outs])


def test_what_will_be_read_may_be_anywhere(path):
    with closing(LocalFile(FileStamp.of(path))) as file:
        for offset, num_bytes in [(0, 5000), (4000, 1 << 40), (1 << 50, 1)]:
            file.will_read(offset, num_bytes)
        assert read(file, 0, 5000) == CONTENT


def test_a_file_that_ends_too_early_is_an_error_with_both_sizes(path):
    with closing(LocalFile(FileStamp.of(path))) as file:
        os.truncate(path, 1000)
        assert read(file, 0, 1000) == CONTENT[:1000]
        message = (
            f"{path} became shorter while it was read: 1100 bytes at the start, 1000 now. Write new data to another "
            f"file and rename it; never change a file in place during training."
        )
        with pytest.raises(FeedError, match=exactly(message)):
            read(file, 900, 200)


def test_a_disk_that_fails_is_an_error_that_names_the_file(path, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with closing(LocalFile(FileStamp.of(path))) as file:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(FeedError, match=r"data\.h5 cannot be read: .*Input/output error\. Look after the disk"):
            read(file, 0, 10)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE], ids=["process", "machine"])
def test_the_limit_of_open_files_is_named_with_the_way_out(path, monkeypatch, number):
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    stamp = FileStamp.of(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        with pytest.raises(FeedError, match=r"data\.h5 cannot be opened: the limit of open files .*ulimit -n"):
            LocalFile(stamp)


def test_a_file_that_is_gone_stays_a_missing_file(path):
    stamp = FileStamp.of(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        LocalFile(stamp)


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def swap(path: Path) -> None:
    status = path.stat()
    path.with_name("other").write_bytes(CONTENT)
    path.with_name("other").rename(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def grow(path: Path) -> None:
    status = path.stat()
    os.truncate(path, 5001)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, swap, grow])
def test_a_file_that_differs_in_time_or_number_or_size_is_refused(path, change):
    stamp = FileStamp.of(path)
    refuse_changed(stamp, os.stat(path))
    change(path)
    # The leak check around every test sees to it that the file is closed again.
    with pytest.raises(FeedError, match="changed between reading its layout and opening it"):
        LocalFile(stamp)


def test_closing_gives_the_descriptor_back_and_may_be_repeated(path):
    before = set(os.listdir("/proc/self/fd"))
    file = LocalFile(FileStamp.of(path))
    file.close()
    assert set(os.listdir("/proc/self/fd")) == before
    file.close()


def test_threads_read_at_positions_of_their_own(path):
    wrong: list[int] = []

    def read_all(seed: int) -> None:
        for offset in np.random.default_rng(seed).integers(0, 4900, 200).tolist():
            if read(file, offset, 100) != CONTENT[offset : offset + 100]:
                wrong.append(offset)

    with closing(LocalFile(FileStamp.of(path))) as file:
        threads = [threading.Thread(target=read_all, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
