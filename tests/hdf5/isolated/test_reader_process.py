"""Reading in another process: the same batches, and nothing left of that process however either side ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch

from lightning_gpufeed.device.feed import Feed
from lightning_gpufeed.device.memory import HostBufferPool
from lightning_gpufeed.device.shared_memory import NUM_REQUESTS, SharedBufferPool
from lightning_gpufeed.errors import FeedError, LayoutError
from lightning_gpufeed.hdf5.isolated import link as isolated_link
from lightning_gpufeed.hdf5.isolated.link import how_it_ended
from lightning_gpufeed.hdf5.isolated.reader_process import ReaderProcess
from lightning_gpufeed.hdf5.source import Batch, H5Source
from tests.contracts import as_bytes, exactly, index_cases
from tests.doubles import WAIT_SECONDS, thin_package
from tests.hdf5.isolated_sources import QUESTIONS, AskedSource, write_questions
from tests.scripts import ROOT

NUM_SAMPLES = 40


def write_samples(path: Path) -> Path:
    """Fields of every kind: uncompressed, compressed, small, empty, strings, numbers of varying length."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (NUM_SAMPLES, 3, 16, 16), np.uint8)
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", data=images, chunks=(8, 3, 16, 16))
        h5_file.create_dataset("masks", data=images[:, 0] > 99, chunks=(8, 16, 16), compression="gzip")
        h5_file["labels"] = np.arange(NUM_SAMPLES)
        h5_file["waves"] = (random.normal(size=(NUM_SAMPLES, 20)) + 1j).astype(np.complex64)
        h5_file["nothing"] = np.empty((NUM_SAMPLES, 0), np.float16)
        h5_file["names"] = [f"sample {number}" * (number % 3) for number in range(NUM_SAMPLES)]
        ragged = h5_file.create_dataset("ragged", (NUM_SAMPLES, 2), h5py.vlen_dtype(np.float32))
        for number in range(NUM_SAMPLES):
            ragged[number, 0] = random.normal(size=number % 5)
            ragged[number, 1] = random.normal(size=3)
    return path


def pool_for(source: H5Source, num_buffers: int = 4) -> SharedBufferPool:
    return SharedBufferPool(source.specs, 2 * NUM_SAMPLES, num_buffers)


def bytes_of(values: Any) -> Any:
    """A field of a batch as something that compares exactly."""
    if isinstance(values, list):
        return [bytes_of(value) for value in values]
    return (values.dtype, values.shape, as_bytes(values)) if isinstance(values, torch.Tensor) else values


def check_batch(batch: Batch, expected: Batch) -> None:
    assert list(batch) == list(expected)
    for name, values in expected.items():
        assert bytes_of(batch[name]) == bytes_of(values), name


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> H5Source:
    """Opened by the process alone."""
    return H5Source(write_samples(tmp_path_factory.mktemp("isolated") / "data.h5"))


@pytest.fixture(scope="module")
def expected(source: H5Source) -> Callable[[npt.NDArray[np.int64]], Batch]:
    """What the source reads itself, in this process."""
    every = source.read_new(np.arange(NUM_SAMPLES))
    source.close()

    def expected(indices: npt.NDArray[np.int64]) -> Batch:
        return {
            name: values[indices] if isinstance(values, torch.Tensor) else [values[index] for index in indices]
            for name, values in every.items()
        }

    return expected


@pytest.fixture(scope="module")
def readers(source: H5Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ReaderProcess]]:
    """Two processes for all tests: each takes as long to start as importing torch takes, so they start together."""
    questions = AskedSource(write_questions(tmp_path_factory.mktemp("asked") / "questions.h5"))
    readers = [ReaderProcess(one, pool_for(one)) for one in (source, questions)]
    yield readers
    for reader in readers:
        reader.close()


@pytest.fixture(scope="module")
def reader(readers: list[ReaderProcess]) -> ReaderProcess:
    """Reads samples."""
    readers[0].read(np.arange(1), readers[0].pool.acquire(1))
    return readers[0]


