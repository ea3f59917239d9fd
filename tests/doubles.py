"""Recording stand-ins, for the few places where a real part cannot show in which order things happened.

And real processes that may die or hang in the place of the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning_gpufeed
from tests.scripts import start_script

PACKAGE = Path(lightning_gpufeed.__file__).parent
WAIT_SECONDS = 60.0
"""How long a test waits for an event that has to come, before it fails."""


class EventLog:
    """What happened, in order, from all threads."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = threading.Condition()

    def add(self, event: str) -> None:
        """Note an event."""
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, event: str) -> None:
        """Wait until an event was noted."""
        self.wait_until(lambda: event in self.events)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something can be said of the events.

        Raises:
            AssertionError: It never could.
        """
        with self._changed:
            assert self._changed.wait_for(is_so, WAIT_SECONDS), self.events


class KeptList(list[Any]):
    """Notes of a test in a module: recovery puts back plain lists after a failed attempt, and none of another class."""


class KeptDict(dict[Any, Any]):
    """The same for a dict."""


class LoggedProducer:
    """Makes item i out of i, and notes when each begins and ends.

    Args:
        log: Where to note it.
        gates: Item number -> what the item waits for before it is made.
        errors: Item number -> what is raised in its place.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        gates: dict[int, threading.Event] | None = None,
        errors: dict[int, BaseException] | None = None,
    ) -> None:
        self.log = log
        self.gates = gates or {}
        self.errors = errors or {}

    def __call__(self, number: int) -> str:
        """Make one item."""
        self.log.add(f"begin {number}")
        if number in self.gates:
            assert self.gates[number].wait(WAIT_SECONDS)
        if number in self.errors:
            raise self.errors[number]
        self.log.add(f"end {number}")
        return f"item {number}"


def parking_condition(log: EventLog, thread_name: str) -> Callable[..., Any]:
    """A `threading.Condition` that notes when the thread of a name goes to sleep in it.

    With it a test knows that a thread has done all it can, without waiting some time and hoping.

    Args:
        log: Notes "parked" each time.
        thread_name: Of the thread to watch.

    Returns:
        A class to use in the place of `threading.Condition`.
    """

    class ParkingCondition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread().name == thread_name:
                log.add("parked")
            return super().wait(timeout)

    return ParkingCondition


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, or minus the signal that killed it, and all it printed."""

    code: int
    text: str

    @property
    def last_line(self) -> str:
        """The end of what it printed: of an exception, its name and text."""
        return (self.text.splitlines() or [""])[-1]


# Everything is imported once; then each case runs in a fork of its own, to the end of the interpreter, and may die as
# it likes.
_RUN_FORKED = """
import importlib.util, json, os, signal, sys
from pathlib import Path
# Every folder of the path is looked into now: a case may have no descriptor left to do so.
importlib.util.find_spec("no_such_module")
folder = Path.cwd()
setup, cases = json.loads((folder / "cases.json").read_text())
scope = {"__name__": "__main__"}
exec(setup, scope)
ended = {}
for name, code in cases.items():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        signal.alarm(int(sys.argv[1]))
        break
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text
else:
    code = "(folder / 'ended.json').write_text(json.dumps(ended))"
exec(compile(code, "case", "exec"), globals() if child else scope)
"""


def run_forked(setup: str, cases: dict[str, str]) -> dict[str, Ended]:
    """Run pieces of Python that may kill their process, or hang, each in a process of its own.

    Args:
        setup: Run once before all; imports belong here. No thread may be started in it.
        cases: Name -> code that runs after it, to the end of the interpreter.

    Returns:
        Name -> how it ended; a case that hangs is killed and has minus SIGALRM as its code.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run_forked.py").write_text(_RUN_FORKED)
        (folder / "cases.json").write_text(json.dumps([setup, cases]))
        log = folder / "log"
        running = start_script(
            [str(folder / "run_forked.py"), str(int(WAIT_SECONDS))],
            folder=folder,
            environment={**os.environ},
            outputs=[[log, log]],
        )
        try:
            code = running.wait(100)
        finally:
            running.kill()
        assert code == 0, log.read_text()
        return {name: Ended(*ended) for name, ended in json.loads((folder / "ended.json").read_text()).items()}


def thin_package(folder: Path) -> Path:
    """Make the package importable without its root module, which imports Lightning and takes seconds.

    Args:
        folder: Is made.

    Returns:
        The folder, to be put on the `PYTHONPATH` of a program.
    """
    root = folder / PACKAGE.name
    root.mkdir(parents=True)
    (root / "__init__.py").write_text(
        f"__path__ = [{str(PACKAGE)!r}]\n__version__ = {lightning_gpufeed.__version__!r}\n"
    )
    return folder


def free_port() -> int:
    """A port on which nobody listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(worker: Path, plan: dict[str, Any], folder: Path, *, num_processes: int, limit_seconds: float) -> str:
    """Run a script as the ranks of one process group, on real processes; end all of them in any case.

    Args:
        worker: The script; it is given the path of the plan.
        plan: Written as JSON.
        folder: Where the plan and the logs go, and where they run.
        num_processes: How many to start: one for each rank; 1 leaves it to the script to start the others.
        limit_seconds: After which they are killed.

    Returns:
        What they printed.
    """
    (folder / "plan.json").write_text(json.dumps(plan))
    logs = [folder / f"log.{rank}" for rank in range(num_processes)]
    environment = _of_ranks()
    running = start_script(
        [str(worker), str(folder / "plan.json")],
        folder=folder,
        environment=environment,
        outputs=[[log, log] for log in logs],
        are_ranks=num_processes > 1 or plan["world_size"] == 1,
    )
    try:
        running.wait(limit_seconds)
    except TimeoutError:
        pass  # what they did not write is missed by the test, which shows the logs
    finally:
        running.kill()  # all ranks and what they started
    return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs if log.exists())


def run_fresh_ranks(worker: Path, plan: dict[str, Any], folder: Path, *, num_ranks: int, limit_seconds: float) -> str:
    """Likewise, as interpreters of their own: a fork has memory that others have used and left, where it is counted.

    Args:
        worker: The script; it is given the path of the plan.
        plan: Written as JSON.
        folder: Where the plan and the logs go, and where they run.
        num_ranks: How many to start.
        limit_seconds: After which they are killed.

    Returns:
        What they printed.
    """
    (folder / "plan.json").write_text(json.dumps(plan))
    environment, processes = _of_ranks(), []
    for rank in range(num_ranks):
        with (folder / f"log.{rank}").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(worker), str(folder / "plan.json")],
                    cwd=folder,
                    env={**environment, "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    end = time.monotonic() + limit_seconds
    try:
        for process in processes:
            process.wait(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # what they did not write is missed by the test, which shows the logs
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return "\n".join(f"--- log.{rank}\n{(folder / f'log.{rank}').read_text()}" for rank in range(num_ranks))


def _of_ranks() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(PACKAGE.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
