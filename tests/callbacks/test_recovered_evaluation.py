"""Validation, test and prediction that run out of memory give what they would have given, and leave training alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_gpufeed import OOMRecovery
from lightning_gpufeed.errors import OOMRecoveryError
from tests.callbacks.oom_models import ROUNDING, Everything, Fault, Run, differences, fit, loader
from tests.datamodules.models import make_trainer, same_bits

TWICE = {0, 1}
"""The first two passes of a batch fail: it is cut in two."""


def notes_of(error: BaseException) -> str:
    """What was added to an error."""
    return "\n".join(getattr(error, "__notes__", []))


class Evaluated:
    """What an evaluation gave."""

    def __init__(self, stage: str, model: Everything, recovery: OOMRecovery | None, data: Any = None) -> None:
        torch.manual_seed(1)
        self.model, self.recovery = model, recovery
        self.trainer = make_trainer(callbacks=[] if recovery is None else [recovery])
        call = getattr(self.trainer, stage)
        options: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
        self.gave = call(model, loader() if data is None else data, **options)
        self.seen = {"gave": self.gave, "metrics": dict(self.trainer.callback_metrics), "weights": model.state_dict()}


PHASE = {"validate": "validation", "test": "test", "predict": "predict"}


@pytest.mark.parametrize("stage", PHASE)
def test_evaluation_without_out_of_memory_is_bitwise_lightnings(stage: str) -> None:
    recovery = OOMRecovery()
    ours, plain = Evaluated(stage, Everything(), recovery), Evaluated(stage, Everything(), None)
    assert same_bits(ours.seen, plain.seen)
    assert recovery.events == []


@pytest.mark.parametrize("stage", PHASE)
def test_a_batch_that_fits_at_the_second_try_is_bitwise_lightnings(stage: str) -> None:
    recovery = OOMRecovery()
    ours = Evaluated(stage, Everything([Fault(PHASE[stage], 1)]), recovery)
    plain = Evaluated(stage, Everything(), None)
    assert ours.model.sizes_seen[PHASE[stage]] == [8, 8, 8, 8, 6]
    assert same_bits(ours.seen, plain.seen)


@pytest.mark.parametrize("stage", PHASE)
def test_a_batch_in_microbatches_gives_what_the_batch_would(stage: str) -> None:
    """The error comes when metrics are updated and values logged."""
    recovery = OOMRecovery(split_check="skip")
    ours = Evaluated(stage, Everything([Fault(PHASE[stage], 1, passes=TWICE)]), recovery)
    plain = Evaluated(stage, Everything(), None)
    assert ours.model.sizes_seen[PHASE[stage]] == [8, 8, 8, 4, 4, 4, 4, 3, 3]
    assert differences(ours.seen, plain.seen, rtol=ROUNDING) == []
    assert [(e.stage, e.step, e.num_microbatches) for e in recovery.events] == [(stage, 1, 2)]
    assert str(recovery.events[0]).startswith(f"OOMRecovery: {stage} batch 1 ran out of memory in forward (")


def test_predictions_are_one_tensor_for_each_batch() -> None:
    ours = Evaluated("predict", Everything([Fault("predict", 1, passes=TWICE)]), OOMRecovery())
    assert [tuple(prediction.shape) for prediction in ours.gave] == [(8, 4), (8, 4), (8, 4), (6, 4)]


class Nested(Everything):
    """Predictions of several kinds."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = super().predict_step(batch, batch_idx)
        names = [f"sample {number:.3f}" for number in batch[0][:, 0].tolist()]
        return {"logits": logits, "more": (logits.argmax(1), {"half": logits[:, :2]}), "names": names}


def test_predictions_in_containers_are_put_together() -> None:
    ours = Evaluated("predict", Nested([Fault("predict", 1, passes=TWICE)]), OOMRecovery())
    plain = Evaluated("predict", Nested(), None)
    assert differences(ours.gave, plain.gave, rtol=ROUNDING) == []
    assert len(ours.gave[1]["names"]) == 8


