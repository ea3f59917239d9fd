"""Orders and shares: every sample exactly once, whatever the sizes, and the same order on every machine."""

from __future__ import annotations

import pickle
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.hdf5.order import (
    EpochPlan,
    FullShuffle,
    NoShuffle,
    WeightedShuffle,
    WindowShuffle,
    parse_shuffle,
)
from tests.contracts import check_epoch_plan, check_shuffle, exactly

SHUFFLES = [FullShuffle(), WindowShuffle(), WindowShuffle(1), WindowShuffle(7), WindowShuffle(10**9), NoShuffle()]


@pytest.mark.parametrize("shuffle", [s for s in SHUFFLES if s != WindowShuffle(1)], ids=str)
def test_a_shuffle_is_a_permutation_that_its_arguments_alone_decide(shuffle):
    check_shuffle(shuffle)


# These orders are promised: a run that is resumed on another machine, or after an upgrade of numpy, has to go on
# in the same order. If one of them changes, saved positions become wrong without an error.
@pytest.mark.parametrize(
    ("seed", "epoch", "full", "window"),
    [
        (0, 0, [11, 3, 2, 1, 8, 6, 0, 7, 4, 10, 5, 9], [1, 2, 0, 3, 4, 6, 5, 7, 8, 11, 9, 10]),
        (0, 1, [7, 10, 4, 11, 5, 1, 9, 8, 6, 2, 0, 3], [1, 0, 4, 2, 5, 3, 7, 6, 10, 8, 11, 9]),
        (1, 0, [9, 2, 4, 7, 5, 0, 11, 8, 10, 6, 3, 1], [0, 2, 1, 4, 5, 3, 7, 9, 6, 8, 10, 11]),
        (12345, 7, [8, 6, 3, 11, 1, 7, 5, 9, 10, 4, 2, 0], [1, 3, 0, 2, 6, 5, 4, 8, 7, 9, 11, 10]),
    ],
)
def test_orders_are_those_of_the_first_release(seed, epoch, full, window):
    assert FullShuffle().permutation(12, seed, epoch).tolist() == full
    assert WindowShuffle(4).permutation(12, seed, epoch).tolist() == window


@pytest.mark.parametrize(
    ("shuffle", "checksum"),
    [(FullShuffle(), "79a0ee69"), (WindowShuffle(4096), "fa8ede69"), (WindowShuffle(64), "7d26574a")],
    ids=str,
)
def test_long_orders_are_those_of_the_first_release(shuffle, checksum):
    order = shuffle.permutation(100_000, 3, 2).astype("<i8")
    assert f"{zlib.crc32(order.tobytes()):08x}" == checksum


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_other_seeds_and_epochs_give_other_orders(seed, epoch, other_seed, other_epoch):
    same = (seed, epoch) == (other_seed, other_epoch)
    orders = [FullShuffle().permutation(50, *pair) for pair in ((seed, epoch), (other_seed, other_epoch))]
    assert np.array_equal(*orders) == same


def test_in_a_full_shuffle_every_sample_comes_to_every_place():
    orders = np.array([FullShuffle().permutation(20, 9, epoch) for epoch in range(4000)])
    for place in range(20):
        counts = np.bincount(orders[:, place], minlength=20)
        # 200 expected, standard deviation 13.8; the seed is fixed, so this is no matter of luck.
        assert counts.min() > 130
        assert counts.max() < 270


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(1, 600), st.integers(0, 99), st.integers(0, 9))
def test_in_a_window_no_sample_moves_as_far_as_the_window_is_wide(num_samples, window, seed, epoch):
    order = WindowShuffle(window).permutation(num_samples, seed, epoch)
    assert np.abs(order - np.arange(num_samples)).max() < window


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(1, 600), st.integers(0, 99))
def test_in_a_window_the_samples_in_play_span_less_than_the_window(num_samples, window, seed):
    order = WindowShuffle(window).permutation(num_samples, seed, 0)
    furthest_used = np.maximum.accumulate(order)
    still_to_come = np.minimum.accumulate(order[::-1])[::-1]
    # At each place: the furthest sample used so far against the first one that is still to come.
    assert (furthest_used[:-1] - still_to_come[1:]).max(initial=0) < window


