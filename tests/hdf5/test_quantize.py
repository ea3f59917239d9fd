from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.quantize import (
    Affine,
    Conversion,
    convert,
    finite_range,
    plan_conversions,
)
from lightning_gpufeed.hdf5.sources import FieldSpec
from lightning_gpufeed.hdf5.statistics import ChannelStatistics

UINT8 = np.dtype(np.uint8)
FINITE = st.floats(min_value=-1e150, max_value=1e150, allow_nan=False)
RANGES = st.tuples(FINITE, FINITE).map(sorted)


def spec(shape: tuple[int, ...], dtype: str) -> FieldSpec:
    return FieldSpec(shape, np.dtype(dtype))


def rows(values, first: int = 0):
    array = np.asarray(values)
    return array, np.arange(first, first + len(array))


# -- the 256 steps


@given(RANGES, st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_a_quantised_value_comes_back_within_half_a_step(bounds, parts):
    low, high = bounds
    values = np.clip(low + np.array(parts) * (high - low), low, high)
    affine = Affine.fit(low, high)
    error = np.abs(affine.decode(affine.encode(values)) - values)
    # Beside half a step, what float64 itself cannot tell apart at this magnitude; ranges too narrow for
    # normal numbers are stored as one value.
    rounding = 4 * np.spacing(max(abs(low), abs(high))) + 255 * np.finfo(np.float64).tiny
    assert (error <= (high - low) / 255 / 2 + rounding).all()


@given(RANGES)
def test_the_ends_of_the_range_are_stored_as_0_and_255_and_the_low_end_comes_back_exactly(bounds):
    low, high = bounds
    affine = Affine.fit(low, high)
    assert affine.encode(np.array([low]))[0] == 0
    assert affine.decode(np.array([0], np.uint8))[0] == low
    if (high - low) / 255 >= np.finfo(np.float64).tiny:
        assert affine.encode(np.array([high]))[0] == 255


@given(FINITE)
def test_a_constant_is_stored_as_zeros_and_comes_back_exactly(value):
    affine = Affine.fit(value, value)
    stored = affine.encode(np.full(3, value))
    assert stored.tolist() == [0, 0, 0]
    assert affine.decode(stored).tolist() == [value] * 3


@given(st.integers(0, 255), FINITE, st.floats(1e-100, 1e100))
def test_encoding_what_was_decoded_gives_the_same_step(step, offset, scale):
    affine = Affine(scale, offset)
    decoded = affine.decode(np.array([step], np.uint8))
    if np.spacing(abs(offset)) < scale / 4:  # else neighbours are the same float64
        assert affine.encode(decoded)[0] == step


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (1.0, 0.0, "the range to quantise is (1.0, 0.0); expected low <= high, both finite"),
        (0.0, float("nan"), "the range to quantise is (0.0, nan); expected low <= high, both finite"),
        (-1.7e308, 1.7e308, "the range to quantise, (-1.7e+308, 1.7e+308), is wider than float64 can hold"),
    ],
)
def test_a_range_that_cannot_be_meant_is_refused(low, high, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Affine.fit(low, high)


# -- what is planned for each field


def test_images_become_uint8_whole_number_labels_int64_and_vectors_stay():
    planned = plan_conversions(
        {
            "images": spec((3, 8, 8), "u1"),
            "mask": spec((8, 8), "i4"),
            "labels": spec((), "i4"),
            "weight": spec((), "f4"),
            "box": spec((4,), "i2"),
        }
    )
    assert {key: (c.kind, c.dtype.name) for key, c in planned.items()} == {
        "images": ("keep", "uint8"),
        "mask": ("cast", "uint8"),
        "labels": ("keep", "int64"),
        "weight": ("keep", "float32"),
        "box": ("keep", "int16"),
    }


def test_scale_and_quantize_are_for_float_images_and_leave_integer_masks_alone():
    fields = {"images": spec((3, 8, 8), "f4"), "mask": spec((8, 8), "i8")}
    assert {k: c.kind for k, c in plan_conversions(fields, scale=255).items()} == {
        "images": "scale",
        "mask": "cast",
    }
    assert {k: c.kind for k, c in plan_conversions(fields, quantize="auto").items()} == {
        "images": "affine",
        "mask": "cast",
    }


def test_scale_is_for_wide_integers_where_there_are_no_floats():
    planned = plan_conversions({"images": spec((8, 8), "u2")}, scale=255 / 4095)
    stored = convert(*_first_two(np.array([[[0, 4095]], [[2048, 16]]], "u2"), planned["images"]))
    assert stored.tolist() == [[[0, 255]], [[128, 1]]]


def _first_two(values, conversion):
    return values, conversion, "images", np.arange(len(values))


@pytest.mark.parametrize("option", [{"scale": 255.0}, {"quantize": "auto"}])
def test_an_option_without_a_field_to_apply_it_to_is_refused(option):
    name = next(iter(option))
    with pytest.raises(PackError) as caught:
        plan_conversions({"images": spec((3, 8, 8), "u1"), "labels": spec((), "i8")}, **option)
    assert str(caught.value) == (
        f"{name} was given, but there are no images of floats or wide integers to apply it to "
        f"('images': uint8 (3, 8, 8), 'labels': int64 ()); leave {name} out"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 255, "keep_dtype": True}, "scale and keep_dtype exclude each other; give one"),
        ({"scale": -1}, "scale is -1; expected a finite number above 0, such as 255"),
        ({"quantize": "all"}, "quantize is 'all'; expected \"auto\" or (low, high)"),
    ],
)
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plan_conversions({"images": spec((3, 8, 8), "f4")}, **options)


