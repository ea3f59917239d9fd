"""One pass by a table: the bits of the preparation it was made of."""

from __future__ import annotations

import pickle

import pytest
import torch

from lightning_gpufeed.device.byte_lookup import ByteTable
from lightning_gpufeed.device.images import ImagePreparation

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def in_steps(dtype: torch.dtype) -> ImagePreparation:
    return ImagePreparation("NCHW", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), dtype=dtype)


def stored(memory_format: torch.memory_format) -> torch.Tensor:
    images = torch.randint(0, 256, (5, 3, 17, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images.contiguous(memory_format=memory_format)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("wanted", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_is_looked_up_has_the_bits_of_the_steps(dtype, given, wanted):
    prepare = in_steps(dtype)._in_steps
    table = ByteTable(prepare, 3, torch.device("cpu"))
    images = stored(given)
    found = table.look_up(images, wanted)
    assert table.is_usable
    assert found.dtype is dtype
    assert found.is_contiguous(memory_format=wanted)
    assert torch.equal(found, prepare(images))


def test_views_of_any_strides_are_looked_up():
    prepare = in_steps(torch.float32)._in_steps
    images = stored(torch.contiguous_format)
    table = ByteTable(prepare, 3, torch.device("cpu"))
    for view in (images[:, :, ::2, 1:], images.transpose(2, 3), images[::2].flip(3)):
        assert torch.equal(table.look_up(view, torch.contiguous_format), prepare(view))


def test_a_table_is_made_once_and_again_for_other_statistics():
    prepare = in_steps(torch.float32)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    first = prepare(images)
    assert torch.equal(prepare(images), first)
    assert len(prepare._tables) == 1
    prepare.mean = (0.0, 0.0, 0.0)
    assert torch.equal(prepare(images), prepare._in_steps(images))
    assert len(prepare._tables) == 2
    assert pickle.loads(pickle.dumps(prepare))._tables == {}


def test_a_preparation_that_quantised_values_go_through_is_looked_up_too():
    prepare = ImagePreparation("NHW", scale=0.037, offset=-3.5)
    images = torch.randint(0, 256, (4, 40, 40), dtype=torch.uint8)
    assert torch.equal(prepare(images), prepare._in_steps(images.unsqueeze(1)))
    assert len(prepare._tables) == 1
