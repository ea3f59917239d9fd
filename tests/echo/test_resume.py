"""What another training left open, and which state each loader goes on from, under every combination of rules."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpufeed.echo.loader import EchoLoader
from lightning_gpufeed.echo.plan import AdaptiveEcho, EchoRule, EchoTrace, FixedEcho, Piece, ReplayedEcho
from lightning_gpufeed.echo.position import Ending, Place, Round
from lightning_gpufeed.echo.resume import SavedRun, read_trace
from tests.echo.hand_loop import Batches, HandLoop, ResumableBatches

FETCH = 4
ROUND = Round(FETCH, 2, 2, smallest=8, before=["before 4"], begun=[True], after=["after 4"])
IN_THE_MIDDLE = Place(Piece(FETCH, 1, 1, is_fetch=False), ROUND)
FETCHED_ONLY = Place(Piece(FETCH), ROUND)
NEXT_BATCH = Place(Piece(FETCH + 1), ROUND)
OPEN = Place(Piece(FETCH, 2, 0, is_fetch=False), ROUND, is_decided=False)

FIXED = FixedEcho(3)
ADAPTIVE = AdaptiveEcho(5)
AT_ITS_LIMIT = AdaptiveEcho(2)
REPLAY_MORE = ReplayedEcho(EchoTrace({0: [1] * FETCH + [3, 1]}), ADAPTIVE)
REPLAY_NO_MORE = ReplayedEcho(EchoTrace({0: [1] * FETCH + [2, 1]}), ADAPTIVE)
REPLAY_ENDED = ReplayedEcho(EchoTrace({0: [1] * FETCH}), ADAPTIVE)
REPLAY_ENDS_HERE = ReplayedEcho(EchoTrace({0: [1] * FETCH + [2]}), ADAPTIVE)
REPLAY_OPEN_HERE = ReplayedEcho(EchoTrace({0: [1] * FETCH + [2]}), ADAPTIVE)
REPLAY_OPEN_HERE.trace.open_batch = (0, FETCH)
RULES = [FIXED, ADAPTIVE, AT_ITS_LIMIT, REPLAY_MORE, REPLAY_NO_MORE, REPLAY_ENDED, REPLAY_ENDS_HERE, REPLAY_OPEN_HERE]


def named(value: Any) -> str:
    """Name a rule by what it is and a place by where it is."""
    if isinstance(value, ReplayedEcho):
        return f"Replayed{value.trace.to_dict()[0][FETCH:]}{'open' if value.trace.open_batch else ''}"
    return repr(value.piece) + ("" if value.is_decided else " open") if isinstance(value, Place) else repr(value)


class TakesAnyState:
    """A loader that notes the state it is given."""

    batch_size = 8

    def __init__(self) -> None:
        self.given: Any = None

    def __len__(self) -> int:
        return 100

    def state_dict(self) -> Any:
        return self.given

    def load_state_dict(self, state_dict: Any) -> None:
        self.given = state_dict


class CountsItself(TakesAnyState):
    """A loader that says how many batches of its own size are behind its state."""

    class Position:
        steps_done = 7

    position = Position()


def saved(
    place: Place | None, rule: EchoRule, *, epoch: int = 0, ending: Ending | None = None, num_ranks: int = 1
) -> SavedRun:
    """Save a place and load it again, through a file as torch reads it by default."""
    state = {
        "place": None if place is None else place.to_dict(),
        "ending": asdict(ending or Ending()),
        "epoch": epoch,
        "settings": [[rule.usual_passes, 2, 8, num_ranks]],
        "num_steps": 19,
        "extra_steps": 2,
    }
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return SavedRun(torch.load(file, weights_only=True), rule)


def continue_with(run: SavedRun, rule: EchoRule, *loaders: Any, num_splits: int = 2) -> list[EchoLoader]:
    with HandLoop(rule, num_splits) as loop:
        for wrapped in loop.wrap(*loaders):
            run.continue_loader(wrapped)
    return loop.wrapped


def shown(run: SavedRun, rule: EchoRule) -> tuple[tuple[int, int, int], int, Any]:
    """First step, passes counted, state of the loader."""
    loader = TakesAnyState()
    continue_with(run, rule, loader)
    assert run.piece is not None
    return (run.piece.fetch, run.piece.pass_index, run.piece.piece_index), run.num_counted, loader.given


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_inside_a_batch_it_is_fetched_again_and_gone_on_with(rule):
    assert shown(saved(IN_THE_MIDDLE, rule), rule) == ((4, 1, 1), 2, "before 4")


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_a_batch_that_was_fetched_and_not_used_comes_again(rule):
    counted = 1 if rule.known_passes(0, FETCH) is None else 2  # a second pass is not certain any more
    assert shown(saved(FETCHED_ONLY, rule), rule) == ((4, 0, 0), counted, "before 4")


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_after_a_batch_the_next_one_is_begun(rule):
    assert shown(saved(NEXT_BATCH, rule), rule) == ((5, 0, 0), 0, "after 4")


@pytest.mark.parametrize("place", [IN_THE_MIDDLE, FETCHED_ONLY, NEXT_BATCH, OPEN], ids=named)
@pytest.mark.parametrize("rule", RULES, ids=named)
def test_the_first_step_comes_with_a_fetch(place, rule):
    run = saved(place, rule)
    assert run.piece is not None
    assert run.piece.is_fetch


@pytest.mark.parametrize("rule", [FIXED, REPLAY_MORE], ids=named)
def test_what_was_left_open_goes_on_with_the_batch_if_the_new_rule_says_so(rule):
    assert shown(saved(OPEN, rule), rule) == ((4, 2, 0), 2, "before 4")


@pytest.mark.parametrize("rule", [FixedEcho(2), AT_ITS_LIMIT, REPLAY_NO_MORE, REPLAY_ENDS_HERE], ids=named)
def test_what_was_left_open_goes_on_with_the_next_batch_if_the_new_rule_says_so(rule):
    assert shown(saved(OPEN, rule), rule) == ((5, 0, 0), 0, "after 4")


@pytest.mark.parametrize("rule", [ADAPTIVE, REPLAY_ENDED, REPLAY_OPEN_HERE], ids=named)
def test_where_only_readiness_would_decide_a_new_batch_is_begun(rule):
    assert shown(saved(OPEN, rule), rule) == ((5, 0, 0), 0, "after 4")


def test_a_record_of_another_epoch_decides_nothing():
    assert shown(saved(OPEN, REPLAY_MORE, epoch=1), REPLAY_MORE)[0] == (5, 0, 0)


def test_steps_that_were_done_are_kept_inside_an_epoch_only():
    assert (saved(IN_THE_MIDDLE, FIXED).num_steps, saved(IN_THE_MIDDLE, FIXED).extra_steps) == (19, 2)
    assert saved(None, FIXED).num_steps is None


def test_what_is_taken_of_a_state_does_not_change_it():
    state = {"place": NEXT_BATCH.to_dict(), "ending": asdict(Ending()), "epoch": 0, "settings": [[3, 2, 8, 1]]}
    state |= {"num_steps": 19, "extra_steps": 0}
    for _ in range(2):
        assert shown(SavedRun(state, FIXED), FIXED)[2] == "after 4"


def test_every_loader_gets_its_own_state():
    states = {name: [f"a {name}", f"b {name}"] for name in ("before", "after")}
    for piece, given in ((Piece(FETCH, 1), states["before"]), (Piece(FETCH + 1), states["after"])):
        run = saved(Place(piece, Round(FETCH, num_pieces=2, begun=[True, True], **states)), FIXED)
        loaders = [TakesAnyState(), TakesAnyState()]
        continue_with(run, FIXED, *loaders)
        assert [loader.given for loader in loaders] == given


def test_passes_that_were_certain_and_are_not_any_more_are_not_counted():
    # Three passes were certain, the second one is under way; by need there may be no third.
    round_ = Round(FETCH, 3, 2, before=["before 4"], begun=[True], after=["after 4"])
    run = saved(Place(Piece(FETCH, 1, 0, is_fetch=False), round_), ADAPTIVE)
    assert (run.num_counted, run.extra_steps) == (2, 2 - 1 * 2)
    run = saved(Place(Piece(FETCH, 1, 0, is_fetch=False), round_), REPLAY_MORE)
    assert (run.num_counted, run.extra_steps) == (3, 2)


def test_another_number_of_ranks_begins_a_batch_anew():
    # Each of them has other batches now.
    run = saved(IN_THE_MIDDLE, FIXED, num_ranks=2)
    continue_with(run, FIXED, TakesAnyState())
    assert run.piece == Piece(4)


@pytest.mark.parametrize(
    ("rule", "num_splits"), [(FixedEcho(2), 2), (FIXED, 4)], ids=["another factor", "another number of pieces"]
)
def test_a_batch_that_is_used_in_another_way_now_is_begun_anew(rule, num_splits):
    run, loader = saved(IN_THE_MIDDLE, FIXED), TakesAnyState()
    continue_with(run, rule, loader, num_splits=num_splits)
    assert loader.given == "before 4"
    assert run.piece == Piece(4)
    assert (run.num_steps, run.extra_steps) == (4 * rule.factor * num_splits, 0)


def test_a_loader_that_cuts_its_epoch_in_another_way_now_goes_on_with_its_own_count():
    run = saved(IN_THE_MIDDLE, FIXED)
    continue_with(run, FIXED, CountsItself())
    assert run.piece == Piece(7)
    assert (run.num_steps, run.extra_steps) == (7 * 3 * 2, 0)


def test_the_end_of_an_epoch_is_handed_to_the_loader_to_begin_after():
    ending = Ending(["a at the end", "b cut short"], is_at_end=[True, False])
    run, loaders = saved(None, FIXED, ending=ending), [TakesAnyState(), TakesAnyState()]
    wrapped = continue_with(run, FIXED, *loaders)
    assert [loader.given for loader in loaders] == ["a at the end", "b cut short"]
    assert [loader.begin_after for loader in wrapped] == [True, False]
    assert run.piece is None


def test_an_iteration_that_had_not_begun_is_begun_after_the_epoch_before():
    # The state of a loader that is a generator is still that of the epoch before its first batch comes.
    round_ = Round(0, 3, 2, before=["of the epoch before"], begun=[False], after=["after 0"])
    ending = Ending(["at the end"], is_at_end=[True])
    run, loader = saved(Place(Piece(0, 1), round_), FIXED, ending=ending), TakesAnyState()
    [wrapped] = continue_with(run, FIXED, loader)
    assert loader.given == "at the end"
    assert wrapped.begin_after is True
    assert run.piece == Piece(0, 1)


def test_an_iteration_that_had_not_begun_in_the_first_epoch_begins_as_a_new_loader_does():
    round_ = Round(0, 3, 2, before=["of no epoch"], begun=[False], after=["after 0"])
    run, loader = saved(Place(Piece(0, 1), round_), FIXED), TakesAnyState()
    [wrapped] = continue_with(run, FIXED, loader)
    assert loader.given is None
    assert wrapped.begin_after is None


@pytest.mark.parametrize(
    ("make", "before"),
    [
        (lambda: Batches(3), "before 4"),
        (lambda: object(), "before 4"),
        (lambda: ResumableBatches(9), None),  # the other training's loader had no state
    ],
    ids=["loader without state", "no loader at all", "no state"],
)
def test_a_loader_that_cannot_continue_is_named_in_one_line_and_keeps_its_place_in_the_epoch(make, before):
    loader = make()
    run = saved(Place(Piece(FETCH, 1, 1), Round(FETCH, 2, 2, before=[before], begun=[True], after=[None])), FIXED)
    with pytest.warns(UserWarning, match="continue with") as caught:
        continue_with(run, FIXED, loader)
    assert [str(warning.message) for warning in caught] == [
        f"BatchEcho: the run was saved inside an epoch, but {type(loader).__name__} has no state_dict and "
        "load_state_dict to continue with: the rest of this epoch uses its first batches again."
    ]
    assert run.piece is not None
    assert run.piece.fetch == FETCH


def test_between_epochs_nothing_has_to_be_continued_so_nothing_is_said():
    run = saved(None, FIXED)
    [wrapped] = continue_with(run, FIXED, Batches(3))
    assert (run.piece, wrapped.begin_after) == (None, None)


# The record of a checkpoint --------------------------------------------------------------------------------


def write_checkpoint(path: Path, state: Any) -> Path:
    torch.save({"callbacks": {"BatchEcho": state}}, path)
    return path


def test_a_record_is_read_as_it_is_given():
    trace = read_trace({0: [1, 2]}, "BatchEcho")
    assert trace == EchoTrace({0: [1, 2]})
    assert trace.open_batch is None


@pytest.mark.parametrize("as_text", [False, True])
def test_the_record_of_a_checkpoint_is_open_where_it_was_taken(tmp_path, as_text):
    state = {"trace": {0: [1, 2]}, "epoch": 0, "place": IN_THE_MIDDLE.to_dict()}
    path = write_checkpoint(tmp_path / "middle.ckpt", state)
    trace = read_trace(str(path) if as_text else path, "BatchEcho")
    assert trace == EchoTrace({0: [1, 2]})
    assert trace.open_batch == (0, FETCH)


def test_the_record_of_a_checkpoint_between_epochs_is_exact(tmp_path):
    path = write_checkpoint(tmp_path / "end.ckpt", {"trace": {0: [1, 2]}, "epoch": 0, "place": None})
    assert read_trace(path, "BatchEcho").open_batch is None


@pytest.mark.parametrize("state", [None, {}])
def test_a_checkpoint_without_echoes_is_refused(tmp_path, state):
    path = write_checkpoint(tmp_path / "other.ckpt", state)
    with pytest.raises(ValueError, match=r"other\.ckpt', a checkpoint without the echoes of a BatchEcho to repeat"):
        read_trace(path, "BatchEcho")
    with pytest.raises(ValueError, match="without the echoes"):
        read_trace(path, "another key")
