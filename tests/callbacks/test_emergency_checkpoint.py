"""A training that out-of-memory ends is saved as it was before the batch, and goes on from there as if nothing was.

The errors are injected here; test_oom_recovery_real.py does the same where memory really runs out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gpufeed import H5DataModule, OOMRecovery
from lightning_gpufeed.errors import OOMRecoveryError
from tests.callbacks.oom_models import Everything, Fault, Run, Witness, differences
from tests.datamodules.models import MemoryLogger, make_trainer, same_bits, write_images


class OfFiles(Everything):
    """The same, for batches of an `H5DataModule`, which can go on in the middle of an epoch."""

    def unpack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return batch["images"].flatten(1)[:, :6].float() / 255, batch["labels"] % 4


def by_step(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that moves with each step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


class SaveBefore(pl.Callback):
    """Keeps what a checkpoint would hold before each batch."""

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        path = Path(trainer.default_root_dir) / "before.pt"
        trainer.save_checkpoint(path)
        self.saved.append(torch.load(path, weights_only=False))
        path.unlink()


@pytest.fixture(scope="module")
def h5_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four batches an epoch: 8, 8, 8 and 6."""
    return write_images(tmp_path_factory.mktemp("data") / "train.h5", 30)


@pytest.fixture(scope="module")
def train(h5_path: Path) -> Callable[..., Run]:
    """Train for two epochs on the file."""

    def train(
        folder: Path | None,
        faults: list[Fault] | None = None,
        *callbacks: Any,
        ckpt_path: Path | None = None,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Run:
        torch.manual_seed(1)
        model = OfFiles(faults or [], scheduler=by_step, **(options or {}))
        logger, witness = MemoryLogger(), Witness()
        settings = {"max_epochs": 2, "logger": logger, "default_root_dir": folder, **settings}
        trainer = make_trainer(callbacks=[*callbacks, witness], **settings)
        data = H5DataModule(str(h5_path), batch_size=8, seed=1, keys=["images", "labels"])
        resume: dict[str, Any] = {} if ckpt_path is None else {"ckpt_path": ckpt_path, "weights_only": False}
        with warnings.catch_warnings():
            # The runs that go on have no callbacks that would save.
            warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used to")
            trainer.fit(model, datamodule=data, **resume)
        return Run(model, trainer, witness, logger, (0.0, 0.0, 0.0))

    return train


@pytest.fixture
def fit(train: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """The same, with few values logged."""
    return partial(train, tmp_path, options={"log_everything": False})


@pytest.fixture(scope="module")
def plain(train: Callable[..., Run]) -> Run:
    """Lightning alone."""
    return train(None)


@pytest.fixture(scope="module", params=[0, 4, 7], ids="in step {}".format)
def resumed(request: pytest.FixtureRequest, train: Callable[..., Run], tmp_path_factory: Any) -> Run:
    """A training that was ended by out-of-memory in the middle of a step, from there on."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.raises(torch.OutOfMemoryError):
        train(folder, always("backward", request.param % 4, request.param // 4), OOMRecovery())
    return train(folder, [], OOMRecovery(), ckpt_path=saved_in(folder))


def always(phase: str = "forward", batch: int = 2, epoch: int = 1) -> list[Fault]:
    """It never fits."""
    return [Fault(phase, batch, epoch, fits=0)]


def saved_in(folder: Path) -> Path:
    """The one emergency checkpoint."""
    (path,) = folder.glob("out-of-memory-*.ckpt")
    return path


def note_of(error: BaseException) -> str:
    """What was added to the error."""
    return "\n".join(getattr(error, "__notes__", []))


VALUES_OF_EPOCH = ("callback_metrics", "progress_bar", "logged", "metrics")
"""They begin anew after every checkpoint in the middle of an epoch."""
COUNTERS = ("loops", "optim_progress")


def test_what_goes_on_from_it_is_the_run_that_never_failed(plain: Run, resumed: Run) -> None:
    ours = resumed.witness.batches
    theirs = plain.witness.batches[-len(ours) :]
    assert len(ours) == 8 - theirs[0]["global_step"] + 1
    left_out = (*VALUES_OF_EPOCH, *COUNTERS)
    ours, theirs = ([{k: v for k, v in seen.items() if k not in left_out} for seen in run] for run in (ours, theirs))
    assert differences(ours, theirs) == []


def test_counters_of_what_goes_on_from_it_are_those_of_the_run_that_never_failed(plain: Run, resumed: Run) -> None:
    assert differences(resumed.seen["counters"], plain.seen["counters"]) == []
    steps = [step for step, _ in resumed.logger.logged]
    assert steps == [step for step, _ in plain.logger.logged][-len(steps) :]


def test_it_holds_what_a_checkpoint_before_the_batch_would_hold(fit: Callable[..., Run], tmp_path: Path) -> None:
    before = SaveBefore()
    with pytest.raises(torch.OutOfMemoryError):
        fit(always(), OOMRecovery(), before)
    ours, theirs = torch.load(saved_in(tmp_path), weights_only=False), before.saved[-1]
    assert list(ours) == list(theirs)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "H5DataModule"):
        assert same_bits(ours[key], theirs[key]), key
    assert ours["global_step"] == 6


def test_it_can_be_loaded_without_trusting_it(fit: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        fit(always(), OOMRecovery())
    assert torch.load(saved_in(tmp_path), weights_only=True)["global_step"] == 6


def test_the_error_names_it_and_the_shape_of_each_entry(fit: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(always(), OOMRecovery())
    note = note_of(caught.value)
    assert f"is saved in {saved_in(tmp_path)}" in note
    assert "batch['images'] (8, 9, 8)" in note
    assert "batch['labels'] (8,)" in note
    assert "\nMemory: " in note


def test_it_lies_beside_the_checkpoints_of_the_training(fit: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "models"
    saving = ModelCheckpoint(dirpath=folder, filename="own")
    with pytest.raises(torch.OutOfMemoryError):
        fit(always(), OOMRecovery(), saving, enable_checkpointing=True)
    assert sorted(path.name for path in folder.iterdir()) == ["out-of-memory-epoch=1-step=6.ckpt", "own.ckpt"]


def test_without_it_the_error_names_the_last_checkpoint(fit: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "models"
    saving = ModelCheckpoint(dirpath=folder, filename="own")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(always(), OOMRecovery(emergency_checkpoint=False), saving, enable_checkpointing=True)
    assert f"The last good checkpoint is {folder / 'own.ckpt'}" in note_of(caught.value)
    assert [path.name for path in folder.iterdir()] == ["own.ckpt"]


def test_without_it_and_without_others_the_error_says_so(fit: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(always(), OOMRecovery(emergency_checkpoint=False))
    assert "There is no checkpoint of this training" in note_of(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no /dev/full")
def test_a_folder_that_cannot_be_written_does_not_hide_the_error(fit: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(always(), OOMRecovery(), default_root_dir=tmp_path / "file" / "folder")
    assert "No emergency checkpoint could be written (NotADirectoryError" in note_of(caught.value)
    assert "There is no checkpoint of this training" in note_of(caught.value)


def test_in_a_window_of_batches_the_error_says_whose_gradients_are_missing(
    fit: Callable[..., Run], tmp_path: Path
) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(always(batch=3), OOMRecovery(), accumulate_grad_batches=2)
    assert "accumulation window" in note_of(caught.value)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(always(batch=2), OOMRecovery(), accumulate_grad_batches=2)
    assert "accumulation window" not in note_of(caught.value)


@pytest.mark.parametrize("phase", ["before_optimizer_step", "clip"])
def test_it_is_written_when_memory_keeps_running_out_between_backward_and_the_update(
    fit: Callable[..., Run], tmp_path: Path, phase: str
) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(always(phase), OOMRecovery(), gradient_clip_val=0.1)
    note = note_of(caught.value)
    path = saved_in(tmp_path)
    assert f"is saved in {path}" in note
    assert "\nMemory: " in note
    resumed = fit([], OOMRecovery(), ckpt_path=path, gradient_clip_val=0.1)
    plain = fit(gradient_clip_val=0.1)
    assert differences(resumed.seen["weights"], plain.seen["weights"]) == []


def test_it_is_written_when_a_batch_was_changed_in_place(train: Callable[..., Run], tmp_path: Path) -> None:
    class Edits(pl.Callback):
        def on_before_backward(self, trainer: Any, model: Any, loss: Any) -> None:
            self.labels.add_(4)

        def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
            self.labels = batch["labels"]

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tmp_path, [Fault("backward", 1)], OOMRecovery(), Edits(), options={"log_everything": False})
    assert "batch['labels'] was changed in place" in note_of(caught.value)
    assert f"is saved in {saved_in(tmp_path)}" in note_of(caught.value)


def test_it_is_written_when_the_check_refuses_to_split(fit: Callable[..., Run], tmp_path: Path) -> None:
    """With a sum taken for a mean the check refuses, and nothing of the batch has been applied."""
    with pytest.raises(OOMRecoveryError) as caught:
        fit([Fault("forward", 1, passes={0, 1})], OOMRecovery(), options={"reduction": "sum", "log_everything": False})
    assert f"is saved in {saved_in(tmp_path)}" in f"{caught.value}\n{note_of(caught.value)}"
