"""Writers of small HDF5 files as the field's producers leave them: netCDF-4, MATLAB, PyTables, Keras, fastMRI ...

Each is written with h5py alone, in the structure that the producer was seen to write: its attributes, its chunk
shapes, its references, its quirks. A writer takes a folder, and gives the path to feed, or several.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np

NUM = 13  # fills no chunk of these files evenly
IMAGE = (9, 8)  # above 64 bytes: smaller rows are kept in memory

Array = np.ndarray[Any, np.dtype[Any]]


def noise(shape: Sequence[int], dtype: Any = np.uint8, seed: int = 0) -> Array:
    """Random numbers over the range of a type, or for floats about zero."""
    random, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max, shape, dtype.newbyteorder("="), endpoint=True).astype(dtype)
    if dtype.kind == "c":
        return (random.standard_normal(shape) + 1j * random.standard_normal(shape)).astype(dtype)
    if dtype.kind == "b":
        return random.random(shape) < 0.5
    return random.standard_normal(shape).astype(dtype)


def write(folder: Path, name: str = "data.h5", file: dict[str, Any] | None = None, **datasets: Any) -> Path:
    """Write datasets: arrays, or the arguments of `create_dataset`."""
    path = folder / name
    with h5py.File(path, "w", **(file or {})) as h5_file:
        for key, options in datasets.items():
            if isinstance(options, dict):
                h5_file.create_dataset(key, **options)
            else:
                h5_file[key] = options
    return path


def jpegs(num: int = NUM) -> list[Array]:
    """Bytes that begin and end as those of a JPEG do, of different lengths, zeros among them."""
    random = np.random.default_rng(5)
    bodies = [random.integers(0, 256, 40 + 7 * n, np.uint8) for n in range(num)]
    return [np.frombuffer(b"\xff\xd8\xff\xe0\0\x10JFIF\0" + body.tobytes() + b"\xff\xd9", np.uint8) for body in bodies]


def hdf5_library() -> Any:
    """The HDF5 library that h5py uses, for the settings that h5py does not offer; None if it cannot be found."""
    with suppress(OSError):
        found = re.search(r"/\S*/libhdf5[-.]\S*", Path("/proc/self/maps").read_text())
        return ctypes.CDLL(found[0]) if found else None
    return None


# netCDF ------------------------------------------------------------------------------------------------------


def netcdf4(folder: Path) -> Path:
    """A netCDF-4 file: dimension scales, a record dimension, packed numbers, a dimension without a variable."""
    path = folder / "climate.nc"
    with h5py.File(path, "w", track_order=True) as nc:
        nc.attrs["_NCProperties"] = np.bytes_(b"version=2,netcdf=4.10.1,hdf5=2.0.0")
        nc.attrs["title"] = np.bytes_(b"reanalysis")
        scales = {}
        for number, (name, values) in enumerate(
            {
                "time": np.arange(NUM) * 6.0,
                "lat": np.linspace(50, 42, 9, dtype="f4"),
                "lon": np.arange(8, dtype="f4"),
            }.items()
        ):
            is_record = name == "time"
            scales[name] = nc.create_dataset(
                name, data=values, chunks=(512,) if is_record else None, maxshape=(None,) if is_record else None
            )
            scales[name].make_scale(name)
            scales[name].attrs["_Netcdf4Dimid"] = np.int32(number)
        scales["time"].attrs["units"] = np.bytes_(b"hours since 2000-01-01")
        # A dimension of which there are no values.
        bounds = nc.create_dataset("nv", (2,), ">f4")
        bounds.make_scale("This is a netCDF dimension but not a netCDF variable.         2")
        bounds.attrs["_Netcdf4Dimid"] = np.int32(3)
        packed = nc.create_dataset(
            "t2m",
            (NUM, 9, 8),
            "<i2",
            chunks=(1, 9, 8),
            maxshape=(None, 9, 8),
            fillvalue=-32767,
            shuffle=True,
            compression="gzip",
        )
        packed[: NUM - 2] = noise((NUM - 2, 9, 8), "<i2")  # the last records are not written
        packed.attrs.update(
            {
                "scale_factor": [0.01],
                "add_offset": [273.15],
                "_FillValue": np.array([-32767], "i2"),
                "units": np.bytes_(b"K"),
            }
        )
        wind = nc.create_dataset("u10", data=noise((NUM, 9, 8), "<f4"), fillvalue=np.float32(9.96921e36))
        wind.attrs["_FillValue"] = np.array([9.96921e36], "f4")
        for field in (packed, wind):
            field.attrs["_Netcdf4Coordinates"] = np.arange(3, dtype="i4")
            for axis, name in enumerate(("time", "lat", "lon")):
                field.dims[axis].attach_scale(scales[name])
        time_bounds = nc.create_dataset("time_bnds", data=np.arange(2.0 * NUM).reshape(NUM, 2))
        time_bounds.dims[0].attach_scale(scales["time"])
        time_bounds.dims[1].attach_scale(bounds)
        nc.create_dataset("site", data=[f"Zürich {n}" for n in range(NUM)], chunks=(6,), maxshape=(None,))
    return path


# MATLAB ------------------------------------------------------------------------------------------------------


def matlab(folder: Path) -> Path:
    """A MATLAB v7.3 file: axes in reverse, text as uint16, cells as references into `#refs#`, structs as groups."""
    path = folder / "data.mat"
    with h5py.File(path, "w", userblock_size=512) as mat:

        def put(key: str, values: Array, name: str, **attributes: Any) -> h5py.Dataset:
            # MATLAB stores the first index innermost: an array (9, 8, 13) is a dataset (13, 8, 9).
            dataset = mat.create_dataset(key, data=values)
            dataset.attrs["MATLAB_class"] = np.bytes_(name)
            dataset.attrs.update(attributes)
            return dataset

        def put_text(key: str, text: str) -> h5py.Dataset:
            letters = np.frombuffer(text.encode("utf-16-le"), "<u2").reshape(-1, 1)
            return put(key, letters, "char", MATLAB_int_decode=np.int32(2))

        put("X", noise((NUM, 8, 9)), "uint8")
        put("stack", noise((NUM, 8, 9), "f8"), "double")
        put("y", np.arange(NUM, dtype="f8").reshape(NUM, 1), "double")  # a row vector
        put("column", np.arange(NUM, dtype="f8").reshape(1, NUM), "double")  # a column vector
        put("is_good", np.arange(NUM, dtype="u1").reshape(NUM, 1) % 2, "logical", MATLAB_int_decode=np.int32(1))
        put("nothing", np.array([0, 0], "u8"), "double", MATLAB_empty=np.uint8(1))
        put("wave", np.zeros(NUM, [("real", "<f8"), ("imag", "<f8")]).reshape(NUM, 1), "double")
        put_text("note", "naïve")
        cells = [put_text(f"#refs#/{chr(ord('a') + n)}", f"name {n}").ref for n in range(NUM)]
        put("names", np.array(cells, h5py.ref_dtype).reshape(NUM, 1), "cell")
        info = mat.create_group("info")
        info.attrs["MATLAB_class"] = np.bytes_(b"struct")
        put("info/rate", np.array([[0.5]]), "double")
        sparse = mat.create_group("sparse")
        sparse.attrs.update({"MATLAB_class": np.bytes_(b"double"), "MATLAB_sparse": np.uint64(3)})
        sparse["data"], sparse["ir"], sparse["jc"] = np.ones(2), np.arange(2, dtype="u8"), np.arange(4, dtype="u8")
    text = b"MATLAB 7.3 MAT-file, Platform: GLNXA64, Created on: Mon Nov 30 12:00:00 2026 HDF5 schema 1.00 ."
    with path.open("r+b") as raw:
        raw.write(text.ljust(116) + bytes(8) + b"\x00\x02IM")
    return path


# PyTables ----------------------------------------------------------------------------------------------------


def pytables(folder: Path) -> Path:
    """A PyTables file: chunks longer than the data, empty attributes, bits for booleans, a table, rows that vary."""
    path = folder / "tables.h5"
    with h5py.File(path, "w", libver="earliest") as h5_file:

        def mark(item: Any, kind: str, version: str) -> None:
            item.attrs.update({"CLASS": np.bytes_(kind), "TITLE": h5py.Empty("S1"), "VERSION": np.bytes_(version)})

        mark(h5_file, "GROUP", "1.0")
        h5_file.attrs["PYTABLES_FORMAT_VERSION"] = np.bytes_(b"2.1")
        images = h5_file.create_dataset(
            "images", (NUM, *IMAGE), "u1", chunks=(910, *IMAGE), maxshape=(910, *IMAGE), **hdf5plugin.Blosc()
        )
        images[...] = noise((NUM, *IMAGE))
        mark(images, "CARRAY", "1.1")
        rows = h5_file.create_dataset("rows", (0, 30), "<f4", chunks=(546, 30), maxshape=(None, 30))
        for start in range(0, NUM, 4):  # appended
            stop = min(NUM, start + 4)
            rows.resize(stop, axis=0)
            rows[start:stop] = noise((stop - start, 30), "<f4", seed=start)
        mark(rows, "EARRAY", "1.1")
        rows.attrs["EXTDIM"] = np.int32(0)
        flags = h5_file.create_dataset("flags", data=np.arange(NUM) % 2 == 0)
        mark(flags, "CARRAY", "1.1")
        bits = h5py.h5d.create(h5_file.id, b"bits", h5py.h5t.STD_B8LE, h5py.h5s.create_simple((NUM,)))
        bits.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(NUM, dtype="u1") % 2, mtype=h5py.h5t.STD_B8LE)
        ragged = h5_file.create_dataset("ragged", (NUM,), h5py.vlen_dtype("<i4"), chunks=(16384,), maxshape=(None,))
        for number in range(NUM):
            ragged[number] = np.arange(number, dtype="<i4")
        mark(ragged, "VLARRAY", "1.4")
        h5_file["names"] = np.array([f"name {n}".encode() for n in range(NUM)])
        mark(h5_file["names"], "ARRAY", "2.4")
        kind = np.dtype([("label", "<i4"), ("name", "S8"), ("vec", "<f4", (3,))])
        table = h5_file.create_dataset("table", (NUM,), kind, chunks=(2340,), maxshape=(None,))
        mark(table, "TABLE", "2.7")
        table.attrs["NROWS"] = np.int64(NUM)
    return path


# Images and labels -------------------------------------------------------------------------------------------


def keras(folder: Path) -> Path:
    """x_train, y_train, x_test, y_test."""
    return write(
        folder,
        "mnist.h5",
        x_train=noise((NUM, *IMAGE)),
        y_train=np.arange(NUM) % 10,
        x_test=noise((5, *IMAGE), seed=1),
        y_test=np.arange(5) % 10,
    )


def course(folder: Path) -> Path:
    """train_set_x, train_set_y and a list of class names of another length, as well-known course material has it."""
    return write(
        folder,
        "train_catvnoncat.h5",
        list_classes=np.array([b"non-cat", b"cat"]),
        train_set_x=noise((NUM, 8, 8, 3)),
        train_set_y=np.arange(NUM) % 2,
    )


def one_file_per_array(folder: Path) -> Path:
    """PatchCamelyon: images NHWC in one file, labels (N, 1, 1, 1) in another, both gzip with h5py's own chunks."""
    packed = {"compression": "gzip", "chunks": True}
    write(folder, "train_y.h5", y={"data": (np.arange(NUM, dtype="u1") % 2).reshape(NUM, 1, 1, 1), **packed})
    return write(folder, "train_x.h5", x={"data": noise((NUM, 16, 16, 3)), **packed})


