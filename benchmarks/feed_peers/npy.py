"""A .npy file mapped into memory: what one can have after leaving HDF5, and all other formats."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from serve import BATCH_SIZE, Arm, Epoch, Workload, batches_of, serve
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Mapped(Dataset):
    def __init__(self, workload: Workload) -> None:
        self.images = np.load(workload.npy, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, indices: list[int]) -> Any:
        return torch.from_numpy(self.images[indices]), torch.as_tensor(indices)


def dataloader(workload: Workload) -> Epoch:
    dataset = Mapped(workload)
    sampler = BatchSampler(RandomSampler(dataset), BATCH_SIZE, drop_last=False)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None)
    return lambda number: iter(loader)


def loop(num_threads: int) -> Any:
    def open_file(workload: Workload) -> Epoch:
        torch.set_num_threads(num_threads)
        images = torch.from_numpy(np.load(workload.npy, mmap_mode="r")).flatten(1)  # index_select is fast for rows

        def epoch(number: int) -> Iterator[Any]:
            for batch in batches_of(np.random.default_rng(number).permutation(workload.num_samples)):
                labels = torch.from_numpy(batch)
                yield images.index_select(0, labels).unflatten(1, workload.sample_shape), labels

        return epoch

    return open_file


def npy(workload: Workload) -> Any:
    return workload.npy


serve({"dataloader": Arm(dataloader, files=npy), "loop-1": Arm(loop(1), files=npy), "loop-2": Arm(loop(2), files=npy)})
