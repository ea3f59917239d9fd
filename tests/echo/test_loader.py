"""A wrapped loader in the place of its loader: what it gives, how long it is, and that all else is the loader's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_gpufeed.echo.loader import REPEATED, EchoLoader
from lightning_gpufeed.echo.plan import AdaptiveEcho, FixedEcho
from tests.echo.hand_loop import (
    Batches,
    HandLoop,
    OwnIterator,
    ResumableBatches,
    Stream,
    UnsizedBatches,
    numbers,
    reader_threads,
)


def wrapped_once(loader: Any, *, factor: int = 1, num_splits: int = 1, **options: Any) -> EchoLoader:
    """A wrapped loader that is not iterated over."""
    return HandLoop(FixedEcho(factor), num_splits).wrap(loader, **options)[0]


def flat(steps: Any) -> list[int]:
    """Samples of all steps, in the order of their use."""
    return [sample for step in steps for sample in step.parts[0]]


# What it gives ---------------------------------------------------------------------------------------------


def test_every_batch_is_followed_by_a_mark_for_each_further_step_on_it():
    with HandLoop(FixedEcho(2), 2) as loop:
        [wrapped] = loop.wrap(Batches(12))
        items = [numbers(item) for item in wrapped]
    assert items == [
        *([0, 1, 2, 3], REPEATED, REPEATED, REPEATED),
        *([4, 5, 6, 7], REPEATED, REPEATED, REPEATED),
        *([8, 9, 10, 11], REPEATED, REPEATED, REPEATED),
    ]


def test_the_mark_is_nothing_that_a_device_or_a_nest_would_look_into():
    assert not hasattr(REPEATED, "to")
    assert not isinstance(REPEATED, tuple | list | dict | torch.Tensor)
    assert repr(REPEATED) == "REPEATED"


def test_batches_are_handed_on_as_they_are():
    batches = [torch.arange(4), {"a": torch.arange(4)}, "anything", None, 3]
    with HandLoop(FixedEcho(1)) as loop:
        [wrapped] = loop.wrap(batches)
        assert all(item is batch for item, batch in zip(wrapped, batches, strict=True))


def test_an_iteration_is_an_iterator_that_ends_for_good():
    with HandLoop(FixedEcho(1)) as loop:
        [wrapped] = loop.wrap(Batches(4))
        iterator = iter(wrapped)
        assert iter(iterator) is iterator
        next(iterator)
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)


def test_a_loader_is_told_again_whose_batch_is_worked_on():
    class Announced(Batches):
        calls = 0

        def on_batch(self) -> None:
            self.calls += 1

    loader = Announced(8)
    with HandLoop(FixedEcho(3)) as loop:
        loop.wrap(loader)
        loop.run_epoch()
    assert loader.calls == 4  # with its batches it says so itself


# How long it is --------------------------------------------------------------------------------------------


LENGTHS = {
    "plain": (lambda: DataLoader(range(12), batch_size=4), 1, 1, 3),
    "echoes": (lambda: DataLoader(range(12), batch_size=4), 3, 1, 9),
    "echoes of pieces": (lambda: DataLoader(range(12), batch_size=4), 2, 2, 12),
    "the last batch has two samples": (lambda: DataLoader(range(10), batch_size=4), 2, 4, 2 * (4 + 4 + 2)),
    "shuffled": (lambda: DataLoader(range(10), batch_size=4, shuffle=True), 2, 4, 2 * (4 + 4 + 2)),
    "without the last batch": (lambda: DataLoader(range(10), batch_size=4, drop_last=True), 2, 4, 2 * (4 + 4)),
    "three samples are enough for two pieces": (lambda: DataLoader(range(11), batch_size=4), 2, 2, 12),
    "the only batch is the last one": (lambda: DataLoader(range(2), batch_size=4), 3, 4, 3 * 2),
    "batches are not made here": (lambda: DataLoader(range(10), batch_size=None), 3, 1, 30),
    "torch's batch sampler": (
        lambda: DataLoader(range(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 4, False)),
        *(1, 4, 4 + 4 + 2),
    ),
    "nobody says how small the last one is": (lambda: DataLoader(range(4), batch_sampler=[[0, 1, 2], [3]]), 1, 3, 6),
    "fewer samples than the dataset has": (
        lambda: DataLoader(range(10), batch_size=4, sampler=RandomSampler(range(10), num_samples=5)),
        *(1, 4, 4 + 1),
    ),
    "a loader of its own": (lambda: Batches(10), 1, 4, 12),
    "nothing": (lambda: [], 3, 2, 0),
    "no samples": (lambda: DataLoader([], batch_size=4), 3, 2, 0),
}


@pytest.mark.parametrize(("make", "factor", "num_splits", "length"), LENGTHS.values(), ids=LENGTHS.keys())
def test_the_length_is_the_number_of_steps_as_far_as_it_is_known(make, factor, num_splits, length):
    assert len(wrapped_once(make(), factor=factor, num_splits=num_splits)) == length


@pytest.mark.parametrize(
    ("size", "batch_size", "drop_last"), [(10, 4, False), (9, 4, False), (10, 4, True), (3, 4, False), (12, 4, False)]
)
@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_the_length_of_torchs_loader_is_right_from_the_beginning(size, batch_size, drop_last, num_splits):
    with HandLoop(FixedEcho(2), num_splits) as loop:
        [wrapped] = loop.wrap(DataLoader(range(size), batch_size=batch_size, drop_last=drop_last))
        length = len(wrapped)
        assert len(loop.run_epoch()) == length
    assert loop.changes == []


def test_a_loader_that_says_how_small_its_last_batch_is_is_believed():
    loader = Batches(9)
    loader.smallest_batch_samples = 1  # type: ignore[attr-defined]
    assert len(wrapped_once(loader, factor=2, num_splits=4)) == 2 * (4 + 4 + 1)


class Endless(IterableDataset):
    """A dataset without length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    "make",
    [lambda: UnsizedBatches(12), lambda: (batch for batch in [1, 2]), lambda: DataLoader(Endless(), batch_size=2)],
    ids=["loader of its own", "generator", "DataLoader"],
)
def test_a_loader_without_length_stays_one(make):
    wrapped = wrapped_once(make())
    assert not wrapped.has_length
    assert wrapped.num_batches is None
    with pytest.raises(TypeError):
        len(wrapped)


