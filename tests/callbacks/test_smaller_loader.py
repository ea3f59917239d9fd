"""`mode="shrink_loader"`: smaller batches after an epoch that did not fit, and the learning rate as the user said."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

from lightning_gpufeed import BatchEcho, H5DataModule, OOMRecovery
from tests.callbacks.oom_models import out_of_memory
from tests.datamodules.models import every_checkpoint, make_trainer, same_bits, state_of, write_images
from tests.doubles import KeptDict, KeptList

NUM_SAMPLES, BATCH_SIZE, LIMIT = 32, 8, 4
"""Four batches an epoch; more than 4 samples do not fit into memory."""


class Numbered(pl.LightningModule):
    """A linear classifier that writes down the samples, rate and size of every batch it is trained on."""

    def __init__(self, *, limit: int = LIMIT, make_scheduler: Callable[..., Any] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.layer = torch.nn.Linear(72, 3)
        self.limit, self.make_scheduler = limit, make_scheduler
        self.steps: list[tuple[int, int, int, float]] = KeptList()
        self.samples: dict[int, list[int]] = KeptDict()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = (batch["images"], batch["labels"]) if isinstance(batch, dict) else batch
        if len(labels) > self.limit:
            raise out_of_memory()
        return F.cross_entropy(self.layer(images.flatten(1).float() / 255), labels % 3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((self.current_epoch, batch_idx, len(labels), rate))
        self.samples.setdefault(self.current_epoch, []).extend(labels.tolist())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}

    @property
    def sizes(self) -> list[list[int]]:
        """Samples of the batches of each epoch."""
        return [[size for at, _, size, _ in self.steps if at == epoch] for epoch in sorted(self.samples)]

    @property
    def rates(self) -> list[float]:
        """Learning rate at the begin of each epoch."""
        return [next(rate for at, _, _, rate in self.steps if at == epoch) for epoch in sorted(self.samples)]


class Pictures(Dataset[Any]):
    """Sample i is always the same, its label is its number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> Any:
        pixels = torch.randint(0, 256, (9, 8), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        return pixels, number


class Plain(pl.LightningDataModule):
    """As most are written."""

    def __init__(self, batch_size: int = BATCH_SIZE) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Pictures(), batch_size=self.batch_size)


class Saved(pl.LightningDataModule):
    """With the size as a hyperparameter only."""

    def __init__(self, batch_size: int = BATCH_SIZE) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Pictures(), batch_size=self.hparams.batch_size)  # type: ignore[attr-defined]


class OwnLoader(Numbered):
    """A module that makes its loader."""

    batch_size = BATCH_SIZE

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Pictures(), batch_size=self.batch_size)


