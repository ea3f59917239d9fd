from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_gpufeed.sync.ranks import Ranks
from tests.sync.one_rank import one_rank


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank, in this process."""
    with one_rank() as ranks:
        yield ranks
