"""A training loop written by hand around an `EchoSession`, and small loaders: no Lightning in it.

Sample i is the number i, so what a step was given tells which samples it was on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Self

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpufeed.device.marks import StepClock
from lightning_gpufeed.device.vote import HostVote
from lightning_gpufeed.echo.loader import EchoLoader
from lightning_gpufeed.echo.plan import EchoRule, Piece
from lightning_gpufeed.echo.session import EchoSession
from tests.doubles import WAIT_SECONDS, EventLog

READER = "gpufeed-reader"


def reader_threads() -> list[threading.Thread]:
    """The threads that read ahead."""
    return [thread for thread in threading.enumerate() if thread.name == READER]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what has to come."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.001)


def numbers(part: Any) -> Any:
    """Which samples: a list of numbers for a tensor."""
    return part.tolist() if isinstance(part, torch.Tensor) else part


# Loaders ---------------------------------------------------------------------------------------------------


class Batches:
    """Batches of consecutive numbers, the last one perhaps smaller; in the same order in every epoch."""

    def __init__(self, num_samples: int, batch_size: int = 4, *, log: EventLog | None = None) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.log = log or EventLog()

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def batch(self, number: int) -> Any:
        """One batch of the epoch."""
        first = number * self.batch_size
        return torch.arange(first, min(self.num_samples, first + self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            self.log.add(f"begin {number}")
            batch = self.batch(number)
            self.log.add(f"end {number}")
            yield batch


class UnsizedBatches(Batches):
    """The same, without a length."""

    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch(number) for number in range(-(-self.num_samples // self.batch_size))])


class GatedBatches(Batches):
    """Batches that come only after their gate was opened; those without a gate come at once."""

    def __init__(self, num_samples: int, batch_size: int = 4, *, gated: Any = (), log: EventLog | None = None) -> None:
        super().__init__(num_samples, batch_size, log=log)
        self.gates = {number: threading.Event() for number in gated}

    def batch(self, number: int) -> Any:
        """One batch, once it may come."""
        if number in self.gates:
            assert self.gates[number].wait(WAIT_SECONDS)
        return super().batch(number)

    def open_all(self) -> None:
        """Let everything come."""
        for gate in self.gates.values():
            gate.set()


class GatedSamples(Dataset):
    """Sample i is i; each batch of four comes only after its gate was opened, those without a gate at once."""

    def __init__(self, size: int, gated: Any = ()) -> None:
        self.size = size
        self.gates = {number: threading.Event() for number in gated}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index // 4 in self.gates:
            assert self.gates[index // 4].wait(WAIT_SECONDS)
        return index

    def loader(self) -> DataLoader[Any]:
        """Batches of four; such a loader is read ahead from its second batch on."""
        return DataLoader(self, batch_size=4)

    def open_all(self) -> None:
        """Let everything come."""
        for gate in self.gates.values():
            gate.set()


class ResumableBatches(Batches):
    """Another order in every epoch, and a state to continue from in the middle of one.

    As the stateful loaders that there are, it finishes a loaded epoch with the first iteration after that.
    """

    def __init__(self, num_samples: int, batch_size: int = 4, *, epoch: int = -1) -> None:
        super().__init__(num_samples, batch_size)
        self.epoch = epoch
        self.position = 0
        self.is_loaded = False

    def __iter__(self) -> Iterator[Any]:
        if self.is_loaded:
            self.is_loaded = False
        else:
            self.epoch += 1
            self.position = 0
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.epoch))
        while self.position < -(-self.num_samples // self.batch_size):
            first = self.position * self.batch_size
            self.position += 1
            yield order[first : first + self.batch_size]

    def state_dict(self) -> dict[str, int]:
        """Epoch and batches given."""
        return {"epoch": self.epoch, "batches": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue there."""
        self.epoch, self.position, self.is_loaded = state_dict["epoch"], state_dict["batches"], True


class UnsizedResumableBatches(ResumableBatches):
    """The same, without a length."""

    __len__ = None  # type: ignore[assignment]


class OwnIterator(Batches):
    """A loader that is its own iterator and begins anew with `iter`."""

    position = 0

    def __iter__(self) -> Self:
        self.position = 0
        return self

    def __next__(self) -> Any:
        if self.position == len(self):
            raise StopIteration
        self.position += 1
        return self.batch(self.position - 1)


class Stream(OwnIterator):
    """A loader that is its own iterator and goes on where it is, whatever `iter` is called."""

    def __iter__(self) -> Self:
        return self


# The loop --------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One step of a training."""

    epoch: int
    piece: Piece
    parts: list[Any]


