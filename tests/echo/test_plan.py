"""Pieces, permutation seeds, the rules of repeating a batch, and the record of what was repeated."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpufeed.echo.plan import (
    AdaptiveEcho,
    EchoRule,
    EchoTrace,
    FixedEcho,
    Piece,
    ReplayedEcho,
    pass_seed,
    piece_bounds,
)

TRACES = st.dictionaries(st.integers(0, 5), st.lists(st.integers(1, 9), max_size=8), max_size=4)


def walked(rule: EchoRule, num_splits: int, num_fetches: int, is_ready: Callable[[Piece], bool] = bool) -> str:
    """Draw the steps of an epoch as rows of numbers, as the module does."""
    steps, piece = [], Piece()
    while piece.fetch < num_fetches:
        steps.append(piece)
        if piece.piece_index + 1 < num_splits:
            piece = piece.next_piece()
            continue
        wants = rule.wants_pass(0, piece.fetch, piece.pass_index + 1)
        wants = not is_ready(piece) if wants is None else wants
        piece = piece.next_pass() if wants else piece.next_fetch()
    rows = {
        "fetch": [step.fetch for step in steps],
        "pass ": [step.pass_index for step in steps],
        "piece": [step.piece_index for step in steps],
        "new  ": ["x" if step.is_fetch else "." for step in steps],
        "echo ": ["x" if step.is_echo else "." for step in steps],
    }
    return "\n".join(f"{name} {' '.join(map(str, row))}" for name, row in rows.items())


# Pieces ----------------------------------------------------------------------------------------------------


def test_every_batch_is_passed_over_in_pieces_and_fetched_once():
    assert walked(FixedEcho(2), num_splits=2, num_fetches=2) == "\n".join(
        [
            "fetch 0 0 0 0 1 1 1 1",
            "pass  0 0 1 1 0 0 1 1",
            "piece 0 1 0 1 0 1 0 1",
            "new   x . . . x . . .",
            "echo  . . x x . . x x",
        ]
    )


def test_one_pass_in_one_piece_is_a_plain_epoch():
    assert walked(FixedEcho(1), num_splits=1, num_fetches=3) == "\n".join(
        ["fetch 0 1 2", "pass  0 0 0", "piece 0 0 0", "new   x x x", "echo  . . ."]
    )


def test_only_a_batch_that_waits_for_the_next_one_is_passed_over_again():
    ready_after = {0: 0, 1: 9, 2: 1}  # fetch -> pass after which the next batch is ready
    drawn = walked(AdaptiveEcho(3), 1, 3, lambda piece: piece.pass_index >= ready_after[piece.fetch])
    assert drawn.splitlines()[:2] == ["fetch 0 1 1 1 2 2", "pass  0 0 1 2 0 1"]


@given(num_samples=st.integers(0, 1000), num_pieces=st.integers(1, 50))
def test_pieces_are_disjoint_together_all_and_as_equal_as_possible(num_samples: int, num_pieces: int) -> None:
    bounds = [piece_bounds(num_samples, num_pieces, index) for index in range(num_pieces)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_samples
    assert [stop for _, stop in bounds[:-1]] == [first for first, _ in bounds[1:]]
    sizes = {stop - first for first, stop in bounds}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_samples", "num_pieces", "sizes"),
    [(300, 2, [150, 150]), (512, 2, [256, 256]), (7, 3, [2, 2, 3]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_a_batch_is_cut_into(num_samples, num_pieces, sizes):
    bounds = [piece_bounds(num_samples, num_pieces, index) for index in range(num_pieces)]
    assert [stop - first for first, stop in bounds] == sizes


# Seeds -----------------------------------------------------------------------------------------------------


def test_a_seed_is_the_same_on_every_machine_and_in_every_release():
    # A resumed run has to draw the permutations of the run before: these numbers must never change.
    assert pass_seed(0, 0, 0, 0) == 6375474604893067239
    assert pass_seed(2**32 - 1, 3, 12, 100_000) == 8496243850208351697
    assert pass_seed(2**63 - 1, 2) == 2229453199582648638


def test_seeds_of_all_passes_of_a_run_differ():
    seeds = [
        pass_seed(pass_seed(pass_seed(seed, rank, epoch, fetch), loader), pass_index)
        for seed in (0, 1)
        for rank in range(3)
        for epoch in range(3)
        for fetch in range(20)
        for loader in range(2)
        for pass_index in range(4)
    ]
    assert len(set(seeds)) == len(seeds)
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)  # torch's generator on the CPU keeps 32 bits of a seed


@given(seed=st.integers(0, 2**63 - 1), numbers=st.lists(st.integers(0, 2**40), max_size=4))
def test_a_seed_is_one_that_a_generator_takes_and_the_same_again(seed: int, numbers: list[int]) -> None:
    assert 0 <= pass_seed(seed, *numbers) < 2**63
    assert pass_seed(seed, *numbers) == pass_seed(seed, *numbers)


# Rules -----------------------------------------------------------------------------------------------------


def test_a_fixed_rule_knows_everything_beforehand():
    rule = FixedEcho(3)
    assert rule.usual_passes == rule.known_passes(0, 5) == 3
    assert [rule.wants_pass(0, 5, done) for done in (1, 2, 3, 4)] == [True, True, False, False]


def test_an_adaptive_rule_leaves_it_open_up_to_its_limit():
    rule = AdaptiveEcho(3)
    assert (rule.usual_passes, rule.known_passes(0, 5)) == (1, None)
    assert [rule.wants_pass(0, 5, done) for done in (1, 2, 3, 4)] == [None, None, False, False]
    assert AdaptiveEcho(1).wants_pass(0, 0, 1) is False


def test_a_replay_does_what_was_recorded_and_then_what_the_other_rule_says():
    rule = ReplayedEcho(EchoTrace({0: [3, 1], 2: [2]}), AdaptiveEcho(2))
    assert rule.usual_passes == 1
    assert [rule.known_passes(0, fetch) for fetch in range(3)] == [3, 1, None]
    assert [rule.wants_pass(0, 0, done) for done in (1, 2, 3)] == [True, True, False]
    assert rule.wants_pass(0, 1, 1) is False
    assert [rule.wants_pass(0, 2, done) for done in (1, 2)] == [None, False]  # beyond the record of the epoch
    assert rule.known_passes(1, 0) is None  # an epoch without a record
    assert rule.known_passes(2, 0) == 2


def test_a_record_is_exact_but_for_a_batch_that_it_was_taken_in_the_middle_of():
    trace = EchoTrace({0: [1, 2], 1: [1, 2]})
    rule = ReplayedEcho(trace, AdaptiveEcho(4))
    assert [rule.wants_pass(1, 1, done) for done in (1, 2)] == [True, False]
    trace.open_batch = (1, 1)
    assert [rule.wants_pass(1, 1, done) for done in (1, 2, 3, 4)] == [True, None, None, False]
    assert [rule.wants_pass(0, 1, done) for done in (1, 2)] == [True, False]
    assert [rule.wants_pass(1, 0, done) for done in (1, 2)] == [False, False]


@given(factors=st.lists(st.integers(1, 4), min_size=1, max_size=6), num_splits=st.integers(1, 3))
def test_what_was_recorded_is_walked_through_again(factors: list[int], num_splits: int) -> None:
    adaptive = AdaptiveEcho(4)
    first = walked(adaptive, num_splits, len(factors), lambda piece: piece.pass_index + 1 >= factors[piece.fetch])
    replayed = ReplayedEcho(EchoTrace({0: factors}), adaptive)
    assert walked(replayed, num_splits, len(factors), pytest.fail) == first


# The record ------------------------------------------------------------------------------------------------


@given(passes=TRACES)
def test_a_record_comes_back_from_plain_numbers(passes: dict[int, list[int]]) -> None:
    trace = EchoTrace(passes)
    assert trace.to_dict() == passes
    assert EchoTrace(trace.to_dict()) == trace
    assert pickle.loads(pickle.dumps(trace.to_dict())) == passes


@given(passes=TRACES)
def test_what_is_added_one_by_one_is_the_same_record(passes: dict[int, list[int]]) -> None:
    trace = EchoTrace()
    for epoch, numbers in passes.items():
        for fetch, number in enumerate(numbers):
            assert trace.passes_of(epoch, fetch) is None
            trace.add(epoch, fetch, number)
            assert trace.passes_of(epoch, fetch) == number
    assert trace.to_dict() == {epoch: numbers for epoch, numbers in passes.items() if numbers}


def test_a_record_is_nobody_elses():
    given_passes = {0: [1, 2]}
    trace = EchoTrace(given_passes)
    trace.add(0, 2, 3)
    trace.to_dict()[0].append(7)
    trace.to_dict()[1] = [7]
    assert given_passes == {0: [1, 2]}
    assert trace.to_dict() == {0: [1, 2, 3]}


def test_what_was_known_of_later_batches_is_forgotten():
    trace = EchoTrace({0: [1, 2, 3], 1: [4]})
    trace.add(0, 1, 5)  # a run that was resumed in the middle
    assert trace.to_dict() == {0: [1, 5], 1: [4]}


def test_batches_without_a_record_count_as_used_once():
    trace = EchoTrace()
    trace.add(3, 2, 4)
    assert trace.to_dict() == {3: [1, 1, 4]}


def test_records_are_equal_if_their_numbers_are():
    assert EchoTrace({0: [1]}) == EchoTrace({0: (1,)})
    assert EchoTrace({0: [1]}) != EchoTrace({0: [2]})
    assert EchoTrace({0: [1]}) != {0: [1]}


def test_numbers_of_numpy_and_tuples_are_as_good():
    trace = EchoTrace({np.int64(0): (np.int32(2), 1)})
    assert trace.to_dict() == {0: [2, 1]}
    assert [type(number) for number in (*trace.to_dict(), *trace.to_dict()[0])] == [int, int, int]


@pytest.mark.parametrize(
    "passes",
    [
        *([1, 2], 5, {0: 3}, {0: [None]}, {"first": [1]}, "0: [1]", {0: {1: 2}}),
        # Numbers that no training can have.
        *({0: [0]}, {0: [2, -1]}, {0: [2.5]}, {0: "12"}, {-1: [1]}, {0: [True]}),
    ],
    ids=repr,
)
def test_what_is_no_record_is_refused(passes):
    with pytest.raises(ValueError, match="a trace is a dict of epoch -> list of passes") as caught:
        EchoTrace(passes)
    assert repr(passes) in str(caught.value)


def test_an_empty_record_is_one():
    assert EchoTrace({}).to_dict() == EchoTrace(None).to_dict() == EchoTrace().to_dict() == {}
    assert EchoTrace({0: []}).passes_of(0, 0) is None


@pytest.mark.parametrize(
    ("epoch", "fetch", "num_at_once", "expected"),
    [(0, 3, 1, []), (0, 3, 2, [3]), (0, 3, 3, [2, 3]), (0, 1, 4, [1]), (0, 0, 4, []), (1, 3, 2, [])],
)
def test_what_comes_together_with_a_batch_is_what_was_taken_before_it(epoch, fetch, num_at_once, expected):
    assert EchoTrace({0: [1, 2, 3, 4]}).unused(epoch, fetch, num_at_once) == expected


def test_the_mean_factor_counts_every_batch_once():
    assert EchoTrace().mean_factor == 1.0
    assert EchoTrace({0: [4]}).mean_factor == 4.0
    assert EchoTrace({0: [1, 2], 1: [3]}).mean_factor == 2.0


def test_the_mean_factor_is_over_the_latest_hundred_batches():
    # 60 of the latest epoch, 40 of the one before.
    trace = EchoTrace({0: [9] * 50, 1: [7] * 11 + [3] * 40, 2: [2] * 60})
    assert trace.mean_factor == (60 * 2 + 40 * 3) / 100
    assert EchoTrace({0: [9] + [2] * 100}).mean_factor == 2.0
    assert EchoTrace({0: [9] + [2] * 99}).mean_factor > 2.0
