"""A resumed training is the training that was not interrupted: the same samples in the same order, the same weights.

Checkpoints are taken after every optimizer step, at every epoch's end and after every validation, so that each
kind of resume that Lightning knows is tried at each place. `reads_estimate` is a model whose
`configure_optimizers` reads `trainer.estimated_stepping_batches`, as every user of `OneCycleLR` does: Lightning
then asks for the training loader before it has restored its loops, and forgets the loader's state.
"""

from __future__ import annotations

import functools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_gpufeed import FeedError, H5ImageDataModule, H5Loader
from lightning_gpufeed.hdf5.order import WeightedShuffle
from tests.contracts import joined
from tests.datamodules.models import Recorder as Logging
from tests.datamodules.models import every_checkpoint, make_trainer, same_bits, state_of, write_images

# The runs that resume have no callbacks that would save again.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning"),
    # ... or that save elsewhere.
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]

NUM_SAMPLES, NUM_VAL, BATCH_SIZE, NUM_EPOCHS = 18, 5, 4, 2  # five steps an epoch, the last one of two samples


class Recorder(Logging):
    """Logs nothing: what is logged is compared in `test_composition.py`, and takes a quarter of the time here."""

    def log(self, *args: Any, **settings: Any) -> None:
        """Leave it out."""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_images(tmp_path / "train.h5", NUM_SAMPLES), write_images(tmp_path / "val.h5", NUM_VAL, seed=1)


class Run:
    """One training, interrupted nowhere, with all its checkpoints."""

    def __init__(self, files: tuple[Path, Path], folder: Path, model: Recorder, data: dict[str, Any], **settings: Any):
        self.files, self.settings, self.data = files, {"max_epochs": NUM_EPOCHS, **settings}, data
        self.model = model
        self.trainer = make_trainer(enable_checkpointing=True, callbacks=every_checkpoint(folder), **self.settings)
        self.trainer.fit(model, H5ImageDataModule(files[0], val=files[1], **{"batch_size": BATCH_SIZE, **data}))
        self.checkpoints = sorted(folder.iterdir())

    def resume(self, checkpoint: Path, model: Recorder, data: dict[str, Any] | None = None, **settings: Any) -> Any:
        """Go on from a checkpoint with new objects, as a new process would."""
        trainer = make_trainer(**{**self.settings, **settings})
        data = {"batch_size": BATCH_SIZE, **self.data, **(data or {})}
        trainer.fit(model, H5ImageDataModule(self.files[0], val=self.files[1], **data), ckpt_path=checkpoint)
        return trainer

    @staticmethod
    @functools.cache
    def position(checkpoint: Path) -> tuple[int, int]:
        """Epoch and samples of it used before the checkpoint."""
        state = torch.load(checkpoint, weights_only=True)["H5ImageDataModule"]["train"]
        return state["epoch"], state["samples_consumed"]

    def remaining(self, checkpoint: Path, epoch: int) -> list[int]:
        """What is left of an epoch."""
        at, consumed = self.position(checkpoint)
        return self.model.trained_by_epoch[epoch][consumed if epoch == at else 0 : None if epoch >= at else 0]


def kinds(checkpoints: list[Path]) -> list[str]:
    return sorted({checkpoint.name.partition("-")[0] for checkpoint in checkpoints})


@pytest.mark.parametrize("reads_estimate", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"val_check_interval": 2},
        {"val_check_interval": 0.5, "num_sanity_val_steps": 1},
        {"accumulate_grad_batches": 2},
        {"limit_train_batches": 3},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()) or "default",
)
def test_resuming_at_any_checkpoint_equals_no_interruption(tmp_path, files, settings, reads_estimate):
    full = Run(files, tmp_path / "saved", Recorder(reads_estimate=reads_estimate), {}, **settings)
    assert kinds(full.checkpoints) == ["epoch", "step", "val"]
    expected = state_of(full.trainer, full.model)
    wrong = []
    for checkpoint in full.checkpoints:
        model = Recorder(reads_estimate=reads_estimate)
        trainer = full.resume(checkpoint, model)
        epoch, consumed = full.position(checkpoint)
        remaining = [(at, batch) for at, batch in full.model.trained if at >= epoch]
        while consumed > 0:
            consumed -= len(remaining.pop(0)[1])
        if model.trained != remaining:
            wrong.append(f"{checkpoint.name}: trained on {model.trained} instead of {remaining}")
        elif not same_bits(state_of(trainer, model), expected):
            wrong.append(f"{checkpoint.name}: same samples, other weights, optimizer state or counters")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("reads_estimate", [False, True])
