"""What feed.py measures on: images in all the formats, and what of them is in the page cache."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "feed_peers"))
from serve import Workload, checksum_of

# More than a reader may keep of it.
NUM_SMOOTH, QUICK_SMOOTH = 4_000, 200
SIZES = {"A": (20_000, (3, 64, 64), 64), "B": (4_000, (3, 224, 224), 8)}
QUICK_SIZES = {"A": (2_000, (3, 64, 64), 64)}
FILTERS = ("gzip-4", "lz4", "zstd-3")


def describe(workload: Workload) -> str:
    shape = "x".join(map(str, workload.sample_shape))
    megabytes = f"{workload.num_bytes / 1e6:,.0f} MB"
    return f"{workload.num_samples:,} x {shape} uint8, {megabytes}, {workload.chunk_rows} in a chunk"


def make_workload(folder: Path, size: tuple[int, tuple[int, ...], int], is_smooth: bool = False) -> Workload:
    """Write the images as .npy and as HDF5, unless they are there: noise, or pictures that can be compressed."""
    num_samples, sample_shape, chunk_rows = size
    note = {"num_samples": num_samples, "sample_shape": sample_shape, "chunk_rows": chunk_rows, "is_smooth": is_smooth}
    path = folder / "workload.json"
    if path.exists() and note.items() <= {**json.loads(path.read_text()), "sample_shape": sample_shape}.items():
        return Workload.load(folder)
    folder.mkdir(parents=True, exist_ok=True)
    images = _smooth(num_samples, sample_shape) if is_smooth else _noise(num_samples, sample_shape)
    np.save(folder / "images.npy", images)
    write_h5(folder / "images.h5", images, chunk_rows, {})
    checksum = checksum_of(images, np.arange(num_samples))
    path.write_text(json.dumps({**note, "checksum": checksum}))
    return Workload.load(folder)


def _noise(num_samples: int, sample_shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_samples, *sample_shape), np.uint8)


def _smooth(num_samples: int, sample_shape: tuple[int, ...]) -> np.ndarray:
    """Soft waves and a little noise, compressed about as well as a scan or a scene without much detail."""
    random = np.random.default_rng(0)
    _, height, width = sample_shape
    # Images of one chunk are moved copies of different ones, so none is found again inside a chunk.
    drawn = np.empty((64, *sample_shape), np.uint8)
    across, down = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]
    for image in drawn:
        for channel in image:
            waves = random.uniform(0.5, 4, (3, 2)) * 2 * np.pi / width
            soft = sum(np.sin(x * across + y * down + random.uniform(0, 6)) for x, y in waves)
            channel[:] = (soft * 35 + 118).astype(np.uint8) // 4 * 4
            if random.random() < 0.25:
                channel += random.integers(0, 4, (height, width), np.uint8)
    images = np.empty((num_samples, *sample_shape), np.uint8)
    for number, image in enumerate(images):
        down_by, across_by = (int(by) for by in random.integers(0, (height, width)))
        image[:] = np.roll(drawn[number % len(drawn)], (down_by, across_by), (1, 2))
    return images


def write_h5(path: Path, images: np.ndarray, chunk_rows: int, filters: dict[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(
            "images", images.shape, np.uint8, chunks=(chunk_rows, *images.shape[1:]), **filters
        )
        for start in range(0, len(images), chunk_rows):
            dataset[start : start + chunk_rows] = images[start : start + chunk_rows]
        file.create_dataset("labels", data=np.arange(len(images)))


def compressed_h5(workload: Workload, name: str) -> str:
    """The same images, compressed: the file's name."""
    h5_name = f"images-{name}.h5"
    if not workload.own(h5_name).exists():
        if name == "gzip-4":
            filters: dict[str, Any] = {"compression": "gzip", "compression_opts": 4}
        else:
            import hdf5plugin

            filters = dict(hdf5plugin.LZ4() if name == "lz4" else hdf5plugin.Zstd(3))
        write_h5(workload.own("writing.h5"), workload.images, workload.chunk_rows, filters)
        workload.own("writing.h5").rename(workload.own(h5_name))
    return h5_name


# The page cache --------------------------------------------------------------------------------------------------


def files_of(path: Path) -> list[Path]:
    return [one for one in ([path] if path.is_file() else sorted(path.rglob("*"))) if one.is_file()]


def evict(path: Path) -> None:
    """Take files out of the page cache. Pages that a process has mapped stay, so they are dropped there first."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bring_in(path: Path) -> None:
    """Read files that are not in the page cache any more: all arms' files may be more than it holds."""
    buffer = bytearray(4 << 20)
    for file in files_of(path):
        if cached_share(file) < 1:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass


def cached_share(path: Path) -> float:
    """Which share of the pages of files is in memory."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    num_cached = num_pages = 0
    for file in files_of(path):
        size = file.stat().st_size
        if not size:
            continue
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            pages = -(-size // mmap.PAGESIZE)
            answer = np.zeros(pages, np.uint8)
            start = np.frombuffer(mapped, np.uint8).ctypes.data
            if mincore(start, size, answer.ctypes.data):
                raise OSError(ctypes.get_errno(), f"mincore: {file}")
            num_cached, num_pages = num_cached + int((answer & 1).sum()), num_pages + pages
    return num_cached / num_pages if num_pages else 0.0
