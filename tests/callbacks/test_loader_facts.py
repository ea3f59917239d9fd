"""What can be seen of a loader from outside: who loads for it, how it is set up, and the files that are read."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_gpufeed.callbacks.loader_facts import (
    cached_files,
    describe_loader,
    find_readers,
    is_ready,
    name_files,
    open_files,
)
from lightning_gpufeed.diagnose.counters import FileFacts, LoaderFacts
from lightning_gpufeed.diagnose.observer import Readers
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.order import FullShuffle
from lightning_gpufeed.hdf5.source import H5Source
from tests.callbacks.reader_models import PidData

# About more workers than the machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

FOREIGN = LoaderFacts()


def pid_loader(num_workers: int = 2, *, path: Path | None = None, **options: Any) -> DataLoader:
    data = PidData(8 * num_workers, None if path is None else str(path))
    return DataLoader(data, batch_size=1, num_workers=num_workers, **options)


@contextmanager
def running(loader: Any) -> Iterator[set[int]]:
    """The processes that load, by their own word, while they do."""
    iterator = iter(loader)
    try:
        # Workers take turns, so after a few batches each has made one.
        yield set(pids_in([next(iterator) for _ in range(4)]))
    finally:
        # Ended by name: otherwise workers end when the garbage collector comes to it.
        iterations = [iterator, *getattr(getattr(loader, "_iterator", None), "iterators", [])]
        for one in getattr(loader, "flattened", [loader]):
            iterations.append(one._iterator)
            one._iterator = None
        for iteration in iterations:
            getattr(iteration, "_shutdown_workers", lambda: None)()
        del iterator, iteration, iterations
        if isinstance(loader, CombinedLoader):
            loader.reset()


def pids_in(nest: Any) -> Iterator[int]:
    """All numbers in a nest of tensors; a combined loader adds a batch number and a loader number."""
    if isinstance(nest, torch.Tensor):
        yield from nest.tolist()
    elif isinstance(nest, dict):
        yield from itertools.chain.from_iterable(map(pids_in, nest.values()))
    elif isinstance(nest, tuple | list):
        yield from itertools.chain.from_iterable(map(pids_in, nest))


def assert_found(loader: Any, pids: set[int]) -> None:
    found = find_readers(loader)
    assert sorted(found.processes) == sorted(pids)
    assert list(found.threads) == []


# Who loads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_persistent", [False, True])
def test_forked_workers_are_found_exactly(is_persistent):
    loader = CombinedLoader(pid_loader(persistent_workers=is_persistent))
    assert_found(loader, set())
    with running(loader) as pids:
        assert len(pids) == 2
        assert_found(loader, pids)
    assert_found(loader, set())


def test_workers_that_are_started_anew_are_found_exactly():
    loaders = {
        "spawn": pid_loader(1, multiprocessing_context="spawn", persistent_workers=True),
        "forkserver": pid_loader(1, multiprocessing_context="forkserver"),
    }
    iter(loaders["spawn"])  # starts its worker, so that the two start at the same time
    with running(CombinedLoader(loaders["forkserver"])) as anew, running(loaders["spawn"]) as kept:
        assert not anew & kept
        assert_found(loaders["spawn"], kept)
        # Alone it does not hold its workers: they cannot be told from the other children.
        assert_found(loaders["forkserver"], anew | kept)
        for method, loader in loaders.items():
            assert describe_loader(loader).start_method == method


def test_a_process_of_the_users_is_not_taken_for_a_worker_of_a_trainers_loader():
    with running(CombinedLoader(pid_loader())) as pids:
        pass
    loader = CombinedLoader(pid_loader())
    other = multiprocessing.Process(target=time.sleep, args=(100,))
    other.start()
    try:
        with running(loader) as pids:
            assert_found(loader, pids)
            assert other.pid not in pids
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize("is_persistent", [False, True])
def test_the_workers_of_several_loaders_are_all_found(is_persistent):
    parts = {
        "a": pid_loader(2, persistent_workers=is_persistent),
        "b": [pid_loader(1, persistent_workers=is_persistent)],
    }
    loader = CombinedLoader(parts, "min_size")
    with running(loader) as pids:
        assert len(pids) == 3
        assert_found(loader, pids)
        facts = describe_loader(loader)
        assert (facts.num_workers, facts.is_persistent) in [(2, is_persistent), (3, is_persistent)]


def test_a_worker_that_dies_is_not_found_any_more():
    loader = pid_loader(persistent_workers=True)
    with running(loader) as pids:
        dead, alive = sorted(pids)
        process = next(one for one in loader._iterator._workers if one.pid == dead)
        process.terminate()
        process.join()
        assert_found(loader, {alive})


def test_a_streaming_dataset_has_workers_like_any_other():
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            for _ in range(8):
                yield os.getpid()

    loader = CombinedLoader(DataLoader(Stream(), batch_size=1, num_workers=2))
    with running(loader) as pids:
        assert_found(loader, pids)


def test_a_wrapper_is_looked_into():
    class Wrapper:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            return iter(self.loader)

        def __len__(self) -> int:
            return len(self.loader)

    inner = pid_loader(persistent_workers=True)
    loader = CombinedLoader(Wrapper(Wrapper(inner)))
    assert describe_loader(loader) == describe_loader(inner)
    with running(inner) as pids:
        assert_found(loader, pids)


def test_a_loader_without_workers_has_no_readers_but_a_reading_thread_that_is_ours(tmp_path):
    assert find_readers(DataLoader(torch.ones(4, 2))) == Readers((), [])
    with own_loader(tmp_path, num_samples=400) as loader:
        iterator = iter(loader)
        next(iterator)  # held, and far from its end, so its thread goes on
        found = find_readers(loader)
        assert (len(found.processes), len(found.threads)) == (0, 1)
        assert found == find_readers(CombinedLoader(loader))
        assert found.threads[0] in {int(name) for name in os.listdir("/proc/self/task")}
        # A foreign loader in front of it, without workers, has the same thread.
        assert describe_loader(DataLoader(torch.ones(2, 2))).has_thread


@contextmanager
def own_loader(folder: Path, num_samples: int = 40) -> Iterator[H5Loader]:
    path = folder / "own.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", data=np.ones((num_samples, 16, 16), "uint8"), chunks=(5, 16, 16))
        h5_file["labels"] = np.arange(num_samples)
    source = H5Source(path, ["images", "labels"])
    with H5Loader(source, 4, shuffle=FullShuffle()) as loader:
        try:
            yield loader
        finally:
            source.close()


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_loader_is_ready_when_a_worker_has_made_a_batch(is_persistent):
    loader = CombinedLoader(pid_loader(1, persistent_workers=is_persistent))
    assert is_ready(loader) is None  # nothing runs
    with running(loader):
        deadline = time.monotonic() + 20
        while not is_ready(loader) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_ready(loader) is True
    for unknown in (None, Bare(), Raising(), Answering(), DataLoader(range(4)), CombinedLoader(range(4))):
        assert is_ready(unknown) is None


def test_a_loader_whose_workers_cannot_go_on_is_not_ready():
    class Gated:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            if index == 2:
                gate.wait()
            return index

    gate = multiprocessing.Event()
    loader = DataLoader(Gated(), batch_size=1, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    try:
        assert [int(next(iterator)) for _ in range(2)] == [0, 1]
        assert is_ready(loader) is False
    finally:
        gate.set()
        next(iterator)
        del iterator
        loader._iterator = None


# How it is set up ------------------------------------------------------------------------------------------


def test_a_torch_loader_is_described_by_its_arguments():
    loader = DataLoader(range(8), batch_size=4, num_workers=3, prefetch_factor=5, persistent_workers=True)
    facts = describe_loader(loader)
    assert (facts.name, facts.num_workers, facts.batch_size, facts.prefetch_factor) == ("DataLoader", 3, 4, 5)
    assert (facts.is_persistent, facts.is_own, facts.has_thread, facts.pin_memory) == (True, False, False, False)
    assert facts.is_ahead
    assert facts.files == ()
    plain = describe_loader(DataLoader(range(8)))
    assert (plain.num_workers, plain.start_method, plain.prefetch_factor) == (0, None, None)
    assert not plain.is_ahead


def test_our_own_loader_is_described_with_its_files(tmp_path):
    with own_loader(tmp_path) as loader:
        facts = describe_loader(CombinedLoader([loader, DataLoader(range(8))]))
        assert (facts.is_own, facts.has_thread, facts.num_workers, facts.batch_size) == (True, True, 0, 4)
        assert facts.is_ahead
        for file in facts.files:
            assert file.path == str(tmp_path / "own.h5")
            assert (file.key, file.chunk_shape) == ("images", (5, 16, 16))
        assert set(cached_files(loader)) == {file.path for file in facts.files}
        assert all(0 <= share <= 1 for share in cached_files(loader).values())


class Bare:
    """Has nothing but batches."""

    def __iter__(self) -> Iterator[int]:
        yield 1


class Raising(Bare):
    """Its attributes are there when it runs, and not before."""

    @property
    def num_workers(self) -> int:
        raise RuntimeError("the pipeline is not built yet")

    batch_size = prefetch_factor = pin_memory = persistent_workers = multiprocessing_context = loader = num_workers


class Strange(Bare):
    """Its attributes are of other types."""

    num_workers = "auto"
    batch_size = (4, 8)
    prefetch_factor = None
    multiprocessing_context = "spawn"

    def pin_memory(self) -> None:
        """Is a method, as that of a tensor."""

    def persistent_workers(self) -> None:
        """The same."""


class Answering(Bare):
    """Has every attribute there is, as a proxy of another process does."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Answering()


