"""Runs the plan: asks the loaders, the ranks and the device what the next step is, and holds the batch for it.

::

    EchoLoader  --piece_for-->  EchoSession  <--arm, cache, take--  the training loop
    one per loader               one for all                         one step at a time
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from lightning_gpufeed.device.marks import StepClock
from lightning_gpufeed.device.vote import HostVote, warn_uneven_ranks
from lightning_gpufeed.echo.cache import DeviceCache
from lightning_gpufeed.echo.fetcher import BatchFetcher
from lightning_gpufeed.echo.ledger import Step, StepLedger
from lightning_gpufeed.echo.loader import EchoLoader, echo_loader, leading_loader
from lightning_gpufeed.echo.measures import EchoMeasures
from lightning_gpufeed.echo.plan import EchoRule, EchoTrace, FixedEcho, Piece, pass_seed
from lightning_gpufeed.echo.position import Ending, Place, Round
from lightning_gpufeed.echo.report import EchoReport
from lightning_gpufeed.echo.resume import SavedRun

__all__ = ["EchoSession"]

_STATE_VERSION = 1


class EchoSession:
    """Directs the loaders of a training and holds the fetched batch on its device.

    Attributes:
        rule: When a batch is used once more.
        num_splits: Pieces that a pass over a batch is cut into.
        trace: How often each batch was used so far.
        measures: What this epoch did and took.
        device_cache: The batch that was fetched last, on its device.
        extra_steps: Steps of this epoch beyond (or short of) the length it began with.
        is_fixed: Whether every batch is used equally often.
        num_ranks: How many processes train together.
        members: The loaders of this epoch.
        wrapped: The loaders that were made part of this session, begun or not.
        saved: Another training's place to continue from, until the first step is made; None if there is none.
        latest: The piece that the step in progress, or the latest step, is on.
    """

    def __init__(
        self,
        rule: EchoRule,
        num_splits: int,
        seed: int,
        *,
        vote: HostVote,
        replica: int | None = None,
        current_epoch: Callable[[], int],
        num_processed: Callable[[], int],
        is_epoch_over: Callable[[], bool] = lambda: False,
        is_cut_to_shortest: Callable[[], bool] = lambda: False,
        on_length_change: Callable[[int], None] = lambda change: None,
        clock: StepClock,
    ) -> None:
        """Nothing fetched yet.

        Args:
            rule: When a batch is used once more.
            num_splits: Pieces that a pass over a batch is cut into.
            seed: Decides all permutations.
            vote: Joins the ranks.
            replica: Which of the models that train on different batches this rank belongs to; None: each rank has one.
            current_epoch: Which epoch it is.
            num_processed: How many steps of this epoch are done.
            is_epoch_over: Whether these are all that the epoch will have, wherever in a batch it ends.
            is_cut_to_shortest: Whether the shortest of several loaders ends an epoch, and not the longest.
            on_length_change: Called with the number of steps by which the epoch became longer.
            clock: Times the steps on their device.
        """
        self.rule = rule
        self.num_splits = num_splits
        self.trace = EchoTrace()
        self.measures = EchoMeasures(clock)
        self.extra_steps = 0
        self.num_ranks = vote.num_ranks
        self.is_fixed = isinstance(rule, FixedEcho)
        self.saved: SavedRun | None = None
        self.latest: Piece | None = None
        self._seed = seed
        self._vote = vote
        self._replica = vote.rank if replica is None else replica
        self._current_epoch = current_epoch
        self._num_processed = num_processed
        self._is_epoch_over = is_epoch_over
        self._is_cut_to_shortest = is_cut_to_shortest
        self._on_length_change = on_length_change
        self.members: list[EchoLoader] = []
        self._ledger = StepLedger()
        self.device_cache = DeviceCache(num_splits, is_first_in_order=not self.is_fixed)
        self._ending = Ending()
        self.wrapped: list[EchoLoader] = []
        self._reading = threading.local()

    # The loaders' side -----------------------------------------------------------------------------------

    def wrap(self, loader: Any, **options: Any) -> EchoLoader:
        """Make any loader one of this session, with options of `EchoLoader`; it continues where a loaded state says."""
        wrapped = echo_loader(loader, self, **options)
        if hasattr(loader, "is_latest_in_work"):
            loader.is_latest_in_work = self._is_latest_in_work
        self.wrapped.append(wrapped)
        if self.saved is not None:
            self.saved.continue_loader(wrapped)
            self.extra_steps = self.saved.extra_steps
        return wrapped

    def enrol(self, loader: EchoLoader) -> None:
        """An iteration over a loader begins."""
        is_again = loader in self.members and not loader.is_exhausted
        if is_again and self._ledger.armed is None and self._ledger.asked is not None:
            # No step was made of what was asked of the iteration before: it is given up, and all begin anew.
            self._begin_asking()
        if loader not in self.members:
            self.members.append(loader)
            loader.num_yielded = self._ledger.num_asked

    def _begin_asking(self) -> None:
        self.members = []
        self._ledger.begin_asking()

    def num_steps_of(self, num_batches: int) -> int:
        """Steps that the first batches of an epoch take."""
        return self.wrapped[0].num_usual_steps(num_batches) if self.wrapped else num_batches

    @property
    def first_fetch(self) -> int:
        """Number of the batch that a new iteration begins with."""
        return 0 if self.saved is None or self.saved.piece is None else self.saved.piece.fetch

    def piece_for(self, loader: EchoLoader) -> Piece:
        """What the loader's next item belongs to; the loader that asks first decides for all."""
        ledger = self._ledger
        if ledger.asked is None or loader.num_yielded == ledger.num_asked:
            ledger.ask(self._next_step())
        assert ledger.asked is not None
        return ledger.asked.piece

    def handed_out(self) -> None:
        """A loader gave its item for the latest step."""
        self._ledger.hand_out()

    def fetched(self, loader: EchoLoader, batch: Any, has_batch: bool, fetcher: BatchFetcher) -> bool:
        """A loader fetched for the step in the making, or has no batch left; whether the step takes place."""
        assert self._ledger.asked is not None
        round_ = self._ledger.asked.round
        number, before, after = self.members.index(loader), fetcher.state_before, fetcher.state
        round_.keep_states(number, len(self.members), before, fetcher.is_begun_before, after)
        if has_batch and self.num_splits > 1 and batch is not None:
            round_.smallest = min(round_.smallest, loader.num_samples(batch))
        if len(self.members) == 1:
            return self._settle(round_, loader, has_batch)
        if has_batch and loader is self.members[-1]:
            self._settle(round_, loader, True)
        return has_batch

    def _next_step(self) -> Step:
        if self._ledger.asked is None:
            saved = self.saved
            if saved is not None and saved.piece is not None:
                return Step(saved.piece, Round(saved.piece.fetch, saved.num_counted))
            if saved is not None:
                # A Trainer that resumes at the end of an epoch goes on with the next one unannounced.
                self.begin_epoch()
            return Step(Piece(), Round(0))
        piece, round_ = self._ledger.asked
        self._settle(round_, self.members[0], True)
        if piece.piece_index + 1 < round_.num_pieces:
            return Step(piece.next_piece(), round_)
        if self._wants_pass(piece):
            if piece.pass_index + 1 == round_.num_counted:
                round_.num_counted += 1
                self._grow(round_.num_pieces)
            return Step(piece.next_pass(), round_)
        return Step(piece.next_fetch(), round_.next_round())

    def _wants_pass(self, piece: Piece) -> bool:
        wants = self._wants(piece)
        if wants is not None:
            return wants
        # Everybody waits for the rank whose batch comes last.
        return self._vote.minimum(1 - self.measures.is_late(self.members)) == [0]

    def _wants(self, piece: Piece) -> bool | None:
        """Whether the batch is used once more after this pass; None if that depends on the next one being ready."""
        epoch, fetch, passes_done = self._current_epoch(), piece.fetch, piece.pass_index + 1
        # Workers bring their batches at the same time: the last one may use what the others of a burst left.
        num_at_once = max([1, *(member.num_at_once for member in self.members)])
        return self.rule.wants_pass(epoch, fetch, passes_done, self.trace.unused(epoch, fetch, num_at_once))

    def _settle(self, round_: Round, loader: EchoLoader, has_batch: bool) -> bool:
        """Find the number of pieces of a round, the same on all ranks; whether the round takes place."""
        if round_.num_pieces:
            return True
        smallest, all_have = round_.smallest, int(has_batch)
        if self.num_splits > 1 or not loader.has_length:
            all_have, smallest = self._vote.minimum(all_have, smallest)
        if not all_have:
            if has_batch:
                warn_uneven_ranks()
            return False
        round_.num_pieces = max(1, min(self.num_splits, smallest))
        num_passes = self.rule.known_passes(self._current_epoch(), round_.fetch) or max(1, round_.num_counted)
        leader = leading_loader(self.members, self._is_cut_to_shortest())
        if leader is not None:
            counted = round_.num_counted * round_.num_pieces
            usual = self.rule.usual_passes * leader.expected_pieces(round_.fetch)
            self._grow(num_passes * round_.num_pieces - (counted or usual))
        round_.num_counted = num_passes
        return True

    def _grow(self, num_steps: int) -> None:
        if num_steps:
            self.extra_steps += num_steps
            self._on_length_change(num_steps)

    # The training loop's side ----------------------------------------------------------------------------

    def arm(self) -> Piece | None:
        """The next step begins.

        Returns:
            What it trains on; None if no loader of this session gave an item for it.
        """
        step = self._ledger.arm(self._num_processed())
        if step is None:
            return None
        self.saved, self.latest = None, step.piece
        self._settle(step.round, self.members[0], True)
        self.trace.add(self._current_epoch(), self.latest.fetch, self.latest.pass_index + 1)
        self.measures.count(self.latest)
        self.measures.clock.begin()
        return self.latest

    def cache(self, parts: list[Any]) -> None:
        """Hold what was fetched for the step that was armed.

        Args:
            parts: On the device; one for each loader.

        Raises:
            ValueError: It has to be cut, and its samples cannot be told apart.
        """
        assert self._ledger.armed is not None
        seed = pass_seed(self._seed, self._replica, self._current_epoch(), self._ledger.armed.piece.fetch)
        self.device_cache.put(parts, [member.samples_per_batch for member in self.members], seed)

    def take(self) -> list[Any]:
        """Copy the piece of the step that was armed out of the batch.

        Returns:
            One part for each loader.

        Raises:
            ValueError: A batch has fewer samples on the device than it had when it was fetched.
        """
        assert self._ledger.armed is not None
        piece, round_ = self._ledger.armed
        parts = self.device_cache.take(piece, round_.num_pieces)
        if piece.piece_index + 1 == round_.num_pieces and self._wants(piece) is False:
            self.device_cache.clear()
        return parts

    def finish_epoch(self) -> None:
        """The epoch is over, wherever in a batch it ended: the next one begins with a fetch."""
        self._ending = self._ending_now()
        self.saved = None
        self._forget_steps()

    def start_over(self) -> None:
        """New loaders are made: a finder's trial, which no hook ends, may have left its place behind."""
        self._forget_steps()
        self.close()
        self.wrapped = []
        if self.saved is None:
            self.extra_steps = 0

    def _forget_steps(self) -> None:
        self.members = []
        self._ledger.begin_epoch()
        self.device_cache.clear()

    def begin_epoch(self) -> None:
        """A new epoch: its length is the usual one again, and it is measured anew."""
        if self.saved is not None and self.saved.piece is not None:
            return
        self._grow(-self.extra_steps)
        self.measures.reset()

    def report(self, epoch: int, elapsed_seconds: float) -> EchoReport:
        """What the epoch did; every rank has to ask, as the slowest loader counts."""
        load_seconds = -self._vote.minimum(-round(self.measures.times.seconds_per_batch * 1e9))[0] / 1e9
        return self.measures.report(epoch, elapsed_seconds, load_seconds, not self.is_fixed)

    def close(self) -> None:
        """End all threads."""
        for wrapped in self.wrapped:
            wrapped.close()

    # Where to continue -----------------------------------------------------------------------------------

    def _place(self) -> Place | None:
        """The first step of the epoch that is not done yet; None if there is none."""
        place = self._ledger.waiting_place(self._num_processed())
        if place is not None or self._ledger.armed is None or self._is_epoch_over():
            return place
        piece, round_ = self._ledger.armed
        if piece.piece_index + 1 < round_.num_pieces:
            return Place(piece.next_piece(), round_)
        wants = self._wants(piece)
        if wants is not True and all(member.is_at_end for member in self.members):
            return None
        if wants is False:
            return Place(piece.next_fetch(), round_)
        return Place(piece.next_pass(), round_, is_decided=wants is not None)

    def _ending_now(self) -> Ending:
        """How far the loaders were used, should the epoch be over."""
        armed = self._ledger.armed
        return self._ending if armed is None else Ending(armed.round.after, [one.is_at_end for one in self.members])

    def _is_latest_in_work(self) -> bool:
        """Whether a loader's state has to have its latest batch come again."""
        # Not if it is read to be kept with that batch, by whichever thread fetched it.
        place = None if getattr(self._reading, "is_on", False) else self._place()
        return place is not None and place.needs_batch_again

    def read_state(self, loader: Any) -> Any:
        """The state of a loader after the batch it gave last, worked on or not."""
        self._reading.is_on = True
        try:
            # A loader may go on changing what it gave.
            return copy.deepcopy(loader.state_dict())
        finally:
            self._reading.is_on = False

    def loader_state(self, loader: EchoLoader) -> Any:
        """The state of a loader to continue from, with or without echoes."""
        place = self._place()
        states = [] if place is None else place.loader_states()
        number = self.members.index(loader) if loader in self.members else 0
        return states[number] if number < len(states) else self.read_state(loader.loader)

    @property
    def mean_factor(self) -> float:
        """How often a batch is used: as given, or on average over the latest ones."""
        return self.rule.factor if isinstance(self.rule, FixedEcho) else self.trace.mean_factor

    @property
    def fresh_steps(self) -> int:
        """Steps of this epoch on samples that were not trained on before."""
        return 0 if self.latest is None else self.latest.fresh_steps(self.num_splits)

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands, and how often each batch was used.

        Returns:
            Plain numbers and strings, and the states of the loaders; no place between epochs.
        """
        place, num_done = self._place(), self._num_processed()
        return {
            "version": _STATE_VERSION,
            "epoch": self._current_epoch(),
            "place": None if place is None else place.to_dict(),
            "ending": asdict(self._ending_now() if place is None else self._ending),
            "settings": [wrapped.settings for wrapped in self.wrapped],
            "num_steps": num_done,
            "extra_steps": self.extra_steps,
            "counts": self.measures.counts(self.latest if self._ledger.is_latest_undone(num_done) else None),
            "trace": self.trace.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another training; before any loader is wrapped.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: The state is of another version.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"the state has version {state.get('version')!r}; expected {_STATE_VERSION}.")
        self.trace = EchoTrace(state["trace"])
        self.saved = SavedRun(state, self.rule)
        self._ending = Ending(**state["ending"])
        self.extra_steps = self.saved.extra_steps
        self.measures.restore(state["counts"])
