"""Decodes single HDF5 chunks in the calling thread, without HDF5 and without the interpreter lock.

h5py holds one lock for the whole process while it reads, and the filters run under it: threads do not help. Here a
chunk is a piece of bytes, and undoing its filters is a few calls into codec libraries that let other threads run::

    written:   samples -> shuffle -> gzip -> fletcher32 -> stored bytes
    decoded:   stored bytes -> sum checked and cut off -> gzip -> scratch of this thread -> shuffle -> out

The number of calls does not grow with the chunk, so a training loop that keeps the interpreter busy does not stop
the decoding. What cannot be decoded exactly is refused in words, and stays with h5py.

Source: HDF5 file format specification (filter pipeline message) and the registered filters' descriptions of what
they store; each compared with HDF5 2.0 and hdf5plugin 7.1.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.readers.filters import (
    FLETCHER32,
    Bytes,
    FilterSpec,
    Undo,
    checksum_function,
    keeps_size,
    undo_function,
    why_not,
)

__all__ = ["ChunkDecoder", "FilterSpec", "why_not_decodable"]

_MAX_CHUNK_BYTES = 2**31 - 2**20
"""Codec libraries count bytes in 32 bits with a sign; something is left for a checksum and for headers."""


def why_not_decodable(pipeline: Sequence[FilterSpec], chunk_bytes: int = 0) -> str | None:
    """Say why chunks cannot be decoded outside HDF5.

    Args:
        pipeline: The filters in the order in which they were applied when writing.
        chunk_bytes: Bytes of one decoded chunk, where known: some libraries have a limit.

    Returns:
        A sentence fragment, with the line that cures it where there is one; None if every chunk can be decoded.
    """
    for spec in pipeline:
        reason = why_not(spec)
        if reason is not None:
            return reason
    if chunk_bytes > _MAX_CHUNK_BYTES and not all(keeps_size(spec) for spec in pipeline):
        return f"compressed chunks of {chunk_bytes} bytes, more than {_MAX_CHUNK_BYTES}, are decoded by HDF5 only"
    compressors = [spec.name for spec in pipeline if not keeps_size(spec)]
    if len(compressors) > 1:
        return f"chunks compressed more than once ({', then '.join(compressors)}) are decoded by HDF5 only"
    return None


class ChunkDecoder:
    """Undoes the filters of one dataset's chunks; made once per dataset, used by any number of threads.

    Each thread keeps scratch memory of at most three decoded chunks, and none where a single filter is to be undone.
    What comes out is bitwise what HDF5 returns for the chunk.

    Example:
        >>> decoder = ChunkDecoder([FilterSpec(1, "gzip", (4,))], chunk_bytes=5, item_bytes=1)
        >>> samples = np.empty(5, dtype=np.uint8)
        >>> decoder.decode(zlib.compress(b"hello"), filter_mask=0, out=samples)
        >>> samples.tobytes()
        b'hello'
    """

    def __init__(
        self, pipeline: Sequence[FilterSpec], chunk_bytes: int, item_bytes: int, *, verify_checksums: bool = True
    ) -> None:
        """Find the codec libraries.

        Args:
            pipeline: The filters in the order in which they were applied when writing.
            chunk_bytes: Bytes of one whole chunk once it is decoded; those at the edge of a dataset are whole too.
            item_bytes: Bytes of one element.
            verify_checksums: Whether a fletcher32 sum is compared (as HDF5 does) or only cut off.

        Raises:
            ValueError: The pipeline cannot be decoded, or the sizes do not fit together.
        """
        reason = why_not_decodable(pipeline, chunk_bytes)
        if reason is not None:
            raise ValueError(f"{reason}. Ask why_not_decodable first, and read such chunks through h5py.")
        if chunk_bytes < 1 or item_bytes < 1 or chunk_bytes % item_bytes:
            raise ValueError(
                f"a chunk of {chunk_bytes} bytes with elements of {item_bytes}; expected a positive multiple of it."
            )
        self._pipeline = tuple(pipeline)
        self._chunk_bytes = chunk_bytes
        self._item_bytes = item_bytes
        self._verify_checksums = verify_checksums
        self._undo: list[Undo | None] = [undo_function(spec) for spec in self._pipeline]
        self._checksum = checksum_function()
        self._scratch = _Scratch()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._pipeline, self._chunk_bytes, self._item_bytes, self._verify_checksums)

    def decode(self, raw: bytes | bytearray | memoryview | Bytes, filter_mask: int, out: Bytes) -> None:
        """Decode one chunk.

        Args:
            raw: The stored bytes of the chunk.
            filter_mask: Bit i is set where filter i of the pipeline was left out for this chunk.
            out: uint8 (chunk_bytes,), contiguous, host memory; undefined after an error.

        Raises:
            FeedError: The bytes are damaged: a codec refuses them, a checksum differs, or the size is not that of a
                chunk. The file and the chunk are for the caller to add.
            ValueError: `out` is not what is expected.
        """
        if out.dtype != np.uint8 or out.shape != (self._chunk_bytes,) or not out.flags.carray:
            raise ValueError(
                f"out is {out.dtype} {out.shape}; expected contiguous, writable uint8 ({self._chunk_bytes},)."
            )
        data = np.frombuffer(raw, dtype=np.uint8) if len(raw) else np.empty(0, dtype=np.uint8)
        steps = self._steps(int(filter_mask))
        slot = 0
        for number in steps:
            undo = self._undo[number]
            if undo is None:
                data = self._without_checksum(data)
                continue
            slot = 1 - slot
            size = self._size_before(number, int(filter_mask)) or len(data)
            target = out if number == steps[-1] else self._scratch.take(slot, size)
            data = self._run(self._pipeline[number].name, undo, data, target)
        if len(data) != self._chunk_bytes:
            raise FeedError(_damaged(f"{len(data)} bytes are stored", self._chunk_bytes))
        if data is not out:
            np.copyto(out, data)

    def _steps(self, filter_mask: int) -> list[int]:
        """Numbers of the filters that this chunk passed, the last one first."""
        return [number for number in reversed(range(len(self._pipeline))) if not filter_mask >> number & 1]

    def _size_before(self, number: int, filter_mask: int) -> int | None:
        """Bytes that went into a filter when the chunk was written, None behind a compression."""
        size = self._chunk_bytes
        for earlier, spec in enumerate(self._pipeline[:number]):
            if filter_mask >> earlier & 1:
                continue
            if not keeps_size(spec):
                return None
            size += 4 if spec.code == FLETCHER32 else 0
        return size

    def _run(self, name: str, undo: Undo, data: Bytes, target: Bytes) -> Bytes:
        """Undo one filter and return `target`, filled to its end."""
        try:
            num_bytes = undo(data, target, self._scratch.take_spare)
        except (RuntimeError, ValueError, zlib.error) as error:
            raise FeedError(_damaged(f"undoing {name} on {len(data)} bytes failed ({error})", len(target))) from error
        if num_bytes != len(target):
            raise FeedError(_damaged(f"undoing {name} on {len(data)} bytes gave {num_bytes}", len(target)))
        return target

    def _without_checksum(self, data: Bytes) -> Bytes:
        """Compare the sum at the end, as HDF5 does, and cut it off."""
        if len(data) < 4:
            raise FeedError(
                _damaged(f"{len(data)} bytes are stored, fewer than a fletcher32 sum has", self._chunk_bytes)
            )
        body = data[:-4]
        if self._verify_checksums:
            (stored,) = struct.unpack("<I", data[-4:].tobytes())
            computed = self._checksum(body)
            # HDF5 before 1.6.3 swapped the bytes of each half on some machines; HDF5 still accepts that.
            swapped = (computed & 0x00FF00FF) << 8 | (computed & 0xFF00FF00) >> 8
            if stored not in (computed, swapped):
                raise FeedError(
                    _damaged(f"their fletcher32 sum is {computed:#010x} and {stored:#010x} was stored", None)
                )
        return body


class _Scratch(threading.local):
    """Memory of each thread for what lies between two filters; grows to the largest chunk seen."""

    def __init__(self) -> None:
        self._blocks = [np.empty(0, dtype=np.uint8) for _ in range(3)]

    def take(self, slot: int, num_bytes: int) -> Bytes:
        """The first bytes of block 0, 1 or 2, valid until the same block is taken again in this thread."""
        if len(self._blocks[slot]) < num_bytes:
            self._blocks[slot] = np.empty(num_bytes, dtype=np.uint8)
        return self._blocks[slot][:num_bytes]

    def take_spare(self, num_bytes: int) -> Bytes:
        """The block that is never the input or output of a filter."""
        return self.take(2, num_bytes)


def _rebuild(pipeline: tuple[FilterSpec, ...], chunk_bytes: int, item_bytes: int, verify: bool) -> ChunkDecoder:
    return ChunkDecoder(pipeline, chunk_bytes, item_bytes, verify_checksums=verify)


def _damaged(what: str, expected_bytes: int | None) -> str:
    """What to say of bytes that are not a chunk of this dataset."""
    expected = "" if expected_bytes is None else f"; expected {expected_bytes} bytes of data"
    return (
        f"damaged chunk: {what}{expected}. The file is damaged there, or was changed while it was read: "
        f"copy it again, or write it again from its source."
    )
