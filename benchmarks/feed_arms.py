"""The arms of feed.py: which there are, and the processes that serve them."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feed_data import Workload

SCRIPTS = Path(__file__).parent / "feed_peers"
START_SECONDS, ANSWER_SECONDS = 900, 600
ALL = ("warm", "cold", "compressed", "lock")
NO_FILTER = ("warm", "cold", "lock")
WARM, DISK = ("warm",), ("warm", "cold")


@dataclass(frozen=True)
class Arm:
    """A way to read; `kind` says to which of the bars it belongs, `peer` names its virtual environment."""

    name: str
    script: str
    arm: str
    kind: str
    sections: tuple[str, ...]
    peer: str | None = None

    @property
    def is_bound(self) -> bool:
        return self.kind in ("bound", "decoding")

    @property
    def reads(self) -> bool:
        """Whether it gives samples of the file."""
        return self.kind != "neighbour"


ARMS = [
    Arm("bound: plain read, 1 thread", "bound", "1", "bound", ALL),
    Arm("bound: plain read, 2 threads", "bound", "2", "bound", WARM),
    Arm("bound: decoding alone, 2 threads", "bound", "decode-2", "decoding", ("compressed",)),
    Arm("a neighbour computes", "neighbour", "compute", "neighbour", ("lock",)),
    Arm("a neighbour copies 0.8 GB/s", "neighbour", "copy-0.8", "neighbour", ("lock",)),
    Arm("a neighbour copies 3 GB/s", "neighbour", "copy-3", "neighbour", ("lock",)),
    Arm("H5Loader", "ours", "full", "ours", NO_FILTER),
    Arm('H5Loader, shuffle="window"', "ours", "window", "ours", ALL),
    Arm("H5Loader, isolate=True", "ours", "isolate", "ours", ("warm", "lock")),
    Arm("DataLoader + h5py", "h5py_items", "usual-0", "usual", ALL),
    Arm("DataLoader + h5py, 2 workers", "h5py_items", "usual-2", "usual", NO_FILTER),
    Arm("DataLoader + h5py, no cache", "h5py_items", "no-cache-0", "no cache", NO_FILTER),
    Arm("DataLoader + h5py, no cache, 2 workers", "h5py_items", "no-cache-2", "no cache", NO_FILTER),
    Arm("h5py, whole chunks, 4096 in play", "h5py_items", "chunks", "chunks", ALL),
    Arm("h5py, all in a row", "h5py_items", "in-a-row", "in a row", ("compressed",)),
    Arm(".npy map, DataLoader, batch per read", "npy", "dataloader", "npy", NO_FILTER),
    Arm(".npy map, plain loop, 1 thread", "npy", "loop-1", "npy", NO_FILTER),
    Arm(".npy map, plain loop, 2 threads", "npy", "loop-2", "npy", WARM),
    Arm("FFCV random, 1 worker", "ffcv_peer", "random-1", "ffcv", WARM, "ffcv"),
    Arm("FFCV random, 2 workers", "ffcv_peer", "random-2", "ffcv", NO_FILTER, "ffcv"),
    Arm("FFCV quasi-random, 2 workers", "ffcv_peer", "quasi-2", "ffcv", DISK, "ffcv"),
    Arm("litdata, one chunk", "litdata_peer", "full-0", "chunked", DISK, "litdata"),
    Arm("litdata, one chunk, 2 workers", "litdata_peer", "full-2", "chunked", ("warm", "lock"), "litdata"),
    Arm("litdata, as it comes, 2 workers", "litdata_peer", "default-2", "chunked", DISK, "litdata"),
    Arm("MDS, naive shuffle", "streaming_peer", "full-0", "chunked", WARM, "streaming"),
    Arm("MDS, naive shuffle, 2 workers", "streaming_peer", "full-2", "chunked", NO_FILTER, "streaming"),
    Arm("MDS, as it comes, 2 workers", "streaming_peer", "default-2", "chunked", DISK, "streaming"),
    Arm("WebDataset, buffer for all", "webdataset_peer", "full-0", "chunked", DISK, "webdataset"),
    Arm("WebDataset, buffer for all, 2 workers", "webdataset_peer", "full-2", "chunked", WARM, "webdataset"),
    Arm("WebDataset, buffer of 1000, 2 workers", "webdataset_peer", "default-2", "chunked", NO_FILTER, "webdataset"),
    Arm("SPDL over an .npy map, 2 threads", "spdl_peer", "npy", "spdl", NO_FILTER, "spdl"),
    Arm("SPDL over h5py, 2 threads", "spdl_peer", "h5", "spdl", WARM, "spdl"),
    Arm("tensorstore zarr3, single samples", "tensorstore_peer", "zarr3-shards", "store", NO_FILTER, "tensorstore"),
    Arm("tensorstore zarr3, same chunks", "tensorstore_peer", "zarr3", "store", DISK, "tensorstore"),
    Arm("tensorstore zarr3, all of it cached", "tensorstore_peer", "zarr3-kept", "store", WARM, "tensorstore"),
    Arm("tensorstore n5, same chunks", "tensorstore_peer", "n5", "store", WARM, "tensorstore"),
    Arm("bound: one request for all of it", "remote", "bound", "bound", ("remote",)),
    Arm("H5Loader", "remote", "full", "ours", ("remote",)),
    Arm('H5Loader, shuffle="window"', "remote", "window", "ours", ("remote",)),
    Arm("h5py over fsspec, as it comes", "remote", "usual", "usual", ("remote",)),
    Arm("h5py over fsspec, 64 kB blocks, no chunk cache", "remote", "blocks", "usual", ("remote",)),
]  # fmt: skip


class ArmError(Exception):
    """An arm cannot be had, or has failed."""


def interpreter(arm: Arm, peers: Path) -> str:
    if arm.peer is None:
        return sys.executable
    environment = peers / arm.peer
    if (environment / ".ready").exists():
        return str(environment / "bin" / "python")
    reason = peers / f"{arm.peer}.skipped"
    raise ArmError(reason.read_text().strip() if reason.exists() else f"{environment} is not there: run feed_peers.sh")


class Server:
    """A process that serves one arm."""

    def __init__(self, arm: Arm, workload: Workload, peers: Path, logs: Path) -> None:
        self.arm = arm
        self._log = logs / f"{workload.folder.name}-{arm.script}-{arm.arm}.log"
        command = [interpreter(arm, peers), str(SCRIPTS / f"{arm.script}.py"), "--arm", arm.arm]
        command += ["--data", str(workload.folder), "--file", workload.h5_name]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.converted: dict[str, Any] = {}
        self.path = workload.h5

    def convert(self) -> None:
        """Write the arm's files, if they are not there."""
        self.converted = self.ask({"do": "convert"}, START_SECONDS)
        self.path = Path(self.converted["path"])

    def ask(self, request: dict[str, Any], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ArmError(self._last_words()) from None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise ArmError(f"no answer in {seconds} s")
        line = self._process.stdout.readline()
        if not line:
            raise ArmError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise ArmError(answer["error"][:200])
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return (lines[-1] if lines else "no word")[:200] + f" (ended with status {status})"

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@dataclass
class Measured:
    """What came of the arms over one workload: the answers of each round, or why there are none."""

    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    converted: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


class Fleet:
    """The processes of all arms over one workload. An arm that fails is put aside with the reason."""

    def __init__(self, arms: list[Arm], workload: Workload, peers: Path, logs: Path) -> None:
        self.workload = workload
        self.measured = Measured()
        self.servers: dict[str, Server] = {}
        for arm in arms:
            try:
                self.servers[arm.name] = Server(arm, workload, peers, logs)
            except ArmError as error:
                self._put_aside(arm.name, error)
        # All import at the same time, then write their files one after the other.
        for name in list(self.servers):
            self.ask(name, {"do": "hello"})
        for name, server in list(self.servers.items()):
            try:
                server.convert()
                self.measured.converted[name] = server.converted
            except ArmError as error:
                self._put_aside(name, error)

    def _put_aside(self, name: str, error: Exception) -> None:
        self.measured.skipped[name] = str(error)
        self.measured.answers.pop(name, None)
        say(f"  {name}: skipped: {error}")
        if server := self.servers.pop(name, None):
            server.close()

    def leave_out(self, kind: str) -> None:
        """Arms that have nothing to say here."""
        for name in [name for name, server in self.servers.items() if server.arm.kind == kind]:
            self.servers.pop(name).close()

    def ask(self, name: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """An answer; None if the arm failed."""
        try:
            return self.servers[name].ask(request)
        except ArmError as error:
            self._put_aside(name, error)
            return None

    def names(self, number: int) -> list[str]:
        """The bound first, then the others, there and back in turns."""
        bounds = [name for name, server in self.servers.items() if server.arm.is_bound]
        others = [name for name in self.servers if name not in bounds]
        return bounds + (others if number % 2 == 0 else others[::-1])

    def round(
        self,
        number: int,
        request: dict[str, Any],
        before: Callable[[Server], dict[str, Any]] | None = None,
        usual_seconds: float | None = None,
    ) -> None:
        """One epoch of each arm; `before` prepares an arm and adds to its answer. The usual ones may take a part."""
        begin = time.perf_counter()
        for name in self.names(number):
            extra = before(self.servers[name]) if before is not None else {}
            is_part = usual_seconds is not None and self.servers[name].arm.kind == "usual"
            part = {"seconds": usual_seconds} if is_part else {}
            answer = self.ask(name, {"do": "epoch", "number": number, **request, **part})
            if answer is not None:
                self.measured.answers.setdefault(name, []).append({**answer, **extra})
        say(f"  round {number}: {time.perf_counter() - begin:.0f} s")

    def prove(self, seconds: float | None = None) -> None:
        """The round before those that count: every sample of every arm, or of ours and a part of the usual ones."""
        begin = time.perf_counter()
        for name in self.names(0):
            if not self.servers[name].arm.reads:
                continue
            is_part = seconds is not None and self.servers[name].arm.kind == "usual"
            self.ask(name, {"do": "epoch", "number": 0, **({"seconds": seconds} if is_part else {"verify": True})})
        say(f"  proved in {time.perf_counter() - begin:.0f} s")

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        self.servers.clear()


def say(text: str) -> None:
    """To standard error: how far it is."""
    print(text, file=sys.stderr, flush=True)
