"""Requests to a store: what passes is tried again, what does not is said at once, and no answer is a short one."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Iterator

import fsspec
import fsspec.asyn
import pytest

from lightning_gpufeed.errors import FeedError, LayoutError
from lightning_gpufeed.hdf5.remote.store import RemoteStamp, Store
from tests.hdf5.remote_stores import BROKEN, ThreadedStore, WebStore, etag_of, serve

CONTENT = bytes(range(256)) * 8000
PARTS = [(0, 100), (1_000_000, 1_000_100), (500, 505)]
ANSWERS = [CONTENT[start:stop] for start, stop in PARTS]


@pytest.fixture(scope="module", autouse=True)
def _thread_of_fsspec() -> None:
    """fsspec starts its one thread, and one for what would make that wait, at the first use and keeps them."""
    asyncio.run_coroutine_threadsafe(asyncio.to_thread(int), fsspec.asyn.get_loop()).result()


@pytest.fixture(scope="module")
def server() -> Iterator[WebStore]:
    with serve(WebStore()) as store:
        yield store


@pytest.fixture
def web(server: WebStore) -> WebStore:
    server.objects = {"/a.h5": CONTENT}
    server.has_ranges = server.has_etags = True
    server.faults.clear()
    server.log.clear()
    server.headers.clear()
    return server


@pytest.fixture
def threaded() -> type[ThreadedStore]:
    ThreadedStore.objects = {"a.h5": CONTENT}
    ThreadedStore.faults.clear()
    ThreadedStore.collect_garbage = False
    ThreadedStore.marks = {"mtime": 1.0}
    return ThreadedStore


def store_of(url: str, **options: object) -> Store:
    return Store(url, first_wait_seconds=0.001, **options)  # type: ignore[arg-type]


def failure(store: Store, kind: type[Exception] = FeedError) -> str:
    with pytest.raises(kind) as error:
        store.fetch([(10, 20)])
    return str(error.value)


# What passes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [500, 503, 429, 408, -1, -5, BROKEN], ids=str)
def test_what_fails_in_passing_is_asked_for_again_and_nothing_else_is(web, fault):
    web.faults.extend([0, fault, fault, 0])
    assert store_of(f"{web.address}/a.h5").fetch(PARTS) == ANSWERS
    assert len(web.ranges) == len(PARTS) + 2


@pytest.mark.parametrize(
    "error", [TimeoutError("slow"), ConnectionResetError("gone"), OSError(errno.EIO, "odd")], ids=str
)
def test_a_store_without_asynchronous_requests_is_asked_again_too(threaded, error):
    store = store_of("threaded://a.h5")
    threaded.faults.extend([error] * 2)
    assert store.fetch(PARTS) == ANSWERS
    store.close()


def test_so_is_what_is_fetched_in_this_thread(web):
    store = store_of(f"{web.address}/a.h5")
    web.faults.extend([503, -1])
    with store.in_this_thread() as once:
        assert store.fetch(PARTS, once) == ANSWERS


def test_a_look_is_tried_again(threaded):
    class Flaky(ThreadedStore):
        protocol = "flaky"
        left = 2

        def info(self, path, **kwargs):
            Flaky.left -= 1
            if Flaky.left >= 0:
                raise ConnectionError("not yet")
            return super().info(path, **kwargs)

    fsspec.register_implementation("flaky", Flaky, clobber=True)
    assert store_of("flaky://a.h5").look().size_bytes == len(CONTENT)


def test_a_look_does_not_believe_what_fsspec_remembers(threaded):
    class Remembering(ThreadedStore):
        protocol = "remembering"

        def info(self, path, **kwargs):
            if path not in self.dircache:
                self.dircache[path] = [super().info(path, **kwargs)]
            return self.dircache[path][0]

        def invalidate_cache(self, path=None):
            self.dircache.clear()

    fsspec.register_implementation("remembering", Remembering, clobber=True)
    store = store_of("remembering://a.h5")
    assert store.look().size_bytes == len(CONTENT)
    threaded.objects["a.h5"] = b"other"
    assert store.look().size_bytes == 5


# What does not -----------------------------------------------------------------------------------------------


def test_after_some_attempts_the_error_names_object_range_cause_and_what_to_do(threaded):
    threaded.faults.extend([TimeoutError("too slow")] * 3)
    store = store_of("threaded://a.h5", num_attempts=3)
    assert failure(store) == (
        "threaded://a.h5: bytes 10 to 19 cannot be read, tried 3 times: TimeoutError: too slow. Look at the store and "
        "the connection to it, then go on from the latest checkpoint; time limits are set in storage_options."
    )
    assert not threaded.faults


def test_answers_that_stay_short_are_an_error(web):
    web.faults.extend([-1] * 4)
    text = failure(store_of(f"{web.address}/a.h5", num_attempts=4))
    assert (
        "bytes 10 to 19 cannot be read, tried 4 times: EOFError: the store answered with 9 bytes instead of 10" in text
    )


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_access_is_said_at_once(web, status):
    web.faults.append(status)
    text = failure(store_of(f"{web.address}/a.h5"), PermissionError)
    assert "bytes 10 to 19 cannot be read: the store refuses access" in text
    assert "Give credentials in the environment or in storage_options" in text
    assert len(web.ranges) == 1


def test_an_object_that_is_not_there_is_said_at_once(web):
    store = store_of(f"{web.address}/b.h5")
    with pytest.raises(FileNotFoundError, match=r"there is no such object .*Look at its name") as error:
        store.look()
    assert error.value.filename == f"{web.address}/b.h5"
    assert "there is no such object" in failure(store)


def test_a_wrong_argument_in_the_file_system_is_said_at_once(threaded):
    threaded.faults.append(TypeError("unexpected"))
    assert "cannot be read, tried once: TypeError: unexpected" in failure(store_of("threaded://a.h5"))


def test_a_server_that_is_not_there_is_no_missing_object():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/a.h5"
        with pytest.raises(FeedError, match="it cannot be looked up, tried 2 times: ClientConnectorError"):
            store_of(url, num_attempts=2).look()


def test_a_server_without_ranges_is_found_out_before_it_sends_all(web):
    web.has_ranges = False
    store = store_of(f"{web.address}/a.h5")
    with pytest.raises(
        FeedError, match=r"sends the whole object where a part of it was asked for\. Copy it to a store"
    ):
        store.insist_on(store.look())
    assert "sends the whole object where a part of it was asked for" in failure(store)


def test_a_server_whose_etags_do_not_hold_is_read_without_condition(web):
    store = store_of(f"{web.address}/a.h5")
    store.insist_on(RemoteStamp(f"{web.address}/a.h5", len(CONTENT), (("etag", '"of another server"'),)))
    assert store.fetch(PARTS) == ANSWERS


@pytest.mark.parametrize("fault", [503, BROKEN], ids=str)
def test_a_failure_in_passing_does_not_take_the_condition_away(web, fault):
    store = store_of(f"{web.address}/a.h5")
    stamp = store.look()
    web.faults.append(fault)
    store.insist_on(stamp)
    web.objects["/a.h5"] = CONTENT + b"x"
    assert "412" in failure(store)


def test_headers_of_the_user_are_sent_with_every_request(web):
    store = Store(f"{web.address}/a.h5", {"headers": {"X-Mine": "1"}})
    store.insist_on(store.look())
    assert store.fetch(PARTS) == ANSWERS
    assert [headers["X-Mine"] for headers in web.headers] == ["1"] * (1 + len(PARTS))
    assert {headers["If-Match"] for headers in web.headers} == {etag_of(CONTENT)}
    assert {headers["Accept-Encoding"] for headers in web.headers} == {"identity"}


def test_a_folder_is_refused(threaded):
    fsspec.filesystem("memory").pipe("/folder/a.h5", b"x")
    with pytest.raises(LayoutError, match="memory://folder is a folder; expected one HDF5 file"):
        store_of("memory://folder").look()


def test_an_object_without_a_size_is_refused(threaded):
    threaded.marks = {"size": None}
    with pytest.raises(LayoutError, match=r"threaded://a\.h5: the server does not tell its size"):
        store_of("threaded://a.h5").look()


def test_an_address_that_no_store_has_is_a_wrong_argument():
    with pytest.raises(ValueError, match=r"nothing://a\.h5 with storage_options of \['secret'\]: Protocol not known"):
        store_of("nothing://a.h5", storage_options={"secret": "swordfish"})


# Marks of versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({"ETag": '"1"', "LastModified": 5}, (("etag", '"1"'),)),
        ({"ETag": 'W/"1"', "Last-Modified": "now"}, (("etag", 'W/"1"'), ("lastmodified", "now"))),
        ({"generation": "7", "etag": "x", "md5Hash": "y"}, (("generation", "7"),)),
        ({"mtime": 2.5, "created": 1}, (("mtime", "2.5"),)),
        ({"created": 1}, (("created", "1"),)),
        ({"VersionId": None, "mode": 1}, ()),
    ],
    ids=["s3", "weak etag", "gcs", "time", "created", "none"],
)
def test_what_marks_a_version(threaded, marks, expected):
    threaded.marks = marks
    stamp = store_of("threaded://a.h5").look()
    assert stamp.marks == expected
    assert stamp.is_certain is bool(expected)


def test_waiting_threads_end_with_the_store(threaded):
    store = store_of("threaded://a.h5")
    before = threading.active_count()
    store.fetch(PARTS)
    assert threading.active_count() > before
    store.close()
    store.close()
    assert threading.active_count() == before
