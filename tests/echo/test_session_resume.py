"""A training that is stopped and continued is on the same samples in the same order as one that was not, from any step.

Each case runs once to the end and is saved after every step, in the middle of every step and between the epochs. Then
it is continued from each of these states with new loaders, and has to go on exactly as the first run did.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lightning_gpufeed.echo.plan import AdaptiveEcho, EchoRule, EchoTrace, FixedEcho, ReplayedEcho
from tests.doubles import WAIT_SECONDS
from tests.echo.hand_loop import (
    Batches,
    HandLoop,
    Mode,
    ResumableBatches,
    Step,
    UnsizedResumableBatches,
    reader_threads,
    wait_until,
)


class BegunLate(ResumableBatches):
    """A loader whose `__iter__` is a generator: nothing of it runs before the first batch is asked for."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class BeginsByItself(ResumableBatches):
    """A loader that knows that a finished epoch is followed by the next one."""

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        super().load_state_dict(state_dict)
        self.is_loaded = self.position < len(self)


class OwnResumableIterator(ResumableBatches):
    """A loader that is its own iterator."""

    def __iter__(self) -> Any:
        self.rest = super().__iter__()
        return self

    def __next__(self) -> Any:
        return next(self.rest)


class ReadyByItself(ResumableBatches):
    """A loader that reads ahead by itself, so that no thread of ours does."""

    def is_ready(self) -> bool:
        return True