def test_a_window_of_one_leaves_the_order_of_the_file():
    assert WindowShuffle(1).permutation(100, 0, 0).tolist() == list(range(100))


def test_a_wide_window_mixes_well():
    order = WindowShuffle(1000).permutation(10_000, 0, 0)
    moved = np.abs(order - np.arange(10_000))
    # A delay uniform in 0..W moves a sample by |delay - W / 2|, whose mean is W / 4 (less at the two ends).
    assert 230 < moved.mean() < 255


@pytest.mark.parametrize("window", [0, -5])
def test_a_window_without_samples_is_refused(window):
    with pytest.raises(ValueError, match=rf"^window_samples is {window}; expected at least 1\.$"):
        WindowShuffle(window)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("full", FullShuffle()),
        (True, FullShuffle()),
        ("window", WindowShuffle(4096)),
        ("window:123", WindowShuffle(123)),
        ("none", NoShuffle()),
        (None, NoShuffle()),
        (False, NoShuffle()),
        *[(shuffle, shuffle) for shuffle in SHUFFLES],
    ],
    ids=repr,
)
def test_every_form_of_a_shuffle_is_understood(given, meant):
    assert parse_shuffle(given) == meant


@pytest.mark.parametrize("given", ["Full", "window:", "window:-1", "window:1.5", "window:10 ", "", 1.5, 2, "random"])
def test_other_forms_of_a_shuffle_are_refused(given):
    message = f"shuffle={given!r} is not understood; expected 'full', 'window', 'window:N' (N samples) or None."
    with pytest.raises(ValueError, match=exactly(message)):
        parse_shuffle(given)


def test_a_window_of_zero_in_text_form_is_refused_too():
    with pytest.raises(ValueError, match=exactly("window_samples is 0; expected at least 1.")):
        parse_shuffle("window:0")


# Draws by weight ---------------------------------------------------------------------------------------------

some_weights = st.lists(st.one_of(st.just(0.0), st.floats(0, 1e9)), min_size=1, max_size=60).filter(any).map(np.array)


# Promised like the orders above.
@pytest.mark.parametrize(
    ("seed", "epoch", "full", "window", "none"),
    [
        (
            0,
            0,
            [3, 3, 4, 3, 1, 1, 1, 1, 4, 3, 4, 4],
            [1, 1, 1, 1, 3, 3, 3, 3, 4, 4, 4, 4],
            [1, 1, 1, 1, 3, 3, 3, 3, 4, 4, 4, 4],
        ),
        (
            0,
            1,
            [4, 1, 1, 4, 3, 5, 4, 3, 4, 4, 4, 4],
            [1, 1, 4, 3, 4, 3, 4, 4, 4, 4, 4, 5],
            [1, 1, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5],
        ),
        (
            1,
            0,
            [4, 1, 4, 1, 3, 4, 4, 1, 4, 1, 0, 4],
            [0, 1, 1, 1, 1, 3, 4, 4, 4, 4, 4, 4],
            [0, 1, 1, 1, 1, 3, 4, 4, 4, 4, 4, 4],
        ),
        (
            2**32 - 1,
            7,
            [0, 4, 3, 0, 1, 4, 4, 3, 3, 3, 4, 0],
            [0, 0, 0, 1, 3, 3, 3, 4, 3, 4, 4, 4],
            [0, 0, 0, 1, 3, 3, 3, 3, 4, 4, 4, 4],
        ),
    ],
)
def test_draws_are_those_of_the_first_release(seed, epoch, full, window, none):
    weights = np.array([1.0, 2.0, 0.0, 3.0, 4.0, 0.5])
    for order, expected in [(FullShuffle(), full), (WindowShuffle(3), window), (NoShuffle(), none)]:
        assert WeightedShuffle(weights, order).permutation(12, seed, epoch).tolist() == expected