class OfTheBatch(Everything):
    """What it predicts does not belong to samples."""

    def __init__(self, *args: Any, predicted: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(*args)
        self.predicted = predicted

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.predicted(super().predict_step(batch, batch_idx))


def test_predictions_that_cannot_be_put_together_are_refused() -> None:
    model = OfTheBatch([Fault("predict", 1, passes=TWICE)], predicted=lambda logits: f"largest is {logits.max()}")
    with pytest.raises(OOMRecoveryError, match="what predict_step returns for microbatches cannot be put together"):
        Evaluated("predict", model, OOMRecovery())


def test_a_number_of_samples_in_a_prediction_is_not_that_of_a_microbatch() -> None:
    """Each of two microbatches says 4, which is the same number but not the number of the batch."""
    ours, plain = (
        OfTheBatch(faults, predicted=lambda logits: {"logits": logits, "count": len(logits)})
        for faults in ([Fault("predict", 1, passes=TWICE)], [])
    )
    assert [one["count"] for one in Evaluated("predict", plain, None).gave] == [8, 8, 8, 6]
    assert [one["count"] for one in Evaluated("predict", ours, OOMRecovery()).gave] == [8, 8, 8, 6]


class Returns(Everything):
    """What its validation step returns goes to `on_validation_batch_end`."""

    def __init__(self, *args: Any, returned: Callable[[torch.Tensor], Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self.returned = returned
        self.outputs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.returned(super().validation_step(batch, batch_idx))

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)


def test_what_a_validation_step_returns_is_as_for_the_batch() -> None:
    faults = [Fault("validation", 1, passes=TWICE)]
    ours, plain = (
        Evaluated("validate", Returns(faults_of, returned=lambda loss: {"loss": loss}), recovery).model
        for faults_of, recovery in ((faults, OOMRecovery()), ([], None))
    )
    assert differences(ours.outputs, plain.outputs, rtol=ROUNDING) == []


def test_what_cannot_be_put_together_is_a_list_in_validation() -> None:
    faults = [Fault("validation", 1, passes=TWICE)]
    model = Evaluated("validate", Returns(faults, returned=lambda loss: "a text of its own"), OOMRecovery()).model
    assert model.outputs[0] == "a text of its own"
    assert model.outputs[1] in ("a text of its own", ["a text of its own"] * 2)


class ByLoader(Everything):
    """Several loaders: a step is given the number of its loader, and values are logged for each."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:  # type: ignore[override]
        self.log("number", float(dataloader_idx))
        self.log("sum", batch[0].sum(), reduce_fx="sum")
        self.maybe_fail("validation" if dataloader_idx == 1 else "")

    def on_validation_epoch_end(self) -> None:
        """Nothing was gathered."""

    def maybe_fail(self, phase: str) -> None:
        if phase:
            super().maybe_fail(phase)


def test_values_of_several_loaders_stay_apart() -> None:
    loaders = [loader(16), loader(8)]
    faults = [Fault("validation", 0, passes=TWICE)]
    ours = Evaluated("validate", ByLoader(faults), OOMRecovery(), loaders)
    plain = Evaluated("validate", ByLoader(), None, loaders)
    assert faults[0].num_raised == 2
    assert len(plain.gave) == 2
    assert differences(ours.seen, plain.seen, rtol=ROUNDING) == []


# Inside of training -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Run:
    """Lightning alone, with a validation after each second batch."""
    return fit(val=loader(), val_check_interval=2, accumulate_grad_batches=2, num_sanity_val_steps=1)


@pytest.fixture(scope="module")
def recovered() -> tuple[Run, OOMRecovery]:
    """In the first check, and in each validation of the first epoch in the middle of an accumulation window or not."""
    recovery = OOMRecovery()
    faults = [Fault("validation", 0, 0, passes=TWICE), Fault("validation", 2, 1, fits=2)]
    settings: dict[str, Any] = {"val_check_interval": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
    return fit(faults, recovery, val=loader(), **settings), recovery


def test_training_around_a_validation_that_ran_out_of_memory_is_bitwise_lightnings(
    plain: Run, recovered: tuple[Run, OOMRecovery]
) -> None:
    ours, recovery = recovered
    assert len(recovery.events) == 2
    assert ours.model.passes == plain.model.passes
    for key in ("weights", "optimizers", "schedulers", "counters", "hooks"):
        assert differences(ours.seen[key], plain.seen[key], ignore=["eval_"]) == [], key
    keys = ("weights", "gradients", "optimizers", "outputs", "global_step", "loops")
    for mine, theirs in zip(ours.witness.batches, plain.witness.batches, strict=True):
        for key in keys:
            assert differences(mine[key], theirs[key], ignore=["eval_", "_results"]) == [], key


def test_values_of_validation_in_training_are_those_of_lightning(
    plain: Run, recovered: tuple[Run, OOMRecovery]
) -> None:
    ours, _ = recovered
    assert differences(ours.witness.validations, plain.witness.validations, rtol=ROUNDING) == []
    assert differences(ours.seen["logged"], plain.seen["logged"], rtol=ROUNDING) == []


def test_sizes_of_stages_are_found_apart(recovered: tuple[Run, OOMRecovery]) -> None:
    _, recovery = recovered
    assert recovery.num_microbatches == 1
    sizes = {stage: plan["num_microbatches"] for stage, plan in recovery.state_dict()["plans"].items()}
    assert sizes == {"fit": 1, "validate": 4, "test": 1, "predict": 1}


def test_the_size_that_validation_found_is_in_the_checkpoint(tmp_path: Path) -> None:
    run = fit([Fault("validation", 1, 0, passes=TWICE)], OOMRecovery(split_check="skip"), val=loader(), max_epochs=1)
    run.trainer.save_checkpoint(tmp_path / "saved.ckpt")
    recovery = OOMRecovery(split_check="skip")
    model = Everything()
    trainer = make_trainer(callbacks=[recovery], max_epochs=2)
    trainer.fit(model, loader(), loader(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    # Evaluation grows back as training does, after twenty clean batches.
    assert model.sizes_seen["validation"] == [4, 4, 4, 4, 4, 4, 3, 3]
    assert {size for *_, size in model.passes} == {8, 6}


# What cannot be cured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", PHASE)
def test_one_sample_that_does_not_fit_gives_the_original_error_with_what_was_tried(stage: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        Evaluated(stage, Everything([Fault(PHASE[stage], 1, fits=0)]), OOMRecovery())
    note = notes_of(caught.value)
    assert "in 8 microbatches of at most 1 samples: out of memory in forward" in note
    assert "Batch: batch[0] (8, 6), batch[1] (8,)" in note


def test_a_validation_that_ends_the_training_leaves_an_emergency_checkpoint(tmp_path: Path) -> None:
    recovery = OOMRecovery()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit([Fault("validation", 1, 1, fits=0)], recovery, val=loader(), default_root_dir=tmp_path)
    (path,) = tmp_path.glob("out-of-memory-*.ckpt")
    assert f"saved in {path}" in notes_of(caught.value)
    assert torch.load(path, weights_only=False)["global_step"] == 8


def test_other_errors_of_evaluation_are_raised_as_they_are() -> None:
    def broken() -> Exception:
        return ValueError("no memory problem at all")

    with pytest.raises(ValueError, match="no memory problem at all") as caught:
        Evaluated("test", Everything([Fault("test", 1, error=broken)]), OOMRecovery())
    assert notes_of(caught.value) == ""


def test_afterwards_the_trainer_is_lightnings_own() -> None:
    ours = Evaluated("test", Everything([Fault("test", 1)]), OOMRecovery())
    for name in ("validation_step", "test_step", "predict_step", "training_step"):
        assert name not in vars(ours.trainer.strategy)
    with pytest.raises(torch.OutOfMemoryError):
        Evaluated("test", Everything([Fault("test", 1, fits=0)]), recovery := OOMRecovery())
    assert recovery._undo == []


class FromIterator(Everything):
    """Takes its batches itself: what was taken cannot be taken again."""

    def test_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return self.evaluate("test", batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the:UserWarning")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
def test_a_step_that_takes_batches_from_an_iterator_is_left_alone() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        Evaluated("test", FromIterator([Fault("test", 1)]), OOMRecovery())
    assert notes_of(caught.value) == ""


def test_a_test_after_training_by_the_same_trainer_recovers_too(recovered: tuple[Run, OOMRecovery]) -> None:
    run, recovery = recovered
    model, trainer = run.model, run.trainer
    clean = trainer.test(model, loader(), verbose=False)
    model.faults = [Fault("test", 0, epoch=trainer.current_epoch, passes=TWICE)]
    again = trainer.test(model, loader(), verbose=False)
    assert model.faults[0].num_raised == 2
    assert differences(again, clean, rtol=ROUNDING) == []
    assert isinstance(trainer.callbacks[0], pl.Callback)
    assert recovery.state_dict()["plans"]["test"]["num_microbatches"] == 2


def test_batches_of_a_loader_that_gives_dicts_are_split_by_their_keys() -> None:
    class Dicts(Everything):
        def unpack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return batch["inputs"], batch["labels"]

    data = DataLoader([{"inputs": torch.full((6,), i / 9), "labels": torch.tensor(i % 4)} for i in range(16)], 8)
    ours = Evaluated("test", Dicts([Fault("test", 1, passes=TWICE)]), OOMRecovery(split_check="skip"), data)
    plain = Evaluated("test", Dicts(), None, data)
    assert ours.model.sizes_seen["test"] == [8, 8, 8, 4, 4]
    assert differences(ours.seen, plain.seen, rtol=ROUNDING) == []
