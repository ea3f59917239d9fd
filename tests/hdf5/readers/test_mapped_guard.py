"""A mapped file that is cut short under a copy is an error; every other use of the signal stays what it was."""

from __future__ import annotations

import signal
import sys

import pytest

from lightning_gpufeed.hdf5.readers import mapped_guard
from tests.doubles import run_forked

pytestmark = pytest.mark.skipif(mapped_guard.why_not_guarded() is not None, reason="lost pages are fatal here")

SETUP = """
import ctypes, faulthandler, mmap, os, signal, sys, threading, time
import h5py, numpy as np, torch
from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.readers import mapped_guard
from lightning_gpufeed.hdf5.readers.gather_reader import GatherReader
from lightning_gpufeed.hdf5.layout import read_layout
os.chdir({folder!r})
ROW = 1 << 14

class Mapped:
    # A file of ones, mapped as rows.
    def __init__(self, name, num_rows=64):
        self.name = name
        with open(name, "wb") as file:
            file.write(bytes([1]) * (ROW * num_rows))
        with open(name, "rb") as file:
            self.address = mapped_guard._libc.mmap(
                None, ROW * num_rows, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0
            )
        self.size = ROW * num_rows
        memory = (ctypes.c_uint8 * self.size).from_address(self.address)
        self.rows = torch.frombuffer(memory, dtype=torch.uint8).view(-1, ROW)

    def sum(self):
        return int(self.rows.sum(dtype=torch.int64))

    def cut(self, size=10):
        os.truncate(self.name, size)

    def unmap(self):
        assert mapped_guard._libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size)) == 0

def race(turns, num_threads=1):
    torch.set_num_threads(num_threads)
    for turn in range(turns):
        mapped = Mapped("race.bin", 256)
        token = mapped_guard.guard(mapped.address, mapped.size)
        started, said = threading.Event(), []
        def work():
            order = np.random.default_rng(turn)
            out = torch.empty((128, ROW), dtype=torch.uint8)
            while not mapped_guard.is_lost(token):
                mapped_guard.watch()
                torch.index_select(mapped.rows, 0, torch.from_numpy(order.integers(0, 256, 128)), out=out)
                started.set()
                if not mapped_guard.is_lost(token) and not (out == 1).all():
                    return said.append("zeros that nobody is told of")
            said.append("lost")
        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        time.sleep(turn % 11 * 0.0003)
        mapped.cut()
        thread.join()
        assert said == ["lost"], said
        mapped_guard.release(token)
        assert not mapped_guard.is_lost(token)
        mapped.unmap()
    print("always told")

def guarded(name="ours.bin", num_rows=64):
    mapped = Mapped(name, num_rows)
    return mapped, mapped_guard.guard(mapped.address, mapped.size)

def gather(num_threads):
    # The reader itself: all ones, or refused.
    torch.set_num_threads(num_threads)
    out = torch.empty((256, ROW), dtype=torch.uint8)
    refused = 0
    for turn in range(12):
        with h5py.File("gather.h5", "w") as h5_file:
            h5_file.create_dataset("x", data=np.ones((256, ROW), "u1"))
        reader = GatherReader([read_layout("gather.h5", "x")])
        order = np.random.default_rng(turn).permutation(256)
        reader.read_into(order, out)
        cutter = threading.Thread(target=lambda: (time.sleep(turn * 0.0002), os.truncate("gather.h5", ROW * 100 + 5)))
        cutter.start()
        try:
            while True:
                reader.read_into(order, out)
                assert (out == 1).all()
        except FeedError as error:
            assert f"gather.h5 became shorter while it was read: " in str(error), error
            assert f", {{ROW * 100 + 5}} now." in str(error), error
            refused += 1
        cutter.join()
        reader.close()
    print("refused", refused)
"""

# With two threads, the second one's fault would end the process while faulthandler writes of the first.
FAULT = """
torch.set_num_threads(1); mapped, token = guarded(); other = Mapped("other.bin")
other.cut(); print("before", flush=True)
""".strip()