def test_long_draws_are_those_of_the_first_release():
    shuffle = WeightedShuffle(1.0 / np.arange(1, 50_001))
    assert shuffle.digest == "f6564c07"
    drawn = shuffle.permutation(100_000, 3, 2)
    assert drawn.dtype == np.int64
    assert f"{zlib.crc32(drawn.astype('<i8').tobytes()):08x}" == "8415ac1b"


@settings(max_examples=80)
@given(some_weights, st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(0, 99))
def test_only_samples_of_some_weight_are_drawn_and_the_arguments_alone_decide_which(weights, num_draws, seed, epoch):
    shuffle = WeightedShuffle(weights)
    drawn = shuffle.permutation(num_draws, seed, epoch)
    assert len(drawn) == num_draws
    assert (weights[drawn] > 0).all()
    np.random.seed(epoch)  # the global generator has no say
    np.testing.assert_array_equal(WeightedShuffle(weights.tolist()).permutation(num_draws, seed, epoch), drawn)
    # A power of two changes no digit of a number.
    np.testing.assert_array_equal(WeightedShuffle(weights * 4).permutation(num_draws, seed, epoch), drawn)


@settings(max_examples=60)
@given(some_weights, st.integers(1, 200), st.integers(1, 200), st.integers(0, 99))
def test_a_longer_epoch_begins_with_the_draws_of_a_shorter_one(weights, num_draws, more, seed):
    shuffle = WeightedShuffle(weights)
    longer = shuffle.permutation(num_draws + more, seed, 1)
    np.testing.assert_array_equal(longer[:num_draws], shuffle.permutation(num_draws, seed, 1))


@settings(max_examples=60)
@given(some_weights, st.integers(1, 300), st.integers(1, 50), st.integers(0, 99))
def test_the_order_has_no_say_in_which_samples_are_drawn(weights, num_draws, window, seed):
    full, near, rising = (
        WeightedShuffle(weights, order).permutation(num_draws, seed, 4)
        for order in (FullShuffle(), WindowShuffle(window), NoShuffle())
    )
    np.testing.assert_array_equal(rising, np.sort(full))
    np.testing.assert_array_equal(near, rising[WindowShuffle(window).permutation(num_draws, seed, 4)])


def test_samples_are_drawn_as_often_as_their_weights_say():
    weights = np.concatenate([[0.0], np.logspace(0, 4, 40), [0.0]])
    num_draws = 1_000_000
    counts = np.bincount(WeightedShuffle(weights).permutation(num_draws, 7, 0), minlength=42)
    expected = num_draws * weights / weights.sum()
    # The standard deviation of a count; the seed is fixed, so this is no matter of luck.
    sigma = np.sqrt(expected * (1 - weights / weights.sum()))
    assert (np.abs(counts - expected) <= 5 * sigma).all()
    assert counts[[0, 41]].tolist() == [0, 0]


def test_a_draw_says_nothing_of_the_next_one_nor_of_the_next_epoch():
    weights = np.arange(1.0, 9.0)
    shuffle = WeightedShuffle(weights)
    first, second = (shuffle.permutation(400_001, 7, epoch) for epoch in range(2))
    shares = weights / weights.sum()
    expected = 400_000 * np.outer(shares, shares)
    for left, right in [(first[:-1], first[1:]), (first[1:], second[1:])]:
        pairs = np.bincount(left * 8 + right, minlength=64).reshape(8, 8)
        assert (np.abs(pairs - expected) <= 5 * np.sqrt(expected)).all()


def test_a_sample_may_come_several_times_and_equal_weights_leave_out_as_many_as_chance_does():
    drawn = WeightedShuffle(np.ones(100_000)).permutation(100_000, 0, 0)
    # 1 / e of the samples are not among the draws; standard deviation 0.001.
    assert abs(len(np.unique(drawn)) / 100_000 - (1 - np.exp(-1))) < 0.005


