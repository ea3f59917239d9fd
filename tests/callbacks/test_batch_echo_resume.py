"""A resumed run with `BatchEcho` is the run that was not interrupted, from any step, also in the middle of an echo.

Every comparison is to the last bit and of everything that a user can see: samples, batch index, global step, learning
rate and loss of each step, when validation ran, weights, optimizer, schedule, counters, and the echoes on record. The
dropout of the model depends on the step alone, as Lightning restores no generator.
"""

from __future__ import annotations

import copy
import functools
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpufeed import BatchEcho, H5DataModule, H5ImageDataModule, H5Loader
from tests.callbacks.echo_models import Gate, GatedDataset, Pace, wait_until
from tests.datamodules.models import (
    NUM_CLASSES,
    Recorder,
    every_checkpoint,
    make_trainer,
    same_bits,
    state_of,
    warnings_of,
    write_images,
)
from tests.doubles import WAIT_SECONDS

pytestmark = [
    # The runs that resume have no callbacks that would save again, or save elsewhere.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
    # With OnExceptionCheckpoint Lightning looks for an earlier one, and says so.
    pytest.mark.filterwarnings(r"ignore:`.fit\(ckpt_path=None\)` was called without a model:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning"),
    # Lightning cannot tell how many samples two loaders gave; nor what saves when, if optimized by hand.
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning"),
]

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 11, 8, 2
SIZES = [8, 3]
"""Samples of the batches of an epoch."""
TRACE = {0: [2, 1], 1: [1, 2]}
"""Echoes of a run: three passes an epoch, which is no multiple of the two that it has without them."""


# Models ------------------------------------------------------------------------------------------------------


def images_of(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample number i is always the same, and its label is its number."""
    return torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(3)), torch.arange(num_samples)


class Observed(Recorder):
    """A classifier with dropout that writes down all there is to know of each step."""

    def __init__(self, num_features: int = 6, **settings: Any) -> None:
        super().__init__(num_features, **settings)
        self.steps: list[tuple[Any, ...]] = []

    def loss_of(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.flatten(1)
        if self.trainer.training:
            images = images * self.dropped(images)
        return F.cross_entropy(self.layer(images), labels % NUM_CLASSES)

    def dropped(self, images: torch.Tensor) -> torch.Tensor:
        """What dropout leaves, as of a generator that a checkpoint had restored."""
        seed = 1000 * self.current_epoch + self.trainer.fit_loop.epoch_loop.batch_idx
        return torch.rand(images.shape, generator=torch.Generator().manual_seed(seed)) < 0.8

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((self.current_epoch, batch_idx, self.global_step, rate, loss.item(), self.trained[-1][1]))
        return loss

    def log(self, *args: Any, **settings: Any) -> None:
        """Means over an epoch begin anew after a resume, with or without us, and take time."""

    @property
    def sizes(self) -> dict[int, list[int]]:
        """Epoch -> samples of each of its steps."""
        sizes: dict[int, list[int]] = {}
        for epoch, *_, samples in self.steps:
            sizes.setdefault(epoch, []).append(len(samples))
        return sizes


class Dicts(Observed):
    """The same, for the dicts that an `H5DataModule` gives."""

    def __init__(self) -> None:
        super().__init__(72)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch["images"].float() / 255, batch["labels"]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, dict):
            super().validation_step((batch["images"].float() / 255, batch["labels"]), batch_idx)


class Pair(Observed):
    """The same, for the batches of two loaders; those of the second are numbered from 100."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = [(images, labels) for images, labels in filter(None, (batch["a"], batch["b"]))]
        if batch["b"] is not None:
            parts[-1] = (parts[-1][0], parts[-1][1] + 100)
        return super().training_step((torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])), batch_idx)


