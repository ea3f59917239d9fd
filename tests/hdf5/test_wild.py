"""Files as the field's producers write them: what is fed is what h5py reads, or the refusal says why and what to do.

`wild_files` writes them. A file that another library's own tests brought is in `test_corpus`.
"""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lightning_gpufeed import H5DataModule, H5ImageDataModule, H5Loader
from lightning_gpufeed.cli import main
from lightning_gpufeed.errors import GpuFeedError
from lightning_gpufeed.hdf5.access import list_datasets
from lightning_gpufeed.hdf5.inspection import inspect_file
from lightning_gpufeed.hdf5.layout import read_layout
from lightning_gpufeed.hdf5.source import H5Source
from lightning_gpufeed.hdf5.writer import pack
from tests.hdf5 import wild_files as wild
from tests.hdf5.wild_files import IMAGE, NUM, noise

# That a full shuffle of a packed file is slow is no news here; one test of its own looks at the text.
pytestmark = pytest.mark.filterwarnings("ignore:a full shuffle decodes:UserWarning")

Write = Callable[[Path], Any]
Sample = tuple[Any, ...]


# What is read ------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A sample of h5py or of a batch in one form: type, shape and bytes of numbers, text as `str`, tuples of these."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.decode("latin-1")
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype.kind in "OS"):
        return tuple(plain(part) for part in value)
    if isinstance(value, np.ndarray | np.generic):
        values = np.asarray(value, value.dtype.newbyteorder("="))
        return values.dtype.name, values.shape, values.tobytes()
    return value


def stored_samples(paths: Sequence[Path], keys: Sequence[str]) -> list[Sample]:
    """What h5py reads, sample by sample."""
    samples: list[Sample] = []
    for path in paths:
        with h5py.File(path, "r") as h5_file:
            datasets = [h5_file[key] for key in keys]
            samples += [tuple(plain(one[row]) for one in datasets) for row in range(len(datasets[0]))]
    return samples


def samples_of(batches: Iterator[dict[str, Any]]) -> list[Sample]:
    """The samples of batches, in their order."""
    return [
        tuple(plain(value) for value in sample) for batch in batches for sample in zip(*batch.values(), strict=True)
    ]


def as_list(paths: Any) -> list[Path]:
    return list(paths) if isinstance(paths, list) else [paths]


