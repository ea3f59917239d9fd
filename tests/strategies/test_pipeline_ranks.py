"""`OutOfOrderStrategy(pipeline_size=P)` in trainings of Lightning, on real processes in a group (gloo, on the CPU).

Starting ranks takes seconds, so they are started once for each size of a group and do everything; the tests read what
they wrote down. Each training is compared with the same on one device, in this process. Where that runs its layers on
two microbatches as the pipeline does, everything is equal to the last bit, for a sum of two numbers has one order.
"""

from __future__ import annotations

import functools
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.nn import functional

from lightning_gpufeed import OutOfOrderStrategy
from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.nested import microbatch_sizes
from lightning_gpufeed.pipeline.plan import PipelineOptions
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.strategies.pipeline import PipelineStrategy
from tests.doubles import run_ranks
from tests.strategies.pipeline_strategy_worker import train
from tests.strategies.pipeline_users import Net, dataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

WORKER = Path(__file__).with_name("pipeline_strategy_worker.py")
LIMIT_SECONDS = 240
TIMEOUT_SECONDS = 60
"""How long a rank waits for another one before it fails; what has ended sooner has not waited for that."""
SHORT_SECONDS = 6
"""How long a rank waits for others where one is going to be missing."""

# Trainings -----------------------------------------------------------------------------------------------------------

PLAIN = {"schedule": "fast_forward", "layers_per_stage": 2, "num_microbatches": 2}
FUSED = {"schedule": "zero_bubble", "layers_per_stage": 2, "num_microbatches": 2}
SCHEDULES = ["gpipe", "fast_forward", "1f1b", "interleaved", "zero_bubble", "zbv", "auto"]
# If nothing else is said, batches are of 8 and 3; in validation of 8 and 1. The second has weights of the first; the
# matrix has more.
THREE_STEPS = (19, 8)
"""Batches of 8, 8 and 3: one whose shapes are known, and one that is smaller."""
LONGER = {"sizes": THREE_STEPS}
FOUR_STEPS = {"sizes": (27, 8)}
"""Batches of 8, 8, 8 and 3."""
WHOLE = {"sizes": (16, 8), "val_sizes": (9, 8)}
"""All batches are of 8: half of a loss is exact, as a schedule needs that begins backward early."""
FIT: list[Any] = ["fit", {}]
TWO_EPOCHS = {"max_epochs": 2}
SHORT = {"timeout_seconds": SHORT_SECONDS}
EVALUATIONS: list[Any] = [["validate", {}], ["test", {}], ["predict", {}]]


@dataclass(frozen=True)
class Cell:
    """One training of the matrix."""

    schedule: str
    layers_per_stage: Any
    accumulate: int
    body: str

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.layers_per_stage}, {self.accumulate}, {self.body}"

    def arguments(self, pipeline_size: int) -> dict[str, Any]:
        # The last batch has 3 samples, which is less than the microbatches; in validation 1. Its window is not full.
        return {
            "sizes": THREE_STEPS,
            "strategy": {
                "pipeline_size": pipeline_size,
                "num_microbatches": 4,
                "schedule": self.schedule,
                "layers_per_stage": self.layers_per_stage,
            },
            "net": {"body": self.body, "optimizer": "sgd"},
            "accumulate_grad_batches": self.accumulate,
        }