@pytest.fixture(scope="module")
def h5_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same number of samples in a file."""
    return write_images(tmp_path_factory.mktemp("data") / "train.h5", NUM_SAMPLES)


def of_file(path: Path, batch_size: int = BATCH_SIZE) -> H5DataModule:
    """Shuffled batches of the file."""
    return H5DataModule(str(path), batch_size=batch_size, seed=1, keys=["images", "labels"])


def shrinking(scale_lr: Any = "keep", **options: Any) -> OOMRecovery:
    """The callback in this mode."""
    return OOMRecovery(mode="shrink_loader", scale_lr=scale_lr, split_check="skip", **options)


def fit(
    recovery: OOMRecovery | None,
    data: Any,
    model: Numbered | None = None,
    *,
    saving: Path | None = None,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> tuple[Numbered, pl.Trainer]:
    """Train for three epochs."""
    model = Numbered() if model is None else model
    callbacks: list[Any] = [] if recovery is None else [recovery]
    callbacks += [] if saving is None else every_checkpoint(saving)[:2]
    settings = {"max_epochs": 3, "enable_checkpointing": saving is not None, **settings}
    trainer = make_trainer(callbacks=callbacks, **settings)
    resume: dict[str, Any] = {} if ckpt_path is None else {"ckpt_path": ckpt_path, "weights_only": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used to")
        warnings.filterwarnings("ignore", "You passed in a `val_dataloader` but have no `validation_step`")
        trainer.fit(model, datamodule=data, **resume)
    return model, trainer


# Size ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Plain, Saved, of_file, OwnLoader], ids=lambda make: make.__name__)
def test_the_batch_size_is_halved_from_the_next_epoch_on(make: Any, h5_path: Path) -> None:
    recovery = shrinking()
    if make is OwnLoader:
        model, _ = fit(recovery, None, OwnLoader())
    else:
        model, _ = fit(recovery, make(h5_path) if make is of_file else make())
    assert model.sizes == [[8] * 4, [4] * 8, [4] * 8]
    assert recovery.num_microbatches == 1
    assert [sorted(samples) for samples in model.samples.values()] == [list(range(NUM_SAMPLES))] * 3


def test_epochs_after_it_have_the_order_of_a_file_read_in_that_size_from_the_start(h5_path: Path) -> None:
    ours, _ = fit(shrinking(), of_file(h5_path))
    plain, _ = fit(None, of_file(h5_path, 4))
    assert ours.samples == plain.samples
    assert ours.steps[4:] == plain.steps[8:]


def test_batches_never_get_smaller_than_the_pieces_that_echoes_cut_them_into(caplog: Any) -> None:
    with caplog.at_level("INFO"):
        echo = BatchEcho(1, num_splits=3, scale_lr="keep", read_ahead=False)
        model = Numbered(limit=1)
        make_trainer(callbacks=[echo, shrinking()], max_epochs=3).fit(model, datamodule=Plain())
    assert "BatchEcho cuts each batch into 3 pieces, and it would have 2 samples" in caplog.text
    # Batches of 8, then of 4, and no smaller.
    assert [sorted(sizes[:3]) for sizes in model.sizes] == [[2, 3, 3], [1, 1, 2], [1, 1, 2]]
    assert [sum(sizes) for sizes in model.sizes] == [NUM_SAMPLES] * 3


def test_nothing_changes_as_long_as_all_fits(h5_path: Path) -> None:
    recovery = shrinking("linear")
    ours, our_trainer = fit(recovery, of_file(h5_path), Numbered(limit=8))
    plain, plain_trainer = fit(None, of_file(h5_path), Numbered(limit=8))
    assert ours.steps == plain.steps
    assert same_bits(state_of(our_trainer, ours), state_of(plain_trainer, plain))


def test_a_quarter_that_fits_is_found_at_once_and_less_later() -> None:
    model, _ = fit(shrinking(), Plain(), Numbered(limit=2))
    assert model.sizes == [[8] * 4, [2] * 16, [2] * 16]
    model = Numbered()
    changed = shrinking()

    class Grows(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.limit = [4, 3, 8][trainer.current_epoch]

    trainer = make_trainer(max_epochs=3, callbacks=[changed, Grows()])
    trainer.fit(model, datamodule=Plain())
    assert model.sizes == [[8] * 4, [4] * 8, [2] * 16]


def test_a_loader_keeps_its_other_settings_and_validation_its_size(h5_path: Path) -> None:
    class WithValidation(Plain):
        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Pictures(), batch_size=16)

    class Validated(Numbered):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated.append((self.global_step, len(batch[1])))

    validated: list[tuple[int, int]] = []
    _, trainer = fit(shrinking(), WithValidation(), Validated(), val_check_interval=0.5, max_epochs=2)
    # After half of the batches there are, four of four and then four of eight.
    assert [step for step, _ in validated] == [2, 2, 4, 4, 8, 8, 12, 12]
    assert {size for _, size in validated} == {16}
    assert trainer.num_training_batches == 8


# Learning rate ------------------------------------------------------------------------------------------------

RATIOS = {"linear": 0.5, "sqrt": math.sqrt(0.5), "keep": 1.0}


@pytest.mark.parametrize("scale_lr", RATIOS)
def test_the_learning_rate_follows_the_rule_that_was_chosen(scale_lr: str) -> None:
    model, _ = fit(shrinking(scale_lr), Plain())
    ratio = RATIOS[scale_lr]
    assert model.rates == pytest.approx([0.1, 0.1 * ratio, 0.1 * ratio], rel=1e-12)


def by_epoch(make: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A scheduler that moves at the end of an epoch."""
    return lambda optimizer: {"scheduler": make(optimizer, **options), "interval": "epoch"}


def chained(optimizer: Any) -> Any:
    """Warm-up, and then a fall."""
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2])


def both(optimizer: Any) -> Any:
    """Two at once."""
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULERS: dict[str, Callable[..., Any]] = {
    "step": by_epoch(lr_scheduler.StepLR, step_size=2, gamma=0.1),
    "exponential": by_epoch(lr_scheduler.ExponentialLR, gamma=0.5),
    "cosine": by_epoch(lr_scheduler.CosineAnnealingLR, T_max=4),
    "restarts": by_epoch(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "lambda": by_epoch(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
    "linear": by_epoch(lr_scheduler.LinearLR, start_factor=0.25, total_iters=3),
    "polynomial": by_epoch(lr_scheduler.PolynomialLR, total_iters=4, power=2.0),
    "sequential": by_epoch(chained),
    "chained": by_epoch(both),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_from_the_scaled_rate(name: str) -> None:
    """As that of a run without the callback, times the ratio."""
    scaled, _ = fit(shrinking("linear"), Plain(), Numbered(make_scheduler=SCHEDULERS[name]), max_epochs=4)
    plain, _ = fit(None, Plain(), Numbered(limit=8, make_scheduler=SCHEDULERS[name]), max_epochs=4)
    expected = [plain.rates[0], *[rate / 2 for rate in plain.rates[1:]]]
    assert scaled.rates == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps),
        lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
        lambda optimizer, steps: lr_scheduler.PolynomialLR(optimizer, total_iters=steps),
    ],
    ids=["onecycle", "cosine", "polynomial"],
)
def test_a_schedule_made_for_a_number_of_steps_keeps_the_batch_size(make: Any, caplog: Any) -> None:
    """Twice as many steps would lead it beyond its end: the cosine goes up again."""
    model = Numbered(make_scheduler=lambda optimizer: {"scheduler": make(optimizer, 12), "interval": "step"})
    with caplog.at_level("INFO"):
        fit(shrinking("linear"), Plain(), model)
    plain = Numbered(limit=8, make_scheduler=lambda optimizer: {"scheduler": make(optimizer, 12), "interval": "step"})
    fit(None, Plain(), plain)
    assert model.sizes == [[8] * 4] * 3
    assert [rate for *_, rate in model.steps] == [rate for *_, rate in plain.steps]
    assert caplog.text.count("the batch size stays, and batches are split") == 1


