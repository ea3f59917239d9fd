"""Holds what was fetched on its device and copies pieces out of it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lightning_gpufeed.device.samples import (
    BatchForm,
    batch_form,
    copy_batch,
    count_samples,
    has_host_items,
    take_samples,
)
from lightning_gpufeed.device.transfer import device_of
from lightning_gpufeed.echo.plan import Piece, pass_seed, piece_bounds

__all__ = ["CachedBatch", "DeviceCache", "form_or_none"]


class CachedBatch:
    """One batch on its device.

    A piece is gathered when it is asked for, so beside the batch itself there is one piece in memory, never a permuted
    copy of all of it. Pieces share no tensor with the batch: what a step does to its piece in place, the next pass
    does not see. The order of each pass is drawn on the batch's device from a generator of its own; only lists and
    arrays, which live on the host, need it there (it is then drawn on the host and copied, 8 bytes a sample).

    Nothing here waits for the device.
    """

    def __init__(self, batch: Any, form: BatchForm | None, seed: int, *, is_first_in_order: bool) -> None:
        """Keep a batch.

        Args:
            batch: On the device it is to be used on.
            form: How its samples lie, None if they cannot be told apart; it is then used as a whole, in its order.
            seed: Of this batch's permutations.
            is_first_in_order: Leave the first pass as it was fetched.

        Raises:
            ValueError: The batch is not of that form.
        """
        self._batch = batch
        self._form = form
        self._seed = seed
        self._is_first_in_order = is_first_in_order
        self._num_samples = 0 if form is None else count_samples(batch, form)
        self._is_on_host = form is not None and has_host_items(batch, form)
        self._order_of = -1
        self._order: torch.Tensor | None = None

    def piece(self, piece: Piece, num_pieces: int) -> Any:
        """Copy a piece.

        Args:
            piece: Which pass over the batch, and which part of it.
            num_pieces: Parts of a pass.

        Returns:
            A batch of the same structure.

        Raises:
            ValueError: There are fewer samples than pieces.
        """
        if self._form is None or (self._is_first_in_order and piece.pass_index == 0 and num_pieces == 1):
            return copy_batch(self._batch)
        if self._num_samples < num_pieces:
            raise ValueError(
                f"the batch has {self._num_samples} samples on the device, but was to be cut into {num_pieces} pieces, "
                f"as it had more when it was fetched. Change the number of samples in the loader, not in a transfer "
                f"hook, or lower num_splits."
            )
        if self._order_of != piece.pass_index:
            self._order, self._order_of = self._permutation(piece.pass_index), piece.pass_index
        assert self._order is not None
        first, stop = piece_bounds(self._num_samples, num_pieces, piece.piece_index)
        index = self._order[first:stop]
        return take_samples(self._batch, self._form, index, index.tolist() if self._is_on_host else None)

    def _permutation(self, pass_index: int) -> torch.Tensor:
        device = torch.device("cpu") if self._is_on_host else device_of(self._batch)
        generator = torch.Generator(device).manual_seed(pass_seed(self._seed, pass_index))
        return torch.randperm(self._num_samples, generator=generator, device=device)


def form_or_none(batch: Any, num_splits: int, expected: int | None) -> BatchForm | None:
    """How the samples of a batch lie; None, with a warning, if it can only be used as a whole.

    Args:
        batch: A fetched batch.
        num_splits: Pieces it is to be cut into.
        expected: Samples it should have, if known.

    Returns:
        The form.

    Raises:
        ValueError: It has to be cut, and the samples cannot be told apart.
    """
    try:
        return batch_form(batch, expected)
    except ValueError as error:
        if num_splits > 1:
            raise ValueError(f"num_splits is {num_splits}, but {error} With num_splits=1 nothing is cut.") from error
        warnings.warn(f"batches are echoed whole and in their own order, as {error}", stacklevel=2)
        return None


class DeviceCache:
    """The latest batch of each loader on its device; how their samples lie is found out at the first ones."""

    def __init__(self, num_splits: int, *, is_first_in_order: bool) -> None:
        """Hold nothing yet.

        Args:
            num_splits: Pieces that a batch is cut into.
            is_first_in_order: Leave the first pass over a batch that is not cut as it was fetched.
        """
        self._num_splits = num_splits
        self._is_first_in_order = is_first_in_order
        self._forms: dict[int, BatchForm | None] = {}
        self._batches: list[CachedBatch] = []

    def clear(self) -> None:
        """Forget the batches; before the next ones come, so that there are never two of a loader."""
        self._batches = []

    def put(self, parts: list[Any], expected: list[int | None], seed: int) -> None:
        """Hold what was fetched.

        Args:
            parts: On the device, one for each loader; None for a loader that has none left.
            expected: Samples in a full batch of each, if known.
            seed: Of the permutations of these batches.

        Raises:
            ValueError: A batch has to be cut, and its samples cannot be told apart.
        """
        self.clear()
        for number, part in enumerate(parts):
            if number not in self._forms and part is not None:
                self._forms[number] = form_or_none(part, self._num_splits, expected[number])
            form = None if part is None else self._forms[number]
            self._batches.append(
                CachedBatch(part, form, pass_seed(seed, number), is_first_in_order=self._is_first_in_order)
            )

    def take(self, piece: Piece, num_pieces: int) -> list[Any]:
        """Copy a piece of each batch.

        Args:
            piece: Which pass, and which part of it.
            num_pieces: Parts of a pass.

        Returns:
            One part for each loader.

        Raises:
            ValueError: A batch has fewer samples than pieces.
        """
        return [batch.piece(piece, num_pieces) for batch in self._batches]