class ChangesItsState(ResumableBatches):
    """A loader whose state is one and the same dict all the time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        self.state.update(super().state_dict())
        return self.state


class ToldWhatIsInWork(ReadyByItself):
    """A loader that says by itself that its latest batch has to come again, if it is told that it is in work."""

    is_latest_in_work: Callable[[], bool] | None = None

    def state_dict(self) -> dict[str, int]:
        assert self.is_latest_in_work is not None
        return {"epoch": self.epoch, "batches": self.position - (self.is_latest_in_work() and self.position > 0)}


@dataclass
class Case:
    """A training, and how much of each epoch it does."""

    rule: EchoRule
    num_splits: int = 1
    make: Callable[[], list[Any]] = lambda: [ResumableBatches(10)]
    mode: Mode = "min_size"
    limit: int | None = None
    is_asking_ahead: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    num_epochs: int = 2

    def loop(self) -> HandLoop:
        """A loop for it."""
        return HandLoop(self.rule, self.num_splits, mode=self.mode, limit=self.limit)


REPLAYED = ReplayedEcho(EchoTrace({0: [3, 1, 2], 1: [1, 1, 4], 2: [2, 2, 2]}), AdaptiveEcho(9))
CASES = {
    "plain": Case(FixedEcho(1)),
    "echoes": Case(FixedEcho(2)),
    "pieces": Case(FixedEcho(1), 2),
    "echoes of pieces": Case(FixedEcho(2), 2, num_epochs=3),
    "a last batch with fewer samples than pieces": Case(FixedEcho(2), 4),
    "three loaders": Case(
        FixedEcho(2), 2, lambda: [ResumableBatches(10), ResumableBatches(18, 8), ResumableBatches(12)]
    ),
    "the shortest loader ends it": Case(FixedEcho(2), 2, lambda: [ResumableBatches(16), ResumableBatches(10)]),
    "the shorter loader begins again": Case(
        FixedEcho(2), 2, lambda: [ResumableBatches(10), ResumableBatches(28)], "max_size_cycle"
    ),
    "the shorter loader begins again and comes last": Case(
        FixedEcho(2), 2, lambda: [ResumableBatches(28), ResumableBatches(10)], "max_size_cycle"
    ),
    "the shorter loader ends before": Case(
        FixedEcho(2), 2, lambda: [ResumableBatches(10), ResumableBatches(28)], "max_size"
    ),
    "without length": Case(FixedEcho(2), 2, lambda: [UnsizedResumableBatches(10)], num_epochs=3),
    "without length, asked one step ahead": Case(
        FixedEcho(2), 2, lambda: [UnsizedResumableBatches(10)], is_asking_ahead=True
    ),
    "epochs are cut short between batches": Case(FixedEcho(2), 2, limit=4),
    "epochs are cut short in the middle of a batch": Case(FixedEcho(2), 2, limit=6),
    "a loader that begins late": Case(FixedEcho(2), 2, lambda: [BegunLate(10)]),
    "a loader that begins late, cut short": Case(FixedEcho(2), 2, lambda: [BegunLate(10)], limit=6),
    "a loader that begins the next epoch by itself": Case(FixedEcho(2), 2, lambda: [BeginsByItself(10)]),
    "a loader that is its own iterator": Case(FixedEcho(2), 2, lambda: [OwnResumableIterator(10)]),
    "a loader that reads ahead by itself": Case(FixedEcho(2), 2, lambda: [ReadyByItself(10)]),
    "a loader that is told what is in work": Case(FixedEcho(2), 2, lambda: [ToldWhatIsInWork(10)]),
    "a loader that is told what is in work, asked one step ahead": Case(
        FixedEcho(2), 2, lambda: [ToldWhatIsInWork(10)], is_asking_ahead=True
    ),
    "a loader that changes its state": Case(FixedEcho(2), 2, lambda: [ChangesItsState(10)]),
    "a loader that is not read ahead": Case(FixedEcho(2), 2, options={"can_read_ahead": False}),
    "replayed": Case(REPLAYED),
    "replayed pieces": Case(REPLAYED, 2, num_epochs=3),
    "replayed without length": Case(REPLAYED, 2, lambda: [UnsizedResumableBatches(10)]),
    "replayed and cut short": Case(REPLAYED, 2, limit=5),
}


@dataclass
class Saved:
    """A state of a training, and how many steps of the whole run were done before it."""

    when: str
    num_steps: int
    file: bytes


def save(loop: HandLoop, when: str) -> Saved:
    file = io.BytesIO()
    state = {"session": loop.session.state_dict(), "num_epochs": loop.epoch + loop.is_over}
    torch.save(state, file)
    return Saved(f"{when} after {len(loop.steps)} steps", len(loop.steps), file.getvalue())


def run_on(loop: HandLoop, case: Case, on_point: Callable[[str], None] = lambda when: None) -> None:
    """Train to the end, and say at which points a training may be saved."""
    while loop.epoch < case.num_epochs:
        loop.begin()
        items = loop.ask() if case.limit is None or loop.num_processed < case.limit else None
        while items is not None:
            on_point("asked for")
            piece = loop.arm(items)
            items = loop.ask() if case.is_asking_ahead else None
            on_point("in the middle of a step")
            loop.train_on(piece)
            loop.is_over |= case.is_asking_ahead and items is None
            on_point("in the epoch")
            if not case.is_asking_ahead and not loop.is_over:
                items = loop.ask()
        loop.is_over = True
        on_point("at the end of the epoch")
        loop.end()
        on_point("between the epochs")


def states_of(case: Case) -> tuple[list[Step], list[Saved]]:
    """All steps of an uninterrupted run, and all states that it was saved in."""
    saved: list[Saved] = []
    with case.loop() as loop:
        loop.wrap(*case.make(), **case.options)
        run_on(loop, case, lambda when: saved.append(save(loop, when)))
    return loop.steps, saved


def continued(saved: Saved, case: Case) -> list[Step]:
    """The steps of a run that begins in a saved state."""
    state = torch.load(io.BytesIO(saved.file), weights_only=True)  # what torch reads by default
    with case.loop() as loop:
        loop.resume(state["session"], *case.make(), **case.options)
        # An epoch that is over is not begun again: who drives the loop knows.
        if state["session"]["place"] is None:
            loop.epoch = state["num_epochs"]
        run_on(loop, case)
    return loop.steps


def without_fetches(steps: list[Step]) -> list[tuple[int, tuple[int, int, int], list[Any]]]:
    """Where a run begins, a batch is fetched that was not fetched there in the first run; all else is equal."""
    return [(epoch, (piece.fetch, piece.pass_index, piece.piece_index), parts) for epoch, piece, parts in steps]


@pytest.mark.parametrize("name", CASES)
def test_from_any_point_a_run_goes_on_as_the_one_that_was_not_interrupted(name):
    case = CASES[name]
    steps, states = states_of(case)
    assert len(states) > len(steps)
    wrong = [
        saved.when
        for saved in states
        if without_fetches(continued(saved, case)) != without_fetches(steps)[saved.num_steps :]
    ]
    assert wrong == []
    assert reader_threads() == []


@pytest.mark.parametrize("name", ["echoes of pieces", "replayed pieces", "without length", "replayed and cut short"])
def test_a_continued_run_records_and_counts_what_the_whole_run_does(name):
    case = CASES[name]

    def to_the_end(loop: HandLoop) -> tuple[Any, ...]:
        counts = []

        def note(when: str) -> None:
            if when == "at the end of the epoch":
                has_length = loop.wrapped[0].has_length
                counts.append(loop.session.measures.counts())
                if has_length and case.limit is None:
                    assert len(loop.wrapped[0]) == loop.num_processed

        run_on(loop, case, note)
        return counts[-1], loop.session.trace.to_dict()

    with case.loop() as whole:
        whole.wrap(*case.make())
        expected = to_the_end(whole)
    for saved in states_of(case)[1]:
        state = torch.load(io.BytesIO(saved.file), weights_only=True)
        if state["num_epochs"] == case.num_epochs:
            continue
        with case.loop() as loop:
            loop.resume(state["session"], *case.make())
            if state["session"]["place"] is None:
                loop.epoch = state["num_epochs"]
            assert to_the_end(loop) == expected, saved.when


@pytest.mark.parametrize("num_splits", [1, 2])
def test_the_loaders_own_state_is_right_for_a_run_without_echoes(num_splits):
    # It is before the batch that is worked on, or after the last one that was: nothing is lost.
    loader = ResumableBatches(12)
    with HandLoop(FixedEcho(2), num_splits) as loop:
        [wrapped] = loop.wrap(loader)
        loop.begin()
        for number in range(1, 3 * 2 * num_splits):
            loop.step()
            wait_until(wrapped.is_ready)  # the loader itself is one batch further
            in_work, rest = divmod(number, 2 * num_splits)
            assert wrapped.state_dict() == {"epoch": 0, "batches": in_work}
            plain = ResumableBatches(12)
            plain.load_state_dict(wrapped.state_dict())
            assert len(list(plain)) == 3 - in_work
            assert rest < 2 * num_splits


def test_a_resumed_run_asks_its_loader_for_no_more_than_is_left_of_the_epoch():
    # As in a run that was not interrupted: what is asked for after the last batch may change the loader.
    class NotesItsEnd(ResumableBatches):
        is_over = False

        def _rest(self) -> Iterator[Any]:
            yield from super()._rest()
            self.is_over = True

    _, states = states_of(CASES["echoes"])
    for saved in states:
        state = torch.load(io.BytesIO(saved.file), weights_only=True)
        loader = NotesItsEnd(10)
        with HandLoop(FixedEcho(2)) as loop:
            loop.resume(state["session"], loader)
            if state["session"]["place"] is None:
                continue  # the end of a finished epoch has to be found
            loop.begin()
            while not loop.is_over:
                loop.step()
            for thread in reader_threads():
                thread.join(WAIT_SECONDS)  # it ends by itself
        assert not loader.is_over, saved.when


def test_with_echoes_by_need_a_resumed_run_begins_the_next_batch():
    # Whether the next one is ready cannot be asked any more.
    with HandLoop(AdaptiveEcho(3)) as loop:
        loop.wrap(ResumableBatches(12))
        loop.begin()
        loop.step()
        saved = save(loop, "after the first pass")
    case = Case(AdaptiveEcho(3), make=lambda: [ResumableBatches(12)])
    first = continued(saved, case)[0]
    assert (first.piece.fetch, first.piece.pass_index) == (1, 0)
    assert sorted(first.parts[0]) == sorted(list(ResumableBatches(12))[1].tolist())


def test_another_factor_begins_the_batch_anew():
    steps, states = states_of(CASES["echoes of pieces"])
    saved = next(state for state in states if state.when == "in the epoch after 5 steps")
    other = Case(FixedEcho(3), 2)
    resumed = continued(saved, other)
    assert steps[4].piece.fetch == resumed[0].piece.fetch == 1
    assert [step.piece.pass_index for step in resumed[:6]] == [0, 0, 1, 1, 2, 2]
    assert sorted(resumed[0].parts[0] + resumed[1].parts[0]) == sorted(steps[4].parts[0] + steps[5].parts[0])


def test_a_loader_that_cannot_continue_uses_its_first_batches_again_with_one_warning():
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(Batches(12))
        loop.begin()
        for _ in range(3):
            loop.step()
        saved = save(loop, "in the middle")
    with pytest.warns(UserWarning, match="Batches has no state_dict and load_state_dict to continue with") as caught:
        resumed = continued(saved, Case(FixedEcho(2), make=lambda: [Batches(12)]))
    assert len(caught) == 1
    # Three steps were left, one of them on a batch that was begun.
    assert [sorted(step.parts[0])[0] for step in resumed if step.epoch == 0] == [0, 4, 4]


def test_between_the_epochs_a_loader_without_state_needs_none():
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(Batches(12))
        loop.run_epoch()
        saved = save(loop, "after an epoch")
    with warnings.catch_warnings(action="error"):
        resumed = continued(saved, Case(FixedEcho(2), make=lambda: [Batches(12)], num_epochs=3))
    assert [step.epoch for step in resumed] == [1] * 6 + [2] * 6


def test_a_state_of_another_version_is_refused():
    with HandLoop(FixedEcho(2)) as loop:
        state = loop.session.state_dict()
        for version in (0, None, "1"):
            with pytest.raises(ValueError, match=f"the state has version {version!r}; expected 1"):
                loop.session.load_state_dict({**state, "version": version})


def test_a_state_says_which_numbers_it_is_of():
    with HandLoop(FixedEcho(2), 2) as loop:
        loop.wrap(ResumableBatches(12))
        loop.begin()
        for _ in range(6):
            loop.step()
        state = loop.session.state_dict()
    assert state["place"] == {
        **{"fetch": 1, "pass_index": 1, "piece_index": 0, "num_pieces": 2, "num_counted": 2},
        **{"is_decided": True, "needs_batch_again": True},
        **{"before": [{"epoch": 0, "batches": 1}], "begun": [True], "after": []},
    }
    assert (state["epoch"], state["num_steps"], state["trace"]) == (0, 6, {0: [2, 1]})
