"""WebDataset: tar files of 1000 samples, read in sequence through a shuffle buffer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import webdataset as wds
from serve import BATCH_SIZE, Arm, Epoch, Workload, serve


def folder(workload: Workload) -> Path:
    return workload.own("webdataset")


def convert(workload: Workload) -> None:
    folder(workload).mkdir()
    with wds.ShardWriter(f"{folder(workload)}/%05d.tar", maxcount=1000, verbose=0) as writer:
        for label, image in enumerate(workload.images):
            writer.write({"__key__": f"{label:08}", "bin": image.tobytes(), "cls": label})


def decode(shape: tuple[int, ...], sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return torch.frombuffer(sample["bin"], dtype=torch.uint8).view(shape), int(sample["cls"])


def stack(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def loader(num_workers: int, is_full: bool) -> Any:
    def open_loader(workload: Workload) -> Epoch:
        shards = sorted(str(path) for path in folder(workload).glob("*.tar"))
        # A buffer for all samples is a full shuffle; 1000 is what the documentation's examples have.
        buffer = workload.num_samples if is_full else 1000

        def epoch(number: int) -> Iterator[Any]:
            dataset = (
                wds.WebDataset(shards, shardshuffle=len(shards), seed=number, empty_check=False)
                .shuffle(buffer, initial=buffer)
                .map(partial(decode, workload.sample_shape))
                .batched(BATCH_SIZE, collation_fn=stack)
            )
            return iter(wds.WebLoader(dataset, batch_size=None, num_workers=num_workers))

        return epoch

    return open_loader


serve(
    {
        f"{name}-{workers}": Arm(loader(workers, name == "full"), convert, folder)
        for name in ("full", "default")
        for workers in (0, 2)
    }
)