def test_whether_an_epoch_is_at_its_end_is_known_from_the_length():
    with HandLoop(FixedEcho(2)) as loop:
        [wrapped] = loop.wrap(Batches(12))
        for _ in range(2):
            loop.begin()
            seen = []
            while loop.step() is not None:
                seen.append(wrapped.is_at_end)
            loop.end()
            assert seen == [False] * 4 + [True] * 2


def test_whether_an_epoch_without_length_is_at_its_end_shows_when_it_is_asked():
    with HandLoop(FixedEcho(1)) as loop:
        [wrapped] = loop.wrap(UnsizedBatches(4))
        iterator = iter(wrapped)
        next(iterator)
        assert not wrapped.is_at_end
        assert next(iterator, None) is None
        assert wrapped.is_at_end


# All else is the loader's own ------------------------------------------------------------------------------


def test_attributes_are_the_loaders_own():
    loader = DataLoader(range(12), batch_size=4, shuffle=True, num_workers=0)
    wrapped = wrapped_once(loader)
    for name in ("dataset", "sampler", "batch_sampler", "batch_size", "num_workers", "drop_last", "collate_fn"):
        assert getattr(wrapped, name) is getattr(loader, name)


@pytest.mark.parametrize("name", ["no_such_thing", "set_epoch", "state_dict", "load_state_dict", "__next__"])
def test_what_the_loader_does_not_have_is_not_there(name):
    wrapped = wrapped_once(Batches(4))
    assert not hasattr(wrapped, name)
    with pytest.raises(AttributeError, match=name):
        getattr(wrapped, name)


