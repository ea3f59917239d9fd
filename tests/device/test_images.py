"""Stored images to what a model gets: bit for bit the division, subtraction and division a user would write."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lightning_gpufeed.device.images import ImagePreparation

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
random = np.random.default_rng(0)

SHAPES = {"NCHW": (4, 3, 5, 7), "NHWC": (4, 5, 7, 3), "NHW": (4, 5, 7)}
each_layout = pytest.mark.parametrize("layout", SHAPES)
each_format = pytest.mark.parametrize("channels_last", [False, True])


def stored(layout: str, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random images as a file holds them; every value of a byte occurs."""
    values = random.integers(0, 256, SHAPES[layout])
    if dtype is torch.uint16:
        values = values * 257
    if dtype is torch.bool:
        values = values % 2
    return torch.from_numpy(values.astype(str(dtype).removeprefix("torch.")))


def to_nchw(images: torch.Tensor, layout: str) -> np.ndarray:
    array = images.numpy()
    return array[:, None] if layout == "NHW" else np.moveaxis(array, 3, 1) if layout == "NHWC" else array


def statistics(layout: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return (MEAN[:1], STD[:1]) if layout == "NHW" else (MEAN, STD)


def column(values: tuple[float, ...], dtype: type) -> np.ndarray:
    return np.array(values, dtype).reshape(-1, 1, 1)


def assert_bitwise(result: torch.Tensor, expected: np.ndarray) -> None:
    assert result.shape == expected.shape
    assert result.contiguous().numpy().tobytes() == np.ascontiguousarray(expected).tobytes()


@each_layout
@each_format
@pytest.mark.parametrize(("dtype", "full_scale"), [(torch.uint8, 255), (torch.uint16, 65535), (torch.bool, 1)], ids=str)
def test_unsigned_images_are_divided_by_their_largest_value_then_normalised(layout, channels_last, dtype, full_scale):
    images, (mean, std) = stored(layout, dtype), statistics(layout)
    result = ImagePreparation(layout, mean, std, channels_last=channels_last)(images)
    scaled = to_nchw(images, layout).astype(np.float32) / np.float32(full_scale)
    assert result.dtype == torch.float32
    assert_bitwise(result, (scaled - column(mean, np.float32)) / column(std, np.float32))


@pytest.mark.parametrize("channels_last", [False, True])
def test_every_byte_is_what_torchvision_makes_of_it(channels_last):
    # ToTensor divides by 255; Normalize subtracts in place and divides in place.
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    expected = images.to(torch.float32).div(255)
    expected = expected.sub_(torch.tensor(MEAN).view(-1, 1, 1)).div_(torch.tensor(STD).view(-1, 1, 1))
    result = ImagePreparation("NCHW", MEAN, STD, channels_last=channels_last)(images)
    assert_bitwise(result, expected.numpy())


@each_layout
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_floating_point_images_are_left_in_their_units(layout, dtype):
    images = stored(layout).to(dtype) / 7
    mean, std = statistics(layout)
    result = ImagePreparation(layout, mean, std)(images)
    values = to_nchw(images, layout).astype(np.float32)
    assert_bitwise(result, (values - column(mean, np.float32)) / column(std, np.float32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_signed_images_are_left_in_their_units(dtype):
    images = (stored("NCHW").to(torch.int64) - 128).to(dtype)
    assert_bitwise(ImagePreparation("NCHW")(images), images.numpy().astype(np.float32))


@pytest.mark.parametrize(("mean", "std"), list(itertools.product([None, MEAN], [None, STD])), ids=str)
def test_mean_and_deviation_may_each_be_left_out(mean, std):
    images = stored("NCHW")
    expected = images.numpy().astype(np.float32) / np.float32(255)
    if mean is not None:
        expected = expected - column(mean, np.float32)
    if std is not None:
        expected = expected / column(std, np.float32)
    assert_bitwise(ImagePreparation("NCHW", mean, std)(images), expected)


@each_layout
@each_format
def test_quantised_images_are_scaled_and_shifted_back(layout, channels_last):
    images, (mean, std) = stored(layout), statistics(layout)
    scale, offset = 0.0173, -1.37
    result = ImagePreparation(layout, mean, std, scale=scale, offset=offset, channels_last=channels_last)(images)
    values = to_nchw(images, layout).astype(np.float32) * np.float32(scale) + np.float32(offset)
    assert_bitwise(result, (values - column(mean, np.float32)) / column(std, np.float32))


@each_layout
def test_in_double_precision_everything_is_computed_in_double_precision(layout):
    images, (mean, std) = stored(layout), statistics(layout)
    result = ImagePreparation(layout, mean, std, dtype=torch.float64)(images)
    values = to_nchw(images, layout).astype(np.float64) / 255.0
    assert result.dtype == torch.float64
    assert_bitwise(result, (values - column(mean, np.float64)) / column(std, np.float64))


@each_layout
@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_from_single_precision(layout, channels_last, dtype):
    images, (mean, std) = stored(layout), statistics(layout)
    options = {"mean": mean, "std": std, "channels_last": channels_last}
    result = ImagePreparation(layout, dtype=dtype, **options)(images)
    single = ImagePreparation(layout, **options)(images)
    assert result.dtype == dtype
    assert torch.equal(result, single.to(dtype))


@each_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_memory_order_is_the_one_asked_for(layout, dtype):
    images = stored(layout)
    for channels_last, memory_format in [(False, torch.contiguous_format), (True, torch.channels_last)]:
        result = ImagePreparation(layout, channels_last=channels_last, dtype=dtype)(images)
        assert result.is_contiguous(memory_format=memory_format)
        assert result.shape == (4, 1 if layout == "NHW" else 3, 5, 7)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("result_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_stored_batch_is_not_changed(dtype, result_dtype):
    images = stored("NCHW").to(dtype)
    before = images.clone()
    result = ImagePreparation("NCHW", MEAN, STD, dtype=result_dtype)(images)
    result.fill_(0)
    assert torch.equal(images, before)


def test_a_part_of_a_batch_is_prepared_like_the_whole():
    images = stored("NHWC")
    prepare = ImagePreparation("NHWC", MEAN, STD)
    assert torch.equal(prepare(images)[1:3], prepare(images[1:3]))
    assert torch.equal(prepare(images)[:, :, ::2], prepare(images[:, ::2]))


def test_no_images_are_no_images():
    assert ImagePreparation("NHWC", MEAN, STD)(stored("NHWC")[:0]).shape == (0, 3, 5, 7)


def test_one_number_holds_for_all_channels():
    images = stored("NCHW")
    three = ImagePreparation("NCHW", (0.5,) * 3, (0.25,) * 3)(images)
    assert torch.equal(ImagePreparation("NCHW", (0.5,), (0.25,))(images), three)


def test_the_precision_may_change_between_batches():
    # A DataModule learns the Trainer's precision late.
    images, prepare = stored("NCHW"), ImagePreparation("NCHW", MEAN, STD)
    single = prepare(images)
    prepare.dtype = torch.float64
    assert prepare(images).dtype == torch.float64
    prepare.dtype = torch.float32
    assert torch.equal(prepare(images), single)


def test_preparing_needs_no_gradient():
    assert not ImagePreparation("NCHW", MEAN, STD)(stored("NCHW").float()).requires_grad


@pytest.mark.gpu
@each_layout
@each_format
def test_images_on_a_gpu_equal_those_on_the_host(layout, channels_last):
    images, (mean, std) = stored(layout), statistics(layout)
    prepare = ImagePreparation(layout, mean, std, channels_last=channels_last)
    on_gpu = prepare(images.cuda())
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), prepare(images))
