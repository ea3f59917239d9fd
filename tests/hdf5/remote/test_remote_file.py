"""Files in stores: the bytes are those of the local file, whatever the store does; or an error says why."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import itertools
import os
import pickle
import shutil
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import h5py
import numpy as np
import pytest

from lightning_gpufeed.errors import FeedError, LayoutError
from lightning_gpufeed.hdf5.remote.remote_file import RemoteFile, is_remote, refuse_other_files
from tests.hdf5.remote_stores import LitteredStore, ThreadedStore, WebStore, serve
from tests.scripts import start_script

NAMES = itertools.count()
KEYS = ["chunked", "gzip", "contiguous", "small"]


@pytest.fixture(scope="module")
def content() -> bytes:
    """An HDF5 file of three quarters of a megabyte."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 3, 40, 40), dtype=np.uint8)
    memory = io.BytesIO()
    with h5py.File(memory, "w") as h5_file:
        h5_file.create_dataset("chunked", data=images, chunks=(8, 3, 40, 40))
        h5_file.create_dataset("gzip", data=images // 32, chunks=(8, 3, 40, 40), compression="gzip")
        h5_file.create_dataset("contiguous", data=images[:20].astype(np.float32))
        h5_file.create_dataset("small", data=np.arange(50))
        h5_file.create_dataset("text", data=["cat", "dog"] * 25)
    return memory.getvalue()


@pytest.fixture(scope="module")
def local(content: bytes) -> dict[str, Any]:
    """What h5py reads from it."""
    with h5py.File(io.BytesIO(content), "r") as h5_file:
        return {key: h5_file[key][...] for key in [*KEYS, "text"]}


@pytest.fixture(scope="module", autouse=True)
def _thread_of_fsspec() -> None:
    """fsspec starts its one thread, and one for what would make that wait, at the first use and keeps them."""
    asyncio.run_coroutine_threadsafe(asyncio.to_thread(int), fsspec.asyn.get_loop()).result()


@pytest.fixture(scope="module")
def server() -> Iterator[WebStore]:
    with serve(WebStore()) as store:
        yield store


@pytest.fixture
def web(server: WebStore, content: bytes) -> WebStore:
    """The web server as it is at its best, with the file as `url_of(web)`."""
    server.objects.clear()
    server.objects[f"/{next(NAMES)}.h5"] = content
    server.delay_seconds, server.has_ranges, server.has_etags, server.before_bytes = 0.0, True, True, None
    server.faults.clear()
    server.log.clear()
    return server


@pytest.fixture
def threaded(content: bytes) -> type[ThreadedStore]:
    """The store without asynchronous requests."""
    ThreadedStore.objects = {"a.h5": content}
    ThreadedStore.faults.clear()
    ThreadedStore.users = set()
    ThreadedStore.most_at_once = 0
    ThreadedStore.meeting = None
    ThreadedStore.collect_garbage = False
    ThreadedStore.marks = {"mtime": 1.0}
    return ThreadedStore


def url_of(web: WebStore) -> str:
    return web.address + next(iter(web.objects))


def replace(web: WebStore, content: bytes) -> None:
    web.objects[next(iter(web.objects))] = content


def remote_of(url: str, **options: Any) -> RemoteFile:
    return RemoteFile(url, **{"cache_dir": None, **options})


def chunks_of(h5_dataset: Any) -> np.ndarray:
    """(first row, offset, size) of each chunk, or of the one block."""
    if h5_dataset.chunks is None:
        return np.array([[0, h5_dataset.id.get_offset(), h5_dataset.id.get_storage_size()]])
    found: list[tuple[int, int, int]] = []
    h5_dataset.id.chunk_iter(lambda info: found.append((info.chunk_offset[0], info.byte_offset, info.size)))
    return np.array(found)


def read_all(remote: RemoteFile, key: str) -> np.ndarray:
    """A whole dataset by the offsets of its chunks."""
    with remote.open_h5() as h5_file:
        h5_dataset = h5_file[key]
        shape, dtype, chunk_shape = h5_dataset.shape, h5_dataset.dtype, h5_dataset.chunks or h5_dataset.shape
        chunks, is_packed = chunks_of(h5_dataset), h5_dataset.compression is not None
    values = np.empty(shape, dtype)
    for (row, _, _), data in zip(chunks, remote.read_ranges(chunks[:, 1], chunks[:, 2]), strict=True):
        raw = zlib.decompress(data) if is_packed else data
        block = np.frombuffer(raw, dtype).reshape(chunk_shape)
        values[row : row + chunk_shape[0]] = block[: shape[0] - row]
    return values


def read_bytes(remote: RemoteFile, *pieces: tuple[int, int]) -> list[bytes]:
    pairs = np.array(pieces)
    return [bytes(data) for data in remote.read_ranges(pairs[:, 0], pairs[:, 1])]


# What is read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/a.h5", True),
        ("gs://bucket/a.h5", True),
        ("https://host/a.h5", True),
        ("memory://a.h5", True),
        ("simplecache::s3://bucket/a.h5", True),
        ("file://a.h5", False),
        ("local://a.h5", False),
        ("a.h5", False),
        ("folder/a.h5", False),
        ("s3:/bucket/a.h5", False),
        ("folder/s3://a.h5", False),
        ("C:/a.h5", False),
    ],
)
def test_an_address_of_a_store_is_told_from_a_path(path, expected):
    assert is_remote(path) is expected


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["web", "memory", "threaded"])
def test_chunks_by_their_offsets_are_what_h5py_reads_from_the_local_file(kind, key, web, threaded, content, local):
    fsspec.filesystem("memory").pipe("/a.h5", content)
    url = {"web": url_of(web), "memory": "memory://a.h5", "threaded": "threaded://a.h5"}[kind]
    remote = remote_of(url)
    assert remote.size_bytes == len(content)
    np.testing.assert_array_equal(read_all(remote, key), local[key], strict=True)
    remote.close()


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_offsets_count_from_the_start_of_the_object_also_behind_a_user_block(libver, threaded, tmp_path):
    values = np.arange(400, dtype=np.int32).reshape(40, 10)
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512, libver=libver) as h5_file:
        h5_file.create_dataset("chunked", data=values, chunks=(16, 10))
        h5_file.create_dataset("contiguous", data=values)
    threaded.objects["a.h5"] = (tmp_path / "a.h5").read_bytes()
    for key in ("chunked", "contiguous"):
        np.testing.assert_array_equal(read_all(remote_of("threaded://a.h5"), key), values, strict=True)


