"""What our code relies on in torch and Lightning without a promise of theirs: names, orders of calls, side effects.

A new release that changes one of these fails here first, with a sentence on what to look at, and not somewhere in a
training. Behaviour is watched in a real Trainer, never read off a signature.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import signal
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import distributed, nn, optim
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchmetrics import MeanMetric, MetricCollection

from lightning_gpufeed.echo.loader import REPEATED
from tests.datamodules.models import make_trainer

NUM_BATCHES = 3


class Sampler:
    """Notes the epochs it is told."""

    def __init__(self, events: list[str]) -> None:
        """Note into a common list."""
        self.events = events

    def set_epoch(self, epoch: int) -> None:
        """Note it."""
        self.events.append(f"set_epoch {epoch}")


class Loader:
    """A loader that is no `DataLoader`, and notes everything that is asked of it."""

    def __init__(self, events: list[str], length: int = NUM_BATCHES) -> None:
        """Note into a common list."""
        self.events, self.length = events, length
        self.batch_sampler = SimpleNamespace(sampler=Sampler(events), batch_size=2)

    def __len__(self) -> int:
        """Asked many times, so not noted."""
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Note it, and then each batch that is taken."""
        self.events.append("iter")
        return LoaderIterator(self.events, self.length)


class LoaderIterator:
    """One iteration."""

    def __init__(self, events: list[str], length: int) -> None:
        """At the beginning."""
        self.events, self.left = events, length

    def __iter__(self) -> LoaderIterator:
        """Itself."""
        return self

    def __next__(self) -> torch.Tensor:
        """Note it."""
        if not self.left:
            raise StopIteration
        self.left -= 1
        self.events.append("next")
        return torch.ones(2, 4)

    def __del__(self) -> None:
        """Note when it is let go of."""
        self.events.append("iterator dropped")


class StatefulLoader(Loader):
    """The same, with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Note it."""
        self.events.append("loader.state_dict")
        return {"kept": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Note what came back."""
        self.events.append(f"loader.load_state_dict {state}")


class Data(pl.LightningDataModule):
    """Notes what the Trainer asks of it."""

    def __init__(self, events: list[str], loader: type[Loader] = Loader, state: dict[str, Any] | None = None) -> None:
        """Note into a common list."""
        super().__init__()
        self.events, self.loader, self.state = events, loader, state

    def setup(self, stage: str) -> None:
        """Note it."""
        self.events.append(f"setup {stage == 'fit'}")

    def train_dataloader(self) -> Loader:
        """Note it."""
        self.events.append(f"train_dataloader at epoch {self.trainer.current_epoch}")
        return self.loader(self.events)

    def state_dict(self) -> dict[str, Any]:
        """Some state."""
        return dict(self.state or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Note it and in which kind of run."""
        self.events.append(f"datamodule.load_state_dict {state} in {self.trainer.state.fn == 'fit'}")

    def teardown(self, stage: str) -> None:
        """Note it."""
        self.events.append(f"teardown {stage == 'fit'}")


class Model(pl.LightningModule):
    """Notes its steps."""

    def __init__(self, events: list[str], *, reads_estimate: bool = False) -> None:
        """Note into a common list."""
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.events, self.reads_estimate = events, reads_estimate

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Note it."""
        self.events.append(f"step {batch_idx}")
        return self.layer(batch).mean()

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Nothing to do."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As a user of a schedule does."""
        if self.reads_estimate:
            self.trainer.estimated_stepping_batches  # noqa: B018 - reading it is what counts
        return torch.optim.SGD(self.parameters(), lr=0.1)


def first_epoch(events: list[str]) -> list[str]:
    """Events up to the first step."""
    return events[: events.index("step 0")]


def save_in_the_middle(folder: Path, loader: type[Loader], state: dict[str, Any] | None = None) -> Path:
    """A checkpoint after the second of three batches of epoch 0."""
    saving = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saving])
    trainer.fit(Model([]), Data([], loader, state))
    return folder / "step=2.ckpt"


def resume(checkpoint: Path, events: list[str], loader: type[Loader], *, reads_estimate: bool = False) -> pl.Trainer:
    trainer = make_trainer(max_epochs=2)
    trainer.fit(Model(events, reads_estimate=reads_estimate), Data(events, loader), ckpt_path=checkpoint)
    return trainer


no_callback = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning")


# How a Trainer treats a loader -------------------------------------------------------------------------------


def test_a_loaders_epoch_is_set_through_its_batch_sampler_before_the_first_batch_of_each_epoch():
    """H5Loader.batch_sampler hands out its position as `sampler`. If this fails, look for where Lightning sets the
    epoch of a sampler now (`_set_sampler_epoch`): without it every epoch after a resume would have a wrong order.
    """
    events: list[str] = []
    make_trainer(max_epochs=2).fit(Model(events), Data(events))
    taken = [event for event in events if event.startswith(("set_epoch", "next"))]
    assert taken == ["set_epoch 0", "next", "next", "next", "set_epoch 1", "next", "next", "next"]


def test_iter_is_called_more_often_than_an_epoch_begins():
    """_Iteration starts its thread at the first batch and not in `iter`, because Lightning throws iterators away. If
    this fails Lightning became tidier, and nothing is broken.
    """
    events: list[str] = []
    make_trainer(max_epochs=2).fit(Model(events), Data(events))
    assert first_epoch(events).count("iter") >= 2
    assert events.count("iter") > 2


def test_a_batch_is_taken_only_when_its_step_comes():
    """The position in a checkpoint is the number of samples handed out. If this fails Lightning reads ahead of a loader
    with a length, and H5Loader.state_dict counts batches that were never trained on.
    """
    events: list[str] = []
    make_trainer(max_epochs=1).fit(Model(events), Data(events))
    taken = [event for event in events if event.startswith(("next", "step"))]
    assert taken == ["next", "step 0", "next", "step 1", "next", "step 2"]


def test_an_epoch_ends_after_the_length_that_was_asked_for_when_the_data_was_set_up():
    """H5Loader has the same length in every epoch for this reason. If this fails the length may vary, and
    `shift_batch_progress` in datamodules/resume.py can go.
    """
    events: list[str] = []

    class Growing(Data):
        def train_dataloader(self) -> Loader:
            self.kept = Loader(self.events, length=2)
            return self.kept

    class Model3(Model):
        def on_train_epoch_end(self) -> None:
            self.trainer.datamodule.kept.length = 5

    make_trainer(max_epochs=2).fit(Model3(events), Growing(events))
    assert [event for event in events if event.startswith("step")] == ["step 0", "step 1"] * 2


@no_callback
def test_only_a_loader_with_both_methods_has_its_state_kept(tmp_path):
    """H5Loader relies on being asked for its state by name only. If this fails, look for how Lightning recognises a
    loader that can be resumed (`_Stateful`).
    """

    class Half(Loader):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("must not be asked")

    events: list[str] = []
    resume(save_in_the_middle(tmp_path / "whole", StatefulLoader), events, StatefulLoader)
    assert "loader.load_state_dict {'kept': 7}" in events
    events = []
    checkpoint = save_in_the_middle(tmp_path / "half", Half)
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        resume(checkpoint, events, Half)
    assert not [event for event in events if event.startswith("loader.")]


@no_callback
@pytest.mark.parametrize("reads_estimate", [False, True])
def test_a_datamodules_state_comes_back_after_its_setup_and_before_its_loader_is_asked_for(tmp_path, reads_estimate):
    """H5DataModule.load_state_dict notes the position and train_dataloader hands it on. If this fails, a resumed
    training begins its epoch from the start: restore the position in the loader that exists already.
    """
    checkpoint = save_in_the_middle(tmp_path, StatefulLoader, {"position": 2})
    events: list[str] = []
    resume(checkpoint, events, StatefulLoader, reads_estimate=reads_estimate)
    assert events[:2] == ["setup True", "datamodule.load_state_dict {'position': 2} in True"]
    assert events[2].startswith("train_dataloader")


@no_callback
def test_a_datamodules_state_comes_back_when_a_checkpoint_is_only_tested_too(tmp_path):
    """H5DataModule.load_state_dict looks at `trainer.state.fn` for this reason. If this fails the look can go."""
    checkpoint = save_in_the_middle(tmp_path, Loader, {"position": 2})
    events: list[str] = []
    datamodule = Data(events)
    datamodule.test_dataloader = lambda: Loader([])  # type: ignore[method-assign]
    make_trainer().test(Model([]), datamodule, ckpt_path=checkpoint, verbose=False)
    assert events[:2] == ["setup False", "datamodule.load_state_dict {'position': 2} in False"]


@no_callback
@pytest.mark.parametrize("reads_estimate", [False, True])
def test_the_count_of_batches_is_restored_from_the_loaded_checkpoint_after_the_datamodule(tmp_path, reads_estimate):
    """datamodules/resume.py changes the count of batches in `trainer._checkpoint_connector._loaded_checkpoint` while
    the DataModule is restored. If this fails, look for where the training loop takes `batch_progress` from: resuming
    with another batch size or number of ranks would train on too few or too many batches of every epoch.
    """
    checkpoint = save_in_the_middle(tmp_path, StatefulLoader, {"position": 2})

    class Shifting(Data):
        __qualname__ = "Data"  # under this name the state was saved

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loaded = self.trainer._checkpoint_connector._loaded_checkpoint
            progress = loaded["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
            # Saved at the end of the second batch, before it was counted as completed.
            assert progress == {"ready": 2, "started": 2, "processed": 2, "completed": 1}
            for name in progress:
                progress[name] -= 1

    events: list[str] = []
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Model(events, reads_estimate=reads_estimate), Shifting(events, StatefulLoader), ckpt_path=checkpoint)
    assert [event for event in events if event.startswith("step")] == ["step 1", "step 2"]


