from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.sources import SourceOptions, open_source
from lightning_gpufeed.hdf5.sources.blocks import shuffled_order
from lightning_gpufeed.hdf5.sources.decode import Geometry, decode_files
from lightning_gpufeed.hdf5.sources.h5 import _CACHE_BYTES
from lightning_gpufeed.hdf5.sources.source import guess_layout

PACKAGE = Path(__file__).parents[2] / "lightning_gpufeed"


def refusal(spec, kind=PackError, **options) -> str:
    """The message with which a source is refused."""
    with pytest.raises(kind) as caught:
        open_source(spec, **options).close()
    return str(caught.value)


def read(source, indices=None):
    """All rows, or those asked for, and the source closed."""
    try:
        return source.read(np.arange(source.num_samples) if indices is None else np.asarray(indices, np.int64))
    finally:
        source.close()


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save_images(root: Path, *names: str, size: tuple[int, int] = (8, 10)) -> dict[str, np.ndarray]:
    """RGB images (height, width) at `names` below `root`, and their pixels."""
    made = {}
    for seed, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        made[name] = pixels(*size, 3, seed=seed)
        Image.fromarray(made[name]).save(path)
    return made


# -- any source


def test_a_missing_path_is_a_missing_file(tmp_path):
    message = refusal(tmp_path / "none.npy", FileNotFoundError)
    assert message == (
        f"no such file or folder: '{tmp_path}/none.npy'; a dataset in a module is written 'package.module:name'"
    )


def test_a_file_of_no_known_kind_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    assert refusal(path) == (
        f"{path} is of no kind that can be packed; expected a folder of images, .npy, .npz, idx (MNIST), HDF5, or "
        "a dataset as 'package.module:name'"
    )


@pytest.mark.parametrize("option", [{"resize": 8}, {"crop": (4, 4)}, {"mode": "L"}, {"split": "train"}])
def test_an_option_that_means_nothing_for_a_source_is_refused(tmp_path, option):
    np.save(tmp_path / "x.npy", pixels(4, 2, 2))
    name, value = next(iter(option.items()))
    message = refusal(tmp_path / "x.npy", ValueError, **option)
    assert message == f"{name}={value!r} means nothing for {tmp_path / 'x.npy'}, which is one array; leave it out"


@pytest.mark.parametrize(
    "option",
    [
        {"keys": []},
        {"split": "val"},
        {"resize": 0},
        {"crop": (3, 4, 5)},
        {"mode": "CMYK"},
        {"layout": "CHW"},
        {"num_workers": -1},
    ],
)
def test_an_option_with_a_wrong_value_is_refused_and_named(option):
    with pytest.raises(ValueError, match=rf"^{next(iter(option))} is "):
        SourceOptions(**option)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((28, 28), "NHW"),
        ((3, 32, 32), "NCHW"),
        ((32, 32, 3), "NHWC"),
        ((1, 4, 4), "NHWC-by-fallback"),
        ((12, 64, 64), "NHWC-by-fallback"),
        ((5,), None),
        ((2, 3, 4, 5), None),
    ],
)
def test_the_axis_order_is_told_by_the_one_short_axis(shape, layout):
    assert guess_layout(shape, "NHWC-by-fallback") == layout


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_a_shuffled_order_has_each_row_once(num_samples, seed):
    assert sorted(shuffled_order(num_samples, seed).tolist()) == list(range(num_samples))


def test_a_shuffled_order_never_changes():
    assert shuffled_order(8, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert shuffled_order(8, 1).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]


# -- .npy and .npz


@pytest.mark.parametrize(("shape", "key"), [((6, 4, 4), "images"), ((6, 4), "data"), ((6,), "data")])
def test_an_npy_file_is_one_field_named_by_its_axes(tmp_path, shape, key):
    array = pixels(*shape)
    np.save(tmp_path / "x.npy", array)
    rows = read(open_source(tmp_path / "x.npy"), [4, 0, 1])
    assert list(rows.values) == [key]
    np.testing.assert_array_equal(rows.values[key], array[[4, 0, 1]])


def test_an_npy_file_larger_than_the_memory_is_read_row_by_row(tmp_path):
    path = tmp_path / "sparse.npy"
    # 2 TiB, of which nothing is on disk.
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(2**21, 1024, 1024))
    array[2**20, 5, 7] = 9
    del array
    rows = read(open_source(path), [2**20])
    assert rows.values["images"][0, 5, 7] == 9
    assert rows.values["images"].sum() == 9


def test_arrays_in_column_order_and_of_the_other_byte_order_come_out_right(tmp_path):
    array = np.asfortranarray(pixels(6, 4, 4).astype(">i2"))
    np.save(tmp_path / "x.npy", array)
    source = open_source(tmp_path / "x.npy")
    assert source.fields["images"].dtype == np.dtype("=i2")
    np.testing.assert_array_equal(read(source).values["images"], array)