class Threaded(Bare):
    """Loads with threads, and names the way its processes would be started."""

    num_workers = 4
    batch_size = 16
    multiprocessing_context = "spawn"


@pytest.mark.parametrize(
    "loader",
    [None, [], [1, 2], Bare(), Raising(), Strange(), Answering(), torch.ones(4, 2)],
    ids=["none", "empty", "list", "bare", "raising", "strange", "answering", "tensor"],
)
def test_of_a_class_that_nobody_knows_nothing_is_made_up(loader):
    for one in (loader, CombinedLoader(loader)) if loader is not None else (loader,):
        facts = describe_loader(one)
        assert (facts.num_workers, facts.batch_size, facts.prefetch_factor) == (0, None, None)
        assert facts.pin_memory is not True
        assert (facts.is_own, facts.is_persistent, facts.files, facts.start_method) == (False, False, (), None)
        assert find_readers(one) == Readers((), [])
        assert cached_files(one) == {}


def test_the_usual_attributes_of_a_foreign_loader_are_taken_from_it():
    facts = describe_loader(Threaded())
    assert (facts.name, facts.num_workers, facts.batch_size) == ("Threaded", 4, 16)
    assert facts.start_method in ("spawn", None)
    assert find_readers(Threaded()) == Readers([], ())


# Files -----------------------------------------------------------------------------------------------------


