"""Pieces of a cached batch: which samples, in which order, in how much memory, and who else notices."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpufeed.device.samples import BatchForm, tensor_addresses
from lightning_gpufeed.device.transfer import device_of
from lightning_gpufeed.echo.cache import CachedBatch, DeviceCache, form_or_none
from lightning_gpufeed.echo.plan import Piece
from lightning_gpufeed.echo.trial import GeneratorStates


def cached(batch: Any, form: BatchForm | None = "rows", *, seed: int = 0, in_order: bool = False) -> CachedBatch:
    return CachedBatch(batch, form, seed, is_first_in_order=in_order)


def one_pass(batch: CachedBatch, pass_index: int, num_pieces: int) -> list[Any]:
    return [batch.piece(Piece(0, pass_index, index), num_pieces) for index in range(num_pieces)]


def joined(pieces: list[torch.Tensor]) -> list[int]:
    return [int(sample) for piece in pieces for sample in piece]


# Which samples ---------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(num_samples=st.integers(1, 40), num_splits=st.integers(1, 8), factor=st.integers(1, 4), in_order=st.booleans())
def test_every_pass_is_all_of_the_batch_and_every_sample_is_used_factor_times(
    num_samples: int, num_splits: int, factor: int, in_order: bool
) -> None:
    batch = cached(torch.arange(num_samples), in_order=in_order)
    num_pieces = min(num_splits, num_samples)
    uses = [0] * num_samples
    for pass_index in range(factor):
        pieces = one_pass(batch, pass_index, num_pieces)
        sizes = {len(piece) for piece in pieces}
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        assert sorted(joined(pieces)) == list(range(num_samples))
        for sample in joined(pieces):
            uses[sample] += 1
    assert uses == [factor] * num_samples


def test_every_pass_has_an_order_of_its_own():
    batch = cached(torch.arange(100))
    orders = [joined(one_pass(batch, pass_index, 3)) for pass_index in range(5)]
    assert len({tuple(order) for order in orders}) == 5
    assert all(order != sorted(order) for order in orders)


def test_every_batch_has_orders_of_its_own():
    orders = {tuple(joined(one_pass(cached(torch.arange(100), seed=seed), 0, 1))) for seed in range(5)}
    assert len(orders) == 5


def test_every_order_of_a_small_batch_comes_up():
    orders = {tuple(joined(one_pass(cached(torch.arange(3), seed=seed), 0, 1))) for seed in range(100)}
    assert len(orders) == 6


def test_the_number_of_pieces_does_not_change_the_order():
    batch = torch.arange(20)
    assert joined(one_pass(cached(batch), 1, 1)) == joined(one_pass(cached(batch), 1, 4))


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_a_piece_is_the_same_whichever_was_asked_for_before(num_pieces):
    # A resumed run begins in the middle of a pass.
    batch = torch.arange(20)
    expected = [[piece.tolist() for piece in one_pass(cached(batch), index, num_pieces)] for index in range(3)]
    for pass_index in (2, 0, 1):
        for index in reversed(range(num_pieces)):
            piece = cached(batch).piece(Piece(0, pass_index, index), num_pieces)
            assert piece.tolist() == expected[pass_index][index]


def test_the_first_pass_may_stay_as_it_was_fetched():
    batch = cached(torch.arange(50), in_order=True)
    assert joined(one_pass(batch, 0, 1)) == list(range(50))
    assert joined(one_pass(batch, 1, 1)) != list(range(50))
    # Cut, it is shuffled all the same: pieces of a batch in order would be another training each.
    assert joined(one_pass(batch, 0, 2)) != list(range(50))


def test_tensors_lists_and_arrays_of_a_batch_stay_together():
    images, numbers = torch.arange(20)[:, None] * torch.ones(1, 3), torch.arange(20)
    batch = cached({"image": images, "number": numbers, "name": [str(i) for i in range(20)], "array": np.arange(20)})
    for piece in one_pass(batch, 1, 3):
        expected = piece["number"].tolist()
        assert piece["image"][:, 0].tolist() == expected
        assert piece["array"].tolist() == expected
        assert piece["name"] == [str(i) for i in expected]


@pytest.mark.parametrize(
    ("form", "make"),
    [("items", lambda parts: parts), ("fields", lambda parts: [list(field) for field in zip(*parts, strict=True)])],
)
def test_lists_of_samples_are_cut_and_shuffled_alike(form, make):
    parts = [(torch.full((i + 1,), float(i)), i) for i in range(10)]
    batch, seen = cached(make(parts), form), []
    for piece in one_pass(batch, 1, 3):
        pairs = piece if form == "items" else list(zip(*piece, strict=True))
        assert all(int(cloud[0]) == i and len(cloud) == i + 1 for cloud, i in pairs)
        seen += [i for _, i in pairs]
    assert sorted(seen) == list(range(10))
    assert seen != list(range(10))


def test_tensors_alone_and_beside_lists_are_shuffled_alike():
    # The order is drawn on the host where lists need it; on the CPU that is the same generator.
    numbers = torch.arange(20)
    alone = joined(one_pass(cached(numbers), 1, 2))
    beside = [piece["number"] for piece in one_pass(cached({"number": numbers, "name": list("x" * 20)}), 1, 2)]
    assert joined(beside) == alone


def test_a_batch_that_cannot_be_cut_is_given_whole_in_every_pass():
    batch = {"image": torch.rand(3, 2), "boxes": torch.rand(5, 4)}
    pieces = [cached(batch, None).piece(Piece(0, pass_index), 1) for pass_index in range(3)]
    for piece in pieces:
        assert torch.equal(piece["image"], batch["image"])
        assert torch.equal(piece["boxes"], batch["boxes"])
        assert not tensor_addresses(piece) & tensor_addresses(batch)


def test_fewer_samples_on_the_device_than_were_fetched_are_refused_with_a_message():
    batch = cached(torch.arange(3))
    with pytest.raises(ValueError, match="the batch has 3 samples on the device, but was to be cut into 4 pieces") as (
        caught
    ):
        batch.piece(Piece(), 4)
    assert "not in a transfer hook, or lower num_splits" in str(caught.value)


def test_a_batch_unlike_the_one_before_is_refused():
    with pytest.raises(ValueError, match="not made like the ones before it"):
        cached((torch.rand(3), torch.rand(4)))


# Nobody else notices ---------------------------------------------------------------------------------------


def mixed_batch() -> dict[str, Any]:
    return {"image": torch.arange(24.0).reshape(8, 3), "scale": torch.tensor(2.0), "array": np.arange(8.0)}


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("num_pieces", [1, 2])
def test_what_a_step_does_to_its_piece_no_other_step_sees(num_pieces, in_order):
    original = mixed_batch()
    spoiled, untouched = cached(original, in_order=in_order), cached(mixed_batch(), in_order=in_order)
    for pass_index in range(3):
        for piece, expected in zip(
            one_pass(spoiled, pass_index, num_pieces), one_pass(untouched, pass_index, num_pieces), strict=True
        ):
            assert torch.equal(piece["image"], expected["image"])
            assert piece["scale"] == expected["scale"]
            assert (piece["array"] == expected["array"]).all()
            assert not tensor_addresses(piece) & tensor_addresses(original)
            piece["scale"].zero_()
            piece["array"][:] = 0
            piece.pop("image").zero_()


def test_the_order_does_not_depend_on_the_generators_of_the_process_and_leaves_them_alone():
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = GeneratorStates.now()
        batch = cached({"x": torch.arange(50), "name": list("x" * 50)}, seed=9)
        orders.append([piece["x"].tolist() for pass_index in range(3) for piece in one_pass(batch, pass_index, 2)])
        assert GeneratorStates.now() == before
    assert orders[0] == orders[1]


# Memory ----------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Notes how many elements each operation gave, and which rows were gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.gathered: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.sizes.append(out.numel())
        if "index_select" in str(func):
            self.gathered.append(len(args[2]))
        return out


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("with_names", [False, True])
@pytest.mark.parametrize("num_pieces", [2, 5])
def test_there_is_never_more_than_one_piece_beside_the_batch(num_pieces, with_names, memory_format):
    images = torch.rand(50, 3, 8, 8).contiguous(memory_format=memory_format)
    batch: dict[str, Any] = {"image": images, "label": torch.arange(50)}
    if with_names:
        batch["name"] = list("x" * 50)
    with Allocations() as allocations:
        made = cached(batch)
        for pass_index in range(3):
            for index in range(num_pieces):
                made.piece(Piece(0, pass_index, index), num_pieces)
    piece_size = 50 // num_pieces
    assert allocations.gathered == [piece_size] * (2 * 3 * num_pieces)
    assert max(allocations.sizes) == piece_size * images[0].numel()


def test_pieces_are_gathered_when_they_are_asked_for_and_not_kept():
    with Allocations() as allocations:
        batch = cached(torch.rand(60, 100))
        assert allocations.gathered == []
        piece = batch.piece(Piece(), 3)
    assert allocations.gathered == [20]
    gone = weakref.ref(piece)
    del piece
    assert gone() is None


@dataclass
class Record:
    image: torch.Tensor


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: {"inputs": {"image": x}},
        lambda x: ["name", (3, [x])],
        lambda x: Record(x),
        lambda x: {"record": Record(x)},
        lambda x: x,
    ],
    ids=["dict in dict", "list in tuple in list", "record", "record in dict", "tensor"],
)
def test_the_device_of_a_batch_is_found_however_deep_its_tensors_lie(nest):
    # On a GPU the order is drawn there, and an order on the host would not fit the tensors.
    assert device_of(nest(torch.empty(4, 2, device="meta"))) == torch.device("meta")


# How samples lie -------------------------------------------------------------------------------------------

UNKNOWN = {"image": torch.rand(3, 2), "boxes": torch.rand(5, 4)}


def test_a_batch_that_has_to_be_cut_and_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"^num_splits is 2, but the samples of this batch cannot be told apart: ") as (
        caught
    ):
        form_or_none(UNKNOWN, 2, 8)
    assert str(caught.value).endswith("With num_splits=1 nothing is cut.")
    assert "batch['boxes'] has shape (5, 4)" in str(caught.value)


def test_a_batch_that_is_not_cut_is_used_whole_with_a_warning():
    with pytest.warns(UserWarning, match="batches are echoed whole and in their own order, as the samples of this"):
        assert form_or_none(UNKNOWN, 1, 8) is None


def test_a_batch_that_can_be_cut_says_nothing():
    assert form_or_none(torch.rand(8, 3), 1, 8) == "rows"
    assert form_or_none([("a", torch.rand(3)), ("b", torch.rand(4)), ("c", torch.rand(5))], 2, 3) == "items"


# One batch of each loader ----------------------------------------------------------------------------------


def test_a_batch_of_each_loader_is_cut_and_their_orders_have_nothing_in_common():
    cache = DeviceCache(2, is_first_in_order=False)
    cache.put([torch.arange(40), torch.arange(40)], [40, 40], seed=1)
    pieces = [cache.take(Piece(0, 0, index), 2) for index in range(2)]
    first, second = (joined([piece[number] for piece in pieces]) for number in range(2))
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


def test_a_loader_that_has_nothing_left_gives_nothing():
    cache = DeviceCache(2, is_first_in_order=False)
    cache.put([torch.arange(4), None], [4, 4], seed=1)
    first, nothing = cache.take(Piece(), 2)
    assert len(first) == 2
    assert nothing is None


def test_how_samples_lie_is_found_out_with_the_first_batch_of_each_loader():
    cache = DeviceCache(1, is_first_in_order=False)
    with pytest.warns(UserWarning, match="echoed whole"):
        cache.put([UNKNOWN, torch.arange(8)], [8, 8], seed=1)
    for _ in range(3):  # another warning would be an error
        cache.put([UNKNOWN, torch.arange(8)], [8, 8], seed=1)
        whole, shuffled = cache.take(Piece(0, 1), 1)
        assert torch.equal(whole["boxes"], UNKNOWN["boxes"])
        assert sorted(shuffled.tolist()) == list(range(8))


def test_the_number_of_samples_may_change_from_batch_to_batch():
    cache = DeviceCache(3, is_first_in_order=False)
    for num_samples in (8, 3, 5):
        cache.put([torch.arange(num_samples)], [8], seed=num_samples)
        taken = joined([cache.take(Piece(0, 0, index), 3)[0] for index in range(3)])
        assert sorted(taken) == list(range(num_samples))


def test_a_cleared_cache_holds_no_batch():
    cache, batch = DeviceCache(1, is_first_in_order=False), torch.arange(8)
    held = weakref.ref(batch)
    cache.put([batch], [8], seed=1)
    del batch
    cache.take(Piece(), 1)
    assert held() is not None
    cache.clear()
    gc.collect()
    assert held() is None


def test_a_new_batch_takes_the_place_of_the_old_one():
    cache, batch = DeviceCache(1, is_first_in_order=False), torch.arange(8)
    held = weakref.ref(batch)
    cache.put([batch], [8], seed=1)
    del batch
    cache.put([torch.arange(8)], [8], seed=1)
    gc.collect()
    assert held() is None