# -- values


@given(st.lists(st.integers(0, 255), min_size=4, max_size=4), st.sampled_from(["i2", "i8", "u2", "u8", ">i4"]))
def test_whole_numbers_that_fit_uint8_are_cast(values, dtype):
    array, indices = rows(np.array(values, dtype).reshape(1, 2, 2))
    stored = convert(array, Conversion("cast", UINT8), "images", indices)
    assert stored.dtype == np.uint8
    assert stored.reshape(-1).tolist() == values


@given(st.integers(0, 3), st.one_of(st.integers(256, 30000), st.integers(-30000, -1)))
def test_the_first_sample_with_a_value_outside_uint8_is_named(place, wrong):
    values, indices = rows(np.full((6, 2, 2), 7, "i2"), first=40)
    values[2].reshape(-1)[place] = wrong
    values[4] = 999
    with pytest.raises(PackError) as caught:
        convert(values, Conversion("cast", UINT8), "images", indices)
    assert str(caught.value) == (
        f"sample 42 of 'images' holds {wrong}, outside 0..255 of uint8; convert the values first, or give scale, "
        "quantize or keep_dtype (--scale, --quantize, --keep-dtype)"
    )


def test_booleans_become_zeros_and_ones():
    values, indices = rows([[[True, False]]])
    assert convert(values, Conversion("cast", UINT8), "mask", indices).tolist() == [[[1, 0]]]


def test_floats_in_0_to_1_are_refused_with_the_ways_out():
    values, indices = rows(np.linspace(0, 1, 8, dtype="f4").reshape(2, 2, 2))
    with pytest.raises(PackError) as caught:
        convert(values, Conversion("refuse", UINT8), "images", indices)
    assert str(caught.value) == (
        "'images' holds float32 values in [0, 1]; images are stored as uint8, and casting would store zeros. "
        "scale=255 (--scale 255) stores round(255 * value); quantize='auto' (--quantize auto) keeps 256 evenly "
        "spaced steps of any range, keep_dtype=True (--keep-dtype) stores them as they are"
    )


def test_other_floats_are_refused_with_their_range():
    values, indices = rows(np.array([[[-1.5, 2.0]], [[np.nan, 130.0]]]))
    with pytest.raises(PackError, match=r"^'images' holds float64 values in \[-1.5, 130\] \(first samples\); "):
        convert(values, Conversion("refuse", UINT8), "images", indices)


@given(st.integers(0, 255), st.sampled_from(["f2", "f4", "f8"]))
def test_scale_255_gives_back_the_uint8_that_a_float_came_from(value, dtype):
    values, indices = rows(np.array([[[value]]], dtype) / np.dtype(dtype).type(255))
    assert convert(values, Conversion("scale", UINT8, factor=255.0), "images", indices).tolist() == [[[value]]]


def test_a_value_that_scale_takes_out_of_uint8_is_named_as_it_was():
    values, indices = rows(np.array([[[0.5]], [[1.25]]]))
    with pytest.raises(PackError) as caught:
        convert(values, Conversion("scale", UINT8, factor=255.0), "images", indices)
    assert str(caught.value) == (
        "sample 1 of 'images' holds 1.25, outside 0..255 of uint8 after scale=255; give a smaller scale"
    )


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "conversion", [Conversion("scale", UINT8, factor=255.0), Conversion("affine", UINT8, low=0.0, high=1.0)]
)
def test_a_value_that_is_not_finite_is_named(wrong, conversion):
    values, indices = rows(np.array([[[0.5]], [[wrong]]]), first=10)
    with pytest.raises(PackError) as caught:
        convert(values, conversion, "images", indices)
    assert str(caught.value) == f"sample 11 of 'images' holds {wrong}; expected finite values. Clean the source"
    with pytest.raises(PackError, match=r"^sample 11 of 'images' holds"):
        finite_range(values, "images", indices)


