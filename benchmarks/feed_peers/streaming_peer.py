"""mosaicml-streaming: MDS shards, read in place."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from serve import BATCH_SIZE, Arm, Epoch, Workload, serve

# streaming imports torchvision, which registers operators that a torch without CUDA cannot load; arrays need none.
if not torch.backends.cuda.is_built():
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")

from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

PREFIXES: list[int] = []


def folder(workload: Workload) -> Path:
    return workload.own("mds")


def convert(workload: Workload) -> None:
    columns = {"image": f"ndarray:uint8:{','.join(map(str, workload.sample_shape))}", "label": "int"}
    with MDSWriter(out=str(folder(workload)), columns=columns) as writer:
        for label, image in enumerate(workload.images):
            writer.write({"image": image, "label": label})


def loader(num_workers: int, **arguments: Any) -> Any:
    def open_loader(workload: Workload) -> Epoch:
        # Two datasets over one folder are refused; a link of its own lets arms run side by side.
        link = workload.own(f"mds-{os.getpid()}")
        link.symlink_to(folder(workload))
        dataset = StreamingDataset(local=str(link), shuffle=True, batch_size=BATCH_SIZE, **arguments)
        PREFIXES.append(dataset._shm_prefix_int)
        loader = DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=num_workers)
        return lambda number: ((batch["image"], batch["label"]) for batch in loader)

    return open_loader


def clean(workload: Workload) -> None:
    """What it leaves behind otherwise, shared memory above all."""
    for prefix in PREFIXES:
        for left in Path("/dev/shm").glob(f"{prefix:06}_*"):
            left.unlink(missing_ok=True)
    workload.own(f"mds-{os.getpid()}").unlink(missing_ok=True)


if __name__ == "__main__":
    arms = {f"full-{workers}": Arm(loader(workers, shuffle_algo="naive"), convert, folder) for workers in (0, 2)}
    arms |= {f"default-{workers}": Arm(loader(workers), convert, folder) for workers in (0, 2)}
    serve(arms, clean)
