"""`OOMRecovery` on two ranks: real processes in a real group (gloo, on the CPU), one of which runs out of memory.

Starting ranks takes seconds, so they are started once and do everything; the tests read what they wrote down. Where
two runs are compared, one of them is plain Lightning, and has never failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from lightning_gpufeed import OOMRecovery
from tests.callbacks.oom_rank_worker import SIZES, Batches, RankModel
from tests.datamodules.models import make_trainer, same_bits
from tests.doubles import free_port, run_fresh_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

WORKER = Path(__file__).with_name("oom_rank_worker.py")
WORLD_SIZE = 2
LIMIT_SECONDS = 240
TIMEOUT_SECONDS = 60
"""How long a rank waits for the other one before it fails."""
PROMPT_SECONDS = 40
"""What has ended sooner has not waited for that."""
CLOSE = 1e-6
"""Of weights around 1, in float32: sums over samples in another order, 8 steps long."""

# Once: cured by doing the same again. Each phase, each rank, one of them or both; the smaller last batch too.
ONCE = [
    ["fit", 1, 1, "forward", 1],
    ["fit", 3, 0, "backward", 1],
    ["fit", 5, -1, "forward", 1],
    ["fit", 7, 0, "forward", 1],
    ["fit", 7, 1, "backward", 1],
    ["validate", 1, 1, "after log", 1],
    ["validate", 2, 0, "forward", 1],
]
# Twice: cured by splitting; then once more, with batches that are split from the start.
SPLIT = [
    ["fit", 1, 1, "forward", 2],
    ["fit", 5, 0, "backward", 1],
    ["validate", 1, 1, "after log", 2],
]
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "norms": {"model": {"bn": True, "dropout": True}},
    "window": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "ddp": {"gradient_as_bucket_view": True},
        "model": {"frozen": True},
    },
    "gap": {"model": {"unused": 1}, "ddp": {"find_unused_parameters": True}},
    "gaps": {
        "model": {"unused": -1, "sparse": True, "optimizer": "sgd"},
        "ddp": {"find_unused_parameters": True},
        "accumulate_grad_batches": 2,
    },
    "half": {"model": {"is_half": True}},
}
# Which rank's memory is really short (-1: of both), and when.
STARVING = {
    "second starves in forward": (1, "forward"),
    "first starves in forward": (0, "forward"),
    "second starves in backward": (1, "backward"),
    "both starve in backward": (-1, "backward"),
}
STARVING_WITH_NORMS = ["second starves in forward", "second starves in backward"]
# Where both ranks end, and how the test of it is called.
ENDS: dict[str, dict[str, Any]] = {
    "error": {"failures": [["fit", 2, 1, "error", 1]]},
    "error of the first": {"failures": [["fit", 2, 0, "error", 1]]},
    "error in a retry": {"failures": [["fit", 2, 0, "forward", 1], ["fit", 2, 1, "second error", 1]]},
    "error at the end": {"failures": [["fit", 2, 1, "batch end", 1]]},
    "clip": {"failures": [["fit", 2, 1, "clip", 9]]},
    "update": {"failures": [["fit", 2, 1, "update", 9]], "model": {"optimizer": "broken"}},
    "given up": {"failures": [["fit", 2, 1, "forward", 99]]},
    "no split": {"failures": [["fit", 2, 0, "forward", 2]], "has_split_error": True},
    "no split at first": {"recovery": {"num_microbatches": 2}, "has_split_error": True},
    "edited": {"failures": [["fit", 2, 0, "forward", 1]], "model": {"edits": True}},
    "contrast": {"model": {"contrast": True}},
    "validation given up": {"failures": [["validate", 1, 1, "forward", 99]]},
    "validation gathers": {"failures": [["validate", 1, 1, "after gather", 1]], "model": {"gathers": True}},
}


@dataclass
class Ranks:
    """What each rank wrote down, by the name of the scenario."""

    folder: Path
    log: str

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """Results of one scenario by rank."""
        files = [self.folder / f"{name}.{rank}.pt" for rank in range(WORLD_SIZE)]
        missing = [rank for rank, file in enumerate(files) if not file.exists()]
        assert not missing, f"rank(s) {missing} never finished {name!r}:\n{self.log[-4000:]}"
        results = [torch.load(file, weights_only=True) for file in files]
        for rank, result in enumerate(results):
            assert "failed" not in result, f"rank {rank} failed in {name!r}: {result['failed']}"
        return results

    def trained(self, name: str) -> list[dict[str, Any]]:
        """Of a training that no rank may have broken off."""
        results = self[name]
        for rank, result in enumerate(results):
            assert result["error"] is None, f"rank {rank} failed in {name!r}: {result['error']}"
        return results

    def ended(self, name: str) -> list[dict[str, Any]]:
        """Errors of a training that all ranks have broken off, without waiting."""
        results = self[name]
        assert all(result["error"] is not None for result in results), f"{name!r} went on"
        assert all(result["seconds"] < PROMPT_SECONDS for result in results)
        return [result["error"] for result in results]


def train(name: str, *, ends: bool = False, **arguments: Any) -> dict[str, Any]:
    scenario = {"run": "train", "name": name, "arguments": arguments}
    return {**scenario, "is_last": True} if ends else scenario


def scenarios_of(folder: Path) -> list[dict[str, Any]]:
    scenarios: list[dict[str, Any]] = [{"run": "refusals", "name": "refusals", "arguments": {}, "is_last": True}]
    for name, settings in VARIANTS.items():
        scenarios += [
            train(f"{name}, plain", **settings),
            train(f"{name}, once", recovery={}, failures=ONCE, **settings),
            train(f"{name}, split", recovery={}, failures=SPLIT, **settings),
        ]
    for name in ("base", "norms"):
        scenarios.append(train(f"{name}, clean", recovery={}, **VARIANTS[name]))
    big = {"is_big": True, "max_epochs": 1}
    for name, (rank, phase) in STARVING.items():
        failures = [["fit", 1, rank, f"real {phase}", 1]]
        for kind, has_bn in (("", False), (", norms", True)):
            model = {"width": 1024, "bn": has_bn}
            if not has_bn or name in STARVING_WITH_NORMS:
                scenarios.append(train(f"{name}{kind}", recovery={}, failures=failures, model=model, **big))
    scenarios += [
        # Of the batch of 5 and of 2 samples.
        train("ragged", recovery={}, failures=[["fit", 3, 0, "forward", 3]]),
        train("ragged, the other", recovery={}, failures=[["fit", 3, 1, "backward", 3]]),
        train("big, plain", model={"width": 1024}, **big),
        train("saved", recovery={}, failures=SPLIT, enable_checkpointing=True, default_root_dir=str(folder / "saved")),
        train("validated, plain", is_validation=True),
        train("validated", is_validation=True, recovery={}, failures=[["validate", 0, 1, "after log", 3]]),
        train("sanity", recovery={}, failures=[["sanity", 0, 1, "after log", 1]], num_sanity_val_steps=2),
        train(
            "sanity, norms",
            recovery={},
            failures=[["sanity", 0, 1, "forward", 1]],
            num_sanity_val_steps=2,
            model={"bn": True},
        ),
        {"run": "groups_left", "name": "groups left", "arguments": {}, "is_last": True},
    ]
    for name, settings in ENDS.items():
        scenarios.append(train(name, ends=True, default_root_dir=str(folder / name), **{"recovery": {}, **settings}))
    is_new = True
    for scenario in scenarios:
        if is_new:
            scenario["port"] = free_port()
        is_new = "is_last" in scenario
    return scenarios


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("oom_distributed")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    plan = {
        "world_size": WORLD_SIZE,
        "scenarios": scenarios_of(folder),
        "out": str(folder),
        "timeout_seconds": TIMEOUT_SECONDS,
    }
    with pytest.MonkeyPatch.context() as patch:
        # The C library gives large blocks back at once, and has no other place to take them from: so a limit on what
        # is mapped is a limit on what is used.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        patch.setenv("MALLOC_ARENA_MAX", "1")
        text = run_fresh_ranks(WORKER, plan, folder, num_ranks=WORLD_SIZE, limit_seconds=LIMIT_SECONDS)
    return Ranks(folder, text)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest, of all weights and buffers."""
    assert list(one) == list(other)
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def assert_equal_between_ranks(results: list[dict[str, Any]]) -> None:
    """All that is trained, to the last bit; statistics are those of each rank until they are sent."""
    first, second = (result["weights"] for result in results)
    trained = [name for name in first if "running" not in name and not name.startswith("means.")]
    assert len(trained) > 4
    assert [name for name in trained if not torch.equal(first[name], second[name])] == []


