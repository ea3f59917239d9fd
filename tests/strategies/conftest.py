"""What the tests of strategies share: a training in this process leaves no process group and no variables behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process_groups import left_as_found


@pytest.fixture(scope="module", autouse=True)
def _left_as_found() -> Iterator[None]:
    with left_as_found():
        yield
