"""`BatchEcho` on two ranks: real processes in a real group (gloo, on the CPU).

Starting ranks takes seconds, so they are started once and do everything; the tests read what they wrote down.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_gpufeed import BatchEcho, H5ImageDataModule
from lightning_gpufeed.hdf5.order import FullShuffle
from tests.callbacks.echo_rank_worker import weights_of
from tests.datamodules.models import Recorder, every_checkpoint, make_trainer, write_images
from tests.doubles import free_port, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning"),
]

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240
WORLD_SIZE = 2
# 25 = 3 full steps of 2 x 4 and one sample, which joins the step before.
NUM_TRAIN, NUM_VAL, BATCH_SIZE = 25, 10, 4
FIXED = {"echo_factor": 2, "num_splits": 2}
AUTO = {"echo_factor": "auto"}
REPLAYED = {"echo_factor": "auto", "replay": {"0": [2, 1, 1], "1": [1, 3, 1]}, "scale_lr": "inverse"}


@dataclass
class Ranks:
    """What each rank wrote down, by the name of the scenario."""

    folder: Path
    log: str

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """Results of one scenario by rank, where no rank may have failed."""
        files = [self.folder / f"{name}.{rank}.json" for rank in range(WORLD_SIZE)]
        missing = [rank for rank, file in enumerate(files) if not file.exists()]
        assert not missing, f"rank(s) {missing} never finished {name!r}:\n{self.log[-4000:]}"
        results = [json.loads(file.read_text()) for file in files]
        for rank, result in enumerate(results):
            assert "error" not in result, f"rank {rank} failed in {name!r}: {result['error']}: {result['text']}"
        return results


def start(
    folder: Path,
    scenarios: list[dict[str, Any]],
    files: dict[str, str] | None = None,
    *,
    own: bool = True,
    timeout_seconds: int = 20,
) -> Ranks:
    """Run the scenarios on fresh ranks, or on one process that starts them itself; end all of them in any case."""
    folder.mkdir()
    plan = {
        "world_size": WORLD_SIZE,
        "scenarios": scenarios,
        "files": files,
        "out": str(folder),
        "timeout_seconds": timeout_seconds,
    }
    worker = Path(__file__).with_name("echo_rank_worker.py")
    text = run_ranks(worker, plan, folder, num_processes=WORLD_SIZE if own else 1, limit_seconds=LIMIT_SECONDS)
    return Ranks(folder, text)


def scenario(run: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"run": run, "name": name, "arguments": arguments}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("echo_distributed")


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, str]:
    return {
        "train": str(write_images(folder / "train.h5", NUM_TRAIN)),
        "val": str(write_images(folder / "val.h5", NUM_VAL, seed=1)),
    }


@pytest.fixture(scope="module")
def single(folder: Path, files: dict[str, str]) -> Recorder:
    """One process, saved everywhere."""
    model = Recorder()
    callbacks = [BatchEcho(2, num_splits=2, scale_lr="keep"), *every_checkpoint(folder / "single")]
    datamodule = H5ImageDataModule(files["train"], val=files["val"], batch_size=BATCH_SIZE)
    make_trainer(max_epochs=2, enable_checkpointing=True, callbacks=callbacks).fit(model, datamodule)
    return model


# Inside the first batch, at its end, inside the second, at the epoch's end and in the next one.
RESUMED = ["step-01", "step-03", "step-04", "step-06", "step-12", "step-14", "val-12", "epoch-0"]
REPLAYS_RESUMED = ["step-01", "step-03", "step-04", "step-06", "val-04"]
# Of one process: seven batches of four steps, the last one of a single sample.
OF_ONE = ["step-01", "step-04", "step-06", "step-13", "step-21", "val-26", "step-27"]


@pytest.fixture(scope="module")
def two(folder: Path, files: dict[str, str], single: Recorder) -> Ranks:
    saved = {name: str(folder / name) for name in ("hdf5", "stateful", "replayed", "broken")}

    def resumes(run: str, of: str, echo: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
        return [scenario(run, f"{of} {name}", echo=echo, checkpoint=f"{saved[of]}/{name}.ckpt") for name in names]

    scenarios = [
        scenario("train", "plain", echo={"echo_factor": 1}),
        scenario("train", "fixed", echo=FIXED, schedule="onecycle"),
        scenario("train", "fixed by steps", echo=FIXED, max_steps=9, max_epochs=-1),
        scenario("train", "fast", echo=AUTO, is_fast=True),
        scenario("uneven_last_batch", "uneven", echo={"echo_factor": 2, "num_splits": 4}, sizes=[[8, 3], [8, 1]]),
        scenario("late", "late", passes=[[1, 3, 1, 2, 1], [2, 1, 1, 3, 1]]),
        scenario("late", "late pieces", passes=[[1, 3, 1], [2, 1, 1]], num_splits=2),
        scenario("late", "late stream", passes=[[1, 2, 1], [3, 1, 1]], num_splits=2, is_sized=False),
        scenario("stream", "stream", echo={"echo_factor": 2}, num_samples=[16, 24]),
        scenario("stream", "stream in pieces", echo=FIXED, num_samples=[24, 17]),
        scenario("stream", "stream with workers", echo=FIXED, num_samples=[24, 8], num_workers=1),
        scenario("stream", "adaptive stream", echo=AUTO, num_samples=[16, 24]),
        scenario("votes", "votes"),
        scenario("groups_left", "groups left"),
        scenario("hdf5", "hdf5", echo=FIXED),
        scenario("hdf5", "hdf5, saved", echo=FIXED, folder=saved["hdf5"]),
        *resumes("hdf5", "hdf5", FIXED, RESUMED),
        *[
            scenario("hdf5", f"single {name}", echo=FIXED, checkpoint=str(folder / "single" / f"{name}.ckpt"))
            for name in OF_ONE
        ],
        scenario("stateful", "stateful", echo=FIXED, folder=saved["stateful"]),
        *resumes("stateful", "stateful", FIXED, RESUMED),
        scenario("stateful", "replayed", echo=REPLAYED, folder=saved["replayed"], schedule="onecycle"),
        *[
            {**each, "arguments": {**each["arguments"], "schedule": "onecycle"}}
            for each in resumes("stateful", "replayed", REPLAYED, REPLAYS_RESUMED)
        ],
        scenario("broken_off", "broken", echo=FIXED, at=5, folder=saved["broken"]),
        scenario("stateful", "mended", echo=FIXED, checkpoint=f"{saved['broken']}/broken.ckpt"),
    ]
    return start(folder / "two", scenarios, files)


def samples_of(result: dict[str, Any], epoch: int) -> list[list[int]]:
    """Those of each step of an epoch."""
    return [samples for at, samples in result.get("steps", result.get("trained")) if at == epoch]


def flat(nested: Any) -> list[int]:
    return [number for part in nested for number in (flat(part) if isinstance(part, list) else [part])]


def used(results: list[dict[str, Any]], epoch: int) -> Counter[int]:
    """How often all ranks together used each sample."""
    return Counter(flat([samples_of(result, epoch) for result in results]))


def same(results: list[dict[str, Any]], *names: str) -> bool:
    """Whether the ranks found the same."""
    return all(results[0][name] == result[name] for result in results for name in names)


# The order ---------------------------------------------------------------------------------------------------


def test_the_distributed_sampler_shares_every_epoch_and_reshuffles_it(two):
    results = two["fixed"]
    orders = []
    for epoch in range(2):
        assert used(results, epoch) == Counter({sample: 2 for sample in range(40)})
        orders.append([samples_of(result, epoch) for result in results])
        assert not set(flat(orders[-1][0])) & set(flat(orders[-1][1]))
    assert sorted(flat(orders[0][0])) != sorted(flat(orders[1][0]))
    assert [(result["sampler"], result["sampler_epoch"]) for result in results] == [("DistributedSampler", 1)] * 2


def test_each_rank_echoes_the_batches_that_it_gets_without_echoes(two):
    for rank in range(WORLD_SIZE):
        for epoch in range(2):
            plain = samples_of(two["plain"][rank], epoch)
            pieces = samples_of(two["fixed"][rank], epoch)
            assert [len(piece) for piece in pieces] == [4] * 8 + [2] * 4
            passes = [sorted(pieces[step] + pieces[step + 1]) for step in range(0, 12, 2)]
            assert passes == [sorted(batch) for batch in plain for _ in range(2)]


def test_the_ranks_permute_their_batches_differently(two):
    # Of a stream all ranks' batches have their samples in the same places.
    first, second = [samples_of(result, 0)[0] for result in two["stream"]]
    assert sorted(first) == [sample - 1000 for sample in sorted(second)]
    assert first != [sample - 1000 for sample in second]


def test_the_ranks_end_with_the_same_weights_and_counters(two):
    for name in (
        "plain",
        "fixed",
        "fixed by steps",
        "fast",
        "uneven",
        "late",
        "stream",
        "hdf5",
        "stateful",
        "replayed",
    ):
        assert same(two[name], "weights", "global_step", "num_training_batches", "trace"), name
    for result in two["fixed"]:
        assert (result["global_step"], result["num_training_batches"], result["estimate"]) == (24, 12, 24)
        assert [step for _, step, _ in result["validations"]] == [12, 24]
    assert [result["global_step"] for result in two["fixed by steps"]] == [9, 9]


# "auto" ------------------------------------------------------------------------------------------------------


def test_with_loaders_that_keep_up_auto_is_training_without_it(two):
    for fast, plain in zip(two["fast"], two["plain"], strict=True):
        names = set(plain) - {"trace"}
        assert {name: fast[name] for name in names} == {name: plain[name] for name in names}
        assert fast["trace"] == {"0": [1, 1, 1], "1": [1, 1, 1]}


@pytest.mark.parametrize(("name", "trace"), [("late", [2, 3, 1, 3, 1]), ("late pieces", [2, 3, 1])])
def test_every_rank_waits_for_the_rank_whose_batch_comes_last(two, name, trace):
    # In turn it is one and the other; the rank that could go on echoes with it.
    results = two[name]
    num_splits = 2 if name == "late pieces" else 1
    for result in results:
        assert result["trace"] == {"0": trace}
        assert len(result["steps"]) == result["global_step"] == sum(trace) * num_splits
    assert same(results, "weights", "batch_indices", "validations", "num_training_batches")


def test_without_a_length_too(two):
    results = two["late stream"]
    assert same(results, "weights", "trace", "batch_indices", "validations", "global_step")
    # The next item is asked for before a step here: a batch that comes during it is one pass late.
    assert results[0]["trace"]["0"][0] in (3, 4)
    assert used(results, 0) == Counter({sample: 2 * results[0]["trace"]["0"][sample // 8] for sample in range(24)})


def test_the_vote_is_on_the_host_in_a_group_of_its_own(two):
    for result in two["votes"]:
        for kind in ("fixed", "auto"):
            seen = result[kind]
            assert seen["kinds"] == [["cpu", "gloo", False]]
            assert seen["made"] == seen["asked"] > 0
        # Nothing is voted on where nothing is open: only, for the report, which loader is the slowest.
        assert result["fixed"]["asked"] == 2
        assert result["auto"]["asked"] <= result["auto"]["steps"] + 2


def test_no_process_group_is_left(two):
    assert two["groups left"] == [{"before": 1, "after": 1}] * 2


# Ragged ends -------------------------------------------------------------------------------------------------


def test_a_batch_that_one_rank_cannot_cut_is_cut_alike_on_all_of_them(two):
    results = two["uneven"]
    for rank, last in enumerate((3, 1)):
        for epoch in range(2):
            # 8 in four pieces, twice; the last batch in one, as one rank has only one sample.
            assert [len(samples) for samples in samples_of(results[rank], epoch)] == [2] * 8 + [last] * 2
            expected = range(100 * rank, 100 * rank + 8 + last)
            assert Counter(flat(samples_of(results[rank], epoch))) == Counter({sample: 2 for sample in expected})
        assert results[rank]["num_training_batches"] == 10
        assert [step for _, step, _ in results[rank]["validations"]] == [10, 20]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("stream", [8] * 4),
        # Of 17 samples the last batch has one, so all ranks cut it in one.
        ("stream in pieces", [4] * 8 + [8, 8]),
        ("stream with workers", [4] * 4),
        ("adaptive stream", None),
    ],
)
def test_streams_of_different_length_end_together_and_say_so(two, name, sizes):
    results = two[name]
    num_batches = {
        "stream": [2, 3],
        "stream in pieces": [3, 3],
        "stream with workers": [3, 1],
        "adaptive stream": [2, 3],
    }
    fewest = min(num_batches[name])
    assert same(results, "weights", "trace", "global_step", "validations")
    for rank, result in enumerate(results):
        assert result["epoch"] == 2
        for epoch in range(2):
            assert len(result["trace"][str(epoch)]) == fewest
            own = [len(samples) for samples in samples_of(result, epoch)]
            if sizes is not None and (name, rank) != ("stream in pieces", 1):
                assert own == sizes
        said = [text for text in result["warnings"] if "another rank has no batch left" in text]
        is_longer = num_batches[name][rank] > fewest
        assert len(said) == 2 * is_longer, (rank, result["warnings"])  # once in each epoch
        assert all("the epoch ends here on all ranks" in text and "\n" not in text for text in said)


# Resuming ----------------------------------------------------------------------------------------------------


def check_resumed(two: Ranks, whole: str, part: str) -> None:
    for ours, all_ in zip(two[part], two[whole], strict=True):
        steps, every = (each.get("steps", each.get("trained")) for each in (ours, all_))
        assert steps == every[len(every) - len(steps) :]
        for name in ("weights", "global_step", "trace", "num_training_batches"):
            assert ours[name] == all_[name], name


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("source", ["hdf5", "stateful"])
def test_two_ranks_go_on_where_they_were_in_the_middle_of_an_echo(two, source, name):
    check_resumed(two, source, f"{source} {name}")
    taken = 24 - len(two[f"{source} {name}"][0].get("steps", two[f"{source} {name}"][0].get("trained")))
    assert taken == {"epoch-0": 12}.get(name, int(name[-2:]) if name != "epoch-0" else 12)


@pytest.mark.parametrize("name", REPLAYS_RESUMED)
def test_two_ranks_go_on_replaying(two, name):
    assert two["replayed"][0]["trace"] == REPLAYED["replay"]
    check_resumed(two, "replayed", f"replayed {name}")


def test_saving_changes_nothing(two):
    assert two["hdf5"] == two["hdf5, saved"]


def test_two_ranks_that_were_broken_off_in_the_middle_of_an_echo_go_on(two):
    for before, after, whole in zip(two["broken"], two["mended"], two["stateful"], strict=True):
        assert len(before["steps"]) == 5
        assert before["steps"] + after["steps"] == whole["steps"]
        assert after["weights"] == whole["weights"]


def batches_of(steps: list[list[int]], world_size: int) -> list[list[int]]:
    """What was fetched together, from the samples of each step on all ranks: four steps each, or one piece twice."""
    batches: list[list[int]] = []
    for samples in steps:
        # A sample that comes again is an echo.
        if not batches or not set(samples) <= set(batches[-1]):
            if batches and len(batches[-1]) < world_size * BATCH_SIZE and not set(samples) & set(batches[-1]):
                batches[-1] += samples
            else:
                batches.append(list(samples))
    return batches


@pytest.mark.parametrize("name", OF_ONE)
def test_two_ranks_continue_what_one_began(two, single, name):
    results = two[f"single {name}"]
    at, in_epoch = divmod(int(name[-2:]), 26)  # six batches of four steps, one of a single sample of two
    order = {epoch: FullShuffle().permutation(NUM_TRAIN, 0, epoch).tolist() for epoch in range(2)}
    begun = min(in_epoch // 4, 6) * BATCH_SIZE
    for epoch in range(2):
        rest = [] if epoch < at else order[epoch][begun if epoch == at else 0 :]
        assert used(results, epoch) == Counter({sample: 2 for sample in rest}), epoch
        if epoch > at or (epoch == at and in_epoch == 0):
            together = [flat(list(step)) for step in zip(*(samples_of(each, epoch) for each in results), strict=True)]
            assert [sorted(batch) for batch in batches_of(together, 2)] == [
                sorted(rest[first : first + 8] if first < 16 else rest[16:]) for first in (0, 8, 16)
            ]
    assert same(results, "weights", "global_step", "num_training_batches")
    validated = [flat([samples for epoch, samples in result["validated_in"] if epoch == 1]) for result in results]
    assert sorted(flat(validated)) == list(range(NUM_VAL))


@pytest.mark.parametrize("name", ["step-01", "step-04", "step-06", "step-11", "val-12", "step-14"])
def test_one_process_continues_what_two_ranks_began(two, folder, files, name):
    assert two["hdf5, saved"]
    model = Recorder()
    trainer = make_trainer(max_epochs=2, callbacks=[BatchEcho(2, num_splits=2, scale_lr="keep")])
    datamodule = H5ImageDataModule(files["train"], val=files["val"], batch_size=BATCH_SIZE)
    trainer.fit(model, datamodule, ckpt_path=folder / "hdf5" / f"{name}.ckpt", weights_only=True)
    at, in_epoch = divmod(int(name[-2:]), 12)
    for epoch in range(2):
        order = FullShuffle().permutation(NUM_TRAIN, 0, epoch).tolist()
        rest = [] if epoch < at else order[in_epoch // 4 * 8 if epoch == at else 0 :]
        assert Counter(model.trained_by_epoch.get(epoch, [])) == Counter({sample: 2 for sample in rest}), epoch
    assert trainer.global_step == int(name[-2:]) + len(model.trained)
    assert sorted(sample for epoch, batch in model.validated_in if epoch == 1 for sample in batch) == list(
        range(NUM_VAL)
    )


def test_a_run_on_one_process_has_the_order_of_two(two, single):
    # What is compared with above is no run of its own kind.
    assert [len(set(samples)) for samples in single.trained_by_epoch.values()] == [NUM_TRAIN] * 2
    assert weights_of(single) != two["hdf5"][0]["weights"]


# Ranks that Lightning starts ---------------------------------------------------------------------------------


def test_the_callback_is_sent_to_ranks_that_have_nothing_of_the_process_that_starts_them(folder):
    out = folder / "spawned"
    results = start(out, [scenario("spawned", "main", folder=str(out))], own=False)["spawned_fit"]
    assert len({result["process"] for result in results}) == WORLD_SIZE
    for epoch in range(2):
        assert used(results, epoch) == Counter({sample: 2 for sample in range(40)})
    assert same(results, "weights", "global_step", "trace")
    assert results[0]["trace"] == {"0": [2, 2, 2], "1": [2, 2, 2]}


# Ranks that fail ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failing(folder: Path) -> Ranks:
    scenarios = [
        {**scenario("one_fails", f"{where} {name}", echo=echo, where=where), "port": str(free_port())}
        for where, name, echo in (
            ("step", "fixed", FIXED),
            ("loader", "fixed", FIXED),
            ("loader", "auto", AUTO),
            ("stuck", "auto", AUTO),
        )
    ]
    return start(folder / "failing", scenarios, timeout_seconds=6)


@pytest.mark.parametrize("name", ["step fixed", "loader fixed", "loader auto"])
def test_a_rank_that_fails_does_not_leave_the_other_one_waiting(failing, name):
    other, itself = failing[name]
    assert itself == {"failed": "RuntimeError", "why": "rank 1 fails"}
    assert other["failed"] is not None


def test_a_rank_that_is_stuck_is_waited_for_as_long_as_the_strategy_says(failing):
    # It would have gone on after four times as long.
    other, _ = failing["stuck auto"]
    assert other["failed"] is not None