def test_an_object_that_was_not_made_yet_has_no_loader_to_ask():
    # As copying and unpickling do.
    with pytest.raises(AttributeError, match="loader"):
        EchoLoader.__new__(EchoLoader).anything  # noqa: B018


def test_what_a_trainer_sets_arrives_at_the_loader():
    loader = DataLoader(range(4))
    wrapped = wrapped_once(loader)
    wrapped.worker_init_fn = print
    assert loader.worker_init_fn is wrapped.worker_init_fn is print
    wrapped._iterator = "an iterator"
    assert loader._iterator == wrapped._iterator == "an iterator"
    wrapped._iterator = None
    assert loader._iterator is None


def test_a_loader_without_these_has_none_of_them_wrapped():
    wrapped = wrapped_once(Batches(4))
    assert not hasattr(wrapped, "_iterator")
    assert not hasattr(wrapped, "worker_init_fn")


def test_a_wrapped_loader_has_a_state_if_and_only_if_its_loader_has_one():
    def has_state(loader: Any) -> bool:
        wrapped = wrapped_once(loader)
        return hasattr(wrapped, "state_dict") and hasattr(wrapped, "load_state_dict")

    class OnlySaves(Batches):
        def state_dict(self) -> dict[str, int]:
            return {}

    assert has_state(ResumableBatches(4))
    assert not has_state(Batches(4))
    assert not has_state(OnlySaves(4))
    assert not has_state(DataLoader(range(4)))


def test_a_state_that_is_loaded_arrives_at_the_loader():
    loader = ResumableBatches(12)
    with HandLoop(FixedEcho(1)) as loop:
        [wrapped] = loop.wrap(loader)
        wrapped.load_state_dict({"epoch": 5, "batches": 1})
        assert loader.state_dict() == wrapped.state_dict() == {"epoch": 5, "batches": 1}
        assert len(list(wrapped)) == 2


# Refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [DataLoader(range(12), batch_size=4), Batches(12)], ids=["DataLoader", "Batches"])
def test_more_pieces_than_samples_in_a_batch_are_refused(loader):
    with pytest.raises(ValueError, match="num_splits is 5; expected at most the") as caught:
        wrapped_once(loader, num_splits=5)
    assert str(caught.value) == f"num_splits is 5; expected at most the {type(loader).__name__}'s batch_size, 4."
    assert len(wrapped_once(loader, num_splits=4)) == 12


def test_a_loader_that_does_not_say_its_batch_size_is_taken_at_its_word():
    assert wrapped_once([torch.arange(4)], num_splits=5).samples_per_batch is None
    assert wrapped_once(DataLoader(range(4), batch_size=None), num_splits=5).samples_per_batch is None


def test_a_batch_that_cannot_be_cut_is_refused_when_it_is_fetched():
    batch = {"image": torch.rand(4, 2), "boxes": torch.rand(5, 4)}
    with HandLoop(FixedEcho(1), 2) as loop:
        loop.wrap([batch])
        loop.begin()
        with pytest.raises(ValueError, match=r"num_splits is 2, but the samples of this batch cannot be told apart"):
            loop.ask()


# Epoch after epoch -----------------------------------------------------------------------------------------

LOADERS = {
    "list": lambda: [torch.arange(first, first + 4) for first in range(0, 12, 4)],
    "DataLoader": lambda: DataLoader(range(12), batch_size=4),
    "loader of its own": lambda: Batches(12),
    "without length": lambda: UnsizedBatches(12),
    "its own iterator": lambda: OwnIterator(12),
}
in_every_way = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())


@in_every_way
@pytest.mark.parametrize("is_uninterrupted", [True, False])
@pytest.mark.parametrize("can_read_ahead", [True, False])
@pytest.mark.parametrize("rule", [FixedEcho(2), AdaptiveEcho(1)], ids=repr)
def test_every_epoch_has_every_batch(make, is_uninterrupted, can_read_ahead, rule):
    with HandLoop(rule) as loop:
        loop.wrap(make(), is_uninterrupted=is_uninterrupted, can_read_ahead=can_read_ahead)
        for _ in range(3):
            steps = loop.run_epoch()
            assert sorted(flat(steps)) == sorted(list(range(12)) * rule.usual_passes)
            assert [sorted(step.parts[0]) for step in steps if step.piece.is_fetch] == [
                [0, 1, 2, 3],
                [4, 5, 6, 7],
                [8, 9, 10, 11],
            ]
    assert reader_threads() == []


