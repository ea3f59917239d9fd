"""Rows put to their places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.readers.rows import put_rows


@given(seed=st.integers(0, 2**32 - 1), num_places=st.integers(1, 600), row_bytes=st.integers(1, 9))
def test_every_row_lies_at_its_place_and_the_others_are_left_alone(seed: int, num_places: int, row_bytes: int) -> None:
    random = np.random.default_rng(seed)
    places = random.permutation(num_places)[: random.integers(0, num_places + 1)]
    rows = random.integers(0, 256, (len(places), row_bytes), dtype=np.uint8)
    target = torch.full((num_places, row_bytes), 7, dtype=torch.uint8)
    put_rows(target, places, rows)
    of_place = dict(zip(places.tolist(), rows.tolist(), strict=True))
    assert target.tolist() == [of_place.get(place, [7] * row_bytes) for place in range(num_places)]


@pytest.mark.parametrize("as_given", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_rows_of_torch_and_of_numpy_are_put_to_a_part_of_other_memory(as_given) -> None:
    memory = torch.zeros(40, dtype=torch.uint8)
    put_rows(memory[8:32].view(6, 4), np.array([5, 0]), as_given(np.arange(1, 9, dtype=np.uint8).reshape(2, 4)))
    assert memory.tolist() == [0] * 8 + [5, 6, 7, 8] + [0] * 16 + [1, 2, 3, 4] + [0] * 8
