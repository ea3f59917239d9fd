"""litdata. A full shuffle needs one chunk for all samples; by default it shuffles chunks and windows inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import litdata
import torch
from serve import BATCH_SIZE, Arm, Epoch, Workload, serve


def one_chunk(workload: Workload) -> Path:
    return workload.own("litdata-one-chunk")


def chunks(workload: Workload) -> Path:
    return workload.own("litdata")


class Sample:
    """A function that can be sent to another process."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __call__(self, label: int) -> dict[str, Any]:
        return {"image": torch.from_numpy(self.workload.images[label].copy()), "label": label}


def convert(workload: Workload, folder: Path, chunk_bytes: int) -> None:
    litdata.optimize(
        Sample(workload),
        list(range(workload.num_samples)),
        str(folder),
        chunk_bytes=chunk_bytes,
        num_workers=1,
        keep_data_ordered=True,
        verbose=False,
    )


def convert_to_one(workload: Workload) -> None:
    convert(workload, one_chunk(workload), 2 * workload.num_bytes)


def convert_to_chunks(workload: Workload) -> None:
    convert(workload, chunks(workload), 64 << 20)


def loader(folder: Path, num_workers: int, **arguments: Any) -> Epoch:
    dataset = litdata.StreamingDataset(str(folder), shuffle=True, drop_last=False, **arguments)
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=num_workers, drop_last=False)
    return lambda number: ((batch["image"], batch["label"]) for batch in loader)


def full(num_workers: int) -> Arm:
    def open_loader(workload: Workload) -> Epoch:
        return loader(one_chunk(workload), num_workers, item_shuffle_window="full", batch_decode=0)

    return Arm(open_loader, convert_to_one, one_chunk)


def default(num_workers: int) -> Arm:
    return Arm(lambda workload: loader(chunks(workload), num_workers), convert_to_chunks, chunks)


if __name__ == "__main__":
    serve({"full-0": full(0), "full-2": full(2), "default-0": default(0), "default-2": default(2)})
