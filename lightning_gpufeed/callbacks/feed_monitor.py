"""`FeedMonitor`: one verdict why the device waits, with the numbers behind it and what each cure would gain."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_gpufeed.callbacks.figures import log_figures
from lightning_gpufeed.callbacks.loader_facts import (
    cached_files,
    describe_loader,
    find_readers,
    is_ready,
    name_files,
    open_files,
)
from lightning_gpufeed.callbacks.set_aside import WhenSetAside
from lightning_gpufeed.callbacks.trainer_watch import TrainerWatch, training_loader
from lightning_gpufeed.device.vote import HostVote
from lightning_gpufeed.diagnose.counters import EpochCounters, FileFacts
from lightning_gpufeed.diagnose.figures import line
from lightning_gpufeed.diagnose.machine import allowed_cores
from lightning_gpufeed.diagnose.observer import Observer, Readers
from lightning_gpufeed.diagnose.page import write_page
from lightning_gpufeed.diagnose.records import EpochRecord
from lightning_gpufeed.diagnose.sampling import StepSampler
from lightning_gpufeed.diagnose.shares import metrics_of
from lightning_gpufeed.diagnose.table import print_table
from lightning_gpufeed.diagnose.verdict import BOUND_SHARE, judge, worst_rank

__all__ = ["FeedMonitor"]

_UNUSED_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
)
"""Called in every step, for nothing."""


class FeedMonitor(Callback):
    """Says at the end of every epoch why the device waits, and what would help how much.

    It does what a careful engineer does with top and htop: look at how long the step waits for data, at what the
    loader's processes do meanwhile (user time, kernel time, waiting for a core, asleep, bytes read), name the one
    cause, and predict from t_step = max(t_compute, t_load / parallelism) what each cure would gain::

        FeedMonitor, epoch 1: read amplification: the step waits 63 % of the time for data; loader workers read 31.9
        bytes for each byte delivered; ... Predicted: chunk order 2.1x (1.8-2.4), uint8 on the host 1.6x (1.3-2.0),
        BatchEcho e <= 2.7 is free. First: gpufeed pack train.h5 OUT.h5 once, and train on OUT.h5 with H5DataModule.

    A first verdict comes after `first_seconds`, so that nobody has to wait for the end of a long epoch. The first
    epoch is kept apart: its files may come from storage.

    ====================================  ===================================================================
    Hook                                  what it does
    ====================================  ===================================================================
    on_fit_start                          begins to watch the Trainer; every rank joins
    on_train_start, on_train_epoch_start  sums start anew; finds the loader
    on_train_batch_end                    a step is over; the operating system is asked now and then
    on_train_epoch_end                    verdict: a line, a table, figures for the loggers, the page
    on_exception, teardown                takes everything back
    ====================================  ===================================================================

    What stays bitwise equal: everything. Nothing is read ahead, copied, or drawn from the training's random generators;
    no step waits for the device, and no step has a collective.

    Cost: at most 0.5 % of steps of 4 ms or more, 1 % of steps of 2 ms. To watch one in full takes 0.05 to 0.2 ms; the
    monitor measures that, and where steps are too short for it watches a random part of them in full, eight in a row.
    Of the others it counts how many there are, their time and their wait, so that no stall is lost; how the rest
    divides is taken from those that were watched, and the verdict says how many they were.

    On a CUDA device waiting is what leaves the device idle, by events in its own queue; elsewhere it is the time that
    the training loop is blocked. Several ranks: at the end of an epoch their counters are gathered once, on the
    host's network, and rank 0 reports the rank that waits most.

    No counter is required: where the kernel, the container or the driver keeps one back, the verdict rests on the
    others and its predictions become wider.

    Example:
        >>> callbacks = [FeedMonitor()]
        >>> callbacks = [FeedMonitor(report_path="feed.html", table=False)]

    Source: the method of tf.data's analysis and Plumber (Kuchnik et al., MLSys 2022), what-if from measured stages.

    Attributes:
        records: Counters and verdict of each epoch so far, on rank 0; the first entry may be the early verdict.
    """

    def __init__(
        self,
        report_path: str | os.PathLike[str] | None = None,
        *,
        table: bool = True,
        first_seconds: float | None = 30.0,
        interval_seconds: float = 1.0,
    ) -> None:
        """Note the arguments.

        Args:
            report_path: One HTML file, written anew after each epoch, that opens without a network.
            table: Print a table at the end of an epoch, beside the line.
            first_seconds: Seconds of training after which an early verdict is given once; None for none.
            interval_seconds: Time between two looks at the operating system's counters, 0.1 or more.

        Raises:
            ValueError: An argument is out of range.
        """
        super().__init__()
        if first_seconds is not None and not 0 < first_seconds < float("inf"):
            raise ValueError(f"first_seconds is {first_seconds}; expected a number of seconds above 0, or None.")
        if not 0.1 <= interval_seconds < float("inf"):
            raise ValueError(f"interval_seconds is {interval_seconds}; expected 0.1 or more.")
        self._report_path = None if report_path is None else Path(report_path).expanduser()
        if self._report_path is not None and self._report_path.is_dir():
            raise ValueError(f"report_path is the folder {self._report_path}; expected a file such as feed.html in it.")
        self._has_table = table
        self._first_seconds, self._interval_seconds = first_seconds, interval_seconds
        self.records: list[EpochRecord] = []
        self._trainer: Trainer | None = None
        self._observer: Observer | None = None
        self._watch: TrainerWatch | None = None
        self._ends: list[WhenSetAside] = []
        self._vote: HostVote | None = None
        self._is_brief = self._is_asked = False
        self._forget_run()

    def _forget_run(self) -> None:
        self._loader: Any = None
        self._cached: dict[str, float] = {}
        self._begin = 0.0
        self._is_early_due = False
        self._readers, self._paths = Readers((), ()), set[str]()
        self._files: dict[tuple[str, ...], tuple[FileFacts, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The arguments and the records: workers that are spawned may get a copy of the Trainer and all that it has."""
        state = self.__dict__.copy()
        self._take_hooks_back(state, "on_train_batch_end", *_UNUSED_HOOKS)
        state.update(
            _is_brief=False,
            _is_asked=False,
            _trainer=None,
            _observer=None,
            _watch=None,
            _vote=None,
            _loader=None,
            _ends=[],
        )
        return state

    # Watching --------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch.

        Args:
            trainer: The Trainer.
            pl_module: The model.
        """
        if self._trainer is not None:
            self._stop()
        self.records = []
        self._forget_run()
        self._trainer = trainer
        self._vote = HostVote()
        cores = (platform.node(), allowed_cores())
        self._observer = Observer(
            trainer.strategy.root_device,
            self._find_readers,
            rank=self._vote.rank,
            num_ranks=self._vote.num_ranks,
            interval_seconds=self._interval_seconds,
            num_sharing=self._vote.collect(cores).count(cores),
            is_ready=self._has_ready,
            sampler=StepSampler(),
            switch=self._switch,
        )
        self._watch = TrainerWatch(trainer, self._observer)
        self._ends.append(WhenSetAside(trainer, self, self._stop))
        self._is_early_due = self._first_seconds is not None
        self._leave_out_hooks(trainer)

    def _leave_out_hooks(self, trainer: Trainer) -> None:
        """Lightning asks whether a hook can be called before it makes a context for it: twenty microseconds a step."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._is_asked = any(one is self for one in callbacks)  # somebody else may call a hook without asking
        if self._is_asked:
            for name in _UNUSED_HOOKS:
                self._leave_out(name, Callback)

    def _leave_out(self, name: str, owner: type[Callback]) -> None:
        """Not where a subclass or somebody else has made something of it."""
        if getattr(type(self), name) is getattr(owner, name):
            self.__dict__.setdefault(name, None)

    def _take_hooks_back(self, state: dict[str, Any], *names: str) -> None:
        for name in names:
            if state.get(name, self) is None:
                del state[name]

    def _switch(self, is_full: bool) -> None:
        """From here on every step is watched in full, or of none more than its request for a batch."""
        if self._watch is None or is_full is not self._is_brief:
            return
        self._is_brief = not is_full
        self._watch.listen(is_full)
        if is_full:
            self._take_hooks_back(self.__dict__, "on_train_batch_end")
        elif self._is_asked:
            self._leave_out("on_train_batch_end", FeedMonitor)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch that is resumed in its middle does not begin: it goes on from here.

        Args:
            trainer: The Trainer.
            pl_module: The model.
        """
        self._begin_epoch(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sums start anew.

        Args:
            trainer: The Trainer.
            pl_module: The model.
        """
        self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: Trainer) -> None:
        if trainer is not self._trainer or self._observer is None:
            return
        loader = training_loader(trainer)
        if loader is not self._loader or not self._cached:
            self._loader, self._cached = loader, cached_files(loader)
        self._observer.loader = describe_loader(loader)
        self._begin = self._begin or time.perf_counter()
        self._observer.begin_epoch(trainer.current_epoch)

    def _find_readers(self) -> Readers:
        found = find_readers(self._loader)
        if found != self._readers or not self._paths:
            # Workers are gone when an epoch ends, and with them the list of what they read.
            self._readers = found
            self._paths.update(open_files(found))
        observer = self._observer
        if found.threads and observer is not None and not observer.loader.is_ahead:
            # A thread that reads ahead for a loader without workers begins and ends with the epoch.
            observer.loader = dataclasses.replace(observer.loader, has_thread=True)
        return found

    def _has_ready(self) -> bool | None:
        return is_ready(self._loader)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is over.

        Args:
            trainer: The Trainer.
            pl_module: The model.
            outputs: Not looked at.
            batch: Not looked at.
            batch_idx: Not looked at.
        """
        if trainer is not self._trainer or self._observer is None or self._is_brief:
            return
        self._observer.end_step()
        if self._is_early_due and time.perf_counter() - self._begin >= (self._first_seconds or 0.0):
            self._is_early_due = False
            # Ranks come here at different steps: each judges for itself, and rank 0 speaks.
            self._report(trainer, [self._counters()], is_interim=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the epoch.

        Args:
            trainer: The Trainer.
            pl_module: The model.
        """
        if trainer is not self._trainer or self._observer is None or self._vote is None:
            return
        self._is_early_due = False
        self._report(trainer, self._vote.collect(self._counters()), is_interim=False)

    # Reporting -------------------------------------------------------------------------------------------

    def _counters(self) -> EpochCounters:
        """What this rank counted; the files are looked at only if the step waits for them."""
        assert self._observer is not None
        counters = self._observer.counters()
        if counters.steps.wait_share < BOUND_SHARE:
            return counters
        paths = tuple(sorted(self._paths or (one.path for one in counters.loader.files)))
        if paths not in self._files:
            self._files[paths] = name_files(counters.loader, paths, self._cached)
        files = self._files[paths]
        return dataclasses.replace(counters, loader=dataclasses.replace(counters.loader, files=files))

    def _report(self, trainer: Trainer, ranks: list[EpochCounters], *, is_interim: bool) -> None:
        """Say it, on rank 0."""
        if not trainer.is_global_zero:
            return
        counters, others = worst_rank(ranks)
        verdict = judge(counters, others)
        text = line(counters, verdict)
        so_far = f", after {counters.steps.num_steps:,} steps" if is_interim else ""
        rank_zero_info(f"FeedMonitor, epoch {counters.epoch}{so_far}: {text}")
        self.records.append(EpochRecord(counters, verdict, is_interim=is_interim, line=text))
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if next((one for one in callbacks if isinstance(one, FeedMonitor)), self) is self:  # of two one is enough
            log_figures(trainer, metrics_of(counters, verdict), "FeedMonitor")
        if self._has_table and not is_interim:
            try:
                print_table(self.records)
            except (Exception, SystemExit) as error:  # a closed pipe, a full disk: the training goes on
                self._has_table = False
                rank_zero_warn(f"FeedMonitor: the table could not be printed ({error!r}); no more tables.")
        if self._report_path is not None:
            try:
                write_page(self._report_path, self.records)
            except OSError as error:  # a training does not end for a page
                rank_zero_warn(f"FeedMonitor: {self._report_path} could not be written ({error}).")

    # Ending ----------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take everything back; other ranks may be gone, so they are not asked.

        Args:
            trainer: The Trainer.
            pl_module: The model.
            exception: Not looked at.
        """
        if trainer is self._trainer:
            self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take everything back.

        Args:
            trainer: The Trainer.
            pl_module: The model.
            stage: Given by the Trainer.
        """
        if trainer is self._trainer:
            self._stop()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._observer is not None:
            self._observer.close()
        if self._vote is not None:
            self._vote.close()
        while self._ends:
            self._ends.pop().remove()
        self._take_hooks_back(self.__dict__, "on_train_batch_end", *_UNUSED_HOOKS)
        self._is_brief = False
        self._trainer = self._observer = self._watch = self._vote = None
        self._forget_run()
