"""Real processes in a real group (gloo, on the CPU): shards, statistics, resuming with another number of ranks.

Starting ranks takes seconds, so each number of ranks is started once and does everything; the tests read what the
ranks wrote down. The order that all ranks together follow is that of one process, so it is compared with one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_gpufeed import H5ImageDataModule
from lightning_gpufeed.hdf5.order import FullShuffle, WeightedShuffle
from tests.datamodules.models import Recorder, every_checkpoint, make_trainer, read, write_images
from tests.doubles import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to:UserWarning"),
    pytest.mark.filterwarnings("ignore:batch_size .* is more than the dataset has:UserWarning"),
]

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240
# 25 = 3 full steps of 2 x 4 and one sample, which joins the step before; with 3 ranks 25 = 2 x 12 + 1.
NUM_TRAIN, NUM_VAL, NUM_TEST, BATCH_SIZE = 25, 10, 7, 4
NUM_DRAWS = 45


@dataclass
class Ranks:
    """What each rank wrote down, by the name of the scenario."""

    folder: Path
    world_size: int
    log: str

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """Results of one scenario by rank."""
        files = [self.folder / f"{name}.{rank}.json" for rank in range(self.world_size)]
        missing = [rank for rank, file in enumerate(files) if not file.exists()]
        assert not missing, f"rank(s) {missing} never finished {name!r}:\n{self.log[-4000:]}"
        return [json.loads(file.read_text()) for file in files]

    def ok(self, name: str) -> list[dict[str, Any]]:
        """The same, where no rank may have failed."""
        results = self[name]
        for rank, result in enumerate(results):
            assert "error" not in (result or {}), f"rank {rank} failed in {name!r}: {result['error']}: {result['text']}"
        return results


def start(folder: Path, world_size: int, scenarios: list[dict[str, Any]], files: dict[str, str], own: bool) -> Ranks:
    """Run the scenarios on fresh ranks, or on one process that starts them itself; end all of them in any case."""
    out = folder / f"world_{world_size}_{'own' if own else 'spawn'}"
    out.mkdir()
    plan = {
        "world_size": world_size,
        "scenarios": scenarios,
        "files": files,
        "batch_size": BATCH_SIZE,
        "out": str(out),
    }
    worker = Path(__file__).with_name("rank_worker.py")
    text = run_ranks(worker, plan, out, num_processes=world_size if own else 1, limit_seconds=LIMIT_SECONDS)
    return Ranks(out, world_size, text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, str]:
    lengths = {"train": NUM_TRAIN, "val": NUM_VAL, "test": NUM_TEST}
    return {
        split: str(write_images(folder / f"{split}.h5", length, seed=number))
        for number, (split, length) in enumerate(lengths.items())
    }


@pytest.fixture(scope="module")
def single(folder: Path, files: dict[str, str]) -> Recorder:
    """One process, saved at every place; what all others are compared with."""
    model = Recorder()
    trainer = make_trainer(max_epochs=3, enable_checkpointing=True, callbacks=every_checkpoint(folder / "single"))
    trainer.fit(model, H5ImageDataModule(files["train"], val=files["val"], batch_size=BATCH_SIZE))
    return model


@pytest.fixture(scope="module")
def damaged(folder: Path) -> dict[str, str]:
    """Files with something wrong in them."""
    images = np.zeros((10, 9, 8), dtype=np.float32)
    images[6, 2, 1] = np.nan
    write_images(folder / "nan.h5", 10, images=images)
    chunk_file = write_images(folder / "chunk.h5", 40, storage="gzip")
    with h5py.File(chunk_file) as h5_file:
        chunk = h5_file["images"].id.get_chunk_info(4)
    with chunk_file.open("r+b") as raw:
        raw.seek(chunk.byte_offset + 2)
        raw.write(b"\xff" * 40)
    write_images(folder / "one.h5", 1)
    return {name: str(folder / f"{name}.h5") for name in ("nan", "chunk", "one")}


def resumes(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "run": "resume",
            "name": f"resume {name} {reads_estimate}",
            "arguments": {"checkpoint": str(folder / "single" / f"{name}.ckpt"), "reads_estimate": reads_estimate},
        }
        for name in names
        for reads_estimate in (False, True)
    ]


# In the middle of each epoch, at the last step of the first, at its end, and after its validation.
RESUMED = ["step-01", "step-05", "step-07", "step-10", "epoch-0", "val-07"]
# One sample is left of the epoch: too few for each rank to get one.
TOO_LATE = "step-06"


@pytest.fixture(scope="module")
def two(folder: Path, files: dict[str, str], single: Recorder, damaged: dict[str, str]) -> Ranks:
    scenarios = [
        {"run": "coverage", "name": "coverage", "arguments": {"use_distributed_sampler": True}},
        {"run": "coverage", "name": "coverage without", "arguments": {"use_distributed_sampler": False}},
        {
            "run": "weighted",
            "name": "weighted",
            "arguments": {"weights": list(range(NUM_TRAIN)), "samples_per_epoch": NUM_DRAWS},
        },
        *resumes(folder, [*RESUMED, TOO_LATE]),
        {"run": "save", "name": "save", "arguments": {"folder": str(folder / "saved_by_two")}},
        {"run": "too_few", "name": "too few", "arguments": {"path": damaged["one"]}},
        {"run": "statistics", "name": "nan", "arguments": {"path": damaged["nan"]}},
        # What used to leave the other ranks waiting comes last.
        {"run": "statistics_without_training_data", "name": "nothing", "arguments": {"path": files["test"]}},
        {"run": "statistics", "name": "chunk", "arguments": {"path": damaged["chunk"]}},
    ]
    return start(folder, 2, scenarios, files, own=True)


@pytest.fixture(scope="module")
def three(folder: Path, files: dict[str, str], single: Recorder) -> Ranks:
    scenarios = [
        {"run": "coverage", "name": "coverage", "arguments": {"use_distributed_sampler": True}},
        *resumes(folder, ["step-10", TOO_LATE]),
    ]
    return start(folder, 3, scenarios, files, own=True)


@pytest.fixture(scope="module")
def spawned(folder: Path, files: dict[str, str]) -> Ranks:
    out = folder / "world_2_spawn"
    return start(folder, 2, [{"run": "spawned", "name": "main", "arguments": {"folder": str(out)}}], files, own=False)


@pytest.fixture(params=["two", "three"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def by_step(results: list[dict[str, Any]], epoch: int) -> list[list[list[int]]]:
    """Step -> rank -> samples of one epoch."""
    per_rank = [[batch for at, batch in result["trained"] if at == epoch] for result in results]
    assert len({len(batches) for batches in per_rank}) == 1, "the ranks took different numbers of steps"
    return [list(step) for step in zip(*per_rank, strict=True)]


def flat(nested: Any) -> list[int]:
    return [number for part in nested for number in (flat(part) if isinstance(part, list) else [part])]


# Shards ------------------------------------------------------------------------------------------------------


def test_all_ranks_together_train_on_every_sample_once_in_the_order_of_one_process(ranks):
    results = ranks.ok("coverage")
    assert [(result["rank"], result["world_size"]) for result in results] == [
        (rank, ranks.world_size) for rank in range(ranks.world_size)
    ]
    for epoch in range(2):
        steps = by_step(results, epoch)
        assert flat(steps) == FullShuffle().permutation(NUM_TRAIN, 0, epoch).tolist()
        # Full steps, then what is left, shared evenly; less than one for each rank joins the step before.
        assert all(len(part) == BATCH_SIZE for step in steps[:-1] for part in step)
        sizes = [len(part) for part in steps[-1]]
        assert max(sizes) - min(sizes) <= 1
    assert len({result["global_step"] for result in results}) == 1


@pytest.mark.parametrize(("stage", "length"), [("validate", NUM_VAL), ("test", NUM_TEST)])
def test_all_ranks_together_evaluate_every_sample_once(ranks, stage, length):
    results = ranks.ok("coverage")
    batches = [[samples for _, samples in result["evaluated"][stage]] for result in results]
    assert len({len(own) for own in batches}) == 1
    runs = {"validate": 2, "test": 1}[stage]
    assert sorted(flat(batches)) == sorted(list(range(length)) * runs)
    assert flat([list(step) for step in zip(*batches, strict=True)]) == list(range(length)) * runs


def test_all_ranks_together_predict_every_sample_once(ranks):
    results = ranks.ok("coverage")
    assert sorted(flat([result["predicted"] for result in results])) == list(range(NUM_TEST))


def test_metrics_added_up_over_the_ranks_are_those_of_one_process(ranks, single):
    assert [result["metrics"]["validate_count"] for result in ranks.ok("coverage")] == [NUM_VAL] * ranks.world_size
    for result in ranks.ok("coverage"):
        assert result["metrics"]["validate_sum"] == sum(range(NUM_VAL))
        assert result["metrics"]["test_count"] == NUM_TEST
        assert result["metrics"]["test_sum"] == sum(range(NUM_TEST))


def test_all_ranks_end_with_the_same_weights(ranks):
    first, *others = [result["weights"] for result in ranks.ok("coverage")]
    assert all(weights == first for weights in others)


def test_all_ranks_together_train_on_the_draws_by_weight_of_one_process_and_leave_the_fold_out(two):
    results = two.ok("weighted")
    fold = set(flat([samples for result in results for _, samples in result["evaluated"]["validate"]]))
    assert len(fold) == NUM_TRAIN // 5
    used = np.array([sample for sample in range(NUM_TRAIN) if sample not in fold])
    shuffle = WeightedShuffle(used.astype(float))
    for epoch in range(2):
        assert flat(by_step(results, epoch)) == used[shuffle.permutation(NUM_DRAWS, 0, epoch)].tolist()
    assert results[0]["state"] == results[1]["state"]


def test_lightnings_own_sampler_setting_makes_no_difference(two):
    assert two.ok("coverage") == two.ok("coverage without")


def test_too_few_samples_for_the_ranks_are_refused_on_every_rank(two, damaged):
    text = (
        f"val data ({damaged['one']}): 1 samples cannot be shared by 2 ranks without repeating one. Use fewer "
        f"ranks, or more samples."
    )
    assert two["too few"] == [{"error": "ValueError", "text": text}] * 2


# Statistics --------------------------------------------------------------------------------------------------


def test_automatic_statistics_are_the_same_on_every_rank_and_those_of_one_process(ranks, files):
    values = read(Path(files["train"]), "images").double().numpy() / 255
    for result in ranks.ok("coverage"):
        assert result["mean"] == pytest.approx([values.mean()], rel=1e-12)
        assert result["std"] == pytest.approx([values.std()], rel=1e-12)
    assert len({(*result["mean"], *result["std"]) for result in ranks.ok("coverage")}) == 1


def test_a_number_that_is_none_is_an_error_on_every_rank(two, damaged):
    text = (
        f"statistics of 'image' cannot be computed: sample 6 of {damaged['nan']} holds a value that is NaN or "
        f"infinite. Give mean= and std=, or clean the data."
    )
    assert two["nan"] == [{"error": "LayoutError", "text": text}] * 2


def test_statistics_of_missing_training_data_are_an_error_on_every_rank(two):
    text = "mean or std is 'auto', which is computed over the training data, but train= is missing."
    assert [result["text"] for result in two["nothing"]] == [text] * 2
    assert two["nothing"][0]["error"] == "ValueError"


def test_a_damaged_chunk_under_automatic_statistics_is_an_error_on_every_rank(two, damaged):
    texts = [result["text"] for result in two["chunk"]]
    assert texts[0].startswith(f"{damaged['chunk']}: dataset 'images', samples 20 to 24 cannot be read: ")
    assert texts == texts[:1] * 2
    assert two["chunk"][0]["error"] == "FeedError"


# Resuming ----------------------------------------------------------------------------------------------------


def position(name: str) -> tuple[int, int]:
    """Epoch and samples of it that were used when the single process saved."""
    if name == "epoch-0":
        return 0, NUM_TRAIN
    epoch, step = divmod(int(name.partition("-")[2]) - 1, -(-NUM_TRAIN // BATCH_SIZE))
    return epoch, min((step + 1) * BATCH_SIZE, NUM_TRAIN)


@pytest.mark.parametrize("reads_estimate", [False, True])
@pytest.mark.parametrize("name", RESUMED)
def test_two_ranks_continue_what_one_began(two, single, name, reads_estimate):
    check_resumed(two.ok(f"resume {name} {reads_estimate}"), single, name)


@pytest.mark.parametrize("reads_estimate", [False, True])
def test_three_ranks_continue_what_one_began(three, single, reads_estimate):
    check_resumed(three.ok(f"resume step-10 {reads_estimate}"), single, "step-10")


@pytest.mark.parametrize("reads_estimate", [False, True])
def test_what_is_too_little_for_all_ranks_is_left_out_and_announced_on_every_rank(ranks, reads_estimate):
    text = (
        f"the rest of this epoch, 1 sample(s), is less than one for each of the {ranks.world_size} ranks and is left "
        f"out. It was begun with fewer ranks."
    )
    results = ranks[f"resume {TOO_LATE} {reads_estimate}"]
    # In these processes a warning is an error.
    assert results == [{"error": "UserWarning", "text": text}] * ranks.world_size


def check_resumed(results: list[dict[str, Any]], single: Recorder, name: str) -> None:
    at, consumed = position(name)
    for epoch in range(3):
        whole = single.trained_by_epoch[epoch]
        expected = [] if epoch < at else whole[consumed:] if epoch == at else whole
        assert flat(by_step(results, epoch)) == expected, f"epoch {epoch}"
    for epoch in range(at + 1, 3):
        validated = [batch for result in results for in_epoch, batch in result["validated_in"] if in_epoch == epoch]
        assert sorted(flat(validated)) == list(range(NUM_VAL)), f"validation of epoch {epoch}"


@pytest.mark.parametrize("reads_estimate", [False, True])
def test_one_process_continues_what_two_ranks_began(two, single, folder, files, reads_estimate):
    results = two.ok("save")
    for step in range(1, len(by_step(results, 0)) + len(by_step(results, 1)) + 1):
        model = Recorder(reads_estimate=reads_estimate)
        datamodule = H5ImageDataModule(files["train"], val=files["val"], batch_size=BATCH_SIZE)
        checkpoint = folder / "saved_by_two" / f"step-{step:02d}.ckpt"
        make_trainer(max_epochs=2).fit(model, datamodule, ckpt_path=checkpoint)
        done = [batch for steps in (by_step(results, 0) + by_step(results, 1))[:step] for batch in steps]
        order = single.trained_by_epoch[0] + single.trained_by_epoch[1]
        assert flat(done) + flat([batch for _, batch in model.trained]) == order, f"resumed after step {step}"


# ddp_spawn ---------------------------------------------------------------------------------------------------


def test_a_datamodule_is_sent_to_spawned_ranks(spawned):
    results = spawned.ok("spawned_fit")
    assert len({result["process"] for result in results}) == 2
    validated = {sample for result in results for _, batch in result["evaluated"]["validate"] for sample in batch}
    assert len(validated) == round(NUM_TRAIN / 4)
    for epoch in range(2):
        trained = flat(by_step(results, epoch))
        assert sorted(trained) == sorted(set(range(NUM_TRAIN)) - validated)