FED: dict[str, tuple[Write, list[str]]] = {
    "netCDF-4": (wild.netcdf4, ["t2m", "u10", "time", "time_bnds", "site"]),
    "MATLAB v7.3": (wild.matlab, ["X", "stack", "y", "is_good"]),
    "MATLAB v7.3, text": (wild.matlab, ["note"]),
    "PyTables": (wild.pytables, ["images", "rows", "flags", "bits", "names", "ragged"]),
    "Keras": (wild.keras, ["x_train", "y_train"]),
    "course": (wild.course, ["train_set_x", "train_set_y"]),
    "PatchCamelyon": (wild.one_file_per_array, ["x"]),
    "PatchCamelyon, joined by links": (wild.joined_by_links, ["x", "y"]),
    "one group per sample, by its name": (wild.group_per_sample, ["sample_00003/image"]),
    "masks": (wild.masks, ["images", "masks"]),
    "fastMRI": (wild.fast_mri, ["kspace", "reconstruction_rss", "reconstruction_esc"]),
    "JPEG of variable length": (wild.variable_length_jpeg, ["images", "labels"]),
    "JPEG in padded rows": (wild.padded_jpeg, ["images", "length"]),
    "JPEG as text": (wild.bytes_jpeg, ["images", "labels"]),
    "virtual, over shards": (wild.shards, ["images", "labels"]),
    "chunk 217 for height 218": (wild.off_by_one_chunk, ["images", "labels"]),
    "written by SWMR": (wild.written_while_read, ["images"]),
    "unwritten chunks": (wild.unwritten_chunks, ["raw", "packed", "never"]),
    "some filters skipped": (wild.some_filters_skipped, ["images"]),
    "edge chunks not filtered": (wild.plain_edge_chunks, ["gzip", "shuffle"]),
    "every chunk index": (wild.every_chunk_index, []),
    "user block": (lambda folder: wild.user_block(folder, {}), ["images", "labels"]),
    "user block, chunks, newest format": (lambda folder: wild.user_block(folder, {"libver": "latest"}), ["images"]),
    "chunks guessed by h5py": (wild.guessed_chunks, ["images", "packed"]),
    "types of numbers": (wild.number_types, []),
    "filters": (wild.filters, []),
    "text": (wild.text, []),
    "external raw file": (wild.external_raw, ["images"]),
    "compact": (wild.compact, ["images"]),
    "links": (wild.links, ["deep/images", "second", "soft", "elsewhere"]),
    "samples without values": (wild.no_values, ["images", "labels"]),
    "grows along another axis": (wild.grows_sideways, []),
    "longer chunks than data": (wild.chunk_longer_than_data, ["images", "packed"]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder for each kind of file, written when it is first asked for."""
    written: dict[str, list[Path]] = {}

    def folder(name: str) -> list[Path]:
        if name not in written:
            paths = FED[name][0](tmp_path_factory.mktemp("wild"))
            if paths is None:
                pytest.skip("this HDF5 cannot write it")
            written[name] = as_list(paths)
        return written[name]

    return folder


def keys_of(name: str, path: Path) -> list[str]:
    """The keys to feed; all that have samples where none are named."""
    if FED[name][1]:
        return FED[name][1]
    with h5py.File(path, "r") as h5_file:
        return [key for key in h5_file if isinstance(h5_file[key], h5py.Dataset)]


KINDS = list(FED)


@pytest.mark.parametrize("name", KINDS)
def test_every_sample_of_an_epoch_is_what_h5py_reads(folders, name):
    paths = folders(name)
    keys = keys_of(name, paths[0])
    expected = stored_samples(paths, keys)
    for shuffle in (None, "full", "window:8"):
        with H5Loader(paths, 4, keys=keys, shuffle=shuffle) as loader:
            fed = samples_of(iter(loader))
        assert (fed == expected) if shuffle is None else (Counter(fed) == Counter(expected)), shuffle


@pytest.mark.parametrize("name", KINDS)
def test_samples_asked_for_in_any_order_are_what_h5py_reads(folders, name):
    paths = folders(name)
    keys = keys_of(name, paths[0])
    expected = stored_samples(paths, keys)
    order = np.random.default_rng(3).permutation(np.repeat(np.arange(len(expected)), 2))
    for limits in ({}, {"resident_bytes": 0, "cache_bytes": 0}):
        with closing(H5Source(paths, keys, **limits)) as source:
            assert samples_of(iter([source.read_new(order)])) == [expected[row] for row in order], limits


@pytest.mark.parametrize("name", FED)
def test_every_file_is_inspected_without_a_crash(folders, name):
    for path in folders(name):
        report = inspect_file(path, probe_seconds=0)
        assert report.datasets
        assert str(report.advice.reason)


# As images ---------------------------------------------------------------------------------------------------


def fed_images(paths: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All images and labels of the training split, as a step gets them."""
    datamodule = H5ImageDataModule(paths, batch_size=4, shuffle=None, **options)
    datamodule.setup("fit")
    try:
        batches = [datamodule.on_after_batch_transfer(batch, 0) for batch in datamodule.train_dataloader()]
    finally:
        datamodule.teardown("fit")
    if isinstance(batches[0], torch.Tensor):
        return torch.cat(batches), None
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def nchw(values: np.ndarray) -> torch.Tensor:
    """Stored images as floats, channels first, bytes divided by 255."""
    images = torch.from_numpy(np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="))))
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] == 3:
        images = images.permute(0, 3, 1, 2)
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


@pytest.mark.parametrize(
    ("name", "images", "labels", "options"),
    [
        ("netCDF-4", "u10", None, {"image_key": "u10"}),
        ("netCDF-4", "t2m", None, {"image_key": "t2m"}),
        ("MATLAB v7.3", "X", "y", {}),
        ("PyTables", "images", "flags", {"label_key": "flags"}),
        ("Keras", "x_train", "y_train", {}),
        ("course", "train_set_x", "train_set_y", {}),
        ("PatchCamelyon", "x", None, {}),
        ("PatchCamelyon, joined by links", "x", "y", {}),
        ("masks", "images", "masks", {}),
        ("fastMRI", "reconstruction_rss", None, {"image_key": "reconstruction_rss"}),
        ("virtual, over shards", "images", "labels", {}),
        ("chunk 217 for height 218", "images", "labels", {}),
        ("written by SWMR", "images", None, {}),
    ],
)
def test_images_and_labels_are_found_and_arrive_exactly(folders, name, images, labels, options):
    paths = folders(name)
    stored: dict[str, np.ndarray] = {}
    for key in filter(None, (images, labels)):
        parts = []
        for path in paths:
            with h5py.File(path, "r") as h5_file:
                parts.append(h5_file[key][...])
        stored[key] = np.concatenate(parts)
    found, classes = fed_images(paths, **options)
    assert torch.equal(found, nchw(stored[images]))
    if labels is None:
        assert classes is None
    else:
        assert torch.equal(classes.flatten().double(), torch.from_numpy(stored[labels]).flatten().double())


def test_the_splits_of_a_keras_file_are_found(folders):
    [path] = folders("Keras")
    datamodule = H5ImageDataModule(path, batch_size=4)
    datamodule.setup("test")
    [batch] = [samples for samples in datamodule.test_dataloader() if len(samples[0]) == 4]
    with h5py.File(path) as h5_file:
        assert torch.equal(batch[0], torch.from_numpy(h5_file["x_test"][:4]))
    datamodule.teardown("test")


# Refusals ----------------------------------------------------------------------------------------------------

PACK = re.compile(r"gpufeed (?:re)?pack ")

FEEDERS: dict[str, Callable[..., None]] = {
    "H5Source": lambda paths, **_: H5Source(paths).close(),
    "H5Loader": lambda paths, **_: H5Loader(paths, 4).close(),
    "H5DataModule": lambda paths, **_: H5DataModule(paths).setup("fit"),
    "H5ImageDataModule": lambda paths, **options: H5ImageDataModule(paths, **options).setup("fit"),
}


def refusal(action: Callable[[], Any], *names: object) -> str:
    """What the package says when it refuses; the file is always named."""
    with pytest.raises(GpuFeedError) as error:
        action()
    text = str(error.value)
    assert all(str(name) in text for name in names), text
    return text


TOO_MANY = 40


@pytest.mark.parametrize("feeder", FEEDERS)
@pytest.mark.parametrize("write", [wild.group_per_sample, wild.dataset_per_sample], ids=lambda one: one.__name__)
def test_samples_that_are_groups_or_datasets_are_counted_and_told_to_be_packed(tmp_path, feeder, write):
    path = write(tmp_path, TOO_MANY)
    text = refusal(lambda: FEEDERS[feeder](path), path, TOO_MANY)
    assert PACK.search(text), text
    assert len(text) - text.count(str(path)) * len(str(path)) < 1000  # not forty names, and not forty thousand


def test_complex_numbers_are_no_images(folders):
    paths = folders("fastMRI")
    assert "complex" in refusal(lambda: FEEDERS["H5ImageDataModule"](paths, image_key="kspace"), paths[0], "kspace")


@pytest.mark.parametrize("name", ["JPEG of variable length", "JPEG as text"])
def test_encoded_images_have_to_be_decoded_first(folders, name):
    [path] = folders(name)
    text = refusal(lambda: FEEDERS["H5ImageDataModule"](path, image_key="images"), path, "'images'")
    assert PACK.search(text), text
    assert "image_layout" not in text


@pytest.mark.parametrize("feeder", FEEDERS)
def test_opaque_values_are_refused_by_their_type(tmp_path, feeder):
    path = wild.opaque_jpeg(tmp_path)
    refusal(lambda: FEEDERS[feeder](path, image_key="images"), path, "'images'", "|V137", "Copy what you need")


@pytest.mark.parametrize(("name", "key", "kind"), [
    ("MATLAB v7.3", "names", "HDF5 reference"),
    ("MATLAB v7.3", "wave", "[('real', '<f8'), ('imag', '<f8')]"),
    ("PyTables", "table", "[('label', '<i4'), ('name', 'S8'), ('vec', '<f4', (3,))]"),
])  # fmt: skip
def test_what_no_tensor_holds_is_refused_by_its_type(folders, name, key, kind):
    [path] = folders(name)
    refusal(lambda: read_layout(path, key), path, repr(key), kind, "Copy what you need of it")


@pytest.mark.parametrize("name", ["MATLAB v7.3", "PyTables"])
def test_what_was_not_asked_for_can_be_left_out_by_naming_the_others(folders, name):
    [path] = folders(name)
    assert "keys=" in refusal(lambda: H5Source(path), path)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("netCDF-4", None),
        ("Keras", None),
        ("course", None),
        ("MATLAB v7.3", ["X", "column"]),  # of one row, as every column vector of MATLAB is
    ],
)
def test_arrays_that_do_not_belong_together_are_listed_with_their_lengths(folders, name, keys):
    [path] = folders(name)
    refusal(lambda: H5Source(path, keys), path, "different numbers of samples", "Name those that belong together")