def test_a_training_counted_in_steps_resumes_exactly_at_every_step(tmp_path, files, reads_estimate):
    full = Run(files, tmp_path / "saved", Recorder(reads_estimate=reads_estimate), {}, max_epochs=1000, max_steps=8)
    wrong = []
    # Left out: a checkpoint of an epoch's end. With `max_steps` Lightning 2.6 does not count that epoch as over when it
    # resumes and runs an empty one, over any loader.
    for checkpoint in sorted((tmp_path / "saved").glob("step-*")):
        model = Recorder(reads_estimate=reads_estimate)
        trainer = full.resume(checkpoint, model)
        step = int(checkpoint.stem.removeprefix("step-"))
        if [batch for _, batch in model.trained] != [batch for _, batch in full.model.trained[step:]]:
            wrong.append(f"{checkpoint.name}: trained on {model.trained} instead of {full.model.trained[step:]}")
        ours, expected = state_of(trainer, model), state_of(full.trainer, full.model)
        # Nor does it count the last, unfinished epoch the same way when there is nothing left to do.
        ours.pop("epoch"), expected.pop("epoch")
        if not same_bits(ours, expected):
            wrong.append(f"{checkpoint.name}: other weights, optimizer state or steps")
    assert not wrong, "\n".join(wrong)


def test_resuming_with_a_one_cycle_schedule_equals_no_interruption(tmp_path, files):
    full = Run(files, tmp_path / "saved", Recorder(schedule=True), {})
    expected = state_of(full.trainer, full.model)
    ends = {}
    for checkpoint in full.checkpoints:
        model = Recorder(schedule=True)
        ends[checkpoint.name] = same_bits(state_of(full.resume(checkpoint, model), model), expected)
    assert ends == dict.fromkeys(ends, True)
    assert len(ends) == 10 + 2 + 2


@pytest.mark.parametrize("reads_estimate", [False, True])
def test_draws_by_weight_go_on_where_they_were_at_any_checkpoint(tmp_path, files, reads_estimate):
    # 14 draws: four steps, the last of two.
    data = {"sample_weights": [number % 5 for number in range(NUM_SAMPLES)], "samples_per_epoch": 14, "seed": 3}
    full = Run(files, tmp_path / "saved", Recorder(reads_estimate=reads_estimate), data)
    shuffle = WeightedShuffle(data["sample_weights"])
    for epoch in range(NUM_EPOCHS):
        assert full.model.trained_by_epoch[epoch] == shuffle.permutation(14, 3, epoch).tolist()
    expected = state_of(full.trainer, full.model)
    wrong = []
    for number, checkpoint in enumerate(full.checkpoints):
        batch_size = (BATCH_SIZE, 3)[number % 2]
        model = Recorder(reads_estimate=reads_estimate)
        trainer = full.resume(checkpoint, model, {"batch_size": batch_size})
        trained = [model.trained_by_epoch.get(epoch, []) for epoch in range(NUM_EPOCHS)]
        if trained != [full.remaining(checkpoint, epoch) for epoch in range(NUM_EPOCHS)]:
            wrong.append(f"{checkpoint.name} with {batch_size}: trained on {trained}")
        elif batch_size == BATCH_SIZE and not same_bits(state_of(trainer, model), expected):
            wrong.append(f"{checkpoint.name}: same samples, other weights, optimizer state or counters")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "other",
    [{}, {"sample_weights": [1.0] * NUM_SAMPLES}, {"sample_weights": "balanced", "samples_per_epoch": 9}],
    ids=["none", "others", "an epoch of another length"],
)
def test_a_checkpoint_of_draws_by_other_weights_is_refused(tmp_path, files, other):
    weights = {"sample_weights": [1.0] * (NUM_SAMPLES - 1) + [2.0]}
    full = Run(files, tmp_path / "saved", Recorder(), weights)
    trainer = make_trainer(max_epochs=NUM_EPOCHS)
    datamodule = H5ImageDataModule(files[0], val=files[1], batch_size=BATCH_SIZE, **other)
    with pytest.raises(FeedError, match=r"the draws cannot be continued with others\. Use the same"):
        trainer.fit(Recorder(), datamodule, ckpt_path=full.checkpoints[0])


