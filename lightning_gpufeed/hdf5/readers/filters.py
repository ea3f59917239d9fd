"""How each HDF5 filter is undone, and which codec library does it.

Each function here takes the bytes a filter made and writes the bytes it was given, in a number of library calls that
does not grow with the chunk; the libraries let other threads run meanwhile.

Source: HDF5 file format specification (filter pipeline message) and the registered filters' descriptions of what
they store; each compared with HDF5 2.0 and hdf5plugin 7.1.
"""

from __future__ import annotations

import importlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FLETCHER32", "Bytes", "FilterSpec", "Undo", "checksum_function", "keeps_size", "undo_function", "why_not"]

Bytes = npt.NDArray[np.uint8]
Spare = Callable[[int], Bytes]
Undo = Callable[[Bytes, Bytes, Spare], int]
"""Decodes the first array into the second, with memory for results in between; returns how many bytes that made."""

_GZIP, _SHUFFLE, FLETCHER32 = 1, 2, 3
_LZF, _BLOSC, _LZ4, _BITSHUFFLE, _ZSTD, _BLOSC2 = 32000, 32001, 32004, 32008, 32015, 32026
_KEEP_SIZE = frozenset({_SHUFFLE, FLETCHER32})
_CODECS = {_LZF: ["LZF"], _BLOSC: ["BLOSC"], _LZ4: ["LZ4H5"], _ZSTD: ["ZSTD"], _BITSHUFFLE: ["BITSHUFFLE"]}
"""Filters that need the imagecodecs library, and which parts of it."""
_BITSHUFFLE_CODECS = {0: [], 2: ["LZ4", "LZ4H5"], 3: ["ZSTD"]}
_BLOSC_SNAPPY = 3


@dataclass(frozen=True)
class FilterSpec:
    """One filter of a dataset's pipeline, as the file describes it.

    Attributes:
        code: HDF5's number of the filter, 1 for gzip.
        name: What people call it.
        values: Its settings in the file ("client data").
    """

    code: int
    name: str
    values: tuple[int, ...]


def keeps_size(spec: FilterSpec) -> bool:
    """Tell transpositions and checksums from compression.

    Args:
        spec: A filter.

    Returns:
        Whether it makes as many bytes as it gets, apart from a checksum.
    """
    return spec.code in _KEEP_SIZE or (spec.code == _BITSHUFFLE and _bitshuffle_compression(spec) == 0)


def _bitshuffle_compression(spec: FilterSpec) -> int:
    """0: none, 2: lz4, 3: zstd."""
    return spec.values[4] if len(spec.values) > 4 else 0


def why_not(spec: FilterSpec) -> str | None:
    """Say why one filter cannot be undone here.

    Args:
        spec: A filter.

    Returns:
        A sentence fragment, with the line that cures it where there is one; None if the filter can be undone.
    """
    if spec.code == _BLOSC2:
        return f"filter {spec.name} stores frames whose layout only Blosc2 knows, so they are decoded by HDF5 only"
    if spec.code not in (_GZIP, _SHUFFLE, FLETCHER32, *_CODECS):
        return f"filter {spec.name} is decoded by HDF5 only"
    has_odd_settings = (
        (spec.code == _SHUFFLE and (len(spec.values) != 1 or spec.values[0] < 1))
        or (spec.code == _BITSHUFFLE and not _is_usual_bitshuffle(spec))
        or (spec.code == _BLOSC and len(spec.values) > 6 and spec.values[6] == _BLOSC_SNAPPY)
    )
    if has_odd_settings:
        return f"filter {spec.name} with the settings {spec.values} is decoded by HDF5 only"
    parts = list(_CODECS.get(spec.code, []))
    if spec.code == _BITSHUFFLE:
        parts += _BITSHUFFLE_CODECS[_bitshuffle_compression(spec)]
    if not all(_has_codec(part) for part in parts):
        return (
            f"decoding filter {spec.name} outside HDF5 needs the package imagecodecs: "
            f"pip install 'lightning_gpufeed[codecs]'"
        )
    return None


def _is_usual_bitshuffle(spec: FilterSpec) -> bool:
    """Whether the settings are element size, items per block and a compression, as the filter writes them."""
    values = spec.values
    if len(values) < 3 or values[2] < 1 or _bitshuffle_compression(spec) not in _BITSHUFFLE_CODECS:
        return False
    return len(values) < 4 or values[3] % 8 == 0