class Manual(Observed):
    """The same, optimized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Interrupted(Observed):
    """Raises in one step, or has a signal sent."""

    def __init__(self, at: int, error: BaseException | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.at, self.error = at, error

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.fit_loop.epoch_loop.batch_progress.total.completed == self.at:
            if self.error is not None:
                raise self.error
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class SavingIn(Observed):
    """Saves as soon as one of its hooks is called in training, as a handler of a signal may."""

    def __init__(self, hook: str, folder: Path) -> None:
        super().__init__()
        own = getattr(self, hook)

        def save_first(*args: Any, **kwargs: Any) -> Any:
            if self.trainer.training:
                step = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed
                self.trainer.save_checkpoint(folder / f"{hook}-{step:02d}.ckpt")
            return own(*args, **kwargs)

        self.__dict__[hook] = save_first


# Loaders -----------------------------------------------------------------------------------------------------


class RichLoader:
    """A loader that can be resumed, also into the next epoch. Its state is a nest of containers and tensors."""

    def __init__(self, num_samples: int = NUM_SAMPLES, batch_size: int = BATCH_SIZE, seed: int = 0) -> None:
        self.batch_size = batch_size
        self.images, self.labels = images_of(num_samples)
        self.num_batches = -(-num_samples // batch_size)
        self.state: dict[str, Any] = {
            "cursor": {"batches": torch.zeros(1, dtype=torch.int64), "path": ["shard", 0]},
            "given": [],
            "generator": torch.Generator().manual_seed(seed).get_state(),
            "is_open": False,
        }
        self._is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)
        self._is_loaded = True

    def __iter__(self) -> Iterator[Any]:
        """An epoch is begun, or gone on with, at its first batch: a Trainer may ask twice."""
        state, cursor = self.state, self.state["cursor"]
        if not (self._is_loaded and state["is_open"]):
            cursor["batches"].zero_()
            state["given"].clear()
            generator = torch.Generator()
            generator.set_state(state["generator"])
            state["order"] = torch.randperm(len(self.labels), generator=generator)
            state["generator"] = generator.get_state()
        self._is_loaded = False
        while int(cursor["batches"]) < self.num_batches:
            begin = int(cursor["batches"]) * self.batch_size
            index = state["order"][begin : begin + self.batch_size]
            cursor["batches"] += 1
            cursor["path"][1] = begin
            state["given"].extend(index.tolist())
            state["is_open"] = int(cursor["batches"]) < self.num_batches
            self.before_handing_out(int(cursor["batches"]) - 1)
            yield self.images[index], self.labels[index]

    def before_handing_out(self, number: int) -> None:
        """For a subclass."""


class SizedLoader(RichLoader):
    """The same, of known length."""

    def __len__(self) -> int:
        return self.num_batches


class LiveLoader(SizedLoader):
    """The same, but its state goes on changing: whoever wants to keep it has to copy it."""

    def state_dict(self) -> dict[str, Any]:
        return self.state


class SlowLoader(SizedLoader):
    """The same; the third batch takes until somebody allows it, with the state moved on already."""

    def __init__(self) -> None:
        super().__init__(19)
        self.is_reading, self.may_go_on = threading.Event(), threading.Event()

    def before_handing_out(self, number: int) -> None:
        if number == 2:
            self.is_reading.set()
            assert self.may_go_on.wait(WAIT_SECONDS)


class WorkerLoader:
    """Stands in for torchdata's `StatefulDataLoader` with a worker process.

    A worker is two batches ahead. With each batch, or each second one, comes the state of the worker after it; the
    state of the loader is the latest of these that was handed out, and how many batches were handed out since.
    """

    def __init__(self, snapshot_every: int) -> None:
        self.batch_size, self.num_workers, self.snapshot_every = BATCH_SIZE, 1, snapshot_every
        self.images, self.labels = images_of(NUM_SAMPLES)
        self.generator = torch.Generator().manual_seed(1)
        self._iterator: _WorkerIteration | None = None
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        return -(-NUM_SAMPLES // BATCH_SIZE)

    def __iter__(self) -> Iterator[Any]:
        state, self._state = self._state, None
        self._iterator = _WorkerIteration(self, state)
        if self._iterator.is_finished:
            self._iterator = _WorkerIteration(self, None)
        return self._iterator

    def state_dict(self) -> dict[str, Any]:
        if self._iterator is None:
            iter(self)
        assert self._iterator is not None
        return self._iterator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterator, self._state = None, state


class _WorkerIteration:
    def __init__(self, loader: WorkerLoader, state: dict[str, Any] | None) -> None:
        if state is None:
            self.snapshot = {"sampler": loader.generator.get_state(), "batches": 0}
            num_since, self.is_finished = 0, False
        else:
            self.snapshot = state["_snapshot"]["_worker_snapshots"]["worker_0"]
            num_since, self.is_finished = state["_steps_since_snapshot"], state["_iterator_finished"]
        loader.generator.set_state(self.snapshot["sampler"])
        self.order = torch.randperm(len(loader.labels), generator=loader.generator)
        self.loader, self.num_since = loader, 0
        self.queue: queue.Queue[Any] = queue.Queue(2)
        self.number = self.snapshot["batches"]
        self._fill()
        for _ in range(num_since):
            next(self)

    def _fill(self) -> None:
        """The worker's turn: on as far as the queue allows."""
        loader = self.loader
        while not self.queue.full() and self.number * BATCH_SIZE < len(self.order):
            index = self.order[self.number * BATCH_SIZE : (self.number + 1) * BATCH_SIZE]
            self.number += 1
            snapshot = {"sampler": self.snapshot["sampler"], "batches": self.number}
            has_snapshot = self.number % loader.snapshot_every == 0
            self.queue.put(((loader.images[index], loader.labels[index]), snapshot if has_snapshot else None))

    def __iter__(self) -> _WorkerIteration:
        return self

    def __next__(self) -> Any:
        if self.queue.empty():
            self.is_finished = True
            raise StopIteration
        batch, snapshot = self.queue.get()
        self._fill()
        self.num_since += 1
        if snapshot is not None:
            self.snapshot, self.num_since = snapshot, 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "_snapshot": {"_main_snapshot": {"_num_workers": 1}, "_worker_snapshots": {"worker_0": self.snapshot}},
            "_steps_since_snapshot": self.num_since,
            "_iterator_finished": self.is_finished,
        }


def plain_loader(num_samples: int = 5, batch_size: int = 3, **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*images_of(num_samples)), batch_size=batch_size, **settings)


# Comparing ---------------------------------------------------------------------------------------------------


