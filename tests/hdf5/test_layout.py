"""What a layout says of a dataset, checked against the bytes of real files."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

import lightning_gpufeed.hdf5.layout as layout_module
from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, Storage, read_layout
from tests.contracts import as_bytes

IN_CHUNKS = "uncompressed, every sample whole inside a chunk: gathered straight from the mapped file"
IN_ONE_BLOCK = "uncompressed, every sample in one block: gathered straight from the mapped file"
TEXT = "strings and values of variable length are read once, through HDF5"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write one dataset x; arguments as for `create_dataset`, those of the file under `file`."""

    def write(shape: Any = None, dtype: Any = None, *, file: dict[str, Any] | None = None, **options: Any) -> Path:
        with h5py.File(tmp_path / "data.h5", "w", **(file or {})) as h5_file:
            h5_file.create_dataset("x", shape, dtype, **options)
        return tmp_path / "data.h5"

    return write


def refusal(path: Path, key: str = "x") -> str:
    with pytest.raises(LayoutError) as error:
        read_layout(path, key)
    return str(error.value)


def numbers(shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)) % 251).reshape(shape).astype(dtype)


# Engines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "storage", "engine", "reason"),
    [
        ({"data": numbers((10, 3, 4))}, Storage.CONTIGUOUS, Engine.RAW, IN_ONE_BLOCK),
        ({"data": numbers((10, 3, 4)), "chunks": (4, 3, 4)}, Storage.CHUNKED, Engine.RAW, IN_CHUNKS),
        ({"data": numbers((10,), np.int64), "chunks": (4,)}, Storage.CHUNKED, Engine.RAW, IN_CHUNKS),
        ({"data": numbers((10, 3)) > 9}, Storage.CONTIGUOUS, Engine.RAW, IN_ONE_BLOCK),
        ({"data": numbers((10, 3), np.float16)}, Storage.CONTIGUOUS, Engine.RAW, IN_ONE_BLOCK),
        ({"data": numbers((10, 3), np.complex64)}, Storage.CONTIGUOUS, Engine.RAW, IN_ONE_BLOCK),
        (
            {"data": numbers((4, 3)) % 2, "dtype": h5py.enum_dtype({"NO": 0, "YES": 1}, "u1")},
            Storage.CONTIGUOUS,
            Engine.RAW,
            IN_ONE_BLOCK,
        ),
        ({"shape": (10, 3), "dtype": "u1"}, Storage.CONTIGUOUS, Engine.RAW, IN_ONE_BLOCK),
        ({"shape": (0, 3), "dtype": "u1"}, Storage.CONTIGUOUS, Engine.RAW, IN_ONE_BLOCK),
        ({"shape": (5, 0), "dtype": "u1"}, Storage.CONTIGUOUS, Engine.RAW, IN_ONE_BLOCK),
        (
            {"data": numbers((10, 3, 4)), "chunks": (4, 3, 2)},
            Storage.CHUNKED,
            Engine.CHUNKS,
            "chunk (4, 3, 2) does not hold whole samples of shape (3, 4)",
        ),
        (
            {"data": numbers((10, 3)), "chunks": (4, 5), "maxshape": (None, None)},
            Storage.CHUNKED,
            Engine.CHUNKS,
            "chunk (4, 5) does not hold whole samples of shape (3,)",
        ),
        (
            {"data": numbers((10, 3)), "chunks": (4, 3), "compression": "gzip", "shuffle": True, "fletcher32": True},
            Storage.CHUNKED,
            Engine.CHUNKS,
            "chunks pass through shuffle, gzip, fletcher32 and are decoded by several threads",
        ),
        (
            {"data": numbers((10, 3)), "chunks": (4, 3), "compression": "lzf"},
            Storage.CHUNKED,
            Engine.CHUNKS,
            "chunks pass through lzf and are decoded by several threads",
        ),
        (
            {"data": numbers((10, 3)), "chunks": (4, 3), "scaleoffset": 8},
            Storage.CHUNKED,
            Engine.H5PY,
            "chunks pass through scaleoffset and have to be decoded; filter scaleoffset is decoded by HDF5 only",
        ),
        (
            {"data": numbers((10, 3), ">i4")},
            Storage.CONTIGUOUS,
            Engine.H5PY,
            "the file's element type needs conversion to int32",
        ),
        (
            {"shape": (10, 3), "dtype": "u1", "external": [("raw.bin", 0, h5py.h5f.UNLIMITED)]},
            Storage.EXTERNAL,
            Engine.H5PY,
            "the bytes lie in external raw files",
        ),
        ({"data": ["a", "bc"]}, Storage.CONTIGUOUS, Engine.H5PY, TEXT),
        ({"data": np.array([b"a", b"bc"])}, Storage.CONTIGUOUS, Engine.H5PY, TEXT),
        ({"shape": (5,), "dtype": h5py.vlen_dtype("f4")}, Storage.CONTIGUOUS, Engine.H5PY, TEXT),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:40],
)
def test_the_engine_and_why(write, tmp_path, monkeypatch, options, storage, engine, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw.bin").write_bytes(bytes(30))
    layout = read_layout(write(**options), "x")
    assert (layout.storage, layout.engine, layout.engine_reason) == (storage, engine, reason)


def test_a_compact_dataset_is_read_through_h5py(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((4, 3))
        h5py.h5d.create(h5_file.id, b"x", h5py.h5t.NATIVE_UINT8, space, creation)
    layout = read_layout(tmp_path / "data.h5", "x")
    assert (layout.storage, layout.engine) == (Storage.COMPACT, Engine.H5PY)
    assert layout.engine_reason == "a compact dataset lies inside its own header"
    assert layout.block_offsets is None


def test_numbers_of_an_odd_width_are_converted_by_hdf5(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        twelve_bits = h5py.h5t.NATIVE_UINT16.copy()
        twelve_bits.set_precision(12)
        twelve_bits.set_offset(4)
        h5py.h5d.create(h5_file.id, b"x", twelve_bits, h5py.h5s.create_simple((4, 3)))
        h5_file["x"][...] = numbers((4, 3))
    layout = read_layout(tmp_path / "data.h5", "x")
    assert layout.engine is Engine.H5PY
    assert layout.engine_reason == "the file's element type needs conversion to uint16"


def test_offsets_that_do_not_lead_to_the_samples_are_not_used(write, monkeypatch):
    # Older releases of HDF5 count from behind the user block.
    path = write(data=numbers((10, 50)), chunks=(5, 50), file={"userblock_size": 512})
    find = layout_module.read_chunk_index

    def find_relative(h5_dataset: Any, *, is_chunked: bool) -> Any:
        index = find(h5_dataset, is_chunked=is_chunked)
        return dataclasses.replace(index, offsets=index.offsets - 512)

    monkeypatch.setattr(layout_module, "read_chunk_index", find_relative)
    layout = read_layout(path, "x")
    assert layout.engine is Engine.H5PY
    assert layout.engine_reason == "the bytes at the chunks' offsets are not what HDF5 returns for them"


# Facts ---------------------------------------------------------------------------------------------------


def test_shape_type_and_sizes(write):
    path = write(data=numbers((10, 3, 4), np.int16), chunks=(4, 3, 4))
    layout = read_layout(path, "x")
    assert (layout.path, layout.key, layout.storage_path) == (str(path), "x", str(path))
    assert (layout.shape, layout.num_samples, layout.sample_shape) == ((10, 3, 4), 10, (3, 4))
    assert (layout.dtype, layout.is_tensor) == (np.dtype("int16"), True)
    assert (layout.sample_bytes, layout.total_bytes) == (24, 240)
    assert (layout.chunk_shape, layout.chunk_rows, layout.chunk_bytes, layout.num_chunks) == ((4, 3, 4), 4, 96, 3)
    assert (layout.has_edge_chunk, layout.has_split_samples, layout.num_missing_chunks) == (True, False, 0)
    assert layout.filters == ()
    assert layout.directory is None


def test_a_dataset_without_chunks(write):
    layout = read_layout(write(data=numbers((10, 3))), "x")
    assert (layout.chunk_shape, layout.chunk_rows, layout.chunk_bytes, layout.num_chunks) == (None, 10, None, 0)
    assert (layout.has_edge_chunk, layout.has_split_samples) == (False, False)


@pytest.mark.parametrize(("num_samples", "has_edge"), [(8, False), (9, True), (4, False), (3, True)])
def test_the_last_chunk_may_be_partly_filled(write, num_samples, has_edge):
    path = write(data=numbers((num_samples, 3)), chunks=(4, 3), maxshape=(None, 3))
    assert read_layout(path, "x").has_edge_chunk == has_edge


def test_big_endian_numbers_are_announced_in_the_order_of_the_machine(write):
    assert read_layout(write(data=numbers((4, 3), ">f8")), "x").dtype == np.dtype("=f8")


def test_strings_are_no_tensor(write):
    layout = read_layout(write(data=["a", "b"]), "x")
    assert (layout.is_tensor, layout.dtype) == (False, np.dtype(object))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"compression": "gzip"}, ("gzip",)),
        ({"compression": "lzf", "shuffle": True}, ("shuffle", "lzf")),
        ({"fletcher32": True}, ("fletcher32",)),
        ({"scaleoffset": 0}, ("scaleoffset",)),
        (dict(hdf5plugin.Zstd()), ("zstd",)),
        (dict(hdf5plugin.Blosc()), ("blosc",)),
        (dict(hdf5plugin.LZ4()), ("lz4",)),
        (dict(hdf5plugin.Bitshuffle()), ("bitshuffle",)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_filters_are_named(write, options, names):
    layout = read_layout(write(data=numbers((8, 64), np.int32), chunks=(4, 64), **options), "x")
    assert layout.filters == names


def test_a_filter_without_a_usual_name_goes_by_the_one_in_the_file(write):
    path = write(data=numbers((8, 64), np.int32), chunks=(4, 64), **hdf5plugin.Zfp(reversible=True))
    [name] = read_layout(path, "x").filters
    assert name.startswith("H5Z-ZFP")


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("userblock_size", [0, 512, 4096])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (4, 5)},
        {"chunks": (1, 5)},
        {"chunks": (10, 5)},
        {"chunks": (4, 5), "maxshape": (None, 5)},
        {"chunks": (40, 5), "maxshape": (None, None)},
    ],
    ids=str,
)
def test_the_bytes_of_each_block_lie_where_the_layout_says(write, libver, userblock_size, options):
    data = numbers((10, 5))
    path = write(data=data, file={"libver": libver, "userblock_size": userblock_size}, **options)
    layout = read_layout(path, "x")
    assert layout.engine is Engine.RAW
    content = path.read_bytes()
    for block, offset in enumerate(layout.block_offsets.tolist()):
        rows = data[block * layout.chunk_rows : (block + 1) * layout.chunk_rows]
        assert content[offset : offset + rows.nbytes] == as_bytes(rows)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_blocks_of_split_samples_lie_in_the_order_of_the_chunk_grid(write, libver):
    data = numbers((4, 6))
    path = write(data=data, chunks=(2, 3), file={"libver": libver})
    layout = read_layout(path, "x")
    content = path.read_bytes()
    blocks = [data[row : row + 2, column : column + 3] for row in (0, 2) for column in (0, 3)]
    assert layout.num_chunks == len(blocks) == len(layout.block_offsets)
    for block, offset in zip(blocks, layout.block_offsets.tolist(), strict=True):
        assert content[offset : offset + block.nbytes] == as_bytes(block)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("maxshape", [(20, 5), (None, 5)], ids=str)
