"""A process that really runs out of memory. Started by test_oom_recovery_real.py, with a folder and names of scenarios.

    python oom_worker.py FOLDER [SCENARIO ...]

Each scenario is a function here; what it gives is written to FOLDER/seen.json, checkpoints are in FOLDER/<name>/. An
error that a scenario does not expect is a result like any other: {"failed": its traceback}.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback

from lightning_gpufeed import OOMRecovery
from lightning_gpufeed.errors import OOMRecoveryError
from tests.callbacks.hungry_models import (
    BATCH_SIZE,
    NUM_BATCHES,
    NUM_EPOCHS,
    OPTIMIZERS,
    Hungry,
    Weighty,
    batches,
    keep_blocks_apart,
    lift_ceiling,
)
from tests.datamodules.models import MemoryLogger, every_checkpoint, make_trainer, same_bits, state_of


class Rows(Callback):
    """What can be seen after each step and each epoch."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def note(self, trainer: pl.Trainer, name: str, *more: Any) -> None:
        """One row."""
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        metrics = {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}
        self.rows.append([name, trainer.current_epoch, trainer.global_step, rate, *more, metrics])

    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(trainer, "step", batch_idx, len(batch[0]), float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, _: Any) -> None:
        self.note(trainer, "epoch")


def train(folder: Path, model: pl.LightningModule, recovery: OOMRecovery | None = None, **settings: Any) -> Any:
    """Train under a real Trainer; gives all that is compared, and the Trainer."""
    rows, logger = Rows(), MemoryLogger()
    resume = settings.pop("ckpt_path", None)
    loader = settings.pop("loader", None) or batches()
    settings.setdefault("max_epochs", NUM_EPOCHS)
    saving = every_checkpoint(folder)[: settings.pop("num_saving", 2)]
    callbacks = [rows, *saving, *([] if recovery is None else [recovery]), *settings.pop("callbacks", [])]
    trainer = make_trainer(
        logger=logger, callbacks=callbacks, enable_checkpointing=bool(saving), default_root_dir=folder, **settings
    )
    try:
        trainer.fit(model, loader, ckpt_path=resume, **({"weights_only": False} if resume else {}))
    finally:
        lift_ceiling()
    trainer.save_checkpoint(folder / "final.ckpt")
    seen: dict[str, Any] = {"rows": rows.rows, "progress": progress_of(trainer)}
    if isinstance(model, Hungry):
        seen |= {"attempts": model.attempts, "alive": model.alive, "sizes": model.sizes}
    if recovery is not None:
        seen |= {"found": recovery.num_microbatches, "events": [str(event) for event in recovery.events]}
        seen["logged"] = sorted({key for _, metrics in logger.logged for key in metrics if key.startswith("gpufeed")})
    return seen, trainer


def progress_of(trainer: pl.Trainer) -> Any:
    """All counters of the training."""
    loop = trainer.fit_loop
    optimizing = loop.epoch_loop.automatic_optimization.optim_progress
    parts = (loop.epoch_progress, loop.epoch_loop.batch_progress, loop.epoch_loop.scheduler_progress, optimizing)
    return [part.state_dict() for part in parts]


# Training in less memory ------------------------------------------------------------------------------------

FORWARD_MIB, BACKWARD_MIB = 6.5, 14.0
"""A whole batch needs 12 MiB for what forward keeps and 4 more in backward."""
FORWARD_STEP, BACKWARD_STEP = 2, 5


def plain(folder: Path) -> Any:
    return train(folder, Hungry())[0]


def forward_runs_out(folder: Path) -> Any:
    return train(folder, Hungry({("fit", FORWARD_STEP): FORWARD_MIB}), OOMRecovery(grow_after=None))[0]


def backward_runs_out(folder: Path) -> Any:
    return train(folder, Hungry({("fit", BACKWARD_STEP): BACKWARD_MIB}), OOMRecovery(grow_after=None))[0]


