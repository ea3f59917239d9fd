"""Whether bytes at the places HDF5 tells are what it returns: wrong places and damaged chunks are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.chunk_index import ChunkIndex
from lightning_gpufeed.hdf5.layout import H5DatasetLayout, read_layout
from lightning_gpufeed.hdf5.readers.raw_check import raw_bytes_agree, refuse_truncation
from tests.contracts import exactly

VALUES = np.random.default_rng(0).integers(0, 4, (10, 7, 5), dtype=np.int16)


@pytest.fixture
def layout_of(tmp_path: Path) -> Callable[..., H5DatasetLayout]:
    numbers = iter(range(100))

    def layout_of(fill: Callable[[Any], None] | None = None, **create: Any) -> H5DatasetLayout:
        path = tmp_path / f"{next(numbers)}.h5"
        with h5py.File(path, "w") as h5_file:
            h5_dataset = h5_file.create_dataset("x", **create)
            if fill is not None:
                fill(h5_dataset)
        return read_layout(path, "x")

    return layout_of


def agree(layout: H5DatasetLayout, index: ChunkIndex | None = None) -> bool:
    with h5py.File(layout.path) as h5_file:
        return raw_bytes_agree(h5_file["x"], layout.pipeline, index or layout.index, layout.storage_path)  # type: ignore[arg-type]


CREATE: dict[str, dict[str, Any]] = {
    "no chunks": {},
    "whole samples": {"chunks": (3, 7, 5)},
    "split samples": {"chunks": (3, 4, 2)},
    "gzip": {"chunks": (3, 7, 5), "compression": "gzip", "shuffle": True},
    "gzip, split": {"chunks": (3, 4, 2), "compression": "gzip"},
}
each_form = pytest.mark.parametrize("create", CREATE.values(), ids=CREATE.keys())


@each_form
def test_places_that_lead_to_the_samples_agree(layout_of, create):
    assert agree(layout_of(data=VALUES, **create))


@each_form
@pytest.mark.parametrize("number", [0, -1], ids=["first", "last"])
def test_a_wrong_place_of_the_first_or_the_last_chunk_is_found(layout_of, create, number):
    layout = layout_of(data=VALUES, **create)
    assert layout.index is not None
    offsets = layout.index.offsets.copy()
    offsets[number] += 2
    assert not agree(layout, dataclasses.replace(layout.index, offsets=offsets))


@each_form
def test_a_place_at_the_very_end_of_the_file_is_found(layout_of, create):
    layout = layout_of(data=VALUES, **create)
    assert layout.index is not None
    offsets = np.full_like(layout.index.offsets, Path(layout.path).stat().st_size - 4)
    assert not agree(layout, dataclasses.replace(layout.index, offsets=offsets))


def test_chunks_that_were_never_written_are_not_looked_at(layout_of):
    def fill(h5_dataset: Any) -> None:
        h5_dataset[3:6] = VALUES[3:6]

    create = {"shape": VALUES.shape, "dtype": "i2", "fillvalue": 9}
    layout = layout_of(fill, chunks=(3, 7, 5), **create)
    assert layout.index is not None
    assert agree(layout)
    offsets = layout.index.offsets.copy()
    offsets[1] += 2
    assert not agree(layout, dataclasses.replace(layout.index, offsets=offsets))
    assert agree(layout_of(chunks=(3, 7, 5), **create))
    assert agree(layout_of(**create))


def test_a_dataset_without_values_agrees(layout_of):
    assert agree(layout_of(data=np.zeros((4, 0), np.uint8)))


def test_filters_left_out_for_the_last_chunk_are_left_out_here_too(layout_of):
    def fill(h5_dataset: Any) -> None:
        h5_dataset[:] = VALUES
        h5_dataset.id.write_direct_chunk((9, 0, 0), np.resize(VALUES[9:], (3, 7, 5)).tobytes(), filter_mask=0b11)

    layout = layout_of(fill, shape=VALUES.shape, dtype="i2", chunks=(3, 7, 5), compression="gzip", shuffle=True)
    assert agree(layout)


def test_damage_that_hdf5_finds_too_is_left_to_the_reading(layout_of):
    layout = layout_of(data=VALUES, chunks=(3, 7, 5), compression="gzip", shuffle=True)
    assert layout.index is not None
    with open(layout.path, "r+b") as raw:
        raw.seek(int(layout.index.offsets[0]) + 2)
        raw.write(b"\xff" * 40)
    assert agree(layout)


def test_a_file_may_end_with_its_last_chunk_and_not_before(layout_of):
    layout = layout_of(data=VALUES, chunks=(3, 7, 5))
    assert layout.index is not None
    size = Path(layout.path).stat().st_size
    shift = size - layout.index.end
    ends_there = dataclasses.replace(layout.index, offsets=layout.index.offsets + shift)
    refuse_truncation(layout.path, "x", ends_there, layout.path)
    ends_behind = dataclasses.replace(layout.index, offsets=layout.index.offsets + shift + 1)
    message = (
        f"other.h5: truncated: dataset 'x' needs {size + 1} bytes of {layout.path}, which has {size}. "
        f"Copy or pack the file again."
    )
    with pytest.raises(LayoutError, match=exactly(message)):
        refuse_truncation("other.h5", "x", ends_behind, layout.path)
