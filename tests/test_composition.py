"""Every pair of parts, and all that go together, on 1, 2 and 4 ranks: what they promise, or an error at start.

Real processes in real groups (gloo, on the CPU). Starting ranks takes seconds, so each number of ranks is started once
and trains all cells; the tests read what the ranks wrote down. Parts are letters, see `composition_models`.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.composition_models import ECHO, NUM_TRAIN, NUM_VAL, middle_of, num_replicas_of
from tests.datamodules.models import same_bits, write_images
from tests.doubles import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

LIMIT_SECONDS = 240
BITWISE, ROUNDING = "bitwise", "rounding"
TWO_ECHOES = "Found more than one stateful callback of type `BatchEcho`"
AGAIN = (
    "OOMRecovery cannot work here: OutOfOrderStrategy sends gradients while backward still runs, and a second attempt"
)
IN_STEP = "OOMRecovery cannot work here: with pipeline_size the ranks of a model send each other activations"
ONE_RANK = "pipeline_size is 2, and there are 1 ranks"

# (parts, number of ranks): the bits of plain Lightning or of what the part stands for; the same up to rounding; or the
# text of the error at start. Sums over four ranks are rounded in another order than DDP's by S, and by R where it
# reduces gradients after backward.
CELLS: dict[tuple[str, int], str] = {
    (parts, world_size): expected
    for parts, *row in [
        ("D", BITWISE, BITWISE, BITWISE),
        ("E", BITWISE, BITWISE, BITWISE),
        ("A", BITWISE, BITWISE, BITWISE),
        ("R", BITWISE, BITWISE, ROUNDING),
        ("M", BITWISE, BITWISE, BITWISE),
        ("S", BITWISE, BITWISE, ROUNDING),
        ("P", ONE_RANK, BITWISE, BITWISE),
        ("D E", BITWISE, BITWISE, None),
        ("D A", BITWISE, BITWISE, None),
        ("D R", BITWISE, BITWISE, None),
        ("D M", BITWISE, BITWISE, None),
        ("D S", BITWISE, BITWISE, None),
        ("D P", ONE_RANK, BITWISE, BITWISE),
        ("E A", TWO_ECHOES, TWO_ECHOES, None),
        ("E R", BITWISE, BITWISE, None),
        ("E M", BITWISE, BITWISE, None),
        ("E S", BITWISE, BITWISE, None),
        ("E P", ONE_RANK, BITWISE, BITWISE),
        ("A R", BITWISE, BITWISE, None),
        ("A M", BITWISE, BITWISE, None),
        ("A S", BITWISE, BITWISE, None),
        ("A P", ONE_RANK, BITWISE, BITWISE),
        ("R M", BITWISE, BITWISE, None),
        ("R S", AGAIN, AGAIN, AGAIN),
        ("R P", ONE_RANK, IN_STEP, IN_STEP),
        ("M S", BITWISE, BITWISE, None),
        ("M P", ONE_RANK, BITWISE, BITWISE),
        ("S P", None, None, BITWISE),
        # All that go together.
        ("D E R M", BITWISE, BITWISE, ROUNDING),
        ("D A R M", BITWISE, BITWISE, ROUNDING),
        ("D E M S", BITWISE, BITWISE, ROUNDING),
        ("D A M S", BITWISE, BITWISE, None),
        ("D E M P", None, BITWISE, BITWISE),
        ("D A M P", None, BITWISE, None),
        ("D E M S P", None, None, BITWISE),
        ("D A M S P", None, None, BITWISE),
        ("D E R M S P", None, None, IN_STEP),
    ]
    for world_size, expected in zip((1, 2, 4), row, strict=True)
    if expected is not None
}
TRAINED = [cell for cell, expected in CELLS.items() if expected in (BITWISE, ROUNDING)]
# Of pairs those on one rank, and those with a pipeline on two; on four ranks what a strategy of ours is part of.
RESUMED = [
    (parts, num_ranks)
    for parts, num_ranks in TRAINED
    if num_ranks == 1
    or (num_ranks == 2 and (len(parts.split()) != 2 or "P" in parts))
    or (num_ranks == 4 and len(parts.split()) != 2 and {"S", "P"} & set(parts.split()))
]
REFUSED = [cell for cell in CELLS if cell not in TRAINED]
# Other ways to have some of them together: name, number of ranks -> arguments of the worker.
TRACE = {"0": [2, 1, 3], "1": [1, 3, 1]}
ALSO: dict[tuple[str, int], dict[str, Any]] = {
    ("late, in parts", 1): {"parts": "D A M", "replay": TRACE, "net": {"num_parts": 2}},
    ("late", 2): {"parts": "D A M P", "replay": TRACE},
    ("late", 4): {"parts": "D A M P", "replay": TRACE},
    ("late replicas, in parts", 2): {"parts": "D A M", "replay": TRACE, "net": {"num_parts": 2}},
    ("late replicas", 4): {"parts": "D A M S P", "replay": TRACE},
    **{
        (schedule, 2): {"parts": "D E M P", "strategy": {"schedule": schedule, "layers_per_stage": "auto"}}
        for schedule in ("gpipe", "1f1b", "zero_bubble", "auto")
    },
    ("split", 1): {"parts": "D E R M", "net": {"most": 1, "failures": []}},
    ("split", 2): {"parts": "D A R M", "net": {"most": 2, "failures": []}},
    ("validated in a pipeline", 2): {"parts": "D R M P", "call": "validate"},
    ("validated", 2): {"parts": "D R M S", "call": "validate"},
}
SINGLES = ["D", "E", "A", "R", "M", "S", "P"]
# A sum of a few numbers of float32 in another order, over some 30 steps of a training that forgets nothing.
TOLERANCE = 1e-5


def ids(cell: tuple[str, int]) -> str:
    return f"{cell[0]} on {cell[1]}"


def save_at(parts: str, world_size: int) -> int:
    """After how many steps there is a checkpoint."""
    return middle_of(parts, num_replicas_of(parts, world_size))


@dataclass(eq=False)
class Ranks:
    """What each rank wrote down, by number of ranks and name."""

    folder: Path
    logs: dict[int, str]

    @functools.cache  # noqa: B019
    def of(self, world_size: int, name: str) -> list[dict[str, Any]]:
        """Results by rank."""
        files = [self.folder / str(world_size) / f"{name}.{rank}.pt" for rank in range(world_size)]
        missing = [rank for rank, file in enumerate(files) if not file.exists()]
        assert not missing, f"rank(s) {missing} never finished {name!r}:\n{self.logs[world_size][-4000:]}"
        return [torch.load(file, weights_only=False) for file in files]

    def trained(self, world_size: int, name: str) -> list[dict[str, Any]]:
        """The same, where no rank may have failed."""
        results = self.of(world_size, name)
        assert [result["error"] for result in results] == [None] * world_size, name
        return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("composition")
    files = {
        "train": str(write_images(folder / "train.h5", NUM_TRAIN)),
        "val": str(write_images(folder / "val.h5", NUM_VAL, seed=1)),
    }
    logs = {}
    for world_size in (1, 2, 4):
        out = folder / str(world_size)
        out.mkdir()
        cells: dict[str, dict[str, Any]] = {}
        for plain in ("", "E", "P", "E P"):
            cells[f"plain {plain}"] = {"parts": plain, "is_plain": True}
        for parts, size in CELLS:
            if size == world_size:
                cells[parts] = {"parts": parts}
                if (parts, size) in RESUMED:
                    at = save_at(parts, world_size)
                    cells[parts]["save_at"] = at
                    cells[f"{parts} resumed"] = {"parts": parts, "resume": str(out / parts / f"step={at}.ckpt")}
        cells |= {name: arguments for (name, size), arguments in ALSO.items() if size == world_size}
        plan = {
            "world_size": world_size,
            "files": files,
            "out": str(out),
            "cells": [{"name": name, "arguments": one} for name, one in cells.items()],
        }
        logs[world_size] = run_ranks(
            Path(__file__).with_name("composition_worker.py"),
            plan,
            out,
            num_processes=world_size,
            limit_seconds=LIMIT_SECONDS,
        )
    return Ranks(folder, logs)


# The table -----------------------------------------------------------------------------------------------------------


def test_every_pair_of_parts_is_in_the_table():
    pairs = {parts for parts, _ in CELLS}
    assert [pair for pair in map(" ".join, itertools.combinations(SINGLES, 2)) if pair not in pairs] == []
    assert [single for single in SINGLES if single not in pairs] == []


def test_every_part_is_in_the_table_on_every_number_of_ranks():
    for world_size in (1, 2, 4):
        assert {letter for parts, size in CELLS if size == world_size for letter in parts.split()} == set(SINGLES)


# What is trained -----------------------------------------------------------------------------------------------------


def plain_of(ranks: Ranks, parts: str, world_size: int) -> list[dict[str, Any]]:
    """What a cell stands for, for each of its ranks: of the replica that the rank belongs to."""
    num_replicas = num_replicas_of(parts, world_size)
    plain = ranks.trained(num_replicas, "plain " + " ".join(letter for letter in "EP" if letter in parts))
    return [plain[rank * num_replicas // world_size] for rank in range(world_size)]


SAME_BITS = ["weights", "optimizers", "schedulers", "losses", "metrics", "logged"]
COUNTED = ["trained", "evaluated", "global_step", "epoch", "counters"]


def differences(one: dict[str, Any], other: dict[str, Any], names: list[str]) -> list[str]:
    return [name for name in names if not same_bits(one[name], other[name])]


def largest_difference(one: Any, other: Any) -> float:
    """Of two nests of the same shape."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        return max((largest_difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        return max((largest_difference(*both) for both in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, torch.Tensor):
        return float((one.double() - other.double()).abs().max())
    return float(abs(one - other)) if isinstance(one, float | int) else 0.0


