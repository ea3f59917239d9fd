"""What a step would take if loading were cheaper: sums that can be done by hand, and bounds that always hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.diagnose.counters import EpochCounters, UnitCosts, Usage
from lightning_gpufeed.diagnose.load_model import LoadModel, LoadParts, waiting_asleep
from tests.diagnose.feeds import COSTS, FLOATS, OWN, UINT8, WIDENED, epoch_of, steps_of, workers

SHARES = st.floats(0, 1)
INLINE = workers(0)


def model_of(
    wait: float, step_seconds: float = 0.02, *, is_ahead: bool = True, queue: float = 0.0, idle: float | None = None
) -> LoadModel:
    """A step of which this share waits; the training itself waits for a core for `queue` of the time."""
    steps = steps_of(wait, step_seconds=step_seconds, idle=idle)
    elapsed = steps.elapsed_seconds
    thread = Usage(wall_seconds=elapsed, queue_seconds=queue * elapsed)
    return LoadModel(epoch_of(steps=steps, loader=workers(2 if is_ahead else 0), training_thread=thread))


MODELS = st.builds(
    model_of,
    st.floats(0.05, 0.999),
    st.floats(-5, 1).map(lambda power: 10.0**power),
    is_ahead=st.booleans(),
    queue=st.sampled_from([0.0, 0.1, 1.0]),
    idle=st.none() | SHARES,
)


# The step taken apart --------------------------------------------------------------------------------------


@given(MODELS)
def test_a_step_is_waiting_and_the_rest(model: LoadModel) -> None:
    assert model.wait + model.rest == pytest.approx(model.step)
    assert model.rest > 0


def test_a_batch_takes_a_loader_that_is_ahead_a_step_and_another_one_the_wait() -> None:
    assert model_of(0.75).load == pytest.approx(0.020)
    assert model_of(0.75, is_ahead=False).load == pytest.approx(0.015)


def test_waiting_that_leaves_the_device_busy_belongs_to_the_rest() -> None:
    assert model_of(0.75, idle=0.25).rest == pytest.approx(0.015)


def test_echoes_are_free_up_to_loading_over_training() -> None:
    assert model_of(0.75).free_echo_factor == pytest.approx(4.0)
    assert model_of(0.75, is_ahead=False).free_echo_factor == pytest.approx(3.0)  # it would be read ahead


# Gains -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_ahead", "becomes_ahead", "left", "gain"),
    [
        (True, False, 0.5, 2.0),  # 20 ms -> max(5, 10)
        (True, False, 0.25, 4.0),  # max(5, 5)
        (True, False, 0.1, 4.0),  # max(5, 2): the training is what is left
        (True, False, 0.9, 20 / 18),
        (False, False, 0.5, 20 / 12.5),  # 5 + 7.5
        (False, False, 0.0, 4.0),
        (False, True, 1.0, 20 / 15),  # max(5, 15)
        (False, True, 0.2, 4.0),  # max(5, 3)
    ],
)
def test_a_step_lasts_as_long_as_the_slower_of_two_or_both(
    is_ahead: bool, becomes_ahead: bool, left: float, gain: float
) -> None:
    cure = model_of(0.75, is_ahead=is_ahead).cure("x", "y", left, becomes_ahead=becomes_ahead)
    assert (cure.gain, cure.low, cure.high) == (pytest.approx(gain),) * 3


@given(MODELS)
def test_a_cure_that_leaves_all_the_loading_gains_nothing(model: LoadModel) -> None:
    cure = model.cure("x", "y", 1.0)
    # Of a step of 10 us, waiting counts as a nanosecond at least.
    assert (cure.low, cure.gain, cure.high) == (pytest.approx(1.0, abs=2e-4),) * 3


@given(MODELS, st.booleans())
def test_a_cure_that_leaves_no_loading_leaves_the_rest(model: LoadModel, becomes_ahead: bool) -> None:
    cure = model.cure("x", "y", 0.0, becomes_ahead=becomes_ahead)
    assert cure.low == pytest.approx(min(100.0, model.step / model.rest))
    # Where readers took the cores from the training, that ends too; four fifths of its time at most.
    assert cure.low <= cure.gain <= cure.high <= min(100.0, 5.001 * cure.low)


@given(MODELS, st.tuples(SHARES, SHARES, SHARES).map(sorted), st.booleans())
def test_the_gain_lies_in_its_range_and_less_loading_never_gains_less(
    model: LoadModel, lefts: list[float], becomes_ahead: bool
) -> None:
    least, left, most = lefts
    cure = model.cure("x", "y", left, least=least, most=most, becomes_ahead=becomes_ahead)
    assert 0 < cure.low <= cure.gain <= cure.high <= 100
    exact = [model.cure("x", "y", one, becomes_ahead=becomes_ahead).gain for one in lefts]
    assert exact == sorted(exact, reverse=True)


def test_a_training_that_queued_behind_its_readers_may_get_faster_and_only_then() -> None:
    queued, free = model_of(0.6, queue=0.2), model_of(0.6, queue=0.0)
    assert queued.cure("x", "y", 0.0).low == free.cure("x", "y", 0.0).low == pytest.approx(1 / 0.4)
    assert queued.cure("x", "y", 0.0).high == pytest.approx(1 / 0.2)
    # A device does not queue for a core.
    on_device = model_of(0.6, queue=0.2, idle=0.6)
    assert on_device.cure("x", "y", 0.0).high == pytest.approx(1 / 0.4)


@given(MODELS, st.tuples(SHARES, SHARES, SHARES).map(sorted))
def test_what_a_step_itself_saves_is_taken_off_it(model: LoadModel, shares: list[float]) -> None:
    least, saved, most = (one * model.step for one in shares)
    cure = model.cure_by_step("x", "y", (saved, least, most))
    assert 1.0 <= cure.low <= cure.gain <= cure.high <= 100.001
    assert model.cure_by_step("x", "y", (0.5 * model.step,) * 3).gain == pytest.approx(2.0)


def test_work_that_a_cure_moves_into_the_step_counts_where_the_host_computes() -> None:
    # 20 ms, of which 15 wait; a cure that leaves nothing to load and moves 5 ms: 5 + 5.
    assert model_of(0.75).cure("x", "y", 0.0, moved=0.005).gain == pytest.approx(2.0)
    assert model_of(0.75, idle=0.75).cure("x", "y", 0.0, moved=0.005).gain == pytest.approx(4.0)


@given(MODELS, st.tuples(SHARES, SHARES, SHARES).map(sorted), SHARES)
def test_with_work_moved_too_the_gain_lies_in_its_range(model: LoadModel, lefts: list[float], share: float) -> None:
    least, left, most = lefts
    cure = model.cure("x", "y", left, least=least, most=most, moved=share * model.step)
    assert 0 < cure.low <= cure.gain <= cure.high <= 100


# Readers taken apart ---------------------------------------------------------------------------------------


def parts_of(**told: object) -> LoadParts:
    parts = LoadModel(epoch_of(**told)).parts  # type: ignore[arg-type]
    assert parts is not None
    return parts


@given(
    st.tuples(SHARES, SHARES, SHARES),
    st.sampled_from([UINT8, FLOATS, WIDENED]),
    st.sampled_from([None, COSTS, UnitCosts(1e-6, 1e-6, 1e-6), UnitCosts(1e-14, 1e-14, 1e-14)]),
    st.sampled_from([None, 0.0, 0.25, 32.0]),
    st.sampled_from([INLINE, workers(1), workers(16), OWN]),
)
def test_the_parts_of_a_readers_time_add_up_to_what_was_seen(shares, batch, costs, ratio, loader) -> None:
    user, system, queue = (one / 3 for one in shares)
    counters = epoch_of(
        user=user, system=system, queue=queue, batch=batch, costs=costs, read_ratio=ratio, loader=loader
    )
    parts = LoadModel(counters).parts
    assert parts is not None
    assert min(parts.read, parts.convert, parts.ship, parts.asleep) >= 0
    assert parts.other >= -1e-12  # the difference of two floats that may be equal
    assert parts.busy == pytest.approx(counters.readers.busy_seconds / counters.num_watched_steps)
    assert parts.total == pytest.approx(parts.busy + parts.asleep)


def test_each_part_is_what_this_machine_needs_for_it() -> None:
    parts = parts_of(batch=WIDENED, read_ratio=0.25, user=0.4, system=0.5)
    assert parts.read == pytest.approx(WIDENED.compact_bytes * COSTS.read_seconds)
    assert parts.convert == pytest.approx(WIDENED.widened_values * COSTS.convert_seconds)
    assert parts.ship == pytest.approx(WIDENED.num_bytes * COSTS.ship_seconds)
    assert parts_of(batch=UINT8).convert == 0.0
    assert parts_of(read_ratio=8.0, user=0.4, system=0.5).read == pytest.approx(8 * UINT8.num_bytes * 4e-10)


def test_only_workers_hand_batches_over() -> None:
    assert parts_of(loader=workers(1)).ship > 0
    assert parts_of(loader=INLINE).ship == 0
    assert parts_of(loader=OWN).ship == 0


def test_without_unit_costs_or_bytes_read_the_time_is_there_all_the_same() -> None:
    assert parts_of(costs=None).other == pytest.approx(parts_of().busy)
    # Bytes that were not told: each that is delivered was read once.
    assert parts_of(read_ratio=None).read == pytest.approx(parts_of(read_ratio=1.0).read)


@pytest.mark.parametrize("changes", [{"readers": None}, {"num_watched_steps": 0}])
def test_readers_that_were_not_watched_have_no_parts(changes: dict[str, object]) -> None:
    model = LoadModel(replace(epoch_of(), **changes))
    assert model.parts is None
    assert model.share_left(LoadParts(0.0, 0.0, 0.0, 0.0, 0.0)) == 1.0


def test_half_of_the_parts_is_half_of_the_time() -> None:
    model = LoadModel(epoch_of())
    parts = model.parts
    assert parts is not None
    halved = LoadParts(parts.read / 2, parts.convert / 2, parts.ship / 2, parts.other / 2, parts.asleep / 2)
    assert model.share_left(halved) == pytest.approx(0.5)
    assert model.share_left(parts) == 1.0


# Asleep ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "wait", "asleep", "expected"),
    [
        (workers(2), 0.6, 0.4, 0.0),  # they may have slept while the step did not wait
        (workers(2), 0.6, 0.9, 0.5),
        (workers(2), 1.0, 0.9, 0.9),
        (INLINE, 0.6, 0.9, 0.9),  # between the steps nobody sleeps for want of work
    ],
)
def test_sleep_counts_as_far_as_it_is_not_for_want_of_work(loader, wait, asleep, expected) -> None:
    counters = epoch_of(user=(1 - asleep) / 2, system=(1 - asleep) / 2, queue=0.0, loader=loader, steps=steps_of(wait))
    assert waiting_asleep(counters) == pytest.approx(expected, abs=1e-9)


def test_sleep_that_is_not_known_does_not_count() -> None:
    assert waiting_asleep(epoch_of(user=0.0, system=0.0, queue=None)) == 0.0
    assert waiting_asleep(replace(epoch_of(), readers=None)) == 0.0


# Workers ---------------------------------------------------------------------------------------------------


def gain_with(num_workers: int, counters: EpochCounters) -> tuple[float, float, float]:
    """Gain of so many workers, least and most."""
    cure = LoadModel(counters).cure_by_workers("workers", "", num_workers)
    return cure.gain, cure.low, cure.high


def busy(loader, cores: float, *, wait: float, main_user: float, idle: float | None = None) -> EpochCounters:
    """Readers that are on a core all the time; a step takes so long that handing a batch over does not count."""
    steps = steps_of(wait, step_seconds=20.0, idle=idle)
    return epoch_of(user=0.9, system=0.1, queue=0.0, loader=loader, cores=cores, steps=steps, main_user=main_user)


def close(gain: float) -> Any:
    """Within a thousandth: handing over takes a millisecond of 20 s, and more."""
    return pytest.approx(gain, rel=1e-3)


def test_twice_the_workers_on_free_cores_load_in_half_the_time() -> None:
    gain, low, high = gain_with(4, busy(workers(2), 16, wait=0.9, main_user=0.1))
    assert gain == close(2.0)
    assert low < gain < high


def test_readers_that_sleep_need_no_core_of_their_own() -> None:
    counters = epoch_of(user=0.0, system=0.05, queue=0.0, cores=2, loader=workers(2), steps=steps_of(0.999))
    assert gain_with(8, counters)[0] == pytest.approx(4.0, rel=0.01)  # of 99.9 % of waiting


def test_no_number_of_workers_outruns_the_cores() -> None:
    # Two workers fill two cores.
    gain, low, high = gain_with(8, busy(workers(2), 2, wait=0.9, main_user=0.0))
    assert (gain, high) == (close(1.0), close(1.0))
    assert low <= 1.0


def test_training_on_the_host_takes_its_share_of_the_cores() -> None:
    # Of 20 s the two workers compute 40 and the training 16: 56 on 4 cores are 14.
    assert gain_with(16, busy(workers(2), 4, wait=0.9, main_user=0.8))[0] == close(20 / 14)


@pytest.mark.parametrize("idle", [None, 0.9])
def test_loading_that_the_training_process_did_itself_is_not_counted_twice(idle: float | None) -> None:
    # 18 s of loading and 2 of training, all on one core: with four workers on four cores 20 / 4.
    gain, _, high = gain_with(4, busy(INLINE, 4, wait=0.9, main_user=0.1, idle=idle))
    assert gain == close(4.0)
    assert high >= gain


def test_one_core_does_not_do_twice_the_work_because_a_worker_does_half_of_it() -> None:
    gain, low, high = gain_with(1, busy(INLINE, 1, wait=0.5, main_user=0.5))
    assert (gain, high) == (close(1.0), close(1.0))
    assert low <= 1.0


def test_a_step_that_uses_all_cores_leaves_none_to_a_worker() -> None:
    # 10 s of loading on one core, then 10 s of training on two: 30 s of work on two cores.
    assert gain_with(1, busy(INLINE, 2, wait=0.5, main_user=1.0))[0] == close(20 / 15)


@pytest.mark.parametrize("loader", [INLINE, workers(2)], ids=["0", "2"])
@pytest.mark.parametrize("wait", [0.5, 1.0])
def test_a_gain_of_workers_that_were_not_watched_may_be_none_at_all(loader, wait) -> None:
    unseen = replace(busy(loader, 8, wait=wait, main_user=0.1), readers=None)
    gain, low, high = gain_with(8, unseen)
    assert low <= 1.0 <= gain <= high <= 100
    if wait < 1:
        assert high >= 1 / (1 - wait)


@given(
    st.sampled_from([INLINE, workers(1), workers(2), workers(16)]),
    st.tuples(SHARES, SHARES, SHARES).map(lambda drawn: [one / 3 for one in drawn]),
    st.floats(0.05, 1.0),
    st.sampled_from([0.5, 1.0, 2.0, 64.0]),
    st.integers(1, 128),
    st.booleans(),
)
def test_the_gain_of_any_number_of_workers_lies_in_its_range(loader, parts, wait, cores, wanted, is_seen) -> None:
    user, system, queue = parts
    counters = epoch_of(
        user=user, system=system, queue=queue, loader=loader, cores=cores, steps=steps_of(wait), main_user=0.3
    )
    gain, low, high = gain_with(wanted, counters if is_seen else replace(counters, readers=None))
    assert 0 < low <= gain <= high <= 100


def test_the_first_worker_has_a_price_and_the_second_has_none() -> None:
    # 0.2 ms of loading in a step of 0.4: handing a batch over takes as long.
    steps = steps_of(0.5, step_seconds=0.0004)
    inline = epoch_of(user=0.9, system=0.1, queue=0.0, loader=INLINE, cores=8, steps=steps, main_user=0.5)
    assert gain_with(1, inline)[0] < 1.0
    ahead = epoch_of(user=0.9, system=0.1, queue=0.0, loader=workers(1), cores=8, steps=steps, main_user=0.5)
    assert gain_with(2, ahead)[0] == pytest.approx(2.0)


def test_without_workers_the_step_does_their_work_and_nothing_is_handed_over() -> None:
    # Two workers are on a core 10 % of 20 s each: 4 s of work for a batch.
    counters = epoch_of(user=0.1, system=0.0, queue=0.0, steps=steps_of(0.5, step_seconds=20.0))
    cure = LoadModel(counters).cure_without_workers("no workers", "")
    assert cure is not None
    assert cure.gain == close(20 / (10 + 4))
    assert cure.low < cure.gain < cure.high
    assert LoadModel(replace(counters, readers=None)).cure_without_workers("no workers", "") is None