def test_an_npz_file_gives_each_array_as_a_field(tmp_path):
    x, y = pixels(7, 3, 5, 5), np.arange(7)
    np.savez_compressed(tmp_path / "x.npz", images=x, labels=y)
    source = open_source(tmp_path / "x.npz")
    assert source.attributes == {"images": {"layout": "NCHW"}, "labels": {}}
    rows = read(source, [6, 2])
    np.testing.assert_array_equal(rows.values["images"], x[[6, 2]])
    assert rows.values["labels"].tolist() == [6, 2]


def test_keys_choose_among_the_arrays_of_an_npz_file(tmp_path):
    np.savez(tmp_path / "x.npz", images=pixels(7, 4, 4), labels=np.arange(7), note=np.arange(3))
    source = open_source(tmp_path / "x.npz", keys=["labels", "images"])
    assert list(source.fields) == ["labels", "images"]
    source.close()
    assert refusal(tmp_path / "x.npz", keys=["mask"]) == (
        f"{tmp_path / 'x.npz'} has no 'mask'; it has 'images', 'labels', 'note'"
    )


def test_fields_of_different_length_are_listed(tmp_path):
    np.savez(tmp_path / "x.npz", images=pixels(7, 4, 4), labels=np.arange(6))
    assert refusal(tmp_path / "x.npz") == (
        f"the fields of {tmp_path / 'x.npz'} differ in length: 'images' has 7, 'labels' has 6; expected one row per "
        "sample in each. Choose those that belong together: keys=[...] (--keys)"
    )


def test_python_objects_and_text_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}, []], object), allow_pickle=True)
    assert refusal(tmp_path / "x.npy").startswith(f"{tmp_path / 'x.npy'} cannot be read as a .npy file of numbers: ")
    np.savez(tmp_path / "x.npz", images=pixels(2, 4, 4), names=np.array(["a", "b"]))
    assert refusal(tmp_path / "x.npz") == (
        f"'names' in {tmp_path / 'x.npz'} holds text (<U1), which cannot be packed; expected numbers. Leave it out by "
        "naming the other fields: keys=[...] (--keys)"
    )


def test_an_empty_array_and_a_single_value_are_refused(tmp_path):
    np.savez(tmp_path / "empty.npz", images=pixels(0, 4, 4))
    assert refusal(tmp_path / "empty.npz") == (
        f"{tmp_path / 'empty.npz'} holds no samples, so there is nothing to pack"
    )
    np.savez(tmp_path / "one.npz", images=np.array(3))
    assert refusal(tmp_path / "one.npz") == (
        f"'images' in {tmp_path / 'one.npz'} is a single value; expected one row per sample"
    )


