"""One object in a store that fsspec reaches: what it is now, and ranges of its bytes, several at once.

::

    look()                 size, etag or time: a `RemoteStamp`
    fetch(parts)           asynchronous stores: all in fsspec's own thread, `num_threads` under way
                           the others:          a few threads, each with its own connection
    in_this_thread()       the same, but nothing runs in another thread: see `RemoteFile.open_h5`

What fails in passing is tried again, a little later each time. An answer of another length than asked for is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lightning_gpufeed.errors import FeedError, LayoutError
from lightning_gpufeed.hdf5.remote.connect import connect, is_web, with_connections
from lightning_gpufeed.hdf5.remote.store_errors import explain, is_final, root_of

__all__ = ["FetchOnce", "Part", "RemoteStamp", "Store"]

Part = tuple[int, int]
"""First byte, and one past the last."""

FetchOnce = Callable[[Sequence[Part]], Sequence[Any]]
"""Asks for each part once; an exception stands in the place of an answer."""

# Not the global generator: a training's seed decides over that one.
_jitter = random.Random()

_LONGEST_WAIT_SECONDS = 10.0

# What stores call the marks of a version; compared in small letters without - and _.
_CONTENT_MARKS = ("etag", "md5hash", "contentmd5", "md5", "sha256", "sha", "blobid", "checksum", "versionid")
_TIME_MARKS = ("lastmodified", "mtime", "modified", "modificationtime", "timemodified", "updated")
_LAST_MARKS = ("created",)


@dataclass(frozen=True)
class RemoteStamp:
    """What an object looked like when it was first looked at: equal as long as it has not been replaced.

    Attributes:
        path: Its address.
        size_bytes: Size.
        marks: (name, value) of what the store tells about this version: an etag, a checksum, a time.
        storage_options: How to reach it again.
    """

    path: str
    size_bytes: int
    marks: tuple[tuple[str, str], ...]
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_certain(self) -> bool:
        """Whether another version of the same size would be noticed."""
        return bool(self.marks)

    def has_shrunk(self) -> bool:
        """Never: bytes that are missing are an error of their own when they are fetched.

        Returns:
            False.
        """
        return False

    def difference(self, now: RemoteStamp | None = None) -> str | None:
        """Say in words how the object differs from this stamp, None if it does not.

        Args:
            now: What it looks like now; None asks the store.

        Returns:
            The rest of a sentence that begins with the address.
        """
        if now is None:
            try:
                now = Store(self.path, self.storage_options).look()
            except FileNotFoundError:
                return "is gone"
        if now.size_bytes != self.size_bytes:
            return f"changed its size from {self.size_bytes} to {now.size_bytes} bytes"
        before, after = dict(self.marks), dict(now.marks)
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                return f"was replaced: its {name} was {before.get(name)} and is {after.get(name)}"
        return None


class Store:
    """The connection of this process to one object. May be used from several threads; not after a fork."""

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        num_threads: int = 16,
        num_attempts: int = 5,
        first_wait_seconds: float = 0.2,
    ) -> None:
        """Connect; nothing is asked of the object yet.

        Args:
            url: Address, such as `s3://bucket/train.h5`.
            storage_options: What fsspec's file system for this kind of address takes: credentials, endpoints, ...
            num_threads: Requests under way at the same time.
            num_attempts: How often one request is made before giving up.
            first_wait_seconds: Wait before the second attempt; it doubles each time.

        """
        self._url = url
        self._given = dict(storage_options or {})
        self._options = with_connections(url, self._given, num_threads)
        self._num_threads = num_threads
        self._num_attempts = num_attempts
        self._first_wait_seconds = first_wait_seconds
        self._fs, self._object = connect(url, self._options)
        self._is_async = bool(getattr(self._fs, "async_impl", False)) and hasattr(self._fs, "_cat_file")
        self._is_http = is_web(self._fs)
        self._request: dict[str, Any] = {}
        if self._is_http:
            # A server that compresses on the way would count other bytes.
            self._request["headers"] = {**self._options.get("headers", {}), "Accept-Encoding": "identity"}
        self._local = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def look(self) -> RemoteStamp:
        """Ask the store what the object is now.

        Returns:
            The stamp.

        Raises:
            FileNotFoundError: There is no such object.
            PermissionError: The store refuses access.
            LayoutError: It is a folder, or the store does not tell its size.
            FeedError: The store cannot be reached.
        """
        info = self._info()
        size = info.get("size")
        if info.get("type") == "directory":
            raise LayoutError(f"{self._url} is a folder; expected one HDF5 file. Name the file, or a list of files.")
        if not isinstance(size, int):
            raise LayoutError(
                f"{self._url}: the server does not tell its size, so parts of it cannot be read. Copy it to a store or "
                f"server that does, or to a local disk."
            )
        return RemoteStamp(self._url, size, _marks(info), self._given)

    def _info(self) -> dict[str, Any]:
        """What the store tells about the object, asked again where that fails in passing."""
        attempt = 0
        while True:
            self._wait(attempt)
            attempt += 1
            try:
                # A listing that fsspec remembers may be older than the object.
                self._fs.invalidate_cache(self._object)
                return dict(self._fs.info(self._object))
            except Exception as error:
                problem = root_of(error)
                if is_final(problem) or attempt == self._num_attempts:
                    raise explain(problem, self._url, "it cannot be looked up", attempt) from problem

    def insist_on(self, stamp: RemoteStamp) -> None:
        """Have a web server refuse to send parts of another version, where it can; and make sure it sends parts at all.

        One that does not would send the whole object for each of them.

        Args:
            stamp: The object as it is now.

        Raises:
            FeedError: The server does not serve ranges.
        """
        etag = dict(stamp.marks).get("etag", "")
        if not self._is_http or stamp.size_bytes < 2:
            return
        headers = self._request["headers"]
        conditional = {**headers, "If-Match": etag} if etag.startswith('"') else headers
        for trial in (conditional, headers):
            try:
                self._probe(trial, stamp.size_bytes)
            except ValueError as error:
                raise FeedError(self._no_ranges()) from error
            except Exception as error:
                # A condition that does not even hold now is left out; what fails in passing tells nothing.
                if is_final(root_of(error)) and trial is not headers:
                    continue
            self._request["headers"] = trial
            return

    def _probe(self, headers: Mapping[str, str], size_bytes: int) -> None:
        """Ask for the last byte; unlike `cat_file`, this does not wait for a whole object that comes instead."""
        options = {"block_size": 1 << 16, "cache_type": "none", "size": size_bytes, "headers": headers}
        with self._fs.open(self._object, "rb", **options) as file:
            file.seek(size_bytes - 1)
            file.read(1)

    def fetch(self, parts: Sequence[Part], once: FetchOnce | None = None) -> list[bytes]:
        """Fetch parts of the object.

        Args:
            parts: None of them empty.
            once: How to ask; None asks for many at the same time.

        Returns:
            The bytes of each.

        Raises:
            FeedError: The store cannot be read, or answers with other lengths.
        """
        ask = once or self._fetch_once
        answers: list[bytes] = [b""] * len(parts)
        left = list(range(len(parts)))
        attempt = 0
        while left:
            self._wait(attempt)
            attempt += 1
            problems: dict[int, BaseException] = {}
            for number, answer in zip(left, ask([parts[number] for number in left]), strict=True):
                if problem := self._problem(parts[number], answer):
                    problems[number] = problem
                else:
                    answers[number] = answer
            final = [number for number, problem in problems.items() if is_final(problem)]
            left = list(problems)
            if final or (left and attempt == self._num_attempts):
                number = (final or left)[0]
                raise self._failure(parts[number], problems[number], attempt) from problems[number]
        return answers

    def _failure(self, part: Part, problem: BaseException, num_attempts: int) -> Exception:
        """The error to raise for a part that cannot be had."""
        if isinstance(problem, FeedError):
            return problem
        error = explain(problem, self._url, f"bytes {part[0]} to {part[1] - 1} cannot be read", num_attempts)
        return FeedError(str(error)) if isinstance(error, FileNotFoundError) else error

    def _problem(self, part: Part, answer: Any) -> BaseException | None:
        """What is wrong with an answer."""
        if isinstance(answer, BaseException):
            return root_of(answer)
        start, stop = part
        if len(answer) > stop - start:
            return FeedError(self._no_ranges())
        if len(answer) < stop - start:
            return EOFError(f"the store answered with {len(answer)} bytes instead of {stop - start}")
        return None

    def _no_ranges(self) -> str:
        return (
            f"{self._url}: the server sends the whole object where a part of it was asked for. Copy it to a store or "
            f"server that serves ranges, or to a local disk."
        )

    def _wait(self, attempt: int) -> None:
        """Wait before another attempt, not at the same time as all other processes do."""
        if attempt:
            seconds = min(_LONGEST_WAIT_SECONDS, self._first_wait_seconds * 2 ** (attempt - 1))
            time.sleep(seconds * _jitter.uniform(0.5, 1.0))

    def _fetch_once(self, parts: Sequence[Part]) -> Sequence[Any]:
        """Ask for all parts, many at the same time."""
        if self._is_async:
            starts, stops = [start for start, _ in parts], [stop for _, stop in parts]
            return self._fs.cat_ranges(  # type: ignore[no-any-return]
                [self._object] * len(parts),
                starts,
                stops,
                batch_size=self._num_threads,
                on_error="return",
                **self._request,
            )
        if len(parts) == 1:
            return [self._fetch_one(parts[0])]
        with self._starting:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="gpufeed-remote")
            pool = self._pool
        return list(pool.map(self._fetch_one, parts))

    def _fetch_one(self, part: Part) -> Any:
        """Ask for one part with the connection of this thread."""
        try:
            if self._is_async:
                return self._fs.cat_file(self._object, start=part[0], end=part[1], **self._request)
            # File systems that are not asynchronous are made for one thread each.
            if not hasattr(self._local, "fs"):
                self._local.fs, _ = connect(self._url, self._options)
            return self._local.fs.cat_file(self._object, start=part[0], end=part[1])
        except Exception as error:
            return error

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[FetchOnce]:
        """Fetch without waiting for any other Python thread.

        Where that cannot be (an event loop runs in this thread already, as in a notebook, or the file system only
        wraps another one), fsspec's own thread does it.

        Yields:
            To be given to `fetch`.
        """
        if not self._is_async or hasattr(self._fs, "fs") or hasattr(self._fs, "fss") or _has_running_loop():
            yield lambda parts: [self._fetch_one(part) for part in parts]
            return
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            options = {**self._fs.storage_options, "asynchronous": True, "loop": runner.get_loop()}
            fs = type(self._fs)(*self._fs.storage_args, **options, skip_instance_cache=True)
            limit = asyncio.Semaphore(self._num_threads)

            async def one(start: int, stop: int) -> Any:
                async with limit:
                    return await fs._cat_file(self._object, start=start, end=stop, **self._request)

            async def several(parts: Sequence[Part]) -> Sequence[Any]:
                return await asyncio.gather(*(one(*part) for part in parts), return_exceptions=True)

            try:
                yield lambda parts: runner.run(several(parts))
            finally:
                runner.run(_close_session(fs))

    def close(self) -> None:
        """End the threads. Closing twice is allowed."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


def _marks(info: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What tells versions apart: the content's mark where there is one, else times."""
    known = {name.lower().replace("-", "").replace("_", ""): value for name, value in info.items() if value}
    if "generation" in known:
        return (("generation", str(known["generation"])),)
    content = tuple((name, str(known[name])) for name in _CONTENT_MARKS if name in known)
    is_strong = any(not value.startswith("W/") for _, value in content)
    times = tuple((name, str(known[name])) for name in _TIME_MARKS if name in known)
    return content if is_strong else content + times or tuple((n, str(known[n])) for n in _LAST_MARKS if n in known)


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _close_session(fs: Any) -> None:
    """Close the connections of an asynchronous file system, as their makers advise."""
    begin = getattr(fs, "set_session", None) or getattr(fs, "_set_session", None)
    if begin is not None:
        with contextlib.suppress(Exception):
            await (await begin()).close()