def events(result: dict[str, Any], stage: str = "fit") -> list[tuple[Any, ...]]:
    names = ("step", "rank", "phase", "num_retries", "num_microbatches")
    return [tuple(event[name] for name in names) for event in result["events"] if event["stage"] == stage]


def last_pass(result: dict[str, Any], batch: int, num_microbatches: int) -> list[int]:
    """Samples of each microbatch of the attempt that worked."""
    sizes = [size for stage, at, size in result["attempts"] if (stage, at) == ("fit", batch)]
    return sizes[-num_microbatches:]


# Nothing fails, or the same again is enough: to the last bit -------------------------------------------------------


@pytest.mark.parametrize("name", ["base", "norms"])
def test_without_failure_everything_is_as_with_plain_ddp_to_the_last_bit(ranks, name):
    for plain, clean in zip(ranks.trained(f"{name}, plain"), ranks.trained(f"{name}, clean"), strict=True):
        for what in ("weights", "optimizers", "rows", "metrics", "losses", "global_step", "attempts", "logged"):
            assert same_bits(plain[what], clean[what]), what
        assert clean["events"] == []


@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_that_fits_at_the_second_try_changes_nothing_to_the_last_bit(ranks, name):
    for plain, once in zip(ranks.trained(f"{name}, plain"), ranks.trained(f"{name}, once"), strict=True):
        for what in ("weights", "optimizers", "rows", "metrics", "losses", "global_step"):
            assert same_bits(plain[what], once[what]), what
        assert once["num_microbatches"] == [1] * 8


