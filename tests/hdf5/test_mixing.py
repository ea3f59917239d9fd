"""What is said of a window shuffle over data that is sorted by class."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from lightning_gpufeed import H5Loader
from lightning_gpufeed.hdf5.mixing import describe_mixing

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