# Resume -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(h5_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Numbered, pl.Trainer]:
    """A run that was not interrupted, and where it was saved after each step and epoch."""
    folder = tmp_path_factory.mktemp("saved")
    scheduler = SCHEDULERS["exponential"]
    return (folder, *fit(shrinking("linear"), of_file(h5_path), Numbered(make_scheduler=scheduler), saving=folder))


@pytest.mark.parametrize("name", ["step-02", "epoch-0", "step-07", "epoch-1", "step-15"])
def test_a_resumed_run_is_the_run_that_went_on(
    saved: tuple[Path, Numbered, pl.Trainer], h5_path: Path, name: str
) -> None:
    folder, went_on, its_trainer = saved
    model = Numbered(make_scheduler=SCHEDULERS["exponential"])
    _, trainer = fit(shrinking("linear"), of_file(h5_path), model, ckpt_path=folder / f"{name}.ckpt")
    done = {"step-02": 2, "epoch-0": 4, "step-07": 7, "epoch-1": 12, "step-15": 15}[name]
    assert model.steps == went_on.steps[done:]
    assert same_bits(state_of(trainer, model), state_of(its_trainer, went_on))


def test_a_plain_datamodule_resumed_after_the_epoch_is_the_run_that_went_on(tmp_path: Path) -> None:
    went_on, its_trainer = fit(shrinking("linear"), Plain(), saving=tmp_path)
    for name, done in (("epoch-0", 4), ("epoch-1", 12)):
        model, trainer = fit(shrinking("linear"), Plain(), ckpt_path=tmp_path / f"{name}.ckpt")
        assert model.steps == went_on.steps[done:], name
        assert same_bits(state_of(trainer, model), state_of(its_trainer, went_on))


# What is refused ----------------------------------------------------------------------------------------------


def test_loaders_given_to_fit_are_refused() -> None:
    trainer = make_trainer(callbacks=[shrinking()], max_epochs=1)
    with pytest.raises(ValueError, match="mode='shrink_loader' needs a batch size that it can change"):
        trainer.fit(Numbered(), Plain().train_dataloader())


def test_a_datamodule_without_a_batch_size_is_refused() -> None:
    class Fixed(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Pictures(), batch_size=8)

    with pytest.raises(ValueError, match="that has an attribute or hyperparameter batch_size"):
        fit(shrinking(), Fixed())


def test_a_batch_size_that_the_loader_does_not_follow_is_said_and_changes_no_rate(caplog: Any) -> None:
    """A module has the attribute, but the batches come from a DataModule with one of another name."""

    class OtherName(pl.LightningDataModule):
        size = BATCH_SIZE

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Pictures(), batch_size=self.size)

    class Unused(Numbered):
        batch_size = BATCH_SIZE

    said = ""
    model = Unused()
    with caplog.at_level("INFO"):
        try:
            fit(shrinking("linear"), OtherName(), model)
        except ValueError as error:  # the other good answer
            said = str(error)
    assert "batch_size" in said or "the batch size stays" in caplog.text
    assert said or model.rates == [0.1] * 3
    assert "from the next epoch on batches have 4 samples" not in caplog.text


@pytest.mark.parametrize("scale_lr", [None, "double", 0.5])
def test_the_rule_for_the_learning_rate_has_to_be_said(scale_lr: Any) -> None:
    with pytest.raises(ValueError, match="expected 'linear', 'sqrt' or 'keep'"):
        OOMRecovery(mode="shrink_loader", scale_lr=scale_lr)


def test_the_rule_is_refused_where_the_batch_stays() -> None:
    with pytest.raises(ValueError, match="mode is 'microbatch', which keeps the batch and its learning rate"):
        OOMRecovery(scale_lr="linear")


def test_what_was_done_is_said_in_one_line(caplog: Any) -> None:
    with caplog.at_level("INFO"):
        fit(shrinking("sqrt"), Plain())
    line = "OOMRecovery: from the next epoch on batches have 4 samples in the place of 8; learning rate times 0.707."
    assert [record.message for record in caplog.records].count(line) == 1


def test_afterwards_the_loop_is_lightnings_own() -> None:
    _, trainer = fit(shrinking(), Plain(), max_epochs=2)
    assert "setup_data" not in vars(trainer.fit_loop)
