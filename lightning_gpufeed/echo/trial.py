"""Finds out whether a thread may fetch a loader's batches while the training steps run.

::

    fetch 0          in the caller's thread    does the loader draw from the process's random generators?
    steps on it                                do the steps draw from the same ones?
    fetch 1          only if still open        does the loader draw again? does it fill the same tensors again?

A thread may fetch if it does not matter when it does: two threads that draw from one generator get other numbers in
every run, and a tensor that is filled again must not be in use. Shuffling, which draws one seed when an epoch begins,
is no hindrance: the first batch is always fetched in the caller's thread.
"""

from __future__ import annotations

import random
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, default_collate

from lightning_gpufeed.device.samples import tensor_addresses

__all__ = ["GeneratorStates", "ReadAheadTrial"]


class GeneratorStates(NamedTuple):
    """States of the generators that all threads of a process share."""

    torch: bytes
    python: Any
    numpy: tuple[Any, ...]

    @classmethod
    def now(cls) -> GeneratorStates:
        """As they are."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        numpy_state = (kind, np.asarray(keys).tobytes(), *rest)
        return cls(bytes(torch.get_rng_state().numpy()), random.getstate(), numpy_state)

    def after_one_seed(self) -> GeneratorStates:
        """As they are after a sampler has drawn the seed of its own generator, as torch's does."""
        generator = torch.Generator()
        generator.set_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        return self._replace(torch=bytes(generator.get_state().numpy()))

    def drawn_since(self, before: GeneratorStates) -> set[str]:
        """Names of the generators that were drawn from."""
        return {name for name in self._fields if getattr(self, name) != getattr(before, name)}


class ReadAheadTrial:
    """Watches the first batches of a loader.

    Attributes:
        verdict: Whether a thread may fetch; None while that is open.
        is_uninterrupted: Whether every epoch is taken to its end with nothing but training steps in between, so that
            no other draw comes between those of its batches.
    """

    def __init__(self, loader: Any, *, is_uninterrupted: bool) -> None:
        """Nothing fetched yet.

        Args:
            loader: The loader.
            is_uninterrupted: See above.
        """
        self.verdict: bool | None = None
        self._name = type(loader).__name__
        self.is_uninterrupted = is_uninterrupted
        # Of these it is known that no batch lies in the memory of another one.
        self._makes_new_tensors = isinstance(loader, DataLoader) and (
            loader.num_workers > 0 or loader.collate_fn is default_collate
        )
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
        self._is_shuffled_by_torch = type(sampler) is RandomSampler and sampler.generator is None
        self._first_batch: Any = None
        self._after_first: GeneratorStates | None = None
        self._drawn_by_loader: set[str] = set()
        self._drawn_by_steps: set[str] = set()

    def fetched(self, batch: Any, before: GeneratorStates, after: GeneratorStates) -> None:
        """A batch was fetched in the caller's thread.

        Args:
            batch: The batch.
            before: States when it was asked for.
            after: States when it was there.
        """
        drawn = after.drawn_since(before)
        if self._after_first is None:
            if self._is_shuffled_by_torch and after == before.after_one_seed():
                drawn = set()
            self._after_first, self._drawn_by_loader = after, drawn
            # Kept, so that an address that comes again means the same memory.
            self._first_batch = None if self._makes_new_tensors else batch
            if self._makes_new_tensors and not drawn:
                self.verdict = True
            return
        self._drawn_by_loader = drawn
        is_shared = bool(tensor_addresses(self._first_batch) & tensor_addresses(batch))
        self._first_batch = None
        self.verdict = not is_shared and not self._conflicts
        if self._conflicts:
            self._warn(
                f"draws random numbers ({', '.join(sorted(drawn))}) in the training process, and so does, or may, "
                f"what runs in between: read ahead in a thread, they would be others in every run",
                "num_workers=1 or more cures that.",
            )
        elif is_shared:
            self._warn(
                "gives every batch in the same memory: read ahead, the one in use would be overwritten",
                "New tensors for each batch cure that.",
            )

    def wants_next(self) -> None:
        """The steps on the first batch are done, and the next one is asked for, or about."""
        if self.verdict is not None or self._after_first is None:
            return
        self._drawn_by_steps |= GeneratorStates.now().drawn_since(self._after_first)
        if self._makes_new_tensors and not self._conflicts:
            self.verdict = True

    @property
    def _conflicts(self) -> bool:
        if not self.is_uninterrupted:
            return bool(self._drawn_by_loader)
        return bool(self._drawn_by_loader & self._drawn_by_steps)

    def _warn(self, reason: str, cure: str) -> None:
        warnings.warn(
            f"{self._name} {reason}. So batches are fetched in turn, and with echo_factor 'auto' none is used again. "
            f"{cure}",
            stacklevel=2,
        )
