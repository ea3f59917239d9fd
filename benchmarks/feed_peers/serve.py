"""What the arms of feed.py have in common: each runs in a process of its own and serves epochs on request.

    python NAME.py --data FOLDER --arm ARM

Commands come as JSON objects, a line each, on standard input; each is answered by one JSON line on standard output.

{"do": "hello"}                         it has started
{"do": "convert"}                       write the arm's own format, once -> seconds, bytes, paths
{"do": "epoch", "number": N}            one epoch of batches -> seconds, cpu_seconds, samples, bytes, classes
   ... "verify": true                   and a checksum over every sample's bytes, outside of the time that counts
   ... "seconds": S                     stop after S seconds; several epochs if one is shorter
   ... "trainer": "python" | "torch"    beside a thread that trains -> steps a second, alone and beside
   ... "steps": K                       that trainer takes the batches itself, one before every K steps
{"do": "drop"}                          take the pages of mapped data files out of this process, so they can be evicted

What a batch has to be is checked: uint8 tensors (n, *sample_shape), contiguous; and each label once.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH_SIZE = 256
NUM_CLASSES = 100
ALONE_SECONDS = 0.4

Epoch = Callable[[int], Iterator[Any]]
"""Number of an epoch -> its batches, as (images, labels); the bound gives (number of bytes, None)."""


@dataclass(frozen=True)
class Workload:
    """Images as they are before any format: `images.npy`, sorted by class; the label of a sample is its number."""

    folder: Path
    num_samples: int
    sample_shape: tuple[int, ...]
    chunk_rows: int
    checksum: int
    h5_name: str = "images.h5"

    @classmethod
    def load(cls, folder: Path, h5_name: str = "images.h5") -> Workload:
        fields = json.loads((folder / "workload.json").read_text())
        return cls(folder, fields["num_samples"], tuple(fields["sample_shape"]), fields["chunk_rows"],
                   fields["checksum"], h5_name)  # fmt: skip

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.sample_shape))

    @property
    def num_bytes(self) -> int:
        return self.num_samples * self.sample_bytes

    @property
    def images(self) -> np.ndarray:
        return np.load(self.folder / "images.npy", mmap_mode="r")

    @property
    def npy(self) -> Path:
        return self.folder / "images.npy"

    @property
    def h5(self) -> Path:
        return self.folder / self.h5_name

    def own(self, name: str) -> Path:
        return self.folder / name


def checksum_of(images: np.ndarray, labels: np.ndarray) -> int:
    """The same for any order, another one if a sample is lost, repeated, damaged or has another's label."""
    each = (
        zlib.crc32(np.ascontiguousarray(image)) * (int(label) + 1) for image, label in zip(images, labels, strict=True)
    )
    return sum(each) % 2**64


@dataclass(frozen=True)
class Arm:
    """A way to read. `convert` writes the files it reads; `open` gives its epochs.

    `pause_seconds` passes between two batches where nobody trains with them: for arms that have nothing to read.
    """

    open: Callable[[Workload], Epoch]
    convert: Callable[[Workload], None] | None = None
    files: Callable[[Workload], Path] = lambda workload: workload.h5
    pause_seconds: float = 0.0


# Trainers that hold the interpreter lock -------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Steps, and where the time of their thread went: on a core, ready but without one, or waiting for something."""

    num_steps: int
    seconds: float
    on_core: float
    queued: float

    def __add__(self, other: Trained) -> Trained:
        return Trained(*(getattr(self, one) + getattr(other, one) for one in self.__dataclass_fields__))

    @property
    def rate(self) -> float:
        return self.num_steps / self.seconds


