"""`OutOfOrderStrategy` against Lightning's `DDPStrategy`, on real processes in a real group (gloo, on the CPU).

Starting ranks takes seconds, so they are started once for each size of a group and do everything; the tests read what
they wrote down. With two ranks everything is compared to the last bit, for a sum of two numbers has one order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.datamodules.models import make_trainer, state_of
from tests.doubles import run_ranks
from tests.strategies.sync_models import Batches, Net

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    # torch 2.11, where what a rank has saved of a sparse tensor is read.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]

WORKER = Path(__file__).with_name("sync_rank_worker.py")
LIMIT_SECONDS = 240
TIMEOUT_SECONDS = 60
"""How long a rank waits for another one before it fails."""
PROMPT_SECONDS = 30
"""What has ended sooner has not waited for that."""

# The matrix: not the full product, but every pair of values (a test counts them) -------------------------------------

MATRIX_BODIES = ["mlp", "residual", "attention", "tied", "branches", "recomputed", "recomputed reentrant"]
OPTIMIZERS = ["sgd", "foreach", "fused"]
ACCUMULATIONS = [1, 3]
PRECISIONS = ["32-true", "bf16-mixed"]
CLIPS = [None, 0.1]
VARIANTS: dict[str, dict[str, Any]] = {
    "none wait": {"reverse_first_k": 0, "cross_iteration": True, "bucket_bytes": 1},
    "two wait": {"reverse_first_k": 2, "cross_iteration": True, "bucket_bytes": 700},
    "all wait": {"reverse_first_k": "all", "cross_iteration": True, "bucket_bytes": 1},
    "cut": {"reverse_first_k": "all", "cross_iteration": True, "bucket_bytes": 300, "cuts": True},
    "within the step": {"reverse_first_k": "all", "cross_iteration": False, "bucket_bytes": 300},
    "found, crossing": {"cross_iteration": True},
}
AUTO = "found"
CROSSING = VARIANTS["all wait"]


@dataclass(frozen=True)
class Setting:
    """One training of the matrix, whatever the strategy is."""

    body: str
    optimizer: str
    accumulate: int
    precision: str
    clip: float | None
    is_long: bool = False

    @property
    def name(self) -> str:
        clip = "clipped" if self.clip else "free"
        return f"{self.body}, {self.optimizer}, {self.accumulate}, {self.precision}, {clip}{', long' * self.is_long}"

    @property
    def arguments(self) -> dict[str, Any]:
        # Two epochs of 4 steps, of 3 windows, as fewer settle no plan that crosses; or of 28, as one that has to find a
        # plan takes up to 50. Some windows are not full.
        batches = {(1, False): 4, (3, False): 8, (1, True): 28, (3, True): 82}[self.accumulate, self.is_long]
        return {
            "net": {"body": self.body, "optimizer": self.optimizer},
            "batches": batches,
            "accumulate_grad_batches": self.accumulate,
            "precision": self.precision,
            "gradient_clip_val": self.clip,
            "find_unused_parameters": self.body == "branches",
            "saves": {"every_n_train_steps": 20 if self.is_long else 3},
            # All short ones log, which takes half of a step; of the long ones, which search for a plan, one does.
            "logs": not self.is_long or self.body == "residual",
        }


def settings_of(i: int, body: str) -> list[Setting]:
    """Three short ones and a long one of a body."""

    def setting(j: int, clip: float | None, is_long: bool = False) -> Setting:
        optimizer, precision = OPTIMIZERS[(i + j) % 3], PRECISIONS[((i == 5) + j) % 2]
        if clip and optimizer == "fused":  # Lightning refuses it in mixed precision
            precision = PRECISIONS[0]
        accumulate = ACCUMULATIONS[(i + j + (is_long and not i)) % 2]
        return Setting(body, optimizer, accumulate, precision, clip, is_long)

    return [setting(0, None), setting(1, None), setting(2, 0.1), setting(i, None, is_long=True)]


def matrix() -> list[tuple[Setting, str]]:
    """Which variant of the strategy runs in which setting."""
    cells = []
    names = list(VARIANTS)
    for i, body in enumerate(MATRIX_BODIES):
        short = settings_of(i, body)
        for j in range(len(names)):
            cells.append((short[j // 2], names[(i + j) % len(names)]))
        cells.append((short[3], AUTO))
        if i < 2:
            cells.append((short[2], AUTO))
    return cells


MATRIX = {f"{setting.name}: {variant}": (setting, variant) for setting, variant in matrix()}

# Beside it: each is run with both strategies ------------------------------------------------------------------------

# Two epochs of 3 batches, if nothing else is said: a step after none, after a first, after another, and over the end.
FIVE = {"batches": 5}
PAIRS: dict[str, dict[str, Any]] = {
    # Other ways in which a parameter is used.
    "tied function": {"net": {"body": "tied function"}},
    "tied function, window": {"net": {"body": "tied function"}, "batches": 6, "accumulate_grad_batches": 3},
    "recurrent": {"net": {"body": "recurrent", "optimizer": "foreach"}},
    "listed": {"net": {"body": "listed", "has_own": True}},
    "penalty": {"net": {"body": "penalty"}},
    "penalty, window": {"net": {"body": "penalty"}, "batches": 6, "accumulate_grad_batches": 3},
    "repeated": {"net": {"body": "repeated"}},
    "repeated, window": {"net": {"body": "repeated"}, "batches": 6, "accumulate_grad_batches": 3},
    "parametrized": {"net": {"body": "parametrized"}},
    "sparse": {"net": {"body": "sparse", "optimizer": "sgd for sparse"}},
    "sparse, window": {
        "net": {"body": "sparse", "optimizer": "sgd for sparse"},
        "batches": 6,
        "accumulate_grad_batches": 3,
    },
    "two types": {"net": {"body": "two types", "optimizer": "foreach"}},
    "channels last": {"net": {"body": "channels last", "optimizer": "fused"}},
    "frozen": {"net": {"body": "frozen"}},
    "empty": {"net": {"body": "empty"}},
    "bf16": {"precision": "bf16-true", "net": {"optimizer": "foreach"}},
    "f64": {"precision": "64-true"},
    "deepening": {"net": {"body": "deepening"}},
    "sometimes penalty": {"net": {"body": "sometimes penalty"}},
    "gradient penalty": {"net": {"body": "gradient penalty"}},
    "inner backward": {"net": {"body": "inner"}},
    "momentum": {"net": {"body": "momentum"}},
    "functional": {"net": {"body": "functional"}},
    "strange": {"net": {"body": "strange", "optimizer": "foreach"}},
    "strided": {"net": {"body": "strided"}},
    "complex": {"net": {"body": "complex"}},
    # Optimizers, schedulers, steps of one's own.
    "LBFGS": {"net": {"optimizer": "LBFGS", "scheduler": None}},
    "plateau": {"net": {"scheduler": "plateau"}},
    "tensor rate": {"module": "TensorRate"},
    "warm-up": {"module": "ReducedRate", "net": {"scheduler": None, "optimizer": "foreach"}, **FIVE},
    "hooked": {"module": "Hooked"},
    "scaled gradients": {"module": "ScaledGradients"},
    "clipped by hand": {"module": "ClippedByHand"},
    "clipped by torch": {"module": "ClippedByTorch"},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clipped by value, unused": {
        "net": {"body": "branches"},
        "find_unused_parameters": True,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
        **FIVE,
    },
    "skipping": {"module": "Skipping", **FIVE},
    "zeroing": {"module": "Zeroing", "callbacks": [["reader", "gradients", "on_before_zero_grad"]]},
    "zeroing, unused": {
        "module": "Zeroing",
        "net": {"body": "branches", "optimizer": "foreach"},
        "find_unused_parameters": True,
        **FIVE,
    },
    # Where memory that is not written yet holds NaN, and NaN is looked for.
    "anomaly": {"detect_anomaly": True, "deterministic": True},
    # Lightning's callbacks.
    "ema": {"net": {"body": "residual"}, "callbacks": [["ema"]], "validation": True, "saves": {"every_n_epochs": 1}},
    "swa": {"net": {"body": "residual", "scheduler": None}, "callbacks": [["swa"]], "max_epochs": 3},
    "rates": {"callbacks": [["rates"]], "logger": True},
    "early": {"callbacks": [["early"]], "validation": True, "max_epochs": 4},
    "accumulation": {"callbacks": [["accumulation"]], **FIVE},
    "saver": {"callbacks": [["saver"]]},
    # Validation in the middle of an epoch, and twice the same Trainer.
    "validation": {
        "net": {"body": "residual", "optimizer": "foreach"},
        "validation": True,
        "val_check_interval": 2,
        **FIVE,
        "num_sanity_val_steps": 1,
        "saves": {"every_n_train_steps": 1},
    },
    "validation, window": {
        "net": {"body": "residual"},
        "validation": True,
        "val_check_interval": 2,
        "batches": 8,
        "accumulate_grad_batches": 3,
    },
    "twice": {"num_fits": 2},
    "last step": {"max_steps": 7, **FIVE},
    "own backward": {"module": "OwnBackward"},
    "edited weights": {"callbacks": [["editor", "weights"]]},
    "edited state": {"callbacks": [["editor", "state"]], "net": {"scheduler": None}},
    "edited gradients": {"callbacks": [["editor", "gradients"]]},
    "pruning": {"callbacks": [["pruning"]]},
    "rate finder": {"module": "Rated", "callbacks": [["rate finder"]], **FIVE},
    # Manual optimization.
    "manual": {"module": "Manual"},
    "manual, window": {"module": "Manual", "net": {"accumulates": True}, "batches": 6},
    "gan": {"module": "Gan", "find_unused_parameters": True, "net": {"toggles": True}},
    "gan, all": {"module": "Gan", "find_unused_parameters": True, "net": {"toggles": False}},
}
# Looking changes nothing, so one training with DDP has all looks; in ours each may have to wait, and is alone.
LOOKS = [
    ["reader", "gradients", "on_after_backward"],
    ["reader", "gradients", "on_before_optimizer_step"],
    ["reader", "gradients", "on_train_batch_end"],
    ["reader", "gradients", "on_train_batch_start"],
    ["reader", "norm", "on_before_optimizer_step"],
    ["reader", "weights", "on_train_batch_end"],
    ["reader", "weights", "on_train_batch_start"],
    ["reader", "weights", "on_before_zero_grad"],
    ["reader", "state", "on_train_batch_end"],
    ["reader", "copy", "on_train_batch_end"],
]
READS = {f"{what} {hook}": {"callbacks": [[name, what, hook]]} for name, what, hook in LOOKS}
OTHER_OPTIMIZERS = ["NAdam", "Rprop", "Adagrad", "ASGD"]
PAIRS |= {f"by {name}": {"net": {"optimizer": name, "scheduler": None}} for name in OTHER_OPTIMIZERS}

# These log in training too, as all of the matrix do: what is logged may depend on them, or they on it.
LOGGED = {
    *("plateau", "rates", "accumulation", "validation", "validation, window", "twice", "last step", "rate finder"),
    *("penalty, window", "recurrent", "ema", "early", "manual", "manual, window", "saver", "zeroing, unused"),
}

# Clipping by norm that overlaps. Where the norm is below the limit gradients are multiplied by one.
OVERLAPPING = {"reverse_first_k": 2, "cross_iteration": True, "bucket_bytes": 300, "overlap_clipping": True}
FAR, NEAR = {"gradient_clip_val": 1e6}, {"gradient_clip_val": 0.1}
OVERLAPPED: dict[str, dict[str, Any]] = {
    "mlp": {"net": {"body": "mlp", "optimizer": "foreach"}},
    "residual, window": {"net": {"body": "residual"}, "batches": 5, "accumulate_grad_batches": 3},
    "attention": {"net": {"body": "attention", "optimizer": "sgd"}},  # Adam makes weights of mere rounding
    "tied": {"net": {"body": "tied", "optimizer": "foreach"}, "precision": "bf16-mixed"},
    "branches": {"net": {"body": "branches"}, "find_unused_parameters": True, **FIVE},
    "recomputed": {"net": {"body": "recomputed"}, "saves": {"every_n_train_steps": 3}},
    "f64": {"precision": "64-true"},
    "verified": {"net": {"body": "mlp"}, **FIVE},
    "cut": {"net": {"body": "tied"}},
    "norms are looked at": {"callbacks": [["reader", "norm", "on_before_optimizer_step"]]},
    "validation": {"net": {"body": "residual"}, "validation": True, "val_check_interval": 2, **FIVE},
}
NEAR_ONLY = {"by hand": {"module": "ClippedByHand"}, "by torch": {"module": "ClippedByTorch"}}
SPECIAL = {"verified": {**OVERLAPPING, "verify_every": 2}, "cut": {**OVERLAPPING, "cuts": True}}

# What is compared to something else than the same with DDP.
UNFREEZE = {"net": {"scheduler": None, "optimizer": "trainable"}, "callbacks": [["unfreeze"]], "batches": 4}
REDUCED_BY_HAND = {**UNFREEZE, "callbacks": [["unfreeze"], ["reduce by hand"]]}
BY_HAND = {"module": "Manual", "net": {"calls_backward": True}}
BY_HAND_IN_WINDOWS = {"module": "Manual", "net": {"calls_backward": True, "accumulates": True}, "batches": 6}

# Trainings that go on in the middle of an epoch, from a checkpoint of another strategy.
SAVED = {"net": {"body": "residual", "optimizer": "foreach"}, "saves": {"every_n_train_steps": 4}, **FIVE}
STRATEGIES: dict[str, dict[str, Any] | None] = {"ddp": None, "ours": CROSSING}
SAVED_STEP = "step=4.ckpt"

# On more ranks than two a sum has several orders: float32, 10 steps of SGD with gradients and weights of about 1.
CLOSE = 1e-5
MORE: dict[str, dict[str, Any]] = {
    "mlp": {"net": {"body": "mlp"}, **FIVE},
    "residual": {"net": {"body": "residual"}, "accumulate_grad_batches": 3, "batches": 5},
    "branches": {"net": {"body": "branches"}, "find_unused_parameters": True, **FIVE},
    "clipped": {"net": {"body": "recomputed"}, "gradient_clip_val": 0.1, **FIVE},
}

# How many ranks there are matters to none of them but by the order of a sum: odd numbers and even ones have some each.
MORE_ON = {3: ["residual", "clipped", "found"], 4: ["mlp", "branches"]}

# A norm that is summed in another order is some units in the last place of float32 off.
OVERLAP_CLOSE = 1e-6

# How trainings end.
SAVED_AT_ERROR = {
    "net": {"body": "residual", "optimizer": "foreach"},
    "callbacks": [["death", "on_train_batch_start", "error", 0, 1], ["saves errors"]],
    **FIVE,
}
ENDS: dict[str, dict[str, Any]] = {
    "unused": {"net": {"body": "branches"}},
    "unused, found": {"net": {"body": "branches"}, "strategy": {}},
    "unused on one rank": {"module": "Quiet", "net": {"body": "one-sided"}},
    "fails in forward": {"module": "Quiet", "callbacks": [["death", "on_train_batch_start", "error"]]},
    "fails after backward": {"module": "Quiet", "callbacks": [["death", "on_after_backward", "error"]]},
    "fails at the end": {"callbacks": [["death", "on_train_batch_end", "error"]]},
    "dies": {"module": "Quiet", "callbacks": [["death", "on_before_optimizer_step", "exit"]]},
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

    def checkpoints(self, name: str) -> dict[str, Any]:
        """All that a training has saved, by file."""
        folder = self.folder / name
        files = sorted(folder.glob("*.ckpt"))
        return {file.name: relative(torch.load(file, weights_only=False), str(folder)) for file in files}


def relative(value: Any, folder: str) -> Any:
    """A checkpoint without the place where it was written."""
    if isinstance(value, Mapping):
        return {key: relative(one, folder) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [relative(one, folder) for one in value]
    return value.replace(folder, "") if isinstance(value, str) else value


def run(folder: Path, scenarios: list[dict[str, Any]], num_ranks: int) -> Ranks:
    plan = {"world_size": num_ranks, "scenarios": scenarios, "out": str(folder), "timeout_seconds": TIMEOUT_SECONDS}
    text = run_ranks(WORKER, plan, folder, num_processes=num_ranks, limit_seconds=LIMIT_SECONDS)
    return Ranks(folder, text, num_ranks)


def scenario(name: str, strategy: dict[str, Any] | None, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "arguments": {**arguments, "strategy": strategy}}


def both(name: str, arguments: dict[str, Any], options: dict[str, Any] = CROSSING) -> Iterator[dict[str, Any]]:
    yield scenario(f"{name}, ddp", None, arguments)
    yield scenario(f"{name}, ours", options, arguments)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("two")
    scenarios = [*scenarios_of_users(), *scenarios_of_matrix(), *scenarios_of_checkpoints(folder), *scenarios_of_ends()]
    return run(folder, scenarios, num_ranks=2)


def scenarios_of_users() -> list[dict[str, Any]]:
    return [
        *(one for name, arguments in PAIRS.items() for one in both(name, {"logs": name in LOGGED, **arguments})),
        *scenarios_of_clipping(),
        scenario("all looks, ddp", None, {"callbacks": LOOKS}),
        *(scenario(f"read {name}, ours", CROSSING, arguments) for name, arguments in READS.items()),
        scenario("unfreeze, reduced by hand", None, REDUCED_BY_HAND),
        scenario("unfreeze, ours", VARIANTS["two wait"], UNFREEZE),
        scenario("by hand, ours", CROSSING, BY_HAND),
        scenario("by hand, window, ours", CROSSING, BY_HAND_IN_WINDOWS),
    ]


def scenarios_of_clipping() -> list[dict[str, Any]]:
    overlapped = [(name, {**arguments, **NEAR}) for name, arguments in OVERLAPPED.items()]
    overlapped += [*NEAR_ONLY.items(), *((f"{name}, far", one | FAR) for name, one in OVERLAPPED.items())]
    return [
        one
        for name, arguments in overlapped
        for one in both(f"overlapped, {name}", arguments, SPECIAL.get(name.split(",")[0], OVERLAPPING))
    ]


def scenarios_of_matrix() -> list[dict[str, Any]]:
    references = {setting.name: setting for setting, _ in MATRIX.values()}
    return [
        *(scenario(name, None, setting.arguments) for name, setting in references.items()),
        *(scenario(name, VARIANTS.get(variant, {}), setting.arguments) for name, (setting, variant) in MATRIX.items()),
    ]


def scenarios_of_checkpoints(folder: Path) -> list[dict[str, Any]]:
    train_on_one_device(folder / "first, single", None)
    scenarios = list(both("first", SAVED))
    for first in ("single", *STRATEGIES):
        file = str(folder / f"first, {first}" / SAVED_STEP)
        scenarios += [
            scenario(f"{first}, then {second}", options, {**SAVED, "resume": file})
            for second, options in STRATEGIES.items()
        ]
    return scenarios


def scenarios_of_ends() -> list[dict[str, Any]]:
    return [
        *both("saved at an error", SAVED_AT_ERROR),
        *(scenario(name, arguments.get("strategy", CROSSING), FIVE | arguments) for name, arguments in ENDS.items()),
    ]


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    found = {}
    for num_ranks, names in MORE_ON.items():
        scenarios = [one for name in names if name in MORE for one in both(name, MORE[name])]
        if "found" in names:
            scenarios.append(scenario("found, ours", {}, {"batches": 28, "logs": False}))
        found[num_ranks] = run(tmp_path_factory.mktemp("more"), scenarios, num_ranks)
    return found


def train_on_one_device(folder: Path, resume: Path | None) -> dict[str, Any]:
    """Plain Lightning, in this process."""
    model = Net(**SAVED["net"])
    callback = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", **SAVED["saves"])
    trainer = make_trainer(max_epochs=2, enable_checkpointing=True, callbacks=[callback])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no validation, the folder is another one
        trainer.fit(model, Batches("residual", 5, 0), ckpt_path=resume, weights_only=False)
    return state_of(trainer, model)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two nests of tensors, numbers and containers are not equal to the last bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype == other.dtype and one.shape == other.shape and one.layout == other.layout:
            if one.layout != torch.strided:
                one, other = one.coalesce().to_dense(), other.coalesce().to_dense()
            if torch.equal(one, other):
                return []
            return [f"{path}: by {float((one.double() - other.double()).abs().max()):.2g}"]
        return [f"{path}: {one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}"]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if list(one) != list(other):
            return [f"{path}: {list(one)}, {list(other)}"]
        return [line for key in one for line in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} of them"]
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{path}.{i}")
        ]
    return [] if type(one) is type(other) and one == other else [f"{path}: {one!r}, {other!r}"]


COMPARED = ("state", "rows", "losses", "metrics", "seen", "logged", "ends", "gradients", "average")


def assert_same(ranks: Ranks, plain: str, ours: str, compared: tuple[str, ...] = COMPARED) -> list[dict[str, Any]]:
    """All that is left of two trainings, on each rank, and every checkpoint of them."""
    results = ranks[ours]
    for rank, (one, other) in enumerate(zip(ranks[plain], results, strict=True)):
        for what in compared:
            found = differences(one.get(what), other.get(what), what)
            assert not found, f"rank {rank}, {len(found)} differences:\n" + "\n".join(found[:8])
        assert other["types"] == one["types"]
        assert other["left"] <= one["left"], "hooks or forwards are left on the model"
    found = differences(ranks.checkpoints(plain), ranks.checkpoints(ours), "checkpoints")
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:8])
    return results


def crossed(result: dict[str, Any]) -> bool:
    """Whether updates were on their way when a step was over."""
    return any(result["sync"]["num_pending"])


# The matrix ----------------------------------------------------------------------------------------------------------


def test_every_pair_of_values_is_in_the_matrix():
    values = [
        [setting.body, setting.optimizer, setting.accumulate, setting.precision, setting.clip, variant]
        for setting, variant in MATRIX.values()
    ]
    factors: list[list[Any]] = [MATRIX_BODIES, OPTIMIZERS, ACCUMULATIONS, PRECISIONS, CLIPS, [*VARIANTS, AUTO]]
    for first, second in combinations(range(len(factors)), 2):
        found = {(row[first], row[second]) for row in values}
        missing = {(one, other) for one in factors[first] for other in factors[second]} - found
        assert not missing


@pytest.mark.parametrize("name", MATRIX)
def test_everything_is_as_with_ddp_to_the_last_bit(two, name):
    setting, variant = MATRIX[name]
    results = assert_same(two, setting.name, name)
    for result in results:
        is_tried = variant in (AUTO, "found, crossing") and setting.clip is not None
        assert result["sync"]["is_settled"] or (is_tried and not setting.is_long)
        if variant != AUTO:
            is_crossing = setting.clip is None and variant != "within the step"
            assert crossed(result) == is_crossing


# Models, callbacks and loops of one's own ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PAIRS])
def test_what_users_do_gives_what_it_gives_with_ddp_to_the_last_bit(two, name):
    assert_same(two, f"{name}, ddp", f"{name}, ours")


def test_clipping_by_value_waits_for_nothing(two):
    assert all(crossed(result) for result in two["clipped by value, ours"])


@pytest.mark.parametrize("name", OVERLAPPED)
def test_clipping_that_overlaps_has_the_bits_of_ddp_where_it_multiplies_by_one(two, name):
    results = assert_same(two, f"overlapped, {name}, far, ddp", f"overlapped, {name}, far, ours")
    for result in results:
        assert crossed(result) == (name != "norms are looked at")


@pytest.mark.parametrize("name", [*OVERLAPPED, *NEAR_ONLY])
def test_clipping_that_overlaps_is_that_of_ddp_but_for_the_rounding_of_the_norm(two, name):
    ours = two[f"overlapped, {name}, ours"]
    assert not differences(trained(ours[0]), trained(ours[1]))
    for plain, one in zip(two[f"overlapped, {name}, ddp"], ours, strict=True):
        for key, value in plain["state"]["weights"].items():
            atol = OVERLAP_CLOSE * float(value.abs().max())
            torch.testing.assert_close(one["state"]["weights"][key], value, rtol=OVERLAP_CLOSE, atol=atol)


@pytest.mark.parametrize("name", READS)
def test_what_is_looked_at_in_a_hook_is_what_it_is_with_ddp_to_the_last_bit(two, name):
    results = assert_same(two, "all looks, ddp", f"read {name}, ours", tuple(one for one in COMPARED if one != "seen"))
    for plain, ours in zip(two["all looks, ddp"], results, strict=True):
        expected = [look for look in plain["seen"] if look[0] == name]
        assert expected
        assert not differences(expected, ours["seen"])


def test_a_backward_that_the_user_calls_himself_is_reduced_too(two):
    assert_same(two, "manual, ddp", "by hand, ours")
    assert_same(two, "manual, window, ddp", "by hand, window, ours")


def test_layers_that_are_unfrozen_later_are_reduced_from_then_on(two):
    # DDP forgets them: their gradients stay each rank's own. What is meant is what it gives with means taken by hand.
    assert_same(two, "unfreeze, reduced by hand", "unfreeze, ours")


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", STRATEGIES)
@pytest.mark.parametrize("first", STRATEGIES)
def test_a_training_goes_on_from_any_checkpoint_of_either_strategy(two, first, second):
    results = assert_same(two, "ddp, then ddp", f"{first}, then {second}")
    assert results[0]["state"]["global_step"] == 10
    assert crossed(results[0]) == (second == "ours")


def test_a_training_goes_on_from_a_checkpoint_of_one_device(two):
    assert_same(two, "single, then ddp", "single, then ours")


def test_a_training_on_one_device_goes_on_from_a_checkpoint(two, tmp_path):
    states = [
        train_on_one_device(tmp_path / first, two.folder / f"first, {first}" / SAVED_STEP) for first in STRATEGIES
    ]
    assert not differences(*states)


# More ranks ----------------------------------------------------------------------------------------------------------


def trained(result: dict[str, Any]) -> dict[str, Any]:
    """Without statistics, which are each rank's own until they are sent."""
    weights = {name: one for name, one in result["state"]["weights"].items() if name in result["gradients"]}
    return {**result["state"], "weights": weights}


