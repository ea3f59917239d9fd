"""Which epoch an iteration is, and where in it: every way that loops and trainers use a loader."""

from __future__ import annotations

from lightning_gpufeed.hdf5.position import EpochPosition


def place(position: EpochPosition) -> tuple[int, int, int]:
    return position.epoch, position.samples_consumed, position.steps_done


def run(position: EpochPosition, *, steps: int, is_over: bool = False) -> int:
    """Begin an iteration and take so many steps of ten samples; give where it began."""
    start = position.begin(is_over)
    for _ in range(steps):
        position.advance(10)
    return start


def test_epochs_count_up_by_themselves():
    position = EpochPosition()
    seen = []
    for _ in range(3):
        assert run(position, steps=4) == 0
        seen.append(place(position))
    assert seen == [(0, 40, 4), (1, 40, 4), (2, 40, 4)]


def test_a_loop_that_was_left_early_is_followed_by_the_next_epoch():
    position = EpochPosition()
    run(position, steps=1)
    assert run(position, steps=0) == 0
    assert place(position) == (1, 0, 0)


def test_an_epoch_that_is_set_begins_at_its_start():
    position = EpochPosition()
    position.set_epoch(7)
    assert run(position, steps=2) == 0
    assert place(position) == (7, 20, 2)


def test_setting_the_epoch_that_runs_starts_it_again():
    position = EpochPosition()
    run(position, steps=2)
    position.set_epoch(0)
    assert run(position, steps=1) == 0
    assert place(position) == (0, 10, 1)


def test_setting_the_epoch_of_a_loaded_position_keeps_the_position():
    # Lightning loads the state first and sets the epoch afterwards.
    position = EpochPosition()
    position.load(3, 40, 4)
    position.set_epoch(3)
    assert run(position, steps=1) == 40
    assert place(position) == (3, 50, 5)


def test_setting_another_epoch_than_the_loaded_one_starts_that():
    position = EpochPosition()
    position.load(3, 40, 4)
    position.set_epoch(4)
    assert run(position, steps=1) == 0
    assert place(position) == (4, 10, 1)


def test_setting_the_same_epoch_twice_is_setting_it_once():
    position = EpochPosition()
    position.load(3, 40, 4)
    position.set_epoch(3)
    position.set_epoch(3)
    assert position.begin(is_over=False) == 40


def test_a_loaded_epoch_that_is_over_is_followed_by_the_next():
    position = EpochPosition()
    position.load(2, 100, 10)
    assert run(position, steps=1, is_over=True) == 0
    assert place(position) == (3, 10, 1)


def test_a_loaded_epoch_that_is_over_and_is_set_again_has_nothing_left():
    position = EpochPosition()
    position.load(2, 100, 10)
    position.set_epoch(2)
    assert run(position, steps=0, is_over=True) == 100
    assert place(position) == (2, 100, 10)
    assert run(position, steps=0) == 0
    assert position.epoch == 3


def test_loading_while_an_epoch_runs_holds_for_the_next_iteration():
    position = EpochPosition()
    run(position, steps=2)
    position.load(5, 30, 3)
    assert run(position, steps=1) == 30
    assert place(position) == (5, 40, 4)


def test_steps_count_batches_and_samples_count_all_ranks():
    position = EpochPosition()
    position.begin(is_over=False)
    position.advance(64)
    position.advance(17)
    assert place(position) == (0, 81, 2)