def write(path: Path, chunks: tuple[int, ...] | None = (8, 16, 16), num_samples: int = 600) -> Path:
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("images", data=np.ones((num_samples, 16, 16), "float32"), chunks=chunks)
        h5_file["labels"] = np.arange(num_samples)
    return path


def name(*paths: Path) -> tuple[FileFacts, ...]:
    return name_files(FOREIGN, map(str, paths), {})


def test_the_files_that_workers_have_open_are_found_and_no_others(tmp_path):
    folder = tmp_path / "a folder, with 'quotes'"
    folder.mkdir()
    path = write(folder / "train set.HDF5")
    other = write(tmp_path / "other.h5")
    loader = pid_loader(2, path=path, persistent_workers=True)
    with running(loader) as pids, h5py.File(other):
        assert open_files(find_readers(loader)) == [str(path)]
        assert open_files(Readers(pids, ())) == [str(path)]
        assert open_files(Readers((), ())) == [str(other)]  # nobody else loads, so it is this process
        assert open_files(Readers([2**22 + 1], ())) == []
        path.unlink()
        assert open_files(Readers(pids, ())) == []


def test_a_file_is_named_with_its_layout_and_the_line_that_makes_it_fast(tmp_path):
    path = write(tmp_path / "train set.h5")
    (file,) = name(path)
    assert (file.path, file.key, file.dtype) == (str(path), "images", "float32")
    assert (file.chunk_shape, file.chunk_samples, file.filters) == ((8, 16, 16), 8, ())
    assert file.command.startswith((f"gpufeed pack '{path}' OUT.h5", f"gpufeed repack '{path}' OUT.h5"))


def test_at_most_four_files_are_named(tmp_path):
    paths = [write(tmp_path / f"{number}.h5", num_samples=8) for number in range(6)]
    assert [file.path for file in name(*paths)] == [str(path) for path in paths[:4]]


def test_a_virtual_dataset_is_named_by_the_file_that_was_opened(tmp_path):
    parts = [write(tmp_path / f"part{number}.h5") for number in range(2)]
    path = tmp_path / "all.h5"
    layout = h5py.VirtualLayout((1200, 16, 16), "float32")
    for number, part in enumerate(parts):
        layout[600 * number : 600 * (number + 1)] = h5py.VirtualSource(str(part), "images", (600, 16, 16))
    with h5py.File(path, "w") as h5_file:
        h5_file.create_virtual_dataset("images", layout)
    (file,) = name(path)
    assert (file.path, file.key) == (str(path), "images")
    parts[0].unlink()
    (file,) = name(path)
    assert file.path == str(path)


