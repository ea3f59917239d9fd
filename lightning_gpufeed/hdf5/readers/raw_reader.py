"""Uncompressed samples: gathered from the mapped file while it is in memory, read ahead while it is not.

Looked at when an epoch begins, by asking for bytes at random places whether they are in memory::

    in memory                                ->  gather from the mapped file
    on the disk, blocks fit into the buffer  ->  whole blocks, each read once, by several threads
    on the disk, they do not                 ->  single samples, asked for some batches ahead
    network file system                      ->  never mapped: a page that cannot be had is a fatal signal

What is read is the same; only the way to it changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.file_system import is_network
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.readers.chunk_plan import SamplePlan
from lightning_gpufeed.hdf5.readers.chunk_reader import ChunkReader
from lightning_gpufeed.hdf5.readers.gather_reader import GatherReader
from lightning_gpufeed.hdf5.readers.kernel_reader import KernelReader
from lightning_gpufeed.hdf5.readers.mapped_guard import is_guarded
from lightning_gpufeed.hdf5.readers.row_blocks import BlockNumbers
from lightning_gpufeed.hdf5.residency import cached_share

__all__ = ["RawReader", "Way", "choose_way"]

Indices = npt.NDArray[np.int64]

_WARM_SHARE = 0.9
_MOST_FILES = 16
_NUM_PLACES = 64


class Way(StrEnum):
    """How samples of uncompressed files are read."""

    GATHER = "gathered from the mapped file"
    BLOCKS = "whole blocks are read, each once, by several threads"
    READS = "samples are read by many requests at once, ahead of time"


def choose_way(share: float | None, *, may_map: bool, fits_buffer: bool) -> Way:
    """Pick a way of reading. Pure.

    Args:
        share: Share of the stored bytes in memory, 0 to 1; None if not known.
        may_map: Whether the files may be mapped into memory.
        fits_buffer: Whether each block can be kept from its first use to its last.

    Returns:
        The way. What is not known counts as in memory, unless it is on a network.
    """
    is_warm = share is None or share >= _WARM_SHARE
    if may_map and is_warm:
        return Way.GATHER
    if fits_buffer and not (share is not None and is_warm):
        return Way.BLOCKS
    return Way.READS


class _Reader(Protocol):
    def read_into(self, indices: Indices, out: torch.Tensor) -> None: ...

    def expect(self, indices: Indices, batch_samples: int = 1) -> None: ...

    def rest(self) -> None: ...

    def close(self) -> None: ...


class RawReader:
    """Reads samples of raw-engine layouts by the way that is fastest now; see `FieldReader`.

    Attributes:
        way: The way taken now.
    """

    def __init__(
        self,
        layouts: Sequence[H5DatasetLayout],
        *,
        buffer_bytes: int,
        on_way: Callable[[str], None] | None = None,
    ) -> None:
        """Open the files.

        Args:
            layouts: One raw-engine layout per file.
            buffer_bytes: Limit of the buffer for whole blocks.
            on_way: Told in a line when the way changes.
        """
        self._layouts = list(layouts)
        self._buffer_bytes = buffer_bytes
        self._on_way = on_way
        paths = {layout.storage_path for layout in layouts}
        self._may_map = is_guarded() and not any(is_network(path) for path in paths)
        self._lock = threading.Lock()
        self.way = Way.GATHER if self._may_map else Way.READS
        self._reader: _Reader | None = self._open(self.way)

    def expect(self, indices: Indices, batch_samples: int = 1) -> None:
        """An epoch begins: look where the files are, and take the way for it.

        Args:
            indices: int64 (n,) sample numbers that come next.
            batch_samples: Samples read at a time.
        """
        share = _share_in_memory(self._layouts)
        fits_buffer = (share is None or share < _WARM_SHARE or not self._may_map) and self._fits_buffer(
            indices, batch_samples
        )
        way = choose_way(share, may_map=self._may_map, fits_buffer=fits_buffer)
        with self._lock:
            if self._reader is None:
                return
            if way is not self.way:
                former, self._reader, self.way = self._reader, self._open(way), way
                former.close()
                if self._on_way is not None:
                    known = "" if share is None else f"{100 * share:.0f} % of it is in memory: "
                    self._on_way(f"{self._layouts[0].key}: {known}{way}")
            reader = self._reader
        reader.expect(indices, batch_samples)

    def _open(self, way: Way) -> _Reader:
        if way is Way.GATHER:
            return GatherReader(self._layouts)
        if way is Way.BLOCKS:
            return ChunkReader(self._layouts, buffer_bytes=self._buffer_bytes)
        return KernelReader(self._layouts)

    def _fits_buffer(self, indices: Indices, batch_samples: int) -> bool:
        """Whether the samples in play at the same time fit into the buffer."""
        plan = SamplePlan.of(indices, BlockNumbers.of(self._layouts).locate(indices)[0])
        return plan.most_kept(batch_samples) * self._layouts[0].sample_bytes <= self._buffer_bytes

    def read_into(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy samples into place; see `FieldReader.read_into`.

        Args:
            indices: int64 (n,) sample numbers.
            out: (n, *sample_shape), contiguous, host memory.

        Raises:
            FeedError: The reader is closed, a file became shorter or cannot be read.
        """
        reader = self._reader
        if reader is None:
            raise FeedError("the reader is closed; open another one.")
        reader.read_into(indices, out)

    def rest(self) -> None:
        """Nothing is read for a while; see `FieldReader.rest`."""
        reader = self._reader
        if reader is not None:
            reader.rest()

    def close(self) -> None:
        """Let go of files and memory. Closing twice is allowed."""
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def _share_in_memory(layouts: Sequence[H5DatasetLayout]) -> float | None:
    """Share of the stored bytes in memory, by some places in some of the files."""
    sizes = np.array([layout.total_bytes for layout in layouts], dtype=np.float64)
    picked: Sequence[H5DatasetLayout] = layouts
    if len(layouts) > _MOST_FILES:
        numbers = np.random.default_rng().choice(len(layouts), _MOST_FILES, replace=False, p=sizes / sizes.sum())
        picked, sizes = [layouts[number] for number in numbers.tolist()], np.ones(_MOST_FILES)
    try:
        shares = [cached_share(layout, max(4, _NUM_PLACES // len(picked))) for layout in picked]
    except OSError:
        return None  # the reading itself says what is wrong
    known = [(share, size) for share, size in zip(shares, sizes.tolist(), strict=True) if share is not None]
    total = sum(size for _, size in known)
    return sum(share * size for share, size in known) / total if total else None
