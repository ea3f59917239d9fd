"""One rank of a pipeline in a real training. Started by test_pipeline_ranks.py, once per rank, with a plan as JSON.

    python pipeline_strategy_worker.py PLAN.json

The plan names scenarios, run one after the other in the same process group, each of which gives a value that is
saved as OUT/<name>.<rank>.pt. An error is a result like any other: its type and its text. `train` with no strategy is
the same training on one device, which the test runs in its own process.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor, distributed, nn

from lightning_gpufeed import OutOfOrderStrategy
from lightning_gpufeed.pipeline.nested import microbatch_sizes
from tests.datamodules.models import MemoryLogger, make_trainer, state_of
from tests.process_groups import agree_on_port, end_of_cell
from tests.strategies.pipeline_users import MODULES, RANK, Chain, Watch, callbacks_of, loader_of


def strategy_of(options: dict[str, Any] | None, timeout_seconds: float) -> Any:
    """Ours; Lightning's for {"ddp": True}; one device for None. A rank that waits in vain for the others fails."""
    if options is None:
        return "auto"
    common: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=timeout_seconds)}
    if options.get("ddp"):
        return DDPStrategy(**common)
    return OutOfOrderStrategy(**common, **{"pipeline_size": 2, "num_microbatches": 4, **options})


@contextmanager
def messages_kept(texts: list[str]) -> Iterator[None]:
    """What is warned of, or said by the strategy."""
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        texts += [str(one.message) for one in caught if not issubclass(one.category, DeprecationWarning)]
        logger.removeHandler(handler)