def test_files_that_are_not_hdf5_are_not_named(tmp_path):
    (tmp_path / "old.mat").write_bytes(b"MATLAB 5.0 MAT-file".ljust(512))
    (tmp_path / "classic.nc").write_bytes(b"CDF\x01".ljust(512, b"\0"))
    (tmp_path / "empty.h5").touch()
    (tmp_path / "folder.h5").mkdir()
    os.mkfifo(tmp_path / "pipe.h5")
    true = write(tmp_path / "new.mat")
    assert [file.path for file in name(*sorted(tmp_path.iterdir()))] == [str(true)]


def test_files_without_anything_to_read_or_gone_are_no_error(tmp_path):
    with h5py.File(tmp_path / "scalar.h5", "w") as h5_file:
        h5_file["x"] = 5
    with h5py.File(tmp_path / "groups.h5", "w") as h5_file:
        h5_file.create_group("a/b")
    files = name(tmp_path / "scalar.h5", tmp_path / "groups.h5", tmp_path / "gone.h5")
    assert all((file.key, file.command) == (None, None) for file in files)


def test_a_file_with_a_dataset_for_every_sample_does_not_hold_up_the_training(tmp_path):
    path = tmp_path / "many.h5"
    with h5py.File(path, "w") as h5_file:
        for number in range(1000):
            h5_file[f"{number % 10}/{number}"] = [number] * 8
    begin = time.process_time()
    files = name(path)
    # Looking at each takes more than a millisecond, over a second for these; a file may hold a thousand times as many.
    assert time.process_time() - begin < 0.5
    assert [file.path for file in files] in ([], [str(path)])


WRITER = """
import sys, h5py
with h5py.File(sys.argv[1], "a", libver="latest") as h5_file:
    h5_file.require_dataset("more", (4,), "i8", maxshape=(None,), chunks=(4,))
    if sys.argv[2] == "swmr":
        h5_file.swmr_mode = True
    print("open", flush=True)
    sys.stdin.readline()
    h5_file["more"][:] = 7
    h5_file["more"].flush()
print("written", flush=True)
"""


@pytest.mark.parametrize("mode", ["locked", "swmr"])
def test_a_writer_in_another_process_is_not_disturbed(tmp_path, mode):
    path = tmp_path / "growing.h5"
    with h5py.File(path, "w", libver="latest") as h5_file:
        h5_file["x"] = np.ones((4, 4))
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout.readline() == "open\n"
        assert open_files(Readers([writer.pid], ())) == [str(path)]
        files = name(path)
        assert [file.path for file in files] in ([], [str(path)])
        out, _ = writer.communicate("go on\n", timeout=60)
        assert (out, writer.returncode) == ("written\n", 0)
    finally:
        writer.kill()
        writer.communicate()
    with h5py.File(path) as h5_file:
        assert h5_file["more"][:].tolist() == [7] * 4


def test_a_file_that_this_process_writes_or_reads_stays_open_for_it(tmp_path):
    path = tmp_path / "log.h5"
    with h5py.File(path, "w") as h5_file:
        log = h5_file.create_dataset("losses", (0,), "f4", maxshape=(None,), chunks=(16,))
        assert open_files(Readers((), ())) == [str(path)]
        name(path)
        log.resize((3,))
        log[:] = 5
        h5_file.flush()
        name(path)
        assert log[2] == 5
    with h5py.File(path, "r") as h5_file:
        read = h5_file["losses"]
        name(path)
        assert read[:].tolist() == [5, 5, 5]
    with h5py.File(path, "a") as h5_file:  # nothing that was opened is left open
        h5_file["more"] = 1


def test_files_of_our_own_loader_keep_what_it_said_of_them(tmp_path):
    with own_loader(tmp_path, num_samples=400) as loader:
        facts = describe_loader(loader)
        other = write(tmp_path / "other.h5")
        files = name_files(facts, [str(other)], {path: 0.5 for path in cached_files(loader)})
        assert [file.path for file in files] == [file.path for file in facts.files]
        for file, said in zip(files, facts.files, strict=True):
            assert (file.key, file.order, file.is_direct) == (said.key, said.order, said.is_direct)
            assert file.cached_share == 0.5


def test_describing_and_finding_start_nothing_and_take_no_batch():
    taken: list[int] = []

    class Counted(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            taken.append(index)
            return super().__getitem__(index)

    loader = DataLoader(Counted(torch.ones(4, 2)), num_workers=2)
    before = multiprocessing.active_children()
    for one in (loader, CombinedLoader([loader])):
        describe_loader(one)
        find_readers(one)
    assert multiprocessing.active_children() == before
    assert taken == []
