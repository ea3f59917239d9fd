"""Out-of-memory and its like as this machine raises them: under a ceiling, in a worker, with a rank that is gone."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from lightning_gpufeed.recover.classify import Diagnosis, Kind, classify
from tests.doubles import run_forked

SETUP = """
import json, os, resource, signal
import numpy as np, torch
from torch.utils.data import DataLoader
from lightning_gpufeed.recover.classify import classify

torch.set_num_threads(1)
warm = torch.nn.Conv2d(8, 8, 3)
warm(torch.randn(4, 8, 32, 32))
large = torch.randn(16, 8, 128, 128)

def ceiling(mib):
    size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + mib * 2**20, resource.RLIM_INFINITY))

def lift():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def judge(function, device_type="cpu"):
    try:
        function()
    except BaseException as error:
        lift()
        found = classify(error, device_type)
        said = [type(error).__name__, found.kind.name, found.requested_bytes, found.advice, str(error)]
        print("\\n@" + json.dumps(said), flush=True)

def starved(function, device_type="cpu", mib=8):
    ceiling(mib)
    judge(function, device_type)
    os._exit(0)  # the end of an interpreter takes half a second; only a loader needs it, to end its worker

class Samples(torch.utils.data.Dataset):
    def __init__(self, function):
        self.function = function
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return self.function()

def in_worker(function, device_type="cpu"):
    judge(lambda: list(DataLoader(Samples(function), num_workers=1)), device_type)

def starving(function):
    def sample():
        ceiling(192)  # room for the thread that sends the error, and for its heap; what is asked for has 256 at least
        return function()
    return sample

class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return torch.empty(2**28)

def backward():
    Hungry.apply(torch.ones(1, requires_grad=True)).sum().backward()
"""

# name -> (code, type, kind, bytes)
REAL: dict[str, tuple[str, str, Kind, int | None]] = {
    "torch": ("starved(lambda: torch.empty(2**26))", "RuntimeError", Kind.HOST, 2**28),
    "torch, for an accelerator": ("starved(lambda: torch.empty(2**26), 'cuda')", "RuntimeError", Kind.NEVER, 2**28),
    "backward": ("starved(backward)", "RuntimeError", Kind.HOST, 2**30),
    "numpy": ("starved(lambda: np.ones(2**28))", "MemoryError", Kind.HOST, 2**31),
    "python": ("starved(lambda: bytearray(2**30))", "MemoryError", Kind.HOST, None),
    "mmap": ("import mmap; starved(lambda: mmap.mmap(-1, 2**30))", "OSError", Kind.HOST, None),
    # It is oneDNN or torch's allocator that finds no memory first, as the kernels for this processor have it.
    "convolution": ("starved(lambda: warm(large), mib=0)", "RuntimeError", Kind.HOST, ANY),
    "worker, torch": ("in_worker(starving(lambda: torch.empty(2**26)))", "RuntimeError", Kind.NEVER, 2**28),
    "worker, numpy": ("in_worker(starving(lambda: np.ones(2**28)))", "RuntimeError", Kind.NEVER, 2**31),
    "worker, python": ("in_worker(starving(lambda: bytearray(2**30)))", "MemoryError", Kind.NEVER, None),
    "worker, a fault": ("in_worker(lambda: int('x'))", "ValueError", Kind.OTHER, None),
    "worker, killed": ("in_worker(lambda: signal.raise_signal(signal.SIGKILL))", "RuntimeError", Kind.NEVER, None),
    "worker, bus error": ("in_worker(lambda: signal.raise_signal(signal.SIGBUS))", "RuntimeError", Kind.NEVER, None),
    "rank, gone": (
        """
import datetime, shutil, tempfile, torch.distributed
folder = tempfile.mkdtemp()
ready, may_end = os.pipe()
child = os.fork()
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/store", world_size=2, rank=int(child == 0),
    timeout=datetime.timedelta(seconds=10),
)
torch.distributed.barrier()
if child == 0:
    os.read(ready, 1)  # the other one is past the barrier, so it is connected
    os._exit(0)
os.write(may_end, b"x")
os.waitpid(child, 0)
shutil.rmtree(folder)
judge(lambda: torch.distributed.all_reduce(torch.ones(4)))
os._exit(0)
""",
        "RuntimeError",
        Kind.NEVER,
        None,
    ),
}


@pytest.fixture(scope="module")
def real_errors() -> dict[str, list[Any]]:
    """What each piece of code raised, as [type, kind, bytes, advice, text]."""
    ended = run_forked(SETUP, {name: row[0] for name, row in REAL.items()})
    found = {}
    for name, end in ended.items():
        lines = [line for line in end.text.splitlines() if line.startswith("@")]
        assert len(lines) == 1, f"{name}: {end.code}, {end.text}"
        found[name] = json.loads(lines[0][1:])
    return found


@pytest.mark.parametrize("name", list(REAL))
def test_a_real_error_of_this_machine_is_known(name, real_errors):
    _, error_type, kind, requested_bytes = REAL[name]
    raised_type, found_kind, found_bytes, _, text = real_errors[name]
    assert (raised_type, found_kind, found_bytes) == (error_type, kind.name, requested_bytes), text


def test_a_worker_that_died_of_a_bus_error_is_short_of_shared_memory(real_errors):
    assert "shm" in real_errors["worker, bus error"][3]
    assert "shm" not in real_errors["worker, killed"][3]


def test_what_torch_compile_makes_of_an_out_of_memory_is_one():
    def fail(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x: x + 1, backend=fail)(torch.ones(3))
    assert type(caught.value).__name__ == "BackendCompilerFailed"
    assert classify(caught.value, "cuda") == Diagnosis(Kind.DEVICE, None, 2**31)