@in_every_way
@pytest.mark.parametrize("is_uninterrupted", [True, False])
def test_after_an_epoch_that_was_left_early_the_next_one_begins_at_its_start(make, is_uninterrupted):
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(make(), is_uninterrupted=is_uninterrupted)
        for limit in (3, 1, None):
            steps = loop.run_epoch(limit)
            assert sorted(steps[0].parts[0]) == [0, 1, 2, 3]
        assert len(steps) == 6


def test_a_stream_loses_no_batch_between_epochs_that_are_cut_short():
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(Stream(40), is_uninterrupted=False)
        fetched = [sorted(step.parts[0])[0] for limit in (4, 4, 6) for step in loop.run_epoch(limit)[::2]]
    assert fetched == list(range(0, 28, 4))


def test_a_stream_loses_no_batch_where_the_number_of_batches_of_an_epoch_is_known():
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(Stream(40), limit=4, is_uninterrupted=True)
        fetched = [sorted(step.parts[0])[0] for _ in range(3) for step in loop.run_epoch(4)[::2]]
    assert fetched == list(range(0, 24, 4))


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_workers_feed_several_epochs(persistent_workers, num_splits):
    loader = DataLoader(range(12), batch_size=4, num_workers=1, persistent_workers=persistent_workers)
    with HandLoop(FixedEcho(2), num_splits) as loop:
        loop.wrap(loader)
        for limit in (None, 3, None):  # one of them left early
            steps = loop.run_epoch(limit)
            assert set(steps[0].parts[0]) <= {0, 1, 2, 3}
            if limit is None:
                assert sorted(flat(steps)) == sorted([*range(12), *range(12)])
    if persistent_workers:  # else they ended with their epoch
        loader._iterator._shutdown_workers()


def test_a_worker_that_fails_is_heard_of_after_the_batches_before(monkeypatch):
    # A worker that failed does not end when it is told to: torch waits for it so long, and then ends it.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)

    def fail_at_eight(samples: list[int]) -> torch.Tensor:
        if 8 in samples:
            raise ValueError("sample 8 is bad")
        return torch.tensor(samples)

    loader = DataLoader(range(12), batch_size=4, num_workers=1, collate_fn=fail_at_eight)
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(loader)
        loop.begin()
        for _ in range(4):
            loop.step()
        with pytest.raises(ValueError, match="sample 8 is bad"):
            loop.step()
    gc.collect()  # torch keeps the error in a cycle with the frames that the workers hang on


def test_one_warning_is_enough_for_a_loader_that_is_not_read_ahead():
    class Drawing:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> float:
            return index + torch.rand(1).item()

    def draw_between(loop: HandLoop) -> None:
        loop.begin()
        while loop.step() is not None:
            torch.rand(1)
        loop.end()

    with HandLoop(AdaptiveEcho(5)) as loop:
        loop.wrap(DataLoader(Drawing(), batch_size=4))
        with pytest.warns(UserWarning, match="draws random numbers") as caught:
            draw_between(loop)
        draw_between(loop)  # another warning would be an error
        assert reader_threads() == []
    assert len(caught) == 1
    assert [step.piece.is_echo for step in loop.steps] == [False] * 6


def test_closing_ends_the_thread_and_the_loader_can_be_used_again():
    with HandLoop(FixedEcho(1)) as loop:
        [wrapped] = loop.wrap(DataLoader(range(40), batch_size=4))
        loop.begin()
        loop.step()
        assert len(reader_threads()) == 1
        wrapped.close()
        wrapped.close()
        assert reader_threads() == []
        loop.end()
        assert len(loop.run_epoch()) == 10