@pytest.mark.parametrize("cell", TRAINED, ids=ids)
def test_parts_together_train_as_plain_lightning_does(ranks, cell):
    parts, world_size = cell
    names = [name for name in SAME_BITS if CELLS[cell] == BITWISE or name == "schedulers"]
    pairs = zip(ranks.trained(world_size, parts), plain_of(ranks, parts, world_size), strict=True)
    for rank, (ours, plain) in enumerate(pairs):
        has_all = "P" not in parts or rank == 0  # the rank that writes files; the others have the state of their layers
        assert differences(ours, plain, [name for name in names if has_all or name != "optimizers"]) == []
        assert largest_difference(ours["weights"], plain["weights"]) < TOLERANCE
        assert largest_difference(ours["losses"], plain["losses"]) < TOLERANCE


@pytest.mark.parametrize("cell", TRAINED, ids=ids)
def test_every_counter_is_that_of_plain_lightning(ranks, cell):
    parts, world_size = cell
    for ours, plain in zip(ranks.trained(world_size, parts), plain_of(ranks, parts, world_size), strict=True):
        assert differences(ours, plain, COUNTED) == []


@pytest.mark.parametrize("cell", TRAINED, ids=ids)
def test_every_sample_is_used_once_an_epoch_or_as_often_as_it_is_echoed(ranks, cell):
    parts, world_size = cell
    num_replicas = num_replicas_of(parts, world_size)
    results = ranks.trained(world_size, parts)
    firsts = results[:: world_size // num_replicas]  # the ranks of a pipeline have the same batches
    for epoch in range(2):
        used = Counter(
            sample for result in firsts for at, samples in result["trained"] if at == epoch for sample in samples
        )
        assert used == Counter(dict.fromkeys(range(NUM_TRAIN), ECHO["echo_factor"] if "E" in parts else 1))


@pytest.mark.parametrize("cell", RESUMED, ids=ids)
def test_a_run_that_goes_on_from_the_middle_of_an_epoch_ends_like_the_unbroken_one(ranks, cell):
    parts, world_size = cell
    whole, resumed = ranks.trained(world_size, parts), ranks.trained(world_size, f"{parts} resumed")
    num_left = len(whole[0]["trained"]) - save_at(parts, world_size)
    names = ["weights", "optimizers", "schedulers", "global_step", "epoch", "counters"]
    for one, other in zip(resumed, whole, strict=True):
        assert 0 < num_left == len(one["trained"])
        assert one["trained"] == other["trained"][-num_left:]
        # DDP has other buckets in its first step, and so has S: with four ranks sums are rounded in another order.
        exact = names if world_size < 4 or "P" in parts else names[2:]
        assert differences(one, other, exact) == []
        assert largest_difference(one["weights"], other["weights"]) < TOLERANCE
        for echo in one["callbacks"].keys() & {"BatchEcho"}:
            assert one["callbacks"][echo] == other["callbacks"][echo]


@pytest.mark.parametrize("cell", [cell for cell in TRAINED if "R" in cell[0]], ids=ids)
def test_what_ran_out_of_memory_was_recovered_on_all_ranks(ranks, cell):
    parts, world_size = cell
    results = ranks.trained(world_size, parts)
    assert [result["num_failures_left"] for result in results] == [0] * world_size
    for result in results:
        assert result["callbacks"]["OOMRecovery"]["events"] == [[1, "forward", 1], [4, "backward", 1]]


@pytest.mark.parametrize("cell", [cell for cell in RESUMED if "M" in cell[0]], ids=ids)
def test_the_monitor_counts_the_steps_of_each_epoch(ranks, cell):
    parts, world_size = cell
    whole, resumed = ranks.trained(world_size, parts)[0], ranks.trained(world_size, f"{parts} resumed")[0]
    num_steps = len(whole["trained"]) // 2
    assert whole["callbacks"]["FeedMonitor"]["steps"] == [[0, num_steps], [1, num_steps]]
    assert resumed["callbacks"]["FeedMonitor"]["steps"] == [[1, len(resumed["trained"])]]


# Other ways ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world_size", "plain", "num_replicas"),
    [
        ("late", 2, "late, in parts", 1),
        ("late", 4, "late, in parts", 1),
        ("late replicas", 4, "late replicas, in parts", 2),
    ],
)
def test_batches_of_a_slow_loader_are_used_again_in_a_pipeline_as_on_one_device(
    ranks, name, world_size, plain, num_replicas
):
    plains = ranks.trained(num_replicas, plain)
    for rank, ours in enumerate(ranks.trained(world_size, name)):
        names = [one for one in SAME_BITS + COUNTED if rank == 0 or one != "optimizers"]
        expected = plains[rank * num_replicas // world_size]
        assert differences(ours, expected, names) == []
        assert ours["callbacks"]["BatchEcho"] == expected["callbacks"]["BatchEcho"]
        assert len(ours["trained"]) == sum(
            sum(passes) for passes in expected["callbacks"]["BatchEcho"]["trace"].values()
        )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "auto"])