Mode = Literal["min_size", "max_size", "max_size_cycle"]


class HandLoop:
    """Trains on pieces, one epoch after the other, and writes down the steps.

    Attributes:
        session: What directs the loaders.
        steps: What was trained on so far, with tensors as lists.
        changes: By how many steps the epoch became longer, each time.
        limit: Steps of an epoch at most.
    """

    def __init__(
        self,
        rule: EchoRule,
        num_splits: int = 1,
        *,
        seed: int = 0,
        mode: Mode = "min_size",
        limit: int | None = None,
    ) -> None:
        self.mode = mode
        self.limit = limit
        self.epoch = 0
        self.num_processed = 0
        self.is_over = False
        self.steps: list[Step] = []
        self.changes: list[int] = []
        self.wrapped: list[EchoLoader] = []
        self.iterators: list[Iterator[Any]] = []
        self.has_ended: list[bool] = []
        self.session = EchoSession(
            rule,
            num_splits,
            seed,
            vote=HostVote(),
            current_epoch=lambda: self.epoch,
            num_processed=lambda: self.num_processed,
            is_epoch_over=lambda: self.is_over,
            is_cut_to_shortest=lambda: self.mode == "min_size",
            on_length_change=self.changes.append,
            clock=StepClock(torch.device("cpu")),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.iterators = []  # the workers of a loader live as long as an iteration over it
        self.session.close()

    def wrap(self, *loaders: Any, **options: Any) -> list[EchoLoader]:
        """Train on these loaders, in lockstep; options are those of `EchoLoader`."""
        self.wrapped = [self.session.wrap(loader, **options) for loader in loaders]
        return self.wrapped

    def resume(self, state: dict[str, Any], *loaders: Any, **options: Any) -> None:
        """Continue another training, which was saved in this state, with loaders of its kind."""
        self.epoch = state["epoch"]
        self.session.load_state_dict(state)
        self.wrap(*loaders, **options)

    def begin(self) -> None:
        """Begin an epoch, or go on with one that was loaded."""
        saved = self.session.saved
        is_inside = saved is not None and saved.piece is not None
        self.num_processed = saved.num_steps or 0 if saved is not None and is_inside else 0
        self.is_over = False
        self.session.begin_epoch()
        self.iterators = [iter(wrapped) for wrapped in self.wrapped]
        self.has_ended = [False] * len(self.wrapped)

    def ask(self) -> list[Any] | None:
        """Ask the loaders for their items, as Lightning does; None at the end of the epoch."""
        items: list[Any] = [None] * len(self.iterators)
        for number, iterator in enumerate(self.iterators):
            try:
                items[number] = next(iterator)
            except StopIteration:
                self.has_ended[number] = True
                if self.mode == "min_size" or all(self.has_ended):
                    return None
                if self.mode == "max_size_cycle":
                    self.iterators[number] = iter(self.wrapped[number])
                    items[number] = next(self.iterators[number])
        return items

    def arm(self, items: list[Any]) -> Piece:
        """Begin a step on what the loaders gave."""
        piece = self.session.arm()
        assert piece is not None
        if piece.is_fetch:
            self.session.cache(items)
        return piece

    def train_on(self, piece: Piece) -> Step:
        """Do the step that was begun."""
        step = Step(self.epoch, piece, [numbers(part) for part in self.session.take()])
        self.session.measures.clock.end()
        self.num_processed += 1
        self.is_over = self.has_all_steps()
        self.steps.append(step)
        return step

    def has_all_steps(self) -> bool:
        """Whether the epoch is over, as far as that is known from its length."""
        limits = [] if self.limit is None else [self.limit]
        if all(wrapped.has_length for wrapped in self.wrapped):
            lengths = [len(wrapped) for wrapped in self.wrapped]
            limits.append(min(lengths) if self.mode == "min_size" else max(lengths))
        return any(self.num_processed >= limit for limit in limits)

    def step(self) -> Step | None:
        """One step; None if the epoch has none left."""
        items = self.ask()
        return None if items is None else self.train_on(self.arm(items))

    def end(self) -> None:
        """End the epoch, wherever in it."""
        self.is_over = True
        self.session.finish_epoch()
        self.epoch += 1
        self.is_over = False

    def run_epoch(self, limit: int | None = None) -> list[Step]:
        """Run an epoch, up to so many steps of it."""
        before = len(self.steps)
        self.begin()
        while (limit is None or self.num_processed < limit) and self.step() is not None:
            pass
        self.end()
        return self.steps[before:]

    def samples(self) -> list[Any]:
        """Samples of the first loader's batch in every step."""
        return [step.parts[0] for step in self.steps]