def test_a_numpy_file_with_the_suffix_of_the_other_kind_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", pixels(4, 2, 2))
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    assert refusal(tmp_path / "x.npz").endswith("holds one array and no archive; give it the suffix .npy")
    np.savez(tmp_path / "y.npz", images=pixels(4, 2, 2))
    (tmp_path / "y.npz").rename(tmp_path / "y.npy")
    assert refusal(tmp_path / "y.npy").endswith("is an archive of arrays; give it the suffix .npz")


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_truncated_numpy_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    (np.save if suffix == ".npy" else np.savez)(path, pixels(50, 8, 8))
    os.truncate(path, path.stat().st_size // 2)
    assert refusal(path).startswith(f"{path} cannot be read as a {suffix} ")


# -- idx


def write_idx(path: Path, array: np.ndarray, *, code: int = 8, cut: int = 0) -> None:
    header = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    content = header + array.tobytes()
    content = content[: len(content) - cut]
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def mnist(folder: Path, prefix: str, num_samples: int, suffix: str = "") -> tuple[np.ndarray, np.ndarray]:
    images, labels = pixels(num_samples, 28, 28, seed=num_samples), pixels(num_samples, seed=1) % 10
    write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", images)
    write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", labels)
    return images, labels


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_labels_of_an_idx_file_are_found_by_its_name(tmp_path, suffix):
    images, labels = mnist(tmp_path, "train", 20, suffix)
    source = open_source(tmp_path / f"train-images-idx3-ubyte{suffix}")
    assert source.attributes["images"] == {"layout": "NHW"}
    rows = read(source, [19, 3, 3])
    np.testing.assert_array_equal(rows.values["images"], images[[19, 3, 3]])
    assert rows.values["labels"].tolist() == labels[[19, 3, 3]].tolist()


def test_a_folder_of_idx_pairs_needs_a_split(tmp_path):
    mnist(tmp_path, "train", 20)
    images, _ = mnist(tmp_path, "t10k", 5, ".gz")
    assert refusal(tmp_path) == (
        f"{tmp_path} holds 2 image/label pairs to choose from, expected one: t10k-images-idx3-ubyte.gz, "
        "t10k-labels-idx1-ubyte.gz, train-images-idx3-ubyte, train-labels-idx1-ubyte. Give split='train' or 'test' "
        "(--split), or one of the image files"
    )
    assert open_source(tmp_path, split="train").num_samples == 20
    np.testing.assert_array_equal(read(open_source(tmp_path, split="test")).values["images"], images)


def test_a_folder_with_one_idx_pair_needs_no_split(tmp_path):
    mnist(tmp_path, "emnist-letters-train", 20)
    assert open_source(tmp_path).num_samples == 20
    assert open_source(tmp_path, split="train").num_samples == 20
    assert "holds 0 image/label pairs to choose from for split='test'" in refusal(tmp_path, split="test")


@pytest.mark.parametrize(("code", "dtype"), [(9, "i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_type_of_idx_is_read(tmp_path, code, dtype, suffix):
    array = np.arange(-6, 6).reshape(4, 3).astype(dtype)
    write_idx(tmp_path / f"x-ubyte{suffix}", array, code=code)
    rows = read(open_source(tmp_path / f"x-ubyte{suffix}"))
    assert rows.values["data"].dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(rows.values["data"], array)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_truncated_idx_file_is_refused_with_its_numbers(tmp_path, suffix):
    path = tmp_path / f"t10k-images-idx3-ubyte{suffix}"
    write_idx(path, pixels(5, 4, 4), cut=3)
    assert refusal(path) == (
        f"{path} holds 77 bytes of values where its header promises 80 (shape (5, 4, 4), uint8); it is truncated or "
        "damaged, fetch it again"
    )


@pytest.mark.parametrize("content", [b"", b"\0\0\x08", b"PK\x03\x04 and more", b"\0\0\x08\x03\0\0"])
def test_what_only_calls_itself_idx_is_refused(tmp_path, content):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    assert refusal(path).startswith(
        (f"{path} is not an idx file: it begins with ", f"{path} ends within the 16 bytes of its header; ")
    )


def test_a_truncated_gzip_file_is_refused(tmp_path):
    mnist(tmp_path, "train", 20, ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    os.truncate(path, path.stat().st_size - 20)
    assert refusal(path).startswith(f"{path} is not a whole gzip file: ")


def test_idx_images_and_labels_of_different_length_are_refused(tmp_path):
    mnist(tmp_path, "train", 20)
    write_idx(tmp_path / "train-labels-idx1-ubyte", pixels(19))
    assert "differ in length: 'images' has 20, 'labels' has 19" in refusal(tmp_path)


# -- image folders


def test_the_sub_folders_of_an_image_folder_are_the_classes_in_sorted_order(tmp_path):
    made = save_images(tmp_path, "dog/2.png", "dog/1.PNG", "cat/a/deep.png", "cat/b.bmp", "ant/z.png")
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "cat" / ".x.png").write_bytes(b"")
    source = open_source(tmp_path)
    assert source.attributes == {
        "images": {"layout": "NCHW"},
        "labels": {"class_names": ["ant", "cat", "dog"]},
    }
    rows = read(source)
    assert rows.values["labels"].tolist() == [0, 1, 1, 2, 2]
    expected = [made[name] for name in ("ant/z.png", "cat/a/deep.png", "cat/b.bmp", "dog/1.PNG", "dog/2.png")]
    np.testing.assert_array_equal(rows.values["images"], np.stack(expected).transpose(0, 3, 1, 2))


def test_links_to_images_and_folders_are_followed_but_not_in_circles(tmp_path):
    made = save_images(tmp_path / "store", "1.png", "more/2.png")
    root = tmp_path / "root"
    root.mkdir()
    (root / "cat").symlink_to(tmp_path / "store")
    (root / "dog").mkdir()
    (root / "dog" / "3.png").symlink_to(tmp_path / "store" / "1.png")
    (tmp_path / "store" / "more" / "up").symlink_to(tmp_path / "store")
    rows = read(open_source(root, layout="NHWC"))
    assert rows.values["labels"].tolist() == [0, 0, 1]
    np.testing.assert_array_equal(rows.values["images"][2], made["1.png"])


def test_a_folder_of_images_without_classes_has_no_labels(tmp_path):
    save_images(tmp_path, "b.png", "a.png")
    source = open_source(tmp_path)
    assert list(source.fields) == ["images"]
    source.close()


def test_a_folder_without_images_says_what_was_found_and_what_was_expected(tmp_path):
    (tmp_path / "cat").mkdir()
    for name in ("cat/a.heic", "cat/b.heic", "readme.md"):
        (tmp_path / name).write_text("x")
    assert refusal(tmp_path) == (
        f"no images in {tmp_path} (found: 2 x .heic, 1 x .md); expected one sub-folder per class with files ending "
        "in .bmp, .gif, .jpeg, .jpg, .pbm, .pgm, .png, .pnm, .ppm, .tif, .tiff, .webp"
    )


def test_images_both_beside_and_inside_class_folders_are_refused(tmp_path):
    save_images(tmp_path, "a.png", "cat/b.png")
    assert refusal(tmp_path) == (
        f"{tmp_path} holds images directly (a.png) and in sub-folders (cat/b.png); expected one or the other: move "
        "the former into a class folder"
    )


def test_a_class_folder_without_images_is_refused(tmp_path):
    save_images(tmp_path, "cat/b.png")
    (tmp_path / "bird").mkdir()
    assert refusal(tmp_path) == (
        f"{tmp_path} has class folders without images: bird; each would take a label that no sample has. Fill or "
        "remove them"
    )


def test_splits_are_not_taken_for_classes(tmp_path):
    save_images(tmp_path, "train/cat/1.png", "val/cat/2.png")
    assert refusal(tmp_path) == (
        f"the sub-folders of {tmp_path} are splits (train, val), not classes; pack each on its own, such as "
        f"{tmp_path / 'train'}"
    )


def test_images_of_different_size_are_refused_by_name_with_the_cure(tmp_path):
    save_images(tmp_path, "cat/1.png", "cat/2.png")
    save_images(tmp_path, "cat/3.png", size=(8, 9))
    source = open_source(tmp_path)
    with pytest.raises(PackError) as caught:
        read(source)
    assert str(caught.value) == (
        "images differ in size: cat/1.png is 8 x 10 pixels, cat/3.png is 8 x 9 pixels (height x width); expected one "
        "size. Give resize=256, crop=224 (--resize, --crop) or another pair"
    )


def test_an_image_smaller_than_the_crop_is_refused_by_name(tmp_path):
    save_images(tmp_path, "cat/1.png", size=(8, 10))
    source = open_source(tmp_path, crop=9)
    with pytest.raises(PackError) as caught:
        read(source)
    assert str(caught.value) == (
        "cat/1.png is 8 x 10 pixels, smaller than the crop of 9 x 9; resize first: resize=9 (--resize)"
    )


@pytest.mark.parametrize(
    ("size", "resize", "resized"),
    [
        ((40, 60), 20, (20, 30)),
        ((60, 41), 20, (29, 20)),
        ((40, 60), (17, 23), (17, 23)),
        ((10, 300), 5, (5, 150)),
    ],
)
def test_resize_sets_the_shorter_side_or_both_and_averages_as_pillow_does(tmp_path, size, resize, resized):
    made = save_images(tmp_path, "1.png", size=size)["1.png"]
    rows = read(open_source(tmp_path, resize=resize, layout="NHWC"))
    expected = Image.fromarray(made).resize(resized[::-1], Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(rows.values["images"][0], np.asarray(expected))


@pytest.mark.parametrize(
    ("crop", "top", "left", "size"), [(6, 1, 2, (6, 6)), ((7, 3), 0, 4, (7, 3)), ((8, 10), 0, 0, (8, 10))]
)
def test_crop_cuts_out_the_centre(tmp_path, crop, top, left, size):
    made = save_images(tmp_path, "1.png", size=(8, 10))["1.png"]
    rows = read(open_source(tmp_path, crop=crop, layout="NHWC"))
    np.testing.assert_array_equal(rows.values["images"][0], made[top : top + size[0], left : left + size[1]])


def test_grey_images_have_one_channel_and_other_modes_are_converted(tmp_path):
    made = save_images(tmp_path, "1.png")["1.png"]
    Image.fromarray(made).convert("P").save(tmp_path / "2.png")
    Image.fromarray(np.dstack([made, made[..., :1]])).save(tmp_path / "3.png")
    rows = read(open_source(tmp_path, mode="L"))
    assert rows.values["images"].shape == (3, 1, 8, 10)
    np.testing.assert_array_equal(rows.values["images"][0, 0], np.asarray(Image.fromarray(made).convert("L")))
    colour = read(open_source(tmp_path))
    np.testing.assert_array_equal(colour.values["images"][2].transpose(1, 2, 0), made)  # alpha dropped


def _rgb16_png(path: Path) -> None:
    """A PNG of 16 bits per channel, which Pillow reads but cannot write."""
    import struct
    import zlib

    def block(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    lines = b"".join(b"\0" + bytes(6 * 10) for _ in range(8))
    header = block(b"IHDR", struct.pack(">IIBBBBB", 10, 8, 16, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + block(b"IDAT", zlib.compress(lines)) + block(b"IEND", b""))


DEEP = {
    "grey.png": lambda path: Image.fromarray(np.full((8, 10), 999, np.uint16)).save(path),
    "grey.tif": lambda path: Image.fromarray(np.full((8, 10), 999, np.uint16)).save(path),
    "float.tif": lambda path: Image.fromarray(np.full((8, 10), 0.5, np.float32)).save(path),
    "int.tif": lambda path: Image.fromarray(np.full((8, 10), 70000, np.int32)).save(path),
    "colour.png": _rgb16_png,
    "grey.pgm": lambda path: path.write_bytes(b"P5 10 8 4095\n" + bytes(160)),
    "colour.ppm": lambda path: path.write_bytes(b"P6 10 8 65535\n" + bytes(480)),
}


@pytest.mark.parametrize("name", sorted(DEEP))
def test_images_of_more_than_8_bits_per_channel_are_refused(tmp_path, name):
    DEEP[name](tmp_path / name)
    rows = read(open_source(tmp_path))
    assert [error.name for error in rows.errors] == [name]
    assert rows.errors[0].reason.startswith("has more than 8 bits per channel (Pillow mode ")
    assert rows.values["images"].shape == (0, 3, 8, 10)


def test_images_of_16_bits_per_pixel_are_not_mistaken_for_deep_ones(tmp_path):
    # 5 + 6 + 5 bits for the three channels: Pillow calls that raw mode "BGR;16".
    masks = b"".join(mask.to_bytes(4, "little") for mask in (0xF800, 0x07E0, 0x001F))
    body = (40).to_bytes(4, "little") + (10).to_bytes(4, "little") + (8).to_bytes(4, "little")
    body += b"\1\0\x10\0\3\0\0\0" + bytes(4) + bytes(16) + masks + bytes(10 * 8 * 2)
    path = tmp_path / "1.bmp"
    path.write_bytes(b"BM" + (14 + len(body)).to_bytes(4, "little") + bytes(4) + (66).to_bytes(4, "little") + body)
    assert read(open_source(tmp_path)).errors == []


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "gone"])
def test_a_damaged_image_is_listed_and_the_others_are_read(tmp_path, damage):
    made = save_images(tmp_path, "a/1.png", "a/2.png", "b/3.png")
    path = tmp_path / "a" / "2.png"
    if damage == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "gone":
        path.unlink()
        path.symlink_to(tmp_path / "nowhere.png")
    else:
        path.write_bytes(b"" if damage == "empty" else b"garbage" * 50)
    rows = read(open_source(tmp_path, layout="NHWC"), [2, 1, 0])
    assert [(error.index, error.name) for error in rows.errors] == [(1, "a/2.png")]
    assert str(tmp_path / "a") not in rows.errors[0].reason or damage == "gone"
    assert rows.indices.tolist() == [2, 0]
    assert rows.values["labels"].tolist() == [1, 0]
    np.testing.assert_array_equal(rows.values["images"], np.stack([made["b/3.png"], made["a/1.png"]]))


def test_a_folder_in_which_no_image_opens_is_refused(tmp_path):
    (tmp_path / "1.jpg").write_bytes(b"nothing")
    assert refusal(tmp_path).startswith(f"none of the 1 images in {tmp_path} can be opened; 1.jpg: cannot identify")


def test_decoding_tells_positions_of_failures_within_its_list(tmp_path):
    save_images(tmp_path, "1.png", "3.png")
    geometry = Geometry(None, None, "RGB", "NCHW")
    paths = [str(tmp_path / name) for name in ("0.png", "1.png", "2.png", "3.png")]
    images, errors = decode_files(paths, geometry, (8, 10))
    assert images.shape == (2, 3, 8, 10)
    assert [(error.position, error.is_misfit) for error in errors] == [(0, False), (2, False)]


def test_the_identity_of_an_image_folder_changes_with_any_file(tmp_path):
    save_images(tmp_path, "a/1.png", "b/2.png")

    def identity() -> str:
        source = open_source(tmp_path)
        source.close()
        return source.identity

    before = identity()
    assert identity() == before
    os.utime(tmp_path / "a" / "1.png", (1, 1))
    touched = identity()
    assert touched != before
    (tmp_path / "a" / "1.png").rename(tmp_path / "a" / "0.png")
    assert identity() != touched


def run(program: str, *arguments: object, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that imports the engine without Lightning, which takes seconds."""
    thin = path / "lightning_gpufeed"
    if not thin.exists():
        thin.mkdir(parents=True)
        (thin / "__init__.py").write_text(f"__path__ = [{str(PACKAGE)!r}]\n__version__ = '1.2.3'\n")
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(path)},
        cwd=path,  # not the checkout, whose package would be found first
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_pillow_an_image_folder_says_what_to_install(tmp_path):
    save_images(tmp_path / "photos", "1.png")
    program = """
import sys
sys.modules["PIL"] = None
from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.sources import open_source
try:
    open_source(sys.argv[1])
except PackError as error:
    print(error)
"""
    done = run(program, tmp_path / "photos", path=tmp_path / "thin")
    assert done.stdout.startswith(f"{tmp_path / 'photos'} holds images, and decoding them needs Pillow (")
    assert done.stdout.endswith("): pip install 'lightning_gpufeed[images]'\n")


def test_processes_decode_the_same_pixels_as_this_one(tmp_path):
    save_images(tmp_path / "photos", *(f"{c}/{i:02}.png" for c in "ab" for i in range(20)), size=(16, 12))
    (tmp_path / "photos" / "b" / "07.png").write_bytes(b"damaged")
    program = """
import sys
import numpy as np
from lightning_gpufeed.hdf5.sources import open_source
if __name__ == "__main__":
    source = open_source(sys.argv[1], num_workers=2)
    rows = source.read(np.arange(source.num_samples)[::-1].copy())
    source.close()
    np.savez(sys.argv[2], indices=rows.indices, errors=[e.index for e in rows.errors], **rows.values)
"""
    done = run(program, tmp_path / "photos", tmp_path / "rows.npz", path=tmp_path / "thin")
    assert done.returncode == 0, done.stderr
    here = read(open_source(tmp_path / "photos", num_workers=0), range(39, -1, -1))
    with np.load(tmp_path / "rows.npz") as there:
        assert there["errors"].tolist() == [27]
        np.testing.assert_array_equal(there["indices"], here.indices)
        np.testing.assert_array_equal(there["images"], here.values["images"])
        np.testing.assert_array_equal(there["labels"], here.values["labels"])


# -- datasets of torch


class Pairs(Dataset):
    """Images and labels, with one item that fails."""

    classes = ("even", "odd")

    def __init__(self, num_samples: int = 6, broken: int = -1) -> None:
        self.images = torch.from_numpy(pixels(num_samples, 3, 4, 4))
        self.broken = broken

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        if index == self.broken:
            raise RuntimeError("no such picture")
        return self.images[index], index % 2


class Varying(Pairs):
    def __getitem__(self, index: int):
        return self.images[index][:, : 4 - (index == 3)], 0


class OfKind(Dataset):
    """Items of one kind."""

    def __init__(self, make) -> None:
        self.make = make

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int):
        return self.make(index)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_a_pair_of_a_dataset_becomes_images_and_labels_with_its_class_names():
    dataset = Pairs()
    source = open_source(dataset)
    assert source.attributes == {"images": {"layout": "NCHW"}, "labels": {"class_names": ["even", "odd"]}}
    rows = read(source, [5, 0, 2])
    np.testing.assert_array_equal(rows.values["images"], dataset.images[[5, 0, 2]])
    assert rows.values["labels"].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("item", "fields"),
    [
        (lambda i: torch.full((2, 2), i), {"images": ((2, 2), "int64")}),
        (lambda i: torch.full((2,), float(i)), {"data": ((2,), "float32")}),
        (lambda i: (np.full((3,), i, "i2"),), {"data": ((3,), "int16")}),
        (
            lambda i: {"x": np.float32(i), "y": i, "z": bool(i)},
            {"x": ((), "float32"), "y": ((), "int64"), "z": ((), "bool")},
        ),
        (lambda i: (Image.new("RGB", (4, 5)), i), {"images": ((5, 4, 3), "uint8"), "labels": ((), "int64")}),
        (lambda i: torch.full((2, 2), i, dtype=torch.bfloat16), {"images": ((2, 2), "float32")}),
        (lambda i: torch.ones(2, requires_grad=True) * i, {"data": ((2,), "float32")}),
    ],
)
def test_every_kind_of_item_becomes_fields(item, fields):
    source = open_source(OfKind(item))
    assert {key: (spec.sample_shape, spec.dtype.name) for key, spec in source.fields.items()} == fields
    rows = read(source)
    assert {key: value.shape for key, value in rows.values.items()} == {k: (3, *v[0]) for k, v in fields.items()}


def test_a_pil_image_as_narrow_as_its_channels_is_still_nhwc():
    source = open_source(OfKind(lambda i: Image.new("RGB", (3, 3))))
    assert source.attributes["images"]["layout"] == "NHWC"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (lambda i: "text", "'data' in the items of {name} is a str; expected a tensor, an array, a PIL image or a "),
        (lambda i: (1, 2, 3), "items of {name} are a tuple of 3; expected one array, a pair (x, y) or a dict: "),
        (lambda i: {"x": 1, "t": "a"}, "'t' in the items of {name} is a str; expected a tensor, an array, a PIL "),
        (lambda i: 1 / 0, "none of the first 3 items of {name} can be read; item 0: ZeroDivisionError: division by "),
    ],
)
def test_items_that_cannot_be_packed_are_refused(item, message):
    assert refusal(OfKind(item)).startswith(message.format(name="the given OfKind"))


def test_keys_leave_out_what_cannot_be_packed():
    source = open_source(OfKind(lambda i: {"x": i, "t": "a"}), keys=["x"])
    assert read(source).values["x"].tolist() == [0, 1, 2]


def test_a_dataset_whose_items_vary_in_shape_is_refused_with_the_index():
    source = open_source(Varying())
    with pytest.raises(PackError) as caught:
        read(source)
    assert str(caught.value) == (
        "'images' of item 3 of the given Varying is uint8 (3, 3, 4); expected uint8 (3, 4, 4) as in the first item. "
        "Make all items alike there"
    )


def test_items_with_other_fields_than_the_first_are_refused_with_the_index():
    source = open_source(OfKind(lambda i: {"x": i} if i < 2 else {"x": i, "y": i}))
    with pytest.raises(PackError, match=r"^item 2 of the given OfKind has the fields \['x', 'y'\]; expected those"):
        read(source)


def test_an_item_that_raises_is_listed_with_its_reason():
    rows = read(open_source(Pairs(broken=0)))
    assert [(e.index, e.name, e.reason) for e in rows.errors] == [(0, "item 0", "RuntimeError: no such picture")]
    assert rows.indices.tolist() == [1, 2, 3, 4, 5]
    assert read(open_source(Pairs(broken=2)), [2]).values["images"].shape == (0, 3, 4, 4)


@pytest.mark.parametrize("dataset", [Endless(), iter([1]), 5])
def test_what_has_no_length_or_items_is_refused(dataset):
    name = type(dataset).__name__
    assert refusal(dataset) == (
        f"the given {name} is a {name}, which cannot be asked for its length and for single items; expected a "
        "dataset with __len__ and __getitem__"
    )


def test_an_empty_dataset_is_refused():
    assert refusal(TensorDataset(torch.zeros(0, 2))) == (
        "the given TensorDataset holds no samples, so there is nothing to pack"
    )


def test_the_identity_of_a_dataset_changes_with_its_content():
    first, second, other = Pairs(), Pairs(), Pairs()
    other.images = other.images.clone()
    other.images[5, 0, 0, 0] ^= 1
    assert open_source(first).identity == open_source(second).identity
    assert open_source(first).identity != open_source(other).identity


MODULE = """
import numpy as np

class Squares:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return np.full((2, 2), index * index), index

ready = Squares()

def make(size):
    return Squares()

class nested:
    data = ready
"""


@pytest.mark.parametrize("name", ["Squares", "ready", "nested.data"])
def test_a_dataset_is_found_by_its_import_path_in_the_current_folder(tmp_path, monkeypatch, name):
    module = f"squares_{name.replace('.', '_').lower()}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    rows = read(open_source(f"{module}:{name}"))
    assert rows.values["labels"].tolist() == [0, 1, 2, 3]
    assert rows.values["images"][:, 0, 0].tolist() == [0, 1, 4, 9]


def test_an_import_path_that_leads_nowhere_is_refused(tmp_path, monkeypatch):
    (tmp_path / "squares_here.py").write_text(MODULE)
    (tmp_path / "squares_broken.py").write_text("import no_such_module_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal("no_such_package.data:Set") == (
        "cannot import 'no_such_package.data' for 'no_such_package.data:Set': ModuleNotFoundError: No module named "
        "'no_such_package'"
    )
    assert refusal("squares_broken:x").startswith("cannot import 'squares_broken' for 'squares_broken:x': ")
    assert refusal("squares_here:Cubes") == "'squares_here' has no 'Cubes', which 'squares_here:Cubes' names"
    assert refusal("squares_here:make").startswith(
        "calling squares_here:make without arguments failed: TypeError: make() missing 1 required positional "
    )


# -- HDF5


def write_h5(path: Path, *, chunks: tuple[int, ...] | None = None, **filters) -> dict[str, np.ndarray]:
    arrays = {"images": pixels(50, 3, 6, 6), "group/labels": np.arange(50)}
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            shape = chunks if chunks is None else chunks[: array.ndim]
            file.create_dataset(key, data=array, chunks=shape, **filters)
        file["images"].attrs["layout"] = "NCHW"
        file["images"].attrs["mean"] = [0.0]
        file["group/labels"].attrs["class_names"] = np.array(["a", "b"], dtype=h5py.string_dtype())
        file["_gpufeed/crc32/images"] = np.zeros(3)
        file["version"] = 3
    return arrays


ORDERS = {
    "in order": np.arange(50),
    "shuffled": shuffled_order(50, 3),
    "part": np.array([7, 8, 9]),
    "repeated": np.array([49, 0, 49, 1]),
}


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("chunks", [None, (7, 3, 6, 6), (7, 2, 4, 5), (64, 3, 6, 6)])
def test_rows_of_any_hdf5_layout_come_out_as_h5py_gives_them(tmp_path, order, chunks):
    path = tmp_path / "x.h5"
    arrays = write_h5(path, chunks=None if chunks is None else (min(chunks[0], 50), *chunks[1:]))
    source = open_source(path)
    assert source.attributes == {
        "images": {"layout": "NCHW"},
        "group/labels": {"class_names": ["a", "b"]},
    }
    rows = read(source, ORDERS[order])
    assert list(rows.values) == ["group/labels", "images"]
    for key, array in arrays.items():
        np.testing.assert_array_equal(rows.values[key], array[ORDERS[order]])


def test_each_chunk_of_a_compressed_file_is_decoded_once_per_block_of_rows(tmp_path, monkeypatch):
    path = tmp_path / "x.h5"
    write_h5(path, chunks=(5, 3, 6, 6), compression="gzip")
    read_parts = []
    original = h5py.Dataset.__getitem__
    monkeypatch.setattr(
        h5py.Dataset, "__getitem__", lambda self, args, **kw: read_parts.append(args) or original(self, args, **kw)
    )
    source = open_source(path, keys=["images"])
    source.read(shuffled_order(50, 0))
    assert len(read_parts) == 10
    source.read(shuffled_order(50, 1))  # from memory
    source.close()
    assert len(read_parts) == 10


def test_the_memory_for_decoded_chunks_is_bounded(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        # 1.5 GiB of zeros, of which nothing is on disk.
        file.create_dataset("x", (96, 16 * 1024**2), "u1", chunks=(2, 16 * 1024**2))
    source = open_source(path)
    for row in range(0, 96, 2):
        source.read(np.array([row]))
        assert source._cached_bytes == sum(block.nbytes for block in source._blocks.values()) <= _CACHE_BYTES
    source.close()


def test_lengths_that_differ_in_an_hdf5_file_are_listed(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x_train"], file["x_test"] = np.zeros((5, 2)), np.zeros((3, 2))
    assert refusal(tmp_path / "x.h5") == (
        f"the fields of {tmp_path / 'x.h5'} differ in length: 'x_test' has 3, 'x_train' has 5; expected one row per "
        "sample in each. Choose those that belong together: keys=[...] (--keys)"
    )
    assert open_source(tmp_path / "x.h5", keys="x_train").num_samples == 5


def test_text_and_ragged_rows_in_an_hdf5_file_are_refused_by_name(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros(2)
        file.create_dataset("names", data=["a", "b"], dtype=h5py.string_dtype())
        file.create_dataset("ragged", (2,), h5py.vlen_dtype(np.uint8))
        file["fixed"] = np.array([b"a", b"b"])
    for key, what in (("names", "Python objects"), ("ragged", "Python objects"), ("fixed", "bytes")):
        assert refusal(path, keys=["data", key]).startswith(
            f"'{key}' in {path} holds {what} (|{'S1' if key == 'fixed' else 'O'}), which cannot be packed; "
            if key == "fixed"
            else f"'{key}' in {path} holds {what} (object), which cannot be packed; expected numbers. Leave it out by "
        )
    assert list(open_source(path, keys=["data"]).fields) == ["data"]


def test_a_type_that_numpy_does_not_know_is_refused_by_name(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        time_type = h5py.h5t.TypeID.copy(h5py.h5t.UNIX_D32LE)
        h5py.h5d.create(file.id, b"when", time_type, h5py.h5s.create_simple((3,)))
    assert refusal(tmp_path / "x.h5").startswith(
        f"'when' in {tmp_path / 'x.h5'} is of a type that NumPy does not know ("
    )


def test_what_is_no_hdf5_file_is_refused(tmp_path):
    (tmp_path / "x.h5").write_bytes(b"not hdf5" * 100)
    assert refusal(tmp_path / "x.h5").startswith(f"{tmp_path / 'x.h5'} is not an HDF5 file: 800 bytes, ")


def test_a_damaged_chunk_stops_reading(tmp_path):
    path = tmp_path / "x.h5"
    write_h5(path, chunks=(5, 3, 6, 6), compression="gzip")
    with h5py.File(path) as file:
        place = file["images"].id.get_chunk_info(3).byte_offset
    with path.open("r+b") as raw:
        raw.seek(place)
        raw.write(b"\xff" * 40)
    source = open_source(path)
    with pytest.raises(PackError, match=f"^{path} cannot be read: "):
        read(source)


def test_a_virtual_dataset_whose_file_is_gone_is_refused(tmp_path):
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["x"] = pixels(4, 3)
    layout = h5py.VirtualLayout((4, 3), "u1")
    layout[:] = h5py.VirtualSource("part.h5", "x", (4, 3))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    source = open_source(tmp_path / "all.h5")
    np.testing.assert_array_equal(read(source).values["x"], pixels(4, 3))
    os.utime(tmp_path / "part.h5", (1, 1))
    assert open_source(tmp_path / "all.h5").identity != source.identity
    (tmp_path / "part.h5").unlink()
    assert refusal(tmp_path / "all.h5") == (
        f"{tmp_path / 'all.h5'}: the virtual dataset '/x' takes samples from the file 'part.h5', which is not there; "
        "HDF5 would return fill values in its place. Put it back, or build the virtual dataset again."
    )