def test_a_checkpoint_of_another_fold_is_refused(tmp_path, files):
    def trained(fold: int, **settings: Any) -> Recorder:
        datamodule = H5ImageDataModule(files[0], num_folds=3, fold=fold, batch_size=BATCH_SIZE)
        trainer, model = make_trainer(max_epochs=NUM_EPOCHS, **settings.pop("trainer", {})), Recorder()
        trainer.fit(model, datamodule, **settings)
        return model

    folder = tmp_path / "saved"
    full = trained(1, trainer={"enable_checkpointing": True, "callbacks": every_checkpoint(folder)})
    again = trained(1, ckpt_path=folder / "step-02.ckpt")
    assert again.trained == full.trained[2:]
    assert set(again.samples("validate")).isdisjoint(joined(batch for _, batch in again.trained))
    with pytest.raises(FeedError, match=r"order cannot be continued over other data\. Use the same"):
        trained(2, ckpt_path=folder / "step-02.ckpt")


# That a checkpoint of any kind is found with and without `reads_estimate` is held above; here are other sizes.
@pytest.mark.parametrize(("batch_size", "reads_estimate"), [(1, True), (8, False), (8, True), (30, False)])
def test_another_batch_size_sees_exactly_the_remaining_samples_and_then_full_epochs(
    tmp_path, files, batch_size, reads_estimate
):
    full = Run(files, tmp_path / "saved", Recorder(reads_estimate=reads_estimate), {}, max_epochs=3)
    wrong = []
    for checkpoint in full.checkpoints:
        model = Recorder(reads_estimate=reads_estimate)
        if batch_size > NUM_SAMPLES:
            with pytest.warns(UserWarning, match="every epoch is one smaller batch"):
                full.resume(checkpoint, model, {"batch_size": batch_size, "eval_batch_size": BATCH_SIZE})
        else:
            full.resume(checkpoint, model, {"batch_size": batch_size, "eval_batch_size": BATCH_SIZE})
        for epoch in range(3):
            trained, remaining = model.trained_by_epoch.get(epoch, []), full.remaining(checkpoint, epoch)
            if trained != remaining:
                wrong.append(f"{checkpoint.name}: epoch {epoch} trained on {trained} instead of {remaining}")
            # An epoch that goes on for at least one step is validated once, at its end.
            elif remaining and _num_validations(model, epoch) != 1:
                wrong.append(f"{checkpoint.name}: epoch {epoch} validated {_num_validations(model, epoch)} times")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("first", "reads_estimate"), [("step-02", True), ("step-07", False), ("step-07", True), ("epoch-0", True)]
)
def test_resuming_again_and_again_with_other_sizes_sees_every_sample_of_every_epoch_once(
    tmp_path, files, first, reads_estimate
):
    # The first link is never a checkpoint of an epoch's last step: after resuming from one, Lightning 2.6 counts one
    # epoch too few in the checkpoints that it writes then, over any loader.
    full = Run(files, tmp_path / "saved", Recorder(reads_estimate=reads_estimate), {}, max_epochs=3)
    wrong = []
    # 3 divides the 18 samples of an epoch and not the 10 that are left after step 2 or 7; with 5 it is the other way.
    for size in (3, 5):
        folder = tmp_path / f"again_{size}"
        data = {"batch_size": size, "eval_batch_size": BATCH_SIZE}
        full.resume(
            tmp_path / "saved" / f"{first}.ckpt",
            Recorder(reads_estimate=reads_estimate),
            data,
            enable_checkpointing=True,
            callbacks=every_checkpoint(folder),
        )
        for checkpoint in sorted(folder.iterdir()):
            for last_size in (size, BATCH_SIZE):
                model = Recorder(reads_estimate=reads_estimate)
                full.resume(checkpoint, model, {**data, "batch_size": last_size})
                for epoch in range(3):
                    trained, remaining = model.trained_by_epoch.get(epoch, []), full.remaining(checkpoint, epoch)
                    where = f"{first}, then {size}, then {checkpoint.name} with {last_size}: epoch {epoch}"
                    if trained != remaining:
                        wrong.append(f"{where} trained on {trained} instead of {remaining}")
                    elif remaining and _num_validations(model, epoch) != 1:
                        wrong.append(f"{where} validated {_num_validations(model, epoch)} times")
    assert not wrong, "\n".join(wrong)


