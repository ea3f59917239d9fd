"""FFCV: a .beton file, mapped; loops compiled by numba."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, NDArrayField
from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import Squeeze, ToTensor
from ffcv.writer import DatasetWriter
from serve import BATCH_SIZE, Arm, Epoch, Workload, serve


def beton(workload: Workload) -> Path:
    return workload.own("images.beton")


class Samples:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __len__(self) -> int:
        return self.workload.num_samples

    def __getitem__(self, label: int) -> Any:
        return np.array(self.workload.images[label]), label


def convert(workload: Workload) -> None:
    fields = {"image": NDArrayField(np.dtype("uint8"), workload.sample_shape), "label": IntField()}
    writer = DatasetWriter(str(beton(workload)), fields, num_workers=2)
    writer.from_indexed_dataset(Samples(workload), chunksize=256)


def loader(num_workers: int, order: OrderOption) -> Any:
    def open_loader(workload: Workload) -> Epoch:
        loader = Loader(
            str(beton(workload)),
            batch_size=BATCH_SIZE,
            num_workers=num_workers,
            order=order,
            os_cache=True,
            drop_last=False,
            pipelines={"image": [NDArrayDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor(), Squeeze()]},
        )
        # The labels' memory is used again, so it is copied.
        return lambda number: ((images, labels.clone()) for images, labels in loader)

    return open_loader


if __name__ == "__main__":
    arms = {f"random-{workers}": Arm(loader(workers, OrderOption.RANDOM), convert, beton) for workers in (1, 2)}
    arms["quasi-2"] = Arm(loader(2, OrderOption.QUASI_RANDOM), convert, beton)
    serve(arms)
