"""A source whose strings are questions about the process that reads them, or make the reading go wrong."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.errors import FeedError, LayoutError
from lightning_gpufeed.hdf5.source import Batch, H5Source


class StrangeError(Exception):
    """Cannot be sent to another process."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class OtherNumberError(Exception):
    """Can be sent, but arrives with another text."""

    def __str__(self) -> str:
        return f"in process {os.getpid()}"


def _read_past_the_end() -> None:
    """Die as whoever reads a mapped file that became shorter."""
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * mmap.PAGESIZE)
        mapping = mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE)
        file.truncate(mmap.PAGESIZE)
        mapping[3 * mmap.PAGESIZE]


QUESTIONS = [
    "process",
    "group",
    "modules",
    "threads",
    "expected",
    "main",
    "devices",
    "descriptors",
    "FeedError",
    "LayoutError",
    "FileNotFoundError",
    "KeyError",
    "StrangeError",
    "OtherNumberError",
    "SIGKILL",
    "SIGBUS",
    "wait",
]


def write_questions(path: Path) -> Path:
    """A file with every question, and numbers beside it."""
    with h5py.File(path, "w") as h5_file:
        h5_file["image"] = np.arange(len(QUESTIONS) * 200, dtype=np.int16).reshape(len(QUESTIONS), 200)
        h5_file["question"] = QUESTIONS
    return path


class AskedSource(H5Source):
    """Answers the questions of `write_questions` in place of reading them."""

    def read(self, indices: npt.NDArray[np.int64], out: Mapping[str, torch.Tensor]) -> Batch:
        batch = super().read(indices, out)
        batch["question"] = [self._answer(question) for question in batch["question"]]
        return batch

    def expect(self, indices: npt.NDArray[np.int64], batch_samples: int = 1) -> None:
        if len(indices) == 3:
            raise LayoutError("three are not expected")
        self.expected = [batch_samples, *indices.tolist()]

    def _answer(self, question: str) -> Any:
        match question:
            case "process":
                return os.getpid()
            case "group":
                return os.getpgid(0)
            case "modules":
                return sorted(sys.modules)
            case "threads":
                return torch.get_num_threads()
            case "expected":
                return self.expected
            case "main":
                return sys.modules["__main__"].__dict__.get("__file__")
            case "devices":
                return os.environ.get("CUDA_VISIBLE_DEVICES")
            case "descriptors":
                return len(os.listdir("/proc/self/fd"))
            case "FeedError":
                raise FeedError("a sentence")
            case "LayoutError":
                raise LayoutError("a sentence")
            case "FileNotFoundError":
                return (Path(self.paths[0]).parent / "missing").read_text()
            case "KeyError":
                raise KeyError("missing")
            case "StrangeError":
                raise StrangeError(1, 2)
            case "OtherNumberError":
                raise OtherNumberError
            case "SIGKILL":
                return os.kill(os.getpid(), signal.SIGKILL)
            case "SIGBUS":
                return _read_past_the_end()
            case _:
                Path(self.paths[0] + ".reading").touch()
                return threading.Event().wait()