class Clock:
    """What the kernel counts for the thread that makes this."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        on_core, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return time.perf_counter(), int(on_core) / 1e9, int(queued) / 1e9

    def stop(self, num_steps: int) -> Trained:
        return Trained(num_steps, *(now - begin for now, begin in zip(self._now(), self._begin, strict=True)))


class Trainer:
    """A thread that takes steps until it is told to stop. "python" never lets go of the lock by itself."""

    def __init__(self, kind: str) -> None:
        self.step = {"python": self._python, "torch": self._torch}[kind]
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._weight, self._input = torch.randn(64, 64) / 8, torch.randn(32, 64)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        num_steps, clock = 0, Clock()
        with torch.inference_mode():
            while not self._is_over:
                self.step()
                num_steps += 1
        self.trained = clock.stop(num_steps)

    def _python(self) -> None:
        total = 0
        for number in range(5_000):
            total += number

    def _torch(self) -> None:
        """Operations so small that starting them is most of the work, as in the loop of a GPU trainer."""
        values = self._input
        for _ in range(20):
            values = torch.relu(values @ self._weight) + self._input


def train_alone(kind: str, seconds: float) -> Trained:
    with Trainer(kind) as trainer:
        time.sleep(seconds)
    return trainer.trained


def train_and_take(kind: str, batches: Iterator[Any], steps_each: int, seconds: float) -> tuple[Trained, list[Any]]:
    """Train in this thread, and take a batch before every few steps: the steps, and the batches' labels."""
    step, num_steps, labels = Trainer(kind).step, 0, []
    torch.set_num_threads(1)
    clock, end = Clock(), time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < end:
            labels.append(torch.as_tensor(next(batches)[1]).reshape(-1))
            for _ in range(steps_each):
                step()
            num_steps += steps_each
    return clock.stop(num_steps), labels


def compare(alone: Trained, beside: Trained) -> dict[str, float]:
    """What was lost, and to what; shares of the time, and of the speed of a step while it is on a core."""
    return {
        "steps_alone": alone.rate,
        "steps_beside": beside.rate,
        "no_core": beside.queued / beside.seconds,
        "no_core_alone": alone.queued / alone.seconds,
        "waiting": 1 - (beside.on_core + beside.queued) / beside.seconds,
        "slower": 1 - beside.num_steps / beside.on_core / (alone.num_steps / alone.on_core),
    }


# One epoch -------------------------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    """Of this process and all below it, those that have ended too."""
    ticks = os.sysconf("SC_CLK_TCK")

    def of(process: int) -> float:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        except OSError:
            return 0.0
        return sum(map(int, fields[11:15])) / ticks + sum(of(int(child)) for child in children)

    return of(os.getpid())


def check_batch(images: Any, workload: Workload) -> None:
    expected = (torch.uint8, workload.sample_shape, True)
    given = (images.dtype, tuple(images.shape[1:]), images.is_contiguous()) if torch.is_tensor(images) else type(images)
    if given != expected:
        raise TypeError(f"a batch is {given}; expected {expected}")


