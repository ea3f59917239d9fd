"""A loader whose epochs have one item for each step on a piece of a batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_gpufeed.device.samples import BatchForm, count_samples
from lightning_gpufeed.echo.cache import form_or_none
from lightning_gpufeed.echo.fetcher import BatchFetcher
from lightning_gpufeed.echo.lengths import begins_anew, last_batch_samples, num_batches_of, samples_per_batch
from lightning_gpufeed.echo.plan import AdaptiveEcho
from lightning_gpufeed.echo.trial import ReadAheadTrial

if TYPE_CHECKING:
    from lightning_gpufeed.echo.session import EchoSession

__all__ = ["REPEATED", "EchoLoader", "echo_loader", "leading_loader"]


class _Repeated:
    """Stands for a batch that is on the device already. No container and no tensor, so nothing looks into it."""

    def __repr__(self) -> str:
        return "REPEATED"


REPEATED = _Repeated()
"""What an `EchoLoader` yields for a step on a batch that was fetched before."""


class EchoLoader:
    """Stands in for a loader and yields its batches, each followed by `REPEATED` for every further step on it.

    Everything else is the loader's own: its length apart, whatever is asked of this object is asked of the loader.

    Attributes:
        loader: The loader.
        num_yielded: Items given in this epoch.
        is_exhausted: Whether the loader had no batch left.
        is_loaded: Whether it was given its state inside an epoch, and the next iteration goes on there.
        begin_after: Whether it was at its end when the epoch was that the next iteration comes after; None if it does
            not continue another training there.
        form: How samples lie in the batches it gives, None while that is not known.
    """

    def __init__(
        self,
        loader: Any,
        session: EchoSession,
        *,
        can_read_ahead: bool = True,
        is_uninterrupted: bool = True,
        limit: float | int | None = None,
    ) -> None:
        """Wrap a loader.

        Args:
            loader: Any iterable over batches.
            session: Decides what each step is.
            can_read_ahead: Whether a thread may fetch, if the loader allows it.
            is_uninterrupted: Whether epochs are taken to their end with only training steps in between.
            limit: Steps of an epoch at most, or share of them; None for no limit.

        Raises:
            ValueError: The session cuts batches into more pieces than they have samples.
        """
        self.loader = loader
        self.num_yielded = 0
        self.is_exhausted = False
        self.form: BatchForm | None = None
        self._session = session
        self._trial = ReadAheadTrial(loader, is_uninterrupted=is_uninterrupted)
        self._fetcher: BatchFetcher | None = None
        self._first = 0
        self._limit = limit
        self.begin_after: bool | None = None
        self.is_loaded = False
        is_cut = limit is not None and self._max_fetches is None
        # What is its own iterator surely goes on where it is, wherever that is.
        is_stream = hasattr(loader, "__next__") and not is_uninterrupted
        if not can_read_ahead or is_stream or hasattr(loader, "is_ready"):
            self._trial.verdict = False
        elif is_cut and not begins_anew(loader):
            self._trial.verdict = False
            if isinstance(session.rule, AdaptiveEcho):
                warnings.warn(
                    f"BatchEcho: limit_train_batches ends epochs early, and {type(loader).__name__} may go on where it "
                    f"stopped: a batch read ahead would be lost. So batches are fetched in turn, and none is used "
                    f"again because of waiting. A DataLoader over a dataset with a length, or no limit, cures that.",
                    stacklevel=2,
                )
        batch_size = self.samples_per_batch
        if batch_size is not None and session.num_splits > batch_size:
            raise ValueError(
                f"num_splits is {session.num_splits}; expected at most the {type(loader).__name__}'s batch_size, "
                f"{batch_size}."
            )

    def __getattr__(self, name: str) -> Any:
        """What the loader has."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def samples_per_batch(self) -> int | None:
        """Samples in a full batch, if the loader says."""
        return samples_per_batch(self.loader)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch; None if the loader does not know."""
        return num_batches_of(self.loader)

    @property
    def has_length(self) -> bool:
        """Whether the loader knows its number of batches."""
        return self.num_batches is not None

    @property
    def num_at_once(self) -> int:
        """Batches that may come at the same time."""
        return int(getattr(self.loader, "num_workers", 0) or 1)

    @property
    def settings(self) -> list[Any]:
        """What a place inside one of its batches depends on."""
        session = self._session
        return [session.rule.usual_passes, session.num_splits, self.samples_per_batch, session.num_ranks]

    # What a Trainer sets on a loader must arrive there.
    @property
    def _iterator(self) -> Any:
        # Who asks for it is about to shut its workers down: a thread that waits for them would wait forever.
        iterator = self.loader._iterator
        self.close()
        return iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value

    @property
    def worker_init_fn(self) -> Any:
        """The loader's own."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self.loader.worker_init_fn = value

    def __len__(self) -> int:
        """Steps of an epoch.

        Returns:
            The number that is known now; it changes while batches are echoed by need.
        """
        num_batches = len(self.loader)
        # One of several loaders may have fewer batches than the epoch became shorter by.
        return max(1, self.num_usual_steps(num_batches) + self._session.extra_steps) if num_batches else 0

    @property
    def _first_fetch(self) -> int:
        """Number of the batch that the next iteration begins with; one of several loaders may be in a later round."""
        first = self._session.first_fetch
        return first % self.num_batches if len(self._session.wrapped) > 1 and self.num_batches else first

    @property
    def _max_fetches(self) -> int | None:
        """Batches that an epoch takes, if a limit of its steps says that exactly; else None."""
        limit, num_splits = self._limit, self._session.num_splits
        # A batch that is too small to be cut takes fewer steps.
        if limit is None or (num_splits > 1 and last_batch_samples(self.loader) is None):
            return None
        usual_passes = self._session.rule.usual_passes
        if isinstance(limit, int):
            return math.ceil(limit / (usual_passes * num_splits)) if self._session.is_fixed else None
        if self.num_batches is None:
            return None
        return math.ceil(int(self.num_usual_steps(self.num_batches) * limit) / (usual_passes * num_splits))

    def num_usual_steps(self, num_fetches: int) -> int:
        """Steps on the first batches of an epoch, as far as they are known when it begins.

        Args:
            num_fetches: How many batches.

        Returns:
            The number of steps.
        """
        num_pieces = self._session.num_splits * num_fetches
        if num_fetches and num_fetches == self.num_batches:
            num_pieces -= self._session.num_splits - self.expected_pieces(num_fetches - 1)
        return self._session.rule.usual_passes * num_pieces

    @property
    def is_at_end(self) -> bool:
        """Whether the running iteration has no batch left."""
        num_taken = self._first + (0 if self._fetcher is None else self._fetcher.num_taken)
        return self.is_exhausted or (self.num_batches is not None and num_taken >= self.num_batches)

    def expected_pieces(self, fetch: int) -> int:
        """Pieces that a batch is expected to be cut into.

        Args:
            fetch: Its number in the epoch.

        Returns:
            `num_splits`, or fewer for a last batch that is known to have fewer samples.
        """
        last = last_batch_samples(self.loader)
        if last is None or fetch != len(self.loader) - 1:
            return self._session.num_splits
        return max(1, min(self._session.num_splits, last))

    def num_samples(self, batch: Any) -> int:
        """Samples in one of the loader's batches, which has to be cut.

        Args:
            batch: On the host.

        Returns:
            The count.

        Raises:
            ValueError: They cannot be told apart.
        """
        if self.form is None:
            self.form = form_or_none(batch, self._session.num_splits, self.samples_per_batch)
        assert self.form is not None
        return count_samples(batch, self.form)

    def read_state(self) -> Any:
        """The loader's state, None if it has none."""
        return None

    def begin_fetch(self) -> None:
        """A batch is about to be fetched, perhaps one of several loaders', which may draw the same random numbers."""
        self._trial.is_uninterrupted &= len(self._session.members) == 1

    def close(self) -> None:
        """End the thread of the running iteration."""
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    def is_ready(self) -> bool:
        """Whether the next batch could be had without waiting."""
        return self.is_exhausted or self._fetcher is None or self._fetcher.is_ready()

    def seconds_to_go(self) -> float:
        """How long the next batch still takes, as far as that can be told."""
        return 0.0 if self._fetcher is None else self._fetcher.seconds_to_go()

    def announce(self) -> None:
        """Say again which loader's batch is worked on, to whom the loader says it."""
        on_batch = getattr(self.loader, "on_batch", None)
        if callable(on_batch):
            on_batch()

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration over the loader, at once, as the loader's own user would.

        Returns:
            Iterator over batches and `REPEATED`.
        """
        self._session.enrol(self)
        self.is_exhausted = False
        if self._fetcher is not None and self.begin_after is None:
            self.begin_after = self._fetcher.pending_begin_after
        # A thread that fetches from the iteration before would be in the way of the new one.
        self.close()
        begin_after, self.begin_after = self.begin_after, None
        is_loaded, self.is_loaded = self.is_loaded, False
        self._first = self._first_fetch
        limits = [limit for limit in (self._max_fetches, self.num_batches) if limit is not None]
        self._fetcher = BatchFetcher(
            self.loader,
            self.read_state,
            self._session.measures.times,
            self._trial,
            max_batches=min(limits) - self._first if limits else None,
            begin_after=begin_after,
            is_loaded=is_loaded,
        )
        return _EchoIteration(self, self._session, self._fetcher)


class _StatefulEchoLoader(EchoLoader):
    """An `EchoLoader` over a loader that can say where it is and continue there."""

    def state_dict(self) -> Any:
        """State to continue from with or without echoes: the loader's, before the batch that is worked on."""
        return self._session.loader_state(self)

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a state of the loader, unless a place inside a batch is known to continue from."""
        if self._session.saved is None:
            self.loader.load_state_dict(state_dict)

    def read_state(self) -> Any:
        """The loader's state after the batch it gave last."""
        return self._session.read_state(self.loader)