def test_small_arrays_and_strings_can_be_read_through_h5py(web, local):
    with remote_of(url_of(web)).open_h5() as h5_file:
        assert h5_file.filename == url_of(web)
        assert h5_file["text"][...].tolist() == local["text"].tolist()
        np.testing.assert_array_equal(h5_file["gzip"][...], local["gzip"])


def test_a_store_that_speaks_s3(content, local, monkeypatch):
    moto_server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        options = {"endpoint_url": endpoint, "key": "a", "secret": "b"}
        s3 = fsspec.filesystem("s3", **options)
        s3.mkdir("bucket")
        s3.pipe("bucket/a.h5", content)
        remote = remote_of("s3://bucket/a.h5", storage_options=options)
        np.testing.assert_array_equal(read_all(remote, "gzip"), local["gzip"], strict=True)
        assert dict(remote.stamp.marks)["etag"]
        assert remote._connected().store._fs.config_kwargs["max_pool_connections"] == 16
        s3.pipe("bucket/a.h5", content[::-1])
        with pytest.raises(FeedError, match=r"s3://bucket/a\.h5 was replaced: its etag was"):
            remote.check_unchanged()
        with pytest.raises(FileNotFoundError, match="there is no such object"):
            remote_of("s3://bucket/b.h5", storage_options=options).check_unchanged()
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_pieces_may_overlap_repeat_be_empty_and_come_in_any_order(web, content):
    pieces = [(700_000, 100), (5, 10), (8, 10), (700_000, 100), (0, 0), (len(content), 0), (len(content) - 1, 1)]
    assert read_bytes(remote_of(url_of(web)), *pieces) == [content[at : at + size] for at, size in pieces]
    assert remote_of(url_of(web)).read_ranges(np.zeros(0, np.int64), np.zeros(0, np.int64)) == []


def test_near_pieces_are_one_request_and_far_ones_are_several(web):
    remote = remote_of(url_of(web))
    remote.check_unchanged()
    web.log.clear()
    read_bytes(remote, (200_000, 100), (0, 100), (300, 100), (200_100, 50))
    assert sorted(web.ranges) == [(0, 400), (200_000, 200_150)]


