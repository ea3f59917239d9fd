"""SPDL: a pipeline of threads, without a format or a shuffle: a batch's numbers go in, its tensors come out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import torch
from serve import Arm, Epoch, Workload, batches_of, serve
from spdl.pipeline import PipelineBuilder


def pipeline(workload: Workload, read: Any) -> Epoch:
    def epoch(number: int) -> Iterator[Any]:
        batches = list(batches_of(np.random.default_rng(number).permutation(workload.num_samples)))
        built = PipelineBuilder().add_source(batches).pipe(read, concurrency=2).add_sink(3).build(num_threads=2)
        with built.auto_stop():
            yield from built.get_iterator()

    return epoch


def npy(workload: Workload) -> Epoch:
    torch.set_num_threads(1)  # of each of the pipeline's two
    images = torch.from_numpy(np.load(workload.npy, mmap_mode="r")).flatten(1)  # index_select is fast for rows

    def read(batch: np.ndarray) -> Any:
        labels = torch.from_numpy(batch)
        return images.index_select(0, labels).unflatten(1, workload.sample_shape), labels

    return pipeline(workload, read)


def h5(workload: Workload) -> Epoch:
    images = h5py.File(workload.h5, rdcc_nbytes=0)["images"]

    def read(batch: np.ndarray) -> Any:
        read_images = torch.empty((len(batch), *workload.sample_shape), dtype=torch.uint8)
        into = read_images.numpy()
        for place, index in enumerate(batch.tolist()):
            into[place] = images[index]
        return read_images, torch.from_numpy(batch)

    return pipeline(workload, read)


if __name__ == "__main__":
    serve({"npy": Arm(npy, files=lambda workload: workload.npy), "h5": Arm(h5)})