def test_all_ranks_do_it_again_if_one_has_failed(ranks):
    for rank, result in enumerate(ranks.trained("base, once")):
        passes = [sum(at == batch for stage, at, _ in result["attempts"] if stage == "fit") for batch in range(8)]
        assert passes == [1, 2, 1, 2, 1, 2, 1, 2]
        # In validation each rank for itself.
        passes = [sum(at == batch for stage, at, _ in result["attempts"] if stage == "validate") for batch in range(4)]
        assert passes == [[1, 1, 2, 1], [1, 2, 1, 1]][rank]


# In microbatches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ranks_stay_equal_to_the_last_bit_when_one_has_to_split(ranks, name):
    first, second = ranks.trained(f"{name}, split")
    assert_equal_between_ranks([first, second])
    assert first["num_microbatches"] == second["num_microbatches"]
    assert events(first) == events(second)
    assert first["num_microbatches"][:2] == [1, 2]
    assert min(first["num_microbatches"][1:]) > 1


@pytest.mark.parametrize("name", ["base", "window", "gap", "gaps"])
def test_split_batches_give_the_weights_of_whole_ones(ranks, name):
    for plain, split in zip(ranks.trained(f"{name}, plain"), ranks.trained(f"{name}, split"), strict=True):
        assert difference(plain["weights"], split["weights"]) <= CLOSE
        assert plain["global_step"] == split["global_step"]
        assert same_bits(
            [one["state"].keys() for one in plain["optimizers"]], [one["state"].keys() for one in split["optimizers"]]
        )