def test_a_large_piece_comes_in_parts_at_the_same_time(threaded):
    threaded.objects["a.h5"] = np.random.default_rng(0).bytes(9 << 20)
    threaded.meeting = threading.Barrier(3)
    remote = remote_of("threaded://a.h5")
    assert read_bytes(remote, (1, (9 << 20) - 1)) == [threaded.objects["a.h5"][1:]]
    remote.close()


def test_a_file_system_that_is_not_asynchronous_is_used_by_several_threads_each_with_its_own_instance(threaded):
    threaded.meeting = threading.Barrier(4)
    remote = remote_of("threaded://a.h5", num_threads=4)
    read_bytes(remote, *[(at, 10) for at in range(0, 800_000, 100_000)])
    assert threaded.most_at_once == 4
    threads, instances = zip(*threaded.users, strict=True)
    assert len(set(instances)) == len(set(threads)) == 4
    remote.close()


def test_as_many_requests_are_under_way_as_threads_were_given_and_no_more(web):
    lock, now, most, meeting = threading.Lock(), [0], [0], threading.Barrier(3)

    def watch(part: object) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        meeting.wait(60)
        with lock:
            now[0] -= 1

    remote = remote_of(url_of(web), num_threads=3)
    remote.check_unchanged()
    web.before_bytes = watch
    read_bytes(remote, *[(at, 10) for at in range(0, 720_000, 80_000)])
    assert most[0] == 3


def test_a_buffer_is_filled_from_a_position_on(web, content):
    out = np.zeros(1000, np.float32)
    remote_of(url_of(web)).read_into(2000, memoryview(out))
    assert out.tobytes() == content[2000:6000]
    remote_of(url_of(web)).read_into(0, memoryview(b""))


def test_many_threads_read_from_one_file(web, content):
    remote = remote_of(url_of(web))
    wrong = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(5):
            offsets, sizes = rng.integers(0, 700_000, 10), rng.integers(0, 5000, 10)
            for offset, size, data in zip(offsets, sizes, remote.read_ranges(offsets, sizes), strict=True):
                wrong.extend([] if data == content[offset : offset + size] else [offset])
        with remote.open_h5() as h5_file:
            wrong.extend([] if h5_file["small"][seed] == seed else [seed])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_opening_takes_few_requests_and_reading_on_takes_fewer(web):
    remote = remote_of(url_of(web))
    remote.check_unchanged()
    web.log.clear()
    with remote.open_h5() as h5_file:
        chunks_of(h5_file["chunked"])
    # Of twelve blocks of 64 kB; and a look at the end.
    assert len(web.ranges) <= 3
    web.log.clear()
    with remote.open_h5() as h5_file:
        for row in range(20):
            h5_file["contiguous"][row]
    assert len(web.ranges) <= 4


# Garbage collection, notebooks, other processes --------------------------------------------------------------


class _Loop:
    """Is only found by the garbage collector."""

    def __init__(self, *held: Any) -> None:
        self.held = (self, *held)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("url", ["littered://a.h5", "threaded://a.h5"])
def test_garbage_of_h5py_collected_where_bytes_are_fetched_is_no_deadlock(url, threaded, content, local):
    LitteredStore.objects = {"a.h5": content}
    LitteredStore.threads.clear()
    threaded.collect_garbage = True

    def litter() -> None:
        other = h5py.File(io.BytesIO(content), "r")
        _Loop(other, other["gzip"], other["gzip"].id)

    litter()
    with remote_of(url).open_h5() as h5_file:
        litter()
        np.testing.assert_array_equal(h5_file["gzip"][...], local["gzip"])
        litter()
        np.testing.assert_array_equal(h5_file["chunked"][...], local["chunked"])
    # Nothing was waited for: HDF5, the fetching and the collection were one thread.
    assert set(LitteredStore.threads) <= {threading.get_ident()}
    assert url != "littered://a.h5" or LitteredStore.threads


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_is_collected_again_afterwards_if_it_was_before(is_on, web):
    remote = remote_of(url_of(web))
    try:
        gc.enable() if is_on else gc.disable()
        with remote.open_h5(), remote.open_h5():
            assert not gc.isenabled()
        assert gc.isenabled() is is_on
        with pytest.raises(KeyError, match="nothing"), remote.open_h5() as h5_file:
            h5_file["nothing"]
        assert gc.isenabled() is is_on
    finally:
        gc.enable()


def test_a_file_can_be_opened_in_a_notebook_whose_event_loop_runs_in_this_thread(web, local):
    async def cell() -> Any:
        with remote_of(url_of(web)).open_h5() as h5_file:
            return h5_file["small"][...]

    np.testing.assert_array_equal(asyncio.run(cell()), local["small"])