def test_every_training_is_made_by_more_ranks():
    assert sorted(name for names in MORE_ON.values() for name in names) == sorted([*MORE, "found"])


@pytest.mark.parametrize(("num_ranks", "name"), [(number, name) for number, names in MORE_ON.items() for name in names])
def test_all_ranks_are_equal_to_the_last_bit(more, num_ranks, name):
    first, *others = more[num_ranks][f"{name}, ours"]
    for other in others:
        assert not differences(trained(first), trained(other))


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(number, name) for number, names in MORE_ON.items() for name in names if name in MORE]
)
def test_more_ranks_are_as_with_ddp_but_for_rounding(more, num_ranks, name):
    ranks = more[num_ranks]
    for plain, ours in zip(ranks[f"{name}, ddp"], ranks[f"{name}, ours"], strict=True):
        for key, value in plain["state"]["weights"].items():
            torch.testing.assert_close(ours["state"]["weights"][key], value, rtol=CLOSE, atol=CLOSE)


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unused", "unused, found"])
def test_an_unused_parameter_is_an_error_that_names_it(two, name):
    for rank, part in enumerate(["body.left", "body.right"]):
        error = two.of(name, [rank])[0]["error"]
        assert error["type"] == "SyncError"
        assert f"on rank {rank}" in error["text"]
        assert part in error["text"]
        assert "find_unused_parameters=True" in error["text"]


