"""HDF5 in a store that answers late, at the address in GPUFEED_STORE."""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import torch
from serve import BATCH_SIZE, Arm, Epoch, Workload, batches_of, serve

CACHE = tempfile.mkdtemp(prefix="gpufeed-remote-")


def address(workload: Workload) -> str:
    return f"{os.environ['GPUFEED_STORE']}/{workload.h5_name}"


def bound(workload: Workload) -> Epoch:
    buffer = bytearray(1 << 20)

    def epoch(number: int) -> Iterator[Any]:
        with urllib.request.urlopen(address(workload)) as answer:
            while count := answer.readinto(buffer):
                yield count, None

    return epoch


def h5loader(shuffle: str) -> Any:
    def open_loader(workload: Workload) -> Epoch:
        from lightning_gpufeed import H5Loader

        os.environ["XDG_CACHE_HOME"] = CACHE

        def epoch(number: int) -> Iterator[Any]:
            # Whatever the last round has kept on disk.
            shutil.rmtree(CACHE, ignore_errors=True)
            with H5Loader(address(workload), BATCH_SIZE, shuffle=shuffle, seed=number) as loader:
                for batch in loader:
                    yield batch["images"], batch["labels"]

        return epoch

    return open_loader


def h5py_over_fsspec(h5_options: dict[str, Any], **arguments: Any) -> Any:
    def open_file(workload: Workload) -> Epoch:
        import fsspec

        def epoch(number: int) -> Iterator[Any]:
            order = np.random.default_rng(number).permutation(workload.num_samples)
            with fsspec.open(address(workload), **arguments) as opened, h5py.File(opened, **h5_options) as file:
                images, labels = file["images"], file["labels"]
                for batch in batches_of(order):
                    samples = [images[index] for index in batch.tolist()]
                    found = [labels[index] for index in batch.tolist()]
                    yield torch.from_numpy(np.stack(samples)), torch.as_tensor(np.array(found))

        return epoch

    return open_file


def clean(workload: Workload) -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


serve(
    {
        "bound": Arm(bound),
        "full": Arm(h5loader("full")),
        "window": Arm(h5loader("window")),
        "usual": Arm(h5py_over_fsspec({})),
        "blocks": Arm(h5py_over_fsspec({"rdcc_nbytes": 0}, block_size=64 << 10, cache_type="blockcache")),
    },
    clean,
)
