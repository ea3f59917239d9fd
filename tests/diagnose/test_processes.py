"""What the kernel counts, against what processes say they did: each child tells its own use by `getrusage`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.diagnose import processes
from lightning_gpufeed.diagnose.counters import Usage
from lightning_gpufeed.diagnose.processes import UsageWatch, read_process, read_thread
from tests.doubles import WAIT_SECONDS, run_forked

BURN_SECONDS = 0.2
SLACK_SECONDS = 0.03
"""User and system time are told in ticks of 10 ms each; and what a child does to take an order and answer it."""
MIB = 2**20

# Takes one order at a time, by a single read, and answers with what it used for it: user and system seconds.
CHILD = """
import mmap, os, resource, sys, threading, time

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))

def burn_in_kernel(seconds):
    end = time.thread_time() + seconds
    zeros, buffer = os.open("/dev/zero", os.O_RDONLY), bytearray(2**20)
    while time.thread_time() < end:
        os.readv(zeros, [buffer])
    os.close(zeros)

def burn_in_thread(seconds):
    thread = threading.Thread(target=burn, args=(seconds,))
    thread.start()
    thread.join()

def read(number, size):
    zeros = os.open("/dev/zero", os.O_RDONLY)
    for _ in range(int(number)):
        os.read(zeros, int(size))
    os.close(zeros)

def read_by_child(number, size):
    child = os.fork()
    if child == 0:
        read(number, size)
        os._exit(0)
    os.waitpid(child, 0)

def touch(num_pages):
    memory = mmap.mmap(-1, int(num_pages) * mmap.PAGESIZE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[::mmap.PAGESIZE] = bytes(int(num_pages))

def rename(name):
    with open("/proc/self/comm", "w") as file:
        file.write(name)

os.write(1, b"ready\\n")
while order := os.read(0, 100).decode():
    name, *values = order.split("|")
    before = resource.getrusage(resource.RUSAGE_SELF)
    call = {"sleep": time.sleep}.get(name) or globals()[name]
    call(*(value if name == "rename" else float(value) for value in values))
    after = resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    os.write(1, f"{user} {system}\\n".encode())
"""


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for something of the operating system that nobody gives notice of."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Child:
    """A process that does as it is told."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-E", "-c", CHILD]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.pid = self._process.pid
        assert self._answer() == "ready"

    def begin(self, order: str) -> int:
        """Give an order; gives its length in bytes."""
        return os.write(self._process.stdin.fileno(), order.encode())

    def end(self) -> tuple[float, float]:
        """Wait until it is done; gives user and system seconds."""
        user, system = map(float, self._answer().split())
        return user, system

    def do(self, order: str) -> tuple[float, float]:
        self.begin(order)
        return self.end()

    def wait_for_rest(self) -> None:
        """Until it waits for the next order: the kernel counts the time in a queue once that is over."""
        wait_until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S")

    def _answer(self) -> str:
        return self._process.stdout.readline().decode().strip()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        self._process.wait(WAIT_SECONDS)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def start_child() -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def start() -> Child:
        children.append(Child())
        return children[-1]

    yield start
    for child in children:
        child.close()


def watched(child: Child, order: str) -> tuple[Usage, tuple[float, float]]:
    """What a watch sees of a child that carries out an order, and what the child says."""
    watch = UsageWatch()
    child.wait_for_rest()
    watch.sample([child.pid])
    told = child.do(order)
    watch.sample([child.pid])
    return watch.usage, told


def test_user_time_is_what_the_process_itself_says(start_child: Callable[[], Child]) -> None:
    usage, (user, system) = watched(start_child(), f"burn|{BURN_SECONDS}")
    assert usage.user_seconds == pytest.approx(user, abs=SLACK_SECONDS)
    assert usage.system_seconds == pytest.approx(system, abs=SLACK_SECONDS)
    assert usage.user_seconds > 0.8 * BURN_SECONDS


def test_system_time_is_told_apart_from_user_time(start_child: Callable[[], Child]) -> None:
    usage, (user, system) = watched(start_child(), f"burn_in_kernel|{BURN_SECONDS}")
    assert usage.user_seconds == pytest.approx(user, abs=SLACK_SECONDS)
    assert usage.system_seconds == pytest.approx(system, abs=SLACK_SECONDS)
    assert usage.system_seconds > usage.user_seconds