@pytest.mark.parametrize("name", ["base", "window", "gap", "gaps"])
def test_what_is_logged_and_reduced_over_the_ranks_is_that_of_whole_batches(ranks, name):
    for plain, split in zip(ranks.trained(f"{name}, plain"), ranks.trained(f"{name}, split"), strict=True):
        assert plain["losses"] == pytest.approx(split["losses"], rel=1e-5)
        assert len(plain["rows"]) == len(split["rows"]) == 8
        # Losses of about 10, in float32.
        for row, other in zip([*plain["rows"], plain["metrics"]], [*split["rows"], split["metrics"]], strict=True):
            assert row == pytest.approx(other, rel=1e-5)
        assert {"fit_loss_step", "fit_loss_epoch", "fit_mean", "validate_loss_epoch"} <= set(split["metrics"])


def test_parameters_that_no_rank_uses_stay_without_gradient(ranks):
    for name in ("plain", "once", "split"):
        for result in ranks.trained(f"gaps, {name}"):
            torch.testing.assert_close(
                result["weights"]["extra.weight"], RankModel([], unused=-1).extra.weight.detach()
            )


def test_half_precision_weights_are_split_too(ranks):
    for plain, split in zip(ranks.trained("half, plain"), ranks.trained("half, split"), strict=True):
        # 8 bits: a step of Adam (0.01) more or less where a gradient is rounded to the other side of zero.
        assert difference(plain["weights"], split["weights"]) < 0.1
        assert all(value.dtype == torch.bfloat16 for key, value in split["weights"].items() if "first" in key)


def test_statistics_are_counted_once_per_batch(ranks):
    for plain, split in zip(ranks.trained("norms, plain"), ranks.trained("norms, split"), strict=True):
        assert (
            int(split["weights"]["norm.num_batches_tracked"]) == int(plain["weights"]["norm.num_batches_tracked"]) == 8
        )


def test_a_rank_with_fewer_samples_than_microbatches_makes_one_of_each(ranks):
    results = ranks.trained("ragged")
    assert events(results[0]) == events(results[1]) == [(3, 0, "forward", 3, 4)]
    assert [last_pass(result, 3, number) for result, number in zip(results, (4, 2), strict=True)] == [
        [2, 1, 1, 1],
        [1, 1],
    ]
    for plain, ragged in zip(ranks.trained("base, plain"), results, strict=True):
        assert difference(plain["weights"], ragged["weights"]) <= CLOSE
        assert ragged["num_microbatches"] == [1, 1, 1, 4, 4, 4, 4, 4]


def test_a_rank_that_cannot_split_further_is_given_less_by_the_other(ranks):
    # The one with two samples fails whole, whole again, and with one sample each; the other one has five.
    results = ranks.trained("ragged, the other")
    assert events(results[0]) == events(results[1]) == [(3, 1, "backward", 3, 4)]
    for plain, ragged in zip(ranks.trained("base, plain"), results, strict=True):
        assert difference(plain["weights"], ragged["weights"]) <= CLOSE


# Memory that is really short ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STARVING)
def test_ranks_of_which_some_starve_end_with_the_weights_of_those_that_never_did(ranks, name):
    plain, starved = ranks.trained("big, plain"), ranks.trained(name)
    assert_split_alike(starved, name)
    for one, other in zip(plain, starved, strict=True):
        assert difference(one["weights"], other["weights"]) <= CLOSE


@pytest.mark.parametrize("name", STARVING_WITH_NORMS)
def test_starving_with_statistics_that_are_sent_between_the_ranks_does_not_hang(ranks, name):
    results = ranks.trained(f"{name}, norms")
    assert_split_alike(results, name)
    assert [int(result["weights"]["norm.num_batches_tracked"]) for result in results] == [2, 2]


def assert_split_alike(results: list[dict[str, Any]], name: str) -> None:
    rank, phase = STARVING[name]
    [event] = events(results[0])
    assert events(results[1]) == [event]
    assert event[:3] == (1, 1 if rank == -1 else rank, phase)
    assert event[4] > 1
    assert all(one["requested_bytes"] > 2**20 for one in results[0]["events"])
    assert_equal_between_ranks(results)