def train(
    folder: Path,
    *,
    strategy: dict[str, Any] | None,
    devices: int,
    timeout_seconds: float = 60,
    module: str = "Net",
    net: dict[str, Any] | None = None,
    sizes: tuple[int, int] = (11, 8),
    val_sizes: tuple[int, int] | None = (9, 8),
    seed: int = 11,
    data: str = "in order",
    calls: list[Any] | None = None,
    callbacks: list[Any] | None = None,
    logger: bool = False,
    scaler: float | None = None,
    microbatches: int = 0,
    logs: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Train, and say all that came of it.

    Args:
        folder: For checkpoints.
        strategy: See `strategy_of`.
        devices: Ranks.
        timeout_seconds: How long a rank waits for others.
        module: Name of the module.
        net: Its arguments.
        sizes: Samples of the training, and of a batch.
        val_sizes: Of validation, test and prediction.
        seed: Of the data.
        data: Kind of the loader.
        calls: What to do with one Trainer: a name, and arguments.
        callbacks: Names and arguments.
        logger: Whether there is one.
        scaler: First scale of 16-mixed, in which float16 is bfloat16 here.
        microbatches: Into how many the layers cut each batch, if there is no strategy: what a pipeline of as many is
            compared with to the last bit, if they are two, as a sum of two numbers has one order.
        logs: Whether losses of training are logged.
        **settings: Of the Trainer.
    """
    net = net or {}
    body = net.get("body", "mlp")
    log, watch, seconds = MemoryLogger(), Watch(), time.monotonic()
    said: list[str] = []
    given: list[Any] = []
    error = None
    model: Any = MODULES[module](**net)
    model.logs = logs
    if microbatches:
        cut(model, microbatches)
    every = callbacks_of(callbacks or [], folder)
    if strategy is not None and strategy.get("start_method") == "fork":
        os.environ.pop("LOCAL_RANK", None)  # these ranks are started by Lightning
    has_saver = any(type(one).__name__ == "ModelCheckpoint" for one in every)
    trainer = None
    try:
        with messages_kept(said):
            if scaler is not None:
                grad_scaler = torch.amp.GradScaler("cpu", init_scale=scaler, growth_interval=2)
                settings["plugins"] = MixedPrecision("16-mixed", "cpu", grad_scaler)
            trainer = make_trainer(
                strategy=strategy_of(strategy, timeout_seconds),
                devices=devices,
                callbacks=[*every, watch],
                **{
                    "logger": log if logger else False,
                    "enable_checkpointing": has_saver,
                    "max_epochs": 1,
                    **settings,
                },
            )
            for name, arguments in calls or [["fit", {}]]:
                given.append(call(trainer, model, name, dict(arguments), body, sizes, val_sizes, seed, data))
    except (Exception, KeyboardInterrupt, SystemExit) as raised:
        error = {"type": type(raised).__name__, "text": str(raised)}
    result = {
        "error": error,
        "seconds": time.monotonic() - seconds,
        "losses": watch.losses,
        "rows": watch.rows,
        "plan": watch.plan,
        "seen": model.seen,
        "given": given,
        "said": said,
        # Without the figures that a strategy of ours adds.
        "logged": [[step, row] for step, row in log.logged if not any(name.startswith("gpufeed/") for name in row)],
        "num_foreign": sum(one.is_meta for one in [*model.parameters(), *model.buffers()]),
        "types": sorted({type(one).__name__ for one in model.parameters()}),
        "left": sum("forward" in vars(one) for one in model.modules()) * (strategy is not None),
    }
    if trainer is not None and not result["num_foreign"]:
        result["state"] = state_of(trainer, model)
        result["metrics"] = {key: value.clone() for key, value in trainer.callback_metrics.items()}
        result["status"] = str(trainer.state.status.value)
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        result["best"] = Path(best).name
        for callback in every:
            if isinstance(callback, EMAWeightAveraging) and callback._average_model is not None:
                result["average"] = {key: one.clone() for key, one in callback._average_model.state_dict().items()}
    return result


def cut(model: pl.LightningModule, num_microbatches: int) -> None:
    """Have the layers run on a batch part by part."""
    owner = next(one for one in model.modules() if isinstance(one, nn.Sequential | Chain))
    forward = owner.forward

    def in_parts(x: Tensor) -> Tensor:
        sizes = microbatch_sizes(len(x), min(num_microbatches, len(x)))
        return torch.cat([forward(part) for part in x.split(list(sizes))])

    owner.forward = in_parts  # type: ignore[method-assign]


def call(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    name: str,
    arguments: dict[str, Any],
    body: str,
    sizes: tuple[int, int],
    val_sizes: tuple[int, int] | None,
    seed: int,
    data: str,
) -> Any:
    """One call of a Trainer's method, and what it gives."""
    if arguments.get("ckpt_path") not in (None, "best", "last"):
        arguments["weights_only"] = False  # files hold more than tensors
    if "max_epochs" in arguments:
        trainer.fit_loop.max_epochs = arguments.pop("max_epochs")
    if name == "save":
        trainer.save_checkpoint(arguments["path"])
        return None
    evaluated = None if val_sizes is None else loader_of(body, tuple(val_sizes), seed + 1, "in order")
    if name == "fit":
        trainer.fit(model, loader_of(body, tuple(sizes), seed, data), evaluated, **arguments)
        return {key: value.clone() for key, value in trainer.callback_metrics.items()}
    found = getattr(trainer, name)(model, evaluated, verbose=False, **arguments) if name != "predict" else None
    if name == "predict":
        found = trainer.predict(model, evaluated, **arguments)
    return [one.clone() if isinstance(one, Tensor) else one for one in found or []]


def main() -> None:
    """Run the plan."""
    gc.collect()
    gc.freeze()  # what was imported need not be looked through each time
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    plan = json.loads(Path(sys.argv[1]).read_text())
    for scenario in plan["scenarios"]:
        begin = time.monotonic()
        agree_on_port(Path(plan["out"]) / f"{scenario['name']}.port", RANK)
        name = scenario["name"]
        try:
            result = train(Path(plan["out"]) / name, devices=plan["world_size"], **scenario["arguments"])
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}", "error": None}
        torch.save(result, Path(plan["out"]) / f"{name}.{RANK}.pt")
        end_of_cell(is_well=not (result.get("failed") or result["error"]))
        print(f"{name}: {time.monotonic() - begin:.2f} s {result.get('error')} {result.get('failed')}", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
