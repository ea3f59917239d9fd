"""A forked process leaves its parent's garbage alone."""

from __future__ import annotations

import gc
import os

import pytest

from lightning_gpufeed.device.forks import leave_garbage_to_parent


class Watched:
    """Part of a cycle; tells of its end by a byte."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.itself = self

    def __del__(self) -> None:
        os.write(self.descriptor, b"x")


def test_what_the_parent_left_is_not_collected_in_the_child():
    leave_garbage_to_parent()
    leave_garbage_to_parent()
    reading, writing = os.pipe()
    gc.disable()
    try:
        Watched(writing)
        process = os.fork()
        if not process:
            gc.collect()
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):  # nothing was written
            os.read(reading, 1)
    finally:
        gc.enable()
        gc.collect()
        os.close(reading)
        os.close(writing)
