"""Whether a loader may be read ahead: what it draws, what the steps draw, and whose memory its batches lie in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_gpufeed.echo.trial import GeneratorStates, ReadAheadTrial

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "numpy": lambda: np.random.rand(),
}
OWN_GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1, generator=torch.Generator().manual_seed(1)),
    "python": lambda: random.Random(1).random(),
    "numpy": lambda: np.random.default_rng(1).random(),
}


class Nameless:
    """A loader of which nothing is known."""


def nothing() -> None:
    pass


def default_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8)), batch_size=2)


def fetch(trial: ReadAheadTrial, draw: Callable[[], Any] = nothing, batch: Any = None) -> None:
    """Fetch a batch as the fetcher does, drawing what the loader draws."""
    before = GeneratorStates.now()
    draw()
    trial.fetched(torch.zeros(2) if batch is None else batch, before, GeneratorStates.now())


def verdicts(
    loader: Any, of_loader: Callable[[], Any] = nothing, of_steps: Callable[[], Any] = nothing, *, uninterrupted: bool
) -> list[bool | None]:
    """Verdict after the first fetch, when the second is wanted, and after it if it was watched."""
    trial = ReadAheadTrial(loader, is_uninterrupted=uninterrupted)
    assert trial.verdict is None
    fetch(trial, of_loader)
    seen = [trial.verdict]
    of_steps()
    trial.wants_next()
    seen.append(trial.verdict)
    if trial.verdict is None:
        fetch(trial, of_loader)
        seen.append(trial.verdict)
    return seen


# Generators ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_seen_and_whose_it_was(name):
    before = GeneratorStates.now()
    assert GeneratorStates.now() == before
    DRAWS[name]()
    assert GeneratorStates.now().drawn_since(before) == {name}


@pytest.mark.parametrize("name", OWN_GENERATORS)
def test_a_draw_from_a_generator_of_its_own_is_none(name):
    before = GeneratorStates.now()
    OWN_GENERATORS[name]()
    assert GeneratorStates.now().drawn_since(before) == set()


def test_looking_draws_nothing():
    before = GeneratorStates.now()
    before.after_one_seed()
    assert GeneratorStates.now() == before


def test_one_seed_is_what_torchs_samplers_draw_when_an_epoch_begins():
    torch.manual_seed(5)
    before = GeneratorStates.now()
    next(iter(torch.utils.data.RandomSampler(range(10))))
    assert GeneratorStates.now() != before
    assert GeneratorStates.now() == before.after_one_seed()


def test_a_normal_draw_that_keeps_a_second_number_for_later_is_seen():
    before = GeneratorStates.now()
    np.random.normal()  # keeps the other number of its pair
    between = GeneratorStates.now()
    np.random.normal()  # gives it, and draws nothing new
    assert between.drawn_since(before) == {"numpy"}
    assert GeneratorStates.now().drawn_since(between) == {"numpy"}


# What is drawn ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uninterrupted", [True, False])
def test_a_loader_of_torch_that_draws_nothing_is_read_ahead_after_the_first_batch(uninterrupted):
    assert verdicts(default_loader(), uninterrupted=uninterrupted)[0] is True
    assert verdicts(default_loader(), of_steps=DRAWS["torch"], uninterrupted=uninterrupted)[0] is True


@pytest.mark.parametrize("uninterrupted", [True, False])
def test_a_loader_of_which_nothing_is_known_is_read_ahead_after_the_second_batch(uninterrupted):
    assert verdicts(Nameless(), uninterrupted=uninterrupted) == [None, None, True]


@pytest.mark.parametrize("uninterrupted", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_a_loader_that_draws_beside_steps_that_draw_stays_in_turn(name, uninterrupted):
    with pytest.warns(UserWarning, match=f"DataLoader draws random numbers \\({name}\\) in the training process") as (
        caught
    ):
        seen = verdicts(default_loader(), DRAWS[name], DRAWS[name], uninterrupted=uninterrupted)
    assert seen == [None, None, False]
    assert len(caught) == 1
    assert "with echo_factor 'auto' none is used again. num_workers=1 or more cures that." in str(caught[0].message)


@pytest.mark.parametrize("name", DRAWS)
def test_a_loader_that_draws_alone_is_read_ahead_if_nothing_comes_in_between(name):
    assert verdicts(default_loader(), DRAWS[name], uninterrupted=True) == [None, True]


@pytest.mark.parametrize("name", DRAWS)
def test_a_loader_that_draws_stays_in_turn_if_others_may_draw_later(name):
    # Validation, or an epoch that ends early.
    with pytest.warns(UserWarning, match=f"draws random numbers \\({name}\\)"):
        assert verdicts(default_loader(), DRAWS[name], uninterrupted=False) == [None, None, False]


@pytest.mark.parametrize(("of_loader", "of_steps"), [("numpy", "torch"), ("torch", "python"), ("python", "numpy")])
def test_loader_and_steps_that_draw_from_different_generators_do_not_disturb_each_other(of_loader, of_steps):
    assert verdicts(default_loader(), DRAWS[of_loader], DRAWS[of_steps], uninterrupted=True) == [None, True]


def test_draws_in_any_step_on_the_first_batch_count():
    trial = ReadAheadTrial(default_loader(), is_uninterrupted=True)
    fetch(trial, DRAWS["numpy"])
    DRAWS["torch"]()
    trial._makes_new_tensors = False  # so that the trial stays open
    trial.wants_next()
    DRAWS["numpy"]()
    trial.wants_next()
    with pytest.warns(UserWarning, match="draws random numbers"):
        fetch(trial, DRAWS["numpy"])
    assert trial.verdict is False


def test_a_shuffle_that_draws_much_when_an_epoch_begins_is_no_hindrance():
    draws = [lambda: torch.randperm(10), nothing]
    trial = ReadAheadTrial(default_loader(), is_uninterrupted=False)
    fetch(trial, draws[0])
    assert trial.verdict is None
    trial.wants_next()
    fetch(trial, draws[1])
    assert trial.verdict is True


def draw_seed() -> None:
    torch.empty((), dtype=torch.int64).random_()


@pytest.mark.parametrize("uninterrupted", [True, False])
def test_the_seed_of_a_shuffle_is_no_draw(uninterrupted):
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True)
    assert verdicts(loader, draw_seed, DRAWS["torch"], uninterrupted=uninterrupted)[0] is True


@pytest.mark.parametrize("draw", [draw_seed, lambda: torch.rand(2)], ids=["one long number", "two short ones"])
def test_as_many_draws_as_a_seed_takes_are_draws_where_nothing_is_shuffled(draw):
    with pytest.warns(UserWarning, match="draws random numbers .torch."):
        assert verdicts(default_loader(), draw, DRAWS["torch"], uninterrupted=True)[-1] is False


def test_as_many_draws_as_a_seed_takes_are_draws_after_the_first_batch():
    trial = ReadAheadTrial(DataLoader(TensorDataset(torch.arange(8)), shuffle=True), is_uninterrupted=False)
    fetch(trial, lambda: torch.rand(4))  # the seed of the shuffle, and two for the batch
    trial.wants_next()
    with pytest.warns(UserWarning, match="draws random numbers .torch."):
        fetch(trial, lambda: torch.rand(2))
    assert trial.verdict is False


def test_wanting_before_anything_was_fetched_decides_nothing():
    trial = ReadAheadTrial(default_loader(), is_uninterrupted=True)
    trial.wants_next()
    assert trial.verdict is None


# Where the batches lie -------------------------------------------------------------------------------------


def refilled(buffer: Any) -> Any:
    buffer += 1
    return buffer


@pytest.mark.parametrize(
    ("make", "again"),
    [
        (lambda: torch.zeros(4), refilled),
        (lambda: np.zeros(4), refilled),
        (lambda: np.zeros(4), lambda array: torch.from_numpy(refilled(array))),
        (lambda: torch.zeros(4), lambda tensor: {"image": [refilled(tensor)], "label": torch.ones(2)}),
    ],
    ids=["tensor", "array", "tensor over an array", "deep inside"],
)
def test_a_loader_that_fills_the_same_memory_again_stays_in_turn(make, again):
    buffer = make()
    trial = ReadAheadTrial(Nameless(), is_uninterrupted=True)
    fetch(trial, batch=again(buffer))
    trial.wants_next()
    with pytest.warns(UserWarning, match="Nameless gives every batch in the same memory") as caught:
        fetch(trial, batch=again(buffer))
    assert trial.verdict is False
    assert len(caught) == 1
    assert "New tensors for each batch cure that." in str(caught[0].message)


def test_new_tensors_are_never_taken_for_the_same_memory():
    # The first batch is kept until the second came: the allocator cannot give its memory again.
    for _ in range(20):
        trial = ReadAheadTrial(Nameless(), is_uninterrupted=True)
        for value in (1.0, 2.0):
            batch = torch.full((1000,), value)
            fetch(trial, batch=batch)
            del batch
        assert trial.verdict is True


class Whole(IterableDataset):
    """A dataset that gives whole batches, which may be the same tensor."""

    def __iter__(self) -> Any:
        return iter([])


def test_only_a_loader_that_collates_makes_new_tensors_for_sure():
    assert ReadAheadTrial(default_loader(), is_uninterrupted=True)._makes_new_tensors
    assert not ReadAheadTrial(DataLoader(Whole(), batch_size=None), is_uninterrupted=True)._makes_new_tensors
    own_collate = DataLoader(TensorDataset(torch.arange(8)), collate_fn=lambda samples: samples)
    assert not ReadAheadTrial(own_collate, is_uninterrupted=True)._makes_new_tensors
    with_workers = DataLoader(Whole(), batch_size=None, num_workers=1)
    assert ReadAheadTrial(with_workers, is_uninterrupted=True)._makes_new_tensors
