"""What the tests of strategies share: a training in this process leaves no process group and no variables behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from torch import distributed


@pytest.fixture(scope="module", autouse=True)
def _left_as_found() -> Iterator[None]:
    """Lightning makes this process rank 0 of a group, which whatever is started later would believe too."""
    before = dict(os.environ)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
