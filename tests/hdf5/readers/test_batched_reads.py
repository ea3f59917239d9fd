"""Lists of reads put exactly the files' bytes where they belong, by every backend, or say which one could not."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.hdf5 import residency
from lightning_gpufeed.hdf5.readers import batched_reads, read_calls, read_queues
from lightning_gpufeed.hdf5.readers.batched_reads import BatchedReads, ReadError
from tests.doubles import WAIT_SECONDS, run_forked

SIZE = 100_000
GARBAGE = 0xA5


def possible() -> list[str]:
    """The backends that this machine allows; preadv always is."""
    found = []
    for name in read_queues.QUEUES:
        try:
            BatchedReads(1, name).close()
        except OSError:
            continue
        found.append(name)
    return found


POSSIBLE = possible()


@pytest.fixture(params=list(read_queues.QUEUES))
def backend(request):
    if request.param not in POSSIBLE:
        pytest.skip(f"{request.param} is not allowed here")
    return request.param


@pytest.fixture(scope="module")
def content():
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("reads") / "data.bin"
    path.write_bytes(content.tobytes())
    return path


@pytest.fixture
def descriptor(path):
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def place(num: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory for `num` reads of `size` bytes, and their addresses."""
    memory = np.full((num, size), GARBAGE, dtype=np.uint8)
    return memory, memory.ctypes.data + np.arange(num, dtype=np.uint64) * np.uint64(size)


@pytest.mark.parametrize("num", [0, 1, 4, 5, 23])
@pytest.mark.parametrize("num_requests", [1, 4, 256])
def test_each_read_lands_where_it_belongs(backend, descriptor, content, num, num_requests):
    with BatchedReads(num_requests, backend) as reads:
        assert reads.backend == backend
        for seed in range(5):  # the ring goes round
            offsets = np.random.default_rng(seed).integers(0, SIZE - 700, num)
            memory, addresses = place(num, 700)
            reads.read(descriptor, offsets, addresses, 700)
            assert memory.tolist() == [content[start : start + 700].tolist() for start in offsets]


REQUESTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, SIZE - 9000), st.integers(0, 9000)), max_size=40)


@pytest.fixture(scope="module")
def every_kind():
    """Each backend with queues of several lengths, open."""
    kinds = [BatchedReads(num_requests, backend) for backend in POSSIBLE for num_requests in (1, 3, 64)]
    yield kinds
    for reads in kinds:
        reads.close()


@pytest.fixture(scope="module")
def two_files(content):
    """Descriptors and contents."""
    contents = [content, content[::-1].copy()]
    descriptors = [os.memfd_create(str(number)) for number in range(2)]
    for descriptor, bytes_of_it in zip(descriptors, contents, strict=True):
        os.write(descriptor, bytes_of_it.tobytes())
    yield np.array(descriptors), contents
    for descriptor in descriptors:
        os.close(descriptor)


@given(REQUESTS)
def test_reads_of_several_files_and_lengths_touch_nothing_beside_their_places(every_kind, two_files, requests):
    descriptors, contents = two_files
    table = np.array(requests, dtype=np.int64).reshape(-1, 3)
    expected = b""
    for file, offset, size in requests:
        expected += contents[file][offset : offset + size].tobytes() + bytes([GARBAGE] * 3)
    starts = np.concatenate([[0], np.cumsum(table[:, 2] + 3)])
    for reads in every_kind:
        memory = np.full(int(starts[-1]), GARBAGE, dtype=np.uint8)
        addresses = (memory.ctypes.data + starts[:-1]).astype(np.uint64)
        reads.read(descriptors[table[:, 0]], table[:, 1], addresses, table[:, 2])
        assert memory.tobytes() == expected, reads.backend