def test_time_on_a_core_and_waiting_for_one_fit_into_the_time_watched(start_child: Callable[[], Child]) -> None:
    usage, _ = watched(start_child(), f"burn|{BURN_SECONDS}")
    assert usage.queue_seconds is not None
    # The files are read one after another, and the kernel adds up a running thread's time only at a tick.
    assert usage.busy_seconds + usage.queue_seconds <= usage.wall_seconds + SLACK_SECONDS
    # Between two orders it does nothing: all of the time but the burning and waiting for a core is the hand-over.
    assert usage.busy_seconds >= BURN_SECONDS - SLACK_SECONDS


def test_a_sleeping_process_is_asleep(start_child: Callable[[], Child]) -> None:
    usage, _ = watched(start_child(), f"sleep|{BURN_SECONDS}")
    assert usage.wall_seconds >= BURN_SECONDS
    assert usage.busy_seconds < SLACK_SECONDS
    # It waits for a core once, when it wakes up: on a crowded machine that is some time, but not half of it.
    assert usage.asleep_seconds > 0.5 * usage.wall_seconds


def test_two_busy_processes_on_one_core_wait_for_each_other(start_child: Callable[[], Child]) -> None:
    pair = [start_child(), start_child()]
    core = min(os.sched_getaffinity(0))
    for child in pair:
        os.sched_setaffinity(child.pid, {core})
    watch = UsageWatch()
    watch.sample([child.pid for child in pair])
    for child in pair:
        child.begin(f"burn|{BURN_SECONDS}")
    for child in pair:
        child.end()
    watch.sample([child.pid for child in pair])
    assert watch.num_seen == 2
    assert watch.usage.busy_seconds == pytest.approx(2 * BURN_SECONDS, abs=2 * SLACK_SECONDS)
    # While one runs the other waits, so both together wait for nearly as long as both together run; the half of it
    # leaves room for one that was alone at its beginning and its end.
    assert watch.usage.queue_seconds > BURN_SECONDS
    assert watch.usage.wall_seconds > 2 * 2 * BURN_SECONDS - SLACK_SECONDS


@pytest.mark.parametrize(("number", "size"), [(1, 1), (7, 1000), (100, 150_528)])
def test_bytes_asked_for_are_counted_exactly(start_child: Callable[[], Child], number: int, size: int) -> None:
    child = start_child()
    watch = UsageWatch()
    watch.sample([child.pid])
    order_bytes = child.begin(f"read|{number}|{size}")
    child.end()
    watch.sample([child.pid])
    assert watch.usage.read_bytes == number * size + order_bytes


def test_pages_made_ready_are_counted(start_child: Callable[[], Child]) -> None:
    usage, _ = watched(start_child(), "touch|1000")
    # The interpreter itself touches a few.
    assert 1000 <= usage.minor_faults < 1200
    assert usage.major_faults is not None


def test_what_a_thread_used_that_has_ended_counts(start_child: Callable[[], Child]) -> None:
    usage, told = watched(start_child(), f"burn_in_thread|{BURN_SECONDS}")
    assert usage.busy_seconds == pytest.approx(sum(told), abs=SLACK_SECONDS)
    assert usage.busy_seconds > BURN_SECONDS - SLACK_SECONDS


def test_what_a_child_of_a_reader_read_counts_for_the_reader(start_child: Callable[[], Child]) -> None:
    usage, _ = watched(start_child(), f"read_by_child|10|{MIB}")
    assert usage.read_bytes >= 10 * MIB


def test_a_name_with_spaces_and_parentheses_does_not_shift_the_fields(start_child: Callable[[], Child]) -> None:
    child = start_child()
    child.do("rename|a) Z 1 (b) 2")
    assert Path(f"/proc/{child.pid}/comm").read_text() == "a) Z 1 (b) 2\n"
    usage, told = watched(child, f"burn|{BURN_SECONDS}")
    assert usage.busy_seconds == pytest.approx(sum(told), abs=SLACK_SECONDS)