class Run:
    """One training, interrupted nowhere, and those that go on from its checkpoints with new objects."""

    def __init__(
        self,
        folder: Path,
        make_echo: Callable[[], BatchEcho | None],
        make_data: Callable[[], Any] = SizedLoader,
        make_model: Callable[[], Observed] = Observed,
        *,
        model: Observed | None = None,
        callbacks: list[Callback] | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.make_echo, self.make_data, self.make_model = folder, make_echo, make_data, make_model
        self.settings = {"max_epochs": NUM_EPOCHS, **settings}
        callbacks = every_checkpoint(folder) if callbacks is None else callbacks
        self.trainer, self.model, self.echo = self.fit(callbacks, model=model)
        self.end = self.seen_at_end(self.trainer, self.model)

    def fit(
        self,
        callbacks: list[Callback] | None = None,
        *,
        make_echo: Callable[[], BatchEcho | None] | None = None,
        data: Any = None,
        model: Observed | None = None,
        checkpoint: Path | None = None,
        **settings: Any,
    ) -> tuple[pl.Trainer, Observed, BatchEcho | None]:
        """Train, from the beginning or from a checkpoint."""
        echo = (make_echo or self.make_echo)()
        model = self.make_model() if model is None else model
        callbacks = [*([] if echo is None else [echo]), *(callbacks or [])]
        saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
        trainer = make_trainer(
            **{**self.settings, "callbacks": callbacks, "enable_checkpointing": saves, **settings},
        )
        data = self.make_data() if data is None else data
        loaders = {} if isinstance(data, pl.LightningDataModule) else {"val_dataloaders": plain_loader()}
        # What we keep is plain enough for torch's safe reader.
        trainer.fit(model, data, **loaders, ckpt_path=checkpoint, weights_only=None if checkpoint is None else True)
        return trainer, model, echo

    def seen_at_end(self, trainer: pl.Trainer, model: Observed) -> dict[str, Any]:
        """All that should not depend on an interruption."""
        echoes = [callback.trace for callback in trainer.callbacks if isinstance(callback, BatchEcho)]
        return {**state_of(trainer, model), "echoes": echoes}

    def differences(self, trainer: pl.Trainer, model: Observed) -> str:
        """In what the end of a run differs; empty if in nothing."""
        found = []
        for name, ours, whole in (
            ("step", model.steps, self.model.steps),
            ("validation", model.evaluated["validate"], self.model.evaluated["validate"]),
        ):
            expected = whole[len(whole) - len(ours) :]
            different = [
                f"{name} {one} instead of {other}" for one, other in zip(ours, expected, strict=False) if one != other
            ]
            found += different[:1] if len(ours) <= len(whole) else [f"{len(ours)} of {name} instead of {len(whole)}"]
        end = self.seen_at_end(trainer, model)
        found += [name for name in end if not same_bits(end[name], self.end[name])]
        return ", ".join(found)

    def checkpoints(self, pattern: str = "*") -> list[Path]:
        """Those that were written."""
        found = sorted(self.folder.glob(f"{pattern}.ckpt"))
        assert found
        return found

    def every_place(self) -> list[Path]:
        """Checkpoints at every step that an epoch has.

        Where the last epoch has the steps of the one before it, a third of its own are enough.
        """
        before, last = (
            (self.model.sizes.get(epoch), None if self.echo is None else self.echo.trace.get(epoch))
            for epoch in (NUM_EPOCHS - 2, NUM_EPOCHS - 1)
        )
        if before != last or "accumulate_grad_batches" in self.settings:
            return self.checkpoints()
        begin = self.last_step_of(NUM_EPOCHS - 2)
        return [
            each
            for each in self.checkpoints()
            if each.stem.startswith(("epoch", "val"))
            or (done := self.steps_done(each)) <= begin
            or (done - begin) % 3 == 1
        ]

    def wrong(self, checkpoints: list[Path] | None = None) -> dict[str, str]:
        """Checkpoints that a resume from does not end as it should, and in what; if not given, of every place."""
        wrong = {}
        for checkpoint in self.every_place() if checkpoints is None else checkpoints:
            trainer, model, _ = self.fit(checkpoint=checkpoint)
            # There is no other number of steps to come than those that were not done.
            num_left = len(self.model.steps) - self.steps_done(checkpoint)
            text = self.differences(trainer, model)
            if len(model.steps) != num_left:
                text = f"{len(model.steps)} steps instead of {num_left}, {text}"
            if text:
                wrong[checkpoint.stem] = text
        return wrong

    @staticmethod
    @functools.cache
    def steps_done(checkpoint: Path) -> int:
        """Steps that were done when a checkpoint was written."""
        # The runs that resume use torch's safe reader; the quick one is for this look at a number.
        loops = torch.load(checkpoint, weights_only=False)["loops"]["fit_loop"]
        return int(loops["epoch_loop.batch_progress"]["total"]["processed"])

    def last_step_of(self, epoch: int) -> int:
        """Steps done when an epoch ends."""
        return sum(1 for at, *_ in self.model.steps if at <= epoch)


def fixed(echo_factor: int = 2, num_splits: int = 2, **settings: Any) -> Callable[[], BatchEcho]:
    return lambda: BatchEcho(echo_factor, num_splits=num_splits, **{"scale_lr": "keep", **settings})


def replayed(num_splits: int = 1, **settings: Any) -> Callable[[], BatchEcho]:
    return lambda: BatchEcho("auto", num_splits=num_splits, replay=TRACE, **{"scale_lr": "keep", **settings})


def one_cycle() -> Observed:
    return Observed(schedule=True)


# From any checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_echo", "make_model", "settings"),
    [
        pytest.param(fixed(), Observed, {}, id="2x2"),
        pytest.param(fixed(3, 1), Observed, {}, id="3x1"),
        pytest.param(fixed(1, 3), Observed, {}, id="1x3"),
        pytest.param(fixed(2, 5), Observed, {}, id="last batch in fewer pieces"),
        pytest.param(fixed(read_ahead=False), Observed, {}, id="not read ahead"),
        pytest.param(fixed(scale_lr="inverse"), one_cycle, {}, id="one cycle, scaled"),
        pytest.param(fixed(), Manual, {}, id="manual"),
        pytest.param(fixed(), Observed, {"val_check_interval": 3}, id="validation in an echo"),
        pytest.param(fixed(), one_cycle, {"val_check_interval": 0.25}, id="validation by shares"),
        pytest.param(fixed(), Observed, {"num_sanity_val_steps": 1}, id="sanity check"),
        # Whatever gathers: Lightning saves no gradients, so only a checkpoint between two optimizer steps is exact.
        pytest.param(fixed(3), one_cycle, {"accumulate_grad_batches": 5}, id="gradients over batches"),
        pytest.param(fixed(), Observed, {"accumulate_grad_batches": 3, "val_check_interval": 6}, id="gradients"),
        pytest.param(fixed(), Observed, {"reload_dataloaders_every_n_epochs": 1}, id="reload"),
        pytest.param(fixed(), Observed, {"limit_train_batches": 3}, id="ends inside a batch"),
        pytest.param(fixed(), one_cycle, {"limit_train_batches": 0.5}, id="share, one cycle"),
        pytest.param(replayed(), Observed, {}, id="replayed"),
        pytest.param(replayed(2), one_cycle, {}, id="replayed, one cycle"),
        pytest.param(replayed(scale_lr="inverse"), one_cycle, {}, id="replayed, one cycle, scaled"),
        pytest.param(replayed(2), Observed, {"val_check_interval": 0.5}, id="replayed, validation by shares"),
        pytest.param(replayed(2), Observed, {"val_check_interval": 3}, id="replayed, validation in an echo"),
        pytest.param(replayed(), Observed, {"limit_train_batches": 0.5}, id="replayed, half an epoch and its echoes"),
        pytest.param(replayed(2), one_cycle, {"accumulate_grad_batches": 2}, id="replayed, gradients"),
    ],
)
def test_resuming_at_any_checkpoint_equals_no_interruption(tmp_path, make_echo, make_model, settings):
    run = Run(tmp_path / "saved", make_echo, SizedLoader, make_model, **settings)
    # Saving changes nothing.
    trainer, model, _ = run.fit()
    assert run.differences(trainer, model) == ""
    assert sorted({checkpoint.stem.partition("-")[0] for checkpoint in run.checkpoints()}) == ["epoch", "step", "val"]
    assert run.wrong() == {}


@pytest.mark.parametrize(
    ("make_echo", "settings"),
    [
        pytest.param(fixed(), {"val_check_interval": 3}, id="2x2, validation in an echo"),
        pytest.param(fixed(2, 5), {}, id="2x5"),
        pytest.param(replayed(2), {}, id="replayed"),
    ],
)
def test_a_loader_without_length_resumes_at_every_step_inside_an_epoch(tmp_path, make_echo, settings):
    run = Run(tmp_path / "saved", make_echo, RichLoader, **settings)
    # Where an epoch is over Lightning counts on from its last batch, over any loader whose length it does not know.
    ends = [run.last_step_of(0), run.last_step_of(1)]
    inside = [checkpoint for checkpoint in run.checkpoints() if run.steps_done(checkpoint) not in ends]
    assert len(inside) >= len(run.model.steps) - 2
    assert run.wrong(inside) == {}


def test_a_state_that_the_loader_goes_on_changing_is_kept_as_it_was(tmp_path):
    run = Run(tmp_path / "saved", fixed(), LiveLoader)
    assert run.wrong() == {}


@pytest.mark.parametrize("snapshot_every", [1, 2])
@pytest.mark.parametrize("make_echo", [fixed(), replayed()], ids=["2x2", "replayed"])
def test_a_loader_with_workers_that_are_ahead_resumes_exactly(tmp_path, make_echo, snapshot_every):
    run = Run(tmp_path / "saved", make_echo, lambda: WorkerLoader(snapshot_every))
    assert run.wrong() == {}