def first_step_runs_out(folder: Path) -> Any:
    return train(folder, Hungry({("fit", 0): BACKWARD_MIB}), OOMRecovery(grow_after=None))[0]


def every_step_runs_out(folder: Path) -> Any:
    """It tries to grow back, and cannot."""
    ceilings = {("fit", step): FORWARD_MIB for step in range(NUM_BATCHES * NUM_EPOCHS)}
    return train(folder, Hungry(ceilings), OOMRecovery(grow_after=2))[0]


def two_from_the_start(folder: Path) -> Any:
    return train(folder, Hungry(), OOMRecovery(num_microbatches=2, grow_after=None))[0]


def four_from_the_start(folder: Path) -> Any:
    return train(folder, Hungry(), OOMRecovery(num_microbatches=4, grow_after=None))[0]


def window_plain(folder: Path) -> Any:
    return train(folder, Hungry(), accumulate_grad_batches=2)[0]


def window_backward_runs_out(folder: Path) -> Any:
    """The second batch of an accumulation window; without the check, which puts everything back once more."""
    model = Hungry({("fit", BACKWARD_STEP): BACKWARD_MIB})
    return train(folder, model, OOMRecovery(split_check="skip"), accumulate_grad_batches=2)[0]


def released(folder: Path) -> Any:
    """Everything in one heap, errors that hold others: the least favourable case for giving memory back."""
    keep_blocks_apart(False)
    # In the first step, while the heap has no holes that could be filled under any limit.
    model = Hungry({("fit", 0): 4 * FORWARD_MIB}, spread=4096)
    model.wraps_errors = True
    return train(folder, model, OOMRecovery(grow_after=1), max_epochs=1, num_saving=0)[0]


def one_sample_too_many(folder: Path) -> Any:
    """No sample fits: 2 MiB for each activation of each."""
    model = Hungry({("fit", 1): FORWARD_MIB}, spread=32 * 1024)
    settings: dict[str, Any] = {"loader": batches(2, 4), "max_epochs": 1, "num_saving": 0}
    try:
        train(folder, model, OOMRecovery(), callbacks=[BeforeSteps(folder)], **settings)
    except Exception as error:
        chain = [type(one).__name__ for one in (error, error.__cause__, error.__context__)]
        return {"chain": chain, "text": str(error), "notes": error.__notes__, "attempts": model.attempts}
    return {}


def errors_that_are_held(folder: Path) -> Any:
    """What is seen if memory is not let go of, so that it is known that it would be seen."""
    model = Hungry({("fit", 0): FORWARD_MIB})
    held = []
    x = torch.zeros(BATCH_SIZE, 8, dtype=torch.float64)
    for _ in range(2):
        model.begin("fit", 0, len(x))
        try:
            model(x)
        except RuntimeError as error:
            held.append(error)
    lift_ceiling()
    return {"alive": model.alive, "sizes": model.sizes, "texts": list(map(str, held))}


# Evaluation -------------------------------------------------------------------------------------------------


def evaluated(folder: Path, ceiling_mib: float | None) -> Any:
    """Validation inside of training, then test and predict, with the second batch of each short of memory."""
    stages = ("validate", "test", "predict")
    model = Hungry({} if ceiling_mib is None else {(stage, 1): ceiling_mib for stage in stages})
    recovery = OOMRecovery()
    loader = batches(2)
    trainer = make_trainer(callbacks=[] if ceiling_mib is None else [recovery], max_epochs=2)
    found: dict[str, Any] = {}
    try:
        trainer.fit(model, batches(2), loader)
        state = state_of(trainer, model)
        found["fit"] = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found["test"] = trainer.test(model, loader, verbose=False)
        predictions = trainer.predict(model, loader)
    finally:
        lift_ceiling()
    torch.save({"state": state, "predictions": predictions}, folder / "seen.pt")
    sizes = {stage: plan["num_microbatches"] for stage, plan in recovery.state_dict()["plans"].items()}
    return found | {"attempts": model.attempts, "sizes": sizes, "events": [str(event) for event in recovery.events]}


