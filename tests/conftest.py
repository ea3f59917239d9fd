"""Around every test: nothing is left behind, and every test starts from the same state.

::

    before  same seeds; a list of threads, processes, HDF5 files, environment, directory
    after   process group destroyed, directory, environment and torch settings put back
            a new thread, process or open HDF5 file, a moved directory, a changed variable: the test fails
            garbage collected

Tests marked `gpu` are skipped where there is no CUDA device.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import psutil
import pytest
import torch

GRACE_SECONDS = 10.0
"""How long a thread or process that was told to stop may take to do so, on a machine that is busy with others."""

H5_NAME = re.compile(rb"\.(h5|hdf5)\b")

SET_BY_LIBRARIES = frozenset(
    {
        "PYTEST_CURRENT_TEST",  # pytest: another value in each phase of a test
        "PL_GLOBAL_SEED",  # lightning.seed_everything ...
        "PL_SEED_WORKERS",
        "MASTER_ADDR",  # Lightning's launchers: where a rank finds its peers ...
        "MASTER_PORT",
        "WORLD_SIZE",
        "NODE_RANK",
        "LOCAL_RANK",
        "OMP_NUM_THREADS",  # ... and how it shares the cores with them
        "CUBLAS_WORKSPACE_CONFIG",  # Trainer(deterministic=True)
        "CUDA_DEVICE_ORDER",  # Lightning's CUDA accelerator
        "PYTORCH_NVML_BASED_CUDA_CHECK",  # importing lightning.fabric
        "TORCHINDUCTOR_CACHE_DIR",  # importing torch's compiler
    }
)
"""Variables that a library sets by itself: put back, but no fault of the test."""

FEW_BUT_LONG = frozenset(
    {"test_progress.py", "test_conftest.py", "test_classify_real.py", "test_loader_facts.py", "test_reader_process.py"}
)
"""Files that take longer than so few tests would let one expect, for they start programs."""

CALL_FAILED = pytest.StashKey[bool]()
NO_H5_FILE = pytest.StashKey[int | None]()
"""How many pages of memory this process had mapped when the test before left no file open; nothing if that is not so,
or something has run since that could have opened one: it takes a while to look."""

# With tensors as small as those of the tests, the cores would only wait for each other.
torch.set_num_threads(1)

# The first example of a property pays for imports and page faults, so a deadline per example would fail at
# random; pytest-timeout bounds the whole test. On CI the examples are the same in every run; elsewhere each run has
# others, so that half as many as usual are enough.
hypothesis.settings.register_profile("gpufeed", deadline=None, max_examples=50, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("gpufeed")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a CUDA device where there is none."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA")


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest-xdist keep the order of the files that is made here."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """Have every second process begin with the last file: what one has compiled, the other finds.

    That pytest rewrites what is asserted takes half of the time of a first look at all files.
    """
    report = yield
    if isinstance(collector, pytest.Dir) and os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        report.result = report.result[::-1]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that may take long, and end with those of few tests, so that two processes end together.

    What starts processes of its own has few tests that take long, and mostly a limit of its own.
    """
    if not hasattr(config, "workerinput"):  # one process runs them all
        return
    counts = Counter(item.path for item in items)
    long = {
        item.path
        for item in items
        if item.path.name in FEW_BUT_LONG or any(map(item.get_closest_marker, ("timeout", "slow")))
    }
    items.sort(key=lambda item: (item.path not in long, -counts[item.path], str(item.path)))


def pytest_collection_finish() -> None:
    """Begin with what was imported, and nothing to collect."""
    _collect_garbage()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Collect what a test left for the garbage collector, once its fixtures are gone too."""
    result = yield
    _collect_garbage()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note whether the test itself failed: its traceback then keeps local variables alive."""
    report = yield
    if call.when == "call":
        item.stash[CALL_FAILED] = report.failed
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """Look again for open files that are there before a test, where it shares a fixture with others."""
    if fixturedef.scope != "function":
        request.session.stash[NO_H5_FILE] = None


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest, _same_start: None) -> Iterator[None]:
    """Fail a test that leaves a thread, a process or an open HDF5 file, or moves the whole program."""
    stash = request.session.stash
    num_pages = stash.get(NO_H5_FILE, None)
    h5_files = _open_h5_files() if num_pages is None else set()
    stash[NO_H5_FILE] = None
    threads, processes = set(threading.enumerate()), _child_processes()
    directory, environment = Path.cwd(), dict(os.environ)
    yield
    _destroy_process_group()
    left = [
        *_leaked_threads(threads),
        *_leaked_processes(processes),
        *_restored_directory(directory),
        *_restored_environment(environment),
    ]
    # The traceback of a failed test holds what its frames held, an open file too: that is no leak.
    if not request.node.stash.get(CALL_FAILED, False):
        pages_now = _num_mapped_pages()
        # Most tests map as much as the one before, so none of it is a file that was mapped meanwhile.
        open_now = _h5_descriptors() if num_pages == pages_now else _open_h5_files()
        stash[NO_H5_FILE] = None if open_now else pages_now
        left += _leaked_h5_files(h5_files, open_now)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seed every generator, and put torch's global settings back afterwards."""
    random.seed(0)
    np.random.seed(0)  # the global generator is what a test could depend on unawares
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # seeding devices that are not there takes a millisecond, for each one's traceback is kept
        torch.default_generator.manual_seed(0)
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(True)
    # Asked first, because setting it imports torch's compiler, which takes a second.
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