# Evaluation --------------------------------------------------------------------------------------------------------


def test_validation_alone_is_split_on_one_rank_with_the_numbers_of_both(ranks):
    plain, validated = ranks.trained("validated, plain"), ranks.trained("validated")
    assert events(validated[0], "validate") == []
    assert [event[3:] for event in events(validated[1], "validate")] == [(3, 4)]
    for one, other in zip(plain, validated, strict=True):
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-5)


def test_validation_does_not_change_how_training_batches_are_split(ranks):
    for result in ranks.trained("base, once"):
        assert result["num_microbatches"] == [1] * 8


@pytest.mark.parametrize("name", ["sanity", "sanity, norms"])
def test_the_first_validation_may_fail_on_one_rank(ranks, name):
    first, second = ranks.trained(name)
    assert_equal_between_ranks([first, second])
    assert [
        len([event for event in result["events"] if event["stage"] == "validate"]) for result in (first, second)
    ] == [0, 1]


# What is said ------------------------------------------------------------------------------------------------------


def test_the_first_rank_names_the_rank_that_ran_out_of_memory(ranks):
    texts = [event["text"] for event in ranks.trained("base, once")[0]["events"] if event["stage"] == "fit"]
    assert ["on rank 1" in text for text in texts] == [True, False, True, True]
    assert "on rank 0" in texts[1]
    # Of several, the highest; a phase of one of them.
    assert "step 5 ran out of memory in forward on rank 1" in texts[2]


def test_loggers_get_each_event_once(ranks):
    first, second = ranks.trained("base, split")
    rows = [(step, row) for step, row in first["logged"] if "gpufeed/oom/fit_num_retries" in row]
    assert [
        (step, row["gpufeed/oom/fit_num_retries"], row["gpufeed/oom/fit_num_microbatches"]) for step, row in rows
    ] == [
        (1, 2.0, 2.0),
        (5, 1.0, rows[1][1]["gpufeed/oom/fit_num_microbatches"]),
    ]
    assert second["logged"] == []


def test_ordinary_checkpoints_are_written_as_ever(ranks, folder):
    ranks.trained("saved")
    assert len(list((folder / "saved").rglob("*.ckpt"))) == 1


# Both end, at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rank"), [("error", 1), ("error of the first", 0), ("error in a retry", 1)])
def test_an_ordinary_error_in_a_step_is_raised_untouched_and_ends_the_others(ranks, name, rank):
    errors = ranks.ended(name)
    assert (errors[rank]["type"], errors[rank]["text"]) == ("RuntimeError", "an ordinary error")
    assert errors[1 - rank]["type"] == "OOMRecoveryError"
    assert "another rank has stopped with an error" in errors[1 - rank]["text"]
    assert ("when a batch that had run out of memory was done again" in errors[rank]["notes"]) == (
        name == "error in a retry"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("error at the end", "an ordinary error"),
        ("clip", "out of memory"),
        ("update", "out of memory in the optimizer step 2"),
    ],
)
def test_what_ends_a_rank_between_two_steps_does_not_leave_the_other_waiting(ranks, name, text):
    errors = ranks.ended(name)
    assert text in errors[1]["text"]


def test_when_nothing_helps_all_ranks_say_what_was_tried_and_one_saves(ranks, folder):
    first, second = ranks.ended("given up")
    assert first["type"] == "OOMRecoveryError"
    assert "another rank ran out of memory" in first["text"]
    assert "in 8 microbatches of at most 1 samples: another rank ran out of memory" in first["text"]
    assert second["type"] == "OutOfMemoryError"
    assert second["text"] == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert "in 8 microbatches of at most 1 samples: out of memory in forward" in second["notes"]
    [path] = (folder / "given up").rglob("*.ckpt")
    assert str(path) in first["text"]
    saved = torch.load(path, weights_only=False)
    assert saved["global_step"] == 2
    assert [path for path in folder.rglob("*.part")] == []