def test_the_first_look_counts_nothing(start_child: Callable[[], Child]) -> None:
    child = start_child()
    child.do(f"burn|{BURN_SECONDS}")
    watch = UsageWatch()
    watch.sample([child.pid])
    assert watch.num_seen == 1
    assert watch.usage == Usage()
    assert read_process(child.pid).busy_seconds > BURN_SECONDS - SLACK_SECONDS


def test_after_a_reset_only_what_follows_counts_and_nothing_in_between_is_lost(
    start_child: Callable[[], Child],
) -> None:
    child = start_child()
    watch = UsageWatch()
    watch.sample([child.pid])
    child.do(f"read|10|{MIB}")
    watch.sample([child.pid])
    watch.reset()
    assert watch.usage == Usage()
    order_bytes = child.begin("read|1|5")
    child.end()
    watch.sample([child.pid])
    assert watch.usage.read_bytes == 5 + order_bytes


def test_a_reader_that_was_left_out_for_a_while_begins_anew(start_child: Callable[[], Child]) -> None:
    child = start_child()
    watch = UsageWatch()
    watch.sample([child.pid])
    watch.sample([])
    child.do(f"read|10|{MIB}")
    watch.sample([child.pid])
    assert watch.usage == Usage()


def test_a_reader_that_ended_keeps_its_sum_and_is_not_hidden(start_child: Callable[[], Child]) -> None:
    child, other = start_child(), start_child()
    both = [child.pid, other.pid]
    watch = UsageWatch()
    watch.sample(both)
    child.do(f"read|1|{MIB}")
    watch.sample(both)
    child.kill()
    child.wait()
    watch.sample(both)
    assert (watch.num_seen, watch.num_hidden) == (1, 0)
    assert watch.usage.read_bytes >= MIB
    assert read_process(child.pid) is None


def test_a_process_that_ended_and_was_not_waited_for_has_ended(start_child: Callable[[], Child]) -> None:
    child = start_child()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    watch = UsageWatch()
    watch.sample([child.pid])
    assert read_process(child.pid) is None
    assert (watch.num_seen, watch.num_hidden) == (0, 0)


def test_looking_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        UsageWatch().sample([os.getpid(), 1, 2**22 + 1], [threading.get_native_id(), 2**22 + 1])
    assert len(os.listdir("/proc/self/fd")) == before


RIGHTS = """
import os, sys
from lightning_gpufeed.diagnose import processes
from lightning_gpufeed.diagnose.processes import UsageWatch, read_process
"""
OF_ANOTHER_USER = """
pid = 1
if os.geteuid() == 0:
    pid = os.getppid()
    try:
        os.setgroups([])
        os.setuid(65534)
    except OSError:
        pid = None
if pid is None or os.stat(f"/proc/{pid}").st_uid == os.geteuid():
    print("no other user")
else:
    usage = read_process(pid)
    watch = UsageWatch()
    watch.sample([pid])
    watch.sample([pid])
    print(usage.read_bytes, usage.disk_bytes, usage.busy_seconds >= 0, watch.num_hidden, end=" ")
    print(watch.usage.read_bytes, end=" ")
    processes._PROC, sys.modules["psutil"] = "/none", None
    watch.sample([pid])
    print(watch.num_seen, watch.num_hidden)
"""


def test_of_another_users_process_only_the_bytes_are_unknown_and_without_proc_it_is_hidden() -> None:
    ended = run_forked(RIGHTS, {"other": OF_ANOTHER_USER})["other"]
    if ended.last_line == "no other user":
        pytest.skip("this system shows no process of another user")
    assert (ended.code, ended.last_line) == (0, "None None True 0 None 0 1")


# Threads -------------------------------------------------------------------------------------------------