def test_what_came_from_h5py_is_closed_afterwards(web):
    with remote_of(url_of(web)).open_h5() as h5_file:
        h5_dataset = h5_file["small"]
    assert not h5_dataset
    assert not h5_file


def test_pickled_to_another_process_it_connects_there(web, tmp_path, local):
    remote = remote_of(url_of(web), cache_dir=str(tmp_path / "cache"))
    stamp = remote.stamp
    (tmp_path / "remote.pickle").write_bytes(pickle.dumps(remote))
    (tmp_path / "script.py").write_text(
        "import pickle, sys, numpy as np\n"
        "remote = pickle.load(open('remote.pickle', 'rb'))\n"
        "with remote.open_h5() as h5_file:\n"
        "    small, offset = h5_file['small'][...], h5_file['contiguous'].id.get_offset()\n"
        "[data] = remote.read_ranges(np.array([offset]), np.array([4 * 20 * 3 * 40 * 40]))\n"
        "np.savez('read.npz', small=small, contiguous=np.frombuffer(data, np.float32))\n"
        "pickle.dump(remote, open('back.pickle', 'wb'))\n"
    )
    outputs = [[tmp_path / "out", tmp_path / "err"]]
    script = start_script([str(tmp_path / "script.py")], folder=tmp_path, environment=dict(os.environ), outputs=outputs)
    try:
        assert script.wait(60) == 0, (tmp_path / "err").read_text()
    finally:
        script.kill()
    with np.load(tmp_path / "read.npz") as read:
        np.testing.assert_array_equal(read["small"], local["small"])
        np.testing.assert_array_equal(read["contiguous"].reshape(20, 3, 40, 40), local["contiguous"])
    assert pickle.loads((tmp_path / "back.pickle").read_bytes()).stamp == stamp


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_connects_anew_and_the_parent_goes_on(web, content):
    remote = remote_of(url_of(web))
    assert read_bytes(remote, (100, 50)) == [content[100:150]]
    inside, outside = threading.Event(), threading.Event()

    def hold() -> None:
        with remote.open_h5() as h5_file:
            assert h5_file
            inside.set()
            outside.wait(60)

    # Forked while another thread has the file open, which no thread of the child will ever close.
    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            is_right = read_bytes(remote, (300_000, 50)) == [content[300_000:300_050]] and gc.isenabled()
            with remote.open_h5() as h5_file:
                is_right = is_right and h5_file["small"][7] == 7
        finally:
            os._exit(0 if is_right else 1)
    outside.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_bytes(remote, (200, 50)) == [content[200:250]]


# Objects that change -----------------------------------------------------------------------------------------


def changed(content: bytes) -> bytes:
    """Another version of the same size."""
    return content[:-1] + bytes([content[-1] ^ 1])


def test_a_web_server_with_etags_refuses_the_next_request_after_the_object_was_replaced(web, content):
    remote = remote_of(url_of(web), check_seconds=3600)
    read_bytes(remote, (0, 10))
    replace(web, changed(content))
    with pytest.raises(FeedError, match=r"was replaced: its etag was .* and is .*Build the loader or DataModule again"):
        read_bytes(remote, (100, 10))


def test_without_etags_a_replaced_object_is_noticed_by_the_look_that_follows(threaded, content):
    remote = remote_of("threaded://a.h5", check_seconds=0)
    read_bytes(remote, (0, 10))
    threaded.objects["a.h5"], threaded.marks = changed(content), {"mtime": 2.0}
    with pytest.raises(FeedError, match=r"threaded://a\.h5 was replaced: its mtime was 1\.0 and is 2\.0"):
        read_bytes(remote, (100, 10))


@pytest.mark.parametrize("method", ["read_ranges", "open_h5"])
def test_an_object_replaced_between_two_requests_of_one_call_is_an_error(method, web, content):
    web.has_etags = False
    remote = remote_of(url_of(web), check_seconds=0)
    remote.check_unchanged()
    web.log.clear()
    web.before_bytes = lambda part: replace(web, content + bytes(8)) if len(web.ranges) > 1 else None

    def use() -> None:
        if method == "read_ranges":
            read_bytes(remote, (0, 10), (300_000, 10), (600_000, 10))
        else:
            with remote.open_h5() as h5_file:
                h5_file["contiguous"][...]

    with pytest.raises(FeedError, match=f"changed its size from {len(content)} to {len(content) + 8} bytes"):
        use()


