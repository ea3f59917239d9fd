"""Sums of a device's times. Its marks are numbers here: seconds of a device that has reached all of them."""

from __future__ import annotations

import pytest

from lightning_gpufeed.diagnose.device_sums import DeviceStep, DeviceSums


class Reached:
    """Marks of a device that is never behind."""

    def is_reached(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def recycle(self, *marks: float) -> None:
        """Nothing to keep."""


def summed(*steps: tuple[float, float, float]) -> DeviceSums:
    """Steps of a copy of 1 s and computing of 2 s, each begun at a time, of a weight, after a stall."""
    sums = DeviceSums(Reached())
    for number, (begin, weight, stalled) in enumerate(steps):
        sums.keep(DeviceStep(number, [begin, begin + 1.0, begin + 3.0], begin, weight, stalled))
    return sums


def test_what_is_idle_between_two_steps_is_that_of_all_gaps():
    sums = summed((0.0, 1.0, 0.0), (3.5, 1.0, 0.0), (8.0, 1.0, 0.0))
    assert sums.num_timed == 3
    assert sums.totals(3, is_sampled=False) == pytest.approx((3.0, 6.0, 3 * (0.5 + 1.5) / 2))


def test_a_stall_is_counted_where_it_was_and_stands_for_no_other_step():
    # Each step stands for ten; one of them has waited 40 s beyond what is usual.
    sums = summed((0.0, 10.0, 0.0), (3.5, 10.0, 0.0), (47.0, 10.0, 40.0))
    copy, compute, idle = sums.totals(30, is_sampled=True)
    assert (copy, compute) == pytest.approx((30.0, 60.0))
    assert idle == pytest.approx(30 * 0.5 + 40.0)


def test_a_stall_of_steps_that_were_not_watched_is_counted_too_and_what_follows_adjoins_nothing():
    sums = summed((0.0, 4.0, 0.0), (3.5, 4.0, 0.0))
    sums.skip(20.0)
    sums.keep(DeviceStep(9, [60.0, 61.0, 63.0], 60.0, 4.0, 0.0))
    assert sums.totals(12, is_sampled=True)[2] == pytest.approx(12 * 0.5 + 20.0)


def test_without_two_steps_in_a_row_nobody_knows_what_is_idle():
    assert summed((0.0, 1.0, 0.0)).totals(1, is_sampled=False)[2] is None