@pytest.fixture(scope="module")
def asked(readers: list[ReaderProcess]) -> ReaderProcess:
    """Answers questions."""
    ask(readers[1], "process")
    return readers[1]


def ask(reader: ReaderProcess, question: str) -> Any:
    indices = np.array([QUESTIONS.index(question)])
    batch = reader.read(indices, reader.pool.acquire(1))
    np.testing.assert_array_equal(batch["image"], np.arange(200)[None] + 200 * indices)
    return batch["question"][0]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_gone(process: int) -> None:
    """Wait for the end of a process that is no child of this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        handle = psutil.Process(process)
        wait_until(lambda: not handle.is_running() or handle.status() == psutil.STATUS_ZOMBIE)


# Batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", index_cases(1))
def test_a_batch_is_what_the_source_reads_itself(source, reader, expected, case):
    indices = index_cases(NUM_SAMPLES)[case]
    batch = reader.read(indices, reader.pool.acquire(len(indices)))
    check_batch(batch, expected(indices))
    places = [reader.pool.arena.offset_of(batch[name]) is not None for name in source.specs if batch[name].nbytes]
    assert all(places), "read straight into the memory that both share"


def test_tensors_of_any_memory_are_filled(source, reader, expected):
    indices = np.array([5, 3, 39, 3])
    out = HostBufferPool(source.specs, 4, 2).acquire(4)
    batch = reader.read(indices, out)
    check_batch(batch, expected(indices))
    assert all(batch[name] is out[name] for name in out)


def test_batches_that_are_kept_stay_as_they_are(reader, expected):
    kept = []
    for number in range(12):  # more than there are shared buffers
        indices = np.arange(number, number + 20)
        kept.append((reader.read(indices, reader.pool.acquire(20)), expected(indices)))
    for batch, wanted in kept:
        check_batch(batch, wanted)


def test_several_reads_may_be_begun_and_asked_for_in_any_order(reader, expected):
    wanted = [np.arange(number, number + 9) for number in range(2 * NUM_REQUESTS)]
    begun = [reader.begin(indices, reader.pool.acquire(9)) for indices in wanted]
    for number in [3, 0, *range(2 * NUM_REQUESTS)]:
        check_batch(begun[number].result(), expected(wanted[number]))


def test_a_read_that_nobody_asks_for_any_more_does_not_disturb_the_next(reader, expected):
    first = reader.pool.acquire(20)
    places = {name: tensor.data_ptr() for name, tensor in first.items() if tensor.nbytes}
    reader.begin(np.arange(20), first)
    del first
    second = reader.pool.acquire(20)
    assert all(second[name].data_ptr() != place for name, place in places.items()), "it is still being written to"
    check_batch(reader.read(np.arange(20, 40), second), expected(np.arange(20, 40)))


@pytest.mark.parametrize("num_ahead", [0, 1, NUM_REQUESTS - 1, NUM_REQUESTS + 1])
def test_batches_read_ahead_come_in_order(reader, expected, num_ahead):
    wanted = [np.arange(number, number + 3) for number in range(9)]
    asked_for: list[int] = []

    def each() -> Iterator[npt.NDArray[np.int64]]:
        for number, indices in enumerate(wanted):
            asked_for.append(number)
            yield indices

    for number, batch in enumerate(reader.read_each(each(), num_ahead)):
        check_batch(batch, expected(wanted[number]))
        assert len(asked_for) == min(number + num_ahead + 1, len(wanted))
    assert number == 8


def test_indices_may_be_of_another_type_and_strided(reader, expected):
    for indices in (np.arange(9, dtype=np.int32)[::2], np.arange(18)[::-3], [4, 2]):
        batch = reader.read(indices, reader.pool.acquire(len(indices)))
        check_batch(batch, expected(np.array(indices)))


def test_what_does_not_fit_is_refused(reader, expected):
    out = reader.pool.acquire(3)
    message = "81 samples asked of a reader whose buffers hold 80; make the pool with a larger most_rows."
    with pytest.raises(ValueError, match=exactly(message)):
        reader.read(np.arange(81), out)
    message = "out['images'] is (3, 3, 16, 16) of torch.uint8; expected (2, 3, 16, 16) of torch.uint8."
    with pytest.raises(ValueError, match=exactly(message)):
        reader.read(np.arange(2), out)
    message = "out['labels'] is (3,) of torch.int32; expected (3,) of torch.int64."
    with pytest.raises(ValueError, match=exactly(message)):
        reader.read(np.arange(3), {**out, "labels": out["labels"].int()})
    check_batch(reader.read(np.arange(3), out), expected(np.arange(3)))


def test_another_pool_may_take_the_place_of_the_first(source, reader, expected):
    before, reader.pool = reader.pool, pool_for(source, num_buffers=1)
    try:
        check_batch(reader.read(np.arange(7), reader.pool.acquire(7)), expected(np.arange(7)))
    finally:
        reader.pool = before
    check_batch(reader.read(np.arange(5), reader.pool.acquire(5)), expected(np.arange(5)))


def test_a_feed_reads_through_it_beside_a_thread_that_holds_the_interpreter_lock(reader, expected):
    is_over = threading.Event()

    def hold_the_lock() -> None:
        while not is_over.is_set():
            sum(range(1000))

    busy = threading.Thread(target=hold_the_lock)
    busy.start()
    try:
        wanted = [np.arange(number % 30, number % 30 + 10) for number in range(20)]
        batches = reader.read_each(wanted)
        feed = Feed(lambda _: next(batches), len(wanted))
        for indices, batch in zip(wanted, feed, strict=True):
            check_batch(batch, expected(indices))
    finally:
        is_over.set()
        busy.join()


# The process ---------------------------------------------------------------------------------------------


def test_the_process_imports_what_reading_needs_and_no_lightning(asked):
    modules = ask(asked, "modules")
    assert "lightning_gpufeed.hdf5.source" in modules
    unwanted = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "pytest"}
    assert unwanted.isdisjoint(modules)
    parts = {name.split(".")[1] for name in modules if name.startswith("lightning_gpufeed.")}
    assert parts == {"device", "errors", "hdf5"}


def test_the_process_works_on_one_core_away_from_the_gpu_and_from_the_terminal(asked):
    assert ask(asked, "threads") == 1
    assert ask(asked, "devices") == ""
    assert ask(asked, "group") == ask(asked, "process") != os.getpgid(0), "where Ctrl-C does not reach"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_that_the_whole_job_gets_does_not_end_the_process(asked, name):
    """A cluster warns every process of a job; the training goes on to save a checkpoint and needs its batches."""
    process = ask(asked, "process")
    os.kill(process, signal.Signals[name])
    assert ask(asked, "process") == process


def test_what_comes_next_is_told_to_the_source_in_the_process(asked):
    indices = np.arange(100_000)[::-1]
    asked.expect(indices, 77)
    assert ask(asked, "expected") == [77, *indices.tolist()]
    asked.expect(indices[:0])
    assert ask(asked, "expected") == [1]
    before = ask(asked, "descriptors")
    for number in (1, 2, 4):
        asked.expect(indices[:number])
    assert ask(asked, "descriptors") == before


def test_an_error_over_what_comes_next_is_the_next_reads(asked):
    asked.expect(np.arange(3))
    with pytest.raises(LayoutError) as caught:
        ask(asked, "process")
    assert str(caught.value) == "three are not expected"
    assert ask(asked, "process")


# Errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "kind", "text"),
    [
        ("FeedError", FeedError, "a sentence"),
        ("LayoutError", LayoutError, "a sentence"),
        ("KeyError", KeyError, "'missing'"),
        ("StrangeError", FeedError, "StrangeError: 1 and 2"),
    ],
)
def test_an_error_comes_back_with_its_own_type_and_text_and_the_process_goes_on(asked, question, kind, text):
    process = ask(asked, "process")
    with pytest.raises(kind) as caught:
        ask(asked, question)
    assert (type(caught.value), str(caught.value)) == (kind, text)
    [note] = caught.value.__notes__
    assert note.startswith("in the reader process:\nTraceback")
    assert ask(asked, "process") == process


def test_an_error_of_the_system_keeps_its_number_and_file(asked):
    with pytest.raises(FileNotFoundError, match="No such file") as caught:
        ask(asked, "FileNotFoundError")
    assert caught.value.errno == 2
    assert caught.value.filename.endswith("missing")


def test_an_error_that_would_arrive_with_another_text_is_told_as_it_was(asked):
    with pytest.raises(Exception, match="in process ") as caught:
        ask(asked, "OtherNumberError")
    assert str(caught.value) in (f"in process {ask(asked, 'process')}", f"in process {os.getpid()}")


def test_an_error_keeps_no_buffer(asked):
    free = {name: len(buffers) for name, buffers in asked.pool.arena.free.items()}
    with pytest.raises(FeedError, match="a sentence"):
        ask(asked, "FeedError")
    gc.collect()
    assert {name: len(buffers) for name, buffers in asked.pool.arena.free.items()} == free
    assert len(asked.pool.arena.free_requests) == NUM_REQUESTS


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "ended by itself with status 3; what it said went to the standard error output"),
        (None, "does not answer any more"),
        (
            -signal.SIGSEGV,
            "was ended by the signal SIGSEGV. That is a fault in a library. Read with isolate=False to see where it "
            "happens",
        ),
        (
            -200,
            "was ended by the signal number 200. That is a fault in a library. Read with isolate=False to see where "
            "it happens",
        ),
    ],
    ids=["status", "none", "fault", "unknown signal"],
)
def test_how_a_process_ended_is_told_in_words(code, text):
    assert how_it_ended(code) == text


# The end -------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_many_readers_closed_dropped_or_in_a_cycle(source):
    before = open_descriptors()
    processes = []
    for number in range(50):
        reader = ReaderProcess(source, pool_for(source))
        pending = reader.begin(np.arange(3), reader.pool.acquire(3))
        assert reader._link is not None
        processes.append(reader._link.popen)
        if number % 3 == 0:
            reader.close()
            reader.close()
            with pytest.raises(FeedError, match=exactly("the reader was closed before this batch was read.")):
                pending.result()
        elif number % 3 == 1:
            reader.itself = reader  # type: ignore[attr-defined]
        del reader, pending
    gc.collect()
    assert {process.returncode for process in processes} == {-signal.SIGKILL}, "ended, and asked how"
    del processes
    assert open_descriptors() == before


# What happens to the program, in a script without `if __name__ == "__main__"`. It prints what it is asked for.
SCRIPT = """
import os, sys
import numpy as np
from lightning_gpufeed.device.shared_memory import SharedBufferPool
from lightning_gpufeed.hdf5.isolated import link as isolated_link
from lightning_gpufeed.hdf5.isolated.reader_process import ReaderProcess
from lightning_gpufeed.hdf5.isolated.link import how_it_ended
from tests.hdf5.isolated_sources import QUESTIONS, AskedSource
print("script runs", flush=True)
source = AskedSource(sys.argv[1])
pool = SharedBufferPool(source.specs, 4, 2)
reader = ReaderProcess(source, pool)
def ask(question):
    return reader.read(np.array([QUESTIONS.index(question)]), pool.acquire(1))["question"][0]
