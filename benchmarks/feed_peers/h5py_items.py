"""h5py in a `DataLoader`, and by whole chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import torch
from serve import BATCH_SIZE, Arm, Epoch, Workload, batches_of, in_windows, serve
from torch.utils.data import DataLoader, Dataset

with contextlib.suppress(ImportError):
    import hdf5plugin  # noqa: F401  (registers lz4 and zstd)

WINDOW = 4096


class Items(Dataset):
    """The usual way: one read per sample; the file is opened at the first one of each process."""

    def __init__(self, workload: Workload, options: dict[str, Any]) -> None:
        self.workload, self.options = workload, options
        self.file = None

    def __len__(self) -> int:
        return self.workload.num_samples

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.workload.h5, **self.options)
            self.images, self.labels = self.file["images"], self.file["labels"]
        return torch.from_numpy(self.images[index]), int(self.labels[index])


def items(num_workers: int, **options: Any) -> Any:
    def open_loader(workload: Workload) -> Epoch:
        loader = DataLoader(Items(workload, options), BATCH_SIZE, shuffle=True, num_workers=num_workers)
        return lambda number: iter(loader)

    return open_loader


def whole_chunks(workload: Workload) -> Epoch:
    """Each chunk read, and decoded by HDF5, once; shuffled among 4096 samples. The best that h5py itself can do."""
    file = h5py.File(workload.h5)
    images, labels = file["images"], file["labels"][:]
    rows = images.chunks[0]

    def epoch(number: int) -> Iterator[Any]:
        random = np.random.default_rng(number)
        starts = random.permutation(np.arange(0, workload.num_samples, rows))
        left_images = np.empty((0, *workload.sample_shape), np.uint8)
        left_labels = np.empty(0, np.int64)
        for window in in_windows(iter(starts), WINDOW // rows):
            read_images = np.concatenate([left_images, *(images[start : start + rows] for start in window)])
            read_labels = np.concatenate([left_labels, *(labels[start : start + rows] for start in window)])
            order = random.permutation(len(read_labels))
            num_full = len(order) // BATCH_SIZE * BATCH_SIZE
            for batch in batches_of(order[:num_full]):
                yield torch.from_numpy(read_images[batch]), torch.from_numpy(read_labels[batch])
            left_images, left_labels = read_images[order[num_full:]], read_labels[order[num_full:]]
        if len(left_labels):
            yield torch.from_numpy(left_images), torch.from_numpy(left_labels)

    return epoch


def in_a_row(workload: Workload) -> Epoch:
    """From the first to the last, 256 samples by one call: nothing is shuffled, nothing decoded twice."""
    file = h5py.File(workload.h5)
    images, labels = file["images"], torch.from_numpy(file["labels"][:])

    def epoch(number: int) -> Iterator[Any]:
        for start in range(0, workload.num_samples, BATCH_SIZE):
            yield torch.from_numpy(images[start : start + BATCH_SIZE]), labels[start : start + BATCH_SIZE]

    return epoch


serve(
    {
        "usual-0": Arm(items(0)),
        "usual-2": Arm(items(2)),
        "no-cache-0": Arm(items(0, rdcc_nbytes=0)),
        "no-cache-2": Arm(items(2, rdcc_nbytes=0)),
        "chunks": Arm(whole_chunks),
        "in-a-row": Arm(in_a_row),
    }
)