def evaluation_plain(folder: Path) -> Any:
    return evaluated(folder, None)


def evaluation_runs_out(folder: Path) -> Any:
    return evaluated(folder, 3.0)


# The optimizer step -----------------------------------------------------------------------------------------


UPDATE_CASES = [
    *[("loop", step, headroom) for step in (0, 2) for headroom in (1, 2, 4, 6, 12)],
    *[("foreach", step, headroom) for step in (0, 2) for headroom in (1, 4, 12)],
    *[("own", step, headroom) for step in (0, 2) for headroom in (1, 3)],
]


def update(folder: Path, name: str, step: int, headroom: float, plain_folder: Path) -> Any:
    """Train with an update that runs short; if that ends the training, go on from what was saved."""
    recovery = OOMRecovery()
    settings: dict[str, Any] = {"loader": batches(2, 4), "num_saving": 0}
    make = OPTIMIZERS[name]
    try:
        seen, _ = train(folder, Weighty(make, step, headroom), recovery, **settings)
    except OOMRecoveryError as error:
        paths = sorted(folder.glob("out-of-memory-*.ckpt"))
        seen = {"error": str(error), "cause": str(error.__cause__), "paths": [str(path) for path in paths]}
        if paths:
            before = torch.load(paths[0], weights_only=False)
            expected = torch.load(plain_folder / f"before-{step}.ckpt", weights_only=False)
            for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
                seen[f"is_same_{key}"] = same_bits(before[key], expected[key])
            seen |= train(folder, Weighty(make), OOMRecovery(), ckpt_path=paths[0], **settings)[0]
    except Exception:
        return {"failed": traceback.format_exc()}
    final, expected = (torch.load(one / "final.ckpt", weights_only=False) for one in (folder, plain_folder))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        seen[f"is_same_final_{key}"] = same_bits(final[key], expected[key])
    return seen


class BeforeSteps(Callback):
    """Saves before each batch, as an emergency checkpoint is to be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"before-{trainer.global_step}.ckpt")


def updates(folder: Path) -> Any:
    """All cases, next to a training that never ran short."""
    seen: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        (folder / name).mkdir()
        saving = BeforeSteps(folder / name)
        train(folder / name, Weighty(make), loader=batches(2, 4), num_saving=0, callbacks=[saving])
    for name, step, headroom in UPDATE_CASES:
        case = f"{name}-{step}-{headroom}"
        (folder / case).mkdir()
        seen[case] = update(folder / case, name, step, headroom, folder / name)
    return seen


SCENARIOS = (
    released,  # in a process of its own: its heap would have holes for all that follow
    *(plain, forward_runs_out, backward_runs_out, first_step_runs_out, every_step_runs_out),
    *(two_from_the_start, four_from_the_start, window_plain, window_backward_runs_out),
    *(errors_that_are_held, one_sample_too_many, evaluation_plain, evaluation_runs_out, updates),
)


def main() -> None:
    """Run all."""
    folder, *wanted = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    keep_blocks_apart(True)
    gc.collect()
    gc.freeze()  # what was imported need not be looked through each time
    seen: dict[str, Any] = {}
    for scenario in SCENARIOS:
        name = scenario.__name__
        if wanted and name not in wanted:
            continue
        own_folder = Path(folder) / name
        own_folder.mkdir()
        torch.manual_seed(0)
        child = os.fork() if scenario is released else None
        if child:
            os.waitpid(child, 0)
            seen |= json.loads((Path(folder) / "seen.json").read_text())
            continue
        try:
            seen[name] = scenario(own_folder)
        except Exception:
            lift_ceiling()
            seen[name] = {"failed": traceback.format_exc()}
        if child == 0:
            break
    (Path(folder) / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
