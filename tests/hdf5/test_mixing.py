"""What is said of a window shuffle over data that is sorted by class."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from lightning_gpufeed import H5Loader
from lightning_gpufeed.hdf5.labels import order_variety
from lightning_gpufeed.hdf5.mixing import describe_mixing
from lightning_gpufeed.hdf5.source import H5Source

NUM_SAMPLES = 2000


def write(path: Path, **arrays: np.ndarray) -> Path:
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("x", data=np.zeros((NUM_SAMPLES, 100), np.uint8), chunks=(20, 100))
        for name, values in arrays.items():
            h5_file[name] = values
    return path


@pytest.mark.parametrize(
    ("shuffle", "low", "high"), [("window:100", 20, 60), ("window:1000", 80, 99), ("window:2000", 97, 100)]
)
def test_the_share_of_classes_follows_the_window(tmp_path, shuffle, low, high):
    path = write(tmp_path / "a.h5", labels=np.arange(NUM_SAMPLES) // 20)
    with H5Loader(path, 64, shuffle=shuffle) as loader:
        text = describe_mixing(loader)
        assert text is not None
        before, after = text.split(": a batch holds ")
        share, rest = after.split(" % ")
        assert (before, rest) == (shuffle, "of the classes of a full shuffle's (labels)")
        assert low <= int(share) <= high


@pytest.mark.parametrize(
    ("shuffle", "labels"),
    [
        ("full", np.arange(NUM_SAMPLES) // 20),
        ("none", np.arange(NUM_SAMPLES) // 20),
        ("window:100", np.arange(NUM_SAMPLES)),  # numbers of samples, not classes
        ("window:100", np.linspace(0, 1, NUM_SAMPLES)),
        ("window:100", np.zeros((NUM_SAMPLES, 2), np.int64)),
        ("window:100", np.zeros(NUM_SAMPLES, np.int64)),
    ],
    ids=["full", "none", "numbered", "floats", "pairs", "one class"],
)
def test_where_there_is_nothing_to_tell_nothing_is_said(tmp_path, shuffle, labels):
    with H5Loader(write(tmp_path / "a.h5", labels=labels), 64, shuffle=shuffle) as loader:
        assert describe_mixing(loader) is None


def test_the_samples_of_all_ranks_in_a_step_count(tmp_path):
    path = write(tmp_path / "a.h5", labels=np.arange(NUM_SAMPLES) // 20)
    with H5Loader(path, 32, shuffle="window:100", world_size=2) as loader:
        labels = np.arange(NUM_SAMPLES) // 20
        share = order_variety(labels[loader.order(0)], 64)
        assert share != order_variety(labels[loader.order(0)], 32)
        text = describe_mixing(loader)
        assert text is not None
        assert f"holds {100 * share:.0f} %" in text


def test_fields_that_are_no_classes_are_passed_over(tmp_path):
    path = write(
        tmp_path / "a.h5",
        a=np.linspace(0, 1, NUM_SAMPLES),
        b=np.full(NUM_SAMPLES, 1j, np.complex64),
        c=np.zeros((NUM_SAMPLES, 2), np.int64),
        d=np.zeros(NUM_SAMPLES, np.int64),
        e=(np.arange(NUM_SAMPLES) // 20)[:, None],
    )
    with H5Loader(path, 64, shuffle="window:100") as loader:
        text = describe_mixing(loader)
        assert text is not None
        assert text.endswith(" (e)")


def test_labels_that_are_not_kept_in_memory_are_not_read_for_it(tmp_path):
    path = write(tmp_path / "a.h5", labels=np.arange(NUM_SAMPLES) // 20)
    source = H5Source(path, resident_bytes=0)
    with H5Loader(source, 64, shuffle="window:100") as loader:
        assert describe_mixing(loader) is None
    source.close()