class BusyThread:
    """A thread that uses a core for a while, and then waits to be let go."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._go, self._done, self._leave = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.thread_id = self._thread.native_id
        self.told = 0.0

    def _run(self) -> None:
        assert self._go.wait(WAIT_SECONDS)
        burn(self._seconds)
        self.told = time.thread_time()
        self._done.set()
        assert self._leave.wait(WAIT_SECONDS)

    def burn(self) -> None:
        self._go.set()
        assert self._done.wait(WAIT_SECONDS)

    def close(self) -> None:
        self._go.set()
        self._leave.set()
        self._thread.join()


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


@pytest.fixture
def busy_thread() -> Iterator[BusyThread]:
    thread = BusyThread(BURN_SECONDS)
    yield thread
    thread.close()


def test_a_thread_is_read_by_its_native_number(busy_thread: BusyThread) -> None:
    busy_thread.burn()
    assert read_thread(busy_thread.thread_id).busy_seconds == pytest.approx(busy_thread.told, abs=SLACK_SECONDS)
    busy_thread.close()
    # Python's thread is over a little earlier than that of the system.
    wait_until(lambda: read_thread(busy_thread.thread_id) is None)


def test_threads_and_processes_add_up(busy_thread: BusyThread, start_child: Callable[[], Child]) -> None:
    child = start_child()
    watch = UsageWatch()
    watch.sample([child.pid], [busy_thread.thread_id])
    busy_thread.burn()
    child.do(f"burn|{BURN_SECONDS}")
    watch.sample([child.pid], [busy_thread.thread_id])
    assert watch.num_seen == 2
    assert watch.usage.busy_seconds == pytest.approx(2 * BURN_SECONDS, abs=2 * SLACK_SECONDS)


def test_what_reading_threads_use_can_be_taken_off_what_the_process_uses(busy_thread: BusyThread) -> None:
    watch = UsageWatch(minus_threads=True)
    begin = time.monotonic()
    watch.sample([os.getpid()], [busy_thread.thread_id])
    before = time.process_time()
    busy_thread.burn()
    burn(BURN_SECONDS / 2)
    in_all = time.process_time() - before
    watch.sample([os.getpid()], [busy_thread.thread_id])
    elapsed = time.monotonic() - begin
    assert in_all > 1.4 * BURN_SECONDS
    assert watch.usage.busy_seconds == pytest.approx(in_all - busy_thread.told, abs=SLACK_SECONDS)
    # The time watched is that of the process, not less the thread's.
    assert watch.usage.wall_seconds == pytest.approx(elapsed, abs=SLACK_SECONDS)


def test_short_stretches_of_the_calling_thread_add_up_to_all_of_it() -> None:
    thread_id = threading.get_native_id()
    total, within = Usage(), 0.0
    first = time.thread_time()
    for _ in range(150):
        before, begin = read_thread(thread_id), time.thread_time()
        burn(0.001)
        os.urandom(MIB // 4)
        within += time.thread_time() - begin
        total += read_thread(thread_id) - before
    in_all = time.thread_time() - first
    # Each look is partly within a stretch and partly outside of it. `getrusage` cuts off below a microsecond.
    assert within - 150e-6 <= total.busy_seconds <= in_all + 150e-6


def test_what_ended_children_had_read_is_not_what_this_process_read() -> None:
    def rchar() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    watch = UsageWatch()
    child = Child()
    child.do(f"read|64|{MIB}")
    watch.sample([os.getpid()])
    before = rchar()
    child.close()
    assert rchar() - before > 64 * MIB  # the kernel adds it when a child was waited for
    watch.sample([os.getpid()])
    assert watch.usage.read_bytes < MIB


# Where /proc is another one, or none ---------------------------------------------------------------------


class Tree:
    """Files of a process as they lie in /proc."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "self").mkdir()

    def write(
        self,
        pid: int,
        *,
        name: bytes = b"python",
        user: int = 0,
        system: int = 0,
        start: int = 1,
        schedules: dict[int, str] | None = None,
        io: tuple[int, int] | None = None,
    ) -> None:
        folder = self.folder / str(pid)
        folder.mkdir(exist_ok=True)
        fields = [b"S", *[b"0"] * 10, b"%d" % user, b"%d" % system, *[b"0"] * 6, b"%d" % start, *[b"0"] * 30]
        (folder / "stat").write_bytes(b"%d (%s) %s\n" % (pid, name, b" ".join(fields)))
        for thread, schedule in (schedules or {}).items():
            (folder / "task" / str(thread)).mkdir(parents=True, exist_ok=True)
            (folder / "task" / str(thread) / "schedstat").write_text(schedule)
        if io is not None:
            (folder / "io").write_text(f"rchar: {io[0]}\nwchar: 3\nread_bytes: {io[1]}\nwrite_bytes: 4\n")


