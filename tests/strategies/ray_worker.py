"""Trains on two workers of a real Ray, and writes down how each training ended, as JSON.

    python ray_worker.py FOLDER      FOLDER has `train.h5`; `ended.json` is written into it

One `TorchTrainer` for all: its workers train one thing after the other. The last training is broken off: rank 1 kills
itself, once, so Ray starts both workers again, which go straight to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
import torch.nn.functional as functional
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from ray_local import local_ray  # noqa: E402

from lightning_gpufeed import BatchEcho, FeedMonitor, H5ImageDataModule, OOMRecovery, OutOfOrderStrategy  # noqa: E402
from lightning_gpufeed.strategies.ray import RayOutOfOrderStrategy  # noqa: E402
from tests.datamodules.models import NUM_CLASSES, make_trainer  # noqa: E402

NUM_FEATURES = 72
NUM_MICROBATCHES = 2
GIVEN: dict[str, Any] = {"reverse_first_k": 2, "cross_iteration": True, "bucket_bytes": 100}


class Net(pl.LightningModule):
    """Three layers, a buffer of running statistics, a schedule; writes down what it sees.

    Args:
        has_norm: Whether there is a BatchNorm: its statistics differ between microbatches.
    """

    def __init__(self, *, has_norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        norm = [nn.BatchNorm1d(12)] if has_norm else []
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(NUM_FEATURES, 12), *norm, nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, NUM_CLASSES)
        )
        self.has_norm = has_norm
        self.batches: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Write down the batch, log the loss."""
        images, labels = batch
        self.batches.append((images, labels))
        loss = functional.cross_entropy(self.model(images), labels % NUM_CLASSES)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss, as all ranks have it."""
        images, labels = batch
        self.log("val_loss", functional.cross_entropy(self.model(images), labels % NUM_CLASSES), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """With momentum, so that a wrong order anywhere changes the end."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95), "interval": "step"}]


def digest(value: Any) -> str:
    """The same for the same bits."""
    if isinstance(value, Tensor):
        data = str((value.dtype, tuple(value.shape))).encode() + value.detach().contiguous().numpy().tobytes()
    elif isinstance(value, dict):
        data = "".join(f"{key}: {digest(one)}, " for key, one in value.items()).encode()
    elif isinstance(value, list | tuple):
        data = "".join(f"{digest(one)}, " for one in value).encode()
    else:
        data = repr(value).encode()
    return hashlib.sha256(data).hexdigest()