def _library(name: str) -> Any:
    """A codec library, None where it is not installed or does not load."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _has_codec(part: str) -> bool:
    """Whether imagecodecs is installed and was built with this codec."""
    codecs = _library("imagecodecs")
    return codecs is not None and bool(getattr(getattr(codecs, part, None), "available", False))


# How each filter is undone ------------------------------------------------------------------------------------


def undo_function(spec: FilterSpec) -> Undo | None:
    """Find the function that undoes a filter.

    Args:
        spec: A filter that `why_not` has nothing against.

    Returns:
        The function; None for a checksum, which is only cut off.
    """
    codecs = _library("imagecodecs")
    if spec.code == FLETCHER32:
        return None
    if spec.code == _GZIP:
        return _undo_gzip()
    if spec.code == _SHUFFLE:
        return _undo_shuffle(spec.values[0])
    if spec.code == _BITSHUFFLE:
        return _undo_bitshuffle(spec, codecs)
    if spec.code == _BLOSC:
        return _undo_blosc(codecs.blosc_decode)
    if spec.code == _LZ4:
        return _undo_lz4(codecs.lz4h5_decode)
    return _undo_plain(codecs.zstd_decode if spec.code == _ZSTD else codecs.lzf_decode)


def _undo_plain(decode: Callable[..., Any]) -> Undo:
    """For what is stored without any framing."""

    def undo(data: Bytes, target: Bytes, _: Spare) -> int:
        if not len(data):
            raise ValueError("no bytes")
        return len(decode(data, out=target))

    return undo


def _undo_gzip() -> Undo:
    """The fastest inflate that is installed; zlib has the last word on what is damaged."""
    fast = _fast_inflate()

    def undo(data: Bytes, target: Bytes, _: Spare) -> int:
        if fast is not None:
            try:
                return fast(data, target)
            except Exception:  # each library has errors of its own
                pass
        return _inflate_with(zlib.decompress)(data, target)

    return undo


def _fast_inflate() -> Callable[[Bytes, Bytes], int] | None:
    """The libdeflate of imagecodecs writes into place; isal is the next best; None if neither is installed."""
    if _has_codec("DEFLATE"):
        deflate_decode = _library("imagecodecs").deflate_decode
        return lambda data, target: len(deflate_decode(data, out=target))
    isal = _library("isal.isal_zlib")
    return None if isal is None else _inflate_with(isal.decompress)


def _inflate_with(decompress: Callable[..., bytes]) -> Callable[[Bytes, Bytes], int]:
    """For libraries with the interface of zlib: one block of the right size, copied into place."""

    def inflate(data: Bytes, target: Bytes) -> int:
        plain = decompress(data, bufsize=len(target))
        if len(plain) == len(target):
            np.copyto(target, np.frombuffer(plain, dtype=np.uint8))
        return len(plain)

    return inflate


def _undo_shuffle(item_bytes: int) -> Undo:
    """Byte k of all items lies together; what is left over behind the last whole item stays as it is."""
    transpose = _library("imagecodecs").byteshuffle_decode if _has_codec("BYTESHUFFLE") else None

    def undo(data: Bytes, target: Bytes, _: Spare) -> int:
        num_items = len(data) // item_bytes
        body = num_items * item_bytes
        if transpose is not None and item_bytes in (2, 4, 8) and num_items:
            word = f"u{item_bytes}"
            transpose(data[:body].view(word), out=target[:body].view(word))
        else:
            for index in range(item_bytes):
                target[index:body:item_bytes] = data[index * num_items : (index + 1) * num_items]
        target[body:] = data[body:]
        return len(data)

    return undo


def _undo_lz4(decode: Callable[..., Any]) -> Undo:
    """HDF5's LZ4: decoded size (8 bytes, big endian), block size (4), then per block its stored size (4) and it."""

    def undo(data: Bytes, target: Bytes, _: Spare) -> int:
        _expect_total(data, len(target))
        return len(decode(data, out=target))

    return undo


def _expect_total(data: Bytes, num_bytes: int) -> int:
    """Check the frame that LZ4 and bitshuffle begin with, and return its block size in bytes."""
    if len(data) < 12:
        raise ValueError(f"{len(data)} bytes, a frame header alone has 12")
    total, block_bytes = struct.unpack_from(">QI", data.data)
    if total != num_bytes:
        raise ValueError(f"the frame header announces {total} bytes")
    return int(block_bytes)


def _undo_blosc(decode: Callable[..., Any]) -> Undo:
    """A Blosc buffer; its header says how much memory is read, so that is checked first."""

    def undo(data: Bytes, target: Bytes, _: Spare) -> int:
        if len(data) < 16:
            raise ValueError(f"{len(data)} bytes, a header alone has 16")
        num_bytes, _block_bytes, stored = struct.unpack_from("<III", data.data, 4)
        if num_bytes != len(target) or not 16 <= stored <= len(data):
            raise ValueError(f"the header announces {num_bytes} bytes in {stored}")
        return len(decode(data, out=target, numthreads=1))

    return undo