@pytest.mark.parametrize(
    ("mode", "num_second", "make_echo"),
    [
        pytest.param("max_size_cycle", 8, fixed(), id="cycle"),
        pytest.param("max_size_cycle", 4, fixed(), id="cycle, begun again"),
        pytest.param("max_size_cycle", 4, replayed(2), id="cycle, begun again, replayed"),
        pytest.param("min_size", 8, replayed(2), id="shortest, replayed"),
        pytest.param("min_size", 4, fixed(), id="shortest, others left"),
        pytest.param("max_size", 8, fixed(), id="longest"),
        pytest.param("max_size", 4, replayed(2), id="longest, others used up, replayed"),
    ],
)
def test_several_loaders_resume_together(tmp_path, make_echo, mode, num_second):
    def loaders() -> CombinedLoader:
        return CombinedLoader({"a": SizedLoader(), "b": SizedLoader(num_second, 5, seed=3)}, mode)

    run = Run(tmp_path / "saved", make_echo, loaders, Pair)
    used = [sample for *_, samples in run.model.steps for sample in samples]
    assert {sample for sample in used if sample >= 100} == {100 + number for number in range(num_second)}
    chosen = run.checkpoints()
    if (mode, num_second) == ("min_size", 4):
        # The longer loader is left in the middle, and what that means for its next epoch is for no state to say.
        chosen = [each for each in chosen if run.steps_done(each) < run.last_step_of(0)]
    if (mode, num_second) == ("max_size", 4):
        # A loader that is used up begins again when it is resumed, without us too.
        has_second = [any(sample >= 100 for sample in samples) for *_, samples in run.model.steps]
        chosen = [run.folder / f"step-{step:02d}.ckpt" for step, has in enumerate(has_second) if has and step]
    assert run.wrong(chosen) == {}


def test_the_state_of_a_loader_never_goes_to_another_one(tmp_path):
    # The first one is used up, the second one is not.
    def loaders() -> CombinedLoader:
        return CombinedLoader({"a": SizedLoader(4, 5), "b": SizedLoader(seed=3)}, "max_size")

    run = Run(tmp_path / "saved", fixed(), loaders, Pair)
    for checkpoint in run.checkpoints("step-*"):
        if run.steps_done(checkpoint) >= run.last_step_of(0):
            continue
        _, model, _ = run.fit(checkpoint=checkpoint)
        seconds = [[sample for sample in samples if sample >= 100] for *_, samples in model.steps]
        whole = [[sample for sample in samples if sample >= 100] for *_, samples in run.model.steps]
        assert seconds == whole[len(whole) - len(seconds) :], checkpoint.stem


# HDF5 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_images(tmp_path / "train.h5", NUM_SAMPLES), write_images(tmp_path / "val.h5", 5, seed=1)


def images_from(files: tuple[Path, Path], batch_size: int = BATCH_SIZE) -> Callable[[], H5ImageDataModule]:
    return lambda: H5ImageDataModule(
        files[0], val=files[1], batch_size=batch_size, eval_batch_size=3, mean=0.0, std=1.0
    )


def flat_model() -> Observed:
    return Observed(72)


@pytest.mark.parametrize(
    ("make_echo", "schedule", "settings"),
    [
        pytest.param(fixed(), False, {}, id="2x2"),
        pytest.param(fixed(2, 5), True, {}, id="2x5, one cycle"),
        pytest.param(fixed(2, 5), False, {"limit_train_batches": 6}, id="ends inside a batch"),
        pytest.param(fixed(), True, {"limit_train_batches": 0.5}, id="share, one cycle"),
        pytest.param(fixed(), False, {"val_check_interval": 3}, id="validation in an echo"),
        pytest.param(fixed(), False, {"reload_dataloaders_every_n_epochs": 1}, id="reload"),
        pytest.param(replayed(), False, {}, id="replayed"),
        pytest.param(replayed(2), True, {"val_check_interval": 0.5}, id="replayed, one cycle"),
        pytest.param(replayed(2), False, {"limit_train_batches": 3}, id="replayed, ends inside a batch"),
        pytest.param(replayed(), False, {"limit_train_batches": 3}, id="replayed, more than without echoes"),
        pytest.param(replayed(2, scale_lr="inverse"), False, {"limit_train_batches": 0.7}, id="replayed, share"),
    ],
)
def test_images_from_hdf5_resume_at_any_checkpoint(tmp_path, files, make_echo, schedule, settings):
    run = Run(tmp_path / "saved", make_echo, images_from(files), lambda: Observed(72, schedule=schedule), **settings)
    assert run.wrong() == {}


def test_arrays_from_hdf5_resume_at_any_checkpoint(tmp_path, files):
    run = Run(tmp_path / "saved", fixed(), lambda: H5DataModule(*files[:1], val=files[1], batch_size=BATCH_SIZE), Dicts)
    assert run.wrong() == {}


def test_a_loader_over_hdf5_given_to_the_trainer_resumes_at_any_checkpoint(tmp_path, files):
    made: list[H5Loader] = []

    def make() -> H5Loader:
        made.append(H5Loader(files[0], BATCH_SIZE))
        return made[-1]

    run = Run(tmp_path / "saved", fixed(), make, Dicts, limit_val_batches=0)
    assert run.wrong(run.checkpoints("step-*")) == {}
    assert run.wrong(run.checkpoints("epoch-*")) == {}
    for loader in made:
        loader.close()


# Saved in the middle of a step -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "make_echo"),
    [
        pytest.param("on_before_batch_transfer", fixed(), id="before the transfer"),
        pytest.param("transfer_batch_to_device", replayed(2), id="in the transfer, replayed"),
        pytest.param("on_after_batch_transfer", fixed(), id="after the transfer"),
        pytest.param("on_train_batch_start", fixed(), id="before the step"),
        pytest.param("training_step", fixed(), id="in the step"),
        pytest.param("training_step", replayed(2), id="in the step, replayed"),
        pytest.param("on_before_backward", fixed(), id="before the backward pass"),
        pytest.param("on_before_optimizer_step", replayed(2), id="before the optimizer's step, replayed"),
    ],
)
def test_a_checkpoint_saved_inside_a_hook_resumes_with_the_same_step(tmp_path, make_echo, hook):
    folder = tmp_path / "saved"
    run = Run(folder, make_echo, model=SavingIn(hook, folder), callbacks=[])
    checkpoints = run.checkpoints()
    # Before and during the transfer a fetched batch is there, and nothing else.
    num_calls = {"on_before_batch_transfer": 4, "transfer_batch_to_device": 4}
    assert len(checkpoints) == num_calls.get(hook, len(run.model.steps))
    assert run.wrong() == {}


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_train_batch_start", "training_step"])
def test_the_same_without_a_length(tmp_path, hook):
    folder = tmp_path / "saved"
    run = Run(folder, fixed(), RichLoader, model=SavingIn(hook, folder), callbacks=[])
    assert run.wrong([each for each in run.checkpoints() if run.steps_done(each) != run.last_step_of(0)]) == {}


