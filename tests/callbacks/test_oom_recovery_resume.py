"""What `OOMRecovery` found is in the checkpoint: a resumed run starts with that size, and is the run that went on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_gpufeed import H5DataModule, OOMRecovery
from tests.callbacks.oom_models import ROUNDING, Everything, Fault, Run, Witness, differences
from tests.datamodules.models import MemoryLogger, every_checkpoint, make_trainer, same_bits, write_images

TWICE = {0, 1}
"""The first two passes of a batch fail: it is cut in two."""


class OfFiles(Everything):
    """For batches of an `H5DataModule`, which can go on in the middle of an epoch."""

    def unpack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return batch["images"].flatten(1)[:, :6].float() / 255, batch["labels"] % 4

    @property
    def sizes(self) -> list[list[int]]:
        """Samples of each pass, by batch."""
        by_batch: dict[tuple[int, int], list[int]] = {}
        for epoch, batch, num_samples in self.passes:
            by_batch.setdefault((epoch, batch), []).append(num_samples)
        return list(by_batch.values())


def by_step(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that moves with each step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Train for three epochs on a file of four batches."""
    path = write_images(tmp_path_factory.mktemp("data") / "train.h5", 30)

    def fit(
        recovery: OOMRecovery | None,
        faults: list[Fault] | None = None,
        *,
        saving: Path | None = None,
        weights_only: bool = False,
        log_everything: bool = False,
        ckpt_path: Path | None = None,
        more: Sequence[pl.Callback] = (),
        **settings: Any,
    ) -> Run:
        torch.manual_seed(1)
        model = OfFiles(faults or [], scheduler=by_step, log_everything=log_everything)
        logger, witness = MemoryLogger(), Witness()
        callbacks = [*([] if recovery is None else [recovery]), *more, witness]
        if saving is not None:
            callbacks += every_checkpoint(saving)[:2]
        settings = {"max_epochs": 3, "logger": logger, "enable_checkpointing": saving is not None, **settings}
        trainer = make_trainer(callbacks=callbacks, **settings)
        data = H5DataModule(str(path), batch_size=8, seed=1, keys=["images", "labels"])
        resume: dict[str, Any] = {} if ckpt_path is None else {"ckpt_path": ckpt_path, "weights_only": weights_only}
        with warnings.catch_warnings():
            # The runs that go on have no callbacks that would save.
            warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used to")
            trainer.fit(model, datamodule=data, **resume)
        return Run(model, trainer, witness, logger, (0.0, 0.0, 0.0))

    return fit


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run that went on has saved after each step and epoch."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def went_on(fit: Callable[..., Run], saved: Path) -> Run:
    """Batch 1 ran out of memory; the whole size is tried again after four clean batches, and fails."""
    faults = [Fault("forward", 1, passes=TWICE), Fault("backward", 2, 1, fits=4)]
    return fit(OOMRecovery(grow_after=4, split_check="skip"), faults, saving=saved)


def test_the_run_that_goes_on_tries_to_grow_at_the_batch_that_is_expected(went_on: Run) -> None:
    whole, halves = [8], [4, 4]
    assert went_on.model.sizes[:7] == [whole, [8, 8, 4, 4], halves, [3, 3], halves, halves, [8, 4, 4]]
    assert went_on.model.sizes[7:] == [[3, 3], halves, halves, halves, [3, 3]]


@pytest.mark.parametrize("step", [2, 4, 6, 8, 10])
def test_a_resumed_run_starts_with_the_size_that_was_found_and_grows_when_the_other_would(
    fit: Callable[..., Run], went_on: Run, saved: Path, step: int
) -> None:
    name = f"epoch-{step // 4 - 1}" if step % 4 == 0 else f"step-{step:02d}"
    recovery = OOMRecovery(grow_after=4, split_check="skip")
    resumed = fit(recovery, [Fault("backward", 2, 1, fits=4)], ckpt_path=saved / f"{name}.ckpt")
    assert resumed.model.sizes == went_on.model.sizes[step:]
    ours, theirs = resumed.seen, went_on.seen
    for key in ("weights", "optimizers", "schedulers", "counters"):
        assert differences(ours[key], theirs[key]) == [], key


def test_the_callback_that_found_it_can_be_used_again_and_starts_with_it(fit: Callable[..., Run]) -> None:
    recovery = OOMRecovery(grow_after=None)
    fit(recovery, [Fault("forward", 1, passes=TWICE)], max_epochs=1)
    again = fit(recovery, max_epochs=1)
    assert recovery.num_microbatches == 2
    # Whether the loss may be split is looked at once per training: a part, and its halves.
    assert again.model.sizes == [[4, 2, 2, 4, 4], [4, 4], [4, 4], [3, 3]]


