"""Steps from being asked for to being done, and which one a stopped training goes on with."""

from __future__ import annotations

from lightning_gpufeed.echo.ledger import Step, StepLedger
from lightning_gpufeed.echo.plan import Piece
from lightning_gpufeed.echo.position import Place, Round

ROUND = Round(0, num_pieces=3)
STEPS = [Step(Piece(0, 0, index), ROUND) for index in range(3)]


def hand_out(ledger: StepLedger, *numbers: int) -> None:
    for number in numbers:
        ledger.ask(STEPS[number])
        ledger.hand_out()


def test_nothing_waits_before_anything_is_asked_for():
    ledger = StepLedger()
    assert (ledger.asked, ledger.armed, ledger.num_asked) == (None, None, 0)
    assert ledger.arm(0) is None
    assert ledger.waiting_place(0) is None
    assert not ledger.is_latest_undone(0)


def test_steps_are_begun_in_the_order_in_which_they_were_handed_out():
    ledger = StepLedger()
    hand_out(ledger, 0, 1, 2)
    assert (ledger.asked, ledger.num_asked) == (STEPS[2], 3)
    assert [ledger.arm(number) for number in range(4)] == [*STEPS, None]
    assert ledger.armed == STEPS[2]


def test_a_step_that_several_loaders_gave_an_item_for_is_one_step():
    ledger = StepLedger()
    ledger.ask(STEPS[0])
    for _ in range(3):
        ledger.hand_out()
    assert [ledger.arm(0), ledger.arm(0)] == [STEPS[0], None]


def test_a_step_that_was_asked_for_and_that_no_loader_gave_an_item_for_does_not_begin():
    ledger = StepLedger()
    ledger.ask(STEPS[0])
    assert ledger.arm(0) is None
    assert ledger.waiting_place(0) is None


def test_a_step_that_is_under_way_has_to_be_done_again():
    ledger = StepLedger()
    hand_out(ledger, 0, 1)
    ledger.arm(7)
    assert ledger.is_latest_undone(7)
    assert ledger.waiting_place(7) == Place(*STEPS[0])
    assert not ledger.is_latest_undone(8)
    assert ledger.waiting_place(8) == Place(*STEPS[1])  # handed out already, one ahead


def test_when_all_that_was_handed_out_is_done_nothing_waits():
    ledger = StepLedger()
    hand_out(ledger, 0)
    ledger.arm(0)
    assert ledger.waiting_place(1) is None


def test_a_new_iteration_gives_up_what_was_not_begun():
    ledger = StepLedger()
    hand_out(ledger, 0, 1)
    ledger.arm(0)
    ledger.begin_asking()
    assert (ledger.asked, ledger.num_asked, ledger.armed) == (None, 0, STEPS[0])
    assert ledger.arm(1) is None
    assert ledger.waiting_place(0) == Place(*STEPS[0])


def test_a_new_epoch_gives_up_everything():
    ledger = StepLedger()
    hand_out(ledger, 0, 1)
    ledger.arm(0)
    ledger.begin_epoch()
    assert (ledger.asked, ledger.num_asked, ledger.armed) == (None, 0, None)
    assert ledger.waiting_place(0) is None