def test_an_object_that_is_gone_is_an_error(web):
    remote = remote_of(url_of(web))
    read_bytes(remote, (0, 10))
    url = url_of(web)
    web.objects.clear()
    with pytest.raises(FeedError, match=f"{url} is gone since it was opened"):
        read_bytes(remote, (100, 10))


def test_one_that_was_pickled_and_finds_another_version_says_so(web, content):
    remote = remote_of(url_of(web))
    text = pickle.dumps((remote.stamp, remote))
    replace(web, changed(content))
    stamp, remote = pickle.loads(text)
    assert "was replaced: its etag" in stamp.difference()
    with pytest.raises(FeedError, match="was replaced: its etag"):
        read_bytes(remote, (0, 10))


def test_stamps_are_equal_as_long_as_the_object_is_the_same(web, content):
    stamp = remote_of(url_of(web)).stamp
    assert stamp == remote_of(url_of(web)).stamp
    assert hash(stamp) == hash(remote_of(url_of(web)).stamp)
    assert stamp.difference() is None
    replace(web, changed(content))
    assert stamp != remote_of(url_of(web)).stamp
    web.objects.clear()
    assert stamp.difference() == "is gone"
    assert not stamp.has_shrunk()


def test_secrets_are_not_shown():
    remote = remote_of("threaded://a.h5", storage_options={"secret": "swordfish"})
    ThreadedStore.objects = {"a.h5": b""}
    assert "swordfish" not in repr((remote, remote.stamp))


# The cache on disk -------------------------------------------------------------------------------------------


def test_what_was_read_once_comes_from_the_disk_also_for_the_next_process(web, tmp_path, local):
    for turn in range(3):
        remote = remote_of(url_of(web), cache_dir=str(tmp_path / "cache"))
        web.log.clear()
        np.testing.assert_array_equal(read_all(remote, "gzip"), local["gzip"])
        # Beside the request that finds out whether the server serves ranges.
        assert (len(web.ranges) > 1) is (turn == 0)
        remote.close()


def test_another_version_never_yields_bytes_of_the_one_before(web, content, tmp_path):
    for version in (content, changed(content), content):
        replace(web, version)
        remote = remote_of(url_of(web), cache_dir=str(tmp_path / "cache"))
        for _ in range(2):
            assert read_bytes(remote, (len(content) - 10, 10)) == [version[-10:]]
        remote.close()


def test_bytes_that_may_be_of_another_version_are_not_kept(threaded, content, tmp_path):
    remote = remote_of("threaded://a.h5", cache_dir=str(tmp_path / "cache"), check_seconds=3600)
    remote.check_unchanged()
    threaded.objects["a.h5"], threaded.marks = changed(content), {"mtime": 2.0}
    read_bytes(remote, (len(content) - 10, 10))
    remote.close()
    threaded.objects["a.h5"], threaded.marks = content, {"mtime": 1.0}
    again = remote_of("threaded://a.h5", cache_dir=str(tmp_path / "cache"))
    assert read_bytes(again, (len(content) - 10, 10)) == [content[-10:]]
    again.close()


def test_a_look_keeps_what_arrived_before_it_once(web, tmp_path):
    remote = remote_of(url_of(web), cache_dir=str(tmp_path / "cache"))
    read_bytes(remote, (0, 10))
    remote.check_unchanged()
    assert len(list(tmp_path.glob("cache/??/*"))) == 1
    shutil.rmtree(tmp_path / "cache")
    remote.close()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("options", [{"cache_dir": None}, {"cache_dir": ""}, {"cache_bytes": 0}])