class DyingOnce(Callback):
    """Rank 1 is killed, as by a machine that fails, in the middle of an epoch."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """The third step of the third epoch."""
        if trainer.global_rank == 1 and (trainer.current_epoch, batch_idx) == (2, 2) and not self.marker.exists():
            ray.train.get_all_reported_checkpoints()  # which are two when this returns
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fit(
    folder: Path, strategy: Any, *, checkpoint: str | None = None, is_prepared: bool = True, **settings: Any
) -> dict[str, Any]:
    """Train for three epochs; gives how it ended."""
    model = Net(has_norm=settings.pop("has_norm", True))
    trainer = make_trainer(
        **{"devices": "auto", "strategy": strategy, "plugins": [RayLightningEnvironment()], "max_epochs": 3, **settings}
    )
    dm = H5ImageDataModule(str(folder / "train.h5"), val=0.2, batch_size=4)
    (prepare_trainer(trainer) if is_prepared else trainer).fit(model, datamodule=dm, ckpt_path=checkpoint)
    ended = {
        "strategy": type(strategy).__name__,
        "weights": digest(model.state_dict()),
        "optimizer": digest(trainer.optimizers[0].state_dict()),
        "logged": {name: value.item() for name, value in trainer.logged_metrics.items() if "gpufeed" not in name},
        "steps": trainer.global_step,
        "seen": [labels.tolist() for _, labels in model.batches],
    }
    if not model.has_norm:
        ended["by hand"] = fit_by_hand(model.batches)
    return ended


def fit_by_hand(batches: list[Any]) -> str:
    """What a pipeline computes, by one process: every batch in microbatches."""
    model = Net(has_norm=False)
    [optimizer], [schedule] = model.configure_optimizers()
    for images, labels in batches:
        optimizer.zero_grad()
        for x, y in zip(images.chunk(NUM_MICROBATCHES), labels.chunk(NUM_MICROBATCHES), strict=True):
            (functional.cross_entropy(model.model(x), y % NUM_CLASSES) / NUM_MICROBATCHES).backward()
        optimizer.step()
        schedule["scheduler"].step()
    return digest(model.state_dict())


def refused(run: Callable[[], Any]) -> str:
    """The error it ends with."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def run_cells(folder: Path) -> dict[str, Any]:
    """Everything but the training that is broken off."""
    saves = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    ended = {
        "ddp": fit(folder, RayDDPStrategy()),
        "auto": fit(folder, RayOutOfOrderStrategy(verify_every=4)),
        "given": fit(folder, RayOutOfOrderStrategy(**GIVEN), enable_checkpointing=True, callbacks=[saves]),
        "clipped, ddp": fit(folder, RayDDPStrategy(), gradient_clip_val=0.1),
        "clipped": fit(folder, RayOutOfOrderStrategy(2), gradient_clip_val=0.1),
        "pipeline": fit(
            folder,
            RayOutOfOrderStrategy(pipeline_size=2, num_microbatches=NUM_MICROBATCHES),
            has_norm=False,
        ),
    }
    ended["recovery"] = fit(folder, RayDDPStrategy(), callbacks=[OOMRecovery()])
    in_the_middle = str(folder / "saved" / "step=6.ckpt")
    ended["resumed"] = fit(folder, RayOutOfOrderStrategy(**GIVEN), checkpoint=in_the_middle)
    ended["resumed by ddp"] = fit(folder, RayDDPStrategy(), checkpoint=in_the_middle)
    for name, strategy in (("together, ddp", RayDDPStrategy()), ("together", RayOutOfOrderStrategy(**GIVEN))):
        monitor = FeedMonitor()
        callbacks = [BatchEcho(2, num_splits=2, scale_lr="keep"), monitor]
        ended[name] = fit(folder, strategy, callbacks=callbacks)
    ended["refused"] = {
        "no environment": refused(lambda: fit(folder, RayOutOfOrderStrategy(), plugins=[])),
        "neither prepared": refused(lambda: fit(folder, RayOutOfOrderStrategy(), plugins=[], is_prepared=False)),
        "pipeline, neither": refused(
            lambda: fit(folder, RayOutOfOrderStrategy(pipeline_size=2), plugins=[], is_prepared=False)
        ),
        "not Ray's": refused(lambda: fit(folder, OutOfOrderStrategy())),
        "recovery": refused(lambda: fit(folder, RayOutOfOrderStrategy(), callbacks=[OOMRecovery()])),
        "three stages": refused(lambda: fit(folder, RayOutOfOrderStrategy(pipeline_size=3))),
    }
    return ended


def work(config: dict[str, str]) -> None:
    """What a worker does, and what it does after it was started again."""
    warnings.filterwarnings("ignore")
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    cells = folder / f"cells-{rank}.json"
    if not cells.exists():
        cells.write_text(json.dumps(run_cells(folder)))
    kept = ray.train.get_checkpoint()
    callbacks = [RayTrainReportCallback(), DyingOnce(folder / "died")]
    checkpoint = None
    if kept is not None:
        checkpoint = str(Path(kept.to_directory(str(folder / f"kept-{rank}"))) / RayTrainReportCallback.CHECKPOINT_NAME)
    ended = fit(folder, RayOutOfOrderStrategy(**GIVEN), checkpoint=checkpoint, callbacks=callbacks)
    ended["began in epoch"] = 0 if checkpoint is None else torch.load(checkpoint, weights_only=False)["epoch"] + 1
    (folder / f"broken-{rank}.json").write_text(json.dumps(ended))


def main(folder: Path) -> None:
    """Start Ray, train, write down what came of it."""
    outside = {
        "outside": refused(lambda: fit(folder, RayOutOfOrderStrategy())),
        "backend": refused(lambda: RayOutOfOrderStrategy(process_group_backend="gloo")),
        "start": refused(lambda: RayOutOfOrderStrategy(start_method="spawn", pipeline_size=2)),
        "options of both": refused(lambda: RayOutOfOrderStrategy(3, pipeline_size=2)),
    }
    with local_ray() as results:
        result = TorchTrainer(
            work,
            train_loop_config={"folder": str(folder)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=str(results),
                failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=1),
            ),
        ).fit()
        reported = dict(result.metrics)
    ranks = [
        {
            **json.loads((folder / f"cells-{rank}.json").read_text()),
            "broken": json.loads((folder / f"broken-{rank}.json").read_text()),
        }
        for rank in range(2)
    ]
    pickled = pickle.loads(pickle.dumps(RayOutOfOrderStrategy(pipeline_size=2)))
    ended = {
        "ranks": ranks,
        "outside": outside,
        "reported": reported,
        "died": (folder / "died").exists(),
        "pickled": type(pickled).__name__,
    }
    (folder / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    from tests.strategies import ray_worker  # as the workers import it

    ray_worker.main(Path(sys.argv[1]).resolve())