def joined_by_links(folder: Path) -> Path:
    """The two files of PatchCamelyon under one roof: three lines of h5py."""
    one_file_per_array(folder)
    with h5py.File(folder / "train.h5", "w") as h5_file:
        h5_file["x"] = h5py.ExternalLink("train_x.h5", "x")
        h5_file["y"] = h5py.ExternalLink("train_y.h5", "y")
    return folder / "train.h5"


def group_per_sample(folder: Path, num: int = NUM) -> Path:
    """One group for each sample, with its image and its label."""
    path = folder / "groups.h5"
    with h5py.File(path, "w") as h5_file:
        for number, image in enumerate(noise((num, 9, 8, 3))):
            group = h5_file.create_group(f"sample_{number:05d}")
            group["image"], group["label"] = image, number % 10
            group.attrs["id"] = number
    return path


def dataset_per_sample(folder: Path, num: int = NUM) -> Path:
    """One dataset for each sample; the label is in an attribute."""
    path = folder / "datasets.h5"
    with h5py.File(path, "w") as h5_file:
        for number, image in enumerate(noise((num, 9, 8, 3))):
            h5_file[f"images/{number:05d}"] = image
            h5_file[f"images/{number:05d}"].attrs["label"] = number % 10
    return path


def masks(folder: Path) -> Path:
    """Masks beside their images."""
    return write(folder, "masks.h5", images=noise((NUM, 9, 8, 3)), masks=noise((NUM, 9, 8)) % 3)


