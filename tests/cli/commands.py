"""Small files for the command to work on, and the command as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np

ROOT = Path(__file__).parents[2]

AS_INSTALLED = "import sys; from lightning_gpufeed.cli import main; sys.exit(main())"
"""What the script does that is installed for `gpufeed`."""


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def write_h5(path: str, **arrays: Any) -> None:
    """Write datasets, each given as an array or as an array and h5py's options."""
    with h5py.File(path, "w") as h5_file:
        for key, value in arrays.items():
            data, options = value if isinstance(value, tuple) else (value, {})
            h5_file.create_dataset(key, data=data, **options)


def start(
    *argv: str, pause_seconds: float = 0.0, path: Path = ROOT, script: str = AS_INSTALLED, **options: Any
) -> subprocess.Popen[Any]:
    """Start the command as its own process, as the installed script does."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PAUSE_SECONDS": str(pause_seconds)}
    # A suite that a shell started in the background ignores Ctrl-C, and so would what it starts.
    return subprocess.Popen(
        [sys.executable, "-c", script, *argv],
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def error_of(run: Any, *argv: str) -> str:
    """The one line that a command fails with."""
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("gpufeed: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("gpufeed: error: ").rstrip("\n")