def test_a_checkpoint_saved_while_the_next_batch_is_being_read_resumes_with_it(tmp_path):
    class SavesMeanwhile(Observed):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if (self.current_epoch, batch_idx) == (0, 6):
                assert loader.is_reading.wait(WAIT_SECONDS)
                self.trainer.save_checkpoint(folder / "meanwhile.ckpt")
                loader.may_go_on.set()
            return super().training_step(batch, batch_idx)

    folder = tmp_path / "saved"
    loader = SlowLoader()
    run = Run(folder, fixed(), lambda: loader, model=SavesMeanwhile(), callbacks=[])
    run.make_data = lambda: SizedLoader(19)
    assert run.wrong([folder / "meanwhile.ckpt"]) == {}


class SaveOnException(Callback):
    """A user's own way to save; unlike Lightning's it may run before or after `BatchEcho`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


@pytest.fixture
def _ctrl_c_works() -> Iterator[None]:
    """Lightning switches it off for good once it was used."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("_ctrl_c_works")
@pytest.mark.parametrize("make_echo", [fixed(), replayed(2)], ids=["2x2", "replayed"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("on purpose"), RuntimeError), (KeyboardInterrupt(), SystemExit), (None, SIGTERMException)],
    ids=["error", "Ctrl-C", "SIGTERM"],
)
def test_a_run_that_was_broken_off_in_any_step_goes_on(tmp_path, make_echo, error, raised):
    run = Run(tmp_path / "saved", make_echo, callbacks=[])
    for at in range(0, len(run.model.steps), 3):
        before = Interrupted(at, error)
        with pytest.raises(raised):
            run.fit([OnExceptionCheckpoint(tmp_path / "broken", f"{at:02d}")], model=before)
        [checkpoint] = (tmp_path / "broken").glob(f"{at:02d}.ckpt")
        trainer, after, _ = run.fit(checkpoint=checkpoint)
        # Lightning ends the step that a signal came in, unless it was the last one.
        assert len(before.steps) == at + (error is None)
        assert [*before.steps, *after.steps] == run.model.steps, at
        assert run.differences(trainer, after) == "", at


@pytest.mark.parametrize("is_first", [False, True])
def test_a_callback_may_save_the_broken_run_before_us_or_after_us(tmp_path, is_first):
    run = Run(tmp_path / "saved", fixed(), callbacks=[])
    path = tmp_path / "broken.ckpt"
    for at in (2, 5, 7, 8):
        model = Interrupted(at, RuntimeError("on purpose"))
        callbacks = [run.make_echo(), SaveOnException(path)]
        with pytest.raises(RuntimeError, match="on purpose"):
            run.fit(model=model, callbacks=callbacks[:: -1 if is_first else 1], make_echo=lambda: None)
        trainer, after, _ = run.fit(checkpoint=path)
        assert [*model.steps, *after.steps] == run.model.steps, at
        assert run.differences(trainer, after) == "", at


def test_an_error_of_the_loader_leaves_a_checkpoint_to_go_on_from(tmp_path):
    class Breaking(SizedLoader):
        def before_handing_out(self, number: int) -> None:
            if number == 1:
                raise OSError("the disk is gone")

    run = Run(tmp_path / "saved", fixed(), callbacks=[])
    broken = Observed()
    with pytest.raises(OSError, match="the disk is gone"):
        run.fit([OnExceptionCheckpoint(tmp_path, "broken")], data=Breaking(), model=broken)
    # All passes over the batch that was there were made.
    assert broken.steps == run.model.steps[:4]
    trainer, after, _ = run.fit(checkpoint=tmp_path / "broken.ckpt")
    assert [*broken.steps, *after.steps] == run.model.steps
    assert run.differences(trainer, after) == ""


def test_a_run_broken_off_in_a_validation_in_the_middle_of_an_echo_goes_on(tmp_path):
    class FailsOnce(Observed):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3 and batch_idx == 1:
                raise RuntimeError("on purpose")
            super().validation_step(batch, batch_idx)

    run = Run(tmp_path / "saved", fixed(), callbacks=[], val_check_interval=3)
    broken = FailsOnce()
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit([OnExceptionCheckpoint(tmp_path, "broken")], model=broken)
    trainer, after, _ = run.fit(checkpoint=tmp_path / "broken.ckpt")
    assert [*broken.steps, *after.steps] == run.model.steps
    assert same_bits(run.seen_at_end(trainer, after), run.end)


def test_the_same_callback_goes_on_after_a_run_that_was_broken_off(tmp_path):
    # In a notebook the cell is run again, with the objects of before.
    run = Run(tmp_path / "saved", fixed(), callbacks=[])
    echo, data = run.make_echo(), SizedLoader()
    broken = Interrupted(5, RuntimeError("on purpose"))
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit([OnExceptionCheckpoint(tmp_path, "broken")], model=broken, make_echo=lambda: echo, data=data)
    trainer, after, _ = run.fit(checkpoint=tmp_path / "broken.ckpt", make_echo=lambda: echo, data=data)
    assert [*broken.steps, *after.steps] == run.model.steps
    assert run.differences(trainer, after) == ""
    # And from the beginning.
    trainer, again, _ = run.fit(make_echo=lambda: echo)
    assert run.differences(trainer, again) == ""
    assert again.steps == run.model.steps


# Again and again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_echo", [fixed(), replayed(2, scale_lr="inverse")], ids=["2x2", "replayed"])
def test_a_run_broken_off_in_every_single_step_ends_as_if_it_never_was(tmp_path, make_echo):
    run = Run(tmp_path / "saved", make_echo, SizedLoader, one_cycle, callbacks=[])
    checkpoint, done = None, []
    for at in range(len(run.model.steps)):
        model = Interrupted(at, RuntimeError("on purpose"), schedule=True)
        with pytest.raises(RuntimeError, match="on purpose"):
            run.fit(
                [OnExceptionCheckpoint(tmp_path, f"{at}")],
                model=model,
                checkpoint=checkpoint,
            )
        checkpoint = tmp_path / f"{at}.ckpt"
        done += model.steps
        assert len(done) == at
    trainer, model, _ = run.fit(checkpoint=checkpoint)
    assert [*done, *model.steps] == run.model.steps
    assert run.differences(trainer, model) == ""