def test_files_that_lie_side_by_side_are_told_to_be_joined(folders):
    [path] = folders("PatchCamelyon")
    text = refusal(lambda: H5Loader([path, path.with_name("train_y.h5")], 4), "train_y.h5", "'x'")
    assert "ExternalLink" in text


def test_volumes_of_other_shapes_are_refused_with_both(tmp_path):
    paths = wild.fast_mri(tmp_path)
    other = wild.write(tmp_path, "other.h5", kspace=noise((3, 2, 12, 6), "c8"))
    refusal(lambda: H5Loader([*paths, other], 4, keys=["kspace"]), other, paths[0], "(2, 12, 6)", "(2, 10, 6)")


def test_a_virtual_dataset_lacking_a_shard_is_refused_when_it_is_opened_and_when_it_is_read(tmp_path):
    path = wild.shards(tmp_path)
    with H5Loader(path, 4, shuffle=None) as loader:
        (tmp_path / "shard1.h5").rename(tmp_path / "moved.h5")
        refusal(lambda: next(iter(loader)), "shard1.h5", "is gone")
    refusal(lambda: H5Loader(path, 4), path, "shard1.h5", "HDF5 would return fill values")


def test_what_holds_no_samples_is_refused(tmp_path):
    path = wild.write(
        tmp_path, none={"shape": (0, *IMAGE), "dtype": "u1", "maxshape": (None, *IMAGE)}, empty=h5py.Empty("f4")
    )
    refusal(lambda: H5Loader(path, 4, keys=["none"]), path, "holds no samples")
    refusal(lambda: H5Loader(path, 4, keys=["empty"]), path, "is empty")