def matrix() -> Iterator[Cell]:
    """Each schedule with each number of layers that it can have in a stage, twice."""
    for i, schedule in enumerate(SCHEDULES):
        granularities = ["auto"] if schedule in ("1f1b", "zbv") else [1, 2, "auto"]
        for j, layers_per_stage in enumerate(granularities):
            yield Cell(schedule, layers_per_stage, 1 + (i + j) % 2, ("transformer", "cnn")[(i + j // 2) % 2])
        if len(granularities) == 1:
            yield Cell(schedule, "auto", 1 + (i + 1) % 2, ("transformer", "cnn")[(i + 1) % 2])


MATRIX = {cell.name: cell for cell in matrix()}
# On four ranks each schedule once, or with both models where there are no layers to choose.
FOUR = {
    cell.name: cell
    for cell in MATRIX.values()
    if cell.layers_per_stage == ("auto" if cell.schedule in ("fast_forward", "zero_bubble", "1f1b", "zbv") else 2)
}

# These log losses of training too, as all of the matrix do; the others say what they are in another way.
LOGGED = {
    *("all calls", "all calls, fused", "sanity, recomputed", "fit twice", "best", "barebones", "last step"),
    *("validation in an epoch", "without a length, foreach AdamW", "rates, method", "early", "rate finder"),
    *("drawn by others, fused", "limits, dotted name", "bfloat16", "manual, fused", "accumulation", "clipped, fused"),
    *("batches that three do not divide", "batches that five do not divide", "float32", "all at once", "tied, manual"),
}

# Compared to the last bit with one device that runs its layers on two microbatches. A training has several things that
# have nothing to do with each other.
EXACT: dict[str, dict[str, Any]] = {
    # Calls of the Trainer.
    "all calls": {"calls": [*EVALUATIONS, FIT, *EVALUATIONS]},
    "all calls, fused": {"strategy": FUSED, "calls": [*EVALUATIONS, FIT, *EVALUATIONS], **WHOLE},
    "sanity, recomputed": {
        "num_sanity_val_steps": 2,
        "strategy": {**PLAIN, "activation_checkpointing": True},
        "net": {"body": "transformer"},
    },
    "sanity, measured": {"num_sanity_val_steps": 2, "strategy": {"num_microbatches": 2, "schedule": "auto"}},
    "best": {"callbacks": [["best"]], "calls": [FIT, *[[name, {"ckpt_path": "best"}] for name, _ in EVALUATIONS]]},
    "fast development, teacher": {"fast_dev_run": 2, "module": "Teacher", **LONGER},
    "limits, dotted name": {
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "module": "TwoSequentials",
        "strategy": {**PLAIN, "pipeline_module": "wrapped.layers"},
        **LONGER,
    },
    "barebones": {"barebones": True, "log_every_n_steps": None, "enable_progress_bar": False},
    "last step": {"max_steps": 2, "max_epochs": 3, **LONGER},
    "validation in an epoch": {"val_check_interval": 2, **FOUR_STEPS},
    "without validation, drawn by others": {"val_sizes": None, "module": "DrawnByOthers"},
    # Data.
    "shuffled, AdamW": {"data": "shuffled", "net": {"optimizer": "adamw", "scheduler": "epoch"}, **TWO_EPOCHS},
    "without a length, foreach AdamW": {"data": "iterable", "net": {"optimizer": "foreach"}},
    "workers, fused AdamW": {"data": "workers", "net": {"optimizer": "fused"}},
    "the same few, groups": {
        "data": "shuffled",
        "overfit_batches": 2,
        "module": "Groups",
        **LONGER,
        **TWO_EPOCHS,
    },
    "loaded again, plateau": {
        "data": "shuffled",
        "reload_dataloaders_every_n_epochs": 1,
        "net": {"scheduler": "plateau"},
        "max_epochs": 3,
    },
    "one sample, dictionary": {"sizes": (9, 8), "val_sizes": (1, 1), "module": "Dictionary"},
    # Callbacks.
    "rates, method": {
        "callbacks": [["rates"]],
        "logger": True,
        "net": {"scheduler": "step"},
        "module": "ListOfLayers",
        "strategy": {**PLAIN, "pipeline_module": "body.in_order"},
    },
    "early": {"callbacks": [["early"]], "max_epochs": 5},
    "slow ranks": {"callbacks": [["late"]], "strategy": FUSED, **WHOLE, "sizes": (24, 8)},
    # Optimizers and schedulers.
    "fit twice": {"net": {"optimizer": "adamw"}, "calls": [FIT, ["fit", {"max_epochs": 2}], ["predict", {}]]},
    "rate finder": {"module": "Rated", "callbacks": [["rate finder"]], **LONGER},
    # Modules.
    "around, clipped by value": {
        "module": "Around",
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "dictionary, fused": {"module": "Dictionary", "strategy": FUSED, **WHOLE},
    "augmented": {"module": "Augmented"},
    "augmented, fused": {"module": "Augmented", "strategy": {**FUSED, "schedule": "1f1b", "layers_per_stage": "auto"}},
    "drawn by others, fused": {"module": "DrawnByOthers", "strategy": FUSED, **WHOLE},
    "no mean": {"module": "WholeBatch", "strategy": PLAIN},
    "no mean, fused": {"module": "WholeBatch", "strategy": FUSED, "timeout_seconds": SHORT_SECONDS},
    "counting": {"module": "Counting", **TWO_EPOCHS},
    "counting, fused": {"module": "Counting", "strategy": FUSED, **WHOLE, **TWO_EPOCHS},
    "recomputed, fused": {
        "strategy": {**FUSED, "activation_checkpointing": True},
        "net": {"body": "transformer"},
        **WHOLE,
    },
    "statistics of batches": {"net": {"body": "normalised"}, "sizes": (20, 8)},
    "input gradients": {"module": "WithInputGradient"},
    "batches of many things": {"module": "Named", "strategy": FUSED},
    "some words ignored": {"module": "Ignoring", "strategy": FUSED, "net": {"body": "transformer"}, **WHOLE},
    "toggling": {"module": "Toggling"},
    "at other times": {"module": "AtOtherTimes", **TWO_EPOCHS},
    "at other times, fused": {"module": "AtOtherTimes", "strategy": FUSED, **WHOLE, **TWO_EPOCHS},
    "gathered": {"module": "Gathering"},
    "gathered, fused": {"module": "Gathering", "strategy": FUSED, **WHOLE, **SHORT},
    "statistics after the pipeline": {
        "module": "NormalisedHead",
        "strategy": {**FUSED, "pipeline_module": "body"},
        "sizes": (16, 8),
    },
    # Layers that are not trained.
    "unfrozen on the first rank": {"callbacks": [["unfreeze", 0, 2]], **TWO_EPOCHS},
    "unfrozen on the second rank": {"callbacks": [["unfreeze", 6, 8]], **TWO_EPOCHS},
    "unfrozen in the middle, fused": {"callbacks": [["unfreeze", 2, 5]], "strategy": FUSED, **WHOLE, **TWO_EPOCHS},
    # Precision.
    "float32": LONGER,
    "float64": {"precision": "64-true"},
    "bfloat16": {"precision": "bf16-true"},
}

# The same in float64, where sums in another order agree to 1e-12.
CLOSE: dict[str, dict[str, Any]] = {
    "clipped, made late": {"gradient_clip_val": 0.1, "module": "Configured"},
    "manual, fused": {"module": "Manual", "strategy": FUSED},
    "manual": {"module": "Manual"},
    "two optimizers": {"module": "TwoOptimizers"},
    "accumulation": {"callbacks": [["accumulation"]], **LONGER, **TWO_EPOCHS},
    "clipped, fused": {"gradient_clip_val": 0.1, "strategy": {**FUSED, "num_microbatches": 4}},
    "clipped in a hook": {"module": "Clipping"},
    "around, fused": {"module": "Around", "strategy": {**FUSED, "schedule": "1f1b", "layers_per_stage": "auto"}},
    "two calls": {"module": "TwoCalls"},
    "two calls, fused": {"module": "TwoCalls", "strategy": FUSED},
    "frozen layers": {"module": "Probe"},
    "frozen layers, fused": {"module": "Probe", "strategy": FUSED},
    "head frozen in a step, fused": {"module": "FrozenHead", "strategy": FUSED},
    "frozen up to the head": {"module": "Probe", "net": {"trains_before": False}},
    "all at once": {
        "strategy": {"num_microbatches": 4, "schedule": "auto"},
        "net": {"body": "tied", "optimizer": "adamw", "scheduler": "step"},
        **FOUR_STEPS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "num_sanity_val_steps": 1,
        "val_check_interval": 2,
        "callbacks": [["best"], ["rates"]],
        "logger": True,
        "calls": [["validate", {}], FIT, ["test", {"ckpt_path": "best"}], ["fit", {"max_epochs": 2}], ["predict", {}]],
    },
    "batches that three do not divide": {
        "strategy": {"num_microbatches": 3, "schedule": "zero_bubble", "layers_per_stage": 1},
        "module": "Counting",
        "sizes": (29, 9),
        "val_sizes": (7, 3),
        "gradient_clip_val": 0.2,
    },
    "batches that five do not divide": {
        "strategy": {"num_microbatches": 5, "schedule": "interleaved", "layers_per_stage": 2},
        "module": "Around",
        "callbacks": [["unfreeze", 3, 5]],
        "sizes": (29, 11),
        "val_sizes": (7, 3),
        **TWO_EPOCHS,
    },
    "tied": {"net": {"body": "tied"}},
    "tied, fused": {"net": {"body": "tied"}, "strategy": FUSED},
    "tied, window, clipped": {
        "net": {"body": "tied"},
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        **LONGER,
    },
    "tied, manual": {"net": {"body": "tied"}, "module": "Manual"},
}
LOW: dict[str, dict[str, Any]] = {
    # Weights are cast once for both microbatches on one device, and their gradients added in the low precision.
    "bf16-mixed": {"precision": "bf16-mixed", **LONGER},
    "bf16-mixed, fused": {"precision": "bf16-mixed", "strategy": FUSED, **LONGER},
    # Without clipping those are that overflow.
    "16-mixed, clipped": {"scaler": 1024.0, "gradient_clip_val": 0.1, **LONGER},
    "16-mixed, clipped, fused": {"scaler": 1024.0, "gradient_clip_val": 0.1, "strategy": FUSED, **LONGER},
    "overflow": {"scaler": 1024.0, "module": "Overflowing", **FOUR_STEPS},
    "overflow, fused": {"scaler": 1024.0, "module": "Overflowing", "strategy": FUSED, **FOUR_STEPS},
}

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "small batch": ({"strategy": {**PLAIN, "num_microbatches": 16}}, ["8 samples", "num_microbatches is 16"]),
    "LBFGS": ({"net": {"optimizer": "lbfgs"}}, ["LBFGS", "AdamW"]),
    "two Sequentials": ({"module": "TwoSequentials"}, ["'wrapped.layers', 'head'", "pipeline_module='wrapped.layers'"]),
    "no such layers": ({"strategy": {**PLAIN, "pipeline_module": "bodi"}}, ["bodi", "body"]),
    "foreign weights": ({"callbacks": [["reader"]], **SHORT}, ["of another rank", "which this rank"]),
    "EMA": ({"callbacks": [["ema"]], **SHORT}, ["EMAWeightAveraging", "checkpoints"]),
    "SWA": ({"callbacks": [["swa"]], **SHORT}, ["StochasticWeightAveraging", "checkpoints"]),
    "clipped by hand": ({"module": "ClippingByHand", **SHORT}, ["on another rank", "self.clip_gradients"]),
    "too many ranks": ({"strategy": {**PLAIN, "pipeline_size": 4}}, ["pipeline_size is 4", "2 ranks"]),
}
ENDS: dict[str, dict[str, Any]] = {
    "other batches": {"data": "iterable that differs", **SHORT},
    "fails in a hook": {"callbacks": [["death", "on_after_backward", "error", 0]], **SHORT},
    "fails in training_step": {"module": "Failing", **SHORT},
    "fails, and is saved": {
        "callbacks": [["death", "on_train_batch_start", "error", 1], ["saver"]],
        "timeout_seconds": 3,
    },
    "interrupted": {"callbacks": [["death", "on_train_batch_start", "interrupt", 0, 1]], **SHORT},
    "fails on both": {"callbacks": [["death", "on_train_batch_start", "error", 0, 1], ["saver"]], **SHORT},
    "dies": {"callbacks": [["death", "on_before_optimizer_step", "exit", 1]], **SHORT},  # has to be the last one
}

# Checkpoints ---------------------------------------------------------------------------------------------------------

SAVES: list[Any] = ["checkpoint", {"every_n_train_steps": 1, "filename": "{step}"}]
SAVED: dict[str, Any] = {
    "net": {"optimizer": "adamw", "scheduler": "step"},
    "module": "Saved",
    "callbacks": [SAVES],
    **FOUR_STEPS,
    **TWO_EPOCHS,
}
MIDDLE = "step=6.ckpt"
"""Four steps are an epoch."""
ON_ONE = {**SAVED, "microbatches": 2}


# Two replicas of two stages: each has every other sample, in batches of 8, where one device has all in batches of 16.
OF_REPLICAS: dict[str, Any] = {
    "precision": "64-true",
    "data": "every other",
    "sizes": (48, 8),
    "val_sizes": (16, 8),
}
REPLICAS: dict[str, dict[str, Any]] = {
    "fused": {"strategy": {**FUSED, "num_microbatches": 4}},
    "tied, window": {"net": {"body": "tied"}, "accumulate_grad_batches": 2},
    "tied, manual": {"net": {"body": "tied"}, "module": "Manual"},
    "around, clipped": {"module": "Around", "gradient_clip_val": 0.1},
    "two optimizers": {"module": "TwoOptimizers"},
    "idle": {"module": "Idle"},
    "recomputed transformer": {
        "net": {"body": "transformer"},
        "strategy": {"activation_checkpointing": True, "layers_per_stage": 1},
    },
    "frozen": {"callbacks": [["unfreeze", 0, 2]], **TWO_EPOCHS},
    "counting": {"module": "Counting"},
    "counting, fused": {"module": "Counting", "strategy": FUSED},
}


def samples_of_replicas(name: str) -> int:
    """Two steps, or three where a window is not full or one of the ranks has nothing to do in the second."""
    return 48 if name in ("tied, window", "idle") else 32


# Of four ranks, the last one is in the second replica. Each replica has batches for more steps than are taken.
ENDS_OF_REPLICAS: dict[str, dict[str, Any]] = {
    "replica fails": {"callbacks": [["death", "on_after_backward", "error", 3]]},
    "replica dies": {"callbacks": [["death", "on_before_optimizer_step", "exit", 3]]},  # has to be the last one
}


@dataclass
class Ranks:
    """What each rank wrote down, by the name of the scenario."""

    folder: Path
    log: str
    num_ranks: int

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """Results of a training that no rank has broken off, by rank."""
        results = self.of(name, range(self.num_ranks))
        for rank, result in enumerate(results):
            assert result["error"] is None, f"rank {rank} failed in {name!r}: {result['error']}"
            assert result["left"] == 0, "a forward is left on the model"
            assert result["types"] == ["Parameter"]
            assert result["num_foreign"] == 0
        return results

    def of(self, name: str, ranks: Any) -> list[dict[str, Any]]:
        """Results of a training, whatever its end."""
        files = [self.folder / f"{name}.{rank}.pt" for rank in ranks]
        missing = [file.name for file in files if not file.exists()]
        assert not missing, f"{missing} were never written:\n{self.log[-4000:]}"
        results = [torch.load(file, weights_only=False) for file in files]
        for result in results:
            assert "failed" not in result, f"{name!r}: {result['failed']}"
        return results


def run(folder: Path, trainings: dict[str, dict[str, Any]], num_ranks: int) -> Ranks:
    folder.mkdir(exist_ok=True)
    scenarios = [{"name": name, "arguments": {"strategy": PLAIN, **arguments}} for name, arguments in trainings.items()]
    plan = {"world_size": num_ranks, "scenarios": scenarios, "out": str(folder)}
    text = run_ranks(WORKER, plan, folder, num_processes=num_ranks, limit_seconds=LIMIT_SECONDS)
    return Ranks(folder, text, num_ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def two(folder: Path) -> Ranks:
    on_one_device(folder / "one", {**ON_ONE, "calls": [FIT, ["save", {"path": str(folder / "after, one.ckpt")}]]})
    from_one, from_two = str(folder / "one" / MIDDLE), str(folder / "two" / "saved" / MIDDLE)
    return run(
        folder / "two",
        {
            **{name: cell.arguments(2) for name, cell in MATRIX.items()},
            **{name: {"logs": name in LOGGED, **one} for name, one in EXACT.items()},
            **{name: {"logs": name in LOGGED, "precision": "64-true", **one} for name, one in CLOSE.items()},
            **LOW,
            "saved": {**SAVED, "calls": [FIT, ["save", {"path": str(folder / "after.ckpt")}]]},
            "from one device": {**SAVED, "calls": [["fit", {"ckpt_path": from_one}]]},
            "ddp from one device": {**SAVED, "strategy": {"ddp": True}, "calls": [["fit", {"ckpt_path": from_one}]]},
            "ddp from two stages": {**SAVED, "strategy": {"ddp": True}, "calls": [["fit", {"ckpt_path": from_two}]]},
            "dropping": {"net": {"body": "dropping"}},
            **{
                f"modes, {name}": {"module": "Teacher", "net": {"body": "dropping"}, "strategy": options}
                for name, options in {"plain": PLAIN, "fused": FUSED}.items()
            },
            "echoed": {"callbacks": [["echo"]], **SHORT},
            "monitored": {"callbacks": [["monitor"]], **LONGER},
            "too small for statistics": {
                "net": {"body": "normalised"},
                "strategy": {**PLAIN, "num_microbatches": 4},
                **FOUR_STEPS,
                **SHORT,
            },
            **{name: arguments for name, (arguments, _) in REFUSED.items()},
            **{name: {**FOUR_STEPS, **arguments} for name, arguments in ENDS.items()},
        },
        num_ranks=2,
    )


@pytest.fixture(scope="module")
def four(folder: Path, two: Ranks) -> Ranks:
    resumed = {**SAVED, "calls": [["fit", {"ckpt_path": str(two.folder / "saved" / MIDDLE)}]]}
    return run(
        folder / "four",
        {
            **{name: cell.arguments(4) for name, cell in FOUR.items()},
            **{
                f"replicas, {name}": {**OF_REPLICAS, "sizes": (samples_of_replicas(name), 8), **arguments}
                for name, arguments in REPLICAS.items()
            },
            **{
                f"one-sided, {name}": {
                    **OF_REPLICAS,
                    "module": "OneSided",
                    "strategy": {**options, "layers_per_stage": 1},
                }
                for name, options in {"plain": PLAIN, "fused": FUSED}.items()
            },
            "statistics of replicas": {**OF_REPLICAS, "net": {"body": "normalised"}},
            "shuffled replicas": {"data": "shuffled", "sizes": (48, 8), **TWO_EPOCHS},
            "from two stages": {**resumed, "strategy": {**PLAIN, "pipeline_size": 4}},
            "dropping": {"net": {"body": "dropping"}, "strategy": {**PLAIN, "pipeline_size": 4}},
            **{name: {"sizes": (64, 8), **arguments} for name, arguments in ENDS_OF_REPLICAS.items()},
        },
        num_ranks=4,
    )


def on_one_device(folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Plain Lightning, in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are kept in the result
        result = train(folder, devices=1, **{**arguments, "strategy": None})
    assert result["error"] is None, result["error"]
    return result


def differences(one: Any, other: Any, allowed: float = 0.0, path: str = "") -> list[str]:
    """Where two nests are not equal, or tensors and numbers not within what is allowed of the largest in a tensor."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return [f"{path}: {one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}"]
        if not one.numel() or torch.equal(one, other):
            return []
        difference = float((one.double() - other.double()).abs().max())
        # What began at 0, as biases do, is a sum of larger terms; that of LayerNorm begins there beside weights of 1.
        scale = max(float(one.double().abs().max()), 0.1)
        return [f"{path}: by {difference / scale:.2g}"] if not difference <= allowed * scale else []
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if list(one) != list(other):
            return [f"{path}: {list(one)}, {list(other)}"]
        return [line for key in one for line in differences(one[key], other[key], allowed, f"{path}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} of them"]
        pairs = zip(one, other, strict=True)
        return [line for i, pair in enumerate(pairs) for line in differences(*pair, allowed, f"{path}.{i}")]
    if isinstance(one, float) and isinstance(other, float):
        return [] if abs(one - other) <= allowed * abs(one) or one == other else [f"{path}: {one!r}, {other!r}"]
    return [] if type(one) is type(other) and one == other else [f"{path}: {one!r}, {other!r}"]


COMPARED = ("losses", "rows", "seen", "given", "logged", "metrics", "best", "status", "weights", "schedulers", "counts")


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """Optimizers have states of a rank's own layers; checkpoints, of which more is tested below, have all."""
    state = result["state"]
    counts = state["global_step"], state["epoch"]
    found = {**result, "weights": state["weights"], "schedulers": state["schedulers"], "counts": counts}
    return {key: found.get(key) for key in COMPARED}


def assert_same(one: dict[str, Any], ranks: list[dict[str, Any]], allowed: float = 0.0) -> None:
    """On each rank what is on one device, and the same on all to the last bit."""
    for rank, other in enumerate(ranks):
        found = differences(comparable(one), comparable(other), allowed)
        assert not found, f"rank {rank}, {len(found)} differences:\n" + "\n".join(line[:300] for line in found[:8])
        found = differences(comparable(ranks[0]), comparable(other))
        assert not found, f"rank {rank} and rank 0, {len(found)} differences:\n" + "\n".join(found[:8])


# The matrix ----------------------------------------------------------------------------------------------------------


def by_hand(cell: Cell, plan: dict[str, Any]) -> dict[str, Tensor]:
    """A loop over the same microbatches, whose gradients are added in the order of the schedule."""
    torch.manual_seed(0)
    model = Net(cell.body, optimizer="sgd")
    optimizer: Any = model.configure_optimizers()
    named = dict(model.named_parameters())
    num_samples, size = THREE_STEPS
    samples = dataset(cell.body, num_samples, seed=11)
    batches = [samples[begin : begin + size] for begin in range(0, num_samples, size)]
    is_fused = cell.schedule not in ("gpipe", "fast_forward") and plan["why_split"] is None and is_overlapping(plan)
    for number, (x, y) in enumerate(batches, start=1):
        sizes = microbatch_sizes(len(x), min(4, len(x)))
        outputs = [model.body(part) for part in x.split(list(sizes))]
        grads = output_grads(cell, outputs, y, sizes, is_fused)
        found = [
            torch.autograd.grad(output, list(named.values()), grad) for output, grad in zip(outputs, grads, strict=True)
        ]
        by_name = [dict(zip(named, one, strict=True)) for one in found]
        for layers, order in zip(plan["names"], plan["orders"], strict=True):
            for name in (one for one in named if any(one.startswith(f"{layer}.") for layer in layers)):
                parts = [by_name[microbatch][name] for microbatch in order if microbatch < len(sizes)]
                parameter = named[name]
                before = [] if parameter.grad is None else [parameter.grad]
                total = functools.reduce(torch.add, parts if is_fused else [*before, *parts])
                parameter.grad = before[0] + total if is_fused and before else total
        if number % cell.accumulate == 0 or number == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def is_overlapping(plan: dict[str, Any]) -> bool:
    """Whether "auto" has chosen a schedule that begins backward early."""
    return plan["text"].split(",")[0] not in ("gpipe", "fast_forward")


def output_grads(
    cell: Cell, outputs: list[Tensor], y: Tensor, sizes: tuple[int, ...], is_fused: bool
) -> tuple[Tensor, ...]:
    """Of the loss of the batch, or of its parts' in a schedule that begins backward early."""
    leaves = [one.detach().requires_grad_() for one in outputs]
    if not is_fused:
        return torch.autograd.grad(loss_of(cell.body, torch.cat(leaves), y) / cell.accumulate, leaves)
    parts = zip(leaves, y.split(list(sizes)), sizes, strict=True)
    losses = [loss_of(cell.body, leaf, part) * (size / len(y)) / cell.accumulate for leaf, part, size in parts]
    return tuple(torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip(losses, leaves, strict=True))


def loss_of(body: str, out: Tensor, y: Tensor) -> Tensor:
    """As in `Net`."""
    if body == "transformer":
        return functional.cross_entropy(out.flatten(0, 1), y.flatten())
    return (out - y).square().mean()


@functools.cache
def one_device_of(body: str, accumulate: int) -> dict[str, Any]:
    """What a cell is compared with does not depend on its schedule."""
    return on_one_device(Path("unused"), Cell("", 1, accumulate, body).arguments(1))


@pytest.mark.parametrize("name", MATRIX)
def test_two_stages_are_as_one_device_but_for_rounding(two, name):
    assert_same(one_device_of(MATRIX[name].body, MATRIX[name].accumulate), two[name], 1e-6)


@pytest.mark.parametrize("name", FOUR)
def test_four_stages_are_as_one_device_but_for_rounding(four, name):
    assert_same(one_device_of(FOUR[name].body, FOUR[name].accumulate), four[name], 1e-6)


@pytest.mark.parametrize("name", MATRIX)
def test_two_stages_are_as_a_loop_over_the_same_microbatches_to_the_last_bit(two, name):
    [first, _] = two[name]
    assert not differences(by_hand(MATRIX[name], first["plan"]), first["state"]["weights"])


@pytest.mark.parametrize("name", FOUR)
def test_four_stages_are_as_a_loop_over_the_same_microbatches_to_the_last_bit(four, name):
    first = four[name][0]
    assert not differences(by_hand(FOUR[name], first["plan"]), first["state"]["weights"])


def test_layers_of_other_ranks_take_no_memory(two, four):
    for name, cell in FOUR.items():
        for ranks in (two[name], four[name]):
            counts = [result["plan"]["num_foreign"] for result in ranks]
            num_parameters = len(list(Net(cell.body).parameters()))
            assert sum(num_parameters - count for count in counts) == num_parameters


# Models, callbacks and loops of one's own ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_what_users_do_gives_what_it_gives_on_one_device_to_the_last_bit(two, tmp_path, name):
    arguments = {"logs": name in LOGGED, **EXACT[name], "microbatches": 2}
    assert_same(on_one_device(tmp_path, arguments), two[name])


@pytest.mark.parametrize("name", CLOSE)
def test_what_users_do_gives_what_it_gives_on_one_device_but_for_rounding(two, tmp_path, name):
    # Float64, and weights of about 1 after 4 steps.
    arguments = {"logs": name in LOGGED, "precision": "64-true", **CLOSE[name]}
    assert_same(on_one_device(tmp_path, arguments), two[name], 1e-12)


@pytest.mark.parametrize("name", LOW)
def test_low_precision_differs_by_its_own_roundings(two, tmp_path, name):
    # bfloat16 has 8 bits and float16 has 11; gradients of about 0.1, steps of 0.05, 4 of them.
    allowed = 2e-3 if "bf16" in name else 5e-4
    assert_same(on_one_device(tmp_path, {**LOW[name], "microbatches": 2}), two[name], allowed)


def test_an_overflow_on_the_rank_that_has_the_layer_is_skipped_by_all(two):
    for name in ("overflow", "overflow, fused"):
        for result in two[name]:
            assert result["seen"] == [1024.0, 512.0, 512.0, 1024.0]


def test_dropout_is_the_same_for_any_number_of_stages(two, four):
    first = two["dropping"][0]
    for other in [two["dropping"][1], *four["dropping"]]:
        assert not differences(first["losses"], other["losses"])
        assert not differences(first["state"]["weights"], other["state"]["weights"])


def test_losses_that_cannot_be_split_are_said_to_be_so_once(two):
    for name, reason in [("augmented, fused", "drawn anew"), ("no mean, fused", "not the mean")]:
        said = [text for text in two[name][0]["said"] if "backward begins after all forwards" in text]
        assert len(said) == 1
        assert reason in said[0]


def test_schedules_that_begin_backward_early_do(two):
    names = ["all calls, fused", "dictionary, fused", "counting, fused", "recomputed, fused", "around, fused"]
    names += ["16-mixed, clipped, fused", "head frozen in a step, fused"]
    names += [name for name, cell in MATRIX.items() if cell.schedule in ("1f1b", "zbv")]  # accumulated too
    assert [two[name][0]["plan"]["why_split"] for name in names] == [None] * len(names)


def test_statistics_of_batches_are_warned_of_once(two):
    said = [text for text in two["statistics of batches"][0]["said"] if "normalise over a batch" in text]
    assert len(said) == 1
    assert "2 microbatches" in said[0]


def test_a_last_batch_too_small_for_statistics_of_microbatches_is_trained_on(two):
    assert [len(result["losses"]) for result in two["too small for statistics"]] == [4, 4]


def test_modes_that_a_step_changes_are_put_back(two):
    for plain, fused in zip(two["modes, plain"], two["modes, fused"], strict=True):
        assert not differences(plain["losses"], fused["losses"])


def test_batches_are_echoed_in_a_pipeline_or_it_is_said_that_they_cannot_be(two):
    errors = [result["error"] for result in two.of("echoed", range(2))]
    assert errors == [None, None] or all("BatchEcho" in error["text"] for error in errors)


def test_a_pipeline_can_be_watched(two):
    plain, watched = (two[name][0]["state"]["weights"] for name in ("float32", "monitored"))
    assert not differences(plain, watched)


# Refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pipeline_cannot_do_is_refused_on_all_ranks(two, name):
    for result in two.of(name, range(2)):
        assert result["error"]["type"] in ("ScheduleError", "ValueError")
        for part in REFUSED[name][1]:
            assert part in result["error"]["text"]


# Replicas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPLICAS)
def test_two_replicas_of_two_stages_are_as_one_device_with_twice_the_batch(four, tmp_path, name):
    sizes = {"sizes": (samples_of_replicas(name), 16), "val_sizes": (16, 16)}
    arguments = {"precision": "64-true", **sizes, **REPLICAS[name]}
    one, ranks = on_one_device(tmp_path, arguments), four[f"replicas, {name}"]
    for rank, other in enumerate(ranks):
        weights = {key: value for key, value in one["state"]["weights"].items() if key != "shown"}  # of all samples
        found = differences(weights, {key: other["state"]["weights"][key] for key in weights}, 1e-12)
        found += differences(one["state"]["schedulers"], other["state"]["schedulers"], 1e-12)
        assert not found, f"rank {rank}, {len(found)} differences:\n" + "\n".join(found[:8])
        found = differences(ranks[0]["state"]["weights"], other["state"]["weights"])
        assert not found, f"rank {rank} and rank 0, {len(found)} differences:\n" + "\n".join(found[:8])
        assert one["state"]["global_step"] == other["state"]["global_step"]
        for key in ("mean", "mean_epoch", "val", "total", "samples", "val_samples", "error_epoch", "largest"):
            if key in one["metrics"]:
                assert not differences(one["metrics"][key].double(), other["metrics"][key].double(), 1e-6), key


def test_ranks_of_all_replicas_decide_together(four):
    assert [result["seen"] for result in four["replicas, idle"]] == [[False, True, True, False]] * 4


def test_statistics_of_batches_are_those_of_the_first_replica_in_validation(four):
    first, *others = (result["state"]["weights"] for result in four["statistics of replicas"])
    assert any("running_mean" in name for name in first)
    for other in others:
        assert not differences(first, other)


def test_shuffled_replicas_see_each_sample_once_and_ranks_of_a_pipeline_the_same(four):
    results = four["shuffled replicas"]
    for pair in (results[:2], results[2:]):
        assert not differences(pair[0]["losses"], pair[1]["losses"])
    assert differences(results[0]["losses"], results[2]["losses"])
    assert len(results[0]["losses"]) == 6
    for result in results[1:]:
        assert not differences(results[0]["state"]["weights"], result["state"]["weights"])


def test_a_replica_may_be_in_split_phases_alone(four):
    plain, fused = four["one-sided, plain"], four["one-sided, fused"]
    assert [result["plan"]["why_split"] is None for result in fused] == [True, True, False, False]
    for one, other in zip(plain, fused, strict=True):
        assert not differences(one["losses"], other["losses"], 1e-12)
        assert not differences(one["state"]["weights"], other["state"]["weights"], 1e-12)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def relative(value: Any, folder: str) -> Any:
    """A checkpoint without the place where it was written."""
    if isinstance(value, Mapping):
        return {key: relative(one, folder) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [relative(one, folder) for one in value]
    return value.replace(folder, "") if isinstance(value, str) else value


def checkpoint(file: Path) -> dict[str, Any]:
    """All that is in it."""
    return relative(torch.load(file, weights_only=False), str(file.parent))


def test_checkpoints_are_those_of_one_device_to_the_last_bit(two, folder):
    names = sorted(file.name for file in (folder / "one").glob("*.ckpt"))
    assert names == [f"step={step}.ckpt" for step in range(1, 9)]
    for name in names:
        found = differences(checkpoint(folder / "one" / name), checkpoint(two.folder / "saved" / name))
        assert not found, f"{name}, {len(found)} differences:\n" + "\n".join(line[:300] for line in found[:8])


def test_what_is_saved_after_a_training_is_that_of_one_device_too(two, folder):
    one, ours = (torch.load(folder / name, weights_only=False) for name in ("after, one.ckpt", "after.ckpt"))
    found = differences(relative(one, str(folder / "one")), relative(ours, str(two.folder / "saved")))
    assert not found, f"{len(found)} differences:\n" + "\n".join(line[:300] for line in found[:8])


@pytest.fixture(scope="module")
def resumed(folder: Path, two: Ranks) -> dict[str, Any]:
    """On one device from its own checkpoint: in the middle of an epoch, whose first batches come again."""
    return on_one_device(
        folder / "resumed", {**ON_ONE, "calls": [["fit", {"ckpt_path": str(folder / "one" / MIDDLE)}]]}
    )


def test_a_training_goes_on_in_two_stages_from_a_checkpoint_of_one_device(two, resumed):
    assert_same(resumed, two["from one device"])
    assert resumed["state"]["global_step"] == 8


def test_a_training_goes_on_in_four_stages_from_a_checkpoint_of_two(four, resumed):
    assert_same(resumed, four["from two stages"])


def test_a_training_goes_on_on_one_device_from_a_checkpoint_of_two_stages(two, resumed, tmp_path):
    file = two.folder / "saved" / MIDDLE
    assert_same(resumed, [on_one_device(tmp_path, {**ON_ONE, "calls": [["fit", {"ckpt_path": str(file)}]]})])


def test_a_training_with_ddp_goes_on_from_a_checkpoint_of_two_stages(two):
    ranks = [two.of(f"ddp from {which}", range(2)) for which in ("one device", "two stages")]
    for one, other in zip(*ranks, strict=True):
        assert one["error"] is other["error"] is None
        assert not differences(comparable(one), comparable(other))
        assert one["state"]["global_step"] == 8


def test_files_of_resumed_trainings_are_those_of_one_device(two, four, folder, resumed):
    for ranks, name in ((two, "from one device"), (four, "from two stages")):
        found = differences(
            checkpoint(folder / "resumed" / "step=8.ckpt"), checkpoint(ranks.folder / name / "step=8.ckpt")
        )
        assert not found, f"{name}, {len(found)} differences:\n" + "\n".join(line[:300] for line in found[:8])


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fails in a hook", "fails in training_step"])
def test_an_error_of_one_rank_ends_the_other(two, name):
    first, second = (result["error"] for result in two.of(name, range(2)))
    failing, waiting = (first, second) if name == "fails in a hook" else (second, first)
    assert failing["text"] == "an ordinary error"
    assert waiting["type"] == "SyncError"
    assert "another rank is gone" in waiting["text"]


def test_an_error_is_not_hidden_by_one_in_saving_what_cannot_be_saved_alone(two):
    waiting, failing = two.of("fails, and is saved", range(2))
    assert "an ordinary error" in failing["error"]["text"] or "SyncError" in failing["error"]["type"]
    assert waiting["error"] is not None


def test_what_all_ranks_save_at_an_error_is_whole(two):
    saved = torch.load(two.folder / "fails on both" / "exception.ckpt", weights_only=False)
    assert not any(one.is_meta for one in saved["state_dict"].values())
    assert len(saved["optimizer_states"][0]["state"]) == len(saved["state_dict"])
    assert [result["error"]["text"] for result in two.of("fails on both", range(2))] == ["an ordinary error"] * 2


def test_a_rank_that_is_killed_ends_the_other(two):
    [waiting] = two.of("dies", [0])
    assert waiting["error"]["type"] == "SyncError"
    assert not (two.folder / "dies.1.pt").exists()


@pytest.mark.parametrize("name", ENDS_OF_REPLICAS)
def test_what_ends_a_rank_of_one_replica_ends_the_other_too(four, name):
    for result in four.of(name, range(3)):
        # In a message of the pipeline's, or in one of Lightning's for what is logged.
        assert result["error"]["type"] in ("SyncError", "RuntimeError")
        assert result["seconds"] < TIMEOUT_SECONDS


def test_batches_that_differ_in_a_pipeline_are_noticed(two):
    errors = [result["error"] for result in two.of("other batches", range(2))]
    assert "different batches" in errors[0]["text"]
    assert {error["type"] for error in errors} <= {"ScheduleError", "SyncError"}


def test_an_interruption_ends_as_on_one_device(two):
    for result in two.of("interrupted", range(2)):
        assert result["error"] == {"type": "SystemExit", "text": "1"}


# Starting ranks, and what is written down of a strategy ---------------------------------------------------------------

SCHEDULE_TEXT = "2 microbatches; stages on ranks 0 1\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_ranks_that_are_no_multiple_of_the_stages_are_refused(tmp_path):
    ranks = run(tmp_path / "three", {"three": {}}, num_ranks=3)
    for result in ranks.of("three", range(3)):
        assert result["error"]["type"] == "ValueError"
        assert "pipeline_size is 2, and there are 3 ranks" in result["error"]["text"]


def test_forked_ranks_give_the_whole_model_back(tmp_path):
    arguments = {"strategy": {**PLAIN, "start_method": "fork"}}
    plan = {
        "world_size": 2,
        "scenarios": [{"name": "forked", "arguments": arguments}],
        "out": str(tmp_path),
    }
    text = run_ranks(WORKER, plan, tmp_path, num_processes=1, limit_seconds=LIMIT_SECONDS)
    result = Ranks(tmp_path, text, 1)["forked"][0]
    one = on_one_device(tmp_path, {"microbatches": 2})
    assert not differences(one["state"]["weights"], result["state"]["weights"])
    assert not differences(one["metrics"], result["metrics"])


def test_a_strategy_can_be_sent_to_another_process():
    for schedule in ("zbv", SCHEDULE_TEXT, Schedule.parse(SCHEDULE_TEXT)):
        strategy = OutOfOrderStrategy(pipeline_size=2, schedule=schedule, pipeline_module="body")
        other = pickle.loads(pickle.dumps(strategy))
        assert type(other) is type(strategy) is PipelineStrategy
        assert other._pipeline_options == strategy._pipeline_options
        assert other._pipeline_module == "body"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")  # of its instantiators' names
@pytest.mark.parametrize("schedule", ["zero_bubble", SCHEDULE_TEXT], ids=["name", "text"])
def test_a_pipeline_from_yaml_is_the_one_that_was_written(tmp_path, schedule):
    arguments = {
        "pipeline_size": 2,
        "num_microbatches": 2,
        "schedule": schedule,
        "layers_per_stage": 3,
        "pipeline_module": "body",
        "activation_checkpointing": True,
        "memory_cap_bytes": 10**6,
    }
    config = {
        "model": {"class_path": "tests.strategies.pipeline_users.Net", "init_args": {"body": "cnn"}},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "logger": False,
            "enable_checkpointing": False,
            "strategy": {"class_path": "lightning_gpufeed.OutOfOrderStrategy", "init_args": arguments},
        },
        "seed_everything": False,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", f"--config={tmp_path / 'config.yaml'}"])
        cli = LightningCLI(Net, subclass_mode_model=True, save_config_callback=None, run=False)
    strategy: Any = cli.trainer.strategy
    assert type(strategy) is PipelineStrategy
    assert strategy._pipeline_module == "body"
    expected = PipelineOptions(2, 2, schedule, 3, 10**6, is_checkpointed=True)
    assert strategy._pipeline_options == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_size": 0}, "pipeline_size is 0; expected a whole number from 1 on"),
        ({"pipeline_size": 2, "num_microbatches": 0}, "num_microbatches is 0; expected a whole number from 1 on"),
        ({"pipeline_size": 2, "layers_per_stage": "many"}, "layers_per_stage is 'many'; expected a whole number"),
        ({"pipeline_size": 2, "schedule": "fastest"}, "schedule is 'fastest'; expected one of 'fast_forward'"),
        ({"pipeline_size": 2, "reverse_first_k": 1}, "are of data parallel training, and pipeline_size is 2"),
        ({"pipeline_size": 2, "verify_every": 1}, "are of data parallel training, and pipeline_size is 2"),
        ({"num_microbatches": 4}, "num_microbatches: of a pipeline, but pipeline_size is 1"),
        ({"schedule": "zbv"}, "schedule.*of a pipeline, but pipeline_size is 1"),
        ({"pipeline_module": "body"}, "pipeline_module.*of a pipeline, but pipeline_size is 1"),
        ({"layers_per_stage": 2}, "layers_per_stage.*of a pipeline, but pipeline_size is 1"),
        ({"activation_checkpointing": True}, "activation_checkpointing.*of a pipeline, but pipeline_size is 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(f"{name}={of}" for name, of in value.items()),
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OutOfOrderStrategy(**arguments)


def test_a_schedule_for_another_number_of_ranks_or_microbatches_is_refused():
    with pytest.raises(ScheduleError, match="for 2 ranks, and pipeline_size is 4"):
        OutOfOrderStrategy(pipeline_size=4, schedule=SCHEDULE_TEXT)
    with pytest.raises(ScheduleError, match="for 2 microbatches, and num_microbatches is 8"):
        OutOfOrderStrategy(pipeline_size=2, num_microbatches=8, schedule=SCHEDULE_TEXT)