def test_checkpoints_of_a_resumed_run_are_as_good_as_those_of_the_first(tmp_path, files):
    first = Run(tmp_path / "saved", fixed(), images_from(files), flat_model, max_epochs=3)
    wrong: dict[str, Any] = {}
    # Not from an epoch's last step: after resuming there, Lightning 2.6 counts one epoch too few in what it saves.
    for name in ("step-01", "step-03", "step-07", "step-18"):
        folder = tmp_path / name
        first.fit(every_checkpoint(folder), checkpoint=first.folder / f"{name}.ckpt")
        written = sorted(folder.glob("*.ckpt"))
        assert len([each for each in written if each.stem.startswith("step")]) == 24 - int(name[-2:])
        for checkpoint in written[::5]:
            trainer, model, _ = first.fit(checkpoint=checkpoint)
            if text := first.differences(trainer, model):
                wrong[f"{name}, then {checkpoint.stem}"] = text
    assert wrong == {}


def test_more_epochs_can_be_added_at_every_checkpoint(tmp_path, files):
    longer = Run(tmp_path / "longer", fixed(), images_from(files), flat_model, callbacks=[], max_epochs=3)
    shorter = Run(tmp_path / "shorter", fixed(), images_from(files), flat_model, max_epochs=2)
    assert longer.wrong(shorter.checkpoints()) == {}


# What is kept ------------------------------------------------------------------------------------------------


def test_what_is_kept_is_plain_numbers_and_strings_and_the_states_of_the_loaders(tmp_path):
    run = Run(tmp_path / "saved", fixed())

    def kinds(node: Any) -> set[type]:
        if isinstance(node, dict):
            return {dict} | {kind for pair in node.items() for each in pair for kind in kinds(each)}
        if isinstance(node, list):
            return {list} | {kind for each in node for kind in kinds(each)}
        return {type(node)}

    for checkpoint in run.checkpoints():
        [state] = [
            state
            for key, state in torch.load(checkpoint, weights_only=True)["callbacks"].items()
            if key.startswith("BatchEcho")
        ]
        assert kinds(state) <= {dict, list, int, float, bool, str, torch.Tensor, type(None)}, checkpoint.stem


@pytest.mark.parametrize("make_echo", [fixed(), replayed(2)], ids=["2x2", "replayed"])
def test_what_lightning_keeps_of_a_loader_has_the_batch_in_work_come_again(tmp_path, make_echo):
    # So whoever resumes without us loses no batch.
    run = Run(tmp_path / "saved", make_echo)
    for step in range(1, run.last_step_of(1)):
        if step == run.last_step_of(0):
            continue
        checkpoint = run.folder / f"step-{step:02d}.ckpt"
        [state] = torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        num_used = len(SIZES) - len(place_of(run, checkpoint)[1])
        # The state before an epoch's first batch is the one at the end of the epoch before.
        assert state["is_open"] == (num_used > 0), step
        assert num_used == 0 or int(state["cursor"]["batches"]) == num_used, step


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_checkpoint_has_all_echoes_up_to_its_step(tmp_path, num_splits):
    run = Run(tmp_path / "saved", replayed(num_splits))
    assert run.echo is not None
    assert run.echo.trace == TRACE
    passes_at = [
        {epoch: [passes for passes in done if passes] for epoch, done in steps.items()} for steps in _traces(num_splits)
    ]
    for step, trace in enumerate(passes_at, start=1):
        [state] = [
            state
            for key, state in torch.load(run.folder / f"step-{step:02d}.ckpt", weights_only=True)["callbacks"].items()
            if key.startswith("BatchEcho")
        ]
        assert state["trace"] == trace, step
        restored = BatchEcho("auto", num_splits=num_splits)
        restored.load_state_dict(state)
        assert restored.trace == trace


def _traces(num_splits: int) -> Iterator[dict[int, list[int]]]:
    """The trace after each step: a pass counts from its first step on."""
    trace: dict[int, list[int]] = {}
    for epoch, batches in TRACE.items():
        for passes in batches:
            trace.setdefault(epoch, []).append(0)
            for _ in range(passes):
                trace[epoch][-1] += 1
                for _ in range(num_splits):
                    yield copy.deepcopy(trace)


# Replay ------------------------------------------------------------------------------------------------------