def test_a_parameter_that_is_unused_on_one_rank_ends_both(two):
    waiting, failing = (result["error"] for result in two.of("unused on one rank", range(2)))
    assert "body.extra" in failing["text"]
    assert waiting is not None


@pytest.mark.parametrize("name", ["fails in forward", "fails after backward", "fails at the end"])
def test_an_error_of_one_rank_ends_the_other_soon(two, name):
    waiting, failing = two.of(name, range(2))
    assert failing["error"]["text"] == "an ordinary error"
    assert waiting["error"] is not None
    assert waiting["seconds"] < PROMPT_SECONDS


def test_a_rank_that_is_killed_ends_the_other_soon(two):
    [waiting] = two.of("dies", [0])
    assert waiting["error"] is not None
    assert waiting["seconds"] < PROMPT_SECONDS
    assert not (two.folder / "dies.1.pt").exists()


def test_what_is_saved_at_an_error_of_all_ranks_has_all_updates(two):
    saved = [two.checkpoints(f"saved at an error, {which}") for which in ("ddp", "ours")]
    assert not differences(*saved)
    assert saved[1]["last.ckpt"]["global_step"] == 3
    for one, other in zip(*(two.of(f"saved at an error, {which}", range(2)) for which in ("ddp", "ours")), strict=True):
        assert not differences(one["state"], other["state"])


@pytest.mark.parametrize("name", ENDS)
def test_a_model_is_an_ordinary_one_after_an_error(two, name):
    for result in two.of(name, [0] if name == "dies" else [0, 1]):
        assert result["types"] == ["Parameter"]
        assert result["left"] == 0