def test_without_a_cache_nothing_is_written(options, web, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remote = RemoteFile(url_of(web), **options, check_seconds=0)
    read_bytes(remote, (0, 10))
    remote.close()
    assert list(tmp_path.iterdir()) == []


def test_by_default_the_cache_is_below_the_users_cache_folder(web, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remote = RemoteFile(url_of(web))
    read_bytes(remote, (0, 10))
    remote.close()
    assert len(list(tmp_path.glob("lightning_gpufeed/chunks/??/*"))) == 1


def test_a_store_that_marks_no_versions_is_read_without_a_cache(threaded, tmp_path):
    threaded.marks = {}
    remote = remote_of("threaded://a.h5", cache_dir=str(tmp_path / "cache"), check_seconds=0)
    read_bytes(remote, (0, 10))
    assert not remote.stamp.is_certain
    remote.close()
    assert not (tmp_path / "cache").exists()


# What is refused ---------------------------------------------------------------------------------------------


def opening(content: bytes) -> str:
    """What is said when a file of these bytes is opened."""
    ThreadedStore.objects = {"a.h5": content}
    with pytest.raises(LayoutError) as error, remote_of("threaded://a.h5").open_h5():
        pass
    return str(error.value)


def test_what_is_no_hdf5_file_is_said(threaded):
    assert opening(b"PK\x03\x04 a zip archive") == (
        "threaded://a.h5: not an HDF5 file: 18 bytes, beginning with b'PK\\x03\\x04 a z'; expected the HDF5 signature. "
        "Make one with: gpufeed pack SOURCE OUT.h5"
    )
    assert "0 bytes, beginning with b''" in opening(b"")


def test_a_truncated_file_is_said(threaded, content):
    assert "truncated: it has 600000 bytes and its header announces more" in opening(content[:600_000])


def test_bytes_past_the_end_are_refused(web, content):
    with pytest.raises(FeedError, match=f"byte {len(content)} was asked for, but it has {len(content)}: truncated"):
        read_bytes(remote_of(url_of(web)), (len(content) - 5, 6))


def test_what_lies_in_other_files_is_refused_as_hdf5_would_read_it_from_this_one(threaded, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.arange(10) + 1000
    with h5py.File(tmp_path / "a.h5", "w") as h5_file:
        h5_file["x"] = np.arange(10)
        h5_file["link"] = h5py.ExternalLink("other.h5", "x")
        h5_file.create_dataset("outside", shape=(10,), dtype="i8", external=[(str(tmp_path / "raw.bin"), 0, 80)])
        for name, source in {"here": ".", "there": "other.h5"}.items():
            virtual = h5py.VirtualLayout((10,), "i8")
            virtual[:] = h5py.VirtualSource(source, "x", (10,))
            h5_file.create_virtual_dataset(name, virtual)
        for name, source in {"twice": "there", "circle": "circle", "lost": "nothing"}.items():
            virtual = h5py.VirtualLayout((10,), "i8")
            virtual[:] = h5py.VirtualSource(".", source, (10,))
            h5_file.create_virtual_dataset(name, virtual)
    threaded.objects["a.h5"] = (tmp_path / "a.h5").read_bytes()
    with remote_of("threaded://a.h5").open_h5() as h5_file:
        # The reason for all this: not the 1000 of the other file, and no error.
        assert h5_file["link"][0] == h5_file["there"][0] == 0
        for name in ("x", "here"):
            refuse_other_files(h5_file[name], h5_file)
        for name, what in {
            "link": "is a link to the file 'other.h5'",
            "outside": "is kept in external raw files",
            "there": "is virtual, with samples from the file 'other.h5'",
            "twice": "is virtual, with samples from the file 'other.h5'",
            "lost": "takes samples from 'nothing', which is not there",
            "circle": "takes samples from itself",
        }.items():
            with pytest.raises(LayoutError, match=what):
                refuse_other_files(h5_file[name], h5_file)


def test_an_error_while_fetching_is_raised_whatever_hdf5_and_the_caller_make_of_it(threaded):
    remote = remote_of("threaded://a.h5")

    def use() -> None:
        with remote.open_h5() as h5_file:
            threaded.faults.append(TypeError("odd"))
            with contextlib.suppress(Exception):
                h5_file["contiguous"][...]

    with pytest.raises(FeedError, match=r"threaded://a\.h5: bytes .* cannot be read, tried once: TypeError: odd"):
        use()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "a.h5"}, "url='a.h5'; expected an address in a store"),
        ({"num_threads": 0}, "num_threads=0, .*expected at least one thread"),
        ({"cache_bytes": -1}, "cache_bytes=-1, .*no negative number"),
        ({"check_seconds": -1.0}, "check_seconds=-1.0; .*no negative number"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        RemoteFile(**{"url": "threaded://a.h5", **options})


def test_without_fsspec_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"needs fsspec .*pip install 'lightning_gpufeed\[remote\]'"):
        remote_of("threaded://a.h5").check_unchanged()


def test_files_are_closed_twice_and_used_again(web, content, tmp_path: Path):
    remote = remote_of(url_of(web), cache_dir=str(tmp_path))
    for _ in range(2):
        assert read_bytes(remote, (0, 10)) == [content[:10]]
        remote.close()
        remote.close()