def fast_mri(folder: Path) -> list[Path]:
    """One file for each volume: raw measurements as complex numbers, the reconstruction, an XML header, a scalar."""
    paths = []
    for number, num_slices in enumerate((5, 8)):
        path = write(
            folder,
            f"file{number}.h5",
            kspace=noise((num_slices, 2, 10, 6), "c8", seed=number),
            reconstruction_rss=noise((num_slices, 6, 6), "f4", seed=number),
            reconstruction_esc=noise((num_slices, 6, 6), "f4", seed=number + 7),
            ismrmrd_header="<ismrmrdHeader/>",
        )
        with h5py.File(path, "a") as h5_file:
            h5_file.attrs.update({"acquisition": "AXT2", "max": 1.5e-3, "norm": 0.1, "patient_id": "0a"})
        paths.append(path)
    return paths


def variable_length_jpeg(folder: Path) -> Path:
    """Encoded images as rows of different length."""
    path = folder / "jpeg.h5"
    with h5py.File(path, "w") as h5_file:
        images = h5_file.create_dataset("images", (NUM,), h5py.vlen_dtype("u1"))
        for number, encoded in enumerate(jpegs()):
            images[number] = encoded
        h5_file["labels"] = np.arange(NUM)
    return path


def padded_jpeg(folder: Path) -> Path:
    """Encoded images in rows of the longest one's length, with a column of the lengths."""
    longest = max(map(len, jpegs()))
    rows = np.stack([np.pad(one, (0, longest - len(one))) for one in jpegs()])
    return write(folder, images=rows, length=np.array([len(one) for one in jpegs()]))