def test_a_value_outside_a_given_range_is_named():
    values, indices = rows(np.array([[[0.5]], [[-0.25]]]))
    with pytest.raises(PackError) as caught:
        convert(values, Conversion("affine", UINT8, low=0.0, high=1.0), "images", indices)
    assert str(caught.value) == (
        "sample 1 of 'images' holds -0.25, outside 0..1 of quantize; give a wider range or 'auto'"
    )


def test_a_range_given_in_decimals_holds_the_float32_that_lies_just_above_it():
    values, indices = rows(np.array([[[0.1, 0.0]]], "f4"))
    assert float(values.max()) > 0.1
    stored = convert(values, Conversion("affine", UINT8, low=0.0, high=0.1), "images", indices)
    assert stored.tolist() == [[[255, 0]]]


def test_a_range_that_a_narrow_type_cannot_hold_is_no_reason_to_refuse():
    values, indices = rows(np.array([[[1.0, 0.0]]], "f2"))
    stored = convert(values, Conversion("affine", UINT8, low=0.0, high=1e6), "images", indices)
    assert stored.tolist() == [[[0, 0]]]


def test_a_label_too_large_for_int64_is_named():
    values, indices = rows(np.array([1, 2**63], "u8"))
    with pytest.raises(PackError, match=r"^sample 1 of 'labels' holds 9223372036854775808, outside "):
        convert(values, Conversion("keep", np.dtype(np.int64)), "labels", indices)


# -- mean and std


LAYOUTS = {"NCHW": (0, 2, 3), "NHWC": (0, 1, 2), "NHW": (0, 1, 2)}


def images_and_layout(dtype: str):
    shapes = st.tuples(
        st.sampled_from(sorted(LAYOUTS)), st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99)
    )

    def build(drawn):
        layout, num_rows, num_channels, side, seed = drawn
        shape = {"NCHW": (num_channels, side, 3), "NHWC": (side, 3, num_channels), "NHW": (side, 3)}[layout]
        generator = np.random.default_rng(seed)
        if np.dtype(dtype).kind == "f":
            return layout, generator.normal(1000, 0.01, (num_rows, *shape)).astype(dtype)
        return layout, generator.integers(0, 256, (num_rows, *shape)).astype(dtype)

    return shapes.map(build)


def gather(images, layout, affine=None, cuts=()):
    statistics = ChannelStatistics(images.shape[1:], images.dtype, layout, affine)
    for part in np.split(images, sorted(min(cut, len(images)) for cut in cuts)):
        statistics.update(part)
        fresh = ChannelStatistics(images.shape[1:], images.dtype, layout, affine)
        fresh.restore(json.loads(json.dumps(statistics.state)))
        statistics = fresh
    return statistics.mean_std()


@given(images_and_layout("u1"), st.lists(st.integers(0, 12), max_size=3))
def test_statistics_of_uint8_are_those_of_numpy_and_do_not_depend_on_the_batches(drawn, cuts):
    layout, images = drawn
    mean, std = gather(images, layout, cuts=cuts)
    whole_mean, whole_std = gather(images, layout)
    assert mean.tolist() == whole_mean.tolist()
    assert std.tolist() == whole_std.tolist()
    # NumPy sums rounded quotients, we divide exact sums: a few units in the last place.
    floats = images.astype(np.float64) / 255
    np.testing.assert_allclose(mean, np.atleast_1d(floats.mean(LAYOUTS[layout])), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(std, np.atleast_1d(floats.std(LAYOUTS[layout])), rtol=1e-12, atol=1e-14)


@given(images_and_layout("f4"), st.lists(st.integers(0, 12), max_size=3))
def test_statistics_of_floats_far_from_zero_keep_their_digits(drawn, cuts):
    layout, images = drawn
    mean, std = gather(images, layout, cuts=cuts)
    floats = images.astype(np.float64)
    np.testing.assert_allclose(mean, np.atleast_1d(floats.mean(LAYOUTS[layout])), rtol=1e-13)
    # A std of 0.01 beside a mean of 1000: sums of squares would keep no more than six digits of it.
    np.testing.assert_allclose(std, np.atleast_1d(floats.std(LAYOUTS[layout])), rtol=1e-8, atol=1e-12)


def test_statistics_of_quantised_images_are_those_of_the_decoded_values():
    images = np.random.default_rng(0).integers(0, 256, (50, 3, 6, 6), dtype=np.uint8)
    affine = Affine(0.02, -3.0)
    mean, std = gather(images, "NCHW", affine)
    decoded = affine.decode(images)
    np.testing.assert_allclose(mean, decoded.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, decoded.std((0, 2, 3)), rtol=1e-12)


def test_statistics_of_all_white_images_do_not_overflow():
    images = np.full((3, 1, 1200, 1200), 255, np.uint8)
    mean, std = gather(images, "NCHW")
    assert (mean.tolist(), std.tolist()) == ([1.0], [0.0])
