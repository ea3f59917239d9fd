"""Mean and standard deviation per channel, against numpy in double precision over everything at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

import lightning_gpufeed.hdf5.statistics as statistics_module
from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.quantize import Affine
from lightning_gpufeed.hdf5.source import H5Source
from lightning_gpufeed.hdf5.statistics import channel_statistics

random = np.random.default_rng(0)


def in_stored_units(source: H5Source, layout: str, indices: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    return channel_statistics(source, "x", layout, indices, Affine(1.0, 0.0))


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., H5Source]:
    """Write arrays to one file each, and open them as one source with the field x."""
    sources = []

    def store(*parts: np.ndarray) -> H5Source:
        paths = [tmp_path / f"part{number}.h5" for number in range(len(parts))]
        for path, part in zip(paths, parts, strict=True):
            with h5py.File(path, "w") as h5_file:
                h5_file["x"] = part
        sources.append(H5Source(paths, "x"))
        return sources[-1]

    yield store
    for source in sources:
        source.close()


AXES = pytest.mark.parametrize(
    ("shape", "layout", "reduced"),
    [((40, 3, 6, 5), "NCHW", (0, 2, 3)), ((40, 6, 5, 3), "NHWC", (0, 1, 2)), ((40, 6, 5), "NHW", (0, 1, 2))],
    ids=["NCHW", "NHWC", "NHW"],
)


@AXES
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32, np.float64, np.float16, bool])
@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 24])
def test_statistics_are_those_of_numpy(monkeypatch, store, shape, layout, reduced, dtype, block_bytes):
    monkeypatch.setattr(statistics_module, "_BLOCK_BYTES", block_bytes)
    images = (random.random(shape) * (2 if dtype is bool else 250)).astype(dtype)
    mean, std = in_stored_units(store(images), layout)
    assert mean.dtype == std.dtype == np.float64
    # Both sum in float64, in another order: a few units in the last place.
    np.testing.assert_allclose(mean, np.atleast_1d(images.mean(axis=reduced, dtype=np.float64)), rtol=1e-12)
    np.testing.assert_allclose(std, np.atleast_1d(images.std(axis=reduced, dtype=np.float64)), rtol=1e-10)


def test_only_the_samples_named_are_used(store):
    images = random.integers(0, 256, (30, 3, 4, 4), dtype=np.uint8)
    chosen = np.array([7, 3, 20])
    mean, std = in_stored_units(store(images), "NCHW", chosen)
    np.testing.assert_allclose(mean, images[chosen].mean(axis=(0, 2, 3)), rtol=1e-14)
    np.testing.assert_allclose(std, images[chosen].std(axis=(0, 2, 3)), rtol=1e-12)


def test_statistics_run_through_all_files(store):
    images = random.integers(0, 256, (30, 3, 4, 4), dtype=np.uint8)
    mean, _ = in_stored_units(store(images[:7], images[7:11], images[11:]), "NCHW")
    np.testing.assert_allclose(mean, images.mean(axis=(0, 2, 3)), rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_statistics_of_integers_do_not_depend_on_the_blocks(monkeypatch, store, dtype):
    source = store(random.integers(0, 128, (50, 3, 4, 4)).astype(dtype))
    results = []
    for block_bytes in (1, 777, 1 << 24):
        monkeypatch.setattr(statistics_module, "_BLOCK_BYTES", block_bytes)
        results.append(np.stack(in_stored_units(source, "NCHW")))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_a_small_deviation_on_a_large_mean_is_not_lost(store):
    images = (random.random((50, 1, 8, 8)) + 1e8).astype(np.float64)
    _, std = in_stored_units(store(images), "NCHW")
    np.testing.assert_allclose(std, images.std(axis=(0, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize("value", [0, 137, 255])
def test_a_channel_that_never_changes_has_no_deviation(store, value):
    mean, std = in_stored_units(store(np.full((20, 2, 4, 4), value, np.uint8)), "NCHW")
    assert (mean.tolist(), std.tolist()) == ([value, value], [0.0, 0.0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_refused_with_its_sample_and_file(monkeypatch, store, tmp_path, value):
    monkeypatch.setattr(statistics_module, "_BLOCK_BYTES", 500)
    first, second = np.zeros((20, 3, 4, 4), np.float32), np.zeros((20, 3, 4, 4), np.float32)
    second[13, 2, 1, 1] = value
    second[15] = value
    with pytest.raises(LayoutError) as error:
        in_stored_units(store(first, second), "NCHW")
    assert str(error.value) == (
        f"statistics of 'x' cannot be computed: sample 13 of {tmp_path / 'part1.h5'} holds a value that is NaN or "
        f"infinite. Give mean= and std=, or clean the data."
    )


def test_a_bad_sample_that_is_not_used_does_no_harm(store):
    images = np.ones((20, 1, 4, 4), np.float32)
    images[5] = np.nan
    mean, _ = in_stored_units(store(images), "NCHW", np.array([1, 2, 3, 19]))
    assert mean.tolist() == [1.0]