@contextmanager
def tree_in(folder: Path) -> Iterator[Tree]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_PROC", str(folder))
        yield Tree(folder)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    with tree_in(tmp_path) as tree:
        yield tree


OTHER = 2**22 + 7
"""No process of this machine has this number: it is above the most that Linux gives."""


def test_a_number_that_another_process_got_meanwhile_counts_as_new(tree: Tree) -> None:
    watch = UsageWatch()
    tree.write(OTHER, user=100, start=5, io=(1000, 0))
    watch.sample([OTHER])
    tree.write(OTHER, user=300, start=6, io=(9000, 0))
    watch.sample([OTHER])
    assert watch.usage == Usage()
    tree.write(OTHER, user=310, start=6, io=(9001, 0))
    watch.sample([OTHER])
    assert watch.usage.read_bytes == 1
    assert watch.usage.user_seconds == pytest.approx(10 / os.sysconf("SC_CLK_TCK"))


def test_without_the_schedulers_counts_the_ticks_count_and_waiting_is_unknown(tree: Tree) -> None:
    tree.write(OTHER, user=20, system=10)
    usage = read_process(OTHER)
    assert usage.busy_seconds == pytest.approx(30 / os.sysconf("SC_CLK_TCK"))
    assert (usage.queue_seconds, usage.read_bytes, usage.disk_bytes) == (None, None, None)


def test_zeros_of_a_kernel_that_keeps_no_schedulers_counts_are_not_believed(tree: Tree) -> None:
    tree.write(OTHER, user=20, schedules={OTHER: "0 0 0\n"})
    assert read_process(OTHER).queue_seconds is None
    tree.write(OTHER, user=0, schedules={OTHER: "0 0 0\n"})
    assert read_process(OTHER).queue_seconds == 0  # it has not run yet


def test_the_schedulers_counts_are_the_finer_ones_and_of_all_threads(tree: Tree) -> None:
    tree.write(OTHER, user=3, system=1, schedules={OTHER: "30000001 5 1\n", OTHER + 1: "14000000 7 1\n"})
    usage = read_process(OTHER)
    assert usage.busy_seconds == pytest.approx(0.044000001)
    assert usage.system_seconds == pytest.approx(0.044000001 / 4)
    assert usage.queue_seconds == pytest.approx(12e-9)


def test_a_thread_that_ends_takes_none_of_the_others_waiting_with_it(tree: Tree) -> None:
    watch = UsageWatch()
    tree.write(OTHER, user=1, schedules={OTHER: "1 1000 1", OTHER + 1: "1 5000000 1"})
    watch.sample([OTHER])
    (tree.folder / str(OTHER) / "task" / str(OTHER + 1) / "schedstat").unlink()
    (tree.folder / str(OTHER) / "task" / str(OTHER + 1)).rmdir()
    tree.write(OTHER, user=1, schedules={OTHER: "1 1200 1"})
    watch.sample([OTHER])
    assert watch.usage.queue_seconds == pytest.approx(200e-9)


def test_what_is_kept_back_is_hidden_and_what_is_gone_is_not(tree: Tree) -> None:
    watch = UsageWatch()
    watch.sample([os.getpid(), OTHER])  # the first one runs, and this tree does not show it
    assert (watch.num_seen, watch.num_hidden) == (0, 1)
    assert read_process(os.getpid()) is None
    assert watch.usage == Usage()


def test_a_reader_whose_bytes_are_unknown_makes_their_sum_unknown_and_nothing_else(tree: Tree) -> None:
    watch = UsageWatch()
    for user in (1, 4):
        tree.write(OTHER, user=user)
        tree.write(OTHER + 1, user=2 * user, io=(user, user))
        watch.sample([OTHER, OTHER + 1])
    assert watch.usage.read_bytes is None
    assert watch.usage.user_seconds == pytest.approx(9 / os.sysconf("SC_CLK_TCK"))


