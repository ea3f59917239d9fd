"""What datasets must agree in, whichever file of several it is that does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.agreement import (
    read_layouts,
    refuse_different_shapes,
    refuse_slow_addresses,
    refuse_unequal_lengths,
)
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, read_layout
from lightning_gpufeed.hdf5.remote.remote_file import RemoteFile
from tests.contracts import exactly
from tests.hdf5.remote_stores import WebStore, serve


def write(path: Path, **arrays: Any) -> str:
    with h5py.File(path, "w") as h5_file:
        for key, values in arrays.items():
            h5_file.create_dataset(key, **(values if isinstance(values, dict) else {"data": values}))
    return str(path)


def layout_of(path: Path, values: Any) -> H5DatasetLayout:
    return read_layout(write(path, x=values), "x")


def test_layouts_come_by_field_then_by_file(tmp_path):
    paths = [write(tmp_path / f"{n}.h5", a=np.zeros(n + 1), b=np.zeros((n + 1, 2))) for n in range(3)]
    layouts = read_layouts(paths, {"second": "b", "first": "a"})
    assert list(layouts) == ["second", "first"]
    assert [(one.path, one.key) for one in layouts["second"]] == [(path, "b") for path in paths]
    assert [one.shape for one in layouts["first"]] == [(1,), (2,), (3,)]


def test_a_key_that_a_later_file_alone_lacks_brings_the_advice(tmp_path):
    paths = [write(tmp_path / "0.h5", x=np.zeros(3)), write(tmp_path / "1.h5", y=np.zeros(3))]
    with pytest.raises(LayoutError) as error:
        read_layouts(paths, {"x": "x"})
    assert str(error.value).startswith(f"{paths[1]}: no dataset 'x'. It has: 'y' (3,) float64. Files given together ")
    assert str(error.value).endswith("f['x'] = h5py.ExternalLink('part.h5', 'x'), and so on.")
    with pytest.raises(LayoutError, match=exactly(f"{paths[0]}: no dataset 'y'. It has: 'x' (3,) float64.")):
        read_layouts(paths, {"y": "y"})


def test_a_key_that_a_later_file_has_in_another_form_brings_none(tmp_path):
    paths = [write(tmp_path / "0.h5", x=np.zeros(3)), str(tmp_path / "1.h5")]
    with h5py.File(paths[1], "w") as h5_file:
        h5_file.create_group("x")
    with pytest.raises(LayoutError, match="'x' is a group, not a dataset") as error:
        read_layouts(paths, {"x": "x"})
    assert "Files given together" not in str(error.value)


def test_two_datasets_of_other_lengths_are_refused(tmp_path):
    path = write(tmp_path / "a.h5", a=np.zeros(3), b=np.zeros((4, 2)), c=np.zeros(3))
    layouts = [read_layout(path, key) for key in "abc"]
    refuse_unequal_lengths(path, [layouts[0], layouts[2]])
    message = (
        f"{path}: the datasets have different numbers of samples: 'a' 3, 'b' 4, 'c' 3. Name those that belong together."
    )
    with pytest.raises(LayoutError, match=exactly(message)):
        refuse_unequal_lengths(path, layouts)


TEXT = ["a", "b"]
VARYING = {"shape": (2,), "dtype": h5py.vlen_dtype("i4")}


@pytest.mark.parametrize(
    ("first", "other", "there", "here"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), "(3,) and float64", "(4,) and type float64"),
        (np.zeros(2, "u1"), np.zeros(2, "i1"), "() and uint8", "() and type int8"),
        (TEXT, np.zeros(2), "() and text", "() and type float64"),
        (TEXT, VARYING, "() and text", "() and type numbers of variable length"),
    ],
    ids=["shape", "type", "text", "text and varying"],
)
@pytest.mark.parametrize("place", [1, 2])
def test_samples_of_any_later_file_must_be_those_of_the_first(tmp_path, first, other, there, here, place):
    layouts = [layout_of(tmp_path / f"{n}.h5", other if n == place else first) for n in range(3)]
    message = (
        f"{layouts[place].path}: dataset 'x' has samples of shape {here}, but {layouts[0].path} has {there}. "
        f"Files used as one dataset must agree."
    )
    with pytest.raises(LayoutError, match=exactly(message)):
        refuse_different_shapes(layouts)
    refuse_different_shapes(layouts[:place])


def test_what_hdf5_alone_can_read_is_refused_in_a_store_and_not_on_a_disk(tmp_path):
    fast = layout_of(tmp_path / "a.h5", np.zeros((4, 2)))
    slow = layout_of(tmp_path / "b.h5", {"data": np.zeros((4, 2), "i4"), "chunks": (2, 2), "scaleoffset": 8})
    assert slow.engine is Engine.H5PY
    refuse_slow_addresses([fast, slow])
    far_fast, far_slow = (dataclasses.replace(one, path=f"s3://bucket/{one.key}.h5") for one in (fast, slow))
    refuse_slow_addresses([far_fast, slow])
    with pytest.raises(LayoutError, match=r"^s3://bucket/x\.h5: dataset 'x' can only be read by HDF5 \(.*scaleoffset"):
        refuse_slow_addresses([far_fast, far_slow])


def test_a_file_in_a_store_is_opened_once_for_all_its_fields(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = Path(write(tmp_path / "a.h5", a=np.zeros(3), b=np.zeros(3), c=np.zeros(3))).read_bytes()
    opened: list[str] = []
    open_h5 = RemoteFile.open_h5

    def noted(remote: RemoteFile) -> Any:
        opened.append(remote.url)
        return open_h5(remote)

    monkeypatch.setattr(RemoteFile, "open_h5", noted)
    with serve(WebStore({"/a.h5": content, "/b.h5": content})) as store:
        urls = [f"{store.address}/a.h5", f"{store.address}/b.h5"]
        layouts = read_layouts(urls, {"a": "a", "b": "b", "c": "c"})
    assert opened == urls
    assert [one.path for one in layouts["c"]] == urls
