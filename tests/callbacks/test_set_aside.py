"""A callback that a finder has set aside is taken back when the run ends; one that the Trainer has is not touched."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_gpufeed.callbacks.set_aside import WhenSetAside
from tests.datamodules.models import make_trainer


class Strategy(SingleDeviceStrategy):
    """Counts how often it is torn down."""

    num_teardowns = 0

    def teardown(self) -> None:
        """Count."""
        self.num_teardowns += 1
        super().teardown()


class Part(Callback):
    """Knows whether it was taken back."""

    def __init__(self) -> None:
        self.num_taken = 0

    def put_in(self, trainer: Any) -> None:
        """From now on."""
        self.when = WhenSetAside(trainer, self, self.take_back)

    def take_back(self) -> None:
        """Done."""
        self.num_taken += 1
        self.when.remove()


def prepared(num_parts: int) -> tuple[Any, list[Part]]:
    """A Trainer, and parts that were put in one after the other."""
    parts = [Part() for _ in range(num_parts)]
    trainer = make_trainer(strategy=Strategy("cpu"), callbacks=list(parts))
    for part in parts:
        part.put_in(trainer)
    return trainer, parts


def test_it_is_taken_back_if_the_trainer_does_not_have_it_any_more():
    trainer, [part] = prepared(1)
    trainer.callbacks = [Callback()]
    trainer.strategy.teardown()
    assert (part.num_taken, trainer.strategy.num_teardowns) == (1, 1)
    trainer.strategy.teardown()
    assert (part.num_taken, trainer.strategy.num_teardowns) == (1, 2)
    assert "teardown" not in vars(trainer.strategy)


def test_it_is_left_alone_while_the_trainer_has_it():
    trainer, [part] = prepared(1)
    trainer.strategy.teardown()
    assert (part.num_taken, trainer.strategy.num_teardowns) == (0, 1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_are_removed_in_any_order_and_nothing_is_left(order):
    trainer, parts = prepared(3)
    for number in order:
        parts[number].when.remove()
    assert "teardown" not in vars(trainer.strategy)
    trainer.strategy.teardown()
    assert trainer.strategy.num_teardowns == 1


def test_several_are_taken_back_at_once():
    trainer, parts = prepared(3)
    trainer.callbacks = []
    trainer.strategy.teardown()
    assert [part.num_taken for part in parts] == [1, 1, 1]
    assert trainer.strategy.num_teardowns == 1
    assert "teardown" not in vars(trainer.strategy)


def test_what_another_has_put_in_its_place_since_stays():
    trainer, [part] = prepared(1)
    calls = []
    own = trainer.strategy.teardown
    trainer.strategy.__dict__["teardown"] = lambda: calls.append("other") or own()
    part.when.remove()
    trainer.callbacks = []
    trainer.strategy.teardown()
    assert (calls, part.num_taken, trainer.strategy.num_teardowns) == (["other"], 0, 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_the_strategy_has_its_own_method(copied):
    trainer, [part] = prepared(1)
    strategy = copied(trainer.strategy)
    strategy.teardown()
    assert (strategy.num_teardowns, trainer.strategy.num_teardowns, part.num_taken) == (1, 0, 0)