def opaque_jpeg(folder: Path) -> Path:
    """Encoded images as opaque values, all of the longest one's length."""
    longest = max(map(len, jpegs()))
    return write(folder, images=np.array([one.tobytes() for one in jpegs()], f"V{longest}"), labels=np.arange(NUM))


def bytes_jpeg(folder: Path) -> Path:
    """Encoded images as text of a fixed length: what `np.array(list_of_bytes)` makes of them."""
    return write(folder, images=np.array([one.tobytes() for one in jpegs()]), labels=np.arange(NUM))


# Layouts -----------------------------------------------------------------------------------------------------


def shards(folder: Path) -> Path:
    """A virtual dataset over three files."""
    parts = np.split(noise((NUM, *IMAGE)), [5, 9])
    images, labels = h5py.VirtualLayout((NUM, *IMAGE), "u1"), h5py.VirtualLayout((NUM,), "i8")
    start = 0
    for number, part in enumerate(parts):
        rows, name = slice(start, start + len(part)), f"shard{number}.h5"
        write(folder, name, images={"data": part, "compression": "gzip"}, labels=np.arange(rows.start, rows.stop))
        images[rows] = h5py.VirtualSource(name, "images", part.shape)
        labels[rows] = h5py.VirtualSource(name, "labels", (len(part),))
        start = rows.stop
    with h5py.File(folder / "all.h5", "w", libver="latest") as h5_file:
        h5_file.create_virtual_dataset("images", images, fillvalue=7)
        h5_file.create_virtual_dataset("labels", labels)
    return folder / "all.h5"


