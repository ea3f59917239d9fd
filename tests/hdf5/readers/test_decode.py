"""Chunks decoded by us against what HDF5 makes of the same stored bytes."""

from __future__ import annotations

import pickle
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import hdf5plugin
import imagecodecs
import numpy as np
import pytest

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.readers.decode import ChunkDecoder, FilterSpec, why_not_decodable

GZIP, SHUFFLE, FLETCHER32 = (1, (4,)), (2, ()), (3, ())
LZF, LZ4, ZSTD = (32000, ()), (32004, ()), (32015, (3,))
NAMES = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle"}
NAMES[32015] = "zstd"

Filters = Sequence[tuple[int, tuple[int, ...]]]


def bitshuffle(compression: int, block_items: int = 0) -> tuple[int, tuple[int, ...]]:
    return 32008, (block_items, compression, 3)


def blosc(compressor: int, shuffle: int) -> tuple[int, tuple[int, ...]]:
    return 32001, (0, 0, 0, 0, 5, shuffle, compressor)


PIPELINES: dict[str, Filters] = {
    "none": [],
    "gzip": [GZIP],
    "shuffle": [SHUFFLE],
    "fletcher32": [FLETCHER32],
    "shuffle gzip": [SHUFFLE, GZIP],
    "shuffle gzip fletcher32": [SHUFFLE, GZIP, FLETCHER32],
    "fletcher32 gzip": [FLETCHER32, GZIP],
    "fletcher32 shuffle fletcher32 gzip fletcher32": [FLETCHER32, SHUFFLE, FLETCHER32, GZIP, FLETCHER32],
    "gzip shuffle": [GZIP, SHUFFLE],
    "lzf": [LZF],
    "shuffle lzf fletcher32": [SHUFFLE, LZF, FLETCHER32],
    "lz4": [LZ4],
    "lz4 in small blocks": [(32004, (1000,))],
    "shuffle lz4": [SHUFFLE, LZ4],
    "zstd": [ZSTD],
    "shuffle zstd fletcher32": [SHUFFLE, ZSTD, FLETCHER32],
    "bitshuffle": [bitshuffle(0)],
    "bitshuffle gzip": [bitshuffle(0, 64), GZIP],
    "bitshuffle-lz4": [bitshuffle(2)],
    "bitshuffle-lz4 in small blocks": [bitshuffle(2, 64)],
    "bitshuffle-lz4 fletcher32": [bitshuffle(2), FLETCHER32],
    "bitshuffle-zstd": [bitshuffle(3)],
    "bitshuffle-zstd in small blocks": [bitshuffle(3, 64)],
    "blosc-blosclz": [blosc(0, 1)],
    "blosc-lz4": [blosc(1, 1)],
    "blosc-lz4 without shuffle": [blosc(1, 0)],
    "blosc-lz4hc": [blosc(2, 1)],
    "blosc-zlib fletcher32": [blosc(4, 1), FLETCHER32],
    "blosc-zstd with bitshuffle": [blosc(5, 2)],
}

PICTURES = 500 + np.add.outer(np.arange(1500), np.arange(500)) % 199  # a smooth slope ...
PICTURES = (PICTURES + np.random.default_rng(0).normal(0, 3, PICTURES.shape)).astype("u2")[None]  # ... and noise

every_pipeline = pytest.mark.parametrize("filters", PIPELINES.values(), ids=PIPELINES)


@pytest.fixture
def h5_file() -> Iterator[h5py.File]:
    """A file that lies in memory only."""
    assert hdf5plugin.version  # importing it registers the filters
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        yield file