is_begun = False
while True:
    try:
        if not is_begun:
            is_begun = True
            print(ask("process"), ask("main"), flush=True)
        line = sys.stdin.readline().strip()
        if line == "fork":
            if (child := os.fork()) == 0:
                print(ask("process"), flush=True)
                break  # and ends without closing anything
            os.waitpid(child, 0)
        elif line == "stay":
            if os.fork() == 0:  # with the connection to the reader process open
                os.read(int(sys.argv[2]), 1)
                os._exit(0)
        print(ask("wait" if line == "wait" else "process"), flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_the_process_ends_with_the_program_however_that_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    held, holding = os.pipe()
    path = [str(thin_package(tmp_path / "thin")), str(ROOT)]
    with subprocess.Popen(
        [sys.executable, str(script), str(write_questions(tmp_path / "questions.h5")), str(held)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=[held],
    ) as program:
        os.close(held)
        assert program.stdin is not None
        assert program.stdout is not None

        def tell(line: str) -> str:
            print(line, file=program.stdin, flush=True)
            return program.stdout.readline().strip()

        try:
            assert program.stdout.readline() == "script runs\n"
            reader, main = program.stdout.readline().split()
            assert main == "None", "the script did not run a second time"
            # Ctrl-C is for the program alone.
            os.killpg(program.pid, signal.SIGINT)
            assert program.stdout.readline() == "interrupted\n"
            assert tell("ask") == reader
            # A process that was forked off has another reader, which ends with it.
            other = tell("fork")
            assert other != reader
            assert program.stdout.readline().strip() == reader, "the first one's is as it was"
            wait_until_gone(int(other))
            # The program is killed while a process forked from it holds the connection, in a read that never ends.
            assert tell("stay") == reader
            print("wait", file=program.stdin, flush=True)
            wait_until((tmp_path / "questions.h5.reading").exists)
            program.kill()
            wait_until_gone(int(reader))
        finally:
            program.kill()
            os.close(holding)


# These end the processes that the tests before share: they stay the last ones.


def test_an_idle_process_ends_by_itself_when_the_reader_is_closed(reader, expected, monkeypatch):
    monkeypatch.setattr(isolated_link, "_GRACE_SECONDS", WAIT_SECONDS)  # on a machine that is busy with others
    check_batch(reader.read(np.arange(3), reader.pool.acquire(3)), expected(np.arange(3)))
    process = reader._link.popen
    reader.close()
    reader.close()
    assert process.returncode == 0


def test_closing_wakes_a_thread_that_waits_for_a_batch(asked):
    process = asked._link.popen
    pending = asked.begin(np.array([QUESTIONS.index("wait")]), asked.pool.acquire(1))
    ended: list[BaseException] = []

    def wait_for_it() -> None:
        try:
            pending.result()
        except FeedError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    wait_until(Path(asked._source.paths[0] + ".reading").exists)
    asked.close()
    waiting.join(WAIT_SECONDS)
    assert [str(error) for error in ended] == ["the reader was closed while it was reading."]
    assert process.returncode == -signal.SIGKILL, "one that reads is not waited for"


def test_a_process_that_is_killed_is_told_by_its_signal_and_the_next_read_starts_another(asked):
    ends = {
        "SIGKILL": "was ended by the signal SIGKILL. It was killed from outside; most often the system or the job's "
        "limit ran out of memory",
        "SIGBUS": "was ended by the signal SIGBUS. A file became shorter while it was mapped, or its disk failed. "
        "Write new data to another file and rename it",
    }
    for question, text in ends.items():
        begun = [
            asked.begin(np.array([QUESTIONS.index(one)]), asked.pool.acquire(1))
            for one in ("process", question, "process")
        ]
        assert begun[0].result()["question"] != [os.getpid()]
        for pending in begun[1:]:
            with pytest.raises(FeedError) as caught:
                pending.result()
            assert str(caught.value).startswith(f"the reader process {text}")
            assert str(caught.value).endswith(f"(files: {asked._source.paths[0]}).")
    assert len(asked.pool.arena.free_requests) == NUM_REQUESTS
