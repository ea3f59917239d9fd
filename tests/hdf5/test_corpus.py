"""Files that other programs wrote: read exactly, or refused with a sentence that names file and key.

The files come from the test suites of other HDF5 libraries and are not part of this repository. They are looked for
in the folder that the environment variable GPUFEED_HDF5_CORPUS names, else beside the repository.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lightning_gpufeed.errors import GpuFeedError
from lightning_gpufeed.hdf5.keys import ArrayInfo, list_arrays
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, read_layout
from lightning_gpufeed.hdf5.readers.reader import (
    BlockReader,
    GatherReader,
    ResidentReader,
    open_reader,
    read_objects,
    spec_of,
)
from lightning_gpufeed.hdf5.source import H5Source
from tests.contracts import as_bytes

ROOT = Path(__file__).parents[2]
CORPUS = Path(os.environ.get("GPUFEED_HDF5_CORPUS", ROOT.parent / "shared" / "data" / "hdf5_corpus"))
FILES = sorted(path for path in CORPUS.glob("*") if path.suffix in (".h5", ".hdf5", ".mat", ".nc"))

LARGE_BYTES = 64 << 20
"""Some files announce more samples than any memory holds; only their layout is read."""

if not FILES:
    pytest.skip(f"no HDF5 files of other programs in {CORPUS}", allow_module_level=True)

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def _in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """External raw files are named relative to the current directory."""
    monkeypatch.chdir(CORPUS)


def keys_of(path: Path) -> list[str]:
    """Every name below the root that may be a dataset, reached by the slow and obvious way; links too."""
    found: list[str] = []

    def walk(group: Any, prefix: str) -> None:
        for name in group:
            key = f"{prefix}{name}"
            try:
                item = group[name]
            except (KeyError, OSError):  # a link to nowhere
                found.append(key)
                continue
            if not isinstance(item, h5py.Group):
                found.append(key)
            elif isinstance(group.get(name, getlink=True), h5py.HardLink) and len(prefix) < 200:
                walk(item, f"{key}/")

    try:
        with h5py.File(path, "r") as h5_file:
            walk(h5_file, "")
    except OSError:
        return ["x"]
    return found


def truth(path: Path, key: str) -> Any:
    """What h5py returns, sample by sample."""
    with h5py.File(path, "r") as h5_file:
        dataset = h5_file[key]
        return [dataset[index] for index in range(len(dataset))]


def plain(value: Any) -> Any:
    """A value of h5py as `read_objects` gives it: `str`, or lists and tensors of what h5py has as arrays."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.decode("latin-1")
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OS":
            return [plain(part) for part in value]
        return as_bytes(value)
    return value


def plain_tensors(value: Any) -> Any:
    if isinstance(value, list):
        return [plain_tensors(part) for part in value]
    return as_bytes(value) if isinstance(value, torch.Tensor) else value


def readers_of(layout: H5DatasetLayout) -> Iterator[Any]:
    yield BlockReader([layout], cache_bytes=0)
    yield ResidentReader([layout])
    yield open_reader([layout], resident_bytes=0, cache_bytes=1 << 20)
    if layout.engine is Engine.RAW:
        yield GatherReader([layout])


def check_samples(path: Path, key: str, layout: H5DatasetLayout) -> None:
    """Compare all samples, by every reader there is, with h5py's own."""
    try:
        expected = truth(path, key)
    except OSError:  # damaged, and HDF5 says so: then the package has to say so too
        with pytest.raises(GpuFeedError) as error:
            read_objects([layout]) if not layout.is_tensor else ResidentReader([layout])
        raise error.value from None
    if not layout.is_tensor:
        assert plain_tensors(read_objects([layout])) == [plain(value) for value in expected]
        return
    values = np.empty(layout.shape, layout.dtype)
    for index, value in enumerate(expected):
        values[index] = value
    spec = spec_of(layout)
    order = np.arange(layout.num_samples)[::-1].copy()
    for reader in readers_of(layout):
        out = torch.empty((len(order), *spec.row_shape), dtype=spec.dtype)
        reader.read_into(order, out)
        reader.close()
        assert as_bytes(out) == as_bytes(values[order]), type(reader).__name__


def check_dataset(path: Path, key: str) -> None:
    layout = read_layout(path, key)
    if layout.total_bytes <= LARGE_BYTES:
        check_samples(path, key, layout)


def read_all(path: Path) -> None:
    with closing(H5Source(path)) as source:
        if sum(layouts[0].total_bytes for layouts in source.fields.values()) <= LARGE_BYTES:
            source.read_new(np.arange(source.num_samples))
            source.digest()


def refusal(action: Callable[[], None]) -> str | None:
    """What the package says when it refuses an action; any other exception passes."""
    try:
        action()
    except (GpuFeedError, FileNotFoundError) as error:
        return str(error)
    return None


@each_file
def test_every_dataset_is_read_exactly_or_refused_with_file_and_key(path):
    for key in keys_of(path):
        message = refusal(lambda: check_dataset(path, key))  # noqa: B023
        if message is not None:
            assert str(path) in message, key
            assert repr(key) in message or not h5py.is_hdf5(path), (key, message)


@each_file
def test_the_arrays_of_every_file_are_listed(path):
    arrays: list[ArrayInfo] = []
    message = refusal(lambda: arrays.extend(list_arrays(path)))
    assert message is None or str(path) in message
    for array in arrays:
        assert len(array.shape) >= 1
        assert array.key in keys_of(path)


@each_file
def test_every_file_is_one_source_or_refused_with_a_sentence(path):
    message = refusal(lambda: read_all(path))
    assert message is None or str(path) in message


def test_the_files_hold_something_for_every_reader():
    engines = set()
    num_refused = 0
    for path in FILES:
        for key in keys_of(path):
            try:
                layout = read_layout(path, key)
            except GpuFeedError:
                num_refused += 1
            else:
                engines.add((layout.engine, layout.is_tensor))
    assert engines == {(Engine.RAW, True), (Engine.CHUNKS, True), (Engine.H5PY, True), (Engine.H5PY, False)}
    assert num_refused > 0