def create(h5_file: h5py.File, filters: Filters, shape: tuple[int, ...], dtype: Any) -> h5py.Dataset:
    """A dataset whose first axis is cut into chunks of one row."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((1, *shape[1:]))
    for code, values in filters:
        plist.set_filter(code, h5py.h5z.FLAG_OPTIONAL, values)
    space, kind = h5py.h5s.create_simple(shape), h5py.h5t.py_create(np.dtype(dtype))
    name = f"x{len(h5_file)}"
    h5py.h5d.create(h5_file.id, name.encode(), kind, space, plist)
    return h5_file[name]


def pipeline_of(h5_dataset: h5py.Dataset) -> list[FilterSpec]:
    plist = h5_dataset.id.get_create_plist()
    found = [plist.get_filter(index) for index in range(plist.get_nfilters())]
    return [FilterSpec(code, NAMES[code], values) for code, _, values, _ in found]


def decoder_of(h5_dataset: h5py.Dataset, **options: Any) -> ChunkDecoder:
    return ChunkDecoder(pipeline_of(h5_dataset), h5_dataset[0].nbytes, h5_dataset.dtype.itemsize, **options)


def decoded(decoder: ChunkDecoder, raw: bytes, mask: int, num_bytes: int) -> bytes:
    out = np.full(num_bytes, 0xA5, dtype=np.uint8)
    decoder.decode(raw, mask, out)
    return out.tobytes()


def rows_of_every_kind(num_items: int, dtype: Any) -> np.ndarray:
    """Four chunks: zeros, all the same, smooth and without any order."""
    random = np.random.default_rng(num_items)
    row_bytes = num_items * np.dtype(dtype).itemsize
    rows = np.zeros((4, row_bytes), dtype=np.uint8)
    rows[1] = np.full(num_items, 37, dtype=dtype).view(np.uint8)
    rows[2] = (np.arange(num_items) // 5 % 100).astype(dtype).view(np.uint8)
    rows[3] = random.integers(0, 256, row_bytes)
    return rows.view(dtype)


def assert_decoded_as_hdf5_does(h5_dataset: h5py.Dataset) -> set[int]:
    """Compare every chunk, and return the filter masks met."""
    decoder = decoder_of(h5_dataset)
    masks = set()
    for index in range(len(h5_dataset)):
        mask, raw = h5_dataset.id.read_direct_chunk((index, *[0] * (h5_dataset.ndim - 1)))
        expected = h5_dataset[index].tobytes()
        assert decoded(decoder, raw, mask, len(expected)) == expected, (h5_dataset.dtype, h5_dataset.shape, index)
        masks.add(mask)
    return masks


# Exactly what HDF5 reads -------------------------------------------------------------------------------------


@every_pipeline
def test_chunks_are_bitwise_what_hdf5_decodes(h5_file: h5py.File, filters: Filters) -> None:
    for dtype in ("u1", "u2", "i4", "f4", "f8"):
        for num_items in (1, 7, 1003, 20_000):
            rows = rows_of_every_kind(num_items, dtype)
            h5_dataset = create(h5_file, filters, rows.shape, dtype)
            h5_dataset[...] = rows
            assert_decoded_as_hdf5_does(h5_dataset)


@every_pipeline
def test_a_chunk_of_megabytes_is_decoded(h5_file: h5py.File, filters: Filters) -> None:
    h5_dataset = create(h5_file, filters, PICTURES.shape, "u2")
    h5_dataset[...] = PICTURES
    assert_decoded_as_hdf5_does(h5_dataset)


def test_an_element_of_odd_size_is_unshuffled(h5_file: h5py.File) -> None:
    pairs = np.zeros((3, 100), dtype=[("a", "u1"), ("b", "f4"), ("c", "u2")])
    pairs["b"], pairs["c"] = np.arange(300).reshape(3, 100) / 7, np.arange(300).reshape(3, 100)
    for filters in ([SHUFFLE, GZIP], [bitshuffle(2)], [bitshuffle(0)]):
        h5_dataset = create(h5_file, filters, pairs.shape, pairs.dtype)
        h5_dataset[...] = pairs
        assert_decoded_as_hdf5_does(h5_dataset)


def test_filters_that_hdf5_left_out_by_itself_are_skipped(h5_file: h5py.File) -> None:
    rows = rows_of_every_kind(5000, "u1")
    h5_dataset = create(h5_file, [SHUFFLE, LZF], rows.shape, "u1")
    h5_dataset[...] = rows
    assert assert_decoded_as_hdf5_does(h5_dataset) == {0, 2}  # lzf gave up on the row without order


@pytest.mark.parametrize("compressor", [GZIP, LZF, LZ4, ZSTD, bitshuffle(2), blosc(1, 1)], ids=lambda f: NAMES[f[0]])
def test_every_filter_mask_is_obeyed(h5_file: h5py.File, compressor: Any) -> None:
    filters = [SHUFFLE, compressor, FLETCHER32]
    row = rows_of_every_kind(3000, "i4")[2:3]
    whole = create(h5_file, filters, (8, 3000), "i4")
    for mask in range(8):
        part = create(h5_file, [one for bit, one in enumerate(filters) if not mask >> bit & 1], row.shape, "i4")
        part[...] = row
        left_out, raw = part.id.read_direct_chunk((0, 0))
        assert left_out == 0
        whole.id.write_direct_chunk((mask, 0), raw, mask)
    assert assert_decoded_as_hdf5_does(whole) == set(range(8))
    assert (whole[...] == row).all()


def test_a_bitshuffled_block_as_long_as_its_content_is_still_decompressed(h5_file: h5py.File) -> None:
    # HDF5's own LZ4 frame would hold such a block raw. A repeat of six bytes saves what LZ4 adds to 64 random ones.
    packed = np.random.default_rng(0).integers(0, 256, (60, 40, 64)).astype("u1")
    packed[:, :, 30:36] = packed[:, :, 10:16]
    items = imagecodecs.bitshuffle_decode(packed.tobytes(), itemsize=1, blocksize=64)
    # A last block of 32 takes 34, which is also what is left with the two bytes behind it.
    rows = np.random.default_rng(1).integers(0, 256, (60, 64 * 40 + 32 + 2)).astype("u1")
    rows[:30, : 64 * 40] = np.frombuffer(items, dtype=np.uint8).reshape(60, -1)[:30]
    h5_dataset = create(h5_file, [bitshuffle(2, 64)], rows.shape, "u1")
    h5_dataset[...] = rows
    raws = [h5_dataset.id.read_direct_chunk((row, 0))[1] for row in range(60)]
    sizes = [block_sizes(raw, 41) for raw in raws]
    assert all(64 in one[:40] for one in sizes[:30])
    assert all(64 not in one[:40] and one[40] == 34 for one in sizes[30:])
    assert_decoded_as_hdf5_does(h5_dataset)


def block_sizes(raw: bytes, num_blocks: int) -> list[int]:
    sizes, start = [], 12
    for _ in range(num_blocks):
        sizes.append(struct.unpack_from(">I", raw, start)[0])
        start += 4 + sizes[-1]
    return sizes


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda raw: np.frombuffer(raw, dtype=np.uint8)])
def test_stored_bytes_may_come_in_any_buffer(h5_file: h5py.File, kind: Any) -> None:
    rows = rows_of_every_kind(3000, "u2")
    for filters in PIPELINES.values():
        h5_dataset = create(h5_file, filters, rows.shape, "u2")
        h5_dataset[...] = rows
        mask, raw = h5_dataset.id.read_direct_chunk((2, 0))
        assert decoded(decoder_of(h5_dataset), kind(raw), mask, 6000) == rows[2].tobytes()


def test_one_decoder_serves_several_threads(h5_file: h5py.File) -> None:
    rows = np.random.default_rng(0).integers(0, 20, (8, 30_000)).astype("i4")
    h5_dataset = create(h5_file, [FLETCHER32, SHUFFLE, bitshuffle(2), FLETCHER32], rows.shape, "i4")
    h5_dataset[...] = rows
    chunks = [h5_dataset.id.read_direct_chunk((row, 0)) for row in range(8)]
    decoder = decoder_of(h5_dataset)
    wrong: list[int] = []

    def work(start: int) -> None:
        for step in range(24):
            row = (start + step) % 8
            mask, raw = chunks[row]
            if decoded(decoder, raw, mask, rows[0].nbytes) != rows[row].tobytes():
                wrong.append(row)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_decoder_pickles(h5_file: h5py.File) -> None:
    rows = rows_of_every_kind(1003, "i4")
    h5_dataset = create(h5_file, PIPELINES["shuffle gzip fletcher32"], rows.shape, "i4")
    h5_dataset[...] = rows
    copy = pickle.loads(pickle.dumps(decoder_of(h5_dataset)))
    mask, raw = h5_dataset.id.read_direct_chunk((2, 0))
    assert decoded(copy, raw, mask, 4012) == rows[2].tobytes()


@pytest.mark.parametrize(
    "filters",
    [[SHUFFLE, GZIP, FLETCHER32], [LZF], [LZ4], [ZSTD], [bitshuffle(2)], [bitshuffle(3)], [blosc(5, 1)]],
    ids=lambda filters: NAMES[filters[-1][0]] + str(filters[-1][1]),
)
def test_other_threads_run_while_a_chunk_is_decoded(h5_file: h5py.File, filters: Filters) -> None:
    rows = np.random.default_rng(0).integers(0, 16, (1, 1_000_000)).astype("u2")
    h5_dataset = create(h5_file, filters, rows.shape, "u2")
    h5_dataset[...] = rows
    mask, raw = h5_dataset.id.read_direct_chunk((0, 0))
    decoder, turns, turns_meanwhile, done = decoder_of(h5_dataset), [0], [0], threading.Event()
    out = np.zeros(rows.nbytes, dtype=np.uint8)

    def work() -> None:
        try:
            for _ in range(200):
                begin = turns[0]
                decoder.decode(raw, mask, out)
                turns_meanwhile[0] += turns[0] - begin
                if turns_meanwhile[0]:
                    break
        finally:
            done.set()

    # Nobody is made to give the interpreter lock away: what the main thread does meanwhile, it does because the
    # codecs let go of the lock themselves.
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)  # gives the lock to whoever waits for it
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert turns_meanwhile[0] > 0
    assert out.tobytes() == rows.tobytes()


# Damage ------------------------------------------------------------------------------------------------------


def damage(decoder: ChunkDecoder, raw: bytes, num_bytes: int, mask: int = 0) -> str:
    with pytest.raises(FeedError) as error:
        decoded(decoder, raw, mask, num_bytes)
    return str(error.value)


@every_pipeline
def test_a_chunk_of_the_wrong_length_is_refused(h5_file: h5py.File, filters: Filters) -> None:
    rows = rows_of_every_kind(2001, "i4")
    h5_dataset = create(h5_file, filters, rows.shape, "i4")
    h5_dataset[...] = rows
    mask, raw = h5_dataset.id.read_direct_chunk((2, 0))
    decoder = decoder_of(h5_dataset)
    for cut in (b"", raw[:3], raw[:11], raw[:15], raw[: len(raw) // 2], raw[:-5]):
        assert "damaged chunk: " in damage(decoder, cut, 8004, mask)
    for chunk_bytes in (8000, 8008):
        other = ChunkDecoder(pipeline_of(h5_dataset), chunk_bytes, 4)
        assert "damaged chunk: " in damage(other, raw, chunk_bytes, mask)


@every_pipeline
def test_a_flipped_bit_ends_in_the_error_wherever_there_is_a_checksum(h5_file: h5py.File, filters: Filters) -> None:
    rows = rows_of_every_kind(700, "i4")
    h5_dataset = create(h5_file, filters, rows.shape, "i4")
    h5_dataset[...] = rows
    mask, raw = h5_dataset.id.read_direct_chunk((2, 0))
    decoder, random = decoder_of(h5_dataset), np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        bad = bytearray(raw)
        bad[random.integers(len(bad))] ^= 1 << random.integers(8)
        try:
            decoded(decoder, bytes(bad), mask, 2800)
        except FeedError:
            refused += 1
    has_sum = any(code in (1, 3) for code, _ in filters)  # gzip has a sum too
    assert refused == 60 or not has_sum


def test_the_error_says_what_was_expected() -> None:
    gzip, plain = [FilterSpec(1, "gzip", (4,))], []
    cure = ". The file is damaged there, or was changed while it was read: copy it again, or write it again from its"
    raw = zlib.compress(bytes(100))
    assert damage(ChunkDecoder(plain, 8, 4), bytes(7), 8).startswith(
        f"damaged chunk: 7 bytes are stored; expected 8 bytes of data{cure}"
    )
    assert damage(ChunkDecoder(gzip, 96, 4), raw, 96).startswith(
        f"damaged chunk: undoing gzip on {len(raw)} bytes gave 100; expected 96 bytes of data{cure}"
    )
    assert damage(ChunkDecoder(gzip, 100, 4), raw[:-1] + b"x", 100).startswith(
        f"damaged chunk: undoing gzip on {len(raw)} bytes failed (Error -3 while decompressing data: incorrect data "
        f"check); expected 100 bytes of data{cure}"
    )


def test_a_wrong_checksum_is_an_error_unless_it_is_not_wanted(h5_file: h5py.File) -> None:
    rows = rows_of_every_kind(1003, "u1")
    h5_dataset = create(h5_file, [FLETCHER32], rows.shape, "u1")
    h5_dataset[...] = rows
    raw = bytearray(h5_dataset.id.read_direct_chunk((3, 0))[1])
    raw[500] ^= 1
    assert "their fletcher32 sum is 0x" in damage(decoder_of(h5_dataset), bytes(raw), 1003)
    h5_dataset.id.write_direct_chunk((3, 0), bytes(raw))
    with pytest.raises(OSError, match="filter returned failure"):
        h5_dataset[3]
    unchecked = decoder_of(h5_dataset, verify_checksums=False)
    assert decoded(unchecked, bytes(raw), 0, 1003) == bytes(raw[:-4])


def test_a_checksum_with_swapped_bytes_is_accepted_as_hdf5_does(h5_file: h5py.File) -> None:
    rows = rows_of_every_kind(1003, "u1")
    h5_dataset = create(h5_file, [FLETCHER32], rows.shape, "u1")
    h5_dataset[...] = rows
    raw = h5_dataset.id.read_direct_chunk((3, 0))[1]
    h5_dataset.id.write_direct_chunk((3, 0), raw[:-4] + bytes(raw[-4:][index] for index in (1, 0, 3, 2)))
    assert_decoded_as_hdf5_does(h5_dataset)


# What is refused ---------------------------------------------------------------------------------------------


def test_chunks_compressed_twice_are_refused_with_the_reason() -> None:
    lzf, shuffle, gzip = FilterSpec(32000, "lzf", ()), FilterSpec(2, "shuffle", (4,)), FilterSpec(1, "gzip", (4,))
    assert why_not_decodable([shuffle, gzip]) is None
    assert why_not_decodable([lzf, shuffle, gzip]) == (
        "chunks compressed more than once (lzf, then gzip) are decoded by HDF5 only"
    )


def test_one_filter_that_cannot_be_undone_is_enough_to_refuse() -> None:
    filters = [FilterSpec(2, "shuffle", (4,)), FilterSpec(307, "bzip2", ()), FilterSpec(3, "fletcher32", ())]
    assert why_not_decodable(filters) == "filter bzip2 is decoded by HDF5 only"
    with pytest.raises(ValueError, match=r"bzip2 is decoded by HDF5 only\. Ask why_not_decodable first"):
        ChunkDecoder(filters, 4000, 4)


def test_a_chunk_larger_than_the_libraries_can_count_is_refused() -> None:
    filters = [FilterSpec(32015, "zstd", (3,))]
    assert why_not_decodable(filters, 2**30) is None
    assert why_not_decodable([FilterSpec(2, "shuffle", (4,))], 2**32) is None
    assert str(why_not_decodable(filters, 2**31)).startswith("compressed chunks of 2147483648 bytes, more than")


@pytest.mark.parametrize("missing", [["imagecodecs"], ["imagecodecs", "isal"]], ids=["isal only", "neither"])
def test_hdf5s_own_filters_need_no_further_library(
    monkeypatch: pytest.MonkeyPatch, h5_file: h5py.File, missing: list[str]
) -> None:
    if "isal" not in missing:
        pytest.importorskip("isal")
    for name in ("imagecodecs", "isal.isal_zlib") if "isal" in missing else ("imagecodecs",):
        monkeypatch.setitem(sys.modules, name, None)
    for dtype in ("u1", "u2", "f4", "f8"):
        rows = rows_of_every_kind(5003, dtype)
        h5_dataset = create(h5_file, PIPELINES["shuffle gzip fletcher32"], rows.shape, dtype)
        h5_dataset[...] = rows
        assert_decoded_as_hdf5_does(h5_dataset)
    mask, raw = h5_dataset.id.read_direct_chunk((2, 0))
    assert "damaged" in damage(decoder_of(h5_dataset, verify_checksums=False), raw[:-9] + raw[-4:], 40024, mask)


@pytest.mark.parametrize(
    ("out", "given"),
    [
        (np.zeros(8, dtype=np.int8), "int8 (8,)"),
        (np.zeros(7, dtype=np.uint8), "uint8 (7,)"),
        (np.zeros((1, 8), dtype=np.uint8), "uint8 (1, 8)"),
        (np.zeros(16, dtype=np.uint8)[::2], "uint8 (8,)"),
        (np.frombuffer(bytes(8), dtype=np.uint8), "uint8 (8,)"),
    ],
    ids=["type", "size", "shape", "gaps", "read-only"],
)
def test_out_has_to_be_whole_and_writable(out: Any, given: str) -> None:
    with pytest.raises(ValueError, match="expected contiguous, writable uint8") as error:
        ChunkDecoder([], 8, 4).decode(bytes(8), 0, out)
    assert f"out is {given};" in str(error.value)


@pytest.mark.parametrize(("chunk_bytes", "item_bytes"), [(0, 4), (10, 4), (8, 0)])
def test_sizes_that_do_not_fit_together_are_refused(chunk_bytes: int, item_bytes: int) -> None:
    with pytest.raises(ValueError, match="expected a positive multiple"):
        ChunkDecoder([], chunk_bytes, item_bytes)