def test_chunks_that_were_never_written_have_no_place(tmp_path, libver, maxshape):
    with h5py.File(tmp_path / "data.h5", "w", libver=libver) as h5_file:
        dataset = h5_file.create_dataset("x", (20, 5), "i2", chunks=(4, 5), maxshape=maxshape, fillvalue=-7)
        dataset[5] = 1  # in chunk 1
        dataset[16:] = 1  # chunk 4
    layout = read_layout(tmp_path / "data.h5", "x")
    assert [offset >= 0 for offset in layout.block_offsets.tolist()] == [False, True, False, False, True]
    assert layout.num_missing_chunks == 3
    assert layout.fill_value.dtype == np.int16
    assert layout.fill_value.shape == ()
    assert layout.fill_value == -7


def test_a_block_that_was_never_written_has_no_place(write):
    layout = read_layout(write((10, 5), "f4", fillvalue=0.5), "x")
    assert layout.block_offsets.tolist() == [-1]
    assert layout.num_missing_chunks == 1
    assert layout.fill_value == np.float32(0.5)


def test_chunks_beyond_the_shape_are_left_out(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        dataset = h5_file.create_dataset("x", data=numbers((20, 5)), chunks=(4, 5), maxshape=(None, 5))
        dataset.resize((6, 5))
    layout = read_layout(tmp_path / "data.h5", "x")
    assert (layout.num_samples, layout.num_chunks, layout.num_missing_chunks) == (6, 2, 0)


def test_a_growing_dataset_without_samples_has_no_chunks(write):
    layout = read_layout(write((0, 5), "u1", chunks=(4, 5), maxshape=(None, 5)), "x")
    assert (layout.num_samples, layout.num_chunks, layout.block_offsets.tolist()) == (0, 0, [])


def test_many_chunks_are_listed_in_one_pass(write):
    # Asked for one by one, 20 000 chunks take minutes; pytest's time limit would end this test.
    layout = read_layout(write(data=np.arange(20_000), chunks=(1,)), "x")
    assert layout.num_chunks == 20_000
    assert layout.num_missing_chunks == 0


def test_attributes_come_with_the_layout(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        h5_file["x"] = numbers((4, 3))
        h5_file["x"].attrs["mean"] = [0.1, 0.2]
    assert read_layout(tmp_path / "data.h5", "x").attributes["mean"].tolist() == [0.1, 0.2]


def test_a_layout_can_be_sent_to_another_process(write):
    layout = read_layout(write(data=numbers((10, 5)), chunks=(4, 5)), "x")
    copy = pickle.loads(pickle.dumps(layout))
    assert isinstance(copy, H5DatasetLayout)
    assert (copy.shape, copy.dtype, copy.stamps, copy.engine) == (
        layout.shape,
        layout.dtype,
        layout.stamps,
        layout.engine,
    )
    np.testing.assert_array_equal(copy.block_offsets, layout.block_offsets)


def test_a_layout_of_a_file_with_dimension_scales_can_be_sent_too(tmp_path):
    # netCDF and xarray write these: attributes full of references, which cannot be pickled.
    with h5py.File(tmp_path / "data.h5", "w") as h5_file:
        h5_file["x"], h5_file["time"] = numbers((4, 3)), np.arange(4.0)
        h5_file["time"].make_scale("time")
        h5_file["x"].dims[0].attach_scale(h5_file["time"])
    for key in ("x", "time"):
        pickle.loads(pickle.dumps(read_layout(tmp_path / "data.h5", key)))


def test_the_path_of_a_layout_does_not_depend_on_the_current_directory(write, tmp_path, monkeypatch):
    write(data=numbers((4, 3)))
    monkeypatch.chdir(tmp_path)
    assert read_layout("data.h5", "x").path == str(tmp_path / "data.h5")


def test_the_file_is_closed_again(write):
    path = write(data=numbers((10, 5)))
    read_layout(path, "x")
    with h5py.File(path, "a") as h5_file:  # refused while a reader has it open
        h5_file["y"] = 1


# Refusals ------------------------------------------------------------------------------------------------


def test_a_scalar_is_refused(write):
    path = write(data=3.5)
    assert refusal(path) == (
        f"{path}: dataset 'x' is a scalar; expected an array whose first axis counts samples. Name another key."
    )


def test_an_empty_dataset_without_a_shape_is_refused(write):
    path = write(data=h5py.Empty("f4"))
    assert refusal(path) == (
        f"{path}: dataset 'x' is empty; expected an array whose first axis counts samples. Name another key."
    )


def test_a_wrong_key_is_refused_with_a_list(write):
    path = write(data=numbers((4, 3)))
    assert refusal(path, "y") == f"{path}: no dataset 'y'. It has: 'x' (4, 3) uint8."


def create_low_level(type_id: Any) -> Callable[[Any], None]:
    return lambda h5_file: h5py.h5d.create(h5_file.id, b"x", type_id, h5py.h5s.create_simple((3,)))


@pytest.mark.parametrize(
    ("create", "named"),
    [
        (lambda f: f.create_dataset("x", (3,), [("a", "<i4"), ("b", "<f4")]), "[('a', '<i4'), ('b', '<f4')]"),
        (lambda f: f.create_dataset("x", (3,), np.dtype(("<f4", (2,)))), "('<f4', (2,))"),
        (lambda f: f.create_dataset("x", (3,), h5py.opaque_dtype("M8[s]")), "datetime64[s]"),
        (lambda f: f.create_dataset("x", (3,), "V5"), "|V5"),
        (lambda f: f.create_dataset("x", (3,), h5py.ref_dtype), "HDF5 reference"),
        (lambda f: f.create_dataset("x", (3,), h5py.regionref_dtype), "HDF5 reference"),
        (lambda f: f.create_dataset("x", (3,), np.longdouble), str(np.dtype(np.longdouble))),
        (lambda f: f.create_dataset("x", (3,), h5py.vlen_dtype(np.dtype(">i4"))), "variable-length >i4"),
        (
            lambda f: f.create_dataset("x", (3,), h5py.vlen_dtype(np.dtype([("a", "<i4")]))),
            "variable-length [('a', '<i4')]",
        ),
        (lambda f: f.create_dataset("x", (3,), h5py.vlen_dtype(h5py.vlen_dtype("i4"))), "variable-length object"),
        (create_low_level(h5py.h5t.UNIX_D32LE), "(No NumPy equivalent for TypeTimeID exists)"),
    ],
    ids=[
        "compound",
        "array",
        "time as opaque",
        "opaque",
        "reference",
        "region reference",
        "long double",
        "variable-length big-endian",
        "variable-length compound",
        "variable-length variable-length",
        "time",
    ],
)
def test_types_that_no_tensor_holds_are_refused(tmp_path, create, named):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as h5_file:
        create(h5_file)
    assert refusal(path) == (
        f"{path}: dataset 'x' has the element type {named}; expected integers, floats up to 64 bits, complex "
        f"numbers, booleans, strings, or variable-length arrays of native numbers. Copy what you need of it into a "
        f"dataset of such a type, or name the datasets to use (keys=)."
    )


def test_a_filter_whose_plug_in_is_missing_is_named(write):
    path = write(data=numbers((8, 64)), chunks=(4, 64), compression="lzf", file={"libver": "earliest"})
    # The header says which filter: its number, 32000, then the length of its name. HDF5 knows no filter 33333.
    content = path.read_bytes()
    before, after = (number.to_bytes(2, "little") + (8).to_bytes(2, "little") for number in (32000, 33333))
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))
    assert refusal(path) == (
        f"{path}: dataset 'x' is compressed with lzf (filter 33333), which this HDF5 cannot decode. "
        f"Install the plug-ins with: pip install 'lightning_gpufeed[filters]'; if they lack it, write the file without "
        f"filters where it can be read: h5repack -f NONE IN.h5 OUT.h5"
    )


def test_a_dataset_that_ends_behind_the_file_is_refused(write):
    # A file that was cut and whose header was repaired: HDF5 opens it, and a mapped page of it would kill the process.
    path = write(data=np.ones((4, 4096), np.uint8), chunks=(1, 4096), file={"libver": "earliest"})
    end = read_layout(path, "x").block_offsets.max() + 4096
    size = int(end) - 100
    content = bytearray(path.read_bytes()[:size])
    content[40:48] = size.to_bytes(8, "little")  # end of file in a superblock of version 0
    path.write_bytes(content)
    os.truncate(path, size)
    assert refusal(path) == (
        f"{path}: truncated: dataset 'x' needs {end} bytes of {path}, which has {size}. Copy or pack the file again."
    )