def test_a_read_that_comes_in_pieces_is_continued(backend, descriptor, content, monkeypatch):
    # A kernel may give less than asked for; here no request may be longer than 1000 bytes.
    monkeypatch.setattr(batched_reads, "_MOST_BYTES", 1000)
    sizes = np.array([10, 1000, 1001, 4500, 0])
    memory, addresses = place(5, 4500)
    with BatchedReads(2, backend) as reads:
        reads.read(descriptor, np.array([5, 6, 7, 8, 9]), addresses, sizes)
    for row, start, size in zip(memory, [5, 6, 7, 8, 9], sizes, strict=True):
        assert row[:size].tobytes() == content[start : start + size].tobytes()
        assert set(row[size:].tolist()) <= {GARBAGE}


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN, errno.ENOMEM])
def test_a_request_that_was_turned_away_for_the_moment_is_made_again(backend, descriptor, content, code):
    memory, addresses = place(6, 100)
    with BatchedReads(256, backend) as reads:
        queue: Any = reads._queue
        run = queue.run

        def refusing(*arrays: Any) -> Any:
            results = run(*arrays)
            results[[1, 4]] = -code
            memory[[1, 4]] = GARBAGE
            return results

        queue.run = refusing
        reads.read(descriptor, np.arange(6) * 1000, addresses, 100)
    assert memory.tolist() == [content[start : start + 100].tolist() for start in range(0, 6000, 1000)]


def test_the_end_of_a_file_is_an_error_that_names_the_request(backend, descriptor, content):
    offsets = np.array([0, SIZE - 100, SIZE - 99, 5])
    memory, addresses = place(4, 100)
    with BatchedReads(2, backend) as reads:
        with pytest.raises(ReadError) as error:
            reads.read(descriptor, offsets, addresses, 100)
        assert (error.value.request, error.value.is_past_end, error.value.errno) == (2, True, errno.ENODATA)
        assert error.value.strerror == f"request 2, 100 bytes at {SIZE - 99}: nothing from byte {SIZE} on"
        with pytest.raises(ReadError, match=f"request 1, 1 bytes at {SIZE + 7}: nothing from byte {SIZE + 7} on"):
            reads.read(descriptor, np.array([0, SIZE + 7]), addresses[:2], 1)
        # And goes on working.
        reads.read(descriptor, offsets[:2], addresses[:2], 100)
    assert memory[1].tobytes() == content[-100:].tobytes()


def test_a_descriptor_that_is_closed_is_an_error_that_names_the_request(backend, descriptor):
    _, addresses = place(5, 100)
    with BatchedReads(256, backend) as reads:
        closed = os.dup(descriptor)
        os.close(closed)
        with pytest.raises(ReadError) as error:
            reads.read(np.array([descriptor] * 3 + [closed] + [descriptor]), np.arange(5), addresses, 100)
        assert (error.value.request, error.value.is_past_end, error.value.errno) == (3, False, errno.EBADF)
        reads.read(descriptor, np.arange(5), addresses, 100)


def test_memory_that_may_not_be_written_is_an_error_and_not_a_crash(backend, descriptor):
    with BatchedReads(256, backend) as reads, pytest.raises(ReadError) as error:
        reads.read(descriptor, np.array([0]), np.array([4096], dtype=np.uint64), 100)
    assert (error.value.request, error.value.errno) == (0, errno.EFAULT)


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ReadError(errno.EIO, "text", 7, True)))
    assert (type(error), error.errno, error.strerror, error.request, error.is_past_end) == (
        ReadError, errno.EIO, "text", 7, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("offsets", "num_bytes", "match"),
    [([-1], 5, "negative"), ([1], -5, "negative"), ([1, 2], 5, r"\(2,\) offsets and \(1,\) addresses")],
    ids=["offset", "length", "count"],
)
def test_requests_that_make_no_sense_are_refused(descriptor, offsets, num_bytes, match):
    _, addresses = place(1, 5)
    with BatchedReads() as reads, pytest.raises(ValueError, match=match):
        reads.read(descriptor, np.array(offsets), addresses, num_bytes)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="expected 'auto' or one of 'io_uring', 'aio', 'preadv'"):
        BatchedReads(backend="uring")
    for num_requests in (0, 4097):
        with pytest.raises(ValueError, match="expected 1 to 4096"):
            BatchedReads(num_requests)


