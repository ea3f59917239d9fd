"""`RayOutOfOrderStrategy` in two workers of a real Ray on this machine, and the examples about Ray.

Ray runs in a process of its own (`ray_worker.py`), once for all trainings; what each of them came to is compared here.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_gpufeed
from tests.datamodules.models import write_images
from tests.scripts import start_script

LIMIT_SECONDS = 300
pytestmark = pytest.mark.timeout(LIMIT_SECONDS + 20)

ROOT = Path(__file__).parents[2]
NUM_SAMPLES = 50

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra [ray]")


def run(script: Path, *arguments: str, folder: Path) -> str:
    """Run a script to its end, give what it printed; nothing that it has started is left."""
    logs = [folder / "out.txt", folder / "err.txt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = start_script([str(script), *arguments], folder=folder, environment=environment, outputs=[logs])
    try:
        code = running.wait(LIMIT_SECONDS)
    finally:
        running.kill()
    assert code == 0, logs[1].read_text()
    return logs[0].read_text()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all trainings."""
    folder = tmp_path_factory.mktemp("ray")
    write_images(folder / "train.h5", NUM_SAMPLES)
    run(Path(__file__).parent / "ray_worker.py", str(folder), folder=folder)
    return json.loads((folder / "ended.json").read_text())


@pytest.fixture(scope="module")
def ranks(ended: dict[str, Any]) -> list[dict[str, Any]]:
    """What each worker found, by name of the training."""
    return ended["ranks"]


def same_end(ranks: list[dict[str, Any]], name: str, other: str) -> bool:
    """Whether two trainings ended with the same bits on both workers."""
    keys = ("weights", "optimizer", "logged", "steps")
    return all(rank[name][key] == rank[other][key] for rank in ranks for key in keys)


@needs_ray
@pytest.mark.parametrize("name", ["auto", "given"])
def test_two_workers_of_ray_end_with_the_bits_of_rays_own_strategy(ranks, name):
    assert ranks[0][name]["strategy"] == "RayOutOfOrderStrategy"
    assert same_end(ranks, name, "ddp")
    assert [rank[name]["seen"] for rank in ranks] == [rank["ddp"]["seen"] for rank in ranks]


@needs_ray
def test_each_worker_has_its_share_and_all_have_every_sample_once(ranks):
    per_epoch = len(ranks[0]["given"]["seen"]) // 3
    for epoch in range(3):
        first, second = (
            [one for batch in rank["given"]["seen"][epoch * per_epoch :][:per_epoch] for one in batch] for rank in ranks
        )
        assert len(first) == len(second) == 20
        assert len({*first, *second}) == 40


@needs_ray
def test_a_step_that_waits_for_all_gradients_has_the_same_bits_too(ranks):
    assert same_end(ranks, "clipped", "clipped, ddp")


@needs_ray
@pytest.mark.parametrize("name", ["resumed", "resumed by ddp"])
def test_a_checkpoint_from_the_middle_of_an_epoch_goes_on_to_the_same_end(ranks, name):
    assert same_end(ranks, name, "given")
    for rank in ranks:
        assert rank[name]["seen"] == rank["given"]["seen"][6:]


@needs_ray
def test_a_worker_that_was_killed_is_started_again_from_the_last_checkpoint_and_ends_the_same(ended, ranks):
    assert ended["died"]
    assert [rank["broken"]["began in epoch"] for rank in ranks] == [2, 2]
    assert same_end(ranks, "broken", "given")
    for rank in ranks:
        assert rank["broken"]["seen"] == rank["given"]["seen"][10:]
    assert ended["reported"]["step"] == 15
    assert ended["reported"]["loss_epoch"] == ranks[0]["given"]["logged"]["loss_epoch"]


@needs_ray
def test_a_pipeline_of_workers_computes_what_one_process_does_on_the_same_microbatches(ended, ranks):
    for rank in ranks:
        assert rank["pipeline"]["strategy"] == "RayPipelineStrategy"
        assert rank["pipeline"]["weights"] == rank["pipeline"]["by hand"]
    assert ended["pickled"] == "RayPipelineStrategy"


@needs_ray
def test_both_workers_of_a_pipeline_have_every_sample(ranks):
    first, second = (rank["pipeline"]["seen"] for rank in ranks)
    assert first == second
    assert len({one for batch in first[:10] for one in batch}) == 40


