"""What `OOMRecovery` counts, remembers, says and gives up on: sizes, retries, events, and errors of others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_gpufeed.callbacks.oom_recovery import OOMRecovery
from lightning_gpufeed.errors import OOMRecoveryError
from lightning_gpufeed.recover.classify import classify
from tests.callbacks.oom_models import Everything, Fault, Run, differences, fit, loader, out_of_memory, samples
from tests.datamodules.models import make_trainer, same_bits
from tests.doubles import KeptList

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning"
)

LITTLE = {"log_everything": False}
NUM_BATCHES = 4


class Small(Everything):
    """Fails on everything larger than what fits, unless told otherwise."""

    def __init__(self, fits: Callable[[int, int], int], phase: str = "forward") -> None:
        """Note it.

        Args:
            fits: Epoch and number of the batch -> samples that fit.
            phase: Where it fails.
        """
        super().__init__(**LITTLE)
        self.fits, self.fails_in = fits, phase
        self.batch_sizes: list[list[int]] = KeptList()
        self.failures: list[int] = KeptList()

    def fault(self, phase: str) -> Fault | None:
        """Fail if it does not fit."""
        epoch, batch, num_samples = self.now
        if phase != self.fails_in or num_samples <= self.fits(epoch, batch):
            return None
        self.failures.append(batch)
        return Fault(phase, batch, epoch)

    @property
    def num_failures(self) -> int:
        """How often it has failed."""
        return len(self.failures)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Note the sizes of all passes over a batch."""
        number = self.current_epoch * NUM_BATCHES + batch_idx
        self.batch_sizes += [KeptList() for _ in range(number + 1 - len(self.batch_sizes))]
        self.batch_sizes[number].append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def run_small(fits: Callable[[int, int], int], *, max_epochs: int, phase: str = "forward", **arguments: Any) -> Run:
    """Train with recovery; without the check, whose passes would be counted."""
    recovery = OOMRecovery(**{"split_check": "skip", **arguments})
    run = fit(recovery=recovery, model=Small(fits, phase), max_epochs=max_epochs, train=loader(32))
    assert run.trainer.global_step == max_epochs * NUM_BATCHES
    run.recovery = recovery  # type: ignore[attr-defined]
    return run


# The size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_after_one_batch_that_was_too_large_the_size_of_the_user_comes_back(phase):
    run = run_small(lambda epoch, batch: 2 if (epoch, batch) == (0, 1) else 8, max_epochs=3, grow_after=2, phase=phase)
    # Whole, whole again, 2 microbatches, 4; two clean batches of 4, two of 2, then whole to the end.
    expected = [[8], [8, 8, 4, 2, 2, 2, 2], [2] * 4, [2] * 4, [4] * 2, [4] * 2, *[[8]] * 6]
    assert run.model.batch_sizes == expected
    assert run.recovery.num_microbatches == 1
    assert run.events_of(run.recovery) == [("fit", 1, phase, 3, 4)]


def test_retries_are_few_where_the_users_size_never_fits():
    run = run_small(lambda epoch, batch: 4, max_epochs=10, grow_after=1)
    # 40 batches: tried again after 1, 2, 4, 8, 16 clean ones, each trial costs one failure; two at the begin.
    assert run.model.num_failures == 2 + 5
    assert sum(event.num_retries for event in run.recovery.events) == 7
    assert all(sizes[-2:] == [4, 4] for sizes in run.model.batch_sizes)
    assert run.recovery.num_microbatches == 2


def test_without_growing_back_a_size_is_kept():
    run = run_small(lambda epoch, batch: 4 if epoch == 0 else 8, max_epochs=3, grow_after=None)
    assert run.model.num_failures == 2
    assert run.model.batch_sizes[1:] == [[4, 4]] * 11


def test_it_never_grows_above_what_the_user_asked_for():
    run = run_small(
        lambda epoch, batch: 1 if (epoch, batch) == (0, 0) else 8, max_epochs=4, grow_after=1, num_microbatches=2
    )
    assert max(size for sizes in run.model.batch_sizes for size in sizes) == 4
    assert run.model.batch_sizes[-1] == [4, 4]
    assert run.recovery.num_microbatches == 2


def test_more_microbatches_than_samples_are_one_sample_each():
    run = run_small(lambda epoch, batch: 8, max_epochs=1, num_microbatches=64, grow_after=None)
    assert run.model.batch_sizes == [[1] * 8] * 4


# Giving up ---------------------------------------------------------------------------------------------------