def test_closed_reads_say_so(backend, descriptor):
    reads = BatchedReads(4, backend)
    reads.close()
    reads.close()
    with pytest.raises(ValueError, match="closed"):
        reads.read(descriptor, np.array([0]), place(1, 1)[1], 1)


def test_several_threads_may_share_one(backend, descriptor, content):
    wrong = []

    def work(seed: int) -> None:
        offsets = np.random.default_rng(seed).integers(0, SIZE - 50, 300)
        for _ in range(20):
            memory, addresses = place(300, 50)
            reads.read(descriptor, offsets, addresses, 50)
            if any(row.tobytes() != content[at : at + 50].tobytes() for row, at in zip(memory, offsets, strict=True)):
                wrong.append(seed)

    with BatchedReads(64, backend) as reads:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
    assert not wrong


def test_nothing_is_left_open(backend):
    def left() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("io_uring") + maps.count("[aio]")

    before = left()
    for _ in range(8):  # the kernel takes its time to end a context of native AIO
        BatchedReads(8, backend).close()
        BatchedReads(8, backend)  # collected
    assert left() == before


def test_advice_brings_ranges_into_memory_and_complains_of_nothing(backend, tmp_path):
    path = tmp_path / "cold.bin"
    path.write_bytes(os.urandom(64 * 4096))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        wanted = np.array([3, 20, 40]) * 4096
        # Looked up in the page table: to ask by reading would bring them in.
        look = residency._ask_by_mincore
        if look(descriptor, path, wanted) is None or look(descriptor, path, wanted).any():
            pytest.skip("this file system keeps its pages, or does not tell")
        with BatchedReads(2, backend) as reads:
            reads.advise(descriptor, wanted, 4096)
            deadline = time.monotonic() + WAIT_SECONDS
            while not look(descriptor, path, wanted).all() and time.monotonic() < deadline:
                time.sleep(0.01)
            reads.advise(np.array([descriptor, 10**6, descriptor]), np.array([0, 0, 1 << 40]), np.array([5, 5, 5]))
            memory, addresses = place(1, 10)
            reads.read(descriptor, np.array([7]), addresses, 10)
        assert look(descriptor, path, wanted).all()
        assert memory.tobytes() == path.read_bytes()[7:17]
    finally:
        os.close(descriptor)


# What a kernel may forbid --------------------------------------------------------------------------------

FORBIDDING = """
import os, sys
import numpy as np
from lightning_gpufeed.hdf5.readers import read_calls
from lightning_gpufeed.hdf5.readers.batched_reads import BatchedReads, ReadError

def show(reads):
    with reads, open({path!r}, "rb") as file:
        memory = np.zeros((9, 5), np.uint8)
        addresses = memory.ctypes.data + np.arange(9, dtype=np.uint64) * np.uint64(5)
        reads.read(file.fileno(), np.arange(9) * 7, addresses, 5)
        rows = [os.pread(file.fileno(), 5, 7 * row) for row in range(9)]
        print(reads.backend, [row.tobytes() for row in memory] == rows, sorted(reads.refused))

def forbid(*names, kill=False):
    # A filter as containers have it: these system calls fail with EPERM.
    import ctypes, struct
    numbers = read_calls.call_numbers()
    def line(code, yes, no, value):
        return struct.pack("HBBI", code, yes, no, value)
    program = line(0x20, 0, 0, 0)
    for name in names:
        program += line(0x15, 0, 1, numbers[name]) + line(6, 0, 0, 0x00050001)
    program += line(6, 0, 0, 0x7FFF0000)
    libc = ctypes.CDLL(None, use_errno=True)
    text = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(text)), 16)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, header, 0, 0) == 0, ctypes.get_errno()
"""