def test_echoes_go_through_a_pipeline_with_any_schedule(ranks, schedule):
    # Losses of microbatches are rounded each for itself.
    [plain] = ranks.trained(1, "plain E P")
    for ours in ranks.trained(2, schedule):
        assert differences(ours, plain, COUNTED) == []
        assert largest_difference(ours["weights"], plain["weights"]) < TOLERANCE


@pytest.mark.parametrize(("world_size", "plain"), [(1, "plain E"), (2, "plain ")])
def test_batches_that_are_split_train_as_whole_ones_beside_all_others(ranks, world_size, plain):
    for ours, expected in zip(ranks.trained(world_size, "split"), ranks.trained(world_size, plain), strict=True):
        assert differences(ours, expected, ["evaluated", "global_step", "epoch", "counters", "schedulers"]) == []
        assert largest_difference(ours["weights"], expected["weights"]) < TOLERANCE
        whole = [sorted(samples) for _, samples in expected["trained"]]
        pieces = [sample for _, samples in ours["trained"] for sample in samples]
        for samples in whole:
            assert sorted(pieces[: len(samples)]) == samples
            pieces = pieces[len(samples) :]
        assert pieces == []
        assert ours["callbacks"]["OOMRecovery"]["events"] != []


def test_validation_alone_goes_with_recovery_but_in_a_pipeline(ranks):
    for result in ranks.of(2, "validated in a pipeline"):
        assert IN_STEP in result["error"]["text"]
        assert result["evaluated"] == []
    samples = [
        sample for result in ranks.trained(2, "validated") for _, batch in result["evaluated"] for sample in batch
    ]
    assert sorted(samples) == list(range(NUM_VAL))


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", REFUSED, ids=ids)
def test_what_does_not_go_together_is_refused_on_all_ranks_before_the_first_step(ranks, cell):
    parts, world_size = cell
    for result in ranks.of(world_size, parts):
        assert CELLS[cell] in result["error"]["text"]
        assert result["trained"] == result["evaluated"] == []