def give_up(tmp_path: Path, faults: list[Fault], settings: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Train until an error ends it; the error and the module."""
    model = Everything(faults, **LITTLE)
    recovery = OOMRecovery(**{"split_check": "skip", **arguments})
    try:
        fit(recovery=recovery, model=model, max_epochs=1, default_root_dir=tmp_path, **(settings or {}))
    except BaseException as error:
        return error, model, recovery
    pytest.fail("the training went through")


def numbered_errors() -> tuple[list[BaseException], Callable[[], BaseException]]:
    """A list of all errors that were made, and what makes them."""
    errors: list[BaseException] = []

    def make() -> BaseException:
        errors.append(torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(errors) + 1}.00 GiB"))
        return errors[-1]

    return errors, make


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_sample_that_does_not_fit_ends_it_with_the_first_error_and_all_that_was_tried(tmp_path, phase):
    errors, make = numbered_errors()
    error, model, _ = give_up(tmp_path, [Fault(phase, 1, fits=0, error=make)])
    assert error is errors[0]
    assert str(error) == "CUDA out of memory. Tried to allocate 1.00 GiB"
    [note] = error.__notes__
    for text in (
        f"whole: out of memory in {phase}, asked for 1 GiB",
        f"whole: out of memory in {phase}, asked for 2 GiB",
        f"in 2 microbatches of at most 4 samples: out of memory in {phase}, asked for 3 GiB",
        f"in 4 microbatches of at most 2 samples: out of memory in {phase}, asked for 4 GiB",
        f"in 8 microbatches of at most 1 samples: out of memory in {phase}, asked for 5 GiB",
        "(8, 6)",  # shapes by key
        "Memory: ",
        "It came from:",
        "oom_models.py",
    ):
        assert text in note
    assert [size for _, batch, size in model.passes if batch == 1] == [8, 8, 4, 2, 1]


@pytest.mark.parametrize(("phase", "passes"), [("forward", range(99)), ("backward", range(99)), ("clip", range(99))])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_giving_up_saves_the_training_as_it_was_before_the_batch(tmp_path, phase, passes, accumulate):
    settings = {"accumulate_grad_batches": accumulate}
    fault = Fault(phase, 1, passes=passes)
    error, _, _ = give_up(tmp_path, [fault], settings)
    [path] = tmp_path.glob("*.ckpt")
    assert str(path) in "".join(error.__notes__)
    saved = torch.load(path, weights_only=False)
    plain = fit(model=Everything(**LITTLE), max_epochs=1, limit_train_batches=1, **settings)
    before = plain.witness.batches[0] if accumulate == 1 else {"weights": Everything().state_dict()}
    if accumulate == 1:
        assert saved["global_step"] == 1
        assert same_bits(saved["optimizer_states"], before["optimizers"])
    else:
        assert saved["global_step"] == 0
    assert same_bits(dict(saved["state_dict"]), dict(before["weights"]))


def test_no_checkpoint_is_written_where_none_is_wanted(tmp_path):
    error, _, _ = give_up(tmp_path, [Fault("forward", 1, fits=0)], emergency_checkpoint=False)
    assert list(tmp_path.rglob("*.ckpt")) == []
    assert "There is no checkpoint of this training" in "".join(error.__notes__)


def test_a_batch_is_given_up_after_so_many_retries(tmp_path):
    error, model, _ = give_up(tmp_path, [Fault("forward", 1, fits=0)], max_retries=2, emergency_checkpoint=False)
    assert [size for _, batch, size in model.passes if batch == 1] == [8, 8, 4]
    assert isinstance(error, torch.OutOfMemoryError)


def test_a_batch_that_cannot_be_split_is_tried_whole_once_more_and_then_given_up_with_the_reason(tmp_path):
    class Odd:
        """Batches whose tensors have nothing in common."""

        def __iter__(self) -> Any:
            return iter([(torch.zeros(7, 6), torch.zeros(5, dtype=torch.long))])

        def __len__(self) -> int:
            return 1

    class First(Everything):
        def unpack(self, batch: Any) -> Any:
            return batch[0], torch.zeros(7, dtype=torch.long)

    model = First([Fault("forward", 0, fits=0)], **LITTLE)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(recovery=OOMRecovery(emergency_checkpoint=False), model=model, train=Odd(), max_epochs=1)
    assert len(model.passes) == 2
    assert "batch[1]" in caught.value.__notes__[0]


# Between backward and update ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["before_optimizer_step", "clip"])
def test_a_step_that_fails_twice_before_its_update_is_done_at_the_third_try(phase):
    plain = fit(options=LITTLE, max_epochs=1)
    recovery = OOMRecovery()
    ours = fit([Fault(phase, 1, passes={0, 1})], recovery, options=LITTLE, max_epochs=1)
    assert differences(ours, plain) == []
    assert ours.events_of(recovery) == [("fit", 1, "between backward and optimizer step", 2, 1)]


def test_lbfgs_that_fails_after_it_has_moved_the_weights_stops_and_says_so(tmp_path):
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    model = Everything([Fault("clip", 1, passes={1})], optimizer=make, **LITTLE)
    with pytest.raises(OOMRecoveryError, match=r"changed in part.*nothing was applied twice.*There is no checkpoint"):
        fit(recovery=OOMRecovery(), model=model, max_epochs=1, default_root_dir=tmp_path)
    assert list(tmp_path.rglob("*.ckpt")) == []
    assert max(batch for _, batch, _ in model.passes) == 1


# Errors of others --------------------------------------------------------------------------------------------

ILLEGAL = "CUDA error: an illegal memory access was encountered"
WORKER = "Caught OutOfMemoryError in DataLoader worker process 0.\nOriginal Traceback: CUDA out of memory."
PROBABLE = "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"


@pytest.mark.parametrize("phase", ["forward", "backward", "before_optimizer_step", "clip"])
@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RuntimeError(ILLEGAL), "CUDA_LAUNCH_BLOCKING"),
        (torch.OutOfMemoryError(WORKER), "num_workers"),
        (RuntimeError(PROBABLE), None),  # memory is not low
        (ValueError("CUDA out of memory is no valid name"), None),
        (KeyError("y"), None),
    ],
    ids=["illegal access", "worker", "probable", "text only", "key"],
)
def test_an_error_that_no_retry_can_cure_comes_out_as_it_is(tmp_path, error, advice, phase):
    # The same objects in each phase.
    error.__notes__ = []
    caught, model, recovery = give_up(tmp_path, [Fault(phase, 1, error=lambda: error)])
    assert caught is error
    assert caught.__traceback__ is not None
    assert [batch for _, batch, _ in model.passes] == [0, 1]
    assert recovery.events == []
    notes = "".join(error.__notes__)
    assert (advice in notes and classify(error, "cpu").advice in notes) if advice else notes == ""
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_another_error_in_a_retry_says_that_it_was_one(tmp_path):
    other = ZeroDivisionError("in microbatches only")
    faults = [Fault("forward", 1, passes={0, 1}), Fault("backward", 1, passes={0}, error=lambda: other)]
    caught, _, _ = give_up(tmp_path, faults)
    assert caught is other
    assert "done again, in 2 microbatches of at most 4 samples" in "".join(caught.__notes__)


def test_stopping_the_program_is_no_error_to_recover_from(tmp_path):
    class Stop(BaseException):
        """Such as KeyboardInterrupt, which Lightning turns into an exit."""

    caught, model, _ = give_up(tmp_path, [Fault("backward", 1, error=Stop)])
    assert isinstance(caught, Stop)
    assert len(model.passes) == 2


# What is said ------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What OOMRecovery has printed on what ran out of memory."""
    caplog.set_level(logging.INFO)
    return lambda: [
        record.message
        for record in caplog.records
        if record.message.startswith("OOMRecovery") and " out of memory" in record.message
    ]


def test_each_event_is_one_line_and_the_end_sums_up(lines):
    faults = [Fault("backward", 1), Fault("forward", 3, passes={0, 1}), Fault("clip", 1, 1)]
    recovery = OOMRecovery(split_check="skip")
    ours = fit(faults, recovery, options=LITTLE)
    *each, end = lines()
    assert len(each) == len(recovery.events) == 3
    for line, step, phase, cure in zip(
        each,
        [1, 3, 5],
        ["backward", "forward", "between backward and optimizer step"],
        ["the same again after releasing memory", "2 microbatches of at most 3 samples", "done again"],
        strict=True,
    ):
        assert line.startswith(f"OOMRecovery: step {step} ran out of memory ")
        assert phase in line
        assert "asked for 2 GiB, " in line
        assert " free); what worked: " in line
        assert cure in line.split("what worked: ")[1]
    assert end.startswith("OOMRecovery: 3 batches ran out of memory (1 in backward, 1 in forward, ")
    assert "4 retries, none lost" in end
    assert "2 microbatches a batch" in end
    # The same in numbers, in every logger.
    logged = [(step, row) for step, row in ours.logger.logged if any(name.startswith("gpufeed/") for name in row)]
    assert [step for step, _ in logged] == [1, 3, 5]
    assert [row["gpufeed/oom/fit_num_retries"] for _, row in logged] == [1.0, 2.0, 1.0]
    assert [row["gpufeed/oom/fit_num_microbatches"] for _, row in logged[:2]] == [1.0, 2.0]
    assert all(row["gpufeed/oom/fit_requested_bytes"] == 2.0**31 for _, row in logged)


def test_nothing_is_said_when_nothing_happens(lines):
    fit(recovery=OOMRecovery(), options=LITTLE, max_epochs=1)
    assert lines() == []


def test_what_happened_is_summed_up_before_an_error_too(lines, tmp_path):
    give_up(tmp_path, [Fault("forward", 0), Fault("forward", 2, error=lambda: KeyError("y"))])
    assert lines()[-1].startswith("OOMRecovery: 1 batch ran out of memory (1 in forward)")


# Beside others -----------------------------------------------------------------------------------------------


def test_the_tuner_of_batch_sizes_still_sees_what_does_not_fit(tmp_path):
    class Tunable(pl.LightningModule):
        batch_size = 2

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 4)

        def train_dataloader(self) -> Any:
            return DataLoader(samples(128), batch_size=self.batch_size)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 16:
                raise out_of_memory()
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    recovery = OOMRecovery()
    model = Tunable()
    trainer = make_trainer(callbacks=[recovery], max_epochs=1, default_root_dir=tmp_path)
    found = Tuner(trainer).scale_batch_size(model, mode="power", steps_per_trial=1, init_val=2, max_trials=8)
    assert found == 16
    assert recovery.events == []
    model.batch_size = 32
    trainer.fit(model)
    assert recovery.num_microbatches == 2
    assert trainer.global_step == 4
