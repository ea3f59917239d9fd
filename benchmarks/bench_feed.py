"""Claim: a fully shuffled epoch from HDF5 at a large share of the speed of memory.

    python benchmarks/bench_feed.py [--rounds 5] [--workers 2] [--json FILE]

Each arm reads one whole epoch, every sample once in a new random order, as uint8 batches of 256 on the host, from files
that lie in the page cache. The arms take turns, round by round, and the median over the rounds is shown; every arm of
every round proves by the labels that it delivered each sample once.

The bound is a copy of the same bytes from the page cache by one thread (`preadv` into a buffer of 1 MiB).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_gpufeed import H5Loader

BATCH_SIZE = 256


@dataclass(frozen=True)
class Workload:
    name: str
    num_samples: int
    sample_shape: tuple[int, ...]
    chunk_rows: int

    @property
    def num_bytes(self) -> int:
        return self.num_samples * int(np.prod(self.sample_shape))


WORKLOADS = [
    Workload("20 000 x 3x64x64, 64 per chunk (786 kB)", 20_000, (3, 64, 64), 64),
    Workload("4 000 x 3x224x224, 8 per chunk (1.2 MB)", 4_000, (3, 224, 224), 8),
]


class ItemDataset(Dataset):
    """The usual way: one h5py read per sample; the file is opened at the first read of each process."""

    def __init__(self, path: Path, cache_bytes: int | None) -> None:
        self.path = path
        self.cache_bytes = cache_bytes
        self.file = None
        with h5py.File(path) as h5_file:
            self.num_samples = len(h5_file["images"])

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int):
        if self.file is None:
            options = {} if self.cache_bytes is None else {"rdcc_nbytes": self.cache_bytes}
            self.file = h5py.File(self.path, **options)
            self.images, self.labels = self.file["images"], self.file["labels"]
        return torch.from_numpy(self.images[index]), int(self.labels[index])

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class MemmapDataset(Dataset):
    """The best that plain PyTorch can do after leaving HDF5: a .npy file mapped into memory, a batch per read."""

    def __init__(self, path: Path, labels: np.ndarray) -> None:
        self.images = np.load(path, mmap_mode="r")
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, indices: list[int]):
        return torch.from_numpy(self.images[indices]), torch.from_numpy(self.labels[indices])


def batches_of_items(path: Path, cache_bytes: int | None, workers: int) -> Callable[[], Iterator]:
    dataset = ItemDataset(path, cache_bytes)
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers)

    def epoch() -> Iterator:
        yield from loader
        # While one arm has the file open, HDF5 gives the next one its chunk cache.
        dataset.close()

    return epoch


def batches_of_memmap(path: Path, labels: np.ndarray) -> Callable[[], Iterator]:
    dataset = MemmapDataset(path, labels)
    sampler = BatchSampler(RandomSampler(dataset), BATCH_SIZE, drop_last=False)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None)
    return lambda: iter(loader)


def batches_of_h5loader(path: Path) -> Callable[[], Iterator]:
    loader = H5Loader(path, BATCH_SIZE)

    def epoch() -> Iterator:
        for batch in loader:
            yield batch["images"], batch["labels"]

    return epoch


def copy_bound(path: Path) -> float:
    """Seconds to copy the whole file out of the page cache."""
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        begin = time.perf_counter()
        offset = 0
        while count := os.preadv(file.fileno(), [buffer], offset):
            offset += count
        return time.perf_counter() - begin


def run_epoch(epoch: Callable[[], Iterator], num_samples: int) -> float:
    """Seconds for one epoch; refuses one that lost or repeated a sample."""
    seen = []
    begin = time.perf_counter()
    for _, labels in epoch():
        seen.append(torch.as_tensor(labels))
    seconds = time.perf_counter() - begin
    if not torch.equal(torch.cat(seen).sort().values, torch.arange(num_samples)):
        raise SystemExit("an arm lost or repeated samples; its time means nothing")
    return seconds


def make_files(workload: Workload, folder: Path) -> tuple[Path, Path, np.ndarray]:
    images = np.random.default_rng(0).integers(0, 256, (workload.num_samples, *workload.sample_shape), np.uint8)
    labels = np.arange(workload.num_samples)
    h5_path, npy_path = folder / "images.h5", folder / "images.npy"
    with h5py.File(h5_path, "w") as h5_file:
        h5_file.create_dataset("images", data=images, chunks=(workload.chunk_rows, *workload.sample_shape))
        h5_file.create_dataset("labels", data=labels)
    np.save(npy_path, images)
    return h5_path, npy_path, labels


def measure(workload: Workload, rounds: int, workers: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        h5_path, npy_path, labels = make_files(workload, Path(folder))
        arms = {
            "H5Loader, full shuffle": batches_of_h5loader(h5_path),
            ".npy memmap, DataLoader, a batch per read": batches_of_memmap(npy_path, labels),
            "h5py per sample, DataLoader, no chunk cache": batches_of_items(h5_path, 0, 0),
            f"  no chunk cache, {workers} workers": batches_of_items(h5_path, 0, workers),
            "h5py per sample, DataLoader (as usual)": batches_of_items(h5_path, None, 0),
            f"  as usual, {workers} workers": batches_of_items(h5_path, None, workers),
        }
        names = list(arms)
        seconds: dict[str, list[float]] = {"bound: copy from the page cache, 1 thread": []} | {n: [] for n in names}
        for number in range(rounds + 1):
            seconds["bound: copy from the page cache, 1 thread"].append(copy_bound(h5_path))
            for name in names if number % 2 else reversed(names):
                seconds[name].append(run_epoch(arms[name], workload.num_samples))
        # The first round warms the page cache, the mappings and the buffers.
        return {name: values[1:] for name, values in seconds.items()}


def show(workload: Workload, seconds: dict[str, list[float]]) -> None:
    usual = statistics.median(seconds["h5py per sample, DataLoader (as usual)"])
    bound = statistics.median(seconds["bound: copy from the page cache, 1 thread"])
    print(f"\n{workload.name}, {workload.num_bytes / 1e6:.0f} MB, batch {BATCH_SIZE}, warm page cache")
    print(f"{'':46}{'GB/s':>8}{'k samples/s':>13}{'x usual':>9}{'of bound':>10}{'min-max s':>16}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:46}{workload.num_bytes / median / 1e9:8.2f}{workload.num_samples / median / 1e3:13.1f}"
            f"{usual / median:9.1f}{100 * bound / median:8.0f} %{min(values):9.3f}-{max(values):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    print(f"torch {torch.__version__}, h5py {h5py.__version__}, {os.cpu_count()} cores, {platform.machine()}")
    results = {}
    for workload in WORKLOADS:
        results[workload.name] = measure(workload, options.rounds, options.workers)
        show(workload, results[workload.name])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
