"""Every example runs as a user would run it: as a script of its own.

They are started together, for they wait much of the time: for a loader that is slow on purpose, or for imports.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.scripts import RunningScript, start_script

# All of them share the cores, so each may take as long as all.
LIMIT_SECONDS = 240
pytestmark = pytest.mark.timeout(LIMIT_SECONDS + 20)

ROOT = Path(__file__).parents[1]
# What it fetches from outside is replaced: it runs over files of that kind.
DEMO = "fashion_mnist.py"
# A part of another.
APART = ["fetch_fashion_mnist.py"]
# It starts processes of its own, which no other test may find.
WITH_PROCESSES = ["out_of_order.py", "pipeline.py"]
# Those about Ray are run by strategies/test_ray.py, where Ray is.
SCRIPTS = sorted(
    path.name
    for path in (ROOT / "examples").glob("*.py")
    if path.name not in APART and not path.name.startswith("ray_")
)


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of MNIST's kind, so small that they are learned in seconds."""
    folder = tmp_path_factory.mktemp("demo")
    rng = np.random.default_rng(0)
    for split, count in (("train", 600), ("t10k", 200)):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = rng.integers(0, 50, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), labels * 2 + 3] = 255
        write_idx_gz(folder / f"{split}-images-idx3-ubyte.gz", images)
        write_idx_gz(folder / f"{split}-labels-idx1-ubyte.gz", labels)
    return folder


@pytest.fixture(scope="module")
def output_of(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Start all scripts; gives what one of them printed, once it has ended well."""
    logs = tmp_path_factory.mktemp("examples")
    arguments = {DEMO: ["--epochs", "12", "--data", str(demo_folder)]}
    # With tensors this small, and several scripts at once, a team of threads would only wait for its slowest member.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes: dict[str, RunningScript] = {}

    def start(script: str) -> None:
        processes[script] = start_script(
            [str(ROOT / "examples" / script), *arguments.get(script, [])],
            folder=Path.cwd(),
            environment=environment,
            outputs=[[logs / f"{script}.out", logs / f"{script}.err"]],
        )

    def wait(script: str) -> str:
        if script not in processes:
            start(script)
        code = processes[script].wait(LIMIT_SECONDS)
        assert code == 0, (logs / f"{script}.err").read_text()
        return (logs / f"{script}.out").read_text()

    for script in SCRIPTS:
        if script not in WITH_PROCESSES:
            start(script)
    yield wait
    for process in processes.values():
        process.kill()


def write_idx_gz(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes(), 1))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_example_runs(output_of, script):
    assert output_of(script)


def test_the_plain_loop_learns_and_continues_where_it_stopped(output_of):
    output = output_of("plain_pytorch_loop.py")
    losses = [float(number) for number in re.findall(r"epoch \d: loss ([\d.]+)", output)]
    assert losses[-1] < 0.1
    assert "stopped in epoch 3 after 640 samples" in output


def test_the_demo_packs_inspects_and_learns_files_of_mnists_kind(output_of, demo_folder):
    """The demo itself on a small stand-in: what it fetches is replaced, what it does is not."""
    output = output_of(DEMO)
    assert f"found in {demo_folder}" in output
    assert "$ gpufeed pack" in output
    assert "$ gpufeed inspect" in output
    accuracy = float(re.search(r"test accuracy +([\d.]+) %", output)[1])
    assert accuracy > 80
    assert re.search(r"trained at +[\d,]+ samples/s", output)
    assert re.search(r"waited for data +[\d.]+ %", output)


def test_the_training_that_runs_out_of_memory_ends_as_the_one_that_does_not(output_of):
    output = output_of("oom_recovery.py")
    assert re.search(r"step 4 ran out of memory in forward .* what worked: \d+ microbatches", output)
    expected, found = [float(number) for number in re.findall(r"loss ([\d.]+)", output)]
    assert found == pytest.approx(expected, abs=2e-6)  # as it is printed
    # float32 sums in another order, over six batches. A batch that is left out changes 4 %.
    assert float(re.search(r"differ by ([\d.e-]+) of their size", output)[1]) < 1e-5


def test_the_training_that_waits_says_why_and_waits_less_after_the_first_cure(output_of):
    slow, cured = output_of("feed_monitor.py").split("after the first cure")
    assert "read amplification" in slow
    assert "H5DataModule" in slow
    assert "read amplification" not in cured
    before, after = (float(re.search(r"steps in ([\d.]+) s", text)[1]) for text in (slow, cured))
    assert after < before


def test_the_program_of_lightning_cli_goes_on_from_what_it_saved(output_of):
    output = output_of("lightning_cli.py")
    (first, first_epochs), (second, second_epochs) = re.findall(r"(\d+) steps, (\d+) epochs", output)
    assert (first_epochs, second_epochs) == ("2", "4")
    assert int(first) >= 64  # and more where the loader is late, and batches are used again
    assert int(second) >= int(first) + 64
    assert float(re.search(r"accuracy in test: ([\d.]+)%", output)[1]) > 90
