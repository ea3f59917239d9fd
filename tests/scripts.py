"""Scripts in processes of their own, without the seconds that each would need to import Lightning.

::

    tests ── request ──> a process that has imported it ── fork ──> one that waits ── fork ──> script, or each rank
      ^                                                                   │
      └───────────────── number of the process, then exit code ───────────┘

The process that has imported it is started with the first script, is no child of the tests, which look for children
that were left behind, and ends with them.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import lightning_gpufeed

ROOT = Path(lightning_gpufeed.__file__).parents[1]
START_SECONDS = 100.0
"""How long all that is imported may take on a machine that is busy with others."""

# Each script runs to the end of the interpreter, as it would alone. Rank numbers are set as Lightning finds them when
# it is imported by a rank.
_SERVE = """
import os
if os.fork():
    os._exit(0)
os.setsid()
import contextlib, gc, json, runpy, signal, socket, sys
import lightning.pytorch, lightning_gpufeed
with contextlib.suppress(ImportError):
    import s3fs  # with its first checkpoint Lightning imports it, which takes every script half a second
from lightning.fabric.utilities.rank_zero import rank_zero_only
gc.collect()
gc.freeze()  # no script has to look through what was imported
gc.set_threshold(10_000)  # nor all the time through what it has itself
requests = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to ask for how they ended
while True:
    text, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 1)
    if not text:  # who asked has ended
        os._exit(0)
    while not text.endswith(b"\\n"):
        text += requests.recv(1 << 16)
    if os.fork() == 0:
        break
    os.close(descriptors[0])
requests.close()
os.setsid()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
[said] = descriptors
os.write(said, f"{os.getpid()}\\n".encode())
request = json.loads(text)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
children = []
for rank, outputs in enumerate(request["outputs"]):
    child = os.fork()
    if child == 0:
        os.close(said)
        for descriptor, path in enumerate(outputs, start=1):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, descriptor)
            os.close(file)
        if request["are_ranks"]:
            os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
            rank_zero_only.rank = rank
        sys.argv = request["command"]
        sys.path[0] = os.path.dirname(sys.argv[0])
        break
    children.append(child)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.write(said, str(next(filter(None, codes), 0)).encode())
    os._exit(0)
kept = runpy.run_path(sys.argv[0], run_name="__main__")  # to the end, as a script keeps what it has made
"""


class RunningScript:
    """A script in a process of its own, or one in several.

    Args:
        said: From the process that waits for them: its number at once, the exit code at the end.
    """

    def __init__(self, said: socket.socket) -> None:
        self._said = said
        said.settimeout(START_SECONDS)
        self._text = b""
        while b"\n" not in self._text:
            part = said.recv(100)
            if not part:
                raise AssertionError(f"no script can be started:\n{_server_log()}")
            self._text += part
        number, _, self._text = self._text.partition(b"\n")
        self._group = int(number)
        self._has_ended = False

    def wait(self, timeout: float) -> int:
        """Wait until all have ended.

        Args:
            timeout: In seconds.

        Returns:
            The exit code of the first that failed, or 0; minus the signal that killed it.

        Raises:
            TimeoutError: They go on.
        """
        while not self._has_ended:
            self._said.settimeout(timeout)
            part = self._said.recv(100)
            self._text += part
            self._has_ended = not part
        self._said.close()
        return int(self._text or -signal.SIGKILL)

    def kill(self) -> None:
        """End them and all they started, where they have not ended."""
        if not self._has_ended:
            os.killpg(self._group, signal.SIGKILL)
            self.wait(START_SECONDS)


_SERVER: list[tuple[socket.socket, IO[bytes]]] = []
"""The way to the process that has imported what takes long, and what it printed; nothing before the first script."""


def _server() -> socket.socket:
    """Start that process once."""
    if not _SERVER:
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - open until the interpreter ends
        command = [sys.executable, "-c", _SERVE, str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, pass_fds=[theirs.fileno()], check=True
        )
        theirs.close()
        atexit.register(log.close)
        atexit.register(ours.close)
        _SERVER.append((ours, log))
    return _SERVER[0][0]


def _server_log() -> str:
    """What that process printed."""
    _, log = _SERVER[0]
    log.seek(0)
    return log.read().decode(errors="replace")


def start_script(
    command: list[str],
    *,
    folder: Path,
    environment: dict[str, str],
    outputs: list[list[Path]],
    are_ranks: bool = False,
) -> RunningScript:
    """Run a Python script in processes of its own that have imported Lightning and this package, and nothing else.

    Args:
        command: The script and its arguments.
        folder: Where it runs.
        environment: All its variables.
        outputs: For each process, where its standard output and its errors go; they are appended.
        are_ranks: Whether the processes are ranks in this order.

    Returns:
        What runs.
    """
    request: dict[str, Any] = {
        "command": command,
        "folder": str(folder),
        "environment": environment,
        "outputs": [[str(path) for path in paths] for paths in outputs],
        "are_ranks": are_ranks,
    }
    server = _server()
    ours, theirs = socket.socketpair()
    with theirs:
        first, rest = (text := json.dumps(request).encode() + b"\n")[:1], text[1:]
        socket.send_fds(server, [first], [theirs.fileno()])
        server.sendall(rest)
    return RunningScript(ours)