def test_values_of_split_batches_are_right_in_the_first_epoch_after_a_resume(
    fit: Callable[..., Run], tmp_path: Path
) -> None:
    recovery = OOMRecovery(grow_after=None)
    fit(recovery, [Fault("forward", 1, passes=TWICE)], saving=tmp_path, log_everything=True, max_epochs=1)
    fit(None, saving=tmp_path / "plain", log_everything=True, max_epochs=1)
    settings: dict[str, Any] = {"log_everything": True, "max_epochs": 2}
    resumed = fit(OOMRecovery(grow_after=None), ckpt_path=tmp_path / "epoch-0.ckpt", **settings)
    plain = fit(None, ckpt_path=tmp_path / "plain" / "epoch-0.ckpt", **settings)
    assert resumed.model.sizes[1:] == [[4, 4], [4, 4], [3, 3]]
    # Other than the weights, values are float32 in both.
    assert differences(resumed.seen["epochs"], plain.seen["epochs"], rtol=10 * ROUNDING, atol=1e-6) == []
    assert differences(resumed.seen["weights"], plain.seen["weights"], rtol=10 * ROUNDING, atol=1e-6) == []


def test_the_user_may_ask_for_more_than_was_found_but_gets_no_fewer(
    fit: Callable[..., Run], went_on: Run, saved: Path
) -> None:
    settings: dict[str, Any] = {"ckpt_path": saved / "epoch-0.ckpt", "max_epochs": 2}
    for asked, sizes in ((4, [2, 2, 2, 2]), (1, [4, 4])):
        recovery = OOMRecovery(num_microbatches=asked, grow_after=None, split_check="skip")
        assert fit(recovery, **settings).model.sizes[0] == sizes
        assert recovery.num_microbatches == max(asked, 2)


def test_the_checkpoint_of_a_run_without_it_starts_whole(fit: Callable[..., Run], tmp_path: Path) -> None:
    plain = fit(None, saving=tmp_path, max_epochs=2)
    recovery = OOMRecovery()
    resumed = fit(recovery, ckpt_path=tmp_path / "epoch-0.ckpt", max_epochs=2)
    assert resumed.model.sizes == [[8], [8], [8], [6]]
    assert same_bits(resumed.seen["weights"], plain.seen["weights"])


def test_a_run_without_it_can_go_on_from_its_checkpoint(fit: Callable[..., Run], went_on: Run, saved: Path) -> None:
    resumed = fit(None, ckpt_path=saved / "epoch-0.ckpt")
    assert resumed.model.sizes == [[8], [8], [8], [6]] * 2
    assert differences(resumed.seen["weights"], went_on.seen["weights"], rtol=ROUNDING, atol=1e-7) == []


def test_its_state_is_plain_and_can_be_loaded_without_trusting_it(
    fit: Callable[..., Run], went_on: Run, saved: Path
) -> None:
    state = torch.load(saved / "epoch-0.ckpt", weights_only=True)["callbacks"]["OOMRecovery"]
    assert state["plans"]["fit"]["num_microbatches"] == 2
    assert {stage: plan["num_microbatches"] for stage, plan in state["plans"].items() if stage != "fit"} == {
        "validate": 1,
        "test": 1,
        "predict": 1,
    }
    resumed = fit(OOMRecovery(split_check="skip"), ckpt_path=saved / "epoch-0.ckpt", weights_only=True, max_epochs=2)
    assert resumed.model.sizes[0] == [4, 4]


def test_with_another_batch_size_the_size_that_fits_is_kept(went_on: Run, saved: Path) -> None:
    recovery = OOMRecovery(grow_after=None)
    recovery.load_state_dict(torch.load(saved / "epoch-0.ckpt", weights_only=True)["callbacks"]["OOMRecovery"])
    plan = recovery._plans["fit"]
    assert [plan.num_for(num_samples) for num_samples in (4, 8, 12, 16)] == [1, 2, 3, 4]


def test_a_copy_made_in_the_middle_of_a_run_knows_what_was_found(fit: Callable[..., Run]) -> None:
    copies: list[OOMRecovery] = []

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            (own,) = (callback for callback in trainer.callbacks if isinstance(callback, OOMRecovery))
            copies.append(copy.deepcopy(own))

    recovery = OOMRecovery(grow_after=None, split_check="skip")
    fit(recovery, [Fault("forward", 1, passes=TWICE)], max_epochs=1, more=[Copying()])
    assert [made.num_microbatches for made in copies] == [1, 2, 2, 2]
    assert fit(copies[1], max_epochs=1).model.sizes == [[4, 4], [4, 4], [4, 4], [3, 3]]