def off_by_one_chunk(folder: Path) -> Path:
    """A chunk of 217 rows for images of height 218."""
    images = {"data": noise((NUM, 3, 218, 6)), "chunks": (5, 3, 217, 6), "maxshape": (None, 3, 218, 6)}
    return write(folder, images=images, labels=np.arange(NUM))


def written_while_read(folder: Path) -> Path:
    """Written in single-writer, multiple-reader mode, a few rows at a time."""
    path = folder / "swmr.h5"
    with h5py.File(path, "w", libver="latest") as h5_file:
        images = h5_file.create_dataset("images", (0, *IMAGE), "u1", chunks=(4, *IMAGE), maxshape=(None, *IMAGE))
        h5_file.swmr_mode = True
        for row in noise((NUM, *IMAGE)):
            images.resize(len(images) + 1, axis=0)
            images[-1] = row
            images.flush()
    return path


def unwritten_chunks(folder: Path) -> Path:
    """Resized ahead of what was written, with a fill value of its own, and none."""
    path = folder / "resized.h5"
    with h5py.File(path, "w") as h5_file:
        for key, options in {"raw": {}, "packed": {"compression": "gzip"}}.items():
            images = h5_file.create_dataset(
                key, (2, *IMAGE), "<i2", chunks=(4, *IMAGE), maxshape=(None, *IMAGE), fillvalue=-3, **options
            )
            images[:2] = noise((2, *IMAGE), "<i2")
            images.resize(NUM, axis=0)
            images[9] = 5
        h5_file.create_dataset("never", (NUM, *IMAGE), "f4", fillvalue=0.25)
    return path


def some_filters_skipped(folder: Path) -> Path:
    """Chunks written directly, each with other filters left out, as its mask says."""
    import zlib

    path = folder / "direct.h5"
    with h5py.File(path, "w") as h5_file:
        images = h5_file.create_dataset(
            "images", (NUM, *IMAGE), "<u2", chunks=(4, *IMAGE), shuffle=True, compression="gzip"
        )
        for block, mask in enumerate((0b00, 0b01, 0b10, 0b11)):
            rows = noise((4, *IMAGE), "<u2", seed=block)
            content = rows.tobytes()
            if not mask & 0b01:
                content = rows.reshape(-1, 1).view("u1").T.tobytes()
            if not mask & 0b10:
                content = zlib.compress(content)
            images.id.write_direct_chunk((4 * block, 0, 0), content, mask)
    return path


def plain_edge_chunks(folder: Path) -> Path | None:
    """Chunks that reach over the edge are not filtered, and no mask says so. None where this cannot be written."""
    library = hdf5_library()
    if library is None or not hasattr(library, "H5Pset_chunk_opts"):
        return None
    path = folder / "edges.h5"
    library.H5Pset_chunk_opts.argtypes = [ctypes.c_int64, ctypes.c_uint]
    with h5py.File(path, "w", libver="latest") as h5_file:
        for name in ("gzip", "shuffle"):
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_chunk((4, 5, 8))  # of 9 rows: every second chunk reaches over the edge
            creation.set_deflate(4) if name == "gzip" else creation.set_shuffle()
            assert library.H5Pset_chunk_opts(creation.id, 0x02) >= 0
            space = h5py.h5s.create_simple((NUM, *IMAGE))
            h5py.h5d.create(h5_file.id, name.encode(), h5py.h5t.STD_U16LE, space, creation)
            h5_file[name][:12, :5] = noise((12, 5, 8), "u2")
            h5_file[name][:4, 5:] = noise((4, 4, 8), "u2", seed=1)  # the last one that is written is a whole one
    return path


