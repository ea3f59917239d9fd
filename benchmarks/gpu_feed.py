"""How fast do images get from an HDF5 file onto the GPU, as floats ready for a model?

    python benchmarks/gpu_feed.py [--rounds 5] [--json FILE]

One shuffled epoch of 8 000 images of 3x224x224 (1.2 GB, in the page cache), batches of 256, waited for at its end.
The arms take turns; medians. The bound is the copy of the same uint8 bytes from pinned memory to the device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpufeed import H5Loader
from lightning_gpufeed.device.images import ImagePreparation

NUM_SAMPLES, SHAPE, BATCH_SIZE = 8_000, (3, 224, 224), 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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


def copy_bound() -> None:
    batch = torch.empty((BATCH_SIZE, *SHAPE), dtype=torch.uint8, pin_memory=True)
    for _ in range(NUM_SAMPLES // BATCH_SIZE):
        batch.to("cuda", non_blocking=True)


def over_loader(loader: H5Loader, prepare: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[], None]:
    def epoch() -> None:
        for batch in loader:
            images = batch["images"].to("cuda", non_blocking=True)
            if prepare is not None:
                prepare(images)

    return epoch


def over_dataloader(path: Path, workers: int) -> Callable[[], None]:
    loader = DataLoader(
        ItemDataset(path, None), BATCH_SIZE, shuffle=True, num_workers=workers, pin_memory=True, persistent_workers=True
    )
    prepare = ImagePreparation("NCHW", MEAN, STD)

    def epoch() -> None:
        for images, _ in loader:
            prepare(images.to("cuda", non_blocking=True))

    return epoch


def seconds_of(epoch: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    epoch()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA")
        return
    workers = min(8, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "images.h5")
        with h5py.File(path, "w") as h5_file:
            images = h5_file.create_dataset("images", (NUM_SAMPLES, *SHAPE), "uint8", chunks=(8, *SHAPE))
            for begin in range(0, NUM_SAMPLES, 1000):
                images[begin : begin + 1000] = np.random.default_rng(begin).integers(0, 256, (1000, *SHAPE), np.uint8)
            h5_file["labels"] = np.arange(NUM_SAMPLES)
        loader = H5Loader(path, BATCH_SIZE)
        arms = {
            "bound: copy from pinned memory": copy_bound,
            "H5Loader -> device, uint8": over_loader(loader, None),
            "H5Loader -> device, float32 normalised": over_loader(loader, ImagePreparation("NCHW", MEAN, STD)),
            "  copied ahead on a stream of its own": over_loader(
                H5Loader(path, BATCH_SIZE, device="cuda"), ImagePreparation("NCHW", MEAN, STD)
            ),
            "  read by a process of its own": over_loader(
                H5Loader(path, BATCH_SIZE, isolate=True), ImagePreparation("NCHW", MEAN, STD)
            ),
            "  in steps, not by a table": over_loader(loader, ImagePreparation("NCHW", MEAN, STD)._in_steps),
            "  bfloat16, channels last": over_loader(
                loader, ImagePreparation("NCHW", MEAN, STD, dtype=torch.bfloat16, channels_last=True)
            ),
            f"DataLoader + h5py, {workers} workers, float32": over_dataloader(path, workers),
        }
        results: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(options.rounds + 1):
            for name in arms if number % 2 else reversed(arms):
                results[name].append(seconds_of(arms[name]))
    num_bytes = NUM_SAMPLES * int(np.prod(SHAPE))
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores")
    print(f"{'':44}{'GB/s':>8}{'k images/s':>12}{'min-max s':>18}")
    for name, values in results.items():
        # The first round warms the page cache, the buffers and the workers.
        kept = values[1:]
        median = statistics.median(kept)
        rates = f"{num_bytes / median / 1e9:8.2f}{NUM_SAMPLES / median / 1e3:12.1f}"
        print(f"{name:44}{rates}{min(kept):11.3f}-{max(kept):.3f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