@pytest.mark.parametrize("name", ["no split", "no split at first"])
def test_a_batch_that_one_rank_cannot_split_ends_both(ranks, name):
    errors = ranks.ended(name)
    assert "rank 1 cannot split" in errors[1]["text"] + errors[1]["notes"]


def test_the_first_rank_saves_if_another_one_cannot_go_on(ranks, folder):
    ranks.ended("no split")
    [path] = (folder / "no split").rglob("*.ckpt")
    assert torch.load(path, weights_only=False)["global_step"] == 2


def test_a_batch_changed_in_place_on_a_rank_that_did_not_fail_ends_both(ranks):
    first, second = ranks.ended("edited")
    assert "another rank cannot do its batch again" in first["notes"]
    assert "batch[0] was changed in place" in second["text"]


def test_a_step_that_talks_to_the_other_ranks_is_refused_before_anything_is_trained(ranks):
    for error, result in zip(ranks.ended("contrast"), ranks["contrast"], strict=True):
        assert error["type"] == "OOMRecoveryError"
        assert "talks to the other ranks" in error["text"]
        assert result["global_step"] == 0
        assert difference(result["weights"], RankModel([]).state_dict()) == 0


def test_a_validation_step_that_has_talked_to_the_others_is_not_done_again(ranks):
    _, second = ranks.ended("validation gathers")
    assert second["type"] == "OutOfMemoryError"
    assert "talks to the other ranks" in second["notes"]


def test_validation_that_cannot_be_saved_does_not_leave_the_other_rank_waiting(ranks):
    _, second = ranks.ended("validation given up")
    assert second["type"] == "OutOfMemoryError"
    assert "there is no smaller size to try" in second["notes"]


def test_no_process_group_is_left(ranks):
    for result in ranks["groups left"]:
        assert result["before"] == result["after"]


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("static_graph", "static_graph=True"),
        ("ddp_comm_hook", "expected no ddp_comm_hook"),
        ("model_averaging_period", "expected no model_averaging_period"),
    ],
)
def test_what_cannot_be_made_safe_between_ranks_is_refused_before_the_first_batch(ranks, name, reason):
    for result in ranks["refusals"]:
        assert result[name]["error"]["type"] == "ValueError"
        assert reason in result[name]["error"]["text"]
        assert result[name]["attempts"] == 0


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_a_model_in_parts_on_several_ranks_is_refused(strategy):
    # Lightning makes no Trainer with these without a GPU.
    trainer = SimpleNamespace(strategy=strategy(), callbacks=[], world_size=2)
    with pytest.raises(ValueError, match=rf"{strategy.__name__} .*expected one device or DDPStrategy"):
        OOMRecovery().setup(trainer, RankModel([]), "fit")


def test_one_device_under_ddp_survives_a_backward_pass_that_broke_off(tmp_path):
    # The reducer of DDP is there for one rank as well, and cannot begin again what it has not finished.
    states = []
    for failures, callbacks in (([], []), ([["fit", 1, -1, "backward", 2]], [OOMRecovery()])):
        model = RankModel(failures)
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = make_trainer(strategy=strategy, callbacks=callbacks, max_epochs=1, default_root_dir=tmp_path)
        trainer.fit(model, Batches(SIZES), Batches(SIZES))
        states.append(model.state_dict())
    [event] = callbacks[0].events
    assert (event.num_retries, event.num_microbatches, event.phase) == (2, 2, "backward")
    assert difference(*states) <= CLOSE


def test_manual_optimization_is_refused():
    model = RankModel([])
    model.automatic_optimization = False
    with pytest.raises(ValueError, match="with manual optimization training_step itself steps the optimizers"):
        make_trainer(callbacks=[OOMRecovery()], max_epochs=1).fit(model, Batches(SIZES), Batches(SIZES))


def test_the_sizes_are_other_ones_on_each_rank():
    assert SIZES[0] != SIZES[1]  # what the tests above are about