def every_chunk_index(folder: Path) -> Path:
    """The kinds of table in which HDF5 notes where chunks lie, by the newest format."""
    path = folder / "indexes.h5"
    with h5py.File(path, "w", libver="latest") as h5_file:
        kinds: dict[str, dict[str, Any]] = {
            "single": {"chunks": (NUM, *IMAGE)},
            "single_longer": {"chunks": (40, *IMAGE), "maxshape": (40, *IMAGE)},
            "fixed": {"chunks": (2, *IMAGE)},
            "extensible": {"chunks": (2, *IMAGE), "maxshape": (None, *IMAGE)},
            "tree": {"chunks": (2, *IMAGE), "maxshape": (None, None, 8)},
        }
        for kind, options in kinds.items():
            packed: dict[str, Any] = {"compression": "gzip", "fletcher32": True}
            for name, packing in {"raw": {}, "gzip": packed}.items():
                h5_file.create_dataset(f"{kind}_{name}", data=noise((NUM, *IMAGE)), **options, **packing)
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((2, *IMAGE))
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # without a table: one chunk after the other
        space = h5py.h5s.create_simple((NUM, *IMAGE))
        h5py.h5d.create(h5_file.id, b"implicit", h5py.h5t.STD_U8LE, space, creation)
        h5_file["implicit"][...] = noise((NUM, *IMAGE))
    return path


def grows_sideways(folder: Path) -> Path:
    """The axis that grows is not the first, as in an EArray of PyTables with another `extdim`, in the newest format."""
    path = folder / "sideways.h5"
    with h5py.File(path, "w", libver="latest") as h5_file:
        kinds: dict[str, dict[str, Any]] = {"raw": {}, "gzip": {"compression": "gzip"}}
        for name, packing in kinds.items():
            for axis, maxshape in {"second": (NUM, None, 8), "third": (NUM, 9, None)}.items():
                options = {"chunks": (4, *IMAGE), "maxshape": maxshape, **packing}
                h5_file.create_dataset(f"{axis}_{name}", data=noise((NUM, *IMAGE)), **options)
    return path


def number_types(folder: Path) -> Path:
    """Types of numbers beside those every tensor has."""
    path = folder / "types.h5"
    with h5py.File(path, "w") as h5_file:
        for name in ("<f2", ">f2", ">f4", ">f8", ">i2", ">u4", "<u8", ">c8", "<c16", "?"):
            key = name.translate({ord("<"): "little_", ord(">"): "big_", ord("?"): "bool"})
            h5_file[key] = noise((NUM, *IMAGE), name)
            h5_file.create_dataset(
                f"{key}_gzip", data=noise((NUM, *IMAGE), name), chunks=(4, *IMAGE), compression="gzip"
            )
        colours = h5py.enum_dtype({"RED": 0, "GREEN": 1, "BLUE": 42}, "u1")
        h5_file.create_dataset("enum", data=noise((NUM, *IMAGE)) % 2, dtype=colours)
        h5_file["committed_type"] = np.dtype("<i2")
        h5_file.create_dataset("committed", data=noise((NUM, *IMAGE), "<i2"), dtype=h5_file["committed_type"])
        twelve_bits = h5py.h5t.STD_U16LE.copy()
        twelve_bits.set_precision(12)
        for key, pack in {"nbit": True, "twelve_bits": False}.items():
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if pack:
                creation.set_chunk((4, *IMAGE))
                creation.set_filter(h5py.h5z.FILTER_NBIT, h5py.h5z.FLAG_MANDATORY)
            h5py.h5d.create(h5_file.id, key.encode(), twelve_bits, h5py.h5s.create_simple((NUM, *IMAGE)), creation)
            h5_file[key][...] = noise((NUM, *IMAGE), "<u2") % 4096
    return path


def filters(folder: Path) -> Path:
    """Every filter that HDF5 itself and the plug-ins bring, some in a row."""
    path = folder / "filters.h5"
    smooth = np.cumsum(noise((NUM, *IMAGE), "<i2") % 7, axis=1, dtype="<i2")
    kinds: dict[str, dict[str, Any]] = {
        "gzip": {"compression": "gzip"},
        "shuffle_gzip_fletcher": {"compression": "gzip", "shuffle": True, "fletcher32": True},
        "fletcher": {"fletcher32": True},
        "shuffle": {"shuffle": True},
        "lzf": {"compression": "lzf"},
        "scaleoffset": {"scaleoffset": 0},
        "blosc": dict(hdf5plugin.Blosc()),
        "blosc2": dict(hdf5plugin.Blosc2()),
        "lz4": dict(hdf5plugin.LZ4()),
        "zstd": dict(hdf5plugin.Zstd()),
        "bitshuffle_lz4": dict(hdf5plugin.Bitshuffle()),
        "bitshuffle_zstd": dict(hdf5plugin.Bitshuffle(cname="zstd")),
        "bitshuffle": dict(hdf5plugin.Bitshuffle(cname="none")),
        "bzip2": dict(hdf5plugin.BZip2()),
    }
    if "szip" in h5py.filters.encode:
        kinds["szip"] = {"compression": "szip", "compression_opts": ("nn", 8)}
    with h5py.File(path, "w") as h5_file:
        for name, options in kinds.items():
            h5_file.create_dataset(name, data=smooth, chunks=(4, *IMAGE), **options)
        h5_file.create_dataset("scaled_floats", data=noise((NUM, *IMAGE), "f4"), chunks=(4, *IMAGE), scaleoffset=3)
    return path