def _num_validations(model: Recorder, epoch: int) -> float:
    """How often the whole validation file was evaluated while an epoch was the current one."""
    samples = [sample for at, batch in model.validated_in if at == epoch for sample in batch]
    return len(samples) / NUM_VAL


@pytest.mark.parametrize("asked", [0, 2])
def test_the_trainers_own_reload_setting_is_as_the_user_left_it(tmp_path, files, asked):
    settings = {"reload_dataloaders_every_n_epochs": asked, "max_epochs": 3}
    full = Run(files, tmp_path / "saved", Recorder(), {}, **settings)
    for name in ("step-02", "step-05", "step-07"):
        checkpoint = tmp_path / "saved" / f"{name}.ckpt"
        model = Recorder()
        trainer = full.resume(checkpoint, model, {"batch_size": 2})
        assert trainer.reload_dataloaders_every_n_epochs == asked
        assert model.trained_by_epoch.get(2) == full.remaining(checkpoint, 2)


def test_a_datamodule_resumed_once_does_not_change_the_next_trainers_reload_setting(tmp_path, files):
    full = Run(files, tmp_path / "saved", Recorder(), {}, max_epochs=1)
    datamodule = H5ImageDataModule(files[0], batch_size=9)
    make_trainer(max_epochs=1, limit_val_batches=0).fit(
        Recorder(), datamodule, ckpt_path=tmp_path / "saved" / "step-01.ckpt"
    )
    trainer = make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=2, limit_val_batches=0)
    model = Recorder()
    trainer.fit(model, datamodule)
    assert trainer.reload_dataloaders_every_n_epochs == 2
    assert [sorted(samples) for samples in model.trained_by_epoch.values()] == [list(range(NUM_SAMPLES))] * 3
    assert full.model.trained_by_epoch[0] == model.trained_by_epoch[0]


@pytest.mark.parametrize("settings", [{}, {"reload_dataloaders_every_n_epochs": 1}], ids=["default", "reload"])
@pytest.mark.parametrize("batch_size", [BATCH_SIZE, 3])
def test_the_order_of_the_saved_run_goes_on_when_the_datamodule_has_another_seed_now(
    tmp_path, files, batch_size, settings
):
    full = Run(files, tmp_path / "saved", Recorder(), {"seed": 3}, max_epochs=3, **settings)
    checkpoint = tmp_path / "saved" / "step-02.ckpt"
    model = Recorder()
    full.resume(checkpoint, model, {"seed": 4, "batch_size": batch_size})
    assert model.trained_by_epoch == {epoch: full.remaining(checkpoint, epoch) for epoch in range(3)}


