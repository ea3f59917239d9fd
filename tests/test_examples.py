"""Every example runs as a user would run it: as a script of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# These need data from outside, or are parts of another.
APART = ["fashion_mnist.py", "fetch_fashion_mnist.py"]


def run(script: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in APART])
def test_the_example_runs(script):
    assert run(script)


def test_the_plain_loop_learns_and_continues_where_it_stopped():
    output = run("plain_pytorch_loop.py")
    losses = [float(number) for number in re.findall(r"epoch \d: loss ([\d.]+)", output)]
    assert losses[-1] < 0.1
    assert "stopped in epoch 3 after 640 samples" in output


def write_idx_gz(path: Path, array) -> None:
    import gzip

    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes(), 1))


def test_the_demo_packs_inspects_and_learns_files_of_mnists_kind(tmp_path):
    """The demo itself on a small stand-in: what it fetches is replaced, what it does is not."""
    import numpy as np

    rng = np.random.default_rng(0)
    for split, count in (("train", 600), ("t10k", 200)):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = rng.integers(0, 50, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), labels * 2 + 3] = 255
        write_idx_gz(tmp_path / f"{split}-images-idx3-ubyte.gz", images)
        write_idx_gz(tmp_path / f"{split}-labels-idx1-ubyte.gz", labels)
    output = run("fashion_mnist.py", "--epochs", "12", "--data", str(tmp_path))
    assert f"found in {tmp_path}" in output
    assert "$ gpufeed pack" in output
    assert "$ gpufeed inspect" in output
    accuracy = float(re.search(r"test accuracy +([\d.]+) %", output)[1])
    assert accuracy > 80
    assert re.search(r"trained at +[\d,]+ samples/s", output)
    assert re.search(r"waited for data +[\d.]+ %", output)