# Cures -------------------------------------------------------------------------------------------------------


def epoch_of(path: Path) -> list[Sample]:
    with H5Loader(path, 4, shuffle=None) as loader:
        return samples_of(iter(loader))


@pytest.mark.parametrize(
    "name",
    ["chunk 217 for height 218", "PatchCamelyon, joined by links", "chunks guessed by h5py"],
)
def test_a_slow_layout_is_fed_with_the_line_that_cures_it_and_the_line_does(folders, tmp_path, monkeypatch, name):
    [path] = folders(name)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(inspect_file(path, probe_seconds=0).advice.command or "")
    assert words[:2] in (["gpufeed", "pack"], ["gpufeed", "repack"])
    assert main(words[1:]) == 0
    with h5py.File("OUT.h5") as h5_file:
        keys = list(list_datasets(h5_file))
    assert len(keys) == 2
    assert epoch_of(tmp_path / "OUT.h5") == stored_samples([path], keys)
    assert inspect_file("OUT.h5", probe_seconds=0).advice.command is None


@pytest.mark.parametrize("name", ["chunk 217 for height 218", "virtual, over shards", "chunks guessed by h5py"])
def test_the_line_is_there_where_the_layout_costs_most(folders, name):
    # A full shuffle, announced where the loader is made; decoded once a window, there is nothing to say.
    [path] = folders(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        H5Loader(path, 4, keys=FED[name][1]).close()
    assert all(PACK.search(str(one.message)) for one in caught if "a full shuffle decodes" in str(one.message))


@pytest.mark.parametrize(
    "name",
    [
        "netCDF-4",
        "Keras",
        "virtual, over shards",
        "unwritten chunks",
        "some filters skipped",
        "edge chunks not filtered",
        "grows along another axis",
        "types of numbers",
        "links",
    ],
)
def test_repacked_every_array_is_the_same(folders, tmp_path, name):
    [path] = folders(name)
    assert main(["repack", str(path), str(tmp_path / "OUT.h5")]) == 0
    with h5py.File(path) as before, h5py.File(tmp_path / "OUT.h5") as after:
        for key in (keys := list(list_datasets(before))):
            assert stored_samples([path], [key]) == stored_samples([tmp_path / "OUT.h5"], [key]), key
        assert keys == list(list_datasets(after))


GROUPS = """
import h5py

class Samples:
    def __init__(self): self.file = h5py.File("groups.h5"); self.names = sorted(self.file)
    def __len__(self): return len(self.names)
    def __getitem__(self, n): return self.file[self.names[n]]["image"][...], self.file[self.names[n]]["label"][()]
"""

DATASETS = """
import h5py

class Samples:
    def __init__(self): self.images = h5py.File("datasets.h5")["images"]; self.names = sorted(self.images)
    def __len__(self): return len(self.names)
    def __getitem__(self, n): return self.images[self.names[n]][...], int(self.images[self.names[n]].attrs["label"])
"""


@pytest.mark.parametrize(("write", "code"), [(wild.group_per_sample, GROUPS), (wild.dataset_per_sample, DATASETS)],
                         ids=["groups", "datasets"])  # fmt: skip
def test_five_lines_pack_what_has_a_group_or_dataset_for_each_sample(tmp_path, monkeypatch, write, code):
    write(tmp_path)
    module = f"samples_{write.__name__}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.chdir(tmp_path)
    pack(f"{module}:Samples", tmp_path / "packed.h5")
    sys.modules.pop(module)
    packed = [(image[2], label[2]) for image, label in epoch_of(tmp_path / "packed.h5")]
    assert packed == [(image.tobytes(), np.int64(n % 10).tobytes()) for n, image in enumerate(noise((NUM, 9, 8, 3)))]