def _undo_bitshuffle(spec: FilterSpec, codecs: Any) -> Undo:
    """Bits transposed in blocks of items, and each block compressed if the settings say so."""
    # All blocks are decompressed by one call, then all are transposed by one call. Fewer than eight items at the end
    # are stored as they are.
    item_bytes, compression = spec.values[2], _bitshuffle_compression(spec)
    block_items = spec.values[3] if len(spec.values) > 3 else 0
    unpack = _unpack_lz4(codecs) if compression == 2 else _unpack_zstd(codecs)

    def transpose(data: Bytes, target: Bytes, items: int) -> int:
        # As a memoryview: elements of an array would be taken for the items.
        plain = codecs.bitshuffle_decode(data.data, itemsize=item_bytes, blocksize=items, out=target)
        return len(plain)

    def undo(data: Bytes, target: Bytes, spare: Spare) -> int:
        if not compression:
            return transpose(data, target, block_items)
        block_bytes = _expect_total(data, len(target))
        if len(target) % item_bytes or not block_bytes or block_bytes % (8 * item_bytes):
            raise ValueError(f"the frame header announces blocks of {block_bytes} bytes, items have {item_bytes}")
        body = len(target) - len(target) % (8 * item_bytes)
        pieces, end = _pieces(data, body, block_bytes)
        if end + len(target) - body > len(data):
            raise ValueError("the last block is cut off")
        if body:
            packed = spare(len(target))
            if unpack(data, pieces, block_bytes, packed) != body:
                raise ValueError(f"the blocks do not hold {body} bytes")
            transpose(packed[:body], target[:body], block_bytes // item_bytes)
        target[body:] = data[end : end + len(target) - body]
        return len(target)

    return undo


def _pieces(data: Bytes, body: int, block_bytes: int) -> tuple[list[tuple[int, int]], int]:
    """Start and end of each compressed block behind the frame header, and the end of the last one."""
    pieces, end = [], 12
    for _ in range(-(-body // block_bytes)):
        start = end + 4
        if start > len(data):
            raise ValueError("a block is cut off")
        end = start + struct.unpack_from(">I", data.data, end)[0]
        if end > len(data):
            raise ValueError("a block is cut off")
        pieces.append((start, end))
    return pieces, end


def _unpack_lz4(codecs: Any) -> Callable[[Bytes, list[tuple[int, int]], int, Bytes], int]:
    """Decompress the blocks of bitshuffle with LZ4, whose frame is HDF5's LZ4 frame but for one case."""
    # There a block that did not shrink is stored raw; here it is compressed all the same, and may by chance be as
    # long as its content.

    def unpack(data: Bytes, pieces: list[tuple[int, int]], block_bytes: int, packed: Bytes) -> int:
        is_ambiguous = any(
            end - start == min(block_bytes, len(packed) - number * block_bytes)
            for number, (start, end) in enumerate(pieces)
        )
        if not is_ambiguous:
            return len(codecs.lz4h5_decode(data[: pieces[-1][1]], out=packed))
        num_bytes = 0
        for start, end in pieces:
            num_bytes += len(codecs.lz4_decode(data[start:end], out=packed[num_bytes:][:block_bytes]))
        return num_bytes

    return unpack


def _unpack_zstd(codecs: Any) -> Callable[[Bytes, list[tuple[int, int]], int, Bytes], int]:
    """Decompress the blocks of bitshuffle with zstd: put together they are a series of frames, decoded at once."""

    def unpack(data: Bytes, pieces: list[tuple[int, int]], _: int, packed: Bytes) -> int:
        frames = data.data
        return len(codecs.zstd_decode(b"".join([frames[start:end] for start, end in pieces]), out=packed))

    return unpack


def checksum_function() -> Callable[[Bytes], int]:
    """Find the function that computes a checksum of bytes.

    Returns:
        HDF5's fletcher32; it lets other threads run if imagecodecs is installed.
    """
    if _has_codec("H5CHECKSUM"):
        checksum: Callable[[Bytes], int] = _library("imagecodecs").h5checksum_fletcher32
        return checksum
    return _fletcher32


def _fletcher32(data: Bytes) -> int:
    """Two running sums of big-endian 16-bit words modulo 65535, of which none but that of zeros is 0."""
    padded = data if len(data) % 2 == 0 else np.append(data, np.uint8(0))
    words = padded.view(">u2")
    first = second = 0
    for start in range(0, len(words), 1 << 16):
        block = words[start : start + (1 << 16)].astype(np.uint64)
        weights = np.arange(len(block), 0, -1, dtype=np.uint64)
        second = (second + len(block) * first + int((weights * block).sum())) % 65535
        first = (first + int(block.sum())) % 65535
    if words.any():
        first, second = first or 65535, second or 65535
    return second << 16 | first