def text(folder: Path) -> Path:
    """Class names in every form that strings have."""
    names = [f"klaß {n}" for n in range(NUM)]
    return write(
        folder,
        unicode={"data": names},
        fixed=np.array([name.encode("latin-1") for name in names]),
        fixed_utf8={"data": [name.encode() for name in names], "dtype": h5py.string_dtype("utf-8", 12)},
        ascii={"data": [f"class {n}" for n in range(NUM)], "dtype": h5py.string_dtype("ascii")},
        empty={"data": [""] * NUM},
        rows={"data": [[name, ""] for name in names]},
    )


def external_raw(folder: Path) -> Path:
    """The bytes lie in a raw file beside it."""
    (folder / "raw.bin").write_bytes(b"head" + noise((NUM, *IMAGE)).tobytes())
    where = [(str(folder / "raw.bin"), 4, NUM * 72)]
    return write(folder, images={"shape": (NUM, *IMAGE), "dtype": "u1", "external": where})


def compact(folder: Path) -> Path:
    """The values lie in the header."""
    with h5py.File(folder / "data.h5", "w") as h5_file:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((NUM, *IMAGE))
        h5py.h5d.create(h5_file.id, b"images", h5py.h5t.STD_U8LE, space, creation)
        h5_file["images"][...] = noise((NUM, *IMAGE))
    return folder / "data.h5"


def links(folder: Path) -> Path:
    """The same samples by other names: a second name, a soft link, a link to another file."""
    write(folder, "target.h5", images={"data": noise((NUM, *IMAGE)), "chunks": (4, *IMAGE)})
    with h5py.File(folder / "links.h5", "w") as h5_file:
        h5_file["deep/images"] = noise((NUM, *IMAGE), seed=1)
        h5_file["second"] = h5_file["deep/images"]
        h5_file["soft"] = h5py.SoftLink("/deep/images")
        h5_file["elsewhere"] = h5py.ExternalLink("target.h5", "images")
        h5_file["nowhere"] = h5py.SoftLink("/gone")
    return folder / "links.h5"


def user_block(folder: Path, file: dict[str, Any]) -> Path:
    """Half a kilobyte of somebody else's bytes before the file begins."""
    images = {"data": noise((NUM, *IMAGE)), "chunks": (4, *IMAGE)}
    path = write(folder, file={"userblock_size": 512, **file}, images=images, labels=np.arange(NUM))
    with path.open("r+b") as raw:
        raw.write(b"#!/usr/bin/env python\n")
    return path


def guessed_chunks(folder: Path) -> Path:
    """Chunks as h5py guesses them, which split samples."""
    images = noise((NUM, 3, 40, 50))
    return write(
        folder,
        images={"data": images, "chunks": True, "maxshape": (None, 3, 40, 50)},
        packed={"data": noise((NUM, 70, 90), seed=2), "compression": "gzip"},
    )


def no_values(folder: Path) -> Path:
    """An axis of length zero behind the first."""
    return write(folder, images={"shape": (NUM, 0, 8), "dtype": "u1"}, labels=np.arange(NUM))


def chunk_longer_than_data(folder: Path) -> Path:
    """Made to grow, and still shorter than its first chunk."""
    grows: dict[str, Any] = {"data": noise((NUM, *IMAGE)), "chunks": (64, *IMAGE), "maxshape": (None, *IMAGE)}
    return write(folder, images=grows, packed={**grows, "compression": "gzip"})