class Dropping(Observed):
    """Draws its dropout from the global generator, as `torch.nn.Dropout` does."""

    def __init__(self, after_step: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.after_step = after_step

    def dropped(self, images: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.ones_like(images), 0.2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.after_step is not None:
            self.after_step(self)
        return loss


class GatedImages(GatedDataset):
    """Our samples; a batch comes when a gate lets it pass."""

    def __getitems__(self, indices: list[int]) -> Any:
        super().__getitems__(indices)
        images, labels = images_of(self.num_samples)
        return [(images[index], labels[index]) for index in indices]


class Racing:
    """Lets a batch pass in the last step of two passes over the one before, and does not wait for it to be there."""

    def __init__(self, gate: Gate, num_splits: int) -> None:
        self.gate, self.num_splits = gate, num_splits
        self.echo: BatchEcho | None = None
        self.num_begun = self.num_steps = 0

    def __call__(self, model: Dropping) -> None:
        assert self.echo is not None
        num_begun = sum(len(passes) for passes in self.echo.trace.values())
        self.num_steps = self.num_steps + 1 if num_begun == self.num_begun else 1
        self.num_begun = num_begun
        is_last_of_epoch = num_begun % len(SIZES) == 0
        if self.num_steps == (1 if is_last_of_epoch else 2) * self.num_splits:
            self.gate.open(num_begun)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_whose_echoes_depended_on_timing_is_replayed_to_the_last_bit(tmp_path, num_splits, shuffle):
    def data(gate: Gate) -> DataLoader[Any]:
        return DataLoader(GatedImages(NUM_SAMPLES, gate), batch_size=BATCH_SIZE, shuffle=shuffle, num_workers=0)

    def auto(**settings: Any) -> BatchEcho:
        return BatchEcho("auto", max_echo_factor=4, num_splits=num_splits, scale_lr="inverse", **settings)

    def timed() -> BatchEcho:
        racing.echo = auto()
        return racing.echo

    gate = Gate()
    racing = Racing(gate, num_splits)
    torch.manual_seed(11)
    run = Run(tmp_path / "saved", timed, lambda: data(gate), model=Dropping(racing), max_epochs=3)
    assert run.echo is not None
    trace = run.echo.trace
    # The next batch was let pass in the second pass; how many more there were is the machine's affair.
    assert [len(trace[epoch]) for epoch in range(3)] == [2, 2, 2]
    assert all(trace[epoch][0] >= 2 for epoch in range(3))
    for replay in (trace, run.folder / f"val-{len(run.model.steps):02d}.ckpt", run.folder / "epoch-2.ckpt"):
        gate = Gate()
        gate.open(99)
        torch.manual_seed(11)
        trainer, model, echo = run.fit(make_echo=lambda to=replay: auto(replay=to), data=data(gate), model=Dropping())
        assert echo.trace == trace
        assert model.steps == run.model.steps
        assert run.differences(trainer, model) == ""


def test_a_replay_from_a_checkpoint_in_the_middle_repeats_its_echoes_and_then_decides_anew(tmp_path):
    # The second batch comes after three passes over the first, the fourth after two passes over the third.
    gate = Gate()
    make = lambda: BatchEcho("auto", max_echo_factor=5, scale_lr="keep")  # noqa: E731
    model = Dropping(Pace(gate, [3, 1, 2]))
    data = DataLoader(GatedImages(NUM_SAMPLES, gate), batch_size=BATCH_SIZE)
    run = Run(tmp_path / "saved", make, lambda: data, model=model)
    assert run.echo is not None
    assert run.echo.trace == {0: [3, 1], 1: [2, 1]}
    gate = Gate()
    gate.open(99)

    class WaitsForBatches(Dropping):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            wait_until(self.trainer.train_dataloader.is_ready)
            return loss

    replay = lambda: BatchEcho("auto", scale_lr="keep", replay=run.folder / "step-05.ckpt")  # noqa: E731
    data = DataLoader(GatedImages(NUM_SAMPLES, gate), batch_size=BATCH_SIZE)
    _, _, echo = run.fit(make_echo=replay, data=data, model=WaitsForBatches())
    # Step 5 is the first pass over the third batch: that is on record. From there on batches come in time.
    assert echo.trace == {0: [3, 1], 1: [1, 1]}


def test_replaying_what_holds_no_echoes_is_refused(tmp_path):
    run = Run(tmp_path / "saved", lambda: None)
    checkpoint = run.folder / "step-03.ckpt"
    with pytest.raises(ValueError, match="without the echoes of a BatchEcho"):
        run.fit(make_echo=lambda: BatchEcho("auto", replay=checkpoint))


# Without a trace to replay -----------------------------------------------------------------------------------


def test_an_adaptive_run_goes_on_with_every_batch_that_was_not_begun(tmp_path):
    # What will be echoed depends on the loader then; what is fresh does not.
    run = Run(tmp_path / "saved", replayed(2))
    for checkpoint in run.checkpoints():
        done = run.steps_done(checkpoint)
        trainer, model, echo = run.fit(
            make_echo=lambda: BatchEcho("auto", num_splits=2, scale_lr="keep"), checkpoint=checkpoint
        )
        for epoch in range(NUM_EPOCHS):
            uses = [step for step in [*run.model.steps[:done], *model.steps] if step[0] == epoch]
            assert {sample for *_, samples in uses for sample in samples} == set(range(NUM_SAMPLES)), checkpoint.stem
            num_samples = sum(SIZES[batch] * passes for batch, passes in enumerate(echo.trace[epoch]))
            assert sum(len(samples) for *_, samples in uses) == num_samples, checkpoint.stem
            assert len(echo.trace[epoch]) == len(SIZES), checkpoint.stem
        assert trainer.current_epoch == NUM_EPOCHS
        if model.steps:
            assert model.evaluated["validate"][-1][0] == trainer.global_step == done + len(model.steps)


# A loader that cannot be resumed -----------------------------------------------------------------------------


class Stateless:
    """An iterable that is no `DataLoader` and says nothing of its state."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before:UserWarning")
@pytest.mark.parametrize(
    ("make_echo", "make_data"),
    [
        (fixed(), lambda: plain_loader(NUM_SAMPLES, BATCH_SIZE)),
        (replayed(2), lambda: plain_loader(NUM_SAMPLES, BATCH_SIZE)),
        (fixed(), lambda: Stateless(plain_loader(NUM_SAMPLES, BATCH_SIZE))),
    ],
    ids=["2x2", "replayed", "no DataLoader"],
)
def test_a_loader_without_state_gives_one_line_and_a_whole_next_epoch(tmp_path, make_echo, make_data):
    run = Run(tmp_path / "saved", make_echo, make_data)
    name = type(make_data()).__name__
    for checkpoint in run.every_place():
        seen: list[Any] = []
        texts = warnings_of(lambda at=checkpoint, into=seen: into.extend(run.fit(checkpoint=at)))
        ours = [text for text in texts if "state_dict and load_state_dict" in text]
        is_inside = run.steps_done(checkpoint) not in (run.last_step_of(0), run.last_step_of(1))
        assert len(ours) == is_inside, (checkpoint.stem, texts)
        if is_inside:
            assert f"but {name} has no state_dict and load_state_dict" in ours[0]
            assert "\n" not in ours[0]
        trainer, model, _ = seen
        assert trainer.current_epoch == NUM_EPOCHS
        if run.steps_done(checkpoint) <= run.last_step_of(0):
            whole = [samples for epoch, *_, samples in run.model.steps if epoch == 1]
            assert [samples for epoch, *_, samples in model.steps if epoch == 1] == whole, checkpoint.stem
        if model.steps:
            assert model.evaluated["validate"][-1][0] == trainer.global_step, checkpoint.stem
            assert len({step for step, _ in model.evaluated["validate"]}) == len(model.sizes), checkpoint.stem
        at, left = place_of(run, checkpoint)
        rest = {sample // BATCH_SIZE for epoch, *_, samples in model.steps if epoch == at for sample in samples}
        # The first batches again, in the place of those that are left.
        assert rest == set(range(len(left))), checkpoint.stem


# With other settings -----------------------------------------------------------------------------------------


def place_of(run: Run, checkpoint: Path) -> tuple[int, list[int]]:
    """The epoch that a checkpoint is in, and the sizes of its batches that were not used to their end."""
    done = run.steps_done(checkpoint)
    num_epochs = run.settings["max_epochs"]
    ends = [run.last_step_of(epoch) for epoch in range(num_epochs)]
    epoch = next((epoch for epoch, end in enumerate(ends) if done < end), num_epochs)
    if epoch == num_epochs:
        return epoch, []
    begin = ends[epoch - 1] if epoch else 0
    # The batches of an epoch have no sample in common.
    still_used = {sample for at, *_, samples in run.model.steps[done:] if at == epoch for sample in samples}
    in_order = list(dict.fromkeys(sample for *_, samples in run.model.steps[begin : ends[epoch]] for sample in samples))
    left, first = [], 0
    for size in SIZES:
        left += [size] if still_used & set(in_order[first : first + size]) else []
        first += size
    return epoch, left


def pieces(size: int, num_splits: int) -> list[int]:
    number = min(size, num_splits)
    return [size * (index + 1) // number - size * index // number for index in range(number)]


@pytest.mark.parametrize(
    ("factor", "splits", "source"),
    [(3, 1, "rich"), (3, 1, "hdf5"), (1, 4, "rich"), (3, 2, "rich"), (1, 2, "hdf5"), (1, 1, "rich"), (1, 1, "hdf5")],
)
def test_another_echo_uses_the_batch_at_hand_anew_and_all_that_follow_as_it_says(
    tmp_path, files, factor, splits, source
):
    make_data, make_model = (SizedLoader, Observed) if source == "rich" else (images_from(files), flat_model)
    run = Run(tmp_path / "saved", fixed(), make_data, make_model)
    wrong: dict[str, Any] = {}
    for checkpoint in run.every_place():
        done = run.steps_done(checkpoint)
        at, sizes = place_of(run, checkpoint)
        trainer, model, _ = run.fit(make_echo=fixed(factor, splits), checkpoint=checkpoint)
        left = {epoch: sizes if epoch == at else SIZES for epoch in range(at, NUM_EPOCHS)}
        expected = {
            epoch: [n for size in sizes for n in pieces(size, splits) * factor] for epoch, sizes in left.items()
        }
        if model.sizes != expected:
            wrong[checkpoint.stem] = f"{model.sizes} instead of {expected}"
            continue
        total = done + sum(map(len, expected.values()))
        validated = sorted({step for step, _ in model.evaluated["validate"]})
        ends = [total - sum(len(expected[later]) for later in expected if later > epoch) for epoch in sorted(expected)]
        if (trainer.global_step, trainer.current_epoch) != (total, NUM_EPOCHS):
            wrong[checkpoint.stem] = (trainer.global_step, trainer.current_epoch, total)
        elif validated != ends:
            wrong[checkpoint.stem] = f"validated at {validated} instead of {ends}"
    assert wrong == {}


@pytest.mark.filterwarnings("ignore:batch_size 16 on 1 rank.* is more than the dataset has:UserWarning")
@pytest.mark.parametrize("batch_size", [4, 16])
def test_another_batch_size_sees_the_rest_of_the_epoch_and_then_whole_ones(tmp_path, files, batch_size):
    run = Run(tmp_path / "saved", fixed(), images_from(files), flat_model)
    order = {epoch: _fresh(run, epoch) for epoch in range(NUM_EPOCHS)}
    wrong: dict[str, Any] = {}
    for checkpoint in run.every_place():
        at, sizes = place_of(run, checkpoint)
        trainer, model, _ = run.fit(data=images_from(files, batch_size)(), checkpoint=checkpoint)
        for epoch in range(NUM_EPOCHS):
            uses = [sample for number, *_, samples in model.steps if number == epoch for sample in samples]
            expected = set() if epoch < at else order[epoch]
            if epoch == at:
                expected = set(_rest(run, epoch, sum(sizes)))
            if sorted(uses) != sorted([*expected, *expected]):
                wrong[f"{checkpoint.stem}, epoch {epoch}"] = f"{uses} instead of {expected} twice"
        num_validations = len({step for step, _ in model.evaluated["validate"]})
        if (trainer.current_epoch, num_validations) != (NUM_EPOCHS, len(model.sizes)):
            wrong[checkpoint.stem] = f"{trainer.current_epoch} epochs, {num_validations} validations"
    assert wrong == {}


def _fresh(run: Run, epoch: int) -> set[int]:
    return {sample for number, *_, samples in run.model.steps if number == epoch for sample in samples}


def _rest(run: Run, epoch: int, num_samples: int) -> list[int]:
    """The samples of the last batches of an epoch."""
    uses = [sample for number, *_, samples in run.model.steps if number == epoch for sample in samples]
    return list(dict.fromkeys(reversed(uses)))[:num_samples]


@pytest.mark.parametrize("source", ["rich", "hdf5"])
def test_a_run_begun_without_us_goes_on_with_echoes_of_what_is_left(tmp_path, files, source):
    make_data, make_model = (SizedLoader, Observed) if source == "rich" else (images_from(files), flat_model)
    run = Run(tmp_path / "saved", lambda: None, make_data, make_model)
    wrong: dict[str, Any] = {}
    for checkpoint in run.checkpoints():
        if source == "rich" and checkpoint.stem == "epoch-0":
            continue  # Lightning keeps no loader's state there, and without us nobody does.
        done = run.steps_done(checkpoint)
        at, batch = divmod(done, 2)
        trainer, model, _ = run.fit(make_echo=fixed(), checkpoint=checkpoint)
        sizes = {epoch: SIZES[batch if epoch == at else 0 :] for epoch in range(at, NUM_EPOCHS)}
        expected = {epoch: [n for size in each for n in pieces(size, 2) * 2] for epoch, each in sizes.items()}
        samples = [{s for step in m.steps for s in step[-1] if step[0] == at} for m in (model, run.model)]
        fresh = {s for step in run.model.steps[done : 2 * (at + 1)] for s in step[-1]}
        total = done + sum(map(len, expected.values()))
        if model.sizes != expected:
            wrong[checkpoint.stem] = f"{model.sizes} instead of {expected}"
        elif samples[0] != fresh:
            wrong[checkpoint.stem] = f"{samples[0]} instead of {fresh}"
        elif trainer.global_step != total or (expected and model.evaluated["validate"][-1][0] != total):
            wrong[checkpoint.stem] = (trainer.global_step, model.evaluated["validate"], total)
    assert wrong == {}


def test_a_run_begun_with_us_goes_on_without_us_at_the_end_of_an_epoch(tmp_path, files):
    plain = Run(tmp_path / "plain", lambda: None, images_from(files), flat_model, max_epochs=3, callbacks=[])
    run = Run(tmp_path / "saved", fixed(), images_from(files), flat_model, max_epochs=3)
    for name in ("step-08", "epoch-0", "val-08"):
        trainer, model, _ = run.fit(make_echo=lambda: None, checkpoint=run.folder / f"{name}.ckpt")
        assert [step[-1] for step in model.steps] == [step[-1] for step in plain.model.steps[2:]], name
        assert (trainer.global_step, trainer.current_epoch) == (8 + 4, 3)


def test_a_run_begun_with_us_goes_on_without_us_inside_an_epoch_and_later_epochs_are_whole(tmp_path, files):
    # Lightning takes our steps for batches, so how much of the epoch at hand is left it cannot know.
    run = Run(tmp_path / "saved", fixed(), images_from(files), flat_model, max_epochs=3)
    for step in range(1, 8):
        trainer, model, _ = run.fit(make_echo=lambda: None, checkpoint=run.folder / f"step-{step:02d}.ckpt")
        assert (model.sizes[1], model.sizes[2]) == (SIZES, SIZES), step
        assert trainer.current_epoch == 3


def test_a_state_of_another_version_is_refused(tmp_path):
    run = Run(tmp_path / "saved", fixed())
    checkpoint = run.folder / "step-03.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    [key] = [key for key in content["callbacks"] if key.startswith("BatchEcho")]
    content["callbacks"][key]["version"] = 99
    torch.save(content, checkpoint)
    with pytest.raises(ValueError, match="version 99"):
        run.fit(checkpoint=checkpoint)
