"""A Ray cluster of this machine alone, for the examples: nothing is sent, nothing is left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # short trainings: how soon Ray sees that one has ended
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",  # on a machine that is busy with other things
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # no cloud takes these machines away, and each actor takes seconds
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "60",  # how long a trial that was ended may take, before the next one starts
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # files that nobody reads
}


@contextmanager
def local_ray(num_cpus: int = 2) -> Iterator[Path]:
    """Start Ray; gives a folder for its results. Both are gone afterwards."""
    # Ray puts sockets into it, whose whole path may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    before = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)  # of another cluster
    os.environ.update(SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32), TMPDIR=str(folder))  # or Ray keeps one at home
    import ray  # now, as it looks at the variables

    try:
        ray.init(
            num_cpus=num_cpus,
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _system_config={"idle_worker_killing_time_threshold_ms": 60_000},  # the next one need not import again
        )
        yield folder / "results"
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)