def echo_loader(loader: Any, session: EchoSession, **options: Any) -> EchoLoader:
    """Wrap a loader; the result has `state_dict` and `load_state_dict` if the loader has both.

    Args:
        loader: Any iterable over batches.
        session: Decides what each step is.
        **options: Of `EchoLoader`.

    Returns:
        The wrapped loader.

    Raises:
        ValueError: The session cuts batches into more pieces than they have samples.
    """
    is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (_StatefulEchoLoader if is_stateful else EchoLoader)(loader, session, **options)


def leading_loader(loaders: Sequence[EchoLoader], is_cut_to_shortest: bool) -> EchoLoader | None:
    """The loader whose length is that of the epoch.

    Args:
        loaders: All that are read side by side.
        is_cut_to_shortest: Whether the shortest ends the epoch, and not the longest.

    Returns:
        None if the length is not known.
    """
    known = [loader for loader in loaders if loader.has_length]
    if len(known) < len(loaders) and not is_cut_to_shortest:
        return None
    return (min if is_cut_to_shortest else max)(known, key=len, default=None)


class _EchoIteration:
    """One epoch over an `EchoLoader`."""

    def __init__(self, loader: EchoLoader, session: EchoSession, fetcher: BatchFetcher) -> None:
        self._loader = loader
        self._session = session
        self._fetcher = fetcher

    def __iter__(self) -> _EchoIteration:
        return self

    def __next__(self) -> Any:
        loader, session = self._loader, self._session
        piece = session.piece_for(loader)
        if loader.is_exhausted:
            raise StopIteration
        if not piece.is_fetch:
            loader.announce()
            item: Any = REPEATED
        else:
            item = self._fetch()
        loader.num_yielded += 1
        session.handed_out()
        return item

    def _fetch(self) -> Any:
        loader, session = self._loader, self._session
        loader.begin_fetch()
        try:
            batch = self._fetcher.take()
            has_batch = True
        except StopIteration:
            batch, has_batch = None, False
        fetcher = self._fetcher
        if not session.fetched(loader, batch, has_batch, fetcher):
            loader.is_exhausted = True
            raise StopIteration
        return batch
