"""Real stores for tests of remote files: a web server on this machine, and fsspec file systems that fail on demand."""

from __future__ import annotations

import functools
import gc
import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

BROKEN = float("nan")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class WebStore:
    """Objects served over HTTP, with ranges and etags as the large stores have them.

    Attributes:
        objects: Name -> bytes.
        delay_seconds: Every answer waits that long.
        has_ranges: Whether ranges are served; otherwise the whole object comes.
        has_etags: Whether versions have marks, and conditions are honoured.
        has_times: Whether it tells when an object was last changed.
        faults: Taken one by one by the next requests for bytes: a status to answer with, a number of bytes (negative)
            by which the answer is shorter, or `BROKEN` for a connection that breaks in the middle of it.
        log: (method, range) of every request.
        headers: What every request for bytes said beside it.
        before_bytes: Called with each range before it is served.
        address: Of the server.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    delay_seconds: float = 0.0
    has_ranges: bool = True
    has_etags: bool = True
    has_times: bool = True
    faults: deque[float] = field(default_factory=deque)
    log: list[tuple[str, tuple[int, int] | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    before_bytes: Callable[[tuple[int, int] | None], None] | None = None
    address: str = ""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The ranges asked for, (first byte, one past the last)."""
        return [part for method, part in self.log if method == "GET" and part is not None]


@functools.cache
def etag_of(content: bytes) -> str:
    """What the server calls a version."""
    return f'"{hashlib.md5(content).hexdigest()}"'


@contextmanager
def serve(store: WebStore) -> Iterator[WebStore]:
    """Run the server in threads until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            time.sleep(store.delay_seconds)
            match = _RANGE.fullmatch(self.headers.get("Range", ""))
            part = (int(match[1]), int(match[2]) + 1) if match else None
            store.log.append((self.command, part))
            if with_body:
                store.headers.append(dict(self.headers.items()))
            if with_body and store.before_bytes is not None:
                store.before_bytes(part)
            fault = store.faults.popleft() if with_body and store.faults else 0
            content = store.objects.get(self.path)
            etag = etag_of(content or b"")
            if fault > 0 or content is None:
                return self.refuse(int(fault) or 404)
            if store.has_etags and self.headers.get("If-Match", etag) != etag:
                return self.refuse(412)
            size = len(content)
            is_part = part is not None and store.has_ranges
            if is_part and part is not None:
                if part[0] >= size:
                    return self.refuse(416)
                part = (part[0], min(part[1], size))
                content = content[slice(*part)]
            self.send_response(206 if is_part else 200)
            if is_part and part is not None:
                self.send_header("Content-Range", f"bytes {part[0]}-{part[1] - 1}/{size}")
            is_broken = fault != fault
            content = content if is_broken else content[: len(content) + int(fault)]
            self.send_header("Content-Length", str(len(content)))
            if store.has_times:
                self.send_header("Last-Modified", formatdate(0, usegmt=True))
            if store.has_etags:
                self.send_header("ETag", etag)
            self.end_headers()
            if with_body:
                self.wfile.write(content[: len(content) // 2] if is_broken else content)

        def refuse(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that goes away in the middle is no fault of the server."""

    server = Server(("127.0.0.1", 0), Handler)
    store.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class ThreadedStore(AbstractFileSystem):
    """A store whose file system is not asynchronous: `threaded://name`."""

    protocol = "threaded"
    objects: ClassVar[dict[str, bytes]] = {}
    faults: ClassVar[deque[Exception]] = deque()
    # (thread, instance) of each read
    users: ClassVar[set[tuple[int, int]]] = set()
    collect_garbage: ClassVar[bool] = False
    marks: ClassVar[dict[str, Any]] = {"mtime": 1.0}
    most_at_once: ClassVar[int] = 0
    # Where reads wait for each other, to show that they are under way at the same time.
    meeting: ClassVar[threading.Barrier | None] = None
    _now: ClassVar[int] = 0
    _counting: ClassVar[threading.Lock] = threading.Lock()

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name not in self.objects:
            raise FileNotFoundError(name)
        return {"name": name, "size": len(self.objects[name]), "type": "file", **self.marks}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if self.collect_garbage:
            gc.collect()
        with self._counting:
            type(self).users.add((threading.get_ident(), id(self)))
            type(self)._now += 1
            type(self).most_at_once = max(self.most_at_once, self._now)
        try:
            if self.meeting is not None:
                self.meeting.wait(60)
            if self.faults:
                raise self.faults.popleft()
            return self.objects[self._strip_protocol(path)][start:end]
        finally:
            with self._counting:
                type(self)._now -= 1


class LitteredStore(AsyncFileSystem):
    """An asynchronous store that collects garbage in the thread that fetches: `littered://name`."""

    protocol = "littered"
    objects: ClassVar[dict[str, bytes]] = {}
    threads: ClassVar[list[int]] = []

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        return {"name": name, "size": len(self.objects[name]), "type": "file", "etag": "1"}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        gc.collect()
        self.threads.append(threading.get_ident())
        return self.objects[self._strip_protocol(path)][start:end]


fsspec.register_implementation("threaded", ThreadedStore, clobber=True)
fsspec.register_implementation("littered", LitteredStore, clobber=True)
