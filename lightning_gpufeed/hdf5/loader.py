"""`H5Loader`: batches from HDF5 files for any training loop, without Lightning."""

from __future__ import annotations

import os
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.device.feed import Feed, FeedStatistics
from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.access import StrPath
from lightning_gpufeed.hdf5.arguments import LARGEST_SEED, chosen_samples, whole_number
from lightning_gpufeed.hdf5.batch_maker import BatchMaker, MadeBatch
from lightning_gpufeed.hdf5.draws import make_shuffle, resume_shuffle
from lightning_gpufeed.hdf5.epoch_order import EpochOrder, resumed_lanes, window_state
from lightning_gpufeed.hdf5.order import EpochPlan, FullShuffle, Shuffle, WindowShuffle, parse_shuffle
from lightning_gpufeed.hdf5.position import EpochPosition
from lightning_gpufeed.hdf5.source import Batch, H5Source
from lightning_gpufeed.hdf5.window import Lanes

__all__ = ["H5Loader"]

_STATE_VERSION = 1


class H5Loader:
    """Iterable over batches of one or more HDF5 files: shuffled, sharded, read ahead, resumable.

    Yields dicts of host tensors in the file's own type (uint8 images stay uint8). One iteration is one epoch;
    each has a new order, a function of `seed` and the epoch's number alone. Memory is bounded by `num_slots`
    batches beside those the caller holds; a batch that is held is never overwritten.

    All ranks take the same number of steps and together use every sample exactly once; the last step is split
    evenly between them, so it may be smaller, or larger by one sample, than `batch_size`.

    Host memory is pinned when a GPU is there, so `tensor.to(device, non_blocking=True)` overlaps; the memory is
    not reused before such a copy is done.

    The position is counted when a batch is handed out, not when it is read ahead. `state_dict` is a few
    numbers, the same on every rank; loading it continues exactly, also with another `batch_size` or
    `world_size`.

    Example:
        >>> with H5Loader("train.h5", batch_size=32) as loader:
        ...     for batch in loader:
        ...         images = batch["images"].to("cpu", non_blocking=True)  # usually "cuda"
    """

    def __init__(
        self,
        path: Sequence[StrPath] | StrPath | H5Source,
        batch_size: int,
        *,
        keys: Mapping[str, str] | Sequence[str] | str | None = None,
        shuffle: Shuffle | str | bool | None = "full",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        indices: Sequence[int] | npt.NDArray[Any] | None = None,
        weights: Sequence[float] | npt.NDArray[Any] | None = None,
        samples_per_epoch: int | None = None,
        num_slots: int = 2,
        pin_memory: bool | None = None,
        isolate: bool = False,
        device: torch.device | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        to_batch: Callable[[Batch], Any] | None = None,
    ) -> None:
        """Read the layout of the files; nothing is mapped or started yet.

        Args:
            path: One file, several as one, addresses (`s3://...`), or an open source (its `twin` for a second loader).
            batch_size: Samples per batch on this rank.
            keys: Datasets to use: names, or field name -> key. None takes all of them.
            shuffle: "full", "window", "window:N" or None; see `lightning_gpufeed.hdf5.order`.
            seed: Decides every order, 0 to 2**32 - 1.
            rank: This process, 0 to `world_size` - 1.
            world_size: Processes that share each epoch.
            drop_last: Leave out the samples that do not fill a step on every rank.
            indices: Use only these samples (int, 1-D; the unshuffled order is the order given).
            weights: Draw with replacement by these, one for each sample of the source: see `WeightedShuffle`.
            samples_per_epoch: Draws in an epoch; None for as many as there are samples used.
            num_slots: Batches read ahead, 1 to any.
            pin_memory: Page-locked buffers; None means yes when a GPU is there.
            isolate: Read in a process of its own, three more batches ahead: for loops that hold the interpreter lock.
            device: Copy batches there ahead of their use, on a stream of its own; None leaves them in host memory.
            storage_options: What fsspec needs to reach the addresses among the files.
            to_batch: Turns the dict into what is yielded; must be picklable if the loader is to be.

        Raises:
            FileNotFoundError: A file is missing.
            LayoutError: A file cannot be used.
            ValueError: An argument is out of range.
        """
        self._owns_source = not isinstance(path, H5Source)
        self.source = path if isinstance(path, H5Source) else H5Source(path, keys, storage_options=storage_options)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.seed = whole_number("seed", seed, 0, LARGEST_SEED)
        self.world_size = whole_number("world_size", world_size, 1)
        self.rank = rank
        self.drop_last = drop_last
        self._indices = chosen_samples(indices, self.source.num_samples)
        if weights is not None and self._indices is not None and isinstance(parse_shuffle(shuffle), WindowShuffle):
            self._indices = np.sort(self._indices)  # the draws are taken along the file
        self.shuffle, self.num_samples = make_shuffle(
            shuffle, weights, samples_per_epoch, self.source.num_samples, self._indices
        )
        self._chosen_digest: str | None = None
        self._groups: npt.NDArray[np.int64] | None = None
        # Of the epoch that a loaded state stands in: its own; of all others: those of today's ranks.
        self._lanes: dict[int, Lanes] = {}
        self._num_slots = num_slots
        self._maker = BatchMaker(
            self.source, num_slots=num_slots, pin_memory=pin_memory, isolate=isolate, device=device
        )
        self._to_batch = to_batch
        self.position = EpochPosition()
        self.statistics = FeedStatistics()
        # A training loop that may be interrupted inside a step can say here whether the latest batch has to come again.
        self.is_latest_in_work: Callable[[], bool] | None = None
        # Called before a batch is handed out.
        self.on_batch: Callable[[], None] | None = None
        self._process = os.getpid()
        self._feed: Feed[MadeBatch] | None = None
        self._running: weakref.ref[_Iteration] | None = None
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}; expected 0 to {world_size - 1} for world_size {world_size}.")
        whole_number("num_slots", num_slots, 1)
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True, but torch finds no GPU to pin memory for; leave it at None.")
        if EpochPlan(self.num_samples, self.batch_size, self.world_size, drop_last).step_samples > self.num_samples:
            warnings.warn(
                f"batch_size {batch_size} on {world_size} rank(s) is more than the dataset has "
                f"({self.num_samples} samples): every epoch is one smaller batch.",
                stacklevel=2,
            )
        order = getattr(self.shuffle, "order", self.shuffle)
        if isinstance(order, FullShuffle) and self.source.needs_decoding and not self.source.fits_cache:
            warnings.warn(
                f"a full shuffle decodes a whole chunk for nearly every sample of this file "
                f"({'; '.join(self.source.engine_lines)}). Use shuffle='window', or make the file fast once with: "
                f"gpufeed repack {self.source.paths[0]} OUT.h5",
                stacklevel=2,
            )

    def __len__(self) -> int:
        """Batches of this rank in an epoch.

        Returns:
            The same for every epoch. A resumed one has the batches that are left of it as its last ones.
        """
        return self._plan(0).num_steps

    @property
    def smallest_batch_samples(self) -> int:
        """Samples in the smallest batch of an epoch: the last one, on the rank that gets fewest."""
        plan = self._plan(0)
        first, stop = plan.bounds(plan.num_steps - 1) if plan.num_steps else (0, 0)
        return (stop - first) // self.world_size

    @property
    def step_samples(self) -> int:
        """Samples that all ranks together take in a full step."""
        return self.batch_size * self.world_size

    def _plan(self, start: int) -> EpochPlan:
        return EpochPlan(
            self.num_samples, self.batch_size, self.world_size, self.drop_last, min(start, self.num_samples)
        )

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Sample numbers of one epoch in the order that all ranks together use them in, step by step.

        Args:
            epoch: Counts from 0.

        Returns:
            int64 (num_samples,).
        """
        return self._epoch_order(epoch).of(epoch)

    def _epoch_order(self, epoch: int) -> EpochOrder:
        """What the order is a function of."""
        groups, lanes = self._chunk_groups(self.shuffle), self._lanes_of(epoch)
        return EpochOrder(self.shuffle, self.num_samples, self.seed, self._indices, groups, lanes)

    def _lanes_of(self, epoch: int) -> Lanes:
        own = Lanes(self.world_size, self.batch_size) if self.world_size > 1 else Lanes()
        return self._lanes.get(epoch, own)

    def _chunk_groups(self, shuffle: Shuffle) -> npt.NDArray[np.int64] | None:
        """Which samples lie in the same chunk; only a window needs to know."""
        if self._groups is None and isinstance(shuffle, WindowShuffle):
            self._groups = self.source.blocks(np.arange(self.num_samples) if self._indices is None else self._indices)
        return self._groups

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or go on with the one that was loaded.

        Which one is decided at the first batch, so a state may still be loaded, or the epoch set, after this.

        Returns:
            Iterator over this rank's batches.
        """
        return _Iteration(self)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is. Without this they count up from 0.

        Args:
            epoch: Counts from 0.
        """
        self.position.set_epoch(epoch)

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """What Lightning and DeepSpeed look for on a loader: a `sampler` with `set_epoch`, and `batch_size`."""
        return SimpleNamespace(sampler=self.position, batch_size=self.batch_size)

    def is_ready(self) -> bool:
        """Whether the next batch can be had without waiting. False outside of an epoch and before its first batch."""
        running = self._running() if self._running is not None else None
        return running is not None and not running.is_over and self._feed is not None and self._feed.is_ready()

    def _stop_running(self) -> None:
        """End the iteration that runs, if any, and wait for its thread, dropped by its user or not."""
        if self._process != os.getpid():
            # Forked while a thread was reading: what it held, locks included, is not to be touched here.
            self.__dict__.update(self.__getstate__(), _process=os.getpid())
            self._maker.forget()
            self.source.forget_open()
        running = self._running() if self._running is not None else None
        if running is not None:
            running.is_replaced = True
        if self._feed is not None:
            self._feed.close()
        self._feed = self._running = None

    def state_dict(self) -> dict[str, Any]:
        """Position after the latest batch handed out; before it, if `is_latest_in_work` says so.

        Returns:
            Plain numbers and strings, the same on every rank.
        """
        return {
            "version": _STATE_VERSION,
            "digest": self._digest(),
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": str(self.shuffle),
            **window_state(self.shuffle, self._chunk_groups(self.shuffle), self._lanes_of(self.position.epoch)),
            "step_samples": self.step_samples,
            **self.position.numbers(self.is_latest_in_work is not None and self.is_latest_in_work()),
        }

    def _digest(self) -> str:
        """Which samples are meant: the source's digest, and the choice among them."""
        if self._chosen_digest is None:
            chosen = b"" if self._indices is None else self._indices.tobytes()
            self._chosen_digest = f"{zlib.crc32(chosen):08x}"
        return f"{self.source.digest()}{self._chosen_digest}"

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved position at the next iteration.

        The seed and the shuffle of the state are taken over: they belong to the position.

        Args:
            state_dict: From `state_dict`, of any rank.

        Raises:
            ValueError: The state is of another kind or version.
            FeedError: The state was saved over other data.
        """
        if state_dict.get("version") != _STATE_VERSION:
            raise ValueError(
                f"the loader state has version {state_dict.get('version')!r}; expected {_STATE_VERSION}. "
                f"Was it saved by another loader?"
            )
        shuffle = resume_shuffle(self.shuffle, self.num_samples, state_dict)
        if (state_dict["digest"], state_dict["num_samples"]) != (self._digest(), self.num_samples):
            raise FeedError(
                f"the position was saved over {state_dict['num_samples']} samples (digest {state_dict['digest']}), but "
                f"{', '.join(self.source.paths)} gives {self.num_samples} (digest {self._digest()}): the order cannot "
                f"be continued over other data. Use the same files and split, or start without the loader's state."
            )
        if isinstance(shuffle, WindowShuffle):
            groups = self._chunk_groups(shuffle)
            self._lanes = {state_dict["epoch"]: resumed_lanes(state_dict, groups, self.source.paths)}
        self.seed, self.shuffle = state_dict["seed"], shuffle
        # Counted in steps of today's size, so that what is left ends where every epoch ends.
        steps_left = self._plan(state_dict["samples_consumed"]).num_steps
        self.position.load(state_dict["epoch"], state_dict["samples_consumed"], len(self) - steps_left)

    def close(self) -> None:
        """End the thread and close the files, unless the source was given open. Iterating again opens them."""
        self._stop_running()
        self._maker.close()
        if self._owns_source:
            self.source.close()

    def __enter__(self) -> Self:
        """The loader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but buffers and the running iteration."""
        return {
            **self.__dict__,
            "_feed": None,
            "_running": None,
            "is_latest_in_work": None,
            "on_batch": None,
        }

    def _start(self, iteration: _Iteration) -> tuple[Feed[MadeBatch], EpochPlan]:
        """Begin the epoch that the position says, in a new thread; ends the iteration that runs, if any."""
        if self.world_size == 1 and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            warnings.warn(
                f"every one of the {torch.distributed.get_world_size()} ranks reads all samples: this loader was made "
                f"for one. Give rank= and world_size=, or use a DataModule, which knows them.",
                stacklevel=4,
            )
        self._stop_running()
        self._running = weakref.ref(iteration)
        self.source.check_unchanged()
        is_over = self._plan(self.position.samples_consumed).num_steps == 0
        plan = self._plan(self.position.begin(is_over))
        if plan.num_left_out and not self.drop_last:
            warnings.warn(
                f"the rest of this epoch, {plan.num_left_out} sample(s), is less than one for each of the "
                f"{self.world_size} ranks and is left out. It was begun with fewer ranks.",
                stacklevel=4,
            )
        # A later epoch's last step may be one row larger.
        most_rows = min(self.batch_size, self.num_samples) + 1
        produce = self._maker.begin(
            self._epoch_order(self.position.epoch), self.position.epoch, plan, self.rank, most_rows
        )
        self._feed = Feed(produce, plan.num_steps, self._num_slots)
        weakref.finalize(iteration, self._feed.stop_soon)
        return self._feed, plan


class _Iteration:
    """One epoch over a loader. The thread starts at the first batch."""

    def __init__(self, loader: H5Loader) -> None:
        self._loader = loader
        self._process = os.getpid()
        self._feed: Feed[MadeBatch] | None = None
        self._plan: EpochPlan | None = None
        self._step = 0
        self.is_replaced = False
        self.is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self.is_over:
            raise StopIteration
        if self.is_replaced:
            raise FeedError(
                "this iteration was ended because another one over the same loader began, or the loader was closed. "
                "Make a second H5Loader to read twice at the same time."
            )
        if self._feed is None:
            self._feed, self._plan = loader._start(self)
        assert self._plan is not None
        feed = self._feed
        try:
            batch = loader._maker.finish(next(feed))
        except BaseException:
            self.is_over = True
            raise
        first, stop = self._plan.bounds(self._step)
        rank_first, rank_stop = self._plan.rank_bounds(self._step, loader.rank)
        self._step += 1
        loader.position.advance(stop - first)
        feed.statistics.num_samples += rank_stop - rank_first
        feed.statistics.num_bytes += sum(t.nbytes for t in batch.values() if isinstance(t, torch.Tensor))
        loader.statistics = feed.statistics
        if loader.on_batch is not None:
            loader.on_batch()
        return batch if loader._to_batch is None else loader._to_batch(batch)
