"""What the counters amount to: a few numbers that verdicts, cures and loggers share. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_gpufeed.diagnose.counters import EpochCounters
from lightning_gpufeed.diagnose.judgement import Verdict

__all__ = [
    "amplification",
    "has_storage_sign",
    "host_seconds",
    "item_bytes",
    "metrics_of",
    "ready_share",
    "receive_share",
    "spare_share",
    "start_share",
    "sync_share",
    "taken_by_others",
]

_FEWEST_BYTES = 64 << 10
_PRESSURE_SHARE = 0.1


def amplification(counters: EpochCounters) -> float | None:
    """Bytes read for each byte delivered, counted in the type that is stored, where that is known.

    Args:
        counters: Of an epoch.

    Returns:
        1 for a file read sample by sample; None if unknown, or so little that messages between processes count.
    """
    usage, batch = counters.readers, counters.batch
    if (
        counters.read_ratio is None
        or usage is None
        or (usage.read_bytes or 0) < _FEWEST_BYTES * counters.num_watched_steps
    ):
        return None
    stored = batch.num_bytes
    if any(item_bytes(one.dtype) == 1 for one in counters.loader.files):
        stored = batch.compact_bytes
    return counters.read_ratio * batch.num_bytes / max(1, stored)


def item_bytes(dtype: str | None) -> int | None:
    """Bytes of one element.

    Args:
        dtype: As numpy names it.

    Returns:
        None if that is not known.
    """
    try:
        return np.dtype(dtype).itemsize if dtype else None
    except (TypeError, ValueError, SyntaxError):  # compound types
        return None


def sync_share(counters: EpochCounters, others: Sequence[EpochCounters]) -> float:
    """Share of the time that ranks wait for each other, as far as it shows.

    Args:
        counters: Of one rank.
        others: Of the others.

    Returns:
        Of the rank that waits for others most; 0 for one rank. Where a device computes, waiting for other ranks
        inside a step is part of its work and does not show.
    """
    # What others wait because this rank waits for its own data is no synchronisation.
    waits = counters.steps.wait_share
    return max(0.0, _own_sync_share(counters), *(_own_sync_share(one) - waits for one in others))


def _own_sync_share(counters: EpochCounters) -> float:
    steps = counters.steps
    if counters.num_ranks < 2:
        return 0.0
    asked = steps.sync_seconds or 0.0
    if steps.idle_seconds is not None:
        return steps.share(min(asked, max(0.0, steps.idle_seconds - steps.data_seconds)))
    # Reducing gradients on the host, a rank is off its core while it waits for the others.
    on_core = steps.compute_seconds if steps.compute_cpu_seconds is None else steps.compute_cpu_seconds
    thread, queued = counters.training_thread, 0.0
    if thread is not None and counters.num_main_steps:
        queued = (thread.queue_seconds or 0.0) / counters.num_main_steps * steps.num_steps
    return steps.share(asked + max(0.0, steps.compute_seconds - on_core - queued))


def start_share(counters: EpochCounters) -> float:
    """Share of the epoch that goes by before its first batch, because workers are started anew.

    Args:
        counters: Of an epoch.

    Returns:
        0 where there are no workers, or they are kept.
    """
    loader, elapsed = counters.loader, counters.steps.elapsed_seconds
    if not loader.num_workers or loader.is_persistent or elapsed <= 0:
        return 0.0
    return counters.start_seconds / (counters.start_seconds + elapsed)


def receive_share(counters: EpochCounters) -> float:
    """Share of the time that the training thread takes over batches, waiting for a core to do so included.

    Args:
        counters: Of an epoch.

    Returns:
        0 to 1; 0 if unknown, or where it loads itself. At most the share that it waits for data.
    """
    steps, thread = counters.steps, counters.training_thread
    if steps.receive_seconds is None or not counters.loader.is_ahead:
        return 0.0
    queued = 0.0
    if thread is not None and counters.num_main_steps and steps.idle_seconds is None:
        queued = (thread.queue_seconds or 0.0) / counters.num_main_steps * steps.num_steps
    return min(steps.wait_share, steps.share(steps.receive_seconds + queued))


def host_seconds(counters: EpochCounters) -> float:
    """Time in which the device has nothing to do because of the host's own code between the steps.

    Args:
        counters: Of an epoch.

    Returns:
        Seconds of all steps, waiting for data and for other ranks apart. Where the host computes itself, what it
        waited for a core is taken off.
    """
    steps, thread = counters.steps, counters.training_thread
    if steps.idle_seconds is not None:
        idle = max(0.0, steps.idle_seconds - steps.data_seconds)
        return max(0.0, idle - _own_sync_share(counters) * steps.elapsed_seconds)
    queued = 0.0
    if thread is not None and counters.num_main_steps:
        queued = (thread.queue_seconds or 0.0) / counters.num_main_steps * steps.num_steps
    return max(0.0, steps.hook_seconds - queued * steps.share(steps.hook_seconds))


def has_storage_sign(counters: EpochCounters) -> bool:
    """Whether anything but sleep says that readers wait for storage.

    Args:
        counters: Of an epoch.

    Returns:
        False does not say much: network file systems and many virtual machines leave no trace.
    """
    usage = counters.readers
    if (counters.machine.io_pressure or 0.0) >= _PRESSURE_SHARE:
        return True
    if usage is None:
        return False
    fetched = (usage.disk_bytes or 0) + 4096 * (usage.major_faults or 0)  # any process has a few
    return fetched >= max(_FEWEST_BYTES, 0.1 * counters.num_watched_steps * counters.batch.num_bytes)


def ready_share(counters: EpochCounters) -> float | None:
    """Share of the waiting that is for batches which are ready, so for handing them over.

    Args:
        counters: Of an epoch.

    Returns:
        0 to 1; None if the loader does not say whether a batch is ready.
    """
    steps = counters.steps
    if steps.ready_seconds is None or steps.wait_seconds <= 0:
        return None
    return min(1.0, steps.ready_seconds / steps.wait_seconds)


def taken_by_others(counters: EpochCounters) -> float | None:
    """Cores that readers and training leave, although readers wait for one.

    Args:
        counters: Of an epoch.

    Returns:
        Cores that other processes must have; None where readers do not wait for a core, or it is not known.
    """
    usage, main, cores = counters.readers, counters.main, counters.machine.num_cores
    queue = usage.share(usage.queue_seconds) if usage is not None else None
    if usage is None or main is None or main.wall_seconds <= 0 or queue is None or queue < _PRESSURE_SHARE:
        return None
    used = usage.busy_seconds / usage.wall_seconds * counters.loader.num_readers + main.busy_seconds / main.wall_seconds
    return cores - used if used < 0.6 * cores else None


def spare_share(counters: EpochCounters) -> float:
    """Share of the time that readers which are ahead are asleep.

    Args:
        counters: Of an epoch.

    Returns:
        0 to 1; 0 if unknown, or where batches are loaded when they are asked for.
    """
    usage = counters.readers
    asleep = usage.share(usage.asleep_seconds) if usage is not None else None
    return 0.0 if asleep is None or not counters.loader.is_ahead else asleep


def metrics_of(counters: EpochCounters, verdict: Verdict) -> dict[str, float]:
    """Figures for a logger.

    Args:
        counters: Of an epoch.
        verdict: From `judge`.

    Returns:
        Name -> value under `gpufeed/feed/`; what is unknown is left out.
    """
    steps, usage = counters.steps, counters.readers
    values: dict[str, float | None] = {
        "wait_share": verdict.wait_share,
        "step_seconds": steps.step_seconds,
        "copy_share": steps.share(steps.copy_seconds),
        "compute_share": steps.share(steps.compute_seconds),
        "idle_share": None if steps.idle_seconds is None else steps.share(steps.idle_seconds),
        "sync_share": None if steps.sync_seconds is None else steps.share(steps.sync_seconds),
        "hook_share": steps.share(steps.hook_seconds),
        "reader_user_share": usage.share(usage.user_seconds) if usage else None,
        "reader_system_share": usage.share(usage.system_seconds) if usage else None,
        "reader_queue_share": usage.share(usage.queue_seconds) if usage else None,
        "reader_asleep_share": usage.share(usage.asleep_seconds) if usage else None,
        "read_ratio": counters.read_ratio,
        "device_utilisation": counters.machine.device_utilisation,
        "predicted_gain": verdict.cures[0].gain if verdict.cures else 1.0,
        "free_echo_factor": verdict.free_echo_factor,
        "watched_share": 1.0 if steps.num_watched is None else steps.num_watched / steps.num_steps,
    }
    return {f"gpufeed/feed/{name}": float(value) for name, value in values.items() if value is not None}