CASES = {
    "race": "race(30)",
    "race of two threads": "race(30, 2)",
    "race with faulthandler before": "faulthandler.enable(); race(10)",
    "race with faulthandler after": "guarded(); faulthandler.enable(); race(10)",
    "race beside a thread that keeps the lock": """
def spin():
    while not is_over:
        pass
is_over = []
thread = threading.Thread(target=spin)
thread.start(); race(5, 2); is_over.append(1); thread.join()
""",
    "reader": "gather(1)",
    "reader of two threads": "gather(2)",
    "main thread": "mapped, token = guarded(); mapped.cut(0); print(mapped.sum(), mapped_guard.is_lost(token))",
    "only the lost one": """
(one, first), (two, second) = guarded("one.bin"), guarded("two.bin")
one.cut(0); print(one.sum(), two.sum() == two.size, mapped_guard.is_lost(first), mapped_guard.is_lost(second))
""",
    "last page": """
mapped, token = guarded(num_rows=1); before = mapped.sum()
print(before == mapped.size, mapped_guard.is_lost(token))
mapped.cut(0); mapped.sum(); print(mapped_guard.is_lost(token))
""",
    "fork": """
mapped, token = guarded()
mapped_guard._installing.acquire()  # by a thread that the child does not have
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("parent", mapped_guard.is_lost(token), flush=True)
faulthandler.enable()
mapped_guard.watch() if not child else None
if not child:
    mapped.cut(0)
    print("child", mapped.sum(), mapped_guard.is_lost(token), flush=True)
    os._exit(0)
""",
    "foreign": f"{FAULT}; other.sum(); print('after')",
    "foreign in a thread": f"{FAULT}; t = threading.Thread(target=other.sum); t.start(); t.join(); print('after')",
    "foreign in two threads": f"{FAULT}; torch.set_num_threads(2); other.rows.repeat(9, 1); print('after')",
    "foreign with the lock held": f"{FAULT}; bytes(other.rows.numpy()); print('after')",
    "foreign with faulthandler before": f"faulthandler.enable(); {FAULT}; other.sum(); print('after')",
    "foreign with faulthandler after": f"{FAULT}; faulthandler.enable(); other.sum(); print('after')",
    "foreign with faulthandler between": (
        f"{FAULT}; faulthandler.enable(); mapped_guard.watch(); other.sum(); print('after')"
    ),
    "foreign, ignored": f"signal.signal(signal.SIGBUS, signal.SIG_IGN); {FAULT}; other.sum(); print('after')",
    "released": f"{FAULT}; mapped_guard.release(token); mapped.cut(); mapped.sum(); print('after')",
    "sent": f"{FAULT}; os.kill(os.getpid(), signal.SIGBUS); print('after')",
    "user before": """
signal.signal(signal.SIGBUS, lambda number, frame: print("user", flush=True))
race(3); os.kill(os.getpid(), signal.SIGBUS); time.sleep(0); race(3)
""",
    "user after": """
guarded(); signal.signal(signal.SIGBUS, lambda number, frame: print("user", flush=True))
race(3); os.kill(os.getpid(), signal.SIGBUS); time.sleep(0); race(3)
""",
    "put back": """
with h5py.File("back.h5", "w") as h5_file:
    h5_file.create_dataset("x", data=np.ones((64, ROW), "u1"))
reader = GatherReader([read_layout("back.h5", "x")])
out = torch.empty((2, ROW), dtype=torch.uint8)
size = os.path.getsize("back.h5")
for new_size in (9000, size, size):
    os.truncate("back.h5", new_size)
    try:
        reader.read_into(np.array([5, 60]), out)
    except FeedError as error:
        print(str(error).partition("back.h5 ")[2].partition(":")[0])
""",
    "ctrl-c": """
mapped, token = guarded()
class Late(dict):
    def items(self):
        while turns:
            turns.pop()
            signal.raise_signal(signal.SIGINT)
        return dict.items(self)
turns = [1]
mapped_guard._ranges = Late(mapped_guard._ranges)
mapped.cut(0)
try:
    mapped.sum()
except KeyboardInterrupt:  # if it does not come to light in the handler
    pass
print(mapped.sum(), mapped_guard.is_lost(token))
""",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    # The end of an interpreter that has imported torch takes a while.
    cases = {name: f"{code}\nsys.stdout.flush(); os._exit(0)" for name, code in CASES.items()}
    return run_forked(SETUP.format(folder=str(tmp_path_factory.mktemp("guard"))), cases)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("race")])
def test_a_file_cut_during_a_copy_is_always_told(ended, case):
    assert (ended[case].code, ended[case].text.strip()) == (0, "always told")


@pytest.mark.parametrize("case", ["reader", "reader of two threads"])
def test_a_batch_of_a_file_cut_meanwhile_is_whole_or_refused(ended, case):
    assert (ended[case].code, ended[case].text.strip()) == (0, "refused 12")


def test_a_file_that_is_long_enough_again_stays_refused(ended):
    # Its pages are zeros by now, in the mapping as in the file.
    assert ended["put back"].text.splitlines() == [
        "became shorter while it was read",
        "could not be read",
        "could not be read",
    ]


def test_lost_pages_read_as_zeros_in_the_main_thread_too(ended):
    assert ended["main thread"].text.strip() == "0 True"


def test_ctrl_c_inside_the_handler_does_not_end_the_process(ended):
    assert (ended["ctrl-c"].code, ended["ctrl-c"].text.strip()) == (0, "0 True")


def test_other_mappings_keep_their_pages(ended):
    assert ended["only the lost one"].text.strip() == "0 True True False"


def test_nothing_is_lost_before_it_is_touched(ended):
    assert ended["last page"].text.split() == ["True", "False", "True"]


def test_a_forked_process_is_guarded_by_itself(ended):
    assert ended["fork"].code == 0, ended["fork"].text
    assert sorted(ended["fork"].text.splitlines()) == ["child 0 True", "parent False"]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("foreign")] + ["released", "sent"])
def test_a_page_that_is_not_ours_kills_as_ever(ended, case):
    assert ended[case].code == -signal.SIGBUS, ended[case].text
    assert "after" not in ended[case].text.splitlines()
    has_trace = "Fatal Python error: Bus error" in ended[case].text
    assert has_trace == ("faulthandler" in case), ended[case].text


@pytest.mark.parametrize("case", ["user before", "user after"])
def test_a_handler_of_the_user_gets_what_is_sent(ended, case):
    assert (ended[case].code, ended[case].text.split("\n")[:-1]) == (0, ["always told", "user", "always told"])


def test_where_pages_cannot_be_guarded_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "not on darwin" in str(mapped_guard.why_not_guarded())
    with pytest.raises(OSError, match="64-bit Linux on x86_64 and aarch64 only"):
        mapped_guard.guard(0, 1)