def distinct_classes(labels: list[torch.Tensor], num_samples: int) -> float | None:
    """Classes in a batch, the mean over the full ones, relative to what a true shuffle gives."""
    full = [batch for batch in labels if len(batch) == BATCH_SIZE]
    if not full:
        return None
    found = sum(len(torch.unique(batch * NUM_CLASSES // num_samples)) for batch in full) / len(full)
    per_class = num_samples / NUM_CLASSES
    # That a class is missed: its samples are all among the others.
    missed = np.prod([(num_samples - per_class - i) / (num_samples - i) for i in range(BATCH_SIZE)])
    return float(found / (NUM_CLASSES * (1 - missed)))


def run_epoch(epoch: Epoch, workload: Workload, request: dict[str, Any], pause_seconds: float = 0.0) -> dict[str, Any]:
    limit = request.get("seconds", float("inf"))
    labels: list[torch.Tensor] = []
    num_bytes = checksum = num_epochs = 0
    is_over = is_bound = False
    begin, begin_cpu = time.perf_counter(), cpu_seconds()
    while not is_over:
        batches = epoch(request["number"] + num_epochs)
        for images, batch_labels in batches:
            if batch_labels is None:
                is_bound, num_bytes = True, num_bytes + images
            else:
                labels.append(torch.as_tensor(batch_labels).reshape(-1))
                num_bytes += images.nbytes
                if request.get("verify"):
                    check_batch(images, workload)
                    checksum = (checksum + checksum_of(images.numpy(), labels[-1].numpy())) % 2**64
            if pause_seconds:
                time.sleep(pause_seconds)
            if time.perf_counter() - begin > limit:
                is_over = True
                break
        else:
            num_epochs += 1
            is_over = limit == float("inf")
        del batches
    seconds = time.perf_counter() - begin
    answer: dict[str, Any] = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds() - begin_cpu,
        "bytes": num_bytes,
        "samples": num_bytes // workload.sample_bytes if is_bound else sum(map(len, labels)),
        "classes": None if is_bound else distinct_classes(labels, workload.num_samples),
    }
    if limit == float("inf") and not is_bound:
        if not torch.equal(torch.cat(labels).sort().values, torch.arange(workload.num_samples)):
            raise ValueError(f"of {workload.num_samples} samples, {len(torch.cat(labels).unique())} came, "
                             f"{sum(map(len, labels))} with repeats")  # fmt: skip
        if request.get("verify") and checksum != workload.checksum:
            raise ValueError("every label came once, but the images are not those that were written")
    return answer


def run_beside(epoch: Epoch, workload: Workload, request: dict[str, Any], pause_seconds: float) -> dict[str, Any]:
    """An epoch or a part of one beside a trainer, whose steps alone are counted just before and just after."""
    kind = request["trainer"]
    alone = train_alone(kind, ALONE_SECONDS)
    with Trainer(kind) as trainer:
        answer = run_epoch(epoch, workload, request, pause_seconds)
    return {**answer, **compare(alone + train_alone(kind, ALONE_SECONDS), trainer.trained)}


def in_memory(workload: Workload) -> Iterator[Any]:
    """Batches that are there already, without end: nothing has to be done for them."""
    images = [torch.zeros((BATCH_SIZE, *workload.sample_shape), dtype=torch.uint8) for _ in range(8)]
    return itertools.cycle([(batch, torch.zeros(BATCH_SIZE, dtype=torch.int64)) for batch in images])


def run_taking(epoch: Epoch, workload: Workload, request: dict[str, Any]) -> dict[str, Any]:
    """A trainer that takes its batches; alone is: with batches that are in memory, just before and just after."""
    kind, steps_each = request["trainer"], request["steps"]
    alone, _ = train_and_take(kind, in_memory(workload), steps_each, ALONE_SECONDS)
    batches = itertools.chain.from_iterable(epoch(request["number"] + number) for number in itertools.count())
    next(batches)  # processes are under way
    begin, begin_cpu = time.perf_counter(), cpu_seconds()
    beside, labels = train_and_take(kind, batches, steps_each, request["seconds"])
    seconds, cpu = time.perf_counter() - begin, cpu_seconds() - begin_cpu
    del batches
    again, _ = train_and_take(kind, in_memory(workload), steps_each, ALONE_SECONDS)
    samples = sum(map(len, labels))
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "bytes": samples * workload.sample_bytes,
        "samples": samples,
        "classes": distinct_classes(labels, workload.num_samples),
        **compare(alone + again, beside),
    }


# The process -----------------------------------------------------------------------------------------------------


def drop_mapped(folder: Path) -> None:
    """Take the pages of files in a folder out of this process's page tables; they come back when they are touched."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split(maxsplit=5)
        if str(folder) in line and "w" not in permissions:
            first, stop = (int(end, 16) for end in span.split("-"))
            madvise(first, stop - first, 4)  # MADV_DONTNEED


def tree_bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())


def convert(arm: Arm, workload: Workload) -> dict[str, Any]:
    path = arm.files(workload)
    note = path.with_name(path.name + ".converted.json")
    if arm.convert is not None and not note.exists():
        begin = time.perf_counter()
        arm.convert(workload)
        note.write_text(json.dumps({"seconds": time.perf_counter() - begin, "bytes": tree_bytes(path)}))
    told = json.loads(note.read_text()) if note.exists() else {"seconds": None, "bytes": tree_bytes(path)}
    return {**told, "path": str(path)}


def serve(arms: dict[str, Arm], clean: Callable[[Workload], None] = lambda _: None) -> None:
    """Answer requests until standard input ends, then clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--file", default="images.h5", help="which HDF5 file of the folder")
    parser.add_argument("--arm", choices=arms, required=True)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    workload, arm = Workload.load(options.data, options.file), arms[options.arm]
    epoch: Epoch | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "convert":
                answer = convert(arm, workload)
            elif request["do"] == "drop":
                drop_mapped(workload.folder)
                answer = {}
            elif request["do"] == "hello":
                answer = {}
            else:
                epoch = arm.open(workload) if epoch is None else epoch
                if "steps" in request:
                    answer = run_taking(epoch, workload, request)
                elif "trainer" in request:
                    answer = run_beside(epoch, workload, request, arm.pause_seconds)
                else:
                    answer = run_epoch(epoch, workload, request, arm.pause_seconds)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    clean(workload)
    os._exit(0)  # whatever threads a library keeps


def batches_of(order: np.ndarray) -> Iterator[np.ndarray]:
    return iter([order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE)])


def in_windows(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while window := list(itertools.islice(items, size)):
        yield window
