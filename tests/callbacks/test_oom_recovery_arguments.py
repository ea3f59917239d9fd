"""What `OOMRecovery` refuses: wrong arguments, and trainings whose steps cannot be done again."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)

from lightning_gpufeed.callbacks.oom_recovery import OOMRecovery
from lightning_gpufeed.callbacks.trainer_step import obstacle_to_recovery
from tests.callbacks.oom_models import Everything, Fault, fit, loader
from tests.datamodules.models import make_trainer, warnings_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning"
)

WHOLE_NUMBERS = [0, -1, 1.5, True, "2", None, float("nan")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("num_microbatches", value) for value in WHOLE_NUMBERS],
        *[("max_retries", value) for value in WHOLE_NUMBERS],
        *[("grow_after", value) for value in WHOLE_NUMBERS if value is not None],
        *[("mode", value) for value in ("shrink", "Microbatch", None, 1, ["microbatch"])],
        *[("loss_reduction", value) for value in ("none", None, "Mean", 0)],
        *[("split_check", value) for value in ("error", None, True)],
        *[("scale_lr", value) for value in ("inverse", True, 1)],
        *[("weight_fn", value) for value in (3, "len", [len])],
        *[("split_fn", value) for value in (3, "len", [len])],
        *[("correct_batchnorm", value) for value in (None, 1, "yes")],
        *[("emergency_checkpoint", value) for value in (None, 1, "yes")],
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(name, value):
    with pytest.raises(ValueError, match=rf"(?s){name}.*expected"):
        OOMRecovery(**{name: value})


@pytest.mark.parametrize("value", ["linear", "sqrt", "keep"])
def test_a_rule_for_the_rate_belongs_to_smaller_batches_only(value):
    with pytest.raises(ValueError, match="keeps the batch and its learning rate"):
        OOMRecovery(scale_lr=value)
    assert OOMRecovery(mode="shrink_loader", scale_lr=value).scale_lr == value


def test_smaller_batches_need_a_rule_for_the_rate():
    with pytest.raises(ValueError, match="is for you to say"):
        OOMRecovery(mode="shrink_loader")


def test_all_arguments_are_keywords():
    with pytest.raises(TypeError):
        OOMRecovery("microbatch")  # type: ignore[misc]


# Trainings that are refused ------------------------------------------------------------------------------------


def refused(model: Any, match: str, *, train: Any = None, callbacks: Any = (), **settings: Any) -> None:
    """The training ends before its first step."""
    trainer = make_trainer(callbacks=[OOMRecovery(), *callbacks], max_epochs=1, **settings)
    with pytest.raises(ValueError, match=match):
        trainer.fit(model, train or loader())
    assert model.passes == []
    assert "optimizer_step" not in vars(trainer.strategy)


def test_manual_optimization_is_refused():
    model = Everything()
    model.automatic_optimization = False
    refused(model, r"manual optimization.*cannot be undone; expected automatic_optimization = True")


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
def test_a_step_that_takes_the_iterator_is_refused():
    class Taking(Everything):
        def training_step(self, dataloader_iter: Any) -> Any:
            return super().training_step(next(dataloader_iter)[0], 0)

    refused(Taking(), "dataloader_iter.*expected a batch")


def test_two_of_them_are_refused():
    # Lightning asks for state keys that differ before; that is refusal enough.
    trainer_error = (ValueError, RuntimeError)
    with pytest.raises(trainer_error, match="OOMRecovery"):
        make_trainer(callbacks=[OOMRecovery(), OOMRecovery()], max_epochs=1).fit(Everything(), loader())


def test_smaller_batches_are_refused_where_the_loader_is_made_already():
    trainer = make_trainer(callbacks=[OOMRecovery(mode="shrink_loader", scale_lr="keep")], max_epochs=1)
    with pytest.raises(ValueError, match="needs a batch size that it can change"):
        trainer.fit(Everything(), loader())


@pytest.mark.parametrize(
    "strategy", [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy]
)
@pytest.mark.parametrize("is_training", [True, False])
def test_a_strategy_with_steps_of_its_own_is_refused_by_name(strategy, is_training):
    # Made without __init__, which needs devices and packages that are not here.
    trainer = SimpleNamespace(strategy=object.__new__(strategy), world_size=2)
    obstacle = obstacle_to_recovery(trainer, Everything(), is_training=is_training)
    assert obstacle is not None
    assert strategy.__name__ in obstacle


def test_evaluation_of_a_module_with_manual_optimization_is_recovered():
    model = Everything([Fault("test", 0)])
    model.automatic_optimization = False
    recovery = OOMRecovery()
    make_trainer(callbacks=[recovery]).test(model, loader(), verbose=False)
    assert [event.stage for event in recovery.events] == ["test"]


# Copies, and settings that are no obstacle -----------------------------------------------------------------------


def test_a_used_callback_can_be_copied_and_pickled():
    recovery = OOMRecovery(num_microbatches=2, grow_after=3, split_check="skip")
    fit([Fault("forward", 1, passes={0, 1})], recovery, options={"log_everything": False}, max_epochs=1)
    # Lightning gives every callback the `log` of the module, and ours holds weak references.
    vars(recovery).pop("log")
    vars(recovery).pop("log_dict")
    for other in (copy.deepcopy(recovery), pickle.loads(pickle.dumps(recovery))):
        assert other.state_dict() == recovery.state_dict()
        assert other.num_microbatches == recovery.num_microbatches == 4
        fit([], other, options={"log_everything": False}, max_epochs=1)


def test_it_warns_of_nothing_in_an_ordinary_training():
    settings = {"options": {"log_everything": False}, "max_epochs": 1}
    assert warnings_of(lambda: fit([], OOMRecovery(), **settings)) == warnings_of(lambda: fit([], None, **settings))


@pytest.mark.parametrize("settings", [{"fast_dev_run": 2}, {"overfit_batches": 2}, {"barebones": True}])
def test_short_runs_are_recovered_too(settings):
    if "barebones" in settings:
        settings = {**settings, "logger": None, "enable_checkpointing": None, "enable_progress_bar": None}
        settings |= {"enable_model_summary": None, "num_sanity_val_steps": None, "log_every_n_steps": None}
    recovery = OOMRecovery()
    model = Quiet([Fault("forward", 1)])
    trainer = make_trainer(callbacks=[recovery], max_epochs=1, **settings)
    trainer.fit(model, loader())
    assert [event.step for event in recovery.events] == [1]
    assert torch.isfinite(model.first.weight).all()
    assert isinstance(trainer, pl.Trainer)


class Quiet(Everything):
    """Logs nothing: a Trainer without trimmings lets nobody."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__(faults, log_everything=False)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do not."""