def test_each_draw_is_the_first_sample_whose_sum_exceeds_the_random_number():
    weights = np.random.default_rng(0).random(200) ** 8
    sums = np.cumsum(weights / weights.max())
    sums /= sums[-1]
    bits = np.random.PCG64(np.random.SeedSequence([11, 6, 1])).random_raw(500)
    numbers = [int(word >> np.uint64(11)) / 2**53 for word in bits]
    expected = [next(n for n, total in enumerate(sums) if total > number) for number in numbers]
    assert WeightedShuffle(weights).permutation(500, 11, 6).tolist() == expected


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e300], ids=str)
def test_weights_of_any_size_are_added_up_without_overflow(scale):
    drawn = WeightedShuffle(np.full(10, scale)).permutation(10_000, 0, 0)
    assert np.bincount(drawn).min() > 850  # 1000 expected, standard deviation 30


@pytest.mark.parametrize("weights", [np.ones(3, np.float32), np.array([2, 2, 2], np.uint8), [True] * 3], ids=repr)
def test_weights_may_be_numbers_of_any_type(weights):
    assert WeightedShuffle(weights) == WeightedShuffle(np.ones(3))


def test_draws_are_equal_if_weights_and_order_are():
    shuffle = WeightedShuffle(np.array([1.0, 3.0]), WindowShuffle(9))
    assert (str(shuffle), repr(shuffle)) == (
        f"weighted:{shuffle.digest}:window:9",
        "WeightedShuffle(2 weights, order=window:9)",
    )
    sent = pickle.loads(pickle.dumps(shuffle))
    assert sent == shuffle
    assert hash(sent) == hash(shuffle)
    assert (
        len({shuffle, WeightedShuffle(shuffle.weights), WeightedShuffle(np.array([3.0, 1.0]), WindowShuffle(9))}) == 3
    )
    assert shuffle != WindowShuffle(9)


def test_the_weights_of_a_shuffle_are_its_own():
    weights = np.array([1.0, 3.0])
    shuffle = WeightedShuffle(weights)
    before = shuffle.permutation(50, 0, 0).tolist()
    weights[0] = 1000
    assert shuffle.permutation(50, 0, 0).tolist() == before
    with pytest.raises(ValueError, match="read-only"):
        shuffle.weights[0] = 5


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan")], [], [[1.0]]], ids=str)
def test_weights_that_nothing_can_be_drawn_by_are_refused(weights):
    with pytest.raises(ValueError, match="sampling weight"):
        WeightedShuffle(weights)


def test_weights_are_no_text_form_of_a_shuffle():
    shuffle = WeightedShuffle(np.ones(2))
    for value in (shuffle, str(shuffle)):
        message = f"shuffle={value!r} is not understood; expected 'full', 'window', 'window:N' (N samples) or None."
        with pytest.raises(ValueError, match=exactly(message)):
            parse_shuffle(value)


@st.composite
def epoch_plans(draw: st.DrawFn, world_size: int | None = None) -> EpochPlan:
    ranks = draw(st.integers(1, 9)) if world_size is None else world_size
    batch_size = draw(st.integers(1, 40))
    drop_last = draw(st.booleans())
    least = ranks * batch_size if drop_last else ranks
    num_samples = draw(st.integers(least, least + 300))
    return EpochPlan(num_samples, batch_size, ranks, drop_last, draw(st.integers(0, num_samples)))


@settings(max_examples=300)
@given(epoch_plans())
def test_all_ranks_together_take_every_sample_once_in_equally_many_steps(plan):
    check_epoch_plan(plan)


@settings(max_examples=100)
@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 9))
def test_without_drop_last_no_sample_is_left_out_of_a_whole_epoch(num_samples, batch_size, world_size):
    if num_samples >= world_size:
        plan = EpochPlan(num_samples, batch_size, world_size)
        assert plan.num_left_out == 0
        assert plan.bounds(plan.num_steps - 1)[1] == num_samples