def test_a_batch_is_counted_as_processed_after_its_step_and_before_checkpoints_are_written():
    """`is_latest_in_work` in datamodules/resume.py compares this count with the batches handed out. If this fails, look
    for when `batch_progress` counts a batch: a checkpoint of an interrupted step would skip a batch, or repeat one.
    """
    counts: list[tuple[str, int]] = []

    class Counting(Model):
        def note(self, where: str) -> None:
            counts.append((where, self.trainer.fit_loop.epoch_loop.batch_progress.current.processed))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.note(f"step {batch_idx}")
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.note(f"end {batch_idx}")

        def on_train_epoch_end(self) -> None:
            self.note("epoch's end")

    make_trainer(max_epochs=2).fit(Counting([]), Data([]))
    one_epoch = [
        ("step 0", 0),
        ("end 0", 1),
        ("step 1", 1),
        ("end 1", 2),
        ("step 2", 2),
        ("end 2", 3),
        ("epoch's end", 3),
    ]
    assert counts == one_epoch * 2


def test_the_reload_setting_is_read_at_each_epoch():
    """H5DataModule supports `reload_dataloaders_every_n_epochs`, and a user may set it in the middle of a fit. If this
    fails, check that a reloaded loader still continues the order (test_resume.py).
    """
    events: list[str] = []

    class Switching(Model):
        def on_train_epoch_end(self) -> None:
            self.trainer.reload_dataloaders_every_n_epochs = 1 if self.current_epoch == 1 else 0

    make_trainer(max_epochs=4).fit(Switching(events), Data(events))
    asked = [event for event in events if event.startswith("train_dataloader")]
    assert asked == ["train_dataloader at epoch 0", "train_dataloader at epoch 2"]


def test_iterators_are_dropped_before_the_datamodule_is_torn_down():
    """H5Loader keeps hold of its thread itself, since its iterator is gone when `teardown` comes. If this fails the
    order is the easier one, and nothing is broken.
    """
    events: list[str] = []
    make_trainer(max_epochs=1, limit_train_batches=2).fit(Model(events), Data(events))
    assert "iterator dropped" in events[events.index("step 1") : events.index("teardown True")]


def test_a_datamodule_is_not_torn_down_after_an_error():
    """Threads and files end when they are dropped for this reason, and not only in `teardown`. If this fails Lightning
    tears down after errors too, and nothing is broken.
    """
    events: list[str] = []

    class Failing(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(max_epochs=1).fit(Failing(events), Data(events))
    assert "teardown True" not in events


# Hooks and settings ------------------------------------------------------------------------------------------


def test_the_datamodules_hook_is_asked_in_place_of_the_modules():
    """H5DataModule.on_after_batch_transfer calls the module's hook itself. If this fails Lightning calls both, and the
    module's would run twice: remove our call.
    """
    events: list[str] = []

    class WithHook(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.events.append("datamodule's hook")
            return batch

    class ModelWithHook(Model):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            raise AssertionError("must not be asked")

    # Lightning warns of it, once in a process.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You have overridden `on_after_batch_transfer` in both")
        make_trainer(max_epochs=1).fit(ModelWithHook(events), WithHook(events))
    assert events.count("datamodule's hook") == NUM_BATCHES


def test_whether_a_hook_is_overridden_is_decided_by_the_function_behind_it():
    """H5DataModule asks `is_overridden` about the module's hook, and hides its own val_dataloader behind the inherited
    one where there is no validation data. If this fails, look for how Lightning decides that a hook is a user's.
    """

    class WithHook(pl.LightningModule):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    class WithVal(pl.LightningDataModule):
        def val_dataloader(self) -> Any:
            return []

    assert is_overridden("on_after_batch_transfer", WithHook())
    assert not is_overridden("on_after_batch_transfer", Model([]))
    datamodule = WithVal()
    assert is_overridden("val_dataloader", datamodule)
    datamodule.__dict__["val_dataloader"] = super(WithVal, datamodule).val_dataloader
    assert not is_overridden("val_dataloader", datamodule)


def test_the_shards_of_a_trainer_are_none_without_ranks_and_numbers_with_them():
    """H5DataModule shards by `trainer.distributed_sampler_kwargs`; a strategy may say fewer replicas than there are
    ranks. If this fails, look for what Lightning gives its own DistributedSampler. Real ranks: test_distributed.py.
    """
    assert make_trainer().distributed_sampler_kwargs is None
    trainer = make_trainer(strategy="ddp", devices=2)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true", "bf16-mixed"])
def test_a_trainer_names_its_precision_as_it_was_asked_for(precision):
    """H5ImageDataModule chooses the type of images by these texts. If this fails, images of a new spelling would arrive
    as float32: extend `_TRUE_PRECISIONS`.
    """
    assert str(make_trainer(precision=precision).precision) == precision


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_bytes_are_not_converted_before_they_reach_the_device(precision):
    """H5ImageDataModule relies on uint8 passing the precision plug-in untouched. If this fails, images would be rounded
    before they are normalised.
    """
    seen: list[torch.dtype] = []

    class Bytes(Loader):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.ones(2, 4, dtype=torch.uint8)] * NUM_BATCHES)

    class Watching(Data):
        def train_dataloader(self) -> Loader:
            return Bytes([])

        def on_after_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
            seen.append(batch.dtype)
            return batch.to(self.trainer.lightning_module.layer.weight.dtype)

    make_trainer(max_epochs=1, precision=precision).fit(Model([]), Watching([]))
    assert seen == [torch.uint8] * NUM_BATCHES


def test_a_sanity_check_and_a_validation_are_not_training():
    """H5DataModule chooses preparation and transform by `trainer.training`, `testing` and `predicting`. If this fails,
    training transforms could reach validation data.
    """
    seen: list[tuple[str, bool, bool, bool]] = []

    class Watching(Data):
        def note(self, batch: Any) -> Any:
            trainer = self.trainer
            seen.append((str(trainer.state.stage.value), trainer.training, trainer.testing, trainer.predicting))
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return self.note(batch)

        def train_dataloader(self) -> Loader:
            return Loader([])

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    class Evaluated(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    model, datamodule = Evaluated([]), Watching([])
    trainer = make_trainer(max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(model, datamodule)
    trainer.test(model, datamodule, verbose=False)
    trainer.predict(model, datamodule)
    assert list(dict.fromkeys(seen)) == [
        ("sanity_check", False, False, False),
        ("train", True, False, False),
        ("validate", False, False, False),
        ("test", False, True, False),
        ("predict", False, False, True),
    ]


# How a Trainer runs an epoch: BatchEcho stands in the middle of it ----------------------------------------------


class Looking(pl.Callback):
    """Calls a function of the Trainer in one of its hooks."""

    def __init__(self, **hooks: Callable[[pl.Trainer], Any]) -> None:
        """Note hook name -> function."""
        for name, function in hooks.items():
            setattr(self, name, lambda trainer, *_, function=function, **__: function(trainer))


def lists(number: int, length: int = 4) -> list[Any]:
    """Loaders that are lists of batches, in an object, as a list would be a nest of loaders."""

    class Batches:
        def __len__(self) -> int:
            return length

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.ones(2, 4)] * length)

    return [Batches() for _ in range(number)]


class Unsized:
    """A loader without a length, that notes what is taken."""

    def __init__(self, events: list[str], length: int = NUM_BATCHES) -> None:
        """Note into a common list."""
        self.events, self.length = events, length

    def __iter__(self) -> Iterator[torch.Tensor]:
        """From the first one."""
        for _ in range(self.length):
            self.events.append("next")
            yield torch.ones(2, 4)