FORBIDDING_CASES = {
    "io_uring": 'forbid("io_uring_setup"); show(BatchedReads())',
    "io_uring at its first use": 'forbid("io_uring_enter"); show(BatchedReads())',
    "io_uring and aio": 'forbid("io_uring_setup", "io_setup"); show(BatchedReads())',
    "io_uring and aio's reads": 'forbid("io_uring_setup", "io_submit"); show(BatchedReads())',
    "asked for": """
forbid("io_uring_setup")
try:
    BatchedReads(backend="io_uring")
except OSError as error:
    print(error.strerror)
""",
    "another machine": 'read_calls.platform.machine = lambda: "riscv64"; show(BatchedReads())',
    # The child must not touch the parent's queue, and a lock may be held by a thread that the child does not have.
    "fork": """
for backend in ("io_uring", "aio", "preadv"):
    try:
        reads = BatchedReads(backend=backend)
    except OSError:
        print(f"{backend} True []"); continue
    reads._lock.acquire()
    child = os.fork()
    if not child:
        show(reads); sys.stdout.flush(); os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    reads._lock.release()
    show(reads)
""",
}


@pytest.fixture(scope="module")
def forbidden(path):
    return run_forked(FORBIDDING.format(path=str(path)), FORBIDDING_CASES)


@pytest.mark.skipif("aio" not in POSSIBLE, reason="native AIO is not allowed here")
@pytest.mark.parametrize("case", ["io_uring", "io_uring at its first use"])
def test_where_io_uring_is_forbidden_native_aio_reads(forbidden, case):
    assert (forbidden[case].code, forbidden[case].text.strip()) == (0, "aio True ['io_uring']")


@pytest.mark.parametrize("case", ["io_uring and aio", "io_uring and aio's reads", "another machine"])
def test_where_both_are_forbidden_plain_reads_do(forbidden, case):
    assert (forbidden[case].code, forbidden[case].text.strip()) == (0, "preadv True ['aio', 'io_uring']")


def test_a_backend_that_was_asked_for_is_used_or_refused_with_the_reason(forbidden):
    assert forbidden["asked for"].text.strip() == (
        "reads by 'io_uring' are not possible here: io_uring_setup: Operation not permitted. Use 'auto'."
    )


def test_a_forked_process_reads_by_a_queue_of_its_own(forbidden):
    lines = forbidden["fork"].text.split("\n")
    assert forbidden["fork"].code == 0, forbidden["fork"].text
    assert {line for line in lines if line} == {f"{backend} True []" for backend in POSSIBLE}


@pytest.mark.skipif("io_uring" not in POSSIBLE, reason="io_uring is not allowed here")
def test_ctrl_c_is_raised_only_when_nothing_is_written_to_the_memory_any_more():
    # A read from an empty pipe waits; offsets mean nothing there.
    source, sink = os.pipe()
    memory, addresses = place(3, 4)
    reader = threading.main_thread()
    assert reader is threading.current_thread()
    is_waiting = Path(f"/proc/self/task/{reader.native_id}/syscall")

    def interrupt() -> None:
        wanted = f"{read_calls._URING_NUMBERS['io_uring_enter']} "
        deadline = time.monotonic() + WAIT_SECONDS
        for _ in range(2):  # an impatient user
            while not is_waiting.read_text().startswith(wanted) and time.monotonic() < deadline:
                time.sleep(0.001)
            signal.pthread_kill(reader.ident, signal.SIGINT)
            time.sleep(0.05)
        os.write(sink, b"abcdefghijkl")

    thread = threading.Thread(target=interrupt)
    with BatchedReads(8, "io_uring") as reads:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            reads.read(source, np.zeros(3, np.int64), addresses, 4)
        assert sorted(memory.tobytes()) == list(b"abcdefghijkl")
        thread.join(WAIT_SECONDS)
        # What was left over does not come up as the answers of the next reads.
        os.write(sink, b"mnop")
        reads.read(source, np.zeros(1, np.int64), addresses[:1], 4)
        assert memory[0].tobytes() == b"mnop"
    os.close(source)
    os.close(sink)
