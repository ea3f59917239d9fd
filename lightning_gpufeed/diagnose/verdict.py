"""Why a step waits: counters -> one cause, the figures that say so, cures with their predicted gain. Pure.

The order of the questions is that of a careful engineer with top and htop::

    do epochs wait for workers to start?                                     epoch start
    does the step wait for data?
      no   is it the copy, the other ranks, the host's own code?              else: compute-bound
      yes  do readers read more bytes than they deliver?                      read amplification
           are there more of them than cores, and do they queue?              too many workers
           do they sleep while the step waits for them?                       disk-bound
           do they sleep although it hardly waits?                            uneven batches
           could more of them run?                                            too few workers
           do they undo compression?                                          decode-bound
           does user time go into work beyond conversion?                     transform-bound
           do they deliver floats made of 8-bit numbers?                      conversion on the host
           does the kernel do most of the work?                               kernel-bound
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_gpufeed.diagnose import cures, figures, shares
from lightning_gpufeed.diagnose.counters import EpochCounters
from lightning_gpufeed.diagnose.judgement import Cause, Verdict
from lightning_gpufeed.diagnose.load_model import LoadModel

__all__ = ["judge", "worst_rank"]

BOUND_SHARE = 0.05
"""A step that waits less than this is not made faster by a loader."""
_COPY_SHARE = 0.15
_COPIED_BYTES = 64 << 10
_SYNC_SHARE = 0.10
_HOST_SHARE = 0.15
AMPLIFICATION = 2.2
"""Bytes read per byte delivered, in the stored type. Values of twice the width, delivered narrow, read 2.0."""
_WORKER_SECONDS = 1e-3
"""What handing a batch over from a worker may cost."""
_READING_SHARE = 0.15
_QUEUE_SHARE = 0.5
_ASLEEP_SHARE = 0.5
_SLOW_SHARE = 0.25
_RECEIVE_SHARE = 0.5
_READY_SHARE = 0.5
_LARGE_BYTES = 256 << 10
_UNEVEN_SHARE = 0.15
_BUSY_SHARE = 0.5
_FULL_SHARE = 0.8
_START_SHARE = 0.1
_DECODE_SECONDS, _DECODE_SHARE = 3e-9, 0.3
"""What filters take for a byte, about; the share of the work from which on it is decoding."""
_FREE_CORES_SHARE = 0.75
"""Where readers and training take less than this of the cores, more readers find one."""
_SATURATED_SHARE = 0.7
_PYTHON_SECONDS = 150e-6
_WIDENED_SHARE = 0.5
_CONVERT_SHARE = 0.2


def judge(counters: EpochCounters, others: Sequence[EpochCounters] = ()) -> Verdict:
    """Say what the steps of an epoch wait for.

    Args:
        counters: Of the rank to judge, see `worst_rank`.
        others: Those of all other ranks.

    Returns:
        The verdict. Without a single step it is "compute-bound" with a note that nothing was measured.
    """
    if not counters.steps.num_steps or counters.steps.elapsed_seconds <= 0:
        return Verdict(Cause.COMPUTE, 0.0, notes=("no step was measured",))
    model = LoadModel(counters)
    is_bound = counters.steps.wait_share >= BOUND_SHARE
    if shares.start_share(counters) >= max(_START_SHARE, counters.steps.wait_share) and not counters.is_first:
        cause = Cause.START
    else:
        cause, share = _cause_inside(counters, others)
        if is_bound and share < counters.steps.wait_share:
            cause = _cause_of_waiting(counters, model)
    return Verdict(
        cause=cause,
        wait_share=counters.steps.wait_share,
        figures=figures.figures_for(cause, counters, model, others),
        cures=cures.cures_for(cause, counters, model),
        notes=figures.notes_for(cause, counters, others),
        free_echo_factor=model.free_echo_factor if is_bound else None,
    )


def worst_rank(ranks: Sequence[EpochCounters]) -> tuple[EpochCounters, tuple[EpochCounters, ...]]:
    """The rank that waits for data most: all others wait for it.

    Args:
        ranks: Of all ranks, at least one.

    Returns:
        That one and the others.
    """
    worst = max(ranks, key=lambda one: (one.steps.data_seconds, -one.rank))
    return worst, tuple(one for one in ranks if one is not worst)


def _cause_inside(counters: EpochCounters, others: Sequence[EpochCounters]) -> tuple[Cause, float]:
    """What a step does but wait for data and compute, and the share of the time that this takes."""
    steps = counters.steps
    # Hooks around the transfer of next to nothing are no copy.
    is_copied = counters.batch.num_bytes >= _COPIED_BYTES
    told = {
        Cause.COPY: (steps.share(steps.copy_seconds) if is_copied else 0.0, _COPY_SHARE),
        Cause.SYNC: (shares.sync_share(counters, others), _SYNC_SHARE),
        Cause.HOST: (steps.share(shares.host_seconds(counters)), _HOST_SHARE),
    }
    cause = max(told, key=lambda one: told[one][0] / told[one][1])
    share, least = told[cause]
    return (cause, share) if share >= least else (Cause.COMPUTE, 0.0)


def _cause_of_waiting(counters: EpochCounters, model: LoadModel) -> Cause:
    """Why the loader is slower than the step."""
    if is_amplified(counters):
        return Cause.AMPLIFICATION
    usage, loader, cores = counters.readers, counters.loader, counters.machine.num_cores
    if not loader.is_ahead:
        return _cause_between_steps(counters, model)
    if usage is None or usage.wall_seconds <= 0:
        return Cause.LOADER
    if loader.num_workers > math.ceil(cores) and _is_crowded(counters):
        return Cause.TOO_MANY_WORKERS
    if (usage.share(usage.asleep_seconds) or 0.0) >= _ASLEEP_SHARE:
        ready = shares.ready_share(counters)
        is_ready = ready is not None and ready >= _READY_SHARE
        return _cause_of_taking(counters) if is_ready else _cause_of_sleep(counters)
    if not loader.is_own and loader.num_workers < math.floor(cores) and _has_free_cores(counters):
        return Cause.TOO_FEW_WORKERS
    if usage.queue_seconds is None and usage.busy_seconds < _BUSY_SHARE * usage.wall_seconds:
        return Cause.LOADER  # waiting for a core, or asleep: the kernel does not say
    return _cause_of_work(counters, model)


def _cause_between_steps(counters: EpochCounters, model: LoadModel) -> Cause:
    """Batches are loaded by the training thread, when it asks for them."""
    usage = counters.readers
    asleep = usage.share(usage.asleep_seconds) if usage is not None else None
    if asleep is not None and asleep >= _ASLEEP_SHARE:
        return Cause.DISK
    queue = usage.share(usage.queue_seconds) if usage is not None else None
    if queue is not None and queue >= _QUEUE_SHARE:
        return Cause.COMPUTE if counters.steps.wait_share < _SLOW_SHARE else Cause.LOADER
    # A worker has its price: where loading costs less than handing a batch over, it is no cure.
    if model.wait >= _WORKER_SECONDS and cures.are_workers_worth_it(counters, model):
        return Cause.TOO_FEW_WORKERS
    if usage is None:
        return Cause.LOADER
    return _cause_of_work(counters, model) if counters.steps.wait_share >= _SLOW_SHARE else Cause.COMPUTE


def _cause_of_taking(counters: EpochCounters) -> Cause:
    """Batches are mostly ready, and taking them takes the time."""
    batch, waits = counters.batch, counters.steps.wait_share
    if waits < _UNEVEN_SHARE:
        return Cause.COMPUTE
    if not counters.loader.num_workers:
        return Cause.UNEVEN
    if batch.num_bytes < _LARGE_BYTES:
        return Cause.HANDOVER
    if waits < _SLOW_SHARE:
        return Cause.UNEVEN
    return Cause.CONVERSION if batch.widened_bytes >= _WIDENED_SHARE * batch.num_bytes else Cause.KERNEL


def _cause_of_sleep(counters: EpochCounters) -> Cause:
    """Readers sleep most of the time: for storage, or because their queue is full."""
    # Readers that are too slow on average hardly ever find their queue full, and a step that is blocked this much is so
    # because they are; taking over what they have made is another matter.
    waits, receives = counters.steps.wait_share, shares.receive_share(counters)
    is_slow = waits - receives >= _SLOW_SHARE or shares.ready_share(counters) is not None
    if is_slow or shares.has_storage_sign(counters):
        return Cause.DISK
    if waits < _UNEVEN_SHARE:
        return Cause.COMPUTE
    is_handing = counters.loader.num_workers and receives >= _RECEIVE_SHARE * waits and waits >= _SLOW_SHARE
    return Cause.KERNEL if is_handing else Cause.UNEVEN


def _is_crowded(counters: EpochCounters) -> bool:
    """Whether readers keep each other from the cores."""
    usage, loader = counters.readers, counters.loader
    assert usage is not None
    queue = usage.share(usage.queue_seconds)
    if queue is not None:
        return queue >= _QUEUE_SHARE
    used = (usage.share(usage.busy_seconds) or 0.0) * loader.num_workers
    return used >= _FULL_SHARE * counters.machine.num_cores


def _cause_of_work(counters: EpochCounters, model: LoadModel) -> Cause:
    """What the readers spend their time on a core for."""
    usage, batch, parts, loader = counters.readers, counters.batch, model.parts, counters.loader
    assert usage is not None
    is_widened = batch.widened_bytes >= _WIDENED_SHARE * batch.num_bytes > 0
    if loader.is_own:  # no user's code runs in it
        if not all(one.is_direct for one in loader.files):
            return Cause.DECODE
        return Cause.CONVERSION if is_widened else Cause.LOADER
    busy = parts.busy if parts is not None else 0.0
    if any(one.filters for one in loader.files) and batch.compact_bytes * _DECODE_SECONDS >= _DECODE_SHARE * busy:
        return Cause.DECODE
    # Without unit costs all of it is "other", and says nothing.
    has_costs = parts is not None and counters.machine.costs is not None
    does_more = has_costs and parts is not None and parts.other > 0.6 * parts.busy
    is_transforming = does_more or not is_widened
    if has_costs and parts is not None and loader.files and batch.num_samples:
        # HDF5's own work for a sample, and Python's, is no transform.
        is_transforming &= parts.other > _PYTHON_SECONDS * batch.num_samples
    if usage.user_seconds > usage.system_seconds and is_transforming:
        return Cause.CPU
    if has_costs and parts is not None:
        is_widened &= parts.convert + 0.75 * parts.ship >= _CONVERT_SHARE * parts.busy
    return Cause.CONVERSION if is_widened else Cause.KERNEL


def is_amplified(counters: EpochCounters) -> bool:
    """Whether samples are read along with many others that they share a chunk with.

    Args:
        counters: Of an epoch.

    Returns:
        True if the bytes say so; of one's own loader, if the layout and the order do.
    """
    ratio, usage = shares.amplification(counters), counters.readers
    if ratio is not None and ratio > AMPLIFICATION and usage is not None:
        # Whole files and pages are read for small samples in other formats too, where it is seldom what costs most; and
        # so it is where next to no work is the kernel's.
        least = _READING_SHARE if counters.loader.files else 0.5
        return usage.system_seconds >= least * usage.busy_seconds
    return any(
        one.chunk_samples > AMPLIFICATION and not one.is_direct and one.order == "full"
        for one in counters.loader.files
        if counters.loader.is_own
    )


def _has_free_cores(counters: EpochCounters) -> bool:
    """Whether more readers would find a core, and the ones there are have no time left."""
    usage, main, loader = counters.readers, counters.main, counters.loader
    assert usage is not None
    watched = usage.wall_seconds / loader.num_readers
    used = usage.busy_seconds + (main.busy_seconds if main is not None else 0.0)
    # One that is on a core, or wants to be, most of the time has none to spare.
    is_saturated = usage.busy_seconds + (usage.queue_seconds or 0.0) >= _SATURATED_SHARE * usage.wall_seconds
    return is_saturated and used < _FREE_CORES_SHARE * counters.machine.num_cores * watched