@settings(max_examples=150)
@given(epoch_plans(), st.data())
def test_after_a_change_of_sizes_at_any_step_the_samples_left_follow_in_their_order(plan, data):
    step = data.draw(st.integers(0, plan.num_steps))
    used = plan.start if step == 0 else plan.bounds(step - 1)[1]
    other = EpochPlan(
        plan.num_samples, data.draw(st.integers(1, 60)), data.draw(st.integers(1, plan.num_samples)), False, used
    )
    order = FullShuffle().permutation(plan.num_samples, 1, 0)
    left = [order[slice(*other.rank_bounds(s, r))] for s in range(other.num_steps) for r in range(other.world_size)]
    handed_out = np.concatenate([*left, order[:0]])
    np.testing.assert_array_equal(handed_out, order[used : plan.num_samples - other.num_left_out])
    # What cannot be shared is less than one for each rank, and only of the rest of this epoch.
    assert other.num_left_out < max(1, other.world_size)
    assert other.num_left_out == 0 or other.num_steps == 0


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        # 10 samples, 2 ranks x 3: a step of 6, then 4 shared evenly.
        (EpochPlan(10, 3, 2), [[(0, 3), (3, 6)], [(6, 8), (8, 10)]]),
        # 1 sample would be left for 2 ranks: the step before takes it.
        (EpochPlan(7, 3, 2), [[(0, 4), (4, 7)]]),
        (EpochPlan(7, 3, 2, drop_last=True), [[(0, 3), (3, 6)]]),
        (EpochPlan(5, 3, 2), [[(0, 3), (3, 5)]]),
        (EpochPlan(8, 4, 1), [[(0, 4)], [(4, 8)]]),
        (EpochPlan(9, 4, 1), [[(0, 4)], [(4, 8)], [(8, 9)]]),
        (EpochPlan(9, 4, 1, start=3), [[(3, 7)], [(7, 9)]]),
        (EpochPlan(9, 4, 1, start=9), []),
        (EpochPlan(9, 100, 3), [[(0, 3), (3, 6), (6, 9)]]),
    ],
)
def test_shares_of_small_epochs(plan, expected):
    shares = [[plan.rank_bounds(step, rank) for rank in range(plan.world_size)] for step in range(plan.num_steps)]
    assert shares == expected


def test_samples_that_are_fewer_than_the_ranks_of_a_resume_are_counted_as_left_out():
    plan = EpochPlan(100, 10, 8, start=97)
    assert (plan.num_steps, plan.num_left_out, plan.most_rows) == (0, 3, 0)


@pytest.mark.parametrize("step", [-1, 4, 100])
def test_a_step_that_does_not_exist_is_refused(step):
    with pytest.raises(IndexError, match=rf"^step {step} of 4\.$"):
        EpochPlan(40, 10).bounds(step)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; expected at least 1."),
        ({"batch_size": -2}, "batch_size is -2; expected at least 1."),
        ({"batch_size": 4, "world_size": 0}, "world_size is 0; expected at least 1."),
        ({"batch_size": 4, "start": 11}, "start is 11; expected 0 to 10, the number of samples."),
        ({"batch_size": 4, "start": -1}, "start is -1; expected 0 to 10, the number of samples."),
        (
            {"batch_size": 4, "world_size": 3, "drop_last": True},
            "drop_last leaves no step: the dataset has 10 samples and one step takes 12 (batch_size 4 x 3 ranks). "
            "Make batch_size smaller, or leave drop_last off.",
        ),
        (
            {"batch_size": 4, "world_size": 11},
            "10 samples cannot be shared by 11 ranks without repeating one. Use fewer ranks, or more samples.",
        ),
    ],
)
def test_sizes_that_make_no_epoch_are_refused(arguments, message):
    with pytest.raises(ValueError, match=exactly(message)):
        EpochPlan(10, **arguments)
