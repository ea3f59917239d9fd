"""Two hosts with a slow link between them, on one machine, for `gradient_sync.py`.

::

    namespace gpufeed-<pid>-0                      namespace gpufeed-<pid>-1
      rank 0, on core 0  10.77.0.1 link0 ── veth ── link1 10.77.0.2  rank 1, on core 1
                                   tbf              tbf     as fast as a rank asks for its own side

Needs root and iproute2. All is removed when the `with` block is left, however that happens.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

_PREFIX = "gpufeed-"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_POLL_SECONDS = 0.2
_PARENT = "GPUFEED_BENCHMARK_PID"


class NoLinkError(Exception):
    """There can be no such link here."""


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoLinkError(f"there is no '{command[0]}' here; it is in the package iproute2") from error
    except subprocess.CalledProcessError as error:
        raise NoLinkError(f"'{' '.join(command)}' says: {error.stderr.strip() or error.returncode}") from error
    return done.stdout


class Hosts:
    """Two hosts, and the processes on them. With `is_loopback` both are this machine, and nothing is slow."""

    def __init__(self, is_loopback: bool = False) -> None:
        self._is_loopback = is_loopback
        self._names = [f"{_PREFIX}{os.getpid()}-{rank}" for rank in range(2)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Hosts:
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, _leave)
        try:
            if not self._is_loopback:
                self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def _build(self) -> None:
        if os.geteuid():
            raise NoLinkError("network namespaces need root")
        _remove_leftovers()
        for name in self._names:
            _run("ip", "netns", "add", name)
        first, second = self._names
        _run("ip", "link", "add", "link0", "netns", first, "type", "veth", "peer", "name", "link1", "netns", second)
        for rank, name in enumerate(self._names):
            inside = ("ip", "-n", name)
            _run(*inside, "address", "add", f"{_ADDRESSES[rank]}/24", "dev", f"link{rank}")
            _run(*inside, "link", "set", f"link{rank}", "up")
            _run(*inside, "link", "set", "lo", "up")
            _run("tc", "-n", name, *_tbf(f"link{rank}", 1e9))

    def run(self, command: Sequence[str], timeout_seconds: float) -> None:
        """Run a command as rank 0 and as rank 1, each on a host and a core of its own, until both have ended.

        A rank knows from its environment who it is, as `torch.distributed` does.
        """
        cores = sorted(os.sched_getaffinity(0))
        port = _free_port() if self._is_loopback else 29500
        for rank, name in enumerate(self._names):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1" if self._is_loopback else _ADDRESSES[0],
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo" if self._is_loopback else f"link{rank}",
                "OMP_NUM_THREADS": "1",
                _PARENT: str(os.getpid()),
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # hosts without a name are no news
            }
            place = [] if self._is_loopback else ["ip", "netns", "exec", name]
            # A session of its own: an interrupt from the terminal comes to this process alone, which ends the others.
            process = subprocess.Popen([*place, *command], env=environment, start_new_session=True)
            os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})
            self._processes.append(process)
        end = time.monotonic() + timeout_seconds
        try:
            while any(process.poll() is None for process in self._processes):
                codes = [process.poll() for process in self._processes]
                if any(codes) or time.monotonic() > end:  # one that has failed leaves the other waiting
                    time.sleep(_POLL_SECONDS)
                    break
                time.sleep(_POLL_SECONDS)
            codes = [process.poll() for process in self._processes]
        finally:
            self._stop()
        if codes != [0, 0]:
            raise SystemExit(f"the ranks ended with {codes}; expected 0 from both (None: it did not end in time)")

    def _stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes.clear()

    def _remove(self) -> None:
        self._stop()
        if not self._is_loopback and shutil.which("ip"):
            for name in self._names:
                # Its side of the link goes with it.
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()


def _leave(number: int, frame: FrameType | None) -> None:
    """As after an interrupt: `with` blocks are left in order."""
    raise SystemExit(128 + number)


def _remove_leftovers() -> None:
    """Of a run that was killed before it could remove its own."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _tbf(device: str, bits_per_second: float) -> list[str]:
    """What tc has to do. A larger burst lets small messages through unslowed, a smaller one costs throughput."""
    rate = f"{bits_per_second:.0f}bit"
    return ["qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "400ms"]


# On a host ---------------------------------------------------------------------------------------------------


def shape(bits_per_second: float | None) -> None:
    """Slow this rank's side of the link down; None lets it be as fast as it is."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    if device == "lo":
        return
    if bits_per_second is None:
        subprocess.run(["tc", "qdisc", "delete", "dev", device, "root"], check=False, capture_output=True)
    else:
        subprocess.run(["tc", *_tbf(device, bits_per_second)], check=True)


def end_with_parent() -> None:
    """End this process if the one that started it ends, so that none is left behind."""
    parent = int(os.environ[_PARENT])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        print("the parent process is gone", file=sys.stderr)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