class Interrupted(Recorder):
    """Fails in one step, before or after the optimizer had its turn."""

    def __init__(self, at: tuple[int, int], **settings: Any) -> None:
        """Note the epoch and the batch."""
        super().__init__(**settings)
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Train, or fail."""
        if (self.current_epoch, batch_idx) == self.at:
            raise RuntimeError("interrupted on purpose")
        return super().training_step(batch, batch_idx)


# With OnExceptionCheckpoint Lightning looks for an earlier one, and says so.
@pytest.mark.filterwarnings(r"ignore:`.fit\(ckpt_path=None\)` was called without a model:UserWarning")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
@pytest.mark.parametrize("reads_estimate", [False, True])
@pytest.mark.parametrize("batch_size", [BATCH_SIZE, 2])
@pytest.mark.parametrize("at", [(0, 0), (0, 4), (1, 3)])
def test_a_checkpoint_written_in_the_middle_of_a_step_resumes_with_that_step(
    tmp_path, files, at, batch_size, reads_estimate
):
    # As `OnExceptionCheckpoint` does, and SLURM's signal: the batch has been handed out but not been trained on.
    full = Run(files, tmp_path / "saved", Recorder(reads_estimate=reads_estimate), {})
    before = Interrupted(at, reads_estimate=reads_estimate)
    trainer = make_trainer(
        max_epochs=NUM_EPOCHS, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(tmp_path / "failed")]
    )
    with pytest.raises(RuntimeError, match="interrupted on purpose"):
        trainer.fit(before, H5ImageDataModule(files[0], val=files[1], batch_size=BATCH_SIZE))
    [checkpoint] = (tmp_path / "failed").iterdir()
    after = Recorder(reads_estimate=reads_estimate)
    trainer = full.resume(checkpoint, after, {"batch_size": batch_size, "eval_batch_size": BATCH_SIZE})
    together = [sample for model in (before, after) for _, batch in model.trained for sample in batch]
    assert together == full.model.trained_by_epoch[0] + full.model.trained_by_epoch[1]
    assert [_num_validations(after, epoch) for epoch in range(NUM_EPOCHS)] == [float(at[0] == 0), 1.0]
    if batch_size == BATCH_SIZE:
        assert same_bits(state_of(trainer, after), state_of(full.trainer, full.model))


def test_more_epochs_can_be_added_at_every_checkpoint(tmp_path, files):
    longer = Run(files, tmp_path / "longer", Recorder(), {}, max_epochs=4)
    shorter = Run(files, tmp_path / "shorter", Recorder(), {}, max_epochs=2)
    expected = state_of(longer.trainer, longer.model)
    ends = {}
    for checkpoint in shorter.checkpoints:
        model = Recorder()
        ends[checkpoint.name] = same_bits(state_of(shorter.resume(checkpoint, model, max_epochs=4), model), expected)
    assert ends == dict.fromkeys(ends, True)


@pytest.mark.parametrize("shuffle", ["window:5", None])
def test_other_orders_resume_exactly_too(tmp_path, files, shuffle):
    full = Run(files, tmp_path / "saved", Recorder(), {"shuffle": shuffle, "drop_last": True})
    assert [len(samples) for samples in full.model.trained_by_epoch.values()] == [16, 16]
    expected = state_of(full.trainer, full.model)
    ends = {}
    for checkpoint in full.checkpoints:
        model = Recorder()
        ends[checkpoint.name] = same_bits(state_of(full.resume(checkpoint, model), model), expected)
    assert ends == dict.fromkeys(ends, True)


def test_fitting_twice_with_one_trainer_and_one_datamodule_equals_fitting_once(tmp_path, files):
    full = Run(files, tmp_path / "saved", Recorder(), {}, max_epochs=3)
    model, trainer = Recorder(), make_trainer(max_epochs=1)
    datamodule = H5ImageDataModule(files[0], val=files[1], batch_size=BATCH_SIZE)
    trainer.fit(model, datamodule)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule)
    assert model.trained == full.model.trained
    assert model.evaluated == full.model.evaluated


def test_a_new_trainer_on_a_used_datamodule_starts_from_the_beginning(tmp_path, files):
    full = Run(files, tmp_path / "saved", Recorder(), {})
    datamodule = H5ImageDataModule(files[0], val=files[1], batch_size=BATCH_SIZE)
    make_trainer(max_steps=3).fit(Recorder(), datamodule)
    model = Recorder()
    make_trainer(max_epochs=NUM_EPOCHS).fit(model, datamodule)
    assert model.trained == full.model.trained


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluating_a_checkpoint_does_not_move_the_next_training(tmp_path, files, stage):
    full = Run(files, tmp_path / "saved", Recorder(), {})
    datamodule = H5ImageDataModule(files[0], val=files[1], test=files[1], batch_size=BATCH_SIZE)
    evaluate = getattr(make_trainer(), stage)
    evaluate(Recorder(), datamodule=datamodule, ckpt_path=tmp_path / "saved" / "step-02.ckpt")
    model = Recorder()
    make_trainer(max_epochs=NUM_EPOCHS).fit(model, datamodule)
    assert model.trained == full.model.trained


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_checkpoint_of_other_training_data_can_be_evaluated(tmp_path, files, has_trained):
    Run(files, tmp_path / "saved", Recorder(), {})
    other = write_images(tmp_path / "other.h5", NUM_SAMPLES, seed=9)
    datamodule = H5ImageDataModule(other, test=files[1], batch_size=BATCH_SIZE)
    if has_trained:
        make_trainer(max_epochs=1, limit_val_batches=0).fit(Recorder(), datamodule)
    model = Recorder()
    make_trainer().test(model, datamodule, ckpt_path=tmp_path / "saved" / "step-02.ckpt", verbose=False)
    assert model.samples("test") == list(range(NUM_VAL))


def test_resuming_on_other_data_is_refused(tmp_path, files):
    full = Run(files, tmp_path / "saved", Recorder(), {})
    state = torch.load(tmp_path / "saved" / "step-02.ckpt", weights_only=True)["H5ImageDataModule"]["train"]
    write_images(tmp_path / "train.h5", NUM_SAMPLES + 1, seed=9)
    with H5Loader(tmp_path / "train.h5", 4, keys={"image": "images", "label": "labels"}) as loader:
        digest = loader.state_dict()["digest"]
    with pytest.raises(FeedError) as caught:
        full.resume(tmp_path / "saved" / "step-02.ckpt", Recorder())
    assert str(caught.value) == (
        f"the position was saved over {NUM_SAMPLES} samples (digest {state['digest']}), but {tmp_path}/train.h5 gives "
        f"{NUM_SAMPLES + 1} (digest {digest}): the order cannot be continued over other data. Use the "
        f"same files and split, or start without the loader's state."
    )


def test_resuming_on_a_copy_with_other_chunks_is_exact(tmp_path, files):
    import h5py

    full = Run(files, tmp_path / "saved", Recorder(), {})
    with h5py.File(files[0]) as source, h5py.File(tmp_path / "copy.h5", "w") as copy:
        copy.create_dataset("images", data=source["images"][...])  # contiguous
        copy["labels"] = source["labels"][...]
    model = Recorder()
    full.files = (tmp_path / "copy.h5", files[1])
    trainer = full.resume(tmp_path / "saved" / "step-03.ckpt", model)
    assert same_bits(state_of(trainer, model), state_of(full.trainer, full.model))


def test_the_saved_position_is_plain_numbers_and_strings(tmp_path, files):
    Run(files, tmp_path / "saved", Recorder(), {})
    checkpoint = torch.load(tmp_path / "saved" / "step-07.ckpt", weights_only=True)
    state = checkpoint["H5ImageDataModule"]["train"]
    assert {name: type(value) for name, value in state.items()} == {
        "version": int,
        "digest": str,
        "num_samples": int,
        "seed": int,
        "shuffle": str,
        "epoch": int,
        "samples_consumed": int,
        "steps_done": int,
        "step_samples": int,
    }
    assert (state["epoch"], state["samples_consumed"], state["steps_done"]) == (1, 8, 2)
    assert len(pickle.dumps(state)) < 300  # whatever the size of the data


def test_a_state_of_another_kind_is_refused(files):
    with H5Loader(files[0], BATCH_SIZE) as loader, pytest.raises(ValueError, match=r"^the loader state has") as caught:
        loader.load_state_dict({"version": 99})
    assert str(caught.value) == ("the loader state has version 99; expected 1. Was it saved by another loader?")


def test_a_loader_given_to_the_trainer_resumes_by_lightnings_own_means(tmp_path, files):
    class Dicts(Recorder):
        validation_step = None  # type: ignore[assignment]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step((batch["images"].float(), batch["labels"]), batch_idx)

    settings: dict[str, Any] = {"max_epochs": NUM_EPOCHS}
    full = Dicts()
    trainer = make_trainer(enable_checkpointing=True, callbacks=every_checkpoint(tmp_path / "saved"), **settings)
    with H5Loader(files[0], BATCH_SIZE) as loader:
        trainer.fit(full, loader)
    for step in range(1, 10):
        model = Dicts()
        with H5Loader(files[0], BATCH_SIZE) as loader:
            make_trainer(**settings).fit(model, loader, ckpt_path=tmp_path / "saved" / f"step-{step:02d}.ckpt")
        assert model.trained == full.trained[step:], f"resumed after step {step}"
        assert same_bits(model.layer.weight, full.layer.weight)


def test_lightning_sees_that_the_loader_can_be_resumed(tmp_path, files, recwarn):
    # It warns where a loader cannot.
    full = Run(files, tmp_path / "saved", Recorder(), {})
    full.resume(tmp_path / "saved" / "step-03.ckpt", Recorder())
    assert [str(w.message) for w in recwarn if re.search("not resumable", str(w.message))] == []