def test_a_batch_is_converted_hooked_and_moved_in_this_order_once_a_step():
    """BatchEcho asks what a step is on in `_on_before_batch_transfer` and gives the piece in `batch_to_device`, both
    patched on the instance. If this fails, look at `_TrainingEpochLoop.advance`: a call that comes elsewhere, or is
    looked up on the class, would train on a placeholder.
    """
    events: list[str] = []

    def watched(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return own(*args, **kwargs)

        owner.__dict__[name] = call

    model = Model(events)

    def begin(trainer: pl.Trainer) -> None:
        watched(trainer.precision_plugin, "convert_input")
        watched(trainer.strategy, "batch_to_device")
        watched(model, "_on_before_batch_transfer")

    make_trainer(max_epochs=1, callbacks=[Looking(on_train_start=begin)]).fit(model, *lists(1, 2))
    step = ["convert_input", "_on_before_batch_transfer", "batch_to_device"]
    assert events == [*step, "step 0", *step, "step 1"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true", "bf16-mixed"])
def test_what_is_no_container_and_no_tensor_passes_through_unconverted(precision):
    """An EchoLoader yields REPEATED for a step on a batch that is on the device already. If this fails, the precision
    plug-in looks into it: make REPEATED something that it lets pass.
    """
    assert make_trainer(precision=precision).precision_plugin.convert_input(REPEATED) is REPEATED


def test_the_hook_before_the_transfer_and_the_other_two_are_called_through_these_names():
    """BatchEcho runs `transfer_batch_to_device` once a batch and `on_after_batch_transfer` for every piece, by
    `_call_batch_hook`. If this fails, look for how `_apply_batch_transfer_handler` calls them now.
    """
    called: list[str] = []

    class Calling(Model):
        def _call_batch_hook(self, hook_name: str, *args: Any) -> Any:
            called.append(hook_name)
            return super()._call_batch_hook(hook_name, *args)

    make_trainer(max_epochs=1).fit(Calling([]), *lists(1, 1))
    assert called == ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]


def test_each_training_loader_is_processed_before_its_length_is_taken_and_no_other_one_while_training():
    """BatchEcho wraps loaders in `strategy.process_dataloader`, patched on the instance. If this fails, look at
    `_FitLoop.setup_data`: lengths, limits and schedules would be those without echoes, or a validation loader would
    be echoed.
    """
    events: list[str] = []

    class Asked(Loader):
        def __len__(self) -> int:
            if not self.events or self.events[-1] != "len":
                self.events.append("len")
            return self.length

    class Wrapping(Model):
        def setup(self, stage: str) -> None:
            own = self.trainer.strategy.process_dataloader

            def process(loader: Any) -> Any:
                events.append(f"process in {self.trainer.state.stage.value}")
                return Asked(events, 2) if self.trainer.training else own(loader)

            self.trainer.strategy.__dict__["process_dataloader"] = process

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    trainer = make_trainer(max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(Wrapping(events), lists(2, 4), *lists(1))
    begin = events.index("process in train")
    assert set(events[:begin]) == {"process in sanity_check"}
    assert events[begin : begin + 3] == ["process in train", "process in train", "len"]
    assert trainer.num_training_batches == 2
    assert [event for event in events if event.startswith("step")] == ["step 0", "step 1"]


def test_callbacks_are_set_up_before_the_module_is_asked_for_optimizers_and_loaders():
    """BatchEcho stands in from `Callback.setup` on. If this fails, `estimated_stepping_batches`, which sets up the
    loaders, is read before that, and schedules end too early.
    """
    events: list[str] = []

    class Asking(Model):
        def setup(self, stage: str) -> None:
            events.append("module's setup")

        def configure_optimizers(self) -> Any:
            events.append("optimizers")
            return super().configure_optimizers()

    looking = Looking(setup=lambda trainer: events.append("callback's setup"))
    make_trainer(max_epochs=1, callbacks=[looking]).fit(Asking(events, reads_estimate=True), Data(events))
    assert events[:5] == [
        "setup True",
        "callback's setup",
        "module's setup",
        "optimizers",
        "train_dataloader at epoch 0",
    ]


def test_the_setup_of_the_training_loader_is_found_on_the_loop_itself():
    """WatchSetup puts itself in the place of `fit_loop.setup_data`, and asks `_combined_loader` and
    `_should_reload_train_dl` whether it will make new loaders. If this fails, look for who sets up the loaders: a
    finder's validation loader would be echoed.
    """
    seen: list[tuple[bool, bool]] = []

    def begin(trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop
        own = loop.setup_data

        def setup_data() -> None:
            before = loop._combined_loader
            will_make = before is None or bool(loop._should_reload_train_dl)
            own()
            seen.append((will_make, loop._combined_loader is not before))

        loop.__dict__["setup_data"] = setup_data

    trainer = make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=2, callbacks=[Looking(setup=begin)])
    trainer.fit(Model([], reads_estimate=True), Data([]))
    assert all(will_make == has_made for will_make, has_made in seen)
    assert [has_made for _, has_made in seen].count(True) == 2
    assert len(seen) >= 4


def lengthen(trainer: pl.Trainer) -> None:
    """What `lengthen_epoch` does, in the bare names of Lightning: two steps more."""
    loop = trainer.fit_loop
    loop._combined_loader._limits[0] += 2
    loop._data_fetcher.length = len(loop._combined_loader)
    loop.max_batches = loop._data_fetcher.length


def test_an_epoch_ends_when_the_fetcher_has_given_its_length_and_the_loader_its_limit():
    """BatchEcho lengthens a running epoch in `_combined_loader._limits`, `_data_fetcher.length` and
    `fit_loop.max_batches`. If this fails, look for what ends an epoch now (`_DataFetcher.done`): with "auto" it would
    end before the last batches, or without a last step for accumulation and validation.
    """
    events: list[str] = []

    def at_first(trainer: pl.Trainer) -> None:
        if trainer.global_step == 1:
            assert trainer.fit_loop._combined_loader._limits == [trainer.fit_loop._data_fetcher.length] == [4]
            lengthen(trainer)

    trainer = make_trainer(max_epochs=1, limit_train_batches=0.5, callbacks=[Looking(on_train_batch_end=at_first)])
    trainer.fit(Model(events), *lists(1, 8))
    assert events == [f"step {number}" for number in range(6)]
    assert trainer.num_training_batches == 6
    assert trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def test_the_last_step_of_an_epoch_steps_the_optimizer_by_the_same_numbers():
    """Accumulation ends with the last step of an epoch: `_num_ready_batches_reached` goes by `max_batches` and
    `is_last_batch`. If this fails, gradients of a lengthened epoch are carried into the next one, or the optimizer
    steps at the end that the epoch had at first.
    """
    steps: list[int] = []

    def look(trainer: pl.Trainer) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 0:
            lengthen(trainer)
        steps.append(trainer.global_step)

    looking = Looking(on_train_batch_end=look)
    trainer = make_trainer(max_epochs=1, limit_train_batches=0.5, callbacks=[looking], accumulate_grad_batches=5)
    trainer.fit(Model([]), *lists(1, 8))
    assert steps == [0, 0, 0, 0, 1, 2]


def test_a_loader_without_a_length_is_asked_for_one_item_ahead():
    """BatchEcho keeps a queue of the steps that were handed out. If this fails Lightning reads further ahead, or not at
    all, and nothing is broken; but with "auto" a decision falls earlier or later.
    """
    events: list[str] = []
    make_trainer(max_epochs=1).fit(Model(events), Unsized(events))
    assert events == ["next", "next", "step 0", "next", "step 1", "step 2"]


@no_callback
def test_a_resumed_epoch_goes_on_after_the_steps_that_are_counted_as_done_when_training_starts(tmp_path):
    """BatchEcho corrects `batch_progress.current` in `on_train_start`. If this fails, look for where a resumed epoch
    takes its begin from (`data_fetcher.fetched`): it would have too many or too few steps.
    """
    checkpoint = save_in_the_middle(tmp_path, StatefulLoader)

    def begin(trainer: pl.Trainer) -> None:
        current = trainer.fit_loop.epoch_loop.batch_progress.current
        # Saved at the end of the second step, before it was counted as completed.
        assert (current.ready, current.started, current.processed, current.completed) == (2, 2, 2, 1)
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, getattr(current, name) - 1)

    events: list[str] = []
    trainer = make_trainer(max_epochs=1, callbacks=[Looking(on_train_start=begin)])
    trainer.fit(Model(events), Data(events, StatefulLoader), ckpt_path=checkpoint)
    assert [event for event in events if event.startswith("step")] == ["step 1", "step 2"]


def test_batches_of_several_loaders_are_joined_by_a_spec_that_takes_them_apart_again():
    """`split_loaders` and `join_loaders` use `_combined_loader._spec`, `is_cut_to_shortest` its `_mode`. If this fails,
    look for how a CombinedLoader puts its batches into the nest of its loaders, and keeps its mode.
    """
    combined = CombinedLoader({"a": [1, 2], "b": [[3, 4]]}, "min_size")
    iter(combined)
    batch, _, _ = next(combined)
    parts = combined._spec.flatten_up_to(batch)
    assert parts == [1, 3]
    assert combined._spec.unflatten(parts) == batch == {"a": 1, "b": [3]}
    assert combined._mode == "min_size"


def test_step_wise_schedules_are_moved_by_a_method_found_on_the_loop_itself():
    """ScheduleByProgress puts itself in the place of `epoch_loop.update_lr_schedulers` and moves schedules with
    `_update_learning_rates`. If this fails, look for who calls them: with "auto" schedules would end too early.
    """
    calls: list[tuple[str, bool]] = []
    moved: list[int] = []

    class Scheduled(Model):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}

    model = Scheduled([])

    def begin(trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop

        def update(interval: str, update_plateau_schedulers: bool) -> None:
            calls.append((interval, update_plateau_schedulers))
            if interval == "step" and not update_plateau_schedulers and len(moved) < 2:
                loop._update_learning_rates(interval="step", update_plateau_schedulers=False)
                moved.append(model.scheduler.last_epoch)

        loop.__dict__["update_lr_schedulers"] = update

    make_trainer(max_epochs=1, callbacks=[Looking(on_train_start=begin)]).fit(model, *lists(1, 3))
    assert moved == [1, 2]
    assert model.scheduler.last_epoch == 2
    step = [("step", False), ("step", True)]
    assert calls == [*step, *step, ("step", False), ("epoch", False), ("step", True), ("epoch", True)]


def test_whether_to_validate_is_decided_after_callbacks_have_seen_the_end_of_the_step():
    """BatchEcho sets `trainer.val_check_batch` in `on_train_batch_end` where an interval is a share of an epoch. If
    this fails, look at `_should_check_val_fx`: with "auto" validation would come at other places.
    """
    events: list[str] = []

    class Validating(Model):
        def on_validation_start(self) -> None:
            events.append("validation")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    def look(trainer: pl.Trainer) -> None:
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        trainer.val_check_batch = batch_idx + 1 if batch_idx == 1 else batch_idx + 2

    looking = Looking(on_train_batch_end=look)
    make_trainer(max_epochs=1, val_check_interval=0.25, callbacks=[looking]).fit(Validating(events), *lists(2, 4))
    assert events == ["step 0", "step 1", "validation", "step 2", "step 3"]


def test_a_trainer_that_validates_by_the_clock_has_no_interval():
    """`share_between_checks` reads the interval with a default. If this fails the default can go."""
    assert not hasattr(make_trainer(val_check_interval="00:00:01:00"), "val_check_interval")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_error_callbacks_are_told_of_it_and_not_torn_down(error):
    """BatchEcho takes everything back in `on_exception` for this reason. If `teardown` is called too nothing is broken;
    if `on_exception` is not, threads and patches stay behind.
    """
    events: list[str] = []

    class Failing(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            raise error

    looking = Looking(
        on_exception=lambda trainer: events.append("on_exception"), teardown=lambda trainer: events.append("teardown")
    )
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        make_trainer(max_epochs=1, callbacks=[looking]).fit(Failing([]), *lists(1))
    assert events == ["on_exception"]


def test_the_bars_have_these_names_for_what_they_show(capsys):
    """`lengthen_epoch` sets the total of a bar that is shown already. If this fails, look for where TQDMProgressBar and
    RichProgressBar keep the bar of an epoch: its total would stay that of an epoch without echoes.
    """
    totals: list[float | None] = []
    before: list[Any] = []

    def look(trainer: pl.Trainer) -> None:
        bar = trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar):
            totals.append(bar._train_progress_bar.total)
        else:
            bar.progress.update(bar.train_progress_bar_id, total=7)
            totals.append(bar.progress.tasks[bar.train_progress_bar_id].total)

    def begin(trainer: pl.Trainer) -> None:
        bar = trainer.progress_bar_callback
        before.append(bar._train_progress_bar if isinstance(bar, TQDMProgressBar) else bar.train_progress_bar_id)

    for bar in (TQDMProgressBar(), RichProgressBar()):
        looking = Looking(setup=begin, on_train_batch_end=look)
        make_trainer(max_epochs=1, callbacks=[bar, looking], enable_progress_bar=True).fit(Model([]), *lists(1, 3))
    assert before == [None, None]
    assert totals == [3, 3, 3, 7, 7, 7]
    capsys.readouterr()


# torch -------------------------------------------------------------------------------------------------------


# What autograd's engine says: the splitter of backward asks -----------------------------------------------------------


def test_each_backward_has_a_number_of_its_own_and_there_is_none_outside():
    """Calls of a layer in one backward are added up before they reach `.grad`. If this fails, look at
    `torch._C._current_graph_task_id`: a layer that is used twice would differ in its last bits.
    """
    numbers: list[int] = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
        (y * 3).register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
        (y * 3 + y).sum().backward()
    assert torch._C._current_graph_task_id() == -1
    assert len(set(numbers)) == 2
    assert min(numbers) >= 0


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_leafs_node_is_executed_in_backward_and_not_in_grad_of_others(is_whole):
    """`Anchor.is_reached` asks. If this fails, look at `torch._C._will_engine_execute_node`: weight gradients would be
    computed in `torch.autograd.grad`, or in no backward at all.
    """
    seen: list[bool] = []
    x, leaf = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    node = leaf.view_as(leaf).grad_fn.next_functions[0][0]
    y = x * leaf
    y.register_hook(lambda _: seen.append(torch._C._will_engine_execute_node(node)))
    if is_whole:
        y.sum().backward()
    else:
        torch.autograd.grad(y.sum(), x)
    assert seen == [is_whole]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_transforms_and_tracing_say_that_they_are_at_work():
    """`is_transformed` asks. If this fails, look for `_are_functorch_transforms_active` and `_get_tracing_state`:
    layers would be split where their tensors are placeholders.
    """
    seen: list[tuple[bool, bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        is_traced = torch._C._get_tracing_state() is not None
        seen.append((torch._C._are_functorch_transforms_active(), is_traced))
        return x * 2

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert seen == [(False, False), (True, False), (True, False), (False, True)]


def test_a_gradient_that_a_node_computes_reaches_the_leaf_with_its_hooks():
    """`Task.run` hands gradients over through a node. If this fails, look at `AccumulateGrad`: hooks on parameters
    would not run, or run twice.
    """
    events: list[str] = []

    class Computing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
            return leaf.new_empty(())

        @staticmethod
        def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
            return torch.full((3,), 2.0)

    leaf = torch.nn.Parameter(torch.ones(3))
    leaf.register_hook(lambda grad: events.append("hook"))
    leaf.register_post_accumulate_grad_hook(lambda leaf: events.append(f"after {leaf.grad[0]:g}"))
    for _ in range(2):
        root = Computing.apply(leaf)
        torch.autograd.backward(root, root.detach())
    assert events == ["hook", "after 2", "hook", "after 4"]


# Where FeedMonitor hooks in ------------------------------------------------------------------------------------------


class Hooking(pl.Callback):
    """Notes each call of methods that it replaces on the Trainer's own instances from `on_fit_start` on."""

    def __init__(self, events: list[str], find: Callable[[pl.Trainer], list[tuple[Any, str]]]) -> None:
        """Note into a common list what happens to the methods found."""
        self.events, self.find = events, find

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hook in, where FeedMonitor does."""
        for owner, name in self.find(trainer):
            owner.__dict__[name] = self.telling(name, getattr(owner, name))

    def telling(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, noted."""

        @functools.wraps(own)
        def told(*arguments: Any) -> Any:
            self.events.append(name)
            try:
                return own(*arguments)
            finally:
                self.events.append(f"/{name}")

        return told


def heard(events: list[str], *interesting: str) -> list[str]:
    """Of all events, those with one of these in them."""
    return [event for event in events if any(part in event for part in interesting)]


def fetches(trainer: pl.Trainer) -> list[tuple[Any, str]]:
    loop = trainer.fit_loop.epoch_loop
    return [(loop, "_on_before_fetch"), (loop, "_on_after_fetch")]


def test_before_and_after_a_fetch_lightning_tells_its_profiler_and_no_more():
    """TrainerWatch passes these two by where the profiler does nothing. If this fails, look at what else they do."""
    told: list[str] = []
    profiler = SimpleNamespace(start=told.append, stop=told.append)
    loop = SimpleNamespace(trainer=SimpleNamespace(profiler=profiler))
    assert _TrainingEpochLoop._on_before_fetch(loop) is None
    assert _TrainingEpochLoop._on_after_fetch(loop) is None
    assert told == ["[SimpleNamespace].train_dataloader_next"] * 2
    before = vars(PassThroughProfiler()).copy()
    silent = PassThroughProfiler()
    assert silent.start("one") is None
    assert silent.stop("one") is None
    assert vars(silent) == before


class FetcherTells(pl.Callback):
    """Notes whom the fetcher tells."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, Any]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        fetcher = trainer.fit_loop._data_fetcher
        self.told.append((fetcher._start_profiler, fetcher._stop_profiler))


def test_the_fetcher_tells_what_the_loop_had_when_the_epoch_began():
    """TrainerWatch puts its own into the fetcher between watched steps. If this fails, look at
    `_TrainingEpochLoop.on_run_start` and `_DataFetcher.__next__`: short steps would pay for two calls more."""
    events: list[str] = []
    tells = FetcherTells()
    trainer = make_trainer(max_epochs=2, callbacks=[tells])
    trainer.fit(Model(events), Data(events))
    loop = trainer.fit_loop.epoch_loop
    assert tells.told == [(loop._on_before_fetch, loop._on_after_fetch)] * 2 * NUM_BATCHES


FETCH = ["_on_before_fetch", "/_on_before_fetch", "next", "_on_after_fetch", "/_on_after_fetch"]


def test_the_fetch_of_a_batch_is_between_two_methods_found_on_the_loop():
    """TrainerWatch measures the wait for data by them. If this fails, look at `_TrainingEpochLoop.on_run_start`: no
    wait would be seen, and every training be called compute-bound.
    """
    events: list[str] = []
    make_trainer(max_epochs=2, callbacks=[Hooking(events, fetches)]).fit(Model(events), Data(events))
    # The end of the second epoch is not asked for either: the loader has a length.
    assert heard(events, "_fetch", "next") == FETCH * NUM_BATCHES * 2


def test_an_epoch_is_one_call_of_its_loop_and_a_validation_within_it_one_of_another():
    """TrainerWatch ends the last step there. If this fails, look at `_FitLoop.advance` and
    `_TrainingEpochLoop.on_advance_end`: a step would be said to take as long as what follows it.
    """
    events: list[str] = []

    class Validated(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            events.append("validation")

    def both(trainer: pl.Trainer) -> list[tuple[Any, str]]:
        loop = trainer.fit_loop.epoch_loop
        return [(loop, "run"), (loop.val_loop, "run")]

    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[Hooking(events, both)])
    trainer.fit(Validated(events), Loader(events), torch.utils.data.DataLoader([torch.ones(2)]))
    steps = [f"step {number}" for number in range(NUM_BATCHES)]
    assert heard(events, "run", "step", "validation") == ["run", *steps, "run", "validation", "/run", "/run"] * 2


def test_a_fetch_that_fails_or_finds_the_end_is_followed_by_the_second_method_too():
    """StepTimer takes it for the end of the wait, and a step without compute for none. If this fails, look at
    `_DataFetcher.__next__`: a wait would go on until the next one.
    """
    events: list[str] = []
    make_trainer(max_epochs=1, callbacks=[Hooking(events, fetches)]).fit(Model(events), Unsized(events))
    told = heard(events, "_fetch")
    assert told[-1] == "/_on_after_fetch"
    assert len(told) == 4 * NUM_BATCHES  # one was taken before the training started, and the end is one more


@pytest.mark.parametrize("is_automatic", [True, False])
def test_forward_backward_and_update_are_in_one_method_after_the_fetch_and_the_copy(is_automatic):
    """TrainerWatch measures computing by it. If this fails, look at `_TrainingEpochLoop.advance`: no step would be
    counted at all.
    """
    events: list[str] = []

    class Updating(Model):
        def __init__(self) -> None:
            super().__init__(events)
            self.automatic_optimization = is_automatic

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not is_automatic:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda *_: events.append("update"))
            return optimizer

    def find(trainer: pl.Trainer) -> list[tuple[Any, str]]:
        loop = trainer.fit_loop.epoch_loop
        optimization = loop.automatic_optimization if is_automatic else loop.manual_optimization
        return [*fetches(trainer), (optimization, "run")]

    make_trainer(max_epochs=1, callbacks=[Hooking(events, find)]).fit(Updating(), *lists(1, 2))
    told = heard(events, "_fetch", "run", "step ", "update")
    fetch = [event for event in FETCH if event != "next"]
    assert told == [event for number in range(2) for event in [*fetch, "run", f"step {number}", "update", "/run"]]


@pytest.mark.parametrize("is_overridden", [False, True])
def test_whose_hook_it_is_is_asked_before_each_hook_that_moves_a_batch(is_overridden):
    """TrainerWatch measures the copy from the question for its hook to that for the next one. If this fails, look at
    `LightningModule._call_batch_hook`: copies would count as work of callbacks.
    """
    events: list[str] = []

    class Moving(Data):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            events.append("moved")
            return batch

    def begin(trainer: pl.Trainer) -> None:
        selector = trainer._data_connector._datahook_selector
        own = selector.get_instance

        def get_instance(hook_name: str) -> Any:
            events.append(f"asked for {hook_name}")
            return own(hook_name)

        selector.__dict__["get_instance"] = get_instance

    data = (Moving if is_overridden else Data)(events)
    make_trainer(max_epochs=1, callbacks=[Looking(on_fit_start=begin)]).fit(Model(events), data)
    before, move, after = (
        f"asked for {name}"
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    )
    moved = ["moved"] if is_overridden else []
    assert heard(events, "asked for", "moved") == [before, move, *moved, after] * NUM_BATCHES


def test_ranks_are_asked_whether_to_stop_by_a_method_found_on_the_loop_before_each_fetch(tmp_path, monkeypatch):
    """TrainerWatch measures by it what Lightning's own question costs in each step. If this fails, look for
    `_broadcast_sigterm_tensor` in `_TrainingEpochLoop.advance`: that time would count as work of callbacks, or the
    question is gone and so may our label for it.
    """
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    events: list[str] = []

    def begin(trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        own = loop._broadcast_sigterm_tensor

        def ask() -> None:
            events.append("ask")
            own()

        loop.__dict__["_broadcast_sigterm_tensor"] = ask

    trainer = make_trainer(max_epochs=1, callbacks=[Looking(on_train_start=begin)])
    trainer.fit(Model(events), Loader(events))
    assert heard(events, "ask", "next", "step") == [
        event for number in range(NUM_BATCHES) for event in ("ask", "next", f"step {number}")
    ]


def test_a_hook_that_cannot_be_called_is_left_out():
    """FeedMonitor puts None in the place of its unused hooks, so that no step pays for them. If this fails, look at
    `_call_callback_hooks`: leave `_UNUSED_HOOKS` empty, and `_switch` to the watch alone.
    """
    callback = pl.Callback()
    for name in ("on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_before_optimizer_step"):
        callback.__dict__[name] = None
    events: list[str] = []
    make_trainer(max_epochs=1, callbacks=[callback]).fit(Model(events), Data(events))
    assert len(heard(events, "step ")) == NUM_BATCHES


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_batch_that_is_ready_and_not_completed_is_no_step(is_given_up):
    """FeedMonitor asks so whether the last batch of an epoch was one. If this fails, look at
    `_TrainingEpochLoop.advance`: a step more or less would be counted in each epoch.
    """
    progress: list[tuple[int, int]] = []

    class GivingUp(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if is_given_up and batch_idx == 1 else None

        def on_train_epoch_end(self) -> None:
            current = self.trainer.fit_loop.epoch_loop.batch_progress.current
            progress.append((current.ready, current.completed))

    make_trainer(max_epochs=1).fit(GivingUp([]), Data([]))
    assert progress == [(2, 1) if is_given_up else (NUM_BATCHES, NUM_BATCHES)]


def test_the_loaders_of_the_training_are_in_a_combined_loader_of_this_name():
    """`training_loader` gives it. If this fails, look at `_FitLoop.setup_data`: the monitor would know no loader."""
    trainer = make_trainer(max_epochs=1)
    assert trainer.fit_loop._combined_loader is None
    loader = Loader([])
    trainer.fit(Model([]), loader)
    assert isinstance(trainer.fit_loop._combined_loader, CombinedLoader)
    assert trainer.fit_loop._combined_loader.flattened == [loader]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_torch_loader_and_lightnings_hold_the_running_iteration_with_its_workers(is_kept):
    """find_readers reads the process numbers there. If this fails, look at `DataLoader.__iter__`,
    `_MultiProcessingDataLoaderIter.__init__` and `CombinedLoader.__iter__`: all child processes of the training, also
    those of the validation, would be taken for its workers.
    """
    loader = DataLoader(torch.ones(4, 2), num_workers=1, persistent_workers=is_kept)
    combined = CombinedLoader(loader)
    assert combined._iterator is None
    assert loader._iterator is None
    iterator = iter(combined)
    next(iterator)
    (running,) = combined._iterator.iterators
    assert isinstance(running, _MultiProcessingDataLoaderIter)
    assert loader._iterator is (running if is_kept else None)
    assert [worker.pid for worker in running._workers] == [child.pid for child in multiprocessing.active_children()]
    assert all(worker.is_alive() for worker in running._workers)
    del running, iterator
    combined.reset()
    loader._iterator = None


def test_a_running_iteration_of_torch_keeps_finished_batches_under_these_names():
    """is_ready looks there: in the queue, and for a batch that came before its turn, in the table. If this fails, look
    at `_MultiProcessingDataLoaderIter._next_data`: waits for batches that are ready would be taken for a slow loader.
    """
    iterator = iter(DataLoader(torch.arange(6), num_workers=2))
    next(iterator)
    assert iterator._rcvd_idx == 1
    # Batch 1 comes from the other worker, batch 2 from the first; whichever came first is in the table with its data.
    assert set(iterator._task_info) <= set(range(1, 6))
    assert all(len(info) in (1, 2) for info in iterator._task_info.values())
    with contextlib.suppress(NotImplementedError):  # not on every system
        assert iterator._data_queue.qsize() >= 0
    assert [int(batch) for batch in iterator] == [1, 2, 3, 4, 5]
    assert not iterator._task_info


# How a Trainer does a step: OOMRecovery does it again -------------------------------------------------------------


class Logging(Model):
    """Logs a value and a metric object in each step."""

    def __init__(self, events: list[str]) -> None:
        """Note into a common list."""
        super().__init__(events)
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log before and after."""
        loss = super().training_step(batch, batch_idx)
        self.metric(loss)
        self.log("value", loss, on_step=True, on_epoch=True, reduce_fx="max", batch_size=2)
        self.log("metric", self.metric)
        return loss


def test_a_closure_is_made_by_a_method_found_on_the_loop_and_has_three_parts():
    """OOMRecovery puts its own closure in the place of Lightning's, with the same parts. If this fails, look at
    `_AutomaticOptimization.run` and `Closure`: running out of memory would end the training again.
    """
    events: list[str] = []

    class Own(Closure):
        def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
            result = self._step_fn()
            events.append(f"zero_grad {self._zero_grad_fn is not None}")
            if self._zero_grad_fn is not None:
                self._zero_grad_fn()
            assert self._backward_fn is not None
            self._backward_fn(result.closure_loss)
            return result

    def begin(trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        own = loop._make_closure

        def make(kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
            events.append(f"{batch_idx} {list(kwargs)} {trainer.fit_loop._should_accumulate()}")
            closure = own(kwargs, optimizer, batch_idx)
            return Own(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)

        loop.__dict__["_make_closure"] = make

    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=[Looking(on_train_start=begin)])
    trainer.fit(Model(events), *lists(1, 2))
    names = "['batch', 'batch_idx']"
    assert events == [f"0 {names} True", "step 0", "zero_grad True", f"1 {names} False", "step 1", "zero_grad False"]


def test_the_loop_runs_a_training_step_on_any_arguments_and_wraps_what_it_gives():
    """OOMRecovery runs `_training_step` with a microbatch and puts results together. If this fails, look at
    `ClosureResult`: what `on_train_batch_end` gets would be another thing.
    """
    seen: list[Any] = []

    class Dict(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "more": len(batch)}

    def look(trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        result = loop._training_step(OrderedDict(batch=torch.ones(3, 4), batch_idx=0))
        seen.append(
            (result.closure_loss.requires_grad, result.loss.requires_grad, result.extra, result.asdict()["more"])
        )
        made = type(result)(None, extra={"a": 1})
        made.loss = torch.tensor(2.0)
        seen.append(made.asdict())

    make_trainer(max_epochs=1, callbacks=[Looking(on_train_batch_start=look)]).fit(Dict([]), *lists(1, 1))
    assert seen == [(True, False, {"more": 3}, 3), {"loss": torch.tensor(2.0), "a": 1}]


def test_logged_values_are_entries_of_a_dict_that_are_replaced_and_not_changed_in_place():
    """HookedLogs keeps references to what was logged, and puts them back after a failed attempt. If this fails, look at
    `_ResultMetric.update`: a batch that was done twice would count twice.
    """
    seen: list[tuple[Any, Any]] = []
    keys: list[list[str]] = []

    def look(trainer: pl.Trainer) -> None:
        results = trainer._results
        keys.append(sorted(results))
        assert trainer._logger_connector._current_fx == "training_step"
        entry = results["training_step.value"]
        assert entry.is_tensor
        assert not results["training_step.metric"].is_tensor
        assert results["training_step.metric"].value is trainer.lightning_module.metric
        seen.append((entry.value, float(entry.value)))
        assert "log" not in results.__dict__

    make_trainer(max_epochs=1, callbacks=[Looking(on_train_batch_end=look)]).fit(Logging([]), *lists(1, 3))
    assert keys == [["training_step.metric", "training_step.value"]] * 3
    assert [float(value) for value, _ in seen] == [was for _, was in seen]
    assert seen[0][0] is not seen[1][0]


def test_a_module_logs_by_a_method_found_on_the_results_with_these_arguments():
    """HookedLogs keeps calls of `log` instead of making them, and makes one for the batch. If this fails, look at
    `LightningModule.log`: values of microbatches would be logged as if each were a batch.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def begin(trainer: pl.Trainer) -> None:
        trainer._results.__dict__["log"] = lambda *args, **kwargs: calls.append((args, kwargs))

    make_trainer(max_epochs=1, callbacks=[Looking(on_train_batch_start=begin)]).fit(Logging([]), *lists(1, 1))
    assert [args[:2] for args, _ in calls] == [("training_step", "value"), ("training_step", "metric")]
    assert all(len(args) == 3 for args, _ in calls)
    assert [kwargs["batch_size"] for _, kwargs in calls] == [2, None]
    assert [kwargs["reduce_fx"] for _, kwargs in calls] == ["max", "mean"]


def test_an_error_leaves_the_name_of_the_hook_that_raised_it():
    """HookedLogs puts `_current_fx_name` back after a failed attempt. If this fails it need not any more."""
    seen: list[Any] = []

    class Failing(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("out of order")

    def look(trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        seen.append(trainer.lightning_module._current_fx_name)
        with pytest.raises(RuntimeError, match="out of order"):
            loop._training_step(OrderedDict(batch=torch.ones(2, 4), batch_idx=0))
        seen.append(trainer.lightning_module._current_fx_name)

    trainer = make_trainer(max_epochs=1, callbacks=[Looking(on_train_batch_start=look)])
    with pytest.raises(RuntimeError, match="out of order"):
        trainer.fit(Failing([]), *lists(1, 1))
    assert seen == ["on_train_batch_start", "training_step"] or seen == [None, "training_step"]


def test_evaluation_steps_and_optimizer_steps_are_looked_up_on_the_strategy_itself():
    """OOMRecovery stands before them. If this fails, look at `_call_strategy_hook` and `LightningOptimizer.step`."""
    events: list[str] = []

    class Evaluated(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

        test_step = validation_step

    def begin(trainer: pl.Trainer, *_: Any) -> None:
        for name in ("validation_step", "test_step", "predict_step", "optimizer_step"):
            own = getattr(trainer.strategy, name)

            def call(*args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
                events.append(f"{name} {len(args)}")
                return own(*args, **kwargs)

            trainer.strategy.__dict__[name] = call

    model = Evaluated([])
    trainer = make_trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=[Looking(setup=begin)])
    [loader] = lists(1, 1)
    trainer.fit(model, loader, loader)
    trainer.test(model, loader, verbose=False)
    trainer.predict(model, loader)
    assert list(dict.fromkeys(event.split()[0] for event in events)) == [
        "optimizer_step",
        "validation_step",
        "test_step",
        "predict_step",
    ]
    assert {event for event in events if "optimizer" not in event} == {
        "validation_step 2",
        "test_step 2",
        "predict_step 2",
    }


def test_hooks_about_backward_are_looked_up_on_their_owners_each_time():
    """OnceHooks puts a function that does nothing in their place. If this fails, look at `Precision.pre_backward` and
    `post_backward`: a hook that changes gradients would change them once per microbatch.
    """
    events: list[str] = []

    class Hooked(Model):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            events.append("own before")

        def on_after_backward(self) -> None:
            events.append("own after")

    class Watching(pl.Callback):
        def on_before_backward(self, *args: Any) -> None:
            events.append("before")

        def on_after_backward(self, *args: Any) -> None:
            events.append("after")

        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                for owner in (self, module):
                    owner.__dict__["on_before_backward"] = lambda *_: None
                    owner.__dict__["on_after_backward"] = lambda *_: None

    make_trainer(max_epochs=1, callbacks=[Watching()]).fit(Hooked([]), *lists(1, 2))
    assert events == ["before", "own before", "after", "own after"]


def test_the_training_loader_is_made_again_when_it_is_missing_at_the_begin_of_an_epoch():
    """LoaderShrinker has it made again so, with another batch size. If this fails, look at `_FitLoop.setup_data`."""
    events: list[str] = []
    sources: list[bool] = []

    def drop(trainer: pl.Trainer) -> None:
        sources.append(trainer.fit_loop._data_source.is_module())
        own = trainer.fit_loop.setup_data

        def setup_data() -> None:
            events.append("setup_data")
            trainer.fit_loop._combined_loader = None
            own()

        trainer.fit_loop.__dict__["setup_data"] = setup_data

    trainer = make_trainer(max_epochs=2, callbacks=[Looking(on_train_start=drop)])
    trainer.fit(Model([]), datamodule=Data(events))
    made = [event for event in events if "train_dataloader" in event or event == "setup_data"]
    asked = "train_dataloader at epoch"
    assert made == [f"{asked} 0", "setup_data", f"{asked} 0", "setup_data", f"{asked} 1"]
    trainer = make_trainer(max_epochs=1, callbacks=[Looking(on_train_start=drop)])
    trainer.fit(Model([]), *lists(1, 1))
    assert sources == [True, False]


def test_a_datamodule_is_restored_by_a_method_found_on_the_connector_before_callbacks_are(tmp_path):
    """LoaderShrinker sets the batch size there. If this fails, look at `_CheckpointConnector.restore`: a DataModule
    would compute where to go on from the size before it was made smaller.
    """
    events: list[str] = []

    class Kept(pl.Callback):
        state_key = "kept"

        def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            connector = trainer._checkpoint_connector
            own = connector.restore_datamodule

            def restore() -> None:
                events.append(f"connector {(connector._loaded_checkpoint or {}).get('callbacks', {}).get('kept')}")
                own()

            connector.__dict__["restore_datamodule"] = restore
            assert trainer.fit_loop._data_source.instance is trainer.datamodule

        def state_dict(self) -> dict[str, Any]:
            return {"size": 4}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            events.append(f"callback {state}")

    trainer = make_trainer(max_epochs=1, callbacks=[Kept()])
    trainer.fit(Model([]), Data([], state={"a": 1}))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    events.clear()
    make_trainer(max_epochs=2, callbacks=[Kept()]).fit(Model([]), Data(events), ckpt_path=tmp_path / "a.ckpt")
    restored = [event for event in events if "connector" in event or "load_state" in event or "callback" in event]
    assert restored == [
        "connector {'size': 4}",
        "datamodule.load_state_dict {'a': 1} in True",
        "callback {'size': 4}",
    ]


def test_zeroed_gradients_are_counted_by_a_progress_with_a_state():
    """zero_grad_once puts the count back, and EmergencyCheckpoint writes another one. If this fails, look at
    `_OptimizationProgress`.
    """
    seen: list[Any] = []

    def look(trainer: pl.Trainer) -> None:
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
        seen.append(progress.state_dict()["total"]["completed"])
        progress.load_state_dict(progress.state_dict())

    make_trainer(max_epochs=1, callbacks=[Looking(on_train_batch_end=look)]).fit(Model([]), *lists(1, 2))
    assert seen == [1, 2]


def test_a_closure_keeps_its_result_under_this_name():
    """OOMRecovery drops it, as its loss holds the graph of an attempt that is done again."""
    closure = Closure(lambda: ClosureResult(torch.ones(1, requires_grad=True).sum()))
    closure()
    assert isinstance(closure._result, ClosureResult)
    assert closure._result.closure_loss is not None


def test_a_ddp_strategy_knows_at_once_whether_it_averages_models():
    """obstacle_to_recovery asks before the strategy is set up. If this fails, look at `DDPStrategy.setup`."""
    assert DDPStrategy()._model_averaging_period is None
    assert DDPStrategy(model_averaging_period=2)._model_averaging_period == 2
    assert DDPStrategy()._ddp_comm_hook is None


def test_numpys_generator_shows_its_words_and_a_normal_number_kept_back_moved_them_first():
    """GeneratorStates compares them in place of reading the whole state. If this fails, read it each time."""

    def words() -> bytes:
        generator = np.random.get_bit_generator()
        assert isinstance(generator, np.random.MT19937)
        return ctypes.string_at(generator.ctypes.state_address, 624 * 4 + 4)

    before = words()
    state = np.random.get_state()
    assert before[:-4] == state[1].tobytes()
    assert int.from_bytes(before[-4:], "little") == state[2]
    np.random.standard_normal()
    assert words() != before
    np.random.set_state(state)
    assert words() == before


def test_what_a_checkpoint_holds_can_be_had_without_writing_it(tmp_path):
    """EmergencyCheckpoint writes it by itself. If this fails, look at `Trainer.save_checkpoint`."""
    held: list[dict[str, Any]] = []

    def look(trainer: pl.Trainer) -> None:
        held.append(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
        trainer.save_checkpoint(tmp_path / "whole.ckpt")

    make_trainer(max_epochs=1, callbacks=[Looking(on_train_batch_end=look)]).fit(Model([]), *lists(1, 1))
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    assert saved.keys() == held[0].keys()
    assert saved["loops"] == held[0]["loops"]


def test_a_scaler_forgets_an_unscaled_optimizer_when_its_entry_is_dropped():
    """reset_scaler does so after a step that broke off. If this fails, look at `GradScaler._per_optimizer_states`."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler._per_optimizer_states.pop(id(optimizer))
    scaler.unscale_(optimizer)


def test_batch_normalisation_changes_its_statistics_without_being_counted():
    """BufferStates restores them whatever torch's count of changes says. If this fails it need not any more."""
    norm = torch.nn.BatchNorm1d(3)
    version, before = norm.running_mean._version, norm.running_mean.clone()
    norm(torch.randn(5, 3) + 7)
    assert not torch.equal(norm.running_mean, before)
    assert norm.running_mean._version == version


def test_many_tensors_are_copied_into_others_by_one_call():
    """BufferStates and RankGuard use `_foreach_copy_`. If this fails, copy them one by one."""
    sources = [torch.ones(2), torch.full((3, 1), 2.0), torch.tensor(3)]
    targets = [torch.zeros(2), torch.zeros(3, 1), torch.tensor(0)]
    torch._foreach_copy_(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_metrics_and_collections_of_them_keep_their_states_under_these_names():
    """MetricStates saves them. If this fails, look for the new names: metrics would count a failed attempt."""
    metric = MeanMetric()
    assert set(metric._defaults) == {"mean_value", "weight"}
    metric(torch.tensor([1.0, 2.0]))
    assert float(metric._forward_cache) == 1.5
    assert metric._update_count == 1
    collection = MetricCollection([MeanMetric()])
    assert {"_groups", "_groups_checked", "_state_is_copy"} <= set(collection.__dict__)


def test_the_update_of_an_optimizer_without_its_hooks_is_what_its_step_wraps():
    """GuardedStep calls it for one parameter at a time. If this fails, look at `Optimizer.profile_hook_step`."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    events: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
    optimizer.register_step_post_hook(lambda *_: events.append("post"))
    weight.grad = torch.ones(2)
    type(optimizer).step.__wrapped__(optimizer)
    assert events == []
    assert weight.tolist() == [0.5, 0.5]
    optimizer.step()
    assert events == ["pre", "post"]


def test_hooks_of_an_optimizer_are_in_an_ordered_dict_and_its_step_is_marked_as_hooked():
    """GuardedStep registers its own last, and knows a step that was wrapped. If this fails, look at `Optimizer`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    assert type(optimizer).step.hooked
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert isinstance(optimizer._optimizer_step_post_hooks, OrderedDict)
    assert isinstance(optimizer._optimizer_step_pre_hooks, OrderedDict)
    handle.remove()


def test_operations_on_lists_of_tensors_count_what_they_change():
    """BeforeUpdate sees by it whether an update that broke off has changed anything. If this fails, updates that ran
    out of memory have to be taken for changed in part.
    """
    tensors = [torch.ones(2), torch.ones(3)]
    versions = [tensor._version for tensor in tensors]
    torch._foreach_add_(tensors, 1)
    assert [tensor._version > version for tensor, version in zip(tensors, versions, strict=True)] == [True, True]


def test_ddp_has_these_names_for_what_it_sends_before_a_step(tmp_path):
    """RankGuard does it in its place. If this fails, look at `DistributedDataParallel._pre_forward`."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapper = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))
        assert wrapper.require_forward_param_sync
        assert wrapper.will_sync_module_buffers()
        wrapper._sync_buffers()
        with wrapper.no_sync():
            wrapper(torch.randn(3, 2)).sum().backward()
        assert not wrapper.require_forward_param_sync
        assert not wrapper.will_sync_module_buffers()
        assert wrapper.parameters_to_ignore == set()
        group = wrapper.process_group
        before = group._get_sequence_number_for_group()
        torch.distributed.all_reduce(torch.ones(1), group=group)
        assert group._get_sequence_number_for_group() == before + 1
    finally:
        torch.distributed.destroy_process_group()


def test_an_array_lives_as_long_as_any_tensor_over_its_memory():
    """HostBufferPool takes a buffer back when the array it lent is collected. If this fails a batch that is still held
    would be overwritten: find another way to know when the last tensor is gone.
    """
    lease = np.zeros(64, dtype=np.uint8).view()
    watched = weakref.ref(lease)
    tensor = torch.from_numpy(lease)
    views: list[Any] = [tensor[8:16].view(torch.int64), tensor.numpy()[3:], tensor.detach(), tensor.view(8, 8).T]
    del lease, tensor
    while views:
        gc.collect()
        assert watched() is not None, f"{len(views)} views are left"
        views.pop()
    gc.collect()
    assert watched() is None


def test_the_number_of_threads_belongs_to_the_thread_that_sets_it_and_to_those_born_later():
    """device/threads.py lowers it in the reading thread and sets it anew in the starting one. If this fails, measure
    what a team of threads in the reader costs, and whether the training's own team still has its size.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: dict[str, int] = {}
    is_set, may_end = threading.Event(), threading.Event()

    def lower() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        is_set.set()
        may_end.wait()
        seen["in the thread"] = torch.get_num_threads()

    def look() -> None:
        seen["born later"] = torch.get_num_threads()

    first = threading.Thread(target=lower)
    first.start()
    is_set.wait()
    seen["in the starter"] = torch.get_num_threads()
    second = threading.Thread(target=look)
    second.start()
    second.join()
    may_end.set()
    first.join()
    torch.set_num_threads(before)
    assert seen == {"in the starter": 2, "born later": 1, "in the thread": 1}


def test_rows_that_overlap_can_be_gathered_into_given_memory():
    """GatherReader selects from a view with strides (1, 1) over the whole file. If this fails torch began to refuse
    overlapping inputs of `index_select`, and the raw engine needs another call.
    """
    stored = torch.arange(40, dtype=torch.uint8)
    rows = stored.as_strided((37, 4), (1, 1))
    out = torch.empty(3, 4, dtype=torch.uint8)
    torch.index_select(rows, 0, torch.tensor([36, 0, 5]), out=out)
    assert out.tolist() == [[36, 37, 38, 39], [0, 1, 2, 3], [5, 6, 7, 8]]


class Asked(nn.Parameter):
    """Notes what torch is about to do with it."""

    calls: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.fixture
def asked():
    """A parameter that has become one of another class."""
    parameter = nn.Parameter(torch.ones(2))
    before = id(parameter)
    parameter.__class__ = Asked
    Asked.calls.clear()
    yield parameter
    parameter.__class__ = nn.Parameter
    assert id(parameter) == before


def test_a_parameter_can_change_its_class_and_is_asked_from_then_on(asked):
    """`sync.awaited` rests on it. If this fails, updates in the next forward have no place to wait: switch them off."""
    assert isinstance(asked, nn.Parameter)
    torch.add(asked, 1.0)
    assert Asked.calls == [torch.add]
    asked.__class__ = nn.Parameter
    torch.add(asked, 1.0)
    assert Asked.calls == [torch.add]


def test_an_attribute_is_asked_for_by_the_get_of_its_descriptor(asked):
    """`sync.awaited._DESCRIPTIONS` compares with these. If this fails, reading a shape waits for the network."""
    asked.shape, asked.requires_grad, asked.grad  # noqa: B018
    asked.numel()
    names = ["shape", "requires_grad", "grad"]
    assert Asked.calls == [*(getattr(torch.Tensor, name).__get__ for name in names), torch.Tensor.numel]


def test_subclasses_are_not_asked_where_torch_functions_are_disabled(asked):
    """`DisableTorchFunctionSubclass` reads a description; `DisableTorchFunction` shields a step from every mode."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.add(asked, 1.0)
    with torch._C.DisableTorchFunction(), torch.device("meta"):
        torch.add(asked, 1.0)
    assert Asked.calls == []
    with torch.device("meta"), torch._C.DisableTorchFunction():
        assert torch.zeros(1).device.type == "cpu"


def test_a_module_looks_its_parameters_up_in_a_table_of_this_name_that_may_be_of_ones_own_class():
    """`sync.awaited.ParameterTable` stands there. If this fails, see how `Module.__getattr__` finds a parameter."""

    class Table(dict):
        def __getitem__(self, name):
            seen.append(name)
            return super().__getitem__(name)

    seen: list[str] = []
    module = nn.Linear(2, 2)
    module.__dict__["_parameters"] = Table(module._parameters)
    module(torch.ones(1, 2))
    assert seen == ["weight", "bias"]
    seen.clear()
    module.get_parameter("weight")
    assert set(seen) == {"weight"}


class Seen(TorchDispatchMode):
    """Notes the operators that run under it."""

    def __init__(self) -> None:
        """None yet."""
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_below_python_are_counted_and_can_be_left_for_a_while():
    """`sync.outside` does. If this fails, an optimizer's step is counted, cached or faked by a mode of forward."""
    assert torch._C._len_torch_dispatch_stack() == 0
    with Seen() as seen:
        assert torch._C._len_torch_dispatch_stack() == 1
        with _disable_current_modes():
            torch.ones(1).add_(1.0)
            assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._len_torch_dispatch_stack() == 1
    assert seen.names == []


def test_transforms_can_be_left_for_a_while():
    """`sync.outside` does. If this fails, a parameter used first in `torch.func.grad` is not updated there."""
    x = torch.ones(2)

    def total(y):
        assert torch._C._are_functorch_transforms_active()
        with temporarily_clear_interpreter_stack():
            assert not torch._C._are_functorch_transforms_active()
            x.add_(1.0)
        return (x * y).sum()

    assert torch.func.grad(total)(torch.ones(2)).tolist() == [2.0, 2.0]


def test_hooks_on_a_step_are_found_under_these_names():
    """`sync.optimizers.why_inseparable` asks. If this fails, hooks run once for each part of a step."""
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    kinds = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    assert [len(hooks) for hooks in kinds] == [0, 0]
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    assert [len(hooks) for hooks in kinds] == [1, 1]
    kinds = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    before = [len(hooks) for hooks in kinds]
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None),
        torch_optimizer.register_optimizer_step_post_hook(lambda *_: None),
    ]
    try:
        assert [len(hooks) for hooks in kinds] == [number + 1 for number in before]
    finally:
        for handle in handles:
            handle.remove()


def test_a_scheduler_marks_the_step_it_wraps_and_asks_whether_it_was_called():
    """`PendingStep` says that it was. If this fails, schedulers warn of a step that is only pending."""
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    assert "step" not in optimizer.__dict__
    scheduler = StepLR(optimizer, 1)
    assert hasattr(optimizer.__dict__["step"], "_wrapped_by_lr_sched")
    with pytest.warns(UserWarning, match="lr_scheduler.step.* before .*optimizer.step"):
        scheduler.step()
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    scheduler = StepLR(optimizer, 1)
    optimizer._opt_called = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_the_count_of_an_optimizer_is_made_of_the_default_dtype_if_that_is_double():
    """`PendingStep` puts the dtype back. If this fails it may not have to."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        parameter = nn.Parameter(torch.ones(1, dtype=torch.float32))
        parameter.grad = torch.ones(1, dtype=torch.float32)
        optimizer = optim.Adam([parameter])
        torch.set_default_dtype(dtype)
        try:
            optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(optimizer.state[parameter]["step"].dtype)
    assert found == [torch.float32, torch.float64, torch.float32]


def test_a_step_looks_at_the_groups_and_the_state_that_the_optimizer_has_then():
    """`PendingStep` hands it other lists of parameters, and guards `state` in between."""
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    first.grad = second.grad = torch.ones(1)
    optimizer = optim.SGD([first, second], 0.5, momentum=0.9)
    state: dict[Any, Any] = torch_optimizer.defaultdict(dict)
    optimizer.state = state
    optimizer.param_groups[0]["params"] = [second]
    optimizer.step()
    assert (first.item(), second.item()) == (1.0, 0.5)
    assert list(state) == [second]
    optimizer.param_groups[0]["params"] = []
    optimizer.step()  # nothing to do is no error


def test_compiled_modules_are_known_by_these_names():
    """`sync.hooks.compiled_parts` asks. If this fails, a compiled graph uses parameters that nobody has settled."""
    module = nn.Linear(2, 2)
    assert not hasattr(module, "_orig_mod")
    assert torch.compile(module, backend="eager")._orig_mod is module
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(2, 2))
    assert type(scripted).__module__.startswith("torch.jit")


def test_what_is_queued_in_backward_runs_when_it_has_ended():
    """`GradientSync` sends the rest there if the loop did not tell of a backward."""
    events = []
    x = nn.Parameter(torch.ones(2))

    def hook(_):
        Variable._execution_engine.queue_callback(lambda: events.append("end"))
        events.append("hook")

    x.register_post_accumulate_grad_hook(hook)
    y = nn.Parameter(torch.ones(2))
    y.register_post_accumulate_grad_hook(lambda _: events.append("other"))
    (x * 2 + y).sum().backward()
    assert sorted(events[:2]) == ["hook", "other"]
    assert events[2:] == ["end"]


def test_a_graph_shows_how_often_a_leaf_is_used():
    """`backprop.engine.count_uses` walks it. If this fails, a weight that is used twice may wait."""
    x = nn.Parameter(torch.ones(2))
    node = (x * x).grad_fn
    leaves = [following for following, _ in node.next_functions]
    assert leaves[0] is leaves[1]
    assert leaves[0].variable is x
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.nn.functional.linear(torch.ones(1, 2), nn.Parameter(torch.ones(2, 2))).grad_fn
    names, nodes = set(), [cast]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert any(name.startswith("ToCopyBackward") for name in names)


def test_gloo_can_be_given_one_thread_and_the_interfaces_it_is_to_use():
    """`sync.gloo` does. If this fails, use `new_group`: the same result, with messages that share the link."""
    kind = distributed.ProcessGroupGloo
    options = kind._Options()
    assert {"_threads", "_devices", "_timeout"} <= set(dir(options))
    options._devices, options._threads = [kind.create_default_device()], 1
    options._timeout = timedelta(seconds=9)
    assert (len(options._devices), options._threads, options._timeout) == (1, 1, timedelta(seconds=9))
    assert "gloo" in distributed.Backend.backend_list
    group = kind(distributed.HashStore(), 0, 1, options)
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]


def test_a_message_that_has_failed_or_arrived_is_completed():
    """`Reducer.is_arrived` asks. What has failed says True too, and raises in wait."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        work = distributed.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        assert work.is_completed()
    finally:
        distributed.destroy_process_group()


def test_lightning_wraps_an_optimizer_that_is_found_under_this_name():
    """`OutOfOrderStrategy` takes the torch optimizer out of it."""
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    assert LightningOptimizer(optimizer)._optimizer is optimizer


def test_what_follows_a_closure_is_a_method_of_the_precision():
    """`OutOfOrderStrategy.optimizer_step` calls it: clipping, hooks before the step, tracking of gradient norms."""
    calls = []

    class Precision(pl.plugins.precision.Precision):
        def _after_closure(self, model, optimizer):
            calls.append(type(optimizer).__name__)
            return super()._after_closure(model, optimizer)

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch, batch_index):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return optim.SGD(self.parameters(), 0.1)

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[Precision()],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(2, 2)))
    assert calls == ["SGD"]


def test_many_tensors_can_be_sent_in_few_messages_under_this_name():
    """`sync.ranks` sends buffers with it, as DistributedDataParallel does. If this fails, send them one by one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tensors = [torch.ones(3), torch.arange(4), torch.ones(4, 4)[:, ::2]]
        distributed._broadcast_coalesced(distributed.group.WORLD, tensors, 250 << 20, 0)
        assert [one.sum().item() for one in tensors] == [3.0, 6, 8.0]
    finally:
        distributed.destroy_process_group()


def test_the_node_that_accumulates_runs_its_hooks_after_those_of_the_parameter():
    """`backprop.engine.AccumulationHook` rests on it, as DistributedDataParallel does. If this fails, a hook of a user
    that changes a gradient runs when the gradient is on the wire already.
    """
    events = []
    parameter = nn.Parameter(torch.ones(2))
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: events.append("node"))
    parameter.register_post_accumulate_grad_hook(lambda _: events.append("parameter"))
    (parameter * 2).sum().backward()
    assert events == ["parameter", "node"]


# Pipeline ----------------------------------------------------------------------------------------------------


def test_a_nest_is_taken_apart_and_put_together_and_classes_of_others_are_registered():
    nest = {"a": (torch.ones(1), 2), "b": [OrderedDict(c=3)]}
    leaves, structure = _pytree.tree_flatten(nest)
    assert leaves[1:] == [2, 3]
    assert _pytree.tree_unflatten([7, 8, 9], structure) == {"a": (7, 8), "b": [OrderedDict(c=9)]}
    assert _pytree.tree_flatten(_pytree.tree_unflatten([0] * 3, structure))[1] == structure


def test_tensors_exchange_their_contents_under_the_same_objects():
    parameter, other = nn.Parameter(torch.ones(2)), torch.empty(2, device="meta", requires_grad=True)
    seen = weakref.ref(parameter)
    torch._C._swap_tensor_impl(parameter, other)
    assert seen() is parameter
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_meta
    assert torch.equal(other, torch.ones(2))


def test_hooks_of_a_tensor_are_put_on_again_by_setting_these_dicts():
    events: list[str] = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda grad: events.append("tensor"))
    parameter.register_post_accumulate_grad_hook(lambda _: events.append("accumulated"))
    hooks, later_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, torch.zeros(2, requires_grad=True))
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, later_hooks
    (parameter * 2).sum().backward()
    assert events == ["tensor", "accumulated"]


def test_hooks_of_a_module_and_whether_it_is_compiled_are_found_under_these_names():
    module = nn.Sequential(nn.Linear(1, 1))
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(module, name) for name in names)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    assert all(getattr(module, name) for name in names)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None
    assert type(torch.compile(nn.Linear(1, 1), backend="eager")).__name__ == "OptimizedModule"


def test_a_module_has_its_own_tensors_in_these_dicts_and_looks_them_up_there():
    module = nn.Sequential(nn.Linear(1, 1))
    module.register_buffer("own", torch.ones(1))
    module._buffers["own"] = torch.zeros(1)
    assert module.own == 0
    assert list(module._parameters) == []
    assert list(module[0]._parameters) == ["weight", "bias"]


def test_a_trainer_asks_this_switch_whether_to_put_in_a_sampler_of_its_own():
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False, barebones=False
    )
    loader = DataLoader(torch.arange(4))
    assert trainer._data_connector._requires_distributed_sampler(loader)
    trainer._accelerator_connector.use_distributed_sampler = False
    assert not trainer._data_connector._requires_distributed_sampler(loader)


def test_a_scaler_that_asks_all_ranks_has_the_state_of_a_plain_one():
    plain = torch.amp.GradScaler("cpu", init_scale=8.0)
    shared = ShardedGradScaler("cpu")
    shared.load_state_dict(plain.state_dict())
    assert shared.get_scale() == 8.0
    assert isinstance(shared, torch.amp.GradScaler)


def test_torch_has_a_runtime_that_loads_a_schedule_from_a_file():
    assert hasattr(_PipelineScheduleRuntime, "_load_csv")


def test_groups_of_processes_are_named_by_this_count_which_can_be_set():
    """`pipeline.meeting` makes it equal on all ranks. If this fails, look at how `new_group` names a group: after a
    training that failed on one rank alone, the ranks would wait for each other under different names.
    """
    world = torch.distributed.distributed_c10d._world
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        before = world.group_count
        assert distributed.new_group([0]).group_name == str(before)
        assert world.group_count == before + 1
        world.group_count = before + 7
        assert distributed.new_group([0]).group_name == str(before + 7)
        assert distributed.group.WORLD.get_group_store().compare_set("key", "", "value") == b"value"
    finally:
        distributed.destroy_process_group()


def test_handlers_of_signals_are_found_on_the_instance_and_registered_after_the_setup_of_the_strategy():
    """`strategies.signals` steps into their places in `setup`. If this fails, look at `_SignalConnector` and `_run`: a
    handler of Lightning's sends to all ranks from the middle of a step, and a pipeline waits until its timeout.
    """
    told: list[int] = []

    def step_in(trainer: pl.Trainer) -> None:
        connector = trainer._signal_connector
        assert callable(connector._slurm_sigusr_handler_fn)
        connector.__dict__["_sigterm_notifier_fn"] = lambda signum, frame: told.append(signum)

    def send(trainer: pl.Trainer) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not trainer.received_sigterm
        if len(told) == 2:
            trainer._signal_connector.received_sigterm = True

    trainer = make_trainer(max_epochs=1, callbacks=[Looking(on_fit_start=step_in, on_train_batch_end=send)])
    with pytest.raises(SIGTERMException):
        trainer.fit(Model([]), Loader([]))
    assert told == [signal.SIGTERM] * 2
    assert trainer.global_step == 2


def test_foreach_multiplies_by_a_tensor_and_gives_norms() -> None:
    """ClippedGradientSync and ScatteredReducer use them. If this fails, take one tensor after the other."""
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0], dtype=torch.float64)]
    assert [float(norm) for norm in torch._foreach_norm(tensors)] == [5.0, 10.0]
    torch._foreach_mul_(tensors[:1], torch.tensor(0.5))
    assert tensors[0].tolist() == [1.5, 2.0]