def test_without_proc_psutil_tells_what_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_child: Callable[[], Child]
) -> None:
    monkeypatch.setattr(processes, "_PROC", str(tmp_path))
    child = start_child()
    watch = UsageWatch()
    watch.sample([child.pid, OTHER], [threading.get_native_id()])
    user, system = child.do(f"burn|{BURN_SECONDS}")
    watch.sample([child.pid, OTHER], [threading.get_native_id()])
    assert watch.usage.user_seconds == pytest.approx(user, abs=SLACK_SECONDS)
    assert watch.usage.system_seconds == pytest.approx(system, abs=SLACK_SECONDS)
    assert (watch.usage.queue_seconds, watch.usage.minor_faults, watch.usage.major_faults) == (None, None, None)
    assert (watch.num_seen, watch.num_hidden) == (1, 1)  # of threads it does not tell
    child.kill()
    child.wait()
    assert read_process(child.pid) is None


def test_without_proc_and_psutil_nothing_is_known_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_PROC", str(tmp_path))
    monkeypatch.setitem(sys.modules, "psutil", None)  # importing it fails
    watch = UsageWatch()
    watch.sample([os.getpid()], [threading.get_native_id()])
    assert (watch.num_seen, watch.num_hidden) == (0, 2)
    assert watch.usage == Usage()
    assert read_process(os.getpid()) is None
    assert read_thread(threading.get_native_id()) is None


TICKS = st.integers(0, 2**40)
FEWER = settings(max_examples=40)
"""Each example writes files."""


@FEWER
@given(name=st.binary(max_size=15), user=TICKS, system=TICKS, start=TICKS, io=st.tuples(TICKS, TICKS))
def test_whatever_a_program_is_called_its_counts_are_read(
    name: bytes, user: int, system: int, start: int, io: tuple[int, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder, tree_in(Path(folder)) as tree:
        tree.write(OTHER, name=name, user=user, system=system, start=start, io=io)
        usage = read_process(OTHER)
    ticks = os.sysconf("SC_CLK_TCK")
    assert usage.user_seconds == pytest.approx(user / ticks)
    assert usage.system_seconds == pytest.approx(system / ticks, abs=1e-6 * user)
    assert (usage.read_bytes, usage.disk_bytes) == io


@FEWER
@given(stat=st.binary(max_size=60), schedule=st.binary(max_size=30), io=st.binary(max_size=30))
def test_files_of_any_content_make_nothing_fail(stat: bytes, schedule: bytes, io: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, tree_in(Path(folder)) as tree:
        tree.write(OTHER, schedules={OTHER: ""})
        (tree.folder / str(OTHER) / "task" / str(OTHER) / "schedstat").write_bytes(schedule)
        (tree.folder / str(OTHER) / "io").write_bytes(io)
        assert read_process(OTHER) is not None
        (tree.folder / str(OTHER) / "stat").write_bytes(stat)
        read_process(OTHER)


@FEWER
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 50_000_000)), min_size=1, max_size=8)
)
def test_however_often_one_looks_the_sum_is_the_same(steps: list[tuple[int, int, int]]) -> None:
    often, once = UsageWatch(), UsageWatch()
    with tempfile.TemporaryDirectory() as folder, tree_in(Path(folder)) as tree:
        user = system = queue = 0
        for number, step in enumerate([(0, 0, 0), *steps]):
            user, system, queue = user + step[0], system + step[1], queue + step[2]
            tree.write(OTHER, user=user, system=system, schedules={OTHER: f"0 {queue} 1"}, io=(queue, user))
            often.sample([OTHER])
            if number in (0, len(steps)):
                once.sample([OTHER])
    ticks = os.sysconf("SC_CLK_TCK")
    for usage in (often.usage, once.usage):
        assert usage.user_seconds == pytest.approx(user / ticks)
        assert usage.system_seconds == pytest.approx(system / ticks)
        assert usage.queue_seconds == pytest.approx(queue / 1e9)
        assert (usage.read_bytes, usage.disk_bytes) == (queue, user)