def _collect_garbage() -> None:
    """Collect garbage, and keep all that is left out of further rounds.

    Out of memory, the package collects garbage itself: hundreds of times in these tests. Each time that would look
    through everything that was ever imported, and through what libraries keep of every test.
    """
    gc.collect()
    gc.freeze()


def _destroy_process_group() -> None:
    """End a process group that a strategy opened in this process; Lightning leaves it to interpreter exit."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _leaked_threads(before: set[threading.Thread]) -> list[str]:
    """Name the threads that are new and do not end by themselves."""
    deadline = time.monotonic() + GRACE_SECONDS
    new = [thread for thread in threading.enumerate() if thread not in before and not _is_of_library(thread)]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [f"thread {thread.name!r} (daemon={thread.daemon})" for thread in new if thread.is_alive()]


def _is_of_library(thread: threading.Thread) -> bool:
    """Tell the threads that a library keeps for its own ends, out of a test's reach."""
    # A C++ thread (autograd's) that once ran a Python hook: not started by Python, cannot be joined.
    if isinstance(thread, threading._DummyThread):
        return True
    # tqdm's monitor of stalled bars, one per process; Lightning's progress bar starts it.
    if type(thread).__module__ == "tqdm._monitor":
        return True
    # Lightning's watch over the ranks it started: ends by itself at its next look, every five seconds.
    if type(thread).__name__ == "_ChildProcessObserver":
        return True
    # fsspec's loop for stores, and the threads in which it looks up names: one per process, for ever.
    if thread.name == "fsspecIO" or thread.name.startswith("asyncio_"):
        return True
    # multiprocessing's server for file descriptors of tensors that were sent to another process.
    sharer = sys.modules.get("multiprocessing.resource_sharer")
    return sharer is not None and thread is sharer._resource_sharer._thread


def _child_processes() -> set[psutil.Process]:
    """Give the running children, without those that multiprocessing keeps until the interpreter ends."""
    multiprocessing.active_children()  # collects the exit status of those that have ended
    if _has_no_child():
        return set()
    helpers = set()
    if tracker := sys.modules.get("multiprocessing.resource_tracker"):
        helpers.add(tracker._resource_tracker._pid)
    if server := sys.modules.get("multiprocessing.forkserver"):
        helpers.add(server._forkserver._forkserver_pid)
    return {child for child in psutil.Process().children(recursive=True) if child.pid not in helpers}


def _has_no_child() -> bool:
    """Tell in microseconds what is true for most tests; psutil looks through all processes of the machine."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # collects nothing
    except ChildProcessError:
        return True
    except AttributeError:  # not on this system
        return False
    return False


def _leaked_processes(before: set[psutil.Process]) -> list[str]:
    """Name the child processes that are new and do not end by themselves, and kill them."""
    _, alive = psutil.wait_procs(_child_processes() - before, timeout=GRACE_SECONDS)
    left = []
    for process in alive:
        try:
            left.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.NoSuchProcess:  # ended just now, after the time it was given
            left.append(f"process {process.pid}, which ended after more than {GRACE_SECONDS} s")
    psutil.wait_procs(alive, timeout=GRACE_SECONDS)
    return left


def _open_h5_files() -> set[str]:
    """Give the HDF5 files that are open or mapped, as `descriptor -> path` and `mapping of path`."""
    return _h5_descriptors() | _mapped_h5_files()


def _h5_descriptors() -> set[str]:
    """Give the HDF5 files that are open."""
    if not os.path.isdir("/proc/self/fd"):  # not Linux
        return set()
    found = set()
    for descriptor in os.listdir(b"/proc/self/fd"):
        try:
            target = os.readlink(b"/proc/self/fd/" + descriptor)
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if H5_NAME.search(target):
            found.add(f"descriptor {os.fsdecode(descriptor)} -> {os.fsdecode(target)}")
    return found


def _num_mapped_pages() -> int | None:
    """Tell in microseconds how much of memory is mapped."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[0])
    except FileNotFoundError:  # not Linux
        return None


def _mapped_h5_files() -> set[str]:
    """Give the HDF5 files that are mapped."""
    if not os.path.exists("/proc/self/maps"):  # not Linux
        return set()
    with open("/proc/self/maps", "rb", buffering=0) as file:
        maps = file.read()
    if not H5_NAME.search(maps):  # of most tests, and a line after the other takes a while
        return set()
    paths = [path for _, slash, path in (line.partition(b" /") for line in maps.splitlines()) if slash]
    return {f"mapping of /{os.fsdecode(path)}" for path in paths if H5_NAME.search(path)}


def _leaked_h5_files(before: set[str], now: set[str]) -> list[str]:
    """Name the HDF5 files that were opened or mapped and still are."""
    left = now - before
    if left:
        gc.collect()  # an exception that a test caught may hold a file in a reference cycle
        left = _open_h5_files() - before
    return [f"open HDF5 file: {name}" for name in sorted(left)]


def _restored_directory(before: Path) -> list[str]:
    """Go back to the directory of before and tell if the test had left it."""
    try:
        now = Path.cwd()
    except FileNotFoundError:
        now = Path("a directory that is gone")
    os.chdir(before)
    return [] if now == before else [f"current directory moved to {now}"]


def _restored_environment(before: dict[str, str]) -> list[str]:
    """Put the environment back and name the variables that no library is known to set."""
    now = dict(os.environ)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}" for name in changed if name not in SET_BY_LIBRARIES]