@needs_ray
def test_data_echo_and_monitor_give_the_same_training_as_under_rays_own_strategy(ranks):
    assert same_end(ranks, "together", "together, ddp")
    assert ranks[0]["together"]["steps"] == 60
    assert ranks[1]["together"]["seen"] == ranks[1]["together, ddp"]["seen"]


@needs_ray
def test_recovery_that_has_nothing_to_do_leaves_rays_own_strategy_as_it_is(ranks):
    assert same_end(ranks, "recovery", "ddp")


REFUSED = {
    "no environment": "RuntimeError: Invalid cluster environment plugin",
    "neither prepared": "ValueError: RayOutOfOrderStrategy found LightningEnvironment; expected RayLightning",
    "pipeline, neither": "ValueError: RayPipelineStrategy found LightningEnvironment; expected RayLightning",
    "not Ray's": "RuntimeError: Invalid strategy class",
    "recovery": "ValueError: OOMRecovery cannot work here: RayOutOfOrderStrategy sends gradients while backward still",
    "three stages": "ValueError: pipeline_size is 3, and there are 2 workers; expected a multiple of it. Change Scal",
}
REFUSED_OUTSIDE = {
    "outside": "RuntimeError: `get_",  # `... cannot be used outside of a Ray Train training function`
    "backend": "ValueError: process_group_backend: Ray starts the workers and opens their process group; expected it",
    "start": "ValueError: start_method: Ray starts the workers and opens their process group; expected it",
    "options of both": "ValueError: reverse_first_k, cross_iteration, bucket_bytes, overlap_clipping and verify_every",
}


@needs_ray
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_every_worker(ranks, case):
    for rank in ranks:
        assert rank["refused"][case].startswith(REFUSED[case])


@needs_ray
@pytest.mark.parametrize("case", REFUSED_OUTSIDE)
def test_what_cannot_work_is_refused_before_ray_starts(ended, case):
    assert ended["outside"][case].startswith(REFUSED_OUTSIDE[case])


def test_without_ray_the_error_names_the_extra(monkeypatch):
    for name in ("ray", "ray.train", "ray.train.lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    path = Path(lightning_gpufeed.__file__).parent / "strategies" / "ray.py"
    with pytest.raises(ImportError, match=re.escape("pip install 'lightning_gpufeed[ray]'")):
        runpy.run_path(str(path))


def test_ray_is_imported_in_one_place_only():
    imports = re.compile(r"^\s*(from|import) ray\b", re.MULTILINE)
    package = Path(lightning_gpufeed.__file__).parent
    found = [path.relative_to(package).as_posix() for path in package.rglob("*.py") if imports.search(path.read_text())]
    assert found == ["strategies/ray.py"]


@needs_ray
def test_the_example_of_ray_train_ends_with_equal_bits(tmp_path):
    output = run(ROOT / "examples" / "ray_train.py", folder=tmp_path)
    assert "parameters are equal bit by bit to those of RayDDPStrategy" in output


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of MNIST's kind, so small that they are learned in seconds."""
    folder = tmp_path_factory.mktemp("fashion")
    rng = np.random.default_rng(0)
    for split, count in (("train", 600), ("t10k", 20)):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = rng.integers(0, 50, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), labels * 2 + 3] = 255
        for name, array in ((f"{split}-images-idx3-ubyte.gz", images), (f"{split}-labels-idx1-ubyte.gz", labels)):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / name).write_bytes(gzip.compress(header + array.tobytes(), 1))
    return folder


@needs_ray
def test_the_example_of_ray_tune_finds_a_rate_that_learns_in_each_of_three_ways(fashion, tmp_path):
    searchers = ["random", "grid", "bayesian"]
    arguments = ["--quick", "--searcher", *searchers, "--data", str(fashion)]
    output = run(ROOT / "examples" / "ray_tune.py", *arguments, folder=tmp_path)
    for searcher in searchers:
        table, _, output = output.partition(f"best of 4 ({searcher}): ")
        found = [float(number) for number in re.findall(r"[12] of 2 .* ([\d.]+) %", table)]
        assert len(found) == 4
        assert found == sorted(found, reverse=True)
        assert re.match(r"lr=[\d.e-]+, echo_factor=\d, batch_size=\d+, reverse_first_k=\d: ", output)
        assert found[0] > 80
