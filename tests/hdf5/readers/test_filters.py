"""What is refused and why, and the parts of single filters that no file of today shows."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import imagecodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.readers.filters import (
    FilterSpec,
    _fletcher32,
    checksum_function,
    keeps_size,
    undo_function,
    why_not,
)

GZIP = FilterSpec(1, "gzip", (4,))
SHUFFLE = FilterSpec(2, "shuffle", (4,))
FLETCHER32 = FilterSpec(3, "fletcher32", ())
LZF = FilterSpec(32000, "lzf", (4, 261, 4000))
BLOSC = FilterSpec(32001, "blosc", (2, 2, 4, 4000, 5, 1, 1))
LZ4 = FilterSpec(32004, "lz4", ())
BITSHUFFLE = FilterSpec(32008, "bitshuffle", (0, 5, 4, 0, 0))
BITSHUFFLE_LZ4 = FilterSpec(32008, "bitshuffle", (0, 5, 4, 0, 2))
BITSHUFFLE_ZSTD = FilterSpec(32008, "bitshuffle", (0, 5, 4, 0, 3, 3))
ZSTD = FilterSpec(32015, "zstd", (3,))

OF_HDF5 = [GZIP, SHUFFLE, FLETCHER32]
OF_PLUGINS = [LZF, BLOSC, LZ4, BITSHUFFLE, BITSHUFFLE_LZ4, BITSHUFFLE_ZSTD, ZSTD]


def name_of(spec: Any) -> str:
    return f"{spec.name} {spec.values}" if isinstance(spec, FilterSpec) else ""


def no_memory(num_bytes: int) -> Any:
    raise AssertionError(f"{num_bytes} spare bytes were asked for")


@pytest.mark.parametrize("spec", [*OF_HDF5, *OF_PLUGINS], ids=name_of)
def test_the_common_filters_are_undone(spec: FilterSpec) -> None:
    assert why_not(spec) is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (FilterSpec(4, "szip", (4, 8)), "filter szip is decoded by HDF5 only"),
        (FilterSpec(6, "scaleoffset", ()), "filter scaleoffset is decoded by HDF5 only"),
        (FilterSpec(2, "shuffle", ()), "filter shuffle with the settings () is decoded by HDF5 only"),
        (FilterSpec(2, "shuffle", (0,)), "filter shuffle with the settings (0,) is decoded by HDF5 only"),
        (
            FilterSpec(32026, "blosc2", (1, 0, 4, 4000)),
            "filter blosc2 stores frames whose layout only Blosc2 knows, so they are decoded by HDF5 only",
        ),
        (  # snappy
            FilterSpec(32001, "blosc", (2, 2, 4, 4000, 5, 1, 3)),
            "filter blosc with the settings (2, 2, 4, 4000, 5, 1, 3) is decoded by HDF5 only",
        ),
        (
            FilterSpec(32008, "bitshuffle", (0, 5, 4, 0, 7)),
            "filter bitshuffle with the settings (0, 5, 4, 0, 7) is decoded by HDF5 only",
        ),
        (
            FilterSpec(32008, "bitshuffle", (0, 5, 4, 12)),
            "filter bitshuffle with the settings (0, 5, 4, 12) is decoded by HDF5 only",
        ),
        (
            FilterSpec(32008, "bitshuffle", (0, 5)),
            "filter bitshuffle with the settings (0, 5) is decoded by HDF5 only",
        ),
    ],
    ids=name_of,
)
def test_what_cannot_be_exact_is_refused_with_the_reason(spec: FilterSpec, reason: str) -> None:
    assert why_not(spec) == reason


@pytest.mark.parametrize("spec", OF_PLUGINS, ids=name_of)
def test_a_missing_library_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, spec: FilterSpec
) -> None:
    monkeypatch.setitem(sys.modules, "imagecodecs", None)  # what Python itself notes of a failed import
    assert why_not(spec) == (
        f"decoding filter {spec.name} outside HDF5 needs the package imagecodecs: "
        f"pip install 'lightning_gpufeed[codecs]'"
    )


def test_the_filters_of_hdf5_itself_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert [why_not(spec) for spec in OF_HDF5] == [None, None, None]
    assert checksum_function() is _fletcher32


def test_only_compression_changes_the_size() -> None:
    specs = [*OF_HDF5, *OF_PLUGINS]
    assert [spec for spec in specs if keeps_size(spec)] == [SHUFFLE, FLETCHER32, BITSHUFFLE]


def test_a_stream_that_only_zlib_takes_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever a faster library refuses, zlib is asked before the chunk is called damaged.
    def refuse(*_: Any, **__: Any) -> None:
        raise imagecodecs.DeflateError("inflate", 3)

    monkeypatch.setattr(imagecodecs, "deflate_decode", refuse)
    undo = undo_function(GZIP)
    out, stream = np.zeros(100, dtype=np.uint8), zlib.compress(bytes(range(100)))
    assert undo is not None
    assert undo(np.frombuffer(stream, dtype=np.uint8), out, no_memory) == 100
    assert out.tobytes() == bytes(range(100))


@given(st.binary(min_size=1, max_size=300), st.integers(1, 2000))
def test_our_own_checksum_is_that_of_hdf5(piece: bytes, repeats: int) -> None:
    data = np.frombuffer(piece * repeats, dtype=np.uint8)
    assert _fletcher32(data) == imagecodecs.h5checksum_fletcher32(data)
